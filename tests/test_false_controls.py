"""How often a compression claims to beat random draws when its plan is one of them, and when it is better."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from moescope.compression.damage import judged_differences
from moescope.compression.rows import PER_LAYER, beside_controls
from moescope.execution.evaluation import Evaluation

DRAWS, DOCUMENTS = 3, 30
SPREAD, NOISE = 0.1, 0.1  # nats per token: of random plans, and of a plan's loss over documents


def claims(generator: np.random.Generator, gain: float) -> tuple[bool, bool]:
    """Whether the plan is said to be better than random draws, and whether it beats every single one."""
    tokens_D = np.exp(generator.normal(5, 0.7, DOCUMENTS)).round()
    ones = np.zeros(DOCUMENTS, dtype=int)

    def evaluation_of(loss: float) -> Evaluation:
        loss_D = tokens_D * (3 + loss + NOISE * generator.standard_normal(DOCUMENTS))
        return Evaluation(loss_D, tokens_D, 0.1 * tokens_D, tokens_D, ones)

    losses = SPREAD * generator.standard_normal(1 + DRAWS) - gain * np.eye(1 + DRAWS)[0]
    judged = [evaluation_of(0.5 + loss) for loss in losses]
    rows = pd.DataFrame(judged_differences(evaluation_of(0), judged, 0)).astype(float)
    rows = rows.assign(role=["plan"] + ["control"] * DRAWS, layer=pd.array([None] * (1 + DRAWS), "Int64"))
    found = beside_controls(rows.assign(bytes=1, bytes_original=2, **dict.fromkeys(PER_LAYER, np.nan)))
    controls = found[found["role"] == "control"]
    return bool(controls["beyond_random"].all()), bool(controls["plan_better"].all())


@pytest.mark.slow
def test_a_plan_that_is_a_random_draw_is_called_better_in_one_of_twenty():
    """That it beats each of three draws is no evidence: one of four draws does, however many documents."""
    generator = np.random.default_rng(0)
    better, beats_all = np.array([claims(generator, 0.0) for _ in range(200)]).sum(0)
    assert better <= 16
    assert beats_all > 16


@pytest.mark.slow
def test_a_plan_eight_spreads_better_is_called_better_in_nine_of_ten():
    generator = np.random.default_rng(1)
    assert np.mean([claims(generator, 8 * SPREAD)[0] for _ in range(100)]) >= 0.9


def test_the_p_of_a_plan_is_that_of_the_t_test_with_one_new_draw():
    """Draws of 1, 2 and 3 nats above the plan: t = 2 / sqrt(1 + 1/3) with 2 degrees of freedom."""
    rows = pd.DataFrame(
        {
            "role": ["plan", *["control"] * 3],
            "layer": pd.array([None] * 4, "Int64"),
            "loss_above_plan": [np.nan, 1.0, 2.0, 3.0],
            "loss_above_plan_low": [np.nan, 1.0, 2.0, 3.0],
            "loss_above_plan_high": [np.nan, 1.0, 2.0, 3.0],
            **{"bytes": 1, "bytes_original": 2, **dict.fromkeys(PER_LAYER, np.nan)},
        }
    )
    p = beside_controls(rows)["p_random"]
    # of 2 degrees of freedom: P(T > t) = (1 - t / sqrt(2 + t²)) / 2
    t = 2 / np.sqrt(4 / 3)
    assert p.iloc[1:].tolist() == pytest.approx([(1 - t / np.sqrt(2 + t**2)) / 2] * 3)
    assert np.isnan(p.iloc[0])
    assert beside_controls(rows.iloc[:2])["p_random"].isna().all()
