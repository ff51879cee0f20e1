"""Figures that were published or that earlier versions drew: each is still reachable."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pandas as pd
import pytest

from moescope.errors import BadInput
from moescope.lab.figures import LOSS_BY_RUN
from moescope.plotting.marks import QUANTITY
from moescope.run import REPLACED
from moescope.verbs import OTHERS, VERBS, load_verb

GOLDEN = Path(__file__).parent / "golden"
LISTED = tomllib.loads((GOLDEN / "figures.toml").read_text())
PUBLISHED, EARLIER = LISTED["figure"], LISTED["earlier"].split()
FIGURES = [*(spec for name in [*(verb[0] for verb in VERBS), *OTHERS] for spec in load_verb(name).figures)]
FIGURES.append(LOSS_BY_RUN)  # of several trainings


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda one: f"{one['file']}-{one['figure']}")
def test_published_numbers_have_a_figure(published, request):
    assert set(published["columns"]) <= set(pd.read_csv(GOLDEN / published["file"], nrows=0))
    spec = load_verb(published["verb"]).figure(published["figure"])
    assert spec is not None
    if spec.pages == QUANTITY:
        assert set(published["pages"]) <= set(spec.values)
    if not published["run"]:
        return
    run = request.getfixturevalue(published["run"])
    for page in published["pages"]:
        drawn = run.draw(published["figure"], quantity=page)
        assert drawn.data
        if page:
            label = spec.described.label(page) if spec.pages == QUANTITY else page
            assert drawn.slider.values[drawn.slider.start] == label


def test_every_published_file_is_named():
    assert {one["file"] for one in PUBLISHED} == {file.name for file in GOLDEN.glob("*.csv")}


def test_every_earlier_figure_is_drawn_is_a_page_or_names_its_replacement():
    assert len(set(EARLIER)) == 170
    names = {spec.name for spec in FIGURES}
    pages = {was for spec in FIGURES for was in spec.was}
    assert set(EARLIER) <= names | pages | set(REPLACED)
    assert not set(REPLACED) & (names | pages)


@pytest.mark.parametrize("name", REPLACED)
def test_a_removed_figure_names_what_to_use_instead(planted_run, name):
    with pytest.raises(BadInput) as caught:
        planted_run.figure(name)
    assert str(caught.value) == f"figure {name} was removed; {REPLACED[name]}"
