"""Whether the head of a cluster is still there: without it nobody can be started, and its processes end one by one."""

from __future__ import annotations

import socket
import time

from covey.errors import ClusterLostError

CONNECT_SECONDS = 5.0
_LOST_SECONDS = 20.0
"""Without an answer until the cluster is taken to be lost. Ray waits 60 s, then it ends every process of the cluster,
the trainer too; the time between is for a checkpoint."""


class Head:
    """The head of the Ray cluster that this process is connected to."""

    def __init__(self, address: str) -> None:
        self.address, self.lost = address, False
        self._asked = time.monotonic()
        self._silent_since: float | None = None

    def check(self) -> None:
        """Ask now and then whether it still answers; to be called often.

        Raises:
            ClusterLostError: it has not for some time.
        """
        now = time.monotonic()
        if now - self._asked >= _LOST_SECONDS / 10:
            self._asked = now
            try:
                reach(self.address)
                self._silent_since = None
            except OSError:
                self._silent_since = self._silent_since or now
        self.lost = self._silent_since is not None and now - self._silent_since > _LOST_SECONDS
        if self.lost:
            raise ClusterLostError(
                f"the head of the Ray cluster, {self.address}, has not answered for {_LOST_SECONDS:g} s: the cluster "
                "is lost; when it is there again, start again: the run continues from its last checkpoint"
            )


def reach(address: str) -> None:
    """Connect to HOST:PORT and leave it.

    Raises:
        OSError: nobody answers.
        OverflowError: it is no port.
    """
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
