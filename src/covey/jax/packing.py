"""Micro-batches of few shapes, since each shape is compiled once.

`covey.rollout.packing` packs rows of a batch, what they share once, into packs of at most S tokens; B such packs are
padded to `[B, S]`. S is 384, or 512, 768, 1024, ... where a sequence is longer, or a tree would be cut too often. The
pack that is drawn there, in 9:

    tokens    [B, S]     [11 12 13 14 21 22 23 31  0]
    positions [B, S]     [ 0  1  2  3  4  5  5  4  0]
    leave     [B, S]     [ 8  8  8  8  7  6  7  8  9]    token k is seen by k <= q < leave[k]; padding by itself
    targets   [B, T]     [21 31 22 23  2 24  2  0  0 ..] distinct sampled tokens, and where they are predicted
    score_at  [B, T]     [ 3  3  4  4  5  6  7  0  0 ..]
    counts    [B]        7

What is computed for each target goes to a grid of one line for each row of the batch, as losses want it. A token that
several rows sampled goes to each of them:

    place     [B, M, S]  [[0 2 4 0 ..] [1 6 0 0 ..] [0 3 5 0 ..] ...] which target
    exists    [B, M, S]  [[1 1 1 0 ..] [1 1 0 0 ..] [1 1 1 0 ..] ...]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from covey.rollout.packing import Pack, count_tokens, pack_episodes
from covey.types import BoolArray, Episode, IntArray

Scalar = TypeVar("Scalar", bound=np.generic)

_ROWS = 32
"""Rows of the batch that a pack has room for; more where it is long."""
_TOKENS_EACH = 16
_SHORTEST = 384
"""Tokens of the narrowest pack, unless the budget is smaller: short sequences share one."""

_REPEATED = 1.25
"""Tokens that packs repeat may add this much, or wider packs are tried."""
_WORTH = 0.8
"""What these must cost at most of what the narrow ones do: each shape is compiled, which takes seconds."""
_EVEN = 4096
"""Tokens of a pack in which attention takes about as long as everything else."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a micro-batch, drawn in the module docstring."""

    rows: int
    width: int

    @property
    def members(self) -> int:
        """M, most rows of a pack."""
        return max(_ROWS, self.width // _TOKENS_EACH)

    @property
    def targets(self) -> int:
        """T: a distinct target is an edge of the trie, or the end of a row; see `_packs_of` for what is neither."""
        return self.width + self.members


def shapes_for(sequence: int, budget: int, multiple: int = 1, narrowest: int | None = None) -> list[Shape]:
    """The shapes that a run needs, the narrowest first: each sequence goes to the first that holds it."""
    widths = [narrowest or size_up(min(budget, _SHORTEST))]
    while widths[-1] < sequence:
        widths.append(size_up(widths[-1] + 1))
    return [Shape(max(1, budget // width) * multiple, width) for width in widths]


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Packs as arrays of one shape, drawn in the module docstring.

    Attributes:
        shape: of the arrays.
        arrays: what compiled code takes.
        rows: `[B · M]` row numbers in the batch, -1 where there is none.
        packs: the packs.
    """

    shape: Shape
    arrays: dict[str, NDArray[Any]]
    rows: IntArray
    packs: Sequence[Pack]

    def take(self, values_NT: NDArray[Scalar]) -> NDArray[Scalar]:
        """Values `[N, T]` of the batch -> `[B · M, S]`, 0 where there is no sampled token."""
        line, column = np.nonzero(self._exists)
        found = np.zeros(self._exists.shape, values_NT.dtype)
        found[line, column] = values_NT[self.rows[line], column]
        return found

    def put(self, values: NDArray[Any], into_NT: NDArray[Any]) -> None:
        """Write values `[B · M, S]` into an array `[N, T]` of the batch."""
        line, column = np.nonzero(self._exists)
        into_NT[self.rows[line], column] = values[line, column]

    @property
    def _exists(self) -> BoolArray:
        exists: BoolArray = self.arrays["exists"].reshape(len(self.rows), -1)
        return exists

    def support_bits(self, episodes: Sequence[Episode], vocabulary: int) -> NDArray[np.uint8]:
        """`[B, T, ceil(V / 8)]` bits of the tokens that could be drawn; all of them where none were recorded."""
        bits = np.full((*self.arrays["targets"].shape, -(-vocabulary // 8)), 255, np.uint8)
        for into, pack in zip(bits, self.packs, strict=False):
            for target, s in enumerate(pack.first):
                support = episodes[pack.rows[pack.row[s]]].support
                if support is not None:
                    ids = support.of(int(pack.column[s]))
                    into[target] = 0
                    np.bitwise_or.at(into[target], ids // 8, (128 >> (ids % 8)).astype(np.uint8))
        return bits


def size_up(number: int, first: int = 8) -> int:
    """The next of 0, 8, 16, 24, 32, 48, 64, 96, 128, ...: at most half more than asked for, from 16 on.

    With another `first`, its multiples in the same way: 1, 2, 3, 4, 6, 8, 12, 16, ...
    """
    if number <= 0:
        return 0
    size = first
    while size < number:
        if size + size // 2 >= number and size >= 2 * first:
            return size + size // 2
        size *= 2
    return size


def sequence_length(episode: Episode) -> int:
    """Tokens of a prompt with what follows it, as far as some sampled token needs it as input; 0 = none is sampled."""
    return int(np.max(np.flatnonzero(episode.sampled), initial=0))


def pack_step(
    episodes: Sequence[Episode], rows: Sequence[int], sequence: int, budget: int, multiple: int = 1
) -> tuple[list[Shape], list[MicroBatch]]:
    """Rows of a batch as micro-batches, and the shapes that these are of; wide where narrow ones repeat too much."""

    def pack(narrowest: int | None = None) -> tuple[list[Shape], list[MicroBatch]]:
        shapes = shapes_for(sequence, budget, multiple, narrowest)
        return shapes, pack_rows(episodes, rows, shapes)

    first = best = pack()
    unique, widest = count_tokens(episodes, rows, 0).unique, first[0][-1].width
    if sum(one.num_tokens for part in first[1] for one in part.packs) > _REPEATED * unique:
        width = widest if len(first[0]) > 1 else 2 * widest
        while width <= max(budget, widest) and _cost(wider := pack(width)) < _cost(best):
            best, width = wider, 2 * width
    return best if _cost(best) <= _WORTH * _cost(first) else first


def _cost(packed: tuple[list[Shape], list[MicroBatch]]) -> float:
    """Of all micro-batches, in tokens whose attention is free."""
    shapes = [part.shape for part in packed[1]]
    return sum(shape.rows * shape.width * (1 + shape.width / _EVEN) for shape in shapes)


def pack_rows(episodes: Sequence[Episode], rows: Sequence[int], shapes: Sequence[Shape]) -> list[MicroBatch]:
    """Rows of a batch as micro-batches. Rows without a sampled token are left out."""
    lengths = {row: sequence_length(episodes[row]) for row in rows}
    waiting = list(rows)
    found = []
    for shape in shapes:
        here = [row for row in waiting if lengths[row] <= shape.width]
        later = [row for row in waiting if lengths[row] > shape.width]
        packs = _packs_of(episodes, here, shape)
        if later:  # a micro-batch that would not be full: its rows fill the gaps between longer ones
            whole = len(packs) // shape.rows * shape.rows
            later += [int(row) for pack in packs[whole:] for row in pack.rows]
            packs = packs[:whole]
        found += [fill(packs[start : start + shape.rows], shape) for start in range(0, len(packs), shape.rows)]
        waiting = later
    return found


def _packs_of(episodes: Sequence[Episode], rows: Sequence[int], shape: Shape) -> list[Pack]:
    """Packs of a shape, none with more targets than it has room for.

    There are too many where the same token was sampled at the same place from other kept ids again and again, which
    one sampler hardly does: fewer rows have fewer of them, and one alone has none twice.
    """
    found = []
    for pack in pack_episodes(episodes, rows, shape.width, rows_per_pack=shape.members, fixed_size=True):
        if len(pack.targets) <= shape.targets:
            found.append(pack)
        else:
            half = len(pack.rows) // 2
            for part in (pack.rows[:half], pack.rows[half:]):
                found += _packs_of(episodes, part.tolist(), shape)
    return found


def fill(packs: Sequence[Pack], shape: Shape) -> MicroBatch:
    """At most B packs as one micro-batch; what is missing is empty."""
    tokens, positions = (np.zeros((shape.rows, shape.width), np.int32) for _ in range(2))
    leave = np.tile(np.arange(1, shape.width + 1, dtype=np.int32), (shape.rows, 1))
    targets, score_at = (np.zeros((shape.rows, shape.targets), np.int32) for _ in range(2))
    counts = np.array([*(len(pack.targets) for pack in packs), *[0] * (shape.rows - len(packs))], np.int32)
    place = np.zeros((shape.rows, shape.members, shape.width), np.int32)
    exists = np.zeros(place.shape, np.bool_)
    rows = np.full((shape.rows, shape.members), -1, np.int64)
    for at, pack in enumerate(packs):
        tokens[at, : pack.num_tokens] = pack.token_ids
        positions[at, : pack.num_tokens] = pack.position_ids
        leave[at, : pack.num_tokens] = pack.leave
        targets[at, : counts[at]] = pack.targets
        score_at[at, : counts[at]] = pack.score_at
        place[at, pack.row, pack.column] = pack.pair
        exists[at, pack.row, pack.column] = True
        rows[at, : len(pack.rows)] = pack.rows
    arrays = {
        "tokens": tokens,
        "positions": positions,
        "leave": leave,
        "targets": targets,
        "score_at": score_at,
        "counts": counts,
        "place": place,
        "exists": exists,
    }
    return MicroBatch(shape, arrays, rows.reshape(-1), packs)
