"""Attention of a pack part by part, with its backward: what serves every device, dtype and model.

A pack is a forest of branches (`covey.rollout.packing`). Attentions of a branch of L tokens that R tokens leave, in
branches of their own, after e of its tokens:

    own       over itself, causal                                                          [L] x [L]
    across    all that leaves it there, one after another, over its first tokens           [R] x [e]

A token attends to its own branch and to the beginnings of those above it, so its parts are merged by their
log-sum-exps: with `out_i`, `lse_i` of the parts, `out = sum_i exp(lse_i - lse) out_i` and `lse = log sum_i exp(lse_i)`.
For two parts the weights are `sigmoid(lse_own - lse_across)` and its complement.

The backward of one query q with score s_j = scale q k_j, p_j = exp(s_j - lse) and out = sum_j p_j v_j, where j runs
over the keys of all parts and g is the gradient of out:

    d(v_j) = p_j g        d(s_j) = p_j (g v_j - sum_i p_i g v_i) = p_j (g v_j - g out)
    d(q) = scale sum_j d(s_j) k_j        d(k_j) = scale d(s_j) q

Other keys than j enter only through `lse` and `out`. So a kernel that is given one part's keys with the *merged* `lse`
and `out` returns the merged softmax's d(k_j) and d(v_j) for its keys and its share of d(q), and the shares are added. A
branch's keys and values are never repeated for what leaves it, and their gradients come out summed. The queries in a
rectangle's padding, and those of tokens that are repeated there, have g = 0, and so add nothing.

Nothing but the output and its log-sum-exp is kept for the backward. The tokens above a piece of a larger tree are keys
and values without queries, given beside it (`past`). Which parts there are is planned by `TreeLayout`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from covey.pytorch.attention.tree_kernels import kernel_for
from covey.pytorch.attention.tree_layout import Across, TreeLayout

Past = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


def forward(
    layout: TreeLayout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Past | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one layer over a pack, without autograd.

    Args:
        layout: of the pack.
        q: `[M, H, D]`.
        k: `[M, Hkv, D]`.
        v: `[M, Hkv, Dv]`.
        past: keys `[layout.past, Hkv, D]` and values before the pack; None where `layout.past` is 0.
        scale: factor on the scores.
        window: a query sees keys at most `window - 1` positions back; None = all.
        softcap: scores become `softcap * tanh(scores / softcap)`; None = off.

    Returns:
        The output `[M, H, Dv]`, and its log-sum-exp `[M, H]` in float32 or wider.
    """
    window = None if window is not None and window >= layout.longest else window
    kernel = kernel_for(q, v, scale=scale, window=window, softcap=softcap)
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for part in layout.own:
        at = None if window is None else (part.take(layout.positions),) * 2
        found, found_lse = kernel.attend(part.take(q), part.take(k), part.take(v), at, causal=True)
        part.put(found, out)
        part.put(found_lse, lse)
    for across in layout.across:
        here, keys = across.queries, across.keys_within(window)
        if keys.start == keys.stop:
            continue
        above = _above(across, keys, k, v, past)
        at = None if window is None else _positions(layout, across, keys)
        (found,), (found_lse,) = kernel.attend(q[None, here], *above, at, causal=False)
        out[here].lerp_(found, torch.sigmoid(found_lse - lse[here])[..., None].to(out.dtype))
        lse[here] = torch.logaddexp(lse[here], found_lse)
    return out, lse


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
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    into: Gradients | None = None,
    into_past: Past | None = None,
) -> tuple[Tensor, Tensor, Tensor, Past | None]:
    """The gradients of `forward`'s q, k, v and past from that of its output, `[M, H, Dv]`; no past has None.

    `out` and `lse` are what `forward` returned. The first three are written into `into`, and the past's two are added
    to `into_past` in any dtype; where these are None, they are new tensors.
    """
    window = None if window is not None and window >= layout.longest else window
    grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)) if into is None else into
    if past is not None and into_past is None:
        into_past = torch.zeros_like(past[0]), torch.zeros_like(past[1])
    kernel = kernel_for(q, v, scale=scale, window=window, softcap=softcap)
    repeated = []
    for part in layout.own:
        at = None if window is None else (part.take(layout.positions),) * 2
        tile_q, tile_k, tile_v, tile_out, tile_lse = (part.take(x) for x in (q, k, v, out, lse))
        own = kernel.back(part.take_gradient(grad), tile_q, tile_k, tile_v, tile_out, tile_lse, at, causal=True)
        for result, g in zip(grads, own, strict=True):
            part.put(g, result)
        repeated.append((part, own[1:]))
    for part, own_kv in repeated:  # after all: a token's own rectangle writes what others add to
        for result, g in zip(grads[1:], own_kv, strict=True):
            part.add_repeated(g, result)
    for across in layout.across:
        here, keys = across.queries, across.keys_within(window)
        if keys.start == keys.stop:
            continue
        above_k, above_v = _above(across, keys, k, v, past)
        at = None if window is None else _positions(layout, across, keys)
        grad_here, q_here, out_here, lse_here = (x[None, here] for x in (grad, q, out, lse))
        gq, gk, gv = kernel.back(grad_here, q_here, above_k, above_v, out_here, lse_here, at, causal=False)
        grads[0][here] += gq[0]
        into_k, into_v = grads[1:] if not across.from_past or into_past is None else into_past
        into_k[keys] += gk[0]
        into_v[keys] += gv[0]
    return *grads, into_past


def _above(across: Across, keys: slice, k: Tensor, v: Tensor, past: Past | None) -> tuple[Tensor, Tensor]:
    if across.from_past:
        assert past is not None
        k, v = past
    return k[None, keys], v[None, keys]


def _positions(layout: TreeLayout, across: Across, keys: slice) -> tuple[Tensor, Tensor]:
    first = across.key_position + keys.start - across.keys.start
    own = torch.arange(first, first + keys.stop - keys.start, device=layout.positions.device)
    return layout.positions[None, across.queries], own[None]
