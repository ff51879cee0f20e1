"""Tables in, figures out.

Each list below is one part of the report; a figure that cannot be drawn fails the report.
"""

from moescope.comparison.figures import DRIFT, EXPERT_DISTANCE
from moescope.plotting.style import Figure, FigureSpec
from moescope.reporting.joint_figures import TOGETHER
from moescope.routing.figures_domains import DOMAINS
from moescope.routing.figures_load import LOAD
from moescope.routing.figures_maps import MAPS
from moescope.routing.figures_metrics import DECISIONS, VOCABULARY
from moescope.routing.figures_separation import SEPARATION
from moescope.routing.figures_steps import OVER_STEPS
from moescope.weights import figures_alignment as alignment
from moescope.weights import figures_identification as identification
from moescope.weights import figures_layer as one_layer
from moescope.weights import figures_redundancy as redundancy
from moescope.weights.figures_identification import ACROSS_STEPS, ACROSS_VIEWS
from moescope.weights.figures_layer import COMPLETE_VIEW

LAYERS = ("alignment_layers",)

ACROSS_LAYERS = [
    FigureSpec("accuracy_by_k", ("alignment_layers", "alignment_tests"), identification.accuracy_by_k),
    FigureSpec("margin_by_k", LAYERS, identification.margin_by_k),
    FigureSpec("align_by_k", LAYERS, alignment.align_by_k),
    FigureSpec("z_by_k", LAYERS, alignment.z_by_k),
    FigureSpec("effect_by_k", LAYERS, alignment.effect_by_k),
    FigureSpec("delta_by_k", LAYERS, alignment.delta_by_k),
    FigureSpec("null_density", ("nulls",), alignment.null_density, wide=True),
    FigureSpec("cos_squared_by_layer", ("alignment",), alignment.cos_squared_by_layer),
    FigureSpec("z_decomposed", LAYERS, alignment.z_decomposed),
    FigureSpec("shuffle_mean_by_k", LAYERS, alignment.shuffle_mean_by_k),
    FigureSpec("shuffle_std_by_k", LAYERS, alignment.shuffle_std_by_k),
    FigureSpec("shuffle_log_std_by_k", LAYERS, alignment.shuffle_log_std_by_k),
    FigureSpec("align_against_delta", ("alignment", "alignment_layers"), alignment.align_against_delta),
    FigureSpec("align_by_expert", ("alignment", "alignment_layers"), alignment.align_by_expert),
    FigureSpec("delta_by_expert", ("alignment", "alignment_layers"), alignment.delta_by_expert),
    FigureSpec("cosine_heatmap", ("similarity", "orthogonality"), redundancy.cosine_heatmap),
    FigureSpec("orthogonality_by_layer", ("orthogonality",), redundancy.orthogonality_by_layer),
    FigureSpec("overlap_by_k", ("orthogonality", "similarity"), redundancy.overlap_by_k),
    FigureSpec("ambiguity_by_layer", ("ambiguity",), identification.ambiguity_by_layer),
    FigureSpec("absolute_ambiguity_by_layer", ("ambiguity",), identification.absolute_ambiguity_by_layer),
    FigureSpec(
        "accuracy_and_margin_by_layer",
        ("ambiguity", "alignment_layers"),
        identification.accuracy_and_margin_by_layer,
    ),
    FigureSpec("spectra_by_layer", ("spectra",), redundancy.spectra_by_layer),
    FigureSpec("ranks_by_layer", ("spectra",), redundancy.ranks_by_layer),
]
ONE_LAYER = [
    FigureSpec("pair_matrix", ("pairs", "alignment_tests", "alignment"), one_layer.pair_matrix),
    FigureSpec("margin_histogram", ("alignment", "alignment_tests"), one_layer.margin_histogram),
    FigureSpec("expert_cos_squared", ("alignment",), one_layer.expert_cos_squared),
    FigureSpec("overlap_over_k", ("orthogonality", "similarity"), one_layer.overlap_over_k),
    FigureSpec("expert_spectra", ("spectra",), one_layer.expert_spectra),
]
ROUTING = [*LOAD, *DECISIONS, *SEPARATION, *DOMAINS, *VOCABULARY]  # and maps
FIGURES: list[FigureSpec] = [
    *ACROSS_LAYERS,
    *ONE_LAYER,
    *COMPLETE_VIEW,
    *ACROSS_VIEWS,
    *ACROSS_STEPS,
    *ROUTING,
    *MAPS,
    *OVER_STEPS,
    *TOGETHER,
    *EXPERT_DISTANCE,
    *DRIFT,
]

__all__ = [
    "ACROSS_LAYERS",
    "ACROSS_STEPS",
    "ACROSS_VIEWS",
    "COMPLETE_VIEW",
    "DECISIONS",
    "DOMAINS",
    "DRIFT",
    "EXPERT_DISTANCE",
    "FIGURES",
    "LOAD",
    "MAPS",
    "ONE_LAYER",
    "OVER_STEPS",
    "ROUTING",
    "SEPARATION",
    "TOGETHER",
    "VOCABULARY",
    "Figure",
    "FigureSpec",
]
