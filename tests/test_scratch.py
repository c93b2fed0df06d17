"""`examples/grpo_from_scratch.py` runs: two steps on a tiny model, whose numbers are the trainer's own."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest
from tiny_models import tiny_model, tiny_tokenizer

FILE = Path(__file__).parents[1] / "examples" / "grpo_from_scratch.py"

TASK = '''
from covey.tasks import Task

class Vowels(Task):
    """The more vowels the better."""
    name = "vowels"
    @property
    def reward_funcs(self):
        def vowels(completions, **columns):
            return [sum(c in "aeiou" for c in text) / 8 for text in completions]
        return [vowels]
    def train_rows(self, seed):
        return [{"prompt": f"say {n}: "} for n in range(20)]
    def eval_rows(self):
        return [{"prompt": "say it: "}]
    def is_correct(self, text, row):
        return "a" in text
'''


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_from_scratch", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_steps(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "vowels.py").write_text(TASK)
    options = {"model": tmp_path / "model", "task": f"{tmp_path / 'vowels.py'}:Vowels", "learning-rate": 0.02}
    options |= {"prompts": 4, "group": 4, "tokens": 8}
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    rewards = example.main([*arguments, "--steps", "2"])
    assert len(rewards) == 2
    assert all(math.isfinite(reward) for reward in rewards)
    assert "before: " in (said := capsys.readouterr().out)
    assert "after: " in said
    longer = example.main([*arguments, "--steps", "20"])
    assert longer[:2] == rewards
    assert sum(longer[-5:]) > sum(longer[:5])  # it learns


def test_it_fits_on_a_page() -> None:
    assert len(FILE.read_text().splitlines()) <= 300
