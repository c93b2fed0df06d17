"""One trainer at a time: two that upload to one server would train on each other's weights.

Who uploads without a name (a check, a client that knows no names) is let in as long as no named trainer
holds the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from covey.errors import CoveyError


class TwoTrainersError(CoveyError):
    """Another trainer uploads to this server."""


class TrainerLease:
    """Decides who may upload."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._holder: str | None = None
        self._heard = 0.0

    def check(self, trainer: str, *, takeover: bool = False) -> None:
        """Raise where another trainer holds the server.

        Raises:
            TwoTrainersError: it does.
        """
        quiet = self._clock() - self._heard
        if self._holder not in (None, trainer) and quiet < self._seconds and not takeover:
            raise TwoTrainersError(
                f"trainer {trainer or 'without a name'!r} may not upload: {self._holder!r} did {quiet:.0f} s ago. Stop "
                f"one of them, give each a server of its own, or wait {self._seconds - quiet:.0f} s"
            )

    def release(self, trainer: str) -> None:
        """The trainer is done: another may come at once."""
        if trainer == self._holder:
            self._holder = None

    def take(self, trainer: str, *, takeover: bool = False) -> None:
        """Checks likewise, and gives the server to this trainer."""
        self.check(trainer, takeover=takeover)
        if trainer:
            self._holder, self._heard = trainer, self._clock()
