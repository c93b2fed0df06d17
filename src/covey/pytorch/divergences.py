"""Divergences between two distributions over the vocabulary, with the gradient by the first one's logits.

Let p be the policy and q the teacher, or the reference, `p = softmax(z)`:

    beta 1     D = sum p (log p - log q)                      dD/dz = p (log p - log q - D)
    beta 0     D = sum q (log q - log p)                      dD/dz = p - q
    between    D = beta KL(q||m) + (1 - beta) KL(p||m)        dD/dz = (1 - beta) p (log p - log m - KL(p||m))
               m = (1 - beta) p + beta q
    weighted   K w,  K = D of beta 1,  w = mean_v p / (q + 1e-8)      dKw/dz = w dK/dz + K p (1 / (q + 1e-8) / V - w)

"Between" is GKD's (arXiv 2306.13649, equation 1): D / beta becomes KL(q||p), and D / (1 - beta) KL(p||q). Over k ids
the same holds of buckets: the ids, and with `tail` one for all others, whose gradient ids outside share by `p_v`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from covey.algorithms.kl import Distillation

_WEIGHT_EPS = 1e-8  # as printed in usmle-qa.md


def compare(logp: Tensor, logq: Tensor, how: Distillation) -> tuple[Tensor, Tensor, Tensor]:
    """`[c]` divergence of `logp` `[c, V]` from `logq` `[c, W]`, its gradient `[c, V]` by the logits of `logp`, and the
    probability `[c]` under `logq` of the ids that are compared. Where W < V, the first W ids are all that there are.
    """
    missing = logp.shape[1] - logq.shape[1]
    logp = torch.log_softmax(logp[:, :-missing], dim=-1) if missing else logp
    if not 0 < how.top_k < logq.shape[1]:
        value, slope = _over_all(logp, logq, how.beta)
        if how.estimator == "exact_weighted":
            p, ratio = logp.exp(), 1.0 / (logq.exp() + _WEIGHT_EPS) / logq.shape[1]
            weight = (p * ratio).sum(1)
            slope = weight[:, None] * slope + value[:, None] * p * (ratio - weight[:, None])
            value = value * weight
        return value, functional.pad(slope, (0, missing)) if missing else slope, torch.ones_like(value)
    ids = (logq if how.beta == 0 else logp).topk(how.top_k, dim=1).indices
    mine, theirs = (_buckets(x.gather(1, ids), how.tail) for x in (logp, logq))
    value, slope = _over_all(mine, theirs, how.beta)
    outside = (logp - mine[:, -1:]).exp() * slope[:, -1:] if how.tail else torch.zeros_like(logp)
    whole = outside.scatter_(1, ids, slope[:, : how.top_k])
    return value, functional.pad(whole, (0, missing)), logq.gather(1, ids).exp().sum(1)


def _over_all(logp: Tensor, logq: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    p = logp.exp()
    if beta == 0:
        q = logq.exp()
        return (q * (logq - logp)).sum(1), p - q
    m = logq if beta == 1 else torch.logaddexp(logp + math.log1p(-beta), logq + math.log(beta))
    value = (p * (logp - m)).sum(1)
    slope = p * (logp - m - value[:, None])
    if beta == 1:
        return value, slope
    return beta * (logq.exp() * (logq - m)).sum(1) + (1 - beta) * value, (1 - beta) * slope


def _buckets(inside: Tensor, tail: bool) -> Tensor:
    together = inside.logsumexp(1, keepdim=True)
    if not tail:
        return inside - together
    return torch.cat([inside, (-torch.expm1(together.clamp(max=-1e-7))).log()], dim=1)  # finite, also without a tail
