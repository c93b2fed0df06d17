"""The `rewards` section: how reward functions are combined and bounded."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, field_validator, model_validator

NO_TIMEOUT = 1e9
"""Functions are called in the main thread then, where they may use signals."""


class RewardConfig(BaseModel, extra="forbid", frozen=True, strict=True, allow_inf_nan=False):
    """Which rewards there are, their weights, their time limit, and the punishment of overlong answers."""

    functions: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(),
        description="Reward functions by name, for the command line: FILE.py:FUNCTION or MODULE:FUNCTION; "
        "none given = those of the task.",
    )
    reward_weights: Annotated[tuple[float, ...], Field(strict=False)] | None = Field(
        default=None, description="One weight for each reward function, in their order; none = 1 for each."
    )
    correctness: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the reward function that says which completions are right: 1 = right, 0 = wrong. "
        "Without a task, accuracy, prompt_weighting and min_accuracy need it; none = the task says so, or nothing "
        "does.",
    )
    reward_timeout: float = Field(
        default=60.0,
        gt=0,
        le=NO_TIMEOUT,
        description="Seconds that one call of a reward function may take before the run stops; 1e9 = no limit.",
    )
    soft_overlong_cache: int = Field(
        default=0,
        ge=0,
        description="Soft overlong punishment (DAPO): the reward falls linearly by up to 1 over the last "
        "this many tokens before max_completion_length; 0 = off.",
    )

    @field_validator("functions", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _weights_say_something(self) -> Self:
        if self.reward_weights is not None and not any(self.reward_weights):
            raise ValueError(
                f"reward_weights={list(self.reward_weights)}: with no weight above or below 0 every reward "
                "is 0; give each reward function that counts a weight, or remove rewards.reward_weights"
            )
        return self
