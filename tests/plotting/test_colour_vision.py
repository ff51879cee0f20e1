"""Colours of categories stay apart in every kind of colour vision."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from moescope.plotting import style
from moescope.plotting.marks import PATTERNS, SHAPES

# linear RGB as seen without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1)
VISION = {
    "usual": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
XYZ = [
    [0.4124564, 0.3575761, 0.1804375],
    [0.2126729, 0.7151522, 0.0721750],
    [0.0193339, 0.1191920, 0.9503041],
]
WHITE = (0.95047, 1.0, 1.08883)


def lab(color: str, vision: str = "usual") -> np.ndarray:
    """CIELAB of a colour as it is seen."""
    shares = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    xyz = np.array(XYZ) @ np.clip(np.array(VISION[vision]) @ linear, 0, 1) / WHITE
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def delta_e(one: np.ndarray, other: np.ndarray) -> float:
    """CIEDE2000 (Sharma, Wu and Dalal 2005)."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    c = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    g = 0.5 * (1 - np.sqrt(c**7 / (c**7 + 25.0**7)))
    a1, a2 = a1 * (1 + g), a2 * (1 + g)
    c1, c2 = np.hypot(a1, b1), np.hypot(a2, b2)
    h1, h2 = (np.degrees(np.arctan2(b, a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    hue = h1 + turn / 2 if c1 * c2 else h1 + h2
    light, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    cos = [np.cos(np.radians(k * hue + shift)) for k, shift in ((1, -30), (2, 0), (3, 6), (4, -63))]
    t = 1 + np.dot([-0.17, 0.24, 0.32, -0.20], cos)
    parts = np.array([l2 - l1, c2 - c1, 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2))])
    parts /= [
        1 + 0.015 * (light - 50) ** 2 / np.sqrt(20 + (light - 50) ** 2),
        1 + 0.045 * chroma,
        1 + 0.015 * chroma * t,
    ]
    swing = 60 * np.exp(-((((hue % 360) - 275) / 25) ** 2))
    r = -2 * np.sqrt(chroma**7 / (chroma**7 + 25.0**7)) * np.sin(np.radians(swing))
    return float(np.sqrt((parts**2).sum() + r * parts[1] * parts[2]))


@pytest.mark.parametrize(
    ("one", "other", "published"),
    [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, -1.3802, -84.2814), (50, 0, -82.7485), 1.0),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((22.7233, 20.0904, -46.6940), (23.0331, 14.9730, -42.5619), 2.0373),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_delta_e_is_that_of_published_pairs(one, other, published):
    assert delta_e(np.array(one, float), np.array(other, float)) == pytest.approx(published, abs=1e-4)


def palettes() -> dict[str, tuple[str, ...]]:
    """Tuples of colours in style.py that tell categories apart, not sequences and ends of scales."""
    known = {
        name: value
        for name, value in vars(style).items()
        if isinstance(value, tuple) and all(isinstance(item, str) and item.startswith("#") for item in value)
    }
    return {name: colors for name, colors in known.items() if name not in ("SEQUENTIAL", "WARM", "COOL")}


@pytest.mark.parametrize("vision", VISION)
def test_colours_of_categories_are_apart_in_every_kind_of_vision(vision):
    assert list(palettes()) == ["CATEGORICAL"]
    for colors in palettes().values():
        seen = [lab(color, vision) for color in colors]
        assert min(delta_e(one, other) for one, other in combinations(seen, 2)) >= 8


def test_chance_is_no_colour_of_a_category():
    assert style.GREY not in style.CATEGORICAL


def test_from_the_fifth_category_on_more_than_the_colour_varies():
    looks = [style.category_style(index) for index in range(style.LINES_UP_TO)]
    assert len({(look["color"], look["dash"]) for look in looks}) == style.LINES_UP_TO
    assert [look["dash"] for look in looks[:5]] == ["solid"] * 4 + ["dash"]
    assert len(set(PATTERNS.values())) == len(PATTERNS) == len(style.DASHES) <= len(SHAPES)
