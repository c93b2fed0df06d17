"""Small scripts of TRL's users, which the tests of this folder share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from covey.trl import GRPOConfig, GRPOTrainer

ROWS = [{"prompt": text, "number": n} for n, text in enumerate(["Flat is", "Simple is better", "Now is", "Errors"])]
SMALL: dict[str, Any] = {
    "learning_rate": 0.1,
    "per_device_train_batch_size": 3,
    "num_generations": 3,
    "max_completion_length": 8,
    "max_steps": 3,
    "report_to": "none",
    "disable_tqdm": True,
}
_PARTS = ("callbacks", "peft_config", "optimizers", "processing_class", "quantization_config")


def unique_letters(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(set(c if isinstance(c, str) else c[0]["content"]))) for c in completions]


def made(model: Any, out: Path, reward: Any = unique_letters, rows: Any = ROWS, *held_out: Any, **what: Any) -> Any:
    """A trainer of the model; `what` are settings beside `SMALL`, and the trainer's own arguments."""
    parts = {name: what.pop(name) for name in _PARTS if name in what}
    model = str(model) if isinstance(model, Path) else model
    return GRPOTrainer(model, reward, GRPOConfig(str(out), **(SMALL | what)), rows, *held_out, **parts)
