"""demo: a small MoE that the lab trained, with its weights, its routing and its training in one report.

The whole tool in one command.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from moescope.lab.train import clear_training, saved_checkpoints
from moescope.reporting.verb import report
from moescope.routing.trace import trace
from moescope.run import Run, check_folder, clear_run, write_json
from moescope.storage import only_writer, whole_folder
from moescope.weights.verb import scan

SHIPPED = Path(__file__).parent / "shipped"  # recipe.toml, model/, training/: written by recipe.py
TRACED_TOKENS = 50_000
CHARACTERS = (
    2_000  # of a document, from its first line on: one long file would be all that is read of its domain
)


def demo(
    out: str | Path | None = None,
    planted: bool = False,
    seed: int = 0,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run:
    """Scan and trace the model that comes with moescope, and report on it together with its training; returns
    the run.

    The run folder is that of `train`, whose steps were done before. `planted` shows a checkpoint of known
    structure instead.
    """
    if planted:
        return planted_demo(Path(out or "runs/demo-planted"), seed, overwrite, quiet)
    folder = Path(out or "runs/demo")
    run = shipped_training(folder, overwrite)
    model = run.info["checkpoints"][-1]["path"]
    # The CPU, whatever else there is: the model is small, and everybody's demo should show the same numbers.
    scan(model, out=folder / "scan", router="raw,centered", seed=seed, device="cpu", quiet=quiet)
    texts = held_out_texts(folder / "validation", run)
    trace(
        model,
        domain=texts,
        out=folder / "trace",
        max_tokens=TRACED_TOKENS,
        save_tokens=True,
        seed=seed,
        device="cpu",
        quiet=quiet,
    )
    if not (folder / "report.html").exists():
        report(run, quiet=quiet)
    return run


def shipped_training(folder: Path, overwrite: bool) -> Run:
    """The training as a run folder.

    Its tables, and the checkpoint it ended in, as `moescope train` would have left them.
    """
    info = Run.load(SHIPPED / "training").info
    identity = {key: info[key] for key in ("arguments", "corpus")}
    with only_writer(folder, folder / ".lock", "this run", "give another --out"):
        check_folder(folder, identity, overwrite)
        if overwrite:
            clear_training(folder)
            clear_run(folder)
        write_json(
            folder / "run.json", info
        )  # first: with it the folder is ours, whatever happens to the rest
        for table in (SHIPPED / "training").glob("*.parquet"):
            shutil.copyfile(table, folder / table.name)
        states = folder / "checkpoints"
        states.mkdir(exist_ok=True)
        model = states / f"step-{info['arguments']['train']['steps']}"
        if not model.exists():
            with whole_folder(model) as partial:
                shutil.copytree(SHIPPED / "model", partial, dirs_exist_ok=True)
        write_json(folder / "run.json", {**info, "checkpoints": saved_checkpoints(states)})
    return Run.load(folder)


def held_out_texts(folder: Path, run: Run) -> list[str]:
    """The beginnings of documents the model was not trained on, by domain, as `trace` takes them.

    Which documents are held out is told by their names, so it is the same under another Python, whose texts
    are others.
    """
    from moescope.lab.config import config_from
    from moescope.lab.train_text import read_corpus

    if not folder.exists():
        settings = {key: value for key, value in run.info["arguments"].items() if key != "from"}
        corpus = read_corpus(config_from(settings))
        with whole_folder(folder) as partial:
            for domain in corpus.domains:
                lines = [
                    json.dumps({"text": beginning(text)}, ensure_ascii=False)
                    for text in corpus.validation[domain]
                ]
                (partial / f"{domain}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = {file.stem: file for file in folder.glob("*.jsonl")}  # this Python may have no headers
    return [f"{domain}={files[domain]}" for domain in run.info["domains"] if domain in files]


def beginning(text: str) -> str:
    """At most CHARACTERS of the text, whole lines where there are any."""
    return (
        text if len(text) <= CHARACTERS else text[: text.rfind("\n", 0, CHARACTERS) + 1] or text[:CHARACTERS]
    )


def planted_demo(folder: Path, seed: int, overwrite: bool, quiet: bool) -> Run:
    """Write the planted checkpoint beside the run, scan it and build the report."""
    from moescope.demo.planted import write_planted

    checkpoint = folder.parent / f"planted-mixtral-seed{seed}"
    if not (
        checkpoint / "config.json"
    ).exists():  # the config is written last: with it, the checkpoint is whole
        write_planted(checkpoint, seed)
    run = scan(checkpoint, out=folder, router="raw,centered", overwrite=overwrite, quiet=quiet)
    report(run, quiet=quiet)
    return run


# --- what the terminal shows


def demo_summary(run: Run) -> dict[str, Any]:
    """Everything worth printing of a demo, as plain data: its parts, each as its own verb tells it."""
    from moescope.lab.report_training import TRAINING
    from moescope.reporting.run_kind import kind_summary
    from moescope.routing.report_summary import trace_summary
    from moescope.weights.report import summary

    where = {"run": str(run.path), "report": str(run.path / "report.html")}
    if run.info["verb"] == "scan":
        from moescope.demo.planted import LAYERS

        planted = [f"layer {layer}, {planted.kind}: {planted.truth}" for layer, planted in enumerate(LAYERS)]
        return {**where, "planted": planted, "weights": summary(run)}
    return {
        **where,
        "training": kind_summary(run, TRAINING),
        "weights": summary(Run.load(run.path / "scan")),
        "text": trace_summary(Run.load(run.path / "trace")),
    }


TITLES = {
    "training": "How it was trained, before you came (`make demo-model` does it again)",
    "weights": "What its weights say",
    "text": "Where text goes that it was not trained on",
}


def demo_lines(facts: dict[str, Any]) -> list[str]:
    """The summary for a person."""
    lines: list[str] = []
    if "planted" in facts:
        lines += ["What was planted", *(f"  {line}" for line in facts["planted"]), ""]
    for part, title in TITLES.items():
        if part in facts:
            lines.append("What was found" if "planted" in facts else title)
            lines += [f"  {line}" for line in dict.fromkeys(facts[part]["coverage"])]
            lines += [f"  - {finding}" for finding in facts[part]["findings"]]
            lines += [f"  warning: {warning}" for warning in facts[part]["warnings"]]
            lines.append("")
    return [*lines, f"run: {facts['run']}", f"report: {facts['report']}"]
