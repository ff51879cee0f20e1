"""What a recorded trace may hold and where it may lie: empty slots, run folders."""

from __future__ import annotations

import json

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
