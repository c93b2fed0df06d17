"""Agents trained in the bundled world on a tiny model, by their rewards and by its expert: trainer and command line."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_runs import HOUSE, Settings, build, steps_of, trained
from worlds import Unimportable

from command import Command
from covey import GRPOConfig, GRPOTrainer
from covey.algorithms import Outcomes
from covey.environments import EnvironmentPool, World
from covey.environments.actions import parse_action, write_action
from covey.errors import ConfigError, DataError, EpisodeError
from covey.observe import describe_metric
from covey.observe.completions import read_table
from covey.observe.run_folder import RunFolder
from covey.rollout.experts import ExpertPlayer
from covey.training import imitation, setup
from covey.training.agents import make_collector
from covey.training.imitation import imitate
from covey.types import SamplingSettings, Trajectory
from fakes import raises, slow

WORLDS, RECIPES = Path(__file__).parents[1] / "environments" / "worlds.py", Path(__file__).parents[2] / "recipes"
FAILING = {"raises": lambda step: 1 / 0, "leaves": lambda step: sys.exit(3), "text": lambda step: "x", "number": 5}
FAILING["nan"] = lambda step: step.rewards * np.nan
FORMATS = ("choice", "text", "turn", "tags")
EVERY = [(format, mode) for format in FORMATS for mode in ("conversation", "steps")]
FAST = (("choice", "conversation"), ("tags", "steps"))
LOOK = {"name": "look", "description": "Look around.", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture
def playing(settings: Settings) -> Settings:
    return settings | HOUSE | {"invalid_action_penalty": 0.1}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"history_length": 1, "max_conversation_tokens": 400},
        slow({"adv_estimator": "naive_grpo", "norm_adv_by_std_in_grpo": False}),
        slow({"adv_estimator": "gigpo", "adv_parameters": {"discount": 0.9}, "beta": 0.0}),
        slow({"action_format": "tags", "loss_type": "dapo", "dynamic_sampling": 3}),
        slow({"max_generations": 9, "max_steps": 2}),
        slow({"adv_estimator": "remax", "beta": 0.0}),
        slow({"adv_estimator": "optimal_token_baseline", "beta": 0.0}),
        slow({"adv_estimator": f"{RECIPES}/reinforce_pp/reinforce_pp.py:kl_in_reward", "beta": 0.0}),
    ],
    ids=str,
)
def test_every_variant_trains(playing: Settings, changes: Settings) -> None:
    folder = RunFolder.read(trained(playing, **changes).args.output_dir)
    steps = steps_of(folder.path)
    assert len(steps) == 2
    for record in steps:
        assert np.isfinite(record["loss"])
        assert [name for name in record if describe_metric(name) is None] == []
        assert record["accuracy"] == record["agent/success"]
        assert 1 <= record["agent/turns"] <= 4
        assert 0 <= record["agent/same_action_ratio"] <= 1  # all episodes of a group begin alike
        # one program with itself: what the sampler recorded is what the trainer computes, over all turns
        assert record.get("sampling/sampling_logp_difference/max", 0.0) < 1e-3
    rows = folder.read_completions(1)
    assert len(rows) == 8 + steps[0].get("sampling/added_completions", 0)
    assert "Find the" in rows[0]["prompt"]
    assert "\n> " in rows[0]["completion"]
    assert {row["ended"] for row in rows} <= {"done", "turns", "context"}
    for row in rows:
        play = json.loads(row["play"])
        assert (len(play), sum(turn["tokens"] for turn in play)) == (row["turns"], row["length"])
        assert sum(not turn["valid"] for turn in play) == row["no_actions"]
        assert sum(turn["reward"] for turn in play) == pytest.approx(row["reward"])
        assert all(f"\n> {turn['said'].strip()}" in row["completion"] for turn in play)
    first = next(record for record in folder.read_metrics() if "eval/accuracy" in record)
    assert first["eval/num_completions"] == 3
    assert first["eval/agent/turns"] >= 1
    unanswered = steps[0]["completions/no_answer_ratio"]  # of random letters
    assert unanswered > 0.9 if changes.get("action_format") == "tags" else unanswered == 0.0


def centred(step: Outcomes) -> Any:
    return step.rewards - step.rewards.mean()


@pytest.mark.parametrize("part", ["raises", *map(slow, list(FAILING)[1:])])
def test_an_episode_part_that_fails_costs_itself(playing: Settings, caplog: Any, monkeypatch: Any, part: str) -> None:
    monkeypatch.setattr(centred, "episode_part", FAILING[part], raising=False)
    trained(playing, adv_estimator=centred, max_steps=1)
    assert "its attribute episode_part" in caplog.text
    assert "of_episode" not in RunFolder.read(playing["output_dir"]).read_completions(1)[0]["play"]


@pytest.mark.parametrize("history_length", [None, 2], ids=["conversation", "steps"])
def test_each_turn_is_recorded_with_the_credit_of_its_tokens(playing: Settings, history_length: int | None) -> None:
    playing |= {"adv_estimator": "gigpo", "history_length": history_length, "ledger": "all", "max_steps": 1}
    folder = RunFolder.read(trained(playing, beta=0.01).args.output_dir)
    tokens: dict[int, list[float]] = {}
    for token in read_table(folder.path / "ledger" / "step_000001.parquet"):
        tokens.setdefault(token["row"], []).append(token["advantage"])
    rows = folder.read_completions(1)
    plays = [json.loads(row["play"]) for row in rows]
    turns = [turn for play in plays for turn in play]
    assert len({turn["row"] for turn in turns}) == (len(turns) if history_length else 8)
    for turn in turns:
        own, tokens[turn["row"]] = tokens[turn["row"]][: turn["tokens"]], tokens[turn["row"]][turn["tokens"] :]
        assert turn["advantage"] == pytest.approx(sum(own) / len(own))
    for play in plays:  # the episode's part is one number, and what is left is the turn's own
        parts = [turn["of_episode"] for turn in play]
        assert parts == pytest.approx(parts[:1] * len(parts))
    for group in {row["group"] for row in rows}:  # at the first turn all saw the same: differences from a mean
        first = [play[0] for play, row in zip(plays, rows, strict=True) if row["group"] == group]
        assert sum(turn["advantage"] - turn["of_episode"] for turn in first) == pytest.approx(0, abs=1e-5)
    assert not any(tokens.values())


def test_functions_of_a_world_are_shown_as_the_template_shows_tools(playing: Settings, monkeypatch: Any) -> None:
    raises(ConfigError, "action_format='call': this world has no functions", build, playing, action_format="call")
    monkeypatch.setattr(World, "tools", [LOOK])
    trainer = build(playing, action_format="call")
    tokenizer, sampling = trainer.policy.tokenizer, SamplingSettings(max_tokens=4)

    def opening() -> str:
        one = {"num_generations": 1, "streams": [(0, 0, 0)], "policy_version": trainer.state.policy_version}
        rollout = trainer.collect(trainer.prompts[:1], sampling, **one)
        return str(tokenizer.decode(rollout.groups[0].episodes[0].token_ids))

    assert 'You may call these functions:\n{"name": "look"' in opening()  # this template knows no tools
    tokenizer.chat_template = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + tokenizer.chat_template
    parts: Any = (trainer.world, trainer.policy, trainer.engine, trainer.data, trainer.decode)
    trainer.collect = make_collector(trainer.args, *parts)
    assert opening().startswith('<tools>[{"type": "function", "function": {"name": "look"')
    assert "You may call" not in opening()
    trainer.close()


def completions(run: str, *steps: int) -> list[list[str]]:
    return [[row["completion"] for row in RunFolder.read(run).read_completions(step)] for step in steps]


@pytest.mark.slow
def test_worlds_reset_ahead_change_nothing(playing: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    resets, reset = [], EnvironmentPool.reset

    def counted(pool: EnvironmentPool, place: int, task: dict[str, Any], seed: int) -> None:
        resets.append(place)
        reset(pool, place, task, seed)

    monkeypatch.setattr(EnvironmentPool, "reset", counted)
    run, changes = playing["output_dir"], {"max_steps": 3, "eval_on_start": False, "eval_steps": 2}
    trained(playing, **changes)
    # 8 for each of 3 steps and the 3 that were thrown away for the evaluations (3 tasks each), after the last step too
    assert len(resets) == 8 * 4 + 8 + 3 * 2
    monkeypatch.setattr(GRPOTrainer, "_prepare_worlds", lambda *_: None)
    assert completions(run, 1, 2, 3) == completions(trained(playing, **changes, name="plain").args.output_dir, 1, 2, 3)


def test_a_resumed_run_plays_the_same_episodes(playing: Settings) -> None:
    playing |= {"max_steps": 3, "save_steps": 1}
    run = trained(playing).args.output_dir
    whole = completions(run, 3)
    trained(playing, resume=2)
    assert completions(run, 3) == whole


@pytest.mark.slow
def test_learning_in_the_house(playing: Settings) -> None:
    """A tiny random model that may only choose learns to take what it sees rather than to leave."""
    playing |= {"max_steps": 12, "num_generations": 8, "beta": 0.0, "learning_rate": 0.03, "world": "house:rooms=2"}
    success = [record["agent/success"] for record in steps_of(trained(playing, eval_on_start=False, eval_steps=0))]
    assert np.mean(success[-4:]) > np.mean(success[:4]) + 0.1


def test_what_cannot_work_is_said_early(playing: Settings) -> None:
    world, rewarded = Unimportable(), {"reward_funcs": lambda completions, **_: [0.0]}
    world.train_tasks = lambda seed: [{"uid": "a"}]  # type: ignore[method-assign]
    for settings, given, words in (
        (playing | {"task": "arithmetic"}, {}, r"environment\.world='house.*data\.task"),
        (playing, rewarded, "a world brings its own tasks and rewards"),
        (playing | {"world": "mouse"}, {}, "no such environment; did you mean 'house'"),
        (playing | {"world": None}, {"world": world}, "cannot be sent"),
    ):
        raises(ConfigError, words, lambda s=settings, g=given: GRPOTrainer(args=GRPOConfig(**s), **g))


class Broken(Unimportable):
    def train_tasks(self, seed: int) -> list[dict[str, Any]]:
        return [{"uid": "a"}, {"uid": "b"}]


@pytest.mark.slow
def test_a_step_without_a_single_turn_stops_the_run(playing: Settings) -> None:
    trainer = GRPOTrainer(args=GRPOConfig(**(playing | {"world": None})), world=Broken())
    assert len(trainer.prompts) == 2
    raises(EpisodeError, r"no episode got as far as a turn.*no such game engine", trainer.train)


def test_the_command_line(playing: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, covey: Command) -> None:
    done = covey.done
    out = done("play", "house:rooms=3", "--expert")
    assert all(words in out for words in ("> read note", "solved after 3 actions, reward 1"))
    typed = iter(["dance", "", "read note"])
    monkeypatch.setattr("builtins.input", lambda *_: next(typed))
    out = done("play", "house", "--max-turns", "2", "-n", "1")
    assert "That is not an action." in out
    assert "The note says" in out or "no actions left after 2" in out
    for path in (str(tmp_path), f"{tmp_path}/no.toml"):
        assert ".toml: cannot be read ([Errno 2]" in " ".join(covey("play", path)[2].split())
    status, _, err = covey("play", "house:num_eval=5", "-n", "5")
    assert (status, "use 0 to 4" in err) == (2, True)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(GRPOConfig(**playing).to_toml())
    assert "solved after 3 actions, reward 1" in done("play", recipe, "world=house:rooms=3", "--expert")
    refused = {"none": "it has no environment.world", "verifiers:taskset=a": "nobody else can play"}
    for world, why in refused.items():
        status, _, err = covey("play", recipe, f"world={world}")
        assert (status, why in err) == (2, True), err
    done("train", recipe)
    out = done("eval", playing["output_dir"], "--show", "1")
    assert all(words in out for words in ("agent/success", "Find the"))
    out = done("eval", playing["model"], "--world", "house:rooms=2,num_eval=2", "max_completion_length=8")
    assert "agent/no_action_ratio" in out
    _, out, err = covey("doctor", recipe, "world=house:rooms=2,num_train=30")
    assert "world: 30 tasks" in out, err


@pytest.fixture
def imitating(settings: Settings) -> Settings:
    settings |= HOUSE | {"max_conversation_tokens": 900, "max_completion_length": 60}
    return settings | {"show_actions": False, "system_prompt": "Play.", "lr_scheduler_type": "constant"}


def by_the_expert(trainer: GRPOTrainer, count: int = 3) -> list[Trajectory]:
    return imitation._play(trainer, count, lambda doing, done, of: None)


def test_an_action_is_read_back() -> None:
    for action in ("go north", 'say "a\\b" to <it>', "nimm den Schlüssel"):
        for format in FORMATS:
            assert parse_action(write_action(action, format), format, [action, "go"]) == action


@pytest.mark.parametrize(("format", "mode"), [one if one in FAST else slow(*one) for one in EVERY])
def test_the_expert_speaks_as_the_policy_would(imitating: Settings, format: str, mode: str) -> None:
    trainer = build(imitating, action_format=format, history_length=0 if mode == "steps" else None)
    for trajectory in by_the_expert(trainer):
        assert trajectory.success, trajectory.ended
        assert (trajectory.turns[0].action, len(trajectory.turns)) == ("read note", 3)
        assert len(trajectory.episodes) == (1 if mode == "conversation" else 3)
        for episode in trajectory.episodes:
            assert episode.support is None
            said = trainer.policy.tokenizer.decode(episode.token_ids[episode.sampled])
            assert ("<action>" in said) == (format == "tags")
    trainer.close()


def test_prompts_are_those_of_the_policy_and_the_loss_is_the_mean_negative_log_probability(imitating: Settings) -> None:
    """What is not sampled in an episode is what the engine would have been given after the same actions."""
    trainer = build(imitating)
    (one,) = by_the_expert(trainer, 1)
    parts = (trainer.world, trainer.policy, trainer.engine, trainer.data, trainer.decode)
    collect = make_collector(trainer.args, *parts, ExpertPlayer)
    settings = setup.sampling_settings(trainer.args, trainer.policy, 1.0)
    how = {"streams": [(trainer.args.run.seed, imitation.IMITATION_STREAM, 0)], "policy_version": 1}
    ((sampled,),) = collect.player.play(trainer.prompts[:1], trainer.engine, settings, num_generations=1, **how)
    collect.close()
    for mine, theirs in zip(one.episodes, sampled.episodes, strict=True):
        np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
        np.testing.assert_array_equal(mine.sampled, theirs.sampled)
    # against transformers' own cross-entropy on the same tokens, and it falls
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
def test_what_is_left_behind_can_be_trained_on(imitating: Settings, tmp_path: Path) -> None:
    config = GRPOConfig(**imitating | {"max_steps": 1})
    found = imitate(config, tmp_path / "first", episodes=6, epochs=3, episodes_per_step=3)
    assert (found.episodes, found.failed, len(found.losses)) == (6, 0, 6)
    assert {"eval/accuracy"} <= found.before.keys() & found.after.keys()
    stories = [json.loads(line) for line in (tmp_path / "first/episodes.jsonl").read_text().splitlines()]
    assert len(stories) == 6
    assert "> read note" in stories[0]["transcript"]
    raises(ConfigError, "not empty", imitate, config, tmp_path / "first")
    whole = config.replace(use_peft=False, lora_r=16, output_dir=str(tmp_path / "whole"))
    imitate(whole, tmp_path / "second", episodes=2, epochs=1, evaluate=False)
    first, second = (str(tmp_path / name / "adapter") for name in ("first", "second"))
    for after in (config.replace(adapter=first), whole.replace(model=second)):
        assert GRPOTrainer(args=after).train().global_step == 1


@pytest.mark.slow
def test_what_cannot_be_imitated(imitating: Settings, tmp_path: Path) -> None:
    config, quick = GRPOConfig(**imitating), {"episodes": 1, "evaluate": False}
    trouble = {"world": f"{WORLDS}:Trouble", "action_format": "text", "model": "/nowhere"}  # not loaded
    for changes, options, error, words in (
        ({}, {"episodes": 0}, ConfigError, "episodes=0"),
        ({"world": None, "task": "arithmetic"}, {}, ConfigError, r"no environment\.world"),
        (trouble, {"episodes": 1}, DataError, "environments know no expert_action"),
        ({"max_completion_length": 4}, quick, ConfigError, "max_completion_length to"),
        ({"learning_rate": 1e30}, quick | {"episodes": 4, "epochs": 3}, ConfigError, "choose a lower"),
        ({"max_turns": 1}, {"episodes": 2}, DataError, "succeeded in none of 2"),
    ):
        raises(error, words, imitate, config.replace(**changes), tmp_path / words, **options)
        assert not (tmp_path / words).exists() or "max_turns" in changes


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


def test_an_expert_that_fails_costs_its_own_episode(imitating: Settings, tmp_path: Path) -> None:
    (tmp_path / "moody.py").write_text(EXPERTS)
    config = GRPOConfig(**imitating | {"world": f"{tmp_path}/moody.py:Moody"})
    found = imitate(config, tmp_path / "first", episodes=6, epochs=1)
    assert (found.episodes, found.failed) == (1, 5)
    assert any("I do not know" in ending for ending in found.why)
    trainer = GRPOTrainer(args=config)
    said = [trajectory.error for trajectory in by_the_expert(trainer, 6)]
    trainer.close()
    for error, words in zip(said[1:], ("I do not know", "returned 3", "ud800", "", "knows no action"), strict=True):
        assert words in error


def test_command(imitating: Settings, tmp_path: Path, covey: Command) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(GRPOConfig(**imitating).to_toml())
    said = covey.done("play", recipe, "--imitate", "--episodes", 4, "--epochs", 1, "schedule.max_steps=1")
    assert all(words in said for words in ("learnt from 4 episodes of the expert", "held out, after"))
    told = said.split("continue: covey ")[1].split()
    assert "schedule.max_steps=1" in told  # what was asked for of the episodes holds for the training after it
    covey.done(*told)
