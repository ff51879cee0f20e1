"""Whether two versions of moescope write the same numbers: for refactorings that are to change no behaviour.

    python bench/equal_tables.py save OLD --source ../old/src
    python bench/equal_tables.py save NEW --source src --models OLD/models
    python bench/equal_tables.py compare OLD NEW

`save` runs every verb on small models through the command line, which takes about six minutes. Models and
texts are made from seeds, trained lab models by the `train` of the code at hand; hence `--models`, so that
both versions read the same bytes. What the commands print goes to FOLDER/logs and is not compared.

`compare` looks at every table, plan and written checkpoint, cell by cell. It reads parquet, JSON and
safetensors files itself, so neither version has to read the other's. It leaves out times, speeds and memory
(IGNORED). What has another name now is told in RENAMED_*; whatever else only the old folder has is missing,
and an error.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

# What version 0.2 renamed; replace these for another pair of versions.
LOADS = "cv max_violation max_over_mean gini min_max_ratio load_entropy load_entropy_bits load_entropy_share"
RENAMED_TENSORS: dict[str, str] = {"gate_mass_BE": "gate_sums_BE"}  # parts of names in safetensors files
RENAMED_FOLDERS: dict[str, str] = {"scans/a": "scan-a", "scans/b": "scan-b"}  # of runs inside a run
RENAMED_TABLES: dict[str, str] = {"pieces": "token_text"}  # old name -> new name
# "column", or "table.column" with the old table's name -> new column
RENAMED_COLUMNS: dict[str, str] = {"gate_mass": "gate_weight", "routing_layers.floor": "chance"}
RENAMED_VALUES: dict[str, dict[str, str]] = {  # texts in cells: column -> old text -> new text
    "metric": {f"gate_mass_{name}": f"gate_weight_{name}" for name in LOADS.split()}
    | {f"experts_a_token{end}": f"experts_per_token{end}" for end in ("", "_spread")},
    "method": {"gate_mass": "gate_weight"},
}
IGNORED = {  # times, speeds and memory: "column", or "table.column"
    "tokens_per_second", "step_seconds", "peak_memory_bytes", "seconds", "milliseconds", "overhead.share",
}  # fmt: skip
IGNORED_KEYS = {"path", "header_hash", "arrays_sha256", "moescope_plan"}  # of plan.json
TOLERANCE = 1e-12  # times max(1, |x|)

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
MONITOR = """
import sys, torch, moescope
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_router_logits=True).train()
optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(0)
scan = {"scan": moescope.scan_model} if hasattr(moescope, "scan_model") else {}  # version 0.1 has its own
monitor = moescope.Monitor(
    out=sys.argv[2], every=4, decisions_every=2, gradients_every=4, scan_every=8, coactivation=True, **scan
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


def build_models(folder: Path, python: Python) -> None:
    """Everything that commands read: texts, traces of other tools, settings, random and trained models."""
    folder.mkdir(parents=True)
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
    for router in ("top2", "hash"):
        out = folder / f"lab-{router}"
        python.run(f"model-{router}", "train", folder / "train.toml", "--router", router, "--out", out)


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


@dataclass
class Python:
    """This interpreter with the moescope of one source folder, and which commands failed so far."""

    source: Path
    folder: Path
    failed: list[str] = field(default_factory=list)

    def ask(self, *arguments: Any) -> subprocess.CompletedProcess[str]:
        fixed = {"PYTHONPATH": str(self.source), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # the same kernels on every machine
        environment = {**os.environ, **fixed, "ONEDNN_MAX_CPU_ISA": isa, "COLUMNS": "200"}
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=self.folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def run(self, name: str, *arguments: Any) -> None:
        """`moescope ARGUMENTS`, or with "-c" first any Python; what it prints goes to a log of that name."""
        start = time.perf_counter()
        done = self.ask(*(() if arguments[0] == "-c" else ("-m", "moescope")), *arguments)
        log = self.folder / "logs" / f"{name}.txt"
        log.parent.mkdir(exist_ok=True)
        printed = done.stdout + done.stderr
        log.write_text(printed)
        print(f"{name:24} {time.perf_counter() - start:6.1f} s", flush=True)
        if done.returncode:
            self.failed.append(name)
            print(f"  FAILED with {done.returncode}; see {log}\n{printed[-2000:]}", flush=True)


def commands(models: Path, out: Path, recorded: str) -> dict[str, list[Any]]:
    """Every command by the name of its run folder; later ones may read the runs of earlier ones."""
    mixtral, qwen, deepseek = (models / kind for kind in KINDS)
    later = models / "mixtral-later"
    lab = [models / f"lab-top2/checkpoints/step-{step}" for step in (10, 20)]
    hashed = models / "lab-hash/checkpoints/step-20"
    domains = ["--domain", f"first={models}/first.jsonl", "--domain", f"second={models}/second.jsonl"]
    text: list[Any] = ["--text", models / "first.jsonl", "--text", models / "second.jsonl"]
    readings = ["--matrix", "gate,up,gate_up,down", "--router", "raw,centered"]
    half = ["--keep", "0.5"]
    made: dict[str, list[Any]] = {
        "scan-mixtral": ["scan", mixtral, *readings],
        "scan-later": ["scan", later, *readings],
        "scan-qwen": ["scan", qwen, *readings, "--precision", "exact", "--null", "shuffle"],
        "scan-deepseek": ["scan", deepseek, *readings[:2], "--fold-norm", "--k", "3,5"],
        "scan-steps": ["scan", mixtral, later, "--k-star", "128", "--allow-full-rank"],
        "scan-lab": ["scan", *lab, "--router", "raw,centered"],
        "scan-hash": ["scan", hashed, "--matrix", "gate,down"],
        "trace-mixtral": ["trace", mixtral, later, *domains, "--phase", "both", "--save-tokens"],
        "trace-qwen": ["trace", qwen, *domains, "--save-tokens", "--max-tokens", "1500"],
        "trace-deepseek": ["trace", deepseek, *domains, "--phase", "both", "--max-tokens", "800"],
        "trace-decode": ["trace", mixtral, *text, "--phase", "decode", "--max-tokens", "600"],
        "trace-lab": ["trace", *lab, *domains, "--save-tokens", "--max-tokens", "3000"],
        "trace-hash": ["trace", hashed, *domains, "--max-tokens", "2000"],
    }
    for name, file, model_given in (
        ("vllm", models / "vllm.jsonl", []),
        ("sglang", models / "sglang.jsonl", [mixtral]),
        ("llamacpp", models / "llamacpp.csv", []),
        ("moescope", out / "trace-qwen/tokens.parquet", []),
    ):
        made[f"recorded-{name}"] = [
            "trace",
            *model_given,
            recorded,
            file,
            "--format",
            name,
            "--experts",
            EXPERTS,
        ]
    made |= {
        "compare-plain": ["compare", mixtral, later],
        "compare-matched": ["compare", mixtral, later, "--matched", "--series", "later"],
        "compare-held-out": ["compare", *lab, "--matched", "--match-by", "held_out"],
        "compare-scans": ["compare", out / "scan-mixtral", out / "scan-later"],
        "compare-traces": ["compare", out / "trace-qwen", out / "trace-mixtral"],
        "train-top2": ["train", models / "train.toml", "--router", "top2"],
        "train-spectra": ["train", models / "train.toml", "--router", "spectra"],
        "train-some": ["train", models / "some.toml", "--router", "some"],
        "train-expert_choice": ["train", models / "train.toml", "--router", "expert_choice"],
        "train-from": ["train", models / "train.toml", "--from", lab[-1], "--seed", "3"],
        "compare-trainings": ["compare", out / "train-top2", out / "train-from"],
        "study": ["study", models / "study.toml"],
    }
    plans: list[tuple[str, Path, str, list[Any]]] = [
        ("reap", mixtral, "reap", [*half, *text, "--apply"]),
        ("hc_smoe", qwen, "hc_smoe", [*half, *text, "--apply"]),
        ("m_smoe", deepseek, "m_smoe_permuted", [*half, *text, "--sequential"]),
        ("weights", mixtral, "weights", [*half, "--apply"]),
        ("frequency", mixtral, "frequency", ["--keep", "5", *text]),
        ("random", deepseek, "random", [*half, *text, "--controls", "1"]),
        ("lab", lab[-1], "hc_smoe", [*half, *text, "--apply"]),
        ("hash", hashed, "reap", [*half, *text, "--apply"]),
    ]
    for name, model, method, more in plans:
        more += [out / "applied" / name] if more[-1] == "--apply" else []
        made[f"compress-{name}"] = ["compress", model, "--method", method, *more]
    for name, arguments in made.items():
        arguments += ["--out", out / name, "--device", "cpu"]
    made["monitor"] = ["-c", MONITOR, mixtral, out / "monitor"]
    made["demo-planted"] = ["demo", "--planted", "--out", out / "demo-planted"]
    made["demo"] = ["demo", "--out", out / "demo"]
    return made


def save(folder: Path, source: Path, models: Path | None, only: list[str]) -> int:
    """Run every command, or only those named, into FOLDER; 1 if one of them failed."""
    start = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    python = Python(source, folder)
    found = python.ask("-c", "import moescope; print(moescope.__file__)").stdout.strip()
    if not Path(found).is_relative_to(source):
        raise SystemExit(f"{source}: no moescope in it; python imports {found or 'none'}")
    if models is None:
        models = folder / "models"
        if not models.exists():
            build_models(models, python)
        if python.failed:
            raise SystemExit(f"{models}: not all models could be made; remove the folder and try again")
    options = python.ask("-m", "moescope", "trace", "--help").stdout
    recorded = "--recorded" if "--recorded" in options else "--import"  # as older versions call it
    every = commands(models, folder, recorded)
    if unknown := set(only) - set(every):
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: known are {', '.join(every)}")
    for name in only or every:
        for left in (folder / name, folder / "applied" / name.removeprefix("compress-")):
            shutil.rmtree(left, ignore_errors=True)  # a finished run would be taken as it is
        python.run(name, *every[name])
    print(f"{time.perf_counter() - start:.0f} s; failed: {', '.join(python.failed) or 'none'}")
    return 1 if python.failed else 0


# --- compare


@dataclass
class Tally:
    """What was compared in one run, or in all; of a safetensors file a tensor counts as a row."""

    tables: int = 0
    rows: int = 0
    cells: int = 0
    largest: float = 0.0  # difference, relative to max(1, |x|)

    def add(self, other: Tally) -> None:
        self.tables += other.tables
        self.rows += other.rows
        self.cells += other.cells
        self.largest = max(self.largest, other.largest)

    def line(self, name: str) -> str:
        return f"{name:70} {self.tables:6} {self.rows:8} {self.cells:10} {self.largest:19.3g}"


@dataclass
class Comparison:
    """Two folders that `save` wrote, and what was found so far."""

    old: Path
    new: Path
    every_column: bool
    wrong: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    def missing(self, what: str, in_old: set[str], in_new: set[str], place: str = "") -> None:
        """Note what one side has alone; `in_old` under its new names."""
        self.wrong += [f"MISSING {what}: {place}{name}" for name in sorted(in_old - in_new)]
        self.added += [f"{what}: {place}{name}" for name in sorted(in_new - in_old)]

    def judge(self, tally: Tally, place: str, before: Any, after: Any) -> None:
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
        if worst > TOLERANCE:
            self.wrong.append(f"DIFFERS {place}: {shown}")
        elif self.every_column:
            print(f"  {place}: {shown}")

    # --- tables

    def run(self, name: str) -> Tally:
        """All tables of a run folder, its plan, and what a comparison of two runs keeps in run.json."""
        tally = Tally()
        files = (self.old / old_place(name)).glob("*.parquet")
        old = {RENAMED_TABLES.get(file.stem, file.stem): file for file in files}
        new = {file.stem: file for file in (self.new / name).glob("*.parquet")}
        self.missing("table", set(old), set(new), f"{name}/")
        for table in sorted(set(old) & set(new)):
            tally.add(self.table(f"{name}/{table}", old[table], new[table]))
        for file in ("plan.json", "run.json"):
            if (self.old / old_place(name) / file).exists():
                self.facts(tally, f"{name}/{file}")
        return tally

    def table(self, place: str, old: Path, new: Path) -> Tally:
        """Rows of both sorted by all common columns but floats and lists; keys come first in every table."""
        before, after = renamed(pq.read_table(old), old.stem), pq.read_table(new)
        self.missing("column", set(before.column_names), set(after.column_names), f"{place}.")
        tally = Tally(tables=1, rows=len(before))
        if len(before) != len(after):
            self.wrong.append(f"DIFFERS {place}: {len(before)} rows -> {len(after)}")
            tally.largest = math.inf
            return tally
        both = [column for column in before.column_names if column in after.column_names]
        both = [column for column in both if not {column, f"{old.stem}.{column}"} & IGNORED]
        order = [(column, "ascending") for column in both if sortable(before[column], after[column])]
        if order:
            before, after = before.sort_by(order), after.sort_by(order)
        for column in both:
            self.column(tally, f"{place}.{column}", before[column], after[column])
        return tally

    def column(self, tally: Tally, place: str, before: pa.ChunkedArray, after: pa.ChunkedArray) -> None:
        """One column; of lists first their lengths, then what they hold, one after the other."""
        if kind_of(before.type) != kind_of(after.type):
            self.wrong.append(f"DIFFERS {place}: {before.type} -> {after.type}")
            tally.largest = math.inf
        elif kind_of(before.type) == "list":
            lengths = [numbers(pc.list_value_length(side)) for side in (before, after)]
            if np.array_equal(lengths[0], lengths[1], equal_nan=True):
                self.column(tally, place, pc.list_flatten(before), pc.list_flatten(after))
            else:
                self.wrong.append(f"DIFFERS {place}: lists of other lengths")
                tally.largest = math.inf
        elif kind_of(before.type) == "number":
            self.judge(tally, place, numbers(before), numbers(after))
        else:
            self.judge(tally, place, self.words(before, self.old), self.words(after, self.new))

    def words(self, side: pa.ChunkedArray, folder: Path) -> Any:
        """Texts and truth values, without the folder's own path."""
        return np.array([without(value, folder) for value in side.to_pylist()], dtype=object)

    # --- JSON and safetensors

    def facts(self, tally: Tally, place: str) -> None:
        """Numbers and texts of a plan, or of run.json's `changes`."""
        names = all_renamed()
        sides: list[dict[str, Any]] = []
        for folder in (self.old, self.new):
            path = folder / (old_place(place) if folder == self.old else place)
            if not path.exists():
                self.wrong.append(f"MISSING file: {place}")
                return
            said = json.loads(path.read_text())
            if place.endswith("run.json"):
                changes = [change for change in said.get("changes", []) if change["column"] not in IGNORED]
                said = {f"{change['table']}.{change['column']}": change for change in changes}
            found = dict(leaves(said, names if folder == self.old else {}))
            sides.append({key: without(value, folder) for key, value in found.items()})
        self.missing("value", set(sides[0]), set(sides[1]), f"{place}:")
        common = [key for key in sides[0] if key in sides[1]]
        numeric = [key for key in common if all(type(side[key]) in (int, float) for side in sides)]
        others = [key for key in common if key not in set(numeric)]  # texts, truth values and null
        self.judge(tally, place, *(np.array([side[key] for key in numeric], dtype=float) for side in sides))
        self.judge(
            tally,
            f"{place}:texts",
            *(np.array([side[key] for key in others], dtype=object) for side in sides),
        )

    def tensors(self, place: str) -> Tally:
        """A safetensors file: names, dtypes, shapes, and every bit."""
        before, after = (safetensors(folder / place) for folder in (self.old, self.new))
        self.missing("tensor", set(before), set(after), f"{place}:")
        tally = Tally(tables=1, rows=len(before))
        for name in sorted(set(before) & set(after)):
            tally.cells += math.prod(before[name][1])
            if before[name] != after[name]:
                tally.largest = math.inf
                self.wrong.append(f"DIFFERS {place}: tensor {name} is not the same bit for bit")
        return tally


def renamed(table: pa.Table, name: str) -> pa.Table:
    """The old table under its new names."""
    for number, column in enumerate(table.column_names):
        values = {**RENAMED_VALUES.get(column, {}), **RENAMED_VALUES.get(f"{name}.{column}", {})}
        if values:
            texts = [values.get(text, text) for text in table[column].to_pylist()]
            table = table.set_column(number, column, pa.array(texts, pa.string()))
    for column in table.column_names:
        new = RENAMED_COLUMNS.get(f"{name}.{column}", RENAMED_COLUMNS.get(column, column))
        table = table.rename_columns({column: new})
    return table


def all_renamed() -> dict[str, str]:
    """Every renaming in one, for JSON, where tables, columns and values all stand as texts."""
    columns = {old.rpartition(".")[2]: new for old, new in RENAMED_COLUMNS.items()}
    values = {old: new for texts in RENAMED_VALUES.values() for old, new in texts.items()}
    return {**RENAMED_TABLES, **columns, **values}


def leaves(value: Any, names: dict[str, str], place: str = "") -> list[tuple[str, Any]]:
    """Every number, text and truth value in it by its place, under new names."""
    if isinstance(value, dict):
        told = [(key.split("."), kept) for key, kept in value.items() if key not in IGNORED_KEYS]
        parts = [(".".join(names.get(word, word) for word in words), kept) for words, kept in told]
    elif isinstance(value, list):
        parts = [(str(number), kept) for number, kept in enumerate(value)]
    else:
        return [(place, names.get(value, value) if isinstance(value, str) else value)]
    return [leaf for key, kept in parts for leaf in leaves(kept, names, f"{place}/{key}")]


def without(value: Any, folder: Path) -> Any:
    return value.replace(str(folder), "") if isinstance(value, str) else value


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
            for old, new in RENAMED_TENSORS.items():
                name = name.replace(old, new)
            found[name] = (about["dtype"], tuple(about["shape"]), content[start:end])
    return found


def old_place(place: str) -> str:
    """Where the old version has what the new one keeps under this path."""
    for old, new in RENAMED_FOLDERS.items():
        place = place.replace(new, old)
    return place


def new_place(place: str) -> str:
    for old, new in RENAMED_FOLDERS.items():
        place = place.replace(old, new)
    return place


def files(folder: Path, pattern: str) -> set[str]:
    """Files below the folder, but for the models that both sides read."""
    found = (file.relative_to(folder) for file in folder.rglob(pattern))
    return {str(file) for file in found if file.parts[0] not in ("models", "logs")}


def compare(old: Path, new: Path, every_column: bool) -> int:
    """Compare all runs and checkpoints of two folders; 1 if anything differs or is missing."""
    comparison = Comparison(old, new, every_column)
    totals = {"run": Tally(), "safetensors": Tally()}
    print(f"{'run':70} {'tables':>6} {'rows':>8} {'cells':>10} {'largest difference':>19}")
    for what, pattern in (("run", "run.json"), ("safetensors", "*.safetensors")):
        sides = {new_place(file) for file in files(old, pattern)}, files(new, pattern)
        comparison.missing(what, *sides)
        for file in sorted(sides[0] & sides[1]):
            place = str(Path(file).parent) if what == "run" else file
            tally = comparison.run(place) if what == "run" else comparison.tensors(place)
            print(tally.line(place))
            totals[what].add(tally)
        print(totals[what].line(f"all {len(sides[0] & sides[1])} of {what}") + "\n")
    print(f"not compared: {', '.join(sorted(IGNORED))}")
    for title, found in (("only in the new one", comparison.added), ("wrong", comparison.wrong)):
        print(f"{title}: {len(found)}")
        print("".join(f"  {line}\n" for line in found), end="")
    return 1 if comparison.wrong or not totals["run"].cells else 0


def main() -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    verbs = parser.add_subparsers(dest="verb", required=True)
    saving = verbs.add_parser("save", help="run every verb into FOLDER")
    saving.add_argument("folder", type=Path)
    saving.add_argument("--source", type=Path, default=Path(__file__).resolve().parents[1] / "src")
    saving.add_argument("--models", type=Path, help="models made by an earlier save, to read the same bytes")
    saving.add_argument("--only", nargs="+", default=[], metavar="RUN", help="write these runs alone")
    comparing = verbs.add_parser("compare", help="compare what two saves wrote")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--columns", action="store_true", help="print every column, equal ones too")
    given = parser.parse_args()
    if given.verb == "save":
        models = None if given.models is None else given.models.resolve()
        return save(given.folder.resolve(), given.source.resolve(), models, given.only)
    return compare(given.old.resolve(), given.new.resolve(), given.columns)


if __name__ == "__main__":
    sys.exit(main())
