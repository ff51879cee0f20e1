"""LFM2: router `feed_forward.gate`; w1 gate, w3 up, w2 down."""

from moescope.families.layout import Family, Model, after_dense, projections

LFM2 = Family(
    name="lfm2",
    models={
        "lfm2_moe": Model(
            ("num_experts",), ("num_experts_per_tok",), after_dense(2), scoring="sigmoid", activation="silu"
        )
    },
    router="{L}.feed_forward.gate.weight",
    **projections("{L}.feed_forward", ("w1", "w3", "w2")),
    norm="{L}.ffn_norm.weight",
    correction_bias=("{L}.feed_forward.expert_bias", "{L}.feed_forward.gate.e_score_correction_bias"),
)
