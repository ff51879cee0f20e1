"""Traces made of given choices, for tests of deploy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from moescope.deployment.tokens import TokenTrace
from moescope.routing.trace import VERB
from moescope.run import Run, open_run


def write_trace(
    folder: Path, chosen_LTK, document_T, n_experts: int, phase="decode", domains=("text",), gates_LTK=None
) -> Run:
    """Write the run folder of a trace with a tokens table; domains go round over the documents."""
    n_layers, tokens, k = np.shape(chosen_LTK)
    document_T = np.asarray(document_T)
    position_T = np.concatenate([np.arange(size) for size in np.bincount(document_T)])
    rows = [
        {
            "step": 0,
            "layer": layer,
            "layer_name": f"layer {layer}",
            "document": int(document_T[token]),
            "position": int(position_T[token]),
            "token_id": 0,
            "domain": domains[document_T[token] % len(domains)],
            "phase": phase,
            "experts": [int(expert) for expert in chosen_LTK[layer][token] if expert >= 0],
            "gates": None if gates_LTK is None else list(gates_LTK[layer][token]),
        }
        for layer in range(n_layers)
        for token in range(tokens)
        if np.max(chosen_LTK[layer][token]) >= 0
    ]
    layers = [
        {
            "step": 0,
            "layer": layer,
            "layer_name": f"layer {layer}",
            "phase": phase,
            "domain": "",
            "metric": "cv",
            "value": 1.0,
            "n_experts": n_experts,
            "top_k": k,
        }
        for layer in range(n_layers)
    ]
    with open_run(folder, VERB, {"arguments": {}, "checkpoints": []}) as writer:
        return writer.finish({"tokens": pd.DataFrame(rows), "routing_layers": pd.DataFrame(layers)})


def token_trace(chosen_LTK, document_T, n_experts: int, domains=("text",), probed_LTX=None) -> TokenTrace:
    """The same in memory."""
    chosen_LTK = np.asarray(chosen_LTK, dtype=np.int16)
    layers = list(range(len(chosen_LTK)))
    document_T = np.asarray(document_T)
    names = [f"layer {layer}" for layer in layers]
    domain_D = [domains[number % len(domains)] for number in range(int(document_T.max()) + 1)]
    sizes = [n_experts] * len(layers)
    return TokenTrace(layers, names, sizes, chosen_LTK, document_T, domain_D, "decode", 0, probed_LTX)
