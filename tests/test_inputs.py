"""Input that would be waited for, that overflows, or that is of the wrong type: one sentence each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from covey import GRPOConfig
from covey.environments.registry import get_world
from covey.errors import ConfigError, CoveyError, DataError, RewardError
from covey.rollout.returned import read_rewards
from covey.tasks.dataset import load_rows
from covey.training.setup import load_task


def test_pipes_are_refused(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "recipe.toml"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="is a pipe or a device"):
        load_rows(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match="is no file"):
        GRPOConfig.from_toml(tmp_path / "recipe.toml")


@pytest.mark.parametrize("value", [1e300, -2e30, 10**400])
def test_rewards_that_overflow_are_refused_in_short(value: float) -> None:
    with pytest.raises(RewardError, match=r"larger than 1e\+30") as caught:
        read_rewards("f", [value], ["0"])
    assert len(str(caught.value)) < 300
    assert read_rewards("f", [1e30], ["0"]).tolist() == [1e30]


def test_values_of_the_wrong_type_are_named() -> None:
    with pytest.raises(ConfigError, match="rooms='abc' is str, and must be a whole number"):
        get_world("house:rooms=abc")
    with pytest.raises(CoveyError, match=r"optim\.learning_rate=inf: must be finite"):
        GRPOConfig(learning_rate=float("inf"))
    with pytest.raises(ConfigError, match=r"data\.dataset='a\.jsonl': it does not go with data\.task='arithmetic'"):
        load_task(GRPOConfig(task="arithmetic", dataset="a.jsonl"))
