"""A process beside this one, which ends it where foreign C code holds Python's lock: nothing else can then run here.

It hears of calls of reward functions and tools, once a second that Python runs, and of signals, which the system's
handler writes to its channel without that lock. Five silent seconds after a time limit or a signal mean that the call
lets nothing run any more. What is saved then is as whole as after any `kill -9`.

    in   {"call": n, "names": [...], "thread": t, "limit": seconds}, {"over": n}, {}; a signal's number as one byte; and
         where each thread is, in `faulthandler`'s words, when the overseer asks for that
"""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import json
import math
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from covey.errors import place_of
from covey.processes import end_python, start_python
from covey.signals import ENDING

_SILENT_SECONDS = 5.0
_WORD_SECONDS = 60.0
_ASK = signal.SIGURG  # ignored where it has no handler
_numbers = itertools.count()
_lock = threading.Lock()
_channels: dict[int, int] = {}
"""By process: one that is forked off starts an overseer of its own."""


@contextmanager
def overseen(names: Sequence[str] = (), thread: int = 0, limit: float | None = None) -> Iterator[Callable[[], None]]:
    """Inside, the overseer hears of signals, if this is the main thread, and of a call, if there are `names`.

    It yields what is to be called once a second, unless the call is made by this thread.
    """
    with _lock:
        channel = _channels[os.getpid()] if os.getpid() in _channels else _start()

    def tell(**message: Any) -> None:
        with suppress(OSError):
            os.write(channel, json.dumps(message).encode() + b"\n")

    main, number, before = threading.current_thread() is threading.main_thread(), next(_numbers), -1
    if main:
        before = signal.set_wakeup_fd(channel, warn_on_full_buffer=False)
        if before != -1:  # somebody else hears of them
            signal.set_wakeup_fd(before)
    try:
        if names:
            tell(call=number, names=list(names), thread=thread, limit=limit)
        yield tell
    finally:
        tell(over=number)
        if main:
            signal.set_wakeup_fd(before)


def _start() -> int:
    code = f"import sys; from covey.overseer import serve; serve(int(sys.argv[1]), {os.getpid()})"
    try:
        process, ours = start_python(code)
    except OSError:  # no room for one more process: nobody oversees
        return _channels.setdefault(os.getpid(), -1)
    atexit.register(end_python, process, ours, 1.0)
    ours.setblocking(False)
    if signal.getsignal(_ASK) == signal.SIG_DFL:
        faulthandler.register(_ASK, ours.fileno())
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are its own
    return _channels.setdefault(os.getpid(), ours.fileno())


def serve(channel: int, process: int) -> None:
    """What the overseer does until the channel closes."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    calls: dict[int, dict[str, Any]] = {}
    told = asked = math.inf
    clock = heard = 0.0  # stands still while both are stopped
    places, data, said = b"", None, set[str]()
    while data != b"":
        for line in (data or b"").splitlines():
            if (text := line.strip(bytes(range(32)))).startswith(b"{"):
                message, heard, asked = json.loads(text), clock, math.inf
                calls.pop(message.get("over"), None)
                if "call" in message:
                    calls[message["call"]] = message | {"begun": clock}
        places = b"" if asked == math.inf else places + (data or b"")
        told = min(told, clock) if set(data or b"") & set(ENDING) else told if calls else math.inf
        for call in calls.values():
            age, limit, shown = clock - call["begun"], call["limit"] or math.inf, " or ".join(call["names"])
            over = age > limit
            if asked == math.inf and clock - heard > _SILENT_SECONDS and (over or clock - told > _SILENT_SECONDS):
                asked = clock
                os.kill(process, _ASK)
            elif clock - asked > 1.0 and os.getppid() == process:
                setting = "environment.step_seconds" if shown.startswith("tool ") else "reward_timeout"
                why = f"did not return within {setting}={limit:g} seconds" if over else "does not let the run end"
                _say(
                    f"{_named(call, places.decode())} {why}: it is in C code that lets nothing else run, so that this "
                    "process is killed. Bound what it computes. What was saved is whole: resume the run"
                )
                os.kill(process, signal.SIGKILL)
                return
            elif age > _WORD_SECONDS and shown not in said:
                said.add(shown)
                _say(f"{shown} has been running for {_WORD_SECONDS:g} s")
        before = time.monotonic()
        data = os.read(channel, 1 << 20) if select.select([channel], [], [], 1.0)[0] else None
        clock += min(time.monotonic() - before, 1.0)


def _named(call: dict[str, Any], places: str) -> str:
    """The functions that may be meant, and where in somebody's own code their thread is."""
    found = re.search(rf"hread 0x0*{call['thread']:x}\b.*\n((?:  .*\n)*)", places)
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', found[1]) if found else []
    names = [name for name in call["names"] if any(repr(function) in name for _, _, function in frames)]
    return " or ".join(names or call["names"]) + place_of(frames)


def _say(message: str) -> None:
    sys.stderr.write(f"\ncovey: {message}\n")
    sys.stderr.flush()
