"""What rounding explains: is another way of running a model the same model?

Two ways of computing the same numbers in bfloat16 differ by as much as each differs from the exact ones, and that
depends on the model: 0.01 nats for a tiny one, 0.07 for SmolLM2-135M, more where tokens are improbable. So no fixed
tolerance can tell rounding from a mistake. Here the measure is the model's own error:

    error(found) = mean over positions of  sum_v p_v |log found_v - log p_v|        p: the model in float32

and a way is accepted when its error is at most three times that of the model's own code in the same precision. Correct
ways have 0.6 to 1.8 times of it (150 tiny models of seven families, and SmolLM2, in bfloat16 and float16); the mildest
of the mistakes that the tests inject, one of five norms without its weight, has 4, most have 20 to 800.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from covey.errors import ModelError

_TIMES_OWN = (3.0, 8.0)
"""Largest error, as a multiple of the model's own: on average, and at the worst position."""
_ALWAYS_FINE = (1e-3, 1e-2)
"""Nats added to these limits: in float32 the model is its own truth, and its own error 0."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of the truth for a computation in `dtype`."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the model computes with its own weights in another precision.

    What belongs to a decoder layer is converted while that layer runs, so that one layer's copy exists at a time.
    """
    held: dict[nn.Parameter, Tensor] = {}

    def convert(parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.is_floating_point() and parameter.dtype != dtype and parameter not in held:
                held[parameter] = parameter.data
                parameter.data = parameter.data.to(dtype)

    def put_back(parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter in held:
                parameter.data = held.pop(parameter)

    layers = [list(m.parameters()) for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    inside = {parameter for layer in layers for parameter in layer}
    hooks: list[Any] = []
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            own = list(module.parameters())
            hooks.append(module.register_forward_pre_hook(lambda *_, own=own: convert(own)))
            hooks.append(module.register_forward_hook(lambda *_, own=own: put_back(own)))
    try:
        convert([parameter for parameter in model.parameters() if parameter not in inside])
        yield
    finally:
        for hook in hooks:
            hook.remove()
        put_back(list(held))


def unexplained(found: Tensor, own: Tensor, truth: Tensor) -> str:
    """Why rounding alone cannot make `found` out of the model, or "" where it can.

    Args:
        found: `[n, V]` log-probabilities computed in another way.
        own: `[n, V]` those of the model's own code in the same precision.
        truth: `[n, V]` those of the model's own code in float32 or wider.

    Raises:
        ModelError: the model's own log-probabilities are not finite.
    """
    theirs, its_own = _errors(found, truth), _errors(own, truth)
    if not torch.isfinite(its_own).all():
        raise ModelError(
            "the model's own logits are not finite in the precision that it is to run in; choose bfloat16 or float32, "
            "and check its weights"
        )
    measured, explained = (theirs.mean(), theirs.max()), (its_own.mean(), its_own.max())
    for value, limit, times, fine in zip(measured, explained, _TIMES_OWN, _ALWAYS_FINE, strict=True):
        if not value <= times * limit + fine:  # True for NaN
            return (
                f"log-probabilities differ by {float(measured[0]):.2g} nats on average and {float(measured[1]):.2g} at "
                f"most, where rounding explains {float(explained[0]):.2g} and {float(explained[1]):.2g}"
            )
    return ""


def _errors(found: Tensor, truth: Tensor) -> Tensor:
    """`[n]` mean distance to the truth over the vocabulary, by its probability."""
    probability = truth.exp()
    distance = (found.to(truth.device, truth.dtype) - truth).abs()
    return torch.where(probability > 0, probability * distance, 0.0).sum(-1)
