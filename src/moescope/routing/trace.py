"""trace: which experts real text goes to, counted while the model runs, into a run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.arguments import choose_device, device_warnings, one_of
from moescope.checkpoint.location import find_location, hide_credentials
from moescope.errors import BadInput
from moescope.execution.texts import Content, Source, sources
from moescope.progress import progress
from moescope.run import Run, RunWriter, default_folder, open_run
from moescope.weights.verb import finished_run, step_numbers

if TYPE_CHECKING:
    from moescope.execution.documents import Document
    from moescope.execution.models import TracedModel

PHASES = ("prefill", "decode", "both")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class TraceSettings:
    """What changes a run's numbers."""

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
    """Trace one model's routing on text, or several models' as the steps of one run; or read a trace another
    tool wrote.

    `text`, `domain` ("name=path") and `token_ids` say what to read; `recorded` with `format` and `experts`
    takes a trace instead.
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
            raise BadInput("--recorded takes the place of a text; give one or the other")
        from moescope.routing.trace_recorded import trace_recorded

        return trace_recorded(models, Path(recorded), format, experts, settings, out, overwrite)
    if format is not None or experts is not None:
        raise BadInput("--format and --experts belong to --recorded FILE; without it leave them out")
    named = step_names(models, revisions)
    for name in named:
        check_routed(name)
    reading = sources(
        [text] if isinstance(text, str | Path) else text,
        [domain] if isinstance(domain, str) else domain,
        token_ids,
    )
    place = choose_device(device)
    steps = sorted(zip(step_numbers([short_name(name) for name in named]), named, strict=True))
    identity = {
        "arguments": {**asdict(settings), "text": [[source.domain, source.identity] for source in reading]},
        "checkpoints": [{"step": number, **checkpoint_identity(name)} for number, name in steps],
    }
    folder = Path(out) if out is not None else default_folder("trace", short_name(named[0]), identity)
    if not overwrite and (done := finished_run(folder, identity)):
        return done
    with open_run(folder, "trace", identity, overwrite) as writer:
        writer.save_info(device=place)
        finished = writer.done_tasks()
        with progress(
            settings.max_tokens and settings.max_tokens * len(steps) * len(settings.phases),
            0,
            "tokens",
            quiet,
        ) as advance:
            for number, name in steps:
                if task_name(number) not in finished:
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
    from moescope.execution.lab_models import load_traced
    from moescope.execution.models import load_model
    from moescope.routing.collect import trace_model

    with writer.timed("load"):
        load = load_traced if is_lab_checkpoint(name) else load_model
        traced = load(name, settings.dtype, device)
    if settings.chat_template and not getattr(traced.tokenizer, "chat_template", None):
        raise BadInput(f"{name}: its tokenizer has no chat template; leave --chat-template out")
    if "decode" in settings.phases and traced.two_stacks:
        raise BadInput(f"{name}: an encoder-decoder model is traced in prefill only; leave --phase out")
    domains = [source.domain for source in reading]
    blocks = find_blocks(traced.model)
    check_shape(
        writer.setups(), number, [block.layer for block in blocks], [block.n_experts for block in blocks]
    )
    names = checkpoint_layer_names(name, {block.layer: block.name for block in blocks})
    stream = writer.path / "parts" / f"{task_name(number)}-tokens.tmp" if settings.save_tokens else None
    with writer.timed("trace"):
        result = trace_model(
            traced,
            domains,
            lambda: documents(traced, reading, settings),
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
    writer.flush_task(
        task_name(number),
        frames,
        setup,
        result.arrays(),
        {"tokens.parquet": stream} if stream is not None else None,
    )
    writer.save_info()


def check_shape(setups: list[dict[str, Any]], number: int, layers: list[int], n_experts: list[int]) -> None:
    """Refuse a step of another shape before it runs."""
    for setup in setups:
        if (setup["layers"], setup["n_experts"]) != (layers, n_experts):
            raise BadInput(
                f"step {number} has other MoE layers or experts than step {setup['step']}; trace each alone"
            )


def finish(writer: RunWriter, steps: list[int], settings: TraceSettings, on_device: list[str]) -> Run:
    """Join the steps' tables, compare the steps with each other, and close the run."""
    from moescope.routing.collect import TABLES_OF_A_STEP
    from moescope.routing.compare_steps import stability_table

    with writer.timed("join"):
        frames = {name: writer.joined(name) for name in TABLES_OF_A_STEP}
        setups = sorted(writer.setups(), key=lambda setup: setup["step"])
        frames["stability"] = stability_table(
            steps,
            setups,
            lambda step, array: writer.array(task_name(step), array),
            layer_names_in(frames["load"]),
        )
        if settings.save_tokens:
            writer.join_streamed("tokens")
            frames["token_text"] = writer.joined("token_text").drop_duplicates("token_id")
    warnings = list(dict.fromkeys(warning for setup in setups for warning in setup.pop("warnings")))
    writer.save_info(
        setup=setups, warnings=warnings + on_device, coverage=[setup["coverage"] for setup in setups]
    )
    return writer.finish(frames)


def layer_names_in(load: Any) -> dict[int, str]:
    pairs = load[["layer", "layer_name"]].drop_duplicates()
    return dict(zip(pairs["layer"], pairs["layer_name"], strict=True))


def task_name(step: int) -> str:
    return f"step{step}"


# --- documents


def documents(traced: TracedModel, reading: list[Source], settings: TraceSettings) -> Iterator[Document]:
    """Every document as token ids, domain after domain; each domain gets the same share of --max-tokens."""
    import numpy as np

    from moescope.execution.documents import Document

    number = 0
    for index, source in enumerate(reading):
        left = None if settings.max_tokens is None else quota(settings.max_tokens, len(reading), index)
        for content in source.read():
            if left == 0:
                break
            ids = np.asarray(token_ids_of(traced, content, settings)[:left], dtype=np.int64)
            if len(ids):
                check_ids(ids, traced)
                yield Document(number, index, ids)
                number += 1
                left = None if left is None else left - len(ids)


def quota(tokens: int, domains: int, index: int) -> int:
    """An equal share of the tokens; what does not divide goes to the first domains."""
    return tokens // domains + (index < tokens % domains)


def token_ids_of(traced: TracedModel, content: Content, settings: TraceSettings) -> list[int]:
    if isinstance(content, list) and all(isinstance(part, int) for part in content):
        return content
    if traced.tokenizer is None:
        raise BadInput(f"{traced.name}: no tokenizer beside the model; give token ids with --token-ids FILE")
    if settings.chat_template:
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return list(traced.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
    if isinstance(content, list):
        content = "\n".join(
            str(message.get("content", "")) for message in content if isinstance(message, dict)
        )
    return list(traced.tokenizer(content, verbose=False)["input_ids"])


def check_ids(ids: Any, traced: TracedModel) -> None:
    if ids.min() < 0 or ids.max() >= traced.vocabulary:
        worst = int(ids.max()) if ids.max() >= traced.vocabulary else int(ids.min())
        raise BadInput(
            f"token id {worst}: {traced.name} has {traced.vocabulary} tokens, numbered from 0; "
            "give ids of its own tokenizer"
        )


# --- models and what is known of them before they are loaded


def step_names(models: Sequence[str | Path], revisions: str | Iterable[str]) -> list[str]:
    given = [str(model) for model in models]
    wanted = [part for part in (revisions.split(",") if isinstance(revisions, str) else revisions) if part]
    if not given:
        raise BadInput("no model given; give a model's folder or hub id")
    if wanted:
        if len(given) > 1:
            raise BadInput("--revisions are of one model; give one")
        if Path(given[0]).exists() or "@" in given[0]:
            raise BadInput(
                f"{given[0]}: --revisions are of a hub id such as owner/name; give folders one "
                "by one as steps instead"
            )
        given = [f"{given[0]}@{revision}" for revision in wanted]
    resolved = [str(Path(name).resolve()) if Path(name).exists() else name for name in given]
    for index, name in enumerate(given):
        if resolved[index] in resolved[:index]:
            raise BadInput(f"{name}: given twice; give each step once")
        if "://" in name:
            raise BadInput(
                f"{hide_credentials(name)}: a model to be run cannot be read from a URL; download it "
                "and give its folder"
            )
        if not Path(name).is_dir():
            find_location(name)  # refuses in a second what transformers would look for for half a minute
    return given


def check_routed(name: str) -> None:
    """Refuse a dense model of the lab before anything is loaded."""
    from moescope.decoder.routers import router_class
    from moescope.decoder.saving import is_lab_checkpoint, load_config

    if not is_lab_checkpoint(name):
        return
    config = load_config(Path(name))
    if router_class(config.router).expert_shape(config)[0] == 1:
        raise BadInput(
            f"{name}: nothing is routed in it (router {config.router}, one block a layer), so "
            "there is nothing to trace; "
            "moescope scan shows its spectra"
        )


def short_name(name: str) -> str:
    return Path(name).resolve().name if Path(name).exists() else name.rsplit("/", 1)[-1]


def checkpoint_identity(name: str) -> dict[str, Any]:
    from moescope.checkpoint import open_checkpoint

    try:
        checkpoint = open_checkpoint(name)
    except BadInput:  # weights in another form than safetensors: transformers may still read them
        path, _, revision = name.partition("@")
        return {"path": path, "revision": revision or None, "header_hash": None}
    return {
        "path": checkpoint.address,
        "revision": checkpoint.revision,
        "header_hash": checkpoint.header_hash(),
    }


def checkpoint_layer_names(name: str, in_memory: dict[int, str]) -> dict[int, str]:
    """The blocks' names in the checkpoint, as scan has them.

    As they are in memory where the checkpoint cannot tell.
    """
    from moescope.checkpoint import open_checkpoint
    from moescope.families import read_moe

    try:
        moe = read_moe(open_checkpoint(name))
    except BadInput:
        return in_memory
    on_disk = {number: layer.layer_name for number, layer in moe.layers.items()}
    return on_disk if set(on_disk) == set(in_memory) else in_memory
