"""Packs episodes into micro-batches in which no token is computed twice, whatever the episodes share.

A pack is a trie of its rows' token ids (`covey.rollout.tries`) as a forest of branches: a branch is a run of tokens
that leaves another branch after some of its tokens, or begins a tree. Where rows part, the way with most tokens goes on
in the same branch. A prompt of 4 tokens, two completions of 3 and 2, and a third that begins as the first does:

    packed index   0  1  2  3  4  5 | 6 | 7
    token_ids     11 12 13 14 21 22 |23 |31      a row's last token is no input: nothing follows it
    position_ids   0  1  2  3  4  5 | 5 | 4
    leave          8  8  8  8  7  6 | 7 | 8
    branches      Branch(start=0, length=6, parent=-1, at=0)
                  Branch(start=6, length=1, parent=0, at=5)
                  Branch(start=7, length=1, parent=0, at=4)

Token k is seen by the queries `k <= q < leave[k]`: a branch is followed by those that leave it, the last to leave
first, each with its own, so that all that comes after a token lies behind it without a gap.

    u              0  1  2  3  4  5  6           what is scored: distinct (place, next token)
    score_at       3  3  4  4  5  6  7           the packed index whose hidden state predicts
    targets       21 31 22 23  2 24  2           at a fork one state predicts several tokens
    s              0  1  2  3  4  5  6  7        sampled tokens, row by row
    pair           0  2  4  1  6  0  3  5        the first token of rows 0 and 2 is one and the same
    row            0  0  0  1  1  2  2  2
    column         0  1  2  0  1  0  1  2

A token that several rows sampled after the same tokens is computed and scored once, and enters each row's loss with
that row's advantage, old log-probability, mask and weight.

Sharing a group's prompt is "prefix grouping" (arXiv 2506.05433). Here every target of a fork is scored: none is
dropped, and no token is repeated for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.rollout.places import turns_of
from covey.rollout.tries import Node, build_trie, partition
from covey.types import Episode, IntArray, Support


@dataclass(frozen=True, slots=True)
class Branch:
    """A run of packed tokens, each of which follows the one before it."""

    start: int  # packed index of its first token
    length: int  # tokens, at least 1
    parent: int  # number of the branch that it leaves; -1 = none
    # how many tokens of the parent it follows, at least 1; without a parent, how many tokens before the pack (0, but in
    # pieces of a tree that is walked: `covey.rollout.walking`)
    at: int

    @property
    def stop(self) -> int:
        """Packed index after its last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens that a pass was given and took, see `count_tokens`."""

    raw: int  # of all rows, each by itself
    unique: int  # of the trie of all rows
    computed: int  # of all packs


@dataclass(frozen=True, eq=False)
class Pack:
    """One micro-batch: M packed tokens, U things to score, S sampled tokens of n rows; see the module docstring."""

    token_ids: IntArray  # `[M]`
    position_ids: IntArray  # `[M]` position of each token in its own sequence
    branches: tuple[Branch, ...]  # the layout of the M tokens; a parent comes before what leaves it
    score_at: IntArray  # `[U]` packed index whose hidden state predicts the u-th target, ascending
    targets: IntArray  # `[U]` the sampled token ids
    pair: IntArray  # `[S]` which of the U each sampled token is
    row: IntArray  # `[S]` row in this pack, 0..n-1
    column: IntArray  # `[S]` index among that row's sampled tokens: the column in the batch's `[N, T]` arrays
    rows: IntArray  # `[n]` row number in the batch of each row in this pack

    @property
    def num_tokens(self) -> int:
        """M, tokens in the forward pass."""
        return len(self.token_ids)

    @property
    def num_padded(self) -> int:
        """Tokens of the rectangle that holds every row by itself."""
        return len(self.rows) * (int(self.position_ids.max()) + 1)

    @property
    def num_targets(self) -> int:
        """S, sampled tokens of all rows."""
        return len(self.pair)

    @cached_property
    def turns(self) -> IntArray:
        """`[M]` or `[3, M]` what the tokens are turned by, see `covey.rollout.places`."""
        runs = (
            (b.start, b.stop, self.branches[b.parent].start + b.at - 1 if b.parent >= 0 else -1) for b in self.branches
        )
        return turns_of(self.token_ids, self.position_ids, runs)

    @cached_property
    def first(self) -> IntArray:
        """`[U]` one of the S sampled tokens that each of the U is."""
        found: IntArray = np.unique(self.pair, return_index=True)[1]
        return found

    @cached_property
    def leave(self) -> IntArray:
        """`[M]` packed index after the last token that sees each token: `k <= q < leave[k]`."""
        return leave_of(self.branches, self.num_tokens)

    def apart(self, kinds_NT: IntArray) -> Pack:
        """The same with a target of its own for each of `kinds` that its sampled tokens have, of the whole batch."""
        kinds = np.unique(kinds_NT[self.rows[self.row], self.column], return_inverse=True)[1]
        _, first, pair = np.unique(self.pair * len(kinds) + kinds, return_index=True, return_inverse=True)
        of = self.pair[first]
        return replace(self, score_at=self.score_at[of], targets=self.targets[of], pair=pair)

    def put(self, values_S: NDArray[Any], into_NT: NDArray[Any]) -> None:
        """Write values `[S]` of this pack into an array `[N, T]` of the whole batch."""
        into_NT[self.rows[self.row], self.column] = values_S

    def path(self, index: int) -> IntArray:
        """Packed indices of a token and all before it in its sequence, in order."""
        number = next(n for n, branch in enumerate(self.branches) if branch.start <= index < branch.stop)
        parts, stop = [], index + 1
        while number >= 0:
            branch = self.branches[number]
            parts.append(np.arange(branch.start, stop))
            number, stop = branch.parent, self.branches[branch.parent].start + branch.at
        return np.concatenate(parts[::-1])

    def sequences(self) -> list[IntArray]:
        """The n rows' input tokens, each as the plain model would get it."""
        last = np.zeros(len(self.rows), np.int64)
        np.maximum.at(last, self.row, self.score_at[self.pair])  # deeper in a row is further on in the pack
        return [self.token_ids[self.path(int(index))] for index in last]

    def support(self, episodes: Sequence[Episode]) -> Support | None:
        """The kept ids of the pack's U targets, or None when no row of the pack recorded them; of all N episodes.

        Raises `ValueError`: some rows recorded their support and others did not.
        """
        present = [support for support in (episodes[row].support for row in self.rows) if support is not None]
        if not present:
            return None
        if missing := [row for row in self.rows if episodes[row].support is None]:
            raise ValueError(
                f"row {missing[0]} recorded no kept ids while others did; sample the whole batch with keep_support on"
            )
        places = zip(self.row[self.first], self.column[self.first], strict=True)
        parts = [present[row].of(column) for row, column in places]
        counts = np.cumsum([0, *(len(part) for part in parts)])
        return Support(ids=np.concatenate(parts).astype(np.int64), offsets=counts.astype(np.int64))


def leave_of(branches: Sequence[Branch], num_tokens: int) -> IntArray:
    """`Pack.leave` of branches in their order."""
    ends = [branch.stop for branch in branches]  # of each branch with all that leaves it
    found = np.zeros(num_tokens, np.int64)
    leaving: list[list[tuple[int, int]]] = [[] for _ in branches]
    for number in reversed(range(len(branches))):
        branch = branches[number]
        found[branch.start : branch.stop] = branch.stop
        for at, end in leaving[number]:  # the last to leave comes first: later ones end further on
            here = found[branch.start : branch.start + at]
            np.maximum(here, end, out=here)
            ends[number] = max(ends[number], end)
        if branch.parent >= 0:
            leaving[branch.parent].append((branch.at, ends[number]))
    return found


def positions_of(branches: Sequence[Branch]) -> IntArray:
    """`[M]` position of each token in its own sequence, of branches in their order."""
    first: list[int] = []
    for branch in branches:
        first.append(branch.at + (first[branch.parent] if branch.parent >= 0 else 0))
    return _join([np.arange(begin, begin + b.length) for begin, b in zip(first, branches, strict=True)])


def pack_episodes(
    episodes: Sequence[Episode],
    rows: Sequence[int] | IntArray | None = None,
    tokens_per_pack: int = 8192,
    *,
    whole_trees: bool = False,
    shared: bool = True,
) -> list[Pack]:
    """Pack rows of a batch into micro-batches of at most `tokens_per_pack` tokens.

    What rows share is found by their token ids, whatever group they belong to. A tree that is larger than the budget is
    cut where that repeats least (`covey.rollout.tries.partition`); a sequence is never cut, so one that exceeds the
    budget gets a pack of its own. Rows without a sampled token are left out: there is nothing to score. What comes out
    is deterministic in the arguments.

    Args:
        episodes: all N episodes of the batch.
        rows: row numbers to pack; None = all N.
        tokens_per_pack: budget, in packed tokens.
        whole_trees: do not cut: a tree that is larger than the budget gets a pack of its own, to be walked.
        shared: False gives each row a tree of its own, for models that run rows as a padded rectangle; the budget is
            then of `Pack.num_padded`.

    Raises `ValueError`: `tokens_per_pack` is not positive, or the first token of an episode is marked as sampled.
    """
    if tokens_per_pack < 1:
        raise ValueError(f"tokens_per_pack={tokens_per_pack}: a pack needs room for at least one token; raise it")
    inputs = _inputs(episodes, rows)
    if not inputs:
        return []
    if not shared:
        return [_build(episodes, part, shared=False) for part in _rectangles(inputs, tokens_per_pack)]
    root = build_trie(inputs)
    if whole_trees:
        for tree in root.children:  # each becomes one node, which is not cut
            rows = sorted(row for node in tree.nodes() for row in node.ending)
            tree.end, tree.ending, tree.children = tree.begin + tree.size, rows, []
    parts = partition(root, tokens_per_pack)
    return [_build(episodes, {row: inputs[row] for row in sorted(part)}) for part in parts]


def _rectangles(inputs: Mapping[int, IntArray], budget: int) -> list[dict[int, IntArray]]:
    """Rows of similar lengths together, as many as a rectangle of so many tokens holds."""
    found: list[dict[int, IntArray]] = []
    longest = 0
    for row in sorted(inputs, key=lambda row: -len(inputs[row])):
        if not found or (len(found[-1]) + 1) * longest > budget:
            found.append({})
            longest = len(inputs[row])
        found[-1][row] = inputs[row]
    return found


def count_tokens(episodes: Sequence[Episode], rows: Sequence[int] | IntArray, computed: int) -> TokenCounts:
    """What the rows would take one by one, and what is distinct in them, beside what their packs take."""
    inputs = _inputs(episodes, rows)
    raw = sum(len(ids) for ids in inputs.values())
    return TokenCounts(raw, build_trie(inputs).size if inputs else 0, computed)


def _inputs(episodes: Sequence[Episode], rows: Sequence[int] | IntArray | None) -> dict[int, IntArray]:
    """The tokens of each row that some sampled token needs as input: all before the last sampled one."""
    found = {}
    for row in range(len(episodes)) if rows is None else map(int, rows):
        episode = episodes[row]
        if not episode.sampled.any():
            continue
        if episode.sampled[0]:
            raise ValueError(
                f"row {row}: its first token is marked as sampled, but nothing precedes it to predict it; "
                "begin the episode with a prompt of at least one token"
            )
        found[row] = np.asarray(episode.token_ids[: int(np.flatnonzero(episode.sampled)[-1])], np.int64)
    return found


def _build(episodes: Sequence[Episode], inputs: Mapping[int, IntArray], *, shared: bool = True) -> Pack:
    rows = list(inputs)
    if shared:
        branches, order = _lay_out(build_trie(inputs))
    else:
        order = [Node(0, len(ids), row, [row]) for row, ids in inputs.items()]
        starts = accumulate([0, *(node.length for node in order)])
        branches = [Branch(start, node.length, -1, 0) for start, node in zip(starts, order, strict=False)]
    where = _paths(order)
    sampled_at = [np.flatnonzero(episodes[row].sampled) for row in rows]
    both = list(zip(rows, sampled_at, strict=True))
    at = _join([where[number][places - 1] for number, places in both])  # the token before a sampled one predicts it
    target = _join([episodes[number].token_ids[places] for number, places in both])
    row = np.repeat(np.arange(len(rows)), [len(places) for places in sampled_at])
    column = _join([np.arange(len(places)) for places in sampled_at])
    kinds = _kinds(episodes, [rows[n] for n in row], column)
    key = (at * (target.max() + 1) + target) * (kinds.max() + 1) + kinds
    _, first, pair = np.unique(key, return_index=True, return_inverse=True)
    return Pack(
        token_ids=_join([inputs[node.source][node.begin : node.end] for node in order]),
        position_ids=_join([np.arange(node.begin, node.end) for node in order]),
        branches=tuple(branches),
        score_at=at[first],
        targets=target[first],
        pair=pair,
        row=row,
        column=column,
        rows=np.asarray(rows, dtype=np.int64),
    )


def _lay_out(root: Node) -> tuple[list[Branch], list[Node]]:
    """Branches, and the nodes in the order in which their tokens lie in the pack."""
    branches: list[Branch] = []
    order: list[Node] = []
    waiting = [(tree, -1, 0) for tree in reversed(root.children)]
    while waiting:
        node, parent, at = waiting.pop()
        number, begin = len(branches), node.begin
        leaving = []
        while True:
            order.append(node)
            if not node.children:
                break
            heavy = max(node.children, key=lambda child: child.size)
            leaving += [(child, number, node.end - begin) for child in reversed(node.children) if child is not heavy]
            node = heavy
        waiting += leaving  # the last to leave is taken first
        branches.append(Branch(branches[-1].stop if branches else 0, node.end - begin, parent, at))
    return branches, order


def _paths(order: Sequence[Node]) -> dict[int, IntArray]:
    """Row -> `[L]` packed index of each of its input tokens."""
    parents = {id(child): node for node in order for child in node.children}
    starts = accumulate((node.length for node in order), initial=0)
    places = {id(node): np.arange(start, start + node.length) for node, start in zip(order, starts, strict=False)}
    found: dict[int, IntArray] = {}
    for node in order:
        if node.ending:
            chain, at = [places[id(node)]], id(node)
            while at in parents:
                at = id(parents[at])
                chain.append(places[at])
            found |= dict.fromkeys(node.ending, np.concatenate(chain[::-1]))
    return found


def _kinds(episodes: Sequence[Episode], rows: Sequence[int], column: IntArray) -> IntArray:
    """`[S]` equal where the kept ids are: a token drawn from other ids has another probability."""
    known: dict[bytes, int] = {b"": 0}  # where none were recorded
    kinds = np.zeros(len(rows), np.int64)
    if all(episodes[row].support is None for row in dict.fromkeys(rows)):
        return kinds
    for s, row in enumerate(rows):
        support = episodes[row].support
        if support is not None:
            kinds[s] = known.setdefault(support.of(int(column[s])).tobytes(), len(known))
    return kinds


def _join(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate(parts).astype(np.int64, copy=False)
