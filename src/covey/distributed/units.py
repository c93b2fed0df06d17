"""Units of sampling: some groups that are sampled in one call, alone, so that their numbers depend on nothing else.

The log-probabilities of a completion change in their last digits with what is sampled beside it, and about one draw in
a thousand with them. So what is beside it is settled by the requests alone, before anybody knows who will sample.

Conversations are sampled turn by turn: each turn is asked for with all that was said before. On a fleet, the turns that
a conversation's member has to take when it becomes free are one call. A member that dies loses the turns that it was
taking, and nothing else: worlds and histories are here, so another one takes those turns, with the same random numbers.
Ranks take turns in rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from covey.rollout.drawing import stream_key
from covey.rollout.turns import Device, Drawn, Row
from covey.types import Completion, Request, SamplingSettings

_PATIENCE_SECONDS = 0.05
"""Then the worlds are asked whether they have more to say."""


@dataclass(slots=True, eq=False)
class Job:
    """A unit under way; `home` is the member that is to have it as long as that lives."""

    requests: Sequence[Request]
    settings: SamplingSettings
    version: int
    home: int | None = None
    finished: int = 0
    tries: int = 0
    result: list[Completion] | None = None


def make_units(requests: Sequence[Request], size: int) -> list[Sequence[Request]]:
    """Cut requests into units: whole groups in order, until they have at least `size` completions."""
    starts = [0] if requests else []
    for place, (before, request) in enumerate(pairwise(requests), start=1):
        same = before.token_ids is request.token_ids or np.array_equal(before.token_ids, request.token_ids)
        if not same and place - starts[-1] >= size:
            starts.append(place)
    return [requests[start:end] for start, end in pairwise([*starts, len(requests)])]


class _Turns(Device):
    """A `covey.rollout.turns.Device` that has whole turns sampled: first ones, as next ones, wait for `decode`."""

    def __init__(self, context_length: int, own_tokens: int, places: int = 1) -> None:
        super().__init__(context_length, own_tokens)
        self._waiting: list[list[Row]] = [[] for _ in range(places)]

    def begin(self, queue: deque[Row]) -> Iterator[Drawn]:
        return self.extend(queue)

    def extend(self, resuming: list[Row] | deque[Row]) -> Iterator[Drawn]:
        for row in resuming:
            row.place = self
            self._waiting[stream_key(row.stream[:-1]) % len(self._waiting)].append(row)
        resuming.clear()
        return iter(())

    def drop(self, row: Row) -> None:
        row.place = None
        self._waiting = [[other for other in rows if other is not row] for rows in self._waiting]


class FleetDevice(_Turns):
    """Turns on a fleet, each at its conversation's member; `do` is the fleet's."""

    def __init__(self, do: Callable[..., None], version: int, context_length: int, own_tokens: int, homes: int) -> None:
        super().__init__(context_length, own_tokens, homes)
        self._do, self._version = do, version
        self._asked: list[tuple[Job, list[Row]]] = []

    def decode(self, waiting: int) -> Iterator[Drawn]:
        """The turns that are over, after a moment none if there are none."""
        jobs = [job for home in range(len(self._waiting)) for job in self._jobs_of(home)]
        self._do(jobs, lambda: any(job.result for job, _ in self._asked), seconds=_PATIENCE_SECONDS)
        over = [(job, rows) for job, rows in self._asked if job.result is not None]
        self._asked = [(job, rows) for job, rows in self._asked if job.result is None]
        for job, rows in over:
            for row, found in zip(rows, job.result or (), strict=True):
                if row.place is self:
                    yield Drawn.whole(row, found)

    def _jobs_of(self, home: int) -> list[Job]:
        """All turns that wait for a member which has nothing of ours to do; one job for each way of drawing."""
        if any(job.home == home for job, _ in self._asked):
            return []
        rows, self._waiting[home] = self._waiting[home], []
        alike: dict[SamplingSettings, list[Row]] = {}
        for row in sorted(rows, key=lambda row: row.stream):
            alike.setdefault(row.turn_settings(), []).append(row)
        jobs = [Job(list(map(Row.turn_request, some)), how, self._version, home=home) for how, some in alike.items()]
        self._asked += zip(jobs, alike.values(), strict=True)
        return jobs


Calls = list[tuple[list[Request], SamplingSettings]]
"""Requests that are sampled in one call each, alone."""


class RoundDevice(_Turns):
    """Turns in rounds: all that wait are sampled, and then worlds answer.

    What is sampled beside a turn is settled by random streams: the present turns of the conversations of its unit. So
    the numbers are those of any number of samplers, and do not depend on how fast worlds are.
    """

    in_rounds = True

    def __init__(
        self, sample: Callable[[Calls], list[list[Completion]]], context_length: int, own_tokens: int, unit_size: int
    ) -> None:
        super().__init__(context_length, own_tokens)
        self._sample, self._unit_size = sample, unit_size
        self._numbers: dict[tuple[int, ...], int] = {}

    def decode(self, waiting: int) -> Iterator[Drawn]:
        """A round: every turn that waits, to its end."""
        rows, self._waiting = sorted(self._waiting[0], key=lambda row: row.stream), [[]]
        alike: dict[tuple[int, SamplingSettings], list[Row]] = {}
        for row in rows:
            number = self._numbers.setdefault(row.stream[:-1], len(self._numbers))
            alike.setdefault((number // self._unit_size, row.turn_settings()), []).append(row)
        calls = [(list(map(Row.turn_request, some)), settings) for (_, settings), some in alike.items()]
        for some, found in zip(alike.values(), self._sample(calls), strict=True):
            yield from map(Drawn.whole, some, found)
