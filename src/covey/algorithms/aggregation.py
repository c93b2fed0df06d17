"""The average of token losses, for any split of an optimiser step.

Every average here is a weight for each token: `loss = sum(weights · per_token)`. The weights hold the denominators of
the *whole* step. So the losses and gradients of micro-batches and ranks add up to those of the undivided step. A row
must not be split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from array_api_compat import array_namespace

from covey.algorithms.arrays import Array, as_mask, lookup
from covey.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The counts in the denominators of one optimiser step. Counts of parts add up: `sum(parts, StepCounts())`.

    Attributes:
        completions: number of rows N of the step, including rows whose tokens are all masked.
        active_tokens: number of tokens that no mask excludes.
        kept: number of rows with an active token.
    """

    completions: Any = 0
    active_tokens: Any = 0
    kept: Any = 0

    def __add__(self, other: StepCounts) -> StepCounts:
        return StepCounts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


def count_step(mask: Array) -> StepCounts:
    """The counts of a mask `[N, T]`, of the whole step or of a part."""
    xp = array_namespace(mask)
    active = as_mask(mask)
    kept = xp.sum(xp.astype(xp.any(active, axis=-1), xp.int32))
    return StepCounts(mask.shape[0], xp.sum(xp.astype(active, xp.int32)), kept)


Aggregator = Callable[[Array, StepCounts, int | None], Array]
"""`f(active [N, T] as 0/1 floats, counts, max_completion_length) -> weights [N, T]`."""


def _sum_over(count: str) -> Aggregator:
    return lambda active, counts, max_completion_length: active / _positive(getattr(counts, count))


def _sequence_mean(active: Array, counts: StepCounts, max_completion_length: int | None) -> Array:
    xp = array_namespace(active)
    return active / _positive(xp.sum(active, axis=-1, keepdims=True)) / _positive(counts.completions)


def _constant_length(active: Array, counts: StepCounts, max_completion_length: int | None) -> Array:
    if max_completion_length is None or max_completion_length < 1:
        raise ConfigError(
            f"max_completion_length={max_completion_length}: aggregation 'constant_length' (dr_grpo) divides "
            f"by it; pass the sampling limit, 1 or more"
        )
    return active / (_positive(counts.completions) * max_completion_length)


AGGREGATORS: dict[str, Aggregator] = {
    "sequence_mean": _sequence_mean,
    "token_mean": _sum_over("active_tokens"),
    "constant_length": _constant_length,
    "sequence_sum_mean": _sum_over("completions"),
    "sequence_sum_kept": _sum_over("kept"),
}


def token_weights(
    mask: Array, counts: StepCounts, aggregation: str, max_completion_length: int | None = None, *, dtype: Any = None
) -> Array:
    """The weight of each token in the loss of the step.

    ```
    mask                 [1 1 0]   of a step with 2 completions and 3 active tokens
                         [1 0 0]
    sequence_mean        [1/4 1/4 0], [1/2 0 0]   mean over a completion's tokens, then over completions
    token_mean           [1/3 1/3 0], [1/3 0 0]   mean over the active tokens of the step
    constant_length      [1/6 1/6 0], [1/6 0 0]   with max_completion_length = 3
    sequence_sum_mean    [1/2 1/2 0], [1/2 0 0]   sum over a completion's tokens, mean over completions
    sequence_sum_kept    [1/2 1/2 0], [1/2 0 0]   the same, mean over the completions that masks leave
    ```

    Args:
        mask: `[N, T]` of this part of the step, whole rows.
        counts: of the whole step, all micro-batches and ranks.
        aggregation: a name in `AGGREGATORS`.
        max_completion_length: in tokens, for `constant_length`.
        dtype: float type of the weights; the default one of the mask's library if None.

    Returns:
        `[N, T]`, 0 where masked. A step without an active token has all weights 0.

    Raises:
        ConfigError: unknown aggregation, or `constant_length` without a length.
    """
    xp = array_namespace(mask)
    active = xp.astype(as_mask(mask), xp.asarray(0.0).dtype if dtype is None else dtype)
    return lookup(AGGREGATORS, aggregation, "aggregation")(active, counts, max_completion_length)


def _positive(count: Any) -> Any:
    """`max(count, 1)`: an empty step divides 0 by 1."""
    if isinstance(count, int):
        return max(count, 1)
    xp = array_namespace(count)
    return xp.maximum(count, xp.ones_like(count))
