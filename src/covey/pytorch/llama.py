"""Llama-shaped models (Llama, Qwen2, Qwen3, Mistral): what the hand-written forward passes know about them.

Both the sampler's runner and the trainer's fused layers compute these models with few operations a layer. What a model
computes is read off its modules, not off its name alone: biases where they exist, query/key norms, each layer's sliding
window, the rotary module's own frequencies and scaling. A model that differs in any other way is refused.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from covey.errors import ModelError

_CLASSES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary variants whose frequencies do not depend on the sequence length."""


def check_llama(base: Any) -> None:
    """Refuse a model that is not of this shape.

    Args:
        base: the transformers model, with PEFT's layers in place or without.

    Raises:
        ModelError: the message says what differs.
    """
    name = type(base).__name__
    if name not in _CLASSES or type(base) is not getattr(transformers, name):
        raise ModelError(f"{type(base).__name__} is not one of {', '.join(_CLASSES)}")
    config = base.config
    if config.hidden_act not in ("silu", "swish"):
        raise ModelError(f"activation {config.hidden_act!r} is not silu")
    rope = base.model.rotary_emb
    if obstacle := rope_by_length(base):
        raise ModelError(obstacle)
    if 2 * rope.inv_freq.numel() != base.model.layers[0].self_attn.head_dim:
        raise ModelError("rotary embedding of a part of the head")


def rope_by_length(model: nn.Module) -> str | None:
    """Why a token's rotation depends on how long its sequence is, if it does: such sequences share no tokens."""
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for kind in types.values() if isinstance(types, dict) else [types]:
            if kind is not None and kind not in _FIXED_ROPE:
                return f"rope type {kind!r} depends on the sequence length"
    return None


def window_of(layer: Any, config: Any) -> int | None:
    """Sliding window of a decoder layer: Qwen decides for each layer, Mistral for the model, Llama has none."""
    attention = layer.self_attn
    if hasattr(attention, "sliding_window"):
        window: int | None = attention.sliding_window
        return window
    if type(layer).__name__.startswith("Mistral"):
        return None if config.sliding_window is None else int(config.sliding_window)
    return None


class Rotary:
    """Rotary position embedding as one multiply and one multiply-add.

    `rotate_half(x) * sin` with its minus sign moved into sin is `roll(x) * signed_sin`: no negation, no joining.

    Args:
        module: the model's `rotary_emb`.
        device: where it computes.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._scaling = float(module.attention_scaling)
        self._inverse_frequencies = module.inv_freq.detach().to(device, torch.float32, copy=True)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The cosines and signed sines of positions `[M]`, `[M, 1, head_dim]` each."""
        angles = positions.float()[:, None] * self._inverse_frequencies
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        return (
            torch.cat([cos, cos], dim=-1).to(dtype)[:, None],
            torch.cat([-sin, sin], dim=-1).to(dtype)[:, None],
        )


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate heads `[M, heads, head_dim]`; with `-signed_sin` this is the backward of the rotation."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)
