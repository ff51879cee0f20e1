"""Every figure drawn from real runs, handed to plotly's own validator; captions say what the run shows."""

import numpy as np
import pandas as pd
import pytest
from plotly.graph_objects import Figure as PlotlyFigure

from checkpoints import expert_name, router_name, tiny_config, tiny_tensors, write_checkpoint
from moescope.plotting.style import blend, from_to, layer_colors, named_layers, number
from moescope.weights.figures import ACROSS_VIEWS, COMPLETE, FIGURES, NAMED, OF_LAYER, STEPS
from moescope.weights.layer import reference_k
from moescope.weights.report import stack, views
from moescope.weights.tables import TABLES
from moescope.weights.verb import scan

OVER_STEPS = {spec.name for spec in STEPS}
ACROSS = [spec for spec in FIGURES if not spec.one and spec.name not in OVER_STEPS]

SHAPES = {
    "two experts": {"experts": 2},
    "one layer": {"layers": 1},
    "wide experts": {"d_ff": 4},
    "experts of rank one": {"d_model": 8, "d_ff": 1},
    "more experts than cells can name": {"experts": 40, "layers": 12, "d_model": 24},
    "marked experts": {"experts": 5},
    "copies of one expert": {"experts": 5},
}


FAST = ("two experts", "marked experts")


def small_run(folder, name):
    shape = SHAPES[name]
    tensors = tiny_tensors(**shape)
    if name == "marked experts":
        tensors[expert_name(0, 3, "gate")][0, 0] = float("nan")
        tensors[router_name(1)][2] = 0
    if name == "copies of one expert":
        for layer in range(2):
            for expert in range(1, 5):
                tensors[expert_name(layer, expert, "gate")] = tensors[expert_name(layer, 0, "gate")].clone()
    config = tiny_config(layers=shape.get("layers", 2), experts=shape.get("experts", 4))
    path = write_checkpoint(folder / "model", tensors, config)
    return scan(path, out=folder / "run", keep_going=True, quiet=True)


def validate(figure):
    PlotlyFigure({"data": figure.data, "layout": figure.layout})
    assert 1 <= len(figure.title.split()) <= 8
    assert figure.caption.endswith(".")
    assert set(figure.columns) <= {key for table in TABLES.values() for key in table.glossary}
    assert figure.layout["xaxis"]["title"]["text"]
    assert figure.layout["yaxis"]["title"]["text"]
    if figure.slider:
        assert len(figure.data) >= len(figure.slider.values) * figure.slider.per_value
        assert 0 <= figure.slider.start < len(figure.slider.values)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES]
)
def test_every_figure_of_a_run_can_be_drawn_whatever_its_shape(name, tmp_path):
    view = views(small_run(tmp_path, name))[0]
    drawn = {spec.name for spec in ACROSS if spec.can_draw(view.tables)}
    # a line over k needs two ks below d
    assert drawn >= {spec.name for spec in ACROSS} - {"identification_by_k", "alignment_by_k", "overlap_by_k"}
    for spec in ACROSS:
        if spec.name in drawn:
            validate(spec.draw(view.tables))
    for _, tables in view.by_layer():
        assert NAMED["pair_matrix"].can_draw(tables)
        for spec in (*OF_LAYER, *COMPLETE):
            if spec.can_draw(tables):
                validate(spec.draw(tables))


def test_every_figure_needs_no_table_but_those_it_names(planted_run):
    found = views(planted_run)
    layer_tables = dict(found[0].by_layer())[3]
    for spec in ACROSS:
        validate(spec.draw({name: found[0].tables[name] for name in spec.needs}))
    for spec in (*OF_LAYER, *COMPLETE):
        validate(spec.draw({name: layer_tables[name] for name in spec.needs}))
    stacked = stack(found)
    for spec in ACROSS_VIEWS:
        validate(spec.draw({name: stacked[name] for name in spec.needs}))


def test_a_run_draws_its_figures_by_name_of_the_view_and_layer_selected(planted_run):
    assert set(planted_run.figures()) == {spec.name for spec in FIGURES} - OVER_STEPS
    drawn = planted_run.draw("pair_matrix", layer=4, router="centered")
    view = views(planted_run)[1]
    assert drawn.caption == NAMED["pair_matrix"].draw(dict(view.by_layer())[4]).caption
    compared = planted_run.draw("identification_by_layer", router=None)
    names = [trace["name"] for trace in compared.data[: compared.slider.per_value]]
    assert names[:2] == ["gate, centered router", "gate, raw router"]


@pytest.mark.slow
def test_every_earlier_name_draws_the_page_that_replaces_it(planted_run):
    earlier = {name: (spec, page) for spec in FIGURES for name, page in spec.was.items()}
    assert len(earlier) == 40
    for name, (spec, page) in earlier.items():
        if spec.name in OVER_STEPS:
            continue
        drawn = planted_run.draw(name)
        assert drawn.name == spec.name
        if page:
            pages = drawn.slider.values
            assert pages[drawn.slider.start] in (page, TABLES[spec.table].label(page)), name


def lines(figure, page=0):
    """Name -> trace of one page of a figure."""
    per = figure.slider.per_value if figure.slider else len(figure.data)
    return {trace["name"]: trace for trace in figure.data[page * per : (page + 1) * per]}


def test_cosines_are_coloured_where_they_leave_chance_and_can_be_ordered_by_similarity(planted_run):
    figure = planted_run.draw("cosine_heatmap")
    assert figure.slider.values[figure.slider.start] == "3"  # opens where a pair is closest
    z = figure.data[3]["z"]
    assert z[2, 5] == z[5, 2] > 0
    assert np.isnan(z.diagonal()).all()
    assert figure.data[3]["text"][2][2] == ""
    order = figure.slider.orders[3]
    assert sorted(order) == [str(expert) for expert in range(8)]
    assert abs(order.index("2") - order.index("5")) == 1
    assert "0.98" in figure.caption
    assert "(expert 5, expert 2)" in figure.caption


def test_published_thresholds_are_drawn(planted_run):
    drawn = lines(planted_run.draw("orthogonality_by_layer"))
    assert set(drawn["redundancy"]["y"]) == {0.3}
    assert set(drawn["shared direction"]["y"]) == {0.7}
    terms = lines(planted_run.draw("ambiguity_by_layer"))
    assert set(terms["high above 0.7"]["y"]) == {0.7}
    rows = planted_run.table("ambiguity").query("router == 'raw'").sort_values("layer")
    sums = sum(np.asarray(terms[f"{name} term"]["y"]) for name in ("accuracy", "margin", "z"))
    np.testing.assert_allclose(sums, rows["ambiguity_score"])


def test_the_null_density_shows_the_stored_value_and_counts_layers_beyond_chance(planted_run):
    figure = planted_run.draw("null_density")
    assert figure.slider.per_value == 2
    assert figure.caption == figure.slider.captions[figure.slider.start]
    at = figure.slider.values.index("128")
    assert "of 5 beyond chance (expected: 0.25)" in figure.slider.captions[at]
    ridge, diamonds = figure.data[2 * at : 2 * at + 2]
    rows = np.array(ridge["y"])[np.isfinite(ridge["y"])]
    assert rows.min() == 0
    assert 4 < rows.max() < 5  # the first layer on top, above its own line
    nulls = planted_run.table("nulls").query("k == 128 and router == 'raw'")
    observed = nulls.groupby("layer")["observed"].first()
    np.testing.assert_allclose(diamonds["x"], observed[::-1])


def test_the_complete_view_of_a_layer_has_twelve_small_panels(planted_run):
    tables = dict(views(planted_run)[0].by_layer())[3]
    panels = [spec.draw(tables) for spec in COMPLETE]
    assert len({panel.title for panel in panels}) == 12
    assert {panel.height for panel in panels} == {260}
    assert not any(panel.slider for panel in panels)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([3], "layer 3"),
        ([0, 4], "layers 0 and 4"),
        (range(9, 31), "layers 9 to 30"),
        ([0, 2, 5, 6, 7], "layers 0, 2 and 5 to 7"),
        ([], "no layer"),
    ],
)
def test_layers_are_named_as_people_do(layers, words):
    assert named_layers(layers) == words


def test_numbers_are_written_as_people_do():
    written = [number(value) for value in (0.0, 1.0, 0.123456, 12345.6, 2.48e-05, float("nan"))]
    assert written == ["0", "1", "0.123", "12,346", "2.5 × 10⁻⁵", "undefined"]


def test_a_span_of_equal_ends_is_one_number():
    assert from_to(1.0001, "layer 0", 1.0002, "layer 1") == "is 1 throughout"
    assert from_to(1, "layer 0", 2, "layer 1") == "runs from 1 (layer 0) to 2 (layer 1)"


def test_layers_get_different_colours_along_one_sequence():
    colors = layer_colors(list(range(48)))
    assert len(set(colors.values())) == 48
    assert blend(("#000000", "#FFFFFF"), 0.5) == "#808080"


@pytest.mark.parametrize(
    ("ks", "reference"), [([1, 2, 128, 256], 128), ([1, 2, 4, 8, 16], 4), ([1, 2, 4, 8], 4)]
)
def test_experts_are_compared_at_128_or_the_middle_of_the_k_grid(ks, reference):
    assert reference_k(pd.DataFrame({"k": ks, "degenerate": False})) == reference
    assert reference_k(pd.DataFrame({"k": [*ks, 512], "degenerate": [False] * len(ks) + [True]})) == reference
