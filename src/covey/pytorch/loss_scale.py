"""The factor that keeps small gradients within float16, whose smallest number is 6e-8 and whose largest is 65,504."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_FIRST, _GROWTH, _BACKOFF, _INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""`torch.amp.GradScaler`'s defaults."""
_PREFIX = "loss_scale/"


class LossScale:
    """Losses are multiplied by it, and gradients divided by it before they are clipped.

    The rule is that of `torch.amp.GradScaler`: a gradient that overflows takes no step and halves the factor; 2,000
    steps without one double it. It is written out because gradients come from other processes and from `autograd.grad`
    too, which that class cannot follow.
    """

    def __init__(self) -> None:
        self.value, self.good_steps = _FIRST, 0

    def after_step(self, *, finite: bool) -> None:
        """Move on after a step whose gradient was finite, or one that was not taken since it was not."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value *= _BACKOFF
        elif self.good_steps == _INTERVAL:
            self.value, self.good_steps = self.value * _GROWTH, 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a resumed run needs."""
        numbers = {"value": self.value, "good_steps": float(self.good_steps)}
        return {f"{_PREFIX}{name}": torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}

    @staticmethod
    def owns(name: str) -> bool:
        """True for a name that `tensors` gives; no parameter's moment has such a one."""
        return name.startswith(_PREFIX)

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what `tensors` returned; a checkpoint without it leaves the scale at its beginning."""
        if f"{_PREFIX}value" in tensors:
            self.value = float(tensors[f"{_PREFIX}value"])
            self.good_steps = int(tensors[f"{_PREFIX}good_steps"])
