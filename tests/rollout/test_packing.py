"""Packs: tries of token ids, laid out so that no token is computed twice, and walked where they are too large."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.rollout.packing import Branch, Pack, TokenCounts, count_tokens, leave_of, pack_episodes
from covey.rollout.tries import build_trie, partition
from covey.rollout.walking import Piece, pieces_of, walk
from covey.types import Episode, IntArray, Support


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
    episodes = [
        episode(PROMPT, (True, [21, 22, 2])),
        episode(PROMPT, (True, [31, 2])),
        episode(PROMPT, (True, [21, 23, 24])),
    ]
    (pack,) = pack_episodes(episodes)
    assert pack.token_ids.tolist() == [11, 12, 13, 14, 21, 22, 23, 31]
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 5, 4]
    assert pack.leave.tolist() == [8, 8, 8, 8, 7, 6, 7, 8]
    assert pack.branches == (Branch(0, 6, -1, 0), Branch(6, 1, 0, 5), Branch(7, 1, 0, 4))
    assert pack.score_at.tolist() == [3, 3, 4, 4, 5, 6, 7]
    assert pack.targets.tolist() == [21, 31, 22, 23, 2, 24, 2]
    assert pack.pair.tolist() == [0, 2, 4, 1, 6, 0, 3, 5]
    assert pack.row.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert pack.column.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert pack.rows.tolist() == [0, 1, 2]
    assert pack.first.tolist() == [0, 3, 1, 6, 2, 7, 4]
    assert (pack.num_tokens, pack.num_targets) == (8, 8)
    assert pack.path(6).tolist() == [0, 1, 2, 3, 4, 6]
    assert [ids.tolist() for ids in pack.sequences()] == [[*PROMPT, 21, 22], [*PROMPT, 31], [*PROMPT, 21, 23]]
    assert count_tokens(episodes, range(3), 8) == TokenCounts(raw=6 + 5 + 6, unique=8, computed=8)


def test_the_way_with_most_tokens_goes_on_in_its_branch() -> None:
    """Rows are long or short whatever their order, and one ends where others go on."""
    short, long = episode([1], (True, [2, 3, 9])), episode([1], (True, [2, 4, 5, 6, 9]))
    (pack,) = pack_episodes([short, long, episode([1], (True, [2, 9]))])
    assert pack.token_ids.tolist() == [1, 2, 4, 5, 6, 3]
    assert pack.branches == (Branch(0, 5, -1, 0), Branch(5, 1, 0, 2))
    assert pack.leave.tolist() == [6, 6, 5, 5, 5, 6]
    assert pack.targets[pack.pair].tolist() == [2, 3, 9, 2, 4, 5, 6, 9, 2, 9]


def test_a_conversation_whose_turns_other_rows_leave() -> None:
    """Two forks of one branch: what leaves last comes first, so that it lies inside what left before."""
    turns = [1, 2, 3, 4, 5, 6]
    episodes = [
        episode(turns, (True, [7, 0])),
        episode(turns[:2], (True, [8, 8, 0])),
        episode(turns[:4], (True, [9, 9, 0])),
        episode(turns[:4], (True, [9, 5, 0])),
    ]
    (pack,) = pack_episodes(episodes)
    assert pack.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 9, 9, 5, 8, 8]
    assert pack.branches == (Branch(0, 7, -1, 0), Branch(7, 2, 0, 4), Branch(9, 1, 1, 1), Branch(10, 2, 0, 2))
    assert pack.leave.tolist() == [12, 12, 10, 10, 7, 7, 7, 10, 9, 10, 12, 12]


def test_equal_rows_are_computed_once_and_scored_for_each() -> None:
    (pack,) = pack_episodes([episode(PROMPT, (True, [5, 6]))] * 3)
    assert pack.token_ids.tolist() == [*PROMPT, 5]
    assert pack.targets.tolist() == [5, 6]
    assert pack.pair.tolist() == [0, 1] * 3
    assert pack.row.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_token_that_is_sampled_in_one_row_and_given_in_another_is_one_token() -> None:
    (pack,) = pack_episodes([episode([1], (True, [2, 3])), episode([1, 2], (True, [3]))])
    assert pack.token_ids.tolist() == [1, 2]
    assert pack.targets.tolist() == [2, 3]
    assert pack.pair.tolist() == [0, 1, 1]


def test_models_that_cannot_share_get_each_row_by_itself() -> None:
    episodes = [episode([1, 2], (True, [3])), episode([1, 2], (True, [4, 5, 6])), episode([1, 2], (True, [4, 5, 7]))]
    packs = pack_episodes(episodes, tokens_per_pack=8, shared=False)
    assert [pack.rows.tolist() for pack in packs] == [[1, 2], [0]]
    assert packs[0].token_ids.tolist() == [1, 2, 4, 5] * 2
    assert packs[0].branches == (Branch(0, 4, -1, 0), Branch(4, 4, -1, 0))
    assert packs[0].targets.tolist() == [4, 5, 6, 4, 5, 7]
    assert packs[0].pair.tolist() == [0, 1, 2, 3, 4, 5]
    assert [pack.num_padded for pack in packs] == [8, 2]


def test_foreign_tokens_between_sampled_segments_are_inputs_but_no_targets() -> None:
    agent = episode([1, 2], (True, [5, 6]), (False, [7, 8, 9]), (True, [3]), (False, [4, 4]))
    (pack,) = pack_episodes([agent])
    # Trimmed after what predicts the last sampled token (3): the trailing observation is never computed.
    assert pack.token_ids.tolist() == [1, 2, 5, 6, 7, 8, 9]
    assert pack.targets.tolist() == [5, 6, 3]
    assert pack.score_at.tolist() == [1, 2, 6]
    assert pack.column.tolist() == [0, 1, 2]


def test_rows_of_a_tree_stay_together_as_far_as_the_budget_lets_them() -> None:
    group = [episode(PROMPT, (True, [20 + n, 5, 5, 2])) for n in range(4)]  # 4 + 3 tokens each
    packs = pack_episodes(group, tokens_per_pack=10)
    assert [pack.rows.tolist() for pack in packs] == [[0, 1], [2, 3]]
    assert [pack.num_tokens for pack in packs] == [10, 10]
    assert count_tokens(group, range(4), 20) == TokenCounts(raw=28, unique=16, computed=20)
    # Two that share more are not torn apart, in whatever order they come: 4 + 2 + 1 + 1 of 9 tokens.
    deep = [episode(PROMPT, (True, [20 + n % 2, 5, n, 2])) for n in (0, 1, 2, 3)]
    packs = pack_episodes(deep, tokens_per_pack=9)
    assert [pack.rows.tolist() for pack in packs] == [[0, 2], [1, 3]]
    assert [pack.num_tokens for pack in packs] == [8, 8]


def test_a_sequence_longer_than_the_budget_gets_its_own_pack() -> None:
    episodes = [episode([1], (True, [2])), episode(PROMPT, (True, [5] * 20)), episode([2], (True, [2]))]
    packs = pack_episodes(episodes, tokens_per_pack=8)
    assert sorted(pack.rows.tolist() for pack in packs) == [[0, 2], [1]]
    assert max(pack.num_tokens for pack in packs) == 4 + 19


def test_a_tree_that_is_to_be_walked_is_not_cut() -> None:
    group = [episode(PROMPT, (True, [20 + n, 5, 5, 2])) for n in range(4)]
    other = [episode([7], (True, [8, 9])), episode([6], (True, [8, 9]))]
    packs = pack_episodes([*group, *other], tokens_per_pack=10, whole_trees=True)
    assert sorted(pack.rows.tolist() for pack in packs) == [[0, 1, 2, 3], [4, 5]]
    assert sorted(pack.num_tokens for pack in packs) == [4, 16]


def test_only_the_chosen_rows_with_something_to_score() -> None:
    episodes = [episode([1], (True, [2])), episode([1, 2, 3]), episode([1], (True, [3]))]
    (pack,) = pack_episodes(episodes, rows=[1, 2])
    assert pack.rows.tolist() == [2]
    assert pack_episodes(episodes, rows=[1]) == []
    assert count_tokens(episodes, [1], 0) == TokenCounts(0, 0, 0)


def test_take_and_put_go_between_the_batch_and_a_pack() -> None:
    episodes = [episode([1], (True, [2, 3])), episode([4], (True, [5, 6, 7])), episode([4], (True, [5, 8]))]
    (pack,) = pack_episodes(episodes, rows=[1, 2])
    batch = np.array([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0]])
    assert pack.take(batch).tolist() == [3.0, 4.0, 5.0, 6.0, 7.0]
    into = np.zeros((3, 3))
    pack.put(np.array([5.0, 6.0, 8.0, 7.0])[pack.pair], into)  # of the distinct targets
    assert into.tolist() == [[0, 0, 0], [5, 6, 7], [5, 8, 0]]


def test_supports_are_those_of_the_targets_and_tell_them_apart() -> None:
    first = Support(ids=np.array([2, 9, 3]), offsets=np.array([0, 2, 3]))
    second = Support(ids=np.array([2, 9, 3, 4]), offsets=np.array([0, 2, 4]))
    ids = [2, 3]
    episodes = [
        episode([1], (True, ids), support=first),
        episode([1], (True, ids), support=second),
        episode([1], (True, ids), support=first),
        episode([1], (True, ids)),
    ]
    (pack,) = pack_episodes(episodes, rows=[1, 0, 2])
    assert pack.targets.tolist() == [2, 3, 3]
    assert pack.pair.tolist() == [0, 1, 0, 2, 0, 1]
    support = pack.support(episodes)
    assert support is not None
    assert support.ids.tolist() == [2, 9, 3, 3, 4]
    assert support.offsets.tolist() == [0, 2, 3, 5]
    (without,) = pack_episodes(episodes, rows=[3])
    assert without.support(episodes) is None
    (mixed,) = pack_episodes(episodes, rows=[0, 3])
    assert mixed.targets.tolist() == [2, 2, 3, 3]
    with pytest.raises(ValueError, match="row 3 recorded no kept ids"):
        mixed.support(episodes)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="tokens_per_pack=0"):
        pack_episodes([], tokens_per_pack=0)
    with pytest.raises(ValueError, match="first token is marked as sampled"):
        pack_episodes([episode([], (True, [1, 2]))])


@st.composite
def batches(draw: st.DrawFn) -> list[Episode]:
    """Rows of few ids, many of which begin as another row does: forks anywhere, equal rows, rows within rows."""
    tokens = st.integers(0, 2)
    segment = st.tuples(st.booleans(), st.lists(tokens, min_size=1, max_size=4))
    rows: list[tuple[list[int], list[bool]]] = []
    for _ in range(draw(st.integers(1, 9))):
        ids, sampled = draw(st.lists(tokens, min_size=1, max_size=3)), [False]
        if rows and draw(st.booleans()):
            ids, sampled = draw(st.sampled_from(rows))
            ids = ids[: draw(st.integers(1, len(ids)))]
        sampled = (sampled + [False] * len(ids))[: len(ids)]
        for is_sampled, more in draw(st.lists(segment, max_size=3)):
            ids, sampled = ids + more, sampled + [is_sampled] * len(more)
        rows.append((ids, sampled))
    return [
        episode(ids[:1], *((was, [token]) for token, was in zip(ids[1:], sampled[1:], strict=True)))
        for ids, sampled in rows
    ]


def inputs_of(one: Episode) -> list[int]:
    """What must be computed to score all sampled tokens of a row."""
    return [int(token) for token in one.token_ids[: np.max(np.flatnonzero(one.sampled), initial=0)]]


def heads(rows: list[list[int]]) -> set[tuple[int, ...]]:
    """What rows begin with, each once: as many as a trie of them has tokens."""
    return {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}


def check(packs: list[Pack], episodes: list[Episode]) -> None:
    """Each sampled token is in one place, and what predicts it sees its own past, and no more."""
    found: dict[tuple[int, int], int] = {}
    for pack in packs:
        rows = [inputs_of(episodes[row]) for row in pack.rows]
        assert len(heads(rows)) == pack.num_tokens  # nothing is there twice
        assert [ids.tolist() for ids in pack.sequences()] == rows
        index = np.arange(pack.num_tokens)
        sees = (index <= index[:, None]) & (index[:, None] < pack.leave)  # [query, key]
        for query in index:
            assert np.flatnonzero(sees[query]).tolist() == pack.path(query).tolist()
            assert pack.position_ids[query] == sees[query].sum() - 1
        check_branches(pack)
        distinct = {(int(at), int(token)) for at, token in zip(pack.score_at, pack.targets, strict=True)}
        assert len(distinct) == len(pack.targets) <= pack.num_tokens + len(pack.rows)
        assert (np.diff(pack.score_at) >= 0).all()
        assert sorted(set(pack.pair.tolist())) == list(range(len(pack.targets)))
        assert pack.pair[pack.first].tolist() == list(range(len(pack.targets)))
        for s in range(pack.num_targets):
            row, column = int(pack.rows[pack.row[s]]), int(pack.column[s])
            at = int(np.flatnonzero(episodes[row].sampled)[column])
            past = pack.token_ids[sees[pack.score_at[pack.pair[s]]]]
            assert past.tolist() == episodes[row].token_ids[:at].tolist()
            assert (row, column) not in found
            found[row, column] = int(pack.targets[pack.pair[s]])
    expected = {(n, t): int(token) for n, e in enumerate(episodes) for t, token in enumerate(e.token_ids[e.sampled])}
    assert found == expected


def check_branches(pack: Pack) -> None:
    """They lie one after the other, each after what it leaves, and no two go on from a place with the same token."""
    assert [branch.start for branch in pack.branches] == [0, *(branch.stop for branch in pack.branches)][:-1]
    assert pack.branches[-1].stop == pack.num_tokens
    ways = []
    for number, branch in enumerate(pack.branches):
        assert -1 <= branch.parent < number
        assert branch.length > 0
        if branch.parent < 0:
            assert branch.at == 0
            ways.append((-1, int(pack.token_ids[branch.start])))
        else:
            parent = pack.branches[branch.parent]
            assert 1 <= branch.at < parent.length
            ways.append((parent.start + branch.at - 1, int(pack.token_ids[branch.start])))
        inside = range(branch.start, branch.stop)
        ways += [(one, int(pack.token_ids[other])) for one, other in pairwise(inside)]
    assert len(set(ways)) == len(ways)


@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(1, 30))
def test_every_sampled_token_is_predicted_from_its_own_past(episodes: list[Episode], budget: int) -> None:
    packs = pack_episodes(episodes, tokens_per_pack=budget)
    check(packs, episodes)
    for pack in packs:
        longest = max(len(inputs_of(episodes[row])) for row in pack.rows)
        assert pack.num_tokens <= max(budget, longest)
    rows = [inputs_of(one) for one in episodes]
    counts = count_tokens(episodes, range(len(episodes)), sum(pack.num_tokens for pack in packs))
    assert counts.raw == sum(map(len, rows))
    assert counts.unique == len(heads(rows)) <= counts.computed <= counts.raw
    if counts.unique <= budget:
        assert len(packs) <= 1


@settings(max_examples=100, deadline=None)
@given(batches(), st.integers(1, 30))
def test_whole_trees_repeat_nothing(episodes: list[Episode], budget: int) -> None:
    packs = pack_episodes(episodes, tokens_per_pack=budget, whole_trees=True)
    check(packs, episodes)
    counts = count_tokens(episodes, range(len(episodes)), sum(pack.num_tokens for pack in packs))
    assert counts.computed == counts.unique
    for pack in packs:
        assert pack.num_tokens <= budget or sum(branch.parent < 0 for branch in pack.branches) == 1


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


def row_of(ids: list[int], sampled: list[bool]) -> Episode:
    return Episode(np.array(ids), np.array(sampled), np.zeros(len(ids), np.float32), "", "stop", 0)


@st.composite
def forests(draw: st.DrawFn) -> Pack:
    """Rows over two tokens, which share much."""
    rows = []
    for _ in range(draw(st.integers(1, 14))):
        ids = [0, *draw(st.lists(st.integers(0, 1), min_size=1, max_size=14))]
        sampled = [False, *draw(st.lists(st.booleans(), min_size=len(ids) - 2, max_size=len(ids) - 2)), True]
        rows.append(row_of(ids, sampled))
    (pack,) = pack_episodes(rows, None, 1 << 30)
    return pack


class Walk:
    """What the pieces of a pack hold, spelled out."""

    def __init__(self, pack: Pack, budget: int) -> None:
        self.pack, self.budget = pack, budget
        self.seen: list[tuple[int, ...]] = []
        self.scored: list[int] = []
        self.rows: list[int] = []
        for piece in pieces_of(pack, budget):
            self.visit(piece, [])

    def visit(self, piece: Piece, path: list[int]) -> None:
        assert piece.past == len(path)
        spelled = []
        leave = leave_of(piece.branches, piece.num_tokens)
        for token in range(piece.num_tokens):
            chain, seen = self.chain(piece, token)
            others = np.arange(piece.num_tokens)
            assert chain == np.flatnonzero((others <= token) & (token < leave)).tolist()
            spelled.append((*path[:seen], *piece.token_ids[chain].tolist()))
            assert len(spelled[-1]) - 1 == piece.position_ids[token]
        for number, at, target in zip(piece.scored, piece.score_at, piece.targets, strict=True):
            whole = self.pack.path(int(self.pack.score_at[number]))
            assert spelled[at] == tuple(self.pack.token_ids[whole].tolist())
            assert target == self.pack.targets[number]
        self.seen += spelled
        self.scored += piece.scored.tolist()
        self.rows += piece.rows.tolist()
        if piece.trunk:
            assert len(piece.branches) == 1
        elif len(piece.branches) > 1:
            assert piece.num_tokens <= max(self.budget - piece.past, self.budget // 4)
        for follower in piece.followers:
            self.visit(follower, [*path, *piece.token_ids.tolist()])

    @staticmethod
    def chain(piece: Piece, token: int) -> tuple[list[int], int]:
        """The piece's tokens up to this one, and how many of the path come before them."""
        number = next(n for n, branch in enumerate(piece.branches) if branch.start <= token < branch.stop)
        chain, stop = [], token + 1
        while True:
            branch = piece.branches[number]
            chain = [*range(branch.start, stop), *chain]
            if branch.parent < 0:
                return chain, branch.at
            number, stop = branch.parent, piece.branches[branch.parent].start + branch.at


@settings(max_examples=300, deadline=None)
@given(forests(), st.integers(1, 40))
def test_every_token_target_and_row_is_in_one_piece_on_its_own_path(pack: Pack, budget: int) -> None:
    walk = Walk(pack, budget)
    assert len(walk.seen) == len(set(walk.seen)) == pack.num_tokens
    assert sorted(walk.scored) == list(range(len(pack.targets)))
    assert sorted(walk.rows) == list(range(len(pack.rows)))


def test_a_prompt_with_large_completions_by_hand() -> None:
    """A prompt of 4 with two completions of 6, a budget of 10: the prompt, then a completion at a time."""
    prompt = [1, 2, 3, 4]
    rows = [row_of([*prompt, *[10 * n] * 7], [False] * 4 + [True] * 7) for n in (1, 2)]
    (pack,) = pack_episodes(rows, None, 10, whole_trees=True)
    assert pack.num_tokens == 16
    (trunk,) = pieces_of(pack, 10)
    assert trunk.token_ids.tolist() == prompt
    assert trunk.branches == (Branch(0, 4, -1, 0),)
    assert trunk.targets.tolist() == [10, 20]
    assert trunk.rows.tolist() == []
    assert [(f.token_ids.tolist(), f.past, f.rows.tolist()) for f in trunk.followers] == [
        ([20] * 6, 4, [1]),
        ([10] * 6, 4, [0]),
    ]
    assert all(f.branches == (Branch(0, 6, -1, 4),) for f in trunk.followers)


def test_small_forks_of_a_long_run_are_run_together() -> None:
    """A conversation of 20 tokens with a way out of 2 tokens at every fifth: the run, then all ways out at once."""
    run = list(range(100, 121))
    rows = [row_of(run, [False] * 20 + [True])]
    rows += [row_of([*run[:n], 1, 2, 3], [False] * (n + 2) + [True]) for n in (5, 10, 15)]
    (pack,) = pack_episodes(rows, None, 8, whole_trees=True)
    (trunk,) = pieces_of(pack, 24)
    (together,) = trunk.followers
    assert trunk.num_tokens == 20
    assert together.branches == (Branch(0, 2, -1, 15), Branch(2, 2, -1, 10), Branch(4, 2, -1, 5))
    assert together.position_ids.tolist() == [15, 16, 10, 11, 5, 6]


def test_a_thousand_forks_along_one_run() -> None:
    """Deeper than Python's calls may be nested: each fork is followed by more than fits beside the run."""
    run = [0] * 2000
    rows = [row_of([*run, 9], [False] * 2000 + [True])]
    rows += [row_of([*run[: 2 * n], *[n] * 4, 9], [False] * (2 * n + 4) + [True]) for n in range(1, 1000)]
    (pack,) = pack_episodes(rows, None, 8, whole_trees=True)
    entered: list[int] = []
    left: list[int] = []
    walk(pieces_of(pack, 8), lambda piece: entered.append(piece.past), lambda piece, _: left.append(piece.past))
    assert len(entered) == len(left) > 1000
    assert entered[0] == left[-1] == 0
    assert max(entered) > 1990


@pytest.mark.parametrize(("budget", "kept"), [(40, 40), (12, 12)])
def test_memory_follows_the_path_and_the_budget(budget: int, kept: int) -> None:
    """A balanced tree of 2^6 leaves, two tokens a node: 254 tokens; never more than budget or path are kept."""
    rows = []
    for leaf in range(64):
        ids = [0, 0]
        for level in range(6):
            ids += [1 + (leaf >> level & 1), 3 + level]
        rows.append(row_of([*ids, 9], [False] * 14 + [True]))
    (pack,) = pack_episodes(rows, None, budget, whole_trees=True)
    assert pack.num_tokens == 2 * (2**7 - 1)

    def most(piece: Piece) -> int:
        return max([piece.past + piece.num_tokens, *(most(follower) for follower in piece.followers)])

    assert max(most(piece) for piece in pieces_of(pack, budget)) <= max(kept, 14 + budget // 4)
