"""Rewards in Ray actors, on two simulated nodes: what the run learns is what one process learns."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'covey[ray]'")

import ray
from ray.cluster_utils import Cluster
from runs import data, learned

from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError, RewardError

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    small = {"num_cpus": 2, "object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        made.add_node(**small)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def train(by_units: dict[str, Any], cluster: Cluster) -> Callable[..., GRPOTrainer]:
    """Runs with these settings, beside each other."""

    def run(name: str, given: Any = None, **changes: Any) -> GRPOTrainer:
        where = {"output_dir": f"{by_units['output_dir']}-{name}", "ray_address": cluster.address}
        trainer = GRPOTrainer(args=GRPOConfig(**(by_units | where | changes)), **(data() if given is None else given))
        trainer.train()
        assert not ray.is_initialized()  # nothing outlives the run
        return trainer

    return run


def results(trainer: GRPOTrainer) -> tuple[list[str], bytes]:
    return learned(trainer.args.run.output_dir)


def test_workers_score_as_this_process(train: Callable[..., GRPOTrainer]) -> None:
    """Functions of a file, and those that only this program knows: a closure that nothing can import."""
    bonus = 0.25

    def here(completions: list[Any], trainer_state: Any, log_metric: Any, **columns: Any) -> list[float]:
        log_metric("seen", float(len(completions) > 0))
        return [bonus * trainer_state.global_step + len(str(c)) % 3 for c in completions]

    mine = data() | {"reward_funcs": [here, data()["reward_funcs"]]}
    alone = train("alone", mine)
    there = train("there", mine, reward_workers=2)
    assert results(there) == results(alone)
    steps = [record for record in there.state.log_history if "loss" in record]
    assert all(record["seen"] == 1.0 for record in steps)


def test_with_samplers_and_by_name(
    train: Callable[..., GRPOTrainer], recipe_folder: Path, by_units: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers import the user's file themselves."""
    monkeypatch.chdir(recipe_folder)
    named = {
        "functions": ("rewards.py:few_vowels",),
        "dataset": str(recipe_folder / "train.jsonl"),
        "max_steps": 2,
    }
    alone = train("alone", {}, samplers=0, **named)
    there = train("there", {}, samplers=2, reward_workers=2, **named)
    counted = ("samplers/",)
    folders = [Path(trainer.args.run.output_dir) for trainer in (alone, there)]
    assert learned(folders[0], without=counted) == learned(folders[1], without=counted)


def test_a_kill_and_a_hang_change_nothing(train: Callable[..., GRPOTrainer], tmp_path: Path) -> None:
    def score(completions: list[Any], trainer_state: Any, **columns: Any) -> list[float]:
        for step, number in ((1, signal.SIGKILL), (3, signal.SIGSTOP)):
            path = tmp_path / f"{step}"
            if trainer_state.global_step == step and not path.exists():
                path.touch()
                os.kill(os.getpid(), number)
        return [len(str(c)) % 3 + trainer_state.global_step for c in completions]

    for step in (1, 3):
        (tmp_path / f"{step}").touch()
    alone = train("alone", data() | {"reward_funcs": score})
    for step in (1, 3):
        (tmp_path / f"{step}").unlink()
    there = train("there", data() | {"reward_funcs": score}, reward_workers=2, timeout_seconds=8.0, reward_timeout=2.0)
    assert (tmp_path / "1").exists()
    assert (tmp_path / "3").exists()
    assert results(there) == results(alone)


def test_rows_that_three_workers_end_at(train: Callable[..., GRPOTrainer]) -> None:
    def deadly(completions: list[Any], **columns: Any) -> list[float]:
        os.kill(os.getpid(), signal.SIGKILL)
        return [0.0 for _ in completions]

    with pytest.raises(RewardError, match=r"3 reward workers failed one after another while they scored .*of the rows"):
        train("deadly", data() | {"reward_funcs": deadly}, reward_workers=2)
    assert not ray.is_initialized()


def refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
    assert not ray.is_initialized()


def test_what_cannot_be(train: Callable[..., GRPOTrainer], monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()

    def locked(completions: list[Any]) -> list[float]:
        with lock:
            return [0.0 for _ in completions]

    refused(
        lambda: train("locked", data() | {"reward_funcs": locked}, reward_workers=1),
        r"the reward function .*locked.* cannot be sent to another process .*name it in rewards.functions",
    )
    monkeypatch.setattr("covey.distributed.ray_cluster.PROBE_SECONDS", 1.0)
    refused(lambda: train("many", reward_workers=5), r"distributed.reward_workers=5: needs 5 CPU, 4 are free")
