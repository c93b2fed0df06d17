"""Advantage estimators that do not compare within groups, and one from a file outside the package, in whole runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command import Command
from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError
from covey.observe.run_folder import RunFolder
from covey.recipes.house.house import House
from covey.training.evaluate import QuestionHistory

RECIPE = Path(__file__).parents[2] / "recipes" / "reinforce_pp"
ROWS = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four", "five")]


def share_of_letters(completions: list[str], **columns: Any) -> list[float]:
    return [sum(c.isalpha() for c in text) / 8 for text in completions]


def always(completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def build(settings: dict[str, Any], reward: Any = share_of_letters, **changes: Any) -> GRPOTrainer:
    return GRPOTrainer(reward_funcs=reward, args=GRPOConfig(**(settings | changes)), train_dataset=ROWS)


def losses(trainer: GRPOTrainer) -> list[float]:
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of somebody's own, with the recipe's file in it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(RECIPE / "reinforce_pp.py", folder / "mine.py")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("function", ["kl_in_reward", pytest.param("batch_normalised", marks=pytest.mark.slow)])
def test_a_file_of_ones_own_trains_and_resumes(settings: dict[str, Any], elsewhere: Path, function: str) -> None:
    changes = {
        "adv_estimator": f"mine.py:{function}",
        "num_generations": 1,
        "prompts_per_step": 4,
        "beta": 0.0,
        "max_steps": 4,
    }
    if function == "kl_in_reward":
        changes["adv_parameters"] = {"kl_coef": 0.5}
    unbroken = build(settings, **changes)
    unbroken.train()
    again = settings | {"output_dir": settings["output_dir"] + "-again", "save_steps": 2}
    build(again, **changes).train()
    resumed = build(again, **changes)
    resumed.train(resume_from_checkpoint=RunFolder.read(again["output_dir"]).checkpoints / "step_000002")
    assert len(losses(unbroken)) == 4
    assert losses(resumed) == losses(unbroken)
    assert unbroken.state.updates == 4
    whole, parts = unbroken.policy.state_dict(), resumed.policy.state_dict()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_the_reference_is_scored_for_an_estimator_that_asks(settings: dict[str, Any], elsewhere: Path) -> None:
    (elsewhere / "probe.py").write_text(
        "seen = []\n"
        "def probe(step):\n"
        "    seen.append((step.logprobs, step.reference, step.mask, step.parts, step.turns))\n"
        "    return step.rewards - 0.5\n"
        "probe.group_relative = False\nprobe.needs_reference = True\n"
    )
    trainer = build(settings, adv_estimator="probe.py:probe", beta=0.0, max_steps=3, learning_rate=0.1)
    trainer.train()
    seen = trainer.estimator.function.__globals__["seen"]
    for step, (logprobs, reference, mask, parts, turns) in enumerate(seen):
        assert mask.any()
        assert not logprobs[~mask].any()
        assert not reference[~mask].any()
        far = np.abs(logprobs - reference)[mask].max()
        assert (far < 1e-4) == (step == 0)  # the first step is sampled from the reference itself
        assert parts.shape == (1, 8)
        assert turns is None


def test_squared_probabilities_are_those_of_the_plain_model(settings: dict[str, Any], elsewhere: Path) -> None:
    (elsewhere / "probe.py").write_text(
        "seen = []\n"
        "def probe(step):\n"
        "    seen.append((step.sum_pi_squared, step.mask))\n"
        "    return step.rewards - 0.5\n"
        "probe.group_relative = False\nprobe.needs_sum_pi_squared = True\n"
    )
    trainer = build(settings, adv_estimator="probe.py:probe", beta=0.0, temperature=0.7)
    phase = trainer.phases.at(trainer._elapsed())
    groups = trainer.sample_step(phase, 0, trainer.state.policy_version, print).rollout.groups
    batch = trainer.make_batch(groups, phase)
    found, mask = trainer.estimator.function.__globals__["seen"][0]
    for row, episode in enumerate(batch.episodes):
        with torch.no_grad():
            logits = trainer.policy.model(torch.tensor(episode.token_ids[None])).logits[0] / 0.7
        before = torch.from_numpy(np.flatnonzero(episode.sampled) - 1)
        expected = logits[before].double().softmax(-1).square().sum(-1)
        np.testing.assert_allclose(found[row][mask[row]], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "def mine(step):\n    step.logprobs[:] = -50.0\n    return step.rewards\n",
            "read-only at .*own.py:2, in mine",
        ),
        ("def mine(step):\n    step.rewards -= 1\n    return step.rewards\n", "read-only at .*own.py:2, in mine"),
        (
            "def mine(step):\n    return step.rewards - 0.5\nmine.teaches = lambda group: 1 / 0\n",
            "its attribute teaches raised ZeroDivisionError: division by zero at .*own.py:3",
        ),
        ("def mine(step):\n    return step.rewards[:1]\n", r".*shape \(1,\) for 8 completions"),
        ("def mine(step):\n    return step.rewards * float('nan')\n", ".*not finite"),
        ("def mine(step):\n    return step.nothing\n", r".*AttributeError.*own\.py:2, in mine"),
    ],
)
def test_what_an_estimator_may_not_do_is_named(
    settings: dict[str, Any], elsewhere: Path, code: str, message: str
) -> None:
    (elsewhere / "own.py").write_text(code)
    with pytest.raises(ConfigError, match=rf"adv_estimator='.*own.py:mine': .*{message}"):
        build(settings, adv_estimator="own.py:mine", beta=0.0, max_steps=1).train()


def test_from_the_command_line(model_folder: Path, elsewhere: Path, recipe_folder: Path, covey: Command) -> None:
    arguments = ("adv_estimator=mine.py:kl_in_reward", "adv_parameters={kl_coef=0.1}", "num_generations=1")
    status, _, err = covey("train", recipe_folder / "recipe.toml", *arguments, "run.output_dir=run", "max_steps=2")
    assert status == 0, err
    assert GRPOConfig.from_toml(elsewhere / "run" / "config.toml").adv_parameters == {"kl_coef": 0.1}
    status, _, err = covey("resume", "run", "max_steps=3")
    assert status == 0, err
    steps = [record for record in RunFolder.read(elsewhere / "run").read_metrics() if "loss" in record]
    assert len(steps) == 3
    status, _, err = covey("train", recipe_folder / "recipe.toml", "adv_estimator=mine.py:nothing")
    assert status == 2
    assert "mine.py has no 'nothing'; it has batch_normalised" in " ".join(err.split())


def test_equal_rewards_teach_where_nothing_is_compared_within_groups(settings: dict[str, Any]) -> None:
    """Completions of 5 questions, all right but for one question's: every group is tied."""

    def by_question(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [float("t" in prompt) for prompt in prompts]

    changes = {"beta": 0.0, "dynamic_sampling": 3, "prompts_per_step": 4, "max_steps": 2}
    silent = build(settings, by_question, adv_estimator="grpo", **changes)
    silent.train()
    assert silent.state.updates == 0
    assert silent.state.log_history[-1]["frac_reward_zero_std"] == 1.0
    settings["output_dir"] += "-batch"
    trainer = build(settings, by_question, adv_estimator="reinforce_plus_plus", **changes)
    trainer.train()
    assert trainer.state.updates == 2
    assert trainer.state.log_history[-1]["frac_reward_zero_std"] == 0.0
    assert "dynamic_sampling/discarded_groups" not in trainer.state.log_history[-1]


def test_the_sentence_for_a_step_without_advantages(settings: dict[str, Any]) -> None:
    for name, said in (
        ("grpo", "the rewards in every group are equal"),
        ("reinforce_plus_plus", "all advantages are 0"),
    ):
        own = settings | {"output_dir": f"{settings['output_dir']}-{name}", "max_steps": 1}
        build(own, always, adv_estimator=name, beta=0.0).train()
        events = [event["message"] for event in RunFolder.read(own["output_dir"]).read_events()]
        assert any(said in message for message in events), events


def test_remax_asks_for_the_greedy_completion(settings: dict[str, Any]) -> None:
    asked: list[int] = []

    def reward(completions: list[str], **columns: Any) -> list[float]:
        asked.append(len(completions))
        return share_of_letters(completions)

    trainer = build(settings, reward, adv_estimator="remax", num_generations=1, beta=0.0)
    trainer.train()
    assert asked == [2, 2, 2, 2]  # the sampled ones, then one greedy one for each prompt
    sampled = trainer.sample_step(trainer.phases.at(trainer._elapsed()), 0, trainer.state.policy_version, print)
    greedy = [group.greedy_reward for group in sampled.rollout.groups]
    again = trainer.collect(
        trainer.prompts[:0] + [group.prompt for group in sampled.rollout.groups],
        trainer_greedy(trainer),
        num_generations=1,
        streams=[(9, 9, 9), (8, 8, 8)],  # greedy completions do not depend on it
        policy_version=trainer.state.policy_version,
    )
    assert greedy == [float(group.rewards[0]) for group in again.groups]
    batch = trainer.make_batch(sampled.rollout.groups, trainer.phases.at(trainer._elapsed()))
    rewards = np.concatenate([group.rewards for group in sampled.rollout.groups])
    np.testing.assert_allclose(batch.advantages[:, 0], rewards - greedy, atol=1e-6)


def trainer_greedy(trainer: GRPOTrainer) -> Any:
    from covey.training import setup

    return setup.sampling_settings(trainer.args, trainer.policy, 0.0)


def playing(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"max_conversation_tokens": 600, "action_format": "choice", "max_completion_length": 16}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gigpo", "remax", "optimal_token_baseline", "mine.py:kl_in_reward"])
def test_agents_in_a_world_given_as_an_object(settings: dict[str, Any], elsewhere: Path, name: str) -> None:
    world = House(rooms=2, num_train=6, num_eval=2)
    trainer = GRPOTrainer(args=GRPOConfig(**playing(settings), adv_estimator=name, beta=0.0), world=world)
    trainer.train()
    assert all(np.isfinite(loss) for loss in losses(trainer))
    assert len(losses(trainer)) == 2


def test_what_does_not_fit_is_said_before_the_model_is_loaded(
    settings: dict[str, Any], elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_model(*arguments: Any, **settings: Any) -> Any:
        raise AssertionError("too late")

    monkeypatch.setattr("covey.pytorch.policy.Policy.load", no_model)
    (elsewhere / "own.py").write_text("def own(step, *, a=1):\n    return step.rewards\n")
    for changes, message in (
        ({"adv_estimator": "gigpo"}, r"adv_estimator='gigpo'.*environment\.world"),
        ({"adv_estimator": "own.py:own", "num_generations": 1}, "num_generations=1: a group needs at least 2"),
        ({"adv_estimator": "own.py:own", "adv_parameters": {"b": 1}}, "it takes a"),
        ({"adv_estimator": "gone.py:own"}, "gone.py: no such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(settings, **changes)
    world = House(rooms=2, num_train=6, num_eval=2)
    with pytest.raises(ConfigError, match=r"data\.task='arithmetic'.*come from its world"):
        GRPOTrainer(args=GRPOConfig(**settings, task="arithmetic"), world=world)


def test_questions_that_are_always_right_keep_their_weight_where_the_batch_is_the_baseline() -> None:
    within, beyond = (QuestionHistory(["new", "solved", "failed"], relative) for relative in (True, False))
    for history in (within, beyond):
        history.add({"solved": [8, 8], "failed": [0, 8]})
    assert within.weights()[1:] == pytest.approx([0.49, 0.49], abs=0.01)
    # mean over questions 1/2: (1/2)^2 for every reward
    assert beyond.weights() == pytest.approx([1.0, 1.0, 1.0])
    beyond.add({"solved": [8, 8], "new": [8, 8]})
    assert beyond.weights()[2] > 1.0 > beyond.weights()[1]
