"""Tasksets of verifiers as a world: their own programs drive the model, in a process of their own Python.

    world = Verifiers("guess_v1", python="vf/bin/python", path="examples")
    driver = world.driver(queue.put)             # then driver.send(...), and the queue gets (driver, Told or Asked)

Verifiers and its tasksets pin exact versions, so they have an environment of their own. Their process inherits a short
list of variables and is ended with all that it started. It is not a sandbox: the taskset's code is yours.
"""

from __future__ import annotations

import json
import os
import queue
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from covey.environments.base import Environment, TaskInstance, World
from covey.errors import ConfigError, DataError
from covey.processes import kill_marked

_INHERITED = "PATH HOME USER LANG LC_ALL TZ TMPDIR XDG_CACHE_HOME UV_CACHE_DIR SSL_CERT_FILE HF_HOME HF_HUB_OFFLINE"
_PAID = ("prime", "modal", "e2b")
_LONGEST_LINE = 1 << 26  # bytes
_Ids = list[Annotated[int, Field(ge=0, lt=1 << 31)]]
_LOAD_SECONDS, _GRACE_SECONDS = 60.0, 6.0


class Told(BaseModel):
    """What the driver says of an episode."""

    model_config = ConfigDict(strict=True, extra="forbid")

    id: int
    ok: bool
    trainable: bool = True
    reward: float = 0.0
    stop: str | None = None
    errors: list[str] = Field(default_factory=list)
    branches: list[tuple[_Ids, _Ids]] = Field(default_factory=list)


class Asked(BaseModel):
    """A request of a program to the policy: the body of one to `/inference/v1/generate`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    ask: int
    body: dict[str, Any]


class Verifiers(World):
    """A taskset of verifiers 0.4, one agent that is trained.

    Args:
        taskset: a module that exports a taskset.
        python: the Python that has verifiers; none = the one that runs Covey.
        path: folder in which the taskset's module is looked for first.
        options: the taskset's own settings, `a=1|b=x`.
        eval_taskset: a taskset whose tasks are held out; none = one in ten of `taskset`, by a hash of their content.
        num_train: most tasks that are read of a taskset, those held out included.
        num_eval: most held-out tasks.
        harness: the program that plays; others than null run what the model writes.
        runtime: where it plays; subprocess = on this machine.
        renderer: who turns messages into tokens; default = the chat template, without tools.
        tool_parser: how calls are read with the default renderer, such as qwen3.
        max_turns: most turns of an episode.
        seconds: time limit of an episode, of each of its parts, and of loading the taskset, which may take 60 anyway.
        success: the reward from which on an episode counts as a success.
        variables: names of environment variables that the taskset needs, `A|B`.
        unsafe: allow runtimes that cost money, and harnesses that run the model's commands on this machine.

    Raises `ConfigError`: a value that cannot be meant, or that needs `unsafe`.
    """

    name = "verifiers"
    max_completion_length = 256

    def __init__(
        self,
        taskset: str,
        python: str | None = None,
        path: str = ".",
        options: str = "",
        eval_taskset: str | None = None,
        num_train: int = 1000,
        num_eval: int = 100,
        harness: str = "null",
        runtime: str = "subprocess",
        renderer: str = "default",
        tool_parser: str | None = None,
        max_turns: int = 8,
        seconds: float = 300.0,
        success: float = 1.0,
        variables: str = "",
        unsafe: bool = False,
    ) -> None:
        self.python, self.path = Path(python or sys.executable).absolute(), Path(path).absolute()
        if shutil.which(self.python) is None:
            raise ConfigError(
                f"verifiers: python={python}: no program that can be run; name the Python of verifiers, vf/bin/python"
            )
        if runtime in _PAID and not unsafe:
            raise ConfigError(f"verifiers: runtime={runtime!r} rents machines; use subprocess, or add unsafe=true")
        if runtime == "subprocess" and harness != "null" and not unsafe:
            raise ConfigError(
                f"verifiers: harness={harness!r} with runtime=subprocess runs the model's commands on this machine; "
                "use harness=null or runtime=docker, or add unsafe=true"
            )
        numbers = {"num_train": num_train, "num_eval": num_eval, "max_turns": max_turns, "seconds": seconds}
        for name, number in numbers.items():
            if not 0 < number <= 1e9:
                raise ConfigError(f"verifiers: {name}={number}: write a number above 0 and at most 1e9")
        self.max_turns, self.seconds, self.success = max_turns, float(seconds), float(success)
        self.renderer = {"name": renderer} | ({} if tool_parser is None else {"tool_parser": tool_parser})
        self._most, self._num_eval = num_train, num_eval
        self._inherited = [*_INHERITED.split(), *filter(None, variables.split("|"))]
        limits = dict.fromkeys(("setup", "rollout", "finalize", "scoring"), self.seconds)
        harness = "covey_chat" if (harness, runtime) == ("null", "subprocess") else harness  # see the driver
        agent = {"harness": {"id": harness}, "runtime": {"type": runtime}, "max_turns": max_turns, "timeout": limits}
        more = dict(option.split("=", 1) for option in options.split("|") if "=" in option)
        self._sets: dict[str, dict[str, Any]] = {
            name: {
                "taskset": {"id": found} | (more if name == "train" else {}),
                "agent": agent,
                "timeout": {"episode": self.seconds, "finalize": self.seconds},
            }
            for name, found in (("train", taskset), ("eval", eval_taskset))
            if found is not None
        }
        self._tasks: dict[str, list[TaskInstance]] | None = None
        self._spare: Driver | None = None  # has said what the tasks are and has not played yet

    def train_tasks(self, seed: int) -> list[TaskInstance]:
        return self._listed()["train"]

    def eval_tasks(self) -> list[TaskInstance]:
        return self._listed()["eval"][: self._num_eval]

    def make(self) -> Environment:
        raise ConfigError("verifiers: its programs drive the model, so nobody else can play; use covey eval or train")

    def __reduce__(self) -> Any:  # it is pickled where others would play it
        return self.make()

    def driver(self, tell: Callable[[Any], None]) -> Driver:
        """A driver; `tell` gets it with the `Asked` of each request, the `Told` of each episode, and None at its end.

        Raises `DataError`: the taskset cannot be loaded.
        """
        driver, self._spare = self._spare, None
        if driver is None or not driver.runs:
            driver = self._started()
        driver.tell = tell
        return driver

    def _listed(self) -> dict[str, list[TaskInstance]]:
        if self._tasks is None:
            self._spare = self._started()
        assert self._tasks is not None
        return self._tasks

    def _started(self) -> Driver:
        env = {name: os.environ[name] for name in self._inherited if name in os.environ}
        env["PATH"] = f"{self.python.parent}{os.pathsep}{env.get('PATH', os.defpath)}"  # where uv is
        driver = Driver(self.python, env | {"PYTHONPATH": str(self.path)})
        driver.send({"sets": self._sets, "most": self._most})
        limit = max(_LOAD_SECONDS, self.seconds)
        try:
            said = driver.first.get(timeout=limit) or {"error": f"its process ended: {driver.last_words()}"}
        except queue.Empty:
            said = {"error": f"it did not load within {limit:g} s; correct it, or raise seconds={self.seconds:g}"}
        if "tasks" not in said:
            driver.end(at_once=True)
            names = " and ".join(each["taskset"]["id"] for each in self._sets.values())
            raise DataError(f"verifiers: taskset {names}, with {self.python}: {said.get('error', 'it says nothing')}")
        self._tasks = _tasks(said["tasks"])
        weakref.finalize(self, driver.end)
        return driver


def _tasks(keys: Mapping[str, list[str]]) -> dict[str, list[TaskInstance]]:
    """Training and held-out tasks, each content once."""
    found: dict[str, list[TaskInstance]] = {"train": [], "eval": []}
    seen = set[tuple[str, str]]()
    for name, own in keys.items():
        for number, key in enumerate(own):
            tenth = "eval" not in keys and int(key[:8], 16) % 10 == 0
            if (name, key) not in seen:
                found["eval" if tenth else name].append({"uid": key, "set": name, "number": number})
            seen.add((name, key))
    return found


class Driver:
    """The process that plays. It ends when its input does, and with it everything that it has started.

    Args:
        python: runs it.
        env: its environment variables.
    """

    def __init__(self, python: Path, env: Mapping[str, str]) -> None:
        self.first: queue.SimpleQueue[Any] = queue.SimpleQueue()  # gets what it says first, or None
        self.tell: Callable[[Any], None] = lambda said: None
        mark = secrets.token_hex(16)
        folder = tempfile.TemporaryDirectory(prefix="covey-verifiers-", ignore_cleanup_errors=True)
        self.folder = folder.name  # it works there, and removes it where this process cannot
        self._process = subprocess.Popen(
            [python, "-P", Path(__file__).with_name("verifiers_driver.py"), self.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder,
            env={**env, "COVEY_DRIVER": mark},
            start_new_session=True,
        )
        self._words: deque[str] = deque(maxlen=20)
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._end = weakref.finalize(self, _end, self._process, self._lines, mark, folder)
        threads = [threading.Thread(target=does, daemon=True) for does in (self._read_errors, self._read, self._write)]
        self._errors = threads[0]
        for thread in threads:
            thread.start()

    @property
    def runs(self) -> bool:
        """Whether its process has not ended."""
        return self._process.poll() is None

    def send(self, what: Mapping[str, Any]) -> None:
        """Tell the process something, at once; one that has ended does not hear it, and says so by `(driver, None)`."""
        self._lines.put(json.dumps(what).encode() + b"\n")

    def last_words(self) -> str:
        """The end of what it has written to standard error."""
        self._errors.join(1.0)
        return " / ".join(list(self._words)[-4:])[-600:] or "without a word"

    def end(self, *, at_once: bool = False) -> None:
        """End the process, and what it has started; if not at once, they have a while to clean up."""
        if at_once:
            self._process.kill()
        self._end()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            with self._process.stdout as lines:
                self.first.put(json.loads(lines.readline(_LONGEST_LINE) or b"null"))
                while line := lines.readline(_LONGEST_LINE):
                    if began := re.match(rb'{"id": ([0-9]{1,18}),', line):
                        self.tell((self, _told(line, int(began[1]))))
                    elif line.startswith(b'{"ask": '):
                        self.tell((self, Asked.model_validate_json(line)))
        except (OSError, ValueError) as error:
            if self.runs:
                self._words.append(f"it said what is no answer: {error!s:.300}")
            self._process.kill()
        self.first.put(None)
        self.tell((self, None))

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError), self._process.stdin as told:
            while line := self._lines.get():
                told.write(line)
                told.flush()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with suppress(OSError, ValueError), self._process.stderr as lines:
            while line := lines.readline(1 << 16):
                self._words.append(line.decode("utf-8", "replace").strip())


def _told(line: bytes, number: int) -> Told:
    try:
        return Told.model_validate_json(line)
    except ValidationError as error:
        return Told(id=number, ok=False, errors=[f"what was said of it cannot be read: {error!s:.300}"])


def _end(process: subprocess.Popen[bytes], lines: queue.SimpleQueue[bytes], mark: str, folder: Any) -> None:
    lines.put(b"")  # closes its input
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    finally:  # also after a second Ctrl-C
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # Verifiers gives each program a process group of its own; what is left of them has the variable still.
        kill_marked(mark)
        folder.cleanup()
