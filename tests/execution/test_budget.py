"""A token budget is shared evenly by domains and documents, whatever their order and size."""

from __future__ import annotations

import gc
import itertools
from functools import partial

import numpy as np
import pytest

from moescope.execution import documents
from moescope.execution.documents import deal, spread_tokens


def dealt_one_by_one(sizes: list[int], tokens: int) -> list[int]:
    shares = [0] * len(sizes)
    while tokens and shares != sizes:
        for index, size in enumerate(sizes):
            if shares[index] < size and tokens:
                shares[index] += 1
                tokens -= 1
    return shares


def test_dealing_equals_going_round_the_table():
    assert deal([1, 9, 5], 10) == [1, 5, 4]
    generator = np.random.default_rng(0)
    for _ in range(300):
        sizes = generator.integers(0, 12, generator.integers(1, 9)).tolist()
        tokens = int(generator.integers(0, 60))
        assert deal(sizes, tokens) == dealt_one_by_one(sizes, tokens)


def domain(*lengths: int, start: int = 0, opened: list | None = None):
    """Documents whose ids tell document and position; `opened` notes (document, tokens asked for)."""

    def prefix(number: int, length: int, most: int | None):
        if opened is not None:
            opened.append((number, most))
        return np.arange(start + 1000 * number, start + 1000 * number + length)[:most]

    return lambda: (partial(prefix, number, length) for number, length in enumerate(lengths))


def sizes(parts) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name, ids in parts:
        assert (np.diff(ids) == 1).all()
        assert ids[0] % 1000 == 0, "a document that is cut is a prefix"
        found.setdefault(name, []).append(len(ids))
    return found


def test_documents_of_a_domain_get_equal_shares_and_short_ones_leave_theirs_to_the_others():
    given = {"a": domain(100, 3, 100, 100), "b": domain(*[50] * 30)}
    assert sizes(spread_tokens(given, 120)) == {"a": [19, 3, 19, 19], "b": [3] * 20}


def test_what_a_small_domain_cannot_use_goes_to_the_others():
    given = {
        "large": domain(*[100] * 25),
        "small": domain(5, 5),
        "middle": domain(*[10] * 6),
        "none": domain(),
    }
    found = sizes(spread_tokens(given, 400))
    assert {name: sum(parts) for name, parts in found.items()} == {"large": 330, "small": 10, "middle": 60}
    assert sum(map(sum, sizes(spread_tokens(given, 10**6)).values())) == 2500 + 10 + 60, "all there is"


def test_the_order_of_domains_changes_no_token():
    given = {"x": domain(70, 40, 9), "y": domain(*[30] * 40, start=10**6), "z": domain(8, start=2 * 10**6)}
    found = []
    for names in itertools.permutations(given):
        parts = spread_tokens({name: given[name] for name in names}, 101)
        found.append(sorted(np.concatenate([ids for _, ids in parts]).tolist()))
    assert len(found[0]) == 101
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize(("tokens", "documents"), [(40, 20), (2000, 20), (12_800, 100), (10**6, 256)])
def test_a_large_domain_is_not_read_to_its_end_nor_its_documents_to_theirs(tokens, documents):
    opened: list[tuple[int, int]] = []
    found = sizes(spread_tokens({"a": domain(*[10**5] * 5000, opened=opened)}, tokens))["a"]
    assert sum(found) == tokens
    assert documents <= len(found) <= documents + 1
    assert len(opened) == len(found)
    assert sum(min(most, 10**5) for _, most in opened) < 7 * tokens  # 1 + 1/2 + ... + 1/256 = 6.1


def test_ids_beyond_the_memory_limit_lie_in_a_file_and_are_the_same(monkeypatch):
    given = {"a": domain(*range(1, 400)), "b": domain(*[20] * 50)}
    before = [(name, ids.tolist()) for name, ids in spread_tokens(given, 5000)]
    monkeypatch.setattr(documents, "IN_MEMORY", 64)
    assert [(name, ids.tolist()) for name, ids in spread_tokens(given, 5000)] == before
    abandoned = spread_tokens(given, 5000)
    next(abandoned)
    del abandoned  # an unclosed file would be a warning, here an error
    gc.collect()


@pytest.mark.parametrize("between", [" ", "", "\n\n"])
def test_the_tokens_of_a_prefix_are_the_first_tokens_of_the_text(between):
    """By the demo's byte-level BPE, also in a text without a space, where all is one word."""
    from transformers import AutoTokenizer

    from moescope.demo.verb import SHIPPED
    from moescope.execution.documents import tokenize
    from moescope.execution.models import TracedModel

    class Counting:
        def __init__(self, tokenizer):
            self.tokenizer, self.characters = tokenizer, 0

        def __call__(self, text, **options):
            self.characters += len(text)
            return self.tokenizer(text, **options)

    tokenizer = Counting(AutoTokenizer.from_pretrained(SHIPPED / "model"))
    traced = TracedModel("demo", None, None, tokenizer, "cpu")
    words = np.random.default_rng(0).choice(
        np.array(["return", "self", "the", "x1", "(", "größer", "🙂"]), 60_000
    )
    text = between.join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TracedModel, "vocabulary", 10**6)
        complete = tokenize(traced, text, False)
        assert len(complete) > 50_000
        for most in (1, 7, 100, 1000, 20_000):
            tokenizer.characters = 0
            assert tokenize(traced, text, False, most).tolist() == complete[:most].tolist()
            assert tokenizer.characters <= 50 * (most + 64)
