"""Tables of completions for the page: groups with their statistics, and evaluations side by side.

What lies of its size meets the limits of `covey.watch.reader`. Long texts are cut, and said to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from covey.observe.completions import Wanted, grouped, listed, messages, parts_and_others
from covey.observe.records import Record, plain

LISTED, WHOLE = 4_000, 500_000
"""Characters of a text in a list, and where it is asked for by itself."""
_SHOWN: dict[str, Record] = {
    "right": {"correct": True},
    "wrong": {"correct": False},
    "truncated": {"truncated": True},
    "masked": {"masked": True},
    "tied": {"tied": True},
    "mixed": {"tied": False},
}


def wanted_of(asked: Record) -> Wanted:
    """What the page asks for: fields of `Wanted`, and `shown`, the name of a filter."""
    fields = {name: value for name, value in asked.items() if name != "shown"}
    return Wanted(**fields | _SHOWN.get(asked.get("shown", ""), {}))


def groups(rows: Sequence[Record], which: Wanted) -> list[Record]:
    """The groups of a step with mean, spread and whether they are tied, each with the completions that are wanted."""
    wanted = []
    for group, places, left in grouped(rows, which):
        first = rows[places[0]]
        wanted.append(
            {
                "group": plain(group.number),
                "uid": _text(first.get("uid"), 200),
                "kind": _text(first.get("kind") or first.get("type"), 200),
                "prompt": messages(first.get("prompt")),
                "size": group.size,
                "mean": group.mean,
                "std": group.std,
                "tied": group.tied,
                "rows": [shortened(index, rows[index]) for index in left],
            }
        )
    return wanted


def found_in(rows: Sequence[Record], which: Wanted) -> list[Record]:
    """The completions that are wanted, each with a few words around what was searched for."""
    return [
        {
            "group": plain(group.number),
            "row": index,
            "uid": _text(rows[index].get("uid"), 200),
            "ended": _text(rows[index].get("finish_reason") or rows[index].get("ended"), 100),
            "length": _integer(rows[index].get("length")),
            "excerpt": _excerpt(rows[index], which.search.casefold()),
            **_judged(rows[index]),
        }
        for group, _, left in grouped(rows, which)
        for index in left
    ]


def _judged(row: Record) -> Record:
    correct = row.get("correct")
    return {"reward": _number(row.get("reward")), "correct": correct if isinstance(correct, bool) else None}


def _excerpt(row: Record, search: str, around: int = 80) -> str:
    texts: list[str] = [each["content"] for each in messages(row.get("prompt"), WHOLE)]
    for text in (str(row.get("completion") or ""), *texts):
        at = text.casefold().find(search)
        if at >= 0:
            return ("…" if at > around else "") + text[max(0, at - around) : at + len(search) + around]
    return ""


def shortened(index: int, row: Record, most: int = LISTED) -> Record:
    """A row as the page shows it, with its number in the table; reward functions' parts and other columns apart."""
    text = str(row.get("completion") or "")
    parts, others = parts_and_others(row)
    return {
        "row": index,
        "completion": text[:most],
        "characters": len(text),
        **_judged(row),
        "advantage": _number(row.get("advantage")),
        **{name: _integer(row.get(name)) for name in ("sample", "length", "policy_version", "turns", "no_actions")},
        **{name: _text(row.get(name), 500) for name in ("masked_by", "finish_reason", "ended", "error")},
        "has_turns": isinstance(row.get("play"), str),
        "parts": {name: _number(value) for name, value in parts.items()},
        "others": {_text(name, 200): _text(value, 500) for name, value in others.items()},
    }


_MOST_TURNS, _MOST_EPISODES, _MOST_CHARACTERS = 200, 64, 1_000_000
_LEAST_OF_A_TURN = 40


def episodes(rows: Sequence[Record], wanted: Any = None) -> Record:
    """Agents' episodes of a group, or of the first, as rows with their turns as `play`; and which groups there are."""
    found = {
        plain(group.number): (group, [(index, rows[index]) for index in places])
        for group, places, _ in grouped(rows, Wanted())
        if any(isinstance(rows[index].get("play"), str) for index in places)
    }
    told = [
        {"group": number, "uid": _text(members[0][1].get("uid"), 200), "mean": group.mean or 0.0}
        for number, (group, members) in found.items()
    ]
    if not found:
        return {"groups": []}
    chosen = wanted if wanted in found else next(iter(found))
    members = found[chosen][1][:_MOST_EPISODES]
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
    """What `covey.training.tables.completion_rows` wrote of an episode."""
    return [turn for turn in listed(value)[:_MOST_TURNS] if isinstance(turn, dict)]


def _turn(turn: Record, most: int) -> Record:
    return {
        **{name: _text(turn.get(name), min(most, LISTED)) for name in ("seen", "said")},
        **{name: _text(turn.get(name), 200) for name in ("action", "masked_by")},
        **{name: _number(turn.get(name)) for name in ("reward", "advantage", "of_episode", "tokens", "row")},
        "valid": turn.get("valid") is True,
    }


def compare(before: Iterable[Record], after: Iterable[Record], shown: str = "changed") -> tuple[Record, list[Record]]:
    """The same questions in two evaluations: how many were `gained`, `lost`, right in `both`, in `neither`, or
    `unjudged`; and the pairs that are wanted, of one of these names, `changed` (the first two) or `all`.
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
