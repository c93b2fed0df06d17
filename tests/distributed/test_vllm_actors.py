"""Runs whose samplers are Ray actors with vLLM: a fake one here, and the real one with `make test-vllm`."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'covey[ray]'")

import ray
from fake_vllm import fake_python
from run_cases import events
from test_one_process import data
from test_ray import alive, name_of

from covey import GRPOConfig, GRPOTrainer
from covey.distributed.ray_members import RayMember
from covey.errors import ConfigError
from covey.observe.run_folder import RunFolder

REAL = (os.environ.get("COVEY_VLLM_PYTHON"), os.environ.get("COVEY_VLLM_MODEL"))
MARK = "COVEY_TEST_MARK"
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]


@pytest.fixture(scope="module", params=["fake", "real"])
def vllm(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """Settings for it, on a Ray of two CPUs."""
    if request.param == "real" and not all(REAL):
        pytest.skip("no vLLM here; see make test-vllm")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ[MARK] = f"{os.getpid()}"
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 200 << 20}
    ray.init(address="local", num_cpus=2, **quiet)
    python, model = REAL
    if request.param == "fake":
        python, model = fake_python(tmp_path_factory.mktemp("vllm")), str(model_folder)
    try:
        yield {
            **{"model": model, "vllm_python": str(python), "vllm_arguments": ["--max-model-len", "512"]},
            **{"sampler_kind": "vllm", "prompts_per_step": 4, "groups_per_unit": 1, "temperature": 1.0},
            **{"max_steps": 3, "eval_steps": 0, "save_steps": 0, "max_completion_length": 8},
        }
    finally:
        ray.shutdown()
        gc.collect()


def trained(vllm: dict[str, Any], settings: dict[str, Any], folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """The records of a run's steps."""
    args = GRPOConfig(**(settings | vllm | {"output_dir": str(folder)} | changes))
    rows = {} if "world" in changes else data()
    trainer = GRPOTrainer(args=args, **rows)
    trainer.train()
    trainer.close()
    records = [record for record in RunFolder.read(folder).read_metrics() if "loss" in record]
    assert len(records) == args.schedule.max_steps
    for record in records:
        assert record["sampling/sampling_logp_difference/max"] < 5e-3
        assert record["grad_norm"] > 0
    nothing_is_left()
    return records


def nothing_is_left(mark: str = "") -> None:
    deadline = time.monotonic() + 15
    while (left := vllms(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def vllms(mark: str = "") -> list[str]:
    """Processes of our runs that are vLLM's, or keep one: known by a variable that they have inherited."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            ours = f"{MARK}={mark or os.environ[MARK]}".encode() in (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        name = name_of(int(path.name))
        if ours and alive(int(path.name)) and any(word in name for word in ("covey-vllm", "VLLM::", "fake-engine")):
            found.append(name)
    return found


@pytest.mark.parametrize("samplers", [1, 2])
def test_a_run(vllm: dict[str, Any], settings: dict[str, Any], tmp_path: Path, samplers: int) -> None:
    records = trained(vllm, settings, tmp_path / "run", samplers=samplers)
    assert all(record["samplers/restarts"] == 0 for record in records)


def test_all_weights(vllm: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    trained(vllm, settings, tmp_path / "run", samplers=1, use_peft=False, learning_rate=1e-5)


def test_kills(vllm: dict[str, Any], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kill -9` of an actor in a unit and in a sync: the run goes on."""
    begin, load, count = RayMember.begin, RayMember.load, {"units": 0, "syncs": 0}

    def kill_soon(member: RayMember) -> None:
        os.kill(member.pid, signal.SIGSTOP)  # it cannot answer before it dies
        threading.Timer(0.3, os.kill, (member.pid, signal.SIGKILL)).start()

    def begin_(member: RayMember, *arguments: Any) -> Any:
        count["units"] += 1
        if count["units"] == 2:
            kill_soon(member)
        return begin(member, *arguments)

    def load_(member: RayMember, *arguments: Any) -> Any:
        count["syncs"] += 1
        if count["syncs"] == 4:
            kill_soon(member)
        return load(member, *arguments)

    monkeypatch.setattr(RayMember, "begin", begin_)
    monkeypatch.setattr(RayMember, "load", load_)
    trained(vllm, settings, tmp_path / "run", samplers=2)
    told = events(tmp_path / "run", "sampler")
    assert any("failed while sampling" in sentence for sentence in told)
    assert any("failed while taking weights" in sentence for sentence in told)


def test_agents(vllm: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    world = {
        **{"world": "house:rooms=2,num_train=6,num_eval=3", "action_format": "text", "max_conversation_tokens": 500},
        **{"max_completion_length": 16, "max_steps": 1, "eval_on_start": False, "eval_at_end": False},
        **{"vllm_arguments": ["--max-model-len", "512"], "entropy_coef": 0.01},  # random letters earn nothing
    }
    trained(vllm, settings, tmp_path / "run", **world, samplers=2)


def test_starts_that_fail(vllm: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    def refused(message: str, **changes: Any) -> None:
        args = GRPOConfig(**(settings | vllm | {"output_dir": str(tmp_path / "run"), "samplers": 1} | changes))
        with pytest.raises(ConfigError, match=message):
            GRPOTrainer(args=args, **data())
        nothing_is_left()

    refused("it does not start .*pip install vllm.*set distributed.vllm_python", vllm_python="/nowhere/python")
    refused("vLLM is not installed there", vllm_python=sys.executable)


def test_a_driver_that_is_killed_leaves_nothing(vllm: dict[str, Any], recipe_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [
        *(f"model.model={vllm['model']}", f"distributed.vllm_python={vllm['vllm_python']}"),
        *("distributed.sampler_kind=vllm", "distributed.samplers=1", "distributed.ray_address=local"),
        *(f"run.output_dir={folder}", "schedule.max_steps=60", "evaluation.eval_steps=0"),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "covey", "train", str(recipe_folder), *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", MARK: "driver"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 300
        while not [*(folder / "checkpoints").glob("step_*")]:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(vllms("driver")) >= 3  # who keeps it, its server, its core
    finally:
        process.kill()
        process.wait(timeout=30)
    nothing_is_left("driver")


def test_each_setting_reaches_its_actor(vllm: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    """Log-probabilities are those of all tokens at the temperature of training, whatever is cut."""
    for number, changes in enumerate(({"temperature": 0.7}, {"top_p": 0.8, "top_k": 20})):
        trained(vllm, settings, tmp_path / f"run-{number}", samplers=1, max_steps=1, **changes)
