"""Accuracy: of episodes that their environment did not end by a failure, and kind by kind."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from training_runs import events, steps_of
from worlds import Breaking

from covey import GRPOConfig, GRPOTrainer
from covey.cli.results import kind_shares, percent, print_difference, print_kinds, print_left_out
from covey.errors import ConfigError
from covey.observe import ConsoleProgress, describe_metric
from covey.rollout.agents import PlayStats
from covey.rollout.collect import Rollout
from covey.rollout.scoring import Logged
from covey.training.evaluate import (
    Evaluation,
    accuracy_by_kind,
    correct_completions,
    count_answers,
    evaluate,
    judged_completions,
)
from covey.training.prefetch import Sampled
from covey.training.schedule import ResolvedPhase
from covey.training.tables import completion_rows
from covey.types import Group, SamplingSettings, Trajectory
from fakes import fake_episode, fake_prompt


def played(*groups: str) -> Rollout:
    """A letter for each episode: s succeeds, l loses, f fails. A group's kind is its first letter's."""
    found = []
    for number, outcomes in enumerate(groups):
        prompt = fake_prompt(uid=f"q{number}", kind=outcomes[0])
        trajectories = tuple(
            Trajectory((fake_episode("x", prompt),), (), letter == "s", "failed" if letter == "f" else "done")
            for letter in outcomes
        )
        episodes = tuple(episode for trajectory in trajectories for episode in trajectory.episodes)
        found.append(Group(prompt, episodes, np.zeros(len(outcomes)), trajectories=trajectories))
    failures = sum(outcomes.count("f") for outcomes in groups)
    return Rollout(tuple(found), 0.0, 0.0, 1, played=PlayStats(failures=failures))


def evaluation(*groups: str) -> Evaluation:
    prompts = [fake_prompt()] * len(groups)
    return evaluate(prompts, lambda *_, **__: played(*groups), SamplingSettings(), policy_version=1, seed=0)


def sampled(rollout: Rollout) -> Sampled:
    correct = correct_completions(rollout.whole, None)
    return Sampled(rollout, ResolvedPhase(0, "", 1.0, 0.0, 2, 1e-3), 1, correct, Logged({}, {}))


def test_accuracy_and_questions_leave_them_out() -> None:
    rollout = played("sl", "sf", "ff")
    assert judged_completions(rollout).tolist() == [True, True, True, False, False, False]
    assert sampled(rollout).accuracy == pytest.approx(2 / 3)
    assert sampled(rollout).answers == {"q0": [1, 2], "q1": [1, 1]}
    assert sampled(played("ff")).accuracy is None
    assert count_answers(played("ff"), np.zeros(2, np.bool_)) == {}
    assert rollout.metrics["agent/failed_episodes"] == 3
    found = evaluation("sslff", "llf", "sf").metrics
    assert (found["eval/accuracy"], found["eval/accuracy/s"]) == pytest.approx((3 / 6, 3 / 4))
    assert found["eval/num_completions"] == 6
    assert found["eval/num_completions/s"] + found["eval/num_completions/l"] == 6
    assert found["eval/accuracy_high"] == pytest.approx(0.8124, abs=1e-4)  # Wilson, 3 of 6
    nothing = evaluation("ff").metrics
    assert ("eval/accuracy" in nothing, nothing["eval/num_completions"]) == (False, 0)


def told(before: str, after: str) -> str:
    out, one, other = Console(file=io.StringIO(), width=200), evaluation(before), evaluation(after)
    print_left_out(out, "before", one)
    print_left_out(out, "after", other)
    print_difference(out, "before", one, other)
    return out.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_baseline_is_compared_on_what_both_were_judged_on() -> None:
    text = told("sflf", "fsls")  # counted as wrong, the failed ones would be two gained and one lost
    for words in (
        "before: the environment failed in 2 of 4 episodes, which accuracy leaves out",
        "after: the environment failed in 1 of 4 episodes",
        *("accuracy against before: +0.0 points", "0 gained, 0 lost"),
    ):
        assert words in text
    assert "accuracy against before: no episode was judged for both" in told("sf", "fs")
    assert "no accuracy: the environment failed in every episode" in told("ff", "ss")
    assert "failed" not in told("sl", "ss")
    unknown = Evaluation({}, played("s"), None)
    with pytest.raises(ConfigError, match="--baseline compares right answers"):
        print_difference(Console(), "before", unknown, unknown)


def test_a_run_says_so(settings: dict[str, Any]) -> None:
    """And the first error of a kind is an event with its line."""
    changes = {"action_format": "text", "max_completion_length": 4, "failed_episodes": "score", "max_turns": 3}
    GRPOTrainer(args=GRPOConfig(**(settings | changes)), world=Breaking()).train()
    step = steps_of(settings["output_dir"])[0]
    assert (step["agent/failed_ratio"], step["agent/failed_episodes"], "accuracy" in step) == (1.0, 8, False)
    (said,) = events(settings["output_dir"], "environment")
    assert said.startswith("the environment failed in step: KeyError: 'room ")
    assert "worlds.py:" in said
    assert "in step. Its episode failed" in said


def answered(kinds: list[Any], samples: int = 1) -> Rollout:
    groups = []
    for kind in kinds:
        prompt = fake_prompt("?") if kind is None else fake_prompt("?", kind=kind)
        episodes = tuple(fake_episode("a", prompt) for _ in range(samples))
        groups.append(Group(prompt, episodes, np.ones(samples), {"r": np.ones(samples)}))
    return Rollout(tuple(groups), 0.0, 0.0, 1)


def test_each_kind_by_hand() -> None:
    # larger: 2 of 3 questions x 2 answers; smaller: 0 of 1 x 2; one row names no kind
    kinds = ["larger", "smaller", "larger", None, "larger"]
    found = answered(kinds, samples=2)
    metrics = accuracy_by_kind(found, np.array([1, 1, 0, 0, 1, 0, 1, 1, 1, 0], np.bool_))
    assert metrics["eval/accuracy/larger"] == pytest.approx(4 / 6)
    assert metrics["eval/accuracy/smaller"] == 0.0
    assert (metrics["eval/num_completions/larger"], metrics["eval/num_completions/smaller"]) == (6, 2)
    low, high = metrics["eval/accuracy_low/larger"], metrics["eval/accuracy_high/larger"]
    assert (low, high) == pytest.approx((0.300, 0.903), abs=1e-3)  # Wilson, 4 of 6
    assert all(describe_metric(name) for name in metrics)
    assert [row.get("kind") for row in completion_rows(found.groups)][::2] == kinds
    for few in (["a", "a"], [None, "a"], [str(n) for n in range(21)]):  # one kind or too many say nothing
        assert accuracy_by_kind(answered(few), np.ones(len(few), np.bool_)) == {}


def test_they_are_shown() -> None:
    found, correct = answered(["larger", "smaller"]), np.array([True, False])
    metrics = {"eval/accuracy": 0.5, "eval/reward": 0.5} | accuracy_by_kind(found, correct)
    out = Console(file=io.StringIO(), width=200)
    ConsoleProgress(out, live=False).on_eval(3, metrics)
    assert "evaluation at step 3: accuracy 0.500, larger 1.00, smaller 0.00, reward 0.500" in out.file.getvalue()
    print_kinds(out, Evaluation(metrics, found, correct))
    assert "smaller" in out.file.getvalue().split("evaluation")[1]
    ((name, share), _) = kind_shares(metrics)
    assert (name, percent(share)) == ("larger", "100.0 % (20.7 to 100.0)")
