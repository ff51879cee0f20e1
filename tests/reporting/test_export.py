"""Which figures become files, under which names, and how they look on paper."""

import base64
import shutil

import numpy as np
import pytest

from moescope.errors import BadInput
from moescope.reporting.export import paper_figure, report_figures
from moescope.reporting.verb import report
from moescope.run import Run
from report_payloads import page_figures


def test_every_figure_of_a_trace_becomes_a_file_of_its_own(traced_run):
    names = [name for name, _ in report_figures([traced_run])]
    assert len(set(names)) == len(names)
    assert any(name.startswith("run-load") and name.endswith("-balance_by_layer") for name in names)
    assert any("decode" in name for name in names)
    drawn = {name.rpartition("-")[2] for name in names}
    assert drawn <= {spec.name for spec in traced_run.verb.figures}


@pytest.mark.slow
def test_all_that_the_page_draws_is_exported(deep_runs, tmp_path):
    page = report(*deep_runs, out=tmp_path / "r.html").read_text(encoding="utf-8")
    figures = list(report_figures(list(deep_runs)))
    assert sorted(figure.name for _, figure in figures) == sorted(page_figures(page))


def test_runs_of_equal_names_keep_all_their_figures(compared_run, tmp_path):
    """Three copies: two in folders of the same name, one that differs in case alone."""
    copies = [tmp_path / "x" / "a" / "r", tmp_path / "y" / "a" / "r", tmp_path / "z" / "A" / "R"]
    runs = []
    for copy in copies:
        shutil.copytree(compared_run.path, copy)
        runs.append(Run.load(copy))
    alone = len([name for name, _ in report_figures(runs[:1]) if not name.startswith("all_")])
    names = [name.lower() for name, _ in report_figures(runs)]
    assert len(set(names)) == len(names)
    assert len([name for name in names if not name.startswith("all_")]) == 3 * alone


@pytest.mark.parametrize("width", [0, 39, 401])
def test_a_width_that_no_paper_has_is_one_line(compared_run, tmp_path, width):
    with pytest.raises(BadInput, match=f"width {width}: must be at least 40 and at most 400"):
        report(compared_run, out=tmp_path / "r.html", figures=tmp_path / "figures", width=width)
    assert list(tmp_path.iterdir()) == []


def test_without_a_browser_nothing_is_written_and_the_remedy_is_named(compared_run, tmp_path, monkeypatch):
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "no-browser"))
    with pytest.raises(BadInput, match="BROWSER_PATH"):
        report(compared_run, out=tmp_path / "r.html", figures=tmp_path / "figures", format="pdf")
    assert list(tmp_path.iterdir()) == []


def test_on_paper_a_slider_stands_at_its_start(traced_run):
    figures = dict(report_figures([traced_run]))
    figure = next(figure for name, figure in figures.items() if name.endswith("-usage_by_expert"))
    drawn = paper_figure(figure)
    assert len(drawn["data"]) == figure.slider.per_value
    start = figure.slider.start * figure.slider.per_value
    even = figure.slider.per_value - 1  # the grey ticks of an even share
    assert drawn["data"][even]["name"] == "even share"
    packed = drawn["data"][even]["y"]
    levels = np.frombuffer(base64.b64decode(packed["bdata"]), packed["dtype"])
    np.testing.assert_array_equal(levels, figure.data[start + even]["y"])
    assert figure.title in drawn["layout"]["title"]["text"].replace("<br>", " ")
    assert "text" not in paper_figure(figure, title=False)["layout"].get("title", {})
