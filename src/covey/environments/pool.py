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
import ctypes
import fcntl
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self

from covey.environments.base import Environment, Observation, Outcome, TaskInstance, World, checked_reset, checked_step
from covey.errors import ConfigError, EpisodeError, raised_at
from covey.functions import USER_FILES
from covey.processes import end_python, start_python
from covey.rewards.jail import messages

_START_SECONDS = 120.0
RESETS_AT_ONCE = max(8, os.cpu_count() or 1)
_SERVE = "import sys; from covey.environments.pool import serve_template; serve_template(int(sys.argv[1]))"

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
    """A world on its way to another process. Raises `ConfigError`: it cannot be sent, or would not be found there."""
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

    A place that takes too long or ends is killed, answers `EpisodeError`, and is a fresh process the next time. One
    that has ended between two episodes begins the next one in a fresh process.

    Args:
        world: makes the environments; it is pickled, so a class of a module or of a `file.py:World`, not of `__main__`.
        places: how many episodes can go on at once.
        reset_seconds: time limit of a reset, from its turn on.
        step_seconds: time limit of a step.
        resets_at_once: how many resets go on at once; the others wait for their turn.

    Raises:
        ConfigError: the world cannot be sent to another process, or (at the first reset) not be imported there.
    """

    def __init__(
        self,
        world: World,
        places: int,
        *,
        reset_seconds: float = 60.0,
        step_seconds: float = 20.0,
        resets_at_once: int = RESETS_AT_ONCE,
    ) -> None:
        self._limits = {"reset": reset_seconds, "step": step_seconds}
        self._template = _Template(world, resets_at_once)
        self._places = [_Place(self._template) for _ in range(places)]
        self._early: list[tuple[int, Found]] = []
        weakref.finalize(self, _close, self._places, self._template)

    def __len__(self) -> int:
        """The number of places."""
        return len(self._places)

    def reset(self, place: int, task: TaskInstance, seed: int) -> None:
        """Begin an episode; `wait` tells when it has begun."""
        self._ask(place, {"task": task, "seed": seed}, "reset")

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
            answered = [
                (waiting[one], self._places[waiting[one]].receive()) for one in _ready(waiting, min(ends) - now)
            ]
            found = [(number, answer) for number, answer in answered if answer is not None]
            now = time.monotonic()
            for number, place in enumerate(self._places):
                if place.deadline and place.deadline <= now:
                    found.append((number, place.give_up()))
            if until is not None and now >= until:
                break
        return sorted(found, key=lambda pair: pair[0])

    def cancel(self, place: int) -> None:
        """Forget an open question; what is working on it is killed."""
        self._early = [(number, found) for number, found in self._early if number != place]
        if self._places[place].deadline:
            self._places[place].stop()

    def expert_action(self, place: int) -> str | None:
        """What a perfect player would do there now, where the world knows. Waits for the answer.

        Raises:
            EpisodeError: the environment fails, or what it answers is no action.
        """
        self._check_idle(place)
        asked = self._places[place]
        try:
            asked.send({"expert": True}, "step", self._limits["step"])
        except (OSError, ValueError) as error:
            asked.stop()
            raise EpisodeError(f"the environment could not be asked for expert_action: {error}") from error
        answer = asked.receive_raw(self._limits["step"])
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

    def close(self) -> None:
        """End every process, and let environments give back what they hold; those that are needed again start anew."""
        self._early = []
        _close(self._places, self._template)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _check_idle(self, number: int) -> None:
        if self._places[number].deadline:
            raise ValueError(f"place {number} has not answered yet")

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
    """One process with one environment, and the question that it was asked."""

    template: _Template
    channel: socket.socket | None = None
    number: int = 0
    deadline: float = 0.0
    asked: str = ""
    limit: float = 0.0

    def send(self, message: dict[str, Any], what: str, limit: float) -> None:
        """Ask. A process that has ended since it last answered is replaced, unless an episode ends with it.

        Raises `OSError, ValueError, TypeError`: it cannot be asked; `ConfigError`: the world cannot be made.
        """
        self.asked, self.limit = what, limit
        if self.channel is not None:
            try:
                self._send(message)
            except OSError:
                self.stop()
                if what != "reset":
                    raise
        if self.channel is None:
            self.channel, self.number = self.template.fork()
            self._send(message)

    def _send(self, message: dict[str, Any]) -> None:
        assert self.channel is not None
        messages.send(self.channel.fileno(), message)
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
            if not seconds or _ready([self.channel.fileno()], seconds):
                answer = messages.receive(self.channel.fileno())
        except (OSError, ValueError):
            answer = None
        if answer is None:
            self.stop()
        return answer

    def give_up(self) -> EpisodeError:
        self.stop()
        return EpisodeError(f"the environment took longer than {self.limit:g} s in {self.asked}; it was stopped")

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

    def __init__(self, world: World, resets_at_once: int) -> None:
        self._world = base64.b64encode(pickled_world(world)).decode()
        self._resets_at_once = resets_at_once
        self._lock, self._forks = threading.Lock(), 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self) -> tuple[socket.socket, int]:
        """A new place: its channel, and its number.

        Raises `OSError`: there is none; `ConfigError`: the world cannot be made.
        """
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
        hello = None
        try:
            if _ready([ours.fileno()], _START_SECONDS):
                hello = messages.receive(ours.fileno())
            if hello is None or "error" in hello:
                raise OSError("no process came up" + (f": {hello['error']}" if hello else ""))
        except BaseException:
            ours.close()
            raise
        return ours, number

    def kill(self, number: int) -> None:
        """Kill a place, unless it has ended; what it has started ends with it."""
        with self._lock:
            if self._control is not None:
                with suppress(OSError):  # the template has ended, and its places with it
                    self._control.sendall(number.to_bytes(NUMBER_BYTES))

    def stop(self) -> None:
        if self._process is not None and self._control is not None:
            end_python(self._process, self._control, GRACE_SECONDS + 1)
        self._process = self._control = None

    def start(self) -> None:
        """Import and prepare the world, unless that is done. Raises `ConfigError`: it cannot be."""
        if self._control is not None:
            return
        self._process, ours = start_python(_SERVE)
        self._control = ours
        first = {"world": self._world, "files": USER_FILES, "resets_at_once": self._resets_at_once}
        answer = None
        try:
            messages.send(ours.fileno(), first)
            if _ready([ours.fileno()], _START_SECONDS):
                answer = messages.receive(ours.fileno())
        except OSError:
            answer = None
        if answer is None or "error" in answer:
            self.stop()
            reason = "it took too long or ended itself" if answer is None else answer["error"]
            raise ConfigError(f"the environments' process did not start: {reason}")


def _close(places: list[_Place], template: _Template) -> None:
    for place in places:
        place.stop(gently=True)
    template.stop()


def _ready(channels: Iterable[int], seconds: float) -> list[int]:
    """Those of these file descriptors that can be read, after `seconds` at most, which may be infinite."""
    poll = select.poll()
    for channel in channels:
        poll.register(channel, select.POLLIN)
    limit = None if seconds == math.inf else max(0, math.ceil(min(seconds, 1e6) * 1000))
    return [channel for channel, _ in poll.poll(limit)]


_PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 2.0
"""That places have for giving back what they hold."""
NUMBER_BYTES = 4
"""Of a message to the template: a number with a channel is a new place's, without one that place is killed."""
_LOOK_SECONDS = 0.03
"""Between two looks whether it is a reset's turn."""


def serve_template(control: int) -> None:
    """What the template does: import and prepare the world, then fork a place for each channel that arrives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends this process
    with socket.socket(fileno=control) as ours:
        message = messages.receive(control)
        if message is None:
            return
        USER_FILES.update(message["files"])
        try:
            world = pickle.loads(base64.b64decode(message["world"]))
            world.prepare()
        except BaseException as error:
            messages.send(control, {"error": _described(error)})
            return
        messages.send(control, {"ready": True})
        turns, forks, ready = _Turns(message["resets_at_once"]), _Forks(), select.poll()
        for one in (ours.fileno(), forks.news):
            ready.register(one, select.POLLIN)
        while True:
            events = dict(ready.poll())
            forks.reap()
            if ours.fileno() not in events:
                continue
            try:
                data, channels, _, _ = socket.recv_fds(ours, NUMBER_BYTES, 1)
            except ConnectionError:
                data = b""
            if not data:
                break
            number = int.from_bytes(data)
            if not channels:
                forks.kill(number)
            for channel in channels:
                try:
                    pid = os.fork()
                except OSError as error:  # no room for one more process
                    with suppress(OSError):
                        messages.send(channel, {"error": str(error)})
                else:
                    if pid == 0:
                        status = 1
                        try:
                            ours.close()
                            status = _serve_place(world, channel, turns)
                        finally:
                            os._exit(status)
                    forks.add(number, pid)
                os.close(channel)
    forks.end()


class _Forks:
    """The places' processes, each the leader of a group."""

    def __init__(self) -> None:
        self._running: dict[int, int] = {}
        self.news, told = os.pipe()
        for one in (self.news, told):
            os.set_blocking(one, False)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def add(self, number: int, pid: int) -> None:
        """Note one that has just begun, by a number that no other one has."""
        with suppress(OSError):  # it may have done so itself, or ended
            os.setpgid(pid, pid)
        self._running[number] = pid

    def kill(self, number: int) -> None:
        """Kill one with all that is in its group, unless it has been let go: its process number may be another's."""
        if number in self._running:
            with suppress(OSError):
                os.killpg(self._running[number], signal.SIGKILL)

    def reap(self) -> None:
        """Let ended ones go. What is left of their groups is killed first, while their numbers are still theirs."""
        with suppress(BlockingIOError):
            os.read(self.news, 4096)  # before the look: what ends after it is news again
        for number, pid in list(self._running.items()):
            try:
                ended = _has_ended(pid)
            except ChildProcessError:  # the world's own code has waited for it
                del self._running[number]
            else:
                if ended:
                    self._let_go(number)

    def end(self) -> None:
        """Wait for all of them a little, then kill."""
        until, ready = time.monotonic() + GRACE_SECONDS, select.poll()
        ready.register(self.news, select.POLLIN)
        while self._running and (left := until - time.monotonic()) > 0:
            ready.poll(1000 * left)
            self.reap()
        for number in list(self._running):
            self._let_go(number)

    def _let_go(self, number: int) -> None:
        self.kill(number)
        with suppress(ChildProcessError):
            os.waitpid(self._running[number], 0)
        del self._running[number]


def _has_ended(pid: int) -> bool:
    """Whether a child has ended. Its number stays its own after that, except in a Python without `waitid` (on macOS
    before 3.13): there the number stays taken only while something is left of its group.
    """
    if hasattr(os, "waitid"):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return os.waitpid(pid, os.WNOHANG)[0] != 0


class _Turns:
    """How many resets go on at once: a reset may make a game for seconds, and dozens of them on two cores would all be
    over their time limit. A turn is a lock on a byte of a file, which the system takes back from a process that ends.
    """

    def __init__(self, count: int) -> None:
        self._count, self._file = count, tempfile.TemporaryFile()  # noqa: SIM115 (as long as this process)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for a turn."""
        while (taken := next(filter(self._take, range(self._count)), None)) is None:
            time.sleep(_LOOK_SECONDS)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, taken)

    def _take(self, number: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):  # taken: systems differ in how they say it
            return False
        except OSError:  # somebody has closed every file of this process
            return True
        return True


def _serve_place(world: Any, channel: int, turns: _Turns) -> int:
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    place = _Served(world)
    try:
        messages.send(channel, {"ready": True})
        while (message := messages.receive(channel)) is not None:
            if "task" in message:
                with turns.taken():
                    messages.send(channel, {"begun": True})
                    answer = place.answer(message)
            else:
                answer = place.answer(message)
            try:
                messages.send(channel, answer)
            except ValueError as error:
                place.close()
                messages.send(channel, {"error": f"its answer is {error}"})
    except ConnectionError:
        pass  # nobody listens any more
    place.close()
    return 0


class _Served:
    """An environment behind plain messages; its errors are answers."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._environment: Environment | None = None
        self._seen = Observation("")

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            if self._environment is None:
                self._environment = self._world.make()
            if "task" in message:
                self._seen = checked_reset(self._environment.reset(message["task"], message["seed"]))
                return {"observation": _plain(self._seen)}
            if "action" in message:
                action = message["action"]
                outcome = checked_step(self._environment.step(action), action, self._seen)
                self._seen = outcome.observation
                return {
                    "observation": _plain(outcome.observation),
                    "reward": outcome.reward,
                    "done": outcome.done,
                    "success": outcome.success,
                    "valid": outcome.valid,
                    "info": {name: repr(value)[:200] for name, value in outcome.info.items()},
                }
            return {"expert": self._environment.expert_action()}
        except BaseException as error:
            self.close()  # what state it is in nobody knows
            return {"error": _described(error)}

    def close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            try:
                environment.close()
            except BaseException as error:
                sys.stderr.write(f"closing {environment!r:.80}: {error}\n")


def _described(error: BaseException) -> str:
    kind = "" if isinstance(error, EpisodeError) else f"{type(error).__name__}: "
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown)"
    return f"{kind}{message[:400]}{raised_at(error)[:400]}"


def _plain(observation: Observation) -> dict[str, Any]:
    return {"text": observation.text, "actions": None if observation.actions is None else list(observation.actions)}
