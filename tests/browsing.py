"""What a reader does in a report, in a real browser; the fixture `opened` opens one."""

from __future__ import annotations

from playwright.sync_api import Locator, Page, expect

# kind of report -> the fixture with its run or runs
RUNS_OF = {
    "scan": "planted_run",
    "trace": "traced_run",
    "compare": "compared_run",
    "compress": "compressed_run",
    "merge": "merged_run",
    "train": "trained_run",
    "study": "seeded_study",
    "together": "deep_runs",
}
NO_WIDER = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
# until what was changed is painted
PAINTED = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def scroll_through(page: Page) -> None:
    """Scroll to every figure that is not hidden, waiting for each to be drawn when it is in view."""
    page.evaluate(
        """async () => {
             for (const slot of document.querySelectorAll(".figure-slot")) {
               if (!slot.offsetParent) continue;
               slot.scrollIntoView({ block: "center" });
               for (let wait = 0; !slot.querySelector(".plot.drawn .main-svg"); wait++) {
                 if (wait === 1200) throw new Error(`figure ${slot.dataset.figure} is not drawn`);
                 await new Promise((resolve) => setTimeout(resolve, 50));
               }
             }
           }"""
    )


def bring(page: Page, name: str) -> Locator:
    """Scroll to one figure of the open tab and wait until it is drawn; all others stay undrawn.

    One that is folded under "More" is opened as a link to it does.
    """
    if not page.locator(f".figure-slot[data-figure={name}]:visible").count():
        page.evaluate("name => M.state.replace({ figure: name })", name)
    slot = page.locator(f".figure-slot[data-figure={name}]:visible").first
    slot.scroll_into_view_if_needed()
    expect(slot.locator(".plot.drawn .main-svg").first).to_be_visible()
    return slot


def click_cell(page: Page, row: int, column: int, rows: int, columns: int) -> None:
    """Click a cell of the map, given the numbers of its rows and columns."""
    canvas = page.locator("canvas")
    expect(canvas).to_be_visible()
    layout = page.evaluate("M.map.layout()")
    assert (layout["rows"], layout["columns"]) == (rows, columns)
    x = layout["left"] + (column + 0.5) * layout["cellWidth"]
    y = layout["top"] + (row + 0.5) * layout["cellHeight"]
    canvas.click(position={"x": x, "y": y})
