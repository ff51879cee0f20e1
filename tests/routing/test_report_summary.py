"""One set of sentences of a trace: on the terminal, in --json and on the report's first page.

Of several steps it names them.
"""

from __future__ import annotations

import json
import re

import pytest

from moescope import cli
from moescope.reporting.verb import report
from moescope.routing.report import summary
from report_payloads import page_data


def test_terminal_json_and_report_say_the_same(traced_run, tmp_path, capsys):
    cli.show(None, traced_run, as_json=False, quiet=False, verbose=True)
    printed = capsys.readouterr().out
    cli.show(None, traced_run, as_json=True, quiet=False, verbose=False)
    facts = json.loads(capsys.readouterr().out)
    page = page_data(report(traced_run, out=tmp_path / "r.html").read_text(encoding="utf-8"))
    assert len(facts["findings"]) > 6
    for sentence in facts["findings"]:
        assert f"- {sentence}\n" in printed
    assert [finding["text"] for finding in page["runs"][0]["findings"]] == facts["findings"]
    assert any("step 200, the last of 100 and 200; prefill" in line for line in facts["coverage"])
    assert page["runs"][0]["coverage"] == facts["coverage"]


def test_over_steps_the_load_and_what_was_kept_are_told_first_with_their_chance_levels(traced_run):
    load, kept, *_ = summary(traced_run).findings
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
