"""What does this expert do: its load, its domains, its company, its tokens and where they stood.

One layer at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from moescope.plotting.style import number
from moescope.reporting.pack import plain, table_payload
from moescope.reporting.untrusted import token_words, visible
from moescope.routing.figures_load import usages
from moescope.routing.figures_metrics import values_of
from moescope.routing.figures_separation import NAMED_FROM, expected_together
from moescope.routing.report_views import LARGE, View

TOKENS_A_ROLE = 12
PARTNERS = 3
CONTEXTS = 5
CONTEXTS_OF_MANY = 3  # of an expert among so many that the page would grow too large
ROLES = ("input", "next", "predicted")
METRIC_TABLE = ["metric", "value", "chance", "collapse", "low", "high"]


def layer_payloads(view: View) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(what a layer's closed line says, what is shown when it is opened), layer by layer."""
    cv = values_of(view.tables, "cv").set_index("layer")
    entropy = values_of(view.tables, "routing_entropy").set_index("layer")
    grouped = {
        name: dict(tuple(frame.groupby("layer"))) for name, frame in view.tables.items() if "layer" in frame
    }
    found = []
    most = (
        CONTEXTS_OF_MANY
        if len(view.tables["load"][["layer", "expert"]].drop_duplicates()) >= LARGE
        else CONTEXTS
    )
    for usage in usages(view.tables):
        rows = {name: groups.get(usage.layer, view.tables[name].iloc[:0]) for name, groups in grouped.items()}
        line = []
        if usage.layer in cv.index:
            line.append(
                f"cv {number(cv.loc[usage.layer, 'value'])} "
                f"({number(cv.loc[usage.layer, 'chance'])} for random routing)"
            )
        if usage.layer in entropy.index:
            line.append(
                f"routing entropy {number(entropy.loc[usage.layer, 'value'])} "
                f"({number(entropy.loc[usage.layer, 'chance'])} knowing nothing)"
            )
        entry = {"layer": usage.layer, "line": ", ".join(line), "experts": len(usage.experts)}
        metrics = rows["routing_layers"]
        metrics = metrics[metrics["domain"] == ""]
        payload = {
            "experts": expert_cards(rows, usage.counts / (usage.even or 1.0), most),
            "table": table_payload(
                "routing_layers", metrics, METRIC_TABLE, f"Every metric of layer {usage.layer}"
            ),
        }
        found.append((entry, payload))
    return found


def expert_cards(rows: dict[str, pd.DataFrame], times: Any, most: int = CONTEXTS) -> list[dict[str, Any]]:
    """One card an expert; parts a trace does not hold are empty."""
    mass = rows["load"].groupby("expert")["gate_weight"].sum(min_count=1)
    gates = mass / mass.mean()
    mean_gate = mass / rows["load"].groupby("expert")["tokens"].sum()
    places = contexts_by_expert(rows.get("contexts"), most)
    domains = ranked(rows.get("domains"), "expert", "domain", "affinity")
    pairs = rows.get("coactivation")
    if pairs is not None:
        pairs = pairs.assign(over=pairs["lift"] / pairs["chance_lift"])
        pairs = pairs[expected_together(pairs) >= NAMED_FROM] if len(pairs) else pairs
    partners = ranked(pairs, "expert_a", "expert_b", "over", PARTNERS)
    vocabulary = tokens_by_expert(rows.get("vocabulary"))
    return [
        {
            "expert": expert,
            "times": plain(float(times[expert])),
            "gates": plain(float(gates.get(expert, float("nan")))),
            "domains": domains.get(expert, []),
            "partners": partners.get(expert, []),
            "tokens": {role: vocabulary.get((expert, role), []) for role in ROLES},
            "contexts": places.get(expert, []),
            "mean_gate": plain(float(mean_gate.get(expert, float("nan")))),
        }
        for expert in range(len(times))
    ]


def ranked(
    frame: pd.DataFrame | None, key: str, name: str, column: str, most: int | None = None
) -> dict[int, list[list[Any]]]:
    """key -> [name, value] of its rows, largest first, `most` at most; rows without a value are left out."""
    if frame is None or frame.empty:
        return {}
    ordered = frame[frame[column].notna()].sort_values(column, ascending=False, kind="stable")
    if most is not None:
        ordered = ordered.groupby(key).head(most)
    found: dict[int, list[list[Any]]] = {}
    for owner, other, value in zip(
        ordered[key].tolist(), ordered[name].tolist(), ordered[column].tolist(), strict=True
    ):
        found.setdefault(int(owner), []).append([other, plain(value)])
    return found


def tokens_by_expert(frame: pd.DataFrame | None) -> dict[tuple[int, str], list[list[Any]]]:
    """(expert, role) -> [token, count, lift] of the tokens that set it apart most.

    By count times log lift, as the table chose them.
    """
    if frame is None or frame.empty:
        return {}
    weight = frame["count"] * np.log(frame["lift"].clip(lower=1e-12))
    frame = frame.loc[weight.sort_values(ascending=False, kind="stable").index]
    top = frame.groupby(["expert", "role"], sort=False).head(TOKENS_A_ROLE)
    found: dict[tuple[int, str], list[list[Any]]] = {}
    columns = [top[name].tolist() for name in ("expert", "role", "token", "token_id", "count", "lift")]
    for expert, role, token, token_id, count, lift in zip(*columns, strict=True):
        entry = [token_words(token, int(token_id)), int(count), plain(float(lift))]
        found.setdefault((int(expert), str(role)), []).append(entry)
    return found


def contexts_by_expert(frame: pd.DataFrame | None, most: int) -> dict[int, list[list[Any]]]:
    """expert -> [before, token, after, gate, document, position, domain] where its gates are largest.

    Words made fit to be shown.
    """
    found: dict[int, list[list[Any]]] = {}
    if frame is None or frame.empty:
        return found
    for row in frame[frame["rank"] <= most].sort_values(["expert", "rank"]).to_dict("records"):
        before, after = (
            visible(row[side]) if isinstance(row[side], str) else "" for side in ("before", "after")
        )
        words = [before, token_words(row["token"], int(row["token_id"])), after]
        place = [plain(float(row["gate"])), int(row["document"]), int(row["position"]), row["domain"]]
        found.setdefault(int(row["expert"]), []).append(words + place)
    return found
