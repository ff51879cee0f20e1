"""What every column means: one text, used by the tables' schema, the figures' captions and the report's glossary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column's kind (int, float, bool, text, floats, ints) and everything a reader needs to judge a number in it."""

    kind: str
    meaning: str
    formula: str = ""
    worst: str = ""
    chance: str = ""
    best: str = ""
    misleads: str = ""
    title: str = ""  # how figures and tables spell it; the column's name where empty


COLUMNS: dict[str, Column] = {
    # --- keys
    "step": Column("int", "Which checkpoint of a training run, or the optimiser step that ends a stretch of it; 0 for a model looked at once."),
    "layer": Column("int", "The layer's number in the model, from 0."),
    "layer_name": Column("text", "The MoE block's name in the checkpoint."),
    "matrix": Column(
        "text",
        "Which expert matrix is read: gate, up, gate_up (both stacked on the hidden axis, each scaled to unit Frobenius norm), "
        "or down (its left singular vectors, so that they live in d_model too).",
    ),
    "router": Column(
        "text",
        "raw: router rows as stored. centered: rows less their mean. A softmax ignores a vector common to all rows, so "
        "centered is the reading that does not depend on that choice of origin.",
        misleads="Centering ties the rows together: their chance cosine is −1/(n−1), not 0. It has no meaning for sigmoid gates.",
    ),
    "fold_norm": Column(
        "bool",
        "Whether the weight of the norm in front of the block was multiplied into router and expert input (for down: router only). "
        "Only the folded reading stays the same when scale is moved between norm, router and experts.",
    ),
    "k": Column("int", "How many leading singular vectors of the expert are used."),
    "expert": Column("int", "The expert's number in its layer, from 0."),
    "router_index": Column("int", "The router row's number; row i is meant to choose expert i."),
    "expert_a": Column("int", "The first expert of a pair; always the smaller number."),
    "expert_b": Column("int", "The second expert of a pair."),
    "bin": Column("int", "The bin's number, from 0."),
    # --- alignment
    "align": Column(
        "float",
        "The share of a router row's length (squared) that lies in the expert's first k right singular directions.",
        "align(i, j; k) = Σₐ≤ₖ (vₐ(Wⱼ) · rᵢ)², ‖rᵢ‖ = 1",
        worst="0", chance="min(k, rank)/d", best="1",
        misleads="It grows with k by itself and reaches 1 at k = d whatever the weights. Read it only beside its chance level.",
        title="alignment",
    ),
    "random_expectation": Column(
        "float", "The alignment a router drawn uniformly from the sphere would have.", "min(k, rank)/d",
        misleads="Real routers and experts share directions (all live in the same activations), so beating it says little about "
        "pairing; the shuffle null does.",
        title="random expectation",
    ),
    "effect_over_random": Column(
        "float", "Alignment beyond that of a random direction.", "align − min(k, rank)/d",
        worst="−min(k, rank)/d", chance="0 for a random direction", best="1 − min(k, rank)/d",
        misleads="It is large for every expert, right or wrong, when all experts share their leading directions.",
        title="effect over random",
    ),
    "shuffle_mean": Column(
        "float", "The mean alignment of a router with an expert picked at random from its layer.", "mean of all n² entries of M(k)",
        misleads="It includes the n right pairs, so it moves a little with them.",
        title="shuffle mean",
    ),
    "shuffle_std": Column(
        "float", "The spread of those alignments.", "population standard deviation of all n² entries of M(k)",
        misleads="Right pairs that stand out widen it themselves; this is why z has a ceiling.",
        title="shuffle std",
    ),
    "delta_vs_shuffle": Column(
        "float", "How much better a router fits its own expert than an average expert of its layer.", "align − shuffle_mean",
        worst="−1", chance="0", best="1", title="delta vs shuffle",
    ),
    "z_vs_shuffle": Column(
        "float", "Delta in units of the shuffle's spread.", "delta_vs_shuffle / shuffle_std; 0 where the std is 0",
        worst="−√(n−1) for a layer", chance="0", best="√(n−1) for a layer, √(n²−1) for one expert",
        misleads="It is not a confidence. A layer's mean z cannot exceed √(n−1): 2.65 for 8 experts, so “z > 3” is out of reach "
        "there. For confidence read p_value.",
        title="z vs shuffle",
    ),
    "z_ceiling": Column(
        "float", "The largest mean z that any layer of n experts can show under the closed-form null.", "√(n−1)", title="z ceiling",
        misleads="The sampled null is noisy and may put z above it.",
    ),
    "cos_squared": Column(
        "float", "Squared cosine of a router row and its expert's top singular vector; given at k = 1 only.", "(v₁(Wᵢ) · rᵢ)²",
        worst="0", chance="1/d", best="1", title="cos²",
    ),
    "margin": Column(
        "float", "By how much a router prefers its own expert to the best other one.", "M[i,i] − maxⱼ≠ᵢ M[i,j]",
        worst="−1", chance="below 0: the best of n−1 others tends to win", best="1",
    ),
    "identified": Column("bool", "Whether the router's own expert is its best match, alone.", "margin > 10⁻⁶", chance="1/n"),
    "argmax_accuracy": Column(
        "float", "The share of routers whose own expert is their best match; ties count 1/(number tied).",
        "mean over i of [argmaxⱼ M[i,j] = i]", worst="0", chance="1/n", best="1",
        misleads="The best of many ks beats 1/n by luck; p_accuracy pays for that choice.", title="argmax accuracy",
    ),
    "assignment_accuracy": Column(
        "float", "The share of routers that get their own expert in the best one-to-one assignment.",
        "diagonal share of argmax over permutations π of Σᵢ M[i, π(i)]", worst="0", chance="1/n", best="1",
        misleads="An expert that attracts every router does not lower it; compare with argmax accuracy to see such an expert. Where some experts are exact copies, the solver picks one.",
        title="assignment accuracy",
    ),
    "alignment_margin": Column(
        "float", "The mean margin over a layer's routers.", "mean over i of M[i,i] − maxⱼ≠ᵢ M[i,j]",
        worst="−1", chance="below 0", best="1",
        misleads="It can be positive while some routers are misidentified: see the margins' distribution and positive_margin_share.",
        title="alignment margin",
    ),
    "positive_margin_share": Column(
        "float", "The share of routers with a positive margin.", worst="0", chance="1/n", best="1", title="positive margins",
    ),
    "perm_z": Column(
        "float", "The mean diagonal of M(k) in units of its standard deviation under random pairings.",
        "(T − mean M)/sd, sd² = ΣD²/(n²(n−1)), D = M doubly centred", worst="−(n−1)", chance="0", best="n−1",
        misleads="Not normal for few experts: it is never turned into a p-value by the normal law.", title="permutation z",
    ),
    "p_adjusted": Column(
        "float", "The p-value of one k, paid for all ks looked at.", "share of pairings whose max over k of Z reaches Z(k)",
        worst="1", chance="uniform or larger", best="1/n! (n ≤ 8), else 1/20,001", title="adjusted p",
    ),
    "degenerate": Column("bool", "k has reached d: every alignment is 1 and nothing can be told. Left out of every choice of k.", "k ≥ d"),
    # --- tests
    "best_k": Column("int", "The k of the highest argmax accuracy, ties to the smallest; degenerate ks left out.", title="best k"),
    "best_accuracy": Column("float", "Argmax accuracy at best_k.", worst="0", chance="above 1/n: the best of several ks", best="1", title="best accuracy"),
    "p_value": Column(
        "float", "How often a random pairing of the layer's routers and experts looks as well matched as the stored one.",
        "share of pairings with maxₖ Z ≥ observed maxₖ Z; (b+1)/(m+1) when pairings are drawn",
        worst="1", chance="uniform or larger", best="1/n! (n ≤ 8), else 1/20,001",
        misleads="It says the pairing is real, not that it is strong: read delta or margin for size.", title="p",
    ),
    "q_value": Column(
        "float", "The false-discovery rate at which this layer would be called, over all layers of the same step, matrix and router.",
        "Benjamini–Hochberg over p_value", worst="1", chance="near 1; the smallest over many layers is uniform", best="near 0", title="q",
    ),
    "p_lower": Column(
        "float", "How often a random pairing looks as badly matched: small where routers avoid their own experts.",
        "share of pairings with minₖ Z ≤ observed minₖ Z", worst="near 0: anti-aligned", chance="uniform or larger", best="1", title="lower p",
    ),
    "p_accuracy": Column(
        "float", "How often a random pairing reaches the same best argmax accuracy, its own best k chosen.",
        "share of pairings with maxₖ accuracy ≥ observed", worst="1", chance="uniform or larger", best="1/n! (n ≤ 8), else 1/20,001",
        title="accuracy p",
    ),
    "n_pairings": Column("int", "How many pairings were looked at: all n! up to 8 experts, else 20,000 drawn ones.", title="pairings"),
    "exact": Column("bool", "Whether those are all the pairings there are."),
    "verdict": Column(
        "text",
        "identifying: at best_k at least 90 % of experts are told from the weights alone, with positive margin, and p_accuracy ≤ 0.05. "
        "non_random: p_accuracy ≤ 0.05, short of that. permuted: at least 90 % of routers and experts are each other's best match under "
        "another order than the stored one, p ≤ 0.01. chance: none of these; not distinguishable from it.",
        misleads="Up to one random layer in twenty is called something else. Fewer than four experts have too few pairings to be called anything.",
    ),
    # --- nulls
    "left": Column("float", "The bin's left edge."),
    "right": Column("float", "The bin's right edge."),
    "density": Column("float", "The share of pairings in the bin, divided by its width."),
    "observed": Column("float", "The mean diagonal of the stored pairing."),
    # --- experts among themselves
    "cosine": Column(
        "float", "Cosine of two experts' top singular vectors, each oriented so that the mean of W v is positive; at k = 1 only.",
        "v₁(Wₐ) · v₁(W_b)", worst="±1", chance="|cos| ≈ √(2/(πd))", best="0",
        misleads="A singular vector has no sign of its own; the orientation is a convention. Read |cos|.",
    ),
    "overlap": Column(
        "float", "How much of two experts' leading k-dimensional subspaces is shared.", "‖Vₐ′V_b‖²_F / k",
        worst="1", chance="k/d", best="0",
    ),
    "largest_principal_cosine": Column(
        "float", "The cosine of the closest pair of directions in the two subspaces.", "σ_max(Vₐ′V_b)",
        worst="1", chance="grows with k/d", best="0",
        misleads="One shared direction is enough for 1, however different the rest.", title="largest principal cosine",
    ),
    "mean": Column("float", "Mean over expert pairs, signed at k = 1.", misleads="Signs are a convention; see mean_abs."),
    "mean_abs": Column(
        "float", "Mean absolute cosine over expert pairs (k = 1), or mean overlap (k > 1): the headline of redundancy.",
        "mean over a < b of |cos|", worst="1", chance="√(2/(πd)) at k = 1, k/d beyond", best="0", title="mean |cos|",
        misleads="All experts read the same activations, so values above chance are usual; above 0.3 call it redundancy.",
    ),
    "max": Column("float", "Largest value over expert pairs, signed at k = 1."),
    "min": Column("float", "Smallest value over expert pairs, signed at k = 1."),
    "std": Column("float", "Sample standard deviation over expert pairs."),
    "max_abs": Column(
        "float", "Largest absolute value over expert pairs.", worst="1", chance="grows with the number of pairs", best="0", title="max |cos|",
    ),
    "chance": Column("float", "What random directions would give.", "√(2/(πd)) at k = 1, k/d beyond"),
    "n_pairs_above_0_3": Column("int", "Expert pairs with |cos| above 0.3: redundancy, where d is large; at k = 1 only.", chance="pairs × P(|cos| > 0.3); 1.5 % of them at d = 64, none at d = 256", title="pairs > 0.3"),
    "n_pairs_above_0_7": Column("int", "Expert pairs with |cos| above 0.7: collapse; at k = 1 only.", chance="0 for any d above 30", title="pairs > 0.7"),
    # --- ambiguity
    "rank": Column("int", "The layer's place, 1 = most ambiguous; null where the score is undefined."),
    "ambiguity_score": Column(
        "float", "How hard a layer's experts are to tell apart, relative to the other layers analysed.",
        "0.4 (1 − accuracy) + 0.3 (1 − margin′) + 0.3 (1 − z′), ′ = min-max over layers, all at k*",
        worst="1", chance="undefined: it is relative", best="0",
        misleads="The best layer of a hopeless model scores low, the worst of a perfect one high. See absolute_score. Above 0.7 "
        "is called high, 0.4 to 0.7 medium.",
        title="ambiguity",
    ),
    "absolute_score": Column(
        "float", "The same idea without reference to other layers.",
        "0.4 (1 − accuracy) + 0.3 (1 − clip(margin/align)) + 0.3 (1 − clip(z/√(n−1)))",
        worst="1", chance="0.4 (1 − 1/n) + 0.6 at a given k; less where k* is chosen: 0.91 for 8 experts, 0.77 for 4", best="0", title="absolute ambiguity",
    ),
    "k_star": Column("int", "The k at which the layer was judged: the one of the largest margin, or a fixed one.", title="k*"),
    "z_score": Column("float", "Mean z_vs_shuffle at k*.", chance="a little above 0, since k* is chosen: 0.1 for 8 experts", best="√(n−1)", title="z at k*"),
    "accuracy_term": Column("float", "The accuracy's part of the score.", title="accuracy term"),
    "margin_term": Column("float", "The margin's part of the score.", title="margin term"),
    "z_term": Column("float", "z's part of the score.", title="z term"),
    "level": Column("text", "high above 0.7, medium from 0.4, else low; null where the score is undefined."),
    # --- spectra
    "singular_values": Column("floats", "The matrix's singular values, falling, down to the rank tolerance."),
    "frobenius": Column("float", "The matrix's size.", "√Σ sₐ²"),
    "spectral_norm": Column("float", "The largest singular value.", "s₁", title="spectral norm"),
    "stable_rank": Column("float", "How many directions carry the energy, soft count.", "‖W‖²_F / s₁²", worst="1", best="rank", title="stable rank",
                          chance="d·f/(√d + √f)² for a random d × f matrix"),
    "effective_rank": Column("float", "How many directions are used, by entropy.", "exp(−Σ pₐ log pₐ), pₐ = sₐ/Σs", worst="1", best="rank",
                             title="effective rank", chance="below rank for a random matrix, from 0.8 of it (square) towards all of it (long)"),
    "spectra.rank": Column("int", "How many singular values are not zero.", "#{sₐ > max(f, d) · ε · s₁}"),
    "condition": Column("float", "Largest over smallest nonzero singular value.", "s₁/s_rank"),
    "fallback": Column("bool", "Whether the fast decomposition failed its check and LAPACK's SVD was used instead."),
    # --- distances between experts
    "series": Column("text", "What is compared: base_to_ift for the same expert in two checkpoints, or the name a series was given; a method's name for its clusters, the dominant member against each other one. "
                             "Names that end in _permuted: after matching neurons (_unsigned: order alone); in _held_out: matched by gate and up, so that down is a check."),
    "geometry.matrix": Column("text", "gate, up or down: the expert's projection. router: the expert's router row, as stored."),
    "geometry_layers.matrix": Column("text", "gate, up or down: the expert's projection. router: the expert's router row, as stored."),
    "geometry.expert_a": Column("int", "The expert in the first checkpoint, or the dominant member of the cluster."),
    "geometry.expert_b": Column("int", "The expert it is compared with."),
    "relative_l2": Column("float", "Distance of two matrices, each scaled to norm 1.", "‖A/‖A‖ − B/‖B‖‖_F", worst="2: opposite", chance="√2, or null_l2_matched after matching", best="0",
                          misleads="Equal functions with neurons in another order are √2 apart. Change of scale is not seen: read norm_ratio.", title="relative L2"),
    "geometry.cosine": Column("float", "Cosine of the two matrices as long vectors; of a router row, by how far it turned.", "⟨A, B⟩/(‖A‖ ‖B‖) = 1 − relative_l2²/2", worst="−1", chance="0", best="1",
                              misleads="A vector added to all router rows changes every cosine and, under a softmax, nothing else."),
    "norm_ratio": Column("float", "How much larger the second matrix is.", "‖B‖/‖A‖", chance="1 for matrices of equal norm", best="1", title="norm ratio"),
    "sv_alignment": Column("float", "R: how much of the singular directions two matrices share, all directions counted alike whatever their singular values. Null for router rows.",
                           "⟨Q_A, Q_B⟩_F/√(rank_A rank_B), Q = U V′", worst="−1", chance="0, or null_sv_matched after matching", best="1",
                           misleads="Noise in the smallest directions counts as much as in the largest: 10 % of noise leaves 0.994 of a 768 × 2048 matrix, 0.98 of a square one.", title="SV alignment R"),
    "matched": Column("bool", "Whether the second expert's neurons were first brought into the order (and signs) that fit the first one best."),
    "relative_l2_mean": Column("float", "Mean relative L2 over the layer's pairs.", chance="null_l2, or null_l2_matched after matching", best="0", title="relative L2"),
    "relative_l2_sd": Column("float", "Sample standard deviation over the pairs; null for one pair.", title="L2, sd"),
    "relative_l2_low": Column("float", "Lower end of the mean's 95 % interval.", "2.5 % quantile of 2,000 bootstrap means over first experts, each with all its pairs",
                              misleads="Null for fewer than two first experts; of fewer than ten it is rather too narrow.", title="L2, low"),
    "relative_l2_high": Column("float", "Upper end of that interval.", title="L2, high"),
    "sv_alignment_mean": Column("float", "Mean R over the layer's pairs.", chance="0, or null_sv_matched after matching", best="1", title="SV alignment R"),
    "sv_alignment_sd": Column("float", "Sample standard deviation of R over the pairs; null for one pair.", title="R, sd"),
    "sv_alignment_low": Column("float", "Lower end of the 95 % interval of the mean R, made like relative_l2_low.", title="R, low"),
    "sv_alignment_high": Column("float", "Upper end of that interval.", title="R, high"),
    "null_l2": Column("float", "Relative L2 of unrelated experts as they lie.", "√2", title="L2, unrelated"),
    "null_l2_matched": Column("float", "Relative L2 that matching neurons reaches on random Gaussian experts of the same shape; null for router rows.", "√(2 − 2c), c drawn; beyond 2,048 neurons c² is extended in log F",
                              title="L2, random matched"),
    "null_sv_matched": Column("float", "R that the same matching reaches on them.", "c (Σs)²/(r Σs²) by Marchenko and Pastur's law", title="R, random matched"),
    # --- compression
    "method": Column("text", "The method the experts were chosen by; random (seed N) for a control that does as much at random."),
    "cluster": Column("int", "The number the expert, or the one it is merged into, has in the compressed model; null where it is dropped."),
    "dominant": Column("bool", "Whether this member's neurons give the order that the others of its cluster are brought into."),
    "weight": Column("float", "Its share in the merged expert; shares of a cluster sum to 1. Null where it is dropped.", chance="1 for an expert kept alone"),
    "kept": Column("bool", "Whether anything of this expert is in the compressed model: false where it is dropped."),
    "merge": Column("int", "The step's number in its layer, from 0, the nearest first."),
    "merges.left": Column("int", "What is joined: an expert's number; from the number of experts on, what step (number − experts) made."),
    "merges.right": Column("int", "What it is joined with, numbered alike."),
    "height": Column("float", "How far apart the two are in the method's own measure: mean outputs (hc_smoe), 1 − cosine of router logits (m_smoe), weights after matching (weights).", chance="chance_height", best="0"),
    "chance_height": Column("float", "The height of experts that have nothing to do with each other: outputs of the same sizes in unrelated directions, 1 + 1/(n − 1), or matched random experts.", title="height by chance"),
    "merges.size": Column("int", "Experts in what results.", chance="2 where two experts join"),
    "done": Column("bool", "Whether the plan carries the step out: false above the cut."),
    "saliency.tokens": Column("int", "Calibration tokens that were routed to the expert: what frequency prunes by.", "|X|", worst="0", chance="tokens · k/n"),
    "saliency.gate_mass": Column("float", "Sum of the gates it was given.", "Σ_X g", worst="0", chance="the mean over the layer's experts", title="gate mass"),
    "ean": Column("float", "Sum over its tokens of the norm of its output, gate left out.", "Σ_X ‖f‖", worst="0", chance="the mean over the layer's experts", title="output norms"),
    "reap": Column("float", "Mean over its tokens of gate times norm of its output; 0 without a token.", "(1/|X|) Σ_X g ‖f‖", worst="0", chance="the mean over the layer's experts",
                   misleads="A mean over a handful of tokens is loose: read the interval of its rank.", title="REAP"),
    "rank_low": Column("float", "Lower end of the 95 % interval of the expert's rank, 1 the most salient, by the score the run prunes by (reap where it does not prune).",
                       "2.5 % quantile over 1,000 draws of groups of documents; tied experts share their mean rank", chance="1 where nothing sets experts apart",
                       misleads="Null under 20 documents.", title="rank, low"),
    "rank_high": Column("float", "Upper end of that interval. Experts whose intervals reach over the cut may be pruned or kept by luck.", chance="n where nothing sets experts apart", title="rank, high"),
    "predicted_error": Column("float", "Error of the layer's routed output on calibration states, foretold before anything is written; each layer by itself.", "‖y′ − y‖/‖y‖", chance="that of the random control", best="0",
                              misleads="Shared experts are left out of both. Errors that travel from layer to layer are not in it: read perplexity.", title="predicted error"),
    "measured_error": Column("float", "The same of the written model's own blocks, on states of held-out text.", "‖y′ − y‖/‖y‖", chance="that of the random control", best="0", title="measured error"),
    "router_kl": Column("float", "How far the new router is from the old one: from the probability of each group to the new router's, plus −log of the share that dropped experts had. In nats.",
                        "E[KL(p_group ‖ q)] − E[log Σ_kept p]", chance="that of the random control", best="0", title="router KL"),
    "perplexity": Column("float", "Perplexity of the compressed model on held-out text.", "exp(−mean log p(next token))", worst="above the vocabulary's size: worse than guessing", chance="that of the random control", best="perplexity_original",
                         title="perplexity"),
    "perplexity_original": Column("float", "Perplexity of the original on the same text.", title="original's"),
    "js_divergence": Column("float", "Jensen-Shannon divergence of next-token distributions from the original's, mean over held-out positions (8,192 at most), in nats.",
                            "½ KL(p ‖ m) + ½ KL(q ‖ m), m = (p + q)/2", worst="ln 2 = 0.693", chance="that of the random control", best="0", title="JS divergence"),
    "bytes": Column("int", "Bytes of all tensors of the compressed checkpoint.", best="bytes_original less what was dropped"),
    "bytes_original": Column("int", "Bytes of all tensors of the original.", title="original's bytes"),
    # --- routing on text
    "phase": Column(
        "text", "prefill: documents read whole, as in training too. decode: the same documents read one token at a time through the cache, as in generation."
    ),
    "domain": Column("text", "The name a text was given with, train for what a training run read; in routing_layers empty for all domains together."),
    "metric": Column("text", "Which quantity; each is explained below, with its formula and reference values."),
    "coactivation.expert_a": Column("int", "One expert of a pair; every ordered pair is listed."),
    "coactivation.expert_b": Column("int", "The other expert of the pair."),
    "role": Column(
        "text", "Which token is meant: input, the token that was routed; next, the one that follows it in the text; predicted, the one "
        "the model holds most likely to follow."
    ),
    "token_id": Column("int", "The token's number in the vocabulary."),
    "token": Column("text", "The token as text; null without a tokenizer."),
    "step_a": Column("int", "The earlier checkpoint of two."),
    "step_b": Column("int", "The later checkpoint of two."),
    "document": Column("int", "The document's number in the order of reading, from 0."),
    "position": Column("int", "The token's place in its document, from 0."),
    "tokens": Column("int", "How many tokens chose the expert; padding is never counted.", chance="N k/n of N tokens"),
    "coactivation.tokens": Column("int", "How many tokens chose both experts.", chance="N k (k − 1)/(n (n − 1))"),
    "domains.tokens": Column("int", "How many of the domain's tokens chose the expert.", chance="the domain's tokens × k/n"),
    "gate_mass": Column(
        "float", "The sum of the gates with which tokens chose the expert: how much it is heard, not only how often.", "Σₜ w[t, i]",
        chance="the sum of all gates, divided by n", title="gate mass",
        misleads="Gates of different models are scaled differently; compare shares, not sums. Null where a trace holds no gates.",
    ),
    "value": Column("float", "The metric's value; null where it cannot be said."),
    "floor": Column(
        "float", "What ideal random balanced routing gives: the same number of tokens, each choosing k of n experts at random.",
        misleads="Tokens of a text are alike, so even a balanced router lies above the floor of load metrics on real text.",
    ),
    "collapse": Column("float", "What total collapse gives: every token goes to the same k experts. Null where that has no bound."),
    "low": Column(
        "float", "Lower end of the 95 % interval over documents.", "value − t · jackknife standard error, one of 256 groups of documents left out at a time",
        misleads="It says how much other documents like these would differ, not other kinds of text. Null under 20 documents.",
    ),
    "high": Column("float", "Upper end of that interval."),
    "share_of_a": Column(
        "float", "Of the tokens that chose a, the share that chose b too.", "tokens(a, b)/tokens(a)", worst="1", chance="(k − 1)/(n − 1)",
        best="0", title="share of a",
    ),
    "lift": Column(
        "float", "How much more often two experts are chosen together than if each were chosen on its own.", "P(a, b)/(P(a) P(b))",
        worst="far above chance_lift: the pair acts as one expert", chance="chance_lift, not 1", best="chance_lift",
    ),
    "chance_lift": Column("float", "The lift of random routing: below 1, since one token's experts differ.", "n (k − 1)/(k (n − 1))", title="chance lift"),
    "affinity": Column(
        "float", "How much more a domain uses an expert than domains do on average.", "P(i | d)/P(i), every domain counted alike",
        worst="1 everywhere: nothing is specialised", chance="1", best="number of domains, for an expert of one domain",
        misleads="Few documents make it stray from 1 by themselves; read domain_information beside it.",
    ),
    "share": Column(
        "float", "The share of an expert's use that the domain makes up, if all domains were equally long.", "P(i | d)/Σ_d P(i | d)",
        worst="share_chance", chance="share_chance", best="1",
    ),
    "share_chance": Column("float", "That share for an expert all domains use alike.", "1/number of domains", title="share by chance"),
    "count": Column("int", "How often the expert was chosen at this token, in the sample.", chance="the token's count × the expert's share"),
    "vocabulary.share": Column("float", "Of the expert's assignments in the sample, the share at this token.", "P(token | expert)",
                               chance="P(token)"),
    "vocabulary.lift": Column("float", "How much more often the expert is chosen at this token than experts are on average.",
                              "P(token | expert)/P(token)", worst="1", chance="1, with much spread for rare tokens", best="1/P(expert)"),
    "routing_consistency": Column(
        "float", "Of a token's experts in one checkpoint, the share it has in the other too, on one text.", "mean over tokens of |S ∩ S′|/k",
        worst="0", chance="Σ f f′/k, f = c/N", best="1", title="routing consistency",
    ),
    "routing_consistency_corrected": Column(
        "float", "The same beyond what the experts' usages alone would give.", "(o − e)/(1 − e), e = Σ f f′/k", worst="below 0", chance="0", best="1",
        title="corrected consistency",
    ),
    "top1_agreement": Column("float", "The share of tokens with the same first choice in both checkpoints.", worst="0", chance="Σ f f′ of first choices",
                             best="1", title="top-1 agreement"),
    "top1_corrected": Column("float", "The same beyond chance.", "(o − e)/(1 − e)", worst="below 0", chance="0", best="1", title="corrected top-1"),
    "usage_sigma": Column(
        "float", "How much experts' shares of the load move over the checkpoints from step_a to step_b.", "mean over experts of std(q) over checkpoints, ddof 0",
        worst="√(k/n (1 − k/n))/k", chance="about √((n − k)/(n² N k))", best="0", title="usage sigma",
    ),
    "kendall_tau": Column("float", "Whether experts keep their order by usage.", "Kendall's τ-b of the two usages", worst="−1", chance="0", best="1",
                          misleads="Ranks of even loads are noise: see tau_is_noise.", title="Kendall’s τ"),
    "tau_is_noise": Column("bool", "Whether loads of either checkpoint are so even that their ranks mean nothing.", "cv < 3 √((n − k)/(N k))", title="τ is noise"),
    "saturation_top1": Column("float", "top1_agreement with the last checkpoint: how much of the final routing is already there. Null for other pairs.",
                              worst="0", chance="as top1_agreement", best="1", title="saturation, top-1"),
    "saturation_topk": Column("float", "routing_consistency with the last checkpoint. Null for other pairs.", worst="0",
                              chance="as routing_consistency", best="1", title="saturation, top-k"),
    "experts": Column("ints", "The experts the token chose, by falling gate."),
    "gates": Column("floats", "Their gates, as the block applied them; null where a trace holds none."),
    "entropy": Column("float", "Entropy of the router's probabilities over all experts, in nats.", "−Σ p log p", worst="0", chance="log n", best="depends on the aim"),
    "contexts.rank": Column("int", "1 for the largest gate, 5 places at most."),
    "before": Column("text", "The ten tokens before it, as text; null without a tokenizer."),
    "after": Column("text", "The eight tokens after it, as text; null without a tokenizer."),
    "gate": Column("float", "The gate with which the token chose the expert.", chance="the expert's mean gate: its gate_mass over its tokens",
                   misleads="The largest of many gates is large whatever the expert does: read what the places have in common, not the number."),
    "of": Column("text", "What of two experts is compared. router: their router rows. outputs: the mean of what each gave, before its gate, over those of up to "
                         "1,024 tokens that chose it (the first 64 of 16 documents, from every domain).",
                 misleads="Mean outputs are of the tokens each expert was given: experts of other tokens differ in them even if their weights are alike."),
    "expert_cosines.cosine": Column("float", "The cosine of the angle between two experts' vectors; null where one of them is not known.", "v_a · v_b/(‖v_a‖ ‖v_b‖)",
                                    worst="1: the two cannot be told apart", chance="0, with |cos| about chance", best="depends on the aim"),
    "expert_cosines.chance": Column("float", "The mean |cos| of two random directions.", "√(2/(π d))"),
    # --- training
    "steps.tokens": Column("int", "Real tokens read from the start of training up to this step, over all ranks and micro-batches."),
    "train_loss": Column("float", "The loss as trained, mean over the steps since the row before."),
    "lm_loss": Column("float", "The same without the auxiliary loss.", "loss − coefficient × auxiliary loss", best="the entropy of the text"),
    "aux_loss": Column("float", "The load-balancing loss before its coefficient, as the model gives it; null where it gives none.",
                       chance="k for a router that spreads tokens evenly (Mixtral's formula)"),
    "validation_loss": Column("float", "The evaluation's loss; null at steps without one."),
    "validation_loss_published": Column("float", "The evaluation's loss by the formula of a published comparison; null where there is none."),
    "learning_rate": Column("float", "The learning rate of the step."),
    "gradient_norm": Column("float", "The norm of the whole gradient before it is clipped.", "‖∂ loss/∂ all weights‖"),
    "tokens_per_second": Column("float", "Real tokens a second since the row before, over all ranks."),
    "step_seconds": Column("float", "Seconds a step since the row before."),
    "peak_memory_bytes": Column("int", "The most memory the first rank's device has held; null on a CPU."),
    "lm_gradient_norm": Column("float", "How strongly the language-model loss pulls on the layer's router.", "‖∂ lm_loss/∂ W_router‖",
                               worst="0: the router learns nothing from the text, as with renormalised top-1 gates", best="depends on the aim"),
    "aux_gradient_norm": Column("float", "How strongly the auxiliary loss pulls on it, its coefficient included; null where there is none.",
                                "‖∂ (coefficient × aux_loss)/∂ W_router‖"),
    "alerts.expert": Column("int", "The expert, where the alert is about one; null where it is about its layer."),
    "kind": Column("text", "dead: an expert no token chose for that many steps. max_load: the busiest expert's load over the mean. unused: the share of "
                           "experts without a token. entropy: the router has one answer to everything. nan: gates or logits are not numbers."),
    "alerts.value": Column("float", "What was seen; null for nan."),
    "threshold": Column("float", "From where on it is an alert: a setting."),
    "message": Column("text", "The same in a sentence."),
    # --- the lab
    "overhead.router": Column("text", "The router, and what was switched off or on in it."),
    "component": Column("text", "A part of the block, disjoint from the others: experts; update, what changes after a step without gradients; routing, "
                                "the whole router; or the router's own parts, with rest for what it does beside them."),
    "milliseconds": Column("float", "How long a forward pass spends in it, in training mode; median over repetitions.",
                           misleads="With few tokens on a GPU it is the time to launch kernels. Backward passes are not in it."),
    "flops": Column("int", "Floating-point operations of one pass.", "2 m n k a matrix product, one an element elsewhere",
                    misleads="Sorting and moving numbers count nothing, yet take time."),
    "overhead.share": Column("float", "Its part of the block's time.", "milliseconds/Σ milliseconds of the router's rows", worst="1", best="0, of all but the experts"),
}  # fmt: skip
