"""Runs of the command in processes of their own, and what they leave behind, to be compared."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from covey.observe.run_folder import RunFolder

TESTS = Path(__file__).parents[1]
HERE = "distributed.ray_address=local"
"""Whatever Ray cluster this machine may be part of."""
VOLATILE = ("time/", "memory/", "step_time", "eval/seconds")
COUNTED = ("samplers/restarts", "samplers/reissued_units")
QUIET = ("ignore::DeprecationWarning:ray", "ignore::ResourceWarning", "ignore::FutureWarning:ray")
RAY = [pytest.mark.ray, *(pytest.mark.filterwarnings(warning) for warning in QUIET)]


def few_vowels(completions: list[Any], **columns: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(ch not in "aeiou" for ch in text) / max(len(text), 1) for text in texts]


def data() -> dict[str, Any]:
    rows = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four", "five", "six")]
    return {"reward_funcs": few_vowels, "train_dataset": rows, "eval_dataset": rows[:3]}


def without_times(run: str | Path, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    records, volatile = RunFolder.read(run).read_metrics(), VOLATILE + without
    return [{name: value for name, value in record.items() if not name.startswith(volatile)} for record in records]


def learned(run: str | Path, *, without: tuple[str, ...] = (), weights: str = "") -> tuple[list[str], bytes]:
    """The metrics of a run, byte for byte but for times, and its final adapter."""
    lines = [json.dumps(record) for record in without_times(run, without)]
    return lines, (Path(run) / "adapter" / (weights or "adapter_model.safetensors")).read_bytes()


def assert_near(one: Path, other: Path) -> None:
    """The same up to rounding: gradients were added in another order."""
    for mine, theirs in zip(without_times(one, ("samplers/",)), without_times(other, ("samplers/",)), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            if isinstance(value, float):
                assert theirs[name] == pytest.approx(value, rel=1e-3, abs=1e-4), (mine["step"], name)


def events(run: str | Path, kind: str) -> list[str]:
    return [str(event["message"]) for event in RunFolder.read(run).read_events() if event["kind"] == kind]


def started(command: Sequence[object], **settings: str) -> subprocess.Popen[str]:
    """The command with one thread for each rank, and the tests' modules on its path."""
    paths = [str(TESTS / "distributed" / "faults"), str(TESTS), str(TESTS / "pytorch")]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)} | settings
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # A shell's background job, such as these tests may be, ignores SIGINT.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([str(part) for part in command], env=environment, preexec_fn=heed, **output)


def covey(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    return started([sys.executable, "-m", "covey", *arguments], **environment)


def torchrun(ranks: int, *command: object, **environment: str) -> subprocess.Popen[str]:
    """`torchrun --nproc-per-node RANKS COMMAND`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return started([*launcher, *command], **environment)


def train(
    ranks: int, recipe: Path, run: Path, *launcher: str, environment: dict[str, str] | None = None, **settings: Any
) -> subprocess.Popen[str]:
    """`torchrun ... covey train` on so many ranks; 0 = the command alone."""
    chosen = [f"{name}={value}" for name, value in settings.items()]
    command = ("train", recipe / "recipe.toml", f"run.output_dir={run}", *chosen)
    if ranks == 0:
        return covey(*command, **(environment or {}))
    return torchrun(ranks, *launcher, "-m", "covey", *command, **(environment or {}))


def finished(process: subprocess.Popen[str], seconds: float = 400) -> str:
    """What it printed. It may take as long as a busy machine needs, and is stopped otherwise."""
    try:
        printed, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
        process.wait()
    return printed


def ended_well(process: subprocess.Popen[str], seconds: float = 400) -> str:
    printed = finished(process, seconds)
    assert process.returncode == 0, printed[-4000:]
    return printed


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def await_checkpoint(process: subprocess.Popen[str], run: Path, step: int) -> None:
    deadline = time.monotonic() + 300
    while not (run / "checkpoints" / f"step_{step:06}" / "COMPLETE").exists():
        assert process.poll() is None, finished(process)
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill_one(process: subprocess.Popen[str], run: Path, rank: int) -> tuple[list[int], str]:
    """Kill a rank after the second step's checkpoint; process ids of all ranks, and what was printed to the end."""
    try:
        await_checkpoint(process, run, 2)
        ranks = children_of(process.pid)
        if len(ranks) == 1:  # the command has started torchrun, and that the ranks
            ranks = children_of(ranks[0])
        assert len(ranks) == 2
        os.kill(ranks[rank], signal.SIGKILL)
    finally:
        printed = finished(process)
    return ranks, printed
