"""LFM2: router `feed_forward.gate`; w1 gate, w3 up, w2 down."""

from moescope.families.layout import Family, Model, after_dense, either, fused_gate_up, per_expert

EACH, FUSED = "{L}.feed_forward.experts.{e}.w1.weight", "{L}.feed_forward.experts.gate_up_proj"

LFM2 = Family(
    name="lfm2",
    models={
        "lfm2_moe": Model(
            ("num_experts",), ("num_experts_per_tok",), after_dense(2), scoring="sigmoid", activation="silu"
        )
    },
    router="{L}.feed_forward.gate.weight",
    markers=(EACH, FUSED),
    experts=either(
        (EACH, per_expert(EACH, EACH.replace("w1", "w3"), EACH.replace("w1", "w2"))),
        (FUSED, fused_gate_up(FUSED, "{L}.feed_forward.experts.down_proj")),
    ),
    block="{L}.feed_forward",
    norm="{L}.ffn_norm.weight",
    correction_bias=("{L}.feed_forward.expert_bias", "{L}.feed_forward.gate.e_score_correction_bias"),
)
