"""Layers written back, judged by transformers.

It loads what was written, and finds in it the experts that were chosen.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import (
    edit_json,
    expert_name,
    router_name,
    tiny_checkpoint,
    tiny_config,
    tiny_tensors,
    write_checkpoint,
)
from families.tiny_models import (
    CASES,
    find_blocks,
    model_class,
    output_of,
    own_biases,
    own_experts,
    router_of,
    tiny_model,
)
from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput
from moescope.families import MoeCheckpoint, read_moe
from moescope.families.writing import NewExpert, NewLayer, plan_moe, write_moe

KEPT = [2, 0, 3]


def read(folder: Path) -> MoeCheckpoint:
    return read_moe(open_checkpoint(folder))


def on_disk(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), f"{name} differs"


@contextmanager
def spoken_by_transformers(caplog):
    """What transformers would print, at the level users have it at."""
    from transformers.utils import logging as spoken

    messages: list[str] = []
    spoken.set_verbosity_warning()
    spoken.enable_propagation()
    caplog.clear()
    try:
        with caplog.at_level(logging.WARNING):
            yield messages
        messages += [record.getMessage() for record in caplog.records]
    finally:
        spoken.disable_propagation()
        spoken.set_verbosity_error()


def load(folder: Path, caplog, source: Path) -> Any:
    """The model as transformers loads it.

    No key missing, left over or of another shape, and no word that the source's config does not earn.
    """
    from transformers import AutoConfig

    with spoken_by_transformers(caplog) as before:
        AutoConfig.from_pretrained(source)
    with spoken_by_transformers(caplog) as messages:
        config = AutoConfig.from_pretrained(folder)
        model, info = model_class(config).from_pretrained(folder, output_loading_info=True)
    assert set(messages) <= set(before)
    assert {what: keys for what, keys in info.items() if keys} == {}
    return model.eval()


def everywhere(moe: MoeCheckpoint, experts: list[int]) -> dict[int, NewLayer]:
    return {layer: NewLayer(experts) for layer in moe.layers}


def given_layer(seen, experts: list[int]) -> NewLayer:
    """The same experts as the transformers model holds them, handed in as tensors."""
    own, biases = own_experts(seen.experts), own_biases(seen)
    words = {
        "gate": "gate_FD",
        "up": "up_FD",
        "down": "down_DF",
        "gate_bias": "gate_bias_F",
        "up_bias": "up_bias_F",
        "down_bias": "down_bias_D",
    }
    return NewLayer(
        [NewExpert(**{words[part]: tensor[expert] for part, tensor in own.items()}) for expert in experts],
        router_ED=router_of(seen)[1][experts],
        router_bias_E=biases["router"][experts] if "router" in biases else None,
        correction_bias_E=biases["correction"][experts] if "correction" in biases else None,
    )


# --- every model, in both forms


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_rewriting_every_layer_with_its_own_experts_changes_no_bit_and_no_output(
    tmp_path, caplog, kind, form
):
    tiny = tiny_model(kind)
    source = tiny.save(tmp_path / "source", form)
    moe = read(source)
    write_moe(moe, tmp_path / "copied", {})
    write_moe(moe, tmp_path / "rewritten", everywhere(moe, [0, 1, 2, 3]))
    for folder in (tmp_path / "copied", tmp_path / "rewritten"):
        same_bits(on_disk(folder), on_disk(source))
        assert (folder / "config.json").read_bytes() == (source / "config.json").read_bytes()
    model = load(tmp_path / "rewritten", caplog, source)
    same_bits(model.state_dict(), tiny.model.state_dict())
    torch.testing.assert_close(output_of(model), output_of(tiny.model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_kept_experts_are_the_chosen_ones_in_the_chosen_order(tmp_path, caplog, kind, form):
    tiny = tiny_model(kind)
    moe = read(tiny.save(tmp_path / "source", form))
    plan = plan_moe(moe, everywhere(moe, KEPT))
    written = write_moe(moe, tmp_path / "pruned", everywhere(moe, KEPT))
    layers = dict(zip(moe.layers, (given_layer(seen, KEPT) for seen in tiny.blocks), strict=True))
    write_moe(moe, tmp_path / "given", layers)  # the same experts as tensors: stored as the source's are
    same_bits(on_disk(tmp_path / "given"), on_disk(tmp_path / "pruned"))
    assert (
        written.total_bytes
        == plan.total_bytes
        < sum(tensor.nbytes for tensor in tiny.model.state_dict().values())
    )
    model = load(tmp_path / "pruned", caplog, tmp_path / "source")
    blocks = find_blocks(model)
    assert len(blocks) == len(tiny.blocks) > 0
    for ours, theirs in zip(blocks, tiny.blocks, strict=True):
        same_bits(
            own_experts(ours.experts),
            {part: tensor[KEPT] for part, tensor in own_experts(theirs.experts).items()},
        )
        same_bits({"router": router_of(ours)[1]}, {"router": router_of(theirs)[1][KEPT]})
        same_bits(own_biases(ours), {name: bias[KEPT] for name, bias in own_biases(theirs).items()})
    within = tuple(seen.path.rsplit(".", 1)[0] + "." for seen in tiny.blocks)
    before, after = tiny.model.state_dict(), model.state_dict()
    outside = {name: tensor for name, tensor in before.items() if not name.startswith(within)}
    assert outside
    same_bits({name: tensor for name, tensor in after.items() if not name.startswith(within)}, outside)
    shared = {name for name in before if "shared" in name}
    same_bits({name: after[name] for name in shared}, {name: before[name] for name in shared})
    assert output_of(model).isfinite().all()
    assert [weights.n_experts for weights in read(tmp_path / "pruned").layers.values()] == [3] * len(
        moe.layers
    )


def test_the_judge_sees_a_config_that_does_not_fit_the_weights(tmp_path, caplog):
    moe = read(tiny_model("mixtral").save(tmp_path / "source", "saved"))
    write_moe(moe, tmp_path / "pruned", everywhere(moe, KEPT))
    edit_json(tmp_path / "pruned" / "config.json", num_local_experts=4)
    with pytest.raises((AssertionError, RuntimeError)):
        load(tmp_path / "pruned", caplog, tmp_path / "source")


# --- new experts among old ones


def new_expert(seed: int, calls: list[str] | None = None) -> NewExpert:
    generator = torch.Generator().manual_seed(seed)
    tensors = {"gate_FD": (24, 16), "up_FD": (24, 16), "down_DF": (16, 24)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in tensors.items()}
    if calls is None:
        return NewExpert(**made)

    def later(name: str):
        return lambda: (calls.append(name), made[name])[1]

    return NewExpert(**{name: later(name) for name in made})


def fused_tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = tiny_tensors(family="qwen3_moe", dtype=dtype)
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        gate, up, down = (
            torch.stack([tensors[expert_name(layer, expert, matrix, "qwen3_moe")] for expert in range(4)])
            for matrix in ("gate", "up", "down")
        )
        out[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        out[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    return out


@pytest.mark.parametrize("fused", [False, True])
def test_a_new_expert_stands_among_kept_ones_in_the_dtype_of_the_source(tmp_path, fused):
    tensors = (
        fused_tensors(torch.bfloat16) if fused else tiny_tensors(family="qwen3_moe", dtype=torch.bfloat16)
    )
    moe = read(write_checkpoint(tmp_path / "source", tensors, tiny_config(family="qwen3_moe")))
    calls: list[str] = []
    router = torch.randn(4, 16)
    write_moe(moe, tmp_path / "out", {1: NewLayer([3, new_expert(5, calls), 0, 0], router)})
    assert sorted(calls) == ["down_DF", "gate_FD", "up_FD"], "each is made once"
    layers = read(tmp_path / "out").layers
    expected = new_expert(5)
    for name, mine in {
        "gate_EFD": expected.gate_FD,
        "up_EFD": expected.up_FD,
        "down_EDF": expected.down_DF,
    }.items():
        old, new = getattr(moe.layers[1], name), getattr(layers[1], name)
        assert torch.equal(new.read(1), mine.to(torch.bfloat16))
        for place, expert in {0: 3, 2: 0, 3: 0}.items():
            assert torch.equal(new.read(place), old.read(expert))
            assert torch.equal(getattr(layers[0], name).read(place), getattr(moe.layers[0], name).read(place))
    assert torch.equal(layers[1].router_ED.read(), router.to(torch.bfloat16))
    assert torch.equal(layers[0].router_ED.read(), moe.layers[0].router_ED.read())


def test_a_bias_stored_as_one_row_stays_one_row(tmp_path):
    tensors = tiny_tensors(family="qwen3_moe")
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.moe_statics.e_score_correction_bias"] = torch.arange(4.0)[None]
    moe = read(write_checkpoint(tmp_path / "source", tensors, tiny_config(family="qwen3_moe")))
    write_moe(moe, tmp_path / "out", everywhere(moe, KEPT))
    stored = on_disk(tmp_path / "out")["model.layers.0.mlp.moe_statics.e_score_correction_bias"]
    assert torch.equal(stored, torch.tensor([[2.0, 0.0, 3.0]]))


def test_experts_of_several_dtypes_keep_each_its_own(tmp_path):
    tensors = tiny_tensors()
    tensors[expert_name(0, 2, "gate")] = tensors[expert_name(0, 2, "gate")].to(torch.bfloat16)
    moe = read(write_checkpoint(tmp_path / "source", tensors, tiny_config()))
    write_moe(moe, tmp_path / "out", everywhere(moe, KEPT))
    stored = on_disk(tmp_path / "out")
    assert [stored[expert_name(0, expert, "gate")].dtype for expert in range(3)] == [
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]


def test_multi_token_prediction_is_left_out_when_the_number_of_experts_changes_and_only_then(tmp_path):
    tensors = tiny_tensors(layers=3, family="qwen3_moe")
    config = tiny_config(family="qwen3_moe") | {
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 0,
        "num_nextn_predict_layers": 1,
    }
    source = write_checkpoint(tmp_path / "source", tensors, config)
    moe = read(source)
    extra = {name for name in tensors if name.startswith("model.layers.2.")}
    assert set(plan_moe(moe, everywhere(moe, KEPT)).excluded) == extra
    write_moe(moe, tmp_path / "pruned", everywhere(moe, KEPT))
    assert not extra & set(on_disk(tmp_path / "pruned"))
    assert json.loads((tmp_path / "pruned" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    write_moe(moe, tmp_path / "shuffled", everywhere(moe, [3, 2, 1, 0]))
    assert extra <= set(on_disk(tmp_path / "shuffled"))
    assert (tmp_path / "shuffled" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_a_single_file_brings_its_config_along_and_no_neighbour(tmp_path):
    source = tiny_checkpoint(tmp_path / "source")
    (source / "diary.txt").write_text("not the model's")
    write_moe(read(source / "model.safetensors"), tmp_path / "out", {})
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == tiny_config()


def test_progress_ends_at_the_whole(tmp_path):
    moe = read(tiny_checkpoint(tmp_path / "source"))
    told: list[tuple[int, int]] = []
    written = write_moe(moe, tmp_path / "out", {}, progress=lambda done, total: told.append((done, total)))
    assert len(told) == written.tensors == len(moe.checkpoint.tensors)
    assert told[-1] == (written.total_bytes, written.total_bytes)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


# --- what is refused, before anything is written


NAN = NewExpert(torch.full((24, 16), torch.nan), torch.ones(16, 24), torch.ones(24, 16))
ROWS = torch.ones(4, 16)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({7: NewLayer([0, 1])}, "layer 7 is not an MoE layer; MoE layers: 0, 1"),
        ({0: NewLayer([0, 1, 2, 4])}, "no expert 4 to keep; it has 0 to 3"),
        ({0: NewLayer([0, 1, 2, new_expert(1)])}, "new experts need router_ED"),
        (
            {0: NewLayer([0, 1, 2, new_expert(1)], torch.ones(3, 16))},
            r"router_ED has shape \[3, 16\], expected \[4, 16\]",
        ),
        (
            {0: NewLayer([3, 1, 2, 0], ROWS, router_bias_E=torch.ones(4))},
            "router_bias_E is given, but the source has none",
        ),
        (
            {
                0: NewLayer(
                    [0, 1, 2, NewExpert(torch.ones(24, 16), torch.ones(24, 16), torch.ones(24, 16))], ROWS
                )
            },
            r"down_EDF of new expert 3 has shape \[24, 16\], expected \[16, 24\]",
        ),
        ({0: NewLayer([0, 1, 2, NAN], ROWS)}, "has NaN or Inf"),
        (
            {0: NewLayer([0, 1, 2])},
            "layer 0 would have 3 experts and layer 1 4, but config.json holds one number for all",
        ),
        (
            {0: NewLayer([1]), 1: NewLayer([1])},
            "would have 1 experts, but top_k is 2; keep at least 2, or give a top_k",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, layers, message):
    moe = read(tiny_checkpoint(tmp_path / "source"))
    with pytest.raises(BadInput, match=message):
        write_moe(moe, tmp_path / "out", layers)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def refuse(folder: Path, message: str, experts: list[int] = KEPT) -> None:
    moe = read(folder)
    with pytest.raises(BadInput, match=message):
        plan_moe(moe, everywhere(moe, experts))


def test_a_quantised_layer_is_copied_but_not_rewritten(tmp_path):
    tensors = tiny_tensors()
    tensors[expert_name(0, 1, "up")] = tensors[expert_name(0, 1, "up")].to(torch.float8_e4m3fn)
    scale = expert_name(0, 1, "up") + "_scale_inv"
    tensors[scale] = torch.full((1, 1), 0.5)
    source = write_checkpoint(tmp_path / "source", tensors, tiny_config())
    refuse(source, "layer 0 is quantised .* cannot be rewritten; give a bf16 checkpoint")
    write_moe(read(source), tmp_path / "copied", {1: NewLayer([3, 2, 1, 0])})
    copied = on_disk(tmp_path / "copied")
    ours = copied[expert_name(0, 1, "up")]
    assert torch.equal(copied[scale], tensors[scale])
    assert torch.equal(ours.view(torch.uint8), tensors[expert_name(0, 1, "up")].view(torch.uint8))


def test_a_config_that_speaks_of_quantisation_is_enough_to_refuse(tmp_path):
    source = write_checkpoint(
        tmp_path, tiny_tensors(), tiny_config(quantization_config={"quant_method": "fp8"})
    )
    refuse(source, r"quantised \(quantization_config\)")


@pytest.mark.parametrize(
    "stray", ["experts.3.w1.weight_scale_inv", "experts.9.w1.weight", "experts.offsets", "counts"]
)
def test_a_tensor_among_the_experts_that_nobody_knows_is_refused_by_name(tmp_path, stray):
    name = f"model.layers.1.block_sparse_moe.{stray}"
    refuse(
        write_checkpoint(tmp_path, {**tiny_tensors(), name: torch.ones(4)}, tiny_config()), f"tensor {name}"
    )


def test_without_a_config_the_number_of_experts_stays(tmp_path):
    source = write_checkpoint(tmp_path / "source", tiny_tensors())
    refuse(source, "no config.json")
    write_moe(read(source), tmp_path / "out", everywhere(read(source), [3, 2, 1, 0]))
    assert torch.equal(on_disk(tmp_path / "out")[router_name(0)], tiny_tensors()[router_name(0)].flip(0))


def test_one_shard_alone_is_not_rewritten(tmp_path):
    tensors = {name: tensor for name, tensor in tiny_tensors().items() if "layers.1" not in name}
    file = write_checkpoint(tmp_path, tensors, tiny_config()) / "model.safetensors"
    with pytest.raises(
        BadInput, match="1 of 2 MoE layers are in it; give the folder of the complete checkpoint"
    ):
        plan_moe(read(file), {})


# --- memory


MEMORY = """
    import sys, torch
    from pathlib import Path
    from moescope.checkpoint import open_checkpoint
    from moescope.families import read_moe
    from moescope.families.writing import NewExpert, NewLayer, write_moe

    def lazily(stack):
        return lambda: stack.read(1)

    moe = read_moe(open_checkpoint(Path(sys.argv[1])))
    weights = moe.layers[0]
    made = NewExpert(*map(lazily, (weights.gate_EFD, weights.down_EDF, weights.up_EFD)))
    layers = {0: NewLayer([3, made, 0, *range(4, 16)], torch.ones(15, 1024))}
    torch.ones(1024, 1024).to(torch.bfloat16).isfinite().all()  # torch sets things up at its first use
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    def resident(which):
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(which)) * 1024
    before = resident("VmRSS")
    print(write_moe(moe, sys.argv[2], layers).total_bytes, resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rewriting_three_hundred_megabytes_takes_the_memory_of_a_few_experts(tmp_path):
    name = "model.layers.0.mlp"
    tensors = {
        "model.embed_tokens.weight": torch.zeros(25_000, 1024),
        f"{name}.gate.weight": torch.ones(16, 1024),
        f"{name}.experts.gate_up_proj": torch.ones(16, 2048, 1024),
        f"{name}.experts.down_proj": torch.ones(16, 1024, 1024),
    }
    write_checkpoint(tmp_path / "source", tensors, tiny_config(layers=1, experts=16, family="qwen3_moe"))
    del tensors
    command = [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path / "source"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    total, growth = map(int, done.stdout.split())
    assert total > 280e6
    assert growth < 64e6, f"{growth / 1e6:.0f} MB: an expert has 12 MB, the file 300"
    assert torch.equal(read(tmp_path / "out").layers[0].gate_EFD.read(14), torch.ones(1024, 1024))
