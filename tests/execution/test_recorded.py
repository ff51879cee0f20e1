"""Traces of other tools give the same tables as a run of our own with the same choices."""

from __future__ import annotations

import base64
import gzip
import io
import json
import resource
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import moescope
from moescope.errors import BadInput
from moescope.execution.recorded import Shape, inferred_k, read_trace
from moescope.routing import trace_recorded
from moescope.routing.metrics import METRICS
from moescope.routing.trace import trace
from moescope.run import Run
from routing.tiny_text import save_model, texts, write_jsonl


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("import")
    save_model(folder / "mixtral")
    save_model(folder / "qwen", kind="qwen3_moe")  # MoE in layers 1 and 3 of 4
    write_jsonl(folder / "a.jsonl", texts(25))
    return folder


@pytest.fixture(scope="module")
def own(place) -> Run:
    return trace(place / "mixtral", text=place / "a.jsonl", out=place / "own", save_tokens=True, quiet=True)


def arrays(run: Run) -> list[np.ndarray]:
    """Each document's choices as [tokens, layers, k], from the tokens table."""
    tokens = run.table("tokens").sort_values(["document", "position", "layer"])
    layers = tokens["layer"].nunique()
    return [
        np.stack(rows["experts"].to_list()).reshape(-1, layers, 2).astype(np.int32)
        for _, rows in tokens.groupby("document")
    ]


def base64_npy(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def same_load(imported: Run, run: Run, names: bool = True) -> None:
    columns = ["layer", "expert", "tokens"] + (["layer_name"] if names else [])
    pd.testing.assert_frame_equal(imported.table("load")[columns], run.table("load")[columns])
    pd.testing.assert_frame_equal(
        imported.table("coactivation").drop(columns="layer_name"),
        run.table("coactivation").drop(columns="layer_name"),
    )


def metrics(run: Run) -> pd.DataFrame:
    return run.table("routing_layers").set_index(["layer", "metric"]).sort_index()


def test_our_own_tokens_table_gives_back_the_same_tables(own, tmp_path):
    again = trace(recorded=own.path / "tokens.parquet", format="moescope", experts=4, out=tmp_path / "run")
    same_load(again, own)
    np.testing.assert_allclose(
        again.table("load")["gate_weight"], own.table("load")["gate_weight"], rtol=1e-5
    )
    ours, theirs = metrics(own), metrics(again)
    assert {"cv", "gate_weight_gini", "sequential_consistency", "token_information"} <= set(
        theirs.index.get_level_values("metric")
    )
    np.testing.assert_allclose(
        theirs.to_numpy()[:, 4:].astype(float),
        ours.loc[theirs.index].to_numpy()[:, 4:].astype(float),
        rtol=1e-4,
        atol=1e-6,
    )
    vocabulary = own.table("vocabulary")
    mine = vocabulary[vocabulary["role"] != "predicted"].drop(columns="token").reset_index(drop=True)
    pd.testing.assert_frame_equal(again.table("vocabulary").drop(columns="token"), mine)


def test_vllm_s_answers_give_the_same_load_and_keep_prompt_and_answer_apart(own, place, tmp_path):
    whole, split, usage = tmp_path / "whole.jsonl", tmp_path / "split.jsonl", tmp_path / "usage.jsonl"
    documents = arrays(own)
    whole.write_text(
        "".join(
            json.dumps({"choices": [{"text": "", "routed_experts": base64_npy(array)}]}) + "\n"
            for array in documents
        )
    )
    split.write_text(
        "".join(
            json.dumps(
                {
                    "prompt_routed_experts": array[:2].tolist(),
                    "choices": [{"routed_experts": base64_npy(array[2:])}],
                }
            )
            + "\n"
            for array in documents
        )
    )
    usage.write_text(
        "".join(
            json.dumps({"usage": {"prompt_tokens": 2}, "choices": [{"routed_experts": array.tolist()}]})
            + "\n"
            for array in documents
        )
    )
    run = trace(place / "mixtral", recorded=whole, format="vllm", experts=4, out=tmp_path / "1")
    same_load(run, own)
    assert run.table("load")["gate_weight"].isna().all()
    halves = [
        trace(recorded=file, format="vllm", experts=4, out=tmp_path / file.stem) for file in (split, usage)
    ]
    for half in halves:
        load = half.table("load")
        by_phase = load.groupby("phase")["tokens"].sum()
        assert by_phase["prefill"] == 25 * 2 * 2 * 3
        total = load.groupby(["layer", "expert"])["tokens"].sum()
        assert total.tolist() == own.table("load").groupby(["layer", "expert"])["tokens"].sum().tolist()
    pd.testing.assert_frame_equal(halves[0].table("load"), halves[1].table("load"))


def test_what_a_trace_does_not_hold_is_absent_and_not_zero(tmp_path):
    """Servers write the chosen experts only: no gates, no probabilities, no token ids, no empty slots."""
    chosen = np.random.default_rng(0).random((30, 40, 2, 4)).argsort(-1)[..., :2]
    lines = [json.dumps({"choices": [{"routed_experts": document.tolist()}]}) for document in chosen]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    run = trace(recorded=tmp_path / "a.jsonl", format="vllm", experts=4, out=tmp_path / "run")
    rows = run.table("routing_layers")
    load = {name for name, metric in METRICS.items() if metric.group == "load"}
    assert set(rows["metric"]) == load | {"sequential_consistency", "adjacent_jaccard", "expert_overlap"}
    assert rows["value"].notna().all()
    assert run.table("load")["gate_weight"].isna().all()
    assert run.table("vocabulary").empty
    names = [key.name for key in run.verb.summary(run).key_numbers]
    assert not [name for name in names if "entropy" in name or "token" in name]


def test_empty_slots_of_a_trace_are_reported(tmp_path):
    chosen = np.random.default_rng(0).random((30, 40, 1, 4)).argsort(-1)[..., :2]
    chosen[:, ::4, :, 1] = -1
    lines = [json.dumps({"choices": [{"routed_experts": document.tolist()}]}) for document in chosen]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    run = trace(recorded=tmp_path / "a.jsonl", format="vllm", experts=4, out=tmp_path / "run")
    assert metrics(run).loc[(0, "dropped"), "value"] == pytest.approx(1 / 8)


def test_each_of_several_answers_to_a_prompt_is_a_document_and_the_prompt_counts_once(tmp_path):
    array = np.array([[[0, 1]], [[2, 3]]])
    answer = {
        "prompt_routed_experts": array.tolist(),
        "choices": [{"routed_experts": array[:1].tolist()}] * 3,
    }
    (tmp_path / "a.json").write_text(json.dumps([answer]))
    stretches = list(read_trace(tmp_path / "a.json", "vllm", Shape(4)))
    assert [(part.document, part.phase, len(part.chosen_TLK)) for part in stretches] == [
        (0, "prefill", 2),
        (0, "decode", 1),
        (1, "decode", 1),
        (2, "decode", 1),
    ]


def test_one_npy_array_is_one_document(own, tmp_path):
    np.save(tmp_path / "one.npy", np.concatenate(arrays(own)).astype(np.int16))
    run = trace(recorded=tmp_path / "one.npy", format="vllm", experts=4, out=tmp_path / "run")
    same_load(run, own, names=False)
    assert run.info["coverage"][0]["domains"] == {"text": 1}


def test_sglang_s_numbers_are_shaped_by_the_model(own, place, tmp_path):
    file = tmp_path / "sglang.jsonl"
    file.write_text(
        "".join(
            json.dumps(
                {
                    "text": "",
                    "meta_info": {
                        "prompt_tokens": 999,
                        "routed_experts": base64.b64encode(array.tobytes()).decode(),
                    },
                }
            )
            + "\n"
            for array in arrays(own)
        )
    )
    same_load(trace(place / "mixtral", recorded=file, format="sglang", experts=4, out=tmp_path / "run"), own)
    with pytest.raises(BadInput, match="give the model's folder too"):
        trace(recorded=file, format="sglang", experts=4, out=tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_layers_that_are_not_moe_are_left_out_by_the_model_or_where_nothing_was_chosen(place, tmp_path):
    run = trace(place / "qwen", text=place / "a.jsonl", out=tmp_path / "own", save_tokens=True, quiet=True)
    full = []
    for array in arrays(run):
        padded = np.zeros((len(array), 4, 2), dtype=np.int32)
        padded[:, [1, 3]] = array
        full.append(padded)
    answers = tmp_path / "a.jsonl"
    answers.write_text(
        "".join(
            json.dumps({"meta_info": {"routed_experts": base64.b64encode(array.tobytes()).decode()}}) + "\n"
            for array in full
        )
    )
    same_load(trace(place / "qwen", recorded=answers, format="sglang", experts=4, out=tmp_path / "1"), run)
    marked = [np.where(np.isin(np.arange(4), [1, 3])[None, :, None], array, -1) for array in full]
    answers.write_text("".join(json.dumps({"routed_experts": array.tolist()}) + "\n" for array in marked))
    same_load(trace(recorded=answers, format="vllm", experts=4, out=tmp_path / "2"), run, names=False)
    answers.write_text(
        "".join(json.dumps({"routed_experts": array.tolist()}) + "\n" for array in arrays(run))
    )
    same_load(trace(place / "qwen", recorded=answers, format="vllm", experts=4, out=tmp_path / "3"), run)


def test_llama_cpp_s_rows_give_the_same_load_with_k_told_or_found(own, place, tmp_path):
    whole = np.concatenate(arrays(own))
    file = tmp_path / "trace.csv"
    rows = []
    for start in range(0, len(whole), 40):  # one batch after the other, layer by layer within it
        for layer in range(3):
            rows += [f"{layer},{expert}" for expert in whole[start : start + 40, layer].reshape(-1)]
    file.write_text("layer,expert\n" + "\n".join(rows) + "\n")
    same_load(trace(place / "mixtral", recorded=file, format="llamacpp", experts=4, out=tmp_path / "1"), own)
    found = trace(recorded=file, format="llamacpp", experts=4, out=tmp_path / "2")
    same_load(found, own, names=False)
    assert found.info["coverage"][0]["k"] == [2]


def test_k_is_the_most_for_which_groups_name_different_experts():
    four, two = np.array([0, 1, 2, 3, 1, 0, 3, 2]), np.array([0, 1, 0, 1, 0, 1])
    assert inferred_k([four], 8) == 4
    assert inferred_k([four, two], 8) == 2
    assert inferred_k([np.array([0, 0, 0])], 8) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": None, "recorded": "a.jsonl"}, "give --format too; known: vllm, sglang, llamacpp"),
        ({"format": "ollama"}, "unknown format 'ollama'"),
        ({"experts": None}, "--experts N"),
        ({"experts": 100_000}, "^experts 100000: .*at most 4096"),
        ({"text": "x"}, "--recorded replaces the text"),
        ({"max_tokens": 9}, "^--max-tokens applies to a model run, not to --recorded; leave it out$"),
    ],
)
def test_import_says_what_it_needs(tmp_path, changes, words):
    (tmp_path / "a.csv").write_text("0,1\n")
    (tmp_path / "a.jsonl").write_text("{}\n")
    given = {"recorded": "a.csv", "format": "llamacpp", "experts": 4, "out": tmp_path / "run", **changes}
    given["recorded"] = tmp_path / given["recorded"]
    with pytest.raises(BadInput, match=words):
        trace(**given)


def test_the_identity_of_an_import_is_what_it_reads(tmp_path):
    (tmp_path / "a.csv").write_text("0,1\n0,2\n")
    run = trace(recorded=tmp_path / "a.csv", format="llamacpp", experts=4, out=tmp_path / "run", quiet=True)
    assert set(run.info["arguments"]) == {"save_tokens", "recorded", "format", "experts", "maps", "seed"}


def test_a_number_of_experts_that_is_not_the_model_s_is_refused(place, tmp_path):
    (tmp_path / "a.csv").write_text("0,1\n")
    with pytest.raises(BadInput, match=r"--experts 8: .* has 4"):
        trace(
            place / "mixtral", recorded=tmp_path / "a.csv", format="llamacpp", experts=8, out=tmp_path / "run"
        )


def test_reading_alone_checks_expert_numbers(tmp_path):
    (tmp_path / "a.csv").write_text("0,1\n0,-2\n")
    with pytest.raises(BadInput, match="expert -2"):
        list(read_trace(tmp_path / "a.csv", "llamacpp", Shape(4)))


# --- dense layers, several answers, ragged layers


def test_layers_whose_slots_name_one_expert_are_dense_and_are_skipped_with_their_numbers(place, tmp_path):
    run = trace(place / "qwen", text=place / "a.jsonl", out=tmp_path / "own", save_tokens=True, quiet=True)
    lines = []
    for chosen in arrays(run):
        full = np.zeros((len(chosen), 4, 2), dtype=np.int32)
        full[:, [1, 3]] = chosen
        lines.append(json.dumps({"routed_experts": full.tolist()}))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    imported = trace(recorded=tmp_path / "a.jsonl", format="vllm", experts=4, out=tmp_path / "imported")
    same_load(imported, run, names=False)
    assert [line for line in imported.info["warnings"] if line.startswith("layers 0, 2 ")]
    np.save(tmp_path / "dense.npy", np.zeros((5, 3, 2), dtype=np.int32))
    with pytest.raises(BadInput, match="no routing in it"):
        trace(recorded=tmp_path / "dense.npy", format="vllm", experts=4, out=tmp_path / "none")


def test_a_top_1_layer_with_one_busy_expert_is_not_called_dense(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((5, 2, 1), dtype=np.int32))
    run = trace(recorded=tmp_path / "a.npy", format="vllm", experts=4, out=tmp_path / "run", quiet=True)
    assert run.table("load").groupby("layer")["tokens"].max().tolist() == [5, 5]


def test_complete_arrays_of_several_answers_count_their_prompt_once(tmp_path):
    prompt, answers = [[[0, 1]], [[2, 3]]], [[[[3, 0]]], [[[2, 1]]], [[[1, 2]]]]
    choices = [{"routed_experts": prompt + answer} for answer in answers]

    def phases(answer: object) -> list[tuple[int, str, list[list[list[int]]]]]:
        (tmp_path / "a.json").write_text(json.dumps(answer))
        stretches = read_trace(tmp_path / "a.json", "vllm", Shape(4))
        return [(part.document, part.phase, part.chosen_TLK.tolist()) for part in stretches]

    expected = [(number, "decode", answer) for number, answer in enumerate(answers)]
    counted = phases({"usage": {"prompt_tokens": 2}, "choices": choices})
    assert counted == [(0, "prefill", prompt), *expected]
    for choice, ids in zip(choices, ([5, 6], [7, 8], [5, 6]), strict=True):
        choice["prompt_token_ids"] = ids
    assert phases({"choices": choices}) == [
        (0, "prefill", prompt),
        expected[0],
        (1, "prefill", prompt),
        *expected[1:],
    ]
    for choice in choices:
        del choice["prompt_token_ids"]
    for usage in ({}, {"prompt_tokens": 4}):
        with pytest.raises(BadInput, match="3 choices share a prompt"):
            phases({"usage": usage, "choices": choices})


def test_layers_of_a_real_llama_cpp_trace_have_different_numbers_of_tokens(tmp_path):
    """Qwen3-30B-A3B: 28 tokens of a prompt, of which the last layer routes the last only, and 24 generated.

    Excerpt of layers 0, 46 and 47 of the route trace in Helldez/BigMoeOnEdge (docs/bench-data), Apache-2.0.
    """
    golden = Path(__file__).parents[1] / "golden" / "qwen3_30b_a3b_route.csv"
    run = trace(recorded=golden, format="llamacpp", experts=128, out=tmp_path / "run", quiet=True)
    rows = pd.read_csv(golden)
    load = run.table("load").set_index(["layer", "expert"])["tokens"]
    for (layer, expert), count in rows.groupby(["layer", "expert"]).size().items():
        assert load[layer, expert] == count
    assert load.groupby("layer").sum().to_dict() == {0: 52 * 6, 46: 52 * 6, 47: 25 * 6}
    assert run.info["coverage"][0]["k"] == [6]
    tokens = metrics(run)["tokens"].groupby("layer").first()
    assert tokens.to_dict() == {0: 52, 46: 52, 47: 25}


def test_our_own_table_may_lack_tokens_in_some_layers(own, tmp_path):
    table = pq.read_table(own.path / "tokens.parquet")
    frame = table.to_pandas()
    kept = frame[(frame["layer"] != 2) | (frame["position"] > 0)]
    pq.write_table(pa.Table.from_pandas(kept, schema=table.schema), tmp_path / "t.parquet")
    run = trace(recorded=tmp_path / "t.parquet", format="moescope", experts=4, out=tmp_path / "run")
    expected = kept.explode("experts").groupby(["layer", "experts"]).size()
    counted = run.table("load").groupby(["layer", "expert"])["tokens"].sum()
    assert counted[counted > 0].tolist() == expected.tolist()


def test_experts_are_those_of_the_model_s_folder(own, place, tmp_path):
    np.save(tmp_path / "a.npy", np.concatenate(arrays(own)))
    run = trace(place / "mixtral", recorded=tmp_path / "a.npy", format="vllm", out=tmp_path / "run")
    same_load(run, own)


def test_long_documents_are_counted_in_parts_with_equal_numbers(own, tmp_path, monkeypatch):
    file = tmp_path / "a.npy"
    np.save(file, np.concatenate(arrays(own)))
    run = trace(recorded=file, format="vllm", experts=4, out=tmp_path / "1", quiet=True)
    monkeypatch.setattr(trace_recorded, "AT_ONCE", 28)
    parts = trace(recorded=file, format="vllm", experts=4, out=tmp_path / "2", quiet=True)
    same_load(parts, run)
    pd.testing.assert_frame_equal(metrics(parts), metrics(run))


# --- SGLang's expert distribution recorder


def recorder_file(file: Path, **content: object) -> Path:
    torch.save(content, file)
    return file


def test_logical_counts_of_sglang_s_recorder_are_the_load(own, place, tmp_path):
    load = own.table("load").pivot(index="layer", columns="expert", values="tokens").to_numpy()
    first = np.minimum(load, 7)
    counts = torch.tensor(np.stack([first, load - first]), dtype=torch.int32)
    for name, logical in (("steps", counts), ("sum", counts.sum(0))):
        file = recorder_file(tmp_path / f"{name}.pt", rank=0, logical_count=logical)
        run = trace(place / "mixtral", recorded=file, format="sglang", out=tmp_path / name, quiet=True)
        columns = ["layer", "layer_name", "expert", "tokens"]
        pd.testing.assert_frame_equal(run.table("load")[columns], own.table("load")[columns])
        ours, theirs = metrics(own), metrics(run)
        for metric in ("cv", "gini", "max_violation", "load_entropy"):
            columns = ["value", "chance", "collapse", "tokens"]
            pd.testing.assert_frame_equal(
                theirs.xs(metric, level=1)[columns], ours.xs(metric, level=1)[columns]
            )
        assert not set(theirs.index.get_level_values(1)) & {"expert_overlap", "sequential_consistency"}
        assert run.table("coactivation").empty
    with pytest.raises(BadInput, match="give the model's folder too"):
        trace(recorded=file, format="sglang", experts=4, out=tmp_path / "no")


def test_tokens_of_sglang_s_recorder_are_mapped_to_logical_experts(tmp_path):
    """Layer 0 is dense; physical experts 0 1 2 3 4 of layer 1 are copies of experts 1 0 3 2 1."""
    empty = [-1, -1, -1]

    def record(
        mode: int, ids: list[int], positions: list[int], lengths: list[int] | None, chosen: list
    ) -> dict:
        layers = torch.tensor([[empty] * len(ids), [[*pair, -1] for pair in chosen]], dtype=torch.int32)
        names = {"input_ids": ids, "positions": positions, "extend_seq_lens": lengths, "forward_mode": mode}
        return {**names, "topk_ids_of_layer": layers, "misc_objects": [], "rank": 0, "forward_pass_id": mode}

    records = [
        record(1, [10, 11, 12], [0, 1, 0], [2, 1], [[0, 1], [2, 4], [3, 0]]),
        record(2, [13, 14], [2, 1], None, [[4, 2], [1, 0]]),
        record(4, [], [], None, torch.zeros(0, 2).tolist()),
        record(2, [15, 16], [3, 2], None, [[4, 2], [1, 3]]),
    ]
    records[2]["topk_ids_of_layer"] = torch.zeros(2, 0, 3, dtype=torch.int32)
    physical = torch.tensor([[0, 1, 2, 3, 0], [1, 0, 3, 2, 1]])
    file = recorder_file(tmp_path / "a.pt", records=records, last_physical_to_logical_map=physical)
    run = trace(recorded=file, format="sglang", experts=4, out=tmp_path / "run", quiet=True)
    load = run.table("load").pivot(index="expert", columns="phase", values="tokens")
    assert set(run.table("load")["layer"]) == {1}
    assert load["prefill"].tolist() == [1, 3, 1, 1]
    assert load["decode"].tolist() == [2, 3, 1, 2]
    assert run.info["coverage"][0]["k"] == [2]
    assert run.info["coverage"][0]["domains"] == {"text": 3}
    values = run.table("routing_layers").set_index(["phase", "metric"])["value"]
    assert values["prefill", "sequential_consistency"] == 0  # one pair of tokens: expert 1, then expert 3
    assert np.isnan(values["decode", "sequential_consistency"])  # of different requests
    vocabulary = run.table("vocabulary")
    assert set(vocabulary.loc[vocabulary["role"] == "input", "token_id"]) == {10, 11, 12}


def test_code_in_a_recorder_file_is_not_executed(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "touched",))

    file = recorder_file(tmp_path / "a.pt", logical_count=Harmful())
    with pytest.raises(BadInput, match="no file of tensors"):
        trace(recorded=file, format="sglang", experts=4, out=tmp_path / "run")
    assert not (tmp_path / "touched").exists()


# --- hostile files


def npy_header(shape: str, dtype: str = "<i4") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(24)


TABLE = b"document,position,layer,experts\n"


def answer(value: object, **more: object) -> bytes:
    return json.dumps({"routed_experts": value, **more}).encode()


@pytest.mark.parametrize(
    ("name", "format", "content", "words"),
    [
        ("a.jsonl", "vllm", answer([[[0, 1]], [[0]]]), "different lengths"),
        ("a.jsonl", "vllm", answer([[[0.5, 1]]]), "expected whole numbers"),
        ("a.jsonl", "vllm", answer("\ud800"), "not base64"),
        ("a.jsonl", "vllm", answer([[[0, 1]]], prompt_tokens="2"), "prompt_tokens '2'"),
        ("a.jsonl", "vllm", answer([[[0] * 5]]), "1 layers with 5 experts per token"),
        ("a.jsonl", "vllm", b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),
        ("a.jsonl", "vllm", b"[1, 2]", 'no "routed_experts"'),
        ("a.npy", "vllm", npy_header("(1000000000000, 4, 2)"), "no valid .npy array"),
        ("a.npy", "vllm", npy_header("(1, 3, 1)", "|O8"), "no valid .npy array"),
        ("a.jsonl", "sglang", answer("AAAA"), "give the model's folder too"),
        ("a.pt", "sglang", b"nothing", "no file of tensors"),
        ("a.csv", "llamacpp", b"0," + b"1" * 200_000, "is not layer,expert|expert 1"),
        (
            "a.csv",
            "llamacpp",
            b"99999999999999999999999,0\n",
            "line 1: '99999999999999999999999,0' is not layer,expert",
        ),
        ("a.jsonl", "vllm", b'{"routed_experts": "%%%"}\n', "not base64"),
        ("a.jsonl", "vllm", b'{"routed_experts": [[[9]]]}\n', "document 0: expert 9, but a layer has 4"),
        (
            "a.jsonl",
            "vllm",
            b'{"routed_experts": [[[0]]]}\n{"routed_experts": [[[0, 1]]]}\n',
            "give traces of one model",
        ),
        (
            "a.csv",
            "llamacpp",
            b"layer,expert\n2000,1\n",
            "line 2: '2000,1' is not layer,expert; check --format",
        ),
        ("a.csv", "llamacpp", b"layer,expert\n", "no rows"),
        ("a.parquet", "moescope", b"nothing", "neither a .csv nor a parquet file; give another --format"),
        ("a.csv", "table", TABLE + b"0,0,0,1 x\n", "column experts .* 'x'"),
        ("a.csv", "table", TABLE + b"0,0,0,1 9\n", "expert 9, but a layer has 4"),
        ("a.csv", "table", b"document,position,layer\n0,0,0\n", "no column experts"),
        ("a.csv", "table", TABLE + b"0,0,0,1 2\n" * 2, "two rows of document 0"),
        ("a.csv", "table", b"document,position,layer,experts,phase\n0,0,0,1 2,x\n", "phase 'x'"),
        (
            "a.jsonl",
            "vllm",
            b'{"routed_experts": [[[0, 1], [1, 2]], [[3, 0], [2, 2]]]}\n',
            "document 0, token 1, layer 1: names expert 2 twice, .*; record it again",
        ),
        ("a.csv", "route", b"turn,layer\n0,0\n", "no column phase, step, slot"),
    ],
)
def test_traces_that_cannot_be_read_are_one_line_in_little_memory(tmp_path, name, format, content, words):
    (tmp_path / name).write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadInput, match=words) as caught:
        trace(recorded=tmp_path / name, format=format, experts=4, out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes


def test_counts_that_would_not_fit_in_memory_are_one_line(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(600).reshape(1, 300, 2))
    with pytest.raises(BadInput, match="300 layers x 4096 experts x 1 domains: too many to count in memory"):
        trace(recorded=tmp_path / "a.npy", format="vllm", experts=4096, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def recorded_tokens(**changes: object) -> dict[str, object]:
    record = {
        "input_ids": [1, 2],
        "positions": [0, 1],
        "extend_seq_lens": [2],
        "forward_mode": 1,
        "topk_ids_of_layer": torch.tensor([[[0, 1], [2, 3]]]),
    }
    return {"records": [record | changes]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "neither logical_count nor topk_ids_of_layer"),
        ({"records": [{"global_physical_count": torch.ones(2, 4)}]}, "per_token"),
        ({"logical_count": torch.ones(3, 4)}, "no tensor of whole numbers"),
        ({"logical_count": -torch.ones(3, 4, dtype=torch.int64)}, "expected .* counts"),
        ({"logical_count": torch.ones(1, 1, dtype=torch.int64).expand(10**9, 4)}, "stored in this file"),
        (recorded_tokens(input_ids=[1, -1]), "token id -1"),
        (recorded_tokens(extend_seq_lens=[3, -1]), "do not fit"),
        (recorded_tokens(forward_mode=5), "speculative"),
        (recorded_tokens(topk_ids_of_layer=torch.tensor([[[0, 1], [2, 9]]])), "expert 9"),
        (recorded_tokens() | {"last_physical_to_logical_map": torch.tensor([[0, 1]])}, "has shape"),
    ],
)
def test_files_of_sglang_s_recorder_that_do_not_fit_are_one_line(tmp_path, content, words):
    with pytest.raises(BadInput, match=words):
        trace(
            recorded=recorder_file(tmp_path / "a.pt", **content),
            format="sglang",
            experts=4,
            out=tmp_path / "run",
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda frame: frame.drop(columns=["position", "experts"]), "no column position, experts"),
        (lambda frame: frame.assign(position=-1), "column position"),
        (lambda frame: frame.assign(experts=[[0] * 6] * len(frame)), "6 experts of 4"),
        (lambda frame: frame.assign(gates=[[0.5]] * len(frame)), "more or fewer gates"),
        (lambda frame: frame.iloc[:0], "no token"),
    ],
)
def test_a_changed_tokens_table_is_one_line(own, tmp_path, change, words):
    table = pq.read_table(own.path / "tokens.parquet")
    frame = pd.concat([table.to_pandas()] * 5, ignore_index=True)
    changed = pa.Table.from_pandas(change(frame), preserve_index=False)
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), tmp_path / "t.parquet")
    with pytest.raises(BadInput, match=words):
        trace(recorded=tmp_path / "t.parquet", format="moescope", experts=4, out=tmp_path / "run")


# --- tables of tokens


def test_a_table_needs_four_columns_and_gives_the_same_load_as_parquet_csv_and_one_row_per_choice(
    own, tmp_path
):
    tokens = own.table("tokens")[["document", "position", "layer", "experts", "gates"]]
    tokens.astype({"document": "int16", "layer": "int8"}).to_parquet(tmp_path / "a.parquet", index=False)
    listed = tokens.assign(
        experts=[" ".join(map(str, row)) for row in tokens["experts"]],
        gates=[str([float(gate) for gate in row]) for row in tokens["gates"]],
    )
    listed.to_csv(tmp_path / "b.csv", index=False)
    rows = tokens.assign(slot=[list(range(len(row))) for row in tokens["experts"]])
    rows = rows.explode(["experts", "gates", "slot"]).rename(columns={"experts": "expert", "gates": "gate"})
    rows.sample(frac=1, random_state=0).to_csv(tmp_path / "c.csv.gz", index=False)
    for name in ("a.parquet", "b.csv", "c.csv.gz"):
        run = trace(recorded=tmp_path / name, experts=4, out=tmp_path / name.partition(".")[0])
        same_load(run, own, names=False)
        weights = run.table("load")["gate_weight"], own.table("load")["gate_weight"]
        np.testing.assert_allclose(*weights, rtol=1e-4)
        ours, theirs = metrics(own), metrics(run)
        for metric in ("sequential_consistency", "adjacent_jaccard"):
            np.testing.assert_allclose(theirs.xs(metric, level=1)["value"], ours.xs(metric, level=1)["value"])
        assert "token_information" not in theirs.index.get_level_values("metric")


# --- what a recorded trace may hold and where it may lie: empty slots, few documents, domains, run folders


def test_empty_slots_are_counted_aloud(tmp_path):
    answer = {"routed_experts": [[[0, 1], [1, -1]], [[3, 0], [-1, -1]]]}
    (tmp_path / "a.jsonl").write_text(json.dumps(answer) + "\n")
    run = trace(recorded=tmp_path / "a.jsonl", format="vllm", experts=4, out=tmp_path / "run", quiet=True)
    assert "3 of 8 slots are empty (-1) and not counted" in run.info["warnings"]
    load = run.table("load").groupby("layer")["tokens"].sum()
    assert load.to_dict() == {0: 4, 1: 1}


def test_a_run_folder_points_to_its_tokens(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(BadInput, match=r"run folder without tokens; .* --save-tokens"):
        trace(recorded=tmp_path / "run", format="moescope", experts=4, out=tmp_path / "out")
    (tmp_path / "run" / "tokens.parquet").write_text("")
    with pytest.raises(BadInput, match=r"run folder; .* --recorded .*run/tokens.parquet$"):
        trace(recorded=tmp_path / "run", experts=4, out=tmp_path / "out")
    with pytest.raises(BadInput, match="a folder; give the recorded trace"):
        trace(recorded=tmp_path, experts=4, out=tmp_path / "out")


def test_intervals_need_20_documents_with_tokens_in_the_phase(tmp_path):
    """Two prompts with ten answers each: 20 documents have answers, two have prompts."""
    generator = np.random.default_rng(0)

    def choices(tokens: int) -> list:
        return generator.random((tokens, 1, 8)).argsort(-1)[..., :2].tolist()

    lines = [
        json.dumps(
            {
                "prompt_routed_experts": choices(12),
                "choices": [{"routed_experts": choices(9)} for _ in range(10)],
            }
        )
        for _ in range(2)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    run = trace(recorded=tmp_path / "a.jsonl", format="vllm", experts=8, out=tmp_path / "run")
    rows = run.table("routing_layers").set_index(["phase", "metric"])
    assert rows.loc["prefill", ["low", "high", "corrected"]].isna().all(axis=None)
    assert rows.loc["decode"].loc[["cv", "adjacent_jaccard"], ["low", "high"]].notna().all(axis=None)
    assert any("prefill" in warning and "2 " in warning for warning in run.info["warnings"])


def test_documents_of_two_domains_may_have_the_same_number(tmp_path):
    rows = ["domain,document,position,layer,experts"]
    rows += [f"{domain},{document},0,3,0 1" for domain in ("law", "code") for document in (7, 9)]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    run = trace(recorded=tmp_path / "a.csv", experts=4, out=tmp_path / "run")
    assert run.info["coverage"][0]["domains"] == {"code": 2, "law": 2}
    assert run.table("load").groupby("expert")["tokens"].sum().tolist() == [4, 4, 0, 0]
    assert set(run.table("load")["layer"]) == {3}


def test_a_route_trace_names_its_experts_and_may_have_fewer_tokens_in_the_last_layer(tmp_path):
    """Two prompt tokens, of which the last layer computes one, and one generated token; slots reversed."""
    head = "# route_trace v1\n# model=m.gguf arch=a n_layer=2 n_expert=8 n_expert_used=2\n"
    head += "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n"
    chosen = {(0, 0, 0): (5, 1), (0, 1, 0): (5, 2), (0, 1, 1): (7, 0), (1, 2, 0): (1, 5), (1, 2, 1): (3, 4)}
    rows = [
        f"0,{phase},{step},{layer},{slot},{expert},{0.75 - slot / 2},0,0"
        for (phase, step, layer), experts in chosen.items()
        for slot, expert in reversed(list(enumerate(experts)))
    ]
    text = head + "\n".join(rows) + "\n"
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(text.encode()))
    loads = []
    for name in ("a.csv", "b.csv.gz"):
        run = trace(recorded=tmp_path / name, out=tmp_path / name[0])
        loads.append(run.table("load"))
        assert (run.info["coverage"][0]["k"], run.info["coverage"][0]["experts_per_layer"]) == ([2], [8])
    pd.testing.assert_frame_equal(*loads)
    load = loads[0].set_index(["phase", "layer", "expert"]).sort_index()
    used = load[load["tokens"] > 0]
    assert used["tokens"].loc["prefill", 0].to_dict() == {1: 1, 2: 1, 5: 2}
    assert used["tokens"].loc["prefill", 1].to_dict() == {0: 1, 7: 1}
    assert used["gate_weight"].loc["prefill", 0].to_dict() == pytest.approx({1: 0.25, 2: 0.25, 5: 1.5})
    assert used["gate_weight"].loc["decode", 1].to_dict() == pytest.approx({3: 0.75, 4: 0.25})


def test_a_compressed_csv_that_is_one_endless_line_is_one_line_in_little_memory(tmp_path):
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    with (tmp_path / "a.csv.gz").open("wb") as file:
        file.write(packer.compress(b"document,position,layer,experts\n0,0,0,"))
        for _ in range(300):
            file.write(packer.compress(b"1 " * 2**20))
        file.write(packer.flush())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadInput, match="no valid CSV") as caught:
        trace(recorded=tmp_path / "a.csv.gz", experts=4, out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes


# --- trace --recorded with an importance matrix of llama.cpp, written with gguf's own writer

COUNTS = {1: np.array([30, 0, 50, 20]), 3: np.array([25, 25, 49, 1])}  # 50 tokens, two experts each


def write_imatrix(path, counts=None, dense=True, chunks=(5, 10)):
    """Write the tensors that llama-imatrix writes: sums of squares and counts per matrix."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, arch="")
    writer.add_key_value("general.type", "imatrix", gguf.GGUFValueType.STRING)
    for what, value in zip(("count", "size"), chunks, strict=True):
        writer.add_uint32(f"imatrix.chunk_{what}", value)
    writer.add_array("imatrix.datasets", ["text.txt"])
    tensors = {}
    for layer, counts_E in (COUNTS if counts is None else counts).items():
        for name, width in (("gate", 8), ("up", 8), ("down", 6)):
            tensors[f"blk.{layer}.ffn_{name}_exps.weight"] = (
                np.ones((len(counts_E), width)),
                counts_E[:, None],
            )
        if dense:
            tensors[f"blk.{layer}.attn_q.weight"] = (np.ones((1, 8)), np.array([[counts_E.sum() // 2]]))
    for name, (sums, tokens) in tensors.items():
        writer.add_tensor(f"{name}.in_sum2", sums.astype(np.float32))
        writer.add_tensor(f"{name}.counts", tokens.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("dense", [True, False])  # without other tensors: chunks times tokens per chunk
def test_counts_become_loads_with_the_experts_per_token(tmp_path, dense):
    file = write_imatrix(tmp_path / "imatrix.gguf", dense=dense)
    run = moescope.trace(recorded=file, out=tmp_path / "run", quiet=True)
    load = run.table("load").sort_values(["layer", "expert"])
    for layer, counts_E in COUNTS.items():
        assert load.loc[load["layer"] == layer, "tokens"].tolist() == counts_E.tolist()
    assert run.info["coverage"][0]["k"] == [2]
    layers = run.table("routing_layers").set_index(["metric", "layer"])
    mean, spread = COUNTS[1].mean(), COUNTS[1].std()
    assert layers.loc[("cv", 1), "value"] == pytest.approx(spread / mean)


def test_deploy_gives_coverage_and_lists_and_says_what_counts_cannot_show(tmp_path):
    trace = moescope.trace(recorded=write_imatrix(tmp_path / "i.gguf"), out=tmp_path / "run", quiet=True)
    run = moescope.deploy(trace, min_tokens=21, out=tmp_path / "served", quiet=True)
    assert sorted(run.tables) == ["coverage", "coverage_curve"]
    rows = run.table("coverage").set_index(["layer", "expert"])
    assert rows["tokens"].tolist() == [30, 0, 50, 20, 25, 25, 49, 1]
    assert rows["below"].tolist() == [False, True, False, True, False, False, False, True]
    (warning,) = run.info["warnings"]
    assert "order of tokens" in warning
    assert "\n" not in warning
    lists = json.loads((run.path / "exports" / "hot_experts.json").read_text())["layers"]
    assert lists["1"]["experts"] == [2, 0, 3, 1]
    assert json.loads((run.path / "exports" / "esft_text.json").read_text())["experts"]["3"] == [2]
    assert moescope.report(run).exists()


def test_files_without_experts_or_of_other_sizes_are_rejected(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(write_imatrix(tmp_path / "i.gguf").read_bytes()[:200])
    cases = [
        (broken, {}, "no valid GGUF"),
        (tmp_path / "i.gguf", {"experts": 2}, "--experts"),
        (tmp_path / "i.gguf", {"save_tokens": True}, "--save-tokens"),
        (write_imatrix(tmp_path / "k.gguf", dense=False, chunks=(0, 0)), {}, "experts per token"),
        (write_imatrix(tmp_path / "d.gguf", {}), {"experts": 4}, "ffn_.*_exps"),
    ]
    (tmp_path / "old.dat").write_bytes(b"\0" * 64)
    cases.append((tmp_path / "old.dat", {"format": "imatrix", "experts": 4}, "--output-format gguf"))
    for number, (file, options, words) in enumerate(cases):
        with pytest.raises(BadInput, match=words) as error:
            moescope.trace(recorded=file, out=tmp_path / f"run{number}", quiet=True, **options)
        assert "\n" not in str(error.value)
