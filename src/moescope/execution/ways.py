"""Ways to run a model: resident, sharded or streamed; which of them fits, and what it is expected to take."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from moescope.checkpoint import Checkpoint
from moescope.errors import BadInput, reject_if
from moescope.families.reading import text_config
from moescope.progress import duration
from moescope.run import STREAMED, RunWriter
from moescope.storage import check_inside

Way = Literal["auto", "resident", "sharded", "streamed"]
USABLE = 0.8  # share of the free memory that a run may take without --memory
SLACK = 1.1  # activations and what libraries take, over the weights
LAYERS_HELD = 3  # one that computes, one that is read, and its parts while transformers joins them
TIMED_BYTES = 16 * 2**20  # of the checkpoint, read to estimate the time; at most a hundredth of it
ASSUMED_SPEED = 1e9  # bytes per second, of checkpoints too small to be timed
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{letter}I": 2 ** (10 * power) for power, letter in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class Expected:
    """What a run is expected to take; None where it cannot be known before the start."""

    model: str
    way: str
    memory_bytes: int | None
    disk_bytes: int = 0
    device_bytes: int = 0  # of a GPU, where memory_bytes are of the host
    seconds: float | None = None
    note: str = ""
    workers: int = 1  # each takes this much, and the time if all run at once

    def line(self) -> str:
        parts = [f"memory {size(self.memory_bytes)}" if self.memory_bytes else "memory unknown"]
        parts += [f"GPU memory {size(self.device_bytes)}"] if self.device_bytes else []
        parts += [f"disk {size(self.disk_bytes)}"] if self.disk_bytes else []
        parts += [f"time about {duration(self.seconds)}"] if self.seconds is not None else []
        note = f"; {self.note}" if self.note else ""
        where = f" on {self.workers} workers, each" if self.workers > 1 else ""
        return f"execution {self.way}{where}: expected {', '.join(parts)}{note}"


@dataclass
class Execution:
    """How the user wants models to be run, and where a run keeps what it needs to continue."""

    way: Way = "resident"
    memory: int | None = None  # bytes; None: most of what is free
    folder: Path | None = None  # for hidden states that do not fit into memory
    quiet: bool = True
    save: Callable[[list[dict[str, Any]]], None] = lambda expected: None
    on_total: Callable[[int], None] = lambda tokens: None  # told the number of tokens once it is known
    announced: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of_run(cls, writer: RunWriter, way: Way, memory: int | None, quiet: bool) -> Execution:
        """Return the execution of a run that is being written: run.json holds what is expected of it."""
        folder = writer.path / STREAMED
        check_inside(folder / "states", writer.path)
        how = cls(way, memory, folder, quiet, lambda expected: writer.save_info(execution=expected))
        return replace(how, announced=list(writer.info.get("execution", ())))

    @property
    def limit(self) -> int:
        """Bytes of host memory that the run may take."""
        return self.memory if self.memory is not None else int(USABLE * available_memory())

    def announce(self, expected: Expected) -> None:
        """Print what is expected, and store it in run.json."""
        same = (expected.model, expected.workers)
        others = [entry for entry in self.announced if (entry["model"], entry.get("workers", 1)) != same]
        self.announced = [*others, asdict(expected)]
        if not self.quiet:
            print(expected.line(), file=sys.stderr)
        self.save(self.announced)

    def record(self, model: str, **facts: Any) -> None:
        """Add to run.json what the last run of the model has taken."""
        next(entry for entry in reversed(self.announced) if entry["model"] == model).update(facts)
        self.save(self.announced)


def parse_size(option: str, value: str | int | None) -> int | None:
    """Return the bytes of "8GB", "500MB" or "1.5TiB"; None for None."""
    if value is None or isinstance(value, int):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", value.upper())
    if not match or not float(match[1]):
        raise BadInput(f"{option} {value!r}: not a size; write it as 8GB or 500MB")
    return int(float(match[1]) * UNITS[match[2] or ""])


def size(count: float) -> str:
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    unit, scale = next((known for known in units if count >= known[1]), units[-1])
    return f"{count / scale:.3g} {unit}"


# --- what there is


def available_memory() -> int:
    """Return the host memory that is free, within the limit of the control group if there is one."""
    available = (line for line in read_lines("/proc/meminfo") if line.startswith("MemAvailable:"))
    free = [2**62, *(int(line.split()[1]) * 1024 for line in available)]
    most, used = (read_lines(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if most and used and most[0].isdigit():
        free.append(max(int(most[0]) - int(used[0]), 0))
    return min(free)


def read_lines(file: str) -> list[str]:
    with suppress(OSError):
        return Path(file).read_text().splitlines()
    return []


def free_on_devices(device: str) -> list[int]:
    """Return the free memory of the GPU that is used, first, and of the other ones; none for the CPU."""
    if not device.startswith("cuda"):
        return []
    import torch

    first = torch.device(device).index or 0
    indices = sorted(range(torch.cuda.device_count()), key=lambda at: at != first)
    return [torch.cuda.mem_get_info(at)[0] for at in indices]


# --- the choice


def weight_bytes(checkpoint: Checkpoint, dtype: str, device: str) -> int:
    """Return the size of the model in memory; quantised weights stay packed on a GPU only."""
    config = text_config(checkpoint.config)
    known = str(config.get("dtype") or config.get("torch_dtype") if dtype == "auto" else dtype)
    as_stored = device.startswith("cuda") if checkpoint.packed else known not in ITEM_BYTES
    if as_stored:
        return checkpoint.bytes()
    return sum(info.parameters for info in checkpoint.tensors.values()) * ITEM_BYTES.get(known, 2)


def choose_way(checkpoint: Checkpoint | None, dtype: str, device: str, how: Execution) -> str:
    """Return the way that the user asked for; for auto, the first that fits."""
    if how.way != "auto" or checkpoint is None:  # of unknown size: only transformers can read it
        return "resident" if how.way == "auto" else how.way
    needed = int(SLACK * weight_bytes(checkpoint, dtype, device))
    devices, limit = free_on_devices(device), how.limit
    if needed <= (devices[0] if devices else limit):
        return "resident"
    if devices and needed <= sum(devices) + limit and find_spec("accelerate") is not None:
        return "sharded"
    return "streamed"


def sharded_placement(name: str, device: str, limit: int) -> dict[str, Any]:
    """Return how accelerate is to place a model: over all GPUs, then in host memory."""
    reject_if(
        find_spec("accelerate") is None,
        f"{name}: --execution sharded needs accelerate; install moescope with its extra: "
        "pip install 'moescope[hf]'",
    )
    most: dict[Any, int] = {"cpu": limit}
    if devices := free_on_devices(device):
        most |= dict(enumerate(int(free / SLACK) for free in devices))
    return {"device_map": "auto", "max_memory": most}


def read_seconds(checkpoint: Checkpoint) -> float:
    """Return the time to read the checkpoint once, from the time of a small part of it."""
    stored = checkpoint.bytes()
    if stored < 100 * 2**20:
        return stored / ASSUMED_SPEED
    per_number = stored / max(sum(info.parameters for info in checkpoint.stored.values()), 1)
    budget, read, start = min(TIMED_BYTES, stored // 100), 0, time.perf_counter()
    for name, info in checkpoint.stored.items():
        if info.parameters * per_number <= budget - read:
            read += checkpoint.read_stored(name, None).nbytes
    return (time.perf_counter() - start) * stored / read if read else 0.0
