"""Traces of other tools give the same tables as a run of our own with the same choices."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moescope.errors import BadInput
from moescope.execution.recorded import Shape, inferred_k, read_trace
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
    assert inferred_k([[0, 1, 2, 3, 1, 0, 3, 2]], 8) == 4
    assert inferred_k([[0, 1, 2, 3, 1, 0, 3, 2], [0, 1, 0, 1, 0, 1, 0, 1]], 8) == 2
    assert inferred_k([[0, 0, 0]], 8) == 1


@pytest.mark.parametrize(
    ("name", "content", "format", "words"),
    [
        ("a.jsonl", "{}\n", "vllm", 'answer 1: no "routed_experts"'),
        ("a.jsonl", "nonsense\n", "vllm", "not valid JSON"),
        ("a.jsonl", '{"routed_experts": "%%%"}\n', "vllm", "not base64"),
        ("a.jsonl", '{"routed_experts": "AAAA"}\n', "vllm", "no .npy array"),
        ("a.jsonl", '{"routed_experts": [[1, 2]]}\n', "vllm", r"shape \[1, 2\]; expected whole numbers"),
        ("a.jsonl", '{"routed_experts": [[[9]]]}\n', "vllm", "expert 9 in document 0, but --experts says 4"),
        (
            "a.jsonl",
            '{"routed_experts": [[[0]]]}\n{"routed_experts": [[[0, 1]]]}\n',
            "vllm",
            "give traces of one model",
        ),
        ("a.csv", "layer,expert\n0;1\n", "llamacpp", "line 2: '0;1' is not layer,expert"),
        ("a.csv", "0,1\n0,2\n1,3\n", "llamacpp", "layers have 1 to 2 rows"),
        ("a.csv", "layer,expert\n", "llamacpp", "no rows"),
        ("a.parquet", "nothing", "moescope", "damaged parquet file"),
    ],
)
def test_traces_that_cannot_be_read_are_refused_in_one_line(tmp_path, name, content, format, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInput, match=words) as caught:
        trace(recorded=tmp_path / name, format=format, experts=4, out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": None}, "give --format too; known: vllm, sglang, llamacpp, moescope"),
        ({"format": "ollama"}, "unknown format 'ollama'"),
        ({"experts": None}, "--experts N"),
        ({"recorded": "nowhere"}, "nowhere: no such file"),
        ({"text": "x"}, "--recorded replaces the text"),
        ({"max_tokens": 9}, "^--max-tokens applies to a model run, not to --recorded; leave it out$"),
        ({"phase": "decode"}, "^--phase applies"),
        ({"save_tokens": True}, "^--save-tokens applies"),
        ({"dtype": "float32"}, "^--dtype applies"),
        ({"batch_size": 2}, "^--batch-size applies"),
        ({"chat_template": True}, "^--chat-template applies"),
    ],
)
def test_import_says_what_it_needs(tmp_path, changes, words):
    (tmp_path / "a.csv").write_text("0,1\n")
    given = {
        "recorded": tmp_path / "a.csv",
        "format": "llamacpp",
        "experts": 4,
        "out": tmp_path / "run",
        **changes,
    }
    with pytest.raises(BadInput, match=words):
        trace(**given)


def test_the_identity_of_an_import_is_what_it_reads(tmp_path):
    (tmp_path / "a.csv").write_text("0,1\n0,2\n")
    run = trace(recorded=tmp_path / "a.csv", format="llamacpp", experts=4, out=tmp_path / "run", quiet=True)
    assert set(run.info["arguments"]) == {"recorded", "format", "experts", "seed"}


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
