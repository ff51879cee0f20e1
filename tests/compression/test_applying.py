"""Plans carried out, judged by transformers.

It loads what was written without a word, and runs the experts that were planned.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compression.tiny_plans import FAMILIES, merging_plan, pruning_plan, saved
from families.test_writing import load, on_disk, same_bits
from families.tiny_models import find_blocks, own_biases, own_experts, router_of
from moescope.compression.applying import apply_plan, planned_bytes
from moescope.errors import BadInput
from moescope.types import LayerPlan

DATA = "*.safetensors"


def data_bytes(folder: Path) -> int:
    """What lies in the files besides their headers."""
    total = 0
    for file in folder.glob(DATA):
        with file.open("rb") as opened:
            header = int.from_bytes(opened.read(8), "little")
        total += file.stat().st_size - 8 - header
    return total


def generates(model) -> None:
    given = torch.tensor([[1, 5, 9, 4]])
    made = model.generate(given, max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(given))
    assert made.shape[1] > given.shape[1]


@pytest.mark.parametrize(("kind", "form"), FAMILIES)
def test_a_pruned_model_loads_without_a_word_generates_and_holds_the_experts_that_were_kept(
    tmp_path, caplog, kind, form
):
    dtype = torch.bfloat16 if kind == "gpt_oss" else torch.float32
    tiny, moe = saved(tmp_path / "source", kind, form, dtype)
    plan = pruning_plan(moe, 3)
    after, before = planned_bytes(moe, plan, {})
    written = apply_plan(moe, plan, {}, tmp_path / "small")
    assert (
        written.total_bytes
        == after
        == data_bytes(tmp_path / "small")
        < before
        == data_bytes(tmp_path / "source")
    )
    model = load(tmp_path / "small", caplog, tmp_path / "source")
    generates(model)
    kept = {layer.layer: list(layer.dominants) for layer in plan.layers}
    assert any(experts != [0, 1, 2] for experts in kept.values())
    for ours, theirs, experts in zip(find_blocks(model), tiny.blocks, kept.values(), strict=True):
        same_bits(
            own_experts(ours.experts),
            {name: part[experts] for name, part in own_experts(theirs.experts).items()},
        )
        same_bits({"router": router_of(ours)[1]}, {"router": router_of(theirs)[1][experts]})
        same_bits(own_biases(ours), {name: bias[experts] for name, bias in own_biases(theirs).items()})


@pytest.mark.parametrize(("kind", "form"), FAMILIES)
def test_a_merged_model_loads_without_a_word_generates_and_holds_weighted_sums_of_reordered_neurons(
    tmp_path, caplog, kind, form
):
    dtype = torch.bfloat16 if kind == "gpt_oss" else torch.float32
    tiny, moe = saved(tmp_path / "source", kind, form, dtype)
    plan, fits = merging_plan(moe)
    after, _ = planned_bytes(moe, plan, fits)
    assert (
        apply_plan(moe, plan, fits, tmp_path / "small").total_bytes == after == data_bytes(tmp_path / "small")
    )
    model = load(tmp_path / "small", caplog, tmp_path / "source")
    generates(model)
    for ours, theirs, layer in zip(find_blocks(model), tiny.blocks, plan.layers, strict=True):
        made, source = own_experts(ours.experts), own_experts(theirs.experts)
        order, sign = fits[layer.layer].orders[0], fits[layer.layer].signs[0]
        for name, part in source.items():
            first = part[0].float()
            if name == "down":
                first = first[:, order] * sign
            elif name != "down_bias":
                first = first[order] * (sign[:, None] if name == "up" else 1)
            expected = (0.25 * first.double() + 0.75 * part[2].double()).float().to(part.dtype)
            assert torch.equal(made[name][0], expected), name
            same_bits({"a": made[name][1], "b": made[name][2]}, {"a": part[3], "b": part[1]})
        rows = fits[layer.layer].router_KD.to(dtype)
        assert torch.equal(router_of(ours)[1], rows)


@pytest.mark.parametrize(("kind", "form"), FAMILIES)
def test_pruning_to_all_experts_changes_no_byte_of_the_files(tmp_path, kind, form):
    _, moe = saved(tmp_path / "source", kind, form)
    apply_plan(moe, pruning_plan(moe, 4), {}, tmp_path / "same")
    same_bits(on_disk(tmp_path / "same"), on_disk(tmp_path / "source"))
    assert (tmp_path / "same" / "config.json").read_bytes() == (
        tmp_path / "source" / "config.json"
    ).read_bytes()


def test_no_more_than_one_projection_of_two_experts_is_in_memory_while_a_merged_layer_is_written(tmp_path):
    """Reads of the source are counted between the bytes that are handed on.

    Two a merged projection, one after the other.
    """
    from moescope.compression.applying import new_layers
    from moescope.families.writing import NewExpert

    _, moe = saved(tmp_path / "source", "qwen3_moe")
    plan, fits = merging_plan(moe)
    reads: list[str] = []
    first = min(moe.layers)
    own = moe.layers[first]
    watched = replace(
        own, gate_EFD=replace(own.gate_EFD, read=lambda e: reads.append(f"gate {e}") or own.gate_EFD.read(e))
    )
    moe.layers[first] = watched
    layers, _ = new_layers(moe, plan, fits)
    assert reads == []
    expert = layers[first].experts[0]
    assert isinstance(expert, NewExpert)
    assert callable(expert.gate_FD)
    expert.gate_FD()
    assert reads == ["gate 0", "gate 2"]


# --- rejected before any work


def test_a_plan_with_tied_router_rows_a_wrong_shape_or_another_checkpoint_is_not_written(tmp_path):
    _, moe = saved(tmp_path / "source", "mixtral")
    plan, fits = merging_plan(moe)
    wrong_layer = LayerPlan(99, 4, ((0,), (1,)), (0, 1), ((1.0,), (1.0,)))
    short = {layer: replace(fit, orders={0: torch.arange(3)}) for layer, fit in fits.items()}
    for bad, arrays, said in (
        (replace(plan, router="tie"), {}, "plan with --router fold"),
        (replace(plan, layers=(*plan.layers, wrong_layer)), fits, "layer 99 has 0 experts"),
        (
            replace(plan, layers=tuple(replace(layer, n_experts=5) for layer in plan.layers)),
            fits,
            "4 experts, but the plan is for 5",
        ),
        (plan, short, "orders 3 neurons of expert 0, which has 24"),
        (
            replace(plan, checkpoint={"path": "elsewhere", "header_hash": "x"}),
            fits,
            "made for another checkpoint",
        ),
    ):
        with pytest.raises(BadInput, match=said):
            apply_plan(moe, bad, arrays, tmp_path / "small")
    assert not (tmp_path / "small").exists()
