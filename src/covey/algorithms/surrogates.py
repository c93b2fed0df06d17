"""Importance ratios and the surrogates that are minimised, per token.

Shapes are `[N, T]`; `mask` is True where the policy sampled the token and no mask excludes it. Ratios are
masked before `exp` and capped at e^20 (`arrays.LOG_RATIO_LIMIT`), so that no input makes an infinity. `logp`
is the differentiable argument, `old` a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from array_api_compat import array_namespace

from covey.algorithms.arrays import Array, bounded_exp, masked, masked_difference, row_mean, stop_gradient


def token_ratio(logp: Array, old: Array, mask: Array) -> Array:
    """`exp(logp - old)`, `[N, T]`; 1 where masked."""
    return bounded_exp(masked_difference(logp, old, mask))


def sequence_ratio(logp: Array, old: Array, mask: Array) -> Array:
    """`exp(mean over the row's tokens of logp - old)`, the same on all tokens of a row, `[N, T]`.

    The ratio of GSPO (arXiv 2507.18071). A row without active tokens has ratio 1.
    """
    xp = array_namespace(logp)
    return xp.broadcast_to(bounded_exp(row_mean(masked_difference(logp, old, mask), mask)), logp.shape)


def gspo_token_ratio(logp: Array, old: Array, mask: Array) -> Array:
    """The value of `sequence_ratio` with the gradient of the token, `[N, T]`.

    That is `sg(w_sequence) · exp(logp - sg(logp))`, sg being `stop_gradient`.
    """
    logp = masked(logp, mask)
    sequence = stop_gradient(sequence_ratio(logp, old, mask))
    return sequence * array_namespace(logp).exp(logp - stop_gradient(logp))


RATIOS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "gspo_token": gspo_token_ratio,
}
"""`importance_sampling_level` -> `f(logp, old, mask) -> w`, `[N, T]`."""


class Surrogate(NamedTuple):
    """A surrogate's per-token loss, and where it limited the ratio from below and above, `[N, T]` each."""

    loss: Array
    low: Array
    high: Array


def clip_surrogate(
    ratio: Array, advantages: Array, eps_low: float, eps_high: float, delta: float | None = None
) -> Surrogate:
    """`-min(w A, clip(w, 1 - eps_low, 1 + eps_high) A)` (PPO, arXiv 1707.06347).

    With `delta`, `w` itself is capped there first (two-sided clip).

    Written by cases, which is the same function: for A > 0 the minimum is `min(w, 1 + eps_high) A`, for A < 0
    it is `max(w, 1 - eps_low) A`. Unlike min and clip, whose derivative at equality differs between
    libraries, the cases leave no choice: a token exactly on a bound is not clipped.
    """
    xp = array_namespace(ratio)
    beyond = _never(ratio)
    if delta is not None:
        beyond = ratio > delta
        ratio = xp.where(beyond, xp.full_like(ratio, delta), ratio)
    too_low = (advantages < 0) & (ratio < 1 - eps_low)
    too_high = (advantages > 0) & (ratio > 1 + eps_high)
    ratio = xp.where(too_low, xp.full_like(ratio, 1 - eps_low), ratio)
    ratio = xp.where(too_high, xp.full_like(ratio, 1 + eps_high), ratio)
    return Surrogate(-ratio * advantages, too_low, too_high | (beyond & (advantages < 0)))


def reinforce_surrogate(logp: Array, advantages: Array) -> Surrogate:
    """`-A · logp`: summed over a row's tokens, `-A · log-probability of the sequence`. Nothing is limited."""
    return Surrogate(-advantages * logp, _never(logp), _never(logp))


def cispo_surrogate(ratio: Array, logp: Array, advantages: Array, epsilon_max: float) -> Surrogate:
    """`-stopgrad(min(w, epsilon_max)) · A · logp` (arXiv 2506.13585).

    The weight is capped, but no token loses its gradient.
    """
    xp = array_namespace(ratio)
    too_high = ratio > epsilon_max
    weight = stop_gradient(xp.where(too_high, xp.full_like(ratio, epsilon_max), ratio))
    return Surrogate(-weight * advantages * logp, _never(ratio), too_high)


def sapo_surrogate(ratio: Array, advantages: Array, temperature_pos: float, temperature_neg: float) -> Surrogate:
    """`-f(w) · A` with the soft gate `f(w) = sigmoid(tau (w - 1)) · 4 / tau` (arXiv 2511.20347).

    `tau` is `temperature_pos` for A > 0, else `temperature_neg`. The slope of f is 1 at w = 1, as without a
    gate.
    """
    xp = array_namespace(ratio)
    tau = xp.where(advantages > 0, xp.full_like(ratio, temperature_pos), xp.full_like(ratio, temperature_neg))
    sigmoid = 0.5 * (1 + xp.tanh(0.5 * tau * (ratio - 1)))  # as 1 / (1 + exp(-x)), without its overflow
    return Surrogate(-4 / tau * sigmoid * advantages, _never(ratio), _never(ratio))


def _never(like: Array) -> Array:
    xp = array_namespace(like)
    return xp.zeros_like(like, dtype=xp.bool)
