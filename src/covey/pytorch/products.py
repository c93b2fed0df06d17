"""Matrix products of float32 on a CPU, by the library that multiplies faster there.

torch asks MKL, which has its fast kernels for Intel's processors alone. oneDNN, which torch brings too, compiles its
own for the processor that it finds. On an AMD EPYC of 2026 (AVX-512), SmolLM2-135M's matrices at 700 rows, GFLOP/s of
one thread / of two:

    MKL 117 / 220        oneDNN 262 / 480

On Intel's the two are alike, and MKL stays. Which one it is follows from the processor's maker and not from a
measurement, so that a run that is resumed on the same machine multiplies as before. What is not float32 on such a CPU
is torch's business.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

_COLUMNS = 8192
"""Of a product that is written to memory that is there: so much of it is new memory first."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b`: `x` `[M, in]`, `weight` `[out, in]`, `bias` `[out]`. A weight in bfloat16 for x in float32 is
    multiplied as `narrow_product` does.
    """
    if is_narrow(x, weight):
        y = narrow_product(x, weight)
        return y if bias is None else y.add_(bias)
    if not _serves(x, weight) or (bias is not None and not _is_plain(bias)):
        return functional.linear(x, weight, bias)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a b`: `[M, k]` and `[k, n]`."""
    return linear(a, b.T) if _serves(a, b) or is_narrow(a, b) else a @ b


def product_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`a b`, written to `out` `[M, n]`, which is returned; without a gradient."""
    if is_narrow(a, b):
        return out.copy_(a.to(b.dtype) @ b)
    if not _serves(a, b):
        return torch.mm(a, b, out=out)
    for into, weight in zip(torch.split(out, _COLUMNS, dim=1), torch.split(b.T, _COLUMNS), strict=True):
        into.copy_(linear(a, weight))
    return out


def add_product(into: Tensor, a: Tensor, b: Tensor, factor: float = 1.0) -> Tensor:
    """`into += factor * a b`; returns `into` `[M, n]`."""
    return into.add_(linear(a, b.T), alpha=factor) if _serves(a, b) else into.addmm_(a, b, alpha=factor)


class _NarrowProduct(torch.autograd.Function):
    """See `narrow_product`; the weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return functional.linear(x.to(weight.dtype), weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad.to(ctx.weight.dtype) @ ctx.weight).to(grad.dtype), None


def narrow_product(x: Tensor, weight: Tensor) -> Tensor:
    """`x W^T` `[M, out]` in the type of x: both rounded to that of the weight, summed in float32, and the result
    rounded once more.
    """
    return cast(Tensor, cast(Any, _NarrowProduct).apply(x, weight))


def is_narrow(a: Tensor, b: Tensor) -> bool:
    """Whether b is frozen and narrower than a on purpose, see `covey.pytorch.models.narrow`."""
    return b.dtype == torch.bfloat16 and a.dtype == torch.float32 and a.device.type == "cpu"


def _serves(a: Tensor, b: Tensor) -> bool:
    if not (a.dtype == b.dtype == torch.float32 and a.device.type == b.device.type == "cpu" and prefers_onednn()):
        return False
    if not (_is_dense(a) and _is_dense(b)):
        return False  # columns of a wider matrix take hundreds of times as long
    differentiates = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)  # which its operators do not
    return a.numel() > 0 and b.numel() > 0 and not differentiates


def _is_plain(bias: Tensor) -> bool:
    differentiates = torch.is_grad_enabled() and bias.requires_grad
    return bias.dtype == torch.float32 and bias.is_contiguous() and not differentiates  # oneDNN looks at no strides


def _is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or x.T.is_contiguous()


@cache
def prefers_onednn() -> bool:
    """Whether oneDNN multiplies here: the processor is AMD's, and torch has the operators that its compiler emits."""
    try:
        makers = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "AuthenticAMD" in makers and can_pack()


_KEPT_KERNELS = "64"
"""Compiled for a number of rows and a matrix in 0.3 ms, and held with up to 3 MB: torch and oneDNN would each keep
1,024 of them, 0.7 GB after 150 packs of different sizes."""
_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""torch's own and oneDNN's; read when the first one is compiled."""


@cache
def can_pack(dtype: torch.dtype = torch.float32) -> bool:
    """True when oneDNN's linear operators exist here and multiply correctly, packed and transposed."""
    for name in _CACHES:
        os.environ.setdefault(name, _KEPT_KERNELS)
    weight = torch.arange(32, dtype=dtype).view(8, 4) / 32
    x = torch.arange(12, dtype=dtype).view(3, 4)
    turned = weight.T.contiguous().T
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
        found = [torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "") for w in (packed, weight, turned)]
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    expected = x.float() @ weight.float().T
    return all(bool(torch.allclose(y.float(), expected, atol=1e-5, rtol=torch.finfo(dtype).eps)) for y in found)
