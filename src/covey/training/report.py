"""Numbers and rows that describe a step: what goes to metrics.jsonl and to the completions table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from covey.algorithms import Estimator
from covey.rollout.batching import HasAnswer
from covey.rollout.collect import Rollout
from covey.types import Batch, BoolArray, Group, Trajectory


def no_answer_ratio(rollout: Rollout, has_answer: HasAnswer) -> float:
    """Share of the completions that hold no answer at all; of agents' turns, those that were no valid action."""
    if "agent/no_action_ratio" in rollout.metrics:
        return rollout.metrics["agent/no_action_ratio"]
    return float(np.mean([not has_answer(g.prompt, e.text) for g in rollout.groups for e in g.episodes]))


def rollout_metrics(rollout: Rollout, estimator: Estimator, std_correction: int) -> dict[str, float]:
    """Rewards and completion lengths of a step, named and defined as in `covey.observe.metric_names`.

    Groups that dynamic sampling discarded are counted: without them every number would be of the groups that were
    chosen for their rewards.
    """
    groups = rollout.whole.groups
    rewards = np.concatenate([group.rewards for group in groups])
    scored = rewards[~np.isnan(rewards)]
    episodes = [episode for group in groups for episode in group.episodes]
    lengths = np.array([episode.num_sampled for episode in episodes])
    ended = lengths[[episode.finish_reason != "length" for episode in episodes]]
    metrics: dict[str, float] = {
        "reward": float(scored.mean()) if len(scored) else float("nan"),
        "reward_std": float(np.mean([_std(group.rewards, std_correction) for group in groups])),
        "frac_reward_zero_std": float(np.mean([not estimator.teaches(group) for group in groups])),
        "frac_reward_none": float(np.isnan(rewards).mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": 1.0 - len(ended) / len(lengths),
        "time/sampling": rollout.sampling_seconds,
        "time/scoring": rollout.scoring_seconds,
    }
    if len(ended):
        metrics["completions/mean_terminated_length"] = float(ended.mean())
        metrics["completions/min_terminated_length"] = float(ended.min())
        metrics["completions/max_terminated_length"] = float(ended.max())
    metrics |= rollout.metrics
    if rollout.discarded:
        metrics["dynamic_sampling/discarded_groups"] = float(len(rollout.discarded))
    for name in groups[0].reward_parts:
        values = np.concatenate([group.reward_parts[name] for group in groups])
        found = values[~np.isnan(values)]
        metrics[f"rewards/{name}/mean"] = float(found.mean()) if len(found) else float("nan")
        metrics[f"rewards/{name}/std"] = _std(values, std_correction)
        metrics[f"rewards/{name}/none"] = float(np.isnan(values).mean())
    return metrics


def completion_rows(
    groups: Sequence[Group],
    batch: Batch | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
    correct: BoolArray | None = None,
) -> list[dict[str, Any]]:
    """One row for each completion: what was asked, answered and given for it, and why tokens were masked.

    `correct` has one entry for each completion.

    `columns` are what reward functions logged beside their rewards; one with another number of entries is left out
    (with dynamic sampling, entries of discarded groups are among them).
    """
    rows = []
    row = 0
    for number, group in enumerate(groups):
        if group.trajectories:
            rows += _trajectory_rows(number, group)
            continue
        prompt = group.prompt.content if isinstance(group.prompt.content, str) else json.dumps(group.prompt.content)
        for sample, episode in enumerate(group.episodes):
            entry: dict[str, Any] = {
                "group": number,
                "sample": sample,
                "uid": group.prompt.uid,
                "prompt": prompt,
                "completion": episode.text,
                "reward": float(group.rewards[sample]),
                "length": episode.num_sampled,
                "finish_reason": episode.finish_reason,
                "policy_version": episode.policy_version,
            }
            entry |= {f"rewards/{name}": float(values[sample]) for name, values in group.reward_parts.items()}
            if "kind" in group.prompt.columns:
                entry["kind"] = str(group.prompt.columns["kind"])
            if correct is not None:
                entry["correct"] = bool(correct[row])
            if batch is not None:
                entry["advantage"] = float(batch.advantages[row, 0])
                entry["masked_by"] = ", ".join(name for name, tokens in batch.excluded.items() if tokens[row].any())
            rows.append(entry)
            row += 1
    for name, values in (columns or {}).items():
        if len(values) == len(rows):
            for entry, value in zip(rows, values, strict=True):
                entry.setdefault(name, value)
    return rows


def _trajectory_rows(number: int, group: Group) -> list[dict[str, Any]]:
    """One row for each trajectory, with all of it to read."""
    return [
        {
            "group": number,
            "sample": sample,
            "uid": group.prompt.uid,
            "type": str(group.prompt.columns.get("type", "")),
            "prompt": trajectory.turns[0].observation if trajectory.turns else "",
            "completion": transcript(trajectory),
            "reward": float(group.rewards[sample]),
            "correct": trajectory.success,
            "turns": len(trajectory.turns),
            "no_actions": sum(not turn.valid for turn in trajectory.turns),
            "length": sum(episode.num_sampled for episode in trajectory.episodes),
            "ended": trajectory.ended,
            "error": trajectory.error,
            "policy_version": min((episode.policy_version for episode in trajectory.episodes), default=-1),
        }
        for sample, trajectory in enumerate(group.trajectories)
    ]


def transcript(trajectory: Trajectory) -> str:
    """What was seen, said and earned, as text to read."""
    lines = []
    for turn in trajectory.turns:
        note = "" if turn.valid else "  (no valid action)"
        earned = f"  [{turn.reward:+g}]" if turn.reward else ""
        lines.append(f"{turn.observation}\n> {turn.said.strip()}{note}{earned}")
    return "\n".join([*lines, f"({trajectory.error or trajectory.ended})"])


def _std(values: np.ndarray, correction: int) -> float:
    scored = values[~np.isnan(values)]
    return float(scored.std(ddof=correction)) if len(scored) > correction else 0.0
