"""Who sees whom: ways to mix values, passed to the model's attention layers.

Each is a function `attend(q, k, v) -> mixed` of queries `[..., H, D]` and keys and values `[..., K, D]` with their
positions turned in; H = K · G query heads, G of them share a key-value head. Keys are kept as `[N, K, D, S]` and values
as `[N, K, S, D]`: so both products are plain matrix products, without a transposed copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from covey.jax.linear import wide_product

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
KeysValues = tuple[jax.Array, jax.Array]
"""Keys `[N, K, D, S]` and values `[N, K, S, D]` of a layer; slot s holds position s."""

_QUERIES = 256
"""Queries of a part of `packed`, more where there would be more parts than `_MOST_PARTS`."""
_MOST_PARTS = 8
_NEVER = -1e30  # finite, so that a row that sees nothing of a part is no NaN


def causal(positions: jax.Array, window: int | None) -> Attend:
    """Rows `[N, L, ...]` at `positions` `[N, L]`: each token sees those at its own and earlier positions."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        seen = _seen(positions, positions, window)
        return _ungroup(_mix(_group(q, k.shape[2]), _keys(k), _values(v), seen[:, None, None]))

    return attend


def cached(cache: KeysValues, positions: jax.Array, window: int | None, keep: Callable[[KeysValues], Any]) -> Attend:
    """The same, with keys and values written into a cache at `positions`, and all that it holds before them seen.

    Args:
        cache: of the layer.
        positions: `[N, L]`; what lies beyond the cache's end is not written: a finished row may be advanced past it.
        window: see `ModelConfig.sliding_window`.
        keep: takes the new cache.
    """

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        keys, values = jax.vmap(_write)(cache, positions, (k.astype(cache[0].dtype), v.astype(cache[1].dtype)))
        keep((keys, values))
        seen = _seen(positions, jnp.arange(keys.shape[3])[None], window)
        grouped = _group(q, k.shape[2])
        return _ungroup(_mix(grouped, keys.astype(q.dtype), values.astype(q.dtype), seen[:, None, None]))

    return attend


def packed(leave: jax.Array, positions: jax.Array, window: int | None) -> Attend:
    """Packs `[B, S]` of tokens that share what their rows begin with, as `covey.jax.packing` lays them out.

    Token k is seen by the queries `k <= q < leave[k]`: by itself and by all that follows it in some row. Queries are
    taken some at a time, against the keys up to the last of them: what lies behind is seen by none.

    Args:
        leave: `[B, S]`.
        positions: `[B, S]`.
        window: see `ModelConfig.sliding_window`.
    """
    width = leave.shape[1]
    step = max(_QUERIES, -(-width // _MOST_PARTS))
    parts = [(start, min(start + step, width)) for start in range(0, width, step)]

    def seen(start: int, end: int) -> jax.Array:
        of, by = (slice(None), slice(start, end), None), (slice(None), None, slice(0, end))
        query = jnp.arange(start, end)[:, None]
        found = (jnp.arange(end) <= query) & (query < leave[by])
        return found if window is None else found & (positions[of] - positions[by] < window)

    masks = [seen(start, end)[:, None, None] for start, end in parts]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        grouped, keys, values = _group(q, k.shape[2]), _keys(k), _values(v)
        mixed = [
            _mix(grouped[..., start:end, :], keys[..., :end], values[:, :, :end], mask)
            for (start, end), mask in zip(parts, masks, strict=True)
        ]
        return _ungroup(jnp.concatenate(mixed, axis=3))

    return attend


def _write(cache: KeysValues, positions: jax.Array, new: KeysValues) -> KeysValues:
    """One row: `[L, K, D]` keys and values at L positions. Row by row, since devices that share the rows of a batch
    would exchange the whole cache for a scatter over all of them.
    """
    keys = cache[0].at[:, :, positions].set(new[0].transpose(1, 2, 0), mode="drop")
    return keys, cache[1].at[:, positions].set(new[1].swapaxes(0, 1), mode="drop")


def _mix(q: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array) -> jax.Array:
    """Attention of grouped queries `[N, K, G, L, D]`: mixed values of what they see, `[N, 1, 1, L, S]`.

    Scores, their exponentials and both sums are float32 at least; what is multiplied keeps its type.
    """
    many, heads, group, length, size = q.shape
    scores = wide_product(q.reshape(many, heads, group * length, size), keys) / math.sqrt(size)
    scores = jnp.where(seen, scores.reshape(many, heads, group, length, -1), _NEVER)
    mass = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    mixed = wide_product(mass.astype(q.dtype).reshape(many, heads, group * length, -1), values).reshape(q.shape)
    return (mixed / jnp.sum(mass, axis=-1, keepdims=True)).astype(q.dtype)  # fewer numbers than weights to divide


def _seen(positions: jax.Array, slots: jax.Array, window: int | None) -> jax.Array:
    """`[N, L, S]` whether the token at a position sees a slot."""
    seen = slots[:, None] <= positions[:, :, None]
    return seen if window is None else seen & (positions[:, :, None] - slots[:, None] < window)


def _group(q: jax.Array, heads: int) -> jax.Array:
    """`[N, L, H, D] -> [N, K, G, L, D]`."""
    return q.reshape(*q.shape[:2], heads, -1, q.shape[3]).transpose(0, 2, 3, 1, 4)


def _ungroup(x: jax.Array) -> jax.Array:
    """`[N, K, G, L, D] -> [N, L, H, D]`."""
    return x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], x.shape[3], -1, x.shape[4])


def _keys(k: jax.Array) -> jax.Array:
    return k.transpose(0, 2, 3, 1)


def _values(v: jax.Array) -> jax.Array:
    return v.transpose(0, 2, 1, 3)
