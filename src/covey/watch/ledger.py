"""The token ledger of a step, as the page shows it: see `covey.training.ledger`, which writes it."""

from __future__ import annotations

from collections.abc import Sequence

from covey.errors import RunFolderError
from covey.observe.records import Record
from covey.watch.tables import numbers

LEDGER = "ledger"
"""Folder of the tables in a run folder."""
_TEXT = ("token", "masked_by")


def ledger_completions(rows: Sequence[Record]) -> list[Record]:
    """Each completion in each pass of a ledger, with its tokens counted and its contribution to the loss."""
    found: dict[tuple[int, int], Record] = {}
    for row in rows:
        known = dict(numbers(row))
        key = (int(known.get("pass", 0)), int(known.get("row", 0)))
        start = {"pass": key[0], "row": key[1], "group": known.get("group"), "tokens": 0, "loss": 0.0}
        entry = found.setdefault(key, start)
        entry["tokens"] += 1
        entry["loss"] += known.get("loss", 0.0)
    return list(found.values())


def ledger_completion(rows: Sequence[Record], number: int, turn: int = 0) -> Record:
    """The tokens of a completion in a pass, in order.

    Raises:
        RunFolderError: the ledger has no such completion.
    """
    tokens = [row for row in rows if row.get("row") == number and row.get("pass", 0) == turn]
    if not tokens:
        raise RunFolderError(f"row {number} in pass {turn}: this step's ledger has no such completion")
    return {
        "tokens": [
            dict(numbers(row)) | {name: str(row.get(name) or "")[:500] for name in _TEXT} for row in tokens[:20_000]
        ]
    }
