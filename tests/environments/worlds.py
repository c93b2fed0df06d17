"""Worlds that misbehave. A module of its own: their environments run in other processes."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any, ClassVar

from covey.environments import Environment, Observation, TaskInstance, World


class Trouble(World):
    """Each action is a kind of trouble; anything else is answered with its own text."""

    name: ClassVar[str] = "trouble"
    max_turns = 5

    def train_tasks(self, seed: int) -> list[TaskInstance]:
        return [{"uid": "a"}]

    def eval_tasks(self) -> list[TaskInstance]:
        return [{"uid": "b"}]

    def make(self) -> Environment:
        return TroubleEnvironment()


class TroubleEnvironment(Environment):
    def __init__(self) -> None:
        self.resets = 0
        self.told = ""

    def reset(self, task: TaskInstance, seed: int) -> Any:
        self.resets += 1
        if "child" in task:
            self.told = task["child"]
            self.child = subprocess.Popen(["sleep", "600"])
            return Observation(f"episode {self.resets} with {self.child.pid} in {os.getpid()}")
        if task.get("reset") == "long":
            return Observation("x" * (9 << 20))
        if task.get("reset") == "hang":
            time.sleep(60)
        if task.get("reset") == "slow":
            time.sleep(0.4)
        if task.get("reset") == "bad":
            return 3
        return Observation(f"episode {self.resets} of {task['uid']} in {os.getpid()}")

    def step(self, action: str) -> Any:
        if action == "hang":
            time.sleep(60)
        if action == "raise":
            raise RuntimeError("the world is broken")
        if action == "exit":
            os._exit(3)
        if action == "nan":
            return "x", float("nan"), False, {}
        if action == "three":
            return "x", 0.0, False
        if action in ("solved", "out of time"):  # as Gymnasium's environments answer
            return "over", 1.0, action == "solved", action != "solved", {}
        if action == "no info":
            return "x", 0.0, False, None
        if action == "slow":
            time.sleep(0.3)
        if action == "win":
            return "won", 1.0, True, {"detail": object()}
        return action, 0.5, False, {}

    def close(self) -> None:
        if self.told == "hang":
            time.sleep(60)
        if self.told:
            with Path(self.told).open("a") as log:
                log.write("closed\n")
            return
        raise RuntimeError("closing is broken too")


class Breaking(Trouble):
    """Raises at every second action of its only environment's episodes, each time with another number."""

    name: ClassVar[str] = "breaking"

    def make(self) -> Environment:
        return BreakingEnvironment()


class BreakingEnvironment(TroubleEnvironment):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def step(self, action: str) -> Any:
        self.steps += 1
        if self.steps % 2 == 0:
            raise KeyError(f"room {self.steps}")
        return action, 0.5, False, {}


class Unimportable(World):
    """Cannot be made."""

    name: ClassVar[str] = "unimportable"

    def train_tasks(self, seed: int) -> list[TaskInstance]:
        return []

    def eval_tasks(self) -> list[TaskInstance]:
        return []

    def make(self) -> Environment:
        raise ImportError("no such game engine")
