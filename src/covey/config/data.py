"""The `data` and `rewards` sections: what is asked, and how answers are scored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from covey.config.section import Options, PathText, Section, Tables, Texts


class DataConfig(Section, frozen=True):
    """Datasets, prompts, batch size in prompts."""

    dataset: PathText | None = None
    """Training prompts: a .jsonl, .json, .csv or .parquet file, or a dataset id on the Hugging Face hub. none = the
    task's own."""
    eval_dataset: PathText | None = None
    """Held-out prompts, in the same forms as dataset. none = the task's own, or no evaluation."""
    eval_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of dataset's distinct prompts to hold out for evaluation; 0 = none. A hash of the prompt chooses them, so
    order and seed do not matter, and rows with equal prompts stay together."""
    task: str | None = None
    """The task that writes prompts and scores answers: a name (arithmetic) or FILE.py:TASK. none = the dataset's
    prompts as they are."""
    prompts_per_step: int = Field(default=8, ge=1)
    """Prompts in each step. A step samples num_generations completions of each."""
    max_prompt_length: int | None = Field(default=None, ge=1)
    """Longest prompt, in tokens. A prompt and max_completion_length must also fit into the model's context. none = only
    that limit."""
    long_prompts: Literal["error", "truncate", "drop"] = "error"
    """What to do with prompts that are too long. error: stop before training. truncate: keep their last tokens, which
    can change the question. drop: leave them out. A warning counts the cut or dropped prompts."""
    prompt_order: Literal["random", "given", "difficulty"] = "random"
    """Order of the prompts. random: shuffled again in each epoch. given: as in the dataset. difficulty: drawn at
    random, most often new prompts and prompts with half of their completions right; needs a task or
    rewards.correctness."""
    system_prompt: str | None = None
    """System message for prompts without one; a text prompt then becomes the user's message. none = add nothing."""
    prompt_column: str = Field(default="prompt", min_length=1)
    """Dataset column that holds the prompt, a string or a list of messages."""
    chat_template_kwargs: Options = Field(default_factory=dict)
    """More arguments for the chat template, such as enable_thinking."""
    processor_kwargs: Tables = Field(default_factory=dict)
    """More arguments for a vision model's processor, such as do_image_splitting or the table size."""


NO_TIMEOUT = 1e9
"""A `reward_timeout` with which functions are called in the main thread, where they may use signals."""


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
