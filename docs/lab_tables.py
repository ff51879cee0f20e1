"""Tables of lab.md and existing.md, made from the config records: keys, router options, presets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields

from jinja2 import Environment, StrictUndefined

from moescope.decoder.config import ModelConfig
from moescope.decoder.model import parameter_counts
from moescope.decoder.routers import ROUTERS
from moescope.lab.config import PRESETS, BaseConfig, DataConfig, TrainConfig
from moescope.lab.study_config import KEYS
from moescope.verb import documented_parameters

PAGES = ("lab.md", "existing.md")
RECORDS = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig, "base": BaseConfig}


def render(template: str) -> str:
    """Return the page with its tables."""
    calls: dict[str, Callable[..., str]] = {
        "routers": routers_table,
        "options": options_table,
        "keys": keys_table,
        "study_keys": lambda: markdown(
            "key default meaning", ((key, *words) for key, (_, *words) in KEYS.items())
        ),
        "presets": presets_table,
    }
    page = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return page.from_string(template).render(**calls)


def markdown(head: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table whose first column is code; the words of `head` are its columns."""
    lines = [head.split(), ["---"] * len(head.split()), *([f"`{first}`", *rest] for first, *rest in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def keys_table(part: str) -> str:
    record = RECORDS[part]
    texts = documented_parameters(record)
    words = {"dict": "table", "tuple": "list", "bool | None": "bool"}  # TOML's
    kinds = {one.name: str(one.type).partition("[")[0] for one in fields(record)}
    rows = (
        (name, words.get(kind, kind), value_text(getattr(record(), name)), texts[name][1])
        for name, kind in kinds.items()
    )
    return markdown("key kind default meaning", rows)


def value_text(value: object) -> str:
    """Return a default as TOML has it; nothing for an unset or empty one."""
    return "" if value in (None, "", (), {}) else f"`{str(value).lower()}`"


def options_table() -> str:
    """Options of all routers; one that several routers share stands once."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, router in ROUTERS.items():
        texts = router_texts(router)
        for option, default in router.OPTIONS.items():
            rows.setdefault((option, value_text(default), texts[option]), []).append(f"`{name}`")
    return markdown(
        "option router default meaning",
        ((option, ", ".join(names), default, text) for (option, default, text), names in rows.items()),
    )


def router_texts(router: type) -> dict[str, str]:
    """Return option -> meaning, from the router's docstring or that of the router it derives from."""
    documented = (documented_parameters(one) for one in reversed(inspect.getmro(router)))
    return {name: text for part in documented for name, (_, text, _) in part.items()}


def routers_table() -> str:
    return markdown(
        "router choice causal_in_training",
        (
            (
                name,
                (inspect.getdoc(router) or "").splitlines()[0],
                "yes" if router.causal_in_training else "no",
            )
            for name, router in ROUTERS.items()
        ),
    )


def presets_table() -> str:
    rows = []
    for name, config in PRESETS.items():
        model, counts = config.model, parameter_counts(config.model)
        shape = (model.d_model, model.layers, model.experts, model.d_ff, model.top_k)
        parameters = (f"{count / 1e6:.2f} M" for count in (counts.total, counts.trainable))
        rows.append((name, model.block, *map(str, shape), f"`{model.router}`", *parameters))
    return markdown("preset block d_model layers experts d_ff top_k router parameters trained", rows)
