"""The text behind a plan: one part calibrates, the other is held out to judge by.

And what calibrating found, as a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.compression.loading import load_to_compress
from moescope.errors import BadInput
from moescope.execution.texts import ReadSettings, Source

if TYPE_CHECKING:
    from moescope.compression.calibration import SumCollector, Sums
    from moescope.compression.rerouting import Gating
    from moescope.compression.states import LayerStates
    from moescope.execution.collect import Collected
    from moescope.execution.documents import Document
    from moescope.execution.models import TracedModel
    from moescope.families import MoeCheckpoint

HELD_OUT = {
    "documents": "one document in five, by content",
    "tails": "the last fifth of every document: the text has too few documents to part them",
    "none": "nothing",
}


@dataclass
class TextReader:
    """A model and a text: the model is loaded when first needed and can be let go of."""

    model: str
    reading: list[Source]
    settings: ReadSettings
    device: str
    hold_out: bool
    loaded: TracedModel | None = field(default=None, repr=False)
    way: str | None = None  # how the text was parted: a word of HELD_OUT

    @property
    def traced(self) -> TracedModel:
        if self.loaded is None:
            self.loaded = load_to_compress(self.model, self.settings.dtype, self.device)
            if self.settings.chat_template and not getattr(self.loaded.tokenizer, "chat_template", None):
                raise BadInput(f"{self.model}: its tokenizer has no chat template; leave --chat-template out")
        return self.loaded

    def let_go(self) -> None:
        """Free the model's memory: the compressed one comes next."""
        import gc

        self.loaded = None
        gc.collect()

    def split(self) -> str:
        """How the text is parted.

        By document, or, where that leaves nothing on one side, each document in two.
        """
        if self.way is None:
            from moescope.compression.judging import is_held_out

            sides: set[bool] = set()
            for document in self.everything() if self.hold_out else ():
                sides.add(is_held_out(document))
                if len(sides) == 2:  # a long text need not be read to its end for this
                    break
            if self.hold_out and not sides:
                raise BadInput("the text holds no token; give a longer one")
            self.way = "none" if not self.hold_out else "documents" if len(sides) == 2 else "tails"
        return self.way

    def everything(self) -> Iterator[Document]:
        from moescope.execution.documents import read_documents

        settings = self.settings
        return read_documents(self.traced, self.reading, settings.max_tokens, settings.chat_template)

    def calibrating(self) -> Iterator[Document]:
        from moescope.compression.judging import halves, is_held_out

        way = self.split()
        for document in self.everything():
            part = halves(document)[0] if way == "tails" else document
            if len(part.ids) and not (way == "documents" and is_held_out(document)):
                yield part

    def judging(self) -> list[Document]:
        from moescope.compression.judging import halves, is_held_out, judged_part

        way = self.split()
        if way == "tails":
            return judged_part(halves(document)[1] for document in self.everything())
        return judged_part(
            document for document in self.everything() if way == "none" or is_held_out(document)
        )

    def calibrate(self, collectors: Sequence[SumCollector], advance: Callable[[int], None]) -> Collected:
        from moescope.compression.calibration import calibrate

        return calibrate(self.traced, self.calibrating(), collectors, self.settings.batch_size, advance)


@dataclass(frozen=True)
class Calibration:
    """What one pass over the calibrating text left behind."""

    sums: Sums
    states: dict[int, LayerStates]
    gating: dict[int, Gating]
    documents: int
    tokens: int
    held_out: str
    asked: tuple[int, ...] = ()  # layers whose own router tells what it would do with other experts

    def facts(self) -> dict[str, Any]:
        return {
            "calibration_documents": self.documents,
            "calibration_tokens": self.tokens,
            "held_out": self.held_out,
        }

    def warnings(self, documents: int) -> list[str]:
        """What to say of it, where so many documents calibrate in all."""
        from moescope.statistics import FEWEST_DOCUMENTS

        found = []
        if self.held_out == "tails":
            found.append(f"held out is {HELD_OUT['tails']}")
        if documents < FEWEST_DOCUMENTS:
            found.append(
                f"no intervals of ranks: {FEWEST_DOCUMENTS} documents to calibrate on are "
                f"needed, {documents} given"
            )
        strange = [
            layer for layer, gating in self.gating.items() if not gating.explains and layer not in self.asked
        ]
        if strange:
            found.append(
                f"no predicted damage in layers {', '.join(map(str, strange))}: the way of "
                "choosing was not recognised"
            )
        return found


@dataclass(frozen=True)
class Earlier:
    """The sums an earlier run left, of another text."""

    mark: list[Any]
    sums: Sums = field(repr=False)
    documents: int
    tokens: int
    held_out: str


def read_earlier(place: Path, moe: MoeCheckpoint) -> Earlier:
    """The sums of a run folder or of its calibration.safetensors; refuses those of another checkpoint."""
    from moescope.compression.calibration import load_sums

    file = place / "calibration.safetensors" if place.is_dir() else place
    if not file.is_file():
        raise BadInput(
            f"{place}: no calibration.safetensors in it; give the folder of a `moescope "
            "compress` run on a text"
        )
    sums, facts = load_sums(file)
    said: Any = facts
    if said.get("header_hash") != moe.checkpoint.header_hash():
        raise BadInput(
            f"{file}: calibrated for another checkpoint, or its files were changed since; calibrate anew"
        )
    status = file.stat()
    mark = [str(file.resolve()), status.st_size, status.st_mtime_ns]
    return Earlier(mark, sums, said["calibration_documents"], said["calibration_tokens"], said["held_out"])


def all_sums(calibration: Calibration | None, earlier: Sequence[Earlier]) -> Sums:
    """This text's sums and those of earlier ones, of the quantities that this run goes by."""
    from moescope.compression.calibration import added

    parts = [*([] if calibration is None else [calibration.sums]), *(run.sums for run in earlier)]
    if not parts:
        return {}
    total = parts[0]
    for part in parts[1:]:
        total = added(total, {name: part[name] for name in total if name in part})
    return total


def calibrate_text(
    reader: TextReader,
    moe: MoeCheckpoint,
    collectors: Sequence[SumCollector],
    seed: int,
    file: Path,
    advance: Callable[[int], None],
) -> None:
    """One pass over the calibrating text; sums, states and the way of choosing go into one file."""
    from moescope.compression.calibration import save_sums
    from moescope.compression.saliency import RoutedSums
    from moescope.compression.states import StateSample, as_arrays
    from moescope.execution.adapters import find_blocks

    layers = {block.layer: block.n_experts for block in find_blocks(reader.traced.model)}
    on_disk = {layer: weights.n_experts for layer, weights in moe.layers.items()}
    if layers != on_disk:
        raise BadInput(
            f"{reader.model}: the model runs MoE layers {sorted(layers)}, the checkpoint holds "
            f"{sorted(on_disk)}; "
            "this model cannot be calibrated"
        )
    sample = StateSample(seed, layers=len(layers))
    gathered = [RoutedSums(), *collectors, sample]
    found = reader.calibrate(gathered, advance)
    if not found.tokens:
        raise BadInput("the text leaves no token to calibrate on; give a longer one")
    sums = {name: tensor for collector in gathered for name, tensor in collector.sums().items()}
    scoring = {}
    biases = {}
    for layer, block in found.blocks.items():
        how = block.scoring
        if how is None:  # a router without logits, such as a table of token ids
            continue
        scoring[layer] = {
            "function": how.function,
            "groups": how.groups,
            "group_score": how.group_score,
            "explains": how.explains,
        }
        if how.bias_E is not None:
            biases[f"layer.{layer}.choice_bias_E"] = how.bias_E
    asked = [layer for layer, block in found.blocks.items() if block.with_router is not None]
    facts = {
        "documents": found.documents,
        "tokens": found.tokens,
        "held_out": reader.split(),
        "scoring": scoring,
        "asked": asked,
    }
    save_sums(file, sums | as_arrays(sample.states()) | biases, facts)


def load_calibration(file: Path) -> Calibration:
    from moescope.compression.calibration import load_sums
    from moescope.compression.rerouting import find_gating
    from moescope.compression.states import from_arrays
    from moescope.execution.scoring import Scoring

    arrays, facts = load_sums(file)
    said: Any = facts
    states = from_arrays(arrays)
    gating = {}
    for layer, own in states.items():
        how = said["scoring"].get(str(layer))
        if how is None:
            continue
        bias_E = arrays.get(f"layer.{layer}.choice_bias_E")
        scoring = Scoring(how["function"], bias_E, tuple(how["groups"]), how["group_score"], how["explains"])
        gating[layer] = find_gating(own, scoring)
    sums = {
        name: tensor
        for name, tensor in arrays.items()
        if ".states." not in name and "choice_bias" not in name
    }
    asked = tuple(said.get("asked", ()))
    return Calibration(sums, states, gating, said["documents"], said["tokens"], said["held_out"], asked)
