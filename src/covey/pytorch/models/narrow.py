"""A model on a CPU that holds its frozen matrices in bfloat16, and computes everything else in float32.

A linear layer is `y = float32(bfloat16(x) W^T) + b` with `W` in bfloat16. Processors with AVX512-BF16 or AMX sum such
products in float32, at twice the speed of float32 ones (`covey.pytorch.products`), and read half the bytes. What flows
between the layers, norms, attention, adapters, loss and optimiser stay in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from covey.pytorch.products import narrow_product


class NarrowLinear(nn.Linear):
    """A frozen linear layer with its weight in bfloat16, for inputs in float32."""

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]` in float32."""
        y = narrow_product(input.flatten(0, -2), self.weight)
        return (y if self.bias is None else y + self.bias).view(*input.shape[:-1], -1)


class NarrowEmbedding(nn.Embedding):
    """A frozen embedding held in bfloat16."""

    def forward(self, input: Tensor) -> Tensor:
        """Ids -> `[..., d]` in float32."""
        return super().forward(input).float()


_KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: NarrowLinear, nn.Embedding: NarrowEmbedding}


def narrow(model: nn.Module) -> nn.Module:
    """Make a model in bfloat16 one that computes so; its weights are frozen. Matrices that other modules hold become
    float32 like everything else.
    """
    mine, others = set(), set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            (mine if type(module) in _KINDS and name == "weight" else others).add(id(parameter))
    for parameter in model.parameters():
        if id(parameter) not in mine - others:
            parameter.data = parameter.data.float()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()
    for module in model.modules():
        if type(module) in _KINDS and id(module.weight) in mine - others:
            module.__class__ = _KINDS[type(module)]
    return model.requires_grad_(False)


def narrow_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    """The weights that a model holds in bfloat16 and computes with in float32."""
    return (cast(Any, m).weight for m in model.modules() if isinstance(m, NarrowLinear | NarrowEmbedding))


def computing_dtype(model: nn.Module) -> torch.dtype:
    """The type of what flows through a model's layers."""
    if next(narrow_weights(model), None) is not None:
        return torch.float32
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
