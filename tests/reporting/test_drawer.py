"""The drawer of an expert in a report of scan, trace, comparison and compression: numbers of the tables."""

from __future__ import annotations

import numpy as np
import pytest
from playwright.sync_api import expect

from moescope.comparison.verb import compare
from moescope.compression.verb import compress
from moescope.reporting.verb import report
from moescope.routing.trace import trace
from moescope.weights.verb import scan
from routing.tiny_text import save_model, texts, write_jsonl

# measure -> what the drawer shows of it: value, interval, everything
NUMBERS = """() => Object.fromEntries([...document.querySelectorAll('#drawer tr[data-measure]')].map((row) =>
  [row.dataset.measure, row.querySelector('td').textContent]))"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model, tuned = save_model(folder / "model"), save_model(folder / "tuned", nudge=0.05)
    text = write_jsonl(folder / "text.jsonl", texts(60))
    domains = [f"a={text}", f"b={write_jsonl(folder / 'other.jsonl', texts(60, seed=1, first=25, words=25))}"]
    return {
        "scan": scan(model, out=folder / "scan", router="raw", quiet=True),
        "trace": trace(model, domain=domains, out=folder / "trace", quiet=True),
        "compare": compare(model, tuned, out=folder / "compare", skip="scan", quiet=True),
        "compress": compress(
            model, method="reap", keep=0.5, text=text, out=folder / "compress", controls=1, quiet=True
        ),
    }


@pytest.fixture(scope="module")
def html(runs, tmp_path_factory):
    return report(*runs.values(), out=tmp_path_factory.mktemp("drawer") / "all.html")


@pytest.fixture
def page(opened, html):
    return opened(html)


def cell(frame, **keys):
    for name, value in keys.items():
        frame = frame[frame[name] == value]
    return frame


def expected(runs, layer: int, expert: int) -> dict[str, list[float]]:
    """The first numbers that each row of the drawer must show, straight from the tables."""
    place = {"layer": layer, "expert": expert}
    tests, align = runs["scan"].table("alignment_tests"), runs["scan"].table("alignment")
    best = cell(tests, layer=layer)["best_k"].iloc[0]
    aligned = cell(align, **place, k=best).iloc[0]
    pairs = cell(runs["scan"].table("similarity"), layer=layer, k=1)
    own = pairs[(pairs["expert_a"] == expert) | (pairs["expert_b"] == expert)]
    rank = cell(runs["scan"].table("spectra"), **place)["effective_rank"].iloc[0]
    load = cell(runs["trace"].table("load"), layer=layer).groupby("expert")["tokens"].sum()
    moved = cell(runs["compare"].table("geometry"), layer=layer, expert_a=expert).set_index("matrix")
    saliency = cell(runs["compress"].table("saliency"), layer=layer).set_index("expert")
    row = saliency.loc[expert]
    higher = int((saliency["reap"] > row["reap"]).sum())
    return {
        "alignment": [aligned["z_vs_shuffle"]],
        "margin": [aligned["margin"]],
        "redundancy": [own["cosine"].abs().max()],
        "effective_rank": [rank],
        "load": [load[expert] / load.mean()],
        "change": [moved.drop("router")["relative_l2"].mean()],
        "router_change": [moved.loc["router", "relative_l2"]],
        "reap": [row["reap"] / saliency["reap"].mean()],
        "rank": [higher + 1, row["rank_low"], row["rank_high"]],
    }


def shown_numbers(text: str) -> list[float]:
    """The value and the interval at the start of a row of the drawer."""
    powers = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹−", "-0123456789-")
    head, _, rest = text.partition(" [") if " [" in text else (text.split(" ")[0], "", "")
    if " × 10" in text:
        head = text.split(" × 10")[0] + "e" + text.split(" × 10")[1].split(" ")[0]
    parts = [head, *(rest.split("]")[0].split(", ") if rest else [])]
    return [float(part.translate(powers).replace(",", "")) for part in parts]


def test_the_drawer_shows_every_run_of_the_model_with_the_tables_numbers(page, runs):
    experts = runs["trace"].table("load")[["layer", "expert"]].drop_duplicates()
    for layer, expert in experts.sample(4, random_state=0).itertuples(index=False):
        page.evaluate("([l, e]) => M.state.set({ layer: l, expert: e })", [int(layer), int(expert)])
        expect(page.locator("#drawer h2")).to_have_text(f"L{layer} · E{expert}")
        found = page.evaluate(NUMBERS)
        for measure, values in expected(runs, layer, expert).items():
            assert shown_numbers(found[measure]) == pytest.approx(values, rel=6e-3, abs=1e-6), measure
        domains = cell(runs["trace"].table("domains"), layer=layer, expert=expert).set_index("domain")
        for domain, lift in domains["affinity"].items():
            shown = page.locator(f"#drawer .bar-row[data-name={domain}] .amount").text_content()
            assert shown_numbers(shown) == pytest.approx([lift], rel=6e-3), domain
        parts = page.locator("#drawer .expert-part").evaluate_all(
            "all => all.map((part) => part.dataset.verb)"
        )
        assert set(parts) == {"scan", "trace", "compare", "compress"}
        titles = page.locator("#drawer .block h4").all_text_contents()
        for wanted in ("Alignment over k", "Nearest experts", "Singular values", "Domain affinity"):
            assert wanted in titles
        dropped = not cell(runs["compress"].table("clusters"), layer=layer, expert=expert)["kept"].iloc[0]
        assert ("dropped" in found["reap"]) == dropped


def test_a_long_amount_widens_its_column_and_the_bars_stay_aligned(page):
    page.evaluate("M.state.set({ layer: 1, expert: 2 })")
    expect(page.locator("#drawer .bar-row .amount").first).to_be_visible()
    boxes = page.locator("#drawer .bar-rows").first.evaluate(
        """rows => {
          const amounts = [...rows.querySelectorAll(".amount")];
          amounts[0].textContent = "−1.23 × 10⁻⁵".replaceAll(" ", "\u00a0");
          const text = document.createRange();
          text.selectNodeContents(amounts[0]);
          const bars = [...rows.querySelectorAll(".bar")].map((bar) => bar.getBoundingClientRect());
          const end = rows.getBoundingClientRect().right;
          return { past: text.getBoundingClientRect().right - end, widths: bars.map((bar) => bar.width) };
        }"""
    )
    assert boxes["past"] <= 0.5
    assert len(boxes["widths"]) > 1
    assert max(boxes["widths"]) - min(boxes["widths"]) < 0.5


def test_words_between_backticks_are_code(page):
    parts = page.evaluate("M.prose('run `moescope scan` first').map((part) => part.outerHTML ?? part)")
    assert parts == ["run ", "<code>moescope scan</code>", " first"]
    assert page.evaluate("M.prose('a ` alone')") == ["a ` alone"]


def test_alignment_over_k_and_its_null_band_are_the_tables_rows(page, runs):
    rows = cell(runs["scan"].table("alignment"), layer=1, expert=2).sort_values("k")
    page.evaluate("M.state.set({ layer: 1, expert: 2 })")
    expect(page.locator("#drawer h2")).to_have_text("L1 · E2")
    entry = page.evaluate(
        "M.data.experts.find((entry) => entry.verb === 'scan' && entry.layer === 1).payload"
    )
    blocks = page.evaluate("async (name) => (await M.payload(name))['2']", entry)
    curve = next(block for block in blocks if block["title"] == "Alignment over k")
    assert curve["x"] == rows["k"].tolist()
    np.testing.assert_allclose(curve["y"], rows["align"], rtol=1e-5)
    band = [(rows["shuffle_mean"] + side * 2 * rows["shuffle_std"]).clip(0, 1) for side in (-1, 1)]
    np.testing.assert_allclose(curve["low"], band[0], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(curve["high"], band[1], rtol=1e-4)


def test_the_load_over_training_is_the_load_tables(trained_run):
    load = trained_run.table("load")
    cards = {part.layer: part.cards for part in trained_run.verb.experts(trained_run)}
    rows = load[(load["layer"] == 1) & (load["step"] == load["step"].max())]
    counts = rows.groupby("expert")["tokens"].sum()
    last = [cards[1][expert][0]["y"][-1] for expert in counts.index]
    np.testing.assert_allclose(last, counts / counts.mean(), rtol=1e-5)
