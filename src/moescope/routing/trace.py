"""trace: record which experts each token of a text is routed to, while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from moescope.arguments import choose_device, device_warnings, one_of
from moescope.errors import BadInput
from moescope.execution.model_names import (
    DTYPES,
    check_routed,
    checkpoint_identity,
    checkpoint_layer_names,
    short_name,
    step_names,
)
from moescope.execution.texts import Source, sources
from moescope.progress import progress
from moescope.run import Run, RunWriter, default_folder, open_run
from moescope.weights.verb import finished_run, step_numbers

PHASES = ("prefill", "decode", "both")


@dataclass(frozen=True)
class TraceSettings:
    """The options that change a run's numbers."""

    max_tokens: int | None = None
    phase: str = "prefill"
    save_tokens: bool = False
    dtype: str = "auto"
    batch_size: int = 8
    chat_template: bool = False
    seed: int = 0

    @property
    def phases(self) -> tuple[str, ...]:
        return ("prefill", "decode") if self.phase == "both" else (self.phase,)


def trace(
    *models: str | Path,
    text: str | Path | Iterable[str | Path] = (),
    domain: str | Iterable[str] = (),
    token_ids: str | Path | None = None,
    recorded: str | Path | None = None,
    format: str | None = None,
    experts: int | None = None,
    revisions: str | Iterable[str] = (),
    out: str | Path | None = None,
    max_tokens: int | None = None,
    phase: str = "prefill",
    save_tokens: bool = False,
    dtype: str = "auto",
    batch_size: int = 8,
    chat_template: bool = False,
    device: str = "auto",
    seed: int = 0,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run:
    """Record which experts each token is routed to, for one model or for several as steps of one run.

    `text`, `domain` ("name=path") or `token_ids` say what to read; `recorded` with `format` and `experts`
    takes a trace that another tool wrote instead.
    """
    settings = TraceSettings(
        max_tokens,
        one_of("phase", phase, PHASES),
        save_tokens,
        one_of("dtype", dtype, DTYPES),
        batch_size,
        chat_template,
        seed,
    )
    for name, value in (("max_tokens", max_tokens), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise BadInput(f"{name} {value}: must be at least 1")
    if seed < 0:
        raise BadInput(f"seed {seed}: must be at least 0")
    if recorded is not None:
        if text or domain or token_ids or revisions:
            raise BadInput("--recorded replaces the text; give one or the other")
        from moescope.routing.trace_recorded import trace_recorded

        return trace_recorded(models, Path(recorded), format, experts, settings, out, overwrite)
    if format is not None or experts is not None:
        raise BadInput("--format and --experts need --recorded FILE; give it, or leave them out")
    names = step_names(models, revisions)
    for name in names:
        check_routed(name)
    reading = sources(
        [text] if isinstance(text, str | Path) else text,
        [domain] if isinstance(domain, str) else domain,
        token_ids,
    )
    place = choose_device(device)
    steps = sorted(zip(step_numbers([short_name(name) for name in names]), names, strict=True))
    identity = {
        "arguments": {**asdict(settings), "text": [[source.domain, source.identity] for source in reading]},
        "checkpoints": [{"step": number, **checkpoint_identity(name)} for number, name in steps],
    }
    folder = Path(out) if out is not None else default_folder("trace", short_name(names[0]), identity)
    if not overwrite and (done := finished_run(folder, identity)):
        return done
    with open_run(folder, "trace", identity, overwrite) as writer:
        writer.save_info(device=place)
        done_tasks = writer.done_tasks()
        total = settings.max_tokens and settings.max_tokens * len(steps) * len(settings.phases)
        with progress(total, 0, "tokens", quiet) as advance:
            for number, name in steps:
                if task_name(number) not in done_tasks:
                    label = f"step {number}" if len(steps) > 1 else short_name(name)
                    trace_step(writer, number, name, reading, settings, place, partial(advance, label))
        return finish(writer, [number for number, _ in steps], settings, device_warnings(device))


def trace_step(
    writer: RunWriter,
    number: int,
    name: str,
    reading: list[Source],
    settings: TraceSettings,
    device: str,
    advance: Callable[[int], None],
) -> None:
    """Run one model over the text; its tables are on disk before the next model is loaded."""
    from moescope.decoder.saving import is_lab_checkpoint
    from moescope.execution.adapters import find_blocks
    from moescope.execution.documents import read_documents
    from moescope.execution.lab_models import load_traced
    from moescope.execution.models import load_model
    from moescope.routing.collectors import trace_model

    with writer.timed("load"):
        load = load_traced if is_lab_checkpoint(name) else load_model
        traced = load(name, settings.dtype, device)
    if settings.chat_template and not getattr(traced.tokenizer, "chat_template", None):
        raise BadInput(f"{name}: its tokenizer has no chat template; leave --chat-template out")
    if "decode" in settings.phases and traced.two_stacks:
        raise BadInput(f"{name}: an encoder-decoder model is traced in prefill only; leave --phase out")
    domains = [source.domain for source in reading]
    blocks = find_blocks(traced.model)
    shape = [block.layer for block in blocks], [block.n_experts for block in blocks]
    for setup in writer.setups():
        if (setup["layers"], setup["n_experts"]) != shape:
            raise BadInput(
                f"step {number} has other MoE layers or experts than step {setup['step']}; trace each alone"
            )
    names = checkpoint_layer_names(name, {block.layer: block.name for block in blocks})
    stream = writer.path / "parts" / f"{task_name(number)}-tokens.tmp" if settings.save_tokens else None
    with writer.timed("trace"):
        result = trace_model(
            traced,
            domains,
            read_documents(traced, reading, settings.max_tokens, settings.chat_template),
            settings.phases,
            settings.batch_size,
            names,
            number,
            stream,
            advance,
        )
    if not sum(result.corpus.documents):
        raise BadInput("the text holds no token; give a longer one")
    with writer.timed("tables"):
        frames = result.tables(number, settings.seed)
    setup = {"step": number, **result.facts(), "warnings": result.warnings()}
    streamed = {"tokens.parquet": stream} if stream is not None else None
    writer.flush_task(task_name(number), frames, setup, result.arrays(), streamed)
    writer.save_info()


def finish(writer: RunWriter, steps: list[int], settings: TraceSettings, on_device: list[str]) -> Run:
    """Join the tables of all steps, compare the steps with each other, and close the run."""
    from moescope.routing.counts_to_tables import STEP_TABLES
    from moescope.routing.stability import stability_table

    with writer.timed("join"):
        frames = {name: writer.joined(name) for name in STEP_TABLES}
        setups = sorted(writer.setups(), key=lambda setup: setup["step"])
        frames["stability"] = stability_table(
            steps,
            setups,
            lambda step, array: writer.array(task_name(step), array),
            dict(zip(frames["load"]["layer"], frames["load"]["layer_name"], strict=True)),
        )
        if settings.save_tokens:
            writer.join_streamed("tokens")
            frames["token_text"] = writer.joined("token_text").drop_duplicates("token_id")
    warnings = list(dict.fromkeys(warning for setup in setups for warning in setup.pop("warnings")))
    writer.save_info(
        setup=setups, warnings=warnings + on_device, coverage=[setup["coverage"] for setup in setups]
    )
    return writer.finish(frames)


def task_name(step: int) -> str:
    return f"step{step}"
