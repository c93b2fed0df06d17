"""Episodes that end because their environment failed say nothing of the policy: no accuracy counts them."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from covey import GRPOConfig, GRPOTrainer
from covey.cli.results import print_difference, print_left_out
from covey.errors import ConfigError
from covey.observe.run_folder import RunFolder
from covey.rollout.agents import PlayStats
from covey.rollout.collect import Rollout
from covey.rollout.scoring import Logged
from covey.training.evaluate import Evaluation, correct_completions, count_answers, evaluate, judged_completions
from covey.training.prefetch import Sampled
from covey.training.schedule import ResolvedPhase
from covey.types import Group, Prompt, SamplingSettings, Trajectory
from fakes import fake_episode, fake_prompt

sys.path.insert(0, str(Path(__file__).parents[1] / "environments"))
from worlds import Breaking


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
    def collect(prompts: Sequence[Prompt], settings: SamplingSettings, **_: Any) -> Rollout:
        return played(*groups)

    prompts = [fake_prompt()] * len(groups)
    return evaluate(prompts, collect, SamplingSettings(), policy_version=1, seed=0)


def sampled(rollout: Rollout) -> Sampled:
    correct = correct_completions(rollout.whole, None)
    return Sampled(rollout, ResolvedPhase(0, "", 1.0, 0.0, 2, 1e-3), 1, correct, Logged({}, {}))


def test_training_accuracy_and_questions_leave_them_out() -> None:
    rollout = played("sl", "sf", "ff")
    assert judged_completions(rollout).tolist() == [True, True, True, False, False, False]
    assert sampled(rollout).accuracy == pytest.approx(2 / 3)
    assert sampled(rollout).answers == {"q0": [1, 2], "q1": [1, 1]}
    assert sampled(played("ff")).accuracy is None
    assert count_answers(played("ff"), np.zeros(2, np.bool_)) == {}
    assert rollout.metrics["agent/failed_episodes"] == 3


def test_held_out_accuracy_leaves_them_out() -> None:
    found = evaluation("sslff", "llf", "sf").metrics
    assert found["eval/accuracy"] == pytest.approx(3 / 6)
    assert found["eval/num_completions"] == 6
    assert found["eval/accuracy/s"] == pytest.approx(3 / 4)
    assert found["eval/num_completions/s"] + found["eval/num_completions/l"] == 6
    assert found["eval/accuracy_high"] == pytest.approx(0.8124, abs=1e-4)  # Wilson, 3 of 6
    nothing = evaluation("ff").metrics
    assert "eval/accuracy" not in nothing
    assert nothing["eval/num_completions"] == 0


def told(before: Evaluation, after: Evaluation) -> str:
    out = Console(file=io.StringIO(), width=200)
    print_left_out(out, "before", before)
    print_left_out(out, "after", after)
    print_difference(out, "before", before, after)
    return out.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_baseline_is_compared_on_what_both_were_judged_on() -> None:
    # counted as wrong, the failed ones would be two gained and one lost
    text = told(evaluation("sflf"), evaluation("fsls"))
    assert "before: the environment failed in 2 of 4 episodes, which accuracy leaves out" in text
    assert "after: the environment failed in 1 of 4 episodes" in text
    assert "accuracy against before: +0.0 points" in text
    assert "0 gained, 0 lost" in text
    assert "accuracy against before: no episode was judged for both" in told(evaluation("sf"), evaluation("fs"))
    assert "no accuracy: the environment failed in every episode" in told(evaluation("ff"), evaluation("ss"))
    assert "failed" not in told(evaluation("sl"), evaluation("ss"))
    unknown = Evaluation({}, played("s"), None)
    with pytest.raises(ConfigError, match="--baseline compares right answers"):
        told(unknown, unknown)


def test_a_run_says_so(settings: dict[str, Any]) -> None:
    changes = {"action_format": "text", "max_completion_length": 4, "failed_episodes": "score", "max_turns": 3}
    GRPOTrainer(args=GRPOConfig(**(settings | changes)), world=Breaking()).train()
    step = next(record for record in RunFolder.read(settings["output_dir"]).read_metrics() if "loss" in record)
    assert step["agent/failed_ratio"] == 1.0
    assert step["agent/failed_episodes"] == 8
    assert "accuracy" not in step
