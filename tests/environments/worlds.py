"""Worlds that misbehave, or whose processes end, in a module that other processes import; and how they are asked."""

import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from covey.environments import Environment, EnvironmentPool, Observation, TaskInstance, World

ANSWERS: dict[str, Any] = {
    "nan": ("x", float("nan"), False, {}),
    "three": ("x", 0.0, False),
    "no info": ("x", 0.0, False, None),
    "win": ("won", 1.0, True, {"detail": object()}),
    "solved": ("over", 1.0, True, False, {}),  # as Gymnasium's environments answer
    "out of time": ("over", 1.0, False, True, {}),
}


def answers(pool: EnvironmentPool, count: int) -> dict[int, Any]:
    found: dict[int, Any] = {}
    while len(found) < count:
        found |= dict(pool.wait())
    return found


def ask(pool: EnvironmentPool, *tasks: dict[str, Any]) -> None:
    """A reset of the first places, one for each task."""
    for place, task in enumerate(tasks):
        pool.reset(place, {"uid": "t", **task}, 0)


def begun(pool: EnvironmentPool, *tasks: dict[str, Any]) -> list[Any]:
    """What the resets of the first places answer."""
    ask(pool, *tasks)
    found = answers(pool, len(tasks))
    return [found[place] for place in range(len(tasks))]


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
        self.resets = self.steps = 0
        self.told = ""

    def reset(self, task: TaskInstance, seed: int) -> Any:
        self.resets += 1
        if "child" in task:
            self.told = task["child"]
            self.child = subprocess.Popen(["sleep", "600"])
            return Observation(f"episode {self.resets} with {self.child.pid} in {os.getpid()}")
        kind = task.get("reset")
        time.sleep({"hang": 60.0, "slow": 0.4}.get(kind, 0.0))
        if kind in ("long", "bad"):
            return Observation("x" * (9 << 20)) if kind == "long" else 3
        return Observation(f"episode {self.resets} of {task['uid']} in {os.getpid()}")

    def step(self, action: str) -> Any:
        time.sleep({"hang": 60.0, "slow": 0.3}.get(action, 0.0))
        if action == "raise":
            raise RuntimeError("the world is broken")
        if action == "exit":
            os._exit(3)
        return ANSWERS.get(action, (action, 0.5, False, {}))

    def close(self) -> None:
        if self.told == "hang":
            time.sleep(60)
        if not self.told:
            raise RuntimeError("closing is broken too")
        with Path(self.told).open("a") as log:
            log.write("closed\n")


class Breaking(Trouble):
    """Raises at every second action of its only environment's episodes, each time with another number."""

    def make(self) -> Environment:
        return BreakingEnvironment()


class BreakingEnvironment(TroubleEnvironment):
    def step(self, action: str) -> Any:
        self.steps += 1
        if self.steps % 2 == 0:
            raise KeyError(f"room {self.steps}")
        return action, 0.5, False, {}


class Unimportable(Trouble):
    """Cannot be made."""

    def eval_tasks(self) -> list[TaskInstance]:
        return []

    def make(self) -> Environment:
        raise ImportError("no such game engine")


class Together(Trouble):
    """Its environments' processes end at the moment that the action names, or are killed while they wait for it.

    In the template a slow machine lies between the look at an ended process and the wait for it.
    """

    def prepare(self) -> None:
        real = os.waitpid

        def slow(pid: int, options: int) -> tuple[int, int]:
            time.sleep(0.002)
            return real(pid, options)

        os.waitpid = slow

    def make(self) -> Environment:
        return TogetherEnvironment()


class TogetherEnvironment(TroubleEnvironment):
    def step(self, action: str) -> Any:
        if action != "well":
            while time.time() < float(action):
                time.sleep(max(0.0, float(action) - time.time() - 0.002))
            os._exit(3)
        return super().step(action)


class NoRoom(Trouble):
    """The system refuses its template the first fork."""

    def prepare(self) -> None:
        real = os.fork

        def refused() -> int:
            os.fork = real
            raise BlockingIOError("no room for a process")

        os.fork = refused


class Waiting(Trouble):
    """Starts a process of its own in the template, and waits for it in a thread: what it sees lies in a file."""

    def prepare(self) -> None:
        self.file = os.path.join(tempfile.mkdtemp(), "status")
        child = subprocess.Popen(["sh", "-c", "sleep 0.5; exit 7"])

        def wait() -> None:
            time.sleep(1.0)
            Path(self.file + ".new").write_text(str(child.wait()))
            os.rename(self.file + ".new", self.file)

        threading.Thread(target=wait).start()

    def make(self) -> Environment:
        environment = super().make()
        environment.reset = lambda task, seed: Observation(self.file)  # type: ignore[method-assign]
        return environment
