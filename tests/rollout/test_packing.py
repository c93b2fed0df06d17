"""Packs hold every prompt once and every scored token once, at the place that predicts it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.rollout.packing import Block, Pack, fill_packs, pack_episodes
from covey.types import Episode, Support


def episode(prompt: list[int], *segments: tuple[bool, list[int]], support: Support | None = None) -> Episode:
    """A prompt, then segments (sampled?, token ids)."""
    token_ids, sampled = list(prompt), [False] * len(prompt)
    for is_sampled, tokens in segments:
        token_ids += tokens
        sampled += [is_sampled] * len(tokens)
    return Episode(
        token_ids=np.array(token_ids, dtype=np.int64),
        sampled=np.array(sampled),
        logprobs=np.zeros(len(token_ids), np.float32),
        text="",
        finish_reason="stop",
        policy_version=0,
        support=support,
    )


PROMPT = [11, 12, 13, 14]


def test_the_example_of_the_module_docstring() -> None:
    (pack,) = pack_episodes([episode(PROMPT, (True, [21, 22, 2])), episode(PROMPT, (True, [31, 2]))])
    assert pack.token_ids.tolist() == [11, 12, 13, 14, 21, 22, 31]
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 4]
    assert pack.blocks == (Block(start=0, prefix_len=4, suffix_lens=(2, 1)),)
    assert pack.targets.tolist() == [21, 22, 2, 31, 2]
    assert pack.score_at.tolist() == [3, 4, 5, 3, 6]
    assert pack.row.tolist() == [0, 0, 0, 1, 1]
    assert pack.column.tolist() == [0, 1, 2, 0, 1]
    assert pack.rows.tolist() == [0, 1]
    assert (pack.num_tokens, pack.num_targets) == (7, 5)


def test_foreign_tokens_between_sampled_segments_are_inputs_but_no_targets() -> None:
    agent = episode([1, 2], (True, [5, 6]), (False, [7, 8, 9]), (True, [3]), (False, [4, 4]))
    (pack,) = pack_episodes([agent])
    # Trimmed after what predicts the last sampled token (3): the trailing observation is never computed.
    assert pack.token_ids.tolist() == [1, 2, 5, 6, 7, 8, 9]
    assert pack.targets.tolist() == [5, 6, 3]
    assert pack.score_at.tolist() == [1, 2, 6]
    assert pack.column.tolist() == [0, 1, 2]


def test_one_sampled_token_needs_no_suffix() -> None:
    (pack,) = pack_episodes([episode([1, 2], (True, [3])), episode([1, 2], (True, [4, 5]))])
    assert pack.blocks == (Block(0, 2, (0, 1)),)
    assert pack.score_at.tolist() == [1, 1, 2]


def test_equal_prefixes_are_shared_by_value_across_groups() -> None:
    episodes = [episode([1, 2], (True, [3])), episode([9], (True, [3])), episode([1, 2], (True, [4]))]
    (pack,) = pack_episodes(episodes)
    assert pack.token_ids.tolist() == [1, 2, 9]
    assert pack.rows.tolist() == [0, 2, 1]


def test_a_group_that_exceeds_the_budget_repeats_its_prefix() -> None:
    group = [episode(PROMPT, (True, [5, 5, 5, 2])) for _ in range(4)]  # 4 + 3 tokens each
    packs = pack_episodes(group, tokens_per_pack=10)
    assert [pack.rows.tolist() for pack in packs] == [[0, 1], [2, 3]]
    assert [pack.num_tokens for pack in packs] == [10, 10]


def test_a_sequence_longer_than_the_budget_gets_its_own_pack() -> None:
    episodes = [episode([1], (True, [2])), episode(PROMPT, (True, [5] * 20)), episode([2], (True, [2]))]
    packs = pack_episodes(episodes, tokens_per_pack=8)
    assert [pack.rows.tolist() for pack in packs] == [[0, 2], [1]]
    assert packs[1].num_tokens == 4 + 19


def test_whole_groups_fill_earlier_packs_first() -> None:
    episodes = [
        episode([1] * 4, (True, [2] * 3)),  # 6 tokens
        episode([2] * 6, (True, [2] * 3)),  # 8: does not fit beside the first
        episode([3] * 3, (True, [2] * 2)),  # 4: fits beside the first
    ]
    packs = pack_episodes(episodes, tokens_per_pack=10)
    assert [pack.rows.tolist() for pack in packs] == [[0, 2], [1]]


def test_only_the_chosen_rows_with_something_to_score() -> None:
    episodes = [episode([1], (True, [2])), episode([1, 2, 3]), episode([1], (True, [3]))]
    (pack,) = pack_episodes(episodes, rows=[1, 2])
    assert pack.rows.tolist() == [2]
    assert pack_episodes(episodes, rows=[1]) == []


def test_take_and_put_go_between_the_batch_and_a_pack() -> None:
    episodes = [episode([1], (True, [2, 3])), episode([4], (True, [5, 6, 7]))]
    (pack,) = pack_episodes(episodes, rows=[1])
    batch = np.array([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    assert pack.take(batch).tolist() == [3.0, 4.0, 5.0]
    into = np.zeros((2, 3))
    pack.put(np.array([7.0, 8.0, 9.0]), into)
    assert into.tolist() == [[0, 0, 0], [7, 8, 9]]


def test_support_follows_the_order_of_the_targets() -> None:
    first = Support(ids=np.array([2, 9, 3]), offsets=np.array([0, 2, 3]))
    second = Support(ids=np.array([5]), offsets=np.array([0, 1]))
    episodes = [
        episode([1], (True, [2, 3]), support=first),
        episode([4], (True, [5]), support=second),
        episode([4], (True, [5])),
    ]
    (pack,) = pack_episodes(episodes, rows=[1, 0])
    support = pack.support(episodes)
    assert support is not None
    assert support.ids.tolist() == [5, 2, 9, 3]
    assert support.offsets.tolist() == [0, 1, 3, 4]
    (without,) = pack_episodes(episodes, rows=[2])
    assert without.support(episodes) is None
    (mixed,) = pack_episodes(episodes, rows=[0, 2])
    with pytest.raises(ValueError, match="row 2 recorded no kept ids"):
        mixed.support(episodes)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="tokens_per_pack=0"):
        pack_episodes([], tokens_per_pack=0)
    with pytest.raises(ValueError, match="first token is marked as sampled"):
        pack_episodes([episode([], (True, [1, 2]))])


def sequence_of(pack: Pack, row: int) -> list[int]:
    """Input tokens of one row of a pack, put together from its block."""
    seen = 0
    for block in pack.blocks:
        start = block.start + block.prefix_len
        for length in block.suffix_lens:
            if seen == row:
                prefix = pack.token_ids[block.start : block.start + block.prefix_len]
                return [*prefix.tolist(), *pack.token_ids[start : start + length].tolist()]
            start += length
            seen += 1
    raise AssertionError(row)


@st.composite
def batches(draw: st.DrawFn) -> list[Episode]:
    tokens = st.integers(0, 2)  # few ids, so that prefixes often coincide
    segment = st.tuples(st.booleans(), st.lists(tokens, min_size=1, max_size=4))
    count = draw(st.integers(1, 6))
    return [
        episode(draw(st.lists(tokens, min_size=1, max_size=3)), *draw(st.lists(segment, max_size=3)))
        for _ in range(count)
    ]


@settings(max_examples=150, deadline=None)
@given(batches(), st.integers(1, 20))
def test_every_sampled_token_is_predicted_once_from_its_own_past(episodes: list[Episode], budget: int) -> None:
    packs = pack_episodes(episodes, tokens_per_pack=budget)
    assert all(pack.num_tokens <= budget or len(pack.rows) == 1 for pack in packs)
    check(packs, episodes)


@settings(max_examples=150, deadline=None)
@given(batches(), st.integers(15, 40), st.integers(1, 4))
def test_filled_packs_keep_both_limits(episodes: list[Episode], budget: int, most: int) -> None:
    packs = fill_packs(episodes, None, budget, most)
    assert all(pack.num_tokens <= budget and len(pack.rows) <= most for pack in packs)
    check(packs, episodes)


def test_a_pack_is_filled_where_that_saves_more_than_the_prefix_costs() -> None:
    three = [episode(prompt, (True, [21] * 5)) for prompt in ([11] * 4, [12] * 4, [13] * 4) for _ in range(3)]
    # three times 4 + 3 * 4 tokens, in two packs of 28, where the second prompt stands twice
    assert [pack.num_tokens for pack in fill_packs(three, None, 28, 9)] == [28, 24]
    # one row more would weigh 4, no more than its prompt
    assert [len(pack.rows) for pack in fill_packs(three, None, 24, 9)] == [3, 3, 3]
    with pytest.raises(ValueError, match="row 0: its 8 tokens are more than the 7 of a pack"):
        fill_packs(three, None, 7, 9)


def check(packs: list[Pack], episodes: list[Episode]) -> None:
    """Each sampled token is a target once, and what predicts it has its own past."""
    found: dict[tuple[int, int], int] = {}
    for pack in packs:
        assert sum(block.num_tokens for block in pack.blocks) == pack.num_tokens
        for s in range(pack.num_targets):
            row, column = int(pack.rows[pack.row[s]]), int(pack.column[s])
            inputs = sequence_of(pack, int(pack.row[s]))
            position = int(pack.position_ids[pack.score_at[s]])
            assert pack.token_ids[pack.score_at[s]] == inputs[position]
            at = int(np.flatnonzero(episodes[row].sampled)[column])
            assert inputs[: position + 1] == episodes[row].token_ids[:at].tolist()
            found[row, column] = int(pack.targets[s])
    expected = {(n, t): int(token) for n, e in enumerate(episodes) for t, token in enumerate(e.token_ids[e.sampled])}
    assert found == expected
