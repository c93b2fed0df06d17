"""RMS norms with their backward written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from covey.pytorch.models.form import LayerForm, NormForm


class Norm:
    """One of a model's RMS norms, over the last dimension."""

    def __init__(self, form: NormForm, owner: nn.Module) -> None:
        self._eps, self._offset = form.eps, form.offset
        module: Any = owner.get_submodule(form.name)
        self._weight: Tensor = module.weight.detach()

    def weight(self) -> Tensor:
        """What it multiplies with; in float32 or wider where 1 is added, as transformers computes it."""
        if not self._offset:
            return self._weight
        return self._weight.to(torch.promote_types(self._weight.dtype, torch.float32)) + self._offset

    def scale(self, x: Tensor) -> Tensor:
        """`1 / rms(x)` over the last dimension, kept, at least in float32."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
        scale: Tensor = norm.square_().div_(x.shape[-1]).add_(self._eps).rsqrt_()
        return scale

    def apply(self, x: Tensor, scale: Tensor, weight: Tensor | None = None) -> Tensor:
        """`weight * x / rms(x)`, rounded where transformers rounds.

        Args:
            x: `[..., dim]`.
            scale: of `x`.
            weight: in place of its own, `[n, dim]` for `x` of n heads.
        """
        weight = self.weight() if weight is None else weight
        normed = x * scale
        if weight.dtype != normed.dtype:
            normed = normed.to(x.dtype)
        return normed.mul_(weight).to(x.dtype)

    def gradient(self, grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor | None = None) -> Tensor:
        """The gradient of `x`, in the dtype of `scale`, from `grad`, that of the output, which may be overwritten.

        With g = grad * weight and s = 1 / rms(x): `s g - s^3 x mean(g x)`.
        """
        g = grad.to(scale.dtype).mul_(self.weight() if weight is None else weight)
        factor = (g * x).sum(-1, keepdim=True).mul_(scale**3).div_(x.shape[-1])
        return g.mul_(scale).addcmul_(x.to(scale.dtype), factor, value=-1)


class HeadNorms:
    """The norms of a layer's queries and keys, `[M, heads + kv_heads, dim]`: of each head, or of all heads together."""

    def __init__(self, form: LayerForm, layer: nn.Module) -> None:
        assert form.head_norms is not None
        self._counts = [form.attention.heads, form.attention.kv_heads]
        self._norms = [Norm(norm, layer) for norm in form.head_norms]
        self._whole = form.whole_heads

    def apply(self, x: Tensor) -> Tensor:
        """The queries and keys normed."""
        return self._of_each(lambda norm, part, weight: norm.apply(part, norm.scale(part), weight), x)

    def gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of `x` from that of what `apply` made of it."""
        return self._of_each(lambda norm, x, weight, grad: norm.gradient(grad, x, norm.scale(x), weight), x, grad)

    def _of_each(self, function: Callable[..., Tensor], x: Tensor, *more: Tensor) -> Tensor:
        if not self._whole:  # the two in one go
            weights = [n.weight().expand(count, -1) for n, count in zip(self._norms, self._counts, strict=True)]
            return function(self._norms[0], x, torch.cat(weights), *more)
        parts = zip(*(torch.split(tensor, self._counts, dim=1) for tensor in (x, *more)), strict=True)
        found = []
        for norm, (part, *others) in zip(self._norms, parts, strict=True):
            flat = function(norm, part.flatten(1), None, *(other.flatten(1) for other in others))
            found.append(flat.view(part.shape))
        return torch.cat(found, dim=1)
