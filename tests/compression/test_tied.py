"""Tied routers: every row is kept, the experts of a group are one; judged by running the model so."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.spatial.distance import jensenshannon

import moescope
from families.tiny_models import tiny_model
from moescope.errors import BadInput
from moescope.execution.documents import Document
from moescope.execution.evaluation import is_held_out


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "ids.npy"
    np.save(file, np.random.default_rng(0).integers(3, 60, (150, 12)))
    return file


def tied(model: Path, text: Path, out: Path, method: str = "m_smoe", **more: Any) -> moescope.run.Run:
    given = {"keep": 2, "router": "tie", "controls": 1, "device": "cpu", **more}
    return moescope.compress(model, method=method, token_ids=text, out=out, quiet=True, **given)


def whole_model(run: moescope.run.Run) -> pd.DataFrame:
    return run.table("damage").query("layer.isna()").set_index("method")


def twins(folder: Path, dtype: torch.dtype) -> Path:
    """A model whose experts 0 and 2, and 1 and 3, are equal, with rows of their own."""
    tiny = tiny_model("mixtral")
    with torch.no_grad():
        for block in tiny.blocks:
            for stack in block.experts.parameters():
                stack[2:] = stack[:2]
    tiny.model.to(dtype)
    return tiny.save(folder / "model", "saved")


@pytest.mark.parametrize(
    ("method", "dtype"),
    [("hc_smoe", torch.float32), pytest.param("weights", torch.bfloat16, marks=pytest.mark.slow)],
)
def test_merging_equal_experts_is_exactly_the_identity(tmp_path, text, method, dtype):
    run = tied(twins(tmp_path, dtype), text, tmp_path / "run", method)
    groups = run.table("clusters").groupby(["layer", "cluster"])["expert"].apply(tuple)
    assert set(groups) == {(0, 2), (1, 3)}
    assert run.table("clusters")["weight"].between(0.01, 0.99).all()
    whole = whole_model(run)
    assert whole.loc[method, "perplexity"] == whole.loc[method, "perplexity_original"]
    assert whole.loc[method, "js_divergence"] == pytest.approx(0, abs=1e-12)
    assert whole.loc[method, ["loss_increase", "loss_increase_low", "loss_increase_high"]].tolist() == [0] * 3
    layers = run.table("damage").query("method == @method and layer.notna()")
    assert (layers[["measured_error", "predicted_error", "router_kl"]] == 0).all(axis=None)


def forward_by_hand(model: Any, clusters: pd.DataFrame) -> None:
    """Replace every MoE block by the formula: the sum over a token's two rows of gate times shared expert."""
    for number, layer in enumerate(model.model.layers):
        block = layer.mlp
        rows = clusters[clusters["layer"] == number].set_index("expert")
        gate_up, down = (
            part.detach().double() for part in (block.experts.gate_up_proj, block.experts.down_proj)
        )
        shares = torch.tensor(rows["weight"].to_numpy(), dtype=torch.float64)[:, None, None]
        merged = {
            cluster: ((shares * gate_up)[list(members)].sum(0), (shares * down)[list(members)].sum(0))
            for cluster, members in rows.groupby("cluster").groups.items()
        }
        expert_of = rows["cluster"].to_dict()

        def forward(hidden, router=block.gate.weight.detach().double(), merged=merged, expert_of=expert_of):
            out = torch.zeros_like(hidden, dtype=torch.float64)
            for place in np.ndindex(*hidden.shape[:2]):
                x = hidden[place].double()
                probabilities = torch.exp(router @ x - (router @ x).max())
                first, second = probabilities.argsort(descending=True)[:2].tolist()
                both = probabilities[first] + probabilities[second]
                for row in (first, second):
                    gate_up, down = merged[expert_of[row]]
                    gate, up = (gate_up @ x).chunk(2)
                    out[place] += probabilities[row] / both * (down @ (gate * gate.sigmoid() * up))
            return out.to(hidden.dtype)

        block.forward = forward


def test_perplexity_and_divergence_are_those_of_a_forward_pass_by_hand(tmp_path, text):
    from transformers import AutoModelForCausalLM

    folder = tiny_model("mixtral").save(tmp_path / "model", "saved")
    run = tied(folder, text, tmp_path / "run", "m_smoe", controls=0)
    assert run.table("clusters").groupby(["layer", "cluster"]).size().max() > 1
    original, shared = (AutoModelForCausalLM.from_pretrained(folder).eval() for _ in range(2))
    forward_by_hand(shared, run.table("clusters"))
    held_out = [ids for ids in np.load(text) if is_held_out(Document(0, 0, ids))]
    losses, divergences = [], []
    for ids in held_out:
        with torch.no_grad():
            both = [
                model(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1].double().log_softmax(-1)
                for model in (original, shared)
            ]
        losses.append([-part[np.arange(len(ids) - 1), ids[1:]].mean() for part in both])
        p, q = (part.exp().numpy() for part in both)
        divergences += [jensenshannon(a, b) ** 2 for a, b in zip(p, q, strict=True)]
    before, after = np.exp(np.mean(losses, 0))
    whole = whole_model(run).loc["m_smoe"]
    assert whole["perplexity_original"] == pytest.approx(before, rel=1e-5)
    assert whole["perplexity"] == pytest.approx(after, rel=1e-5)
    assert abs(math.log(after / before)) > 1e-3
    assert whole["js_divergence"] == pytest.approx(np.mean(divergences), rel=1e-4)
    assert whole["judged_documents"] == len(held_out)


def test_a_tied_plan_is_judged_later_with_its_controls_and_cannot_be_written(tmp_path, text):
    folder = tiny_model("mixtral").save(tmp_path / "model", "saved")
    planned = tied(folder, text, tmp_path / "planned", "m_smoe_permuted")
    later = moescope.compress(
        folder,
        plan=planned.path,
        token_ids=text,
        out=tmp_path / "later",
        controls=1,
        device="cpu",
        quiet=True,
    )
    pd.testing.assert_frame_equal(later.table("damage"), planned.table("damage"))
    whole = whole_model(planned)
    assert whole[["perplexity", "loss_increase_low", "js_divergence"]].notna().all(axis=None)
    assert whole["perplexity"].nunique() == 2
    for given in ({"token_ids": text, "apply": tmp_path / "small"}, {}):
        with pytest.raises(BadInput, match="no checkpoint format can hold its router"):
            moescope.compress(folder, plan=planned.path, out=tmp_path / "other", quiet=True, **given)
    assert not (tmp_path / "small").exists()
    assert not (tmp_path / "other").exists()
