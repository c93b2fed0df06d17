"""Masks that depend on the policy belong to the whole step, whatever rows have a gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import make_batch, make_learner

from covey.algorithms import make_objective
from covey.rollout.learning import Correction
from covey.training.update import UpdateSettings, update
from covey.types import Batch
from loss_reference import Completed, reference_loss


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


def by_the_reference(batch: Batch, learner: Any, **options: Any) -> dict[str, float]:
    """The step's loss and metrics from log-probabilities alone, one sequence at a time."""
    rows = np.arange(len(batch.episodes))
    logp, entropy = learner.scores(batch, rows, temperature=1.0, entropy=True)
    ref, _ = learner.scores(batch, rows, temperature=1.0, reference=True)
    exists = batch.mask | np.any(list(batch.excluded.values()), axis=0) if batch.excluded else batch.mask
    sequences = []
    for row in rows:
        here = exists[row]
        parts = (torch.tensor(x[row, here], dtype=torch.float64) for x in (logp, batch.old_logprobs, ref, entropy))
        before = torch.tensor(logp[row, here], dtype=torch.float64)
        dropped = not batch.mask[row].any()
        sequences.append(Completed(*parts, float(batch.advantages[row, 0]), before, dropped))
    return reference_loss(sequences, **options)[1]


def with_a_masked_row(batch: Batch) -> Batch:
    mask = batch.mask.copy()
    mask[5] = False
    return replace(batch, mask=mask, excluded={"validity_mask": batch.mask & ~mask})


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "gspo", "dr_grpo", "reinforce"])
@pytest.mark.parametrize(
    "masks",
    [
        {"off_policy_mask_threshold": 0.0},
        {"top_entropy_quantile": 0.4, "correction": Correction("sequence_truncate", 2.0)},
        {"off_policy_mask_threshold": 0.0, "top_entropy_quantile": 0.5, "reference_drift_threshold": 0.02},
    ],
    ids=lambda masks: "-".join(masks),
)
def test_a_step_is_that_of_the_reference(loss_type: str, masks: dict[str, Any]) -> None:
    batch = with_a_masked_row(with_a_tied_group())
    objective = make_objective(loss_type, beta=0.3)
    learner = make_learner(tokens_per_micro_batch=40)
    names = {
        "off_policy_mask_threshold": "off_policy",
        "top_entropy_quantile": "quantile",
        "reference_drift_threshold": "drift",
    }
    options = {names[name]: value for name, value in masks.items() if name in names}
    if "correction" in masks:
        options |= {"correction": masks["correction"].mode, "cap": masks["correction"].cap}
    wanted = by_the_reference(batch, learner, loss_type=loss_type, beta=0.3, max_length=12, **options)
    done = update(learner, batch, UpdateSettings(objective, 1.0, 12, **masks), 1e-3)
    for name in ("loss", "policy_loss", "kl", "entropy", "ratio/mean", "mask_ratio"):
        assert done.metrics[name] == pytest.approx(wanted[name.split("/")[0]], rel=2e-4, abs=1e-6), name
    np.testing.assert_array_equal(done.batch.advantages, batch.advantages)  # what is reported is not what is masked


def test_a_mask_of_the_surrogate_leaves_the_kl_and_the_denominators() -> None:
    """One bad completion is stale: at beta 0 the loss is that without its surrogate, over as many tokens as before."""
    batch = make_batch()
    advantages = np.where(batch.mask, 1.0, 0.0).astype(np.float32)
    advantages[2] *= -1
    old = np.where(batch.mask, make_learner().scores(batch, np.arange(12), temperature=1.0)[0], 0.0).astype(np.float32)
    old[2] += 0.3 * batch.mask[2]
    batch = replace(batch, advantages=advantages, old_logprobs=old)
    done = update(make_learner(), batch, settings(off_policy_mask_threshold=0.2), 1e-3)
    # ratios are 1 elsewhere: minus the share of the other rows' tokens
    assert done.metrics["loss"] == pytest.approx(-(1 - batch.mask[2].sum() / batch.mask.sum()), rel=1e-4)
    assert done.metrics["mask/off_policy_mask"] == pytest.approx(batch.mask[2].sum() / batch.mask.sum())
    assert done.metrics["mask_ratio"] == 11 / 12
    assert done.batch.mask[2].any()


def test_the_numbers_of_several_passes_are_their_means_and_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, learner, seen = make_batch(), make_learner(), []
    run = learner.forward_backward

    def spy(*arguments: Any, **options: Any) -> Any:
        seen.append(run(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(learner, "forward_backward", spy)
    done = update(learner, batch, settings(num_iterations=3), 5e-2)
    each = [found.metrics for found in seen]
    tokens = each[0]["active_tokens"]
    assert len({found["entropy_sum"] for found in each}) == 3
    assert done.metrics["loss"] == pytest.approx(np.mean([found["loss"] for found in each]))
    assert done.metrics["entropy"] == pytest.approx(np.mean([found["entropy_sum"] / tokens for found in each]))
    assert done.metrics["ratio/max"] == max(found["ratio_max"] for found in each)
    assert done.metrics["ratio/min"] == min(found["ratio_min"] for found in each)
    clipped = [found["clip_high_sum"] / tokens for found in each]
    assert done.metrics["clip_ratio/high_mean"] == pytest.approx(np.mean(clipped))
    assert done.metrics["clip_ratio/high_max"] == max(clipped)


def test_masks_are_told_as_their_means_over_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12 rows pass 1 keeps all, pass 2 loses row 0, pass 3 rows 0 to 2."""
    batch, lost = make_batch(), iter([0, 1, 3])

    def mask(*arguments: Any) -> Any:
        keep = batch.mask.copy()
        keep[: next(lost)] = False
        return keep

    monkeypatch.setattr("covey.training.update.off_policy_mask", mask)
    done = update(make_learner(), batch, settings(num_iterations=3, off_policy_mask_threshold=1.0), 1e-3)
    tokens = batch.mask.sum(axis=1)
    shares = [0, tokens[0] / tokens.sum(), tokens[:3].sum() / tokens.sum()]
    assert done.metrics["mask/off_policy_mask"] == pytest.approx(sum(shares) / 3)
    assert done.metrics["mask_ratio"] == pytest.approx((12 / 12 + 11 / 12 + 9 / 12) / 3)


def test_the_mismatch_is_over_all_tokens_where_all_were_scored() -> None:
    batch = with_a_tied_group()
    logp, _ = make_learner().scores(batch, np.arange(12), temperature=1.0)
    everything = np.abs(logp - batch.old_logprobs)[batch.mask].mean()
    learned = np.abs(logp - batch.old_logprobs)[4:][batch.mask[4:]].mean()
    name = "sampling/sampling_logp_difference/mean"
    masked = update(make_learner(), batch, settings(top_entropy_quantile=0.5), 1e-3)
    assert masked.metrics[name] == pytest.approx(everything, rel=1e-4)
    assert update(make_learner(), batch, settings(), 1e-3).metrics[name] == pytest.approx(learned, rel=1e-4)


def test_it_is_said_when_a_mask_leaves_nothing() -> None:
    batch = make_batch()
    batch = replace(batch, advantages=np.where(batch.mask, -1.0, 0.0).astype(np.float32))
    batch = replace(batch, old_logprobs=np.where(batch.mask, 0.0, 0.0).astype(np.float32))
    done = update(make_learner(), batch, settings(off_policy_mask_threshold=0.1), 1e-3)
    assert done.optimizer_steps == 0
    assert "every token is masked (off_policy_mask)" in done.skipped
    assert done.metrics["mask_ratio"] == 0.0
