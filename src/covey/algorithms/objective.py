"""The loss of one micro-batch, on one page.

    ratio      = how much more likely each token has become since it was sampled
    surrogate  = -advantage, weighted by a limited ratio
    loss       = sum over tokens of weight · (surrogate · correction + beta · KL - entropy_coef · entropy)

The weights (`token_weights`) hold the denominators of the whole optimiser step: losses, gradients and metrics
of micro-batches add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from array_api_compat import array_namespace

from covey.algorithms.arrays import Array, as_mask, lookup, masked, stop_gradient
from covey.algorithms.kl import KL_ESTIMATORS, OFF_POLICY_KL, VOCABULARY_KL
from covey.algorithms.presets import SURROGATES, Objective
from covey.algorithms.surrogates import RATIOS
from covey.errors import ConfigError


class LossTerms(NamedTuple):
    """The differentiable loss, and metrics (constants) that `add_metrics` adds up over micro-batches.

    Metrics, all scalars: `loss`, `policy_loss` (shares of the step's); sums over active tokens of
    `ratio_sum`, `kl_sum`, `entropy_sum` (the last two where known), `clip_low_sum`, `clip_high_sum`,
    `clip_region_sum` (tokens whose ratio the surrogate limits from below, from above, either);
    `active_tokens`; `ratio_min`, `ratio_max`.
    """

    loss: Array
    metrics: dict[str, Array]


def policy_loss(
    logp: Array,
    old: Array,
    advantages: Array,
    mask: Array,
    weights: Array,
    objective: Objective,
    *,
    ref: Array | None = None,
    kl: Array | None = None,
    entropy: Array | None = None,
    correction: Array | None = None,
    kl_weights: Array | None = None,
) -> LossTerms:
    """Loss and metrics of some rows of an optimiser step.

    All arrays are of one library. What a masked position holds, NaN and infinities included, is never used.

    Args:
        logp: `[N, T]` under the current policy; the loss is differentiated through it.
        old: `[N, T]` under the policy that sampled.
        advantages: `[N]` or `[N, T]`.
        mask: `[N, T]` active tokens.
        weights: `[N, T]` from `token_weights`.
        objective: what to minimise.
        ref: `[N, T]` under the reference policy, for the estimators in `KL_ESTIMATORS`.
        kl: `[N, T]` KL over the vocabulary, differentiable, for `exact` and `exact_weighted`.
        entropy: `[N, T]` of the policy at each token, differentiable where `entropy_coef` is not 0.
        correction: `[N, T]` or `[N, 1]` from `mismatch_correction`; multiplies the surrogate, and the KL where its
            estimator weighs tokens by their ratio (`OFF_POLICY_KL`): `old` is then not the policy that sampled.
        kl_weights: `[N, T]` of the KL where `kl_aggregation` gives it weights of its own: its tokens are those with a
            weight, whatever the mask. Metrics are of the active tokens all the same.

    Raises:
        ConfigError: the objective needs `ref`, `kl` or `entropy`, and it was not given.
    """
    xp = array_namespace(logp)
    mask = as_mask(mask)
    kl_mask, kl_weights = (mask, weights) if kl_weights is None else (kl_weights > 0, kl_weights)
    divergence = _divergence(masked(logp, kl_mask), masked(old, kl_mask), kl_mask, objective, ref, kl)
    logp, old, advantages, weights = (masked(x, mask) for x in (logp, old, advantages, weights))
    weights = xp.astype(weights, logp.dtype)

    ratio = RATIOS[objective.importance_sampling_level](logp, old, mask)
    surrogate = SURROGATES[objective.surrogate](ratio, logp, advantages, objective)
    per_token = surrogate.loss if correction is None else surrogate.loss * masked(correction, mask)
    policy = xp.sum(weights * per_token)
    sums = {
        "clip_low_sum": surrogate.low,
        "clip_high_sum": surrogate.high,
        "clip_region_sum": surrogate.low | surrogate.high,
        "ratio_sum": ratio,
    }

    loss = policy
    if divergence is not None:
        sums["kl_sum"] = divergence
        if correction is not None and objective.kl_estimator in OFF_POLICY_KL:
            divergence = divergence * masked(correction, kl_mask)
        if objective.beta != 0:
            loss = loss + objective.beta * xp.sum(xp.astype(masked(kl_weights, kl_mask), logp.dtype) * divergence)
    elif objective.beta != 0:
        missing = "kl" if objective.kl_estimator in VOCABULARY_KL else "ref"
        raise ConfigError(
            f"beta={objective.beta}: kl_estimator={objective.kl_estimator!r} needs {missing!r}, which was "
            f"not given; pass it, or set beta to 0"
        )
    if entropy is not None:
        entropy = masked(entropy, mask)
        sums["entropy_sum"] = entropy
        if objective.entropy_coef != 0:
            loss = loss - objective.entropy_coef * xp.sum(weights * entropy)
    elif objective.entropy_coef != 0:
        raise ConfigError(
            f"entropy_coef={objective.entropy_coef}: the bonus needs the entropy of each token, which was "
            f"not given; pass entropy, or set entropy_coef to 0"
        )

    metrics = {name: xp.sum(masked(xp.astype(x, logp.dtype), mask)) for name, x in sums.items()}
    metrics["active_tokens"] = xp.sum(xp.astype(mask, logp.dtype))
    metrics["ratio_min"] = xp.min(masked(ratio, mask, float("inf")))
    metrics["ratio_max"] = xp.max(masked(ratio, mask, -float("inf")))
    metrics["policy_loss"], metrics["loss"] = policy, loss
    return LossTerms(loss, {name: stop_gradient(value) for name, value in metrics.items()})


def _divergence(
    logp: Array, old: Array, mask: Array, objective: Objective, ref: Array | None, kl: Array | None
) -> Array | None:
    """Per-token KL `[N, T]` from masked `logp` and `old`, or None where what it needs was not given."""
    if objective.kl_estimator in VOCABULARY_KL:
        return None if kl is None else masked(kl, mask)
    if ref is None:
        return None
    return lookup(KL_ESTIMATORS, objective.kl_estimator, "kl_estimator")(logp, masked(ref, mask), old)


def add_metrics(parts: Iterable[Mapping[str, Array]]) -> dict[str, Array]:
    """Metrics of several micro-batches as those of their union: sums add, extremes are compared."""
    total: dict[str, Array] = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value
            elif name in ("ratio_min", "ratio_max"):
                xp = array_namespace(value)
                total[name] = (xp.minimum if name == "ratio_min" else xp.maximum)(total[name], value)
            else:
                total[name] = total[name] + value
    return total


def mean_metrics(total: Mapping[str, Array]) -> dict[str, float]:
    """The metrics of a step as numbers: each `x_sum` becomes its mean over active tokens, under the name `x`.

    Without an active token means are 0, and ratios 1: nothing has moved.
    """
    tokens = float(total["active_tokens"])
    means = {}
    for name, value in total.items():
        if name.endswith("_sum"):
            means[name.removesuffix("_sum")] = float(value) / max(tokens, 1.0)
        else:
            means[name] = float(value)
    if tokens == 0:
        means |= dict.fromkeys(("ratio", "ratio_min", "ratio_max"), 1.0)
    return means
