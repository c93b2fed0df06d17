"""Advantages of what agents did: from turns to the tokens that were sampled for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.algorithms import ADVANTAGE_ESTIMATORS
from covey.algorithms.advantages import episode_advantages, group_advantages
from covey.algorithms.credit import discounted_returns, gigpo_advantages
from covey.types import Group, IntArray, Trajectory


@dataclass(frozen=True, slots=True)
class CreditSettings:
    """How turns get their advantages. Names are those of the `algorithm` and `environment` sections.

    Attributes:
        adv_estimator: `grpo` compares all turns of a group, `naive_grpo` its episodes, `gigpo` episodes and turns that
            began with the same observation; other estimators of outcome rewards compare episodes.
        step_score: what `grpo` compares: the `episode`'s reward, the discounted `return` from the turn on, or its own
            `step` reward.
        discount: of returns.
        step_advantage_weight: GiGPO's omega.
        failed_episodes: `exclude` those that an environment's failure ended from their group, or score them as they
            were (`score`), with what they had earned.
    """

    adv_estimator: str = "grpo"
    scale_rewards: str = "group"
    std_correction: int = 1
    step_score: str = "episode"
    discount: float = 1.0
    step_advantage_weight: float = 1.0
    failed_episodes: str = "exclude"


def trajectory_rewards(trajectories: Sequence[Trajectory], settings: CreditSettings) -> NDArray[np.float64]:
    """`[G]` reward of each trajectory; NaN for one that is excluded."""
    excluded = settings.failed_episodes == "exclude"
    return np.array([np.nan if excluded and t.ended == "failed" else t.reward for t in trajectories], np.float64)


def agent_advantages(groups: Sequence[Group], settings: CreditSettings) -> NDArray[np.float64]:
    """`[N, T]` advantage of each sampled token of the groups' episodes, 0 beyond their ends.

    Every token of a turn has the turn's advantage.
    """
    table = _table(groups, settings)
    values = _turn_advantages(table, settings)
    episodes = [episode for group in groups for episode in group.episodes]
    out = np.zeros((len(episodes), max((episode.num_sampled for episode in episodes), default=0)))
    starts: dict[tuple[int, int], float] = dict(zip(table.places, values.tolist(), strict=True))
    for row, episode in enumerate(episodes):
        segment = segment_of_token(episode.sampled)
        for number in range(int(segment.max(initial=-1)) + 1):
            out[row, : len(segment)][segment == number] = starts.get((row, number), 0.0)
    return out


def segment_of_token(sampled: NDArray[np.bool_]) -> IntArray:
    """`[T]` to which sampled segment each sampled token belongs, from 0; mask [0 1 1 0 1] gives [0 0 1]."""
    begins = sampled & ~np.concatenate([[False], sampled[:-1]])
    return np.asarray((np.cumsum(begins) - 1)[sampled], dtype=np.int64)


@dataclass(slots=True)
class _Table:
    """One entry for each turn of all trajectories."""

    places: list[tuple[int, int]]  # row among all episodes, segment
    group: list[int]
    trajectory: list[int]
    reward: list[float]  # of the whole trajectory, NaN where it is excluded
    step: list[float]
    returns: list[float]
    anchor: list[str]


def _table(groups: Sequence[Group], settings: CreditSettings) -> _Table:
    table = _Table([], [], [], [], [], [], [])
    row = number = 0
    for index, group in enumerate(groups):
        for trajectory, reward in zip(
            group.trajectories, trajectory_rewards(group.trajectories, settings).tolist(), strict=True
        ):
            own = [turn.reward for turn in trajectory.turns]
            for turn, value in zip(trajectory.turns, discounted_returns(own, settings.discount), strict=True):
                table.places.append((row + turn.row, turn.segment))
                table.group.append(index)
                table.trajectory.append(number)
                table.reward.append(reward)
                table.step.append(turn.reward)
                table.returns.append(float(value))
                table.anchor.append(turn.observation)
            row += len(trajectory.episodes)
            number += 1
    return table


def _turn_advantages(table: _Table, settings: CreditSettings) -> NDArray[np.float64]:
    if not table.places:
        return np.zeros(0)
    scale: dict[str, Any] = {"scale": settings.scale_rewards, "correction": settings.std_correction}
    groups, reward = np.array(table.group), np.array(table.reward)
    excluded = np.isnan(reward)
    if settings.adv_estimator == "grpo":
        score = {"episode": table.reward, "return": table.returns, "step": table.step}[settings.step_score]
        return np.asarray(group_advantages(np.where(excluded, np.nan, np.array(score)), groups, **scale))
    if settings.adv_estimator == "naive_grpo":
        return np.asarray(episode_advantages(reward, groups, np.array(table.trajectory), **scale))
    if settings.adv_estimator == "gigpo":
        returns = np.where(excluded, np.nan, np.array(table.returns))
        return np.asarray(
            gigpo_advantages(
                reward,
                returns,
                groups,
                np.array(table.trajectory),
                table.anchor,
                omega=settings.step_advantage_weight,
                **scale,
            )
        )
    # one entry for each trajectory, then back to its turns
    first = {number: place for place, number in reversed(list(enumerate(table.trajectory)))}
    chosen = np.array([first[number] for number in sorted(first)])
    estimate = ADVANTAGE_ESTIMATORS[settings.adv_estimator](reward[chosen], groups[chosen], **scale)
    of = dict(zip(sorted(first), np.asarray(estimate).tolist(), strict=True))
    return np.array([of[number] for number in table.trajectory])
