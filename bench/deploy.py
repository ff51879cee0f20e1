"""CPU time and memory of deploy's tables on a made trace.

Also the ratio to a plain Python replay of LRU, LFU and Belady's rule at the same sizes.

    python bench/deploy.py                       # 1 million tokens x 48 layers, 128 experts, top 8
    python bench/deploy.py --tokens 50000 --layers 12

Every second token repeats the experts of the one before, which are drawn by popularity. Memory is that of all
processes together, pages that they share counted once (PSS, Linux).
"""

from __future__ import annotations

import argparse
import resource
import threading
import time
from pathlib import Path

import numpy as np

from moescope.deployment.caches import belady, lfu, recency, stack_depths
from moescope.deployment.coverage import coverage_tables
from moescope.deployment.placement import Cluster, placement_table
from moescope.deployment.prefetch import prefetch_table
from moescope.deployment.residency import residency_tables
from moescope.deployment.tokens import TokenTrace, split_tokens

PLAIN_CHOICES = 200_000  # replayed one after the other in plain Python
SAMPLE_SECONDS = 0.2  # between two readings of memory


def made_trace(tokens: int, layers: int, n: int, k: int, seed: int = 0) -> TokenTrace:
    generator = np.random.default_rng(seed)
    chosen_LTK = np.empty((layers, tokens, k), dtype=np.int16)
    for chosen_TK in chosen_LTK:
        popularity = -(np.log(generator.random(n, dtype=np.float32)) ** 2)
        for begin in range(0, tokens, 20_000):
            size = len(chosen_TK[begin : begin + 20_000])
            noise = generator.gumbel(size=(-(-size // 2), n)).astype(np.float32)
            best = np.argpartition(-(noise - 0.3 * popularity), k, axis=1)[:, :k]
            chosen_TK[begin : begin + size] = np.repeat(best, 2, axis=0)[:size]
    document_T = np.arange(tokens) // 1000
    names = [f"layer {layer}" for layer in range(layers)]
    domains = ["text"] * (int(document_T[-1]) + 1)
    return TokenTrace(list(range(layers)), names, [n] * layers, chosen_LTK, document_T, domains, "decode", 0)


def plain_seconds(sequence: list[int], slots: int) -> float:
    """LRU, LFU and Belady for one number of slots, with dicts: seconds per choice."""
    start = time.process_time()
    following, last = [0] * len(sequence), {}
    for at in range(len(sequence) - 1, -1, -1):
        following[at] = last.get(sequence[at], len(sequence) + at)
        last[sequence[at]] = at
    recent: dict[int, int] = {}
    often: dict[int, tuple[int, int]] = {}
    counts: dict[int, int] = {}
    ahead: dict[int, int] = {}
    for at, expert in enumerate(sequence):
        counts[expert] = counts.get(expert, 0) + 1
        for cache, value, worst in (
            (recent, at, min),
            (often, (counts[expert], at), min),
            (ahead, following[at], max),
        ):
            if expert not in cache and len(cache) == slots:
                del cache[worst(cache, key=cache.get)]
            cache[expert] = value
    return (time.process_time() - start) / len(sequence)


def own_seconds(chosen_TK: np.ndarray, n: int, most: int) -> float:
    """The same three policies for every number of slots up to `most`: seconds per choice."""
    start = time.process_time()
    recency(chosen_TK, n)
    sequence_S = chosen_TK.reshape(-1)
    often = lfu(sequence_S, n)
    stack_depths([often, belady(sequence_S, n, known=often.known)], most)
    return (time.process_time() - start) / chosen_TK.size


def used_seconds() -> float:
    """CPU time of this process and of those that it waited for."""
    times = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in times)


def used_bytes() -> int:
    """Memory of this process and its workers, each shared page counted once.

    A worker's `ru_maxrss` would not do: it includes the memory of this process, which started it.
    """
    own = Path("/proc/self")
    found, command = 0, (own / "cmdline").read_bytes()
    workers = [number for task in own.glob("task/*/children") for number in task.read_text().split()]
    for process in [own, *(Path("/proc") / number for number in workers)]:
        try:
            if process == own or (process / "cmdline").read_bytes() != command:
                lines = (process / "smaps_rollup").read_text().splitlines()
                found += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        except OSError:  # it has ended
            continue
    return found


class PeakMemory(threading.Thread):
    """Reads the memory in use again and again; `bytes` is the most so far."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self.stop = 0, threading.Event()

    def run(self) -> None:
        ended = False
        while not ended:
            self.bytes = max(self.bytes, used_bytes())
            ended = self.stop.wait(SAMPLE_SECONDS)


def line(name: str, wall: float, seconds: float, memory: float) -> str:
    return f"{name:10} {wall:8.1f} s, {seconds:.1f} s of CPU time, at most {memory:.2f} GB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("tokens", 1_000_000), ("layers", 48), ("experts", 128), ("k", 8), ("jobs", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    trace = made_trace(given.tokens, given.layers, given.experts, given.k)
    splits = split_tokens(trace.document_T, 0)
    slots = [size for size in (8, 16, 32, 64) if given.k <= size <= given.experts]

    def silent(count: int) -> None:
        pass

    tables = {
        "residency": lambda: residency_tables(trace, slots, splits, None, None, False, silent, given.jobs),
        "prefetch": lambda: prefetch_table(trace, splits, silent, given.jobs),
        "placement": lambda: placement_table(trace, splits, Cluster(8, 1, 16, 256), 0, silent, given.jobs),
        "coverage": lambda: coverage_tables(trace, 64, 0, silent),
    }
    seconds, wall, memory = {}, {}, {}
    for name, make in tables.items():
        start, begun, peak = used_seconds(), time.perf_counter(), PeakMemory()
        peak.start()
        make()
        peak.stop.set()
        peak.join()
        seconds[name], wall[name] = used_seconds() - start, time.perf_counter() - begun
        memory[name] = peak.bytes / 1e9
        print(line(name, wall[name], seconds[name], memory[name]), flush=True)
    print(line("all", sum(wall.values()), sum(seconds.values()), max(memory.values())))
    sequence = trace.chosen_LTK[0].reshape(-1)[:PLAIN_CHOICES].tolist()
    plain = sum(plain_seconds(sequence, size) for size in slots)
    own = own_seconds(trace.chosen_LTK[0], given.experts, max(slots))
    print(
        f"LRU, LFU and Belady at {len(slots)} sizes: {own * 1e9:.0f} ns of CPU time per choice, in plain "
        f"Python {plain * 1e9:.0f} ns, {plain / own:.0f} times as long"
    )


if __name__ == "__main__":
    main()
