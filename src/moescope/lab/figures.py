"""Figures of trainings, of a study's arms and of claims."""

from __future__ import annotations

from moescope.lab.tables import OVER_SEEDS, TABLES, TRAIN_TABLES
from moescope.plotting.marks import QUANTITY, Bars, Dots, Grid, Lines, define_figures

# fmt: off
LOSSES = define_figures(TRAIN_TABLES,
    Lines("loss_by_step", "steps", y=("validation_loss", "lm_loss", "validation_loss_published"), x="step", wide=True, title="Training and validation loss",
        details="Loss of the text without auxiliary losses; training: mean since the previous point. Padding counted: as in SoME's published comparison; it lowers the loss."),
    Lines("gain_by_domain", "evaluations", y="gain", x="step", by="domain", wide=True, title="Gain over the unigram baseline by domain"),
)
SPEED = define_figures(TRAIN_TABLES,
    Lines("training_by_step", "steps", y=("gradient_norm", "tokens_per_second", "learning_rate"), x="step", pages=QUANTITY, title="Gradient, speed and learning rate",
        was={"gradient_by_step": "gradient_norm", "speed_by_step": "tokens_per_second"}),
)
(BASE_LOSSES,) = define_figures(TRAIN_TABLES,
    Dots("base_losses", "base_losses", x="difference", y="domain", by="model", where="model != 'untouched'", wide=True, title="Loss against the untouched model",
        details="Bars: 95 % over documents, paired; none under 20 documents. One training, so no other seeds."),
)
(LOSS_BY_RUN,) = define_figures(TRAIN_TABLES,
    Lines("loss_by_run", "evaluations", y="loss", x="step", by="run", title="Validation loss of every run"),
)
(LOSS_GAP,) = define_figures(TRAIN_TABLES,
    Lines("loss_gap", "loss_gaps", y="loss_gap", x="step", by="run", title="Difference of the validation losses", details="Band: least and largest difference over the domains of the text."),
)
(LOAD_BY_RUN,) = define_figures(TRAIN_TABLES,
    Lines("load_by_run", "load_totals", y="times_even", x="rank_share", by="run", pages="layer", title="Sorted load per layer"),
)
TRAIN_FIGURES = [*LOSSES, BASE_LOSSES, *SPEED]

ARMS = define_figures(TABLES,
    Dots("differences", "study_comparisons", x="difference", y="arm", by="verdict", each=("study_pairs", "difference"), wide=True, title="Difference from the reference per arm", was={"losses": ""},
        details="Validation loss minus that of the reference under the same seed; left of 0 is better. Small dots: seeds; bars: 95 % intervals of the mean over seeds, per arm. Better and worse: p ≤ 0.05 after Holm's correction for all arms, from five seeds on. Arms without a result stand in the table."),
)
OVERALL = define_figures(TABLES,
    Dots("noise_and_spread", "study_comparisons", x=("seed_std", "difference_std", "noise_std"), y="arm", wide=True, title="Spread over seeds and evaluation noise",
        details="Over seeds: of an arm's trainings. Of the difference: over the seeds that arm and reference share, which the tests use. Over documents: of one model's loss under resampled validation documents, used in no test."),
    Grid("difference_by_domain", "study_domains", z="difference", x="domain", y="arm", wide=True, title="Difference from the reference by domain",
        details="Means over seeds; not tested. Colour begins at the end of a cell's own 95 % interval over seeds."),
)
ALONG = define_figures(TABLES,
    Lines("by_value", "study_values", y=("validation_loss", "load_cv"), x="value", by="line", pages=QUANTITY, wide=True, title="Loss and load along an axis", was={"loss_by_value": "validation_loss", "load_by_value": "load_cv"},
        details="Means over seeds; bands: least and largest of them."),
)
OVERHEAD = define_figures(TABLES,
    Bars("overhead_shares", "overhead", y="share", x="router", by="part", stacked=True, wide=True, title="Time per block by component"),
)
CURVES = define_figures(TABLES,
    Lines("arms_by_step", "study_means", y=OVER_SEEDS, x="step", by="arm", pages=QUANTITY, wide=True, title="Training curves of the arms", was={"difference_by_step": "difference", **{f"arms_{name}_by_step": name for name in OVER_SEEDS if name != "difference"}},
        details="Means over finished seeds; bands of up to five arms: least and largest of the seeds."),
)
(CLAIMS,) = define_figures(TABLES,
    Dots("claims", "study_claims", x="estimate", y="name", by="verdict", where="estimand != 'least'", pages="measure", opens="validation loss", wide=True, title="Claims, new minus reference",
        details="Means over seeds with 95 % t intervals, not corrected; the verdict is, for all claims."),
)
STUDY_FIGURES = [*ARMS, *OVERALL, *ALONG, *OVERHEAD, *CURVES]
