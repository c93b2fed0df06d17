"""Attention of a pack with its backward: each token is computed once, whatever follows it.

A pack is a forest of branches (`covey.rollout.packing`), and a token attends to its own branch and to the beginnings of
those above it. That is computed part by part (`tree_parts`), or on an accelerator by a kernel that takes the pack at
once, where a probe has found that it computes the same (`tree_whole`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.pytorch.attention import tree_flex, tree_parts
from covey.pytorch.attention.tree_layout import TreeLayout
from covey.pytorch.attention.tree_parts import Gradients, Past
from covey.pytorch.attention.tree_whole import kernel_for


def forward(
    layout: TreeLayout, q: Tensor, k: Tensor, v: Tensor, past: Past | None = None, **rule: Any
) -> tuple[Tensor, Tensor]:
    """Attention of one layer over a pack, without autograd: `tree_parts.forward`'s arguments and values.

    The log-sum-exp is empty where the pack is taken at once: that backward needs none.
    """
    kernel = kernel_for(q, k, v, **rule)
    if kernel is None:
        return tree_parts.forward(layout, q, k, v, past, **rule)
    return kernel.attend(layout, q, k, v, past, **_within(layout, rule)), q.new_empty(0)


def backward(
    layout: TreeLayout,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Past | None,
    out: Tensor,
    lse: Tensor,
    *,
    into: Gradients | None = None,
    into_past: Past | None = None,
    **rule: Any,
) -> tuple[Tensor, Tensor, Tensor, Past | None]:
    """The gradients of `forward`'s q, k, v and past: `tree_parts.backward`'s arguments and values."""
    kernel = kernel_for(q, k, v, **rule)
    if kernel is None:
        return tree_parts.backward(layout, grad, q, k, v, past, out, lse, into=into, into_past=into_past, **rule)
    gq, gk, gv, *above = kernel.differentiate(layout, grad, q, k, v, past, **_within(layout, rule))
    if into is not None:
        for result, g in zip(into, (gq, gk, gv), strict=True):
            result.copy_(g)
    if past is not None and into_past is None:
        into_past = above[0], above[1]
    elif into_past is not None:
        for result, g in zip(into_past, above, strict=True):
            result.add_(g)
    return *(into or (gq, gk, gv)), into_past


def _within(layout: TreeLayout, rule: dict[str, Any]) -> dict[str, Any]:
    """All of the rule, without a window that no sequence of the pack is longer than."""
    window = rule.get("window")
    window = None if window is not None and window >= layout.longest else window
    return {"scale": rule["scale"], "window": window, "softcap": rule.get("softcap")}


# ---------------------------------------------------------------------- with the path of a walk


def layer_forward(
    layout: TreeLayout, layer: int, q: Tensor, k: Tensor, v: Tensor, **rule: Any
) -> tuple[Tensor, Tensor]:
    """`forward` of a layer by its number: the past is read from the layout's path, and a trunk is written to it."""
    return forward(layout, q, k, v, _exchange(layout, layer, k, v), **rule)


def _exchange(layout: TreeLayout, layer: int, k: Tensor, v: Tensor) -> Past | None:
    if layout.path is None:
        return None
    if layout.trunk:
        layout.path.write(layer, layout.past, k, v)
    return layout.path.read(layer, layout.past) if layout.past else None


def layer_backward(
    layout: TreeLayout,
    layer: int,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    into: Gradients | None = None,
    **rule: Any,
) -> Gradients:
    """`backward` of a layer by its number: the past's gradients are added to the path's, a trunk takes its own."""
    path, n = layout.path, layout.past
    past = into_past = None
    if path is not None and n:
        past, into_past = path.read(layer, n), path.gradients(layer, 0, n)
    *grads, _ = backward(layout, grad, q, k, v, past, out, lse, **rule, into=into, into_past=into_past)
    if path is not None and layout.trunk:
        for result, left in zip(grads[1:], path.gradients(layer, n, n + len(k)), strict=True):
            result += left
            left.zero_()
    return grads[0], grads[1], grads[2]


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, layer: int, rule: dict[str, Any]
    ) -> Tensor:
        out, lse = layer_forward(layout, layer, q, k, v, **rule)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.layer, ctx.rule = layout, layer, rule
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = layer_backward(ctx.layout, ctx.layer, grad.contiguous(), q, k, v, out, lse, **ctx.rule)
        return *grads, None, None, None


def tree_attention(layout: TreeLayout, layer: int, q: Tensor, k: Tensor, v: Tensor, **rule: Any) -> Tensor:
    """`layer_forward`'s output, differentiable; once, where a path is walked."""
    if layout.path is None and kernel_for(q, k, v, **rule) is tree_flex:  # autograd keeps what its backward needs
        return tree_flex.attend(layout, q, k, v, None, **_within(layout, rule))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # kernels read dense heads
    out: Tensor = _TreeAttention.apply(q, k, v, layout, layer, rule)  # type: ignore[no-untyped-call]
    return out
