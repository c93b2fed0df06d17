"""The same bits on any number of ranks; ranks that fail; the command under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.observe.run_folder import RunFolder

TESTS = Path(__file__).parents[1]
HERE = "distributed.ray_address=local"
"""Whatever Ray cluster this machine may be part of."""


def torchrun(ranks: int, *command: object, **environment: str) -> subprocess.Popen[str]:
    """`torchrun --nproc-per-node RANKS COMMAND`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return started([*launcher, *command], **environment)


def started(command: Sequence[object], **settings: str) -> subprocess.Popen[str]:
    """The command with one thread for each rank, and the tests' modules on its path."""
    paths = [str(TESTS / "distributed" / "faults"), str(TESTS), str(TESTS / "pytorch")]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)} | settings
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    words = [str(part) for part in command]
    return subprocess.Popen(words, env=environment, preexec_fn=_with_ctrl_c, **output)


def _with_ctrl_c() -> None:
    """A shell's background job, such as these tests may be, ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finished(process: subprocess.Popen[str]) -> str:
    """What it printed.

    It may take as long as a busy machine needs, and is stopped otherwise.
    """
    try:
        printed, _ = process.communicate(timeout=400)
    finally:
        process.kill()
        process.wait()
    return printed


@pytest.fixture(scope="module")
def by_world(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What `rank_cases.py` found on one, two and three ranks."""
    folder, found = tmp_path_factory.mktemp("ranks"), {}
    for world in (1, 2, 3):
        process = torchrun(world, Path(__file__).parent / "rank_cases.py", folder / f"{world}.json")
        printed = finished(process)
        assert process.returncode == 0, printed[-3000:]
        found[world] = json.loads((folder / f"{world}.json").read_text())
    return found


def test_weights_and_metrics_have_the_same_bits_on_any_number_of_ranks(by_world: dict[int, dict[str, Any]]) -> None:
    one = {name: case for name, case in by_world[1].items() if name != "a fault"}
    assert all(case["steps"] >= 3 for case in one.values())
    for world in (2, 3):
        for name, case in one.items():
            assert by_world[world][name] == case, (world, name)


def test_all_ranks_begin_again_with_smaller_packs_when_memory_runs_out_on_one(
    by_world: dict[int, dict[str, Any]],
) -> None:
    for found in by_world.values():
        assert found["memory"]["budget"] == 50


def test_a_fault_on_another_rank_is_named_and_all_go_on(by_world: dict[int, dict[str, Any]]) -> None:
    for world, found in by_world.items():
        first, *rest = found["a fault"]["metrics"]
        where = f"rank 1 of {world} failed: ArithmeticError: " if world > 1 else ""
        assert first["error"].startswith(where + "injected")
        assert rest == by_world[1]["a fault"]["metrics"][1:]
        assert found["a fault"]["steps"] == 2


def without_times(run: Path) -> list[dict[str, Any]]:
    records = RunFolder.read(run).read_metrics()
    return [
        {
            name: value
            for name, value in record.items()
            if not name.startswith(("time/", "memory/", "samplers/")) and name not in ("step_time", "eval/seconds")
        }
        for record in records
    ]


def train(ranks: int, recipe: Path, run: Path, *launcher: str) -> subprocess.Popen[str]:
    command = ("-m", "covey", "train", recipe / "recipe.toml", f"run.output_dir={run}")
    return torchrun(ranks, *launcher, *command)


@pytest.fixture(scope="module")
def unbroken(recipe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, by itself."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    settings = (f"run.output_dir={run}", "distributed.samplers=0")
    process = started([sys.executable, "-m", "covey", "train", recipe_folder / "recipe.toml", *settings])
    printed = finished(process)
    assert process.returncode == 0, printed
    return run


def kill_one(process: subprocess.Popen[str], run: Path, rank: int) -> list[int]:
    """Kill a rank after the second step's checkpoint; process ids of all ranks."""
    deadline = time.monotonic() + 300
    while not (run / "checkpoints" / "step_000002" / "COMPLETE").exists():
        assert process.poll() is None, finished(process)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[rank]), signal.SIGKILL)
    return [int(child) for child in children]


def assert_equal_runs(one: Path, other: Path) -> None:
    assert without_times(one) == without_times(other)
    name = "adapter/adapter_model.safetensors"
    assert (one / name).read_bytes() == (other / name).read_bytes()


def test_killed_on_two_ranks_the_command_goes_on_on_one(recipe_folder: Path, unbroken: Path, tmp_path: Path) -> None:
    process = train(2, recipe_folder, tmp_path / "run")
    try:
        children = kill_one(process, tmp_path / "run", rank=1)
    finally:
        printed = finished(process)
    assert process.returncode != 0, printed
    deadline = time.monotonic() + 15
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "a rank outlives the run"
        time.sleep(0.1)
    process = train(1, recipe_folder, tmp_path / "run")
    printed = finished(process)
    assert process.returncode == 0, printed
    assert_equal_runs(tmp_path / "run", unbroken)


def test_one_command_starts_all_ranks(recipe_folder: Path, unbroken: Path, tmp_path: Path) -> None:
    settings = (f"run.output_dir={tmp_path / 'run'}", "distributed.learners=2", HERE)
    process = started([sys.executable, "-m", "covey", "train", recipe_folder / "recipe.toml", *settings])
    printed = finished(process)
    assert process.returncode == 0, printed
    assert_equal_runs(tmp_path / "run", unbroken)
    process = started([sys.executable, "-m", "covey", "eval", tmp_path / "run"])  # needs no other ranks
    printed = finished(process)
    assert process.returncode == 0, printed


@pytest.mark.parametrize("mistake", ["model.model=/nowhere", 'rewards.functions=["/nowhere.py:f"]'])
def test_what_is_refused_is_said_once_and_not_started_again(recipe_folder: Path, tmp_path: Path, mistake: str) -> None:
    """By all ranks, or by rank 0 while the others are still loading."""
    settings = (f"run.output_dir={tmp_path / 'run'}", "distributed.learners=2", mistake, HERE)
    process = started([sys.executable, "-m", "covey", "train", recipe_folder / "recipe.toml", *settings])
    printed = finished(process)
    assert process.returncode == 2, printed
    assert "/nowhere" in printed[printed.rindex("covey: ") :]
    assert printed.count("covey: ") == 1
    assert "started again" not in printed


def test_the_launcher_starts_killed_ranks_again(recipe_folder: Path, unbroken: Path, tmp_path: Path) -> None:
    process = train(2, recipe_folder, tmp_path / "run", "--max-restarts", "1")
    try:
        kill_one(process, tmp_path / "run", rank=0)
    finally:
        printed = finished(process)
    assert process.returncode == 0, printed
    assert_equal_runs(tmp_path / "run", unbroken)
