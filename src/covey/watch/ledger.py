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
    """Each completion of a ledger with its tokens counted and its contribution to the loss."""
    found: dict[int, Record] = {}
    for row in rows:
        number = row.get("row")
        if not isinstance(number, int):
            continue
        entry = found.setdefault(number, {"row": number, "group": row.get("group"), "tokens": 0, "loss": 0.0})
        entry["tokens"] += 1
        entry["loss"] += dict(numbers(row)).get("loss", 0.0)
        entry["uid"] = str(row.get("uid") or "")[:200]
    return list(found.values())


def ledger_completion(rows: Sequence[Record], number: int) -> Record:
    """The tokens of a completion, in order.

    Raises:
        RunFolderError: the ledger has no such completion.
    """
    tokens = [row for row in rows if row.get("row") == number]
    if not tokens:
        raise RunFolderError(f"row {number}: this step's ledger has no such completion")
    return {
        "tokens": [
            dict(numbers(row)) | {name: str(row.get(name) or "")[:500] for name in _TEXT} for row in tokens[:20_000]
        ]
    }
