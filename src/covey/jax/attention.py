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

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
KeysValues = tuple[jax.Array, jax.Array]
"""Keys `[N, K, D, S]` and values `[N, K, S, D]` of a layer; slot s holds position s."""

_NEVER = -1e30  # finite, so that a row that sees nothing of a part is no NaN


def causal(positions: jax.Array, window: int | None) -> Attend:
    """Rows `[N, L, ...]` at `positions` `[N, L]`: each token sees those at its own and earlier positions."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        seen = _seen(positions, positions, window)
        return _ungroup(_part(_group(q, k.shape[2]), _keys(k), _values(v), seen[:, None, None])[0])

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
        return _ungroup(_part(grouped, keys.astype(q.dtype), values.astype(q.dtype), seen[:, None, None])[0])

    return attend


def shared_prefix(prefix_lengths: jax.Array, width: int, rows: int, window: int | None) -> Attend:
    """B blocks, `[B, P + g · L]`: a prefix, then the g rows that go on from it.

        [prefix        ][row 0    ][row 1    ]     width P, then L tokens each
        [11 12 13  .  .][21 22  . ][31 32 33 ]

    A prefix runs once, however many rows go on from it. Each of them sees the prefix and itself.

    Args:
        prefix_lengths: `[B]` real tokens of each prefix.
        width: P.
        rows: g, rows of each block.
        window: see `ModelConfig.sliding_window`.
    """

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        blocks, length, heads, size = k.shape
        own, group = (length - width) // rows, q.shape[2] // heads
        at, step = jnp.arange(width)[None], jnp.arange(own)[None]
        k_prefix, v_prefix = _keys(k[:, :width]), _values(v[:, :width])
        seen = _seen(at, at, window)[:, None, None]
        mixed_prefix = _ungroup(_part(_group(q[:, :width], heads), k_prefix, v_prefix, seen)[0])
        if own == 0:
            return mixed_prefix

        def each(x: jax.Array) -> jax.Array:
            return x[:, width:].reshape(blocks * rows, own, -1, size)

        grouped = _group(each(q), heads)  # [B g, K, G, L, D]
        seen = _seen(step, step, window)[:, None, None]
        out_own, weight_own = _part(grouped, _keys(each(k)), _values(each(v)), seen)

        seen = (at < prefix_lengths[:, None])[:, None, None, None, None]  # [B, 1, 1, 1, 1, P]
        if window is not None:
            distance = (prefix_lengths[:, None] + step)[:, :, None] - at[:, None]  # [B, L, P]
            seen &= (distance < window)[:, None, None, None]
        shape = (blocks, rows, heads, group, own)
        together = grouped.reshape(*shape, size).transpose(0, 2, 1, 3, 4, 5)  # [B, K, g, G, L, D]
        wide = jnp.broadcast_to(seen, (blocks, 1, rows, group, own, width)).reshape(blocks, 1, rows * group, own, width)
        together = together.reshape(blocks, heads, rows * group, own, size)
        out_prefix, weight_prefix = _part(together, k_prefix, v_prefix, wide)

        def apart(x: jax.Array) -> jax.Array:  # [B, K, g G, L, .] -> [B g, K, G, L, .]
            x = x.reshape(blocks, heads, rows, group, own, -1).transpose(0, 2, 1, 3, 4, 5)
            return x.reshape(blocks * rows, heads, group, own, -1)

        share = jax.nn.sigmoid(weight_own - apart(weight_prefix)).astype(q.dtype)
        mixed_own = _ungroup(out_own * share + apart(out_prefix) * (1 - share))
        return jnp.concatenate([mixed_prefix, mixed_own.reshape(blocks, rows * own, -1, size)], axis=1)

    return attend


def _write(cache: KeysValues, positions: jax.Array, new: KeysValues) -> KeysValues:
    """One row: `[L, K, D]` keys and values at L positions. Row by row, since devices that share the rows of a batch
    would exchange the whole cache for a scatter over all of them.
    """
    keys = cache[0].at[:, :, positions].set(new[0].transpose(1, 2, 0), mode="drop")
    return keys, cache[1].at[:, positions].set(new[1].swapaxes(0, 1), mode="drop")


def _part(q: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention of grouped queries `[A, K, G, L, D]` over one part: mixed values, and `[..., 1]` log of its weight."""
    many, heads, group, length, size = q.shape
    scores = (q.reshape(many, heads, group * length, size) @ keys) / math.sqrt(size)
    scores = scores.astype(jnp.promote_types(q.dtype, jnp.float32)).reshape(many, heads, group, length, -1)
    scores = jnp.where(seen, scores, _NEVER)
    largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    mass = jnp.exp(scores - largest)
    total = jnp.sum(mass, axis=-1, keepdims=True)
    weights = (mass / total).astype(q.dtype).reshape(many, heads, group * length, -1)
    return (weights @ values).reshape(q.shape), largest + jnp.log(total)


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
