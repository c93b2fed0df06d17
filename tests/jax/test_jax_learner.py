"""The learner in JAX gives the PyTorch learner's numbers: same weights, same batch, same gradients and steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax_cases import like_pytorch, torch_names, tree_batch
from learner_cases import make_batch, make_learner

from covey.algorithms import make_objective
from covey.jax.learner import Learner
from covey.rollout.learning import Correction
from covey.types import Batch, Support

GMPO = f"{Path(__file__).parents[2]}/recipes/gmpo/gmpo.py:gmpo"


def both(batch: Batch, loss_type: str, correction: Correction | None = None, **options: Any) -> tuple[Any, Any]:
    """Gradients by PyTorch's names and results, from PyTorch and from JAX."""
    theirs = make_learner()
    ours = Learner(like_pytorch(theirs.policy), learning_rate=1e-2)
    objective = make_objective(loss_type, **options)
    rows = np.arange(len(batch.episodes))
    found = []
    for learner in (theirs, ours):
        reference, _ = learner.scores(batch, rows, temperature=0.8, reference=True)
        selected = None
        if objective.loss.select is not None:
            logp, _ = theirs.scores(batch, rows, temperature=0.8)
            selected = objective.select(logp, batch.old_logprobs, batch.advantages, batch.mask)
        result = learner.forward_backward(
            batch,
            rows,
            objective,
            temperature=0.8,
            max_completion_length=12,
            reference=reference,
            correction=correction,
            selected=selected,
        )
        found.append((reference, result))
    gradients = {name: p.grad.numpy() for name, p in theirs.policy.named_trainable_parameters()}
    return (gradients, *found[0]), (torch_names(ours._gradient["lora"]), *found[1])


def equal(first: Any, second: Any) -> None:
    (gradients, reference, result), (ours, our_reference, our_result) = first, second
    np.testing.assert_allclose(our_reference, reference, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(our_result.logp, result.logp, rtol=1e-5, atol=2e-6)
    np.testing.assert_array_equal(our_result.scored, result.scored)
    for name, value in result.metrics.items():
        np.testing.assert_allclose(our_result.metrics[name], value, rtol=2e-5, atol=1e-5, err_msg=name)
    assert ours.keys() == gradients.keys()
    scale = max(float(np.abs(value).max()) for value in gradients.values())
    for name, value in gradients.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "gspo_token", "cispo"])
def test_losses(loss_type: str) -> None:
    equal(*both(make_batch(), loss_type, beta=0.1, entropy_coef=0.01))


@pytest.mark.parametrize(
    ("loss_type", "parameters"),
    [
        ("luspo", {}),
        ("vespo", {"k_pos": 1.0}),
        ("kl_cov", {"kl_cov_ratio": 0.2}),
        ("clip_cov", {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.01}),
        (GMPO, {"clip": 0.1}),
    ],
)
def test_losses_with_parameters_of_their_own(loss_type: str, parameters: dict[str, float]) -> None:
    equal(*both(make_batch(), loss_type, Correction("token_mask", 1.2, 0.9), beta=0.1, **parameters))


@pytest.mark.parametrize("kl_estimator", ["k1", "k3+", "k3_unbiased", "exact_weighted"])
def test_every_divergence(kl_estimator: str) -> None:
    equal(*both(make_batch(), "dapo", beta=0.1, kl_estimator=kl_estimator))


def test_agents_correction_and_kept_supports() -> None:
    equal(*both(make_batch(agents=True), "grpo", Correction("token_truncate", 1.2), beta=0.1))
    batch = make_batch()
    rng = np.random.default_rng(1)

    def with_support(episode: Any) -> Any:
        kept = [np.union1d(rng.integers(4, 97, 9), [t]) for t in episode.token_ids[episode.sampled]]
        ends = np.cumsum([0, *map(len, kept)])
        return replace(episode, support=Support(np.concatenate(kept), ends))

    equal(*both(replace(batch, episodes=tuple(map(with_support, batch.episodes))), "grpo", beta=0.1))


def test_rows_that_share_what_they_sampled() -> None:
    found = both(tree_batch(supports=True), "dapo", beta=0.1, entropy_coef=0.01)
    equal(*found)
    theirs, ours = (result.tokens for *_, result in found)
    assert ours == theirs
    assert ours.unique == ours.computed < 0.7 * ours.raw


def test_the_cut_into_micro_batches_changes_nothing() -> None:
    batch, policy = make_batch(agents=True), like_pytorch(make_learner().policy)
    found = []
    for budget in (16, 64, 10_000):
        learner = Learner(policy, learning_rate=1e-2, tokens_per_micro_batch=budget)
        run = learner.forward_backward(
            batch, np.arange(12), make_objective("dapo"), temperature=1.0, max_completion_length=12
        )
        found.append((run.logp, torch_names(learner._gradient["lora"])))
    for logp, gradient in found[1:]:
        np.testing.assert_allclose(logp, found[0][0], atol=1e-5)
        for name, value in gradient.items():
            np.testing.assert_allclose(value, found[0][1][name], rtol=1e-4, atol=1e-6)


def test_steps_of_adamw_are_those_of_pytorch() -> None:
    theirs = make_learner(weight_decay=0.1, max_grad_norm=0.05)
    ours = Learner(like_pytorch(theirs.policy), learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.05)
    for step in range(3):
        batch, rate = make_batch(seed=step), 1e-2 / (step + 1)
        norms = []
        for learner in (theirs, ours):
            learner.forward_backward(
                batch, np.arange(12), make_objective("grpo"), temperature=1.0, max_completion_length=12
            )
            norms.append(learner.optim_step(rate))
        assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    moved = torch_names(ours.policy.trained["lora"])
    for name, value in theirs.policy.state_dict().items():
        np.testing.assert_allclose(moved[name], value.numpy(), atol=2e-4)
    assert ours.steps == 3
    assert ours.optim_step(1.0) == 0.0  # no gradient was accumulated
    none = np.zeros(0, np.int64)  # as where all groups are tied
    ours.forward_backward(make_batch(), none, make_objective("grpo"), temperature=1.0, max_completion_length=12)
    assert ours.optim_step(1.0) == 0.0
    assert ours.steps == 3


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    policy = like_pytorch(make_learner().policy)
    learner, batch = Learner(policy, learning_rate=1e-2), make_batch()
    before = learner.tensors()["policy"]
    broken = replace(batch, advantages=np.where(batch.mask, np.float32("nan"), 0))
    learner.forward_backward(broken, np.arange(12), make_objective("grpo"), temperature=1.0, max_completion_length=12)
    assert np.isnan(learner.optim_step(1e-2))
    after = learner.tensors()["policy"]
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert learner.steps == 0


@pytest.mark.parametrize("rule", ["copy", "ema"])
def test_the_reference_follows_by_its_rule(rule: str) -> None:
    policy = like_pytorch(
        make_learner().policy, reference_update=rule, reference_update_steps=2, reference_ema_decay=0.9
    )
    learner, batch = Learner(policy, learning_rate=1e-2), make_batch()
    start = torch_names(policy.trained["lora"])

    def step() -> None:
        learner.forward_backward(
            batch, np.arange(12), make_objective("grpo"), temperature=1.0, max_completion_length=12
        )
        learner.optim_step(1e-2)

    step()
    held = torch_names(policy.reference.snapshot["lora"])
    assert all(np.array_equal(held[name], start[name]) for name in start)
    step()
    now, held = torch_names(policy.trained["lora"]), torch_names(policy.reference.snapshot["lora"])
    for name, value in start.items():
        wanted = now[name] if rule == "copy" else value + 0.1 * (now[name] - value)
        np.testing.assert_allclose(held[name], wanted, rtol=1e-5, atol=1e-8)
    saved = learner.tensors()
    again = Learner(like_pytorch(make_learner().policy, reference_update=rule), learning_rate=1e-2)
    again.restore(saved, 2)
    for group, values in again.tensors().items():
        assert values.keys() == saved[group].keys()
        assert all(np.array_equal(values[name], saved[group][name]) for name in values), group
