"""Python processes with a channel to this one, how much memory there is for them, and how much this one took.

Torch is used only where it is already loaded.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def start_python(code: str, **variables: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run `code` in a new Python process, which finds the modules that this one finds, with environment `variables`.

    Its standard input is empty and what it prints to standard output is dropped.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)} | variables,
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


def kill_marked(mark: str) -> None:
    """Kill the processes with this text in an environment variable. On macOS, which has no /proc, nothing happens."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in environ.read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)


def total_memory() -> int:
    """Memory that this process may have at the most, in bytes: the machine's, or its control group's limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int((Path("/sys/fs/cgroup") / name).read_text()))
    return min(limits)


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far, in bytes."""
    # VmHWM first: ru_maxrss of a process that was started by fork and exec includes the parent's peak.
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _cuda() -> Any:
    """`torch.cuda` where it is in use, else None."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda and cuda.is_available() and cuda.is_initialized() else None


def forget_peak() -> bool:
    """Let `peak_rss_bytes` and `peak_cuda_bytes` start anew from what is held now. False where the system cannot."""
    if cuda := _cuda():
        cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_cuda_bytes() -> int | None:
    """Largest memory that torch has allocated on the current CUDA device, in bytes; None without torch or CUDA."""
    cuda = _cuda()
    return int(cuda.max_memory_allocated()) if cuda else None


def memory_metrics() -> dict[str, float]:
    """`memory/peak_gb`, and `memory/peak_cuda_gb` where CUDA is in use (GB = 10^9 bytes)."""
    found = {"memory/peak_gb": peak_rss_bytes(), "memory/peak_cuda_gb": peak_cuda_bytes()}
    return {name: taken / 1e9 for name, taken in found.items() if taken is not None}
