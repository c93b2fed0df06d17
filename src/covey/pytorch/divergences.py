"""Divergences between two distributions over the vocabulary, with the gradient by the first one's logits.

Let p be the policy and q the teacher, `p = softmax(z)`:

    beta 1     D = sum p (log p - log q)                      dD/dz = p (log p - log q - D)
    beta 0     D = sum q (log q - log p)                      dD/dz = p - q
    between    D = beta KL(q||m) + (1 - beta) KL(p||m)        dD/dz = (1 - beta) p (log p - log m - KL(p||m))
               m = (1 - beta) p + beta q

Over k ids the same holds of buckets: the ids, and with `tail` one for all others. An id outside has the part
`p_v / p_tail` of that bucket's gradient; without a tail it has none.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from covey.algorithms.kl import Distillation

_FULL = -1e-7  # log of the most that k ids hold together, so that the tail's logarithm is finite


def compare(logp: Tensor, logq: Tensor, how: Distillation) -> tuple[Tensor, Tensor, Tensor]:
    """`[c]` divergence of `logp` `[c, V]` from `logq` `[c, W]`, its gradient `[c, V]` by the logits of `logp`, and the
    teacher's probability `[c]` of the ids that are compared. Where W < V, the first W ids are all that there are.
    """
    vocabulary, common = logp.shape[1], logq.shape[1]
    if common < vocabulary:
        logp = torch.log_softmax(logp[:, :common], dim=-1)
    if 0 < how.top_k < common:
        value, slope, mass = _over_buckets(logp, logq, how)
    else:
        value, slope = _over_all(logp, logq, how.beta)
        mass = torch.ones_like(value)
    return value, functional.pad(slope, (0, vocabulary - common)), mass


def _over_all(logp: Tensor, logq: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    p, q = logp.exp(), logq.exp()
    if beta == 0:
        return (q * (logq - logp)).sum(1), p - q
    if beta == 1:
        from_m = logp - logq
        value = (p * from_m).sum(1)
        return value, p * (from_m - value[:, None])
    m = torch.logaddexp(logp + math.log1p(-beta), logq + math.log(beta))
    from_m = logp - m
    mine = (p * from_m).sum(1)
    value = beta * (q * (logq - m)).sum(1) + (1 - beta) * mine
    return value, (1 - beta) * p * (from_m - mine[:, None])


def _over_buckets(logp: Tensor, logq: Tensor, how: Distillation) -> tuple[Tensor, Tensor, Tensor]:
    ids = (logq if how.beta == 0 else logp).topk(how.top_k, dim=1).indices
    mine, theirs = (_buckets(x.gather(1, ids), how.tail) for x in (logp, logq))
    value, of_bucket = _over_all(mine, theirs, how.beta)
    if how.tail:
        slope = (logp - mine[:, -1:]).exp() * of_bucket[:, -1:]
    else:
        slope = torch.zeros_like(logp)
    return value, slope.scatter_(1, ids, of_bucket[:, : how.top_k]), logq.gather(1, ids).exp().sum(1)


def _buckets(inside: Tensor, tail: bool) -> Tensor:
    together = inside.logsumexp(1, keepdim=True)
    if not tail:
        return inside - together
    return torch.cat([inside, (-torch.expm1(together.clamp(max=_FULL))).log()], dim=1)
