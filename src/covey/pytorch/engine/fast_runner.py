"""Runs Llama-shaped models (Llama, Qwen2, Qwen3, Mistral) with a few operations a layer, on its own copy.

The copy fuses the query, key and value projections into one matrix, gate and up into another, and stores each
in the layout that multiplies fastest (see `linear.py`). What a model computes is read off its modules, not
off its name alone: biases where they exist, query/key norms, each layer's sliding window, the rotary module's
own frequencies and scaling, tied or untied head. A model that differs in any other way is refused, and the
engine takes the general path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from covey.errors import ModelError
from covey.pytorch.engine.cache import LayerShape
from covey.pytorch.engine.linear import Linear
from covey.pytorch.engine.merge import EffectiveWeights, bare_model
from covey.pytorch.engine.runner import Step

_CLASSES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary variants whose frequencies do not depend on the sequence length."""


class FastRunner:
    """See the module docstring.

    Args:
        model: the policy; only its shape is read here, weights come with `load`.
        dtype: of the copy and of the computation.
        device: of the copy.

    Raises:
        ModelError: the model is not of this shape; the message says what differs.
    """

    name = "fast"

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        base: Any = bare_model(model)
        _check_shape(base)
        config, decoder = base.config, base.model
        self._dtype, self._device = dtype, device
        attention = decoder.layers[0].self_attn
        self._dim: int = attention.head_dim
        self._kv_heads: int = config.num_key_value_heads
        self._heads: int = config.num_attention_heads
        self._eps: float = config.rms_norm_eps
        self._rope_scaling = float(decoder.rotary_emb.attention_scaling)
        self._inverse_frequencies = decoder.rotary_emb.inv_freq.detach().to(device, torch.float32, copy=True)
        self._layers = [_Layer(i, layer, config, dtype, device) for i, layer in enumerate(decoder.layers)]
        self.layer_shapes: Sequence[LayerShape] = [LayerShape(self._kv_heads, self._dim, self._dim)] * len(self._layers)
        self._embedding = torch.empty(0)
        self._norm = torch.empty(0)
        self._head = Linear(dtype, device)

    def load(self, weights: EffectiveWeights) -> None:
        """Copy, merge and fuse the weights."""
        for layer in self._layers:
            layer.load(weights)
        take = _Taker(weights, self._dtype, self._device)
        embedding = take("model.embed_tokens.weight", copy=True)
        self._embedding = embedding
        self._norm = take("model.norm.weight", copy=True)
        tied = weights.shares("lm_head.weight", "model.embed_tokens.weight")
        self._head.load(embedding if tied else take("lm_head.weight"), take.optional("lm_head.bias"))

    def forward(self, step: Step) -> Tensor:
        """Logits `[n, V]`; see `Runner`."""
        attend, heads, kv_heads, dim = step.attention.attend, self._heads, self._kv_heads, self._dim
        x = functional.embedding(step.token_ids, self._embedding)
        cos, sin = self._rotary(step.positions)
        for i, layer in enumerate(self._layers):
            h = functional.rms_norm(x, (x.shape[-1],), layer.input_norm, self._eps)
            qkv = layer.qkv(h).view(x.shape[0], heads + 2 * kv_heads, dim)
            qk = qkv[:, : heads + kv_heads]
            if layer.qk_norm is not None:
                qk = functional.rms_norm(qk, (dim,), None, self._eps) * layer.qk_norm
            # rotate_half(x) * sin with its minus sign moved into sin: one roll, no negation and joining
            qk = torch.addcmul(qk * cos, qk.roll(dim // 2, -1), sin)
            attended = attend(
                i,
                qk[:, :heads],
                qk[:, heads:],
                qkv[:, heads + kv_heads :],
                scale=dim**-0.5,
                window=layer.window,
            )
            x = x.add_(layer.out(attended.reshape(x.shape[0], heads * dim)))
            h = functional.rms_norm(x, (x.shape[-1],), layer.mlp_norm, self._eps)
            gate, up = layer.gate_up(h).chunk(2, dim=-1)
            x = x.add_(layer.down(functional.silu(gate).mul_(up)))
        if step.last is not None:
            x = x.index_select(0, step.last)
        return self._head(functional.rms_norm(x, (x.shape[-1],), self._norm, self._eps))

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The cosines and signed sines of the positions, `[M, 1, head_dim]` each."""
        angles = positions.float()[:, None] * self._inverse_frequencies
        cos, sin = angles.cos() * self._rope_scaling, angles.sin() * self._rope_scaling
        return (
            torch.cat([cos, cos], dim=-1).to(self._dtype)[:, None],
            torch.cat([-sin, sin], dim=-1).to(self._dtype)[:, None],
        )


class _Layer:
    def __init__(self, index: int, layer: Any, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._prefix = f"model.layers.{index}."
        self._dtype, self._device = dtype, device
        self._repeats = (config.num_attention_heads, config.num_key_value_heads)
        attention = layer.self_attn
        # Qwen decides for each layer, Mistral for the model, Llama has no window
        if hasattr(attention, "sliding_window"):
            self.window: int | None = attention.sliding_window
        elif type(layer).__name__.startswith("Mistral"):
            self.window = config.sliding_window
        else:
            self.window = None
        self.qkv, self.out, self.gate_up, self.down = (Linear(dtype, device) for _ in range(4))
        self.input_norm = self.mlp_norm = torch.empty(0)
        self.qk_norm: Tensor | None = None

    def load(self, weights: EffectiveWeights) -> None:
        take = _Taker(weights, self._dtype, self._device, self._prefix)
        self.input_norm = take("input_layernorm.weight", copy=True)
        self.mlp_norm = take("post_attention_layernorm.weight", copy=True)
        self.qkv.load(*take.fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
        self.out.load(*take.fused("self_attn.o_proj"))
        self.gate_up.load(*take.fused("mlp.gate_proj", "mlp.up_proj"))
        self.down.load(*take.fused("mlp.down_proj"))
        q_norm, k_norm = take.optional("self_attn.q_norm.weight"), take.optional("self_attn.k_norm.weight")
        if q_norm is not None and k_norm is not None:
            heads, kv_heads = self._repeats
            self.qk_norm = torch.cat([q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)])


class _Taker:
    """Weights by name under a prefix, in the engine's dtype and device."""

    def __init__(self, weights: EffectiveWeights, dtype: torch.dtype, device: torch.device, prefix: str = "") -> None:
        self._weights, self._dtype, self._device, self._prefix = weights, dtype, device, prefix

    def __call__(self, name: str, *, copy: bool = False) -> Tensor:
        return self._weights[self._prefix + name].to(self._device, self._dtype, copy=copy)

    def optional(self, name: str) -> Tensor | None:
        return self(name, copy=True) if self._prefix + name in self._weights else None

    def fused(self, *modules: str) -> tuple[Tensor, Tensor | None]:
        """The modules' weights and biases, one below the other."""
        weight = torch.cat([self(f"{m}.weight") for m in modules])
        biases = [self.optional(f"{m}.bias") for m in modules]
        present = [b for b in biases if b is not None]
        if not present:
            return weight, None
        if len(present) < len(modules):
            raise ModelError(f"{self._prefix}{modules[0]}: some of {modules} have a bias and some have none")
        return weight, torch.cat(present)


def _check_shape(base: Any) -> None:
    name = type(base).__name__
    if name not in _CLASSES or type(base) is not getattr(transformers, name):
        raise ModelError(f"{type(base).__name__} is not one of {', '.join(_CLASSES)}")
    config = base.config
    if config.hidden_act not in ("silu", "swish"):
        raise ModelError(f"activation {config.hidden_act!r} is not silu")
    rope = base.model.rotary_emb
    if rope.rope_type not in _FIXED_ROPE:
        raise ModelError(f"rope type {rope.rope_type!r} depends on the sequence length")
    if 2 * rope.inv_freq.numel() != base.model.layers[0].self_attn.head_dim:
        raise ModelError("rotary embedding of a part of the head")
