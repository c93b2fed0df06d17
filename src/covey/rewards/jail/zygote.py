"""A small process that forks confined ones.

It holds nothing that a hostile child could find in its copied memory: no task, no test, no secret passes through it.
What it is told are limits; each child gets a socket of its own, whose other end is with whoever asked.

    in     {"spawn": {memory, seconds, file_bytes}} with two file descriptors: the child's channel and its output
           {"end": number}
    out    {"number": n}, {"ended": {number, signal, code}}, and first of all {"protections": {...}}

When its own channel closes it kills what it has started and ends.
"""

from __future__ import annotations

import array
import gc
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from typing import Any

from . import confine, inside, seccomp

# what solutions commonly import: loaded once, before the file system goes away
_COMMON = (
    "array bisect calendar cmath collections copy datetime decimal enum fractions functools hashlib heapq io "
    "itertools json math numbers operator queue random re statistics string struct sys textwrap time traceback "
    "types typing unicodedata dataclasses encodings.idna abc contextlib"
)


def main(fd: int, place: str) -> None:
    """Serve until the channel closes. `place` is an empty directory, removed by whoever made it."""
    control = socket.socket(fileno=fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _COMMON.split():
        __import__(name)
    refused = confine.build_root(place)
    filtered, landlock = seccomp.supported(), refused is not None and confine.landlock_supported()
    _send(control, {"protections": {"root": refused or True, "syscalls": filtered, "landlock": landlock}})
    gc.collect()
    gc.freeze()
    _serve(control, place, rooted=refused is None, filtered=filtered)


def _serve(control: socket.socket, place: str, *, rooted: bool, filtered: bool) -> None:
    children: dict[int, tuple[int, str]] = {}
    count = 0
    while True:
        data, ancillary, _, _ = control.recvmsg(65536, socket.CMSG_SPACE(2 * array.array("i").itemsize))
        if not data:
            break
        request = json.loads(data)
        if "spawn" in request:
            fds = array.array("i")
            for _, _, body in ancillary:
                fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
            count += 1
            scratch = place if rooted else tempfile.mkdtemp(dir=place)
            pid = os.fork()
            if pid == 0:
                _child(control, fds[0], fds[1], request["spawn"], scratch, rooted=rooted, filtered=filtered)
            for fd in fds:
                os.close(fd)
            children[count] = (pid, scratch)
            _send(control, {"number": count})
        else:
            number = request["end"]
            pid, scratch = children.pop(number)
            os.kill(pid, signal.SIGKILL)  # it has ended or must end; until it is waited for the number is its own
            _, status = os.waitpid(pid, 0)
            if not rooted:
                shutil.rmtree(scratch, ignore_errors=True)
            killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
            _send(control, {"ended": {"number": number, "signal": killed, "code": code}})
    for pid, _ in children.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _child(
    control: socket.socket,
    channel_fd: int,
    output_fd: int,
    limits: dict[str, Any],
    scratch: str,
    *,
    rooted: bool,
    filtered: bool,
) -> None:
    code = 120
    try:
        control.close()
        os.setsid()
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        channel = os.dup2(channel_fd, 3)
        os.closerange(4, 1024)
        confine.confine(rooted=rooted, scratch=scratch, syscalls=filtered, **limits)
        inside.open_streams()
        sys.argv = ["solution.py"]
        code = 0
        inside.main(channel)
    except BaseException as error:
        os.write(2, f"jail: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.send(json.dumps(message).encode())
