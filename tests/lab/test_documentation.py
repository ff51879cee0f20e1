"""docs/lab.md says what the code does."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch

from decoder.tiny_lab import text, tiny
from moescope.decoder.config import ModelConfig
from moescope.decoder.model import LabModel
from moescope.decoder.routers import ROUTERS
from moescope.decoder.routers.spectra import ABLATIONS
from moescope.lab.claims import read_claims
from moescope.lab.config import PRESETS, BaseConfig, DataConfig, TrainConfig
from moescope.lab.study_config import study_from
from moescope.routing.metrics import DIAGNOSTICS
from moescope.types import Routing
from moescope.verb import documented_parameters

DOCS = Path(__file__).parents[2] / "docs"
LINES = (DOCS / "lab.md").read_text(encoding="utf-8").splitlines()


def rows(lines: list[str], heading: str) -> list[list[str]]:
    """The cells of the first table under that heading, without its head and without backticks."""
    start = lines.index(heading)
    first = next(at for at, line in enumerate(lines[start:]) if line.startswith("|"))
    table = []
    for line in lines[start + first :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return table[2:]


def test_the_site_has_every_router_option_key_and_preset_with_its_meaning():
    sys.path.insert(0, str(DOCS))
    try:
        from lab_tables import render
    finally:
        sys.path.remove(str(DOCS))
    lines = render((DOCS / "lab.md").read_text(encoding="utf-8")).splitlines()
    routers = {row[0]: row[2] == "yes" for row in rows(lines, "## Routers")}
    assert routers == {name: kind.causal_in_training for name, kind in ROUTERS.items()}
    options = rows(lines, "## Router options")
    for name, router in ROUTERS.items():
        said = {row[0]: row[2] for row in options if name in row[1].split(", ")}
        assert said == {option: str(default).lower() for option, default in router.OPTIONS.items()}
    for heading, part in (
        ("## Model", ModelConfig()),
        ("## Data", DataConfig()),
        ("## Training", TrainConfig()),
    ):
        keys = rows(lines, heading)
        assert {row[0]: row[2] for row in keys} == {
            key: "" if default in (None, (), {}) else str(default).lower()
            for key, default in asdict(part).items()
        }
        assert all(row[3] for row in keys)
    assert [row[0] for row in rows(lines, "## Presets")] == list(PRESETS)
    assert all(row[-1] for row in options)


@pytest.mark.parametrize("record", [ModelConfig, DataConfig, TrainConfig, BaseConfig, *ROUTERS.values()])
def test_a_record_documents_no_key_that_it_does_not_have(record):
    known = set(record.OPTIONS) if hasattr(record, "OPTIONS") else {part.name for part in fields(record)}
    assert set(documented_parameters(record)) <= known


def test_every_ablation_is_documented_as_it_is_written_in_a_config():
    said = {row[0]: tomllib.loads(row[1]) for row in rows(LINES, "## Ablations")}
    assert said == ABLATIONS


def test_diagnostics_of_a_router_are_metrics():
    recorded = set()
    for router in ROUTERS:
        torch.manual_seed(0)
        layers: list[Routing] = []
        LabModel(tiny(router)).train()(text(2, 8), consume=layers.append)
        recorded |= set(layers[0].diagnostics)
    assert recorded == set(DIAGNOSTICS)


def shown_toml(number: int) -> str:
    """The page's TOML block of that number, from 0."""
    start = [at for at, line in enumerate(LINES) if line == "```toml"][number]
    return "\n".join(LINES[start + 1 : LINES.index("```", start)])


def test_the_study_that_is_shown_can_be_studied():
    assert len(study_from(tomllib.loads(shown_toml(0))).arms) == 9


def test_the_claims_that_are_shown_can_be_read(tmp_path):
    (tmp_path / "results.toml").write_text(shown_toml(1))
    file = read_claims(tmp_path / "results.toml")
    assert [claim.id for claim in file.claims] == ["H1"]
    assert [check.quantity.study for check in file.checks] == [("routers_large",)]
