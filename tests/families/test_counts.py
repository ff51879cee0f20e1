"""Numbers of experts that a model can route to, and the config that says them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints import tiny_config, tiny_tensors, write_checkpoint
from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput
from moescope.families import MoeCheckpoint, read_moe
from moescope.families.writing import NewLayer, plan_moe


def checkpoint(
    folder: Path, experts: int = 16, rename: tuple[str, str] = ("", ""), **config: Any
) -> MoeCheckpoint:
    sizes = {"experts": experts, "d_model": 8, "d_ff": 4, "family": "qwen3_moe"}
    tensors = {name.replace(*rename): tensor for name, tensor in tiny_tensors(**sizes).items()}
    whole = tiny_config(experts=experts, family="qwen3_moe") | config
    return read_moe(open_checkpoint(write_checkpoint(folder, tensors, whole)))


def config_for(moe: MoeCheckpoint, counts: dict[int, int], top_k: int | None = None) -> dict[str, Any] | None:
    return plan_moe(moe, {layer: NewLayer(range(count)) for layer, count in counts.items()}, top_k).config


def deepseek(folder: Path, **config: Any) -> MoeCheckpoint:
    return checkpoint(
        folder, **{"model_type": "deepseek_v3", "first_k_dense_replace": 0, "n_group": 4, **config}
    )


@pytest.mark.parametrize("count", [8, 12, 16])
def test_groups_of_equal_size_are_possible(tmp_path, count):
    config = config_for(deepseek(tmp_path, topk_group=2), {0: count, 1: count})
    assert (config or {"num_experts": 16})["num_experts"] == count


@pytest.mark.parametrize(
    ("count", "more", "nearest"),
    [
        (9, {"topk_group": 2}, "8 or 12"),
        (14, {"topk_group": 2}, "12 or 16"),
        (4, {"topk_group": 2}, "8"),  # one expert a group: its best two cannot be told
        (8, {"topk_group": 1, "num_experts_per_tok": 4}, "16"),  # 2 experts in the one group that is chosen
        (6, {}, "8"),
        (14, {"topk_group": 1, "num_experts_per_tok": 6}, "none"),
    ],
)
def test_a_number_the_groups_cannot_share_is_refused_with_the_nearest_that_they_can(
    tmp_path, count, more, nearest
):
    with pytest.raises(
        BadInput, match=rf"{count} experts in layer 0 .* 4 groups .*nearest possible: {nearest}$"
    ):
        config_for(deepseek(tmp_path, **more), {0: count, 1: count})


def test_a_model_in_one_group_may_have_any_number_from_two(tmp_path):
    moe = deepseek(tmp_path, n_group=1, topk_group=1, num_experts_per_tok=1)
    assert config_for(moe, {0: 7, 1: 7})["num_experts"] == 7
    with pytest.raises(BadInput, match=r"nearest possible: 2$"):
        config_for(moe, {0: 1, 1: 1})


def test_every_field_that_counts_experts_is_changed_wherever_it_stands(tmp_path):
    inner = tiny_config(experts=16, family="qwen3_moe") | {"num_local_experts": 16}
    moe = checkpoint(tmp_path, model_type="qwen3_vl_moe", text_config=inner, vision_config={"num_experts": 5})
    config = config_for(moe, {0: 3, 1: 3})
    assert (
        config["num_experts"],
        config["text_config"]["num_experts"],
        config["text_config"]["num_local_experts"],
    ) == (3, 3, 3)
    assert config["vision_config"] == {"num_experts": 5}
    assert moe.checkpoint.config["text_config"]["num_experts"] == 16, "the source's own config is left alone"


def test_a_list_of_counts_takes_another_number_for_each_layer(tmp_path):
    moe = checkpoint(
        tmp_path,
        rename=("mlp.gate.weight", "mlp.gate.wg.weight"),
        model_type="hunyuan_v1_moe",
        num_experts=[16, 16],
        moe_topk=[1, 2],
    )
    assert config_for(moe, {1: 3})["num_experts"] == [16, 3]
    assert config_for(moe, {0: 1, 1: 3})["num_experts"] == [1, 3]
    with pytest.raises(BadInput, match="layer 1 would have 1 experts, but top_k is 2"):
        config_for(moe, {0: 1, 1: 1})
    assert config_for(moe, {}, top_k=3)["moe_topk"] == [3, 3]


def test_another_top_k_is_written_and_fewer_experts_then_suffice(tmp_path):
    moe = checkpoint(tmp_path)
    config = config_for(moe, {0: 1, 1: 1}, top_k=1)
    assert (config["num_experts"], config["num_experts_per_tok"]) == (1, 1)
    for wrong in (0, 17):
        with pytest.raises(BadInput, match=f"top_k is {wrong}"):
            config_for(moe, {}, top_k=wrong)


def test_a_second_name_for_the_same_number_follows_it_and_another_number_does_not(tmp_path):
    moe = checkpoint(tmp_path, n_routed_experts=16, moe_num_experts=5, experts_per_token=2, moe_k=4)
    config = config_for(moe, {0: 3, 1: 3}, top_k=1)
    assert (config["num_experts"], config["n_routed_experts"], config["moe_num_experts"]) == (3, 3, 5)
    assert (config["num_experts_per_tok"], config["experts_per_token"], config["moe_k"]) == (1, 1, 4)


def test_nothing_changed_leaves_the_config_to_be_copied(tmp_path):
    assert config_for(checkpoint(tmp_path), {0: 16}) is None


def test_a_model_nobody_knows_keeps_its_number(tmp_path):
    moe = checkpoint(tmp_path, model_type="newcomer")
    assert config_for(moe, {0: 16}) is None
    with pytest.raises(BadInput, match="model_type newcomer is not known"):
        config_for(moe, {0: 3, 1: 3})


def test_a_config_that_does_not_say_the_number_is_refused(tmp_path):
    moe = checkpoint(tmp_path, num_experts=None)
    with pytest.raises(
        BadInput, match="none of num_experts, num_local_experts in it; add the number of experts"
    ):
        config_for(moe, {0: 3, 1: 3})
