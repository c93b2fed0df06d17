"""How many tokens fit into a pass, as a run has found out; remembered in its folder, over restarts.

In a sharded pass the ranks wait for each other in every layer, so they cannot begin a step again when memory runs out
on one. All end, the launcher starts them again, and they go on from the last checkpoint with packs of half the size.

    memory.json     {"tokens_per_micro_batch": 512, "said": "memory ran out ...", "told": false}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from covey.files import write_atomically
from covey.observe.run_folder import RunFolder

LEAST = 64
"""Tokens of a pack below which smaller ones are no help."""


class MemoryNote:
    """What a run remembers of memory that ran out."""

    def __init__(self, run: str | Path) -> None:
        """Of the run in this folder."""
        self._run = Path(run).expanduser()
        self._file = self._run / "memory.json"

    def at_most(self, tokens: int) -> int:
        """The size of packs to go on with, where `tokens` is what the settings or a checkpoint say."""
        found = self._read().get("tokens_per_micro_batch")
        return min(tokens, max(found, 1)) if isinstance(found, int) else tokens

    def halve(self, tokens: int, who: str, why: str) -> str:
        """Remember that packs of so many tokens are too large."""
        half = min(tokens, self.at_most(tokens)) // 2
        if half < LEAST or not self._run.is_dir():
            return ""
        said = (
            f"memory ran out on {who} with tokens_per_micro_batch={tokens} ({why}): the run goes on from its last "
            f"checkpoint with {half}"
        )
        write_atomically(self._file, json.dumps({"tokens_per_micro_batch": half, "said": said, "told": False}))
        return said

    def tell(self) -> str:
        """Write what was remembered last to the run's events, once; returns it, or ""."""
        found = self._read()
        said = str(found.get("said", ""))
        if not said or found.get("told"):
            return ""
        with RunFolder.open(self._run) as folder:
            folder.append_event("memory", said)
        write_atomically(self._file, json.dumps(found | {"told": True}))
        return said

    def starts(self, max_restarts: int) -> Iterator[str]:
        """Yields for each start of all ranks why it is needed, "" for the first one, as often as that makes sense.

        Deaths count, up to `max_restarts`; starts with smaller packs do not, for there are few sizes.
        """
        deaths, size = 0, self._read().get("tokens_per_micro_batch")
        yield ""
        while True:
            if (smaller := self._read().get("tokens_per_micro_batch")) != size:
                size = smaller
                yield f"memory ran out on a rank: all are started again with packs of at most {size} tokens"
            elif deaths < max_restarts:
                deaths += 1
                yield f"a rank has died: all are started again ({deaths} of {max_restarts})"
            else:
                return

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._file.read_bytes())
        except (OSError, ValueError, RecursionError):  # a note that is gone or damaged is written again when it matters
            return {}
        return found if isinstance(found, dict) else {}
