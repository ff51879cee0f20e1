"""train: a small MoE language model under a router of one's choice, watched while it learns, scanned and traced when it is done."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.errors import BadInput
from moescope.run import Run, check_folder, default_folder, jsonable, now, read_run_json, write_json
from moescope.workflows.arguments import choose_device
from moescope.workflows.progress import progress
from moescope.workflows.scan import finished_run
from moescope.workflows.texts import Source, sources
from moescope.workflows.trace import checkpoint_identity

if TYPE_CHECKING:
    from moescope.lab.config import LabConfig, ModelConfig, TrainConfig
    from moescope.lab.corpus import Corpus
    from moescope.lab.model import LabModel
    from moescope.lab.ranks import Ranks
    from moescope.lab.training import Data, Training
    from moescope.lab.vocabulary import Vocabulary
    from moescope.routing.monitor import LoopMonitor

SMALL = 20_000_000  # parameters up to which several checkpoints are scanned and traced, and not the last alone
MOST_STEPS_SHOWN = 4
VALIDATION_BYTES = 60_000  # of each domain, kept beside the run for tracing
TRACED_TOKENS = 40_000
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
    """Train a model and return the run, with its scan, its trace and its report; with `dry_run` only what it would be.

    `config` is a TOML file or what one holds; `preset` what it starts from (nano); `from_` a lab checkpoint whose weights come first.
    """
    from moescope.lab.ranks import joined

    folder = Path(out) if out is not None else None
    if resume:
        folder, settled, origin = unfinished(folder, config, preset, router, from_, overwrite)
    else:
        settled, origin = settle(config, preset, router, from_, seed), None if from_ is None else str(Path(from_).resolve())  # fmt: skip
    if dry_run:
        return facts_of(settled)
    place = choose_device(device)
    with joined(place) as ranks:
        if place == "cuda":
            place = f"cuda:{ranks.local}"
        check_ranks(settled, ranks)
        corpus = read_corpus(settled)
        identity = {"arguments": {**jsonable(as_plain(settled)), "from": origin}, "corpus": corpus.identity}
        name = Path(config).stem if isinstance(config, str | Path) else f"{preset or 'nano'}-{settled.model.router}"
        chosen: Path = ranks.told(folder or default_folder("train", name, identity))
        job = Job(chosen, settled, corpus, vocabulary_of(settled, corpus), identity, origin, place, ranks, quiet)
        done = None if overwrite else finished_run(chosen, identity)
        if not ranks.told(done is not None):
            path = str(config) if isinstance(config, str | Path) else None
            asked = None if resume else {"config": path, "preset": preset, "router": router, "from": origin}
            done = train_in(job, asked, overwrite)
        if ranks.first:
            assert done is not None
            complete(done, job)
        ranks.told(None)  # the others wait for scan and trace
    return Run.load(chosen)


# --- what is to be done


def settle(
    config: str | Path | dict[str, Any] | LabConfig | None,
    preset: str | None,
    router: str | None,
    from_: str | Path | None,
    seed: int | None,
) -> LabConfig:
    """The config that all these words come to, checked."""
    from moescope.lab import config as lab

    base = lab.preset(preset) if preset is not None else None
    if isinstance(config, lab.LabConfig):
        settled = config
    elif isinstance(config, dict):
        settled = lab.config_from(config, base)
    elif config is not None:
        settled = lab.read_config(config, base)
    else:
        settled = base or lab.preset("nano")
    if router is not None:
        settled = lab.with_router(settled, router)
    if seed is not None:
        settled = replace(settled, train=replace(settled.train, seed=seed))
    if from_ is not None:
        settled = replace(settled, model=model_from(Path(from_), router))
    lab.check(settled)
    return settled


def model_from(folder: Path, router: str | None) -> ModelConfig:
    from moescope.lab.saving import load_config

    config = load_config(folder)
    if router is not None and router != config.router:
        raise BadInput(f"{folder}: its router is {config.router}; leave --router {router} out, or train from the start")
    return config


def unfinished(
    folder: Path | None, config: Any, preset: str | None, router: str | None, from_: Any, overwrite: bool
) -> tuple[Path, LabConfig, str | None]:
    """The run to be gone on with, and its own config: --resume takes no other."""
    from moescope.lab.config import config_from

    if any(value is not None for value in (config, preset, router, from_)) or overwrite:
        raise BadInput(
            "--resume takes everything from the run itself; give it --out alone, or the same command without it"
        )
    if folder is None:
        found = sorted(Path("runs").glob("train-*/run.json"), key=lambda file: file.stat().st_mtime)
        open_ones = [file.parent for file in found if (read_run_json(file.parent) or {}).get("status") != "done"]
        if not open_ones:
            raise BadInput("--resume: no unfinished training in runs/; give its folder with --out")
        folder = open_ones[-1]
    info = read_run_json(folder)
    if info is None or info["verb"] != "train":
        raise BadInput(f"{folder}: no training there to go on with; give the folder of one with --out")
    arguments = dict(info["arguments"])
    origin = arguments.pop("from", None)
    return folder, config_from(arguments, where=str(folder / "run.json")), origin


def as_plain(config: LabConfig) -> dict[str, Any]:
    from moescope.lab.config import as_dict

    return as_dict(config)


def facts_of(config: LabConfig) -> dict[str, Any]:
    """What a training would be, from the meta device: nothing is allocated or read."""
    from moescope.lab.model import parameter_counts
    from moescope.lab.saving import layout_of

    counts = parameter_counts(config.model)
    train = config.train
    return {
        "router": config.model.router,
        "parameters_total": counts.total,
        "parameters_trainable": counts.trainable,
        "layout": layout_of(config.model),
        "steps": train.steps,
        "tokens_per_step": train.batch_size * train.sequence_length,
        "tokens": train.steps * train.batch_size * train.sequence_length,
        "config": jsonable(as_plain(config)),
    }


def fact_lines(facts: dict[str, Any]) -> list[str]:
    return [
        f"router {facts['router']}, saved in the layout {facts['layout']}",
        f"parameters: {facts['parameters_total']:,} in total, {facts['parameters_trainable']:,} of them trained",
        f"{facts['steps']:,} steps of {facts['tokens_per_step']:,} tokens: {facts['tokens']:,} tokens",
    ]


def check_ranks(config: LabConfig, ranks: Ranks) -> None:
    size = config.train.batch_size // config.train.micro_batches
    if size % ranks.world:
        raise BadInput(f"{ranks.world} processes cannot share a micro-batch of {size} rows; make [train] batch_size / micro_batches a multiple of {ranks.world}")  # fmt: skip


# --- text


def read_corpus(config: LabConfig) -> Corpus:
    from moescope.lab.corpus import BYTES_A_DOMAIN, EMBEDDED, corpus_of, embedded_corpus

    data = config.data
    if not data.text and not data.domains:
        return embedded_corpus(data.max_bytes // len(EMBEDDED) or BYTES_A_DOMAIN, data.validation_share)
    reading = sources(data.text, [f"{name}={path}" for name, path in data.domains.items()], None)
    most = data.max_bytes // len(reading) if data.max_bytes else None
    return corpus_of({source.domain: texts_of(source, most) for source in reading}, data.validation_share)


def texts_of(source: Source, most: int | None) -> Callable[[], list[str]]:
    def read() -> list[str]:
        found, left = [], most
        for content in source.read():
            if left is not None and left <= 0:
                break
            text = content if isinstance(content, str) else "\n".join(str(part.get("content", "")) for part in content if isinstance(part, dict))  # fmt: skip
            found.append(text)
            left = None if left is None else left - len(text.encode())
        return found

    return read


def vocabulary_of(config: LabConfig, corpus: Corpus) -> Vocabulary:
    from moescope.lab.vocabulary import make_vocabulary

    texts = (text for domain in corpus.domains for text in corpus.train[domain])
    made = make_vocabulary(config.data.vocabulary, config.model.vocabulary, texts)
    if made.size > config.model.vocabulary:
        raise BadInput(
            f"[model] vocabulary {config.model.vocabulary}: {config.data.vocabulary} needs {made.size} entries; raise it"
        )
    return made


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


def train_in(job: Job, asked: dict[str, Any] | None, overwrite: bool) -> Run | None:
    """Train to the end, from the last state that is on disk if there is one. Returns the run on the first rank.

    `asked` are the user's words; None where a run is resumed, which must then have a state.
    """
    from moescope.lab.batches import TokenRows
    from moescope.lab.training import Data, Training
    from moescope.lab.training_state import load_state
    from moescope.routing.monitor import LoopMonitor

    config, corpus, ranks = job.config, job.corpus, job.ranks
    states = job.folder / "checkpoints"
    if ranks.first:
        check_folder(job.folder, job.identity, overwrite)
    state = None if overwrite else load_state(states)
    if asked is None and state is None:
        raise BadInput(f"{job.folder}: stopped before its first checkpoint, so there is nothing to go on with; give the first command again")  # fmt: skip
    rows = {side: TokenRows.of(texts, job.vocabulary, config.train.sequence_length) for side, texts in (("train", corpus.train), ("validation", corpus.validation))}  # fmt: skip
    data = Data(rows["train"], rows["validation"].sample(config.train.evaluation_rows))
    training = Training(config, first_model(config, job.origin, job.device), data, job.device, ranks)
    if state is not None:
        training.restore(state)
    monitor = LoopMonitor(
        job.folder, window_of(config.train), gradients_every=config.train.evaluate_every, overwrite=state is None
    )
    monitor.watch(training.model, training.step, verb="train", identity=job.identity)
    try:
        if monitor.run is not None:
            words = {} if asked is None else {"asked": asked}
            monitor.run.writer.save_info(**about(job, data), **words, checkpoints=saved_checkpoints(states))
            keep_validation(job.folder / "validation", corpus)
        steps_through(training, monitor, states, job.vocabulary, job.quiet or not ranks.first)
        if monitor.run is not None:
            monitor.run.writer.info["checkpoints"] = saved_checkpoints(states)
            monitor.run.writer.info["finished"] = now()
        return monitor.close()
    except BadInput as error:
        monitor.stop(str(error))
        raise
    finally:
        monitor.stop()


def first_model(config: LabConfig, origin: str | None, device: str) -> LabModel:
    """The model as it is before its first step: of the seed, or of a checkpoint."""
    import torch

    from moescope.lab.model import LabModel
    from moescope.lab.saving import load_model

    torch.manual_seed(config.train.seed)
    if origin is not None:
        return load_model(origin, device)[0]
    with torch.device(device):
        return LabModel(config.model, compile=config.train.compile)


def steps_through(training: Training, monitor: LoopMonitor, states: Path, vocabulary: Vocabulary, quiet: bool) -> None:
    from moescope.lab.saving import save_model

    began, said = time.perf_counter(), "first steps"

    def save(model: LabModel, step: int) -> None:
        nonlocal began
        save_model(model, vocabulary, states / f"step-{step}")
        assert monitor.run is not None
        timings = monitor.run.writer.timings  # nobody writes now: tables were brought to disk just before
        timings["train"] = timings.get("train", 0.0) + time.perf_counter() - began
        began = time.perf_counter()
        monitor.run.writer.save_info(checkpoints=saved_checkpoints(states))

    with progress(training.config.train.steps, training.step, "steps", quiet) as advance:

        def tell(label: str, amount: int) -> None:
            nonlocal said
            said = label or said
            advance(said, amount)

        training.run(monitor, states, save, tell)


def about(job: Job, data: Data) -> dict[str, Any]:
    """What run.json says of a training beside its arguments: its size, its text, and what a model without any skill would lose."""
    from moescope.lab.batches import unigram_loss

    counts, size = facts_of(job.config), job.vocabulary.size
    return {
        "device": job.device,
        "processes": job.ranks.world,
        "parameters_total": counts["parameters_total"],
        "parameters_trainable": counts["parameters_trainable"],
        "layout": counts["layout"],
        "vocabulary_size": size,
        "domains": job.corpus.sizes(),
        "references": {"uniform": math.log(size), "unigram": unigram_loss(data.train, data.validation, size)},
    }


def saved_checkpoints(states: Path) -> list[dict[str, Any]]:
    found = [(int(path.name.removeprefix("step-")), path) for path in states.glob("step-*") if path.name.removeprefix("step-").isdigit()]  # fmt: skip
    return [{"step": step, **checkpoint_identity(str(path.resolve()))} for step, path in sorted(found)]


def keep_validation(folder: Path, corpus: Corpus) -> None:
    """Some validation documents of each domain, as the JSON lines that `trace` reads."""
    folder.mkdir(exist_ok=True)
    for domain in corpus.domains:
        left, lines = VALIDATION_BYTES, []
        for text in corpus.validation[domain]:
            if left <= 0:
                break
            lines.append(json.dumps({"text": text[:left]}, ensure_ascii=False))
            left -= len(text)
        (folder / f"{domain}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


# --- when it is done


def complete(run: Run, job: Job) -> None:
    """Scan and trace what was trained, and build the report; each is skipped where it is there already."""
    from moescope.workflows.report import report
    from moescope.workflows.scan import scan
    from moescope.workflows.trace import trace

    shown = [item["path"] for item in chosen_checkpoints(run.info["checkpoints"], run.info["parameters_total"])]
    warnings = []
    try:
        scan(shown[-1], out=run.path / "scan", device=job.device, quiet=job.quiet)
    except BadInput as error:
        warnings.append(f"the trained weights were not scanned: {error}")
    texts = [f"{domain}={run.path / 'validation' / f'{domain}.jsonl'}" for domain in job.corpus.domains]
    if job.config.model.router != "dense":
        trace(
            *shown, domain=texts, out=run.path / "trace", max_tokens=TRACED_TOKENS, device=job.device, quiet=job.quiet
        )
    info = {**run.info, "warnings": [*dict.fromkeys([*run.info.get("warnings", []), *warnings])]}
    if info != run.info:
        write_json(run.path / "run.json", info)
    if not (run.path / "report.html").exists():
        report(Run.load(run.path), quiet=job.quiet)


def chosen_checkpoints(saved: list[dict[str, Any]], parameters: int) -> list[dict[str, Any]]:
    """The last one; of a small model some before it too, evenly spread, so that one sees how routing came about."""
    if parameters > SMALL or len(saved) <= MOST_STEPS_SHOWN:
        return saved if parameters <= SMALL else saved[-1:]
    apart = (len(saved) - 1) / (MOST_STEPS_SHOWN - 1)
    return [saved[round(at * apart)] for at in range(MOST_STEPS_SHOWN)]


def window_of(train: TrainConfig) -> int:
    """How many steps a point of the Monitor's tables covers: about a twentieth of the training, and a divisor of checkpoint_every.

    Tables end at every checkpoint, so that a training can be taken up there; windows of other lengths would be cut short by it.
    """
    wanted = max(train.steps / WINDOWS, 1.0)
    divisors = [n for n in range(1, train.checkpoint_every + 1) if train.checkpoint_every % n == 0]
    return min(divisors, key=lambda n: abs(math.log(n / wanted)))
