"""train: train a small MoE language model with a chosen router, monitor it, then scan and trace it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.arguments import choose_device
from moescope.errors import BadInput
from moescope.execution.model_names import checkpoint_identity
from moescope.lab.config import (
    LabConfig,
    TrainConfig,
    epochs_to_steps,
    largest_key,
    resumed_config,
    settings_warnings,
    settle,
)
from moescope.lab.corpus import (
    Corpus,
    check_texts,
    read_corpus,
    save_validation,
    text_warnings,
    training_vocabulary,
)
from moescope.lab.figures_training import TRAIN_FIGURES
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
    write_json,
    write_table,
)
from moescope.storage import check_disk, only_writer, remove
from moescope.verb import Verb
from moescope.verbs import load_verb
from moescope.weights.verb import scan

if TYPE_CHECKING:
    from moescope.decoder.model import LabModel
    from moescope.decoder.ranks import Ranks
    from moescope.decoder.vocabulary import Vocabulary
    from moescope.lab.existing import ExistingConfig
    from moescope.lab.training import Data, Training
    from moescope.routing.monitor import LoopMonitor

PARTS = ("scan", "trace", "validation")  # folders of a training's run besides its checkpoints
STATE = "training_state.pt"
WINDOWS = 20  # of the Monitor per training, about
SMALL = 20_000_000  # parameters up to which several checkpoints are traced, not only the last
MOST_TRACED = 4  # checkpoints
TRACED_TOKENS = 40_000
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
    out : DIR, default runs/train-NAME-1
        Run folder.
    resume : bool
        Continue the unfinished training in --out, or the newest one in runs/.
    device : DEVICE
        auto, cpu, cuda or cuda:0.

    Other Parameters
    ----------------
    seed : SEED, default the config's
        Seed of weights and data order.
    overwrite : bool
        Replace the run in --out.
    quiet : bool
        Print nothing but errors.

    Examples
    --------
    >>> run = moescope.train(preset="nano", router="loss_free")  # doctest: +SKIP
    >>> run.figure("loss_by_step")  # doctest: +SKIP
    """
    given = dict(locals())
    from moescope.decoder.ranks import process_group

    folder = None if out is None else Path(out)
    if base is not None:
        return train_existing(given)
    if tasks is not None:
        raise BadInput("--tasks is for --base; remove it, or name a base")
    folder, settled, origin = read_settings(config, preset, router, from_, seed, resume, folder, overwrite)
    place = choose_device(device)
    avoid_broken_amx(place, settled.train.dtype == "bfloat16")
    with process_group(place) as ranks:
        if place == "cuda":
            place = f"cuda:{ranks.local}"
        check_ranks(settled, ranks)
        check_memory(settled, place, ranks.world)
        corpus = read_corpus(settled.data)
        vocabulary = training_vocabulary(settled, corpus, origin)
        (settled,) = with_steps([settled], corpus, vocabulary)
        identity = {"arguments": {**jsonable(asdict(settled)), "from": origin}, "corpus": corpus.identity}
        path = config if isinstance(config, str | Path) else None
        name = f"{preset or 'nano'}-{settled.model.router}" if path is None else Path(path).stem
        folder = Path(ranks.broadcast_object(folder or default_folder("train", name, identity)))
        # a config made in Python is in run.json alone
        command = VERB.command(given if config is path else {"resume": True, "out": folder})
        job = Job(folder, settled, corpus, vocabulary, identity, origin, place, ranks, quiet, command)
        with lock_training(folder) if ranks.first else nullcontext(), unsaid_alerts(quiet):
            run = None if overwrite else finished_run(folder, identity)
            if not ranks.broadcast_object(run is not None):
                run = run_training(job, overwrite, resume)
            if ranks.first:
                assert run is not None
                analyse_lab(run, settled, corpus.domains, place, quiet)
        ranks.wait()  # for scan and trace on the first
    return Run.load(folder)


def train_existing(given: dict[str, Any]) -> Run:
    """train --base: the training of a model that exists, with its scan and trace."""
    from moescope.decoder.ranks import process_group
    from moescope.lab.existing import (
        ExistingJob,
        check_base,
        existing_identity,
        run_existing,
    )
    from moescope.lab.tasks import add_task_results, load_tasks

    keys = ("config", "preset", "router", "from_", "seed", "resume", "base")
    settled = settle_existing(*(given[key] for key in keys))
    name, out, quiet = str(given["base"]), given["out"], given["quiet"]
    place = choose_device(given["device"])
    avoid_broken_amx(place, settled.train.dtype == "bfloat16")
    with process_group(place) as ranks:
        if place == "cuda":
            place = f"cuda:{ranks.local}"
        _, memory = check_base(name, settled, place, ranks.world)
        tasks = load_tasks(given["tasks"]) if ranks.first and given["tasks"] is not None else None
        corpus = read_corpus(settled.data)
        identity = existing_identity(name, settled, corpus)
        folder = Path(out) if out is not None else default_folder("train", Path(name).name, identity)
        folder = Path(ranks.broadcast_object(folder))
        job = ExistingJob(folder, name, settled, corpus, identity, place, ranks, quiet, memory)
        watching = {"verb": VERB, "identity": identity, "command": VERB.command(given)}
        with lock_training(folder) if ranks.first else nullcontext(), unsaid_alerts(quiet):
            run = None if given["overwrite"] else finished_run(folder, identity)
            if not ranks.broadcast_object(run is not None):
                run = run_existing(job, watching, given["overwrite"])
            if ranks.first:
                assert run is not None
                analyse(run, [str((folder / "model").resolve())], corpus.domains, place, quiet)
        ranks.wait()
    if tasks is not None:  # on the first rank; the others need not wait for it
        with lock_training(folder):
            add_task_results(Run.load(folder), name, given["tasks"], tasks, settled.train, place, quiet)
    return Run.load(folder)


def settle_existing(
    config: Any, preset: str | None, router: str | None, from_: Any, seed: int | None, resume: bool, base: Any
) -> ExistingConfig:
    """Return the config of train --base; options that are for models of the lab are errors."""
    from moescope.lab.existing import existing_config, settle_trained

    for flag, value in (("--preset", preset), ("--from", from_)):
        if value is not None:
            raise BadInput(f"{flag} is for models of the lab; remove it, or --base")
    if resume:
        raise BadInput("--base with --resume: an unfinished training goes on when its command is repeated")
    return settle_trained(str(base), existing_config(config, router, seed))


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
    if base is not None:
        from moescope.lab.existing import existing_size

        existing = settle_existing(config, preset, router, from_, seed, resume, base)
        check_texts(existing.data)
        return existing_size(str(base), existing, choose_device(device))
    folder = None if out is None else Path(out)
    _, settled, origin = read_settings(config, preset, router, from_, seed, resume, folder)
    check_texts(settled.data)
    if settled.train.epochs:
        corpus = read_corpus(settled.data)
        (settled,) = with_steps([settled], corpus, training_vocabulary(settled, corpus, origin))
    return {**training_size(settled), "from": origin}


def read_settings(
    config: str | Path | dict[str, Any] | LabConfig | None,
    preset: str | None,
    router: str | None,
    from_: str | Path | None,
    seed: int | None,
    resume: bool,
    folder: Path | None,
    overwrite: bool = False,
) -> tuple[Path | None, LabConfig, str | None]:
    """Return folder, config and origin of a training: of the run to resume, or as the arguments say."""
    if resume:
        others = overwrite or any(value is not None for value in (config, preset, router, from_, seed))
        return resumed_config(folder, others)
    origin = None if from_ is None else str(Path(from_).resolve())
    return folder, settle(config, preset, router, from_, seed), origin


def training_size(config: LabConfig) -> dict[str, Any]:
    """Return parameters, tokens and warnings of a training, counted on the meta device."""
    from moescope.decoder.model import parameter_counts
    from moescope.decoder.saving import layout_of

    counts, train = parameter_counts(config.model), config.train
    tokens_per_step = train.batch_size * train.sequence_length
    return {
        "router": config.model.router,
        "parameters_total": counts.total,
        "parameters_trainable": counts.trainable,
        "layout": layout_of(config.model),
        "frozen": describe_frozen(config),
        "warnings": settings_warnings(config.train),
        "steps": train.steps,
        "tokens_per_step": tokens_per_step,
        "tokens": train.steps * tokens_per_step,
        "config": jsonable(asdict(config)),
    }


def size_lines(size: dict[str, Any]) -> list[str]:
    """Return the lines that --dry-run prints."""
    steps = f"{size['steps']:,} steps of {size['tokens_per_step']:,} tokens: {size['tokens']:,} tokens"
    if "base" in size:
        return [
            f"base {size['base']}, router {size['router']}; trained: {size['trained']}",
            f"parameters: {size['parameters_total']:,}, without those of a new router",
            size["memory"],
            steps,
            *(f"warning: {warning}" for warning in size["warnings"]),
        ]
    return [
        f"router {size['router']}, saved in the layout {size['layout']}",
        *([f"starts from {size['from']} with its model and vocabulary"] if size["from"] else []),
        f"parameters: {size['parameters_total']:,} in total, {size['parameters_trainable']:,} trained",
        *([size["frozen"]] if size["frozen"] else []),
        steps,
        *(f"warning: {warning}" for warning in size["warnings"]),
    ]


def describe_frozen(config: LabConfig) -> str | None:
    """Return which weights are frozen; also that none are where the router expects frozen experts."""
    from moescope.decoder.routers import router_class

    if config.model.frozen_experts:
        return "frozen: the experts keep their initial weights"
    if router_class(config.model.router).expects_frozen_experts:
        return (
            "frozen: nothing; SoME's experts are meant to be frozen: set [model] frozen_experts = true, "
            "or use a preset of block some"
        )
    return None


def check_ranks(config: LabConfig, ranks: Ranks) -> None:
    size = config.train.batch_size // config.train.micro_batches
    if size % ranks.world:
        raise BadInput(
            f"{ranks.world} processes cannot share a micro-batch of {size} rows; make [train] "
            f"batch_size / micro_batches a multiple of {ranks.world}"
        )


def lock_training(folder: Path) -> AbstractContextManager[None]:
    """Lock the folder until scan and trace are done; a Run's own lock covers its tables only."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder}: a file of this name exists; pass another --out")
    return only_writer(folder, folder / TRAIN_LOCK, "this run", "pass another --out")


# --- training


@dataclass(frozen=True)
class Job:
    """One training with all its settings."""

    folder: Path
    config: LabConfig
    corpus: Corpus
    vocabulary: Vocabulary
    identity: dict[str, Any]
    origin: str | None  # the checkpoint to start from
    device: str
    ranks: Ranks
    quiet: bool
    command: str  # that makes the run again
    data: Data | None = None  # the corpus as rows, where they exist already
    on_step: Callable[[], None] = lambda: None  # called after every step, resumed ones included


def run_training(job: Job, overwrite: bool = False, resume: bool = False) -> Run | None:
    """Train to the end, from the last saved state if there is one; return the run on the first rank.

    With `resume` there must be a saved state.
    """
    from moescope.lab.batches import unigram_loss
    from moescope.lab.training import Training
    from moescope.lab.training_state import load_state
    from moescope.routing.monitor import LoopMonitor

    config, corpus, ranks = job.config, job.corpus, job.ranks
    states = job.folder / "checkpoints"
    if ranks.first:
        check_folder(job.folder, job.identity, overwrite)
        check_space(states, config)
        if overwrite:
            clear_training(job.folder)
    ranks.wait()  # until the folder is checked and cleared
    state = None if overwrite else load_state(states)
    if resume and state is None:
        raise BadInput(
            f"{job.folder}: stopped before its first checkpoint, so there is nothing to resume; repeat the "
            "first command"
        )
    data = job.data or make_data(config, corpus, job.vocabulary)
    unigram = unigram_loss(data.train, data.validation, job.vocabulary.size)
    model = initial_model(config, job.origin, job.device)
    training = Training(config, model, data, job.device, ranks, unigram=unigram)
    if state is not None:
        training.restore(state)
    # Gradient norms need a second backward pass, which compiled graphs do not allow.
    gradients_every = 0 if config.train.compile else config.train.evaluate_every
    monitor = LoopMonitor(
        job.folder, window_length(config.train), gradients_every=gradients_every, overwrite=state is None
    )
    monitor.watch(training.model, training.step, verb=VERB, identity=job.identity, command=job.command)
    try:
        if monitor.run is not None:
            warnings = [
                *monitor.run.writer.info.get("warnings", []),
                *settings_warnings(config.train),
                *text_warnings(config, corpus, job.vocabulary),
            ]
            checkpoints = saved_checkpoints(states)
            monitor.run.writer.save_info(**run_facts(job), warnings=warnings, checkpoints=checkpoints)
            save_validation(job.folder / "validation", corpus)
        run_steps(training, monitor, states, job)
        if monitor.run is not None:
            monitor.run.writer.info["checkpoints"] = saved_checkpoints(states)
            monitor.run.writer.info["finished"] = now()
        return monitor.close()
    except BadInput as error:
        monitor.stop(str(error))
        raise
    finally:
        monitor.stop()


def make_data(config: LabConfig, corpus: Corpus, vocabulary: Vocabulary) -> Data:
    """Return the corpus as rows: all training rows, and the validation rows for evaluations."""
    from moescope.lab.batches import TokenRows
    from moescope.lab.training import Data

    length, layout = config.train.sequence_length, config.data.layout
    held_out = TokenRows.of(corpus.validation, vocabulary, length, layout)
    rows = held_out.sample(config.train.evaluation_rows)
    return Data(TokenRows.of(corpus.train, vocabulary, length, layout), rows)


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


def check_memory(config: LabConfig, device: str, processes: int = 1) -> None:
    """Reject a training that cannot fit the device, before anything is built."""
    from moescope.lab.cost import memory_of, training_bytes

    train = config.train
    tokens = train.batch_size * train.sequence_length // train.micro_batches // processes
    needed = training_bytes(config.model, tokens) // (processes if train.parallel == "fsdp" else 1)
    if needed > memory_of(device):
        raise BadInput(
            f"this training needs at least {needed / 1e9:,.1f} GB of memory, {device} has "
            f"{memory_of(device) / 1e9:,.1f}; lower {largest_key(config)}, or use a larger device"
        )


def check_space(states: Path, config: LabConfig) -> None:
    """Reject a training that would fill the disk; existing files are resumed from or replaced."""
    existing = sum(file.stat().st_size for file in states.rglob("*") if file.is_file())
    place = next(part for part in (states.absolute(), *states.absolute().parents) if part.exists())
    remedy = "raise [train] checkpoint_every, or pass --out on a larger disk"
    check_disk(place, max(bytes_on_disk(config) - existing, 0), remedy)


def clear_training(folder: Path) -> None:
    """Remove checkpoints, state and parts of an earlier training, and nothing else."""
    if (read_run_json(folder) or {}).get("verb") != "train":
        return
    checkpoints = [Path(item["path"]) for item in saved_checkpoints(folder / "checkpoints")]
    if (state := folder / "checkpoints" / STATE).exists():
        remove(state)  # first: without it the training starts over, should this process be killed
    mark_unfinished(folder)
    for part in (*checkpoints, *(folder / name for name in PARTS)):
        if part.exists():
            remove(part)


def initial_model(config: LabConfig, origin: str | None, device: str) -> LabModel:
    """Return the model before its first step: from the seed, or from a checkpoint."""
    import torch

    from moescope.decoder.model import LabModel, seeded_by_part, unseeded
    from moescope.decoder.saving import load_model

    train = config.train
    torch.manual_seed(train.seed)
    if origin is not None:
        model = load_model(origin, device, train.compile)[0]
        model.trained_length = max(model.trained_length, train.sequence_length)
        return model
    before = seeded_by_part(train.seed) if train.paired_weights else unseeded
    with torch.device(device):
        model = LabModel(config.model, compile=train.compile, before=before)
    model.trained_length = train.sequence_length
    if train.paired_weights:  # draws in training must not depend on the draws for the weights
        torch.manual_seed(train.seed)
    return model


def run_steps(training: Training, monitor: LoopMonitor, states: Path, job: Job) -> None:
    from moescope.decoder.saving import save_model
    from moescope.lab.training_state import checkpoint_of

    began, status = time.perf_counter(), "first steps"

    def save(model: LabModel, step: int) -> None:
        nonlocal began
        save_model(model, job.vocabulary, checkpoint_of(states, step))
        assert monitor.run is not None
        timings = monitor.run.writer.timings  # no concurrent writer: tables were just flushed
        timings["train"] = timings.get("train", 0.0) + time.perf_counter() - began
        began = time.perf_counter()
        monitor.run.writer.save_info(checkpoints=saved_checkpoints(states))

    for _ in range(training.step):
        job.on_step()
    quiet = job.quiet or not job.ranks.first
    steps = training.config.train.steps
    with progress(steps, training.step, "steps", quiet, line_per_label=False) as advance:

        def show(label: str, amount: int) -> None:
            nonlocal status
            status = label or status
            advance(status, amount)
            job.on_step()

        training.run(monitor, states, save, show)


def run_facts(job: Job) -> dict[str, Any]:
    """Return run.json's facts about a training: its size, its text and its router."""
    from moescope.decoder.routers import router_class

    model, size = job.config.model, training_size(job.config)
    return {
        "device": job.device,
        "processes": job.ranks.world,
        **{fact: size[fact] for fact in ("parameters_total", "parameters_trainable", "layout", "frozen")},
        "router_facts": router_class(model.router).facts(model),
        "vocabulary_size": job.vocabulary.size,
        "domains": job.corpus.sizes(),
    }


def saved_checkpoints(states: Path) -> list[dict[str, Any]]:
    """Return step, path and identity of every checkpoint in the folder, in order of steps."""
    steps = {path: path.name.removeprefix("step-") for path in states.glob("step-*")}
    numbered = sorted((int(step), path) for path, step in steps.items() if step.isdecimal())
    return [{"step": step, **checkpoint_identity(str(path.resolve()))} for step, path in numbered]


def window_length(train: TrainConfig) -> int:
    """Return the steps per window of the Monitor: about 1/20 of the training, a divisor of checkpoint_every.

    Tables end at every checkpoint so that a training can resume there; other windows would be cut short.
    """
    wanted = max(train.steps / WINDOWS, 1.0)
    every = train.checkpoint_every
    small = [n for n in range(1, math.isqrt(every) + 1) if every % n == 0]
    return min(sorted({*small, *(every // n for n in small)}), key=lambda n: abs(math.log(n / wanted)))


# --- after the last step


def analyse_lab(run: Run, config: LabConfig, domains: tuple[str, ...], device: str, quiet: bool) -> None:
    """Scan and trace the checkpoints of a lab model, and look at its keys where it has any."""
    from moescope.decoder.routers import router_class
    from moescope.decoder.saving import load_model
    from moescope.lab.some_keys import key_tables

    router = router_class(config.model.router)
    chosen = traced_checkpoints(run.info["checkpoints"], run.info["parameters_total"])
    states = (run.path / "checkpoints").resolve()  # recomputed: the run may have been moved since
    models = [str(states / Path(item["path"]).name) for item in chosen]
    routed = router.expert_shape(config.model)[0] > 1
    analyse(run, models, domains, device, quiet, routed)
    if routed and router.has_keys:
        model, _ = load_model(models[-1], "cpu")
        for name, frame in key_tables(run, model, chosen[-1]["step"]).items():
            write_table(TRAIN_TABLES[name], frame, run.path / f"{name}.parquet")


def analyse(
    run: Run, models: list[str], domains: tuple[str, ...], device: str, quiet: bool, routed: bool = True
) -> None:
    """Scan the last of these checkpoints and trace all; each is skipped where it exists.

    Failures are warnings, since the training itself is done; the same command tries again.
    """
    warnings = []

    def attempt(name: str, failure: str, make: Callable[[Path, bool], Run]) -> None:
        try:
            make_part(run.path / name, load_verb(name), make)
        except BadInput as error:
            warnings.append(f"{failure}: {error}")

    def run_scan(out: Path, overwrite: bool) -> Run:
        return scan(models[-1], out=out, device=device, overwrite=overwrite, quiet=quiet)

    def run_trace(out: Path, overwrite: bool) -> Run:
        texts = [f"{domain}={run.path / 'validation' / f'{domain}.jsonl'}" for domain in domains]
        options = {"max_tokens": TRACED_TOKENS, "device": device, "overwrite": overwrite, "quiet": quiet}
        return trace(*models, domain=texts, out=out, **options)  # type: ignore[arg-type]

    attempt("scan", NOT_SCANNED, run_scan)
    if routed:
        attempt("trace", NOT_TRACED, run_trace)
    repeated = (NOT_SCANNED, NOT_TRACED)
    before = [warning for warning in run.info.get("warnings", []) if not warning.startswith(repeated)]
    info = {**run.info, "warnings": [*dict.fromkeys([*before, *warnings])]}
    if info != run.info:
        write_json(run.path / "run.json", info)


def make_part(folder: Path, verb: Verb, make: Callable[[Path, bool], Run]) -> Run:
    """Return the scan or trace in a training's folder, recomputed if outdated or damaged.

    Files that moescope did not write stay.
    """
    if folder.is_dir() and not (folder / "run.json").exists():  # it was lost
        clear_run(folder, verb)
    try:
        return make(folder, False)
    except (OtherRun, DamagedRun):
        return make(folder, True)


def traced_checkpoints(saved: list[dict[str, Any]], parameters: int) -> list[dict[str, Any]]:
    """Return the last checkpoint; of a small model up to MOST_TRACED, evenly spaced."""
    if parameters > SMALL:
        return saved[-1:]
    if len(saved) <= MOST_TRACED:
        return saved
    apart = (len(saved) - 1) / (MOST_TRACED - 1)
    return [saved[round(at * apart)] for at in range(MOST_TRACED)]


def config_remedy(name: str) -> str:
    """Where a key of the config is set, for those who give it as an option."""
    from moescope.lab.existing import ExistingConfig

    configs = [vars(LabConfig()), vars(ExistingConfig())]
    tables = dict.fromkeys(
        part for config in configs for part, settings in config.items() if name in vars(settings)
    )
    keys = " or ".join(f"[{part}] {name}" for part in tables)
    return f"set {keys} in a file: moescope train CONFIG.TOML" if tables else ""


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
