"""Input that would be waited for, that overflows, or that is of the wrong type: one sentence each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey import GRPOConfig, GRPOTrainer
from covey.environments.base import get_world
from covey.errors import ConfigError, CoveyError, DataError, RewardError
from covey.rollout.calls import read_rewards
from covey.tasks.dataset import load_rows
from covey.training.setup import load_task


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


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


@pytest.mark.parametrize("field", ["loss_type", "lr_scheduler_type", "beta"])
def test_arrays_are_no_settings(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"{field}=[(\[]1, 2[)\]]: "):
        GRPOConfig(**{field: np.array([1, 2])})


def test_numbers_of_numpy_are_settings() -> None:
    config = GRPOConfig(learning_rate=np.float64(1e-4), num_generations=np.int64(4), reward_weights=np.array([1, 0.5]))
    assert config.to_dict() == GRPOConfig(learning_rate=1e-4, num_generations=4, reward_weights=[1.0, 0.5]).to_dict()


@pytest.mark.parametrize(
    ("path", "why"),
    [("a\0.jsonl", "NUL"), ("x" * 6000 + ".jsonl", "too long for a path"), ("\ud800.jsonl", "surrogate pair")],
)
def test_paths_that_are_none(path: str, why: str) -> None:
    with pytest.raises(DataError, match=why) as caught:
        load_rows(path)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("path", ["a\0b", None, 5.5])
def test_recipes_that_are_no_paths(path: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read .*; give the path of a TOML file"):
        GRPOConfig.from_toml(path)


def test_a_column_twice(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer,prompt\na,b,c\n")
    with pytest.raises(DataError, match=r"rows\.csv: its header has 'prompt' twice"):
        load_rows(tmp_path / "rows.csv")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"args": {"beta": 0.1}}, r"args=\{'beta': 0\.1\}: a dict; pass a GRPOConfig"),
        ({"args": "runs/first"}, "args='runs/first': a str; pass a GRPOConfig"),
        ({"callbacks": 5}, "callbacks=5: a int; pass a list"),
        ({"callbacks": [print]}, "built-in function print> has no method such as on_step_end"),
        ({"model": 5}, "model=5: a int is no model"),
        ({"model": dict}, "model=<class 'dict'>: a type is no model"),
        ({"processing_class": 5}, "processing_class=5: a int is no tokenizer"),
        ({"peft_config": 5}, "peft_config=5: a int; pass a peft.LoraConfig"),
    ],
)
def test_arguments_of_the_wrong_kind(settings: dict[str, Any], given: dict[str, Any], message: str) -> None:
    usual = {"args": GRPOConfig(**settings), "reward_funcs": length, "train_dataset": [{"prompt": "a"}]}
    with pytest.raises(CoveyError, match=message):
        GRPOTrainer(**(usual | given))


def test_what_a_trainer_is_asked_later(settings: dict[str, Any]) -> None:
    with pytest.raises(CoveyError, match=r"model\.lora_target_modules='\(': PEFT cannot attach it"):
        GRPOTrainer(
            reward_funcs=length, args=GRPOConfig(**settings, lora_target_modules="("), train_dataset=[{"prompt": "a"}]
        )
    trainer = GRPOTrainer(reward_funcs=length, args=GRPOConfig(**settings), train_dataset=[{"prompt": "a"}])
    for resume, why in ((5, "a int is no path"), ("a\0b", "NUL")):
        with pytest.raises(ConfigError, match=f"resume_from_checkpoint=.*{why}"):
            trainer.train(resume_from_checkpoint=resume)  # type: ignore[arg-type]
    for folder, why in ((5, "a int is no path"), ("a\0b", "NUL"), ("/proc/nothing", "cannot write")):
        with pytest.raises(CoveyError, match=why):
            trainer.save_model(folder)  # type: ignore[arg-type]
