"""Reading files that grow, from where the last reading ended; whatever else is in them.

A run folder may come from another machine, and model output is in it: nothing here trusts what it reads.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from covey.files import explained, open_regular
from covey.observe.records import Record, read_json

PIECE = 4 << 20
"""Bytes that one reading takes."""
_TRACE = 64
_MOST_LINES, _LONGEST = 1_000_000, 1 << 20
"""Lines that are passed over for it, and bytes of one line."""


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

    Raises:
        RunFolderError: it cannot be read.
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

    Raises:
        RunFolderError: it cannot be read.
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
        marked: list[bytes] = []
        for number in range(_MOST_LINES):
            line = file.readline(_LONGEST)
            if not line or len(lines) > 4 * count:
                break
            if number % stride == 0:
                lines.append(line)
            elif always in line and len(marked) < count:
                lines.append(line)
                marked.append(line)
    return _records(b"".join(lines), is_record)[0]


def _trace(file: BinaryIO, end: int) -> str:
    """What stands just before a place in a file, as a short name."""
    begin = max(0, end - _TRACE)
    file.seek(begin)
    return hashlib.blake2b(file.read(end - begin), digest_size=8).hexdigest()


def _records(content: bytes, is_record: Callable[[Record], bool]) -> tuple[list[Record], int]:
    found = [read_json(line, dict) for line in content.splitlines()]
    records = [record for record in found if record is not None and is_record(record)]
    return records, len(found) - len(records)
