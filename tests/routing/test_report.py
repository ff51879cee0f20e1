"""Reports of traces.

What is in them, what is said, what is left out, and that nothing a text holds gets out of its place.
"""

import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest

from moescope.errors import BadInput
from moescope.reporting.page import slug
from moescope.reporting.verb import report
from moescope.routing.figures import FIGURES, MAPS, STEPS
from moescope.routing.metrics import METRICS
from moescope.routing.report_views import (
    load_trace,
    routing_views,
    shown_documents,
    shown_steps,
    text_payload,
    tokens_by_expert,
)
from moescope.routing.tables import TRACE_TABLES
from moescope.routing.trace import trace
from moescope.run import Run, write_table
from report_payloads import glossary_terms, page_data, page_sections, payloads
from routing.routing_runs import EVIL, evil_run
from routing.tiny_text import save_model, texts, write_jsonl

ROUTING = [spec for spec in FIGURES if spec not in (*MAPS, *STEPS)]


@pytest.fixture(scope="module")
def html(traced_run, tmp_path_factory):
    return report(traced_run, out=tmp_path_factory.mktemp("r") / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory) -> Run:
    """One domain, few documents, no tokens kept: the least a trace can be."""
    folder = tmp_path_factory.mktemp("plain")
    text = write_jsonl(folder / "text.jsonl", texts(3, seed=2))
    return trace(save_model(folder / "model"), text=text, out=folder / "run", quiet=True)


LAST = "step 200, prefill"  # the view with which the page opens


def in_view(names, view: str, figure: str) -> bool:
    """Whether a view of the page has a figure, by itself or under "More"."""
    more = names.get(f"trace0-{slug(view)}-more", {}) if isinstance(names, dict) else {}
    folded = [one["name"] for section in more.get("sections", []) for one in section["figures"]]
    alone = (name.startswith(f"trace0-{slug(view)}-") and name.endswith(f"-{figure}") for name in names)
    return figure in folded or any(alone)


def payload(html: str, view: str, figure: str):
    found = payloads(html)
    return next(found[name] for name in found if in_view([name], view, figure))


def table_of(html: str, view: str, section: str):
    return payloads(html)[f"trace0-{slug(view)}-{section}-table0"]


def cards_of(html: str, view: str, layer: int):
    """Expert -> the blocks of its page."""
    return payloads(html)[f"cards0-{slug(view)}-{layer}"]


def texts_of(html: str) -> str:
    """Every text that the page's sections, findings, notices and warnings show."""
    return json.dumps(page_data(html), ensure_ascii=False)


def test_every_figure_of_every_view_and_over_steps_is_in_the_report(html):
    names = payloads(html)
    for view in ("step 100, prefill", LAST):
        assert all(in_view(names, view, spec.name) for spec in ROUTING)
    assert not in_view(names, "step 100, decode", "coactivation_heatmap")
    assert all(any(name.endswith(f"-{spec.name}") for name in names) for spec in STEPS[:2])
    assert {f"cards0-{slug(LAST)}-{layer}" for layer in range(3)} <= set(names)


def test_the_page_opens_with_the_last_step_in_prefill(html, traced_run):
    last = routing_views(load_trace(traced_run))[-1]
    assert (last.step, last.phase) == (200, "prefill")
    (selector,) = page_data(html)["views"]
    assert selector["views"][selector["first"]] == LAST


def test_every_metric_and_routing_column_is_in_the_glossary_and_no_scans(html):
    terms = glossary_terms(html)
    assert set(METRICS) <= terms
    assert {table.key(column) for table in TRACE_TABLES.values() for column in table.columns} <= terms
    assert "shuffle_mean" not in terms


def test_findings_name_chance_and_collapse(html, traced_run):
    rows = traced_run.table("routing_layers").query(
        "step == 200 and phase == 'prefill' and domain == '' and metric == 'cv'"
    )
    top = rows.loc[rows["value"].idxmax()]
    words = re.search(
        (
            r"CV [\d.]+ to ([\d.]+), worst in layer (\d) \(without the bias of few documents ([\d.]+) "
            r"\[([\d.]+), ([\d.]+)\], even: 0\) \(random routing, extreme of 3: ([\d.]+)\)"
        ),
        html,
    )
    assert words is not None
    numbers = [float(word) for word in words.groups()]
    assert numbers == pytest.approx(
        [top[key] for key in ("value", "layer", "corrected", "low", "high", "extreme_chance")], rel=6e-3
    )
    assert "Routing consistency of steps 100 and 200" in html


def test_findings_lead_to_figures_of_the_page(html):
    (run,) = page_data(html)["runs"]
    tabs = {tab["name"] for tab in page_data(html)["tabs"]}
    places = [finding["place"] for finding in run["findings"]]
    figures = [place["figure"] for place in places if "figure" in place]
    assert len(figures) >= 5
    names = payloads(html)
    over_steps = {name.rpartition("-")[2] for name in names if name.startswith("trace0-steps-")}
    assert all(in_view(names, LAST, figure) or figure in over_steps for figure in figures)
    assert {place["tab"] for place in places if "tab" in place} <= tabs


def test_the_glance_table_holds_the_tables_numbers_with_chance_levels(html, traced_run):
    table = table_of(html, LAST, "glance")
    titles = [column["title"] for column in table["columns"]]
    assert titles[:4] == ["layer", "CV", "chance", "max/mean"]
    assert set(titles[2::2]) == {"chance"}  # of every number
    rows = traced_run.table("routing_layers").query(
        "step == 200 and phase == 'prefill' and domain == '' and metric == 'cv'"
    )
    assert [row[1] for row in table["rows"]] == pytest.approx(
        rows.sort_values("layer")["value"].tolist(), rel=1e-5
    )
    assert [row[2] for row in table["rows"]] == pytest.approx(
        rows.sort_values("layer")["chance"].tolist(), rel=1e-5
    )
    assert {entry["layer"] for entry in page_sections(html, "routing")} == {None, 0, 1, 2}


def test_what_a_report_holds_of_the_text_is_said_at_its_top(html, plain_run, tmp_path):
    (notice,) = [item["text"] for item in page_data(html)["notices"]]
    assert "passages of the text" in notice
    quiet = report(plain_run, out=tmp_path / "r.html").read_text(encoding="utf-8")
    assert "short passages of the text" in page_data(quiet)["notices"][0]["text"]


def test_what_a_trace_cannot_tell_is_said_and_not_drawn(plain_run, tmp_path):
    page = report(plain_run, out=tmp_path / "r.html").read_text(encoding="utf-8")
    assert "the text was read as one domain; name several with --domain NAME=PATH" in texts_of(page)
    assert "text" not in [tab["name"] for tab in page_data(page)["tabs"] if tab["sections"]]
    (text,) = [entry for entry in page_data(page)["add"] if entry["title"] == "Text"]
    assert "--save-tokens" in text["command"]
    assert "steps" not in [entry["id"] for entry in page_sections(page, "routing")]
    assert page_data(page)["views"] == []
    assert "no intervals: 20 documents are needed, 3 given" in texts_of(page)
    traces = payload(page, "all tokens", "balance_by_layer")["data"]
    assert not [trace for trace in traces if trace.get("fill")], "an interval of three documents"


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
    found = payloads(page)
    assert not in_view(found, "all tokens", "load_map")  # too few tokens
    assert in_view(found, "all tokens", "usage_by_expert")
    assert not in_view(found, "all tokens", "decisions_by_layer")
    assert "this trace holds no logits" in texts_of(page)
    assert "--recorded" in found["summary0-info"]["command"]


# --- the pieces


def test_of_many_steps_the_first_the_last_and_some_between_are_shown():
    assert shown_steps([1, 2, 3]) == [1, 2, 3]
    assert shown_steps(list(range(0, 1000, 100))) == [0, 300, 600, 900]
    assert shown_steps([1, 2, 3], experts=48 * 128) == [1, 3]


def test_every_domain_has_documents_in_the_excerpt():
    assert shown_documents({"a": 30, "b": 30}) == [*range(6), *range(30, 36)]
    assert shown_documents({"a": 2, "b": 1}) == [0, 1, 2]
    assert shown_documents({str(number): 3 for number in range(20)}) == list(range(0, 36, 3))


def test_the_excerpt_is_the_text_and_its_choices_are_the_tables(traced_run):
    excerpt = text_payload(routing_views(load_trace(traced_run))[-1])
    tokens = (
        traced_run.table("tokens").query("step == 200 and layer == 1").sort_values(["document", "position"])
    )
    mine = tokens[tokens["document"].isin([document["number"] for document in excerpt["documents"]])]
    assert excerpt["words"] == [f"word{token - 4}" for token in mine["token_id"]]
    np.testing.assert_array_equal(excerpt["layers"][1]["experts"], np.stack(mine["experts"].to_list()))
    np.testing.assert_allclose(excerpt["layers"][1]["gates"], np.stack(mine["gates"].to_list()), rtol=1e-5)
    assert {document["domain"] for document in excerpt["documents"]} == {"plain", "other"}


def test_every_token_of_the_text_shown_has_its_word_even_one_no_expert_is_known_by(traced_run, tmp_path):
    run = Run.load(shutil.copytree(traced_run.path, tmp_path / "run"))
    few = run.table("vocabulary").groupby(["step", "layer", "expert", "role"]).head(1)
    write_table(TRACE_TABLES["vocabulary"], few, run.path / "vocabulary.parquet")
    run.info["rows"] = run.info["rows"] | {"vocabulary": len(few)}
    assert excerpt_words(run) == excerpt_words(traced_run)
    assert all(word.startswith("word") for word in excerpt_words(run))
    (run.path / "token_text.parquet").unlink()
    assert all(word.startswith("#") for word in excerpt_words(run))


def test_a_long_text_is_cut_between_words_and_says_how_much_is_shown(traced_run, tmp_path, monkeypatch):
    run = Run.load(shutil.copytree(traced_run.path, tmp_path / "run"))
    pieces = run.table("token_text")  # word0 begins a word, the others continue one
    starts = pieces["token"].str.fullmatch("word[0-9]*[05]")
    pieces["token"] = pieces["token"].where(~starts, " " + pieces["token"])
    write_table(TRACE_TABLES["token_text"], pieces, run.path / "token_text.parquet")
    monkeypatch.setattr("moescope.routing.report_views.TOKENS_EACH", 14)
    page = payloads(report(run, out=tmp_path / "r.html").read_text(encoding="utf-8"))
    text = next(value for name, value in page.items() if name.endswith("text-widget"))
    tokens = run.table("tokens").query("layer == 0 and phase == 'prefill'")
    cut = 0
    for document in text["documents"]:
        rows = tokens[(tokens["document"] == document["number"]) & (tokens["step"] == 200)]
        shown = text["words"][document["from"] : document["to"]]
        assert document["tokens"] == len(rows)
        assert 0 < len(shown) <= 14
        if len(rows) <= 14:
            assert len(shown) == len(rows)
        elif any(word.startswith(" ") for word in shown[1:]):
            following = rows.sort_values("position")["token_id"].iloc[len(shown)] - 4
            assert following % 5 == 0  # the next token begins a word
            cut += 1
    assert cut >= 3


def excerpt_words(run: Run) -> list[str]:
    return text_payload(next(view for view in routing_views(load_trace(run)) if view.main))["words"]


def test_an_experts_contexts_are_the_tables_places(html, traced_run):
    mine = traced_run.table("contexts").query("step == 200 and layer == 2")
    for expert, card in cards_of(html, LAST, 2).items():
        (places,) = [block["rows"] for block in card if block["kind"] == "contexts"]
        rows = mine[mine["expert"] == int(expert)].sort_values("rank")
        assert [place[:3] for place in places] == rows[["before", "token", "after"]].to_numpy().tolist()
        assert [place[3] for place in places] == pytest.approx(rows["gate"].tolist(), rel=1e-4)
        assert [place[4:] for place in places] == rows[["document", "position", "domain"]].to_numpy().tolist()


def test_the_map_has_the_load_of_every_expert_as_a_multiple_of_an_even_share(html, traced_run):
    load = traced_run.table("load").query("step == 200 and phase == 'prefill'")
    counts = load.groupby(["layer", "expert"])["tokens"].sum().unstack()
    (measure,) = [
        item for item in payloads(html)["map"]["measures"] if item["name"] == "load" and item["view"] == LAST
    ]
    times = counts.div(counts.mean(axis=1), axis=0)
    assert measure["layers"] == [0, 1, 2]
    np.testing.assert_allclose(measure["value"], times, rtol=1e-3)
    rows = traced_run.table("load_totals").query("step == 200 and phase == 'prefill'")
    claimed = rows.pivot(index="layer", columns="expert", values="claimed").astype(bool)
    np.testing.assert_array_equal(np.array(measure["beyond"], bool), claimed)
    places = traced_run.table("coactivation").query("step == 200").drop_duplicates(["layer", "expert_a"])
    np.testing.assert_array_equal(
        measure["cluster"], places.pivot(index="layer", columns="expert_a", values="place_a")
    )


def test_domain_lifts_of_the_map_are_the_tables_affinities(html, traced_run):
    rows = traced_run.table("domains").query("step == 200 and domain == 'other'")
    (measure,) = [
        item
        for item in payloads(html)["map"]["measures"]
        if (item["domain"], item["view"]) == ("other", LAST)
    ]
    table = rows.pivot(index="layer", columns="expert", values="affinity")
    np.testing.assert_allclose(np.array(measure["value"], float), table, rtol=1e-3)


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


# --- weights and text on one page


def test_scan_and_trace_of_one_model_give_one_report(deep_runs, tmp_path):
    scanned, traced = deep_runs
    page = report(scanned, traced, out=tmp_path / "r.html").read_text(encoding="utf-8")
    found = payloads(page)
    assert any(name.endswith("-identification_by_k") for name in found)
    assert any(name.startswith("trace1-") and name.endswith("-balance_by_layer") for name in found)
    assert {"shuffle_mean", "gini"} <= glossary_terms(page)


# --- what texts may hold


@pytest.fixture(scope="module")
def evil_html(tmp_path_factory):
    return report(evil_run(tmp_path_factory.mktemp("evil"))).read_text(encoding="utf-8")


def test_no_token_leaves_its_place_in_the_page(evil_html):
    markup = re.sub(r"<(script|style).*?</\1>", "", evil_html, flags=re.DOTALL)
    assert "<img" not in markup
    assert "hacked" not in evil_html[: evil_html.index("<script")]
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', evil_html, re.DOTALL)
    assert "<" not in data
    assert not set("\u202e\u2066\u200b") & set(evil_html)


def test_evil_tokens_are_shown_all_the_same(evil_html):
    words = set(payloads(evil_html)["trace0-all_tokens-text-widget"]["words"])
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
