"""Episodes that a world's own expert plays: its actions, dictated as turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from covey.environments.actions import write_action
from covey.errors import ConfigError, EpisodeError
from covey.rollout.agents import LiveEpisode, Player
from covey.rollout.turns import Device, Drawn, Row, Session
from covey.types import SamplingSettings


class ExpertPlayer(Player):
    """Plays what the expert of each environment would do. The arguments are those of `Player`."""

    def choices(self, live: LiveEpisode) -> tuple[tuple[int, ...], ...]:
        """The expert's action, as tokens, and the end of the turn.

        Raises `EpisodeError`: the world has no expert, or it failed: this episode ends; `ConfigError`: a turn is too
        short for the action.
        """
        action = self.pool.expert_action(live.place)
        if action is None:
            raise EpisodeError("expert_action knows no action here; imitation needs a world with an expert")
        format = self.settings.action_format
        turn = (*self.tokens_of(write_action(action, format)), *self.ends_turn)
        if len(turn) > self.longest_turn:
            raise ConfigError(
                f"the expert's action {action!r:.80} takes {len(turn)} tokens in the form that "
                f"environment.action_format={format!r} asks for, and a turn has {self.longest_turn}; set "
                f"sampling.max_completion_length to {len(turn)} or more"
            )
        return (turn,)


class Dictation:
    """Opens sessions in which a turn is the only one of its choices."""

    def __init__(self, context_length: int) -> None:
        self._context_length = context_length

    def session(self, settings: SamplingSettings, *, policy_version: int, own_tokens: int, **more: Any) -> Session[Any]:
        """See `covey.rollout.turns.TurnGenerator`."""
        return Session(_Dictating(self._context_length, own_tokens), settings, policy_version=policy_version)


class _Dictating(Device):
    """Says what is to be said, all of it at once, with probability 1."""

    def begin(self, queue: deque[Row]) -> Iterator[Drawn]:
        yield _said(queue)

    def extend(self, resuming: list[Row]) -> Iterator[Drawn]:
        yield _said(resuming)

    def decode(self, waiting: int) -> Iterator[Drawn]:
        return iter(())


def _said(waiting: deque[Row] | list[Row]) -> Drawn:
    rows, turns = list(waiting), []
    waiting.clear()
    for row in rows:
        assert row.choices is not None
        turns.append(row.choices[0])
        row.choices = None  # what could have been said is not to be recorded
    tokens = np.full((len(rows), max(map(len, turns))), -1)
    for number, turn in enumerate(turns):
        tokens[number, : len(turn)] = turn
    return Drawn(rows, tokens, np.zeros(tokens.shape, np.float32))
