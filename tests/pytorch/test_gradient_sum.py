"""Gradients added in fixed point: the same bits in any order and partition, within rounding of the true sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from covey.pytorch.gradient_sum import QUANTUM, ExactSum


def parameters() -> list[Tensor]:
    return [
        torch.zeros(3, 2, requires_grad=True),
        torch.zeros(5, requires_grad=True),
        torch.zeros(1, requires_grad=True),
    ]


def pack(seed: int, scale: float) -> list[Tensor | None]:
    """Gradients of one pack: of the first two parameters only."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 2, generator=generator) * scale, torch.randn(5, generator=generator) * scale, None]


def added(packs: Sequence[Sequence[Tensor | None]], ranks: Sequence[Sequence[int]]) -> list[Tensor]:
    """The sum that each rank arrives at, when these packs are on these ranks."""
    own = [parameters() for _ in ranks]
    sums = [ExactSum(each, len(packs)) for each in own]
    for total, numbers in zip(sums, ranks, strict=True):
        for number in numbers:
            total.add(packs[number])
    together = torch.stack([total._total for total in sums]).sum(dim=0)
    for total in sums:
        total._reduce = lambda tensor: tensor.copy_(together)  # type: ignore[assignment, return-value]
        total.finish()
    for other in own[1:]:
        assert all(_equal(a.grad, b.grad) for a, b in zip(own[0], other, strict=True))
    return own[0]


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other is None or np.array_equal(one, other, equal_nan=True)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([1e-12, 1e-6, 1.0, 1e3]), min_size=1, max_size=7), st.integers(1, 4), st.randoms())
def test_any_order_and_partition_gives_one_sum(scales: list[float], world: int, random: object) -> None:
    packs = [pack(seed, scale) for seed, scale in enumerate(scales)]
    order = list(range(len(packs)))
    one = added(packs, [order])
    random.shuffle(order)  # type: ignore[attr-defined]
    many = added(packs, [order[rank::world] for rank in range(world)])
    assert all(_equal(a.grad, b.grad) for a, b in zip(one, many, strict=True))
    true = [sum(each[number].double() for each in packs) for number in (0, 1)]  # type: ignore[union-attr]
    for parameter, expected in zip(one, true, strict=False):
        np.testing.assert_allclose(parameter.grad.double(), expected, rtol=2**-23, atol=len(packs) * QUANTUM)
    assert one[2].grad is None  # nothing depends on it: AdamW is to leave it alone


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -(2.0**16)])
def test_what_is_out_of_range_makes_the_gradient_not_finite(value: float) -> None:
    broken = pack(0, 1.0)
    broken[1][2] = value  # type: ignore[index]
    for ranks in ([[0, 1]], [[0], [1]]):
        found = added([broken, pack(1, 1.0)], ranks)
        assert not any(torch.isfinite(p.grad).any() for p in found[:2] if p.grad is not None)
        assert found[0].grad is not None
