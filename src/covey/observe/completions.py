"""Looking for completions in a run's tables, with memory that depends on what is shown, not on what is stored.

A table may be anybody's: it was copied, damaged, or written to do harm. What decides whether a completion is wanted
(rewards, masks, names) is read first, without the texts; texts are then read a few rows at a time, and cut.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal, TypeGuard

from covey.errors import RunFolderError
from covey.files import explained, open_regular
from covey.observe.records import Record, plain, read_json
from covey.types import equal_rewards

MOST_BYTES, MOST_ROWS, MOST_COLUMNS = 512 << 20, 200_000, 500
"""Of a table that may be anybody's; bytes of its largest part where it is read in parts."""
WHOLE = 1_000_000
"""Characters of a text that are looked at; one more is read, so that it is seen where there are more."""
_NAME = 200
_BATCH = 32
_MESSAGES = 100
_KEYS = (
    *("group", "sample", "uid", "kind", "type", "reward", "advantage", "correct", "masked_by", "length", "turns"),
    *("finish_reason", "ended", "policy_version", "group_mean", "group_std", "group_tied"),
)
"""Columns that are read of every row; all others only of those that are shown."""
KEYS_AND_TEXTS = (*_KEYS, "prompt", "completion")
_OWN = {*KEYS_AND_TEXTS, "error", "no_actions", "row", "logp", "turn_rewards", "turn_advantages", "play"}
_log = logging.getLogger("covey.observe")

Kind = Literal["step", "eval"]


@dataclass(frozen=True, slots=True)
class Table:
    """One file of completions: of a training step, or of the evaluation after one."""

    kind: Kind
    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which completions to show; what is left at its default lets everything through."""

    search: str = ""
    uid: str = ""
    tied: bool | None = None
    masked: bool = False
    truncated: bool = False
    correct: bool | None = None
    ended: str = ""
    least: Mapping[str, float] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What is known of a group as a whole; taken from the table where it says so, else computed.

    `mean` and `std`, of the group itself, are of the rewards that are numbers; None where there are none.
    """

    number: Any
    size: int
    mean: float | None
    std: float | None
    tied: bool


@dataclass(frozen=True, slots=True)
class Found:
    """A completion that is wanted: a row of a table with the columns that are read of every row, and its group."""

    table: Table
    row: int
    facts: Record
    group: GroupFacts


def find(
    tables: Iterable[Table], question: str = "", most: int | None = None, *, worst: bool = False
) -> Iterator[Found]:
    """At most so many completions, of one question or of all, table after table, or the lowest rewards first.

    Those without a reward have no place in the order and are left out of it; equal rewards stand as they are stored. A
    table that disappeared or is damaged is passed over with a warning.

    Raises:
        RunFolderError: no table could be read.
    """
    every = (
        Found(table, index, rows[index], group)
        for table, rows in _read_all(tables)
        for group, _, left in grouped(rows, Wanted(uid=question))
        for index in left
    )
    if not worst:
        yield from islice(every, most)
        return
    scored = ((found.facts["reward"], number, found) for number, found in enumerate(every) if _scored(found))
    chosen = sorted(scored) if most is None else heapq.nsmallest(most, scored)  # no two have one number
    yield from (found for _, _, found in chosen)


def whole_rows(found: Iterable[Found]) -> Generator[tuple[Found, Record], None, None]:
    """Each completion with all columns of its row, texts cut after `WHOLE` characters.

    Neighbours of one table are read in one go, at most 32 rows in memory at a time. A table that is gone by now is
    passed over with a warning.
    """
    for run in _neighbours(found):
        at = {each.row: each for each in run}
        try:
            for number, row in read_rows(run[0].table.path, at.keys()):
                yield at[number], row
        except RunFolderError as error:
            _log.warning("passed over: %s", error)


def _neighbours(found: Iterable[Found]) -> Iterator[list[Found]]:
    """Cut into runs of one table and rising rows, of a few rows each so that the first are shown soon."""
    run: list[Found] = []
    for each in found:
        if run and (run[-1].table != each.table or each.row < run[-1].row or len(run) >= 8 * _BATCH):
            yield run
            run = []
        run.append(each)
    if run:
        yield run


def _scored(found: Found) -> bool:
    reward = found.facts.get("reward")
    return isinstance(reward, int | float) and not isinstance(reward, bool)


def _read_all(tables: Iterable[Table]) -> Iterator[tuple[Table, list[Record]]]:
    """The tables that can be read, with what is read of every row."""
    problems: list[RunFolderError] = []
    read = 0
    for table in tables:
        try:
            rows = read_keys(table.path)
        except RunFolderError as error:
            problems.append(error)
            if read:
                _log.warning("passed over: %s", error)
            continue
        if not read:
            for problem in problems:
                _log.warning("passed over: %s", problem)
        read += 1
        yield table, rows
    if problems and not read:
        raise problems[0]


def grouped(rows: Sequence[Record], wanted: Wanted) -> Iterator[tuple[GroupFacts, list[int], list[int]]]:
    """Each group, the positions of its rows, and those of them that are wanted; groups that have any."""
    groups: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.get("group"), []).append(index)
    for number, places in groups.items():
        facts = _facts(number, [rows[index] for index in places])
        left = [index for index in places if _passes(rows[index], facts, wanted) and says(rows[index], wanted.search)]
        if left:
            yield facts, places, left


def says(row: Record, search: str) -> bool:
    """The prompt or the completion contains a text, in any case."""
    search = search.casefold()
    return (
        not search
        or search in str(row.get("completion") or "").casefold()
        or any(search in message["content"].casefold() for message in messages(row.get("prompt"), WHOLE))
    )


def _passes(row: Record, group: GroupFacts, wanted: Wanted) -> bool:
    ends = row.get("finish_reason"), row.get("ended")
    return (
        (not wanted.uid or row.get("uid") == wanted.uid)
        and (wanted.tied is None or group.tied is wanted.tied)
        and (not wanted.masked or bool(row.get("masked_by")))
        and (not wanted.truncated or ends[0] == "length" or ends[1] in ("turns", "context"))
        and (wanted.correct is None or row.get("correct") is wanted.correct)
        and (not wanted.ended or wanted.ended in ends)
        and all(_is_number(value := row.get(name)) and value >= bound for name, bound in wanted.least.items())
        and all(_is_number(value := row.get(name)) and value <= bound for name, bound in wanted.most.items())
    )


def _facts(number: Any, members: Sequence[Record]) -> GroupFacts:
    rewards = [float(value) for row in members if (value := row.get("reward")) is not None and _is_number(value)]
    least_and_most = min(rewards, default=0.0), max(rewards, default=0.0)
    mean, std, tied = (members[0].get(name) for name in ("group_mean", "group_std", "group_tied"))
    return GroupFacts(
        number,
        len(members),
        float(mean) if _is_number(mean) else (fmean(rewards) if rewards else None),
        float(std) if _is_number(std) else (pstdev(rewards) if rewards else None),
        tied if isinstance(tied, bool) else len(members) > 1 and bool(equal_rewards(*least_and_most)),
    )


def _is_number(value: Any) -> TypeGuard[int | float]:
    """A number that means and spreads can be taken of: squares of larger ones have no float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


# ---------------------------------------------------------------------- reading


def read_keys(path: Path) -> list[Record]:
    """Of every row what decides whether it is wanted, and no texts; raises as `read_table`."""
    with _opened(path) as table:
        there = [name for name in _KEYS if name in table.schema_arrow.names]
        rows: list[Record] = []
        for batch in table.iter_batches(batch_size=MOST_ROWS, columns=there):
            columns = [_names(column) for column in batch.columns]
            rows += (dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True))
        # A table without any of these columns still has rows to read.
        return rows if there else [{} for _ in range(table.metadata.num_rows)]


def read_table(path: Path, columns: Sequence[str] | None = None, *, limited: bool = True) -> list[Record]:
    """All rows of a table, whole, in those of the columns that it has; `limited` refuses one that says it is large.

    Raises:
        RunFolderError: there is no table, it is damaged, or too large to be looked at.
    """
    with _opened(path, whole=True, limited=limited) as table:
        names = None if columns is None else [name for name in columns if name in table.schema_arrow.names]
        rows: list[Record] = table.read(columns=names, use_threads=False).to_pylist()
        return rows


def read_rows(path: Path, rows: Collection[int], columns: Sequence[str] | None = None) -> Iterator[tuple[int, Record]]:
    """Some rows of a table with their positions, in order; texts are cut after `WHOLE` characters.

    Raises:
        RunFolderError: as `read_table`.
    """
    if not rows:
        return
    last = max(rows)
    with _opened(path) as table:
        there = table.schema_arrow.names
        number = 0
        picked = columns and [name for name in columns if name in there]
        for batch in table.iter_batches(batch_size=_BATCH, columns=picked, use_threads=False):
            for index in range(batch.num_rows):
                if number in rows:
                    # Value by value: texts that the file holds once and names often are never all in memory.
                    values = ((name, batch.column(place)[index]) for place, name in enumerate(batch.schema.names))
                    yield number, {name: _cut(value.as_py(), WHOLE + 1) for name, value in values}
                number += 1
            if number > last:
                return


@contextmanager
def _opened(path: Path, *, whole: bool = False, limited: bool = True) -> Iterator[Any]:
    """A Parquet file whose size was looked at; errors of the block are those of the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with explained(path, "read"), open_regular(path) as file:
        try:
            names = pq.read_schema(file)
            texts = [field.name for field in names if pa.types.is_string(field.type)]
            nested = [field.name for field in names if pa.types.is_nested(field.type)]
            table = pq.ParquetFile(file, read_dictionary=texts)
            about = table.metadata
            sizes = [0, *(about.row_group(number).total_byte_size for number in range(about.num_row_groups))]
            size = sum(sizes) if whole else max(sizes)
            if limited and (size > MOST_BYTES or about.num_rows > MOST_ROWS or about.num_columns > MOST_COLUMNS):
                raise RunFolderError(
                    f"{path} has {about.num_rows} rows, {about.num_columns} columns and {size} bytes"
                    f"{'' if whole else ' in a row group'}, more than the {MOST_ROWS}, {MOST_COLUMNS} and {MOST_BYTES} "
                    "that are read; use pyarrow"
                )
            if nested:
                raise RunFolderError(f"{path}: {nested[0][:100]!r} holds lists, which no run writes; delete the file")
            yield table
        except RunFolderError:
            raise
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            raise RunFolderError(f"{path} is no readable Parquet file ({str(error)[:300]}); delete it") from error


def _names(column: Any) -> list[Any]:
    """The values of a column; of texts that are stored once and named often each is cut once."""
    import pyarrow as pa

    if not pa.types.is_dictionary(column.type):
        return [_cut(value, _NAME) for value in column.to_pylist()]
    names = [_cut(value.as_py(), _NAME) for value in column.dictionary]
    return [None if index is None else names[index] for index in column.indices.to_pylist()]


def _cut(value: Any, characters: int) -> Any:
    return value[:characters] if isinstance(value, str) else plain(value)


def parts_and_others(row: Record) -> tuple[Record, Record]:
    """Rewards by function, and what reward functions and verifiers logged in columns of their own."""
    parts = {name[8:]: value for name, value in row.items() if name.startswith("rewards/")}
    others = {name: row[name] for name in row if name not in _OWN and not name.startswith("rewards/")}
    return parts, {name: value for name, value in others.items() if value is not None}


def listed(text: Any) -> list[Any]:
    """A list that a table has as JSON; an empty one where it is none."""
    return (read_json(text, list) if isinstance(text, str) and text.startswith("[") else None) or []


def messages(prompt: Any, most: int = 4_000) -> list[Record]:
    """A prompt, text or a conversation as JSON, as messages of role and text, which is cut; text has no role."""
    text = str(prompt or "")
    found = listed(text)
    if found and all(isinstance(m, Mapping) and "content" in m for m in found):
        return [{"role": _text(m.get("role"))[:50], "content": _text(m["content"])[:most]} for m in found[:_MESSAGES]]
    return [{"role": "", "content": text[:most]}]


def _text(value: Any) -> str:
    return "" if value is None else (value if isinstance(value, str) else str(plain(value)))
