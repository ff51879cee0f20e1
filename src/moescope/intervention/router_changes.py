"""Changes of routers: their rows, their logits, the scores that select, the number of experts per token."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moescope.errors import BadInput
from moescope.execution.adapters import Block, Decision, RouterReads
from moescope.families import MODELS
from moescope.intervention.editing import FAR, Context, Edit, Options, top_k_owners
from moescope.intervention.expert_changes import block_weights, watching
from moescope.spectral.decompose import LEADING_VECTORS, decompose
from moescope.weights.views import check_matrix, expert_matrix

VIEWS = ("gate", "up", "gate_up")
MARGIN = 0.01  # by which `force` passes the best or the worst logit
VANISHED = 1e-5  # a row shorter than this part of its old norm becomes zero
# experts module -> (matrix, expert) -> a hash of the matrix, and its leading right singular vectors
DIRECTIONS: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, int], tuple[bytes, Tensor]]] = (
    weakref.WeakKeyDictionary()
)


def has_logits(block: Block) -> bool:
    router: Any = block.router
    return bool(router.has_logits) if block.hands_out else True


def experts_per_token(block: Block) -> int | None:
    """Return the number of experts that a token chooses; None where the router has no such number."""
    if not block.hands_out:
        fixed = block.model_type in MODELS and MODELS[block.model_type].scoring == "sparsemixer"
        return None if fixed else next((module.top_k for module in top_k_owners(block)), None)
    router: Any = block.router
    return router.config.top_k if router.has_logits and not router.experts_choose else None


def gates_follow(block: Block) -> bool:
    """Whether gates are made from the scores that select; not where a bias is for choosing only."""
    if block.hands_out:
        router: Any = block.router
        return bool(router.gates_follow)
    return block.correction_bias is None


# --- logits and choice


def skip(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    """Mask logits, and the scores that select where these are others."""
    edit.skipped |= set(experts)
    left, needed = edit.block.n_experts - len(edit.skipped), edit.top_k or experts_per_token(edit.block) or 1
    if left < needed:
        raise BadInput(
            f"skip: {left} experts of layer {edit.block.layer} are left, but a token needs {needed}; "
            "skip fewer"
        )
    edit.logits.append(partial(filled, experts, -FAR))
    edit.selection += [] if gates_follow(edit.block) else [partial(filled, experts, -FAR)]


def force(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    """Put the logit just above all others, or just below; a bias for choosing far above or below them."""
    if gates_follow(edit.block):
        edit.logits.append(partial(outermost, experts, bool(options["off"])))
    else:
        edit.selection.append(partial(filled, experts, -FAR if options["off"] else FAR))


def bias(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    shifted = partial(shift, experts, float(options["by"]))
    (edit.logits if gates_follow(edit.block) else edit.selection).append(shifted)


def temperature(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    t = float(options["t"])
    edit.logits.append(lambda logits: logits / t)


def top_k(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    k, n_experts = int(options["k"]), edit.block.n_experts
    if k > n_experts - len(edit.skipped):
        raise BadInput(f"top_k: k is {k}, but layer {edit.block.layer} has {n_experts} experts; give less")
    edit.top_k = k


def uniform_router(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    """Permute each token's logits over the experts, and remove what prefers some experts.

    So choices are uniform and gates keep their values. The draw depends on the seed, the layer and the logits
    of the pass, so that it differs between texts and is the same when a pass is repeated.
    """
    seed = (context.seed + int(options["draw"])) * 1_000_003 + edit.block.layer
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


def filled(experts: Sequence[int], value: float, scores: Tensor) -> Tensor:
    return scores.index_fill(-1, torch.tensor(experts, device=scores.device), value)


def shift(experts: Sequence[int], by: float, scores: Tensor) -> Tensor:
    shift_E = torch.zeros(scores.shape[-1], dtype=scores.dtype, device=scores.device)
    shift_E[list(experts)] = by
    return scores + shift_E


def outermost(experts: Sequence[int], below: bool, logits: Tensor) -> Tensor:
    """Put logits just above the largest, or just below the smallest; further where logits are coarse."""
    edge = logits.amin(-1, keepdim=True) if below else logits.amax(-1, keepdim=True)
    margin = (edge.abs() * 4 * torch.finfo(logits.dtype).eps).clamp(min=MARGIN)
    value = edge - margin if below else edge + margin
    at = torch.tensor(experts, device=logits.device)
    return logits.index_copy(-1, at, value.expand(*value.shape[:-1], len(experts)))


# --- rows


def check_directions(block: Block, options: Options) -> None:
    """Raise where experts lack the matrix, or cannot have k directions."""
    weights, (k, view) = block_weights(block)[0], (int(options["k"]), str(options["view"]))
    check_matrix(weights, view)
    most = min(weights.d_ff * (2 if view == "gate_up" else 1), weights.d_model)
    if k > most:
        raise BadInput(
            f"k is {k}, but the {view} matrix of experts of layer {block.layer} has rank {most} at most; "
            "give at most that"
        )


def project_out(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    def change(row_D: Tensor, expert: int) -> Tensor:
        return removed(row_D, directions(edit.block, expert, options), options)

    check_directions(edit.block, options)
    edit.rows.append(partial(each_row, experts, change))


def project_onto(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    def change(row_D: Tensor, expert: int) -> Tensor:
        basis_DK = directions(edit.block, expert, options)
        return rescaled(basis_DK @ (basis_DK.T @ row_D), row_D, options)

    check_directions(edit.block, options)
    edit.rows.append(partial(each_row, experts, change))


def other_expert(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    def change(row_D: Tensor, expert: int) -> Tensor:
        other = (expert + int(options["step"])) % edit.block.n_experts
        return removed(row_D, directions(edit.block, other, options), options)

    if int(options["step"]) % edit.block.n_experts == 0:
        raise BadInput(f"other_expert: step {options['step']} leads back to the same expert; give another")

    check_directions(edit.block, options)
    edit.rows.append(partial(each_row, experts, change))


def random_direction(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    """The two controls of project_out: a random subspace of equal rank, or a random step of equal length."""

    def change(row_D: Tensor, expert: int) -> Tensor:
        place = (context.seed, edit.block.layer, expert, int(options["draw"]))
        if options["match"] == "rank":
            noise_DK = gaussian(place, len(row_D), int(options["k"]))
            return removed(row_D, torch.linalg.qr(noise_DK).Q, options)
        own_D = removed(row_D, directions(edit.block, expert, options), {**options, "restore_norm": False})
        noise_D = gaussian(place, len(row_D), 1)[:, 0]
        return rescaled(row_D + noise_D / noise_D.norm() * (own_D - row_D).norm(), row_D, options)

    check_directions(edit.block, options)
    edit.rows.append(partial(each_row, experts, change))


def replace_rows(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    """Replace rows by the unit sum of sign_j v_j / j, orthogonal to the rows replaced before, old norms."""

    def change(rows_ED: Tensor) -> Tensor:
        rows_ED = rows_ED.clone()
        before_D: list[Tensor] = []
        for expert in experts or range(len(rows_ED)):
            basis_DK = directions(edit.block, expert, options)
            signs_K = torch.where(basis_DK.T @ rows_ED[expert] < 0, -1.0, 1.0)
            unit_D = basis_DK @ (signs_K / torch.arange(1, len(signs_K) + 1, dtype=torch.float64))
            unit_D = unit_D / unit_D.norm()
            rest_D = unit_D.clone()
            for _ in range(2):  # the second pass removes what rounding left
                for other_D in before_D:
                    rest_D -= (rest_D @ other_D) * other_D
            rest_D = torch.zeros_like(rest_D) if rest_D.norm() < VANISHED else rest_D / rest_D.norm()
            before_D.append(rest_D)
            rows_ED[expert] = rest_D * rows_ED[expert].norm()
        return rows_ED

    check_directions(edit.block, options)
    edit.rows.append(change)


def hijack(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    """Remove the source row's component; add the source expert's first direction to all other rows."""

    def change(rows_ED: Tensor) -> Tensor:
        (source,) = experts
        basis_DK = directions(edit.block, source, options)
        row_D = rows_ED[source]
        first_D = basis_DK[:, 0] if basis_DK[:, 0] @ row_D >= 0 else -basis_DK[:, 0]
        changed_ED = rows_ED + float(options["strength"]) * rows_ED.norm(dim=1, keepdim=True) * first_D
        changed_ED[source] = removed(row_D, basis_DK, {"strength": 1.0, "restore_norm": False})
        return changed_ED

    check_directions(edit.block, options)
    edit.rows.append(change)


def zero_router(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    edit.rows.append(torch.zeros_like)


def permute_rows(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    """Permute rows: row i becomes row order[i]. Without an order at random, but not into the same order."""
    n_experts, text = edit.block.n_experts, str(options["order"])
    order = [int(part) if part.isdecimal() else -1 for part in text.split(",")] if text else []
    if text and sorted(order) != list(range(n_experts)):
        raise BadInput(f"permute_rows: order {text!r} does not hold each of 0 to {n_experts - 1} once")
    generator = torch.Generator().manual_seed(seed_of((context.seed, edit.block.layer, int(options["draw"]))))
    while not text and (not order or order == sorted(order)) and n_experts > 1:
        order = torch.randperm(n_experts, generator=generator).tolist()
    edit.rows.append(lambda rows_ED: rows_ED[order])


def each_row(experts: Sequence[int], change: Callable[[Tensor, int], Tensor], rows_ED: Tensor) -> Tensor:
    rows_ED = rows_ED.clone()
    for expert in experts or range(len(rows_ED)):
        rows_ED[expert] = change(rows_ED[expert], expert)
    return rows_ED


def removed(row_D: Tensor, basis_DK: Tensor, options: Options) -> Tensor:
    """r - s V V' r, with its old norm if that is asked for."""
    return rescaled(row_D - float(options["strength"]) * (basis_DK @ (basis_DK.T @ row_D)), row_D, options)


def rescaled(row_D: Tensor, old_D: Tensor, options: Options) -> Tensor:
    """Return the row, zero if it vanished, with the norm of the old row if that is asked for."""
    norm, old = row_D.norm(), old_D.norm()
    if norm < VANISHED * old:
        return torch.zeros_like(row_D)
    return row_D * (old / norm) if options["restore_norm"] and norm > 0 else row_D


def gaussian(place: tuple[int, ...], rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed_of(place))
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def seed_of(place: tuple[int, ...]) -> int:
    """Return a seed of its own for these numbers."""
    state = np.random.SeedSequence([number % 2**32 for number in place]).generate_state(1, np.uint64)
    return int(state[0]) >> 1


def directions(block: Block, expert: int, options: Options) -> Tensor:
    """Return the expert's k leading right singular vectors [D, k] of the matrix that `view` names."""
    view, k = str(options["view"]), int(options["k"])
    weights, tensors = block_weights(block)
    if any(tensor.is_meta for tensor in tensors.values()):
        raise BadInput(
            f"{block.where()}: the weights of its experts are not in memory when the router runs; "
            "use --execution resident or streamed"
        )
    matrix_FD = expert_matrix(weights, view, expert, None)
    bits = matrix_FD.contiguous().view(torch.uint8).numpy()
    content = hashlib.blake2b(bits.tobytes(), digest_size=16).digest()
    known = DIRECTIONS.setdefault(block.experts, {})
    stored_content, basis_DK = known.get((view, expert), (b"", torch.empty(0, 0)))
    if stored_content != content or basis_DK.shape[1] < k:
        rows_ED = block.weight_ED.detach().double().cpu()
        units_ED = rows_ED / rows_ED.norm(dim=1, keepdim=True).clamp(min=1e-30)
        leading = max(k, LEADING_VECTORS)
        found = decompose(matrix_FD, units_ED, [k], leading=leading)
        basis_DK = torch.as_tensor(found.leading_DK, dtype=torch.float64)
        known[view, expert] = content, basis_DK
    if basis_DK.shape[1] < k:
        raise BadInput(
            f"k is {k}, but the {view} matrix of expert {expert} of layer {block.layer} has rank "
            f"{basis_DK.shape[1]}; give at most that"
        )
    return basis_DK[:, :k]


def experts_taken(block: Block) -> tuple[int, ...]:
    """Return the experts that every token gets under `zero_router`.

    Their logits are those of a token of zeros: all equal, or the router's bias. Among equal ones the sort
    decides.
    """
    x_TD = torch.zeros(1, block.weight_ED.shape[1], dtype=block.weight_ED.dtype, device=block.device)
    decisions: list[Decision] = []
    if block.decide_alone is not None:
        decisions.append(block.decide_alone(RouterReads(x_TD)).decision)
    else:
        with watching([block], lambda block, decision: decisions.append(decision)), torch.no_grad():
            block.module(x_TD[None])
    return tuple(sorted(expert for expert in decisions[0].chosen_TK[0].tolist() if expert >= 0))
