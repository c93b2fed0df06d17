"""The built-in losses, by `loss_type`, and loading a loss from a file.

`covey.algorithms.loss_function` describes such functions. `w` is the importance ratio (of the token unless
`importance_sampling_level` says otherwise), `A` the advantage, and `sg` stops the gradient.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from array_api_compat import array_namespace

from covey.algorithms.arrays import (
    Array,
    bounded_exp,
    largest,
    lookup,
    magnitude,
    masked,
    masked_difference,
    row_mean,
    row_sum,
    stop_gradient,
    unknown_name,
)
from covey.algorithms.loss_function import Loss, LossInputs, Surrogate, loss
from covey.errors import ConfigError
from covey.functions import load_function, name_of


def token_ratio(logp: Array, old: Array, mask: Array) -> Array:
    """`exp(logp - old)`, `[N, T]`; 1 where masked."""
    return bounded_exp(masked_difference(logp, old, mask))


def sequence_ratio(logp: Array, old: Array, mask: Array) -> Array:
    """The ratio of GSPO (arXiv 2507.18071): `exp(mean of logp - old over the row's tokens)`, `[N, T]`.

    All tokens of a row have the same ratio. A row without active tokens has ratio 1.
    """
    xp = array_namespace(logp)
    return xp.broadcast_to(bounded_exp(row_mean(masked_difference(logp, old, mask), mask)), logp.shape)


def gspo_token_ratio(logp: Array, old: Array, mask: Array) -> Array:
    """`sg(w_sequence) · exp(logp - sg(logp))`, `[N, T]`: the value of `sequence_ratio`, the gradient of the token."""
    logp = masked(logp, mask)
    sequence = stop_gradient(sequence_ratio(logp, old, mask))
    return sequence * array_namespace(logp).exp(logp - stop_gradient(logp))


RATIOS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "gspo_token": gspo_token_ratio,
}
"""`importance_sampling_level` -> `f(logp, old, mask) -> w`, `[N, T]`."""


def _ratio(x: LossInputs, level: str) -> Array:
    return lookup(RATIOS, level, "importance_sampling_level")(x.logp, x.old, x.mask)


def clip_surrogate(
    ratio: Array, advantages: Array, eps_low: float, eps_high: float, delta: float | None = None
) -> Surrogate:
    """`-min(w A, clip(w, 1 - eps_low, 1 + eps_high) A)` (PPO, arXiv 1707.06347).

    With `delta`, `w` is first capped at `delta` (two-sided clip, INTELLECT-2, arXiv 2505.07291).

    It is computed by cases: `min(w, 1 + eps_high) A` for A > 0, `max(w, 1 - eps_low) A` for A < 0. A token exactly on
    a bound is not clipped, in every library; the derivative of min and clip there differs between libraries.
    """
    xp = array_namespace(ratio)
    beyond = xp.zeros_like(ratio, dtype=xp.bool)
    if delta is not None:
        beyond = ratio > delta
        ratio = xp.where(beyond, xp.full_like(ratio, delta), ratio)
    too_low = (advantages < 0) & (ratio < 1 - eps_low)
    too_high = (advantages > 0) & (ratio > 1 + eps_high)
    ratio = xp.where(too_low, xp.full_like(ratio, 1 - eps_low), ratio)
    ratio = xp.where(too_high, xp.full_like(ratio, 1 + eps_high), ratio)
    return Surrogate(-ratio * advantages, too_low, too_high | (beyond & (advantages < 0)))


def clipped(
    name: str, aggregation: str, epsilon: float, above: float = 0.0, *, level: str = "token", by_sequence: bool = False
) -> Loss:
    """The loss `clip_surrogate` of a ratio of this level, with a published clip range: `epsilon` on both sides, or from
    1 to 1 + `above` where that is wider. A wider `epsilon` that is set holds for both sides. A loss `by_sequence` is
    defined by the sequence's ratio and refuses that of the token.
    """

    def function(
        x: LossInputs,
        epsilon: float = epsilon,
        epsilon_high: float | None = None,
        delta: float | None = None,
        importance_sampling_level: str = level,
    ) -> Surrogate:
        """`clip_surrogate`; its source stands below the loss of this name in `covey.algorithms.losses`."""
        if by_sequence and importance_sampling_level == "token":
            raise ConfigError(
                f"importance_sampling_level='token': loss_type {name!r} is defined by its sequence ratio; leave "
                "importance_sampling_level out of algorithm.loss_parameters, or set algorithm.loss_type to 'grpo'"
            )
        upper = max(epsilon, above) if epsilon_high is None else epsilon_high
        _require(0 <= epsilon <= 1, "epsilon", epsilon, "ratios are clipped around 1", "0 to 1")
        _require(upper >= 0, "epsilon_high", upper, "ratios are clipped around 1", "0 or more")
        reason = f"below 1 + epsilon_high = {1 + upper:g} it would replace the clip"
        _require(delta is None or delta > 1 + upper, "delta", delta, reason, "a larger one, or leave it out")
        ratio = _ratio(x, importance_sampling_level)
        return clip_surrogate(ratio, x.advantages, epsilon, upper, delta)._replace(ratio=ratio)

    function.__name__ = function.__qualname__ = name  # where it is found again
    return Loss(function, aggregation, name=name)


grpo = clipped("grpo", "sequence_mean", 0.2)
"""GRPO (arXiv 2402.03300): `clip_surrogate`, mean over a completion's tokens, then over completions."""

bnpo = clipped("bnpo", "token_mean", 0.2)
"""`grpo`, mean over all tokens of the step."""

dr_grpo = clipped("dr_grpo", "constant_length", 0.2)
"""Dr. GRPO (arXiv 2503.20783): `grpo`, the sum over a completion's tokens divided by a constant length."""

dapo = clipped("dapo", "token_mean", 0.2, 0.28)
"""DAPO (arXiv 2503.14476): `bnpo` with the upper clip range 0.28 (clip-higher)."""

gspo = clipped("gspo", "sequence_mean", 3e-4, 4e-4, level="sequence", by_sequence=True)
"""GSPO (arXiv 2507.18071): the ratio of the sequence, `sequence_ratio`. This ratio is a geometric mean and moves far
less than a token's, so the clip ranges are small (section 5.1, 0.0004 above)."""

gspo_token = clipped("gspo_token", "sequence_mean", 3e-4, 4e-4, level="gspo_token", by_sequence=True)
"""GSPO-token (arXiv 2507.18071, section 4.3): `gspo` with the gradient of each token, `gspo_token_ratio`."""

luspo = clipped("luspo", "sequence_sum_mean", 2e-3, 2.5e-3, level="sequence")
"""LUSPO (arXiv 2602.05261): GSPO, with each completion's loss multiplied by its length against a length bias. This
product is the sum over the completion's tokens, which share one loss. Clip ranges: section 5.1, 0.0025 above."""


@loss(aggregation="sequence_mean")
def gmpo(x: LossInputs, epsilon: float = 0.4, epsilon_high: float | None = None) -> Surrogate:
    """GMPO (arXiv 2507.20673): `-A · exp(mean of the row's clipped log-ratios)`.

    A token's log-ratio, in nats, is at most `epsilon_high` for A > 0 and at least `-epsilon` for A < 0; 0.4 is the
    paper's range (e^-0.4, e^0.4). All tokens of a row have the same loss.
    """
    upper = epsilon if epsilon_high is None else epsilon_high
    low, high = (x.advantages < 0) & (x.log_ratio < -epsilon), (x.advantages > 0) & (x.log_ratio > upper)
    log_ratio = x.xp.where(low, x.xp.full_like(x.logp, -epsilon), x.log_ratio)
    log_ratio = x.xp.where(high, x.xp.full_like(x.logp, upper), log_ratio)
    ratio = x.xp.broadcast_to(bounded_exp(row_mean(log_ratio, x.mask)), x.logp.shape)
    return Surrogate(-ratio * x.advantages, low, high, ratio)


@loss(aggregation="token_mean")
def cispo(x: LossInputs, epsilon_max: float = 5.0, importance_sampling_level: str = "token") -> Surrogate:
    """CISPO (arXiv 2506.13585): `-sg(min(w, epsilon_max)) · A · logp`.

    The weight is capped, and every token keeps its gradient.
    """
    _require(epsilon_max > 0, "epsilon_max", epsilon_max, "it caps a ratio", "more than 0")
    ratio = _ratio(x, importance_sampling_level)
    high = ratio > epsilon_max
    weight = stop_gradient(x.xp.where(high, x.xp.full_like(ratio, epsilon_max), ratio))
    return Surrogate(-weight * x.advantages * x.logp, high=high, ratio=ratio)


@loss(aggregation="sequence_mean")
def sapo(
    x: LossInputs,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    importance_sampling_level: str = "token",
) -> Surrogate:
    """SAPO (arXiv 2511.20347): `-f(w) · A` with the soft gate `f(w) = sigmoid(tau (w - 1)) · 4 / tau`.

    `tau` is `sapo_temperature_pos` for A > 0, else `sapo_temperature_neg`. The slope of f at w = 1 is 1.
    """
    pos, neg = sapo_temperature_pos, sapo_temperature_neg
    _require(pos > 0, "sapo_temperature_pos", pos, "the gate divides by it", "more than 0")
    _require(neg > 0, "sapo_temperature_neg", neg, "the gate divides by it", "more than 0")
    xp, ratio = x.xp, _ratio(x, importance_sampling_level)
    tau = xp.where(x.advantages > 0, xp.full_like(ratio, pos), xp.full_like(ratio, neg))
    return Surrogate(-sapo_gate(ratio, tau) * x.advantages, ratio=ratio)


def sapo_gate(ratio: Array, tau: Array) -> Array:
    """`sigmoid(tau (w - 1)) · 4 / tau` of ratios `w`."""
    sigmoid = 0.5 * (1 + array_namespace(ratio).tanh(0.5 * tau * (ratio - 1)))  # 1 / (1 + exp(-x)) may overflow
    return 4 / tau * sigmoid


@loss(aggregation="sequence_sum_mean")
def reinforce(x: LossInputs) -> Surrogate:
    """`-A · logp` of each token; their sum over a row is `-A · log-probability of the sequence`. Nothing is clipped."""
    return Surrogate(-x.advantages * x.logp)


@loss(aggregation="sequence_sum_kept", kl_aggregation="token_mean")
def reinforce_kept(x: LossInputs) -> Surrogate:
    """The loss of usmle-qa.md: `-(log_probs * advantages * mask).sum() / mask.sum() + kl_coef * kl.mean()`."""
    return Surrogate(-x.advantages * x.logp)


@loss(aggregation="token_mean", corrects=True)
def vespo(
    x: LossInputs, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
) -> Surrogate:
    """VESPO (arXiv 2602.10693): `-sg(phi(W)) · A · logp` with `phi(W) = W^k · exp(lambda (1 - W))`, phi(1) = 1.

    `W` is the *product* of the ratios of a sequence's tokens, times the sampler's correction. k and lambda are `k_pos`
    and `lambda_pos` for A >= 0, else `k_neg` and `lambda_neg`. `log W` is at least log(1e-8) and at most 20, lambda at
    least 1e-4.
    """
    phi, weight = vespo_weights(x, k_pos, lambda_pos, k_neg, lambda_neg)
    return Surrogate(-phi * x.advantages * x.logp, ratio=x.xp.broadcast_to(weight, x.logp.shape))


def vespo_weights(
    x: LossInputs, k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float
) -> tuple[Array, Array]:
    """`phi(W)` `[N, T]` and `W` `[N, 1]` of `vespo`, constants."""
    xp = x.xp
    log_w = row_sum(xp.clip(stop_gradient(x.log_ratio), -20.0, 20.0), x.mask)
    if x.correction is not None:
        log_factor = xp.log(xp.clip(x.correction, 1e-8, None))
        log_w = log_w + (log_factor if log_factor.shape[-1] == 1 else row_sum(log_factor, x.mask))
    log_w = xp.clip(log_w, math.log(1e-8), 20.0)  # from below as in VESPO's own code
    good = x.advantages >= 0
    k = xp.where(good, xp.full_like(x.logp, k_pos), xp.full_like(x.logp, k_neg))
    rate = xp.where(good, xp.full_like(x.logp, lambda_pos), xp.full_like(x.logp, lambda_neg))
    rate = xp.clip(rate, 1e-4, None)
    return xp.exp(rate + k * log_w - rate * xp.exp(log_w)), xp.exp(log_w)


def covariances(x: LossInputs) -> Array:
    """`[N, T]` covariance terms of the tokens: `(logp - mean logp) (A - mean A)` (arXiv 2505.22617)."""
    count = x.xp.sum(x.xp.astype(x.mask, x.logp.dtype))
    count = x.xp.where(count > 0, count, x.xp.ones_like(count))
    logp, advantages = masked(x.logp, x.mask), masked(x.advantages, x.mask)
    spread = advantages - x.xp.sum(advantages) / count
    level = x.xp.abs(spread) <= 1e-6 * x.xp.max(x.xp.abs(advantages))  # by rounding alone
    return (logp - x.xp.sum(logp) / count) * masked(spread, ~level)


def _share(x: LossInputs, ratio: float) -> Array:
    """How many tokens a share of the step's is, rounded down and at least one."""
    count = x.xp.floor(ratio * x.xp.sum(x.xp.astype(x.mask, x.logp.dtype)))
    return x.xp.where(count < 1, x.xp.ones_like(count), count)


def _kl_cov_tokens(x: LossInputs, kl_cov_ratio: float) -> Array:
    _require(0 < kl_cov_ratio <= 1, "kl_cov_ratio", kl_cov_ratio, "it is a share of the tokens", "0 < ratio <= 1")
    return largest(covariances(x), x.mask, _share(x, kl_cov_ratio))


@loss(aggregation="token_mean", select=_kl_cov_tokens, always=True)
def kl_cov(x: LossInputs, kl_cov_ratio: float = 2e-4, ppo_kl_coef: float = 1.0) -> Surrogate:
    """KL-Cov (arXiv 2505.22617): `-w A`, plus `ppo_kl_coef · |log w|` on the tokens of the largest covariance.

    These are a share `kl_cov_ratio` of the step's tokens, rounded down, but at least one token. Where covariances are
    equal, as with equal advantages, the step's first tokens are chosen.
    """
    held = x.xp.where(x.selected, magnitude(x.log_ratio), x.xp.zeros_like(x.logp))
    return Surrogate(-x.ratio * x.advantages + ppo_kl_coef * held)


def _clip_cov_tokens(
    x: LossInputs,
    epsilon: float,
    epsilon_high: float | None,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
) -> Array:
    _require(0 < clip_cov_ratio <= 1, "clip_cov_ratio", clip_cov_ratio, "it is a share of the tokens", "0 < ratio <= 1")
    clipped = grpo.function(x, epsilon, epsilon_high)
    covariance = covariances(x)
    free = x.mask & ~clipped.low & ~clipped.high & (covariance > clip_cov_lb) & (covariance < clip_cov_ub)
    # A draw without a state, which a resumed run repeats: the digits of the log-probability after the third.
    digits = 1000 * x.logp
    return largest(digits - x.xp.floor(digits), free, _share(x, clip_cov_ratio))


@loss(aggregation="token_mean", select=_clip_cov_tokens)
def clip_cov(
    x: LossInputs,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> Surrogate:
    """Clip-Cov (arXiv 2505.22617): `bnpo`, without the gradient of some random tokens of high covariance.

    These are a share `clip_cov_ratio` of the step's tokens, at least one. They are drawn from the tokens that are not
    clipped and have a covariance between `clip_cov_lb` and `clip_cov_ub`.
    """
    found = grpo.function(x, epsilon, epsilon_high)
    return found._replace(loss=masked(found.loss, ~x.selected), high=found.high | x.selected)


def _require(fine: bool, name: str, value: object, reason: str, fix: str) -> None:
    if not fine:
        raise ConfigError(f"{name}={value}: {reason}; choose {fix}")


LOSSES: dict[str, Loss] = {
    one.name: one
    for one in (
        *(grpo, bnpo, dapo, dr_grpo, gspo, gspo_token, cispo, sapo, reinforce, reinforce_kept),
        *(luspo, gmpo, vespo, clip_cov, kl_cov),
    )
}
"""`loss_type` -> the loss of that name."""


def find_loss(loss_type: str | Loss | Callable[..., Any]) -> Loss:
    """The loss of a name in `LOSSES`, of `FILE.py:NAME` or `MODULE:NAME` (see `load_function`), or a function itself.

    Raises `ConfigError`: no such name, file or function.
    """
    if callable(loss_type):
        return loss_type if isinstance(loss_type, Loss) else loss()(loss_type)
    if ":" in loss_type:
        return _loss_in_file(loss_type, os.getcwd())
    if loss_type not in LOSSES:
        raise unknown_name(loss_type, [*LOSSES, "FILE.py:NAME"], "loss_type")
    return LOSSES[loss_type]


@lru_cache
def _loss_in_file(name: str, folder: str) -> Loss:
    """Found once for each working directory: the file may change while a run lasts."""
    try:
        return replace(find_loss(load_function(name)), name=name)
    except ConfigError as error:
        raise ConfigError(f"loss_type={name!r}: {error}") from error


def function_name(value: Any) -> Any:
    """The name of a function that is given in place of its name; anything else as it is."""
    return name_of(getattr(value, "function", value)) if callable(value) else value


def loss_name(value: Any) -> Any:
    """The setting `loss_type` as text: a name, or for a function the place where it can be found again.

    Raises `ValueError`: there is no loss of this name; the message lists all names.
    """
    value = function_name(value)
    if isinstance(value, str) and ":" not in value and value not in LOSSES:
        close = difflib.get_close_matches(value, LOSSES, n=1)
        fix = f"did you mean {close[0]!r}?" if close else "set algorithm.loss_type to one of these"
        raise ValueError(f"must be {' | '.join(LOSSES)}, or FILE.py:NAME for a loss of your own; {fix}")
    return value


def default_epsilon(settings: dict[str, Any]) -> float | None:
    """The default `epsilon` of the chosen loss; None for a loss in a file."""
    chosen = LOSSES.get(settings.get("loss_type", "grpo"))
    return None if chosen is None else chosen.parameters.get("epsilon", 0.2)
