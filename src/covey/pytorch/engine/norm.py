"""RMS norms of the residual stream in as few operations as the device's kernels allow.

On CPU `rms_norm` is six operations. Two suffice if each row carries one more number: with `c = sqrt(d eps)`

    x / rms(x) = x sqrt(d) / sqrt(sum x^2 + d eps) = x sqrt(d) / ||[x, c]||

so a row's norm is taken over its d + 1 numbers, and `sqrt(d)` times the norm's weight is folded into the matrix that
reads the result. Elsewhere, and below float32, the norm is torch's own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


class Norms:
    """The norms of one model.

    Args:
        dim: d, of the residual stream.
        eps: added to the mean square.
        dtype: of the stream.
        device: of the stream.
    """

    def __init__(self, dim: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self._dim, self._eps = dim, eps
        self._folds = device.type == "cpu" and dtype == torch.float32

    def fold(self, weight: Tensor) -> Tensor | None:
        """`[d]` factors on the inputs of the matrix that reads a norm with this weight; None = none."""
        return weight * math.sqrt(self._dim) if self._folds else None

    def open(self, embedded: Tensor) -> Tensor:
        """The stream `[M, d or d + 1]` that begins with embeddings `[M, d]`; its first d columns are added to."""
        if not self._folds:
            return embedded
        stream = embedded.new_empty(len(embedded), self._dim + 1)
        stream[:, : self._dim] = embedded
        stream[:, self._dim] = math.sqrt(self._dim * self._eps)
        return stream

    def __call__(self, stream: Tensor, weight: Tensor) -> Tensor:
        """`[M, d]` normed; `weight` is applied here unless it was folded."""
        if self._folds:
            norm = torch.linalg.vector_norm(stream, dim=-1, keepdim=True)
            return stream[:, : self._dim].div(norm)
        return functional.rms_norm(stream, (self._dim,), weight, self._eps)
