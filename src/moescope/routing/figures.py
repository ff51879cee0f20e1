"""Figures of a trace and of a monitored training."""

from __future__ import annotations

from typing import Any

from moescope.plotting.marks import QUANTITY, Bars, Grid, Lines, Matrix, Scatter, define_figures, points
from moescope.plotting.style import CATEGORICAL, CATEGORIES, base_layout, counted, grey_line, number
from moescope.reporting.untrusted import plot_words, token_words
from moescope.routing.metrics import DIAGNOSTICS
from moescope.routing.tables import TABLES
from moescope.verb import Drawable, Figure, FigureSpec, Slider, Tables, Trace

BALANCE = ("cv", "gate_weight_cv", "max_violation", "gate_weight_max_violation", "gini", "gate_weight_gini", "load_entropy_share",
           "gate_weight_load_entropy_share", "load_balancing_loss", "unused", "dropped")  # fmt: skip
DECISIONS = ("routing_entropy", "chosen_entropy", "confidence", "top_gap", "selection_margin", "z_loss")
SPECIALISATION = (
    "domain_information",
    "purity",
    "token_information",
    *(f"vocabulary_specialisation_{role}" for role in ("input", "next", "predicted")),
)
SEPARATION_OF = ("expert_overlap", "gram_orthogonality", "router_similarity_abs", "router_similarity_max")
CAPACITY = "metric != 'dropped' or value > 0"  # slots are left empty only where capacity is limited
MAP_DETAILS = "Size: load; colour: domain of highest affinity. Axes have no unit, and layers cannot be compared. PCA preserves large distances, t-SNE and UMAP neighbourhoods; gaps between their groups mean little."  # fmt: skip
BAR = {"thickness": 12, "outlinewidth": 0, "len": 0.8, "y": 1, "yanchor": "top"}  # the colours of experts
LONGEST_TOKEN = 16  # letters of a token on an axis


def routing_ribbon(tables: Tables) -> Figure:
    """The first expert of every token and layer along a text, and the experts shared with the token before."""
    data: list[Trace] = []
    names, captions, layouts = [], [], []
    n = len(CATEGORICAL)
    more = " …" if tables["ribbon"]["expert"].max() >= n else ""
    steps = [[place, color] for i, color in enumerate(CATEGORICAL) for place in (i / n, (i + 1) / n)]
    for (document, domain), rows in tables["ribbon"].groupby(["document", "domain"]):
        tokens = rows.drop_duplicates("position").sort_values("position")
        words = map(token_words, tokens["token"], tokens["token_id"])
        cut = [plot_words(word.replace("⏎\n", "⏎"))[:LONGEST_TOKEN] for word in words]
        at = [f"{position} {word}" for position, word in zip(tokens["position"], cut, strict=True)]
        experts = rows.pivot(index="layer", columns="position", values="expert").astype(float)
        ribbon: Trace = {"type": "heatmap", "x": at, "y": [str(layer) for layer in experts.index]}
        ribbon |= {"z": experts.to_numpy() % n, "zmin": -0.5, "zmax": n - 0.5, "colorscale": steps}
        ribbon |= {"customdata": experts.to_numpy(), "meta": {"categories": True}}
        ribbon["colorbar"] = {"title": {"text": "expert", "side": "top"}, "tickvals": [*range(n)], **BAR}
        ribbon["colorbar"]["ticktext"] = [f"{i}{more}" for i in range(n)]
        ribbon["hovertemplate"] = "%{x}<br>layer %{y}<br>expert %{customdata}<extra></extra>"
        line = {"line": {"color": CATEGORICAL[0], "width": 1, "shape": "hvh"}, "fill": "tozeroy"}
        hover = "%{x}<br>%{y:.2f} of its experts<extra></extra>"
        column = TABLES["ribbon"].quantity("shared")
        shared = points(
            "shared with the previous token", at, tokens["shared"], "lines", **line, hovertemplate=hover
        )
        level = grey_line(at, tokens["shared_chance"].to_numpy(), column.chance_label)
        data += [ribbon, {**shared, "yaxis": "y2"}, {**level, "yaxis": "y2"}]
        axes: dict[str, Any] = {
            "xaxis": {**CATEGORIES, "anchor": "y2", "nticks": 12},
            "yaxis": {**CATEGORIES, "autorange": "reversed", "domain": [0.27, 1], "automargin": True},
            "yaxis2": {"title": {"text": "shared"}, "range": [0, 1], "domain": [0, 0.2], "tickvals": [0, 1]},
        }
        layouts.append(base_layout("token", "layer", **axes))
        mean, chance = tokens["shared"].mean(), tokens["shared_chance"].mean()
        names.append(f"{document}, {domain}")
        captions.append(
            f"{counted(len(tokens), 'token')} of document {document} ({domain}): a token shares {number(mean)} of its "
            f"experts with the previous one ({column.chance_label}: {number(chance)})."
        )
    return Figure(
        "routing_ribbon",
        "First expert of every token and layer",
        captions[0],
        ("ribbon.expert", "shared"),
        data,
        layouts[0],
        Slider("document", names, 0, 3, captions, layouts),
        max(300, min(150 + 16 * tables["ribbon"]["layer"].nunique(), 640)),
        f"Colour: the expert with the largest gate; experts {n} apart share a colour. Drag to zoom until words "
        "can be read, double-click to go back. Below: share of a token's experts that the previous token chose too.",
    )


# fmt: off
LOAD = define_figures(TABLES,
    Grid("load_map", "load_totals", z="times_even", ring="claimed", wide=True, title="Load per layer and expert", was={"load_heatmap": ""},
        details="Colour starts where the noise over documents ends. Ringed: not an even share, Holm-corrected over all experts."),
    Bars("usage_by_expert", "load", y="tokens", x="expert", by="domain", stacked=True, pages="layer", title="Tokens per expert by domain", was={"usage_by_expert_log": ""}),
    Lines("lorenz", "load_totals", y="load_share", x="rank_share", by="layer", title="Lorenz curve of the load", was={"usage_by_rank": ""},
        details="Busiest experts first: a curve far above the grey band is uneven load. Band: 95 % of random routings of as many tokens."),
    Lines("balance_by_layer", "routing_layers", y=BALANCE, where=CAPACITY, pages=QUANTITY, title="Load balance by layer", details="Bars: 95 % intervals over documents of the value without the bias of few documents, of which chance is even loads (CV 0), not the dashed line.",
        was={"cv_by_layer": "cv", "max_violation_by_layer": "max_violation", "gini_by_layer": "gini", "load_entropy_by_layer": "load_entropy_share", "load_balancing_loss_by_layer": "load_balancing_loss"}),
    Lines("by_domain", "routing_layers", y=("cv", "routing_entropy"), by="domain", pages=QUANTITY, title="Balance and decisions by domain", was={"cv_by_domain": "cv", "routing_entropy_by_domain": "routing_entropy"}),
)
DECISION = define_figures(TABLES,
    Lines("decisions_by_layer", "routing_layers", y=DECISIONS, pages=QUANTITY, title="Routing decisions by layer",
        was={"routing_entropy_by_layer": "routing_entropy", "confidence_by_layer": "confidence", "selection_margin_by_layer": "selection_margin", "z_loss_by_layer": "z_loss"}),
    Lines("sequence_by_layer", "routing_layers", y=("sequential_consistency", "adjacent_jaccard"), title="Routing shared with the previous token"),
)
RIBBON: list[Drawable] = [FigureSpec("routing_ribbon", ("ribbon",), routing_ribbon, wide=True)]
SEPARATION = define_figures(TABLES,
    Grid("coactivation_heatmap", "coactivation", z="over", x="expert_a", y="expert_b", order="place_a", pages="layer", title="Co-activation of expert pairs", details="From 32 experts on, co-activated experts stand side by side."),
    Lines("separation_by_layer", "routing_layers", y=SEPARATION_OF, pages=QUANTITY, title="Separation of experts by layer",
        was={"expert_overlap_by_layer": "expert_overlap", "gram_orthogonality_by_layer": "gram_orthogonality", "router_similarity_by_layer": "router_similarity_abs"}),
)
MAPS = define_figures(TABLES, *(
    Scatter(f"expert_map_{of}", "maps", x="x", y="y", by="main_domain", size="times_even", label="expert", told=("neighbours", "variance"), where=f"of == '{of}' and best", pages="layer",
        title=f"Map of experts by {words}", details=MAP_DETAILS, was={f"expert_map_{of}_{method}": "" for method in ("pca", "tsne", "umap")})
    for of, words in (("router", "router rows"), ("coactivation", "co-activation profiles"), ("outputs", "mean outputs"))
))
SPECIALISED = define_figures(TABLES,
    Grid("specialisation_map", "specialisation", z="dominant_share", x="group_place", hue="main_domain", label="expert", wide=True, title="Main domain of every expert",
        details="Colour: the domain that uses the expert most; its strength: how far that share lies above that of permuted labels of documents. Pale: within the 95 % interval of permuted labels. Each layer's experts stand in groups, the strongest first."),
    Grid("affinity_heatmap", "domains", z="affinity", y="domain", ring="claimed", pages="layer", wide=True, title="Domain affinity of experts",
        details="Colour starts where the noise over documents ends. Ringed: unlike the mean domain, corrected over all experts, layers and domains."),
    Lines("specialisation_by_layer", "routing_layers", y=SPECIALISATION, pages=QUANTITY, title="Specialisation by layer",
        was={"purity_bars": "purity", "domain_information_by_layer": "domain_information", "token_information_by_layer": "token_information"}),
)
STEPS = define_figures(TABLES,
    Lines("balance_by_step", "routing_layers", y=(*BALANCE, "routing_entropy"), x="step", by="layer", where=CAPACITY, pages=QUANTITY, title="Load balance by step",
        was={"cv_by_step": "cv", "max_violation_by_step": "max_violation", "load_entropy_by_step": "load_entropy_share", "routing_entropy_by_step": "routing_entropy", "dropped_by_step": "dropped",
             "middle_gini_by_step": "gini", "middle_load_entropy_bits_by_step": "load_entropy_share", "middle_unused_by_step": "unused"}),
    Grid("load_by_step", "load_totals", z="times_even", x="step", y="expert", panels="layer", turns="dead", wide=True, title="Load per expert by step", was={"expert_by_step": "", "usage_area": ""},
        details="A panel per layer, all with one scale. Cross: from this step on the expert has under a hundredth of an even share; ring: it comes back."),
    Lines("saturation_curves", "stability", y=("saturation_topk", "saturation_top1"), x="step_a", by="layer", where="step_b == step_b.max()", pages=QUANTITY, title="Routing saturation by step"),
    Matrix("consistency_matrix", "stability", z="routing_consistency_corrected", x="step_a", y="step_b", pages="layer", title="Routing consistency between checkpoints"),
)
TRAINING = define_figures(TABLES,
    Lines("diagnostics_by_step", "routing_layers", y=tuple(DIAGNOSTICS), x="step", by="layer", pages=QUANTITY, title="Router diagnostics by step", was={f"{name}_by_step": name for name in DIAGNOSTICS}),
    Lines("router_gradient_by_step", "router_gradients", y=("lm_gradient_norm", "aux_gradient_norm"), x="step", by="layer", pages=QUANTITY, wide=True, title="Gradient norm per router",
        details="A router that the loss of the text does not reach learns nothing from it."),
)
# fmt: on
FIGURES: list[Drawable] = [*LOAD, *DECISION, *RIBBON, *SEPARATION, *MAPS, *SPECIALISED, *STEPS]  # of a trace
MONITORED = [*STEPS[:2], *TRAINING]
