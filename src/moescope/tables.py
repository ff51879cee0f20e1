"""Every table a run may hold.

Keys, columns, dtypes, and the meaning of each column, which is also the report's glossary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moescope.errors import BadInput, unknown_name
from moescope.glossary import COLUMNS, Column

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

SCHEMA_VERSION = 1

VIEW = ("matrix", "router", "fold_norm")  # the choices that change an alignment


@dataclass(frozen=True)
class Table:
    """A table's name, what identifies a row, and what a row holds.

    `layer_name` follows `layer` on disk, and is no key.
    """

    name: str
    meaning: str
    keys: tuple[str, ...]
    values: tuple[str, ...]
    optional: tuple[str, ...] = ()  # keys that may be null: what the row is about has none

    @property
    def columns(self) -> tuple[str, ...]:
        names = [*self.keys, *self.values]
        if "layer" in names:
            names.insert(names.index("layer") + 1, "layer_name")
        return tuple(names)

    def column(self, name: str) -> Column:
        return COLUMNS.get(f"{self.name}.{name}") or COLUMNS[name]


TABLES: dict[str, Table] = {
    table.name: table
    for table in [
        Table(
            "alignment",
            "How well each router row fits its own expert, at every k.",
            ("step", "layer", *VIEW, "k", "expert"),
            (
                "align",
                "random_expectation",
                "effect_over_random",
                "shuffle_mean",
                "shuffle_std",
                "delta_vs_shuffle",
                "z_vs_shuffle",
                "cos_squared",
                "margin",
                "identified",
            ),
        ),
        Table(
            "alignment_layers",
            "The same, one row per layer and k: plain names are means over the layer's experts.",
            ("step", "layer", *VIEW, "k"),
            (
                "align",
                "random_expectation",
                "effect_over_random",
                "shuffle_mean",
                "shuffle_std",
                "delta_vs_shuffle",
                "z_vs_shuffle",
                "cos_squared",
                "argmax_accuracy",
                "assignment_accuracy",
                "alignment_margin",
                "positive_margin_share",
                "z_ceiling",
                "perm_z",
                "p_adjusted",
                "degenerate",
                "n_experts",
                "d_model",
            ),
        ),
        Table(
            "alignment_tests",
            "Whether a layer's pairing of router rows and experts beats chance, corrected for multiple k.",
            ("step", "layer", *VIEW),
            (
                "best_k",
                "best_accuracy",
                "p_value",
                "q_value",
                "p_lower",
                "p_accuracy",
                "n_pairings",
                "exact",
                "verdict",
            ),
        ),
        Table(
            "pairs",
            (
                "The whole matrix M(k): every router against every expert (beyond 32 experts at k = "
                "1, 16, 128, best_k, k_star)."
            ),
            ("step", "layer", *VIEW, "k", "router_index", "expert"),
            ("align",),
        ),
        Table(
            "nulls",
            "The permutation null of the mean diagonal in 60 bins, at the ks of the density figure.",
            ("step", "layer", *VIEW, "k", "bin"),
            ("left", "right", "density", "observed"),
        ),
        Table(
            "similarity",
            "Every pair of experts: their top singular vectors (k = 1) and leading subspaces.",
            ("step", "layer", "matrix", "k", "expert_a", "expert_b"),
            ("cosine", "overlap", "largest_principal_cosine"),
        ),
        Table(
            "orthogonality",
            (
                "Statistics over a layer's expert pairs: of the signed cosine at k = 1, of the "
                "subspace overlap beyond."
            ),
            ("step", "layer", "matrix", "k"),
            (
                "mean",
                "mean_abs",
                "max",
                "min",
                "std",
                "max_abs",
                "chance",
                "n_pairs_above_0_3",
                "n_pairs_above_0_7",
                "d_model",
            ),
        ),
        Table(
            "ambiguity",
            "Layers ranked by how hard it is to tell their experts apart.",
            ("step", "layer", *VIEW),
            (
                "rank",
                "ambiguity_score",
                "absolute_score",
                "absolute_chance",
                "k_star",
                "argmax_accuracy",
                "alignment_margin",
                "z_score",
                "accuracy_term",
                "margin_term",
                "z_term",
                "level",
            ),
        ),
        Table(
            "spectra",
            "Each expert matrix's singular values, and their shape in a few numbers.",
            ("step", "layer", "matrix", "expert"),
            (
                "singular_values",
                "frobenius",
                "spectral_norm",
                "stable_rank",
                "effective_rank",
                "rank",
                "condition",
                "fallback",
            ),
        ),
        Table(
            "geometry",
            (
                "How far apart two experts are, matrix by matrix: the same expert in two "
                "checkpoints, or two members of a cluster."
            ),
            ("series", "layer", "matrix", "expert_a", "expert_b"),
            ("relative_l2", "cosine", "norm_ratio", "sv_alignment", "matched"),
        ),
        Table(
            "geometry_layers",
            (
                "The same, one row a layer: mean and spread over its pairs, with the distance of "
                "unrelated experts and that of matched random ones."
            ),
            ("series", "layer", "matrix"),
            (
                "relative_l2_mean",
                "relative_l2_sd",
                "relative_l2_low",
                "relative_l2_high",
                "sv_alignment_mean",
                "sv_alignment_sd",
                "sv_alignment_low",
                "sv_alignment_high",
                "null_l2",
                "null_l2_matched",
                "null_sv_matched",
            ),
        ),
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
        Table(
            "load",
            (
                "How often each expert was chosen, and with how much gate; one row a domain and "
                "phase, no sums over them."
            ),
            ("step", "layer", "phase", "domain", "expert"),
            ("tokens", "gate_weight"),
        ),
        Table(
            "routing_layers",
            (
                "Every routing metric of a layer beside its chance, its value at collapse and its "
                "interval over documents; domain empty: all together."
            ),
            ("step", "layer", "phase", "domain", "metric"),
            ("value", "chance", "collapse", "low", "high", "n_experts", "top_k", "tokens"),
        ),
        Table(
            "coactivation",
            (
                "Which experts the same token chooses: every ordered pair. Of prefill, or of decode "
                "where that is all there is."
            ),
            ("step", "layer", "expert_a", "expert_b"),
            ("tokens", "tokens_a", "tokens_b", "layer_tokens", "share_of_a", "lift", "chance_lift"),
        ),
        Table(
            "domains",
            (
                "Which domains use which experts, every domain counted alike. Of prefill, or of "
                "decode where that is all there is."
            ),
            ("step", "layer", "expert", "domain"),
            ("tokens", "affinity", "share", "share_chance"),
        ),
        Table(
            "vocabulary",
            (
                "The 50 tokens that set an expert apart, by what they are, what follows, and what is "
                "predicted; from a sample of at most a million tokens."
            ),
            ("step", "layer", "expert", "role", "token_id"),
            ("token", "count", "share", "lift"),
        ),
        Table(
            "stability",
            "How alike two checkpoints route the same tokens; from the same sample.",
            ("layer", "step_a", "step_b"),
            (
                "routing_consistency",
                "routing_consistency_chance",
                "routing_consistency_corrected",
                "top1_agreement",
                "top1_chance",
                "top1_corrected",
                "usage_sigma",
                "kendall_tau",
                "tau_is_noise",
                "saturation_top1",
                "saturation_topk",
            ),
        ),
        Table(
            "tokens",
            (
                "Every token with the experts it chose, where asked for with --save-tokens; of "
                "prefill, or of decode where that is all there is."
            ),
            ("step", "document", "position", "layer"),
            ("token_id", "domain", "phase", "experts", "gates", "entropy"),
        ),
        Table(
            "contexts",
            (
                "The places of the text where an expert's gate is largest, one a window and one a "
                "phrase; from the same sample as the vocabulary."
            ),
            ("step", "layer", "expert", "rank"),
            ("document", "position", "domain", "token_id", "token", "before", "after", "gate"),
        ),
        Table(
            "expert_cosines",
            (
                "How alike every two experts are, by their router rows and by what they give on "
                "average: what maps of experts are drawn from."
            ),
            ("step", "layer", "of", "expert_a", "expert_b"),
            ("cosine", "chance", "dimensions"),
        ),
        Table(
            "token_text",
            "The words of the tokens table's ids, where asked for with --save-tokens.",
            ("token_id",),
            ("token",),
        ),
        Table(
            "steps",
            "Training as a whole: loss, speed and memory, at the steps that were logged.",
            ("step",),
            (
                "tokens",
                "train_loss",
                "lm_loss",
                "aux_loss",
                "validation_loss",
                "validation_loss_published",
                "learning_rate",
                "gradient_norm",
                "tokens_per_second",
                "step_seconds",
                "peak_memory_bytes",
            ),
        ),
        Table(
            "router_gradients",
            "How strongly each loss pulls on each router, at sampled steps.",
            ("step", "layer"),
            ("lm_gradient_norm", "aux_gradient_norm"),
        ),
        Table(
            "alerts",
            "What went wrong in training, at the step and in the layer where it was first seen.",
            ("step", "layer", "expert", "kind"),
            ("value", "threshold", "message"),
            optional=("expert",),
        ),
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
    ]
}

# which verb writes which
ROUTING_TABLES = (
    "load",
    "routing_layers",
    "coactivation",
    "domains",
    "vocabulary",
    "stability",
    "tokens",
    "contexts",
    "expert_cosines",
    "token_text",
)
TRAINING_TABLES = ("steps", "router_gradients", "alerts")
GEOMETRY_TABLES = ("geometry", "geometry_layers")
COMPRESSION_TABLES = ("clusters", "merges", "saliency", "damage")
LAB_TABLES = ("overhead",)
STUDY_TABLES = ("study_runs", "study_documents", "study_curves", "study_comparisons")
OTHERS = (
    *GEOMETRY_TABLES,
    *COMPRESSION_TABLES,
    *ROUTING_TABLES,
    *TRAINING_TABLES,
    *LAB_TABLES,
    *STUDY_TABLES,
)
SCAN_TABLES = tuple(name for name in TABLES if name not in OTHERS)


def table(name: str) -> Table:
    if name not in TABLES:
        raise unknown_name("table", name, list(TABLES))
    return TABLES[name]


def arrow_schema(name: str) -> pa.Schema:
    """The parquet schema of a table; keys are never null, but for those a table calls optional."""
    import pyarrow as pa

    kinds = {
        "int": pa.int64(),
        "float": pa.float64(),
        "bool": pa.bool_(),
        "text": pa.string(),
        "floats": pa.list_(pa.float32()),
        "ints": pa.list_(pa.int32()),
    }
    spec = table(name)
    return pa.schema(
        [
            pa.field(
                column,
                kinds[spec.column(column).kind],
                nullable=column not in spec.keys or column in spec.optional,
            )
            for column in spec.columns
        ],
        metadata={"moescope.schema_version": str(SCHEMA_VERSION), "moescope.table": name},
    )


def conform(name: str, frame: pd.DataFrame) -> pa.Table:
    """The frame as an arrow table of exactly the schema's columns, in order.

    Absent columns are null, unknown ones refused.
    """
    import pyarrow as pa

    spec = table(name)
    unknown = sorted(set(frame.columns) - set(spec.columns))
    if unknown:
        raise ValueError(f"table {name} has no column {', '.join(unknown)}; known: {', '.join(spec.columns)}")
    full = frame.reindex(columns=list(spec.columns))
    missing = [key for key in spec.keys if key not in spec.optional and full[key].isna().any()]
    if missing:
        raise ValueError(f"table {name}: key {', '.join(missing)} may not be null")
    if full.duplicated(list(spec.keys)).any():
        raise ValueError(f"table {name}: rows with equal keys {', '.join(spec.keys)}")
    return pa.Table.from_pandas(full, schema=arrow_schema(name), preserve_index=False)


def read_parquet(name: str, path: str) -> pd.DataFrame:
    """The table as a pandas frame; refuses a file written under another schema version."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        arrow = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise BadInput(
            f"{path}: not a whole parquet file ({str(error).splitlines()[0]}); scan again with --overwrite"
        ) from None
    written = (arrow.schema.metadata or {}).get(b"moescope.schema_version", b"none").decode()
    if written != str(SCHEMA_VERSION):
        raise BadInput(
            f"{path}: schema version {written}, this moescope reads {SCHEMA_VERSION}; scan again "
            "with this version"
        )
    frame: pd.DataFrame = arrow.select(list(table(name).columns)).to_pandas()
    return frame
