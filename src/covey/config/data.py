"""The `data` section: where prompts come from and how many make a step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from covey.config.section import Options, PathText, Section


class DataConfig(Section, frozen=True):
    """Datasets, prompts, batch size in prompts."""

    dataset: PathText | None = None
    """Training prompts: a .jsonl, .json, .csv or .parquet file, or a dataset id on the hub; none = the task brings its
    own."""
    eval_dataset: PathText | None = None
    """Held-out prompts, given like dataset; none = the task's own, or no evaluation."""
    eval_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the distinct prompts of dataset that are held out and never trained on; 0 = none. A hash of the prompt
    chooses them, so that order and seed change nothing, and rows with equal prompts stay together."""
    task: str | None = None
    """A task that renders prompts and scores answers, by name (arithmetic) or in a file (FILE.py:TASK); none = prompts
    as they are in the dataset."""
    prompts_per_step: int = Field(default=8, ge=1)
    """Distinct prompts for each optimiser step; completions per step are this times num_generations."""
    max_prompt_length: int | None = Field(default=None, ge=1)
    """Longest prompt, in tokens; none = what the model's context leaves. See long_prompts."""
    long_prompts: Literal["error", "truncate", "drop"] = "error"
    """What becomes of prompts beyond that: an error before training, their last tokens only, or no use of them; how
    many is said. A question that is cut may have another answer."""
    prompt_order: Literal["random", "given", "difficulty"] = "random"
    """How prompts are visited: in a new random order in each epoch, in the order of the dataset, or drawn by what their
    last answers say that they can teach (most where half of the completions are right; new prompts first of all), which
    needs to know what is right: a task, or rewards.correctness."""
    system_prompt: str | None = None
    """System message put before every prompt; none = what the dataset has."""
    prompt_column: str = Field(default="prompt", min_length=1)
    """Dataset column with the prompt: a string or a list of messages."""
    chat_template_kwargs: Options = Field(default_factory=dict)
    """Further arguments of the chat template, such as enable_thinking."""
