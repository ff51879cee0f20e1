"""The optimiser's side of a training.

Which weights decay, how the learning rate goes, how gradients are kept short.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from moescope.decoder.model import LabModel
from moescope.decoder.ranks import ALONE, Ranks
from moescope.lab.config import TrainConfig
from moescope.lab.sharding import is_shared, own_part, whole_parameters

BETAS = (0.9, 0.95)


def make_optimiser(model: LabModel, train: TrainConfig, device: str) -> torch.optim.AdamW:
    """AdamW (Loshchilov, Hutter 2019) over what is trained; norms and biases do not decay."""
    # A group is updated by one kernel, which takes whole or shared tensors and no mixture.
    whole = {id(weight) for weight in whole_parameters(model)} if train.parallel == "fsdp" else set()
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            # By name too: experts' biases are stacked, and so have two dimensions like a matrix.
            decay = 0.0 if weight.dim() <= 1 or name.endswith("bias") else train.weight_decay
            groups.setdefault((id(weight) in whole, decay), []).append(weight)
    made = [{"params": weights, "weight_decay": decay} for (_, decay), weights in groups.items()]
    return torch.optim.AdamW(made, lr=train.learning_rate, betas=BETAS, fused=device.startswith("cuda"))


def learning_rate(step: int, train: TrainConfig) -> float:
    """Of step 0, 1, ...

    Linear from 0 over the warm-up, then half a cosine down to the final rate at the last step.
    """
    if step < train.warmup:
        return train.learning_rate * (step + 1) / train.warmup
    after = max(train.steps - train.warmup - 1, 1)
    share = min((step - train.warmup) / after, 1.0)
    low = min(train.final_learning_rate, train.learning_rate)
    return low + (train.learning_rate - low) * (1 + math.cos(math.pi * share)) / 2


def clip_gradients(gradients: list[Tensor], most: float, ranks: Ranks = ALONE) -> Tensor:
    """Scales all gradients together to a norm of `most` at most (0: never), in place; returns the norm of
    each as it was.

    Of gradients that ranks have parts of, the norm is that of all parts.
    """
    parts = [own_part(gradient) for gradient in gradients]
    norms_P = torch.stack([torch.linalg.vector_norm(part.float()) for part in parts])
    if any(is_shared(gradient) for gradient in gradients):
        shared_P = torch.tensor([is_shared(gradient) for gradient in gradients], device=norms_P.device)
        norms_P = torch.where(shared_P, ranks.sum(norms_P.square()).sqrt(), norms_P)
    if most > 0:
        scale = (most / (torch.linalg.vector_norm(norms_P) + 1e-6)).clamp(max=1.0)
        for gradient in parts:
            gradient.mul_(scale.to(gradient.dtype))
    return norms_P
