"""Make what follows from the stored results: comparisons, results.parquet, READMEs, one page of all studies.

    python studies/report.py [--out runs/studies.html]

Trains nothing and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import designs
import findings
import pandas as pd
import run

import moescope
from moescope.lab.study_config import read_study
from moescope.lab.study_statistics import compare, final_slope
from moescope.lab.tables import TABLES
from moescope.run import write_table
from moescope.tables import read_parquet


def rebuild(folder: Path) -> None:
    """Compare the arms of one stored study again and write its results."""
    plan, table = read_study(folder / "study.toml"), TABLES["study_comparisons"]
    runs = read_parquet(str(folder / "run" / "study_runs.parquet"), TABLES["study_runs"])
    runs = with_later_columns(runs, folder / "run")
    update(folder / "run" / "study_runs.parquet", lambda file: write_table(TABLES["study_runs"], runs, file))
    compared = compare(runs, plan.reference, plan.references).sort_values(list(table.keys), ignore_index=True)
    update(folder / "run" / "study_comparisons.parquet", lambda file: write_table(table, compared, file))
    results = run.results(folder.name, folder / "run")
    update(folder / "results.parquet", lambda file: run.write_results(results, file))


def with_later_columns(runs: pd.DataFrame, run: Path) -> pd.DataFrame:
    """Fill columns that studies of November 2026 did not store yet.

    The final slope of few evaluations is that of the last two. The chance level of consistency is then that
    of the last checkpoint's loads on the test documents, and outputs of experts were compared on the first
    512 tokens, which are of one document.
    """
    runs = with_slopes(runs, run)
    if "study_loads" not in {file.stem for file in run.glob("*.parquet")}:
        return runs
    loads = read_parquet(str(run / "study_loads.parquet"), TABLES["study_loads"])
    documents = read_parquet(str(run / "study_documents.parquet"), TABLES["study_documents"])
    trained = loads["domain"] != designs.UNSEEN_DOMAIN
    keys = ["arm", "seed"]
    tokens = documents[documents["domain"] != designs.UNSEEN_DOMAIN].groupby(keys)["tokens"].sum()
    by_expert = loads[trained].groupby([*keys, "layer", "expert"])["tokens"].sum()
    squares = (by_expert**2).groupby(level=[*keys, "layer"]).sum()
    sums = by_expert.groupby(level=[*keys, "layer"]).sum()
    expected = (squares / sums).groupby(level=keys).mean() / tokens  # sum f f / k, f = c/N, k = sum c/N
    at = pd.MultiIndex.from_frame(runs[keys])
    routed = runs["consistency"].notna()
    chance = pd.Series(expected.reindex(at).to_numpy(), runs.index).where(routed)
    ones = pd.Series(1, runs.index).where(routed)
    before = runs["output_documents"].isna() | (runs["output_documents"] == 1)  # measured since then
    estimated = runs["consistency_estimated"].fillna(before.astype(int))
    return runs.assign(
        consistency_chance=runs["consistency_chance"].fillna(chance),
        consistency_estimated=estimated.where(routed),
        output_documents=runs["output_documents"].fillna(ones),
    )


def with_slopes(runs: pd.DataFrame, run: Path) -> pd.DataFrame:
    if not (run / "study_curves.parquet").exists():
        return runs
    curves = read_parquet(str(run / "study_curves.parquet"), TABLES["study_curves"])
    found = {
        pair: final_slope(rows, int(rows["step"].max())) for pair, rows in curves.groupby(["arm", "seed"])
    }
    missing = [found.get(pair) for pair in zip(runs["arm"], runs["seed"], strict=True)]
    return runs.assign(loss_slope=runs["loss_slope"].fillna(pd.Series(missing, runs.index, dtype=float)))


def update(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file anew, but leave it as it is where only its bytes would change."""
    with tempfile.TemporaryDirectory() as scratch:
        new = Path(scratch) / file.name
        write(new)
        if not file.exists() or not pd.read_parquet(new).equals(pd.read_parquet(file)):
            shutil.copy(new, file)


# --- READMEs

END = "<!-- end -->"


def write_readmes(store: Path) -> None:
    """Write each study's README.md, and in that of the folder what came out and the table of all studies."""
    lines = ["| study | question | trainings | wall time | machine | date |", "|---|---|---|---|---|---|"]
    for name, question in designs.QUESTIONS.items():
        if not (store / name / "study.toml").exists():
            continue
        facts = readme_facts(store / name)
        rows = "".join(f"- {key}: {value}\n" for key, value in facts.items() if value)
        content = f"# Study `{name}`\n\n{question}\n\n{rows}"
        (store / name / "README.md").write_text(content)
        cells = [f"[{name}]({name}/README.md)", question]
        cells += [facts[key] for key in ("Trainings", "Wall time", "Machine", "Date")]
        lines.append(f"| {' | '.join(cells)} |")
    readme = store / "README.md"
    if readme.exists():
        text = filled(
            readme.read_text(),
            "came out",
            findings.headline(findings.judged_results(findings.read_results(store))),
        )
        readme.write_text(filled(text, "was run", "\n".join(lines)))


def filled(text: str, name: str, block: str) -> str:
    """Return the text with the block between its marks."""
    begin = f"<!-- what {name}: written by studies/report.py -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{block}\n{END}{rest.partition(END)[2]}"


def readme_facts(folder: Path) -> dict[str, str]:
    """Return command, state, wall time, machine and date of a study; of one that was not run the command."""
    planned = len(read_study(folder / "study.toml").trainings)
    facts = {"Command": f"`python studies/run.py {folder.name} --jobs 14 --device cuda`"}
    empty = dict.fromkeys(("Wall time", "Machine", "Date"), "")
    if not (folder / "environment.json").exists():
        return {**facts, "Trainings": f"0 of {planned}", **empty}
    content = json.loads((folder / "environment.json").read_text())
    shards, machine = content["shards"], content["machine"]
    device = f"--device {'cpu' if shards[-1]['device'] == 'cpu' else 'cuda'}"
    facts["Command"] = f"`python studies/run.py {folder.name} --jobs {shards[-1]['jobs']} {device}`"
    days = sorted({shard["started"][:10] for shard in shards})
    processor = shards[-1]["device"] if shards[-1]["device"] != "cpu" else machine["cpu"]
    return {
        **facts,
        "Trainings": f"{len(run.finished(folder / 'run'))} of {planned}",
        "Wall time": f"{content['wall_seconds']:,.0f} s",
        "Machine": f"{processor}, {machine['cores']} cores, torch {content['versions']['torch']}",
        "Date": " and ".join(days),
        "Numbers": f"`results.parquet`; `moescope report studies/{folder.name}/run`",
    }


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
    write_readmes(given.store)
    if folders:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        runs = [folder / "run" for folder in folders]
        print(moescope.report(*runs, out=given.out, results=findings.FILES, quiet=True))
    else:
        print("no study has results")


if __name__ == "__main__":
    main()
