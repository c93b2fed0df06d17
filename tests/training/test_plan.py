"""The forecast: its arithmetic by hand, its schedule against the engine's, and that it leaves nothing behind."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import END_ID, tiny_model
from typer.testing import CliRunner

from covey import GRPOConfig, GRPOTrainer
from covey.cli import app
from covey.pytorch.engine import Engine
from covey.training.plan import Plan, count_decode_steps, fit_decode, make_plan
from covey.types import Request, SamplingSettings


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def slow_reward(completions: list[str], **columns: Any) -> list[float]:
    """So slow that what else runs on the machine is nothing beside it."""
    time.sleep(0.2)
    return reward(completions)


def trainer_of(settings: dict[str, Any], reward: Any = reward, **changes: Any) -> GRPOTrainer:
    rows = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four", "five")]
    return GRPOTrainer(reward_funcs=reward, args=GRPOConfig(**settings | changes), train_dataset=rows)


def test_a_decode_step_is_a_line_in_its_rows() -> None:
    assert fit_decode([1, 2, 4, 8], [3.0, 5.0, 9.0, 17.0]) == pytest.approx((1.0, 2.0))
    assert fit_decode([4, 4], [1.0, 3.0]) == pytest.approx((0.0, 0.5))  # one point says nothing about a line
    assert fit_decode([1, 2], [1.0, 3.0]) == pytest.approx((0.0, 7 / 5))  # the line would begin below 0
    assert fit_decode([1, 2], [3.0, 1.0]) == pytest.approx((2.0, 0.0))  # nor does a larger batch cost less
    assert fit_decode([], []) == (0.0, 0.0)


def test_completions_take_free_slots_in_order() -> None:
    # two slots: 5 tokens (4 steps) | 3 tokens (2 steps), then 2 tokens (1 step)
    assert count_decode_steps([5, 3, 2], 2) == (4, 7)
    assert count_decode_steps([5, 3, 2], 1) == (7, 7)
    assert count_decode_steps([5, 3, 2], 9) == (4, 7)
    assert count_decode_steps([1, 1], 1) == (0, 0)
    assert count_decode_steps([], 4) == (0, 0)


@pytest.mark.parametrize("slots", [1, 3, 5, 64])
def test_the_schedule_is_the_engines(slots: int) -> None:
    engine = Engine(tiny_model("llama"), max_batch_size=slots)
    requests = [Request(np.array([5, 6, 7]), (slots, i)) for i in range(17)]
    settings = SamplingSettings(max_tokens=20, eos_token_ids=(END_ID, *range(30, 38)))
    lengths = [len(c.token_ids) for c in engine(requests, settings, policy_version=0)]
    assert len(set(lengths)) > 3
    stats = engine.last_stats
    assert (stats.decode_steps, sum(stats.step_rows)) == count_decode_steps(lengths, slots)
    assert len(stats.step_seconds) == stats.decode_steps
    assert sum(stats.step_seconds) == pytest.approx(stats.decode_seconds)


def plan_of(settings: dict[str, Any], **changes: Any) -> Plan:
    return make_plan(trainer_of(settings, **changes))


def test_a_plan_has_every_part_and_writes_nothing(settings: dict[str, Any]) -> None:
    plan = plan_of(settings, max_steps=10, beta=0.0)
    assert not Path(settings["output_dir"]).exists()
    assert all(part.amount >= 0 for part in (*plan.seconds, *plan.memory))
    parts = {part.name: part.amount for part in plan.seconds}
    assert parts["update"] > 0
    assert parts["reference log-probabilities"] < 1e-3  # beta is 0
    assert plan.run_seconds == pytest.approx(10 * sum(parts.values()))
    assert plan.peak_bytes == pytest.approx(sum(part.amount for part in plan.memory))
    assert 1 <= plan.mean_length <= settings["max_completion_length"]


def test_work_that_grows_is_predicted_to_cost_more(settings: dict[str, Any]) -> None:
    """Eight times the completions, of which the probe samples the same 64: counts, which no clock can disturb."""
    small, large = (
        trainer_of(settings, slow_reward, num_generations=32),
        trainer_of(settings, slow_reward, num_generations=32, prompts_per_step=16),
    )
    plans = [make_plan(trainer) for trainer in (small, large)]
    assert small.engine.last_stats.decoded_tokens == large.engine.last_stats.decoded_tokens
    keys = [next(part.amount for part in plan.memory if part.name == "keys and values") for plan in plans]
    assert keys[1] >= keys[0]
    rewards = [next(part.amount for part in plan.seconds if part.name == "rewards") for plan in plans]
    assert rewards[1] > 2 * rewards[0]


def test_the_reference_costs_only_where_it_is_used(settings: dict[str, Any]) -> None:
    parts = {part.name: part for part in plan_of(settings, beta=0.04).seconds}
    assert parts["reference log-probabilities"].amount > 1e-4
    assert parts["reference log-probabilities"].advice == "algorithm.beta=0: none"


def test_tied_groups_cost_no_update(settings: dict[str, Any]) -> None:
    rows = [{"prompt": "say one: "}]
    args = GRPOConfig(**settings | {"beta": 0.0})
    trainer = GRPOTrainer(reward_funcs=lambda completions, **_: [1.0] * len(completions), args=args, train_dataset=rows)
    plan = make_plan(trainer)
    assert plan.mixed_share == 0
    assert next(part.amount for part in plan.seconds if part.name == "update") == 0


def test_the_command_prints_totals_and_advice(recipe_folder: Path, tmp_path: Path) -> None:
    arguments = ["plan", str(recipe_folder), f"run.output_dir={tmp_path / 'run'}"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "one step" in shown.output
    assert "peak memory of the process" in shown.output
    assert "6 steps with 3 evaluations" in " ".join(shown.output.split())
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert found["steps"] == 6
    assert found["step_seconds"] == pytest.approx(sum(part["amount"] for part in found["seconds"]))
    assert not (tmp_path / "run").exists()
