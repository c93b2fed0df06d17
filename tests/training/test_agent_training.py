"""Agents trained in the bundled world, on a tiny model, through trainer and command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command import Command
from covey import GRPOConfig, GRPOTrainer
from covey.algorithms import Outcomes
from covey.environments import EnvironmentPool
from covey.errors import ConfigError, EpisodeError
from covey.observe import describe_metric
from covey.observe.completions import read_table
from covey.observe.run_folder import RunFolder
from covey.recipes.house.house import House
from covey.training.agents import make_collector
from covey.types import SamplingSettings

sys.path.insert(0, str(Path(__file__).parents[1] / "environments"))
from worlds import Breaking, Unimportable


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture
def playing(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {
        "world": "house:rooms=2,num_train=6,num_eval=3",
        "max_steps": 2,
        "max_conversation_tokens": 600,
        "invalid_action_penalty": 0.1,
        "action_format": "choice",
        "max_completion_length": 16,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"history_length": 1, "max_conversation_tokens": 400},
        slow({"adv_estimator": "naive_grpo", "norm_adv_by_std_in_grpo": False}),
        slow({"adv_estimator": "gigpo", "adv_parameters": {"discount": 0.9}, "beta": 0.0}),
        slow({"action_format": "tags", "loss_type": "dapo"}),
        slow({"action_format": "tool", "dynamic_sampling": 3}),
        slow({"max_generations": 9, "max_steps": 2}),
    ],
    ids=str,
)
def test_every_variant_trains(playing: dict[str, Any], changes: dict[str, Any]) -> None:
    trainer = GRPOTrainer(args=GRPOConfig(**(playing | changes)))
    trainer.train()
    folder = RunFolder.read(playing["output_dir"])
    steps = [record for record in folder.read_metrics() if "loss" in record]
    assert len(steps) == 2
    for record in steps:
        undefined = [name for name in record if describe_metric(name) is None]
        assert undefined == []
        assert record["accuracy"] == record["agent/success"]
        assert 1 <= record["agent/turns"] <= 4
        assert 0 <= record["agent/same_action_ratio"] <= 1  # all episodes of a group begin alike
        # one program with itself: what the sampler recorded is what the trainer computes, over all turns
        if "sampling/sampling_logp_difference/max" in record:
            assert record["sampling/sampling_logp_difference/max"] < 1e-3
    rows = folder.read_completions(1)
    assert len(rows) == 8 + steps[0].get("sampling/added_completions", 0)
    assert "Find the" in rows[0]["prompt"]
    assert "\n> " in rows[0]["completion"]
    assert {row["ended"] for row in rows} <= {"done", "turns", "context"}
    for row in rows:
        play = json.loads(row["play"])
        assert len(play) == row["turns"]
        assert sum(turn["tokens"] for turn in play) == row["length"]
        assert sum(not turn["valid"] for turn in play) == row["no_actions"]
        assert sum(turn["reward"] for turn in play) == pytest.approx(row["reward"])
        assert all(f"\n> {turn['said'].strip()}" in row["completion"] for turn in play)
    evaluations = [record for record in folder.read_metrics() if "eval/accuracy" in record]
    assert evaluations[0]["eval/num_completions"] == 3
    assert evaluations[0]["eval/agent/turns"] >= 1
    if changes.get("action_format") in ("tags", "tool"):
        assert steps[0]["completions/no_answer_ratio"] > 0.9  # random letters
    else:
        assert steps[0]["completions/no_answer_ratio"] == 0.0


def centred(step: Outcomes) -> Any:
    return step.rewards - step.rewards.mean()


def _fails(step: Outcomes) -> Any:
    raise ValueError("no part")


def _leaves(step: Outcomes) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize(
    "part",
    [_fails, *map(slow, (_leaves, lambda step: "x", lambda step: step.rewards * np.nan, 5))],
    ids=["raises", "leaves", "text", "nan", "number"],
)
def test_an_episode_part_that_fails_costs_no_more_than_itself(
    playing: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, part: Any
) -> None:
    monkeypatch.setattr(centred, "episode_part", part, raising=False)
    GRPOTrainer(args=GRPOConfig(**(playing | {"adv_estimator": centred, "max_steps": 1}))).train()
    assert "its attribute episode_part" in caplog.text
    assert "of_episode" not in RunFolder.read(playing["output_dir"]).read_completions(1)[0]["play"]


@pytest.mark.parametrize("mode", ["conversation", "steps"])
def test_each_turn_is_recorded_with_the_credit_of_its_tokens(playing: dict[str, Any], mode: str) -> None:
    changes = {
        "adv_estimator": "gigpo",
        "history_length": 2 if mode == "steps" else None,
        "ledger": "all",
        "max_steps": 1,
        "beta": 0.01,
    }
    GRPOTrainer(args=GRPOConfig(**(playing | changes))).train()
    folder = RunFolder.read(playing["output_dir"])
    tokens: dict[int, list[float]] = {}
    for token in read_table(folder.path / "ledger" / "step_000001.parquet"):
        tokens.setdefault(token["row"], []).append(token["advantage"])
    rows = folder.read_completions(1)
    plays = [json.loads(row["play"]) for row in rows]
    assert len({turn["row"] for play in plays for turn in play}) == (
        8 if mode == "conversation" else sum(map(len, plays))
    )
    for turn in (turn for play in plays for turn in play):
        own, tokens[turn["row"]] = tokens[turn["row"]][: turn["tokens"]], tokens[turn["row"]][turn["tokens"] :]
        assert turn["advantage"] == pytest.approx(sum(own) / len(own))
    for play in plays:  # the episode's part is one number, and what is left is the turn's own
        parts = [turn["of_episode"] for turn in play]
        assert parts == pytest.approx(parts[:1] * len(parts))
    for group in {row["group"] for row in rows}:  # at the first turn all saw the same: differences from a mean
        first = [play[0] for play, row in zip(plays, rows, strict=True) if row["group"] == group]
        assert sum(turn["advantage"] - turn["of_episode"] for turn in first) == pytest.approx(0, abs=1e-5)
    assert not any(tokens.values())


def test_the_tool_is_shown_as_the_template_shows_tools(playing: dict[str, Any]) -> None:
    trainer = GRPOTrainer(args=GRPOConfig(**(playing | {"action_format": "tool"})))
    tokenizer = trainer.policy.tokenizer

    def opening() -> str:
        rollout = trainer.collect(
            trainer.prompts[:1],
            SamplingSettings(max_tokens=4),
            num_generations=1,
            streams=[(0, 0, 0)],
            policy_version=trainer.state.policy_version,
        )
        return str(tokenizer.decode(rollout.groups[0].episodes[0].token_ids))

    assert 'Act with a call such as {"name": "act"' in opening()  # this template knows no tools
    tokenizer.chat_template = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + tokenizer.chat_template
    parts: Any = (trainer.world, trainer.policy, trainer.engine, trainer.data, trainer.decode)
    trainer.collect = make_collector(trainer.args, *parts)
    assert opening().startswith('<tools>[{"type": "function", "function": {"name": "act"')
    assert "Act with a call" not in opening()
    trainer.close()


@pytest.mark.slow
def test_worlds_reset_ahead_change_nothing(playing: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    resets = []
    reset = EnvironmentPool.reset

    def counted(pool: EnvironmentPool, place: int, task: dict[str, Any], seed: int) -> None:
        resets.append(place)
        reset(pool, place, task, seed)

    monkeypatch.setattr(EnvironmentPool, "reset", counted)
    args = GRPOConfig(**(playing | {"max_steps": 3, "eval_on_start": False, "eval_steps": 2}))
    GRPOTrainer(args=args).train()
    played = [RunFolder.read(playing["output_dir"]).read_completions(step) for step in (1, 2, 3)]
    # 8 for each of 3 steps and the 3 that were thrown away for the evaluations (3 tasks each), after the last step too
    assert len(resets) == 8 * 4 + 8 + 3 * 2
    monkeypatch.setattr(GRPOTrainer, "_prepare_worlds", lambda *_: None)
    GRPOTrainer(args=args.replace(output_dir=playing["output_dir"] + "-plain")).train()
    plain = [RunFolder.read(playing["output_dir"] + "-plain").read_completions(step) for step in (1, 2, 3)]
    assert [[row["completion"] for row in rows] for rows in played] == [
        [row["completion"] for row in rows] for rows in plain
    ]


def test_a_resumed_run_plays_the_same_episodes(playing: dict[str, Any]) -> None:
    args = GRPOConfig(**(playing | {"max_steps": 3, "save_steps": 1}))
    GRPOTrainer(args=args).train()
    folder = RunFolder.read(playing["output_dir"])
    whole = [row["completion"] for row in folder.read_completions(3)]
    GRPOTrainer(args=args).train(resume_from_checkpoint=folder.checkpoints / "step_000002")
    assert [row["completion"] for row in folder.read_completions(3)] == whole


@pytest.mark.slow
def test_learning_in_the_house(playing: dict[str, Any]) -> None:
    """A tiny random model that may only choose learns to take what it sees rather than to leave."""
    changes = {"max_steps": 12, "num_generations": 8, "beta": 0.0, "learning_rate": 0.03, "world": "house:rooms=2"}
    trainer = GRPOTrainer(args=GRPOConfig(**(playing | changes | {"eval_on_start": False, "eval_steps": 0})))
    trainer.train()
    success = [record["agent/success"] for record in trainer.state.log_history if "loss" in record]
    assert np.mean(success[-4:]) > np.mean(success[:4]) + 0.1


def test_a_world_of_ones_own_as_an_object(playing: dict[str, Any]) -> None:
    del playing["world"]
    trainer = GRPOTrainer(args=GRPOConfig(**playing), world=House(rooms=3, num_train=5, num_eval=2))
    assert len(trainer.prompts) == 5
    trainer.close()


def test_what_cannot_work_is_said_early(playing: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"environment\.world='house.*data\.task"):
        GRPOConfig(**(playing | {"task": "arithmetic"}))
    with pytest.raises(ConfigError, match=r"gigpo.*environment\.world"):
        GRPOTrainer(reward_funcs=lambda completions, **_: [0.0], args=GRPOConfig(adv_estimator="gigpo"))
    with pytest.raises(ConfigError, match="a world brings its own tasks and rewards"):
        GRPOTrainer(reward_funcs=lambda completions, **_: [0.0], args=GRPOConfig(**playing))
    with pytest.raises(ConfigError, match="no such environment; did you mean 'house'"):
        GRPOTrainer(args=GRPOConfig(**(playing | {"world": "mouse"})))
    world = Unimportable()
    world.train_tasks = lambda seed: [{"uid": "a"}]  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="cannot be sent"):
        GRPOTrainer(args=GRPOConfig(**(playing | {"world": None})), world=world)


class Broken(Unimportable):
    def train_tasks(self, seed: int) -> list[dict[str, Any]]:
        return [{"uid": "a"}, {"uid": "b"}]


def test_a_step_without_a_single_turn_stops_the_run(playing: dict[str, Any]) -> None:
    trainer = GRPOTrainer(args=GRPOConfig(**(playing | {"world": None})), world=Broken())
    with pytest.raises(EpisodeError, match=r"no episode got as far as a turn.*no such game engine"):
        trainer.train()


def test_the_command_line(
    playing: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, covey: Command
) -> None:
    status, out, err = covey("play", "house:rooms=3", "--expert")
    assert status == 0, err
    assert "> read note" in out
    assert "solved after 3 actions, reward 1" in out
    typed = iter(["dance", "", "read note"])
    monkeypatch.setattr("builtins.input", lambda *_: next(typed))
    status, out, err = covey("play", "house", "--max-turns", "2", "-n", "1")
    assert status == 0, err
    assert "(no valid action)" in out
    assert "The note says" in out or "no actions left after 2" in out
    status, _, err = covey("play", "house:num_eval=5", "-n", "5")
    assert status == 2
    assert "use 0 to 4" in err

    recipe = tmp_path / "recipe.toml"
    recipe.write_text(GRPOConfig(**playing).to_toml())
    status, _, err = covey("train", recipe)
    assert status == 0, err
    status, out, err = covey("eval", playing["output_dir"], "--show", "1")
    assert status == 0, err
    assert "agent/success" in out
    assert "Find the" in out
    status, out, err = covey("eval", playing["model"], "--world", "house:rooms=2,num_eval=2", "max_completion_length=8")
    assert status == 0, err
    assert "agent/no_action_ratio" in out
    status, out, err = covey("doctor", recipe, "world=house:rooms=2,num_train=30")
    assert "world: 30 tasks" in out, err


def test_an_environments_first_error_of_a_kind_is_an_event_with_its_line(settings: dict[str, Any]) -> None:
    changes = {"action_format": "text", "max_completion_length": 4, "failed_episodes": "score", "max_turns": 3}
    GRPOTrainer(args=GRPOConfig(**(settings | changes)), world=Breaking()).train()
    folder = RunFolder.read(settings["output_dir"])
    (said,) = [event["message"] for event in folder.read_events() if event["kind"] == "environment"]
    assert said.startswith("the environment failed in step: KeyError: 'room ")
    assert "worlds.py:" in said
    assert "in step. Its episode failed" in said
