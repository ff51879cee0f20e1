"""Traces that other tools wrote: vLLM, SGLang, llama.cpp, route traces, and tables of tokens."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from moescope.errors import BadInput
from moescope.execution.imatrix import read_imatrix
from moescope.types import Array, Integers

MOST_LAYERS = 1000
MOST_LINE = 1000  # bytes of one row of llama.cpp's CSV, or of a CSV's header
MOST_COMMENTS = 10_000
MOST_ROWS = 20_000_000  # of a tokens table
MOST_TOKEN_IDS = 2**24
DECODE, MIXED = 2, 3  # SGLang's forward modes; the others that hold tokens of a prompt count as prefill
SPECULATIVE = (5, 6)  # verified and drafted tokens, of which some were rejected
NUMBERS = ("step", "layer", "document", "position", "token_id")
COLUMNS = {  # of tables and route traces, as CSV holds them
    **dict.fromkeys((*NUMBERS, "expert", "slot", "turn"), "int"),
    **dict.fromkeys(("gate", "weight"), "float"),
    **dict.fromkeys(("experts", "gates", "domain", "phase", "layer_name"), "text"),
}
ROUTE = {  # columns of a route trace, and what they are in a table of tokens
    "turn": "document",
    "phase": "phase",
    "step": "position",
    "layer": "layer",
    "slot": "slot",
    "expert": "expert",
    "weight": "gate",
}
PHYSICAL = "last_physical_to_logical_map"


@dataclass(frozen=True)
class Shape:
    """What is known about a trace before it is read; None and empty where no model was given."""

    n_experts: int  # the largest number of a layer
    all_layers: int | None = None  # of the model, MoE or dense
    k: int | None = None
    layers: dict[int, int] | None = None  # number of each MoE layer -> its experts


@dataclass(frozen=True)
class Stretch:
    """Tokens of one document in one phase that follow each other, with the choices of some layers."""

    document: int
    domain: str
    phase: str
    chosen_TLK: NDArray[np.integer]  # expert numbers, -1 where there is none; first choice first
    start: int = 0
    ids_T: Integers | None = None
    gates_TLK: Array | None = None
    layers: tuple[int, ...] = ()  # layer numbers; 0, 1, 2, ... where empty
    layer_names: tuple[str, ...] = ()
    apart: bool = False  # each token is of a request of its own


@dataclass(frozen=True)
class Load:
    """Tokens per layer and expert, for a trace that holds no tokens."""

    counts_LE: Integers
    layers: tuple[int, ...] = ()  # layer numbers; 0, 1, 2, ... where empty
    k: int | None = None  # experts per token, where the trace tells them


def read_trace(file: Path, format: str, shape: Shape) -> Iterator[Stretch | Load]:
    if not file.is_file():
        raise BadInput(f"{file}: no such file; give the recorded trace")
    for part in READERS[format](file, shape):
        if isinstance(part, Stretch):
            check_experts(part.chosen_TLK, shape, f"{file}, document {part.document}")
            if part.chosen_TLK.shape[1] > MOST_LAYERS or part.chosen_TLK.shape[2] > shape.n_experts:
                raise BadInput(
                    f"{file}: {part.chosen_TLK.shape[1]} layers with {part.chosen_TLK.shape[2]} experts per "
                    f"token; expected at most {MOST_LAYERS} and {shape.n_experts}"
                )
            part = replace(part, chosen_TLK=part.chosen_TLK.astype(np.int16))
        yield part


def check_experts(chosen: NDArray[Any], shape: Shape, where: str) -> None:
    highest, lowest = (int(chosen.max()), int(chosen.min())) if chosen.size else (-1, -1)
    if highest >= shape.n_experts or lowest < -1:
        wrong = highest if highest >= shape.n_experts else lowest
        raise BadInput(f"{where}: expert {wrong}, but a layer has {shape.n_experts}; see --experts")


# --- vLLM and SGLang: answers of a server, one JSON object per line


def vllm(file: Path, shape: Shape) -> Iterator[Stretch]:
    """vLLM with --enable-return-routed-experts: arrays [tokens, layers, k], nested lists or base64 .npy.

    `prompt_routed_experts` is prefill. `routed_experts` is then decode; alone it holds all tokens, of which
    usage.prompt_tokens are prefill. Several choices are answers to one prompt, which counts once; with
    `prompt_token_ids` in the choices, to as many prompts as differ. A .npy file is one document.
    """
    if file.suffix == ".npy":
        yield Stretch(0, "text", "prefill", three_axes(load_npy(file.read_bytes(), file), file))
        return
    document = 0
    for number, answer in enumerate(json_lines(file), start=1):
        where = f"{file}, answer {number}"
        choices = answer.get("choices") if isinstance(answer, dict) else None
        choices = choices if isinstance(choices, list) and choices else [answer]
        prompt, prompts = find_key(answer, "prompt_routed_experts"), set[str]()
        for choice in choices:
            rest = find_key(choice, "routed_experts")
            if prompt is None and rest is None:
                raise BadInput(
                    f'{where}: no "routed_experts" in it; start vLLM with --enable-return-routed-experts'
                )
            if prompt is not None:
                prefill = vllm_array(prompt, file)
                parts = [Stretch(document, "text", "prefill", prefill)]
                if rest is not None:
                    parts.append(Stretch(document, "text", "decode", vllm_array(rest, file), len(prefill)))
                ids = None
            else:
                ids = find_key(choice, "prompt_token_ids")
                tokens = len(ids) if isinstance(ids, list) else find_key(answer, "prompt_tokens")
                chosen_TLK = vllm_array(rest, file)
                if len(choices) > 1 and (not isinstance(tokens, int) or tokens > len(chosen_TLK)):
                    raise BadInput(
                        f"{where}: {len(choices)} choices share a prompt, but prompt_tokens is {tokens}; "
                        "keep the answer's usage, and ask for one prompt at a time"
                    )
                parts = list(split(document, chosen_TLK, tokens, where))
            yield from (part for part in parts if part.phase == "decode" or str(ids) not in prompts)
            prompts.add(str(ids))
            document += 1


def vllm_array(value: Any, file: Path) -> NDArray[np.integer]:
    return three_axes(load_npy(decode64(value, file), file) if isinstance(value, str) else value, file)


def sglang(file: Path, shape: Shape) -> Iterator[Stretch | Load]:
    """SGLang: answers with return_routed_experts, or a .pt file of its expert distribution recorder.

    An answer's numbers are base64 int32 [tokens, layers, k], whose shape the model's config tells.
    """
    if file.suffix == ".pt":
        yield from recorder(file, shape)
        return
    for number, answer in enumerate(json_lines(file), start=1):
        where, value = f"{file}, answer {number}", find_key(answer, "routed_experts")
        if value is None:
            raise BadInput(f'{where}: no "routed_experts" in it; ask SGLang with return_routed_experts')
        if isinstance(value, str):
            if shape.all_layers is None or shape.k is None:
                raise BadInput(
                    f"{file}: SGLang's traces do not contain the number of layers and experts per token; "
                    "give the model's folder too"
                )
            content, width = decode64(value, file), shape.all_layers * shape.k
            if len(content) % (4 * width):
                raise BadInput(
                    f"{where}: {len(content)} bytes are no multiple of 4 x {shape.all_layers} layers x "
                    f"{shape.k} experts; give the model that was recorded"
                )
            chosen_TLK = np.frombuffer(content, dtype="<i4").reshape(-1, shape.all_layers, shape.k)
        else:
            chosen_TLK = three_axes(value, file)
        yield from split(number - 1, chosen_TLK, find_key(answer, "prompt_tokens"), where)


def split(
    document: int, chosen_TLK: NDArray[np.integer], prompt_tokens: Any, where: str
) -> Iterator[Stretch]:
    """Yield the prompt as prefill and the rest as decode, where the prompt's length is known."""
    if prompt_tokens is None:
        prompt_tokens = len(chosen_TLK)
    if not isinstance(prompt_tokens, int) or prompt_tokens < 0:
        raise BadInput(f"{where}: prompt_tokens {prompt_tokens!r}; expected a number of tokens")
    yield Stretch(document, "text", "prefill", chosen_TLK[:prompt_tokens])
    if prompt_tokens < len(chosen_TLK):
        yield Stretch(document, "text", "decode", chosen_TLK[prompt_tokens:], prompt_tokens)


def find_key(answer: Any, key: str) -> Any:
    """Return the first value of that name, outer ones first: servers nest it differently."""
    level = [answer] if isinstance(answer, dict | list) else []
    while level:
        for part in level:
            if isinstance(part, dict) and part.get(key) is not None:
                return part[key]
        inside = (part.values() if isinstance(part, dict) else part for part in level)
        level = [value for values in inside for value in values if isinstance(value, dict | list)]
    return None


def json_lines(file: Path) -> Iterator[Any]:
    """Yield every answer of a file: one JSON object per line, lists of them, or a single one."""
    try:
        with file.open(encoding="utf-8") as lines:
            for line in [lines.read()] if file.suffix == ".json" else lines:
                if line.strip():
                    content = json.loads(line)
                    yield from content if isinstance(content, list) else [content]
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{file}: not valid JSON ({error}); give one object per line") from None


def decode64(value: str, file: Path) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except ValueError:
        raise BadInput(f"{file}: routed_experts is not base64; give the server's unchanged answer") from None


def load_npy(content: bytes, file: Path) -> Any:
    """Return the array of a .npy file; its header is compared with its size before memory is taken."""
    stream = io.BytesIO(content)
    try:
        version = npy.read_magic(stream)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read_header(stream)
        size = dtype.itemsize * int(np.prod(shape, dtype=object))
        if dtype.hasobject or min(shape, default=0) < 0 or size != len(content) - stream.tell():
            raise ValueError(f"{dtype} {shape} in {len(content) - stream.tell()} bytes")
        stream.seek(0)
        return npy.read_array(stream, allow_pickle=False)
    except Exception as error:  # numpy parses the header as Python, which fails in many ways
        why = str(error)[:120]
        raise BadInput(
            f"{file}: no valid .npy array in it ({why}); give the server's unchanged answer"
        ) from None


def three_axes(value: Any, file: Path) -> NDArray[np.integer]:
    try:
        chosen = np.asarray(value)
    except (ValueError, OverflowError):
        raise BadInput(f"{file}: lists of different lengths; expected [tokens, layers, k]") from None
    if chosen.ndim != 3 or not np.issubdtype(chosen.dtype, np.integer) or not all(chosen.shape[1:]):
        raise BadInput(
            f"{file}: {chosen.dtype} array of shape {list(chosen.shape)}; expected whole numbers "
            "[tokens, layers, k]"
        )
    return chosen


# --- SGLang's expert distribution recorder


def recorder(file: Path, shape: Shape) -> Iterator[Stretch | Load]:
    """A file of SGLang's expert distribution recorder, loaded without executing what it names.

    Mode stat: `logical_count`, counts [passes, layers, experts] or their sum. Mode per_token: one record per
    forward pass with `topk_ids_of_layer` [layers, tokens, k], physical expert numbers. The record of a prompt
    holds one document per request; which request a generated token belongs to is not recorded, so those
    tokens are one document in which none follows another.
    """
    import torch

    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch documents none, and raises whatever its unpickler stumbles over
        why = f"{type(error).__name__}: {error}"[:120]
        raise BadInput(
            f"{file}: no file of tensors ({why}); give what SGLang's expert distribution recorder wrote"
        ) from None
    if isinstance(content, dict) and "logical_count" in content:
        counts = tensor_array(content["logical_count"], file, "logical_count")
        if counts.ndim not in (2, 3) or counts.shape[-1] != shape.n_experts or not in_range(counts):
            raise BadInput(
                f"{file}: logical_count of shape {list(counts.shape)}; expected [layers, {shape.n_experts}] "
                "counts; see --experts"
            )
        yield Load(counts.reshape(-1, *counts.shape[-2:]).sum(0, dtype=np.int64))
        return
    records = content.get("records") if isinstance(content, dict) else None
    if not isinstance(records, list) or not all(
        isinstance(record, dict) and "topk_ids_of_layer" in record for record in records
    ):
        raise BadInput(
            f"{file}: neither logical_count nor topk_ids_of_layer in it; record with SGLang's "
            "--expert-distribution-recorder-mode stat or per_token"
        )
    logical = content.get(PHYSICAL)
    logical_LP = None if logical is None else tensor_array(logical, file, PHYSICAL)
    document, generated = 0, list[tuple[Any, Integers]]()
    for number, record in enumerate(records, start=1):
        where = f"{file}, record {number}"
        chosen_TLK, ids_T, starts, lengths = read_record(record, logical_LP, file, where)
        mode = record.get("forward_mode")
        if mode in SPECULATIVE:
            raise BadInput(f"{where}: speculative decoding (forward_mode {mode}); record without it")
        edges = np.cumsum([0, *lengths])
        for begin, end in pairwise(edges):
            if mode == DECODE or (mode == MIXED and end - begin == 1):
                generated.append((chosen_TLK[begin:end], ids_T[begin:end]))
            elif end > begin:
                first = int(starts[begin])
                yield Stretch(document, "text", "prefill", chosen_TLK[begin:end], first, ids_T[begin:end])
                document += 1
    if generated:
        chosen_TLK, ids_T = (np.concatenate(parts) for parts in zip(*generated, strict=True))
        yield Stretch(document, "text", "decode", chosen_TLK, ids_T=ids_T, apart=True)


def read_record(
    record: Any, logical_LP: NDArray[np.integer] | None, file: Path, where: str
) -> tuple[NDArray[np.integer], Integers, Integers, list[int]]:
    """Return a forward pass: experts [tokens, layers, k], token ids, positions, tokens per request."""
    chosen_LTK = tensor_array(record["topk_ids_of_layer"], file, "topk_ids_of_layer")
    if chosen_LTK.ndim != 3 or not chosen_LTK.shape[0] or not chosen_LTK.shape[2]:
        raise BadInput(f"{where}: topk_ids_of_layer of shape {list(chosen_LTK.shape)}; expected three axes")
    n_layers, tokens, _ = chosen_LTK.shape
    lists = {}
    for name in ("input_ids", "positions", "extend_seq_lens"):
        values = record.get(name)
        if values is None and name == "extend_seq_lens":
            values = [tokens] if record.get("forward_mode") != DECODE else [1] * tokens
        try:
            lists[name] = np.asarray(values if isinstance(values, list) else None).astype(np.int64)
        except (TypeError, ValueError, OverflowError):
            raise BadInput(f"{where}: {name} is no list of whole numbers") from None
    ids_T, positions_T, lengths = lists["input_ids"], lists["positions"], lists["extend_seq_lens"]
    if (
        ids_T.shape != (tokens,)
        or positions_T.shape != (tokens,)
        or lengths.ndim != 1
        or lengths.min(initial=0) < 0
        or lengths.sum() != tokens
        or positions_T.min(initial=0) < 0
    ):
        raise BadInput(f"{where}: input_ids, positions and extend_seq_lens do not fit {tokens} tokens")
    check_ids(ids_T, where)
    if logical_LP is not None:
        if (
            logical_LP.ndim != 2
            or len(logical_LP) != n_layers
            or chosen_LTK.max(initial=-1) >= len(logical_LP[0])
        ):
            raise BadInput(
                f"{where}: experts of {n_layers} layers up to {chosen_LTK.max(initial=-1)}, but {PHYSICAL} "
                f"has shape {list(logical_LP.shape)}"
            )
        mapped = np.take_along_axis(logical_LP[:, None], np.maximum(chosen_LTK, 0).astype(np.int64), axis=2)
        chosen_LTK = np.where(chosen_LTK < 0, chosen_LTK, mapped)
    return chosen_LTK.transpose(1, 0, 2), ids_T, positions_T, lengths.tolist()


def tensor_array(value: Any, file: Path, name: str) -> NDArray[np.integer]:
    """Return a tensor of whole numbers; one that claims more than the file holds is an error."""
    import torch

    whole = isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()
    if not whole or value.layout != torch.strided or value.nbytes > file.stat().st_size:
        raise BadInput(f"{file}: {name} is no tensor of whole numbers stored in this file")
    return np.asarray(value.numpy())


def in_range(counts: NDArray[np.integer]) -> bool:
    return not counts.size or (int(counts.min()) >= 0 and int(counts.max()) < 2**40)


def check_ids(ids_T: Integers, where: str) -> None:
    if ids_T.min(initial=0) < 0 or ids_T.max(initial=0) >= MOST_TOKEN_IDS:
        wrong = ids_T.min() if ids_T.min() < 0 else ids_T.max()
        raise BadInput(f"{where}: token id {wrong}; expected 0 to {MOST_TOKEN_IDS - 1}")


# --- llama.cpp


def llamacpp(file: Path, shape: Shape) -> Iterator[Stretch]:
    """llama.cpp's trace, one document: CSV rows `layer,expert`, one per choice, a token's k choices in a row.

    Its last layer may skip tokens whose answer nobody reads. Without a model, k is the largest for which
    every k rows of a layer name different experts.
    """
    by_layer: dict[int, array[int]] = {}
    with file.open("rb") as opened:
        for number, line in enumerate(iter(lambda: opened.readline(MOST_LINE), b""), start=1):
            fields = line.split(b",")
            if not line.strip() or (number == 1 and fields[0].strip() == b"layer"):
                continue
            try:
                layer, expert = int(fields[0]), int(fields[1])
            except (ValueError, IndexError):
                shown = line[:40].decode("ascii", "backslashreplace").strip()
                what = f"{shown!r} is not layer,expert; check --format, or record it again"
                raise BadInput(f"{file}, line {number}: {what}") from None
            if not 0 <= layer < MOST_LAYERS:
                most = MOST_LAYERS - 1
                raise BadInput(f"{file}, line {number}: layer {layer}, not 0 to {most}; check --format")
            check_experts(np.array([expert], dtype=object), shape, f"{file}, line {number}")
            by_layer.setdefault(layer, array("h")).append(expert)
    if not by_layer:
        raise BadInput(f"{file}: no rows in it; give a trace that llama.cpp wrote")
    experts = {layer: np.frombuffer(by_layer[layer], dtype=np.int16) for layer in sorted(by_layer)}
    k = shape.k or inferred_k(list(experts.values()), shape.n_experts)
    lengths: dict[int, list[int]] = {}
    for layer, rows in experts.items():
        lengths.setdefault(len(rows), []).append(layer)
        if len(rows) % k:
            raise BadInput(
                f"{file}: {len(rows)} rows of layer {layer} are no multiple of k = {k}; give a complete "
                "trace, and the model that was recorded"
            )
    for length, layers in lengths.items():
        chosen_TLK = np.stack([experts[layer].reshape(-1, k) for layer in layers], axis=1)
        start = (max(lengths) - length) // k
        yield Stretch(0, "text", "prefill", chosen_TLK, start, layers=tuple(layers))


def imatrix(file: Path, shape: Shape) -> Iterator[Load]:
    """An importance matrix of llama.cpp: tokens per expert, no order of tokens."""
    layers, k = read_imatrix(file)
    counts_LE = np.zeros((len(layers), shape.n_experts), dtype=np.int64)
    for row, (layer, counts_E) in zip(counts_LE, layers.items(), strict=True):
        expected = (shape.layers or {layer: shape.n_experts}).get(layer, 0)
        if len(counts_E) > expected:
            raise BadInput(f"{file}: {len(counts_E)} experts in layer {layer}, not {expected}; see --experts")
        row[: len(counts_E)] = counts_E
    yield Load(counts_LE, tuple(layers), k)


def inferred_k(layers: list[NDArray[np.integer]], n_experts: int) -> int:
    divisor = int(np.gcd.reduce([len(experts) for experts in layers]))
    for k in range(min(n_experts, divisor), 1, -1):
        ordered = (np.sort(experts.reshape(-1, k), axis=1) for experts in layers if divisor % k == 0)
        if divisor % k == 0 and all(np.diff(groups, axis=1).all() for groups in ordered):
            return k
    return 1


# --- tables: parquet or CSV


def table(file: Path, shape: Shape) -> Iterator[Stretch]:
    """A table of tokens, such as that of --save-tokens: parquet, or CSV (.csv, .csv.gz).

    Columns document, position, layer and experts (by falling gate), one row per token and layer: lists, or in
    CSV numbers with spaces between them. Or `expert`, one row per choice, in the order of `slot` where
    it is given. Optional: gates (or gate), domain, phase (prefill or decode), token_id, layer_name.
    """
    yield from stretches(csv_frame(file) if is_csv(file) else parquet_frame(file), file, shape)


def route(file: Path, shape: Shape) -> Iterator[Stretch]:
    """A route trace: CSV rows turn, phase (0 prefill, 1 decode), step, layer, slot, expert, weight."""
    frame = csv_frame(file)
    missing = [name for name in ROUTE if name not in frame.columns]
    if missing:
        raise BadInput(f"{file}: no column {', '.join(missing)}; give a route trace, or another --format")
    known = {"0": "prefill", "1": "decode"}
    frame = frame[list(ROUTE)].rename(columns=ROUTE)
    yield from stretches(frame.assign(phase=frame["phase"].map(known).fillna(frame["phase"])), file, shape)


def stretches(frame: Any, file: Path, shape: Shape) -> Iterator[Stretch]:
    """Yield the tokens of every document and phase; layers with the same positions together."""
    check_columns(frame, file)
    for name, default in (("domain", "text"), ("phase", "prefill")):
        frame = frame.assign(**{name: frame[name].astype(str) if name in frame else default})
    strange = [phase for phase in frame["phase"].unique() if phase not in ("prefill", "decode")]
    if strange:
        raise BadInput(f"{file}: phase {strange[0]!r}; expected prefill or decode")
    names = dict(zip(frame["layer"], frame["layer_name"], strict=True)) if "layer_name" in frame else {}
    if "experts" in frame:
        experts, lengths_T = join_lists(frame["experts"], file)
        gates, gates_T = join_lists(frame["gates"], file) if has_values(frame, "gates") else (None, lengths_T)
    else:
        frame, experts, gates, lengths_T = join_choices(frame)
        gates_T = lengths_T
    check_experts(experts, shape, str(file))
    k = int(lengths_T.max(initial=1)) or 1
    if k > shape.n_experts:
        raise BadInput(f"{file}: a token with {k} experts of {shape.n_experts}; see --experts")
    if (gates_T != lengths_T).any():
        raise BadInput(f"{file}: a token with more or fewer gates than experts; write the table again")
    chosen_TK = padded(experts, lengths_T, k, -1)
    gates_TK = None if gates is None else padded(gates.astype(np.float64), lengths_T, k, 0.0)
    position_T, layer_T = (frame[name].to_numpy().astype(np.int64) for name in ("position", "layer"))
    ids_T = frame["token_id"].to_numpy().astype(np.int64) if "token_id" in frame else None
    if ids_T is not None:
        check_ids(ids_T, str(file))
    groups = frame.groupby(["domain", "document", "phase"], sort=False).indices
    numbers: dict[tuple[str, int], int] = {}  # documents of two domains may have the same number
    for domain, document, phase in sorted(groups, key=lambda key: (key[1], key[0], key[2] != "prefill")):
        rows_T = groups[domain, document, phase]
        rows_T = rows_T[np.lexsort((position_T[rows_T], layer_T[rows_T]))]
        same = (np.diff(layer_T[rows_T]) == 0) & (np.diff(position_T[rows_T]) == 0)
        if same.any():
            twice = rows_T[np.argmax(same)]
            raise BadInput(
                f"{file}: two rows of document {document}, layer {layer_T[twice]}, position "
                f"{position_T[twice]}; give every document its own number"
            )
        number = numbers.setdefault((domain, document), len(numbers))
        same_positions: dict[bytes, list[Integers]] = {}
        for part in np.split(rows_T, np.flatnonzero(np.diff(layer_T[rows_T])) + 1):
            same_positions.setdefault(position_T[part].tobytes(), []).append(part)
        for group in same_positions.values():
            rows_TL = np.stack(group, axis=1)
            layers = tuple(int(layer) for layer in layer_T[rows_TL[0]])
            yield Stretch(
                number,
                domain,
                phase,
                chosen_TK[rows_TL],
                int(position_T[rows_TL[0, 0]]),
                None if ids_T is None else ids_T[rows_TL[:, 0]],
                None if gates_TK is None else gates_TK[rows_TL],
                layers,
                tuple(str(names[layer]) for layer in layers) if names else (),
            )


def check_columns(frame: Any, file: Path) -> None:
    """Reject a table that lacks a column, or has one of another kind."""
    choices = ("expert", "slot") if "expert" in frame and "experts" not in frame else ()
    missing = [name for name in ("document", "position", "layer") if name not in frame]
    missing += [] if choices or "experts" in frame else ["experts"]
    if missing:
        raise BadInput(
            f"{file}: no column {', '.join(missing)}; expected document, position, layer and experts"
        )
    for name in (*NUMBERS, *choices):
        if name not in frame:
            continue
        least = -1 if name == "expert" else 0
        if frame[name].dtype.kind not in "iu" or frame[name].min() < least or frame[name].max() >= 2**62:
            raise BadInput(f"{file}: column {name} must hold whole numbers from 0; write the table again")
    if "gate" in frame and frame["gate"].dtype.kind != "f":
        raise BadInput(f"{file}: column gate must hold numbers; write the table again")
    if len(frame) and frame["layer"].nunique() > MOST_LAYERS:
        raise BadInput(f"{file}: {frame['layer'].nunique()} layers; expected at most {MOST_LAYERS}")
    if "step" in frame and frame["step"].nunique() > 1:
        raise BadInput(f"{file}: holds {frame['step'].nunique()} steps; give one at a time")


def has_values(frame: Any, name: str) -> bool:
    return name in frame and not frame[name].isna().any()


def join_choices(frame: Any) -> tuple[Any, Integers, Any, Integers]:
    """Return one row per token and layer, all experts and gates in a row, and the number of each token."""
    keys = ["domain", "phase", "document", "position", "layer"]
    frame = frame.sort_values([*keys, "slot"] if "slot" in frame else keys, kind="stable")
    first = (frame[keys] != frame[keys].shift()).any(axis=1).to_numpy()
    lengths_T = np.diff(np.append(np.flatnonzero(first), len(frame)))
    gates = frame["gate"].to_numpy(float) if has_values(frame, "gate") else None
    return frame[first].reset_index(drop=True), frame["expert"].to_numpy(np.int64), gates, lengths_T


def parquet_frame(file: Path) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    with file.open("rb") as start:
        if start.read(4) != b"PAR1":
            raise BadInput(f"{file}: neither a .csv nor a parquet file; give another --format")
    try:
        opened = parquet.ParquetFile(file)
        if opened.metadata.num_rows > MOST_ROWS:
            rows = opened.metadata.num_rows
            raise BadInput(f"{file}: {rows:,} rows, at most {MOST_ROWS:,} can be counted; give a part of it")
        wanted = [name for name in opened.schema_arrow.names if name in COLUMNS]
        if len(set(wanted)) < len(wanted):
            raise BadInput(f"{file}: a column appears twice in {', '.join(wanted)}; name every column once")
        return opened.read(columns=wanted).to_pandas()
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{file}: damaged parquet file ({why}); write it again") from None


def is_csv(file: Path) -> bool:
    return file.name.removesuffix(".gz").endswith(".csv")


def open_text(file: Path) -> Any:
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")


def csv_start(file: Path) -> tuple[list[str], list[str]]:
    """Return the comment lines (#) before a CSV's header, and the names of its columns."""
    comments: list[str] = []
    try:
        with open_text(file) as opened:
            for _ in range(MOST_COMMENTS):
                line = opened.readline(MOST_LINE).decode("utf-8", "backslashreplace").strip()
                if not line.startswith("#"):
                    return comments, [name.strip() for name in line.split(",")]
                comments.append(line)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{file}: cannot be read ({error}); copy it again") from None
    raise BadInput(f"{file}: more than {MOST_COMMENTS} comment lines; give a CSV with a header")


def csv_frame(file: Path) -> Any:
    """Return the known columns of a CSV; its rows are counted while they are read."""
    import pyarrow as pa
    from pyarrow import csv

    comments, heads = csv_start(file)
    if len(set(heads)) < len(heads):
        raise BadInput(f"{file}: a column appears twice in {','.join(heads)[:80]}; name every column once")
    kinds = {"int": pa.int64(), "float": pa.float64(), "text": pa.string()}
    types = {name: kinds[kind] for name, kind in COLUMNS.items()}
    wanted = [name for name in heads if name in types]
    try:
        with open_text(file) as opened:
            parts, rows = [], 0
            options = csv.ConvertOptions(column_types=types, include_columns=wanted)
            for part in csv.open_csv(
                opened, csv.ReadOptions(skip_rows=len(comments)), convert_options=options
            ):
                parts.append(part)
                rows += len(part)
                if rows > MOST_ROWS:
                    raise BadInput(f"{file}: more than {MOST_ROWS:,} rows; give a part of it")
            frame = pa.Table.from_batches(parts).to_pandas() if parts else pa.table({}).to_pandas()
    except (pa.ArrowException, OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{file}: no valid CSV ({' '.join(str(error).split())[:120]})") from None
    for name, kind in (("experts", np.int64), ("gates", np.float64)):
        if name in frame and not frame[name].isna().all():
            frame[name] = [numbers_in(cell, kind, name, file) for cell in frame[name].fillna("")]
    return frame


def numbers_in(cell: str, kind: type, name: str, file: Path) -> NDArray[Any]:
    try:
        return np.array(cell.strip("[] ").replace(",", " ").split(), dtype=kind)
    except (ValueError, OverflowError):
        raise BadInput(
            f"{file}: column {name} holds {cell[:40]!r}; expected numbers such as 3 17 5"
        ) from None


def expert_count(file: Path) -> int | None:
    """Return the number of experts that the file states (a CSV's comment n_expert=128), None without one."""
    if file.suffix == ".gguf":
        return max(len(counts_E) for counts_E in read_imatrix(file)[0].values())
    found = re.search(r"\bn_expert=(\d{1,6})\b", " ".join(csv_start(file)[0])) if is_csv(file) else None
    return int(found[1]) if found else None


def join_lists(lists: Any, file: Path) -> tuple[Any, Integers]:
    """Return the numbers of all lists in a row, and the lists' lengths."""
    if not all(isinstance(values, np.ndarray) and values.dtype.kind in "iuf" for values in lists):
        raise BadInput(f"{file}: column {lists.name} must hold lists of numbers; write the table again")
    numbers = np.concatenate([np.zeros(0, np.int64 if lists.name == "experts" else np.float64), *lists])
    if lists.name == "experts" and numbers.dtype.kind not in "iu":
        raise BadInput(f"{file}: column experts must hold lists of whole numbers; write the table again")
    return numbers, np.array([len(values) for values in lists], dtype=np.int64)


def padded(numbers: Any, lengths_T: Integers, k: int, filler: float) -> Any:
    rows = np.full((len(lengths_T), k), filler, dtype=numbers.dtype)
    rows[np.arange(k) < lengths_T[:, None]] = numbers
    return rows


READERS: dict[str, Callable[[Path, Shape], Iterator[Stretch | Load]]] = {
    "vllm": vllm,
    "sglang": sglang,
    "llamacpp": llamacpp,
    "imatrix": imatrix,
    "route": route,
    "table": table,
    "moescope": table,
}


def find_format(file: Path) -> str:
    """Return the format that a file's name and header show; answers of servers look alike."""
    found = {".npy": "vllm", ".pt": "sglang", ".parquet": "table", ".gguf": "imatrix"}.get(file.suffix)
    if is_csv(file):
        heads = csv_start(file)[1]
        found = "route" if "turn" in heads else "table" if "document" in heads else "llamacpp"
    if found is None:
        raise BadInput(f"--recorded {file}: give --format too; known: {', '.join(READERS)}")
    return found
