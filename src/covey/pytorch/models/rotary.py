"""Rotary position embedding with few operations, forward and backward.

`rotate_half(x) * sin` with its minus sign moved into sin is a multiplication of `x` with its halves exchanged: no
negation. What turns are pairs of a head's first R numbers, `(i, i + R / 2)` or, as in GLM, `(2 i, 2 i + 1)`; the rest
of the head, where there is one, stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary variants whose frequencies do not depend on the sequence length."""


def rope_by_length(model: nn.Module) -> str | None:
    """Why a token's rotation depends on how long its sequence is, if it does: such sequences share no tokens."""
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for kind in types.values() if isinstance(types, dict) else [types]:
            if kind is not None and kind not in _FIXED_ROPE:
                return f"rope type {kind!r} depends on the sequence length"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class RotaryForm:
    """What a model's rotary module computes.

    Attributes:
        frequencies: `[R / 2]` radians for each position.
        scaling: factor on cosines and sines.
        neighbours: pairs are `(2 i, 2 i + 1)`, not `(i, i + R / 2)`.
    """

    frequencies: Tensor
    scaling: float
    neighbours: bool


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """The rotation at M positions.

    Attributes:
        cos: `[M, 1, R]`.
        signed_sin: `[M, 1, R]`, negative for the first of each pair.
        neighbours: see `RotaryForm`.
    """

    cos: Tensor
    signed_sin: Tensor
    neighbours: bool

    def forward(self, x: Tensor) -> Tensor:
        """Heads `[M, heads, dim]` turned."""
        return self._turned(x, self.signed_sin)

    def backward(self, grad: Tensor) -> Tensor:
        """The gradient `[M, heads, dim]` of what was turned: turned back."""
        return self._turned(grad, -self.signed_sin)

    def _turned(self, x: Tensor, signed_sin: Tensor) -> Tensor:
        size = self.cos.shape[-1]
        part = x[..., :size]
        other = torch.unflatten(part, -1, (-1, 2)).flip(-1).flatten(-2) if self.neighbours else part.roll(size // 2, -1)
        turned = torch.addcmul(part * self.cos, other, signed_sin)
        return turned if size == x.shape[-1] else torch.cat([turned, x[..., size:]], dim=-1)


class Rotary:
    """Makes the turns of one rotary module."""

    def __init__(self, form: RotaryForm, device: torch.device) -> None:
        self._scaling, self._neighbours = form.scaling, form.neighbours
        self._inverse_frequencies = form.frequencies.detach().to(device, torch.float32, copy=True)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Turn:
        """The rotation at positions `[M]`."""
        angles = positions.float()[:, None] * self._inverse_frequencies
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        if self._neighbours:
            cosines, sines = torch.stack([cos, cos], -1).flatten(-2), torch.stack([-sin, sin], -1).flatten(-2)
        else:
            cosines, sines = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        return Turn(cosines.to(dtype)[:, None], sines.to(dtype)[:, None], self._neighbours)
