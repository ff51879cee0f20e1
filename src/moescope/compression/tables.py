"""The tables of a compression: clusters, merges, saliency and damage."""

from __future__ import annotations

from moescope.tables import Column, Table, define_tables

COLUMNS: dict[str, Column] = {
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
    "chance_alone": Column(
        "float",
        "Experts of the compressed layer that stand for one of the original's, if each removed expert "
        "joins one of them at random.",
        "K (1 − 1/K)^(n − K)",
        title="alone by chance",
    ),
    "merge": Column("int", "Number of the merge in its layer, from 0, the nearest first."),
    "merges.left": Column(
        "int", "Left node: an expert's number, or the number of experts plus that of an earlier merge."
    ),
    "merges.right": Column("int", "Right node, numbered likewise."),
    "height": Column(
        "float",
        "Distance of the two nodes in the method's measure: mean outputs (hc_smoe), 1 − cosine of router "
        "logits (m_smoe), weights after matching (weights).",
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
        "Lower end of the 95 % interval of the expert's rank (1: the most salient) by the run's pruning "
        "score (reap if it does not prune by one).",
        "2.5 % quantile over 1,000 resamples of document groups; tied experts share their mean rank",
        chance="1 for an uninformative score",
        misleads="Null under 20 documents.",
        title="rank, low",
    ),
    "rank_high": Column(
        "float",
        "Upper end of that interval. Experts whose interval includes the cut may be pruned by chance.",
        chance="n for an uninformative score",
        title="rank, high",
    ),
    "predicted_error": Column(
        "float",
        "Error of the layer's routed output on calibration states, predicted; each layer alone.",
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
        "KL in nats from the groups' probabilities to the new router's, plus −log of the kept share.",
        "E[KL(p_group ‖ q)] − E[log Σ_kept p]",
        chance="that of the random control",
        best="0",
        title="router KL",
    ),
    "perplexity": Column(
        "float",
        "Perplexity of the compressed model on held-out text. Every domain counts alike.",
        "exp(mean over domains of the domain's mean −log p(next token))",
        worst="above the vocabulary size: worse than guessing",
        chance="that of the random control",
        best="perplexity_original",
        title="perplexity",
    ),
    "perplexity_original": Column(
        "float", "Perplexity of the original on the same text.", title="original's"
    ),
    "loss_increase": Column(
        "float",
        "Loss on held-out text above the original's, in nats per token: the mean of domain means.",
        "ln(perplexity / perplexity_original)",
        chance="that of the random control",
        best="0",
        title="loss increase",
    ),
    "loss_increase_low": Column(
        "float",
        "Lower end of its 95 % interval: a paired bootstrap over held-out documents, within domains.",
        "2,000 resamples",
        misleads="Null under 20 documents, and where a domain has only one; too short where one has under 8.",
        title="loss increase, low",
    ),
    "loss_increase_high": Column("float", "Upper end of that interval.", title="loss increase, high"),
    "js_divergence": Column(
        "float",
        "Jensen-Shannon divergence in nats of next-token distributions from the original's: the mean of "
        "domain means, over at most 8,192 held-out positions.",
        "½ KL(p ‖ m) + ½ KL(q ‖ m), m = (p + q)/2",
        worst="ln 2 = 0.693",
        chance="that of the random control",
        best="0",
        title="JS divergence",
    ),
    "js_divergence_low": Column(
        "float", "Lower end of its 95 % interval, as for loss_increase.", title="JS divergence, low"
    ),
    "js_divergence_high": Column("float", "Upper end of that interval.", title="JS divergence, high"),
    "loss_above_plan": Column(
        "float",
        "Loss of this random control above the plan's, in nats per token: above 0 the plan is better. Null "
        "for the plan.",
        "ln(perplexity of the control / perplexity of the plan)",
        chance="0",
        title="loss above the plan's",
    ),
    "loss_above_plan_low": Column(
        "float",
        "Lower end of its 95 % interval, paired by document.",
        misleads="The interval is over documents; another control of the same kind differs too.",
        title="loss above the plan's, low",
    ),
    "loss_above_plan_high": Column(
        "float", "Upper end of that interval.", title="loss above the plan's, high"
    ),
    "js_above_plan": Column(
        "float",
        "JS divergence of this random control above the plan's, in nats. Null for the plan.",
        chance="0",
        title="JS above the plan's",
    ),
    "js_above_plan_low": Column(
        "float", "Lower end of its 95 % interval, paired by document.", title="JS above the plan's, low"
    ),
    "js_above_plan_high": Column("float", "Upper end of that interval.", title="JS above the plan's, high"),
    "judged_documents": Column(
        "int", "Held-out documents that were judged; every domain counts alike, whatever its tokens."
    ),
    "bytes": Column(
        "int",
        "Bytes of all tensors of the compressed checkpoint.",
        best="bytes_original minus the dropped experts",
    ),
    "bytes_original": Column("int", "Bytes of all tensors of the original.", title="original's bytes"),
}

CLUSTERS = Table(
    "clusters",
    "What becomes of every expert: kept, dropped, or merged into a cluster, and with what weight.",
    ("method", "layer", "expert"),
    ("cluster", "dominant", "weight", "kept", "chance_alone"),
)
MERGES = Table(
    "merges",
    "The merges by which experts were grouped, nearest first; those above the cut are not carried out "
    "(m_smoe: only those that are).",
    ("method", "layer", "merge"),
    ("left", "right", "height", "chance_height", "size", "done"),
)
SALIENCY = Table(
    "saliency",
    "Scores of every expert on the calibration text, which pruning goes by.",
    ("layer", "expert"),
    ("tokens", "gate_weight", "ean", "reap", "rank_low", "rank_high"),
)
DAMAGE = Table(
    "damage",
    "Predicted and measured damage per layer, and of the whole model (layer empty), of the plan and of "
    "random controls.",
    ("method", "layer"),
    (
        *("predicted_error", "measured_error", "router_kl"),
        *("perplexity", "perplexity_original", "loss_increase", "loss_increase_low", "loss_increase_high"),
        *("js_divergence", "js_divergence_low", "js_divergence_high"),
        *("loss_above_plan", "loss_above_plan_low", "loss_above_plan_high"),
        *("js_above_plan", "js_above_plan_low", "js_above_plan_high"),
        *("judged_documents", "bytes", "bytes_original"),
    ),
    optional=("layer",),
)
TABLES = define_tables(COLUMNS, CLUSTERS, MERGES, SALIENCY, DAMAGE)
