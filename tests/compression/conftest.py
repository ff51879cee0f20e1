"""The planted checkpoints and what was made of them, each once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compression.planted_pairs import Planted, write_planted_pairs
from moescope.run import Run

SEEDS = (1, pytest.param(2, marks=pytest.mark.slow))
KEPT = 6


@pytest.fixture(scope="session")
def planted_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Planted]:
    made: dict[int, Planted] = {}

    def of(seed: int) -> Planted:
        if seed not in made:
            made[seed] = write_planted_pairs(tmp_path_factory.mktemp(f"pairs-{seed}"), seed)
        return made[seed]

    return of


@pytest.fixture(scope="session", params=SEEDS)
def planted(request: pytest.FixtureRequest, planted_of: Callable[[int], Planted]) -> Planted:
    return planted_of(request.param)


@pytest.fixture(scope="session")
def one_planted(planted_of: Callable[[int], Planted]) -> Planted:
    return planted_of(SEEDS[0])


@pytest.fixture(scope="session")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Run, Path]]:
    """The planted model compressed to six experts and written: the run, and the folder of the checkpoint."""
    import moescope

    made: dict[str, tuple[Run, Path]] = {}

    def of(planted: Planted, method: str, text: bool = True, **more: Any) -> tuple[Run, Path]:
        key = repr((str(planted.folder), method, text, sorted(more.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(method)
            given = {
                "controls": 0,
                "judge": False,
                **({"token_ids": planted.token_ids} if text else {}),
                **more,
            }
            run = moescope.compress(
                planted.folder,
                method=method,
                keep=KEPT,
                apply=folder / "model",
                out=folder / "run",
                quiet=True,
                **given,
            )
            made[key] = run, folder / "model"
        return made[key]

    return of
