"""Sentences and key numbers from columns: which row leads, what counts, what is silent."""

from __future__ import annotations

import pandas as pd
import pytest

from moescope.reporting.findings import Number, Said, key_number, key_numbers, say, say_all
from moescope.tables import Column, Table, define_tables

LOW_HIGH = {"chance": "level", "chance_label": "random routing", "interval": ("low", "high")}
TABLES = define_tables(
    {
        "cv": Column("float", "", label="CV", better="lower", most=3, **LOW_HIGH),
        "effect": Column("float", "", chance=0, noise="sd"),
        **{name: Column("float", "") for name in ("level", "low", "high", "sd")},
        "dead": Column("bool", ""),
        "policy": Column("text", "", names={"lru": "LRU"}),
        "slots": Column("int", ""),
    },
    Table("layers", "", ("layer", "domain"), ("cv", "level", "low", "high"), whole={"domain": ""}),
    Table("experts", "", ("layer", "expert"), ("effect", "sd", "dead", "policy", "slots")),
    Table("steps", "", ("step", "layer"), ("cv", "level", "low", "high")),
)
LAYERS = pd.DataFrame(
    {
        "layer": [0, 1, 2, 2],
        "domain": ["", "", "", "code"],
        "cv": [0.1, 0.4, 0.2, 9.0],
        "level": 0.15,
        "low": [0.05, 0.35, 0.1, 8],
        "high": [0.2, 0.45, 0.3, 10],
    }
)
EXPERTS = pd.DataFrame(
    {
        "layer": [0, 0, 1, 1],
        "expert": [0, 1, 0, 1],
        "effect": [0.5, -3.0, 1.0, 2.5],
        "sd": 1.0,
        "dead": [False, True, None, False],
        "policy": ["lru", "lru", "lfu", "lfu"],
        "slots": [4.0, 4.0, 8.0, 8.0],
    }
)
DATA = {"layers": LAYERS, "experts": EXPERTS}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            Said("layers", "cv", text="Worst in {place}, CV {value}{interval} ({chance}). All: {span}."),
            "Worst in layer 1, CV 0.4 [0.35, 0.45] (random routing: 0.15). All: 0.1 to 0.4.",
        ),
        (Said("layers", "cv", pick="best", text="best {place}"), "Best layer 0"),
        (
            Said("layers", "cv", only="beyond", text="{count} of {total} beyond chance: {rows}"),
            "1 of 3 beyond chance: layer 1",
        ),
        (
            Said("experts", "effect", only="beyond", pick="furthest", text="{rows}"),
            "Layer 0, expert 1 and layer 1, expert 1",
        ),
        (Said("experts", "effect", only="dead", text="{count} dead: {rows}"), "1 dead: layer 0, expert 1"),
        (
            Said("experts", "effect", pick="largest", group="policy", text="{groups}"),
            "Lfu 2.5 (L1 E1), LRU 0.5 (L0 E0)",
        ),
        (Said("experts", "effect", pick="largest", text="{policy} with {slots} slots"), "Lfu with 8 slots"),
        (Said("experts", "effect", where="effect > 9", text="x", otherwise="none"), None),
        (
            Said("experts", "effect", only="dead", where="layer == 1", text="x", otherwise="none dead"),
            "None dead",
        ),
        (Said("experts", "effect", only="dead", where="layer == 1", text="x"), None),
        (Said("absent", "effect", text="x"), None),
    ],
)
def test_a_sentence(spec, words):
    said = say(spec, DATA, TABLES)
    assert said == words
    assert say_all([spec], DATA, TABLES) == ([] if words is None else [words])


def test_a_sentence_knows_its_place():
    said = say(Said("experts", "effect", pick="largest", text="x", figure="effects"), DATA, TABLES)
    assert said.place == {"figure": "effects", "layer": 1, "expert": 1}


def test_a_sentence_over_steps_names_the_first_and_last():
    frame = pd.DataFrame(
        {
            "step": [0, 0, 1000],
            "layer": [0, 1, 0],
            "cv": [0.2, 0.4, 0.1],
            "level": 0.1,
            "low": None,
            "high": None,
        }
    )
    said = say(Said("steps", "cv", text="from {first} to {last}"), {"steps": frame}, TABLES)
    assert said == "From 0.3 (step 0) to 0.1 (step 1,000)"


def test_a_key_number_takes_chance_bound_and_word_from_its_column():
    key = key_number(Number("layers", "cv", name="Worst CV"), DATA, TABLES)
    assert (key.name, key.value, key.chance, key.most) == ("Worst CV", 0.4, 0.15, 3)
    assert (key.word, key.reference) == ("beyond chance, layer 1", "random routing")
    best = key_number(Number("layers", "cv", pick="best", name="Best CV"), DATA, TABLES)
    assert best.word == "at chance, layer 0"


def test_a_key_number_counts_and_names_what_chance_alone_gives():
    spec = Number(
        "experts", "effect", only="beyond", name="Experts with an effect, {slots} slots", of="experts"
    )
    (key,) = key_numbers([spec, Number("absent", "x", name="none")], DATA, TABLES)
    assert (key.name, key.value, key.unit, key.chance) == (
        "Experts with an effect, 8 slots",
        2,
        "of 4 experts",
        0.2,
    )


def test_a_flag_that_no_row_knows_says_nothing_whatever_is_asked_for():
    old = {"experts": EXPERTS.assign(dead=None)}
    for where in ("", "effect.notna()"):
        spec = Said("experts", "effect", where=where, only="dead", text="x", otherwise="none")
        assert say(spec, old, TABLES) is None
        count = Number("experts", "effect", where=where, only="dead", name="dead", of="experts")
        assert key_number(count, old, TABLES) is None


def test_the_place_of_a_key_number_names_the_expert_too():
    number = key_number(Number("experts", "effect", pick="largest", name="most"), DATA, TABLES)
    assert number.word == "beyond chance, layer 1, expert 1"


def test_the_median_row_leads_with_its_own_chance_level():
    key = key_number(Number("layers", "cv", pick="median", name="CV"), DATA, TABLES)
    assert (key.value, key.word) == (0.2, "at chance, layer 2")


def test_what_was_not_measured_is_neither_said_nor_judged():
    unknown = {"experts": EXPERTS.assign(dead=None), "layers": LAYERS.assign(level=None)}
    spec = Said("experts", "effect", only="dead", text="dead: {rows}", otherwise="none dead")
    assert say(spec, unknown, TABLES) is None
    assert say(Said("layers", "cv", text="CV {value} ({chance})"), unknown, TABLES) is None
    assert key_number(Number("layers", "cv", name="CV"), unknown, TABLES).word == "layer 1"


def test_a_sentence_may_choose_the_colour_of_the_map():
    said = say(
        Said("experts", "effect", pick="largest", text="x", tab="overview", colour="load"), DATA, TABLES
    )
    assert said.place == {"tab": "overview", "colour": "load", "layer": 1, "expert": 1}
