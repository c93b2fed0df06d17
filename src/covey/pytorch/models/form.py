"""What a decoder of Llama's shape computes, read off its modules once.

The sampler's fast runner and the trainer's fused layers compute from this description, and know no family by name:

    x = embedding * factors
    in each layer
        [q | k | v] = Q N(x)            joined or separate projections, with biases or without
        [q | k] = R N([q | k])          norms of each head or of all together; a part of each head turns, or none
        x = x + f N(O attention(q, k, v))
        [g | u] = G N(x)
        x = x + f N(D (act(g) * u))
    logits = head(N(x))                 scaled and capped, see `Head`

What turns are pairs of a head's first R numbers, `(i, i + R / 2)` or, as in GLM, `(2 i, 2 i + 1)`. Each norm N may be
absent, and may multiply by 1 + its weight. How a layer attends (heads, scale, sliding window, soft cap) is what its own
code asks of transformers' attention interface: it is run once, on one token, and listened to.

Only classes whose code was read are taken, since a probe of a few tokens cannot feel what happens at distant positions.
Others, and those of these classes with a part that is not known here, go through the model's own code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.activations import ACT2FN

from covey.errors import ModelError
from covey.pytorch.attention.probe import missing_windows
from covey.pytorch.attention.tree_attention import rule_of
from covey.pytorch.attention.tree_layout import Rule
from covey.pytorch.models.narrow import NarrowLinear
from covey.pytorch.products import is_narrow, linear
from covey.pytorch.rounding import wide_dtype

_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary variants whose frequencies do not depend on the sequence length."""


def rope_by_length(model: nn.Module) -> str | None:
    """Why a token's rotation depends on how long its sequence is, if it does: such sequences share no tokens."""
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for kind in types.values() if isinstance(types, dict) else [types]:
            if kind is not None and kind not in _FIXED_ROPE:
                return f"rope type {kind!r} depends on the sequence length"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class RotaryForm:
    """What a model's rotary module computes."""

    frequencies: Tensor  # [R / 2] radians for each position
    scaling: float  # factor on cosines and sines
    neighbours: bool  # pairs are (2 i, 2 i + 1), not (i, i + R / 2)
    which: Tensor | None  # [R / 2] of a token's three positions, the one that turns each pair; None = there is one


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """The rotation at M positions, with few operations: `rotate_half(x) * sin` with its minus sign moved into sin is a
    multiplication of `x` with the two of each pair exchanged, and no negation.
    """

    cos: Tensor  # [M, 1, R]
    signed_sin: Tensor  # [M, 1, R], negative for the first of each pair
    neighbours: bool  # see `RotaryForm`

    def forward(self, x: Tensor) -> Tensor:
        """Heads `[M, heads, dim]` turned."""
        return self._turned(x, self.signed_sin)

    def backward(self, grad: Tensor) -> Tensor:
        """The gradient `[M, heads, dim]` of what was turned: turned back."""
        return self._turned(grad, -self.signed_sin)

    def _turned(self, x: Tensor, signed_sin: Tensor) -> Tensor:
        size = self.cos.shape[-1]
        part = x[..., :size]
        other = torch.unflatten(part, -1, (-1, 2)).flip(-1).flatten(-2) if self.neighbours else part.roll(size // 2, -1)
        turned = torch.addcmul(part * self.cos, other, signed_sin)
        return turned if size == x.shape[-1] else torch.cat([turned, x[..., size:]], dim=-1)


class Rotary:
    """Makes the turns of one rotary module."""

    def __init__(self, form: RotaryForm, device: torch.device) -> None:
        self._scaling, self._neighbours = form.scaling, form.neighbours
        self._which = None if form.which is None else form.which.to(device)
        self._inverse_frequencies = form.frequencies.detach().to(device, torch.float32, copy=True)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Turn:
        """The rotation at positions `[M]`, or `[3, M]` where tokens have three."""
        of_pairs = positions[:, None] if positions.dim() == 1 else positions[self._which].T
        angles = of_pairs.float() * self._inverse_frequencies
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        # pairs side by side, or one half after the other
        places = -1 if self._neighbours else -2
        both, signed = (torch.stack(pair, places).flatten(-2).to(dtype) for pair in ([cos, cos], [-sin, sin]))
        return Turn(both[:, None], signed[:, None], self._neighbours)


_READ = ("Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Granite", "SmolLM3", "Olmo2", "Gemma2", "Gemma3", "Glm", "Glm4")
"""Of classes, without `ForCausalLM`."""
_NORM_NAMES = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
"""The norms of attention's input and output and of the MLP's input and output, as one layer or another names them."""
_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))


@dataclass(frozen=True, slots=True)
class Activation:
    """The MLP's function of the gate `[M, f]`; `backward(grad, gate, grad_input=out)` leads to the gate's gradient."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[..., Tensor]


_SILU = Activation(functional.silu, torch.ops.aten.silu_backward.grad_input)
_GELU = Activation(
    partial(functional.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh")
)
_ACTIVATIONS = {type(ACT2FN[name]): a for name, a in (("silu", _SILU), ("swish", _SILU), ("gelu_pytorch_tanh", _GELU))}


@dataclass(frozen=True, slots=True)
class NormForm:
    """`(offset + weight) * x / sqrt(mean(x^2) + eps)`; `name` is the module's within its layer or model."""

    name: str
    eps: float
    offset: float


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """How a layer attends, and what it attends with."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    rule: Rule


@dataclass(frozen=True, slots=True)
class LayerForm:
    """One layer. Projections and norms are named within it."""

    attention: AttentionForm
    rotary: str | None
    qkv: tuple[str, ...]
    out: str
    gate_up: tuple[str, ...]
    down: str
    input_norm: NormForm | None
    attention_norm: NormForm | None
    mlp_norm: NormForm | None
    output_norm: NormForm | None
    head_norms: tuple[NormForm, ...] | None  # of queries and of keys
    whole_heads: bool
    activation: Activation
    factor: float


@dataclass(frozen=True, slots=True, eq=False)
class DecoderForm:
    """A whole decoder."""

    layers: tuple[LayerForm, ...]
    norm: NormForm
    rotaries: Mapping[str, RotaryForm]
    width: int
    embedding_scale: float
    embedding_multiplier: float


def is_known(base: Any) -> bool:
    """Whether a model's class is one whose code was read; `read_form` looks at the rest."""
    name = type(base).__name__
    return name.removesuffix("ForCausalLM") in _READ and type(base) is getattr(transformers, name, None)


def read_form(base: Any) -> DecoderForm:
    """Describe a model; one that is not of this shape raises a `ModelError` which says what differs."""
    name = type(base).__name__
    if not is_known(base):
        raise ModelError(f"{name} is not one of those read: {', '.join(_READ)}")
    if obstacle := rope_by_length(base):
        raise ModelError(obstacle)
    decoder, config = base.model, base.config
    calls = listen(base)
    if len(calls) != len(decoder.layers) or any(call.dim != call.value_dim for call in calls):
        raise ModelError("attention of some layers only, or of other values than Llama's")
    if obstacle := missing_windows(config, [call.rule.window for call in calls]):
        raise ModelError(obstacle)
    rotary, kinds = decoder.rotary_emb, getattr(config, "layer_types", None)
    by_kind = isinstance(getattr(rotary, "rope_type", None), dict)
    turned_by = [str(kind) for kind in kinds] if by_kind and kinds else [""] * len(calls)
    layers = tuple(map(_layer_form, decoder.layers, calls, turned_by))
    return DecoderForm(
        layers,
        _norm_form("norm", decoder.norm),
        {kind: _rotary_form(rotary, kind) for kind in {layer.rotary for layer in layers} if kind is not None},
        int(config.hidden_size),
        float(getattr(decoder.embed_tokens, "embed_scale", 1.0)),
        float(getattr(decoder, "embedding_multiplier", 1.0)),
    )


def _layer_form(layer: Any, attention: AttentionForm, rotary: str) -> LayerForm:
    parts = {name for name, part in layer.named_children() if not isinstance(part, nn.Dropout)}
    norms = next((names for names in _NORM_NAMES if {"self_attn", "mlp", *filter(None, names)} == parts), None)
    if norms is None:
        raise ModelError(f"a layer of {', '.join(sorted(parts))}")
    inside, mlp_parts = dict(layer.self_attn.named_children()), dict(layer.mlp.named_children())
    head_norms = None
    if {"q_norm", "k_norm"} <= inside.keys():
        head_norms = tuple(_norm_form(f"self_attn.{n}", inside.pop(n)) for n in ("q_norm", "k_norm"))
    activations = [mlp_parts.pop(n) for n in ("act_fn", "activation_fn") if n in mlp_parts]
    if len(activations) != 1 or type(activations[0]) not in _ACTIVATIONS:
        raise ModelError(f"activation {', '.join(type(a).__name__ for a in activations)}")
    before, after, mlp_before, mlp_after = (
        None if name is None else _norm_form(name, layer.get_submodule(name)) for name in norms
    )
    return LayerForm(
        attention=attention,
        rotary=rotary if getattr(layer.self_attn, "use_rope", True) else None,
        qkv=_projections("self_attn", inside, _QKV, "o_proj"),
        out="self_attn.o_proj",
        gate_up=_projections("mlp", mlp_parts, _GATE_UP, "down_proj"),
        down="mlp.down_proj",
        input_norm=before,
        attention_norm=after,
        mlp_norm=mlp_before,
        output_norm=mlp_after,
        head_norms=head_norms,
        whole_heads=head_norms is not None and layer.self_attn.q_norm.weight.numel() != attention.dim,
        activation=_ACTIVATIONS[type(activations[0])],
        factor=float(getattr(layer, "residual_multiplier", 1.0)),
    )


def _projections(owner: str, parts: Mapping[str, Any], choices: Any, last: str) -> tuple[str, ...]:
    for names in choices:
        if {*names, last} == parts.keys():
            return tuple(f"{owner}.{name}" for name in names)
    raise ModelError(f"{owner} of {', '.join(sorted(parts))}")


@torch.no_grad()
def _norm_form(name: str, norm: Any) -> NormForm:
    """Whether its weight counts from 0 or from 1 is asked of the norm: of ones, with a weight of 0, it makes just that.
    Its own weight may have no numbers yet.
    """
    norm = getattr(norm, "original_module", norm)  # PEFT's wrapper around what is trained whole
    parameters = dict(norm.named_parameters())
    if parameters.keys() != {"weight"}:
        raise ModelError(f"{name} with parameters {', '.join(sorted(parameters))}")
    weight = parameters["weight"]
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    made = functional_call(norm, {"weight": torch.zeros_like(weight)}, torch.ones_like(weight))
    offset = round(float(made.float().mean()))
    if eps is None or offset not in (0, 1):
        raise ModelError(f"{name} is not a known RMS norm")
    return NormForm(name, float(eps), float(offset))


def _rotary_form(rotary: Any, kind: str) -> RotaryForm:
    half = getattr(sys.modules[type(rotary).__module__], "rotate_half", None)
    turned = [] if half is None else half(torch.arange(1, 5)).tolist()
    if turned not in ([-3, -4, 1, 2], [-2, 1, -4, 3]):
        raise ModelError("its rotary embedding turns other pairs than those known here")
    prefix = f"{kind}_" if kind else ""
    frequencies, scaling = (getattr(rotary, f"{prefix}{name}") for name in ("inv_freq", "attention_scaling"))
    which = None
    if hasattr(rotary, "mrope_section"):  # three tokens, each of which is turned by another position
        sine = rotary(frequencies, torch.eye(3, dtype=torch.long, device=frequencies.device)[:, None])[1]
        which = sine[0, :, : len(frequencies)].argmax(0)
    return RotaryForm(frequencies, float(scaling), turned[0] == -2, which)


_LISTENER = "covey_attention_listener"
_heard: ContextVar[dict[int, AttentionForm]] = ContextVar("covey_attention_heard")


def _listen(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    rule = rule_of(module, query, scaling, kwargs)
    form = AttentionForm(query.shape[1], key.shape[1], query.shape[3], value.shape[3], rule)
    _heard.get()[int(module.layer_idx)] = form
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(_LISTENER, _listen)


def listen(base: Any) -> list[AttentionForm]:
    """What each layer asks of transformers' attention interface: the model is run once, on one token. `ModelError`
    where layers do not use it, or ask for more than is computed here.
    """
    before, heard = base.config._attn_implementation, dict[int, AttentionForm]()
    token, one = _heard.set(heard), torch.zeros(1, 1, dtype=torch.long, device=base.device)
    try:
        base.config._attn_implementation = _LISTENER
        with torch.no_grad():
            base(input_ids=one, position_ids=one, use_cache=False)
    finally:
        base.config._attn_implementation = before
        _heard.reset(token)
    if not heard or sorted(heard) != list(range(len(heard))):
        raise ModelError(f"only layers {sorted(heard)} use the attention interface")
    return [heard[i] for i in sorted(heard)]


def wide(x: Tensor) -> Tensor:
    """`x` in the precision in which logits are computed."""
    return x.to(wide_dtype(x.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """How a model turns a hidden state into logits: `softcap * tanh(scale * (h W' + b) / softcap)`."""

    weight: Tensor | None  # [V, d], or None where only the module can be called (LoRA on the head, unusual heads)
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None
    module: nn.Module | None = None  # the head itself

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        """The output head of a causal LM with the model's own factors on the logits: `final_logit_softcapping` (Gemma
        2), `logit_scale` (Cohere, a factor) and `logits_scaling` (Granite, a divisor); `Policy` compares the result
        with the model's own logits.
        """
        module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if module is None:
            raise ModelError(f"{type(model).__name__}: has no output head; use a causal language model")
        config = model.config.get_text_config()
        scale = 1.0
        if getattr(config, "logit_scale", None) is not None:
            scale *= float(config.logit_scale)
        if getattr(config, "logits_scaling", None) is not None:
            scale /= float(config.logits_scaling)
        softcap = getattr(config, "final_logit_softcapping", None)
        if type(module) in (nn.Linear, NarrowLinear):
            return cls(module.weight, module.bias, scale, softcap, module)
        return cls(None, None, scale, softcap, module)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[S, d]` -> `[S, V]` in float32 or wider, by plain autograd operations."""
        if self.weight is None:
            assert self.module is not None
            raw = wide(self.module(hidden)) * self.scale
        else:
            narrow = is_narrow(hidden, self.weight)
            raw = linear(wide(hidden), self.weight if narrow else wide(self.weight)) * self.scale
            if self.bias is not None:
                raw = raw + wide(self.bias) * self.scale
        return raw if self.softcap is None else torch.tanh(raw / self.softcap) * self.softcap

    def frozen(self) -> Head:
        """The same head on its present weights, whatever becomes of them: those that are trained are copied."""
        both = (self.weight, self.bias)
        weight, bias = (x if x is None else x.detach().clone() if x.requires_grad else x.detach() for x in both)
        return Head(weight, bias, self.scale, self.softcap, self.module)

    def first(self, ids: int) -> Head:
        """The head of the first ids of the vocabulary. Raises `ModelError`: it can only be called."""
        if self.weight is None:
            raise ModelError(f"{type(self.module).__name__}: an output head of which no part can be taken")
        return Head(self.weight[:ids], None if self.bias is None else self.bias[:ids], self.scale, self.softcap)
