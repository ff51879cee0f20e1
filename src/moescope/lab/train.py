"""train: train a small MoE language model with a chosen router, monitor it, then scan and trace it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from moescope.arguments import choose_device
from moescope.errors import BadInput, reject_if
from moescope.execution.model_names import checkpoint_identity
from moescope.lab.config import (
    CONTROL,
    MODEL,
    SMALLER,
    STATE,
    TRAINER,
    UPCYCLED,
    ExistingConfig,
    LabConfig,
    config_from,
    epochs_to_steps,
    settings_warnings,
    settle,
    settle_existing,
)
from moescope.lab.corpus import Corpus, check_texts, read_corpus, save_validation, training_vocabulary
from moescope.lab.figures import TRAIN_FIGURES
from moescope.lab.report_training import experts, guide, overlay, page_title, sections, select, summary
from moescope.lab.tables import TRAIN_TABLES
from moescope.processor import avoid_broken_amx
from moescope.progress import progress, unsaid_alerts
from moescope.routing.report_monitor import MONITOR
from moescope.routing.trace import trace
from moescope.run import (
    TRAIN_LOCK,
    DamagedRun,
    OtherRun,
    Run,
    check_folder,
    clear_run,
    default_folder,
    finished_run,
    jsonable,
    mark_unfinished,
    now,
    read_run_json,
    run_to_resume,
    write_json,
    write_table,
)
from moescope.storage import check_disk, check_inside, only_writer, remove
from moescope.verb import Verb
from moescope.verbs import load_verb
from moescope.weights.verb import scan

if TYPE_CHECKING:
    from moescope.decoder.ranks import Ranks
    from moescope.decoder.vocabulary import Vocabulary
    from moescope.lab.training import Data
    from moescope.routing.monitor import LoopMonitor

PARTS = ("scan", "trace", "validation")  # folders of a training's run besides its checkpoints
SMALL = 20_000_000  # parameters up to which several checkpoints are traced, not only the last
MOST_TRACED = 4  # checkpoints
TRACED_TOKENS = 40_000
SETTINGS = ("config", "preset", "router", "from_", "seed")
NOT_SCANNED = "the trained weights were not scanned"
NOT_TRACED = "the routing of validation text was not traced"


def train(
    config: str | Path | dict[str, Any] | LabConfig | None = None,
    *,
    preset: str | None = None,
    router: str | None = None,
    from_: str | Path | None = None,
    base: str | Path | None = None,
    tasks: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    seed: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run:
    """Train a small MoE language model, then scan and trace it.

    Without text in the config it trains on text from this Python installation. An interrupted training
    continues exactly from its last checkpoint: give the same command again. Several processes:
    torchrun -m moescope train ...

    Parameters
    ----------
    config : CONFIG.TOML, default the preset alone
        TOML with the tables model, data and train; in Python also a dictionary.
    preset : PRESET, default nano
        Defaults of the config: a name such as nano, small or medium; docs/lab.md lists all.
    router : ROUTER, default the preset's
        A router's name, such as topk, loss_free or dense; docs/lab.md lists all.
    from_ : MODEL, default random weights
        Lab checkpoint to start from.
    base : MODEL
        Train routers or experts of this model instead, a checkpoint that transformers loads; a dense one is
        upcycled. The config then has the tables base, data and train; see docs/existing.md.
    tasks : LIST
        With --base: tasks of lm-eval for the base and the result, separated by commas, such as
        hellaswag,arc_easy; also YAML files of tasks, or folders of them (needs the extra `tasks`).
    resume : bool
        Continue the unfinished training in --out, or the newest one in runs/.

    Other Parameters
    ----------------
    seed : SEED >= 0, < 1e18, default the config's
        Seed of weights and data order.

    Examples
    --------
    >>> run = moescope.train(preset="nano", router="loss_free")  # doctest: +SKIP
    >>> run.figure("loss_by_step")  # doctest: +SKIP
    """
    given = VERB.settle(locals())
    from moescope.decoder.ranks import process_group
    from moescope.lab.existing import existing_identity
    from moescope.lab.tasks import add_task_results, load_tasks

    if tasks is not None and base is None:
        raise BadInput("--tasks is for --base; remove it, or name a base")
    folder, settled, origin = read_settings(given)
    place = choose_device(device)
    avoid_broken_amx(place, settled.train.dtype == "bfloat16")
    with process_group(place) as ranks:
        if place == "cuda":
            place = f"cuda:{ranks.local}"
        if (rows := settled.train.batch_size // settled.train.micro_batches) % ranks.world:
            raise BadInput(
                f"{ranks.world} processes cannot share a micro-batch of {rows} rows; make [train] "
                f"batch_size / micro_batches a multiple of {ranks.world}"
            )
        memory = check_memory(settled, place, ranks.world, origin)
        loaded = load_tasks(tasks) if ranks.first and tasks is not None else None
        corpus, vocabulary = read_corpus(settled.data), None
        if isinstance(settled, ExistingConfig):
            identity = existing_identity(str(origin), settled, corpus)
            name = Path(str(origin)).name
        else:
            vocabulary = training_vocabulary(settled, corpus, origin)
            (settled,) = with_steps([settled], corpus, vocabulary)
            identity = {"arguments": {**jsonable(asdict(settled)), "from": origin}, "corpus": corpus.identity}
            of_file = isinstance(config, str | Path)
            name = Path(str(config)).stem if of_file else f"{preset or 'nano'}-{settled.model.router}"
        folder = Path(ranks.broadcast_object(folder or default_folder("train", name, identity)))
        # a config made in Python is in run.json alone
        repeats = base is not None or config is None or isinstance(config, str | Path)
        command = VERB.command(given if repeats else {"resume": True, "out": folder})
        job = Job(
            *(folder, settled, corpus, vocabulary, identity, origin, place, ranks, quiet, command),
            memory=memory,
        )
        with lock_training(folder) if ranks.first else nullcontext(), unsaid_alerts(quiet):
            run = None if overwrite else finished_run(folder, identity)
            if not ranks.broadcast_object(run is not None):
                run = run_training(job, overwrite, resume)
            if ranks.first:
                assert run is not None
                analyse_run(run, settled, corpus.domains, place, quiet)
        ranks.wait()  # for scan and trace on the first
    if loaded is not None:  # on the first rank; the others need not wait for it
        with lock_training(folder):
            add_task_results(Run.load(folder), str(origin), str(tasks), loaded, settled.train, place, quiet)
    return Run.load(folder)


def count_parameters(
    config: str | Path | dict[str, Any] | LabConfig | None = None,
    preset: str | None = None,
    router: str | None = None,
    from_: str | Path | None = None,
    seed: int | None = None,
    resume: bool = False,
    out: str | Path | None = None,
    base: str | Path | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Return parameters, tokens and config of a training without training it; arguments as for `train`.

    Examples
    --------
    >>> moescope.count_parameters(preset="some_a4")["parameters_total"]  # doctest: +SKIP
    """
    _, settled, origin = read_settings(locals())
    check_texts(settled.data)
    if isinstance(settled, LabConfig) and settled.train.epochs:
        corpus = read_corpus(settled.data)
        (settled,) = with_steps([settled], corpus, training_vocabulary(settled, corpus, origin))
    return training_size(settled, origin, device)


def read_settings(
    given: dict[str, Any],
) -> tuple[Path | None, LabConfig | ExistingConfig, str | None]:
    """Return folder, config and origin of a training: of the run to resume, or as the arguments say.

    The origin is the checkpoint to start from, or the base.
    """
    config, preset, router, from_, seed = settings = [given[name] for name in SETTINGS]
    folder, base = None if given["out"] is None else Path(given["out"]), given["base"]
    if base is not None:
        from moescope.lab.existing import settle_trained

        reject_if(preset is not None, "--preset is for models of the lab; remove it, or --base")
        reject_if(from_ is not None, "--from is for models of the lab; remove it, or --base")
        again = "--base with --resume: an unfinished training goes on when its command is repeated"
        reject_if(given["resume"], again)
        return folder, settle_trained(str(base), settle_existing(config, router, seed)), str(base)
    if given["resume"]:
        others = given.get("overwrite") or any(value is not None for value in settings)
        folder, info = run_to_resume(folder, "train", "training", others)
        arguments = dict(info["arguments"])
        origin = arguments.pop("from", None)
        return folder, config_from(arguments, where=str(folder / "run.json")), origin
    origin = None if from_ is None else str(Path(from_).resolve())
    return folder, settle(config, preset, router, from_, seed), origin


def training_size(
    config: LabConfig | ExistingConfig, origin: str | None, device: str = "auto"
) -> dict[str, Any]:
    """Return parameters, tokens and warnings of a training: of the lab counted on the meta device.

    Of a base its headers are read.
    """
    train = config.train
    tokens_per_step = train.batch_size * train.sequence_length
    size: dict[str, Any] = {
        "warnings": settings_warnings(train),
        "steps": train.steps,
        "tokens_per_step": tokens_per_step,
        "tokens": train.steps * tokens_per_step,
        "config": jsonable(asdict(config)),
    }
    if isinstance(config, ExistingConfig):
        from moescope.lab.existing import check_base

        memory = check_memory(config, choose_device(device), 1, origin)
        total = check_base(str(origin), config).total
        of_base = {"router": config.base.router, "trained": config.base.trained, "parameters_total": total}
        return {"base": origin, **of_base, "memory": memory, **size}
    from moescope.decoder.model import parameter_counts
    from moescope.decoder.routers import router_class
    from moescope.decoder.saving import layout_of

    counts, expects = parameter_counts(config.model), router_class(config.model.router).expects_frozen_experts
    nothing = (
        "frozen: nothing; SoME's experts are meant to be frozen: set [model] frozen_experts = true, or use a "
        "preset of block some"
    )
    all_experts = "frozen: the experts keep their initial weights"
    frozen = all_experts if config.model.frozen_experts else nothing if expects else None
    return {
        "router": config.model.router,
        "parameters_total": counts.total,
        "parameters_trainable": counts.trainable,
        "layout": layout_of(config.model),
        "frozen": frozen,
        **size,
        "from": origin,
    }


def size_lines(size: dict[str, Any]) -> list[str]:
    """Return the lines that --dry-run prints."""
    if "base" in size:
        lines = [
            f"base {size['base']}, router {size['router']}; trained: {size['trained']}",
            f"parameters: {size['parameters_total']:,}, without those of a new router",
            size["memory"],
        ]
    else:
        lines = [
            f"router {size['router']}, saved in the layout {size['layout']}",
            *([f"starts from {size['from']} with its model and vocabulary"] if size["from"] else []),
            f"parameters: {size['parameters_total']:,} in total, {size['parameters_trainable']:,} trained",
            *([size["frozen"]] if size["frozen"] else []),
        ]
    return [
        *lines,
        f"{size['steps']:,} steps of {size['tokens_per_step']:,} tokens: {size['tokens']:,} tokens",
        *(f"warning: {warning}" for warning in size["warnings"]),
    ]


def lock_training(folder: Path) -> AbstractContextManager[None]:
    """Lock the folder until scan and trace are done; a Run's own lock covers its tables only."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder}: a file of this name exists; pass another --out")
    return only_writer(folder, folder / TRAIN_LOCK, "this run", "pass another --out")


# --- training


AnyConfig = TypeVar("AnyConfig", bound=LabConfig | ExistingConfig)


@dataclass(frozen=True)
class Job(Generic[AnyConfig]):
    """One training with all its settings."""

    folder: Path
    config: AnyConfig
    corpus: Corpus
    vocabulary: Any  # a base brings its own: None
    identity: dict[str, Any]
    origin: str | None  # the checkpoint to start from, or the base
    device: str
    ranks: Ranks
    quiet: bool
    command: str  # that makes the run again
    data: Data | None = None  # the corpus as rows, where they exist already
    on_step: Callable[[], None] = lambda: None  # called after every step, resumed ones included
    memory: str = ""  # line about the memory that it needs

    @property
    def states(self) -> Path:
        """The folder of a lab model's checkpoints, and of the state to resume from."""
        return self.folder / "checkpoints"

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        return saved_checkpoints(self.states)


def run_training(job: Job[Any], overwrite: bool = False, resume: bool = False) -> Run | None:
    """Train to the end, from the last saved state if there is one; return the run on the first rank.

    With `resume` there must be a saved state.
    """
    config, ranks = job.config, job.ranks
    if ranks.first:
        check_folder(job.folder, job.identity, overwrite)
        check_inside(job.folder / TRAINER / "checkpoint", job.folder)  # transformers removes older ones
        if isinstance(config, LabConfig):  # existing files are resumed from or replaced
            states = job.states.absolute()
            existing = sum(file.stat().st_size for file in states.rglob("*") if file.is_file())
            place = next(part for part in (states, *states.parents) if part.exists())
            remedy = "raise [train] checkpoint_every, or pass --out on a larger disk"
            check_disk(place, max(bytes_on_disk(config) - existing, 0), remedy)
        if overwrite:
            clear_training(job.folder)
        if job.memory and not job.quiet:
            print(job.memory, file=sys.stderr, flush=True)
    ranks.wait()  # until the folder is checked and cleared
    watching = {"verb": VERB, "identity": job.identity, "command": job.command}
    monitor: LoopMonitor
    if isinstance(config, ExistingConfig):
        from moescope.lab import tuning

        monitor, facts, train_all = tuning.prepare(job, watching)
    else:
        from moescope.lab import training

        monitor, facts, train_all = training.prepare(job, watching, overwrite, resume)
        size = training_size(config, job.origin)
        named = ("parameters_total", "parameters_trainable", "layout", "frozen")
        facts |= {name: size[name] for name in named}
    try:
        if ranks.first:
            save_validation(job.folder / "validation", job.corpus)
        if monitor.run is not None:
            writer = monitor.run.writer
            warnings = [
                *writer.info["warnings"],
                *settings_warnings(config.train),
                *facts.pop("warnings", []),
            ]
            facts |= {"device": job.device, "processes": ranks.world, "domains": job.corpus.sizes()}
            writer.save_info(**facts, warnings=warnings)
        quiet = job.quiet or not ranks.first
        with progress(config.train.steps, monitor.now, "steps", quiet, line_per_label=False) as advance:
            train_all(advance)
        if monitor.run is not None:
            monitor.run.writer.info["finished"] = now()
        run = monitor.close()
    except BadInput as error:
        monitor.stop(str(error))
        raise
    finally:
        monitor.stop()
    if ranks.first and isinstance(config, ExistingConfig):  # AdamW's moments are twice the model
        for part in (TRAINER, CONTROL):
            remove(job.folder / part, job.folder)
    return run


def with_steps(configs: Sequence[LabConfig], corpus: Corpus, vocabulary: Vocabulary) -> Sequence[LabConfig]:
    """Return configs of one text, row length and layout with the steps of their epochs."""
    from moescope.lab.batches import TokenRows

    if not any(config.train.epochs for config in configs):
        return configs
    length, layout = configs[0].train.sequence_length, configs[0].data.layout
    rows = TokenRows.of(corpus.train, vocabulary, length, layout).rows
    return [epochs_to_steps(config, rows) for config in configs]


def bytes_on_disk(config: LabConfig) -> int:
    """Return the bytes of all checkpoints and of the saved state, of which two exist for a moment.

    Trained weights are float32, frozen ones of `frozen_dtype` and not in the state; AdamW has two moments per
    trained weight.
    """
    from moescope.decoder.model import parameter_counts

    counts, train = parameter_counts(config.model), config.train
    frozen = (counts.total - counts.trainable) * (2 if config.model.frozen_dtype == "bfloat16" else 4)
    checkpoint = 4 * counts.trainable + frozen
    state = 12 * counts.trainable
    return math.ceil(train.steps / train.checkpoint_every) * checkpoint + 2 * state


def check_memory(
    config: LabConfig | ExistingConfig, device: str, processes: int = 1, origin: str | None = None
) -> str:
    """Reject a training that cannot fit the device, before anything is built.

    Processes share the memory of a CPU. Returns the line that tells the memory of a base, else nothing.
    """
    from moescope.lab.cost import memory_of, training_bytes

    train = config.train
    available = memory_of(device) // (processes if device == "cpu" else 1)
    if isinstance(config, ExistingConfig):
        from moescope.lab.existing import check_base

        size = check_base(str(origin), config)
        needed, line, remedy = size.memory, size.line(device, available), "train less of the model"
    else:
        tokens = train.batch_size * train.sequence_length // train.micro_batches // processes
        needed, line, remedy = training_bytes(config.model, tokens), "", SMALLER
    if needed > available:
        each = " per process" if processes > 1 else ""
        raise BadInput(
            f"this training needs at least {needed / 1e9:,.1f} GB of memory{each}, {device} has "
            f"{available / 1e9:,.1f}; {remedy}, or use a larger device"
        )
    return line


def clear_training(folder: Path) -> None:
    """Remove checkpoints, states and parts of an earlier training, and nothing else."""
    info: dict[str, Any] = {"verb": "train", "arguments": ["base"] * (folder / UPCYCLED).is_dir()}  # damaged
    with suppress(DamagedRun):
        info = read_run_json(folder) or {}
    if info.get("verb") != "train":
        return
    states = folder / "checkpoints"
    remove(states / STATE, folder)  # first: without it a killed process leaves a training that starts over
    mark_unfinished(folder)
    parts = (TRAINER, CONTROL, UPCYCLED, MODEL) if "base" in info.get("arguments", {}) else ()
    for part in (*checkpoint_folders(states).values(), *(folder / name for name in (*parts, *PARTS))):
        remove(part, folder)


def checkpoint_folders(states: Path) -> dict[int, Path]:
    """Return step -> folder, or link to one, of every checkpoint in the folder, in order of steps."""
    steps = {path: path.name.removeprefix("step-") for path in states.glob("step-*")}
    return dict(sorted((int(step), path) for path, step in steps.items() if step.isdecimal()))


def saved_checkpoints(states: Path) -> list[dict[str, Any]]:
    """Return step, path and identity of every checkpoint in the folder, in order of steps."""
    folders = checkpoint_folders(states)
    return [{"step": step, **checkpoint_identity(str(path.resolve()))} for step, path in folders.items()]


# --- after the last step


def analyse_run(
    run: Run, config: LabConfig | ExistingConfig, domains: tuple[str, ...], device: str, quiet: bool
) -> None:
    """Scan and trace the checkpoints of a training, and look at a lab model's keys where it has any."""
    saved, folder, routed, has_keys = run.info["checkpoints"], run.path, True, False
    if isinstance(config, LabConfig):
        from moescope.decoder.routers import router_class

        router, folder = router_class(config.model.router), run.path / "checkpoints"
        saved = traced_checkpoints(saved, run.info["parameters_total"])
        routed = router.expert_shape(config.model)[0] > 1
        has_keys = routed and router.has_keys
    # recomputed: the run may have been moved since
    models = [str((folder / Path(item["path"]).name).resolve()) for item in saved]
    shared: dict[str, Any] = {"device": device, "quiet": quiet}
    parts: dict[str, tuple[str, Callable[..., Run]]] = {
        "scan": (NOT_SCANNED, partial(scan, models[-1], **shared))
    }
    if routed:
        texts = [f"{domain}={run.path / 'validation' / f'{domain}.jsonl'}" for domain in domains]
        shared |= {"domain": texts, "max_tokens": TRACED_TOKENS}
        parts["trace"] = NOT_TRACED, partial(trace, *models, **shared)
    before = run.info.get("warnings", [])
    warnings = [said for said in before if not said.startswith((NOT_SCANNED, NOT_TRACED))]
    for name, (failure, make) in parts.items():
        try:
            make_part(run.path / name, load_verb(name), make)
        except BadInput as error:  # the training itself is done; the same command tries again
            warnings.append(f"{failure}: {error}")
    info = {**run.info, "warnings": [*dict.fromkeys(warnings)]}
    if info != run.info:
        write_json(run.path / "run.json", info)
    if has_keys:
        from moescope.decoder.saving import load_model
        from moescope.lab.trained_routing import key_tables

        model, _ = load_model(models[-1], "cpu")
        for name, frame in key_tables(run, model, saved[-1]["step"]).items():
            write_table(TRAIN_TABLES[name], frame, run.path / f"{name}.parquet")


def make_part(folder: Path, verb: Verb, make: Callable[..., Run]) -> Run:
    """Return the scan or trace in a training's folder, recomputed if outdated or damaged.

    Files that moescope did not write stay.
    """
    if folder.is_dir() and not (folder / "run.json").exists():  # it was lost
        clear_run(folder, verb)
    try:
        return make(out=folder, overwrite=False)
    except (OtherRun, DamagedRun):
        return make(out=folder, overwrite=True)


def traced_checkpoints(saved: list[dict[str, Any]], parameters: int) -> list[dict[str, Any]]:
    """Return the last checkpoint; of a small model up to MOST_TRACED, evenly spaced."""
    if parameters > SMALL:
        return saved[-1:]
    places = np.linspace(0, len(saved) - 1, min(len(saved), MOST_TRACED))
    return [saved[round(at)] for at in places]


def config_remedy(name: str) -> str:
    """Where a key of the config is set, for those who give it as an option."""
    tables = {**vars(ExistingConfig()), **vars(LabConfig())}
    keys = " or ".join(f"[{part}] {name}" for part in tables if hasattr(tables[part], name))
    return f"set {keys} in a file: moescope train CONFIG.TOML" if keys else ""


VERB = Verb(
    "train",
    train,
    tables=TRAIN_TABLES,
    figures=[*TRAIN_FIGURES, *MONITOR.figures],
    summary=summary,
    sections=sections,
    select=select,
    overlay=overlay,
    experts=experts,
    guide=guide,
    tab="training",
    title=page_title,
    parts=("scan", "trace"),
    grows=True,
    continues=True,
    dry_run=count_parameters,
    dry_run_lines=size_lines,
    unknown_option=config_remedy,
)
