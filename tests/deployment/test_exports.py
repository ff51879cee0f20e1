"""Exported files: the documented formats, and lists that were published."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import moescope
from checkpoints import tiny_checkpoint
from deployment.deployment_runs import write_trace
from deployment.plain_caches import random_tokens
from moescope.deployment.placement import esft_experts, in_file_names, sglang_mapping

REAL = Path(os.environ.get("MOESCOPE_REAL_TRACES", Path(__file__).parents[3] / "shared" / "data" / "real"))


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    generator = np.random.default_rng(0)
    chosen_LTK = [random_tokens(generator, 60, 2, 4) for _ in range(2)]
    trace = write_trace(folder / "trace", chosen_LTK, np.repeat(np.arange(6), 10), 4, domains=("law", "code"))
    model = tiny_checkpoint(folder / "model")
    options = {"gpus": 3, "redundant": 2, "model": model, "quiet": True}
    run = moescope.deploy(trace, out=folder / "run", **options)
    files = {path.name: json.loads(path.read_text()) for path in (run.path / "exports").iterdir()}
    assert sorted(files) == run.info["exports"]
    return files, chosen_LTK


def test_a_mapping_for_sglang_has_one_key_and_a_row_per_hidden_layer(exports):
    for name in ("balanced", "coactivation"):
        content = exports[0][f"sglang_{name}.json"]
        assert list(content) == ["physical_to_logical_map"]
        assert (
            exports[0][f"vllm_experimental_{name}.json"] == content["physical_to_logical_map"]
        )  # none dense
        rows = np.array(content["physical_to_logical_map"])
        assert rows.shape == (2, 6)
        for row in rows:
            assert set(row) == set(range(4))  # every expert is somewhere
    dense = sglang_mapping({1: [1, 0, 2], 3: [2, 1, 0]}, 3, 5)
    assert dense["physical_to_logical_map"] == [[0, 1, 2], [1, 0, 2], [0, 1, 2], [2, 1, 0], [0, 1, 2]]


def test_hot_lists_rank_experts_by_use(exports):
    files, chosen_LTK = exports
    for layer, chosen_TK in enumerate(chosen_LTK):
        entry = files["hot_experts.json"]["layers"][str(layer)]
        counts = np.bincount(chosen_TK.reshape(-1), minlength=4)
        assert entry["tokens"] == sorted(counts.tolist(), reverse=True)
        assert [counts[expert] for expert in entry["experts"]] == entry["tokens"]


def test_lists_for_fine_tuning_reach_the_share_with_the_fewest_experts(exports):
    files, _ = exports
    assert set(files["esft_law.json"]) == {"experts", "shared_experts", "non_expert_modules"}
    assert list(files["esft_code.json"]["experts"]) == ["0", "1"]
    assert esft_experts(np.array([5, 1, 3, 1]), 0.5) == [0]
    assert esft_experts(np.array([5, 1, 3, 1]), 0.51) == [0, 2]
    assert esft_experts(np.array([1, 2, 2, 0]), 0.6) == [1, 2]
    assert esft_experts(np.array([1, 1]), 1.0) == [0, 1]
    assert esft_experts(np.zeros(3, dtype=int), 0.2) == []
    assert esft_experts(np.array([1, 1, 0, 1]), 1.0) == [0, 1, 3]  # three times 0.3333 stays below 1
    # shares of 0.02956 and 0.02962 are both 0.0296: the lower number first
    assert esft_experts(np.array([40_000, 1477, 1480, 7005]), 1.0)[2:] == [1, 2]


@pytest.mark.skipif(not REAL.is_dir(), reason="needs recorded traces of real models")
def test_lists_of_real_tasks_are_those_that_esft_published():
    tokens = pd.read_parquet(REAL / "deepseek_v2_lite_esft.parquet")
    published = json.loads((REAL / "esft_published.json").read_text())
    layers = tokens.groupby(["domain", "layer"], observed=True)
    assert len(layers) == sum(map(len, published.values())) == 2 * 26
    for (domain, layer), rows in layers:
        counts = np.bincount(np.concatenate(list(rows["experts"])), minlength=64)
        assert esft_experts(counts, 0.2) == published[domain][str(layer)], (domain, layer)


def test_long_names_of_domains_are_cut_and_stay_apart():
    first, second = (in_file_names("a" * 300 + end) for end in ("b", "c"))
    assert first != second
    assert len(first) < 100
    assert in_file_names("code-3.x_y") == "code-3.x_y"
    assert in_file_names("code/python 3").startswith("code_python_3-")


def test_domains_of_similar_names_have_files_of_their_own(tmp_path):
    domains = ("a b", "a_b", "C++", "C#", "中文", "日本語", "")
    generator = np.random.default_rng(0)
    trace = write_trace(
        tmp_path / "trace",
        [random_tokens(generator, 70, 2, 4)],
        np.repeat(np.arange(7), 10),
        4,
        domains=domains,
    )
    run = moescope.deploy(trace, out=tmp_path / "run", quiet=True)
    files = list((run.path / "exports").glob("esft_*.json"))
    assert len(files) == len(domains)
    assert all(file.name.isascii() for file in files)
