"""Tables of made-up studies, for tests of the page "Results"."""

from __future__ import annotations

import numpy as np
import pandas as pd

from moescope.lab.results import Results
from moescope.lab.study_statistics import compare

SEEDS = range(5)
NOISE = np.array([0.001, -0.002, 0.003, 0.0, -0.002])  # of the seeds


def study(losses: dict[str, list[float]], question: str = "main", **columns) -> dict[str, pd.DataFrame]:
    """study_runs and study_comparisons of these losses per seed; 8 experts, 2 per token."""
    rows = [
        {
            "arm": arm,
            "seed": seed,
            "question": question,
            "status": "done",
            "validation_loss": loss,
            "n_experts": 8,
            "top_k": 2,
            "parameters_active": 1000,
            **{name: values[arm][seed] for name, values in columns.items() if arm in values},
        }
        for arm, of_seeds in losses.items()
        for seed, loss in enumerate(of_seeds)
    ]
    runs = pd.DataFrame(rows)
    tables = {"study_runs": runs}
    return tables if len(losses) == 1 else {**tables, "study_comparisons": compare(runs, next(iter(losses)))}


def layers(rows: list[tuple[str, int, int, str, float, float]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["arm", "seed", "layer", "metric", "value", "chance"])
    return frame.assign(domain="")


def losses_of_five_seeds() -> dict[str, list[float]]:
    return {
        "top2": [2.50, 2.42, 2.61, 2.55, 2.47],
        "spectra": [2.40, 2.30, 2.52, 2.44, 2.38],
        "expert_choice": [2.41, 2.33, 2.50, 2.47, 2.36],
        "dense": [2.70, 2.63, 2.80, 2.76, 2.69],
    }


def sized(arms: dict[str, np.ndarray], order: str = "SL", failed: str = "") -> Results:
    """A study of sizes; the arm of the lower rate has "half" in its name."""
    tables = study({arm: list(values) for arm, values in arms.items()}, "scaling")
    runs = tables["study_runs"]
    runs["parameters_active"] = runs["arm"].str.split().str[1].map({"S": 1000, "M": 1400, "L": 2000})
    runs.loc[(runs["arm"] == failed) & (runs["seed"] == 0), ["status", "validation_loss"]] = ("failed", None)
    places = [(arm, "size", None, arm.split()[1]) for size in order for arm in arms if arm.split()[1] == size]
    tables["study_axes"] = pd.DataFrame(places, columns=["arm", "axis", "value", "label"])
    rates = [(arm, "learning_rate", 0.001 if "half" in arm else 0.002) for arm in arms]
    tables["study_settings"] = pd.DataFrame(rates, columns=["arm", "name", "value"])
    return Results.of([tables])


def with_settings(tables: dict[str, pd.DataFrame], **values: float) -> dict[str, pd.DataFrame]:
    arms = dict.fromkeys(tables["study_runs"]["arm"])
    rows = [(arm, name, value) for arm in arms for name, value in values.items()]
    return {**tables, "study_settings": pd.DataFrame(rows, columns=["arm", "name", "value"])}


def sizes_at_one_rate(spectra: float = 2.85) -> list[dict[str, pd.DataFrame]]:
    """Three sizes: SPECTRA is worse at M and L at its own rates, and nearly equal at those of top2."""
    sizes = sized(
        {
            **{"top2 S": 3.0 + NOISE, "top2 M half": 2.9 - NOISE, "top2 L half": 2.8 - NOISE},
            **{"top2 L": 2.95 + NOISE, "spectra S": 2.9 + NOISE, "spectra M": 2.95 + NOISE},
            "spectra L": spectra + NOISE,
        },
        "SML",
    ).sizes
    rates = sizes["study_settings"]
    rates.loc[rates["arm"] == "spectra S", "value"] = 0.004
    gain = 0.05 - 0.02 * np.log2(1.4)
    at_rate = {"spectra M half": 2.9 - gain + NOISE, "spectra L half": 2.77 + NOISE}
    controls = study({"top2": list(3.0 + NOISE), "spectra at the rate of top2": list(2.95 - NOISE)})
    controls = with_settings(controls, learning_rate=0.002)
    controls["study_name"] = pd.DataFrame({"name": ["controls"]})
    return [sizes, sized(at_rate, "SML").sizes, controls]
