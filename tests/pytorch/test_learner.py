"""The learner: whole-step gradients whatever the split, skipped rows, optimiser details."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import make_batch, make_learner
from tiny_models import tiny_model, tiny_tokenizer

from covey.algorithms import LOSSES, compute_unbiased_kl, make_objective
from covey.pytorch.learner import Learner
from covey.pytorch.policy import Policy
from covey.rollout.learning import Correction, rows_with_gradient
from covey.types import Batch, Episode


def gradient(learner: Learner, batch: Batch, loss_type: str, **options: Any) -> dict[str, torch.Tensor]:
    objective = make_objective(loss_type, **options)
    rows = np.arange(len(batch.episodes))
    reference, _ = learner.scores(batch, rows, temperature=0.8, reference=True)
    settings = {"temperature": 0.8, "max_completion_length": 12}
    selected = None
    if objective.loss.select is not None:
        logp, _ = learner.scores(batch, rows, temperature=0.8)
        selected = objective.select(logp, batch.old_logprobs, batch.advantages, batch.mask)
    learner.forward_backward(batch, rows, objective, reference=reference, selected=selected, **settings)
    return {name: p.grad.clone() for name, p in learner.policy.named_trainable_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "loss_type",
    [
        pytest.param(name, marks=() if name in ("dapo", "gspo", "kl_cov") else pytest.mark.slow)
        for name in sorted(LOSSES)
    ],
)
@pytest.mark.parametrize("agents", [False, True], ids=["one turn", "agents"])
def test_split_into_micro_batches_leaves_the_gradient(loss_type: str, agents: bool) -> None:
    batch = make_batch(agents=agents)
    whole = gradient(make_learner(tokens_per_micro_batch=10_000), batch, loss_type, beta=0.1)
    split = gradient(make_learner(tokens_per_micro_batch=16), batch, loss_type, beta=0.1)
    assert whole
    for name in whole:
        torch.testing.assert_close(whole[name], split[name], rtol=2e-4, atol=1e-6)


def test_gradient_matches_the_formula_on_the_plain_model() -> None:
    """Loss type grpo by its definition, on transformers' own logits, one sequence at a time."""
    batch = make_batch()
    learner = make_learner()
    ours = gradient(learner, batch, "grpo")
    learner.optimizer.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for row, episode in enumerate(batch.episodes):
        logits = learner.policy.model(input_ids=torch.from_numpy(episode.token_ids)[None]).logits[0] / 0.8
        logp = torch.log_softmax(logits[:-1], -1).gather(1, torch.from_numpy(episode.token_ids[1:, None]))[:, 0]
        logp = logp[torch.from_numpy(episode.sampled[1:])]
        ratio = torch.exp(logp - torch.from_numpy(batch.old_logprobs[row, : len(logp)]))
        advantage = float(batch.advantages[row, 0])
        per_token = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        total = total + per_token.mean() / len(batch.episodes)
    total.backward()
    for name, parameter in learner.policy.named_trainable_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_gradient_of_the_usmle_document_on_the_plain_model() -> None:
    """usmle-qa.md: sums over kept sequences by their number, the KL of all tokens; on transformers' own logits."""
    full = make_batch()
    dropped = np.zeros(full.mask.shape, np.bool_)
    dropped[[1, 5, 6]] = full.mask[[1, 5, 6]]
    batch = replace(full, mask=full.mask & ~dropped, excluded={"validity_mask": dropped})
    learner = make_learner()
    ours = gradient(learner, batch, "reinforce_kept", beta=0.1, kl_estimator="exact_weighted")
    learner.optimizer.zero_grad(set_to_none=True)
    model = learner.policy.model

    def logits_of(episode: Episode) -> torch.Tensor:
        found = model(input_ids=torch.from_numpy(episode.token_ids)[None]).logits[0, :-1] / 0.8
        return found[torch.from_numpy(episode.sampled[1:])].double()

    policy_loss, kl = torch.zeros((), dtype=torch.float64), []
    for row, episode in enumerate(batch.episodes):
        current = logits_of(episode)
        with torch.no_grad(), model.disable_adapter():
            frozen = logits_of(episode)
        said = torch.from_numpy(episode.token_ids[episode.sampled])[:, None]
        sequence = torch.log_softmax(current, -1).gather(1, said).sum()
        policy_loss = policy_loss - sequence * float(full.advantages[row, 0]) * (row not in (1, 5, 6)) / 9
        kl.append(compute_unbiased_kl(current, frozen))
    (policy_loss + 0.1 * torch.cat(kl).mean()).backward()
    for name, parameter in learner.policy.named_trainable_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=5e-5)


def test_rows_without_gradient_are_skipped_exactly() -> None:
    batch = make_batch()
    advantages = batch.advantages.copy()
    advantages[:4] = 0  # a tied group
    mask = batch.mask.copy()
    mask[5] = False
    batch = replace(batch, advantages=advantages, mask=mask)
    objective = make_objective("dapo")
    assert rows_with_gradient(batch, objective).tolist() == [4, 6, 7, 8, 9, 10, 11]
    assert rows_with_gradient(batch, make_objective("dapo", beta=0.1)).tolist() == [*range(5), *range(6, 12)]
    few, all_rows = make_learner(), make_learner()
    for learner, rows in ((few, rows_with_gradient(batch, objective)), (all_rows, np.arange(12))):
        learner.forward_backward(batch, rows, objective, temperature=1.0, max_completion_length=12)
    pairs = zip(few.policy.named_trainable_parameters(), all_rows.policy.named_trainable_parameters(), strict=True)
    for (_, ours), (_, theirs) in pairs:
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-4, atol=1e-7)


def test_correction_for_a_sampler_that_disagrees() -> None:
    """With the correction the ratio starts at 1 and the sampler's error enters through the bounded factor only."""
    batch = make_batch()
    learner = make_learner()
    rows = np.arange(12)
    run = learner.forward_backward(
        batch, rows, make_objective("grpo"), temperature=1.0, max_completion_length=12,
        correction=Correction("token_mask", 1e-9),
    )  # fmt: skip
    assert run.metrics["ratio_min"] == run.metrics["ratio_max"] == 1.0
    assert all(float(p.grad.abs().max()) == 0 for p in learner.policy.trainable_parameters() if p.grad is not None)


def test_step_clips_and_refuses_a_gradient_that_is_not_finite() -> None:
    learner = make_learner(max_grad_norm=0.5)
    before = learner.policy.state_dict()
    for parameter in learner.policy.trainable_parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    assert np.isnan(learner.optim_step(1e-2))
    assert all(torch.equal(before[name], value) for name, value in learner.policy.state_dict().items())
    assert learner.steps == 0
    for parameter in learner.policy.trainable_parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(parameter.numel() for parameter in learner.policy.trainable_parameters())
    assert learner.optim_step(1e-2) == pytest.approx(count**0.5, rel=1e-4)
    assert learner.steps == 1
    # Adam's first step moves every weight by the learning rate.
    for name, value in learner.policy.state_dict().items():
        torch.testing.assert_close(before[name] - value, torch.full_like(value, 1e-2), rtol=1e-3, atol=0)


def test_embedding_rate_keeps_its_ratio_under_a_schedule() -> None:
    policy = Policy.load(tiny_model("llama"), tiny_tokenizer(), use_peft=False)
    learner = Learner(policy, learning_rate=1e-3, embedding_lr=1e-2)
    for parameter in policy.trainable_parameters():
        parameter.grad = torch.ones_like(parameter)
    learner.optim_step(5e-4)
    rates = {group["name"]: group["lr"] for group in learner.optimizer.param_groups}
    assert rates["embeddings"] == pytest.approx(5e-3)
    assert rates["weights"] == pytest.approx(5e-4)
