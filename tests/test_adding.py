"""Every row of CONTRIBUTING.md's table: one file and one line in a copy, used by the real command line."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.torch import load_file

import moescope
from checkpoints import tiny_checkpoint, tiny_config, tiny_tensors, write_checkpoint
from report_payloads import page_text
from routing.tiny_text import save_model, texts, write_jsonl

SOURCE = Path(__file__).parents[1] / "src" / "moescope"
pytestmark = pytest.mark.slow


class Copy:
    """A copy of the package to which files and lines are added, and its command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "source"
        self.package = self.folder / "moescope"
        shutil.copytree(SOURCE, self.package)

    def add_file(self, name: str, text: str) -> None:
        path = self.package / name
        assert not path.exists()
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def add_line(self, name: str, literal: str, member: str, imported: str = "") -> None:
        """Add a member to the end of a literal list, tuple or dict, and the import that it needs."""
        path = self.package / name
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        body = ast.parse("".join(lines)).body
        assigned = next(node for node in body if literal in assigned_names(node)).value
        end, column = assigned.end_lineno - 1, assigned.end_col_offset - 1  # of the closing bracket
        before = lines[end][:column].rstrip()
        comma = "" if not before or before.endswith((",", "[", "(", "{")) else ","
        lines[end] = f"{lines[end][:column]}{comma} {member},{lines[end][column:]}"
        if imported:
            kinds = ast.Import | ast.ImportFrom
            first = next(n for n in body if isinstance(n, kinds) and getattr(n, "module", "") != "__future__")
            lines.insert(first.lineno - 1, f"{imported}\n")
        path.write_text("".join(lines), encoding="utf-8")

    def replace(self, name: str, old: str, new: str) -> None:
        path = self.package / name
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1
        path.write_text(text.replace(old, new), encoding="utf-8")

    def changed(self) -> set[str]:
        """Files that differ from the source."""
        return {
            str(path.relative_to(self.package))
            for path in self.package.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
            if not (original := SOURCE / path.relative_to(self.package)).exists()
            or original.read_bytes() != path.read_bytes()
        }

    def python(self, *arguments: str | Path) -> str:
        """Run Python on the copy; return what it prints."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        shown = subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=environment,
            check=False,
        )
        assert shown.returncode == 0, shown.stderr
        return shown.stdout

    def moescope(self, *arguments: str | Path) -> str:
        return self.python("-m", "moescope", *arguments)

    def json(self, *arguments: str | Path) -> Any:
        return json.loads(self.moescope(*arguments, "--json"))


def assigned_names(node: ast.stmt) -> set[str]:
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return {target.id for target in targets if isinstance(target, ast.Name)}


@pytest.fixture
def copy(tmp_path) -> Copy:
    return Copy(tmp_path)


LAYOUT = """
from moescope.families.layout import Family, Model, every_layer, per_expert

GATE = "{L}.switchboard.workers.{e}.open.weight"
SWITCHBOARD = Family(
    name="switchboard",
    models={"switchboard": Model(("num_local_experts",), ("num_experts_per_tok",), every_layer)},
    router="{L}.switchboard.operator.weight",
    markers=(GATE,),
    experts=per_expert(GATE, GATE.replace("open", "raise"), GATE.replace("open", "close")),
    block="{L}.switchboard",
    norm="{L}.post_attention_layernorm.weight",
)
"""


def test_a_disk_layout_is_one_file_and_one_line(copy, tmp_path):
    copy.add_file("families/switchboard.py", LAYOUT)
    copy.add_line(
        "families/__init__.py",
        "FAMILIES",
        "SWITCHBOARD",
        "from moescope.families.switchboard import SWITCHBOARD",
    )
    assert copy.changed() == {"families/switchboard.py", "families/__init__.py"}
    words = {
        "block_sparse_moe.gate": "switchboard.operator",
        "block_sparse_moe.experts": "switchboard.workers",
    }
    words |= {"w1": "open", "w3": "raise", "w2": "close"}
    tensors = tiny_tensors()
    for old, new in words.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    config = {**tiny_config(), "model_type": "switchboard"}
    model = write_checkpoint(tmp_path / "model", tensors, config)
    facts = copy.json("inspect", model)
    assert (facts["layout"], facts["experts"], facts["moe_layers"]) == ("switchboard", 4, [0, 1])
    copy.moescope("scan", model, "--out", tmp_path / "renamed", "--quiet", "--no-report")
    original = moescope.scan(tiny_checkpoint(tmp_path / "original"), out=tmp_path / "run", quiet=True)
    spectra = pd.read_parquet(tmp_path / "renamed" / "spectra.parquet")
    assert len(spectra) == 8
    assert spectra["frobenius"].tolist() == original.table("spectra")["frobenius"].tolist()


METHOD = '''
"""Prune by weight norm: keep the experts with the largest down projections."""

import numpy as np

from moescope.compression.method import Evidence, Method, Proposal
from moescope.compression.pruning import prune


def propose(evidence: Evidence) -> Proposal:
    layers = {layer: evidence.moe.layers[layer] for layer in evidence.keep}
    norms = {
        layer: np.array([float(weights.expert(e).down_DF.norm()) for e in range(weights.n_experts)])
        for layer, weights in layers.items()
    }
    return prune(evidence, norms)


METHOD = Method("weight_norm", "drops the experts with the smallest weights", propose, needs_text=False)
'''


def test_a_compression_method_is_one_file_and_one_line(copy, tmp_path):
    copy.add_file("compression/weight_norm.py", METHOD)
    line = "from moescope.compression import weight_norm"
    copy.add_line("compression/methods.py", "METHODS", "weight_norm.METHOD", line)
    assert copy.changed() == {"compression/weight_norm.py", "compression/methods.py"}
    tensors = tiny_tensors()
    for name in tensors:
        if ".experts.1." in name or ".experts.3." in name:
            tensors[name] = 0.1 * tensors[name]
    model = write_checkpoint(tmp_path / "model", tensors, tiny_config())
    out = tmp_path / "run"
    copy.moescope("compress", model, "--method", "weight_norm", "--keep", "2", "--out", out)
    plan = json.loads((out / "plan.json").read_text())
    assert [layer["dominants"] for layer in plan["layers"]] == [[0, 2], [0, 2]]
    assert "weight_norm" in page_text((out / "report.html").read_text(encoding="utf-8"))


VERB = '''
"""sizes: how many numbers each expert has."""

from moescope.checkpoint import open_checkpoint
from moescope.run import Run, open_run, place_run
from moescope.tables import Column, Table, define_tables
from moescope.verb import Figure, FigureSpec, KeyNumber, Section, Summary, Verb

TABLES = define_tables(
    {"numbers": Column("int", "How many numbers the expert has.", unit="numbers")},
    Table("sizes", "One row per layer and expert.", ("layer", "expert"), ("numbers",)),
)


def draw_sizes(tables):
    """Numbers per expert."""
    bars = {"type": "bar", "y": tables["sizes"]["numbers"].tolist()}
    return Figure("expert_sizes", "Numbers per expert", "All experts.", ("numbers",), [bars], {})


FIGURES = [FigureSpec("expert_sizes", ("sizes",), draw_sizes)]


def sizes(model: str, *, factor: int = 1, out: str | None = None, overwrite: bool = False) -> Run:
    """Count the numbers of each expert.

    Parameters
    ----------
    model : MODEL
        Checkpoint folder.
    factor : int
        Multiply the counts by this.
    out : DIR
        Run folder.
    overwrite : bool
        Replace the run that is there.
    """
    given = dict(locals())
    import pandas as pd

    from moescope.families import read_moe

    moe = read_moe(open_checkpoint(model))
    identity = {"arguments": {"model": model, **VERB.identity(given)}}
    folder, done = place_run(VERB, out, moe.checkpoint.name, identity, overwrite)
    if done is not None:
        return done
    with open_run(folder, VERB, identity, overwrite, VERB.command(given)) as writer:
        for number, layer in moe.layers.items():
            count = factor * layer.gate_EFD.shape[1] * layer.gate_EFD.shape[2]
            rows = [
                {"layer": number, "layer_name": layer.layer_name, "expert": expert, "numbers": count}
                for expert in range(layer.n_experts)
            ]
            writer.flush_task(f"layer-{number}", {"sizes": pd.DataFrame(rows)}, {})
        return writer.finish({"sizes": writer.joined("sizes")})


def summary(run):
    total = int(run.table("sizes")["numbers"].sum())
    return Summary(["all layers"], [f"Size: {total} numbers."], [KeyNumber("Size", total)])


def sections(run, selection):
    return [Section("sizes", "Expert sizes", figures=[(FIGURES[0], {"sizes": run.table("sizes")})])]


VERB = Verb("sizes", sizes, TABLES, FIGURES, summary, sections)
'''


def test_a_verb_is_one_package_and_one_line(copy, tmp_path):
    copy.add_file("counting/__init__.py", "")
    copy.add_file("counting/verb.py", VERB)
    copy.add_line(
        "verbs.py", "VERBS", '("sizes", "Count the numbers of each expert.", "moescope.counting.verb:VERB")'
    )
    assert copy.changed() == {"counting/__init__.py", "counting/verb.py", "verbs.py"}
    assert "Count the numbers of each expert." in copy.moescope("--help")
    assert "--factor" in copy.moescope("sizes", "--help")
    assert (
        copy.python("-c", "import moescope; print(moescope.sizes.__module__)") == "moescope.counting.verb\n"
    )
    model, run = tiny_checkpoint(tmp_path / "model"), tmp_path / "run"
    facts = copy.json("sizes", model, "--factor", "2", "--out", run)
    assert facts["key_numbers"][0]["value"] == 2 * 2 * 4 * 16 * 24
    assert (
        json.loads((run / "run.json").read_text())["command"]
        == f"moescope sizes {model} --factor 2 --out {run}"
    )
    assert "already complete" in copy.moescope("sizes", model, "--factor", "2", "--out", run)
    page = Path(copy.moescope("report", run).split()[-1]).read_text(encoding="utf-8")
    page = page_text(page)
    assert "Numbers per expert" in page
    assert "How many numbers the expert has." in page


def recorded(folder: Path) -> tuple[str | Path, ...]:
    """Options of a trace of 80 tokens that choose two of four experts in one layer."""
    chosen_TLK = np.array([[[0, 1]], [[0, 2]], [[0, 3]], [[3, 1]]])
    np.save(folder / "recorded.npy", np.tile(chosen_TLK, (20, 1, 1)))
    return "--recorded", folder / "recorded.npy", "--format", "vllm", "--experts", "4"


METRIC = """Metric(
    "busiest_share", "load", "Share of all choices that the busiest expert has.",
    "max c/Σ c", ("1/k", "near 1/n", "1/n"),
    lambda loads: loads.max(-1) / loads.sum(-1),
    collapse=lambda setting: 1 / setting.k,
)"""


def test_a_metric_is_one_record(copy, tmp_path):
    copy.add_line("routing/metrics.py", "LOAD", METRIC)
    assert copy.changed() == {"routing/metrics.py"}
    run = tmp_path / "run"
    assert copy.json("trace", *recorded(tmp_path), "--out", run)["status"] == "done"
    rows = pd.read_parquet(run / "routing_layers.parquet").set_index("metric")
    assert rows.loc["busiest_share", ["value", "collapse"]].tolist() == [3 / 8, 1 / 2]
    page = Path(copy.moescope("report", run).split()[-1]).read_text(encoding="utf-8")
    page = page_text(page)
    assert "Share of all choices that the busiest expert has." in page


INTERVENTION = """Intervention(
    name="keep_half",
    changes="every second logit is shifted by `by`",
    reference="none",
    apply=lambda edit, experts, options, context: edit.logits.append(
        lambda logits: logits.index_add(
            -1, torch.arange(0, logits.shape[-1], 2), torch.full_like(logits[..., ::2], options["by"])
        )
    ),
    settings=(Setting("by", "the shift", -1e4, most=0),),
    experts=NO_EXPERTS,
    needs=("logits",),
)"""


def test_an_intervention_is_one_record(copy, tmp_path):
    copy.add_line("intervention/changes.py", "INTERVENTIONS", INTERVENTION, "import torch")
    assert copy.changed() == {"intervention/changes.py"}
    save_model(tmp_path / "model")
    write_jsonl(tmp_path / "text.jsonl", texts(20, seed=0))
    given = (tmp_path / "model", "--text", tmp_path / "text.jsonl", "--device", "cpu", "--no-report")
    copy.json("intervene", *given, "--set", "layer=1 keep_half", "--out", tmp_path / "run")
    new = pd.read_parquet(tmp_path / "run" / "interventions.parquet")
    known = moescope.intervene(
        tmp_path / "model",
        set="layer=1 expert=0,2 bias by=-10000",
        text=tmp_path / "text.jsonl",
        out=tmp_path / "known",
        device="cpu",
        quiet=True,
    ).table("interventions")
    assert set(new["name"]) == {"keep_half"}
    assert new["loss_difference"].tolist() == known["loss_difference"].tolist()
    assert new["loss_difference"].all()
    with pytest.raises(AssertionError, match="by is '3'; give a number at most 0"):
        copy.moescope("intervene", *given, "--set", "keep_half by=3")


def test_a_figure_is_one_line(copy, tmp_path):
    bars = 'Bars("rank_bars", "spectra", y="rank", x="expert", where="layer == 1", title="Rank per expert")'
    copy.add_line("weights/figures.py", "MORE", bars)
    assert copy.changed() == {"weights/figures.py"}
    moescope.scan(tiny_checkpoint(tmp_path / "model"), out=tmp_path / "run", quiet=True)
    page = Path(copy.moescope("report", tmp_path / "run").split()[-1]).read_text(encoding="utf-8")
    page = page_text(page)
    assert "Rank per expert" in page
    source = "import moescope, sys; run = moescope.open(sys.argv[1]); print(run.figures()['rank_bars'])"
    drawn = "print(len(run.figure('rank_bars').data[0].y))"
    shown = copy.python("-c", f"{source}; {drawn}", tmp_path / "run").splitlines()
    assert shown == ["Rank per expert.", "4"]


def test_a_finding_is_one_line(copy, tmp_path):
    said = 'Said("load_totals", "load_share", pick="smallest", text="Busiest alone: {place}, {value}.")'
    copy.add_line("routing/report.py", "FINDINGS", said)
    assert copy.changed() == {"routing/report.py"}
    facts = copy.json("trace", *recorded(tmp_path), "--out", tmp_path / "run")
    assert "Busiest alone: layer 0, expert 0, 0.375." in facts["findings"]


def test_a_column_is_its_description_its_place_and_its_value(copy, tmp_path):
    described = '"load_totals.shortfall": Column("float", "Tokens below an even share.", chance=0, least=0)'
    copy.add_line("routing/tables.py", "COLUMNS", described)
    copy.replace("routing/tables.py", '"load_at_collapse")),', '"load_at_collapse", "shortfall")),')
    value = '"unused": load_E == 0,'
    new = f'{value} "shortfall": np.maximum(even - load_E, 0),'
    copy.replace("routing/counts_to_tables.py", value, new)
    assert copy.changed() == {"routing/tables.py", "routing/counts_to_tables.py"}
    run = tmp_path / "run"
    copy.json("trace", *recorded(tmp_path), "--out", run)
    assert pd.read_parquet(run / "load_totals.parquet")["shortfall"].tolist() == [0, 0, 20, 0]
    page = Path(copy.moescope("report", run).split()[-1]).read_text(encoding="utf-8")
    assert "Tokens below an even share." in page_text(page)
    bars = 'Bars("short", "load_totals", y="shortfall", x="expert")'
    source = f"import moescope, sys; from moescope.plotting.marks import Bars; mark = {bars}"
    drawn = "print(*moescope.open(sys.argv[1]).draw(mark).data[0]['y'])"
    assert copy.python("-c", f"{source}; {drawn}", run) == "0.0 0.0 20.0 0.0\n"


ROUTER = '''
"""Every token id has its experts, in turn."""

import torch

from moescope.decoder.routers.contract import Routed, Router


class Rotating(Router):
    name = "rotating"
    has_rows = False
    has_logits = False
    learns_from_text = False
    state_tensors = {"scale_E": "experts"}

    def __init__(self, config, layer, shared=None):
        super().__init__(config, layer, shared)
        self.register_buffer("scale_E", 1 + torch.arange(config.experts) / 10)

    def forward(self, inputs):
        slots_K = torch.arange(self.config.top_k, device=inputs.x_TD.device)
        chosen_TK = (inputs.token_ids_T[:, None] + self.layer + slots_K) % self.config.experts
        real_T1 = inputs.mask_T[:, None]
        gates_TK = real_T1 * self.scale_E[chosen_TK] / self.config.top_k
        return Routed(chosen_TK.masked_fill(~real_T1, -1), gates_TK.to(inputs.x_TD.dtype))
'''


TRAINING = """
[model]
d_model = 32
layers = 2
heads = 2
d_ff = 32
experts = 4
max_positions = 64
[data]
max_bytes = 60_000
[train]
steps = 4
batch_size = 8
sequence_length = 32
warmup = 1
evaluate_every = 4
checkpoint_every = 4
evaluation_rows = 20
"""


def test_a_router_is_one_file_and_one_line(copy, tmp_path):
    copy.add_file("decoder/routers/rotating.py", ROUTER)
    copy.add_line(
        "decoder/routers/__init__.py",
        "ROUTERS",
        '"rotating": Rotating',
        "from moescope.decoder.routers.rotating import Rotating",
    )
    assert copy.changed() == {"decoder/routers/rotating.py", "decoder/routers/__init__.py"}
    (tmp_path / "config.toml").write_text(TRAINING)
    run = tmp_path / "run"
    facts = copy.json("train", tmp_path / "config.toml", "--router", "rotating", "--out", run, "--quiet")
    assert facts["status"] == "done"
    load = pd.read_parquet(run / "load.parquet")
    assert set(load["expert"]) == set(range(4))
    model = max((run / "checkpoints").glob("*/config.json")).parent
    assert json.loads((model / "config.json").read_text())["moescope_router"]["name"] == "rotating"
    assert {"scan", "trace"} <= {file.parent.name for file in run.glob("*/run.json")}
    assert (run / "report.html").exists()
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps(f"{number} " * 9) for number in range(40)))
    given = (
        "--method",
        "frequency",
        "--keep",
        "2",
        "--text",
        tmp_path / "text.jsonl",
        "--no-judge",
        "--no-report",
    )
    copy.json("compress", model, *given, "--apply", tmp_path / "half", "--out", tmp_path / "compressed")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "half"))
    names = "layers.0.mlp.experts.down", "layers.0.mlp.router.scale_E"
    kept = [
        [expert for expert, weight in enumerate(before[names[0]]) if weight.equal(down)]
        for down in after[names[0]]
    ]
    assert after[names[1]].tolist() == pytest.approx([1 + expert / 10 for (expert,) in kept])
