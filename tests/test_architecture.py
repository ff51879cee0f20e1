"""The rules of the design, checked on the source itself: imports, torch-free modules, router names, and more.

Each rule is also run on a small tree that breaks it, to show that it can fail.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from moescope.verbs import VERBS, load_verb

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
    "comparison.report": ("weights.report", "weights.figures"),  # and shows what changed
    "compression.verb": ("comparison.tables",),  # distances within groups, in compare's tables and figures
    "compression.figures": ("comparison.figures",),
    "compression.report": ("comparison.figures", "comparison.tables"),
    "compression.folding": ("routing.counts",),  # which experts tokens choose
    "intervention.passes": ("routing.counts",),
    "intervention.steps": ("routing.counts",),
    "intervention.kinds": ("weights.views",),  # the matrices whose directions scan compares
    # a training is a monitored run that holds a scan and a trace
    "lab.train": ("weights.verb", "routing.trace", "routing.monitor", "routing.report_monitor"),
    "lab.training": ("routing.monitor",),
    "lab.tuning": ("routing.trainer_monitor",),
    "lab.tables": ("routing.tables",),
    "lab.report_training": ("routing.report_monitor",),
    "lab.trained_routing": (
        *("routing.counts", "routing.load_balance", "routing.metrics"),
        *("routing.separation", "routing.stability"),
    ),
    "demo.": ("weights.", "routing.", "comparison.", "compression.", "lab."),
}
LISTS = ("tables.py", "figures.py", "report.py")  # of columns, figures and sentences: one per line
DELETING = {"rmtree", "unlink", "removedirs"}
BAD_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "managers", "misc"}
TORCH = {"torch", "transformers", "accelerate", "triton", "safetensors.torch", "peft"}
COMPUTING = ("statistics.", "spectral.", "scipy.", "torch.")
PAPERS = {"A4", "B1", "B2", "B3", *(f"H{number}" for number in range(1, 8))}
# A word that is a router's name and also something else, or a default: (part or module, word).
NOT_A_ROUTER = {
    ("weights", "spectra"),  # the table
    ("moescope.decoder.config", "some"),  # the decoder block
    ("moescope.decoder.config", "top2"),  # the default
    ("moescope.execution.texts", "hash"),
    ("moescope.lab.config", "some"),  # presets
    ("moescope.lab.config", "topk"),
    ("moescope.lab.tuning", "dense"),  # the folder of a control
}
# Statements per part, docstrings not counted: what was reached, and 3 %. Raising one needs a line in
# docs/decisions/project.md that says what was deleted elsewhere.
BUDGETS = {
    "checkpoint": 1196,
    "comparison": 458,
    "compression": 2246,
    "decoder": 1713,
    "demo": 118,
    "deployment": 1334,
    "execution": 3304,
    "families": 927,
    "geometry": 362,
    "intervention": 1552,
    "lab": 4330,
    "plotting": 928,
    "reporting": 775,
    "root": 2122,
    "routing": 3734,
    "spectral": 1244,
    "weights": 1092,
}
MOST_OPTIONS = 78  # names of options over all verbs; a new one replaces one


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


def is_room(name: str, rooms: str) -> bool:
    """Whether the module is lab.figures or lab.figures_losses, of the rooms "figures"."""
    return re.fullmatch(rf"({rooms})(_\w+)?", name.split(".")[-1]) is not None


def is_torch_free(name: str, tree: Tree) -> bool:
    room = name.endswith(".tables") or is_room(name, "figures|report")
    return room or part_of(name) in {"plotting", "reporting"} or name in verb_modules(tree)


def verb_modules(tree: Tree) -> set[str]:
    """The modules that verbs.py names as "module:RECORD"."""
    if "moescope.verbs" not in tree:
        return set()
    texts = [constant(node) or "" for node in ast.walk(tree["moescope.verbs"].syntax)]
    return {text.split(":")[0] for text in texts if re.fullmatch(r"[\w.]+:[A-Z_]+", text)}


def computed_nowhere(tree: Tree) -> Iterator[Breach]:
    """Figures and reports show columns: none imports what computes numbers, also not inside a function."""
    for module in tree.values():
        if not (is_room(module.name, "figures|report") or module.part in {"plotting", "reporting"}):
            continue
        for imported in module.imports:
            if any(covers(pattern, imported.module) for pattern in COMPUTING):
                message = f"line {imported.line} imports {imported.module}"
                yield Breach(module.name, "figures compute nothing", message)


def lazy_plotly(tree: Tree) -> Iterator[Breach]:
    """plotly is imported inside functions: a plain ML image has none."""
    for module in tree.values():
        for imported in module.imports:
            if imported.where == "top" and imported.module.split(".")[0] == "plotly":
                yield Breach(module.name, "plotly", f"line {imported.line} imports plotly at the top")
                break


def router_names(tree: Tree) -> Iterator[Breach]:
    """Outside decoder/routers no constant is a router's name, or an arm's or a hypothesis' of a paper."""
    names = declared_routers(tree) | PAPERS
    for module in tree.values():
        if covers("decoder.routers.", module.name):
            continue
        for node in ast.walk(module.syntax):
            word = constant(node)
            if word in names and not {(part, word) for part in (module.part, module.name)} & NOT_A_ROUTER:
                yield Breach(f"{module.name}:{node.lineno}", "router names", f"names {word!r}")


def declared_routers(tree: Tree) -> set[str]:
    """The keys of ROUTERS."""
    if "moescope.decoder.routers" not in tree:
        return set()
    for node in ast.walk(tree["moescope.decoder.routers"].syntax):
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if "ROUTERS" in map(name_of, targets) and isinstance(node.value, ast.Dict):
            return {text for key in node.value.keys if (text := constant(key)) is not None}
    raise AssertionError("decoder/routers/__init__.py has no literal ROUTERS")


def deletions(tree: Tree) -> Iterator[Breach]:
    """Only storage deletes files: what it removes lies inside a run, and no link is followed."""
    for module in tree.values():
        if module.part == "storage":
            continue
        for node in ast.walk(module.syntax):
            if isinstance(node, ast.Attribute) and node.attr in DELETING:
                yield Breach(f"{module.name}:{node.lineno}", "deletions", f"{node.attr}: use storage.remove")


def bad_names(tree: Tree) -> Iterator[Breach]:
    """A module's name says what is in it."""
    for module in tree.values():
        if BAD_NAMES & set(module.name.split(".")):
            yield Breach(module.name, "names", "the name says nothing")


def formatting(tree: Tree) -> Iterator[Breach]:
    """Only lists of columns and of specs are exempt from the formatter and from the line length."""
    for module in tree.values():
        text = re.sub(r"^[\])}]  # fmt: skip$", "", module.text, flags=re.MULTILINE)  # ends a table of data
        exempt = re.search(r"#\s*(fmt: *(skip|off)|ruff: *noqa|noqa: *\S*E501)", text)
        if exempt and module.path.name not in LISTS:
            yield Breach(module.name, "formatting", f"{exempt.group()!r} outside {', '.join(LISTS)}")


RULES: list[Callable[[Tree], Iterator[Breach]]] = [
    arrows,
    cycles,
    torch_free,
    computed_nowhere,
    lazy_plotly,
    router_names,
    deletions,
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


def test_the_tests_keep_the_rule_about_names():
    tree = {
        str(path.relative_to(ROOT)): Module(".".join(path.relative_to(ROOT).with_suffix("").parts), path)
        for folder in ("tests", "bench")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    breaches = list(bad_names(tree))
    assert not breaches, "\n" + "\n".join(map(str, breaches))


def statements(module: Module) -> int:
    """Number of statements, docstrings not counted."""
    return sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(constant(node.value), str))
        for node in ast.walk(module.syntax)
    )


def test_every_part_keeps_its_budget_of_statements(source):
    parts = Counter()
    for module in source.values():
        package = module.path.parent.relative_to(SOURCE).parts
        parts[package[0] if package else "root"] += statements(module)
    assert parts.keys() == BUDGETS.keys()
    over = {part: f"{count} of {BUDGETS[part]}" for part, count in parts.items() if count > BUDGETS[part]}
    assert not over


def test_statements_are_counted_without_docstrings(tmp_path):
    text = "'About.'\nclass A:\n    'About.'\n    def f(self):\n        if self:\n            return 1\n"
    assert statements(fake_tree(tmp_path, {"a.py": text})["moescope.a"]) == 4


def test_the_verbs_keep_the_number_of_option_names():
    assert len({option.name for name, *_ in VERBS for option in load_verb(name).options}) <= MOST_OPTIONS


def test_long_lines_are_an_error_outside_lists_of_columns_and_specs():
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]
    lint = ruff["lint"]
    assert ruff["line-length"] == 110
    assert {"E", "E5", "E501"} & set(lint["select"])
    assert not [
        code for code in [*lint.get("ignore", []), *lint.get("extend-ignore", [])] if "E501".startswith(code)
    ]
    exempt = [
        path for path, codes in lint["per-file-ignores"].items() if any("E501".startswith(c) for c in codes)
    ]
    assert sorted(exempt) == sorted(f"src/moescope/*/{name}" for name in LISTS)


# --- every rule can fail

ROUTERS = {"decoder/routers/__init__.py": 'ROUTERS: dict[str, type] = {"hash": H, "dense": D, "spectra": S}'}
TRAIN = {"lab/train.py": ""}
BROKEN = {
    "a foundation imports a subject": (arrows, {"storage.py": "from moescope.lab import train"} | TRAIN),
    "a relative import upward": (arrows, {"spectral/a.py": "from ..cli import main", "cli.py": ""}),
    "an upward import inside a function": (
        arrows,
        {"families/a.py": "def f():\n    import moescope.lab.train"} | TRAIN,
    ),
    "an upward import for types": (
        arrows,
        {"run.py": "if TYPE_CHECKING:\n    from moescope.lab.train import X"} | TRAIN,
    ),
    "an upward import by its name": (arrows, {"run.py": "import_module('moescope.lab.train')"} | TRAIN),
    "shared computation imports sideways": (
        arrows,
        {"spectral/a.py": "import moescope.geometry.b", "geometry/b.py": ""},
    ),
    "a subject imports one that is not listed": (
        arrows,
        {"routing/a.py": "from moescope.lab.train import t"} | TRAIN,
    ),
    "a subject imports more of another than is listed": (
        arrows,
        {"lab/train.py": "from moescope.routing.counts import c", "routing/counts.py": ""},
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
    "a figure estimates": (
        computed_nowhere,
        {"lab/figures_a.py": "def draw():\n    from moescope.statistics import paired", "statistics.py": ""},
    ),
    "a report decomposes": (computed_nowhere, {"lab/report.py": "from scipy.linalg import svd"}),
    "plotly at the top": (lazy_plotly, {"plotting/style.py": "from plotly import graph_objects"}),
    "a router's name is compared": (router_names, {**ROUTERS, "lab/a.py": 'if router == "hash": pass'}),
    "a router's name is a case": (router_names, {**ROUTERS, "lab/a.py": 'match r:\n    case "hash": pass'}),
    "a table by router": (router_names, {**ROUTERS, "lab/a.py": 'TOP = {"dense": 1, "hash": 2}'}),
    "a deletion outside storage": (deletions, {"lab/a.py": "import shutil\ndef f(p):\n    shutil.rmtree(p)"}),
    "an arm of a paper": (router_names, {**ROUTERS, "lab/a.py": 'ARMS = ["B1"]'}),
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
    "weights/layer.py": 'import torch\nx = "spectra" in tables',
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
