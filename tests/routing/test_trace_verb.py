"""trace as a user calls it: what lands in the run folder, what resumes, what is refused in one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from moescope import cli
from moescope.errors import BadInput
from moescope.routing import trace as trace_module
from moescope.routing.tables import TRACE_TABLES
from moescope.routing.trace import trace
from moescope.run import Run
from routing.tiny_text import save_model, texts, write_jsonl


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Two checkpoints of one model with its tokenizer, and two domains of text."""
    folder = tmp_path_factory.mktemp("place")
    save_model(folder / "checkpoint-100")
    save_model(folder / "checkpoint-200", nudge=0.05)
    write_jsonl(folder / "a.jsonl", texts(30, seed=0, first=0, words=25))
    write_jsonl(folder / "b.jsonl", texts(30, seed=1, first=25, words=25))
    return folder


@pytest.fixture(scope="module")
def domains(place) -> list[str]:
    return [f"a={place / 'a.jsonl'}", f"b={place / 'b.jsonl'}"]


@pytest.fixture(scope="module")
def run(place, domains) -> Run:
    return trace(
        place / "checkpoint-100",
        place / "checkpoint-200",
        domain=domains,
        out=place / "run",
        phase="both",
        save_tokens=True,
        probe_next=True,
        quiet=True,
    )


def test_all_ten_tables_are_there_with_the_schema_s_columns_and_every_column_filled(run):
    assert run.tables == list(TRACE_TABLES)
    for name, spec in TRACE_TABLES.items():
        frame = run.table(name)
        assert pq.read_schema(run.path / f"{name}.parquet").names == list(spec.columns)
        assert len(frame)
        assert not frame.duplicated(list(spec.keys)).any()
        of_training = ["chance_spread"] if name == "routing_layers" else []  # of router diagnostics
        assert [column for column in spec.columns if frame[column].isna().all()] == of_training
        if "layer" in spec.keys:
            assert set(frame["layer_name"]) == {
                f"model.layers.{layer}.block_sparse_moe" for layer in range(3)
            }


def test_the_load_table_equals_output_router_logits(run, place):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / "checkpoint-200")
    model = AutoModelForCausalLM.from_pretrained(place / "checkpoint-200").eval()
    counts, mass = np.zeros((3, 2, 4)), np.zeros((3, 2, 4))
    for domain, name in enumerate("ab"):
        for line in (place / f"{name}.jsonl").read_text().splitlines():
            ids = torch.tensor([tokenizer(json.loads(line)["text"])["input_ids"]])
            with torch.no_grad():
                logits = model(input_ids=ids, output_router_logits=True).router_logits
            for layer, scores in enumerate(logits):
                best = scores.softmax(-1).topk(2)
                for experts, gates in zip(best.indices.tolist(), best.values, strict=True):
                    counts[layer, domain, experts] += 1
                    mass[layer, domain, experts] += (gates / gates.sum()).numpy()
    load = run.table("load")
    for phase in ("prefill", "decode"):
        mine = load[(load["step"] == 200) & (load["phase"] == phase)].sort_values(
            ["layer", "domain", "expert"]
        )
        assert mine["tokens"].to_numpy().reshape(3, 2, 4).tolist() == counts.tolist()
        np.testing.assert_allclose(mine["gate_weight"].to_numpy().reshape(3, 2, 4), mass, rtol=1e-4)


def test_the_tokens_table_holds_every_token_and_sums_to_the_load(run, place):
    tokens, load = run.table("tokens"), run.table("load")
    documents = tokens[tokens["step"] == 100].groupby("document")
    assert len(documents) == 60
    exploded = tokens.explode(["experts", "gates"]).astype({"experts": int, "gates": float})
    keys = ["step", "layer", "domain", "experts"]
    sums = exploded.groupby(keys).agg(tokens=("gates", "size"), gate_weight=("gates", "sum")).reset_index()
    mine = load[load["phase"] == "prefill"].rename(columns={"expert": "experts"})
    both = sums.merge(mine, on=keys, suffixes=("", "_load"))
    assert len(both) == len(sums) == len(mine)
    assert (both["tokens"] == both["tokens_load"]).all()
    np.testing.assert_allclose(both["gate_weight"], both["gate_weight_load"], rtol=1e-5)
    assert (tokens["gates"].map(lambda gates: list(gates) == sorted(gates, reverse=True))).all()
    first = tokens[(tokens["step"] == 100) & (tokens["layer"] == 0) & (tokens["document"] == 0)]
    words = json.loads((place / "a.jsonl").read_text().splitlines()[0])["text"].split()
    assert first.sort_values("position")["token_id"].tolist() == [4 + int(word[4:]) for word in words]


def test_stability_is_that_of_the_tokens_table(run):
    tokens = run.table("tokens").set_index(["document", "position"])
    for layer, row in run.table("stability").set_index("layer").iterrows():
        a, b = (
            tokens[(tokens["step"] == step) & (tokens["layer"] == layer)].sort_index()["experts"]
            for step in (100, 200)
        )
        naive = np.mean([len(set(x) & set(y)) / 2 for x, y in zip(a, b, strict=True)])
        assert row["routing_consistency"] == pytest.approx(naive)
        assert row["top1_agreement"] == pytest.approx(
            np.mean([x[0] == y[0] for x, y in zip(a, b, strict=True)])
        )
        assert (row["step_a"], row["step_b"]) == (100, 200)
        assert row["saturation_topk"] == row["routing_consistency"]
        assert 0.2 < naive < 0.99


def test_vocabulary_counts_are_those_of_the_tokens_table(run):
    tokens = run.table("tokens")
    tokens = tokens[(tokens["step"] == 100) & (tokens["layer"] == 1)].explode("experts")
    naive = tokens.groupby(["experts", "token_id"]).size()
    listed = run.table("vocabulary")
    listed = listed[(listed["step"] == 100) & (listed["layer"] == 1) & (listed["role"] == "input")]
    assert len(listed) == min(len(naive), 200)
    for row in listed.itertuples():
        assert row.count == naive[(row.expert, row.token_id)]
        assert row.token == f"word{row.token_id - 4}"
    assert listed.groupby("expert")["share"].sum().to_numpy() == pytest.approx(np.ones(4))


def test_run_json_says_what_was_read_and_by_what(run):
    assert run.info["verb"] == "trace"
    assert run.info["status"] == "done"
    assert [item["step"] for item in run.info["checkpoints"]] == [100, 200]
    assert all(item["header_hash"] for item in run.info["checkpoints"])
    assert run.info["coverage"][0]["domains"] == {"a": 30, "b": 30}
    assert run.info["setup"][0]["scoring"] == ["softmax"] * 3
    assert run.info["setup"][0]["sample_tokens"] == sum(run.info["coverage"][0]["tokens"].values())
    assert "transformers" in run.info["versions"]
    assert {"load", "trace", "tables", "join"} <= set(run.info["timings"])
    assert not (run.path / "parts").exists()


def equal_tables(left: Run, right: Run, names: tuple[str, ...] = tuple(TRACE_TABLES)[:6]) -> None:
    for name in names:
        pd.testing.assert_frame_equal(left.table(name), right.table(name), rtol=1e-5, atol=1e-8)


def test_batch_size_and_the_order_of_documents_change_no_table(place, tmp_path):
    lines = (place / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "reversed.jsonl").write_text("".join(reversed(lines)))
    first = trace(
        place / "checkpoint-100", text=place / "a.jsonl", out=tmp_path / "1", batch_size=1, quiet=True
    )
    other = trace(
        place / "checkpoint-100",
        text=tmp_path / "reversed.jsonl",
        out=tmp_path / "2",
        batch_size=16,
        quiet=True,
    )
    equal_tables(first, other)
    again = trace(
        place / "checkpoint-100", text=place / "a.jsonl", out=tmp_path / "1", batch_size=3, quiet=True
    )
    assert again.info == first.info, "the same run, found again"
    places = [
        run.table("contexts").drop(columns="document") for run in (first, other)
    ]  # numbered as they are read
    pd.testing.assert_frame_equal(*places, rtol=1e-5)


def test_max_tokens_is_shared_evenly_by_domains_and_documents_whatever_their_order(place, domains, tmp_path):
    first, other = (
        trace(place / "checkpoint-100", domain=order, max_tokens=301, out=tmp_path / name, quiet=True)
        for name, order in (("1", domains), ("2", domains[::-1]))
    )
    coverage = first.info["coverage"][0]
    assert coverage["tokens"] == {"a": 151, "b": 150}
    assert min(coverage["domains"].values()) >= 20
    metrics = first.table("routing_layers").query("metric == 'cv' and domain == ''")
    assert metrics["low"].notna().all(), "intervals need 20 documents"
    by = ["step", "phase", "layer", "domain", "expert"]
    both = [run.table("load").sort_values(by).reset_index(drop=True) for run in (first, other)]
    pd.testing.assert_frame_equal(*both, rtol=1e-5)


def test_the_chat_template_is_applied_where_there_is_one(tmp_path):
    save_model(tmp_path / "chat", chat_template=True)
    (tmp_path / "one.txt").write_text("word1 word2")
    run = trace(
        tmp_path / "chat",
        text=tmp_path / "one.txt",
        chat_template=True,
        save_tokens=True,
        out=tmp_path / "r",
        quiet=True,
    )
    tokens = run.table("tokens")
    assert tokens[tokens["layer"] == 0]["token_id"].tolist() == [1, 5, 6, 2]


def test_half_precision_is_traced_too(place, tmp_path):
    run = trace(
        place / "checkpoint-100", text=place / "a.jsonl", dtype="bfloat16", out=tmp_path / "run", quiet=True
    )
    full = trace(
        place / "checkpoint-100", text=place / "a.jsonl", dtype="float32", out=tmp_path / "full", quiet=True
    )
    tokens = run.table("load")["tokens"]
    assert tokens.sum() == full.table("load")["tokens"].sum()
    assert (tokens - full.table("load")["tokens"]).abs().sum() < 0.1 * tokens.sum()


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": ()}, "no text given"),
        ({"phase": "training"}, "unknown phase 'training'; known: prefill, decode, both"),
        ({"dtype": "int4"}, "unknown dtype 'int4'"),
        ({"max_tokens": 0}, "max_tokens 0: must be at least 1"),
        ({"batch_size": 0}, "batch_size 0: must be at least 1"),
        ({"chat_template": True}, "no chat template; leave --chat-template out"),
        ({"format": "vllm"}, "--format and --experts need --recorded FILE"),
        ({"revisions": "a,b", "models": 2}, "--revisions belong to one model, 2 given"),
        ({"models": 0}, "no model given"),
        ({"models": 2, "same": True}, "given twice"),
    ],
)
def test_a_wrong_argument_is_one_line_and_leaves_nothing_behind(place, tmp_path, changes, words):
    changes = dict(changes)
    number, same = changes.pop("models", 1), changes.pop("same", False)
    models = [place / ("checkpoint-100" if same else f"checkpoint-{index + 1}00") for index in range(number)]
    with pytest.raises(BadInput, match=re.escape(words)) as caught:
        trace(*models, **{"text": place / "a.jsonl", "out": tmp_path / "run", "quiet": True, **changes})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_tokenizer_asks_for_token_ids(place, tmp_path):
    save_model(tmp_path / "bare", tokenizer=False)
    with pytest.raises(BadInput, match="the model has no tokenizer; give token ids with --token-ids"):
        trace(tmp_path / "bare", text=place / "a.jsonl", out=tmp_path / "run", quiet=True)
    (tmp_path / "ids.jsonl").write_text("[4, 5, 6]\n[7, 8]\n")
    run = trace(tmp_path / "bare", token_ids=tmp_path / "ids.jsonl", out=tmp_path / "run", quiet=True)
    assert run.info["coverage"][0]["tokens"] == {"text": 5}
    assert run.table("vocabulary")["token"].isna().all()


@pytest.mark.parametrize("token", [64, -1])
def test_a_token_id_the_model_does_not_have_is_named_before_it_is_loaded(place, tmp_path, token, monkeypatch):
    monkeypatch.setattr(trace_module, "trace_step", None)
    (tmp_path / "ids.jsonl").write_text(f"[4, {token}]\n")
    with pytest.raises(BadInput, match=f"token id {token}: .* has 64 tokens"):
        trace(place / "checkpoint-100", token_ids=tmp_path / "ids.jsonl", out=tmp_path / "run", quiet=True)


def test_a_text_without_a_token_is_refused_before_the_model_is_loaded(place, tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "trace_step", None)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(BadInput, match="the text holds no token"):
        trace(place / "checkpoint-100", text=tmp_path / "empty.txt", out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_steps_of_different_shape_are_refused(place, tmp_path):
    save_model(tmp_path / "other", kind="qwen3_moe")
    with pytest.raises(BadInput, match="other MoE layers or experts than step"):
        trace(
            place / "checkpoint-100",
            tmp_path / "other",
            text=place / "a.jsonl",
            out=tmp_path / "run",
            quiet=True,
        )


def test_steps_that_read_other_tokens_are_refused(place, tmp_path):
    save_model(tmp_path / "step-2")
    shutil.copytree(place / "checkpoint-100", tmp_path / "step-1")
    tokenizer = tmp_path / "step-2" / "tokenizer.json"
    tokenizer.write_text(
        tokenizer.read_text().replace('"word1": 5', '"word1": 6').replace('"word2": 6', '"word2": 5')
    )
    with pytest.raises(BadInput, match="step 2 splits the text into other tokens than step 1"):
        trace(
            tmp_path / "step-1", tmp_path / "step-2", text=place / "a.jsonl", out=tmp_path / "run", quiet=True
        )


def test_an_encoder_decoder_model_is_traced_in_prefill_and_refused_in_decode(place, tmp_path):
    save_model(tmp_path / "switch", kind="switch_transformers")
    run = trace(tmp_path / "switch", text=place / "a.jsonl", out=tmp_path / "run", quiet=True)
    assert dict(zip(run.table("load")["layer"], run.table("load")["layer_name"], strict=True)) == {
        1: "encoder.block.1.layer.1.mlp",
        3: "encoder.block.3.layer.1.mlp",
        5: "decoder.block.1.layer.2.mlp",
    }
    assert len(run.table("coactivation")) == 0  # one expert a token
    with pytest.raises(BadInput, match="traced in prefill only"):
        trace(tmp_path / "switch", text=place / "a.jsonl", phase="decode", out=tmp_path / "no", quiet=True)


# --- the command line


def test_the_command_prints_coverage_and_folder_and_json_lists_the_tables(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(
        cli.app, ["trace", str(place / "checkpoint-100"), "--text", str(place / "a.jsonl")]
    )
    assert shown.exit_code == 0, shown.stderr
    assert "mixtral: 3 MoE layers, 4 experts" in shown.stdout
    assert "run: runs/trace-checkpoint-100-1" in shown.stdout
    again = CliRunner().invoke(
        cli.app,
        [
            "trace",
            str(place / "checkpoint-100"),
            "--text",
            str(place / "a.jsonl"),
            "--json",
            "--out",
            "runs/trace-checkpoint-100-1",
        ],
    )
    facts = json.loads(again.stdout)
    assert facts["verb"] == "trace"
    assert set(facts["tables"]) == set(TRACE_TABLES) - {"tokens", "token_text", "ribbon"}
