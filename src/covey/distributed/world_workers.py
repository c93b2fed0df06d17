"""Worlds on workers: each has some places in processes of its own, as this machine has without them.

    reset, step -> the episode's script so far -> `covey.distributed.pool` -> what the world answered

A question comes with all that was asked before it in its episode, and what was answered. So who has lost the episode,
or never had it, plays it again from its seed and its actions: a world that repeats itself loses nothing with its
worker, and one that does not is noticed and loses the episode.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol

from covey.distributed.members import MemberError
from covey.distributed.pool import Maker, Piece, Pool
from covey.distributed.preflight import installed
from covey.environments.base import Observation, Outcome, TaskInstance, World
from covey.environments.pool import EnvironmentPool, Found, pickled_world
from covey.errors import EpisodeError
from covey.functions import USER_FILES, require_files, user_file_hashes
from covey.types import Progress


@dataclass(frozen=True)
class Script:
    """An episode up to a question."""

    episode: int
    task: TaskInstance
    seed: int
    actions: tuple[str, ...] = ()
    answers: tuple[Found, ...] = ()


@dataclass(frozen=True)
class Worlds:
    """A world on its way to another process."""

    pickled: bytes
    files: dict[str, str]
    hashes: dict[str, str]
    paths: tuple[str, ...]
    places: int
    reset_seconds: float
    step_seconds: float

    @classmethod
    def of(cls, world: World, places: int, **limits: float) -> Worlds:
        """As it stands here.

        Raises:
            ConfigError: it cannot be sent.
        """
        return cls(pickled_world(world), dict(USER_FILES), user_file_hashes(), tuple(sys.path), places, **limits)


class WorldHost:
    """What a worker runs: places in processes of their own."""

    def __init__(self, worlds: Worlds) -> None:
        self._worlds = worlds
        self._locks = [threading.Lock() for _ in range(worlds.places)]
        self._played = [(-1, 0)] * worlds.places  # by place: an episode, and how many of its actions are done
        self._pool: EnvironmentPool | None = None

    def start(self, node: Callable[[], str]) -> dict[str, Any]:
        """Import and prepare the world; where it is. `node` tells which of the cluster's.

        Raises:
            ConfigError: a file of the user's is missing here, or the world cannot be made.
        """
        sent = self._worlds
        sys.path += [path for path in sent.paths if path not in sys.path]
        require_files(sent.hashes)
        USER_FILES.update(sent.files)
        world = pickle.loads(sent.pickled)
        self._pool = EnvironmentPool(
            world, sent.places, reset_seconds=sent.reset_seconds, step_seconds=sent.step_seconds
        )
        self._pool.prepare()
        return {"pid": os.getpid(), "host": socket.gethostname(), "node": node(), "versions": installed()}

    def play(self, place: int, script: Script) -> Found:
        """Answer a script's question. Called for several places at once."""
        assert self._pool is not None
        with self._locks[place]:
            known, self._played[place] = self._played[place], (-1, 0)
            if script.actions and known == (script.episode, len(script.actions) - 1):
                found = self._pool.answer(place, {"action": script.actions[-1]}, "step")
            else:
                found = self._replay(self._pool, place, script)
            if not isinstance(found, EpisodeError):
                self._played[place] = (script.episode, len(script.actions))
            return found

    @staticmethod
    def _replay(pool: EnvironmentPool, place: int, script: Script) -> Found:
        found = pool.answer(place, {"task": script.task, "seed": script.seed}, "reset")
        for action, wanted in zip(script.actions, script.answers, strict=True):
            if isinstance(found, EpisodeError):
                break
            if not _alike(found, wanted):
                return EpisodeError(
                    "the process that played it has ended, and the world does not repeat itself: equal task, seed and "
                    f"actions led to {_said(found)!r:.100}, and to {_said(wanted)!r:.100} before"
                )
            found = pool.answer(place, {"action": action}, "step")
        return found

    def close(self) -> None:
        """End the places' processes."""
        if self._pool is not None:
            self._pool.close()


def _alike(one: Found, other: Found) -> bool:
    """Whether an agent sees the same; what else a world told may be an address."""
    if isinstance(one, Outcome) and isinstance(other, Outcome):
        return replace(one, info={}) == replace(other, info={})
    return not isinstance(one, EpisodeError) and one == other


def _said(found: Found) -> str:
    if isinstance(found, Outcome):
        return found.observation.text
    return found.text if isinstance(found, Observation) else str(found)


class WorldMember(Protocol):
    """A worker, which plays at several places at once."""

    name: str

    def play(self, place: int, script: Script) -> Future[Found]: ...

    def watch(self) -> None: ...

    def stop(self, *, failed: bool) -> None: ...


@dataclass(slots=True, eq=False)
class _Shared:
    """A worker that several seats have, and whether it has been ended."""

    worker: WorldMember
    ended: bool = False


@dataclass(frozen=True)
class Seat:
    """A place of a worker: a member of the pool."""

    shared: _Shared
    place: int

    @property
    def name(self) -> str:
        """The worker's."""
        return self.shared.worker.name

    def watch(self) -> None:
        """Now and then."""
        self.shared.worker.watch()

    def stop(self, *, failed: bool) -> None:
        """A place ends with its worker: a world that hangs is ended there, so it is the worker that does."""
        if not self.shared.ended:
            self.shared.ended = True
            self.shared.worker.stop(failed=failed)


class Seats:
    """Starts the places of some workers, and a worker when its first place is wanted."""

    def __init__(self, make: Maker, workers: int) -> None:
        self._make, self._started = make, [Future[_Shared]() for _ in range(workers)]
        for future in self._started:
            future.set_exception(MemberError("not started"))

    def maker(self, number: int) -> Maker:
        """Of the place of a number; they are dealt out to workers in turn."""
        return partial(self._sit, number)

    def _sit(self, number: int, again: bool) -> Future[Seat]:
        worker, place = number % len(self._started), number // len(self._started)
        started = self._started[worker]
        if started.done() and (started.exception() is not None or started.result().ended):
            started = self._started[worker] = _then(self._make(again), _Shared)
        return _then(started, partial(Seat, place=place))


def _then(future: Future[Any], make: Callable[[Any], Any]) -> Future[Any]:
    """What is made of a result, when there is one."""
    made: Future[Any] = Future()

    def over(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            made.set_result(make(done.result()))
        else:
            made.set_exception(error)

    future.add_done_callback(over)
    return made


@dataclass(slots=True, eq=False)
class _Question(Piece):
    script: Script


class WorldWorkers(Pool):
    """Places in which instances of a world are played; an `EnvironmentPool` whose processes are on workers."""

    noun: ClassVar[str] = "world worker"
    work: ClassVar[str] = "playing"

    def __init__(self, seats: Seats, places: int, **options: Any) -> None:
        self._scripts = [Script(-1, {}, 0)] * places
        self._asked: dict[int, _Question] = {}
        self._episodes = 0
        self._told: set[str] = set()
        super().__init__([seats.maker(number) for number in range(places)], **options)

    def __len__(self) -> int:
        """The number of places."""
        return len(self._scripts)

    def reset(self, place: int, task: TaskInstance, seed: int) -> None:
        """See `EnvironmentPool.reset`."""
        self._episodes += 1
        self._question(place, Script(self._episodes, task, seed))

    def step(self, place: int, action: str) -> None:
        """See `EnvironmentPool.step`."""
        script = self._scripts[place]
        self._question(place, replace(script, actions=(*script.actions, action)))

    def wait(self, seconds: float | None = None) -> list[tuple[int, Found]]:
        """See `EnvironmentPool.wait`.

        Raises:
            GenerationError: no worker is left.
        """
        if not self._asked:
            return []
        limit = float("inf") if seconds is None else seconds
        self.do((), lambda: any(question.result is not None for question in self._asked.values()), seconds=limit)
        found = [(place, asked.result) for place, asked in sorted(self._asked.items()) if asked.result is not None]
        for place, answer in found:
            del self._asked[place]
            self._scripts[place] = replace(self._scripts[place], answers=(*self._scripts[place].answers, answer))
        return found

    def cancel(self, place: int) -> None:
        """Forget an open question; its answer is not looked at."""
        question = self._asked.pop(place, None)
        if question in self._queue:
            self._queue.remove(question)

    def take_news(self) -> list[str]:
        """What has happened to workers since the last time; that a worker has failed is told by its first place."""
        news = []
        for sentence in super().take_news():
            worker = sentence.partition("(")[2].partition(")")[0]
            if not worker or worker not in self._told:
                news.append(sentence)
            self._told.add(worker)
        return news

    def take_metrics(self) -> dict[str, float]:
        """Since the last time; how long worlds were waited for is `agent/waiting_share`."""
        return {name: value for name, value in super().take_metrics().items() if not name.startswith("time/")}

    def _question(self, place: int, script: Script) -> None:
        if place in self._asked:
            raise ValueError(f"place {place} has not answered yet")
        self._scripts[place] = script
        self._asked[place] = _Question(home=place, script=script)
        self._queue.append(self._asked[place])
        self._hand_out()

    def _hand_out(self) -> None:
        """As of any pool; places whose worker another one's failure has ended are started anew first."""
        for place in self._places:
            if place.future is None and place.member is not None and place.member.shared.ended:
                place.member = None
        super()._hand_out()

    def _ask(self, member: Seat, piece: _Question, progress: Progress) -> Future[Found]:
        return member.shared.worker.play(member.place, piece.script)

    def _hopeless(self, piece: _Question, why: str) -> None:
        """The world is to blame, and it costs its episode."""
        piece.result = EpisodeError(f"its worker has ended each time that it was played: {why}")
