"""Whether two versions of moescope write the same numbers: for refactorings that are to change no behaviour.

    make equal                                # this tree against d130f29, or BASE=COMMIT; ONLY="trace deploy"
    python bench/equal_tables.py save OLD --source ../old/src
    python bench/equal_tables.py save NEW --source src --models OLD/models
    python bench/equal_tables.py compare OLD NEW
    python bench/equal_tables.py equal --base d130f29 --only trace deploy    # all of this, and the pages

`save` runs every verb on small models through the command line, `--jobs` commands at a time. Models and texts
are made from seeds, trained lab models by the `train` of the code at hand; hence `--models`, so that both
versions read the same bytes. `--only` takes names of runs or what they begin with (trace, ray, train-base);
runs that these read come along. What the commands print goes to FOLDER/logs and is not compared.

`compare` looks at every table, plan, list and written checkpoint, cell by cell: counts exactly, other numbers
to 1e-12 of max(1, |x|). It reads the files itself, so neither version has to read the other's. New tables,
columns and files are listed and allowed; what is lost or changed is an error unless `intended.toml` beside
this file names it. Times, speeds and memory are left out (IGNORED). Runs on two Ray workers are also compared
with the run of the same version in one process.

`equal` checks the base out with `git worktree`, keeps its results in `--cache` (runs/equal-BASE), writes this
tree's into runs/equal-new, and runs `equal_pages.py` too. Both versions use the packages of the Python that
runs this.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import runpy
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
BASE = "d130f29"
IGNORED = {  # times, speeds and memory: "column", or "table.column"
    "tokens_per_second", "step_seconds", "peak_memory_bytes", "seconds", "milliseconds", "overhead.share",
}  # fmt: skip
IGNORED_KEYS = {"path", "header_hash", "tokenizer", "arrays_sha256", "moescope_plan", "seconds"}  # of JSON
IGNORED_FILES = {"run.json", "setup.json"}
TOLERANCE = 1e-12  # times max(1, |x|)
# Runs of one version that agree: on two Ray workers -> in this process.
PAIRS = {"ray-trace": "trace-qwen", "ray-compress": "compress-reap"}

WORDS = [f"{first}{second}" for first in ("bar", "cop", "lin", "sal", "tim", "wo", "fla") for second in
         ("ley", "per", "en", "ty", "ber", "ol", "xen", "ring")]  # fmt: skip
LAYERS, EXPERTS, CHOSEN = 3, 8, 2
SIZES: dict[str, Any] = {  # of the transformers models; each config takes those that it knows
    "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 24, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
    "max_position_embeddings": 256, "num_experts_per_tok": CHOSEN, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen3_moe": {"num_experts": EXPERTS},
    "deepseek_v3": {
        "n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2,
        "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 8, "head_dim": 4,
    },
}  # fmt: skip

TRAINING = """
[{base}model]
d_model = 32
layers = 2
heads = 2
d_ff = 32
experts = 4
max_positions = 64
{more}
[{base}data]
validation_share = 0.3
domains = {{ first = "{first}", second = "{second}" }}
[{base}train]
steps = {steps}
batch_size = 4
sequence_length = 32
learning_rate = 0.01
warmup = 3
evaluate_every = 5
checkpoint_every = 10
evaluation_rows = 8
"""
STUDY = """
reference = "top2"
seeds = [3, 5]
{base}
[arms.top2]
model = {{ router = "top2" }}
[arms.spectra]
model = {{ router = "spectra" }}
"""
EXISTING = """
[base]
{base}
[data]
validation_share = 0.3
domains = {{ first = "{first}", second = "{second}" }}
[train]
steps = 6
batch_size = 4
sequence_length = 32
learning_rate = 0.003
warmup = 2
evaluate_every = 3
checkpoint_every = 6
evaluation_rows = 8
"""
BASES = {  # what becomes of a model: base model, settings
    "kept": ("mixtral", 'trained = "routers+experts"'),
    "routers": ("mixtral", 'router = "spectra"\ncontrols = true'),
    "dense": ("llama", "experts = 4\nnoise = 0.01\ncontrols = true"),
}
MONITOR = """
import sys, torch, moescope
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_router_logits=True).train()
optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(0)
monitor = moescope.Monitor(
    out=sys.argv[2], every=4, decisions_every=2, gradients_every=4, scan_every=8, scan=moescope.scan_model,
    coactivation=True,
).watch(model)
for _ in range(12):
    ids = torch.randint(3, 60, (4, 24), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 18:] = 0  # some padding, which is not counted
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    monitor.step()
monitor.close()
"""


# --- save: models and texts


def build_models(folder: Path) -> None:
    """All that commands read but trained models: texts, other tools' traces, settings, random models."""
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(folder)
    write_recorded(folder)
    for kind in KINDS:
        save_transformers(folder / kind, kind)
    save_transformers(folder / "mixtral-later", "mixtral", nudge=0.05)
    texts = {"first": folder / "first.jsonl", "second": folder / "second.jsonl"}
    settings = {"steps": 20, "more": "", "base": "", **texts}
    some = 'block = "some"\nfrozen_experts = true'
    (folder / "train.toml").write_text(TRAINING.format(**settings))
    (folder / "some.toml").write_text(TRAINING.format(**{**settings, "more": some}))
    base = TRAINING.format(**{**settings, "steps": 12, "base": "base."})
    (folder / "study.toml").write_text(STUDY.format(base=base))
    for name, (_, changes) in BASES.items():
        (folder / f"base-{name}.toml").write_text(EXISTING.format(base=changes, **texts))


def write_texts(folder: Path) -> None:
    """Two domains that share a part of their words."""
    draw = np.random.default_rng(0)
    for name, words in (("first", WORDS[:36]), ("second", WORDS[20:])):
        chances = draw.dirichlet(np.full(len(words), 0.5))
        lengths = draw.integers(20, 70, 40)
        lines = [json.dumps({"text": " ".join(draw.choice(words, length, p=chances))}) for length in lengths]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def write_recorded(folder: Path) -> None:
    """Traces as vLLM, SGLang and llama.cpp write them."""
    draw = np.random.default_rng(1)

    def chosen(tokens: int) -> np.ndarray[Any, Any]:
        return np.argsort(draw.random((tokens, LAYERS, EXPERTS)), axis=2)[:, :, :CHOSEN]

    vllm, sglang = [], []
    for length in draw.integers(10, 40, 8):
        read, written = chosen(length).tolist(), chosen(9).tolist()
        vllm.append({"prompt_routed_experts": read, "choices": [{"routed_experts": written}]})
        encoded = base64.b64encode(chosen(length).astype("<i4").tobytes()).decode()
        sglang.append({"meta_info": {"routed_experts": encoded, "prompt_tokens": int(length) - 5}})
    (folder / "vllm.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in vllm))
    (folder / "sglang.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in sglang))
    rows = [f"{layer},{expert}\n" for token in chosen(80) for layer, k in enumerate(token) for expert in k]
    (folder / "llamacpp.csv").write_text("layer,expert\n" + "".join(rows))


def save_transformers(folder: Path, kind: str, nudge: float = 0.0) -> None:
    """A random model with a word tokenizer; `nudge` moves its weights a little, as training would."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})).float()
    generator, later = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():  # norms begin as ones, which would hide that they are folded in
            mean = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(mean + 0.3 * torch.randn(parameter.shape, generator=generator))
            parameter.add_(nudge * torch.randn(parameter.shape, generator=later))
    model.save_pretrained(folder)
    names = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


# --- save: commands


def commands(models: Path, out: Path, source: Path) -> dict[str, list[Any]]:
    """Every command by the name of its run folder; later ones may read the runs of earlier ones."""
    mixtral, qwen, deepseek = (models / kind for kind in ("mixtral", "qwen3_moe", "deepseek_v3"))
    later = models / "mixtral-later"
    lab = [models / f"lab-top2/checkpoints/step-{step}" for step in (10, 20)]
    hashed = models / "lab-hash/checkpoints/step-20"
    domains = ["--domain", f"first={models}/first.jsonl", "--domain", f"second={models}/second.jsonl"]
    text: list[Any] = ["--text", models / "first.jsonl", "--text", models / "second.jsonl"]
    readings = ["--matrix", "gate,up,gate_up,down", "--router", "raw,centered"]
    half, few = ["--keep", "0.5"], ["--max-tokens", "1500"]
    ray, streamed = ["--engine", "ray", "--jobs", "2"], ["--execution", "streamed"]
    made: dict[str, list[Any]] = {
        "scan-mixtral": ["scan", mixtral, *readings],
        "scan-later": ["scan", later, "--matrix", "gate,down"],
        "scan-qwen": ["scan", qwen, "--matrix", "gate_up", *readings[2:], "--precision", "exact"],
        "scan-deepseek": ["scan", deepseek, *readings[:2], "--fold-norm", "--k", "3,5"],
        "scan-steps": ["scan", mixtral, later],
        "scan-lab": ["scan", *lab, "--router", "raw,centered"],
        "scan-hash": ["scan", hashed, "--matrix", "gate,down"],
        "trace-mixtral": ["trace", mixtral, later, *domains, "--phase", "both", "--save-tokens"],
        "trace-qwen": ["trace", qwen, *domains, "--save-tokens", *few],
        "trace-deepseek": ["trace", deepseek, *domains, "--phase", "both", "--max-tokens", "800"],
        "trace-decode": ["trace", mixtral, *text, "--phase", "decode", "--max-tokens", "600"],
        "trace-next": ["trace", qwen, *domains, "--save-tokens", "--probe-next", "--max-tokens", "3000"],
        "trace-lab": ["trace", *lab, *domains, "--save-tokens", "--max-tokens", "3000"],
        "trace-hash": ["trace", hashed, *domains, "--max-tokens", "2000"],
        "streamed-trace": ["trace", deepseek, *domains, "--save-tokens", *few, *streamed],
        "ray-trace": ["trace", qwen, *domains, "--save-tokens", *few, *ray],
        "compare-plain": ["compare", mixtral, later],
        "compare-matched": ["compare", mixtral, later, "--matched", "--series", "later"],
        "compare-held-out": ["compare", *lab, "--matched", "--match-by", "held_out"],
        "compare-traces": ["compare", out / "trace-qwen", out / "trace-next"],
        "train-top2": ["train", models / "train.toml", "--router", "top2"],
        "train-spectra": ["train", models / "train.toml", "--router", "spectra"],
        "train-some": ["train", models / "some.toml", "--router", "some"],
        "train-expert_choice": ["train", models / "train.toml", "--router", "expert_choice"],
        "train-from": ["train", models / "train.toml", "--from", lab[-1], "--seed", "3"],
        "study": ["study", models / "study.toml"],
        "intervene-set": ["intervene", mixtral, *domains, "--set", "layer=1 expert=3 ablate",
                          "--set", "layer=2 uniform_router", "--generate", "barley copper linen"],
        "intervene-experts": ["intervene", mixtral, *domains, "--sweep", "experts"],
        "intervene-layers": ["intervene", lab[-1], *domains, "--sweep", "layers", "--set", "uniform_router"],
        "intervene-k": ["intervene", lab[-1], *domains, "--sweep", "k", "--max-tokens", "3000"],
        "intervene-top_k": ["intervene", deepseek, *domains, "--sweep", "top_k"],
        "intervene-streamed": ["intervene", qwen, *domains, "--sweep", "experts", "--layers", "1", *streamed],
        "deploy-mixtral": ["deploy", out / "trace-mixtral", "--model", mixtral, "--bandwidth", "7",
                           "--slots", "2,0.5,1.0", "--gpus", "4", "--nodes", "2", "--redundant", "4"],
        "deploy-next": ["deploy", out / "trace-next", "--expert-bytes", "9000"],
        "deploy-lab": ["deploy", out / "trace-lab", "--cold", "--batch-tokens", "64"],
    }  # fmt: skip
    for name, file, model_given in (
        ("vllm", models / "vllm.jsonl", []),
        ("sglang", models / "sglang.jsonl", [mixtral]),
        ("llamacpp", models / "llamacpp.csv", []),
        ("moescope", out / "trace-qwen/tokens.parquet", []),
    ):
        given = ["--recorded", file, "--format", name, "--experts", EXPERTS]
        made[f"trace-recorded-{name}"] = ["trace", *model_given, *given]
    for name, (model, _) in BASES.items():
        made[f"train-base-{name}"] = ["train", models / f"base-{name}.toml", "--base", models / model]
    plans: list[tuple[str, Path, str, list[Any]]] = [
        ("compress-reap", mixtral, "reap", [*half, *text, "--apply"]),
        ("compress-hc_smoe", qwen, "hc_smoe", [*half, *text, "--apply"]),
        ("compress-m_smoe", deepseek, "m_smoe_permuted", [*half, *text]),
        ("compress-weights", mixtral, "weights", [*half, "--apply"]),
        ("compress-frequency", mixtral, "frequency", ["--keep", "5", *text]),
        ("compress-random", deepseek, "random", [*half, *text, "--controls", "1"]),
        ("compress-lab", lab[-1], "hc_smoe", [*half, *text, "--apply"]),
        ("compress-hash", hashed, "reap", [*half, *text, "--apply"]),
        ("streamed-compress", qwen, "reap", [*half, *text, *few, *streamed]),
        ("ray-compress", mixtral, "reap", [*half, *text, *ray, "--apply"]),
    ]
    for name, model, method, more in plans:
        more += [out / "applied" / name] if more[-1] == "--apply" else []
        made[name] = ["compress", model, "--method", method, *more]
    for name, arguments in made.items():
        device = [] if arguments[0] == "deploy" else ["--device", "cpu"]
        arguments += ["--out", out / name, *device]
    for model in (mixtral, deepseek, lab[-1]):
        made[f"inspect-{model.name}"] = ["inspect", model, "--json"]
    two = [out / "scan-mixtral", out / "scan-later"]
    made["report-scans"] = ["report", *two, "--out", out / "report-scans/report.html"]
    two = [out / "scan-mixtral", out / "trace-mixtral"]
    made["report-model"] = ["report", *two, "--out", out / "report-model/report.html"]
    stored = sorted((source.parent / "studies").glob("*/run"))
    for study in stored:
        name = f"stored-{study.parent.name}"
        made[name] = ["report", study, "--out", out / name / "report.html"]
    if results := sorted((source.parent / "studies").glob("*/results.toml")):
        files = [word for file in results for word in ("--results", file)]
        made["claims"] = ["report", *stored, *files, "--json", "--out", out / "claims/report.html"]
    made["monitor"] = ["-c", MONITOR, mixtral, out / "monitor"]
    made["demo"] = ["demo", "--out", out / "demo"]
    return made


def training_commands(models: Path) -> dict[str, list[Any]]:
    """The commands that train the models which the others read."""
    training = ["train", models / "train.toml", "--device", "cpu"]
    routers = ("top2", "hash")
    return {f"lab-{name}": [*training, "--router", name, "--out", models / f"lab-{name}"] for name in routers}


def preload(source: Path) -> None:
    """Import what every command needs, once for all of them; the code under test comes from `source`."""
    fixed = {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    os.environ.update(fixed)
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # the same kernels on every machine
    sys.path.insert(0, str(source))
    import moescope

    if not Path(moescope.__file__).is_relative_to(source):
        raise SystemExit(f"{source}: no moescope in it; python imports {moescope.__file__}")
    import pandas  # noqa: F401
    import plotly.graph_objects  # noqa: F401
    import scipy.linalg
    import scipy.stats  # noqa: F401
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM, MixtralForCausalLM  # noqa: F401


def execute(arguments: Sequence[Any], log: Path) -> None:
    """In a child process: `moescope ARGUMENTS`, or with "-c" first any Python; output goes to the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    for descriptor, file in ((1, log), (2, log.with_suffix(".err"))):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    words = [str(argument) for argument in arguments]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<command>", "exec"), {"__name__": "__main__"})
        return
    sys.argv = ["moescope", *words]
    runpy.run_module("moescope", run_name="__main__", alter_sys=True)


def start(work: Callable[[], object]) -> int:
    """Do the work in a forked process, whose number is returned; it ends as a Python of its own would."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_all(every: dict[str, list[Any]], folder: Path, jobs: int) -> list[str]:
    """Run commands, each after those whose folders it reads; return the names of those that failed."""
    waiting, running, failed = list(every), dict[int, tuple[str, float]](), []
    reads = {name: inputs(arguments, folder) - {name} for name, arguments in every.items()}
    while waiting or running:
        unfinished = {*waiting, *(name for name, _ in running.values())}
        ready = next((name for name in waiting if not reads[name] & unfinished), None)
        if ready is not None and len(running) < jobs:
            waiting.remove(ready)
            work = partial(execute, every[ready], folder / "logs" / f"{ready}.txt")
            running[start(work)] = ready, time.perf_counter()
            continue
        child, status, used = os.wait4(-1, 0)
        name, started = running.pop(child)
        seconds = time.perf_counter() - started
        print(f"{name:24} {seconds:6.1f} s, CPU {used.ru_utime + used.ru_stime:6.1f} s", flush=True)
        if status:
            failed.append(name)
            log = folder / "logs" / f"{name}.err"
            print(f"  FAILED with status {status}; see {log}\n{log.read_text()[-2000:]}", flush=True)
    return failed


def inputs(arguments: Sequence[Any], folder: Path) -> set[str]:
    """Names of the runs in the folder that a command reads or writes."""
    paths = [path for path in arguments if isinstance(path, Path) and path.is_relative_to(folder)]
    return {path.relative_to(folder).parts[0] for path in paths}


def chosen(every: dict[str, list[Any]], only: Sequence[str], folder: Path) -> list[str]:
    """Return the runs whose names `only` begins (all without it), and the runs that these read."""
    wanted = {name for name in every if not only or name.startswith(tuple(only))}
    if unknown := [start for start in only if not any(name.startswith(start) for name in every)]:
        raise SystemExit(f"--only {' '.join(unknown)}: known are {', '.join(every)}")
    while more := {read for name in wanted for read in inputs(every[name], folder) & set(every)} - wanted:
        wanted |= more
    return [name for name in every if name in wanted]


def save(folder: Path, source: Path, models: Path | None, only: Sequence[str], jobs: int) -> int:
    """Run every command, or only those chosen, into FOLDER; 1 if one of them failed."""
    begun = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    preload(source)
    if models is None:
        models = folder / "models"
        if not (models / "complete").exists():
            shutil.rmtree(models, ignore_errors=True)
            os.waitpid(start(partial(build_models, models)), 0)
            if failed := run_all(training_commands(models), folder, jobs):
                raise SystemExit(f"models: {', '.join(failed)} failed")
            (models / "complete").touch()
    every = commands(models, folder, source)
    names = chosen(every, only, folder)
    for name in names:
        for left in (folder / name, folder / "applied" / name):
            shutil.rmtree(left, ignore_errors=True)  # a finished run would be taken as it is
        if every[name][0] in ("inspect", "report"):  # these write no run folder
            (folder / name).mkdir()
    failed = run_all({name: every[name] for name in names}, folder, jobs)
    for name in names:
        if "--json" in every[name]:
            shutil.copy(folder / "logs" / f"{name}.txt", folder / name / "printed.json")
    print(f"{time.perf_counter() - begun:.0f} s; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


# --- compare


@dataclass
class Tally:
    """What was compared in one run, or in all; of a safetensors file a tensor counts as a row."""

    files: int = 0
    rows: int = 0
    cells: int = 0
    largest: float = 0.0  # difference, relative to max(1, |x|)

    def add(self, other: Tally) -> None:
        self.files += other.files
        self.rows += other.rows
        self.cells += other.cells
        self.largest = max(self.largest, other.largest)

    def line(self, name: str) -> str:
        return f"{name:50} {self.files:6} {self.rows:8} {self.cells:10} {self.largest:19.3g}"


Intended = dict[str, tuple[str, float]]  # pattern of places -> why they differ, and how much at most


def read_intended() -> Intended:
    entries = tomllib.loads((HERE / "intended.toml").read_text()).get("intended", [])
    return {
        place: (entry["why"], entry.get("within", math.inf)) for entry in entries for place in entry["places"]
    }


@dataclass
class Comparison:
    """Two runs of the same name in two folders, or of two names in one, and what was found so far."""

    old: Path
    new: Path
    intended: Intended
    every_column: bool = False
    wrong: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    excused: dict[str, list[str]] = field(default_factory=dict)  # pattern -> what it excuses

    def complain(self, what: str, place: str, shown: str = "", gap: float = math.inf) -> None:
        """Note an error, or an intended difference."""
        line = f"{what} {place}{shown and ': '}{shown}"
        for pattern, (_, within) in self.intended.items():
            if gap <= within and fnmatchcase(place, pattern):
                self.excused.setdefault(pattern, []).append(line)
                return
        self.wrong.append(line)

    def missing(self, what: str, in_old: set[str], in_new: set[str], place: str = "") -> None:
        """Note what one side has alone."""
        for name in sorted(in_old - in_new):
            self.complain(f"MISSING {what}", f"{place}{name}")
        self.added += [f"{what} {place}{name}" for name in sorted(in_new - in_old)]

    def judge(self, tally: Tally, place: str, before: Any, after: Any, exact: bool = False) -> None:
        """Numbers, or texts, as many on both sides: count them, and say where they differ."""
        tally.cells += len(before)
        if before.dtype == object:
            differs = before != after
            worst, shown = 0.0, f"{differs.sum()} of {len(before)} differ"
            if differs.any():
                worst, at = math.inf, int(np.argmax(differs))
                shown += f", the first {before[at]!r} -> {after[at]!r}"
        else:
            same = (before == after) | (np.isnan(before) & np.isnan(after))
            with np.errstate(invalid="ignore"):
                gap = np.where(same, 0.0, np.abs(after - before))
                gap = np.where(np.isnan(gap), math.inf, gap)  # a number on one side only
                relative = np.where(same, 0.0, gap / np.maximum(1.0, np.nan_to_num(np.abs(before))))
            worst = float(relative.max(initial=0.0))
            shown = f"largest difference {gap.max(initial=0.0):.3g}, relative {worst:.3g}"
            shown += f", {(~same).sum()} of {len(before)} differ"
        tally.largest = max(tally.largest, worst)
        if worst > (0.0 if exact else TOLERANCE):
            self.complain("DIFFERS", place, shown, worst)
        elif self.every_column:
            print(f"  {place}: {shown}")

    def run(self, name: str, other: str = "") -> Tally:
        """Compare all files of a run, or of two runs."""
        tally = Tally()
        sides = files(self.old / name), files(self.new / (other or name))
        self.missing("file", *sides, f"{name}/")
        for file in sorted(sides[0] & sides[1]):
            place, before, after = f"{name}/{file}", self.old / name / file, self.new / (other or name) / file
            tally.files += 1
            if before.suffix == ".parquet":
                self.table(tally, place.removesuffix(".parquet"), before, after)
            elif before.suffix == ".json":
                self.facts(tally, place, *(json.loads(side.read_text()) for side in (before, after)))
            elif before.suffix == ".safetensors":
                self.tensors(tally, place, before, after)
            elif before.read_bytes() != after.read_bytes():
                self.complain("DIFFERS", place, "not the same text")
        return tally

    def conclude(self, listed: list[tuple[str, list[str]]], some: bool) -> int:
        """Print what was found; 1 if anything is wrong, or if nothing was compared."""
        for pattern, lines in self.excused.items():
            print(f"intended: {pattern} ({self.intended[pattern][0]}): {len(lines)}")
        for title, lines in (("only in the new one", self.added), *listed, ("wrong", self.wrong)):
            print(f"{title}: {len(lines)}")
            print("".join(f"  {line}\n" for line in lines), end="")
        return 1 if self.wrong or not some else 0

    # --- tables

    def table(self, tally: Tally, place: str, old: Path, new: Path) -> None:
        """Rows of both sorted by all common columns but floats and lists; keys come first in every table."""
        before, after = pq.read_table(old), pq.read_table(new)
        self.missing("column", set(before.column_names), set(after.column_names), f"{place}.")
        before, after = self.without_intended(place, before), self.without_intended(place, after)
        tally.rows += len(before)
        both = [column for column in before.column_names if column in after.column_names]
        both = [column for column in both if not {column, f"{old.stem}.{column}"} & IGNORED]
        order = [(column, "ascending") for column in both if sortable(before[column], after[column])]
        if len(before) != len(after):
            shown = rows_lost(before, after, [column for column, _ in order])
            self.complain("DIFFERS", place, f"{len(before)} rows -> {len(after)}{shown}")
            tally.largest = math.inf
            return
        if order:
            before, after = before.sort_by(order), after.sort_by(order)
        for column in both:
            self.column(tally, f"{place}.{column}", before[column], after[column])

    def without_intended(self, place: str, table: pa.Table) -> pa.Table:
        """Leave out the rows that `TABLE.COLUMN=VALUE` of intended.toml names."""
        for pattern in self.intended:
            column_place, _, value = pattern.partition("=")
            for column in table.column_names if value else ():
                if fnmatchcase(f"{place}.{column}", column_place):
                    named = pc.fill_null(pc.equal(pc.cast(table[column], pa.string()), value), False)
                    if pc.any(named).as_py():
                        self.excused.setdefault(pattern, []).append(f"ROWS {place}.{column}={value}")
                        table = table.filter(pc.invert(named))
        return table

    def column(self, tally: Tally, place: str, before: pa.ChunkedArray, after: pa.ChunkedArray) -> None:
        """One column; of lists first their lengths, then what they hold, one after the other."""
        if kind_of(before.type) != kind_of(after.type):
            self.complain("DIFFERS", place, f"{before.type} -> {after.type}")
            tally.largest = math.inf
        elif kind_of(before.type) == "list":
            lengths = [numbers(pc.list_value_length(side)) for side in (before, after)]
            if np.array_equal(lengths[0], lengths[1], equal_nan=True):
                self.column(tally, place, pc.list_flatten(before), pc.list_flatten(after))
            else:
                self.complain("DIFFERS", place, "lists of other lengths")
                tally.largest = math.inf
        elif kind_of(before.type) == "number":
            counts = pa.types.is_integer(before.type)
            self.judge(tally, place, numbers(before), numbers(after), exact=counts)
        else:
            self.judge(tally, place, *(self.words(side.to_pylist()) for side in (before, after)))

    def words(self, values: list[Any]) -> Any:
        """Texts and truth values, without the paths of the two folders."""
        return np.array([self.without_folder(value) for value in values], dtype=object)

    def without_folder(self, value: Any) -> Any:
        if isinstance(value, str):
            for folder in sorted((str(self.old), str(self.new)), key=len, reverse=True):
                value = value.replace(folder, "")
        return value

    # --- JSON and safetensors

    def facts(self, tally: Tally, place: str, before: Any, after: Any) -> None:
        """Numbers and texts of a JSON file."""
        sides = [{key: self.without_folder(value) for key, value in leaves(said)} for said in (before, after)]
        self.missing("value", set(sides[0]), set(sides[1]), f"{place}:")
        common = [key for key in sides[0] if key in sides[1]]
        tally.rows += len(common)
        for key in common:  # one by one: each is a place that may be intended to differ
            pair = [side[key] for side in sides]
            if all(type(value) in (int, float) for value in pair):
                exact = type(pair[0]) is int
                self.judge(tally, f"{place}:{key}", *(np.array([value], float) for value in pair), exact)
            else:
                self.judge(tally, f"{place}:{key}", *(np.array([value], object) for value in pair))

    def tensors(self, tally: Tally, place: str, old: Path, new: Path) -> None:
        """A safetensors file: names, dtypes, shapes, numbers; of dtypes that numpy lacks every bit."""
        before, after = safetensors(old), safetensors(new)
        self.missing("tensor", set(before), set(after), f"{place}:")
        tally.rows += len(before)
        for name in sorted(set(before) & set(after)):
            (kind, shape, content), (*same, other) = before[name], after[name]
            if [kind, shape] == same and kind in ("F32", "F64"):
                dtype = {"F32": "<f4", "F64": "<f8"}[kind]
                sides = (np.frombuffer(side, dtype).astype(float) for side in (content, other))
                self.judge(tally, f"{place}:{name}", *sides)
                continue
            tally.cells += math.prod(shape)
            if before[name] != after[name]:
                tally.largest = math.inf
                self.complain("DIFFERS", f"{place}:{name}", "not the same bit for bit")


def rows_lost(before: pa.Table, after: pa.Table, keys: list[str]) -> str:
    """Say by the first column whose values are not as often there as before which rows come or go."""
    for key in keys:
        counts = [
            {row["values"]: row["counts"] for row in pc.value_counts(side[key]).to_pylist()}
            for side in (before, after)
        ]
        values = dict.fromkeys([*counts[0], *counts[1]])
        changed = [f"{value!r} {counts[0].get(value, 0)} -> {counts[1].get(value, 0)}" for value in values
                   if counts[0].get(value) != counts[1].get(value)]  # fmt: skip
        if changed:
            return f"; {key}: {', '.join(changed[:6])}{' ...' if len(changed) > 6 else ''}"
    return ""


def leaves(value: Any, place: str = "") -> list[tuple[str, Any]]:
    """Every number, text and truth value in it by its place."""
    if isinstance(value, dict):
        parts = [(key, inner) for key, inner in value.items() if key not in IGNORED_KEYS]
    elif isinstance(value, list):
        parts = [(str(number), inner) for number, inner in enumerate(value)]
    else:
        return [(place, value)]
    return [leaf for key, inner in parts for leaf in leaves(inner, f"{place}/{key}")]


def sortable(*sides: pa.ChunkedArray) -> bool:
    plain = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string, pa.types.is_boolean)
    return all(any(kind(side.type) for kind in plain) for side in sides)


def kind_of(kind: pa.DataType) -> str:
    """number, list, or other: texts and truth values."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return "list"
    return "number" if pa.types.is_integer(kind) or pa.types.is_floating(kind) else "other"


def numbers(side: pa.ChunkedArray) -> Any:
    return side.cast(pa.float64(), safe=False).to_numpy().astype(float)  # null becomes NaN


def safetensors(file: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of every tensor; the file's order and metadata are not compared."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    found = {}
    for name, about in header.items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in about["data_offsets"])
            found[name] = (about["dtype"], tuple(about["shape"]), content[start:end])
    return found


def files(folder: Path) -> set[str]:
    """Files of a run that are compared, and those whose absence is an error."""
    kinds = {".parquet", ".json", ".safetensors", ".jsonl", ".csv", ".txt", ".yaml"}
    found = (file.relative_to(folder) for file in folder.rglob("*") if file.suffix in kinds)
    return {str(file) for file in found if file.name not in IGNORED_FILES}


def run_names(folder: Path) -> set[str]:
    """Runs of a folder, and the checkpoints that they wrote."""
    runs = {path.name for path in folder.iterdir() if path.is_dir()} - {"models", "logs", "applied"}
    return runs | {f"applied/{path.name}" for path in (folder / "applied").glob("*")}


def compare(old: Path, new: Path, every_column: bool, only: Sequence[str]) -> int:
    """Compare all runs and checkpoints of two folders; 1 if anything differs or is missing."""
    comparison = Comparison(old, new, read_intended(), every_column)
    total = Tally()
    print(f"{'run':50} {'files':>6} {'rows':>8} {'cells':>10} {'largest difference':>19}")
    found = [run_names(side) for side in (old, new)]
    if only:
        found = [
            {name for name in side if name.removeprefix("applied/").startswith(tuple(only))} for side in found
        ]
    comparison.missing("run", *found)
    for name in sorted(found[0] & found[1]):
        tally = comparison.run(name)
        print(tally.line(name))
        total.add(tally)
    print(total.line(f"all {len(found[0] & found[1])}") + "\n")
    pairs = Comparison(new, new, {}, every_column)
    for distributed, local in PAIRS.items():
        if {distributed, local} <= found[1]:
            print(pairs.run(distributed, local).line(f"{distributed} and {local}"))
    comparison.wrong += [f"{line} (two workers and one)" for line in pairs.wrong]
    print(f"not compared: {', '.join(sorted(IGNORED))}")
    return comparison.conclude([], bool(total.cells))


# --- both


def equal(base: str, source: Path, cache: Path, only: Sequence[str], jobs: int) -> int:
    """Save the base once, save this tree, and compare tables and pages; 1 if anything differs."""
    python, script = sys.executable, [str(HERE / "equal_tables.py")]
    selected = ["--only", *only] if only else []
    results = HERE.parent / "runs" / "equal-new"
    if not (cache / "complete").exists():
        with tempfile.TemporaryDirectory() as scratch:
            tree = Path(scratch) / "tree"
            subprocess.run(["git", "worktree", "add", "--detach", tree, base], cwd=HERE, check=True)
            try:
                saving = [python, *script, "save", cache, "--source", tree / "src", "--jobs", str(jobs)]
                subprocess.run(saving, check=True)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=HERE, check=True)
        (cache / "complete").touch()
    shutil.rmtree(results, ignore_errors=True)
    saving = [python, *script, "save", results, "--source", source, "--models", cache / "models",
              "--jobs", str(jobs), *selected]  # fmt: skip
    codes = [
        subprocess.run(saving).returncode,
        subprocess.run([python, *script, "compare", cache, results, *selected]).returncode,
        subprocess.run([python, HERE / "equal_pages.py", cache, results, *selected]).returncode,
    ]
    return max(codes)


def main() -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    verbs = parser.add_subparsers(dest="verb", required=True)
    saving = verbs.add_parser("save", help="run every verb into FOLDER")
    saving.add_argument("folder", type=Path)
    saving.add_argument("--models", type=Path, help="models made by an earlier save, to read the same bytes")
    comparing = verbs.add_parser("compare", help="compare what two saves wrote")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--columns", action="store_true", help="print every column, equal ones too")
    both = verbs.add_parser("equal", help="save a base and this tree, and compare them")
    both.add_argument("--base", default=BASE, help="commit to compare with")
    both.add_argument("--cache", type=Path, help="folder of the base's results; made if need be")
    for running in (saving, both):
        running.add_argument("--source", type=Path, default=HERE.parent / "src")
        running.add_argument("--jobs", type=int, default=2, help="commands at a time")
    for selecting in (saving, comparing, both):
        selecting.add_argument(
            "--only", nargs="+", default=[], metavar="RUN", help="beginnings of runs' names"
        )
    given = parser.parse_args()
    if given.verb == "compare":
        return compare(given.old.resolve(), given.new.resolve(), given.columns, given.only)
    source = given.source.resolve()
    if given.verb == "equal":
        cache = given.cache or HERE.parent / "runs" / f"equal-{given.base}"
        return equal(given.base, source, cache.resolve(), given.only, given.jobs)
    models = None if given.models is None else given.models.resolve()
    return save(given.folder.resolve(), source, models, given.only, given.jobs)


if __name__ == "__main__":
    sys.exit(main())
