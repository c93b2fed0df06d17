"""The token ledger of a step, as the page shows it: see `covey.training.tables`, which writes it."""

from __future__ import annotations

from collections.abc import Sequence

from covey.errors import RunFolderError
from covey.observe.records import Record
from covey.watch.tables import numbers

_TEXT = ("token", "masked_by")


def ledger_completions(rows: Sequence[Record]) -> list[Record]:
    """Each completion in each pass of a ledger, with its tokens counted, its contribution to the loss, and its share of
    the gradient: of the sum of |d loss / d log-probability| over the pass.
    """
    found: dict[tuple[int, int], Record] = {}
    for row in rows:
        known = dict(numbers(row))
        key = (int(known.get("pass", 0)), int(known.get("row", 0)))
        start = {"pass": key[0], "row": key[1], "group": known.get("group"), "tokens": 0, "loss": 0.0, "pull": 0.0}
        entry = found.setdefault(key, start)
        entry["tokens"] += 1
        entry["loss"] += known.get("loss", 0.0)
        entry["pull"] += abs(known.get("gradient", 0.0))
    whole = _pull(rows)
    return [entry | {"share": entry.pop("pull") / (whole[entry["pass"]] or 1.0)} for entry in found.values()]


def _pull(rows: Sequence[Record]) -> dict[int, float]:
    """Sum of |d loss / d log-probability| over the tokens of each pass."""
    sums: dict[int, float] = {}
    for row in rows:
        known = dict(numbers(row))
        turn = int(known.get("pass", 0))
        sums[turn] = sums.get(turn, 0.0) + abs(known.get("gradient", 0.0))
    return sums


def ledger_completion(rows: Sequence[Record], number: int, turn: int = 0) -> Record:
    """The tokens of a completion in a pass, in order.

    Raises:
        RunFolderError: the ledger has no such completion.
    """
    tokens = [row for row in rows if row.get("row") == number and row.get("pass", 0) == turn]
    if not tokens:
        raise RunFolderError(f"row {number} in pass {turn}: this step's ledger has no such completion")
    whole = _pull([row for row in rows if row.get("pass", 0) == turn]).get(turn) or 1.0
    told = []
    for row in tokens[:20_000]:
        known = dict(numbers(row))
        if "gradient" in known:
            known["share"] = abs(known["gradient"]) / whole
        told.append(known | {name: str(row.get(name) or "")[:500] for name in _TEXT})
    return {"tokens": told}
