"""A study's small tables for the page, an arm a row with random routing beside it.

And where its arms lie on the study's axes.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from moescope.plotting.style import Tables
from moescope.reporting.pack import plain
from moescope.reporting.untrusted import plot_words
from moescope.run import Run

Heads = list[tuple[str, str, str]]  # glossary entry or name, what stands in the head, kind


def arms_frame(run: Run) -> pd.DataFrame:
    """arm, router, experts, top_k, tokens_a_step, as run.json has them.

    Without rows for arms that choose nothing.
    """
    base = run.info.get("base") or {}
    rows = []
    for arm in run.info.get("arms", []):
        model = {**base.get("model", {}), **arm["overrides"].get("model", {})}
        train = {**base.get("train", {}), **arm["overrides"].get("train", {})}
        router, facts = model.get("router"), arm.get("router_facts", {})
        if router is None or not facts.get("routes", True):
            continue
        rows.append(
            {
                "arm": plot_words(arm["name"]),
                "router": router,
                "experts": model["experts"],
                "top_k": facts.get("fixed_top_k") or model["top_k"],
                "tokens_a_step": train["batch_size"] * train["sequence_length"],
            }
        )
    return pd.DataFrame(rows, columns=["arm", "router", "experts", "top_k", "tokens_a_step"])


def axes_frames(run: Run, tables: Tables, question: str) -> list[pd.DataFrame]:
    """One frame (arm, axis, value, line) for each axis with numbers along which the question's arms lie;
    `line` is where the other axes put an arm.

    Sizes that have names instead of numbers lie at the parameters a token meets.
    """
    comparisons = tables["study_comparisons"]
    own = [
        arm
        for arm in run.info.get("arms", [])
        if plot_words(arm["name"]) in set(comparisons["arm"]) and arm.get("axes")
    ]
    active = tables["study_runs"].groupby("arm")["parameters_active"].first()
    found = []
    for axis in dict.fromkeys(name for arm in own for name in arm["axes"]):
        on_it = [arm for arm in own if axis in arm["axes"]]
        named = not all(is_number(arm["axes"][axis]) for arm in on_it)
        if named and (question != "scaling" or axis == "router"):
            continue
        frame = pd.DataFrame(
            [
                {
                    "arm": plot_words(arm["name"]),
                    "axis": f"active parameters ({plot_words(axis)})" if named else plot_words(axis),
                    "value": float(active[plot_words(arm["name"])] if named else arm["axes"][axis]),
                    "line": ", ".join(
                        axis_words(name, value) for name, value in arm["axes"].items() if name != axis
                    ),
                }
                for arm in on_it
            ]
        )
        if len(frame) and frame["value"].nunique() > 1:
            found.append(frame.dropna())
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def axis_words(name: str, value: Any) -> str:
    return plot_words(str(value) if name == "router" else f"{name} {value}")


# --- tables of arms


def balance_table(tables: Tables) -> dict[str, Any]:
    """How even the load was at the end of training, with what random routing gives over as many tokens."""
    heads: Heads = [
        ("load_cv", "load CV", "load_cv"),
        ("", "random routing", "chance_cv"),
        ("study_runs.max_over_mean", "max/mean", "max_over_mean"),
        ("study_runs.routing_entropy", "routing entropy", "routing_entropy"),
        ("", "log n", "log_n"),
        ("unused_share", "unused experts", "unused_share"),
        ("dropped_share", "dropped", "dropped_share"),
    ]
    return arm_table("balance", "Load at the end of training", tables, heads)


def stability_table(tables: Tables) -> dict[str, Any]:
    heads: Heads = [
        ("consistency", "consistency", "consistency"),
        ("", "k/n, by chance", "k_of_n"),
        ("study_runs.usage_sigma", "usage σ", "usage_sigma"),
        ("study_runs.kendall_tau", "Kendall τ (0 by chance)", "kendall_tau"),
    ]
    return arm_table("stability_of_arms", "Steadiness over the last checkpoints", tables, heads)


def cost_table(tables: Tables) -> dict[str, Any]:
    heads: Heads = [
        ("parameters_total", "parameters", "parameters_total"),
        ("parameters_trainable", "trained", "parameters_trainable"),
        ("parameters_active", "active", "parameters_active"),
        ("flops_per_token", "FLOPs a token", "flops_per_token"),
        ("study_runs.tokens_per_second", "tokens/s", "tokens_per_second"),
        ("", "times the reference", "relative_speed"),
        ("study_runs.peak_memory_bytes", "peak memory, GB", "peak_gb"),
        ("seconds", "seconds", "seconds"),
    ]
    return arm_table("cost_of_arms", "Size, speed and memory", tables, heads)


KNOWN_BEFORE = (
    "parameters_total",
    "parameters_trainable",
    "parameters_active",
    "flops_per_token",
    "log_n",
    "k_of_n",
)


def arm_table(name: str, title: str, tables: Tables, heads: Heads) -> dict[str, Any]:
    """An arm a row: means over its finished trainings.

    An arm without one says why in every cell that a run would fill.
    """
    runs = tables["study_runs"]
    means = arm_means(tables)
    rows = []
    for arm in dict.fromkeys(runs["arm"]):
        own = runs[runs["arm"] == arm]
        done = int((own["status"] == "done").sum())
        why = "" if done else "failed" if (own["status"] == "failed").any() else "not run"
        cells = [
            why if why and column not in KNOWN_BEFORE else means.loc[arm].get(column, math.nan)
            for _, _, column in heads
        ]
        rows.append([arm, f"{done} of {len(own)}", *cells])
    columns = [
        {"name": "arm", "title": "arm", "kind": "text"},
        {"name": "status", "title": "seeds done", "kind": "text", "entry": "study_runs.status"},
        *({"name": column, "title": head, "kind": "float", "entry": entry} for entry, head, column in heads),
    ]
    return {"name": name, "title": title, "columns": columns, "rows": plain(rows)}


def arm_means(tables: Tables) -> pd.DataFrame:
    """Means over finished trainings by arm, and what random routing of as many tokens gives."""
    runs = tables["study_runs"]
    numbers = [
        column for column in runs.columns if column not in ("arm", "seed", "question", "status", "message")
    ]
    runs = runs.astype(dict.fromkeys(numbers, float))
    means = runs[runs["status"] == "done"].groupby("arm")[numbers].mean().reindex(runs["arm"].unique())
    before = [column for column in KNOWN_BEFORE if column in numbers]
    means[before] = runs.groupby("arm")[before].first()
    arms = tables["study_arms"].set_index("arm").reindex(means.index)
    n, k = arms["experts"].astype(float), arms["top_k"].astype(float)
    means["log_n"], means["k_of_n"] = n.map(math.log, na_action="ignore"), k / n
    means["chance_cv"] = (
        (n - k) / (k * last_stretch(tables).reindex(means.index) * arms["tokens_a_step"].astype(float))
    ) ** 0.5
    means["peak_gb"] = means["peak_memory_bytes"] / 1e9
    reference = str(tables["study_comparisons"]["reference"].iloc[0])
    means["relative_speed"] = means["tokens_per_second"] / means["tokens_per_second"].get(reference, math.nan)
    return means


def last_stretch(tables: Tables) -> pd.Series:
    """Steps that the last measurement of load was taken over, by arm."""
    if "study_curves" not in tables:
        return pd.Series(dtype=float)
    rows = tables["study_curves"]
    rows = rows[rows["load_cv"].notna()]
    steps = rows.groupby("arm")["step"].unique().map(sorted)
    return steps.map(lambda own: float(own[-1] - own[-2] if len(own) > 1 else own[-1]))
