"""Runs that the tests of this room look at."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey import GRPOTrainer
from covey.config import GRPOConfig
from covey.observe.run_folder import RunFolder


def few_letters(completions: list[Any], **columns: Any) -> list[float]:
    return [len(set(messages[0]["content"])) / 10 for messages in completions]


def has_a(completions: list[Any], **columns: Any) -> list[float]:
    return [float("a" in messages[0]["content"]) for messages in completions]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> list[Path]:
    """Two runs of four steps, with two evaluations and two ledgers, that differ in learning rate and temperature."""
    root = tmp_path_factory.mktemp("watched")
    rows = [{"prompt": [{"role": "user", "content": f"say {word}"}]} for word in ("one", "two", "three", "four")]
    for name, rate, temperature in (("a", 1e-2, 1.0), ("b", 0.3, 0.5)):
        args = GRPOConfig(
            model=str(model_folder), output_dir=str(root / name), num_generations=4, prompts_per_step=2, max_steps=4,
            lora_r=4, max_completion_length=8, learning_rate=rate, temperature=temperature, progress=False,
            eval_steps=4, ledger="off,all:2", beta=0.01, correctness="has_a",
        )  # fmt: skip
        GRPOTrainer(reward_funcs=[few_letters, has_a], args=args, train_dataset=rows, eval_dataset=rows).train()
    return [root / "a", root / "b"]


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., RunFolder]:
    """Makes a run that has these completions of its first steps, and these of its evaluations."""

    def write(*tables: list[dict[str, Any]], **evaluations: list[dict[str, Any]]) -> RunFolder:
        with RunFolder.create(tmp_path / "run") as run:
            for step, rows in enumerate(tables, 1):
                run.write_completions(step, rows)
            for name, rows in evaluations.items():
                run.write_completions(int(name.removeprefix("at_")), rows, "eval")
        return run

    return write
