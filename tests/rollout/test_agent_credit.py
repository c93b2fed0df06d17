"""From turns to tokens: worked by hand, in both layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from covey.algorithms import find_estimator
from covey.config.algorithm import AlgorithmConfig
from covey.config.environment import EnvironmentConfig
from covey.rollout.batching import agent_advantages, segment_of_token, trajectory_rewards
from covey.types import Episode, Group, Trajectory, Turn
from fakes import fake_prompt


def episode(mask: str) -> Episode:
    """`"..xx.x"`: x marks a sampled token."""
    sampled = np.array([character == "x" for character in mask])
    size = len(mask)
    return Episode(np.arange(size), sampled, np.zeros(size, np.float32), "", "stop", 1)


def trajectory(rewards: list[float], *, conversation: bool, ended: str = "done") -> Trajectory:
    """Turns of one token, two tokens, ..., all seen from "hall" first and from "room" then."""
    turns = tuple(
        Turn(
            "hall" if number == 0 else "room",
            "say",
            "say",
            reward,
            True,
            0 if conversation else number,
            number if conversation else 0,
        )
        for number, reward in enumerate(rewards)
    )
    masks = ["." + "x" * (number + 1) for number in range(len(rewards))]
    episodes = [episode("".join(masks))] if conversation else [episode(mask) for mask in masks]
    return Trajectory(tuple(episodes), turns, rewards[-1] > 0, ended)  # type: ignore[arg-type]


def group(*trajectories: Trajectory) -> Group:
    episodes = tuple(e for t in trajectories for e in t.episodes)
    return Group(fake_prompt(), episodes, np.zeros(len(episodes)), {}, tuple(trajectories))


def advantages(
    groups: list[Group], adv_estimator: str = "grpo", parameters: dict[str, Any] | None = None, **environment: Any
) -> Any:
    algorithm = AlgorithmConfig(adv_estimator=adv_estimator, scale_rewards="none")
    return agent_advantages(
        groups, find_estimator(adv_estimator, parameters), algorithm, EnvironmentConfig(**environment)
    )


def test_segments() -> None:
    assert segment_of_token(np.array([False, True, True, False, True])).tolist() == [0, 0, 1]
    assert segment_of_token(np.array([False, False])).tolist() == []


@pytest.mark.parametrize("conversation", [True, False])
def test_estimators_by_hand(conversation: bool) -> None:
    # one episode of two turns that earns 1 in the second, one of a single turn that earns 0
    groups = [group(trajectory([0.0, 1.0], conversation=conversation), trajectory([0.0], conversation=conversation))]

    def tokens(**settings: Any) -> Any:
        return pytest.approx(advantages(groups, **settings))

    def expected(first: float, second: float, other: float) -> np.ndarray:
        if conversation:
            return np.array([[first, second, second], [other, 0.0, 0.0]])
        return np.array([[first, 0.0], [second, second], [other, 0.0]])

    third = 1 / 3
    # all turns of the group: episode rewards 1, 1, 0
    assert tokens(adv_estimator="grpo") == expected(third, third, -2 * third)
    # each episode once: mean 1/2
    assert tokens(adv_estimator="naive_grpo") == expected(0.5, 0.5, -0.5)
    assert tokens(adv_estimator="dr_grpo") == expected(0.5, 0.5, -0.5)
    assert tokens(adv_estimator="rloo") == expected(1.0, 1.0, -1.0)
    # own rewards 0, 1, 0
    assert tokens(adv_estimator="grpo", parameters={"step_score": "step"}) == expected(-third, 2 * third, -third)
    # returns 1/2, 1, 0
    assert tokens(adv_estimator="grpo", parameters={"step_score": "return", "discount": 0.5}) == expected(
        0.0, 0.5, -0.5
    )
    # and the two first turns, both from the hall: returns 1 and 0
    assert tokens(adv_estimator="gigpo") == expected(1.0, 0.5, -1.0)
    # of which the episodes' part is 1/2, and the rest the first turns' own
    algorithm = AlgorithmConfig(adv_estimator="gigpo", scale_rewards="none")
    part = find_estimator("gigpo").episode_part
    assert part is not None
    found = agent_advantages(groups, part, algorithm, EnvironmentConfig())
    assert found == pytest.approx(expected(0.5, 0.5, -0.5))
    assert find_estimator("grpo").episode_part is None


def test_failed_episodes_are_left_out_or_scored() -> None:
    groups = [
        group(
            trajectory([1.0], conversation=True),
            trajectory([0.0], conversation=True),
            trajectory([4.0], conversation=True, ended="failed"),
        )
    ]
    assert advantages(groups, "naive_grpo").ravel().tolist() == [0.5, -0.5, 0.0]
    assert advantages(groups, "naive_grpo", failed_episodes="score").ravel() == pytest.approx(
        [1 - 5 / 3, -5 / 3, 4 - 5 / 3]
    )
    assert np.isnan(trajectory_rewards(groups[0].trajectories, EnvironmentConfig())[2])


def test_an_episode_that_failed_before_its_first_turn_has_no_row() -> None:
    nothing = Trajectory((), (), False, "failed", "broken")
    groups = [group(nothing, trajectory([1.0], conversation=True), trajectory([0.0], conversation=True))]
    assert advantages(groups).ravel().tolist() == [0.5, -0.5]
    assert advantages([group(nothing)]).shape == (0, 0)
