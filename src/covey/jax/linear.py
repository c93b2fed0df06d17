"""Products with a backward pass written out: a linear layer with LoRA factors, and sums that stay in float32.

The compiler would transpose activations `[M, in]` for the gradients of the factors; here the narrow operand is turned
instead, which is 1 / 50 of the copying.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


@jax.custom_vjp
def lora_linear(x: jax.Array, kernel: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array | float) -> jax.Array:
    """`x W + scale (x A) B`: x `[M, in]`, kernel `[in, out]`, a `[in, r]`, b `[r, out]` -> `[M, out]`.

    The product with the factors is in their type: float32 beside bfloat16 weights. `scale` has no gradient.
    """
    return _forward(x, kernel, a, b, scale)[0]


def _forward(x: jax.Array, kernel: jax.Array, a: jax.Array, b: jax.Array, scale: Any) -> tuple[jax.Array, Any]:
    low = x @ a
    out = x @ kernel
    return out + (scale * (low @ b)).astype(out.dtype), (x, kernel, a, b, scale, low)


def _backward(kept: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, None]:
    x, kernel, a, b, scale, low = kept
    grad_low = scale * _product(grad, b, 1, 1)  # [M, r]
    grad_x = _product(grad, kernel, 1, 1) + (grad_low @ a.T).astype(grad.dtype)
    grad_a = _product(grad_low, x, 0, 0).T
    grad_b = scale * _product(low, grad, 0, 0)
    grad_kernel = _product(x, grad, 0, 0)  # compiled away where the kernel is frozen
    grads = (grad_x.astype(x.dtype), grad_kernel.astype(kernel.dtype), grad_a.astype(a.dtype), grad_b.astype(b.dtype))
    return *grads, None


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


def _product(first: jax.Array, second: jax.Array, left: int, right: int) -> jax.Array:
    """Sum over axis `left` of the first and `right` of the second."""
    wide = jnp.promote_types(first.dtype, second.dtype)
    return jax.lax.dot_general(first.astype(wide), second.astype(wide), (((left,), (right,)), ((), ())))


lora_linear.defvjp(_forward, _backward)
