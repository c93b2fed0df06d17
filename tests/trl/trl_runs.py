"""Small scripts of TRL's users, which the tests of this folder share."""

from __future__ import annotations  # tools and rewards whose annotations are texts

import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_tokenizer

from covey.trl import GRPOConfig, GRPOTrainer

ROWS = [{"prompt": text, "number": n} for n, text in enumerate(["Flat is", "Simple is better", "Now is", "Errors"])]
SMALL: dict[str, Any] = {"learning_rate": 0.1, "per_device_train_batch_size": 3, "num_generations": 3, "max_steps": 3}
SMALL |= {"max_completion_length": 8, "report_to": "none", "disable_tqdm": True}
_PARTS = tuple(inspect.signature(GRPOTrainer).parameters)[4:]
TOOLS = "{% for t in tools or [] %}<|im_start|>system\n{{ t['function']['name'] }}<|im_end|>\n{% endfor %}"
TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ '<tool_call>' + (c['function'] | tojson) + '</tool_call>' }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def unique_letters(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(set(c if isinstance(c, str) else c[0]["content"]))) for c in completions]


def messages(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


class Seen:
    __name__ = "seen"

    def __init__(self, reward: Callable[..., Any] = messages) -> None:
        self.reward, self.calls = reward, list[dict[str, Any]]()

    def __call__(self, **given: Any) -> Any:
        self.calls.append(given)
        return self.reward(**given)

    def all(self, name: str) -> list[Any]:
        return [value for given in self.calls for value in given[name]]


class Stream:
    """Rows that can only be read one after the other."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def tokenizer_of(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def made(model: Any, out: Path, reward: Any = unique_letters, rows: Any = ROWS, *held_out: Any, **what: Any) -> Any:
    """A trainer of the model; `what` are settings beside `SMALL`, and the trainer's own arguments."""
    parts = {name: what.pop(name) for name in _PARTS if name in what}
    model = str(model) if isinstance(model, Path) else model
    return GRPOTrainer(model, reward, GRPOConfig(str(out), **(SMALL | what)), rows, *held_out, **parts)


def weights(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def changed(trainer: GRPOTrainer, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, old in before.items() if not torch.equal(old, trainer.model.get_parameter(name))}


def trained(trainer: GRPOTrainer) -> GRPOTrainer:
    trainer.train()
    return trainer


def moved_by_training(trainer: GRPOTrainer) -> set[str]:
    """Names of the parameters that training changes; torchao's tensors cannot be compared, but are frozen."""
    named = [(name, p) for name, p in trainer.model.named_parameters() if type(p).__name__ != "Int8Tensor"]
    before = {name: parameter.detach().clone() for name, parameter in named}
    trainer.train()
    return {name for name, parameter in named if not torch.equal(before[name], parameter)}
