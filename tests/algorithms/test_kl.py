"""KL estimators: by hand, by enumerating a small vocabulary, and at the first step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from algorithm_cases import finite_difference, jax_gradient, loss_of, random_case, torch_gradient

from covey import algorithms as alg
from covey.algorithms.kl import log_softmax

RNG = np.random.default_rng(0)
POLICY, REFERENCE, SAMPLER = (log_softmax(RNG.normal(0, 1.5, 6)) for _ in range(3))
EACH_LOSS_AND_ESTIMATOR = [(name, "abs") for name in alg.LOSSES] + [("grpo", name) for name in alg.KL_ESTIMATORS]


def test_sampled_estimators_by_hand_zero_at_the_first_step_and_k3_is_accurate_near_zero_and_never_negative() -> None:
    logp, ref, old = np.log([0.5]), np.log([0.25]), np.log([0.1])
    one, two, named = np.log(2), 0.5 + np.log(2) - 1, alg.KL_ESTIMATORS
    found = [alg.k1(logp, ref), alg.k2(logp, ref), alg.k3(logp, ref), alg.k3_unbiased(logp, ref, old)]
    found += [alg.k3_unbiased(logp, ref), named["abs"](ref, logp), named["k1+"](logp, ref), named["k3+"](logp, ref)]
    assert np.concatenate(found) == pytest.approx([one, one**2 / 2, two, 5 * two, two, one, one, two])
    p, q = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    divergence = 0.5 * np.log(2) + 0.5 * np.log(2 / 3)
    assert alg.exact_kl(p, q) == pytest.approx([divergence])
    assert alg.exact_weighted_kl(p, q) == pytest.approx([divergence * (2 + 2 / 3) / 2])
    logp = np.array([-80.0, -1.3, -1e-9, 0.0])
    for estimate in alg.KL_ESTIMATORS.values():
        assert (estimate(logp, logp, logp - 0.3) == 0).all()
    for whole in (*alg.VOCABULARY_KL.values(), alg.compute_unbiased_kl):
        assert whole(POLICY, POLICY) == 0
    d = np.array([1e-9, -1e-9, 1e-7, 0.3, -0.3, 25.0, 1e4])
    value = alg.k3(d, np.zeros_like(d))
    assert (value >= 0).all()
    assert value[2] == pytest.approx(0.5e-14, rel=1e-6, abs=0)  # d² / 2, not exp(-d) - 1 + d
    assert value[-2:] == pytest.approx([24.0, 9999.0])  # exp(-d) is nothing there


@pytest.mark.parametrize("name", ["k1+", "k3+"])
def test_straight_through_estimators_have_the_gradient_of_the_kl_on_policy(name: str) -> None:
    """The expectation of d · grad log p is the KL's gradient; that of k1's own gradient is 0."""
    logits = torch.from_numpy(POLICY).clone().requires_grad_()
    policy = torch.log_softmax(logits, dim=-1)
    (ours,) = torch.autograd.grad(expectation(name, policy.detach(), policy), logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(alg.exact_kl(policy, torch.from_numpy(REFERENCE)), logits, retain_graph=True)
    torch.testing.assert_close(ours, wanted)
    assert not torch.allclose(torch.autograd.grad(expectation(name[:2], policy.detach(), policy), logits)[0], wanted)


def expectation(estimator: str, sampler: torch.Tensor, policy: torch.Tensor) -> torch.Tensor:
    """Mean over tokens drawn from `sampler`, exactly: a sum over the vocabulary with fixed probabilities."""
    return (sampler.exp() * alg.KL_ESTIMATORS[estimator](policy, torch.from_numpy(REFERENCE), sampler)).sum()


def test_k3_unbiased_has_the_value_and_the_gradient_of_the_kl_off_policy() -> None:
    logits = torch.from_numpy(POLICY).clone().requires_grad_()
    policy, sampler = torch.log_softmax(logits, dim=-1), torch.from_numpy(SAMPLER)
    true, estimate = alg.exact_kl(policy, torch.from_numpy(REFERENCE)), expectation("k3_unbiased", sampler, policy)
    true_gradient, gradient = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (true, estimate))
    assert float(estimate.detach()) == pytest.approx(float(true.detach()), abs=1e-12)
    np.testing.assert_allclose(gradient, true_gradient, atol=1e-12)
    # k3 is right on-policy in value only, and neither off-policy
    assert float(expectation("k3", policy.detach(), policy).detach()) == pytest.approx(float(true.detach()), abs=1e-12)
    assert abs(float((expectation("k3", sampler, policy) - true).detach())) > 0.05


@pytest.mark.parametrize("function", [alg.exact_kl, alg.exact_weighted_kl, alg.compute_unbiased_kl])
def test_vocabulary_gradients_in_all_libraries(function: object) -> None:
    """Two tokens with a vocabulary of five, differentiated through the softmax."""
    logits, reference = RNG.normal(0, 1, (2, 5)), log_softmax(RNG.normal(0, 1, (2, 5)))

    def total(x: object, q: object) -> object:
        return function(log_softmax(x), q).sum()

    expected = finite_difference(lambda x: float(total(x, reference)), logits)
    tensor = torch.from_numpy(logits).clone().requires_grad_()
    value = total(tensor, torch.from_numpy(reference))
    (by_torch,) = torch.autograd.grad(value, tensor)
    jax_value, by_jax = jax.jit(jax.value_and_grad(total))(jnp.asarray(logits), jnp.asarray(reference))
    assert [float(value.detach()), float(jax_value)] == pytest.approx([float(total(logits, reference))] * 2, abs=1e-10)
    np.testing.assert_allclose(by_torch, expected, atol=1e-7)
    np.testing.assert_allclose(by_jax, by_torch, rtol=0, atol=1e-10)


def test_the_whole_is_the_sum_of_chunks_of_tokens() -> None:
    p, q = log_softmax(RNG.normal(size=(5, 7))), log_softmax(RNG.normal(size=(5, 7)))
    for function in alg.VOCABULARY_KL.values():
        np.testing.assert_allclose(np.concatenate([function(p[:2], q[:2]), function(p[2:], q[2:])]), function(p, q))


def test_a_kept_support_is_renormalised_and_differentiable() -> None:
    logp, support = np.log([[0.5, 0.3, 0.2]]), np.array([[True, False, True]])
    kept = alg.restrict_to_support(logp, support)
    np.testing.assert_allclose(np.exp(kept), [[5 / 7, 0, 2 / 7]])
    reference = alg.restrict_to_support(np.log([[0.1, 0.6, 0.3]]), support)  # 1/4, 3/4
    assert alg.exact_kl(kept, reference) == pytest.approx([5 / 7 * np.log(20 / 7) + 2 / 7 * np.log(8 / 21)])
    logits = torch.from_numpy(logp).clone().requires_grad_()
    value = alg.exact_kl(alg.restrict_to_support(logits, torch.from_numpy(support)), torch.from_numpy(reference)).sum()
    (gradient,) = torch.autograd.grad(value, logits)
    numeric = finite_difference(lambda x: float(alg.exact_kl(alg.restrict_to_support(x, support), reference)[0]), logp)
    np.testing.assert_allclose(gradient, numeric, atol=1e-8)
    # what lies outside the support does not matter, whatever it is
    np.testing.assert_array_equal(alg.restrict_to_support(np.where(support, logp, np.nan), support), kept)


@pytest.mark.parametrize(("loss_type", "estimator"), EACH_LOSS_AND_ESTIMATOR)
def test_the_first_step_has_the_same_gradient_with_both_backends(loss_type: str, estimator: str) -> None:
    """Policy, sampler and reference are one: where `|x|` has a corner, and JAX's `abs` the gradient 1."""
    case = random_case(seed=8)
    case.old = case.ref = case.logp
    objective = alg.make_objective(loss_type, beta=0.3, kl_estimator=estimator)
    both = [of(case, lambda c: loss_of(c, objective).loss) for of in (jax_gradient, torch_gradient)]
    (value, gradient), (expected, wanted) = both
    assert value == pytest.approx(expected, abs=1e-12)
    np.testing.assert_allclose(gradient, wanted, atol=1e-12)
