"""Reports of traces.

What is in them, what is said, what is left out, and that nothing a text holds gets out of its place.
"""

import re
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from moescope.errors import BadInput
from moescope.reporting.verb import report
from moescope.routing.figures_experts import MAPS
from moescope.routing.figures_steps import FIGURES, OVER_STEPS
from moescope.routing.metrics import METRICS
from moescope.routing.report import paths_of
from moescope.routing.report_views import (
    first_shown,
    load_trace,
    read_excerpt,
    routing_views,
    shown_documents,
    shown_steps,
    skipped_steps,
    tokens_by_expert,
)
from moescope.routing.trace import trace
from moescope.run import Run, write_table
from moescope.tables import ROUTING_TABLES, TABLES
from moescope.weights.verb import scan
from report_payloads import payloads
from routing.routing_runs import EVIL, deep_model, evil_run
from routing.tiny_text import save_model, texts, write_jsonl

ROUTING = [spec for spec in FIGURES if spec not in (*MAPS, *OVER_STEPS)]


@pytest.fixture(scope="module")
def html(traced_run, tmp_path_factory):
    return report(traced_run, out=tmp_path_factory.mktemp("r") / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory) -> Run:
    """One domain, few documents, no tokens kept: the least a trace can be."""
    folder = tmp_path_factory.mktemp("plain")
    text = write_jsonl(folder / "text.jsonl", texts(3, seed=2))
    return trace(save_model(folder / "model"), text=text, out=folder / "run", quiet=True)


def shown(html: str) -> str:
    """The page without its scripts and styles."""
    return re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL)


def test_every_figure_of_every_view_and_over_steps_is_in_the_report(html):
    found = payloads(html)
    views = [name for name in found if name.endswith("-glance")]
    assert views == ["v0-glance", "v1-glance", "v2-glance", "v3-glance"]  # two steps, two phases
    for index in (0, 1):
        assert {f"v{index}-{spec.name}" for spec in ROUTING} <= set(found)
    assert {f"o0-{spec.name}" for spec in OVER_STEPS} <= set(found)
    assert {f"v1-l{layer}" for layer in range(3)} <= set(found)


def test_the_page_opens_with_the_last_step_in_prefill(html, traced_run):
    views = routing_views([load_trace(traced_run)], {traced_run.path: "run"})
    first = views[first_shown(views)]
    assert (first.step, first.phase) == (200, "prefill")
    assert re.search(r'<option value="1" selected>step 200 · prefill</option>', html)


def test_every_metric_and_routing_column_is_in_the_glossary_and_no_scans(html):
    for metric in METRICS:
        assert f'id="g-{metric}"' in html
    for name in ROUTING_TABLES:
        for column in TABLES[name].columns:
            assert f'id="g-{column}"' in html or f'id="g-{name}.{column}"' in html
    assert 'id="g-shuffle_mean"' not in html
    assert 'id="across"' not in html


def test_findings_name_chance_and_collapse(html, traced_run):
    rows = traced_run.table("routing_layers").query(
        "step == 200 and phase == 'prefill' and domain == '' and metric == 'cv'"
    )
    top = rows.loc[rows["value"].idxmax()]
    words = re.search(
        (
            r"Load balance: worst in layer (\d), CV ([\d.]+) \[([\d.]+), ([\d.]+)\]; ([\d.]+) for "
            r"random routing, ([\d.]+) at collapse"
        ),
        html,
    )
    assert words is not None
    numbers = [float(word) for word in words.groups()]
    assert numbers == pytest.approx(
        [top[key] for key in ("layer", "value", "low", "high", "chance", "collapse")], rel=6e-3
    )
    assert "Routing consistency between steps 100 and 200" in html


def test_the_glance_table_holds_the_tables_numbers_with_chance_beside_them(html, traced_run):
    table = payloads(html)["v1-glance"]
    titles = [column["title"] for column in table["columns"]]
    assert titles[:5] == ["layer", "cv", "chance", "max/mean", "chance"]
    rows = traced_run.table("routing_layers").query(
        "step == 200 and phase == 'prefill' and domain == '' and metric == 'cv'"
    )
    assert [row[1] for row in table["rows"]] == pytest.approx(
        rows.sort_values("layer")["value"].tolist(), rel=1e-5
    )
    assert [row[2] for row in table["rows"]] == pytest.approx(
        rows.sort_values("layer")["chance"].tolist(), rel=1e-5
    )
    assert table["links"] == "v1-layer-"


def test_what_a_report_holds_of_the_text_is_said_at_its_top(html, plain_run, tmp_path):
    assert "passages of the text" in shown(html)[: shown(html).index("<h3") if "<h3" in shown(html) else 4000]
    quiet = report(plain_run, out=tmp_path / "r.html").read_text(encoding="utf-8")
    assert "short passages of the text" in shown(quiet)


def test_what_a_trace_cannot_tell_is_said_and_not_drawn(plain_run, tmp_path):
    page = report(plain_run, out=tmp_path / "r.html").read_text(encoding="utf-8")
    assert "Not available: the text was read as one domain; name several with --domain NAME=PATH." in shown(
        page
    )
    assert "trace again with --save-tokens" in shown(page)
    assert 'id="stability"' not in page
    assert 'id="view"' not in shown(page)
    assert "no intervals: 20 documents are needed, 3 given" in shown(page)
    assert "No interval" in payloads(page)["v0-cv_by_layer"]["caption"]


def test_the_command_in_the_report_makes_the_same_run(html, plain_run, traced_run, tmp_path):
    command = re.search(r'<pre class="command">(.*?)</pre>', html).group(1)
    for item in traced_run.info["checkpoints"]:
        assert item["path"] in command
    assert command.endswith("--phase both --save-tokens")
    assert "--domain plain=" in command
    page = report(plain_run, out=tmp_path / "r.html").read_text(encoding="utf-8")
    assert re.search(r"trace \S+model --text \S+text\.jsonl</pre>", page)


def test_many_files_are_given_again_as_their_folder_and_standard_input_as_a_dash():
    assert paths_of([["/a/b/c.txt", 1, 2]]) == ["/a/b/c.txt"]
    assert paths_of([[f"/a/b/{number}.txt", 1, 2] for number in range(9)]) == ["/a/b"]
    assert paths_of(["digest"]) == ["-"]
    on_hub = [[f"hf://datasets/a/b@c/default:train#{column}"] for column in ("text", "body")]
    files = [[f"/a/b/{number}.txt", 1, 2] for number in range(9)]
    assert paths_of([*files, *on_hub, "digest"]) == ["-", "/a/b", *(path for (path,) in on_hub)]


def test_reports_of_traces_need_no_torch_and_no_transformers(traced_run, tmp_path):
    blocked = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; from moescope.cli "
        "import main; main()"
    )
    command = [
        sys.executable,
        "-c",
        blocked,
        "report",
        str(traced_run.path),
        "--out",
        str(tmp_path / "r.html"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_trace_with_a_table_missing_is_refused_by_the_tables_name(traced_run, tmp_path):
    import shutil

    shutil.copytree(traced_run.path, tmp_path / "run")
    (tmp_path / "run" / "load.parquet").unlink()
    with pytest.raises(BadInput, match="table load is missing; trace again with --overwrite"):
        report(tmp_path / "run")


def test_an_imported_trace_gives_a_report_without_what_it_does_not_hold(traced_run, plain_run, tmp_path):
    lines = "layer,expert\n" + "".join(
        f"{layer},{expert}\n" for expert in (0, 1, 2, 1, 3) for layer in range(2)
    )
    (tmp_path / "trace.csv").write_text(lines)
    run = trace(
        recorded=tmp_path / "trace.csv", format="llamacpp", experts=4, out=tmp_path / "run", quiet=True
    )
    page = report(run).read_text(encoding="utf-8")
    assert "v0-load_heatmap" in payloads(page)
    assert "v0-routing_entropy_by_layer" not in payloads(page)
    assert "v0-sequence_by_layer" in payloads(page)
    assert "Not available: this trace holds no logits." in shown(page)
    assert "--recorded" in page


# --- the pieces


def test_of_many_steps_the_first_the_last_and_some_between_are_shown():
    assert shown_steps([1, 2, 3]) == [1, 2, 3]
    assert shown_steps(list(range(0, 1000, 100))) == [0, 300, 600, 900]
    assert shown_steps([1, 2, 3], experts=48 * 128) == [1, 3]


def test_steps_without_a_view_of_their_own_are_told(traced_run):
    found = load_trace(traced_run)
    assert skipped_steps(found) == []
    load = found.tables["load"]
    many = [load[load["step"] == 100].assign(step=step) for step in range(6)]
    long = replace(found, tables={**found.tables, "load": pd.concat(many)})
    assert "Steps 0, 2, 3, 5 of 6" in skipped_steps(long)[0]


def test_every_domain_has_documents_in_the_excerpt():
    assert shown_documents({"a": 30, "b": 30}) == [*range(6), *range(30, 36)]
    assert shown_documents({"a": 2, "b": 1}) == [0, 1, 2]
    assert shown_documents({str(number): 3 for number in range(20)}) == list(range(0, 36, 3))


def test_the_excerpt_is_the_text_and_its_choices_are_the_tables(traced_run):
    view = next(
        view for view in routing_views([load_trace(traced_run)], {traced_run.path: ""}) if view.step == 200
    )
    excerpt = read_excerpt(view)
    tokens = (
        traced_run.table("tokens").query("step == 200 and layer == 1").sort_values(["document", "position"])
    )
    mine = tokens[tokens["document"].isin(excerpt.domains)]
    assert excerpt.words == [f"word{token - 4}" for token in mine["token_id"]]
    assert excerpt.words[0].startswith("word")
    np.testing.assert_array_equal(excerpt.experts[1], np.stack(mine["experts"].to_list()))
    np.testing.assert_allclose(excerpt.gates[1], np.stack(mine["gates"].to_list()))
    assert set(excerpt.domains.values()) == {"plain", "other"}


def test_tables_are_folded_below_their_figures_largest_first_and_cut_where_long(
    html, traced_run, monkeypatch, tmp_path
):
    found = payloads(html)
    load = found["v1-t-load"]
    assert [column["name"] for column in load["columns"]] == [
        "layer",
        "domain",
        "expert",
        "tokens",
        "gate_weight",
    ]
    mine = traced_run.table("load").query("step == 200 and phase == 'prefill'")
    assert [row[3] for row in load["rows"]] == sorted(mine["tokens"], reverse=True)
    assert {"v1-t-coactivation", "v1-t-domains", "o0-t-stability"} <= set(found)
    assert len(found["o0-t-stability"]["rows"]) == 3
    for name in ("v1-t-load", "v1-t-coactivation", "v1-t-domains", "o0-t-stability"):
        assert f'data-payload="{name}" data-folded="1"' in html
    monkeypatch.setattr("moescope.routing.report.ROWS_SHOWN", 5)
    short = payloads(report(traced_run, out=tmp_path / "r.html").read_text(encoding="utf-8"))["v1-t-load"]
    assert short["rows"] == load["rows"][:5]
    assert short["title"] == f"Load of every expert (the 5 largest of {len(mine)})"


def test_every_token_of_the_text_shown_has_its_word_even_one_no_expert_is_known_by(traced_run, tmp_path):
    run = Run.load(shutil.copytree(traced_run.path, tmp_path / "run"))
    few = run.table("vocabulary").groupby(["step", "layer", "expert", "role"]).head(1)
    write_table("vocabulary", few, run.path / "vocabulary.parquet")
    with_pieces, without = excerpt_of(run), excerpt_of(run, forget="token_text")
    assert with_pieces.words == excerpt_of(traced_run).words
    assert all(word.startswith("word") for word in with_pieces.words)
    assert any(word.startswith("#") for word in without.words)  # as older traces are shown


def excerpt_of(run: Run, forget: str = ""):
    if forget:
        (run.path / f"{forget}.parquet").unlink()
    return read_excerpt(routing_views([load_trace(run)], {run.path: ""})[0])


def test_an_older_trace_without_the_added_tables_is_still_shown(traced_run, tmp_path):
    run = Run.load(shutil.copytree(traced_run.path, tmp_path / "run"))
    for name in ("contexts", "expert_cosines", "token_text"):
        (run.path / f"{name}.parquet").unlink()
    found = payloads(report(run, out=tmp_path / "r.html").read_text(encoding="utf-8"))
    assert all(card["contexts"] == [] for card in found["v0-l0"]["experts"])


def test_an_experts_contexts_are_the_tables_places_with_the_mean_gate_beside(html, traced_run):
    cards = payloads(html)["v1-l2"]["experts"]
    mine = traced_run.table("contexts").query("step == 200 and layer == 2")
    load = (
        traced_run.table("load")
        .query("step == 200 and layer == 2 and phase == 'prefill'")
        .groupby("expert")[["gate_weight", "tokens"]]
        .sum()
    )
    for card in cards:
        rows = mine[mine["expert"] == card["expert"]].sort_values("rank")
        assert [place[:3] for place in card["contexts"]] == rows[
            ["before", "token", "after"]
        ].to_numpy().tolist()
        assert [place[3] for place in card["contexts"]] == pytest.approx(rows["gate"].tolist(), rel=1e-4)
        assert [place[4:] for place in card["contexts"]] == rows[
            ["document", "position", "domain"]
        ].to_numpy().tolist()
        assert card["mean_gate"] == pytest.approx(
            load.loc[card["expert"], "gate_weight"] / load.loc[card["expert"], "tokens"], rel=1e-4
        )
        assert max(place[3] for place in card["contexts"]) > card["mean_gate"]


def test_an_experts_tokens_come_by_count_times_log_lift():
    rows = [("common", 100, 1.01), ("its own", 40, 4.0), ("rare", 1, 9.0), ("avoided", 50, 0.2)]
    frame = pd.DataFrame(rows, columns=["token", "count", "lift"]).assign(
        expert=0, role="input", token_id=range(4)
    )
    assert [token for token, _, _ in tokens_by_expert(frame)[0, "input"]] == [
        "its own",
        "rare",
        "common",
        "avoided",
    ]


# --- weights and text together


def test_scan_and_trace_of_one_model_give_one_report_with_the_question_both_answer(tmp_path):
    model = deep_model(tmp_path / "model")
    text = write_jsonl(tmp_path / "text.jsonl", texts(24))
    traced = trace(model, text=text, out=tmp_path / "trace", quiet=True)
    scanned = scan(model, out=tmp_path / "scan", quiet=True)
    page = report(scanned, traced, out=tmp_path / "r.html").read_text(encoding="utf-8")
    assert {
        "r0-accuracy_by_k",
        "v0-cv_by_layer",
        "j0-ambiguity_against_confidence",
        "j0-ambiguity_against_cv",
    } <= set(payloads(page))
    title = payloads(page)["j0-ambiguity_against_confidence"]["title"]
    words = re.search(r"confidence (−?[\d.]+) \((−?[\d.]+) to (−?[\d.]+), 6 layers\); chance is 0", title)
    from scipy.stats import spearmanr

    scores = scanned.table("ambiguity").sort_values("layer")["ambiguity_score"]
    values = (
        traced.table("routing_layers")
        .query("metric == 'confidence' and domain == ''")
        .sort_values("layer")["value"]
    )
    assert float(words.group(1).replace("−", "-")) == pytest.approx(
        spearmanr(scores, values).statistic, abs=5e-3
    )
    assert '<section id="across">' in page
    assert '<section id="load">' in page
    assert 'id="g-shuffle_mean"' in page
    assert 'id="g-gini"' in page


def test_under_five_layers_and_for_different_checkpoints_the_answer_is_not_available(
    traced_run, planted_run, tmp_path
):
    scanned = scan(traced_run.info["checkpoints"][1]["path"], out=tmp_path / "scan", quiet=True)
    page = report(scanned, traced_run, out=tmp_path / "r.html").read_text(encoding="utf-8")
    assert "not available (3 layers in both runs, 5 are needed)" in shown(page)
    assert not [name for name in payloads(page) if name.startswith("j0")]
    assert (
        shown(page).count("Ambiguity against confidence") == 2
    )  # step 200 alone, in the summary and in its section
    other = report(planted_run, traced_run, out=tmp_path / "o.html").read_text(encoding="utf-8")
    assert "Not available: no scan and trace here are of the same checkpoint." in shown(other)


# --- what texts may hold


@pytest.fixture(scope="module")
def evil_html(tmp_path_factory):
    return report(evil_run(tmp_path_factory.mktemp("evil"))).read_text(encoding="utf-8")


def test_no_token_leaves_its_place_in_the_page(evil_html):
    before_scripts = evil_html[: evil_html.index("<script")]
    assert "<img" not in evil_html[: evil_html.index("plotly.js v")]
    assert "hacked" not in before_scripts
    data = re.findall(r'<script type="application/json" id="p-[^"]+">(.*?)</script>', evil_html, re.DOTALL)
    assert not [text for text in data if "<" in text]
    assert not [
        letter for letter in "\u202e\u2066\u200b" if letter in evil_html[: evil_html.index("plotly.js v")]
    ]


def test_evil_tokens_are_shown_all_the_same(evil_html):
    words = set(payloads(evil_html)["v0-text"]["words"])
    assert set(EVIL[:9]) <= words
    assert "[U+202E]gnp.exe[U+2066]" in words
    assert "[U+200B]" in words


def test_names_of_domains_are_safe_inside_figures(evil_html):
    for name, payload in payloads(evil_html).items():
        if "data" in payload:
            drawn = (
                str(payload["title"])
                + str(payload["caption"])
                + str(
                    [
                        [trace.get(key) for key in ("name", "x", "y", "hovertemplate", "text")]
                        for trace in payload["data"]
                    ]
                )
            )
            assert "<img" not in drawn, name
            assert "&amp;" not in drawn, name
