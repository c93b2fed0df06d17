"""Scored groups -> one training batch: advantages, and the masks that can be known before the policy is run.

Advantages come from the estimator: what it is given is put together here, and what it returns is put on the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from covey.algorithms import Estimator, Outcomes, Turns, combine_masks, combine_rewards, soft_overlong_punishment
from covey.algorithms.down_sampling import DownSampling
from covey.algorithms.masks import completion_masks
from covey.rollout.scoring import HasAnswer, has_text
from covey.types import Batch, BoolArray, Group, IntArray, Teacher, Trajectory

if TYPE_CHECKING:
    from covey.config.algorithm import AlgorithmConfig
    from covey.config.environment import EnvironmentConfig
    from covey.config.whole import GRPOConfig


class Score(Protocol):
    """`[N, T]` log-probabilities of a batch's sampled tokens, 0 beyond a row's end; under the reference policy in place
    of the policy, or with the temperature divided by `sharper`.
    """

    def __call__(self, batch: Batch, *, reference: bool = False, sharper: float = 1.0) -> NDArray[np.float32]: ...


def make_batch(
    groups: Sequence[Group],
    config: GRPOConfig,
    *,
    reward_weights: Sequence[float],
    has_answer: HasAnswer = has_text,
    score: Score | None = None,
    teacher: Teacher | None = None,
) -> Batch:
    """Advantages and masks of all episodes of a step.

    Example: two groups of two, rewards [0, 1] and [1, 1], three sampled tokens each:

        group        [0 0 1 1]
        advantages   [-.7 -.7 -.7], [.7 .7 .7], [0 0 0], [0 0 0]

    Masked completions still count in their group's mean: only their tokens leave the loss. What `down_sampling` leaves
    out is masked too, and counts in the mean as its statistics say.

    There is a weight for each reward function, in the order of `Group.reward_parts`. The validity mask asks
    `has_answer`, and an estimator that states `needs_reference` or `needs_sum_pi_squared` asks `score`.

    Raises `ConfigError`: The estimator is somebody's own and raised, or returned what are no advantages.
    """
    algorithm, environment = config.algorithm, config.environment
    if algorithm.selection is not None:
        rows, compared = chosen(groups, algorithm.selection)
        every = config.model_copy(update={"algorithm": algorithm.model_copy(update={"down_sampling": "none"})})
        how: dict[str, Any] = {"has_answer": has_answer, "score": score, "teacher": teacher}

        def all_of(some: Sequence[Group]) -> Batch:
            return make_batch(some, every, reward_weights=reward_weights, **how)

        if compared is groups:
            return _without(all_of(groups), rows)
        batch = _without_advantages(groups, algorithm, environment, has_answer)
        some = all_of(compared) if rows.any() else batch
        advantages = spread_over(rows, some.advantages, batch.advantages)
        theirs = some.teacher
        if theirs is not None and len(theirs.logprobs) < len(rows):
            theirs = theirs.of(np.where(rows, np.cumsum(rows) - 1, -1), batch.mask.shape[1])
        batch = replace(batch, advantages=advantages, teacher=theirs, group_relative=some.group_relative)
        return _without(batch, rows)
    estimator = algorithm.estimator
    batch = _without_advantages(groups, algorithm, environment, has_answer)
    tokens: dict[str, Any] = {"logprobs": batch.old_logprobs}
    if score is not None and estimator.needs_reference:
        tokens["reference"] = score(batch, reference=True)
    if score is not None and estimator.needs_sum_pi_squared:
        # log sum p^2 = logsumexp(2 x) - 2 logsumexp(x), for logits x; a token's log-probability is x - logsumexp(x),
        # and at half the temperature 2 x - logsumexp(2 x).
        tokens["sum_pi_squared"] = np.exp(np.minimum(2 * score(batch) - score(batch, sharper=2.0), 0.0))
    how_taught = algorithm.teacher
    if teacher is not None and how_taught is not None:
        batch = replace(batch, teacher=teacher(groups, batch))
    if batch.teacher is not None and how_taught is not None and how_taught.term is None:
        from covey.algorithms.teaching import gap, prepared  # loaded where there is a teacher

        # the ratio of the loss starts from the same: with a correction from the trainer's own
        old = batch.old_logprobs if algorithm.correction is None or score is None else score(batch)
        gaps = gap(batch.teacher.logprobs, old, skip=how_taught.skip_tokens, clip=how_taught.clip)
        shape = {"discount": how_taught.discount, "position_slope": how_taught.position_slope}
        tokens["gaps"] = prepared(gaps, use=how_taught.use, **shape)
    if any(group.trajectories for group in groups):
        advantages = agent_advantages(groups, estimator, algorithm, environment, tokens)
    else:
        tokens["mask"] = batch.sampled
        advantages = completion_advantages(groups, estimator, config, reward_weights, tokens)
    on_tokens = np.where(batch.sampled, advantages, 0.0).astype(np.float32)
    return replace(batch, advantages=on_tokens, group_relative=estimator.group_relative)


def _without(batch: Batch, rows: BoolArray) -> Batch:
    """The batch with all but these rows left out by `down_sampling`."""
    left_out = batch.sampled & ~rows[:, None]
    return replace(
        batch,
        advantages=np.where(left_out, np.float32(0), batch.advantages),
        mask=batch.mask & ~left_out,
        excluded={**batch.excluded, "down_sampling": left_out},
    )


def chosen(groups: Sequence[Group], selection: DownSampling) -> tuple[BoolArray, Sequence[Group]]:
    """What is trained on: `[N]` True for its episodes, and the groups within which advantages are compared."""
    kept = [selection(group) for group in groups]
    rows = np.concatenate([_episodes_of(group, own) for group, own in zip(groups, kept, strict=True)])
    if selection.statistics == "group" or rows.all():
        return rows, groups
    return rows, [_some(group, own) for group, own in zip(groups, kept, strict=True)]


def spread_over(rows: BoolArray, values: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
    """`[n, t]` values of the n rows that are True, where `like` `[N, T]` has them, 0 elsewhere."""
    if len(values) == len(rows):
        return values
    whole = np.zeros(like.shape, values.dtype)
    whole[rows, : values.shape[1]] = values
    return whole


def _episodes_of(group: Group, kept: BoolArray) -> BoolArray:
    """`[episodes]` which of a group's episodes belong to completions, or trajectories, that are kept."""
    if not group.trajectories:
        return kept
    return np.repeat(kept, [len(trajectory.episodes) for trajectory in group.trajectories])


def _some(group: Group, kept: BoolArray) -> Group:
    """The group as if only these had been sampled."""
    episodes = tuple(compress(group.episodes, _episodes_of(group, kept)))
    parts = {name: values[kept] for name, values in group.reward_parts.items()}
    trajectories = tuple(compress(group.trajectories, kept))  # none of single answers
    more: dict[str, Any] = {"reward_parts": parts, "trajectories": trajectories}
    return replace(
        group, episodes=episodes, rewards=group.rewards[kept], feedback=tuple(compress(group.feedback, kept)), **more
    )


def _without_advantages(
    groups: Sequence[Group], algorithm: AlgorithmConfig, environment: EnvironmentConfig, has_answer: HasAnswer
) -> Batch:
    episodes = tuple(episode for group in groups for episode in group.episodes)
    exists = np.arange(max(e.num_sampled for e in episodes))[None, :] < np.array([[e.num_sampled] for e in episodes])
    ends, texts = [episode.finish_reason for episode in episodes], [episode.text for episode in episodes]
    owners = [group.prompt for group in groups for _ in group.episodes]
    keep = completion_masks(algorithm, ends, texts, lambda: list(map(has_answer, owners, texts)))
    if (failed := of_failed(groups, environment)).any():
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


def trajectory_rewards(trajectories: Sequence[Trajectory], environment: EnvironmentConfig) -> NDArray[np.float64]:
    """`[G]` reward of each trajectory; NaN for one that is excluded."""
    excluded = environment.failed_episodes == "exclude"
    return np.array([np.nan if excluded and t.ended == "failed" else t.reward for t in trajectories], np.float64)


def completion_advantages(
    groups: Sequence[Group],
    estimator: Estimator,
    config: GRPOConfig,
    reward_weights: Sequence[float],
    tokens: dict[str, Any],
) -> NDArray[np.float64]:
    """`[N, 1]` or `[N, T]` advantages of single answers; the overlong punishment is one more part of weight 1.

    `tokens` are `mask`, `logprobs` and `reference` of `Outcomes`, each `[N, T]`.
    """
    parts = [np.concatenate([group.reward_parts[name] for group in groups]) for name in groups[0].reward_parts]
    weights = list(reward_weights)
    if (cache := config.rewards.soft_overlong_cache) > 0:
        lengths = tokens["mask"].sum(axis=1)
        punishment = soft_overlong_punishment(lengths, config.sampling.max_completion_length, cache)
        # A completion that no function could score stays unscored: its length alone says nothing about it.
        unscored = np.isnan(np.concatenate([group.rewards for group in groups]))
        parts.append(np.where(unscored, np.nan, punishment))
        weights.append(1.0)
    together, sizes = np.stack(parts), [len(group.episodes) for group in groups]
    return estimator.checked(
        Outcomes(
            np.asarray(combine_rewards(together, np.array(weights))),
            np.repeat(np.arange(len(groups)), sizes),
            **config.algorithm.scaling,
            parts=together,
            weights=np.array(weights),
            greedy=np.repeat([group.greedy_reward for group in groups], sizes),
            **tokens,
        )
    )


def agent_advantages(
    groups: Sequence[Group],
    estimator: Estimator,
    algorithm: AlgorithmConfig,
    environment: EnvironmentConfig,
    tokens: dict[str, Any] | None = None,
) -> NDArray[np.float64]:
    """`[N, T]` advantage of each sampled token of the groups' episodes, 0 beyond their ends.

    The estimator is given one row for each trajectory that has a turn: the tokens of all its episodes, one after
    another. A token that belongs to no turn has advantage 0. `tokens` are `logprobs` and `reference` of `Outcomes`,
    `[N, T]` in the order of the episodes.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    width = max((episode.num_sampled for episode in episodes), default=0)
    table = _TurnTable(groups, environment)
    if not table.rows:
        return np.zeros((len(episodes), width))
    # where each token of a trajectory is among the batch's: row and column
    places = [[(row, column) for row in rows for column in range(episodes[row].num_sampled)] for rows in table.rows]
    length = max(len(own) for own in places)
    row, column = np.zeros((2, len(places), length), np.int64)
    of_token = np.full((len(places), length), -1)
    for number, (rows, own) in enumerate(zip(table.rows, places, strict=True)):
        row[number, : len(own)], column[number, : len(own)] = np.array(own, np.int64).reshape(-1, 2).T
        turn = [table.turn_at.get((r, s), -1) for r in rows for s in segment_of_token(episodes[r].sampled).tolist()]
        of_token[number, : len(own)] = turn
    mask = of_token >= 0
    own_tokens: dict[str, Any] = {name: np.where(mask, x[row, column], 0.0) for name, x in (tokens or {}).items()}
    values = estimator.checked(
        Outcomes(
            table.reward,
            np.array(table.group),
            **algorithm.scaling,
            mask=mask,
            greedy=np.array([groups[index].greedy_reward for index in table.group]),
            turns=table.turns(of_token),
            **own_tokens,
        )
    )
    out = np.zeros((len(episodes), width))
    out[row[mask], column[mask]] = np.broadcast_to(values, mask.shape)[mask]
    return out


def segment_of_token(sampled: NDArray[np.bool_]) -> IntArray:
    """`[T]` to which sampled segment each sampled token belongs, from 0; mask [0 1 1 0 1] gives [0 0 1]."""
    begins = sampled & ~np.concatenate([[False], sampled[:-1]])
    return np.asarray((np.cumsum(begins) - 1)[sampled], dtype=np.int64)


def of_failed(groups: Sequence[Group], environment: EnvironmentConfig) -> BoolArray:
    """`[N]` episodes of trajectories that an environment's failure ended, where these are excluded."""
    rows: list[bool] = []
    for group in groups:
        if not group.trajectories:
            rows += [False] * len(group.episodes)
        for trajectory in group.trajectories:
            excluded = trajectory.ended == "failed" and environment.failed_episodes == "exclude"
            rows += [excluded] * len(trajectory.episodes)
    return np.array(rows, np.bool_)


class _TurnTable:
    """All trajectories with turns, and one entry for each of their turns."""

    def __init__(self, groups: Sequence[Group], environment: EnvironmentConfig) -> None:
        self.rows: list[list[int]] = []
        self.group: list[int] = []
        self.turn_at: dict[tuple[int, int], int] = {}
        self._turns: list[tuple[int, str, float]] = []  # trajectory, observation, own reward
        reward: list[float] = []
        row = 0
        for index, group in enumerate(groups):
            rewards = trajectory_rewards(group.trajectories, environment)
            for trajectory, earned in zip(group.trajectories, rewards, strict=True):
                for turn in trajectory.turns:
                    self.turn_at[row + turn.row, turn.segment] = len(self._turns)
                    self._turns.append((len(self.rows), turn.observation, turn.reward))
                if trajectory.turns:
                    self.rows.append(list(range(row, row + len(trajectory.episodes))))
                    self.group.append(index)
                    reward.append(earned)
                row += len(trajectory.episodes)
        self.reward = np.array(reward, np.float64)

    def turns(self, of_token: IntArray) -> Turns:
        """The turns, with the turn of each token of the trajectories."""
        trajectory, anchors, own = zip(*self._turns, strict=True)
        of = np.array(trajectory)
        reward = self.reward[of]
        earned = np.where(np.isnan(reward), np.nan, own)
        return Turns(of, np.array(self.group)[of], reward, earned, list(anchors), of_token)
