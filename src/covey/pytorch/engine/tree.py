"""Which keys and values are held: a tree of token sequences for one version of the weights.

    "You are in a house. Your task: " -- "find the key. You see a door."     (two levels at most)
                                      -- "find the book. ..."

A branch is a run of tokens that continues its parent's end, in one block of memory. What is asked for is looked up
token by token, whoever asks: a prompt that begins like another one, a later prompt that repeats an earlier one with
what was answered, a conversation that goes on. What is held of it is not computed again:

    it ends where a branch ends    that branch goes on in place if nobody else needs its end, else as a child
    it leaves a branch half way    the branch is cut there if little is lost, else its beginning is given to both
    it may not be a child          what is held is copied, at a hundredth of the time that computing it takes

Deeper trees would copy less, and attend to more parts in every decode step. Rows that run pin their path. Leaves that
nobody uses give way by least recent use, those of parked conversations last.

Nothing here looks at keys and values: a `Branch` says how many of its tokens have them (`filled`). The others are for
the next prefill pass, which makes the `copies` too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from covey.pytorch.engine.cache import Block, KVCache
from covey.rollout.tries import in_common
from covey.types import IntArray

_SHARED_TOKENS = 64
"""A shorter beginning is copied and not shared: attending to one more part costs every decode step."""
_KEPT_LOGITS = 64
"""Prompts and histories whose next logits are kept, for rows that begin with the same ones."""


@dataclass(slots=True, eq=False)
class Branch:
    """A run of held tokens."""

    token_ids: IntArray  # its own, at least one
    block: Block  # where their keys and values are
    parent: Branch | None = None  # what it continues, to its end
    at: int = 0  # tokens before it
    filled: int = 0  # how many of its tokens have keys and values, or get them by `Tree.copies`
    users: int = 0  # rows that run at its end, and copies to be made
    parked: int = 0  # rows at its end that may go on
    children: list[Branch] = field(default_factory=list)
    attached: bool = True  # it may be given to others
    broken: bool = False  # there may be values in it that are not finite
    used: int = 0  # when, by the tree's clock

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Tokens up to its end, those before it included."""
        return self.at + len(self.token_ids)

    @property
    def path(self) -> tuple[Branch, ...]:
        return (self,) if self.parent is None else (*self.parent.path, self)

    @property
    def idle(self) -> bool:
        """Nobody needs its end to stay where it is."""
        return not self.users and not self.children

    def tokens(self) -> IntArray:
        """`[end]` all tokens up to its end."""
        return np.concatenate([branch.token_ids for branch in self.path])


@dataclass(frozen=True, slots=True)
class Copy:
    """Tokens from `first` to `last`, counted from the path's beginning, of one branch for another."""

    source: Branch
    target: Branch
    first: int
    last: int


class Tree:
    """Branches of one version of the weights in a cache."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._holds = bool(cache.shapes)
        self._roots: list[Branch] = []
        self._logits: dict[bytes, Tensor] = {}  # after these tokens; the longest unused first
        self._clock = 0
        self.copies: list[Copy] = []

    def find(self, token_ids: IntArray) -> tuple[Branch | None, int]:
        """The branch that holds most of the beginning of `token_ids`, and how many of them are held."""
        found, held = self._deepest(self._roots, token_ids, 0)
        whole = found is not None and held == len(token_ids) == found.end
        return (found, held) if self._holds or whole else (None, 0)

    def _deepest(self, branches: Sequence[Branch], token_ids: IntArray, at: int) -> tuple[Branch | None, int]:
        best: Branch | None = None
        rank = (at, False, False)
        for branch in branches:
            found: Branch | None = branch
            held = at + in_common(branch.token_ids, token_ids[at:])
            if held == branch.end:
                deeper, further = self._deepest(branch.children, token_ids, held)
                found, held = (deeper, further) if deeper is not None else (branch, held)
            assert found is not None
            # of equally long beginnings a whole branch is best, then one that may be changed
            if held > at and (held, held == found.end, not found.children) > rank:
                best, rank = found, (held, held == found.end, not found.children)
        return best, rank[0]

    def take(self, token_ids: IntArray, found: tuple[Branch | None, int], *, hard: bool) -> tuple[Branch, int] | None:
        """A branch that ends with `token_ids`, for one more row, of which the next pass computes what is missing;
        `found` is what `find` says. With `hard` even what parked rows need may give way.
        """
        branch, held = found
        taken = self._take(token_ids, branch, held, hard)
        if taken is None and branch is not None:
            taken, held = self._take(token_ids, None, 0, hard), 0
        if taken is None:
            return None
        if held == len(token_ids) and taken.filled == taken.length and self.logits(token_ids) is None:
            taken.filled -= 1  # what comes next is asked for: the last token once more
            held -= 1
        taken.users += 1
        self._touch(taken)
        return taken, len(token_ids) - held

    def release(self, branch: Branch) -> None:
        """Note that one row less runs at the end of a branch."""
        branch.users -= 1
        if not self._holds and branch.idle:
            self._detach([branch])
        self._collect(branch)

    def append(self, branch: Branch, token_ids: IntArray) -> tuple[Branch, int]:
        """Room for what a row at the end of `branch` has sampled; the caller stores it."""
        if not len(token_ids) or not branch.attached or not self._holds:
            return branch, branch.length
        whole = np.concatenate([branch.tokens(), token_ids])
        found, held = self.find(whole)
        branch.users -= 1
        if found is not None and held == len(whole) == found.end:
            found.users += 1
            return found, found.length
        if branch.idle:
            grown: Branch | None = branch if self._lengthen(branch, token_ids, hard=False) else None
        elif branch.parent is None and branch.end >= _SHARED_TOKENS:
            grown = self._new(whole, branch, branch.end, hard=False)
        else:
            branch.users += 1
            grown = self._new(whole, branch.parent, branch.end, hard=False)
            branch.users -= 1
            if grown is not None:
                self._cache.copy(branch.block, 0, grown.block, 0, branch.length)
        (grown or branch).users += 1
        if grown is None:
            return branch, branch.length
        at = grown.length - len(token_ids)
        grown.filled = grown.length
        self._touch(grown)
        if grown is not branch:
            self._collect(branch)
        return grown, at

    def computed(self, branches: Sequence[Branch]) -> None:
        for branch in branches:
            branch.filled = branch.length
        copies, self.copies = self.copies, []
        for copy in copies:
            self.release(copy.source)

    def logits(self, token_ids: IntArray) -> Tensor | None:
        """`[V]` after these tokens, if they are kept."""
        key = token_ids.tobytes()
        found = self._logits.pop(key, None)
        if found is not None:
            self._logits[key] = found
        return found

    def keep_logits(self, token_ids: IntArray, logits: Tensor) -> None:
        """Remember the logits after these tokens for a while."""
        self._logits[token_ids.tobytes()] = logits.clone()  # a row: the whole pass's are not to be kept for it
        if len(self._logits) > _KEPT_LOGITS:
            del self._logits[next(iter(self._logits))]

    def moves(self, copy: Copy) -> Iterator[tuple[Block, int, Block, int, int]]:
        """A copy block by block: from a block at a place into another one at a place, and how many tokens."""
        for source in copy.source.path:
            for target in copy.target.path:
                first, last = max(copy.first, source.at, target.at), min(copy.last, source.end, target.end)
                if first < last:
                    yield source.block, first - source.at, target.block, first - target.at, last - first

    def renew(self) -> None:
        """The weights are new: rows that run keep what they have, nobody else gets it."""
        self._detach(self._roots)
        self._logits.clear()

    def discard(self, branch: Branch) -> None:
        """Values that are not finite have been found at the end of a path: nobody else gets any of it."""
        for part in branch.path:
            part.broken = True
        self._logits.clear()
        root = branch.path[0]
        if root.attached:
            self._detach([root])

    def _take(self, ids: IntArray, branch: Branch | None, held: int, hard: bool) -> Branch | None:
        if branch is None:
            return self._new(ids, None, 0, hard=hard)
        if held < branch.end:
            short = 4 * (branch.end - held) <= held and branch.end - held <= _SHARED_TOKENS
            if branch.idle and not branch.parked and held > branch.at and short:
                branch.token_ids = branch.token_ids[: held - branch.at]
                branch.filled = min(branch.filled, branch.length)
            else:
                leaf_root = branch.parent is None and not branch.children
                upper = self._split(branch, held, hard) if leaf_root and held >= _SHARED_TOKENS else None
                if upper is None:
                    return self._copied(ids, branch, held, hard)
                branch = upper
        if held == len(ids):
            return branch
        if branch.idle and branch.filled == branch.length:
            return branch if self._lengthen(branch, ids[held:], hard=hard) else None
        if branch.parent is None and held >= _SHARED_TOKENS:
            return self._new(ids, branch, held, hard=hard)
        return self._copied(ids, branch, held, hard)

    def _new(self, ids: IntArray, parent: Branch | None, held: int, *, hard: bool) -> Branch | None:
        """A branch for what follows the parent in `ids`; tokens before `held` are not for the pass."""
        at = 0 if parent is None else parent.end
        block = self._allocate(len(ids) - at, hard, parent)
        if block is None:
            return None
        branch = Branch(ids[at:].copy(), block, parent, at, filled=max(0, held - at))
        (self._roots if parent is None else parent.children).append(branch)
        return branch

    def _copied(self, ids: IntArray, source: Branch, held: int, hard: bool) -> Branch | None:
        """A branch beside `source`, with a copy of what is held of it."""
        source.users += 1
        branch = self._new(ids, source.parent, held, hard=hard)
        if branch is None:
            source.users -= 1
            return None
        self.copies.append(Copy(source, branch, branch.at, held))
        return branch

    def _lengthen(self, branch: Branch, more: IntArray, *, hard: bool) -> bool:
        """Let a branch go on in place, in a larger block if need be; False while there is no room."""
        length = branch.length + len(more)
        if length > branch.block.capacity:
            block = self._allocate(length, hard, branch)
            if block is None:
                return False
            self._cache.copy(branch.block, 0, block, 0, branch.filled)
            self._cache.release(branch.block)
            branch.block = block
        branch.token_ids = np.concatenate([branch.token_ids, more])
        return True

    def _split(self, branch: Branch, at: int, hard: bool) -> Branch | None:
        """Cut a root in two: its beginning, which is returned, and the rest as the beginning's child."""
        first = self._allocate(at, hard, branch)
        if first is None:
            return None
        second = self._allocate(branch.length - at, hard, branch)
        if second is None:
            self._cache.release(first)
            return None
        self._cache.copy(branch.block, 0, first, 0, min(at, branch.filled))
        self._cache.copy(branch.block, at, second, 0, branch.filled - at)
        self._cache.release(branch.block)
        upper = Branch(branch.token_ids[:at], first, filled=min(at, branch.filled), children=[branch], used=branch.used)
        self._roots[self._roots.index(branch)] = upper
        branch.token_ids, branch.block, branch.parent, branch.at = branch.token_ids[at:].copy(), second, upper, at
        branch.filled = max(0, branch.filled - at)
        return upper

    def _allocate(self, length: int, hard: bool, keep: Branch | None) -> Block | None:
        """A block, in place of leaves that nobody uses if need be, but not of `keep`."""
        if keep is not None:
            keep.users += 1
        while (block := self._cache.allocate(length)) is None and self._evict(hard):
            pass
        if keep is not None:
            keep.users -= 1
        return block

    def _evict(self, hard: bool) -> bool:
        """Give up a leaf: the longest unused, or of those that parked rows need the one used last.

        Conversations take turns, so what was used last is needed last; the other order would give up each one shortly
        before its turn comes, and with a little too little memory everything would be computed again in every turn.
        """
        leaves = [branch for branch in _subtrees(self._roots) if branch.idle and (hard or not branch.parked)]
        if not leaves:
            return False
        first = min(leaves, key=lambda each: (each.parked > 0, -each.used if each.parked else each.used))
        self._detach([first])
        return True

    def _detach(self, branches: Sequence[Branch]) -> None:
        """Nobody else is given these and what follows them."""
        for branch in list(_subtrees(branches)):
            branch.attached = False
            if branch.parent is None and branch in self._roots:
                self._roots.remove(branch)
            self._collect(branch)

    def _collect(self, branch: Branch) -> None:
        """Free a branch that nobody needs any more, and those before it."""
        at: Branch | None = branch
        while at is not None and not at.attached and at.idle:
            if at.broken:
                self._cache.clear_block(at.block)
            self._cache.release(at.block)
            at.users = -1  # never again
            if at.parent is not None:
                at.parent.children.remove(at)
            at = at.parent

    def _touch(self, branch: Branch) -> None:
        self._clock += 1
        for part in branch.path:
            part.used = self._clock


def _subtrees(branches: Sequence[Branch]) -> Iterator[Branch]:
    """These branches and all that follow, children first."""
    for branch in list(branches):
        yield from _subtrees(branch.children)
        yield branch
