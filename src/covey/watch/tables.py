"""Tables of completions for the page: groups with their statistics, and evaluations side by side.

Memory is bounded by what a table says that it holds: one that is larger is refused. Long texts are cut, and said to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from covey.errors import RunFolderError
from covey.files import explained, open_regular
from covey.observe.completions import messages
from covey.observe.records import Record, plain

MOST_BYTES, MOST_ROWS, MOST_COLUMNS = 512 << 20, 200_000, 500
LISTED, WHOLE = 4_000, 1_000_000
"""Characters of a text in a list, and where it is asked for by itself."""
_OWN = {
    *("group", "sample", "uid", "prompt", "completion", "reward", "correct", "advantage", "masked_by"),
    *("length", "finish_reason", "policy_version", "kind", "type", "turns", "no_actions", "ended", "error"),
}
SHOWN = ("all", "right", "wrong", "truncated", "masked", "tied", "mixed")


def read_rows(path: Path) -> list[Record]:
    """The rows of a table that may be anybody's.

    Raises:
        RunFolderError: there is none, it is damaged, or too large to be looked at.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with explained(path, "read"), open_regular(path) as file:
        try:
            table = pq.ParquetFile(file)
            about = table.metadata
            size = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
            if size > MOST_BYTES or about.num_rows > MOST_ROWS or about.num_columns > MOST_COLUMNS:
                raise RunFolderError(
                    f"{path} has {size} bytes in {about.num_rows} rows and {about.num_columns} columns, more than the "
                    f"{MOST_BYTES}, {MOST_ROWS} and {MOST_COLUMNS} that are shown; read it with pyarrow"
                )
            nested = [field.name for field in table.schema_arrow if pa.types.is_nested(field.type)]
            if nested:
                raise RunFolderError(f"{path}: {nested[0][:100]!r} holds lists, which no run writes; delete the file")
            rows: list[Record] = table.read().to_pylist()
        except RunFolderError:
            raise
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            raise RunFolderError(f"{path} is no readable Parquet file ({error}); delete it") from error
    return rows


def groups(rows: Sequence[Record], *, search: str = "", shown: str = "all", uid: str = "") -> list[Record]:
    """The groups of a step with mean, spread and whether they are tied, each with the completions that are wanted.

    Args:
        rows: of the table.
        search: text that prompt or completion contain, in any case.
        shown: one of `SHOWN`; `tied` and `mixed` are about the group, the others about the completion.
        uid: of the question; "" = any.
    """
    found: dict[Any, list[tuple[int, Record]]] = {}
    for index, row in enumerate(rows):
        found.setdefault(row.get("group"), []).append((index, row))
    wanted = []
    for number, members in found.items():
        rewards = [value for _, row in members if (value := _number(row.get("reward"))) is not None]
        tied = len(members) > 1 and len(set(rewards)) < 2
        first = members[0][1]
        if (uid and first.get("uid") != uid) or (shown == "tied" and not tied) or (shown == "mixed" and tied):
            continue
        left = [(index, row) for index, row in members if _is_wanted(row, search.casefold(), shown)]
        if left:
            wanted.append(
                {
                    "group": plain(number),
                    "uid": _text(first.get("uid"), 200),
                    "kind": _text(first.get("kind") or first.get("type"), 200),
                    "prompt": messages(first.get("prompt")),
                    "size": len(members),
                    "mean": fmean(rewards) if rewards else None,
                    "std": pstdev(rewards) if rewards else None,
                    "tied": tied,
                    "rows": [shortened(index, row) for index, row in left],
                }
            )
    return wanted


def _is_wanted(row: Record, search: str, shown: str) -> bool:
    if search and not any(search in str(row.get(name) or "").casefold() for name in ("prompt", "completion")):
        return False
    correct = row.get("correct")
    return {
        "right": correct is True,
        "wrong": correct is False,
        "truncated": row.get("finish_reason") == "length" or row.get("ended") in ("turns", "context"),
        "masked": bool(row.get("masked_by")),
    }.get(shown, True)


def shortened(index: int, row: Record, most: int = LISTED) -> Record:
    """A row as the page shows it, with its number in the table; reward functions' parts and other columns apart."""
    text = str(row.get("completion") or "")
    return {
        "row": index,
        "completion": text[:most],
        "characters": len(text),
        "reward": _number(row.get("reward")),
        "advantage": _number(row.get("advantage")),
        "correct": row.get("correct") if isinstance(row.get("correct"), bool) else None,
        **{name: _integer(row.get(name)) for name in ("sample", "length", "policy_version", "turns", "no_actions")},
        **{name: _text(row.get(name), 500) for name in ("masked_by", "finish_reason", "ended", "error")},
        "parts": {name[8:]: _number(value) for name, value in row.items() if name.startswith("rewards/")},
        "others": {
            _text(name, 200): _text(value, 500)
            for name, value in row.items()
            if name not in _OWN and not name.startswith("rewards/") and value is not None
        },
    }


def compare(before: Iterable[Record], after: Iterable[Record], shown: str = "changed") -> tuple[Record, list[Record]]:
    """The same questions in two evaluations.

    Args:
        before: rows of one.
        after: rows of the other.
        shown: `changed` (right in one of them only), `gained`, `lost` or `all`.

    Returns:
        How many were `gained`, `lost`, right in `both`, in `neither`, or `unjudged`; and the pairs that are wanted.
    """
    earlier = {(row.get("uid"), row.get("sample")): (index, row) for index, row in enumerate(before)}
    counts = dict.fromkeys(("gained", "lost", "both", "neither", "unjudged"), 0)
    names: dict[Any, str] = {
        (False, True): "gained",
        (True, False): "lost",
        (True, True): "both",
        (False, False): "neither",
    }
    pairs = []
    for index, row in enumerate(after):
        other = earlier.get((row.get("uid"), row.get("sample")))
        if other is None:
            continue
        name = names.get((other[1].get("correct"), row.get("correct")), "unjudged")
        counts[name] += 1
        if shown in ("all", name) or (shown == "changed" and name in ("gained", "lost")):
            pairs.append(
                {
                    "uid": _text(row.get("uid"), 200),
                    "prompt": messages(row.get("prompt")),
                    "what": name,
                    "before": shortened(*other),
                    "after": shortened(index, row),
                }
            )
    return counts, pairs


def numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The entries of a record that a curve can show."""
    for name, value in row.items():
        number = _number(value)
        if number is not None and len(name) <= 200:
            yield name, number


def _number(value: Any) -> float | None:
    if not isinstance(value, int | float) or abs(value) >= 1e300 or math.isnan(value):
        return None
    return value if isinstance(value, float) else (int(value) if abs(value) < 2**53 else float(value))


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def _text(value: Any, most: int) -> str:
    return "" if value is None else (value if isinstance(value, str) else str(plain(value)))[:most]
