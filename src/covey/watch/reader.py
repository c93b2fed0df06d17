"""Tables are read in processes of their own, whose memory and time are limited, whatever a file says of itself.

A few kilobytes of Parquet can unfold to gigabytes, and its own account of its size may be wrong. What such a file takes
with it is the process that reads it. The limit of memory is the operating system's; macOS knows none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from covey.errors import RunFolderError
from covey.observe.completions import KEYS_AND_TEXTS, messages, read_table
from covey.observe.records import Record
from covey.rewards.parallel import ItemTimeout, WorkerPool
from covey.watch.ledger import ledger_completion, ledger_completions
from covey.watch.tables import WHOLE, compare, episodes, found_in, groups, wanted_of
from covey.watch.tables import shortened as shortened_row

MEMORY_MB = 2048
"""Address space of a process that reads; Python and pyarrow take 400 MB of it."""
SECONDS = 30.0
SEARCH_SECONDS = 1.5
"""After which a search tells what it has found so far."""
_KEPT = 3
_PAGE_ROWS, _PAGE_CHARACTERS = 400, 1_000_000
"""Completions and characters in one answer."""
_MOST_HITS = 200


class TableReader:
    """Asks tables; its processes start with the first question."""

    def __init__(self, workers: int = 2) -> None:
        self._pool = WorkerPool(answer, workers=workers, time_limit=SECONDS, memory_mb=MEMORY_MB, prepare=prepare)

    def ask(self, what: str, path: Path, *arguments: Any) -> Record:
        """What one of `ANSWERS` says.

        Raises:
            RunFolderError: there is no such table, or it is damaged, or too large to be looked at.
        """
        (found,) = self._pool.map([(what, str(path), list(arguments))])
        if isinstance(found, ItemTimeout):
            raise RunFolderError(f"{path} took longer than {SECONDS:g} seconds to read; look at it with pyarrow")
        if isinstance(found, Exception):
            raise RunFolderError(f"{path} could not be read within {MEMORY_MB} MB ({found}); look at it with pyarrow")
        if "error" in found:
            raise RunFolderError(str(found["error"]))
        return dict(found["told"])

    def close(self) -> None:
        """End the processes; the next question starts them anew."""
        self._pool.close()


def prepare() -> None:
    """Import what takes a while."""
    import pyarrow as pa
    import pyarrow.parquet

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


def answer(what: str, path: str, arguments: list[Any]) -> Record:
    """Runs in a worker."""
    try:
        return {"told": ANSWERS[what](Path(path), *arguments)}
    except RunFolderError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": f"{path} needs more than {MEMORY_MB} MB; look at it with pyarrow"}


_tables: dict[Path, tuple[tuple[int, int], list[Record]]] = {}


def _rows(path: Path) -> list[Record]:
    """A table; the last ones are kept."""
    try:
        found = path.stat()
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read ({error.strerror}); has it been deleted?") from None
    state = (found.st_mtime_ns, found.st_size)
    if path not in _tables or _tables[path][0] != state:
        while len(_tables) >= _KEPT:
            del _tables[next(iter(_tables))]
        _tables[path] = (state, read_table(path))
    return _tables[path][1]


def _completions(path: Path, wanted: Record, offset: int) -> Record:
    """Groups from the group `offset` on."""
    rows = _rows(path)
    found = groups(rows, wanted_of(wanted))
    page: list[Record] = []
    count = size = 0
    for group in found[offset:]:
        group["rows"] = group["rows"][:_PAGE_ROWS]
        count += len(group["rows"])
        size += sum(len(row["completion"]) for row in group["rows"]) + sum(len(m["content"]) for m in group["prompt"])
        if page and (count > _PAGE_ROWS or size > _PAGE_CHARACTERS):
            break
        page.append(group)
    return {"completions": len(rows), "found": len(found), "groups": page}


def _completion(path: Path, row: int) -> Record:
    rows = _rows(path)
    if not 0 <= row < len(rows):
        raise RunFolderError(f"row {row}: {path.stem} has {len(rows)} rows")
    return shortened_row(row, rows[row], WHOLE) | {"prompt": messages(rows[row].get("prompt"))}


def _compare(before: Path, after: str, shown: str, offset: int) -> Record:
    counts, pairs = compare(_rows(before), _rows(Path(after)), shown)
    page: list[Record] = []
    size = 0
    for pair in pairs[offset : offset + _PAGE_ROWS // 2]:
        size += len(pair["before"]["completion"]) + len(pair["after"]["completion"])
        if page and size > _PAGE_CHARACTERS:
            break
        page.append(pair)
    return {"counts": counts, "found": len(pairs), "pairs": page}


def _search(folder: Path, names: Sequence[str], wanted: Record) -> Record:
    """Completions of several tables, one after another and until `SEARCH_SECONDS` are over or many are found (`hits`);
    how many tables were `looked` through, and how many could not be read (`unread`).
    """
    until = time.monotonic() + SEARCH_SECONDS
    hits: list[Record] = []
    unread = looked = 0
    for name in names:
        if looked and (time.monotonic() > until or len(hits) >= _MOST_HITS):
            break
        looked += 1
        try:
            rows = read_table(folder / name, KEYS_AND_TEXTS)
            hits += [hit | {"table": name} for hit in found_in(rows, wanted_of(wanted))]
        except RunFolderError:
            unread += 1
    return {"hits": hits[: 2 * _MOST_HITS], "looked": looked, "unread": unread}


ANSWERS: dict[str, Callable[..., Record]] = {
    "completions": _completions,
    "completion": _completion,
    "episodes": lambda path, group: episodes(_rows(path), group),
    "compare": _compare,
    "search": _search,
    "ledger": lambda path: {"completions": ledger_completions(_rows(path))},
    "ledger_of": lambda path, row, turn: ledger_completion(_rows(path), row, turn),
}
