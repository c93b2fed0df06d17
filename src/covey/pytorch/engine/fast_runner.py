"""Runs Llama-shaped models (Llama, Qwen2, Qwen3, Mistral) with a few operations a layer, on its own copy.

The copy fuses the query, key and value projections into one matrix, gate and up into another, and stores each
in the layout that multiplies fastest (see `linear.py`). A model that is not quite of this shape is refused, and the
engine takes the general path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from covey.errors import ModelError
from covey.pytorch.engine.cache import LayerShape
from covey.pytorch.engine.linear import Linear
from covey.pytorch.engine.merge import are_tied, bare_model, frozen_version
from covey.pytorch.engine.norm import Norms
from covey.pytorch.engine.runner import Step
from covey.pytorch.llama import Rotary, check_llama, rotate, window_of

_EMBEDDING = "model.embed_tokens.weight"


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
        check_llama(base)
        config, decoder = base.config, base.model
        self._dtype, self._device = dtype, device
        attention = decoder.layers[0].self_attn
        self._dim: int = attention.head_dim
        self._kv_heads: int = config.num_key_value_heads
        self._heads: int = config.num_attention_heads
        self._eps: float = config.rms_norm_eps
        self._rotary = Rotary(decoder.rotary_emb, device)
        self._norms = Norms(config.hidden_size, self._eps, dtype, device)
        self._layers = [_Layer(i, layer, config, self._norms, dtype, device) for i, layer in enumerate(decoder.layers)]
        self.layer_shapes: Sequence[LayerShape] = [LayerShape(self._kv_heads, self._dim, self._dim)] * len(self._layers)
        self._embedding = torch.empty(0)
        self._norm = torch.empty(0)
        self._head = Linear(dtype, device)
        self._head_version: tuple[object, ...] = ()

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy, merge and fuse the weights. Frozen embeddings are shared with the policy, a frozen head is kept."""
        for layer in self._layers:
            layer.load(weights)
        take = _Taker(weights, self._dtype, self._device)
        self._embedding = take(_EMBEDDING, copy=frozen_version(weights, _EMBEDDING) is None)
        norm = take("model.norm.weight", copy=True)
        fold = self._norms.fold(norm)
        name = _EMBEDDING if are_tied(weights, "lm_head.weight", _EMBEDDING) else "lm_head.weight"
        version = frozen_version(weights, name)
        held = (name, version, frozen_version(weights, "model.norm.weight"))
        if version is None or held != self._head_version:
            self._head_version = ()  # should the copy fail, nothing is known of it
            self._head.load([take(name)], take.optional("lm_head.bias"), fold)
            self._head_version = held
        self._norm = norm

    def release(self) -> None:
        """Give back the layers' memory until the next `load`."""
        for layer in self._layers:
            layer.release()

    def forward(self, step: Step) -> Tensor:
        """Logits `[n, V]`; see `Runner`."""
        attend, heads, kv_heads, dim = step.attention.attend, self._heads, self._kv_heads, self._dim
        stream = self._norms.open(functional.embedding(step.token_ids, self._embedding))
        x = stream[:, : self._embedding.shape[1]]
        cos, sin = self._rotary(step.positions, self._dtype)
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(self._norms(stream, layer.input_norm)).view(x.shape[0], heads + 2 * kv_heads, dim)
            qk = qkv[:, : heads + kv_heads]
            if layer.qk_norm is not None:
                qk = functional.rms_norm(qk, (dim,), None, self._eps) * layer.qk_norm
            qk = rotate(qk, cos, sin)
            attended = attend(
                i,
                qk[:, :heads],
                qk[:, heads:],
                qkv[:, heads + kv_heads :],
                scale=dim**-0.5,
                window=layer.window,
            )
            x.add_(layer.out(attended.reshape(x.shape[0], heads * dim)))
            gate, up = layer.gate_up(self._norms(stream, layer.mlp_norm)).chunk(2, dim=-1)
            x.add_(layer.down(functional.silu(gate).mul_(up)))
        if step.last is not None:
            stream = stream.index_select(0, step.last)
        return self._head(self._norms(stream, self._norm))


class _Layer:
    def __init__(
        self, index: int, layer: Any, config: Any, norms: Norms, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._prefix = f"model.layers.{index}."
        self._norms, self._dtype, self._device = norms, dtype, device
        self._repeats = (config.num_attention_heads, config.num_key_value_heads)
        self.window = window_of(layer, config)
        self.qkv, self.out, self.gate_up, self.down = (Linear(dtype, device) for _ in range(4))
        self.input_norm = self.mlp_norm = torch.empty(0)
        self.qk_norm: Tensor | None = None

    def release(self) -> None:
        for linear in (self.qkv, self.out, self.gate_up, self.down):
            linear.release()

    def load(self, weights: Mapping[str, Tensor]) -> None:
        take = _Taker(weights, self._dtype, self._device, self._prefix)
        self.input_norm = take("input_layernorm.weight", copy=True)
        self.mlp_norm = take("post_attention_layernorm.weight", copy=True)
        norms = self._norms
        self.qkv.load(
            *take.fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), norms.fold(self.input_norm)
        )
        self.out.load(*take.fused("self_attn.o_proj"))
        self.gate_up.load(*take.fused("mlp.gate_proj", "mlp.up_proj"), norms.fold(self.mlp_norm))
        self.down.load(*take.fused("mlp.down_proj"))
        q_norm, k_norm = take.optional("self_attn.q_norm.weight"), take.optional("self_attn.k_norm.weight")
        if q_norm is not None and k_norm is not None:
            heads, kv_heads = self._repeats
            self.qk_norm = torch.cat([q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)])


class _Taker:
    """Weights by name under a prefix, in the engine's dtype and device."""

    def __init__(
        self, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, prefix: str = ""
    ) -> None:
        self._weights, self._dtype, self._device, self._prefix = weights, dtype, device, prefix

    def __call__(self, name: str, *, copy: bool = False) -> Tensor:
        return self._weights[self._prefix + name].to(self._device, self._dtype, copy=copy)

    def optional(self, name: str) -> Tensor | None:
        return self(name, copy=True) if self._prefix + name in self._weights else None

    def fused(self, *modules: str) -> tuple[list[Tensor], Tensor | None]:
        """The modules' weights, and their biases one below the other."""
        weight = [self(f"{m}.weight") for m in modules]
        biases = [self.optional(f"{m}.bias") for m in modules]
        present = [b for b in biases if b is not None]
        if not present:
            return weight, None
        if len(present) < len(modules):
            raise ModelError(f"{self._prefix}{modules[0]}: some of {modules} have a bias and some have none")
        return weight, torch.cat(present)
