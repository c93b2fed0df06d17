"""Who sees whom in a pack, as intervals, for kernels that take the whole pack at once.

Token k is seen by the queries `k <= q < leave[k]` (`covey.rollout.packing`): one test whether k is an ancestor of q,
whatever the tree. A token of the past, of which the branches that leave the path last come first, is seen by the first
so many queries, so it is the same test with 0 in the place of k. A sliding window is a second comparison, with what is
0 where there is none: the position from which on a query sees. So

    first[k] <= q < leave[k]   and   since[q] <= position[k]

is the mask of every pack, and what differs from pack to pack are four lists. Queries and keys are filled up to whole
blocks, the past by keys that nobody sees, the pack by trees of one token each, so that no query sees nothing.

A block of keys is *full* for a block of queries if each of them sees each of it, which the largest `first` and `since`
and the smallest `leave` and `position` decide. It is *partial* if some query sees some key. Let `a` be the first query
of a block, and k a key before `a` that one of the block sees: then `first[k] <= a < leave[k]`, so k is an ancestor of
`a`, and the queries of the block that see k but for the window are `a` up to `leave[k]`. Among these, the lowest
`since` decides. That takes the time and memory of the list of keys, for each block of queries; never those of the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.rollout.packing import Branch, leave_of, positions_of

Flags = NDArray[np.bool_]
Places = NDArray[np.int32]


def sees(query: Any, since: Any, first: Any, leave: Any, position: Any) -> Any:
    """Whether queries see keys, of arrays or tensors that broadcast; see the module docstring."""
    return (first <= query) & (query < leave) & (since <= position)


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """The mask of L queries and S keys: the past, and after it the pack, each filled up to whole blocks.

    Attributes:
        block: tokens of a block.
        first: `[S]`, int32 like the others.
        leave: `[S]`.
        position: `[S]`.
        since: `[L]`.
    """

    block: int
    first: Places
    leave: Places
    position: Places
    since: Places

    @classmethod
    def of(cls, branches: Sequence[Branch], past: int, window: int | None, block: int) -> Mask:
        """The mask of a pack.

        Args:
            branches: of the pack.
            past: tokens before it.
            window: a query sees keys at most `window - 1` positions back; None = all.
            block: tokens of a block. There are at least two of queries, and one more of keys.

        Raises:
            ValueError: of the branches without a parent, one leaves the past after one that comes before it.
        """
        roots = [branch for branch in branches if branch.parent < 0]
        at = np.array([branch.at for branch in roots])
        if (np.diff(at) > 0).any():
            raise ValueError(
                f"branches leave the past after {at.tolist()} tokens: those that leave it last come first in a pack"
            )
        length = branches[-1].stop
        before, behind = _filled(past, block, 1) - past, _filled(length, block, 2) - length
        starts = np.array([*(root.start for root in roots), length])
        seen_by = starts[np.searchsorted(-at, -np.arange(past))]  # the first of those that leave no later
        padding, own = np.arange(length, length + behind), np.arange(length)
        positions = positions_of(branches)
        nobody, none = np.zeros(before, np.int64), np.zeros(behind, np.int64)
        since = np.zeros(length, np.int64) if window is None else positions - window + 1
        lists = (
            (np.zeros(past, np.int64), nobody, own, padding),
            (seen_by, nobody, leave_of(branches, length), padding + 1),
            (np.arange(past), nobody, positions, none),
            (since, none),
        )
        return cls(block, *(np.concatenate(parts).astype(np.int32) for parts in lists))

    def dense(self) -> Flags:
        """`[L, S]` the mask itself, to compare with."""
        found: Flags = sees(
            np.arange(len(self.since))[:, None], self.since[:, None], self.first, self.leave, self.position
        )
        return found

    def blocks(self) -> tuple[Flags, Flags]:
        """`[L / block, S / block]` which blocks are partial, and which are full."""
        some = np.stack([self._seen_by(start) for start in range(0, len(self.since), self.block)])
        begin = np.arange(0, len(self.since), self.block)[:, None]
        first, leave, position, since = (
            x.reshape(-1, self.block) for x in (self.first, self.leave, self.position, self.since)
        )
        full: Flags = sees(begin, since.max(1)[:, None], first.max(1), leave.min(1) - self.block + 1, position.min(1))
        partial: Flags = some & ~full
        return partial, full

    def _seen_by(self, start: int) -> Flags:
        """`[S / block]` of which blocks of keys the block of queries from `start` on sees any."""
        own = len(self.first) - len(self.since) + start  # where these queries are keys
        lowest = np.minimum.accumulate(self.since[start : start + self.block])
        first, leave, position = (x[:own] for x in (self.first, self.leave, self.position))
        last = np.clip(leave - start, 1, self.block) - 1
        found = np.zeros(len(self.first), np.bool_)
        found[:own] = sees(start, lowest[last], first, leave, position)
        found[own] = True  # a token sees itself
        blocks: Flags = np.logical_or.reduce(found.reshape(-1, self.block), axis=1)
        return blocks


def _filled(tokens: int, block: int, least: int) -> int:
    return max(-(-tokens // block), least) * block
