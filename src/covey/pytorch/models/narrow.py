"""A model on a CPU that holds its frozen matrices in bfloat16, and computes everything else in float32.

A linear layer is `y = float32(bfloat16(x) W^T) + b` with `W` in bfloat16. Processors with AVX512-BF16 or AMX sum such
products in float32, at twice the speed of float32 ones (`covey.pytorch.products`), and read half the bytes. What flows
between the layers, norms, attention, adapters, loss and optimiser stay in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from covey.pytorch.products import can_pack, narrow_product


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
    """Make a model with frozen weights compute in bfloat16; other modules' matrices become float32 like the rest."""
    mine, others = set[int](), set[int]()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            (mine if type(module) in _KINDS and name == "weight" else others).add(id(parameter))
    for parameter in model.parameters():
        if id(parameter) not in mine - others:
            parameter.data = parameter.data.float()
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()
    for module in model.modules():
        if type(module) in _KINDS and id(module.weight) in mine - others:
            module.__class__ = _KINDS[type(module)]
    return model.requires_grad_(False)


def widen_trained(model: nn.Module) -> None:
    """Give back what is trained itself, as PEFT's `modules_to_save`, its weights and its products in float32."""
    for module in model.modules():
        if isinstance(module, NarrowLinear | NarrowEmbedding) and module.weight.requires_grad:
            module.weight.data = module.weight.data.float()
            cast(Any, module).__class__ = nn.Linear if isinstance(module, NarrowLinear) else nn.Embedding


def narrow_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    """The weights that a model holds in bfloat16 and computes with in float32."""
    return (cast(Any, m).weight for m in model.modules() if isinstance(m, NarrowLinear | NarrowEmbedding))


def computing_dtype(model: nn.Module) -> torch.dtype:
    """The type of what flows through a model's layers."""
    if next(narrow_weights(model), None) is not None:
        return torch.float32
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


class Packed:
    """Frozen weights in bfloat16, one below the other, as oneDNN's kernels read them fastest; made by `packed`."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._held = list(weights)  # so that nothing else comes to lie where they do
        rows = weights[0] if len(weights) == 1 else torch.cat(self._held)
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self._weight, self._packs = rows.contiguous(), can_pack(torch.bfloat16)
        if self._packs:
            self._weight = reorder(self._weight, 64)

    def multiply(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """`float32(bfloat16(x) W^T) + b` of x `[M, in]`, written to `out` if given, without a gradient."""
        narrow = x.to(torch.bfloat16)
        if self._packs:
            y = torch.ops.mkldnn._linear_pointwise(narrow, self._weight, None, "none", [], "")
        else:
            y = functional.linear(narrow, self._weight)
        wide: Tensor = y.float() if out is None else out.copy_(y)
        return wide if bias is None else wide.add_(bias)


class PackedBytes:
    """Weights in int8, one below the other, with a scale for each row; inputs too, with a scale for each token (W8A8).

    At 64 rows such products take half the time of those in bfloat16 on an AMD EPYC with VNNI.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._held = list(weights)  # as in Packed
        parts = [_in_bytes(part) for weight in weights for part in torch.split(weight.detach(), _ROWS)]
        rows, scales = (torch.cat(each) for each in zip(*parts, strict=True))
        self._scales, self._zeros = scales.flatten(), torch.zeros(len(rows), dtype=torch.int64)
        self._weight = torch.ops.onednn.qlinear_prepack(rows, None)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x W^T + b` of x `[M, in]` in float32; x is rounded to 8 bits, sums are exact."""
        rows, scales = _in_bytes(x)
        shifted = (rows.view(torch.uint8) ^ _ZERO), 1.0, _ZERO  # oneDNN takes unsigned inputs
        weight = self._weight, self._scales, self._zeros
        y: Tensor = torch.ops.onednn.qlinear_pointwise(*shifted, *weight, None, 1.0, 0, torch.float32, "none", [], "")
        return y.mul_(scales) if bias is None else torch.addcmul(bias, y, scales)


_ROWS, _ZERO = 8192, 128
"""Rows of a matrix that are rounded at a time; 0 among unsigned bytes."""


def _in_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 `[M, n]` and a scale for each row `[M, 1]`, whose product is close to x."""
    scales = x.float().abs().amax(1, keepdim=True).clamp_min_(1e-30).div_(127)
    return x.float().div(scales).round_().to(torch.int8), scales


_packed: WeakValueDictionary[tuple[object, ...], Packed | PackedBytes] = WeakValueDictionary()


def packed(weights: Sequence[Tensor], dtype: torch.dtype = torch.bfloat16) -> Any:
    """Weights `[out_i, in]`, packed once for all that use them at a time: a `Packed`, for int8 a `PackedBytes`."""
    narrow = [w.detach() if dtype == torch.int8 else w.detach().to(dtype) for w in weights]
    if (found := _packed.get((dtype, *_key(narrow)))) is None:
        _packed[dtype, *_key(narrow)] = found = (PackedBytes if dtype == torch.int8 else Packed)(narrow)
    return found


def if_packed(weight: Tensor) -> Packed | None:
    """The packed copy of a weight that somebody holds."""
    return cast(Any, _packed.get((torch.bfloat16, *_key([weight])))) if weight.dtype == torch.bfloat16 else None


def _key(weights: Sequence[Tensor]) -> tuple[object, ...]:
    return tuple((weight.data_ptr(), tuple(weight.shape), weight._version) for weight in weights)
