"""The optimiser's side of a training: which weights decay, how the learning rate goes, how gradients are kept short."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from moescope.lab.config import TrainConfig

BETAS = (0.9, 0.95)


def make_optimiser(model: nn.Module, train: TrainConfig, device: str) -> torch.optim.AdamW:
    """AdamW (Loshchilov, Hutter 2019) over what is trained; norms and biases do not decay."""
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    # By name too: experts' biases are stacked, and so have two dimensions like a matrix.
    kept = [weight.dim() <= 1 or name.endswith("bias") for name, weight in trained]
    groups = [
        {"params": [weight for (_, weight), keeps in zip(trained, kept, strict=True) if keeps is whole], "weight_decay": decay}
        for whole, decay in ((False, train.weight_decay), (True, 0.0))
    ]  # fmt: skip
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=BETAS, fused=device.startswith("cuda"))


def learning_rate(step: int, train: TrainConfig) -> float:
    """Of step 0, 1, ...: linear from 0 over the warm-up, then half a cosine down to the final rate at the last step."""
    if step < train.warmup:
        return train.learning_rate * (step + 1) / train.warmup
    after = max(train.steps - train.warmup - 1, 1)
    share = min((step - train.warmup) / after, 1.0)
    low = min(train.final_learning_rate, train.learning_rate)
    return low + (train.learning_rate - low) * (1 + math.cos(math.pi * share)) / 2


def clip_gradients(gradients: list[Tensor], most: float) -> Tensor:
    """Scales all gradients together to a norm of `most` at most (0: never), in place; returns the norm of each as it was."""
    norms_P = torch.stack([torch.linalg.vector_norm(gradient.float()) for gradient in gradients])
    if most > 0:
        scale = (most / (torch.linalg.vector_norm(norms_P) + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.dtype))
    return norms_P
