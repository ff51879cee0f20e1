"""All figures of a scan, in the order of the report."""

from moescope.verb import FigureSpec
from moescope.weights import figures_alignment as alignment
from moescope.weights import figures_identification as identification
from moescope.weights import figures_layer as layer
from moescope.weights import figures_redundancy as redundancy
from moescope.weights.figures_identification import ACROSS_STEPS, ACROSS_VIEWS
from moescope.weights.figures_layer import COMPLETE_VIEW

LAYERS, TESTS, EXPERTS = ("alignment_layers",), ("alignment_tests",), ("alignment",)
PAIRS = ("orthogonality", "similarity")

ACROSS_LAYERS = [
    FigureSpec("accuracy_by_k", LAYERS + TESTS, identification.accuracy_by_k),
    FigureSpec("margin_by_k", LAYERS, identification.margin_by_k),
    FigureSpec("align_by_k", LAYERS, alignment.align_by_k),
    FigureSpec("z_by_k", LAYERS, alignment.z_by_k),
    FigureSpec("effect_by_k", LAYERS, alignment.effect_by_k),
    FigureSpec("delta_by_k", LAYERS, alignment.delta_by_k),
    FigureSpec("null_density", ("nulls",), alignment.null_density, wide=True),
    FigureSpec("cos_squared_by_layer", EXPERTS, alignment.cos_squared_by_layer),
    FigureSpec("z_decomposed", LAYERS, alignment.z_decomposed),
    FigureSpec("shuffle_mean_by_k", LAYERS, alignment.shuffle_mean_by_k),
    FigureSpec("shuffle_std_by_k", LAYERS, alignment.shuffle_std_by_k),
    FigureSpec("shuffle_log_std_by_k", LAYERS, alignment.shuffle_log_std_by_k),
    FigureSpec("align_against_delta", EXPERTS + LAYERS, alignment.align_against_delta),
    FigureSpec("align_by_expert", EXPERTS + LAYERS, alignment.align_by_expert),
    FigureSpec("delta_by_expert", EXPERTS + LAYERS, alignment.delta_by_expert),
    FigureSpec("cosine_heatmap", PAIRS, redundancy.cosine_heatmap),
    FigureSpec("orthogonality_by_layer", ("orthogonality",), redundancy.orthogonality_by_layer),
    FigureSpec("overlap_by_k", PAIRS, redundancy.overlap_by_k),
    FigureSpec(
        "absolute_ambiguity_by_layer", ("ambiguity", *TESTS), identification.absolute_ambiguity_by_layer
    ),
    FigureSpec("ambiguity_by_layer", ("ambiguity",), identification.ambiguity_by_layer),
    FigureSpec(
        "accuracy_and_margin_by_layer",
        ("ambiguity", "alignment_layers"),
        identification.accuracy_and_margin_by_layer,
    ),
    FigureSpec("spectra_by_layer", ("spectra",), redundancy.spectra_by_layer),
    FigureSpec("ranks_by_layer", ("spectra",), redundancy.ranks_by_layer),
]
ONE_LAYER = [
    FigureSpec("pair_matrix", ("pairs", *TESTS, *EXPERTS), layer.pair_matrix),
    FigureSpec("margin_histogram", EXPERTS + TESTS, layer.margin_histogram),
    FigureSpec("expert_cos_squared", EXPERTS, layer.expert_cos_squared),
    FigureSpec("overlap_over_k", PAIRS, layer.overlap_over_k),
    FigureSpec("expert_spectra", ("spectra",), layer.expert_spectra),
]
FIGURES = [*ACROSS_LAYERS, *ONE_LAYER, *COMPLETE_VIEW, *ACROSS_VIEWS, *ACROSS_STEPS]
