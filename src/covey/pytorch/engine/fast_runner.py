"""Runs Llama-shaped models (Llama, Qwen2, Qwen3, Mistral) with a few operations a layer, on its own copy.

The copy fuses the query, key and value projections into one matrix, gate and up into another, and stores each
in the layout that multiplies fastest (see `Linear`). A model that is not quite of this shape is refused, and the
engine takes the general path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from covey.errors import ModelError
from covey.pytorch.engine.cache import LayerShape
from covey.pytorch.engine.merge import are_tied, bare_model, frozen_version
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
        take = _WeightReader(weights, self._dtype, self._device)
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
        take = _WeightReader(weights, self._dtype, self._device, self._prefix)
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


class _WeightReader:
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


_WIDE = 4
"""Outputs for each input from which packing pays."""


class Linear:
    """`y = x W^T + b` for `x` `[M, in]`. Holds a copy of the weight, in the layout that multiplies fastest.

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


class Norms:
    """The RMS norms of one model's residual stream in as few operations as the device's kernels allow.

    On CPU `rms_norm` is six operations. Two suffice if each row carries one more number: with `c = sqrt(d eps)`

        x / rms(x) = x sqrt(d) / sqrt(sum x^2 + d eps) = x sqrt(d) / ||[x, c]||

    so a row's norm is taken over its d + 1 numbers, and `sqrt(d)` times the norm's weight is folded into the matrix
    that reads the result. Elsewhere, and below float32, the norm is torch's own.

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
