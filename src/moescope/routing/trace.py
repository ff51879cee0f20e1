"""trace: record which experts each token of a text is routed to, while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moescope.arguments import as_list, choose_device, device_warnings, step_numbers
from moescope.engine import Engine, EngineName, LocalEngine, check_engine, check_jobs, open_engine
from moescope.errors import BadInput
from moescope.execution.model_names import (
    Dtype,
    check_routed,
    check_token_ids,
    checkpoint_identity,
    checkpoint_layer_names,
    short_name,
    step_names,
)
from moescope.execution.texts import ReadSettings, Source, check_not_empty, sources
from moescope.execution.ways import Execution, Way, parse_size
from moescope.progress import progress
from moescope.routing.expert_maps import map_methods
from moescope.routing.figures import FIGURES
from moescope.routing.report import experts, guide, measures, sections, select, strips, summary
from moescope.routing.tables import TRACE_TABLES
from moescope.run import Run, RunWriter, open_run, place_run
from moescope.storage import leftover_name
from moescope.verb import Verb

if TYPE_CHECKING:
    from moescope.execution.documents import Document

Phase = Literal["prefill", "decode", "both"]
Maps = Literal["pca", "tsne", "umap"]
Format = Literal["vllm", "sglang", "llamacpp", "imatrix", "route", "table", "moescope"]


@dataclass(frozen=True)
class TraceSettings(ReadSettings):
    phases: tuple[str, ...] = ("prefill",)
    save_tokens: bool = False
    probe_next: bool = False
    maps: tuple[str, ...] = ("pca",)
    seed: int = 0


def trace(
    *models: str | Path,
    text: str | Path | Iterable[str | Path] = (),
    domain: str | Iterable[str] = (),
    token_ids: str | Path | None = None,
    recorded: str | Path | None = None,
    format: Format | None = None,
    experts: int | None = None,
    revisions: str | Iterable[str] = (),
    out: str | Path | None = None,
    max_tokens: int | None = None,
    phase: Phase = "prefill",
    save_tokens: bool = False,
    probe_next: bool = False,
    maps: Maps = "pca",
    dtype: Dtype = "auto",
    batch_size: int = 8,
    chat_template: bool = False,
    trust_remote_code: bool = False,
    execution: Way = "auto",
    memory: str | None = None,
    device: str = "auto",
    engine: EngineName = "local",
    address: str | None = None,
    jobs: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run:
    """Record which experts each token of a text is routed to.

    Measures load balance, router decisions, co-activation, specialisation by domain and token, and stability
    over checkpoints. Give the same command again to resume an interrupted trace.

    Parameters
    ----------
    *models : MODEL
        Model folder or hub id. Several are the steps of one run.
    phase : PHASE
        prefill reads documents at once, decode token by token.

    Other Parameters
    ----------------
    recorded : FILE
        A trace that another tool wrote, or a table of tokens, instead of running a model.
    format : FORMAT
        Format of the recorded trace; not needed for .csv, .parquet, .npy, .pt and .gguf.
    experts : int >= 1, <= 4096
        Experts per layer of the recorded trace; not needed if a model folder is given.
    revisions : LIST
        Revisions of one hub model, as steps: step1000,step2000.
    save_tokens : bool
        Also store the experts, gates and selection margin of every token.
    probe_next : bool
        With --save-tokens: also ask every MoE layer's router about the state that the one before it got.
    maps : METHOD
        Maps of experts: tsne adds t-SNE, umap also UMAP (slow); both need the extra `maps`.

    Examples
    --------
    >>> run = moescope.trace("allenai/OLMoE-1B-7B-0924", domain=["code=src", "text=docs"])  # doctest: +SKIP
    >>> run.table("load")  # doctest: +SKIP
    """
    text, domain = as_list(text), as_list(domain)
    revisions = revisions if isinstance(revisions, str) else list(revisions)
    given = VERB.settle(locals())
    methods = map_methods(maps)
    memory_bytes = parse_size("--memory", memory)
    check_engine(engine, address, device)
    check_jobs(engine, jobs)
    if recorded is not None:
        if engine != "local":
            raise BadInput("--recorded runs no model, so there is nothing to split; omit --engine ray")
        if text or domain or token_ids or revisions:
            raise BadInput("--recorded replaces the text; give one or the other")
        from moescope.routing.trace_recorded import trace_recorded

        return trace_recorded(VERB, given)
    if format is not None or experts is not None:
        raise BadInput("--format and --experts need --recorded FILE; give it, or leave them out")
    if probe_next and not save_tokens:
        raise BadInput("--probe-next stores what it finds with every token; give --save-tokens too")
    names = step_names(models, revisions)
    for name in names:
        check_routed(name)
    reading = sources(text, domain, token_ids)
    place = choose_device(device) if engine == "local" else device  # on Ray the cluster's devices count
    steps = sorted(zip(step_numbers([short_name(name) for name in names]), names, strict=True))
    texts = [[source.domain, source.identity] for source in reading]
    identity = {
        "arguments": VERB.identity(given, text=texts, domain=[], token_ids=None, revisions=[]),
        "checkpoints": [{"step": number, **checkpoint_identity(name)} for number, name in steps],
    }
    folder, done = place_run(VERB, out, short_name(names[0]), identity, overwrite)
    if done:
        return done
    check_not_empty(reading)
    if token_ids is not None:
        check_token_ids(names, reading)
    phases = ("prefill", "decode") if phase == "both" else (str(phase),)
    reads = (max_tokens, dtype, batch_size, chat_template, trust_remote_code)
    settings = TraceSettings(*reads, phases, save_tokens, probe_next, methods, seed)
    with open_run(folder, VERB, identity, overwrite, VERB.command(given)) as writer:
        how = Execution.of_run(writer, execution, memory_bytes, quiet)
        done_tasks = writer.done_tasks()
        left = [(number, name) for number, name in steps if task_name(number) not in done_tasks]
        with (
            progress(max_tokens and max_tokens * len(steps) * len(phases), 0, "tokens", quiet) as advance,
            open_engine(engine if left else "local", address, place) as workers,
        ):
            writer.save_info(engine=workers.name, device=workers.device)
            for number, name in left:
                label = f"step {number}" if len(steps) > 1 else short_name(name)
                how.on_total = partial(show_total, advance, label, len(steps))
                shown = partial(advance, label)
                trace_step(writer, number, name, reading, settings, workers, jobs, how, shown)
        return finish(writer, [number for number, _ in steps], save_tokens, device_warnings(device))


def show_total(advance: Callable[..., None], label: str, steps: int, tokens: int) -> None:
    """Show the time left as soon as the length of the text is known."""
    advance(label, 0, tokens * steps)


def trace_step(
    writer: RunWriter,
    number: int,
    name: str,
    reading: list[Source],
    settings: TraceSettings,
    workers: Engine,
    jobs: int | None,
    how: Execution,
    advance: Callable[[int], None],
) -> None:
    """Run one model over the text; its tables are on disk before the next model is loaded."""
    from moescope.execution.adapters import find_blocks
    from moescope.execution.documents import read_documents
    from moescope.execution.lab_models import load_any_model, load_skeleton
    from moescope.routing.collectors import trace_model

    dtype, trust = settings.dtype, settings.trust_remote_code
    with writer.timed("load"):
        if isinstance(workers, LocalEngine):
            traced = load_any_model(name, dtype, workers.device, False, trust, how)
        else:
            traced = load_skeleton(name, dtype, False, trust)
    if settings.chat_template and not getattr(traced.tokenizer, "chat_template", None):
        raise BadInput(f"{name}: its tokenizer has no chat template; leave --chat-template out")
    if "decode" in settings.phases and traced.two_stacks:
        raise BadInput(f"{name}: an encoder-decoder model is traced in prefill only; leave --phase out")
    domains = [source.domain for source in reading]
    blocks = find_blocks(traced.model)
    shape = [block.layer for block in blocks], [block.n_experts for block in blocks]
    for earlier in writer.setups():
        if (earlier["layers"], earlier["n_experts"]) != shape:
            raise BadInput(
                f"step {number} has other MoE layers or experts than step {earlier['step']}; trace each alone"
            )
    stream = leftover_name(writer.path / "parts") if settings.save_tokens else None
    tokens, longest = dict.fromkeys(domains, 0), dict.fromkeys(domains, 0)  # in all, of a document

    def measured(documents: Iterable[Document]) -> Iterator[Document]:
        for document in documents:
            tokens[domains[document.domain]] += len(document.ids)
            longest[domains[document.domain]] = max(longest[domains[document.domain]], len(document.ids))
            yield document

    documents = measured(read_documents(traced, reading, settings.max_tokens, settings.chat_template))
    names = checkpoint_layer_names(name, {block.layer: block.name for block in blocks})
    given = (domains, documents, settings.phases, settings.batch_size, names, number, stream)
    with writer.timed("trace"):
        run_parts = None
        if not isinstance(workers, LocalEngine):
            from moescope.execution.workers import ModelRequest, Workers

            request = ModelRequest(name, dtype, trust, prefer_transformers=False)
            run_parts = Workers(workers, jobs, request, how, advance, len(settings.phases)).run
        result = trace_model(traced, *given, advance, settings.probe_next, run_parts)
    if not sum(result.corpus.documents):
        raise BadInput("the text holds no token; give a longer one")
    with writer.timed("tables"):
        frames = result.tables(number, settings.seed, settings.maps)
    setup: dict[str, Any] = {"step": number, **result.facts(), "warnings": result.warnings()}
    if sum(tokens.values()) == settings.max_tokens:  # the text may be longer
        setup["coverage"]["longest"] = longest
    files = {"tokens.parquet": stream} if stream is not None else None
    writer.flush_task(task_name(number), frames, setup, result.arrays(), files)
    writer.save_info()


def finish(writer: RunWriter, steps: list[int], save_tokens: bool, warnings: list[str]) -> Run:
    """Join the tables of all steps, compare the steps with each other, and close the run."""
    from moescope.routing.counts_to_tables import STEP_TABLES
    from moescope.routing.ribbon import ribbon_rows
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
        if save_tokens:
            writer.join_streamed("tokens")
            frames["token_text"] = writer.joined("token_text").drop_duplicates("token_id")
            words = frames["token_text"].set_index("token_id")["token"].to_dict()
            tokens = writer.path / "tokens.parquet"
            frames["ribbon"] = ribbon_rows(tokens, setups, frames["load_totals"], words)
    lines = dict.fromkeys(line for setup in setups for line in setup.pop("warnings"))
    coverage = [setup["coverage"] for setup in setups]
    writer.save_info(setup=setups, warnings=[*lines, *warnings], coverage=coverage)
    return writer.finish(frames)


def task_name(step: int) -> str:
    return f"step{step}"


VERB = Verb(
    "trace",
    trace,
    TRACE_TABLES,
    FIGURES,
    summary,
    sections,
    select,
    guide=guide,
    tab="routing",
    measures=measures,
    strips=strips,
    experts=experts,
    view_label="Step and phase",
    opens_last=True,
    incidental=frozenset({"batch_size", "execution", "memory"}),
)
