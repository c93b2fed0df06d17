"""What playing episodes needs and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

import numpy as np

from covey.environments.actions import ActionFormat
from covey.rollout.turns import Session
from covey.types import SamplingSettings, Trajectory


class TurnGenerator(Protocol):
    """Opens sessions. An engine that is not one of Covey's gives a `Session` its own `Device`."""

    def session(
        self,
        settings: SamplingSettings,
        *,
        policy_version: int,
        rows: int,
        own_tokens: int,
        prompt_lengths: Sequence[int],
    ) -> Session[Any]: ...


@dataclass(frozen=True, slots=True)
class PlaySettings:
    """How episodes are played. Names are those of the `environment` section.

    Attributes:
        max_turns: actions after which an episode ends.
        context_mode: "conversation", one growing sequence, or "steps", a prompt of its own for each turn.
        history_length: earlier turns that a prompt of its own shows.
        action_format: how a turn is read as an action.
        show_actions: list the admissible actions after the observation.
        invalid_action_penalty: subtracted for a turn that is no action.
        max_observation_tokens: an observation is cut to its first so many tokens.
        max_conversation_tokens: after the opening, in "conversation" mode.
        max_prompt_tokens: of a turn, in "steps" mode: room that is reserved.
    """

    max_turns: int
    context_mode: Literal["conversation", "steps"] = "conversation"
    history_length: int = 2
    action_format: ActionFormat = "text"
    show_actions: bool = True
    invalid_action_penalty: float = 0.0
    max_observation_tokens: int = 512
    max_conversation_tokens: int = 1024
    max_prompt_tokens: int = 1024


@dataclass(slots=True)
class PlayStats:
    """What playing cost; that of several calls adds up.

    Attributes:
        seconds: of it all.
        waiting_seconds: nothing could be sampled, since every live episode waited for its world.
        turns: turns played.
        no_actions: turns that were not valid actions.
        cut_observations: observations that were too long.
        failures: episodes that an environment's failure ended.
    """

    seconds: float = 0.0
    waiting_seconds: float = 0.0
    turns: int = 0
    no_actions: int = 0
    cut_observations: int = 0
    failures: int = 0

    def __add__(self, other: PlayStats) -> PlayStats:
        return PlayStats(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


def play_metrics(trajectories: Sequence[Trajectory], stats: PlayStats) -> dict[str, float]:
    """Defined in `covey.observe.metric_names`."""
    turns = max(stats.turns, 1)
    return {
        "agent/success": float(np.mean([t.success for t in trajectories])),
        "agent/turns": float(np.mean([len(t.turns) for t in trajectories])),
        "agent/no_action_ratio": stats.no_actions / turns,
        "agent/failed_ratio": stats.failures / len(trajectories),
        "agent/failed_episodes": float(stats.failures),
        "agent/cut_short_ratio": float(np.mean([t.ended in ("turns", "context") for t in trajectories])),
        "agent/full_context_ratio": float(np.mean([t.ended == "context" for t in trajectories])),
        "agent/cut_observations": float(stats.cut_observations),
        "agent/waiting_share": stats.waiting_seconds / stats.seconds if stats.seconds else 0.0,
    }
