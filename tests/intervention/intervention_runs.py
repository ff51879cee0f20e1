"""Frames of interventions as the verb hands them over, made by hand: no model is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moescope.intervention.estimates import expert_effects, projections, summarise
from moescope.intervention.predictors import predictor_tables
from moescope.intervention.verb import VERB
from moescope.run import Run, open_run


def frames(
    difference_XD: np.ndarray, tokens_D: np.ndarray, plan: dict[str, Any], domain_D: list[str] | None = None
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Documents, plan and routing; losses are 3 nats per token untouched."""
    X, D = difference_XD.shape
    at = {"intervention": np.repeat(np.arange(X), D), "document": np.tile(np.arange(D), X)}
    tokens = np.tile(tokens_D, X)
    documents = pd.DataFrame(
        {
            **at,
            "change": "x",
            "domain": np.tile(domain_D or ["text"] * D, X),
            "tokens": tokens,
            "loss": 3.0 * tokens,
            "loss_changed": 3.0 * tokens + difference_XD.ravel(),
            "kl": np.abs(difference_XD).ravel(),
            "predictions_changed": tokens // 4,
            "choices": 2 * tokens,
            "choices_changed": tokens,
        }
    )
    empty = dict.fromkeys(("layer", "layer_name", "expert", "k", "draw", "of", "calibration_load"), np.nan)
    described = {"intervention": np.arange(X), "change": "x", "name": "ablate", "role": "change"}
    routing = pd.DataFrame({"intervention": np.arange(X), "load": 0.1, "load_changed": 0.0})
    return documents, pd.DataFrame({**described, **empty, **plan}), routing


def lengths(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Tokens per document over two orders of magnitude."""
    return np.clip(np.exp(generator.normal(5, 1, shape)), 8, 2048).round()


def planted_sweep(
    layers: int = 3, experts: int = 8, seed: int = 4
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Documents, plan and routing of a sweep of experts in which (1, 5) alone carries code."""
    generator, X = np.random.default_rng(seed), layers * experts
    domain = ["code", "prose", "records"] * 14
    tokens = lengths(generator, (42,))
    difference = tokens * (0.02 + 0.03 * generator.standard_t(4, (X, 42)))
    difference[experts + 5] += tokens * 0.4 * (np.array(domain) == "code")
    plan = {"layer": np.repeat(np.arange(layers), experts), "expert": np.tile(np.arange(experts), layers)}
    plan["calibration_load"] = generator.random(X)
    plan["change"] = [f"layer={at // experts} expert={at % experts} ablate" for at in range(X)]
    return frames(difference, tokens, plan, domain)


def sweep_tables(**sizes: int) -> dict[str, pd.DataFrame]:
    """The tables of that sweep."""
    documents, plan, routing = planted_sweep(**sizes)
    interventions = summarise(documents, plan, routing)
    experts = expert_effects(interventions, documents, plan, 0)
    return {
        "interventions": interventions,
        "intervention_experts": experts,
        "intervention_documents": documents,
        **predictor_tables({"intervention_experts": experts}),
    }


def projection_tables(beyond: float = 0.2, layers: int = 1, draws: int = 4) -> dict[str, pd.DataFrame]:
    """The tables of a sweep of k: the projection costs `beyond` nats per token more than both controls."""
    generator, rows, effects = np.random.default_rng(6), [], []
    for layer in range(layers):
        for k in (1, 4, 16):
            of = len(rows)
            rows.append((layer, k, None, "change", None))
            effects.append(0.05 * k**0.5 + beyond)
            for role, scale in (("random subspace", 0.01), ("random direction", 0.05)):
                for draw in range(draws):
                    rows.append((layer, k, draw, role, of))
                    effects.append(scale * k**0.5 + 0.01 * generator.standard_normal())
    plan = pd.DataFrame(rows, columns=["layer", "k", "draw", "role", "of"]).astype(
        {"of": float, "draw": float}
    )
    tokens = lengths(generator, (30,))
    difference = tokens * (np.array(effects)[:, None] + 0.05 * generator.standard_normal((len(rows), 30)))
    made = frames(
        difference, tokens, {**plan.to_dict("list"), "name": "project_out", "change": "project_out"}
    )
    interventions = summarise(*made)
    return {"interventions": interventions, "projections": projections(interventions)}


def top_k_tables() -> dict[str, pd.DataFrame]:
    """The tables of a sweep of top_k from 1 to 4 experts per token, where 2 is configured."""
    generator = np.random.default_rng(7)
    tokens, domain = lengths(generator, (40,)), ["code", "prose"] * 20
    effects = np.array([0.5, 0.0, -0.02, 0.01])[:, None]
    noise = 0.1 * generator.standard_normal((4, 40)) * (effects != 0)
    plan = {"name": "top_k", "k": [1, 2, 3, 4], "change": [f"top_k k={k}" for k in (1, 2, 3, 4)]}
    return {"interventions": summarise(*frames(tokens * (effects + noise), tokens, plan, domain))}


def single_tables(changes: int = 1, **plan: Any) -> dict[str, pd.DataFrame]:
    """The tables of changes that stand alone, judged on 12 documents."""
    generator, tokens = np.random.default_rng(1), np.full(12, 50.0)
    difference = tokens * (0.1 + 0.02 * generator.standard_normal((changes, 12)))
    plan = {
        "name": "uniform_router",
        "change": [f"layer={at} uniform_router" for at in range(changes)],
        **plan,
    }
    return {"interventions": summarise(*frames(difference, tokens, plan))}


def write_run(folder: Path, tables: dict[str, pd.DataFrame]) -> Run:
    """Write the run folder of an intervene with these tables."""
    whole = {"layer", "expert", "k", "draw", "of", "controls"}
    frames = {
        name: frame.astype(dict.fromkeys(whole & set(frame), "Int64")) for name, frame in tables.items()
    }
    documents = int(tables["interventions"]["documents"].max())
    with open_run(folder, VERB, {"arguments": {}, "checkpoints": []}) as writer:
        writer.save_info(setup={"documents": documents}, warnings=[])
        return writer.finish(frames)
