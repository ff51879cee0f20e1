"""Every figure drawn from real runs, handed to plotly's own validator; captions say what the run shows."""

import json

import numpy as np
import pytest
from plotly.graph_objects import Figure as PlotlyFigure

from checkpoints import expert_name, router_name, tiny_config, tiny_tensors, write_checkpoint
from moescope.plotting.style import (
    GREY,
    blend,
    from_to,
    heatmap,
    layer_colors,
    named_layers,
    number,
    reference_k,
)
from moescope.weights.figures import ACROSS_LAYERS, ONE_LAYER
from moescope.weights.figures_alignment import compact
from moescope.weights.figures_identification import ACROSS_STEPS, ACROSS_VIEWS
from moescope.weights.figures_layer import COMPLETE_VIEW
from moescope.weights.figures_redundancy import overlaps, sampled_ranks, similarity_order
from moescope.weights.report import stack
from moescope.weights.report_findings import views
from moescope.weights.tables import TABLES
from moescope.weights.verb import scan

SHAPES = {
    "two experts": {"experts": 2},
    "one layer": {"layers": 1},
    "wide experts": {"d_ff": 4},
    "experts of rank one": {"d_model": 8, "d_ff": 1},
    "more experts than cells can name": {"experts": 40, "layers": 12, "d_model": 24},
    "marked experts": {"experts": 5},
    "copies of one expert": {"experts": 5},
}


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


@pytest.mark.parametrize("name", SHAPES)
def test_every_figure_of_a_run_can_be_drawn_whatever_its_shape(name, tmp_path):
    view = views(small_run(tmp_path, name))[0]
    for spec in ACROSS_LAYERS:
        validate(spec.draw(view.tables))
    for _, tables in view.by_layer():
        for spec in (*ONE_LAYER, *COMPLETE_VIEW):
            validate(spec.draw(tables))


def test_every_figure_needs_no_table_but_those_it_names(planted_run):
    found = views(planted_run)
    layer_tables = dict(found[0].by_layer())[3]
    for spec in ACROSS_LAYERS:
        validate(spec.draw({name: found[0].tables[name] for name in spec.needs}))
    for spec in (*ONE_LAYER, *COMPLETE_VIEW):
        validate(spec.draw({name: layer_tables[name] for name in spec.needs}))
    stacked = stack(found)
    for spec in (*ACROSS_VIEWS, *ACROSS_STEPS):
        validate(spec.draw({name: stacked[name] for name in spec.needs}))


def test_a_run_draws_its_figures_by_name_of_the_view_and_layer_selected(planted_run):
    assert len(planted_run.figures()) == len(planted_run.verb.figures)
    caption = planted_run.draw("pair_matrix", layer=4, router="centered").caption
    view = views(planted_run)[1]
    assert caption == ONE_LAYER[0].draw(dict(view.by_layer())[4]).caption
    assert len(planted_run.draw("compare_accuracy", router=None).data) == 4  # two views, each with its chance
    for name in planted_run.figures():
        validate(planted_run.draw(name))


def test_captions_state_what_was_planted(planted_run):
    view = views(planted_run)[0]
    captions = {spec.name: spec.draw(view.tables).caption for spec in ACROSS_LAYERS}
    level = view.tables["alignment_tests"]["chance_accuracy"].median()
    assert captions["accuracy_by_k"] == (
        "Identifying: layers 1 and 2; beyond chance: layer 3; in another order: layer 4; at chance: layer 0 "
        f"(chance: 1/8; best k: {number(level)})."
    )
    assert level > 1 / 8
    assert "layer 3: experts 2 and 5, |cos| 0.98" in captions["cosine_heatmap"]
    assert captions["orthogonality_by_layer"].startswith("1 collapsed pair, in layer 3")
    assert "layer 2" in captions["cos_squared_by_layer"]


def test_curves_draw_the_tables_own_numbers(planted_run):
    view = views(planted_run)[0]
    figure = next(spec for spec in ACROSS_LAYERS if spec.name == "align_by_k").draw(view.tables)
    rows = view.tables["alignment_layers"].query("layer == 3").sort_values("k")
    line = next(trace for trace in figure.data if trace["name"] == "layer 3")
    np.testing.assert_array_equal(line["x"], rows["k"])
    np.testing.assert_array_equal(line["y"], rows["align"])


def test_the_ceiling_of_z_is_drawn_in_grey(planted_run):
    figure = next(spec for spec in ACROSS_LAYERS if spec.name == "z_by_k").draw(views(planted_run)[0].tables)
    ceiling = next(trace for trace in figure.data if "ceiling" in trace["name"])
    np.testing.assert_allclose(ceiling["y"], np.sqrt(7))
    assert ceiling["line"]["color"] == GREY


def test_the_pair_matrix_slides_through_every_k_and_starts_at_the_best(planted_run):
    tables = dict(views(planted_run)[0].by_layer())[1]
    figure = ONE_LAYER[0].draw(tables)
    assert figure.slider.values == ["1", "2", "4", "8", "16", "32", "64", "128", "256"]
    assert figure.slider.values[figure.slider.start] == str(tables["alignment_tests"]["best_k"].iloc[0])
    M = tables["pairs"].query("k == 16").pivot(index="router_index", columns="expert", values="align")
    np.testing.assert_array_equal(figure.data[4]["z"], M)


def test_cosines_are_drawn_on_a_fixed_scale_in_both_orders(planted_run):
    figure = next(spec for spec in ACROSS_LAYERS if spec.name == "cosine_heatmap").draw(
        views(planted_run)[0].tables
    )
    assert all((trace["zmin"], trace["zmax"]) == (-1, 1) for trace in figure.data)
    order = figure.slider.orders[3]
    assert sorted(order) == [str(expert) for expert in range(8)]
    assert abs(order.index("2") - order.index("5")) == 1


@pytest.mark.parametrize(("largest", "unit"), [(1.0, 1e-4), (0.003, 1e-7)])
def test_a_large_heatmap_is_rounded_to_four_digits_of_its_largest_value(largest, unit):
    z = np.random.default_rng(0).uniform(0, largest, (80, 80))
    small, large = (
        compact(heatmap(part, range(len(part)), range(80), label="align")) for part in (z[:40], z)
    )
    assert small["z"].dtype == float
    assert large["z"].dtype == np.int16
    np.testing.assert_allclose(large["z"] * unit, z, atol=unit / 2)
    np.testing.assert_allclose(large["zmax"] * unit, z.max())
    assert f"10<sup>−{-round(np.log10(unit))}</sup>" in large["hovertemplate"]


def test_a_rounded_heatmap_has_round_ticks():
    z = np.linspace(1.7e-10, 0.915, 65 * 65).reshape(65, 65)
    bar = compact(heatmap(z, range(65), range(65), label="align"))["colorbar"]
    assert bar["ticktext"] == ["0.2", "0.4", "0.6", "0.8"]
    power = np.log10(bar["tickvals"][0] / 0.2)
    np.testing.assert_allclose(bar["tickvals"], np.array([0.2, 0.4, 0.6, 0.8]) * 10**power)
    flat = compact(heatmap(np.full((65, 65), 0.5), range(65), range(65), label="align"))
    assert flat["colorbar"]["ticktext"] == ["0.5"]


def test_experts_of_a_block_stand_together_in_similarity_order():
    matrix = np.kron(np.ones((2, 2)), np.eye(3))  # experts i and i + 3 are the same
    order = similarity_order(matrix)
    assert all(abs(order.index(expert) - order.index(expert + 3)) == 1 for expert in range(3))


def test_overlaps_at_one_vector_are_squared_cosines_with_chance_one_over_d(planted_run):
    tables = views(planted_run)[0].tables
    first = overlaps(tables).query("k == 1 and layer == 3").iloc[0]
    cosines = tables["similarity"].query("k == 1 and layer == 3")["cosine"]
    assert first["mean"] == pytest.approx((cosines**2).mean())
    assert first["chance"] == 1 / 256


def test_the_null_density_shows_the_stored_value_outside_the_null_where_planted(planted_run):
    figure = next(spec for spec in ACROSS_LAYERS if spec.name == "null_density").draw(
        views(planted_run)[0].tables
    )
    assert "above 99 % of random pairings: layers 1 and 3; below 99 %: layer 2" in figure.caption
    assert figure.slider.per_value == 2
    assert figure.caption == figure.slider.captions[figure.slider.start]


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


def test_experts_are_compared_at_128_or_the_middle_of_the_k_grid():
    assert reference_k([1, 2, 128, 256]) == 128
    assert reference_k([1, 2, 4, 8, 16]) == 4


def test_spectra_are_sampled_from_first_to_last():
    places = sampled_ranks(4096)
    assert (places[0], places[-1]) == (1, 4096)
    assert len(places) <= 60
    assert json.dumps(sampled_ranks(3).tolist()) == "[1, 2, 3]"
