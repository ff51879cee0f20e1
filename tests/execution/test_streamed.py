"""Streamed and sharded runs against resident ones: the same choices, from weights read once."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import moescope
from checkpoint.quantised.builders import (
    compressed_checkpoint,
    fp8_checkpoint,
    gpt_oss_checkpoint,
    scheme_of,
)
from checkpoints import edit_json
from families.tiny_models import KINDS
from moescope import storage
from moescope.checkpoint import open_checkpoint
from moescope.cli import main
from moescope.errors import BadInput
from moescope.execution.documents import Document
from moescope.execution.models import load_model
from moescope.execution.streamed import FileStates, StreamedModel, load_streamed
from moescope.execution.ways import Execution, choose_way, parse_size
from moescope.routing.collectors import trace_model
from moescope.routing.counts_to_tables import Traced
from routing.tiny_text import save_model, texts, write_jsonl

QUICK = {"deepseek_v3", "gpt_oss", "jamba", "switch_transformers"}
FAULTY = {
    "nllb-moe"
}  # this version of transformers runs the wrong experts, so resident runs are rejected too


def documents(count: int = 16, seed: int = 0) -> list[Document]:
    """Documents of different lengths, so that most batches have padding."""
    draw = np.random.default_rng(seed)
    return [
        Document(number, number % 2, draw.integers(3, 64, draw.integers(3, 40))) for number in range(count)
    ]


def traced_alike(resident: Traced, streamed: Traced) -> None:
    """All integers are equal; sums of gates may differ in rounding, since weights are aligned otherwise."""
    assert len(resident.counts) == len(streamed.counts) > 0
    for ours, theirs in zip(streamed.counts, resident.counts, strict=True):
        assert (ours.layer, ours.layer_name, ours.k) == (theirs.layer, theirs.layer_name, theirs.k)
        for name in ("counts_MBE", "pairs_EE", "first_ME"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
        np.testing.assert_allclose(ours.sums_MBS, theirs.sums_MBS, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(ours.gate_weight_MBE, theirs.gate_weight_MBE, rtol=1e-5)
    assert np.array_equal(streamed.probe.chosen_LTK, resident.probe.chosen_LTK)
    assert np.array_equal(streamed.probe.predicted_T, resident.probe.predicted_T)
    assert streamed.scoring == resident.scoring
    for layer, rows_ED in resident.routers.items():
        assert np.array_equal(streamed.routers[layer], rows_ED)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow])
        for kind in sorted(set(KINDS) - FAULTY)
    ],
)
def test_streamed_counts_equal_resident_ones_in_every_family(tmp_path, kind):
    folder = str(save_model(tmp_path, kind, tokenizer=False))
    both = [
        trace_model(load(folder, "float32", "cpu"), ["a", "b"], documents(), ("prefill",), 4)
        for load in (load_model, load_streamed)
    ]
    traced_alike(*both)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("streamed")
    save_model(folder / "mixtral")
    write_jsonl(folder / "a.jsonl", texts(30, seed=0))
    write_jsonl(folder / "b.jsonl", texts(30, seed=1, first=25, words=25))
    return folder


def trace(place: Path, out: Path, **options):
    domains = [f"{name}={place / name}.jsonl" for name in "ab"]
    return moescope.trace(place / "mixtral", domain=domains, out=out, device="cpu", quiet=True, **options)


def test_all_tables_of_a_streamed_trace_are_those_of_a_resident_one(place, tmp_path):
    runs = [trace(place, tmp_path / way, execution=way, save_tokens=True) for way in ("resident", "streamed")]
    assert runs[0].tables == runs[1].tables
    for name in runs[0].tables:
        assert runs[0].table(name).equals(runs[1].table(name)), name
    assert [run.info["execution"][0]["way"] for run in runs] == ["resident", "streamed"]
    size = open_checkpoint(place / "mixtral").bytes()
    assert 0.8 * size < runs[1].info["execution"][0]["bytes_read"] <= 1.02 * size


def test_one_layer_and_the_next_have_weights_while_a_layer_runs(tmp_path):
    model = load_streamed(str(save_model(tmp_path, "mixtral", tokenizer=False)), "auto", "cpu")
    held = []
    for layer in model.weights.layers:
        layer.blocks[0].experts.register_forward_pre_hook(
            lambda *_: held.append(
                [
                    number
                    for number, each in enumerate(model.weights.layers)
                    if not next(each.blocks[0].experts.parameters()).is_meta
                ]
            )
        )
    trace_model(model, ["a", "b"], documents(), ("prefill",), 4)
    assert all(set(numbers) <= {min(numbers), min(numbers) + 1} for numbers in held)
    assert [min(numbers) for numbers in held] == sorted(min(numbers) for numbers in held)
    assert all(next(layer.blocks[0].experts.parameters()).is_meta for layer in model.weights.layers)


# --- quantised checkpoints


QUANTISED = {
    "fp8": fp8_checkpoint,
    "mxfp4": gpt_oss_checkpoint,
    "mxfp4, wide": lambda folder: gpt_oss_checkpoint(folder, d_ff=96),
    "int4": lambda folder: compressed_checkpoint(folder, scheme_of()),
}


@pytest.mark.parametrize("scheme", QUANTISED)
def test_quantised_checkpoints_give_the_counts_of_what_transformers_decodes(tmp_path, scheme):
    QUANTISED[scheme](tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    edit_json(
        tmp_path / "config.json",
        quantization_config={**config["quantization_config"], "dequantize": True},
        pad_token_id=0,
    )
    ids = [Document(one.number, one.domain, one.ids % 32) for one in documents()]
    resident = load_model(str(tmp_path), "auto", "cpu")
    assert not any(weight.dtype == torch.float8_e4m3fn for weight in resident.model.parameters())
    streamed = load_streamed(str(tmp_path), "auto", "cpu")
    traced_alike(*(trace_model(model, ["a", "b"], ids, ("prefill",), 4) for model in (resident, streamed)))
    size = open_checkpoint(tmp_path).bytes()
    assert 0.8 * size < streamed.weights.bytes_read <= 1.02 * size


# --- hidden states in files


@pytest.fixture(scope="module")
def in_memory(place, tmp_path_factory):
    return trace(place, tmp_path_factory.mktemp("runs") / "memory", execution="streamed")


@pytest.fixture(scope="module")
def too_little(place) -> str:
    """Memory for the layers and nothing else."""
    return str(load_streamed(str(place / "mixtral"), "auto", "cpu").expect(0).memory_bytes)


def equal_tables(run, other) -> None:
    assert run.tables == other.tables
    for name in run.tables:
        assert run.table(name).equals(other.table(name)), name


def test_hidden_states_in_files_change_no_number_and_are_removed(place, tmp_path, in_memory, too_little):
    run = trace(place, tmp_path / "run", execution="streamed", memory=too_little)
    equal_tables(run, in_memory)
    assert in_memory.info["execution"][0]["disk_bytes"] == 0 < run.info["execution"][0]["disk_bytes"]
    assert not (run.path / "streamed").exists()


@pytest.mark.parametrize("kind", ["switch_transformers", "glm_moe_dsa"])
def test_states_of_several_tensors_and_stacks_survive_a_file(tmp_path, kind):
    folder = str(save_model(tmp_path / "model", kind, tokenizer=False))
    execution = Execution("streamed", 10**12, tmp_path / "states")
    traced = []
    for resumes in (False, True):
        model = load_streamed(folder, "float32", "cpu", execution=execution)
        if resumes:
            model.open_states = lambda ids, kinds: FileStates(tmp_path / "states", "key")
        traced.append(trace_model(model, ["a", "b"], documents(), ("prefill",), 4))
    traced_alike(*traced)


@contextmanager
def interrupted_at(layer: int, batch: int = 0) -> Iterator[None]:
    """A run in this context is interrupted while the layer's outputs are written."""
    own = FileStates.put

    def put(states, number, value):
        if (states.part, number) == (layer, batch):
            raise KeyboardInterrupt
        own(states, number, value)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(FileStates, "put", put)
        yield


@pytest.mark.parametrize("layer", [0, 2])
def test_an_interrupted_trace_resumes_at_its_layer(
    place, tmp_path, in_memory, too_little, monkeypatch, layer
):
    """With all tables equal, those of single tokens included."""
    own, started = StreamedModel.loaded_parts, []
    with interrupted_at(layer, 1):
        trace(place, tmp_path / "run", execution="streamed", memory=too_little, batch_size=3)
    assert (tmp_path / "run" / "streamed").exists() == (layer > 0)

    def loaded_parts(model, first=0):
        started.append(first)
        return own(model, first)

    monkeypatch.setattr(StreamedModel, "loaded_parts", loaded_parts)
    run = trace(place, tmp_path / "run", execution="streamed", memory=too_little, batch_size=3)
    assert started == [layer]
    equal_tables(run, trace(place, tmp_path / "other", execution="resident", batch_size=3))


DAMAGED = {
    "no number of batches": {"batches": None},
    "batches that are a word": {"batches": "x"},
    "no digests": {"digests": None},
    "a part that is a word": {"part": "x"},
    "a negative part": {"part": -1},
    "a part beyond the last": {"part": 10**30},
}


@pytest.fixture(scope="module")
def interrupted_run(place, too_little, tmp_path_factory) -> Path:
    """A streamed trace that has run one layer."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    with interrupted_at(1):
        trace(place, folder, execution="streamed", memory=too_little)
    return folder


@pytest.mark.parametrize("damage", [*DAMAGED, "part-00000.pt"])
def test_damaged_hidden_states_are_one_line_with_a_remedy(
    place, tmp_path, interrupted_run, too_little, damage
):
    stored = Path(shutil.copytree(interrupted_run, tmp_path / "run")) / "streamed"
    if damage in DAMAGED:
        manifest = json.loads((stored / "manifest.json").read_text())
        (stored / "manifest.json").write_text(json.dumps(manifest | DAMAGED[damage]))
    else:
        os.truncate(stored / damage, (stored / damage).stat().st_size // 2)
    with pytest.raises(BadInput, match=r"run/streamed: .* --overwrite") as error:
        trace(place, tmp_path / "run", execution="streamed", memory=too_little)
    assert "\n" not in str(error.value)


def flip_one_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def swap_two_tokens(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[128:256] + content[:128] + content[256:])


CHANGES = {
    "a bit": flip_one_bit,
    "the order": swap_two_tokens,
    "the length": lambda file: os.truncate(file, file.stat().st_size // 2),
    "its presence": Path.unlink,
}


@pytest.mark.parametrize("change", CHANGES)
def test_hidden_states_that_changed_on_disk_are_not_used(
    place, tmp_path, interrupted_run, in_memory, too_little, caplog, change
):
    """The pass starts again, says so in one line, and has the numbers of an undisturbed run."""
    stored = Path(shutil.copytree(interrupted_run, tmp_path / "run")) / "streamed"
    CHANGES[change](stored / "states-1" / "000000.pt")
    equal_tables(trace(place, tmp_path / "run", execution="streamed", memory=too_little), in_memory)
    (line,) = caplog.messages
    assert "states-1" in line
    assert "\n" not in line


@pytest.mark.parametrize("how", ["failpoint", "limit"])
def test_a_full_disk_is_one_line_and_the_run_resumes(place, tmp_path, in_memory, too_little, how):
    """The disk fills up while the second layer's outputs are written."""
    own = FileStates.put
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def put(states, batch, value):
        if states.part == 1 and batch == 2:
            if how == "failpoint":
                storage.failpoint = storage.Failpoint("full:1")
            else:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        own(states, batch, value)

    try:
        with pytest.MonkeyPatch.context() as patched, pytest.raises(BadInput) as full:
            patched.setattr(FileStates, "put", put)
            trace(place, tmp_path / "run", execution="streamed", memory=too_little)
    finally:
        storage.failpoint = None
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "states-0: cannot be written" in str(full.value)
    assert "resume" in str(full.value)
    manifest = json.loads((tmp_path / "run" / "streamed" / "manifest.json").read_text())
    assert manifest["part"] == 1
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] in ("running", "failed")
    equal_tables(trace(place, tmp_path / "run", execution="streamed", memory=too_little), in_memory)


# --- the choice


def test_auto_takes_the_first_way_that_fits(tmp_path):
    checkpoint = open_checkpoint(save_model(tmp_path, "mixtral", tokenizer=False))
    needed = 1.1 * sum(info.parameters for info in checkpoint.tensors.values())

    def chosen(memory: float, dtype: str = "float32") -> str:
        return choose_way(checkpoint, dtype, "cpu", Execution("auto", int(memory)))

    assert chosen(4 * needed + 9) == "resident"
    assert chosen(4 * needed - 9) == "streamed"
    assert chosen(2 * needed + 9, "bfloat16") == "resident"
    assert choose_way(checkpoint, "auto", "cpu", Execution("streamed", 10**12)) == "streamed"


@pytest.mark.parametrize(
    ("text", "count"), [("8GB", 8 * 10**9), ("500mb", 5 * 10**8), ("1.5 GiB", 3 * 2**29), ("12", 12)]
)
def test_sizes_are_read_as_people_write_them(text, count):
    assert parse_size("--memory", text) == count


@pytest.mark.parametrize("text", ["", "8 apples", "-1GB", "0GB"])
def test_what_is_no_size_is_one_line(text):
    with pytest.raises(BadInput, match="--memory"):
        parse_size("--memory", text)


def test_a_layer_larger_than_the_memory_is_rejected_before_anything_is_read(place, tmp_path):
    with pytest.raises(BadInput, match=r"needs at least .* give --memory 1MB"):
        trace(place, tmp_path / "run", execution="streamed", memory="20KB")
    assert not (tmp_path / "run").exists()


def test_the_minimum_that_a_rejected_run_states_is_enough(place, tmp_path, monkeypatch, capsys):
    """On the command line: one line before the start; with the stated --memory the run succeeds."""
    words = ["moescope", "trace", str(place / "mixtral"), "--text", str(place / "a.jsonl"), "--no-report"]
    words += ["--device", "cpu", "--execution", "streamed", "--out", str(tmp_path / "run"), "--memory"]
    monkeypatch.setattr("sys.argv", [*words, "20KB"])
    monkeypatch.setattr("signal.signal", lambda *_: None)  # of this process
    with pytest.raises(SystemExit) as rejected:
        main()
    assert rejected.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not (tmp_path / "run").exists()
    least = re.search(r"needs at least .* give --memory (\S+)", line)[1]
    run = trace(place, tmp_path / "run", execution="streamed", memory=least)
    assert run.info["execution"][0]["way"] == "streamed"


def test_the_decode_phase_needs_the_whole_model(place, tmp_path):
    with pytest.raises(BadInput, match="--execution resident"):
        trace(place, tmp_path / "run", execution="streamed", phase="decode")


def test_a_weight_that_is_not_finite_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    file = save_model(tmp_path, "mixtral", tokenizer=False) / "model.safetensors"
    tensors = load_file(file)
    broken = "model.layers.1.self_attn.q_proj.weight"
    tensors[broken][0, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=broken):
        trace_model(load_streamed(str(tmp_path), "auto", "cpu"), ["a", "b"], documents(), ("prefill",), 4)


def test_layers_that_share_state_are_rejected_by_name(tmp_path):
    model = load_streamed(str(save_model(tmp_path, "mixtral", tokenizer=False)), "auto", "cpu")
    layer = model.weights.layers[1].module
    shared: dict[str, int] = {}
    own = type(layer).forward

    class Sharing(type(layer)):
        def forward(self, hidden_states, *args, **kwargs):
            kwargs.pop("shared")["key"] = 1
            return own(self, hidden_states, *args, **kwargs)

    layer.__class__ = Sharing
    layer.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "shared": shared}), with_kwargs=True
    )
    with pytest.raises(BadInput, match=r"'mixtral' cannot be streamed .*share state.*--execution sharded"):
        trace_model(model, ["a", "b"], documents(), ("prefill",), 4)


# --- sharded


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_a_model_over_memory_and_disk_gives_the_counts_of_a_resident_one(tmp_path, kind):
    folder = str(save_model(tmp_path / "model", kind, tokenizer=False))
    n_layers = json.loads((tmp_path / "model" / "config.json").read_text())["num_hidden_layers"]
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{at}": "disk" if at else "cpu" for at in range(n_layers)}
    placement = {"device_map": places, "offload_folder": str(tmp_path / "offloaded")}
    sharded = load_model(folder, "float32", "cpu", placement=placement)
    assert any(weight.is_meta for weight in sharded.model.parameters())
    resident = load_model(folder, "float32", "cpu")
    traced_alike(
        *(trace_model(model, ["a", "b"], documents(), ("prefill",), 4) for model in (resident, sharded))
    )


def test_the_time_left_is_known_without_a_limit_of_tokens(place, tmp_path, monkeypatch, capsys):
    """A streamed run reads the text first, so that its length is known."""
    for name, value in {"MINUTE": 0.0, "BURST": 0.0, "GROUPS": 1}.items():  # this text is read in an instant
        monkeypatch.setattr(f"moescope.progress.{name}", value)
    domains = [f"{name}={place / name}.jsonl" for name in "ab"]
    run = moescope.trace(
        place / "mixtral", domain=domains, out=tmp_path / "run", device="cpu", execution="streamed"
    )
    tokens = sum(run.info["coverage"][0]["tokens"].values())
    lines = capsys.readouterr().err.splitlines()
    assert any(f"of {tokens:,} tokens" in line and line.endswith("left") for line in lines)
    assert any(line.startswith("execution streamed: expected memory") for line in lines)


def test_a_model_of_the_lab_runs_resident_and_says_so(tmp_path):
    shipped = Path(moescope.__file__).parent / "demo" / "shipped" / "model"
    ids = tmp_path / "ids.jsonl"
    ids.write_text("".join(f"{[number, *range(5, 25)]}\n" for number in range(30)))
    options = {"token_ids": ids, "device": "cpu", "quiet": True}
    run = moescope.trace(shipped, out=tmp_path / "run", **options)
    assert run.info["execution"][0]["way"] == "resident"
    assert run.info["execution"][0]["memory_bytes"] >= open_checkpoint(shipped).bytes()
    with pytest.raises(BadInput, match="run resident"):
        moescope.trace(shipped, out=tmp_path / "other", execution="streamed", **options)
