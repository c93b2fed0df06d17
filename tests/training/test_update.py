"""Masks that depend on the policy belong to the whole step, whatever rows have a gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from learner_cases import make_batch, make_learner

from covey.algorithms import make_objective
from covey.rollout.learning import Correction
from covey.training.update import UpdateSettings, update
from covey.types import Batch


def with_a_tied_group() -> Batch:
    batch = make_batch()
    advantages = batch.advantages.copy()
    advantages[:4] = 0
    return replace(batch, advantages=advantages)


def settings(**changes: Any) -> UpdateSettings:
    return UpdateSettings(make_objective("dapo"), temperature=1.0, max_completion_length=12, **changes)


def test_entropy_quantile_counts_the_tokens_of_tied_groups() -> None:
    batch = with_a_tied_group()
    done = update(make_learner(), batch, settings(top_entropy_quantile=0.5), 1e-3)
    tokens = int(batch.mask.sum())
    assert done.metrics["mask/top_entropy_quantile"] == pytest.approx(0.5, abs=1 / tokens)
    assert done.batch.mask[:4].any()  # some of the tied group's tokens are among the most uncertain ones


def test_a_row_masked_in_the_first_pass_has_its_old_log_probabilities_in_the_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = make_batch()
    learner = make_learner()
    run, seen = learner.forward_backward, []

    def spy(*arguments: Any, **options: Any) -> Any:
        seen.append(options["trainer_old"])
        return run(*arguments, **options)

    monkeypatch.setattr(learner, "forward_backward", spy)
    chosen = settings(num_iterations=2, correction=Correction("token_truncate", 3.0), off_policy_mask_threshold=0.0)
    done = update(learner, batch, chosen, 1e-3)
    assert done.metrics["mask/off_policy_mask"] > 0
    assert len(seen) == 2
    assert np.all(seen[1][batch.mask] < 0)
    np.testing.assert_array_equal(seen[0], seen[1])


def test_nothing_is_called_skipped_when_a_pass_has_trained() -> None:
    learner = make_learner()
    tied = replace(make_batch(), advantages=np.zeros_like(make_batch().advantages))
    assert "rewards in every group are equal" in update(learner, tied, settings(), 1e-3).skipped
    assert update(learner, make_batch(), settings(num_iterations=2), 1e-3).skipped == ""
