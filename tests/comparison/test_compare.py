"""compare: distances against numpy on the stored tensors, planted changes, errors, real interruptions."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from checkpoint.quantised.builders import fp8_checkpoint, qwen
from checkpoints import expert_name, router_name, tiny_checkpoint, tiny_config, tiny_tensors, write_checkpoint
from families.tiny_models import tiny_model
from geometry.experts import shuffled
from moescope.cli import app
from moescope.comparison import verb as compare_module
from moescope.comparison.tables import TABLES
from moescope.comparison.verb import compare
from moescope.errors import BadInput
from moescope.run import Run
from moescope.types import ExpertWeights
from moescope.verb import Selection
from moescope.weights.verb import scan

SIZES = {"layers": 3, "experts": 4, "d_model": 24, "d_ff": 16}
CHANGED = (1, 2)  # layer and expert that changed far more than the others


def tuned_tensors(share: float = 0.05) -> dict[str, torch.Tensor]:
    """The base model after a small change everywhere, and a large one in one expert."""
    generator = torch.Generator().manual_seed(3)
    tensors = tiny_tensors(**SIZES)
    for name, tensor in tensors.items():
        far = f"layers.{CHANGED[0]}.block_sparse_moe.experts.{CHANGED[1]}." in name
        noise = torch.randn(tensor.shape, generator=generator)
        tensors[name] = tensor + (10 * share if far else share) * noise
    return tensors


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("a") / "base", **SIZES)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("b") / "tuned", tuned_tensors(), tiny_config(3, 4))


@pytest.fixture(scope="module")
def run(base, tuned, tmp_path_factory) -> Run:
    return compare(base, tuned, out=tmp_path_factory.mktemp("runs") / "run", quiet=True)


def findings(run: Run) -> str:
    return "\n".join(run.verb.summary(run).findings)


# --- two checkpoints


def test_every_matrix_and_router_row_has_the_distance_of_the_stored_tensors(run, base, tuned):
    before, after = load_file(base / "model.safetensors"), load_file(tuned / "model.safetensors")
    table = run.table("geometry")
    assert len(table) == 3 * 4 * 4
    for row in table.itertuples():
        name = (
            router_name(row.layer)
            if row.matrix == "router"
            else expert_name(row.layer, row.expert_a, row.matrix)
        )
        a, b = (tensors[name].double().numpy() for tensors in (before, after))
        a, b = (a[row.expert_a], b[row.expert_a]) if row.matrix == "router" else (a, b)
        unit_a, unit_b = a / np.linalg.norm(a), b / np.linalg.norm(b)
        assert row.expert_b == row.expert_a
        assert row.relative_l2 == pytest.approx(np.linalg.norm(unit_a - unit_b), rel=1e-9)
        assert row.cosine == pytest.approx((unit_a * unit_b).sum(), rel=1e-9)
        assert row.norm_ratio == pytest.approx(np.linalg.norm(b) / np.linalg.norm(a), rel=1e-9)
        if row.matrix == "router":
            assert np.isnan(row.sv_alignment)
        else:
            polar = [u @ v for u, _, v in (np.linalg.svd(m, full_matrices=False) for m in (a, b))]
            assert row.sv_alignment == pytest.approx((polar[0] * polar[1]).sum() / 16, abs=1e-5)


def test_tables_and_run_json_are_those_of_the_contract(run, base, tuned):
    for name in ("geometry", "geometry_layers"):
        assert list(run.table(name).columns) == list(TABLES[name].columns)
    assert run.info["verb"] == "compare"
    assert [item["path"] for item in run.info["checkpoints"]] == [str(base), str(tuned)]
    assert [item["role"] for item in run.info["checkpoints"]] == ["a", "b"]
    assert len(run.info["coverage"]) == 2
    assert not (run.path / "parts").exists()


def test_key_numbers_stand_with_their_chance_levels(run):
    geometry = run.table("geometry")
    experts, routers = geometry[geometry["matrix"] != "router"], geometry[geometry["matrix"] == "router"]
    *keys, changed = run.verb.summary(run).key_numbers
    expected = [experts["relative_l2"].mean(), experts["sv_alignment"].mean(), routers["cosine"].median()]
    assert [key.value for key in keys] == pytest.approx(expected)
    assert [key.chance for key in keys] == pytest.approx([2**0.5, 0, 0])
    pairs = experts.groupby(["layer", "expert_a"])["relative_l2"].max()
    assert (changed.value, changed.most) == ((pairs > 0).sum(), len(pairs))


def headline_scores(run, role: str) -> pd.Series:
    """Absolute ambiguity by layer in the headline view of a checkpoint's scan."""
    rows = run.parts[f"scan-{role}"].table("ambiguity").query("router == 'centered'")
    return rows.set_index("layer")["absolute_score"]


def test_alignment_and_ambiguity_before_and_after_are_those_of_two_scans(run, base, tuned, tmp_path):
    for role, model in (("a", base), ("b", tuned)):
        alone = scan(model, out=tmp_path / role, quiet=True)
        inside = run.parts[f"scan-{role}"]
        pd.testing.assert_frame_equal(inside.table("ambiguity"), alone.table("ambiguity"))
    scores = [headline_scores(run, role) for role in "ab"]
    layer = (scores[1] - scores[0]).abs().idxmax()
    assert f"ambiguity: largest change in layer {layer}, " in findings(run)
    assert "verdict: changed in" in findings(run)


def test_a_checkpoint_compared_with_itself_has_not_changed(base, tmp_path):
    same = compare(base, base, out=tmp_path / "run", skip="scan", quiet=True)
    table = same.table("geometry")
    assert (table["relative_l2"] == 0).all()
    np.testing.assert_allclose(table["norm_ratio"], 1)
    np.testing.assert_allclose(table["sv_alignment"].dropna(), 1, atol=1e-5)
    experts, routers = same.verb.summary(same).findings
    assert "relative L2 is 0 for all 12 experts" in experts
    assert "No router row changed: relative L2 is 0 for all 12 rows" in routers


@pytest.mark.slow
def test_scores_that_are_written_alike_are_not_said_to_change_from_one_to_the_other(base, tmp_path):
    """Experts far apart, gate matrices and routers equal; then one router row moved by rounding alone."""
    tensors = tiny_tensors(**SIZES)
    for name in list(tensors):
        if ".w2." in name or "down" in name:
            tensors[name] = tensors[name] + 1
    other = write_checkpoint(tmp_path / "other", tensors, tiny_config(3, 4))
    equal = compare(base, other, out=tmp_path / "equal", quiet=True)
    (words,) = (text for text in equal.verb.summary(equal).findings if "ambiguity" in text)
    assert not re.search(r"\d to \d", words)
    assert "unchanged in 3 layers" in words
    tensors[router_name(2)][0, 0] += 1e-5
    near = compare(
        base,
        write_checkpoint(tmp_path / "near", tensors, tiny_config(3, 4)),
        out=tmp_path / "near-run",
        quiet=True,
    )
    (words,) = (text for text in near.verb.summary(near).findings if "ambiguity" in text)
    scores = [headline_scores(near, role) for role in "ab"]
    assert 0 < (scores[1] - scores[0]).abs().max() < 1e-4
    assert "layer 2" in words
    assert not re.search(r"(\d\S*) to \1", words)


def test_matching_shows_that_a_permuted_copy_is_the_same_model(base, tmp_path):
    """Neurons of every expert shuffled and flipped: unrelated in stored order, equal after matching."""
    tensors = tiny_tensors(**SIZES)
    for layer in range(3):
        for expert in range(4):
            names = [expert_name(layer, expert, matrix) for matrix in ("gate", "down", "up")]
            copy, _, _ = shuffled(
                ExpertWeights(*(tensors[name] for name in names)), 10 * layer + expert, flip=True
            )
            for name, matrix in zip(names, (copy.gate_FD, copy.down_DF, copy.up_FD), strict=True):
                tensors[name] = matrix.contiguous()
    permuted = write_checkpoint(tmp_path / "permuted", tensors, tiny_config(3, 4))
    run = compare(base, permuted, out=tmp_path / "run", matched=True, skip="scan", quiet=True)
    table = run.table("geometry")
    experts = table[table["matrix"] != "router"]
    assert (table.loc[table["matrix"] == "router", "relative_l2"] == 0).all()
    stored = experts[experts["series"] == "base_to_permuted"]
    matched = experts[experts["series"] == "base_to_permuted_permuted"]
    assert len(stored) == len(matched) == 3 * 4 * 3
    assert stored["relative_l2"].mean() > 1.1
    assert not stored["matched"].any()
    assert matched["matched"].all()
    np.testing.assert_allclose(matched["relative_l2"], 0, atol=1e-6)
    np.testing.assert_allclose(matched["sv_alignment"], 1, atol=1e-5)
    said = next(line for line in findings(run).splitlines() if "base_to_permuted_permuted, n" in line)
    assert re.search(r"mean relative L2 (0|\S+ × 10⁻\S+),.*\(matched rotated experts: 1\.2", said)


@pytest.mark.parametrize(
    ("match_by", "name"),
    [("unsigned", "base_to_unrelated_permuted_unsigned"), ("held_out", "base_to_unrelated_held_out")],
)
def test_neurons_are_matched_by_order_alone_or_with_down_held_out(base, tmp_path, match_by, name):
    """Against an unrelated model: both come closer as random experts do, except what was held out."""
    unrelated = tiny_checkpoint(tmp_path / "unrelated", seed=9, **SIZES)
    options = {"matched": True, "match_by": match_by, "layers": 0, "matrix": "gate,down", "skip": "scan"}
    run = compare(base, unrelated, out=tmp_path / "run", quiet=True, **options)
    layers = run.table("geometry_layers").set_index(["series", "matrix"])
    assert layers.loc[(name, "gate"), "relative_l2_mean"] == pytest.approx(
        layers.loc[(name, "gate"), "null_l2_matched"], abs=0.04
    )
    assert layers.loc[(name, "gate"), "null_l2_matched"] < 1.32
    down = layers.loc[(name, "down")]
    assert down["relative_l2_mean"] == pytest.approx(down["null_l2_matched"], abs=0.06)
    assert (down["null_l2_matched"] > 1.4) == (match_by == "held_out")
    assert ("held out from the matching" in findings(run)) == (match_by == "held_out")
    assert f"--matched --match-by {match_by}" in run.info["command"].replace("--skip scan ", "")


def test_the_distance_of_a_quantised_model_is_its_rounding(tmp_path):
    qwen(tmp_path / "plain")
    fp8_checkpoint(tmp_path / "packed")
    table = compare(
        tmp_path / "plain", tmp_path / "packed", out=tmp_path / "run", skip="scan", quiet=True
    ).table("geometry")
    experts = table[table["matrix"] != "router"]
    assert (
        experts["relative_l2"].between(0.01, 0.05).all()
    )  # three bits of mantissa: 1/16 at most, 0.026 in the mean
    assert (experts["sv_alignment"] > 0.95).all()


def test_two_layouts_of_one_model_are_compared(tmp_path):
    """One tensor per expert as transformers saves it, fused as it lies in memory."""
    tiny = tiny_model("qwen3_moe")
    for form in ("saved", "memory"):
        tiny.save(tmp_path / form, form)
    run = compare(tmp_path / "saved", tmp_path / "memory", out=tmp_path / "run", skip="scan", quiet=True)
    assert (run.table("geometry")["relative_l2"] == 0).all()
    assert set(run.table("geometry")["matrix"]) == {"gate", "up", "down", "router"}


def test_experts_without_a_gate_have_no_up(tmp_path):
    tiny = tiny_model("switch_transformers")
    folder = tiny.save(tmp_path / "switch", "saved")
    run = compare(folder, folder, out=tmp_path / "run", skip="scan,sv", quiet=True)
    assert set(run.table("geometry")["matrix"]) == {"gate", "down", "router"}
    with pytest.raises(BadInput, match="no up matrix"):
        compare(folder, folder, out=tmp_path / "other", matrix="up", quiet=True)
    assert not (tmp_path / "other").exists()


def test_options_choose_layers_matrices_and_the_series_name(base, tuned, tmp_path):
    run = compare(
        base,
        tuned,
        out=tmp_path / "run",
        layers="0,2",
        matrix="up,router",
        series="dpo",
        skip="scan,sv",
        quiet=True,
    )
    table = run.table("geometry")
    assert set(table["layer"]) == {0, 2}
    assert set(table["matrix"]) == {"up", "router"}
    assert set(table["series"]) == {"dpo"}
    assert table["sv_alignment"].isna().all()
    assert run.parts == {}
    for words in ("--layers 0,2", "--matrix up,router", "--skip scan,sv", "--series dpo"):
        assert words in run.info["command"]


def test_a_matrix_of_zeros_is_warned_of_and_has_no_distance(base, tmp_path):
    tensors = tiny_tensors(**SIZES)
    tensors[expert_name(0, 3, "up")].zero_()
    broken = write_checkpoint(tmp_path / "broken", tensors, tiny_config(3, 4))
    run = compare(base, broken, out=tmp_path / "run", layers=0, skip="scan", quiet=True)
    assert any("layer 0, expert 3, up: all zeros" in warning for warning in run.info["warnings"])
    table = run.table("geometry")
    assert table["relative_l2"].isna().sum() == 1
    assert run.verb.sections(run, Selection())


# --- errors


def other(tmp_path: Path, **changes: int) -> Path:
    return tiny_checkpoint(tmp_path / "other", **{**SIZES, **changes})


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        (
            {"experts": 6},
            r"layer 0 of .*other has number of experts 6, of .*base 4; give two checkpoints of one arch",
        ),
        ({"d_model": 32}, "model width 32, of .*base 24"),
        ({"d_ff": 8}, "expert width 8, of .*base 16"),
        ({"layers": 2}, "other has MoE layers 0-1, .*base 0-2"),
    ],
)
def test_another_architecture_is_rejected_by_what_differs(base, tmp_path, changes, difference):
    with pytest.raises(BadInput, match=difference):
        compare(base, other(tmp_path, **changes), out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"series": "a b"}, "series 'a b': give at most 40 letters"),
        ({"series": ""}, "series ''"),
        ({"matrix": "gate,side"}, "unknown matrix 'side'; known: gate, up, down, router"),
        ({"skip": "all"}, "unknown skip 'all'; known: sv, scan"),
        ({"layers": "7"}, "no MoE layer 7"),
        ({"match_by": "held_out"}, "give --matched with it"),
        (
            {"match_by": "loosely", "matched": True},
            "unknown match_by 'loosely'; known: signed, unsigned, held_out",
        ),
        ({"seed": -1}, "seed -1"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
    ],
)
def test_arguments_that_make_no_sense_are_rejected_before_any_work(base, tuned, tmp_path, options, message):
    with pytest.raises(BadInput, match=message):
        compare(base, tuned, out=tmp_path / "run", quiet=True, **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", [expert_name(0, 1, "down"), router_name(0)])
def test_weights_with_nan_are_named(base, tmp_path, name):
    tensors = tiny_tensors(**SIZES)
    tensors[name][0, 0] = float("nan")
    broken = write_checkpoint(tmp_path / "broken", tensors, tiny_config(3, 4))
    with pytest.raises(BadInput, match=name.replace(".", r"\.") + r".*NaN.*--layers"):
        compare(base, broken, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_and_a_run_cannot_be_compared(base, run):
    with pytest.raises(BadInput, match="base: not a run folder"):
        compare(base, run.path)
    with pytest.raises(BadInput, match="no such"):
        compare(base, base.parent / "nowhere")


# --- resuming


def test_the_same_command_again_does_no_work(run, base, tuned, monkeypatch):
    monkeypatch.setattr(compare_module, "compare_layer", None)
    assert compare(base, tuned, out=run.path, quiet=True).path == run.path
    with pytest.raises(BadInput, match=r"other arguments \(matched\)"):
        compare(base, tuned, out=run.path, matched=True, quiet=True)


def test_overwriting_shows_no_old_scan(base, tuned, tmp_path):
    compare(base, tuned, out=tmp_path / "run", layers=0, quiet=True)
    again = compare(base, tuned, out=tmp_path / "run", layers=0, skip="scan", overwrite=True, quiet=True)
    assert "verdict" not in findings(again)
    assert [section.anchor for section in again.verb.sections(again, Selection())] == ["distances", "drift"]


# --- two runs


def test_two_runs_that_are_no_traces_with_tokens_name_the_report_that_shows_both(run, tmp_path):
    scans = list(run.parts.values())
    for pair in (scans, [scans[0], run]):
        shown = CliRunner().invoke(app, ["compare", *(str(one.path) for one in pair)])
        assert shown.exit_code != 0
        assert f"moescope report {pair[0].path} {pair[1].path}" in str(shown.exception)
    with pytest.raises(BadInput, match="--save-tokens"):
        compare(*scans, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_comparison_is_named_after_both_checkpoints(tmp_path):
    """By their names; of equal names by the folders they are in; hostile letters are dropped."""
    places = ["one/model", "two/model", "one/<b>tuned model!", "one/" + "x" * 60]
    small = {**SIZES, "layers": 1}
    a, same, odd, long = [tiny_checkpoint(tmp_path / place, **small) for place in places]
    found = [
        compare(a, b, out=tmp_path / f"run{count}", skip="scan,sv", quiet=True).table("geometry_layers")
        for count, b in enumerate((same, odd, long, a))
    ]
    names = [table["series"].unique().tolist() for table in found]
    assert names == [["one_to_two"], ["model_to_b_tuned_model"], [f"model_to_{'x' * 18}"], ["A_to_B"]]
