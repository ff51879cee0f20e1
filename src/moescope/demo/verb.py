"""demo: scan and trace the shipped MoE and report on it together with its training."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

from moescope.lab.train import VERB as TRAIN
from moescope.lab.train import clear_training, saved_checkpoints
from moescope.routing.trace import trace
from moescope.run import Run, check_folder, clear_run, jsonable, read_run_json, write_json
from moescope.storage import only_writer, whole_folder
from moescope.verb import Verb
from moescope.weights.verb import scan

SHIPPED = Path(__file__).parent / "shipped"  # recipe.toml, model/, training/: written by recipe.py
TRACED_TOKENS = 50_000
DOCUMENTS = 40  # per domain at most: more than the 20 that intervals need
CHARACTERS = 2_000  # per document: a single long file would use up its domain's tokens


def demo(
    *, out: str | Path | None = None, seed: int = 0, overwrite: bool = False, quiet: bool = False
) -> Run:
    """Scan and trace the model that comes with moescope, and show them together with its training.

    Parameters
    ----------
    out : DIR, default runs/demo
        Run folder.

    Examples
    --------
    >>> run = moescope.demo()  # doctest: +SKIP
    >>> run.parts["scan"].figures()  # doctest: +SKIP
    """
    VERB.settle(locals())
    folder = Path(out or "runs/demo")
    run = shipped_training(folder, overwrite)
    model = folder / "checkpoints" / Path(run.info["checkpoints"][-1]["path"]).name
    # On the CPU: the model is small, and every demo should show the same numbers.
    shared: dict[str, Any] = {"seed": seed, "device": "cpu", "quiet": quiet}
    scan(model, out=folder / "scan", **shared)
    texts = held_out_texts(folder / "validation", run)
    trace(model, domain=texts, out=folder / "trace", max_tokens=TRACED_TOKENS, save_tokens=True, **shared)
    return run


def shipped_training(folder: Path, overwrite: bool) -> Run:
    """Copy the training's tables and final checkpoint into a run folder, as `train` would leave them."""
    info = Run.load(SHIPPED / "training").info
    identity = {key: info[key] for key in ("arguments", "corpus")}
    states = folder / "checkpoints"

    def complete() -> Any:
        return {**info, "checkpoints": jsonable(saved_checkpoints(states))}

    with only_writer(folder, folder / ".lock", "this run", "give another --out"):
        check_folder(folder, identity, overwrite)
        if overwrite:
            clear_training(folder)
            clear_run(folder, TRAIN)
        if read_run_json(folder) == complete():  # written last
            return Run.load(folder)
        write_json(folder / "run.json", info)  # first: it marks the folder as this run's
        for table in (SHIPPED / "training").glob("*.parquet"):
            shutil.copyfile(table, folder / table.name)
        states.mkdir(exist_ok=True)
        model = states / f"step-{info['arguments']['train']['steps']}"
        if not model.exists():
            with whole_folder(model) as partial:
                shutil.copytree(SHIPPED / "model", partial, dirs_exist_ok=True)
        write_json(folder / "run.json", complete())
    return Run.load(folder)


def held_out_texts(folder: Path, run: Run) -> list[str]:
    """Write the beginnings of held-out documents by domain, and return them as `trace` takes them.

    Held-out documents are chosen by name, so the choice is the same under another Python, whose texts differ.
    """
    from moescope.lab.corpus import held_out

    if not folder.exists():
        share = run.info["arguments"]["data"]["validation_share"]
        with whole_folder(folder) as partial:
            for domain in run.info["domains"]:
                texts = itertools.islice(held_out(domain, share), DOCUMENTS)
                lines = [json.dumps({"text": truncate(text)}, ensure_ascii=False) + "\n" for text in texts]
                if lines:  # this Python may have no headers
                    (partial / f"{domain}.jsonl").write_text("".join(lines), encoding="utf-8")
    files = {file.stem: file for file in folder.glob("*.jsonl")}
    return [f"{domain}={files[domain]}" for domain in run.info["domains"] if domain in files]


def truncate(text: str) -> str:
    """Return at most CHARACTERS of the text, ending at a line break if there is one."""
    if len(text) <= CHARACTERS:
        return text
    return text[: text.rfind("\n", 0, CHARACTERS) + 1] or text[:CHARACTERS]


VERB = Verb("demo", demo)
