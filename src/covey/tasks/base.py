"""What a task is: where prompts come from, how completions are scored, when an answer counts as correct.

And which questions are trained on and which are held out: none of the second may be one of the first in other words.
Two rows are the same problem when they have the same `family`, or the same question but for numbers, case and white
space. Where more than a tenth of the rows are alike in this sense, that is how the file is written and no sameness;
there the numbers count too, in whatever order. One problem's rows are on one side.
"""

from __future__ import annotations

import hashlib
import inspect
import random
import re
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from covey.errors import ConfigError, DataError
from covey.functions import find_factory, make_named
from covey.rewards.verifier import RewardFunction
from covey.tasks.dataset import Row


class Task(ABC):
    """Prompts with verifiable answers.

    Rows have the column `prompt` (a conversation) and the columns that the rewards read, e.g. `answer`. With a column
    `kind`, evaluations report the accuracy of each kind. No held-out problem may occur in training, whatever the seed
    and the words.

    Attributes:
        name: the task's name for `get_task`.
        system_prompt: put before each prompt, unless `data.system_prompt` is set; None = none.
        max_completion_length: tokens that an answer needs; a default for `sampling.max_completion_length`.
    """

    name: ClassVar[str]
    system_prompt: str | None = None
    max_completion_length: int = 256

    @property
    @abstractmethod
    def reward_funcs(self) -> list[RewardFunction]:
        """The default reward functions."""

    @abstractmethod
    def train_rows(self, seed: int) -> list[Row]:
        """Training rows; the same seed gives the same rows. Raises `DataError`: the data cannot be read."""

    @abstractmethod
    def eval_rows(self) -> list[Row]:
        """Held-out rows, always the same. Raises `DataError`: the data cannot be read."""

    @abstractmethod
    def is_correct(self, text: str, row: Mapping[str, Any]) -> bool:
        """True if the completion solves the row; `eval/accuracy` counts this. It must not raise, whatever the text."""

    def has_answer(self, text: str, row: Mapping[str, Any]) -> bool:
        """True if the completion holds an answer; for `validity_min_length` and `completions/no_answer_ratio`."""
        return bool(text.strip())


def as_prompt(question: str) -> list[dict[str, str]]:
    """A conversation with one user message."""
    return [{"role": "user", "content": question}]


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
    told = [t if often[t] <= limit else f"{t} {sorted_numbers(key)}" for key, t in zip(keys, texts, strict=True)]
    return [f"family {row['family']}" if "family" in row else name for row, name in zip(rows, told, strict=True)]


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
    """The rows whose problem is not held out; `DataError`: none is left, or a question is in both files."""
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
        """All problems of a source's split, "train" or "test". Raises `DataError`: it cannot be read, or is wrong."""

    def train_rows(self, seed: int) -> list[Row]:
        """The problems that are not held out, in the order of the file, or `num_train` of them.

        Raises `DataError`: nothing is left, or a question stands in the training file and in a held-out file of its
        own.
        """
        where = {"path": self.path, "eval_path": self.eval_path, "num_eval": self.num_eval}
        return some_rows(without_held_out(self._problems, self._held_out, **where), self.num_train, seed)

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


_TASKS: dict[str, Callable[..., Task] | str] = {
    "arithmetic": "covey.recipes.arithmetic.arithmetic:Arithmetic",  # files of recipes are installed
    "code": "covey.tasks.code:Code",
    "gsm8k": "covey.tasks.gsm8k:GSM8K",
    "json": "covey.tasks.fields:Fields",
    "reasoning_gym": "covey.recipes.reasoning_gym.gym_task:ReasoningGym",
    "usmle": "covey.tasks.usmle:USMLE",
}
"""Imported when they are asked for."""


def register_task(name: str, factory: Callable[..., Task] | str) -> None:
    """Make `factory(**options)` available to `get_task`; text `MODULE:NAME` is imported at its first use."""
    _TASKS[name] = factory


def task_names() -> tuple[str, ...]:
    """The names that `get_task` knows."""
    return tuple(sorted(_TASKS))


def task_options(name: str) -> tuple[str, ...]:
    """The options that a task accepts; `name` as in `get_task`. Raises `ConfigError`: no such task."""
    factory = find_factory("task", name, _TASKS)[1]
    return tuple(inspect.signature(factory).parameters) if callable(factory) else ()


def get_task(name: str, **options: Any) -> Task:
    """Make a task by its name.

    Args:
        name: a name with or without options (`"arithmetic"`, `"arithmetic:kinds=gcd,digits=2"`), or a `Task` class,
            factory or object in a file (`"riddles.py:Riddles"`, `"riddles.py:Riddles:digits=2"`). Numbers, `true`,
            `false` and `none` are read as such.
        **options: arguments of the task, e.g. `path` for `gsm8k`; they replace those in `name`.

    Raises `ConfigError`: there is no such task or option, or the task refuses a value.
    """
    return make_named("task", name, _TASKS, Task, **options)


def configured_task(name: str | None, dataset: str | None, eval_dataset: str | None) -> Task | None:
    """The task in `data.task`, or None. It reads the files `data.dataset` and `data.eval_dataset`, if they are set.

    Raises `ConfigError`: as `get_task`, or the task reads no files.
    """
    if name is None:
        return None
    files = {"path": ("dataset", dataset), "eval_path": ("eval_dataset", eval_dataset)}
    known = task_options(name)
    for option, (field, value) in files.items():
        if value is not None and option not in known:
            raise ConfigError(
                f"data.{field}={value!r:.200}: it does not go with data.task={name!r}, which brings its own rows; "
                "remove one of them"
            )
    return get_task(name, **{option: value for option, (_, value) in files.items() if value is not None})
