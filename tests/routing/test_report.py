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
from moescope.routing.report_views import (
    load_trace,
    read_excerpt,
    routing_views,
    shown_documents,
    shown_steps,
    skipped_steps,
    tokens_by_expert,
)
from moescope.routing.tables import TRACE_TABLES
from moescope.routing.trace import trace
from moescope.run import Run, write_table
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


def in_view(names, view: int, figure: str) -> bool:
    return any(name.startswith(f"trace0-v{view}-") and name.endswith(f"-{figure}") for name in names)


def payload(html: str, view: int, figure: str):
    found = payloads(html)
    return next(found[name] for name in found if in_view([name], view, figure))


def glance(html: str, view: int):
    found = payloads(html)
    return next(found[name] for name in found if name.endswith(f"-v{view}-glance-table0"))


def table_of(html: str, view: int, section: str):
    return payloads(html)[f"trace0-v{view}-{section}-table0"]


def cards_of(html: str, view: int, layer: int):
    return payloads(html)[f"trace0-v{view}-experts-v{view}-layer-{layer}"]["widget"][1]["experts"]


def shown(html: str) -> str:
    """The page without its scripts and styles."""
    return re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL)


def test_every_figure_of_every_view_and_over_steps_is_in_the_report(html):
    names = set(payloads(html))
    for view in (2, 3):  # of two steps and two phases, prefill last
        assert all(in_view(names, view, spec.name) for spec in ROUTING)
    assert not in_view(names, 0, "coactivation_heatmap")
    assert all(any(name.endswith(f"-{spec.name}") for name in names) for spec in OVER_STEPS)
    assert {f"trace0-v3-experts-v3-layer-{layer}" for layer in range(3)} <= names


def test_the_page_opens_with_the_last_step_in_prefill(html, traced_run):
    last = routing_views(load_trace(traced_run))[-1]
    assert (last.step, last.phase) == (200, "prefill")
    assert re.search(r'<option value="3" selected>step 200, prefill</option>', html)


def test_every_metric_and_routing_column_is_in_the_glossary_and_no_scans(html):
    for metric in METRICS:
        assert f'id="g-{metric}"' in html
    for table in TRACE_TABLES.values():
        for column in table.columns:
            assert f'id="g-{table.key(column)}"' in html
    assert 'id="g-shuffle_mean"' not in html
    assert 'id="across"' not in html


def test_findings_name_chance_and_collapse(html, traced_run):
    rows = traced_run.table("routing_layers").query(
        "step == 200 and phase == 'prefill' and domain == '' and metric == 'cv'"
    )
    top = rows.loc[rows["value"].idxmax()]
    words = re.search(
        (
            r"Load balance: worst in layer (\d), CV ([\d.]+) \(corrected for few documents: ([\d.]+) "
            r"\[([\d.]+), ([\d.]+)\]\); ([\d.]+) for "
            r"random routing, ([\d.]+) at collapse"
        ),
        html,
    )
    assert words is not None
    numbers = [float(word) for word in words.groups()]
    assert numbers == pytest.approx(
        [top[key] for key in ("layer", "value", "corrected", "low", "high", "chance", "collapse")], rel=6e-3
    )
    assert "Routing consistency between steps 100 and 200" in html


def test_the_glance_table_holds_the_tables_numbers_with_chance_beside_them(html, traced_run):
    table = glance(html, 3)
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
    assert table["links"] == "layer-"
    assert 'id="trace-v3-layer-1"' in html


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
    assert 'id="trace-steps"' not in page
    assert 'data-selects="trace"' not in shown(page)
    assert "no intervals: 20 documents are needed, 3 given" in shown(page)
    assert "No interval" in payload(page, 0, "cv_by_layer")["caption"]


def test_the_command_in_the_report_makes_the_same_run(html, plain_run, traced_run, tmp_path):
    command = re.search(r'<pre class="command">(.*?)</pre>', html).group(1)
    for item in traced_run.info["checkpoints"]:
        assert item["path"] in command
    assert "--phase both --save-tokens" in command
    assert "--domain plain=" in command
    page = report(plain_run, out=tmp_path / "r.html").read_text(encoding="utf-8")
    assert re.search(r"trace \S+model --text \S+text\.jsonl", page)


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
    assert in_view(payloads(page), 0, "load_heatmap")
    assert not in_view(payloads(page), 0, "routing_entropy_by_layer")
    assert in_view(payloads(page), 0, "sequence_by_layer")
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
    excerpt = read_excerpt(routing_views(load_trace(traced_run))[-1])
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
    load = table_of(html, 3, "load")
    assert [column["name"] for column in load["columns"]] == [
        "layer",
        "domain",
        "expert",
        "tokens",
        "gate_weight",
    ]
    mine = traced_run.table("load").query("step == 200 and phase == 'prefill'")
    assert [row[3] for row in load["rows"]] == sorted(mine["tokens"], reverse=True)
    assert len(payloads(html)["trace0-steps-table0"]["rows"]) == 3
    places = [f"trace0-v3-{section}-table0" for section in ("load", "separation", "domains")]
    for name in (*places, "trace0-steps-table0"):
        assert f'data-payload="{name}" data-folded="1"' in html
    monkeypatch.setattr("moescope.routing.report.ROWS_SHOWN", 5)
    short = table_of(report(traced_run, out=tmp_path / "r.html").read_text(encoding="utf-8"), 3, "load")
    assert short["rows"] == load["rows"][:5]
    assert short["title"] == f"Load of every expert (the 5 largest of {len(mine)})"


def test_every_token_of_the_text_shown_has_its_word_even_one_no_expert_is_known_by(traced_run, tmp_path):
    run = Run.load(shutil.copytree(traced_run.path, tmp_path / "run"))
    few = run.table("vocabulary").groupby(["step", "layer", "expert", "role"]).head(1)
    write_table(TRACE_TABLES["vocabulary"], few, run.path / "vocabulary.parquet")
    with_pieces, without = excerpt_of(run), excerpt_of(run, forget="token_text")
    assert with_pieces.words == excerpt_of(traced_run).words
    assert all(word.startswith("word") for word in with_pieces.words)
    assert any(word.startswith("#") for word in without.words)  # as older traces are shown


def excerpt_of(run: Run, forget: str = ""):
    if forget:
        (run.path / f"{forget}.parquet").unlink()
    return read_excerpt(next(view for view in routing_views(load_trace(run)) if view.main))


def test_an_older_trace_without_the_added_tables_is_still_shown(traced_run, tmp_path):
    run = Run.load(shutil.copytree(traced_run.path, tmp_path / "run"))
    for name in ("contexts", "expert_cosines", "token_text"):
        (run.path / f"{name}.parquet").unlink()
    page = report(run, out=tmp_path / "r.html").read_text(encoding="utf-8")
    assert all(card["contexts"] == [] for card in cards_of(page, 2, 0))


def test_an_experts_contexts_are_the_tables_places_with_the_mean_gate_beside(html, traced_run):
    cards = cards_of(html, 3, 2)
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


def test_scan_and_trace_of_one_model_give_one_report_with_what_they_show_together(tmp_path):
    model = deep_model(tmp_path / "model")
    text = write_jsonl(tmp_path / "text.jsonl", texts(24))
    traced = trace(model, text=text, out=tmp_path / "trace", quiet=True)
    scanned = scan(model, out=tmp_path / "scan", router="raw,centered", quiet=True)
    page = report(scanned, traced, out=tmp_path / "r.html").read_text(encoding="utf-8")
    found = payloads(page)
    assert any(name.endswith("-accuracy_by_k") for name in found)
    assert in_view(found, 0, "cv_by_layer")
    assert any(name.endswith("-ambiguity_against_cv") for name in found)
    caption = next(found[name] for name in found if name.endswith("-ambiguity_against_confidence"))["caption"]
    from scipy.stats import spearmanr

    values = (
        traced.table("routing_layers")
        .query("metric == 'confidence' and domain == ''")
        .sort_values("layer")["value"]
    )
    coefficients = {
        router: float(text.replace("−", "-"))
        for text, router in re.findall(r"(−?[\d.]+) \((raw|centered)\)", caption)
    }
    for router, rows in scanned.table("ambiguity").sort_values("layer").groupby("router"):
        coefficient = spearmanr(rows["absolute_score"], values).statistic
        assert coefficients[router] == pytest.approx(coefficient, abs=5e-3)
    assert '<section id="trace-load">' in page
    assert 'id="g-shuffle_mean"' in page
    assert 'id="g-gini"' in page


def test_under_five_layers_and_for_different_checkpoints_nothing_is_drawn_together(
    traced_run, planted_run, tmp_path
):
    scanned = scan(traced_run.info["checkpoints"][1]["path"], out=tmp_path / "scan", quiet=True)
    page = report(scanned, traced_run, out=tmp_path / "r.html").read_text(encoding="utf-8")
    assert "Not available: 3 layers in both runs, 5 are needed." in shown(page)
    assert not [name for name in payloads(page) if "ambiguity_against" in name]
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
    words = set(payloads(evil_html)["trace0-v0-text-widget"]["words"])
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
