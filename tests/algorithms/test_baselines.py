"""REINFORCE++, ReMax, OPO, GPG and pass@k by hand, in all libraries, and as the peers have them in NumPy float64.

TRL 1.16: `trl/trainer/grpo_trainer.py`. verl: `verl/trainer/ppo/core_algos.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from covey.algorithms import (
    ADVANTAGE_ESTIMATORS,
    KL_ESTIMATORS,
    Outcomes,
    count_step,
    find_estimator,
    make_objective,
    mismatch_correction,
    policy_loss,
    token_weights,
)
from covey.config.algorithm import AlgorithmConfig
from covey.errors import ConfigError
from covey.types import Group
from fakes import fake_prompt

NAN = float("nan")


def of_lengths(*lengths: int) -> Any:
    return np.arange(max(lengths))[None, :] < np.array(lengths)[:, None]


def by(name: str, rewards: Any, groups: Any, mask: Any = None, parameters: Any = None, **given: Any) -> Any:
    step = Outcomes(np.array(rewards, np.float64), np.array(groups), mask=mask, **given)
    return np.asarray(find_estimator(name, parameters)(step))


def check(found: Any, expected: Any, atol: float = 1e-7) -> None:
    np.testing.assert_allclose(found, expected, atol=atol)


def means_of(rewards: Any, groups: Any) -> Any:
    return np.array([rewards[groups == g].mean() for g in groups.tolist()])


def test_reinforce_plus_plus() -> None:
    s, mask = 3**0.5, of_lengths(2, 1)
    check(by("reinforce_plus_plus", [0.0, 3.0], [0, 1], mask), [[-1 / s, -1 / s], [2 / s, 0]], 1e-8)
    # gamma 1/2: returns 1, 2 and 3: mean 2, variance 1
    check(by("reinforce_plus_plus", [2.0, 3.0], [0, 1], mask, {"gamma": 0.5}), [[-1, 0], [1, 0]])
    # equal rewards say nothing, one that could not be scored stands aside
    assert by("reinforce_plus_plus", [0.1, 0.1, 0.1], [0, 1, 1], of_lengths(1, 2, 3)).any() == 0
    found = by("reinforce_plus_plus", [0.0, NAN, 3.0], [0, 0, 1], of_lengths(2, 2, 1))
    check(found, [[-1 / s, -1 / s], [0, 0], [2 / s, 0]], 1e-8)
    # centred: -1, 1 and, of the tied group, 0 twice; one token each: variance 2/3
    found = by("reinforce_plus_plus_baseline", [0.0, 2.0, 7.0, 7.0], [0, 0, 1, 1])
    check(found[:, 0], np.array([-1, 1, 0, 0]) / (2 / 3) ** 0.5)


def test_remax_opo_and_pass_at_k() -> None:
    assert by("remax", [1.0, 0.0, NAN, 1.0], [0, 0, 0, 1], greedy=[1.0, 1.0, 1.0, NAN]).tolist() == [0, -1, 0, 0]
    assert by("opo", [1.0, 0.0, 5.0, NAN], [0, 0, 1, 1], of_lengths(1, 3, 2, 2)).tolist() == [0.75, -0.25, 0, 0]
    found = by("grpo_passk", [3.0, 1.0, 1.0, 2.0, 2.0, 0.0], [0, 0, 0, 1, 1, 1], epsilon=0.0)
    np.testing.assert_allclose(found, [3**0.5, 0, 0, 0, 0, 0])
    assert by("grpo_passk", [3.0, 1.0, NAN], [0, 0, 0], scale="none").tolist() == [2, 0, 0]


def test_optimal_token_baseline() -> None:
    half = np.log(0.5)
    logprobs = np.array([[half, half], [0.0, half], [half, half]])  # the second one's first token was certain
    known = {"logprobs": logprobs, "sum_pi_squared": np.array([[0.5, 0.5], [1.0, 0.5], [0.5, 0.5]])}
    found = by("optimal_token_baseline", [1.0, 0.0, 0.0], [0, 0, 0], of_lengths(2, 2, 1), **known)
    # W: 1/2, 1 | 0, 1/2 | 1/2. Baselines: 1/2 at the first token, 1 / 1.5 at the second, which the third never reaches.
    np.testing.assert_allclose(found, [[1 / 2, 1 / 3], [-1 / 2, -2 / 3], [-1 / 2, 0]])
    certain = {"logprobs": np.zeros((2, 1)), "sum_pi_squared": np.ones((2, 1))}
    assert by("optimal_token_baseline", [1.0, 0.0], [0, 0], of_lengths(1, 1), **certain).tolist() == [[0], [0]]


def test_gpg() -> None:
    assert by("gpg", [0.0, 1.0, 1.0, 1.0], [0, 0, 1, 1]).tolist() == [-1, 1, 0, 0]
    assert by("gpg", [0.0, 1.0, 1.0, 1.0], [0, 0, 1, 1], parameters={"f_norm": 2.0}).tolist() == [-0.5, 0.5, 0, 0]
    for words, parameters in {"f_norm=0": {"f_norm": 0}, "nonzero": {"alpha": "nonzeros"}}.items():
        with pytest.raises(ConfigError, match=words):
            by("gpg", [0.0, 1.0], [0, 0], parameters=parameters)


def verl_whiten(values: Any, mask: Any) -> Any:
    mean = (values * mask).sum() / mask.sum()
    variance = ((values - mean) ** 2 * mask).sum() / (mask.sum() - 1)
    return (values - mean) / np.sqrt(variance + 1e-8) * mask


def verl_reinforce_plus_plus(rewards: Any, groups: Any, mask: Any, gamma: float = 0.9) -> Any:
    token_rewards = np.zeros(mask.shape)
    token_rewards[np.arange(len(rewards)), mask.sum(axis=1) - 1] = rewards
    returns, running = np.zeros(mask.shape), np.zeros(len(rewards))
    for t in reversed(range(mask.shape[1])):
        running = token_rewards[:, t] + gamma * running
        returns[:, t] = running
        running = running * mask[:, t]
    return verl_whiten(returns, mask)


def verl_baseline(rewards: Any, groups: Any, mask: Any) -> Any:
    alone = np.array([(groups == g).sum() == 1 for g in groups.tolist()])
    centred = rewards - np.where(alone, 0.0, means_of(rewards, groups))
    return verl_whiten(np.tile(centred[:, None], mask.shape[1]) * mask, mask)


def verl_opo(rewards: Any, groups: Any, mask: Any) -> Any:
    lengths, out = mask.sum(axis=1), np.zeros(len(rewards))
    for g in set(groups.tolist()):
        inside = groups == g
        out[inside] = rewards[inside] - (lengths[inside] * rewards[inside]).sum() / lengths[inside].sum()
    return out


def verl_optimal_token_baseline(rewards: Any, groups: Any, mask: Any) -> Any:
    logprobs, squares = probabilities(mask.shape)
    weights = np.cumsum((1 - 2 * np.exp(logprobs) + squares) * mask, axis=1)
    out = np.zeros(mask.shape)
    for g in set(groups.tolist()):
        inside = groups == g
        total = (weights[inside] * mask[inside]).sum(axis=0) + 1e-8
        baseline = (rewards[inside, None] * weights[inside] * mask[inside]).sum(axis=0) / total
        out[inside] = (rewards[inside, None] - baseline) * mask[inside]
    return out


def probabilities(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Log-probabilities of drawn tokens and sums of squared probabilities, of distributions over five tokens."""
    rng = np.random.default_rng(11)
    p = rng.dirichlet(np.ones(5), size=shape)
    return np.log(p[..., 0]), (p**2).sum(axis=-1)


def verl_gpg(rewards: Any, groups: Any, mask: Any) -> Any:
    return len(rewards) / max(np.count_nonzero(rewards), 1) * (rewards - means_of(rewards, groups))


def verl_passk(rewards: Any, groups: Any, mask: Any) -> Any:
    out = np.zeros(len(rewards))
    for g in set(groups.tolist()):
        rows = np.flatnonzero(groups == g)
        ordered = np.sort(rewards[rows])
        best = rows[np.argmax(rewards[rows])]
        out[best] = (ordered[-1] - ordered[-2]) / (rewards[rows].std(ddof=1) + 1e-6)
    return out


PEERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "reinforce_plus_plus": (verl_reinforce_plus_plus, {"gamma": 0.9}),
    "reinforce_plus_plus_baseline": (verl_baseline, {}),
    "opo": (verl_opo, {}),
    "optimal_token_baseline": (verl_optimal_token_baseline, {}),
    "gpg": (verl_gpg, {"alpha": "nonzero"}),
    "grpo_passk": (verl_passk, {}),
}


@pytest.mark.parametrize("name", PEERS)
def test_as_the_peer_computes_it(name: str) -> None:
    rng = np.random.default_rng(3)
    for rewards in (rng.normal(size=24), rng.integers(0, 2, 24).astype(np.float64)):
        groups, mask = np.repeat(np.arange(6), 4), of_lengths(*rng.integers(1, 9, 24).tolist())
        function, parameters = PEERS[name]
        expected = function(rewards, groups, mask)
        logprobs, squares = probabilities(mask.shape)
        found = by(name, rewards, groups, mask, parameters, logprobs=logprobs, sum_pi_squared=squares)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-7 if name == "optimal_token_baseline" else 1e-9)
    if name == "reinforce_plus_plus_baseline":  # groups of one are what they are without a baseline
        alone = by(name, rewards, np.arange(24), mask)
        np.testing.assert_allclose(alone, verl_baseline(rewards, np.arange(24), mask), atol=1e-9)
        np.testing.assert_allclose(alone, by("reinforce_plus_plus", rewards, np.arange(24), mask), atol=1e-12)


@pytest.mark.parametrize("name", [*PEERS, "remax"])
def test_all_libraries_agree(name: str) -> None:
    rng = np.random.default_rng(5)
    rewards, groups = rng.normal(size=12), np.repeat(np.arange(4), 3)
    mask = of_lengths(*rng.integers(1, 6, 12).tolist())
    rewards[4] = NAN
    logprobs, squares = probabilities(mask.shape)
    more = {"greedy": rng.normal(size=12), "logprobs": logprobs, "sum_pi_squared": squares}
    expected = by(name, rewards, groups, mask, **more)
    as_torch = Outcomes(*map(torch.from_numpy, (rewards, groups)), mask=torch.from_numpy(mask))
    by_torch = ADVANTAGE_ESTIMATORS[name](replace(as_torch, **{k: torch.from_numpy(v) for k, v in more.items()}))
    np.testing.assert_allclose(by_torch.numpy(), expected, atol=1e-9)

    def traced(r: Any, g: Any, m: Any, more: Any) -> Any:
        return ADVANTAGE_ESTIMATORS[name](Outcomes(r, g, mask=m, **more))

    by_jax = jax.jit(traced)(*map(jnp.asarray, (rewards, groups, mask)), {k: jnp.asarray(v) for k, v in more.items()})
    np.testing.assert_allclose(by_jax, expected, atol=1e-9)


def test_what_teaches_is_asked_of_the_estimator() -> None:
    rewards = ([1, 1], [0, 1], [1, 1, 0], [NAN, NAN])
    groups = [Group(fake_prompt(), (), np.array(each)) for each in rewards]
    for name, taught in {
        "grpo": [False, True, True, False],
        "reinforce_plus_plus": [True, True, True, False],
        "grpo_passk": [False, True, False, False],
    }.items():
        assert list(map(find_estimator(name).teaches, groups)) == taught
    assert find_estimator("reinforce_plus_plus").group_problem({"sampling.num_generations": 1}) is None
    said = find_estimator("grpo").group_problem({"a": 4, "b": 1})
    assert said == "b=1: a group needs at least 2 completions to compare; set b to 2 or more"
    with pytest.raises(ConfigError, match=r"'gama'.*it takes gamma"):
        find_estimator("reinforce_plus_plus", {"gama": 0.9})
    with pytest.raises(ConfigError, match="did you mean 'rloo'"):
        find_estimator("rlo")


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
    selected = None if objective.loss.select is None else objective.select(LOGP, OLD, ADVANTAGES, mask)
    more = {"correction": correction, "selected": selected}
    return float(policy_loss(LOGP, OLD, ADVANTAGES, mask, weights, objective, **more).loss)


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
    held = np.clip(ratio, floor, cap)
    expected = held if mode.endswith("truncate") else np.where(held == ratio, ratio, 0.0)
    found = mismatch_correction(OLD, LOGP, MASK > 0, mode, cap, floor)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert floor is None or (found != ratio).any()


def test_kl_penalties_are_verl_s() -> None:
    d = LOGP - OLD
    for name, forward in {"abs": np.abs(d), "k1+": d, "k3+": np.exp(-d) + d - 1}.items():
        np.testing.assert_allclose(KL_ESTIMATORS[name](LOGP, OLD, None), forward, rtol=1e-12, atol=1e-15)


def test_adaptive_entropy_is_trl_s() -> None:
    section = AlgorithmConfig(entropy_coef=0.1, adaptive_entropy={"target": 1.0, "delta": 0.03, "max": 0.2})
    coefficient, last = 0.1, float("inf")
    moved, before = None, None
    for entropy in (0.5, 0.9, 1.0, 1.1, 0.2, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 0.1):
        assert section.entropy_weight(moved, before) == (coefficient if last <= 1.0 else 0.0)
        coefficient = min(coefficient + 0.03, 0.2) if entropy <= 1.0 else max(coefficient - 0.03, 0.0)
        last = before = entropy
        moved = section.next_entropy_coef(moved, entropy)
        assert moved == coefficient
