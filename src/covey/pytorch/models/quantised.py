"""Frozen linear layers in 4 or 8 bits: what their weights stand for, for LoRA on top (QLoRA, arXiv 2305.14314).

    nf4            Params4bit of bitsandbytes (fp4 is known too): 4 bits of a normal distribution's quantiles, and a
                   scale in 8 bits for each 64 numbers; 0.52 bytes a number
    int8           Int8Params of bitsandbytes: 8 bits, a scale for each output; 1 byte a number
    torchao_int8   Int8Tensor of torchao: the same

A layer computes `y = x W'^T + b`, where W' is what its weight stands for. So the numbers of a token depend on no other
token, the gradient is that of this function, and whoever computes with W' in full, as the sampler does, has the same
policy. (`bitsandbytes` by itself also rounds the inputs of 8-bit layers to 8 bits, by the tokens beside them.) Models
that others have quantised so are taken too. The output head, embeddings, norms and the experts of a mixture stay as
they are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from covey.errors import ModelError

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


def dequantised_product(layer: nn.Linear, x: Tensor) -> Tensor:
    """`x W'^T + b` as an ordinary layer computes it, in the type of x."""
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return functional.linear(x, dequantised(layer, x.dtype), bias)


class _Product(torch.autograd.Function):
    """`x W'^T + b`; x `[..., in]` -> `[..., out]`. W' is made again for the backward, and nothing is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
        ctx.layer = layer
        return dequantised_product(layer, x)

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


def quantisable_layers(model: Any) -> list[str]:
    """Names of the linear layers besides the output head and an adapter's own."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    layers = [name for name, m in model.named_modules() if type(m) is nn.Linear and m is not head]
    return [name for name in layers if ".lora_" not in name]


_PACKAGES = {"nf4": "bitsandbytes", "int8": "bitsandbytes", "torchao_int8": "torchao"}


@cache
def _bitsandbytes_layers() -> tuple[Any, Any]:
    """Bitsandbytes' layers of 4 and 8 bits as they are trained through here. By themselves they would repack 4-bit
    weights, in evaluation mode, for a kernel without a gradient, fix the type of computation by the first input they
    see, and round the inputs of 8-bit layers.
    """
    import bitsandbytes

    class Linear4bit(bitsandbytes.nn.Linear4bit):  # type: ignore[misc]
        """Computes in `compute_dtype` where somebody has set it, else in the type of its input."""

        def forward(self, x: Tensor) -> Tensor:
            cast = in_autocast(x)
            autocast = cast is not x
            cast = cast if autocast or self.compute_dtype is None else x.to(self.compute_dtype)
            bias = None if self.bias is None else self.bias.to(cast.dtype)
            out: Tensor = bitsandbytes.matmul_4bit(cast, self.weight, bias=bias, quant_state=self.weight.quant_state)
            return out if autocast else out.to(x.dtype)

    class Linear8bit(bitsandbytes.nn.Linear8bitLt):  # type: ignore[misc]
        """Computes with 8-bit weights and inputs as they are."""

        def forward(self, x: Tensor) -> Tensor:
            return product(x, self)

    return Linear4bit, Linear8bit


class Int8Linear(nn.Linear):
    """A linear layer with torchao's weight, whose own product would keep the weight in full for the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` -> `[..., out]`."""
        return product(x, self)


def require_package(kind: str) -> None:
    """Refuse a kind of quantisation whose package is missing, with a `ModelError` that says what to install."""
    if kind != "none" and importlib.util.find_spec(_PACKAGES[kind]) is None:
        raise ModelError(
            f"model.quantization={kind!r}: {_PACKAGES[kind]} is not installed; run pip install 'covey[quantization]', "
            "or set model.quantization to none"
        )


@torch.no_grad()
def quantise(model: Any, kind: str, device: torch.device, source: str) -> None:
    """Quantise a model's linear layers in place and move it to a device; `ModelError`: none, or quantised already."""
    if any(quantised_layers(model)):
        raise ModelError(f"model.quantization={kind!r}: {source} is quantised already; set model.quantization to none")
    names = quantisable_layers(model)
    if not names:
        raise ModelError(
            f"model.quantization={kind!r}: {source} ({type(model).__name__}) has no linear layers that could be "
            "quantised; set model.quantization to none"
        )
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, _MAKERS[kind](model.get_submodule(name), device))
    model.to(device)
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = kind == "nf4", kind == "int8"  # by which PEFT chooses its layers


def adopt(model: nn.Module, source: str) -> None:
    """Make the layers of a model that somebody else has quantised compute as ours do; `ModelError` for another kind."""
    for layer in list(quantised_layers(model)):
        own: Any = layer
        if type(own.weight).__name__ == "Int8Tensor":
            if own.weight.act_quant_kwargs is not None:
                raise ModelError(f"{source}: torchao rounds its activations too; use Int8WeightOnlyConfig")
            own.__class__ = Int8Linear
            continue
        four_bits, eight_bits = _bitsandbytes_layers()
        if hasattr(own, "state"):
            if own.state.has_fp16_weights:
                raise ModelError(f"{source}: its 8-bit layers hold their weights in float16; use load_in_8bit alone")
            own.__class__ = eight_bits
        else:
            own.state_dict()  # which undoes the packing of processors with bfloat16 instructions
            own.__class__ = four_bits


def _nf4(linear: nn.Linear, device: torch.device) -> Any:
    from bitsandbytes.nn import Params4bit

    made = _empty(_bitsandbytes_layers()[0], linear, quant_type="nf4")
    made.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=made).to(device)
    return made


def _int8(linear: nn.Linear, device: torch.device) -> Any:
    from bitsandbytes.nn import Int8Params

    made = _empty(_bitsandbytes_layers()[1], linear, has_fp16_weights=False)
    made.weight = Int8Params(linear.weight.data.cpu(), requires_grad=False, has_fp16_weights=False).to(device)
    return made


def _torchao_int8(linear: nn.Linear, device: torch.device) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    made = _empty(Int8Linear, linear)
    made.weight = nn.Parameter(linear.weight.data.to(device), requires_grad=False)
    quantize_(made, Int8WeightOnlyConfig(set_inductor_config=False))
    return made


def _empty(kind: Any, linear: nn.Linear, **options: Any) -> Any:
    """A layer of this kind and shape, with the bias of `linear` and no weight yet."""
    made = kind(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta", **options)
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias.data, requires_grad=False)
    return made.eval()


_MAKERS = {"nf4": _nf4, "int8": _int8, "torchao_int8": _torchao_int8}
