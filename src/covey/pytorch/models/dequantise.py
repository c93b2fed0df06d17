"""Frozen linear layers whose weights are held in 4 or 8 bits: what they stand for, and what they take.

    Params4bit   of bitsandbytes: nf4 or fp4, 4 bits and a scale for each 64 numbers
    Int8Params   of bitsandbytes: 8 bits and a scale for each output
    Int8Tensor   of torchao: the same

A layer computes `y = x W'^T + b`, where W' is what its weight stands for. So the numbers of a token depend on no other
token, the gradient is that of this function, and whoever computes with W' in full, as the sampler does, has the same
policy. (`bitsandbytes` by itself also rounds the inputs of 8-bit layers to 8 bits, by the tokens beside them.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

_KINDS = ("Params4bit", "Int8Params", "Int8Tensor")
"""By name, since neither library need be installed."""


def is_quantised(module: nn.Module) -> bool:
    """True for a linear layer whose weight is one of the module docstring's."""
    weight = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) and type(weight).__name__ in _KINDS


def quantised_layers(model: nn.Module) -> Iterator[nn.Linear]:
    """Those of a model, inside PEFT's layers too."""
    return (cast(nn.Linear, module) for module in model.modules() if is_quantised(module))


@torch.no_grad()
def dequantised(layer: nn.Module, dtype: torch.dtype | None = None) -> Tensor:
    """`[out, in]` what a layer's weight stands for; None = in the type that it was made from, or float32."""
    weight: Any = layer.weight
    kind = type(weight).__name__
    if kind == "Params4bit":
        from bitsandbytes.functional import dequantize_4bit

        found: Tensor = dequantize_4bit(weight.data, weight.quant_state)
    elif kind == "Int8Params":
        state: Any = layer.state
        scales = weight.SCB if state.SCB is None else state.SCB
        found = weight.data.to(torch.float32) * (scales / 127.0)[:, None]
    else:
        found = weight.dequantize()
    return found if dtype is None else found.to(dtype)


class _Product(torch.autograd.Function):
    """`x W'^T + b`; x `[..., in]` -> `[..., out]`. W' is made again for the backward, and nothing is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return functional.linear(x, dequantised(layer, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ dequantised(ctx.layer, grad.dtype), None


def product(x: Tensor, layer: nn.Linear) -> Tensor:
    """What a layer computes, in the type of x, or that of autocast."""
    return cast(Tensor, cast(Any, _Product).apply(in_autocast(x), layer))


def in_autocast(x: Tensor) -> Tensor:
    """The input of a product as autocast would have it."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def plain_linear(layer: nn.Module) -> nn.Linear:
    """An ordinary layer that computes the same."""
    weight = dequantised(layer)
    bias = cast(Any, layer).bias
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return made


def held_bytes(model: nn.Module) -> int:
    """Bytes of all parameters as they are held, with the scales of quantised ones."""
    layers = list(quantised_layers(model))
    theirs = {id(layer.weight) for layer in layers}
    plain = sum(p.nbytes for p in model.parameters() if id(p) not in theirs)
    return plain + sum(tensor.nbytes for layer in layers for tensor in _tensors(layer))


def num_parameters(model: nn.Module) -> int:
    """How many numbers they stand for."""
    layers = {id(layer.weight): layer for layer in quantised_layers(model)}
    return sum(
        layers[id(p)].in_features * layers[id(p)].out_features if id(p) in layers else p.numel()
        for p in model.parameters()
    )


def _tensors(layer: Any) -> Iterator[Tensor]:
    weight: Any = layer.weight
    if type(weight).__name__ == "Int8Tensor":
        yield from (weight.qdata, weight.scale)
        return
    yield weight.data
    if type(weight).__name__ == "Int8Params":
        yield weight.SCB if layer.state.SCB is None else layer.state.SCB
        return
    state = weight.quant_state
    while state is not None:
        yield state.absmax
        state = state.state2


def quantisable_layers(model: Any) -> list[str]:
    """Names of the linear layers besides the output head and an adapter's own."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    layers = [name for name, m in model.named_modules() if type(m) is nn.Linear and m is not head]
    return [name for name in layers if ".lora_" not in name]
