"""Token weights by hand."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

from covey.algorithms import AGGREGATORS, StepCounts, count_step, token_weights
from covey.errors import ConfigError

MASK = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=bool)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sequence_mean", [[1 / 6, 1 / 6, 0], [1 / 3, 0, 0], [0, 0, 0]]),  # the empty row counts
        ("token_mean", [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0], [0, 0, 0]]),
        ("constant_length", [[1 / 12, 1 / 12, 0], [1 / 12, 0, 0], [0, 0, 0]]),  # 3 completions × 4
        ("sequence_sum_mean", [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0], [0, 0, 0]]),
        ("sequence_sum_kept", [[1 / 2, 1 / 2, 0], [1 / 2, 0, 0], [0, 0, 0]]),  # the empty row does not count
    ],
)
def test_by_hand_in_all_libraries(aggregation: str, expected: list[list[float]]) -> None:
    counts = StepCounts(completions=3, active_tokens=3, kept=2)
    np.testing.assert_allclose(token_weights(MASK, counts, aggregation, 4), expected)
    tensor = token_weights(torch.from_numpy(MASK), counts, aggregation, 4, dtype=torch.float64)
    np.testing.assert_allclose(tensor.numpy(), expected)
    compiled = jax.jit(lambda m: token_weights(m, count_step(m), aggregation, 4))
    np.testing.assert_allclose(compiled(MASK), expected)


def test_counts_add_up_and_an_empty_step_has_no_nan() -> None:
    total = sum([count_step(MASK[:1]), count_step(MASK[1:])], StepCounts())
    assert (total.completions, int(total.active_tokens), int(total.kept)) == (3, 3, 2)
    assert total == count_step(MASK)
    empty = np.zeros((2, 3), dtype=bool)
    for aggregation in AGGREGATORS:
        for counts in (count_step(empty), StepCounts()):
            assert (token_weights(empty, counts, aggregation, 4) == 0).all()


def test_errors() -> None:
    with pytest.raises(ConfigError, match="did you mean 'token_mean'"):
        token_weights(MASK, count_step(MASK), "tokens_mean")
    for length in (None, 0):
        with pytest.raises(ConfigError, match=f"max_completion_length={length}"):
            token_weights(MASK, count_step(MASK), "constant_length", length)
