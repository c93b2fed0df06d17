"""Advantages against numbers worked by hand, and what must hold for all rewards."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.algorithms import (
    ADVANTAGE_ESTIMATORS,
    Outcomes,
    combine_rewards,
    compute_grpo_outcome_advantage,
    compute_naive_grpo_outcome_advantage,
    episode_advantages,
    find_estimator,
    group_advantages,
    rloo_advantages,
)
from covey.errors import ConfigError, DataError

NAN = float("nan")
WITHIN_GROUPS = [
    name
    for name, estimator in ((name, find_estimator(name)) for name in sorted(ADVANTAGE_ESTIMATORS))
    if estimator.group_relative and not estimator.needs_turns and not estimator.needs_sum_pi_squared
]
BOUNDED = settings(max_examples=30, deadline=None, derandomize=True)


def estimate_by(name: str, rewards: Any, groups: Any, **settings: Any) -> Any:
    return ADVANTAGE_ESTIMATORS[name](Outcomes(rewards, groups, **settings))


def test_group_and_scale_by_hand() -> None:
    rewards, groups = [0.0, 0.0, 3.0, 1.0, 2.0], [7, 7, 7, 4, 4]
    # means 1 and 1.5; sample stds sqrt((1 + 1 + 4) / 2) = sqrt 3 and sqrt(0.5); no epsilon
    np.testing.assert_allclose(
        group_advantages(rewards, groups, epsilon=0.0),
        [-1 / math.sqrt(3), -1 / math.sqrt(3), 2 / math.sqrt(3), -math.sqrt(0.5), math.sqrt(0.5)],
    )
    # population stds sqrt 2 and 0.5
    np.testing.assert_allclose(
        group_advantages(rewards, groups, correction=0, epsilon=0.0),
        [-1 / math.sqrt(2), -1 / math.sqrt(2), math.sqrt(2), -1, 1],
    )
    np.testing.assert_allclose(group_advantages(rewards, groups, scale="none"), [-1, -1, 2, -0.5, 0.5])
    # batch: mean 1.2, squares 1.44 + 1.44 + 3.24 + 0.04 + 0.64 = 6.8, over 4 = 1.7
    np.testing.assert_allclose(
        group_advantages(rewards, groups, scale="batch", epsilon=0.0), np.array([-1, -1, 2, -0.5, 0.5]) / math.sqrt(1.7)
    )
    # epsilon is added to the std, not to the variance: ±0.5 / (0.5 + 0.5)
    np.testing.assert_allclose(group_advantages([1, 2], [0, 0], correction=0, epsilon=0.5), [-0.5, 0.5])


def test_leave_one_out_by_hand() -> None:
    # others' means: 1.5, 1.5, 0; and 2, 1
    np.testing.assert_allclose(
        rloo_advantages([0.0, 0.0, 3.0, 1.0, 2.0], [0, 0, 0, 1, 1]), [-1.5, -1.5, 3.0, -1.0, 1.0]
    )


@pytest.mark.parametrize("name", WITHIN_GROUPS)
def test_what_cannot_be_scored_is_left_out_of_its_group(name: str) -> None:
    estimate = partial(estimate_by, name)
    with_none = estimate([1.0, None, 2.0, math.inf, 6.0], [0, 0, 0, 0, 0], scale="group", correction=1)
    scored_only = estimate([1.0, 2.0, 6.0], [0, 0, 0], scale="group", correction=1)
    np.testing.assert_allclose(with_none, [scored_only[0], 0, scored_only[1], 0, scored_only[2]])
    assert abs(scored_only).max() > 0.1


@pytest.mark.parametrize("name", WITHIN_GROUPS)
@pytest.mark.parametrize(
    "rewards", [[5.0], [NAN], [NAN, NAN, NAN], [1.0, NAN], [0.1, 0.1, 0.1], [1 / 3] * 7, [1e8 + 0.1] * 3, []]
)
def test_a_group_without_relative_information_gets_exactly_zero(name: str, rewards: list[float]) -> None:
    for scale in ("group", "batch", "none"):
        # another group, so that the batch has a spread
        both = estimate_by(name, [*rewards, 0.0, 1.0], [*[0] * len(rewards), 1, 1], scale=scale)
        assert (both[: len(rewards)] == 0).all()
        assert both[-1] > 0
        assert estimate_by(name, rewards, [0] * len(rewards), scale=scale).tolist() == [0] * len(rewards)


reward_lists = st.lists(
    st.tuples(st.integers(0, 3), st.one_of(st.just(NAN), st.integers(-3, 3).map(float), st.floats(-1e3, 1e3))),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("name", WITHIN_GROUPS)
@BOUNDED
@given(rows=reward_lists, data=st.data())
def test_properties_of_all_estimators(name: str, rows: list[tuple[int, float]], data: st.DataObject) -> None:
    groups, rewards = np.array([g for g, _ in rows]), np.array([r for _, r in rows])
    estimate = partial(estimate_by, name)
    advantages = estimate(rewards, groups)
    assert np.isfinite(advantages).all()
    assert (advantages[np.isnan(rewards)] == 0).all()
    for group in set(groups):
        inside = advantages[groups == group]
        assert name == "grpo_passk" or abs(inside.sum()) <= 1e-9 * max(1.0, np.abs(inside).max())
    order = np.asarray(data.draw(st.permutations(range(len(rows)))))
    close = {"rtol": 1e-9, "atol": 1e-9}
    np.testing.assert_allclose(estimate(rewards[order], groups[order]), advantages[order], **close)
    # the names of the groups do not matter
    np.testing.assert_array_equal(estimate(rewards, [f"uid-{g}" for g in groups]), advantages)


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2), st.sampled_from([NAN, 0.0, 0.1, 2.0])), min_size=1),
    st.sampled_from([0, 1]),
)
def test_each_group_by_itself(rows: list[tuple[int, int, float]], correction: int) -> None:
    """Against loops over the groups, with numbers of groups and episodes that begin anywhere."""
    groups, episodes = np.array([row[:2] for row in rows]).T
    rewards = np.array([row[2] for row in rows])

    def expected(counted: np.ndarray) -> np.ndarray:
        found = np.zeros(len(rows))
        for group in set(groups.tolist()):
            inside = groups == group
            scored = rewards[inside & counted & ~np.isnan(rewards)]
            if len(set(scored)) > 1:
                std = scored.std(ddof=correction)
                found[inside] = np.nan_to_num((rewards[inside] - scored.mean()) / (std + 1e-6))
        return found

    close = {"rtol": 1e-9, "atol": 1e-9}
    once, seen = np.zeros(len(rows), bool), set()
    for row, key in enumerate(zip(groups.tolist(), episodes.tolist(), strict=True)):
        if key not in seen and not np.isnan(rewards[row]):
            seen.add(key)
            once[row] = True
    everyone = np.ones(len(rows), bool)
    np.testing.assert_allclose(group_advantages(rewards, groups, correction=correction), expected(everyone), **close)
    np.testing.assert_allclose(
        episode_advantages(rewards, groups, episodes, correction=correction), expected(once), **close
    )


@pytest.mark.parametrize("name", WITHIN_GROUPS)
def test_all_libraries_agree(name: str) -> None:
    rng = np.random.default_rng(1)
    rewards, groups = rng.normal(size=20), rng.integers(0, 5, 20)
    rewards[[2, 11]] = NAN
    for scale in ("group", "batch", "none"):

        def estimate(r: object, g: object, scale: str = scale) -> object:
            return estimate_by(name, r, g, scale=scale)

        expected = estimate(rewards, groups)
        by_torch = estimate(torch.from_numpy(rewards), torch.from_numpy(groups))
        by_jax = jax.jit(estimate)(jnp.asarray(rewards), jnp.asarray(groups))
        assert isinstance(by_torch, torch.Tensor)
        np.testing.assert_allclose(by_torch.numpy(), expected, rtol=0, atol=1e-10)
        np.testing.assert_allclose(by_jax, expected, rtol=0, atol=1e-10)
    integers = group_advantages(torch.tensor([1, 2]), [0, 0], correction=0)
    np.testing.assert_allclose(integers.numpy(), [-1, 1], atol=1e-5)


def test_an_episode_counts_once_however_many_steps_it_has() -> None:
    # group 0: episode 8 (reward 4) has three rows, episode 9 (reward 0) one; group 1 has an 8 of its own
    rewards, groups, episodes = [4.0, 0.0, 4.0, 4.0, 1.0, 3.0], [0, 0, 0, 0, 1, 1], [8, 9, 8, 8, 8, 5]
    # mean 2, not 3; sample std sqrt(8) resp. sqrt(2)
    np.testing.assert_allclose(
        episode_advantages(rewards, groups, episodes, epsilon=0.0), np.array([1, -1, 1, 1, -1, 1]) / math.sqrt(2)
    )
    # the first row of episode 8 could not be scored: the next one speaks for it
    rewards[0] = NAN
    np.testing.assert_allclose(
        episode_advantages(rewards, groups, episodes, epsilon=0.0)[:4], np.array([0, -1, 1, 1]) / math.sqrt(2)
    )


def test_several_rewards_by_hand() -> None:
    parts = [[1.0, 0.0, None, None], [10.0, 30.0, 20.0, None]]
    np.testing.assert_array_equal(combine_rewards(parts, [2.0, 0.1]), [3.0, 3.0, 2.0, NAN])
    summed = group_advantages(combine_rewards(parts, [2.0, 0.1]), [0] * 4, epsilon=0.0)
    # 3 3 2: mean 8/3, sample std sqrt(1/3)
    np.testing.assert_allclose(summed, np.array([1, 1, -2, 0]) / 3 / math.sqrt(1 / 3), atol=1e-12)
    # x, -x and 0, then normalised over the batch: the sample std of x -x 0 is x.
    for scale in ("group", "batch", "none"):
        np.testing.assert_allclose(
            estimate_by("gdpo", None, [0] * 4, parts=parts, weights=[2.0, 0.1], scale=scale, epsilon=0.0),
            [1.0, -1.0, 0.0, 0.0],
            atol=1e-12,
        )


def test_a_wide_reward_does_not_drown_the_others_when_each_is_normalised_first() -> None:
    parts = np.array([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1000.0, 1000.0]])
    together = group_advantages(combine_rewards(parts, [1.0, 1.0]), [0] * 4)
    apart = estimate_by("gdpo", None, [0] * 4, parts=parts, weights=[1.0, 1.0])
    assert together[2] - together[3] < 0.01
    assert apart[2] - apart[3] > 1.0
    assert np.std(apart, ddof=1) == pytest.approx(1.0, abs=1e-5)


def test_what_differs_in_more_rewards_weighs_more() -> None:
    """GDPO, equations 4 to 6: one reward differs in the first group, both do in the second."""
    parts = [[0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
    found = estimate_by("gdpo", None, [0, 0, 1, 1], parts=parts, weights=[1.0, 1.0], epsilon=1e-12)
    # sums -a a -2a 2a with a = sqrt(1/2); their sample std is sqrt(10 a^2 / 3)
    np.testing.assert_allclose(found, np.array([-1, 1, -2, 2]) / math.sqrt(10 / 3))


def test_the_signature_of_the_agents_document() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    advantages, returns = compute_naive_grpo_outcome_advantage(
        np.array([1.0, 2.0, 2.0]), mask, np.array(["u", "u", "u"], dtype=object), np.array(["a", "b", "b"])
    )
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, -1, 0], [1, 0, 0], [1, 1, 1]]), atol=1e-5, rtol=0)
    assert torch.equal(advantages, returns)
    centred, _ = compute_naive_grpo_outcome_advantage(
        [1.0, 2.0], mask[:2], [0, 0], [0, 1], norm_adv_by_std_in_grpo=False
    )
    assert centred.tolist() == [[-0.5, -0.5, 0], [0.5, 0, 0]]


def test_step_level_rows_in_the_layout_of_the_agents_document() -> None:
    rewards = np.array([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0], [5.0, 0.0, 0.0]])
    mask = np.array([[1, 1, 0], [1, 1, 1], [1, 0, 0]])
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask, ["u", "u", "v"], correction=0)
    # scores 1 and 2 in group u; a group of one has no relative information
    np.testing.assert_allclose(advantages, [[-1, -1, 0], [1, 1, 1], [0, 0, 0]], atol=1e-5)
    np.testing.assert_array_equal(advantages, returns)
    sample, _ = compute_grpo_outcome_advantage(rewards, mask, ["u", "u", "v"])
    np.testing.assert_allclose(sample[0], [-math.sqrt(0.5), -math.sqrt(0.5), 0], atol=1e-5)


def test_errors_name_the_value_and_the_fix() -> None:
    with pytest.raises(ConfigError, match="did you mean 'batch'"):
        group_advantages([1.0], [0], scale="bach")
    with pytest.raises(DataError, match=r"\(2,\).*\(1,\)"):
        group_advantages([1.0, 2.0], [0])
    with pytest.raises(DataError, match="one weight"):
        combine_rewards([[1.0], [2.0]], [1.0])


def test_the_two_functions_of_the_documents_divide_by_different_spreads() -> None:
    """As docs/agents.md says: the population's for the one that its document defines so, the sample's as in runs."""
    ids, ones = np.zeros(4, np.int64), np.ones((4, 1))
    rewards, episodes = np.array([0.0, 0.0, 1.0, 1.0]), np.arange(4)
    naive = compute_naive_grpo_outcome_advantage(rewards, ones, ids, episodes)[0]
    of_steps = compute_grpo_outcome_advantage(rewards[:, None], ones, ids)[0]
    in_runs = find_estimator("naive_grpo")(Outcomes(rewards, ids))
    np.testing.assert_allclose(naive[:, 0], [-1, -1, 1, 1], atol=5e-4)
    np.testing.assert_allclose(of_steps[:, 0], [-0.866, -0.866, 0.866, 0.866], atol=5e-4)
    np.testing.assert_allclose(in_runs, of_steps[:, 0])
    same = compute_naive_grpo_outcome_advantage(rewards, ones, ids, episodes, correction=1)[0]
    np.testing.assert_allclose(same, of_steps)
