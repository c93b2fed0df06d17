"""Advantages: how much better a completion did than its own group.

`[N]` arrays hold one entry per completion, unless a function says per step or per episode. A reward that is NaN,
infinite or None is *not scorable*: it is left out of its group's statistics and gets advantage 0. A group with fewer
than two scorable rewards, or with equal rewards, gets exactly 0.

For agents, `[S]` arrays have one entry for each step of each episode.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from covey.algorithms.arrays import Array, as_float, at_least_one, group_numbers, masked, to_library_of, unknown_name
from covey.algorithms.grouping import Grouping, numbered
from covey.errors import ConfigError, DataError
from covey.types import equal_rewards

SCALES = ("group", "batch", "none")
"""What a centred reward is divided by (`scale_rewards`): its group's std, the batch's std, or nothing."""


class GroupStatistics(NamedTuple):
    """Statistics of each row's group, `[N]` each; `tied` is True where the group's rewards are all equal."""

    count: Array
    mean: Array
    std: Array
    tied: Array


def group_statistics(rewards: Array, groups: Array, member: Array, *, correction: int = 1) -> GroupStatistics:
    """Statistics of `[N]` floats over those rows of each row's group `[N]` (integers) where `member` `[N]` is True.

    With `correction` 1 the standard deviation is that of a sample, with 0 of a population.
    """
    xp = array_namespace(rewards)
    rewards = xp.where(member, rewards, xp.zeros_like(rewards))
    grouping = Grouping(groups, member)
    count = grouping.count(rewards)
    mean = grouping.sum(rewards) / at_least_one(count)
    centred = rewards - mean
    std = xp.sqrt(grouping.sum(centred * centred) / at_least_one(count - correction))
    # Ties are found by comparison, not by std == 0: the mean of three 0.1s is not 0.1 in floating point.
    return GroupStatistics(count, mean, std, equal_rewards(-grouping.max(-rewards), grouping.max(rewards)))


def group_advantages(
    rewards: Any, groups: Any, *, scale: str = "group", correction: int = 1, epsilon: float = 1e-6
) -> Array:
    """GRPO: `(r - mean_g) / (std + epsilon)`, for example rewards [0, 0, 1, 1] in one group give ±0.5 / (0.577 + eps).

    Args:
        rewards: `[N]` floats, NaN or None where a completion could not be scored.
        groups: `[N]` group ids: completions of the same prompt.
        scale: `group` (std of the group, arXiv 2402.03300), `batch` (std of all scorable rewards), `none`
            (Dr. GRPO, arXiv 2503.20783).
        correction: 1 sample std (the choice of TRL and verl), 0 population std.
        epsilon: added to the std.

    Returns `[N]` advantages, never NaN.

    Raises:
        ConfigError: unknown `scale`.
        DataError: `rewards` and `groups` differ in length.
    """
    rewards, groups, scorable = prepare(rewards, groups)
    return _normalise(rewards, groups, scorable, scorable, scale, correction, epsilon)


def rloo_advantages(rewards: Any, groups: Any) -> Array:
    """REINFORCE leave-one-out: `r - mean of the others in the group`; rewards [0, 0, 3] give [-1.5, -1.5, 3].

    Arguments and result are as in `group_advantages`, without a scale (arXiv 2402.14740).
    """
    rewards, groups, scorable = prepare(rewards, groups)
    xp = array_namespace(rewards)
    group = group_statistics(rewards, groups, scorable)
    # r - (n·mean - r) / (n - 1) = (r - mean) · n / (n - 1)
    advantages = (rewards - group.mean) * group.count / at_least_one(group.count - 1)
    return xp.where(scorable & ~group.tied, advantages, xp.zeros_like(advantages))


def episode_advantages(
    rewards: Any, groups: Any, episodes: Any, *, scale: str = "group", correction: int = 1, epsilon: float = 1e-6
) -> Array:
    """Naive GRPO for agents (naive-grpo-agents.md): rows are *steps*, each episode counts once in its group.

    Args:
        rewards: `[N]` the reward of the whole episode, repeated on each of its rows.
        groups: `[N]` group of the row's episode.
        episodes: `[N]` episode of the row; ids need to be unique within a group only.
        scale: see `group_advantages`.
        correction: see `group_advantages`.
        epsilon: see `group_advantages`.

    Returns `[N]` the episode's advantage on each of its rows.

    Raises:
        ConfigError: unknown `scale`.
        DataError: the arguments differ in length.
    """
    rewards, groups, scorable = prepare(rewards, groups)
    episodes = group_numbers(episodes, rewards)
    _same_length(rewards, episodes, "episodes")
    # One row speaks for each episode: the first that can be scored.
    counted = Grouping(numbered(groups, episodes), scorable).first()
    return _normalise(rewards, groups, scorable, counted, scale, correction, epsilon)


def combine_rewards(parts: Any, weights: Any) -> Array:
    """One reward per completion from several reward functions: their weighted sum, for an estimator to normalise.

    Args:
        parts: `[F, N]` unweighted rewards of each function, NaN (None in lists) where it could not score.
        weights: `[F]`.

    Returns `[N]`. NaN parts are left out of the sum; a completion with no scored part is NaN.

    Raises `DataError`: `parts` and `weights` differ in length.
    """
    parts = as_float(parts)
    xp = array_namespace(parts)
    weights = xp.astype(to_library_of(parts, weights), parts.dtype)
    if parts.ndim != 2 or weights.shape != (parts.shape[0],):
        raise DataError(
            f"{tuple(weights.shape)} weights for parts of shape {tuple(parts.shape)}: one weight is needed "
            f"for each reward function; pass parts as [functions, completions] and as many weights"
        )
    scored = xp.isfinite(parts)
    total = xp.sum(weights[:, None] * xp.where(scored, parts, xp.zeros_like(parts)), axis=0)
    return xp.where(xp.any(scored, axis=0), total, xp.full_like(total, float("nan")))


def compute_grpo_outcome_advantage(
    token_level_rewards: Array,
    response_mask: Array,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    *,
    correction: int = 1,
) -> tuple[Array, Array]:
    """Step-level GRPO in the layout of verl-agent: each row is one step (naive-grpo-agents.md, "Standard").

    Args:
        token_level_rewards: `[N, T]`; their sum over T is the score of the step.
        response_mask: `[N, T]` 1 where the policy sampled the token.
        index: `[N]` group ids, numbers or uid strings.
        epsilon: added to the std.
        norm_adv_by_std_in_grpo: divide by the group's std.
        correction: 1 sample std, 0 population std.

    Returns `(advantages, returns)`, both `[N, T]` and equal.
    """
    rewards = as_float(token_level_rewards)
    scores = array_namespace(rewards).sum(rewards, axis=-1)
    scale = "group" if norm_adv_by_std_in_grpo else "none"
    advantages = group_advantages(scores, index, scale=scale, correction=correction, epsilon=epsilon)
    return _spread(advantages, response_mask)


def compute_naive_grpo_outcome_advantage(
    episode_rewards: Any,
    response_mask: Array,
    index: Any,
    traj_index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    *,
    correction: int = 0,
) -> tuple[Array, Array]:
    """Episode-level GRPO, with the signature in naive-grpo-agents.md. Rewards [1, 2] in one group give [-1, +1].

    Args:
        episode_rewards: `[N]` reward of the row's whole episode.
        response_mask: `[N, T]` 1 where the policy sampled the token.
        index: `[N]` group ids, numbers or uid strings.
        traj_index: `[N]` episode ids; an episode counts once however many rows (steps) it has.
        epsilon: added to the std.
        norm_adv_by_std_in_grpo: divide by the group's std.
        correction: 0 population std, 1 sample std.

    Returns `(advantages, returns)`, both `[N, T]` and equal, in the library of `response_mask`.
    """
    scale = "group" if norm_adv_by_std_in_grpo else "none"
    advantages = episode_advantages(
        episode_rewards, index, traj_index, scale=scale, correction=correction, epsilon=epsilon
    )
    return _spread(advantages, response_mask)


def prepare(rewards: Any, groups: Any) -> tuple[Array, Array, Array]:
    """`[N]` rewards as floats, `[N]` groups as integers of the same library, `[N]` True where a reward is scorable."""
    rewards = as_float(rewards)
    groups = group_numbers(groups, rewards)
    _same_length(rewards, groups, "groups")
    return rewards, groups, array_namespace(rewards).isfinite(rewards)


def _same_length(rewards: Array, other: Array, name: str) -> None:
    if rewards.ndim != 1 or rewards.shape != other.shape:
        raise DataError(
            f"rewards of shape {tuple(rewards.shape)} and {name} of shape {tuple(other.shape)}: one entry "
            f"is needed for each completion; pass both as [N]"
        )


def _normalise(
    rewards: Array, groups: Array, scorable: Array, counted: Array, scale: str, correction: int, epsilon: float
) -> Array:
    """Centre `rewards` in their groups and scale them; statistics are taken over the `counted` rows only."""
    if scale not in SCALES:
        raise unknown_name(scale, SCALES, "scale_rewards")
    xp = array_namespace(rewards)
    group = group_statistics(rewards, groups, counted, correction=correction)
    advantages = rewards - group.mean
    if scale == "group":
        advantages = advantages / (group.std + epsilon)
    elif scale == "batch":
        advantages = advantages / (batch_std(rewards, counted, correction) + epsilon)
    return xp.where(scorable & ~group.tied, advantages, xp.zeros_like(advantages))


def batch_std(values: Array, member: Array, correction: int) -> Array:
    """Standard deviation over the rows where `member` is True."""
    xp = array_namespace(values)
    weight = xp.astype(member, values.dtype)
    count = xp.sum(weight)
    values = xp.where(member, values, xp.zeros_like(values))
    centred = weight * (values - xp.sum(values) / at_least_one(count))
    return xp.sqrt(xp.sum(centred * centred) / at_least_one(count - correction))


def _spread(advantages: Array, response_mask: Array) -> tuple[Array, Array]:
    """`[N]` advantages on the sampled tokens, in the library, float type and on the device of the mask."""
    xp = array_namespace(response_mask)
    dtype = response_mask.dtype
    if not xp.isdtype(dtype, "real floating"):
        dtype = xp.asarray(0.0).dtype
    values = xp.astype(to_library_of(response_mask, advantages), dtype)
    tokens = masked(values, response_mask != 0)
    return tokens, tokens


def discounted_returns(rewards: Any, discount: float) -> NDArray[np.float64]:
    """`[..., n]` return of each step of an episode, from its rewards: `R_t = r_t + discount * R_{t+1}`.

    Rewards [0, 1] with discount 0.5 give [0.5, 1].
    """
    returns = np.array(rewards, dtype=np.float64)
    for step in range(returns.shape[-1] - 2, -1, -1):
        returns[..., step] += discount * returns[..., step + 1]
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

    `A_episode` compares the episodes of a group (`episode_advantages`). `A_step` compares the returns of those steps of
    a group that began with the same observation; it is 0 for an observation that occurs once.

    Each `[S]` array has one entry for each step. The entries are the reward of its whole episode, the return from the
    step on (`discounted_returns`), its group and its episode. An observation id is a number or text. The other
    arguments are those of `group_advantages`. Returns `[S]` advantages.
    """
    settings: dict[str, Any] = {"scale": scale, "correction": correction, "epsilon": epsilon}
    whole = episode_advantages(episode_rewards, groups, episodes, **settings)
    returns = as_float(step_returns)
    together = numbered(group_numbers(groups, returns), group_numbers(anchors, returns))
    return whole + omega * group_advantages(returns, together, **settings)


def normalise_tokens(values: Array, mask: Array) -> Array:
    """Normalise to mean 0 and variance 1 over the tokens where `mask` is True; 0 elsewhere, and if all are equal.

    It divides by the square root of the sample variance plus 1e-8, as verl does.

    Args:
        values: `[N, T]`, or `[N]` for all tokens of a row.
        mask: `[N, T]` boolean.
    """
    xp = array_namespace(values)
    if 0 in mask.shape:
        return masked(values, mask)
    weight = xp.astype(mask, values.dtype)
    values, count = masked(values, mask), xp.sum(weight)
    centred = weight * (values - xp.sum(values) / at_least_one(count))
    variance = xp.sum(centred * centred) / at_least_one(count - 1)
    infinite = float("inf")
    low, high = xp.min(xp.where(mask, values, infinite)), xp.max(xp.where(mask, values, -infinite))
    return xp.where(equal_rewards(low, high), xp.zeros_like(centred), centred / xp.sqrt(variance + 1e-8))


def soft_overlong_punishment(lengths: Any, max_completion_length: int, cache: int) -> Array:
    """DAPO's penalty on long completions, which is added to the reward (arXiv 2503.14476, equation 13).

    It is 0 up to `max_completion_length - cache` tokens, then falls linearly to -1 at the limit, and stays -1 beyond.
    With a limit of 100 and a cache of 20: 80 tokens give 0, 90 give -0.5, 100 give -1.

    Args:
        lengths: `[N]` completion lengths in tokens.
        max_completion_length: L_max, in tokens.
        cache: L_cache, width of the falling part in tokens.

    Returns `[N]` in [-1, 0].

    Raises `ConfigError`: `cache` is not between 1 and `max_completion_length`.
    """
    if not 0 < cache <= max_completion_length:
        raise ConfigError(
            f"soft_overlong_cache={cache}: the punished range ends at max_completion_length="
            f"{max_completion_length}; choose 1 to {max_completion_length} tokens"
        )
    lengths = as_float(lengths)
    xp = array_namespace(lengths)
    penalty = (max_completion_length - cache - lengths) / cache
    penalty = xp.where(penalty > 0, xp.zeros_like(penalty), penalty)
    return xp.where(penalty < -1, -xp.ones_like(penalty), penalty)
