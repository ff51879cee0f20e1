"""The demo is the main test: its truth is known."""

import json

import numpy as np
import torch
from transformers import MixtralForCausalLM
from typer.testing import CliRunner

from moescope.cli import app
from moescope.planted import LAYERS, planted_layer
from moescope.workflows.demo import demo


def test_the_demo_command_finds_what_was_planted_and_says_where_the_report_is(tmp_path):
    out = tmp_path / "demo"
    result = CliRunner().invoke(app, ["demo", "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    assert f"report: {out / 'report.html'}" in result.output
    assert "2 and 5 of layer 3" in result.output
    again = CliRunner().invoke(app, ["demo", "--out", str(out), "--json"], catch_exceptions=False)
    verdicts = json.loads(again.output)["readings"][0]["verdicts"]
    assert verdicts == {"chance": [0], "identifying": [1, 2], "non_random": [3], "permuted": [4]}


def test_other_seeds_find_the_same_facts(tmp_path):
    for seed in range(1, 6):
        run = demo(tmp_path / f"demo-{seed}", seed=seed, quiet=True)
        tests = run.table("alignment_tests").query("router == 'raw'").set_index("layer")["verdict"]
        assert tests[1] == tests[2] == "identifying", seed
        assert tests[3] in ("identifying", "non_random"), seed
        assert tests[4] == "permuted", seed
        close = run.table("similarity").query("k == 1 and (cosine > 0.7 or cosine < -0.7)")
        assert close[["layer", "expert_a", "expert_b"]].to_numpy().tolist() == [[3, 2, 5]], seed


def test_the_planted_checkpoint_loads_in_transformers_and_runs(planted_run):
    folder = planted_run.info["checkpoints"][0]["path"]
    model, loading = MixtralForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert model(torch.arange(8)[None]).logits.isfinite().all()


def test_planted_layers_are_what_they_say():
    generator = np.random.default_rng(0)
    for layer in LAYERS:
        router, gates = planted_layer(layer.kind, generator)
        np.testing.assert_allclose(np.linalg.norm(router, axis=1), 1, atol=0.5)
        assert len(gates) == 8
        tops = [np.linalg.svd(gate)[2][0] for gate in gates]
        assert (abs(tops[2] @ tops[5]) > 0.9) == (layer.kind == "collapsed")
        if layer.kind == "small_k":
            np.testing.assert_allclose([(top @ row) ** 2 for top, row in zip(tops, router, strict=True)], 0.16)
