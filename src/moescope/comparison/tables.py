"""The tables of a comparison: distances between experts."""

from __future__ import annotations

from moescope.tables import Column, Table, define_tables

MATRIX = Column(
    "text", "gate, up or down: the expert's projection. router: the expert's router row, as stored."
)

COLUMNS: dict[str, Column] = {
    "series": Column(
        "text",
        "What is compared: the same expert in two checkpoints (named after both, such as base_to_tuned, or "
        "by --series), or the dominant and another member of a cluster (the method's name). Suffix "
        "_permuted: after matching neurons; _unsigned: without signs; _held_out: matched by gate and up, so "
        "that down is a check.",
    ),
    "geometry.matrix": MATRIX,
    "geometry_layers.matrix": MATRIX,
    "geometry.expert_a": Column(
        "int", "The expert in the first checkpoint, or the cluster's dominant member."
    ),
    "geometry.expert_b": Column("int", "The expert it is compared with."),
    "relative_l2": Column(
        "float",
        "Distance of two matrices, each scaled to norm 1.",
        "‖A/‖A‖ − B/‖B‖‖_F",
        worst="2: opposite",
        chance="√2, or null_l2_matched after matching",
        best="0",
        misleads="Equal functions with permuted neurons are √2 apart. Ignores scale: see norm_ratio.",
        title="relative L2",
    ),
    "geometry.cosine": Column(
        "float",
        "Cosine of the two matrices as vectors; for a router row, how far it turned.",
        "⟨A, B⟩/(‖A‖ ‖B‖) = 1 − relative_l2²/2",
        worst="−1",
        chance="0",
        best="1",
        misleads="A vector added to all router rows changes every cosine but no softmax.",
    ),
    "norm_ratio": Column(
        "float",
        "Norm of the second matrix relative to the first.",
        "‖B‖/‖A‖",
        chance="1 for matrices of equal norm",
        best="1",
        title="norm ratio",
    ),
    "sv_alignment": Column(
        "float",
        "R: agreement of the singular directions, all weighted equally whatever their singular values. "
        "Null for router rows.",
        "⟨Q_A, Q_B⟩_F/√(rank_A rank_B), Q = U V′",
        worst="−1",
        chance="0, or null_sv_matched after matching",
        best="1",
        misleads="Noise in the smallest directions counts as much as in the largest: 10 % of noise leaves "
        "R = 0.994 for a 768 × 2048 matrix, 0.98 for a square one.",
        title="SV alignment R",
    ),
    "matched": Column(
        "bool", "Whether the second expert's neurons were first permuted (and flipped) to fit the first's."
    ),
    "relative_l2_mean": Column(
        "float",
        "Mean relative L2 over the layer's pairs.",
        chance="null_l2, or null_l2_matched after matching",
        best="0",
        title="relative L2",
    ),
    "relative_l2_sd": Column(
        "float", "Sample standard deviation over the pairs; null for one pair.", title="L2, sd"
    ),
    "relative_l2_low": Column(
        "float",
        "Lower end of the mean's 95 % interval.",
        "2.5 % quantile of 2,000 bootstrap means over first experts, each with all its pairs",
        misleads="Null for fewer than two first experts; too narrow for fewer than ten.",
        title="L2, low",
    ),
    "relative_l2_high": Column("float", "Upper end of that interval.", title="L2, high"),
    "sv_alignment_mean": Column(
        "float",
        "Mean R over the layer's pairs.",
        chance="0, or null_sv_matched after matching",
        best="1",
        title="SV alignment R",
    ),
    "sv_alignment_sd": Column(
        "float", "Sample standard deviation of R over the pairs; null for one pair.", title="R, sd"
    ),
    "sv_alignment_low": Column(
        "float", "Lower end of the 95 % interval of the mean R, as relative_l2_low.", title="R, low"
    ),
    "sv_alignment_high": Column("float", "Upper end of that interval.", title="R, high"),
    "null_l2": Column(
        "float", "Relative L2 of unrelated experts in stored order.", "√2", title="L2, unrelated"
    ),
    "null_l2_matched": Column(
        "float",
        "Relative L2 that the same matching reaches on the layer's first pair after random rotations of "
        "d_model, which keep the norms of neurons and the spectra; null for router rows.",
        "√(2 − 2c), c sampled; beyond 1,024 neurons c² is extrapolated in log F",
        title="L2, random matched",
    ),
    "null_sv_matched": Column(
        "float",
        "R that the same matching reaches on them; null where R is not computed.",
        "sampled; beyond 1,024 neurons R² is extrapolated in log F",
        title="R, random matched",
    ),
}

PAIRS = Table(
    "geometry",
    "Distance of two experts, one row per matrix: the same expert in two checkpoints, or two members of a "
    "cluster.",
    ("series", "layer", "matrix", "expert_a", "expert_b"),
    ("relative_l2", "cosine", "norm_ratio", "sv_alignment", "matched"),
)
LAYERS = Table(
    "geometry_layers",
    "Mean distance per layer and matrix with its interval, and the distances of unrelated and of matched "
    "rotated experts.",
    ("series", "layer", "matrix"),
    (
        *(f"relative_l2_{part}" for part in ("mean", "sd", "low", "high")),
        *(f"sv_alignment_{part}" for part in ("mean", "sd", "low", "high")),
        *("null_l2", "null_l2_matched", "null_sv_matched"),
    ),
)
TABLES = define_tables(COLUMNS, PAIRS, LAYERS)

AGREEMENT_COLUMNS: dict[str, Column] = {
    "agreement.phase": Column("text", "The phase compared: decode where both traces have it, else prefill."),
    "agreement.tokens": Column(
        "int", "Tokens compared: the same document and position, up to the first token id that differs."
    ),
    "equal_sets": Column(
        "float",
        "Share of tokens for which both traces chose the same experts, in any order.",
        worst="0",
        chance="equal_sets_chance",
        best="1",
        title="equal sets",
    ),
    "equal_sets_chance": Column(
        "float", "The same share when tokens of the layer are paired at random.", title="equal sets by chance"
    ),
    "overlap": Column(
        "float",
        "Mean share of a token's experts that both traces chose.",
        "mean over tokens of |S ∩ S′|/k",
        worst="0",
        chance="overlap_chance",
        best="1",
    ),
    "agreement.low": Column(
        "float", "Lower end of the 95 % interval of overlap over documents; null under 20 documents."
    ),
    "agreement.high": Column("float", "Upper end of that interval."),
    "overlap_chance": Column(
        "float", "Overlap when tokens of the layer are paired at random.", title="overlap by chance"
    ),
    "top1": Column(
        "float", "Share of tokens with the same first choice.", worst="0", best="1", title="top-1"
    ),
    "reordered": Column(
        "float", "Share of tokens with the same experts in another order of gates.", worst="1", best="0"
    ),
    "first_divergence": Column(
        "float",
        "Share of tokens whose experts differ in this layer and in none before it.",
        worst="1",
        best="0",
        title="first divergence",
        misleads="After it a token's input differs, so later layers are not independent.",
    ),
    "lost_gate": Column(
        "float",
        "Mean share of the token's gate weight that experts had in A which B did not choose; null without "
        "gates or without differences.",
        chance="mean_gate",
        title="gate of lost experts",
        misleads="Far below mean_gate: close decisions flip.",
    ),
    "mean_gate": Column("float", "Mean share of a chosen expert.", "1/k", title="mean gate"),
    "small_margin": Column(
        "float",
        "Selection margin (last chosen score minus the next) that a tenth of the layer's tokens stay at or "
        "below in A; null without margins or without differences.",
        title="small margin",
    ),
    "flips_at_small_margin": Column(
        "float",
        "Share of the tokens with other experts whose margin in A is that small.",
        worst="0",
        chance="flips_at_small_margin_chance",
        best="1",
        title="flips at a small margin",
        misleads="1: only close decisions changed, as rounding does. At chance: margins do not matter.",
    ),
    "flips_at_small_margin_chance": Column(
        "float",
        "Share of all tokens whose margin is that small.",
        "about 0.1",
        title="small margins",
    ),
}
AGREEMENT = define_tables(
    AGREEMENT_COLUMNS,
    Table(
        "agreement",
        "Agreement of two traces of the same text, token by token (both with --save-tokens).",
        ("layer",),
        (
            *("phase", "tokens", "equal_sets", "equal_sets_chance", "overlap", "low", "high"),
            *("overlap_chance", "top1", "reordered", "first_divergence", "lost_gate", "mean_gate"),
            *("small_margin", "flips_at_small_margin", "flips_at_small_margin_chance"),
        ),
    ),
)
