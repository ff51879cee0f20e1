"""The router interface: hidden states in, a decision with its losses out, no global state.

In evaluation every router is causal and routes a token the same alone or in a batch: capacity and quotas are
off; biases, keys and moving averages are frozen. Routers that look at the whole batch in training set
`causal_in_training = False`; compare those by evaluation loss only. The contract test checks all of ROUTERS.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moescope.decoder.config import ModelConfig, Option, check_type
from moescope.decoder.ranks import ALONE, Ranks
from moescope.errors import BadInput, unknown_name
from moescope.types import Diagnostic, LinearView, Routing

EMPTY = -1e30  # not -inf: a token without any choice would get NaN


@dataclass(frozen=True)
class TokenContext:
    """What routers with certain options read besides the hidden state; the lab's own model provides it."""

    previous_T: Tensor  # id of the token before; a row's first token has its own
    position_T: Tensor
    embedded_TD: Tensor  # float32


@dataclass(frozen=True)
class RouterInput:
    """What a router may look at. Token t of batch row b is at index b L + t.

    Routers compute in float32: x is float32, autocast is off, and their weights stay float32. In the training
    of a bfloat16 model, `product_dtype` allows a router to round the factors of its largest products.
    """

    x_TD: Tensor
    token_ids_T: Tensor
    mask_T: Tensor  # bool, True at real tokens
    layer: int  # among the MoE layers, from 0
    carried_TR: Tensor | None = None  # state from the router of the previous MoE layer
    product_dtype: torch.dtype = torch.float32
    context: TokenContext | None = None  # where `reads_context` asks for it


@dataclass(frozen=True)
class Routed:
    """A router's decision for T tokens. Empty slots, including all slots of padding, hold -1 and gate 0."""

    chosen_TK: Tensor  # int64
    gates_TK: Tensor  # differentiable
    logits_TE: Tensor | None = None
    scores_TE: Tensor | None = None  # probabilities: rows sum to 1
    selection_TE: Tensor | None = None  # what the choice was made by
    losses: dict[str, Tensor] = field(default_factory=dict)  # already weighted; the model adds them up
    dropped_T: Tensor | None = None  # slots per token lost to capacity
    carried_TR: Tensor | None = None  # state for the router of the next MoE layer
    diagnostics: dict[str, Diagnostic] = field(default_factory=dict)
    filled_at_most: int | None = None  # upper bound of filled slots where far below T K; None: T K


class Router(nn.Module, ABC):
    """A router of one MoE layer.

    `OPTIONS` maps option names to defaults, whose types are the options' types. The class attributes up to
    `OPTIONS` are facts that the rest of the project acts on instead of comparing names; see `facts`.
    """

    name: ClassVar[str]
    routes: ClassVar[bool] = True  # False: one block per layer; nothing to trace or compress
    has_rows: ClassVar[bool] = True  # one weight vector per expert
    trains_rows: ClassVar[bool] = False  # as the parameter `weight`, which is multiplied with x
    has_logits: ClassVar[bool] = True
    has_keys: ClassVar[bool] = False  # rows are keys that move without gradients
    plain_top_k: ClassVar[bool] = False  # linear without bias, softmax, top-k: transformers can load it
    sigmoid_scores: ClassVar[bool] = False
    fixed_top_k: ClassVar[int | None] = None
    gates_follow: ClassVar[bool] = True  # the scores that select are those that gates are made from
    experts_choose: ClassVar[bool] = False  # equal load by construction; an empty slot is not a dropped token
    causal_in_training: ClassVar[bool] = True
    learns_from_text: ClassVar[bool] = True  # the language-model loss has a gradient into the router
    expects_frozen_experts: ClassVar[bool] = False
    expects_low_entropy: bool = False  # near-certain decisions by design: low entropy is no alert
    # what a layer's router stores besides rows and `bias_E`: name -> its kind, see types.RouterState
    state_tensors: ClassVar[dict[str, str]] = {}
    # how pruning ("slice") or merging ("fold", "join") changes this router, where it is special: a sentence
    compression_effects: ClassVar[dict[str, str]] = {}
    # options that seed a random draw: in a study each seed draws anew, unless the study sets the option
    seed_options: ClassVar[tuple[str, ...]] = ()
    # the ablation study's variants: name suffix -> changes to [model]; "" is the full router
    variants: ClassVar[dict[str, dict[str, Any]]] = {}
    # the overhead table's parts: name -> method; none of them calls another
    components: ClassVar[dict[str, str]] = {}
    OPTIONS: ClassVar[dict[str, Option]] = {}
    # what options may be: one of RANGES -> options; and of texts, option -> what is known
    BOUNDS: ClassVar[dict[str, tuple[str, ...]]] = {}
    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init__(self, config: ModelConfig, layer: int, shared: nn.Module | None = None):
        super().__init__()
        self.config, self.layer = config, layer
        # Whether gates are made as for one choice; stays when an intervention changes the number of choices.
        self.single = config.top_k == 1
        self.options = self.checked_options(config)
        self.shared_holder = (shared,)  # a tuple hides shared modules from each layer's parameters
        self.accumulated: dict[str, Tensor] = {}  # no buffers: DDP would overwrite one rank's with another's
        self.ranks = ALONE  # set by the trainer: the ranks that share the batch
        self.compiles = False  # set by the model: whether `fused` compiles
        if self.trains_rows:
            self.weight = nn.Parameter(torch.empty(config.experts, config.d_model).normal_(std=0.02))

    @property
    def shared(self) -> nn.Module | None:
        return self.shared_holder[0]

    @property
    def sharing(self) -> Ranks:
        """The ranks that share this pass's batch. Only the first rank evaluates, without communication."""
        return self.ranks if self.training else ALONE

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function without side effects, through torch.compile in the training of a compiled model.

        Not with several ranks, which communicate in between.
        """
        return (
            compiled_function(function)
            if self.compiles and self.training and self.ranks.world == 1
            else function
        )

    @abstractmethod
    def forward(self, inputs: RouterInput) -> Routed: ...

    def adjust_logits(self, logits_TE: Tensor) -> Tensor:
        """Return the logits from which choice and gates are made; an intervention replaces this method."""
        return logits_TE

    def adjust_selection(self, selection_TE: Tensor) -> Tensor:
        """Return the scores that select, where gates do not follow them; for interventions too."""
        return selection_TE

    def after_step(self) -> None:
        """Update what changes without gradients, from this step's accumulated sums."""

    def accumulate(self, name: str, amount: Tensor) -> None:
        """Add to this step's sum over micro-batches; in training only."""
        if self.training:
            amount = amount.detach()
            before = self.accumulated.get(name)
            self.accumulated[name] = amount if before is None else before + amount

    def total(self, name: str) -> Tensor | None:
        """Remove and return this step's sum over micro-batches and ranks; None without a training pass."""
        amount = self.accumulated.pop(name, None)
        return None if amount is None else self.ranks.sum(amount)

    def choice_gates(self, logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        """Softmax of the logits over a token's choices, over all experts where k = 1; 0 in empty slots."""
        picked_TK = logits_TE.gather(-1, chosen_TK.clamp(min=0))
        if self.single:  # a softmax over one choice is 1 and has no gradient
            gates_TK = (picked_TK - logits_TE.logsumexp(-1, keepdim=True)).exp()
        else:
            gates_TK = picked_TK.masked_fill(chosen_TK < 0, EMPTY).softmax(-1)
        return torch.where(chosen_TK < 0, 0, gates_TK)

    def linear_view(self) -> LinearView | None:
        """Logits as rows times a function of x, for routers with more state than rows; None otherwise."""
        return None

    @classmethod
    def facts(cls, config: ModelConfig) -> dict[str, Any]:
        """Facts about this router under these options, as saved with every checkpoint and training run."""
        return {fact: getattr(cls, fact) for fact in FACTS}

    @classmethod
    def is_plain(cls, config: ModelConfig) -> bool:
        """Return whether a linear top-k layout of transformers can hold the router with these options."""
        return cls.plain_top_k

    @classmethod
    def reads_context(cls, config: ModelConfig) -> bool:
        """Return whether `RouterInput.context` is needed."""
        return False

    def context_of(self, inputs: RouterInput) -> TokenContext:
        if inputs.context is None:
            raise BadInput(
                f"router {self.name}: its options {self.config.router_options} need ids, positions and "
                "embeddings, which only a training of the lab and its own models have"
            )
        return inputs.context

    @classmethod
    def slots_per_token(cls, config: ModelConfig) -> float:
        """Return how many experts a token meets on average."""
        return float(config.top_k)

    @classmethod
    def shared_parts(cls, config: ModelConfig) -> nn.Module | None:
        """Return the module that all layers' routers share; the model owns it and passes it to each."""
        return None

    @classmethod
    def expert_shape(cls, config: ModelConfig) -> tuple[int, int]:
        """Return the number of experts and their hidden width."""
        return config.experts, config.d_ff

    @classmethod
    def renormalises(cls, config: ModelConfig) -> bool:
        """Return whether gates are divided by their sum, so that they always sum to 1."""
        return True

    @classmethod
    def checked_options(cls, config: ModelConfig) -> dict[str, Any]:
        """Return all options with their values; unknown names and wrong types are rejected with an error."""
        values: dict[str, Any] = dict(cls.OPTIONS)
        for name, value in config.router_options.items():
            if name not in cls.OPTIONS:
                if not cls.OPTIONS:
                    raise BadInput(f"router {cls.name} has no options; remove {name!r}")
                raise unknown_name("option", name, list(cls.OPTIONS), f"router {cls.name}")
            values[name] = check_type(value, type(cls.OPTIONS[name]), f"router {cls.name}: {name}")
        for name, known in cls.CHOICES.items():
            if values[name] not in known:
                raise unknown_name(f"{name} of router {cls.name}", values[name], list(known))
        for valid, name in ((valid, name) for valid, names in cls.BOUNDS.items() for name in names):
            if not RANGES[valid](values[name]):
                raise BadInput(f"router {cls.name}: {name} must be {valid}, not {values[name]}")
        cls.check_options(values)
        return values

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        """Reject options that exclude each other."""


RANGES = {
    "0 or more": lambda value: value >= 0,
    "more than 0": lambda value: value > 0,
    "at least 0 and below 1": lambda value: 0 <= value < 1,
    "between 0 and 100": lambda value: 0 <= value <= 100,
    "at least 64": lambda value: value >= 64,
}
FACTS = (
    *("name", "routes", "has_rows", "has_logits", "has_keys", "plain_top_k", "sigmoid_scores", "fixed_top_k"),
    *("experts_choose", "causal_in_training", "learns_from_text", "expects_low_entropy", "state_tensors"),
)


@cache
def compiled_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function through torch.compile, once per process; it compiles on first use.

    With the same kernels in every process: by default torch picks them by timing, and after a second size
    makes one for all sizes; both round otherwise.
    """
    return torch.compile(function, dynamic=False, options={"deterministic": True})


def to_routing(routed: Routed, layer: int, layer_name: str, n_experts: int) -> Routing:
    """Return the decision as a detached Routing."""
    names = ("chosen_TK", "gates_TK", "logits_TE", "scores_TE", "selection_TE", "dropped_T")
    tensors = {name: tensor.detach() for name in names if (tensor := getattr(routed, name)) is not None}
    return Routing(layer, layer_name, n_experts, **tensors, diagnostics=routed.diagnostics)
