"""The steps of a compression: calibrate, plan, apply, judge; each is a task that a resumed run skips."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from moescope.checkpoint import open_checkpoint
from moescope.compression.applying import apply_plan, check_fits, new_layers, planned_bytes
from moescope.compression.calibration import (
    CALIBRATION_FILE,
    Calibration,
    all_sums,
    calibrate_text,
    load_calibration,
    load_earlier_sums,
    save_sums,
)
from moescope.compression.damage import check_judgeable, judge_models, predict
from moescope.compression.method import Evidence, Method, PlanSettings, Proposal, rescaling_warnings
from moescope.compression.methods import method_named
from moescope.compression.plan import Fits, checkpoint_mark, read_plan, write_plan
from moescope.compression.pruning import keep_counts
from moescope.compression.rows import (
    cluster_geometry,
    cluster_rows,
    damage_rows,
    group_size_rows,
    merge_pair_rows,
    merge_rows,
    saliency_rows,
)
from moescope.decoder.routers import Router, router_class
from moescope.errors import BadInput
from moescope.execution.adapters import find_blocks
from moescope.execution.evaluation import SplitText
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
    earlier: tuple[Calibration, ...] = ()  # the sums of other texts

    @property
    def layer_names(self) -> dict[int, str]:
        return {layer: weights.layer_name for layer, weights in self.moe.layers.items()}

    def control_seeds(self) -> dict[str, int]:
        """Name -> seed of every control; none has the seed of the plan."""
        first = self.settings.seed + 1
        return {f"random (seed {seed})": seed for seed in range(first, first + self.controls)}


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
    shown, router = moe.checkpoint.shown, lab_router(moe)
    if router is not None and not router.routes:
        raise BadInput(f"{shown}: a dense model has one expert per layer, nothing to compress")
    target = None if apply is None else Path(apply).expanduser().resolve()
    if plan is not None and (method is not None or keep is not None):
        raise BadInput("--plan already defines method and experts; omit --method and --keep, or --plan")
    loaded = None if plan is None else read_plan(plan)
    if loaded is not None:
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
        chosen, plan_settings = method_named(loaded[0].method), dict(loaded[0].settings)
        counts = {layer.layer: len(layer.groups) for layer in loaded[0].layers}
        seed = plan_settings.get("seed", settings.seed)
        if type(seed) is not int or seed < 0:
            raise BadInput(f"{plan}: its setting seed {seed!r:.40} is not supported; plan again")
        settings = PlanSettings(seed, "tie" if tied else "fold")
    else:
        if keep is None:
            raise BadInput("the number of experts to keep is missing; give --keep 0.5, or --keep 4")
        chosen = method_named(method or DEFAULT_METHOD)
        if settings.router != "fold" and not chosen.merges:
            raise BadInput(f"method {chosen.name} drops experts and merges none; omit --router")
        if settings.router == "tie" and target is not None:
            raise BadInput(
                "router tie keeps a row per old expert, which no checkpoint format can hold; omit --apply to "
                "judge it without writing, or use --router fold"
            )
        counts = keep_counts(moe, keep, chosen.merges)
        plan_settings = {
            "keep": str(keep),
            **(asdict(settings) if chosen.merges else {"seed": settings.seed}),
        }
        if target is not None:
            before = [weights.top_k for weights in moe.layers.values() if weights.top_k is not None]
            fewest = min(counts.values())
            lowered = fewest if chosen.merges and before and fewest < max(before) else None
            plan_moe(moe, {layer: NewLayer(range(count)) for layer, count in counts.items()}, lowered)
    if controls is None:
        controls = 3 if moe.checkpoint.bytes() <= SMALL else 1
    if router is not None and chosen.needs_logits and not router.has_logits:
        raise BadInput(
            f"{shown}: its router, {router.name}, has no logits for {chosen.name}; "
            "merge with hc_smoe or weights, or prune with reap"
        )
    earlier = tuple(load_earlier_sums(location, moe) for location in add)
    if earlier and chosen.merges and not with_text:
        raise BadInput(f"method {chosen.name} needs states of a text besides sums; give --text with --add")
    if chosen.needs_text and not with_text and not earlier and plan is None:
        raise BadInput(
            f"method {chosen.name} {chosen.summary}, so it needs a text; give --text PATH, or --method random"
        )
    judge = judge and (target is not None or settings.router == "tie")
    return Work(moe, chosen, counts, settings, plan_settings, loaded, target, judge, controls, earlier)


def lab_router(moe: MoeCheckpoint) -> type[Router] | None:
    """The router class of a lab checkpoint; None for every other model."""
    lab = (moe.checkpoint.config or {}).get("moescope_lab")
    return router_class(str(lab.get("router"))) if isinstance(lab, dict) else None


# --- the steps


def carry_out(writer: RunWriter, work: Work, text: SplitText | None, device: str, quiet: bool) -> Run:
    """Calibrate, plan, apply, judge; then write the tables."""
    done = writer.done_tasks()
    if not quiet and text is not None and not work.judge and work.apply is None:
        print("no --apply: the damage is predicted, no checkpoint is written or judged", file=sys.stderr)
    calibration = calibrate_step(writer, work, text, quiet) if text is not None else None
    texts = [*([calibration] if calibration else []), *work.earlier]
    evidence = Evidence(work.moe, work.keep, work.settings, all_sums(texts))
    if calibration is not None and text is not None:
        states, gating = calibration.states, calibration.gating
        evidence = replace(evidence, states=states, gating=gating, traced=lambda: text.traced)
    made: dict[int, tuple[Plan, Fits]] = {}

    def control(seed: int, plan: Plan) -> tuple[Plan, Fits]:
        """A random plan with as many experts per layer, in groups of the same sizes, matched as the plan's.

        It is made once for prediction and judging.
        """
        if seed not in made:
            method = method_named(work.method.control)
            random = replace(evidence, settings=replace(work.settings, seed=seed), control_of=plan)
            made[seed] = as_plan(work, method, method.propose(random), {"seed": seed})
        return made[seed]

    if "plan" not in done:
        plan_step(writer, work, evidence, calibration, text, control, device)
    plan, fits = read_plan(writer.path)
    if work.apply is not None and "applied" not in done:
        apply_step(writer, work, plan, fits, quiet)
    if work.judge and text is not None and "judged" not in done:
        controls = [(name, *control(seed, plan)) for name, seed in work.control_seeds().items()]
        compressed, seed = (work.method.name, plan, fits), work.settings.seed
        with writer.timed("judge"):
            results = judge_models(writer, text, work.moe, seed, compressed, work.apply, controls, quiet)
        writer.flush_task("judged", {}, results)
        writer.save_info()
    return finish(writer, work, plan, calibration, texts)


def calibrate_step(writer: RunWriter, work: Work, text: SplitText, quiet: bool) -> Calibration:
    if "calibration" not in writer.done_tasks():
        with writer.timed("load"):
            reader = text.reader
        if work.judge:
            check_judgeable(reader, text.held_out_documents())  # now rather than at the end
        (writer.path / "parts").mkdir(exist_ok=True)
        file = leftover_name(writer.path / "parts")
        with writer.timed("calibrate"), progress(text.settings.max_tokens, 0, "tokens", quiet) as advance:
            assert text.execution is not None
            show = partial(advance, "calibrating")
            text.execution.on_total = partial(show, 0)
            calibrate_text(text, work.moe, work.method.collectors, work.settings.seed, file, show)
        text.execution.on_total = lambda tokens: None
        writer.flush_task("calibration", {}, {}, files={CALIBRATION_FILE: file})
        writer.save_info()
    return load_calibration(writer.path / "parts" / "calibration" / CALIBRATION_FILE)


def plan_step(
    writer: RunWriter,
    work: Work,
    evidence: Evidence,
    calibration: Calibration | None,
    text: SplitText | None,
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
            chosen = {layer: states.chosen_TK.numpy() for layer, states in evidence.states.items()}
            if (pairs := merge_pair_rows(proposal.groupings, chosen, work.layer_names)) is not None:
                frames["merge_pairs"] = pairs
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


def as_plan(work: Work, method: Method, made: Proposal, settings: dict[str, Any]) -> tuple[Plan, Fits]:
    decided = (made.layers, made.matching, made.router, made.top_k, {**settings, **made.facts})
    return Plan(method.name, checkpoint_mark(work.moe.checkpoint), *decided), made.fits


def predict_damage(
    work: Work, plan: Plan, fits: Fits, calibration: Calibration, text: SplitText
) -> tuple[dict[str, list[float | None]], list[float]]:
    """Layer -> error and router KL; and gate scales of layers whose gating was not recognised."""
    traced, states, gating = text.traced, calibration.states, calibration.gating
    blocks = {block.layer: block for block in find_blocks(traced.model)}
    damage = predict(traced, plan, fits, states, gating, blocks, work.moe)
    scales = [
        predicted.gate_scale
        for layer, predicted in damage.items()
        if predicted.gate_scale is not None and not (layer in gating and gating[layer].explains)
    ]
    return {str(layer): [predicted.error, predicted.router_kl] for layer, predicted in damage.items()}, scales


def apply_step(writer: RunWriter, work: Work, plan: Plan, fits: Fits, quiet: bool) -> None:
    assert work.apply is not None
    written_bytes = 0
    planned = plan_moe(work.moe, *new_layers(work.moe, plan, fits))
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


def finish(
    writer: RunWriter, work: Work, plan: Plan, calibration: Calibration | None, texts: Sequence[Calibration]
) -> Run:
    """Write the tables from the plan, the sums and the tasks' records, and close the run."""
    documents, tokens = sum(text.documents for text in texts), sum(text.tokens for text in texts)
    warnings: list[str] = [] if calibration is None else calibration.warnings(documents)
    record: dict[str, Any] = {}
    for task in writer.setups():
        warnings += task.pop("warnings", [])
        record |= task
    names = work.layer_names
    clusters = cluster_rows(plan, names)
    frames = {"clusters": clusters, "damage": damage_rows(plan, names, record)}
    if (sizes := group_size_rows(clusters)) is not None:
        frames["group_sizes"] = sizes
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
        facts |= calibration.facts()
        gating = calibration.gating
        facts["gating"] = {layer: how.words() for layer, how in gating.items()} | {
            layer: f"as the lab's {router.name if router else None} router does"
            for layer in calibration.callable_routers
            if layer not in gating or not gating[layer].explains
        }
    if sums := all_sums(texts):
        kept = {layer.layer: [one for group in layer.groups for one in group] for layer in plan.layers}
        seed = work.settings.seed
        frames["saliency"] = saliency_rows(sums, names, work.method, documents, seed, kept)
        facts |= {
            "calibration_documents": documents,
            "calibration_tokens": tokens,
            "ranked_by": work.method.name if work.method.score else "reap",
        }
    tied, from_all = plan.router == "tie", any(run.held_out != "documents" for run in work.earlier)
    notes = (
        (
            work.judge and from_all,
            "sums of --add runs cover all of their text: they may include text that is judged here",
        ),
        (tied, "not written: no checkpoint format can hold a router row per old expert"),
        (work.apply is None and not tied, "not written: give --apply DIR to write and judge a checkpoint"),
        (
            not work.judge and (work.apply is not None or tied),
            f"not judged: {'no text was given' if calibration is None else '--no-judge'}",
        ),
        (
            work.plan is not None and work.plan[0].settings.get("held_out") == "none",
            "the plan was calibrated on all of its text: it may have seen text that is judged here",
        ),
    )
    warnings += [note for applies, note in notes if applies]
    writer.save_info(setup=facts, warnings=list(dict.fromkeys(warnings)), applied=record.get("folder"))
    return writer.finish(frames)
