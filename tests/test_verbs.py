"""The contract of a verb, held for every record in VERBS: help, documented options, tables and figures."""

from __future__ import annotations

import inspect
import re
import sys
from types import ModuleType

import pytest
from typer.testing import CliRunner

import moescope
from moescope.cli import RETIRED, app, main
from moescope.errors import BadInput
from moescope.verb import COMMON, INCIDENTAL, documented_parameters, summary_of
from moescope.verbs import OTHERS, VERBS, load_verb

NAMES = [name for name, _, _ in VERBS]
MOST_HELP_LINES = 80


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"})


@pytest.mark.parametrize("name", NAMES)
def test_help_lists_every_option_on_one_screen(name):
    shown = invoke(name, "--help")
    assert shown.exit_code == 0, shown.output
    assert len(shown.output.splitlines()) <= MOST_HELP_LINES
    words = set(re.findall(r"--[a-z][a-z-]*", shown.output))
    assert {option.flag for option in load_verb(name).options if not option.positional} <= words
    assert {"--json", "--debug"} <= words


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_exits_2(name):
    shown = invoke(name, "--no-such-option")
    assert shown.exit_code == 2
    assert "--no-such-option" in shown.output


@pytest.mark.parametrize(("name", "flag"), RETIRED)
def test_a_removed_option_says_what_to_do_instead(name, flag, monkeypatch, capsys):
    what, name = RETIRED[name, flag], name or "scan"  # without a name: of any verb
    assert flag not in {option.flag for option in load_verb(name).options}
    monkeypatch.setattr(sys, "argv", ["moescope", name, flag])
    with pytest.raises(SystemExit, match="2"):
        main()
    line = f"moescope: no such option: {flag}; removed: {what}; see moescope {name} --help\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_documented_and_every_documented_option_exists(name):
    verb = load_verb(name)
    documented = set(documented_parameters(verb.run))
    parameters = set(inspect.signature(verb.run).parameters)
    assert documented <= parameters <= documented | set(documented_parameters(COMMON))
    for option in verb.options:
        assert option.help.endswith("."), option.name
        assert option.kind != "flag" or not option.positional
    assert summary_of(verb.run)


@pytest.mark.parametrize("name", NAMES)
def test_in_python_a_value_outside_its_bounds_is_an_error_before_anything_is_read(name):
    verb = load_verb(name)
    places = ["nowhere" for option in verb.options if option.required]
    for option in verb.options:
        bad = "unheard-of" if option.choices else min((bound for _, bound in option.bounds), default=None)
        if bad is not None:
            value = bad if option.choices else type(option.default or 0)(bad - 1)
            with pytest.raises(BadInput, match=f"{option.name} .*{value}"):
                verb.run(*places, **{option.name: value})


@pytest.mark.parametrize("name", NAMES)
def test_options_after_the_positional_ones_are_keywords(name):
    kinds = [parameter.kind for parameter in inspect.signature(load_verb(name).run).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert sum(kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds) <= 2


@pytest.mark.parametrize("name", NAMES)
def test_the_python_function_is_the_verb(name):
    verb = load_verb(name)
    assert verb.name == name
    function = getattr(moescope, name)
    assert function is verb.run or (isinstance(function, ModuleType) and callable(function))
    assert name in dir(moescope)


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_every_table_and_column_is_documented(name):
    for table_name, table in load_verb(name).tables.items():
        assert table.name == table_name
        assert table.meaning, table_name
        for key, column in table.glossary.items():
            assert column.meaning, f"{table_name}: {key}"
            assert column.kind in {"int", "float", "bool", "text", "floats", "ints"}, f"{table_name}: {key}"


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_options_that_change_no_number_exist(name):
    verb = load_verb(name)
    assert not verb.incidental & INCIDENTAL
    assert verb.incidental <= {option.name for option in verb.options}


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_figures_need_tables_of_the_verb_and_describe_themselves(name):
    verb = load_verb(name)
    # by `select`: tables of the scans in its folder, and the changes in its run.json
    inside = {*load_verb("scan").tables, "changes"} if name == "compare" else set()
    for spec in verb.figures:
        assert set(spec.needs) <= {*verb.tables, *inside}, spec.name
        assert spec.line not in {"", spec.name}, spec.name
    if verb.tables:
        assert verb.summary is not None


def test_a_name_means_one_figure_and_one_table_in_the_whole_project():
    figures: dict[str, object] = {}
    tables: dict[str, object] = {}
    for verb in map(load_verb, [*NAMES, *OTHERS]):
        names = [spec.name for spec in verb.figures]
        assert len(names) == len(set(names)), verb.name
        for spec in verb.figures:  # a training and Monitor share figures
            assert figures.setdefault(spec.name, spec) == spec, spec.name
        for name, table in verb.tables.items():
            assert tables.setdefault(name, table) == table, name
