"""What a token costs in a model.

The parameters it meets and the operations it takes, counted without building the model.
"""

from __future__ import annotations

import torch

from moescope.decoder.config import ModelConfig
from moescope.decoder.model import parameter_counts
from moescope.decoder.routers import RouterInput, router_class
from moescope.lab.flops import FlopCount

PROBED = 256  # tokens by which a router's operations are counted


def slots_per_token(config: ModelConfig) -> float:
    """Return how many experts a token meets on average."""
    return router_class(config.router).slots_per_token(config)


def expert_parameters(config: ModelConfig) -> int:
    """Of one expert in one layer: three matrices in `modern`, two with biases in `some`."""
    width = router_class(config.router).expert_shape(config)[1]
    matrices = 3 if config.block == "modern" else 2
    biases = 0 if config.block == "modern" else width + config.d_model
    return matrices * config.d_model * width + biases


def active_parameters(config: ModelConfig) -> int:
    """All parameters less those of experts that a token does not meet."""
    experts = router_class(config.router).expert_shape(config)[0]
    unmet = (experts - slots_per_token(config)) * expert_parameters(config) * config.layers
    return round(parameter_counts(config).total - unmet)


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Floating-point operations of a forward pass in training, for one token of rows of that length.

    Two for every weight of a matrix that the token meets, attention over half the row on average, and
    everything a router does, elementwise
    arithmetic included; norms, activations and rotations elsewhere are left out. A training step takes about
    three times as much.
    """
    D = config.d_model
    attention = 8 * D * D + 4 * D * (length + 1) / 2
    width = router_class(config.router).expert_shape(config)[1]
    matrices = 3 if config.block == "modern" else 2
    experts = slots_per_token(config) * 2 * matrices * D * width
    return config.layers * (attention + experts + router_flops(config)) + 2 * D * config.vocabulary


def router_flops(config: ModelConfig) -> float:
    """Operations of one layer's router for one token, counted while it decides about random ones."""
    kind = router_class(config.router)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        router = kind(config, 0, kind.shared_parts(config)).train()
        x_TD, ids_T = torch.randn(PROBED, config.d_model), torch.randint(config.vocabulary, (PROBED,))
        given = RouterInput(x_TD, ids_T, torch.ones_like(ids_T, dtype=torch.bool), 0)
        with torch.no_grad(), FlopCount() as counted:
            router(given)
    return counted.flops / PROBED
