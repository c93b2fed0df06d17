"""Which kernel calls compute the attention of a pack: a forest of branches, planned once for all layers.

Two kinds of parts (`covey.pytorch.attention.tree_parts`):

    own       each branch over itself, causal. A branch is a slice of the pack; short ones lie side by side in a
              rectangle, padded at the end with their last token again, so that no query there sees a key that this
              token does not
    across    branches that leave a branch b after e of its tokens, with all that leaves them, over `b[:e]`: without a
              gap in the pack (`covey.rollout.packing`), so slices again. Nothing is copied and no key is repeated

A fork costs a call in each layer, whatever it computes. So a short branch that leaves b after `at` tokens may be cut
at an earlier e: the tokens `b[e:at]` are repeated before it, and before all that leaves it, inside the rectangles.
Their keys and values are seen there, their own outputs are dropped. For long branches, which no rectangle holds,
copying takes longer than the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from covey.rollout.packing import Branch, positions_of
from covey.types import IntArray

Past = tuple[Tensor, Tensor]
"""Keys `[n, Hkv, D]` and values `[n, Hkv, Dv]` of tokens before a pack."""
ALONE = 32  # tokens of a branch that is worth a call of its own (measured: from there copying costs more)
REPEATED = 16  # tokens that are repeated sooner than a call is made for a fork (measured likewise)


class Rule(NamedTuple):
    """How a layer attends."""

    scale: float  # factor on the scores
    window: int | None = None  # a query sees keys at most `window - 1` positions back; None = all
    softcap: float | None = None  # scores become `softcap * tanh(scores / softcap)`; None = off


@dataclass(slots=True, eq=False)
class _Layer:
    keys: Tensor  # [capacity, Hkv, D]
    values: Tensor  # [capacity, Hkv, Dv]
    gradients: tuple[Tensor, Tensor] | None = None  # float32 or wider: many are added


class TreePath:
    """Keys and values along the path from a tree's root to the piece that is being computed, with their gradients.

    A tree that is larger than the budget is walked: a piece that others follow (a trunk) leaves its keys and values
    here, and those that follow attend to them. Backward runs in reverse: each piece adds the gradients of what it
    attended to, and the trunk takes what its followers left for it. Pieces beside each other use the same places one
    after another, so memory is that of the longest path, of `capacity` tokens.

        forward of a trunk of m tokens after n           reads [:n], writes keys and values [n:n+m]
        forward of what follows it                       reads [:n+m]
        backward of what follows it                      adds to the gradients [:n+m]
        backward of the trunk                            takes the gradients [n:n+m] and clears them; adds to [:n]
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._layers: dict[int, _Layer] = {}

    def read(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[stop, Hkv, D]` of the first tokens, views."""
        held = self._layers[layer]
        return held.keys[:stop], held.values[:stop]

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Keep the keys and values `[m, Hkv, D]` of the tokens from `start` on; `ValueError` where they do not fit."""
        stop = start + len(keys)
        if stop > self.capacity:
            raise ValueError(f"{stop} tokens on a path of capacity {self.capacity}: make it as long as the longest one")
        if layer not in self._layers:
            room = [x.new_empty(self.capacity, *x.shape[1:]) for x in (keys, values)]
            self._layers[layer] = _Layer(room[0], room[1])
        held = self._layers[layer]
        held.keys[start:stop], held.values[start:stop] = keys, values

    def gradients(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The gradients `[stop - start, Hkv, D]` of the keys and values of these tokens so far, to be added to."""
        held = self._layers[layer]
        if held.gradients is None:
            wide = torch.promote_types(held.keys.dtype, torch.float32)
            held.gradients = torch.zeros_like(held.keys, dtype=wide), torch.zeros_like(held.values, dtype=wide)
        keys, values = held.gradients
        return keys[start:stop], values[start:stop]


class Run:
    """`count` branches of one length, one after another: the slice of the pack from `start` on."""

    def __init__(self, start: int, length: int, count: int) -> None:
        self.rows, self._shape = slice(start, start + count * length), (count, length)

    def take(self, values: Tensor) -> Tensor:
        """Values `[M, ...]` of the pack -> `[n, L, ...]`."""
        return values[self.rows].view(*self._shape, *values.shape[1:])

    def take_gradient(self, grad: Tensor) -> Tensor:
        return self.take(grad)

    def put(self, values: Tensor, into: Tensor) -> None:
        """Write the branches' values `[n, L, ...]` into `[M, ...]`."""
        self.take(into).copy_(values)

    def add_repeated(self, values: Tensor, into: Tensor) -> None:
        """Nothing is repeated."""


class Rectangle:
    """Branches of similar length as `[n, L]`, each after the tokens that are repeated for it, padded at the end.

    `rows` are, of each, the packed indices of its tokens and of those before it, of which so many are `repeated`.
    """

    def __init__(self, rows: Sequence[IntArray], repeated: Sequence[int], device: torch.device | str) -> None:
        self._shape = (len(rows), max(map(len, rows)))
        steps, lengths = np.arange(self._shape[1]), np.array([len(row) for row in rows])[:, None]
        index = np.stack([row[np.minimum(steps, len(row) - 1)] for row in rows])
        first = np.asarray(repeated)[:, None]
        own, again = (steps >= first) & (steps < lengths), np.broadcast_to(steps < first, self._shape)

        def places(chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[Tensor, Tensor]:
            slots = np.flatnonzero(chosen)
            return torch.from_numpy(slots).to(device), torch.from_numpy(index.reshape(-1)[slots]).to(device)

        self._index = torch.from_numpy(index.reshape(-1)).to(device)
        self._own, self._packed = places(own)
        self._again, self._origin = places(again)
        self._all_own = bool(own.all())

    def take(self, values: Tensor) -> Tensor:
        """Values `[M, ...]` of the pack -> `[n, L, ...]`."""
        return values.index_select(0, self._index).view(*self._shape, *values.shape[1:])

    def take_gradient(self, grad: Tensor) -> Tensor:
        """The same, with 0 where the output is dropped."""
        if self._all_own:
            return self.take(grad)
        tiled = grad.new_zeros(self._index.numel(), *grad.shape[1:])
        tiled.index_copy_(0, self._own, grad.index_select(0, self._packed))
        return tiled.view(*self._shape, *grad.shape[1:])

    def put(self, values: Tensor, into: Tensor) -> None:
        """Write the branches' own values `[n, L, ...]` into `[M, ...]`."""
        flat = values.flatten(0, 1)
        into.index_copy_(0, self._packed, flat if self._all_own else flat.index_select(0, self._own))

    def add_repeated(self, values: Tensor, into: Tensor) -> None:
        """Add the gradients `[n, L, ...]` of the repeated tokens to `[M, ...]`."""
        if len(self._again):
            into.index_add_(0, self._origin, values.flatten(0, 1).index_select(0, self._again))


@dataclass(frozen=True, slots=True)
class Across:
    """Neighbouring branches, with all that leaves them, over the first tokens of what they leave."""

    queries: slice  # of the pack
    keys: slice  # of the pack, or of the past
    from_past: bool
    query_position: int  # the lowest
    key_position: int  # of the first; the others follow

    def keys_within(self, window: int | None) -> slice:
        """The keys that any query sees."""
        if window is None:
            return self.keys
        hidden = max(0, self.query_position - window + 1 - self.key_position)
        return slice(min(self.keys.start + hidden, self.keys.stop), self.keys.stop)


@dataclass(slots=True, eq=False)
class TreeLayout:
    """The plan for one pack on one device."""

    branches: tuple[Branch, ...]
    positions: Tensor  # [M] of each token in its own sequence
    longest: int  # tokens of the longest sequence, those before the pack included
    own: list[Run | Rectangle]  # parts that cover each token once
    across: list[Across]  # parts that are merged into them
    past: int = 0  # tokens before the pack that are given beside it
    path: TreePath | None = None  # where the keys and values of these are; None = nowhere
    trunk: bool = False  # the pack's own keys and values go there too, for packs that follow
    seen: list[int | None] = field(default_factory=list)  # windows of the layers that used it, for the probe
    plans: dict[int | None, Any] = field(default_factory=dict)  # what `tree_flex` has made of it

    @classmethod
    def of(
        cls,
        branches: Sequence[Branch],
        device: torch.device | str = "cpu",
        *,
        past: int = 0,
        path: TreePath | None = None,
        trunk: bool = False,
        repeated: int = REPEATED,
    ) -> TreeLayout:
        """Plan the attention of a pack. Branches without a parent follow the first `at` tokens of the past.

        At most so many tokens are `repeated` in place of a call of their own; the results are the same.

        Raises `ValueError`: a trunk of several branches, or one that leaves the past before its end.
        """
        if trunk and (len(branches), branches[0].at) != (1, past):
            raise ValueError(
                f"a trunk of {len(branches)} branches after {branches[0].at} of {past} tokens: cut it further"
            )
        positions = positions_of(branches)
        across, before = _cut(branches, positions, repeated)
        own, places = _own(branches, before, device), torch.from_numpy(positions).to(device)
        return cls(tuple(branches), places, int(positions.max()) + 1, own, across, past, path, trunk)

    def felt(self, rule: Rule) -> Rule:
        """A rule without a window that no sequence of the pack is longer than."""
        return rule._replace(window=None) if rule.window is not None and rule.window >= self.longest else rule


def _own(branches: Sequence[Branch], before: Sequence[IntArray], device: torch.device | str) -> list[Run | Rectangle]:
    small = [n for n, branch in enumerate(branches) if len(before[n]) or branch.length < ALONE]
    alone = sorted({*range(len(branches))} - {*small})
    rows = [np.concatenate([before[n], np.arange(branches[n].start, branches[n].stop)]) for n in small]
    own: list[Run | Rectangle] = []
    for group in similar_lengths([len(row) for row in rows]):
        if len(group) == 1 and len(before[small[group[0]]]) == 0:
            alone.append(small[group[0]])
        else:
            group = sorted(group)  # as they lie in the pack
            own.append(Rectangle([rows[i] for i in group], [len(before[small[i]]) for i in group], device))
    runs: list[tuple[int, int, int]] = []
    for branch in (branches[number] for number in alone):
        start, length, count = runs[-1] if runs else (0, 0, 0)
        if (branch.start, branch.length) == (start + count * length, length):
            runs[-1] = (start, length, count + 1)
        else:
            runs.append((branch.start, branch.length, 1))
    return own + [Run(*run) for run in runs]


def similar_lengths(lens: Sequence[int], ratio: float = 2.0, enough: int = 16) -> list[list[int]]:
    """Indices grouped so that in a group the longest is at most `ratio` times the shortest, or at most `enough`: few
    rectangles mean few kernel calls, similar lengths little padding.
    """
    order = sorted(range(len(lens)), key=lambda i: (-lens[i], i))
    groups: list[list[int]] = []
    for i in order:
        longest = lens[groups[-1][0]] if groups else 0
        if groups and (longest <= enough or longest <= ratio * lens[i]):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _cut(branches: Sequence[Branch], positions: IntArray, repeated: int) -> tuple[list[Across], list[IntArray]]:
    """The parts across branches, and of each branch the packed indices of what is repeated before it."""
    first = [int(positions[branch.start]) for branch in branches]
    ends = [branch.stop for branch in branches]  # of each branch with all that leaves it
    below = [1] * len(branches)  # branches
    longest = [branch.length for branch in branches]  # of these
    leaving: dict[int, list[int]] = {}
    for number in reversed(range(len(branches))):
        parent = branches[number].parent
        leaving.setdefault(parent, []).append(number)
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[number])
            below[parent] += below[number]
            longest[parent] = max(longest[parent], longest[number])
    across: list[Across] = []
    cuts = [branch.at if branch.parent < 0 else 0 for branch in branches]
    for parent, numbers in leaving.items():
        if parent >= 0:
            cut = 0
            for number in sorted(numbers, key=lambda n: branches[n].at):
                again = branches[number].at - cut
                if again * below[number] > repeated or again + longest[number] >= ALONE:
                    cut = branches[number].at
                cuts[number] = cut
    for parent in sorted(leaving):  # those further up first
        run: list[int] = []
        for number in [*sorted(leaving[parent]), -1]:
            if run and (number < 0 or cuts[number] != cuts[run[0]]):
                cut, begin = cuts[run[0]], 0 if parent < 0 else branches[parent].start
                if cut:
                    queries, keys = slice(branches[run[0]].start, ends[run[-1]]), slice(begin, begin + cut)
                    lowest, place = min(first[n] for n in run), 0 if parent < 0 else first[parent]
                    across.append(Across(queries, keys, parent < 0, lowest, place))
                run = []
            run.append(number)
    before: list[IntArray] = []
    for branch, cut in zip(branches, cuts, strict=True):
        if branch.parent < 0:
            before.append(np.zeros(0, np.int64))
        else:
            start = branches[branch.parent].start
            before.append(np.concatenate([before[branch.parent], np.arange(start + cut, start + branch.at)]))
    return across, before
