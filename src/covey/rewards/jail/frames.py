"""Messages on a stream between two processes: four bytes of length, then JSON."""

from __future__ import annotations

import json
import os
import signal
import struct
from typing import Any

MAX_BYTES = 8 << 20


def send(channel: int, message: dict[str, Any]) -> None:
    """Send one message on a file descriptor.

    Raises:
        ValueError: it is too long.
    """
    send_bytes(channel, json.dumps(message).encode("utf-8", "surrogatepass"))


def send_bytes(channel: int, body: bytes) -> None:
    """Send one message as it is.

    Raises:
        ValueError: it is too long.
    """
    data = memoryview(framed(body))
    # the other side may close, and a host not ignore the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        while data:
            data = data[os.write(channel, data) :]
    finally:
        if signal.SIGPIPE in signal.sigpending() and signal.SIGPIPE not in before:
            signal.sigwait({signal.SIGPIPE})
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def framed(body: bytes) -> bytes:
    """A message with its length before it.

    Raises:
        ValueError: it is too long.
    """
    if len(body) > MAX_BYTES:
        raise ValueError(f"a message of {len(body)} bytes; at most {MAX_BYTES}")
    return struct.pack("!I", len(body)) + body


def receive(channel: int) -> dict[str, Any] | None:
    """Wait for one message; None when the other side has closed."""
    header = _exactly(channel, 4)
    if header is None:
        return None
    (length,) = struct.unpack("!I", header)
    body = _exactly(channel, length) if length <= MAX_BYTES else None
    if body is None:
        return None
    message: dict[str, Any] = json.loads(body.decode("utf-8", "surrogatepass"))
    return message


def _exactly(channel: int, count: int) -> bytes | None:
    parts = []
    while count:
        part = os.read(channel, min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
