"""The formulas printed in the documents, transcribed, against ours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from algorithm_cases import Case, loss_of, random_case

from covey.algorithms import (
    compute_off_policy_mask,
    compute_unbiased_kl,
    exact_weighted_kl,
    group_advantages,
    make_objective,
    reference_drift_mask,
)


def test_unbiased_kl_as_printed() -> None:
    """usmle-qa.md, "Unbiased KL Estimate"."""
    generator = torch.Generator().manual_seed(0)
    current, reference = (torch.randn(3, 4, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    p, q = F.softmax(current, dim=-1), F.softmax(reference, dim=-1)
    kl = (p * (torch.log(p + 1e-8) - torch.log(q + 1e-8))).sum(dim=-1)
    printed = kl * (p / (q + 1e-8)).mean(dim=-1)
    torch.testing.assert_close(compute_unbiased_kl(current, reference), printed, rtol=0, atol=1e-12)
    ours = exact_weighted_kl(torch.log_softmax(current, -1), torch.log_softmax(reference, -1))
    torch.testing.assert_close(ours, printed, rtol=1e-6, atol=1e-6)


def test_usmle_training_step_as_printed() -> None:
    """usmle-qa.md, "Complete GRPO Training Step": advantages, masks, loss on sequence log-probabilities.

    The document divides by the sequences that are kept, the `reinforce` preset by all of them.
    """
    rng = np.random.default_rng(1)
    logp, ref = -rng.exponential(1, (8, 4)), -rng.exponential(1, (8, 4))
    rewards, groups = rng.integers(0, 2, 8).astype(float), np.repeat([0, 1], 4)
    sampling_mask = np.array([1, 1, 0, 1, 1, 1, 1, 0])

    sequence, reference = logp.sum(1), ref.sum(1)
    advantages = np.concatenate([r - r.mean() for r in rewards.reshape(2, 4)])
    mask = (sequence - reference < 0.5) * sampling_mask
    assert 0 < mask.sum() < sampling_mask.sum()
    printed = -(sequence * advantages * mask).sum() / mask.sum()

    np.testing.assert_allclose(group_advantages(rewards, groups, scale="none"), advantages, atol=1e-12)
    np.testing.assert_array_equal(compute_off_policy_mask(sequence, reference), sequence - reference < 0.5)
    tokens = np.ones_like(logp, dtype=bool)
    keep = reference_drift_mask(logp, ref, tokens, 0.5, "sum") & (sampling_mask == 1)[:, None]
    np.testing.assert_array_equal(keep, np.broadcast_to(mask[:, None] == 1, keep.shape))
    case = Case(logp, logp, advantages, keep, ref, 0 * logp, 0 * logp, np.ones_like(logp))
    ours = loss_of(case, make_objective("reinforce")).loss
    assert ours * len(rewards) / mask.sum() == pytest.approx(printed, abs=1e-12)


def test_jax_trainer_loss_as_printed() -> None:
    """jax-grpo-trainer.md, steps 3 to 6."""
    case = random_case(seed=5)
    rewards, groups = np.array([1.0, 0.0, 2.0, 0.0, 1.0]), [0, 0, 0, 1, 1]
    advantages = group_advantages(rewards, groups, scale="none")
    np.testing.assert_allclose(advantages, [0, -1, 1, -0.5, 0.5], atol=1e-15)
    case.advantages, case.correction = advantages, np.ones_like(case.correction)
    policy_log_probs = np.where(case.mask, case.logp, 0).sum(1)
    ref_log_probs = np.where(case.mask, case.ref, 0).sum(1)
    printed = np.mean(-advantages * policy_log_probs) + 0.1 * np.mean(policy_log_probs - ref_log_probs)
    ours = loss_of(case, make_objective("reinforce", beta=0.1, kl_estimator="k1")).loss
    assert ours == pytest.approx(printed, abs=1e-12)


def test_architecture_objective_as_printed() -> None:
    """grpo-architecture.md, section 2: one sequence-level ratio per completion, here with one token each."""
    rng = np.random.default_rng(2)
    logp = -rng.exponential(1, (6, 1))
    old, ref = logp + rng.normal(0, 0.5, (6, 1)), logp + rng.normal(0, 0.5, (6, 1))
    rewards = rng.normal(size=6)
    a = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    w = np.exp(logp - old)[:, 0]
    d = (logp - ref)[:, 0]
    kl = np.exp(-d) + d - 1
    printed = -np.mean(np.minimum(w * a, np.clip(w, 0.8, 1.2) * a) - 0.04 * kl)
    advantages = group_advantages(rewards, [0] * 6)
    ones = np.ones_like(logp)
    case = Case(logp, old, advantages, ones == 1, ref, ones, ones, ones)
    assert loss_of(case, make_objective("grpo", beta=0.04)).loss == pytest.approx(printed, abs=1e-12)
