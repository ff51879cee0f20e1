"""compress: plan fewer experts, predict the damage, and with `apply` write the checkpoint and measure it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from moescope.arguments import as_list, choose_device
from moescope.checkpoint import open_checkpoint
from moescope.comparison.tables import OF_PAIRS
from moescope.compression.figures import FIGURES
from moescope.compression.plan import PLAN_FILE, RouterAfter, checkpoint_mark, file_identity, file_of
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
    router: RouterAfter = "fold",
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
    plan : PLAN
        An existing plan to apply: plan.json, or its run folder.
    apply : DIR
        Write the compressed checkpoint into this folder, and judge it.

    Other Parameters
    ----------------
    add : RUN, repeatable
        An earlier run, to add its sums.
    router : HOW
        Router of merged experts: fold fits new rows, tie keeps all (judged, not written).
    judge : bool
        Do not judge on held-out text.
    controls : int >= 0, <= 1e4, default 3; 1 over 2 GiB
        Random controls to compare with.

    References
    ----------
    REAP: Lasby et al. 2025, arXiv:2510.13999. HC-SMoE: Chen et al. 2025. M-SMoE: Li et al. 2024.

    Examples
    --------
    >>> run = moescope.compress("allenai/OLMoE-1B-7B-0924", keep=0.5, text="docs")  # doctest: +SKIP
    >>> run.table("damage")  # doctest: +SKIP
    """
    text, domain, add = as_list(text), as_list(domain), as_list(add)
    given = VERB.settle(locals())
    from moescope.compression.calibration import CALIBRATION_FILE
    from moescope.compression.method import PlanSettings
    from moescope.compression.steps import carry_out, prepare
    from moescope.execution.evaluation import SplitText
    from moescope.execution.workers import OpenWorkers

    memory_bytes = parse_size("--memory", memory)
    check_engine(engine, address, device)
    check_jobs(engine, jobs)
    reading = ReadSettings(max_tokens, dtype, batch_size, chat_template, trust_remote_code)
    with_text = bool(text) or bool(domain) or token_ids is not None
    found = sources(text, domain, token_ids) if with_text else []
    texts = sorted(found, key=lambda source: source.domain)  # the order of --domain changes nothing
    moe, settings = read_moe(open_checkpoint(model)), PlanSettings(seed, router)
    work = prepare(moe, method, keep, plan, apply, add, settings, judge and with_text, controls, with_text)
    if engine == "ray" and not with_text:
        raise BadInput("--engine ray: there is no text, so nothing can be split; omit it")
    if with_text:
        step_names([model], ())
    place = choose_device(device)
    arguments = VERB.identity(
        given,
        method=work.method.name,
        keep=None if keep is None else str(keep),
        text=[[source.domain, source.identity] for source in texts],
        plan=None if plan is None else file_identity(file_of(plan, PLAN_FILE)),
        apply=work.apply,
        domain=[],
        token_ids=token_ids is not None,
        add=[file_identity(file_of(location, CALIBRATION_FILE)) for location in add],
        controls=work.controls,
    )
    identity = {"arguments": arguments, "checkpoints": [{"step": 0, **checkpoint_mark(moe.checkpoint)}]}
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
        workers = OpenWorkers(address, device, jobs) if engine == "ray" else None
        reader = SplitText(str(model), texts, place, judge, reading, how, workers=workers)
        return carry_out(writer, work, reader if with_text else None, place, quiet)


VERB = Verb(
    name="compress",
    run=compress,
    tables={**OF_PAIRS, **TABLES},
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
