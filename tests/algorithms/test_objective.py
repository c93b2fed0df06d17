"""The loss: against the textbook, across libraries, across splits, and on input that must not break it."""

from __future__ import annotations

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from algorithm_cases import (
    LENGTH,
    LOSS_TYPES,
    Case,
    by_the_reference,
    jax_gradient,
    loss_of,
    objective_of,
    random_case,
    selection_of,
    torch_gradient,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.algorithms import (
    KL_ESTIMATORS,
    StepCounts,
    add_metrics,
    count_step,
    make_objective,
    mean_metrics,
    policy_loss,
    token_weights,
)
from covey.errors import ConfigError

BOUNDED = settings(max_examples=12, deadline=None, derandomize=True)


def hand_case() -> Case:
    """Two completions: ratios 1.5 and 0.5 with A = 1, ratio 0.5 with A = -2; one token is masked."""
    logp = np.log([[0.6, 0.1], [0.2, 1.0]])
    old = np.log([[0.4, 0.2], [0.4, 1.0]])
    mask = np.array([[True, True], [True, False]])
    zeros = np.zeros((2, 2))
    return Case(logp, old, np.array([[1.0, 1.0], [-2.0, -2.0]]), mask, logp, zeros, zeros, np.ones((2, 2)))


def test_each_loss_type_by_hand() -> None:
    for loss_type, expected in (
        # tokens: -min(1.5, 1.2) = -1.2; -min(0.5, 0.8) = -0.5; -min(0.5 · -2, 0.8 · -2) = 1.6
        ("grpo", ((-1.2 - 0.5) / 2 + 1.6) / 2),
        ("bnpo", (-1.2 - 0.5 + 1.6) / 3),
        ("dapo", (-1.28 - 0.5 + 1.6) / 3),  # the upper bound is 1.28
        ("dr_grpo", (-1.2 - 0.5 + 1.6) / (2 * 7)),
        # sequence ratios: sqrt(1.5 · 0.5) = 0.866, and 0.5; the bounds are 1 ± 0.0003/0.0004
        ("gspo", (-np.sqrt(0.75) + 2 * 0.9997) / 2),
        ("gspo_token", (-np.sqrt(0.75) + 2 * 0.9997) / 2),
        # weights 1.5, 0.5, 0.5, below the cap of 5
        ("cispo", (-1.5 * np.log(0.6) - 0.5 * np.log(0.1) + 0.5 * 2 * np.log(0.2)) / 3),
        # 4 sigmoid(0.5) = 2.489837; 4 sigmoid(-0.5) = 1.510163; 4/1.05 sigmoid(-0.525) = 1.415938
        ("sapo", ((-2.489837 - 1.510163) / 2 + 2 * 1.415938) / 2),
        ("reinforce", (-np.log(0.6) - np.log(0.1) + 2 * np.log(0.2)) / 2),
        ("reinforce_kept", (-np.log(0.6) - np.log(0.1) + 2 * np.log(0.2)) / 2),
        # the sequence ratios of gspo within bounds 1 ± 0.002/0.0025, times the lengths 2 and 1
        ("luspo", (-2 * np.sqrt(0.75) + 2 * 0.998) / 2),
        # log-ratios, at most 0.4 where A > 0, at least -0.4 where A < 0: 0.405 -> 0.4, -0.693 stays; -0.693 -> -0.4
        ("gmpo", (-np.exp((0.4 + np.log(0.5)) / 2) + 2 * np.exp(-0.4)) / 2),
        # W = 1.5 · 0.5 = 0.75: phi = 0.75² e^(3 · 0.25) = 1.190813; W = 0.5, A < 0: phi = 0.5³ e^(2 · 0.5) = 0.339785
        ("vespo", (-1.190813 * np.log(0.6 * 0.1) + 2 * 0.339785 * np.log(0.2)) / 3),
        # covariances with means A = 0, logp = -1.474: log 0.6 is 0.963 above at A = 1, log 0.2 0.135 below at A = -2;
        # the first one is the largest, and its |log-ratio| is log 1.5
        ("kl_cov", (-1.5 + np.log(1.5) - 0.5 + 0.5 * 2) / 3),
        # no covariance is between 1 and 5
        ("clip_cov", (-1.2 - 0.5 + 1.6) / 3),
    ):
        assert float(loss_of(hand_case(), make_objective(loss_type)).loss) == pytest.approx(expected, abs=1e-6)


def test_metrics_by_hand() -> None:
    case = hand_case()
    case.ref = case.logp + np.log(2.0)  # k3 = 2 - log 2 - 1 = 0.306853 on each token
    case.entropy = np.array([[1.0, 2.0], [4.5, np.nan]])
    metrics = loss_of(case, make_objective("grpo", beta=0.5, entropy_coef=0.1)).metrics
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {
            "policy_loss": 0.375,
            # weights are 1/4, 1/4, 1/2: entropy (1 + 2) / 4 + 4.5 / 2 = 3
            "loss": 0.375 + 0.5 * 0.306853 - 0.1 * 3.0,
            "kl_sum": 3 * 0.306853,
            "entropy_sum": 7.5,
            "clip_high_sum": 1,
            "clip_low_sum": 1,
            "clip_region_sum": 2,
            "ratio_sum": 2.5,
            "ratio_min": 0.5,
            "ratio_max": 1.5,
            "active_tokens": 3,
        },
        abs=1e-6,
    )
    means = mean_metrics(metrics)
    assert (means["entropy"], means["active_tokens"]) == (2.5, 3)
    assert means["ratio"] == pytest.approx(2.5 / 3)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_value_and_gradient_are_those_of_the_reference(loss_type: str, wide: bool) -> None:
    changes = {"epsilon": 0.3, "epsilon_high": 0.5, "delta": 1.7} if wide else {}
    check(random_case(seed=3), loss_type, beta=0.3, entropy_coef=0.2, kl_estimator="k2", **changes)


@pytest.mark.parametrize("estimator", sorted(KL_ESTIMATORS))
def test_kl_term_and_its_gradient_are_those_of_the_reference(estimator: str) -> None:
    check(random_case(seed=4), "bnpo", beta=2.0, kl_estimator=estimator)


def of(objective: Any) -> Any:
    """The loss as a function of a case."""
    return lambda case: loss_of(case, objective).loss


def check(case: Case, loss_type: str, **settings: object) -> None:
    loss = of(objective_of(loss_type, **settings))
    expected, gradient = by_the_reference(case, loss_type, **settings)
    (by_torch, torch_grad), (by_jax, jax_grad) = torch_gradient(case, loss), jax_gradient(case, loss)
    assert [float(loss(case)), by_torch, by_jax] == pytest.approx([expected] * 3, abs=1e-10)
    assert np.abs(gradient).max() > 0.01
    np.testing.assert_allclose(torch_grad, gradient, atol=1e-10)
    np.testing.assert_allclose(jax_grad, torch_grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@BOUNDED
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 7), tokens=st.integers(1, 5), data=st.data())
def test_any_split_of_a_step_leaves_loss_and_gradient_unchanged(
    loss_type: str, seed: int, rows: int, tokens: int, data: st.DataObject
) -> None:
    """Micro-batches and ranks are the same thing here: parts of the rows, and counts that were added up."""
    case = random_case(seed, rows, tokens)
    order = np.asarray(data.draw(st.permutations(range(rows))))
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=3)))
    parts = [part for part in np.split(order, cuts) if len(part)]
    objective = objective_of(loss_type, beta=0.1, entropy_coef=0.01, kl_estimator="k3_unbiased")
    counts = reduce(StepCounts.__add__, (count_step(case.mask[part]) for part in parts))
    selected = selection_of(case, objective)

    whole_value, whole = torch_gradient(case, of(objective))
    total, gathered, metrics = 0.0, np.zeros_like(whole), []
    for part in parts:
        piece = case.map(lambda x, part=part: x[part])
        chosen = None if selected is None else selected[part]
        value, gathered[part] = torch_gradient(piece, lambda c, s=chosen: loss_of(c, objective, counts, s).loss)
        total += value
        metrics.append(loss_of(piece, objective, counts, chosen).metrics)
    assert total == pytest.approx(whole_value, abs=1e-12)
    np.testing.assert_allclose(gathered, whole, rtol=0, atol=1e-12)
    expected = {name: float(value) for name, value in loss_of(case, objective).metrics.items()}
    assert {name: float(value) for name, value in add_metrics(metrics).items()} == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_masked_positions_may_hold_anything(loss_type: str) -> None:
    clean = random_case(seed=6)
    garbage = np.resize([np.nan, np.inf, -np.inf, 1e30], clean.mask.shape)
    objective = objective_of(loss_type, beta=0.3, entropy_coef=0.1, kl_estimator="k3_unbiased")
    spoiled = clean.map(lambda x: x if x.dtype == bool else np.where(clean.mask, x, garbage))
    for gradient_of in (torch_gradient, jax_gradient):
        (value, gradient), (spoiled_value, spoiled_gradient) = (gradient_of(c, of(objective)) for c in (clean, spoiled))
        assert spoiled_value == value
        np.testing.assert_array_equal(spoiled_gradient, gradient)
        assert (gradient[~clean.mask] == 0).all()
    assert all(np.isfinite(value) for value in loss_of(spoiled, objective).metrics.values())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [80.0, 1e4])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_huge_log_ratios_give_finite_values_and_gradients(loss_type: str, size: float, dtype: type) -> None:
    case = random_case(seed=7, rows=8)
    signs = np.resize([1.0, -1.0, -1.0], case.mask.shape)
    case.old = case.logp + size * signs
    case.ref = case.logp + size * np.roll(signs, 1, axis=1)
    case.mask[:] = True
    case = case.map(lambda x: x if x.dtype == bool else x.astype(dtype))
    for estimator in KL_ESTIMATORS:
        objective = objective_of(loss_type, beta=0.5, kl_estimator=estimator)
        terms = loss_of(case, objective)
        assert terms.loss.dtype == dtype
        assert all(np.isfinite(value) for value in terms.metrics.values())
        assert all(np.isfinite(found).all() for found in torch_gradient(case, of(objective)))
    assert all(np.isfinite(found).all() for found in jax_gradient(case, of(objective)))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_step_without_an_active_token_has_loss_zero(loss_type: str) -> None:
    case = random_case(seed=8)
    case.mask[:] = False
    terms = loss_of(case, objective_of(loss_type, beta=0.1))
    assert float(terms.loss) == 0
    means = mean_metrics(terms.metrics)
    assert (means["kl"], means["ratio"], means["ratio_min"], means["ratio_max"]) == (0, 1, 1, 1)
    np.testing.assert_array_equal(torch_gradient(case, of(objective_of(loss_type)))[1], 0)


def test_on_policy_the_gradient_of_every_ratio_loss_is_that_of_reinforce() -> None:
    """At w = 1 nothing is clipped, and d w = d logp: all surrogates share one gradient per aggregation."""
    case = random_case(seed=9)
    case.old = case.logp
    for name, like in (("gspo_token", "grpo"), ("sapo", "grpo"), ("cispo", "dapo")):
        one, other = (torch_gradient(case, of(objective_of(each)))[1] for each in (name, like))
        np.testing.assert_allclose(one, other, atol=1e-14)


def test_a_precomputed_kl_is_added_and_differentiated() -> None:
    case = random_case(seed=10).map(torch.from_numpy)
    weights = token_weights(case.mask, count_step(case.mask), "token_mean", dtype=torch.float64)
    objective = make_objective("bnpo", beta=0.7, kl_estimator="exact")
    kl = case.kl.clone().requires_grad_()
    terms = policy_loss(case.logp, case.old, 0 * case.advantages, case.mask, weights, objective, kl=kl)
    assert float(terms.loss.detach()) == pytest.approx(0.7 * float(case.kl[case.mask].mean()))
    (gradient,) = torch.autograd.grad(terms.loss, kl)
    np.testing.assert_allclose(gradient, 0.7 * weights)


def test_advantages_may_be_one_per_row_and_weights_of_another_precision() -> None:
    case = random_case(seed=11)
    objective = make_objective("grpo")
    weights = token_weights(case.mask, count_step(case.mask), "sequence_mean")
    full = policy_loss(case.logp, case.old, case.advantages, case.mask, weights, objective)
    rows = policy_loss(case.logp, case.old, case.advantages[:, 0], case.mask.astype(np.int64), weights, objective)
    assert float(rows.loss) == float(full.loss)
    single = random_case(seed=11).map(lambda x: x if x.dtype == bool else x.astype(np.float32))
    mixed = policy_loss(single.logp, single.old, single.advantages, single.mask, weights, objective)
    assert mixed.loss.dtype == np.float32


def test_jax_in_its_default_precision() -> None:
    """Without x64 nothing may ask for 64-bit types: JAX warns about those, and warnings are errors here."""
    with jax.enable_x64(False):
        case = random_case(seed=12).map(lambda x: jnp.asarray(x if x.dtype == bool else x.astype(np.float32)))
        terms = jax.jit(lambda c: loss_of(Case(**c), make_objective("grpo", beta=0.1)))(vars(case))
        assert terms.loss.dtype == jnp.float32
    expected = float(loss_of(random_case(seed=12), make_objective("grpo", beta=0.1)).loss)
    assert float(terms.loss) == pytest.approx(expected, abs=1e-5)


def test_a_term_without_its_input_is_an_error() -> None:
    case = random_case(seed=13)
    weights = token_weights(case.mask, count_step(case.mask), "sequence_mean", LENGTH)
    exact = {"beta": 0.1, "kl_estimator": "exact"}
    for missing, changes in {"ref": {"beta": 0.1}, "kl": exact, "entropy": {"entropy_coef": 0.1}}.items():
        with pytest.raises(ConfigError, match=missing):
            policy_loss(case.logp, case.old, case.advantages, case.mask, weights, make_objective("grpo", **changes))
