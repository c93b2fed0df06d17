"""Conversations on a fleet: each turn is asked for with all that was said before.

The turns that a conversation's member has to take when it becomes free are one call. A member that dies loses the turns
that it was taking, and nothing else: worlds and histories are here, so another one takes those turns, with the same
random numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from covey.distributed.units import Job
from covey.rollout.constrained import cut_choices
from covey.rollout.streams import stream_key
from covey.rollout.turns import Device, Drawn, Row
from covey.types import Completion, Request, SamplingSettings

_PATIENCE_SECONDS = 0.05
"""Then the worlds are asked whether they have more to say."""


class Workers(Protocol):
    """What samples turns: a `covey.distributed.fleet.Fleet`."""

    def do(
        self, jobs: Sequence[Job], over: Callable[[], bool], tell: Callable[[], None] = ..., seconds: float = ...
    ) -> None: ...


class FleetDevice(Device):
    """A `covey.rollout.turns.Device` that has whole turns sampled.

    Args:
        workers: sample.
        version: of the weights.
        context_length: most tokens of a conversation.
        own_tokens: longest conversation after its first prompt.
        homes: members that conversations are shared out to, by their random streams.
    """

    def __init__(self, workers: Workers, version: int, context_length: int, own_tokens: int, homes: int) -> None:
        super().__init__(context_length, own_tokens)
        self._workers, self._version = workers, version
        self._waiting: list[list[Row]] = [[] for _ in range(homes)]
        self._asked: list[tuple[Job, list[Row]]] = []

    def begin(self, queue: deque[Row]) -> Iterator[Drawn]:
        """First turns wait for their members."""
        while queue:
            self._ask(queue.popleft())
        return iter(())

    def extend(self, resuming: list[Row]) -> Iterator[Drawn]:
        """Next turns do as well."""
        while resuming:
            self._ask(resuming.pop(0))
        return iter(())

    def decode(self, waiting: int) -> Iterator[Drawn]:
        """The turns that are over, after a moment none if there are none."""
        jobs = [job for home in range(len(self._waiting)) for job in self._jobs_of(home)]
        self._workers.do(jobs, lambda: any(job.result for job, _ in self._asked), seconds=_PATIENCE_SECONDS)
        over = [(job, rows) for job, rows in self._asked if job.result is not None]
        self._asked = [(job, rows) for job, rows in self._asked if job.result is None]
        for job, rows in over:
            for row, found in zip(rows, job.result or (), strict=True):
                if row.place is self:
                    yield _drawn(row, found)

    def drop(self, row: Row) -> None:
        """Nobody waits for its turn any more."""
        row.place = None
        for rows in self._waiting:
            if row in rows:
                rows.remove(row)

    def _ask(self, row: Row) -> None:
        row.place = self
        self._waiting[stream_key(row.stream[:-1]) % len(self._waiting)].append(row)

    def _jobs_of(self, home: int) -> list[Job]:
        """All turns that wait for a member which has nothing of ours to do; one job for each way of drawing."""
        if any(job.home == home for job, _ in self._asked):
            return []
        rows, self._waiting[home] = self._waiting[home], []
        alike: dict[SamplingSettings, list[Row]] = {}
        for row in sorted(rows, key=lambda row: row.stream):
            settings = replace(row.settings, max_tokens=row.limit)
            if row.choices is not None:  # an engine refuses what cannot be said whole: here the turn is cut short
                settings = replace(settings, stop_strings=())
            alike.setdefault(settings, []).append(row)
        jobs = []
        for settings, some in alike.items():
            requests = [Request(row.history(), row.stream, cut_choices(row.choices, row.limit)) for row in some]
            jobs.append(Job(requests, settings, self._version, home=home))
            self._asked.append((jobs[-1], some))
        return jobs


def _drawn(row: Row, found: Completion) -> Drawn:
    support: Any = None
    if found.support is not None:
        support = [np.split(found.support.ids, found.support.offsets[1:-1])]
    return Drawn([row], found.token_ids[None], found.logprobs[None], support, [found.finish_reason])
