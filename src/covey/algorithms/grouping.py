"""Sums and extremes over groups of rows: each row is told what its whole group has.

Groups are numbered by sorting their ids, so shapes depend on N alone (JAX can compile it), and the work is that of
sorting N numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_numpy_array, is_torch_array

from covey.algorithms.arrays import Array


def numbered(*ids: Array) -> Array:
    """`[N]` numbers from 0 to N - 1, equal for rows that are equal in all of `[N]` integer arrays."""
    xp = array_namespace(*ids)
    # in a type that every library sorts
    signed, dtype = "signed integer", xp.asarray([0]).dtype
    ids = tuple(each if xp.isdtype(each.dtype, signed) else xp.astype(each, dtype) for each in ids)
    size = ids[0].shape[0]
    order = xp.argsort(ids[-1], stable=True)
    for each in ids[-2::-1]:
        order = xp.take(order, xp.argsort(xp.take(each, order, axis=0), stable=True), axis=0)
    differs = xp.zeros_like(order[1:]) > 0
    for each in ids:
        sorted_ids = xp.take(each, order, axis=0)
        differs = differs | (sorted_ids[1:] != sorted_ids[:-1])
    number = xp.cumulative_sum(xp.astype(differs, order.dtype))
    number = xp.concat([xp.zeros_like(order[:1]), number])
    return xp.take(number, xp.argsort(order, stable=True), axis=0) if size else order


class Grouping:
    """The groups of N rows, `[N]` integers, of which only the rows count where `member` `[N]` is True."""

    def __init__(self, groups: Array, member: Array) -> None:
        self._member, self._number = member, numbered(groups)

    def sum(self, values: Array) -> Array:
        """`[N]` or `[N, T]` values added up over the members of each row's group."""
        xp = array_namespace(values)
        member = self._member if values.ndim == 1 else self._member[:, None]
        values = xp.where(member, values, xp.zeros_like(values))
        return self._reduced(values, "add", 0.0)

    def max(self, values: Array) -> Array:
        """`[N]` the largest value among the members of each row's group; -inf where it has none."""
        xp = array_namespace(values)
        least = -float("inf")
        values = xp.where(self._member, values, xp.full_like(values, least))
        return self._reduced(values, "max", least)

    def first(self) -> Array:
        """`[N]` True for the first member of each group."""
        xp = array_namespace(self._number)
        place = xp.cumulative_sum(xp.ones_like(self._number))
        last = xp.zeros_like(place) + place.shape[0] + 1
        nearest = self._reduced(xp.where(self._member, -place, -last), "max", -place.shape[0] - 1)
        return self._member & (place == -nearest)

    def count(self, like: Array) -> Array:
        """`[N]` how many members each row's group has, in the type of `like`."""
        return self.sum(array_namespace(like).ones_like(like))

    def _reduced(self, values: Array, how: str, begin: Any) -> Array:
        """`[N, ...]` the values of each row's group, put together."""
        xp, number = array_namespace(values), self._number
        totals: Any = xp.full_like(values, begin)
        if is_numpy_array(values):
            {"add": np.add, "max": np.maximum}[how].at(totals, number, values)
        elif is_torch_array(values) and how == "add":
            totals = totals.index_add(0, number, values)
        elif is_torch_array(values):
            totals = totals.scatter_reduce(0, number, values, "amax")
        elif how == "add":
            totals = totals.at[number].add(values)
        else:
            totals = totals.at[number].max(values)
        return xp.take(totals, number, axis=0)
