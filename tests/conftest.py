"""A tiny run: a random two-layer Llama with a character tokenizer, saved as any user's model folder would be."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from command import Command
from fakes import SMALL
from what_runs import BUDGETS, room_of

# Tiny models gain nothing from a second thread, and threads that wait for each other on a busy machine cost minutes.
# torch reads this when it is first imported: by the tests that need it, not by the process that deals out the files.
os.environ.setdefault("OMP_NUM_THREADS", "1")

REWARDS = '''
def few_vowels(completions, **columns):
    """Between 0 and 1: the share of characters that are no vowels. Differs between completions of any model."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(ch not in "aeiou" for ch in text) / max(len(text), 1) for text in texts]
'''


REPOSITORY = Path(__file__).parents[1]
SECONDS: Counter[str] = Counter()
"""Test file -> seconds of its tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Rooms whose files are slow come first, so that no worker ends long after the other."""
    slow = ("distributed", "serving", "jax", "browser")
    items.sort(key=lambda item: item.path.parent.name not in slow)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not os.environ.get("PYTEST_XDIST_WORKER"):  # the process that collects from all
        SECONDS[report.location[0]] += report.duration


def over_budget(factor: float) -> dict[str, float]:
    """Room -> seconds, where these are more than `factor` times its budget."""
    rooms: Counter[str] = Counter()
    for path, seconds in SECONDS.items():
        rooms[room_of(path)] += seconds
    return {room: seconds for room, seconds in rooms.items() if seconds > factor * BUDGETS[room]}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep the seconds of each file. With COVEY_TEST_BUDGET=1 (2: on a machine half as fast) a room over its budget
    fails.
    """
    if factor := float(os.environ.get("COVEY_TEST_BUDGET") or 0):
        kept = REPOSITORY / "build" / "test_seconds.txt"
        kept.parent.mkdir(exist_ok=True)
        kept.write_text("".join(f"{seconds:8.1f} {path}\n" for path, seconds in SECONDS.most_common()))
        for room, seconds in over_budget(factor).items():
            print(f"\ntests/{room}: {seconds:.0f} s, over {factor:g} times its budget of {BUDGETS[room]} s")
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("tiny-llama")
    for part in (tiny_model("llama"), tiny_tokenizer()):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def recipe_folder(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("work")
    (folder / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four", "five", "six", "seven")]
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "held_out.jsonl").write_text("\n".join(json.dumps(row) for row in rows[:3]))
    (folder / "recipe.toml").write_text(f"""
algorithm = {{ beta = 0.04 }}
sampling = {{ num_generations = 4, max_completion_length = 8 }}
rewards = {{ functions = ["{folder / "rewards.py"}:few_vowels"] }}
optim = {{ learning_rate = 0.01 }}
schedule = {{ max_steps = 6 }}
evaluation = {{ eval_steps = 3 }}
run = {{ save_steps = 2, seed = 7 }}
[model]
model = "{model_folder}"
lora_r = 4
[data]
dataset = "{folder / "train.jsonl"}"
eval_dataset = "{folder / "held_out.jsonl"}"
prompts_per_step = 2
""")
    return folder


@pytest.fixture
def settings(model_folder: Path, tmp_path: Path) -> dict[str, Any]:
    """Flat settings of a run of a few steps."""
    return SMALL | {"model": str(model_folder), "output_dir": str(tmp_path / "run")}


@pytest.fixture
def covey(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("COLUMNS", "200")
    return Command(monkeypatch, capsys)
