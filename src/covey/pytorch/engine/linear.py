"""A linear layer for inference: the weight in the layout that multiplies fastest on its device.

SmolLM2-135M's matrices in float32, one CPU thread (Xeon, AVX-512), milliseconds for 30 layers (head: 1),
at 64 rows / 8 rows:

    out x in            F.linear (MKL)    transposed (MKL)    packed (oneDNN)
      960 x 576  qkv      14.9 /  5.3         11.7 /  3.1         16.4 /  4.0
      576 x 576  out      10.9 /  2.5          6.5 /  1.6          8.4 /  2.5
     3072 x 576  gate,up  60.8 / 37.0         60.2 / 35.1         47.4 / 18.7
      576 x 1536 down     24.1 / 13.2         18.3 / 12.9         25.7 /  8.9
    49152 x 576  head     29.0 / 17.7         23.7 / 16.8         23.9 /  7.4

So wide matrices are packed and the others transposed. The packed form uses the operators that torch's
inductor emits; where they are missing or fail, and on every other device and dtype, the layer is plain
`F.linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

_WIDE = 4
"""Outputs for each input from which packing pays."""


class Linear:
    """`y = x W^T + b` for `x` `[M, in]`. Holds a copy of the weight in its own layout.

    Args:
        dtype: of the weight and of the inputs.
        device: of the weight.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._layouts = device.type == "cpu" and dtype == torch.float32
        self._weight: Tensor | None = None
        self._apply: Callable[[Tensor], Tensor] = _not_loaded

    def load(self, weights: Sequence[Tensor], bias: Tensor | None = None, scale: Tensor | None = None) -> None:
        """Copy weights, into the memory of the last ones where the layout allows it.

        Args:
            weights: `[out_i, in]`, one below the other, in the layer's dtype and on its device.
            bias: `[out]`.
            scale: `[in]` factors on the inputs.
        """
        outputs, inputs = sum(len(w) for w in weights), weights[0].shape[1]
        bias = None if bias is None else bias.clone()
        if self._layouts and outputs >= _WIDE * inputs and _can_pack():
            self.release()
            joined = weights[0] if len(weights) == 1 else torch.cat(list(weights))
            joined = joined if scale is None else joined * scale
            packed = torch.ops.mkldnn._reorder_linear_weight(joined.contiguous(), 64)
            self._apply = lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
            return
        shape = (inputs, outputs) if self._layouts else (outputs, inputs)
        if self._weight is None or self._weight.shape != shape:
            self._weight = weights[0].new_empty(shape)
        held = self._weight
        start = 0
        for weight in weights:
            part = slice(start, start + len(weight))
            into = held[:, part].T if self._layouts else held[part]
            torch.mul(weight, scale, out=into) if scale is not None else into.copy_(weight)
            start = part.stop
        if not self._layouts:
            self._apply = lambda x: functional.linear(x, held, bias)
        elif bias is None:
            self._apply = lambda x: torch.mm(x, held)
        else:
            self._apply = lambda x: torch.addmm(bias, x, held)

    def release(self) -> None:
        """Give the memory back; `load` must come before the next use."""
        self._weight, self._apply = None, _not_loaded

    def __call__(self, x: Tensor) -> Tensor:
        return self._apply(x)


_packable: bool | None = None


def _can_pack() -> bool:
    """True when oneDNN's packed linear exists here and multiplies correctly. Asked once."""
    global _packable
    if _packable is None:
        try:
            weight = torch.arange(32, dtype=torch.float32).view(8, 4) / 32
            x = torch.arange(12, dtype=torch.float32).view(3, 4)
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
            y = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
            _packable = bool(torch.allclose(y, x @ weight.t(), atol=1e-5))
        except (RuntimeError, AttributeError, NotImplementedError):
            _packable = False
    return _packable


def _not_loaded(x: Tensor) -> Tensor:
    raise RuntimeError("a linear layer was used before weights were loaded")
