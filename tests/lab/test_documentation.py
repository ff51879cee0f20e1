"""docs/lab.md says what the code does."""

from __future__ import annotations

import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from decoder.tiny_lab import text, tiny
from moescope.decoder.config import ModelConfig
from moescope.decoder.model import LabModel, parameter_counts
from moescope.decoder.routers import ROUTERS
from moescope.decoder.routers.spectra import ABLATIONS
from moescope.lab.config import PRESETS, DataConfig, TrainConfig
from moescope.lab.study_config import KEYS, study_from
from moescope.routing.metrics import DIAGNOSTICS
from moescope.types import Routing

LINES = (Path(__file__).parents[2] / "docs" / "lab.md").read_text(encoding="utf-8").splitlines()


def rows(heading: str, head: str = "|") -> list[list[str]]:
    """The cells of the first table under that heading whose head begins so, its head left out.

    Without backticks.
    """
    start = LINES.index(heading)
    first = next(at for at, line in enumerate(LINES[start:]) if line.startswith(head))
    table = []
    for line in LINES[start + first :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return table[2:]


def test_every_router_is_documented_with_its_causality():
    said = {row[0]: row[3] == "yes" for row in rows("## Routers")}
    assert said == {name: kind.causal_in_training for name, kind in ROUTERS.items()}


@pytest.mark.parametrize("router", list(ROUTERS))
def test_every_option_is_documented_with_its_default(router):
    said = {row[1]: row[2] for row in rows("## Options") if router in row[0].split(", ")}
    assert said == {name: str(default).lower() for name, default in ROUTERS[router].OPTIONS.items()}


def test_every_ablation_is_documented_as_it_is_written_in_a_config():
    said = {row[0]: tomllib.loads(row[1]) for row in rows("## Ablations of SPECTRA")}
    assert said == ABLATIONS


def test_every_note_is_documented_under_its_router():
    said = [(row[0], row[1]) for row in rows("## Router diagnostics")]
    assert sorted(note for _, note in said) == sorted(DIAGNOSTICS)
    for router in {router for router, _ in said}:
        torch.manual_seed(0)
        layers: list[Routing] = []
        LabModel(tiny(router)).train()(text(2, 8), consume=layers.append)
        assert set(layers[0].diagnostics) == {note for of, note in said if of == router}


def test_every_preset_is_documented_with_its_shape_and_parameters():
    said = {row[0]: row[1:] for row in rows("## Presets")}
    assert list(said) == list(PRESETS)
    for name, config in PRESETS.items():
        model, counts = config.model, parameter_counts(config.model)
        shape = [model.d_model, model.layers, model.experts, model.d_ff, model.top_k]
        parameters = [f"{count / 1e6:.2f} M" for count in (counts.total, counts.trainable)]
        assert said[name] == [model.block, *map(str, shape), model.router, *parameters]


@pytest.mark.parametrize(
    ("heading", "part"),
    [("## Model", ModelConfig()), ("## Data", DataConfig()), ("## Training", TrainConfig())],
)
def test_every_key_of_model_data_and_training_is_documented_with_its_default(heading, part):
    said = {row[0]: row[1] for row in rows(heading)}
    assert said == {
        name: str(default or "none").lower() if isinstance(default, tuple | dict) else str(default).lower()
        for name, default in asdict(part).items()
    }


def test_every_key_of_a_study_is_documented():
    assert {row[0] for row in rows("## Studies", "| key |")} | {"base"} == set(KEYS)


def test_the_study_that_is_shown_can_be_studied():
    start = LINES.index("```toml")
    shown = "\n".join(LINES[start + 1 : LINES.index("```", start)])
    assert len(study_from(tomllib.loads(shown)).arms) == 9
