"""What a router is: hidden states in, a decision out, its losses on the decision, nothing global.

In evaluation every router is causal and treats a token the same alone or in a batch: capacity and quotas are
off, biases, keys and
moving averages stand still. What is not causal in training says so in `causal_in_training`; such routers are
compared by
evaluation loss only. `tests/lab/test_contract.py` holds all of ROUTERS to this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from moescope.decoder.ranks import ALONE, Ranks
from moescope.errors import BadInput
from moescope.types import Diagnostic, LinearView, Routing, Tokens

if TYPE_CHECKING:
    from moescope.decoder.config import ModelConfig, Option


@dataclass(frozen=True)
class RouterInput:
    """What a router may look at. Rows follow one another: token t of row b is at b L + t.

    Routers compute in float32 whatever the model does: x is float32, autocast is off, and their weights stay
    float32.
    """

    x_TD: Tensor
    token_ids_T: Tensor
    mask_T: Tensor  # bool, True where a real token is
    layer: int  # among the MoE layers, from 0
    carried_TR: Tensor | None = None  # what the router of the MoE layer before handed on


@dataclass(frozen=True)
class Routed:
    """A router's decision for T tokens.

    Empty slots hold -1 and a gate of 0; all slots of padding are empty.
    """

    chosen_TK: Tensor  # int64
    gates_TK: Tensor  # differentiable
    logits_TE: Tensor | None = None
    scores_TE: Tensor | None = None  # probabilities: rows sum to 1
    selection_TE: Tensor | None = None  # what the choice was made by
    losses: dict[str, Tensor] = field(default_factory=dict)  # weighted already; the model adds them up
    dropped_T: Tensor | None = None  # slots a token lost to capacity
    carried_TR: Tensor | None = None  # for the router of the next MoE layer
    diagnostics: dict[str, Diagnostic] = field(
        default_factory=dict
    )  # what the router says of itself, for tables
    filled_at_most: int | None = None  # how many slots can be filled where that is far below T K; None: T K


class Router(nn.Module, ABC):
    """A router of one MoE layer.

    `OPTIONS` names its options with their defaults, whose types are the options' types; others are refused.
    """

    name: ClassVar[str]
    causal_in_training: ClassVar[bool] = True
    plain_top_k: ClassVar[bool] = False  # a linear map without bias, softmax, top-k: other tools know it
    learns_from_text: ClassVar[bool] = True  # whether the language-model loss has a gradient into it
    fixed_top_k: ClassVar[int | None] = None
    OPTIONS: ClassVar[dict[str, Option]] = {}

    def __init__(self, config: ModelConfig, layer: int, shared: nn.Module | None = None):
        super().__init__()
        self.config, self.layer = config, layer
        self.options = self.checked_options(config)
        self.held = (
            shared,
        )  # in a tuple, so that parts shared by all layers are not counted and saved with each of them
        self.accumulated: dict[str, Tensor] = {}  # no buffers: DDP would overwrite one rank's with another's
        self.ranks = ALONE  # the trainer says which ranks share the batch

    @property
    def shared(self) -> nn.Module | None:
        return self.held[0]

    @property
    def sharing(self) -> Ranks:
        """The ranks that share this pass's batch. Evaluation is the first rank's alone: it asks nobody."""
        return self.ranks if self.training else ALONE

    @property
    def sure_by_design(self) -> bool:
        """Whether the router is built to be all but certain of every token.

        So that low entropy is no sign of trouble.
        """
        return False

    @abstractmethod
    def forward(self, given: RouterInput) -> Routed: ...

    def after_step(self) -> None:
        """What changes without gradients, from what this step's training passes accumulated.

        Called after every optimiser step.
        """

    def accumulate(self, name: str, amount: Tensor) -> None:
        """Adds to this step's sum over micro-batches; in training only."""
        if self.training:
            amount = amount.detach()
            before = self.accumulated.get(name)
            self.accumulated[name] = amount if before is None else before + amount

    def total(self, name: str) -> Tensor | None:
        """This step's sum over micro-batches and ranks, which is thereby spent.

        None where there was no training pass.
        """
        amount = self.accumulated.pop(name, None)
        return None if amount is None else self.ranks.sum(amount)

    def linear_view(self) -> LinearView | None:
        """How its logits are rows times what it makes of x, where it keeps more than rows and is that.

        None otherwise.
        """
        return None

    @classmethod
    def shared_parts(cls, config: ModelConfig) -> nn.Module | None:
        """What all layers' routers share; the model keeps it and hands it to each."""
        return None

    @classmethod
    def expert_shape(cls, config: ModelConfig) -> tuple[int, int]:
        """How many experts this router speaks of, and how wide they are."""
        return config.experts, config.d_ff

    @classmethod
    def renormalises(cls, config: ModelConfig) -> bool:
        """Whether gates are divided by their sum, so that they always sum to 1."""
        return True

    @classmethod
    def checked_options(cls, config: ModelConfig) -> dict[str, Any]:
        """All options with their values; unknown names and wrong types are refused."""
        from moescope.decoder.config import checked_type, unknown_key

        values: dict[str, Any] = dict(cls.OPTIONS)
        for name, value in config.router_options.items():
            if name not in cls.OPTIONS:
                if not cls.OPTIONS:
                    raise BadInput(f"router {cls.name} has no options; {name!r} was given")
                raise unknown_key(f"router {cls.name}: unknown option", name, list(cls.OPTIONS))
            values[name] = checked_type(value, type(cls.OPTIONS[name]), f"router {cls.name}: {name}")
        cls.check_options(values, config)
        return values

    @classmethod
    def check_options(cls, options: dict[str, Any], config: ModelConfig) -> None:
        """Refuses values that make no sense; for routers to extend."""


def to_routing(
    routed: Routed,
    layer: int,
    layer_name: str,
    n_experts: int,
    tokens: Tokens | None = None,
    x_TD: Tensor | None = None,
) -> Routing:
    """The decision as all of routing's tallies take it."""
    losses = list(routed.losses.values())
    return Routing(
        layer=layer,
        layer_name=layer_name,
        n_experts=n_experts,
        chosen_TK=routed.chosen_TK,
        gates_TK=routed.gates_TK.detach(),
        tokens=tokens,
        logits_TE=None if routed.logits_TE is None else routed.logits_TE.detach(),
        scores_TE=None if routed.scores_TE is None else routed.scores_TE.detach(),
        selection_TE=None if routed.selection_TE is None else routed.selection_TE.detach(),
        auxiliary_loss=sum(losses[1:], losses[0]).detach() if losses else None,
        x_TD=None if x_TD is None else x_TD.detach(),
        dropped_T=routed.dropped_T,
        diagnostics=routed.diagnostics,
    )
