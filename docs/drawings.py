"""The drawings of the concept pages: `python docs/drawings.py` writes them as SVG into docs/pictures/.

They show computed examples, not measurements: numbers come from the formulas beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent / "pictures"
INK, FAINT, BLUE, ORANGE, GREEN = "#334155", "#cbd5e1", "#4263eb", "#e8590c", "#2b8a3e"


def text(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle", size: int = 13) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}">{words}</text>'


def line(
    x1: float, y1: float, x2: float, y2: float, colour: str = INK, width: float = 1.5, extra: str = ""
) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}" {extra}/>'


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = INK, width: float = 2) -> str:
    back = np.array([x1 - x2, y1 - y2]) / np.hypot(x1 - x2, y1 - y2)
    side = np.array([-back[1], back[0]])
    tip = [np.array([x2, y2]), *(np.array([x2, y2]) + 9 * back + sign * 4 * side for sign in (1, -1))]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in tip)
    return line(x1, y1, x2, y2, colour, width) + f'<polygon points="{points}" fill="{colour}"/>'


def box(
    x: float, y: float, width: float, height: float, colour: str, words: str = "", opacity: float = 1
) -> str:
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3"'
    drawn = f'<rect {shape} fill="{colour}" fill-opacity="{opacity:.2f}"/>'
    return drawn + (text(x + width / 2, y + height / 2 + 4, words, "white") if words else "")


def path(points: Sequence[tuple[float, float]], colour: str, extra: str = "") -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2" {extra}/>'


def alignment() -> str:
    """A router row and an expert's directions; align over k; the matrix M(k)."""
    parts = [
        arrow(40, 190, 190, 190, BLUE),
        text(196, 194, "v₁", BLUE, "start"),
        arrow(40, 190, 40, 60, BLUE),
    ]
    parts += [
        text(40, 50, "v₂", BLUE),
        arrow(40, 190, 150, 90, ORANGE),
        text(158, 86, "router row r", ORANGE, "start"),
    ]
    parts += [line(150, 90, 150, 190, FAINT, 1.5, 'stroke-dasharray="4 3"'), text(95, 210, "v₁·r")]
    parts.append(text(110, 240, "an expert's directions"))
    rng = np.random.default_rng(0)
    k = np.arange(33)
    own = np.concatenate([[0], np.cumsum(np.sort(rng.dirichlet(np.full(32, 0.35)))[::-1])])
    for values, colour in ((own, ORANGE), (k / 32, INK)):
        parts.append(path([(300 + 6 * a, 190 - 130 * b) for a, b in zip(k, values, strict=True)], colour))
    parts += [
        line(300, 190, 495, 190),
        line(300, 190, 300, 55),
        text(495, 207, "k = d", INK, "end"),
        text(290, 64, "1"),
    ]
    parts += [text(345, 70, "align(k)", ORANGE, "start"), text(420, 165, "chance k/d", INK, "start")]
    parts.append(text(398, 240, "share of r inside v₁ ... vₖ"))
    matrix = 0.15 + 0.2 * rng.random((5, 5)) + 0.5 * np.eye(5)
    for i in range(5):
        for j in range(5):
            parts.append(
                box(590 + 26 * j, 60 + 26 * i, 24, 24, ORANGE if i == j else BLUE, opacity=matrix[i, j])
            )
    parts += [
        text(655, 50, "experts j"),
        text(580, 130, "rows i", INK, "end"),
        text(655, 240, "M(k): does the diagonal win?"),
    ]
    return "".join(parts)


def nulls() -> str:
    """All pairings of eight rows and experts: where the stored one stands."""
    rng = np.random.default_rng(4)
    matrix = 0.3 + 0.05 * rng.standard_normal((8, 8)) + 0.06 * np.eye(8)
    means = np.array([matrix[range(8), order].mean() for order in permutations(range(8))])
    counts, edges = np.histogram(means, 40)
    left, right = edges[0], max(edges[-1], matrix.diagonal().mean()) + 0.004

    def x(value: float) -> float:
        return 40 + 600 * (value - left) / (right - left)

    parts = []
    observed = matrix.diagonal().mean()
    for count, start, end in zip(counts, edges[:-1], edges[1:], strict=True):
        height = 150 * count / counts.max()
        parts.append(
            box(x(start), 190 - height, x(end) - x(start) - 1, height, ORANGE if start >= observed else BLUE)
        )
    share = float((means >= observed).mean())
    parts += [line(x(observed), 30, x(observed), 190, ORANGE, 2), line(40, 190, 680, 190)]
    parts += [text(x(observed), 22, "as stored", ORANGE), text(x(means.mean()), 22, "40,320 pairings", BLUE)]
    parts.append(
        text(360, 222, f"mean alignment; p = share of pairings that reach the stored one = {share:.4f}")
    )
    return "".join(parts)


def ambiguity() -> str:
    """Three terms make the score, here of a clear and of an ambiguous layer."""
    layers = {"clear layer": (0.0, 0.35, 0.2), "ambiguous layer": (0.75, 0.95, 0.85)}
    names = ("0.4 (1 − accuracy)", "0.3 (1 − margin/align)", "0.3 (1 − z/√(n−1))")
    parts = []
    for row, (name, terms) in enumerate(layers.items()):
        at, y = 170.0, 50 + 70 * row
        parts += [
            text(160, y + 22, name, INK, "end"),
            line(170, y - 6, 170, y + 40),
            line(670, y - 6, 670, y + 40, FAINT),
        ]
        for term, weight, colour in zip(terms, (0.4, 0.3, 0.3), (BLUE, ORANGE, GREEN), strict=True):
            parts.append(box(at, y, 500 * weight * term, 34, colour))
            at += 500 * weight * term
        parts.append(text(at + 8, y + 22, f"{(at - 170) / 500:.2f}", INK, "start"))
    for column, (name, colour) in enumerate(zip(names, (BLUE, ORANGE, GREEN), strict=True)):
        parts += [
            box(60 + 220 * column, 195, 12, 12, colour),
            text(78 + 220 * column, 206, name, INK, "start"),
        ]
    parts += [text(170, 30, "0"), text(670, 30, "1")]
    return "".join(parts)


def routing() -> str:
    """Tokens choose two of four experts; loads follow."""
    chosen = [(0, 1), (0, 2), (0, 1), (0, 3), (1, 0)]
    parts = [text(90, 24, "tokens"), text(300, 24, "experts"), text(560, 24, "load: share of choices")]
    loads = np.bincount(np.ravel(chosen), minlength=4)
    for token, experts in enumerate(chosen):
        y = 50 + 36 * token
        parts.append(box(60, y - 12, 60, 24, INK, f"t{token + 1}"))
        for slot, expert in enumerate(experts):
            width, colour = (2.5, BLUE) if slot == 0 else (1.2, ORANGE)
            parts.append(line(122, y, 258, 58 + 44 * expert, colour, width))
    for expert, load in enumerate(loads):
        y = 58 + 44 * expert
        parts += [box(260, y - 15, 80, 30, BLUE, f"expert {expert}"), box(440, y - 12, 48 * load, 24, GREEN)]
        parts.append(text(446 + 48 * load, y + 4, f"{load}/10", INK, "start"))
    mean = loads.mean()
    parts += [line(440 + 48 * mean, 38, 440 + 48 * mean, 210, ORANGE, 1.5, 'stroke-dasharray="4 3"')]
    spread = loads.std() / mean
    parts.append(
        text(360, 240, f"first choices thick; cv = {spread:.2f}, max over mean = {loads.max() / mean:.1f}")
    )
    return "".join(parts)


def merging() -> str:
    """Neurons of two equal experts in different order: matched first, averaging keeps them."""
    colours = (BLUE, ORANGE, GREEN)
    order = (2, 0, 1)
    parts = []
    columns = {"expert a": (0, 1, 2), "expert b": order, "b, neurons matched": (0, 1, 2), "merged": (0, 1, 2)}
    for column, (name, neurons) in enumerate(columns.items()):
        x = 50 + 180 * column
        parts.append(text(x + 50, 30, name))
        parts += [box(x, 50 + 46 * at, 100, 34, colours[neuron]) for at, neuron in enumerate(neurons)]
    for at, neuron in enumerate(order):
        parts.append(line(330, 67 + 46 * at, 410, 67 + 46 * neuron, INK, 1.2))
    parts += [text(190, 118, "+", size=22), arrow(515, 113, 585, 113)]
    parts.append(text(390, 222, "averaged in stored order, unlike neurons would blur together"))
    return "".join(parts)


DRAWINGS: dict[str, tuple[Callable[[], str], int]] = {
    "alignment.svg": (alignment, 260),
    "nulls.svg": (nulls, 240),
    "ambiguity.svg": (ambiguity, 225),
    "routing.svg": (routing, 260),
    "merging.svg": (merging, 240),
}


def svg(draw: Callable[[], str], height: int) -> str:
    frame = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 {height}" font-family="sans-serif"'
    return f'<svg {frame}><rect width="780" height="{height}" fill="white"/>{draw()}</svg>\n'


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name, (draw, height) in DRAWINGS.items():
        (HERE / name).write_text(svg(draw, height), encoding="utf-8")
