"""study: many trainings of the lab in a design with paired seeds, into tables that compare them."""

from __future__ import annotations

import functools
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.arguments import choose_device, run_to_resume
from moescope.engine import LocalEngine, ProcessEngine, check_engine, open_engine
from moescope.errors import BadInput
from moescope.lab.study_task import NOT_RUN, TRAININGS, TrainingPiece, costs, prune, train_piece
from moescope.lab.study_text import FOLDER, keep_text
from moescope.lab.train_settings import bytes_on_disk
from moescope.lab.train_text import read_corpus, vocabulary_of
from moescope.progress import progress
from moescope.run import (
    DamagedRun,
    Run,
    RunWriter,
    default_folder,
    jsonable,
    open_run,
    read_run_json,
    write_table,
)
from moescope.storage import check_disk
from moescope.tables import TABLES
from moescope.weights.verb import finished_run

if TYPE_CHECKING:
    import pandas as pd

    from moescope.decoder.config import ModelConfig
    from moescope.lab.study_config import Study

PIECES = ("study_runs", "study_documents", "study_curves")  # tables that single trainings write
TIMED_TOKENS = 16_384  # of a block at most, when the cost of its parts is taken
TIMED_TOKENS_ON_CPU = 2_048


def study(
    config: str | Path | dict[str, Any] | None = None,
    engine: str = "local",
    resume: bool = False,
    out: str | Path | None = None,
    jobs: int = 1,
    dry_run: bool = False,
    device: str = "auto",
    address: str | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run | dict[str, Any]:
    """Train every arm of a study under every seed, and return the run with its tables; with `dry_run` only
    what it would be.

    `config` is a TOML file or what one holds; `jobs` trainings go on at a time, each in a process of its own
    where it is more than one.
    """
    folder = Path(out) if out is not None else None
    check_words(engine, address, device, jobs)
    if resume:
        folder, settled = unfinished(folder, config, overwrite)
    elif config is None:
        raise BadInput("no study given; give a TOML file, or --resume to go on with one")
    else:
        settled = read(config)
    if dry_run:
        return facts_of(settled)
    place = choose_device(device) if engine == "local" else device
    corpus = read_corpus(settled.base)
    identity = {"arguments": jsonable(settled.as_dict()), "corpus": corpus.identity}
    name = Path(config).stem if isinstance(config, str | Path) else settled.reference
    chosen = folder or default_folder("study", name, identity)
    if not overwrite and (done := finished_run(chosen, identity)):
        return done
    vocabulary = vocabulary_of(settled.base, corpus)
    replaced = overwrite and holds_study(chosen)
    with open_run(chosen, "study", identity, overwrite) as writer:
        if replaced:  # under the lock: another process may still be writing it
            clear_study(chosen)
        check_room(chosen, settled, jobs)
        begin(writer, settled, None if resume else config)
        keep_text(chosen, corpus, vocabulary)
        train_all(writer, settled, corpus.identity, workers(engine, address, place, jobs), quiet)
        with writer.timed("overhead"):
            take_overhead(writer, settled, place)
        frames = tables_so_far(writer, settled)
        writer.save_info(warnings=warnings_of(settled, frames["study_runs"]))
        return writer.finish({**frames, "overhead": joined(writer, "overhead")})


# --- what was asked for


def check_words(engine: str, address: str | None, device: str, jobs: int) -> None:
    from moescope.decoder.ranks import started_by_torchrun

    check_engine(engine, address, device)
    if not isinstance(jobs, int) or jobs < 1:
        raise BadInput(f"--jobs {jobs}: give a whole number from 1")
    if engine == "ray" and jobs > 1:
        raise BadInput(
            f"--jobs {jobs}: Ray runs as many trainings as its machines have room for; leave it out"
        )
    if started_by_torchrun():
        raise BadInput(
            "a study trains many models, each in one process; start it without torchrun, and with --jobs"
        )


def read(config: str | Path | dict[str, Any]) -> Study:
    from moescope.lab.study_config import read_study, study_from

    return study_from(config) if isinstance(config, dict) else read_study(config)


def unfinished(folder: Path | None, config: Any, overwrite: bool) -> tuple[Path, Study]:
    """The study to be gone on with, as its own run.json has it."""
    from moescope.lab.study_config import study_from

    folder, info = run_to_resume(folder, "study", "study", config is not None or overwrite)
    return folder, study_from(info["arguments"], str(folder / "run.json"))


def facts_of(settled: Study) -> dict[str, Any]:
    """What a study would be: arms with their sizes, and the work they come to; nothing is read or trained."""
    arms: list[dict[str, Any]] = []
    for arm in settled.arms:
        train = arm.config.train
        tokens = train.steps * train.batch_size * train.sequence_length
        cost = costs(arm.config)
        arms.append(
            {
                "arm": arm.name,
                "question": arm.question,
                **cost,
                "tokens": tokens,
                "flops": 3 * cost["flops_per_token"] * tokens,
            }
        )
    seeds = len(settled.seeds)
    return {
        "reference": settled.reference,
        "seeds": list(settled.seeds),
        "arms": arms,
        "trainings": len(settled.trainings),
        "tokens": seeds * sum(arm["tokens"] for arm in arms),
        "flops": seeds * sum(arm["flops"] for arm in arms),
        "bytes_kept": bytes_kept(settled),
        "claims": settled.claims,
    }


def fact_lines(facts: dict[str, Any]) -> list[str]:
    """The same for a person."""
    width = max(len(arm["arm"]) for arm in facts["arms"])
    lines = [f"{'arm':{width}}  {'question':8}  {'parameters':>14}  {'active':>14}  {'FLOPs a token':>14}"]
    for arm in facts["arms"]:
        mark = "  (reference)" if arm["arm"] == facts["reference"] else ""
        lines.append(
            f"{arm['arm']:{width}}  {arm['question']:8}  {arm['parameters_total']:>14,}  "
            f"{arm['parameters_active']:>14,}  {arm['flops_per_token']:>14,}{mark}"
        )
    seeds = ", ".join(map(str, facts["seeds"]))
    lines.append(f"{facts['trainings']} trainings: {len(facts['arms'])} arms, seeds {seeds}")
    lines.append(
        f"work: {facts['tokens']:,} tokens, {facts['flops']:.2e} floating-point operations, "
        "three forward passes a token"
    )
    lines.append(f"disk: {facts['bytes_kept'] / 1e9:,.1f} GB of checkpoints stay")
    if not facts["claims"]:
        lines.append("fewer than five seeds: no significance will be claimed")
    return lines


# --- the run folder


def bytes_kept(settled: Study) -> int:
    """About what checkpoints take when all is done; float32."""
    total = 0
    for arm in settled.arms:
        train = arm.config.train
        saved = -(-train.steps // train.checkpoint_every)
        times = {"none": 0, "last": 1, "all": saved + 3}[settled.keep]
        total += 4 * costs(arm.config)["parameters_total"] * times * len(settled.seeds)
    return total


def check_room(folder: Path, settled: Study, jobs: int) -> None:
    """Refuse before anything is trained what the disk cannot hold.

    What stays, and what trainings under way need besides.
    """
    largest = max(bytes_on_disk(arm.config) for arm in settled.arms)
    there = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    check_disk(
        folder,
        max(bytes_kept(settled) + jobs * largest - there, 0),
        'free some space, or set keep = "none" or a larger checkpoint_every',
    )


def begin(writer: RunWriter, settled: Study, config: Any) -> None:
    """What run.json says of a study.

    A first piece, so that an interrupted study is never taken for one that left nothing.
    """
    from moescope.decoder.routers import router_class

    told = {
        "reference": settled.reference,
        "references": settled.references,
        "seeds": list(settled.seeds),
        "base": settled.as_dict()["base"],
        "claims_significance": settled.claims,
        "arms": [
            {
                "name": arm.name,
                "question": arm.question,
                "overrides": arm.overrides,
                "axes": arm.axes,
                "router_facts": router_class(arm.config.model.router).facts(arm.config.model),
                "trainings": {str(seed): f"{TRAININGS}/{arm.training_name(seed)}" for seed in settled.seeds},
            }
            for arm in settled.arms
        ],
    }
    asked = (
        {}
        if config is None
        else {"asked": {"config": str(config) if isinstance(config, str | Path) else None}}
    )
    taken = [piece for piece in writer.done_tasks() if piece != "study"]
    writer.save_info(**told, **asked, checkpoints=[], tasks_resumed=len(taken))
    if "study" not in writer.done_tasks():
        writer.flush_task("study", {}, {})


def holds_study(folder: Path) -> bool:
    """Whether an earlier study is in the folder; one whose run.json is damaged is told by its trainings."""
    try:
        return (read_run_json(folder) or {}).get("verb") == "study"
    except DamagedRun:
        return (folder / TRAININGS).is_dir()


def clear_study(folder: Path) -> None:
    """Remove the trainings and the text of an earlier study in the folder.

    And nothing that somebody else put there.
    """
    for run in (folder / TRAININGS).glob("*-seed-*/run.json"):
        if (read_run_json(run.parent) or {}).get("verb") == "train":
            shutil.rmtree(run.parent)
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


# --- trainings


def workers(engine: str, address: str | None, device: str, jobs: int) -> AbstractContextManager[Any]:
    """One after the other here, or in processes.

    Torch's random numbers belong to a process, so trainings are never threads of one.
    """
    if engine == "local":
        return nullcontext(LocalEngine(device) if jobs == 1 else ProcessEngine(device, jobs))
    return open_engine(engine, address, device)


def train_all(
    writer: RunWriter, settled: Study, corpus: str, engine: AbstractContextManager[Any], quiet: bool
) -> None:
    """Train and measure whatever no earlier attempt finished.

    Each is on disk as soon as it is done, written by this process alone.
    """
    pieces = [
        TrainingPiece(
            writer.path.resolve(),
            arm.training_name(seed),
            arm.name,
            seed,
            arm.question,
            arm.of_seed(seed),
            corpus,
        )
        for arm, seed in settled.trainings
    ]
    finished = writer.done_tasks()
    left = [piece for piece in pieces if piece.name not in finished]
    for piece in pieces:
        if piece.name in finished:  # it may have been measured, but not yet cleared away
            prune(piece.folder, settled.keep)
    write_so_far(writer, settled)
    if not left:
        return
    total = sum(piece.config.train.steps for piece in pieces)
    done = total - sum(piece.config.train.steps for piece in left)
    with progress(total, done, "steps", quiet) as advance, engine as working:
        writer.save_info(engine=working.name, device=working.device, jobs=getattr(working, "jobs", 1))
        work = functools.partial(train_piece, working.device)
        for piece, measured in working.run(
            work, left, lambda piece: advance(f"{piece.arm} seed {piece.seed}")
        ):
            writer.flush_task(piece.name, measured.frames, {**piece.keys, "status": measured.status})
            prune(piece.folder, settled.keep)
            write_so_far(writer, settled)


def write_so_far(writer: RunWriter, settled: Study) -> None:
    """Bring all tables to disk as they are now: a study can be read, and reported on, before it is done."""
    frames = tables_so_far(writer, settled)
    for name, frame in frames.items():
        write_table(name, frame, writer.path / f"{name}.parquet")
    writer.save_info(warnings=warnings_of(settled, frames["study_runs"]))


def tables_so_far(writer: RunWriter, settled: Study) -> dict[str, pd.DataFrame]:
    from moescope.lab.study_statistics import compare

    frames = {table: joined(writer, table) for table in PIECES}
    frames["study_runs"] = with_not_run(frames["study_runs"], settled)
    frames["study_comparisons"] = compare(frames["study_runs"], settled.reference, settled.references)
    return frames


def joined(writer: RunWriter, table: str) -> pd.DataFrame:
    """One table from all trainings so far, without rows where none has written any."""
    import pandas as pd

    if writer.has(table):
        return writer.joined(table)
    return pd.DataFrame(columns=list(TABLES[table].columns))


def with_not_run(runs: pd.DataFrame, settled: Study) -> pd.DataFrame:
    """The table with a row for every training that has none yet."""
    import pandas as pd

    there = set(zip(runs["arm"], runs["seed"], strict=True))
    rest = [
        {"arm": arm.name, "seed": seed, "question": arm.question, "status": NOT_RUN, **costs(arm.config)}
        for arm, seed in settled.trainings
        if (arm.name, seed) not in there
    ]
    return pd.DataFrame([*runs.to_dict("records"), *rest], columns=runs.columns) if rest else runs


# --- when all are trained


def take_overhead(writer: RunWriter, settled: Study, device: str) -> None:
    """What each part of the study's routers costs at its sizes, timed when nothing else runs."""
    import torch

    from moescope.lab.overhead import overhead

    if "overhead" in writer.done_tasks():
        return
    place = device if device != "auto" else choose_device("auto")
    train = settled.base.train
    most = TIMED_TOKENS if place.startswith("cuda") else TIMED_TOKENS_ON_CPU
    tokens = min(train.batch_size // train.micro_batches * train.sequence_length, most)
    found = overhead(
        one_arm_a_router(settled),
        tokens,
        place,
        torch.bfloat16 if train.dtype == "bfloat16" else torch.float32,
    )
    writer.flush_task("overhead", {"overhead": found}, {"tokens": tokens, "device": place})


def one_arm_a_router(settled: Study) -> dict[str, ModelConfig]:
    """The arms whose parts are timed: one a router, and every ablation.

    The reference, which the others are read beside, for its own.
    """
    configs, seen = {}, set()
    for arm in sorted(settled.arms, key=lambda arm: arm.name != settled.reference):
        model = arm.config.model
        kind = (
            model.router,
            repr(sorted(model.router_options.items())) if arm.question == "ablation" else "",
        )
        if kind not in seen:
            seen.add(kind)
            configs[arm.name] = model
    return configs


def warnings_of(settled: Study, runs: pd.DataFrame) -> list[str]:
    found = []
    if not settled.claims:
        found.append(f"{len(settled.seeds)} seeds: fewer than five, so no significance is claimed")
    failed = runs[runs["status"] == "failed"]
    for row in failed.itertuples():
        found.append(f"{row.arm} seed {row.seed} failed: {row.message}")
    if runs.loc[runs["status"] == "done", "noise_low"].isna().any():
        found.append("evaluation noise is left out: fewer than 20 validation documents; give more text")
    return found
