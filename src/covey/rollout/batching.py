"""Scored groups -> one training batch: advantages, and the masks that can be known before the policy is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from covey.algorithms import (
    combine_masks,
    create_sampling_mask,
    multi_reward_advantages,
    soft_overlong_punishment,
    truncated_mask,
)
from covey.rollout.credit import CreditSettings, agent_advantages
from covey.types import Batch, BoolArray, Episode, Group, Prompt

HasAnswer = Callable[[Prompt, str], bool]
"""Does this completion of this prompt hold an answer at all, right or wrong?"""


def has_text(prompt: Prompt, text: str) -> bool:
    """True unless the completion is empty: the rule where no task says more."""
    return bool(text.strip())


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How groups become a batch. Field names are those of the `algorithm` and `rewards` sections.

    Attributes:
        reward_weights: one for each reward function, in the order of `Group.reward_parts`.
        has_valid_answer: for the validity mask.
        max_completion_length: sampling limit in tokens, for the overlong punishment.
        credit: how the turns of agents get their advantages.
    """

    reward_weights: tuple[float, ...]
    adv_estimator: str = "grpo"
    scale_rewards: str = "group"
    std_correction: int = 1
    multi_objective_aggregation: str = "sum_then_normalize"
    mask_truncated_completions: bool = False
    validity_mask: bool = False
    validity_min_length: int = 10
    has_valid_answer: HasAnswer = has_text
    soft_overlong_cache: int = 0
    max_completion_length: int = 256
    credit: CreditSettings = field(default_factory=CreditSettings)


def make_batch(groups: Sequence[Group], settings: BatchSettings) -> Batch:
    """Advantages and masks of all episodes of a step.

    Example: two groups of two, rewards [0, 1] and [1, 1], three sampled tokens each:

        group        [0 0 1 1]
        advantages   [-.7 -.7 -.7], [.7 .7 .7], [0 0 0], [0 0 0]

    Masked completions still count in their group's mean: only their tokens leave the loss.
    """
    episodes = tuple(episode for group in groups for episode in group.episodes)
    group_ids = np.repeat(np.arange(len(groups)), [len(group.episodes) for group in groups])
    if any(group.trajectories for group in groups):
        advantages = agent_advantages(groups, settings.credit)
    else:
        advantages = _advantages(groups, group_ids, episodes, settings)[:, None]
    exists = np.arange(max(e.num_sampled for e in episodes))[None, :] < np.array([[e.num_sampled] for e in episodes])
    keep: dict[str, BoolArray] = {}
    if settings.mask_truncated_completions:
        keep["mask_truncated_completions"] = truncated_mask([episode.finish_reason for episode in episodes])
    if settings.validity_mask:
        answered = [settings.has_valid_answer(group.prompt, e.text) for group in groups for e in group.episodes]
        texts = [episode.text for episode in episodes]
        whole = create_sampling_mask(texts, settings.validity_min_length, has_valid_answer=lambda text: True)
        keep["validity_mask"] = whole & np.array(answered, np.bool_)
    failed = _of_failed(groups, settings.credit)
    if failed.any():
        keep["failed_episodes"] = ~failed
    mask, excluded = combine_masks(exists, keep)
    old = np.zeros(exists.shape, np.float32)
    for row, episode in enumerate(episodes):
        old[row, : episode.num_sampled] = episode.logprobs[episode.sampled]
    return Batch(
        episodes=episodes,
        group=group_ids.astype(np.int64),
        advantages=np.where(exists, advantages, 0.0).astype(np.float32),
        mask=np.asarray(mask),
        old_logprobs=old,
        excluded={name: np.asarray(tokens) for name, tokens in excluded.items()},
    )


def _of_failed(groups: Sequence[Group], credit: CreditSettings) -> BoolArray:
    """`[N]` episodes of trajectories that an environment's failure ended, where these are excluded."""
    rows: list[bool] = []
    for group in groups:
        if not group.trajectories:
            rows += [False] * len(group.episodes)
        for trajectory in group.trajectories:
            excluded = trajectory.ended == "failed" and credit.failed_episodes == "exclude"
            rows += [excluded] * len(trajectory.episodes)
    return np.array(rows, np.bool_)


def _advantages(
    groups: Sequence[Group],
    group_ids: NDArray[np.int64],
    episodes: Sequence[Episode],
    settings: BatchSettings,
) -> NDArray[np.float64]:
    """`[N]`; reward parts in their order, the overlong punishment as one more part of weight 1."""
    names = list(groups[0].reward_parts)
    parts = [np.concatenate([group.reward_parts[name] for group in groups]) for name in names]
    weights = list(settings.reward_weights)
    if settings.soft_overlong_cache > 0:
        lengths = np.array([episode.num_sampled for episode in episodes])
        punishment = soft_overlong_punishment(lengths, settings.max_completion_length, settings.soft_overlong_cache)
        # A completion that no function could score stays unscored: its length alone says nothing about it.
        unscored = np.isnan(np.concatenate([group.rewards for group in groups]))
        parts.append(np.where(unscored, np.nan, punishment))
        weights.append(1.0)
    return np.asarray(
        multi_reward_advantages(
            np.stack(parts),
            np.array(weights),
            group_ids,
            estimator=settings.adv_estimator,
            scale=settings.scale_rewards,
            correction=settings.std_correction,
            aggregation=settings.multi_objective_aggregation,
        )
    )
