"""What trackers are sent, and how: little enough for a run of any length, and never in the run's way.

A tracker is somebody else's program, often with a network behind it. Its calls are made in a thread of its own, so that
one that waits costs the run nothing; one that fails, or waits for too long, is given up.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.observe.records import plain

MOST_CALLS = 2_000
"""Calls that may wait; when there are more, the tracker has taken nothing for a long time."""
MOST_ROWS, MOST_TABLE_BYTES, MOST_TEXT, MOST_COLUMNS = 200, 256 << 10, 1_000, 30
MOST_EVENTS = 500
MOST_PICTURE_BYTES = 4 << 20
_DENSE = 50

_FIRST = ("group", "sample", "uid", "prompt", "completion", "reward", "advantage", "correct", "masked_by", "length")


class Sender:
    """Makes calls in order in a thread of its own. Made for one thread that submits."""

    def __init__(self, name: str, *, most: int = MOST_CALLS, patience: float) -> None:
        """Set up; the thread starts with the first call."""
        self._name = name
        self._patience = patience
        self._calls: queue.Queue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.Queue(most)
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Have `call(*arguments)` made, soon.

        Raises:
            Exception: of an earlier call.
            TimeoutError: too many calls wait.
        """
        self._raise_failure()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"covey-{self._name}", daemon=True)
            self._thread.start()
        try:
            self._calls.put_nowait((call, arguments))
        except queue.Full:
            raise TimeoutError(f"{self._calls.maxsize} calls wait for {self._name}, which takes none") from None

    def close(self) -> None:
        """Wait until all calls were made.

        Raises:
            Exception: of a call.
            TimeoutError: they were not, within the patience; the thread ends with the process.
        """
        if self._thread is not None:
            try:
                self._calls.put(None, timeout=self._patience)
            except queue.Full:
                raise TimeoutError(f"{self._name} has taken nothing for {self._patience:g} s") from None
            self._thread.join(self._patience)
            if self._thread.is_alive():
                raise TimeoutError(
                    f"{self._name} did not finish within {self._patience:g} s; the run folder has what it has not"
                )
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (entry := self._calls.get()) is not None:
            call, arguments = entry
            try:
                call(*arguments)
            except BaseException as error:  # a tracker's login may call sys.exit
                self._failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
                return


class Rarer:
    """Says yes to fewer and fewer of a growing number of chances: all of 50, every second of the next 100, every fourth
    of the next 200, and so on, so that a run of a million steps sends some 700 tables.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._every = 1
        self._left = _DENSE

    def __call__(self) -> bool:
        """Whether this chance is taken."""
        self._seen += 1
        if self._seen % self._every:
            return False
        self._left -= 1
        if self._left == 0:
            self._every, self._left = 2 * self._every, _DENSE
        return True


def bounded_table(rows: Sequence[Mapping[str, Any]], most: int) -> tuple[list[str], list[list[Any]]]:
    """The first completions of a step as columns and rows, with cut texts, at most 256 KiB of them as JSON."""
    names = list(dict.fromkeys(name for row in rows[:1] for name in row))
    columns = [name for name in _FIRST if name in names]
    columns += [name for name in names if name not in columns][: MOST_COLUMNS - len(columns)]
    table: list[list[Any]] = []
    size = 0
    for row in rows[: min(most, MOST_ROWS)]:
        values = [_small(row.get(name)) for name in columns]
        size += len(json.dumps(values))
        if size > MOST_TABLE_BYTES:
            break
        table.append(values)
    return columns, table


def _small(value: Any) -> Any:
    """A number as it is, everything else as text that is valid Unicode and not long."""
    clean = plain(value)
    if clean is None or isinstance(clean, bool | int | float):
        return clean
    text = clean if isinstance(clean, str) else json.dumps(clean)
    return bounded_text(text, MOST_TEXT)


def bounded_text(text: str, most: int) -> str:
    """Text that any tracker can store: valid Unicode without NUL, at most so many characters."""
    cut = text[:most].replace("\0", "?").encode("utf-8", "replace").decode()
    return cut if len(text) <= most else f"{cut} [...]"
