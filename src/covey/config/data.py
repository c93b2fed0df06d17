"""The `data` section: where prompts come from and how many make a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator


class DataConfig(BaseModel, extra="forbid", frozen=True, strict=True, allow_inf_nan=False):
    """Datasets, prompts, batch size in prompts."""

    dataset: str | None = Field(
        default=None,
        description="Training prompts: a .jsonl, .json, .csv or .parquet file, or a dataset id on the hub; "
        "none = the task brings its own.",
    )
    eval_dataset: str | None = Field(
        default=None,
        description="Held-out prompts, given like dataset; none = the task's own, or no evaluation.",
    )
    task: str | None = Field(
        default=None,
        description="A task that renders prompts and scores answers, by name (arithmetic) or in a file (FILE.py:TASK); "
        "none = prompts as they are in the dataset.",
    )
    prompts_per_step: int = Field(
        default=8,
        ge=1,
        description="Distinct prompts for each optimiser step; completions per step are this times num_generations.",
    )
    max_prompt_length: int | None = Field(
        default=None,
        ge=1,
        description="Longest prompt, in tokens; none = what the model's context leaves. See long_prompts.",
    )
    long_prompts: Literal["error", "truncate", "drop"] = Field(
        default="error",
        description="What becomes of prompts beyond that: an error before training, their last tokens only, or no use "
        "of them; how many is said. A question that is cut may have another answer.",
    )
    prompt_order: Literal["random", "given", "difficulty"] = Field(
        default="random",
        description="How prompts are visited: in a new random order in each epoch, in the order of the dataset, or "
        "drawn by what their last answers say that they can teach (most where half of the completions are right; new "
        "prompts first of all), which needs to know what is right: a task, or rewards.correctness.",
    )
    system_prompt: str | None = Field(
        default=None, description="System message put before every prompt; none = what the dataset has."
    )
    prompt_column: str = Field(
        default="prompt",
        min_length=1,
        description="Dataset column with the prompt: a string or a list of messages.",
    )
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="Further arguments of the chat template, such as enable_thinking."
    )

    @field_validator("dataset", "eval_dataset", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _none_means_empty(cls, value: Any) -> Any:
        return {} if value is None else value
