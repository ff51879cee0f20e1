"""A study's run folder without trainings: tables with planted differences, run.json as the verb writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moescope.decoder.routers import ROUTERS as CLASSES
from moescope.lab.study_statistics import compare
from moescope.lab.tables import TABLES
from moescope.run import Run, write_json
from moescope.run import write_table as write
from moescope.tables import SCHEMA_VERSION

ROUTERS = ["top2", "loss_free", "spectra", "hash", "switch_top1"]
DESCRIBED = ("name", "question", "overrides", "axes")  # of an arm in run.json
SHIFT = {"top2": 0.0, "loss_free": -0.04, "spectra": 0.001, "hash": 0.09, "switch_top1": 0.03, "dense": 0.05}
COMPONENTS = {"spectra": ["gru", "similarity", "sinkhorn", "rest"]}
BASE = {
    "model": {"router": "top2", "experts": 8, "top_k": 2, "layers": 2, "d_model": 16, "router_options": {}},
    "train": {"steps": 300, "batch_size": 16, "sequence_length": 128},
}

ROUTING = ("study_layers", "study_loads", "study_usage")

Arm = dict[str, Any]


def router_arms(names: list[str] | None = None) -> list[Arm]:
    return [
        {
            "name": name,
            "question": "main",
            "overrides": {"model": {"router": name}},
            "axes": {},
            "shift": SHIFT.get(name, 0.002 * index),
        }
        for index, name in enumerate(names or ROUTERS)
    ]


def more_arms() -> list[Arm]:
    """Ablations of spectra, a sweep of one option, and two routers at several numbers of experts."""
    ablations = [
        {
            "name": f"spectra{part}",
            "question": "ablation",
            "overrides": {"model": {"router": "spectra"}},
            "axes": {},
            "shift": shift,
        }
        for part, shift in (("-GRU", 0.02), ("-Quota", 0.002))
    ]
    sweep = [
        {
            "name": f"spectra epsilon={value}",
            "question": "sweep",
            "overrides": {"model": {"router": "spectra", "router_options": {"epsilon": value}}},
            "axes": {"router": "spectra", "epsilon": value},
            "shift": 0.01 * abs(np.log(value / 0.05)),
            "cv": value,
        }
        for value in (0.02, 0.051, 0.2, 0.5)
    ]
    scaling = [
        {
            "name": f"{router} experts={experts}",
            "question": "scaling",
            "overrides": {"model": {"router": router, "experts": experts}},
            "axes": {"router": router, "experts": experts},
            "shift": SHIFT[router] - 0.03 * np.log2(experts / 8),
        }
        for router in ("top2", "spectra")
        for experts in (4, 16, 32)
    ]
    return [*ablations, *sweep, *scaling]


def routing_size(arm: Arm) -> dict[str, int | None]:
    model = {**BASE["model"], **arm["overrides"].get("model", {})}
    router = CLASSES.get(model["router"])
    routes = router is None or router.routes
    top_k = (router and router.fixed_top_k) or model["top_k"]
    return {
        "n_experts": model["experts"] if routes else None,
        "top_k": top_k if routes else None,
        "tokens_per_step": 16 * 128,
    }


def chances(arm: Arm) -> dict[str, float | None]:
    """Chance levels of a window of 50 steps, as the Monitor states them."""
    n, k, tokens = routing_size(arm).values()
    if n is None:
        return {}
    tokens *= 50
    return {
        "load_cv_chance": np.sqrt((n - k) / (tokens * k)),
        "routing_entropy_chance": np.log(n),
        "unused_share_chance": (1 - k / n) ** tokens,
    }


def write_table(name: str, frame: pd.DataFrame, path: Path) -> None:
    write(TABLES[name], frame, path)


def routing_tables(arm: Arm, keys: dict[str, Any], generator: np.random.Generator) -> dict[str, list[Any]]:
    """Rows of the tables on routing of one training: two layers, two domains, documents that switch."""
    n, k, _ = routing_size(arm).values()
    if n is None:
        return {}
    shift = 0.02 if "spectra" in arm["name"] else 0.0
    found: dict[str, list[Any]] = {name: [] for name in ROUTING}
    for layer in range(2):
        place = {**keys, "layer": layer, "layer_name": f"layers.{layer}.mlp"}
        loads = generator.dirichlet(np.full(n, 60.0))
        values = {
            "load_entropy": (-(loads * np.log(loads)).sum(), np.log(n)),
            "expert_overlap": (0.09, (k - 1) / (2 * (n - 1) - (k - 1))),
            "output_orthogonality": (0.80 + shift + 0.002 * generator.standard_normal(), 0.93),
            "min_over_mean": (n * loads.min(), 0.95),
            "max_violation": (n * loads.max() - 1, 0.05),
        }
        found["study_layers"] += [
            {**place, "metric": metric, "domain": "", "value": value, "chance": chance}
            for metric, (value, chance) in values.items()
        ]
        for expert in range(n):
            one = {**place, "expert": expert}
            found["study_loads"] += [
                {**one, "domain": domain, "tokens": round(share * loads[expert])}
                for domain, share in (("code", 4000), ("prose", 2000))
            ]
        for step in range(0, 301, 50):
            shares = generator.dirichlet(np.full(n, 8.0) if step <= 100 else 2000 * loads)
            found["study_usage"] += [
                {**place, "step": step, "expert": expert, "share": share}
                for expert, share in enumerate(shares)
            ]
    return found


def study_run(
    folder: Path,
    arms: list[Arm] | None = None,
    seeds: int = 5,
    failed: tuple[tuple[str, int], ...] = (),
    not_run: tuple[str, ...] = (),
    references: dict[str, str] | None = None,
    spread: float = 0.004,
    seed: int = 0,
) -> Run:
    """The run of a study that was carried out, as far as its tables go."""
    generator = np.random.default_rng(seed)
    arms = router_arms() if arms is None else arms
    of_seed = 0.03 * generator.standard_normal(seeds)
    runs, curves, documents = [], [], []
    drawn = np.random.default_rng(seed + 1)  # of the tables on routing
    routing: dict[str, list[Any]] = {name: [] for name in ROUTING}
    for arm in arms:
        cv = arm.get("cv", 0.06 + 0.1 * abs(arm["shift"]) / 0.05)
        for number in range(seeds):
            keys = {"arm": arm["name"], "seed": number}
            known = {
                "question": arm["question"],
                "parameters_total": 200_000,
                "parameters_trainable": 200_000,
                "parameters_active": 90_000,
                "flops_per_token": 250_000,
                **routing_size(arm),
            }
            if arm["name"] in not_run:
                runs.append({**keys, **known, "status": "not run"})
                continue
            if (arm["name"], number) in failed:
                runs.append(
                    {
                        **keys,
                        **known,
                        "status": "failed",
                        "message": "loss is not a number at step 40, layer 1",
                    }
                )
                continue
            loss = (
                2.4 + arm["shift"] + of_seed[number] + arm.get("spread", spread) * generator.standard_normal()
            )
            runs.append(
                {
                    **keys,
                    **known,
                    "status": "done",
                    "validation_loss": loss,
                    "noise_low": loss - 0.05,
                    "noise_high": loss + 0.05,
                    "noise_std": 0.025,
                    "load_cv": cv * (1 + 0.1 * generator.uniform()),
                    **{name: value for name, value in chances(arm).items() if "unused" not in name},
                    "max_over_mean": 1.2,
                    "routing_entropy": 1.5,
                    "unused_share": 0.0,
                    "dropped_share": 0.0,
                    "consistency": 0.8,
                    "consistency_chance": 0.3,
                    "usage_sigma": 0.01,
                    "kendall_tau": 0.5,
                    "tokens_per_second": 20_000.0,
                    "seconds": 60.0,
                }
            )
            for name, rows in routing_tables(arm, keys, drawn).items():
                routing[name] += rows
            for step in range(0, 301, 50):
                gone = np.exp(-step / 80)
                judged = loss + 3.1 * gone
                curves.append(
                    {
                        **keys,
                        "step": step,
                        "train_loss": judged + 0.02 if step else None,
                        "validation_loss": judged,
                        "routing_entropy": 2.0 - 0.5 * (1 - gone) if step else None,
                        "load_cv": cv + 0.4 * gone if step else None,
                        "unused_share": 0.05 * gone if step else None,
                        **(chances(arm) if step else {}),
                    }
                )
            documents += [
                {
                    **keys,
                    "document": place,
                    "domain": domain,
                    "tokens": tokens,
                    "loss": loss + more * arm["shift"],
                }
                for place, (domain, tokens, more) in enumerate(
                    [("code", 100, 1), ("code", 300, 1), ("prose", 200, -1)]
                )
            ]
    routers = list(dict.fromkeys(arm["overrides"]["model"]["router"] for arm in arms))
    overhead = []
    for router in routers:
        parts = COMPONENTS.get(router, ["routing"])
        cost = {"experts": 2.0, **dict.fromkeys(parts, 0.2)}
        overhead += [
            {
                "router": router,
                "component": part,
                "milliseconds": ms,
                "flops": 1000,
                "share": ms / sum(cost.values()),
            }
            for part, ms in cost.items()
        ]
    folder.mkdir(parents=True)
    frame = pd.DataFrame(runs)
    write_table("study_runs", frame, folder / "study_runs.parquet")
    if documents:
        write_table("study_documents", pd.DataFrame(documents), folder / "study_documents.parquet")
        write_table("study_curves", pd.DataFrame(curves), folder / "study_curves.parquet")
    for name, rows in routing.items():
        if rows:
            write_table(name, pd.DataFrame(rows), folder / f"{name}.parquet")
    write_table("overhead", pd.DataFrame(overhead), folder / "overhead.parquet")
    write_table(
        "study_comparisons", compare(frame, arms[0]["name"], references), folder / "study_comparisons.parquet"
    )
    axes = [
        {"arm": arm["name"], "axis": axis, "value": None if isinstance(at, str) else at, "label": str(at)}
        for arm in arms
        for axis, at in arm["axes"].items()
    ]
    if axes:
        write_table("study_axes", pd.DataFrame(axes), folder / "study_axes.parquet")
    info = {
        "schema_version": SCHEMA_VERSION,
        "command": "moescope study routers.toml",
        "verb": "study",
        "status": "done",
        "arguments": {},
        "corpus": "0123abcd",
        "checkpoints": [],
        "timings": {"train": 100.0},
        "versions": {},
        "started": "2026-01-01T00:00:00+0000",
        "finished": "2026-01-01T01:00:00+0000",
        "git_commit": None,
        "warnings": [],
        "reference": arms[0]["name"],
        "references": references or {},
        "seeds": list(range(seeds)),
        "base": BASE,
        "arms": [{key: arm[key] for key in DESCRIBED} for arm in arms],
    }
    write_json(folder / "run.json", info)
    return Run.load(folder)
