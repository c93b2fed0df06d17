"""Confined processes for untrusted code; see `inside` for their side.

    with Sandbox() as sandbox:
        print(sandbox.protections)
        with sandbox.spawn(Limits(seconds=2)) as process:
            process.send({"role": "candidate", "code": "def f(x): return x + 1"})
            process.receive()                                        # {"names": ["f"]}

A `Sandbox` is one small process (`zygote`) that forks the confined ones, in about 3 ms each. It and its children end
with this process. A confined process can cause no error here except `ProcessEndedError`.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from . import JailEndedError, JailError, ProcessEndedError, messages
from .seccomp import Supervisor

_JAIL = Path(__file__).parent
_START = """
import importlib.util, sys
place = sys.argv[1]
spec = importlib.util.spec_from_file_location("jail", place + "/__init__.py", submodule_search_locations=[place])
sys.modules["jail"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["jail"])
import json
from jail import zygote
zygote.main(int(sys.argv[2]), json.loads(sys.argv[3]))
"""
_START_SECONDS = 30.0
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # whatever this process does about SIGPIPE
_OUTPUT_KEPT = 64 << 10
_MOST_TEXT = 64 << 10
"""Bytes of a message that is read here; longer ones are only passed on."""
_MOST_PARTS = 5000
"""In which a message may come: each costs work on this side."""
# the same environment on every machine, or sets and numbers would come out differently
_ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"} | {  # else 64 MiB for each thread
    f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")
}


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a confined process.

    Attributes:
        seconds: time from start to end; the kernel ends it after at most one more second of processor time.
        memory_mb: address space in MiB, including Python itself (about 30).
        files_mb: size of the files in its scratch directory, in MiB.
        output_mb: size of its output, in MiB.
        threads: number of threads at the same time, including the first.
    """

    seconds: float = 5.0
    memory_mb: int = 256
    files_mb: int = 16
    output_mb: int = 1
    threads: int = 64


@dataclass(frozen=True, slots=True)
class Protections:
    """The protections on this host: how `files` are protected ("namespace", "landlock", or "" for not at all), whether
    the network and new processes are blocked, and why a protection is `missing` ("" if none is).
    """

    files: str
    network: bool
    processes: bool
    missing: str = ""

    @property
    def enough(self) -> bool:
        """True if the protections suffice for hostile code."""
        return bool(self.files) and self.network and self.processes

    def __str__(self) -> str:
        words = {"namespace": "own file system", "landlock": "paths limited by Landlock", "": "files NOT protected"}
        network = "no network" if self.network else "network NOT blocked"
        processes = "no new processes" if self.processes else "processes NOT blocked"
        why = f" ({self.missing})" if self.missing else ""
        return f"{words[self.files]}, {network}, {processes}, limits on time, memory, files and output{why}"


class Sandbox:
    """Starts confined processes; see the top of this module.

    Raises `JailError`: the host does not offer the minimum of protections, or the zygote does not start.

    Args:
        unprotected: run even without the minimum of protections. Code can then read and change files.
        packages: installed packages that programs may import besides the standard library, such as "numpy".
    """

    def __init__(self, *, unprotected: bool = False, packages: Sequence[str] = ()) -> None:
        modules, paths, readable = modules_of(packages)
        order = {"temporary": tempfile.gettempdir(), "modules": modules, "paths": paths, "readable": readable}
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as errors:
            # not -I, which would ignore PYTHONHASHSEED; nothing else of Python's variables is in this environment
            arguments = [_START, str(_JAIL), str(theirs.fileno()), json.dumps(order)]
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-S", "-B", "-c", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
            theirs.close()  # so that the end of the other side is seen here
            self._control = ours
            self._close = weakref.finalize(self, _close, self._process, ours)
            ours.settimeout(_START_SECONDS)
            try:
                found = self._reply()["protections"]
            except (JailEndedError, KeyError) as error:
                self.close()
                errors.seek(0)
                said = errors.read().decode("utf-8", "replace").strip()[-500:]
                raise JailError(f"the jail did not start: {said or error}") from None
        self.protections = _protections(found)
        if not self.protections.enough and not unprotected:
            self.close()
            raise JailError(
                f"code cannot be run safely on this host: {self.protections}; allow user namespaces or Landlock, "
                "or accept the risk by name with unprotected=True"
            )

    def spawn(self, limits: Limits) -> Confined:
        """Start a confined process, which waits for its first message; its time begins now.

        Raises `JailEndedError`: see there; `JailError`: the host cannot start or confine another process.
        """
        mine, channel = socket.socketpair()
        output, printed = os.pipe()
        numbers = {"memory": limits.memory_mb << 20, "seconds": limits.seconds, "file_bytes": limits.files_mb << 20}
        try:
            fds = array.array("i", [channel.fileno(), printed])
            reply = self._ask({"spawn": numbers}, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            if "refused" in reply:
                raise JailError(f"the jail cannot start a process: {reply['refused']}")
        except BaseException:
            mine.close()
            os.close(output)
            raise
        finally:
            channel.close()
            os.close(printed)
        return Confined(self, int(reply["number"]), mine, output, limits)

    def end(self, number: int) -> tuple[int, int]:
        """Kill a process if it still runs; its signal and exit code. Raises `JailEndedError`: see there."""
        ended = self._ask({"end": number})["ended"]
        return int(ended["signal"]), int(ended["code"])

    def close(self) -> None:
        """End the zygote and everything that it has started."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _ask(
        self, request: dict[str, Any], ancillary: Sequence[tuple[int, int, array.array[int]]] = ()
    ) -> dict[str, Any]:
        with self._lock:
            try:
                self._control.sendmsg([json.dumps(request).encode()], ancillary, _NO_SIGNAL)
            except OSError as error:
                raise JailEndedError(f"the jail has ended: {error}") from None
            return self._reply()

    def _reply(self) -> dict[str, Any]:
        try:
            data = self._control.recv(65536)
        except OSError as error:
            self._control.close()  # a late answer would be taken for that to the next request
            raise JailEndedError(f"the jail does not answer: {error}") from None
        if not data:
            raise JailEndedError("the jail has ended: its process is gone")
        return dict(json.loads(data))


class Confined:
    """One confined process, until the `with` block ends."""

    def __init__(self, sandbox: Sandbox, number: int, channel: socket.socket, output: int, limits: Limits) -> None:
        self._sandbox, self._number, self._channel, self._output = sandbox, number, channel, output
        self._limits, self._received, self._printed = limits, bytearray(), bytearray()
        self._ended: tuple[int, int] | None = None
        self._supervisor: Supervisor | None = None
        os.set_blocking(output, False)
        self._selector = selectors.DefaultSelector()
        for end in (channel, output):
            self._selector.register(end, selectors.EVENT_READ)
        try:
            self._await_confinement()
        except BaseException:
            self.__exit__()
            raise
        channel.setblocking(False)
        self._deadline = time.monotonic() + limits.seconds

    @property
    def printed(self) -> str:
        """The first 64 KiB of its output."""
        self._drain()
        return self._printed[:_OUTPUT_KEPT].decode("utf-8", "replace")

    @property
    def all_printed(self) -> bytes:
        """All of its output, at most `output_mb`."""
        self._drain()
        return bytes(self._printed)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a JSON object as a message.

        Raises `ProcessEndedError`: the process does not read it; `ValueError`: the message is too long.
        """
        self.send_bytes(json.dumps(message).encode("utf-8", "surrogatepass"))

    def send_bytes(self, body: bytes) -> None:
        """Send a message as it is; see `send`."""
        data = memoryview(messages.framed(body))
        while data:
            try:
                data = data[self._channel.send(data, _NO_SIGNAL) :]
            except BlockingIOError:
                self._wait(selectors.EVENT_WRITE)  # not when there is something to read: that would not let it be sent
            except OSError:
                raise self._gone() from None

    def receive(self) -> dict[str, Any]:
        """The next message, a JSON object.

        Raises `ProcessEndedError`: no message came in time, the process ended or was ended, or the message is too long
        or not a JSON object ("protocol").
        """
        body = self.receive_bytes()
        if len(body) > _MOST_TEXT:
            raise ProcessEndedError("protocol", f"a message of {len(body)} bytes")
        return parse_message(body)

    def receive_bytes(self) -> bytes:
        """The next message as it is; see `receive`."""
        for _ in range(_MOST_PARTS):
            if len(self._received) >= 4:
                (length,) = struct.unpack("!I", self._received[:4])
                if length > messages.MAX_BYTES:
                    raise ProcessEndedError("protocol", f"a message of {length} bytes")
                if len(self._received) >= 4 + length:
                    body = bytes(self._received[4 : 4 + length])
                    del self._received[: 4 + length]
                    return body
            self._wait(selectors.EVENT_READ)
            try:
                part = self._channel.recv(1 << 18)
            except BlockingIOError:
                continue
            except OSError:
                raise self._gone() from None
            if not part:
                raise self._gone()
            self._received += part
        raise ProcessEndedError("protocol", f"a message in more than {_MOST_PARTS} parts")

    def stop(self) -> tuple[int, int]:
        """Kill it; its signal and exit code."""
        if self._ended is None:
            self._ended = self._sandbox.end(self._number)
        return self._ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            self.stop()
        except JailEndedError:
            self._ended = (9, 0)
        finally:
            self._selector.close()
            self._channel.close()
            os.close(self._output)
            if self._supervisor is not None:
                self._supervisor.close()

    def _await_confinement(self) -> None:
        """Until the process says that it is confined. Code nobody vouches for comes after that."""
        self._channel.settimeout(_START_SECONDS)
        try:
            word, fds, _, _ = socket.recv_fds(self._channel, 1, 1)
            if fds:
                self._supervisor = Supervisor(fds[0], threads=self._limits.threads)
                self._selector.register(fds[0], selectors.EVENT_READ)
                word = self._channel.recv(1)
        except OSError as error:
            raise JailEndedError(f"a process that was started does not answer: {error}") from None
        if word != b"R":
            self.stop()  # raises where it is the jail that has ended
            raise JailError(f"the jail cannot confine a process: {self.printed.strip()[-500:] or 'it is gone'}")

    def _wait(self, events: int) -> None:
        """Until the channel is ready; meanwhile reads what is printed and answers for what may be had too often."""
        self._selector.modify(self._channel, events)
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise ProcessEndedError("timeout", f"longer than {self._limits.seconds:g} s")
            ready = {key.fileobj for key, _ in self._selector.select(left)}
            if self._output in ready:
                self._drain()
                if len(self._printed) > self._limits.output_mb << 20:
                    raise ProcessEndedError("output", f"more than {self._limits.output_mb} MiB printed")
            if self._supervisor is not None and self._supervisor.listener in ready and not self._supervisor.answer():
                self._selector.unregister(self._supervisor.listener)
            if self._channel in ready:
                return

    def _drain(self) -> None:
        while len(self._printed) <= self._limits.output_mb << 20:
            try:
                part = os.read(self._output, 1 << 16)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            if not part:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(self._output)
                return
            self._printed += part

    def _gone(self) -> ProcessEndedError:
        signal_number, code = self.stop()
        if signal_number == 31:  # SIGSYS
            return ProcessEndedError("forbidden", "a system call that no honest program makes")
        if signal_number == 24:  # SIGXCPU
            return ProcessEndedError("timeout", f"longer than {self._limits.seconds:g} s of processor time")
        how = f"killed by signal {signal_number}" if signal_number else f"it ended itself with exit code {code}"
        return ProcessEndedError("exit", how)


def _close(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def parse_message(body: bytes) -> dict[str, Any]:
    """Read a message of a confined process. Raises `ProcessEndedError`: it is not a JSON object ("protocol")."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(message := json.loads(body.decode("utf-8", "surrogatepass")), dict):
            return message
    raise ProcessEndedError("protocol", "a message that is none")


def _protections(found: dict[str, Any]) -> Protections:
    rooted, filtered = found["root"] is True, bool(found["syscalls"])
    reasons = [] if rooted else [f"no namespaces: {found['root']}"]
    reasons += [] if filtered else ["system calls of this machine are not known"]
    files = "namespace" if rooted else "landlock" if found["landlock"] else ""
    return Protections(files, rooted or filtered, filtered, "; ".join(reasons))


def modules_of(packages: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The modules of installed packages, the folders that hold them, and the paths that must be readable.

    Raises `JailError`: a package is not installed, or is not a folder of Python modules.
    """
    modules, folders, readable = list[str](), set[str](), set[str]()
    for name in packages:
        try:
            distribution = metadata.distribution(name)
        except (metadata.PackageNotFoundError, ValueError):
            raise JailError(f"packages={name!r}: it is not installed; pip install it, or leave it out") from None
        place = Path(str(distribution.locate_file(""))).resolve()
        tops = {Path(str(file)).parts[0] for file in distribution.files or ()} - {".."}
        found = sorted(top for top in tops if (place / top / "__init__.py").exists())
        if not found:
            raise JailError(f"packages={name!r}: it holds no package of Python modules that could be offered")
        modules += found
        folders.add(str(place))
        readable |= {str(place / top) for top in tops if (place / top).is_dir() and not top.endswith(".dist-info")}
    return modules, sorted(folders), sorted(readable)
