"""Stored tensors in, logical ones out, whatever the files: shards, hashes, damage."""

from __future__ import annotations

import json
import pickle
import random

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.quantised.builders import compressed_checkpoint, fp8_checkpoint, gpt_oss_checkpoint, scheme_of
from checkpoints import INDEX, edit_json, expert_name, write_checkpoint
from moescope.checkpoint import open_checkpoint
from moescope.checkpoint.quantised import SCHEMES, logical_tensors
from moescope.errors import BadInput
from moescope.families import read_moe

NAME = expert_name(1, 2, "gate", "qwen3_moe")
BUILD = {
    "fp8": fp8_checkpoint,
    "mxfp4": gpt_oss_checkpoint,
    "int4": lambda folder: compressed_checkpoint(folder, scheme_of(4, 16, symmetric=False)),
}


@pytest.mark.parametrize("kind", BUILD)
def test_parts_in_other_shards_are_found_and_counted(tmp_path, kind):
    tensors = BUILD[kind](tmp_path / "one")
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    write_checkpoint(tmp_path / "three", tensors, config, shards=3)
    one, three = open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "three")
    assert len(three.file_names()) == 3
    assert set(one.tensors) == set(three.tensors)
    for name in one.packed:
        assert torch.equal(one.read(name), three.read(name))
    apart = [how for how in three.packed.values() if len({three.stored[part].file for part in how.parts}) > 1]
    assert apart, "no tensor lies in two shards, so nothing was tested"


def test_the_header_hash_changes_with_a_file_that_holds_scales_alone(tmp_path):
    tensors = fp8_checkpoint(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "model.safetensors").unlink()
    folder = write_checkpoint(
        tmp_path / "model", {n: t for n, t in tensors.items() if "scale" not in n}, config
    )
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    write_checkpoint(folder, {n: t for n, t in tensors.items() if "scale" in n})
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    before = open_checkpoint(folder).header_hash()
    assert before == open_checkpoint(folder).header_hash()
    write_checkpoint(folder, {n: 2 * t for n, t in tensors.items() if "scale" in n})
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    assert open_checkpoint(folder).header_hash() != before
    assert torch.equal(open_checkpoint(folder).read(NAME), 2 * tensors_read(tmp_path, tensors, config))


def tensors_read(tmp_path, tensors, config):
    return open_checkpoint(write_checkpoint(tmp_path / "whole", tensors, config)).read(NAME)


@pytest.mark.parametrize("kind", BUILD)
def test_headers_alone_are_enough(tmp_path, kind):
    BUILD[kind](tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    tensors, packed = logical_tensors(checkpoint.stored, checkpoint.config)
    assert (tensors, packed) == (checkpoint.tensors, checkpoint.packed)
    assert packed
    for name, how in packed.items():
        assert tensors[name].name == name
        assert all(part == name or part not in tensors for part in how.parts)


@pytest.mark.parametrize("kind", BUILD)
def test_the_order_of_schemes_does_not_matter(tmp_path, monkeypatch, kind):
    BUILD[kind](tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    monkeypatch.setattr("moescope.checkpoint.quantised.SCHEMES", SCHEMES[::-1])
    assert logical_tensors(checkpoint.stored, checkpoint.config) == (checkpoint.tensors, checkpoint.packed)


@pytest.mark.parametrize("kind", BUILD)
def test_how_a_tensor_is_read_can_be_sent_to_another_process(tmp_path, kind):
    BUILD[kind](tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    name, how = next(iter(checkpoint.packed.items()))
    assert torch.equal(pickle.loads(pickle.dumps(how)).read(checkpoint.read_stored), checkpoint.read(name))


def test_one_shard_alone_is_read_as_far_as_it_goes(tmp_path):
    tensors = fp8_checkpoint(tmp_path / "one")
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    folder = write_checkpoint(tmp_path / "three", tensors, config, shards=3)
    place = json.loads((folder / INDEX).read_text())["weight_map"]
    checkpoint = open_checkpoint(folder / place[NAME])
    assert place[NAME] != place[f"{NAME}_scale_inv"], "the pair must be torn apart for this test"
    with pytest.raises(
        BadInput, match=r"its scale .*gate_proj\.weight_scale_inv is missing; download the shard"
    ):
        checkpoint.read(NAME)


ODD = [None, True, 0, -1, 3, 10**9, 2.5, "", "4", "re:(", [], {}, [0], [16, 16], [-1, 3], {"a": 1}]


def shaken(value, draw):
    """The config with one entry replaced or dropped, at any depth."""
    key = draw.choice(sorted(value))
    if isinstance(value[key], dict) and value[key] and draw.random() < 0.85:
        return {**value, key: shaken(value[key], draw)}
    if draw.random() < 0.2:
        return {name: kept for name, kept in value.items() if name != key}
    return {**value, key: draw.choice(ODD)}


@pytest.mark.parametrize("kind", BUILD)
def test_no_damaged_config_or_header_escapes_as_anything_but_bad_input(tmp_path, kind):
    BUILD[kind](tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    whole = load_file(tmp_path / "model.safetensors")
    refused = 0
    for seed in range(60):
        draw = random.Random(seed)
        tensors = dict(whole)
        if seed % 2:
            edit_json(tmp_path / "config.json", quantization_config=shaken(said, draw))
        else:
            name = draw.choice(sorted(name for name in whole if ".experts." in name))
            other = draw.choice(sorted(whole))
            tensors[name] = draw.choice(
                [
                    tensors[other],
                    tensors[name][:1],
                    tensors[name][..., None],
                    torch.ones(()),
                    torch.ones(0, 4),
                ]
            ).clone()
            edit_json(tmp_path / "config.json", quantization_config=said)
        write_checkpoint(tmp_path, tensors)
        try:
            for weights in read_moe(open_checkpoint(tmp_path)).layers.values():
                for stack in (weights.gate_EFD, weights.up_EFD, weights.down_EDF):
                    for expert in range(weights.n_experts):
                        assert stack.read(expert).shape == stack.shape[1:]
        except BadInput as error:
            refused += 1
            assert len(str(error).splitlines()) == 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__} escaped: {error}") from error
    assert 10 <= refused < 60
