"""The processes behind `covey.environments.pool`: the template, and the places that are forked from it."""

from __future__ import annotations

import base64
import ctypes
import fcntl
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from covey.environments.base import Environment, Observation, checked_reset, checked_step
from covey.errors import EpisodeError, raised_at
from covey.functions import USER_FILES
from covey.rewards.jail import messages

GRACE_SECONDS = 2.0
"""That places have for giving back what they hold."""
NUMBER_BYTES = 4
"""Of a message to the template: with a channel it is a new place's, without one that place is killed."""
SAID = ("reward", "done", "success", "valid")
_LOOK_SECONDS = 0.03  # between two looks whether it is a reset's turn
_PR_SET_PDEATHSIG = 1


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
                        try:
                            ours.close()
                            _serve_place(world, channel, turns)
                            os._exit(0)
                        finally:
                            os._exit(1)
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
        except OSError as error:  # taken, as systems say it in two ways; else somebody has closed this process's files
            return not isinstance(error, BlockingIOError | PermissionError)
        return True


def _serve_place(world: Any, channel: int, turns: _Turns) -> None:
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    place = _Served(world)
    with suppress(ConnectionError):  # nobody listens any more
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
    place.close()


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
                return {"observation": _sent(self._seen)}
            if "action" in message:
                action = message["action"]
                outcome = checked_step(self._environment.step(action), action, self._seen)
                self._seen = outcome.observation
                said = {name: getattr(outcome, name) for name in SAID}
                info = {name: repr(value)[:200] for name, value in outcome.info.items()}
                return {"observation": _sent(self._seen), "info": info, **said}
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


def _sent(seen: Observation) -> dict[str, Any]:
    pictures = [base64.b64encode(picture.data).decode() for picture in seen.pictures]
    return {"text": seen.text, "actions": seen.actions, "pictures": pictures}


def _described(error: BaseException) -> str:
    kind = "" if isinstance(error, EpisodeError) else f"{type(error).__name__}: "
    message = "(its message cannot be shown)"
    with suppress(Exception):
        message = str(error)
    return f"{kind}{message[:400]}{raised_at(error)[:400]}"
