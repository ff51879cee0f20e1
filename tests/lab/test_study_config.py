"""Studies are read whole or refused by name, before anything is trained."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from moescope.decoder.routers import ROUTERS as EVERY_ROUTER
from moescope.decoder.routers.hash import Hash
from moescope.decoder.routers.some import CONTROLS
from moescope.decoder.routers.spectra import ABLATIONS
from moescope.errors import BadInput
from moescope.lab.config import PRESETS
from moescope.lab.cost import flops_per_token, router_flops
from moescope.lab.study_config import Study, read_study, study_from

ROUTERS = {"model.router": ["top2", "loss_free"]}


def made(**given: Any) -> Study:
    return study_from({"reference": "top2", "axes": ROUTERS, **given})


def test_a_list_of_routers_is_an_arm_each_under_five_seeds():
    study = made()
    assert [(arm.name, arm.question) for arm in study.arms] == [("top2", "main"), ("loss_free", "main")]
    assert study.seeds == (0, 1, 2, 3, 4)
    assert study.claims
    assert [arm.config.model.router for arm in study.arms] == ["top2", "loss_free"]
    assert {arm.config.train.seed for arm, _ in study.trainings} == {0}
    assert study.arms[1].of_seed(4).train.seed == 4


def test_a_router_that_is_drawn_is_drawn_anew_per_seed_unless_the_study_sets_its_seed():
    arms = {
        "top2": {},
        "hash": {"model": {"router": "hash"}},
        "one table": {"model": {"router": "hash", "router_options": {"seed": 7}}},
    }
    study = study_from({"reference": "top2", "arms": arms})
    tables = {
        arm.name: [Hash(arm.of_seed(seed).model, 0).table_VK for seed in study.seeds]
        for arm in study.arms[1:]
    }
    drawn, fixed = tables["hash"], tables["one table"]
    assert all(not one.equal(other) for one, other in itertools.combinations(drawn, 2))
    assert all(one.equal(fixed[0]) for one in fixed)
    assert study.arms[0].of_seed(3).model == study.arms[0].config.model


def test_trainings_go_seed_by_seed_so_that_a_study_stopped_early_is_balanced():
    assert [(arm.name, seed) for arm, seed in made(seeds=[7, 1]).trainings] == [
        ("top2", 7),
        ("loss_free", 7),
        ("top2", 1),
        ("loss_free", 1),
    ]


def test_with_fewer_than_five_seeds_nothing_is_claimed():
    assert not made(seeds=4).claims
    assert made(seeds=[1, 2, 3, 4, 5]).claims


def test_the_base_is_laid_over_the_preset_and_arms_over_the_base():
    study = made(
        preset="small",
        base={"model": {"layers": 3}, "train": {"steps": 9}},
        arms={"wide": {"model": {"d_ff": 1024}}},
    )
    wide = study.arms[0].config
    assert (wide.model.layers, wide.model.d_ff, wide.model.experts, wide.train.steps) == (
        3,
        1024,
        PRESETS["small"].model.experts,
        9,
    )


def test_every_combination_of_axes_is_an_arm_that_its_name_describes():
    study = made(axes={"model.experts": [4, 8], "model.router": ["top2", "hash"]}, reference="experts=4 top2")
    assert [arm.name for arm in study.arms] == [
        "experts=4 top2",
        "experts=4 hash",
        "experts=8 top2",
        "experts=8 hash",
    ]
    assert {arm.question for arm in study.arms} == {"scaling"}
    assert study.arms[3].axes == {"experts": 8, "router": "hash"}
    assert study.arms[3].config.model.experts == 8


def test_a_router_of_an_axis_keeps_the_options_of_another_axis():
    study = made(
        axes={"model.router_options.epsilon": [0.02, 0.05], "model.router": ["spectra"]},
        reference="epsilon=0.02 spectra",
    )
    assert [arm.config.model.router_options for arm in study.arms] == [{"epsilon": 0.02}, {"epsilon": 0.05}]
    assert {arm.question for arm in study.arms} == {"sweep"}


def test_axes_of_named_sizes_change_several_keys_at_once():
    sizes = {"S": {"model": {"d_model": 32}}, "M": {"model": {"d_model": 64, "layers": 6}}}
    study = made(axes={"size": sizes, **ROUTERS}, reference="S top2")
    assert [(arm.name, arm.question, arm.axes["size"]) for arm in study.arms][2] == ("M top2", "scaling", "M")
    assert study.arms[2].config.model.layers == 6


def test_ablations_bring_the_whole_router_and_each_part_taken_away():
    study = made(ablations="spectra")
    of_spectra = [arm for arm in study.arms if arm.question == "ablation"]
    assert [arm.name for arm in of_spectra] == ["spectra", *(f"spectra{name}" for name in ABLATIONS)]
    assert [arm.config.model.router_options for arm in of_spectra] == [{}, *ABLATIONS.values()]
    assert study.references == {"ablation": "spectra"}


def test_the_controls_of_some_have_its_block_and_differ_in_one_thing_each():
    arms = [arm for arm in made(ablations="some").arms if arm.question == "ablation"]
    assert [arm.name for arm in arms] == ["some", *(f"some{name}" for name in CONTROLS)]
    assert {arm.config.model.block for arm in arms} == {"some"}
    frozen = {arm.name: arm.config.model.frozen_experts for arm in arms}
    assert [name for name in frozen if not frozen[name]] == ["some+TrainedExperts"]


def test_all_arms_norm_queries_and_keys_as_the_reference_does_unless_the_study_speaks_of_it():
    three = {"model.router": ["switch_top1", "top2", "spectra"]}
    for reference, norms in (("top2", False), ("switch_top1", True)):
        assert {arm.config.model.qk_norm for arm in made(axes=three, reference=reference).arms} == {norms}
    assert {arm.config.model.qk_norm for arm in made(axes=three, base={"model": {"qk_norm": True}}).arms} == {
        True
    }
    own = made(axes=three, arms={"normed": {"model": {"router": "top2", "qk_norm": True}}})
    assert [arm.config.model.qk_norm for arm in own.arms] == [True, None, None, None]


EXAMPLES = Path(__file__).parents[2] / "examples"
STUDIES = sorted(path.name for path in EXAMPLES.glob("*.toml") if "[model]" not in path.read_text())


@pytest.mark.parametrize("name", STUDIES)
def test_every_example_can_be_studied_and_has_seeds_enough_for_claims(name):
    assert read_study(EXAMPLES / name).claims


def test_the_example_of_all_routers_gives_each_the_same_work_beside_its_router():
    study = read_study(EXAMPLES / "routers.toml")
    assert {arm.config.model.router for arm in study.arms} == set(EVERY_ROUTER)
    beside = {
        flops_per_token(arm.config.model, 256) - arm.config.model.layers * router_flops(arm.config.model)
        for arm in study.arms
    }
    assert len(beside) == 1
    experts = {arm.config.model.experts * arm.config.model.d_ff for arm in study.arms}
    assert len(experts) == 1


def test_a_study_survives_json():
    study = made(
        ablations="spectra",
        arms={"big": {"model": {"experts": 16}, "question": "scaling", "axes": {"experts": 16}}},
        keep="all",
        seeds=[1, 2],
    )
    assert study_from(json.loads(json.dumps(study.as_dict()))) == study


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 3}, "unknown key 'seed'; did you mean 'seeds'?"),
        ({"reference": None}, "no reference; name the arm to compare with: reference = 'top2'"),
        ({"reference": "top3"}, "unknown reference 'top3'; did you mean 'top2'? known: top2, loss_free"),
        ({"references": {"ablation": "x"}}, "unknown reference of ablation 'x'"),
        (
            {"seeds": 1},
            "seeds must be a number from 2 to 10000 or a list of at least two different whole numbers, not 1",
        ),
        (
            {"axes": {"model.layers": list(range(1, 200)), "model.experts": list(range(2, 99))}},
            "199 x 97 arms",
        ),
        (
            {"axes": {"model.router": ["top2", "topk"], "model.d_ff": [8, 10**12]}},
            "lower the sizes in [model]",
        ),
        ({"keep": "some"}, "unknown keep 'some'; known: last, all, none"),
        ({"base": {"train": {"seed": 3}}}, "[base.train] seed: give the study's seeds instead"),
        (
            {"base": {"train": {"paired_weights": False}}},
            "[base.train] paired_weights: all arms of a seed start from the same weights",
        ),
        ({"base": {"preset": "small"}}, "[base] preset: write preset at the top of the file"),
        ({"axes": {"model.router": ["top2"]}}, "1 arm; a study compares at least two"),
        ({"axes": {"model.router": ["top2", "top2"]}}, "[axes] model.router: a value is given twice"),
        ({"axes": {"router": ["top2", "hash"]}}, "include the table, such as"),
        ({"arms": {"x" * 201: {"model": {"layers": 1}}}}, "its name has 201 letters; the limit is 200"),
        ({"arms": {"x": {"modle": {}}}}, "[arms.x]: unknown key 'modle'; did you mean 'model'?"),
        ({"arms": {"top2": {"model": {"layers": 3}}}}, "two different arms are called 'top2'"),
        (
            {"arms": {"x": {"model": {"router": "hash"}}, "y": {"model": {"router": "hash"}}}},
            "arms 'x' and 'y' are the same training",
        ),
        (
            {"arms": {"a b": {"model": {"layers": 1}}, "A_b": {"model": {"layers": 2}}}},
            "arms 'a b' and 'A_b' would share a folder",
        ),
        ({"arms": {"x": {"data": {"max_bytes": 9}}}}, "differ in [data], so their losses are not comparable"),
        ({"ablations": "hash"}, "unknown router of ablations in study 'hash'; known: spectra, some"),
    ],
)
def test_what_cannot_be_studied_is_refused_in_one_line_that_names_it(changes, message):
    given = {"reference": "top2", "axes": ROUTERS, **changes}
    with pytest.raises(BadInput) as caught:
        study_from({key: value for key, value in given.items() if value is not None})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [("[arms\n", "is not valid TOML"), (None, "No such file")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, message: str):
    path = tmp_path / "study.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match=message):
        read_study(path)


def test_equal_settings_are_two_arms_only_where_an_axis_of_the_study_itself_tells_them_apart():
    arms = {rows: {"model": {"router": "hash"}, "axes": {"rows": rows}} for rows in ("kept", "new")}
    assert [arm.name for arm in study_from({"reference": "kept", "arms": arms}).arms] == ["kept", "new"]
    del arms["kept"]["axes"]
    with pytest.raises(BadInput, match="the same training"):
        study_from({"reference": "kept", "arms": arms})
    with pytest.raises(BadInput, match="the same training"):
        made(arms={"mine": {"model": {"router": "loss_free"}}})  # the list of routers has it
