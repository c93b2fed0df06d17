"""A run that is really killed (SIGKILL) and resumed gives the numbers of the unbroken run, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from covey.cli.app import app
from covey.observe.run_folder import RunFolder

# Sleeps where it is told to, so that the kill lands in the phase that is tested.
DRIVER = """
import sys, time
from covey.cli.app import main
from covey.rollout import collect
from covey.training import checkpoint
from covey.pytorch import learner

where, at = sys.argv[1], int(sys.argv[2])
calls = {"n": 0}

def pause(function):
    def wrapped(*args, **kwargs):
        calls["n"] += 1
        if calls["n"] == at:
            print("PAUSED", flush=True)
            time.sleep(60)
        return function(*args, **kwargs)
    return wrapped

if where == "sampling":
    collect.collect_groups = pause(collect.collect_groups)
elif where == "update":
    learner.Learner.optim_step = pause(learner.Learner.optim_step)
elif where == "checkpoint":
    checkpoint._save_group = pause(checkpoint._save_group)
sys.argv = ["covey", *sys.argv[3:]]
main()
"""
VOLATILE = ("time/", "memory/", "step_time", "eval/seconds")


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(*arguments: str) -> None:
    """A command in this process, where everything is imported already; only what is killed needs its own."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output


def killed(where: str, at: int, *arguments: str) -> None:
    """A command in a process of its own, which is killed at its `at`-th time in a phase."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, where, str(at), *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "PAUSED"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        process.stdout.close()


def numbers(folder: Path) -> list[dict[str, Any]]:
    records = RunFolder.read(folder).read_metrics()
    return [{k: v for k, v in record.items() if not k.startswith(VOLATILE)} for record in records]


@pytest.fixture(scope="module")
def unbroken(recipe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    run("train", str(recipe_folder), f"run.output_dir={folder}")
    return folder


# The third sampling, the update of step 5, and the checkpoint of step 4 (its second file).
@pytest.mark.parametrize(
    ("where", "at"),
    [
        ("checkpoint", 5),
        pytest.param("sampling", 3, marks=pytest.mark.slow),
        pytest.param("update", 5, marks=pytest.mark.slow),
    ],
)
def test_killed_run_resumes_to_the_same_bits(
    where: str, at: int, recipe_folder: Path, unbroken: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    killed(where, at, "train", str(recipe_folder), f"run.output_dir={folder}")
    assert not (folder / "adapter").exists()
    run("resume", str(folder))

    assert numbers(folder) == numbers(unbroken)
    ours = load_file(folder / "adapter" / "adapter_model.safetensors")
    theirs = load_file(unbroken / "adapter" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_killed_at_random_moments_again_and_again(recipe_folder: Path, unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for delay in (0.3, 1.1, 0.7, 1.6):
        started = folder.exists()
        arguments = ("resume", str(folder)) if started else ("train", str(recipe_folder), f"run.output_dir={folder}")
        before = events(folder)
        process = subprocess.Popen(
            [sys.executable, "-m", "covey", *arguments], env=environment(), stderr=subprocess.DEVNULL
        )
        try:
            wait_for(lambda before=before: events(folder) > before, process)  # started or resumed
            time.sleep(delay)
        finally:
            process.kill()
            process.wait(timeout=30)
    run("resume", str(folder))
    assert numbers(folder) == numbers(unbroken)


def events(folder: Path) -> int:
    path = folder / "events.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def wait_for(condition: Any, process: subprocess.Popen[Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)


def test_a_finished_run_resumes_to_itself(unbroken: Path) -> None:
    before = numbers(unbroken)
    run("resume", str(unbroken))
    assert numbers(unbroken) == before


def test_corrupt_checkpoint_falls_back(unbroken: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(unbroken, tmp_path / "run"))
    last = folder / "checkpoints" / "step_000006" / "policy.safetensors"
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    run("resume", str(folder))
    assert numbers(folder) == numbers(unbroken)


def test_metrics_are_json_lines(unbroken: Path) -> None:
    lines = (unbroken / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
