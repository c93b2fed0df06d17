"""What a run on several ranks refuses, and who is told."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from covey import GRPOConfig, GRPOTrainer
from covey.distributed.ranks import Ranks
from covey.errors import ConfigError
from covey.training import launch


def lengths(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_several_learners_need_a_launcher(settings: dict[str, Any]) -> None:
    rows = [{"prompt": "say one: "}]
    with pytest.raises(ConfigError, match=r"distributed\.learners=3: this is one process; .*--nproc-per-node 3"):
        GRPOTrainer(reward_funcs=lengths, args=GRPOConfig(**settings, learners=3), train_dataset=rows)


def test_learners_and_torchrun_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match=r"distributed\.learners=2: torchrun has started 1"):
        launch.run(GRPOConfig(learners=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="MASTER_ADDR='': torchrun sets them"):
        launch.run(GRPOConfig())
    monkeypatch.setenv("WORLD_SIZE", "one")
    with pytest.raises(ConfigError, match="WORLD_SIZE='one'"):
        launch.run(GRPOConfig())


def test_it_is_refused_before_ranks_are_started(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("ranks were started"))
    with pytest.raises(ConfigError, match="nothing is sampled ahead"):
        launch.start_ranks(GRPOConfig(**settings, learners=2, max_staleness=1), ["train"])


def test_an_optimiser_of_ones_own_is_refused(settings: dict[str, Any]) -> None:
    backend = launch.RanksBackend(Ranks())
    rows = [{"prompt": "say one: "}, {"prompt": "say two: "}]
    trainer = GRPOTrainer(reward_funcs=lengths, args=GRPOConfig(**settings), train_dataset=rows, backend=backend)
    with pytest.raises(ConfigError, match="in one process only"):
        trainer.learner.use_optimizer(None)
