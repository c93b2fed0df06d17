"""What a task is: where prompts come from, how completions are scored, when an answer counts as correct."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from covey.rewards.verifier import RewardFunction
from covey.tasks.dataset import Row


class Task(ABC):
    """Prompts with verifiable answers.

    Rows have the column `prompt` (a conversation) and whatever the rewards read, e.g. `answer`. A column `kind` names
    the sort of question: evaluations tell the accuracy of each. Held-out rows share no problem with training rows,
    whatever the seed and in whatever words; see `covey.tasks.split`.

    Attributes:
        name: what `get_task` knows it by.
        system_prompt: put before each prompt unless the user sets another; None = none.
        max_completion_length: tokens that an answer needs; a default that users override.
    """

    name: ClassVar[str]
    system_prompt: str | None = None
    max_completion_length: int = 256

    @property
    @abstractmethod
    def reward_funcs(self) -> list[RewardFunction]:
        """The rewards to train with when the user gives none."""

    @abstractmethod
    def train_rows(self, seed: int) -> list[Row]:
        """Training rows; the same seed gives the same rows.

        Raises:
            DataError: the data cannot be read.
        """

    @abstractmethod
    def eval_rows(self) -> list[Row]:
        """Held-out rows, always the same ones.

        Raises:
            DataError: the data cannot be read.
        """

    @abstractmethod
    def is_correct(self, text: str, row: Mapping[str, Any]) -> bool:
        """Does this completion solve this row? Defines `eval/accuracy`; hostile text is just wrong."""

    def has_answer(self, text: str, row: Mapping[str, Any]) -> bool:
        """Does this completion hold an answer at all, right or wrong? Used by `algorithm.validity_min_length` and for
        `completions/no_answer_ratio`.
        """
        return bool(text.strip())


def as_prompt(question: str) -> list[dict[str, str]]:
    """A conversation with one user message."""
    return [{"role": "user", "content": question}]
