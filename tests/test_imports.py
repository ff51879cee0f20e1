"""What verbs import before their work starts."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import moescope
from moescope.verbs import OTHERS, VERBS
from routing.tiny_text import save_model, texts, write_jsonl

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path for folder in ("bench", "docs", "studies") for path in (ROOT / folder).rglob("*.py"))
HEAVY = {"torch", "plotly", "pandas", "numpy", "scipy", "pyarrow", "safetensors", "transformers"}
# drawing, other machines, clustering: none of them is needed to compute
NEVER = {"plotly", "ray", "sklearn", "scipy.cluster", "scipy.stats"}
MODULES = {place.partition(":")[0] for place in [*(place for _, _, place in VERBS), *OTHERS.values()]}
STEPS = """
import json, sys

def loaded():
    print(json.dumps(list(sys.modules)), file=sys.stderr)

def command(*words):
    sys.argv = ["moescope", *words]
    try:
        main()
    except SystemExit:
        loaded()

import moescope
from moescope.cli import main
command("--help")
command("--version")
command("scan", "--help")
command("scan", "--nonsense")
from moescope.verbs import OTHERS, VERBS, load_verb
for name in [*(name for name, *_ in VERBS), *OTHERS]:
    load_verb(name)
import moescope.reporting.page
loaded()
"""


def imported_by(source: str) -> list[set[str]]:
    """Run a program in a fresh interpreter; return the modules of each line that it prints to stderr."""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stderr.splitlines() if line.startswith("[")]


def test_help_waits_for_no_heavy_import_and_a_report_reaches_every_verb_without_torch():
    shown, version, help_of_scan, wrong, report = imported_by(STEPS)
    assert {"moescope.cli", "typer"} <= shown
    assert shown.isdisjoint(HEAVY | MODULES)
    assert version.isdisjoint(HEAVY | MODULES)
    assert (help_of_scan | wrong).isdisjoint({"torch", "plotly", "transformers"})
    assert report >= MODULES
    assert report.isdisjoint({"torch", "transformers", "plotly"})


def test_scan_imports_no_transformers_and_nothing_that_draws(tmp_path):
    shipped = Path(moescope.__file__).parent / "demo" / "shipped" / "model"
    imported = imported_by(
        "import json, sys, moescope\n"
        f"moescope.scan({str(shipped)!r}, out={str(tmp_path / 'run')!r}, device='cpu', quiet=True)\n"
        "print(json.dumps(list(sys.modules)), file=sys.stderr)"
    )[-1]
    assert {"torch", "moescope.weights.verb"} <= imported
    needed = {"scipy.cluster"}  # puts related experts side by side
    assert imported.isdisjoint((NEVER - needed) | {"transformers", "accelerate", "datasets"})


def test_trace_imports_nothing_that_draws_before_its_pass(tmp_path):
    model = save_model(tmp_path / "model")
    text = write_jsonl(tmp_path / "text.jsonl", texts(12, seed=0))
    imported = imported_by(
        "import json, sys\n"
        "sys.modules['sklearn'] = None\n"  # not to be found: transformers 5.20 itself imports it where it is
        "import moescope\nfrom moescope.execution import collect\n"
        "def run_batch(*arguments):\n"
        "    names = [name for name, module in sys.modules.items() if module]\n"
        "    print(json.dumps(names), file=sys.stderr)\n    sys.exit()\n"
        "collect.run_batch = run_batch\n"
        f"moescope.trace({str(model)!r}, text={str(text)!r}, out={str(tmp_path / 'run')!r}, device='cpu', "
        "quiet=True)"
    )[-1]
    assert {"torch", "transformers"} <= imported
    assert imported.isdisjoint(NEVER | {"datasets"})


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_that_a_script_imports_from_the_package_exist(path):
    """Measurements and studies run seldom: a function that moved would be missed."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moescope"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
