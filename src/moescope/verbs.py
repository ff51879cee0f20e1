"""The verbs: name, one-line help, and where the record is; imported when the verb is used."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from moescope.errors import unknown_name

if TYPE_CHECKING:
    from moescope.verb import Verb

VERBS: tuple[tuple[str, str, str], ...] = (
    ("inspect", "Show what a checkpoint is, from its headers alone.", "moescope.families.inspect:VERB"),
    ("scan", "Measure router-expert alignment and redundancy in the weights.", "moescope.weights.verb:VERB"),
    ("trace", "Record which experts each token of a text is routed to.", "moescope.routing.trace:VERB"),
    ("compare", "Compare two checkpoints, or two traces of one text.", "moescope.comparison.verb:VERB"),
    ("compress", "Prune or merge experts, and measure the damage.", "moescope.compression.verb:VERB"),
    (
        "intervene",
        "Change routers or experts in memory, and measure what happens.",
        "moescope.intervention.verb:VERB",
    ),
    (
        "deploy",
        "Measure what serving costs: caches, prefetching, placement, coverage.",
        "moescope.deployment.verb:VERB",
    ),
    ("train", "Train a small MoE language model with any router.", "moescope.lab.train:VERB"),
    ("study", "Train many small MoEs with paired seeds and compare them.", "moescope.lab.study:VERB"),
    ("report", "Build one interactive HTML report from one or several runs.", "moescope.reporting.verb:VERB"),
    ("demo", "Scan, trace and report on the model that comes with moescope.", "moescope.demo.verb:VERB"),
)
# Verbs without a command: their runs are made in Python.
OTHERS = {"monitor": "moescope.routing.report_monitor:MONITOR"}


@cache
def load_verb(name: str) -> Verb:
    """Return the record of a verb, importing its module."""
    places = {known: place for known, _, place in VERBS} | OTHERS
    if name not in places:
        raise unknown_name("verb", name, list(places))
    module, _, attribute = places[name].partition(":")
    return getattr(import_module(module), attribute)
