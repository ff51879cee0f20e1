"""trace --recorded: a trace that another tool wrote, counted into the same tables as far as it goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moescope.arguments import one_of
from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput
from moescope.execution.documents import Window, fingerprint
from moescope.execution.model_names import checkpoint_identity
from moescope.execution.recorded import READERS, Load, Shape, Stretch, expert_count, find_format, read_trace
from moescope.execution.texts import file_identity
from moescope.families import MoeCheckpoint, read_moe
from moescope.routing.collectors import token_rows
from moescope.routing.counts import SUMS, Counts, LayerCounts
from moescope.routing.counts_to_tables import Corpus, Traced
from moescope.routing.expert_maps import map_methods
from moescope.routing.ribbon import ribbon_rows
from moescope.routing.stability import stability_table
from moescope.routing.tables import TRACE_TABLES
from moescope.routing.token_sample import Sample
from moescope.run import Run, open_run, place_run
from moescope.statistics import BUCKETS
from moescope.storage import atomic_file, check_disk
from moescope.tables import arrow_schema
from moescope.types import Routing, Tokens
from moescope.verb import Verb

IDENTITY = ("save_tokens", "recorded", "format", "experts", "maps", "seed")
MOST_EXPERTS = 4096
MOST_PAIRS = 20_000_000  # of experts, all layers together: 2 GB as a table
MOST_CELLS = 500_000  # layers x experts x domains: 2 GB of counts by group of documents
AT_ONCE = 2**23  # tokens x experts counted together
OF_A_MODEL_RUN = (
    "max_tokens",
    "phase",
    "dtype",
    "probe_next",
    "batch_size",
    "chat_template",
    "trust_remote_code",
    "execution",
    "memory",
)


def trace_recorded(verb: Verb, given: dict[str, Any]) -> Run:
    """Write the run of one recorded trace. A model supplies layer names and k; it is not run.

    `given` are the options of trace.
    """
    models, file, format = given["models"], Path(given["recorded"]), given["format"]
    one_of("format", format or "vllm", tuple(READERS))
    for option in verb.options:
        if option.name in OF_A_MODEL_RUN and given[option.name] != option.default:
            raise BadInput(f"{option.flag} applies to a model run, not to --recorded; leave it out")
    if len(models) > 1:
        raise BadInput(f"--recorded takes at most one model, {len(models)} given; use one run per trace")
    check_place(file)
    moe = read_moe(open_checkpoint(models[0])) if models else None
    shape = trace_shape(moe, given["experts"] or (None if moe else expert_count(file)), file)
    arguments = verb.identity(given, recorded=file_identity(file))
    identity: dict[str, Any] = {
        "arguments": {name: arguments[name] for name in IDENTITY},
        "checkpoints": [{"step": 0, **checkpoint_identity(str(models[0]))}] if moe else [],
    }
    name = moe.checkpoint.name if moe else file.name.partition(".")[0]
    folder, done = place_run(verb, given["out"], name, identity, given["overwrite"])
    if done:
        return done
    with open_run(folder, verb, identity, given["overwrite"], verb.command(given)) as writer:
        with writer.timed("trace"):
            parts = list(read_trace(file, format or find_format(file), shape))
            stretches = same_shape([part for part in parts if isinstance(part, Stretch)])
            loads, lines = [part for part in parts if isinstance(part, Load)], list[str]()
            traced = count_load(loads[0], shape) if loads else count_trace(stretches, shape, lines)
            traced.model_type = "recorded trace"
            if moe is not None:
                traced.model_type = str((moe.checkpoint.config or {}).get("model_type") or traced.model_type)
                if traced.layer_names.keys() <= moe.layers.keys():
                    traced.layer_names = {number: layer.layer_name for number, layer in moe.layers.items()}
        if not traced.counts:
            raise BadInput(f"{file}: no token in it; give a trace with tokens")
        with writer.timed("tables"):
            frames = traced.tables(0, given["seed"], map_methods(given["maps"]))
            frames["stability"] = stability_table([0], [], lambda step, name: None, {})
        if given["save_tokens"]:
            if not traced.has_tokens:
                raise BadInput(f"{file}: holds counts, no single tokens; leave --save-tokens out")
            with writer.timed("tokens"):
                tokens = writer.path / "tokens.parquet"
                write_tokens(tokens, stretches, traced.layer_names, shape)
                frames["ribbon"] = ribbon_rows(tokens, [traced.facts()], frames["load_totals"], {})
        setup = {"step": 0, **traced.facts()}
        held = {
            "decision metrics (a trace holds no logits)": False,
            "gate weight": traced.has_gates,
            "vocabulary": traced.probe is not None,
            "co-activation and order of tokens": traced.has_tokens,
        }
        absent = [what for what, there in held.items() if not there]
        writer.save_info(
            counts_only=not traced.has_tokens,
            device="cpu",
            setup=[setup],
            coverage=[setup["coverage"]],
            warnings=[*lines, *traced.warnings(), f"not in this trace: {', '.join(absent)}"],
        )
        return writer.finish(frames)


def check_place(file: Path) -> None:
    """Reject what is no file; of a run folder, name the table in it that can be read."""
    tokens = file / "tokens.parquet"
    if tokens.exists():
        raise BadInput(f"{file}: a run folder; give its table of tokens: --recorded {tokens}")
    if (file / "run.json").exists():
        raise BadInput(f"{file}: a run folder without tokens; make it again with trace --save-tokens")
    if not file.is_file():
        kind = "a folder" if file.is_dir() else "no such file"
        raise BadInput(f"{file}: {kind}; give the recorded trace")


def trace_shape(moe: MoeCheckpoint | None, experts: int | None, file: Path) -> Shape:
    """Return what --experts and the model's config say about the trace's shape."""
    if moe is None:
        if experts is None or experts < 1:
            raise BadInput(
                f"--recorded {file}: give the experts per layer with --experts N, or the model's folder; a "
                "trace does not contain it"
            )
        if experts > MOST_EXPERTS:
            raise BadInput(f"--experts {experts}: at most {MOST_EXPERTS} are counted pair by pair")
        return Shape(experts)
    known = {number: layer.n_experts for number, layer in moe.layers.items()}
    numbers = sorted(set(known.values()))
    if experts not in (None, *numbers):
        raise BadInput(f"--experts {experts}: {moe.checkpoint.shown} has {', '.join(map(str, numbers))}")
    config = moe.checkpoint.config or {}
    n_layers = config.get("text_config", config).get("num_hidden_layers")
    return Shape(numbers[-1], n_layers, next(iter(moe.layers.values())).top_k, known)


# --- single tokens


def write_tokens(path: Path, stretches: list[Stretch], names: dict[int, str], shape: Shape) -> None:
    """Write the tokens table, one row group per stretch; a layer has rows of the tokens it routed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = arrow_schema(TRACE_TABLES["tokens"])
    with atomic_file(path) as partial, pq.ParquetWriter(partial, schema, compression="zstd") as writer:
        for stretch in stretches:
            rows = routed_rows(stretch, names, shape)
            chosen_LTK: Any = stretch.chosen_TLK[:, [*rows.values()]].transpose(1, 0, 2)
            gates_LTK: Any = None
            if stretch.gates_TLK is not None:  # by falling gate, empty slots last
                gates_LTK = stretch.gates_TLK[:, [*rows.values()]].transpose(1, 0, 2)
                order = np.argsort(np.where(chosen_LTK >= 0, -gates_LTK, np.inf), axis=2, kind="stable")
                chosen_LTK = np.take_along_axis(chosen_LTK, order, axis=2)
                gates_LTK = np.take_along_axis(gates_LTK, order, axis=2)
            routed_LT = (chosen_LTK >= 0).any(2)
            at_layer, at_token = np.nonzero(routed_LT)
            layers = np.array([*rows], dtype=np.int64)[at_layer]
            columns = {
                "step": np.zeros(len(layers), dtype=np.int64),
                "document": np.full(len(layers), stretch.document),
                "position": stretch.start + at_token,
                "layer": layers,
                "layer_name": pa.array([names[layer] for layer in layers.tolist()]),
                "domain": pa.array([stretch.domain] * len(layers)),
                "phase": pa.array([stretch.phase] * len(layers)),
            }
            if stretch.ids_T is not None:
                columns["token_id"] = stretch.ids_T[at_token]
            gates_RK = None if gates_LTK is None else gates_LTK[routed_LT]
            table = token_rows(columns, chosen_LTK[routed_LT], gates_RK)
            check_disk(path.parent, table.nbytes)
            writer.write_table(table)


# --- counting


def count_trace(stretches: list[Stretch], shape: Shape, lines: list[str]) -> Traced:
    """Count a trace; `lines` gets warnings about dense layers, which are skipped, and empty slots.

    Where every token names one expert in all of its k >= 2 slots, nothing was chosen: servers fill dense
    layers with zeros. Without gates the first slot counts as the first choice, as servers write it.
    """
    domains = list(dict.fromkeys(stretch.domain for stretch in stretches))
    main = "prefill" if any(stretch.phase == "prefill" for stretch in stretches) else "decode"
    names = routed_layers(stretches, shape, lines)
    check_size({number: experts_of(number, shape) for number in names}, len(domains))
    tally, contents, domain_of = Counts((len(domains), BUCKETS)), dict[int, int](), dict[int, int]()
    sample, filled = Sample(list(names)), set[tuple[str, int, int, int]]()
    for stretch in stretches:
        ids = stretch.chosen_TLK.reshape(-1).astype(np.int64) if stretch.ids_T is None else stretch.ids_T
        content = contents.setdefault(stretch.document, fingerprint(ids) >> 1)
        domain = domains.index(stretch.domain)
        domain_of.setdefault(stretch.document, domain)
        draw = fingerprint(ids, stretch.start) / 2**64
        window = Window(stretch.document, domain, stretch.start, ids, -1, content, draw)
        rows = routed_rows(stretch, names, shape)
        filled |= {
            (stretch.phase, number, domain, stretch.document)
            for number, row in rows.items()
            if (stretch.chosen_TLK[:, row] >= 0).any()
        }
        for layer in layer_routings(stretch, window, rows, names, shape):
            tally.consume(layer)
        if stretch.phase == main and stretch.ids_T is not None:
            none = np.full(stretch.chosen_TLK[:, 0].shape, -1, dtype=np.int16)
            chosen = [stretch.chosen_TLK[:, rows[number]] if number in rows else none for number in names]
            unknown = np.full(len(ids), -1)
            following = unknown if stretch.apart else np.append(ids[1:], -1)
            sample.add(window, np.stack(chosen), following, unknown)
    check_choices(stretches, names, shape, lines)
    filled_in = Counter(cell[:3] for cell in filled)
    return Traced(
        Corpus(domains, [list(domain_of.values()).count(index) for index in range(len(domains))]),
        [
            replace(
                counts, documents_M=[filled_in[counts.phase, counts.layer, at] for at in range(len(domains))]
            )
            for counts in tally.layers()
        ],
        main,
        names,
        sample.probe() if sample.windows else None,
        has_gates=all(stretch.gates_TLK is not None for stretch in stretches),
        has_logits=False,
        has_slots=any((stretch.chosen_TLK < 0).any() for stretch in stretches),
    )


def check_choices(stretches: list[Stretch], names: dict[int, str], shape: Shape, lines: list[str]) -> None:
    """Reject tokens that list an expert twice in one layer; append the number of empty slots to `lines`.

    Recorders write -1 for padding, and where a layer has no choice for a token.
    """
    empty = total = 0
    for stretch in stretches:
        rows = routed_rows(stretch, names, shape)
        ordered_TLK = np.sort(stretch.chosen_TLK[:, [*rows.values()]], axis=2)
        empty, total = empty + int((ordered_TLK < 0).sum()), total + ordered_TLK.size
        twice_TLK = (ordered_TLK[..., 1:] == ordered_TLK[..., :-1]) & (ordered_TLK[..., 1:] >= 0)
        if twice_TLK.any():
            token, row, slot = np.argwhere(twice_TLK)[0]
            raise BadInput(
                f"document {stretch.document}, token {stretch.start + token}, layer {[*rows][row]}: names "
                f"expert {ordered_TLK[token, row, slot]} twice, but a token chooses an expert once; record "
                "it again, or check --format"
            )
    if empty:
        lines.append(f"{empty:,} of {total:,} slots are empty (-1) and not counted")


def count_load(load: Load, shape: Shape) -> Traced:
    """Return counts per expert alone, as one document: no order of tokens, no pairs of experts."""
    k = load.k or shape.k
    if k is None:
        raise BadInput("these counts do not tell the experts per token; give the model's folder too")
    counts = []
    for number, counts_E in zip(layer_numbers(load, shape), load.counts_LE, strict=True):
        if number is not None and counts_E.any():
            n = experts_of(number, shape)
            counts_MBE = np.zeros((1, BUCKETS, n), dtype=np.int64)
            sums_MBS = np.zeros((1, BUCKETS, len(SUMS)))
            counts_MBE[0, 0] = counts_E[:n]
            sums_MBS[0, 0, SUMS.index("tokens")] = counts_E.sum() // k
            sums = counts_MBE, np.zeros(counts_MBE.shape), sums_MBS
            counts.append(LayerCounts(number, f"layer {number}", "prefill", k, *sums))
    check_size({layer.layer: layer.n_experts for layer in counts}, 1)
    names = {layer.layer: layer.layer_name for layer in counts}
    known: dict[str, Any] = dict.fromkeys(("has_gates", "has_logits", "has_tokens", "has_slots"), False)
    return Traced(Corpus(["text"], [1]), counts, "prefill", names, **known)


def same_shape(stretches: list[Stretch]) -> list[Stretch]:
    """Return the stretches without the last slots that are empty everywhere: recorders may have more.

    Raises where documents differ in layers or slots.
    """
    used = 1
    for stretch in stretches:
        (layers, k), first = stretch.chosen_TLK.shape[1:], stretches[0].chosen_TLK.shape[1:]
        if k != first[1] or (not stretch.layers and layers != first[0]):
            raise BadInput(
                f"document {stretch.document} has {layers} layers and {k} experts per token, the first has "
                f"{first[0]} and {first[1]}; give traces of one model"
            )
        used = max([used, *(np.flatnonzero((stretch.chosen_TLK >= 0).any((0, 1))) + 1)])
    return [
        replace(
            stretch,
            chosen_TLK=stretch.chosen_TLK[..., :used],
            gates_TLK=None if stretch.gates_TLK is None else stretch.gates_TLK[..., :used],
        )
        for stretch in stretches
    ]


def layer_numbers(part: Stretch | Load, shape: Shape) -> tuple[int | None, ...]:
    """Return the layer number of each of the trace's layers; None for those that the model calls dense."""
    if part.layers:
        return part.layers
    n_layers = part.chosen_TLK.shape[1] if isinstance(part, Stretch) else len(part.counts_LE)
    if shape.layers and n_layers == len(shape.layers):
        return tuple(shape.layers)
    known = shape.layers if shape.layers and n_layers == shape.all_layers else range(n_layers)
    return tuple(number if number in known else None for number in range(n_layers))


def routed_rows(stretch: Stretch, names: dict[int, str], shape: Shape) -> dict[int, int]:
    """Return where in the stretch the MoE layers are, by number."""
    numbers = enumerate(layer_numbers(stretch, shape))
    return {number: row for row, number in numbers if number is not None and number in names}


def routed_layers(stretches: list[Stretch], shape: Shape, lines: list[str]) -> dict[int, str]:
    """Return the names of the MoE layers by number; `lines` gets those that turn out to be dense."""
    names, filled, routed = dict[int, str](), set[int](), set[int]()
    for stretch in stretches:
        for row, number in enumerate(layer_numbers(stretch, shape)):
            if number is not None:
                chosen_TK = stretch.chosen_TLK[:, row]
                names[number] = stretch.layer_names[row] if stretch.layer_names else f"layer {number}"
                if (chosen_TK >= 0).any():
                    filled.add(number)
                if chosen_TK.shape[1] == 1 or (chosen_TK != chosen_TK[:, :1]).any():
                    routed.add(number)
    dense = sorted(filled - routed)
    if dense and not filled & routed:
        raise BadInput(
            "every token names one expert in all slots of every layer: no routing in it; record it again"
        )
    if dense:
        which = ", ".join(map(str, dense))
        lines.append(f"layers {which} skipped as dense: all slots of a token name one expert")
    return {number: names[number] for number in sorted(filled & routed)}


def experts_of(layer: int, shape: Shape) -> int:
    return (shape.layers or {}).get(layer, shape.n_experts)


def check_size(experts: dict[int, int], domains: int) -> None:
    """Reject a trace whose counts would not fit in about 2 GB."""
    if sum(n * n for n in experts.values()) > MOST_PAIRS or sum(experts.values()) * domains > MOST_CELLS:
        raise BadInput(
            f"{len(experts)} layers x {max(experts.values())} experts x {domains} domains: too many to count "
            "in memory; give the experts per layer that the model has, or fewer domains"
        )


def layer_routings(
    stretch: Stretch, window: Window, rows: dict[int, int], names: dict[int, str], shape: Shape
) -> Iterable[Routing]:
    """Yield the routing of each layer, so many tokens at a time that counting them takes little memory."""
    total, _, k = stretch.chosen_TLK.shape
    at_once = max(AT_ONCE // max(shape.n_experts, k * k), 1)
    for begin in range(0, total, at_once):
        chosen_TLK = stretch.chosen_TLK[begin : begin + at_once]
        n = len(chosen_TLK)
        tokens = Tokens(
            n if stretch.apart else 1,
            torch.zeros(n, dtype=torch.int64),
            torch.ones(n, dtype=torch.bool),
            torch.full((n,), stretch.document),
            torch.arange(stretch.start + begin, stretch.start + begin + n),
            torch.full((n,), window.domain),
            torch.full((n,), window.bucket),
            stretch.phase,
            continues=begin > 0 and not stretch.apart,
        )
        gates_TK = torch.arange(k, 0, -1).expand(n, k).double()  # where unknown: only their order counts
        for number, row in rows.items():
            if stretch.gates_TLK is not None:
                gates_TK = torch.from_numpy(stretch.gates_TLK[begin : begin + n, row].copy())
            chosen_TK = torch.from_numpy(chosen_TLK[:, row].astype(np.int64))
            yield Routing(number, names[number], experts_of(number, shape), chosen_TK, gates_TK, tokens)
