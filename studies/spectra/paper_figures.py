"""Figures of the page "Results": curves, expert maps, usage over steps, load before and after the quota."""

from __future__ import annotations

import pandas as pd
from paper_results import BASELINE, METHOD, VARIANTS

from moescope.lab.tables import TABLES
from moescope.plotting.marks import Bars, Lines, Scatter, define_figures
from moescope.tables import Column, Table, define_tables

SETTLED = 0.2  # of the steps; the fall of the loss before them hides all differences
FIRST, MIDDLE = "seed == seed.min()", "layer == (layer.max() + 1) // 2"
OF_EXPERTS = {
    "x": Column("float", "Place on the first principal axis of the outputs' cosines.", label="first axis"),
    "y": Column("float", "Place on the second axis.", label="second axis"),
    "variance_share": Column("float", "Share of the variance that the two axes show."),
    "before_quota": Column("float", "Share of the slots before the quota.", label="before", least=0),
    "after_quota": Column("float", "Share of the slots after it.", label="after", least=0),
    "arm": Column("text", "The arm.", names={METHOD: "SPECTRA", BASELINE: "Switch Top-2"}),
    "seed": Column("int", "Seed of the training."),
}
PROBED = define_tables(
    OF_EXPERTS,
    Table(
        "study_experts",
        "What the probe found per expert.",
        ("arm", "seed", "layer", "expert"),
        ("x", "y", "variance_share", "before_quota", "after_quota"),
    ),
)
LOSS_CURVES, ENTROPY_CURVES, EXPERT_MAPS, USAGE, QUOTA = define_figures(
    {**TABLES, **PROBED},
    Lines(
        "arms_validation_loss_by_step",
        "study_means",
        y="validation_loss",
        x="step",
        by="arm",
        where=f"step >= {SETTLED} * step.max()",
        wide=True,
        title="Validation loss by step",
    ),
    Lines(
        "arms_routing_entropy_by_step",
        "study_means",
        y="routing_entropy",
        x="step",
        by="arm",
        wide=True,
        title="Routing entropy by step",
    ),
    Scatter(
        "expert_maps",
        "study_experts",
        x="x",
        y="y",
        by="arm",
        label="expert",
        where=f"{FIRST} and arm in ['{BASELINE}', '{METHOD}']",
        pages="layer",
        wide=True,
        title="Expert maps, Switch Top-2 and SPECTRA",
        details="Principal axes of the mean cosines of two experts' outputs for the same tokens; first seed. "
        "Distances are those of unit outputs, as far as two axes show them.",
    ),
    Lines(
        "usage_areas",
        "study_usage",
        y="share",
        x="step",
        by="expert",
        stacked=True,
        where=f"{FIRST} and {MIDDLE}",
        pages="arm",
        wide=True,
        title="Expert usage over training",
        details="In training, since the previous logged step; middle layer, first seed.",
    ),
    Bars(
        "quota_loads",
        "study_experts",
        y=("before_quota", "after_quota"),
        x="expert",
        where=f"{FIRST} and arm == '{METHOD}'",
        pages="layer",
        wide=True,
        title="Load before and after the quota",
        details="One training-mode pass over validation rows; first seed.",
    ),
)


def middle_layer(rows: pd.DataFrame) -> int:
    layers = sorted(rows["layer"].unique())
    return int(layers[len(layers) // 2])


def first_seed(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["seed"] == rows["seed"].min()]


def variant_arms(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """Return title and arm of the variants that these rows have, else of all arms."""
    there = dict.fromkeys(rows["arm"])
    named = [(title, arm) for title, arm, _ in VARIANTS if arm in there]
    return named if len(named) > 1 else [(arm, arm) for arm in there]
