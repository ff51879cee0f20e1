"""Lab models traced and watched through the routing they hand out.

The same counts as hooks on transformers' own model find.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from decoder.tiny_lab import tiny, trained
from lab.tiny_training import tiny_config
from moescope.decoder.model import LabModel
from moescope.decoder.routers import ROUTERS, RouterInput
from moescope.decoder.saving import save_model
from moescope.decoder.vocabulary import Bytes
from moescope.execution.adapters import RouterReads, find_blocks
from moescope.execution.documents import Document
from moescope.execution.lab_models import Traceable, TraceableVocabulary, load_any_model, load_traced
from moescope.lab.training import initial_model
from moescope.routing.collectors import trace_model
from moescope.routing.counts_to_tables import Traced
from moescope.routing.monitor import LoopMonitor
from moescope.routing.token_sample import TokenText

SURE = 0.9  # of the tokens; the rest may lie where rounding decides between two experts


def saved(router: str, folder: Path) -> Path:
    torch.manual_seed(3)
    model = LabModel(tiny_config(router).model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)  # decisions that are clear
    save_model(model, Bytes(), folder)
    return folder


def documents() -> list[Document]:
    generator = np.random.default_rng(0)
    return [Document(n, n % 2, generator.integers(32, 127, generator.integers(5, 40))) for n in range(12)]


def traced(name: Path, phases: tuple[str, ...] = ("prefill",), batch_size: int = 5) -> Traced:
    return trace_model(load_traced(name, "auto", "cpu"), ["a", "b"], documents(), phases, batch_size)


@pytest.mark.parametrize("router", ["top2", "switch_top1"])
def test_counts_are_those_that_hooks_find_in_transformers_own_model(router: str, tmp_path: Path):
    from moescope.execution.models import load_model

    folder = saved(router, tmp_path / "model")
    ours = traced(folder)
    theirs = trace_model(load_model(str(folder), "auto", "cpu"), ["a", "b"], documents(), ("prefill",), 5)
    for mine, other in zip(ours.counts, theirs.counts, strict=True):
        assert np.array_equal(mine.counts_MBE, other.counts_MBE)
        np.testing.assert_allclose(mine.gate_weight_MBE, other.gate_weight_MBE, atol=1e-4)
        np.testing.assert_allclose(
            mine.sums_MBS, other.sums_MBS, atol=1e-3
        )  # entropy, confidence, margin, z-loss ...
    assert mine.counts_MBE.sum() > 0


@pytest.mark.parametrize("router", [name for name in ROUTERS if name != "dense"])
def test_decoding_and_batches_of_any_size_count_the_same(router: str, tmp_path: Path):
    folder = saved(router, tmp_path / "model")
    both, alone = traced(folder, ("prefill", "decode")), traced(folder, batch_size=1)
    total = sum(len(document.ids) for document in documents())
    for phase in ("prefill", "decode"):
        for mine, other in zip([c for c in both.counts if c.phase == phase], alone.counts, strict=True):
            assert mine.sums("tokens").sum() == total
            moved = np.abs(mine.counts_MBE - other.counts_MBE).sum() / 2
            assert moved <= (1 - SURE) * total


@pytest.mark.parametrize("router", ["top2", "switch_top1", "loss_free"])
def test_windows_are_no_longer_than_the_length_that_was_trained(router: str, tmp_path: Path):
    short, long = (tiny_config(router, sequence_length=length) for length in (12, 20))
    save_model(initial_model(short, None, "cpu"), Bytes(), tmp_path / "a")
    save_model(initial_model(long, str(tmp_path / "a"), "cpu"), Bytes(), tmp_path / "b")
    save_model(initial_model(short, str(tmp_path / "b"), "cpu"), Bytes(), tmp_path / "c")
    for name, length in (("a", 12), ("b", 20), ("c", 20)):
        for prefer_transformers in (False, True):
            loaded = load_any_model(str(tmp_path / name), "auto", "cpu", prefer_transformers)
            assert loaded.window == length


def test_tokens_are_spelled_as_they_stand_in_the_text():
    words = TokenText(TraceableVocabulary(Bytes()))
    assert [words.of(token) for token in b"A b"] == ["A", " ", "b"]
    assert words.of("é".encode()[0]) == "\N{REPLACEMENT CHARACTER}"  # half a letter
    assert words.around([*b"caf"], "é".encode()[0], ["é".encode()[1]])[0] == "caf"


def test_monitor_leaves_padding_and_evaluation_out(tmp_path: Path):
    torch.manual_seed(0)
    model = LabModel(tiny_config().model).train()
    monitor = LoopMonitor(tmp_path / "run", every=1).watch(model)
    ids = torch.randint(0, 250, (3, 10))
    mask = torch.ones(3, 10, dtype=torch.bool)
    mask[1, 4:] = False
    model(ids, mask_BL=mask, targets_BL=ids).loss.backward()
    model.eval()
    model(ids)
    model.train()
    monitor.step()
    run = monitor.close()
    assert run is not None
    assert run.table("load").groupby("layer")["tokens"].sum().tolist() == [24 * 2] * 2


def test_a_traced_lab_model_needs_no_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import sys

    folder = saved("top2", tmp_path / "model")
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it now fails
    assert traced(folder).counts[0].counts_MBE.sum() > 0


@pytest.mark.parametrize("router", list(ROUTERS))
def test_a_router_built_anew_of_its_own_tensors_answers_alike_and_draws_no_random_number(router: str):
    """In every layer, on whatever the layer is given.

    The state handed on and the token ids are part of it.
    """
    model = trained(tiny(router, vocabulary=258)).eval()
    blocks = {block.layer: block for block in find_blocks(Traceable(model, Bytes()))}
    generator = torch.random.get_rng_state()
    ids_T = torch.randint(0, 258, (30,), generator=torch.Generator().manual_seed(1))
    carried_TR = None
    for layer, own in enumerate(model.routers):
        x_TD = torch.randn(30, 32, generator=torch.Generator().manual_seed(layer))
        reads = RouterReads(x_TD, ids_T, carried_TR)
        routed = own(RouterInput(x_TD, ids_T, torch.ones(30, dtype=torch.bool), layer, carried_TR))
        n_experts = blocks[layer].n_experts
        for ask in (blocks[layer].decide_alone, blocks[layer].with_router(own.state_dict(), n_experts, None)):
            decision, logits_TE, _ = ask(reads)
            assert torch.equal(decision.chosen_TK, routed.chosen_TK)
            assert torch.equal(decision.gates_TK, routed.gates_TK)
            assert (logits_TE is None) == (routed.logits_TE is None)
        carried_TR = routed.carried_TR
    assert torch.equal(torch.random.get_rng_state(), generator)


@pytest.mark.parametrize("router", ["some", "expert_choice"])
def test_rows_of_a_linear_view_give_the_logits_and_are_stored_as_the_router_s_own(router: str):
    model = trained(
        tiny(router, router_options={"published_temperature": True} if router == "some" else {})
    ).eval()
    own = model.routers[1]
    if router == "some":
        own.strength_E.copy_(torch.linspace(0.3, 1, 8))
    view = own.linear_view()
    x_TD = torch.randn(30, 32, generator=torch.Generator().manual_seed(0))
    routed = own(RouterInput(x_TD, torch.zeros(30, dtype=torch.long), torch.ones(30, dtype=torch.bool), 1))
    torch.testing.assert_close(view.reads(x_TD) @ view.rows_ED.T, routed.logits_TE)
    stored = view.stored(view.rows_ED, own.threshold_E if view.thresholds else None)
    assert view.thresholds == (router == "expert_choice")
    assert view.rows_name in stored
    for name, tensor in stored.items():
        torch.testing.assert_close(tensor, own.state_dict()[name])
