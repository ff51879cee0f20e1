"""Processors that announce an instruction set which kills the process that uses it."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

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


# --- what run.json says of the machine


def machine() -> dict[str, Any]:
    """Return what computes: models of the CPU and of the GPUs, cores, and threads per operation."""
    facts: dict[str, Any] = {"cpu": cpu_model(), "cores": count_cores(), "gpus": []}
    torch = sys.modules.get("torch")  # where a verb has not imported it, nothing was computed with it
    if torch is not None:
        facts["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            facts["gpus"] = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
            facts["cuda"] = torch.version.cuda
    return facts


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
