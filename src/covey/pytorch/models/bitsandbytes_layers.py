"""bitsandbytes' linear layers as they are trained through here; see `covey.pytorch.models.dequantise`.

Left to themselves they would, in evaluation mode, which a policy is always in, repack 4-bit weights on processors with
bfloat16 instructions for a kernel that has no gradient; fix the type of computation by the first input they see; and
round the inputs of 8-bit layers.
"""

from __future__ import annotations

import bitsandbytes
from torch import Tensor

from covey.pytorch.models.dequantise import in_autocast, product


class Linear4bit(bitsandbytes.nn.Linear4bit):  # type: ignore[misc]
    """Computes in `compute_dtype` where somebody has set it, else in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        cast = in_autocast(x)
        autocast = cast is not x
        cast = cast if autocast or self.compute_dtype is None else x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(cast.dtype)
        out: Tensor = bitsandbytes.matmul_4bit(cast, self.weight, bias=bias, quant_state=self.weight.quant_state)
        return out if autocast else out.to(x.dtype)


class Linear8bit(bitsandbytes.nn.Linear8bitLt):  # type: ignore[misc]
    """Computes with 8-bit weights and inputs as they are."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        return product(x, self)
