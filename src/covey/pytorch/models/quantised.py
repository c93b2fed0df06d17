"""Holds a model's linear layers in 4 or 8 bits, for LoRA on top (QLoRA, arXiv 2305.14314), and takes models that others
have quantised so.

    nf4            bitsandbytes: 4 bits of a normal distribution's quantiles, scales in 8 bits; 0.52 bytes a number
    int8           bitsandbytes: 8 bits, a scale for each output; 1 byte a number
    torchao_int8   torchao: the same

The output head, embeddings, norms and the experts of a mixture stay as they are.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from covey.errors import ModelError
from covey.pytorch.models.dequantise import product, quantisable_layers, quantised_layers

_PACKAGES = {"nf4": "bitsandbytes", "int8": "bitsandbytes", "torchao_int8": "torchao"}


class Int8Linear(nn.Linear):
    """A linear layer with torchao's weight, whose own product would keep the weight in full for the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` -> `[..., out]`."""
        return product(x, self)


def require_package(kind: str) -> None:
    """Refuse a kind of quantisation whose package is missing.

    Raises:
        ModelError: it says what to install.
    """
    if kind != "none" and importlib.util.find_spec(_PACKAGES[kind]) is None:
        raise ModelError(
            f"model.quantization={kind!r}: {_PACKAGES[kind]} is not installed; run pip install 'covey[quantization]', "
            "or set model.quantization to none"
        )


@torch.no_grad()
def quantise(model: Any, kind: str, device: torch.device, source: str) -> None:
    """Quantise the linear layers of a transformers model in place, one after the other, and move it to a device.

    Raises:
        ModelError: it has no linear layers, or is quantised already, or has an adapter.
    """
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
    """Make the layers of a model that somebody else has quantised compute as ours do.

    Raises:
        ModelError: they are of another kind.
    """
    for layer in list(quantised_layers(model)):
        own: Any = layer
        if type(own.weight).__name__ == "Int8Tensor":
            if own.weight.act_quant_kwargs is not None:
                raise ModelError(f"{source}: torchao rounds its activations too; use Int8WeightOnlyConfig")
            own.__class__ = Int8Linear
            continue
        from covey.pytorch.models.bitsandbytes_layers import Linear4bit, Linear8bit

        if hasattr(own, "state"):
            if own.state.has_fp16_weights:
                raise ModelError(f"{source}: its 8-bit layers hold their weights in float16; use load_in_8bit alone")
            own.__class__ = Linear8bit
        else:
            own.state_dict()  # which undoes the packing of processors with bfloat16 instructions
            own.__class__ = Linear4bit


def _nf4(linear: nn.Linear, device: torch.device) -> Any:
    from bitsandbytes.nn import Params4bit

    from covey.pytorch.models.bitsandbytes_layers import Linear4bit

    made = _empty(Linear4bit, linear, quant_type="nf4")
    made.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=made).to(device)
    return made


def _int8(linear: nn.Linear, device: torch.device) -> Any:
    from bitsandbytes.nn import Int8Params

    from covey.pytorch.models.bitsandbytes_layers import Linear8bit

    made = _empty(Linear8bit, linear, has_fp16_weights=False)
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
