"""compress as a user calls it: plan, checkpoint and judgement.

What resumes, what is rejected in one line and leaves nothing behind.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from families.test_writing import on_disk, same_bits
from moescope.compression.calibration import load_sums, save_sums
from moescope.compression.plan import read_plan
from moescope.compression.tables import TABLES
from moescope.compression.verb import compress
from moescope.errors import BadInput
from moescope.execution import evaluation
from moescope.execution.documents import Document
from moescope.execution.evaluation import SplitText, is_held_out
from moescope.execution.texts import ReadSettings
from moescope.execution.texts import sources as texts_of
from moescope.run import Run, write_json
from moescope.verb import Selection
from routing.tiny_text import save_model, texts, write_jsonl

JUDGED = ("the original", "reap", "random (seed 1)")
PRUNING_TABLES = ["clusters", "saliency", "damage"]  # where nothing is merged


@pytest.fixture
def run(compressed_run) -> Run:
    return compressed_run


@pytest.fixture
def place(compressed_run) -> Path:
    """Where the model, its text and the compressed model lie."""
    return compressed_run.path.parent


def compressed(place: Path, out: Path, **given) -> Run:
    """The model with two experts per layer, by its text unless given otherwise."""
    return compress(
        place / "model", out=out, **{"keep": 2, "text": place / "text.jsonl", "quiet": True, **given}
    )


def token_ids(place: Path) -> list[np.ndarray]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    lines = (place / "text.jsonl").read_text().splitlines()
    return [np.array(tokenizer(json.loads(line)["text"])["input_ids"]) for line in lines]


def plain(run: Run) -> dict[str, list[dict]]:
    return {name: json.loads(run.table(name).to_json(orient="records")) for name in run.tables}


def test_all_three_tables_are_there_and_every_column_is_filled(run):
    assert run.tables == list(PRUNING_TABLES)
    for name in PRUNING_TABLES:
        spec, frame = TABLES[name], run.table(name)
        assert pq.read_schema(run.path / f"{name}.parquet").names == list(spec.columns)
        assert [column for column in spec.columns if frame[column].isna().all()] == []
    whole = run.table("damage").query("layer.isna()").set_index("method")
    of_controls = [column for column in whole if "above_plan" in column]
    assert whole.loc["reap", of_controls].isna().all()
    assert whole.drop("reap")[of_controls].notna().all(axis=None)
    for name in ("loss_increase", "js_divergence", "loss_above_plan", "js_above_plan"):
        known = whole[whole[name].notna()]
        assert (known[f"{name}_low"] < known[name]).all()
        assert (known[name] < known[f"{name}_high"]).all()
    assert sorted(path.name for path in run.path.iterdir()) == [
        "calibration.safetensors",
        "clusters.parquet",
        "damage.parquet",
        "plan.json",
        "run.json",
        "saliency.parquet",
    ]
    assert run.info["warnings"] == []


def test_the_lowest_of_every_layer_by_the_saliency_table_are_the_ones_that_went(run, place):
    plan, _ = read_plan(run.path)
    for layer in plan.layers:
        rows = run.table("saliency").query(f"layer == {layer.layer}").sort_values("reap")
        assert set(layer.dropped) == set(rows["expert"].iloc[:2])
    clusters = run.table("clusters").set_index(["layer", "expert"])
    for layer in plan.layers:
        assert {expert for expert in range(4) if not clusters.loc[(layer.layer, expert), "kept"]} == set(
            layer.dropped
        )
        assert [clusters.loc[(layer.layer, e), "cluster"] for e in layer.dominants] == [0, 1]
    config = json.loads((place / "small" / "config.json").read_text())
    assert config["num_local_experts"] == 2


def test_held_out_documents_take_no_part_in_calibrating(run, place):
    ids = token_ids(place)
    held = [document for document in ids if is_held_out(Document(0, 0, document))]
    assert 0 < len(held) < len(ids)
    facts = run.info["setup"]
    assert facts["calibration_documents"] == len(ids) - len(held)
    assert facts["calibration_tokens"] == sum(map(len, ids)) - sum(map(len, held))
    assert facts["judged_documents"] == len(held)
    per_layer = run.table("saliency").groupby("layer")["tokens"].sum()
    assert set(per_layer) == {2 * facts["calibration_tokens"]}


def test_perplexities_are_those_of_transformers_own_forward_on_the_held_out_documents(run, place):
    from transformers import AutoModelForCausalLM

    held = [torch.from_numpy(ids)[None] for ids in token_ids(place) if is_held_out(Document(0, 0, ids))]
    whole = run.table("damage").query("layer.isna()").set_index("method")
    for folder, found in (
        ("model", whole.loc["reap", "perplexity_original"]),
        ("small", whole.loc["reap", "perplexity"]),
    ):
        model = AutoModelForCausalLM.from_pretrained(place / folder).eval()
        lost = [
            torch.nn.functional.cross_entropy(
                model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none"
            ).detach()
            for ids in held
        ]
        assert found == pytest.approx(math.exp(torch.cat(lost).mean()), rel=1e-4)


def test_predicted_bytes_are_those_on_disk(run, place):
    whole = run.table("damage").query("layer.isna()").iloc[0]
    for folder, expected in (("small", whole["bytes"]), ("model", whole["bytes_original"])):
        assert sum(tensor.nbytes for tensor in on_disk(place / folder).values()) == expected


def test_a_plan_made_first_and_carried_out_later_gives_the_same_files(run, place, tmp_path):
    planned = compressed(place, tmp_path / "planned", keep=0.5)
    assert not planned.table("damage")["predicted_error"].isna().all()
    assert planned.table("damage")["perplexity"].isna().all()
    assert "not written" in planned.info["warnings"][0]
    applied = compressed(
        place, tmp_path / "applied", plan=planned.path, apply=tmp_path / "small", controls=2, keep=None
    )
    same_bits(on_disk(tmp_path / "small"), on_disk(place / "small"))
    assert plain(applied)["damage"] == plain(run)["damage"]
    assert plain(applied)["clusters"] == plain(run)["clusters"]
    bare = compressed(
        place, tmp_path / "b", plan=planned.path / "plan.json", apply=tmp_path / "bare", keep=None, text=()
    )
    same_bits(on_disk(tmp_path / "bare"), on_disk(place / "small"))
    assert bare.tables == ["clusters", "damage"]
    assert bare.info["warnings"] == ["not judged: no text was given"]


def test_a_text_of_one_document_is_parted_in_two_and_that_is_said(place, tmp_path):
    (tmp_path / "book.txt").write_text(" ".join(texts(40)))
    run = compressed(
        place, tmp_path / "run", text=tmp_path / "book.txt", apply=tmp_path / "small", controls=0
    )
    facts = run.info["setup"]
    words = len((tmp_path / "book.txt").read_text().split())
    assert facts["calibration_tokens"] == words - words // 5
    assert facts["judged_tokens"] == words // 5 - 1
    assert any("last fifth" in warning for warning in run.info["warnings"])
    assert any("no intervals of the judgement" in warning for warning in run.info["warnings"])
    whole = run.table("damage").query("layer.isna()").iloc[0]
    assert whole["loss_increase"] == pytest.approx(np.log(whole["perplexity"] / whole["perplexity_original"]))
    assert whole[["loss_increase_low", "loss_increase_high", "js_divergence_low"]].isna().all()
    assert any("no claim" in finding for finding in run.verb.summary(run).findings)
    assert any("give about 100 documents" in warning for warning in run.info["warnings"])
    assert any("need 20 calibration documents, not 1" in warning for warning in run.info["warnings"])
    assert run.table("saliency")["rank_low"].isna().all()


def test_text_that_max_tokens_left_unread_is_the_remedy(place, tmp_path):
    given = {"keep": 2, "text": place / "text.jsonl", "apply": tmp_path / "small", "controls": 0}
    run = compress(place / "model", max_tokens=500, out=tmp_path / "run", quiet=True, **given)
    (warning,) = (said for said in run.info["warnings"] if "no intervals of the judgement" in said)
    assert "raise --max-tokens" in warning
    assert "500" in warning
    assert "give about" not in warning


def test_no_judge_calibrates_on_everything_and_a_later_judgement_says_so(place, tmp_path):
    run = compressed(place, tmp_path / "run", judge=False, apply=tmp_path / "small")
    assert run.info["setup"]["calibration_documents"] == 150
    assert run.table("damage")["perplexity"].isna().all()
    later = compressed(
        place, tmp_path / "later", plan=run.path, apply=tmp_path / "again", controls=0, keep=None
    )
    assert any("calibrated on all of its text" in warning for warning in later.info["warnings"])


# --- several texts


def test_sums_of_an_earlier_run_added_choose_as_both_texts_in_one_run_would(run, place, tmp_path):
    second = write_jsonl(tmp_path / "second.jsonl", texts(40, seed=5))
    given = {"keep": 2, "controls": 0, "quiet": True}
    together = compress(place / "model", text=[place / "text.jsonl", second], out=tmp_path / "both", **given)
    summed = compress(place / "model", text=second, add=run.path, out=tmp_path / "summed", **given)
    alone = compress(place / "model", text=iter([second]), out=tmp_path / "alone", **given)
    assert f" --text {second} " in alone.info["command"]
    bare = compress(
        place / "model",
        add=[run.path, alone.path / "calibration.safetensors"],
        out=tmp_path / "bare",
        **given,
    )
    expected = together.table("saliency")
    for found in (summed.table("saliency"), bare.table("saliency")):
        assert (
            found["tokens"].tolist()
            == expected["tokens"].tolist()
            != alone.table("saliency")["tokens"].tolist()
        )
        for column in ("gate_weight", "ean", "reap", "rank_low", "rank_high"):
            np.testing.assert_allclose(found[column], expected[column], rtol=1e-4)
    assert summed.table("clusters").equals(together.table("clusters"))
    assert bare.table("clusters").equals(together.table("clusters"))
    assert summed.info["setup"]["calibration_documents"] == together.info["setup"]["calibration_documents"]
    assert bare.table("damage")["predicted_error"].isna().all()


def test_sums_that_do_not_belong_are_rejected(run, place, tmp_path):
    save_model(tmp_path / "other", nudge=0.1)
    text = place / "text.jsonl"
    rejected("from another checkpoint", tmp_path, tmp_path / "other", keep=2, text=text, add=run.path)
    rejected("no calibration.safetensors", tmp_path, place / "model", keep=2, text=text, add=tmp_path)
    rejected("give --text with --add", tmp_path, place / "model", keep=2, method="m_smoe", add=run.path)
    old = shutil.copytree(run.path, tmp_path / "old")
    write_json(old / "run.json", {**run.info, "schema_version": 1})
    for place_of_sums in (old, old / "calibration.safetensors"):
        said = "schema version 1, this moescope uses .*; make it again with --overwrite: moescope compress"
        rejected(said, tmp_path, place / "model", keep=2, text=text, add=place_of_sums)


@pytest.mark.parametrize(
    "damage",
    [
        lambda sums, facts: ({**sums, "layer.0.tokens_BE": sums["layer.0.tokens_BE"][:, :3]}, facts),
        lambda sums, facts: ({**sums, "layer.0.norm_BE": sums["layer.0.norm_BE"] * float("nan")}, facts),
        lambda sums, facts: ({name: part for name, part in sums.items() if "layer.1" not in name}, facts),
        lambda sums, facts: (sums, {**facts, "calibration_documents": "many"}),
        lambda sums, facts: (sums, {"header_hash": facts["header_hash"]}),
        lambda sums, facts: (sums, [facts]),
    ],
)
def test_damaged_sums_of_an_earlier_run_are_rejected(run, place, tmp_path, damage):
    sums, facts = damage(*load_sums(run.path / "calibration.safetensors"))
    save_sums(tmp_path / "sums.safetensors", sums, facts)
    rejected("calibrate again", tmp_path, place / "model", keep=2, add=tmp_path / "sums.safetensors")


# --- weights alone


# --- rejected


def rejected(said: str, tmp_path: Path, model: Path, **given) -> None:
    with pytest.raises(BadInput, match=said) as error:
        compress(model, out=tmp_path / "run", quiet=True, **given)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_impossible_requests_are_rejected_before_a_model_is_loaded(place, tmp_path, monkeypatch):
    from moescope.execution import models

    monkeypatch.setattr(models, "load_model", lambda *given: pytest.fail("a model was loaded"))
    model, text = place / "model", place / "text.jsonl"
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("mine")
    for said, given in (
        ("nearest possible: 2", {"keep": 1, "text": text}),
        ("give --keep 0.5", {"text": text}),
        ("method reap drops the experts .* so it needs a text; give --text", {"keep": 2}),
        (
            "unknown method 'best'; known: frequency, gate_weight, ean, reap, random",
            {"keep": 2, "method": "best", "text": text},
        ),
        ("keep 'half'", {"keep": "half", "text": text}),
        ("not empty; give a folder that is empty", {"keep": 2, "text": text, "apply": full}),
        ("no such plan", {"plan": tmp_path / "nowhere", "apply": tmp_path / "small"}),
        ("omit --method and --keep", {"plan": tmp_path, "keep": 2}),
        ("omit --router", {"keep": 2, "text": text, "router": "tie"}),
        ("controls -1: must be at least 0", {"keep": 2, "text": text, "controls": -1}),
        ("batch_size 0: must be at least 1", {"keep": 2, "text": text, "batch_size": 0}),
        ("no such file or folder", {"keep": 2, "text": tmp_path / "nothing.txt"}),
    ):
        rejected(said, tmp_path, model, **given)
    rejected("no such folder", tmp_path, tmp_path / "no-model", keep=2, text=text)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_plan_needs_a_folder_and_its_own_checkpoint(run, place, tmp_path):
    rejected("give --apply DIR", tmp_path, place / "model", plan=run.path)
    save_model(tmp_path / "other", nudge=0.01)
    rejected(
        "made for another checkpoint", tmp_path, tmp_path / "other", plan=run.path, apply=tmp_path / "small"
    )
    assert not (tmp_path / "small").exists()


def test_a_model_that_predicts_no_next_token_is_rejected_before_it_reads(tmp_path):
    save_model(tmp_path / "model", "switch_transformers")
    write_jsonl(tmp_path / "text.jsonl", texts(10))
    given = {"keep": 3, "text": tmp_path / "text.jsonl", "apply": tmp_path / "small"}
    rejected("cannot be judged; give --no-judge", tmp_path, tmp_path / "model", **given)
    assert not (tmp_path / "small").exists()
    run = compress(tmp_path / "model", **given, judge=False, out=tmp_path / "run", quiet=True)
    assert run.table("damage")["predicted_error"].notna().any()


def test_a_text_without_tokens_is_rejected_and_leaves_nothing_behind(place, tmp_path):
    (tmp_path / "empty.txt").write_text(" ")
    rejected("the text holds no token", tmp_path, place / "model", keep=2, text=tmp_path / "empty.txt")
    (tmp_path / "words.jsonl").write_text("".join(json.dumps({"text": f"word{n}"}) + "\n" for n in range(40)))
    given = {"keep": 2, "text": tmp_path / "words.jsonl", "apply": tmp_path / "small"}
    rejected("no token to predict; give a longer text, or --no-judge", tmp_path, place / "model", **given)
    assert not (tmp_path / "small").exists()


# --- domains


def two_domains(folder: Path, documents: int = 120) -> dict[str, Path]:
    """Documents of two vocabularies: the halves of the tokenizer's words."""
    halves = {"code": texts(documents, 1, 0, 25), "prose": texts(documents, 2, 25, 25)}
    return {name: write_jsonl(folder / f"{name}.jsonl", lines) for name, lines in halves.items()}


def test_the_order_of_domains_changes_no_number(place, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "JUDGED_TOKENS", 400)
    files = two_domains(tmp_path)
    runs = [
        compressed(
            place,
            tmp_path / "runs" / order[0],
            domain=[f"{name}={files[name]}" for name in order],
            apply=tmp_path / "small" / order[0],
            controls=1,
            text=(),
        )
        for order in (["code", "prose"], ["prose", "code"])
    ]
    assert plain(runs[0]) == plain(runs[1])
    first, second = (run.verb.summary(run).findings for run in runs)
    assert first == second


def test_every_domain_has_its_part_in_judging_and_in_calibrating(place, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "JUDGED_TOKENS", 900)
    files = two_domains(tmp_path)
    files["single"] = write_jsonl(tmp_path / "single.jsonl", [" ".join(texts(100, 3))])
    sources = texts_of([], [f"{name}={file}" for name, file in files.items()], None)
    reader = SplitText(str(place / "model"), sources, "cpu", True, ReadSettings())

    def tokens(documents: Iterable[Document]) -> list[int]:
        found = [(document.domain, len(document.ids)) for document in documents]
        return [sum(size for at, size in found if at == domain) for domain in range(3)]

    judged = tokens(reader.held_out_documents())
    assert all(280 < count <= 300 for count in judged)
    single = len(files["single"].read_text().split())
    assert tokens(reader.calibration_documents())[2] == pytest.approx(0.8 * single, rel=0.01)


def hash_holds_out(ids: np.ndarray) -> bool:
    return is_held_out(Document(0, 0, ids))


@pytest.mark.parametrize(
    ("held", "others", "longest"),
    [(0, 4, 12), (1, 3, 12), (1, 40, 12), (4, 0, 12), (5, 1, 12), (0, 3, 30), (1, 2, 30), (2, 0, 30)],
)
def test_two_documents_of_every_domain_are_held_out_where_it_has_four(place, tmp_path, held, others, longest):
    """Of so many documents that the hash holds out and so many that it does not, some of them twice."""
    generator = np.random.default_rng(held + 10 * others)
    wanted = {True: held, False: others}
    lines: list[np.ndarray] = []
    while any(wanted.values()):
        ids = generator.integers(3, 50, longest)
        if wanted[hash_holds_out(ids)]:
            wanted[hash_holds_out(ids)] -= 1
            lines.append(ids)
    np.save(tmp_path / "ids.npy", np.stack(lines + lines[:2]))
    sources = texts_of([], [], tmp_path / "ids.npy")
    reader = SplitText(str(place / "model"), sources, "cpu", True, ReadSettings())
    judged = [tuple(document.ids) for document in reader.held_out_documents()]
    calibrating = [tuple(document.ids) for document in reader.calibration_documents()]
    assert len(set(judged)) >= 2
    assert not set(judged) & set(calibrating)
    assert len(set(calibrating)) >= 2
    other = SplitText(str(place / "model"), sources, "cpu", True, ReadSettings(), judge_most=True)
    assert sorted(tuple(document.ids) for document in other.held_out_documents()) == sorted(calibrating)
    assert sorted(tuple(document.ids) for document in other.calibration_documents()) == sorted(judged)
    if held + others < 4:
        assert reader.held_out() == "tails"
        assert {len(ids) for ids in judged} == {6}
        assert {len(ids) for ids in calibrating} == {24}
    else:
        assert reader.held_out() == "documents"
        assert sorted(judged + calibrating) == sorted(tuple(ids) for ids in lines + lines[:2])
        if others > 1:
            assert {tuple(ids) for ids in lines if hash_holds_out(ids)} <= set(judged)
            assert len(set(judged)) == max(2, held)


def test_a_short_domain_is_warned_of_and_tokens_of_every_domain_are_stated(place, tmp_path):
    files = two_domains(tmp_path)
    files["prose"].write_text("\n".join(files["prose"].read_text().splitlines()[:25]))
    given = {"domain": [f"{name}={file}" for name, file in files.items()], "text": (), "controls": 0}
    run = compressed(place, tmp_path / "run", apply=tmp_path / "small", **given)
    reader = SplitText(str(place / "model"), texts_of([], given["domain"], None), "cpu", True, ReadSettings())
    tokens = dict.fromkeys(files, 0)
    for document in reader.held_out_documents():
        tokens[reader.sources[document.domain].domain] += len(document.ids) - 1
    assert tokens["code"] > 2 * tokens["prose"]
    assert run.info["setup"]["judged_tokens_by_domain"] == tokens
    text = next(part.text for part in run.verb.sections(run, Selection()) if part.anchor == "damage")
    assert all(f"{name}: {count:,}" in text for name, count in tokens.items())
    assert any("'prose'" in warning and "'code'" not in warning for warning in run.info["warnings"])


# --- the command line


@pytest.mark.parametrize(
    ("option", "name", "content", "words"),
    [
        ("text", "empty.txt", "", "the text holds no token"),
        ("token_ids", "ids.jsonl", "[4, 64]", "token id 64: .* has 64 tokens"),
        ("token_ids", "ids.jsonl", "[4, 1.5]", "not a list of token ids"),
    ],
)
def test_a_text_that_cannot_be_used_is_found_before_the_model_is_loaded(
    place, tmp_path, monkeypatch, option, name, content, words
):
    monkeypatch.setattr(SplitText, "load", None)
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInput, match=words):
        compress(place / "model", keep=2, out=tmp_path / "run", quiet=True, **{option: tmp_path / name})
    assert not (tmp_path / "run").exists()
