"""train.

A small MoE language model under a router of one's choice, watched while it learns, scanned and traced when it
is done.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.arguments import choose_device
from moescope.errors import BadInput
from moescope.execution.model_names import checkpoint_identity
from moescope.lab.train_parts import complete
from moescope.lab.train_settings import (
    as_plain,
    bytes_on_disk,
    facts_of,
    settings_warnings,
    settle,
    unfinished,
)
from moescope.lab.train_text import check_texts, keep_validation, read_corpus, text_warnings, vocabulary_of
from moescope.progress import progress, unsaid_alerts
from moescope.run import (
    TRAIN_LOCK,
    Run,
    check_folder,
    default_folder,
    finished_run,
    jsonable,
    now,
    read_run_json,
)
from moescope.storage import check_disk, only_writer

if TYPE_CHECKING:
    from moescope.decoder.model import LabModel
    from moescope.decoder.ranks import Ranks
    from moescope.decoder.vocabulary import Vocabulary
    from moescope.lab.config import LabConfig, TrainConfig
    from moescope.lab.corpus import Corpus
    from moescope.lab.training import Data, Training
    from moescope.routing.monitor_loop import LoopMonitor

PARTS = ("scan", "trace", "validation")  # folders of a training's run, beside its checkpoints
STATE = "training_state.pt"
WINDOWS = 20  # of the Monitor in a training, about


def train(
    config: str | Path | dict[str, Any] | LabConfig | None = None,
    preset: str | None = None,
    router: str | None = None,
    from_: str | Path | None = None,
    out: str | Path | None = None,
    dry_run: bool = False,
    resume: bool = False,
    device: str = "auto",
    seed: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run | dict[str, Any]:
    """Train a model and return the run, with its scan, its trace and its report; with `dry_run` only what it
    would be.

    `config` is a TOML file or what one holds; `preset` what it starts from (nano); `from_` a lab checkpoint
    whose weights come first.
    """
    from moescope.decoder.ranks import process_group

    folder = Path(out) if out is not None else None
    if resume:
        folder, settled, origin = unfinished(folder, config, preset, router, from_, overwrite)
    else:
        settled, origin = (
            settle(config, preset, router, from_, seed),
            None if from_ is None else str(Path(from_).resolve()),
        )
    if dry_run:
        check_texts(settled)
        return facts_of(settled, origin)
    place = choose_device(device)
    with process_group(place) as ranks:
        if place == "cuda":
            place = f"cuda:{ranks.local}"
        check_ranks(settled, ranks)
        corpus = read_corpus(settled)
        identity = {"arguments": {**jsonable(as_plain(settled)), "from": origin}, "corpus": corpus.identity}
        name = (
            Path(config).stem
            if isinstance(config, str | Path)
            else f"{preset or 'nano'}-{settled.model.router}"
        )
        chosen: Path = ranks.broadcast_object(folder or default_folder("train", name, identity))
        vocabulary = vocabulary_of(settled, corpus, origin)
        job = Job(chosen, settled, corpus, vocabulary, identity, origin, place, ranks, quiet)
        with held(chosen) if ranks.first else nullcontext(), unsaid_alerts(quiet):
            done = None if overwrite else finished_run(chosen, identity)
            if not ranks.broadcast_object(done is not None):
                path = str(config) if isinstance(config, str | Path) else None
                asked = (
                    None if resume else {"config": path, "preset": preset, "router": router, "from": origin}
                )
                done = train_in(job, asked, overwrite)
            if ranks.first:
                assert done is not None
                complete(done, settled, corpus.domains, place, quiet)
        ranks.wait()  # the others wait for scan and trace
    return Run.load(chosen)


def held(folder: Path) -> AbstractContextManager[None]:
    """One training at a time, from before anything is cleared until scan and trace are done.

    The run's own lock covers its tables alone.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder}: a file is in the way; give another --out")
    return only_writer(folder, folder / TRAIN_LOCK, "this run", "give another --out")


def check_ranks(config: LabConfig, ranks: Ranks) -> None:
    size = config.train.batch_size // config.train.micro_batches
    if size % ranks.world:
        raise BadInput(
            f"{ranks.world} processes cannot share a micro-batch of {size} rows; make [train] "
            f"batch_size / micro_batches a multiple of {ranks.world}"
        )


# --- training


@dataclass(frozen=True)
class Job:
    """One training, all questions answered."""

    folder: Path
    config: LabConfig
    corpus: Corpus
    vocabulary: Vocabulary
    identity: dict[str, Any]
    origin: str | None  # the checkpoint whose weights come first
    device: str
    ranks: Ranks
    quiet: bool
    data: Data | None = None  # the corpus in rows, where somebody has made them already
    on_step: Callable[[], None] = lambda: (
        None
    )  # called after every step, those of an earlier attempt included


def train_in(job: Job, asked: dict[str, Any] | None, overwrite: bool) -> Run | None:
    """Train to the end, from the last state that is on disk if there is one. Returns the run on the first
    rank, not yet `complete`d.

    `asked` are the user's words; None where a run is resumed, which must then have a state.
    """
    from moescope.lab.training import Training
    from moescope.lab.training_state import load_state
    from moescope.routing.monitor_loop import LoopMonitor

    config, corpus, ranks = job.config, job.corpus, job.ranks
    states = job.folder / "checkpoints"
    if ranks.first:
        check_folder(job.folder, job.identity, overwrite)
        check_room(states, config)
        if overwrite:
            clear_training(job.folder)
    ranks.wait()  # nobody looks for a state before it is settled which there is
    state = None if overwrite else load_state(states)
    if asked is None and state is None:
        raise BadInput(
            f"{job.folder}: stopped before its first checkpoint, so there is nothing to go on "
            "with; give the first command again"
        )
    data = job.data or data_of(config, corpus, job.vocabulary)
    training = Training(config, first_model(config, job.origin, job.device), data, job.device, ranks)
    if state is not None:
        training.restore(state)
    # Measuring the pull on routers goes through a graph twice; compiled backward passes reuse what they are
    # given, and allow one.
    probed = 0 if config.train.compile else config.train.evaluate_every
    monitor = LoopMonitor(
        job.folder, window_of(config.train), gradients_every=probed, overwrite=state is None
    )
    monitor.watch(training.model, training.step, verb="train", identity=job.identity)
    try:
        if monitor.run is not None:
            words = {} if asked is None else {"asked": asked}
            said = [
                *monitor.run.writer.info.get("warnings", []),
                *settings_warnings(config),
                *text_warnings(config, corpus, job.vocabulary),
            ]
            facts = {**about(job, data), "warnings": said, "checkpoints": saved_checkpoints(states)}
            monitor.run.writer.save_info(**facts, **words)
            keep_validation(job.folder / "validation", corpus)
        steps_through(training, monitor, states, job)
        if monitor.run is not None:
            monitor.run.writer.info["checkpoints"] = saved_checkpoints(states)
            monitor.run.writer.info["finished"] = now()
        return monitor.close()
    except BadInput as error:
        monitor.stop(str(error))
        raise
    finally:
        monitor.stop()


def data_of(config: LabConfig, corpus: Corpus, vocabulary: Vocabulary) -> Data:
    """The corpus in rows: all of the training's, and those of validation that evaluations read."""
    from moescope.lab.batches import TokenRows
    from moescope.lab.training import Data

    length, layout = config.train.sequence_length, config.data.layout
    held = TokenRows.of(corpus.validation, vocabulary, length, layout).sample(config.train.evaluation_rows)
    return Data(TokenRows.of(corpus.train, vocabulary, length, layout), held)


def check_room(states: Path, config: LabConfig) -> None:
    """Refuse now what would run out of disk after a day.

    What lies there already is gone on with or replaced.
    """
    there = sum(file.stat().st_size for file in states.rglob("*") if file.is_file())
    place = next(part for part in (states.absolute(), *states.absolute().parents) if part.exists())
    remedy = "raise [train] checkpoint_every, or give --out on a larger disk"
    check_disk(place, max(bytes_on_disk(config) - there, 0), remedy)


def clear_training(folder: Path) -> None:
    """Remove what an earlier training left in the folder beside its tables.

    And nothing that another verb or somebody else put there.
    """
    if (read_run_json(folder) or {}).get("verb") != "train":
        return
    for part in (
        *(Path(item["path"]) for item in saved_checkpoints(folder / "checkpoints")),
        *(folder / name for name in PARTS),
    ):
        shutil.rmtree(part, ignore_errors=True)
    (folder / "checkpoints" / STATE).unlink(missing_ok=True)


def first_model(config: LabConfig, origin: str | None, device: str) -> LabModel:
    """The model as it is before its first step: of the seed, or of a checkpoint."""
    import torch

    from moescope.decoder.model import LabModel, seeded_by_part, unseeded
    from moescope.decoder.saving import load_model

    torch.manual_seed(config.train.seed)
    if origin is not None:
        return load_model(origin, device, config.train.compile)[0]
    paired = config.train.paired_weights
    before = seeded_by_part(config.train.seed) if paired else unseeded
    with torch.device(device):
        model = LabModel(config.model, compile=config.train.compile, before=before)
    if paired:  # what is drawn in training must not depend on what was drawn for the weights either
        torch.manual_seed(config.train.seed)
    return model


def steps_through(training: Training, monitor: LoopMonitor, states: Path, job: Job) -> None:
    from moescope.decoder.saving import save_model

    began, said = time.perf_counter(), "first steps"

    def save(model: LabModel, step: int) -> None:
        nonlocal began
        save_model(model, job.vocabulary, states / f"step-{step}")
        assert monitor.run is not None
        timings = monitor.run.writer.timings  # nobody writes now: tables were brought to disk just before
        timings["train"] = timings.get("train", 0.0) + time.perf_counter() - began
        began = time.perf_counter()
        monitor.run.writer.save_info(checkpoints=saved_checkpoints(states))

    for _ in range(training.step):
        job.on_step()
    quiet = job.quiet or not job.ranks.first
    with progress(training.config.train.steps, training.step, "steps", quiet) as advance:

        def tell(label: str, amount: int) -> None:
            nonlocal said
            said = label or said
            advance(said, amount)
            job.on_step()

        training.run(monitor, states, save, tell)


def about(job: Job, data: Data) -> dict[str, Any]:
    """What run.json says of a training beside its arguments: its size, its text, and what a model without any
    skill would lose.

    Uniform is over all entries that the model's head has, used or not: over them an untrained model spreads.
    """
    from moescope.decoder.routers import router_class
    from moescope.lab.batches import unigram_loss

    counts, size, entries = facts_of(job.config), job.vocabulary.size, job.config.model.vocabulary
    return {
        "device": job.device,
        "router_facts": router_class(job.config.model.router).facts(job.config.model),
        "processes": job.ranks.world,
        "parameters_total": counts["parameters_total"],
        "parameters_trainable": counts["parameters_trainable"],
        "layout": counts["layout"],
        "frozen": counts["frozen"],
        "vocabulary_size": size,
        "domains": job.corpus.sizes(),
        "references": {
            "uniform": math.log(entries),
            "unigram": unigram_loss(data.train, data.validation, size),
        },
    }


def saved_checkpoints(states: Path) -> list[dict[str, Any]]:
    found = [
        (int(path.name.removeprefix("step-")), path)
        for path in states.glob("step-*")
        if path.name.removeprefix("step-").isdigit()
    ]
    return [{"step": step, **checkpoint_identity(str(path.resolve()))} for step, path in sorted(found)]


def window_of(train: TrainConfig) -> int:
    """How many steps a point of the Monitor's tables covers: about a twentieth of the training, and a divisor
    of checkpoint_every.

    Tables end at every checkpoint, so that a training can be taken up there; windows of other lengths would
    be cut short by it.
    """
    wanted = max(train.steps / WINDOWS, 1.0)
    divisors = [n for n in range(1, train.checkpoint_every + 1) if train.checkpoint_every % n == 0]
    return min(divisors, key=lambda n: abs(math.log(n / wanted)))
