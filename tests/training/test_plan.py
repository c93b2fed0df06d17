"""The forecast from two steps: its parts, what they say of the run, and that it leaves nothing behind."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from covey import GRPOConfig, GRPOTrainer
from covey.cli.app import app
from covey.training.forecast import forecast
from covey.training.plan import Plan, measure


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def slow_reward(completions: list[str], **columns: Any) -> list[float]:
    time.sleep(2)
    return reward(completions)


def trainer_of(settings: dict[str, Any], reward: Any = reward, **changes: Any) -> GRPOTrainer:
    rows = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four", "five")]
    return GRPOTrainer(reward_funcs=reward, args=GRPOConfig(**settings | changes), train_dataset=rows)


def plan_of(settings: dict[str, Any], **changes: Any) -> Plan:
    return measure(trainer_of(settings, **changes))


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


def test_a_step_that_waits_for_its_rewards_costs_that_wait(settings: dict[str, Any]) -> None:
    """So slow that what else runs on the machine is nothing beside it."""
    plan = measure(trainer_of(settings, slow_reward))
    assert next(part.amount for part in plan.seconds if part.name == "rewards") > 2
    assert plan.step_seconds > 2


def test_the_steps_are_those_of_the_run(settings: dict[str, Any]) -> None:
    """The probe's two steps and the run's first two move the weights alike."""
    changes: dict[str, Any] = {"max_steps": 2, "lr_scheduler_type": "constant", "beta": 0.0}
    planned, trained = trainer_of(settings, **changes), trainer_of(settings, **changes)
    measure(planned)
    trained.train()
    ours, theirs = planned.policy.state_dict(), trained.policy.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_evaluations_are_those_that_will_be_made(settings: dict[str, Any]) -> None:
    for changes, wanted in (
        ({"eval_steps": 2}, 4),  # after steps 2, 4 and 5, and before the first
        ({"eval_steps": 2, "eval_at_end": False}, 3),
        ({"eval_on_start": False, "eval_at_end": False}, 0),
        ({"eval_on_start": False}, 1),
    ):
        trainer = trainer_of(settings, max_steps=5, **changes)
        trainer.eval_prompts = trainer.prompts[:1]
        assert measure(trainer).num_evaluations == wanted, changes


def test_the_reference_costs_only_where_it_is_used(settings: dict[str, Any]) -> None:
    parts = {part.name: part for part in plan_of(settings, beta=0.04).seconds}
    assert parts["reference log-probabilities"].amount > 1e-4
    assert parts["reference log-probabilities"].advice == "algorithm.beta=0: none"


def test_tied_groups_cost_no_update(settings: dict[str, Any]) -> None:
    rows = [{"prompt": "say one: "}]
    args = GRPOConfig(**settings | {"beta": 0.0})
    trainer = GRPOTrainer(reward_funcs=lambda completions, **_: [1.0] * len(completions), args=args, train_dataset=rows)
    plan = measure(trainer)
    assert plan.mixed_share == 0
    assert next(part.amount for part in plan.seconds if part.name == "update") == 0


def test_what_fewer_bits_save_by_hand(settings: dict[str, Any]) -> None:
    """A number of a linear layer takes 4 bits; each 64 share a scale of 8 bits, and 256 scales one of 32."""
    pytest.importorskip("bitsandbytes")
    plain = GRPOConfig(**settings)
    found = forecast(trainer_of(settings), plain)
    assert found is not None
    assert not found.savings
    config = plain.replace(quantization="nf4", optimizer="adamw_8bit", lora_r=32)
    trainer = GRPOTrainer(reward_funcs=reward, args=config, train_dataset=[{"prompt": "say"}])
    known = forecast(trainer, config)
    assert known is not None
    model = trainer.policy.model.get_base_model()
    frozen = [p for name, p in model.named_parameters() if "lora_" not in name]
    packed = sum(p.numel() for p in frozen if p.dtype == torch.uint8)
    others = sum(p.numel() for p in frozen if p.dtype != torch.uint8)
    scales = sum(2 * p.numel() // 64 for p in frozen if p.dtype == torch.uint8) + 14 * 4
    held, numbers = packed + scales + 4 * others, 2 * packed + others
    assert known.savings[0] == (
        f"the frozen model takes {held / 1e6:,.1f} MB (nf4); it would take {2 * numbers / 1e6:,.1f} MB in bfloat16 and "
        f"{4 * numbers / 1e6:,.1f} MB in float32"
    )
    parts = {part.name: part.amount for part in (*known.processes[0].held, *known.processes[0].sampling)}
    adapter = sum(p.nbytes for p in trainer.policy.trainable_parameters())
    assert parts["weights"] == held + adapter
    assert parts["engine's copy of the layers"] > 4 * 2 * packed
    assert "in place of" in known.savings[1]
    trainer.close()


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
