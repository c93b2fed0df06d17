"""Token ids of places in pictures, and the positions by which tokens are turned.

    PICTURES | turned << 61 | key << 18 | row << 9 | column

Most families turn places by where they are in the sequence, like words: `turned` is 0, and the 18 bits below the key
count places. In Qwen's vision models (arXiv 2409.12191) each token has three positions. A word's are equal. A picture
whose first place has position p has (p, p + row, p + column), and the next word p + max(rows, columns):

    token        a   [0,0]  [0,1]  [0,2]  [1,0]  [1,1]  [1,2]   b
    in time      0     1      1      1      1      1      1     4
    row          0     1      1      1      2      2      2     4
    column       0     1      2      3      1      2      3     4
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from covey.types import PICTURES, IntArray

_SIDE_BITS = 9
PLACE_BITS = 2 * _SIDE_BITS
"""What is above is the picture's."""
MOST_ROWS = 1 << _SIDE_BITS
"""And columns, of a picture whose places are turned by them."""
_TURNED = PICTURES | 1 << 61


def place_ids(digest: bytes, count: int, columns: int | None = None) -> IntArray:
    """`[count]` ids of a picture's places, row by row; `columns` where rows and columns turn them."""
    key = (PICTURES if columns is None else _TURNED) | int.from_bytes(digest[:8]) >> 21 << PLACE_BITS
    row, column = np.divmod(np.arange(count, dtype=np.int64), columns or MOST_ROWS)
    return key | row << _SIDE_BITS | column


def place_of(ids: Any, columns: Any) -> Any:
    """Which of its picture's places each id is, from the number of its columns (`MOST_ROWS` where they do not turn)."""
    return (ids >> _SIDE_BITS & MOST_ROWS - 1) * columns + (ids & MOST_ROWS - 1)


def is_turned(ids: IntArray) -> bool:
    """Whether rows and columns of pictures turn some of the tokens."""
    return bool((ids >= _TURNED).any())


def turns_of(ids: IntArray, depth: IntArray, runs: Iterable[tuple[int, int, int]]) -> IntArray:
    """What M tokens are turned by: `depth` `[M]`, their places in their own sequences; or `[3, M]`, where rows and
    columns turn some of them.

    A run is the first token, the last plus one, and the token that its first follows, or -1. It comes after that one's.
    Pictures are whole.
    """
    if not is_turned(ids):
        return depth
    at = np.flatnonzero(ids >= _TURNED)
    row, column = ids[at] >> _SIDE_BITS & MOST_ROWS - 1, ids[at] & MOST_ROWS - 1
    first = np.flatnonzero(row + column == 0)
    last = np.append(first[1:], len(at)) - 1
    count = last - first + 1
    step = np.zeros(len(ids), np.int64)  # what each token adds to the positions after it, besides 1
    step[at[last]] = np.maximum(row[last], column[last]) + 1 - count
    after = np.zeros_like(step)
    for start, stop, before in runs:
        after[start:stop] = np.cumsum(step[start:stop]) + (after[before] if before >= 0 else 0)
    found = np.tile(depth + after - step, (3, 1))
    found[:, at] -= np.arange(len(at)) - np.repeat(first, count)
    found[1, at] += row
    found[2, at] += column
    return found


def sequence_turns(*sequences: IntArray) -> IntArray:
    """The same of sequences, one after another."""
    ends = accumulate(map(len, sequences), initial=0)
    depth = np.concatenate([np.arange(len(ids)) for ids in sequences])
    return turns_of(np.concatenate(sequences), depth, ((start, stop, -1) for start, stop in pairwise(ends)))
