"""A small process that forks confined ones.

It holds nothing that a hostile child could find in its copied memory: no task, no test, no secret passes through it.
What it is told are limits; each child gets a socket of its own, whose other end is with whoever asked.

    in     {"spawn": {memory, seconds, file_bytes}} with two file descriptors: the child's channel and its output
           {"end": number}
    out    {"number": n}, {"ended": {number, signal, code}}, {"refused": why}, and first of all {"protections": {...}}

A child that is confined says so on its channel before it reads from it: `L` with the listener for what it may have too
often (see `seccomp.supervise`) if there is one, then `R`. When its own channel closes the zygote kills what it has
started, removes its folder and ends; a folder whose zygote was killed is removed by the next one.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import gc
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
from _sitebuiltins import Quitter
from pathlib import Path
from typing import Any

from . import confine, inside, seccomp

# what solutions commonly import: loaded once, before the file system goes away
_COMMON = (
    "array bisect calendar cmath collections copy datetime decimal enum fractions functools hashlib heapq io "
    "itertools json math numbers operator queue random re statistics string struct sys textwrap time traceback "
    "types typing unicodedata dataclasses encodings.idna abc contextlib"
)
_FOLDER = "covey-jail-"


def main(fd: int, order: dict[str, Any]) -> None:
    """Serves requests until the channel closes."""
    confine.fix_addresses()
    control = socket.socket(fileno=fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _COMMON.split():
        __import__(name)
    sys.path += order["paths"]
    for name in order["modules"]:
        __import__(name)
    for name in ("exit", "quit"):  # as the module site provides them
        setattr(builtins, name, Quitter(name, "Ctrl-D (i.e. EOF)"))
    del sys.path[len(sys.path) - len(order["paths"]) :]
    system, hidden = confine.system_paths()
    refused = confine.enter_namespaces()
    if refused is None:
        _become_first(control)
        refused = confine.build_root([*system, *order["readable"]], hidden)
    filtered = seccomp.supported()
    if filtered:
        seccomp.prepare(rooted=refused is None)
    landlock = confine.landlock_version() > 0
    readable = [*order["readable"], *(inner for path in system for inner in confine.without(path, hidden))]
    scratch = "" if refused is None else _folder(order["temporary"])
    _send(control, {"protections": {"root": refused or True, "syscalls": filtered, "landlock": landlock}})
    gc.collect()
    gc.freeze()
    try:
        _serve(control, scratch, {"rooted": refused is None, "readable": readable, "syscalls": filtered})
    finally:
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)


def _become_first(control: socket.socket) -> None:
    """Go on as the first process of the new process namespace; this one waits for it."""
    pid = os.fork()
    if pid:
        control.close()
        os.waitpid(pid, 0)
        os._exit(0)
    confine.end_with_parent()


def _folder(temporary: str) -> str:
    """A folder that is locked while this process lives; those that nobody locks any more are removed."""
    for left in Path(temporary).glob(_FOLDER + "*"):
        with contextlib.suppress(OSError, RecursionError):
            fd = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.getuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left)
            finally:
                os.close(fd)
    folder = tempfile.mkdtemp(prefix=_FOLDER, dir=temporary)
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX)
    return folder


def _serve(control: socket.socket, folder: str, confinement: dict[str, Any]) -> None:
    children: dict[int, tuple[int, str]] = {}
    count = 0
    while True:
        data, fds, _, _ = socket.recv_fds(control, 65536, 2)
        if not data:
            break
        request = json.loads(data)
        if "spawn" in request:
            count += 1
            try:
                scratch = tempfile.mkdtemp(dir=folder) if folder else ""
                pid = os.fork()
            except OSError as error:
                _send(control, {"refused": str(error)})
            else:
                if pid == 0:
                    _child(control, fds[0], fds[1], confinement | request["spawn"] | {"scratch": scratch})
                children[count] = (pid, scratch)
                _send(control, {"number": count})
            for fd in fds:
                os.close(fd)
        else:
            pid, scratch = children.pop(number := request["end"])
            os.kill(pid, signal.SIGKILL)  # it has ended or must end; until it is waited for the number is its own
            _, status = os.waitpid(pid, 0)
            if scratch:
                shutil.rmtree(scratch, ignore_errors=True)
            killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
            _send(control, {"ended": {"number": number, "signal": killed, "code": code}})
    for pid, _ in children.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _child(control: socket.socket, channel_fd: int, output_fd: int, limits: dict[str, Any]) -> None:
    try:
        control.close()
        os.setsid()
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        channel = os.dup2(channel_fd, 3)
        os.closerange(4, 1024)
        with socket.socket(fileno=os.dup(channel)) as speaking:
            confine.confine(**limits, listening=lambda listener: socket.send_fds(speaking, [b"L"], [listener]))
        inside.open_streams()
        sys.argv = ["solution.py"]
        random.seed(0)  # so that the same program does the same again
        os.write(channel, b"R")
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    try:
        inside.main(channel, rooted=limits["rooted"])
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(0)


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.send(json.dumps(message).encode())
