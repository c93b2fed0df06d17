"""Micro-batches hold every sampled token once, whatever the lengths, in few shapes with little padding."""

from __future__ import annotations

import numpy as np

from covey.jax.packing import MicroBatch, Shape, pack_rows, pack_step, sequence_length, shapes_for
from covey.types import Episode


def episode(prompt: np.ndarray, count: int, rng: np.random.Generator) -> Episode:
    ids = np.concatenate([prompt, rng.integers(4, 97, count)])
    sampled = np.arange(len(ids)) >= len(prompt)
    return Episode(ids, sampled, np.zeros(len(ids), np.float32), "", "stop", 1)


def test_shapes_are_those_that_a_run_may_need() -> None:
    assert shapes_for(66, 1024) == [Shape(2, 384)]
    assert shapes_for(900, 1024, multiple=4) == [Shape(8, 384), Shape(8, 512), Shape(4, 768), Shape(4, 1024)]
    assert shapes_for(50, 40) == [Shape(1, 48), Shape(1, 64)]  # the budget is smaller than a sequence


def test_the_example_of_the_module_docstring() -> None:
    ids = ([11, 12, 13, 14, 21, 22, 2], [11, 12, 13, 14, 31, 2], [11, 12, 13, 14, 21, 23, 24])
    episodes = [Episode(np.array(i), np.arange(len(i)) > 3, np.zeros(len(i), np.float32), "", "stop", 1) for i in ids]
    (part,) = pack_rows(episodes, range(3), [Shape(2, 9)])
    arrays = {name: array[0] for name, array in part.arrays.items()}
    assert arrays["tokens"].tolist() == [11, 12, 13, 14, 21, 22, 23, 31, 0]
    assert arrays["positions"].tolist() == [0, 1, 2, 3, 4, 5, 5, 4, 0]
    assert arrays["leave"].tolist() == [8, 8, 8, 8, 7, 6, 7, 8, 9]
    assert arrays["targets"][:8].tolist() == [21, 31, 22, 23, 2, 24, 2, 0]
    assert arrays["score_at"][:8].tolist() == [3, 3, 4, 4, 5, 6, 7, 0]
    assert arrays["counts"] == 7
    assert arrays["place"][:3, :4].tolist() == [[0, 2, 4, 0], [1, 6, 0, 0], [0, 3, 5, 0]]
    assert arrays["exists"][:3, :4].sum(axis=1).tolist() == [3, 2, 3]
    assert part.arrays["leave"][1].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]  # an empty pack: each sees itself
    assert not part.arrays["exists"][1].any()
    assert part.rows[:4].tolist() == [0, 1, 2, -1]


def test_lengths_of_all_kinds_fill_what_is_computed() -> None:
    rng = np.random.default_rng(0)
    episodes = []
    for _ in range(12):
        prompt = rng.integers(4, 97, int(rng.integers(20, 200)))
        episodes += [episode(prompt, int(n), rng) for n in np.minimum(rng.geometric(1 / 150, 8), 800)]
    shapes = shapes_for(1000, 1024)
    parts = pack_rows(episodes, range(len(episodes)), shapes)
    assert {part.shape for part in parts} <= set(shapes)
    real = sum(pack.num_tokens for part in parts for pack in part.packs)
    assert real > 0.8 * sum(part.shape.rows * part.shape.width for part in parts)
    width = max(e.num_sampled for e in episodes)
    ids = np.zeros((len(episodes), width), np.int64)
    expected = np.zeros_like(ids)
    for row, one in enumerate(episodes):
        expected[row, : one.num_sampled] = one.token_ids[one.sampled]
    for part in parts:
        targets, place = part.arrays["targets"], part.arrays["place"]
        at = np.take_along_axis(targets, place.reshape(len(place), -1), axis=1).reshape(len(part.rows), -1)
        part.put(at, ids)
        np.testing.assert_array_equal(part.take(expected), np.where(part.arrays["exists"].reshape(at.shape), at, 0))
    np.testing.assert_array_equal(ids, expected)


def total(parts: list[MicroBatch]) -> int:
    return sum(pack.num_tokens for part in parts for pack in part.packs)


def test_packs_are_wider_where_a_tree_would_be_cut_too_often() -> None:
    """A conversation of 300 + 8 x 50 tokens, left by 4 rows of 12 tokens at each turn: 1,052 tokens in all."""
    rng = np.random.default_rng(0)
    path, episodes = rng.integers(4, 97, 300), []
    for _ in range(8):
        path = np.concatenate([path, rng.integers(4, 97, 50)])
        episodes += [episode(path, 12, rng) for _ in range(4)]
    sequence, rows = max(map(sequence_length, episodes)), range(32)
    assert sequence == 711
    narrow = pack_rows(episodes, rows, shapes_for(sequence, 1536))
    assert total(narrow) > 1.5 * (700 + 32 * 11)
    shapes, parts = pack_step(episodes, rows, sequence, 1536)
    assert shapes == [Shape(1, 1536)]
    assert total(parts) == 700 + 32 * 11
    shapes, parts = pack_step(episodes, rows, sequence, 512)  # no wider than the longest sequence needs
    assert [shape.width for shape in shapes] == [768]
    plain = [episode(prompt, 80, rng) for prompt in rng.integers(4, 97, (4, 60)) for _ in range(8)]
    shapes, parts = pack_step(plain, range(32), 139, 4096)
    assert shapes == shapes_for(139, 4096) == [Shape(10, 384)]
    assert total(parts) == total(pack_rows(plain, range(32), shapes)) == 4 * (2 * 60 + 8 * 79)
