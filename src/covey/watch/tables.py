"""Tables of completions for the page: groups with their statistics, and evaluations side by side.

A table that says it holds too much is refused; one that lies meets the limits of `covey.watch.reader`. Long texts are
cut, and said to be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from covey.errors import RunFolderError
from covey.files import explained, open_regular
from covey.observe.completions import messages
from covey.observe.records import Record, plain
from covey.types import equal_rewards

MOST_BYTES, MOST_ROWS, MOST_COLUMNS = 512 << 20, 200_000, 500
LISTED, WHOLE = 4_000, 500_000
"""Characters of a text in a list, and where it is asked for by itself."""
_OWN = {
    *("group", "sample", "uid", "prompt", "completion", "reward", "correct", "advantage", "masked_by"),
    *("length", "finish_reason", "policy_version", "kind", "type", "turns", "no_actions", "ended", "error", "play"),
    *("row", "logp", "group_mean", "group_std", "group_tied", "turn_rewards", "turn_advantages"),
}
PROMPT_AND_COMPLETION = (
    *("group", "uid", "prompt", "completion", "reward", "correct", "masked_by", "finish_reason", "ended", "length"),
)
"""Columns that a search needs."""
SHOWN = ("all", "right", "wrong", "truncated", "masked", "tied", "mixed")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which completions are wanted.

    Attributes:
        search: text that prompt or completion contain, in any case.
        shown: one of `SHOWN`; `tied` and `mixed` are about the group, the others about the completion.
        uid: of the question; "" = any.
        ended: how it ended, as its finish reason says; "" = however.
        least: lowest value of "reward" and "length".
        most: highest value of them.
    """

    search: str = ""
    shown: str = "all"
    uid: str = ""
    ended: str = ""
    least: Mapping[str, float] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)

    def holds(self, row: Record) -> bool:
        """A completion is wanted, as far as it goes without its group."""
        search = self.search.casefold()
        if search and not any(search in str(row.get(name) or "").casefold() for name in ("prompt", "completion")):
            return False
        if self.ended and self.ended not in (row.get("finish_reason"), row.get("ended")):
            return False
        for bounds, sign in ((self.least, 1), (self.most, -1)):
            for name, bound in bounds.items():
                value = _number(row.get(name))
                if value is None or sign * (value - bound) < 0:
                    return False
        correct = row.get("correct")
        return {
            "right": correct is True,
            "wrong": correct is False,
            "truncated": row.get("finish_reason") == "length" or row.get("ended") in ("turns", "context"),
            "masked": bool(row.get("masked_by")),
        }.get(self.shown, True)


def read_rows(path: Path, columns: Sequence[str] | None = None) -> list[Record]:
    """The rows of a table that may be anybody's.

    Args:
        path: the table.
        columns: that are wanted, as far as it has them; None = all.

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
            names = None if columns is None else [name for name in columns if name in table.schema_arrow.names]
            rows: list[Record] = table.read(columns=names, use_threads=False).to_pylist()
        except RunFolderError:
            raise
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            raise RunFolderError(f"{path} is no readable Parquet file ({error}); delete it") from error
    return rows


def groups(rows: Sequence[Record], which: Wanted) -> list[Record]:
    """The groups of a step with mean, spread and whether they are tied, each with the completions that are wanted."""
    wanted = []
    for number, members, left in _grouped(rows, which):
        rewards = _rewards(members)
        first = members[0][1]
        wanted.append(
            {
                "group": plain(number),
                "uid": _text(first.get("uid"), 200),
                "kind": _text(first.get("kind") or first.get("type"), 200),
                "prompt": messages(first.get("prompt")),
                "size": len(members),
                "mean": fmean(rewards) if rewards else None,
                "std": pstdev(rewards) if rewards else None,
                "tied": _is_tied(members),
                "rows": [shortened(index, row) for index, row in left],
            }
        )
    return wanted


def found_in(rows: Sequence[Record], wanted: Record) -> list[Record]:
    """The completions that are wanted (see `Wanted`), each with a few words around what was searched for."""
    which = Wanted(**wanted)
    return [
        {
            "group": plain(number),
            "row": index,
            "uid": _text(row.get("uid"), 200),
            "reward": _number(row.get("reward")),
            "correct": row.get("correct") if isinstance(row.get("correct"), bool) else None,
            "ended": _text(row.get("finish_reason") or row.get("ended"), 100),
            "length": _integer(row.get("length")),
            "excerpt": _excerpt(row, which.search.casefold()),
        }
        for number, _, left in _grouped(rows, which)
        for index, row in left
    ]


def _excerpt(row: Record, search: str, around: int = 80) -> str:
    for name in ("completion", "prompt"):
        text = str(row.get(name) or "")
        at = text.casefold().find(search)
        if at >= 0:
            return ("…" if at > around else "") + text[max(0, at - around) : at + len(search) + around]
    return ""


_Members = list[tuple[int, Record]]


def _grouped(rows: Sequence[Record], which: Wanted) -> Iterator[tuple[Any, _Members, _Members]]:
    """Each group with its rows and those of them that are wanted, if there are any."""
    found: dict[Any, _Members] = {}
    for index, row in enumerate(rows):
        found.setdefault(row.get("group"), []).append((index, row))
    for number, members in found.items():
        tied = _is_tied(members)
        other = which.uid and members[0][1].get("uid") != which.uid
        if other or (which.shown == "tied" and not tied) or (which.shown == "mixed" and tied):
            continue
        left = [(index, row) for index, row in members if which.holds(row)]
        if left:
            yield number, members, left


def _rewards(members: _Members) -> list[float]:
    return [value for _, row in members if (value := _number(row.get("reward"))) is not None]


def _is_tied(members: _Members) -> bool:
    rewards = _rewards(members) or [0.0]
    return len(members) > 1 and bool(equal_rewards(min(rewards), max(rewards)))


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
        "has_turns": isinstance(row.get("play"), str),
        "parts": {name[8:]: _number(value) for name, value in row.items() if name.startswith("rewards/")},
        "others": {
            _text(name, 200): _text(value, 500)
            for name, value in row.items()
            if name not in _OWN and not name.startswith("rewards/") and value is not None
        },
    }


_MOST_TURNS, _MOST_EPISODES, _MOST_CHARACTERS = 200, 64, 1_000_000
_LEAST_OF_A_TURN = 40


def episodes(rows: Sequence[Record], wanted: Any = None) -> Record:
    """The agents' episodes of a group, turn by turn, and which groups there are.

    Args:
        rows: of a table.
        wanted: number of the group; None, or one that is not there = the first.

    Returns:
        `groups` with `group`, `uid` and `mean`; and `group`, `uid` and `rows` of the one that is wanted, each a row as
        in `shortened` with its turns as `play`.
    """
    found = {
        plain(number): members
        for number, members, _ in _grouped(rows, Wanted())
        if any(isinstance(row.get("play"), str) for _, row in members)
    }
    told = [
        {"group": number, "uid": _text(members[0][1].get("uid"), 200), "mean": fmean(_rewards(members) or [0.0])}
        for number, members in found.items()
    ]
    if not found:
        return {"groups": []}
    chosen = wanted if wanted in found else next(iter(found))
    members = found[chosen][:_MOST_EPISODES]
    plays = [_turns(row.get("play")) for _, row in members]
    most = max(_LEAST_OF_A_TURN, _MOST_CHARACTERS // max(1, 2 * sum(map(len, plays))))
    return {
        "groups": told,
        "group": chosen,
        "uid": _text(members[0][1].get("uid"), 200),
        "rows": [
            shortened(index, row, 0) | {"play": [_turn(turn, most) for turn in play]}
            for (index, row), play in zip(members, plays, strict=True)
        ],
    }


def _turns(value: Any) -> list[Record]:
    """What `covey.training.rows.completion_rows` wrote of an episode."""
    try:
        turns = json.loads(value) if isinstance(value, str) else []
    except (ValueError, RecursionError):
        turns = []
    return [turn for turn in turns[:_MOST_TURNS] if isinstance(turn, dict)] if isinstance(turns, list) else []


def _turn(turn: Record, most: int) -> Record:
    return {
        **{name: _text(turn.get(name), min(most, LISTED)) for name in ("seen", "said")},
        **{name: _text(turn.get(name), 200) for name in ("action", "masked_by")},
        **{name: _number(turn.get(name)) for name in ("reward", "advantage", "of_episode", "tokens", "row")},
        "valid": turn.get("valid") is True,
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
