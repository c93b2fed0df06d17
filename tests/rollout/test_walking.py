"""Trees cut into pieces that are walked depth first: every token once, each on the path that it follows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.rollout.packing import Branch, Pack, leave_of, pack_episodes
from covey.rollout.walking import Piece, pieces_of, walk
from covey.types import Episode


def episode(ids: list[int], sampled: list[bool]) -> Episode:
    return Episode(np.array(ids), np.array(sampled), np.zeros(len(ids), np.float32), "", "stop", 0)


@st.composite
def forests(draw: st.DrawFn) -> Pack:
    """Rows over two tokens, which share much."""
    rows = []
    for _ in range(draw(st.integers(1, 14))):
        ids = [0, *draw(st.lists(st.integers(0, 1), min_size=1, max_size=14))]
        sampled = [False, *draw(st.lists(st.booleans(), min_size=len(ids) - 2, max_size=len(ids) - 2)), True]
        rows.append(episode(ids, sampled))
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
    rows = [episode([*prompt, *[10 * n] * 7], [False] * 4 + [True] * 7) for n in (1, 2)]
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
    rows = [episode(run, [False] * 20 + [True])]
    rows += [episode([*run[:n], 1, 2, 3], [False] * (n + 2) + [True]) for n in (5, 10, 15)]
    (pack,) = pack_episodes(rows, None, 8, whole_trees=True)
    (trunk,) = pieces_of(pack, 24)
    (together,) = trunk.followers
    assert trunk.num_tokens == 20
    assert together.branches == (Branch(0, 2, -1, 15), Branch(2, 2, -1, 10), Branch(4, 2, -1, 5))
    assert together.position_ids.tolist() == [15, 16, 10, 11, 5, 6]


def test_a_thousand_forks_along_one_run() -> None:
    """Deeper than Python's calls may be nested: each fork is followed by more than fits beside the run."""
    run = [0] * 2000
    rows = [episode([*run, 9], [False] * 2000 + [True])]
    rows += [episode([*run[: 2 * n], *[n] * 4, 9], [False] * (2 * n + 4) + [True]) for n in range(1, 1000)]
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
        rows.append(episode([*ids, 9], [False] * 14 + [True]))
    (pack,) = pack_episodes(rows, None, budget, whole_trees=True)
    assert pack.num_tokens == 2 * (2**7 - 1)

    def most(piece: Piece) -> int:
        return max([piece.past + piece.num_tokens, *(most(follower) for follower in piece.followers)])

    assert max(most(piece) for piece in pieces_of(pack, budget)) <= max(kept, 14 + budget // 4)
