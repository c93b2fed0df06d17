"""Where the ranks of a run are, and which of them have not come."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
import time
from datetime import timedelta
from typing import Any


def await_all(store: Any, rank: int, world: int, seconds: float) -> None:
    """Wait until every rank has come.

    Raises:
        RuntimeError: some have not; it names them, and where the others are.
    """
    store.set(f"here-{rank}", whereabouts())
    deadline = time.monotonic() + seconds
    for other in range(world):
        left = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([f"here-{other}"], timedelta(seconds=left))
        except RuntimeError:
            break
    missing = [other for other in range(world) if not store.check([f"here-{other}"])]
    if missing:
        came = [other for other in range(world) if other not in missing]
        there = [f"rank {other} on {store.get(f'here-{other}').decode()}" for other in came[:8]]
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise RuntimeError(
            f"rank {names} of {world} did not come; {', '.join(there)} did. Look there, and that the machines reach "
            "each other through these interfaces (GLOO_SOCKET_IFNAME chooses another one)"
        )


def whereabouts() -> str:
    """The name of this machine, with the address and interface by which it reaches the other ranks."""
    master = (os.environ.get("MASTER_ADDR", "127.0.0.1"), 9)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(master)  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or _interface_of(address)
    return f"{socket.gethostname()} ({address}{f', {interface}' if interface else ''})"


def _interface_of(address: str) -> str:
    """Its name on Linux, "" elsewhere."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name.encode()[:15]))
            try:
                fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(request[20:24].tobytes()) == address:
                return name
    return ""
