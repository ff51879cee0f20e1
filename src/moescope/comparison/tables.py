"""The tables of a comparison: how far apart experts are."""

from __future__ import annotations

from moescope.tables import Column, Table, define_tables

COLUMNS: dict[str, Column] = {
    # --- distances between experts
    "series": Column(
        "text",
        (
            "What is compared: base_to_ift for the same expert in two checkpoints, or the name a "
            "series was given; a method's name for its clusters, the dominant member against each "
            "other one. "
            "Names that end in _permuted: after matching neurons (_unsigned: order alone); in "
            "_held_out: matched by gate and up, so that down is a check."
        ),
    ),
    "geometry.matrix": Column(
        "text", "gate, up or down: the expert's projection. router: the expert's router row, as stored."
    ),
    "geometry_layers.matrix": Column(
        "text", "gate, up or down: the expert's projection. router: the expert's router row, as stored."
    ),
    "geometry.expert_a": Column(
        "int", "The expert in the first checkpoint, or the dominant member of the cluster."
    ),
    "geometry.expert_b": Column("int", "The expert it is compared with."),
    "relative_l2": Column(
        "float",
        "Distance of two matrices, each scaled to norm 1.",
        "‖A/‖A‖ − B/‖B‖‖_F",
        worst="2: opposite",
        chance="√2, or null_l2_matched after matching",
        best="0",
        misleads=(
            "Equal functions with neurons in another order are √2 apart. Change of scale is not "
            "seen: read norm_ratio."
        ),
        title="relative L2",
    ),
    "geometry.cosine": Column(
        "float",
        "Cosine of the two matrices as long vectors; of a router row, by how far it turned.",
        "⟨A, B⟩/(‖A‖ ‖B‖) = 1 − relative_l2²/2",
        worst="−1",
        chance="0",
        best="1",
        misleads="A vector added to all router rows changes every cosine and, under a softmax, nothing else.",
    ),
    "norm_ratio": Column(
        "float",
        "How much larger the second matrix is.",
        "‖B‖/‖A‖",
        chance="1 for matrices of equal norm",
        best="1",
        title="norm ratio",
    ),
    "sv_alignment": Column(
        "float",
        (
            "R: how much of the singular directions two matrices share, all directions counted alike "
            "whatever their singular values. Null for router rows."
        ),
        "⟨Q_A, Q_B⟩_F/√(rank_A rank_B), Q = U V′",
        worst="−1",
        chance="0, or null_sv_matched after matching",
        best="1",
        misleads=(
            "Noise in the smallest directions counts as much as in the largest: 10 % of noise leaves "
            "0.994 of a 768 × 2048 matrix, 0.98 of a square one."
        ),
        title="SV alignment R",
    ),
    "matched": Column(
        "bool",
        (
            "Whether the second expert's neurons were first brought into the order (and signs) that "
            "fit the first one best."
        ),
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
        misleads="Null for fewer than two first experts; of fewer than ten it is rather too narrow.",
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
        "float", "Lower end of the 95 % interval of the mean R, made like relative_l2_low.", title="R, low"
    ),
    "sv_alignment_high": Column("float", "Upper end of that interval.", title="R, high"),
    "null_l2": Column("float", "Relative L2 of unrelated experts as they lie.", "√2", title="L2, unrelated"),
    "null_l2_matched": Column(
        "float",
        (
            "Relative L2 that matching neurons reaches on random Gaussian experts of the same shape; "
            "null for router rows."
        ),
        "√(2 − 2c), c drawn; beyond 2,048 neurons c² is extended in log F",
        title="L2, random matched",
    ),
    "null_sv_matched": Column(
        "float",
        "R that the same matching reaches on them.",
        "c (Σs)²/(r Σs²) by Marchenko and Pastur's law",
        title="R, random matched",
    ),
}

TABLES: dict[str, Table] = define_tables(
    COLUMNS,
    Table(
        "geometry",
        (
            "How far apart two experts are, matrix by matrix: the same expert in two "
            "checkpoints, or two members of a cluster."
        ),
        ("series", "layer", "matrix", "expert_a", "expert_b"),
        ("relative_l2", "cosine", "norm_ratio", "sv_alignment", "matched"),
    ),
    Table(
        "geometry_layers",
        (
            "The same, one row a layer: mean and spread over its pairs, with the distance of "
            "unrelated experts and that of matched random ones."
        ),
        ("series", "layer", "matrix"),
        (
            "relative_l2_mean",
            "relative_l2_sd",
            "relative_l2_low",
            "relative_l2_high",
            "sv_alignment_mean",
            "sv_alignment_sd",
            "sv_alignment_low",
            "sv_alignment_high",
            "null_l2",
            "null_l2_matched",
            "null_sv_matched",
        ),
    ),
)
