"""The comparison of two traces: which columns lead, and which are no change of a model."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from moescope.comparison.verb import compare
from moescope.plotting.style import number
from moescope.routing.trace import trace


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Two recorded traces of 8 experts: even routing, and routing to few experts."""
    folder = tmp_path_factory.mktemp("traces")
    runs = []
    for name, skew in (("a", 0.0), ("b", 1.5)):
        rng = np.random.default_rng(3)
        share = np.exp(-skew * np.arange(8))
        rows = [
            {"document": document, "position": position, "layer": layer, "domain": f"d{document % 2}"}
            | {"token_id": position % 7, "experts": rng.choice(8, 2, replace=False, p=share / share.sum())}
            for document in range(24)
            for position in range(20)
            for layer in range(2)
        ]
        pd.DataFrame(rows).to_parquet(folder / f"{name}.parquet")
        file = str(folder / f"{name}.parquet")
        runs.append(trace(recorded=file, experts=8, out=folder / name, quiet=True))
    return runs, compare(*runs, out=folder / "compared")


def test_ids_maps_and_contexts_are_no_changes(compared):
    runs, both = compared
    assert "contexts" in runs[0].tables or "maps" in runs[0].tables
    assert not {change["table"] for change in both.info["changes"]} & {"contexts", "maps", "vocabulary"}
    assert not {change["column"] for change in both.info["changes"]} & {"token_id", "position", "x", "y"}
    assert "\n" not in "".join(both.verb.summary(both).findings)


def test_load_and_domain_information_lead_with_the_means_of_both_traces(compared):
    runs, both = compared
    found = both.verb.summary(both)
    tables = [run.table("routing_layers") for run in runs]
    leading = {"cv": "Load CV", "domain_information": "Domain information"}
    for place, (metric, name) in enumerate(leading.items()):
        means = [table.loc[table["metric"] == metric, "value"].mean() for table in tables]
        key = found.key_numbers[place]
        assert key.name.startswith(name)
        assert (key.chance, key.value) == pytest.approx(tuple(means))
        assert found.findings[place].startswith(f"{name}: ")
        assert all(number(mean) in found.findings[place] for mean in means)


def test_tile_and_figure_name_the_same_largest_change(compared):
    both = compared[1]
    tile = next(key for key in both.verb.summary(both).key_numbers if key.name.startswith("Largest"))
    (bars,) = both.draw("largest_changes").data
    assert tile.name == f"Largest change: {bars['y'][-1]}"
    assert tile.value == pytest.approx(max(bars["x"]))


def test_two_traces_are_compared_in_the_words_of_the_metric_catalogue(compared):
    both = compared[1]
    shown = {change["column"]: change["label"] for change in both.info["changes"]}
    assert shown["cv"] == "CV"
    assert shown["max_over_mean"] == "max/mean"
    summary = both.verb.summary(both)
    words = [
        *summary.findings,
        *(key.name for key in summary.key_numbers),
        *both.draw("largest_changes").data[0]["y"],
    ]
    assert not [text for text in words if re.search(r"[a-z]_[a-z]", text)]
