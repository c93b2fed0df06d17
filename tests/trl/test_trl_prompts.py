"""Before a run of `covey.trl` begins: templates without the user's text, references that are none, opened thoughts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_tokenizer

from covey.errors import CoveyError
from covey.rewards import numeric_match
from covey.trl import GRPOConfig, GRPOTrainer
from covey.trl.rewards import think_format_reward

SMALL: dict[str, Any] = {
    "learning_rate": 0.1,
    "per_device_train_batch_size": 2,
    "num_generations": 2,
    "max_completion_length": 4,
    "max_steps": 1,
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
}
ROWS = [{"prompt": [{"role": "user", "content": text}], "answer": 5} for text in ("Flat is", "Now is")]


def unique_letters(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(set(completion[0]["content"]))) for completion in completions]


def trainer(model: Path, output: Path, reward: Any, rows: list[dict[str, Any]], template: str) -> GRPOTrainer:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    args = GRPOConfig(output_dir=str(output), **SMALL)
    return GRPOTrainer(str(model), reward, args, rows, processing_class=tokenizer)


def test_a_template_without_the_users_text_is_refused_at_the_start(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CoveyError, match="leaves out what the user says") as refused:
        trainer(model_folder, tmp_path, unique_letters, ROWS, "{{ messages[0]['text'] }}answer: ")
    assert "answer: " in str(refused.value)
    assert "chat_template_kwargs" in str(refused.value)


def test_a_reference_that_is_none_is_refused_at_the_start(model_folder: Path, tmp_path: Path) -> None:
    rows = [ROWS[0], {**ROWS[1], "answer": "five or so"}]
    with pytest.raises(CoveyError, match="answer='five or so' is not a number"):
        trainer(model_folder, tmp_path, numeric_match(), rows, "{{ messages[0]['content'] }}")


def test_the_run_knows_that_the_template_opened_the_thought(model_folder: Path, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def my_format(completions: list[Any], prompt_ends: list[str], **columns: Any) -> list[float]:
        seen.append(prompt_ends)
        return think_format_reward(completions, prompt_ends=prompt_ends)

    run = trainer(model_folder, tmp_path, my_format, ROWS, "{{ messages[0]['content'] }}{{ ' <think>' }}")
    run.train()
    assert all(end.endswith("<think>") for ends in seen for end in ends)
    (record,) = (json.loads(line) for line in (tmp_path / "covey" / "metrics.jsonl").read_text().splitlines()[:1])
    assert record["prompts/opened_tag"] == 1.0
