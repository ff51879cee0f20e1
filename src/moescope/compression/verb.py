"""compress: plan fewer experts, predict the damage, and with `apply` write the checkpoint and measure it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from moescope.arguments import choose_device, one_of
from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput
from moescope.execution.model_names import DTYPES, step_names
from moescope.execution.texts import ReadSettings, sources
from moescope.families import read_moe
from moescope.run import Run, default_folder, open_run
from moescope.storage import check_target
from moescope.weights.verb import finished_run


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
    merge_weights: str = "usage",
    distance: str = "default",
    router: str = "fold",
    unsigned: bool = False,
    adaptive: bool = False,
    sequential: bool = False,
    judge: bool = True,
    controls: int | None = None,
    dtype: str = "auto",
    batch_size: int = 8,
    chat_template: bool = False,
    seed: int = 0,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run:
    """Merge or drop experts: plan, predict the damage, and with `apply` write and measure the checkpoint.

    One document in five of the text is held out. The compressed checkpoint is judged on it, next to the
    original and to random controls that keep as many experts.

    Parameters
    ----------
    model
        Model folder or hub id; a checkpoint to rewrite must be on this machine.
    method
        Drop experts by frequency, gate_weight, ean, reap (default) or random; merge them by hc_smoe, m_smoe,
        weights or random_merge (hc_smoe_permuted, m_smoe_permuted: neurons matched).
    keep
        Experts to keep per layer: a share (0.5) or a number (4).
    text
        Calibration text: file, folder, .jsonl, or - for standard input; repeat for more.
    plan
        An existing plan to apply: plan.json, or its run folder.
    apply
        Folder to write the compressed checkpoint to; it is then judged.
    max_tokens
        Most tokens to read, divided evenly among the domains.
    out
        Run folder.
    device
        auto, cpu, cuda or cuda:0.
    domain
        Named text: code=src; repeat per domain.
    token_ids
        Token ids instead of text: .npy, or one list per line.
    add
        An earlier run of this model on another text, whose sums are added; repeat for more.
    merge_weights
        Weights of a group's members: usage, uniform, dominant or saliency.
    distance
        Distance that experts are clustered by; default: the method's own.
    router
        Router of merged experts: fold (rows fitted again) or tie (all rows kept; plan only).
    unsigned
        Match neurons by order only, without signs.
    adaptive
        Let layers share one budget by usage; plan only.
    sequential
        Calibrate each layer on the output of the compressed layers before it.
    judge
        Hold text out and judge the compressed checkpoint on it.
    controls
        Number of random controls; default 3, or 1 for models over 2 GiB.
    dtype
        auto (as stored), float32, bfloat16 or float16.
    batch_size
        Documents per batch.
    chat_template
        Read each document as a user's message.
    seed
        Seed of samples and controls.
    overwrite
        Recompute instead of reusing or resuming the run folder.
    quiet
        Show no progress.

    Returns
    -------
    Run
        With the tables `clusters` and `damage`, and `saliency`, `merges` and `geometry` where they apply.

    References
    ----------
    REAP: Lasby et al. 2025, arXiv:2510.13999. HC-SMoE: Chen et al. 2025. M-SMoE: Li et al. 2024.

    Examples
    --------
    >>> run = compress("Qwen/Qwen3-30B-A3B", keep=0.5, text="calibration.jsonl")  # doctest: +SKIP
    """
    from moescope.compression.calibration_text import CalibrationText
    from moescope.compression.method import PlanSettings
    from moescope.compression.plan import checkpoint_mark, plan_identity
    from moescope.compression.steps import carry_out, prepare

    minimums = {"max_tokens": (max_tokens, 1), "batch_size": (batch_size, 1), "seed": (seed, 0)}
    for name, (value, least) in {**minimums, "controls": (controls, 0)}.items():
        if value is not None and value < least:
            raise BadInput(f"{name} {value}: must be at least {least}")
    reading = ReadSettings(max_tokens, one_of("dtype", dtype, DTYPES), batch_size, chat_template)
    with_text = bool(text) or bool(domain) or token_ids is not None
    texts = sources(as_list(text), as_list(domain), token_ids) if with_text else []
    settings = PlanSettings(seed, merge_weights, distance, not unsigned, router, adaptive, sequential)
    moe = read_moe(open_checkpoint(model))
    work = prepare(
        moe, method, keep, plan, apply, as_list(add), settings, judge and with_text, controls, with_text
    )
    if with_text:
        step_names([model], ())
    place = choose_device(device)
    identity = {
        "arguments": {
            **asdict(settings),
            **asdict(reading),
            "method": work.method.name,
            "keep": None if keep is None else str(keep),
            "plan": plan_identity(plan),
            "judge": judge,
            "apply": None if work.apply is None else str(work.apply),
            "controls": work.controls,
            "text": [[source.domain, source.identity] for source in texts],
            "token_ids": token_ids is not None,
            "add": [earlier.file_identity for earlier in work.earlier],
        },
        "checkpoints": [{"step": 0, **checkpoint_mark(moe.checkpoint)}],
    }
    folder = Path(out) if out is not None else default_folder("compress", moe.checkpoint.name, identity)
    if not overwrite and (done := finished_run(folder, identity)):
        return done
    with open_run(folder, "compress", identity, overwrite) as writer:
        if work.apply is not None and "applied" not in writer.done_tasks():
            check_target(work.apply)
        writer.save_info(device=place, coverage=[asdict(moe.coverage)])
        reader = CalibrationText(str(model), texts, place, judge, reading) if with_text else None
        return carry_out(writer, work, reader, place, quiet)


def as_list(values: str | Path | Iterable[str | Path]) -> list[str | Path]:
    return [values] if isinstance(values, str | Path) else list(values)
