"""Damaged and hostile input of every kind is exit code 0, or one line and exit code 2."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from faults import targets
from faults.fuzz import GIGABYTES, Outcome, fuzz, peak, run_case
from faults.targets import TARGETS, Bases


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Bases:
    return Bases.make(tmp_path_factory.mktemp("faults") / "bases")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_undamaged_input_is_accepted(bases, tmp_path, monkeypatch, target):
    for name in ("damage_file", "damage_cells"):
        monkeypatch.setattr(targets, name, lambda chance, file: None)
    monkeypatch.setattr(targets, "hostile_options", lambda chance, verb: [])
    for seed in range(6 if target.name == "trace --recorded" else 2):
        assert run_case(target, str(seed), bases, tmp_path / "case", Outcome(), Counter()) is None


def check(seed: int, cases: int, bases: Bases, place: Path) -> None:
    before = peak()
    outcomes = fuzz(seed, cases, bases, place)
    assert [failure for outcome in outcomes.values() for failure in outcome.failures] == []
    assert sum(outcome.counted for outcome in outcomes.values()) >= cases
    assert peak() - before < GIGABYTES
    for target in TARGETS:
        outcome = outcomes[target.name]
        assert outcome.counted >= target.reached * outcome.cases, target.name


def test_sixty_damaged_inputs(bases, tmp_path):
    check(1, 60, bases, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_five_hundred_damaged_inputs_or_ten_thousand(bases, tmp_path, torture, seed):
    check(seed, 2000 if torture else 100, bases, tmp_path)
