"""The steps of a compression: calibrate, plan, apply, judge; each is a task that a resumed run skips."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from moescope.checkpoint import open_checkpoint
from moescope.compression.applying import apply_plan, check_fits, new_layers, new_top_k, planned_bytes
from moescope.compression.calibration import save_sums
from moescope.compression.calibration_text import (
    CALIBRATION_FILE,
    Calibration,
    CalibrationText,
    EarlierSums,
    all_sums,
    calibrate_text,
    load_calibration,
    load_earlier_sums,
)
from moescope.compression.damage import predict
from moescope.compression.judging import check_judgeable, judge_models
from moescope.compression.merging import check_adaptive
from moescope.compression.method import Evidence, Method, PlanSettings, Proposal, rescaling_warnings
from moescope.compression.methods import check_settings, method_named
from moescope.compression.plan import Fits, checkpoint_mark, read_plan, write_plan
from moescope.compression.pruning import keep_counts
from moescope.compression.reap import reap
from moescope.compression.rows import cluster_geometry, cluster_rows, damage_rows, merge_rows, saliency_rows
from moescope.decoder.routers import Router, router_class
from moescope.errors import BadInput
from moescope.execution.adapters import find_blocks
from moescope.families import MoeCheckpoint
from moescope.families.writing import MoePlan, NewLayer, plan_moe
from moescope.progress import progress
from moescope.run import Run, RunWriter
from moescope.storage import leftover_name
from moescope.types import Plan

SMALL = 2 * 2**30  # bytes of a checkpoint up to which three random controls are judged, beyond it one
DEFAULT_METHOD = "reap"


@dataclass(frozen=True)
class Work:
    """The validated inputs of one call."""

    moe: MoeCheckpoint
    method: Method
    keep: dict[int, int]
    settings: PlanSettings
    plan_settings: dict[str, str | int | float | bool | None]  # for plan.json
    plan: tuple[Plan, Fits] | None  # a plan given by the user
    apply: Path | None
    judge: bool
    controls: int
    earlier: tuple[EarlierSums, ...] = ()

    @property
    def layer_names(self) -> dict[int, str]:
        return {layer: weights.layer_name for layer, weights in self.moe.layers.items()}

    def control_seeds(self) -> dict[str, int]:
        """Name -> seed of every control; none has the seed of the plan."""
        seeds = [self.settings.seed + number for number in range(1, self.controls + 1)]
        return {f"random (seed {seed})": seed for seed in seeds}


# --- before any work


def prepare(
    moe: MoeCheckpoint,
    method: str | None,
    keep: str | int | float | None,
    plan: str | Path | None,
    apply: str | Path | None,
    add: Iterable[str | Path],
    settings: PlanSettings,
    judge: bool,
    controls: int | None,
    with_text: bool,
) -> Work:
    """Validate the inputs against headers, before any work."""
    if (router := lab_router(moe)) is not None and not router.routes:
        raise BadInput(f"{moe.checkpoint.shown}: a dense model has one expert per layer, nothing to compress")
    target = None if apply is None else Path(apply).expanduser().resolve()
    loaded: tuple[Plan, Fits] | None = None
    if plan is not None:
        if method is not None or keep is not None:
            raise BadInput("--plan already defines method and experts; omit --method and --keep, or --plan")
        loaded = read_plan(plan)
        check_fits(moe, *loaded)
        tied = loaded[0].router == "tie"
        if tied and (target is not None or not judge):
            raise BadInput(
                f"{plan}: no checkpoint format can hold its router, tie; to judge it, omit --apply and give "
                "--text"
            )
        if target is None and not tied:
            raise BadInput(f"{plan}: a plan is applied to a folder; give --apply DIR")
        if not tied:
            planned_bytes(moe, *loaded)
        chosen = method_named(loaded[0].method)
        counts = {layer.layer: len(layer.groups) for layer in loaded[0].layers}
        plan_settings = dict(loaded[0].settings)
        stored: Any = {name: value for name, value in plan_settings.items() if name in asdict(settings)}
        settings = replace(settings, **stored)
        check_stored_settings(str(plan), chosen, settings)
    else:
        if keep is None:
            raise BadInput("the number of experts to keep is missing; give --keep 0.5, or --keep 4")
        chosen = method_named(method or DEFAULT_METHOD)
        check_settings(chosen, settings, target is not None)
        if settings.adaptive:
            check_adaptive(moe)
        counts = keep_counts(moe, keep, chosen.merges)
        plan_settings = {
            "keep": str(keep),
            **(asdict(settings) if chosen.merges else {"seed": settings.seed}),
        }
        if target is not None:
            top_k = min(counts.values()) if chosen.merges else None
            before = [weights.top_k for weights in moe.layers.values() if weights.top_k is not None]
            lowered = top_k if top_k is not None and before and top_k < max(before) else None
            plan_moe(moe, {layer: NewLayer(range(count)) for layer, count in counts.items()}, lowered)
    if controls is None:
        controls = 3 if moe.checkpoint.bytes() <= SMALL else 1
    check_router(moe, chosen, settings.sequential)
    earlier = tuple(load_earlier_sums(Path(location), moe) for location in add)
    if earlier and chosen.merges and not with_text:
        raise BadInput(f"method {chosen.name} needs states of a text besides sums; give --text with --add")
    if chosen.needs_text and not with_text and not earlier and plan is None:
        raise BadInput(
            f"method {chosen.name} {chosen.summary}, so it needs a text; give --text PATH, or --method random"
        )
    for needs, option in (
        (settings.sequential, "--sequential"),
        (settings.merge_weights == "saliency", "--merge-weights saliency"),
    ):
        if needs and not with_text and plan is None:
            raise BadInput(f"{option} needs a text; give --text PATH, or omit it")
    judges = judge and (target is not None or settings.router == "tie")
    return Work(moe, chosen, counts, settings, plan_settings, loaded, target, judges, controls, earlier)


def check_stored_settings(plan: str, method: Method, settings: PlanSettings) -> None:
    """Raise for settings in plan.json of another kind than a user can give."""
    for name, default in asdict(PlanSettings()).items():
        value = getattr(settings, name)
        if type(value) is not type(default) or (name == "seed" and value < 0):
            raise BadInput(f"{plan}: its setting {name} {value!r:.40} is not supported; plan again")
    check_settings(method, settings, written=False)


def lab_router(moe: MoeCheckpoint) -> type[Router] | None:
    """The router class of a lab checkpoint; None for every other model."""
    lab = (moe.checkpoint.config or {}).get("moescope_lab")
    return router_class(str(lab.get("router"))) if isinstance(lab, dict) else None


def check_router(moe: MoeCheckpoint, method: Method, sequential: bool) -> None:
    """Raise for a lab router that the method cannot compress."""
    router = lab_router(moe)
    if router is None or not method.merges:
        return
    if method.needs_logits and not router.has_logits:
        raise BadInput(
            f"{moe.checkpoint.shown}: its router, {router.name}, has no logits for {method.name}; "
            "merge with hc_smoe or weights, or prune with reap"
        )
    if sequential and any(weights.router_state for weights in moe.layers.values()):
        raise BadInput(
            f"{moe.checkpoint.shown}: its router, {router.name}, has more state per expert than a row, which "
            "sequential merging does not support; omit --sequential"
        )


# --- the steps


def carry_out(writer: RunWriter, work: Work, text: CalibrationText | None, device: str, quiet: bool) -> Run:
    """Calibrate, plan, apply, judge; then write the tables."""
    done = writer.done_tasks()
    calibration = calibrate_step(writer, work, text, quiet) if text is not None else None
    evidence = gather_evidence(work, calibration, text)
    cache: dict[int, tuple[Plan, Fits]] = {}

    def control(seed: int, plan: Plan) -> tuple[Plan, Fits]:
        """The control with that seed, made once for prediction and judging."""
        if seed not in cache:
            cache[seed] = plan_control(work, evidence, seed, plan)
        return cache[seed]

    if "plan" not in done:
        plan_step(writer, work, evidence, calibration, text, control, device)
    plan, fits = read_plan(writer.path)
    if work.apply is not None and "applied" not in done:
        apply_step(writer, work, plan, fits, quiet)
    if work.judge and text is not None and "judged" not in done:
        controls = [(name, *control(seed, plan)) for name, seed in work.control_seeds().items()]
        compressed = (work.method.name, plan, fits)
        seed = work.settings.seed
        with writer.timed("judge"):
            results = judge_models(writer, text, work.moe, seed, compressed, work.apply, controls, quiet)
        writer.flush_task("judged", {}, results)
        writer.save_info()
    return finish(writer, work, plan, calibration)


def calibrate_step(writer: RunWriter, work: Work, text: CalibrationText, quiet: bool) -> Calibration:
    if "calibration" not in writer.done_tasks():
        with writer.timed("load"):
            reader = text.reader
        if work.judge:
            check_judgeable(reader, text.held_out_documents())  # now rather than at the end
        (writer.path / "parts").mkdir(exist_ok=True)
        file = leftover_name(writer.path / "parts")
        with writer.timed("calibrate"), progress(text.settings.max_tokens, 0, "tokens", quiet) as advance:
            shown, makers = partial(advance, "calibrating"), work.method.collectors
            if text.execution is not None:
                text.execution.on_total = lambda tokens: shown(0, tokens)
            calibrate_text(text, work.moe, makers, work.settings.seed, file, shown)
        if text.execution is not None:
            text.execution.on_total = lambda tokens: None
        writer.flush_task("calibration", {}, {}, files={CALIBRATION_FILE: file})
        writer.save_info()
    return load_calibration(writer.path / "parts" / "calibration" / CALIBRATION_FILE)


def gather_evidence(work: Work, calibration: Calibration | None, text: CalibrationText | None) -> Evidence:
    evidence = Evidence(work.moe, work.keep, work.settings, all_sums(calibration, work.earlier))
    if calibration is None or text is None:
        return evidence
    return replace(
        evidence,
        states=calibration.states,
        gating=calibration.gating,
        traced=lambda: text.traced,
        recalibrate=text.calibrate,
    )


def plan_step(
    writer: RunWriter,
    work: Work,
    evidence: Evidence,
    calibration: Calibration | None,
    text: CalibrationText | None,
    control: Callable[[int, Plan], tuple[Plan, Fits]],
    device: str,
) -> None:
    """Plan, predict the damage of the plan and of its controls, and write plan.json."""
    warnings: list[str] = []
    frames: dict[str, Any] = {}
    with writer.timed("plan"):
        if work.plan is not None:
            plan, fits = work.plan
        else:
            proposal = work.method.propose(evidence)
            facts = calibration.facts() if calibration else {}
            plan, fits = as_plan(work, work.method, proposal, {**work.plan_settings, **facts})
            warnings += proposal.warnings
            if (merges := merge_rows(plan.method, proposal.groupings, work.layer_names)) is not None:
                frames["merges"] = merges
    with writer.timed("distances"):
        frames |= cluster_geometry(work.moe, plan, device, work.settings.seed)
    predicted: dict[str, Any] = {}
    if calibration is not None and text is not None:
        with writer.timed("predict"):
            predicted[plan.method], scales = predict_damage(work, plan, fits, calibration, text)
            if plan.router != "fold":  # a fitted router has warned already
                warnings += rescaling_warnings("merging" if work.method.merges else "pruning", scales)
            for name, seed in work.control_seeds().items():
                predicted[name], _ = predict_damage(work, *control(seed, plan), calibration, text)
    sizes: tuple[int | None, int | None] = (None, None)
    if plan.router != "tie":
        try:
            sizes = planned_bytes(work.moe, plan, fits)
        except BadInput as error:  # a model on the hub can be planned but not rewritten here
            if work.apply is not None:
                raise
            warnings.append(f"size unknown: {error}")
    write_plan(writer.path, plan, fits)
    writer.flush_task("plan", frames, {"predicted": predicted, "bytes": sizes, "warnings": warnings})
    writer.save_info()


def as_plan(work: Work, method: Method, proposal: Proposal, settings: dict[str, Any]) -> tuple[Plan, Fits]:
    plan = Plan(
        method.name,
        checkpoint_mark(work.moe.checkpoint),
        proposal.layers,
        proposal.matching,
        proposal.router,
        proposal.top_k,
        {**settings, **proposal.facts},
    )
    return plan, proposal.fits


def plan_control(work: Work, evidence: Evidence, seed: int, plan: Plan) -> tuple[Plan, Fits]:
    """A random plan with as many experts per layer, in groups of the same sizes, matched as the plan's."""
    method = method_named(work.method.control)
    settings = replace(work.settings, seed=seed, sequential=False)
    proposal = method.propose(replace(evidence, settings=settings, control_of=plan))
    return as_plan(work, method, proposal, {"seed": seed})


def predict_damage(
    work: Work, plan: Plan, fits: Fits, calibration: Calibration, text: CalibrationText
) -> tuple[dict[str, list[float | None]], list[float]]:
    """Layer -> error and router KL; and gate scales of layers whose gating was not recognised."""
    gating = calibration.gating
    blocks = {block.layer: block for block in find_blocks(text.traced.model)}
    damage = predict(text.traced, plan, fits, calibration.states, gating, blocks, work.moe)
    scales = [
        predicted.gate_scale
        for layer, predicted in damage.items()
        if predicted.gate_scale is not None and not (layer in gating and gating[layer].explains)
    ]
    return {str(layer): [predicted.error, predicted.router_kl] for layer, predicted in damage.items()}, scales


def apply_step(writer: RunWriter, work: Work, plan: Plan, fits: Fits, quiet: bool) -> None:
    assert work.apply is not None
    written_bytes = 0
    planned = plan_moe(work.moe, new_layers(work.moe, plan, fits), new_top_k(work.moe, plan))
    # A checkpoint appears complete or not at all: one that is there was written before a kill.
    if "applying" not in writer.done_tasks() or not is_written(work.apply, planned):
        if "applying" not in writer.done_tasks():
            writer.flush_task("applying", {}, {})
        with writer.timed("write"), progress(None, 0, "bytes", quiet) as advance:

            def show(done: int, total: int) -> None:
                nonlocal written_bytes
                advance(f"writing {total:,} bytes", done - written_bytes)
                written_bytes = done

            apply_plan(work.moe, plan, fits, work.apply, show)
    writer.flush_task("applied", {}, {"folder": str(work.apply), "written_bytes": planned.total_bytes})
    writer.save_info()


def is_written(folder: Path, planned: MoePlan) -> bool:
    """Return whether the folder holds a checkpoint of exactly the planned tensors."""
    try:
        stored = open_checkpoint(folder).stored.values()
    except BadInput:
        return False
    found = {(tensor.name, tensor.dtype, tensor.shape) for tensor in stored}
    return found == {(tensor.name, tensor.dtype, tensor.shape) for tensor in planned.tensors}


# --- the end of the run


def finish(writer: RunWriter, work: Work, plan: Plan, calibration: Calibration | None) -> Run:
    """Write the tables from the plan, the sums and the tasks' records, and close the run."""
    texts: list[Calibration | EarlierSums] = [*([calibration] if calibration else []), *work.earlier]
    documents, tokens = sum(text.documents for text in texts), sum(text.tokens for text in texts)
    warnings: list[str] = [] if calibration is None else calibration.warnings(documents)
    record: dict[str, Any] = {}
    for task in writer.setups():
        warnings += task.pop("warnings", [])
        record |= task
    names = work.layer_names
    predicted, judged = record.get("predicted", {}), record.get("models", {})
    original = (record.get("perplexity_original"), record.get("facts", {}).get("judged_documents"))
    frames = {
        "clusters": cluster_rows(plan, names),
        "damage": damage_rows(plan, names, predicted, judged, *original, record["bytes"]),
    }
    frames |= {name: writer.joined(name) for name in writer.verb.tables if writer.has(name)}
    router = lab_router(work.moe)
    facts: dict[str, Any] = {
        "gating": {},
        "plan_settings": plan.settings,
        "router": plan.router,
        "router_effects": router.compression_effects if router else {},
        "matching": plan.matching,
        "top_k": plan.top_k,
        "top_k_before": next(iter(work.moe.layers.values())).top_k,
        **record.get("facts", {}),
    }
    if calibration is not None:
        # this text's sums only: with those of earlier runs, adding would count them twice
        header = {**calibration.facts(), "header_hash": plan.checkpoint["header_hash"]}
        save_sums(writer.path / CALIBRATION_FILE, calibration.sums, header)
        facts |= {
            "gating": describe_gating(calibration, router.name if router else None),
            **calibration.facts(),
        }
    if sums := all_sums(calibration, work.earlier):
        score = work.method.score or reap
        frames["saliency"] = saliency_rows(sums, names, score, documents, work.settings.seed)
        facts |= {
            "calibration_documents": documents,
            "calibration_tokens": tokens,
            "ranked_by": work.method.name if work.method.score else "reap",
        }
    if work.judge and any(run.held_out != "documents" for run in work.earlier):
        warnings.append(
            "sums of --add runs cover all of their text: they may include text that is judged here"
        )
    if plan.router == "tie":
        warnings.append("not written: no checkpoint format can hold a router row per old expert")
    elif work.apply is None:
        warnings.append("not written: give --apply DIR to write and judge a checkpoint")
    if not work.judge and (work.apply is not None or plan.router == "tie"):
        warnings.append("not judged: " + ("no text was given" if calibration is None else "--no-judge"))
    if work.plan is not None and work.plan[0].settings.get("held_out") == "none":
        warnings.append(
            "the plan was calibrated on all of its text: it may have seen text that is judged here"
        )
    writer.save_info(setup=facts, warnings=list(dict.fromkeys(warnings)), applied=record.get("folder"))
    return writer.finish(frames)


def describe_gating(calibration: Calibration, router: str | None) -> dict[int, str]:
    """Layer -> how its router was seen to choose; the lab router's name where no gating explains it."""
    gating = calibration.gating
    known = {layer: how.words() for layer, how in gating.items()}
    unexplained = [
        layer for layer in calibration.callable_routers if layer not in gating or not gating[layer].explains
    ]
    return known | dict.fromkeys(unexplained, f"as the lab's {router} router does")
