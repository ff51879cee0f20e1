"""Reports from runs: alone, compared, without torch, and refusals."""

import base64
import gzip
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

import moescope.run as run_module
from checkpoints import tiny_config, tiny_tensors, write_checkpoint
from moescope.errors import BadInput
from moescope.reporting.verb import report
from moescope.run import Run
from moescope.tables import SCHEMA_VERSION
from moescope.verb import FigureSpec, Section
from moescope.weights.figures import ALIGNMENT, COMPLETE, MORE, OF_LAYER, SIMILARITY, SUBSPACES
from moescope.weights.tables import TABLES
from moescope.weights.verb import scan
from report_payloads import glossary_terms, page_data, page_sections, payloads


@pytest.fixture(scope="module")
def planted_html(planted_run):
    return report(planted_run).read_text(encoding="utf-8")


def test_the_report_is_one_file_with_plotly_once_and_no_address_to_load_from(planted_html):
    (packed,) = re.findall(r'<script type="text/plain" id="plotly">(.*?)</script>', planted_html, re.DOTALL)
    assert gzip.decompress(base64.b64decode(packed)).count(b"plotly.js v") == 1
    outside = re.sub(r"<script.*?</script>", "", planted_html, flags=re.DOTALL)
    assert not re.findall(r'(?:src|href)="(?!#|data:)', outside)


def test_every_table_is_read_once(planted_run, tmp_path, monkeypatch):
    read, opened = run_module.read_parquet, []
    monkeypatch.setattr(
        run_module, "read_parquet", lambda path, table: opened.append(path) or read(path, table)
    )
    report(planted_run, out=tmp_path / "r.html")
    assert opened
    assert len(opened) == len(set(opened))


def named(found: dict, figure: str) -> dict:
    """The payload of the one figure of that name."""
    (payload,) = [value for value in found.values() if "data" in value and value["name"] == figure]
    return payload


def all_figures(content: dict) -> list[str]:
    """The names of the figures of a section in one piece, with those inside it."""
    inner = [name for section in content["sections"] for name in all_figures(section)]
    return [figure["name"] for figure in content["figures"]] + inner


def test_every_figure_of_every_view_and_layer_is_in_it(planted_html):
    found = payloads(planted_html)
    sections = [entry for entry in page_sections(planted_html, "weights") if entry["run"] is not None]
    views = {entry["view"] for entry in sections}
    assert views == {"gate, raw router", "gate, centered router"}
    for view in views:
        mine = [entry for entry in sections if entry["view"] == view]
        open_ones = [entry for entry in mine if "payload" not in entry]
        across = [figure["name"] for entry in open_ones for figure in entry["figures"]]
        (more,) = [entry for entry in mine if entry["id"] == "more"]
        across += all_figures(found[more["payload"]])
        assert sorted(across) == sorted(spec.name for spec in (*ALIGNMENT, *SIMILARITY, *SUBSPACES, *MORE))
        layers = [entry for entry in mine if entry["layer"] is not None]
        assert [entry["layer"] for entry in layers] == list(range(5))
        for entry in layers:
            figures = all_figures(found[entry["payload"]])
            assert figures == [spec.name for spec in (*OF_LAYER, SUBSPACES[1], *COMPLETE)]
            assert [figure["name"] for figure in entry["figures"]] == figures  # search finds them by title
    (side,) = [entry for entry in page_sections(planted_html, "weights") if entry["id"] == "side-by-side"]
    names = [figure["name"] for part in side["sections"] for figure in part["figures"]]
    across = ["identification_by_layer", "orthogonality_by_layer", "ranks_by_layer", "cos_squared_by_layer"]
    assert names == across


def test_the_setup_of_every_layer_is_full(planted_html):
    found = payloads(planted_html).items()
    layers = [value for name, value in found if re.search(r"-layer-\d+$", name) and "facts" in value]
    assert len(layers) == 2 * 5
    for content in layers:
        setup = content["facts"]
        assert {"model", "matrix", "dtype", "d_model", "d_ff", "experts (n)", "seed", "time"} <= set(setup)
        assert all(setup.values())
        assert setup["k grid"] == "1, 2, 4, 8, 16, 32, 64, 128, 256"


def test_every_column_of_every_scan_table_is_in_the_glossary_and_none_of_other_tables(planted_html):
    shown = {table.key(column) for table in TABLES.values() for column in table.columns}
    assert glossary_terms(planted_html) == shown
    assert len(shown) > 60


def test_runs_of_different_models_are_compared_in_one_report(planted_run, tmp_path):
    model = write_checkpoint(
        tmp_path / "other", tiny_tensors(layers=3, experts=4), tiny_config(layers=3, experts=4)
    )
    views = {"matrix": "gate,down", "router": "raw", "fold_norm": True}
    other = scan(model, out=tmp_path / "other-run", quiet=True, **views)
    html = report(planted_run, other, out=tmp_path / "both.html").read_text(encoding="utf-8")
    found = payloads(html)
    (compared,) = [
        found[name] for name in found if name.endswith("-identification_by_layer") and "overlay" in name
    ]
    names = [trace["name"] for trace in compared["data"]]
    assert sorted(names[:4]) == sorted(
        [
            "run · gate, raw router",
            "run · gate, centered router",
            "other-run · gate, raw router, norm folded in",
            "other-run · down, raw router, norm folded in",
        ]
    )


def test_numbers_that_do_not_depend_on_the_router_are_drawn_once(planted_html):
    found = payloads(planted_html)
    (payload,) = [
        found[name] for name in found if name.endswith("-orthogonality_by_layer") and "overlay" in name
    ]
    lines = [trace for trace in payload["data"] if trace["name"] == "gate"]
    assert [trace["line"]["dash"] for trace in lines] == ["solid", "dash"]  # mean and largest |cos|


def test_steps_of_one_run_are_drawn_against_the_step(tmp_path):
    folders = []
    for step in (100, 200, 300):
        tensors = tiny_tensors(layers=2, seed=step)
        folders.append(write_checkpoint(tmp_path / f"checkpoint-{step}", tensors, tiny_config(layers=2)))
    run = scan(*folders, out=tmp_path / "run", router="raw", quiet=True)
    found = payloads(report(run).read_text(encoding="utf-8"))
    assert named(found, "identification_by_step")["data"][0]["x"] == [100, 200, 300]


def test_a_figure_that_cannot_be_drawn_fails_the_report_with_its_name(planted_run, monkeypatch, tmp_path):
    def broken(tables):
        raise ValueError("no such column")

    section = Section(
        "across", "Across layers", figures=[(FigureSpec("broken", (), broken), {})], view="gate"
    )
    verb = replace(planted_run.verb, sections=lambda run, selection: [section])
    monkeypatch.setattr(Run, "verb", verb)
    with pytest.raises(
        BadInput, match="figure broken of scan0-gate-across cannot be drawn: ValueError: no such"
    ):
        report(planted_run, out=tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_reports_are_built_where_torch_is_not_installed(planted_run, tmp_path):
    blocked = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(name, *_):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block)\n"
        "from moescope.cli import main; main()"
    )
    out = tmp_path / "report.html"
    command = [sys.executable, "-c", blocked, "report", str(planted_run.path), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert out.stat().st_size > 2_000_000


def test_names_from_a_checkpoint_are_escaped(tmp_path):
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    model = write_checkpoint(folder, tiny_tensors(layers=1), tiny_config(layers=1))
    html = report(scan(model, out=tmp_path / "run", quiet=True)).read_text(encoding="utf-8")
    assert "<img" not in html
    assert "img src=x" in page_data(html)["title"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tmp: report(tmp / "nothing"), "no such folder"),
        (lambda tmp: report(tmp), "no run.json in it"),
        (lambda tmp: report(), "no run given"),
        (lambda tmp: report("x", format="gif"), "unknown format 'gif'; known: svg, png, pdf"),
    ],
)
def test_what_cannot_be_reported_is_refused(make, message, tmp_path):
    with pytest.raises(BadInput, match=message):
        make(tmp_path)


def test_an_unfinished_run_and_a_wrong_place_are_refused(planted_run, tmp_path):
    interrupted = {"verb": "scan", "status": "interrupted", "schema_version": SCHEMA_VERSION}
    (tmp_path / "run.json").write_text(json.dumps(interrupted))
    with pytest.raises(BadInput, match="this run is interrupted; give its command again"):
        report(tmp_path)
    with pytest.raises(BadInput, match="a folder; give --out a file name"):
        report(planted_run, out=tmp_path)
    with pytest.raises(BadInput, match="no such folder; make it"):
        report(planted_run, out=tmp_path / "missing" / "report.html")


@pytest.mark.slow
def test_the_report_of_48_layers_of_128_experts_stays_under_25_megabytes(tmp_path):
    tensors = tiny_tensors(layers=48, experts=128, d_model=256, d_ff=96, family="qwen3_moe")
    model = write_checkpoint(
        tmp_path / "model", tensors, tiny_config(layers=48, experts=128, family="qwen3_moe")
    )
    size = report(scan(model, out=tmp_path / "run", quiet=True)).stat().st_size
    assert 3e6 < size < 25e6


def test_a_file_that_is_no_report_is_not_overwritten(planted_run, blank_page, tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text("precious")
    with pytest.raises(BadInput, match="exists and is not a report of moescope's"):
        report(planted_run, out=mine)
    assert mine.read_text() == "precious"
    assert report(planted_run, out=tmp_path / "r.html") == report(planted_run, out=tmp_path / "r.html")


def test_a_report_named_without_an_extension_is_an_html_file(planted_run, blank_page, tmp_path):
    assert report(planted_run, out=tmp_path / "both") == tmp_path / "both.html"
    assert report(planted_run, out=tmp_path / "v0.2") == tmp_path / "v0.2.html"
    assert sorted(path.name for path in tmp_path.glob("both*")) == ["both.html"]


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(planted_run, tmp_path, monkeypatch):
    monkeypatch.setattr("moescope.reporting.page.page_content", lambda runs: pytest.fail("work was done"))
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        report(planted_run, out=tmp_path / "r.html", figures=tmp_path / "file" / "figures")


def test_several_runs_are_not_written_over_the_first_ones_report(planted_run, blank_page, tmp_path):
    model = write_checkpoint(tmp_path / "other", tiny_tensors(layers=1), tiny_config(layers=1))
    first = scan(model, out=tmp_path / "first", quiet=True)
    assert report(first, planted_run) == tmp_path / "first" / "compared.html"


def test_the_report_opens_in_the_browser_when_asked(planted_run, blank_page, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or len(opened) < 2)
    path = report(planted_run, out=tmp_path / "r.html", open=True)
    assert opened == [path.resolve().as_uri()]
    with pytest.raises(BadInput, match=r"r\.html: written, but no browser could be started"):
        report(planted_run, out=tmp_path / "r.html", open=True)


def test_without_plotly_the_report_is_one_line_that_names_the_remedy(planted_run, monkeypatch, tmp_path):
    monkeypatch.setattr("moescope.reporting.verb.find_spec", lambda name: None)
    with pytest.raises(BadInput, match="the report needs plotly; install it with"):
        report(planted_run, out=tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_from_before_chance_levels_were_recorded_names_none(planted_run, tmp_path):
    older = tmp_path / "older"
    shutil.copytree(planted_run.path, older)
    for name in ("alignment_tests", "ambiguity"):
        file = older / f"{name}.parquet"
        table = pq.read_table(file)
        levels = [column for column in table.column_names if "chance" in column]
        assert levels
        version = {"moescope.schema_version": str(SCHEMA_VERSION)}
        pq.write_table(table.drop_columns(levels).replace_schema_metadata(version), file)
    html = report(older).read_text(encoding="utf-8")
    data = page_data(html)
    del data["guide"]
    packed = payloads(html)
    said = [data, *(packed[name] for name in packed if name not in ("glossary", "summary0-info"))]
    assert not re.findall(r"[^\"]*(?:undefined|\bnan\b)[^\"]*", json.dumps(said))
    (accuracy,) = [key for key in data["runs"][0]["key_numbers"] if "ccuracy" in key["name"]]
    assert accuracy["chance"] is None
    assert accuracy["word"] != "at chance"
