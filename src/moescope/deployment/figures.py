"""Figures of deploy."""

from __future__ import annotations

from moescope.deployment.tables import TABLES
from moescope.plotting.marks import QUANTITY, Bars, Grid, Lines, define_figures

LOADING = ("hit_rate", "loads_per_token", "bytes_per_token", "ms_per_token")
# fmt: off
RESIDENCY = define_figures(TABLES,
    Lines("cache_curve", "residency", y=LOADING, x="slots", by="policy", pages=QUANTITY, title="Expert caches by size", was={"cache_loading": "loads_per_token"},
        details="All layers together, every miss loaded once. Of a single document all are scored on the second half, with caches that the first half filled."),
    Lines("cache_layers", "residency", y="hit_rate", by="policy", where="policy != 'lru_split'", pages="slots", wide=True, title="Cache hit rate per layer"),
)
PREFETCH = define_figures(TABLES,
    Lines("prefetch_curve", "prefetch", y="recall", x="budget", by="predictor", title="Recall of predicted experts"),
    Lines("prefetch_layers", "prefetch", y="recall", by="predictor", pages="budget", wide=True, title="Recall of predicted experts per layer"),
)
PLACEMENT = define_figures(TABLES,
    Lines("placement_balance", "placement", y=("balancedness", "batch_balancedness"), by="method", pages=QUANTITY, title="Balance of devices per layer"),
    Bars("placement_traffic", "placement", y=("cross_device", "cross_node"), x="method", pages=QUANTITY, title="Remote devices per token"),
)
COVERAGE = define_figures(TABLES,
    Grid("coverage_map", "coverage", z="tokens", pages="domain", wide=True, title="Tokens per expert"),
    Lines("coverage_experts", "coverage", y="tokens", x="rank_share", by="domain", title="Tokens per expert, sorted"),
    Lines("coverage_documents", "coverage_curve", y="below", x="documents", by="domain", title="Experts below the minimum by documents"),
)
FIGURES = [*RESIDENCY, *PREFETCH, *PLACEMENT, *COVERAGE]
