"""Reads data files and datasets of the Hugging Face hub: entries come out, which need not be rows."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from covey.errors import DataError, shown

_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


def data_format(path: Path) -> str:
    """`.jsonl` for `a.jsonl` and `a.jsonl.gz`; empty for what is no data file."""
    suffix = (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()
    return suffix if suffix in _FORMATS else ""


def read_file(path: Path, *, numbered: bool = False) -> Iterator[Any]:
    """The entries of a data file, in order; they need not be rows. `numbered`: of a .jsonl file, (line, entry)."""
    kind = data_format(path)
    if path.is_dir() or not kind:
        what = "a folder" if path.is_dir() else "no known format"
        raise DataError(f"{path}: {what}; give a file that ends in {', '.join(_FORMATS)}")
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: is a pipe or a device, not a file, and may never end; write its rows to a file")
    readers = {".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    try:
        yield from _read_lines(path) if numbered else readers.get(kind, _read_jsonl)(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; check the path, relative to {Path.cwd()}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); check the file and its permissions") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error}); convert the file to UTF-8") from None


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _read_jsonl(path: Path) -> Iterator[Any]:
    return (entry for _, entry in _read_lines(path))


def _read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with _open(path) as file:
        # Bytes, so that only a line feed ends a line; text mode would also split at a lone carriage return.
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                told = f"byte {error.start} is not UTF-8; convert the file"
                raise DataError(f"{path}, line {number}: {told}") from None
            if text.strip():
                yield number, _parse(text, f"{path}, line {number}")


def _read_json(path: Path) -> Iterator[Any]:
    with _open(path) as file:
        text = file.read().decode("utf-8-sig")
    if not text.strip():
        return
    one = text.lstrip().startswith("[")  # one object on each line is often called .json too
    yield from _parse(text, str(path)) if one else _read_jsonl(path)


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise DataError(f"{where}: nested too deeply to read; flatten or remove that row") from None
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON ({error}): {shown(text.strip())}; correct or remove it") from None


def _read_csv(path: Path) -> Iterator[Any]:
    with _open(path) as file:
        text = file.read().decode("utf-8-sig")
    # Not splitlines(), which tears fields at U+2028, U+0085, form feeds and other characters that end no row.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        first = text.lstrip().partition("\n")[0]
        if "," not in first and (other := re.search("[;\t]", first)):
            raise DataError(f"{path}: its columns are separated by {other[0]!r}; save it with commas")
        header = reader.fieldnames or ()
        if twice := [name for name in header if header.count(name) > 1]:
            raise DataError(f"{path}: its header has {shown(twice[0])} twice; rename or remove one of the columns")
        for row in reader:
            if None in row or None in row.values():
                raise csv.Error("not as many fields as the header has")
            yield row
    except csv.Error as error:
        told = {"unexpected end of data": "a quote in the row after this one is never closed"}.get(str(error), error)
        raise DataError(f"{path}, line {reader.line_num or 1}: {told}; correct or remove it") from None


def _read_parquet(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    if not path.exists():
        raise FileNotFoundError(path)
    try:
        yield from pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable parquet file ({error}); write it again") from error


def read_hub(name: str, split: str) -> Any:
    """One split of a dataset on the hub, through the package `datasets`."""
    if not _HUB_ID.fullmatch(name):
        raise DataError(f"{name}: no such file, and no dataset id (owner/name); check the path or the id")
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{name}: no such file here, and reading it from the hub needs the package 'datasets'; "
            "check the path, or pip install 'covey[datasets]'"
        ) from None
    dataset_id, _, configuration = name.partition(":")
    try:
        loaded = datasets.load_dataset(dataset_id, configuration or None, split=split)
    except Exception as error:  # the hub's errors have no common base
        raise DataError(
            f"{name}: split {split!r} cannot be loaded ({type(error).__name__}: {error}); "
            "check the id, the split and the network, or download it and give the path"
        ) from error
    return loaded
