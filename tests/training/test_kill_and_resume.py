"""A run that is really killed (SIGKILL) and resumed gives the numbers of the unbroken run, bit for bit; one of version
0.1.0 resumes too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_runs import same_weights, slow, steps_of
from typer.testing import CliRunner

from covey import GRPOConfig
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
VOLATILE = ("agent/waiting_share", "time/", "memory/", "step_time", "eval/seconds")


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(*arguments: object) -> str:
    """A command in this process, where everything is imported already; only what is killed needs its own."""
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def killed(where: str, at: int, *arguments: object) -> None:
    """A command in a process of its own, which is killed at its `at`-th time in a phase."""
    command = [sys.executable, "-c", DRIVER, where, *map(str, (at, *arguments))]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as it:
        try:
            assert it.stdout.readline().strip() == "PAUSED"
        finally:
            it.kill()


def numbers(folder: Path) -> list[dict[str, Any]]:
    records = RunFolder.read(folder).read_metrics()
    return [{k: v for k, v in record.items() if not k.startswith(VOLATILE)} for record in records]


@pytest.fixture(scope="module")
def unbroken(recipe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    run("train", recipe_folder, f"run.output_dir={folder}")
    return folder


# The checkpoint of step 4 (its second file), the third sampling, and the update of step 5.
@pytest.mark.parametrize(("where", "at"), [("checkpoint", 5), slow("sampling", 3), slow("update", 5)])
def test_killed_run_resumes_to_the_same_bits(
    where: str, at: int, recipe_folder: Path, unbroken: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    killed(where, at, "train", recipe_folder, f"run.output_dir={folder}")
    assert not (folder / "adapter").exists()
    run("resume", folder)
    assert numbers(folder) == numbers(unbroken)
    assert same_weights(*(load_file(each / "adapter" / "adapter_model.safetensors") for each in (folder, unbroken)))


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_killed_at_random_moments_again_and_again(recipe_folder: Path, unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for delay in (0.3, 1.1, 0.7, 1.6):
        arguments = ("resume", folder) if folder.exists() else ("train", recipe_folder, f"run.output_dir={folder}")
        before, end = len(lines_of(folder / "events.jsonl")), time.monotonic() + 60
        command = [sys.executable, "-m", "covey", *map(str, arguments)]
        with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL) as process:
            while len(lines_of(folder / "events.jsonl")) <= before and time.monotonic() < end:
                time.sleep(0.02)  # until it has started or resumed
            time.sleep(delay)
            process.kill()
    run("resume", folder)
    assert numbers(folder) == numbers(unbroken)


def test_a_finished_run_resumes_to_itself(unbroken: Path) -> None:
    before = numbers(unbroken)
    run("resume", unbroken)
    assert numbers(unbroken) == before
    assert [json.loads(line)["step"] for line in lines_of(unbroken / "metrics.jsonl")] == [0, 1, 2, 3, 3, 4, 5, 6, 6]


def test_corrupt_checkpoint_falls_back(unbroken: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(unbroken, tmp_path / "run"))
    last = folder / "checkpoints" / "step_000006" / "policy.safetensors"
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    run("resume", folder)
    assert numbers(folder) == numbers(unbroken)


ARCHIVE = Path(__file__).parents[1] / "fixtures" / "run-of-0.1.0.tar.gz"
"""Two runs of four steps by version 0.1.0 that were stopped after the checkpoint of step 2 (single answers, and agents
in the house), what their last two steps gave, and that version's recipes."""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    for path in (*folder.rglob("*.toml"), *folder.rglob("adapter_config.json")):
        path.write_text(path.read_text().replace("/tmp/FIXTURE", str(folder)))  # where it was when they were written
    return folder


@pytest.mark.parametrize(
    ("name", "weights", "metrics"), [("run", "adapter", "metrics"), ("agents", "agents", "agents_metrics")]
)
def test_a_run_of_an_earlier_version_resumes_to_the_numbers_it_would_have_had(
    earlier: Path, name: str, weights: str, metrics: str
) -> None:
    run("resume", earlier / name)
    ours = load_file(earlier / name / "adapter/adapter_model.safetensors")
    theirs = load_file(earlier / f"expected/{weights}.safetensors")
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)  # another processor rounds otherwise
    before = [line for line in map(json.loads, lines_of(earlier / f"expected/{metrics}.jsonl")) if "loss" in line]
    after = steps_of(earlier / name)
    assert [record["step"] for record in after] == [1, 2, 3, 4]
    for number in ("loss", "grad_norm", "reward"):
        assert [r[number] for r in after] == pytest.approx([r[number] for r in before], rel=1e-3, abs=1e-6)


def test_adapters_and_recipes_of_an_earlier_version_are_loaded(earlier: Path) -> None:
    run("sample", earlier / "model", "say one: ", "--adapter", earlier / "run" / "adapter")
    recipes = list((earlier / "recipes").rglob("*.toml"))
    assert len(recipes) == 12
    for path in recipes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = GRPOConfig.from_toml(path)
        assert GRPOConfig(**config.to_dict()) == config, path
