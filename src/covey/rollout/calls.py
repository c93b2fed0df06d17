"""Run foreign code with a time limit: calls in a daemon thread, awaitables on an event loop of their own."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)

_GRACE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """How a call went wrong: it raised `error`, or ran out of time (None)."""

    error: BaseException | None


def is_async(function: Any) -> bool:
    """True for `async def` functions, partials of them, and objects whose `__call__` is one."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.iscoroutinefunction(function):
        return True
    return inspect.iscoroutinefunction(getattr(type(function), "__call__", None))  # noqa: B004


def call_with_timeout(work: Callable[[], Any], timeout: float | None) -> Any:
    """Return what `work()` returns, or a `Failure`. Without a time limit it runs in the caller's thread.

    `SystemExit` from foreign code is a failure like any other; the user's Ctrl-C passes.
    """
    if timeout is None:
        return _guarded(work)
    outcome: list[Any] = []
    context = contextvars.copy_context()
    thread = threading.Thread(
        target=lambda: outcome.append(context.run(_guarded, work)), name="covey-reward", daemon=True
    )
    thread.start()
    thread.join(timeout)
    return outcome[0] if outcome else Failure(None)


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

    def run(self, awaitables: Sequence[Awaitable[Any]], timeout: float | None) -> list[Any]:
        """Await all; return for each, in order, its result or a `Failure`.

        With a time limit the call comes back soon after it even if an awaitable blocks the loop; the loop is
        then given up for a new one.
        """
        if not awaitables:
            return []
        outcomes: list[Any] = [Failure(None)] * len(awaitables)
        future = asyncio.run_coroutine_threadsafe(_gather(awaitables, outcomes, timeout), self._running_loop())
        try:
            return future.result(None if timeout is None else timeout + _GRACE_SECONDS)
        except TimeoutError:  # something blocks the loop: leave its thread behind
            self.close()
            return list(outcomes)
        except BaseException:  # Ctrl-C while waiting
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop; a later `run` starts another."""
        if self._finalizer is not None:
            self._finalizer()
        self._loop = None

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(loop,), name="covey-async-rewards", daemon=True).start()
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

    tasks = [asyncio.ensure_future(one(index, awaitable)) for index, awaitable in enumerate(awaitables)]
    # Not wait_for: it waits for a cancelled task to agree, and one that swallows the cancellation never does.
    _, late = await asyncio.wait(tasks, timeout=timeout)
    result = list(outcomes)  # now: a task that swallows the cancellation must not slip in a result later
    for task in late:
        task.cancel()
    return result
