"""Accuracy kind by kind: in the metrics, on the console, in the tables."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from covey.cli.results import kind_shares, percent, print_kinds
from covey.observe import ConsoleProgress, describe_metric
from covey.rollout.collect import Rollout
from covey.training.evaluate import Evaluation, accuracy_by_kind
from covey.training.rows import completion_rows
from covey.types import Group
from fakes import fake_episode, fake_prompt


def rollout(kinds: list[Any], samples: int = 1) -> Rollout:
    groups = []
    for kind in kinds:
        prompt = fake_prompt("?") if kind is None else fake_prompt("?", kind=kind)
        episodes = tuple(fake_episode("a", prompt) for _ in range(samples))
        groups.append(Group(prompt, episodes, np.ones(samples), {"r": np.ones(samples)}))
    return Rollout(tuple(groups), 0.0, 0.0, 1)


def test_each_kind_by_hand() -> None:
    # larger: 2 of 3 questions x 2 answers; smaller: 0 of 1 x 2; one row names no kind
    found = rollout(["larger", "smaller", "larger", None, "larger"], samples=2)
    correct = np.array([1, 1, 0, 0, 1, 0, 1, 1, 1, 0], np.bool_)
    metrics = accuracy_by_kind(found, correct)
    assert metrics["eval/accuracy/larger"] == pytest.approx(4 / 6)
    assert metrics["eval/accuracy/smaller"] == 0.0
    assert (metrics["eval/num_completions/larger"], metrics["eval/num_completions/smaller"]) == (6, 2)
    assert metrics["eval/accuracy_low/larger"] == pytest.approx(0.300, abs=1e-3)  # Wilson, 4 of 6
    assert metrics["eval/accuracy_high/larger"] == pytest.approx(0.903, abs=1e-3)
    assert all(describe_metric(name) for name in metrics)
    assert [row.get("kind") for row in completion_rows(found.groups)][::2] == [
        "larger",
        "smaller",
        "larger",
        None,
        "larger",
    ]


@pytest.mark.parametrize("kinds", [["a", "a"], [None, "a"], [str(n) for n in range(21)]])
def test_one_kind_or_too_many_say_nothing(kinds: list[Any]) -> None:
    assert accuracy_by_kind(rollout(kinds), np.ones(len(kinds), np.bool_)) == {}


def test_they_are_shown() -> None:
    found, correct = rollout(["larger", "smaller"]), np.array([True, False])
    metrics = {"eval/accuracy": 0.5, "eval/reward": 0.5} | accuracy_by_kind(found, correct)
    out = Console(file=io.StringIO(), width=200)
    ConsoleProgress(out, live=False).on_eval(3, metrics)
    assert "evaluation at step 3: accuracy 0.500, larger 1.00, smaller 0.00, reward 0.500" in out.file.getvalue()
    print_kinds(out, Evaluation(metrics, found, correct))
    assert "smaller" in out.file.getvalue().split("evaluation")[1]
    ((name, share), _) = kind_shares(metrics)
    assert (name, percent(share)) == ("larger", "100.0 % (20.7 to 100.0)")
