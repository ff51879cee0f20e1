"""One layer of a scan as a piece of work.

Described by values alone, so that any process that sees the checkpoint can do it.
"""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moescope.arguments import choose_device
from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput
from moescope.families import MoeCheckpoint, read_moe
from moescope.run import timed
from moescope.spectral.parallel import layer_stream
from moescope.weights.layer import LayerResult, ScanSettings, analyse_layer


@dataclass(frozen=True)
class LayerTask:
    """A layer to analyse, where its checkpoint lies, and how."""

    step: int
    layer: int
    location: str
    header_hash: str
    settings: ScanSettings
    keep_going: bool

    @property
    def name(self) -> str:
        """What it is called in the run folder."""
        return f"step{self.step}-layer{self.layer}"

    def label(self, n_steps: int) -> str:
        """What it is called beside the progress bar."""
        return f"layer {self.layer}" + (f", step {self.step}" if n_steps > 1 else "")


@dataclass(frozen=True)
class AnalysedLayer(LayerResult):
    """A layer's tables, and how long they and each stage of making them took."""

    seconds: float
    timings: dict[str, float]


def analyse_here(
    opened: Mapping[int, MoeCheckpoint], device: str, piece: LayerTask, tick: Callable[[], None]
) -> AnalysedLayer:
    """The piece done with the checkpoints, by step, that this process has open."""
    moe = opened[piece.step]
    timings: dict[str, float] = {}
    start = time.perf_counter()
    stages = functools.partial(timed, timings)
    try:
        with layer_stream(device):
            result = analyse_layer(
                moe.layers[piece.layer], piece.settings, device, piece.keep_going, stages, tick
            )
    finally:
        moe.checkpoint.release()
    seconds = round(time.perf_counter() - start, 4)
    return AnalysedLayer(result.frames, result.setup, result.warnings, seconds, timings)


def analyse_elsewhere(device: str, piece: LayerTask, tick: Callable[[], None]) -> AnalysedLayer:
    """The piece done in a process that has only its description.

    It may lack the device that its machine is said to have.
    """
    opened = {piece.step: opened_once(piece.location, piece.header_hash)}
    return analyse_here(opened, choose_device(device), piece, tick)


@functools.lru_cache(maxsize=4)
def opened_once(location: str, header_hash: str) -> MoeCheckpoint:
    """The checkpoint, opened by the first piece that needs it and kept for the next.

    Refused if it is not the one the scan began with.
    """
    machine = f"as the worker on {platform.node()} sees it"
    try:
        moe = read_moe(open_checkpoint(location))
    except BadInput as error:
        raise BadInput(
            f"{error} ({machine}; all machines must find the checkpoint under this path)"
        ) from None
    if moe.checkpoint.header_hash() != header_hash:
        raise BadInput(
            f"{location}: another checkpoint, {machine}, than where the scan was begun; give a "
            "path that all machines share"
        )
    return moe
