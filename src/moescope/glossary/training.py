"""The columns of trainings and of the lab."""

from __future__ import annotations

from moescope.glossary.column import Column

TRAINING: dict[str, Column] = {
    # --- training
    "steps.tokens": Column(
        "int",
        "Real tokens from the start of training to this step, over all ranks and micro-batches.",
    ),
    "train_loss": Column("float", "Trained loss, mean over the steps since the previous row."),
    "lm_loss": Column(
        "float",
        "Trained loss without the auxiliary loss.",
        "loss − coefficient × auxiliary loss",
        best="the entropy of the text",
    ),
    "aux_loss": Column(
        "float",
        "The load-balancing loss before its coefficient, as the model gives it; null where it gives none.",
        chance="k for a router that spreads tokens evenly (Mixtral's formula)",
    ),
    "validation_loss": Column("float", "Loss on held-out text; null at steps without an evaluation."),
    "validation_loss_published": Column(
        "float",
        "Validation loss with padding as targets, as SoME was published; null without padding.",
    ),
    "learning_rate": Column("float", "Learning rate of the step."),
    "gradient_norm": Column("float", "Norm of the full gradient before clipping.", "‖∂ loss/∂ all weights‖"),
    "tokens_per_second": Column("float", "Real tokens per second since the previous row, over all ranks."),
    "step_seconds": Column("float", "Seconds per step since the previous row."),
    "peak_memory_bytes": Column("int", "Peak memory: of the first rank's GPU, of the process on a CPU."),
    "lm_gradient_norm": Column(
        "float",
        "Gradient norm of the language-model loss into the layer's router.",
        "‖∂ lm_loss/∂ W_router‖",
        worst="0: the router learns nothing from the text, as with renormalised top-1 gates",
        best="depends on the aim",
    ),
    "aux_gradient_norm": Column(
        "float",
        "Gradient norm of the auxiliary loss with its coefficient; null where there is none.",
        "‖∂ (coefficient × aux_loss)/∂ W_router‖",
    ),
    "alerts.expert": Column(
        "int", "The expert, where the alert is about one; null where it is about its layer."
    ),
    "kind": Column(
        "text",
        (
            "dead: an expert without a token for that many steps. max_load: the busiest expert's load over "
            "the mean. unused: the share of experts without a token. entropy: the router is near-certain of "
            "every token, so its gates have little gradient; not raised for routers that are near-certain by "
            "design, such as SPECTRA. nan: gates or logits are not numbers."
        ),
    ),
    "alerts.value": Column("float", "The measured value; null for nan."),
    "threshold": Column("float", "The alert's threshold, a setting."),
    "message": Column("text", "The alert in a sentence."),
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
}
