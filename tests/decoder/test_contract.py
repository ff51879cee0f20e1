"""What every router promises, checked on every router in the list."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from decoder.tiny_lab import VOCABULARY, padding, run, text, tiny, train_step, trained
from moescope.decoder.model import LabModel
from moescope.decoder.routers import ROUTERS
from moescope.errors import BadInput
from moescope.routing.counts import Counts
from moescope.routing.metrics import DIAGNOSTICS, METRICS
from moescope.routing.monitor_capture import DiagnosticTally
from moescope.types import Tokens

EVERY = pytest.mark.parametrize("router", list(ROUTERS))
CAPPED = pytest.mark.parametrize(
    "router", [name for name, kind in ROUTERS.items() if "capacity_factor" in kind.OPTIONS]
)
LEARNING = pytest.mark.parametrize(
    ("router", "top_k"),
    [
        (name, k)
        for name, kind in ROUTERS.items()
        for k in (1, 2)
        if kind.learns_from_text and kind.fixed_top_k in (None, k)
    ],
)
NOTED = {
    "expert_choice": {"tokens_without_expert", "experts_per_token", "experts_per_token_spread"},
    "loss_free": {"bias_spread"},
    "spectra": {"column_error", "direction_overlap"},
    "some": {"key_cosine", "key_strength", "weakened_keys"},
}
MODELS: dict[str, LabModel] = {}


def model_of(router: str) -> LabModel:
    """One trained model a router for the whole file; tests that change it take a copy."""
    if router not in MODELS:
        MODELS[router] = trained(tiny(router)).eval()
    return MODELS[router]


def equal_where(sure: torch.Tensor, one, other) -> None:
    assert sure.float().mean() > 0.9, "too many tokens set aside to have checked anything"
    assert torch.equal(one.sets()[:, sure], other.sets()[:, sure])
    torch.testing.assert_close(one.logits[sure], other.logits[sure], rtol=0, atol=2e-5)


@EVERY
def test_in_evaluation_what_comes_later_changes_nothing_before(router):
    model, ids = model_of(router), text(6, 16)
    changed = ids.clone()
    changed[:, 9:] = (changed[:, 9:] + 7) % VOCABULARY
    before, after = run(model, ids), run(model, changed)
    sure = before.sure() & (torch.arange(16) < 9)[None]
    assert torch.equal(before.sets()[:, sure], after.sets()[:, sure])
    torch.testing.assert_close(before.logits[sure], after.logits[sure], rtol=0, atol=2e-5)
    assert not torch.allclose(before.logits[:, 9:], after.logits[:, 9:]), "the change was none"


@EVERY
def test_a_row_is_routed_alike_alone_and_in_a_batch(router):
    model, ids = model_of(router), text(6, 16)
    batch = run(model, ids)
    for row in range(len(ids)):
        alone = run(model, ids[row : row + 1])
        sure = batch.sure()[row : row + 1]
        assert torch.equal(alone.sets()[:, sure], batch.sets()[:, row : row + 1][:, sure])
        torch.testing.assert_close(alone.logits[0], batch.logits[row], rtol=0, atol=2e-5)


@EVERY
def test_reading_token_by_token_equals_the_full_pass(router):
    model, ids = model_of(router), text(3, 12)
    full, cache = run(model, ids), model.new_cache()
    steps = [run(model, ids[:, at : at + 1], cache=cache) for at in range(ids.shape[1])]
    sets = torch.cat([step.sets() for step in steps], 2)
    sure = full.sure()
    assert torch.equal(sets[:, sure], full.sets()[:, sure])
    torch.testing.assert_close(torch.cat([step.logits for step in steps], 1), full.logits, rtol=0, atol=2e-5)


@EVERY
def test_padding_has_no_expert_and_changes_nothing_for_real_tokens(router):
    model, ids, mask = model_of(router), text(6, 16), padding(6, 16)
    padded = run(model, ids, mask)
    assert not padded.sets()[:, ~mask].any()
    for routing in padded.layers:
        assert (routing.gates_TK[~mask.flatten()] == 0).all()
    equal_where(padded.sure() & mask | ~mask, *[erased(one, mask) for one in (padded, run(model, ids))])


def erased(made, mask):
    """The pass with everything at padding put to nothing, to be compared at real tokens only."""
    made.logits[~mask] = 0
    for routing in made.layers:
        routing.chosen_TK[~mask.flatten()] = -1
    return made


@EVERY
def test_in_training_padding_has_no_expert_either(router):
    mask = padding(6, 16)
    made = run(copy.deepcopy(model_of(router)).train(), text(6, 16), mask)
    assert not made.sets()[:, ~mask].any()
    assert made.sets()[:, mask].any()


@EVERY
@pytest.mark.parametrize("training", [False, True])
def test_gates_are_finite_not_negative_and_nothing_in_empty_slots(router, training):
    model = copy.deepcopy(model_of(router)).train(training)
    for routing in run(model, text(6, 16), padding(6, 16)).layers:
        assert torch.isfinite(routing.gates_TK).all()
        assert (routing.gates_TK >= 0).all()
        assert (routing.gates_TK[routing.chosen_TK < 0] == 0).all()
        assert (routing.gates_TK.sum(-1) <= routing.chosen_TK.shape[1]).all()
        if routing.scores_TE is not None:
            torch.testing.assert_close(routing.scores_TE.sum(-1), torch.ones(96))
        assert routing.chosen_TK.min() >= -1
        assert routing.chosen_TK.max() < routing.n_experts


@EVERY
def test_no_token_has_an_expert_twice(router):
    for training in (False, True):
        made = run(copy.deepcopy(model_of(router)).train(training), text(6, 16))
        filled = torch.stack([(routing.chosen_TK >= 0).sum(-1) for routing in made.layers])
        assert torch.equal(made.sets().sum(-1).flatten(1), filled)


@CAPPED
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
def test_capacity_is_hard_in_training_and_off_in_evaluation(router, factor):
    config, mask, ids = tiny(router, router_options={"capacity_factor": factor}), padding(6, 16), text(6, 16)
    model = trained(config, steps=1).train()
    capacity = math.ceil(factor * int(mask.sum()) * config.top_k / config.experts)
    loads = []
    for routing in run(model, ids, mask).layers:
        chosen = routing.chosen_TK[routing.chosen_TK >= 0]
        loads.append(torch.bincount(chosen, minlength=config.experts))
        assert loads[-1].max() <= capacity
        if routing.dropped_T is not None:
            kept = (routing.chosen_TK >= 0).sum(-1)
            assert torch.equal((kept + routing.dropped_T).view_as(mask), mask * config.top_k)
    if factor < 1:
        assert torch.stack(loads).max() == capacity, "nobody was ever full, so nothing was checked"
    if router != "expert_choice":  # which has no fixed number of experts a token
        assert (run(model.eval(), ids, mask).sets()[:, mask].sum(-1) == config.top_k).all()


@EVERY
def test_only_hash_and_dense_learn_nothing_and_they_have_nothing_to_learn(router):
    assert ROUTERS[router].learns_from_text == (router not in ("hash", "dense"))
    weights = [weight for router_ in model_of(router).routers for weight in router_.parameters()]
    assert bool(weights) == ROUTERS[router].learns_from_text


@LEARNING
def test_the_text_teaches_the_router_and_a_gate_alone_is_not_divided_by_itself(router, top_k):
    torch.manual_seed(0)
    model, ids = LabModel(tiny(router, top_k=top_k)).train(), text(6, 16)
    lm_loss = model(ids[:, :-1], targets_BL=ids[:, 1:]).lm_loss
    assert lm_loss is not None
    for router_ in model.routers:
        own = [parameter for parameter in router_.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(lm_loss, own, retain_graph=True, allow_unused=True)
        largest = max(float(gradient.abs().max()) for gradient in gradients if gradient is not None)
        assert largest > 1e-7


@EVERY
def test_a_saved_router_goes_on_as_it_was(router):
    """Everything that decides is in the state dict.

    The next passes and training steps are equal bit for bit.
    """
    model = copy.deepcopy(model_of(router)).train()
    torch.manual_seed(99)
    loaded = LabModel(model.config).train()
    loaded.load_state_dict(model.state_dict())
    for one in (model, loaded):
        optimiser = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
        torch.manual_seed(1)
        for seed in range(3):
            train_step(one, optimiser, text(6, 16, seed=seed))
        one.eval()
    assert torch.equal(run(model, text(3, 12)).logits, run(loaded, text(3, 12)).logits)
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


@EVERY
def test_evaluation_leaves_every_weight_bias_key_and_average_as_it_was(router):
    model = copy.deepcopy(model_of(router)).eval()
    before = copy.deepcopy(model.state_dict())
    for seed in range(3):
        run(model, text(6, 16, seed=seed), padding(6, 16))
        model.after_step()
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


@EVERY
def test_evaluation_between_micro_batches_is_not_learned_from(router):
    watched, alone = (copy.deepcopy(model_of(router)).train() for _ in range(2))
    for model, looks in ((watched, True), (alone, False)):
        torch.manual_seed(1)
        run(model, text(6, 16, seed=1))
        if looks:
            run(model.eval(), text(6, 16, seed=2))
            model.train()
        run(model, text(6, 16, seed=3))
        model.after_step()
    for name, value in alone.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name]), name


@EVERY
def test_who_says_to_be_causal_in_training_is_and_who_does_not_is_not(router):
    """On many tokens: what is not causal shows somewhere.

    Compared in the first layer, which sees embeddings alone.
    """
    ids = text(8, 48)
    changed = ids.clone()
    changed[:, 24:] = text(8, 24, seed=5)
    passes = []
    for given in (ids, changed):
        torch.manual_seed(1)
        passes.append(run(copy.deepcopy(model_of(router)).train(), given))
    earlier = torch.stack([made.sets()[:, :, :24] for made in passes])
    sure = passes[0].sure()[:, :24]
    assert torch.equal(earlier[0][:, sure], earlier[1][:, sure]) == ROUTERS[router].causal_in_training


@EVERY
def test_the_decision_is_one_that_all_tallies_take(router):
    model, ids, mask = model_of(router), text(6, 16), padding(6, 16)
    nothing = torch.zeros(ids.numel(), dtype=torch.long)
    tokens = Tokens(6, ids.flatten(), mask.flatten(), nothing, torch.arange(16).repeat(6), nothing, nothing)
    made = run(model, ids, mask)
    counter = Counts()
    for routing in made.layers:
        counter.consume(type(routing)(**{**vars(routing), "tokens": tokens}))
    for layer, counts in enumerate(counter.layers()):
        assert counts.counts_MBE.sum((0, 1)).tolist() == made.sets()[layer].flatten(0, 1).sum(0).tolist()


@EVERY
def test_a_training_step_never_waits_for_a_number_from_the_device(router):
    """Fake tensors have shapes and no numbers: whoever asks for one fails."""
    with FakeTensorMode():
        model = LabModel(tiny(router)).train()
        ids = torch.zeros(6, 16, dtype=torch.long)
        with torch.autocast(
            "cpu", torch.bfloat16
        ):  # as on a GPU, where the grouped product takes nothing else
            out = model(ids, torch.ones(6, 16, dtype=torch.bool), ids)
        out.loss.backward()
        torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], foreach=False, capturable=False
        ).step()
        model.after_step()


def test_evaluation_that_does_wait_shows_that_fake_tensors_tell():
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16), pytest.raises(DataDependentOutputException):
        LabModel(tiny("expert_choice")).eval()(torch.zeros(6, 16, dtype=torch.long))


@EVERY
def test_notes_are_numbers_of_the_glossary_that_carry_no_gradient_and_are_added_up_without_a_wait(router):
    with FakeTensorMode():
        model, tally = LabModel(tiny(router)).train(), DiagnosticTally()
        layers = []
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.zeros(6, 16, dtype=torch.long), consume=layers.append)
        for _ in range(2):
            tally.add([(routing.layer, routing.diagnostics) for routing in layers])
    assert set(layers[0].diagnostics) == NOTED.get(router, set())
    for routing in layers:
        for note in routing.diagnostics.values():
            told = [part for part in note if isinstance(part, torch.Tensor)]
            assert all(
                part.shape == () and part.dtype == torch.float32 and not part.requires_grad for part in told
            )
            assert any(part is note.value for part in told)


def test_every_note_of_the_glossary_is_some_router_s_and_none_is_a_metric_of_all():
    assert set().union(*NOTED.values()) == set(DIAGNOSTICS)
    assert not set(DIAGNOSTICS) & set(METRICS)


@EVERY
def test_bfloat16_gives_the_same_logits_up_to_its_rounding(router):
    model, ids = model_of(router), text(3, 12)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = run(model, ids).logits.float()
    exact = run(model, ids).logits
    # A choice near a tie may fall otherwise, so not every token need agree.
    assert ((rounded - exact).abs().amax(-1) < 0.1 * exact.std()).float().mean() > 0.8
    assert not torch.equal(rounded, exact)


@pytest.mark.parametrize(
    ("router", "options", "message"),
    [
        ("some", {"beta": 0.1}, "router some: unknown option 'beta'"),
        ("some", {"temperature": 0.0}, "temperature must be more than 0"),
        ("some", {"decay": 1.0}, "decay must be at least 0 and below 1"),
        ("some", {"respawn": True, "frozen_keys": True}, "respawn needs decaying keys"),
        ("spectra", {"router_dim": 32}, "router_dim must be at least 64, not 32"),
        ("spectra", {"repulsion": "strong"}, "'strong'; known: between, published, none"),
        ("spectra", {"entropy_weight": float("nan")}, "entropy_weight must be 0 or more"),
        ("spectra", {"quota": "no"}, "quota must be true or false, not 'no'"),
        ("expert_choice", {"capacity_factor": 0.0}, "capacity_factor must be more than 0"),
        ("hash", {"of": "next"}, "unknown of of router hash 'next'; known:"),
    ],
)
def test_options_that_make_no_sense_are_rejected_by_name(router, options, message):
    with pytest.raises(BadInput) as error:
        LabModel(tiny(router, router_options=options))
    assert message in str(error.value)
