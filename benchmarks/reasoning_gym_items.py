"""Every dataset of reasoning-gym: does another process make the same items, and what do right and wrong answers score?

    python benchmarks/reasoning_gym_items.py [DATASET ...]

Makes three items of each dataset in two processes. Scores its own answer, "zzz", "[[1, 2], [3]]", and a text that makes
a file if a scorer runs it. Prints a line for each dataset of which there is something to say.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from reasoning_gym.factory import DATASETS

from covey.recipes.reasoning_gym.gym_task import HELD_OUT, REFUSED, work
from covey.rewards.parallel import WorkerPool


def notes_on(name: str, one: WorkerPool, other: WorkerPool, folder: Path) -> list[str]:
    """What there is to say of a dataset."""
    refused = [f"refused: {REFUSED[name]}"] if name in REFUSED else []
    items = [(name, "{}", HELD_OUT + number) for number in range(3)]
    one.map(items[:1])  # reads its files
    start = time.perf_counter()
    made = one.map(items)
    seconds = (time.perf_counter() - start) / 2
    failed = [f"no item: {item}" for item in made if isinstance(item, Exception)]
    if failed:
        return [*failed[:1], *refused]
    code = f"__import__('os').system('touch {folder / name}')"
    own = one.map([(*item, answer) for item, (_, answer) in zip(items, made, strict=True) if answer is not None])
    garbage = one.map([(*item, text) for item in items for text in ("zzz", "[[1, 2], [3]]")])
    ran = one.map([(*item, text) for item in items for text in (code, f"[{code}]")])
    return [
        *["another process makes other items"] * (made != other.map(items[::-1])[::-1]),
        *["no single right answer"] * (len(own) < len(items)),
        *(f"its own answer scores {score}" for score in own if score != 1.0),
        *(f"garbage scores {score:.2g}" for score in {s for s in garbage if not isinstance(s, Exception)} - {0.0}),
        *{f"its scorer raises {score}" for score in [*garbage, *ran] if isinstance(score, Exception)},
        *["RUNS THE ANSWER"] * (folder / name).exists(),
        *[f"{seconds:.1f} s an item"] * (seconds > 0.3),
        *refused,
    ]


def main(names: list[str]) -> None:
    """Look at each dataset."""
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(WorkerPool(work, workers=1, time_limit=60.0, memory_mb=2048)) as one,
        closing(WorkerPool(work, workers=1, time_limit=60.0, memory_mb=2048)) as other,
    ):
        found = {name: notes_on(name, one, other, Path(folder)) for name in names or sorted(DATASETS)}
    for name, notes in found.items():
        if notes:
            print(f"{name}: {'; '.join(notes)}")
    print(f"{sum(not notes for notes in found.values())} of {len(found)}: nothing to say")


if __name__ == "__main__":
    main(sys.argv[1:])
