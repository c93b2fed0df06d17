"""Divergence from the reference policy, or from a teacher, per token.

With `d = logp - ref` of the *sampled* token:

    k1           d                    unbiased on-policy, may be negative; its gradient as a loss is not the KL's
    k2           d² / 2               biased, never negative; its gradient is the KL's, on-policy
    k3           exp(-d) + d - 1      unbiased on-policy, never negative; its gradient is not the KL's
    k1+, k3+     k1, k3               with the gradient of k2 (straight through, as in verl)
    abs          |d|                  a distance, not an estimate of the KL
    k3_unbiased  w · k3               also unbiased off-policy, in value and gradient (DeepSeek-V3.2, arXiv 2512.02556)

The source of k1, k2 and k3 is http://joschu.net/blog/kl-approx.html. `exact` and `exact_weighted` need the whole
distribution over the vocabulary; call them on chunks of tokens, not on all `[N, T, V]` at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from array_api_compat import array_namespace

from covey.algorithms.arrays import LOG_RATIO_LIMIT, Array, bounded_exp, magnitude, stop_gradient


def k1(logp: Array, ref: Array, old: Array | None = None) -> Array:
    """`d = logp - ref`, shapes as given; `old` is not used."""
    return logp - ref


def k2(logp: Array, ref: Array, old: Array | None = None) -> Array:
    """`d² / 2`, shapes as given; `old` is not used."""
    d = logp - ref
    return 0.5 * d * d


def k3(logp: Array, ref: Array, old: Array | None = None) -> Array:
    """`exp(-d) + d - 1`, shapes as given; `old` is not used.

    `expm1` keeps it exact near d = 0. Below d = -20, where `exp(-d)` overflows, it is constant with gradient 0.
    """
    xp = array_namespace(logp)
    d = logp - ref
    d = xp.where(d < -LOG_RATIO_LIMIT, xp.full_like(d, -LOG_RATIO_LIMIT), d)
    return xp.expm1(-d) + d


def absolute(logp: Array, ref: Array, old: Array | None = None) -> Array:
    """`|d|`, shapes as given; its gradient at d = 0 is 0. `old` is not used."""
    return magnitude(logp - ref)


def straight_through(estimate: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """The value of an estimator with the gradient of `k2`, whose on-policy expectation is the gradient of the KL."""

    def combined(logp: Array, ref: Array, old: Array | None = None) -> Array:
        moving = k2(logp, ref)
        return stop_gradient(estimate(logp, ref)) + (moving - stop_gradient(moving))

    return combined


def k3_unbiased(logp: Array, ref: Array, old: Array | None = None) -> Array:
    """`w · k3` with the differentiable importance ratio `w = exp(logp - old)`, shapes as given.

    Under the policy that sampled (`old`) its expectation is `KL(policy || reference)`, and the expectation of its
    gradient is the gradient of that KL. Without `old` (on-policy) the ratio is 1, and its gradient is kept.
    """
    return bounded_exp(logp - (stop_gradient(logp) if old is None else old)) * k3(logp, ref)


KL_ESTIMATORS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_unbiased": k3_unbiased,
    "abs": absolute,
    "k1+": straight_through(k1),
    "k3+": straight_through(k3),
}
"""`kl_estimator` -> `f(logp, ref, old)` on the log-probabilities of the sampled tokens."""

OFF_POLICY_KL = frozenset({"k3_unbiased"})
"""Importance-weighted estimators, which are also correct if another policy sampled."""


def exact_kl(policy: Array, reference: Array) -> Array:
    """`sum_v p_v (log p_v - log q_v)`: the KL itself.

    Args:
        policy: `[..., V]` normalised log-probabilities of the policy; -inf where a token has no probability.
        reference: `[..., V]` the same of the reference.

    Returns `[...]`. It is infinite where a token is possible under the policy and impossible under the reference.
    """
    xp = array_namespace(policy)
    possible = policy > -float("inf")
    # Masked before the subtraction: where both are -inf the difference would be NaN.
    zero = xp.zeros_like(policy)
    difference = xp.where(possible, policy, zero) - xp.where(possible, reference, zero)
    return xp.sum(xp.exp(policy) * difference, axis=-1)


def exact_weighted_kl(policy: Array, reference: Array) -> Array:
    """`exact_kl · mean_v(p_v / (q_v + 1e-8))`, the formula of usmle-qa.md. It is biased, despite its name there.

    The mean over the vocabulary is not an importance weight, because its expectation is not 1. It exists to reproduce
    that recipe. Arguments and result are as in `exact_kl`.
    """
    xp = array_namespace(policy)
    weight = xp.mean(xp.exp(policy) / (xp.exp(reference) + 1e-8), axis=-1)
    return exact_kl(policy, reference) * weight


VOCABULARY_KL: dict[str, Callable[[Array, Array], Array]] = {"exact": exact_kl, "exact_weighted": exact_weighted_kl}
"""`kl_estimator` -> `f(policy, reference)` on log-probabilities `[..., V]` over the vocabulary."""


Use = Literal["sum", "reweigh", "gate", "position", "loss"]
"""What a teacher is used for, see `covey.algorithms.teaching`; loss = a `Distillation`."""


@dataclass(frozen=True, slots=True)
class Distillation:
    """A teacher's term of the loss: `task_coef` times the surrogate, plus `coef` times the policy's divergence from the
    teacher, without a row's first `skip` sampled tokens. The estimators of `VOCABULARY_KL` are over the vocabulary
    (`covey.pytorch.divergences`); those of `KL_ESTIMATORS` look at the sampled token. With `ratio_cap` a token's
    divergence is multiplied by its ratio to the policy that sampled, at most this, a constant (SDPO, arXiv 2601.20802).
    """

    coef: float = 1.0
    task_coef: float = 1.0
    estimator: str = "exact"
    beta: float = 1.0
    top_k: int = 0
    tail: bool = True
    skip: int = 0
    ratio_cap: float | None = None


def compute_unbiased_kl(current_logits: Array, reference_logits: Array) -> Array:
    """The function of this name in usmle-qa.md, with the same results. It is biased, despite its name.

    It is `exact_weighted` with 1e-8 inside the logarithms too. For an estimate that is unbiased off-policy use
    `k3_unbiased`; for the divergence without noise, `exact_kl`.

    Args:
        current_logits: `[..., V]` logits of the policy, not normalised.
        reference_logits: `[..., V]` logits of the reference.

    Returns `[...]`.
    """
    xp = array_namespace(current_logits)
    p = xp.exp(log_softmax(current_logits))
    q = xp.exp(log_softmax(reference_logits))
    divergence = xp.sum(p * (xp.log(p + 1e-8) - xp.log(q + 1e-8)), axis=-1)
    return divergence * xp.mean(p / (q + 1e-8), axis=-1)


def log_softmax(logits: Array) -> Array:
    """Normalised log-probabilities over the last axis; -inf logits stay -inf."""
    xp = array_namespace(logits)
    shifted = logits - xp.max(logits, axis=-1, keepdims=True)
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))
