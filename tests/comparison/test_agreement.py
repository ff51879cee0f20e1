"""Agreement of two traces: hand-worked tokens, identical and unrelated traces, prefixes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import moescope
from deployment.deployment_runs import write_trace
from deployment.plain_caches import random_tokens
from moescope.comparison.agreement import agreement_table, common_prefix, flip_margins, layer_row
from moescope.errors import BadInput
from report_payloads import page_text


def row_of(a, b, gates=None):
    a, b = np.asarray(a), np.asarray(b)
    gates = np.full(a.shape, np.nan) if gates is None else np.asarray(gates, dtype=float)
    return layer_row(a, b, gates, np.zeros(len(a), int), np.random.default_rng(0))


def test_sets_order_and_overlap_are_counted_token_by_token():
    a = [[0, 1], [2, 3], [4, 5], [6, 7]]
    b = [[0, 1], [3, 2], [4, 0], [1, 2]]
    row, different_T = row_of(a, b, [[0.8, 0.2], [0.6, 0.4], [0.9, 0.1], [0.5, 0.5]])
    assert different_T.tolist() == [False, False, True, True]
    assert row["equal_sets"] == 0.5
    assert row["overlap"] == (1 + 1 + 0.5 + 0) / 4
    assert row["top1"] == 0.5
    assert row["reordered"] == 0.25
    assert row["lost_gate"] == pytest.approx((0.1 + 0.5 + 0.5) / 3)
    assert row["mean_gate"] == 0.5


def test_tokens_that_one_trace_lacks_do_not_count():
    row, different_T = row_of([[0, 1], [-1, -1], [2, -1]], [[0, 1], [1, 2], [2, -1]])
    assert (row["tokens"], row["equal_sets"], row["overlap"]) == (2, 1, 1)
    assert not different_T.any()


def test_independent_routers_agree_as_often_as_random_pairs_of_tokens():
    generator = np.random.default_rng(1)
    row, _ = row_of(random_tokens(generator, 20_000, 3, 12), random_tokens(generator, 20_000, 3, 12))
    # overlap of two random sets of 3 of 12: share 1/4, variance 3/4 * 1/4 * 9/11 / 3 per token
    assert row["overlap"] == pytest.approx(0.25, abs=4 * np.sqrt(0.0511 / 20_000))
    assert row["overlap_chance"] == pytest.approx(0.25, abs=4 * np.sqrt(0.0511 / 20_000))
    assert row["equal_sets_chance"] == pytest.approx(1 / 220, abs=4 * np.sqrt(1 / 220 / 20_000))


def test_a_prefix_ends_at_the_first_token_that_differs():
    document_T = np.array([0, 0, 0, 1, 1, 2, 2])
    differs_T = np.array([False, True, False, False, False, True, False])
    assert common_prefix(document_T, differs_T).tolist() == [True, False, False, True, True, False, False]


def test_comparing_two_traces_gives_layers_first_divergences_and_a_report(tmp_path):
    generator = np.random.default_rng(2)
    chosen_LTK = np.array([random_tokens(generator, 100, 2, 8) for _ in range(3)])
    other_LTK = chosen_LTK.copy()
    other_LTK[1, :10] = (chosen_LTK[1, :10] + 4) % 8  # ten tokens differ from layer 1 on
    other_LTK[2, :30] = (chosen_LTK[2, :30] + 4) % 8
    document_T = np.repeat(np.arange(25), 4)
    runs = [
        write_trace(tmp_path / name, part, document_T, 8)
        for name, part in (("a", chosen_LTK), ("b", other_LTK))
    ]
    run = moescope.compare(runs[0], runs[1], out=tmp_path / "run", quiet=True)
    rows = run.table("agreement").set_index("layer")
    equal_LT = (np.sort(chosen_LTK) == np.sort(other_LTK)).all(2)
    assert rows["equal_sets"].tolist() == pytest.approx(equal_LT.mean(1).tolist())
    assert rows["first_divergence"].tolist()[0] == 0
    assert rows["first_divergence"].tolist()[1] == pytest.approx(1 - equal_LT[1].mean())
    assert rows["first_divergence"].sum() == pytest.approx(1 - equal_LT.all(0).mean())
    assert (rows["low"] <= rows["overlap"]).all()
    html = Path(moescope.report(run)).read_text(encoding="utf-8")
    assert "<title>a and b" in html
    assert "Agreement of two traces per layer" in page_text(html)
    assert run.figure("agreement_divergence").data
    equal, overlap, alike = run.verb.summary(run).key_numbers
    assert equal.value == rows["equal_sets"].min()
    assert alike.value == rows["same_so_far"].iloc[-1]
    worst = rows.loc[rows["overlap"].idxmin()]
    assert (overlap.value, overlap.chance) == (worst["overlap"], worst["overlap_chance"])
    so_far = [equal_LT[: layer + 1].all(0).mean() for layer in range(3)]
    assert rows["same_so_far"].tolist() == pytest.approx(so_far)
    assert f"{so_far[-1]:.3g} of all" in run.verb.summary(run).findings[1]
    for options, message in (
        ({"matched": True}, "--matched applies to checkpoints"),
        ({"skip": ["sv"]}, "--skip applies to checkpoints"),
        ({"out": runs[0].path}, "one of the traces to compare"),
    ):
        with pytest.raises(BadInput, match=message):
            moescope.compare(*runs, **{"out": tmp_path / "other", "overwrite": True, **options})
    assert not (tmp_path / "other").exists()


def test_token_ids_that_differ_end_the_comparison_of_a_document(tmp_path):
    chosen_LTK = np.array([[[0, 1]] * 6])
    runs = [write_trace(tmp_path / name, chosen_LTK, np.repeat([0, 1], 3), 4) for name in "ab"]
    path = runs[1].path / "tokens.parquet"
    frame = runs[1].table("tokens")
    frame.loc[(frame["document"] == 1) & (frame["position"] >= 1), "token_id"] = 9
    from moescope.routing.tables import TABLES
    from moescope.run import write_table

    write_table(TABLES["tokens"], frame, path)
    table, warnings = agreement_table(runs, 0)
    assert isinstance(table, pd.DataFrame)
    assert table["tokens"].tolist() == [4]
    assert "4 of 6 tokens" in warnings[0]


def test_flips_are_counted_against_the_margins_of_all_tokens():
    margin_T = np.array([0.01, 0.02, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, np.nan])
    different_T = np.array([True, False, True, False, False, False, False, False, False, True])
    row = flip_margins(margin_T, different_T)
    # of nine known margins the smallest is the lowest tenth; of two flips with a margin one has it
    assert row["small_margin"] == 0.01
    assert row["flips_at_small_margin"] == 1 / 2
    assert row["flips_at_small_margin_chance"] == 1 / 9
    assert flip_margins(np.full(3, np.nan), np.ones(3, dtype=bool)) == {}


@pytest.mark.slow
def test_two_precisions_of_one_model_differ_at_small_margins_only(tmp_path):
    """bfloat16 has 8 bits: choices that change have a margin in float32 far below that of other tokens."""
    from routing.tiny_text import save_model, texts, write_jsonl

    model = save_model(tmp_path / "model", "mixtral")
    text = write_jsonl(tmp_path / "text.jsonl", texts(40))
    runs = [
        moescope.trace(model, text=text, dtype=dtype, save_tokens=True, out=tmp_path / dtype, quiet=True)
        for dtype in ("float32", "bfloat16")
    ]
    tokens = [run.table("tokens").set_index(["document", "position", "layer"]).sort_index() for run in runs]
    assert (tokens[0]["margin"] >= 0).all()
    sets = [table["experts"].map(lambda experts: tuple(sorted(experts))) for table in tokens]
    flipped = (sets[0] != sets[1]).groupby("layer").sum()
    rows = moescope.compare(*runs, out=tmp_path / "both", quiet=True).table("agreement").set_index("layer")
    for layer, count in flipped.items():
        assert rows.loc[layer, "equal_sets"] == pytest.approx(1 - count / rows.loc[layer, "tokens"])
    first = rows.iloc[0]  # later layers also get other states
    assert first["equal_sets"] < 1
    assert first["flips_at_small_margin"] > 0.9
    assert first["flips_at_small_margin_chance"] == pytest.approx(0.1, abs=0.01)
