"""Frozen linear layers with LoRA adapters beside them as few matrix products, with their backward written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from covey.errors import ModelError
from covey.pytorch.models.lora import LeanLoraLinear
from covey.pytorch.products import add_product, linear, product


@dataclass(frozen=True, slots=True, eq=False)
class _Adapter:
    """One layer's adapter: `scaling * B A` on the outputs `columns`."""

    columns: slice
    rank: int
    b: Tensor  # [out, r]
    scaling: float
    dtypes: tuple[torch.dtype, torch.dtype]  # of the parameters A and B


@dataclass(frozen=True, slots=True, eq=False)
class Adapters:
    """The adapters of a projection during one pass, in its layers' dtype.

    The tensors are detached when the pass begins, so that a later exchange of data does not reach its backward.
    """

    a: Tensor  # [sum r, in]
    parts: list[_Adapter]

    def split(self, low: Tensor) -> list[Tensor]:
        """`x A'` `[M, sum r]` of all adapters -> `[M, r]` of each."""
        return list(torch.split(low, [part.rank for part in self.parts], dim=1))


class Projection:
    """Frozen linear layers that read the same input as one matrix product, with their LoRA adapters beside it.

    `x` `[M, in]` -> `[M, out]`, where `out` joins the outputs of all layers in their order. The layers' weights become
    views of one matrix, so no memory is added and their owner keeps them. Nothing is kept for the backward but `x A'`,
    `[M, r]` a layer; the caller keeps or recomputes `x`.

    Raises:
        ModelError: a layer is of another kind.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = list(layers)
        bases = [_base(layer) for layer in layers]
        biases = [base.bias for base in bases if base.bias is not None]
        if biases and len(biases) < len(bases):
            raise ModelError("some of the joined layers have a bias and some have none")
        self.parameters = [p for layer in layers for p in _adapter_parameters(layer)]
        starts = [0]
        for base in bases:
            starts.append(starts[-1] + base.out_features)
        self._columns = [slice(start, stop) for start, stop in pairwise(starts)]
        self._bases = bases

    def join(self) -> None:
        """Make the layers' weights views of one matrix. Until this is called nothing has been changed."""
        self._weight = self._bases[0].weight.detach()
        self._bias = None if self._bases[0].bias is None else self._bases[0].bias.detach()
        if len(self._bases) == 1:
            return
        self._weight = torch.cat([base.weight.detach() for base in self._bases])
        if self._bias is not None:
            self._bias = torch.cat([base.bias.detach() for base in self._bases])
        for base, columns in zip(self._bases, self._columns, strict=True):
            base.weight.data = self._weight[columns]
            if self._bias is not None:
                base.bias.data = self._bias[columns]

    def can_run(self) -> bool:
        """Whether every layer is now exactly `base + scaling * B A`, or its base alone."""
        return all(_is_plain(layer) for layer in self._layers)

    def adapters(self) -> Adapters | None:
        """The adapters that are switched on, None where there are none."""
        dtype, rows, parts = self._weight.dtype, [], []
        for layer, columns in zip(self._layers, self._columns, strict=True):
            if isinstance(layer, LeanLoraLinear) and not layer.disable_adapters:
                name = layer.active_adapters[0]
                a, b = layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach()
                rows.append(a.to(dtype))
                parts.append(_Adapter(columns, len(a), b.to(dtype), layer.scaling[name], (a.dtype, b.dtype)))
        return Adapters(torch.cat(rows), parts) if parts else None

    def forward(self, x: Tensor, adapters: Adapters | None) -> tuple[Tensor, Tensor | None]:
        """The outputs `[M, out]`, and `x A'` of all adapters side by side."""
        y = linear(x, self._weight, self._bias)
        if adapters is None:
            return y, None
        low = linear(x, adapters.a)
        for adapter, part in zip(adapters.parts, adapters.split(low), strict=True):
            add_product(y[:, adapter.columns], part, adapter.b.T, adapter.scaling)
        return y, low

    def backward(
        self, grad: Tensor, x: Tensor, low: Tensor | None, adapters: Adapters | None, *, needs_input: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        """From `grad` `[M, out]` the gradient of `x`, if it is needed, and those of `parameters` in their order."""
        grad_x = product(grad, self._weight) if needs_input else None
        if adapters is None or low is None:
            return grad_x, []
        grad_low = torch.empty_like(low)
        grads_b = []
        for adapter, part, into in zip(adapters.parts, adapters.split(low), adapters.split(grad_low), strict=True):
            mine = grad[:, adapter.columns]
            torch.mul(product(mine, adapter.b), adapter.scaling, out=into)  # l = c d(y) B
            # d(B), as ((x A^T)^T d(y))^T and not d(y)^T (x A^T): half the time for wide layers
            grads_b.append(product(part.T, mine).T.contiguous().mul_(adapter.scaling).to(adapter.dtypes[1]))
        if grad_x is not None:
            add_product(grad_x, grad_low, adapters.a)  # d(x) = d(y) W + l A
        grads_a = torch.split(product(grad_low.T, x), [adapter.rank for adapter in adapters.parts])
        grads: list[Tensor] = []
        for adapter, grad_a, grad_b in zip(adapters.parts, grads_a, grads_b, strict=True):
            grads += [grad_a.to(adapter.dtypes[0]), grad_b]
        return grad_x, grads


def _base(layer: Any) -> nn.Linear:
    base = layer.base_layer if isinstance(layer, LeanLoraLinear) else layer
    if type(base) is not nn.Linear:
        raise ModelError(f"a layer of type {type(layer).__name__}")
    return base


def _adapter_parameters(layer: Any) -> list[nn.Parameter]:
    if not isinstance(layer, LeanLoraLinear):
        return []
    if len(layer.active_adapters) != 1:
        raise ModelError(f"{len(layer.active_adapters)} adapters at once")
    name = layer.active_adapters[0]
    return [layer.lora_A[name].weight, layer.lora_B[name].weight]


def _is_plain(layer: Any) -> bool:
    return not isinstance(layer, LeanLoraLinear) or layer.disable_adapters or layer.plain_adapter() is not None
