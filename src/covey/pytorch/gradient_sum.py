"""How the gradients of a step's packs are added: in floats by one process, in fixed point where there may be several.

Floats round at every addition, so their sum depends on its order, and with several processes on who ran which pack.
`ExactSum` rounds each number once, to a multiple of 2^-46, and adds integers, which has no order: the sum has the same
bits on any number of processes, and is within half a quantum for each pack of the true one (1e-14; AdamW's epsilon is
1e-8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from covey.rollout.packing import Pack

Result = TypeVar("Result")
Work = Callable[[Sequence[Pack]], Iterable[Result]]

QUANTUM = 2.0**-46
_LIMIT = 2.0**16
"""Of the absolute values that may be added up in all: the sum stays below 2^62 quanta."""


class GradientSum:
    """The gradient of one step, put together from its packs."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters

    def differentiate(self, loss: Tensor) -> Sequence[Tensor | None]:
        """The gradients of a pack's loss by the parameters, for `add`; may run in any thread."""
        return torch.autograd.grad(loss, self._parameters, allow_unused=True)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Take a pack's gradients in, one pack after the other."""
        raise NotImplementedError

    def finish(self) -> None:
        """Leave the sum in the parameters' `grad`; None for a parameter that no pack's loss depends on."""


class Share(Protocol):
    """Which packs of a step this process runs, and how it puts together what all processes found."""

    alone: bool

    def map(self, work: Work[Result], packs: Sequence[Pack]) -> Iterable[Result]:
        """The results of `work` on all packs, in their order, whoever ran them."""

    def sum(self, parameters: Sequence[Tensor], packs: int, *, side_by_side: bool) -> GradientSum:
        """An empty sum for a step of so many packs."""


class Alone:
    """One process runs everything."""

    alone = True

    def map(self, work: Work[Result], packs: Sequence[Pack]) -> Iterable[Result]:
        return work(packs)

    def sum(self, parameters: Sequence[Tensor], packs: int, *, side_by_side: bool) -> GradientSum:
        return FloatSum(parameters, side_by_side=side_by_side)


class AloneInFixedPoint(Alone):
    """One process runs everything, to the bits that several would find."""

    alone = False

    def sum(self, parameters: Sequence[Tensor], packs: int, *, side_by_side: bool) -> GradientSum:
        return ExactSum(parameters, packs)


class FloatSum(GradientSum):
    """Adds in the parameters' own precision, in the order of the packs."""

    def __init__(self, parameters: Sequence[Tensor], *, side_by_side: bool) -> None:
        """Begin at nothing. Packs side by side must not add to the same gradients; others do, which saves a copy."""
        super().__init__(parameters)
        self._side_by_side = side_by_side

    def differentiate(self, loss: Tensor) -> Sequence[Tensor | None]:
        if self._side_by_side:
            return super().differentiate(loss)
        torch.autograd.backward(loss)
        return ()

    def add(self, grads: Sequence[Tensor | None]) -> None:
        for parameter, grad in zip(self._parameters if grads else (), grads, strict=True):
            if grad is not None:
                grad = grad.contiguous()  # the fused AdamW reads memory in order, whatever the strides say
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


class ExactSum(GradientSum):
    """Adds in fixed point: the same bits in any order and any partition. A number that is not finite, or too large for
    the range, makes the whole gradient not finite: no step is taken.
    """

    def __init__(
        self, parameters: Sequence[Tensor], packs: int, reduce: Callable[[Tensor], None] = lambda total: None
    ) -> None:
        super().__init__(parameters)
        self._largest = _LIMIT / max(packs, 1)
        self._reduce = reduce
        device = parameters[0].device
        self._ends = torch.tensor([0, *(p.numel() for p in parameters)]).cumsum(0).tolist()
        # The sum; then for each parameter how many packs' losses depend on it; then how many packs were out of range.
        self._total = torch.zeros(self._ends[-1] + len(parameters) + 1, dtype=torch.int64, device=device)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        for number, grad in enumerate(grads):
            if grad is None:
                continue
            wide = grad.double().reshape(-1)
            inside = bool((wide.abs() < self._largest).all())  # False for NaN too
            if inside:
                self._total[self._ends[number] : self._ends[number + 1]] += (wide / QUANTUM).round_().long()
            self._total[self._ends[-1] + number] += 1
            self._total[-1] += not inside

    def finish(self) -> None:
        self._reduce(self._total)
        broken = bool(self._total[-1])
        for number, parameter in enumerate(self._parameters):
            if not self._total[self._ends[-1] + number]:
                continue
            own = self._total[self._ends[number] : self._ends[number + 1]].double().mul_(QUANTUM)
            parameter.grad = own.to(parameter.dtype).view(parameter.shape)
            if broken:
                parameter.grad.fill_(float("nan"))
