"""All decoder layers of a Llama-shaped model with frozen weights and LoRA, as one differentiable function.

Autograd would keep what each operation of a layer reads: about 10,100 numbers a token in each of SmolLM2's layers.
Here a layer keeps what is dear to compute and computes the rest again:

    kept           x, [queries | keys | values] after rotation, attention's output, x after attention, [gate | up]
    made again     both norms' outputs, silu(gate) * up

which is little more than half as much, and each gradient is written once, in place where it can be. With `checkpoint`
only x is kept and a layer's forward runs again before its backward.

The backward, by the chain rule from a layer's last line to its first; d(.) is the gradient of the loss with respect to
a value, F' the backward of F, and `*` is element by element:

    forward                                     backward
    y = m + D(p),  p = silu(g) * u              d(p) = D'(d(y));  d(u) = d(p) * silu(g);  d(g) = d(p) * u * silu'(g)
    [g | u] = G(N(m))                           d(m) = d(y) + N'(G'([d(g) | d(u)]))
    m = x + O(a)                                d(a) = O'(d(m))
    a = attention(q, k, v)                      d(q), d(k), d(v): see `covey.pytorch.tree_attention`
    [q | k] = R N([q0 | k0])                    d([q0 | k0]) = N'(R^-1 d([q | k]));  R^-1 turns back: sin becomes -sin
    [q0 | k0 | v] = Q(N(x))                     d(x) = d(m) + N'(Q'([d(q0) | d(k0) | d(v)]))

    y = x W^T + c (x A^T) B^T                   l = c d(y) B;  d(x) = d(y) W + l A;  d(A) = l^T x;
                                                d(B) = c d(y)^T (x A^T)          (a projection with its adapters)
    y = w * s x,  s = (mean(x^2) + eps)^(-1/2)  h = w * d(y);  d(x) = s h - s^3 x mean(h x), as ds/dx = -s^3 x / dim
                                                                                 (a norm)

Served: what `covey.pytorch.llama` knows, with nothing trained but plain LoRA on the layers' linear maps. Anything else
(dropout, DoRA, trained embeddings, full fine-tuning, short sliding windows) goes through the model's own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from covey.errors import ModelError
from covey.pytorch.llama import Rotary, check_llama, rotate, window_of
from covey.pytorch.lora import LeanLoraLinear
from covey.pytorch.tree_attention import layer_backward, layer_forward
from covey.pytorch.tree_layout import Tokens, TreeLayout


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Query heads, key/value heads and their dimension; a packed row is `[queries | keys | values]`."""

    heads: int
    kv_heads: int
    dim: int

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Packed rows `[M, width]` -> views `[M, heads, dim]` of the three."""
        q, k, v = torch.split(rows.view(len(rows), -1, self.dim), [self.heads, self.kv_heads, self.kv_heads], dim=1)
        return q, k, v


class FusedDecoder:
    """The decoder of a causal language model.

    Args:
        model: the transformers model, with PEFT's layers inside. Its linear layers' weights become views of joined
            matrices; their values do not change.
        checkpoint: keep only each layer's input for the backward.

    Raises:
        ModelError: the model is not served; the message says why. Then nothing has been changed.
    """

    def __init__(self, model: Any, *, checkpoint: bool = False) -> None:
        check_llama(model)
        decoder = model.model
        self._embedding: nn.Embedding = decoder.embed_tokens
        if type(self._embedding) is not nn.Embedding:
            raise ModelError(f"an embedding of type {type(self._embedding).__name__}")
        self._layers = [_Layer(layer, model.config, number) for number, layer in enumerate(decoder.layers)]
        parameters = [p for layer in self._layers for p in layer.parameters]
        strangers = {id(p) for p in model.parameters() if p.requires_grad} ^ {id(p) for p in parameters}
        if strangers:
            raise ModelError("something else than LoRA on the layers' linear maps is trained")
        windows = [layer.window for layer in self._layers if layer.window is not None]
        self._window = min(windows, default=None)
        self._norm: Tensor = decoder.norm.weight
        self._eps: float = model.config.rms_norm_eps
        self._rotary = Rotary(decoder.rotary_emb, self._norm.device)
        self._checkpoint = checkpoint
        self.parameters = parameters
        for layer in self._layers:
            layer.join()

    @property
    def serves_all(self) -> bool:
        """Whether any pack can be run as the model is now."""
        return self._window is None and all(layer.can_run() for layer in self._layers)

    def serves(self, pack: Tokens) -> bool:
        """Whether this pack can be run as the model is now."""
        longest = int(pack.position_ids.max()) + 1
        return (self._window is None or longest <= self._window) and all(layer.can_run() for layer in self._layers)

    def hidden(self, pack: Tokens, layout: TreeLayout | None = None) -> Tensor:
        """The hidden states `[U, d]` after the last norm that predict the pack's targets.

        Args:
            pack: the tokens.
            layout: of them; None = that of a pack by itself.
        """
        layout = layout or TreeLayout.of(pack.branches, self._norm.device)
        return cast(Tensor, cast(Any, _Decode).apply(self, pack, layout, torch.is_grad_enabled(), *self.parameters))


@dataclass(slots=True, eq=False)
class _Activations:
    """What one layer keeps of its forward."""

    x: Tensor  # [M, d]
    qkv_adapters: Adapters | None
    out_adapters: Adapters | None
    mlp_adapters: Adapters | None
    down_adapters: Adapters | None
    scale: Tensor | None = None  # [M, 1] of the first norm
    raw: Tensor | None = None  # [M, heads + kv_heads, dim] before query/key norms, where there are any
    qkv: Tensor | None = None  # [M, width]
    qkv_low: Tensor | None = None
    attended: Tensor | None = None  # [M, heads * dim]
    lse: Tensor | None = None  # [M, heads]
    out_low: Tensor | None = None
    middle: Tensor | None = None  # [M, d] after attention
    middle_scale: Tensor | None = None
    gate_up: Tensor | None = None  # [M, 2 f]
    mlp_low: Tensor | None = None
    down_low: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Context:
    """What all layers of a pass share."""

    layout: TreeLayout
    cos: Tensor
    sin: Tensor
    eps: float


class _Layer:
    """One decoder layer: attention and gated MLP, each after a norm and added to its input."""

    def __init__(self, layer: Any, config: Any, number: int) -> None:
        self._number = number
        attention, mlp = layer.self_attn, layer.mlp
        self._qkv = Projection([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out = Projection([attention.o_proj])
        self._gate_up = Projection([mlp.gate_proj, mlp.up_proj])
        self._down = Projection([mlp.down_proj])
        self._projections = (self._qkv, self._out, self._gate_up, self._down)
        self.shape = HeadShape(config.num_attention_heads, config.num_key_value_heads, attention.head_dim)
        self.window = window_of(layer, config)
        self._norm: Tensor = layer.input_layernorm.weight
        self._mlp_norm: Tensor = layer.post_attention_layernorm.weight
        self._head_norms: tuple[Tensor, Tensor] | None = None
        if hasattr(attention, "q_norm"):
            self._head_norms = (attention.q_norm.weight, attention.k_norm.weight)
        self.parameters = [p for projection in self._projections for p in projection.parameters]

    def join(self) -> None:
        for projection in self._projections:
            projection.join()

    def can_run(self) -> bool:
        return all(projection.can_run() for projection in self._projections)

    def begin(self, x: Tensor) -> _Activations:
        qkv, out, mlp, down = (projection.adapters() for projection in self._projections)
        return _Activations(x, qkv, out, mlp, down)

    def forward(self, kept: _Activations, context: _Context) -> Tensor:
        """`[M, d]` -> `[M, d]`; fills `kept`."""
        shape = self.shape
        kept.scale = _norm_scale(kept.x, context.eps)
        qkv, kept.qkv_low = self._qkv.forward(_normed(kept.x, kept.scale, self._norm), kept.qkv_adapters)
        heads = qkv.view(len(qkv), -1, shape.dim)
        qk = heads[:, : shape.heads + shape.kv_heads]
        if self._head_norms is not None:
            kept.raw = qk.clone()
            qk = _normed(kept.raw, _norm_scale(kept.raw, context.eps), self._head_weight())
        heads[:, : shape.heads + shape.kv_heads] = rotate(qk, context.cos, context.sin)
        kept.qkv = qkv
        attended, kept.lse = layer_forward(context.layout, self._number, *shape.split(qkv), scale=shape.dim**-0.5)
        kept.attended = attended.flatten(1)
        middle, kept.out_low = self._out.forward(kept.attended, kept.out_adapters)
        kept.middle = middle.add_(kept.x)
        kept.middle_scale = _norm_scale(middle, context.eps)
        normed = _normed(middle, kept.middle_scale, self._mlp_norm)
        kept.gate_up, kept.mlp_low = self._gate_up.forward(normed, kept.mlp_adapters)
        gate, up = kept.gate_up.chunk(2, dim=1)
        y, kept.down_low = self._down.forward(functional.silu(gate).mul_(up), kept.down_adapters)
        return y.add_(middle)

    def backward(self, kept: _Activations, grad: Tensor, context: _Context, *, first: bool) -> list[Tensor]:
        """Turn `grad` `[M, d]` of the layer's output into that of its input, in place; return those of `parameters`.

        The `first` layer's input needs none.
        """
        assert kept.gate_up is not None
        assert kept.middle is not None
        assert kept.middle_scale is not None
        gate, up = kept.gate_up.chunk(2, dim=1)
        active = functional.silu(gate)
        # d(p) = D'(d(y)), with p = silu(g) * u made again
        product, down_grads = self._down.backward(grad, active * up, kept.down_low, kept.down_adapters)
        assert product is not None
        grad_gate_up = torch.empty_like(kept.gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=1)
        torch.mul(product, active, out=grad_up)  # d(u) = d(p) * silu(g), and below d(g) = d(p) * u * silu'(g)
        torch.ops.aten.silu_backward.grad_input(product.mul_(up), gate, grad_input=grad_gate)
        kept.gate_up = None
        del active, product, gate, up
        normed = _normed(kept.middle, kept.middle_scale, self._mlp_norm)
        grad_normed, mlp_grads = self._gate_up.backward(grad_gate_up, normed, kept.mlp_low, kept.mlp_adapters)
        assert grad_normed is not None
        # d(m) = d(y) + N'(...): from here on `grad` is d(m)
        _add_norm_gradient(grad, grad_normed, kept.middle, kept.middle_scale, self._mlp_norm)
        del grad_gate_up, grad_gate, grad_up, normed, grad_normed
        attention_grads = self._attention_backward(kept, grad, context, first=first)
        return attention_grads + mlp_grads + down_grads

    def _attention_backward(self, kept: _Activations, grad: Tensor, context: _Context, *, first: bool) -> list[Tensor]:
        assert kept.attended is not None
        assert kept.qkv is not None
        assert kept.lse is not None
        assert kept.scale is not None
        shape = self.shape
        grad_attended, out_grads = self._out.backward(grad, kept.attended, kept.out_low, kept.out_adapters)
        assert grad_attended is not None
        grad_qkv = torch.empty_like(kept.qkv)
        layer_backward(
            context.layout,
            self._number,
            grad_attended.view(len(grad_attended), shape.heads, shape.dim),
            *shape.split(kept.qkv),
            kept.attended.view(len(grad_attended), shape.heads, shape.dim),
            kept.lse,
            scale=shape.dim**-0.5,
            into=shape.split(grad_qkv),
        )
        heads = grad_qkv.view(len(grad_qkv), -1, shape.dim)[:, : shape.heads + shape.kv_heads]
        rotated_back = rotate(heads, context.cos, -context.sin)  # R^-1
        if kept.raw is None:
            heads.copy_(rotated_back)
        else:
            heads.zero_()
            scale = _norm_scale(kept.raw, context.eps)
            _add_norm_gradient(heads, rotated_back, kept.raw, scale, self._head_weight())
        normed = _normed(kept.x, kept.scale, self._norm)
        grad_normed, qkv_grads = self._qkv.backward(
            grad_qkv, normed, kept.qkv_low, kept.qkv_adapters, needs_input=not first
        )
        if grad_normed is not None:
            _add_norm_gradient(grad, grad_normed, kept.x, kept.scale, self._norm)  # d(x) = d(m) + N'(...)
        return qkv_grads + out_grads

    def _head_weight(self) -> Tensor:
        """`[heads + kv_heads, dim]`."""
        assert self._head_norms is not None
        q, k = self._head_norms
        return torch.cat([q.expand(self.shape.heads, -1), k.expand(self.shape.kv_heads, -1)])


class _Decode(torch.autograd.Function):
    """Token ids -> the hidden states that are asked for; differentiable in the adapters."""

    @staticmethod
    def forward(
        ctx: Any, decoder: FusedDecoder, pack: Tokens, layout: TreeLayout, keep: bool, *parameters: Tensor
    ) -> Tensor:
        device = decoder._norm.device
        x = functional.embedding(_to(pack.token_ids, device), decoder._embedding.weight)
        cos, sin = decoder._rotary(_to(pack.position_ids, device), x.dtype)
        context = _Context(layout, cos, sin, decoder._eps)
        layers = []
        for layer in decoder._layers:
            kept = layer.begin(x)
            x = layer.forward(kept, context)
            if keep:
                layers.append(layer.begin(kept.x) if decoder._checkpoint else kept)
        index = _to(pack.score_at, device)
        picked = x.index_select(0, index)
        scale = _norm_scale(picked, decoder._eps)
        if keep:
            ctx.decoder, ctx.context, ctx.layers = decoder, context, layers
            ctx.index, ctx.last, ctx.scale, ctx.rows = index, picked, scale, len(x)
        return _normed(picked, scale, decoder._norm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        decoder, layers = ctx.decoder, ctx.layers
        if layers is None:
            raise RuntimeError("the fused layers' backward ran twice; what it needs is freed as it goes")
        ctx.layers = None
        picked = torch.zeros_like(ctx.last)
        _add_norm_gradient(picked, grad.clone(), ctx.last, ctx.scale, decoder._norm)
        grad_x = picked.new_zeros(ctx.rows, picked.shape[1])
        # where sequences part, a row is picked once for each; on CPU the sum's order is that of the index
        grad_x.index_add_(0, ctx.index, picked)
        found: list[list[Tensor]] = []
        for number in reversed(range(len(layers))):
            layer, kept = decoder._layers[number], layers.pop()
            if kept.gate_up is None:
                layer.forward(kept, ctx.context)
            found.append(layer.backward(kept, grad_x, ctx.context, first=number == 0))
        grads: Iterator[Tensor] = (g for of_layer in reversed(found) for g in of_layer)
        return None, None, None, None, *grads


def _to(values: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)


def _norm_scale(x: Tensor, eps: float) -> Tensor:
    """`1 / rms(x)` over the last dimension, kept, at least in float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    scale: Tensor = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return scale


def _normed(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """`weight * x / rms(x)`, rounded where transformers rounds."""
    normed: Tensor = (x * scale).to(x.dtype).mul_(weight)
    return normed


def _add_norm_gradient(into: Tensor, grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> None:
    """Add the norm's gradient to `into`; `grad`, that of the norm's output, may be overwritten.

    With g = grad * weight and s = 1 / rms(x): `s g - s^3 x mean(g x)`.
    """
    g = grad.mul_(weight).to(scale.dtype)
    factor = (g * x).sum(-1, keepdim=True).mul_(scale**3).div_(x.shape[-1])
    into.add_(g.mul_(scale).addcmul_(x.to(scale.dtype), factor, value=-1))


@dataclass(frozen=True, slots=True, eq=False)
class _Adapter:
    """One layer's adapter: `scaling * B A` on the outputs `columns`."""

    columns: slice
    rank: int
    b: Tensor  # [out, r]
    scaling: float
    dtypes: tuple[torch.dtype, torch.dtype]  # of the parameters A and B


@dataclass(frozen=True, slots=True, eq=False)
class Adapters:
    """The adapters of a projection during one pass, in its layers' dtype.

    The tensors are detached when the pass begins, so that a later exchange of data does not reach its backward.
    """

    a: Tensor  # [sum r, in]
    parts: list[_Adapter]

    def split(self, low: Tensor) -> list[Tensor]:
        """`x A'` `[M, sum r]` of all adapters -> `[M, r]` of each."""
        return list(torch.split(low, [part.rank for part in self.parts], dim=1))


class Projection:
    """Frozen linear layers that read the same input as one matrix product, with their LoRA adapters beside it.

    `x` `[M, in]` -> `[M, out]`, where `out` joins the outputs of all layers in their order. The layers' weights become
    views of one matrix, so no memory is added and their owner keeps them. Nothing is kept for the backward but `x A'`,
    `[M, r]` a layer; the caller keeps or recomputes `x`.

    Args:
        layers: `nn.Linear` or PEFT's LoRA layers around one, all with a bias or all without.

    Raises:
        ModelError: a layer is of another kind.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = list(layers)
        bases = [_base(layer) for layer in layers]
        biases = [base.bias for base in bases if base.bias is not None]
        if biases and len(biases) < len(bases):
            raise ModelError("some of the joined layers have a bias and some have none")
        self.parameters = [p for layer in layers for p in _adapter_parameters(layer)]
        starts = [0]
        for base in bases:
            starts.append(starts[-1] + base.out_features)
        self._columns = [slice(start, stop) for start, stop in pairwise(starts)]
        self._bases = bases

    def join(self) -> None:
        """Make the layers' weights views of one matrix. Until this is called nothing has been changed."""
        self._weight = self._bases[0].weight.detach()
        self._bias = None if self._bases[0].bias is None else self._bases[0].bias.detach()
        if len(self._bases) == 1:
            return
        self._weight = torch.cat([base.weight.detach() for base in self._bases])
        if self._bias is not None:
            self._bias = torch.cat([base.bias.detach() for base in self._bases])
        for base, columns in zip(self._bases, self._columns, strict=True):
            base.weight.data = self._weight[columns]
            if self._bias is not None:
                base.bias.data = self._bias[columns]

    def can_run(self) -> bool:
        """Whether every layer is now exactly `base + scaling * B A`, or its base alone."""
        return all(_is_plain(layer) for layer in self._layers)

    def adapters(self) -> Adapters | None:
        """The adapters that are switched on, None where there are none."""
        dtype, rows, parts = self._weight.dtype, [], []
        for layer, columns in zip(self._layers, self._columns, strict=True):
            if isinstance(layer, LeanLoraLinear) and not layer.disable_adapters:
                name = layer.active_adapters[0]
                a, b = layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach()
                rows.append(a.to(dtype))
                parts.append(_Adapter(columns, len(a), b.to(dtype), layer.scaling[name], (a.dtype, b.dtype)))
        return Adapters(torch.cat(rows), parts) if parts else None

    def forward(self, x: Tensor, adapters: Adapters | None) -> tuple[Tensor, Tensor | None]:
        """The outputs `[M, out]`, and `x A'` of all adapters side by side."""
        y = functional.linear(x, self._weight, self._bias)
        if adapters is None:
            return y, None
        low = functional.linear(x, adapters.a)
        for adapter, part in zip(adapters.parts, adapters.split(low), strict=True):
            y[:, adapter.columns].addmm_(part, adapter.b.T, alpha=adapter.scaling)
        return y, low

    def backward(
        self, grad: Tensor, x: Tensor, low: Tensor | None, adapters: Adapters | None, *, needs_input: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        """From `grad` `[M, out]` the gradient of `x`, if it is needed, and those of `parameters` in their order."""
        grad_x = grad @ self._weight if needs_input else None
        if adapters is None or low is None:
            return grad_x, []
        grad_low = torch.empty_like(low)
        grads_b = []
        for adapter, part, into in zip(adapters.parts, adapters.split(low), adapters.split(grad_low), strict=True):
            mine = grad[:, adapter.columns]
            torch.mm(mine, adapter.b, out=into).mul_(adapter.scaling)  # l = c d(y) B
            # d(B), as ((x A^T)^T d(y))^T and not d(y)^T (x A^T): half the time for wide layers
            grads_b.append((part.T @ mine).T.contiguous().mul_(adapter.scaling).to(adapter.dtypes[1]))
        if grad_x is not None:
            grad_x.addmm_(grad_low, adapters.a)  # d(x) = d(y) W + l A
        grads_a = torch.split(grad_low.T @ x, [adapter.rank for adapter in adapters.parts])
        grads: list[Tensor] = []
        for adapter, grad_a, grad_b in zip(adapters.parts, grads_a, grads_b, strict=True):
            grads += [grad_a.to(adapter.dtypes[0]), grad_b]
        return grad_x, grads


def _base(layer: Any) -> nn.Linear:
    base = layer.base_layer if isinstance(layer, LeanLoraLinear) else layer
    if type(base) is not nn.Linear:
        raise ModelError(f"a layer of type {type(layer).__name__}")
    return base


def _adapter_parameters(layer: Any) -> list[nn.Parameter]:
    if not isinstance(layer, LeanLoraLinear):
        return []
    if len(layer.active_adapters) != 1:
        raise ModelError(f"{len(layer.active_adapters)} adapters at once")
    name = layer.active_adapters[0]
    return [layer.lora_A[name].weight, layer.lora_B[name].weight]


def _is_plain(layer: Any) -> bool:
    return not isinstance(layer, LeanLoraLinear) or layer.disable_adapters or layer.plain_adapter() is not None
