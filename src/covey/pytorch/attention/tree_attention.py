"""Attention of a pack: each token is computed once, whatever follows it.

A pack is a forest of branches (`covey.rollout.packing`), and a token attends to its own branch and to the beginnings of
those above it. That is computed part by part (`tree_parts`), or on an accelerator by a kernel that takes the pack at
once, where a probe has found that it computes the same (`tree_flex`).

For models' own code it is registered with transformers as an attention implementation: they run unchanged on `[1, M]`
packed tokens, and only the attention itself knows who may see whom. Limits: no attention sinks, no position biases, no
dropout of weights, no chunked or linear attention. `probe` finds out by comparing numbers whether a model is served;
here `UnsupportedAttentionError` is raised only where it is known that it is not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from covey.errors import ModelError
from covey.functions import later
from covey.pytorch.attention import tree_parts
from covey.pytorch.attention.tree_layout import Rule, TreeLayout
from covey.pytorch.attention.tree_parts import Gradients

if TYPE_CHECKING:
    from covey.pytorch.attention import tree_flex
else:  # with a compiler, for which a CPU has no use
    (tree_flex,) = later("covey.pytorch.attention", "tree_flex")

NAME_PREFIX = "covey_prefix_"
DEVICES = ("cuda",)
"""Where `tree_flex` is tried."""
PLAIN_IMPLEMENTATIONS = ("sdpa", "eager")
LAYOUT_ARGUMENT = "prefix_layout"
"""The keyword argument that carries the layout through the model's forward to its attention layers."""


class UnsupportedAttentionError(ModelError):
    """A layer asks for something that is not computed here; the policy falls back to padding."""


def rule_of(module: nn.Module, query: Tensor, scaling: float | None, asked: Mapping[str, Any]) -> Rule:
    """What a layer asks of transformers' attention interface, by its keyword arguments; more than is computed here
    raises `UnsupportedAttentionError`.
    """
    for name in ("s_aux", "position_bias", "cache", "head_mask"):
        if asked.get(name) is not None:
            raise UnsupportedAttentionError(f"its attention uses {name}")
    if not asked.get("is_causal", getattr(module, "is_causal", True)):
        raise UnsupportedAttentionError("its attention is not causal")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return Rule(scale, asked.get("sliding_window"), asked.get("softcap"))


def kernel_for(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tree_flex.Kernel | None:
    """What takes a pack at once with these queries, keys and values; None = part by part, as always on a CPU."""
    if q.device.type not in DEVICES:
        return None
    return tree_flex.kernel_for(q, k, v, rule)


def forward(layout: TreeLayout, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Attention of one layer over a pack, without autograd: `tree_parts.forward`'s values. The past is read from the
    layout's path, and a trunk is written to it. The log-sum-exp is empty where a kernel takes the pack at once.
    """
    past = None
    if layout.path is not None:
        if layout.trunk:
            layout.path.write(layer, layout.past, k, v)
        past = layout.path.read(layer, layout.past) if layout.past else None
    kernel = kernel_for(q, k, v, rule)
    if kernel is None:
        return tree_parts.forward(layout, q, k, v, past, rule)
    return kernel.attend(layout, q, k, v, past, layout.felt(rule)), q.new_empty(0)


def backward(
    layout: TreeLayout,
    layer: int,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rule: Rule,
    into: Gradients | None = None,
) -> Gradients:
    """The gradients of `forward`'s q, k and v, in `into` if it is given: the past's are added to the path's, a trunk
    takes what its followers left.
    """
    path, n = layout.path, layout.past
    past = into_past = None
    if path is not None and n:
        past, into_past = path.read(layer, n), path.gradients(layer, 0, n)
    kernel = kernel_for(q, k, v, rule)
    if kernel is None:
        gq, gk, gv, _ = tree_parts.backward(layout, grad, q, k, v, past, out, lse, rule, into, into_past)
    else:
        gq, gk, gv, *above = kernel.differentiate(layout, grad, q, k, v, past, layout.felt(rule))
        for result, g in zip(into_past or (), above, strict=True):
            result.add_(g)
        if into is not None:
            for result, g in zip(into, (gq, gk, gv), strict=True):
                result.copy_(g)
            gq, gk, gv = into
    if path is not None and layout.trunk:
        for result, left in zip((gk, gv), path.gradients(layer, n, n + len(k)), strict=True):
            result += left
            left.zero_()
    return gq, gk, gv


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, layer: int, rule: Rule) -> Tensor:
        out, lse = forward(layout, layer, q, k, v, rule)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.layer, ctx.rule = layout, layer, rule
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = backward(ctx.layout, ctx.layer, grad.contiguous(), q, k, v, out, lse, ctx.rule)
        return *grads, None, None, None


def tree_attention(layout: TreeLayout, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
    """`forward`'s output, differentiable; once, where a path is walked."""
    kernel = None if layout.path is not None else kernel_for(q, k, v, rule)
    if kernel is not None and kernel.under_autograd:
        return kernel.attend(layout, q, k, v, None, layout.felt(rule))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # kernels read dense heads
    out: Tensor = _TreeAttention.apply(q, k, v, layout, layer, rule)  # type: ignore[no-untyped-call]
    return out


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plain: str,
    prefix_layout: TreeLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls: packed attention where a layout was passed, else what it replaced."""
    if prefix_layout is None:
        if plain == "eager":
            replaced = sys.modules[type(module).__module__].eager_attention_forward
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        else:
            replaced = ALL_ATTENTION_FUNCTIONS[plain]
        kwargs |= {"scaling": scaling, "dropout": dropout}
        return cast(tuple[Tensor, Tensor | None], replaced(module, query, key, value, attention_mask, **kwargs))
    rule = rule_of(module, query, scaling, kwargs)
    if dropout > 0:
        raise UnsupportedAttentionError(f"its attention drops weights (dropout={dropout})")
    prefix_layout.seen.append(rule.window)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    device = query.device.type
    if torch.is_autocast_enabled(device):  # as scaled dot-product attention would be; what is inside is not touched
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    with torch.autocast(device, enabled=False):
        return tree_attention(prefix_layout, getattr(module, "layer_idx", 0), q, k, v, rule)[None], None


for _plain in PLAIN_IMPLEMENTATIONS:
    AttentionInterface.register(NAME_PREFIX + _plain, partial(_attention_forward, plain=_plain))
    AttentionMaskInterface.register(NAME_PREFIX + _plain, ALL_MASK_ATTENTION_FUNCTIONS[_plain])
