"""The page's content through the template into one file that opens offline."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import jinja2

from moescope.reporting.untrusted import visible


def seen(value: Any) -> Any:
    """What the template puts out, invisible characters spelled out.

    Paths and names are not to be trusted with turning the line around.
    """
    return visible(value) if type(value) is str else value  # Markup, our own, is another type


def render(content: dict[str, Any]) -> str:
    """The whole HTML document: style, script and plotly.js inside it, each once."""
    from plotly.offline import get_plotlyjs

    here = files("moescope.reporting")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (here / name).read_text(encoding="utf-8")),
        autoescape=True,
        finalize=seen,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("template.html.j2")
    return template.render(
        **content,
        style=(here / "style.css").read_text(encoding="utf-8"),
        script="\n".join((here / name).read_text(encoding="utf-8") for name in ("script.js", "routing.js")),
        plotly=get_plotlyjs(),
    )
