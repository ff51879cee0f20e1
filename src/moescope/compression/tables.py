"""The tables of a compression: clusters, merges, saliency and damage."""

from __future__ import annotations

from moescope.tables import Column, Table, define_tables

COLUMNS: dict[str, Column] = {
    # --- compression
    "method": Column(
        "text",
        "The method the experts were chosen by; random (seed N) for a control that does as much at random.",
    ),
    "cluster": Column(
        "int",
        (
            "The number the expert, or the one it is merged into, has in the compressed model; null "
            "where it is dropped."
        ),
    ),
    "dominant": Column(
        "bool",
        "Whether this member's neurons give the order that the others of its cluster are brought into.",
    ),
    "weight": Column(
        "float",
        "Its share in the merged expert; shares of a cluster sum to 1. Null where it is dropped.",
        chance="1 for an expert kept alone",
    ),
    "kept": Column(
        "bool", "Whether anything of this expert is in the compressed model: false where it is dropped."
    ),
    "merge": Column("int", "The step's number in its layer, from 0, the nearest first."),
    "merges.left": Column(
        "int",
        (
            "What is joined: an expert's number; from the number of experts on, what step (number − "
            "experts) made."
        ),
    ),
    "merges.right": Column("int", "What it is joined with, numbered alike."),
    "height": Column(
        "float",
        (
            "How far apart the two are in the method's own measure: mean outputs (hc_smoe), 1 − "
            "cosine of router logits (m_smoe), weights after matching (weights)."
        ),
        chance="chance_height",
        best="0",
    ),
    "chance_height": Column(
        "float",
        (
            "The height of experts that have nothing to do with each other: outputs of the same "
            "sizes in unrelated directions, 1 + 1/(n − 1), or matched random experts."
        ),
        title="height by chance",
    ),
    "merges.size": Column("int", "Experts in what results.", chance="2 where two experts join"),
    "done": Column("bool", "Whether the plan carries the step out: false above the cut."),
    "saliency.tokens": Column(
        "int",
        "Calibration tokens that were routed to the expert: what frequency prunes by.",
        "|X|",
        worst="0",
        chance="tokens · k/n",
    ),
    "saliency.gate_weight": Column(
        "float",
        "Sum of the gates it was given.",
        "Σ_X g",
        worst="0",
        chance="the mean over the layer's experts",
        title="gate weight",
    ),
    "ean": Column(
        "float",
        "Sum over its tokens of the norm of its output, gate left out.",
        "Σ_X ‖f‖",
        worst="0",
        chance="the mean over the layer's experts",
        title="output norms",
    ),
    "reap": Column(
        "float",
        "Mean over its tokens of gate times norm of its output; 0 without a token.",
        "(1/|X|) Σ_X g ‖f‖",
        worst="0",
        chance="the mean over the layer's experts",
        misleads="A mean over a handful of tokens is loose: read the interval of its rank.",
        title="REAP",
    ),
    "rank_low": Column(
        "float",
        (
            "Lower end of the 95 % interval of the expert's rank, 1 the most salient, by the score "
            "the run prunes by (reap where it does not prune)."
        ),
        "2.5 % quantile over 1,000 draws of groups of documents; tied experts share their mean rank",
        chance="1 where nothing sets experts apart",
        misleads="Null under 20 documents.",
        title="rank, low",
    ),
    "rank_high": Column(
        "float",
        (
            "Upper end of that interval. Experts whose intervals reach over the cut may be pruned or "
            "kept by luck."
        ),
        chance="n where nothing sets experts apart",
        title="rank, high",
    ),
    "predicted_error": Column(
        "float",
        (
            "Error of the layer's routed output on calibration states, foretold before anything is "
            "written; each layer by itself."
        ),
        "‖y′ − y‖/‖y‖",
        chance="that of the random control",
        best="0",
        misleads=(
            "Shared experts are left out of both. Errors that travel from layer to layer are not in "
            "it: read perplexity."
        ),
        title="predicted error",
    ),
    "measured_error": Column(
        "float",
        "The same of the written model's own blocks, on states of held-out text.",
        "‖y′ − y‖/‖y‖",
        chance="that of the random control",
        best="0",
        title="measured error",
    ),
    "router_kl": Column(
        "float",
        (
            "How far the new router is from the old one: from the probability of each group to the "
            "new router's, plus −log of the share that dropped experts had. In nats."
        ),
        "E[KL(p_group ‖ q)] − E[log Σ_kept p]",
        chance="that of the random control",
        best="0",
        title="router KL",
    ),
    "perplexity": Column(
        "float",
        "Perplexity of the compressed model on held-out text.",
        "exp(−mean log p(next token))",
        worst="above the vocabulary's size: worse than guessing",
        chance="that of the random control",
        best="perplexity_original",
        title="perplexity",
    ),
    "perplexity_original": Column(
        "float", "Perplexity of the original on the same text.", title="original's"
    ),
    "js_divergence": Column(
        "float",
        (
            "Jensen-Shannon divergence of next-token distributions from the original's, mean over "
            "held-out positions (8,192 at most), in nats."
        ),
        "½ KL(p ‖ m) + ½ KL(q ‖ m), m = (p + q)/2",
        worst="ln 2 = 0.693",
        chance="that of the random control",
        best="0",
        title="JS divergence",
    ),
    "bytes": Column(
        "int",
        "Bytes of all tensors of the compressed checkpoint.",
        best="bytes_original less what was dropped",
    ),
    "bytes_original": Column("int", "Bytes of all tensors of the original.", title="original's bytes"),
}

TABLES: dict[str, Table] = define_tables(
    COLUMNS,
    Table(
        "clusters",
        "What a plan does with each expert: kept as it is, merged with others, or dropped.",
        ("method", "layer", "expert"),
        ("cluster", "dominant", "weight", "kept"),
    ),
    Table(
        "merges",
        (
            "The steps by which experts were grouped, from the nearest on; those above the cut "
            "are not carried out. Of m_smoe only those that are."
        ),
        ("method", "layer", "merge"),
        ("left", "right", "height", "chance_height", "size", "done"),
    ),
    Table(
        "saliency",
        "How much each expert did on the calibration text: the scores that pruning goes by.",
        ("layer", "expert"),
        ("tokens", "gate_weight", "ean", "reap", "rank_low", "rank_high"),
    ),
    Table(
        "damage",
        (
            "What compressing costs: foretold and measured error of each layer, and of the whole "
            "model (layer empty) beside the original and the random control."
        ),
        ("method", "layer"),
        (
            "predicted_error",
            "measured_error",
            "router_kl",
            "perplexity",
            "perplexity_original",
            "js_divergence",
            "bytes",
            "bytes_original",
        ),
        optional=("layer",),
    ),
)
