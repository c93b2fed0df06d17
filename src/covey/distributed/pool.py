"""Members that do pieces of work as one: a queue, deadlines, replacement of members that fail.

    pieces -> a queue -> the next free member -> results
                 ^              |
                 +--- died, or silent --+    (it is replaced)

One thread at a time calls it, and everything happens in that thread: members answer through futures. What comes out
does not depend on how many members there are, which one has which piece, or how often one has to be replaced. The
`Fleet` samples with it, `covey.distributed.scoring` scores.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

from covey.distributed.members import START_SECONDS
from covey.errors import CoveyError, GenerationError, ServingError
from covey.types import Progress

_LOOK_SECONDS = 0.5
_MOST_TRIES = 3
"""A piece that as many members fail at is taken to be what makes them fail."""


class Worker(Protocol):
    """Does one piece at a time. What it is asked with is the pool's; no method waits."""

    name: str

    def watch(self) -> None:
        """Called now and then while it works: the moment to ask how far it is."""
        ...

    def stop(self, *, failed: bool) -> None:
        """End it, whatever it is doing; one that `failed` may be dead already."""
        ...


Maker = Callable[[bool], "Future[Any]"]
"""Starts a member; True = in the place of one that failed."""


@dataclass(slots=True, eq=False, kw_only=True)
class Piece:
    """Work under way."""

    home: int | None = None
    finished: int = 0
    tries: int = 0
    result: Any = None


@dataclass(slots=True, eq=False)
class Place:
    """One member after another."""

    number: int
    make: Maker
    noun: str
    member: Any = None
    held: Any = None
    taking: Any = None
    doing: str = "starting"
    future: Future[Any] | None = None
    piece: Any = None
    since: float = 0.0
    seen: int = 0
    failures: int = 0
    given_up: bool = False
    name: str = ""
    pieces: int = 0
    failed: int = 0

    @property
    def title(self) -> str:
        """For messages."""
        return f"{self.noun} {self.number + 1}" + (f" ({self.name})" if self.name else "")


class Pool:
    """Members that do pieces.

    Raises:
        CoveyError: a member cannot be started; none is left running.
    """

    noun: ClassVar[str] = "worker"
    """What a member is called; metrics begin with its plural."""
    work: ClassVar[str] = "working"
    """What it does."""
    needs: ClassVar[str] = "nothing"
    """What it takes before that."""
    failure: ClassVar[type[CoveyError]] = GenerationError
    """What is raised when it cannot be done."""

    def __init__(
        self,
        makers: Sequence[Maker],
        *,
        timeout_seconds: float = 600.0,
        max_restarts: int = 3,
        closing: Callable[[], None] = lambda: None,
        wait: Callable[..., Any] = futures.wait,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout, self._max_restarts = timeout_seconds, max_restarts
        self._closing, self._wait, self._clock = closing, wait, clock
        self._places = [Place(number, make, self.noun) for number, make in enumerate(makers)]
        self._queue: list[Any] = []
        self._tell: Callable[[], None] = lambda: None
        self._thread = 0
        self._open, self._news = False, list[str]()
        self._reissued = self._restarts = 0
        self._idle = 0.0
        try:
            self._until(lambda: all(place.member is not None for place in self._places))
        except BaseException:
            self.close()
            raise
        self._open = True

    def close(self) -> None:
        """Stop the members. They start anew when they are needed."""
        for place in self._places:
            if place.member is not None:
                place.member.stop(failed=False)
            elif place.future is not None:  # it is stopped as soon as it has started
                place.future.add_done_callback(_stop_late)
            if not getattr(place.member, "stays", False):
                place.member, place.held, place.future, place.piece = None, None, None, None
        self._closing()

    def take_news(self) -> list[str]:
        """What has happened to members since the last time, a sentence each."""
        news, self._news = self._news, []
        return news

    def take_metrics(self) -> dict[str, float]:
        """Since the last time; `covey.metric_names` defines them."""
        group = f"{self.noun.replace(' ', '_')}s"
        found = {
            f"{group}/reissued_units": float(self._reissued),
            f"{group}/restarts": float(self._restarts),
            f"time/{group}_waiting": self._idle,
        }
        self._reissued = self._restarts = 0
        self._idle = 0.0
        return found

    # ------------------------------------------------------------------ what a pool of one kind says

    def _prepare(self, place: Place) -> Future[Any] | None:
        """What its member must take before it works, if anything; `place.taking` says what."""
        return None

    def _may_work(self, place: Place) -> bool:
        return True

    def _prepared(self, place: Place, found: Any) -> None:
        """It has answered to that."""

    def _ask(self, member: Any, piece: Any, progress: Progress) -> Future[Any]:
        """Let a member do a piece."""
        raise NotImplementedError

    def _fault(self, piece: Any, found: Any) -> str:
        """What is wrong with an answer; "" = nothing."""
        return ""

    def _over(self, piece: Any) -> None:
        """A piece has its result."""

    def _named(self, piece: Any) -> str:
        """Which piece three members failed at, for the message."""
        return ""

    def _hopeless(self, piece: Any, why: str) -> None:
        """They did."""
        raise self.failure(
            f"{piece.tries} {self.noun}s failed one after another {self._named(piece)}; the last one: {why}"
        )

    # ------------------------------------------------------------------ what happens

    def do(
        self,
        pieces: Sequence[Any],
        over: Callable[[], bool],
        tell: Callable[[], None] = lambda: None,
        seconds: float = float("inf"),
    ) -> None:
        """Queue pieces and let members work until `over`, or for some seconds; an error forgets all pieces.

        Raises:
            CoveyError: as a member raised it, or `failure`: three members failed at the same piece, or none is left.
        """
        self._queue += pieces
        self._tell, self._thread = tell, threading.get_ident()
        try:
            self._until(over, seconds)
        except BaseException:
            self._queue.clear()
            for place in self._places:
                place.piece = None  # what it is doing is nobody's any more
            raise
        finally:
            self._tell = lambda: None

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
                raise self.failure(f"no {self.noun} is left; start {self.noun}s that live, and resume the run")
            last, working = self._clock(), sum(place.doing == self.work for place in busy)
            pause = min(_LOOK_SECONDS, self._timeout, seconds)
            self._wait([place.future for place in busy], timeout=pause, return_when=futures.FIRST_COMPLETED)
            self._idle += (self._clock() - last) * (1 - working / len(self._places)) if self._queue or working else 0.0
            for place in busy:
                self._look_at(place)
            self._tell()

    def _hand_out(self) -> None:
        """Every member that has nothing to do gets something: itself, what it needs for its work, a piece."""
        for place in self._places:
            if place.future is not None or place.given_up:
                continue
            if place.member is None:
                self._begin(place, "starting", place.make(self._open and place.failures > 0))
            elif (preparing := self._prepare(place)) is not None:
                self._begin(place, f"taking {self.needs}", preparing)
            elif self._may_work(place) and (piece := self._next_for(place)) is not None:
                place.piece = piece
                self._begin(place, self.work, self._ask(place.member, piece, partial(self._note, piece)))

    def _begin(self, place: Place, doing: str, future: Future[Any]) -> None:
        place.doing, place.future, place.since, place.seen = doing, future, self._clock(), 0

    def _next_for(self, place: Place) -> Any:
        for number, piece in enumerate(self._queue):
            if piece.home in (None, place.number) or self._places[piece.home].member is None:
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
            elif isinstance(error, CoveyError) and (place.doing != "starting" or not self._open):
                if place.doing != self.work or place.piece is not None:
                    raise error
            else:
                self._fail(place, f"{error}" if str(error) else type(error).__name__)
            return
        if place.member is not None:
            place.member.watch()
        if place.piece is not None and place.piece.finished > place.seen:
            place.since, place.seen = self._clock(), place.piece.finished
        most = self._timeout if place.member is not None else max(self._timeout, START_SECONDS)
        if self._clock() - place.since > most:
            if place.member is None:
                place.future.add_done_callback(_stop_late)
            self._fail(place, f"silent for {most:g} s (distributed.timeout_seconds)")

    def _take(self, place: Place, found: Any) -> None:
        if place.doing == "starting":
            place.member, place.held, place.name = found, None, found.name
        elif place.doing != self.work:
            self._prepared(place, found)
        elif place.piece is not None:
            piece = place.piece
            if fault := self._fault(piece, found):
                self._fail(place, fault)
                return
            place.piece, place.failures, piece.result = None, 0, found
            place.pieces += 1
            self._over(piece)

    def _fail(self, place: Place, why: str) -> None:
        """Give a member up, let its piece go to the front of the queue, and have it replaced, or not any more."""
        what, title = place.doing, place.title
        if place.member is not None:
            place.member.stop(failed=True)
        place.member, place.held, place.future = None, None, None
        piece, place.piece = place.piece, None
        if not self._open:
            raise ServingError(f"{title} cannot be started: {why}")
        place.failures += 1
        place.failed += 1
        place.given_up = place.failures > self._max_restarts
        left = sum(not other.given_up for other in self._places)
        after = "it is replaced"
        if place.given_up:
            after = f"{place.failures} times in a row: the run goes on with {left} of {len(self._places)}"
        self._restarts += not place.given_up
        self._news.append(f"{title} failed while {what}: {why[:500]}; {after}")
        if left == 0:
            raise self.failure(f"{title}, the last one, failed while {what}: {why[:1000]}")
        if piece is not None:
            piece.tries, piece.finished = piece.tries + 1, 0
            if piece.tries >= _MOST_TRIES:
                self._hopeless(piece, why[:1000])
                return
            self._queue.insert(0, piece)
            self._reissued += 1

    def _note(self, piece: Any, done: int, total: int) -> None:
        piece.finished = done
        if threading.get_ident() == self._thread:
            self._tell()


def _stop_late(future: Future[Any]) -> None:
    """A member that has started when nobody waits for it any more."""
    if future.exception() is None:
        future.result().stop(failed=True)
