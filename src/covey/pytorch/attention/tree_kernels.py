"""Attention of queries over some of their keys, and its backward from the merged softmax.

Shapes: queries `[n, Lq, H, D]`, keys `[n, Lk, Hkv, D]`, values `[n, Lk, Hkv, Dv]`, outputs `[n, Lq, H, Dv]`,
log-sum-exps `[n, Lq, H]` in float32 or wider. Two kernels with the same methods:

    Flash       PyTorch's for the CPU: blocks of scores at a time
    Explicit    products of matrices, for what Flash does not serve: windows, soft caps, other devices

Limits: no attention sinks, no position biases.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_FORWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
_MOST_SCORES = 2**24


def kernel_for(q: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None) -> Flash | Explicit:
    """The kernel that serves these."""
    simple = window is None and softcap is None and q.shape[-1] == v.shape[-1]
    if simple and q.device.type == "cpu" and _FORWARD is not None and _BACKWARD is not None:
        return Flash(scale)
    return Explicit(scale, window, softcap)


class Flash:
    """See the module docstring.

    Args:
        scale: factor on the scores.
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, at: tuple[Tensor, Tensor] | None, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Outputs and log-sum-exps; `at`: positions, which only windows need."""
        assert _FORWARD is not None
        out, lse = _FORWARD(*(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal, scale=self._scale)
        return out.transpose(1, 2), lse.transpose(1, 2)

    def back(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        at: tuple[Tensor, Tensor] | None,
        *,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v from that of the merged output."""
        assert _BACKWARD is not None
        grad, q, k, v, out, lse = (x.transpose(1, 2) for x in (grad, q, k, v, out, lse))
        gq, gk, gv = _BACKWARD(grad, q, k, v, out, lse.contiguous(), 0.0, causal, scale=self._scale)
        return gq.transpose(1, 2), gk.transpose(1, 2), gv.transpose(1, 2)


class Explicit:
    """See the module docstring.

    Args:
        scale: factor on the scores.
        window: a query sees keys at most `window - 1` positions back; None = all.
        softcap: scores become `softcap * tanh(scores / softcap)`; None = off.
    """

    def __init__(self, scale: float, window: int | None, softcap: float | None) -> None:
        self._scale, self._window, self._softcap = scale, window, softcap

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, at: tuple[Tensor, Tensor] | None, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Outputs and log-sum-exps; `at`: positions `[n or 1, Lq]` and `[n or 1, Lk]`, which only windows need."""
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
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        at: tuple[Tensor, Tensor] | None,
        *,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
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
        self, q: Tensor, k: Tensor, at: tuple[Tensor, Tensor] | None, *, causal: bool
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
