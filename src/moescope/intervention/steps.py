"""What `intervene` does with a model: plan the changes, calibrate, run it untouched and with each change."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from moescope.arguments import ranges
from moescope.errors import BadInput
from moescope.execution.adapters import Block
from moescope.execution.collect import collect, prefill_inputs
from moescope.execution.evaluation import SplitText
from moescope.execution.model_names import checkpoint_layer_names
from moescope.execution.models import TracedModel, named_failures
from moescope.execution.streamed import StreamedModel
from moescope.execution.texts import ReadSettings, Source
from moescope.execution.ways import Execution, size
from moescope.intervention.changes import Change, changed, check_changes, need_means, parse_change
from moescope.intervention.estimates import expert_effects, projections, summarise
from moescope.intervention.kinds import MeanOutputs, block_weights, experts_per_token
from moescope.intervention.passes import Effect, Means, Passes, place_of, touched
from moescope.intervention.predictors import predictor_tables
from moescope.intervention.tables import PLAN_COLUMNS, ROUTING_COLUMNS
from moescope.plotting.style import counted
from moescope.progress import progress
from moescope.routing.counts import Counts
from moescope.run import OtherRun, Run, RunWriter
from moescope.types import Array

CALIBRATION = "calibration"  # the task that holds loads and mean outputs
CHANGES = "changes-"  # and those that hold groups of changes, with the first one's number
TOGETHER = 8  # interventions judged and stored together: the untouched head runs once for them
DEFAULTS = {"experts": "ablate", "k": "project_out", "top_k": "top_k"}  # sweep -> change where none is set
VARIED = {"experts": "expert", "layers": "layer", "k": "k", "top_k": "k"}  # sweep -> option that it varies


# --- the plan: one joint change, or the family of changes that a sweep tries


@dataclass(frozen=True)
class Planned:
    """One intervention: its changes, applied together, and its place in a sweep."""

    changes: tuple[Change, ...]
    role: str = "change"
    of: int | None = None  # the intervention that it is a control of

    @property
    def label(self) -> str:
        return "; ".join(change.label for change in self.changes)


@dataclass(frozen=True)
class Request:
    """What the user wants to be changed: changes that apply together, or one that a sweep varies."""

    changes: tuple[Change, ...]
    sweep: str | None = None
    layers: tuple[int, ...] = ()
    controls: int = 4
    seed: int = 0

    @classmethod
    def of(cls, settings: Sequence[str], sweep: str | None, layers: Sequence[int], **more: Any) -> Request:
        """Parse the settings; reject what cannot be meant, before a model is loaded."""
        if sweep is None:
            if not settings:
                raise BadInput('nothing to change; give --set "layer=0 expert=1 ablate", or --sweep experts')
            if layers:
                raise BadInput("--layers chooses the layers of a --sweep; in --set write layer=0")
            return cls(tuple(map(parse_change, settings)), **more)
        setting = settings[0] if settings else DEFAULTS.get(sweep, "")
        varied, kind = VARIED[sweep], DEFAULTS[sweep] if sweep in ("k", "top_k") else ""
        for wrong, message in (
            (len(settings) > 1, f"varies one change, not {len(settings)}; give one --set"),
            (not setting, 'needs a change; give --set "expert=1 ablate"'),
            (re.search(rf"(^|\s){varied}=", setting), f"varies {varied}=; remove it from --set {setting!r}"),
            (kind not in ("", *setting.split()), f"varies {kind}; remove --set {setting!r}"),
        ):
            if wrong:
                raise BadInput(f"--sweep {sweep} {message}")
        if layers and re.search(r"(^|\s)layer=", setting):
            raise BadInput(f"--layers and layer= in --set {setting!r}; give one of them")
        template = parse_change(setting if sweep == "layers" else f"{setting} {varied}=1")
        return cls((template,), sweep, tuple(layers) or template.layers, **more)

    def plan(self, blocks: Mapping[int, Block]) -> list[Planned]:
        """Return the interventions in their order."""
        if self.sweep is None:
            return [Planned(self.changes)]
        (change,), layers = self.changes, self.layers or tuple(blocks)
        if unknown := [layer for layer in layers if layer not in blocks]:
            known = ranges(sorted(blocks))
            raise BadInput(f"layer {unknown[0]}: not an MoE layer of this model; its MoE layers are {known}")
        if self.sweep == "experts":
            return [
                Planned((replace(change, layers=(layer,), experts=(expert,)),))
                for layer in layers
                for expert in range(blocks[layer].n_experts)
            ]
        if self.sweep == "k":
            return self.projections(change, [blocks[layer] for layer in layers])
        if self.sweep == "top_k":
            most = max(experts_per_token(blocks[layer]) or 0 for layer in layers)
            fewest = min(blocks[layer].n_experts for layer in layers)
            changes = [varied(change, self.layers, k=k) for k in range(1, min(2 * most, fewest) + 1)]
            return [Planned((each,)) for each in changes or [change]]
        return [Planned((replace(change, layers=(layer,)),)) for layer in layers]

    def projections(self, change: Change, blocks: Sequence[Block]) -> list[Planned]:
        """Return project_out per layer and k = 1, 2, 4, ... to half of the rank, each with its controls."""
        plan: list[Planned] = []
        for block in blocks:
            weights = block_weights(block)[0]
            most = max(min(weights.d_ff, weights.d_model) // 2, 1)
            for k in (2**power for power in range(most.bit_length())):
                own, number = varied(change, (block.layer,), k=k), len(plan)
                controls = [
                    (varied(own, own.layers, "random_direction", match=match, draw=draw), role)
                    for draw in range(self.controls)
                    for role, match in (("random subspace", "rank"), ("random direction", "change"))
                ]
                controls.append((varied(own, own.layers, "other_expert"), "other expert"))
                plan += [Planned((own,)), *(Planned((control,), role, number) for control, role in controls)]
        return plan


def varied(change: Change, layers: tuple[int, ...], name: str = "", **options: int | str) -> Change:
    """Return the change in other layers, under another name, with other options."""
    return replace(change, name=name or change.name, layers=layers, options={**change.options, **options})


def plan_frame(
    plan: Sequence[Planned], blocks: Mapping[int, Block], names: Mapping[int, str], loads: Mapping[int, Array]
) -> pd.DataFrame:
    """Return one row per intervention: where it acts, its role, the calibration load of its expert."""
    rows = []
    for number, planned in enumerate(plan):
        changes, (first, expert) = planned.changes, place_of(planned.changes, blocks)
        row: dict[str, Any] = {
            "intervention": number,
            "change": planned.label,
            "name": "+".join(dict.fromkeys(change.name for change in changes)),
            "layer_name": None,
            "expert": expert,
            "role": planned.role,
            "of": planned.of,
        }
        if len(touched(changes, blocks)) == 1:
            row |= {"layer": first, "layer_name": names[first]}
        if len(changes) == 1:
            row["k"] = changes[0].options.get("k")
            row["draw"] = changes[0].options.get("draw") if planned.of is not None else None
        if expert is not None and first in loads:
            row["calibration_load"] = float(loads[first][expert])
        rows.append(row)
    numbers = ("layer", "expert", "k", "draw", "of")
    return pd.DataFrame(rows, columns=list(PLAN_COLUMNS)).astype(dict.fromkeys(numbers, "Int64"))


# --- the run


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
    if any(not task.startswith((CALIBRATION, CHANGES)) for task in writer.done_tasks()):
        raise OtherRun(
            f"{writer.path}: holds an unfinished run of another version; give another --out, or --overwrite "
            "to replace it"
        )
    text = SplitText(name, texts, device, True, reading, how, judge_most=True)
    with writer.timed("load"):
        traced = text.traced
    if traced.two_stacks or traced.model.get_output_embeddings() is None:
        raise BadInput(f"{traced.name}: does not predict the next token, so no loss can be measured")
    if prompts and isinstance(traced, StreamedModel):
        raise BadInput(f"{traced.name}: --generate needs the whole model; use --execution resident")
    with writer.timed("text"):
        documents = text.held_out_documents()
    if not documents:
        raise BadInput("no document to judge on; give more or longer documents")
    passes = Passes(traced, documents, reading.batch_size)
    blocks = passes.blocks
    plan = request.plan(blocks)
    for planned in plan:
        check_changes(planned.changes, blocks)
    if passes.state_bytes > how.limit:
        raise BadInput(
            f"{name}: hidden states of the judged documents take {size(passes.state_bytes)}, "
            f"{size(how.limit)} are there to use; give fewer documents with --max-tokens, or --memory"
        )
    prompt_ids = tokenize_prompts(traced, prompts, reading.chat_template)
    done = {number for setup in writer.setups() for number, _ in setup.get("routing", ())}
    waiting = {number: planned for number, planned in enumerate(plan) if number not in done}
    loads, means = calibrated(writer, text, request, plan, blocks)

    def flush(effects: Mapping[int, Effect], continued: Sequence[pd.DataFrame] = ()) -> None:
        documents = pd.DataFrame(
            {
                "document": [document.number for document in passes.documents],
                "domain": [texts[document.domain].domain for document in passes.documents],
                "tokens": passes.tokens_D,
                "loss": passes.loss_D,
            }
        )
        rows = [
            documents.assign(
                intervention=number,
                change=plan[number].label,
                loss_changed=effect.loss_D,
                kl=effect.kl_D,
                predictions_changed=effect.predictions_D.astype(np.int64),
                choices=effect.choices_D.astype(np.int64),
                choices_changed=effect.choices_changed_D.astype(np.int64),
            )
            for number, effect in effects.items()
        ]
        parts = {"intervention_documents": rows, "intervention_text": continued}
        frames = {name: pd.concat(part, ignore_index=True) for name, part in parts.items() if part}
        setup = {"routing": [(number, effect.routing) for number, effect in effects.items()]}
        writer.flush_task(f"{CHANGES}{min(effects):06d}", frames, setup)

    if waiting and isinstance(traced, StreamedModel):
        with writer.timed("changes"), progress(traced.n_parts, 0, "layers", quiet) as advance:
            flush(judge_streamed(traced, passes, waiting, means, request.seed, partial(advance, "layers")))
    elif waiting:
        before = [continuation(traced, ids, max_new_tokens) for ids in prompt_ids]
        for effects in judge_resident(writer, passes, waiting, len(plan), means, request.seed, quiet):
            continued = []
            for number in effects if prompts else ():
                if plan[number].role == "change":
                    with changed(blocks, plan[number].changes, means=means, seed=request.seed):
                        after = [continuation(traced, ids, max_new_tokens) for ids in prompt_ids]
                    continued.append(text_frame(number, traced, prompts, before, after))
            flush(effects, continued)
    facts = {
        "documents": len(documents),
        "tokens": int(passes.tokens_D.sum()),
        "held_out": text.held_out(),
        "sweep": request.sweep,
        "layers": {layer: block.n_experts for layer, block in blocks.items()},
    }
    warnings = list(writer.info.get("warnings", []))
    if means or loads:
        if facts["held_out"] == "tails":
            warnings.append(
                "a domain has too few documents to calibrate on some: the last fifth of each calibrates, "
                "the rest is judged"
            )
        unused = [f"{expert} of layer {layer}" for layer, expert in means if not loads[layer][expert]]
        if unused:
            warnings.append(
                f"no calibration token chooses expert {', '.join(unused)}: its mean output is taken as zero"
            )
    sizes = [block.n_experts for block in blocks.values()]
    shape = {"layers": len(sizes), "experts_per_layer": sorted(set(sizes))}
    shape["model_type"] = getattr(traced.config, "model_type", None)
    writer.save_info(setup=facts, coverage=[shape], warnings=list(dict.fromkeys(warnings)))
    names = checkpoint_layer_names(name, {layer: block.name for layer, block in blocks.items()})
    return finish(writer, request, plan_frame(plan, blocks, names, loads))


def judge_resident(
    writer: RunWriter,
    passes: Passes,
    waiting: Mapping[int, Planned],
    total: int,
    means: Means,
    seed: int,
    quiet: bool,
) -> Iterator[dict[int, Effect]]:
    """Yield the effects of interventions in groups, early layers first; say before what it costs."""
    layers = {number: touched(planned.changes, passes.blocks)[0] for number, planned in waiting.items()}
    first = {number: passes.position[layer] for number, layer in layers.items()}
    calls, whole = passes.calls(list(first.values()))
    say(
        f"{counted(len(waiting), 'intervention')} on {counted(len(passes.documents), 'document')}, "
        f"{int(passes.tokens_D.sum()):,} tokens: {calls:,} layer calls ({whole:,} without reuse), "
        f"{size(passes.state_bytes)} of hidden states",
        quiet,
    )
    with passes, progress(total, total - len(waiting), "interventions", quiet) as advance:
        with writer.timed("untouched"):
            passes.run_untouched(min(first.values()))
            if not passes.is_exact():
                name = passes.traced.name
                raise BadInput(
                    f"{name}: model type {passes.traced.config.model_type!r} does not give the same logits "
                    "from stored hidden states, so its layers cannot be changed one by one"
                )
        writer.save_info(
            cost={"layer_calls": calls, "layer_calls_whole": whole, "state_bytes": passes.state_bytes}
        )
        for place in sorted(set(first.values())):
            with writer.timed("prefix"):
                passes.move_to(place)
            here = [number for number, at in first.items() if at == place]
            for group in (here[at : at + TOGETHER] for at in range(0, len(here), TOGETHER)):
                advance(waiting[group[0]].label, 0)
                with writer.timed("changes"):
                    effects = passes.judge([waiting[number].changes for number in group], means, seed)
                yield dict(zip(group, effects, strict=True))
                for number in group:
                    advance(waiting[number].label)


@torch.no_grad()
def judge_streamed(
    traced: StreamedModel,
    passes: Passes,
    plan: Mapping[int, Planned],
    means: Means | None,
    seed: int,
    advance: Callable[[int], None],
) -> dict[int, Effect]:
    """Return the effect of every intervention, all in one reading of the weights; each must change one layer.

    While a layer has its weights, the untouched hidden states pass through it, then those of every change so
    far. A change leaves the untouched states at its own layer.
    """
    if several := [each for each in plan.values() if len(touched(each.changes, passes.blocks)) > 1]:
        raise BadInput(
            f"{several[0].label}: changes several layers; with --execution streamed give one layer per change"
        )
    expected = traced.expect(sum(batch.ids_BL.size for batch in passes.batches) * (len(plan) + 1))
    if expected.disk_bytes:
        raise BadInput(
            f"{traced.name}: hidden states of {len(plan)} changes take "
            f"{size(passes.state_bytes // 2 * (len(plan) + 1))}; give fewer documents with --max-tokens, "
            "fewer layers, or --memory"
        )
    traced.execution.announce(expected)
    effects = {number: Effect(each.changes, passes) for number, each in plan.items()}
    inputs = [prefill_inputs(traced, batch) for batch in passes.batches]
    untouched: list[Any] = [{} for _ in inputs]
    branches: dict[int, list[Any]] = {}

    def run(states: list[Any], number: int, effect: Effect | None) -> tuple[Any, Any]:
        passes.batch, passes.effect = number, effect
        passes.capture.tokens = passes.tokens(passes.batches[number])
        with passes.capture, named_failures(traced):
            return traced.run(inputs[number], states[number], traced.model)

    passes.chosen = [{} for _ in inputs]
    with traced.replaying():
        for part in traced.loaded_parts():
            if part == traced.n_parts - 1:
                for at in range(len(inputs)):
                    before = passes.predictions(at, run(untouched, at, None)[1].logits)
                    passes.add_loss(before)
                    for number, effect in effects.items():
                        after = passes.predictions(at, run(branches[number], at, effect)[1].logits)
                        effect.add(before, after)
                continue
            here = [block.layer for block in traced.weights.layers[part].blocks]
            following = [run(untouched, number, None)[0] for number in range(len(inputs))]
            for number, effect in effects.items():
                if effect.layer in here:
                    with changed(passes.blocks, plan[number].changes, means=means, seed=seed):
                        branches[number] = [run(untouched, at, effect)[0] for at in range(len(inputs))]
                elif number in branches:
                    branches[number] = [run(branches[number], at, effect)[0] for at in range(len(inputs))]
            untouched = following
            advance(1)
    return effects


def finish(writer: RunWriter, request: Request, plan: pd.DataFrame) -> Run:
    """Estimate effects from the tables of all interventions, and close the run."""
    with writer.timed("estimates"):
        in_order: dict[str, Any] = {"by": "intervention", "kind": "stable", "ignore_index": True}
        documents = writer.joined("intervention_documents").sort_values(**in_order)
        rows = [
            {"intervention": number, **routing}
            for setup in writer.setups()
            for number, routing in setup.get("routing", ())
        ]
        routing = pd.DataFrame(rows, columns=list(ROUTING_COLUMNS))
        effects = summarise(documents, plan, routing.astype(dict.fromkeys(ROUTING_COLUMNS[1:], float)))
        frames = {"intervention_documents": documents, "interventions": effects}
        if request.sweep == "experts":
            frames["intervention_experts"] = expert_effects(effects, documents, plan, request.seed)
            frames |= predictor_tables(frames)
        if request.sweep == "k":
            frames["projections"] = projections(effects)
        if writer.has("intervention_text"):
            frames["intervention_text"] = writer.joined("intervention_text").sort_values(**in_order)
    return writer.finish(frames)


def calibrated(
    writer: RunWriter, text: SplitText, request: Request, plan: Sequence[Planned], blocks: Mapping[int, Block]
) -> tuple[dict[int, Array], dict[tuple[int, int], Tensor]]:
    """Return loads per layer and mean outputs per layer and expert, where the interventions need them."""
    wanted = need_means([change for planned in plan for change in planned.changes], blocks)
    if request.sweep != "experts" and not wanted:
        return {}, {}
    if CALIBRATION not in writer.done_tasks():
        with writer.timed("calibration"):
            counts = Counts(pairs=False, decisions=(), probabilities=False, order=False)
            outputs, rows = MeanOutputs(wanted), text.settings.batch_size
            collected = collect(text.traced, text.calibration_documents(), [counts, outputs], rows)
            if not collected.tokens:
                raise BadInput("the text leaves no document to calibrate on; give more documents")
        facts = {"documents": collected.documents, "tokens": collected.tokens}
        arrays = {f"load-{part.layer}": part.load_E / max(part.load_E.sum(), 1) for part in counts.layers()}
        arrays |= {f"mean-{layer}-{e}": mean_D.numpy() for (layer, e), mean_D in outputs.means.items()}
        writer.flush_task(CALIBRATION, {}, {"calibration": facts}, arrays)
    loads = {layer: np.array(writer.array(CALIBRATION, f"load-{layer}")) for layer in blocks}
    means = {
        (layer, expert): torch.from_numpy(np.array(writer.array(CALIBRATION, f"mean-{layer}-{expert}")))
        for layer, expert in wanted
    }
    return loads, means


def say(line: str, quiet: bool) -> None:
    if not quiet:
        print(line, file=sys.stderr, flush=True)


# --- prompts, continued with the most likely token


def tokenize_prompts(traced: TracedModel, prompts: Sequence[str], chat_template: bool) -> list[list[int]]:
    """Return the prompts as token ids; raise where one has none, or leaves no room."""
    if prompts and traced.tokenizer is None:
        raise BadInput(f"{traced.name}: --generate needs a tokenizer, and the model has none; omit it")
    tokenized = []
    for prompt in prompts:
        ids = traced.encode(prompt)
        if chat_template:
            ids = traced.chat_template.tokenize([{"role": "user", "content": prompt}])
        if not 0 < len(ids) < traced.window:
            raise BadInput(
                f"--generate {prompt[:40]!r}: {len(ids)} tokens; give 1 to {traced.window - 1} tokens"
            )
        tokenized.append(list(ids))
    return tokenized


@torch.no_grad()
def continuation(traced: TracedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Return the most likely next tokens, one after the other, up to `count` or the end of the text."""
    ids, cache, device = list(prompt), None, cast(Any, traced.device)
    config = getattr(traced.model, "generation_config", None)
    owners = (config, traced.tokenizer)  # the first that names tokens that end a text
    named = [end for owner in owners if (end := getattr(owner, "eos_token_id", None)) is not None]
    ends = set(np.atleast_1d(named[0]).tolist()) if named else set()
    while len(ids) < min(len(prompt) + count, traced.window) and not (set(ids[len(prompt) :]) & ends):
        unread = ids if cache is None else ids[-1:]
        inputs = {"input_ids": torch.tensor([unread], device=device), "use_cache": True}
        inputs |= {"attention_mask": torch.ones(1, len(ids), dtype=torch.long, device=device)}
        with named_failures(traced):
            output = traced.model(**inputs, past_key_values=cache)
        cache = getattr(output, "past_key_values", None)
        ids.append(int(output.logits[0, -1].argmax()))
    return ids[len(prompt) :]


def text_frame(
    number: int, traced: TracedModel, prompts: Sequence[str], before: list[list[int]], after: list[list[int]]
) -> pd.DataFrame:
    """Return one row per prompt and position: the token without and with the change."""
    decode = traced.tokenizer.decode
    rows = [
        (number, prompt, position, *(None if token is None else decode([token]) for token in both))
        for prompt, *tokens in zip(prompts, before, after, strict=True)
        for position, both in enumerate(zip_longest(*tokens))
    ]
    return pd.DataFrame(rows, columns=["intervention", "prompt", "position", "token", "token_changed"])
