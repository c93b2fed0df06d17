"""Tables for the page: groups with their statistics, episodes, evaluations side by side, the token ledger.

They are read in processes of their own, whose memory and time are limited: a few kilobytes of Parquet can unfold to
gigabytes, whatever they say of themselves, and take only the process that reads them along. The limit of memory is the
operating system's; macOS knows none. Long texts are cut, and said to be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.errors import RunFolderError, several
from covey.observe.comparison import answers_of
from covey.observe.completions import KEYS_AND_TEXTS, Wanted, grouped, listed, messages, parts_and_others, read_table
from covey.observe.records import Record, differing, hashes, plain
from covey.rewards.parallel import ItemTimeout, WorkerPool

LISTED, WHOLE = 4_000, 500_000
"""Characters of a text in a list, and where it is asked for by itself."""


def groups(rows: Sequence[Record], which: Wanted) -> list[Record]:
    """The groups of a step with mean, spread and whether they are tied, each with the completions that are wanted."""
    return [
        {
            "group": plain(group.number),
            "uid": _text(first.get("uid"), 200),
            "kind": _text(first.get("kind") or first.get("type"), 200),
            "prompt": messages(first.get("prompt")),
            **{name: getattr(group, name) for name in ("size", "mean", "std", "tied")},
            "rows": [shortened(index, rows[index]) for index in left],
        }
        for group, places, left in grouped(rows, which)
        for first in (rows[places[0]],)
    ]


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
        plain(group.number): (group, places)
        for group, places, _ in grouped(rows, Wanted())
        if any(isinstance(rows[index].get("play"), str) for index in places)
    }
    if not found:
        return {"groups": []}
    uids = {number: _text(rows[places[0]].get("uid"), 200) for number, (_, places) in found.items()}
    told = [{"group": number, "uid": uids[number], "mean": group.mean or 0.0} for number, (group, _) in found.items()]
    chosen = wanted if wanted in found else next(iter(found))
    members = found[chosen][1][:_MOST_EPISODES]
    plays = [_turns(rows[index].get("play")) for index in members]
    most = max(_LEAST_OF_A_TURN, _MOST_CHARACTERS // max(1, 2 * sum(map(len, plays))))
    shown = [
        shortened(index, rows[index], 0) | {"play": [_turn(turn, most) for turn in play]}
        for index, play in zip(members, plays, strict=True)
    ]
    return {"groups": told, "group": chosen, "uid": uids[chosen], "rows": shown}


def _turns(value: Any) -> list[Record]:
    """What `covey.training.tables.completion_rows` wrote of an episode."""
    return [turn for turn in listed(value)[:_MOST_TURNS] if isinstance(turn, dict)]


def _turn(turn: Record, most: int) -> Record:
    return {
        **{name: _text(turn.get(name), min(most, LISTED)) for name in ("seen", "said")},
        **{name: _text(turn.get(name), 200) for name in ("action", "masked_by")},
        **{name: _number(turn.get(name)) for name in ("reward", "advantage", "of_episode", "tokens", "row")},
        "pictures": hashes(turn.get("pictures")),
        "valid": turn.get("valid") is True,
    }


def compare(before: Iterable[Record], after: Iterable[Record], shown: str = "changed") -> tuple[Record, list[Record]]:
    """The same questions in two evaluations: how many were `gained`, `lost`, right in `both`, in `neither`, or
    `unjudged`; and the pairs that are wanted, of one of these names, `changed` (the first two) or `all`.
    """
    earlier = {(row.get("uid"), row.get("sample")): (index, row) for index, row in enumerate(before)}
    counts = dict.fromkeys(("gained", "lost", "both", "neither", "unjudged"), 0)
    names = {(False, True): "gained", (True, False): "lost", (True, True): "both", (False, False): "neither"}
    pairs = []
    for index, row in enumerate(after):
        other = earlier.get((row.get("uid"), row.get("sample")))
        if other is None:
            continue
        judged: Any = other[1].get("correct"), row.get("correct")
        name = names.get(judged, "unjudged")
        counts[name] += 1
        if shown in ("all", name) or (shown == "changed" and name in ("gained", "lost")):
            asked = {"uid": _text(row.get("uid"), 200), "prompt": messages(row.get("prompt"))}
            pairs.append(asked | {"what": name, "before": shortened(*other), "after": shortened(index, row)})
    return counts, pairs


def numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The entries of a record that a curve can show."""
    for name, value in row.items():
        if (number := _number(value)) is not None and len(name) <= 200:
            yield name, number


def _number(value: Any) -> float | None:
    if not isinstance(value, int | float) or abs(value) >= 1e300 or math.isnan(value):
        return None
    return value if isinstance(value, float) else (int(value) if abs(value) < 2**53 else float(value))


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def _text(value: Any, most: int) -> str:
    return "" if value is None else (value if isinstance(value, str) else str(plain(value)))[:most]


def _pull(known: Mapping[str, float]) -> float:
    return abs(known.get("gradient", 0.0))


def ledger_completions(rows: Sequence[Record]) -> list[Record]:
    """Each completion in each pass of a ledger, with its tokens counted, its contribution to the loss, and its share of
    the gradient: of the sum of |d loss / d log-probability| over the pass.
    """
    found: dict[tuple[int, int], Record] = {}
    whole: dict[int, float] = {}
    for known in (dict(numbers(row)) for row in rows):
        turn, row = int(known.get("pass", 0)), int(known.get("row", 0))
        start = {"pass": turn, "row": row, "group": known.get("group"), "tokens": 0, "loss": 0.0, "pull": 0.0}
        entry = found.setdefault((turn, row), start)
        entry["tokens"] += 1
        entry["loss"] += known.get("loss", 0.0)
        entry["pull"] += _pull(known)
        whole[turn] = whole.get(turn, 0.0) + _pull(known)
    return [entry | {"share": entry.pop("pull") / (whole[entry["pass"]] or 1.0)} for entry in found.values()]


def ledger_completion(rows: Sequence[Record], number: int, turn: int = 0) -> Record:
    """The tokens of a completion in a pass, in order.

    Raises `RunFolderError`: the ledger has no such completion.
    """
    of_pass = [(row, dict(numbers(row))) for row in rows if row.get("pass", 0) == turn]
    tokens = [(row, known) for row, known in of_pass if row.get("row") == number]
    if not tokens:
        raise RunFolderError(f"row {number} in pass {turn}: this step's ledger has no such completion")
    whole = sum(_pull(known) for _, known in of_pass) or 1.0
    told = []
    for row, known in tokens[:20_000]:
        share = {"share": _pull(known) / whole} if "gradient" in known else {}
        told.append(known | share | {name: str(row.get(name) or "")[:500] for name in ("token", "masked_by")})
    return {"tokens": told}


MEMORY_MB = 2048
"""Address space of a process that reads; Python and pyarrow take 400 MB of it."""
SECONDS = 30.0
SEARCH_SECONDS = 1.5
"""After which a search tells what it has found so far."""
_PAGE_ROWS, _PAGE_CHARACTERS = 400, 1_000_000
"""Completions and characters in one answer."""
_KEPT, _MOST_HITS, _NAMED = 3, 200, 200
"""Tables in memory, completions that a search finds, and characters of a question in a list."""
PLACE = ("step", "eval", "table_row")
"""Where a completion is, which no column may say otherwise."""


class TableReader:
    """Asks tables; its processes start with the first question."""

    def __init__(self, workers: int = 2) -> None:
        self._pool = WorkerPool(answer, workers=workers, time_limit=SECONDS, memory_mb=MEMORY_MB, prepare=prepare)

    def ask(self, what: str, path: Path, *arguments: Any) -> Record:
        """What one of `ANSWERS` says.

        Raises `RunFolderError`: there is no such table, or it is damaged, or too large to be looked at.
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


def _page(found: Iterable[Record], sizes: Callable[[Record], tuple[int, int]]) -> list[Record]:
    """As many as one answer takes, by their rows and characters; one at least."""
    page: list[Record] = []
    count = size = 0
    for each in found:
        rows, characters = sizes(each)
        count, size = count + rows, size + characters
        if page and (count > _PAGE_ROWS or size > _PAGE_CHARACTERS):
            break
        page.append(each)
    return page


def _completions(path: Path, wanted: Record, offset: int) -> Record:
    def sizes(group: Record) -> tuple[int, int]:
        texts = [row["completion"] for row in group["rows"]] + [message["content"] for message in group["prompt"]]
        return len(group["rows"]), sum(map(len, texts))

    rows = _rows(path)
    found = groups(rows, Wanted(**wanted))
    few = (group | {"rows": group["rows"][:_PAGE_ROWS]} for group in found[offset:])
    return {"completions": len(rows), "found": len(found), "groups": _page(few, sizes)}


def _completion(path: Path, row: int) -> Record:
    rows = _rows(path)
    if not 0 <= row < len(rows):
        raise RunFolderError(f"row {row}: {path.stem} has {several(len(rows), 'row')}")
    return shortened(row, rows[row], WHOLE) | {"prompt": messages(rows[row].get("prompt"))}


def _some(path: Path, question: str, most: int | None, worst: bool, start: int) -> Record:
    """Whole completions, in their order or the lowest rewards first, from the place `start` on; how many are left."""

    def whole(index: int, group: Any) -> Record:
        own = {name: value for name, value in rows[index].items() if name not in PLACE}
        row = {name: value[:WHOLE] if isinstance(value, str) else plain(value) for name, value in own.items()}
        about = {f"group_{name}": getattr(group, name) for name in ("size", "mean", "std", "tied")}
        return {"table_row": index} | row | about

    rows = _rows(path)
    found = [(index, group) for group, _, left in grouped(rows, Wanted(uid=question)) for index in left]
    found.sort(key=lambda each: each[0])
    if worst:
        rewards = {index: reward for index, _ in found if (reward := _number(rows[index].get("reward"))) is not None}
        found = sorted((each for each in found if each[0] in rewards), key=lambda each: rewards[each[0]])
    told = (whole(*each) for each in found[:most][start:])
    page = _page(told, lambda row: (0, sum(len(value) for value in row.values() if isinstance(value, str))))
    return {"rows": page, "left": len(found[:most]) - start - len(page)}


def _prompts(path: Path, uids: Sequence[str] | None = None) -> Record:
    """What the user asked in some questions, or all, as far as they are in a table."""
    found = {uid: row.get("prompt") for row in _rows(path) if isinstance(uid := row.get("uid"), str)}
    texts = differing([messages(prompt, WHOLE)[-1]["content"] for prompt in found.values()])
    said = dict(zip(found, texts, strict=True))
    return {uid: said[uid][:_NAMED] for uid in (found if uids is None else uids) if uid in found}


def _compare(before: Path, after: str, shown: str, offset: int) -> Record:
    counts, pairs = compare(_rows(before), _rows(Path(after)), shown)
    sides = ("before", "after")
    page = _page(pairs[offset:], lambda pair: (2, sum(len(pair[side]["completion"]) for side in sides)))
    return {"counts": counts, "found": len(pairs), "pairs": page}


def _search(folder: Path, names: Sequence[str], wanted: Record) -> Record:
    """The `hits` in several tables, for a limited time; how many were `looked` through, or `unread`."""
    until = time.monotonic() + SEARCH_SECONDS
    hits: list[Record] = []
    unread = looked = 0
    for name in names:
        if looked and (time.monotonic() > until or len(hits) >= _MOST_HITS):
            break
        looked += 1
        try:
            rows = read_table(folder / name, KEYS_AND_TEXTS)
            hits += [hit | {"table": name} for hit in found_in(rows, Wanted(**wanted))]
        except RunFolderError:
            unread += 1
    return {"hits": hits[: 2 * _MOST_HITS], "looked": looked, "unread": unread}


ANSWERS: dict[str, Callable[..., Record]] = {
    "completions": _completions,
    "completion": _completion,
    "episodes": lambda path, group: episodes(_rows(path), group),
    "compare": _compare,
    "some": _some,
    "prompts": _prompts,
    "answers": lambda path, rewards: answers_of(_rows(path), rewards=rewards),
    "search": _search,
    "ledger": lambda path: {"completions": ledger_completions(_rows(path))},
    "ledger_of": lambda path, row, turn: ledger_completion(_rows(path), row, turn),
}
