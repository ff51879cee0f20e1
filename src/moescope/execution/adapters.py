"""How MoE blocks of transformers differ: where they are, what their experts are handed, and what that says
was chosen.

Since transformers 5 most experts modules are called with (hidden_states, top_k_index, top_k_weights): the
router's decision as it is
carried out. `ADAPTERS` lists the classes that are called otherwise; a class that fits neither is refused by
name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from moescope.errors import BadInput
from moescope.execution.scoring import Scoring
from moescope.families import MODELS
from moescope.types import LinearView

SAME_LOGITS = (
    0.02  # relative error up to which a router's output counts as its logits: half precision stays well below
)
ORDINAL = re.compile(r"\.(?:layers|layer|blocks|block|h)\.(\d+)\.")


class Decision(NamedTuple):
    """What a block did with T tokens: its input, the experts chosen (-1: none), their gates."""

    x_TD: Tensor
    chosen_TK: Tensor
    gates_TK: Tensor


@dataclass(frozen=True)
class RouterReads:
    """What a router decides from, of T tokens.

    Their states and, where it looks at more, token ids and what the layer before handed on.
    """

    x_TD: Tensor
    ids_T: Tensor | None = None
    carried_TR: Tensor | None = None


class Asked(NamedTuple):
    """A router's answer about tokens of no particular text: its decision, and its logits where it has any."""

    decision: Decision
    logits_TE: Tensor | None


Ask = Callable[[RouterReads], Asked]


class Apart(NamedTuple):
    """The parts of a block that can be used one by one."""

    experts: nn.Module  # called with (x, chosen, gates)
    ask: Ask
    with_router: Callable[[Mapping[str, Tensor], int, int | None], Ask]
    linear: LinearView | None


@dataclass
class Block:
    """One MoE block of a running model, and what was found out about it on the first batch."""

    layer: int
    name: str
    module: nn.Module
    experts: nn.Module
    router: nn.Module  # the module that owns the router's weight
    n_experts: int
    model_type: str
    expected_scoring: str | None  # what is known of the model type; None for one that nobody described
    groups: tuple[
        int, int
    ]  # groups of experts, and how many of them a token may choose from; (1, 1) where there are none
    logits_at: int | None = (
        None  # which of the router's outputs are its logits; -1: none, they are recomputed
    )
    scoring: Scoring | None = None
    checked: bool = False
    calls: int = 0
    router_input: Tensor | None = None
    router_outputs: tuple[Tensor, ...] = ()
    hands_out: bool = (
        False  # whether the model hands out this block's Routing itself, so that nothing need be found out
    )
    decide_alone: Ask | None = (
        None  # the router of a block that hands out its routing; None where it cannot be asked
    )
    # The same router with other tensors, by their names within it, for so many experts and so many a token
    # (None: as before).
    with_router: Callable[[Mapping[str, Tensor], int, int | None], Ask] | None = None
    linear: LinearView | None = None
    beside: dict[str, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # what the block's other parts were given and gave: shared experts, their gate, a norm at the end

    @property
    def weight_ED(self) -> Tensor:
        weight = self.router.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def device(self) -> torch.device:
        if not self.hands_out:
            return self.weight_ED.device
        return next(self.experts.parameters()).device  # a router may have none

    @property
    def rows_ED(self) -> Tensor | None:
        """The router's weight where it has one row an expert; other routers have no such thing."""
        weight = getattr(self.router, "weight", None)
        fits = isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[0] == self.n_experts
        return weight if fits else None

    @property
    def trained(self) -> list[Tensor]:
        """What of the router gradients go into."""
        found = list(self.router.parameters()) if self.hands_out else [self.weight_ED]
        return [weight for weight in found if weight.requires_grad]

    @property
    def correction_bias_E(self) -> Tensor | None:
        """The bias that is added to scores for choosing only, whatever the model calls it."""
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            for_choosing = name.endswith("bias") and ("correction" in name or "expert_bias" in name)
            for_choosing = for_choosing or (self.hands_out and name == "bias_E")
            if for_choosing and tensor.numel() == self.n_experts and not name.startswith("experts."):
                return tensor.detach().flatten().float()
        return None

    def where(self) -> str:
        return f"layer {self.layer} ({self.name})"


def find_blocks(model: nn.Module) -> list[Block]:
    """Every MoE block in the order of layers; decoder layers are numbered after the encoder's."""
    if hands_out_routing(model):
        return handing_blocks(model)
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    model_type = str(getattr(config, "model_type", type(model).__name__))
    modules = dict(model.named_modules())
    found = []
    for path, module in modules.items():
        n_experts = getattr(module, "num_experts", None)
        if not type(module).__name__.endswith("Experts") or not isinstance(n_experts, int):
            continue
        block = modules[path.rpartition(".")[0]]
        number = layer_number(path, config)
        router = find_router(block, module, n_experts)
        if router is None:
            raise BadInput(
                f"model type {model_type!r}: no router of {n_experts} rows beside {path}; "
                "moescope cannot trace this model"
            )
        groups = (int(getattr(text, "n_group", None) or 1), int(getattr(text, "topk_group", None) or 1))
        scoring = known_scoring(model_type, text)
        found.append(
            Block(
                number, path.rpartition(".")[0], block, module, router, n_experts, model_type, scoring, groups
            )
        )
    if not found:
        raise BadInput(
            f"model type {model_type!r}: no experts module in it; trace needs a "
            "Mixture-of-Experts model that transformers "
            "runs through one"
        )
    if len({block.layer for block in found}) < len(found):
        raise BadInput(
            f"model type {model_type!r}: two MoE blocks in one layer; moescope cannot trace this model"
        )
    return sorted(found, key=lambda block: block.layer)


def hands_out_routing(model: nn.Module) -> bool:
    """Whether the model hands out every layer's Routing itself: `routing_blocks()` says which blocks, and its
    forward pass takes
    `consume`, which is called with each Routing as it happens. One whose parts can be run apart says so by
    `expert_blocks()`:
    layer -> the parts."""
    return callable(getattr(model, "routing_blocks", None))


def handing_blocks(model: Any) -> list[Block]:
    kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    apart = model.expert_blocks() if callable(getattr(model, "expert_blocks", None)) else {}
    found = []
    for layer, name, router, n_experts in model.routing_blocks():
        parts: Apart | None = apart.get(layer)
        experts = router if parts is None else parts.experts
        block = Block(
            layer, name, router, experts, router, n_experts, kind, None, (1, 1), checked=True, hands_out=True
        )
        if parts is not None:
            block.decide_alone, block.with_router, block.linear = parts.ask, parts.with_router, parts.linear
        found.append(block)
    return found


def known_scoring(model_type: str, text: Any) -> str | None:
    """How the model turns logits into scores, as its layout says.

    Sparsemixer's probabilities are a softmax's.
    """
    for kind in (model_type, getattr(text, "model_type", None)):
        if kind in MODELS:
            return "sigmoid" if MODELS[kind].scoring == "sigmoid" else "softmax"
    return None


def layer_number(path: str, config: Any) -> int:
    ordinals = ORDINAL.findall(f".{path}.")
    number = int(ordinals[0]) if ordinals else 0
    if getattr(config, "is_encoder_decoder", False) and "decoder" in path.split("."):
        number += int(getattr(config, "encoder_layers", None) or config.num_layers)
    return number


def find_router(block: nn.Module, experts: nn.Module, n_experts: int) -> nn.Module | None:
    """The block's module with a weight of one row an expert, outside its experts."""
    inside = set(experts.modules())
    found = [
        module
        for name, module in block.named_modules()
        if module not in inside and "shared" not in name
        if isinstance(weight := getattr(module, "weight", None), Tensor) and weight.dim() == 2
        if weight.shape[0] == n_experts
    ]
    return found[0] if found else None


# --- what the experts were handed


def contract(block: Block, given: tuple[Tensor, ...]) -> Decision:
    """transformers 5: (hidden_states, top_k_index, top_k_weights).

    An index of n_experts is an expert on another rank.
    """
    fits = (
        len(given) == 3
        and given[1].dim() == 2
        and not given[1].is_floating_point()
        and given[1].dtype != torch.bool
        and given[2].shape == given[1].shape
        and given[0].numel() == given[1].shape[0] * given[0].shape[-1]
    )
    if not fits:
        raise BadInput(
            f"model type {block.model_type!r}: {type(block.experts).__name__} of {block.where()} "
            "is not called with "
            "(hidden_states, top_k_index, top_k_weights), and moescope has no adapter for it"
        )
    x, index_TK, gates_TK = given
    present = (index_TK >= 0) & (index_TK < block.n_experts)
    return Decision(
        x.reshape(-1, x.shape[-1]), torch.where(present, index_TK, -1), torch.where(present, gates_TK, 0)
    )


def llama4(block: Block, given: tuple[Tensor, ...]) -> Decision:
    """Llama 4.

    Every expert is handed every token, multiplied by its score, which is 0 for all but the chosen.
    """
    assert block.router_input is not None
    scores_TE = block.router_outputs[0]
    top_k = int(getattr(block.module, "top_k", 1))
    gates_TK, chosen_TK = scores_TE.topk(top_k, dim=-1)
    return Decision(block.router_input.reshape(scores_TE.shape[0], -1), chosen_TK, gates_TK)


def switch(block: Block, given: tuple[Tensor, ...]) -> Decision:
    """Switch: a one-hot mask [T, 1, E], empty where the expert's capacity was spent."""
    x_TD, mask_TKE, gates_TK = given
    kept_TK = mask_TKE.sum(-1) > 0
    return Decision(x_TD, torch.where(kept_TK, mask_TKE.argmax(-1), -1), torch.where(kept_TK, gates_TK, 0))


def nllb(block: Block, given: tuple[Tensor, ...]) -> Decision:
    """NLLB.

    Gates [T, E], 0 for all but the first and second choice, and for those when capacity was spent.
    """
    x_TD, _, gates_TE = given
    gates_TK, chosen_TK = gates_TE.topk(2, dim=-1)
    return Decision(x_TD, torch.where(gates_TK > 0, chosen_TK, -1), gates_TK)


# --- what the experts make of it, one slot at a time, through the experts' own code


def contract_output(block: Block, x_TD: Tensor, chosen_T: Tensor) -> Tensor:
    shaped = (
        x_TD[None] if type(block.experts).__name__.startswith("Dbrx") else x_TD
    )  # which wants [batch, T, D]
    return block.experts(shaped, chosen_T[:, None], x_TD.new_ones(len(x_TD), 1)).reshape(x_TD.shape)


def switch_output(block: Block, x_TD: Tensor, chosen_T: Tensor) -> Tensor:
    mask_TKE = nn.functional.one_hot(chosen_T, block.n_experts)[:, None]
    return block.experts(x_TD, mask_TKE, x_TD.new_ones(len(x_TD), 1))


def nllb_output(block: Block, x_TD: Tensor, chosen_T: Tensor) -> Tensor:
    experts: Any = block.experts
    out_TD = torch.zeros_like(x_TD)
    for expert in set(chosen_T.tolist()):
        mine = chosen_T == expert
        out_TD[mine] = experts[f"expert_{expert}"](x_TD[mine]).to(out_TD.dtype)
    return out_TD * (1 - experts.moe_token_dropout)  # its stand-in for dropout when not training


def gated(output: Callable[[Block, Tensor, Tensor], Tensor]) -> Callable[[Block, Decision], Tensor]:
    """Sum over slots of gate x expert output."""

    def mix(block: Block, decision: Decision) -> Tensor:
        out_TD = torch.zeros_like(decision.x_TD, dtype=torch.float32)
        for slot in range(decision.chosen_TK.shape[1]):
            chosen_T = decision.chosen_TK[:, slot].clamp(min=0)  # an empty slot has gate 0
            out_TD += (
                decision.gates_TK[:, slot, None].float() * output(block, decision.x_TD, chosen_T).float()
            )
        return out_TD

    return mix


def llama4_mix(block: Block, decision: Decision) -> Tensor:
    """Sum over experts of expert(gate x input): the gate stands before the expert, not behind."""
    gates_TE = decision.x_TD.new_zeros(len(decision.x_TD), block.n_experts)
    gates_TE.scatter_(1, decision.chosen_TK, decision.gates_TK.to(gates_TE.dtype))
    handed_ETD = decision.x_TD[None] * gates_TE.T[..., None]
    out = block.experts(handed_ETD.reshape(-1, handed_ETD.shape[-1]))
    return out.reshape(handed_ETD.shape).float().sum(0)


def llama4_output(block: Block, x_TD: Tensor, chosen_T: Tensor) -> Tensor:
    """The module's own code with one expert's weights at a time.

    It takes as many experts as its weights have rows.
    """
    out_TD = torch.empty_like(x_TD)
    for expert in sorted(set(chosen_T.tolist())):
        own = {name: weight[expert : expert + 1] for name, weight in block.experts.named_parameters()}
        mine = chosen_T == expert
        out_TD[mine] = functional_call(block.experts, own, (x_TD[mine],))
    return out_TD


class Adapter(NamedTuple):
    decide: Callable[[Block, tuple[Tensor, ...]], Decision]
    mix: Callable[[Block, Decision], Tensor]
    output: Callable[[Block, Tensor, Tensor], Tensor]  # of each token's expert, without its gate


CONTRACT = Adapter(contract, gated(contract_output), contract_output)
ADAPTERS = {
    "Llama4TextExperts": Adapter(llama4, llama4_mix, llama4_output),
    "SwitchTransformersExperts": Adapter(switch, gated(switch_output), switch_output),
    "NllbMoeExperts": Adapter(nllb, gated(nllb_output), nllb_output),
}


def adapter_of(block: Block) -> Adapter:
    return ADAPTERS.get(type(block.experts).__name__, CONTRACT)


def ungated_output(block: Block, x_TD: Tensor, expert: int) -> Tensor:
    """What one expert makes of those tokens, by the experts' own code and with a gate of 1."""
    return adapter_of(block).output(block, x_TD, torch.full((len(x_TD),), expert, device=x_TD.device))


def router_logits(block: Block) -> Tensor:
    """The logits of the pass under way, as the router gave them, or recomputed where it gives none.

    Which of a router's outputs are the logits differs by class, and was probabilities before transformers
    5.6; so the first
    batch is compared with weight times input, and the output that agrees is taken from then on.
    """
    if block.logits_at is not None and block.logits_at >= 0:
        return block.router_outputs[block.logits_at].reshape(-1, block.n_experts).float()
    recomputed_TE = recomputed_logits(block)
    if block.logits_at is None:
        block.logits_at = -1
        for index, output in enumerate(block.router_outputs):
            wide = output.is_floating_point() and output.numel() == recomputed_TE.numel()
            if wide and relative_error(output.reshape(recomputed_TE.shape), recomputed_TE) < SAME_LOGITS:
                block.logits_at = index
                break
    return recomputed_TE


def recomputed_logits(block: Block) -> Tensor:
    assert block.router_input is not None
    bias = getattr(block.router, "bias", None)
    x_TD = block.router_input.reshape(-1, block.weight_ED.shape[1]).float()
    return nn.functional.linear(
        x_TD, block.weight_ED.float(), bias.float() if isinstance(bias, Tensor) else None
    )


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """||ours - theirs|| / ||theirs||, NaN counted as far off."""
    size = theirs.float().norm().item()
    error = (ours.float() - theirs.float()).norm().item()
    return error / size if size > 0 and error == error else (0.0 if error == 0 else float("inf"))
