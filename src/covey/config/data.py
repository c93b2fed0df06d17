"""The `data` section: where prompts come from and how many make a step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from covey.config.section import Options, PathText, Section


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
