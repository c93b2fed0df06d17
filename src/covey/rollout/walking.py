"""A tree that is larger than memory, as pieces to be walked depth first.

    pack (a tree)            pieces                                     kept while a piece runs
    ──────────────┬────      trunk: the run down to a fork from which   all of the path above it: keys, values,
                  └──        more hangs than fits                       and what its backward needs
          ┬────────          followers: what hangs on the trunk, put
          └────────          together as the budget allows; and the
                             way on from the fork, a piece likewise

What is kept is always one path from the root, so that a follower's tokens at position p see the kept tokens at
positions `0..p-1` that are before its branch. A piece is run forward; then its followers, forward and backward, one
after the other; then the piece itself is run backward with what they left for its keys and values. No token is computed
twice, and memory follows the longest path and the budget, not the tree.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np

from covey.rollout.packing import Branch, Pack
from covey.types import IntArray

_SMALLEST = 4
"""Followers are put together to at least a fourth of the budget, also where the path leaves less."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some tokens of a pack that are run together: m tokens, which score u targets."""

    token_ids: IntArray  # `[m]`
    position_ids: IntArray  # `[m]`
    turns: IntArray  # `[m]` or `[3, m]`
    branches: tuple[Branch, ...]  # of the m tokens; one without a parent sees the kept path's first `at` tokens
    score_at: IntArray  # `[u]` which of the m tokens predicts
    targets: IntArray  # `[u]`
    past: int  # tokens of the path above
    scored: IntArray  # `[u]` which of the pack's U targets these are
    rows: IntArray  # rows of the pack whose last target is here
    followers: tuple[Piece, ...]  # what hangs on this piece, which is then one run of tokens, the path's next ones

    @property
    def trunk(self) -> bool:
        """Whether others follow it."""
        return bool(self.followers)


State = TypeVar("State")


def walk(pieces: Sequence[Piece], enter: Callable[[Piece], State], leave: Callable[[Piece, State], None]) -> None:
    """Visit pieces that follow nothing, and what follows them, depth first: `enter` is called with a piece before its
    followers, and `leave` after these with the piece and what `enter` has returned.
    """
    waiting: list[tuple[Piece, tuple[State] | None]] = [(piece, None) for piece in reversed(pieces)]
    while waiting:
        piece, entered = waiting.pop()
        if entered is not None:
            leave(piece, *entered)
            continue
        waiting.append((piece, (enter(piece),)))
        waiting += [(follower, None) for follower in reversed(piece.followers)]


def pieces_of(pack: Pack, budget: int) -> list[Piece]:
    """The pieces of a pack's trees, each with what follows it; `budget` is the most tokens of a piece together with the
    path above it, where the path leaves room.
    """
    roots = [number for number, branch in enumerate(pack.branches) if branch.parent < 0]
    return _Cutter(pack, budget).hanging(roots, 0)


class _Cutter:
    def __init__(self, pack: Pack, budget: int) -> None:
        self._pack, self._budget = pack, budget
        self._leaving: list[list[int]] = [[] for _ in pack.branches]
        for number, branch in enumerate(pack.branches):
            if branch.parent >= 0:
                self._leaving[branch.parent].append(number)
        self._starts = [branch.start for branch in pack.branches]
        last = np.full(len(pack.rows), -1)
        np.maximum.at(last, pack.row, pack.score_at[pack.pair])  # where each row's last target is scored
        self._rows = np.argsort(last, kind="stable")
        self._last = last[self._rows]

    def hanging(self, numbers: Sequence[int], above: int) -> list[Piece]:
        """Pieces of branches that leave the path of `above` tokens: large ones by themselves, small ones together."""
        found: list[Piece] = []
        together: list[tuple[int, int]] = []
        held, room = 0, self._room(above)
        for number in numbers:
            whole = self._whole(number)
            size = whole[1] - whole[0]
            if size > room:
                found.append(self._along(number, 0))
                continue
            if together and held + size > room:
                found.append(self._piece(together, above))
                together, held = [], 0
            together.append(whole)
            held += size
        return found + ([self._piece(together, above)] if together else [])

    def _along(self, number: int, begin: int) -> Piece:
        """The piece that goes on along a branch from its token `begin`, with all that follows."""
        branch = self._pack.branches[number]
        trunks: list[tuple[tuple[int, int], int, list[int]]] = []  # where each lies, its depth, what leaves it
        last: Piece | None = None
        while begin < branch.length:
            first = branch.start + begin
            above, end = int(self._pack.position_ids[first]), int(self._pack.leave[first])
            if above + end - first <= self._budget:
                last = self._piece([(first, end)], above)
                break
            later = [other for other in self._leaving[number] if self._pack.branches[other].at > begin]
            room = self._room(above + branch.length - begin)
            sizes = {other: self._whole(other)[1] - self._whole(other)[0] for other in later}
            large = [self._pack.branches[other].at for other in later if sizes[other] > room]
            cut = min(large, default=branch.length)
            here = [other for other in later if self._pack.branches[other].at <= cut]
            trunks.append(((first, branch.start + cut), above, here))
            begin = cut
        for (first, stop), above, here in reversed(trunks):
            followers = self.hanging(here, above + stop - first)
            last = self._piece([(first, stop)], above, followers if last is None else [*followers, last])
        assert last is not None
        return last

    def _room(self, above: int) -> int:
        """Tokens that may run together below a path."""
        return max(self._budget - above, self._budget // _SMALLEST)

    def _whole(self, number: int) -> tuple[int, int]:
        """Where a branch lies with all that leaves it."""
        start = self._pack.branches[number].start
        return start, int(self._pack.leave[start])

    def _piece(self, ranges: Sequence[tuple[int, int]], past: int, followers: Sequence[Piece] = ()) -> Piece:
        """The tokens of some ranges of the pack, each of which has all that comes between its ends."""
        pack, ranges = self._pack, sorted(ranges)
        places = list(accumulate((stop - start for start, stop in ranges), initial=0))
        index = np.concatenate([np.arange(*each) for each in ranges])
        scored = _within(pack.score_at, ranges)
        return Piece(
            token_ids=pack.token_ids[index],
            position_ids=pack.position_ids[index],
            turns=pack.turns[..., index],
            branches=self._branches(ranges, places),
            score_at=np.searchsorted(index, pack.score_at[scored]),
            targets=pack.targets[scored],
            past=past,
            scored=scored,
            rows=np.sort(self._rows[_within(self._last, ranges)]),
            followers=tuple(followers),
        )

    def _branches(self, ranges: Sequence[tuple[int, int]], places: Sequence[int]) -> tuple[Branch, ...]:
        """The branches' parts in a piece."""
        found: list[Branch] = []
        numbers: dict[int, tuple[int, int]] = {}  # branch -> its number here, and where its part begins in it
        for (start, stop), place in zip(ranges, places, strict=False):
            first = bisect_right(self._starts, start) - 1
            for number in range(first, bisect_left(self._starts, stop)):
                branch = self._pack.branches[number]
                begin = max(start - branch.start, 0)
                parent, at = -1, int(self._pack.position_ids[branch.start + begin])
                if begin == 0 and branch.parent in numbers:
                    parent, cut = numbers[branch.parent]
                    at = branch.at - cut
                numbers[number] = (len(found), begin)
                length = min(stop, branch.stop) - branch.start - begin
                found.append(Branch(place + branch.start + begin - start, length, parent, at))
        return tuple(found)


def _within(places: IntArray, ranges: Sequence[tuple[int, int]]) -> IntArray:
    """Which of some ascending places lie in any of the ranges."""
    ends = [np.searchsorted(places, each) for each in ranges]
    return np.concatenate([np.arange(first, last) for first, last in ends])
