"""The `rewards` section: how reward functions are combined and bounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from covey.config.section import Section, Texts

NO_TIMEOUT = 1e9
"""Functions are called in the main thread then, where they may use signals."""


class RewardConfig(Section, frozen=True):
    """Which rewards there are, their weights, their time limit, and the punishment of overlong answers."""

    functions: Texts = ()
    """Reward functions by name, for the command line: FILE.py:FUNCTION or MODULE:FUNCTION; none given = those of the
    task."""
    reward_weights: Annotated[tuple[float, ...], Field(strict=False)] | None = None
    """One weight for each reward function, in their order; none = 1 for each."""
    correctness: str | None = Field(default=None, min_length=1)
    """The function that says which completions are right: 1 = right, 0 = wrong. The name of a reward, or
    FILE.py:FUNCTION or MODULE:FUNCTION for one that is no reward. Without a task, accuracy, prompt_order and
    min_accuracy need it; none = the task says so, or nothing does."""
    reward_timeout: float = Field(default=60.0, gt=0, le=NO_TIMEOUT)
    """Seconds that one call of a reward function may take before the run stops; 1e9 = no limit."""
    soft_overlong_cache: int = Field(default=0, ge=0)
    """Soft overlong punishment (DAPO): the reward falls linearly by up to 1 over the last this many tokens before
    max_completion_length; 0 = off."""

    def problems(self) -> Iterator[str]:
        if self.reward_weights is not None and not any(self.reward_weights):
            yield (
                f"reward_weights={list(self.reward_weights)}: with no weight above or below 0 every reward is 0; give "
                "each reward function that counts a weight, or remove rewards.reward_weights"
            )
