"""The verb: its command line, tables, errors, resuming; on models of transformers and of the lab."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import moescope
from moescope.cli import app
from moescope.errors import BadInput
from routing.tiny_text import save_model, texts, write_jsonl


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("intervene")
    save_model(folder / "mixtral")
    write_jsonl(folder / "a.jsonl", texts(30, seed=0))
    write_jsonl(folder / "b.jsonl", texts(30, seed=1, first=25, words=25))
    return folder


def intervene(place: Path, out: Path, **options):
    domains = [f"{name}={place / name}.jsonl" for name in "ab"]
    given = {"domain": domains, "out": out, "device": "cpu", "quiet": True, **options}
    return moescope.intervene(place / "mixtral", **given)


def read(file: Path) -> list[str]:
    return file.read_text().splitlines()


def sums(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_one_change_against_transformers_with_the_weight_set_to_zero(place, tmp_path):
    """Judged documents are read back from the file; the table has their sums."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = sums(place / "mixtral")
    run = intervene(place, tmp_path / "run", set="layer=1 expert=2 ablate")
    assert sums(place / "mixtral") == before
    rows = run.table("intervention_documents")
    lines = [json.loads(line)["text"] for name in "ab" for line in read(place / f"{name}.jsonl")]
    models = [AutoModelForCausalLM.from_pretrained(place / "mixtral") for _ in range(2)]
    tokenizer = AutoTokenizer.from_pretrained(place / "mixtral")
    with torch.no_grad():
        models[1].model.layers[1].mlp.experts.down_proj[2] = 0
        for row in rows.itertuples():
            ids = torch.tensor(tokenizer(lines[row.document])["input_ids"])
            p, q = (model(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1) for model in models)
            at = torch.arange(len(ids) - 1), ids[1:]
            assert row.tokens == len(ids) - 1
            assert row.domain == "ab"[row.document >= 30]
            assert row.loss == pytest.approx(-p[at].sum().item(), rel=1e-6, abs=1e-5)
            assert row.loss_changed == pytest.approx(-q[at].sum().item(), rel=1e-6, abs=1e-5)
            assert row.kl == pytest.approx((p.exp() * (p - q)).sum().item(), rel=1e-5, abs=1e-5)
            assert row.predictions_changed == (p.argmax(-1) != q.argmax(-1)).sum()
    effect = run.table("interventions").set_index("domain").loc["all"]
    assert effect["loss_difference"] == pytest.approx(
        (rows["loss_changed"] - rows["loss"]).sum() / rows["tokens"].sum()
    )
    assert (effect["layer"], effect["expert"], effect["name"]) == (1, 2, "ablate")
    assert 0.65 < len(rows) / 60 < 0.9


def test_a_sweep_of_experts_gives_the_numbers_of_single_changes(place, tmp_path):
    sweep = intervene(place, tmp_path / "sweep", sweep="experts", layers="0,2")
    documents = sweep.table("intervention_documents")
    plan = sweep.table("interventions").query("domain == 'all'")
    assert plan[["layer", "expert"]].to_numpy().tolist() == [[layer, e] for layer in (0, 2) for e in range(4)]
    single = intervene(place, tmp_path / "one", set="layer=2 expert=3 ablate").table("intervention_documents")
    same = documents[documents["change"] == "layer=2 expert=3 ablate"].reset_index(drop=True)
    pd.testing.assert_frame_equal(
        same.drop(columns="intervention"), single.drop(columns="intervention"), check_exact=True
    )
    experts = sweep.table("intervention_experts")
    assert len(experts) == 8
    assert experts["layer_name"].notna().all()


def test_a_sweep_of_layers_makes_the_given_change_in_each(place, tmp_path):
    run = intervene(place, tmp_path / "run", sweep="layers", set="expert=1 skip")
    plan = run.table("interventions").query("domain == 'all'")
    assert plan["layer"].tolist() == [0, 1, 2]
    assert plan["name"].unique().tolist() == ["skip"]
    assert (plan["load_changed"] == 0).all()


def test_two_settings_apply_together(place, tmp_path):
    one, other = "layer=0 expert=1 ablate", "layer=2 expert=0 ablate"
    both, alone = (
        intervene(place, tmp_path / str(len(given)), set=given)
        .table("interventions")
        .query("domain == 'all'")
        for given in ([one, other], [one])
    )
    assert len(both) == 1
    assert both["layer"].isna().all()
    assert both.iloc[0]["kl"] != alone.iloc[0]["kl"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"set": "expert=1 ablate", "execution": "streamed"}, "one layer per change"),
        ({"set": "layer=1 expert=99 ablate"}, "99"),
        ({"set": "layer=7 expert=0 ablate"}, "layer"),
        ({"set": "layer=1 expert=0 vanish"}, "'vanish'"),
        ({"set": ["layer=1 expert=0 skip", "layer=1 expert=0 force"]}, "exclude"),
        ({"set": "layer=1 expert=0 project_out k=17"}, "17"),
        ({"sweep": "k", "set": "layer=1 project_out k=2"}, "k="),
        ({"sweep": "top_k", "set": "layer=1 zero_router"}, "top_k"),
        ({}, "--set"),
        ({"sweep": "experts", "layers": "9"}, "layer 9"),
        ({"sweep": "experts", "set": ["expert=1 skip"]}, "expert="),
        ({"sweep": "layers"}, "--set"),
        ({"sweep": "corners"}, "'corners'"),
        ({"set": "layer=1 expert=0 ablate", "layers": "1"}, "--layers"),
        ({"set": "layer=1 expert=0 ablate", "memory": "1KB", "execution": "resident"}, "--max-tokens"),
        ({"set": "layer=1 expert=0 ablate", "execution": "streamed", "generate": "word1"}, "--execution"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(place, tmp_path, options, words):
    before = sums(place / "mixtral")
    with pytest.raises(BadInput) as caught:
        intervene(place, tmp_path / "run", **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    left = [file for file in tmp_path.rglob("*") if file.is_file() and file.name != ".lock"]
    assert left == []
    assert sums(place / "mixtral") == before


def test_a_text_without_tokens_or_without_judged_documents_is_an_error(place, tmp_path):
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "one.txt").write_text("word1")
    for name in ("empty", "one"):
        given = {"domain": [], "text": tmp_path / f"{name}.txt"}
        with pytest.raises(BadInput, match=r"give .*longer"):
            intervene(place, tmp_path / "run", **given, set="layer=0 expert=0 ablate")


def test_the_command_line_prints_the_cost_and_json(place, tmp_path):
    words = ["intervene", str(place / "mixtral"), "--text", str(place / "a.jsonl"), "--device", "cpu"]
    shown = CliRunner().invoke(
        app, [*words, "--sweep", "experts", "--layers", "1", "--out", str(tmp_path / "run"), "--json"]
    )
    assert shown.exit_code == 0, shown.output
    facts = json.loads(shown.stdout)
    assert facts["status"] == "done"
    assert "layer calls" in shown.stderr
    assert "hidden states" in shown.stderr
    assert Path(facts["report"]).exists()
    run = moescope.open(tmp_path / "run")
    assert run.info["command"].startswith("moescope intervene")


def test_continuations_are_those_of_transformers_generate(place, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = {"set": "layer=0 expert=1 ablate", "generate": ["word1 word2", "word7"], "max_new_tokens": 12}
    rows = intervene(place, tmp_path / "run", **given).table("intervention_text")
    tokenizer = AutoTokenizer.from_pretrained(place / "mixtral")
    models = [AutoModelForCausalLM.from_pretrained(place / "mixtral") for _ in range(2)]
    with torch.no_grad():
        models[1].model.layers[0].mlp.experts.down_proj[1] = 0
    for prompt in given["generate"]:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        for model, column in zip(models, ("token", "token_changed"), strict=True):
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
            )
            shown = rows[rows["prompt"] == prompt].sort_values("position")[column].dropna().tolist()
            assert shown == [tokenizer.decode([token]) for token in made[0, ids.shape[1] :]]
    assert (rows["token"] != rows["token_changed"]).any()


def test_a_sweep_of_k_has_both_random_controls_and_another_expert_at_every_k(place, tmp_path):
    run = intervene(place, tmp_path / "run", sweep="k", layers="1", controls=2)
    rows = run.table("interventions").query("domain == 'all'").set_index("intervention")
    asked = rows[rows["role"] == "change"]
    assert asked["k"].tolist() == [1, 2, 4, 8]  # half of the rank, 16
    for number, row in asked.iterrows():
        controls = rows[rows["of"] == number]
        assert controls["role"].value_counts().to_dict() == {
            "random subspace": 2,
            "random direction": 2,
            "other expert": 1,
        }
        assert (controls["k"] == row["k"]).all()
        assert controls.loc[controls["role"] == "random subspace", "kl"].nunique() == 2
        assert row["controls"] == 2
    single = intervene(place, tmp_path / "one", set="layer=1 project_out k=4")
    documents = run.table("intervention_documents").query("change == 'layer=1 project_out k=4'")
    assert documents["kl"].tolist() == single.table("intervention_documents")["kl"].tolist()


def test_a_sweep_of_top_k_goes_to_twice_the_configured_number(place, tmp_path):
    rows = intervene(place, tmp_path / "run", sweep="top_k").table("interventions").query("domain == 'all'")
    assert rows["k"].tolist() == [1, 2, 3, 4]
    configured = rows.set_index("k").loc[2]
    assert configured["loss_difference"] == 0
    assert configured["kl"] == 0
    assert (rows.set_index("k").drop(2)["kl"] > 0).all()
    assert rows["layer"].isna().all()


def test_the_mean_output_is_that_of_the_documents_that_are_not_judged(place, tmp_path):
    """Against the same change made in Python, which test_hand_worked checks."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = intervene(place, tmp_path / "run", set="layer=2 expert=0 mean")
    judged = run.table("intervention_documents").set_index("document")["loss_changed"]
    tokenizer = AutoTokenizer.from_pretrained(place / "mixtral")
    model = AutoModelForCausalLM.from_pretrained(place / "mixtral")
    lines = [json.loads(line)["text"] for name in "ab" for line in read(place / f"{name}.jsonl")]
    ids = [torch.tensor(tokenizer(line)["input_ids"]) for line in lines]
    rest = [document for number, document in enumerate(ids) if number not in judged.index]
    with moescope.modified(model, "layer=2 expert=0 mean", text=rest), torch.no_grad():
        for number, loss in judged.items():
            logits = model(input_ids=ids[number][None]).logits[0, :-1].double()
            ours = torch.nn.functional.cross_entropy(logits, ids[number][1:], reduction="sum").item()
            assert loss == pytest.approx(ours, rel=1e-5)


@pytest.mark.parametrize(
    "options", [{"sweep": "experts", "layers": "0,2"}, {"sweep": "layers", "set": "project_out k=2"}]
)
def test_a_streamed_model_gives_the_numbers_of_a_resident_one(place, tmp_path, options):
    runs = [intervene(place, tmp_path / way, execution=way, **options) for way in ("resident", "streamed")]
    assert [run.info["execution"][0]["way"] for run in runs] == ["resident", "streamed"]
    for name in runs[0].tables:
        left, right = (run.table(name) for run in runs)
        pd.testing.assert_frame_equal(left, right, rtol=1e-5, atol=1e-6)


def test_the_demo_s_model_and_text_written_by_hand(tmp_path):
    from moescope.demo.verb import SHIPPED

    lines = [f"{a} + {b} = {a + b}\n" * 6 for a in range(5) for b in range(5)]
    text = write_jsonl(tmp_path / "sums.jsonl", lines)
    given = {"text": text, "set": "layer=2 expert=1 skip", "generate": "1 + 1 =", "max_new_tokens": 4}
    run = moescope.intervene(SHIPPED / "model", **given, out=tmp_path / "run", device="cpu", quiet=True)
    row = run.table("interventions").iloc[0]
    assert row["load"] > row["load_changed"] == 0
    assert 0 < row["kl"] < 1
    assert run.table("intervention_text")["position"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("router", ["spectra", "hash"])
def test_a_lab_model_in_its_own_layout(router, tmp_path):
    """Routers with another state, and without logits: no entropy, and nothing to skip."""
    from execution.test_lab_models import saved

    model = saved(router, tmp_path / "model")
    text = write_jsonl(tmp_path / "text.jsonl", texts(40))
    given = {"text": text, "out": tmp_path / "run", "device": "cpu", "quiet": True}
    run = moescope.intervene(model, sweep="experts", layers=1, generate="word", max_new_tokens=3, **given)
    rows = run.table("interventions")
    assert (rows["kl"] > 0).all()
    assert rows["load"].sum() == pytest.approx(1)
    assert rows["entropy"].isna().all() == (router == "hash")
    if router == "hash":
        with pytest.raises(BadInput, match="logits"):
            moescope.intervene(model, set="layer=1 expert=0 skip", overwrite=True, **given)


def test_two_documents_are_split_and_an_unused_expert_is_named(place, tmp_path):
    """Tokens of one word choose two experts in layer 0; the others have no mean output."""
    text = write_jsonl(tmp_path / "text.jsonl", ["word1 " * 40, "word1 " * 30])
    given = {"text": text, "device": "cpu", "quiet": True}
    made = moescope.intervene(
        place / "mixtral", set="layer=0 expert=0,1,2,3 mean", out=tmp_path / "run", **given
    )
    assert made.info["setup"]["held_out"] == "tails"
    assert made.table("intervention_documents")["tokens"].tolist() == [31, 23]
    assert len(made.info["warnings"]) == 2
    assert "of layer 0" in made.info["warnings"][1]
