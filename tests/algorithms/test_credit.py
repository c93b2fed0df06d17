"""Returns and GiGPO by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from covey.algorithms.advantages import discounted_returns, episode_advantages, gigpo_advantages, group_advantages


def test_returns() -> None:
    assert discounted_returns([0.0, 0.0, 1.0], 1.0).tolist() == [1.0, 1.0, 1.0]
    assert discounted_returns([1.0, 0.0, 4.0], 0.5).tolist() == [2.0, 2.0, 4.0]
    assert discounted_returns([1.0, 2.0], 0.0).tolist() == [1.0, 2.0]
    assert discounted_returns([], 1.0).tolist() == []


def test_gigpo_adds_steps_that_began_alike() -> None:
    # two episodes of one group: both begin in "hall", only the first goes on to "attic"
    rewards, returns = np.array([1.0, 1.0, 0.0]), np.array([1.0, 1.0, 0.0])
    arguments = (rewards, returns, np.array([0, 0, 0]), np.array([0, 0, 1]), ["hall", "attic", "hall"])
    found = np.asarray(gigpo_advantages(*arguments, scale="none", omega=2.0))
    # episodes: +0.5, +0.5, -0.5; hall: +0.5 and -0.5, twice; attic was seen once: nothing to compare
    assert found.tolist() == [1.5, 0.5, -1.5]
    assert np.asarray(gigpo_advantages(*arguments, scale="none", omega=0.0)).tolist() == [0.5, 0.5, -0.5]


def test_equal_observations_of_other_groups_are_other_anchors() -> None:
    found = gigpo_advantages(
        np.array([1.0, 0.0, 5.0, 9.0]),
        np.array([1.0, 0.0, 5.0, 9.0]),
        np.array([0, 0, 1, 1]),
        np.array([0, 1, 2, 3]),
        ["hall"] * 4,
        scale="none",
    )
    assert np.asarray(found).tolist() == [1.0, -1.0, -4.0, 4.0]


def test_an_excluded_episode_counts_nowhere() -> None:
    nan = float("nan")
    found = gigpo_advantages(
        np.array([1.0, 0.0, nan]),
        np.array([1.0, 0.0, nan]),
        np.array([0, 0, 0]),
        np.array([0, 1, 2]),
        ["hall"] * 3,
        scale="none",
    )
    assert np.asarray(found) == pytest.approx([1.0, -1.0, 0.0])


@pytest.mark.parametrize("low", [-1, 0, 2**31 - 3])
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_the_names_of_groups_and_observations_do_not_matter(low: int, library: str) -> None:
    returns, group, anchor = [1.0, 0.0, 5.0, 9.0], [0, 0, 1, 1], [0, 0, 0, 0]
    names = [np.array([low + n for n in ids], np.int32) for ids in (group, [0, 1, 0, 1], anchor)]
    values = np.array(returns)
    if library == "torch":
        values, *names = map(torch.from_numpy, (values, *names))
    if library == "jax":
        values, *names = map(jnp.asarray, (values, *names))
    found = gigpo_advantages(values, values, *names, scale="none")
    np.testing.assert_allclose(np.asarray(found), [1, -1, -4, 4])


def test_no_steps_have_no_advantages() -> None:
    nothing = np.zeros(0)
    ids = np.zeros(0, np.int64)
    assert gigpo_advantages(nothing, nothing, ids, ids, ids).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_episodes_are_counted_in_narrow_types_too(dtype: torch.dtype) -> None:
    groups, episodes = torch.arange(3000) // 6, torch.arange(3000) // 3 % 2
    rewards = (episodes + groups % 2).to(dtype)
    found = episode_advantages(rewards, groups, episodes, scale="none")
    np.testing.assert_array_equal(found.float().numpy(), np.where(episodes.numpy() == 1, 0.5, -0.5))


def test_groups_may_be_of_any_whole_type() -> None:
    expected = [-0.5, 0.5, -1.0, 1.0]
    for ids in (torch.tensor([False, False, True, True]), torch.tensor([1, 1, 2, 2], dtype=torch.uint8)):
        found = group_advantages(torch.tensor([0.0, 1.0, 0.0, 2.0]), ids, scale="none")
        np.testing.assert_allclose(found.numpy(), expected)
