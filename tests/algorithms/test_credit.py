"""Returns and GiGPO by hand."""

from __future__ import annotations

import numpy as np
import pytest

from covey.algorithms.advantages import discounted_returns, gigpo_advantages


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
