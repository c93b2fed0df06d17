"""Packed attention in transformers' models: what several sequences begin with is computed once.

Registered with transformers as an attention implementation, so the models' own code runs unchanged on `[1, M]` packed
tokens; only the attention itself knows who may see whom (`covey.pytorch.attention.tree_attention`).

Limits: no attention sinks, no position biases, no dropout of weights, no chunked or linear attention. `probe` finds out
by comparing numbers whether a model is served; this file only raises `UnsupportedAttentionError` where it knows that it
is not.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from covey.pytorch.attention.tree_attention import tree_attention
from covey.pytorch.attention.tree_layout import TreeLayout

NAME_PREFIX = "covey_prefix_"
PLAIN_IMPLEMENTATIONS = ("sdpa", "eager")
LAYOUT_ARGUMENT = "prefix_layout"
"""The keyword argument that carries the layout through the model's forward to its attention layers."""


class UnsupportedAttentionError(Exception):
    """A layer asks for something that packed attention does not compute; the policy falls back to padding."""


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
            forward = sys.modules[type(module).__module__].eager_attention_forward
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        else:
            forward = ALL_ATTENTION_FUNCTIONS[plain]
        result: tuple[Tensor, Tensor | None] = forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return result
    for name in ("s_aux", "position_bias", "cache", "head_mask"):
        if kwargs.get(name) is not None:
            raise UnsupportedAttentionError(f"its attention uses {name}")
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise UnsupportedAttentionError("its attention is not causal")
    if dropout > 0:
        raise UnsupportedAttentionError(f"its attention drops weights (dropout={dropout})")
    window = kwargs.get("sliding_window")
    prefix_layout.seen.append(window)
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    device = query.device.type
    if torch.is_autocast_enabled(device):  # as scaled dot-product attention would be; what is inside is not touched
        rows = [x.to(torch.get_autocast_dtype(device)) for x in rows]
    with torch.autocast(device, enabled=False):
        out = tree_attention(
            prefix_layout,
            getattr(module, "layer_idx", 0),
            *rows,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=window,
            softcap=kwargs.get("softcap"),
        )
    return out[None], None


def _register() -> None:
    for plain in PLAIN_IMPLEMENTATIONS:
        AttentionInterface.register(NAME_PREFIX + plain, partial(_attention_forward, plain=plain))
        AttentionMaskInterface.register(NAME_PREFIX + plain, ALL_MASK_ATTENTION_FUNCTIONS[plain])


_register()
