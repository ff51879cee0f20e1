"""The command line, generated from VERBS: one subcommand per verb with the options of the verb's function."""

from __future__ import annotations

import _thread
import inspect
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from moescope.errors import BadInput, printable, shortened
from moescope.storage import REPORT
from moescope.verb import KeyNumber, Option, Verb, summary_of
from moescope.verbs import VERBS, load_verb

MORE = "More"
NUMBERS, FINDINGS = 5, 5  # that the terminal shows; --verbose shows all
RETIRED = {  # (verb, removed option) -> what to do instead; of any verb where it is empty
    ("", "--anonymous"): "moescope report RUN --anonymous leaves absolute paths out of a page to pass on",
    ("compress", "--adaptive"): "all layers keep as many experts, since a config has one number",
    ("compress", "--distance"): "hc_smoe clusters by Euclidean distance, weights by L2 after matching",
    ("compress", "--dominant"): "the most used member leads its group",
    ("compress", "--merge-weights"): "members are weighted by their tokens, equally without text",
    ("compress", "--sequential"): "layers are merged at once: merging them in sequence showed no clear gain",
    ("compress", "--unsigned"): "neurons are matched with their signs; see compare --match-by unsigned",
    ("demo", "--planted"): "scan the checkpoint that `python tests/planted.py FOLDER` writes",
    ("scan", "--null"): "the shuffle null is always the closed form, the limit of many sampled shuffles",
    ("scan", "--n-shuffles"): "the shuffle null is in closed form and samples nothing",
    ("scan", "--k-star"): "ambiguity is judged at the k of the largest margin; alignment_layers has every k",
    ("scan", "--allow-full-rank"): "k = d_model is never chosen; alignment_layers has its values",
    ("scan", "--ambiguity-weights"): "weight the columns accuracy_term, margin_term and z_term of ambiguity",
}
USAGE_ERROR: Any = typer.BadParameter.__base__  # click's, or that of the copy of click within typer


def typer_parameter(option: Option) -> inspect.Parameter:
    """Return an option as typer takes it."""
    kind: Any = {"flag": bool, "int": int, "float": float, "text": str}[option.kind]
    default: Any = option.default if isinstance(option.default, str | int | float) else None
    more: dict[str, Any] = {
        "help": option.help,
        "metavar": "|".join(option.choices) or option.metavar or None,
    }
    if option.positional:
        info: Any = typer.Argument(show_default=option.shown_default or False, **more)
    else:
        shown = option.shown_default or (default is not None and option.kind != "flag")
        panel = MORE if option.more else None
        info = typer.Option(option.flag, show_default=shown, rich_help_panel=panel, **more)
    if option.kind == "flag":
        default = False  # --no-x turns off what is on by default
    if option.repeated:
        kind, default = list[kind], None
    if option.required:
        default = inspect.Parameter.empty
    elif default is None:
        kind = kind | None
    return named(option.name, info, kind, default)


def command_of(verb: Verb) -> TyperCommand:
    """Return the subcommand of a verb."""
    parameters = [typer_parameter(option) for option in verb.options]
    flags: tuple[tuple[Any, str, str, str, str | None], ...] = (
        (verb.dry_run, "dry_run", "--dry-run", "Print what would be done and what it takes, and stop.", None),
        (True, "as_json", "--json", "Print the result as JSON.", None),
        (verb.returns_run, "verbose", "--verbose", "Print all findings, unshortened.", None),
        (True, "debug", "--debug", "Also print an error's traceback.", MORE),
        (verb.returns_run, "no_report", "--no-report", "Do not write report.html.", MORE),
    )
    parameters += [
        named(name, typer.Option(flag, help=text, rich_help_panel=panel))
        for wanted, name, flag, text, panel in flags
        if wanted
    ]

    def callback(**values: Any) -> None:
        debug = values.pop("debug")
        try:
            execute(verb, values, debug)
        except BadInput as error:
            if debug:
                print_traceback(error)
            raise

    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    paragraphs = summary_of(verb.run).split("\n\n") if verb.run is not None else []
    # typer keeps the line breaks of the source, which fit no other width
    callback.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    if verb.returns_run:
        callback.__doc__ += f"\n\nWrites {REPORT} into the run folder; moescope report RUN --open shows it."
    app = typer.Typer(rich_markup_mode="rich", add_completion=False, pretty_exceptions_enable=False)
    app.command(verb.name, context_settings={"help_option_names": ["-h", "--help"]})(callback)
    command = typer.main.get_command(app)
    assert isinstance(command, TyperCommand)
    return command


def named(name: str, info: Any, kind: Any = bool, default: Any = False) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, info])


def execute(verb: Verb, values: dict[str, Any], debug: bool = False) -> None:
    """Call the verb's function with the options as given, write the run's report, print what came of it."""
    as_json, dry_run = values.pop("as_json", False), values.pop("dry_run", False)
    with_report, verbose = not values.pop("no_report", True), values.pop("verbose", False)
    arguments: list[Any] = []
    for option in verb.options:
        if option.kind == "flag" and option.default:
            values[option.name] = not values[option.name]
        if values[option.name] is None:
            values[option.name] = () if option.repeated else option.default
        if option.positional and option.repeated:
            arguments += values.pop(option.name)
    verb.settle(values)
    function = verb.dry_run if dry_run else verb.run
    assert function is not None
    known = inspect.signature(function).parameters  # a dry run has some of the verb's options
    try:
        made = function(*arguments, **{name: values[name] for name in values if name in known})
    except OSError as error:  # a file that cannot be read, a name that is too long, a full disk
        if error.errno is None:
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise BadInput(
            f"{where}{error.strerror}; check the name, its permissions and the free space, then try again"
        ) from error
    if int(os.environ.get("RANK", "0")):
        return  # under torchrun the first process speaks for all
    if with_report and not dry_run:
        write_report(made, debug)
    if as_json and not dry_run and not hasattr(made, "verb"):
        positional = {option.name: arguments for option in verb.options if option.positional}
        made = verb.json_facts(made, {**positional, **values})
    show(verb.dry_run_lines if dry_run else verb.lines, made, as_json, values.get("quiet", False), verbose)


def write_report(run: Any, debug: bool) -> None:
    """Write the report of a finished run unless it is up to date; a failure is a line, the run stays done."""
    from moescope.reporting.verb import is_outdated, report

    try:
        if is_outdated(run.path):
            report(run)
    except Exception as error:
        if debug:
            print_traceback(error)
        what = error if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
        typer.echo(shortened(printable(f"warning: the run is done, but it has no report: {what}")), err=True)


def show(
    lines: Callable[[Any], list[str]] | None, made: Any, as_json: bool, quiet: bool, verbose: bool
) -> None:
    """Print what a verb returned: a run's summary on one screen, or all of it, or another value."""
    is_run = hasattr(made, "verb")
    if as_json:
        facts = summary_facts(made) if is_run else made
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False, default=str))
    elif not quiet:
        shown = run_lines(made, verbose) if is_run else lines(made) if lines else [str(made)]
        typer.echo("\n".join([*shown, *(place_lines(made.path) if is_run else [])]))
        for part in parts_of(made) if is_run else []:
            for warning in part.info.get("warnings", []):
                typer.echo(f"warning: {warning}", err=True)


def parts_of(run: Any) -> list[Any]:
    """Return a run and those inside it that its page shows."""
    return [run, *(run.parts[name] for name in run.verb.parts if name in run.parts)]


def summary_facts(run: Any) -> dict[str, Any]:
    """Return everything worth printing of a run, as plain data."""
    summary = run.verb.summary(run)
    return {
        "run": str(run.path),
        "verb": run.verb.name,
        "status": run.info["status"],
        "checkpoints": run.info.get("checkpoints", []),
        "coverage": summary.coverage,
        "verdict": summary.verdict,
        "key_numbers": [vars(number) for number in summary.key_numbers],
        "findings": summary.findings,
        **summary.details,
        "warnings": run.info.get("warnings", []),
        "timings": run.info["timings"],
        "tables": run.tables,
        "report": str(report) if (report := run.path / REPORT).exists() else None,
        "parts": {name: summary_facts(run.parts[name]) for name in run.verb.parts if name in run.parts},
    }


def run_lines(run: Any, verbose: bool) -> list[str]:
    """Return a run's summary for a person: verdicts, key numbers and findings of it and of runs inside it.

    On one screen: at most five numbers and five findings, of one line each; or everything.
    """
    summaries, lines = [part.verb.summary(part) for part in parts_of(run)], []
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))
    if run.info.get("process", os.getpid()) != os.getpid():
        lines.append(f"already complete, reusing {run.path} (use --overwrite to recompute)")
    elif resumed := run.info.get("tasks_resumed"):
        lines.append(f"resumed: {resumed} finished {'task' if resumed == 1 else 'tasks'} kept")
    if verbose:
        for summary in summaries:
            lines += [*dict.fromkeys(summary.coverage), summary.verdict]
            lines += map(number_line, summary.key_numbers)
            lines += [*(f"- {finding}" for finding in summary.findings), *summary.passages]
        return [line for line in lines if line]
    lines += [one_line(words, width) for words in summaries[0].coverage[:1]]
    verdicts = [line for summary in summaries for line in textwrap.wrap(summary.verdict, width)]
    numbers = in_turn([summary.key_numbers for summary in summaries])
    once = list({key.name: key for key in reversed(numbers)}.values())[::-1]
    findings = in_turn([summary.findings for summary in summaries])
    some = [f"- {one_line(finding, width - 2)}" for finding in findings[:FINDINGS]]
    more = len(findings) - len(some)
    rest = [f"{more} more: --verbose, or the report"] if more > 0 else []
    text = [line for summary in summaries for line in summary.passages]
    shown = [one_line(number_line(key), width) for key in once[:NUMBERS]]
    return [*lines, *verdicts, *shown, *some, *rest, *text]


def in_turn(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the first of every list, then the second of every list, and so on."""
    return [item for turn in itertools.zip_longest(*lists) for item in turn if item is not None]


def number_line(key: KeyNumber) -> str:
    """Return a key number with its chance level in one line."""
    from moescope.plotting.style import number

    level = "" if key.chance is None else f"{key.reference} {number(key.chance)}"
    words = "; ".join(filter(None, (level, key.word)))
    return f"  {key.name}: {number(key.value)} {key.unit}".rstrip() + (f" ({words})" if words else "")


def one_line(text: str, width: int) -> str:
    """Return the text, shortened to a line at the end of a clause outside brackets."""
    if len(text) <= width:
        return text
    ends = [match.start() for match in re.finditer(r"(?<=[.,;)\]]) |(?<=\w) (?=[(\[])", text[: width - 1])]
    whole = [end for end in ends if all(text[:end].count(a) == text[:end].count(b) for a, b in ("()", "[]"))]
    end = whole[-1] if whole and whole[-1] > width // 3 else text.rfind(" ", 0, width - 1)
    return f"{text[:end].rstrip(' ,;')} …"


def place_lines(folder: Path) -> list[str]:
    """Return where a run and its report are, and on a terminal how to open the report."""
    lines, command = [f"run: {folder}"], f"moescope report {shlex.quote(str(folder))}"
    if not (folder / REPORT).exists():
        return [*lines, f"next: {command}"]
    lines.append(f"report: {folder / REPORT}")
    return [*lines, f"open it: {command} --open"] if sys.stdout.isatty() else lines


class VerbGroup(TyperGroup):
    """The subcommands; `--help` lists them without importing a verb."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, _, _ in VERBS]

    def get_command(self, ctx: Any, name: str) -> TyperCommand | None:
        text = {known: line for known, line, _ in VERBS}.get(name)
        return None if text is None else TyperCommand(name, help=text)

    def main(self, args: Any = None, prog_name: str | None = None, *_: Any, **more: Any) -> Any:
        """Run a command; how it was called wrongly is one line, as all bad input."""
        try:
            ended = super().main(args, prog_name, **{**more, "standalone_mode": False})
        except USAGE_ERROR as error:
            if not error.format_message():  # a command without arguments shows its help
                error.show()
            else:
                where = error.ctx.command_path.rsplit("moescope", 1)[-1] if error.ctx else ""
                what = error.format_message().rstrip(".")
                if remedy := remedy_of(error):
                    what = f"no such option: {error.option_name}; {remedy}"
                line = f"moescope: {what[0].lower()}{what[1:]}; see moescope{where} --help"
                typer.echo(shortened(printable(line)), err=True)
            sys.exit(2)
        sys.exit(ended if isinstance(ended, int) else 0)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command_of(load_verb(name)) if command is not None and name else command, rest


def remedy_of(error: Any) -> str:
    """What to do instead of an option that the verb does not have, or no longer; "" where unknown."""
    name = error.ctx.info_name if error.ctx else None
    if not hasattr(error, "possibilities") or name not in [known for known, _, _ in VERBS]:
        return ""  # not an unknown option
    if retired := RETIRED.get((name, error.option_name)) or RETIRED.get(("", error.option_name)):
        return f"removed: {retired}"
    return load_verb(name).unknown_option(error.option_name.lstrip("-").replace("-", "_"))


def show_version(wanted: bool) -> None:
    if wanted:
        from moescope import __version__

        typer.echo(f"moescope {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="moescope",
    cls=VerbGroup,
    help="See what happens inside Mixture-of-Experts models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def print_traceback(error: BaseException) -> None:
    """Print where the error was raised and every error that it replaced."""
    replaced: BaseException | None = error
    while replaced is not None:  # `raise ... from None` hides it
        replaced.__suppress_context__ = False
        replaced = replaced.__cause__ or replaced.__context__
    traceback.print_exception(error)


def repeat_interrupt(lost: Any) -> None:
    """Interrupt once more where a finaliser was interrupted: Python drops what is raised there."""
    if lost.exc_type is KeyboardInterrupt:
        threading.Timer(0.05, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(lost)


def main() -> None:
    """Run the command line.

    Bad input is one line on stderr and exit code 2; an interruption says how to resume.
    """
    # a batch system's stop is an interruption like Ctrl-C: the run is marked so and can be resumed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.unraisablehook = repeat_interrupt
    try:
        app()
    except BadInput as error:
        typer.echo(shortened(f"moescope: {error}"), err=True)
        sys.exit(2)
    except (KeyboardInterrupt, SystemExit) as ended:
        if isinstance(ended, SystemExit) and ended.code != 130:
            raise  # typer itself turns an interruption into exit code 130, and says nothing
        typer.echo("moescope: interrupted; give the same command again to resume", err=True)
        sys.exit(130)
