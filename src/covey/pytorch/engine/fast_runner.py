"""Runs models of Llama's shape, as `form` describes them, with a few operations a layer on its own copy.

The copy fuses the query, key and value projections into one matrix, gate and up into another, and stores each
in the layout that multiplies fastest (see `Linear`). A model that is not of this shape is refused, and the engine takes
the general path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from covey.errors import ModelError
from covey.pytorch.engine.cache import LayerShape
from covey.pytorch.engine.merge import EffectiveWeights, are_tied, bare_model, frozen_version
from covey.pytorch.engine.runner import Step
from covey.pytorch.models.form import Head, LayerForm, NormForm, Rotary, read_form
from covey.pytorch.models.lora import Adapters, Factors, album_of
from covey.pytorch.models.narrow import PackedBytes, narrow_weights, packed
from covey.pytorch.products import can_pack, linear, prefers_onednn

_EMBEDDING = "model.embed_tokens.weight"
_NOTHING = torch.empty(0)
"""The weight of a norm that a layer does not have."""


class FastRunner:
    """See the module docstring; a model of another shape raises a `ModelError` which says what differs."""

    name = "fast"

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, device: torch.device, products: torch.dtype | None = None
    ) -> None:
        base: Any = bare_model(model)
        form = read_form(base)
        self._dtype, self._device, self._album = dtype, device, album_of(base)
        self._rotaries = {name: Rotary(rotary, device) for name, rotary in form.rotaries.items()}
        narrow = any(True for _ in narrow_weights(base))
        products = products or (torch.bfloat16 if narrow else None)
        make = partial(NarrowLinear, products) if products else partial(Linear, dtype, device)
        self._norms = Norms(form.width, form.norm.eps, dtype, device, folds=not products)
        self._last_norm = form.norm
        self._layers = [_Layer(i, layer, self._norms, dtype, device, make) for i, layer in enumerate(form.layers)]
        attentions = [layer.attention for layer in form.layers]
        self.layer_shapes: Sequence[LayerShape] = [LayerShape(a.kv_heads, a.dim, a.dim) for a in attentions]
        rounded = float(torch.tensor(form.embedding_scale).to(dtype))
        self._embedding_scale = rounded * form.embedding_multiplier
        logits = Head.of(base)
        self._logit_scale, self._logit_cap = logits.scale, logits.softcap
        self._embedding = self._norm = torch.empty(0)
        self._head = make()
        self._embedded_in = torch.bfloat16 if narrow else dtype
        self._head_version: tuple[object, ...] = ()

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy, merge and fuse the weights; frozen embeddings are shared, a frozen head too or laid out for speed."""
        for layer in self._layers:
            layer.load(weights)
        take = _WeightReader(weights, self._dtype, self._device)
        embedding = weights[_EMBEDDING].to(self._device, self._embedded_in)
        self._embedding = embedding if frozen_version(weights, _EMBEDDING) else embedding.clone()
        norm = take.norm(self._last_norm, "model.")
        fold = self._norms.fold(norm)
        name = _EMBEDDING if are_tied(weights, "lm_head.weight", _EMBEDDING) else "lm_head.weight"
        version = frozen_version(weights, name)
        held = (name, version, frozen_version(weights, "model.norm.weight"))
        if version is None or held != self._head_version:
            self._head_version = ()  # should the copy fail, nothing is known of it
            module, shares = name.removesuffix(".weight"), version is not None and fold is None
            self._head.share(take, module) if shares else self._head.load(take, [module], fold)
            self._head_version = held
        self._norm = norm

    def release(self) -> None:
        """Give back the layers' memory until the next `load`."""
        for layer in self._layers:
            layer.release()

    def forward(self, step: Step) -> Tensor:
        look_up = partial(functional.embedding, weight=self._embedding)
        embedded = look_up(step.token_ids) if self._album is None else self._album.embed(step.token_ids, look_up)
        deep = None if self._album is None else self._album.deep(step.token_ids)
        stream = self._norms.open(embedded.to(self._dtype), self._embedding_scale)
        x = stream[:, : self._embedding.shape[1]]
        turns = {name: rotary(step.positions, self._dtype) for name, rotary in self._rotaries.items()}
        for i, layer in enumerate(self._layers):
            form = layer.form
            heads, turned = form.attention.heads, form.attention.heads + form.attention.kv_heads
            qkv = layer.qkv(self._norms(stream, layer.input_norm)).view(x.shape[0], -1, form.attention.dim)
            qk = layer.normed_heads(qkv[:, :turned])
            if form.rotary is not None:
                qk = turns[form.rotary].forward(qk)
            given = qk[:, :heads], qk[:, heads:], qkv[:, turned:]
            attended = step.attention.attend(i, *given, form.attention.rule)
            out = layer.out(attended.reshape(x.shape[0], -1))
            x.add_(_normed(out, layer.attention_norm, form.attention_norm), alpha=form.factor)
            gate, up = layer.gate_up(self._norms(stream, layer.mlp_norm)).chunk(2, dim=-1)
            out = layer.down(form.activation.forward(gate).mul_(up))
            x.add_(_normed(out, layer.output_norm, form.output_norm), alpha=form.factor)
            if deep is not None:
                deep.add(i, x)
        if step.last is not None:
            stream = stream.index_select(0, step.last)
        logits = self._head(self._norms(stream, self._norm))
        if self._logit_scale != 1:
            logits.mul_(self._logit_scale)
        return logits if self._logit_cap is None else logits.div_(self._logit_cap).tanh_().mul_(self._logit_cap)


class _Layer:
    def __init__(
        self,
        index: int,
        form: LayerForm,
        norms: Norms,
        dtype: torch.dtype,
        device: torch.device,
        make: Callable[[], Linear | NarrowLinear],
    ) -> None:
        for norm in (form.input_norm, form.mlp_norm):
            if norm is not None and norm.eps != norms.eps:
                raise ModelError(f"norms of different eps ({norm.eps} and {norms.eps})")
        self.form = form
        self._prefix = f"model.layers.{index}."
        self._norms, self._dtype, self._device = norms, dtype, device
        self.qkv, self.out, self.gate_up, self.down = (make() for _ in range(4))
        self.input_norm = self.attention_norm = self.mlp_norm = self.output_norm = _NOTHING
        self._head_norms: tuple[Tensor, Tensor] | None = None

    def release(self) -> None:
        for each in (self.qkv, self.out, self.gate_up, self.down):
            each.release()

    def load(self, weights: Mapping[str, Tensor]) -> None:
        take, form, norms = _WeightReader(weights, self._dtype, self._device, self._prefix), self.form, self._norms
        self.input_norm, self.attention_norm = take.norm(form.input_norm), take.norm(form.attention_norm)
        self.mlp_norm, self.output_norm = take.norm(form.mlp_norm), take.norm(form.output_norm)
        self.qkv.load(take, form.qkv, norms.fold(self.input_norm))
        self.out.load(take, [form.out])
        self.gate_up.load(take, form.gate_up, norms.fold(self.mlp_norm))
        self.down.load(take, [form.down])
        if form.head_norms is not None:
            q, k = (take.norm(norm) for norm in form.head_norms)
            if not form.whole_heads:
                q, k = q.expand(form.attention.heads, -1), k.expand(form.attention.kv_heads, -1)
            self._head_norms = (q, k) if form.whole_heads else (torch.cat([q, k]), _NOTHING)

    def normed_heads(self, qk: Tensor) -> Tensor:
        """Queries and keys `[M, heads + kv_heads, dim]` after their norms, where there are any."""
        if self._head_norms is None or self.form.head_norms is None:
            return qk
        (q_form, k_form), (q_weight, k_weight) = self.form.head_norms, self._head_norms
        if not self.form.whole_heads:
            return functional.rms_norm(qk, qk.shape[-1:], None, q_form.eps) * q_weight
        q, k = (part.flatten(1) for part in qk.tensor_split([self.form.attention.heads], dim=1))
        return torch.cat([_normed(q, q_weight, q_form), _normed(k, k_weight, k_form)], dim=1).view(qk.shape)


def _normed(x: Tensor, weight: Tensor, form: NormForm | None) -> Tensor:
    """`[M, dim]` normed, where there is a norm."""
    return x if form is None else functional.rms_norm(x, x.shape[-1:], weight, form.eps)


class _WeightReader:
    """Weights by name under a prefix, in the engine's dtype and device."""

    def __init__(
        self, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, prefix: str = ""
    ) -> None:
        self._weights, self._dtype, self._device, self._prefix = weights, dtype, device, prefix

    def __call__(self, name: str, *, copy: bool = False) -> Tensor:
        return self._weights[self._prefix + name].to(self._device, self._dtype, copy=copy)

    def norm(self, form: NormForm | None, prefix: str = "") -> Tensor:
        """What a norm multiplies with; nothing where there is no norm."""
        if form is None:
            return _NOTHING
        weight = self(f"{prefix}{form.name}.weight", copy=True)
        return weight.add_(form.offset) if form.offset else weight

    def biases(self, modules: Sequence[str]) -> Tensor | None:
        """The modules' biases one below the other."""
        names = [name for module in modules if self._prefix + (name := f"{module}.bias") in self._weights]
        if names and len(names) < len(modules):
            raise ModelError(f"{self._prefix}{modules[0]}: some of {modules} have a bias and some have none")
        return torch.cat([self(name) for name in names]) if names else None

    def factored(self, module: str) -> tuple[Tensor, Factors | None]:
        """A module's weight, and the adapter beside it."""
        name, held = f"{self._prefix}{module}.weight", self._weights
        return held.factored(name) if isinstance(held, EffectiveWeights) else (held[name], None)


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

    So wide matrices are packed, and the others transposed where MKL multiplies (`covey.pytorch.products`). The packed
    form uses the operators that torch's inductor emits; where they are missing or fail, and on every other device and
    dtype, the layer is plain `F.linear`.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._layouts = device.type == "cpu" and dtype == torch.float32
        self._weight: Tensor | None = None
        self._apply: Callable[[Tensor], Tensor] = _not_loaded

    def load(self, take: _WeightReader, modules: Sequence[str], scale: Tensor | None = None) -> None:
        """Copy weights `[out_i, in]` below one another, over the last ones if they fit; `scale` `[in]` is on inputs."""
        weights, bias = [take(f"{module}.weight") for module in modules], take.biases(modules)
        outputs, inputs = sum(len(w) for w in weights), weights[0].shape[1]
        if self._layouts and outputs >= _WIDE * inputs and can_pack():
            self.release()
            joined = weights[0] if len(weights) == 1 else torch.cat(list(weights))
            joined = joined if scale is None else joined * scale
            packed = torch.ops.mkldnn._reorder_linear_weight(joined.contiguous(), 64)
            self._apply = lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
            return
        turned = self._layouts and not prefers_onednn()
        shape = (inputs, outputs) if turned else (outputs, inputs)
        if self._weight is None or self._weight.shape != shape:
            self._weight = weights[0].new_empty(shape)
        held = self._weight
        parts = torch.split(held.T if turned else held, [len(weight) for weight in weights])
        for weight, into in zip(weights, parts, strict=True):
            torch.mul(weight, scale, out=into) if scale is not None else into.copy_(weight)
        if not turned:
            self._apply = lambda x: linear(x, held, bias)
        elif bias is None:
            self._apply = lambda x: torch.mm(x, held)
        else:
            self._apply = lambda x: torch.addmm(bias, x, held)

    def share(self, take: _WeightReader, module: str) -> None:
        """Use a weight `[out, in]` that does not change as it is, without a copy."""
        weight, bias = take(f"{module}.weight"), take.biases([module])
        self._weight, self._apply = None, lambda x: functional.linear(x, weight, bias)

    def release(self) -> None:
        """Give the memory back; `load` must come before the next use."""
        self._weight, self._apply = None, _not_loaded

    def __call__(self, x: Tensor) -> Tensor:
        return self._apply(x)


class NarrowLinear:
    """`float32(bfloat16(x) W^T) + b`, or the same in int8, with adapters beside it: see `covey.pytorch.models.narrow`.
    `W` in bfloat16 is shared with the trainer. It stays when memory is given back; adapters are taken anew at each
    `load`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def load(self, take: _WeightReader, modules: Sequence[str], scale: Tensor | None = None) -> None:
        """As `Linear.load`, without factors on the inputs."""
        found = [take.factored(module) for module in modules]
        frozen = self._dtype == torch.bfloat16 or all(factors for _, factors in found)
        make = partial(packed, dtype=self._dtype) if frozen else PackedBytes
        self._weight, self._bias = make([weight for weight, _ in found]), take.biases(modules)
        # as they are now: the trainer's are changed in place
        own = ((len(weight), factors and (factors[0], factors[1].clone(), factors[2])) for weight, factors in found)
        self._adapters = Adapters.beside(own, torch.float32)

    def share(self, take: _WeightReader, module: str) -> None:
        self.load(take, [module])

    def release(self) -> None:
        """Nothing: the weights are the same after the update."""

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._weight.multiply(x, self._bias)
        if self._adapters is not None:
            self._adapters.add_to(y, x)
        return y


def _not_loaded(x: Tensor) -> Tensor:
    raise RuntimeError("a linear layer was used before weights were loaded")


class Norms:
    """The RMS norms of one model's residual stream in as few operations as the device's kernels allow.

    On CPU `rms_norm` is six operations. Two suffice if each row carries one more number: with `c = sqrt(d eps)`

        x / rms(x) = x sqrt(d) / sqrt(sum x^2 + d eps) = x sqrt(d) / ||[x, c]||

    so a row's norm is taken over its d + 1 numbers, and `sqrt(d)` times the norm's weight is folded into the matrix
    that reads the result. Elsewhere, and below float32, the norm is torch's own.
    """

    def __init__(self, dim: int, eps: float, dtype: torch.dtype, device: torch.device, *, folds: bool = True) -> None:
        self._dim, self.eps = dim, eps
        self._folds = folds and device.type == "cpu" and dtype == torch.float32

    def fold(self, weight: Tensor) -> Tensor | None:
        """`[d]` factors on the inputs of the matrix that reads a norm with this weight; None = none."""
        return weight * math.sqrt(self._dim) if self._folds and weight is not _NOTHING else None

    def open(self, embedded: Tensor, scale: float = 1.0) -> Tensor:
        """The stream `[M, d or d + 1]` that begins with `scale` times embeddings `[M, d]`, which are overwritten; its
        first d columns are added to.
        """
        if scale != 1:
            embedded.mul_(scale)
        if not self._folds:
            return embedded
        stream = embedded.new_empty(len(embedded), self._dim + 1)
        stream[:, : self._dim] = embedded
        stream[:, self._dim] = math.sqrt(self._dim * self.eps)
        return stream

    def __call__(self, stream: Tensor, weight: Tensor) -> Tensor:
        """`[M, d]` normed; `weight` is applied here unless it was folded. As it is where there is no norm."""
        if weight is _NOTHING:
            return stream[:, : self._dim].contiguous()
        if self._folds:
            norm = torch.linalg.vector_norm(stream, dim=-1, keepdim=True)
            return stream[:, : self._dim].div(norm)
        return functional.rms_norm(stream, (self._dim,), weight, self.eps)
