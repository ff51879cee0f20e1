"""What a compression leaves behind: its tables, and the sums that calibrating made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moescope.compression.loading import lab_router
from moescope.run import Run, RunWriter
from moescope.tables import GEOMETRY_TABLES

if TYPE_CHECKING:
    import pandas as pd

    from moescope.compression.calibration_text import Calibration
    from moescope.compression.verb import Work
    from moescope.types import Plan


def finish(writer: RunWriter, work: Work, plan: Plan, calibration: Calibration | None) -> Run:
    """Make the tables from the plan, the sums and the pieces' records, and close the run."""
    from moescope.compression.calibration import save_sums
    from moescope.compression.calibration_text import all_sums
    from moescope.compression.saliency import saliency_rows
    from moescope.compression.verb import CALIBRATION_FILE

    setup: dict[str, Any] = {}
    documents, tokens = (
        sum(getattr(part, name) for part in (*([calibration] if calibration else []), *work.earlier))
        for name in ("documents", "tokens")
    )
    warnings: list[str] = [] if calibration is None else calibration.warnings(documents)
    for record in writer.setups():
        warnings += record.pop("warnings", [])
        setup |= record
    frames = {"clusters": cluster_rows(plan, work.layer_names), "damage": damage_rows(work, plan, setup)}
    merged = [
        name
        for name in ("merges", *GEOMETRY_TABLES)
        if (writer.path / "parts" / "plan" / f"{name}.parquet").exists()
    ]
    frames |= {name: writer.joined(name) for name in merged}
    router = lab_router(work.moe)
    facts: dict[str, Any] = {
        "gating": {},
        "plan_settings": plan.settings,
        "router": plan.router,
        "lab_router": None if router is None else router.name,
        "router_effects": {} if router is None else router.compression_effects,
        "matching": plan.matching,
    }
    facts |= {
        "top_k": plan.top_k,
        "top_k_before": next(iter(work.moe.layers.values())).top_k,
        **setup.get("facts", {}),
    }
    if calibration is not None:
        own = {**calibration.facts(), "header_hash": plan.checkpoint["header_hash"]}
        save_sums(
            writer.path / CALIBRATION_FILE, calibration.sums, own
        )  # this text's alone, or adding would count one twice
        facts |= {
            "gating": ways_of_choosing(calibration, None if router is None else router.name),
            **calibration.facts(),
        }
    if sums := all_sums(calibration, work.earlier):
        frames["saliency"] = saliency_rows(
            sums, work.layer_names, work.method.ranked_by, documents, work.settings.seed
        )
        facts |= {
            "calibration_documents": documents,
            "calibration_tokens": tokens,
            "ranked_by": work.method.ranked_by,
        }
    if work.judge and any(run.held_out != "documents" for run in work.earlier):
        warnings.append("earlier sums are of all of their text: what is judged here may be in them")
    if work.apply is None:
        warnings.append("not written: give --apply DIR for a checkpoint, and for what it measures")
    elif not work.judge:
        warnings.append("not judged: " + ("no text was given" if calibration is None else "--no-judge"))
    if work.given is not None and work.given[0].settings.get("held_out") == "none":
        warnings.append(
            "the plan was calibrated on all of its text: what it is judged on here may have been seen then"
        )
    writer.save_info(setup=facts, warnings=list(dict.fromkeys(warnings)), applied=setup.get("folder"))
    return writer.finish(frames)


def ways_of_choosing(calibration: Calibration, router: str | None) -> dict[int, str]:
    """Layer -> how its router was seen to choose.

    Where nothing general explains that, the name of the lab's router that did.
    """
    found = {layer: gating.words() for layer, gating in calibration.gating.items()}
    strange = [
        layer
        for layer in calibration.asked
        if layer not in calibration.gating or not calibration.gating[layer].explains
    ]
    return found | dict.fromkeys(strange, f"as the lab's {router} router does")


def cluster_rows(plan: Plan, layer_names: dict[int, str]) -> pd.DataFrame:
    """The table `clusters`: what becomes of every expert."""
    import pandas as pd

    rows = []
    for layer in plan.layers:
        place = {expert: number for number, group in enumerate(layer.groups) for expert in group}
        share = {
            expert: weight
            for group, weights in zip(layer.groups, layer.weights, strict=True)
            for expert, weight in zip(group, weights, strict=True)
        }
        for expert in range(layer.n_experts):
            rows.append(
                {
                    "method": plan.method,
                    "layer": layer.layer,
                    "layer_name": layer_names[layer.layer],
                    "expert": expert,
                    "cluster": place.get(expert),
                    "dominant": expert in layer.dominants,
                    "weight": share.get(expert),
                    "kept": expert in place,
                }
            )
    return pd.DataFrame(rows).astype({"cluster": "Int64"})


def damage_rows(work: Work, plan: Plan, setup: dict[str, Any]) -> pd.DataFrame:
    """The table `damage`: a row a layer, and one for the whole model, of the plan and of every control."""
    import pandas as pd

    predicted, judged = setup.get("predicted", {}), setup.get("models", {})
    after, before = setup["bytes"]
    rows: list[dict[str, Any]] = []
    for method in dict.fromkeys([plan.method, *predicted, *judged]):
        own = judged.get(method, {})
        for layer, name in work.layer_names.items():
            error, kl = predicted.get(method, {}).get(str(layer), (None, None))
            measured = own.get("errors", {}).get(str(layer))
            rows.append(
                {
                    "method": method,
                    "layer": layer,
                    "layer_name": name,
                    "predicted_error": error,
                    "measured_error": measured,
                    "router_kl": kl,
                }
            )
        # a control leaves as many experts, so it is as large as the plan
        rows.append(
            {
                "method": method,
                "layer": None,
                "layer_name": None,
                "perplexity": own.get("perplexity"),
                "perplexity_original": setup.get("perplexity_original"),
                "js_divergence": own.get("js_divergence"),
                "bytes": after,
                "bytes_original": before,
            }
        )
    whole = ["layer", "bytes", "bytes_original"]
    floats = [
        "predicted_error",
        "measured_error",
        "router_kl",
        "perplexity",
        "perplexity_original",
        "js_divergence",
    ]
    frame = pd.DataFrame(rows)
    return frame.astype(dict.fromkeys(whole, "Int64") | dict.fromkeys(floats, "float64"))
