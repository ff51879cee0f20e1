"""What a trace says about domains: their experts, how much of each was read, and where it cannot tell."""

from __future__ import annotations

import re
from dataclasses import replace

import pandas as pd
import pytest

from moescope import cli
from moescope.routing.report import (
    layer_cards,
    routing_findings,
    summary,
    trace_coverage,
    view_measures,
    view_numbers,
)
from moescope.routing.report_views import load_trace, routing_views
from moescope.routing.trace import trace
from moescope.run import Run
from routing.tiny_text import save_model, texts, write_jsonl

NAN = float("nan")


def planted(view, rows, documents):
    """The view with these rows of the domains table (domain, layer, expert, tokens, affinity, low, high)."""
    columns = ["domain", "layer", "expert", "tokens", "affinity", "low", "high"]
    setup = {"step": view.step, "coverage": {"domains": documents}}
    run = Run(view.run.path, {**view.run.info, "setup": [setup]})
    frame = pd.DataFrame(rows, columns=columns).assign(affinity_noise=NAN)
    frame["few"] = frame["tokens"] < 5
    return replace(view, run=run, tables={**view.tables, "domains": frame})


def domain_findings(view) -> list[str]:
    return [text for text in routing_findings(view) if text.startswith("Domain experts")]


@pytest.fixture
def view(traced_run):
    return routing_views(load_trace(traced_run))[-1]


def test_each_domain_names_its_experts_with_an_interval_above_one_strongest_domain_first(view):
    rows = [
        ("news", 0, 1, 90, 1.9, 0.8, 3.0),  # the largest of news, but not beyond chance
        ("code", 5, 5, 90, 1.57, 1.4, 1.8),
        ("code", 2, 0, 90, 1.2, 1.1, 1.3),
        ("code", 2, 1, 90, 1.1, 1.05, 1.2),  # a third
        ("prose", 0, 7, 90, 1.8, 1.3, 2.4),
        ("prose", 1, 7, 90, 1.7, NAN, NAN),  # few documents use it
        ("prose", 5, 5, 90, 0.4, 0.3, 0.5),
    ]
    (found,) = domain_findings(planted(view, rows, {"news": 30, "code": 30, "prose": 30}))
    assert "prose 1.8 (layer 0, expert 7), code 1.57 (layer 5, expert 5) (mean domain: 1" in found
    assert "news" not in found
    assert found.place == {
        "tab": "overview", "colour": "domain_affinity", "domain": "prose", "layer": 0, "expert": 7
    }  # fmt: skip
    none = [(*row[:4], 1.1, 0.9, 1.2) for row in rows]
    (found,) = domain_findings(planted(view, none, {"news": 30, "code": 30, "prose": 30}))
    assert "no domain uses an expert beyond chance" in found


def test_without_intervals_the_domain_with_too_few_documents_is_named(view):
    rows = [
        ("code", 5, 5, 90, 1.5, NAN, NAN),
        ("code", 5, 6, 2, 2.0, NAN, NAN),  # one token was to be expected: not named
        ("prose", 0, 7, 90, 1.3, NAN, NAN),
    ]
    made = planted(view, rows, {"code": 6, "prose": 40})
    (found,) = domain_findings(made)
    assert "code 1.5 (layer 5, expert 5), prose 1.3 (layer 0, expert 7)" in found
    assert "no interval: code has 6 documents, 20 are needed" in found


def test_the_command_line_and_the_overview_name_the_experts_of_every_domain(traced_run, capsys):
    cli.show(None, traced_run, as_json=False, quiet=False)
    printed = capsys.readouterr().out
    (line,) = [text for text in summary(traced_run).findings[:5] if text.startswith("Domain experts")]
    assert line in printed
    rows = traced_run.table("domains").query("step == 200 and low > 1").sort_values("affinity")
    for domain, mine in rows.groupby("domain"):
        top = mine.iloc[-1]
        assert f"{domain} {top['affinity']:.3g} (layer {top['layer']}, expert {top['expert']})" in line


# --- specialisation


def with_information(view, rows):
    """The view with I(expert; domain) of layers 0, 1, ...: (value, low, high) each."""
    table = view.tables["routing_layers"]
    first = table[(table["metric"] == "domain_information") & (table["domain"] == "")].iloc[[0]]
    made = [
        first.assign(layer=layer, value=value, low=low, high=high)
        for layer, (value, low, high) in enumerate(rows)
    ]
    others = table[table["metric"] != "domain_information"]
    return replace(
        view, tables={**view.tables, "routing_layers": pd.concat([others, *made], ignore_index=True)}
    )


def specialisation(view):
    (found,) = [text for text in routing_findings(view) if text.startswith("Domain specialisation")]
    return found


def test_a_layer_whose_interval_includes_zero_is_not_called_the_highest(view):
    chance = with_information(view, [(0.001, -0.004, 0.006), (0.009, -0.002, 0.02)])
    found = specialisation(chance)
    assert "no layer is distinguishable from chance" in found
    assert "highest" not in found
    assert "layer" not in found.place
    one = with_information(view, [(0.007, 0.003, 0.011), (0.009, -0.002, 0.02)])
    assert specialisation(one).place["layer"] == 0
    (key,) = [key for key in view_numbers(chance) if key.name == "I(expert; domain)"]
    assert (key.value, key.word) == (0.009, "at chance, layer 1")
    unknown = with_information(view, [(0.001, NAN, NAN), (0.009, NAN, NAN)])
    assert specialisation(unknown).place["layer"] == 1


# --- coverage


def test_coverage_tells_documents_and_tokens_of_every_domain(traced_run):
    (line, *_) = trace_coverage(traced_run)
    told = re.findall(r"(\w+) ([\d,]+) documents, ([\d,]+) tokens", line)
    load = traced_run.table("load").query("step == 200 and phase == 'prefill' and layer == 0")
    tokens = load.groupby("domain")["tokens"].sum() // 2  # two experts per token
    assert {name: (int(documents), int(count.replace(",", ""))) for name, documents, count in told} == {
        name: (30, tokens[name]) for name in ("plain", "other")
    }


def test_coverage_tells_where_max_tokens_cut_documents(tmp_path):
    model = save_model(tmp_path / "model")
    long = [" ".join(["word1"] * 50)] * 30
    domains = [
        f"long={write_jsonl(tmp_path / 'long.jsonl', long)}",
        f"short={write_jsonl(tmp_path / 'short.jsonl', ['word2 word3 word4'] * 40)}",
    ]
    cut = trace(model, domain=domains, max_tokens=200, out=tmp_path / "cut", quiet=True)
    # 100 tokens per domain: 5 of each of 20 long documents, all 3 of 33 short ones and one of the next
    assert cut.info["coverage"][0]["longest"] == {"long": 5, "short": 3}
    (line,) = [line for line in summary(cut).coverage if "--max-tokens 200" in line]
    assert re.findall(r"(\d+) \((\w+)\)", line) == [("5", "long"), ("3", "short")]
    complete = trace(model, domain=domains, max_tokens=10_000, out=tmp_path / "all", quiet=True)
    assert "--max-tokens" not in " ".join(summary(complete).coverage)


# --- map and expert pages


def test_map_and_expert_page_say_where_there_is_no_interval_and_why(view):
    few = planted(view, [("code", 0, 0, 9, 1.5, NAN, NAN), ("prose", 0, 0, 9, 0.5, NAN, NAN)],
                  {"code": 6, "prose": 40})  # fmt: skip
    measures = [measure for measure in view_measures(few) if measure.domain]
    assert [measure.title for measure in measures] == ["Domain affinity: code", "Domain affinity: prose"]
    for measure in measures:
        assert measure.frame["beyond"].isna().all()
        assert "code has 6 documents, 20 are needed" in measure.caption
    enough = planted(view, [("code", 0, 0, 9, 1.5, 1.2, 1.8), ("prose", 0, 0, 9, 0.5, 0.3, 1.1),
                            ("code", 0, 1, 9, 1.0, NAN, NAN), ("prose", 0, 1, 9, 1.0, NAN, NAN)],
                     {"code": 30, "prose": 40})  # fmt: skip
    beyond = {
        measure.domain: measure.frame["beyond"].tolist()
        for measure in view_measures(enough)
        if measure.domain
    }
    assert [beyond["code"][0], beyond["prose"][0]] == [1, 0]
    assert pd.isna([beyond["code"][1], beyond["prose"][1]]).all()
    for made, expert, words in (
        (few, 0, "code has 6 documents"),
        (enough, 0, None),
        (enough, 1, "use the expert"),
    ):
        cards = layer_cards({"domains": made.tables["domains"]}, 3, made)
        (block,) = cards[expert]
        assert block["title"] == "Domain affinity"
        assert (words in block["note"]) if words else "note" not in block


def test_a_real_trace_of_few_documents_says_so_on_its_page(tmp_path):
    model = save_model(tmp_path / "model")
    domains = [
        f"code={write_jsonl(tmp_path / 'a.jsonl', texts(6, seed=0, words=25))}",
        f"prose={write_jsonl(tmp_path / 'b.jsonl', texts(25, seed=1, first=25, words=25))}",
    ]
    run = trace(model, domain=domains, out=tmp_path / "run", quiet=True)
    (line,) = [text for text in summary(run).findings[:5] if text.startswith("Domain experts")]
    assert "code has 6 documents, 20 are needed" in line
