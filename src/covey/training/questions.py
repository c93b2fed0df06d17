"""How each training question was answered over the run, and what it can still teach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Answers = dict[str, list[int]]
"""uid of a question -> [right completions, all completions] in one step."""

_FORGET = 0.5
"""Each visit halves what earlier visits count: the policy has changed since."""


class QuestionHistory:
    """What is known about every training question."""

    def __init__(self, uids: Sequence[str], group_relative: bool = True) -> None:
        self._group_relative = group_relative
        self._row = {uid: row for row, uid in enumerate(uids)}
        self._right = np.zeros(len(uids))
        self._wrong = np.zeros(len(uids))

    def add(self, answers: Mapping[str, Sequence[int]]) -> None:
        """Take in one step. Questions that the dataset no longer has are passed over."""
        for uid, (right, total) in answers.items():
            row = self._row.get(uid)
            if row is not None:
                self._right[row] = _FORGET * self._right[row] + right
                self._wrong[row] = _FORGET * self._wrong[row] + total - right

    def restore(self, steps: Iterable[Mapping[str, Any]]) -> None:
        """Begin anew from the lines of `questions.jsonl`."""
        self._right[:] = self._wrong[:] = 0.0
        for step in steps:
            self.add(step["answers"])

    def weights(self) -> NDArray[np.float64]:
        """`[n]` how much each question can teach: 1 for one never asked, towards 0 for one always right or wrong.

        Six times the expected `p (1 - p)`, the variance of a right/wrong reward and so the size of a group's
        advantages, where p has the posterior Beta(1 + right, 1 + wrong).

        Where advantages are not differences within the group, the reward's square distance from the mean m over all
        questions takes the variance's place, `p (1 - m)^2 + (1 - p) m^2`: what is always right teaches, too.
        """
        a, b = 1.0 + self._right, 1.0 + self._wrong
        if not self._group_relative:
            p = a / (a + b)
            m = p.mean()
            return np.asarray((p * (1 - m) ** 2 + (1 - p) * m**2) / (0.5 * (1 - m) ** 2 + 0.5 * m**2))
        return np.asarray(6.0 * a * b / ((a + b) * (a + b + 1.0)))


@dataclass(slots=True)
class Question:
    """One question over the run."""

    uid: str
    visits: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """Share of right completions, all visits together."""
        return sum(right for _, right, _ in self.visits) / sum(total for _, _, total in self.visits)

    @property
    def first(self) -> float:
        """Share of right completions at the first visit."""
        return self.visits[0][1] / self.visits[0][2]

    @property
    def last(self) -> float:
        """Share of right completions at the last visit."""
        return self.visits[-1][1] / self.visits[-1][2]


def questions_of(steps: Iterable[Mapping[str, Any]]) -> list[Question]:
    """The lines of `questions.jsonl` by question, the hardest first."""
    found: dict[str, Question] = {}
    for step in steps:
        for uid, (right, total) in step["answers"].items():
            found.setdefault(uid, Question(uid)).visits.append((int(step["step"]), int(right), int(total)))
    return sorted(found.values(), key=lambda question: (question.accuracy, question.uid))
