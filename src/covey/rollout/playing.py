"""What playing episodes needs and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from covey.environments.actions import ActionFormat
from covey.types import Completion, IntArray, Request, SamplingSettings


class TurnSession(Protocol):
    """What playing needs of a generator: conversations in one batch. `covey.pytorch.engine.Session` is one."""

    @property
    def busy(self) -> bool: ...
    def start(self, request: Request, *, keep: bool = False) -> Any: ...
    def has_room_for(self, prompt: int) -> bool: ...
    def room_for_turn(self, row: Any, said: int) -> int: ...
    def extend(
        self, row: Any, token_ids: IntArray, stream: tuple[int, ...], choices: tuple[tuple[int, ...], ...] | None = None
    ) -> None: ...
    def drop(self, row: Any) -> None: ...
    def advance(self) -> list[Any]: ...
    def completion(self, row: Any) -> Completion: ...


class TurnGenerator(Protocol):
    """Opens sessions."""

    def session(
        self,
        settings: SamplingSettings,
        *,
        policy_version: int,
        rows: int,
        own_tokens: int,
        prompt_lengths: Sequence[int],
    ) -> TurnSession: ...


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
    """What playing cost.

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
