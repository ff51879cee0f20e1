"""What a trace says about domains: their experts, how much of each was read, and where it cannot tell."""

from __future__ import annotations

import re
from dataclasses import replace

import pandas as pd
import pytest

from moescope import cli
from moescope.reporting.findings import key_numbers
from moescope.routing.report import (
    NUMBERS,
    layer_cards,
    routing_findings,
    summary,
    trace_coverage,
    view_measures,
)
from moescope.routing.report_views import load_trace, routing_views
from moescope.routing.tables import TABLES
from moescope.routing.trace import trace
from moescope.run import Run
from routing.tiny_text import save_model, texts, write_jsonl

NAN = float("nan")


def planted(view, rows, documents):
    """The view with these rows of the domains table: domain, layer, expert, tokens, affinity, claimed."""
    columns = ["domain", "layer", "expert", "tokens", "affinity", "claimed"]
    setup = {"step": view.step, "coverage": {"domains": documents}}
    run = Run(view.run.path, {**view.run.info, "setup": [setup]})
    frame = pd.DataFrame(rows, columns=columns).assign(affinity_noise=NAN, low=NAN, high=NAN)
    frame["few"] = frame["tokens"] < 5
    frame["affinity_p"] = frame["claimed"].map({True: 0.01, False: 0.5}).astype(float)
    return replace(view, run=run, tables={**view.tables, "domains": frame})


def domain_findings(view) -> list[str]:
    return [text for text in routing_findings(view) if text.startswith("Domain experts")]


@pytest.fixture
def view(traced_run):
    return routing_views(load_trace(traced_run))[-1]


def test_each_domain_names_its_experts_beyond_corrected_chance_strongest_domain_first(view):
    rows = [
        ("news", 0, 1, 90, 1.9, False),  # the largest of all, but not beyond chance
        ("code", 5, 5, 90, 1.57, True),
        ("code", 2, 0, 90, 1.2, True),
        ("prose", 0, 7, 90, 1.8, True),
        ("prose", 1, 7, 3, 2.7, None),  # too few tokens
        ("prose", 5, 5, 90, 0.4, True),
    ]
    (found,) = domain_findings(planted(view, rows, {"news": 30, "code": 30, "prose": 30}))
    assert "prose 1.8 (L0 E7), code 1.57 (L5 E5)" in found
    assert "3 of 4" in found
    assert "news" not in found
    assert found.place == {
        "tab": "overview", "colour": "domain_affinity", "domain": "prose", "layer": 0, "expert": 7
    }  # fmt: skip
    none = [(*row[:5], None if row[5] is None else False) for row in rows]
    (found,) = domain_findings(planted(view, none, {"news": 30, "code": 30, "prose": 30}))
    assert "no expert prefers a domain beyond chance" in found
    assert domain_findings(planted(view, [(*row[:5], None) for row in rows], {"news": 1, "code": 1})) == []


def test_the_command_line_and_the_overview_say_that_a_random_model_has_no_domain_experts(traced_run, capsys):
    """One of its intervals lies above 1, as one of 40 does by chance."""
    cli.show(None, traced_run, as_json=False, quiet=False, verbose=True)
    printed = capsys.readouterr().out
    (line,) = [text for text in summary(traced_run).findings[:5] if text.startswith("Domain experts")]
    assert line in printed
    rows = traced_run.table("domains").query("step == 200 and affinity >= 1")
    assert (rows["low"] > 1).any()
    assert f"no expert prefers a domain beyond chance (0 of {len(rows)}" in line


# --- specialisation


def with_information(view, rows):
    """The view with I(expert; domain) of layers 0, 1, ...: (value, low, high) each."""
    table = view.tables["routing_layers"]
    first = table[(table["metric"] == "domain_information") & (table["domain"] == "")].iloc[[0]]
    made = [
        first.assign(layer=layer, value=value, low=low, high=high, extreme_limit=0.005, largest=0.69)
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
    numbers = key_numbers(NUMBERS, chance.tables, TABLES)
    (key,) = [key for key in numbers if key.name == "I(expert; domain)"]
    assert (key.value, key.word, key.most) == (0.009, "at chance, layer 1", 0.69)
    unknown = with_information(view, [(0.001, NAN, NAN), (0.009, NAN, NAN)])
    assert specialisation(unknown).place["layer"] == 1  # by the limit of permuted labels alone
    assert "negligible" in specialisation(unknown)
    below = with_information(view, [(0.001, NAN, NAN), (0.004, 0.002, 0.006)])
    assert "no layer is distinguishable" in specialisation(below)  # an interval corrects for no other layer


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


def test_the_map_rings_corrected_claims_and_expert_pages_say_where_there_is_no_interval(view):
    rows = [("code", 0, 0, 9, 1.5, True), ("prose", 0, 0, 9, 0.5, False), ("code", 0, 1, 9, 1.0, None)]
    made = planted(view, rows, {"code": 6, "prose": 40})
    measures = {measure.title: measure for measure in view_measures(made) if measure.domain}
    assert set(measures) == {"Domain affinity: code", "Domain affinity: prose"}
    assert measures["Domain affinity: code"].frame["beyond"].tolist() == [True, None]
    assert measures["Domain affinity: prose"].frame["beyond"].tolist() == [False]
    (block, *_) = layer_cards({"domains": made.tables["domains"]}, 3, made)[0]
    assert block["title"] == "Domain affinity"
    assert "code has 6 documents" in block["note"]
    known = made.tables["domains"].assign(low=0.3, high=0.9)
    (block, *_) = layer_cards({"domains": known}, 3, made)[0]
    assert "note" not in block
    enough = planted(view, rows, {"code": 30, "prose": 40})
    assert "use the expert" in layer_cards({"domains": enough.tables["domains"]}, 3, enough)[0][0]["note"]


def test_domains_with_one_document_each_are_not_judged(tmp_path):
    model = save_model(tmp_path / "model")
    domains = [
        f"{name}={write_jsonl(tmp_path / f'{name}.jsonl', texts(1, seed=seed, words=40))}"
        for seed, name in enumerate(("code", "prose"))
    ]
    run = trace(model, domain=domains, out=tmp_path / "run", quiet=True)
    assert not [text for text in summary(run).findings if text.startswith("Domain experts")]
    assert run.table("domains")["claimed"].isna().all()
