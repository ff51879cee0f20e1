"""Delete settings that no longer exist from the stored run.json of every study: python studies/migrate.py."""

from __future__ import annotations

from pathlib import Path

from moescope.run import read_run_json, write_json

REMOVED = {"train": ("parallel",)}  # table of a training's config -> keys


def migrate(folder: Path) -> None:
    info = read_run_json(folder) or {}
    for settings in (info, info["arguments"]):
        for table, keys in REMOVED.items():
            for key in keys:
                settings["base"][table].pop(key, None)
    write_json(folder / "run.json", info)


if __name__ == "__main__":
    for file in sorted(Path(__file__).parent.glob("*/run/run.json")):
        migrate(file.parent)
