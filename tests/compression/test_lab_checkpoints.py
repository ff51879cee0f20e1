"""Lab checkpoints in the lab's own layout compressed on text.

Sums, perplexity and errors against the lab model computed by hand.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from decoder.tiny_lab import tiny, trained
from moescope.compression.plan import read_plan
from moescope.compression.verb import compress
from moescope.decoder.model import LabModel
from moescope.decoder.saving import load_model, save_model
from moescope.decoder.vocabulary import Bytes
from moescope.errors import BadInput
from moescope.execution.documents import Document
from moescope.execution.evaluation import is_held_out
from moescope.execution.lab_models import load_any_model
from moescope.run import Run
from moescope.types import Routing

TEXTS = [f"text {n} of many: {n * n} is {n} times {n}, {'abcdefgh'[n % 8] * (n % 5)}" for n in range(30)]


def saved(folder: Path, router: str, **changes: object) -> Path:
    save_model(trained(tiny(router, vocabulary=258, **changes)).eval(), Bytes(), folder)
    return folder


def written(place: Path) -> Path:
    path = place / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return path


def held_out() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Token ids of the calibrating texts, and of those held out."""
    parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for text in TEXTS:
        ids = Bytes().encode(text)
        parts[is_held_out(Document(0, 0, ids))].append(torch.from_numpy(np.asarray(ids)))
    return parts


@torch.no_grad()
def perplexity(model: LabModel, documents: list[torch.Tensor]) -> float:
    losses = [
        functional.cross_entropy(model(ids[None]).logits_BLV[0, :-1], ids[1:], reduction="sum")
        for ids in documents
    ]  # type: ignore[index]
    return math.exp(sum(losses).item() / sum(len(ids) - 1 for ids in documents))  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("lab")
    saved(place / "model", "loss_free")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "moescope.execution.models.load_model", lambda *given: pytest.fail("transformers was asked")
        )
        compress(
            place / "model",
            method="reap",
            keep=0.5,
            text=written(place),
            apply=place / "small",
            out=place / "run",
            controls=1,
            quiet=True,
        )
    return place


@pytest.fixture
def run(place: Path) -> Run:
    return Run.load(place / "run")


def test_saliency_is_gate_times_output_norm_of_the_lab_models_own_experts(run: Run, place: Path):
    model, _ = load_model(place / "model")
    norms: dict[tuple[int, int], list[float]] = {}

    def watch(
        module: torch.nn.Module, given: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, object]
    ) -> None:
        x_TD, routed, experts = given[0], output[1], module.experts
        for x, chosen, gates in zip(x_TD, routed.chosen_TK.tolist(), routed.gates_TK.tolist(), strict=True):
            for expert, gate in zip(chosen, gates, strict=True):
                gate_F, up_F = (experts.gate_up[expert] @ x).chunk(2)
                made = experts.down[expert] @ (functional.silu(gate_F) * up_F)
                norms.setdefault((module.layer, expert), []).append(gate * made.norm().item())

    for block in model.blocks:
        block.mlp.register_forward_hook(watch)
    with torch.no_grad():
        for ids in held_out()[0]:
            model(ids[None])
    table = run.table("saliency").set_index(["layer", "expert"])
    assert len(table) == 3 * 8
    for key, row in table.iterrows():
        assert row["tokens"] == len(norms.get(key, []))
        assert row["reap"] == pytest.approx(np.mean(norms[key]) if key in norms else 0, rel=1e-4)


def test_the_compressed_checkpoint_is_a_lab_model_of_the_kept_experts_and_biases(run: Run, place: Path):
    before, after = load_model(place / "model")[0], load_model(place / "small")[0]
    plan, _ = read_plan(run.path)
    assert after.config.experts == 4
    stored = json.loads((place / "small" / "config.json").read_text())
    assert (stored["num_experts"], stored["moescope_lab"]["experts"]) == (4, 4), "one number of experts"
    assert {layer.layer for layer in plan.layers} == {0, 1, 2}
    for layer in plan.layers:
        kept, old, new = list(layer.dominants), before.blocks[layer.layer].mlp, after.blocks[layer.layer].mlp
        assert torch.equal(new.experts.down, old.experts.down[kept])
        assert torch.equal(new.router.weight, old.router.weight[kept])
        assert torch.equal(new.router.bias_E, old.router.bias_E[kept])
        assert old.router.bias_E.any()


@torch.no_grad()
def test_measured_errors_are_those_of_both_models_blocks(place: Path):
    from moescope.compression.damage import block_outputs
    from moescope.execution.adapters import RouterReads

    traced = load_any_model(str(place / "small"), "auto", "cpu", prefer_transformers=True)
    x_TD = torch.randn(20, 32, generator=torch.Generator().manual_seed(1))
    found = block_outputs(traced, {1: RouterReads(x_TD)})
    assert list(found) == [1]
    made_TD, routed = traced.model.model.blocks[1].mlp(
        x_TD, torch.zeros(20, dtype=torch.long), torch.ones(20, dtype=torch.bool)
    )
    torch.testing.assert_close(found[1][0], made_TD, rtol=1e-4, atol=1e-6)
    assert torch.equal(found[1][1], routed.chosen_TK)


def compressions(*cases: tuple[str, str, dict]) -> list:
    """The first two are run in the fast suite."""
    return [pytest.param(*case, marks=[pytest.mark.slow][: place > 1]) for place, case in enumerate(cases)]


@pytest.mark.parametrize(
    ("router", "method", "changes"),
    compressions(
        ("some", "reap", {}),
        ("spectra", "m_smoe_permuted", {}),
        ("expert_choice", "reap", {}),
        ("hash", "reap", {}),
        ("spectra", "reap", {}),
        ("loss_free", "m_smoe", {}),
        ("topk", "hc_smoe", {"block": "some"}),
        ("hash", "hc_smoe", {}),
        ("some", "m_smoe", {}),
        ("expert_choice", "weights", {}),
    ),
)
def test_experts_of_every_router_are_pruned_or_merged_and_judged_by_the_lab(
    router: str, method: str, changes: dict, tmp_path: Path
):
    model = saved(tmp_path / "model", router, layers=2, **changes)
    found = compress(
        model,
        method=method,
        keep=4,
        text=written(tmp_path),
        apply=tmp_path / "small",
        out=tmp_path / "run",
        controls=1,
        quiet=True,
    )
    small, _ = load_model(tmp_path / "small")
    assert small.config.experts == 4
    whole = found.table("damage").query("layer.isna()").set_index("method")
    assert whole["perplexity"].notna().all()
    assert whole["perplexity"][method] == pytest.approx(perplexity(small, held_out()[1]), rel=1e-4)
    original = perplexity(load_model(model)[0], held_out()[1])
    assert whole["perplexity_original"][method] == pytest.approx(original, rel=1e-4)
    layers = found.table("damage").dropna(subset="layer")
    assert len(layers) == 2 * 2
    assert layers[["predicted_error", "measured_error"]].notna().all(axis=None)
    assert layers["router_kl"].notna().all() == (router != "hash")
    assert found.table("clusters")["kept"].all() == (method != "reap")
    merged = "join" if router in ("hash", "spectra") else "fold"
    assert found.info["setup"]["router"] == ("slice" if method == "reap" else merged)
    assert not any("not recognised" in said or "no measured error" in said for said in found.info["warnings"])


def test_a_dense_model_has_nothing_to_take_away(tmp_path: Path):
    model = saved(tmp_path / "model", "dense", layers=1)
    for method in ("random", "weights"):
        with pytest.raises(BadInput, match="one expert per layer, nothing to compress"):
            compress(model, keep=1, method=method, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("router", ["some", "expert_choice"])
def test_rows_fitted_for_other_routers_are_nearer_the_old_one_than_means_and_keep_loads(
    router: str, tmp_path: Path
):
    model = saved(tmp_path / "model", router, layers=2)
    run = compress(
        model,
        method="weights",
        keep=4,
        text=written(tmp_path),
        apply=tmp_path / "small",
        out=tmp_path / "run",
        controls=0,
        judge=False,
        quiet=True,
    )
    settings = run.info["setup"]["plan_settings"]
    assert settings["router_kl"] < settings["router_kl_of_mean_rows"]
    layers = run.table("damage").query("layer.notna()")
    assert layers["router_kl"].mean() == pytest.approx(
        settings["router_kl"], rel=1e-3
    )  # of the router that was asked
    (original, _), (small, _) = load_model(model), load_model(tmp_path / "small")
    plan, fits = read_plan(run.path)
    for layer in plan.layers:
        new = small.blocks[layer.layer].mlp.router.state_dict()
        for name, tensor in fits[layer.layer].state.items():
            torch.testing.assert_close(new[name], tensor)
        assert fits[layer.layer].state.keys() == ({"strength_E"} if router == "some" else {"midpoints_E"})
    if router == "some":
        return
    ids = torch.cat([torch.from_numpy(np.asarray(Bytes().encode(text))) for text in TEXTS])[None, :60]
    before: list[Routing] = []
    after: list[Routing] = []
    with torch.no_grad():
        original(ids, consume=before.append)
        small(ids, consume=after.append)
    groups = plan.layers[0].groups  # the first layer's states are the same in both models
    for place, group in enumerate(groups):
        took = torch.isin(before[0].chosen_TK, torch.tensor(group)).any(-1).float().mean()
        takes = (after[0].chosen_TK == place).any(-1).float().mean()
        assert abs(took - takes) < 0.15


@pytest.mark.parametrize("router", ["some", "expert_choice"])
def test_without_a_text_a_group_takes_over_its_leader_s_part_of_the_router(router: str, tmp_path: Path):
    model = saved(tmp_path / "model", router, layers=1)
    run = compress(
        model, method="weights", keep=4, apply=tmp_path / "small", out=tmp_path / "run", quiet=True
    )
    plan, _ = read_plan(run.path)
    assert plan.router == "join"
    leaders = list(plan.layers[0].dominants)
    old, new = (load_model(place)[0].routers[0].state_dict() for place in (model, tmp_path / "small"))
    for name in ("direction_ED", "strength_E", "usage_E") if router == "some" else ("weight", "midpoints_E"):
        assert torch.equal(new[name], old[name][leaders])


@pytest.mark.parametrize(
    ("router", "settings", "line"),
    [
        ("hash", {"method": "m_smoe"}, "its router, hash, has no logits for m_smoe"),
        ("hash", {"method": "weights", "keep": 1}, "a token is routed to 2; nearest possible: 2"),
    ],
)
def test_what_a_router_of_the_lab_cannot_become_is_rejected_before_any_work(
    router: str, settings: dict, line: str, tmp_path: Path
):
    model = saved(tmp_path / "model", router, layers=1)
    with pytest.raises(BadInput, match=line):
        compress(model, text=written(tmp_path), out=tmp_path / "run", **{"keep": 4, **settings})
    assert not (tmp_path / "run").exists()
