"""One set of sentences of a trace: on the terminal, in --json and on the report's first page.

Of several steps it names them.
"""

from __future__ import annotations

import json
import re

import pandas as pd
import pytest
from typer.testing import CliRunner

from moescope import cli
from moescope.reporting.verb import report
from moescope.routing.report import step_findings, summary, trace_findings, which_findings
from moescope.routing.report_views import load_trace
from moescope.run import Run
from report_payloads import page_data


def test_terminal_json_and_report_say_the_same(traced_run, tmp_path, capsys):
    cli.show(None, traced_run, as_json=False, quiet=False)
    printed = capsys.readouterr().out
    cli.show(None, traced_run, as_json=True, quiet=False)
    facts = json.loads(capsys.readouterr().out)
    page = page_data(report(traced_run, out=tmp_path / "r.html").read_text(encoding="utf-8"))
    assert len(facts["findings"]) > 6
    for sentence in facts["findings"]:
        assert f"- {sentence}\n" in printed
    assert [finding["text"] for finding in page["runs"][0]["findings"]] == facts["findings"]
    assert any("step 200, the last of 100 and 200; prefill" in line for line in facts["coverage"])
    assert page["runs"][0]["coverage"] == facts["coverage"]


def test_over_steps_the_load_and_what_was_kept_are_told_first_with_their_chance_levels(traced_run):
    load, kept, *_ = trace_findings(load_trace(traced_run))
    rows = traced_run.table("routing_layers").query("metric == 'cv' and domain == '' and phase == 'prefill'")
    means = rows.groupby("step")["value"].mean()
    told = re.fullmatch(
        r"Load balance over steps: mean CV ([\d.]+) \(step 100\) to ([\d.]+) \(step 200\) "
        r"\(random routing: ([\d.]+)\)\.",
        load,
    )
    assert [float(number) for number in told.groups()[:2]] == pytest.approx(means.tolist(), rel=5e-3)
    beyond = traced_run.table("stability").set_index("layer")["routing_consistency_corrected"]
    told = re.fullmatch(
        r"Routing consistency of steps 100 and 200: ([\d.]+) to ([\d.]+) beyond chance, lowest in layer (\d) "
        r"\(chance: 0\)\.",
        kept,
    )
    assert [float(told[1]), float(told[2])] == pytest.approx([beyond.min(), beyond.max()], rel=5e-3)
    assert int(told[3]) == beyond.idxmin()


def test_of_three_steps_the_last_two_are_named_and_one_step_has_no_such_sentence(traced_run):
    trace = load_trace(traced_run)
    later = {
        name: frame.assign(step=frame["step"].replace({100: 200, 200: 300}))
        for name, frame in trace.tables.items()
        if "step" in frame
    }
    tables = {
        name: pd.concat([trace.tables[name], frame[frame["step"] == 300]]) for name, frame in later.items()
    }
    pairs = trace.tables["stability"]
    between = {(100, 300): 0.2, (100, 200): 0.25, (200, 300): 0.375}
    tables["stability"] = pd.concat(
        [
            pairs.assign(step_a=a, step_b=b, routing_consistency_corrected=value, tau_is_noise=True)
            for (a, b), value in between.items()
        ]
    )
    three = type(trace)(trace.run, tables)
    _, kept, last, noise = step_findings(three)
    assert kept.startswith("Routing consistency of steps 100 and 300: 0.2 beyond chance")
    assert last.startswith("Routing consistency of the last two steps, 200 and 300: 0.375 beyond chance")
    assert noise.startswith("In 3 of 3 layers")
    assert which_findings(three) == "step 300, the last of 100, 200 and 300; prefill"
    one = type(trace)(
        trace.run,
        {
            name: frame[frame["step"] == 100] if "step" in frame else frame.iloc[:0]
            for name, frame in trace.tables.items()
        },
    )
    assert step_findings(one) == []


def test_a_single_step_needs_no_words_about_which(tmp_path):
    from routing.tiny_text import save_model, texts, write_jsonl

    model, text = save_model(tmp_path / "model"), write_jsonl(tmp_path / "text.jsonl", texts(5))
    done = CliRunner().invoke(
        cli.app, ["trace", str(model), "--text", str(text), "--out", str(tmp_path / "run"), "--json"]
    )
    facts = json.loads(done.stdout)
    assert facts["findings"][0].startswith("Load balance: ")
    assert facts["findings"] == summary(Run.load(tmp_path / "run")).findings
    assert not any("the last of" in line for line in facts["coverage"])


def test_key_numbers_are_the_worst_layers_with_their_chance_levels(traced_run):
    keys = {key.name: key for key in summary(traced_run).key_numbers}
    rows = traced_run.table("routing_layers").query("step == 200 and phase == 'prefill' and domain == ''")
    cv = rows[rows["metric"] == "cv"]
    top = cv.loc[cv["value"].idxmax()]
    assert (keys["Worst load CV"].value, keys["Worst load CV"].chance) == (
        top["value"],
        top["extreme_chance"],
    )
    assert top["extreme_chance"] > top["chance"], "of the worst of three layers, not of one"
    entropy = rows[rows["metric"] == "routing_entropy"]
    assert keys["Lowest routing entropy"].value == entropy["value"].min()
    assert 3 <= len(keys) <= 6
