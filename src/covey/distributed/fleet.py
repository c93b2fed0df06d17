"""A sampler over several members: a queue of units, deadlines, replacement of members that fail.

    requests -> units -> a queue -> the next free member -> completions in the order of the requests
                            ^              |
                            +--- died, or silent --+    (it is replaced)

One thread at a time calls it, and everything happens in that thread: members answer through futures. The result does
not depend on how many members there are, which one has which unit, or how often one has to be replaced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from covey.distributed.members import START_SECONDS, Held, LocalMember, Member, frozen, weights_hash
from covey.distributed.units import FleetDevice, Job, make_units
from covey.errors import CoveyError, GenerationError, ServingError, several
from covey.rollout.learning import NO_VERSION, Weights, version_in_words
from covey.rollout.turns import Session
from covey.types import Completion, Progress, Request, SamplingSettings

_LOOK_SECONDS = 0.5
_MOST_TRIES = 3
"""A unit that as many members fail at is taken to be what makes them fail."""
_SAMPLING = "sampling"
_STARTING = "starting"

Maker = Callable[[bool], "Future[Any]"]
"""Starts a member; True = in the place of one that failed."""


@dataclass(slots=True, eq=False)
class Place:
    """One member after another."""

    number: int
    make: Maker
    member: Any = None
    held: Held | None = None
    taking: Held | None = None
    doing: str = _STARTING
    future: Future[Any] | None = None
    job: Job | None = None
    since: float = 0.0
    seen: int = 0
    failures: int = 0
    given_up: bool = False
    name: str = ""
    units: int = 0
    failed: int = 0

    @property
    def title(self) -> str:
        return f"sampler {self.number + 1}" + (f" ({self.name})" if self.name else "")


class Fleet:
    """Members that sample as one. Its `policy_version` is that of the weights published last, -1 after `release` where
    this process samples. Raises CoveyError: a member cannot be started; none is left running.
    """

    def __init__(
        self,
        makers: Sequence[Maker],
        *,
        unit_size: int,
        timeout_seconds: float = 600.0,
        max_restarts: int = 3,
        closing: Callable[[], None] = lambda: None,
        wait: Callable[..., Any] = futures.wait,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._unit_size, self._timeout, self._max_restarts = unit_size, timeout_seconds, max_restarts
        self._closing, self._wait, self._clock = closing, wait, clock
        self._places = [Place(number, make) for number, make in enumerate(makers)]
        self._held: Held | None = None
        self.policy_version = NO_VERSION
        self._queue: list[Job] = []
        self._tell: Callable[[], None] = lambda: None
        self._thread = 0
        self._open, self._news = False, list[str]()
        self._reissued, self._restarts, self._idle = 0, 0, 0.0
        self._until_or_close(lambda: all(place.member is not None for place in self._places))
        self._open = True
        members: list[Member] = [place.member for place in self._places]
        self.context_length = min(member.context_length for member in members)
        self._local = members[0].engine if isinstance(members[0], LocalMember) else None

    def publish(self, weights: Weights) -> None:
        """Give weights to all members, and return when those that live have them.

        Raises GenerationError: a member applied other numbers than were sent, or none is left; CoveyError: it refused.
        """
        held = weights if self._local is not None else frozen(weights)
        self._held, self.policy_version = Held(held, "" if self._local is not None else weights_hash(held)), NO_VERSION
        self._until_or_close(self._all_hold)
        self.policy_version = weights.version

    def release(self) -> None:
        """Give back this process's memory for sampling until the next `publish`; other members keep theirs."""
        if self._local is not None:
            self.policy_version, self._places[0].held, self._held = NO_VERSION, None, None
            self._local.release()

    def __call__(
        self,
        requests: Sequence[Request],
        settings: SamplingSettings,
        *,
        policy_version: int,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """Sample one completion for each request, in order; see `covey.types.Generator`."""
        self._check(policy_version)
        jobs = [Job(unit, settings, policy_version) for unit in make_units(requests, self._unit_size)]
        longest_first = sorted(jobs, key=lambda job: -max(len(request.token_ids) for request in job.requests))

        def tell() -> None:
            if progress is not None:
                over = sum(job.finished if job.result is None else len(job.requests) for job in jobs)
                progress(over, len(requests))

        self.do(longest_first, lambda: all(job.result is not None for job in jobs), tell)
        return [completion for job in jobs for completion in job.result or ()]

    def session(self, settings: SamplingSettings, *, policy_version: int, own_tokens: int, **room: Any) -> Session[Any]:
        """Conversations of several turns: in this process its engine's own, elsewhere a request for each turn with all
        that was said before, to the conversation's own member as long as that lives.
        """
        self._check(policy_version)
        if self._local is not None:
            return self._local.session(settings, policy_version=policy_version, own_tokens=own_tokens, **room)
        device = FleetDevice(self.do, policy_version, self.context_length, own_tokens, len(self._places))
        return Session(device, settings, policy_version=policy_version)

    def members(self) -> list[dict[str, Any]]:
        """Of each sampler its `name`, the `version` of its weights (None = it has none now), how many `units` it has
        sampled and how often it `failed` since the run was begun or resumed, and `left`: nobody samples in its place.
        """
        return [
            {
                "name": place.title,
                "version": None if place.held is None else place.held.weights.version,
                "units": place.units,
                "failed": place.failed,
                "left": place.given_up,
            }
            for place in self._places
        ]

    def close(self) -> None:
        """Stop the members. They start anew when they are needed."""
        for place in self._places:
            if place.member is not None:
                place.member.stop(failed=False)
            elif place.future is not None:  # it is stopped as soon as it has started
                place.future.add_done_callback(_stop_late)
            if not getattr(place.member, "stays", False):
                place.member = place.held = place.future = place.job = None
        self._closing()

    def take_news(self) -> list[str]:
        """What has happened to members since the last time, a sentence each."""
        news, self._news = self._news, []
        return news

    def take_metrics(self) -> dict[str, float]:
        """Since the last time; `covey.metric_names` defines them."""
        found = {"samplers/reissued_units": float(self._reissued), "samplers/restarts": float(self._restarts)}
        found["time/samplers_waiting"] = self._idle
        self._reissued, self._restarts, self._idle = 0, 0, 0.0
        return found

    def _check(self, policy_version: int) -> None:
        if policy_version != self.policy_version:
            held = version_in_words(self.policy_version)
            raise GenerationError(f"policy_version={policy_version}: the samplers hold {held}")

    def _all_hold(self) -> bool:
        """Every member that lives has the weights, and one lives; those that are being replaced take them later."""
        there = [place for place in self._places if place.member is not None]
        return bool(there) and all(place.held is self._held for place in there)

    def do(
        self,
        jobs: Sequence[Job],
        over: Callable[[], bool],
        tell: Callable[[], None] = lambda: None,
        seconds: float = float("inf"),
    ) -> None:
        """Queue jobs and let members work until `over`, or for some seconds; an error forgets all jobs.

        Raises CoveyError: a member's; GenerationError: three members failed at the same unit, or none is left.
        """
        self._queue += jobs
        self._tell, self._thread = tell, threading.get_ident()
        try:
            self._until(over, seconds)
        except BaseException:
            self._queue.clear()
            for place in self._places:
                place.job = None  # what it is doing is nobody's any more
            raise
        finally:
            self._tell = lambda: None

    def _until_or_close(self, over: Callable[[], bool]) -> None:
        try:
            self._until(over)
        except BaseException:
            self.close()
            raise

    def _until(self, over: Callable[[], bool], seconds: float = float("inf")) -> None:
        began = self._clock()
        for place in self._places:
            if place.future is not None and place.future.done():
                self._look_at(place)
        while True:
            self._hand_out()
            if over() or self._clock() - began >= seconds:
                return
            busy = [place for place in self._places if place.future is not None]
            if not busy:
                raise GenerationError("no sampler is left; start samplers that live, and resume the run")
            last, working = self._clock(), sum(place.doing == _SAMPLING for place in busy)
            pause = min(_LOOK_SECONDS, self._timeout, seconds)
            self._wait([place.future for place in busy], timeout=pause, return_when=futures.FIRST_COMPLETED)
            self._idle += (self._clock() - last) * (1 - working / len(self._places)) if self._queue or working else 0.0
            for place in busy:
                self._look_at(place)
            self._tell()

    def _hand_out(self) -> None:
        """Every member that has nothing to do gets something: itself, weights, a unit."""
        for place in self._places:
            if place.future is not None or place.given_up:
                continue
            if place.member is None:
                self._begin(place, _STARTING, place.make(self._open and place.failures > 0))
            elif self._held is not None and place.held is not self._held:
                place.taking = self._held
                self._begin(place, "taking weights", place.member.load(self._held))
            elif place.held is not None and (job := self._next_for(place)) is not None:
                place.job, note = job, partial(self._note, job)
                self._begin(place, _SAMPLING, place.member.begin(job.requests, job.settings, job.version, note))

    def _begin(self, place: Place, doing: str, future: Future[Any]) -> None:
        place.doing, place.future, place.since, place.seen = doing, future, self._clock(), 0

    def _next_for(self, place: Place) -> Job | None:
        for number, job in enumerate(self._queue):
            if job.home in (None, place.number) or self._places[job.home].member is None:
                return self._queue.pop(number)
        return None

    def _look_at(self, place: Place) -> None:
        """Take its answer, or see how far it is."""
        assert place.future is not None
        if place.future.done():
            future, place.future = place.future, None
            error = future.exception()
            if error is None:
                self._take(place, future.result())
            elif not isinstance(error, Exception):
                raise error
            elif isinstance(error, CoveyError) and (place.doing != _STARTING or not self._open):
                if place.doing != _SAMPLING or place.job is not None:
                    raise error
            else:
                self._fail(place, f"{error}" if str(error) else type(error).__name__)
            return
        if place.member is not None:
            place.member.watch()
        if place.job is not None and place.job.finished > place.seen:
            place.since, place.seen = self._clock(), place.job.finished
        most = self._timeout if place.member is not None else max(self._timeout, START_SECONDS)
        if self._clock() - place.since > most:
            if place.member is None:
                place.future.add_done_callback(_stop_late)
            self._fail(place, f"silent for {most:g} s (distributed.timeout_seconds)")

    def _take(self, place: Place, found: Any) -> None:
        if place.doing == _STARTING:
            place.member, place.held, place.name = found, None, found.name
        elif place.doing != _SAMPLING:
            assert place.taking is not None
            if found != place.taking.sha256:
                raise GenerationError(
                    f"{place.title} applied weights with the hash {found[:12]}..., {place.taking.sha256[:12]}... was "
                    "sent; it does not hold the trainer's model: give all machines the same files and versions"
                )
            place.held = place.taking
        elif place.job is not None:
            job = place.job
            if len(found) != len(job.requests) or any(one.policy_version != job.version for one in found):
                versions = sorted({one.policy_version for one in found})
                told = f"{len(found)} completions of the versions {versions}, not {len(job.requests)} of {job.version}"
                return self._fail(place, told)
            place.job, place.failures, job.result = None, 0, found
            place.units += 1

    def _fail(self, place: Place, why: str) -> None:
        """Give a member up, let its unit go to the front of the queue, and have it replaced, or not any more."""
        what, title = place.doing, place.title
        if place.member is not None:
            place.member.stop(failed=True)
        place.member = place.held = place.future = None
        job, place.job = place.job, None
        if not self._open:
            raise ServingError(f"{title} cannot be started: {why}")
        place.failures += 1
        place.failed += 1
        place.given_up = place.failures > self._max_restarts
        left = sum(not other.given_up for other in self._places)
        after = "it is replaced"
        if place.given_up:
            after = f"{several(place.failures, 'time')} in a row: the run continues with {left} of {len(self._places)}"
        self._restarts += not place.given_up
        self._news.append(f"{title} failed while {what}: {why[:500]}; {after}")
        if left == 0:
            raise GenerationError(f"{title}, the last one, failed while {what}: {why[:1000]}")
        if job is not None:
            job.tries, job.finished = job.tries + 1, 0
            if job.tries >= _MOST_TRIES:
                streams = sorted({tuple(request.stream[:-1]) for request in job.requests})
                raise GenerationError(
                    f"{job.tries} samplers failed one after another while they sampled the same unit, of the prompts "
                    f"with the random streams {streams}; the last one: {why[:1000]}"
                )
            self._queue.insert(0, job)
            self._reissued += 1

    def _note(self, job: Job, done: int, total: int) -> None:
        job.finished = done
        if threading.get_ident() == self._thread:
            self._tell()


def _stop_late(future: Future[Any]) -> None:
    """A member that has started when nobody waits for it any more."""
    if future.exception() is None:
        future.result().stop(failed=True)
