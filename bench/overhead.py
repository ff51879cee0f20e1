"""What each part of each router costs beside the experts it serves: one MoE block of a preset, forward passes
in training mode.

    PYTHONPATH=src python bench/overhead.py                                      nano, on the CPU: seconds
    PYTHONPATH=src python bench/overhead.py --preset medium --device cuda        d 512, 64 experts, top-4,
    batch 32 x 768

Experts and SPECTRA's projections run in bfloat16 on a GPU, the rest of the routers in float32.
SPECTRA's ablations come last.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from moescope.decoder.routers import ROUTERS
from moescope.decoder.routers.spectra import ABLATIONS
from moescope.lab.config import PRESETS, preset_config, with_router
from moescope.lab.overhead import overhead


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="nano", choices=list(PRESETS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, help="default: one batch of the preset")
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    base = preset_config(given.preset)
    configs = {name: with_router(base, name).model for name in ROUTERS}
    for name, options in ABLATIONS.items():
        configs[f"spectra {name}"] = replace(configs["spectra"], router_options=options)
    tokens = given.tokens or base.train.batch_size * base.train.sequence_length
    dtype = torch.bfloat16 if torch.device(given.device).type == "cuda" else torch.float32
    found = overhead(configs, tokens, given.device, dtype, given.repeats)
    found["share"] = found["share"].map("{:.1%}".format)
    found["milliseconds"] = found["milliseconds"].round(3)
    print(f"{given.preset}: one block, {tokens} tokens, {given.device}, torch {torch.__version__}")
    print(found.to_string(index=False))


if __name__ == "__main__":
    main()
