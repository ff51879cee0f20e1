"""Plots of results as SVG inside a page: no script, nothing fetched, colours of the reader's theme."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from paper_results import NOT_RUN, Estimate

WIDTH, ROW, HEIGHT = 325, 20, 150  # pixels
COLOURS = (
    *("#3B82C4", "#D9631E", "#2F9E63", "#A35BC7", "#C79A1B", "#D1477A"),
    *("#1FA3B3", "#8A7A6B", "#7C8F2E", "#6E6ED6"),
)
FAR = 2.5  # times the span of all other values
LETTER = 6.1  # pixels of an average letter
STYLE = "fill='currentColor' font-size='11' font-family='sans-serif'"
HALO = "paint-order='stroke' stroke-width='5' stroke='var(--md-default-bg-color, #fff)'"  # over lines
FAINT = "stroke='currentColor' stroke-opacity='0.25'"
Point = tuple[float, Estimate]


@dataclass(frozen=True)
class Dots:
    """One row per name: a mean with its interval, a grey tick at chance, a line at a value to compare."""

    title: str
    rows: list[tuple[str, Estimate | None]]
    line: float = math.nan
    scale: float = 1.0

    def svg(self) -> str:
        rows = [(name, scaled(one, self.scale)) for name, one in self.rows]
        known = [one for _, one in rows if one]
        if not known:
            return ""
        far = outlier(known)
        ends = [end for one in known if one is not far for end in (one.low, one.high, one.mean, one.chance)]
        low, high, ticks = axis([*ends, self.line])
        if far and low <= far.mean <= high:  # the line made room for it
            far = None
        left = min(LETTER * max(len(name) for name, _ in rows) + 8, 160)

        def x(value: float) -> float:
            return left + (WIDTH - left - 14) * (value - low) / (high - low)

        bottom = ROW * len(rows) + 24
        parts = [words(0, 13, self.title, "font-weight='bold'")]
        for tick, label in ticks:
            parts += [
                f"<line x1='{x(tick):.1f}' x2='{x(tick):.1f}' y1='20' y2='{bottom}' {FAINT}/>",
                words(x(tick), bottom + 13, label, "text-anchor='middle' opacity='0.8'"),
            ]
        if math.isfinite(self.line):
            ends_of = f"x1='{x(self.line):.1f}' x2='{x(self.line):.1f}' y1='20' y2='{bottom}'"
            parts.append(f"<line {ends_of} stroke='currentColor' stroke-dasharray='3 2'/>")
        for place, (name, one) in enumerate(rows):
            y = ROW * place + 34
            parts.append(words(0, y + 4, name))
            if one is None:
                parts.append(words(left + 4, y + 4, NOT_RUN, "opacity='0.6'"))
                continue
            if math.isfinite(one.chance):
                ends_of = f"x1='{x(one.chance):.1f}' x2='{x(one.chance):.1f}' y1='{y - 7}' y2='{y + 7}'"
                parts.append(f"<line {ends_of} stroke='#888' stroke-width='3'/>")
            if one is far:
                right = one.mean > high
                place, anchor = (WIDTH - 14, "end") if right else (left + 4, "start")
                value = f"{one.mean:.3g} →" if right else f"← {one.mean:.3g}"
                style = f"text-anchor='{anchor}' {HALO}"
                parts.append(words(place, y + 4, value.replace("-", "−"), style))
                continue
            parts.append(mark(x(one.mean), y, x(one.low), y, x(one.high), y, one, COLOURS[0]))
        return drawing(bottom + 18, self.title, parts)


@dataclass(frozen=True)
class Lines:
    """One line per name over places on the x axis, each point with its interval."""

    title: str
    series: dict[str, list[Point]]
    labels: dict[float, str]  # of the x axis
    marks: bool = True
    apart: bool = True  # points of one place are drawn side by side

    def svg(self) -> str:
        points = [point for of in self.series.values() for point in of]
        if not points:
            return ""
        low, high, ticks = axis([end for _, one in points for end in (one.low, one.high, one.mean)])
        first, last = min(self.labels), max(self.labels)
        left = LETTER * max(len(label) for _, label in ticks) + 8
        places = legend(list(self.series))
        top = places[-1][1] + 14
        bottom = top + HEIGHT

        def x(place: float) -> float:
            return left + 8 + (WIDTH - left - 24) * (place - first) / ((last - first) or 1.0)

        def y(value: float) -> float:
            return bottom - HEIGHT * (value - low) / (high - low)

        parts = [words(0, 13, self.title, "font-weight='bold'")]
        for tick, label in ticks:
            parts += [
                f"<line x1='{left:.1f}' x2='{WIDTH}' y1='{y(tick):.1f}' y2='{y(tick):.1f}' {FAINT}/>",
                words(left - 5, y(tick) + 4, label, "text-anchor='end' opacity='0.8'"),
            ]
        parts += [
            words(x(place), bottom + 15, label, "text-anchor='middle' opacity='0.8'")
            for place, label in self.labels.items()
        ]
        for line, (name, of) in enumerate(self.series.items()):
            colour, (start, level) = COLOURS[line % len(COLOURS)], places[line]
            shift = 4 * (line - (len(self.series) - 1) / 2) if self.marks and self.apart else 0.0
            found = [(x(place) + shift, one) for place, one in of]
            path = " ".join(f"{at:.1f},{y(one.mean):.1f}" for at, one in found)
            parts += [
                f"<circle cx='{start + 4:.1f}' cy='{level - 4}' r='4' fill='{colour}'/>",
                words(start + 12, level, name),
                f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.5'/>",
            ]
            for at, one in found if self.marks else []:
                parts.append(mark(at, y(one.mean), at, y(one.low), at, y(one.high), one, colour))
        return drawing(bottom + 20, self.title, parts)


@dataclass(frozen=True)
class Shares:
    """One bar per name, of parts that are shares of 1; a part is labelled where there is room."""

    title: str
    rows: list[tuple[str, list[tuple[str, float]]]]

    def svg(self) -> str:
        if not self.rows:
            return ""
        left = min(LETTER * max(len(name) for name, _ in self.rows) + 8, 160)
        names = sorted({part for _, parts in self.rows for part, _ in parts})
        colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
        parts = [words(0, 13, self.title, "font-weight='bold'")]
        for place, (name, of) in enumerate(self.rows):
            y, start = ROW * place + 24, left
            parts.append(words(0, y + 13, name))
            for part, share in of:
                wide = (WIDTH - left) * share
                box = f"x='{start:.1f}' y='{y}' width='{wide:.1f}' height='{ROW - 3}'"
                parts.append(f"<rect {box} fill='{colours[part]}'/>")
                if wide > LETTER * len(part):
                    middle = f"x='{start + wide / 2:.1f}' y='{y + 12}' text-anchor='middle'"
                    style = "fill='white' font-size='10' font-family='sans-serif'"
                    parts.append(f"<text {middle} {style}>{html.escape(part)}</text>")
                start += wide
        return drawing(ROW * len(self.rows) + 26, self.title, parts)


@dataclass(frozen=True)
class Areas:
    """Shares of 1 over steps, one on top of the other; one row of shares per step."""

    title: str
    steps: list[float]
    shares: list[list[float]]

    def svg(self) -> str:
        span = (self.steps[-1] - self.steps[0]) or 1.0
        x = [38 + (WIDTH - 56) * (step - self.steps[0]) / span for step in self.steps]
        floor = [0.0] * len(x)
        parts = [words(0, 13, self.title, "font-weight='bold'")]
        for place in range(len(self.shares[0])):
            top = [low + of[place] for low, of in zip(floor, self.shares, strict=True)]
            edge = [*zip(x, top, strict=True), *reversed(list(zip(x, floor, strict=True)))]
            points = " ".join(f"{at:.1f},{24 + HEIGHT * (1 - share):.1f}" for at, share in edge)
            colour = f"hsl(207 65% {30 + 50 * place / max(len(self.shares[0]) - 1, 1):.0f}%)"
            parts.append(f"<polygon points='{points}' fill='{colour}'/>")
            floor = top
        parts += [words(0, 28, "100 %"), words(0, 24 + HEIGHT, "0 %")]
        for at, step in ((x[0], self.steps[0]), (x[-1], self.steps[-1])):
            parts.append(words(at, HEIGHT + 38, f"{step:,.0f}", "text-anchor='middle' opacity='0.8'"))
        return drawing(HEIGHT + 42, self.title, parts)


@dataclass(frozen=True)
class Map:
    """Labelled points on two axes of one scale, 0 in the middle."""

    title: str
    points: list[tuple[float, float, str]]
    limit: float

    def svg(self) -> str:
        middle, scale = WIDTH / 2, (WIDTH / 2 - 16) / (self.limit or 1.0)
        parts = [words(0, 13, self.title, "font-weight='bold'")]
        low, high = 24, 24 + WIDTH
        parts += [
            f"<line x1='{middle}' x2='{middle}' y1='{low}' y2='{high}' {FAINT}/>",
            f"<line x1='0' x2='{WIDTH}' y1='{low + middle}' y2='{low + middle}' {FAINT}/>",
        ]
        for x, y, label in self.points:
            at = f"cx='{middle + scale * x:.1f}' cy='{low + middle - scale * y:.1f}'"
            parts.append(f"<circle {at} r='4' fill='{COLOURS[0]}'/>")
            parts.append(words(middle + scale * x + 6, low + middle - scale * y + 4, label))
        return drawing(high, self.title, parts)


def legend(names: list[str]) -> list[tuple[float, int]]:
    """Return the place of each name below the title, in as many lines as needed."""
    places, x, y = [], 0.0, 31
    for name in names:
        wide = 1.1 * LETTER * len(name) + 26
        if x and x + wide > WIDTH:
            x, y = 0.0, y + 16
        places.append((x, y))
        x += wide
    return places


Panel = Dots | Lines | Shares | Areas | Map


def figure(panels: Iterable[Panel], caption: str) -> str:
    """Return the panels side by side as far as there is room; of an empty figure, that it was not run."""
    drawn = [svg for panel in panels if (svg := panel.svg())]
    if not drawn:
        return f"*Figure: {NOT_RUN}.*"
    box = "display:flex;flex-wrap:wrap;gap:1rem;align-items:flex-start"
    return f"<div style='{box}'>{''.join(drawn)}</div>\n\n*{caption}*"


def scaled(one: Estimate | None, scale: float) -> Estimate | None:
    return one and replace(one, mean=scale * one.mean, half=scale * one.half, chance=scale * one.chance)


def outlier(known: list[Estimate]) -> Estimate | None:
    """Return the value so far from all others, four or more, that beside it they would look alike."""
    ordered = sorted(known, key=lambda one: one.mean)
    if len(ordered) < 5:
        return None
    for far, others in ((ordered[-1], ordered[:-1]), (ordered[0], ordered[1:])):
        span = others[-1].mean - others[0].mean
        if 0 < FAR * span < ordered[-1].mean - ordered[0].mean:
            return far
    return None


def axis(values: list[float]) -> tuple[float, float, list[tuple[float, str]]]:
    """Return the ends of an axis over the finite values, and its ticks with labels."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    if low == high:
        high = low + (abs(low) or 1.0)
    span = high - low
    low, high = low - 0.04 * span, high + 0.04 * span
    power = 10.0 ** math.floor(math.log10((high - low) / 3))
    step = next(power * times for times in (1, 2, 5, 10) if (high - low) / (power * times) <= 5)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    count = math.floor(high / step) - math.ceil(low / step) + 1
    places = [step * (math.ceil(low / step) + place) for place in range(count)]
    return low, high, [(place, f"{place + 0.0:.{decimals}f}".replace("-", "−")) for place in places]


def mark(
    x: float, y: float, x_low: float, y_low: float, x_high: float, y_high: float, one: Estimate, colour: str
) -> str:
    dot = f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.5' fill='{colour}'/>"
    if not math.isfinite(one.half):
        return dot
    ends = f"x1='{x_low:.1f}' y1='{y_low:.1f}' x2='{x_high:.1f}' y2='{y_high:.1f}'"
    return f"<line {ends} stroke='{colour}' stroke-width='2'/>{dot}"


def words(x: float, y: float, text: str, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {STYLE} {more}>{html.escape(text)}</text>"


def drawing(height: float, title: str, parts: list[str]) -> str:
    size = f"viewBox='0 0 {WIDTH} {height}' width='{WIDTH}'"
    label = f"role='img' aria-label='{html.escape(title)}'"
    return f"<svg {size} {label} style='max-width:100%;height:auto'>{''.join(parts)}</svg>"
