"""What a recorded trace may hold and where it may lie: empty slots, few documents, domains, run folders."""

from __future__ import annotations

import gzip
import json
import resource
import zlib

import numpy as np
import pandas as pd
import pytest

from moescope.errors import BadInput
from moescope.routing.trace import trace


def test_empty_slots_are_counted_aloud(tmp_path):
    answer = {"routed_experts": [[[0, 1], [1, -1]], [[3, 0], [-1, -1]]]}
    (tmp_path / "a.jsonl").write_text(json.dumps(answer) + "\n")
    run = trace(recorded=tmp_path / "a.jsonl", format="vllm", experts=4, out=tmp_path / "run", quiet=True)
    assert "3 of 8 slots are empty (-1) and not counted" in run.info["warnings"]
    load = run.table("load").groupby("layer")["tokens"].sum()
    assert load.to_dict() == {0: 4, 1: 1}


def test_a_run_folder_points_to_its_tokens(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(BadInput, match=r"run folder without tokens; .* --save-tokens"):
        trace(recorded=tmp_path / "run", format="moescope", experts=4, out=tmp_path / "out")
    (tmp_path / "run" / "tokens.parquet").write_text("")
    with pytest.raises(BadInput, match=r"run folder; .* --recorded .*run/tokens.parquet$"):
        trace(recorded=tmp_path / "run", experts=4, out=tmp_path / "out")
    with pytest.raises(BadInput, match="a folder; give the recorded trace"):
        trace(recorded=tmp_path, experts=4, out=tmp_path / "out")


def test_intervals_need_20_documents_with_tokens_in_the_phase(tmp_path):
    """Two prompts with ten answers each: 20 documents have answers, two have prompts."""
    generator = np.random.default_rng(0)

    def choices(tokens: int) -> list:
        return generator.random((tokens, 1, 8)).argsort(-1)[..., :2].tolist()

    lines = [
        json.dumps(
            {
                "prompt_routed_experts": choices(12),
                "choices": [{"routed_experts": choices(9)} for _ in range(10)],
            }
        )
        for _ in range(2)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    run = trace(recorded=tmp_path / "a.jsonl", format="vllm", experts=8, out=tmp_path / "run")
    rows = run.table("routing_layers").set_index(["phase", "metric"])
    assert rows.loc["prefill", ["low", "high", "corrected"]].isna().all(axis=None)
    assert rows.loc["decode"].loc[["cv", "adjacent_jaccard"], ["low", "high"]].notna().all(axis=None)
    assert any("prefill" in warning and "2 " in warning for warning in run.info["warnings"])


def test_documents_of_two_domains_may_have_the_same_number(tmp_path):
    rows = ["domain,document,position,layer,experts"]
    rows += [f"{domain},{document},0,3,0 1" for domain in ("law", "code") for document in (7, 9)]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    run = trace(recorded=tmp_path / "a.csv", experts=4, out=tmp_path / "run")
    assert run.info["coverage"][0]["domains"] == {"code": 2, "law": 2}
    assert run.table("load").groupby("expert")["tokens"].sum().tolist() == [4, 4, 0, 0]
    assert set(run.table("load")["layer"]) == {3}


def test_a_route_trace_names_its_experts_and_may_have_fewer_tokens_in_the_last_layer(tmp_path):
    """Two prompt tokens, of which the last layer computes one, and one generated token; slots reversed."""
    head = "# route_trace v1\n# model=m.gguf arch=a n_layer=2 n_expert=8 n_expert_used=2\n"
    head += "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n"
    chosen = {(0, 0, 0): (5, 1), (0, 1, 0): (5, 2), (0, 1, 1): (7, 0), (1, 2, 0): (1, 5), (1, 2, 1): (3, 4)}
    rows = [
        f"0,{phase},{step},{layer},{slot},{expert},{0.75 - slot / 2},0,0"
        for (phase, step, layer), experts in chosen.items()
        for slot, expert in reversed(list(enumerate(experts)))
    ]
    text = head + "\n".join(rows) + "\n"
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(text.encode()))
    loads = []
    for name in ("a.csv", "b.csv.gz"):
        run = trace(recorded=tmp_path / name, out=tmp_path / name[0])
        loads.append(run.table("load"))
        assert (run.info["coverage"][0]["k"], run.info["coverage"][0]["experts_per_layer"]) == ([2], [8])
    pd.testing.assert_frame_equal(*loads)
    load = loads[0].set_index(["phase", "layer", "expert"]).sort_index()
    used = load[load["tokens"] > 0]
    assert used["tokens"].loc["prefill", 0].to_dict() == {1: 1, 2: 1, 5: 2}
    assert used["tokens"].loc["prefill", 1].to_dict() == {0: 1, 7: 1}
    assert used["gate_weight"].loc["prefill", 0].to_dict() == pytest.approx({1: 0.25, 2: 0.25, 5: 1.5})
    assert used["gate_weight"].loc["decode", 1].to_dict() == pytest.approx({3: 0.75, 4: 0.25})


def test_a_compressed_csv_that_is_one_endless_line_is_one_line_in_little_memory(tmp_path):
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    with (tmp_path / "a.csv.gz").open("wb") as file:
        file.write(packer.compress(b"document,position,layer,experts\n0,0,0,"))
        for _ in range(300):
            file.write(packer.compress(b"1 " * 2**20))
        file.write(packer.flush())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadInput, match="no valid CSV") as caught:
        trace(recorded=tmp_path / "a.csv.gz", experts=4, out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes
