"""Credit in episodes of several steps: returns, and advantages of steps that share an anchor observation.

Rows are *steps*: `[S]` arrays have one entry for each step of each episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from covey.algorithms.advantages import episode_advantages, group_advantages
from covey.algorithms.arrays import Array, as_float, group_numbers


def discounted_returns(rewards: Sequence[float], discount: float) -> NDArray[np.float64]:
    """`[n]` what each step of an episode led to: `R_t = r_t + discount * R_{t+1}`; rewards [0, 1] at 0.5 give [0.5, 1].

    Args:
        rewards: of its steps, in order.
        discount: 1 = the sum of what follows, 0 = the step's own reward.
    """
    returns = np.array(rewards, dtype=np.float64)
    for step in range(len(returns) - 2, -1, -1):
        returns[step] += discount * returns[step + 1]
    return returns


def gigpo_advantages(
    episode_rewards: Any,
    step_returns: Any,
    groups: Any,
    episodes: Any,
    anchors: Any,
    *,
    omega: float = 1.0,
    scale: str = "group",
    correction: int = 1,
    epsilon: float = 1e-6,
) -> Array:
    """GiGPO (Feng et al. 2025, arXiv 2505.10978): `A = A_episode + omega * A_step`.

    `A_episode` compares episodes of a group (`episode_advantages`); `A_step` compares the steps of a group that began
    with the same observation, by what each of them led to. A step whose observation nobody else of the group saw gets
    only the first.

    Args:
        episode_rewards: `[S]` the reward of the step's whole episode.
        step_returns: `[S]` discounted return from the step on (`discounted_returns`).
        groups: `[S]` group of the step's episode.
        episodes: `[S]` episode of the step.
        anchors: `[S]` ids, equal where the observations before the steps are equal; numbers or text.
        omega: weight of the step advantage.
        scale: see `group_advantages`.
        correction: see `group_advantages`.
        epsilon: see `group_advantages`.

    Returns:
        `[S]` advantages.
    """
    settings: dict[str, Any] = {"scale": scale, "correction": correction, "epsilon": epsilon}
    whole = episode_advantages(episode_rewards, groups, episodes, **settings)
    returns = as_float(step_returns)
    xp = array_namespace(returns)
    group, anchor = group_numbers(groups, returns), group_numbers(anchors, returns)
    together = group * (xp.max(anchor) + 1) + anchor
    return whole + omega * group_advantages(returns, together, **settings)
