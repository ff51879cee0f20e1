"""The tables of trainings and of studies: keys, columns and the meaning of each column."""

from __future__ import annotations

from moescope.routing.tables import MONITOR_TABLES
from moescope.tables import Column, Table, define_tables

COLUMNS: dict[str, Column] = {
    "overhead.router": Column("text", "The router, with its ablation if any."),
    "component": Column(
        "text",
        "A part of the block, disjoint from the others: experts; update (changes after a step without "
        "gradients); routing (all of the router), or the router's named parts and rest.",
    ),
    "milliseconds": Column(
        "float",
        "Median time of a forward pass in training mode.",
        misleads="With few tokens on a GPU it is the time to launch kernels. Excludes backward passes.",
    ),
    "flops": Column(
        "int",
        "Floating-point operations of one pass.",
        "2 m n k per matrix product, 1 per element elsewhere",
        misleads="Sorting and moving numbers count nothing, yet take time.",
    ),
    "overhead.share": Column(
        "float",
        "Share of the block's time.",
        "milliseconds/Σ milliseconds of the router's rows",
        worst="1",
        best="0 for all but the experts",
    ),
    "arm": Column("text", "One setting of the study, trained once per seed."),
    "seed": Column(
        "int",
        "Seed of initial weights and text order; arms are compared seed by seed.",
    ),
    "question": Column(
        "text",
        "Purpose of the arm. main: routers against the reference; ablation: one part of a router removed; "
        "sweep: one option at several values; scaling: more experts or larger models.",
    ),
    "study_runs.status": Column(
        "text", "done, failed (reason in message) or not run. Only done trainings have numbers."
    ),
    "study_runs.validation_loss": Column(
        "float",
        "Loss of the trained model on held-out text, in nats per token: the study's only endpoint.",
        chance="the reference arm with the same seed",
        best="the entropy of the text",
    ),
    "study_runs.unigram_loss": Column(
        "float",
        "Loss of the unigram baseline on the same documents: token frequencies of the training text. A "
        "training that does not beat it enters no comparison.",
        "−mean log((c + 1)/(N + V))",
        title="unigram",
    ),
    "study_runs.validation_loss_published": Column(
        "float",
        "Loss on the validation rows at the last evaluation with padding as targets, as SoME's published "
        "losses have it; null without padding.",
        unit="nats per token",
    ),
    "study_curves.validation_loss_published": Column(
        "float", "Loss on the validation rows with padding as targets; null without padding."
    ),
    "loss_slope": Column(
        "float",
        "Slope of the validation loss at the end of training, in nats per 1,000 steps; null with fewer than "
        "two evaluations.",
        "least squares over the evaluations of the last fifth of the steps, or over the last two",
        chance="0: training has converged",
        misleads="The learning rate has decayed by then: a small slope does not mean that more steps are "
        "useless.",
        title="final slope",
    ),
    "bits_per_byte": Column(
        "float",
        "The validation loss in bits per byte of text: comparable between vocabularies.",
        "Σ tokens · loss/(log 2 · Σ bytes)",
        chance="8: uniform bytes",
        title="bits per byte",
    ),
    "study_documents.bytes": Column("int", "Bytes of text that the predicted tokens stand for."),
    "study_layers.metric": Column(
        "text",
        "cv, max_violation, gini, unused, load_entropy, expert_overlap, routing_entropy, gram_orthogonality "
        "(router rows): as in routing_layers. min_over_mean: load of the least busy expert over the mean. "
        "output_orthogonality: Gram orthogonality of the outputs of all experts for the same tokens. Of the "
        "block's FFN outputs y over tokens and channels: ffn_rms, ffn_kurtosis, ffn_peak (largest |y| over "
        "the RMS), ffn_sparsity (share of |y| below 1 % of the RMS). effect_load, effect_alignment, "
        "effect_ambiguity, and ..._given_load (partial): rank correlation of study_effects in the layer. "
        "key_gini, key_load_entropy_bits, key_used: of SoME's load in the last window of training; "
        "key_cosine: mean cosine of two keys.",
        "output_orthogonality = 1 − √(Σ_{i≠j} mean cos²(Eᵢ(x), Eⱼ(x)))/(n √2); "
        "ffn_kurtosis = mean (y − ȳ)⁴/(mean (y − ȳ)²)²",
    ),
    "study_layers.domain": Column(
        "text", "Empty: the documents of all trained domains; else the documents of one domain."
    ),
    "study_layers.value": Column(
        "float", "Value of the trained model in evaluation mode, over the validation documents."
    ),
    "study_layers.chance": Column(
        "float",
        "Value of balanced random routing over as many tokens; of a uniform router; of random directions; "
        "of Gaussian outputs (ffn_peak: the median of the largest).",
    ),
    "study_layers.collapse": Column("float", "Value when all tokens choose the same experts."),
    "study_loads.domain": Column("text", "Domain of the documents; also domains that were not trained on."),
    "study_loads.tokens": Column(
        "int", "Tokens of the domain's validation documents that chose the expert, in evaluation mode."
    ),
    "study_usage.step": Column("int", "Training step."),
    "study_usage.share": Column(
        "float",
        "The expert's share of its layer's load in training, since the previous row.",
        "cᵢ/Σ c",
        worst="1/k or 0",
        chance="1/n",
        best="1/n",
    ),
    "noise_low": Column(
        "float",
        "Lower end of the 95 % bootstrap interval of that loss over validation documents, for this model.",
        "2.5 % quantile over resampled documents",
        misleads="Evaluation noise only: another seed may change the loss by more. No test uses it.",
        title="noise, low",
    ),
    "noise_high": Column("float", "Upper end of that interval.", title="noise, high"),
    "noise_std": Column("float", "Its standard deviation over resampled documents.", title="noise σ"),
    "load_cv": Column(
        "float",
        "Coefficient of variation of experts' loads at the end of training, mean over layers.",
        "std(c)/mean(c), ddof 0",
        worst="√(n/k − 1)",
        chance="√((n − k)/(N k)) for balanced random routing",
        best="0; sweeps target below 0.1",
        title="load CV",
    ),
    "load_cv_chance": Column(
        "float",
        "The load CV of balanced random routing over as many tokens, mean over layers.",
        title="balanced random routing",
    ),
    "routing_entropy_chance": Column(
        "float", "The routing entropy of a uniform router.", "log n", title="uniform router"
    ),
    "unused_share_chance": Column(
        "float", "The share of unused experts for balanced random routing over as many tokens."
    ),
    "study_runs.max_over_mean": Column(
        "float",
        "Largest expert load over the mean load at the end of training, mean over layers.",
        "max c/c̄",
        worst="n/k",
        chance="a little above 1",
        best="1",
        title="max/mean",
    ),
    "study_runs.routing_entropy": Column(
        "float",
        "Entropy of the router's distribution at the end of training, in nats, mean over layers.",
        "mean of −Σ p log p",
        worst="0: always the same experts; log n: uniform",
        chance="log n: uniform router",
        best="depends on the goal",
        title="routing entropy",
    ),
    "study_curves.routing_entropy": Column(
        "float",
        "Entropy of the router's distribution since the previous row, in nats, mean over layers.",
        "mean of −Σ p log p",
        worst="0: always the same experts; log n: uniform",
        chance="log n: uniform router",
        best="depends on the goal",
        title="routing entropy",
    ),
    "unused_share": Column(
        "float",
        "Share of experts that no token chose, mean over layers.",
        "#{cᵢ = 0}/n",
        worst="1 − k/n",
        chance="(1 − k/n)^N",
        best="0",
        misleads="Decreases with the number of tokens counted.",
        title="unused experts",
    ),
    "dropped_share": Column(
        "float",
        "Share of expert slots left empty by capacity at the end of training, mean over layers.",
        "empty slots/(N k)",
        worst="1",
        chance="0 without capacity",
        best="0",
        title="dropped",
    ),
    "consistency": Column(
        "float",
        "Share of a token's experts that it still chooses in the next of the last checkpoints.",
        "mean of |S ∩ S′|/k",
        worst="0",
        chance="Σ f f′/k, f the experts' shares of tokens; k/n for even loads",
        best="1",
    ),
    "consistency_chance": Column(
        "float", "Consistency of independent choices of the same loads.", "Σ f f′/k"
    ),
    "consistency_estimated": Column(
        "int", "1 where consistency_chance is that of the last checkpoint's loads on other text, else 0."
    ),
    "output_documents": Column("int", "Documents from which tokens come for comparing outputs of experts."),
    "study_runs.usage_sigma": Column(
        "float",
        "Variation of experts' load shares between checkpoints.",
        "mean over experts of std of qᵢ over checkpoints, ddof 0",
        best="0",
        title="usage σ",
        chance="√((n − k)/(n² N k)) for balanced random routing",
    ),
    "study_runs.kendall_tau": Column(
        "float",
        "Rank correlation of expert loads between checkpoints.",
        "Kendall's τ_b",
        worst="−1",
        chance="0",
        best="1",
        title="Kendall τ",
        misleads="For even loads the order is noise, so a low τ is no defect.",
    ),
    "study_runs.tokens_per_second": Column(
        "float",
        "Training tokens per second, without evaluations.",
        misleads="Parallel trainings slow each other down.",
        title="tokens/s",
    ),
    "study_runs.peak_memory_bytes": Column(
        "int",
        "Peak GPU memory of the training; null on a CPU, where trainings share a process.",
        title="peak memory",
    ),
    "seconds": Column("float", "Duration of the training."),
    "parameters_total": Column("int", "Parameters of the model.", title="parameters"),
    "parameters_trainable": Column("int", "Trained parameters.", title="trained"),
    "parameters_active": Column("int", "Parameters that one token uses.", title="active"),
    "flops_per_token": Column(
        "int",
        "Floating-point operations of a forward pass, per token.",
        "2 m n k per matrix product",
        title="FLOPs per token",
    ),
    "study_runs.n_experts": Column("int", "Experts per layer; null without a router.", title="experts"),
    "study_runs.top_k": Column("int", "Experts that the router chooses per token; null without a router."),
    "study_runs.tokens_per_step": Column("int", "Training tokens per step."),
    "study_runs.message": Column("text", "Reason of a failure; else empty."),
    "axis": Column("text", "An axis of the study: an option or size that its grid varies."),
    "study_axes.value": Column("float", "The arm's value on the axis; null if it is a name."),
    "study_axes.label": Column("text", "The arm's value or name on the axis, as text."),
    "study_documents.document": Column(
        "int", "Number of the validation document, the same for every arm and seed."
    ),
    "study_documents.tokens": Column("int", "Predicted tokens of the document."),
    "study_documents.loss": Column(
        "float",
        "Mean loss of the trained model on it, in nats per token.",
        chance="the reference arm with the same seed",
    ),
    "study_curves.step": Column("int", "Training step."),
    "study_curves.validation_loss": Column(
        "float",
        "Validation loss at that step, in nats per token; null without an evaluation.",
        chance="the reference arm at the same step",
    ),
    "study_effects.effect": Column(
        "float",
        "Loss on held-out documents with the expert's output zero, minus the loss without the change.",
        chance="0: no effect",
        unit="nats per token",
    ),
    "study_effects.half_a": Column(
        "float", "The effect on one half of the documents.", unit="nats per token"
    ),
    "study_effects.half_b": Column("float", "The effect on the other half.", unit="nats per token"),
    "study_effects.load": Column(
        "float", "Share of choices of the expert in its layer, on other documents.", chance="1/n"
    ),
    "study_effects.alignment": Column(
        "float", "Alignment of the router row with its own expert at k*, of a scan; null without rows."
    ),
    "study_effects.ambiguity": Column(
        "float", "Alignment with the best other expert minus that with its own, at k*; null without rows."
    ),
    "task": Column("text", "A task of lm-eval, or a group of tasks."),
    "study_tasks.metric": Column(
        "text", "The task's metric, as lm-eval names it; in brackets its filter of the answers, if any."
    ),
    "study_tasks.documents": Column("int", "Documents of the task; null for a group."),
    "study_tasks.value": Column("float", "Value of the trained model."),
    "standard_error": Column("float", "Its standard error over documents, by lm-eval; null where unknown."),
    "study_tasks.chance": Column("float", "Accuracy of a choice at random; null for other metrics."),
    "study_keys.x": Column("float", "First principal component of the unit key."),
    "study_keys.y": Column("float", "Second principal component of the unit key."),
    "study_keys.tokens": Column("int", "Tokens that chose the expert in the last window of training."),
    "strength": Column("float", "Length ρ of the key.", worst="0: never chosen again", best="1"),
    "study_keys.variance_share": Column("float", "Share of the keys' variance that the map shows.", best="1"),
    "study_experts.x": Column(
        "float",
        "First principal axis of the mean cosines of two experts' outputs for the same tokens.",
    ),
    "study_experts.y": Column("float", "Second principal axis of them."),
    "study_experts.variance_share": Column(
        "float", "Share of the variance of the layer's experts that the two axes show.", best="1"
    ),
    "before_quota": Column(
        "float",
        "Share of slots that the expert would get in a training pass without its quota; null without one.",
        chance="1/n",
        title="before the quota",
    ),
    "after_quota": Column(
        "float",
        "Share of slots that the expert gets in that pass; the rest of the slots stays empty.",
        chance="1/n",
        worst="the capacity, cf/n, for many experts: many slots stay empty",
        title="after the quota",
    ),
    "study_mixed.document": Column("int", "A row of validation text whose first half is of another domain."),
    "first_domain": Column("text", "The domain of the first half."),
    "study_mixed.domain": Column("text", "The domain of the second half, whose tokens are predicted."),
    "study_mixed.tokens": Column("int", "Tokens of the second half."),
    "loss_own": Column("float", "Loss of the second half after its own first half, in nats per token."),
    "loss_same": Column("float", "The same tokens after another text of their domain."),
    "loss_other": Column(
        "float",
        "The same tokens after a text of another domain.",
        chance="loss_same: another text, the same domain",
        title="loss after a switch",
    ),
    "entropy_own": Column("float", "Routing entropy of those tokens after their own first half, in nats."),
    "entropy_same": Column("float", "The same after another text of their domain."),
    "entropy_other": Column("float", "The same after a text of another domain.", chance="entropy_same"),
    "kept_same": Column(
        "float", "Share of those tokens' experts that stay after another text of their domain.", best="1"
    ),
    "kept_other": Column(
        "float", "Share that stays after a text of another domain.", chance="kept_same", best="1"
    ),
    "study_spans.document": Column("int", "Number of the document in `study_mixed`."),
    "study_spans.first": Column("int", "First token of the span, from 0."),
    "study_spans.last": Column("int", "Last token of the span."),
    "study_spans.domain": Column("text", "The domain of the span's text."),
    "study_spans.text": Column("text", "The beginning of the span's text."),
    "study_spans.share": Column(
        "float", "Share of the span's choices that went to the expert, in the middle layer.", chance="1/n"
    ),
    "reference": Column("text", "The arm that the question's other arms are compared with."),
    "seeds": Column(
        "int",
        "Seeds whose trainings of arm and reference are done and beat the unigram baseline; for the "
        "reference, its own.",
    ),
    "study_comparisons.mean": Column(
        "float", "Mean validation loss over the arm's seeds, in nats per token.", chance="the reference's"
    ),
    "study_comparisons.low": Column(
        "float",
        "Lower end of the mean's 95 % t interval over seeds.",
        "mean − t · sd/√S, ddof 1",
        misleads="Seeds shift all arms together: intervals may overlap where the difference is clear.",
    ),
    "study_comparisons.high": Column("float", "Upper end of that interval."),
    "difference": Column(
        "float",
        "Arm minus reference under the same seed, mean over shared seeds; below 0 the arm is better.",
        "mean of (arm − reference)",
        chance="0",
    ),
    "difference_low": Column(
        "float",
        "Lower end of the difference's 95 % interval.",
        "difference − t · standard error",
        chance="below 0",
        misleads="Per arm: of many arms some exclude 0 by chance; p_adjusted corrects for that.",
        title="difference, low",
    ),
    "difference_high": Column(
        "float", "Upper end of that interval.", chance="above 0", title="difference, high"
    ),
    "difference_std": Column(
        "float",
        "Standard deviation of that difference over shared seeds; the arm's test uses no other.",
        "sd of (arm − reference), ddof 1",
        title="difference σ",
    ),
    "statistic": Column(
        "float",
        "t: the difference over its standard error.",
        "paired t: difference · √S/difference_std",
        chance="0 ± 1",
        title="t",
    ),
    "degrees_of_freedom": Column(
        "int",
        "Degrees of freedom of t.",
        "S − 1, S the shared seeds",
        title="df",
    ),
    "study_comparisons.p_value": Column(
        "float",
        "Two-sided p of the difference, not corrected for the number of arms.",
        "P(|t| ≥ seen)",
        chance="uniform on 0 to 1",
    ),
    "study_comparisons.p_adjusted": Column(
        "float",
        "The same, Holm-corrected for all arms of the question.",
        "Holm's step-down over the question's arms",
        chance="above 0.05 in 95 of 100 studies, for all arms together",
        title="p, Holm",
    ),
    "hedges_g": Column(
        "float",
        "The difference in units of one training's spread within its seed, corrected for few df.",
        "J(df) · difference/s, s = difference_std/√2",
        chance="0 ± √(2/S)",
        misleads="Large where seeds hardly matter: a large g may be a small difference in loss.",
        title="Hedges' g",
    ),
    "rank_p": Column(
        "float",
        "Wilcoxon's signed-rank test on the same pairs, Holm-corrected; null below 8 seeds (no power).",
        "never below (arms) × 2^(1−S)",
        chance="uniform on 0 to 1",
        title="rank p, Holm",
    ),
    "detectable_difference": Column(
        "float",
        "The true difference that this study would detect with 80 % power.",
        "noncentral t with the same standard error and df, at Holm's first level, 0.05/arms",
        misleads="Uses the observed spread, which few seeds estimate poorly.",
        title="detectable",
    ),
    "study_comparisons.verdict": Column(
        "text",
        "better or worse than the reference: p_adjusted ≤ 0.05. not distinguishable: above. too few seeds to "
        "say: fewer than five shared seeds. no spread over seeds: every seed gave the same difference, so "
        "there is no test. failed: all attempts failed. does not beat the unigram baseline: no training "
        "does. not run: no result yet.",
    ),
}

TABLES: dict[str, Table] = define_tables(
    COLUMNS,
    Table(
        "overhead",
        "Time and FLOPs of each part of a router and of its experts.",
        ("router", "component"),
        ("milliseconds", "flops", "share"),
    ),
    Table(
        "study_runs",
        "The trainings of a study: one row per arm and seed, whether or not it ran.",
        ("arm", "seed"),
        (
            *("question", "status", "validation_loss", "validation_loss_published", "unigram_loss"),
            *("loss_slope", "bits_per_byte"),
            *("noise_low", "noise_high", "noise_std", "load_cv"),
            *("load_cv_chance", "max_over_mean", "routing_entropy", "routing_entropy_chance"),
            *("unused_share", "dropped_share", "consistency", "consistency_chance"),
            *("consistency_estimated", "output_documents", "usage_sigma"),
            *("kendall_tau", "tokens_per_second", "peak_memory_bytes", "seconds", "parameters_total"),
            *("parameters_trainable", "parameters_active", "flops_per_token"),
            *("n_experts", "top_k", "tokens_per_step", "message"),
        ),
    ),
    Table(
        "study_axes",
        "Positions of the arms on the study's axes.",
        ("arm", "axis"),
        ("value", "label"),
    ),
    Table(
        "study_documents",
        "Loss of each trained model on each validation document; evaluation noise is resampled from it.",
        ("arm", "seed", "document"),
        ("domain", "tokens", "bytes", "loss"),
    ),
    Table(
        "study_layers",
        "How each trained model routes the validation documents in evaluation mode, by layer.",
        ("arm", "seed", "layer", "metric", "domain"),
        ("value", "chance", "collapse"),
    ),
    Table(
        "study_loads",
        "Tokens per expert and domain of each trained model, in evaluation mode.",
        ("arm", "seed", "layer", "expert", "domain"),
        ("tokens",),
    ),
    Table(
        "study_usage",
        "Shares of the load over the steps of each training.",
        ("arm", "seed", "step", "layer", "expert"),
        ("share",),
    ),
    Table(
        "study_curves",
        "Training curves of each arm and seed, at the logged steps.",
        ("arm", "seed", "step"),
        (
            *("train_loss", "validation_loss", "validation_loss_published"),
            *("routing_entropy", "routing_entropy_chance"),
            *("load_cv", "load_cv_chance", "unused_share", "unused_share_chance"),
        ),
    ),
    Table(
        "study_experts",
        "Experts of each trained model: map of their outputs, load before and after the quota.",
        ("arm", "seed", "layer", "expert"),
        ("x", "y", "variance_share", "before_quota", "after_quota"),
    ),
    Table(
        "study_effects",
        "Effect of removing each expert of a trained model, where it was measured, and possible predictors.",
        ("arm", "seed", "layer", "expert"),
        ("effect", "half_a", "half_b", "load", "alignment", "ambiguity"),
    ),
    Table(
        "study_keys",
        "SoME's keys in the middle layer, by their first two principal components.",
        ("arm", "seed", "expert"),
        ("layer", "x", "y", "tokens", "strength", "variance_share"),
    ),
    Table(
        "study_tasks",
        "Results of lm-eval, in studies that name tasks.",
        ("arm", "seed", "task", "metric"),
        ("documents", "value", "standard_error", "chance"),
    ),
    Table(
        "study_mixed",
        "Documents that switch domain in the middle: the second half's loss and routing by its context.",
        ("arm", "seed", "document"),
        (
            *("first_domain", "domain", "tokens", "loss_own", "loss_same", "loss_other"),
            *("entropy_own", "entropy_same", "entropy_other", "kept_same", "kept_other"),
        ),
    ),
    Table(
        "study_spans",
        "The most used experts of each span of a document that switches domain.",
        ("arm", "seed", "document", "first", "expert"),
        ("last", "layer", "domain", "share", "text"),
    ),
    Table(
        "study_comparisons",
        "Each arm of a study against the reference, seed by seed.",
        ("question", "arm"),
        (
            *("reference", "seeds", "mean", "low", "high", "difference", "difference_low", "difference_high"),
            *("difference_std", "statistic", "degrees_of_freedom", "p_value", "p_adjusted", "hedges_g"),
            *("rank_p", "detectable_difference", "verdict"),
        ),
    ),
)

# --- trainings

TRAIN_COLUMNS: dict[str, Column] = {
    "evaluations.domain": Column("text", "The domain of the held-out text; empty for all domains together."),
    "evaluations.loss": Column(
        "float",
        "Mean loss on held-out text, in nats per token.",
        "−mean log p(next token)",
        chance="the unigram baseline",
        best="the entropy of the text",
    ),
    "base_losses.model": Column(
        "text",
        "untouched: the base as it was given; upcycled: a dense base with copies as experts, untrained; "
        "trained: after training; dense, trained on, and kept router, trained: controls, after as "
        "many steps on the same text.",
    ),
    "base_losses.domain": Column("text", "The domain of the documents; empty for all domains together."),
    "base_losses.documents": Column("int", "Held-out documents."),
    "base_losses.tokens": Column("int", "Tokens predicted in them."),
    "base_losses.loss": Column(
        "float",
        "Mean loss in nats per token.",
        "−mean log p(next token)",
        chance="the untouched model",
        best="the entropy of the text",
    ),
    "base_losses.difference": Column(
        "float",
        "Loss minus that of the untouched model on the same documents.",
        "Σ tokens · (loss − untouched)/Σ tokens",
        chance="0",
    ),
    "base_losses.difference_low": Column(
        "float",
        "Lower end of its 95 % interval: documents resampled within domains; null under 20 documents.",
        misleads="Covers the choice of documents for this one training, not other seeds.",
    ),
    "base_losses.difference_high": Column("float", "Upper end of that interval."),
    "trained_minus": Column(
        "float",
        "Loss of the trained model minus that of this one on the same documents.",
        "Σ tokens · (trained − loss)/Σ tokens",
        chance="0",
    ),
    "trained_minus_low": Column(
        "float",
        "Lower end of its 95 % interval, as of the difference.",
        misleads="Covers the choice of documents for this one training, not other seeds.",
    ),
    "trained_minus_high": Column("float", "Upper end of that interval."),
    **{name: COLUMNS[name] for name in ("task", "standard_error", "strength")},
    **{f"task_results.{name}": COLUMNS[f"study_tasks.{name}"] for name in ("metric", "documents")},
    "task_results.value": Column("float", "Value of the trained model.", chance="the task's own"),
    "base_value": Column("float", "Value of the base."),
    "task_results.difference": Column("float", "value − base_value.", chance="0"),
    "difference_error": Column(
        "float",
        "Standard error of the difference, paired by document; null where the metric is no mean over them.",
        misleads="Covers the choice of documents for this one training, not other seeds.",
    ),
    "unigram_loss": Column(
        "float",
        "Loss of the unigram baseline: token frequencies of the training text, no context.",
        "−mean log((c + 1)/(N + V))",
    ),
    "uniform_loss": Column("float", "Loss of the uniform baseline over all entries of the head.", "log V"),
    "key_metrics.metric": Column(
        "text",
        "gini, load_entropy_bits: of the load; used: share of experts with any token; cosine: mean cosine of "
        "two keys.",
    ),
    "key_metrics.value": Column("float", "Value in the middle layer at the end of training."),
    "key_metrics.chance": Column("float", "Value for random balanced routing, or for random keys."),
    "key_metrics.collapse": Column("float", "Value when all tokens choose the same experts; keys are equal."),
    "chance_spread": Column(
        "float", "Standard deviation of the chance level; null where it is not known.", "√(2/(n (n − 1) D))"
    ),
    "bin_left": Column("float", "Fewest tokens of the bin; the first bin has the experts without a token."),
    "bin_right": Column("float", "Fewest tokens of the next bin."),
    "key_histogram.experts": Column("int", "Experts with so many tokens in the last window of training."),
    "expected_experts": Column("float", "The same for balanced random routing, mean of 200 draws."),
    **{f"key_map.{name}": COLUMNS[f"study_keys.{name}"] for name in ("x", "y", "tokens", "variance_share")},
    "variance_share_chance": Column("float", "The same for random keys, mean of 20 draws."),
}
TRAIN_TABLES: dict[str, Table] = {
    **MONITOR_TABLES,
    **define_tables(
        TRAIN_COLUMNS,
        Table(
            "base_losses",
            "Loss on held-out documents of a model that existed before, trained and untouched.",
            ("model", "domain"),
            (
                *("documents", "tokens", "loss", "difference", "difference_low", "difference_high"),
                *("trained_minus", "trained_minus_low", "trained_minus_high"),
            ),
        ),
        Table(
            "task_results",
            "Tasks of lm-eval: a model that existed before, trained and as it was.",
            ("task", "metric"),
            (
                *("documents", "value", "standard_error", "base_value"),
                *("difference", "difference_error"),
            ),
        ),
        Table(
            "evaluations",
            "Loss on held-out text by step and domain, with its baselines.",
            ("step", "domain"),
            ("loss", "unigram_loss", "uniform_loss"),
        ),
        Table(
            "key_metrics",
            "Usage and keys of SoME's middle layer, with chance levels.",
            ("step", "layer", "metric"),
            ("value", "chance", "collapse", "chance_spread"),
        ),
        Table(
            "key_histogram",
            "Experts of SoME's middle layer by their tokens, four bins per decade.",
            ("step", "layer", "bin_left"),
            ("bin_right", "experts", "expected_experts"),
        ),
        Table(
            "key_map",
            "Keys of SoME's middle layer on their two principal components.",
            ("step", "layer", "expert"),
            ("x", "y", "tokens", "strength", "variance_share", "variance_share_chance"),
        ),
    ),
}
