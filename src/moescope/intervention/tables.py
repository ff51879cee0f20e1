"""The tables of intervene: keys, columns and the meaning of each column.

`summarise` makes the table `interventions` of three frames: the table `intervention_documents`, the plan
(PLAN_COLUMNS, one row per intervention) and what happened to routing (ROUTING_COLUMNS, likewise). A row of
the plan whose `of` is set is a control of that intervention. In a sweep of experts `of` is null: experts of
one layer are each other's controls, matched by `calibration_load`.
"""

from __future__ import annotations

from moescope.tables import Column, Table, define_tables

PLAN_COLUMNS = (
    "intervention", "change", "name", "layer", "layer_name", "expert", "k", "draw", "role", "of",
    "calibration_load",
)  # fmt: skip
ROUTING_COLUMNS = (
    "intervention", "load", "load_changed", "entropy", "entropy_changed", "cv", "cv_changed",
)  # fmt: skip
ALL = "all"  # domain of a row on all documents together
# In a layer of fewer experts an expert is compared with all others: among 4, one that matters would decide.
FEW_EXPERTS = 16

# fmt: off
COLUMNS: dict[str, Column] = {
    "intervention": Column("int", "Number of the intervention in the run, from 0."),
    "change": Column("text", "What was changed, as --set takes it."),
    "document": Column("int", "Number of the document in the text, from 0."),
    "intervention_documents.domain": Column("text", "The name the document's text was given with."),
    "intervention_documents.tokens": Column("int", "Tokens that were predicted: all but the first."),
    "intervention_documents.loss": Column("float", "Loss of the untouched model, summed over tokens.",
        "−Σ log p(next token)", unit="nats"),
    "loss_changed": Column("float", "The same loss with the change.", unit="nats", title="loss with change"),
    "intervention_documents.kl": Column("float",
        "Divergence of the next-token distributions, summed over tokens.",
        "Σ KL(untouched ‖ changed)", best="0", unit="nats"),
    "intervention_documents.predictions_changed": Column("int",
        "Tokens whose most likely prediction differs."),
    "intervention_documents.choices": Column("int",
        "Choices of experts by the document's tokens in the MoE layers after the first changed one."),
    "intervention_documents.choices_changed": Column("int",
        "Of those, experts that the token does not choose without the change."),
    # --- interventions
    "interventions.domain": Column("text", "The domain of the documents; all: all documents together."),
    "interventions.name": Column("text", "Kind of the change: ablate, skip, project_out, ..."),
    "interventions.layer": Column("int", "The layer that is changed; null where several are."),
    "interventions.expert": Column("int", "The expert that is changed; null where none or several are."),
    "interventions.k": Column("int", "Directions of a projection, or experts per token; null otherwise."),
    "interventions.draw": Column("int", "Number of the random draw, of a random control."),
    "role": Column("text",
        "change: what was asked for. random subspace, random direction, other expert: a control of it."),
    "of": Column("int", "The intervention that this is a control of; null where it is none."),
    "interventions.documents": Column("int", "Judged documents."),
    "interventions.tokens": Column("int", "Tokens that were predicted."),
    "interventions.loss": Column("float", "Loss of the untouched model.", "−Σ log p(next token)/tokens",
        unit="nats per token"),
    "loss_difference": Column("float", "Loss with the change minus loss without.",
        "Σ_documents (loss changed − loss)/Σ tokens", chance="0: no effect", title="loss difference",
        unit="nats per token",
        misleads="Removing any expert in use changes the loss; compare with controls."),
    "loss_difference_low": Column("float",
        "Lower end of the 95 % interval of loss_difference over documents (ratio jackknife)."),
    "loss_difference_high": Column("float", "Upper end of that interval."),
    "interventions.kl": Column("float", "Divergence of the next-token distributions.",
        "Σ KL(untouched ‖ changed)/tokens", best="0", title="KL divergence", unit="nats per token"),
    "kl_low": Column("float", "Lower end of the 95 % interval of kl over documents."),
    "kl_high": Column("float", "Upper end of that interval."),
    "interventions.predictions_changed": Column("float",
        "Share of tokens whose most likely prediction differs.", best="0", worst="1",
        title="changed predictions"),
    "predictions_changed_low": Column("float", "Lower end of its 95 % interval over documents."),
    "predictions_changed_high": Column("float", "Upper end of that interval."),
    "controls": Column("int", "Controls that the change is compared with."),
    "excess": Column("float",
        "loss_difference minus its mean over the controls, paired by document. Controls of an expert: the 4 "
        "of its layer nearest in load; all others where the layer has fewer than 16. Controls of a "
        "projection: random ones, of the two kinds the one with the larger p.",
        chance="0: no more than controls", unit="nats per token",
        misleads="An expert that hardly matters exceeds controls that matter less: read both."),
    "excess_low": Column("float",
        "Lower end of the 95 % interval of excess over documents, and over draws of random controls.",
        misleads="Null under 10 documents, and against a single random draw."),
    "excess_high": Column("float", "Upper end of that interval."),
    "p": Column("float", "One-sided p value: an excess as large if the change hurt no more than controls."),
    "q": Column("float",
        "p corrected for all changes of the run, and for all domains in rows of single domains "
        "(Benjamini-Hochberg)."),
    "interventions.load": Column("float",
        "Share of choices of the changed expert in its layer, untouched, on judged documents.",
        "tokens of the expert/choices of the layer", chance="1/n"),
    "load_changed": Column("float", "The same share with the change.", title="load with change"),
    "interventions.entropy": Column("float",
        "Entropy of the router's probabilities in the first changed layer, mean over tokens, untouched.",
        "−Σ_e p(e) log p(e)", worst="0", best="log n", unit="nats",
        misleads="Null where the router has no probabilities."),
    "entropy_changed": Column("float", "The same entropy with the change.", title="entropy with change"),
    "interventions.cv": Column("float",
        "Coefficient of variation of the load over experts in the first changed layer, untouched.",
        "standard deviation/mean", best="0", title="CV of load"),
    "cv_changed": Column("float", "The same with the change.", title="CV of load with change"),
    "interventions.choices_changed": Column("float",
        "Share of choices in later MoE layers that differ from those without the change.",
        "changed choices/choices", best="0", worst="1", title="changed choices downstream"),
    # --- a sweep of experts
    "intervention_experts.load": Column("float",
        "Share of choices of the expert in its layer, on calibration documents.", chance="1/n"),
    "intervention_experts.kl": Column("float", "Divergence of the next-token distributions.",
        best="0", unit="nats per token"),
    "half_a": Column("float", "loss_difference on one half of the documents.", unit="nats per token"),
    "half_b": Column("float", "loss_difference on the other half.", unit="nats per token"),
    "domain_most": Column("text", "The domain with the largest loss_difference.", title="domain hit most"),
    # --- text
    "prompt": Column("text", "The prompt, as --generate gave it."),
    "intervention_text.position": Column("int", "Place of the token in the continuation, from 0."),
    "intervention_text.token": Column("text", "The most likely token, untouched; null after the end."),
    "token_changed": Column("text", "The most likely token with the change; null after the end."),
}

TABLES: dict[str, Table] = define_tables(
    COLUMNS,
    Table("intervention_documents", "Loss, divergence and routing per intervention and judged document.",
        ("intervention", "document"),
        ("change", "domain", "tokens", "loss", "loss_changed", "kl", "predictions_changed", "choices",
         "choices_changed")),
    Table("interventions", "Effect of every intervention with its interval, overall and per domain.",
        ("intervention", "domain"),
        ("change", "name", "layer", "expert", "k", "draw", "role", "of", "documents", "tokens", "loss",
         "loss_difference", "loss_difference_low", "loss_difference_high", "kl", "kl_low", "kl_high",
         "predictions_changed", "predictions_changed_low", "predictions_changed_high", "controls", "excess",
         "excess_low", "excess_high", "p", "q", "load", "load_changed", "entropy", "entropy_changed", "cv",
         "cv_changed", "choices_changed")),
    Table("intervention_experts", "Effect of the change per expert, of a sweep of experts.",
        ("layer", "expert"),
        ("loss_difference", "loss_difference_low", "loss_difference_high", "excess", "excess_low",
         "excess_high", "q", "load", "kl", "half_a", "half_b", "domain_most")),
    Table("intervention_text", "Continuation of a prompt with and without the change.",
        ("intervention", "prompt", "position"),
        ("token", "token_changed")),
)
# fmt: on
