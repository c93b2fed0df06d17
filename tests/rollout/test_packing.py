"""Packs: tries of token ids, laid out so that no token is computed twice, and walked where they are too large."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.rollout.packing import Branch, Pack, TokenCounts, count_tokens, leave_of, pack_episodes
from covey.rollout.tries import Node, build_trie, partition
from covey.rollout.walking import Piece, pieces_of, walk
from covey.types import Episode, Support
from fakes import raises


def row_of(ids: list[int], sampled: list[bool], support: Support | None = None) -> Episode:
    return Episode(np.array(ids), np.array(sampled), np.zeros(len(ids), np.float32), "", "stop", 0, support)


def episode(prompt: list[int], *segments: list[int], support: Support | None = None) -> Episode:
    """A prompt, then sampled tokens, given ones, sampled ones, ..."""
    sampled = [n % 2 == 1 for n, segment in enumerate((prompt, *segments)) for _ in segment]
    return row_of(sum(segments, prompt), sampled, support)


def one_pack(*episodes: Episode, budget: int = 8192) -> Pack:
    (pack,) = pack_episodes(episodes, None, budget, whole_trees=True)
    return pack


def check_lists(pack: Pack | Piece, **expected: list[int]) -> None:
    assert {name: getattr(pack, name).tolist() for name in expected} == expected


PROMPT = [11, 12, 13, 14]
FOUR = [episode(PROMPT, [20 + n, 5, 5, 2]) for n in range(4)]  # 4 + 3 tokens each


def test_the_example_of_the_module_docstring() -> None:
    episodes = [episode(PROMPT, completion) for completion in ([21, 22, 2], [31, 2], [21, 23, 24])]
    pack = one_pack(*episodes)
    check_lists(
        pack,
        token_ids=[11, 12, 13, 14, 21, 22, 23, 31],
        position_ids=[0, 1, 2, 3, 4, 5, 5, 4],
        leave=[8, 8, 8, 8, 7, 6, 7, 8],
        score_at=[3, 3, 4, 4, 5, 6, 7],
        targets=[21, 31, 22, 23, 2, 24, 2],
        pair=[0, 2, 4, 1, 6, 0, 3, 5],
        row=[0, 0, 0, 1, 1, 2, 2, 2],
        column=[0, 1, 2, 0, 1, 0, 1, 2],
        rows=[0, 1, 2],
        first=[0, 3, 1, 6, 2, 7, 4],
    )
    assert pack.branches == (Branch(0, 6, -1, 0), Branch(6, 1, 0, 5), Branch(7, 1, 0, 4))
    assert ((pack.num_tokens, pack.num_targets), pack.path(6).tolist()) == ((8, 8), [0, 1, 2, 3, 4, 6])
    assert [ids.tolist() for ids in pack.sequences()] == [[*PROMPT, 21, 22], [*PROMPT, 31], [*PROMPT, 21, 23]]
    assert count_tokens(episodes, range(3), 8) == TokenCounts(raw=6 + 5 + 6, unique=8, computed=8)


def test_the_way_with_most_tokens_goes_on_in_its_branch_and_a_conversation_whose_turns_other_rows_leave() -> None:
    """Rows are long or short whatever their order, and one ends where others go on."""
    pack = one_pack(episode([1], [2, 3, 9]), episode([1], [2, 4, 5, 6, 9]), episode([1], [2, 9]))
    assert pack.branches == (Branch(0, 5, -1, 0), Branch(5, 1, 0, 2))
    check_lists(pack, token_ids=[1, 2, 4, 5, 6, 3], leave=[6, 6, 5, 5, 5, 6])
    assert pack.targets[pack.pair].tolist() == [2, 3, 9, 2, 4, 5, 6, 9, 2, 9]
    # two forks of one branch: what leaves last comes first, so that it lies inside what left before
    turns = [1, 2, 3, 4, 5, 6]
    ways = [(turns, [7, 0]), (turns[:2], [8, 8, 0]), (turns[:4], [9, 9, 0]), (turns[:4], [9, 5, 0])]
    pack = one_pack(*(episode(*way) for way in ways))
    assert pack.branches == (Branch(0, 7, -1, 0), Branch(7, 2, 0, 4), Branch(9, 1, 1, 1), Branch(10, 2, 0, 2))
    check_lists(pack, token_ids=[*turns, 7, 9, 9, 5, 8, 8], leave=[12, 12, 10, 10, 7, 7, 7, 10, 9, 10, 12, 12])


def test_rows_of_a_tree_stay_together_as_far_as_the_budget_lets_them_and_apart_where_nothing_is_shared() -> None:
    # Two that share more are not torn apart, in whatever order they come: 4 + 2 + 1 + 1 of 9 tokens.
    deep = [episode(PROMPT, [20 + n % 2, 5, n, 2]) for n in (0, 1, 2, 3)]
    for group, budget, rows, size in ((FOUR, 10, [[0, 1], [2, 3]], 10), (deep, 9, [[0, 2], [1, 3]], 8)):
        packs = pack_episodes(group, tokens_per_pack=budget)
        assert [(pack.rows.tolist(), pack.num_tokens) for pack in packs] == [(each, size) for each in rows]
    assert count_tokens(FOUR, range(4), 20) == TokenCounts(raw=28, unique=16, computed=20)
    # A sequence longer than the budget gets its own pack.
    packs = pack_episodes([episode([1], [2]), episode(PROMPT, [5] * 20), episode([2], [2])], tokens_per_pack=8)
    assert sorted(pack.rows.tolist() for pack in packs) == [[0, 2], [1]]
    assert max(pack.num_tokens for pack in packs) == 4 + 19
    # A tree that is to be walked is not cut.
    others = [episode([7], [8, 9]), episode([6], [8, 9])]
    packs = pack_episodes([*FOUR, *others], tokens_per_pack=10, whole_trees=True)
    assert sorted((pack.num_tokens, pack.rows.tolist()) for pack in packs) == [(4, [4, 5]), (16, [0, 1, 2, 3])]
    episodes = [episode([1, 2], said) for said in ([3], [4, 5, 6], [4, 5, 7])]
    packs = pack_episodes(episodes, tokens_per_pack=8, shared=False)
    assert [pack.rows.tolist() for pack in packs] == [[1, 2], [0]]
    assert packs[0].branches == (Branch(0, 4, -1, 0), Branch(4, 4, -1, 0))
    check_lists(packs[0], token_ids=[1, 2, 4, 5] * 2, targets=[4, 5, 6, 4, 5, 7], pair=[0, 1, 2, 3, 4, 5])
    assert [pack.num_padded for pack in packs] == [8, 2]


def test_only_the_chosen_rows_with_something_to_score_and_what_goes_between_them_and_the_batch() -> None:
    episodes = [episode([1], [2]), episode([1, 2, 3]), episode([1], [3])]
    (pack,) = pack_episodes(episodes, rows=[1, 2])
    assert (pack.rows.tolist(), pack_episodes(episodes, rows=[1])) == ([2], [])
    assert count_tokens(episodes, [1], 0) == TokenCounts(0, 0, 0)
    raises(ValueError, "tokens_per_pack=0", pack_episodes, [], tokens_per_pack=0)
    raises(ValueError, "first token is marked as sampled", pack_episodes, [episode([], [1, 2])])
    (pack,) = pack_episodes([episode([1], [2, 3]), episode([4], [5, 6, 7]), episode([4], [5, 8])], rows=[1, 2])
    into = np.zeros((3, 3))
    pack.put(np.array([5.0, 6.0, 8.0, 7.0])[pack.pair], into)  # of the distinct targets
    assert into.tolist() == [[0, 0, 0], [5, 6, 7], [5, 8, 0]]


def test_supports_are_those_of_the_targets_and_tell_them_apart() -> None:
    first = Support(ids=np.array([2, 9, 3]), offsets=np.array([0, 2, 3]))
    second = Support(ids=np.array([2, 9, 3, 4]), offsets=np.array([0, 2, 4]))
    episodes = [episode([1], [2, 3], support=support) for support in (first, second, first, None)]
    (pack,) = pack_episodes(episodes, rows=[1, 0, 2])
    check_lists(pack, targets=[2, 3, 3], pair=[0, 1, 0, 2, 0, 1])
    support = pack.support(episodes)
    assert support is not None
    assert (support.ids.tolist(), support.offsets.tolist()) == ([2, 9, 3, 3, 4], [0, 2, 3, 5])
    (without,) = pack_episodes(episodes, rows=[3])
    assert without.support(episodes) is None
    (mixed,) = pack_episodes(episodes, rows=[0, 3])
    assert mixed.targets.tolist() == [2, 2, 3, 3]
    raises(ValueError, "row 3 recorded no kept ids", mixed.support, episodes)


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
    return [row_of(ids, sampled) for ids, sampled in rows]


def inputs_of(one: Episode) -> list[int]:
    """What must be computed to score all sampled tokens of a row."""
    return [int(token) for token in one.token_ids[: np.max(np.flatnonzero(one.sampled), initial=0)]]


def count_heads(rows: list[list[int]]) -> int:
    """Different beginnings of rows: as many as a trie of them has tokens."""
    return len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


def check(packs: list[Pack], episodes: list[Episode]) -> None:
    """Each sampled token is in one place, and what predicts it sees its own past, and no more."""
    found: dict[tuple[int, int], int] = {}
    for pack in packs:
        rows = [inputs_of(episodes[row]) for row in pack.rows]
        assert count_heads(rows) == pack.num_tokens  # nothing is there twice
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
            assert pack.token_ids[sees[pack.score_at[pack.pair[s]]]].tolist() == episodes[row].token_ids[:at].tolist()
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
            before = -1
        else:
            parent = pack.branches[branch.parent]
            assert 1 <= branch.at < parent.length
            before = parent.start + branch.at - 1
        inside = pairwise([before, *range(branch.start, branch.stop)])
        ways += [(one, int(pack.token_ids[other])) for one, other in inside]
    assert len(set(ways)) == len(ways)


@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(1, 30))
def test_every_sampled_token_is_predicted_from_its_own_past(episodes: list[Episode], budget: int) -> None:
    packs = pack_episodes(episodes, tokens_per_pack=budget)
    check(packs, episodes)
    for pack in packs:
        assert pack.num_tokens <= max(budget, *(len(inputs_of(episodes[row])) for row in pack.rows))
    rows = [inputs_of(one) for one in episodes]
    counts = count_tokens(episodes, range(len(episodes)), sum(pack.num_tokens for pack in packs))
    assert counts.raw == sum(map(len, rows))
    assert counts.unique == count_heads(rows) <= counts.computed <= counts.raw
    assert len(packs) <= 1 or counts.unique > budget
    # whole trees repeat nothing
    packs = pack_episodes(episodes, tokens_per_pack=budget, whole_trees=True)
    check(packs, episodes)
    assert sum(pack.num_tokens for pack in packs) == counts.unique
    for pack in packs:
        assert pack.num_tokens <= budget or sum(branch.parent < 0 for branch in pack.branches) == 1


def trie_of(lists: list[list[int]]) -> Node:
    return build_trie({row: np.array(ids) for row, ids in enumerate(lists)})


def test_the_trie_of_the_docstring_and_cuts_repeat_what_is_least_and_tear_no_equal_rows() -> None:
    root = trie_of([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]])
    found = [(node.begin, node.end, node.ending, node.size) for node in root.nodes()]
    assert found == [(0, 0, [], 6), (0, 2, [], 6), (2, 3, [], 3), (3, 4, [0], 1), (3, 4, [1], 1), (2, 3, [2], 1)]
    # ids beyond a byte, and sequences that begin others
    root = trie_of([[256, 1], [256], [1], [256, 1], [70_000]])
    assert root.size == 4
    assert [(child.source, child.ending) for child in root.children] == [(1, [1]), (2, [2]), (4, [4])]
    assert root.children[0].children[0].ending == [0, 3]
    # two trees of 4 + 3 x 3 tokens share 2; with room for 15 each stays whole, and only the 2 are repeated
    lists = [[0, 0, *[tree] * 4, *[leaf] * 3] for tree in (1, 2) for leaf in (3, 4, 5)]
    assert (count_heads(lists), sorted(partition(trie_of(lists), 15))) == (28, [[0, 1, 2], [3, 4, 5]])
    assert partition(trie_of([[1] * 9, [2], [1] * 9, [1] * 5]), 4) == [[0, 2, 3], [1]]


@st.composite
def forests(draw: st.DrawFn) -> Pack:
    """Rows over two tokens, which share much."""
    rows = []
    for _ in range(draw(st.integers(1, 14))):
        ids = [0, *draw(st.lists(st.integers(0, 1), min_size=1, max_size=14))]
        sampled = [False, *draw(st.lists(st.booleans(), min_size=len(ids) - 2, max_size=len(ids) - 2)), True]
        rows.append(row_of(ids, sampled))
    return one_pack(*rows)


def chain_of(piece: Piece, token: int) -> tuple[list[int], int]:
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
    seen, scored, rows = [], [], []

    def visit(piece: Piece, path: list[int]) -> None:
        assert piece.past == len(path)
        spelled = []
        leave, others = leave_of(piece.branches, len(piece.token_ids)), np.arange(len(piece.token_ids))
        for token in range(len(piece.token_ids)):
            chain, above = chain_of(piece, token)
            assert chain == np.flatnonzero((others <= token) & (token < leave)).tolist()
            spelled.append((*path[:above], *piece.token_ids[chain].tolist()))
            assert len(spelled[-1]) - 1 == piece.position_ids[token]
        for number, at, target in zip(piece.scored, piece.score_at, piece.targets, strict=True):
            assert spelled[at] == tuple(pack.token_ids[pack.path(int(pack.score_at[number]))].tolist())
            assert target == pack.targets[number]
        seen.extend(spelled)
        scored.extend(piece.scored.tolist())
        rows.extend(piece.rows.tolist())
        assert len(piece.branches) == 1 or not piece.trunk
        assert len(piece.branches) == 1 or len(piece.token_ids) <= max(budget - piece.past, budget // 4)
        for follower in piece.followers:
            visit(follower, [*path, *piece.token_ids.tolist()])

    for piece in pieces_of(pack, budget):
        visit(piece, [])
    assert len(seen) == len(set(seen)) == pack.num_tokens
    assert (sorted(scored), sorted(rows)) == (list(range(len(pack.targets))), list(range(len(pack.rows))))


def test_a_prompt_with_large_completions_by_hand() -> None:
    """A prompt of 4 with two completions of 6, a budget of 10: the prompt, then a completion at a time."""
    (pack,) = pack_episodes([episode([1, 2, 3, 4], [10 * n] * 7) for n in (1, 2)], None, 10, whole_trees=True)
    assert pack.num_tokens == 16
    (trunk,) = pieces_of(pack, 10)
    assert trunk.branches == (Branch(0, 4, -1, 0),)
    check_lists(trunk, token_ids=[1, 2, 3, 4], targets=[10, 20], rows=[])
    followers = [(f.token_ids.tolist(), f.past, f.rows.tolist(), f.branches) for f in trunk.followers]
    assert followers == [([10 * n] * 6, 4, [n - 1], (Branch(0, 6, -1, 4),)) for n in (2, 1)]


@pytest.mark.parametrize("budget", [8, 8192])
def test_small_forks_of_a_long_run_are_run_together(budget: int) -> None:
    """A conversation of 20 tokens with a way out of 2 tokens at every fifth: the run, then all ways out at once."""
    run = list(range(100, 121))
    forks = [episode([*run[:n], 1, 2], [3]) for n in (5, 10, 15)]
    (trunk,) = pieces_of(one_pack(episode(run[:20], run[20:]), *forks, budget=budget), 24)
    (together,) = trunk.followers
    assert len(trunk.token_ids) == 20
    assert together.branches == (Branch(0, 2, -1, 15), Branch(2, 2, -1, 10), Branch(4, 2, -1, 5))
    assert together.position_ids.tolist() == [15, 16, 10, 11, 5, 6]


@pytest.mark.parametrize("budget", [8, 8192])
def test_a_thousand_forks_along_one_run(budget: int) -> None:
    """Deeper than Python's calls may be nested: each fork is followed by more than fits beside the run."""
    run = [0] * 2000
    forks = [episode([*run[: 2 * n], *[n] * 4], [9]) for n in range(1, 1000)]
    pack = one_pack(episode(run, [9]), *forks, budget=budget)
    entered, left = [], []
    walk(pieces_of(pack, 8), lambda piece: entered.append(piece.past), lambda piece, _: left.append(piece.past))
    assert len(entered) == len(left) > 1000
    assert (entered[0], left[-1], max(entered) > 1990) == (0, 0, True)


@pytest.mark.parametrize("budget", [40, 12])
def test_memory_follows_the_path_and_the_budget(budget: int) -> None:
    """A balanced tree of 2^6 leaves, two tokens a node: 254 tokens; never more than budget or path are kept."""
    paths = [[1 + (leaf >> level & 1) for level in range(6)] for leaf in range(64)]
    ids = [[0, 0, *(token for level, turn in enumerate(path) for token in (turn, 3 + level)), 9] for path in paths]
    (pack,) = pack_episodes([row_of(row, [False] * 14 + [True]) for row in ids], None, budget, whole_trees=True)
    assert pack.num_tokens == 2 * (2**7 - 1)

    def most(piece: Piece) -> int:
        return max([piece.past + len(piece.token_ids), *(most(follower) for follower in piece.followers)])

    assert max(most(piece) for piece in pieces_of(pack, budget)) <= max(budget, 14 + budget // 4)
