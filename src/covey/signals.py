"""Signals that end a command, at a moment at which nothing is lost.

Ctrl-C, SIGTERM (Slurm, Kubernetes and `kill` send it) and SIGHUP (the terminal is gone) all end a run with a checkpoint
of its last whole step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class EndedError(KeyboardInterrupt):
    """A signal ends the command."""

    def __init__(self, number: int) -> None:
        self.number, self.exit_status = number, 128 + number
        super().__init__(
            "interrupted from the keyboard" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
        )


class _Waiting:
    """Whether signals wait now, and the one that does."""

    waits = False
    number = 0


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, the first of these signals raises an `EndedError`, or does so at the end of `held`; another one that
    comes while that waits raises it at once. What is ignored (`nohup`) stays so. Does nothing but in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in before.items():
        if handler not in (signal.SIG_IGN, None):  # None: not Python's to give back
            signal.signal(number, _end)
    try:
        yield
    except KeyboardInterrupt as error:  # Ray's waiting calls make one of their own
        raise ended(error) from error
    finally:
        _Waiting.number = 0
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def ended(error: KeyboardInterrupt) -> EndedError:
    """What has ended the command, where it has come through code that raised another interrupt in its place."""
    return error if isinstance(error, EndedError) else EndedError(_Waiting.number or signal.SIGINT)


@contextmanager
def held() -> Iterator[None]:
    """A signal that comes inside waits for the end, unless that is an error: the block is done or it is not."""
    _Waiting.waits = True
    try:
        yield
    finally:
        _Waiting.waits = False
    if _Waiting.number:
        raise EndedError(_Waiting.number)


def note() -> None:
    """From now on this process ends when another one lets it go. Does nothing but in the main thread."""
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, _note)


def noted() -> int:
    """The signal that has come since `note`, 0 = none."""
    return _Waiting.number


def _note(number: int, frame: FrameType | None) -> None:
    _Waiting.number = number


def _end(number: int, frame: FrameType | None) -> None:
    if _Waiting.waits and not _Waiting.number:
        _Waiting.number = number
        return
    _Waiting.number = number
    for other in ENDING[1:]:  # whoever sends SIGTERM often sends it to all processes, one of which passes it on
        signal.signal(other, signal.SIG_IGN)
    raise EndedError(number)
