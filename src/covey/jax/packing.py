"""Batches as few shapes of rectangles, since each shape is compiled once.

Rows that share a prompt stand together, and the prompt runs once (`covey.jax.attention.shared_prefix`):

    prefixes  [B, P]      [11 12 13  0]        one row for each block, padded on the right
    inputs    [B, g, L]   [21 22  0]           what follows the prompt, but for the last token of each row:
                          [31  0  0]           nothing follows it
    targets   [B, g, L+1] [21 22  2  0]        column 0 is predicted by the prompt's last token
                          [31  2  0  0]
    scored    [B, g, L+1] [ 1  1  1  0]        sampled tokens; foreign tokens of an agent's episode are not
                          [ 1  1  0  0]

P, g and L are rounded up to one of few sizes; B is a power of two. So a run meets few shapes, whatever its lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from covey.types import BoolArray, Episode, IntArray

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class Rectangle:
    """One micro-batch, drawn in the module docstring. R = B · g rows.

    Attributes:
        prefixes: `[B, P]`.
        prefix_lengths: `[B]`.
        inputs: `[R, L]`.
        targets: `[R, L + 1]`.
        scored: `[R, L + 1]`.
        rows: `[R]` row numbers in the batch, -1 where there is none.
        column: `[R, L + 1]` which of the row's sampled tokens each is: the column in the batch's `[N, T]` arrays.
    """

    prefixes: NDArray[np.int32]
    prefix_lengths: NDArray[np.int32]
    inputs: NDArray[np.int32]
    targets: NDArray[np.int32]
    scored: BoolArray
    rows: IntArray
    column: IntArray

    def take(self, values_NT: NDArray[Scalar]) -> NDArray[Scalar]:
        """Values `[N, T]` of the batch -> `[R, L + 1]`, 0 where nothing is scored."""
        found = values_NT[np.maximum(self.rows, 0)[:, None], np.minimum(self.column, values_NT.shape[1] - 1)]
        return np.where(self.scored, found, np.zeros((), values_NT.dtype))

    def put(self, values: NDArray[Any], into_NT: NDArray[Any]) -> None:
        """Write values `[R, L + 1]` into an array `[N, T]` of the batch."""
        at = np.nonzero(self.scored)
        into_NT[self.rows[at[0]], self.column[at]] = values[at]

    def support_bits(self, episodes: Sequence[Episode], vocabulary: int) -> NDArray[np.uint8] | None:
        """`[R, L + 1, ceil(V / 8)]` bits of the tokens that could be drawn; None where no row recorded any."""
        held = [episodes[row].support if row >= 0 else None for row in self.rows]
        if all(support is None for support in held):
            return None
        bits = np.zeros((*self.scored.shape, -(-vocabulary // 8)), np.uint8)
        for place, support in enumerate(held):
            columns = np.flatnonzero(self.scored[place])
            if support is None:
                bits[place, columns] = 255
                continue
            for t, at in enumerate(columns):
                ids = support.ids[support.offsets[t] : support.offsets[t + 1]]
                np.bitwise_or.at(bits[place, at], ids // 8, (128 >> (ids % 8)).astype(np.uint8))
        return bits


def size_up(number: int) -> int:
    """The next of 0, 8, 16, 24, 32, 48, 64, 96, 128, 192, ...: at most half more than asked for, from 16 on."""
    if number <= 0:
        return 0
    size = 8
    while size < number:
        if size + size // 2 >= number and size >= 16:
            return size + size // 2
        size *= 2
    return size


def pack_rectangles(
    episodes: Sequence[Episode], rows: Sequence[int], budget: int, multiple: int = 1
) -> list[Rectangle]:
    """Rows of a batch as rectangles of at most `budget` tokens each, or one block where that is larger.

    Rows with equal prompts, compared by value, share one as far as the budget goes. Rows without a sampled token are
    left out.

    Args:
        episodes: all N episodes of the batch.
        rows: row numbers to pack.
        budget: tokens of a rectangle, padding included; for each of `multiple` devices.
        multiple: B is one of its multiples; blocks that are missing are empty.
    """
    by_prefix: dict[bytes, list[int]] = {}
    for row in rows:
        if episodes[row].sampled.any():
            prefix = episodes[row].token_ids[: episodes[row].prompt_length]
            by_prefix.setdefault(np.ascontiguousarray(prefix, dtype=np.int64).tobytes(), []).append(int(row))
    shapes: dict[tuple[int, int, int], list[list[int]]] = {}
    for same in by_prefix.values():
        prefix_size = size_up(episodes[same[0]].prompt_length)
        for block in _split(episodes, same, prefix_size, budget):
            length = size_up(max(_inputs(episodes[row]) for row in block))
            shapes.setdefault((prefix_size, members(len(block)), length), []).append(block)
    found = []
    for shape in sorted(shapes):
        blocks, (prefix_size, rows_each, length) = shapes[shape], shape
        together = _power_of_two(max(1, budget // (prefix_size + rows_each * length))) * multiple
        while blocks:
            count = min(together, multiple * _power_of_two(max(1, len(blocks) // multiple)))
            found.append(_fill(episodes, blocks[:count], count, shape))
            blocks = blocks[count:]
    return found


def _inputs(episode: Episode) -> int:
    """Tokens after the prompt that some sampled token needs as input: all before the last sampled one."""
    return int(np.flatnonzero(episode.sampled)[-1]) - episode.prompt_length


def _split(episodes: Sequence[Episode], rows: list[int], prefix_size: int, budget: int) -> list[list[int]]:
    """Rows that share a prompt, as few blocks as fit."""
    length = size_up(max(_inputs(episodes[row]) for row in rows))
    most = len(rows)
    while most > 1 and prefix_size + members(most) * length > budget:
        most = -(-most // 2)
    return [rows[start : start + most] for start in range(0, len(rows), most)]


def members(number: int) -> int:
    """Rows of a block, rounded up: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    size = 1
    while size < number:
        if size + size // 2 >= number and size >= 2:
            return size + size // 2
        size *= 2
    return size


def _power_of_two(number: int) -> int:
    """The largest that is not above."""
    return 1 << (number.bit_length() - 1)


def _fill(episodes: Sequence[Episode], blocks: list[list[int]], count: int, shape: tuple[int, int, int]) -> Rectangle:
    prefix_size, each, length = shape
    prefixes = np.zeros((count, prefix_size), np.int32)
    prefix_lengths = np.ones(count, np.int32)
    inputs = np.zeros((count * each, length), np.int32)
    targets = np.zeros((count * each, length + 1), np.int32)
    scored = np.zeros((count * each, length + 1), np.bool_)
    rows = np.full(count * each, -1, np.int64)
    for number, block in enumerate(blocks):
        first = episodes[block[0]]
        prefix_lengths[number] = first.prompt_length
        prefixes[number, : first.prompt_length] = first.token_ids[: first.prompt_length]
        for place, row in enumerate(block, start=number * each):
            episode, before = episodes[row], first.prompt_length
            after = _inputs(episode)
            rows[place] = row
            inputs[place, :after] = episode.token_ids[before : before + after]
            targets[place, : after + 1] = episode.token_ids[before : before + after + 1]
            scored[place, : after + 1] = episode.sampled[before : before + after + 1]
    column = np.maximum(np.cumsum(scored, axis=1) - 1, 0)
    return Rectangle(prefixes, prefix_lengths, inputs, targets, scored, rows, column)
