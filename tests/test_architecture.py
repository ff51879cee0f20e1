"""The rules of the design, checked on the source itself: imports, torch-free modules, router names, sizes.

Each rule is also run on a small tree that breaks it, to show that it can fail.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "moescope"

# Top to bottom. A part imports what lies below it; sideways only what is listed here.
# A package that verbs.py names and that has no other place is a subject.
SUBJECT = 2
RANKS = [
    {"__init__", "__main__"},
    {"cli"},
    {"weights", "routing", "comparison", "compression", "deployment", "intervention", "lab", "demo"},
    {"reporting", "plotting", "execution"},
    {"spectral", "geometry", "decoder", "families", "run", "engine", "verb", "verbs"},
    {
        "checkpoint",
        "tables",
        "types",
        "statistics",
        "storage",
        "progress",
        "arguments",
        "errors",
        "processor",
    },
]
RANK = {part: rank for rank, parts in enumerate(RANKS) for part in parts}
SIDEWAYS = {
    ("__main__", "__init__"),
    ("reporting", "plotting"),
    ("run", "verb"),  # a run is bound to the record of its verb
    ("run", "verbs"),
    ("verbs", "verb"),
    ("verb", "run"),  # for type checkers only; a cycle otherwise
    ("geometry", "spectral"),  # one rule of numerical rank
    ("families", "verb"),  # inspect is a verb without tables
    ("families", "spectral"),  # inspect times a trial of the decomposition
    ("families", "decoder"),  # the lab's layouts ask routers for their facts
}
# Between subjects: importing module -> imported modules. A name ending in a dot covers the modules below it.
BETWEEN_SUBJECTS = {
    "comparison.verb": ("weights.verb",),  # scans both checkpoints
    "comparison.agreement": ("deployment.tokens",),  # reads the tokens of two traces
    "comparison.report": ("weights.report", "weights.figures_identification"),  # and shows what changed
    "compression.verb": ("comparison.tables",),  # distances within groups, in compare's tables and figures
    "compression.figures": ("comparison.figures",),
    "compression.report": ("comparison.figures", "comparison.tables"),
    # judged on the documents that compress holds out
    "intervention.passes": ("compression.judging",),
    "intervention.steps": ("compression.calibration_text",),
    "intervention.router_changes": ("weights.views",),  # the matrices whose directions scan compares
    # a training is a monitored run that holds a scan and a trace
    "lab.train": ("weights.verb", "routing.trace", "routing.monitor", "routing.report_monitor"),
    "lab.training": ("routing.monitor",),
    "lab.tuning": ("routing.trainer_monitor",),
    "lab.tables": ("routing.tables",),
    "lab.report_training": ("routing.report_monitor",),
    "lab.some_keys": ("routing.load_balance", "routing.metrics"),
    "lab.evaluation": ("routing.stability",),
    "lab.study_routing": (
        *("routing.decision", "routing.load_balance", "routing.metrics", "routing.separation"),
    ),
    "demo.": ("weights.", "routing.", "comparison.", "compression.", "lab."),
}
MOST_LINES = 700
BAD_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "managers", "misc"}
TORCH = {"torch", "transformers", "accelerate", "triton", "safetensors.torch", "peft"}
# A word that is a router's name and also something else: (word, name in the expression it is compared with).
NOT_A_ROUTER = {
    ("some", "block"),  # SoME's decoder block
    ("some", "BLOCKS"),
    ("spectra", "tables"),  # the table
    ("spectra", "needs"),
}


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    where: str  # "top", "function" or "types"


@dataclass(frozen=True)
class Breach:
    module: str
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.module.removeprefix('moescope.')} [{self.rule}]: {self.message}"


@dataclass
class Module:
    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def syntax(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def part(self) -> str:
        """The part of the design it belongs to: moescope.weights.layer -> weights."""
        return part_of(self.name)

    @cached_property
    def imports(self) -> list[Import]:
        package = self.name.split(".") if self.path.name == "__init__.py" else self.name.split(".")[:-1]
        return list(imports_of(self.syntax, package, "top"))


Tree = dict[str, Module]


def read_tree(source: Path) -> Tree:
    """Dotted name -> module, of every module below the package's folder."""
    tree = {}
    for path in sorted(source.rglob("*.py")):
        parts = ["moescope", *path.relative_to(source).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tree[name] = Module(name, path)
    return tree


def imports_of(node: ast.AST, package: list[str], where: str) -> Iterator[Import]:
    """Every import below the node; relative ones spelled out, `from a import b` as a and as a.b."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, where)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        origin = ".".join([*base, *([node.module] if node.module else [])])
        yield Import(origin, node.lineno, where)
        for alias in node.names:
            yield Import(f"{origin}.{alias.name}", node.lineno, where)
    elif isinstance(node, ast.Call) and name_of(node.func) in {"import_module", "__import__"}:
        for text in filter(None, map(constant, node.args[:1])):
            yield Import(text, node.lineno, where)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        where = "function" if where == "top" else where
    for_types = isinstance(node, ast.If) and name_of(node.test) == "TYPE_CHECKING"
    for child in ast.iter_child_nodes(node):
        inside = "types" if for_types and child not in node.orelse else where
        yield from imports_of(child, package, inside)


def name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def constant(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def covers(pattern: str, module: str) -> bool:
    """Whether "lab." or "lab.train" means that module."""
    name = module.removeprefix("moescope.")
    return f"{name}.".startswith(pattern) if pattern.endswith(".") else name == pattern


# --- the rules


def arrows(tree: Tree) -> Iterator[Breach]:
    """Imports go down; sideways and between subjects only what is listed. Imports for types count."""
    rank = {part_of(name): SUBJECT for name in verb_modules(tree)} | RANK
    for module in tree.values():
        if module.part not in rank:
            yield Breach(module.name, "arrows", f"{module.part} has no place in the design")
            continue
        for imported in module.imports:
            if imported.module not in tree or imported.module == "moescope":
                continue  # another library, a name inside a module, or the package's own name
            target = part_of(imported.module)
            if target != module.part and target in rank and not allowed(module, imported.module, rank):
                yield Breach(module.name, "arrows", f"line {imported.line} imports {imported.module}")


def allowed(module: Module, imported: str, rank: dict[str, int]) -> bool:
    own, target = module.part, part_of(imported)
    if own == "cli" and rank[target] == SUBJECT:
        return False  # verbs are imported by name, only the one that is called
    if rank[own] == rank[target] == SUBJECT:
        listed = [targets for pattern, targets in BETWEEN_SUBJECTS.items() if covers(pattern, module.name)]
        # importing weights.verb also names its package
        return any(
            covers(pattern, imported) or f"moescope.{pattern}".startswith(f"{imported}.")
            for targets in listed
            for pattern in targets
        )
    if rank[own] == rank[target]:
        return rank[own] == len(RANKS) - 1 or (own, target) in SIDEWAYS
    return rank[own] < rank[target]


def cycles(tree: Tree) -> Iterator[Breach]:
    """No cycles between modules, through imports at the top or inside functions."""
    edges = {name: set(explicit_imports(module, tree)) for name, module in tree.items()}
    for start in tree:
        paths, seen = [[start]], {start}
        while paths:  # breadth first: the shortest way back
            path = paths.pop(0)
            if start in edges[path[-1]]:
                yield Breach(start, "cycles", " -> ".join([*path, start]))
                break
            for target in sorted(edges[path[-1]] - seen):
                seen.add(target)
                paths.append([*path, target])


def explicit_imports(module: Module, tree: Tree) -> Iterator[str]:
    """Modules that are named in an import. `from package import module` does not name the package itself."""
    by_line: dict[int, list[str]] = {}
    for imported in module.imports:
        if imported.where != "types" and imported.module in tree and imported.module != module.name:
            by_line.setdefault(imported.line, []).append(imported.module)
    for names in by_line.values():
        yield from [name for name in names if not any(other.startswith(f"{name}.") for other in names)]


def torch_free(tree: Tree) -> Iterator[Breach]:
    """Tables, figures, reports, plotting and the modules of verb records do not reach torch."""
    for start in tree:
        if not is_torch_free(start, tree):
            continue
        chains, seen = [[start]], {start}
        while chains:
            chain = chains.pop(0)
            names = [imported.module for imported in tree[chain[-1]].imports if imported.where == "top"]
            reached = [name for name in names if name in TORCH or name.split(".")[0] in TORCH]
            if reached:
                yield Breach(start, "torch", " -> ".join([*chain, reached[0]]))
                break
            for target in [parent for name in names for parent in with_parents(name)]:
                if target in tree and target not in seen:
                    seen.add(target)
                    chains.append([*chain, target])


def with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def is_torch_free(name: str, tree: Tree) -> bool:
    stem = name.split(".")[-1]
    room = stem == "tables" or re.fullmatch(r"(figures|report)(_\w+)?", stem) is not None
    return room or part_of(name) in {"plotting", "reporting"} or name in verb_modules(tree)


def verb_modules(tree: Tree) -> set[str]:
    """The modules that verbs.py names as "module:RECORD"."""
    if "moescope.verbs" not in tree:
        return set()
    texts = [constant(node) or "" for node in ast.walk(tree["moescope.verbs"].syntax)]
    return {text.split(":")[0] for text in texts if re.fullmatch(r"[\w.]+:[A-Z_]+", text)}


def lazy_plotly(tree: Tree) -> Iterator[Breach]:
    """plotly is imported inside functions: a plain ML image has none."""
    for module in tree.values():
        for imported in module.imports:
            if imported.where == "top" and imported.module.split(".")[0] == "plotly":
                yield Breach(module.name, "plotly", f"line {imported.line} imports plotly at the top")
                break


def router_names(tree: Tree) -> Iterator[Breach]:
    """Outside decoder/routers no router's name is compared or looked up: its class has the facts."""
    names = declared_routers(tree)
    for module in tree.values():
        if not covers("decoder.routers.", module.name):
            for line, word in sorted(set(compared_names(module.syntax, names))):
                yield Breach(module.name, "router names", f"line {line} compares {word!r}")


def declared_routers(tree: Tree) -> set[str]:
    """The keys of ROUTERS."""
    if "moescope.decoder.routers" not in tree:
        return set()
    for node in ast.walk(tree["moescope.decoder.routers"].syntax):
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if "ROUTERS" in map(name_of, targets) and isinstance(node.value, ast.Dict):
            return {text for key in node.value.keys if (text := constant(key)) is not None}
    raise AssertionError("decoder/routers/__init__.py has no literal ROUTERS")


def compared_names(syntax: ast.Module, names: set[str]) -> Iterator[tuple[int, str]]:
    literals = {
        name_of(target): node.value
        for node in ast.walk(syntax)
        if isinstance(node, ast.Assign)
        for target in node.targets
    }

    def words(node: ast.AST) -> set[str]:
        """Routers' names that are this constant, in this literal, or in the literal of this name."""
        if isinstance(node, ast.Name):
            node = literals.get(node.id, node)
        if isinstance(node, ast.Call) and name_of(node.func) in {"set", "frozenset"}:
            return set().union(*map(words, node.args))
        if isinstance(node, ast.Dict):
            return set().union(*(words(key) for key in node.keys if key is not None))
        if isinstance(node, ast.Tuple | ast.Set | ast.List):
            return set().union(*map(words, node.elts))
        return {text for text in [constant(node)] if text in names}

    for node in ast.walk(syntax):
        found: set[str] = set()
        beside: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            found = set().union(*map(words, sides))
            beside = [side for side in sides if constant(side) is None]
        elif isinstance(node, ast.MatchValue):
            found = words(node.value)
        elif isinstance(node, ast.Call) and name_of(node.func) in {"startswith", "endswith", "get", "pop"}:
            owner = node.func.value if isinstance(node.func, ast.Attribute) else node.func
            looked_up = [owner] if name_of(node.func) in {"get", "pop"} else node.args
            found = set().union(*map(words, looked_up)) if looked_up else set()
        elif isinstance(node, ast.Subscript):
            found = words(node.value)
        elif isinstance(node, ast.Dict | ast.Set) and len(words(node)) > 1:  # a table by router
            found = words(node)
        parts = [part for side in beside for part in ast.walk(side)]
        mentioned = {*map(name_of, parts), *map(constant, parts)}
        for word in found:
            if not any((word, text) in NOT_A_ROUTER for text in mentioned):
                yield node.lineno if hasattr(node, "lineno") else 0, word


def sizes(tree: Tree) -> Iterator[Breach]:
    """A file has at most 700 lines."""
    for module in tree.values():
        lines = len(module.text.splitlines())
        if lines > MOST_LINES:
            yield Breach(module.name, "size", f"{lines} lines, more than {MOST_LINES}")


def bad_names(tree: Tree) -> Iterator[Breach]:
    """A module's name says what is in it."""
    for module in tree.values():
        if BAD_NAMES & set(module.name.split(".")):
            yield Breach(module.name, "names", "the name says nothing")


def formatting(tree: Tree) -> Iterator[Breach]:
    """Only tables of data are exempt from the formatter and from the line length."""
    for module in tree.values():
        text = re.sub(r"^[\])}]  # fmt: skip$", "", module.text, flags=re.MULTILINE)  # ends a table of data
        exempt = re.search(r"#\s*(fmt: *(skip|off)|ruff: *noqa|noqa: *\S*E501)", text)
        if exempt and module.path.name != "tables.py":
            yield Breach(module.name, "formatting", f"{exempt.group()!r} outside a table of data")


RULES: list[Callable[[Tree], Iterator[Breach]]] = [
    arrows,
    cycles,
    torch_free,
    lazy_plotly,
    router_names,
    sizes,
    bad_names,
    formatting,
]


@pytest.fixture(scope="module")
def source() -> Tree:
    tree = read_tree(SOURCE)
    assert len(tree) > 100, "no source found, so nothing would be checked"
    return tree


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule, source):
    breaches = list(rule(source))
    assert not breaches, "\n" + "\n".join(map(str, breaches))


def test_every_listed_import_between_subjects_is_still_there(source):
    listed = {
        (f"moescope.{module}", f"moescope.{target}")
        for module, targets in BETWEEN_SUBJECTS.items()
        for target in targets
        if not module.endswith(".")
    }
    used = {(module.name, imported.module) for module in source.values() for imported in module.imports}
    assert listed - used == set()


def test_the_tests_keep_the_rules_about_size_and_names():
    tree = {
        str(path.relative_to(ROOT)): Module(".".join(path.relative_to(ROOT).with_suffix("").parts), path)
        for folder in ("tests", "bench")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    breaches = [*sizes(tree), *bad_names(tree)]
    assert not breaches, "\n" + "\n".join(map(str, breaches))


def test_long_lines_are_an_error_everywhere():
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]
    lint = ruff["lint"]
    assert ruff["line-length"] == 110
    assert {"E", "E5", "E501"} & set(lint["select"])
    ignored = {*lint.get("ignore", []), *lint.get("extend-ignore", [])}.union(
        *lint["per-file-ignores"].values()
    )
    assert not [code for code in ignored if "E501".startswith(code)]


# --- every rule can fail

ROUTERS = {"decoder/routers/__init__.py": 'ROUTERS: dict[str, type] = {"hash": H, "dense": D, "spectra": S}'}
BROKEN = {
    "a foundation imports a subject": (
        arrows,
        {"storage.py": "from moescope.lab import train", "lab/train.py": ""},
    ),
    "a relative import upward": (arrows, {"spectral/a.py": "from ..cli import main", "cli.py": ""}),
    "an upward import inside a function": (
        arrows,
        {"families/a.py": "def f():\n    import moescope.lab.train", "lab/train.py": ""},
    ),
    "an upward import for types": (
        arrows,
        {"run.py": "if TYPE_CHECKING:\n    from moescope.lab.train import X", "lab/train.py": ""},
    ),
    "an upward import by its name": (
        arrows,
        {"run.py": "import_module('moescope.lab.train')", "lab/train.py": ""},
    ),
    "shared computation imports sideways": (
        arrows,
        {"spectral/a.py": "import moescope.geometry.b", "geometry/b.py": ""},
    ),
    "a subject imports one that is not listed": (
        arrows,
        {"routing/a.py": "from moescope.lab.train import t", "lab/train.py": ""},
    ),
    "a subject imports more of another than is listed": (
        arrows,
        {"lab/train.py": "from moescope.routing.tally import t", "routing/tally.py": ""},
    ),
    "the command line imports a verb": (
        arrows,
        {"cli.py": "import moescope.weights.verb", "weights/verb.py": ""},
    ),
    "a package without a place": (arrows, {"glossary/a.py": ""}),
    "two modules import each other": (
        cycles,
        {"lab/a.py": "from moescope.lab.b import x", "lab/b.py": "import moescope.lab.a"},
    ),
    "a cycle through a function": (
        cycles,
        {
            "run.py": "def f():\n    from moescope import verbs",
            "verbs.py": "from .verb import V",
            "verb.py": "import moescope.run",
        },
    ),
    "a member imports the list it is in": (
        cycles,
        {
            "families/__init__.py": "from moescope.families.x import X",
            "families/x.py": "from . import FAMILIES",
        },
    ),
    "tables import torch": (torch_free, {"weights/tables.py": "import torch"}),
    "a figure reaches torch": (
        torch_free,
        {"lab/figures_a.py": "from moescope.lab.b import x", "lab/b.py": "from torch import nn"},
    ),
    "a package's file brings torch": (
        torch_free,
        {"lab/report.py": "import moescope.types.x", "types/__init__.py": "import torch", "types/x.py": ""},
    ),
    "reporting brings torch along with another library": (
        torch_free,
        {"reporting/a.py": "import transformers.models"},
    ),
    "a verb's module imports torch": (
        torch_free,
        {"verbs.py": 'VERBS = [("scan", "moescope.weights.verb:VERB")]', "weights/verb.py": "import torch"},
    ),
    "plotly at the top": (lazy_plotly, {"plotting/style.py": "from plotly import graph_objects"}),
    "a router's name is compared": (router_names, {**ROUTERS, "lab/a.py": 'if router == "hash": pass'}),
    "a router's name is compared in reverse": (
        router_names,
        {**ROUTERS, "lab/a.py": 'x = "dense" != model.router'},
    ),
    "a router's name is looked for": (router_names, {**ROUTERS, "lab/a.py": 'x = router in ("hash", "x")'}),
    "a router's name is in a constant": (
        router_names,
        {**ROUTERS, "lab/a.py": 'NO_ROWS = frozenset({"hash"})\nx = router not in NO_ROWS'},
    ),
    "a router's name is a case": (router_names, {**ROUTERS, "lab/a.py": 'match r:\n    case "hash": pass'}),
    "a router's name is a key": (
        router_names,
        {**ROUTERS, "lab/a.py": 'TOP = {"dense": 1}\nx = TOP[router]'},
    ),
    "a router's name is a key with a default": (
        router_names,
        {**ROUTERS, "lab/a.py": 'TOP = {("slice", "dense"): 1}\nx = TOP.get((y, router))'},
    ),
    "a table by router": (router_names, {**ROUTERS, "lab/a.py": 'TOP = {"dense": 1, "hash": 2}'}),
    "a router's name is a prefix": (
        router_names,
        {**ROUTERS, "lab/a.py": 'x = router.startswith("spectra")'},
    ),
    "a long file": (sizes, {"lab/a.py": "x = 1\n" * 701}),
    "a name that says nothing": (bad_names, {"lab/utils.py": ""}),
    "a folder whose name says nothing": (bad_names, {"common/__init__.py": ""}),
    "an exempt line": (formatting, {"lab/a.py": "x = 1  # fmt: skip"}),
    "an exempt block": (formatting, {"lab/a.py": "# fmt: off"}),
    "a line that may be long": (formatting, {"lab/a.py": "x = 1  # noqa: E501"}),
}
SOUND = {
    **ROUTERS,
    "__init__.py": "if TYPE_CHECKING:\n    from moescope.lab.train import train",
    "cli.py": "from moescope.verbs import VERBS",
    "verbs.py": 'VERBS = [("scan", "moescope.weights.verb:VERB"), ("new", "moescope.new.verb:VERB")]',
    "new/verb.py": "from moescope.plotting.style import x",
    "plotting/style.py": "",
    "verb.py": "if TYPE_CHECKING:\n    from moescope.run import Run",
    "run.py": "import moescope\nfrom moescope.verb import Verb\nfrom moescope.verbs import VERBS",
    "tables.py": "import pandas\nX = 1  # fmt: skip",
    "types.py": "import torch",
    "errors.py": "",
    "families/__init__.py": "from moescope.families.x import X",
    "families/x.py": "from . import layout",
    "families/layout.py": "from moescope.types import LayerWeights",
    "weights/tables.py": "from moescope.tables import Table",
    "weights/layer.py": 'import torch\nx = "spectra" in tables, block == "some"\nz = {"hash": digest}',
    "weights/figures.py": "def draw():\n    import plotly",
    "weights/verb.py": "from .tables import T\ndef scan():\n    from moescope.weights.layer import x",
    "lab/train.py": "from moescope.weights.verb import scan",
    "demo/verb.py": "from moescope.lab.train import train",
}


def fake_tree(folder: Path, files: dict[str, str]) -> Tree:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return read_tree(folder)


@pytest.mark.parametrize("case", BROKEN)
def test_a_rule_fails_where(case, tmp_path):
    rule, files = BROKEN[case]
    assert list(rule(fake_tree(tmp_path, files)))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_sound_tree_passes(rule, tmp_path):
    assert [str(breach) for breach in rule(fake_tree(tmp_path, SOUND))] == []


def test_every_data_file_of_the_package_is_shipped():
    """A wheel holds only what pyproject.toml names: without a script the installed report would be blank."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["moescope"]
    package = ROOT / "src" / "moescope"
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    data = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert data
    assert data <= shipped, sorted(str(path) for path in data - shipped)
