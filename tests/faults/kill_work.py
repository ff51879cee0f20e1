"""Every verb that joins tables, on inputs so small that it can be killed hundreds of times.

A module, so that forked processes can import it; with everything that a verb imports late.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers.models.mixtral.modeling_mixtral  # noqa: F401

import moescope.compression.steps
import moescope.intervention.steps
import moescope.lab.cost
import moescope.lab.evaluation
import moescope.lab.study_config
import moescope.lab.study_statistics
import moescope.lab.training
import moescope.routing.collectors
from checkpoints import tiny_checkpoint
from lab.existing_models import saved
from lab.tiny_study import write_study
from moescope import storage
from moescope.comparison.verb import compare
from moescope.compression.verb import compress
from moescope.deployment.verb import deploy
from moescope.execution.streamed import StreamedModel, load_streamed
from moescope.execution.ways import Expected
from moescope.intervention.verb import intervene
from moescope.lab.study import study
from moescope.lab.train import train
from moescope.routing.monitor import LoopMonitor
from moescope.routing.trace import trace
from moescope.weights.verb import scan
from routing.tiny_text import save_model, texts, write_jsonl
from routing.tiny_training import batch, documents, model_of

EXPECT = StreamedModel.expect
TOML = """
[model]
d_model = 16
layers = 1
heads = 2
d_ff = 16
experts = 4
max_positions = 64
[data]
validation_share = 0.4
domains = {{ words = "{folder}/words.jsonl", sums = "{folder}/sums.jsonl" }}
[train]
steps = 4
batch_size = 4
sequence_length = 16
warmup = 2
evaluate_every = 2
checkpoint_every = 2
evaluation_rows = 8
"""
STUDY = """
reference = "top2"
seeds = [3, 5]
[base.model]
{base}
[arms.top2]
model = {{ router = "top2" }}
[arms.other]
model = {{ router = "switch_top1" }}
"""


def prepare(folder: Path) -> None:
    """Write what the verbs read."""
    write_study(folder)  # for its texts
    settings = TOML.format(folder=folder)
    (folder / "tiny.toml").write_text(settings)
    base = settings.replace("[data]", "[base.data]").replace("[train]", "[base.train]")
    (folder / "study.toml").write_text(STUDY.format(base=base.replace("[model]", "")))
    tiny_checkpoint(folder / "a", layers=2)
    tiny_checkpoint(folder / "b", layers=2, seed=1)
    save_model(folder / "model")
    write_jsonl(folder / "text.jsonl", texts(12, seed=0))
    saved("llama", folder / "dense")
    data = settings[settings.index("[data]") :]
    (folder / "base.toml").write_text(f"[base]\nexperts = 2\n{data}")


def prepare_earlier(folder: Path) -> None:
    """Write the finished runs that others read or replace, and the settings of what replaces them."""
    run_trace(folder, folder / "traced")
    for name, file, make in (
        ("trained", "tiny", run_train),
        ("based", "base", run_base),
        ("studied", "study", run_study),
    ):
        make(folder, folder / name)
        settings = (folder / f"{file}.toml").read_text()
        (folder / f"{name}.toml").write_text(settings.replace("batch_size = 4", "batch_size = 2"))


def run_scan(inputs: Path, out: Path) -> None:
    scan(inputs / "a", out=out, device="cpu", quiet=True)


def run_compare(inputs: Path, out: Path) -> None:
    compare(inputs / "a", inputs / "b", out=out, device="cpu", quiet=True)


def run_trace(inputs: Path, out: Path) -> None:
    text = inputs / "text.jsonl"
    trace(inputs / "model", text=str(text), out=out, save_tokens=True, device="cpu", quiet=True)


def run_compress(inputs: Path, out: Path, **more: Any) -> None:
    options = {"method": "reap", "keep": 0.5, "text": inputs / "text.jsonl", "controls": 1, **more}
    small = out.with_name(f"{out.name}-small")
    compress(inputs / "model", **options, apply=small, out=out, device="cpu", quiet=True)


def run_ray_trace(inputs: Path, out: Path) -> None:
    text = inputs / "text.jsonl"
    ray = {"engine": "ray", "jobs": 2, "device": "cpu"}
    trace(inputs / "model", text=str(text), out=out, save_tokens=True, quiet=True, **ray)


def run_ray_compress(inputs: Path, out: Path) -> None:
    run_compress(inputs, out, engine="ray", jobs=2)


def run_intervene(inputs: Path, out: Path) -> None:
    model, text = inputs / "model", inputs / "text.jsonl"
    given = {"sweep": "experts", "layers": "1", "generate": "word1", "max_new_tokens": 3}
    intervene(model, text=text, out=out, **given, device="cpu", quiet=True)


def run_streamed(inputs: Path, out: Path) -> None:
    """A trace whose hidden states are in files."""
    model, text = inputs / "model", str(inputs / "text.jsonl")
    least = load_streamed(str(model), "auto", "cpu").expect(0).memory_bytes
    streamed = {"execution": "streamed", "memory": str(least), "batch_size": 2}
    trace(model, text=text, out=out, **streamed, save_tokens=True, device="cpu", quiet=True)


def run_streamed_compress(inputs: Path, out: Path) -> None:
    """A compression by layers whose hidden states are in files."""
    StreamedModel.expect = expect_files
    options = {"method": "reap", "keep": 0.5, "text": inputs / "text.jsonl", "controls": 1}
    small = out.with_name(f"{out.name}-small")
    options |= {"execution": "streamed", "batch_size": 2}
    compress(inputs / "model", **options, apply=small, out=out, device="cpu", quiet=True)


def expect_files(model: StreamedModel, tokens: int) -> Expected:
    return replace(EXPECT(model, tokens), disk_bytes=1)


def run_recorded(inputs: Path, out: Path) -> None:
    tokens = inputs / "traced" / "tokens.parquet"
    trace(recorded=tokens, format="moescope", experts=4, save_tokens=True, out=out, quiet=True)


def run_deploy(inputs: Path, out: Path) -> None:
    deploy(inputs / "traced", out=out, quiet=True)


def run_train(inputs: Path, out: Path) -> None:
    train(inputs / "tiny.toml", router="top2", out=out, device="cpu", quiet=True)


def run_base(inputs: Path, out: Path) -> None:
    """Upcycle a dense model and train it."""
    train(inputs / "base.toml", base=inputs / "dense", out=out, device="cpu", quiet=True)


def run_study(inputs: Path, out: Path) -> None:
    study(inputs / "study.toml", out=out, device="cpu", quiet=True)


def overwritten(earlier: str, inputs: Path, out: Path, **options: Any) -> None:
    """Replace a finished run of other settings; started again, it is replaced anew or goes on."""
    if not out.exists():
        shutil.copytree(inputs / earlier, out, symlinks=True)
    function = study if earlier == "studied" else train
    function(inputs / f"{earlier}.toml", out=out, device="cpu", overwrite=True, quiet=True, **options)


def run_train_over(inputs: Path, out: Path) -> None:
    overwritten("trained", inputs, out)


def run_base_over(inputs: Path, out: Path) -> None:
    overwritten("based", inputs, out, base=inputs / "dense")


def run_study_over(inputs: Path, out: Path) -> None:
    overwritten("studied", inputs, out)


def run_scan_over(inputs: Path, out: Path) -> None:
    """A scan in place of a finished trace."""
    if not out.exists():
        shutil.copytree(inputs / "traced", out)
    scan(inputs / "a", out=out, device="cpu", overwrite=True, quiet=True)


def monitored(out: Path, last: int) -> None:
    """Train to the last step as a user's loop does, from its own newest checkpoint if it has one."""
    saved = out.with_name(f"{out.name}-saved")
    saved.mkdir(exist_ok=True)
    model, rows = model_of("mixtral"), documents()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    first = max((int(file.stem) for file in saved.glob("*.pt")), default=0)
    if first:
        model.load_state_dict(torch.load(saved / f"{first}.pt"))
    monitor = LoopMonitor(out, every=2, gradients_every=2, overwrite=first == 0).watch(model, step=first)
    for number in range(first, last):
        model(**batch(rows[4 * number : 4 * number + 4])).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        monitor.step()
        if (number + 1) % 2 == 0:
            monitor.flush()
            torch.save(model.state_dict(), saved / "new")
            (saved / "new").rename(saved / f"{number + 1}.pt")
    monitor.close()


def run_monitor(inputs: Path, out: Path) -> None:
    monitored(out, 4)


def run_continued(inputs: Path, out: Path) -> None:
    """Continue a monitored training that was finished and closed."""
    if not out.exists():
        shutil.copytree(inputs / "undisturbed-monitor-saved", out.with_name(f"{out.name}-saved"))
        shutil.copytree(inputs / "undisturbed-monitor", out)
    monitored(out, 6)


RUNS: dict[str, Callable[[Path, Path], None]] = {
    "scan": run_scan,
    "compare": run_compare,
    "trace": run_trace,
    "streamed": run_streamed,
    "compress": run_compress,
    "ray_trace": run_ray_trace,
    "ray_compress": run_ray_compress,
    "streamed_compress": run_streamed_compress,
    "intervene": run_intervene,
    "recorded": run_recorded,
    "deploy": run_deploy,
    "train": run_train,
    "base": run_base,
    "study": run_study,
    "train_over": run_train_over,
    "base_over": run_base_over,
    "study_over": run_study_over,
    "scan_over": run_scan_over,
    "monitor": run_monitor,
    "continued": run_continued,
}


class Recorder(storage.Failpoint):
    """Fails nowhere; records at which writes a run has joined tables without being done and tidied."""

    def __init__(self, watched: Path):
        self.watched, self.joining = watched, []

    def reach(self, creates: bool) -> None:
        joined, parts = (any(self.watched.glob(place)) for place in ("*.parquet", "parts/*/*.parquet"))
        done = joined and json.loads((self.watched / "run.json").read_text())["status"] == "done"
        self.joining.append(joined and (parts or not done))


def attempt(verb: str, inputs: Path, out: Path, armed: str | None) -> None:
    """Run the verb in this process, which the failpoint may kill."""
    torch.set_num_threads(1)
    storage.failpoint = storage.Failpoint(armed) if armed else None
    RUNS[verb](inputs, out)


def record(verb: str, inputs: Path, out: Path, watched: Path) -> None:
    """Run the verb undisturbed and write what the recorder saw beside the run."""
    torch.set_num_threads(1)
    storage.failpoint = recorder = Recorder(watched)
    RUNS[verb](inputs, out)
    out.with_name(f"{out.name}.json").write_text(json.dumps(recorder.joining))


def judge_until(inputs: Path, out: Path, write: int) -> None:
    """Compress by layers; kill this process at that write of the judgement."""
    torch.set_num_threads(1)
    judge_models = moescope.compression.steps.judge_models

    def armed(*given):
        storage.failpoint = storage.Failpoint(f"kill:{write}")
        return judge_models(*given)

    moescope.compression.steps.judge_models = armed
    RUNS["streamed_compress"](inputs, out)


def judge_on(inputs: Path, out: Path) -> None:
    """Resume a compression; fail if it calibrates; write beside the run at which part each pass began."""
    passes, loaded_parts = [], StreamedModel.loaded_parts

    def counted(model, first=0):
        passes.append(first)
        return loaded_parts(model, first)

    def calibrated(*given):
        raise AssertionError("calibrated again")

    StreamedModel.loaded_parts = counted
    moescope.compression.steps.calibrate_text = calibrated
    attempt("streamed_compress", inputs, out, None)
    out.with_name(f"{out.name}.json").write_text(json.dumps(passes))
