"""The design's rules about who may import whom, enforced on the source itself.

And shown to be able to fail.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "moescope"

# Top to bottom; a part may import from its own rank only where that rank is named in SIDEWAYS.
RANKS = [
    {"__init__", "__main__"},
    {"cli"},
    {"demo", "lab", "compression", "comparison", "weights", "routing", "reporting", "figures", "execution"}
    | {"decoder", "families", "run", "spectral", "geometry", "plotting", "engine"}
    | {"arguments", "progress", "statistics"},  # one rank until the tree has settled
    {"checkpoint", "tables", "glossary", "types", "storage", "errors"},
]
RANK = {part: rank for rank, parts in enumerate(RANKS) for part in parts}
SIDEWAYS = {
    RANK["families"],
    RANK["tables"],
    RANK["__main__"],
}  # foundations may lean on each other; compute packages may not
MOST_LINES = 700
BAD_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "managers", "misc"}
TORCHLESS = ("reporting", "figures")  # a report is rebuilt on a laptop without torch
LAZY_ONLY = "plotly"


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    lazy: bool  # inside a function, or for type checkers only


def imports(path: Path, module: str) -> Iterator[Import]:
    """Every import in the file, wherever it stands; relative ones spelled out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield Import(origin, node.lineno, lazy)
            for alias in node.names:  # `from moescope import spectral` imports a module too
                yield Import(f"{origin}.{alias.name}", node.lineno, lazy)
        elif isinstance(node, ast.Call) and name_of(node.func) in {"import_module", "__import__"}:
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield Import(argument.value, node.lineno, lazy)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        checking = isinstance(node, ast.If) and name_of(node.test) == "TYPE_CHECKING"
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside or (checking and child not in node.orelse))

    yield from walk(tree, False)


def name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def modules(source: Path) -> dict[str, Path]:
    """Dotted name -> file, of every module below the package's folder."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = ["moescope", *path.relative_to(source).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def part_of(module: str) -> str:
    """The part of the design a module belongs to: moescope.weights.layer -> spectral."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


def violations(source: Path) -> list[str]:
    """Every breach of the design below that folder, one line each."""
    found = []
    tree = modules(source)
    for module, path in tree.items():
        where = path.relative_to(source)
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES:
            found.append(f"{where}: {lines} lines, more than {MOST_LINES}")
        own = part_of(module)
        if own not in RANK:
            found.append(f"{where}: {own} has no place in the design")
            continue
        for imported in imports(path, module):
            top = imported.module.split(".")[0]
            at = f"{where}:{imported.line}: {own}"
            if top == "moescope":
                found += [f"{at} {breach}" for breach in arrow_breach(own, imported, tree)]
            elif own in TORCHLESS and top == "torch":
                found.append(f"{at} imports torch")
            elif own in TORCHLESS and top == LAZY_ONLY and not imported.lazy:
                found.append(f"{at} imports {LAZY_ONLY} at its top, not where it draws")
    for path in sorted(source.rglob("*")):
        if path.stem.lower() in BAD_NAMES:
            found.append(f"{path.relative_to(source)}: the name says nothing")
    return found + [f"{part} reaches torch: {' -> '.join(chain)}" for part, chain in torch_chains(tree)]


def arrow_breach(own: str, imported: Import, tree: dict[str, Path]) -> list[str]:
    part = part_of(imported.module)
    if part == "__init__" or (imported.module not in tree and part not in RANK):
        return []  # the package itself, or a name in it that is no module
    if part == own or part not in RANK:
        return [] if part == own else [f"imports {part}, which has no place in the design"]
    if RANK[part] < RANK[own]:
        return [f"imports upward: {part}"]
    if RANK[part] == RANK[own] and RANK[own] not in SIDEWAYS:
        return [f"imports sideways: {part}"]
    return []


def torch_chains(tree: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Chains of imports at the top of modules that lead from a torchless part to torch."""
    eager = {
        module: [imported.module for imported in imports(path, module) if not imported.lazy]
        for module, path in tree.items()
    }
    for start in tree:
        if part_of(start) not in TORCHLESS:
            continue
        chains, seen = [[start]], {start}
        while chains:
            chain = chains.pop()
            for module in eager[chain[-1]]:
                if module.split(".")[0] == "torch" and len(chain) > 1:
                    yield part_of(start), [*chain, module]
                elif module in tree and module not in seen:
                    seen.add(module)
                    chains.append([*chain, module])


def test_the_source_keeps_to_the_design():
    assert len(modules(SOURCE)) > 10, "no source found, so nothing was checked"
    assert violations(SOURCE) == []


def test_nothing_says_that_the_tests_or_the_tree_may_hold_shapeless_names():
    tests = [path for path in Path(__file__).parent.rglob("*") if "__pycache__" not in path.parts]
    assert [path for path in tests if path.stem.lower() in BAD_NAMES] == []
