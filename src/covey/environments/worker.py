"""The processes in which environments run: one template that has imported the world, and its forks.

    template  --fork-->  place (one environment, one episode after another)
                   |->   place ...

Forking a process that has imported everything takes milliseconds and shares its memory; starting Python for each of
dozens of environments would take many seconds. A place ends when its channel closes, and is killed when the template
ends.
"""

from __future__ import annotations

import base64
import ctypes
import os
import pickle
import signal
import socket
import sys
from typing import Any

from covey.environments.base import Environment, Observation, checked_reset, checked_step
from covey.errors import EpisodeError, raised_at
from covey.functions import USER_FILES
from covey.rewards.jail import frames

_PR_SET_PDEATHSIG = 1


def serve_template(control: int) -> None:
    """What the template does: import and prepare the world, then fork a place for each channel that arrives."""
    with socket.socket(fileno=control) as ours:
        message = frames.receive(control)
        if message is None:
            return
        USER_FILES.update(message["files"])
        try:
            world = pickle.loads(base64.b64decode(message["world"]))
            world.prepare()
        except BaseException as error:
            frames.send(control, {"error": _described(error)})
            return
        frames.send(control, {"ready": True})
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended places leave no zombies
        while True:
            data, channels, _, _ = socket.recv_fds(ours, 1, 1)
            if not data:
                return
            if os.fork() == 0:
                status = 1
                try:
                    ours.close()
                    status = _serve_place(world, channels[0])
                finally:
                    os._exit(status)
            os.close(channels[0])


def _serve_place(world: Any, channel: int) -> int:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    frames.send(channel, {"pid": os.getpid()})
    place = _Place(world)
    while (message := frames.receive(channel)) is not None:
        frames.send(channel, place.answer(message))
    place.close()
    return 0


class _Place:
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
