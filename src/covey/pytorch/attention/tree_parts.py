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

from collections.abc import Iterator

import torch
from torch import Tensor

from covey.pytorch.attention.tree_layout import Across, Past, Rule, TreeLayout

Gradients = tuple[Tensor, Tensor, Tensor]
Positions = tuple[Tensor, Tensor] | None
_FORWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
_MOST_SCORES = 2**24


def forward(
    layout: TreeLayout, q: Tensor, k: Tensor, v: Tensor, past: Past | None, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Attention of one layer over a pack, without autograd.

    Args:
        layout: of the pack.
        q: `[M, H, D]`.
        k: `[M, Hkv, D]`.
        v: `[M, Hkv, Dv]`.
        past: of `layout.past` tokens, None where that is 0.
        rule: how the layer attends.

    Returns the output `[M, H, Dv]`, and its log-sum-exp `[M, H]` in float32 or wider.
    """
    rule = layout.felt(rule)
    kernel, window = kernel_for(q, v, rule), rule.window
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
    rule: Rule,
    into: Gradients | None = None,
    into_past: Past | None = None,
) -> tuple[Tensor, Tensor, Tensor, Past | None]:
    """The gradients of `forward`'s q, k, v and past from that of its output, `[M, H, Dv]`; no past has None.

    `out` and `lse` are what `forward` returned. The first three are written into `into`, and the past's two are added
    to `into_past` in any dtype; where these are None, they are new tensors.
    """
    rule = layout.felt(rule)
    kernel, window = kernel_for(q, v, rule), rule.window
    grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)) if into is None else into
    if past is not None and into_past is None:
        into_past = torch.zeros_like(past[0]), torch.zeros_like(past[1])
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


def kernel_for(q: Tensor, v: Tensor, rule: Rule) -> Flash | Explicit:
    """The kernel that serves these: attention of queries over some of their keys, and its backward from the merged
    softmax.

    Queries are `[n, Lq, H, D]`, keys `[n, Lk, Hkv, D]`, values `[n, Lk, Hkv, Dv]`, outputs `[n, Lq, H, Dv]`,
    log-sum-exps `[n, Lq, H]` in float32 or wider; `at` are the positions of queries and keys, `[n or 1, L]`.
    """
    simple = rule.window is None and rule.softcap is None and q.shape[-1] == v.shape[-1]
    if simple and q.device.type == "cpu" and _FORWARD is not None and _BACKWARD is not None:
        return Flash(rule)
    return Explicit(rule)


class Flash:
    """PyTorch's for the CPU: blocks of scores at a time, and no positions, which only windows need."""

    def __init__(self, rule: Rule) -> None:
        self._scale = rule.scale

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Positions, *, causal: bool) -> tuple[Tensor, Tensor]:
        assert _FORWARD is not None
        out, lse = _FORWARD(*(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal, scale=self._scale)
        return out.transpose(1, 2), lse.transpose(1, 2)

    def back(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: Positions, *, causal: bool
    ) -> Gradients:
        """The gradients of q, k and v from that of the merged output."""
        assert _BACKWARD is not None
        grad, q, k, v, out, lse = (x.transpose(1, 2) for x in (grad, q, k, v, out, lse))
        gq, gk, gv = _BACKWARD(grad, q, k, v, out, lse.contiguous(), 0.0, causal, scale=self._scale)
        return gq.transpose(1, 2), gk.transpose(1, 2), gv.transpose(1, 2)


class Explicit:
    """Products of matrices, for what Flash does not serve: windows, soft caps, other devices."""

    def __init__(self, rule: Rule) -> None:
        self._scale, self._window, self._softcap = rule

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Positions, *, causal: bool) -> tuple[Tensor, Tensor]:
        out, wide = q.new_empty(*q.shape[:3], v.shape[3]), torch.promote_types(q.dtype, torch.float32)
        lse = q.new_empty(q.shape[:3], dtype=wide)
        keys, values = k.transpose(1, 2).to(wide), v.transpose(1, 2).to(wide)
        for rows, seen, hidden in self._chunks(q, k, at, causal=causal):
            scores, _ = self._scores(_fold(q[:, rows], k).to(wide), keys[:, :, seen], hidden)
            found = scores.logsumexp(-1, keepdim=True)
            # a query that sees nothing has -inf, and exp(-inf + inf) is not 0
            weights = scores.sub_(found.clamp(min=torch.finfo(wide).min)).exp_()
            out[:, rows] = _unfold(weights @ values[:, :, seen], q).to(q.dtype)
            lse[:, rows] = _unfold(found, q)[..., 0]
        return out, lse

    def back(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: Positions, *, causal: bool
    ) -> Gradients:
        """The gradients of q, k and v from that of the merged output.

        A soft cap c = cap tanh(s / cap) has the derivative 1 - (c / cap)^2.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        keys, values = k.transpose(1, 2).to(wide), v.transpose(1, 2).to(wide)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
        delta = (grad.to(wide) * out).sum(-1, keepdim=True)
        for rows, seen, hidden in self._chunks(q, k, at, causal=causal):
            queries, g = _fold(q[:, rows], k).to(wide), _fold(grad[:, rows], k).to(wide)
            scores, slope = self._scores(queries, keys[:, :, seen], hidden)
            weights = scores.sub_(_fold(lse[:, rows, :, None], k)).exp_()
            grad_v[:, :, seen] += weights.mT @ g
            grad_scores = (g @ values[:, :, seen].mT).sub_(_fold(delta[:, rows], k)).mul_(weights).mul_(self._scale)
            if slope is not None:
                grad_scores *= slope
            grad_q[:, rows] = _unfold(grad_scores @ keys[:, :, seen], q).to(q.dtype)
            grad_k[:, :, seen] += grad_scores.mT @ queries
        return grad_q, grad_k.transpose(1, 2).to(k.dtype), grad_v.transpose(1, 2).to(v.dtype)

    def _chunks(
        self, q: Tensor, k: Tensor, at: Positions, *, causal: bool
    ) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Some queries at a time, the keys that any of them sees, and `[n or 1, Lq, Lk]` which of these are hidden."""
        n, length, heads, _ = q.shape
        step = max(1, _MOST_SCORES // (n * heads * k.shape[1]))
        for start in range(0, length, step):
            rows, seen = slice(start, min(start + step, length)), slice(0, k.shape[1])
            hidden = None
            if causal:  # positions are at least as far apart as places: nothing skipped here is within the window
                first = 0 if self._window is None else max(0, start - self._window + 1)
                seen = slice(first, rows.stop)
                places = torch.arange(rows.stop, device=q.device)
                hidden = (places[None, first:] > places[rows, None])[None]
            if self._window is not None:
                assert at is not None
                outside = at[0][:, rows, None] - at[1][:, None, seen] >= self._window
                hidden = outside if hidden is None else hidden | outside
            yield rows, seen, hidden

    def _scores(self, q: Tensor, k: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """`[n, Hkv, rep * Lq, Lk]` with -inf where hidden, and the soft cap's derivative."""
        scores, slope = (q @ k.mT).mul_(self._scale), None
        if self._softcap is not None:
            bent = scores.div_(self._softcap).tanh_()
            slope = 1 - bent.square()
            scores = bent.mul_(self._softcap)
        if hidden is not None:
            scores.view(*scores.shape[:2], -1, *hidden.shape[1:]).masked_fill_(hidden[:, None, None], -torch.inf)
        return scores, slope


def _fold(x: Tensor, k: Tensor) -> Tensor:
    """`[n, L, H, C]` -> `[n, Hkv, rep * L, C]`: the query heads of a key head one after another."""
    n, length, _, width = x.shape
    return x.reshape(n, length, k.shape[2], -1, width).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _unfold(x: Tensor, q: Tensor) -> Tensor:
    """`[n, Hkv, rep * L, C]` -> `[n, L, H, C]`."""
    n, kv_heads, _, width = x.shape
    return x.view(n, kv_heads, q.shape[2] // kv_heads, -1, width).permute(0, 3, 1, 2, 4).flatten(2, 3)
