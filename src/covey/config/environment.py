"""The `environment` section: worlds in which agents act for several turns."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from covey.config.section import Section
from covey.environments.actions import ActionFormat


class EnvironmentConfig(Section, frozen=True):
    """The world, how its episodes are played, and how their turns get credit."""

    world: str | None = None
    """The world to act in, by name with options (house, house:rooms=4, gymnasium:env=FrozenLake-v1) or in a file
    (FILE.py:WORLD, FILE.py:WORLD:size=9); none = prompts with single answers."""
    max_turns: int | None = Field(default=None, ge=1)
    """Actions after which an episode ends; none = the world's own limit."""
    history_length: int | None = Field(default=None, ge=0)
    """Each turn has its own prompt, which shows this many earlier turns; 2 is usual. none = one growing conversation,
    whose keys and values are kept between turns."""
    action_format: ActionFormat = "text"
    """How a turn is read as an action: text (its first line), tags (<action>...</action>), tool (a call in JSON),
    choice (only an admissible action can be sampled)."""
    show_actions: bool = True
    """List the admissible actions after each observation."""
    invalid_action_penalty: float = Field(default=0.0, ge=0)
    """Subtracted from the reward of a turn without a valid action."""
    failed_episodes: Literal["exclude", "score"] = "exclude"
    """Episodes that an environment's failure ended: exclude = leave them out of their group and the loss; score = keep
    the reward so far."""
    max_observation_tokens: int = Field(default=512, ge=1)
    """A longer observation is cut to this length, and counted."""
    max_conversation_tokens: int = Field(default=1024, ge=2)
    """Longest conversation after its opening, in tokens; an episode that would need more ends. Memory grows with the
    conversations. With history_length: longest prompt with history; older turns are dropped."""
    parallel_episodes: int = Field(default=64, ge=1)
    """Episodes played at the same time, each in its own process."""
    step_seconds: float = Field(default=20.0, gt=0, le=1e9)
    """Time limit of an environment's step; a reset may take three times as long."""
