"""trace --recorded: a trace that another tool wrote, counted into the same tables as far as it goes."""

from __future__ import annotations

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
from moescope.execution.recorded import READERS, Shape, Stretch, read_trace
from moescope.execution.texts import file_identity
from moescope.families import MoeCheckpoint, read_moe
from moescope.routing.counts_to_tables import Corpus, Traced
from moescope.routing.stability import stability_table
from moescope.routing.tally import Tally
from moescope.routing.token_sample import Sample
from moescope.run import Run, open_run, place_run
from moescope.types import Integers, Routing, Tokens
from moescope.verb import Verb

IDENTITY = ("recorded", "format", "experts", "seed")
OF_A_MODEL_RUN = ("max_tokens", "phase", "save_tokens", "dtype", "batch_size", "chat_template")


def trace_recorded(verb: Verb, given: dict[str, Any]) -> Run:
    """Write the run of one recorded trace. A model supplies layer names and k; it is not run.

    `given` are the options of trace.
    """
    models, file, seed = given["models"], Path(given["recorded"]), given["seed"]
    format, experts = given["format"], given["experts"]
    if format is None:
        raise BadInput(f"--recorded {file}: give --format too; known: {', '.join(READERS)}")
    one_of("format", format, tuple(READERS))
    if experts is None or experts < 1:
        raise BadInput(
            f"--recorded {file}: give the experts per layer with --experts N; a trace does not contain it"
        )
    for option in verb.options:
        if option.name in OF_A_MODEL_RUN and given[option.name] != option.default:
            raise BadInput(f"{option.flag} applies to a model run, not to --recorded; leave it out")
    if len(models) > 1:
        raise BadInput(f"--recorded takes at most one model, {len(models)} given; use one run per trace")
    if not file.is_file():
        raise BadInput(f"{file}: no such file; give the recorded trace")
    moe = read_moe(open_checkpoint(models[0])) if models else None
    arguments = verb.identity(given, recorded=file_identity(file))
    identity: dict[str, Any] = {
        "arguments": {name: arguments[name] for name in IDENTITY},
        "checkpoints": [{"step": 0, **checkpoint_identity(str(models[0]))}] if moe else [],
    }
    name = moe.checkpoint.name if moe else file.stem
    folder, done = place_run(verb, given["out"], name, identity, given["overwrite"])
    if done:
        return done
    with open_run(folder, verb, identity, given["overwrite"], verb.command(given)) as writer:
        with writer.timed("trace"):
            shape = trace_shape(moe, experts)
            traced = count_trace(read_trace(file, format, shape), shape)
            names = {number: layer.layer_name for number, layer in moe.layers.items()} if moe else {}
            if set(traced.layer_names) <= set(names):
                traced = replace(traced, layer_names=names)
        if not traced.counts:
            raise BadInput(f"{file}: no token in it; give a trace with tokens")
        with writer.timed("tables"):
            frames = traced.tables(0, seed)
            frames["stability"] = stability_table([0], [], lambda step, name: None, {})
        setup = {"step": 0, **traced.facts()}
        absent = ["decision metrics (a trace holds no logits)"]
        absent += [] if traced.has_gates else ["gate weight"]
        absent += [] if traced.probe is not None else ["vocabulary"]
        writer.save_info(
            device="cpu",
            setup=[setup],
            coverage=[setup["coverage"]],
            warnings=[*traced.warnings(), f"not in this trace: {', '.join(absent)}"],
        )
        return writer.finish(frames)


def trace_shape(moe: MoeCheckpoint | None, experts: int) -> Shape:
    """Return what the model's config says about the trace's shape."""
    if moe is None:
        return Shape(experts)
    known = {layer.n_experts for layer in moe.layers.values()}
    if experts not in known:
        raise BadInput(
            f"--experts {experts}: {moe.checkpoint.shown} has {', '.join(map(str, sorted(known)))}"
        )
    config = moe.checkpoint.config or {}
    text = config.get("text_config", config)
    top_k = next(iter(moe.layers.values())).top_k
    return Shape(experts, text.get("num_hidden_layers"), top_k, tuple(moe.layers))


# --- counting


def count_trace(stretches: Iterable[Stretch], shape: Shape) -> Traced:
    """Count a trace. Without gates the first slot counts as the first choice, as servers write it."""
    stretches = list(stretches)
    domains = list(dict.fromkeys(stretch.domain for stretch in stretches))
    main = "prefill" if any(stretch.phase == "prefill" for stretch in stretches) else "decode"
    tally, contents, domain_of = Tally(len(domains)), dict[int, int](), dict[int, int]()
    rows, numbers, names = moe_layers(stretches[0], shape) if stretches else (np.zeros(0, int), (), ())
    sample = Sample(list(numbers))
    for stretch in stretches:
        expected, actual = stretches[0].chosen_TLK.shape[1:], stretch.chosen_TLK.shape[1:]
        if actual != expected:
            raise BadInput(
                f"document {stretch.document} has [layers, k] = {list(actual)}, the first has "
                f"{list(expected)}; give traces of one model"
            )
        ids = stretch.ids_T if stretch.ids_T is not None else stretch.chosen_TLK.reshape(-1)
        content = contents.setdefault(stretch.document, fingerprint(ids) >> 1)
        domain = domains.index(stretch.domain)
        domain_of.setdefault(stretch.document, domain)
        draw = fingerprint(ids, stretch.start) / 2**64
        window = Window(stretch.document, domain, stretch.start, ids, -1, content, draw)
        chosen_LTK = stretch.chosen_TLK[:, rows].transpose(1, 0, 2)
        for layer in layer_routings(stretch, window, chosen_LTK, rows, numbers, names, shape.n_experts):
            tally.consume(layer)
        if stretch.phase == main and stretch.ids_T is not None:
            after = np.append(stretch.ids_T[1:], -1)
            sample.add(window, chosen_LTK.astype(np.int16), after, np.full(len(after), -1))
    documents = [list(domain_of.values()).count(index) for index in range(len(domains))]
    return Traced(
        Corpus(domains, documents),
        tally.to_cpu(),
        main,
        dict(zip(numbers, names, strict=True)),
        sample.probe() if sample.windows else None,
        has_gates=all(stretch.gates_TLK is not None for stretch in stretches),
        has_logits=False,
    )


def moe_layers(stretch: Stretch, shape: Shape) -> tuple[Integers, tuple[int, ...], tuple[str, ...]]:
    """Return the trace's MoE layers: their indices in the trace, layer numbers and names."""
    n_layers = stretch.chosen_TLK.shape[1]
    rows, numbers = np.flatnonzero((stretch.chosen_TLK >= 0).any((0, 2))), tuple(range(n_layers))
    if stretch.layers:
        numbers = stretch.layers
    elif shape.moe_layers and n_layers == shape.all_layers:
        rows = np.array(shape.moe_layers)
    elif shape.moe_layers and n_layers == len(shape.moe_layers):
        rows, numbers = np.arange(n_layers), shape.moe_layers
    names = stretch.layer_names or [f"layer {number}" for number in numbers]
    return rows, tuple(numbers[row] for row in rows), tuple(names[row] for row in rows)


def layer_routings(
    stretch: Stretch,
    window: Window,
    chosen_LTK: Integers,
    rows: Integers,
    numbers: tuple[int, ...],
    names: tuple[str, ...],
    n_experts: int,
) -> Iterable[Routing]:
    _, n, k = chosen_LTK.shape
    if not n:
        return
    tokens = Tokens(
        1,
        torch.zeros(n, dtype=torch.int64),
        torch.ones(n, dtype=torch.bool),
        torch.full((n,), stretch.document),
        torch.arange(stretch.start, stretch.start + n),
        torch.full((n,), window.domain),
        torch.full((n,), window.bucket),
        stretch.phase,
    )
    gates_TK = torch.arange(k, 0, -1).expand(n, k).double()  # where unknown: only their order counts
    for row, number, name, chosen_TK in zip(rows, numbers, names, chosen_LTK, strict=True):
        if stretch.gates_TLK is not None:
            gates_TK = torch.from_numpy(stretch.gates_TLK[:, row].copy())
        yield Routing(number, name, n_experts, torch.from_numpy(chosen_TK.copy()), gates_TK, tokens)
