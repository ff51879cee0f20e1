"""NaN and infinity in a training: at which step, and where in the model they came up first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moescope.decoder.model import LabModel
from moescope.errors import BadInput


class Diverged(BadInput):
    """A training that cannot go on."""


class FiniteWatch:
    """Keeps one number a layer and step on the device, and looks at them when somebody asks: nothing waits
    for the device before.

    A layer's number is the sum of its output, which is NaN or infinite when any of it is (or when the sum
    itself is too large for
    float32, which is as bad).
    """

    def __init__(self, model: LabModel):
        self.names = [f"layer {at} (layers.{at})" for at in range(len(model.blocks))]
        self.parameters = [name for name, weight in model.named_parameters() if weight.requires_grad]
        self.sums: list[Tensor] = []
        self.hooks = [block.register_forward_hook(self.ran) for block in model.blocks]
        self.steps: list[tuple[int, Tensor, Tensor, Tensor]] = []

    def ran(self, module: nn.Module, args: Any, output: Any) -> None:
        if module.training:
            self.sums.append(output[0].detach().float().sum())

    def step_ended(self, step: int, loss: Tensor, norms_P: Tensor) -> None:
        """Keep what is known of the step.

        Its loss, its layers' sums over all micro-batches, and the norm of every gradient.
        """
        sums_L = torch.stack(self.sums).view(-1, len(self.names)).sum(0)
        self.sums = []
        self.steps.append((step, loss.detach(), sums_L, norms_P))

    def check(self) -> None:
        """Raise for the first step since the last check with anything not finite in it.

        Every rank must call it.
        """
        steps, self.steps = self.steps, []
        if not steps:
            return
        table = torch.stack(
            [
                torch.cat([loss.view(1).double(), sums_L.double(), norms_P.double()])
                for _, loss, sums_L, norms_P in steps
            ]
        )
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(table)  # what one rank has not finite, the sum has not either
        if bool(table.isfinite().all()):
            return
        finite = table.isfinite().cpu()
        row = int((~finite).any(1).nonzero()[0])
        number = steps[row][0]
        layers, gradients = finite[row, 1 : 1 + len(self.names)], finite[row, 1 + len(self.names) :]
        if not bool(layers.all()):
            where = f"the output of {self.names[int((~layers).nonzero()[0])]} is not finite"
        elif not bool(finite[row, 0]):
            where = "the loss is not finite, though every layer's output is: the head (lm_head)"
        else:
            # gradients flow from the last layer to the first, so the last bad one is where it began
            where = f"the gradient of {self.parameters[int((~gradients).nonzero()[-1])]} is not finite"
        raise Diverged(
            f"step {number}: {where}; training stopped. Lower learning_rate, or raise warmup; "
            "whatever was saved is from before it"
        )

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
