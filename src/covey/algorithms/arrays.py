"""Small helpers that let one function run on NumPy, torch (under autograd) and JAX (under `jit` and `grad`).

Rules that every function of this room keeps: no in-place mutation, no shape that depends on values, no Python branch on
a value. `import covey.algorithms` imports NumPy only; torch and JAX are recognised by the arrays that come in.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
from array_api_compat import array_namespace, device, is_array_api_obj, is_jax_array, is_torch_array

from covey.errors import ConfigError

Array: TypeAlias = Any
"""An array of any supported library; there is no common static type for them."""

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are capped here before `exp`: ratios up to e^20 = 4.9e8 are exact, larger ones are held there
with gradient 0.

A ratio beyond it carries no usable information (every clip is long active), while `exp(89)` is infinite in float32, and
a product of two such ratios is from 45 on. Small ratios need no limit: they underflow to 0 harmlessly.
"""

T = TypeVar("T")


def lookup(registry: Mapping[str, T], name: str, setting: str) -> T:
    """Return `registry[name]`.

    Raises `ConfigError`: unknown name; the message gives the nearest known one.
    """
    if isinstance(name, str) and name in registry:
        return registry[name]
    raise unknown_name(name, registry, setting)


def unknown_name(name: object, known: Iterable[str], setting: str) -> ConfigError:
    """The error for a name that is not among the known ones, with the nearest one as its advice."""
    known = list(known)
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
    advice = f"did you mean {nearest[0]!r}? " if nearest else ""
    return ConfigError(f"{setting}={name!r}: no such name; {advice}choose one of {', '.join(known)}")


def stop_gradient(x: Array) -> Array:
    """`x` as a constant for differentiation."""
    if is_torch_array(x):
        return x.detach()
    if is_jax_array(x):
        from jax import lax  # only reached when the caller already runs JAX

        return lax.stop_gradient(x)
    return x


def magnitude(x: Array) -> Array:
    """`|x|`, whose gradient at 0 is 0 in every library: JAX's own `abs` has 1 there, where every policy begins."""
    return x * array_namespace(x).sign(stop_gradient(x))


def masked(x: Array, mask: Array, fill: float = 0.0) -> Array:
    """`x` where `mask`, else `fill`: inf and NaN at masked positions reach neither the value nor the gradient.

    `x` may be `[N]` (one value per row), `[N, 1]` or `[N, T]`; `mask` is a boolean `[N, T]`.
    """
    xp = array_namespace(x)
    x = expand_rows(x)
    return xp.where(mask, x, xp.full_like(x, fill))


def masked_difference(x: Array, y: Array, mask: Array) -> Array:
    """`x - y` where `mask`, else 0. Masked first: even inf - inf is never computed."""
    return masked(x, mask) - masked(y, mask)


def expand_rows(x: Array) -> Array:
    """`[N]` as `[N, 1]`, so that it broadcasts over tokens; anything else unchanged."""
    return x[:, None] if x.ndim == 1 else x


def as_mask(mask: Array) -> Array:
    """A boolean mask from booleans or 0/1 numbers."""
    xp = array_namespace(mask)
    return mask if xp.isdtype(mask.dtype, "bool") else mask != 0


def bounded_exp(x: Array) -> Array:
    """`exp(min(x, LOG_RATIO_LIMIT))`: finite value and gradient for every finite `x`."""
    xp = array_namespace(x)
    return xp.exp(xp.where(x > LOG_RATIO_LIMIT, xp.full_like(x, LOG_RATIO_LIMIT), x))


def at_least_one(count: Any) -> Any:
    """A count as a divisor: at least 1, so that where nothing is counted 0 is divided by 1."""
    if isinstance(count, int):
        return max(count, 1)
    xp = array_namespace(count)
    return xp.maximum(count, xp.ones_like(count))


def row_sum(x: Array, mask: Array) -> Array:
    """Sum over the unmasked tokens of each row, `[N, T] -> [N, 1]`."""
    return array_namespace(x).sum(masked(x, mask), axis=-1, keepdims=True)


def row_mean(x: Array, mask: Array) -> Array:
    """Mean over the unmasked tokens of each row, `[N, T] -> [N, 1]`; 0 for a row without tokens."""
    xp = array_namespace(x)
    return row_sum(x, mask) / at_least_one(xp.sum(xp.astype(mask, x.dtype), axis=-1, keepdims=True))


def largest(values: Array, among: Array, count: Array) -> Array:
    """Booleans of the shape of `values`: the `count` largest where `among`, the first ones of those that tie."""
    xp = array_namespace(values)
    order = xp.argsort(xp.reshape(-masked(values, among, -float("inf")), (-1,)), stable=True)
    return among & (xp.reshape(xp.argsort(order, stable=True), values.shape) < count)


def as_float(values: Any) -> Array:
    """An array of floats: lists become NumPy float64 with NaN for None, arrays stay in their library."""
    if not is_array_api_obj(values) or (isinstance(values, np.ndarray) and values.dtype == object):
        return np.asarray(values, dtype=np.float64)
    xp = array_namespace(values)
    if xp.isdtype(values.dtype, "real floating"):
        return values
    return xp.astype(values, xp.asarray(0.0).dtype)


def to_library_of(reference: Array, values: Any) -> Array:
    """`values` (list or array of any library) as an array of the library and on the device of `reference`."""
    xp = array_namespace(reference)
    if is_array_api_obj(values) and array_namespace(values) is xp:
        return values
    host = np.asarray(values)
    return xp.asarray(host, device=device(reference)) if is_torch_array(reference) else xp.asarray(host)


def group_numbers(ids: Any, reference: Array) -> Array:
    """Group ids as an integer array in the library of `reference`.

    Integer arrays pass through. Anything else hashable (uid strings, object arrays) is numbered by first appearance.
    """
    if is_array_api_obj(ids) and not (isinstance(ids, np.ndarray) and ids.dtype.kind in "OUSfb"):
        return to_library_of(reference, ids)
    numbers: dict[Hashable, int] = {}
    return to_library_of(reference, np.asarray([numbers.setdefault(i, len(numbers)) for i in ids], np.int64))


def locked(value: Any) -> Any:
    """A dataclass with its NumPy arrays read-only, for code of somebody else's: what it changed would be trained on."""
    if isinstance(value, dict):
        return {name: locked(each) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: locked(getattr(value, each.name)) for each in fields(value)})
    if isinstance(value, np.ndarray):
        value = value.view()
        value.flags.writeable = False
    return value
