"""What is measured: of a policy on held-out problems, with a 95 % interval, and of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from covey.algorithms import Estimator, soft_overlong_punishment
from covey.observe.doctor import ANSWER, constant_answer
from covey.observe.statistics import wilson_interval
from covey.rollout.collect import Collector, Rollout
from covey.rollout.scoring import HasAnswer, IsCorrect, Scorer, has_text, right_by
from covey.training.questions import Answers
from covey.types import BoolArray, Progress, Prompt, SamplingSettings

EVALUATION_STREAM = 1
"""Second entry of every evaluation request's random stream (0 is training), so that the two never share numbers."""

NOTHING_JUDGED = "the environment failed in every episode, so nothing is known of the policy's accuracy"

MAX_KINDS = 20
"""Accuracy is told kind by kind where rows name from 2 to so many kinds."""


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Result of one evaluation."""

    metrics: dict[str, float]
    rollout: Rollout
    correct: BoolArray | None

    @property
    def judged(self) -> BoolArray:
        """`[N]` which completions say something of the policy; see `judged_completions`."""
        return judged_completions(self.rollout)

    @property
    def constant(self) -> dict[str, str]:
        """The text of most answers, by `ANSWER`, if `constant_answer` tells of it; else nothing."""
        if not constant_answer(self.metrics):
            return {}
        texts = Counter(group.episodes[0].text.strip() for group in self.rollout.groups)
        return {ANSWER: texts.most_common(1)[0][0][:200]}


def evaluate(
    prompts: Sequence[Prompt],
    collect: Collector,
    settings: SamplingSettings,
    *,
    policy_version: int,
    seed: int,
    is_correct: IsCorrect | None = None,
    has_answer: HasAnswer = has_text,
    samples: int = 1,
    progress: Progress | None = None,
) -> Evaluation:
    """Sample `samples` completions, or play `samples` episodes, of each held-out prompt, and count the correct ones.

    Accuracy is the share of completions for which `is_correct` holds, of episodes that end in success; an episode that
    its environment's failure ended is left out. Without `is_correct`, or with every episode failed, there is none.

    The interval is Wilson's over the completions; with `samples` above 1 completions of one prompt are not independent,
    and the interval is too narrow: use 1 to quote a number.
    """
    rollout = collect(
        prompts,
        settings,
        num_generations=samples,
        streams=[(seed, EVALUATION_STREAM, index) for index in range(len(prompts))],
        policy_version=policy_version,
        progress=progress,
    )
    rewards = np.concatenate([group.rewards for group in rollout.groups])
    episodes = [episode for group in rollout.groups for episode in group.episodes]
    lengths = np.array([episode.num_sampled for episode in episodes])
    metrics = {
        "eval/reward": _mean(rewards),
        "eval/num_completions": float(judged_completions(rollout).sum()),
        "eval/completions/mean_length": float(lengths.mean()),
        "eval/completions/clipped_ratio": float(np.mean([e.finish_reason == "length" for e in episodes])),
        "eval/completions/no_answer_ratio": no_answer_ratio(rollout, has_answer),
        "eval/seconds": rollout.sampling_seconds + rollout.scoring_seconds,
    }
    metrics |= {f"eval/{name}": value for name, value in rollout.metrics.items()}
    for name in rollout.groups[0].reward_parts:
        metrics[f"eval/rewards/{name}/mean"] = _mean(np.concatenate([g.reward_parts[name] for g in rollout.groups]))
    if samples == 1 and not any(group.trajectories for group in rollout.groups):
        often = Counter(hash(episode.text.strip()) for episode in episodes)  # texts may be long
        metrics["eval/most_frequent_answer"] = max(often.values()) / len(episodes)
    correct = correct_completions(rollout, is_correct)
    if correct is not None:
        right = correct[judged_completions(rollout)]
        if len(right):
            low, high = wilson_interval(int(right.sum()), len(right))
            metrics |= {"eval/accuracy": float(right.mean()), "eval/accuracy_low": low, "eval/accuracy_high": high}
        metrics |= accuracy_by_kind(rollout, correct)
    return Evaluation(metrics, rollout, correct)


def accuracy_by_kind(rollout: Rollout, correct: BoolArray) -> dict[str, float]:
    """`eval/accuracy/<kind>` and its interval for each kind of question, so that a mean cannot hide one that fails. The
    kind is a row's column `kind`, or a world's `type`; rows that have neither do not count.

    Args:
        rollout: groups of an evaluation.
        correct: `[N]` in the order of the groups; those that are not judged do not count.
    """
    sizes = [len(group.rewards) for group in rollout.groups]
    judged = judged_completions(rollout)
    columns = [group.prompt.columns for group in rollout.groups]
    kinds = np.repeat([str(own.get("kind", own.get("type", ""))) for own in columns], sizes)[judged]
    correct = correct[judged]
    names = sorted(set(kinds.tolist()) - {""})
    metrics: dict[str, float] = {}
    for name in names if 2 <= len(names) <= MAX_KINDS else ():
        right = correct[kinds == name]
        low, high = wilson_interval(int(right.sum()), len(right))
        metrics |= {
            f"eval/accuracy/{name}": float(right.mean()),
            f"eval/accuracy_low/{name}": low,
            f"eval/accuracy_high/{name}": high,
            f"eval/num_completions/{name}": float(len(right)),
        }
    return metrics


def _mean(values: np.ndarray) -> float:
    scored = values[~np.isnan(values)]
    return float(scored.mean()) if len(scored) else float("nan")


def judged_completions(rollout: Rollout) -> BoolArray:
    """`[N]` in the order of the groups: False for episodes that their environment's failure ended, else True."""
    judged = [
        [t.ended != "failed" for t in group.trajectories or group.with_tools] or [True] * len(group.rewards)
        for group in rollout.groups
    ]
    return np.concatenate([np.array(group, np.bool_) for group in judged])


def counted_completions(rollout: Rollout) -> BoolArray:
    """`[N]` in the order of the groups: False for what a group was grown by."""
    sizes = [(len(group.rewards), group.added) for group in rollout.groups]
    return np.concatenate([np.arange(size) < size - added for size, added in sizes])


def correct_completions(rollout: Rollout, is_correct: IsCorrect | None) -> BoolArray | None:
    """`[N]` which completions are right or trajectories succeeded, in the groups' order; None = nothing says so."""
    if any(group.trajectories for group in rollout.groups):
        return np.array([t.success for group in rollout.groups for t in group.trajectories], dtype=np.bool_)
    if is_correct is None:
        return None
    if isinstance(is_correct, str):
        return right_by(is_correct, np.concatenate([group.reward_parts[is_correct] for group in rollout.groups]))
    if isinstance(is_correct, Scorer):
        owners = [group.prompt for group in rollout.groups for _ in group.episodes]
        return right_by(*is_correct.judged(owners, [e for group in rollout.groups for e in group.episodes]))
    return np.array([is_correct(g.prompt, e.text) for g in rollout.groups for e in g.episodes], dtype=np.bool_)


def with_logged(metrics: Mapping[str, Any], logged: Mapping[str, float], prefix: str = "") -> dict[str, Any]:
    """Metrics with what reward functions logged, under `logged/` where the run has something of that name itself."""
    taken = {name for name in logged if prefix + name in metrics or name == "step"}
    return {**metrics, **{prefix + "logged/" * (name in taken) + name: value for name, value in logged.items()}}


def no_answer_ratio(rollout: Rollout, has_answer: HasAnswer) -> float:
    """Share of the completions that hold no answer at all; of agents' turns, those that were no valid action."""
    if "agent/no_action_ratio" in rollout.metrics:
        return rollout.metrics["agent/no_action_ratio"]
    return float(np.mean([not has_answer(g.prompt, e.text) for g in rollout.groups for e in g.episodes]))


def rollout_metrics(rollout: Rollout, estimator: Estimator, correction: int) -> dict[str, float]:
    """Rewards and completion lengths of a step, named and defined as in `covey.metric_names`.

    Groups that dynamic sampling discarded are counted, and what groups were grown by is not: every number would be of
    what was chosen for its rewards. Spread and ties are those of the groups as they are after that.
    """
    trained, groups = rollout.whole.groups, rollout.counted.groups
    rewards = np.concatenate([group.rewards for group in groups])
    episodes = [episode for group in groups for episode in group.episodes]
    lengths = np.array([episode.num_sampled for episode in episodes])
    ended = lengths[[episode.finish_reason != "length" for episode in episodes]]
    metrics: dict[str, float] = {
        "reward": _mean(rewards),
        "reward_std": float(np.mean([_std(group.rewards, correction) for group in trained])),
        "frac_reward_zero_std": float(np.mean([not estimator.teaches(group) for group in trained])),
        "frac_reward_none": float(np.isnan(rewards).mean()),
        **{f"completions/{name}_length": float(getattr(lengths, name)()) for name in ("mean", "min", "max")},
        "completions/clipped_ratio": 1.0 - len(ended) / len(lengths),
        "time/sampling": rollout.sampling_seconds,
        "time/scoring": rollout.scoring_seconds,
    }
    for name in ("mean", "min", "max") if len(ended) else ():
        metrics[f"completions/{name}_terminated_length"] = float(getattr(ended, name)())
    metrics |= rollout.metrics
    if added := sum(group.added for group in trained):
        metrics["sampling/added_completions"] = float(added)
    if rollout.discarded:
        metrics["dynamic_sampling/discarded_groups"] = float(len(rollout.discarded))
    for name in groups[0].reward_parts:
        values = np.concatenate([group.reward_parts[name] for group in groups])
        metrics[f"rewards/{name}/mean"] = _mean(values)
        metrics[f"rewards/{name}/std"] = _std(values, correction)
        metrics[f"rewards/{name}/none"] = float(np.isnan(values).mean())
    return metrics


def overlong(rollout: Rollout, longest: int, cache: int) -> float:
    """Mean of what `rewards.soft_overlong_cache` takes off a completion's reward for its advantage."""
    lengths = np.array([episode.num_sampled for group in rollout.counted.groups for episode in group.episodes])
    return -float(np.mean(soft_overlong_punishment(lengths, longest, cache)))


def _std(values: np.ndarray, correction: int) -> float:
    scored = values[~np.isnan(values)]
    return float(scored.std(ddof=correction)) if len(scored) > correction else 0.0


def count_answers(rollout: Rollout, correct: BoolArray | None) -> Answers:
    """Right and all judged completions, or episodes, of each question; empty if nothing says what is right."""
    if correct is None:
        return {}
    answers: Answers = {}
    judged, row = judged_completions(rollout), 0
    for group in rollout.groups:
        rows = slice(row, row + len(group.rewards) - group.added)
        right = correct[rows][judged[rows]]
        if len(right):
            before = answers.get(group.prompt.uid, [0, 0])
            answers[group.prompt.uid] = [before[0] + int(right.sum()), before[1] + len(right)]
        row += len(group.rewards)
    return answers
