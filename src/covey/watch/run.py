"""One run folder as the page asks for it: small plain values, whatever is in the folder, of which nothing is trusted.

Files that grow are read on from where the last reading ended.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
import time
import tomllib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from covey.errors import RunFolderError
from covey.files import explained, open_regular
from covey.metric_names import describe_metric
from covey.observe.doctor import Doctor
from covey.observe.records import Record, is_answers, is_metrics, read_json
from covey.observe.run_folder import RunFolder, TableKind
from covey.watch.tables import LISTED, TableReader, numbers

PIECE = 4 << 20
"""Bytes that one reading takes."""
_TRACE = 64
_MOST_LINES, _LONGEST = 1_000_000, 1 << 20
"""Lines that are passed over for it, and bytes of one line."""
_MOST_ENTRIES, _MOST_CONFIG, _LONG_LINE, _MOST_SAMPLERS = 200_000, 256 << 10, 1000, 500
_THINNED, _MOST_SEARCHED = 2000, 2000
"""Steps of a long run in a file that is sent, and tables in one search."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one reading of a growing file found."""

    records: list[Record]
    end: int = 0
    mark: str = ""
    restarted: bool = False
    damaged: int = 0
    more: bool = False


def follow(
    path: Path, start: int = 0, mark: str = "", is_record: Callable[[Record], bool] = lambda record: True
) -> Piece:
    """The records that were added to a file of JSON lines since the last reading, at most `PIECE` bytes of them.

    A resume writes such files anew, without the lines of the steps that it repeats: then it begins at the start again.
    `start` and `mark` are the last piece's `end` and `mark`. Where there is no file, nothing was found.

    Raises `RunFolderError`: it cannot be read.
    """
    if not path.exists():
        return Piece([], restarted=start > 0)
    with explained(path, "read"), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        restarted = start > 0 and (start > size or _trace(file, start) != mark)
        start = 0 if restarted else max(start, 0)
        file.seek(start)
        content = file.read(PIECE)
        full = len(content) == PIECE
        end = content.rfind(b"\n") + 1
        if end == 0 and full:  # a line that no run writes: the rest of it will be damaged too
            end = len(content)
        records, damaged = _records(content[:end], is_record)
        return Piece(records, start + end, _trace(file, start + end), restarted, damaged, full)


def sample(path: Path, is_record: Callable[[Record], bool], always: bytes, count: int = 500) -> list[Record]:
    """About `count` records of a long file, evenly spread, and some of those that hold `always`; none of a short one.

    Raises `RunFolderError`: it cannot be read.
    """
    if not path.exists():
        return []
    with explained(path, "read"), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = file.read(1 << 16)
        stride = size * begin.count(b"\n") // (count * max(len(begin), 1))
        if stride < 2:
            return []
        file.seek(0)
        lines: list[bytes] = []
        marked = 0
        for number in range(_MOST_LINES):
            line = file.readline(_LONGEST)
            if not line or len(lines) > 4 * count:
                break
            more = number % stride != 0 and always in line and marked < count
            marked += more
            if more or number % stride == 0:
                lines.append(line)
    return _records(b"".join(lines), is_record)[0]


def _trace(file: BinaryIO, end: int) -> str:
    """What stands just before a place in a file, as a short name."""
    begin = file.seek(max(0, end - _TRACE))
    return hashlib.blake2b(file.read(end - begin), digest_size=8).hexdigest()


def _records(content: bytes, is_record: Callable[[Record], bool]) -> tuple[list[Record], int]:
    found = [read_json(line, dict) for line in content.splitlines()]
    records = [record for record in found if record is not None and is_record(record)]
    return records, len(found) - len(records)


class WatchedRun:
    """Reads a run folder; holds no lock, writes nothing, and keeps only what the doctor needs."""

    def __init__(self, path: str | os.PathLike[str], reader: TableReader | None = None) -> None:
        """Take a run; runs that are shown together share the reader of their tables.

        Raises `RunFolderError`: there is none.
        """
        self.folder = RunFolder.read(path)
        self.folder.versions()
        self._doctor, self._place = Doctor(), (0, "")
        self._reader = TableReader() if reader is None else reader
        self._lock = threading.Lock()

    def about(self) -> Record:
        """Name, versions, settings and how old the last line is."""
        try:
            text, versions = _head(self.folder.config_path), self.folder.versions()
        except RunFolderError:  # deleted by now: the other runs are still shown
            text, versions = "", {}
        try:  # without long lines: a thousand dots in a key take seconds
            settings: Record = tomllib.loads("\n".join(line for line in text.split("\n") if len(line) <= _LONG_LINE))
        except (ValueError, RecursionError):
            settings = {}
        named, schedule = _section(settings, "run").get("run_name"), _section(settings, "schedule")
        length = dict(numbers(schedule))
        metrics = self.folder.metrics_path
        age = max(0.0, time.time() - metrics.stat().st_mtime) if metrics.exists() else None
        return {
            "name": named[:80] if isinstance(named, str) and named.strip() else self.folder.path.name,
            "path": str(self.folder.path),
            "versions": {str(k)[:100]: str(v)[:300] for k, v in itertools.islice(versions.items(), 50)},
            "model": str(_section(settings, "model").get("model") or "")[:300],
            "max_steps": length.get("max_steps"),
            "epochs": None if {"phases", "max_optimizer_steps"} & schedule.keys() else length.get("num_train_epochs"),
            "settings": dict(itertools.islice(_flat(settings), 2000)),
            "config": text,
            "seconds_since_last_line": age,
        }

    def metrics(self, start: int = 0, mark: str = "") -> Record:
        """New lines of `metrics.jsonl`, as names and rows of numbers; see `follow`."""
        piece = follow(self.folder.metrics_path, start, mark, is_metrics)
        return _piece(piece) | _table_of(piece.records)

    def overview(self) -> Record:
        """Some lines of a long `metrics.jsonl`, evenly spread, and its evaluations; no rows of a short one."""
        return _table_of(sample(self.folder.metrics_path, is_metrics, b'"eval/reward"'))

    def thinned(self) -> Record:
        """All of `metrics.jsonl` as one piece; of a long one some lines, each with the seconds until then."""
        seconds, places, damaged, piece = 0.0, {}, 0, Piece([], more=True)
        few = sample(self.folder.metrics_path, is_metrics, b'"eval/reward"', _THINNED)
        records: list[Record] = []
        while piece.more:
            piece = follow(self.folder.metrics_path, piece.end, piece.mark, is_metrics)
            damaged += piece.damaged
            for record in piece.records:
                known = dict(numbers(record))
                seconds += known.get("step_time", 0.0) + known.get("eval/seconds", 0.0)
                places[record["step"]] = seconds
            records += [] if few else piece.records
        rows = [record | {"_seconds": places.get(record["step"], seconds)} for record in few] or records
        return _piece(piece) | _table_of(rows) | {"restarted": False, "damaged": damaged}

    def questions(self, start: int = 0, mark: str = "") -> Record:
        """New lines of `questions.jsonl`: `[step, {uid: [right, all]}]`."""
        piece = follow(self.folder.questions_path, start, mark, is_answers)
        return _piece(piece) | {"lines": [[record["step"], record["answers"]] for record in piece.records]}

    def events(self, start: int = 0, mark: str = "") -> Record:
        """New lines of `events.jsonl`: `[seconds since 1970, kind, message]`."""
        piece = follow(self.folder.events_path, start, mark)
        lines = [
            [dict(numbers(record)).get("time"), str(record.get("kind"))[:100], str(record.get("message"))[:LISTED]]
            for record in piece.records
        ]
        return _piece(piece) | {"lines": lines}

    def doctor(self) -> Record:
        """What the doctor says: since which step, and what still holds; of a long run after `more` questions."""
        with self._lock:
            piece = follow(self.folder.metrics_path, *self._place, is_metrics)
            self._place = piece.end, piece.mark
            if piece.restarted:
                self._doctor = Doctor()
            for record in piece.records:
                self._doctor.check(record)
            said = [
                {"step": one.since, "now": one.present}
                | {name: getattr(one.diagnosis, name) for name in ("code", "message", "fix")}
                for one in self._doctor.findings()
            ]
            return {"said": said, "more": piece.more}

    def tables(self) -> Record:
        """Steps and evaluations that have a table of completions, steps that have a ledger, and who samples; `mark`
        stays until they change.
        """
        found: Record = {
            **{kind: self._steps(kind) for kind in ("step", "eval", "ledger")},
            **_samplers(self.folder.samplers_path),
        }
        text = json.dumps(found)
        return found | {"mark": f"{len(text)}-{zlib.crc32(text.encode()):08x}"}

    def ask(self, what: str, kind: TableKind, step: int, *arguments: Any) -> Record:
        """What one of `covey.watch.tables.ANSWERS` says of a step's table, an evaluation's ("eval"), or a "ledger"."""
        return self._reader.ask(what, self.folder.table(step, kind), *arguments)

    def search(self, kind: TableKind, wanted: Record, first: int, last: int, before: int | None = None) -> Record:
        """Completions of all steps from `first` to `last`, the newest first; bounded in time.

        They are the `hits`, with the steps that were `looked` through, those that are `left`, the step where the next
        search begins (`before`), and the number of tables that could not be read (`unread`).
        """
        last = last if before is None else min(last, before - 1)
        steps = [step for step in reversed(self._steps(kind)) if first <= step <= last]
        if not steps:
            return {"hits": [], "looked": 0, "left": 0, "before": None, "unread": 0}
        names = {self.folder.table(step, kind).name: step for step in steps[:_MOST_SEARCHED]}
        found: Record = {"hits": [], "looked": 1, "unread": 1}
        for tables in (list(names), list(names)[:1]):
            with suppress(RunFolderError):  # one of them is more than a process may hold, or takes too long: which one?
                found = self._reader.ask("search", self.folder.completions, tables, wanted)
                break
        hits = [hit | {"step": names[hit.pop("table")]} for hit in found.pop("hits")]
        return found | {"hits": hits, "left": len(steps) - found["looked"], "before": steps[found["looked"] - 1]}

    def compare(self, before: int, after: int, shown: str = "changed", offset: int = 0) -> Record:
        """Two evaluations, question by question; see `covey.watch.tables.compare`."""
        return self.ask("compare", "eval", before, str(self.folder.table(after, "eval")), shown, offset)

    def close(self) -> None:
        """End the processes that read tables."""
        self._reader.close()

    def _steps(self, kind: TableKind) -> list[int]:
        return [step for step in self.folder.completion_steps(kind, _MOST_ENTRIES) if step < 10**12]


def labels(runs: Sequence[WatchedRun], full: bool = True) -> list[str]:
    """`run.run_name` of the runs, or else their folders' names; where two are the same, as much of the paths as tells
    them apart, or with `full=False` their places.
    """
    paths = [run.folder.path.parts for run in runs]
    tails = (["/".join(parts[-length:]) for parts in paths] for length in range(1, max(map(len, paths), default=0) + 1))
    names = [str(run.about()["name"]) for run in runs]
    for found in (names, *(itertools.islice(tails, None if full else 1))):
        if len(set(found)) == len(found):
            return found
    return [f"{name} ({place})" for place, name in enumerate(names, start=1)]


def describe(names: list[str]) -> Record:
    """Unit and meaning of metrics, by name; of those that are Covey's."""
    found = {name: describe_metric(name) for name in names[:2000]}
    return {name: [definition.unit, definition.meaning] for name, definition in found.items() if definition}


def _table_of(records: list[Record]) -> Record:
    """Numbers of metrics as `names` of columns and `rows`."""
    rows = [dict(numbers(record)) for record in records]
    names = list(dict.fromkeys(name for row in rows for name in row))[:5000]
    return {"names": names, "rows": [[row.get(name) for name in names] for row in rows]}


def _piece(piece: Piece) -> Record:
    return {name: getattr(piece, name) for name in ("end", "mark", "restarted", "damaged", "more")}


def _samplers(path: Path) -> Record:
    """What `Fleet.members` said after which step, if that is what the file holds, and how many are left out."""
    found: Record = {}
    with suppress(RunFolderError):
        found = read_json(_head(path), dict) or {}
    members, step = found.get("samplers"), found.get("step")
    members = [one for one in members if isinstance(one, dict)] if isinstance(members, list) else []
    counts = ("version", "server", "units", "failed")
    return {
        "samplers": [
            {"name": one["name"][:200] if isinstance(one.get("name"), str) else "", "left": one.get("left") is True}
            | {name: one[name] for name in counts if type(one.get(name)) is int and 0 <= one[name] < 1 << 53}
            for one in members[:_MOST_SAMPLERS]
        ],
        "samplers_step": step if type(step) is int and 0 <= step < 1 << 53 else None,
        "samplers_left": max(len(members) - _MOST_SAMPLERS, 0),
    }


def _head(path: Path) -> str:
    if not path.exists():
        return ""
    with explained(path, "read"), open_regular(path) as file:
        return file.read(_MOST_CONFIG).decode("utf-8", "replace")


def _section(settings: Record, name: str) -> Record:
    """A table of the settings, without values that are none of Covey's."""
    found = settings.get(name)
    known = found if isinstance(found, dict) else {}
    return {key: value for key, value in known.items() if isinstance(value, str | int | float | list)}


def _flat(settings: Record) -> Iterator[tuple[str, str]]:
    """`section.name` and value of each setting, the value as text."""
    for section, table in settings.items():
        for name, value in table.items() if isinstance(table, dict) else [("", table)]:
            yield f"{section}.{name}".rstrip(".")[:200], json.dumps(value, default=str)[:_LONG_LINE]
