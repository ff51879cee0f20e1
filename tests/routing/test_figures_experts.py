"""Maps of experts: drawn of whatever a trace holds, sized by load, and honest about what is missing."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from plotly.graph_objects import Figure as PlotlyFigure

from moescope.plotting import maps as plane
from moescope.plotting.maps import LAYOUTS
from moescope.routing.counts_to_tables import expert_cosine_columns
from moescope.routing.figures_experts import (
    LAYERS_LAID_OUT,
    MAPS,
    SUBJECTS,
    drawable_maps,
    expert_map,
    map_spec,
    mapped_layers,
)
from moescope.routing.report_views import load_trace, routing_views

N = 12


@pytest.fixture(scope="module")
def tables(traced_run):
    return routing_views(load_trace(traced_run))[-1].tables


def wide(layers: int = 2) -> dict[str, pd.DataFrame]:
    """Twelve experts a layer whose router rows are three groups; expert 5 gave nothing."""
    generator = np.random.default_rng(0)
    frames, loads = [], []
    for layer in range(layers):
        rows = np.eye(64)[np.arange(N) % 3] + 0.05 * generator.standard_normal((N, 64))
        outputs = np.where(np.arange(N)[:, None] == 5, np.nan, generator.standard_normal((N, 64)))
        for of, vectors in (("router", rows), ("outputs", outputs)):
            frames.append(pd.DataFrame({"layer": layer, **expert_cosine_columns(of, vectors)}))
        loads.append(
            pd.DataFrame({"layer": layer, "expert": range(N), "tokens": np.arange(N) * 10, "domain": "text"})
        )
    return {"expert_cosines": pd.concat(frames), "load": pd.concat(loads), "routing_layers": no_metrics()}


def no_metrics() -> pd.DataFrame:
    return pd.DataFrame(columns=["layer", "domain", "metric", "value"])


def test_every_subject_is_mapped_from_a_trace_and_passes_plotly(tables):
    specs, missing = drawable_maps(tables)
    assert [spec.name for spec in specs] == [f"expert_map_{subject.name}_pca" for subject in SUBJECTS]
    assert len(missing) == 1
    assert "8 experts" in missing[0]
    for spec in specs:
        figure = spec.draw(tables)
        PlotlyFigure({"data": figure.data, "layout": figure.layout})
        assert "nan" not in figure.caption
        assert "PCA" in figure.title
        assert figure.caption.count("%") == 4


def test_with_enough_experts_all_three_layouts_are_drawn_and_named_with_their_settings():
    specs, missing = drawable_maps(wide())
    assert [spec.name for spec in specs] == [
        f"expert_map_{subject}_{layout}"
        for subject in ("router", "outputs")
        for layout in ("pca", "umap", "tsne")
    ]
    assert len(missing) == 1
    assert "co-activation profiles" in missing[0]
    figure = next(spec for spec in specs if spec.name == "expert_map_router_tsne").draw(wide())
    assert "(perplexity 3.67, seed 0)" in figure.caption
    assert figure.title == "Map of experts by router rows, t-SNE"
    assert figure.layout["xaxis"]["title"]["text"] == "t-SNE 1"
    assert {spec.name for spec in specs} < {spec.name for spec in MAPS}


def test_without_the_extra_pca_is_drawn_and_the_way_to_more_is_said(monkeypatch):
    monkeypatch.setattr(plane, "find_spec", lambda name: None)
    specs, missing = drawable_maps(wide())
    assert [spec.name for spec in specs] == ["expert_map_router_pca", "expert_map_outputs_pca"]
    assert "UMAP and t-SNE: pip install 'moescope[maps]'" in missing[-1]


def test_earlier_steps_are_drawn_by_pca_and_say_so():
    specs, missing = drawable_maps(wide(), every_layout=False)
    assert all(spec.name.endswith("_pca") for spec in specs)
    assert "last step" in missing[-1]


def test_groups_of_router_rows_are_seen_and_sizes_are_loads():
    figure = expert_map(SUBJECTS[0], LAYOUTS[0], wide())
    first = figure.data[0]
    x, y = np.asarray(first["x"]), np.asarray(first["y"])
    apart = np.hypot(x[:, None] - x, y[:, None] - y) + np.diag(np.full(N, np.inf))
    assert (apart.argmin(axis=1) % 3 == np.arange(N) % 3).all()
    assert first["customdata"] == pytest.approx(np.arange(N) / 5.5, abs=1e-3)
    assert first["marker"]["size"] == sorted(first["marker"]["size"])


def test_all_layouts_open_at_the_layer_with_most_on_its_plane():
    tables = wide(3)
    cosines = tables["expert_cosines"]
    blurred = (cosines["of"] == "router") & (cosines["layer"] != 1)
    tables["expert_cosines"] = cosines.assign(
        cosine=cosines["cosine"].where(~blurred, cosines["cosine"] * 0.3)
    )
    assert {expert_map(SUBJECTS[0], layout, tables).slider.start for layout in (LAYOUTS[0], LAYOUTS[2])} == {
        1
    }


def test_an_expert_without_a_vector_has_no_place_and_the_others_keep_their_numbers():
    figure = expert_map(SUBJECTS[2], LAYOUTS[0], wide())
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
    data = expert_map(SUBJECTS[0], LAYOUTS[0], tables).data
    assert [trace["name"] for trace in data] == ["code", "prose", "no token"] * 2
    assert [len(trace["text"]) for trace in data] == [6, 5, 1, 6, 6, 0]
    assert data[2]["text"] == ["0"]
    assert [trace["showlegend"] for trace in data] == [True, True, True, True, True, False]


def test_slow_layouts_are_of_eight_layers_from_the_first_to_the_last():
    pca, umap = LAYOUTS[0], LAYOUTS[1]
    assert mapped_layers(pca, list(range(48))) == list(range(48))
    assert mapped_layers(umap, list(range(5))) == list(range(5))
    some = mapped_layers(umap, list(range(48)))
    assert (some[0], some[-1], len(some)) == (0, 47, LAYERS_LAID_OUT)


def test_what_is_left_out_is_said_on_the_figure():
    figure = map_spec(SUBJECTS[0], LAYOUTS[2]).draw(wide(layers=10))
    assert figure.caption.endswith("Maps of 8 of 10 layers.")
    assert len(figure.slider.values) == 8
