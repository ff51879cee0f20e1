"""Reports: seconds of the processor to build one, its size, first paint and tab switches in Chromium.

    PYTHONPATH=src python bench/report.py                    the demo, a 26 x 64 trace, a 48 x 128 scan
    PYTHONPATH=src python bench/report.py --runs FOLDER      keeps the runs there for the next time
    PYTHONPATH=src python bench/report.py --only trace

The trace is of 33,000 random tokens in two domains, the scan of a checkpoint with random experts of 64 x 64.
A report is built by the command line in a process of its own; seconds are the processor's, imports included.
A tab switch ends when the tab is shown and a frame was drawn; beside it stands the time until the first
figure of the tab is drawn. The slowest tab is printed. Needs playwright and a Chromium.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

import moescope

TOKENS, DOCUMENTS = 33_000, 66
RUNS = ("demo", "trace", "scan")
CHROMIUM = "/usr/bin/chromium"
SWITCH = """async (name) => {
  const panel = () => document.querySelector(`#tab-${name}`);
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const start = performance.now();
  location.hash = `#/${name}`;
  await frame();
  while (!panel()?.offsetParent) await frame();
  const shown = performance.now() - start;
  const slots = () => panel().querySelectorAll(".figure-slot").length;
  while (slots() && !panel().querySelector(".plot.drawn") && performance.now() - start < 20000) await frame();
  return [shown, slots() ? performance.now() - start : 0];
}"""


def make_run(name: str, folder: Path) -> Path:
    """Return the run folder, made where it does not exist yet."""
    run = folder / name
    if (run / "run.json").exists():
        return run
    if name == "demo":
        command(["demo", "--out", str(run), "--no-report"])
    elif name == "trace":
        write_tokens(folder / "tokens.parquet")
        moescope.trace(recorded=folder / "tokens.parquet", experts=64, out=run, quiet=True)
    else:
        from growth import write_checkpoint

        write_checkpoint(folder / "model.safetensors", layers=48, experts=128, hidden=64, width=64)
        moescope.scan(folder / "model.safetensors", out=run, quiet=True)
    return run


def write_tokens(file: Path, layers: int = 26, experts: int = 64, k: int = 6) -> None:
    """Random choices; the two domains prefer different experts."""
    generator = np.random.default_rng(0)
    document = np.repeat(np.arange(DOCUMENTS), TOKENS // DOCUMENTS)
    taste = 2 * generator.standard_normal((2, layers, experts))
    parts = []
    for layer in range(layers):
        scores = taste[document % 2, layer] + generator.gumbel(size=(TOKENS, experts))
        chosen = np.argsort(-scores, axis=1)[:, :k]
        gates = np.exp(np.take_along_axis(scores, chosen, axis=1))
        gates /= gates.sum(axis=1, keepdims=True)
        columns = {
            "domain": np.where(document % 2, "code", "prose"),
            "document": document,
            "position": np.arange(TOKENS) % (TOKENS // DOCUMENTS),
            "layer": layer,
            "experts": list(chosen),
            "gates": list(gates),
        }
        parts.append(pd.DataFrame(columns))
    pd.concat(parts).to_parquet(file, index=False)


def command(words: list[str]) -> float:
    """Run a command of moescope and return its processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "moescope", *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def megabytes(run: Path) -> float:
    return sum(file.stat().st_size for file in run.rglob("*.parquet")) / 1e6


def in_browser(page_file: Path) -> tuple[float, dict[str, tuple[float, float]]]:
    """(first paint, tab -> (shown, first figure drawn)) in milliseconds; every tab in a page of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = CHROMIUM if os.path.exists(CHROMIUM) else None
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        paints, switches = [], {}
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(page_file.as_uri())
        tabs = page.evaluate(
            "JSON.parse(document.getElementById('data').textContent)"
            ".tabs.filter((tab) => tab.sections.length && tab.name !== 'overview').map((tab) => tab.name)"
        )
        for tab in tabs:
            page.goto("about:blank")
            page.goto(page_file.as_uri())
            page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
            paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            paints.append(page.evaluate(paint))
            page.wait_for_timeout(2000)  # a reader looks at the overview first
            switches[tab] = tuple(page.evaluate(SWITCH, tab))
        browser.close()
    return float(np.median(paints)), switches


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--runs", type=Path, help="folder of the runs; by default a temporary one")
    arguments.add_argument("--only", choices=RUNS)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.runs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print(
            f"{'report':8}{'tables, MB':>12}{'build, s':>10}{'allowed':>9}{'MB':>7}{'paint, ms':>11}"
            f"{'switch, ms':>12}{'figure, ms':>12}"
        )
        for name in [given.only] if given.only else RUNS:
            run, page = make_run(name, folder), Path(temporary) / f"{name}.html"
            seconds = command(["report", str(run), "--out", str(page)])
            tables = megabytes(run)
            paint, switches = in_browser(page)
            shown, drawn = (max(times[at] for times in switches.values()) for at in (0, 1))
            print(
                f"{name:8}{tables:12.1f}{seconds:10.1f}{5 + 2 * tables / 10:9.1f}"
                f"{page.stat().st_size / 1e6:7.1f}{paint:11.0f}{shown:12.0f}{drawn:12.0f}"
            )


if __name__ == "__main__":
    main()
