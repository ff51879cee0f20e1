"""Make what follows from the stored results: comparisons, results.parquet, one page of all studies.

    python studies/report.py [--out runs/studies.html]

Trains nothing and needs no GPU.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import designs
import pandas as pd
import run

import moescope
from moescope.lab.study_config import read_study
from moescope.lab.study_statistics import compare
from moescope.lab.tables import TABLES
from moescope.run import write_table
from moescope.tables import read_parquet


def rebuild(folder: Path) -> None:
    """Compare the arms of one stored study again and write its results."""
    plan, table = read_study(folder / "study.toml"), TABLES["study_comparisons"]
    runs = read_parquet(str(folder / "run" / "study_runs.parquet"), TABLES["study_runs"])
    compared = compare(runs, plan.reference, plan.references).sort_values(list(table.keys), ignore_index=True)
    update(folder / "run" / "study_comparisons.parquet", lambda file: write_table(table, compared, file))
    results = run.results(folder.name, folder / "run")
    update(folder / "results.parquet", lambda file: run.write_results(results, file))


def update(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file anew, but leave it as it is where only its bytes would change."""
    with tempfile.TemporaryDirectory() as scratch:
        new = Path(scratch) / file.name
        write(new)
        if not file.exists() or not pd.read_parquet(new).equals(pd.read_parquet(file)):
            shutil.copy(new, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--store", type=Path, default=designs.FOLDER)
    parser.add_argument("--out", type=Path, default=Path("runs/studies.html"))
    given = parser.parse_args()
    order = ["main", "ablation", *designs.designs({})]  # the page opens with the first two
    present = {file.parent.parent for file in given.store.glob("*/run/run.json")}
    folders = sorted(present, key=lambda folder: order.index(folder.name))
    for folder in folders:
        rebuild(folder)
    if folders:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        print(moescope.report(*(folder / "run" for folder in folders), out=given.out, quiet=True))
    else:
        print("no study has results")


if __name__ == "__main__":
    main()
