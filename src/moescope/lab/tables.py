"""The tables of a study, and of what routers cost."""

from __future__ import annotations

from moescope.tables import Column, Table, define_tables

COLUMNS: dict[str, Column] = {
    # --- the lab
    "overhead.router": Column("text", "The router, and what was switched off or on in it."),
    "component": Column(
        "text",
        (
            "A part of the block, disjoint from the others: experts; update, what changes after a "
            "step without gradients; routing, "
            "the whole router; or the router's own parts, with rest for what it does beside them."
        ),
    ),
    "milliseconds": Column(
        "float",
        "How long a forward pass spends in it, in training mode; median over repetitions.",
        misleads="With few tokens on a GPU it is the time to launch kernels. Backward passes are not in it.",
    ),
    "flops": Column(
        "int",
        "Floating-point operations of one pass.",
        "2 m n k a matrix product, one an element elsewhere",
        misleads="Sorting and moving numbers count nothing, yet take time.",
    ),
    "overhead.share": Column(
        "float",
        "Its part of the block's time.",
        "milliseconds/Σ milliseconds of the router's rows",
        worst="1",
        best="0, of all but the experts",
    ),
    "arm": Column("text", "One setting of the study: what is trained once with every seed."),
    "seed": Column(
        "int",
        (
            "The seed of a training: first weights and order of the text. Arms share their seeds, so "
            "that they can be compared seed by seed."
        ),
    ),
    "question": Column(
        "text",
        (
            "What the arm is there for. main: routers against the reference; ablation: one part of a "
            "router taken away; sweep: one option at several values; "
            "scaling: more experts or larger models."
        ),
    ),
    "study_runs.status": Column(
        "text", "done; failed, with the reason in message; or not run. Only what is done has numbers."
    ),
    "study_runs.validation_loss": Column(
        "float",
        "Loss of the trained model on text it has not seen, in nats a token: the study's one endpoint.",
        chance="that of the reference arm with the same seed",
        best="the entropy of the text",
    ),
    "noise_low": Column(
        "float",
        "Lower end of the 95 % interval of that loss over validation documents, this one model held fixed.",
        "2.5 % quantile over documents drawn anew",
        misleads=(
            "It is noise of the evaluation alone: training again with another seed may move the loss "
            "by more. No test uses it."
        ),
        title="noise, low",
    ),
    "noise_high": Column("float", "Upper end of that interval.", title="noise, high"),
    "load_cv": Column(
        "float",
        "Coefficient of variation of experts' loads at the end of training, mean over layers.",
        "std(c)/mean(c), ddof 0",
        worst="√(n/k − 1)",
        chance="√((n − k)/(N k)) for random balanced routing",
        best="0; below 0.1 is what sweeps aim at",
        title="load CV",
    ),
    "study_runs.max_over_mean": Column(
        "float",
        "The busiest expert's load over the mean at the end of training, mean over layers.",
        "max c/c̄",
        worst="n/k",
        chance="a little above 1",
        best="1",
        title="max/mean",
    ),
    "study_runs.routing_entropy": Column(
        "float",
        "How undecided routers are at the end of training, in nats, mean over layers.",
        "mean of −Σ p log p",
        worst="0: one answer to everything, or log n: none",
        chance="log n for a router that knows nothing",
        best="depends on the aim",
        title="routing entropy",
    ),
    "study_curves.routing_entropy": Column(
        "float",
        "How undecided routers are since the row before, in nats, mean over layers.",
        "mean of −Σ p log p",
        worst="0: one answer to everything, or log n: none",
        chance="log n for a router that knows nothing",
        best="depends on the aim",
        title="routing entropy",
    ),
    "unused_share": Column(
        "float",
        "The share of experts that no token chose, mean over layers.",
        "#{cᵢ = 0}/n",
        worst="1 − k/n",
        chance="(1 − k/n)^N",
        best="0",
        misleads="It falls with the number of tokens it is counted over.",
        title="unused experts",
    ),
    "dropped_share": Column(
        "float",
        (
            "The share of expert slots that went empty at the end of training because capacity was "
            "spent, mean over layers."
        ),
        "empty slots/(N k)",
        worst="1",
        chance="0 without capacity",
        best="0",
        title="dropped",
    ),
    "consistency": Column(
        "float",
        (
            "Of the experts a token chose in one checkpoint, the share it still chooses in the next, "
            "over the training's last checkpoints."
        ),
        "mean of |S ∩ S′|/k",
        worst="0",
        chance="Σ f f′/k, f the shares of tokens experts have: k/n where loads are even",
        best="1",
    ),
    "study_runs.usage_sigma": Column(
        "float",
        "How much experts' shares of the load move between checkpoints.",
        "mean over experts of std of qᵢ over checkpoints, ddof 0",
        best="0",
        title="usage σ",
        chance="√((n − k)/(n² N k)) for random balanced routing",
    ),
    "study_runs.kendall_tau": Column(
        "float",
        "Whether experts keep their order by load from checkpoint to checkpoint.",
        "Kendall's τ_b",
        worst="−1",
        chance="0",
        best="1",
        title="Kendall τ",
        misleads="Where loads are even, their order is noise: a low τ is then no fault.",
    ),
    "study_runs.tokens_per_second": Column(
        "float",
        "Tokens trained on a second, over the whole training.",
        misleads="Trainings that ran side by side slowed each other down.",
        title="tokens/s",
    ),
    "study_runs.peak_memory_bytes": Column(
        "int",
        (
            "The most memory torch held on the GPU while this was trained; null on a CPU, where "
            "trainings share a process."
        ),
        title="peak memory",
    ),
    "seconds": Column("float", "How long the training took."),
    "parameters_total": Column("int", "Numbers in the model.", title="parameters"),
    "parameters_trainable": Column("int", "Those of them that are trained.", title="trained"),
    "parameters_active": Column("int", "Those of them that one token meets.", title="active"),
    "flops_per_token": Column(
        "int",
        "Floating-point operations of a forward pass, a token.",
        "2 m n k a matrix product",
        title="FLOPs a token",
    ),
    "study_runs.message": Column("text", "Why a training failed; empty otherwise."),
    "study_documents.document": Column(
        "int", "The validation document's number, the same for every arm and seed."
    ),
    "study_documents.tokens": Column("int", "Its tokens that were predicted."),
    "study_documents.loss": Column(
        "float",
        "The trained model's mean loss on it, in nats a token.",
        chance="that of the reference arm with the same seed",
    ),
    "study_curves.step": Column("int", "The training's step."),
    "study_curves.validation_loss": Column(
        "float",
        "Validation loss at that step, in nats a token; null at steps without an evaluation.",
        chance="that of the reference arm at the same step",
    ),
    "reference": Column("text", "The arm that the others of the question are compared with."),
    "seeds": Column("int", "Seeds of which both arm and reference have a result; for the reference its own."),
    "study_comparisons.mean": Column(
        "float", "Mean validation loss over the arm's seeds, in nats a token.", chance="the reference's"
    ),
    "study_comparisons.low": Column(
        "float",
        "Lower end of the mean's 95 % t interval over seeds.",
        "mean − t · sd/√S, ddof 1",
        misleads=(
            "Seeds move all arms together, so intervals of means may overlap where the difference is "
            "plain: read the difference."
        ),
    ),
    "study_comparisons.high": Column("float", "Upper end of that interval."),
    "difference": Column(
        "float",
        (
            "Mean over shared seeds of the arm's loss less the reference's with the same seed: below "
            "0 the arm is better."
        ),
        "mean of (arm − reference)",
        chance="0",
    ),
    "difference_low": Column(
        "float",
        "Lower end of the difference's 95 % interval.",
        "difference − t · standard error",
        chance="below 0",
        misleads=(
            "Of one arm by itself: with many arms some intervals miss 0 by chance. p_adjusted pays for that."
        ),
        title="difference, low",
    ),
    "difference_high": Column(
        "float", "Upper end of that interval.", chance="above 0", title="difference, high"
    ),
    "statistic": Column(
        "float",
        "t: the difference over its standard error.",
        "difference/√(2 s²/S); paired: difference/√(var/S)",
        chance="0 ± 1",
        title="t",
    ),
    "degrees_of_freedom": Column(
        "int",
        "The degrees of freedom of that t.",
        "(S − 1)(R − 1) blocked, S − 1 paired; R arms, S seeds",
        title="df",
    ),
    "study_comparisons.p_value": Column(
        "float",
        "Two-sided p of the difference, not yet corrected for the number of arms.",
        "P(|t| ≥ seen)",
        chance="uniform on 0 to 1",
    ),
    "study_comparisons.p_adjusted": Column(
        "float",
        "The same, corrected for having looked at all arms of the question.",
        "Holm's step-down over the question's arms",
        chance="above 0.05 in 95 of 100 studies, for all arms together",
        title="p, Holm",
    ),
    "test": Column(
        "text",
        (
            "blocked: loss = arm + seed, one residual variance for all arms. paired t: the arm and "
            "the reference alone, where variances differ or there are only two arms. "
            "paired t, shared seeds: so because the arm lacks seeds that the reference has."
        ),
    ),
    "equal_variances_p": Column(
        "float",
        (
            "p of the hypothesis that all arms scatter alike within seeds; below 0.1 every arm is "
            "compared by a paired t. Null for two arms, where both are the same."
        ),
        (
            "Cochran's C of residuals, the noisiest arm's share of all squares, against 20,000 drawn "
            "studies of equal variances"
        ),
        chance="uniform on 0 to 1",
        misleads="With five seeds only differences of several times are seen.",
        title="equal variances p",
    ),
    "hedges_g": Column(
        "float",
        (
            "The difference in units of how much one training strays within its seed, corrected for "
            "few degrees of freedom."
        ),
        "J(df) · difference/s",
        chance="0 ± √(2/S)",
        misleads="Large where seeds hardly matter: a large g may be a small loss.",
        title="Hedges' g",
    ),
    "rank_p": Column(
        "float",
        (
            "Wilcoxon's signed-rank test on the same pairs, corrected by Holm; null below 8 seeds, "
            "where it could not pass."
        ),
        "never below (arms) × 2^(1−S)",
        chance="uniform on 0 to 1",
        title="rank p, Holm",
    ),
    "detectable_difference": Column(
        "float",
        "The difference that a study like this would find in 80 of 100 cases.",
        "noncentral t with the same standard error and df, at level 0.05/arms",
        title="detectable",
    ),
    "study_comparisons.verdict": Column(
        "text",
        (
            "better or worse than the reference: p_adjusted ≤ 0.05. not distinguishable: above. too "
            "few seeds to say: fewer than five shared ones. no spread over seeds: every "
            "seed gave the same difference, so there is nothing to test with. failed: no seed gave a "
            "result, and some were tried. not run: no result yet. reference: what the others are "
            "compared with."
        ),
    ),
}

TABLES: dict[str, Table] = define_tables(
    COLUMNS,
    Table(
        "overhead",
        "What each part of a router costs beside the experts it serves.",
        ("router", "component"),
        ("milliseconds", "flops", "share"),
    ),
    Table(
        "study_runs",
        "Every training of a study: one row an arm and seed, filled by a run or not run.",
        ("arm", "seed"),
        (
            "question",
            "status",
            "validation_loss",
            "noise_low",
            "noise_high",
            "load_cv",
            "max_over_mean",
            "routing_entropy",
            "unused_share",
            "dropped_share",
            "consistency",
            "usage_sigma",
            "kendall_tau",
            "tokens_per_second",
            "peak_memory_bytes",
            "seconds",
            "parameters_total",
            "parameters_trainable",
            "parameters_active",
            "flops_per_token",
            "message",
        ),
    ),
    Table(
        "study_documents",
        (
            "The trained models' losses on every validation document: what the noise of the "
            "evaluation is drawn from."
        ),
        ("arm", "seed", "document"),
        ("domain", "tokens", "loss"),
    ),
    Table(
        "study_curves",
        "How each training of a study went, at the steps that were logged.",
        ("arm", "seed", "step"),
        ("train_loss", "validation_loss", "routing_entropy", "load_cv", "unused_share"),
    ),
    Table(
        "study_comparisons",
        "Every arm of a study against the reference, seed by seed.",
        ("question", "arm"),
        (
            "reference",
            "seeds",
            "mean",
            "low",
            "high",
            "difference",
            "difference_low",
            "difference_high",
            "statistic",
            "degrees_of_freedom",
            "p_value",
            "p_adjusted",
            "test",
            "equal_variances_p",
            "hedges_g",
            "rank_p",
            "detectable_difference",
            "verdict",
        ),
    ),
)
