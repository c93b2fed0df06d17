"""The rows of `gpu.py`: as lines that a part prints, and as a table. Needs nothing but Python."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["ok", "wrong", "failed", "skipped"]

_MARK = "row "
_COLUMNS = {
    "seconds": ("step s", "{:.3f}", 1),
    "sampling": ("sampling s", "{:.3f}", 1),
    "update": ("update s", "{:.3f}", 1),
    "tokens_per_second": ("tokens/s", "{:,.0f}", 1),
    "peak_device": ("peak GB", "{:.2f}", 1e-9),
    "update_peak_device": ("update GB", "{:.2f}", 1e-9),
    "matrix_share": ("of matrix rate", "{:.1%}", 1),
    "bandwidth_share": ("of bandwidth", "{:.1%}", 1),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One finding.

    Attributes:
        part: that it belongs to.
        what: was looked at.
        state: ok; wrong = it ran, and its numbers are not what they must be; failed; skipped = not there.
        text: the finding, or the reason.
        numbers: by name; those of a step have a table of their own.
    """

    part: str
    what: str
    state: State
    text: str = ""
    numbers: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return asdict(self)


class Rows:
    """Tells the parent what a part finds, line by line: it is kept if the part is ended later.

    What libraries print to the standard output goes to the standard error from now on.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, what: str, state: State, text: str = "", **numbers: float) -> None:
        """A finding; a later one of the same name takes its place."""
        told = {"what": what, "state": state, "text": text, "numbers": numbers}
        print(_MARK + json.dumps(told), file=self._out, flush=True)


def read_rows(part: str, text: str) -> list[Row]:
    """What a part said with `Rows`; a line that was cut off is left out."""
    found: dict[str, Row] = {}
    for line in text.splitlines():
        if line.startswith(_MARK):
            try:
                told = json.loads(line.removeprefix(_MARK))
            except ValueError:
                continue
            found[told["what"]] = Row(part, **told)
    return list(found.values())


def markdown(rows: Sequence[Row]) -> str:
    """All findings, then the steps with their numbers."""
    lines = [[row.part, row.what, row.state, row.text.replace("|", "/")] for row in rows]
    text = _table(["part", "what", "state", "finding"], lines)
    steps = [row for row in rows if "seconds" in row.numbers]
    names = [name for name in _COLUMNS if any(name in row.numbers for row in steps)]
    if steps:
        cells = [[row.part, row.what, *(_cell(row, name) for name in names)] for row in steps]
        text += "\n" + _table(["part", "what", *(_COLUMNS[name][0] for name in names)], cells)
    return text


def _cell(row: Row, name: str) -> str:
    _, shown, factor = _COLUMNS[name]
    return shown.format(row.numbers[name] * factor) if name in row.numbers else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
