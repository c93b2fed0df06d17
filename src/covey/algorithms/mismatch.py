"""Sampler and trainer that disagree: truncated importance sampling.

A sampler that is another program (other kernels, other precision) draws from a slightly different policy than
the one that the trainer differentiates. The factors here, constants for differentiation, multiply the
surrogate loss; the ratio of the surrogate is then taken against the *trainer's* old log-probabilities. See
arXiv 2505.24034 and https://fengyao.notion.site/off-policy-rl.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from array_api_compat import array_namespace

from covey.algorithms.arrays import (
    Array,
    as_mask,
    bounded_exp,
    lookup,
    masked,
    masked_difference,
    row_sum,
    stop_gradient,
)
from covey.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance sampling for a sampler that is another program: mode and bounds of `mismatch_correction`."""

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
"""`importance_sampling_correction` -> (log-ratio of a token or of the sequence, what happens outside its bounds)."""


def mismatch_correction(
    trainer_old: Array, sampler_old: Array, mask: Array, mode: str, cap: float, floor: float | None = None
) -> Array:
    """`stopgrad(clip(exp(trainer_old - sampler_old), floor, cap))`, or 0 outside with the `_mask` modes.

    Bounded on both sides, `token_mask` is IcePop (as INTELLECT-3 prints it, arXiv 2512.16144, equation 1).

    Args:
        trainer_old: `[N, T]` log-probabilities that the trainer computes with the weights that sampled.
        sampler_old: `[N, T]` those that the sampler recorded.
        mask: `[N, T]` active tokens.
        mode: `token_truncate`, `token_mask`: each token by its own ratio. `sequence_truncate`,
            `sequence_mask`: the whole row by the ratio of the sequence, i.e. the exponential of the *sum*
            over its tokens.
        cap: largest ratio, positive.
        floor: smallest ratio, below `cap`; None = none.

    Returns:
        `[N, T]` for token modes (1 where masked), `[N, 1]` for sequence modes.

    Raises:
        ConfigError: unknown mode, or a cap that is not positive, or a floor that is not between 0 and the cap.
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
    log_ratio = reduce(masked_difference(trainer_old, sampler_old, mask), mask)
    return stop_gradient(limit(bounded_exp(log_ratio), cap, 0.0 if floor is None else floor))


def read_correction(text: str) -> tuple[str, Correction]:
    """`algorithm.importance_sampling_correction`, `MODE`, `MODE:CAP` or `MODE:FLOOR:CAP`, where `MODE` may also be
    `auto` or `off`: the mode as written, and the correction, of `auto` that which it stands for.

    Raises:
        ValueError: it is none of these.
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
