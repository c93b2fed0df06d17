"""The orders in which rows are visited, each a pure function of the place that a run has reached."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from covey.errors import DataError
from covey.types import IntArray


class DataOrder:
    """The infinite order in which rows are visited, as a pure function of (seed, position).

    Epoch e is a permutation of the n rows keyed by (seed, e), so a resumed run needs only its position. It sorts
    Philox's raw 64-bit output, which is the same in all versions of NumPy.

    Args:
        n: number of rows, at least 1.
        seed: key of the permutations.
        shuffle: False = visit the rows in order in each epoch.
    """

    def __init__(self, n: int, seed: int, shuffle: bool = True) -> None:
        if n < 1:
            raise DataError(f"n={n}: an order needs at least one row; give a dataset that has some")
        self.n, self.seed, self.shuffle = n, seed, shuffle
        self._epoch = -1
        self._permutation: IntArray = np.arange(n)

    def take(self, position: int, k: int) -> list[int]:
        """Row indices at positions `position` ... `position + k - 1` of the stream; they may span epochs."""
        if position < 0 or k < 0:
            raise ValueError(f"position={position}, k={k}: neither may be negative")
        return [int(self._order(p // self.n)[p % self.n]) for p in range(position, position + k)]

    def _order(self, epoch: int) -> IntArray:
        if self.shuffle and epoch != self._epoch:
            key = np.array([self.seed % 2**64, epoch % 2**64], dtype=np.uint64)
            draws = np.random.Philox(key=key).random_raw(self.n)
            self._epoch, self._permutation = epoch, np.argsort(draws, kind="stable")
        return self._permutation


class WeightedOrder:
    """Rows drawn by weights that change as the run goes on, as a pure function of (seed, position, weights).

    Each `take` draws without replacement, with probabilities in proportion to the weights: an exponential race, the
    k rows with the smallest `-log(u) / weight` (Efraimidis and Spirakis 2006, Inf. Process. Lett. 97:181).

    Args:
        n: number of rows, at least 1.
        seed: key of the draws.
        weights: returns `[n]` positive numbers, asked for at each `take`.
    """

    def __init__(self, n: int, seed: int, weights: Callable[[], NDArray[np.float64]]) -> None:
        self.n, self.seed, self._weights = n, seed, weights

    def take(self, position: int, k: int) -> list[int]:
        """`k` row indices; if k is more than n, each round of n uses all rows."""
        if position < 0 or k < 0:
            raise ValueError(f"position={position}, k={k}: neither may be negative")
        rows: list[int] = []
        while len(rows) < k:
            key = np.array([self.seed % 2**64, position + len(rows)], dtype=np.uint64)
            uniform = ((np.random.Philox(key=key).random_raw(self.n) >> np.uint64(11)) + 0.5) * 2.0**-53
            race = np.argsort(-np.log(uniform) / self._weights(), kind="stable")
            rows += race[: k - len(rows)].tolist()
        return rows
