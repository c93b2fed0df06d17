"""The `rewards` section: how reward functions are combined and bounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from covey.config.section import Section, Texts

NO_TIMEOUT = 1e9
"""Functions are called in the main thread then, where they may use signals."""


class RewardConfig(Section, frozen=True):
    """Reward functions, their weights, their time limit, and the penalty for long answers."""

    functions: Texts = ()
    """Reward functions: FILE.py:FUNCTION or MODULE:FUNCTION. An empty list = the task's own."""
    reward_weights: Annotated[tuple[float, ...], Field(strict=False)] | None = None
    """One weight for each reward function, in the same order; none = 1 for each."""
    correctness: str | None = Field(default=None, min_length=1)
    """The function that returns 1 for right and 0 for wrong completions: the name of a reward function, or
    FILE.py:FUNCTION or MODULE:FUNCTION for another one. Accuracy, prompt_order = difficulty and min_accuracy need it.
    none = the task decides; without a task there is no accuracy."""
    reward_timeout: float = Field(default=60.0, gt=0, le=NO_TIMEOUT)
    """Time limit for one call of a reward function, in seconds; a longer call stops the run. 1e9 = no limit."""
    soft_overlong_cache: int = Field(default=0, ge=0)
    """Length of DAPO's soft overlong penalty, in tokens before max_completion_length. Over this range the penalty rises
    linearly to 1. Advantages take it off the reward; the metric reward does not. 0 = off."""

    def problems(self) -> Iterator[str]:
        if self.reward_weights is not None and not any(self.reward_weights):
            yield (
                f"reward_weights={list(self.reward_weights)}: with these weights every reward is 0; give at least one "
                "reward function another weight, or remove rewards.reward_weights"
            )
