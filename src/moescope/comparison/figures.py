"""Figures of compare."""

from __future__ import annotations

from moescope.comparison.tables import AGREEMENT, TABLES
from moescope.plotting.marks import QUANTITY, Bars, Grid, Lines, define_figures

# fmt: off
DISTANCES = define_figures(TABLES,
    Lines("expert_distance", "geometry_layers", y=("sv_alignment_mean", "relative_l2_mean"), by="series", pages="matrix", opens="gate", wide=True, title="Expert distances per layer",
        was={f"expert_distance_{name}": name for name in ("gate", "up", "down")},
        details="R compares singular directions: 1 is equal, 0 expected of unrelated experts. Relative L2 compares all entries: 0 is equal up to scale, √2 unrelated. Dotted: what matching reaches on randomly rotated experts, for matched series only. Bands: 95 % intervals of the mean."),
)
DRIFT = define_figures(TABLES,
    Grid("drift_heatmap", "geometry", z="relative_l2", x="expert_a", where="not matched", pages="matrix", opens="gate", wide=True, title="Relative L2 per expert and layer", was={"router_cosines": "router"},
        details="Each expert's matrix or router row against itself in the other checkpoint, scale aside: √(2 − 2 cosine), √2 for unrelated ones."),
    Lines("norm_ratios", "geometry_layers", y="norm_ratio_median", by="matrix", where="not matched", title="Norm after over before, per layer",
        details="Median over a layer's experts; bands from the smallest to the largest."),
)
AGREED = define_figures(AGREEMENT,
    Lines("agreement_layers", "agreement", y=("overlap", "equal_sets"), where="tokens > 0", title="Agreement of two traces per layer"),
    Bars("agreement_divergence", "agreement", y=("first_divergence", "same_so_far"), where="tokens > 0", pages=QUANTITY, title="First layer in which tokens diverge"),
)
# fmt: on
FIGURES = [*DISTANCES, *DRIFT, *AGREED]
