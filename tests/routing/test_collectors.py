"""A model over documents.

What is counted equals a naive recomputation, in every family, however the text is dealt out.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from families.tiny_models import tiny_model
from moescope.errors import BadInput
from moescope.execution import collect
from moescope.execution.documents import Document
from moescope.execution.models import TracedModel, runner_of
from moescope.families import FAMILIES, MODELS
from moescope.families.lab import LAB
from moescope.families.replaced import REPLACED
from moescope.routing.collectors import trace_model
from moescope.routing.counts import LayerCounts
from moescope.routing.counts_to_tables import Traced

KINDS = sorted(set(MODELS) - {"kimi_k2", "nllb-moe", *LAB.models, *REPLACED.models})
# one of each disk layout, and one with groups of experts; the rest in `make test-all`
FAST = {
    next(kind for kind in family.models if kind in KINDS)
    for family in FAMILIES
    if {*family.models} & {*KINDS}
}
FAST |= {"deepseek_v3"}
EVERY_KIND = [pytest.param(kind, marks=[] if kind in FAST else pytest.mark.slow) for kind in KINDS]
SPARSE_ATTENTION = ("deepseek_v32", "glm_moe_dsa")


@functools.cache
def traced(kind: str) -> TracedModel:
    model = tiny_model(kind).model
    if (
        kind in SPARSE_ATTENTION
    ):  # their attention picks tokens among exact ties, which padding breaks otherwise
        for module in model.modules():
            if hasattr(module, "index_topk"):
                module.index_topk = 64
    return TracedModel(kind, model, runner_of(model), None, "cpu")


def documents(count: int = 8, seed: int = 0, domains: int = 2) -> list[Document]:
    generator = np.random.default_rng(seed)
    return [
        Document(number, number % domains, generator.integers(3, 64, generator.integers(2, 20)))
        for number in range(count)
    ]


def trace(
    kind: str, docs: list[Document], batch_size: int = 3, phases: tuple[str, ...] = ("prefill",)
) -> Traced:
    return trace_model(traced(kind), ["a", "b"], docs, phases, batch_size)


def naive(kind: str, docs: list[Document]) -> dict[str, np.ndarray]:
    """Gates [layer, domain, expert] and counts, from what experts modules are handed, one document at a time.

    No padding.
    """
    model = traced(kind).model
    given: dict[str, tuple[torch.Tensor, ...]] = {}
    hooks = [
        module.register_forward_hook(
            lambda module, args, kwargs, output, path=path: given.__setitem__(
                path, (*args, *kwargs.values())
            ),
            with_kwargs=True,
        )
        for path, module in model.named_modules()
        if type(module).__name__.endswith("Experts")
    ]
    paths = [path for path, module in model.named_modules() if type(module).__name__.endswith("Experts")]
    counts, mass = np.zeros((len(paths), 2, 4)), np.zeros((len(paths), 2, 4))
    for document in docs:
        ids = torch.from_numpy(document.ids)[None]
        more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            model(input_ids=ids, **more)
        for layer, path in enumerate(paths):
            gates_TE = torch.zeros(len(document.ids), 4)
            if kind.startswith("llama4"):
                handed_ETD = given[path][0].reshape(4, len(document.ids), -1)
                block = model.get_submodule(path.rpartition(".")[0])
                zero = handed_ETD.norm(dim=-1).T > 0
                gates_TE = torch.where(zero, torch.tensor(float("nan")), torch.tensor(0.0))
                assert (zero.sum(-1) == block.top_k).all()
            elif kind == "switch_transformers":
                gates_TE = given[path][1][:, 0] * given[path][2]
            else:
                gates_TE.scatter_(1, given[path][1], given[path][2].float())
            counts[layer, document.domain] += (gates_TE != 0).sum(0).numpy()
            mass[layer, document.domain] += gates_TE.double().sum(0).numpy()
    for hook in hooks:
        hook.remove()
    return {"counts": counts, "mass": mass}


def counts_of(result: Traced, phase: str = "prefill") -> np.ndarray:
    return np.stack([counts.counts_MBE.sum(1) for counts in result.counts if counts.phase == phase])


def mass_of(result: Traced) -> np.ndarray:
    return np.stack([counts.gate_weight_MBE.sum(1) for counts in result.counts])


def same(left: list[LayerCounts], right: list[LayerCounts]) -> None:
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert (a.layer, a.layer_name, a.k) == (b.layer, b.layer_name, b.k)
        assert np.array_equal(a.counts_MBE, b.counts_MBE)
        assert np.array_equal(a.pairs_EE, b.pairs_EE)
        np.testing.assert_allclose(a.gate_weight_MBE, b.gate_weight_MBE, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(a.sums_MBS, b.sums_MBS, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_counts_and_gates_equal_those_of_documents_run_one_by_one(kind):
    docs = documents()
    result, expected = trace(kind, docs), naive(kind, docs)
    assert np.array_equal(counts_of(result), expected["counts"])
    if not kind.startswith("llama4"):
        np.testing.assert_allclose(mass_of(result), expected["mass"], rtol=1e-3, atol=1e-4)
    assert result.corpus.documents == [4, 4]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_padding_batching_and_the_order_of_documents_change_nothing(kind):
    docs = documents()
    alone = trace(kind, docs, batch_size=1)
    together = trace(kind, docs[::-1], batch_size=8)
    same(alone.counts, together.counts)
    assert np.array_equal(alone.probe.chosen_LTK, together.probe.chosen_LTK)
    assert np.array_equal(alone.probe.ids_T, together.probe.ids_T)
    assert np.array_equal(alone.probe.predicted_T, together.probe.predicted_T)


@pytest.mark.parametrize("kind", [kind for kind in EVERY_KIND if kind.values[0] != "switch_transformers"])
def test_reading_token_by_token_decides_as_reading_at_once(kind):
    docs = documents(6)
    at_once = trace(kind, docs)
    one_by_one = trace(kind, docs, phases=("decode",))
    assert {counts.phase for counts in one_by_one.counts} == {"decode"}
    same(at_once.counts, one_by_one.counts)
    assert np.array_equal(at_once.probe.chosen_LTK, one_by_one.probe.chosen_LTK)
    assert np.array_equal(at_once.probe.predicted_T, one_by_one.probe.predicted_T)


@pytest.mark.parametrize(
    ("kind", "chunk"), [("mixtral", 2), ("deepseek_v3", 3), ("qwen3_moe", 7), ("gpt_oss", 3)]
)
def test_reading_in_chunks_changes_nothing(monkeypatch, kind, chunk):
    docs = documents(6)
    at_once = trace(kind, docs)

    def chunks(batch, phase):
        length = batch.ids_BL.shape[1]
        return ((start, min(start + chunk, length)) for start in range(0, length, chunk))

    monkeypatch.setattr(collect, "passes", chunks)
    same(at_once.counts, trace(kind, docs, phases=("decode",)).counts)


def test_both_phases_are_counted_apart_and_tables_without_a_phase_are_of_prefill():
    result = trace("mixtral", documents(), phases=("prefill", "decode"))
    assert [(counts.phase, counts.layer) for counts in result.counts] == [
        ("decode", 0),
        ("decode", 1),
        ("decode", 2),
        ("prefill", 0),
        ("prefill", 1),
        ("prefill", 2),
    ]
    assert np.array_equal(counts_of(result, "decode"), counts_of(result, "prefill"))
    tables = result.tables(0, 0)
    assert (tables["coactivation"]["tokens"].sum() / 2) == sum(
        len(document.ids) for document in documents()
    ) * 3


def test_documents_longer_than_the_window_are_cut_and_every_token_counted(monkeypatch):
    model = traced("mixtral")
    monkeypatch.setattr(TracedModel, "window", 8)
    docs = documents()
    result = trace_model(model, ["a", "b"], docs, ("prefill",), 3)
    tokens = sum(len(document.ids) for document in docs)
    pairs = sum(
        max(len(document.ids[start : start + 8]) - 1, 0) for document in docs for start in range(0, 20, 8)
    )
    assert {int(counts.sums("tokens").sum()) for counts in result.counts} == {tokens}
    assert {int(counts.sums("neighbours").sum()) for counts in result.counts} == {pairs}
    assert sorted(result.probe.next_T[result.probe.next_T >= 0]) == sorted(
        int(token) for document in docs for token in document.ids[1:]
    )


def test_predicted_tokens_are_the_head_s_favourites():
    docs = documents(4)
    result = trace("qwen3_moe", docs)
    model = traced("qwen3_moe").model
    favourites = {}
    for document in docs:
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(document.ids)[None]).logits[0]
        favourites[tuple(document.ids)] = logits.argmax(-1).tolist()
    for number in np.unique(result.probe.document_T):
        mine = result.probe.document_T == number
        assert result.probe.predicted_T[mine].tolist() == favourites[tuple(result.probe.ids_T[mine])]


def test_a_model_without_a_head_predicts_nothing_and_says_so_by_absence():
    result = trace("qwen3_vl_moe_text", documents())
    assert (result.probe.predicted_T == -1).all()
    assert set(result.tables(0, 0)["vocabulary"]["role"]) == {"input", "next"}


def test_every_metric_has_a_value_and_a_floor_on_a_plain_text():
    rows = trace("mixtral", documents(60, domains=2)).tables(0, 0)["routing_layers"]
    rows = rows[rows["domain"] == ""]
    assert rows[rows["value"].isna()]["metric"].tolist() == []
    assert rows[rows["chance"].isna()]["metric"].tolist() == []
    assert set(rows[rows["collapse"].isna()]["metric"]) == {"selection_margin", "z_loss", "dropped"}
    without = {"expert_overlap", "gram_orthogonality", "token_information", "unused", "min_max_ratio"}
    without |= {"gate_weight_min_max_ratio"}
    no_interval = set(rows[rows["low"].isna()]["metric"])
    assert {name for name in no_interval if "similarity" not in name and "vocabulary" not in name} == without


def test_a_model_without_a_cache_has_no_decode_phase(monkeypatch):
    model = traced("mixtral")

    class Forgetful:
        def __call__(self, **given):
            return model.runner(**{**given, "use_cache": False, "past_key_values": None})

    forgetful = TracedModel("m", model.model, model.runner, None, "cpu")
    monkeypatch.setattr(forgetful, "runner", model.runner)
    real = model.runner.forward

    def forget(*args, **kwargs):
        output = real(*args, **kwargs)
        output.past_key_values = None
        return output

    monkeypatch.setattr(model.runner, "forward", forget)
    with pytest.raises(BadInput, match="'mixtral' keeps no cache"):
        trace_model(forgetful, ["a", "b"], documents(), ("decode",), 3)
