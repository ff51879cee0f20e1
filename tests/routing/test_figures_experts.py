"""Maps of experts: drawn of whatever a trace holds, sized by load, and honest about what is missing."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from plotly.graph_objects import Figure as PlotlyFigure

from moescope.routing.counts_to_tables import expert_cosine_columns
from moescope.routing.expert_maps import expert_maps
from moescope.routing.figures_experts import MAPS, SUBJECTS, expert_map, missing_maps
from moescope.routing.report_views import load_trace, routing_views
from moescope.routing.tables import TABLES

N = 12


@pytest.fixture(scope="module")
def tables(traced_run):
    return routing_views(load_trace(traced_run))[-1].tables


def wide(layers: int = 2, blurred: float = 1.0) -> dict[str, pd.DataFrame]:
    """Twelve experts per layer whose router rows are three groups; expert 5 has no mean output.

    `blurred` multiplies the cosines of router rows in all layers but layer 1.
    """
    generator = np.random.default_rng(0)
    frames, loads = [], []
    for layer in range(layers):
        rows = np.eye(64)[np.arange(N) % 3] + 0.05 * generator.standard_normal((N, 64))
        outputs = np.where(np.arange(N)[:, None] == 5, np.nan, generator.standard_normal((N, 64)))
        for of, vectors in (("router", rows), ("outputs", outputs)):
            columns = expert_cosine_columns(of, vectors)
            columns["cosine"] = columns["cosine"] * (blurred if of == "router" and layer != 1 else 1)
            frames.append(pd.DataFrame({"step": 0, "layer": layer, "layer_name": "moe", **columns}))
        loads.append(
            pd.DataFrame({"layer": layer, "expert": range(N), "tokens": np.arange(N) * 10, "domain": "text"})
        )
    pairs = pd.DataFrame(columns=[*TABLES["coactivation"].columns])
    maps = expert_maps({"expert_cosines": pd.concat(frames), "coactivation": pairs}, ("pca", "tsne"))
    return {"maps": maps, "load": pd.concat(loads)}


def drawable(tables: dict[str, pd.DataFrame]) -> list[str]:
    return [spec.name for spec in MAPS if spec.can_draw(tables)]


def test_every_subject_is_mapped_from_a_trace_and_passes_plotly(tables):
    specs = [spec for spec in MAPS if spec.can_draw(tables)]
    assert [spec.name for spec in specs] == [f"expert_map_{subject.of}_pca" for subject in SUBJECTS]
    (missing,) = missing_maps(tables)
    assert "8 experts" in missing
    for spec in specs:
        figure = spec.draw(tables)
        PlotlyFigure({"data": figure.data, "layout": figure.layout})
        assert "nan" not in figure.caption
        assert "PCA" in figure.title
        assert figure.caption.count("%") == 4


def test_with_enough_experts_tsne_is_drawn_too_and_the_way_to_more_is_said():
    tables = wide()
    assert drawable(tables) == [
        f"expert_map_{of}_{by}" for of in ("router", "outputs") for by in ("pca", "tsne")
    ]
    assert ["co-activation" in line for line in missing_maps(tables)] == [True, False]
    assert "--maps umap" in missing_maps(tables)[1]
    figure = next(spec for spec in MAPS if spec.name == "expert_map_router_tsne").draw(tables)
    assert figure.title == "Map of experts by router rows, t-SNE"
    assert figure.layout["xaxis"]["title"]["text"] == "t-SNE 1"


def test_a_trace_without_maps_says_how_to_make_them():
    tables = wide()
    tables["maps"] = tables["maps"].iloc[:0]
    assert drawable(tables) == []
    (line,) = missing_maps(tables)
    assert "--overwrite" in line


def test_groups_of_router_rows_are_seen_and_sizes_are_loads():
    figure = expert_map(SUBJECTS[0], "pca", wide())
    first = figure.data[0]
    x, y = np.asarray(first["x"]), np.asarray(first["y"])
    apart = np.hypot(x[:, None] - x, y[:, None] - y) + np.diag(np.full(N, np.inf))
    assert (apart.argmin(axis=1) % 3 == np.arange(N) % 3).all()
    assert first["customdata"] == pytest.approx(np.arange(N) / 5.5, abs=1e-3)
    assert first["marker"]["size"] == sorted(first["marker"]["size"])


def test_all_methods_open_at_the_layer_with_most_on_its_plane():
    tables = wide(3, blurred=0.3)
    assert {expert_map(SUBJECTS[0], method, tables).slider.start for method in ("pca", "tsne")} == {1}


def test_an_expert_without_a_vector_has_no_place_and_the_others_keep_their_numbers():
    figure = expert_map(SUBJECTS[2], "pca", wide())
    assert figure.data[0]["text"] == [str(expert) for expert in range(N) if expert != 5]
    assert figure.data[0]["customdata"][5] == pytest.approx(6 / 5.5, abs=1e-3)


def test_with_domains_an_expert_that_none_of_them_uses_keeps_its_place():
    tables = wide()
    used = pd.DataFrame(
        [
            {
                "layer": layer,
                "expert": expert,
                "domain": domain,
                "affinity": 1.5 if (domain == "code") == (expert > 5) else 0.5,
            }
            for layer in range(2)
            for expert in range(1, N)
            for domain in ("code", "prose")
        ]
    )
    dead = pd.DataFrame(
        [{"layer": 0, "expert": 0, "domain": domain, "affinity": np.nan} for domain in ("code", "prose")]
    )
    also = used[used["expert"] == 1].assign(expert=0)
    tables["domains"] = pd.concat([used, dead, also[also["layer"] == 1]], ignore_index=True)
    data = expert_map(SUBJECTS[0], "pca", tables).data
    assert [trace["name"] for trace in data] == ["code", "prose", "no token"] * 2
    assert [len(trace["text"]) for trace in data] == [6, 5, 1, 6, 6, 0]
    assert data[2]["text"] == ["0"]
    assert [trace["showlegend"] for trace in data] == [True, True, True, True, True, False]
