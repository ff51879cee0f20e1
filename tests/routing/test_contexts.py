"""Places where an expert's gates are largest.

Those a look at everything would find, in any order, in bounded memory.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moescope.execution.documents import Document, Window, windows
from moescope.routing import token_sample as sample_module
from moescope.routing.collectors import keep_larger, largest_gates
from moescope.routing.token_sample import AFTER, BEFORE, MOST, Contexts, Sample, around, octave

LAYERS, EXPERTS, K = [3, 7], [6, 4], 2


def read(seed: int = 0, count: int = 200) -> list[tuple[Window, np.ndarray, np.ndarray]]:
    """Windows with random choices and gates.

    Those of the second layer have four experts and many equal gates.
    """
    generator = np.random.default_rng(seed)
    found = []
    for number in range(count):
        ids = generator.integers(0, 99, generator.integers(5, 40))
        for window in windows([Document(number, number % 2, ids)], 16):
            shape = (1, len(window.ids), K)
            chosen = np.concatenate([generator.integers(-1, n, shape) for n in EXPERTS])
            gates = np.concatenate([generator.random(shape), generator.integers(0, 3, shape) / 2]).astype(
                np.float32
            )
            found.append((window, chosen.astype(np.int16), gates))
    return found


def kept(parts, threshold: float = 1.0) -> dict[tuple[int, int], list[dict]]:
    contexts = Contexts(LAYERS, EXPERTS)
    for window, chosen, gates in parts:
        contexts.add(window, *best_of(chosen, gates))
    return by_expert(contexts, threshold)


def best_of(chosen: np.ndarray, gates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each expert's largest gate in a window and where it is first, token by token."""
    gate, position = (
        np.full((len(LAYERS), max(EXPERTS)), -np.inf, np.float32),
        np.zeros((len(LAYERS), max(EXPERTS)), int),
    )
    for layer, token, slot in np.ndindex(chosen.shape):
        expert = chosen[layer, token, slot]
        if expert >= 0 and gates[layer, token, slot] > gate[layer, expert]:
            gate[layer, expert], position[layer, expert] = gates[layer, token, slot], token
    return gate, position


def by_expert(contexts: Contexts, threshold: float) -> dict[tuple[int, int], list[dict]]:
    found: dict[tuple[int, int], list[dict]] = {}
    for layer, row in contexts.rows(threshold):
        found.setdefault((layer, row["expert"]), []).append(row)
    return found


def expected(parts, index: int, expert: int) -> list[tuple[float, float]]:
    """(gate, draw) by looking at everything.

    The best of each window, then the best five of them with different phrases.
    """
    best = []
    for window, chosen, gates in parts:
        mine = np.where(chosen[index] == expert, gates[index], -1).max(axis=1)
        if mine.max() >= 0:
            at = int(mine.argmax())
            best.append((float(mine[at]), window.draw, phrase(window.ids, at)))
    found: dict[tuple, tuple[float, float]] = {}
    for gate, draw, said in sorted(best, key=lambda place: (-place[0], place[1])):
        found.setdefault(said, (gate, draw))
    return list(found.values())[:MOST]


def phrase(ids: np.ndarray, at: int) -> tuple:
    return tuple(int(ids[i]) if 0 <= i < len(ids) else None for i in range(at - 4, at + 4))


def test_the_places_kept_are_those_a_look_at_everything_finds():
    parts = read()
    draws = {(window.number, window.start): window.draw for window, _, _ in parts}
    found = kept(parts)
    assert set(found) == {
        (layer, expert) for layer, n in zip(LAYERS, EXPERTS, strict=True) for expert in range(n)
    }
    for (layer, expert), rows in found.items():
        wanted = expected(parts, LAYERS.index(layer), expert)
        assert [row["rank"] for row in rows] == list(range(1, MOST + 1))
        got = [(row["gate"], draws[row["document"], row["position"] // 16 * 16]) for row in rows]
        assert got == wanted


def test_a_place_is_the_token_that_had_the_gate_with_its_neighbours():
    parts = read(1)
    windows_read = {(window.number, window.start): (window, chosen, gates) for window, chosen, gates in parts}
    for (layer, expert), rows in kept(parts).items():
        for row in rows:
            start = row["position"] // 16 * 16
            window, chosen, gates = windows_read[row["document"], start]
            at = row["position"] - start
            slot = chosen[LAYERS.index(layer), at] == expert
            assert gates[LAYERS.index(layer), at][slot].max() == pytest.approx(row["gate"])
            assert row["token_id"] == window.ids[at]
            assert row["before"] == window.ids[max(at - BEFORE, 0) : at].tolist()
            assert row["after"] == window.ids[at + 1 : at + 1 + AFTER].tolist()
            assert row["domain"] == window.domain


def test_neither_the_order_of_reading_nor_a_shrinking_sample_changes_them(monkeypatch):
    monkeypatch.setattr(sample_module, "MOST_TOKENS", 700)
    parts = read(2)

    def through(order):
        sample, contexts = Sample(LAYERS), Contexts(LAYERS, EXPERTS)
        for window, chosen, gates in order:
            if sample.wants(window):
                contexts.add(window, *best_of(chosen, gates))
            sample.add(window, chosen, window.ids, window.ids)
            contexts.keep_below(sample.threshold)
        return by_expert(contexts, sample.threshold), sample.threshold

    (forwards, threshold), (backwards, same) = through(parts), through(parts[::-1])
    assert threshold == same < 1
    assert forwards == backwards
    assert forwards == kept([part for part in parts if part[0].draw < threshold])
    assert forwards != kept(parts)


def test_the_same_text_twice_is_one_place():
    ids = np.arange(12)
    twice = [next(iter(windows([Document(number, 0, ids)], 16))) for number in (0, 1)]
    chosen, gates = np.zeros((2, 12, 1), np.int16), np.ones((2, 12, 1), np.float32)
    rows = kept([(window, chosen, gates) for window in twice])[3, 0]
    assert [(row["document"], row["position"]) for row in rows] == [(0, 0)]  # equal gates: the first token


def test_a_phrase_of_many_documents_is_one_place_with_its_largest_gate():
    generator = np.random.default_rng(4)
    parts, phrases = [], [np.arange(20), np.arange(50, 70)]
    for number in range(40):
        ids = np.concatenate([[90 + number], phrases[number % 2]])
        window = next(iter(windows([Document(number, 0, ids)], 32)))
        gates = np.zeros((2, 21, 1), np.float32)
        gates[:, 10] = generator.random()
        parts.append((window, np.zeros((2, 21, 1), np.int16), gates))
    for order in (parts, parts[::-1]):
        rows = kept(order)[3, 0]
        assert sorted(row["token_id"] for row in rows) == [9, 59]
        for row in rows:
            mine = [gates.max() for window, _, gates in parts if window.ids[10] == row["token_id"]]
            assert row["gate"] == pytest.approx(max(mine))


def test_an_expert_without_a_token_has_no_place():
    window = next(iter(windows([Document(0, 0, np.arange(5))], 16)))
    chosen, gates = np.full((2, 5, 1), -1, np.int16), np.full((2, 5, 1), np.nan, np.float32)
    assert kept([(window, chosen, gates)]) == {}


@pytest.mark.parametrize("passes", [[(0, 9)], [(0, 4), (4, 5), (5, 9)]])
def test_the_largest_gates_of_a_batch_are_found_pass_by_pass_as_by_hand(passes):
    generator = np.random.default_rng(5)
    rows, length = 3, 9
    real = np.arange(length) < np.array([[9], [6], [2]])  # padding on the right
    chosen = np.stack([generator.integers(-1, n, (rows, length, K)) for n in EXPERTS])
    gates = np.round(generator.random((2, rows, length, K)), 1).astype(
        np.float32
    )  # with equal ones among them
    largest = None
    for start, stop in passes:
        at = torch.from_numpy(np.flatnonzero(real[:, start:stop].reshape(-1)))
        layers = []
        for index in range(len(LAYERS)):
            flat = [
                torch.from_numpy(part[index, :, start:stop].reshape(-1, K))[at] for part in (chosen, gates)
            ]
            layers.append(largest_gates(*flat, at, (rows, stop - start), max(EXPERTS)))
        gate, column = (torch.stack(part).numpy() for part in zip(*layers, strict=True))
        largest = keep_larger(largest, gate, column + start)
    gate, position = largest
    for row in range(rows):
        n = int(real[row].sum())
        by_hand = best_of(chosen[:, row, :n], gates[:, row, :n])
        np.testing.assert_array_equal(gate[:, row], by_hand[0])
        there = np.isfinite(by_hand[0])
        np.testing.assert_array_equal(position[:, row][there], by_hand[1][there])


def test_octaves_halve_and_the_smallest_draw_has_one_too():
    assert [octave(draw) for draw in (0.99, 0.5, 0.499, 0.25, 0.0)] == [0, 0, 1, 1, 64]


def test_beyond_a_window_there_is_nothing():
    found = around(np.array([7, 8]), np.array([1]))[0]
    assert found.tolist() == [-1] * (BEFORE - 1) + [7, 8] + [-1] * AFTER
