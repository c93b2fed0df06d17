"""What runs when.

- `make test`, for every push: all tests but those marked `ray` and `slow` (several processes, or more than a few
  seconds, of a kind of which another test shows one case). Each room, a folder of tests, has a budget (`BUDGETS`).
- `make test-changed`, which CI adds: the slow tests of rooms whose code or tests changed since BASE. A change to a seam
  (`SEAMS`), to shared test code or to the build counts as a change to every room.
- `make test-all`: everything.

    python tests/what_runs.py [BASE]      # prints the folders whose slow tests are to run

BASE is a commit; left out, where `origin/main` was left, else the last commit of two days ago. Where there is none,
every room has changed.
"""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
SEAMS = (
    "src/covey/types.py",
    "src/covey/backend.py",
    "src/covey/rollout/learning.py",
    "src/covey/rollout/turns.py",
    "src/covey/pytorch/gradient_sum.py",
    "tests/conftest.py",
    "pyproject.toml",
    "constraints.txt",
)
BUDGETS: dict[str, int] = defaultdict(lambda: 120, {"training": 180, "pytorch": 150})
"""Room -> core-seconds of its tests in `make test`, on two quiet cores."""


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=TESTS, capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else []


def base() -> str | None:
    """What a change began with; a clone whose main is this commit says nothing of that."""
    head = git("rev-parse", "HEAD")
    for found in (git("merge-base", "HEAD", "origin/main"), git("rev-list", "-1", "--before=2 days ago", "HEAD")):
        if found and found != head:
            return found[0]
    return None


def room_of(path: str) -> str:
    """`src/covey/jax/model.py` and `tests/jax/test_model.py` -> `jax`; a file beside the rooms -> ``."""
    parts = Path(path).parts
    inside = parts[2:] if parts[:2] == ("src", "covey") else parts[1:] if parts[:1] == ("tests",) else ()
    return inside[0] if len(inside) > 1 else ""


def changed_rooms(since: str | None) -> list[str]:
    """The folders of tests to run: where code or tests changed; all after a change to a seam. "." is the files here."""
    rooms = sorted(path.parent.name for path in TESTS.glob("*/test_*.py"))
    rooms = [".", *dict.fromkeys(rooms)]
    changed = git("diff", "--name-only", since) if since else None
    if changed is None or set(changed) & set(SEAMS):
        return rooms
    touched = {room_of(path) for path in changed}
    if "watch" in touched:
        touched |= {"browser", "observe"}  # where its tests are
    if any(path.startswith(("src/covey/", "benchmarks/")) for path in changed):
        touched.add(".")
    return [room for room in rooms if room in touched]


def files_of(rooms: list[str]) -> list[str]:
    beside = [path.name for path in sorted(TESTS.glob("test_*.py"))] if "." in rooms else []
    return [f"tests/{name}" for name in [*beside, *(room for room in rooms if room != ".")]]


if __name__ == "__main__":
    print(" ".join(files_of(changed_rooms(sys.argv[1] if len(sys.argv) > 1 else base()))))
