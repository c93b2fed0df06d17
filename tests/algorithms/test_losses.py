"""Ratios, surrogates, token weights and KL estimators by hand; whole losses are compared in test_objective."""

import math
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from algorithm_cases import finite_difference, jax_gradient, loss_of, random_case, torch_gradient

from covey import algorithms as alg
from covey.algorithms.kl import log_softmax
from covey.errors import ConfigError
from fakes import raises

RATIO = np.array([0.5, 0.9, 1.0, 1.1, 1.5, 4.0])
MASK = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=bool)


def test_ratios_by_hand_and_the_sequence_s_shares_its_gradient_which_the_token_form_does_not() -> None:
    old, logp = np.zeros((2, 3)), np.log([[2.0, 8.0, 5.0], [3.0, 1.0, 1.0]])
    mask = np.array([[True, True, False], [False, False, False]])
    np.testing.assert_allclose(alg.token_ratio(logp, old, mask), [[2, 8, 1], [1, 1, 1]])
    np.testing.assert_allclose(alg.sequence_ratio(logp, old, mask), [[4, 4, 4], [1, 1, 1]])  # sqrt(2 · 8)
    np.testing.assert_allclose(alg.gspo_token_ratio(logp, old, mask), [[4, 4, 4], [1, 1, 1]])
    x = alg.LossInputs(np.log([[2.0, 8.0]]), np.zeros((1, 2)), -np.ones((1, 2)), np.ones((1, 2), bool))
    for name in ("grpo", "cispo", "sapo"):
        found = alg.make_objective(name, importance_sampling_level="sequence")
        np.testing.assert_allclose(found.loss.surrogate(x, dict(found.parameters)).ratio, [[4, 4]])
    old, mask = torch.zeros(1, 2), torch.tensor([[True, True]])
    logp = torch.log(torch.tensor([[2.0, 8.0]])).requires_grad_()
    (shared,) = torch.autograd.grad(alg.sequence_ratio(logp, old, mask)[0, 0], logp)
    (own,) = torch.autograd.grad(alg.gspo_token_ratio(logp, old, mask)[0, 0], logp)
    torch.testing.assert_close(shared, torch.tensor([[2.0, 2.0]]))  # w / 2 tokens
    torch.testing.assert_close(own, torch.tensor([[4.0, 0.0]]))  # w
    # ordinary ratios are not touched by the limit
    d = np.array([[-700.0, -30.0, -5.0, 0.0, 5.0, 19.99, alg.LOG_RATIO_LIMIT, 21.0]])
    ratio = alg.token_ratio(d, np.zeros_like(d), np.ones_like(d, dtype=bool))
    np.testing.assert_array_equal(ratio[0, :-1], np.exp(d[0, :-1]))
    assert ratio[0, -1] == math.exp(alg.LOG_RATIO_LIMIT)


def test_clip_is_the_printed_formula_and_where_it_acts() -> None:
    for advantage, delta in product((-2.0, 0.0, 3.0), (None, 2.0)):
        a = np.full_like(RATIO, advantage)
        w = RATIO if delta is None else np.minimum(RATIO, delta)
        printed = -np.minimum(w * a, np.clip(w, 1 - 0.2, 1 + 0.3) * a)
        np.testing.assert_allclose(alg.clip_surrogate(RATIO, a, 0.2, 0.3, delta).loss, printed)
    up, down = (alg.clip_surrogate(RATIO, sign * np.ones_like(RATIO), 0.2, 0.3) for sign in (1, -1))
    assert (up.high.tolist(), up.low.any()) == ([False] * 4 + [True] * 2, False)
    assert (down.low.tolist(), down.high.any()) == ([True] + [False] * 5, False)
    assert alg.clip_surrogate(RATIO, -np.ones_like(RATIO), 0.2, 0.3, 2.0).high.tolist() == [False] * 5 + [True]
    # A ratio exactly on a bound is not clipped; with epsilon 0 that is every ratio of the first pass.
    ratio = torch.ones(2, requires_grad=True)
    loss = alg.clip_surrogate(ratio, torch.tensor([1.0, -1.0]), 0.0, 0.0).loss.sum()
    assert torch.autograd.grad(loss, ratio)[0].tolist() == [-1.0, 1.0]


def one_row(logp: Any, ratio: Any, advantages: Any) -> alg.LossInputs:
    """Tokens of one row each with a ratio."""
    old = logp - (torch.log(ratio) if isinstance(ratio, torch.Tensor) else np.log(ratio))
    return alg.LossInputs(logp[:, None], old[:, None], advantages[:, None], advantages[:, None] == advantages[:, None])


def test_cispo_keeps_the_gradient_of_capped_tokens_and_sapo_gate_by_hand() -> None:
    logp = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ratio = torch.exp(torch.tensor([0.5, 3.0], dtype=torch.float64))  # 1.65 and 20.1
    x = one_row(logp, ratio, torch.tensor([2.0, 2.0], dtype=torch.float64))
    x = alg.LossInputs(x.logp, x.old.detach(), x.advantages, x.mask)
    surrogate = alg.LOSSES["cispo"](x, epsilon_max=5.0)
    (gradient,) = torch.autograd.grad(surrogate.loss.sum(), logp)
    assert gradient.tolist() == pytest.approx([-2 * math.exp(0.5), -10.0])
    assert surrogate.high[:, 0].tolist() == [False, True]

    # at w = 1 the gate is 2 / tau and its slope 1
    def loss(ratio: Any, dtype: type = np.float64) -> Any:
        x = one_row(np.zeros(2, dtype), np.asarray(ratio, dtype), np.array([1.0, -1.0], dtype))
        return alg.LOSSES["sapo"](x, *temperatures).loss[:, 0]

    temperatures = (1.0, 2.0)
    np.testing.assert_allclose(loss([1.0, 1.0]), [-2.0, 1.0])
    h = 1e-6
    np.testing.assert_allclose((loss([1 + h, 1 + h]) - loss([1 - h, 1 - h])) / (2 * h), [-1.0, 1.0], atol=1e-8)
    temperatures = (1e4, 1e4)  # sharp ones do not overflow
    assert np.isfinite(loss([1e-30, 4e8], np.float32)).all()


def test_the_averages_and_upper_ranges_of_the_shelf() -> None:
    assert {name: loss.aggregation for name, loss in alg.LOSSES.items()} == {
        **dict.fromkeys(("grpo", "gspo", "gspo_token", "sapo", "gmpo"), "sequence_mean"),
        **dict.fromkeys(("bnpo", "dapo", "cispo", "vespo", "clip_cov", "kl_cov"), "token_mean"),
        "dr_grpo": "constant_length",
        **dict.fromkeys(("reinforce", "luspo"), "sequence_sum_mean"),
        "reinforce_kept": "sequence_sum_kept",
    }
    assert {name for name, loss in alg.LOSSES.items() if loss.kl_aggregation} == {"reinforce_kept"}
    assert hash(alg.make_objective("grpo")) == hash(alg.make_objective("grpo"))
    x = one_row(np.zeros(1), np.array([50.0]), np.ones(1))
    cases = [("dapo", {"epsilon": None, "beta": None}, 0.28), ("grpo", {"epsilon": 0.1}, 0.1), ("gspo", {}, 4e-4)]
    cases += [("dapo", {"epsilon": 0.2}, 0.28), ("dapo", {"epsilon": 0.3}, 0.3), ("gspo", {"epsilon": 0.2}, 0.2)]
    cases += [(name, {"epsilon": low, "epsilon_high": 0.25}, 0.25) for name, low in (("dapo", 0.3), ("gspo", 0.2))]
    for loss_type, settings, upper in [*cases, ("luspo", {}, 2.5e-3)]:
        objective = alg.make_objective(loss_type, **settings)
        assert objective.loss.surrogate(x, dict(objective.parameters)).loss[0, 0] == pytest.approx(-(1 + upper))


def test_errors_name_the_value_and_the_nearest_name() -> None:
    for changes, message in (
        ({"loss_type": "xyz"}, "loss_type='xyz'"),
        ({"loss_type": "grpoo"}, "did you mean 'grpo'"),
        ({"epsilon_hihg": 0.1}, "did you mean 'epsilon_high'"),
        ({"kl_estimator": "k3_unbias"}, "did you mean 'k3_unbiased'"),
        ({"aggregation": "token_men"}, "did you mean 'token_mean'"),
        ({"importance_sampling_level": "sequnce"}, "did you mean 'sequence'"),
        ({"loss_type": "cispo", "epsilon": 0.1}, "loss_parameters='epsilon': no such name; did you mean 'epsilon_max'"),
        ({"epsilon": 1.5}, "epsilon=1.5"),
        ({"epsilon_high": -0.1}, "epsilon_high=-0.1"),
        ({"delta": 1.1}, "delta=1.1: below 1 \\+ epsilon_high = 1.2"),
        ({"loss_type": "cispo", "epsilon_max": 0.0}, "epsilon_max=0.0"),
        ({"loss_type": "sapo", "sapo_temperature_pos": 0.0}, "sapo_temperature_pos=0.0"),
        ({"loss_type": "kl_cov", "kl_cov_ratio": 0.0}, "kl_cov_ratio=0.0"),
        ({"loss_type": "clip_cov", "clip_cov_ratio": 2.0}, "clip_cov_ratio=2.0"),
        ({"loss_type": "gspo", "importance_sampling_level": "token"}, "'gspo' is defined by its sequence ratio"),
        ({"beta": -1.0}, "beta=-1.0"),
    ):
        raises(ConfigError, message, alg.make_objective, **changes)
    raises(ConfigError, "did you mean 'token_mean'", alg.token_weights, MASK, alg.count_step(MASK), "tokens_mean")
    for length in (None, 0):
        with pytest.raises(ConfigError, match=f"max_completion_length={length}"):
            alg.token_weights(MASK, alg.count_step(MASK), "constant_length", length)


def test_token_weights_by_hand_in_all_libraries_and_an_empty_step_has_no_nan() -> None:
    for aggregation, expected in (
        ("sequence_mean", [[1 / 6, 1 / 6, 0], [1 / 3, 0, 0], [0, 0, 0]]),  # the empty row counts
        ("token_mean", [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0], [0, 0, 0]]),
        ("constant_length", [[1 / 12, 1 / 12, 0], [1 / 12, 0, 0], [0, 0, 0]]),  # 3 completions × 4
        ("sequence_sum_mean", [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0], [0, 0, 0]]),
        ("sequence_sum_kept", [[1 / 2, 1 / 2, 0], [1 / 2, 0, 0], [0, 0, 0]]),  # the empty row does not count
    ):
        counts = alg.StepCounts(completions=3, active_tokens=3, kept=2)
        np.testing.assert_allclose(alg.token_weights(MASK, counts, aggregation, 4), expected)
        tensor = alg.token_weights(torch.from_numpy(MASK), counts, aggregation, 4, dtype=torch.float64)
        np.testing.assert_allclose(tensor.numpy(), expected)
        compiled = jax.jit(lambda m, how=aggregation: alg.token_weights(m, alg.count_step(m), how, 4))
        np.testing.assert_allclose(compiled(MASK), expected)
    total = sum([alg.count_step(MASK[:1]), alg.count_step(MASK[1:])], alg.StepCounts())
    assert (total.completions, int(total.active_tokens), int(total.kept)) == (3, 3, 2)
    assert total == alg.count_step(MASK)
    empty = np.zeros((2, 3), dtype=bool)
    for aggregation in alg.AGGREGATORS:
        for counts in (alg.count_step(empty), alg.StepCounts()):
            assert (alg.token_weights(empty, counts, aggregation, 4) == 0).all()


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
