"""study: train every arm of a design under the same seeds, and compare the arms in tables."""

from __future__ import annotations

import functools
import hashlib
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from moescope.arguments import choose_device
from moescope.engine import LocalEngine, ProcessEngine, check_engine, open_engine
from moescope.errors import BadInput
from moescope.lab.config import load_function, split_place
from moescope.lab.corpus import read_corpus, training_vocabulary
from moescope.lab.figures import STUDY_FIGURES
from moescope.lab.report_study import claims, guide, page_title, sections, select, summary
from moescope.lab.study_statistics import NOT_RUN, compare, with_arm_tables, with_parts
from moescope.lab.study_task import TEXT_FOLDER, TRAININGS, TrainingTask, costs, prune, run_task, save_text
from moescope.lab.tables import TABLES
from moescope.lab.train import bytes_on_disk, check_memory, with_steps
from moescope.processor import avoid_broken_amx
from moescope.progress import progress
from moescope.run import (
    DamagedRun,
    Run,
    RunWriter,
    jsonable,
    mark_unfinished,
    open_run,
    place_run,
    read_run_json,
    run_to_resume,
    write_table,
)
from moescope.storage import check_disk, only_writer, remove
from moescope.verb import Verb

if TYPE_CHECKING:
    from moescope.decoder.config import ModelConfig
    from moescope.decoder.vocabulary import Vocabulary
    from moescope.lab.corpus import Corpus
    from moescope.lab.study_config import Study

TASK_TABLES = (  # written by single trainings
    *("study_runs", "study_documents", "study_curves", "study_layers", "study_loads", "study_usage"),
    *("study_effects", "study_tasks", "study_probes"),
    "study_keys",
)
RARELY = 10  # tables are written again once so many times the seconds of writing them have passed
TIMED_TOKENS, TIMED_TOKENS_ON_CPU = 16_384, 2_048  # at most, when the parts of a block are timed


def study(
    config: str | Path | dict[str, Any] | None = None,
    *,
    engine: Literal["local", "ray"] = "local",
    resume: bool = False,
    out: str | Path | None = None,
    jobs: int = 1,
    device: str = "auto",
    address: str | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run:
    """Train many small MoEs with paired seeds and compare them.

    Give the same command again to resume: finished trainings are skipped.
    Returns the run, whose tables can be read while it grows.

    Parameters
    ----------
    config : STUDY.TOML
        Arms, seeds and what they have in common (docs/lab.md); in Python also a dictionary.
    resume : bool
        Continue the unfinished study in --out, or the newest one in runs/.
    jobs : N >= 1, <= 1024
        Trainings at a time, each in its own process; on a GPU they share it.

    Examples
    --------
    >>> run = moescope.study("routers.toml", jobs=2)  # doctest: +SKIP
    >>> run.table("study_comparisons")  # doctest: +SKIP
    """
    given = VERB.settle(locals())
    from moescope.decoder.ranks import started_by_torchrun

    check_engine(engine, address, device)
    if engine == "ray" and jobs > 1:
        raise BadInput(f"--jobs {jobs}: Ray starts as many trainings as fit its machines; remove it")
    if started_by_torchrun():
        raise BadInput("a study trains each model in one process; start it without torchrun, with --jobs")
    folder, plan = read_config(config, resume, out, overwrite)
    target_device = choose_device(device) if engine == "local" else device
    here = choose_device("auto") if target_device == "auto" else target_device
    avoid_broken_amx(here, plan.base.train.dtype == "bfloat16")
    if engine == "local":
        for arm in plan.arms:
            check_memory(arm.config, target_device)
    corpus = read_corpus(plan.base.data)
    identity = {"arguments": jsonable(plan.as_dict()), "corpus": corpus.identity}
    if plan.tasks:
        from moescope.lab.tasks import tasks_identity

        identity["tasks"] = tasks_identity(plan.tasks)  # raises before any training
    if plan.probe:
        load_function(plan.probe, Path(), "probe")  # likewise
    name = Path(config).stem if isinstance(config, str | Path) else plan.reference
    folder, done = place_run(VERB, folder, name, identity, overwrite)
    if done:
        return done
    vocabulary = training_vocabulary(plan.base, corpus)
    plan = count_steps(plan, corpus, vocabulary)
    command = VERB.command(given if isinstance(config, str | Path) else {"resume": True, "out": folder})
    if overwrite and holds_study(folder):  # under the lock: another process may still write it
        with only_writer(folder, folder / ".lock", "this run", "give another --out"):
            clear_study(folder)
    with open_run(folder, VERB, identity, overwrite, command) as writer:
        largest = max(bytes_on_disk(arm.config) for arm in plan.arms)
        present = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        needed = max(checkpoint_bytes(plan) + jobs * largest - present, 0)
        check_disk(folder, needed, 'free some space, or set keep = "none" or a larger checkpoint_every')
        describe(writer, plan)
        save_text(folder, corpus, vocabulary)
        # torch's random state is per process, so trainings are never threads
        local = LocalEngine(target_device) if jobs == 1 else ProcessEngine(target_device, jobs)
        workers = nullcontext(local) if engine == "local" else open_engine(engine, address, target_device)
        train_all(writer, plan, corpus.identity, workers, quiet)
        with writer.timed("overhead"):
            measure_overhead(writer, plan, here)
        frames = current_tables(writer, plan)
        writer.save_info(warnings=warnings_of(plan, frames["study_runs"]))
        return writer.finish({**frames, "overhead": with_parts(joined(writer, "overhead"))})


def plan_study(
    config: str | Path | dict[str, Any] | None = None, resume: bool = False, out: str | Path | None = None
) -> dict[str, Any]:
    """Return the arms of a study with their sizes and total work; of the text it reads what epochs need."""
    _, plan = read_config(config, resume, out, overwrite=False)
    if any(arm.config.train.epochs for arm in plan.arms):
        corpus = read_corpus(plan.base.data)
        plan = count_steps(plan, corpus, training_vocabulary(plan.base, corpus))
    arms: list[dict[str, Any]] = []
    for arm in plan.arms:
        cost = costs(arm.config)
        tokens = arm.config.train.steps * cost["tokens_per_step"]
        flops = 3 * cost["flops_per_token"] * tokens
        arms.append({"arm": arm.name, "question": arm.question, **cost, "tokens": tokens, "flops": flops})
    seeds = len(plan.seeds)
    return {
        "reference": plan.reference,
        "seeds": list(plan.seeds),
        "arms": arms,
        "trainings": len(plan.trainings),
        "tokens": seeds * sum(arm["tokens"] for arm in arms),
        "flops": seeds * sum(arm["flops"] for arm in arms),
        "bytes_kept": checkpoint_bytes(plan),
        "claims": plan.claims,
    }


def count_steps(plan: Study, corpus: Corpus, vocabulary: Vocabulary) -> Study:
    """Return the study with the steps of its arms' epochs."""
    configs = with_steps([arm.config for arm in plan.arms], corpus, vocabulary)
    arms = (replace(arm, config=config) for arm, config in zip(plan.arms, configs, strict=True))
    return replace(plan, arms=tuple(arms))


def plan_lines(facts: dict[str, Any]) -> list[str]:
    """Format `plan_study` for the terminal."""
    width = max(len(arm["arm"]) for arm in facts["arms"])
    lines = [f"{'arm':{width}}  {'question':8}  {'parameters':>14}  {'active':>14}  {'FLOPs per token':>15}"]
    for arm in facts["arms"]:
        mark = "  (reference)" if arm["arm"] == facts["reference"] else ""
        lines.append(
            f"{arm['arm']:{width}}  {arm['question']:8}  {arm['parameters_total']:>14,}  "
            f"{arm['parameters_active']:>14,}  {arm['flops_per_token']:>15,}{mark}"
        )
    seeds = ", ".join(map(str, facts["seeds"]))
    lines += [
        f"{facts['trainings']} trainings: {len(facts['arms'])} arms, seeds {seeds}",
        f"work: {facts['tokens']:,} tokens, {facts['flops']:.2e} FLOPs (three forward passes per token)",
        f"disk: {facts['bytes_kept'] / 1e9:,.1f} GB of checkpoints remain",
    ]
    if not facts["claims"]:
        lines.append("fewer than five seeds: no significance will be claimed")
    return lines


def read_config(
    config: str | Path | dict[str, Any] | None, resume: bool, out: str | Path | None, overwrite: bool
) -> tuple[Path | None, Study]:
    """Return the run folder, if known, and the checked study; of a resumed study as its run.json has it."""
    from moescope.lab.study_config import read_study, study_from

    folder = Path(out) if out is not None else None
    if resume:
        folder, info = run_to_resume(folder, "study", "study", config is not None or overwrite)
        plan = study_from(info["arguments"], str(folder / "run.json"))
        probe = info.get("probe")
        return folder, replace(plan, probe=f"{probe['file']}:{probe['function']}") if probe else plan
    if config is None:
        raise BadInput("no study given; give a TOML file, or --resume to continue one")
    return folder, study_from(config) if isinstance(config, dict) else read_study(config)


def checkpoint_bytes(plan: Study) -> int:
    """Estimate the size of the checkpoints that remain, in float32."""
    total = 0
    for arm in plan.arms:
        saved = -(-arm.config.train.steps // arm.config.train.checkpoint_every)
        total += costs(arm.config)["parameters_total"] * {"none": 0, "last": 1, "all": saved + 3}[plan.keep]
    return 4 * total * len(plan.seeds)


def describe(writer: RunWriter, plan: Study) -> None:
    """Write the study's description to run.json, and a first task, so that an interruption leaves a trace."""
    arms = [
        {
            "name": arm.name,
            "question": arm.question,
            "overrides": arm.overrides,
            "axes": arm.axes,
            "trainings": {str(seed): f"{TRAININGS}/{arm.training_name(seed)}" for seed in plan.seeds},
        }
        for arm in plan.arms
    ]
    info: dict[str, Any] = {}
    if plan.probe:
        path, name = split_place(plan.probe, Path(), "probe")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        info["probe"] = {"file": str(path), "function": name, "sha256": digest}
    resumed = [task for task in writer.done_tasks() if task != "study"]
    writer.save_info(
        **info,
        reference=plan.reference,
        references=plan.references,
        seeds=list(plan.seeds),
        base=plan.as_dict()["base"],
        claims_significance=plan.claims,
        arms=arms,
        checkpoints=[],
        tasks_resumed=len(resumed),
    )
    if "study" not in writer.done_tasks():
        writer.flush_task("study", {}, {})


def holds_study(folder: Path) -> bool:
    """Whether the folder holds an earlier study; with a damaged run.json, by its trainings."""
    try:
        return (read_run_json(folder) or {}).get("verb") == "study"
    except DamagedRun:
        return (folder / TRAININGS).is_dir()


def clear_study(folder: Path) -> None:
    """Remove the trainings and the text of an earlier study, and nothing else."""
    mark_unfinished(folder)
    for run in (folder / TRAININGS).glob("*-seed-*/run.json"):
        if (read_run_json(run.parent) or {}).get("verb") == "train":
            remove(run.parent, folder)
    remove(folder / TEXT_FOLDER, folder)


def train_all(
    writer: RunWriter, plan: Study, corpus: str, engine: AbstractContextManager[Any], quiet: bool
) -> None:
    """Train and measure what is not finished; only this process writes, after each training.

    Trainings that run out of memory are an error once the others are done; the same command repeats them.
    """
    from moescope.lab.tasks import task_names

    folder = writer.path.resolve()
    # a worker may be in another folder
    scored = [str(Path(name).resolve()) if Path(name).exists() else name for name in task_names(plan.tasks)]
    tasks = [
        TrainingTask(
            *(folder, arm.training_name(seed), arm.name, seed, arm.question, arm.of_seed(seed), corpus),
            *(",".join(scored), plan.probe),
        )
        for arm, seed in plan.trainings
    ]
    done = writer.done_tasks()
    left = [task for task in tasks if task.name not in done]
    for task in tasks:
        if task.name in done:  # it may be measured but not yet pruned
            prune(task.folder, plan.keep)
    duration = write_current_tables(writer, plan)
    written = time.perf_counter() - RARELY * duration
    if not left:
        return
    total, rest = (sum(task.config.train.steps for task in some) for some in (tasks, left))
    with progress(total, total - rest, "steps", quiet) as advance, engine as workers:
        writer.save_info(engine=workers.name, device=workers.device, jobs=getattr(workers, "jobs", 1))
        work = functools.partial(run_task, workers.device)
        short = []
        for task, result in workers.run(work, left, lambda task: advance(f"{task.arm} seed {task.seed}")):
            if result.status == NOT_RUN:
                short.append(f"{task.arm} seed {task.seed} ({result.message})")
                continue
            writer.flush_task(task.name, result.frames, {**task.keys, "status": result.status})
            prune(task.folder, plan.keep)
            if time.perf_counter() - written > RARELY * duration:  # joining many trainings takes seconds
                written, duration = time.perf_counter(), write_current_tables(writer, plan)
    if short:
        write_current_tables(writer, plan)
        raise BadInput(
            f"{len(short)} of {len(left)} trainings ran out of memory, the first {short[0]}; repeat the "
            "command with fewer --jobs, or start another study with more [base.train] micro_batches"
        )


def write_current_tables(writer: RunWriter, plan: Study) -> float:
    """Write all tables as they are now, so that an unfinished study can be read; return the seconds taken."""
    began = time.perf_counter()
    frames = current_tables(writer, plan)
    for name, frame in frames.items():
        write_table(TABLES[name], frame, writer.path / f"{name}.parquet")
    writer.save_info(warnings=warnings_of(plan, frames["study_runs"]))
    return time.perf_counter() - began


def current_tables(writer: RunWriter, plan: Study) -> dict[str, pd.DataFrame]:
    frames = {table: joined(writer, table) for table in TASK_TABLES}
    runs = frames["study_runs"]
    present = set(zip(runs["arm"], runs["seed"], strict=True))
    rest = [
        {**{"arm": arm.name, "seed": seed, "question": arm.question, "status": NOT_RUN}, **costs(arm.config)}
        for arm, seed in plan.trainings
        if (arm.name, seed) not in present
    ]
    if rest:
        frames["study_runs"] = pd.DataFrame([*runs.to_dict("records"), *rest], columns=runs.columns)
    frames["study_comparisons"] = compare(frames["study_runs"], plan.reference, plan.references)
    axes = [
        {
            "arm": arm.name,
            "axis": axis,
            "value": float(value) if type(value) in (int, float) else None,
            "label": str(value),
        }
        for arm in plan.arms
        for axis, value in arm.axes.items()
    ]
    frames |= {"study_axes": pd.DataFrame(axes)} if axes else {}
    return with_arm_tables(frames, plan.reference)


def joined(writer: RunWriter, table: str) -> pd.DataFrame:
    """Return one table of all finished trainings, empty if none has written it."""
    return writer.joined(table) if writer.has(table) else pd.DataFrame(columns=list(TABLES[table].columns))


def measure_overhead(writer: RunWriter, plan: Study, device: str) -> None:
    """Time each part of the study's routers at its sizes, while nothing else runs."""
    import torch

    from moescope.lab.cost import overhead

    if "overhead" in writer.done_tasks():
        return
    train = plan.base.train
    limit = TIMED_TOKENS if device.startswith("cuda") else TIMED_TOKENS_ON_CPU
    tokens = min(train.batch_size // train.micro_batches * train.sequence_length, limit)
    dtype = torch.bfloat16 if train.dtype == "bfloat16" else torch.float32
    frames = {"overhead": overhead(timed_models(plan), tokens, device, dtype)}
    writer.flush_task("overhead", frames, {"tokens": tokens, "device": device})


def timed_models(plan: Study) -> dict[str, ModelConfig]:
    """Return the arms whose parts are timed: one per router (the reference first), and every ablation."""
    models: dict[tuple[str, str], tuple[str, ModelConfig]] = {}
    for arm in sorted(plan.arms, key=lambda arm: arm.name != plan.reference):
        model = arm.config.model
        options = repr(sorted(model.router_options.items())) if arm.question == "ablation" else ""
        models.setdefault((model.router, options), (arm.name, model))
    return dict(models.values())


def warnings_of(plan: Study, runs: pd.DataFrame) -> list[str]:
    few = f"{len(plan.seeds)} seeds: fewer than five, so no significance is claimed"
    failed = runs[runs["status"] == "failed"].itertuples()
    warnings = [] if plan.claims else [few]
    warnings += [f"{row.arm} seed {row.seed} failed: {row.message}" for row in failed]
    if runs.loc[runs["status"] == "done", "noise_low"].isna().any():
        warnings.append("no evaluation noise: fewer than 20 validation documents; give more text")
    return warnings


VERB = Verb(
    "study",
    study,
    tables=TABLES,
    figures=STUDY_FIGURES,
    summary=summary,
    sections=sections,
    select=select,
    claims=claims,
    guide=guide,
    tab="training",
    title=page_title,
    grows=True,
    dry_run=plan_study,
    dry_run_lines=plan_lines,
)
