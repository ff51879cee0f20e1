"""The command line: one subcommand a verb, the same words as the Python functions, no logic of its own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moescope.errors import BadInput

app = typer.Typer(
    name="moescope",
    help="See what happens inside Mixture-of-Experts models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MORE = "More"
Out = Annotated[
    Path | None,
    typer.Option(help="Run folder to write.", show_default="runs/VERB-MODEL-NUMBER", metavar="DIR"),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.", rich_help_panel=MORE)]
Revision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit of a hub id.", show_default="main", rich_help_panel=MORE),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the run's summary as JSON.")]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace a run that is already in the folder.", rich_help_panel=MORE),
]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn.", rich_help_panel=MORE)]


def show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"moescope {version('moescope')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint: folder, file, hub id or URL.")],
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """What a checkpoint is, from its headers alone.

    Family, shape, parameters, coverage, what a scan will cost.
    """
    from moescope.families.inspect import inspect as look
    from moescope.families.inspect import lines

    facts = look(model, revision)
    typer.echo(json.dumps(facts, indent=2, ensure_ascii=False) if as_json else "\n".join(lines(facts)))


@app.command()
def scan(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help=(
                "Checkpoint: folder, file, hub id (owner/name, owner/name@revision) or URL. Several "
                "are the steps of one run."
            ),
        ),
    ],
    out: Out = None,
    layers: Annotated[str | None, typer.Option(help="Layers to scan: 0,5,9-12.", show_default="all")] = None,
    matrix: Annotated[str, typer.Option(help="Expert matrices: gate, up, gate_up, down.")] = "gate",
    router: Annotated[str, typer.Option(help="Router readings: raw, centered.")] = "raw",
    k: Annotated[
        str,
        typer.Option("--k", help="Values of k beside the ladder 1, 2, 4, ...: 3,100.", show_default=False),
    ] = "",
    fold_norm: Annotated[
        bool, typer.Option("--fold-norm", help="Multiply the norm's weight into router and experts.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0; mps means cpu.")] = "auto",
    as_json: AsJson = False,
    revision: Revision = None,
    precision: Annotated[
        str, typer.Option(help="fast: errors of align up to 1e-6 allowed; exact: 1e-9.", rich_help_panel=MORE)
    ] = "fast",
    null: Annotated[
        str,
        typer.Option(
            help="closed: the shuffle null in closed form; shuffle: sampled, as older tools do.",
            rich_help_panel=MORE,
        ),
    ] = "closed",
    n_shuffles: Annotated[
        int, typer.Option(help="Re-pairings drawn by --null shuffle.", rich_help_panel=MORE)
    ] = 200,
    k_star: Annotated[
        str,
        typer.Option(help="Where ambiguity is judged: max_margin, 128, 256 or 512.", rich_help_panel=MORE),
    ] = "max_margin",
    allow_full_rank: Annotated[
        bool,
        typer.Option(
            "--allow-full-rank", help="Let k = d_model be chosen, as older tools do.", rich_help_panel=MORE
        ),
    ] = False,
    ambiguity_weights: Annotated[
        str,
        typer.Option(help="Weights of accuracy, margin and z in the ambiguity score.", rich_help_panel=MORE),
    ] = "0.4,0.3,0.3",
    engine: Annotated[
        str,
        typer.Option(
            help="local: one layer after the other, here; ray: many at a time (needs the extra `ray`).",
            rich_help_panel=MORE,
        ),
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster to join: auto, or HOST:PORT. Without it one is started here.",
            rich_help_panel=MORE,
            metavar="ADDRESS",
            show_default=False,
        ),
    ] = None,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going",
            help="Mark experts that hold NaN or zeros and go on without them.",
            rich_help_panel=MORE,
        ),
    ] = False,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """What a checkpoint's weights say: router-expert alignment, identification, redundancy, ambiguity.

    Interrupted scans are taken up again at the layer they had reached: give the same command.
    """
    from moescope.weights.verb import scan as run_scan

    run = run_scan(
        *models,
        out=out,
        revision=revision,
        layers=layers,
        matrix=matrix,
        router=router,
        k=k,
        fold_norm=fold_norm,
        precision=precision,
        null=null,
        n_shuffles=n_shuffles,
        seed=seed,
        k_star=k_star,
        allow_full_rank=allow_full_rank,
        ambiguity_weights=ambiguity_weights,
        device=device,
        engine=engine,
        address=address,
        keep_going=keep_going,
        overwrite=overwrite,
        quiet=quiet,
    )
    show_run(run, as_json, quiet)


@app.command()
def trace(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Model folder or hub id. Several are the steps of one run."),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Text to read: file, folder, .jsonl, hf://datasets/OWNER/NAME, or - for standard "
                "input; repeat for more."
            ),
            metavar="PATH",
        ),
    ] = None,
    domain: Annotated[
        list[str] | None,
        typer.Option(help="The same, named: code=src; repeat for each domain.", metavar="NAME=PATH"),
    ] = None,
    token_ids: Annotated[
        Path | None, typer.Option(help="Token ids instead of text: .npy, or one list a line.", metavar="FILE")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens to read at most, shared evenly by the domains.", show_default="all"),
    ] = None,
    phase: Annotated[
        str, typer.Option(help="prefill: documents read whole; decode: token by token; both.")
    ] = "prefill",
    out: Out = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0.")] = "auto",
    as_json: AsJson = False,
    recorded: Annotated[
        Path | None,
        typer.Option(
            "--recorded",
            help="A trace another tool wrote, instead of running a model.",
            metavar="FILE",
            rich_help_panel=MORE,
        ),
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="Its format: vllm, sglang, llamacpp or moescope.", rich_help_panel=MORE)
    ] = None,
    experts: Annotated[
        int | None, typer.Option(help="How many experts its layers have.", rich_help_panel=MORE)
    ] = None,
    revisions: Annotated[
        str,
        typer.Option(
            help="Revisions of one hub model, as steps: step1000,step2000.",
            rich_help_panel=MORE,
            show_default=False,
        ),
    ] = "",
    save_tokens: Annotated[
        bool,
        typer.Option("--save-tokens", help="Keep every token's experts and gates too.", rich_help_panel=MORE),
    ] = False,
    dtype: Annotated[
        str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.", rich_help_panel=MORE)
    ] = "auto",
    batch_size: Annotated[
        int, typer.Option(help="Documents read side by side; changes no number.", rich_help_panel=MORE)
    ] = 8,
    chat_template: Annotated[
        bool,
        typer.Option("--chat-template", help="Read each document as a user's message.", rich_help_panel=MORE),
    ] = False,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Which experts real text goes to: load, decisions, overlap, domains, vocabulary, stability over steps.

    An interrupted trace is taken up at the model it had reached: give the same command.
    """
    from moescope.routing.trace import trace as run_trace

    run = run_trace(
        *(models or []),
        text=text or (),
        domain=domain or (),
        token_ids=token_ids,
        recorded=recorded,
        format=format,
        experts=experts,
        revisions=revisions,
        out=out,
        max_tokens=max_tokens,
        phase=phase,
        save_tokens=save_tokens,
        dtype=dtype,
        batch_size=batch_size,
        chat_template=chat_template,
        device=device,
        seed=seed,
        overwrite=overwrite,
        quiet=quiet,
    )
    show_run(run, as_json, quiet)


@app.command()
def compare(
    a: Annotated[
        str, typer.Argument(metavar="A", help="Checkpoint (folder, file, hub id or URL), or a run folder.")
    ],
    b: Annotated[
        str, typer.Argument(metavar="B", help="Another of the same architecture, or a run of the same kind.")
    ],
    out: Out = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers to compare: 0,5,9-12.", show_default="all")
    ] = None,
    matrix: Annotated[
        str, typer.Option(help="What to compare: gate, up, down, router.")
    ] = "gate,up,down,router",
    matched: Annotated[
        bool, typer.Option("--matched", help="Also after bringing B's neurons into A's order and signs.")
    ] = False,
    skip: Annotated[
        str,
        typer.Option(
            help="Leave out what takes longest: sv (SV alignment), scan (change in alignment and ambiguity).",
            show_default=False,
        ),
    ] = "",
    series: Annotated[
        str, typer.Option(help="What the comparison is called in tables and figures.")
    ] = "base_to_ift",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0; mps means cpu.")] = "auto",
    as_json: AsJson = False,
    match_by: Annotated[
        str,
        typer.Option(
            help=(
                "For --matched: signed (order and signs), unsigned (order alone), held_out (by gate "
                "and up; down is the check)."
            ),
            rich_help_panel=MORE,
        ),
    ] = "signed",
    seed: Seed = 0,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """What changed between two checkpoints, expert by expert: distances, singular vectors, router drift,
    ambiguity; or between two runs.

    An interrupted comparison is taken up at the layer it had reached: give the same command.
    """
    from moescope.comparison.verb import compare as run_compare

    run = run_compare(
        a,
        b,
        out=out,
        layers=layers,
        matrix=matrix,
        series=series,
        matched=matched,
        match_by=match_by,
        skip=skip,
        device=device,
        seed=seed,
        overwrite=overwrite,
        quiet=quiet,
    )
    show_run(run, as_json, quiet)


@app.command()
def compress(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Model folder or hub id; what is to be rewritten must lie on this machine."
        ),
    ],
    method: Annotated[
        str | None,
        typer.Option(
            help=(
                "Drop by frequency, gate_weight, ean, reap or random; merge by hc_smoe, m_smoe, "
                "weights or random_merge (_permuted: neurons matched)."
            ),
            show_default="reap",
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Experts to keep in every layer: a share (0.5) or a number (4).", metavar="SHARE_OR_COUNT"
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to judge experts by: file, folder, .jsonl, or - for standard input; repeat for more.",
            metavar="PATH",
        ),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A plan made before: plan.json, or its run folder.", metavar="PLAN")
    ] = None,
    apply: Annotated[
        Path | None,
        typer.Option(help="Write the compressed checkpoint into this folder, and judge it.", metavar="DIR"),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens to read at most, shared evenly by the domains.", show_default="all"),
    ] = None,
    out: Out = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0.")] = "auto",
    as_json: AsJson = False,
    domain: Annotated[
        list[str] | None,
        typer.Option(
            help="Text, named: code=src; repeat for each domain.", metavar="NAME=PATH", rich_help_panel=MORE
        ),
    ] = None,
    token_ids: Annotated[
        Path | None,
        typer.Option(
            help="Token ids instead of text: .npy, or one list a line.", metavar="FILE", rich_help_panel=MORE
        ),
    ] = None,
    add: Annotated[
        list[Path] | None,
        typer.Option(
            help="An earlier run of this model on another text, whose sums count too; repeat for more.",
            metavar="RUN",
            rich_help_panel=MORE,
        ),
    ] = None,
    merge_weights: Annotated[
        str,
        typer.Option(
            help="Shares of a group's members in the merged expert: usage, uniform, dominant or saliency.",
            rich_help_panel=MORE,
        ),
    ] = "usage",
    distance: Annotated[
        str, typer.Option(help="What clusters are made by; default: the method's own.", rich_help_panel=MORE)
    ] = "default",
    router: Annotated[
        str,
        typer.Option(
            help="Router of merged experts: fold (rows fitted anew) or tie (all rows kept; a plan only).",
            rich_help_panel=MORE,
        ),
    ] = "fold",
    unsigned: Annotated[
        bool, typer.Option("--unsigned", help="Match neurons without their signs.", rich_help_panel=MORE)
    ] = False,
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive", help="Let layers share the budget by usage; a plan only.", rich_help_panel=MORE
        ),
    ] = False,
    sequential: Annotated[
        bool,
        typer.Option(
            "--sequential",
            help="Calibrate each layer behind the compressed ones before it.",
            rich_help_panel=MORE,
        ),
    ] = False,
    no_judge: Annotated[
        bool,
        typer.Option("--no-judge", help="Hold no text out, and judge nothing on it.", rich_help_panel=MORE),
    ] = False,
    controls: Annotated[
        int | None,
        typer.Option(
            help="Random controls beside the plan.", rich_help_panel=MORE, show_default="3, of large models 1"
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.", rich_help_panel=MORE)
    ] = "auto",
    batch_size: Annotated[int, typer.Option(help="Documents read side by side.", rich_help_panel=MORE)] = 8,
    chat_template: Annotated[
        bool,
        typer.Option("--chat-template", help="Read each document as a user's message.", rich_help_panel=MORE),
    ] = False,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Fewer experts: a plan, what it will cost, and with --apply the smaller checkpoint and what it did cost.

    A fifth of the text is held out; original, compressed model and random controls are compared on it.
    """
    from moescope.compression.verb import compress as run_compress

    run = run_compress(
        model,
        method=method,
        keep=keep,
        text=text or (),
        domain=domain or (),
        token_ids=token_ids,
        plan=plan,
        apply=apply,
        add=add or (),
        judge=not no_judge,
        controls=controls,
        out=out,
        max_tokens=max_tokens,
        dtype=dtype,
        batch_size=batch_size,
        chat_template=chat_template,
        device=device,
        merge_weights=merge_weights,
        distance=distance,
        router=router,
        signed=not unsigned,
        adaptive=adaptive,
        sequential=sequential,
        seed=seed,
        overwrite=overwrite,
        quiet=quiet,
    )
    show_run(run, as_json, quiet)


@app.command()
def train(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG.toml",
            help="What to train: TOML with the tables model, data and train.",
            show_default="the preset alone",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="What the config starts from: nano, small, medium, some_a4, some_b1, some_b2, some_b3.",
            show_default="nano",
        ),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            help="Router: switch_top1, top2, topk, expert_choice, hash, loss_free, spectra, some, dense.",
            show_default="the preset's",
        ),
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Lab checkpoint to begin with.", metavar="MODEL", show_default="random weights"
        ),
    ] = None,
    out: Out = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the number of parameters and tokens, and stop.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the unfinished training in --out, or the newest in runs/."),
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0.")] = "auto",
    as_json: AsJson = False,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of weights and data order.", rich_help_panel=MORE, show_default="the config's"
        ),
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Train a small MoE language model, on text made from this Python installation unless the config names
    another.

    An interrupted training goes on from its last checkpoint, exactly: give the same command. Several
    processes: torchrun -m moescope train ...
    """
    from moescope.lab.train import count_parameters, size_lines
    from moescope.lab.train import train as run_train

    if dry_run:
        if resume:
            raise BadInput("--dry-run and --resume exclude each other; pass one of them")
        size = count_parameters(config, preset, router, from_, seed)
        if as_json or not quiet:
            typer.echo(json.dumps(size, indent=2) if as_json else "\n".join(size_lines(size)))
        return
    run = run_train(
        config,
        preset=preset,
        router=router,
        from_=from_,
        out=out,
        resume=resume,
        device=device,
        seed=seed,
        overwrite=overwrite,
        quiet=quiet,
    )
    if not int(os.environ.get("RANK", "0")):  # the first process speaks for all
        show_run(run, as_json, quiet)


@app.command()
def study(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="STUDY.toml",
            help="Arms, seeds and what they have in common: docs/lab.md.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="local: on this machine; ray: on a cluster (needs the extra `ray`).")
    ] = "local",
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the unfinished study in --out, or the newest in runs/."),
    ] = False,
    out: Out = None,
    jobs: Annotated[
        int, typer.Option(help="Trainings at a time, each in a process of its own; on a GPU they share it.")
    ] = 1,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the arms with their sizes and the work they come to, and stop."
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0.")] = "auto",
    as_json: AsJson = False,
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster to join: auto, or HOST:PORT. Without it one is started here.",
            rich_help_panel=MORE,
            metavar="ADDRESS",
            show_default=False,
        ),
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Train many small MoEs in a design with paired seeds, and compare them.

    Finished trainings are not repeated, an unfinished one goes on from its checkpoint: give the same command.
    """
    from moescope.lab.study import plan_lines, plan_study
    from moescope.lab.study import study as run_study

    if dry_run:
        facts = plan_study(config, resume, out)
        if as_json or not quiet:
            typer.echo(json.dumps(facts, indent=2) if as_json else "\n".join(plan_lines(facts)))
        return
    made = run_study(
        config,
        engine=engine,
        resume=resume,
        out=out,
        jobs=jobs,
        device=device,
        address=address,
        overwrite=overwrite,
        quiet=quiet,
    )
    show_run(made, as_json, quiet)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders; several are compared side by side.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The HTML file to write.", show_default="RUN/report.html", metavar="FILE"),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            help="Also write every figure into this folder (needs the extra `export`).", metavar="DIR"
        ),
    ] = None,
    format: Annotated[str, typer.Option(help="Figure format: svg, png or pdf.")] = "svg",
    quiet: Quiet = False,
) -> None:
    """One interactive HTML file, readable offline, from one run or several."""
    from moescope.reporting.verb import report as build_report

    written = build_report(*runs, out=out, figures=figures, format=format, quiet=quiet)
    if not quiet:
        typer.echo(f"report: {written}")


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option(help="Run folder to write.", show_default="runs/demo", metavar="DIR")
    ] = None,
    planted: Annotated[
        bool,
        typer.Option(
            "--planted",
            help="A checkpoint of known structure instead: what was planted beside what is found.",
        ),
    ] = False,
    as_json: AsJson = False,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """A small MoE that comes with moescope.

    Its weights scanned, its routing traced, its training shown, all in one report.
    """
    from moescope.demo.verb import demo as run_demo
    from moescope.demo.verb import demo_lines, demo_summary

    facts = demo_summary(run_demo(out=out, planted=planted, seed=seed, overwrite=overwrite, quiet=quiet))
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    elif not quiet:
        typer.echo("\n".join(demo_lines(facts)))


def show_run(run: Any, as_json: bool, quiet: bool) -> None:
    """What a run found: its summary for a person, or as JSON."""
    from moescope.reporting.run_kind import kind_summary
    from moescope.reporting.run_kinds import kind_of

    if (kind := kind_of(run)) is not None:
        facts = kind_summary(run, kind)
    elif run.info["verb"] == "trace":
        from moescope.routing.report_summary import trace_summary

        facts = trace_summary(run)
    else:
        from moescope.weights.report import summary

        facts = summary(run)
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    elif not quiet:
        if run.info.get("process") != os.getpid():
            typer.echo(f"this very {run.info['verb']} was done before; nothing was computed")
        elif taken := run.info.get("tasks_resumed"):
            typer.echo(
                f"{taken} {'piece of work was' if taken == 1 else 'pieces of work were'} taken "
                "over from an earlier attempt"
            )
        for line in dict.fromkeys(facts["coverage"]):
            typer.echo(line)
        for finding in facts["findings"]:
            typer.echo(f"- {finding}")
        for warning in facts["warnings"]:
            typer.echo(f"warning: {warning}", err=True)
        typer.echo(f"run: {run.path}")
        if not (run.path / "report.html").exists():
            typer.echo(f"next: moescope report {shlex.quote(str(run.path))}")


def main() -> None:
    """Run the command line.

    Bad input is one line on stderr and exit code 2, an interruption says how to go on.
    """
    # a batch system's stop is an interruption like Ctrl-C: the run is marked so and can be taken up again
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except BadInput as error:
        typer.echo(f"moescope: {error}", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, SystemExit) as ended:
        if isinstance(ended, SystemExit) and ended.code != 130:
            raise  # typer itself turns an interruption into exit code 130, and says nothing
        typer.echo("moescope: interrupted; the same command goes on where this one stopped", err=True)
        sys.exit(130)
