"""The objective of a run, and the loss of one micro-batch.

    surrogate  = the loss of each token (`covey.algorithms.losses`): -advantage, weighted by a limited ratio
    loss       = sum over tokens of weight · (surrogate · correction + beta · KL - entropy_coef · entropy)

A teacher (`Distillation`) adds `coef` · its divergence, and puts `task_coef` before the surrogate.

The weights (`token_weights`) hold the denominators of the whole optimiser step: losses, gradients and metrics
of micro-batches add up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from covey.algorithms.arrays import Array, as_mask, bounded_exp, lookup, masked, stop_gradient, unknown_name
from covey.algorithms.kl import KL_ESTIMATORS, OFF_POLICY_KL, VOCABULARY_KL, Distillation
from covey.algorithms.loss_function import Loss, LossInputs, try_out
from covey.algorithms.losses import RATIOS, find_loss, grpo
from covey.errors import ConfigError
from covey.functions import number_problem


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective of one run: hashable, so that it can be a static argument of a compiled function.

    Attributes:
        loss: the loss function, with its average.
        parameters: the loss's own parameters that differ from their defaults, by name.
        beta: weight of the KL to the reference; 0 = no KL term.
        kl_estimator: name in `KL_ESTIMATORS` or `VOCABULARY_KL`.
        entropy_coef: weight of the entropy bonus; 0 = none.
        adaptive_entropy: each step brings its own weight instead.
        kl_ratio: name in `RATIOS` of a ratio that multiplies the KL estimate, as in TRL; None = none.
        entropy_by_token: the bonus is the mean over the tokens with a surrogate, whatever the loss's average.
        teacher: the teacher's term; None = there is none.
    """

    loss: Loss = grpo
    parameters: tuple[tuple[str, Any], ...] = ()
    beta: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    adaptive_entropy: bool = False
    kl_ratio: str | None = None
    entropy_by_token: bool = False
    teacher: Distillation | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an unknown name, or a number out of range."""
        lookup({**KL_ESTIMATORS, **VOCABULARY_KL}, self.kl_estimator, "kl_estimator")
        lookup(RATIOS, self.kl_ratio or "token", "kl_ratio")
        if self.distils_vocabulary and self.vocabulary_kl is not None:
            said = (
                f"kl_estimator={self.kl_estimator!r} with a teacher's loss over the vocabulary: one of them is served"
            )
            raise ConfigError(f"{said}; set kl_estimator to k3, beta to 0, or teacher.estimator to k3_unbiased")
        if not self.beta >= 0:
            raise ConfigError(f"beta={self.beta}: it would reward leaving the reference; choose 0 or more")

    @property
    def estimates_kl(self) -> bool:
        """True when the KL is estimated from log-probabilities of the sampled tokens under the reference."""
        return self.beta > 0 and self.kl_estimator in KL_ESTIMATORS

    @property
    def vocabulary_kl(self) -> str | None:
        """The estimator of a KL over the whole vocabulary, else None."""
        return self.kl_estimator if self.beta > 0 and self.kl_estimator in VOCABULARY_KL else None

    @property
    def distils_vocabulary(self) -> bool:
        """True when the teacher's term is over the vocabulary."""
        return self.teacher is not None and self.teacher.estimator == "exact"

    @property
    def has_entropy_bonus(self) -> bool:
        """True when the loss has an entropy term."""
        return self.adaptive_entropy or self.entropy_coef != 0

    @property
    def differentiates_entropy(self) -> bool:
        """True when the entropy of the policy has a gradient in the loss."""
        return self.has_entropy_bonus or self.loss.entropy

    @property
    def needs_every_row(self) -> bool:
        """True when tokens of advantage 0 have a gradient too."""
        return self.beta != 0 or self.has_entropy_bonus or self.loss.always

    def shares_credit(self, slope: Any, array: Any) -> bool:
        """True if a token's advantage has an effect on other tokens of its row, as with one ratio for the row.

        `slope` differentiates a function of an array, as `jax.grad` does; `array` converts a NumPy array for it.
        """
        alone, nothing = (self._moved([first, 0.0, 0.0], slope, array) for first in (1.0, 0.0))
        return bool((alone != nothing)[0, 1:].any())

    def require_gradient(self, slope: Any, array: Any) -> None:
        """Raise `ConfigError` where the loss moves no token; arguments as of `shares_credit`."""
        if not self.loss.entropy and not (self._moved([1.0, -1.0, 0.5], slope, array) != 0).any():
            raise self.loss.fault("has no gradient", "compute it from x.logp, x.ratio or x.log_ratio without detach")

    def _moved(self, earned: list[float], slope: Any, array: Any) -> Array:
        """`[1, 3]` the derivative by each of three tokens' log-probabilities, with these advantages."""
        logp, mask = np.log([[0.5, 0.3, 0.2]]), np.ones((1, 3), np.bool_)

        def total(x: Array) -> Array:
            known = (array(each) for each in (logp, np.array([earned]), mask, -logp, logp, np.ones((1, 1)), ~mask))
            return array_namespace(x).sum(self.loss.surrogate(LossInputs(x, *known), dict(self.parameters)).loss)

        return slope(total)(array(logp))

    def estimate_kl(self, logp: Array, ref: Array, old: Array, mask: Array) -> Array:
        """`[N, T]` the KL of each sampled token, estimated from its log-probabilities; 0 where masked."""
        logp, ref, old = (masked(x, mask) for x in (logp, ref, old))
        estimate = KL_ESTIMATORS[self.kl_estimator](logp, ref, old)
        return estimate if self.kl_ratio is None else estimate * RATIOS[self.kl_ratio](logp, old, mask)

    def select(self, logp: Array, old: Array, advantages: Array, mask: Array, entropy: Array | None = None) -> Array:
        """The choice of the loss's `select` in the whole step, `[N, T]` booleans; arguments as in `policy_loss`."""
        mask = as_mask(mask)
        logp, old, advantages = (masked(x, mask) for x in (stop_gradient(logp), old, advantages))
        entropy = None if entropy is None else masked(stop_gradient(entropy), mask)
        x = LossInputs(logp, old, advantages, mask, entropy, old)
        return self.loss.choose(x, dict(self.parameters))


def make_objective(loss_type: str | Loss | Callable[..., Any] = "grpo", **settings: Any) -> Objective:
    """The objective of a loss, with its parameters and those of the KL and entropy terms.

    Args:
        loss_type: see `find_loss`.
        **settings: parameters of the loss, fields of `Objective`, or `aggregation` and `kl_aggregation` in place of
            the loss's own. None = the default.

    Raises `ConfigError`: a name is unknown (the message suggests the nearest one), a number is out of range, or the
    loss fails on a small trial step.
    """
    loss = find_loss(loss_type)
    averages = ("aggregation", "kl_aggregation")
    terms = ("beta", "kl_estimator", "entropy_coef", "adaptive_entropy", "teacher", "kl_ratio", "entropy_by_token")
    given = {name: value for name, value in settings.items() if value is not None}
    for name in given:
        if name not in (*loss.parameters, *averages, *terms):
            raise unknown_name(name, [*loss.parameters, *averages, *terms[5:]], "loss_parameters")  # the rest: settings
    if problem := number_problem(loss.function, given):
        raise ConfigError(problem)
    own = tuple(sorted((name, given[name]) for name in loss.parameters if name in given))
    missing = [name for name, default in loss.parameters.items() if default is inspect.Parameter.empty]
    if absent := [name for name in missing if name not in given]:
        raise loss.fault(f"lacks its parameter {absent[0]!r}", f"set algorithm.loss_parameters.{absent[0]}")
    if changed := {name: given[name] for name in averages if name in given}:
        loss = replace(loss, **changed)
    try_out(loss, own)
    return Objective(loss, own, **{name: given[name] for name in terms if name in given})


class LossTerms(NamedTuple):
    """The differentiable loss, and metrics (constants) that `add_metrics` adds up over micro-batches.

    All metrics are scalars. `loss` and `policy_loss` are shares of the step's values. Sums over active tokens:
    `ratio_sum`, `kl_sum` and `entropy_sum` (if known), and the numbers of tokens whose ratio is limited from below
    (`clip_low_sum`), from above (`clip_high_sum`) or either (`clip_region_sum`). Also `active_tokens`, `ratio_min`,
    `ratio_max`, and with `entropy_by_token` the mean entropy of the bonus, `bonus_entropy`.
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
    sampler: Array | None = None,
    selected: Array | None = None,
    entropy_coef: Array | float | None = None,
    entropy_weights: Array | None = None,
    teacher: Array | None = None,
) -> LossTerms:
    """Loss and metrics of some rows of an optimiser step.

    All arrays are of one library. Values at masked positions are never used, not even NaN or infinity.

    Args:
        logp: `[N, T]` under the current policy; the loss is differentiated through it.
        old: `[N, T]` under the policy that sampled; with a `correction`, the trainer's own.
        advantages: `[N]` or `[N, T]`.
        mask: `[N, T]` active tokens.
        weights: `[N, T]` from `token_weights`.
        objective: what to minimise.
        ref: `[N, T]` under the reference policy, for the estimators in `KL_ESTIMATORS`.
        kl: `[N, T]` KL over the vocabulary, differentiable, for `exact` and `exact_weighted`.
        entropy: `[N, T]` of the policy at each token, differentiable where the objective `differentiates_entropy`.
        correction: `[N, T]` or `[N, 1]` from `mismatch_correction`. It multiplies the surrogate, and the KL of an
            estimator in `OFF_POLICY_KL`.
        kl_weights: `[N, T]` weights of the KL, if there is a `kl_aggregation`. The KL then covers all tokens with a
            weight, masked or not; metrics cover the active tokens.
        sampler: `[N, T]` log-probabilities that the sampler recorded; None = `old`.
        selected: `[N, T]` these rows of the choice of `Objective.select`.
        entropy_coef: weight of the entropy bonus in this step; None = the objective's.
        entropy_weights: `[N, T]` of the entropy, for `entropy_by_token`.
        teacher: `[N, T]` log-probabilities under the teacher, NaN where there is none. For its term, which has the KL's
            mask and weights, `kl` is the divergence over the vocabulary.

    Raises `ConfigError`: `ref`, `kl`, `entropy` or `selected` is needed and missing; or the loss returns another
    shape than `[N, T]`.
    """
    xp = array_namespace(logp)
    mask = as_mask(mask)
    kl_mask, kl_weights = (mask, weights) if kl_weights is None else (kl_weights > 0, kl_weights)
    distance, taught = None, objective.teacher
    if teacher is not None and taught is not None:
        there = kl_mask & xp.isfinite(teacher)
        if taught.estimator != "exact":
            distance = KL_ESTIMATORS[taught.estimator](*(masked(x, there) for x in (logp, teacher, old)))
            distance = masked(distance if correction is None else distance * masked(correction, there), there)
        elif kl is not None:
            distance, kl = masked(kl, there), None
        elif bool(xp.any(there)):
            raise ConfigError("a teacher's loss over the vocabulary needs its distributions, which were not given")
        if distance is not None and taught.ratio_cap is not None:
            ratio = bounded_exp(masked(stop_gradient(logp) - old, there))
            distance = distance * xp.minimum(ratio, xp.full_like(ratio, taught.ratio_cap))
    divergence = None if kl is None else masked(kl, kl_mask)
    if objective.kl_estimator in KL_ESTIMATORS:
        divergence = None if ref is None else objective.estimate_kl(logp, ref, old, kl_mask)
    logp, old, advantages, weights = (masked(x, mask) for x in (logp, old, advantages, weights))
    weights = xp.astype(weights, logp.dtype)
    if objective.loss.select is not None and selected is None:
        raise ConfigError(
            f"loss {objective.loss.name!r}: it selects tokens of the whole step, which were not given; pass selected"
        )
    entropy = None if entropy is None else masked(entropy, mask)
    sampler = old if sampler is None else masked(sampler, mask)
    x = LossInputs(logp, old, advantages, mask, entropy, sampler, correction, selected)
    surrogate = objective.loss.surrogate(x, dict(objective.parameters))
    per_token = masked(surrogate.loss, mask)
    if correction is not None and not objective.loss.corrects:
        per_token = per_token * masked(correction, mask)
    policy = xp.sum(weights * per_token)
    sums = {
        "clip_low_sum": surrogate.low,
        "clip_high_sum": surrogate.high,
        "clip_region_sum": surrogate.low | surrogate.high,
        "ratio_sum": surrogate.ratio,
    }
    loss = policy if taught is None else taught.task_coef * policy
    if distance is not None and taught is not None:
        loss = loss + taught.coef * xp.sum(xp.astype(masked(kl_weights, kl_mask), logp.dtype) * distance)
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
    coefficient = objective.entropy_coef if entropy_coef is None else entropy_coef
    if entropy is not None:
        sums["entropy_sum"] = entropy
        if objective.has_entropy_bonus:
            mean = xp.sum((weights if entropy_weights is None else xp.astype(entropy_weights, logp.dtype)) * entropy)
            loss = loss - coefficient * mean
    elif objective.has_entropy_bonus:
        raise ConfigError(
            f"entropy_coef={coefficient}: the bonus needs the entropy of each token, which was "
            f"not given; pass entropy, or set entropy_coef to 0"
        )
    metrics = {name: xp.sum(masked(xp.astype(x, logp.dtype), mask)) for name, x in sums.items()}
    metrics["active_tokens"] = xp.sum(xp.astype(mask, logp.dtype))
    metrics["ratio_min"] = xp.min(masked(surrogate.ratio, mask, float("inf")))
    metrics["ratio_max"] = xp.max(masked(surrogate.ratio, mask, -float("inf")))
    metrics["policy_loss"], metrics["loss"] = policy, loss
    if entropy_weights is not None:
        metrics["bonus_entropy"] = mean
    return LossTerms(loss, {name: stop_gradient(value) for name, value in metrics.items()})


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

    Without an active token, means are 0 and ratios are 1.
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
