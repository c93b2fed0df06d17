"""The parts that grpo-architecture.md names, against the step that `train` takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from covey import GRPOConfig, GRPOTrainer

ROWS = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four", "five")]


def share_of_letters(completions: list[str], **columns: Any) -> list[float]:
    return [sum(c.isalpha() for c in text) / 8 for text in completions]


def test_a_step_by_hand_is_the_step_of_train(settings: dict[str, Any]) -> None:
    args = GRPOConfig(
        **(settings | {"beta": 0.1, "max_steps": 1, "num_iterations": 1, "lr_scheduler_type": "constant"})
    )
    by_hand = GRPOTrainer(reward_funcs=share_of_letters, args=args, train_dataset=ROWS)
    trained = GRPOTrainer(reward_funcs=share_of_letters, args=args, train_dataset=ROWS)
    trained.train()

    rollout = by_hand.rollout()
    assert [group.rewards.shape for group in rollout.groups] == [(4,), (4,)]
    loss = by_hand.compute_loss(rollout)
    assert loss == pytest.approx(trained.state.log_history[0]["loss"], abs=1e-7)
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in by_hand.policy_model.parameters())
    by_hand.learner.optim_step(args.learning_rate)
    for name, tensor in trained.policy.state_dict().items():
        torch.testing.assert_close(by_hand.policy.state_dict()[name], tensor)


def test_the_reference_is_frozen(settings: dict[str, Any]) -> None:
    trainer = GRPOTrainer(
        reward_funcs=share_of_letters, args=GRPOConfig(**(settings | {"beta": 0.1})), train_dataset=ROWS
    )
    tokens = torch.tensor([[5, 6, 7]])
    before = trainer.ref_model(tokens).logits
    torch.testing.assert_close(trainer.policy_model(tokens).logits.detach(), before)
    trainer.compute_loss(trainer.rollout(ROWS[3:]))
    trainer.learner.optim_step(0.1)
    assert torch.equal(trainer.ref_model(tokens).logits, before)
    assert not torch.equal(trainer.policy_model(tokens).logits, before)
    none = GRPOTrainer(reward_funcs=share_of_letters, args=GRPOConfig(**(settings | {"beta": 0.0})), train_dataset=ROWS)
    assert none.ref_model is None
