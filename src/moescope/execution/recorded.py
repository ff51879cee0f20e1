"""Traces that other tools wrote: vLLM, SGLang, llama.cpp, and moescope's own tokens table."""

from __future__ import annotations

import base64
import binascii
import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moescope.errors import BadInput
from moescope.types import Array, Integers


@dataclass(frozen=True)
class Shape:
    """What the model's config says about a trace; None where no model was given."""

    n_experts: int
    all_layers: int | None = None  # of the model, MoE or dense
    k: int | None = None
    moe_layers: tuple[int, ...] = ()  # their numbers


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of one document in one phase, with the choices of every layer."""

    document: int
    domain: str
    phase: str
    chosen_TLK: Integers  # expert numbers, -1 where there is none; first choice first
    start: int = 0
    ids_T: Integers | None = None
    gates_TLK: Array | None = None
    layers: tuple[int, ...] = ()  # layer numbers; 0, 1, 2, ... where empty
    layer_names: tuple[str, ...] = field(default=())


def read_trace(file: Path, format: str, shape: Shape) -> Iterator[Stretch]:
    if not file.is_file():
        raise BadInput(f"{file}: no such file; give the recorded trace")
    for stretch in READERS[format](file, shape):
        highest, lowest = stretch.chosen_TLK.max(initial=-1), stretch.chosen_TLK.min(initial=-1)
        if highest >= shape.n_experts or lowest < -1:
            wrong = highest if highest >= shape.n_experts else lowest
            raise BadInput(
                f"{file}: expert {wrong} in document {stretch.document}, but --experts says {shape.n_experts}"
            )
        yield stretch


# --- vLLM and SGLang: answers of a server, one JSON object per line


def vllm(file: Path, shape: Shape) -> Iterator[Stretch]:
    """vLLM with --enable-return-routed-experts: arrays [tokens, layers, k], nested lists or base64 .npy.

    `prompt_routed_experts` is prefill. `routed_experts` is then decode; alone it holds all tokens, of which
    usage.prompt_tokens are prefill. A .npy file is one document.
    """
    if file.suffix == ".npy":
        yield Stretch(0, "text", "prefill", three_axes(load_npy(file.read_bytes(), file), file))
        return
    document = 0
    for number, answer in enumerate(json_lines(file)):
        choices = answer.get("choices") if isinstance(answer, dict) else None
        prompt = find_key(answer, "prompt_routed_experts")
        for index, choice in enumerate(choices if isinstance(choices, list) and choices else [answer]):
            rest = find_key(choice, "routed_experts")
            if prompt is None and rest is None:
                raise BadInput(
                    f'{file}, answer {number + 1}: no "routed_experts" in it; start vLLM with '
                    "--enable-return-routed-experts"
                )
            if prompt is None:
                yield from split(document, vllm_array(rest, file), find_key(answer, "prompt_tokens"))
            else:
                prefill = vllm_array(prompt, file)
                if index == 0:  # several choices share it
                    yield Stretch(document, "text", "prefill", prefill)
                if rest is not None:
                    yield Stretch(document, "text", "decode", vllm_array(rest, file), len(prefill))
            document += 1


def vllm_array(value: Any, file: Path) -> Integers:
    array = load_npy(decode64(value, file), file) if isinstance(value, str) else np.asarray(value)
    return three_axes(array, file)


def sglang(file: Path, shape: Shape) -> Iterator[Stretch]:
    """SGLang with --enable-return-routed-experts: base64 int32 [tokens, layers, k], shape from the model."""
    for number, answer in enumerate(json_lines(file)):
        value = find_key(answer, "routed_experts")
        if value is None:
            raise BadInput(
                f'{file}, answer {number + 1}: no "routed_experts" in it; ask SGLang with '
                "return_routed_experts"
            )
        if isinstance(value, str):
            if shape.all_layers is None or shape.k is None:
                raise BadInput(
                    f"{file}: SGLang's traces do not contain the number of layers and experts per token; "
                    "give the model's folder too"
                )
            flat = np.frombuffer(decode64(value, file), dtype="<i4")
            width = shape.all_layers * shape.k
            if len(flat) % width:
                raise BadInput(
                    f"{file}, answer {number + 1}: {len(flat)} numbers are no multiple of "
                    f"{shape.all_layers} layers x {shape.k} experts; give the model that was recorded"
                )
            array = flat.reshape(-1, shape.all_layers, shape.k).astype(np.int64)
        else:
            array = three_axes(np.asarray(value), file)
        yield from split(number, array, find_key(answer, "prompt_tokens"))


def split(number: int, array_TLK: Integers, prompt_tokens: Any) -> Iterator[Stretch]:
    """Yield the prompt as prefill and the rest as decode, where the prompt's length is known."""
    cut = len(array_TLK) if not isinstance(prompt_tokens, int) else min(prompt_tokens, len(array_TLK))
    yield Stretch(number, "text", "prefill", array_TLK[:cut])
    if cut < len(array_TLK):
        yield Stretch(number, "text", "decode", array_TLK[cut:], cut)


def find_key(answer: Any, key: str) -> Any:
    """Return the first value of that name at any depth: servers nest it differently."""
    if isinstance(answer, dict) and answer.get(key) is not None:
        return answer[key]
    inside = answer.values() if isinstance(answer, dict) else answer if isinstance(answer, list) else ()
    parts = (part for part in inside if isinstance(part, dict | list))
    return next((value for part in parts if (value := find_key(part, key)) is not None), None)


def json_lines(file: Path) -> Iterator[Any]:
    """Yield every JSON object of a file: one per line, a list of them, or a single one."""
    try:
        if file.suffix == ".json":
            content = json.loads(file.read_text(encoding="utf-8"))
            yield from content if isinstance(content, list) else [content]
            return
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                if line.strip():
                    yield json.loads(line)
    except ValueError as error:
        raise BadInput(f"{file}: not valid JSON ({error}); give one object per line") from None


def decode64(value: str, file: Path) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        raise BadInput(f"{file}: routed_experts is not base64; give the server's unchanged answer") from None


def load_npy(content: bytes, file: Path) -> Any:
    try:
        return np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, OSError, EOFError):
        raise BadInput(f"{file}: no .npy array in it; give the server's unchanged answer") from None


def three_axes(array: Any, file: Path) -> Integers:
    if array.ndim != 3 or not np.issubdtype(array.dtype, np.integer):
        raise BadInput(
            f"{file}: an array of shape {list(array.shape)}; expected whole numbers [tokens, layers, k]"
        )
    return array.astype(np.int64)


# --- llama.cpp


def llamacpp(file: Path, shape: Shape) -> Iterator[Stretch]:
    """llama.cpp's trace, one document: CSV rows `layer,expert`, one per choice, a token's k choices in a row.

    Without a model, k is the largest for which every k rows of a layer name different experts.
    """
    by_layer: dict[int, list[int]] = {}
    with file.open(encoding="utf-8", newline="") as opened:
        for number, row in enumerate(csv.reader(opened), start=1):
            if not row or (number == 1 and row[0].strip() == "layer"):
                continue
            try:
                layer, expert = int(row[0]), int(row[1])
            except (ValueError, IndexError):
                raise BadInput(f"{file}, line {number}: {','.join(row)!r} is not layer,expert") from None
            by_layer.setdefault(layer, []).append(expert)
    if not by_layer:
        raise BadInput(f"{file}: no rows in it; give a trace that llama.cpp wrote")
    lengths = {len(experts) for experts in by_layer.values()}
    if len(lengths) > 1:
        raise BadInput(f"{file}: layers have {min(lengths)} to {max(lengths)} rows; give a complete trace")
    k = shape.k or inferred_k(list(by_layer.values()), shape.n_experts)
    rows = lengths.pop()
    if rows % k:
        raise BadInput(
            f"{file}: {rows} rows per layer are no multiple of k = {k}; give the model that was recorded"
        )
    layers = tuple(sorted(by_layer))
    chosen_TLK = np.stack(
        [np.array(by_layer[layer], dtype=np.int64).reshape(-1, k) for layer in layers], axis=1
    )
    yield Stretch(0, "text", "prefill", chosen_TLK, layers=layers)


def inferred_k(layers: list[list[int]], n_experts: int) -> int:
    rows = len(layers[0])
    for k in range(min(n_experts, rows), 1, -1):
        if rows % k == 0 and all(all_different(np.array(experts).reshape(-1, k)) for experts in layers):
            return k
    return 1


def all_different(groups: Integers) -> bool:
    ordered = np.sort(groups, axis=1)
    return bool((ordered[:, 1:] != ordered[:, :-1]).all())


# --- moescope


def moescope(file: Path, shape: Shape) -> Iterator[Stretch]:
    """A tokens table written with --save-tokens: documents, domains, positions and gates included."""
    from moescope.tables import read_parquet

    frame = read_parquet(str(file))
    if frame["step"].nunique() > 1:
        raise BadInput(f"{file}: holds {frame['step'].nunique()} steps; give one at a time")
    layers = tuple(sorted(int(layer) for layer in frame["layer"].unique()))
    names = dict(zip(frame["layer"], frame["layer_name"], strict=True))
    k = max((len(experts) for experts in frame["experts"]), default=1) or 1
    for (document, phase), rows in frame.groupby(["document", "phase"], sort=True):
        rows = rows.sort_values(["position", "layer"])
        tokens = len(rows) // len(layers)
        shaped = (tokens, len(layers), k)
        gates = None if rows["gates"].isna().any() else padded(rows["gates"], k, 0.0).reshape(shaped)
        yield Stretch(
            int(document),
            str(rows["domain"].iloc[0]),
            str(phase),
            padded(rows["experts"], k, -1).reshape(shaped).astype(np.int64),
            int(rows["position"].iloc[0]),
            rows["token_id"].to_numpy()[:: len(layers)].astype(np.int64),
            gates,
            layers,
            tuple(names[layer] for layer in layers),
        )


def padded(lists: Any, k: int, filler: float) -> Array:
    rows = np.full((len(lists), k), float(filler))
    for row, values in zip(rows, lists, strict=True):
        row[: len(values)] = values
    return rows


READERS: dict[str, Callable[[Path, Shape], Iterator[Stretch]]] = {
    "vllm": vllm,
    "sglang": sglang,
    "llamacpp": llamacpp,
    "moescope": moescope,
}
