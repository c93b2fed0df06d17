"""Call reward functions, which are foreign code, with a time limit, and read what they returned.

Calls run in a daemon thread, awaitables on an event loop of their own. What comes back is one finite number or None for
each completion, or an error.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import math
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from covey.errors import RewardCountError, RewardError, place_of, raised_at, running_at
from covey.functions import later

if TYPE_CHECKING:
    from covey import overseer
else:  # loaded with the first reward
    (overseer,) = later("covey", "overseer")

_log = logging.getLogger(__name__)

_GRACE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """How a call went wrong: it raised `error`, or ran out of time (None) `at` some line of somebody's own code."""

    error: BaseException | None
    at: str = ""


def is_async(function: Any) -> bool:
    """True for `async def` functions, partials of them, and objects whose `__call__` is one."""
    while isinstance(function, functools.partial):
        function = function.func
    return any(map(inspect.iscoroutinefunction, (function, getattr(type(function), "__call__", None))))  # noqa: B004


def call_with_timeout(work: Callable[[], Any], timeout: float | None, name: str) -> Any:
    """Return what `work()` returns, or a `Failure`. Without a time limit it runs in the caller's thread.

    `SystemExit` from foreign code is a failure like any other; the user's Ctrl-C passes. The overseer knows of the call
    by its name, which the thread has too.
    """
    if timeout is None:
        with overseer.overseen([name], threading.get_ident()):
            return _guarded(work)
    outcome: list[Any] = []
    context, known = contextvars.copy_context(), threading.Event()

    def call() -> None:
        known.wait()
        outcome.append(context.run(_guarded, work))

    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    with overseer.overseen([name], thread.ident or 0, timeout) as python_runs:
        known.set()
        until = time.monotonic() + timeout
        while thread.is_alive() and (left := until - time.monotonic()) > 0:
            thread.join(min(left, 1.0))
            python_runs()
    return outcome[0] if outcome else Failure(None, running_at(thread.ident))


def _guarded(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except KeyboardInterrupt:
        if threading.current_thread() is threading.main_thread():
            raise
        return Failure(RuntimeError("it raised KeyboardInterrupt, though no key was pressed"))
    except BaseException as error:
        return Failure(error)


class AsyncRunner:
    """Runs awaitables concurrently on one event loop in a daemon thread.

    The loop is kept from call to call, because HTTP clients that a reward function holds are bound to theirs;
    and it is not the caller's, which in a notebook is already running.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def run(self, awaitables: Sequence[Awaitable[Any]], timeout: float | None, names: Sequence[str] = ()) -> list[Any]:
        """Await all; return for each, in order, its result or a `Failure`.

        With a time limit the call comes back soon after it even if an awaitable blocks the loop; the loop is
        then given up for a new one. The overseer knows of the call by its names.
        """
        if not awaitables:
            return []
        outcomes: list[Any] = [Failure(None)] * len(awaitables)
        loop = self._running_loop()
        until = None if timeout is None else time.monotonic() + timeout + _GRACE_SECONDS
        with overseer.overseen(names, self._thread.ident or 0, timeout) as python_runs:
            future = asyncio.run_coroutine_threadsafe(_gather(awaitables, outcomes, timeout), loop)
            try:
                while until is None or time.monotonic() < until:
                    wait([future], 1.0 if until is None else max(0.0, min(1.0, until - time.monotonic())))
                    if future.done():
                        return future.result()
                    python_runs()
            except BaseException:  # Ctrl-C while waiting
                future.cancel()
                raise
        task = asyncio.current_task(loop)  # it blocks the loop: leave its thread behind
        blocking = [] if task is None else [n for n in range(len(outcomes)) if task.get_name() == f"covey-reward-{n}"]
        for index in blocking:
            outcomes[index] = Failure(None, running_at(self._thread.ident))
        self.close()
        return list(outcomes)

    def close(self) -> None:
        """Stop the loop; a later `run` starts another."""
        if self._finalizer is not None:
            self._finalizer()
        self._loop = None

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(loop,), name="covey-async-rewards", daemon=True)
            self._thread.start()
            self._loop = loop
            self._finalizer = weakref.finalize(self, _stop, loop)
        return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    # What failed is reported by the scorer; a task given up after its time limit is no further news.
    loop.set_exception_handler(lambda _, context: _log.debug("%s", context.get("message")))
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)


async def _gather(awaitables: Sequence[Awaitable[Any]], outcomes: list[Any], timeout: float | None) -> list[Any]:
    async def one(index: int, awaitable: Awaitable[Any]) -> None:
        try:
            outcomes[index] = await awaitable
        except asyncio.CancelledError as error:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # ours, for the time limit
                raise
            outcomes[index] = Failure(error)
        except BaseException as error:
            outcomes[index] = Failure(error)

    tasks = [asyncio.create_task(one(*each), name=f"covey-reward-{each[0]}") for each in enumerate(awaitables)]
    # Not wait_for: it waits for a cancelled task to agree, and one that swallows the cancellation never does.
    _, late = await asyncio.wait(tasks, timeout=timeout)
    result = list(outcomes)  # now: a task that swallows the cancellation must not slip in a result later
    for index, task in enumerate(tasks):
        if task in late:
            result[index] = Failure(None, _waits_at(awaitables[index]))
            task.cancel()
    return result


def _waits_at(awaitable: Any) -> str:
    frames = []
    while (frame := getattr(awaitable, "cr_frame", None)) is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        awaitable = awaitable.cr_await
    return place_of(frames[::-1])


MAX_REWARD = 1e30
"""The largest magnitude of a reward: the variance of a group, and an advantage in single precision, are then finite."""


def as_list(returned: Any, count: int) -> Any:
    """Read at most `count + 1` entries; awaitables, and what is no sequence, pass unchanged.

    It runs where the function ran, under its time limit: reading a generator runs the function's code.
    """
    none = isinstance(returned, str | bytes | Mapping | set | frozenset) or getattr(returned, "ndim", 1) == 0
    if none or isinstance(returned, list | tuple) or inspect.isawaitable(returned) or not hasattr(returned, "__iter__"):
        return returned
    values: list[Any] = []
    try:
        for value in islice(returned, count + 1):
            values.append(value)
    except (Exception, SystemExit) as error:
        if inspect.isgenerator(returned):  # it failed at this very sample
            raise RewardError(describe_error(error), sample=len(values)) from error
        raise
    # An array reports its true length; an endless generator is cut.
    return list(returned) if len(values) > count and hasattr(returned, "__len__") else values


def read_rewards(name: str, returned: Any, rows: Sequence[str]) -> NDArray[np.float64]:
    """`[N]` rewards, NaN for None.

    Raises `RewardError`: not a list, not N entries, or an entry that is no finite number up to `MAX_REWARD` in
    magnitude.
    """
    count = len(rows)
    if not isinstance(returned, list | tuple):
        shown = "nothing (None)" if returned is None else f"a {type(returned).__name__}"
        raise RewardError(
            f"reward function {name!r} returned {shown}; it must return a list with one number or None for "
            f"each of the {count} completions",
            function=name,
        )
    if len(returned) != count:
        shown = f"{len(returned)}" if len(returned) < count else f"{len(returned)} (or more)"
        raise RewardCountError(
            f"reward function {name!r} returned {shown} rewards for {count} completions; it must return "
            "exactly one for each completion, in order, None for those that it cannot score",
            function=name,
            sample=min(len(returned), count),
        )
    rewards = np.full(count, np.nan)
    for index, value in enumerate(returned):
        if value is None:
            continue
        number, problem = _read_number(value)
        if problem:
            raise RewardError(
                f"reward function {name!r} returned {_shown(value)} for sample {index} (row {rows[index]}): {problem}, "
                "but a reward is one finite number; return a float, or None if the completion cannot be scored",
                function=name,
                sample=index,
            )
        rewards[index] = number
    return rewards


def _read_number(value: Any) -> tuple[float, str]:
    """The number, or what is wrong with it."""
    if isinstance(value, str | bytes):  # float("1") would take it
        return math.nan, "text"
    shape = getattr(value, "shape", ())
    if shape != ():
        return math.nan, f"an array of shape {tuple(shape)}"
    try:
        # item(): torch warns when float() is called on a tensor that needs a gradient.
        number = float(value.item() if hasattr(value, "item") else value)
    except OverflowError:
        return math.nan, f"larger than {MAX_REWARD:g}"
    except (Exception, SystemExit):
        return math.nan, f"a {type(value).__name__}"
    if math.isfinite(number) and abs(number) > MAX_REWARD:
        return math.nan, f"larger than {MAX_REWARD:g}"
    return number, "" if math.isfinite(number) else "not finite"


def describe_error(error: BaseException) -> str:
    """`ValueError: its message at rewards.py:17, in correct`, shortened."""
    return f"{type(error).__name__}: {message_of(error)}{raised_at(error)}"


def message_of(error: BaseException, most: int = 500) -> str:
    """The beginning of its message; also of one that cannot print itself."""
    try:
        return shorten(str(error), most)
    except Exception:
        return "(its message cannot be shown)"


def shorten(text: str, most: int = 500) -> str:
    """The beginning of a text that may be very long."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _shown(value: Any) -> str:
    try:
        return shorten(repr(value), 60)
    except Exception:
        return f"<{type(value).__name__}>"
