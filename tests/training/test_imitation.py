"""Learning from a world's own expert: what is said, what is learnt, through Python and command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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
MORE = [("choice", "steps"), *[(format, mode) for format in ("text", "tags") for mode in ("conversation", "steps")]]


@pytest.fixture
def playing(settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    return settings | {
        "world": "house:rooms=2,num_train=6,num_eval=3",
        "max_conversation_tokens": 900,
        "show_actions": False,
        "system_prompt": "Play.",
        "action_format": "choice",
        "max_completion_length": 60,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "output_dir": str(tmp_path / "run"),
    }


def by_the_expert(trainer: GRPOTrainer, count: int = 3) -> list[Trajectory]:
    return imitation._play(trainer, count, lambda doing, done, of: None)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("action", ["go north", 'say "a\\b" to <it>', "nimm den Schlüssel"])
def test_an_action_is_read_back(format: Any, action: str) -> None:
    assert parse_action(write_action(action, format), format, [action, "go"]) == action


@pytest.mark.parametrize(
    ("format", "mode"),
    [
        ("choice", "conversation"),
        ("tool", "steps"),
        *(pytest.param(format, mode, marks=pytest.mark.slow) for format, mode in MORE),
    ],
)  # three calls of tools are more characters than the tiny model's context
def test_the_expert_speaks_as_the_policy_would(playing: dict[str, Any], format: str, mode: str) -> None:
    trainer = GRPOTrainer(
        args=GRPOConfig(**playing | {"action_format": format, "history_length": 0 if mode == "steps" else None})
    )
    played = by_the_expert(trainer)
    for trajectory in played:
        assert trajectory.success, trajectory.ended
        assert trajectory.turns[0].action == "read note"
        assert len(trajectory.turns) == 3
        assert len(trajectory.episodes) == (1 if mode == "conversation" else 3)
        for episode in trajectory.episodes:
            assert episode.support is None
            said = trainer.policy.tokenizer.decode(episode.token_ids[episode.sampled])
            assert ("<action>" in said) == (format == "tags")
    trainer.close()


def test_prompts_are_those_of_the_policy(playing: dict[str, Any]) -> None:
    """What is not sampled in an episode is what the engine would have been given after the same actions."""
    trainer = GRPOTrainer(args=GRPOConfig(**playing))

    (one,) = by_the_expert(trainer, 1)
    collect = make_collector(
        trainer.args, trainer.world, trainer.policy, trainer.engine, trainer.data, trainer.decode, ExpertPlayer
    )
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


def test_the_loss_is_the_mean_negative_log_probability(playing: dict[str, Any]) -> None:
    """Against transformers' own cross-entropy on the same tokens, and it falls."""
    trainer = GRPOTrainer(args=GRPOConfig(**playing))
    played = by_the_expert(trainer, 4)
    model, wanted, count = trainer.policy.model, 0.0, 0
    with torch.no_grad():
        for episode in (e for t in played for e in t.episodes):
            ids = torch.as_tensor(episode.token_ids)[None]
            labels = torch.where(torch.as_tensor(episode.sampled)[None], ids, -100)
            own = int(episode.sampled.sum())
            wanted += float(model(input_ids=ids, labels=labels).loss) * own
            count += own
    losses = [step["loss"] for step in imitation._learn(trainer, played, 4, 4, lambda doing, done, of: None)]
    trainer.close()
    assert losses[0] == pytest.approx(wanted / count, rel=1e-4)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_what_is_left_behind_can_be_trained_on(playing: dict[str, Any], tmp_path: Path) -> None:
    config = GRPOConfig(**playing | {"max_steps": 1})
    found = imitate(config, tmp_path / "first", episodes=6, epochs=3, episodes_per_step=3)
    assert (found.episodes, found.failed, len(found.losses)) == (6, 0, 6)
    assert {"eval/accuracy"} <= found.before.keys() & found.after.keys()
    stories = [json.loads(line) for line in (tmp_path / "first/episodes.jsonl").read_text().splitlines()]
    assert len(stories) == 6
    assert "> read note" in stories[0]["transcript"]
    trainer = GRPOTrainer(args=config.replace(adapter=str(tmp_path / "first/adapter")))
    trainer.train()
    assert trainer.state.global_step == 1
    with pytest.raises(ConfigError, match="not empty"):
        imitate(config, tmp_path / "first")


@pytest.mark.slow
def test_of_whole_models_too(playing: dict[str, Any], tmp_path: Path) -> None:
    config = GRPOConfig(**playing | {"use_peft": False, "max_steps": 1})
    imitate(config, tmp_path / "first", episodes=2, epochs=1, evaluate=False)
    GRPOTrainer(args=config.replace(model=str(tmp_path / "first/adapter"))).train()


@pytest.mark.slow
def test_what_cannot_be_imitated(playing: dict[str, Any], tmp_path: Path) -> None:
    config = GRPOConfig(**playing)
    with pytest.raises(ConfigError, match="episodes=0"):
        imitate(config, tmp_path / "a", episodes=0)
    with pytest.raises(ConfigError, match=r"no environment\.world"):
        imitate(config.replace(world=None, task="arithmetic"), tmp_path / "b")
    with pytest.raises(DataError, match="expert_action knows no action here"):
        imitate(config.replace(world=f"{WORLDS}:Trouble", action_format="text"), tmp_path / "c", episodes=1)
    with pytest.raises(ConfigError, match="max_completion_length to"):
        imitate(config.replace(max_completion_length=4), tmp_path / "e", episodes=1, evaluate=False)
    with pytest.raises(ConfigError, match="choose a lower"):
        imitate(config.replace(learning_rate=1e30), tmp_path / "f", episodes=4, epochs=3, evaluate=False)
    assert not any((tmp_path / name).exists() for name in "abcdef")
    with pytest.raises(DataError, match="succeeded in none of 2"):
        imitate(config.replace(max_turns=1), tmp_path / "d", episodes=2)


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


def test_an_expert_that_fails_costs_its_own_episode(playing: dict[str, Any], tmp_path: Path) -> None:
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


def test_command(playing: dict[str, Any], tmp_path: Path, covey: Command) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(GRPOConfig(**playing).to_toml())
    status, said, problem = covey("play", recipe, "--imitate", "--episodes", 4, "--epochs", 1, "schedule.max_steps=1")
    assert status == 0, problem
    assert "learnt from 4 episodes of the expert" in said
    assert "held out, after" in said
    told = said.split("continue: covey ")[1].split()
    assert "schedule.max_steps=1" in told  # what was asked for of the episodes holds for the training after it
    status, _, problem = covey(*told)
    assert status == 0, problem
