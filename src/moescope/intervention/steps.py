"""What `intervene` does with a model: calibrate, run it untouched, run every change, write the tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from moescope.compression.calibration_text import CalibrationText
from moescope.errors import BadInput
from moescope.execution.adapters import Block, ungated_output
from moescope.execution.collect import collect
from moescope.execution.model_names import checkpoint_layer_names
from moescope.execution.models import TracedModel
from moescope.execution.streamed import StreamedModel
from moescope.execution.texts import ReadSettings, Source
from moescope.execution.ways import Execution, size
from moescope.intervention.changes import changed, check_changes
from moescope.intervention.continuations import continuation, text_frame, tokenize_prompts
from moescope.intervention.estimates import expert_effects, summarise
from moescope.intervention.passes import Effect, Means, Passes, touched
from moescope.intervention.plan import Planned, Request, plan_frame
from moescope.intervention.streamed_passes import judge_streamed
from moescope.intervention.tables import ROUTING_COLUMNS
from moescope.plotting.style import counted
from moescope.progress import duration, progress
from moescope.run import Run, RunWriter
from moescope.types import Array, Routing

CALIBRATION = "calibration"  # the task that holds loads and mean outputs
TOGETHER = (
    8  # interventions judged together: the untouched head runs once for them; a resumed run repeats them
)


class Calibration:
    """Loads of all experts, and the mean output of some, over the calibration documents."""

    def __init__(self, wanted: Iterable[tuple[int, int]] = ()):
        self.wanted = sorted(set(wanted))
        self.counts: dict[int, Tensor] = {}
        self.sums: dict[tuple[int, int], Tensor] = {}

    def consume(self, routing: Routing, block: Block) -> None:
        real_T = torch.ones_like(routing.chosen_TK[:, 0], dtype=torch.bool)
        if routing.tokens is not None:
            real_T = routing.tokens.real_T
        chosen_TK = routing.chosen_TK.where(real_T[:, None], -1)
        counts_E = torch.bincount(chosen_TK[chosen_TK >= 0], minlength=routing.n_experts).cpu()
        self.counts[routing.layer] = self.counts.get(routing.layer, 0) + counts_E
        for layer, expert in self.wanted:
            if layer == routing.layer and routing.x_TD is not None:
                x_TD = routing.x_TD[(chosen_TK == expert).any(-1)]
                total_D = torch.zeros(routing.x_TD.shape[-1], dtype=torch.float64)
                if len(x_TD):
                    total_D = ungated_output(block, x_TD, expert).double().sum(0).cpu()
                self.sums[layer, expert] = self.sums.get((layer, expert), 0) + total_D

    def arrays(self) -> dict[str, Any]:
        """Return shares of choices per layer, and mean outputs."""
        found = {
            f"load-{layer}": (counts / counts.sum().clamp(min=1)).double().numpy()
            for layer, counts in self.counts.items()
        }
        for (layer, expert), total_D in self.sums.items():
            count = max(int(self.counts[layer][expert]), 1)
            found[f"mean-{layer}-{expert}"] = (total_D / count).numpy()
        return found


def carry_out(
    writer: RunWriter,
    request: Request,
    name: str,
    texts: list[Source],
    device: str,
    reading: ReadSettings,
    how: Execution,
    prompts: Sequence[str],
    max_new_tokens: int,
    quiet: bool,
) -> Run:
    """Run every intervention that is not yet on disk, then make the tables."""
    text = CalibrationText(name, texts, device, True, reading, how, judge_most=True)
    with writer.timed("load"):
        traced = text.traced
    check_model(traced, prompts)
    with writer.timed("text"):
        documents = text.held_out_documents()
    if not documents:
        raise BadInput("no document to judge on; give more or longer documents")
    passes = Passes(traced, documents, reading.batch_size)
    blocks = passes.blocks
    plan = request.plan(blocks)
    for planned in plan:
        check_changes(planned.changes, blocks)
    passes.check_memory(how)
    prompt_ids = tokenize_prompts(traced, prompts, reading.chat_template)
    done = writer.done_tasks()
    waiting = {number: planned for number, planned in enumerate(plan) if task_name(number) not in done}
    domains = [source.domain for source in texts]
    loads, means = calibrated(writer, text, request, plan, blocks)

    def flush(number: int, effect: Effect, frames: dict[str, pd.DataFrame]) -> None:
        rows = documents_frame(number, plan[number], passes, effect, domains)
        facts = {"routing": [number, effect.routing]}
        writer.flush_task(task_name(number), {"intervention_documents": rows, **frames}, facts)

    if waiting and isinstance(traced, StreamedModel):
        with writer.timed("changes"), progress(traced.n_parts, 0, "layers", quiet) as advance:
            effects = judge_streamed(traced, passes, waiting, means, request.seed, partial(advance, "layers"))
        for number, effect in effects.items():
            flush(number, effect, {})
    elif waiting:
        before = [continuation(traced, ids, max_new_tokens) for ids in prompt_ids]
        for number, effect in judge_resident(writer, passes, waiting, len(plan), means, request.seed, quiet):
            frames = {}
            if prompts and plan[number].role == "change":
                with changed(blocks, plan[number].changes, means=means, seed=request.seed):
                    after = [continuation(traced, ids, max_new_tokens) for ids in prompt_ids]
                frames["intervention_text"] = text_frame(number, traced, prompts, before, after)
            flush(number, effect, frames)
    names = checkpoint_layer_names(name, {layer: block.name for layer, block in blocks.items()})
    facts = {
        "documents": len(documents),
        "tokens": int(passes.tokens_D.sum()),
        "held_out": text.held_out(),
        "sweep": request.sweep,
        "layers": {layer: block.n_experts for layer, block in blocks.items()},
    }
    warnings = list(writer.info.get("warnings", []))
    if means or loads:
        if text.held_out() == "tails":
            warnings.append(
                "a domain has too few documents to calibrate on some: the last fifth of each calibrates, "
                "the rest is judged"
            )
        unused = [f"{expert} of layer {layer}" for layer, expert in means if not loads[layer][expert]]
        if unused:
            warnings.append(
                f"no calibration token chooses expert {', '.join(unused)}: its mean output is taken as zero"
            )
    writer.save_info(setup=facts, warnings=list(dict.fromkeys(warnings)))
    return finish(writer, request, plan_frame(plan, blocks, names, loads))


def judge_resident(
    writer: RunWriter,
    passes: Passes,
    waiting: Mapping[int, Planned],
    total: int,
    means: Means,
    seed: int,
    quiet: bool,
) -> Iterator[tuple[int, Effect]]:
    """Yield the effect of every intervention, those of early layers first; say before what it costs."""
    traced, blocks = passes.traced, passes.blocks
    first = {
        number: passes.position[touched(planned.changes, blocks)[0]] for number, planned in waiting.items()
    }
    calls, whole = passes.calls(list(first.values()))
    cost = {"layer_calls": calls, "layer_calls_whole": whole, "state_bytes": passes.state_bytes()}
    tokens, documents = int(passes.tokens_D.sum()), len(passes.documents)
    say(
        f"{counted(len(waiting), 'intervention')} on {counted(documents, 'document')}, "
        f"{tokens:,} tokens: {calls:,} layer calls "
        f"({whole:,} without reuse), {size(cost['state_bytes'])} of hidden states",
        quiet,
    )
    with passes, progress(total, total - len(waiting), "interventions", quiet) as advance:
        with writer.timed("untouched"):
            passes.run_untouched(min(first.values()))
            exact = passes.is_exact()
        if not exact:
            raise BadInput(
                f"{traced.name}: model type {traced.config.model_type!r} does not give the same logits "
                "from stored hidden states, so its layers cannot be changed one by one"
            )
        seconds = passes.seconds * (calls / len(passes.layers) / len(passes.batches) - 1)
        say(f"about {duration(seconds)}, from the untouched pass", quiet)
        writer.save_info(cost=cost)
        for place in sorted(set(first.values())):
            with writer.timed("prefix"):
                passes.move_to(place)
            here = [number for number, at in first.items() if at == place]
            for group in (here[at : at + TOGETHER] for at in range(0, len(here), TOGETHER)):
                advance(waiting[group[0]].label, 0)
                with writer.timed("changes"):
                    effects = passes.judge_each([waiting[number].changes for number in group], means, seed)
                for number, effect in zip(group, effects, strict=True):
                    yield number, effect
                    advance(waiting[number].label)


def finish(writer: RunWriter, request: Request, plan: pd.DataFrame) -> Run:
    """Estimate effects from the tables of all interventions, and close the run."""
    with writer.timed("estimates"):
        documents = writer.joined("intervention_documents")
        found = [setup["routing"] for setup in writer.setups() if "routing" in setup]
        rows = [{"intervention": number, **routing} for number, routing in found]
        numbers = dict.fromkeys(ROUTING_COLUMNS[1:], float)
        routing = pd.DataFrame(rows, columns=list(ROUTING_COLUMNS)).astype(numbers)
        effects = summarise(documents, plan, routing)
        names = plan.set_index("intervention")["layer_name"]
        effects["layer_name"] = effects["intervention"].map(names)
        frames = {"intervention_documents": documents, "interventions": effects}
        if request.sweep == "experts":
            frames["intervention_experts"] = expert_effects(effects, documents, plan, request.seed)
        if writer.has("intervention_text"):
            frames["intervention_text"] = writer.joined("intervention_text")
    return writer.finish(frames)


def check_model(traced: TracedModel, prompts: Sequence[str]) -> None:
    """Reject a model that predicts no next token, or that cannot continue a prompt."""
    if traced.two_stacks or traced.model.get_output_embeddings() is None:
        raise BadInput(f"{traced.name}: does not predict the next token, so no loss can be measured")
    if prompts and isinstance(traced, StreamedModel):
        raise BadInput(f"{traced.name}: --generate needs the whole model; use --execution resident")


def calibrated(
    writer: RunWriter,
    text: CalibrationText,
    request: Request,
    plan: Sequence[Planned],
    blocks: Mapping[int, Block],
) -> tuple[dict[int, Array], dict[tuple[int, int], Tensor]]:
    """Return loads per layer and mean outputs per layer and expert, where the interventions need them."""
    wanted = mean_outputs(plan, blocks)
    if request.sweep != "experts" and not wanted:
        return {}, {}
    if CALIBRATION not in writer.done_tasks():
        with writer.timed("calibration"):
            calibration, rows = Calibration(wanted), text.settings.batch_size
            collected = collect(text.traced, text.calibration_documents(), [calibration], rows)
            if not collected.tokens:
                raise BadInput("the text leaves no document to calibrate on; give more documents")
        facts = {"documents": collected.documents, "tokens": collected.tokens}
        writer.flush_task(CALIBRATION, {}, {"calibration": facts}, calibration.arrays())
    loads = {layer: np.array(writer.array(CALIBRATION, f"load-{layer}")) for layer in blocks}
    means = {
        (layer, expert): torch.from_numpy(np.array(writer.array(CALIBRATION, f"mean-{layer}-{expert}")))
        for layer, expert in wanted
    }
    return loads, means


def mean_outputs(plan: Sequence[Planned], blocks: Mapping[int, Block]) -> list[tuple[int, int]]:
    """Return the experts whose mean output replaces them."""
    return sorted(
        {
            (layer, expert)
            for planned in plan
            for change in planned.changes
            if change.record.needs_calibration
            for layer in change.layers or blocks
            for expert in change.experts
        }
    )


def documents_frame(
    number: int, planned: Planned, passes: Passes, effect: Effect, domains: Sequence[str]
) -> pd.DataFrame:
    """Return the rows of one intervention, one per judged document."""
    return pd.DataFrame(
        {
            "intervention": number,
            "document": [document.number for document in passes.documents],
            "change": planned.label,
            "domain": [domains[document.domain] for document in passes.documents],
            "tokens": passes.tokens_D,
            "loss": passes.loss_D,
            "loss_changed": effect.loss_D,
            "kl": effect.kl_D,
            "predictions_changed": effect.predictions_D,
            "choices": effect.choices_D,
            "choices_changed": effect.choices_changed_D,
        }
    )


def task_name(number: int) -> str:
    return f"change-{number:06d}"


def say(line: str, quiet: bool) -> None:
    if not quiet:
        print(line, file=sys.stderr, flush=True)
