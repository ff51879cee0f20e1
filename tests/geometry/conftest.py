"""Every test of geometry draws the same numbers each time."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)
