"""The command line, generated from VERBS: one subcommand per verb with the options of the verb's function."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from moescope.errors import BadInput, printable, shortened, unknown_name
from moescope.storage import ANONYMOUS, REPORT
from moescope.verb import Option, Verb, summary_of
from moescope.verbs import VERBS, load_verb

MORE = "More"
USAGE_ERROR: Any = typer.BadParameter.__base__  # click's, or that of the copy of click within typer


def typer_parameter(option: Option) -> inspect.Parameter:
    """Return an option as typer takes it."""
    kind: Any = {"flag": bool, "int": int, "float": float, "text": str}[option.kind]
    shown = option.shown_default or (isinstance(option.default, str | int | float) and option.kind != "flag")
    more: dict[str, Any] = {"help": option.help, "metavar": option.metavar or None}
    default: Any = option.default if isinstance(option.default, str | int | float | bool) else None
    if option.choices:
        more["metavar"] = "|".join(option.choices)
    if option.positional:
        info: Any = typer.Argument(show_default=option.shown_default or False, **more)
    else:
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
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def command_of(verb: Verb) -> TyperCommand:
    """Return the subcommand of a verb."""
    parameters = [typer_parameter(option) for option in verb.options]
    flag: Callable[..., Any] = typer.Option
    if verb.dry_run is not None:
        dry = flag("--dry-run", help="Print what would be done and what it takes, and stop.")
        parameters.append(named("dry_run", dry))
    parameters.append(named("as_json", flag("--json", help="Print the result as JSON.")))
    debugging = "Also print an error's traceback."
    parameters.append(named("debug", flag("--debug", help=debugging, rich_help_panel=MORE)))

    hiding = "Leave absolute paths out of run.json and the report."
    parameters.append(named("anonymous", flag("--anonymous", help=hiding, rich_help_panel=MORE)))
    if verb.returns_run:
        skipping = "Do not write report.html."
        parameters.append(named("no_report", flag("--no-report", help=skipping, rich_help_panel=MORE)))

    def callback(**values: Any) -> None:
        debug = values.pop("debug")
        if values.pop("anonymous"):
            os.environ[ANONYMOUS] = "1"
        try:
            execute(verb, values, debug)
        except BadInput as error:
            if debug:
                print_traceback(error)
            raise
        finally:
            os.environ.pop(ANONYMOUS, None)

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


def named(name: str, info: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, info]
    )


def execute(verb: Verb, values: dict[str, Any], debug: bool = False) -> None:
    """Call the verb's function with the options as given, write the run's report, print what came of it."""
    as_json, dry_run = values.pop("as_json", False), values.pop("dry_run", False)
    with_report = not values.pop("no_report", True)
    quiet = values.get("quiet", False)
    arguments: list[Any] = []
    for option in verb.options:
        if option.kind == "flag" and option.default:
            values[option.name] = not values[option.name]
        if option.choices and values[option.name] not in (None, *option.choices):
            raise unknown_name(option.flag, values[option.name], list(option.choices))
        if values[option.name] is None:
            values[option.name] = () if option.repeated else option.default
        if option.positional and option.repeated:
            arguments += values.pop(option.name)
    function = verb.dry_run if dry_run else verb.run
    assert function is not None
    if dry_run:
        known = inspect.signature(function).parameters
        values = {name: value for name, value in values.items() if name in known}
    try:
        made = function(*arguments, **values)
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
    show(verb.dry_run_lines if dry_run else verb.lines, made, as_json, quiet)


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


def show(lines: Callable[[Any], list[str]] | None, made: Any, as_json: bool, quiet: bool) -> None:
    """Print what a verb returned: a run's summary, with `lines` in its own words, or another value."""
    is_run = hasattr(made, "verb")
    if as_json:
        facts = summary_facts(made) if is_run else made
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False, default=str))
    elif not quiet:
        shown = lines(made) if lines else run_lines(made)
        typer.echo("\n".join([*shown, *(place_lines(made.path) if is_run else [])]))
        for warning in [] if lines else made.info.get("warnings", []):
            typer.echo(f"warning: {warning}", err=True)


def summary_facts(run: Any) -> dict[str, Any]:
    """Return everything worth printing of a run, as plain data."""
    summary = run.verb.summary(run)
    return {
        "run": str(run.path),
        "verb": run.verb.name,
        "status": run.info["status"],
        "checkpoints": run.info.get("checkpoints", []),
        "coverage": summary.coverage,
        "key_numbers": [vars(number) for number in summary.key_numbers],
        "findings": summary.findings,
        **summary.details,
        "warnings": run.info.get("warnings", []),
        "timings": run.info["timings"],
        "tables": run.tables,
        "report": str(report) if (report := run.path / REPORT).exists() else None,
        "parts": {name: summary_facts(run.parts[name]) for name in run.verb.parts if name in run.parts},
    }


def run_lines(run: Any) -> list[str]:
    """Return a run's summary for a person."""
    summary, lines = run.verb.summary(run), []
    if run.info.get("process") != os.getpid():
        lines.append(f"already complete, reusing {run.path} (use --overwrite to recompute)")
    elif resumed := run.info.get("tasks_resumed"):
        lines.append(f"resumed: {resumed} finished {'task' if resumed == 1 else 'tasks'} kept")
    lines += dict.fromkeys(summary.coverage)
    return lines + [f"- {finding}" for finding in summary.findings]


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
        more.pop("standalone_mode", None)
        try:
            ended = super().main(args, prog_name, standalone_mode=False, **more)
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
    """What the verb says to an option that it does not have; "" where it says nothing."""
    name = error.ctx.info_name if error.ctx else None
    if not hasattr(error, "possibilities") or name not in [known for known, _, _ in VERBS]:
        return ""  # not an unknown option
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
    while replaced is not None:
        replaced.__suppress_context__ = False
        replaced = replaced.__cause__ or replaced.__context__
    traceback.print_exception(error)


def main() -> None:
    """Run the command line.

    Bad input is one line on stderr and exit code 2; an interruption says how to resume.
    """
    # a batch system's stop is an interruption like Ctrl-C: the run is marked so and can be resumed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
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
