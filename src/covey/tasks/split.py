"""Which questions are trained on and which are held out: none of the second may be one of the first in other words.

Two rows are the same problem when they have the same `family`, or the same question but for numbers, case and white
space. Where more than a tenth of the rows are alike in this sense, that is how the file is written and no sameness;
there the numbers count too, in whatever order. One problem's rows are on one side.
"""

from __future__ import annotations

import hashlib
import random
import re
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from covey.errors import DataError
from covey.tasks.base import Task
from covey.tasks.dataset import Row

_NUMBER = re.compile(r"[0-9]+(?:[.,][0-9]+)*")
_FORMAT = 10
"""A question that stands for more than one row in so many is the file's format."""


def question_hash(question: str) -> int:
    """A stable 64-bit number for a question's text, on which splits into training and held-out rows rest."""
    return int.from_bytes(hashlib.sha256(question.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def question_key(question: str) -> str:
    """Equal for questions that differ in white space and case only."""
    return " ".join(question.casefold().split())


def sorted_numbers(question: str) -> str:
    """The numbers in a question in ascending order: `7 and 12` for "12 or 7?" and "7 or 12?" alike."""
    return " and ".join(sorted(_NUMBER.findall(question), key=lambda number: (len(number), number)))


def problems_of(rows: Sequence[Row]) -> list[str]:
    """The problem that each row poses, see the module's head. Depends on which rows there are, not on their order."""
    keys = [question_key(row["question"]) for row in rows]
    texts = [_NUMBER.sub("#", key) for key in keys]
    often = Counter(_NUMBER.sub("#", key) for key in set(keys))
    limit = max(1, len(set(keys)) // _FORMAT)
    return [
        f"family {row['family']}"
        if "family" in row
        else text
        if often[text] <= limit
        else f"{text} {sorted_numbers(key)}"
        for row, key, text in zip(rows, keys, texts, strict=True)
    ]


def hold_out(rows: Sequence[Row], number: int) -> list[Row]:
    """`number` rows of the problems with the lowest hashes, the same ones whatever the order; each question once.

    Rows of the last problem may be left over; they are not for training either.
    """
    of_problem: defaultdict[str, dict[str, Row]] = defaultdict(dict)
    for row, problem in zip(rows, problems_of(rows), strict=True):
        of_problem[problem].setdefault(row["question"], row)
    chosen = sorted(of_problem, key=question_hash)
    found = (of_problem[name][text] for name in chosen for text in sorted(of_problem[name], key=question_hash))
    return [row for row, _ in zip(found, range(number), strict=False)]


def without_held_out(
    rows: Sequence[Row], held_out: Sequence[Row], *, path: Any, eval_path: Any, num_eval: int | None
) -> list[Row]:
    """The rows whose problem is not held out.

    Raises:
        DataError: nothing is left, or a question stands in the training file and in a held-out file of its own.
    """
    where = path if isinstance(path, str | Path) else "dataset"
    asked = {question_key(row["question"]): row for row in reversed(held_out)}
    if eval_path is not None:
        twice = [row for row in rows if question_key(row["question"]) in asked]
        for row in twice[:1]:
            raise DataError(
                f"{where}: {_place(row)} is the question of {eval_path}: "
                f"{_place(asked[question_key(row['question'])])} ({len(twice)} are in both), {row['question']!r:.60}; "
                "the evaluation would be of what was trained: remove them from one file"
            )
    problems = problems_of([*rows, *held_out])
    known = set(problems[len(rows) :])
    left = [row for row, problem in zip(rows, problems, strict=False) if problem not in known]
    if not left:
        raise DataError(f"{where}: all {len(rows)} questions are held out; lower num_eval={num_eval}")
    return left


def _place(row: Row) -> str:
    return f"line {row['line']}" if "line" in row else str(row["uid"])


def some_rows(rows: Sequence[Row], number: int | None, seed: int) -> list[Row]:
    """`number` rows drawn with the seed, in their order; all of them for None, or where there are not more."""
    if number is None or number >= len(rows):
        return list(rows)
    return [rows[index] for index in sorted(random.Random(seed).sample(range(len(rows)), number))]


class FileTask(Task):
    """A task whose problems stand in one file or two."""

    path: Any = None
    eval_path: Any = None
    num_train: int | None = None
    num_eval: int | None = None

    @abstractmethod
    def read(self, source: Any, split: str) -> list[Row]:
        """All problems of a source, `split` being "train" or "test".

        Raises:
            DataError: it cannot be read, or an entry is no problem.
        """

    def train_rows(self, seed: int) -> list[Row]:
        """The problems that are not held out, in the order of the file, or `num_train` of them.

        Raises:
            DataError: nothing is left, or a question stands in the training file and in a held-out file of its own.
        """
        rows = without_held_out(
            self._problems, self._held_out, path=self.path, eval_path=self.eval_path, num_eval=self.num_eval
        )
        return some_rows(rows, self.num_train, seed)

    def eval_rows(self) -> list[Row]:
        """The held-out problems."""
        return list(self._held_out)

    @cached_property
    def _problems(self) -> list[Row]:
        return self.read(self.path, "train")

    @cached_property
    def _held_out(self) -> list[Row]:
        if self.eval_path is not None:
            return self.read(self.eval_path, "test")[: self.num_eval]
        return hold_out(self._problems, self.num_eval or len(self._problems))
