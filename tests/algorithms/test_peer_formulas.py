"""TRL's and verl's own formulas, written out in NumPy float64, and this package's functions on the same numbers.

TRL 1.16: `trl/trainer/grpo_trainer.py`. verl: `verl/trainer/ppo/core_algos.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from covey.algorithms import KL_ESTIMATORS, count_step, make_objective, mismatch_correction, policy_loss, token_weights
from covey.config.algorithm import AlgorithmConfig

RNG = np.random.default_rng(11)
SHAPE = (6, 8)
LENGTHS = RNG.integers(2, 9, SHAPE[0])
MASK = (np.arange(SHAPE[1]) < LENGTHS[:, None]).astype(np.float64)
LOGP = -RNG.exponential(1.0, SHAPE) * MASK
OLD = (LOGP + RNG.normal(0, 0.5, SHAPE)) * MASK
ADVANTAGES = RNG.normal(0, 1.5, (SHAPE[0], 1)) * np.ones(SHAPE)
RATIO = np.exp(LOGP - OLD)


def ours(loss_type: str, correction: Any = None, **parameters: float) -> float:
    objective, mask = make_objective(loss_type, **parameters), MASK > 0
    weights = token_weights(mask, count_step(mask), objective.aggregation, dtype=np.float64)
    selected = None
    if objective.loss.select is not None:
        selected = objective.select(LOGP, OLD, ADVANTAGES, mask)
    return float(
        policy_loss(
            LOGP, OLD, ADVANTAGES, mask, weights, objective, correction=correction, selected=selected
        ).loss
    )  # fmt: skip


def masked_mean(values: np.ndarray) -> float:
    return float((values * MASK).sum() / MASK.sum())


def test_luspo_is_trl_s() -> None:
    log_w = ((LOGP - OLD) * MASK).sum(-1, keepdims=True) / np.clip(MASK.sum(-1, keepdims=True), 1, None)
    w = np.exp(log_w)
    per_token = -np.minimum(w * ADVANTAGES, np.clip(w, 1 - 0.1, 1 + 0.15) * ADVANTAGES)
    expected = (per_token * MASK).sum(-1).mean()
    assert ours("luspo", epsilon=0.1, epsilon_high=0.15) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("correction", [None, "truncate", "mask"])
def test_vespo_is_trl_s(correction: str | None) -> None:
    trainer = (OLD + 0.1 * RNG.normal(size=SHAPE)) * MASK
    factor = np.exp((OLD - trainer) * MASK)
    if correction == "truncate":
        factor = np.clip(factor, None, 1.1)
    if correction == "mask":
        factor = np.where(factor > 1.1, 0.0, factor)
    lower = np.log(1e-8)
    log_w = (np.clip(LOGP - OLD, -20, 20) * MASK).sum(-1, keepdims=True)
    if correction:
        with np.errstate(divide="ignore"):
            log_w = log_w + np.clip(np.log(factor), lower, 20.0).sum(-1, keepdims=True)
    log_w = np.clip(log_w, lower, 20.0)
    k, rate = (np.where(ADVANTAGES >= 0, *pair) for pair in ((1.5, 2.5), (2.0, 1.0)))
    phi = np.exp(rate + k * log_w - rate * np.exp(log_w))
    expected = masked_mean(-phi * ADVANTAGES * LOGP)
    parameters = {"k_pos": 1.5, "k_neg": 2.5, "lambda_pos": 2.0, "lambda_neg": 1.0}
    assert ours("vespo", factor if correction else None, **parameters) == pytest.approx(expected, rel=1e-12)


def test_gmpo_is_verl_s_geo_mean() -> None:
    low, high = 0.2, 0.3
    sign, difference = np.sign(ADVANTAGES), LOGP - OLD
    held = sign * np.minimum(sign * difference, sign * np.clip(difference, -low, high))
    lengths = MASK.sum(-1)
    ratio = np.exp((held * MASK).sum(-1) / (lengths + 1e-8))
    advantage = (ADVANTAGES * MASK).sum(-1) / (lengths + 1e-8)
    assert ours("gmpo", epsilon=low, epsilon_high=high) == pytest.approx((-advantage * ratio).mean(), rel=1e-7)


@pytest.mark.parametrize("share", [1e-4, 0.1, 0.5])
def test_kl_cov_is_verl_s(share: float) -> None:
    valid = np.flatnonzero(MASK.reshape(-1) > 0)
    advantages, logp = ADVANTAGES.reshape(-1)[valid], LOGP.reshape(-1)[valid]
    covariance = (advantages - advantages.mean()) * (logp - logp.mean())
    count = max(1, int(len(covariance) * share))
    chosen = valid[np.argsort(-covariance)[:count]]
    losses = (-ADVANTAGES * RATIO).reshape(-1)
    losses[chosen] += 0.7 * np.abs(LOGP - OLD).reshape(-1)[chosen]
    expected = masked_mean(losses.reshape(SHAPE))
    assert ours("kl_cov", kl_cov_ratio=share, ppo_kl_coef=0.7) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("share", [0.02, 1.0])
def test_clip_cov_is_verl_s(share: float) -> None:
    """With a share of 1 all candidates go, and there is nothing to draw; with a small one, as many as verl draws."""
    unclipped, clipped = -ADVANTAGES * RATIO, -ADVANTAGES * np.clip(RATIO, 0.8, 1.2)
    covariance = (ADVANTAGES - masked_mean(ADVANTAGES)) * (LOGP - masked_mean(LOGP))
    covariance[(MASK == 0) | (clipped > unclipped)] = -np.inf
    candidates = (covariance < 5.0) & (covariance > 0.1)
    count = min(max(int(share * MASK.sum()), 1), int(candidates.sum()))
    assert candidates.sum() > 2
    losses = np.maximum(unclipped, clipped)
    objective = make_objective("clip_cov", clip_cov_ratio=share, clip_cov_lb=0.1)
    selected = objective.select(LOGP, OLD, ADVANTAGES, MASK > 0)
    assert selected.sum() == count
    assert not (selected & ~candidates).any()
    expected = masked_mean(losses * ~(candidates if share == 1.0 else selected))
    assert ours("clip_cov", clip_cov_ratio=share, clip_cov_lb=0.1) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize(("floor", "cap"), [(0.5, 1.5), (None, 1.2)])
def test_the_two_sided_sampler_clip_is_trl_s(mode: str, floor: float | None, cap: float) -> None:
    difference = (OLD - LOGP) * MASK
    ratio = np.exp(difference.sum(-1, keepdims=True) if mode.startswith("sequence") else difference)
    if mode.endswith("truncate"):
        expected = np.clip(ratio, floor, cap)
    else:
        least = -np.inf if floor is None else floor
        expected = np.where((ratio < least) | (ratio > cap), 0.0, ratio)
    found = mismatch_correction(OLD, LOGP, MASK > 0, mode, cap, floor)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert floor is None or (found != ratio).any()


@pytest.mark.parametrize("name", ["abs", "k1+", "k3+"])
def test_kl_penalties_are_verl_s(name: str) -> None:
    d = LOGP - OLD
    forward = {"abs": np.abs(d), "k1+": d, "k3+": np.exp(-d) + d - 1}[name]
    np.testing.assert_allclose(KL_ESTIMATORS[name](LOGP, OLD, None), forward, rtol=1e-12, atol=1e-15)


def test_adaptive_entropy_is_trl_s() -> None:
    section = AlgorithmConfig(entropy_coef=0.1, adaptive_entropy={"target": 1.0, "delta": 0.03, "max": 0.2})
    coefficient, last = 0.1, float("inf")
    moved, before = None, None
    for entropy in (0.5, 0.9, 1.0, 1.1, 0.2, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 0.1):
        assert section.entropy_weight(moved, before) == (coefficient if last <= 1.0 else 0.0)
        if entropy <= 1.0:
            coefficient = min(coefficient + 0.03, 0.2)
        else:
            coefficient = max(coefficient - 0.03, 0.0)
        last = before = entropy
        moved = section.next_entropy_coef(moved, entropy)
        assert moved == coefficient
