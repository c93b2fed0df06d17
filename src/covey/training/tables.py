"""The table of completions that a step leaves in the run folder: what was asked, answered and given for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.rollout.batching import segment_of_token
from covey.tasks.pictures import with_pictures
from covey.types import Batch, BoolArray, Episode, Group, Trajectory, Turn


def completion_rows(
    groups: Sequence[Group],
    batch: Batch | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
    correct: BoolArray | None = None,
    penalty: float = 0.0,
    of_episode: NDArray[np.float32] | None = None,
) -> list[dict[str, Any]]:
    """A row for each completion, or trajectory: what was asked, answered and given for it, and why tokens were masked.

    Args:
        groups: of a step or an evaluation.
        batch: that the step trained on; None = nothing was trained on them.
        columns: what reward functions logged beside their rewards; one with another number of entries is left out
            (with dynamic sampling, entries of discarded groups are among them).
        correct: one entry for each completion.
        penalty: for an agent's turn without a valid action, which its rewards have in them.
        of_episode: `[N, T]` the part of the batch's advantages that is the whole episode's, where it is known.
    """
    rows: list[dict[str, Any]] = []
    first = 0
    for number, group in enumerate(groups):
        scored = group.rewards[~np.isnan(group.rewards)]
        for sample in range(len(group.rewards)):
            entry: dict[str, Any] = {"group": number, "sample": sample, "uid": group.prompt.uid}
            if group.trajectories:
                trajectory = group.trajectories[sample]
                episodes: Sequence[Episode] = trajectory.episodes
                entry |= _trajectory_row(group, sample, penalty)
                entry["play"] = json.dumps(_play(trajectory, first, batch, of_episode))
            else:
                episodes = (group.episodes[sample],)
                entry |= _answer_row(group, sample)
                if group.with_tools:
                    said = group.with_tools[sample]
                    entry |= {"completion": transcript(said), "turns": len(said.turns), "no_actions": 0}
                    entry |= {"ended": said.ended, "error": said.error}
                    entry["play"] = json.dumps(_play(said, first, batch, of_episode))
                if correct is not None:
                    entry["correct"] = bool(correct[len(rows)])
            if batch is not None:
                entry |= _trained(batch, first, episodes)
                if group.trajectories:
                    entry |= _turns_trained(trajectory, batch, first)
                entry |= {
                    "group_mean": float(scored.mean()) if len(scored) else float("nan"),
                    "group_std": float(scored.std()) if len(scored) else float("nan"),
                    "group_tied": group.is_tied,
                }
            first += len(episodes)
            rows.append(entry)
    for name, values in (columns or {}).items():
        if len(values) == len(rows):
            for entry, value in zip(rows, values, strict=True):
                entry.setdefault(name, value)
    return rows


def _answer_row(group: Group, sample: int) -> dict[str, Any]:
    prompt, episode = group.prompt, group.episodes[sample]
    return {
        "prompt": said
        if isinstance(said := with_pictures(prompt.content, attrgetter("sha256")), str)
        else json.dumps(said),
        "completion": episode.text,
        "reward": float(group.rewards[sample]),
        "length": episode.num_sampled,
        "finish_reason": episode.finish_reason,
        "policy_version": episode.policy_version,
        **{f"rewards/{name}": float(values[sample]) for name, values in group.reward_parts.items()},
        **({"kind": str(prompt.columns["kind"])} if "kind" in prompt.columns else {}),
    }


def _trajectory_row(group: Group, sample: int, penalty: float) -> dict[str, Any]:
    """All of a trajectory to read; its reward in two parts, of the world and of words without an action."""
    trajectory = group.trajectories[sample]
    invalid = sum(not turn.valid for turn in trajectory.turns)
    return {
        "type": str(group.prompt.columns.get("type", "")),
        "prompt": trajectory.turns[0].observation if trajectory.turns else "",
        "completion": transcript(trajectory),
        "reward": float(group.rewards[sample]),
        "correct": trajectory.success,
        "turns": len(trajectory.turns),
        "no_actions": invalid,
        "length": sum(episode.num_sampled for episode in trajectory.episodes),
        "ended": trajectory.ended,
        "error": trajectory.error,
        "policy_version": min((episode.policy_version for episode in trajectory.episodes), default=-1),
        "rewards/world": trajectory.reward + penalty * invalid,
        "rewards/invalid_actions": -penalty * invalid,
    }


def _trained(batch: Batch, first: int, episodes: Sequence[Episode]) -> dict[str, Any]:
    """What the tokens of a completion got, whose episodes are the batch's rows from `first` on."""
    rows = slice(first, first + len(episodes))
    exists = batch.sampled[rows]
    given = batch.advantages[rows][exists].astype(np.float64)
    return {
        "row": first,
        "advantage": float(given[0] if (given == given[:1]).all() else given.mean()) if len(given) else 0.0,
        "masked_by": ", ".join(name for name, tokens in batch.excluded.items() if tokens[rows].any()),
        "logp": float(batch.old_logprobs[rows][exists].sum(dtype=np.float64)),
    }


def _turns_trained(trajectory: Trajectory, batch: Batch, first: int) -> dict[str, Any]:
    """Reward and advantage of each turn, whose tokens all have the same one unless an estimator says otherwise."""
    places = [segment_of_token(episode.sampled) for episode in trajectory.episodes]
    begins = [int(np.argmax(places[turn.row] == turn.segment)) for turn in trajectory.turns]
    return {
        "turn_rewards": [turn.reward for turn in trajectory.turns],
        "turn_advantages": [
            float(batch.advantages[first + turn.row, begin])
            for turn, begin in zip(trajectory.turns, begins, strict=True)
        ],
    }


_MOST_TURNS, _LONGEST_TEXT = 200, 4_000


def _play(
    trajectory: Trajectory, first: int, batch: Batch | None, of_episode: NDArray[np.float32] | None
) -> list[dict[str, Any]]:
    """Each turn with its credit, for who reads along: texts are cut, and turns beyond 200 left out.

    `advantage` is the mean over the turn's tokens, `of_episode` the part of it that the whole episode has, where an
    estimator tells it (the rest is the turn's own), `masked_by` names the masks that took any of them, and `row` is the
    batch's row that has them.
    """
    segments = [segment_of_token(episode.sampled) for episode in trajectory.episodes]
    turns = []
    for turn in trajectory.turns[:_MOST_TURNS]:
        row, own = first + turn.row, np.flatnonzero(segments[turn.row] == turn.segment)
        told: dict[str, Any] = {
            "seen": f"{_marks(turn)}{turn.observation}"[:_LONGEST_TEXT],
            "pictures": [picture.sha256 for picture in turn.pictures],
            "said": turn.said[:_LONGEST_TEXT],
            "action": None if turn.action is None else turn.action[:_LONGEST_TEXT],
            "reward": float(turn.reward),
            "valid": turn.valid,
            "tokens": len(own),
        }
        if batch is not None:
            told["row"] = row
            told["advantage"] = float(batch.advantages[row, own].mean()) if len(own) else 0.0
            if of_episode is not None:
                told["of_episode"] = float(of_episode[row, own].mean()) if len(own) else 0.0
            told["masked_by"] = ", ".join(name for name, out in batch.excluded.items() if out[row, own].any())
        turns.append(told)
    return turns


def _marks(turn: Turn) -> str:
    """The pictures that were seen, by the first digits of their hashes."""
    return "".join(f"[picture {picture.sha256[:8]}]" for picture in turn.pictures)


def transcript(trajectory: Trajectory, said: str = "> ", seen: str = "") -> str:
    """What was seen, said and earned, as text to read; `said` and `seen` mark what the policy and others said."""
    lines = []
    for turn in trajectory.turns:
        note = "" if turn.valid else "  (no valid action)"
        earned = f"  [{turn.reward:+g}]" if turn.reward else ""
        told = f"{seen}{_marks(turn)}{turn.observation}\n" if turn.observation or turn.pictures else ""
        lines.append(f"{told}{said}{turn.said.strip()}{note}{earned}")
    return "\n".join([*lines, f"({trajectory.error or trajectory.ended})"])
