"""Processors that announce an instruction set which kills the process that uses it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
VARIABLE = "ONEDNN_MAX_CPU_ISA"  # oneDNN reads it at its first use; child processes inherit it
WITHOUT_AMX, UNRESTRICTED = "AVX512_CORE_BF16", "DEFAULT"
TRIAL = "import torch; one = torch.ones(64, 64, dtype=torch.bfloat16); one @ one"
TRIAL_SECONDS = 120


def avoid_broken_amx(device: str, half_precision: bool) -> None:
    """Keep oneDNN off AMX where a bf16 product with it dies. Call it before the first one on the CPU.

    Some virtual machines list AMX without supporting it: the product ends in SIGILL. A child process tries
    one. The result is kept in the environment, so that neither this process nor its children try again.
    """
    if not half_precision or device != "cpu" or VARIABLE in os.environ or not lists_amx():
        return
    try:
        died = subprocess.run([sys.executable, "-c", TRIAL], timeout=TRIAL_SECONDS).returncode < 0
    except (OSError, subprocess.TimeoutExpired):
        return  # nothing learned
    os.environ[VARIABLE] = WITHOUT_AMX if died else UNRESTRICTED
    if died:
        logging.getLogger("moescope").warning(
            "moescope: this machine announces AMX but ends processes that use it; computing without it "
            f"({VARIABLE}={WITHOUT_AMX})"
        )


def lists_amx() -> bool:
    try:
        return "amx_bf16" in CPUINFO.read_text().split()
    except OSError:  # not Linux
        return False
