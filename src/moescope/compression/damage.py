"""Damage of layers, predicted on calibration states and measured on held-out ones, and of whole models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moescope.compression.applying import RunningExperts, apply_plan, merged_expert, new_layer, share_experts
from moescope.compression.calibration import (
    Gating,
    LayerStates,
    StateSample,
    calibrate,
    load_sums,
    save_sums,
    states_from_arrays,
    states_to_arrays,
)
from moescope.compression.folding import SAME_LOGITS, STATES_AT_ONCE, RouterParts
from moescope.compression.plan import Fits, LayerFit
from moescope.errors import BadInput
from moescope.execution.adapters import Ask, Asked, Block, Decision, RouterReads, adapter_of, relative_error
from moescope.execution.capture import Capture
from moescope.execution.documents import Document
from moescope.execution.evaluation import (
    Evaluation,
    SplitText,
    in_parts,
    mean_of_domain_means,
    per_document,
)
from moescope.execution.models import TracedModel
from moescope.families import MoeCheckpoint
from moescope.families.writing import changed_router
from moescope.progress import progress
from moescope.run import RunWriter
from moescope.statistics import FEWEST_DOCUMENTS, bootstrap_interval
from moescope.storage import leftover_name, remove
from moescope.types import LayerPlan, Plan, Routing

Tensors = dict[str, Tensor]
HeldOut = dict[int, tuple[RouterReads, Tensor]]  # layer -> a block's inputs, and its routed experts' output
SAME_CHOICE = 0.98  # share of tokens with equal choices from which a router depends on single tokens only
FEW_PER_DOMAIN = 8  # documents: with fewer in one of two domains, 95 % intervals cover under 0.92
TASK_FILE = "judged.safetensors"  # what a pass of the judgement has found


@dataclass(frozen=True)
class Predicted:
    """Damage of one layer; None where gating was not recognised, or the router has no probabilities."""

    error: float | None
    router_kl: float | None
    gate_scale: float | None = None  # gate sum after over before, where the model's own router was called


def predict(
    traced: TracedModel,
    plan: Plan,
    fits: Fits,
    states: Mapping[int, LayerStates],
    gating: Mapping[int, Gating],
    blocks: Mapping[int, Block],
    moe: MoeCheckpoint | None = None,
) -> dict[int, Predicted]:
    """||y' - y|| / ||y|| of every layer's routed output on its sample, y' by the plan's router and experts.

    Both come from the model's own experts code, merged experts put in place temporarily. Each layer gets the
    original's input, so errors do not accumulate over layers. A router that can be called with other tensors
    is called with those that would be written into `moe`; for others the recognised gating is applied to the
    plan's logits.
    """
    merges = any(len(group) > 1 for layer in plan.layers for group in layer.groups)
    whole = RunningExperts(traced.model) if merges and not traced.by_layer else None
    damage = {}
    for layer in plan.layers:
        number = layer.layer
        with traced.layer_loaded(number):
            experts = RunningExperts(traced.model) if merges and traced.by_layer else whole
            sample, how = states[number], gating.get(number)
            damage[number] = predict_layer(blocks[number], moe, plan, layer, fits, sample, how, experts)
    return damage


@torch.no_grad()
def predict_layer(
    block: Block,
    moe: MoeCheckpoint | None,
    plan: Plan,
    layer: LayerPlan,
    fits: Fits,
    states: LayerStates,
    gating: Gating | None,
    experts: RunningExperts | None,
) -> Predicted:
    """The damage by the model's own router, or by the recognised gating; None where neither says it."""
    fit, scale = fits.get(layer.layer, LayerFit()), None
    if not len(states) or (plan.router == "tie" and experts is None):
        return Predicted(None, None)
    if plan.router == "tie":
        return Predicted(output_error(block, layer, fit, states, experts), 0.0)
    if block.with_router is not None and moe is not None:
        assert block.decide_alone is not None
        if not same_choice(call_router(block, block.decide_alone, states.reads()).decision.chosen_TK, states):
            return Predicted(None, None)  # it looks at more than single tokens
        weights = moe.layers[layer.layer]
        tensors = changed_router(weights, new_layer(weights, layer, plan, fits))
        router = block.with_router(tensors, len(layer.groups), plan.top_k)
        (_, chosen_TK, gates_TK), logits_TK, _ = call_router(block, router, states.reads())
        scale = float(gates_TK.double().sum() / states.gates_TK.double().sum().clamp(min=1e-30))
    else:
        logits_TK = new_logits(block, plan, layer, fit, states)
        if gating is None or not gating.explains or logits_TK is None:
            return Predicted(None, None)
        bias_K = fit.correction_bias_K
        if bias_K is None and gating.scoring.bias_E is not None:
            bias_K = gating.scoring.bias_E[list(layer.dominants)]
        top_k = min(plan.top_k or gating.top_k, len(layer.groups))
        chosen_TK, gates_TK = gating.with_bias(bias_K).route(logits_TK, top_k)
    error = output_error(block, layer, fit, states, experts, (chosen_TK, gates_TK))
    if gating is None or states.logits_TE is None or logits_TK is None:
        return Predicted(error, None, scale)
    return Predicted(error, router_kl(layer, gating, states.logits_TE, logits_TK), scale)


def call_router(block: Block, router: Ask, reads: RouterReads) -> Asked:
    """A router's answer on the CPU, a few hundred tokens at a time."""
    parts = [router(part) for part in split_reads(reads, block.device)]
    decision = Decision(*(torch.cat([part.decision[field] for part in parts]).cpu() for field in range(3)))
    logits = [part.logits_TE for part in parts if part.logits_TE is not None]
    return Asked(decision, torch.cat(logits).cpu() if logits else None)


def split_reads(reads: RouterReads, device: torch.device) -> Iterator[RouterReads]:
    parts = {name: tensor for name, tensor in vars(reads).items() if tensor is not None}
    for start in range(0, len(reads.x_TD), STATES_AT_ONCE):
        rows = slice(start, start + STATES_AT_ONCE)
        yield RouterReads(**{name: tensor[rows].to(device) for name, tensor in parts.items()})


def same_choice(chosen_TK: Tensor, states: LayerStates) -> bool:
    """Whether a router that sees single tokens chooses as it did in the text."""
    same_T = (chosen_TK.sort(-1).values == states.chosen_TK.sort(-1).values).all(-1)
    return float(same_T.float().mean()) >= SAME_CHOICE


def output_error(
    block: Block,
    layer: LayerPlan,
    fit: LayerFit,
    states: LayerStates,
    experts: RunningExperts | None,
    decision: tuple[Tensor, Tensor] | None = None,
) -> float:
    """The error of the plan's experts under new choices and gates; choices are numbers of groups (-1: none).

    Without a decision every old router row points at its merged expert, and the model's own choices stay.
    """
    before_TD = routed_output(block, states.x_TD, states.chosen_TK, states.gates_TK)
    merged = {
        place: merged_expert(experts.layers[layer.layer], group, shares, fit)
        for group, dominant, shares in zip(layer.groups, layer.dominants, layer.weights, strict=True)
        if len(group) > 1 and experts is not None
        for place in ((dominant,) if decision else group)
    }
    chosen_TK, gates_TK = states.chosen_TK, states.gates_TK
    if decision is not None:  # a merged expert is put in its dominant's place
        chosen_TK, gates_TK = torch.tensor([*layer.dominants, -1])[decision[0]], decision[1]
    with experts.replaced(layer.layer, merged) if experts is not None else nullcontext():
        return relative_error(routed_output(block, states.x_TD, chosen_TK, gates_TK), before_TD)


def new_logits(
    block: Block, plan: Plan, layer: LayerPlan, fit: LayerFit, states: LayerStates
) -> Tensor | None:
    """The plan's router logits for the sample; None where the router reads something other than x."""
    if states.logits_TE is None or plan.router == "slice" or fit.router_KD is None:
        return None if states.logits_TE is None else states.logits_TE[:, list(layer.dominants)]
    x_TD, bias = states.x_TD.float(), getattr(block.router, "bias", None)
    router = RouterParts(block.weight_ED, bias if isinstance(bias, Tensor) else None)
    old_TE = router.map(lambda part: part.detach().float().cpu()).logits(x_TD)
    if relative_error(old_TE, states.logits_TE) > SAME_LOGITS:
        return None
    return RouterParts(fit.router_KD, fit.router_bias_K).map(Tensor.float).logits(x_TD)


def router_kl(layer: LayerPlan, gating: Gating, logits_TE: Tensor, logits_TK: Tensor) -> float:
    """Mean KL in nats from the groups' probabilities to the new router's, plus -log of the kept probability.

    A group's probability is the sum of its members', over that of all groups. For pruned softmax routers the
    first term is 0 and the second KL(new || old); for merged ones without dropped experts the second is 0.
    """
    p_TE = gating.scoring.scores(logits_TE.double())
    p_TK = torch.stack([p_TE[:, list(group)].sum(-1) for group in layer.groups], -1)
    p_TK = p_TK / p_TK.sum(-1, keepdim=True).clamp(min=1e-30)
    q_TK = gating.scoring.scores(logits_TK.double())
    kl_T = (p_TK * (p_TK.clamp(min=1e-30).log() - q_TK.clamp(min=1e-30).log())).sum(-1)
    kept_T = p_TE[:, [expert for group in layer.groups for expert in group]].sum(-1)
    return float((kl_T - kept_T.clamp(min=1e-30, max=1).log()).mean().clamp(min=0))


@torch.no_grad()
def routed_output(block: Block, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
    """Gates times expert outputs, by the block's own experts; on the CPU, a few hundred tokens at a time."""

    def mix(*part: Tensor) -> Tensor:
        x_TD, chosen_TK, gates_TK = (tensor.to(block.device) for tensor in part)
        return adapter_of(block).mix(block, Decision(x_TD, chosen_TK.long(), gates_TK)).cpu()

    return in_parts(mix, STATES_AT_ONCE, x_TD, chosen_TK, gates_TK)


# --- measured


@torch.no_grad()
def block_outputs(traced: TracedModel, inputs: Mapping[int, RouterReads]) -> dict[int, tuple[Tensor, Tensor]]:
    """Layer -> routed output and chosen experts for given states, by the block's own router and experts."""
    captured: list[Routing] = []
    results: dict[int, tuple[Tensor, Tensor]] = {}
    with Capture(traced.model, captured.append, check=False, runner=traced.runner) as capture:
        for block in (block for block in capture.blocks if block.layer in inputs):
            outputs, chosen = [], []
            with traced.layer_loaded(block.layer):
                for reads in split_reads(inputs[block.layer], block.device):
                    if block.decide_alone is not None:
                        decision = block.decide_alone(reads).decision
                    else:
                        block.module(reads.x_TD[None])
                        routing = captured.pop()
                        assert routing.x_TD is not None
                        decision = Decision(routing.x_TD, routing.chosen_TK, routing.gates_TK)
                    with capture.uncounted():
                        outputs.append(adapter_of(block).mix(block, decision).cpu())
                    chosen.append(decision.chosen_TK.cpu())
            results[block.layer] = torch.cat(outputs), torch.cat(chosen)
    return results


def original_outputs(traced: TracedModel, states: Mapping[int, LayerStates]) -> HeldOut:
    """Of every block that chooses the same from the states alone; others are skipped and not measured."""
    inputs = {layer: sample.reads() for layer, sample in states.items()}
    found = block_outputs(traced, inputs).items()
    return {n: (inputs[n], output_TD) for n, (output_TD, chosen) in found if same_choice(chosen, states[n])}


def measured_errors(compressed: TracedModel, held_out: HeldOut) -> dict[int, float]:
    """||y' - y|| / ||y|| of every layer's routed output on held-out states, y' by the compressed block."""
    found = block_outputs(compressed, {layer: reads for layer, (reads, _) in held_out.items()})
    return {layer: relative_error(output_TD, held_out[layer][1]) for layer, (output_TD, _) in found.items()}


# --- judged


def once(writer: RunWriter, task: str, make: Callable[[], Tensors]) -> Tensors:
    """Return what the task has stored, after making it if it is not done.

    Never what was just made: products with tensors at other addresses may differ in the last digit, and a
    resumed run has only the stored ones.
    """
    if task not in writer.done_tasks():
        file = leftover_name(writer.path / "parts")
        save_sums(file, make(), {})
        writer.flush_task(task, {}, {}, files={TASK_FILE: file})
    return load_sums(writer.path / "parts" / task / TASK_FILE)[0]


def judge_models(
    writer: RunWriter,
    text: SplitText,
    moe: MoeCheckpoint,
    seed: int,
    compressed: tuple[str, Plan, Fits],
    folder: Path | None,
    controls: Sequence[tuple[str, Plan, Fits]],
    quiet: bool,
) -> dict[str, Any]:
    """Judge the original, the compressed model and the controls, one model in memory at a time.

    The compressed model lies in `folder`; a control is written, judged, and removed. A plan that keeps all
    router rows (`tie`) is not written: the original runs with its experts shared. Every pass over the text is
    a task of the run, so a killed judgement continues with the pass that it had reached.
    """
    size = text.settings.batch_size
    documents = text.held_out_documents()
    scratch = leftover_name(writer.path / "parts")

    def label(number: int, name: str) -> str:
        return f"judging {number} of {2 + len(controls)} models ({name})"

    with progress(None, 0, "tokens", quiet) as advance:

        def sample_states() -> Tensors:
            sample = StateSample(seed, layers=len(moe.layers))
            calibrate(text.traced, documents, [sample], size)
            return states_to_arrays(sample.states)

        def run_original() -> Tensors:
            outputs = original_outputs(text.traced, states)
            return {str(layer): output_TD for layer, (_, output_TD) in outputs.items()}

        def judge(model: TracedModel, shown: str, reference: Evaluation | None = None) -> Tensors:
            return per_document(model, documents, reference, size, partial(advance, shown)).to_tensors()

        states = states_from_arrays(once(writer, "held_out_states", sample_states))
        outputs = once(writer, "held_out", run_original)
        held_out = {
            int(layer): (states[int(layer)].reads(), output_TD) for layer, output_TD in outputs.items()
        }
        original = once(writer, "reference", lambda: judge(text.traced, label(1, "the original")))
        reference = Evaluation.of_tensors(original)
        text.release()
        if text.execution is not None:  # what each of the next models takes is that of the first
            text.execution = replace(text.execution, quiet=True)

        def judge_model(number: int, name: str, plan: Plan, fits: Fits) -> tuple[Evaluation, Tensors]:
            @cache
            def model() -> TracedModel:
                if plan.router == "tie":
                    traced = text.load(text.model)
                    share_experts(traced, plan, fits)
                    return traced
                if number:  # a control
                    scratch.mkdir(parents=True)
                    apply_plan(moe, plan, fits, scratch / "model")
                return text.load(str(scratch / "model" if number else folder))

            def measure() -> Tensors:
                errors = measured_errors(model(), held_out)
                return {str(layer): torch.tensor(error).double() for layer, error in errors.items()}

            try:
                result = once(
                    writer,
                    f"judged-{number}",
                    lambda: judge(model(), label(number + 2, name), reference),
                )
                return Evaluation.of_tensors(result), once(writer, f"errors-{number}", measure)
            finally:
                remove(scratch, writer.path)

        models = enumerate([compressed, *controls])
        judged = {name: judge_model(number, name, plan, fits) for number, (name, plan, fits) in models}
    differences = judged_differences(reference, [result for result, _ in judged.values()], seed)
    results = {
        name: {**row, "errors": {layer: error.item() for layer, error in errors.items()}}
        for (name, (_, errors)), row in zip(judged.items(), differences, strict=True)
    }
    unmeasured = ", ".join(str(layer) for layer in sorted(set(moe.layers) - set(held_out)))
    names = [text.sources[document.domain].domain for document in documents]
    few = [repr(domain) for domain, count in Counter(names).items() if count < FEW_PER_DOMAIN]
    no_intervals = differences[0]["loss_increase_low"] is None
    most, remedy = text.settings.max_tokens, "give more documents"
    if text.is_cut:
        remedy = f"raise --max-tokens: {most:,} leave some of the text unread"
    elif no_intervals:
        remedy = f"give about {5 * FEWEST_DOCUMENTS} documents: one in five is held out"
    notes = (
        (
            unmeasured,
            f"no measured error in layers {unmeasured}: their blocks read more than the experts' input",
        ),
        (
            no_intervals,
            f"no intervals of the judgement: they need {FEWEST_DOCUMENTS} held-out documents and two per "
            f"domain, not {len(documents)}; {remedy}",
        ),
        (
            few and not no_intervals,
            f"intervals of the judgement are too short: under {FEW_PER_DOMAIN} held-out documents in "
            f"{', '.join(few)}, and every domain counts alike; {remedy}",
        ),
    )
    tokens_by_domain = dict.fromkeys((source.domain for source in text.sources), 0)
    for name, tokens in zip(names, reference.tokens_D, strict=True):
        tokens_by_domain[name] += int(tokens)
    return {
        "models": results,
        "perplexity_original": reference.perplexity,
        "facts": {
            "judged_documents": len(documents),
            "judged_tokens": int(reference.tokens_D.sum()),
            "judged_tokens_by_domain": tokens_by_domain,
            "compared_tokens": int(reference.compared_D.sum()),
        },
        "warnings": [note for applies, note in notes if applies],
    }


def check_judgeable(traced: TracedModel, documents: Sequence[Document]) -> None:
    """Raise early where the model or the held-out text has no next token to predict."""
    if traced.two_stacks or traced.model.get_output_embeddings() is None:
        raise BadInput(
            f"{traced.name}: does not predict the next token, so it cannot be judged; give --no-judge"
        )
    if not any(len(document.ids) > 1 for document in documents):
        raise BadInput("the held-out text has no token to predict; give a longer text, or --no-judge")


def judged_differences(
    reference: Evaluation, judged: Sequence[Evaluation], seed: int
) -> list[dict[str, float | None]]:
    """Per model its numbers, differences and their 95 % intervals; the plan comes first, then its controls.

    Differences are of loss in nats per token and of divergence in nats: from the original, and of every
    control from the plan. All are means of domain means. Intervals are paired: models are compared on the
    same documents, resampled within domains.
    """
    plan, *controls = judged
    losses = [model.loss_D - reference.loss_D for model in judged]
    losses += [control.loss_D - plan.loss_D for control in controls]
    divergences = [model.divergence_D for model in judged]
    divergences += [control.divergence_D - plan.divergence_D for control in controls]
    rows: list[dict[str, float | None]] = [
        {"perplexity": model.perplexity, "js_divergence": model.js_divergence} for model in judged
    ]
    for kind, of_model, parts, tokens_D in (
        ("loss", "loss_increase", losses, reference.tokens_D),
        ("js", "js_divergence", divergences, reference.compared_D),
    ):
        parts_DGX = reference.by_domain(parts, tokens_D)
        low, high = bootstrap_interval(parts_DGX, mean_of_domain_means, reference.domain_D, seed)
        values = mean_of_domain_means(parts_DGX.sum(0))
        places = [(row, of_model) for row in rows] + [(row, f"{kind}_above_plan") for row in rows[1:]]
        for (row, name), value, lower, upper in zip(places, values, low, high, strict=True):
            row |= {name: value, f"{name}_low": lower, f"{name}_high": upper}
    return [
        {name: None if value is None or math.isnan(value) else float(value) for name, value in row.items()}
        for row in rows
    ]
