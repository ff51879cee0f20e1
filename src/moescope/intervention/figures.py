"""Figures of intervene."""

from __future__ import annotations

from moescope.intervention.tables import LOAD, TABLES
from moescope.plotting.marks import QUANTITY, Dots, Grid, Lines, Scatter, define_figures

EFFECTS = ("loss_difference", "kl", "predictions_changed")
BY_LAYER = "layer.is_unique and layer.nunique() > 2"  # one change in every layer
RINGS = "Rings: costs more than its controls, q < 0.05 over the sweep; controls are other experts of the layer, or random directions."
OVER_DOCUMENTS = "Intervals: 95 % over documents (jackknife of the ratio of sums); none under 10 documents."
# fmt: off
EXPERTS = define_figures(TABLES,
    Grid("effect_map", "intervention_experts", z=("loss_difference", "excess"), ring="claimed", pages=QUANTITY, wide=True, title="Loss difference per expert", details=RINGS),
)
DOMAINS = define_figures(TABLES,
    Grid("effect_by_domain", "interventions", z=("excess", "loss_difference"), x="domain", y="label", where="shown", ring="claimed", pages=QUANTITY, title="Effect by domain",
        details=f"The 12 changes with the largest value in any domain. {RINGS} A domain with fewer than 10 judged documents has no test."),
)
CHANGES = define_figures(TABLES,
    Lines("effects_by_layer", "interventions", y=EFFECTS, where=f"single and {BY_LAYER}", pages=QUANTITY, title="Effect of the change in each layer", details=OVER_DOCUMENTS),
    Dots("effects_compared", "interventions", x="loss_difference", y="label", where=f"single and not ({BY_LAYER})", title="Loss difference of each change", details=OVER_DOCUMENTS),
)
GRIDS = define_figures(TABLES,
    Lines("projection_curve", "projections", y="loss_difference", x="k", by="role", pages="layer", title="Removing router directions",
        details="Every router row loses its component in the span of its own expert's k leading directions. Bands of controls: range over draws. A random subspace of equal rank removes k/d of a row; a random direction changes the row by the same length. Only an effect beyond both is claimed."),
    Lines("top_k_curve", "interventions", y=EFFECTS, x="k", by="domain", where="name == 'top_k' and role == 'change' and domain != ''", pages=QUANTITY, title="Loss against experts per token",
        details=f"Gates follow the model's own rule for the experts that remain. {OVER_DOCUMENTS}"),
)
PREDICTORS = define_figures(TABLES,
    Dots("effect_predictors", "predictors", x="correlation", y="predictor", by="given", title="What predicts an expert's effect",
        details="Spearman's correlation within each layer, averaged over layers. Intervals: layers drawn with replacement, from 12 layers on. Ceiling: what a perfect predictor would reach, as effects differ between two halves of the documents."),
    Scatter("effect_against", "expert_scores", y="effect_times", x="rank_share", by="layer", pages="predictor", opens=LOAD, title="Effect of removing experts by score",
        was={f"effect_against_{name}": name for name in (LOAD, "alignment", "ambiguity", "reap")}),
)
FIGURES = [*EXPERTS, *DOMAINS, *CHANGES, *GRIDS, *PREDICTORS]
