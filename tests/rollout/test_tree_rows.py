"""The rows of `benchmarks/trees.py`, by hand."""

import random
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks")]

from tree_rows import NAMES, Play, Row, count_prefill, count_tokens, first, forked, make  # noqa: E402

PLAY = Play(opening=[1, 2], said=[[], [5]], answers=[[3, 4], [6]], ask=[9], group=0)


def test_a_growing_row_has_all_turns_and_each_turn_repeats_the_history_without_the_asks() -> None:
    row, (one, two) = PLAY.growing(), PLAY.turns()
    assert (row.token_ids, row.inputs) == ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5])
    assert row.sampled == [False, False, True, True, False, True]
    assert (one.token_ids, one.inputs) == ([1, 2, 9, 3, 4], [1, 2, 9, 3])
    assert (two.token_ids, two.inputs) == ([1, 2, 3, 4, 5, 9, 6], [1, 2, 3, 4, 5, 9])


def test_inputs_are_counted_raw_and_once_and_prefill_but_for_what_has_been_decoded() -> None:
    # inputs 1 2 9 3 and 1 2 3 4 5 9: the second adds 3 4 5 9; the last row's are a beginning of the first's
    assert count_tokens([*PLAY.turns(), Row([1, 2, 7], [False, False, True], 1)]) == (4 + 6 + 2, 4 + 4)
    # the last token of a turn has been sampled and not computed: 1 2 4 5
    assert count_prefill([PLAY.growing()]) == count_prefill([PLAY.growing(), PLAY.growing()]) == 4
    assert count_prefill(PLAY.turns()) == 3 + 4  # 1 2 9, then 3 4 5 9
    # first rows within a budget, and at least one
    assert [first(PLAY.turns(), tokens) for tokens in (1, 4, 9, 10)] == [1, 1, 1, 2]


@pytest.mark.parametrize("compression", [2, 4, 8, 16])
def test_forks_have_the_compression_they_are_named_for(compression: int) -> None:
    draw = random.Random(0)
    rows = forked(compression, 4, 3, lambda count: [draw.randrange(10**9) for _ in range(count)])
    raw, unique = count_tokens(rows)
    assert (raw, len(rows)) == (compression * unique, 3 * 2 * compression)


@pytest.mark.parametrize("name", NAMES)
def test_workloads_repeat_and_can_be_trained_on(name: str) -> None:
    workload = make(name, small=True)
    assert workload.rows == make(name, small=True).rows
    assert all(row.sampled[-1] and not row.sampled[0] for row in workload.rows)
