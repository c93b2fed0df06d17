"""Reward functions in Ray actors, which hold no model: Ray places them on any machine of the cluster."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from covey.config.whole import GRPOConfig
from covey.distributed.guards import installed
from covey.distributed.members import START_SECONDS, MemberError
from covey.distributed.ray_cluster import CPUS, await_room, connect, get_result, kill, leave
from covey.distributed.reward_workers import Answer, Piece, RewardHost, Rewards, placed
from covey.errors import ConfigError, RewardError, ServingError

_NUMBERS = ("python", "covey", "numpy")
"""What must be alike here and there."""
_LOOK_SECONDS = 0.5
_MOST_TRIES = 3
"""Rows that as many workers fail at are taken to be what makes them fail."""


@dataclass(slots=True, eq=False)
class _Worker:
    """One actor after another, and the call that it is at: where it is, or the rewards of a piece."""

    number: int
    actor: Any = None
    call: Any = None
    piece: int | None = None
    since: float = 0.0
    about: dict[str, Any] | None = None
    failures: int = 0

    @property
    def title(self) -> str:
        where = "" if self.about is None else f" (process {self.about['pid']} on {self.about['host']})"
        return f"reward worker {self.number + 1}{where}"

    def ask(self, call: Any, piece: int | None = None) -> None:
        self.call, self.piece, self.since = call, piece, time.monotonic()


class RewardActors:
    """Actors that score pieces; one that dies or falls silent is replaced, and another one has its piece.

    Raises:
        ConfigError: the cluster cannot be reached, has no room, or other versions or files than this process.
        ServingError: an actor cannot be started.
    """

    def __init__(self, config: GRPOConfig, rewards: Rewards, timeout_seconds: float) -> None:
        self._config, self._rewards, self._timeout = config, rewards, timeout_seconds
        self._workers: list[_Worker] = []
        self._own = False
        self.news: list[str] = []
        self._start()

    def _start(self) -> None:
        chosen, count = self._config.distributed, self._config.distributed.reward_workers or 0
        self._own = connect(chosen.ray_address, chosen.actors)
        self._workers = [_Worker(number) for number in range(count)]
        try:
            await_room(f"distributed.reward_workers={count}", count * CPUS, 0.0)
            for worker in self._workers:
                self._replace(worker)
            for worker in self._workers:
                try:
                    self._take(worker, get_result(worker.call, max(self._timeout, START_SECONDS)))
                except MemberError as error:
                    raise ServingError(f"{worker.title} cannot be started: {error}") from error
        except BaseException:
            self.close()
            raise

    def _replace(self, worker: _Worker) -> None:
        def node() -> str:  # sent by value: an actor need not import this file, and torch with it
            import ray

            return str(ray.get_runtime_context().get_node_id())

        host: Any = ray.remote(num_cpus=CPUS, max_restarts=0, scheduling_strategy="SPREAD")(RewardHost)
        worker.actor, worker.about = host.remote(self._rewards), None
        worker.ask(worker.actor.start.remote(node))

    def score(self, pieces: Sequence[Piece]) -> list[Answer]:
        """The pieces' rewards.

        Raises:
            RewardError: as a function raised it; or three workers failed at the same rows, or none is left.
        """
        if not self._workers:
            self._start()
        waiting, tries = list(range(len(pieces))), Counter[int]()
        found: dict[int, Answer] = {}
        try:
            while len(found) < len(pieces):
                for worker in self._workers:
                    if worker.call is None and waiting:
                        number = waiting.pop(0)
                        worker.ask(worker.actor.score.remote(pieces[number].asked), number)
                busy = [worker for worker in self._workers if worker.call is not None]
                ray.wait([worker.call for worker in busy], num_returns=1, timeout=_LOOK_SECONDS)
                for worker in busy:
                    number = worker.piece
                    try:
                        if (answer := self._look_at(worker)) is not None and number is not None:
                            found[number] = answer
                    except MemberError as error:
                        if number is not None:
                            tries[number] += 1
                            waiting.insert(0, number)
                        self._fail(worker, f"{error}")
                        if number is not None and tries[number] >= _MOST_TRIES:
                            rows = ", ".join(sorted({prompt.uid for prompt in pieces[number].asked.prompts}))
                            raise RewardError(
                                f"{_MOST_TRIES} reward workers failed one after another while they scored the same "
                                f"completions, of the rows {rows:.300}; the last one: {error}"
                            ) from error
                    except RewardError as error:
                        raise error if number is None else placed(error, pieces[number].first) from error
        finally:
            for worker in self._workers:
                worker.piece = None  # after an error, what it is doing is nobody's any more
        return [found[number] for number in range(len(pieces))]

    def _look_at(self, worker: _Worker) -> Answer | None:
        """The answer to its call, if that is there."""
        if ray.wait([worker.call], timeout=0)[0]:
            return self._take(worker, get_result(worker.call, _LOOK_SECONDS))
        most = self._timeout if worker.about is not None else max(self._timeout, START_SECONDS)
        if time.monotonic() - worker.since > most:
            raise MemberError(f"silent for {most:g} s (distributed.timeout_seconds)")
        return None

    def _take(self, worker: _Worker, answer: Any) -> Answer | None:
        worker.call = None
        if worker.about is not None:
            worker.failures = 0
            found: Answer = answer
            return found
        for package in _NUMBERS:
            if (there := answer["versions"][package]) != (here := installed()[package]):
                raise ConfigError(
                    f"distributed.reward_workers: {answer['host']} has {package} {there}, this process has {here}; "
                    "install the same on every machine"
                )
        worker.about = answer
        return None

    def _fail(self, worker: _Worker, why: str) -> None:
        """Replace it, or go on without it."""
        doing, worker.failures = "starting" if worker.about is None else "scoring", worker.failures + 1
        after, title = "it is replaced", worker.title
        self._end(worker)
        if worker.failures > self._config.distributed.max_restarts:
            self._workers.remove(worker)
            left = f"{len(self._workers)} of {self._config.distributed.reward_workers}"
            after = f"{worker.failures} times in a row: the run goes on with {left}"
        else:
            self._replace(worker)
        self.news.append(f"{title} failed while {doing}: {why[:500]}; {after}")
        if not self._workers:
            raise RewardError(f"{title}, the last one, failed while {doing}: {why[:1000]}")

    def _end(self, worker: _Worker) -> None:
        """Kill the process; one on this machine even if it takes no message any more."""
        kill(worker.actor)
        if worker.about is not None and worker.about["node"] == ray.get_runtime_context().get_node_id():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(worker.about["pid"], signal.SIGKILL)

    def close(self) -> None:
        """End the actors; who has connected to the cluster leaves it. They start anew when they are needed."""
        for worker in self._workers if ray.is_initialized() else ():
            kill(worker.actor)
        self._workers = []
        if self._own and ray.is_initialized():
            leave()
        self._own = False


def pickled(functions: Sequence[Any]) -> bytes:
    """Reward functions by value.

    Raises:
        ConfigError: one cannot be sent to another process.
    """
    for function in functions:
        try:
            ray.cloudpickle.dumps(function)
        except Exception as error:
            raise ConfigError(
                f"distributed.reward_workers: the reward function {function!r:.100} cannot be sent to another process "
                f"({type(error).__name__}: {error!s:.200}); name it in rewards.functions (file.py:function), so that "
                "workers make their own, or set reward_workers to none"
            ) from error
    return bytes(ray.cloudpickle.dumps(list(functions)))
