"""The model card says what the run folder says."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from covey.observe.card import model_card
from covey.observe.run_folder import RunFolder

CONFIG = """
[model]
model = "me/base"
use_peft = false
lora_r = 16

[data]
task = "arithmetic"

[optim]
learning_rate = 1e-5

[run]
seed = 3
"""


def evaluation(right: float, low: float, high: float) -> dict[str, float]:
    return {
        "eval/reward": right,
        "eval/accuracy": right,
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/num_completions": 200.0,
    }


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_config(CONFIG)
        folder.append_metrics(0, evaluation(0.41, 0.344, 0.479))
        for step in (1, 2, 3):
            folder.append_metrics(step, {"reward": 0.5, "rewards/right/mean": 0.5, "rewards/short/mean": 0.1})
        folder.append_metrics(2, evaluation(0.625, 0.556, 0.689))
        folder.append_metrics(3, evaluation(0.9, 0.85, 0.93))
    return RunFolder.read(tmp_path / "run")


def test_of_the_last_step(run: RunFolder) -> None:
    card = ModelCard(model_card(run, name="me/mine", base_model="me/base", tags=["numbers"]))
    assert card.data.base_model == "me/base"
    assert {"covey", "numbers"} <= set(card.data.tags)
    assert card.data.eval_results[0].metric_value == 0.9
    assert "| before | 0 | accuracy 41 % | 34.4 to 47.9 % | 200 |" in card.text
    assert "| after | 3 | accuracy 90 % | 85 to 93 % | 200 |" in card.text
    for sentence in ("Data: arithmetic", "Rewards: right, short", "`optim.learning_rate`: 1e-05", "`run.seed`: 3"):
        assert sentence in card.text
    assert "lora_r" not in card.text  # all weights were trained
    assert "learning_curve.png" not in card.text  # there is none


def test_of_an_earlier_step(run: RunFolder) -> None:
    text = model_card(run, name="me/mine", base_model="me/base", step=2, kind="adapter")
    assert "| after | 2 | accuracy 62.5 % | 55.6 to 68.9 % | 200 |" in text
    assert "90 %" not in text
    assert "AutoPeftModelForCausalLM" in text


def test_what_is_on_this_machine_has_no_path(run: RunFolder, tmp_path: Path) -> None:
    text = model_card(run, name="mine", base_model=str(tmp_path), dataset_name="me/rows")
    assert str(tmp_path) not in text
    assert ModelCard(text).data.base_model is None
    assert ModelCard(text).data.datasets == ["me/rows"]
