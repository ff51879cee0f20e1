"""The page's content through the template into one file that opens offline."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import jinja2

from moescope.reporting.pack import pack_text, packed
from moescope.reporting.untrusted import visible

SCRIPTS = (
    "core",
    "state",
    "versus",
    "figures",
    "sections",
    "strips",
    "map",
    "experts",
    "text",
    "continuations",
    "methods",
    "overview",
    "search",
    "frame",
)


def render(content: dict[str, Any]) -> str:
    """Return the whole HTML document: style, scripts and plotly.js inside it, each once."""
    here = files("moescope.reporting") / "assets"
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (here / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        title=visible(content["title"]),
        data=content["data"],
        payloads={name: packed(value) for name, value in content["payloads"].items()},
        style=(here / "style.css").read_text(encoding="utf-8"),
        scripts=[(here / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS],
        plotly=packed_plotly(),
    )


@cache
def packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return pack_text(get_plotlyjs())
