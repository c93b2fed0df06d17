"""Reward shaping that needs no more than lengths."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from covey.algorithms.arrays import Array, as_float
from covey.errors import ConfigError


def soft_overlong_punishment(lengths: Any, max_completion_length: int, cache: int) -> Array:
    """DAPO's penalty on long completions, to be added to the reward (arXiv 2503.14476, equation 13).

    0 up to `max_completion_length - cache` tokens, then falling linearly to -1 at the limit, -1 beyond. With
    a limit of 100 and a cache of 20: 80 tokens give 0, 90 give -0.5, 100 give -1.

    Args:
        lengths: `[N]` completion lengths in tokens.
        max_completion_length: L_max, in tokens.
        cache: L_cache, width of the falling part in tokens.

    Returns:
        `[N]` in [-1, 0].

    Raises:
        ConfigError: `cache` is not between 1 and `max_completion_length`.
    """
    if not 0 < cache <= max_completion_length:
        raise ConfigError(
            f"soft_overlong_cache={cache}: the punished range ends at max_completion_length="
            f"{max_completion_length}; choose 1 to {max_completion_length} tokens"
        )
    lengths = as_float(lengths)
    xp = array_namespace(lengths)
    penalty = (max_completion_length - cache - lengths) / cache
    penalty = xp.where(penalty > 0, xp.zeros_like(penalty), penalty)
    return xp.where(penalty < -1, -xp.ones_like(penalty), penalty)
