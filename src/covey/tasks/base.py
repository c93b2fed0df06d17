"""What a task is: where prompts come from, how completions are scored, when an answer counts as correct."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from covey.errors import DataError
from covey.rewards.verifier import RewardFunction
from covey.tasks.dataset import Row


class Task(ABC):
    """Prompts with verifiable answers.

    Rows have the column `prompt` (a conversation) and whatever the rewards read, e.g. `answer`. Held-out rows
    share no question with training rows, whatever the seed.

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
        """Does this completion hold an answer at all, right or wrong? Used by `algorithm.validity_mask` and for
        `completions/no_answer_ratio`.
        """
        return bool(text.strip())


def question_hash(question: str) -> int:
    """A stable 64-bit number for a question's text, on which splits into training and held-out rows rest."""
    return int.from_bytes(hashlib.sha256(question.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def as_prompt(question: str) -> list[dict[str, str]]:
    """A conversation with one user message."""
    return [{"role": "user", "content": question}]


def distinct(rows: Sequence[Row], column: str) -> list[Row]:
    """The rows without those whose `column` an earlier row has."""
    return list({row[column]: row for row in reversed(rows)}.values())[::-1]


def hold_out(rows: Sequence[Row], number: int) -> list[Row]:
    """The `number` rows whose `question` has the lowest hash: the same ones whatever the order; each question once."""
    return sorted(distinct(rows, "question"), key=lambda row: question_hash(row["question"]))[:number]


def without_held_out(
    rows: Sequence[Row], held_out: Sequence[Row], *, path: Any, eval_path: Any, num_eval: int | None
) -> list[Row]:
    """The rows whose `question` is not held out; white space and case make no difference.

    Raises:
        DataError: nothing is left, or a question stands in the training file and in a held-out file of its own.
    """
    where = path if isinstance(path, str | Path) else "dataset"
    known = {question_key(row["question"]) for row in held_out}
    left = [row for row in rows if question_key(row["question"]) not in known]
    if eval_path is not None and len(left) < len(rows):
        twice = next(row for row in rows if question_key(row["question"]) in known)
        other = next(row for row in held_out if question_key(row["question"]) == question_key(twice["question"]))
        raise DataError(
            f"{where}: {_place(twice)} is the question of {eval_path}: {_place(other)} ({len(rows) - len(left)} are in "
            f"both), {twice['question']!r:.60}; the evaluation would be of what was trained: remove them from one file"
        )
    if not left:
        raise DataError(f"{where}: all {len(rows)} questions are held out; lower num_eval={num_eval}")
    return left


def _place(row: Row) -> str:
    return f"line {row['line']}" if "line" in row else str(row["uid"])


def question_key(question: str) -> str:
    """Equal for questions that differ in white space and case only."""
    return " ".join(question.casefold().split())


def some_rows(rows: Sequence[Row], number: int | None, seed: int) -> list[Row]:
    """`number` rows drawn with the seed, in their order; all of them for None, or where there are not more."""
    if number is None or number >= len(rows):
        return list(rows)
    return [rows[index] for index in sorted(random.Random(seed).sample(range(len(rows)), number))]
