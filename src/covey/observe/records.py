"""What goes into the run folder's files, in plain values: JSON lines and Parquet tables.

Completions are untrusted text: nothing in them may stop a run from being written or read.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from covey.errors import RunFolderError
from covey.files import explained, write_atomically
from covey.metric_names import describe_metric

Record = dict[str, Any]
Kind = TypeVar("Kind")


def differing(texts: Sequence[str]) -> list[str]:
    """Texts without a long beginning that all of them share, such as few-shot examples: whole lines, else words."""
    length = next((n for n, characters in enumerate(zip(*texts, strict=False)) if len({*characters}) > 1), 0)
    shared = texts[0][:length] if length else ""
    cut = shared.rfind("\n") + 1 or shared.rfind(" ") + 1
    return list(texts) if cut < 60 else [f"[...] {text[cut:]}" for text in texts]


def plain(value: Any) -> Any:
    """A JSON-able copy: NumPy and torch values become Python's, NaN and infinities become None."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy and torch, scalars and arrays
        return plain(value.tolist())
    return str(value)


def is_number(value: Any) -> TypeGuard[int | float]:
    """A number that means and spreads can be taken of: squares of larger ones have no float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


def read_json(text: str | bytes, kind: type[Kind]) -> Kind | None:
    """A JSON value of a kind; None where there is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, kind) else None


def hashes(found: Any) -> list[str]:
    """Of a list that may hold anything, the first hundred SHA-256 of pictures."""
    texts = (each for each in found if isinstance(each, str)) if isinstance(found, list) else ()
    return [text for text in texts if re.fullmatch("[0-9a-f]{64}", text)][:100]


class JsonLines:
    """An append-only file of JSON objects, one on each line, that survives a kill and a full disk.

    A line is written whole or, when the disk is full, not at all; a line torn by a kill is removed on the next open.
    """

    def __init__(self, path: Path, is_record: Callable[[Record], bool] = lambda record: True) -> None:
        """Open for appending; `is_record`: whether a line is this file's. `RunFolderError`: it cannot be written."""
        self.path = path
        self._is_record = is_record
        self._open()

    def _open(self) -> None:
        with explained(self.path):
            if self.path.exists():
                whole, end, torn = self.path.read_bytes().rpartition(b"\n")
                if torn:
                    write_atomically(self.path, whole + end)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line; it is with the operating system when this returns (see `sync` for the disk).

        Raises `RunFolderError`: full disk, ...; the file ends with the line before.
        """
        line = json.dumps(plain(record), allow_nan=False).encode() + b"\n"
        with explained(self.path):
            start = os.fstat(self._file).st_size
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            except OSError:
                os.ftruncate(self._file, start)
                raise

    def keep(self, wanted: Any) -> None:
        """Drop the records for which `wanted(record)` is false, atomically."""
        records = [record for record in read_json_lines(self.path, self._is_record) if wanted(record)]
        os.close(self._file)
        write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in records))
        self._open()

    def sync(self) -> None:
        """Wait until everything appended is on the disk."""
        with explained(self.path):
            os.fsync(self._file)

    def close(self) -> None:
        """Closes the file; nothing can be appended after that."""
        os.close(self._file)


def is_step(record: Record) -> bool:
    """A line of a step, or of an evaluation after it."""
    step = record.get("step")
    return isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53


def is_metrics(record: Record) -> bool:
    """A line of `metrics.jsonl`: numbers where Covey writes numbers, of a size that a float has, null for none."""
    return is_step(record) and not any(
        (isinstance(value, str) and describe_metric(name) is not None)
        or (isinstance(value, float) and not math.isfinite(value))
        or (isinstance(value, int) and abs(value) > sys.float_info.max)
        for name, value in record.items()
    )


def is_answers(record: Record) -> bool:
    """A line of `questions.jsonl`: of each question how many of how many completions were right."""

    def is_pair(pair: Any) -> bool:
        return isinstance(pair, list) and [type(n) for n in pair] == [int, int] and 0 <= pair[0] <= pair[1]

    answers = record.get("answers")
    return is_step(record) and isinstance(answers, dict) and all(map(is_pair, answers.values()))


def read_json_lines(path: Path, is_record: Callable[[Record], bool] = lambda record: True) -> list[Record]:
    """Read the records of a file that may be growing; an unfinished last line is left out.

    Raises `RunFolderError`: the file cannot be read, or a line before the last is no JSON object, or none for which
    `is_record` holds.
    """
    if not path.exists():
        return []
    with explained(path, "read"):
        content = path.read_bytes()
    records = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        record = read_json(line, dict)
        if record is None or not is_record(record):
            what = "is not a JSON object" if record is None else "is none of this file's lines"
            raise RunFolderError(f"{path}: line {number} {what}; remove that line and try again")
        records.append(record)
    return records


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as one Parquet file, atomically.

    A nested mapping becomes columns `outer/inner`. Values that are neither text, number nor bool (chat messages,
    lists), and columns that mix kinds, are written as JSON text. Text that is no valid Unicode is repaired with `?`.

    Raises `RunFolderError`: the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = [_flatten(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    columns = {name: _column(pa, name, [row.get(name) for row in flat]) for name in names}
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd")
    write_atomically(path, buffer.getvalue())


def _flatten(row: Mapping[str, Any]) -> Record:
    flat: Record = {}
    for name, value in row.items():
        inner = {f"{name}/{key}": item for key, item in value.items()} if isinstance(value, Mapping) else {name: value}
        flat |= plain(inner)
    return flat


def _column(pa: Any, name: str, values: list[Any]) -> Any:
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return pa.array(values, pa.float64() if name.startswith(("reward", "advantage")) else pa.string())
    if kinds <= {int, float} and float in kinds:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if kinds == {int} and all(value is None or -(2**63) <= value < 2**63 for value in values):
        return pa.array(values, pa.int64())
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pa.array([None if text is None else text.encode("utf-8", "replace").decode() for text in texts], pa.string())
