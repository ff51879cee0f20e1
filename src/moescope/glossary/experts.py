"""The columns of comparisons and of compression."""

from __future__ import annotations

from moescope.glossary.column import Column

EXPERTS: dict[str, Column] = {
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
    # --- compression
    "method": Column("text", "Compression method; random (seed N) for a random control."),
    "cluster": Column(
        "int",
        "Number of the expert, or of the one it is merged into, in the compressed model; null if dropped.",
    ),
    "dominant": Column("bool", "Whether the other members' neurons are matched to this member's."),
    "weight": Column(
        "float",
        "Its share in the merged expert; the shares of a cluster sum to 1. Null if dropped.",
        chance="1 for an expert kept alone",
    ),
    "kept": Column("bool", "Whether any of this expert is in the compressed model: false if dropped."),
    "merge": Column("int", "Number of the merge in its layer, from 0, the nearest first."),
    "merges.left": Column(
        "int", "Left node: an expert's number, or the number of experts plus that of an earlier merge."
    ),
    "merges.right": Column("int", "Right node, numbered likewise."),
    "height": Column(
        "float",
        "Distance of the two nodes in the method's measure: mean outputs (hc_smoe), 1 − cosine of router logits "
        "(m_smoe), weights after matching (weights).",
        chance="chance_height",
        best="0",
    ),
    "chance_height": Column(
        "float",
        "Height of unrelated experts: outputs of the same sizes in orthogonal directions, 1 + 1/(n − 1), or "
        "matched random experts.",
        title="height by chance",
    ),
    "merges.size": Column("int", "Experts in the resulting node.", chance="2 where two experts join"),
    "done": Column("bool", "Whether the plan carries the merge out: false above the cut."),
    "saliency.tokens": Column(
        "int",
        "Calibration tokens routed to the expert: the frequency score.",
        "|X|",
        worst="0",
        chance="tokens · k/n",
    ),
    "saliency.gate_weight": Column(
        "float",
        "Sum of its gate weights.",
        "Σ_X g",
        worst="0",
        chance="the mean over the layer's experts",
        title="gate weight",
    ),
    "ean": Column(
        "float",
        "Sum over its tokens of the norm of its output, without the gate.",
        "Σ_X ‖f‖",
        worst="0",
        chance="the mean over the layer's experts",
        title="output norms",
    ),
    "reap": Column(
        "float",
        "Mean over its tokens of gate weight times output norm; 0 without tokens.",
        "(1/|X|) Σ_X g ‖f‖",
        worst="0",
        chance="the mean over the layer's experts",
        misleads="A mean over few tokens is imprecise: read the interval of its rank.",
        title="REAP",
    ),
    "rank_low": Column(
        "float",
        "Lower end of the 95 % interval of the expert's rank (1: the most salient) by the run's pruning score "
        "(reap if it does not prune by one).",
        "2.5 % quantile over 1,000 resamples of document groups; tied experts share their mean rank",
        chance="1 for an uninformative score",
        misleads="Null under 20 documents.",
        title="rank, low",
    ),
    "rank_high": Column(
        "float",
        "Upper end of that interval. Experts whose interval includes the cut may be pruned or kept by chance.",
        chance="n for an uninformative score",
        title="rank, high",
    ),
    "predicted_error": Column(
        "float",
        "Error of the layer's routed output on calibration states, predicted before writing; each layer alone.",
        "‖y′ − y‖/‖y‖",
        chance="that of the random control",
        best="0",
        misleads="Excludes shared experts and errors that accumulate over layers: read perplexity.",
        title="predicted error",
    ),
    "measured_error": Column(
        "float",
        "The same error of the written model's own blocks, on held-out states.",
        "‖y′ − y‖/‖y‖",
        chance="that of the random control",
        best="0",
        title="measured error",
    ),
    "router_kl": Column(
        "float",
        "KL divergence in nats from the groups' probabilities to the new router's, plus −log of the kept share.",
        "E[KL(p_group ‖ q)] − E[log Σ_kept p]",
        chance="that of the random control",
        best="0",
        title="router KL",
    ),
    "perplexity": Column(
        "float",
        "Perplexity of the compressed model on held-out text.",
        "exp(−mean log p(next token))",
        worst="above the vocabulary size: worse than guessing",
        chance="that of the random control",
        best="perplexity_original",
        title="perplexity",
    ),
    "perplexity_original": Column(
        "float", "Perplexity of the original on the same text.", title="original's"
    ),
    "js_divergence": Column(
        "float",
        "Jensen-Shannon divergence in nats of next-token distributions from the original's, mean over at most "
        "8,192 held-out positions.",
        "½ KL(p ‖ m) + ½ KL(q ‖ m), m = (p + q)/2",
        worst="ln 2 = 0.693",
        chance="that of the random control",
        best="0",
        title="JS divergence",
    ),
    "bytes": Column(
        "int",
        "Bytes of all tensors of the compressed checkpoint.",
        best="bytes_original minus the dropped experts",
    ),
    "bytes_original": Column("int", "Bytes of all tensors of the original.", title="original's bytes"),
}
