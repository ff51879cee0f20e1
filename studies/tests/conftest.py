"""The scripts of studies/ and the modules of its papers are found as they find each other."""

from __future__ import annotations

import sys
from pathlib import Path

STUDIES = Path(__file__).parents[1]
sys.path[:0] = [str(STUDIES), str(STUDIES / "spectra"), str(STUDIES.parent / "docs")]
