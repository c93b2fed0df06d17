"""The `environment` section: worlds in which agents act for several turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from covey.config.section import Section, Texts
from covey.types import ActionFormat


class EnvironmentConfig(Section, frozen=True):
    """The world, how its episodes are played, and how turns are rewarded."""

    world: str | None = None
    """The world to act in, with options: house, house:rooms=4, gymnasium:env=FrozenLake-v1, or your own as
    FILE.py:WORLD or FILE.py:WORLD:size=9. none = prompts with single answers."""
    tools: Texts = ()
    """Functions that the model may call while it answers prompts: FILE.py:FUNCTION, "mcp:COMMAND" or "mcp:URL" (an MCP
    server). Rewards are those of the task."""
    max_turns: int | None = Field(default=None, ge=1)
    """Most turns of an episode; none = the world's own limit, with tools no limit."""
    history_length: int | None = Field(default=None, ge=0)
    """Give each turn its own prompt, with this many earlier turns; 2 is usual. none = one growing conversation, whose
    KV cache is kept between turns."""
    action_format: ActionFormat = "text"
    """How the action is read from a turn: text (its first line), turn (all of it), tags (<action>...</action>), call (a
    function call: its name and arguments as JSON), choice (only an admissible action can be sampled)."""
    show_actions: bool = True
    """List the admissible actions after each observation."""
    invalid_action_penalty: float = Field(default=0.0, ge=0)
    """Penalty subtracted from the reward of a turn without a valid action."""
    failed_episodes: Literal["exclude", "score"] = "exclude"
    """What to do with episodes that end because the environment failed. exclude: leave them out of their group and the
    loss. score: keep the reward so far."""
    max_observation_tokens: int = Field(default=512, ge=1)
    """Longest observation or result of a tool, in tokens. Longer ones are cut, and a metric counts them."""
    max_conversation_tokens: int = Field(default=1024, ge=2)
    """Longest conversation after the first prompt, in tokens; a longer episode ends. Memory grows with it. With
    history_length: longest prompt with history, in tokens; older turns are dropped."""
    parallel_episodes: int = Field(default=64, ge=1)
    """Episodes played at the same time, each in its own process."""
    step_seconds: float = Field(default=20.0, gt=0, le=1e9)
    """Time limit for a step of the environment or a call of a tool, in seconds; a reset may take three times as
    long."""

    def problems(self) -> Iterator[str]:
        """Settings that do not go with tools."""
        for name, why in {
            "world": "a world brings its own actions",
            "history_length": "answers with tools are one conversation",
            **dict.fromkeys(("show_actions", "invalid_action_penalty"), "it acts in worlds alone"),
            "action_format": "calls are read as the model's chat template writes them",
        }.items():
            if self.tools and getattr(self, name) != type(self).model_fields[name].default:
                yield f"tools={list(self.tools)} and {name}={getattr(self, name)!r}: {why}; remove one of them"
        for tool in self.tools:
            if not tool.removeprefix("mcp:").strip():
                yield f"tools={tool!r}: names no tool; write FILE.py:FUNCTION, mcp:COMMAND or mcp:URL"
