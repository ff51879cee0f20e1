"""The demo: the shipped model, looked at as any other; and the planted checkpoint of known structure."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, MixtralForCausalLM
from typer.testing import CliRunner

from lab.tiny_training import TOML
from moescope.cli import app
from moescope.decoder.saving import load_model
from moescope.demo.recipe import make_demo_model, store_model
from moescope.demo.verb import CHARACTERS, SHIPPED, truncate
from moescope.execution.documents import read_documents
from moescope.execution.evaluation import per_document
from moescope.execution.lab_models import load_any_model
from moescope.execution.texts import sources
from moescope.lab.batches import TokenRows
from moescope.lab.config import config_from, settle
from moescope.lab.corpus import embedded_corpus
from moescope.lab.evaluation import evaluate
from moescope.run import Run
from moescope.weights.verb import scan
from planted import LAYERS, planted_layer, write_planted
from report_payloads import page_sections

GENERATED = ("arithmetic", "records")  # the domains that are the same under every Python


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The demo as its command does it, with less text, and what it printed."""
    out = tmp_path_factory.mktemp("demo") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moescope.demo.verb.TRACED_TOKENS", 15_000)
        result = CliRunner().invoke(app, ["demo", "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return Run.load(out), result.output


def files_below(folder):
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


# --- what is shipped


def test_what_is_shipped_is_small_and_names_no_machine():
    files = files_below(SHIPPED)
    assert sum(path.stat().st_size for path in files) < 8 * 2**20
    told = json.loads((SHIPPED / "training" / "run.json").read_text())
    assert not {"checkpoints", "process"} & set(told)
    assert not any(f'"{root}' in json.dumps(told) for root in ("/home", "/root", "/tmp", "/work", "/usr"))


def test_the_recipe_is_what_was_trained():
    run = Run.load(SHIPPED / "training")
    told = run.info
    asked = settle(SHIPPED / "recipe.toml", None, None, None, None)
    # settings that came later have the value they had before there was a choice
    assert config_from({key: value for key, value in told["arguments"].items() if key != "from"}) == asked
    assert told["status"] == "done"
    assert run.table("evaluations")["step"].max() == asked.train.steps


def test_the_shipped_weights_predict_held_out_text_as_well_as_their_training_says():
    run = Run.load(SHIPPED / "training")
    final = run.table("evaluations").drop_duplicates("domain", keep="last").set_index("domain")
    model, vocabulary = load_model(SHIPPED / "model")
    corpus = embedded_corpus(60_000)
    texts = {domain: corpus.validation[domain] for domain in GENERATED}
    rows = TokenRows.of(texts, vocabulary, run.info["arguments"]["train"]["sequence_length"]).sample(40)
    found = evaluate(model, rows, 0, 20, "cpu", "float32").domains
    for domain in GENERATED:
        assert found[domain] == pytest.approx(final["loss"][domain], abs=0.15)
        assert found[domain] < final["unigram_loss"][domain] / 2


def test_transformers_gives_the_shipped_model_the_same_logits():
    ours, vocabulary = load_model(SHIPPED / "model")
    theirs = MixtralForCausalLM.from_pretrained(SHIPPED / "model", dtype=torch.float32)
    ids = torch.from_numpy(vocabulary.encode("import os\n12 + 7 = 19\n"))[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits_BLV, atol=1e-3, rtol=1e-3)


def test_a_kept_model_is_the_one_it_was_made_from_rounded_to_half_its_bytes(tmp_path):
    store_model(SHIPPED / "model", tmp_path / "again")
    again, _ = load_model(tmp_path / "again")
    model, _ = load_model(SHIPPED / "model")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
def test_making_the_model_anew_replaces_what_is_shipped(tmp_path):
    shipped = tmp_path / "shipped"
    (shipped / "model").mkdir(parents=True)
    (shipped / "model" / "old.txt").write_text("of the model before")
    (shipped / "recipe.toml").write_text(TOML.format(steps=8))
    run = make_demo_model(tmp_path / "work", shipped)
    assert not (shipped / "model" / "old.txt").exists()
    assert Run.load(shipped / "training").table("steps").equals(run.table("steps"))
    trained, _ = load_model(run.info["checkpoints"][-1]["path"])
    kept, _ = load_model(shipped / "model")
    for before, after in zip(trained.parameters(), kept.parameters(), strict=True):
        assert torch.equal(before.to(torch.bfloat16).float(), after)


# --- what is shown


def test_the_demo_command_prints_training_weights_text_and_the_report(shown):
    run, printed = shown
    assert f"report: {run.path / 'report.html'}" in printed
    assert (run.path / "report.html").stat().st_size > 1_000_000
    lines = printed.splitlines()
    said = " ".join(lines)
    for part in (run, *run.parts.values()):
        assert part.verb.summary(part).verdict in said
    shown_lines = lines[lines.index(next(line for line in lines if line.startswith("top2 router"))) :]
    assert len(shown_lines) <= 24
    assert max(map(len, shown_lines)) <= 120


def test_the_report_has_training_weights_routing_and_text_in_one_page(shown):
    page = (shown[0].path / "report.html").read_text()
    for tab in ("training", "weights", "routing", "text"):
        assert page_sections(page, tab), tab


def test_text_that_is_traced_was_held_out_and_every_domain_is_read(shown):
    run, _ = shown
    corpus = embedded_corpus()
    for domain in corpus.domains:
        lines = (run.path / "validation" / f"{domain}.jsonl").read_text().splitlines()
        trained = {truncate(text) for text in corpus.train[domain]}
        assert not trained & {json.loads(line)["text"] for line in lines}
    load = Run.load(run.path / "trace").table("load")
    assert set(load["domain"]) == set(corpus.domains)
    read = load[load["layer"] == 0].groupby("domain")["tokens"].sum()
    assert read.min() > 0.9 * read.max()


def test_every_domain_of_the_demo_has_enough_documents_for_intervals(shown):
    trace = shown[0].parts["trace"]
    assert min(trace.info["setup"][0]["coverage"]["domains"].values()) >= 20
    affinities = trace.table("domains").query("tokens >= 100")  # a few tokens come from a few documents
    assert set(affinities["domain"]) == set(trace.info["setup"][0]["coverage"]["domains"])
    assert (affinities["low"] <= affinities["high"]).all()  # false for a missing one


def test_the_demo_reads_code_within_the_trained_length_as_plain_transformers_does(shown):
    run, _ = shown
    length = run.info["arguments"]["train"]["sequence_length"]
    lines = (run.path / "validation" / "code.jsonl").read_text().splitlines()[:4]
    model = str(SHIPPED / "model")
    theirs = MixtralForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [torch.tensor(tokenizer(json.loads(line)["text"])["input_ids"]) for line in lines]

    def perplexity(window: int) -> float:
        losses = []
        for ids in texts:
            for start in range(0, len(ids) - 1, window):
                after = ids[start + 1 : start + window + 1]
                with torch.no_grad():
                    logits = theirs(ids[start : start + len(after)][None]).logits[0]
                losses.append(torch.nn.functional.cross_entropy(logits, after, reduction="none"))
        return float(torch.cat(losses).mean().exp())

    traced = load_any_model(model, "float32", "cpu")
    documents = read_documents(traced, sources([], [f"code={run.path}/validation/code.jsonl"], None))
    judged = per_document(traced, list(documents)[:4])
    own = math.exp(judged.loss_D.sum() / judged.tokens_D.sum())
    assert own == pytest.approx(perplexity(length), rel=1e-3)
    assert perplexity(4 * length) > 2 * perplexity(length)  # what reading longer windows would cost
    assert run.parts["trace"].info["setup"][0]["window"] == length


def test_the_same_demo_again_computes_nothing_and_says_the_same_as_json(shown, monkeypatch):
    run, printed = shown
    written = [run.path / "scan" / "run.json", run.path / "trace" / "run.json", run.path / "report.html"]
    before = [path.stat().st_mtime_ns for path in written]
    monkeypatch.setattr("moescope.demo.verb.TRACED_TOKENS", 15_000)
    again = CliRunner().invoke(app, ["demo", "--out", str(run.path), "--json"], catch_exceptions=False)
    facts = json.loads(again.output)
    assert [path.stat().st_mtime_ns for path in written] == before
    assert set(facts["parts"]) == {"scan", "trace"}
    for part in (facts, *facts["parts"].values()):
        assert part["findings"]
        assert part["verdict"] in " ".join(printed.splitlines())


def test_a_long_text_is_cut_after_a_whole_line():
    lines = "a line of it\n" * 1000
    assert len(truncate(lines)) <= CHARACTERS < len(truncate(lines)) + len("a line of it\n")
    assert truncate(lines).endswith("\n")
    assert truncate("x" * 5000) == "x" * CHARACTERS
    assert truncate("short") == "short"


# --- the planted checkpoint


def test_a_scan_finds_what_was_planted(planted_run):
    assert any("L3 E2 and E5" in line for line in planted_run.verb.summary(planted_run).findings)
    tests = planted_run.table("alignment_tests").query("router == 'raw'").set_index("layer")["verdict"]
    assert tests.to_dict() == {
        0: "chance", 1: "identifying", 2: "identifying", 3: "non_random", 4: "permuted",
    }  # fmt: skip


@pytest.mark.slow
def test_other_seeds_find_the_same_facts(tmp_path):
    for seed in range(1, 6):
        write_planted(tmp_path / f"model-{seed}", seed)
        run = scan(tmp_path / f"model-{seed}", out=tmp_path / f"run-{seed}", seed=seed, quiet=True)
        tests = run.table("alignment_tests").query("router == 'raw'").set_index("layer")["verdict"]
        assert tests[1] == tests[2] == "identifying", seed
        assert tests[3] in ("identifying", "non_random"), seed
        assert tests[4] == "permuted", seed
        close = run.table("similarity").query("k == 1 and (cosine > 0.7 or cosine < -0.7)")
        assert close[["layer", "expert_a", "expert_b"]].to_numpy().tolist() == [[3, 2, 5]], seed


def test_the_planted_checkpoint_loads_in_transformers_and_runs(planted_run):
    folder = planted_run.info["checkpoints"][0]["path"]
    model, loading = MixtralForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert model(torch.arange(8)[None]).logits.isfinite().all()


def test_planted_layers_are_what_they_say():
    generator = np.random.default_rng(0)
    for layer in LAYERS:
        router, gates = planted_layer(layer.kind, generator)
        np.testing.assert_allclose(np.linalg.norm(router, axis=1), 1, atol=0.5)
        assert len(gates) == 8
        tops = [np.linalg.svd(gate)[2][0] for gate in gates]
        assert (abs(tops[2] @ tops[5]) > 0.9) == (layer.kind == "collapsed")
        if layer.kind == "small_k":
            np.testing.assert_allclose(
                [(top @ row) ** 2 for top, row in zip(tops, router, strict=True)], 0.16
            )
