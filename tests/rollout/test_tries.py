"""Tries of token ids, and how their rows are parted."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.rollout.tries import build_trie, partition
from covey.types import IntArray

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=16)


def numbered(lists: list[list[int]]) -> dict[int, IntArray]:
    return {row: np.array(ids) for row, ids in enumerate(lists)}


def prefixes(lists: list[list[int]]) -> int:
    return len({tuple(ids[:n]) for ids in lists for n in range(1, len(ids) + 1)})


def test_the_trie_of_the_docstring() -> None:
    root = build_trie(numbered([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]]))
    found = [(node.begin, node.end, node.ending, node.size) for node in root.nodes()]
    assert found == [(0, 0, [], 6), (0, 2, [], 6), (2, 3, [], 3), (3, 4, [0], 1), (3, 4, [1], 1), (2, 3, [2], 1)]


def test_ids_beyond_a_byte_and_sequences_that_begin_others() -> None:
    root = build_trie(numbered([[256, 1], [256], [1], [256, 1], [70_000]]))
    assert root.size == 4
    assert [(child.source, child.ending) for child in root.children] == [(1, [1]), (2, [2]), (4, [4])]
    assert root.children[0].children[0].ending == [0, 3]


@settings(max_examples=300, deadline=None)
@given(sequences)
def test_as_many_tokens_as_there_are_different_beginnings(lists: list[list[int]]) -> None:
    root = build_trie(numbered(lists))
    assert root.size == prefixes(lists) == sum(node.length for node in root.nodes())
    assert sorted(row for node in root.nodes() for row in node.ending) == list(range(len(lists)))
    for node in root.nodes():
        for row in node.ending:
            assert len(lists[row]) == node.end
        starts = [lists[child.source][child.begin] for child in node.children]
        assert len(starts) == len(set(starts))


@settings(max_examples=300, deadline=None)
@given(sequences, st.integers(1, 40))
def test_parts_keep_the_budget_and_hold_every_row_once(lists: list[list[int]], budget: int) -> None:
    parts = partition(build_trie(numbered(lists)), budget)
    assert sorted(row for part in parts for row in part) == list(range(len(lists)))
    for part in parts:
        size = prefixes([lists[row] for row in part])
        assert size <= max(budget, max(len(lists[row]) for row in part))
    if prefixes(lists) <= budget:
        assert len(parts) == 1


def test_cuts_repeat_what_is_least() -> None:
    """Two trees of 4 + 3 x 3 tokens share 2; with room for 15 each stays whole, and only the 2 are repeated."""
    lists = [[0, 0, *[tree] * 4, *[leaf] * 3] for tree in (1, 2) for leaf in (3, 4, 5)]
    assert prefixes(lists) == 28
    parts = partition(build_trie(numbered(lists)), 15)
    assert sorted(parts) == [[0, 1, 2], [3, 4, 5]]


def test_equal_rows_beyond_the_budget_are_one_part() -> None:
    assert partition(build_trie(numbered([[1] * 9, [2], [1] * 9, [1] * 5])), 4) == [[0, 2, 3], [1]]
