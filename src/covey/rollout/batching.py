"""Scored groups -> one training batch: advantages, and the masks that can be known before the policy is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from covey.algorithms import Estimator, combine_masks, create_sampling_mask, find_estimator, truncated_mask
from covey.rollout.credit import agent_advantages, completion_advantages, of_failed
from covey.types import Batch, BoolArray, Group, Prompt

if TYPE_CHECKING:
    from covey.algorithms.config import AlgorithmConfig
    from covey.environments.config import EnvironmentConfig
    from covey.rewards.config import RewardConfig

HasAnswer = Callable[[Prompt, str], bool]
"""Does this completion of this prompt hold an answer at all, right or wrong?"""

ScoreReference = Callable[[Batch], NDArray[np.float32]]
"""`[N, T]` log-probabilities of a batch's sampled tokens under the reference policy, 0 beyond a row's end."""


def has_text(prompt: Prompt, text: str) -> bool:
    """True unless the completion is empty: the rule where no task says more."""
    return bool(text.strip())


def estimator_of(algorithm: AlgorithmConfig) -> Estimator:
    """The estimator that the section names.

    Raises:
        ConfigError: There is none, or it does not take these parameters.
    """
    return find_estimator(algorithm.adv_estimator, algorithm.adv_parameters)


def make_batch(
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    rewards: RewardConfig,
    environment: EnvironmentConfig,
    *,
    reward_weights: Sequence[float],
    max_completion_length: int,
    has_answer: HasAnswer = has_text,
    score_reference: ScoreReference | None = None,
) -> Batch:
    """Advantages and masks of all episodes of a step.

    Example: two groups of two, rewards [0, 1] and [1, 1], three sampled tokens each:

        group        [0 0 1 1]
        advantages   [-.7 -.7 -.7], [.7 .7 .7], [0 0 0], [0 0 0]

    Masked completions still count in their group's mean: only their tokens leave the loss.

    Args:
        groups: of the step.
        algorithm: section of the config, as are `rewards` and `environment`.
        rewards: see `algorithm`.
        environment: see `algorithm`.
        reward_weights: one for each reward function, in the order of `Group.reward_parts`.
        max_completion_length: sampling limit in tokens, for the overlong punishment.
        has_answer: for the validity mask.
        score_reference: asked where the estimator states `needs_reference`.

    Raises:
        ConfigError: The estimator is somebody's own and raised, or returned what are no advantages.
    """
    estimator = estimator_of(algorithm)
    batch = _without_advantages(groups, algorithm, environment, has_answer)
    tokens = {"logprobs": batch.old_logprobs}
    if estimator.needs_reference:
        assert score_reference is not None, "the caller knows the reference"
        tokens["reference"] = score_reference(batch)
    if any(group.trajectories for group in groups):
        advantages = agent_advantages(groups, estimator, algorithm, environment, tokens)
    else:
        advantages = completion_advantages(
            groups,
            estimator,
            algorithm,
            rewards,
            reward_weights=reward_weights,
            max_completion_length=max_completion_length,
            tokens=tokens | {"mask": batch.sampled},
        )
    on_tokens = np.where(batch.sampled, advantages, 0.0).astype(np.float32)
    return replace(batch, advantages=on_tokens, group_relative=estimator.group_relative)


def _without_advantages(
    groups: Sequence[Group], algorithm: AlgorithmConfig, environment: EnvironmentConfig, has_answer: HasAnswer
) -> Batch:
    """The episodes with their masks."""
    episodes = tuple(episode for group in groups for episode in group.episodes)
    exists = np.arange(max(e.num_sampled for e in episodes))[None, :] < np.array([[e.num_sampled] for e in episodes])
    keep: dict[str, BoolArray] = {}
    if algorithm.mask_truncated_completions:
        keep["mask_truncated_completions"] = truncated_mask([episode.finish_reason for episode in episodes])
    if algorithm.validity_mask:
        answered = [has_answer(group.prompt, e.text) for group in groups for e in group.episodes]
        texts = [episode.text for episode in episodes]
        whole = create_sampling_mask(texts, algorithm.validity_min_length, has_valid_answer=lambda text: True)
        keep["validity_mask"] = whole & np.array(answered, np.bool_)
    failed = of_failed(groups, environment)
    if failed.any():
        keep["failed_episodes"] = ~failed
    mask, excluded = combine_masks(exists, keep)
    old = np.zeros(exists.shape, np.float32)
    for row, episode in enumerate(episodes):
        old[row, : episode.num_sampled] = episode.logprobs[episode.sampled]
    return Batch(
        episodes=episodes,
        group=np.repeat(np.arange(len(groups)), [len(group.episodes) for group in groups]).astype(np.int64),
        advantages=np.zeros(exists.shape, np.float32),
        mask=np.asarray(mask),
        old_logprobs=old,
        excluded={name: np.asarray(tokens) for name, tokens in excluded.items()},
    )
