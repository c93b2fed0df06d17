"""All decoder layers of a model of Llama's shape with frozen weights and LoRA, as one differentiable function.

Autograd would keep what each operation reads. Here a layer keeps what is dear to compute, and computes the rest again:

    kept           x, [queries | keys | values] after rotation, attention's output, x after attention, [gate | up]
    made again     norms' outputs, act(gate) * up

which is little more than half as much. What a norm inside the layer reads (queries and keys, or what attention and MLP
return) is kept too. With `checkpoint` only x is kept and a layer's forward runs again before its backward.

The backward, by the chain rule from a layer's last line to its first; d(.) is the gradient of the loss with respect to
a value, F' the backward of F, and `*` is element by element:

    forward                                     backward
    y = m + D(p),  p = act(g) * u               d(p) = D'(d(y));  d(u) = d(p) * act(g);  d(g) = d(p) * u * act'(g)
    [g | u] = G(N(m))                           d(m) = d(y) + N'(G'([d(g) | d(u)]))
    m = x + O(a)                                d(a) = O'(d(m))
    a = attention(q, k, v)                      d(q), d(k), d(v): see `covey.pytorch.attention.tree_parts`
    [q | k] = R N([q0 | k0])                    d([q0 | k0]) = N'(R^-1 d([q | k]));  R^-1 turns back: sin becomes -sin
    [q0 | k0 | v] = Q(N(x))                     d(x) = d(m) + N'(Q'([d(q0) | d(k0) | d(v)]))

    y = x W^T + c (x A^T) B^T                   l = c d(y) B;  d(x) = d(y) W + l A;  d(A) = l^T x;
                                                d(B) = c d(y)^T (x A^T)          (a projection with its adapters)
    y = w * s x,  s = (mean(x^2) + eps)^(-1/2)  h = w * d(y);  d(x) = s h - s^3 x mean(h x), as ds/dx = -s^3 x / dim
                                                                                 (a norm)

Where a layer adds `f N(O(a))`, d(O(a)) = N'(f d(m)), and so for D. Served is what `covey.pytorch.models.form` can
describe, with nothing trained but plain LoRA on the layers' linear maps; all else goes through the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from covey.errors import ModelError
from covey.pytorch.attention import tree_attention
from covey.pytorch.attention.tree_layout import TreeLayout
from covey.pytorch.models.form import LayerForm, NormForm, Rotary, Turn, read_form
from covey.pytorch.models.lora import Adapters, LeanLoraLinear
from covey.pytorch.models.narrow import NarrowLinear, packed
from covey.pytorch.products import add_product, is_narrow, linear, product
from covey.rollout.packing import Pack

if TYPE_CHECKING:
    from covey.rollout.walking import Piece


class Norm:
    """One of a model's RMS norms, over the last dimension."""

    def __init__(self, form: NormForm, owner: nn.Module) -> None:
        self._eps, self._offset = form.eps, form.offset
        module: Any = owner.get_submodule(form.name)
        self._weight: Tensor = module.weight.detach()

    def weight(self) -> Tensor:
        """What it multiplies with; in float32 or wider where 1 is added, as transformers computes it."""
        if not self._offset:
            return self._weight
        return self._weight.to(torch.promote_types(self._weight.dtype, torch.float32)) + self._offset

    def scale(self, x: Tensor) -> Tensor:
        """`1 / rms(x)` over the last dimension, kept, at least in float32."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
        return cast(Tensor, norm.square_().div_(x.shape[-1]).add_(self._eps).rsqrt_())

    def apply(self, x: Tensor, scale: Tensor, weight: Tensor | None = None) -> Tensor:
        """`weight * x / rms(x)` of `x` `[..., dim]`, rounded where transformers rounds."""
        weight = self.weight() if weight is None else weight
        normed = x * scale
        if weight.dtype != normed.dtype:
            normed = normed.to(x.dtype)
        return normed.mul_(weight).to(x.dtype)

    def gradient(self, grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor | None = None) -> Tensor:
        """The gradient of `x`, in the dtype of `scale`, from `grad`, that of the output, which may be overwritten.

        With g = grad * weight and s = 1 / rms(x): `s g - s^3 x mean(g x)`.
        """
        g = grad.to(scale.dtype).mul_(self.weight() if weight is None else weight)
        factor = (g * x).sum(-1, keepdim=True).mul_(scale**3).div_(x.shape[-1])
        return g.mul_(scale).addcmul_(x.to(scale.dtype), factor, value=-1)


class HeadNorms:
    """The norms of a layer's queries and keys, `[M, heads + kv_heads, dim]`: of each head, or of all heads together."""

    def __init__(self, form: LayerForm, layer: nn.Module) -> None:
        self._counts = [form.attention.heads, form.attention.kv_heads]
        self._norms = [Norm(norm, layer) for norm in form.head_norms or ()]
        self._whole = form.whole_heads

    def apply(self, x: Tensor) -> Tensor:
        return self._of_each(lambda norm, part, weight: norm.apply(part, norm.scale(part), weight), x)

    def gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of `x` from that of what `apply` made of it."""
        return self._of_each(lambda norm, x, weight, grad: norm.gradient(grad, x, norm.scale(x), weight), x, grad)

    def _of_each(self, function: Callable[..., Tensor], x: Tensor, *more: Tensor) -> Tensor:
        if not self._whole:  # the two in one go
            weights = [n.weight().expand(count, -1) for n, count in zip(self._norms, self._counts, strict=True)]
            return function(self._norms[0], x, torch.cat(weights), *more)
        parts = zip(*(torch.split(tensor, self._counts, dim=1) for tensor in (x, *more)), strict=True)
        found = []
        for norm, (part, *others) in zip(self._norms, parts, strict=True):
            flat = function(norm, part.flatten(1), None, *(other.flatten(1) for other in others))
            found.append(flat.view(part.shape))
        return torch.cat(found, dim=1)


class Projection:
    """Frozen linear layers that read the same input as one matrix product, with their LoRA adapters beside it.

    `x` `[M, in]` -> `[M, out]`, where `out` joins the outputs of all layers in their order. The layers' weights become
    views of one matrix, so no memory is added and their owner keeps them. Nothing is kept for the backward but `x A'`,
    `[M, r]` a layer; the caller keeps or recomputes `x`.

    Raises `ModelError`: a layer is of another kind.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers, self._bases = list(layers), [_base(layer) for layer in layers]
        if len({base.bias is None for base in self._bases}) > 1:
            raise ModelError("some of the joined layers have a bias and some have none")
        self.parameters = [p for layer in layers for p in _adapter_parameters(layer)]

    def join(self) -> None:
        """Make the layers' weights views of one matrix. Until this is called nothing has been changed."""
        self._weight = self._bases[0].weight.detach()
        self._bias = None if self._bases[0].bias is None else self._bases[0].bias.detach()
        if len(self._bases) == 1:
            return
        self._weight = torch.cat([base.weight.detach() for base in self._bases])
        if self._bias is not None:
            self._bias = torch.cat([base.bias.detach() for base in self._bases])
        sizes = [base.out_features for base in self._bases]
        for name, joined in (("weight", self._weight), ("bias", self._bias)):
            for base, part in zip(self._bases, () if joined is None else torch.split(joined, sizes), strict=False):
                getattr(base, name).data = part

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    def can_run(self) -> bool:
        """Whether every layer is now exactly `base + scaling * B A`, or its base alone."""
        adapted = [layer for layer in self._layers if isinstance(layer, LeanLoraLinear)]
        return all(layer.disable_adapters or layer.plain_adapter() is not None for layer in adapted)

    def adapters(self, dtype: torch.dtype) -> Adapters | None:
        """The adapters that are switched on, in the type of the inputs; None where there are none."""
        factors = [layer.factors() if isinstance(layer, LeanLoraLinear) else None for layer in self._layers]
        return Adapters.beside(zip((base.out_features for base in self._bases), factors, strict=True), dtype)

    def forward(self, x: Tensor, adapters: Adapters | None) -> tuple[Tensor, Tensor | None]:
        """The outputs `[M, out]`, and `x A'` of all adapters side by side."""
        if is_narrow(x, self._weight):
            self._packed = packed([base.weight for base in self._bases])
            y = self._packed.multiply(x, self._bias)
        else:
            y = linear(x, self._weight, self._bias)
        return y, None if adapters is None else adapters.add_to(y, x)

    def backward(
        self, grad: Tensor, x: Tensor, low: Tensor | None, adapters: Adapters | None, *, needs_input: bool = True
    ) -> tuple[Any, list[Tensor]]:
        """From `grad` `[M, out]` the gradient of `x`, None if not needed, and those of `parameters` in their order."""
        grad_x = product(grad, self._weight) if needs_input else None
        if adapters is None or low is None:
            return grad_x, []
        grad_low = torch.empty_like(low)
        grads_b = []
        for adapter, part, into in zip(adapters.parts, adapters.split(low), adapters.split(grad_low), strict=True):
            mine = grad[:, adapter.columns]
            torch.mul(product(mine, adapter.b), adapter.scaling, out=into)  # l = c d(y) B
            # d(B), as ((x A^T)^T d(y))^T and not d(y)^T (x A^T): half the time for wide layers
            grads_b.append(product(part.T, mine).T.contiguous().mul_(adapter.scaling).to(adapter.dtypes[1]))
        if grad_x is not None:
            add_product(grad_x, grad_low, adapters.a)  # d(x) = d(y) W + l A
        grads_a = torch.split(product(grad_low.T, x), [adapter.rank for adapter in adapters.parts])
        return grad_x, [
            grad
            for adapter, grad_a, grad_b in zip(adapters.parts, grads_a, grads_b, strict=True)
            for grad in (grad_a.to(adapter.dtypes[0]), grad_b)
        ]


def _base(layer: Any) -> nn.Linear:
    base = layer.base_layer if isinstance(layer, LeanLoraLinear) else layer
    if type(base) not in (nn.Linear, NarrowLinear):
        raise ModelError(f"a layer of type {type(layer).__name__}")
    return cast(nn.Linear, base)


def _adapter_parameters(layer: Any) -> list[nn.Parameter]:
    if not isinstance(layer, LeanLoraLinear):
        return []
    if len(layer.active_adapters) != 1:
        raise ModelError(f"{len(layer.active_adapters)} adapters at once")
    name = layer.active_adapters[0]
    return [layer.lora_A[name].weight, layer.lora_B[name].weight]


class FusedDecoder:
    """The decoder of a causal language model. One that is not served is left as it is, with a `ModelError` which says
    why.
    """

    def __init__(self, model: Any, *, checkpoint: bool = False) -> None:
        form = read_form(model)
        decoder = model.model
        self._embedding: nn.Embedding = decoder.embed_tokens
        if not isinstance(self._embedding, nn.Embedding):
            raise ModelError(f"an embedding of type {type(self._embedding).__name__}")
        self._multiplier = form.embedding_multiplier
        described = enumerate(zip(decoder.layers, form.layers, strict=True))
        self._layers = [_Layer(module, layer, number) for number, (module, layer) in described]
        self.parameters = [p for layer in self._layers for p in layer.parameters]
        self._first = next((i for i, layer in enumerate(self._layers) if layer.parameters), 0)
        if {id(p) for p in model.parameters() if p.requires_grad} != {id(p) for p in self.parameters}:
            raise ModelError("something else than LoRA on the layers' linear maps is trained")
        self._norm = Norm(form.norm, decoder)
        self._device: torch.device = decoder.norm.weight.device
        self._rotaries = {name: Rotary(rotary, self._device) for name, rotary in form.rotaries.items()}
        self._checkpoint = checkpoint
        self._projections = [projection for layer in self._layers for projection in layer.projections]
        for projection in self._projections:
            projection.join()

    def can_run(self) -> bool:
        """Whether the model, as it is now, is what these layers compute."""
        return all(projection.can_run() for projection in self._projections)

    def hidden(self, pack: Pack | Piece, layout: TreeLayout | None = None) -> Tensor:
        """The hidden states `[U, d]` after the last norm that predict the pack's targets."""
        layout = layout or TreeLayout.of(pack.branches, self._device)
        return cast(Tensor, cast(Any, _Decode).apply(self, pack, layout, torch.is_grad_enabled(), *self.parameters))


@dataclass(slots=True, eq=False)
class _Activations:
    """What one layer keeps of its forward: tensors, None before it and where it has no such part."""

    x: Tensor  # [M, d]
    qkv_adapters: Adapters | None
    out_adapters: Adapters | None
    mlp_adapters: Adapters | None
    down_adapters: Adapters | None
    scale: Any = None  # [M, 1] of the first norm
    raw: Any = None  # [M, heads + kv_heads, dim] before query/key norms, where there are any
    qkv: Any = None  # [M, width]
    qkv_low: Any = None
    attended: Any = None  # [M, heads * dim]
    lse: Any = None  # [M, heads]
    out_low: Any = None
    attention_out: Any = None  # [M, d] before the norm on it, where there is one
    middle: Any = None  # [M, d] after attention
    middle_scale: Any = None
    gate_up: Any = None  # [M, 2 f]
    mlp_low: Any = None
    mlp_out: Any = None  # [M, d] before the norm on it, where there is one
    down_low: Any = None


class _Layer:
    """One decoder layer: attention and gated MLP, each added to its input."""

    def __init__(self, layer: Any, form: LayerForm, number: int) -> None:
        self.form, self._number = form, number
        self._qkv, self._out, self._gate_up, self._down = self.projections = tuple(
            Projection([layer.get_submodule(name) for name in names])
            for names in (form.qkv, (form.out,), form.gate_up, (form.down,))
        )

        def norm(described: NormForm | None) -> Norm | None:
            return None if described is None else Norm(described, layer)

        self._input_norm, self._attention_norm = norm(form.input_norm), norm(form.attention_norm)
        self._mlp_norm, self._output_norm = norm(form.mlp_norm), norm(form.output_norm)
        self._head_norms = None if form.head_norms is None else HeadNorms(form, layer)
        self.parameters = [p for projection in self.projections for p in projection.parameters]

    def begin(self, x: Tensor) -> _Activations:
        return _Activations(x, *(projection.adapters(x.dtype) for projection in self.projections))

    def forward(self, kept: _Activations, layout: TreeLayout, turn: Turn | None) -> Tensor:
        """`[M, d]` -> `[M, d]`; fills `kept`."""
        normed, kept.scale = _normed(self._input_norm, kept.x)
        qkv, kept.qkv_low = self._qkv.forward(normed, kept.qkv_adapters)
        turned = self._turned(qkv)
        qk: Tensor = turned
        if self._head_norms is not None:
            kept.raw = qk.clone()
            qk = self._head_norms.apply(kept.raw)
        if turn is not None:
            qk = turn.forward(qk)
        if qk is not turned:
            turned.copy_(qk)
        kept.qkv, rule = qkv, self.form.attention.rule
        attended, kept.lse = tree_attention.forward(layout, self._number, *self._split(qkv), rule)
        kept.attended = attended.flatten(1)
        out, kept.out_low = self._out.forward(kept.attended, kept.out_adapters)
        kept.middle, kept.attention_out = self._added(kept.x, out, self._attention_norm)
        normed, kept.middle_scale = _normed(self._mlp_norm, kept.middle)
        gate_up, kept.mlp_low = self._gate_up.forward(normed, kept.mlp_adapters)
        kept.gate_up = gate_up.to(self._gate_up.dtype)  # the largest by far: no finer than the weights
        gate, up = gate_up.chunk(2, dim=1)
        y, kept.down_low = self._down.forward(self.form.activation.forward(gate).mul_(up), kept.down_adapters)
        y, kept.mlp_out = self._added(kept.middle, y, self._output_norm)
        return y

    def backward(
        self, kept: _Activations, grad: Tensor, layout: TreeLayout, turn: Turn | None, *, ends: bool
    ) -> list[Tensor]:
        """Turn `grad` `[M, d]` of the layer's output into that of its input, in place, unless nothing below is trained
        and so it `ends` here; return those of `parameters`.
        """
        gate, up = kept.gate_up.to(grad.dtype).chunk(2, dim=1)
        active = self.form.activation.forward(gate)
        grad_out = self._added_gradient(grad, kept.mlp_out, self._output_norm)
        # d(p) = D'(d(y)), with p = act(g) * u made again
        product, down_grads = self._down.backward(grad_out, active * up, kept.down_low, kept.down_adapters)
        grad_gate_up = torch.empty_like(kept.gate_up, dtype=grad.dtype)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=1)
        torch.mul(product, active, out=grad_up)  # d(u) = d(p) * act(g), and below d(g) = d(p) * u * act'(g)
        self.form.activation.backward(product.mul_(up), gate, grad_input=grad_gate)
        kept.gate_up = None
        del active, product, gate, up, grad_out
        normed, _ = _normed(self._mlp_norm, kept.middle, kept.middle_scale)
        grad_normed, mlp_grads = self._gate_up.backward(grad_gate_up, normed, kept.mlp_low, kept.mlp_adapters)
        # d(m) = d(y) + N'(...): from here on `grad` is d(m)
        _add_normed_gradient(grad, grad_normed, self._mlp_norm, kept.middle, kept.middle_scale)
        del grad_gate_up, grad_gate, grad_up, normed, grad_normed
        return self._attention_backward(kept, grad, layout, turn, ends) + mlp_grads + down_grads

    def _attention_backward(
        self, kept: _Activations, grad: Tensor, layout: TreeLayout, turn: Turn | None, ends: bool
    ) -> list[Tensor]:
        attention = self.form.attention
        grad_out = self._added_gradient(grad, kept.attention_out, self._attention_norm)
        grad_attended, out_grads = self._out.backward(grad_out, kept.attended, kept.out_low, kept.out_adapters)
        grad_qkv = torch.empty_like(kept.qkv)
        grad_heads, out = (x.view(-1, attention.heads, attention.dim) for x in (grad_attended, kept.attended))
        known = *self._split(kept.qkv), out, kept.lse, attention.rule
        tree_attention.backward(layout, self._number, grad_heads, *known, self._split(grad_qkv))
        turned = self._turned(grad_qkv)
        grad_qk: Tensor = turned
        if turn is not None:
            grad_qk = turn.backward(grad_qk)  # R^-1
        if self._head_norms is not None:
            grad_qk = self._head_norms.gradient(grad_qk, kept.raw)
        if grad_qk is not turned:
            turned.copy_(grad_qk)
        normed, _ = _normed(self._input_norm, kept.x, kept.scale)
        grad_normed, qkv_grads = self._qkv.backward(
            grad_qkv, normed, kept.qkv_low, kept.qkv_adapters, needs_input=not ends
        )
        if grad_normed is not None:  # d(x) = d(m) + N'(...)
            _add_normed_gradient(grad, grad_normed, self._input_norm, kept.x, kept.scale)
        return qkv_grads + out_grads

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows `[M, width]` of queries, keys and values -> views `[M, heads, dim]` of the three."""
        attention = self.form.attention
        sizes = [attention.heads, attention.kv_heads, attention.kv_heads]
        q, k, v = torch.split(rows.view(len(rows), -1, attention.dim), sizes, dim=1)
        return q, k, v

    def _turned(self, rows: Tensor) -> Tensor:
        """A view `[M, heads + kv_heads, dim]` of their queries and keys, which are normed and turned."""
        attention = self.form.attention
        return rows.view(len(rows), -1, attention.dim)[:, : attention.heads + attention.kv_heads]

    def _added(self, x: Tensor, out: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor | None]:
        """`x + factor * N(out)`, and `out` where the backward needs it; else its memory is taken."""
        raw = None if norm is None else out
        if norm is not None:
            out = norm.apply(out, norm.scale(out))
        return torch.add(x, out, alpha=self.form.factor, out=out), raw

    def _added_gradient(self, grad: Tensor, raw: Any, norm: Norm | None) -> Tensor:
        """The gradient of `_added`'s `out`; `grad`, that of the sum, stays as it is."""
        grad = grad if self.form.factor == 1 else grad * self.form.factor
        return grad if norm is None else norm.gradient(grad.clone(), raw, norm.scale(raw)).to(raw.dtype)


class _Decode(torch.autograd.Function):
    """Token ids -> the hidden states that are asked for; differentiable in the adapters."""

    @staticmethod
    def forward(
        ctx: Any, decoder: FusedDecoder, pack: Pack | Piece, layout: TreeLayout, keep: bool, *parameters: Tensor
    ) -> Tensor:
        device = decoder._device
        ids = _to(pack.token_ids, device)
        x, album = decoder._embedding(ids), getattr(decoder._embedding, "album", None)
        deep = None if album is None else album.deep(ids)
        if decoder._multiplier != 1:
            x = x * decoder._multiplier
        positions, layers = _to(pack.turns, device), []
        turns: dict[str | None, Turn] = {name: turn(positions, x.dtype) for name, turn in decoder._rotaries.items()}
        for number, layer in enumerate(decoder._layers):
            kept = layer.begin(x)
            x = layer.forward(kept, layout, turns.get(layer.form.rotary))
            if deep is not None:
                deep.add(number, x)
            if keep and number >= decoder._first:
                layers.append(layer.begin(kept.x) if decoder._checkpoint else kept)
        index = _to(pack.score_at, device)
        picked = x.index_select(0, index)
        normed, scale = _normed(decoder._norm, picked)
        if keep:
            ctx.decoder, ctx.layout, ctx.turns, ctx.layers = decoder, layout, turns, layers
            ctx.index, ctx.last, ctx.scale, ctx.rows = index, picked, scale, len(x)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        decoder, layers = ctx.decoder, ctx.layers
        if layers is None:
            raise RuntimeError("the fused layers' backward ran twice; what it needs is freed as it goes")
        ctx.layers = None
        picked = torch.zeros_like(ctx.last)
        _add_normed_gradient(picked, grad.clone(), decoder._norm, ctx.last, ctx.scale)
        grad_x = picked.new_zeros(ctx.rows, picked.shape[1])
        # where sequences part, a row is picked once for each; on CPU the sum's order is that of the index
        grad_x.index_add_(0, ctx.index, picked)
        grads: list[Tensor] = []
        for layer in reversed(decoder._layers[decoder._first :]):
            kept, turn = layers.pop(), ctx.turns.get(layer.form.rotary)
            if kept.gate_up is None:
                layer.forward(kept, ctx.layout, turn)
            grads = layer.backward(kept, grad_x, ctx.layout, turn, ends=not layers) + grads
        return None, None, None, None, *grads


def _to(values: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)


def _normed(norm: Norm | None, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """`N(x)`, and the norm's scale, which may be given; `x` itself where there is no norm."""
    if norm is None:
        return x, None
    scale = norm.scale(x) if scale is None else scale
    return norm.apply(x, scale), scale


def _add_normed_gradient(into: Tensor, grad: Tensor, norm: Norm | None, x: Tensor, scale: Any) -> None:
    """Add what the gradient of `N(x)` makes of `x`; `grad` may be overwritten."""
    into.add_(grad if norm is None else norm.gradient(grad, x, scale))
