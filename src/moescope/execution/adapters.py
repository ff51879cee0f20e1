"""How MoE blocks of transformers differ: where they are, and how their experts receive the decision.

Since transformers 5 most experts modules are called with (hidden_states, top_k_index, top_k_weights): the
router's decision as it is carried out. `ADAPTERS` lists the classes that are called otherwise; a class that
fits neither is rejected with an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from moescope.errors import BadInput, reject_if
from moescope.execution.scoring import Scoring
from moescope.families import MODELS
from moescope.types import LinearView

SAME_LOGITS = 0.02  # relative error up to which an output counts as the logits; half precision stays below
ORDINAL = re.compile(r"\.(?:layers|layer|blocks|block|h)\.(\d+)\.")


class Decision(NamedTuple):
    """A block's decision about T tokens: its input, the chosen experts (-1: none), their gates."""

    x_TD: Tensor
    chosen_TK: Tensor
    gates_TK: Tensor


@dataclass(frozen=True)
class RouterReads:
    """A router's inputs for T tokens: states, token ids and the output of the layer before where used."""

    x_TD: Tensor
    ids_T: Tensor | None = None
    carried_TR: Tensor | None = None


class Asked(NamedTuple):
    """A router's answer about single tokens: its decision, and its logits where it has any."""

    decision: Decision
    logits_TE: Tensor | None
    selection_TE: Tensor | None = None  # what the choice is made by, where it is made by scores


Ask = Callable[[RouterReads], Asked]


class Apart(NamedTuple):
    """The parts of a block that can be used one by one."""

    experts: nn.Module  # called with (x, chosen, gates)
    ask: Ask
    with_router: Callable[[Mapping[str, Tensor], int, int | None], Ask]
    linear: LinearView | None


@dataclass
class Block:
    """One MoE block of a running model, and what the first batch revealed about it."""

    layer: int
    name: str
    module: nn.Module
    experts: nn.Module
    router: nn.Module  # the module that owns the router's weight
    n_experts: int
    model_type: str
    expected_scoring: str | None  # of the model type; None where unknown
    groups: tuple[int, int]  # expert groups, and how many of them a token may use; (1, 1) without groups
    logits_at: int | None = None  # index of the router's output that holds logits; -1: none, recompute
    scoring: Scoring | None = None
    checked: bool = False
    calls: int = 0
    router_input: Tensor | None = None
    reads_more: bool = False  # whether its router is called with other tensors besides the states
    router_outputs: tuple[Tensor, ...] = ()
    hands_out: bool = False  # whether the model hands out this block's Routing itself
    decide_alone: Ask | None = None  # the router of such a block; None where it cannot be called alone
    # The same router with other tensors (by name), number of experts and experts per token (None: unchanged).
    with_router: Callable[[Mapping[str, Tensor], int, int | None], Ask] | None = None
    linear: LinearView | None = None
    # Input and output of the block's other parts: shared experts, their gate, a final norm.
    other_parts: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def weight_ED(self) -> Tensor:
        weight = self.router.weight
        assert isinstance(weight, Tensor)
        return with_adapters(self.router, present_value(self.router, "weight", weight))

    @property
    def device(self) -> torch.device:
        if not self.hands_out:
            return self.weight_ED.device
        return next(self.experts.parameters()).device  # a router may have none

    @property
    def rows_ED(self) -> Tensor | None:
        """The router's weight where it has one row per expert, else None."""
        weight = getattr(self.router, "weight", None)
        fits = isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[0] == self.n_experts
        return self.weight_ED if fits else None

    @property
    def trained(self) -> list[Tensor]:
        """The router's tensors that receive gradients."""
        several = self.hands_out or hasattr(self.router, "active_adapters")
        weights = list(self.router.parameters()) if several else [self.weight_ED]
        return [weight for weight in weights if weight.requires_grad]

    @property
    def correction_bias(self) -> tuple[nn.Module, str] | None:
        """The bias added to scores for selection only, whatever the model calls it: owner and name."""
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            for_choosing = name.endswith("bias") and ("correction" in name or "expert_bias" in name)
            for_choosing = for_choosing or (self.hands_out and name == "bias_E")
            if for_choosing and tensor.numel() == self.n_experts and not name.startswith("experts."):
                return self.module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        return None

    @property
    def correction_bias_E(self) -> Tensor | None:
        """The value of `correction_bias`."""
        if self.correction_bias is None:
            return None
        module, name = self.correction_bias
        return present_value(module, name, getattr(module, name)).detach().flatten().float()

    def where(self) -> str:
        return f"layer {self.layer} ({self.name})"


def present_value(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a module's tensor; where accelerate holds it elsewhere between calls, a copy on its device."""
    hook: Any = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)) if tensor.is_meta else ():
        if getattr(part, "weights_map", None) is not None:
            return part.weights_map[name].to(part.execution_device)
    return tensor


def with_adapters(module: Any, weight: Tensor) -> Tensor:
    """Return a module's weight with the change that peft's active adapters make to it."""
    if not getattr(module, "merged", False):
        for name in getattr(module, "active_adapters", ()):
            weight = weight + module.get_delta_weight(name)
    return weight


def find_blocks(model: Any) -> list[Block]:
    """Return every MoE block by layer; decoder layers are numbered after the encoder's."""
    if hands_out_routing(model):
        return handing_blocks(model)
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    model_type = str(getattr(config, "model_type", type(model).__name__))
    modules = dict(model.named_modules())
    groups = (int(getattr(text, "n_group", None) or 1), int(getattr(text, "topk_group", None) or 1))
    blocks = []
    for path, module in modules.items():
        n_experts = getattr(module, "num_experts", None)
        if not type(module).__name__.endswith("Experts") or not isinstance(n_experts, int):
            continue
        outside = path.replace(".base_layer", "")  # adapters of peft are around it
        name = outside.rpartition(".")[0]
        block, experts = modules[name], modules[outside]
        router = find_router(block, experts, n_experts)
        if router is None:
            raise BadInput(
                f"model type {model_type!r}: no router with {n_experts} rows next to {outside}; moescope "
                "cannot trace this model"
            )
        scoring, number = known_scoring(model_type, text), layer_number(path, config)
        blocks.append(Block(number, name, block, experts, router, n_experts, model_type, scoring, groups))
    reject_if(
        not blocks,
        f"model type {model_type!r}: no experts module in it; give a Mixture-of-Experts model that "
        "transformers runs through one",
    )
    reject_if(
        len({block.layer for block in blocks}) < len(blocks),
        f"model type {model_type!r}: two MoE blocks in one layer; moescope cannot trace this model",
    )
    return sorted(blocks, key=lambda block: block.layer)


def hands_out_routing(model: Any) -> bool:
    """Whether the model hands out every layer's Routing itself.

    Then `routing_blocks()` lists its blocks, and its forward pass takes `consume`, which is called with each
    Routing as it happens. `expert_blocks()`, if any, returns layer -> parts that can be run alone.
    """
    return callable(getattr(model, "routing_blocks", None))


def handing_blocks(model: Any) -> list[Block]:
    kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    apart = model.expert_blocks() if callable(getattr(model, "expert_blocks", None)) else {}
    blocks = []
    for layer, name, router, n_experts in model.routing_blocks():
        experts, ask, with_router, linear = apart.get(layer, (router, None, None, None))
        block = Block(layer, name, router, experts, router, n_experts, kind, None, (1, 1))
        block.checked = block.hands_out = True
        block.decide_alone, block.with_router, block.linear = ask, with_router, linear
        blocks.append(block)
    return blocks


def known_scoring(model_type: str, text: Any) -> str | None:
    """Return how the model turns logits into scores, from its layout; sparsemixer counts as softmax."""
    known = [MODELS[kind] for kind in (model_type, getattr(text, "model_type", None)) if kind in MODELS]
    return ("sigmoid" if known[0].scoring == "sigmoid" else "softmax") if known else None


def layer_number(path: str, config: Any) -> int:
    number = int(next(iter(ORDINAL.findall(f".{path}.")), 0))
    if getattr(config, "is_encoder_decoder", False) and "decoder" in path.split("."):
        number += int(getattr(config, "encoder_layers", None) or config.num_layers)
    return number


def find_router(block: nn.Module, experts: nn.Module, n_experts: int) -> nn.Module | None:
    """Return the block's module, outside its experts, whose weight has one row per expert."""
    inside = set(experts.modules())
    routers = (
        module
        for name, module in block.named_modules()
        if module not in inside and "shared" not in name
        if isinstance(weight := getattr(module, "weight", None), Tensor) and weight.dim() == 2
        if weight.shape[0] == n_experts
    )
    return next(routers, None)


# --- decisions, from the inputs of the experts module


def contract(block: Block, inputs: tuple[Tensor, ...]) -> Decision:
    """transformers 5: (hidden_states, top_k_index, top_k_weights); an index of n_experts: on another rank."""
    fits = (
        len(inputs) == 3
        and inputs[1].dim() == 2
        and not inputs[1].is_floating_point()
        and inputs[1].dtype != torch.bool
        and inputs[2].shape == inputs[1].shape
        and inputs[0].numel() == inputs[1].shape[0] * inputs[0].shape[-1]
    )
    reject_if(
        not fits,
        f"model type {block.model_type!r}: {type(block.experts).__name__} of {block.where()} "
        "is not called with (hidden_states, top_k_index, top_k_weights), and moescope has no adapter for "
        "it",
    )
    x, index_TK, gates_TK = inputs
    present = (index_TK >= 0) & (index_TK < block.n_experts)
    chosen_TK, gates_TK = torch.where(present, index_TK, -1), torch.where(present, gates_TK, 0)
    return Decision(x.reshape(-1, x.shape[-1]), chosen_TK, gates_TK)


def llama4(block: Block, inputs: tuple[Tensor, ...]) -> Decision:
    """Llama 4: every expert gets every token times its score, which is 0 for all but the chosen."""
    assert block.router_input is not None
    scores_TE = block.router_outputs[0]
    gates_TK, chosen_TK = scores_TE.topk(int(getattr(block.module, "top_k", 1)), dim=-1)
    return Decision(block.router_input.reshape(scores_TE.shape[0], -1), chosen_TK, gates_TK)


def switch(block: Block, inputs: tuple[Tensor, ...]) -> Decision:
    """Switch: a one-hot mask [T, 1, E], empty where the expert's capacity was exhausted."""
    x_TD, mask_TKE, gates_TK = inputs
    taken_TK = mask_TKE.sum(-1) > 0
    return Decision(x_TD, torch.where(taken_TK, mask_TKE.argmax(-1), -1), torch.where(taken_TK, gates_TK, 0))


def nllb(block: Block, inputs: tuple[Tensor, ...]) -> Decision:
    """NLLB: gates [T, E], 0 for all but the two choices, and for those when capacity was exhausted."""
    x_TD, _, gates_TE = inputs
    gates_TK, chosen_TK = gates_TE.topk(2, dim=-1)
    return Decision(x_TD, torch.where(gates_TK > 0, chosen_TK, -1), gates_TK)


# --- expert outputs, one slot at a time, by the experts' own code


def contract_output(block: Block, x_TD: Tensor, chosen_T: Tensor) -> Tensor:
    wants_batch = type(block.experts).__name__.startswith("Dbrx")  # [batch, T, D]
    inputs = x_TD[None] if wants_batch else x_TD, chosen_T[:, None], x_TD.new_ones(len(x_TD), 1)
    return block.experts(*inputs).reshape(x_TD.shape)


def switch_output(block: Block, x_TD: Tensor, chosen_T: Tensor) -> Tensor:
    mask_TKE = nn.functional.one_hot(chosen_T, block.n_experts)[:, None]
    return block.experts(x_TD, mask_TKE, x_TD.new_ones(len(x_TD), 1))


def nllb_output(block: Block, x_TD: Tensor, chosen_T: Tensor) -> Tensor:
    experts: Any = block.experts
    out_TD = torch.zeros_like(x_TD)
    for expert in set(chosen_T.tolist()):
        mine = chosen_T == expert
        out_TD[mine] = experts[f"expert_{expert}"](x_TD[mine]).to(out_TD.dtype)
    return out_TD * (1 - experts.moe_token_dropout)  # its replacement for dropout outside training


def gated(output: Callable[[Block, Tensor, Tensor], Tensor]) -> Callable[[Block, Decision], Tensor]:
    """Return a function: sum over slots of gate x expert output."""

    def mix(block: Block, decision: Decision) -> Tensor:
        out_TD = torch.zeros_like(decision.x_TD, dtype=torch.float32)
        for slot in range(decision.chosen_TK.shape[1]):
            chosen_T = decision.chosen_TK[:, slot].clamp(min=0)  # an empty slot has gate 0
            gates_T1 = decision.gates_TK[:, slot, None].float()
            out_TD += gates_T1 * output(block, decision.x_TD, chosen_T).float()
        return out_TD

    return mix


def llama4_mix(block: Block, decision: Decision) -> Tensor:
    """Sum over experts of expert(gate x input): the gate multiplies the input, not the output."""
    gates_TE = decision.x_TD.new_zeros(len(decision.x_TD), block.n_experts)
    gates_TE.scatter_(1, decision.chosen_TK, decision.gates_TK.to(gates_TE.dtype))
    x_ETD = decision.x_TD[None] * gates_TE.T[..., None]
    return block.experts(x_ETD.flatten(0, 1)).reshape(x_ETD.shape).float().sum(0)


def llama4_output(block: Block, x_TD: Tensor, chosen_T: Tensor) -> Tensor:
    """The module's own code with one expert's weights at a time."""
    out_TD = torch.empty_like(x_TD)
    for expert in sorted(set(chosen_T.tolist())):
        weights = {name: weight[expert : expert + 1] for name, weight in block.experts.named_parameters()}
        mine = chosen_T == expert
        out_TD[mine] = functional_call(block.experts, weights, (x_TD[mine],))
    return out_TD


# --- other experts in place of those that the router numbers, for interventions


def contract_rerouted(
    block: Block, inputs: tuple[Tensor, ...], silent: Sequence[int], places: Sequence[int]
) -> tuple[Tensor, ...]:
    x, index_TK, gates_TK, *rest = inputs
    absent = block.n_experts  # what indices below 0 and of other ranks become and stay
    silent_E = torch.zeros(absent + 1, dtype=torch.bool, device=x.device)
    silent_E[list(silent)] = True
    at_TK = index_TK.clamp(max=absent).long()
    gates_TK = gates_TK.masked_fill(silent_E[at_TK], 0)
    if places:
        places_E = torch.tensor([*places, absent], dtype=index_TK.dtype, device=x.device)
        index_TK = torch.where((index_TK >= 0) & (index_TK < absent), places_E[at_TK], index_TK)
    return (x, index_TK, gates_TK, *rest)


def columns_rerouted(
    block: Block, inputs: tuple[Tensor, ...], silent: Sequence[int], places: Sequence[int]
) -> tuple[Tensor, ...]:
    """Switch's mask and NLLB's gates have one column per expert."""

    def changed(value: Tensor) -> Tensor:
        if value.shape[-1] != block.n_experts:
            return value
        value = value.clone()
        value[..., list(silent)] = 0
        return value[..., torch.tensor(places).argsort().to(value.device)] if places else value

    return (inputs[0], *map(changed, inputs[1:]))


def llama4_rerouted(
    block: Block, inputs: tuple[Tensor, ...], silent: Sequence[int], places: Sequence[int]
) -> tuple[Tensor, ...]:
    """Every expert gets its tokens in one block of rows; without biases an input of zero gives zero."""
    if next(block.experts.parameters()).shape[0] != block.n_experts:  # llama4_output runs one expert
        return inputs
    x_ETD = inputs[0].reshape(block.n_experts, -1, inputs[0].shape[-1]).clone()
    x_ETD[list(silent)] = 0
    if places:
        x_ETD = x_ETD[torch.tensor(places).argsort().to(x_ETD.device)]
    return (x_ETD.reshape(inputs[0].shape), *inputs[1:])


def add_to_tokens(output: Tensor, added_TD: Tensor, expert: int) -> Tensor:
    return output + added_TD.reshape(output.shape)


def add_to_expert(output: Tensor, added_TD: Tensor, expert: int) -> Tensor:
    """Llama 4 returns one block of rows per expert, which the block sums."""
    output = output.clone()
    output.view(-1, *added_TD.shape)[expert] += added_TD
    return output


class Adapter(NamedTuple):
    decide: Callable[[Block, tuple[Tensor, ...]], Decision]
    mix: Callable[[Block, Decision], Tensor]
    output: Callable[[Block, Tensor, Tensor], Tensor]  # of each token's expert, without its gate
    # The inputs of the experts module with gates of 0 for the silent experts, and with other experts:
    # `places` says for each number in the router which expert runs (empty: the one of that number).
    rerouted: Callable[[Block, tuple[Tensor, ...], Sequence[int], Sequence[int]], tuple[Tensor, ...]] = (
        contract_rerouted
    )
    # The output of the experts module plus an expert's gated output for all tokens.
    add: Callable[[Tensor, Tensor, int], Tensor] = add_to_tokens


CONTRACT = Adapter(contract, gated(contract_output), contract_output)
ADAPTERS = {
    "Llama4TextExperts": Adapter(llama4, llama4_mix, llama4_output, llama4_rerouted, add_to_expert),
    "SwitchTransformersExperts": Adapter(switch, gated(switch_output), switch_output, columns_rerouted),
    "NllbMoeExperts": Adapter(nllb, gated(nllb_output), nllb_output, columns_rerouted),
}


def adapter_of(block: Block) -> Adapter:
    return ADAPTERS.get(type(block.experts).__name__, CONTRACT)


def ungated_output(block: Block, x_TD: Tensor, expert: int) -> Tensor:
    """Return one expert's output for those tokens with a gate of 1, by the experts' own code."""
    return adapter_of(block).output(block, x_TD, torch.full((len(x_TD),), expert, device=x_TD.device))


def router_logits(block: Block) -> Tensor:
    """Return the logits of the current pass: the router's output, or recomputed where it has none.

    Which output holds the logits differs by class: the one that agrees with weight times input on the first
    batch.
    """
    if block.logits_at is None:
        recomputed_TE = recomputed_logits(block)
        same = (
            index
            for index, output in enumerate(block.router_outputs)
            if output.is_floating_point() and output.numel() == recomputed_TE.numel()
            if relative_error(output.reshape(recomputed_TE.shape), recomputed_TE) < SAME_LOGITS
        )
        block.logits_at = next(same, -1)
    if block.logits_at >= 0:
        return block.router_outputs[block.logits_at].reshape(-1, block.n_experts).float()
    return recomputed_logits(block)


def selection_alone(block: Block, x_TD: Tensor) -> Tensor:
    """Return the scores by which a block's router, asked alone about these states, would choose."""
    why, scoring = "", block.scoring
    if not block.hands_out and x_TD.shape[1] != block.weight_ED.shape[1]:
        why = f"gets states of another width than {x_TD.shape[1]}"
    elif block.reads_more or (block.hands_out and block.decide_alone is None):
        why = "needs other inputs than a token's state"
    elif block.decide_alone is not None:
        selection_TE = block.decide_alone(RouterReads(x_TD)).selection_TE
        if selection_TE is not None:
            return selection_TE
        why = "does not choose by scores"
    if why or scoring is None or not scoring.explains:
        raise BadInput(
            f"model type {block.model_type!r}: the router of {block.where()} "
            f"{why or 'does not choose by its logits alone'}, so it cannot be asked about the state of "
            "another layer; leave --probe-next out"
        )
    if block.logits_at is None or block.logits_at < 0:
        return scoring.selection(recomputed_logits(block, x_TD))
    logits_TE = tensors_in(block.router(x_TD))[block.logits_at]
    return scoring.selection(logits_TE.reshape(-1, block.n_experts).float())


def logits_dtype(block: Block) -> torch.dtype:
    """Return the precision in which the router computed the logits of the current pass."""
    if block.logits_at is not None and block.logits_at >= 0:
        return block.router_outputs[block.logits_at].dtype
    kind = block.weight_ED.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else block.weight_ED.dtype


def recomputed_logits(block: Block, x: Tensor | None = None) -> Tensor:
    x = block.router_input if x is None else x
    assert x is not None
    bias, weight_ED = getattr(block.router, "bias", None), block.weight_ED
    if isinstance(bias, Tensor):
        bias = present_value(block.router, "bias", bias).float()
    return nn.functional.linear(x.reshape(-1, weight_ED.shape[1]).float(), weight_ED.float(), bias)


def tensors_in(value: Any) -> tuple[Tensor, ...]:
    """Return a value itself, or the parts of a list, as far as they are tensors."""
    parts = value if isinstance(value, tuple | list) else (value,)
    return tuple(part for part in parts if isinstance(part, Tensor))


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Return ||ours - theirs|| / ||theirs||; infinite for NaN."""
    size, error = theirs.float().norm().item(), (ours.float() - theirs.float()).norm().item()
    return error / size if size > 0 and error == error else (0.0 if error == 0 else float("inf"))
