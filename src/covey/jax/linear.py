"""Products whose sums stay in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def wide_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x @ y`, `[..., n, k] @ [..., k, m]` of equal leading axes and types, with its sums kept in at least float32.

    For what is exponentiated afterwards, scores and logits: a sum of bfloat16 factors that is rounded to bfloat16 again
    has lost 8 of 16 bits. The gradients are rounded to the type of the factors before they are multiplied, as those of
    every other product are.
    """
    if x.dtype == jnp.promote_types(x.dtype, jnp.float32):
        return x @ y
    return _narrow_product(x, y)


@jax.custom_vjp
def _narrow_product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, preferred_element_type=jnp.float32)


def _narrow_forward(x: jax.Array, y: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _narrow_product(x, y), (x, y)


def _narrow_backward(kept: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, y = kept
    grad = grad.astype(x.dtype)
    return grad @ y.swapaxes(-1, -2), x.swapaxes(-1, -2) @ grad


_narrow_product.defvjp(_narrow_forward, _narrow_backward)
