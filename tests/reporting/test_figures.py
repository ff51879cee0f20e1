"""Every figure of every verb: it can be reached in a report, and it has the words that a paper needs."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from playwright.sync_api import TimeoutError

from browsing import RUNS_OF
from lab.tiny_training import TOML
from moescope.deployment.verb import deploy
from moescope.intervention.figures import FIGURES as INTERVENTIONS
from moescope.lab.train import train
from moescope.plotting.style import GREY, LINES_UP_TO
from moescope.reporting.export import report_figures
from moescope.reporting.verb import report
from moescope.run import Run
from moescope.verb import Figure
from moescope.verbs import VERBS, load_verb
from moescope.weights.verb import scan
from report_payloads import page_data, page_figures

# Opens every folded section of a tab; what of the wanted figures it then lacks.
MISSING = """([tab, wanted]) => {
  const folded = document.querySelectorAll(`${tab} details:not(.menu):not([open])`);
  for (const details of folded) details.open = true;
  const slots = [...document.querySelectorAll(`${tab} .figure-slot`)].map((slot) => slot.dataset.figure);
  return wanted.filter((name) => !slots.includes(name));
}"""

OF_ROUTERS = {  # diagnostics of a router, drawn where it trains
    "loss_free": {"diagnostics_by_step"},
    "some": {"diagnostics_by_step"},
}
NOT_HERE = {  # figures that need data which no run here holds -> why
    **{name: f"in the training with {router}" for router, names in OF_ROUTERS.items() for name in names},
    **dict.fromkeys(
        ("agreement_layers", "agreement_divergence"),
        "in a comparison of two traces; drawn in tests/comparison/test_agreement.py",
    ),
    **dict.fromkeys(
        {spec.name for spec in INTERVENTIONS},
        "in interventions; drawn in tests/intervention/test_figures_interventions.py",
    ),
    "base_losses": "in a training with --base; drawn in tests/lab/test_existing.py",
}


def registered() -> set[str]:
    """Return the names of all figures that a verb can draw."""
    verbs = [load_verb(name) for name, *_ in VERBS]
    return {spec.name for verb in verbs for spec in verb.figures}


@pytest.fixture(scope="module")
def groups(request, traced_run, tmp_path_factory) -> dict[str, list[Run]]:
    """Runs that share a report, by name."""
    folder = tmp_path_factory.mktemp("groups")
    shared = {kind: request.getfixturevalue(name) for kind, name in RUNS_OF.items()}
    checkpoints = [item["path"] for item in traced_run.info["checkpoints"]]
    sizes = {"slots": "2,3", "expert_bytes": 1000, "bandwidth": 1.0}
    return {
        **{kind: list(runs) if isinstance(runs, tuple) else [runs] for kind, runs in shared.items()},
        "steps": [scan(*checkpoints, out=folder / "steps", quiet=True)],
        "deploy": [deploy(traced_run, out=folder / "deploy", **sizes, quiet=True)],
    }


@pytest.fixture(scope="module")
def pages(groups, page_of, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {
        name: page_of(name) if name in RUNS_OF else report(*runs, out=folder / f"{name}.html")
        for name, runs in groups.items()
    }


@pytest.fixture(scope="module")
def drawn(groups) -> list[tuple[str, Figure]]:
    """Every figure of every report, with a name that says where it stands."""
    return [
        (f"{key}: {name}", figure) for key, runs in groups.items() for name, figure in report_figures(runs)
    ]


# --- all are there


def test_every_registered_figure_is_in_a_report(pages):
    drawn = {name for page in pages.values() for name in page_figures(page.read_text(encoding="utf-8"))}
    # a study's figures along an axis are named after it
    reached = {re.sub(r"(?<=^loss_by_|^load_by_)(experts|epsilon)$", "value", name) for name in drawn}
    assert reached <= registered()
    assert registered() - reached == set(NOT_HERE)


@pytest.mark.slow
@pytest.mark.parametrize("router", OF_ROUTERS)
def test_diagnostics_of_a_router_are_in_its_report(router, tmp_path):
    (tmp_path / "tiny.toml").write_text(TOML.format(steps=12))
    run = train(tmp_path / "tiny.toml", out=tmp_path / "run", router=router, device="cpu", quiet=True)
    page = report(run, out=tmp_path / "report.html")
    assert OF_ROUTERS[router] <= set(page_figures(page.read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["scan", "trace", "train", "compress", "merge", "compare", "study", "deploy", "together"]
)
def test_a_reader_finds_every_figure_of_every_tab(name, pages, opened):
    """Each tab, with its folded sections open, has a slot for every figure of the page's data."""
    html = pages[name].read_text(encoding="utf-8")
    layer = min(page_data(html)["layers"], default=0)
    for tab in [tab["name"] for tab in page_data(html)["tabs"]]:
        if figures := set(page_figures(html, tab)):
            page = opened(pages[name], f"#/{tab}?layer={layer}")
            wanted = [f"#tab-{tab}", sorted(figures)]
            with contextlib.suppress(TimeoutError):
                page.wait_for_function(f"wanted => ({MISSING})(wanted).length === 0", arg=wanted)
            assert page.evaluate(MISSING, wanted) == [], tab


# --- what a paper needs


def lines_of(figure: Figure) -> int:
    """Return how many lines are drawn at once, without references, bands and edges."""
    start = figure.slider.start * figure.slider.per_value if figure.slider else 0
    count = figure.slider.per_value if figure.slider else len(figure.data)
    lines = [trace for trace in figure.data[start : start + count] if is_line(trace)]
    return len(lines)


def is_line(trace: dict) -> bool:
    line = trace.get("line") or {}
    shown = str(trace.get("mode", "")).startswith("lines") and line.get("width", 2) > 0
    return shown and line.get("color") != GREY and trace["x"][0] is not None


def words(sentence: str) -> int:
    """Return the number of words; "2.1 × 10⁻⁵", "3 %" and "k = 2" are one each."""
    return len(re.sub(r" × 10\S+| %| = ", "", sentence).split())


@pytest.mark.slow
def test_every_figure_has_a_short_title_a_caption_and_axes_in_words(drawn):
    wrong = []
    for place, figure in drawn:
        captions = [figure.caption, *(figure.slider.captions if figure.slider else [])]
        axes = [value for key, value in figure.layout.items() if re.fullmatch(r"[xy]axis\d*", key)]
        # names along an axis speak for themselves
        labels = [
            (axis.get("title") or {}).get("text") or "names" * (axis.get("type") == "category")
            for axis in axes
        ]
        checks = {
            "title of more than 8 words": len(figure.title.split()) > 8,
            "caption": not all(re.fullmatch(r"[^a-z].*\.", caption) for caption in captions),
            "caption of more than 25 words": max(map(words, captions)) > 25,
            "axis": len(labels) < 2 or not all(labels) or any("_" in label for label in labels),
            "lines": lines_of(figure) > LINES_UP_TO,
            "undefined number": any("undefined" in text for text in (figure.title, *captions)),
        }
        wrong += [
            f"{place}: {what}: {figure.title} | {figure.caption} | {labels}"
            for what, bad in checks.items()
            if bad
        ]
    assert wrong == [], "\n".join(wrong)
