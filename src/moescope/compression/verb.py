"""compress: plan fewer experts, predict the damage, and with `apply` write the checkpoint and measure it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from moescope.arguments import as_list, choose_device, one_of
from moescope.checkpoint import open_checkpoint
from moescope.comparison.tables import TABLES as DISTANCE_TABLES
from moescope.compression.figures import FIGURES
from moescope.compression.plan import MergeWeights, RouterAfter, checkpoint_mark, plan_identity
from moescope.compression.report import experts, guide, measures, sections, summary
from moescope.compression.tables import TABLES
from moescope.engine import EngineName, check_engine, check_jobs
from moescope.errors import BadInput
from moescope.execution.model_names import Dtype, check_token_ids, step_names
from moescope.execution.texts import ReadSettings, check_not_empty, sources
from moescope.execution.ways import Execution, Way, parse_size
from moescope.families import read_moe
from moescope.run import Run, open_run, place_run
from moescope.storage import check_target
from moescope.verb import Verb


def compress(
    model: str | Path,
    *,
    method: str | None = None,
    keep: str | int | float | None = None,
    text: str | Path | Iterable[str | Path] = (),
    plan: str | Path | None = None,
    apply: str | Path | None = None,
    max_tokens: int | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    domain: str | Iterable[str] = (),
    token_ids: str | Path | None = None,
    add: str | Path | Iterable[str | Path] = (),
    merge_weights: MergeWeights = "usage",
    distance: str = "default",
    dominant: str = "default",
    router: RouterAfter = "fold",
    unsigned: bool = False,
    adaptive: bool = False,
    sequential: bool = False,
    judge: bool = True,
    controls: int | None = None,
    dtype: Dtype = "auto",
    batch_size: int = 8,
    chat_template: bool = False,
    trust_remote_code: bool = False,
    execution: Way = "auto",
    memory: str | None = None,
    engine: EngineName = "local",
    address: str | None = None,
    jobs: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run:
    """Prune or merge experts: plan, predict the damage, and with --apply write and measure the checkpoint.

    On a held-out fifth of the text the result is compared with the original and with random controls.

    Parameters
    ----------
    model : MODEL
        Model folder or hub id; a checkpoint to rewrite must be on this machine.
    method : METHOD, default reap
        What drops experts (such as reap or frequency) or merges them (such as hc_smoe or weights).
    keep : SHARE_OR_COUNT
        Experts to keep per layer: a share (0.5) or a number (4).
    text : PATH, repeatable
        Calibration text: file, folder, .jsonl, hf://datasets/OWNER/NAME, or - for standard input.
    plan : PLAN
        An existing plan to apply: plan.json, or its run folder.
    apply : DIR
        Write the compressed checkpoint into this folder, and judge it.
    max_tokens : int, default all
        Tokens to read at most, shared evenly by domains and documents.
    out : DIR, default runs/compress-MODEL-N
        Run folder to write.
    device : DEVICE
        auto, cpu, cuda or cuda:0.

    Other Parameters
    ----------------
    domain : NAME=PATH, repeatable
        Text of a named domain: code=src.
    token_ids : FILE
        Token ids: .npy, or .jsonl of lists.
    add : RUN, repeatable
        An earlier run, to add its sums.
    merge_weights : HOW
        Members' weights in merged experts.
    distance : DISTANCE
        Distance to cluster by: euclidean or cosine (hc_smoe), l2 or sv (weights).
    dominant : HOW
        Dominant member: usage or centre.
    router : HOW
        Router of merged experts: fold fits new rows, tie keeps all (judged, not written).
    unsigned : bool
        Match neurons without signs.
    adaptive : bool
        Layers share one budget (plan only).
    sequential : bool
        Calibrate each layer on the output of the compressed layers before it.
    judge : bool
        Do not judge on held-out text.
    controls : int, default 3; 1 over 2 GiB
        Random controls to compare with.
    dtype : DTYPE
        Precision; auto: as stored.
    batch_size : int
        Documents per batch.
    chat_template : bool
        Read documents as user messages.
    trust_remote_code : bool
        Run the Python code that the checkpoint brings with it.
    execution : WAY
        Run whole, sharded, or by layer.
    memory : SIZE, default 80 % of free
        Most memory (per worker): 8GB.
    engine : ENGINE
        Calibrate here, or on Ray workers.
    address : ADDRESS
        Ray cluster: auto or HOST:PORT.
    jobs : N, default as many as fit
        Parts of the text on Ray.
    seed : int
        Seed of all random draws.
    overwrite : bool
        Replace what the run folder holds.
    quiet : bool
        Print nothing but errors.

    References
    ----------
    REAP: Lasby et al. 2025, arXiv:2510.13999. HC-SMoE: Chen et al. 2025. M-SMoE: Li et al. 2024.

    Examples
    --------
    >>> run = moescope.compress("allenai/OLMoE-1B-7B-0924", keep=0.5, text="docs")  # doctest: +SKIP
    >>> run.table("damage")  # doctest: +SKIP
    """
    text, domain, add = as_list(text), as_list(domain), as_list(add)
    given = dict(locals())
    from moescope.compression.calibration_text import CalibrationText
    from moescope.compression.method import PlanSettings
    from moescope.compression.steps import carry_out, prepare
    from moescope.execution.workers import OpenWorkers

    minimums = {"max_tokens": (max_tokens, 1), "batch_size": (batch_size, 1), "seed": (seed, 0)}
    for name, (value, least) in {**minimums, "controls": (controls, 0)}.items():
        if value is not None and value < least:
            raise BadInput(f"{name} {value}: must be at least {least}")
    one_of("dtype", dtype, get_args(Dtype))
    one_of("execution", execution, get_args(Way))
    memory_bytes = parse_size("--memory", memory)
    check_engine(engine, address, device)
    check_jobs(engine, jobs)
    reading = ReadSettings(max_tokens, dtype, batch_size, chat_template, trust_remote_code)
    with_text = bool(text) or bool(domain) or token_ids is not None
    texts = sources(text, domain, token_ids) if with_text else []
    texts.sort(key=lambda source: source.domain)  # the order of --domain changes nothing
    settings = PlanSettings(
        seed, merge_weights, distance, not unsigned, router, adaptive, sequential, dominant
    )
    moe = read_moe(open_checkpoint(model))
    work = prepare(moe, method, keep, plan, apply, add, settings, judge and with_text, controls, with_text)
    if engine == "ray" and (not with_text or sequential):
        why = "sequential calibration changes the model between passes" if with_text else "there is no text"
        raise BadInput(f"--engine ray: {why}, so nothing can be split; omit it")
    if with_text:
        step_names([model], ())
    place = choose_device(device)
    parsed = {
        "method": work.method.name,
        "keep": None if keep is None else str(keep),
        "text": [[source.domain, source.identity] for source in texts],
        "plan": plan_identity(plan),
        "apply": work.apply,
        "domain": [],
        "token_ids": token_ids is not None,
        "add": [earlier.file_identity for earlier in work.earlier],
        "controls": work.controls,
    }
    identity = {
        "arguments": VERB.identity(given, **parsed),
        "checkpoints": [{"step": 0, **checkpoint_mark(moe.checkpoint)}],
    }
    folder, done = place_run(VERB, out, moe.checkpoint.name, identity, overwrite)
    if done:
        return done
    check_not_empty(texts)
    if token_ids is not None:
        check_token_ids([str(model)], texts)
    with open_run(folder, VERB, identity, overwrite, VERB.command(given)) as writer:
        if work.apply is not None and not {"applying", "applied"} & writer.done_tasks():
            check_target(work.apply)
        writer.save_info(device=place, coverage=[asdict(moe.coverage)])
        how = Execution.of_run(writer, execution, memory_bytes, quiet)
        reader = CalibrationText(str(model), texts, place, judge, reading, how) if with_text else None
        if reader is not None and engine == "ray":
            reader.workers = OpenWorkers(address, device, jobs)
        return carry_out(writer, work, reader, place, quiet)


VERB = Verb(
    name="compress",
    run=compress,
    tables={**DISTANCE_TABLES, **TABLES},
    figures=FIGURES,
    summary=summary,
    sections=sections,
    guide=guide,
    tab="compression",
    measures=measures,
    experts=experts,
    incidental=frozenset({"execution", "memory"}),
    files=("plan.json", "plan.safetensors", "calibration.safetensors"),
)
