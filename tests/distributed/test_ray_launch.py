"""Learners that Ray starts: the numbers of one process, whatever dies. The command runs as a user runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'covey[ray]'")

from runs import RAY, await_checkpoint, ended_well, finished, learned, started, torchrun
from test_ray import assert_ended, descendants, name_of

from covey.observe.run_folder import RunFolder

pytestmark = RAY
LONG = ("schedule.max_steps=40", "evaluation.eval_steps=0")
Runs = dict[tuple[str, ...], Path]
"""Run folders, by further settings."""


@pytest.fixture
def command(recipe_folder: Path, tmp_path: Path, cluster: Any) -> list[object]:
    """Of two learners on the cluster."""
    return [
        *(sys.executable, "-m", "covey", "train", recipe_folder / "recipe.toml"),
        *(f"run.output_dir={tmp_path / 'run'}", "distributed.learners=2"),
        f"distributed.ray_address={cluster.address}",
    ]


@pytest.fixture(scope="module")
def unbroken(recipe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Of one learner."""
    folder = tmp_path_factory.mktemp("one")
    found: Runs = {}
    ahead = ("distributed.samplers=1", "schedule.max_staleness=1", "distributed.ray_address=local")
    for number, settings in enumerate([(), LONG, ahead]):
        where = (recipe_folder / "recipe.toml", f"run.output_dir={folder / str(number)}", *settings)
        ended_well(torchrun(1, "-m", "covey", "train", *where))
        found[settings[:2]] = folder / str(number)
    return found


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [line for line in RunFolder.read(run).read_metrics() if "loss" in line]


def run_to_its_end(command: list[object]) -> str:
    return ended_well(started(command))


def rank_0_of(process: subprocess.Popen[str]) -> int:
    [found] = [pid for pid in descendants(process.pid) if "PR_SET_PDEATHSIG" in name_of(pid)]
    return found


def hosts() -> set[int]:
    """Processes of the other ranks, on any node: this process has started them all."""
    return {pid for pid in descendants(os.getpid()) if "ray::RankHost" in name_of(pid)}


def test_ray_starts_what_torchrun_starts(command: list[object], tmp_path: Path, unbroken: Runs) -> None:
    printed = run_to_its_end(command)
    assert learned(tmp_path / "run") == learned(unbroken[()])
    assert "layout: 2 learners on the Ray cluster" in printed
    assert printed.count("step 6/6") == 1
    assert "pid=" not in printed
    here = [*command[:5], f"run.output_dir={tmp_path / 'torchrun'}", command[6], "distributed.ray_address=local"]
    assert "started by torchrun" in run_to_its_end(here)
    assert learned(tmp_path / "torchrun") == learned(unbroken[()])


@pytest.mark.parametrize("lost", ["rank 0", "rank 1", "a node"])
def test_what_is_lost_is_started_again(command: Any, tmp_path: Path, cluster: Any, unbroken: Runs, lost: str) -> None:
    process = started([*command, *LONG])
    try:
        await_checkpoint(process, tmp_path / "run", 6)
        [other] = hosts()
        if lost == "a node":
            raylet = int(Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[1])
            assert "raylet" in name_of(raylet)
            os.kill(raylet, signal.SIGKILL)  # which the rank would notice soon
        os.kill(rank_0_of(process) if lost == "rank 0" else other, signal.SIGKILL)
        if lost == "a node":
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    finally:
        printed = finished(process)
    assert process.returncode == 0, printed
    assert "all are started again (1 of 3)" in printed
    assert lost in printed or lost == "a node"
    assert learned(tmp_path / "run") == learned(unbroken[LONG])


def test_actors_sample_ahead_for_several_learners(command: list[object], tmp_path: Path, unbroken: Runs) -> None:
    settings = ("distributed.samplers=1", "schedule.max_staleness=1")
    printed = run_to_its_end([*command, *settings])
    assert learned(tmp_path / "run") == learned(unbroken[settings]), printed


@pytest.mark.parametrize("adapter", ["true", "false"])
def test_actors_are_given_what_learners_hold(command: Any, recipe_folder: Path, tmp_path: Path, adapter: str) -> None:
    settings = ["distributed.samplers=1", f"model.use_peft={adapter}", "distributed.learner_kind=sharded"]
    run_to_its_end([*command, *settings])
    run_to_its_end([*command[:5], f"run.output_dir={tmp_path / '1'}", "distributed.samplers=0", settings[1]])
    assert len(metrics_of(tmp_path / "run")) == 6
    for found, expected in zip(metrics_of(tmp_path / "run"), metrics_of(tmp_path / "1"), strict=True):
        for name in ("reward", "loss", "grad_norm", "kl"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=str)
def test_the_command_leaves_nothing(command: list[object], tmp_path: Path, unbroken: Runs, number: int) -> None:
    process = started([*command, *LONG, "run.save_steps=3"])
    family: set[int] = set()
    try:
        await_checkpoint(process, tmp_path / "run", 6)
        family = hosts() | {process.pid, rank_0_of(process)}
        assert len(family) == 3
        process.send_signal(number)
        assert_ended(family, seconds=45)  # 15 on a quiet machine
    finally:
        printed = finished(process)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[signal.Signals(number)]
    assert "Traceback" not in printed
    if number != signal.SIGKILL:
        assert "continue with `covey resume" in printed
    run_to_its_end([*command, *LONG, "run.save_steps=3"])
    assert learned(tmp_path / "run") == learned(unbroken[LONG])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("distributed.learners=4",), "learners=4: 4 CPUs and 0 GPUs are needed.* has 3 CPUs and 0 GPUs"),
        (("model.model=/nowhere",), "/nowhere"),
        (("schedule.max_staleness=1",), "nothing is sampled ahead"),
    ],
    ids=str,
)
def test_what_is_refused_is_said_once(command: list[object], settings: tuple[str, ...], message: str) -> None:
    process = started([*command, *settings])
    printed = " ".join(finished(process).split())
    assert process.returncode == 2, printed
    assert printed.count("covey: ") == 1, printed
    assert re.search(message, printed[printed.rindex("covey: ") :]), printed
    assert "started again" not in printed


def test_a_head_that_is_lost(command: list[object], tmp_path: Path) -> None:
    """The last test: the module's cluster is gone after it."""
    run, settings = tmp_path / "run", ("schedule.max_steps=100000", "evaluation.eval_steps=0", "run.save_steps=3")
    process = started([*command, *settings])
    try:
        deadline = time.monotonic() + 300
        while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < 4:
            assert process.poll() is None, finished(process)
            assert time.monotonic() < deadline
            time.sleep(0.1)
        [head] = [pid for pid in descendants(os.getpid()) if "gcs_server" in name_of(pid).split(" ")[0]]
        os.kill(head, signal.SIGKILL)
    finally:
        printed = " ".join(finished(process).split())
    assert process.returncode == 75, printed
    assert re.search("covey: the head of the Ray cluster, .*, has not answered for 20 s.*start again", printed)
    assert "continue with `covey resume" in printed
    assert list((run / "checkpoints").glob("step_*/COMPLETE"))
