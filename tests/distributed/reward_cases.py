"""Reward functions and rows to score, and workers that go wrong."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fleet_cases import Clock

from covey.distributed.members import MemberError
from covey.distributed.reward_workers import RewardMember, RewardWorkers
from covey.rollout.scoring import Asked, Scored, Scorer
from covey.types import Episode, Prompt


def by_row(completions: list[str], answer: list[str | None], **columns: Any) -> list[float | None]:
    return [None if a is None else len(c) / 3 + (c == a) for c, a in zip(completions, answer, strict=True)]


def by_group(prompts: list[str], completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
    """How much longer than the mean of its group a completion is."""
    log_extra("length", [len(c) for c in completions])
    for completion in completions:
        log_metric("length", len(completion) / 7)
    means = {p: np.mean([len(c) for q, c in zip(prompts, completions, strict=True) if q == p]) for p in prompts}
    return [float(len(c) - means[p]) for p, c in zip(prompts, completions, strict=True)]


async def later(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
    return [trainer_state.global_step + ("e" in c) for c in completions]


def ranks(completions: list[str]) -> list[float]:
    """Compares the rows of all groups."""
    order = sorted(range(len(completions)), key=lambda n: (len(completions[n]), n))
    return [float(order.index(n)) for n in range(len(completions))]


ranks.whole_batch = True  # type: ignore[attr-defined]


def rows(groups: int, size: int = 2) -> tuple[list[Prompt], list[Episode]]:
    rng = np.random.default_rng(groups)
    prompts, episodes = [], []
    for group in range(groups):
        columns = {} if group % 3 == 2 else {"answer": "e" * (group % 4)}
        prompt = Prompt(np.arange(1, 4), f"say {group}", columns, str(group))
        for _ in range(size):
            text = "".join(rng.choice(list("aeiou"), size=int(rng.integers(0, 6))))
            ids = np.arange(3 + len(text) + 1)
            episodes.append(Episode(ids, ids >= 3, np.zeros(len(ids), np.float32), text, "stop", 1))
            prompts.append(prompt)
    return prompts, episodes


@dataclass
class Workplace:
    """Where workers score.

    Attributes:
        scorer: what each of them has.
        faults: what each piece or start in the place of a worker meets; "" when there is none left.
        pieces: rows of each piece that was begun.
    """

    scorer: Scorer
    faults: list[str] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    pieces: list[int] = field(default_factory=list)

    def fault(self) -> str:
        return self.faults.pop(0) if self.faults else ""

    def make(self, again: bool) -> Future[RewardMember]:
        future: Future[RewardMember] = Future()
        kind = self.fault() if again else ""
        if kind == "die":
            self.clock.at(0.5, lambda: future.set_exception(MemberError("no start")))
        elif kind != "hang":
            self.clock.at(1.0, lambda: future.set_result(FakeWorker(self)))
        return future

    def workers(self, count: int, unit_size: int = 4, **options: Any) -> RewardWorkers:
        options = {"timeout_seconds": 10.0, "max_restarts": 100, "wait": self.clock.wait, "clock": self.clock} | options
        return RewardWorkers([self.make] * count, unit_size=unit_size, **options)


class FakeWorker:
    name = "fake"

    def __init__(self, place: Workplace) -> None:
        self.place, self.gone = place, False

    def score(self, asked: Asked) -> Future[tuple[Scored, list[Any]]]:
        assert not self.gone, "a worker that was given up is asked"
        future: Future[tuple[Scored, list[Any]]] = Future()
        kind, clock = self.place.fault(), self.place.clock
        self.place.pieces.append(len(asked.episodes))
        try:
            found = self.place.scorer.score_rows(asked)
        except Exception as raised:
            error = raised
            clock.at(0.5, lambda: future.set_exception(error))
            return future
        if kind == "die":
            clock.at(0.5, lambda: future.set_exception(MemberError("died")))
        elif kind == "late":  # long after it was given up
            clock.at(25.0, lambda: future.set_result((Scored({}, {}, {}), [])))
        elif kind == "too few":
            short = Scored({name: values[:-1] for name, values in found.parts.items()}, {}, {})
            clock.at(0.5, lambda: future.set_result((short, [])))
        elif kind != "hang":
            clock.at(0.3 + len(asked.episodes) / 10, lambda: future.set_result((found, [])))
        return future

    def watch(self) -> None: ...

    def stop(self, *, failed: bool) -> None:
        self.gone = True
