"""Python processes with a channel to this one, and how much memory there is for them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def start_python(code: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run `code` in a new Python process, which finds the modules that this one finds.

    Its standard input is empty and what it prints to standard output is dropped.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
    return process, ours


def end_python(process: subprocess.Popen[bytes], channel: socket.socket, seconds: float = 0.0) -> None:
    """Close the channel, which tells the process to end, and wait for its end; after `seconds` it is killed."""
    channel.close()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def total_memory() -> int:
    """Memory that this process may have at the most, in bytes: the machine's, or its control group's limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limits.append(int((Path("/sys/fs/cgroup") / name).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(limits)
