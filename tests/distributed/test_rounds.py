"""Agents on ranks: turns in rounds, whose numbers depend neither on who samples nor on how fast worlds are."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_cases import learned
from test_ranks import finished, torchrun

from covey import GRPOConfig, GRPOTrainer
from covey.distributed import in_turns
from covey.distributed.ranks import Ranks
from covey.environments.pool import EnvironmentPool
from covey.observe.run_folder import RunFolder
from covey.training.launch import RanksBackend

WORLD = {
    "world": "house:rooms=2,num_train=6,num_eval=3",
    "max_conversation_tokens": 600,
    "max_completion_length": 16,
    "eval_on_start": False,
}
CHOICE = {"action_format": "choice"}
STEPS = {"history_length": 1, "max_conversation_tokens": 400, **CHOICE}


@pytest.fixture
def play(settings: dict[str, Any], tmp_path: Path) -> Callable[..., tuple[Any, list[list[str]]]]:
    def played(name: str, *, ranks: bool = True, **changes: Any) -> tuple[Any, list[list[str]]]:
        folder = tmp_path / name
        args = GRPOConfig(**(settings | WORLD | changes | {"output_dir": str(folder)}))
        GRPOTrainer(args=args, backend=RanksBackend(Ranks()) if ranks else None).train()
        said = [[row["completion"] for row in RunFolder.read(folder).read_completions(step)] for step in (1, 2)]
        return learned(folder, without=("agent/waiting_share", "eval/agent/waiting_share")), said

    return played


@pytest.mark.parametrize("how", [CHOICE, STEPS, {"action_format": "tags", "parallel_episodes": 3}], ids=str)
def test_the_speed_of_worlds_and_who_samples_change_nothing(
    play: Any, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = play("first", **how)
    wait, luck = EnvironmentPool.wait, random.Random(5)
    held: list[Any] = []

    def one_at_a_time(pool: EnvironmentPool, seconds: float | None = None) -> list[Any]:
        if not held:
            held.extend(wait(pool, seconds))
        return [held.pop(luck.randrange(len(held)))] if held else []

    def backwards(ranks: Ranks, sizes: list[int], work: Any) -> list[Any]:
        found = {number: result for number in reversed(range(len(sizes))) for result in work([number])}
        return [found[number] for number in range(len(sizes))]

    monkeypatch.setattr(EnvironmentPool, "wait", one_at_a_time)
    monkeypatch.setattr(in_turns, "run_shared", backwards)
    assert play("again", **how) == first


def test_what_is_said_is_what_one_process_says(play: Any) -> None:
    """In the first step: then weights differ in their last digits."""
    _, here = play("here", ranks=False, **CHOICE)
    _, there = play("there", **CHOICE)
    assert there[0] == here[0]
    assert sum(a == b for a, b in zip(there[1], here[1], strict=True)) >= 7


def test_one_and_two_ranks_have_the_same_bits(recipe_folder: Path, tmp_path: Path) -> None:
    recipe = (recipe_folder / "recipe.toml").read_text()
    model = next(line for line in recipe.splitlines() if line.startswith("model ="))
    (tmp_path / "agents.toml").write_text(
        f"""
[model]
{model}
lora_r = 4
[sampling]
num_generations = 4
max_completion_length = 16
[data]
prompts_per_step = 2
[environment]
world = "{WORLD["world"]}"
action_format = "choice"
max_conversation_tokens = 600
[schedule]
max_steps = 2
[evaluation]
eval_on_start = false
[distributed]
groups_per_unit = 1
"""
    )
    runs = []
    for ranks in (1, 2):
        folder = tmp_path / f"run-{ranks}"
        process = torchrun(ranks, "-m", "covey", "train", tmp_path / "agents.toml", f"run.output_dir={folder}")
        printed = finished(process)
        assert process.returncode == 0, printed[-3000:]
        runs.append(learned(folder, without=("agent/waiting_share", "eval/agent/waiting_share")))
    assert runs[0] == runs[1]
