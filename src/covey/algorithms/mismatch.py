"""Truncated importance sampling, for a sampler whose log-probabilities differ from the trainer's.

A sampler with other kernels or another precision draws from a slightly different policy than the trainer's. The factors
here, constants for differentiation, multiply the surrogate loss. The ratio in the surrogate then compares with the
*trainer's* old log-probabilities. See arXiv 2505.24034 and https://fengyao.notion.site/off-policy-rl.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from array_api_compat import array_namespace

from covey.algorithms.arrays import Array, as_mask, bounded_exp, lookup, masked, row_sum, stop_gradient
from covey.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Correction:
    """Mode and bounds of `mismatch_correction`."""

    mode: str
    cap: float = 3.0
    floor: float | None = None


def _truncate(ratio: Array, cap: float, floor: float) -> Array:
    return array_namespace(ratio).clip(ratio, floor, cap)


def _drop(ratio: Array, cap: float, floor: float) -> Array:
    xp = array_namespace(ratio)
    return xp.where((ratio > cap) | (ratio < floor), xp.zeros_like(ratio), ratio)


MISMATCH_MODES: dict[str, tuple[Callable[[Array, Array], Array], Callable[[Array, float, float], Array]]] = {
    "token_truncate": (masked, _truncate),
    "token_mask": (masked, _drop),
    "sequence_truncate": (row_sum, _truncate),
    "sequence_mask": (row_sum, _drop),
}
"""`importance_sampling_correction` -> (log-ratio of a token or a sequence, treatment outside the bounds)."""


def mismatch_correction(
    trainer_old: Array, sampler_old: Array, mask: Array, mode: str, cap: float, floor: float | None = None
) -> Array:
    """`stopgrad(clip(exp(trainer_old - sampler_old), floor, cap))`; the `_mask` modes give 0 outside the bounds.

    `token_mask` with both bounds is IcePop (arXiv 2512.16144, equation 1).

    Args:
        trainer_old: `[N, T]` log-probabilities that the trainer computes with the weights that sampled.
        sampler_old: `[N, T]` log-probabilities that the sampler recorded.
        mask: `[N, T]` active tokens.
        mode: `token_truncate` and `token_mask` use the ratio of each token. `sequence_truncate` and `sequence_mask`
            use the ratio of the row, the exponential of the *sum* over its tokens.
        cap: largest ratio, positive.
        floor: smallest ratio, below `cap`; None = no lower bound.

    Returns `[N, T]` for token modes (1 where masked), `[N, 1]` for sequence modes.

    Raises `ConfigError`: the mode is unknown, the cap is not positive, or the floor is not between 0 and the cap.
    """
    if not cap > 0:
        raise ConfigError(
            f"importance_sampling_correction of at most {cap}: it bounds a positive ratio; choose more than 0"
        )
    if floor is not None and not 0 <= floor < cap:
        raise ConfigError(
            f"importance_sampling_correction of at least {floor}: it bounds the ratio from below; choose less than "
            f"{cap}, e.g. 0.5"
        )
    reduce, limit = lookup(MISMATCH_MODES, mode, "importance_sampling_correction")
    mask = as_mask(mask)
    log_ratio = reduce(masked(trainer_old, mask) - masked(sampler_old, mask), mask)
    return stop_gradient(limit(bounded_exp(log_ratio), cap, 0.0 if floor is None else floor))


def read_correction(text: str) -> tuple[str, Correction]:
    """Read `algorithm.importance_sampling_correction`: `MODE`, `MODE:CAP` or `MODE:FLOOR:CAP`.

    Returns the mode as written, which may be `auto` or `off`, and the correction that it stands for.

    Raises `ValueError`: the text has another form.
    """
    mode, *written = text.split(":")
    if mode == "off" and written:
        raise ValueError("off has no bounds; write off alone")
    try:
        bounds = list(map(float, written)) or [3.0]
    except ValueError:
        bounds = []
    if mode not in (*MISMATCH_MODES, "auto", "off") or len(bounds) not in (1, 2) or not 0 < bounds[-1] < float("inf"):
        raise ValueError(
            f"must be auto | off | {' | '.join(MISMATCH_MODES)}, with a largest ratio after it (token_truncate:3), or "
            "a smallest and a largest one (token_mask:0.5:5)"
        )
    floor, cap = bounds[0] if len(bounds) == 2 else None, bounds[-1]
    if floor is not None and not 0 <= floor < cap:
        raise ValueError(f"the smallest ratio {floor:g} must be 0 or more and less than the largest, {cap:g}")
    return mode, Correction("token_truncate" if mode == "auto" else mode, cap, floor)
