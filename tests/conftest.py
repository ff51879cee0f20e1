"""What every test runs under, its subprocesses too."""

import os
from pathlib import Path

# The matrices of the tests are tiny: threads that wait for each other cost more than they bring. Before torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Subprocesses test this source tree, not one that happens to be installed.
SOURCE = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))
