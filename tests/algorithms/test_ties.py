"""Rewards that are equal but for rounding are tied, everywhere by one rule that is relative to their size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from covey.algorithms import ADVANTAGE_ESTIMATORS, Outcomes, find_estimator, group_advantages
from covey.algorithms.down_sampling import max_variance
from covey.observe.doctor import diagnose
from covey.types import Group, equal_rewards
from covey.watch.tables import Wanted, groups
from fakes import fake_episode, fake_prompt

NAN = float("nan")
TIED: list[list[float]] = [
    [0.1 + 0.2, 0.3, 0.3],
    [-0.3, -(0.1 + 0.2), -0.3],
    [1e300 * 3, 3e300, 3e300],
    [1e-9 * 3, 3e-9, 3e-9],
    [sum([0.1] * 10), 1.0, NAN],
    [0.0, -0.0, 0.0],
    [NAN, NAN, 0.3],
]
DIFFERENT: list[list[float]] = [[1e-9, 2e-9, 1e-9], [1e6, 1e6 + 0.5, 1e6], [0.0, 1e-15, 0.0]]
DIFFERENT += [[-1e-12, 1e-12, NAN], [1e308, -1e308, 0.0], [0.3, 0.3 + 1e-9, 0.3]]


def group_of(rewards: list[float]) -> Group:
    episodes = tuple(fake_episode("text") for _ in rewards)
    return Group(fake_prompt("?"), episodes, np.array(rewards), {"own": np.array(rewards)})


def tied_in_tables(rewards: list[float]) -> bool:
    return groups([{"group": 0, "reward": None if r != r else r} for r in rewards], Wanted())[0]["tied"]


@pytest.mark.parametrize("rewards", TIED, ids=str)
def test_tied_rewards_teach_nothing(rewards: list[float]) -> None:
    group, greedy = group_of(rewards), np.full(3, next(r for r in rewards if r == r))
    assert group.is_tied
    more = {"logprobs": -np.resize([0.1, 0.9, 0.4], (3, 2)), "sum_pi_squared": np.full((3, 2), 0.4)}
    step = Outcomes(np.array(rewards), np.zeros(3, np.int64), greedy=greedy, mask=np.ones((3, 2), np.bool_), **more)
    for name in set(ADVANTAGE_ESTIMATORS) - {"gigpo"}:
        estimator = find_estimator(name)
        assert not np.any(estimator(step)), name
        across_groups = name in ("remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
        assert across_groups or not estimator.teaches(group), name
    assert tied_in_tables(rewards)


@pytest.mark.parametrize("rewards", DIFFERENT, ids=str)
def test_rewards_that_differ_are_not_tied(rewards: list[float]) -> None:
    assert not group_of(rewards).is_tied
    assert find_estimator("grpo").teaches(group_of(rewards))
    if max(map(abs, rewards[:2])) < 1e100:
        assert not tied_in_tables(rewards)
        assert np.any(group_advantages(rewards, [0, 0, 0]))


@pytest.mark.parametrize("library", [torch.tensor, jnp.array], ids=["torch", "jax"])
def test_the_rule_in_float32(library: Any) -> None:
    """Rounded to float32, 0.1 + 0.2 is one digit away from 0.3; 1e6 + 0.5 is eight digits away from 1e6."""
    narrow = {torch.tensor: torch.float32, jnp.array: jnp.float32}[library]
    low, high = (library(x, dtype=narrow) for x in ([0.3, 1e6], [0.3 * (1 + 1e-7), 1e6 + 0.5]))
    assert equal_rewards(low, high).tolist() == [True, False]


def test_the_best_of_a_group_is_one_that_no_other_equals() -> None:
    """Pass@k: two best ones that differ by rounding have no lead."""
    rewards = [0.1 + 0.2, 0.3, 0.0]
    assert not np.any(find_estimator("grpo_passk")(Outcomes(np.array(rewards), np.zeros(3, np.int64))))
    assert not find_estimator("grpo_passk").teaches(group_of(rewards))


def test_down_sampling_of_small_rewards_chooses_those_that_vary_and_a_grown_group_stays_tied() -> None:
    assert sorted(max_variance(group_of([0.0, 0.0, 1e-9, 2e-9]), 2).tolist()) in ([0, 3], [1, 3])
    group = group_of([0.3, 0.3])
    assert group.grown_by(replace(group, rewards=np.array([0.1 + 0.2, 0.3]))).is_tied


def test_the_doctor_calls_rewards_equal_by_the_same_rule() -> None:
    step = {"reward": 0.1 + 0.2, "reward_std": 1e-17, "frac_reward_zero_std": 1.0, "accuracy": 0.0}
    alike = [step | {"reward": 0.3} if n % 2 else step for n in range(40)]
    assert "reward_constant" in {each.code for each in diagnose(alike)}
    small = [step | {"reward": 1e-10 * n, "reward_std": 5e-10, "frac_reward_zero_std": 0.0} for n in range(40)]
    assert not {each.code for each in diagnose(small)} & {"reward_constant", "groups_all_wrong", "groups_tied"}
