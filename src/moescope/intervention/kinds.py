"""What every kind of change does to a block: to its experts, its router's rows, its logits and its choice."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from moescope.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from moescope.checkpoint.files import FLOAT_DTYPES
from moescope.checkpoint.source import MemoryFiles
from moescope.errors import BadInput
from moescope.execution.adapters import Block, Decision, ungated_output
from moescope.families import MODELS, read_moe
from moescope.intervention.editing import FAR, Context, Edit, Options, top_k_owners
from moescope.spectral.decompose import LEADING_VECTORS, decompose
from moescope.types import ExpertStack, LayerWeights, Routing
from moescope.weights.views import check_matrix, expert_matrix

STACKS = ("gate_EFD", "up_EFD", "down_EDF", "gate_bias_EF", "up_bias_EF", "down_bias_ED")
VIEWS = ("gate", "up", "gate_up")
MARGIN = 0.01  # by which `force` passes the best or the worst logit
VANISHED = 1e-5  # a row shorter than this part of its old norm becomes zero
# experts module -> (matrix, expert) -> a hash of the matrix, and its leading right singular vectors
DIRECTIONS: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, int], tuple[bytes, Tensor]]] = (
    weakref.WeakKeyDictionary()
)
Apply = Callable[[Edit, Sequence[int], Options, Context], None]  # an intervention's change of a block


# --- experts: no output, a constant output, another place, other weights


def ablate(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    edit.outputs |= dict.fromkeys(experts)


def mean(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    for expert in experts if context.means is not None else ():
        mean_D = (context.means or {}).get((edit.block.layer, expert))
        if mean_D is None:
            raise BadInput(
                f"mean: no output of expert {expert} of layer {edit.block.layer} to average; give "
                "calibration text in which it is chosen"
            )
        edit.outputs[expert] = mean_D


def swap(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    edit.places = edit.places or list(range(edit.block.n_experts))
    first, second = experts
    edit.places[first], edit.places[second] = edit.places[second], edit.places[first]


def transplant(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    """Put another expert's weights, its router row, or both in an expert's place."""
    block, part = edit.block, options["part"]
    layer = block.layer if options["from_layer"] < 0 else options["from_layer"]
    source = source_layer(options["checkpoint"], layer, context.blocks)
    for expert in experts:
        origin = expert if options["from_expert"] < 0 else options["from_expert"]
        if origin >= source.n_experts:
            raise BadInput(f"transplant: layer {layer} has experts 0 to {source.n_experts - 1}, not {origin}")
        if part != "row":
            tensors = {name: stack.read(origin) for name, stack in stacks_of(source).items()}
            edit.weights.append(partial(other_weights, block, expert, tensors))
            here = {name: stack.shape[1:] for name, stack in stacks_of(block_weights(block)[0]).items()}
            there = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            if here != there:
                raise BadInput(
                    f"transplant: expert {expert} of layer {block.layer} has projections of shapes {here}, "
                    f"the other has {there}; use an expert of the same shape"
                )
        if part != "expert":
            rows_ED = block.rows_ED
            if source.router_ED is None or rows_ED is None or source.d_model != rows_ED.shape[1]:
                raise BadInput(
                    f"transplant: a router row of layer {layer} cannot be applied to layer {block.layer}: "
                    "one of them has no rows, or rows of another width; use part=expert"
                )
            edit.rows.append(partial(with_row, expert, source.router_ED.read()[origin]))


def with_row(expert: int, row_D: Tensor, rows_ED: Tensor) -> Tensor:
    return rows_ED.index_copy(0, torch.tensor([expert]), row_D[None].to(rows_ED))


def source_layer(checkpoint: str, layer: int, blocks: Mapping[int, Block]) -> LayerWeights:
    """Return the weights of a layer of a checkpoint, or of the running model where none is named."""
    stored = read_moe(open_checkpoint(checkpoint)).layers if checkpoint else {}
    layers = stored if checkpoint else blocks
    if layer not in layers:
        place = f"{checkpoint} has " if checkpoint else ""
        raise BadInput(f"transplant: {place}no MoE layer {layer}; MoE layers: {', '.join(map(str, layers))}")
    if checkpoint:
        return stored[layer]
    weights, tensors = block_weights(blocks[layer])
    if any(tensor.is_meta for tensor in tensors.values()):
        raise BadInput(
            f"transplant: the weights of layer {layer} are not in memory when layers are set up; "
            "give checkpoint=FOLDER"
        )
    return weights


def block_weights(block: Block) -> tuple[LayerWeights, dict[str, Tensor]]:
    """Return a running block's weights as those of a checkpoint, and its tensors by their names there."""
    parts = {"": block.module}
    config: dict[str, Any] | None = None
    if block.hands_out:
        router: Any = block.router
        parts = {"router.": router, "experts.": block.experts}
        if block.rows_ED is None:
            config = {"model_type": "moescope_lab", "moescope_lab": {}, "num_hidden_layers": block.layer + 1}
            config["moescope_router"] = router.facts(router.config)
    tensors = {
        f"{block.name}.{prefix}{name}": tensor
        for prefix, module in parts.items()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if str(tensor.dtype) in FLOAT_DTYPES
    }
    files = MemoryFiles(tensors, block.name)
    infos = {
        name: TensorInfo(name, header.shape, header.dtype, block.name)
        for name, header in files.headers("").items()
    }
    checkpoint = Checkpoint(block.name, block.name, "model", config, infos, {}, infos, files, None, True)
    return next(iter(read_moe(checkpoint).layers.values())), tensors


def stacks_of(weights: LayerWeights) -> dict[str, ExpertStack]:
    return {name: stack for name in STACKS if (stack := getattr(weights, name)) is not None}


@contextmanager
def other_weights(block: Block, expert: int, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Write an expert's projections into the running model, and what was there back afterwards."""
    weights, running = block_weights(block)
    views = {}
    for name, stack in stacks_of(weights).items():
        if stack.stored is None:
            raise BadInput(
                f"{block.where()}: its experts are quantised, so no other can be put in their place"
            )
        whole = running[stack.stored.tensor_name(expert)].detach()
        if stack.stored.whole is not None:
            whole = whole.view(block.n_experts, *stack.stored.shape)[expert]
        views[name] = stack.stored.view(whole)
    before_change = {name: view.clone() for name, view in views.items()}
    try:
        for name, view in views.items():
            view.copy_(tensors[name])
        yield
    finally:
        for name, view in views.items():
            view.copy_(before_change[name])


# --- the mean outputs that `mean` needs


class MeanOutputs:
    """Mean outputs of some experts, without gate, over the tokens that choose them. A `Collector`."""

    def __init__(self, wanted: Iterable[tuple[int, int]]):
        self.counts = dict.fromkeys(sorted(set(wanted)), 0)  # layer, expert -> tokens
        self.sums: dict[tuple[int, int], Tensor] = {}

    def consume(self, routing: Routing, block: Block) -> None:
        if routing.x_TD is not None:
            assert routing.tokens is not None
            chosen_TK = routing.chosen_TK.where(routing.tokens.real_T[:, None], -1)
            self.see(block, Decision(routing.x_TD, chosen_TK, routing.gates_TK))

    def see(self, block: Block, decision: Decision) -> None:
        x_TD, chosen_TK, _ = decision
        for key in [key for key in self.counts if key[0] == block.layer]:
            chosen_TD = x_TD[(chosen_TK == key[1]).any(-1)]
            total_D = torch.zeros(x_TD.shape[-1], dtype=torch.float64)
            if len(chosen_TD):
                total_D = ungated_output(block, chosen_TD, key[1]).double().sum(0).cpu()
            self.sums[key] = self.sums.get(key, 0) + total_D
            self.counts[key] += len(chosen_TD)

    @property
    def means(self) -> dict[tuple[int, int], Tensor]:
        """Zero for an expert that no token chooses."""
        return {key: total_D / max(self.counts[key], 1) for key, total_D in self.sums.items()}


# --- logits and choice


def has_logits(block: Block) -> bool:
    return bool(not block.hands_out or block.router.has_logits)


def experts_per_token(block: Block) -> int | None:
    """Return the number of experts that a token chooses; None where the router has no such number."""
    if not block.hands_out:
        fixed = block.model_type in MODELS and MODELS[block.model_type].scoring == "sparsemixer"
        return None if fixed else next((module.top_k for module in top_k_owners(block)), None)
    router: Any = block.router
    return router.config.top_k if router.has_logits and not router.experts_choose else None


def gates_follow(block: Block) -> bool:
    """Whether gates are made from the scores that select; not where a bias is for choosing only."""
    return bool(block.router.gates_follow if block.hands_out else block.correction_bias is None)


def skip(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    """Mask logits, and the scores that select where these are others."""
    edit.skipped |= set(experts)
    left, needed = edit.block.n_experts - len(edit.skipped), edit.top_k or experts_per_token(edit.block) or 1
    if left < needed:
        raise BadInput(
            f"skip: {left} experts of layer {edit.block.layer} are left, but a token needs {needed}; "
            "skip fewer"
        )
    for scores in [edit.logits] if gates_follow(edit.block) else [edit.logits, edit.selection]:
        scores.append(partial(fill_scores, experts, -FAR))


def force(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    """Put the logit just above all others, or just below; a bias for choosing far above or below them."""
    if gates_follow(edit.block):
        edit.logits.append(partial(outermost, experts, options["off"]))
    else:
        edit.selection.append(partial(fill_scores, experts, -FAR if options["off"] else FAR))


def bias(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    def shifted(scores: Tensor) -> Tensor:
        shift_E = torch.zeros(scores.shape[-1], dtype=scores.dtype, device=scores.device)
        shift_E[list(experts)] = options["by"]
        return scores + shift_E

    (edit.logits if gates_follow(edit.block) else edit.selection).append(shifted)


def temperature(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    edit.logits.append(lambda logits: logits / options["t"])


def top_k(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    k, n_experts = options["k"], edit.block.n_experts
    if k > n_experts - len(edit.skipped):
        raise BadInput(f"top_k: k is {k}, but layer {edit.block.layer} has {n_experts} experts; give less")
    edit.top_k = k


def uniform_router(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    """Permute each token's logits over the experts, and remove what prefers some experts.

    So choices are uniform and gates keep their values. The draw depends on the seed, the layer and the logits
    of the pass, so that it differs between texts and is the same when a pass is repeated.
    """
    seed = (context.seed + options["draw"]) * 1_000_003 + edit.block.layer
    drawn: list[Tensor] = []

    def permuted(logits: Tensor) -> Tensor:
        content = int(logits.detach().double().abs().sum().cpu().view(torch.int64))
        generator = torch.Generator().manual_seed((seed * 0x9E3779B1 + content) % 2**63)
        order = torch.rand(logits.shape, generator=generator).argsort(-1).to(logits.device)
        drawn[:] = [logits.gather(-1, order)]
        return drawn[0]

    def unbiased(scores: Tensor) -> Tensor:
        return drawn[0].detach() if edit.block.hands_out else torch.zeros_like(scores)

    edit.logits.append(permuted)
    edit.selection += [] if gates_follow(edit.block) else [unbiased]


def fill_scores(experts: Sequence[int], value: float, scores: Tensor) -> Tensor:
    return scores.index_fill(-1, torch.tensor(experts, device=scores.device), value)


def outermost(experts: Sequence[int], below: bool, logits: Tensor) -> Tensor:
    """Put logits just above the largest, or just below the smallest; further where logits are coarse."""
    edge = logits.amin(-1, keepdim=True) if below else logits.amax(-1, keepdim=True)
    margin = (edge.abs() * 4 * torch.finfo(logits.dtype).eps).clamp(min=MARGIN)
    value = (edge - margin if below else edge + margin).expand(*edge.shape[:-1], len(experts))
    return logits.index_copy(-1, torch.tensor(experts, device=logits.device), value)


# --- rows, by the leading directions of experts


def by_directions(change: Callable[[Tensor, Sequence[int], Block, Options, int], None]) -> Apply:
    """Return the intervention that lets `change` write rows, in float64, given experts, block, options, seed.

    It raises where experts lack the matrix, or cannot have k directions.
    """

    def apply(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
        def changed(rows_ED: Tensor) -> Tensor:
            rows_ED = rows_ED.clone()
            change(rows_ED, experts or range(len(rows_ED)), block, options, context.seed)
            return rows_ED

        block, k, view = edit.block, options["k"], options["view"]
        if "step" in options and options["step"] % block.n_experts == 0:
            raise BadInput(
                f"other_expert: step {options['step']} leads back to the same expert; give another"
            )
        weights = block_weights(block)[0]
        check_matrix(weights, view)
        most = min(weights.d_ff * (2 if view == "gate_up" else 1), weights.d_model)
        if k > most:
            raise BadInput(
                f"k is {k}, but the {view} matrix of experts of layer {block.layer} has rank {most} at most; "
                "give at most that"
            )
        edit.rows.append(changed)

    return apply


@by_directions
def project_out(rows_ED: Tensor, experts: Sequence[int], block: Block, options: Options, seed: int) -> None:
    for expert in experts:
        rows_ED[expert] = removed(rows_ED[expert], directions(block, expert, options), options)


@by_directions
def project_onto(rows_ED: Tensor, experts: Sequence[int], block: Block, options: Options, seed: int) -> None:
    for expert in experts:
        basis_DK = directions(block, expert, options)
        rows_ED[expert] = rescaled(basis_DK @ (basis_DK.T @ rows_ED[expert]), rows_ED[expert], options)


@by_directions
def other_expert(rows_ED: Tensor, experts: Sequence[int], block: Block, options: Options, seed: int) -> None:
    for expert in experts:
        other = (expert + options["step"]) % block.n_experts
        rows_ED[expert] = removed(rows_ED[expert], directions(block, other, options), options)


@by_directions
def random_direction(
    rows_ED: Tensor, experts: Sequence[int], block: Block, options: Options, seed: int
) -> None:
    """The two controls of project_out: a random subspace of equal rank, or a random step of equal length."""
    for expert in experts:
        row_D, by_rank = rows_ED[expert], options["match"] == "rank"
        generator = torch.Generator().manual_seed(seed_of(seed, block.layer, expert, options["draw"]))
        shape = (len(row_D), options["k"] if by_rank else 1)
        noise_DK = torch.randn(shape, generator=generator, dtype=torch.float64)
        if by_rank:
            rows_ED[expert] = removed(row_D, torch.linalg.qr(noise_DK).Q, options)
        else:
            plain = {**options, "restore_norm": False}
            step_D = removed(row_D, directions(block, expert, options), plain) - row_D
            noise_D = noise_DK[:, 0]
            rows_ED[expert] = rescaled(row_D + noise_D / noise_D.norm() * step_D.norm(), row_D, options)


@by_directions
def replace_rows(rows_ED: Tensor, experts: Sequence[int], block: Block, options: Options, seed: int) -> None:
    """Replace rows by the unit sum of sign_j v_j / j, orthogonal to the rows replaced before, old norms."""
    before_D: list[Tensor] = []
    for expert in experts:
        basis_DK = directions(block, expert, options)
        signs_K = torch.where(basis_DK.T @ rows_ED[expert] < 0, -1.0, 1.0)
        unit_D = basis_DK @ (signs_K / torch.arange(1, len(signs_K) + 1, dtype=torch.float64))
        rest_D = unit_D / unit_D.norm()
        for _ in range(2):  # the second pass removes what rounding left
            for other_D in before_D:
                rest_D = rest_D - (rest_D @ other_D) * other_D
        rest_D = torch.zeros_like(rest_D) if rest_D.norm() < VANISHED else rest_D / rest_D.norm()
        before_D.append(rest_D)
        rows_ED[expert] = rest_D * rows_ED[expert].norm()


@by_directions
def hijack(rows_ED: Tensor, experts: Sequence[int], block: Block, options: Options, seed: int) -> None:
    """Remove the source row's component; add the source expert's first direction to all other rows."""
    (source,) = experts
    basis_DK, row_D = directions(block, source, options), rows_ED[source].clone()
    first_D = basis_DK[:, 0] if basis_DK[:, 0] @ row_D >= 0 else -basis_DK[:, 0]
    rows_ED += options["strength"] * rows_ED.norm(dim=1, keepdim=True) * first_D
    rows_ED[source] = removed(row_D, basis_DK, {"strength": 1.0, "restore_norm": False})


def removed(row_D: Tensor, basis_DK: Tensor, options: Options) -> Tensor:
    """r - s V V' r, with its old norm if that is asked for."""
    return rescaled(row_D - options["strength"] * (basis_DK @ (basis_DK.T @ row_D)), row_D, options)


def rescaled(row_D: Tensor, old_D: Tensor, options: Options) -> Tensor:
    """Return the row, zero if it vanished, with the norm of the old row if that is asked for."""
    norm, old = row_D.norm(), old_D.norm()
    if norm < VANISHED * old:
        return torch.zeros_like(row_D)
    return row_D * (old / norm) if options["restore_norm"] and norm > 0 else row_D


def directions(block: Block, expert: int, options: Options) -> Tensor:
    """Return the expert's k leading right singular vectors [D, k] of the matrix that `view` names."""
    view, k = options["view"], options["k"]
    weights, tensors = block_weights(block)
    if any(tensor.is_meta for tensor in tensors.values()):
        raise BadInput(
            f"{block.where()}: the weights of its experts are not in memory when the router runs; "
            "use --execution resident or streamed"
        )
    matrix_FD = expert_matrix(weights, view, expert, None)
    bits = matrix_FD.contiguous().view(torch.uint8).numpy().tobytes()
    content = hashlib.blake2b(bits, digest_size=16).digest()
    known = DIRECTIONS.setdefault(block.experts, {})
    stored_content, basis_DK = known.get((view, expert), (b"", torch.empty(0, 0)))
    if stored_content != content or basis_DK.shape[1] < k:
        units_ED = functional.normalize(block.weight_ED.detach().double().cpu(), eps=1e-30)
        spectrum = decompose(matrix_FD, units_ED, [k], leading=max(k, LEADING_VECTORS))
        basis_DK = torch.as_tensor(spectrum.leading_DK, dtype=torch.float64)
        known[view, expert] = content, basis_DK
    if basis_DK.shape[1] < k:
        raise BadInput(
            f"k is {k}, but the {view} matrix of expert {expert} of layer {block.layer} has rank "
            f"{basis_DK.shape[1]}; give at most that"
        )
    return basis_DK[:, :k]


# --- rows, all of a layer


def zero_router(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    edit.rows.append(torch.zeros_like)


def permute_rows(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    """Permute rows: row i becomes row order[i]. Without an order at random, but not into the same order."""
    n_experts, text = edit.block.n_experts, options["order"]
    order = [int(part) if part.isdecimal() else -1 for part in text.split(",")] if text else []
    if text and sorted(order) != list(range(n_experts)):
        raise BadInput(f"permute_rows: order {text!r} does not hold each of 0 to {n_experts - 1} once")
    generator = torch.Generator().manual_seed(seed_of(context.seed, edit.block.layer, options["draw"]))
    while not text and (not order or order == sorted(order)) and n_experts > 1:
        order = torch.randperm(n_experts, generator=generator).tolist()
    edit.rows.append(lambda rows_ED: rows_ED[order])


def seed_of(*numbers: int) -> int:
    """Return a seed of its own for these numbers."""
    sequence = np.random.SeedSequence([number % 2**32 for number in numbers])
    return int(sequence.generate_state(1, np.uint64)[0]) >> 1
