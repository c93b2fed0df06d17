"""REINFORCE++, ReMax, OPO, GPG and pass@k: by hand, against the peers' formulas in float64, and in all libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from covey.algorithms import ADVANTAGE_ESTIMATORS, Outcomes, find_estimator
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
