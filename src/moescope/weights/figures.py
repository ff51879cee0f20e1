"""Figures of a scan: across layers, of one layer, over steps. Tables of several views have a column `view`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from moescope.plotting.marks import QUANTITY, Bars, Distribution, Grid, Lines, Mark, Matrix, define_figures
from moescope.plotting.style import capital
from moescope.weights.tables import TABLES

BY_K = ("delta_vs_shuffle", "align", "z_vs_shuffle", "effect_over_random", "shuffle_mean", "shuffle_std")
BY_EXPERT = ("z_vs_shuffle", "align", "delta_vs_shuffle")
JUDGED = ("argmax_accuracy", "alignment_margin", "absolute_score", "z_score", "ambiguity_score")
TERMS = ("accuracy_term", "margin_term", "z_term")
# fmt: off
ALIGNMENT = define_figures(TABLES,
    Lines("identification_by_k", "alignment_layers", y=("argmax_accuracy", "alignment_margin"), x="k", by="layer", where="not degenerate", pages=QUANTITY, title="Experts identified by their router row",
        was={"accuracy_by_k": "argmax_accuracy", "margin_by_k": "alignment_margin"}),
    Lines("alignment_by_k", "alignment_layers", y=BY_K, x="k", by="layer", where="not degenerate", pages=QUANTITY, title="Router-expert alignment by k",
        details="z is the slope of alignment above the average pair against the spread of alignment; it is no confidence. Grey band: 95 % by chance.",
        was={"delta_by_k": "delta_vs_shuffle", "align_by_k": "align", "z_by_k": "z_vs_shuffle", "effect_by_k": "effect_over_random", "shuffle_mean_by_k": "shuffle_mean",
             "shuffle_std_by_k": "shuffle_std", "shuffle_log_std_by_k": "shuffle_std", "z_decomposed": "z_vs_shuffle", **{f"panel_{name}": name for name in BY_K}}),
    Lines("identification_by_layer", "ambiguity", y=JUDGED, by="view", pages=QUANTITY, title="Identification of experts at k*",
        was={"accuracy_and_margin_by_layer": "argmax_accuracy", "absolute_ambiguity_by_layer": "absolute_score", "compare_accuracy": "argmax_accuracy",
             "compare_margin": "alignment_margin", "compare_ambiguity": "absolute_score", "compare_z": "z_score"}),
    Grid("alignment_by_expert", "alignment", z=BY_EXPERT, where="reference", pages=QUANTITY, title="Alignment per layer and expert",
        details="At one k: 128 where the k grid has it, else the grid's median.",
        was={"align_by_expert": "align", "delta_by_expert": "delta_vs_shuffle", "align_against_delta": "delta_vs_shuffle", "panel_expert_align": "align", "panel_expert_z_vs_shuffle": "z_vs_shuffle"}),
    Distribution("null_density", "nulls", x="observed", by="layer", bins=("left", "right", "density"), pages="k", wide=True, title="Stored pairing against all random pairings",
        details="Grey: mean alignment under all pairings of the layer's router rows and experts (all n! up to 8 experts, else 20,000 sampled). Diamond: the stored pairing."),
)
SIMILARITY = define_figures(TABLES,
    Matrix("cosine_heatmap", "similarity", z="cosine", where="k == 1", pages="layer", order="place_a", title="Cosines of the experts' top singular vectors"),
    Lines("orthogonality_by_layer", "orthogonality", y=("mean_abs", "max_abs"), by="view", where="k == 1", title="Absolute cosines over all expert pairs", was={"compare_orthogonality": ""}),
)
SUBSPACES = define_figures(TABLES,
    Lines("ranks_by_layer", "spectra_layers", y=("effective_rank_median", "stable_rank_median"), by="view", title="Effective and stable rank: median and extremes", was={"compare_effective_rank": ""}),
    Lines("overlap_by_k", "orthogonality", y="overlap", x="k", by="layer", title="Overlap of leading subspaces", details="Band: smallest and largest overlap over pairs.", was={"overlap_over_k": ""}),
)
MORE = define_figures(TABLES,
    Lines("cos_squared_by_layer", "alignment_layers", y="cos_squared", by="view", where="k == 1", title="cos² of router row and top vector"),
    Bars("ambiguity_by_layer", "ambiguity", y=TERMS, stacked=True, title="Normalised ambiguity at k* in three terms"),
)
OF_LAYER = define_figures(TABLES,
    Grid("pair_matrix", "pairs", z="align", y="router_index", where="random_spread > 0", pages="k", one="layer", title="Alignment of every router row and expert", details="The diagonal is the stored pairing."),
    Distribution("margin_histogram", "alignment", x="margin", where="best", one="layer", title="Margins per router row at the best k"),
    Bars("expert_alignment", "alignment", y="align", x="expert", where="random_spread > 0", pages="k", one="layer", title="Alignment per expert of one layer", details="At k = 1 it is cos² of the router row and the expert's top singular vector.",
        was={"expert_cos_squared": "1", "panel_expert_cos_squared": "1"}),
    Matrix("overlap_heatmap", "similarity", z="overlap", pages="k", one="layer", order="place_a", title="Overlap of the experts' leading subspaces"),
    Lines("expert_spectra", "spectrum", y="singular_value", x="place", by="expert", one="layer", title="Singular values of every expert", was={"spectra_by_layer": ""}),
)
BY_EXPERT_AND_K = define_figures(TABLES,
    Grid("alignment_by_expert_and_k", "alignment", z=BY_EXPERT, x="k", y="expert", where="random_spread > 0", pages=QUANTITY, one="layer", title="Alignment of each expert by k",
        was={"panel_heat_z_vs_shuffle": "z_vs_shuffle", "panel_heat_align": "align", "panel_heat_delta_vs_shuffle": "delta_vs_shuffle"}),
)
STEPS = define_figures(TABLES,
    Lines("identification_by_step", "ambiguity", y=JUDGED, x="step", by="layer", pages=QUANTITY, title="Identification of experts by step",
        was={"steps_accuracy": "argmax_accuracy", "steps_margin": "alignment_margin", "steps_ambiguity": "absolute_score"}),
    Lines("orthogonality_by_step", "orthogonality", y="mean_abs", x="step", by="layer", where="k == 1", title="Mean |cos| between experts by step", was={"steps_orthogonality": ""}),
)
FIGURES = [*ALIGNMENT, *SIMILARITY, *SUBSPACES, *MORE, *OF_LAYER, *BY_EXPERT_AND_K, *STEPS]
NAMED = {spec.name: spec for spec in FIGURES}
ACROSS_VIEWS = [NAMED[name] for name in ("identification_by_layer", "orthogonality_by_layer", "ranks_by_layer", "cos_squared_by_layer")]


def panel(name: str, title: str, **changes: Any) -> Mark:
    """One page of a figure, of one layer, drawn small."""
    return cast(Mark, replace(cast(Any, NAMED[name]), title=capital(title), pages="", one="layer", small=True, **changes))


COMPLETE = [  # the published view of one layer: twelve panels
    *(panel("alignment_by_k", f"{TABLES['alignment_layers'].label(name)} by k", y=name) for name in BY_K),
    *(panel("alignment_by_expert_and_k", f"{TABLES['alignment'].label(name)} per expert by k", z=name) for name in BY_EXPERT),
    panel("expert_alignment", "cos² per expert", y="cos_squared", where="k == 1"),
    *(panel("expert_alignment", f"{TABLES['alignment'].label(name)} per expert at one k", y=name, where="reference") for name in ("align", "z_vs_shuffle")),
]
