"""Store the tables that our probe made as rows of study_probes, once per stored study.

    python studies/convert_probes.py

Studies of November 2026 stored study_experts, study_mixed and study_spans; a probe's tables are now cells of
one table.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from moescope.lab.study_statistics import long_rows
from moescope.lab.tables import TABLES
from moescope.run import read_run_json, write_json, write_table

FORMER = ("study_experts", "study_mixed", "study_spans")


def convert(run: Path) -> None:
    files = {name: run / f"{name}.parquet" for name in FORMER if (run / f"{name}.parquet").exists()}
    info = read_run_json(run)
    if not files or info is None:
        return
    parts: list[pd.DataFrame] = []
    frames = {name: pd.read_parquet(file) for name, file in files.items()}
    for arm, seed in frames["study_experts"][["arm", "seed"]].drop_duplicates().itertuples(index=False):
        of_training = {
            name: frame[(frame["arm"] == arm) & (frame["seed"] == seed)].drop(columns=["arm", "seed"])
            for name, frame in frames.items()
        }
        parts.append(long_rows(of_training).assign(arm=arm, seed=seed))
    rows = pd.concat(parts, ignore_index=True)
    write_table(TABLES["study_probes"], rows, run / "study_probes.parquet")
    counts = {name: count for name, count in info["rows"].items() if name not in FORMER}
    write_json(run / "run.json", {**info, "rows": {**counts, "study_probes": len(rows)}})
    for file in files.values():
        file.unlink()


if __name__ == "__main__":
    for folder in sorted(Path(__file__).parent.glob("*/run")):
        convert(folder)
