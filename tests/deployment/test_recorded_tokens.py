"""trace --recorded --save-tokens: the tokens of other tools' traces, as deploy reads them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import moescope
from deployment.deployment_runs import write_trace
from deployment.plain_caches import random_tokens, replay_lru
from moescope.deployment.prefetch import prefetch_table
from moescope.deployment.tokens import Split, read_tokens
from moescope.errors import BadInput
from moescope.routing.tables import TRACE_TABLES
from moescope.run import write_table
from moescope.tables import arrow_schema

QWEN3 = Path(__file__).parents[2] / "docs" / "data" / "qwen3_30b_a3b.route.csv.gz"


def test_a_servers_trace_keeps_documents_phases_and_order(tmp_path):
    generator = np.random.default_rng(0)
    answers = [generator.integers(0, 8, size=(6, 3, 2)) for _ in range(4)]
    for answer in answers:
        answer[..., 1] = (answer[..., 0] + 1) % 8
    lines = [
        json.dumps({"usage": {"prompt_tokens": 4}, "choices": [{"routed_experts": answer.tolist()}]})
        for answer in answers
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    options = {"format": "vllm", "experts": 8, "save_tokens": True, "quiet": True}
    run = moescope.trace(recorded=tmp_path / "trace.jsonl", out=tmp_path / "run", **options)
    for phase, part in (("prefill", slice(0, 4)), ("decode", slice(4, 6))):
        tokens = read_tokens(run, phase)
        expected = np.concatenate([answer[part] for answer in answers]).transpose(1, 0, 2)
        assert tokens.chosen_LTK.tolist() == expected.tolist()
        assert tokens.document_T.tolist() == np.repeat(np.arange(4), part.stop - part.start).tolist()
    assert read_tokens(run, None).phase == "decode"
    moescope.report(run)  # without token ids there is no text to show
    assert moescope.deploy(run, out=tmp_path / "deployed", quiet=True).info["tokens"]["tokens"] == 8


def test_tokens_are_not_saved_unless_asked_for(tmp_path):
    np.save(tmp_path / "trace.npy", np.array([[[0, 1]], [[2, 3]]]))
    options = {"format": "vllm", "experts": 4, "quiet": True}
    run = moescope.trace(recorded=tmp_path / "trace.npy", out=tmp_path / "run", **options)
    assert "tokens" not in run.tables
    with pytest.raises(BadInput, match="--save-tokens"):
        moescope.deploy(run, out=tmp_path / "deployed", quiet=True)


def test_a_trace_in_which_no_token_has_an_expert_is_rejected(tmp_path):
    run = write_trace(tmp_path / "run", np.array([[[0, 1], [1, 0]]]), [0, 0], 2)
    frame = run.table("tokens")
    frame["experts"] = [[] for _ in range(len(frame))]
    write_table(TRACE_TABLES["tokens"], frame, run.path / "tokens.parquet")
    with pytest.raises(BadInput, match="no token chose an expert"):
        moescope.deploy(run, slots="2", out=tmp_path / "deployed", quiet=True)


def damage_rows(frame, how):
    experts = frame.at[3, "experts"].copy()
    if how == "half":
        return frame.iloc[::2]
    if how == "row":
        frame.loc[3, ["document", "position", "layer"]] = frame.loc[2, ["document", "position", "layer"]]
    else:
        experts[0] = {"expert": 65_539, "negative": -2, "repeated": experts[1]}[how]
        frame.at[3, "experts"] = experts
    return frame


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("half", "12 rows, 24 were written"),
        ("row", "two rows in one layer"),
        ("expert", "has 4 experts, and a token names"),
        ("negative", "has 4 experts, and a token names"),
        ("repeated", "has 4 experts, and a token names"),
    ],
)
def test_tokens_that_were_changed_after_they_were_written_are_rejected_by_every_reader(tmp_path, how, words):
    generator = np.random.default_rng(0)
    chosen_LTK = [random_tokens(generator, 12, 2, 4) for _ in range(2)]
    run, other = (write_trace(tmp_path / name, chosen_LTK, np.arange(12) // 4, 4) for name in "ab")
    deployed = moescope.deploy(run, out=tmp_path / "deployed", quiet=True)
    assert moescope.deploy(run, out=tmp_path / "deployed", quiet=True).info == deployed.info
    table = pa.Table.from_pandas(damage_rows(run.table("tokens"), how), arrow_schema(TRACE_TABLES["tokens"]))
    pq.write_table(table, run.path / "tokens.parquet")
    with pytest.raises(BadInput, match=words):  # not: already complete
        moescope.deploy(run, out=tmp_path / "deployed", quiet=True)
    for read in (moescope.deploy, partial(moescope.compare, other.path)):
        with pytest.raises(BadInput, match=words) as caught:
            read(run.path, out=tmp_path / "again", quiet=True)
        assert str(run.path / "tokens.parquet") in str(caught.value)
        assert not (tmp_path / "again").exists()


@pytest.mark.slow
def test_the_published_numbers_of_a_real_trace(tmp_path):
    """Qwen3-30B-A3B, one chat turn, all tokens: published previous-token recall 38.0 %, static 37.6 %."""
    run = moescope.trace(recorded=QWEN3, save_tokens=True, out=tmp_path / "trace", quiet=True)
    tokens = read_tokens(run, None)
    everything = [Split(*np.ones((2, len(tokens.document_T)), dtype=bool))]
    recall = prefetch_table(tokens, everything, lambda count: None)
    recall = recall[recall["layer"].notna() & (recall["budget"] == 6)].groupby("predictor")["recall"].mean()
    assert recall["previous_token"] == pytest.approx(0.3795, abs=5e-5)
    assert recall["static_in_sample"] == pytest.approx(0.375, abs=5e-4)
    deployed = moescope.deploy(run, slots="32", out=tmp_path / "run", quiet=True)
    caches = deployed.table("residency")
    caches = caches[caches["layer"].isna()].set_index("policy")
    assert caches["tokens"].unique().tolist() == [64], "the second half"
    for policy, rate in (("lru", 0.8088), ("belady", 0.9200), ("static", 0.7619)):
        assert caches.loc[policy, "hit_rate"] == pytest.approx(rate, abs=5e-5)
    sequences = [chosen_TK[chosen_TK >= 0].tolist() for chosen_TK in tokens.chosen_LTK]
    hits = np.concatenate([replay_lru(sequence, 32)[len(sequence) // 2 :] for sequence in sequences])
    assert caches.loc["lru", "hit_rate"] == pytest.approx(hits.mean())
