"""deploy on the command line: what it reads, writes, rejects and says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import moescope
from checkpoints import tiny_checkpoint
from deployment.deployment_runs import write_trace
from deployment.plain_caches import random_tokens, replay_belady, replay_lru
from moescope.cli import app
from moescope.deployment.tokens import read_tokens
from moescope.errors import BadInput
from report_payloads import page_text


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    generator = np.random.default_rng(0)
    chosen_LTK = [random_tokens(generator, 120, 2, 8) for _ in range(2)]
    folder = tmp_path_factory.mktemp("runs") / "trace-tiny"
    return write_trace(folder, chosen_LTK, np.repeat(np.arange(24), 5), 8, domains=("code", "prose"))


def sequences_of(trace) -> list[list[int]]:
    """The choices of every layer, one after the other."""
    tokens = trace.table("tokens").sort_values(["layer", "document", "position"])
    return [np.concatenate(list(group["experts"])).tolist() for _, group in tokens.groupby("layer")]


def test_the_command_line_writes_tables_a_report_and_a_summary(trace, tmp_path):
    out = tmp_path / "run"
    arguments = ["deploy", str(trace.path), "--slots", "2,4", "--out", str(out), "--json"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    facts = json.loads(shown.stdout)
    run = moescope.open(out)
    rows = run.table("residency")
    assert sorted(rows["slots"].unique()) == [2, 4]
    assert rows["low"].notna().all()
    hits = [np.mean(replay_lru(sequence, 4)) for sequence in sequences_of(trace)]
    lru = rows[(rows["policy"] == "lru") & (rows["slots"] == 4)].sort_values("layer")
    assert lru["hit_rate"].tolist() == pytest.approx([*hits, np.mean(hits)])
    first = facts["key_numbers"][0]
    assert first["name"] == "LRU hit rate, 4 slots"  # half of the experts
    # 600 plain replays of 120 random tokens from an empty cache: a standard error of 0.13 points
    drawn = (random_tokens(np.random.default_rng(1), 600 * 120, 2, 8)).reshape(600, -1).tolist()
    simulated = np.mean([replay_lru(sequence, 4) for sequence in drawn])
    assert first["chance"] == pytest.approx(simulated, abs=0.01)
    assert f"{first['value']:.3g} " in facts["findings"][0]
    bars = run.draw("placement_traffic").data[0]
    whole = run.table("placement").query("layer.isna()").set_index("method")
    names = run.verb.tables["placement"].column("method").names
    assert dict(zip(bars["y"], bars["x"], strict=True)) == {
        names[m]: v for m, v in whole["cross_device"].items()
    }
    (words,) = (text for text in facts["findings"] if text.startswith("Remote devices"))
    assert all(f" {value:.3g}" in words for value in bars["x"])
    page = page_text(Path(moescope.report(run)).read_text(encoding="utf-8"))
    for spec in run.verb.figures:
        assert run.draw(spec.name).title in page
    assert run.figure("cache_curve").data
    assert moescope.deploy(trace, slots=[2, 4], out=out, quiet=True).info == run.info  # it is reused


@pytest.fixture(scope="module")
def served(trace, tmp_path_factory):
    options = {"slots": "2,0.5,6", "expert_bytes": 10, "bandwidth": 1.0, "min_tokens": 30, "quiet": True}
    return moescope.deploy(trace, out=tmp_path_factory.mktemp("served") / "run", **options)


def test_findings_lead_with_half_of_the_experts_and_name_the_intervals(served):
    lru = served.table("residency").query("policy == 'lru' and layer.isna()").set_index("slots").loc[4]
    assert lru["lead"]
    first = served.verb.summary(served).findings[0]
    assert f"hold {lru['hit_rate']:.3g} [{lru['low']:.3g}, {lru['high']:.3g}] of choices with LRU" in first


def test_the_curve_has_every_size_and_loading_as_a_page_under_its_earlier_name_too(served, trace, tmp_path):
    rows = served.table("residency").query("policy == 'lru' and layer.isna()").sort_values("slots")
    curve = next(line for line in served.draw("cache_curve").data if line["name"] == "LRU")
    assert curve["x"].tolist() == rows["slots"].tolist() == [2, 4, 6]
    drawn = served.draw("cache_loading")
    assert (drawn.name, drawn.slider.values[drawn.slider.start]) == ("cache_curve", "loads per token")
    line = next(line for line in served.figure("cache_loading").data if line["name"] == "LRU")
    assert list(line["y"]) == rows["loads_per_token"].tolist()
    assert not any("split" in line["name"] for line in served.draw("cache_layers").data)
    single = moescope.deploy(trace, slots=[4], out=tmp_path / "run", quiet=True)
    assert "cache_curve" not in single.figures()


def test_loads_at_chance_are_those_of_the_chance_hit_rate(served):
    rows = served.table("residency")
    each = rows[rows["layer"].notna() & (rows["policy"] == "lru")]
    assert each["loads_chance"].tolist() == pytest.approx(2 * (1 - each["chance"]))  # two experts per token
    assert rows["bytes_chance"].tolist() == pytest.approx(10 * rows["loads_chance"])
    assert rows["ms_chance"].tolist() == pytest.approx(rows["bytes_chance"] / 1e6)


def test_the_verdict_names_the_slots_that_hold_80_90_and_95_percent_of_the_choices(served, trace):
    text = served.verb.summary(served).verdict
    sequences = sequences_of(trace)
    rates = {
        replay: [np.mean([hit for each in sequences for hit in replay(each, slots)]) for slots in range(2, 9)]
        for replay in (replay_lru, replay_belady)
    }
    lru, best = (
        [2 + int(np.flatnonzero(np.array(rate) >= share)[0]) for share in (0.8, 0.9, 0.95)]
        for rate in rates.values()
    )
    assert text.startswith(f"{lru[0]}, {lru[1]} and {lru[2]} of 8 experts per layer")
    assert f"best possible: {best[0]}, {best[1]} and {best[2]})" in text
    assert best < lru
    assert text.endswith("gives a cache nothing to gain.")  # the trace is random routing


def test_the_key_number_of_coverage_counts_the_experts_that_have_too_little(served, trace):
    uses = trace.table("tokens").explode("experts").groupby(["layer", "experts"]).size()
    key = served.verb.summary(served).key_numbers[-1]
    assert (key.value, key.unit) == ((uses < 30).sum(), "of 16 experts")
    assert 0 < key.value < 16
    ranks = served.table("coverage").query("domain == ''")
    assert sorted(ranks["rank_share"]) == pytest.approx(np.arange(1, 17) / 16)
    assert ranks.sort_values("rank_share")["tokens"].is_monotonic_increasing


def test_one_expert_per_device_is_nothing_to_place_and_not_the_default(trace, tmp_path):
    run = moescope.deploy(trace, out=tmp_path / "default", quiet=True)
    assert run.table("placement")["devices"].unique() == [4]  # 8 experts, two per device
    run = moescope.deploy(trace, gpus=8, out=tmp_path / "eight", quiet=True)
    summary = run.verb.summary(run)
    words = [text for text in summary.findings if "device" in text]
    assert len(words) == 1
    assert "nothing to place" in words[0]
    assert not any("load" in key.name for key in summary.key_numbers)
    assert "ne expert per device: nothing to place" in page_text(
        Path(moescope.report(run)).read_text("utf-8")
    )


def test_bytes_per_expert_come_from_the_headers_of_the_model(tmp_path):
    model = tiny_checkpoint(tmp_path / "model")
    chosen_LTK = np.tile([[[0, 1]], [[2, 3]]], (1, 4, 1))
    trace = write_trace(tmp_path / "trace", chosen_LTK, np.arange(4), 4)
    run = moescope.deploy(trace, model=model, bandwidth=1.0, out=tmp_path / "run", quiet=True)
    rows = run.table("residency")
    loaded = rows[(rows["policy"] == "lru") & rows["layer"].isna()].iloc[0]
    facts = moescope.inspect(model)
    numbers = 3 * facts["d_model"] * facts["d_ff"]
    width = {"F32": 4, "BF16": 2}[next(iter(facts["dtypes"]))]
    assert loaded["bytes_per_token"] == pytest.approx(loaded["loads_per_token"] * numbers * width)
    assert loaded["loads_per_token"] == 1  # four experts, once each, in four tokens
    assert loaded["ms_per_token"] == pytest.approx(loaded["bytes_per_token"] / 1e6)
    other = write_trace(tmp_path / "other", chosen_LTK, np.zeros(4, int), 5)
    with pytest.raises(BadInput, match="layer 0 of the trace has 5 experts, the model 4 experts"):
        moescope.deploy(other, model=model, out=tmp_path / "no", quiet=True)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slots": "1"}, "give at least 2"),
        ({"slots": "9"}, "a layer has 8 experts"),
        ({"slots": "x"}, "whole numbers"),
        ({"slots": "4.5"}, "whole numbers"),
        ({"slots": 0.1}, "give at least 2"),
        ({"bandwidth": 5.0}, "--expert-bytes"),
        ({"bandwidth": -1.0}, "above 0"),
        ({"phase": "prefill"}, "no tokens of prefill"),
        ({"seed": -1}, "at least 0"),
    ],
)
def test_bad_options_are_one_line_and_write_nothing(trace, tmp_path, options, words):
    with pytest.raises(BadInput, match=words):
        moescope.deploy(trace.path, out=tmp_path / "run", quiet=True, **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_several_processes_give_the_same_tables(trace, tmp_path):
    one, two = (moescope.deploy(trace, jobs=jobs, out=tmp_path / str(jobs), quiet=True) for jobs in (1, 2))
    assert one.tables == two.tables
    for name in one.tables:
        pd.testing.assert_frame_equal(one.table(name), two.table(name))


def test_a_run_without_tokens_is_rejected(served, tmp_path):
    with pytest.raises(BadInput, match="--save-tokens"):
        moescope.deploy(served, out=tmp_path / "again", quiet=True)


def test_a_checkpoint_instead_of_a_trace_gets_the_command_that_makes_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_checkpoint(tmp_path / "my model")
    shown = CliRunner().invoke(app, ["deploy", "my model", "--out", "run"])
    assert isinstance(shown.exception, BadInput)
    assert "\n" not in str(shown.exception)
    command = str(shown.exception).partition("moescope trace ")[2]
    assert shlex.split(command) == ["my model", "--text", "FILE", "--save-tokens"]  # a name with a space
    with pytest.raises(BadInput, match=r"no such folder.*moescope trace MODEL --text FILE --save-tokens"):
        moescope.deploy("nowhere", out="run")
    assert not (tmp_path / "run").exists()


def test_a_trace_of_prefill_and_one_of_a_single_document_say_so(tmp_path):
    generator = np.random.default_rng(1)
    chosen_LTK = [random_tokens(generator, 10, 2, 8)]
    trace = write_trace(tmp_path / "trace", chosen_LTK, np.zeros(10, int), 8, phase="prefill")
    run = moescope.deploy(trace, out=tmp_path / "run", quiet=True)
    assert run.info["tokens"]["phase"] == "prefill"
    assert sum("prefill" in line for line in run.info["warnings"]) == 1
    assert sum("one document" in line for line in run.info["warnings"]) == 1


def test_ragged_layers_and_documents_in_any_row_order_are_read(tmp_path):
    chosen_LTK = np.array([[[0, 1], [2, 3], [1, 2]], [[-1, -1], [3, -1], [0, 2]]])
    run = write_trace(tmp_path / "trace", chosen_LTK, np.array([0, 0, 1]), 4)
    tokens = read_tokens(run, None)
    assert tokens.chosen_LTK.tolist() == chosen_LTK.tolist()
    assert tokens.document_T.tolist() == [0, 0, 1]
    assert (tokens.phase, tokens.k, tokens.n_experts) == ("decode", 2, [4, 4])
