"""Streamed runs on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from moescope.execution.documents import Document
from moescope.execution.models import load_model
from moescope.execution.streamed import load_streamed
from moescope.routing.collectors import trace_model
from routing.tiny_text import save_model

pytestmark = pytest.mark.gpu


KINDS = [
    ("mixtral", "bfloat16"),
    ("gpt_oss", "bfloat16"),
]  # others are too narrow for a GPU's grouped products
KINDS += [(kind, "float32") for kind in ("mixtral", "deepseek_v3", "qwen3_next", "gpt_oss")]


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_streamed_choices_are_those_of_a_resident_model(tmp_path, kind, dtype):
    folder = str(save_model(tmp_path, kind, tokenizer=False))
    draw = np.random.default_rng(0)
    documents = [Document(number, 0, draw.integers(3, 64, draw.integers(3, 40))) for number in range(40)]
    chosen = [
        trace_model(load(folder, dtype, "cuda"), ["a"], documents, ("prefill",), 4).probe.chosen_LTK
        for load in (load_model, load_streamed)
    ]
    assert np.mean(chosen[0] != chosen[1]) <= 0.001
