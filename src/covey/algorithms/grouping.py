"""Sums and extremes over groups of rows: each row is told what its whole group has.

Groups are numbered by where their ids begin in the sorted list of all ids, so shapes depend on N alone (JAX can compile
it) and the work is that of sorting N numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_numpy_array, is_torch_array

from covey.algorithms.arrays import Array


class Grouping:
    """The groups of N rows, of which only members count.

    Args:
        groups: `[N]` integers, equal for rows of the same group.
        member: `[N]` boolean, True for the rows that are looked at.
    """

    def __init__(self, groups: Array, member: Array) -> None:
        xp = array_namespace(groups)
        self._member = member
        self._number = xp.searchsorted(xp.sort(groups), groups)  # 0 to N - 1

    def sum(self, values: Array) -> Array:
        """`[N]` or `[N, T]` values added up over the members of each row's group."""
        xp = array_namespace(values)
        member = self._member if values.ndim == 1 else self._member[:, None]
        values = xp.where(member, values, xp.zeros_like(values))
        return self._gather(_reduced(values, self._number, "add", 0.0))

    def max(self, values: Array) -> Array:
        """`[N]` the largest value among the members of each row's group; -inf where it has none."""
        xp = array_namespace(values)
        least = -float("inf")
        values = xp.where(self._member, values, xp.full_like(values, least))
        return self._gather(_reduced(values, self._number, "max", least))

    def count(self, like: Array) -> Array:
        """`[N]` how many members each row's group has, in the type of `like`."""
        return self.sum(array_namespace(like).ones_like(like))

    def _gather(self, totals: Array) -> Array:
        return array_namespace(totals).take(totals, self._number, axis=0)


def _reduced(values: Array, number: Array, how: str, begin: float) -> Array:
    """`[N, ...]` the values of each number, put together."""
    xp = array_namespace(values)
    totals = xp.full_like(values, begin)
    if is_numpy_array(values):
        {"add": np.add, "max": np.maximum}[how].at(totals, number, values)
        return totals
    if is_torch_array(values):
        if how == "add":
            return totals.index_add(0, number, values)
        return totals.scatter_reduce(0, number, values, "amax")
    place: Any = totals.at[number]
    return place.add(values) if how == "add" else place.max(values)
