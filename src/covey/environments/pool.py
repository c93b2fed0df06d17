"""Many environments at once, each in a process of its own, none of which can hold up or end the run.

    with EnvironmentPool(world, places=16) as pool:
        pool.reset(0, task, seed)            # returns at once
        for place, found in pool.wait():     # whatever is ready: an Observation, an Outcome, or an EpisodeError ...

    template  --fork-->  place (one environment, one episode after another)
                   |->   place ...

The template is one process that has imported the world. Forking it takes milliseconds and shares its memory; starting
Python for each of dozens of environments would take many seconds. A place ends when its channel closes. The template
ends when its own does: places that are left have two seconds, and whatever a place leaves behind in its process group
is killed.
"""

from __future__ import annotations

import base64
import math
import os
import pickle
import select
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from covey.environments.base import Observation, Outcome, TaskInstance, World, checked_observation
from covey.environments.forks import GRACE_SECONDS, NUMBER_BYTES, SAID
from covey.errors import ConfigError, EpisodeError
from covey.functions import USER_FILES
from covey.processes import end_python, start_python
from covey.rewards.jail import messages

_START_SECONDS = 120.0
_RESETS_AT_ONCE = max(8, os.cpu_count() or 1)  # the others wait
_SERVE = "import sys; from covey.environments.forks import serve_template; serve_template(int(sys.argv[1]))"

Found = Observation | Outcome | EpisodeError
"""What a place answers: to `reset` an Observation, to `step` an Outcome, to either that it failed."""


class EnvironmentPool(AbstractContextManager["EnvironmentPool"]):
    """Processes that play episodes of a world, each in a numbered place.

    A process that takes too long or ends is killed and gives an `EpisodeError`; the next episode gets a new process.

    Raises `ConfigError`: the world cannot be pickled, or (at the first reset) not be imported in the other process.

    Args:
        world: makes the environments. It is pickled, so its class must be in a module or `file.py`, not in `__main__`.
        places: number of episodes at the same time.
        reset_seconds: time limit of a reset, in seconds, from when it begins.
        step_seconds: time limit of a step, in seconds.
    """

    def __init__(self, world: World, places: int, *, reset_seconds: float = 60.0, step_seconds: float = 20.0) -> None:
        self._limits = {"reset": reset_seconds, "step": step_seconds}
        self._template = _Template(world)
        self._places = [_Place(self._template) for _ in range(places)]
        self._early: list[tuple[int, Found]] = []
        weakref.finalize(self, _close, self._places, self._template)

    def __len__(self) -> int:
        return len(self._places)

    def reset(self, place: int, task: TaskInstance, seed: int) -> None:
        """Begin an episode; `wait` returns its first observation."""
        self._ask(place, {"task": task, "seed": seed}, "reset")

    def step(self, place: int, action: str) -> None:
        """Take an action; `wait` returns its outcome."""
        self._ask(place, {"action": action}, "step")

    def wait(self, seconds: float | None = None) -> list[tuple[int, Found]]:
        """The answers since the last call, in the order of the places; empty if no request is open.

        It waits at most `seconds` for the first answer; None = without limit.
        """
        found, self._early = self._early, []
        until = None if seconds is None else time.monotonic() + seconds
        while not found:
            waiting = {p.channel.fileno(): number for number, p in enumerate(self._places) if p.channel and p.deadline}
            if not waiting:
                return []
            ends = [p.deadline for p in self._places if p.deadline] + ([until] if until is not None else [])
            answered = [waiting[one] for one in _ready(waiting, min(ends) - time.monotonic())]
            found = [(n, answer) for n in answered if (answer := self._places[n].receive()) is not None]
            now = time.monotonic()
            for number, place in enumerate(self._places):
                if place.deadline and place.deadline <= now:
                    place.stop()
                    late = f"the environment took longer than {place.limit:g} s in {place.asked}; it was stopped"
                    found.append((number, EpisodeError(late)))
            if until is not None and now >= until:
                break
        return sorted(found, key=lambda pair: pair[0])

    def cancel(self, place: int) -> None:
        """Drop an open request and kill its process."""
        self._early = [(number, found) for number, found in self._early if number != place]
        if self._places[place].deadline:
            self._places[place].stop()

    def expert_action(self, place: int) -> str | None:
        """The action of a perfect player, if the world knows it. It waits for the answer.

        Raises `EpisodeError`: the environment fails, or its answer is not an action.
        """
        asked, limit = self._idle(place), self._limits["step"]
        try:
            asked.send({"expert": True}, "step", limit)
        except (OSError, ValueError) as error:
            asked.stop()
            raise EpisodeError(f"the environment could not be asked for expert_action: {error}") from error
        answer = asked.receive_raw(limit)
        if answer is None:
            raise EpisodeError(f"expert_action: no answer within {limit:g} s, or its process has ended")
        if "error" in answer:
            raise EpisodeError(f"expert_action: {answer['error']}")
        action: str | None = answer["expert"]
        text = action if isinstance(action, str) else ""
        if action is not None and (not text.strip() or text.encode("utf-8", "replace").decode() != text):
            raise EpisodeError(f"expert_action returned {action!a:.80}; return an action as text, or None")
        return action

    def close(self) -> None:
        """Close all environments and end their processes; a later request starts new ones."""
        self._early = []
        _close(self._places, self._template)

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _idle(self, number: int) -> _Place:
        if self._places[number].deadline:
            raise ValueError(f"place {number} has not answered yet")
        return self._places[number]

    def _ask(self, number: int, message: dict[str, Any], what: str) -> None:
        place = self._idle(number)
        try:
            place.send(message, what, self._limits[what])
        except ConfigError:
            raise
        except (OSError, ValueError, TypeError) as error:
            place.stop()
            self._early.append((number, EpisodeError(f"the environment could not be asked: {error}")))


@dataclass(slots=True)
class _Place:
    """One process with one environment, and the question that it was asked."""

    template: _Template
    channel: socket.socket | None = None
    number: int = 0
    deadline: float = 0.0
    asked: str = ""
    limit: float = 0.0

    def send(self, message: dict[str, Any], what: str, limit: float) -> None:
        """Ask. A process that has ended since it last answered is replaced, unless an episode ends with it."""
        self.asked, self.limit = what, limit
        if self.channel is not None:
            try:
                return self._send(self.channel, message)
            except OSError:
                self.stop()
                if what != "reset":
                    raise
        self.channel, self.number = self.template.fork()
        return self._send(self.channel, message)

    def _send(self, channel: socket.socket, message: dict[str, Any]) -> None:
        messages.send(channel.fileno(), message)
        self.deadline = math.inf if self.asked == "reset" else time.monotonic() + self.limit

    def receive(self) -> Found | None:
        """What was answered; None = a reset's turn has come, and its time runs."""
        waits, answer = self.deadline == math.inf, self.receive_raw(0.0)
        if answer is None:
            return EpisodeError(f"the environment's process ended in {self.asked}")
        if waits and "begun" in answer:
            self.deadline = time.monotonic() + self.limit
            return None
        if "error" in answer:
            return EpisodeError(f"the environment failed in {self.asked}: {answer['error']}")
        seen = answer["observation"]
        try:
            files = [base64.b64decode(picture) for picture in seen["pictures"]]
            observation = checked_observation(Observation(seen["text"], seen["actions"], files), self.asked)
        except (EpisodeError, ValueError) as error:
            return EpisodeError(str(error))
        if self.asked == "reset":
            return observation
        return Outcome(observation, **{name: answer[name] for name in (*SAID, "info")})

    def receive_raw(self, seconds: float) -> dict[str, Any] | None:
        """The answer as it came; None when the process is gone or takes longer."""
        self.deadline = 0.0
        if self.channel is None:
            return None
        answer = None
        with suppress(OSError, ValueError):
            answer = _heard(self.channel, seconds)
        if answer is None:
            self.stop()
        return answer

    def stop(self, *, gently: bool = False) -> None:
        """End the process: kill it, or let it give back what it holds."""
        self.deadline = 0.0
        if self.channel is not None:
            if not gently:
                self.template.kill(self.number)
            self.channel.close()
            self.channel = None


class _Template:
    """The process that is forked for each place."""

    def __init__(self, world: World) -> None:
        name = type(world).__name__
        if type(world).__module__ == "__main__":
            raise ConfigError(
                f"{name} is defined in __main__, where other processes cannot find it; move it to a module"
            )
        try:
            self._world = base64.b64encode(pickle.dumps(world)).decode()
        except Exception as error:
            raise ConfigError(f"{name} cannot be sent to another process: {error}") from error
        self._lock, self._forks = threading.Lock(), 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self) -> tuple[socket.socket, int]:
        """A new place: its channel, and its number. `OSError`: there is none; `ConfigError`: no world can be made."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self.stop()  # it has ended by itself
            self.start()
            assert self._control is not None
            self._forks = number = self._forks + 1
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._control, [number.to_bytes(NUMBER_BYTES)], [theirs.fileno()])
                except OSError:
                    ours.close()
                    raise
        try:
            hello = _heard(ours, _START_SECONDS)
            if hello is None or "error" in hello:
                raise OSError("no process came up" + (f": {hello['error']}" if hello else ""))
        except BaseException:
            ours.close()
            raise
        return ours, number

    def kill(self, number: int) -> None:
        """Kill a place, unless it has ended; what it has started ends with it."""
        with self._lock, suppress(OSError):  # the template has ended, and its places with it
            if self._control is not None:
                self._control.sendall(number.to_bytes(NUMBER_BYTES))

    def stop(self) -> None:
        if self._process is not None and self._control is not None:
            end_python(self._process, self._control, GRACE_SECONDS + 1)
        self._process = self._control = None

    def start(self) -> None:
        """Import and prepare the world, unless that is done. Raises `ConfigError`: it cannot be."""
        if self._control is not None:
            return
        self._process, self._control = start_python(_SERVE)
        first = {"world": self._world, "files": USER_FILES, "resets_at_once": _RESETS_AT_ONCE}
        answer = None
        with suppress(OSError):
            messages.send(self._control.fileno(), first)
            answer = _heard(self._control, _START_SECONDS)
        if answer is None or "error" in answer:
            self.stop()
            reason = "it took too long or ended itself" if answer is None else answer["error"]
            raise ConfigError(f"the environments' process did not start: {reason}")


def _close(places: list[_Place], template: _Template) -> None:
    for place in places:
        place.stop(gently=True)
    template.stop()


def _heard(channel: socket.socket, seconds: float) -> dict[str, Any] | None:
    """The next message; None when there is none in time, or the other side has closed."""
    return messages.receive(channel.fileno()) if _ready([channel.fileno()], seconds) else None


def _ready(channels: Iterable[int], seconds: float) -> list[int]:
    """Those of these file descriptors that can be read, after `seconds` at most, which may be infinite."""
    poll = select.poll()
    for channel in channels:
        poll.register(channel, select.POLLIN)
    limit = None if seconds == math.inf else max(0, math.ceil(min(seconds, 1e6) * 1000))
    return [channel for channel, _ in poll.poll(limit)]
