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
from covey.algorithms import policy_loss as policy_loss_of
from covey.rollout.learning import loss_weights, rows_with_gradient
from covey.types import Batch


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
    """usmle-qa.md, "Complete GRPO Training Step", line by line; completions of 1 to 4 tokens, 11 words."""
    rng = np.random.default_rng(1)
    lengths = np.array([4, 2, 3, 4, 1, 4, 2, 3])
    tokens = np.arange(4) < lengths[:, None]
    current, frozen = (torch.from_numpy(rng.normal(size=(8, 4, 11))) for _ in range(2))
    current.requires_grad_()
    said = torch.from_numpy(rng.integers(0, 11, (8, 4, 1)))
    logp, ref = (torch.log_softmax(x, -1).gather(2, said)[..., 0] for x in (current, frozen))
    rewards, groups = rng.integers(0, 2, 8).astype(float), np.repeat([0, 1], 4)
    sampling_mask = np.array([1, 1, 0, 1, 1, 1, 1, 0])

    exists = torch.from_numpy(tokens)
    all_log_probs, ref_log_probs = (torch.where(exists, x, 0).sum(1) for x in (logp, ref))
    sequence, reference = all_log_probs.detach().numpy(), ref_log_probs.numpy()
    advantages = np.concatenate([r - r.mean() for r in rewards.reshape(2, 4)])
    mask = (sequence - reference < 0.5) * sampling_mask
    assert 0 < mask.sum() < sampling_mask.sum()
    kl = compute_unbiased_kl(current, frozen)[exists]
    policy_loss = -(all_log_probs * torch.from_numpy(advantages * mask)).sum() / mask.sum()
    printed = policy_loss + 0.01 * kl.mean()
    (gradient,) = torch.autograd.grad(printed, current)

    np.testing.assert_allclose(group_advantages(rewards, groups, scale="none"), advantages, atol=1e-12)
    np.testing.assert_array_equal(compute_off_policy_mask(sequence, reference), sequence - reference < 0.5)
    old = logp.detach().numpy()
    keep = reference_drift_mask(old, ref.numpy(), tokens, 0.5, "sum") & (sampling_mask == 1)[:, None]
    np.testing.assert_array_equal(keep, np.broadcast_to(mask[:, None] == 1, keep.shape))
    active = tokens & keep
    objective = make_objective("reinforce_kept", beta=0.01, kl_estimator="exact_weighted")
    logp = torch.log_softmax(current, -1).gather(2, said)[..., 0]
    exact = exact_weighted_kl(torch.log_softmax(current, -1), torch.log_softmax(frozen, -1))
    batch = Batch((), groups, advantages[:, None] * np.ones((8, 4)), active, old, {"masks": tokens & ~active})
    weights, kl_weights = loss_weights(batch, objective, 4)
    given = (torch.from_numpy(x) for x in (old, batch.advantages, active, weights.astype(np.float64)))
    ours = policy_loss_of(logp, *given, objective, kl=exact, kl_weights=torch.from_numpy(kl_weights)).loss
    assert ours.item() == pytest.approx(printed.item(), rel=1e-6)
    torch.testing.assert_close(torch.autograd.grad(ours, current)[0], gradient, rtol=1e-5, atol=1e-7)


def test_usmle_loss_by_hand() -> None:
    """Two completions kept of three, advantages 1/2, -1/2 and 0; the KL is that of all four tokens."""
    mask = np.array([[True, True], [True, False], [False, False]])
    dropped = np.array([[False, False], [False, False], [True, False]])
    logp = np.array([[-1.0, -2.0], [-0.5, 9.0], [-7.0, 9.0]])
    kl = np.array([[0.3, 0.1], [0.2, 9.0], [1.0, 9.0]])
    advantages = np.array([[0.5], [-0.5], [0.0]]) * np.ones((3, 2))
    objective = make_objective("reinforce_kept", beta=0.1, kl_estimator="exact_weighted")
    batch = Batch((), np.zeros(3), advantages, mask, logp, {"validity_mask": dropped})
    weights, kl_weights = loss_weights(batch, objective, 2)
    terms = policy_loss_of(logp, logp, advantages, mask, weights, objective, kl=kl, kl_weights=kl_weights)
    assert float(terms.metrics["policy_loss"]) == pytest.approx((0.5 * 3 - 0.5 * 0.5) / 2)
    assert float(terms.loss) == pytest.approx(0.625 + 0.1 * (0.3 + 0.1 + 0.2 + 1.0) / 4)
    assert rows_with_gradient(batch, objective).tolist() == [0, 1, 2]
    assert rows_with_gradient(batch, make_objective("reinforce_kept")).tolist() == [0, 1]


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
