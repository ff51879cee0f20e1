"""Parse and check what users write: lists, ranges, names, devices."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from moescope.errors import BadInput, unknown_name


def choose_device(device: str) -> str:
    """Return the device to compute on; mps means cpu."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device in ("cpu", "mps"):
        return "cpu"
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise unknown_name("device", device, ["auto", "cpu", "cuda", "cuda:0", "mps"])
    if not torch.cuda.is_available():
        raise BadInput(f"device {device}: no CUDA device here; use --device cpu")
    if ":" in device and int(device.split(":")[1]) >= torch.cuda.device_count():
        raise BadInput(
            f"device {device}: this machine has {torch.cuda.device_count()} CUDA devices, numbered from 0"
        )
    return device


def device_warnings(device: str) -> list[str]:
    """Return a warning if another device is used than the one requested."""
    return ["device mps: Apple's GPU has no fp64, so the CPU was used"] if device == "mps" else []


def as_list(values: str | Path | Iterable[Any]) -> list[Any]:
    """Return one value or several as a list, which can be read again where a generator cannot."""
    if isinstance(values, str | Path):
        return [values] if values else []
    return list(values)


def one_of(kind: str, value: str, known: Collection[str]) -> str:
    """Return the value if it is known, else raise an error that lists the known ones."""
    if value not in known:
        raise unknown_name(kind, value, list(known))
    return value


def names(kind: str, value: str | Iterable[str], known: tuple[str, ...]) -> tuple[str, ...]:
    """Return names given as a list or separated by commas, each once and known."""
    given = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)
    chosen = tuple(dict.fromkeys(one_of(kind, part, known) for part in given))
    if not chosen:
        raise BadInput(f"no {kind} given; known: {', '.join(known)}")
    return chosen


def numbers(kind: str, value: int | str | Iterable[int]) -> tuple[int, ...]:
    """Return whole numbers from 1, given as one number, a list, or separated by commas."""
    value = str(value) if isinstance(value, int) else value
    parts = filter(str.strip, value.split(",")) if isinstance(value, str) else value
    try:
        given = sorted({int(part) for part in parts})
    except ValueError:
        raise BadInput(f"{kind} {value!r}: give whole numbers separated by commas, such as 1,2,4") from None
    if given and given[0] < 1:
        raise BadInput(f"{kind} {value!r}: numbers must be at least 1")
    return tuple(given)


def number_ranges(value: int | str | Iterable[int], what: str = "layers") -> list[int]:
    """Return the numbers of "0,5,9-12"; a number or a list is taken as it is."""
    value = str(value) if isinstance(value, int) else value
    if not isinstance(value, str):
        given = list(value)
        if not all(isinstance(part, int) and part >= 0 for part in given):
            raise BadInput(f"{what} {given!r}: give whole numbers from 0")
        return given
    layers: list[int] = []
    for part in value.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        if not match or (match[2] and not 0 <= int(match[2]) - int(match[1]) < 100_000):
            raise BadInput(f"{what} {value!r}: cannot read {part.strip()!r}; write them as 0,5,9-12")
        layers.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return layers


def consecutive(values: Iterable[int]) -> list[tuple[int, int]]:
    """0, 1, 2, 5 -> (0, 2), (5, 5): the first and last number of each run of ascending ones."""
    runs = groupby(enumerate(values), lambda pair: pair[1] - pair[0])
    parts = [[value for _, value in run] for _, run in runs]
    return [(part[0], part[-1]) for part in parts]


def ranges(values: list[int]) -> str:
    """0, 1, 2, 5 -> "0-2, 5"."""
    return ", ".join(
        str(first) if first == last else f"{first}-{last}" for first, last in consecutive(values)
    )


def step_numbers(model_names: list[str]) -> list[int]:
    """Return the training steps in the names (step1000-tokens4B, or checkpoint-500), else 0, 1, 2, ..."""
    marked = [match for name in model_names if (match := re.search(r"step[-_]?(?P<step>\d{1,18})", name))]
    if len(marked) < len(model_names):
        marked = [match for name in model_names if (match := re.fullmatch(r"(.*?)(?P<step>\d{1,18})", name))]
        marked = marked if len({match[1] for match in marked}) == 1 else []
    steps = [int(match["step"]) for match in marked]
    return steps if len(set(steps)) == len(model_names) > 1 else list(range(len(model_names)))
