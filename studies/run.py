"""Run studies of this folder in shards, store their results, and pick the winners of the tuning.

    python studies/run.py main --jobs 12 --device cuda --seconds 480
    python studies/run.py --smoke        # every study at nano size on the embedded corpus

A shard ends after --seconds. The next one continues from the tables in studies/NAME/run: trainings that are
in them are not repeated, those that were interrupted start again. No checkpoint is stored.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
from pyarrow.parquet import read_metadata

sys.path.insert(0, str(Path(__file__).parent))
import designs
from continuations import write_tasks

from moescope.lab.corpus import held_out
from moescope.lab.study import TASK_TABLES, VERB, current_tables
from moescope.lab.study_config import Study, read_study
from moescope.lab.study_statistics import NOT_RUN
from moescope.lab.tables import TABLES
from moescope.reporting.page import spelled_out
from moescope.run import RunWriter, jsonable, package_commit, read_run_json, write_json, write_table
from moescope.tables import read_parquet

MARGIN = 30  # seconds at the end of a shard, to stop trainings and to write tables
WORK = """
import json, sys
sys.path[:0] = [sys.argv[1]]
import {0}
try:
    {0}.study(**json.loads(sys.argv[2]))
except KeyboardInterrupt:  # the shard's time is up
    sys.exit(130)
"""
OWN_TASKS = ("causal", "existing")  # studies whose trainings are those of the module of that name
KEYS = ["study", "question", "arm", "seed", "status", "metric", "layer", "domain", "value", "chance"]


def run_study(name: str, store: Path, work: Path, seconds: float, given: argparse.Namespace) -> bool:
    """Run one study for at most that long, from what is stored; return whether it is done."""
    file, folder, jobs, device = store / name / "study.toml", work / name, given.jobs, given.device
    again = {"again": given.again} if given.again else {}
    if again:
        forget(store / name, folder, given.again)
    if not (folder / "run.json").exists() and (store / name / "run" / "run.json").exists():
        unpack(store / name / "run", folder, file)
    before = len(finished(store / name / "run"))
    began, started = time.perf_counter(), time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    options = {"config": str(file), "out": str(folder), "jobs": jobs, "device": device, "quiet": True}
    code = WORK.format(name if name in OWN_TASKS else "moescope")
    process = subprocess.Popen([sys.executable, "-c", code, str(designs.FOLDER), json.dumps(options)])
    stop = work / "stop"  # whoever creates this file ends the shard early
    while process.poll() is None and time.perf_counter() - began < seconds - MARGIN and not stop.exists():
        time.sleep(0.5)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(MARGIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    spent = time.perf_counter() - began
    if not (folder / "run.json").exists():
        return False
    pack(folder, store / name, given.shared)
    done = len(finished(store / name / "run"))
    shard = {"started": started, "seconds": round(spent, 1), "trainings": done - before, **again}
    machine = {"device": device_name(device), "package_commit": package_commit()}
    describe(store / name, {**shard, "jobs": jobs, **machine})
    print(f"{name}: {done} trainings, {done - before} in this shard, {spent:.0f} s", flush=True)
    return (read_run_json(folder) or {}).get("status") == "done"


def finished(run: Path) -> set[tuple[str, int]]:
    file = run / "study_runs.parquet"
    if not file.exists():
        return set()
    runs = read_parquet(str(file), TABLES["study_runs"])
    runs = runs[runs["status"] != NOT_RUN]
    return set(zip(runs["arm"], runs["seed"], strict=True))


def pack(folder: Path, target: Path, shared: bool) -> None:
    """Store run.json and the tables of a run folder, and write results.parquet.

    On a shared device the parts of a block were timed beside other work: times that are stored remain.
    """
    run, info = target / "run", read_run_json(folder) or {}
    run.mkdir(parents=True, exist_ok=True)
    if info.get("status") != "done":  # it may have been stopped while it wrote its tables
        for table, frame in current_tables(
            RunWriter(folder, VERB, info), read_study(target / "study.toml")
        ).items():
            write_table(TABLES[table], frame, folder / f"{table}.parquet")
    for table in TABLES:
        file = folder / f"{table}.parquet"
        if file.exists() and read_metadata(file).num_rows and not (shared and table == "overhead"):
            shutil.copy(file, run)
    write_json(run / "run.json", spelled_out(info, anonymous=True))
    write_results(results(target.name, run), target / "results.parquet")


def write_results(frame: pd.DataFrame, file: Path) -> None:
    frame.to_parquet(file, compression="zstd", index=False)


def unpack(run: Path, folder: Path, study: Path) -> None:
    """Make a run folder that `moescope study` continues: one task per stored training."""
    info, plan = read_run_json(run) or {}, read_study(study)
    if info.get("status") == "done" and len(finished(run)) == len(plan.trainings):
        shutil.copytree(run, folder)
        return
    arguments = with_new_arms(info["arguments"], plan, study)
    folder.mkdir(parents=True)
    write_json(folder / "run.json", {**info, "arguments": arguments, "status": "interrupted"})
    arms = {arm.name: arm for arm in plan.arms}
    tables = {
        name: read_parquet(str(run / f"{name}.parquet"), TABLES[name])
        for name in TASK_TABLES
        if (run / f"{name}.parquet").exists()
    }
    for arm, seed in sorted(finished(run)):
        task = folder / "parts" / arms[arm].training_name(seed)
        task.mkdir(parents=True)
        for name, frame in tables.items():
            rows = frame[(frame["arm"] == arm) & (frame["seed"] == seed)]
            if len(rows):
                write_table(TABLES[name], rows, task / f"{name}.parquet")
        write_json(task / "setup.json", {"arm": arm, "seed": int(seed)})


def reject(text: str) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(2)


def with_new_arms(stored: dict[str, Any], plan: Study, study: Path) -> dict[str, Any]:
    """Return the arguments of the study, which are those of what is stored and perhaps of more arms."""
    now: dict[str, Any] = jsonable(plan.as_dict())
    same = {**now, "arms": {name: arm for name, arm in now["arms"].items() if name in stored["arms"]}}
    if same != stored:
        reject(f"{study}: its stored trainings have other settings; add arms only, or remove its results")
    return now


def check_again(target: Path, folder: Path, arms: list[str]) -> None:
    info = read_run_json(target / "run") if (target / "run" / "run.json").exists() else None
    if info is None:
        reject(f"--again: {target.name} was not run yet; leave it out")
    if folder.exists():
        reject(f"--again: {folder} holds {target.name}; remove it, or give another --work")
    for arm in arms:
        if arm not in (known := info["arguments"]["arms"]):
            reject(f"--again {arm}: no stored arm of {target.name}; it has {', '.join(known)}")


def forget(target: Path, folder: Path, arms: list[str]) -> None:
    """Remove the stored trainings of these arms, so that they are trained again."""
    check_again(target, folder, arms)
    run = target / "run"
    for name in TASK_TABLES:
        file = run / f"{name}.parquet"
        if file.exists():
            frame = read_parquet(str(file), TABLES[name])
            write_table(TABLES[name], frame[~frame["arm"].isin(arms)], file)


def describe(target: Path, shard: dict[str, Any]) -> None:
    """Add a shard to environment.json."""
    info = read_run_json(target / "run") or {}
    file = target / "environment.json"
    shards = [*(json.loads(file.read_text())["shards"] if file.exists() else []), shard]
    facts = {key: info.get(key) for key in ("status", "versions", "machine", "corpus")}
    study = f"moescope study studies/{target.name}/study.toml --jobs {shard['jobs']}"
    wall = round(sum(one["seconds"] for one in shards), 1)
    write_json(file, {"command": study, **facts, "wall_seconds": wall, "shards": shards})


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"


def results(study: str, run: Path) -> pd.DataFrame:
    """Return every number of a study as one long table: what claims are made from."""
    runs = read_parquet(str(run / "study_runs.parquet"), TABLES["study_runs"])
    asked = runs[["arm", "seed", "question", "status"]]
    numbers = [
        name for name, kind in runs.dtypes.items() if pd.api.types.is_numeric_dtype(kind) and name != "seed"
    ]
    parts = [
        runs.melt(["arm", "seed"], numbers, "metric", "value").assign(layer=None, domain="", chance=None)
    ]
    for name in ("load_cv", "routing_entropy"):
        if f"{name}_chance" in runs:
            at = parts[0]["metric"] == name
            parts[0].loc[at, "chance"] = runs[f"{name}_chance"].to_numpy()
    if (run / "study_documents.parquet").exists():
        parts.append(domain_losses(read_parquet(str(run / "study_documents.parquet"))))
    if (run / "study_layers.parquet").exists():
        parts.append(read_parquet(str(run / "study_layers.parquet")))
    if (run / "study_tasks.parquet").exists():
        tasks = read_parquet(str(run / "study_tasks.parquet"))
        names = [f"task:{task} {metric}" for task, metric in zip(tasks["task"], tasks["metric"], strict=True)]
        tasks = tasks[["arm", "seed", "value", "chance"]]
        parts.append(tasks.assign(metric=names, layer=None, domain=""))
    joined = pd.concat([part.astype(object) for part in parts if len(part)], ignore_index=True)
    joined = joined.merge(asked, on=["arm", "seed"]).assign(study=study)
    joined = joined[joined["value"].notna()][KEYS]
    types = {"seed": "int64", "layer": "Int64", "value": "float64", "chance": "float64"}
    return joined.astype(types).sort_values(["arm", "seed", "metric", "domain", "layer"], ignore_index=True)


def domain_losses(documents: pd.DataFrame) -> pd.DataFrame:
    documents = documents.assign(nats=documents["tokens"] * documents["loss"])
    sums = documents.groupby(["arm", "seed", "domain"], as_index=False)[["nats", "tokens", "bytes"]].sum()
    sums["validation_loss"] = sums["nats"] / sums["tokens"]
    sums["bits_per_byte"] = sums["nats"] / np.log(2) / sums["bytes"].clip(lower=1)
    rows = sums.melt(["arm", "seed", "domain"], ["validation_loss", "bits_per_byte"], "metric", "value")
    return rows.assign(layer=None, chance=None)


# --- tuning


def mean_losses(store: Path, name: str) -> dict[str, dict[str, dict[float, float]]]:
    """Return router -> option -> value -> mean loss over the seeds; a value that failed once is infinite."""
    runs = read_parquet(str(store / name / "run" / "study_runs.parquet"), TABLES["study_runs"])
    found: dict[str, dict[str, dict[float, float]]] = {}
    for arm, rows in runs.groupby("arm"):
        router, _, setting = str(arm).partition(" ")
        option, _, value = setting.partition("=")
        losses = rows["validation_loss"].astype(float)
        mean = float(losses.mean()) if losses.notna().all() else float("inf")
        found.setdefault(router, {}).setdefault(option, {})[float(value)] = mean
    return found


def pick(losses: dict[float, float]) -> float:
    return min(losses, key=lambda value: losses[value])


def beyond_edge(losses: dict[float, float]) -> list[float]:
    """Return the next two values of the grid if its first or last one won."""
    values = sorted(losses)
    best = pick(losses)
    if best == values[0]:
        ratio = values[0] / values[1]
    elif best == values[-1]:
        ratio = values[-1] / values[-2]
    else:
        return []
    return [float(f"{best * ratio**power:.3g}") for power in (1, 2)]


def after_rates(store: Path, _: dict[str, Any]) -> dict[str, Any]:
    """Return the best learning rates, and the rates beyond the edges that won, which the next stage tries."""
    losses = {router: found["learning_rate"] for router, found in mean_losses(store, "tuning_rate").items()}
    rates = {router: pick(found) for router, found in losses.items()}
    more = {router: values[0] for router, found in losses.items() if (values := beyond_edge(found))}
    best = {router: {"learning_rate": value} for router, value in rates.items()}
    return {"rates": rates, "more": more, "best": best}


def after_options(store: Path, tuned: dict[str, Any]) -> dict[str, Any]:
    """Return every router's best learning rate and option, and two values beyond each edge that won."""
    return {**tuned, **best_of(store, tuned, ("tuning_rate", "tuning_option"))}


def after_edges(store: Path, tuned: dict[str, Any]) -> dict[str, Any]:
    found = best_of(store, tuned, ("tuning_rate", "tuning_option", "tuning_edge"))
    return {**tuned, "best": found["best"], "edges_left": found["edges"]}


def best_of(store: Path, tuned: dict[str, Any], stages: tuple[str, ...]) -> dict[str, Any]:
    """Return the best values over these stages, and for each that lies at an edge two more to try."""
    losses: dict[str, dict[str, dict[float, float]]] = {}
    for stage in stages:
        for router, found in mean_losses(store, stage).items():
            for option, values in found.items():
                losses.setdefault(router, {}).setdefault(option, {}).update(values)
    best: dict[str, dict[str, float]] = {}
    edges: dict[str, dict[str, list[float]]] = {}
    for router, (option, values) in designs.OPTIONS.items():  # the default was trained with the rates
        losses[router][option][values[1]] = losses[router]["learning_rate"][tuned["rates"][router]]
    for router in designs.ROUTERS:
        for option, found in losses[router].items():
            best.setdefault(router, {})[option] = pick(found)
            if more := beyond_edge(found):
                edges.setdefault(router, {})[option] = more
    return {"best": best, "edges": edges}


AFTER = {"tuning_rate": after_rates, "tuning_option": after_options, "tuning_edge": after_edges}


# --- smoke


def write_smoke(store: Path, names: list[str]) -> list[str]:
    everything = designs.designs({})
    names = names or list(everything)
    for name in names:
        (store / name).mkdir(parents=True, exist_ok=True)
        small = designs.shrink(everything[name])
        if "probe" in small:  # this store may lie anywhere
            small["probe"] = str((designs.FOLDER / name / designs.PROBE).resolve())
        if "tasks" in small:
            small["tasks"] = str(store / "text")
            write_tasks(store / "text", {domain: list(held_out(domain)) for domain in ("code", "prose")})
        (store / name / "study.toml").write_text(designs.toml(small))
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("studies", nargs="*", help="names of folders; all studies with --smoke")
    parser.add_argument("--store", type=Path, default=designs.FOLDER, help="folder of study.toml and results")
    parser.add_argument("--work", type=Path, help="folder of the trainings, removed at the end by default")
    parser.add_argument("--seconds", type=float, default=10**6)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--shared", action="store_true", help="other work uses the device: store no timings")
    parser.add_argument(
        "--again", action="append", metavar="ARM", help="train this arm again; may be repeated"
    )
    given = parser.parse_args()
    end = time.perf_counter() + given.seconds
    work = given.work or Path(tempfile.mkdtemp(prefix="studies-"))
    store, names = given.store, given.studies
    tuned = designs.read_tuned(store / "tuned.json")
    if given.smoke:
        store = work / "store"
        names = write_smoke(store, names)
    for name in names if given.again else ():
        check_again(store / name, work / name, given.again)
    try:
        for name in names:
            left = end - time.perf_counter()
            if left < MARGIN or not run_study(name, store, work, left, given):
                print(f"{name}: not finished", flush=True)
                sys.exit(1 if given.smoke else 0)
            if name in AFTER:
                tuned = AFTER[name](store, tuned)
                print(json.dumps(tuned), flush=True)
                if not given.smoke:
                    write_json(store / "tuned.json", tuned)
                    designs.write_designs(store, tuned)
    finally:
        if given.work is None:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
