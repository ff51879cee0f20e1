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
from importlib.util import find_spec
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from moescope.errors import BadInput, one_line, reject_if
from moescope.tables import check_values
from moescope.types import Array, Integers

MOST_LAYERS = 1000
MOST_LINE = 1000  # bytes of one row of llama.cpp's CSV, or of a CSV's header
MOST_COMMENTS = 10_000
MOST_ROWS = 20_000_000  # of a tokens table
MOST_TOKEN_IDS = 2**24
MOST_TOKENS = 2**40  # of one expert
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
UNCHANGED = "give the server's unchanged answer"


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
    """Yield the parts of a trace; a reader checks what it needs to make arrays, and this the arrays."""
    for part in READERS[format](file, shape):
        if isinstance(part, Load):
            yield part
            continue
        where, n = f"{file}, document {part.document}", shape.n_experts
        _, layers, k = part.chosen_TLK.shape
        reject_if(
            not (1 <= layers <= MOST_LAYERS and 1 <= k <= n),
            f"{where}: {layers} layers with {k} experts per token; expected 1 to {MOST_LAYERS} and 1 to {n}",
        )
        reject_if(
            (wrong := outside(part.chosen_TLK, -1, n)) is not None,
            f"{where}: expert {wrong}, but a layer has {n}; see --experts",
        )
        reject_if(
            part.ids_T is not None and (wrong := outside(part.ids_T, 0, MOST_TOKEN_IDS)) is not None,
            f"{where}: token id {wrong}; expected 0 to {MOST_TOKEN_IDS - 1}",
        )
        yield replace(part, chosen_TLK=part.chosen_TLK.astype(np.int16))


def outside(numbers: NDArray[Any], least: int, end: int) -> int | None:
    """Return a number that is not from `least` to before `end`; None if all are."""
    lowest, highest = (int(numbers.min()), int(numbers.max())) if numbers.size else (least, least)
    return highest if highest >= end else lowest if lowest < least else None


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
    for where, answer in answers(file):
        choices = answer.get("choices") if isinstance(answer, dict) else None
        choices = choices if isinstance(choices, list) and choices else [answer]
        prompt, prompts = find_key(answer, "prompt_routed_experts"), set[str]()
        for choice in choices:
            rest = find_key(choice, "routed_experts")
            reject_if(
                prompt is None and rest is None,
                f'{where}: no "routed_experts" in it; start vLLM with --enable-return-routed-experts',
            )
            ids = None if prompt is not None else find_key(choice, "prompt_token_ids")
            if prompt is not None:
                prefill = vllm_array(prompt, file)
                parts = [Stretch(document, "text", "prefill", prefill)]
                if rest is not None:
                    parts.append(Stretch(document, "text", "decode", vllm_array(rest, file), len(prefill)))
            else:
                tokens = len(ids) if isinstance(ids, list) else find_key(answer, "prompt_tokens")
                chosen_TLK = vllm_array(rest, file)
                reject_if(
                    len(choices) > 1 and (not isinstance(tokens, int) or tokens > len(chosen_TLK)),
                    f"{where}: {len(choices)} choices share a prompt, but prompt_tokens is {tokens}; "
                    "keep the answer's usage, and ask for one prompt at a time",
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
    for document, (where, answer) in enumerate(answers(file)):
        value = find_key(answer, "routed_experts")
        reject_if(value is None, f'{where}: no "routed_experts" in it; ask SGLang with return_routed_experts')
        if isinstance(value, str):
            if shape.all_layers is None or shape.k is None:
                raise BadInput(
                    f"{file}: SGLang's traces do not contain the number of layers and experts per token; "
                    "give the model's folder too"
                )
            content, width = decode64(value, file), shape.all_layers * shape.k
            reject_if(
                len(content) % (4 * width),
                f"{where}: {len(content)} bytes are no multiple of 4 x {shape.all_layers} layers x "
                f"{shape.k} experts; give the model that was recorded",
            )
            chosen_TLK = np.frombuffer(content, dtype="<i4").reshape(-1, shape.all_layers, shape.k)
        else:
            chosen_TLK = three_axes(value, file)
        yield from split(document, chosen_TLK, find_key(answer, "prompt_tokens"), where)


def split(
    document: int, chosen_TLK: NDArray[np.integer], prompt_tokens: Any, where: str
) -> Iterator[Stretch]:
    """Yield the prompt as prefill and the rest as decode, where the prompt's length is known."""
    if prompt_tokens is None:
        prompt_tokens = len(chosen_TLK)
    reject_if(
        not isinstance(prompt_tokens, int) or prompt_tokens < 0,
        f"{where}: prompt_tokens {prompt_tokens!r}; expected a number of tokens",
    )
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


def answers(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield (where, answer) for a file of one JSON object per line, lists of them, or a single one."""
    numbers = count(1)
    damaged = one_line(f"{file}: not valid JSON", "give one object per line", (ValueError, RecursionError))
    with damaged, file.open(encoding="utf-8") as lines:
        for line in [lines.read()] if file.suffix == ".json" else lines:
            if line.strip():
                content = json.loads(line)
                for answer in content if isinstance(content, list) else [content]:
                    yield f"{file}, answer {next(numbers)}", answer


def decode64(value: str, file: Path) -> bytes:
    with one_line(f"{file}: routed_experts is not base64", UNCHANGED, ValueError):
        return base64.b64decode(value, validate=True)


def load_npy(content: bytes, file: Path) -> Any:
    """Return the array of a .npy file, whose header may claim more than the file holds."""
    with one_line(f"{file}: no valid .npy array in it", UNCHANGED):  # numpy parses the header as Python
        stream = io.BytesIO(content)
        version = npy.read_magic(stream)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, by_columns, dtype = read_header(stream)
        return np.frombuffer(content[stream.tell() :], dtype).reshape(shape, order="F" if by_columns else "C")


def three_axes(value: Any, file: Path) -> NDArray[np.integer]:
    remedy = "expected [tokens, layers, k]"
    with one_line(f"{file}: lists of different lengths", remedy, (ValueError, OverflowError)):
        chosen = np.asarray(value)
    reject_if(
        chosen.ndim != 3 or not np.issubdtype(chosen.dtype, np.integer) or not all(chosen.shape[1:]),
        f"{file}: {chosen.dtype} array of shape {list(chosen.shape)}; expected whole numbers "
        "[tokens, layers, k]",
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

    with one_line(f"{file}: no file of tensors", "give what SGLang's expert distribution recorder wrote"):
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    content = content if isinstance(content, dict) else {}
    if "logical_count" in content:
        counts = tensor_array(content["logical_count"], file, "logical_count", (2, 3))
        reject_if(
            counts.shape[-1] != shape.n_experts or outside(counts, 0, MOST_TOKENS) is not None,
            f"{file}: logical_count of shape {list(counts.shape)}; expected [layers, {shape.n_experts}] "
            "counts; see --experts",
        )
        yield Load(counts.reshape(-1, *counts.shape[-2:]).sum(0, dtype=np.int64))
        return
    records = content.get("records")
    reject_if(
        not isinstance(records, list)
        or not all(isinstance(record, dict) and "topk_ids_of_layer" in record for record in records),
        f"{file}: neither logical_count nor topk_ids_of_layer in it; record with SGLang's "
        "--expert-distribution-recorder-mode stat or per_token",
    )
    logical = content.get(PHYSICAL)
    logical_LP = None if logical is None else tensor_array(logical, file, PHYSICAL, (2,))
    document, generated = 0, list[tuple[Any, Integers]]()
    for number, record in enumerate(records, start=1):
        where = f"{file}, record {number}"
        chosen_TLK, ids_T, starts, lengths = read_record(record, logical_LP, file, where)
        mode = record.get("forward_mode")
        reject_if(
            mode in SPECULATIVE, f"{where}: speculative decoding (forward_mode {mode}); record without it"
        )
        for begin, end in pairwise(np.cumsum([0, *lengths])):
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
    chosen_LTK = tensor_array(record["topk_ids_of_layer"], file, "topk_ids_of_layer", (3,))
    n_layers, tokens, _ = chosen_LTK.shape
    lists = [record.get(name) for name in ("input_ids", "positions", "extend_seq_lens")]
    if lists[2] is None:
        lists[2] = [tokens] if record.get("forward_mode") != DECODE else [1] * tokens
    unfit = f"{where}: input_ids, positions and extend_seq_lens do not fit {tokens} tokens"
    with one_line(unfit, "expected lists of whole numbers from 0", (TypeError, ValueError, OverflowError)):
        ids_T, positions_T, lengths = (
            np.asarray(values if isinstance(values, list) else None).astype(np.int64) for values in lists
        )
        fit = ids_T.shape == positions_T.shape == (tokens,) and lengths.ndim == 1 and lengths.sum() == tokens
        if not fit or min(lengths.min(initial=0), positions_T.min(initial=0)) < 0:
            raise ValueError(f"{ids_T.size} ids, {positions_T.size} positions")
    if logical_LP is not None:
        reject_if(
            len(logical_LP) != n_layers or chosen_LTK.max(initial=-1) >= logical_LP.shape[1],
            f"{where}: experts of {n_layers} layers up to {chosen_LTK.max(initial=-1)}, but {PHYSICAL} "
            f"has shape {list(logical_LP.shape)}",
        )
        mapped = np.take_along_axis(logical_LP[:, None], np.maximum(chosen_LTK, 0).astype(np.int64), axis=2)
        chosen_LTK = np.where(chosen_LTK < 0, chosen_LTK, mapped)
    return chosen_LTK.transpose(1, 0, 2), ids_T, positions_T, lengths.tolist()


def tensor_array(value: Any, file: Path, name: str, axes: tuple[int, ...]) -> NDArray[np.integer]:
    """Return a tensor of whole numbers; one that claims more than the file holds is an error."""
    import torch

    whole = isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()
    reject_if(
        not whole or value.is_nested or value.layout != torch.strided or value.nbytes > file.stat().st_size,
        f"{file}: {name} is no tensor of whole numbers stored in this file",
    )
    reject_if(
        value.ndim not in axes, f"{file}: {name} has shape {list(value.shape)}; expected {axes[0]} axes"
    )
    return np.asarray(value.numpy())


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
                by_layer.setdefault(range(MOST_LAYERS).index(layer), array("h")).append(expert)
            except (ValueError, IndexError, OverflowError):
                shown = line[:40].decode("ascii", "backslashreplace").strip()
                raise BadInput(
                    f"{file}, line {number}: {shown!r} is not layer,expert; check --format, or record it "
                    f"again (layers from 0 to {MOST_LAYERS - 1})"
                ) from None
    reject_if(not by_layer, f"{file}: no rows in it; give a trace that llama.cpp wrote")
    experts = {layer: np.frombuffer(by_layer[layer], dtype=np.int16) for layer in sorted(by_layer)}
    k = shape.k or inferred_k(list(experts.values()), shape.n_experts)
    lengths: dict[int, list[int]] = {}
    for layer, rows in experts.items():
        lengths.setdefault(len(rows), []).append(layer)
        reject_if(
            len(rows) % k,
            f"{file}: {len(rows)} rows of layer {layer} are no multiple of k = {k}; give a complete "
            "trace, and the model that was recorded",
        )
    for length, layers in lengths.items():
        chosen_TLK = np.stack([experts[layer].reshape(-1, k) for layer in layers], axis=1)
        start = (max(lengths) - length) // k
        yield Stretch(0, "text", "prefill", chosen_TLK, start, layers=tuple(layers))


def inferred_k(layers: list[NDArray[np.integer]], n_experts: int) -> int:
    divisor = int(np.gcd.reduce([len(experts) for experts in layers]))
    divisors = (k for k in range(min(n_experts, divisor), 1, -1) if divisor % k == 0)

    def differ(k: int) -> bool:
        return all(np.diff(np.sort(experts.reshape(-1, k), axis=1)).all() for experts in layers)

    return next(filter(differ, divisors), 1)


# --- importance matrices of llama.cpp (llama-imatrix, GGUF): how many tokens each expert got

COUNTS = re.compile(r"blk\.(\d{1,3})\.(.+)\.weight\.counts")
MOST_EXPERTS = 4096


def read_imatrix(file: Path) -> tuple[dict[int, Integers], int | None]:
    """Return tokens per expert of every MoE layer, and the experts per token where the file tells them.

    Tensors `blk.N.ffn_*_exps.weight.counts` hold one count per expert; those of a layer's projections are
    equal. The counts of its other tensors are the tokens that it saw, else chunks times tokens per chunk.
    """
    layers: dict[int, Integers] = {}
    seen: dict[int, int] = {}
    tensors, chunk_tokens = read_counts(file)
    named = [(found, tensors[name]) for name in tensors if (found := COUNTS.fullmatch(name))]
    for found, values in named:
        layer, of_experts = int(found[1]), re.fullmatch(r"ffn_\w+_exps", found[2])
        others = [len(layers.get(layer, values)), MOST_EXPERTS] if of_experts else [len(values)]
        is_count = np.isfinite(values) & (values >= 0) & (values < MOST_TOKENS)
        reject_if(
            not is_count.all() or others[0] != len(values) or len(values) > others[-1],
            f"{file}: tensor {found[0]} of {len(values)} numbers; expected a count per expert, as many in "
            f"all projections of the layer, at most {MOST_EXPERTS}; make the importance matrix again",
        )
        counts = np.round(values).astype(np.int64)
        if of_experts:
            layers[layer] = np.maximum(layers.get(layer, counts), counts)
        elif len(counts) == 1:
            seen[layer] = max(seen.get(layer, 0), int(counts[0]))
    reject_if(
        not layers,
        f"{file}: no tensor blk.N.ffn_*_exps.weight.counts in it; give what llama-imatrix wrote for a "
        "Mixture-of-Experts model",
    )
    shares = {
        int(counts_E.sum()) / tokens
        for layer, counts_E in layers.items()
        if (tokens := seen.get(layer) or chunk_tokens) and counts_E.any()
    }
    k = round(next(iter(shares))) if shares else 0
    known = k > 0 and all(abs(share - k) < 0.01 * k for share in shares)
    return dict(sorted(layers.items())), k if known else None


def read_counts(file: Path) -> tuple[dict[str, Array], int]:
    """Return the tensors of counts by name, and the tokens that the matrix was made from (0: unknown)."""
    reject_if(
        file.suffix == ".dat",
        f"{file}: an importance matrix in the old format, without counts per expert; convert or make it "
        "with llama-imatrix --output-format gguf",
    )
    needs = f"{file}: GGUF files are read with the package gguf; pip install 'moescope[formats]'"
    reject_if(find_spec("gguf") is None, needs)
    import gguf

    with one_line(f"{file}: no valid GGUF file", "make the importance matrix again"):
        reader = gguf.GGUFReader(file)
        with np.errstate(invalid="ignore"):  # damaged numbers are named by the caller
            tensors = {
                tensor.name: np.array(tensor.data, dtype=np.float64).reshape(-1)
                for tensor in reader.tensors
                if tensor.name.endswith(".counts") and tensor.tensor_type == gguf.GGMLQuantizationType.F32
            }
        fields = [reader.fields.get(f"imatrix.chunk_{what}") for what in ("count", "size")]
        chunks = [0 if field is None else int(field.parts[field.data[0]][0]) for field in fields]
    return tensors, chunks[0] * chunks[1]


def imatrix(file: Path, shape: Shape) -> Iterator[Load]:
    """An importance matrix of llama.cpp: tokens per expert, no order of tokens."""
    layers, k = read_imatrix(file)
    counts_LE = np.zeros((len(layers), shape.n_experts), dtype=np.int64)
    for row, (layer, counts_E) in zip(counts_LE, layers.items(), strict=True):
        expected = (shape.layers or {layer: shape.n_experts}).get(layer, 0)
        reject_if(
            len(counts_E) > expected,
            f"{file}: {len(counts_E)} experts in layer {layer}, not {expected}; see --experts",
        )
        row[: len(counts_E)] = counts_E
    yield Load(counts_LE, tuple(layers), k)


# --- tables: parquet or CSV


def table(file: Path, shape: Shape) -> Iterator[Stretch]:
    """A table of tokens, such as that of --save-tokens: parquet, or CSV (.csv, .csv.gz).

    Columns document, position, layer and experts (by falling gate), one row per token and layer: lists, or in
    CSV numbers with spaces between them. Or `expert`, one row per choice, in the order of `slot` where
    it is given. Optional: gates (or gate), domain, phase (prefill or decode), token_id, layer_name.
    """
    yield from stretches(read_frame(file), file, shape)


def route(file: Path, shape: Shape) -> Iterator[Stretch]:
    """A route trace: CSV rows turn, phase (0 prefill, 1 decode), step, layer, slot, expert, weight."""
    frame = read_frame(file)
    missing = [name for name in ROUTE if name not in frame.columns]
    reject_if(missing, f"{file}: no column {', '.join(missing)}; give a route trace, or another --format")
    frame = frame[list(ROUTE)].rename(columns=ROUTE)
    yield from stretches(frame.replace({"phase": {"0": "prefill", "1": "decode"}}), file, shape)


def stretches(frame: Any, file: Path, shape: Shape) -> Iterator[Stretch]:
    """Yield the tokens of every document and phase; layers with the same positions together."""
    check_columns(frame, file)
    for name, default in (("domain", "text"), ("phase", "prefill")):
        frame = frame.assign(**{name: frame[name].astype(str) if name in frame else default})
    strange = sorted(set(frame["phase"]) - {"prefill", "decode"})
    reject_if(strange, f"{file}: phase {', '.join(map(repr, strange))}; expected prefill or decode")
    names = dict(zip(frame["layer"], frame["layer_name"], strict=True)) if "layer_name" in frame else {}
    if "experts" in frame:
        experts, lengths_T = join_lists(frame["experts"], file)
        gates, gates_T = join_lists(frame["gates"], file) if has_values(frame, "gates") else (None, lengths_T)
    else:
        frame, experts, gates, lengths_T = join_choices(frame)
        gates_T = lengths_T
    k = int(lengths_T.max(initial=1)) or 1
    reject_if(k > shape.n_experts, f"{file}: a token with {k} experts of {shape.n_experts}; see --experts")
    reject_if(
        (gates_T != lengths_T).any(),
        f"{file}: a token with more or fewer gates than experts; write the table again",
    )
    chosen_TK = padded(experts, lengths_T, k, -1)
    gates_TK = None if gates is None else padded(gates.astype(np.float64), lengths_T, k, 0.0)
    position_T, layer_T = (frame[name].to_numpy().astype(np.int64) for name in ("position", "layer"))
    ids_T = frame["token_id"].to_numpy().astype(np.int64) if "token_id" in frame else None
    for twice in frame[frame.duplicated(["domain", "document", "phase", "layer", "position"])].itertuples():
        raise BadInput(
            f"{file}: two rows of document {twice.document}, layer {twice.layer}, position {twice.position}; "
            "give every document its own number"
        )
    groups = frame.groupby(["domain", "document", "phase"], sort=False).indices
    numbers: dict[tuple[str, int], int] = {}  # documents of two domains may have the same number
    for domain, document, phase in sorted(groups, key=lambda key: (key[1], key[0], key[2] != "prefill")):
        rows_T = groups[domain, document, phase]
        rows_T = rows_T[np.lexsort((position_T[rows_T], layer_T[rows_T]))]
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
    reject_if(
        missing, f"{file}: no column {', '.join(missing)}; expected document, position, layer and experts"
    )
    for name in frame.columns.intersection([*NUMBERS, *choices]):
        least = -1 if name == "expert" else 0
        reject_if(
            frame[name].dtype.kind not in "iu" or frame[name].min() < least or frame[name].max() >= 2**62,
            f"{file}: column {name} must hold whole numbers from 0; write the table again",
        )
    gates = f"{file}: column gate must hold numbers; write the table again"
    reject_if("gate" in frame and frame["gate"].dtype.kind != "f", gates)
    layers, steps = (frame[name].nunique() if name in frame else 1 for name in ("layer", "step"))
    reject_if(layers > MOST_LAYERS, f"{file}: {layers} layers; expected at most {MOST_LAYERS}")
    reject_if(steps > 1, f"{file}: holds {steps} steps; give one at a time")


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


def is_csv(file: Path) -> bool:
    return file.name.removesuffix(".gz").endswith(".csv")


def csv_start(file: Path) -> tuple[list[str], list[str]]:
    """Return the comment lines (#) before a CSV's header, and the names of its columns."""
    comments: list[str] = []
    damaged = one_line(f"{file}: cannot be read", "copy it again", (OSError, EOFError, zlib.error))
    with damaged, gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
        for _ in range(MOST_COMMENTS):
            line = opened.readline(MOST_LINE).decode("utf-8", "backslashreplace").strip()
            if not line.startswith("#"):
                return comments, [name.strip() for name in line.split(",")]
            comments.append(line)
    raise BadInput(f"{file}: more than {MOST_COMMENTS} comment lines; give a CSV with a header")


def read_frame(file: Path) -> Any:
    """Return the known columns of a CSV or a parquet file; its rows are counted while they are read."""
    import pyarrow as pa

    parts, rows = [], 0
    what = "no valid CSV" if is_csv(file) else "damaged parquet file"
    kinds = (pa.ArrowException, OSError, EOFError, ValueError, TypeError)
    with one_line(f"{file}: {what}", "write it again", kinds):
        batches = open_batches(file)
        for part in batches:
            parts.append(part)
            rows += len(part)
            reject_if(rows > MOST_ROWS, f"{file}: more than {MOST_ROWS:,} rows; give a part of it")
        return pa.Table.from_batches(parts, batches.schema).to_pandas()


def open_batches(file: Path) -> Any:
    """Return a reader of the file's known columns, batch by batch."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    if is_csv(file):
        comments, heads = csv_start(file)
    else:
        unknown = f"{file}: neither a .csv nor a parquet file; give another --format"
        with file.open("rb") as start:
            reject_if(start.read(4) != b"PAR1", unknown)
        opened = parquet.ParquetFile(file.absolute())
        check_values(opened, file)
        heads = opened.schema_arrow.names
    wanted = [name for name in heads if name in COLUMNS]
    reject_if(
        len(set(wanted)) < len(wanted),
        f"{file}: a column appears twice in {', '.join(wanted)}; name every column once",
    )
    if is_csv(file):
        kinds = {"int": pa.int64(), "float": pa.float64(), "text": pa.string()}
        types = {name: kinds[kind] for name, kind in COLUMNS.items()}
        options = csv.ConvertOptions(column_types=types, include_columns=wanted)
        start = csv.ReadOptions(skip_rows=len(comments))
        return csv.open_csv(file.absolute(), start, convert_options=options)
    schema = pa.schema([opened.schema_arrow.field(name) for name in wanted])
    return pa.RecordBatchReader.from_batches(schema, opened.iter_batches(columns=wanted))


def expert_count(file: Path) -> int | None:
    """Return the number of experts that the file states (a CSV's comment n_expert=128), None without one."""
    if file.suffix == ".gguf":
        return max(len(counts_E) for counts_E in read_imatrix(file)[0].values())
    found = re.search(r"\bn_expert=(\d{1,6})\b", " ".join(csv_start(file)[0])) if is_csv(file) else None
    return int(found[1]) if found else None


def join_lists(lists: Any, file: Path) -> tuple[Any, Integers]:
    """Return the numbers of all lists in a row, and the lists' lengths. In a CSV a list is text."""
    kind, whole = (np.int64, "whole ") if lists.name == "experts" else (np.float64, "")
    damaged = f"{file}: column {lists.name} must hold lists of {whole}numbers, such as 3 17 5"
    with one_line(damaged, "write the table again", (ValueError, TypeError, OverflowError)):
        rows = [
            np.array(cell.strip("[] ").replace(",", " ").split(), kind) if isinstance(cell, str) else cell
            for cell in lists
        ]
        lengths_T = np.array([len(row) for row in rows], dtype=np.int64)
        return np.concatenate([np.zeros(0, kind), *rows], dtype=kind, casting="same_kind"), lengths_T


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
    if is_csv(file):
        heads = csv_start(file)[1]
        return "route" if "turn" in heads else "table" if "document" in heads else "llamacpp"
    known = {".npy": "vllm", ".pt": "sglang", ".parquet": "table", ".gguf": "imatrix"}
    reject_if(file.suffix not in known, f"--recorded {file}: give --format too; known: {', '.join(READERS)}")
    return known[file.suffix]
