"""Many environments at once, each in a process of its own, none of which can hold up or end the run.

with EnvironmentPool(world, places=16) as pool:
    pool.reset(0, task, seed)            # returns at once
    for place, found in pool.wait():     # whatever is ready: an Observation, an Outcome, or an EpisodeError ...
"""

from __future__ import annotations

import base64
import os
import pickle
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

from covey.environments.base import Observation, Outcome, TaskInstance, World
from covey.errors import ConfigError, EpisodeError
from covey.functions import USER_FILES
from covey.processes import end_python, start_python
from covey.rewards.jail import frames

_START_SECONDS = 120.0
FEWEST_RESETS_AT_ONCE = 8
_RESETS_AT_ONCE = max(FEWEST_RESETS_AT_ONCE, os.cpu_count() or 1)
"""A reset may make a game for seconds: 64 of them on two cores would all be over their time limit."""
_SERVE = "import sys; from covey.environments.worker import serve_template; serve_template(int(sys.argv[1]))"

Found = Observation | Outcome | EpisodeError
"""What a place answers: to `reset` an Observation, to `step` an Outcome, to either that it failed."""


class Places(Protocol):
    """Where episodes are played; the methods are documented in `EnvironmentPool`."""

    def __len__(self) -> int: ...

    def reset(self, place: int, task: TaskInstance, seed: int) -> None: ...

    def step(self, place: int, action: str) -> None: ...

    def wait(self, seconds: float | None = None) -> list[tuple[int, Found]]: ...

    def cancel(self, place: int) -> None: ...

    def close(self) -> None: ...


def pickled_world(world: World) -> bytes:
    """A world on its way to another process.

    Raises:
        ConfigError: it cannot be sent, or would not be found there.
    """
    if type(world).__module__ == "__main__":
        raise ConfigError(
            f"{type(world).__name__} is defined in __main__, where other processes cannot find it; move it to a module"
        )
    try:
        return pickle.dumps(world)
    except Exception as error:
        raise ConfigError(f"{type(world).__name__} cannot be sent to another process: {error}") from error


class EnvironmentPool:
    """Places in which instances of a world are played.

    A place that takes too long or ends is killed, answers `EpisodeError`, and is a fresh process the next time. Eight
    resets, or as many as there are processors, go on at once; the others wait for their turn.

    Args:
        world: makes the environments; it is pickled, so a class of a module or of a `file.py:World`, not of `__main__`.
        places: how many episodes can go on at once.
        reset_seconds: time limit of a reset, from its turn on.
        step_seconds: time limit of a step.

    Raises:
        ConfigError: the world cannot be sent to another process, or (at the first reset) not be imported there.
    """

    def __init__(self, world: World, places: int, *, reset_seconds: float = 60.0, step_seconds: float = 20.0) -> None:
        self._limits = {"reset": reset_seconds, "step": step_seconds}
        self._template = _Template(world)
        self._places = [_Place(self._template) for _ in range(places)]
        self._early: list[tuple[int, Found]] = []
        self._queued: dict[int, dict[str, Any]] = {}  # resets that wait for their turn
        self._turns = threading.BoundedSemaphore(_RESETS_AT_ONCE)  # of those that threads ask for
        weakref.finalize(self, _close, self._places, self._template)

    def __len__(self) -> int:
        """The number of places."""
        return len(self._places)

    def reset(self, place: int, task: TaskInstance, seed: int) -> None:
        """Begin an episode; `wait` tells when it has begun."""
        self._check_idle(place)
        self._queued[place] = {"task": task, "seed": seed}
        self._begin_queued()

    def step(self, place: int, action: str) -> None:
        """Do something; `wait` tells what came of it."""
        self._ask(place, {"action": action}, "step")

    def wait(self, seconds: float | None = None) -> list[tuple[int, Found]]:
        """What has been answered since the last call, in the order of the places.

        Args:
            seconds: wait at most so long for the first answer; None = until there is one. Without open questions the
                answer is empty at once.
        """
        found, self._early = self._early, []
        until = None if seconds is None else time.monotonic() + seconds
        while not found:
            waiting = {p.channel.fileno(): number for number, p in enumerate(self._places) if p.channel and p.deadline}
            if not waiting:
                return []
            now = time.monotonic()
            ends = [p.deadline for p in self._places if p.deadline] + ([until] if until is not None else [])
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, min(ends) - now))
            found = [(waiting[channel], self._places[waiting[channel]].receive()) for channel in ready]
            now = time.monotonic()
            for number, place in enumerate(self._places):
                if place.deadline and place.deadline <= now:
                    found.append((number, place.give_up()))
            self._begin_queued()
            found += self._early
            self._early = []
            if until is not None and now >= until:
                break
        return sorted(found, key=lambda pair: pair[0])

    def cancel(self, place: int) -> None:
        """Forget an open question; what is working on it is killed."""
        self._queued.pop(place, None)
        self._early = [(number, found) for number, found in self._early if number != place]
        if self._places[place].deadline:
            self._places[place].stop()
        self._begin_queued()

    def expert_action(self, place: int) -> str | None:
        """What a perfect player would do there now, where the world knows. Waits for the answer.

        Raises:
            EpisodeError: the environment fails, or what it answers is no action.
        """
        self._ask(place, {"expert": True}, "step")
        answer = self._places[place].receive_raw(self._limits["step"])
        if answer is None:
            raise EpisodeError(f"expert_action: no answer within {self._limits['step']:g} s, or its process has ended")
        if "error" in answer:
            raise EpisodeError(f"expert_action: {answer['error']}")
        action = answer["expert"]
        if action is None:
            return None
        if not isinstance(action, str) or not action.strip() or action.encode("utf-8", "replace").decode() != action:
            raise EpisodeError(f"expert_action returned {action!a:.80}; return an action as text, or None")
        return action

    def prepare(self) -> None:
        """Import and prepare the world, which the first episode does otherwise.

        Raises:
            ConfigError: it cannot be.
        """
        self._template.start()

    def answer(self, place: int, message: dict[str, Any], what: str) -> Found:
        """Ask and wait for the answer; different places may be asked from different threads.

        Args:
            place: which one; nothing else is asked of it meanwhile.
            message: `{"task": ..., "seed": ...}` or `{"action": ...}`.
            what: "reset" or "step", whose time limit holds.
        """
        asked = self._places[place]
        with self._turns if what == "reset" else nullcontext():
            try:
                asked.send(message, what, self._limits[what])
            except (OSError, ValueError, TypeError) as error:
                asked.stop()
                return EpisodeError(f"the environment could not be asked: {error}")
            assert asked.channel is not None
            return asked.receive() if select.select([asked.channel], [], [], asked.limit)[0] else asked.give_up()

    def close(self) -> None:
        """End every process; those that are needed again start anew."""
        self._queued.clear()
        _close(self._places, self._template)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _check_idle(self, number: int) -> None:
        if self._places[number].deadline or number in self._queued:
            raise ValueError(f"place {number} has not answered yet")

    def _begin_queued(self) -> None:
        """Ask for the resets whose turn has come."""
        going_on = sum(place.deadline > 0 and place.asked == "reset" for place in self._places)
        while self._queued and going_on < _RESETS_AT_ONCE:
            number = next(iter(self._queued))
            self._ask(number, self._queued.pop(number), "reset")
            going_on += self._places[number].deadline > 0

    def _ask(self, number: int, message: dict[str, Any], what: str) -> None:
        self._check_idle(number)
        place = self._places[number]
        try:
            place.send(message, what, self._limits[what])
        except ConfigError:
            raise
        except (OSError, ValueError, TypeError) as error:
            place.stop()
            self._early.append((number, EpisodeError(f"the environment could not be asked: {error}")))


@dataclass(slots=True)
class _Place:
    """One process with one environment, and the question that it was asked.

    Attributes:
        deadline: when the open question must be answered, 0 when none is open.
    """

    template: _Template
    channel: socket.socket | None = None
    deadline: float = 0.0
    asked: str = ""
    limit: float = 0.0
    kill: Callable[[], object] = lambda: None

    def send(self, message: dict[str, Any], what: str, limit: float) -> None:
        if self.channel is None:
            self.channel, self.kill = self.template.fork()
        self.asked, self.limit = what, limit
        frames.send(self.channel.fileno(), message)
        self.deadline = time.monotonic() + limit

    def receive(self) -> Found:
        answer = self.receive_raw(0.0)
        if answer is None:
            return EpisodeError(f"the environment's process ended in {self.asked}")
        if "error" in answer:
            return EpisodeError(f"the environment failed in {self.asked}: {answer['error']}")
        seen = answer["observation"]
        observation = Observation(seen["text"], None if seen["actions"] is None else tuple(seen["actions"]))
        if self.asked == "reset":
            return observation
        rest = {name: answer[name] for name in ("reward", "done", "success", "valid", "info")}
        return Outcome(observation, **rest)

    def receive_raw(self, seconds: float) -> dict[str, Any] | None:
        """The answer as it came; None when the process is gone or takes longer."""
        self.deadline = 0.0
        if self.channel is None:
            return None
        answer = None
        try:
            if not seconds or select.select([self.channel], [], [], seconds)[0]:
                answer = frames.receive(self.channel.fileno())
        except (OSError, ValueError):
            answer = None
        if answer is None:
            self.stop()
        return answer

    def give_up(self) -> EpisodeError:
        self.stop()
        return EpisodeError(f"the environment took longer than {self.limit:g} s in {self.asked}; it was stopped")

    def stop(self) -> None:
        self.deadline = 0.0
        if self.channel is not None:
            self.kill()
            self.channel.close()
            self.channel = None


class _Template:
    """The process that is forked for each place."""

    def __init__(self, world: World) -> None:
        self._world = base64.b64encode(pickled_world(world)).decode()
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._stop: Callable[[], object] = lambda: None

    def fork(self) -> tuple[socket.socket, Callable[[], object]]:
        """A new place: its channel, and what kills it.

        Raises:
            OSError: the template has ended.
        """
        with self._lock:
            self.start()
            assert self._control is not None
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._control, [b"f"], [theirs.fileno()])
                except OSError:
                    ours.close()
                    raise
        hello = frames.receive(ours.fileno()) if select.select([ours], [], [], _START_SECONDS)[0] else None
        if hello is None:
            ours.close()
            raise OSError("no process came up")
        return ours, partial(_kill, hello["pid"], _handle(hello["pid"]))

    def stop(self) -> None:
        if self._control is not None:
            self._stop()
            self._control = None

    def start(self) -> None:
        """Import and prepare the world, unless that is done.

        Raises:
            ConfigError: it cannot be.
        """
        if self._control is not None:
            return
        process, ours = start_python(_SERVE)
        self._control = ours
        self._stop = partial(end_python, process, ours)
        answer = None
        try:
            frames.send(ours.fileno(), {"world": self._world, "files": USER_FILES})
            if select.select([ours], [], [], _START_SECONDS)[0]:
                answer = frames.receive(ours.fileno())
        except OSError:
            answer = None
        if answer is None or "error" in answer:
            self.stop()
            reason = "it took too long or ended itself" if answer is None else answer["error"]
            raise ConfigError(f"the environments' process did not start: {reason}")


def _close(places: list[_Place], template: _Template) -> None:
    for place in places:
        place.stop()
    template.stop()


def _handle(pid: int) -> int | None:
    """A process handle that outlives the number: it never names another process. None where the system has none."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return None


def _kill(pid: int, handle: int | None) -> None:
    try:
        if handle is not None:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        elif not hasattr(os, "pidfd_open"):
            os.kill(pid, signal.SIGKILL)
    except OSError:
        return  # it has ended already
