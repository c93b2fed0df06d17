"""The learner: whole-step gradients whatever the split, skipped rows, optimiser details."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import grads_of, make_batch, make_learner
from tiny_models import tiny_model, tiny_tokenizer

from covey.algorithms import LOSSES, compute_unbiased_kl, make_objective
from covey.pytorch.learner import Learner
from covey.pytorch.policy import Policy
from covey.rollout.learning import Correction, rows_with_gradient
from covey.types import Batch, Episode


def gradient(learner: Learner, batch: Batch, loss_type: str, **options: Any) -> dict[str, torch.Tensor]:
    objective = make_objective(loss_type, **options)
    rows = np.arange(len(batch.episodes))
    settings = {"temperature": 0.8, "max_completion_length": 12}
    settings["reference"], _ = learner.scores(batch, rows, temperature=0.8, reference=True)
    if objective.loss.select is not None:
        logp, _ = learner.scores(batch, rows, temperature=0.8)
        settings["selected"] = objective.select(logp, batch.old_logprobs, batch.advantages, batch.mask)
    learner.forward_backward(batch, rows, objective, **settings)
    return grads_of(learner.policy)


def backward(learner: Learner, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    learner.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    return grads_of(learner.policy)


def logits_of(model: Any, episode: Episode) -> torch.Tensor:
    """Of each sampled token, from transformers' own forward."""
    found = model(input_ids=torch.from_numpy(episode.token_ids)[None]).logits[0, :-1] / 0.8
    return found[torch.from_numpy(episode.sampled[1:])]


def logp_of(logits: torch.Tensor, episode: Episode) -> torch.Tensor:
    said = torch.from_numpy(episode.token_ids[episode.sampled])[:, None]
    return torch.log_softmax(logits, -1).gather(1, said)[:, 0]


FAST = ("dapo", "gspo", "kl_cov")


@pytest.mark.parametrize(
    "loss_type", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in sorted(LOSSES)]
)
@pytest.mark.parametrize("agents", [False, True], ids=["one turn", "agents"])
def test_split_into_micro_batches_leaves_the_gradient(loss_type: str, agents: bool) -> None:
    batch = make_batch(agents=agents)
    whole, split = (gradient(make_learner(tokens_per_micro_batch=n), batch, loss_type, beta=0.1) for n in (10_000, 16))
    assert whole
    torch.testing.assert_close(whole, split, rtol=2e-4, atol=1e-6)


def test_gradient_matches_the_formula_on_the_plain_model() -> None:
    """Loss type grpo by its definition, one sequence at a time."""
    batch, learner, total = make_batch(), make_learner(), torch.zeros(())
    ours = gradient(learner, batch, "grpo")
    for row, episode in enumerate(batch.episodes):
        logp = logp_of(logits_of(learner.policy.model, episode), episode)
        ratio = torch.exp(logp - torch.from_numpy(batch.old_logprobs[row, : len(logp)]))
        advantage = float(batch.advantages[row, 0])
        per_token = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        total = total + per_token.mean() / len(batch.episodes)
    torch.testing.assert_close(ours, backward(learner, total), rtol=1e-3, atol=1e-6)


def test_gradient_of_the_usmle_document_on_the_plain_model() -> None:
    """usmle-qa.md: sums over kept sequences by their number, the KL of all tokens."""
    full, learner = make_batch(), make_learner()
    dropped = np.zeros(full.mask.shape, np.bool_)
    dropped[[1, 5, 6]] = full.mask[[1, 5, 6]]
    batch = replace(full, mask=full.mask & ~dropped, excluded={"validity_mask": dropped})
    ours = gradient(learner, batch, "reinforce_kept", beta=0.1, kl_estimator="exact_weighted")
    model, policy_loss, kl = learner.policy.model, torch.zeros((), dtype=torch.float64), []
    for row, episode in enumerate(batch.episodes):
        current = logits_of(model, episode).double()
        with torch.no_grad(), model.disable_adapter():
            frozen = logits_of(model, episode).double()
        sequence = logp_of(current, episode).sum()
        policy_loss = policy_loss - sequence * float(full.advantages[row, 0]) * (row not in (1, 5, 6)) / 9
        kl.append(compute_unbiased_kl(current, frozen))
    expected = backward(learner, policy_loss + 0.1 * torch.cat(kl).mean())
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=5e-5)


def test_rows_without_gradient_are_skipped_exactly() -> None:
    batch, objective, found = make_batch(), make_objective("dapo"), []
    batch.advantages[:4] = 0  # a tied group
    batch.mask[5] = False
    rows = rows_with_gradient(batch, objective)
    assert rows.tolist() == [4, 6, 7, 8, 9, 10, 11]
    assert rows_with_gradient(batch, make_objective("dapo", beta=0.1)).tolist() == [*range(5), *range(6, 12)]
    for chosen in (rows, np.arange(12)):
        learner = make_learner()
        learner.forward_backward(batch, chosen, objective, temperature=1.0, max_completion_length=12)
        found.append(grads_of(learner.policy))
    torch.testing.assert_close(*found, rtol=2e-4, atol=1e-7)


def test_correction_for_a_sampler_that_disagrees() -> None:
    """With the correction the ratio starts at 1 and the sampler's error enters through the bounded factor only."""
    learner = make_learner()
    settings = {"temperature": 1.0, "max_completion_length": 12, "correction": Correction("token_mask", 1e-9)}
    run = learner.forward_backward(make_batch(), np.arange(12), make_objective("grpo"), **settings)
    assert run.metrics["ratio_min"] == run.metrics["ratio_max"] == 1.0
    assert all(float(grad.abs().max()) == 0 for grad in grads_of(learner.policy).values())


def test_step_clips_and_refuses_a_gradient_that_is_not_finite() -> None:
    learner = make_learner(max_grad_norm=0.5)
    before, parameters = learner.policy.state_dict(), learner.policy.trainable_parameters()
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, float("nan"))
    assert np.isnan(learner.optim_step(1e-2))
    assert all(torch.equal(before[name], value) for name, value in learner.policy.state_dict().items())
    assert learner.steps == 0
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    assert learner.optim_step(1e-2) == pytest.approx(sum(p.numel() for p in parameters) ** 0.5, rel=1e-4)
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
