"""Options of a verb come from its function alone: command line, stored command and resume identity."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from moescope import cli
from moescope.errors import BadInput
from moescope.verb import (
    COMMON,
    Figure,
    FigureSpec,
    Option,
    Selection,
    Slider,
    Verb,
    documented_parameters,
    options_of,
)
from moescope.verbs import VERBS, load_verb

Mode = Literal["fast", "exact"]
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = []


def weigh(
    *models: str | Path,
    out: str | Path | None = None,
    matrix: str | Iterable[str] = "gate",
    text: str | Path | Iterable[str | Path] = (),
    mode: Mode = "fast",
    count: int = 3,
    share: float | None = None,
    fold: bool = False,
    judge: bool = True,
    from_: str | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Weigh models.

    Twice, if need be.

    Parameters
    ----------
    *models : MODEL
        Models to weigh.
    out : DIR, default runs/weigh-1
        Folder to write.
    matrix : NAMES
        Matrices, separated by commas.
    text : PATH, repeatable
        Text to read.
    mode : MODE
        How exactly.

    Other Parameters
    ----------------
    count : int
        How often,
        over two lines.
    share : float
        A share.
    fold : bool
        Fold.
    judge : bool
        Do not judge.
    from_ : MODEL
        Start.
    quiet : bool
        Print nothing.

    Examples
    --------
    >>> weigh("a")
    """
    CALLS.append((models, {key: value for key, value in locals().items() if key != "models"}))
    return {"models": list(models)}


WEIGH = Verb(
    "weigh", weigh, lines=lambda made: [f"weighed {len(made['models'])}"], incidental=frozenset({"count"})
)


def option(name: str) -> Option:
    return next(option for option in WEIGH.options if option.name == name)


@pytest.fixture
def invoke():
    CALLS.clear()
    return lambda *words: CliRunner().invoke(cli.command_of(WEIGH), list(words))


def test_options_have_the_kinds_defaults_and_places_of_the_signature():
    assert [item.name for item in WEIGH.options] == list(weigh.__annotations__)[:-1]
    assert option("models").positional
    assert option("models").repeated
    assert not option("matrix").repeated
    assert option("text").repeated
    assert option("mode").choices == ("fast", "exact")
    assert (option("count").kind, option("share").kind, option("fold").kind) == ("int", "float", "flag")
    assert option("count").help == "How often, over two lines."
    assert option("count").more
    assert not option("mode").more
    assert option("out").shown_default == "runs/weigh-1"
    assert option("judge").flag == "--no-judge"
    assert option("from_").flag == "--from"


def test_a_parameter_without_text_is_an_error():
    def undocumented(*, speed: int = 1) -> None:
        """Do it.

        Parameters
        ----------
        sped : int
            Misspelt.
        """

    with pytest.raises(TypeError, match="'speed' is not documented"):
        options_of(undocumented)
    assert documented_parameters(undocumented) == {"sped": ("int", "Misspelt.", False)}


def test_a_shared_parameter_needs_no_text_and_may_have_its_own():
    def read(*, out: str | None = None, seed: int = 0, quiet: bool = False) -> None:
        """Read.

        Parameters
        ----------
        out : FILE, default a.html
            The page.
        """

    out, seed, quiet = options_of(read)
    assert (out.metavar, out.shown_default, out.help) == ("FILE", "a.html", "The page.")
    assert (seed.kind, seed.bounds, seed.more) == ("int", ((">=", 0.0), ("<", 1e18)), True)
    assert quiet.help == documented_parameters(COMMON)["quiet"][1]


def test_bounds_and_kinds_are_checked():
    def measure(*, share: float | None = 0.5, count: int = 1, mode: Literal["a", "b"] = "a") -> None:
        """Measure.

        Parameters
        ----------
        share : SHARE > 0, <= 1, default 0.5
            A share.
        count : int >= 2
            A count.
        mode : MODE
            A mode.
        """

    share, count, mode = options_of(measure)
    assert (share.metavar, share.shown_default) == ("SHARE", "0.5")
    for option, value in (
        (share, None),
        (share, 1),
        (share, np.float32(0.1)),
        (count, np.int64(2)),
        (mode, "b"),
    ):
        option.check(value)
    for value in (0.0, 1.5, float("nan"), float("inf"), "0.5", True):
        with pytest.raises(BadInput, match=r"share .*(must be above 0 and at most 1|must be a number)"):
            share.check(value)
    for value in (1, 2.0, "2", True):
        with pytest.raises(BadInput, match=r"count .*(at least 2|whole number)"):
            count.check(value)
    for value in ("c", None):
        with pytest.raises(BadInput, match="mode"):
            mode.check(value)
    speed = Option("speed", "float", "", bounds=((">", 0.0), ("<", float("inf"))))
    for value, limits in ((0, "above 0"), (float("inf"), "above 0 and below inf")):
        with pytest.raises(BadInput, match=f"speed {value}: must be {limits}$"):
            speed.check(value)


def test_every_number_has_an_upper_limit():
    for name, *_ in VERBS:
        for option in load_verb(name).options:
            if option.kind == "int":
                with pytest.raises(BadInput, match=f"{option.name} 1{'0' * 30}: must be at least .* and "):
                    option.check(10**30)


def test_the_command_line_calls_the_function_with_the_options_as_given(invoke):
    shown = invoke("a", "b", "--text", "x", "--text", "y", "--mode", "exact", "--no-judge", "--share", "0.5")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout == "weighed 2\n"
    models, values = CALLS[0]
    assert models == ("a", "b")
    assert values["text"] == ["x", "y"]
    assert (values["mode"], values["judge"], values["share"], values["count"]) == ("exact", False, 0.5, 3)
    assert (values["out"], values["from_"], values["fold"]) == (None, None, False)


def test_without_options_the_function_gets_its_own_defaults(invoke):
    assert invoke().exit_code == 0
    models, values = CALLS[0]
    assert models == ()
    assert values == {
        name: () if name == "text" else value.default
        for name, value in ((item.name, item) for item in WEIGH.options)
        if name != "models"
    }


def test_a_value_outside_the_choices_names_them(invoke):
    shown = invoke("a", "--mode", "slow")
    assert not CALLS
    assert str(shown.exception) == "unknown mode 'slow'; known: fast, exact"


def test_json_prints_the_value(invoke):
    assert invoke("a", "--json").stdout == '{\n  "models": [\n    "a"\n  ]\n}\n'


def given(**changes: Any) -> dict[str, Any]:
    return {item.name: () if item.repeated else item.default for item in WEIGH.options} | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": ("a b", "c")}, "moescope weigh 'a b' c"),
        ({"models": ("a",), "text": ["x", Path("y")]}, "moescope weigh a --text x --text y"),
        ({"models": ("a",), "text": "x"}, "moescope weigh a --text x"),
        ({"models": ("a",), "matrix": ("gate", "up")}, "moescope weigh a --matrix gate,up"),
        ({"models": ("a",), "fold": True, "judge": False}, "moescope weigh a --fold --no-judge"),
        ({"models": ("a",), "count": 3, "share": 0.25}, "moescope weigh a --share 0.25"),
        ({"models": ("s3://user:secret@host/model",)}, "moescope weigh s3://host/model"),
        ({"models": ("https://host/model?token=secret",)}, "moescope weigh https://host/model"),
        ({"text": ["a=https://u:p@host/x?token=1"]}, "moescope weigh --text a=https://host/x"),
    ],
)
def test_the_stored_command_gives_what_was_given_and_no_secret(changes, words):
    assert WEIGH.command(given(**changes)) == words


def test_the_stored_command_run_again_calls_with_the_same_values(invoke):
    values = given(
        models=("a b", "c"), text=["x", "y"], mode="exact", judge=False, share=0.5, from_="z", fold=True
    )
    assert invoke(*shlex.split(WEIGH.command(values))[2:]).exit_code == 0
    models, called = CALLS[0]
    assert {"models": models, **called} == {**values}


def test_the_identity_holds_what_changes_a_number():
    one = WEIGH.identity(given(out="x", quiet=True, count=9), matrix=("gate",))
    assert one == WEIGH.identity(given(), matrix=["gate"])
    assert set(one) == {"matrix", "text", "mode", "share", "fold", "judge", "from_"}
    assert WEIGH.identity(given(mode="exact")) != WEIGH.identity(given())
    assert WEIGH.identity(given(text=[Path("x")])) == WEIGH.identity(given(text=("x",)))


def test_a_selection_narrows_only_the_columns_that_a_table_has():
    frame = pd.DataFrame({"layer": [0, 1, 1], "k": [1, 1, 2]})
    assert len(Selection({"layer": 1, "expert": 3}).rows(frame)) == 2
    assert len(Selection({"layer": 1, "k": 2}).rows(frame)) == 1


def test_a_figure_becomes_plotly_s_with_the_slider_at_its_start():
    data = [{"type": "scatter", "y": [value]} for value in range(5)]
    slider = Slider("k", ["1", "2"], start=1, per_value=2)
    made = Figure("f", "t", "c", (), data, {"xaxis": {"title": {"text": "x"}}}, slider).to_plotly(width=300)
    assert [list(trace.y) for trace in made.data] == [[2], [3], [4]]
    assert (made.layout.height, made.layout.width, made.layout.xaxis.title.text) == (340, 300, "x")


def test_a_figure_can_be_drawn_where_its_tables_have_rows_and_its_condition_holds():
    def draw(tables):
        """Draw the load."""

    rows = pd.DataFrame({"metric": ["cv"], "value": [0.5]})
    spec = FigureSpec("load", ("routing_layers",), draw)
    assert spec.line == "Draw the load."
    assert spec.can_draw({"routing_layers": rows})
    assert not spec.can_draw({"routing_layers": rows.iloc[:0]})
    assert not spec.can_draw({})
    never = FigureSpec("load", ("routing_layers",), draw, condition=lambda tables: False)
    assert not never.can_draw({"routing_layers": rows})
