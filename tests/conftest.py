"""What every test runs under, its subprocesses too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from moescope.run import Run

# The matrices of the tests are tiny: threads that wait for each other cost more than they bring. Before torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Subprocesses test this source tree, not one that happens to be installed.
SOURCE = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def planted_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The planted checkpoint scanned, raw and centered: the truth most tests of figures and reports look at."""
    from moescope.planted import write_planted
    from moescope.workflows.scan import scan

    folder = tmp_path_factory.mktemp("planted")
    write_planted(folder / "planted-mixtral", seed=0)
    return scan(folder / "planted-mixtral", out=folder / "run", router="raw,centered", quiet=True)


@pytest.fixture(scope="session")
def traced_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two checkpoints of a tiny model traced on two domains in both phases, every token kept."""
    from moescope.workflows.trace import trace
    from routing.tiny_text import save_model, texts, write_jsonl

    folder = tmp_path_factory.mktemp("traced")
    models = [save_model(folder / "checkpoint-100"), save_model(folder / "checkpoint-200", nudge=0.05)]
    plain = write_jsonl(folder / "plain.jsonl", texts(30, seed=0, words=25))
    other = write_jsonl(folder / "other.jsonl", texts(30, seed=1, first=25, words=25))
    domains = [f"plain={plain}", f"other={other}"]
    return trace(*models, domain=domains, out=folder / "run", phase="both", save_tokens=True, quiet=True)
