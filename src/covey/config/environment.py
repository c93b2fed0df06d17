"""The `environment` section: worlds in which agents act for several turns."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from covey.environments.actions import ActionFormat


class EnvironmentConfig(BaseModel, extra="forbid", frozen=True, strict=True, allow_inf_nan=False):
    """The world, how its episodes are played, and how their turns get credit."""

    world: str | None = Field(
        default=None,
        description="A world to act in, by name with options (house, house:rooms=4, gymnasium:env=FrozenLake-v1) or in "
        "a file (FILE.py:WORLD, FILE.py:WORLD:size=9); none = prompts with single answers.",
    )
    max_turns: int | None = Field(
        default=None, ge=1, description="Actions after which an episode ends; none = what the world says."
    )
    context_mode: Literal["conversation", "steps"] = Field(
        default="conversation",
        description="conversation: one growing sequence, keys and values kept between turns; steps: each turn has a "
        "prompt of its own with the last history_length turns.",
    )
    history_length: int = Field(default=2, ge=0, description="Earlier turns that a prompt of its own shows.")
    action_format: ActionFormat = Field(
        default="text",
        description="How a turn is read as an action: text (its first line), tags (<action>...</action>), tool (a call "
        "in JSON), choice (nothing but an admissible action can be sampled).",
    )
    show_actions: bool = Field(default=True, description="List the admissible actions after each observation.")
    invalid_action_penalty: float = Field(
        default=0.0, ge=0, description="Subtracted from the reward of a turn that is no valid action."
    )
    step_score: Literal["episode", "return", "step"] = Field(
        default="episode",
        description="What adv_estimator grpo compares: the reward of a turn's whole episode, the discounted return "
        "from the turn on, or the turn's own reward.",
    )
    discount: float = Field(default=1.0, ge=0, le=1, description="Of later rewards in returns (step_score, gigpo).")
    step_advantage_weight: float = Field(
        default=1.0, ge=0, description="Weight of the step advantage in adv_estimator gigpo (the paper's omega)."
    )
    failed_episodes: Literal["exclude", "score"] = Field(
        default="exclude",
        description="Episodes that an environment's failure ended: left out of their group and of the loss, or scored "
        "with what they had earned.",
    )
    max_observation_tokens: int = Field(
        default=512, ge=1, description="A longer observation is cut to its first so many tokens, and counted."
    )
    max_conversation_tokens: int = Field(
        default=1024,
        ge=2,
        description="Tokens of a conversation after its opening; an episode that would need more ends. Memory is "
        "taken as conversations grow.",
    )
    max_turn_prompt_tokens: int = Field(
        default=1024, ge=1, description="With context_mode steps: most tokens of a prompt with history; older turns go."
    )
    parallel_episodes: int = Field(
        default=64, ge=1, description="Episodes at once, each in an environment process of its own."
    )
    reset_seconds: float = Field(default=60.0, gt=0, le=1e9, description="Time limit of an environment's reset.")
    step_seconds: float = Field(default=20.0, gt=0, le=1e9, description="Time limit of an environment's step.")
