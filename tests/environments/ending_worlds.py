"""Worlds whose processes end, or cannot begin. A module of its own: their environments run in other processes."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from worlds import Trouble, TroubleEnvironment

from covey.environments import Environment, Observation


class Together(Trouble):
    """Its environments' processes end at the moment that the action names, or are killed while they wait for it.

    In the template a slow machine lies between the look at an ended process and the wait for it.
    """

    name: ClassVar[str] = "together"

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

    name: ClassVar[str] = "no room"

    def prepare(self) -> None:
        real = os.fork

        def refused() -> int:
            os.fork = real
            raise BlockingIOError("no room for a process")

        os.fork = refused


class Waiting(Trouble):
    """Starts a process of its own in the template, and waits for it in a thread: what it sees lies in a file."""

    name: ClassVar[str] = "waiting"

    def prepare(self) -> None:
        folder = tempfile.mkdtemp()
        self.file = os.path.join(folder, "status")
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
