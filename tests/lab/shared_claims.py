"""Tables of made-up studies, for tests of claims."""

from __future__ import annotations

import numpy as np
import pandas as pd

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
