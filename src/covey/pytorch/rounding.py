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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from covey.errors import ModelError
from covey.pytorch.models.narrow import narrow_weights
from covey.pytorch.models.quantised import dequantised_product, quantised_layers

_TIMES_OWN = (3.0, 8.0)
"""Largest error, as a multiple of the model's own: on average, and at the worst position."""
_ALWAYS_FINE = (1e-3, 1e-2)
"""Nats added to these limits: in float32 the model is its own truth, and its own error 0."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float64 for float64, else float32: the precision of logits, and of the truth for a computation in `dtype`."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype, *, dequantise: bool = False) -> Iterator[None]:
    """Inside, the model computes with its own weights in another precision.

    What belongs to a decoder layer is converted while that layer runs, so that one layer's copy exists at a time.
    Quantised layers compute as ever, or with `dequantise` as plain ones do with what their weights stand for.
    """
    held: dict[nn.Parameter, Tensor] = {}
    packed = list(quantised_layers(model))
    left_alone = {id(layer.weight) for layer in packed}
    if not dequantise:
        left_alone |= {id(weight) for weight in narrow_weights(model)}

    def convert(parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if not parameter.is_floating_point() or id(parameter) in left_alone:
                continue
            if parameter.dtype != dtype and parameter not in held:
                held[parameter] = parameter.data
                parameter.data = parameter.data.to(dtype)

    def put_back(parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter in held:
                parameter.data = held.pop(parameter)

    inside: set[nn.Parameter] = set()
    hooks: list[Any] = []
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            own = list(module.parameters())
            inside.update(own)
            hooks.append(module.register_forward_pre_hook(lambda *_, own=own: convert(own)))
            hooks.append(module.register_forward_hook(lambda *_, own=own: put_back(own)))
    try:
        for layer in packed if dequantise else ():
            layer.forward = partial(dequantised_product, layer)  # type: ignore[method-assign]
        convert([parameter for parameter in model.parameters() if parameter not in inside])
        yield
    finally:
        for layer in packed if dequantise else ():
            layer.__dict__.pop("forward", None)
        for hook in hooks:
            hook.remove()
        put_back(list(held))


def truth_and_own(model: nn.Module, dtype: torch.dtype, compute: Callable[[torch.dtype], Tensor]) -> tuple[Tensor, ...]:
    """What `compute` finds of a model in a wide precision, and in the model's own; once, where the two are the same.

    Of a quantised model the first is with what its weights stand for, in full, and the second as its layers compute.
    """
    with computing_in(model, wide_dtype(dtype), dequantise=True):
        truth = compute(wide_dtype(dtype))
    if wide_dtype(dtype) == dtype and not any(quantised_layers(model)) and not any(True for _ in narrow_weights(model)):
        return truth, truth
    with computing_in(model, dtype):
        return truth, compute(wide_dtype(dtype))


def unexplained(found: Tensor, own: Tensor, truth: Tensor) -> str:
    """Why rounding alone cannot make `found` out of the model, or "". `[n, V]` log-probabilities: computed in another
    way; by the model's own code in the same precision; and by it in float32 or wider. `ModelError` where the model's
    own are not finite.
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
