"""Verifiers in processes of their own, each item with a time limit that really ends it.

    slow = ParallelVerifier(MyVerifier(), workers=2, time_limit=5.0)
    slow.batch_verify([("2+2=", "4"), ...])       # an item that takes longer scores 0; its process is replaced

A limit set by a signal does not reach a thread, nor a library that is busy in C; a killed process always ends.
"""

from __future__ import annotations

import base64
import pickle
import queue
import resource
import select
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from covey.errors import RewardError
from covey.functions import USER_FILES
from covey.processes import end_python, start_python
from covey.rewards.jail import messages
from covey.rewards.verifier import Verifier

_START_SECONDS = 180.0
_SERVE = "import sys; from covey.rewards.parallel import serve; serve(int(sys.argv[1]))"


class ItemTimeout(Exception):  # noqa: N818
    """An item took longer than its limit."""


class NotStartedError(RewardError):
    """The process that was to work on an item could not be started, whatever the item."""


class WorkerPool:
    """Processes that apply one function to items."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        workers: int,
        time_limit: float,
        memory_mb: int = 4096,
        prepare: Callable[[], object] = int,
    ) -> None:
        if "__main__" in (getattr(type(function), "__module__", ""), getattr(function, "__module__", "")):
            place = "__main__, where other processes cannot find it; move it to a module"
            raise RewardError(f"{function!r:.80} is defined in {place}")
        self._time_limit = time_limit
        self._workers, self._free = workers, queue.SimpleQueue[_Worker]()
        for _ in range(workers):
            self._free.put(_Worker((function, prepare), memory_mb))
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="covey-verify")

    def map(self, items: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The function's results, in order; an exception takes the place of a result that there is not.

        Raises `NotStartedError`: a process cannot be started, which is no item's fault.
        """
        return list(self._threads.map(self._one, items))

    def close(self) -> None:
        """End the processes; those that are needed again start anew."""
        for worker in [self._free.get() for _ in range(self._workers)]:
            worker.stop()
            self._free.put(worker)

    def _one(self, item: tuple[Any, ...]) -> Any:
        worker = self._free.get()
        try:
            return worker.apply(item, self._time_limit)
        except NotStartedError:
            raise
        except Exception as error:
            return error
        finally:
            self._free.put(worker)


class _Worker:
    """One process, replaced when it has to be killed."""

    def __init__(self, functions: tuple[Callable[..., Any], Callable[[], object]], memory_mb: int) -> None:
        self._functions, self._memory_mb = functions, memory_mb
        self._channel: socket.socket | None = None
        self._stop: Callable[[], object] = lambda: None

    def apply(self, item: tuple[Any, ...], time_limit: float) -> Any:
        # a process that has died since its last item has closed its channel: it says nothing else by itself
        if self._channel is None or select.select([self._channel], [], [], 0)[0]:
            self.stop()
            self._start()
        assert self._channel is not None
        answer = self._ask({"item": list(item), "alarm": time_limit + 5.0}, time_limit)
        if "error" in answer:
            raise RewardError(str(answer["error"]))
        return answer["result"]

    def stop(self) -> None:
        self._stop()
        self._channel = None

    def _start(self) -> None:
        process, ours = start_python(_SERVE, PYTHONHASHSEED="0")  # so that a resumed run sees sets in the same order
        self._channel = ours
        self._stop = weakref.finalize(self, end_python, process, ours)
        functions = base64.b64encode(pickle.dumps(self._functions)).decode()
        told = {"functions": functions, "files": USER_FILES, "memory": self._memory_mb << 20}
        try:
            answer = self._ask(told, _START_SECONDS)
        except (ItemTimeout, RewardError) as error:
            answer = {"error": error}
        if "error" in answer:
            self.stop()
            raise NotStartedError(f"a process for {self._functions[0]!r:.80} did not start: {answer['error']}")

    def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._channel is not None
        try:
            messages.send(self._channel.fileno(), message)
            if not select.select([self._channel], [], [], seconds)[0]:
                raise ItemTimeout(f"longer than {seconds:g} s")
            answer = messages.receive(self._channel.fileno())
            if answer is None:
                raise RewardError("the verifier's process ended itself")
        except BaseException:
            self.stop()
            raise
        return answer


def serve(channel: int) -> None:
    """Applies the function to one item after another, in a process of its own, until the channel closes."""
    if (message := messages.receive(channel)) is None:
        return
    resource.setrlimit(resource.RLIMIT_AS, (message["memory"], message["memory"]))
    USER_FILES.update(message["files"])
    try:
        function, prepare = pickle.loads(base64.b64decode(message["functions"]))
        prepare()
    except BaseException as error:
        messages.send(channel, {"error": f"{type(error).__name__}: {error}"})
        return
    messages.send(channel, {"ready": True})
    while (message := messages.receive(channel)) is not None:
        signal.setitimer(signal.ITIMER_REAL, message["alarm"])  # ends this process where nobody is left to do so
        try:
            answer = {"result": function(*message["item"])}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        messages.send(channel, answer)


class ParallelVerifier(Verifier):
    """Runs another verifier in several processes, with a time limit for each item.

    Args:
        verifier: scores one pair with `verify`; it is copied to each process.
        workers: number of processes.
        time_limit: time limit for one item, in seconds.
        timeout_score: score of an item that takes longer; None = not scored.
    """

    def __init__(
        self, verifier: Verifier, *, workers: int = 2, time_limit: float = 5.0, timeout_score: float | None = 0.0
    ) -> None:
        self.__name__ = getattr(verifier, "__name__", type(verifier).__name__)
        self._pool = WorkerPool(verifier.verify, workers=workers, time_limit=time_limit)
        self._timeout_score = timeout_score
        self._lock = threading.Lock()
        self.timeouts = 0

    def batch_verify(self, pairs: list[tuple[str, str]]) -> Sequence[float | None]:
        """Score (prompt, completion) pairs in order; `RewardError`: the verifier raised or died at pair `sample`."""
        scores: list[float | None] = []
        for index, found in enumerate(self._pool.map(pairs)):
            if isinstance(found, ItemTimeout):
                with self._lock:
                    self.timeouts += 1
                found = self._timeout_score
            elif isinstance(found, Exception):
                raise RewardError(str(found), function=self.__name__, sample=index)
            scores.append(found)
        return scores

    def close(self) -> None:
        """End the processes; the next call starts them again."""
        self._pool.close()
