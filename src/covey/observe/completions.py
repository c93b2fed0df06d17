"""Reading a run's tables of completions, and choosing among them.

A table may be anybody's, copied, damaged, or written to do harm: there `covey.watch.tables` reads it in a process whose
memory is limited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from covey.errors import RunFolderError
from covey.files import explained, open_regular
from covey.observe.records import Record, hashes, is_number, plain, read_json
from covey.types import equal_rewards

MOST_BYTES, MOST_ROWS, MOST_COLUMNS = 512 << 20, 200_000, 500
"""Of a table that may be anybody's."""
WHOLE = 1_000_000
"""Characters of a prompt that are searched."""
_MESSAGES = 100
_KEYS = (
    *("group", "sample", "uid", "kind", "type", "reward", "advantage", "correct", "masked_by", "length", "turns"),
    *("finish_reason", "ended", "policy_version", "group_mean", "group_std", "group_tied"),
)
KEYS_AND_TEXTS = (*_KEYS, "prompt", "completion")
"""Columns that decide whether a completion is wanted."""
_OWN = {*KEYS_AND_TEXTS, "error", "no_actions", "row", "logp", "turn_rewards", "turn_advantages", "play"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which completions to show; what is left at its default lets everything through.

    `shown` is all, right, wrong, truncated, masked, tied or mixed (of a group that is not tied).
    """

    search: str = ""
    shown: str = "all"
    uid: str = ""
    ended: str = ""
    reward_from: float | None = None
    reward_to: float | None = None
    length_from: float | None = None
    length_to: float | None = None


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What is known of a group as a whole: as the table says, else computed, of the rewards that are numbers."""

    number: Any
    size: int
    mean: float | None
    std: float | None
    tied: bool


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
    ends, correct = (row.get("finish_reason"), row.get("ended")), row.get("correct")
    is_shown = {"right": correct is True, "wrong": correct is False, "masked": bool(row.get("masked_by"))}
    is_shown |= {"truncated": ends[0] == "length" or ends[1] in ("turns", "context")}
    is_shown |= {"tied": group.tied, "mixed": not group.tied}
    return (
        (not wanted.uid or row.get("uid") == wanted.uid)
        and is_shown.get(wanted.shown, True)
        and (not wanted.ended or wanted.ended in ends)
        and _within(row.get("reward"), wanted.reward_from, wanted.reward_to)
        and _within(row.get("length"), wanted.length_from, wanted.length_to)
    )


def _within(value: Any, low: float | None, high: float | None) -> bool:
    """True for a number from `low` to `high`; for anything where there are no such ends."""
    known = is_number(value)
    return (low is None or (known and value >= low)) and (high is None or (known and value <= high))


def _facts(number: Any, members: Sequence[Record]) -> GroupFacts:
    rewards = [float(value) for row in members if (value := row.get("reward")) is not None and is_number(value)]
    least_and_most = min(rewards, default=0.0), max(rewards, default=0.0)
    mean, std, tied = (members[0].get(name) for name in ("group_mean", "group_std", "group_tied"))
    return GroupFacts(
        number,
        len(members),
        float(mean) if is_number(mean) else (fmean(rewards) if rewards else None),
        float(std) if is_number(std) else (pstdev(rewards) if rewards else None),
        tied if isinstance(tied, bool) else len(members) > 1 and bool(equal_rewards(*least_and_most)),
    )


# ---------------------------------------------------------------------- reading


def read_table(path: Path, columns: Sequence[str] | None = None, *, limited: bool = True) -> list[Record]:
    """All rows of a table, in those of the columns that it has; `limited` refuses one that says it is large.

    Raises `RunFolderError`: there is no table, it is damaged, or too large to be looked at.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with explained(path, "read"), open_regular(path) as file:
        try:
            fields = pq.read_schema(file)
            texts = [field.name for field in fields if pa.types.is_string(field.type)]
            nested = [field.name for field in fields if pa.types.is_nested(field.type)]
            table = pq.ParquetFile(file, read_dictionary=texts)
            about = table.metadata
            size = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
            if limited and (size > MOST_BYTES or about.num_rows > MOST_ROWS or about.num_columns > MOST_COLUMNS):
                raise RunFolderError(
                    f"{path} has {about.num_rows} rows, {about.num_columns} columns and {size} bytes, more than the "
                    f"{MOST_ROWS}, {MOST_COLUMNS} and {MOST_BYTES} that are read; use pyarrow"
                )
            if nested:
                raise RunFolderError(f"{path}: {nested[0][:100]!r} holds lists, which no run writes; delete the file")
            names = columns and [name for name in columns if name in fields.names]
            return list(table.read(columns=names, use_threads=False).to_pylist())
        except RunFolderError:
            raise
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            raise RunFolderError(f"{path} is not a readable Parquet file ({str(error)[:300]}); delete it") from error


def parts_and_others(row: Record) -> tuple[Record, Record]:
    """Rewards by function, and what reward functions and verifiers logged in columns of their own."""
    parts = {name[8:]: value for name, value in row.items() if name.startswith("rewards/")}
    others = {name: row[name] for name in row if name not in _OWN and not name.startswith("rewards/")}
    return parts, {name: value for name, value in others.items() if value is not None}


def listed(text: Any) -> list[Any]:
    """A list that a table has as JSON; an empty one where it is none."""
    return (read_json(text, list) if isinstance(text, str) and text.startswith("[") else None) or []


def messages(prompt: Any, most: int = 4_000) -> list[Record]:
    """A prompt, text or a conversation as JSON, as messages of role and text, which is cut; text has no role. A message
    with pictures has their hashes too.
    """
    text = str(prompt or "")
    found = listed(text)
    if found and all(isinstance(m, Mapping) and "content" in m for m in found):
        return [{"role": _text(m.get("role"))[:50], **_content(m["content"], most)} for m in found[:_MESSAGES]]
    return [{"role": "", "content": text[:most]}]


def _content(content: Any, most: int) -> Record:
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        return {"content": _text(content)[:most]}
    pictures = hashes([part.get("image") for part in content])
    texts = [_text(p.get("text")) if p.get("type") == "text" else f"[picture {p.get('image')!s:.8}]" for p in content]
    return {"content": "".join(texts)[:most], **({"pictures": pictures} if pictures else {})}


def _text(value: Any) -> str:
    return "" if value is None else (value if isinstance(value, str) else str(plain(value)))
