"""What every intervention does to a block, and that nothing is left of it afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import moescope
from families.tiny_models import own_experts, tiny_model
from intervention.edited_models import KINDS, NAMES, blocks_of, fingerprint, logits_of, model_named
from moescope.errors import BadInput
from moescope.execution.adapters import Block
from moescope.execution.streamed import load_streamed
from moescope.intervention.changes import INTERVENTIONS, Change, changed, check_changes, parse_change
from moescope.intervention.kinds import experts_per_token

# --- as text


def test_a_change_is_written_as_it_is_read():
    for text in ("layer=12 expert=3 ablate", "expert=0,2 skip", "layer=1,2 expert=5 bias by=-0.25"):
        assert parse_change(text).label == text
    for text in (*CHANGES, "expert=1 transplant checkpoint='a folder'"):
        assert parse_change(parse_change(text).label) == parse_change(text)
    assert {parse_change(text).name for text in CHANGES} == {record.name for record in INTERVENTIONS}
    assert parse_change("ablate expert=1-3 layer=0") == Change("ablate", (0,), (1, 2, 3))
    assert parse_change("layer=all expert=1 ablate").layers == ()
    assert len({parse_change("expert=1 bias by=1"), Change("bias", (), (1,), {"by": 1})}) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layer=0 expert=1 abolish", "unknown intervention 'abolish'; known: ablate"),
        ("layer=0 expert=1", "names 0 interventions"),
        ("layer=0 expert=1 ablate by=3", "ablate has no option 'by'"),
        ("layer=0 expert=1 bias by=inf", "by is 'inf'; give a number"),
        ("layer=0 expert=1 bias", "give by="),
        ("layer=0 ablate", "give expert=NUMBER"),
        ("layer=0 expert=1,1 ablate", "names one twice"),
    ],
)
def test_a_change_that_cannot_be_read_is_rejected_in_one_line(text, words):
    with pytest.raises(BadInput, match=words) as caught:
        parse_change(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["layer=0 expert=99 ablate"], "layer 0 has experts 0 to 3, not 99"),
        (["layer=7 expert=1 ablate"], "no MoE layer 7; MoE layers: 0,1,2"),
        (["layer=0 expert=0-2 skip"], "1 experts of layer 0 are left, but a token needs 2"),
    ],
)
def test_a_change_that_does_not_fit_the_model_is_rejected_and_the_model_stays(texts, words):
    model = model_named("mixtral")
    before = fingerprint(model)
    with pytest.raises(BadInput, match=words), moescope.modified(model, *texts):
        pass
    assert fingerprint(model) == before


# --- nothing is left, and nothing happens where nothing is asked for


@pytest.mark.parametrize("name", NAMES)
def test_afterwards_every_tensor_hook_and_attribute_is_as_before(name):
    model = model_named(name)
    blocks, before, logits = blocks_of(model), fingerprint(model), logits_of(model)
    means = {(layer, 1): torch.zeros(1) for layer in blocks}
    for change in applicable(blocks):
        with pytest.raises(KeyboardInterrupt), changed(blocks, [change], means=means):
            logits_of(model)
            raise KeyboardInterrupt
        assert fingerprint(model) == before, change.label
    assert torch.equal(logits_of(model), logits)


def applicable(blocks: dict[int, Block]) -> list[Change]:
    """Every change of CHANGES that these blocks allow."""
    changes = []
    for text in CHANGES:
        try:
            check_changes([parse_change(text)], blocks)
            changes.append(parse_change(text))
        except BadInput as error:
            assert "cannot be applied" in str(error)
    return changes


# One of every record at least; `mean` has calibration of its own below.
CHANGES = [
    "expert=1 ablate",
    "expert=1 mean",
    "expert=1 skip",
    "expert=1 force",
    "expert=1 force off",
    "expert=1 bias by=0.5",
    "expert=1,2 swap",
    "expert=1 transplant from_expert=2",
    "expert=1 transplant part=row from_expert=2",
    "project_out k=2",
    "expert=0 project_out k=2 strength=10 view=gate restore_norm",
    "project_onto k=2",
    "random_direction k=2",
    "random_direction k=2 match=change draw=1",
    "other_expert k=2",
    "replace k=3",
    "expert=1 hijack",
    "zero_router",
    "uniform_router",
    "permute_rows",
    "top_k k=1",
    "top_k k=3",
    "temperature t=2",
]
NEUTRAL = [
    ["expert=1 bias by=0"],
    ["expert=1,2 swap", "expert=2,1 swap"],
    ["expert=1 transplant"],
    ["expert=1 transplant part=row"],
    ["expert=0,1 transplant part=both"],
    ["project_out k=2 strength=0"],
    ["project_out k=2 strength=0 restore_norm"],
    ["random_direction k=2 strength=0"],
    ["random_direction k=2 strength=0 match=change"],
    ["other_expert k=2 strength=0"],
    ["permute_rows order=identity"],
    ["top_k k=configured"],
    ["temperature t=1"],
]

# Neutral cases that cannot be applied: no rows, no logits, or a fixed number of experts per token.
REJECTED = {"phimoe": 1, "switch_transformers": 1, "lab expert_choice": 1}
REJECTED |= {"lab hash": 11, "lab some": 8, "lab spectra": 8}


@pytest.mark.parametrize("name", NAMES)
def test_neutral_arguments_change_no_logit(name):
    model = model_named(name)
    blocks, logits = blocks_of(model), logits_of(model)
    done = 0
    numbers = ",".join(map(str, range(next(iter(blocks.values())).n_experts)))
    configured = str(experts_per_token(next(iter(blocks.values()))))
    for texts in NEUTRAL:
        given = [text.replace("identity", numbers).replace("configured", configured) for text in texts]
        if "None" in configured and "top_k" in texts[0]:
            continue
        try:
            with changed(blocks, [parse_change(text) for text in given]):
                assert torch.equal(logits_of(model), logits), texts
                done += 1
        except BadInput as error:
            assert "cannot be applied" in str(error)
    assert done == len(NEUTRAL) - REJECTED.get(name, 0)


@pytest.mark.parametrize("kind", ["mixtral", "minimax_m2"])
def test_neutral_arguments_change_no_logit_in_half_precision(kind):
    model = tiny_model(kind).model.bfloat16()
    blocks, logits = blocks_of(model), logits_of(model)
    for texts in NEUTRAL:
        given = [text.replace("identity", "0,1,2,3").replace("configured", "2") for text in texts]
        with changed(blocks, [parse_change(text) for text in given]):
            assert torch.equal(logits_of(model), logits), texts
    for text in ("expert=1 ablate", "expert=1 skip", "expert=1 force", "project_out k=2", "temperature t=2"):
        with changed(blocks, [parse_change(text)]):
            assert not torch.equal(logits_of(model), logits)


# --- models whose weights come and go


@pytest.mark.parametrize("kind", ["mixtral", "ernie4_5_moe"])
def test_changes_of_a_streamed_model_give_the_logits_of_a_resident_one(kind, tmp_path):
    tiny = tiny_model(kind)
    tiny.save(tmp_path, "saved")
    streamed = load_streamed(str(tmp_path), "float32", "cpu")
    both = blocks_of(streamed.model), blocks_of(tiny.model)
    layer, ids = list(both[0])[1], torch.arange(3, 30)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for text in (
        "expert=1 ablate",
        "expert=1 skip",
        "expert=1 bias by=0.5",
        "project_out k=2 strength=10",
        "top_k k=1",
        f"expert=1 transplant part=both from_expert=2 checkpoint={tmp_path}",
    ):
        changes = [parse_change(f"layer={layer} {text}")]
        with changed(both[0], changes):
            (ours,) = streamed.run_all([inputs])
        with changed(both[1], changes), torch.no_grad():
            assert torch.equal(ours.logits, tiny.model(**inputs).logits), text


def test_changes_of_an_offloaded_model_work_or_say_that_weights_are_not_there():
    accelerate = pytest.importorskip("accelerate")
    resident, offloaded = model_named("mixtral"), tiny_model("mixtral").model
    accelerate.cpu_offload(offloaded, execution_device="cpu")
    gate = offloaded.model.layers[1].mlp.gate
    before = sorted(vars(gate)), gate.forward
    for text in ("expert=1 ablate", "expert=1 skip", "permute_rows", "top_k k=1"):
        with moescope.modified(offloaded, f"layer=1 {text}"):
            ours = logits_of(offloaded)
        with moescope.modified(resident, f"layer=1 {text}"):
            assert torch.equal(ours, logits_of(resident)), text
    with (
        pytest.raises(BadInput, match="are not in memory when the router runs; use --execution"),
        moescope.modified(offloaded, "layer=1 project_out k=1"),
    ):
        logits_of(offloaded)
    assert (sorted(vars(gate)), gate.forward) == before


# --- every family: an ablated expert is missing from the sum, a skipped one from the model


def some_tokens(count: int = 24) -> Tensor:
    return torch.randn(1, count, 16, generator=torch.Generator().manual_seed(3))


def block_output(block: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        output = block.module(x)
    return (output[0] if isinstance(output, tuple) else output).reshape(-1, x.shape[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_expert_is_as_if_the_model_had_been_made_without_it(kind):
    tiny = tiny_model(kind)
    block = next(iter(blocks_of(tiny.model).values()))
    x = some_tokens()
    with changed({block.layer: block}, [Change("skip", (), (1,))]):
        skipped = block_output(block, x)
    assert not torch.allclose(skipped, block_output(block, x), atol=1e-3)
    remove_expert(block, 1)
    torch.testing.assert_close(skipped, block_output(block, x), rtol=1e-4, atol=1e-5)


def test_changes_of_nllb_are_right_where_transformers_runs_the_chosen_experts(monkeypatch):
    """Its gates have a column per expert; the output has to be that of the experts with gates above 0."""

    def mixed(self, x_TD, mask, gates_TE):
        outputs = [gates_TE[:, e, None] * self[f"expert_{e}"](x_TD) for e in range(self.num_experts)]
        return torch.stack(outputs).sum(0) * (1 - self.moe_token_dropout)

    tiny = tiny_model("nllb-moe")
    block, x = next(iter(blocks_of(tiny.model).values())), some_tokens()
    monkeypatch.setattr(type(block.experts), "forward", mixed)
    plain = block_output(block, x)

    def under(*texts: str) -> Tensor:
        with changed({block.layer: block}, [parse_change(text) for text in texts]):
            return block_output(block, x)

    ablated, swapped = under("expert=2 ablate"), under("expert=1,2 swap")
    assert torch.equal(under("expert=1,2 swap", "expert=1,2 swap"), plain)
    experts = block.experts
    experts["expert_1"], experts["expert_2"] = experts["expert_2"], experts["expert_1"]
    torch.testing.assert_close(swapped, block_output(block, x))
    experts["expert_1"], experts["expert_2"] = experts["expert_2"], experts["expert_1"]
    with torch.no_grad():
        experts["expert_2"].fc2.weight.zero_()
        experts["expert_2"].fc2.bias.zero_()
    torch.testing.assert_close(ablated, block_output(block, x))
    assert not torch.allclose(ablated, plain, atol=1e-2)
    assert not torch.allclose(under("expert=0 skip"), plain, atol=1e-2)


def remove_expert(block: Block, gone: int) -> None:
    """Delete the expert from the block's tensors, read apart from moescope."""
    n = block.n_experts
    keep = [expert for expert in range(n) if expert != gone]
    for module in block.module.modules():
        for key, value in vars(module).items():
            if type(value) is int and value == n and "expert" in key:
                setattr(module, key, n - 1)
        for stored in (module._parameters, module._buffers):
            for name, tensor in stored.items():
                if tensor is None:
                    continue
                axis = 1 if tuple(tensor.shape) == (1, n) else 0
                if type(module).__name__ == "DbrxExpertGLU":
                    tensor = tensor.view(n, -1, tensor.shape[-1])[keep].flatten(0, 1)
                elif tensor.shape[axis] == n:
                    tensor = tensor.index_select(axis, torch.tensor(keep))
                stored[name] = nn.Parameter(tensor.detach()) if stored is module._parameters else tensor
        if type(module).__name__ == "Linear" and module.out_features == n:
            module.out_features = n - 1
    if isinstance(block.experts, nn.ModuleDict):
        for at, expert in enumerate(keep):
            block.experts[f"expert_{at}"] = block.experts[f"expert_{expert}"]
        del block.experts[f"expert_{n - 1}"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_ablated_expert_is_as_if_its_down_projection_were_zero(kind):
    tiny = tiny_model(kind)
    seen = tiny.blocks[0]
    block = next(iter(blocks_of(tiny.model).values()))
    x = some_tokens()
    with changed({block.layer: block}, [Change("ablate", (), (2,))]):
        ablated = block_output(block, x)
    assert not torch.allclose(ablated, block_output(block, x), atol=1e-3)
    with torch.no_grad():
        if isinstance(seen.experts, nn.ModuleDict):
            seen.experts["expert_2"].wo.weight.zero_()
        for part, tensor in own_experts(seen.experts).items():
            if part.startswith("down") and not isinstance(seen.experts, nn.ModuleDict):
                tensor[2].zero_()
    torch.testing.assert_close(ablated, block_output(block, x), rtol=1e-4, atol=1e-5)
