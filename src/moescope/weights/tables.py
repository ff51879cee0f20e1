"""The tables of a scan: keys, columns and what each column means."""

from __future__ import annotations

from moescope.tables import Column, Table, define_tables

VIEW = ("matrix", "router", "fold_norm")  # the choices that change an alignment
BEST_P = "1/n! (n ≤ 8), else 1/20,001"
CURVES = (
    "align",
    "random_expectation",
    "effect_over_random",
    "shuffle_mean",
    "shuffle_std",
    "delta_vs_shuffle",
)

COLUMNS: dict[str, Column] = {
    # --- keys
    "matrix": Column(
        "text",
        "Expert matrix: gate, up, gate_up (both stacked on the hidden axis, each scaled to unit Frobenius "
        "norm), or down (its left singular vectors, so that they live in d_model too).",
    ),
    "router": Column(
        "text",
        "raw: router rows as stored. centered: rows minus their mean. A softmax ignores a vector common to "
        "all rows, so the centered view does not depend on that choice of origin.",
        misleads="Centering couples the rows: their chance cosine is −1/(n−1), not 0. It has no meaning for "
        "sigmoid gates.",
    ),
    "fold_norm": Column(
        "bool",
        "Whether the weight of the norm before the block was multiplied into router and expert input (for "
        "down: router only). Only the folded view is invariant to moving scale between norm, router and "
        "experts.",
    ),
    "k": Column("int", "Number of leading singular vectors of the expert."),
    "router_index": Column("int", "The router row's number; row i selects expert i."),
    "bin": Column("int", "The bin's number, from 0."),
    # --- alignment
    "align": Column(
        "float",
        "Share of a router row's squared length in the expert's first k right singular directions.",
        "align(i, j; k) = Σₐ≤ₖ (vₐ(Wⱼ) · rᵢ)², ‖rᵢ‖ = 1",
        worst="0",
        chance="min(k, rank)/d",
        best="1",
        misleads="It grows with k and reaches 1 at k = d for any weights. Compare it with its chance level.",
        title="alignment",
    ),
    "random_expectation": Column(
        "float",
        "Alignment of a direction drawn uniformly from the sphere.",
        "min(k, rank)/d",
        misleads="Routers and experts share directions (all use the same activations), so exceeding it says "
        "little about the pairing; the shuffle null does.",
        title="random expectation",
    ),
    "effect_over_random": Column(
        "float",
        "Alignment beyond that of a random direction.",
        "align − min(k, rank)/d",
        worst="−min(k, rank)/d",
        chance="0 for a random direction",
        best="1 − min(k, rank)/d",
        misleads="It is large for every expert, right or wrong, when all experts share their leading "
        "directions.",
        title="effect over random",
    ),
    "shuffle_mean": Column(
        "float",
        "Mean alignment of a router row with an expert picked at random from its layer.",
        "mean of all n² entries of M(k)",
        misleads="It includes the n right pairs, so it moves a little with them.",
        title="shuffle mean",
    ),
    "shuffle_std": Column(
        "float",
        "Spread of those alignments.",
        "population standard deviation of all n² entries of M(k)",
        misleads="Right pairs that stand out widen it themselves; this is why z has a ceiling.",
        title="shuffle std",
    ),
    "delta_vs_shuffle": Column(
        "float",
        "Alignment with the own expert minus that with an average expert of the layer.",
        "align − shuffle_mean",
        worst="−1",
        chance="0",
        best="1",
        title="delta vs shuffle",
    ),
    "z_vs_shuffle": Column(
        "float",
        "Delta in units of the shuffle null's spread.",
        "delta_vs_shuffle / shuffle_std; 0 where the std is 0",
        worst="−√(n−1) for a layer",
        chance="0",
        best="√(n−1) for a layer, √(n²−1) for one expert",
        misleads="It is not a confidence. A layer's mean z cannot exceed √(n−1): 2.65 for 8 experts, so “z > "
        "3” is unreachable there. For confidence see p_value.",
        title="z vs shuffle",
    ),
    "z_ceiling": Column(
        "float",
        "Largest possible mean z of a layer with n experts under the closed-form null.",
        "√(n−1)",
        title="z ceiling",
        misleads="The sampled null is noisy and may put z above it.",
    ),
    "cos_squared": Column(
        "float",
        "Squared cosine of a router row and its expert's top singular vector; at k = 1 only.",
        "(v₁(Wᵢ) · rᵢ)²",
        worst="0",
        chance="1/d",
        best="1",
        title="cos²",
    ),
    "margin": Column(
        "float",
        "Alignment of a router row with its own expert minus that with the best other one.",
        "M[i,i] − maxⱼ≠ᵢ M[i,j]",
        worst="−1",
        chance="below 0: the best of n−1 others tends to win",
        best="1",
    ),
    "identified": Column(
        "bool", "Whether the router row's only best match is its own expert.", "margin > 10⁻⁶", chance="1/n"
    ),
    "argmax_accuracy": Column(
        "float",
        "Share of router rows whose best match is their own expert; ties count 1/(number tied).",
        "mean over i of [argmaxⱼ M[i,j] = i]",
        worst="0",
        chance="1/n",
        best="1",
        misleads="The best of many ks exceeds 1/n by chance; p_accuracy is corrected for multiple k.",
        title="argmax accuracy",
    ),
    "assignment_accuracy": Column(
        "float",
        "Share of router rows that get their own expert in the best one-to-one assignment.",
        "diagonal share of argmax over permutations π of Σᵢ M[i, π(i)]",
        worst="0",
        chance="1/n",
        best="1",
        misleads="An expert that attracts every router row does not lower it; compare with argmax accuracy. "
        "Where some experts are exact copies, the solver picks one.",
        title="assignment accuracy",
    ),
    "alignment_margin": Column(
        "float",
        "Mean margin over a layer's router rows.",
        "mean over i of M[i,i] − maxⱼ≠ᵢ M[i,j]",
        worst="−1",
        chance="below 0",
        best="1",
        misleads="It can be positive while some router rows are misidentified: see the distribution of "
        "margins and positive_margin_share.",
        title="alignment margin",
    ),
    "positive_margin_share": Column(
        "float",
        "Share of router rows with a positive margin.",
        worst="0",
        chance="1/n",
        best="1",
        title="positive margins",
    ),
    "perm_z": Column(
        "float",
        "Mean diagonal of M(k) in units of its standard deviation under random pairings.",
        "(T − mean M)/sd, sd² = ΣD²/(n²(n−1)), D = M doubly centred",
        worst="−(n−1)",
        chance="0",
        best="n−1",
        misleads="Not normal for few experts: it is never turned into a p-value by the normal law.",
        title="permutation z",
    ),
    "p_adjusted": Column(
        "float",
        "p-value at one k, corrected for multiple k (max statistic).",
        "share of pairings whose max over k of Z reaches Z(k)",
        worst="1",
        chance="uniform or larger",
        best=BEST_P,
        title="adjusted p",
    ),
    "degenerate": Column(
        "bool",
        "Whether k has reached d, where every alignment is 1. Excluded from every choice of k.",
        "k ≥ d",
    ),
    "n_experts": Column("int", "Number of the layer's experts that took part (n).", title="experts"),
    "d_model": Column("int", "Width of the model (d): length of a router row."),
    # --- tests
    "best_k": Column(
        "int",
        "k with the highest argmax accuracy, ties to the smallest; degenerate ks excluded. p_value and "
        "p_accuracy are not p at this k: they are over all k.",
        title="best k",
    ),
    "best_accuracy": Column(
        "float",
        "Argmax accuracy at best_k.",
        worst="0",
        chance="chance_accuracy",
        best="1",
        title="best accuracy",
    ),
    "chance_accuracy": Column(
        "float",
        "Chance level of best_accuracy: its mean over random pairings, each at its own best k.",
        title="best accuracy at chance",
    ),
    "p_value": Column(
        "float",
        "Share of random pairings of the layer's router rows and experts that match as well as the stored "
        "one, each at the k where it matches best: over all k, not at best_k.",
        "share of pairings with maxₖ Z ≥ observed maxₖ Z; (b+1)/(m+1) when pairings are sampled",
        worst="1",
        chance="uniform or larger",
        best=BEST_P,
        misleads="It says that the pairing is real, not that it is strong: see delta or margin for size.",
        title="p",
    ),
    "q_value": Column(
        "float",
        "False-discovery rate at which this layer is called, over all layers of the same step, matrix and "
        "router.",
        "Benjamini–Hochberg over p_value",
        worst="1",
        chance="near 1; the smallest over many layers is uniform",
        best="near 0",
        title="q",
    ),
    "p_lower": Column(
        "float",
        "Share of random pairings that match as badly: small where router rows avoid their own experts.",
        "share of pairings with minₖ Z ≤ observed minₖ Z",
        worst="near 0: anti-aligned",
        chance="uniform or larger",
        best="1",
        title="lower p",
    ),
    "p_accuracy": Column(
        "float",
        "Share of random pairings that reach the same best argmax accuracy, each at its own best k.",
        "share of pairings with maxₖ accuracy ≥ observed",
        worst="1",
        chance="uniform or larger",
        best=BEST_P,
        title="accuracy p",
    ),
    "n_pairings": Column(
        "int",
        "Number of pairings in the null: all n! up to 8 experts, else 20,000 sampled ones.",
        title="pairings",
    ),
    "exact": Column("bool", "Whether the null holds all pairings."),
    "verdict": Column(
        "text",
        "non_random: the mean alignment of stored pairs beats random pairings, p_value ≤ 0.05. identifying: "
        "also, at best_k at least 90 % of experts are identified from the weights alone, with positive "
        "margin, and p_accuracy ≤ 0.05. permuted: neither, but at least 90 % of router rows and experts are "
        "each other's best match in another order than the stored one, p ≤ 0.01. chance: none of these.",
        misleads="Of random layers up to 5 % are called non_random (or identifying) and, where it can be "
        "reached, up to 1 % more permuted. Fewer than four experts have too few pairings for any call. "
        "permuted cannot be reached with four experts or fewer, with five only at one value of k, with six "
        "up to four, with seven up to 17: chance then fits some order too often.",
    ),
    # --- nulls
    "left": Column("float", "The bin's left edge."),
    "right": Column("float", "The bin's right edge."),
    "density": Column("float", "Share of pairings in the bin, divided by its width."),
    "observed": Column("float", "Mean diagonal of the stored pairing."),
    # --- pairs of experts
    "cosine": Column(
        "float",
        "Cosine of two experts' top singular vectors, each oriented so that the mean of W v is positive; at "
        "k = 1 only.",
        "v₁(Wₐ) · v₁(W_b)",
        worst="±1",
        chance="|cos| ≈ √(2/(πd))",
        best="0",
        misleads="A singular vector has no sign; the orientation is a convention. Compare |cos|.",
    ),
    "overlap": Column(
        "float",
        "Shared part of two experts' leading k-dimensional subspaces.",
        "‖Vₐ′V_b‖²_F / k",
        worst="1",
        chance="k/d",
        best="0",
    ),
    "largest_principal_cosine": Column(
        "float",
        "Cosine of the closest pair of directions in the two subspaces.",
        "σ_max(Vₐ′V_b)",
        worst="1",
        chance="grows with k/d",
        best="0",
        misleads="One shared direction is enough for 1, however different the rest.",
        title="largest principal cosine",
    ),
    "mean": Column(
        "float", "Mean over expert pairs, signed at k = 1.", misleads="Signs are a convention; see mean_abs."
    ),
    "mean_abs": Column(
        "float",
        "Mean absolute cosine over expert pairs (k = 1), or mean overlap (k > 1).",
        "mean over a < b of |cos|",
        worst="1",
        chance="√(2/(πd)) at k = 1, k/d beyond",
        best="0",
        title="mean |cos|",
        misleads="All experts use the same activations, so values above chance are usual; above 0.3 is "
        "redundancy.",
    ),
    "max": Column("float", "Largest value over expert pairs, signed at k = 1."),
    "min": Column("float", "Smallest value over expert pairs, signed at k = 1."),
    "std": Column("float", "Sample standard deviation over expert pairs."),
    "max_abs": Column(
        "float",
        "Largest absolute value over expert pairs.",
        worst="1",
        chance="grows with the number of pairs",
        best="0",
        title="max |cos|",
    ),
    "chance": Column("float", "Value for random directions.", "√(2/(πd)) at k = 1, k/d beyond"),
    "n_pairs_above_0_3": Column(
        "int",
        "Expert pairs with |cos| above 0.3: redundancy, where d is large; at k = 1 only.",
        chance="pairs × P(|cos| > 0.3); 1.5 % of them at d = 64, none at d = 256",
        title="pairs > 0.3",
    ),
    "n_pairs_above_0_7": Column(
        "int",
        "Expert pairs with |cos| above 0.7: collapse; at k = 1 only.",
        chance="0 for any d above 30",
        title="pairs > 0.7",
    ),
    # --- ambiguity
    "rank": Column(
        "int",
        "Rank of the layer by ambiguity_score, 1 = most ambiguous; null where that is undefined.",
        misleads="Layers at chance are ranked too; the report ranks by absolute_score and without them.",
    ),
    "ambiguity_score": Column(
        "float",
        "How hard a layer's experts are to tell apart, normalised over the layers analysed.",
        "0.4 (1 − accuracy) + 0.3 (1 − margin′) + 0.3 (1 − z′), ′ = min-max over layers, all at k*",
        worst="1",
        chance="undefined: it is normalised over layers",
        best="0",
        misleads="The best layer of a bad model scores low, the worst of a perfect one high: see "
        "absolute_score. Above 0.7 is high, 0.4 to 0.7 medium.",
        title="ambiguity",
    ),
    "absolute_score": Column(
        "float",
        "Ambiguity without reference to other layers.",
        "0.4 (1 − accuracy) + 0.3 (1 − clip(margin/align)) + 0.3 (1 − clip(z/√(n−1)))",
        worst="1",
        chance="absolute_chance",
        best="0",
        title="absolute ambiguity",
    ),
    "absolute_chance": Column(
        "float",
        "Chance level of absolute_score: its mean over random pairings, each at its own k*.",
        title="absolute ambiguity at chance",
    ),
    "ambiguity.argmax_accuracy": Column(
        "float",
        "argmax_accuracy at k*.",
        worst="0",
        chance="accuracy_chance",
        best="1",
        title="accuracy at k*",
    ),
    "ambiguity.alignment_margin": Column(
        "float", "alignment_margin at k*.", chance="margin_chance", title="margin at k*"
    ),
    "accuracy_chance": Column(
        "float",
        "Chance level of argmax_accuracy at k*: its mean over random pairings, each at its own k*.",
        title="accuracy at chance",
    ),
    "margin_chance": Column(
        "float",
        "Chance level of alignment_margin at k*: its mean over random pairings, each at its own k*.",
        title="margin at chance",
    ),
    "z_chance": Column(
        "float",
        "Chance level of z_score: its mean over random pairings, each at its own k*.",
        title="z at chance",
    ),
    "k_star": Column(
        "int", "k at which the layer is judged: the one with the largest margin, or a fixed one.", title="k*"
    ),
    "z_score": Column(
        "float",
        "Mean z_vs_shuffle at k*.",
        chance="z_chance",
        best="√(n−1)",
        title="z at k*",
    ),
    "accuracy_term": Column("float", "The accuracy's part of the score.", title="accuracy term"),
    "margin_term": Column("float", "The margin's part of the score.", title="margin term"),
    "z_term": Column("float", "z's part of the score.", title="z term"),
    "level": Column("text", "high above 0.7, medium from 0.4, else low; null where the score is undefined."),
    # --- spectra
    "singular_values": Column("floats", "The matrix's singular values, falling, down to the rank tolerance."),
    "frobenius": Column("float", "Frobenius norm of the matrix.", "√Σ sₐ²"),
    "spectral_norm": Column("float", "Largest singular value.", "s₁", title="spectral norm"),
    "stable_rank": Column(
        "float",
        "Number of directions that carry the energy, as a soft count.",
        "‖W‖²_F / s₁²",
        worst="1",
        best="rank",
        title="stable rank",
        chance="d·f/(√d + √f)² for a random d × f matrix",
    ),
    "effective_rank": Column(
        "float",
        "Number of directions used, by entropy.",
        "exp(−Σ pₐ log pₐ), pₐ = sₐ/Σs",
        worst="1",
        best="rank",
        title="effective rank",
        chance="below rank for a random matrix, from 0.8 of it (square) towards all of it (long)",
    ),
    "spectra.rank": Column(
        "int",
        "Number of singular values that rounding of the stored weights cannot have made: p significand bits, "
        "53 for fp64, 24 fp32, 11 fp16, 8 bf16, 6 int8, 4 e4m3, 3 e5m2, 2 mxfp4 and int4. Weaker directions "
        "may be real, but the checkpoint cannot tell.",
        "#{sₐ > 2⁻ᵖ rms(W) (√f + √d), and > max(f, d) · ε · s₁, the error of fp64}",
        chance="min(f, d) for a random matrix, less where f and d are close and p is small",
        misleads="Very uneven norms of rows or columns add up to three directions that are rounding "
        "(log-normal with σ = 1, at 512 × 512).",
    ),
    "condition": Column(
        "float", "Largest over smallest singular value above the rank tolerance.", "s₁/s_rank"
    ),
    "fallback": Column(
        "bool", "Whether the fast decomposition failed its check and LAPACK's SVD was used instead."
    ),
}

TABLES = define_tables(
    COLUMNS,
    Table(
        "alignment",
        "Fit of each router row to its own expert, at every k.",
        ("step", "layer", *VIEW, "k", "expert"),
        (*CURVES, "z_vs_shuffle", "cos_squared", "margin", "identified"),
    ),
    Table(
        "alignment_layers",
        "The same, one row per layer and k: means over the layer's experts.",
        ("step", "layer", *VIEW, "k"),
        (
            *(*CURVES, "z_vs_shuffle", "cos_squared", "argmax_accuracy", "assignment_accuracy"),
            *("alignment_margin", "positive_margin_share", "z_ceiling", "perm_z", "p_adjusted", "degenerate"),
            *("n_experts", "d_model"),
        ),
    ),
    Table(
        "alignment_tests",
        "Whether a layer's pairing of router rows and experts beats chance, corrected for multiple k.",
        ("step", "layer", *VIEW),
        (
            *(
                "best_k",
                "best_accuracy",
                "chance_accuracy",
                "p_value",
                "q_value",
                "p_lower",
                "p_accuracy",
                "n_pairings",
                "exact",
            ),
            "verdict",
        ),
    ),
    Table(
        "pairs",
        "The matrix M(k): every router row against every expert (beyond 32 experts at k = 1, 16, 128, "
        "best_k, k_star).",
        ("step", "layer", *VIEW, "k", "router_index", "expert"),
        ("align",),
    ),
    Table(
        "nulls",
        "Null distribution of the mean diagonal under random pairings, in 60 bins, at a few ks.",
        ("step", "layer", *VIEW, "k", "bin"),
        ("left", "right", "density", "observed"),
    ),
    Table(
        "similarity",
        "Every pair of experts: top singular vectors (k = 1) and leading subspaces.",
        ("step", "layer", "matrix", "k", "expert_a", "expert_b"),
        ("cosine", "overlap", "largest_principal_cosine"),
    ),
    Table(
        "orthogonality",
        "Statistics over a layer's expert pairs: of the signed cosine at k = 1, of the subspace overlap "
        "beyond.",
        ("step", "layer", "matrix", "k"),
        (
            *("mean", "mean_abs", "max", "min", "std", "max_abs", "chance", "n_pairs_above_0_3"),
            *("n_pairs_above_0_7", "d_model"),
        ),
    ),
    Table(
        "ambiguity",
        "Layers ranked by how hard their experts are to tell apart.",
        ("step", "layer", *VIEW),
        (
            *("rank", "ambiguity_score", "absolute_score", "absolute_chance", "k_star", "argmax_accuracy"),
            *("alignment_margin", "z_score", "accuracy_chance", "margin_chance", "z_chance"),
            *("accuracy_term", "margin_term", "z_term", "level"),
        ),
    ),
    Table(
        "spectra",
        "Singular values of each expert matrix, and statistics of them.",
        ("step", "layer", "matrix", "expert"),
        (
            *("singular_values", "frobenius", "spectral_norm", "stable_rank", "effective_rank", "rank"),
            *("condition", "fallback"),
        ),
    ),
)
