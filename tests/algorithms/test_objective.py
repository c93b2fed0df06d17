"""The loss: against the textbook, across libraries, across splits, and on input that must not break it."""

from dataclasses import replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from algorithm_cases import SMALL, Case, jax_gradient, loss_of, objective_of, own_settings, random_case, torch_gradient
from hypothesis import given, settings
from hypothesis import strategies as st

from covey import algorithms as alg
from covey.errors import ConfigError
from loss_reference import Completed, reference_loss

BOUNDED = settings(max_examples=12, deadline=None, derandomize=True)


def hand_case() -> Case:
    """Two completions: ratios 1.5 and 0.5 with A = 1, ratio 0.5 with A = -2; one token is masked."""
    logp, old = np.log([[0.6, 0.1], [0.2, 1.0]]), np.log([[0.4, 0.2], [0.4, 1.0]])
    mask, zeros = np.array([[True, True], [True, False]]), np.zeros((2, 2))
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
        assert float(loss_of(hand_case(), alg.make_objective(loss_type)).loss) == pytest.approx(expected, abs=1e-6)


def test_metrics_by_hand() -> None:
    case = hand_case()
    case.ref = case.logp + np.log(2.0)  # k3 = 2 - log 2 - 1 = 0.306853 on each token
    case.entropy = np.array([[1.0, 2.0], [4.5, np.nan]])
    metrics = loss_of(case, alg.make_objective("grpo", beta=0.5, entropy_coef=0.1)).metrics
    # weights are 1/4, 1/4, 1/2: entropy (1 + 2) / 4 + 4.5 / 2 = 3
    expected = {"policy_loss": 0.375, "loss": 0.375 + 0.5 * 0.306853 - 0.1 * 3.0, "active_tokens": 3}
    expected |= {"kl_sum": 3 * 0.306853, "entropy_sum": 7.5, "ratio_sum": 2.5, "ratio_min": 0.5, "ratio_max": 1.5}
    expected |= {"clip_high_sum": 1, "clip_low_sum": 1, "clip_region_sum": 2}
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(expected, abs=1e-6)
    means = alg.mean_metrics(metrics)
    assert ((means["entropy"], means["active_tokens"]), means["ratio"]) == ((2.5, 3), pytest.approx(2.5 / 3))


def by_the_reference(case: Case, loss_type: str, **settings: Any) -> tuple[float, np.ndarray]:
    """Value and gradient in `logp` by `loss_reference`, row by row and without the masked tokens."""
    sequences = []
    for row, mask in enumerate(case.mask):
        arrays = (case.logp, case.old, case.ref, case.entropy, case.correction)
        logp, old, ref, entropy, factor = (torch.tensor(x[row, mask]) for x in arrays)
        # `old` is the policy that the factors lead to from the sampler's
        advantage, sampler = float(case.advantages[row, 0]), old - factor.log()
        sequences.append(Completed(logp.requires_grad_(), sampler, ref, entropy, advantage, old, not mask.any()))
    how = {"loss_type": loss_type, "correction": "token_truncate", "cap": 1e9, "max_length": 7}  # as `loss_of` has it
    value, _ = reference_loss(sequences, **how, **own_settings(loss_type, settings))
    gradient = np.zeros_like(case.logp)
    found = torch.autograd.grad(value, [each.logp for each in sequences], allow_unused=True)
    for row, (mask, each) in enumerate(zip(case.mask, found, strict=True)):
        gradient[row, mask] = 0.0 if each is None else each.numpy()
    return float(value.detach()), gradient


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("loss_type", alg.LOSSES)
def test_value_and_gradient_are_those_of_the_reference(loss_type: str, wide: bool) -> None:
    changes = {"epsilon": 0.3, "epsilon_high": 0.5, "delta": 1.7} if wide else {}
    check(random_case(seed=3), loss_type, beta=0.3, entropy_coef=0.2, kl_estimator="k2", **changes)


@pytest.mark.parametrize("estimator", sorted(alg.KL_ESTIMATORS))
def test_kl_term_and_its_gradient_are_those_of_the_reference(estimator: str) -> None:
    check(random_case(seed=4), "bnpo", beta=2.0, kl_estimator=estimator)


def of(objective: Any) -> Any:
    return lambda case: loss_of(case, objective).loss


def check(case: Case, loss_type: str, **settings: object) -> None:
    loss = of(objective_of(loss_type, **settings))
    expected, gradient = by_the_reference(case, loss_type, **settings)
    (by_torch, torch_grad), (by_jax, jax_grad) = torch_gradient(case, loss), jax_gradient(case, loss)
    assert [float(loss(case)), by_torch, by_jax] == pytest.approx([expected] * 3, abs=1e-10)
    assert np.abs(gradient).max() > 0.01
    np.testing.assert_allclose(torch_grad, gradient, atol=1e-10)
    np.testing.assert_allclose(jax_grad, torch_grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("loss_type", alg.LOSSES)
@BOUNDED
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 7), tokens=st.integers(1, 5), data=st.data())
def test_any_split_of_a_step_changes_nothing(loss_type: str, seed: int, rows: int, tokens: int, data: Any) -> None:
    """Micro-batches and ranks are the same thing here: parts of the rows, and counts that were added up."""
    case, order = random_case(seed, rows, tokens), np.asarray(data.draw(st.permutations(range(rows))))
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=3)))
    parts = [part for part in np.split(order, cuts) if len(part)]
    objective = objective_of(loss_type, beta=0.1, entropy_coef=0.01, kl_estimator="k3_unbiased")
    counts = reduce(alg.StepCounts.__add__, (alg.count_step(case.mask[part]) for part in parts))
    select = objective.loss.select and objective.select
    selected = select and select(case.logp, case.old, case.advantages, case.mask, case.entropy)
    # one selection: where all advantages are equal, covariances are rounding, which is another in each library
    whole_value, whole = torch_gradient(case, lambda c: loss_of(c, objective, selected=selected).loss)
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
    assert {name: float(value) for name, value in alg.add_metrics(metrics).items()} == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("loss_type", alg.LOSSES)
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
@pytest.mark.parametrize("loss_type", alg.LOSSES)
def test_huge_log_ratios_give_finite_values_and_gradients(loss_type: str, size: float, dtype: type) -> None:
    case = random_case(seed=7, rows=8)
    signs = np.resize([1.0, -1.0, -1.0], case.mask.shape)
    case.old = case.logp + size * signs
    case.ref = case.logp + size * np.roll(signs, 1, axis=1)
    case.mask[:] = True
    case = case.map(lambda x: x if x.dtype == bool else x.astype(dtype))
    for estimator in alg.KL_ESTIMATORS:
        objective = objective_of(loss_type, beta=0.5, kl_estimator=estimator)
        terms = loss_of(case, objective)
        assert terms.loss.dtype == dtype
        assert all(np.isfinite(value) for value in terms.metrics.values())
        assert all(np.isfinite(found).all() for found in torch_gradient(case, of(objective)))
    assert all(np.isfinite(found).all() for found in jax_gradient(case, of(objective)))


@pytest.mark.parametrize("loss_type", alg.LOSSES)
def test_a_step_without_an_active_token_has_loss_zero(loss_type: str) -> None:
    case = random_case(seed=8)
    case.mask[:] = False
    terms = loss_of(case, objective_of(loss_type, beta=0.1))
    assert float(terms.loss) == 0
    means = alg.mean_metrics(terms.metrics)
    assert (means["kl"], means["ratio"], means["ratio_min"], means["ratio_max"]) == (0, 1, 1, 1)
    np.testing.assert_array_equal(torch_gradient(case, of(objective_of(loss_type)))[1], 0)


def test_on_policy_the_gradient_of_every_ratio_loss_is_that_of_reinforce() -> None:
    """At w = 1 nothing is clipped, and d w = d logp: all surrogates share one gradient per aggregation."""
    case = random_case(seed=9)
    case.old = case.logp
    for name, like in (("gspo_token", "grpo"), ("sapo", "grpo"), ("cispo", "dapo")):
        one, other = (torch_gradient(case, of(objective_of(each)))[1] for each in (name, like))
        np.testing.assert_allclose(one, other, atol=1e-14)


def test_a_given_kl_one_advantage_per_row_and_weights_of_another_precision() -> None:
    case = random_case(seed=10).map(torch.from_numpy)
    weights = alg.token_weights(case.mask, alg.count_step(case.mask), "token_mean", dtype=torch.float64)
    objective = alg.make_objective("bnpo", beta=0.7, kl_estimator="exact")
    kl = case.kl.clone().requires_grad_()
    terms = alg.policy_loss(case.logp, case.old, 0 * case.advantages, case.mask, weights, objective, kl=kl)
    assert float(terms.loss.detach()) == pytest.approx(0.7 * float(case.kl[case.mask].mean()))
    (gradient,) = torch.autograd.grad(terms.loss, kl)
    np.testing.assert_allclose(gradient, 0.7 * weights)
    case, objective = random_case(seed=11), alg.make_objective("grpo")
    weights = alg.token_weights(case.mask, alg.count_step(case.mask), "sequence_mean")
    full = alg.policy_loss(case.logp, case.old, case.advantages, case.mask, weights, objective)
    rows = alg.policy_loss(case.logp, case.old, case.advantages[:, 0], case.mask.astype(np.int64), weights, objective)
    assert float(rows.loss) == float(full.loss)
    single = random_case(seed=11).map(lambda x: x if x.dtype == bool else x.astype(np.float32))
    mixed = alg.policy_loss(single.logp, single.old, single.advantages, single.mask, weights, objective)
    assert mixed.loss.dtype == np.float32


def test_jax_in_its_default_precision() -> None:
    """Without x64 nothing may ask for 64-bit types: JAX warns about those, and warnings are errors here."""
    with jax.enable_x64(False):
        case = random_case(seed=12).map(lambda x: jnp.asarray(x if x.dtype == bool else x.astype(np.float32)))
        terms = jax.jit(lambda c: loss_of(Case(**c), alg.make_objective("grpo", beta=0.1)))(vars(case))
        assert terms.loss.dtype == jnp.float32
    expected = float(loss_of(random_case(seed=12), alg.make_objective("grpo", beta=0.1)).loss)
    assert float(terms.loss) == pytest.approx(expected, abs=1e-5)


def test_a_term_without_its_input_is_an_error() -> None:
    exact = {"beta": 0.1, "kl_estimator": "exact"}
    for missing, changes in {"ref": {"beta": 0.1}, "kl": exact, "entropy": {"entropy_coef": 0.1}}.items():
        with pytest.raises(ConfigError, match=missing):
            loss_of(replace(random_case(seed=13), **{missing: None}), alg.make_objective("grpo", **changes))


ADVANTAGES = (1.6, -1.3, 0.0, -0.4, 0.7, -2.0)
MASKS: list[dict[str, Any]] = [{}, {"off_policy": 0.0}, {"quantile": 0.4}, {"drift": 0.0}]
MASKS += [{"off_policy": 0.0, "quantile": 0.5, "drift": 0.1, "drift_reduction": "sum"}]
OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"beta": 0.3, "entropy_coef": 0.1},
    {"beta": 0.3, "kl_estimator": "k3_unbiased", "correction": "sequence_truncate", "cap": 1.1},
    {"beta": 0.3, "kl_estimator": "k1", "correction": "sequence_mask", "cap": 1.3},
    {"beta": 0.3, "kl_estimator": "k2", "correction": "token_mask", "cap": 1.2},
    {"correction": "token_truncate", "cap": 1.1, "level": "sequence"},
)


def completed(seed: int) -> list[Completed]:
    rng, found = np.random.default_rng(seed), []
    for advantage in ADVANTAGES:
        length = int(rng.integers(2, 8))
        logp = torch.tensor(-rng.exponential(1.0, length))
        near = [logp + torch.tensor(rng.normal(0, 0.3, length)) for _ in range(3)]
        entropy = torch.tensor(rng.exponential(1.0, length))
        found.append(Completed(logp.requires_grad_(), near[0], near[1], entropy.requires_grad_(), advantage, near[2]))
    return found


def by_covey(sequences: list[Completed], options: dict[str, Any]) -> tuple[torch.Tensor, dict[str, float]]:
    def grid(name: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([getattr(s, name) for s in sequences], batch_first=True)

    logp, old, ref, entropy, trainer_old = map(grid, ("logp", "old", "ref", "entropy", "trainer_old"))
    base = torch.arange(logp.shape[1])[None] < torch.tensor([len(s.logp) for s in sequences])[:, None]
    advantages = torch.tensor([s.advantage for s in sequences], dtype=torch.float64)
    keep, acting, now = {}, {}, logp.detach()
    if "off_policy" in options:
        acting["off_policy_mask"] = alg.off_policy_mask(now, old, advantages, base, options["off_policy"])
    if "quantile" in options:
        acting["top_entropy_quantile"] = alg.top_entropy_mask(entropy.detach(), base, options["quantile"])
    if "drift" in options:
        reduction = options.get("drift_reduction", "per_token_mean")
        keep["drift"] = alg.reference_drift_mask(now, ref, base, options["drift"], reduction)
    mask, _ = alg.combine_masks(base, keep)
    advantages, _ = alg.without_surrogate(advantages, base, acting)
    given = {name: options.get(name) for name in ("beta", "kl_estimator", "entropy_coef")}
    given |= SMALL.get(options["loss_type"], {}) | {"importance_sampling_level": options.get("level")}
    objective, factor = alg.make_objective(options["loss_type"], **given), None
    if "correction" in options:
        counted = base if objective.loss.kl_aggregation else mask
        how = options["correction"], options["cap"]
        factor, old = alg.mismatch_correction(trainer_old, old, counted, *how), trainer_old
    wide, apart = {"dtype": torch.float64}, objective.loss.kl_aggregation
    weights = alg.token_weights(mask, alg.count_step(mask), objective.loss.aggregation, options["max_length"], **wide)
    apart = apart and alg.token_weights(base, alg.count_step(base), apart, **wide)
    selected = None if objective.loss.select is None else objective.select(logp, old, advantages, mask)
    given = {"ref": ref, "entropy": entropy, "correction": factor, "kl_weights": apart, "selected": selected}
    terms = alg.policy_loss(logp, old, advantages, mask, weights, objective, **given)
    sums = {name: float(terms.metrics[f"{name}_sum"] / terms.metrics["active_tokens"]) for name in ("kl", "entropy")}
    return terms.loss, sums | {"policy_loss": float(terms.metrics["policy_loss"])}


@pytest.mark.parametrize("masks", MASKS, ids=lambda m: "-".join(m) or "all")
@pytest.mark.parametrize("others", OTHERS, ids=lambda m: "-".join(map(str, m.values())) or "plain")
@pytest.mark.parametrize("loss_type", sorted(alg.LOSSES))
def test_every_loss_mask_kl_term_and_correction_is_the_reference_s(loss_type: str, others: Any, masks: Any) -> None:
    options = {"loss_type": loss_type, "max_length": 9, **others, **masks, **SMALL.get(loss_type, {})}
    if loss_type.startswith("gspo") or "importance_sampling_level" not in alg.LOSSES[loss_type].parameters:
        options.pop("level", None)
    ours, theirs = completed(3), completed(3)
    loss, metrics = by_covey(ours, options)
    expected, wanted = reference_loss(theirs, **options)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10, abs=1e-12)
    assert metrics == pytest.approx({name: wanted[name] for name in metrics}, rel=1e-10, abs=1e-12)
    loss.backward()
    expected.backward()
    for mine, other in zip(ours, theirs, strict=True):
        for one, two in ((mine.logp.grad, other.logp.grad), (mine.entropy.grad, other.entropy.grad)):
            found = (torch.zeros_like(mine.logp) if each is None else each for each in (one, two))
            torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
