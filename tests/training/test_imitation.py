"""Learning from a world's own expert: what is said, what is learnt, through Python and command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from training_runs import HOUSE, Settings, build, slow

from command import Command
from covey import GRPOConfig, GRPOTrainer
from covey.environments.actions import parse_action, write_action
from covey.errors import ConfigError, DataError
from covey.rollout.agents import ExpertPlayer
from covey.training import imitation, setup
from covey.training.agents import make_collector
from covey.training.imitation import imitate
from covey.types import Trajectory

WORLDS = Path(__file__).parents[1] / "environments" / "worlds.py"
FORMATS = ("choice", "text", "tags", "tool")
EVERY = [(format, mode) for format in FORMATS for mode in ("conversation", "steps")]
# three calls of tools are more characters than the tiny model's context
FAST, TOO_LONG = (("choice", "conversation"), ("tool", "steps")), ("tool", "conversation")


@pytest.fixture
def playing(settings: Settings) -> Settings:
    settings |= HOUSE | {"max_conversation_tokens": 900, "max_completion_length": 60}
    return settings | {"show_actions": False, "system_prompt": "Play.", "lr_scheduler_type": "constant"}


def by_the_expert(trainer: GRPOTrainer, count: int = 3) -> list[Trajectory]:
    return imitation._play(trainer, count, lambda doing, done, of: None)


def test_an_action_is_read_back() -> None:
    for action in ("go north", 'say "a\\b" to <it>', "nimm den Schlüssel"):
        for format in FORMATS:
            assert parse_action(write_action(action, format), format, [action, "go"]) == action


@pytest.mark.parametrize(("format", "mode"), [one if one in FAST else slow(*one) for one in EVERY if one != TOO_LONG])
def test_the_expert_speaks_as_the_policy_would(playing: Settings, format: str, mode: str) -> None:
    trainer = build(playing, action_format=format, history_length=0 if mode == "steps" else None)
    for trajectory in by_the_expert(trainer):
        assert trajectory.success, trajectory.ended
        assert (trajectory.turns[0].action, len(trajectory.turns)) == ("read note", 3)
        assert len(trajectory.episodes) == (1 if mode == "conversation" else 3)
        for episode in trajectory.episodes:
            assert episode.support is None
            said = trainer.policy.tokenizer.decode(episode.token_ids[episode.sampled])
            assert ("<action>" in said) == (format == "tags")
    trainer.close()


def test_prompts_are_those_of_the_policy(playing: Settings) -> None:
    """What is not sampled in an episode is what the engine would have been given after the same actions."""
    trainer = build(playing)
    (one,) = by_the_expert(trainer, 1)
    parts = (trainer.world, trainer.policy, trainer.engine, trainer.data, trainer.decode)
    collect = make_collector(trainer.args, *parts, ExpertPlayer)
    settings = setup.sampling_settings(trainer.args, trainer.policy, 1.0)
    stream = (trainer.args.run.seed, imitation.IMITATION_STREAM, 0)
    ((sampled,),) = collect.player.play(
        trainer.prompts[:1], trainer.engine, settings, num_generations=1, streams=[stream], policy_version=1
    )
    collect.close()
    trainer.close()
    for mine, theirs in zip(one.episodes, sampled.episodes, strict=True):
        np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
        np.testing.assert_array_equal(mine.sampled, theirs.sampled)


def test_the_loss_is_the_mean_negative_log_probability(playing: Settings) -> None:
    """Against transformers' own cross-entropy on the same tokens, and it falls."""
    trainer = build(playing)
    played, wanted, count = by_the_expert(trainer, 4), 0.0, 0
    with torch.no_grad():
        for episode in (e for t in played for e in t.episodes):
            ids, own = torch.as_tensor(episode.token_ids)[None], int(episode.sampled.sum())
            labels = torch.where(torch.as_tensor(episode.sampled)[None], ids, -100)
            wanted += float(trainer.policy.model(input_ids=ids, labels=labels).loss) * own
            count += own
    losses = [step["loss"] for step in imitation._learn(trainer, played, 4, 4, lambda doing, done, of: None)]
    trainer.close()
    assert losses[0] == pytest.approx(wanted / count, rel=1e-4)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_what_is_left_behind_can_be_trained_on(playing: Settings, tmp_path: Path) -> None:
    config = GRPOConfig(**playing | {"max_steps": 1})
    found = imitate(config, tmp_path / "first", episodes=6, epochs=3, episodes_per_step=3)
    assert (found.episodes, found.failed, len(found.losses)) == (6, 0, 6)
    assert {"eval/accuracy"} <= found.before.keys() & found.after.keys()
    stories = [json.loads(line) for line in (tmp_path / "first/episodes.jsonl").read_text().splitlines()]
    assert len(stories) == 6
    assert "> read note" in stories[0]["transcript"]
    with pytest.raises(ConfigError, match="not empty"):
        imitate(config, tmp_path / "first")
    whole = config.replace(use_peft=False, lora_r=16, output_dir=str(tmp_path / "whole"))
    imitate(whole, tmp_path / "second", episodes=2, epochs=1, evaluate=False)
    for after in (
        config.replace(adapter=str(tmp_path / "first/adapter")),
        whole.replace(model=str(tmp_path / "second/adapter")),
    ):
        trainer = GRPOTrainer(args=after)
        trainer.train()
        assert trainer.state.global_step == 1


@pytest.mark.slow
def test_what_cannot_be_imitated(playing: Settings, tmp_path: Path) -> None:
    config = GRPOConfig(**playing)
    quick = {"episodes": 1, "evaluate": False}
    trouble = {"world": f"{WORLDS}:Trouble", "action_format": "text"}
    for number, (changes, options, error, words) in enumerate(
        (
            ({}, {"episodes": 0}, ConfigError, "episodes=0"),
            ({"world": None, "task": "arithmetic"}, {}, ConfigError, r"no environment\.world"),
            (trouble, {"episodes": 1}, DataError, "expert_action knows no action here"),
            ({"max_completion_length": 4}, quick, ConfigError, "max_completion_length to"),
            ({"learning_rate": 1e30}, quick | {"episodes": 4, "epochs": 3}, ConfigError, "choose a lower"),
            ({"max_turns": 1}, {"episodes": 2}, DataError, "succeeded in none of 2"),
        )
    ):
        with pytest.raises(error, match=words):
            imitate(config.replace(**changes), tmp_path / str(number), **options)
        assert not (tmp_path / str(number)).exists() or "max_turns" in changes


EXPERTS = """
from covey.environments import Environment, Observation, World
class Moody(World):
    name, max_turns, max_completion_length = "moody", 2, 12
    def train_tasks(self, seed): return [{"uid": str(n)} for n in range(6)]
    def eval_tasks(self): return []
    def make(self): return Mood()
class Mood(Environment):
    def reset(self, task, seed):
        self.number = int(task["uid"])
        return Observation("go", ("left", "right"))
    def step(self, action): return Observation("there"), float(action == "left"), True, {}
    def expert_action(self):
        if self.number == 1: raise ValueError("I do not know")
        return {2: 3, 3: "go \\ud800", 4: "right", 5: None}.get(self.number, "left")
"""


def test_an_expert_that_fails_costs_its_own_episode(playing: Settings, tmp_path: Path) -> None:
    (tmp_path / "moody.py").write_text(EXPERTS)
    config = GRPOConfig(**playing | {"world": f"{tmp_path}/moody.py:Moody"})
    found = imitate(config, tmp_path / "first", episodes=6, epochs=1)
    assert (found.episodes, found.failed) == (1, 5)
    assert any("I do not know" in ending for ending in found.why)
    trainer = GRPOTrainer(args=config)
    said = [trajectory.error for trajectory in by_the_expert(trainer, 6)]
    trainer.close()
    for error, words in zip(said[1:], ("I do not know", "returned 3", "ud800", "", "knows no action"), strict=True):
        assert words in error


def test_command(playing: Settings, tmp_path: Path, covey: Command) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(GRPOConfig(**playing).to_toml())
    said = covey.done("play", recipe, "--imitate", "--episodes", 4, "--epochs", 1, "schedule.max_steps=1")
    assert "learnt from 4 episodes of the expert" in said
    assert "held out, after" in said
    told = said.split("continue: covey ")[1].split()
    assert "schedule.max_steps=1" in told  # what was asked for of the episodes holds for the training after it
    covey.done(*told)
