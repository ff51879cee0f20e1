"""How far each router row has turned and grown between two checkpoints."""

from __future__ import annotations

import numpy as np
import pandas as pd

from moescope.errors import BadInput
from moescope.geometry.chart import layer_means
from moescope.geometry.distances import distance
from moescope.types import LayerWeights


def router_drift(a: LayerWeights, b: LayerWeights, series: str, seed: int = 0) -> dict[str, pd.DataFrame]:
    """The rows of `geometry` and `geometry_layers` with matrix "router": row e of `a` against row e of `b`,
    as stored.

    Cosine 1 is unmoved, 0 what an unrelated row gives, sqrt 2 its relative L2. Rows have no singular vectors,
    so no R. A vector added to all rows turns
    each of them, and a softmax does not see it. Both routers must have rows.
    """
    read = []
    for layer in (a, b):
        if layer.router_ED is None:
            raise BadInput(
                f"{layer.layer_name}: its router has no row for each expert; leave router out of --matrix"
            )
        rows = layer.router_ED.read()
        if not bool(rows.isfinite().all()):
            raise BadInput(
                f"{layer.router_ED.name}: holds NaN or infinity; leave layer {layer.layer} out with --layers"
            )
        read.append(rows)
    rows_a, rows_b = read
    table = []
    for expert in range(a.n_experts):
        apart = distance(rows_a[expert], rows_b[expert])
        table.append(
            {
                "series": series,
                "layer": a.layer,
                "layer_name": a.layer_name,
                "matrix": "router",
                "expert_a": expert,
                "expert_b": expert,
                "relative_l2": apart.relative_l2,
                "cosine": apart.cosine,
                "norm_ratio": apart.norm_ratio,
                "sv_alignment": np.nan,
                "matched": False,
            }
        )
    geometry = pd.DataFrame(table)
    return {"geometry": geometry, "geometry_layers": layer_means(geometry, {}, seed)}
