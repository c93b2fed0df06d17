"""Formulas by hand, as the peers have them, in NumPy float64, and as the documents print them.

TRL 1.16: `trl/trainer/grpo_trainer.py`. verl: `verl/trainer/ppo/core_algos.py`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from algorithm_cases import Case, loss_of, random_case

from covey import algorithms as alg
from covey.config.algorithm import AlgorithmConfig
from covey.errors import ConfigError
from covey.rollout.learning import loss_weights, rows_with_gradient
from covey.types import Batch, Group
from fakes import fake_prompt, raises

NAN = float("nan")
RNG = np.random.default_rng(11)
SHAPE = (6, 8)
LENGTHS = RNG.integers(2, 9, SHAPE[0])
MASK = (np.arange(SHAPE[1]) < LENGTHS[:, None]).astype(np.float64)
LOGP = -RNG.exponential(1.0, SHAPE) * MASK
OLD = (LOGP + RNG.normal(0, 0.5, SHAPE)) * MASK
ADVANTAGES = RNG.normal(0, 1.5, (SHAPE[0], 1)) * np.ones(SHAPE)
RATIO = np.exp(LOGP - OLD)


def of_lengths(*lengths: int) -> Any:
    return np.arange(max(lengths))[None, :] < np.array(lengths)[:, None]


def by(name: str, rewards: Any, groups: Any, mask: Any = None, parameters: Any = None, **given: Any) -> Any:
    step = alg.Outcomes(np.array(rewards, np.float64), np.array(groups), mask=mask, **given)
    return np.asarray(alg.find_estimator(name, parameters)(step))


def check(found: Any, expected: Any, atol: float = 1e-7) -> None:
    np.testing.assert_allclose(found, expected, atol=atol)


def of_group(groups: Any, f: Callable[[Any], Any]) -> Any:
    """For each row what the function says of the rows of its group."""
    return np.array([f(np.flatnonzero(groups == g)) for g in groups.tolist()])


def test_reinforce_plus_plus() -> None:
    s, mask = 3**0.5, of_lengths(2, 1)
    check(by("reinforce_plus_plus", [0.0, 3.0], [0, 1], mask), [[-1 / s, -1 / s], [2 / s, 0]], 1e-8)
    # gamma 1/2: returns 1, 2 and 3: mean 2, variance 1
    check(by("reinforce_plus_plus", [2.0, 3.0], [0, 1], mask, {"gamma": 0.5}), [[-1, 0], [1, 0]])
    # equal rewards say nothing, one that could not be scored stands aside
    assert by("reinforce_plus_plus", [0.1, 0.1, 0.1], [0, 1, 1], of_lengths(1, 2, 3)).any() == 0
    found = by("reinforce_plus_plus", [0.0, NAN, 3.0], [0, 0, 1], of_lengths(2, 2, 1))
    check(found, [[-1 / s, -1 / s], [0, 0], [2 / s, 0]], 1e-8)
    # centred: -1, 1 and, of the tied group, 0 twice; one token each: variance 2/3
    found = by("reinforce_plus_plus_baseline", [0.0, 2.0, 7.0, 7.0], [0, 0, 1, 1])
    check(found[:, 0], np.array([-1, 1, 0, 0]) / (2 / 3) ** 0.5)


def test_remax_opo_pass_at_k_and_gpg() -> None:
    assert by("remax", [1.0, 0.0, NAN, 1.0], [0, 0, 0, 1], greedy=[1.0, 1.0, 1.0, NAN]).tolist() == [0, -1, 0, 0]
    assert by("opo", [1.0, 0.0, 5.0, NAN], [0, 0, 1, 1], of_lengths(1, 3, 2, 2)).tolist() == [0.75, -0.25, 0, 0]
    found = by("grpo_passk", [3.0, 1.0, 1.0, 2.0, 2.0, 0.0], [0, 0, 0, 1, 1, 1], epsilon=0.0)
    np.testing.assert_allclose(found, [3**0.5, 0, 0, 0, 0, 0])
    assert by("grpo_passk", [3.0, 1.0, NAN], [0, 0, 0], scale="none").tolist() == [2, 0, 0]
    assert by("gpg", [0.0, 1.0, 1.0, 1.0], [0, 0, 1, 1]).tolist() == [-1, 1, 0, 0]
    assert by("gpg", [0.0, 1.0, 1.0, 1.0], [0, 0, 1, 1], parameters={"f_norm": 2.0}).tolist() == [-0.5, 0.5, 0, 0]
    for words, parameters in {"f_norm=0": {"f_norm": 0}, "nonzero": {"alpha": "nonzeros"}}.items():
        raises(ConfigError, words, by, "gpg", [0.0, 1.0], [0, 0], parameters=parameters)


def test_optimal_token_baseline() -> None:
    half = np.log(0.5)
    logprobs = np.array([[half, half], [0.0, half], [half, half]])  # the second one's first token was certain
    known = {"logprobs": logprobs, "sum_pi_squared": np.array([[0.5, 0.5], [1.0, 0.5], [0.5, 0.5]])}
    found = by("optimal_token_baseline", [1.0, 0.0, 0.0], [0, 0, 0], of_lengths(2, 2, 1), **known)
    # W: 1/2, 1 | 0, 1/2 | 1/2. Baselines: 1/2 at the first token, 1 / 1.5 at the second, which the third never reaches.
    np.testing.assert_allclose(found, [[1 / 2, 1 / 3], [-1 / 2, -2 / 3], [-1 / 2, 0]])
    certain = {"logprobs": np.zeros((2, 1)), "sum_pi_squared": np.ones((2, 1))}
    assert by("optimal_token_baseline", [1.0, 0.0], [0, 0], of_lengths(1, 1), **certain).tolist() == [[0], [0]]


def verl_whiten(values: Any, mask: Any) -> Any:
    mean = (values * mask).sum() / mask.sum()
    variance = ((values - mean) ** 2 * mask).sum() / (mask.sum() - 1)
    return (values - mean) / np.sqrt(variance + 1e-8) * mask


def verl_reinforce_plus_plus(rewards: Any, groups: Any, mask: Any, gamma: float = 0.9) -> Any:
    token_rewards = np.zeros(mask.shape)
    token_rewards[np.arange(len(rewards)), mask.sum(axis=1) - 1] = rewards
    returns, running = np.zeros(mask.shape), np.zeros(len(rewards))
    for t in reversed(range(mask.shape[1])):
        running = token_rewards[:, t] + gamma * running
        returns[:, t] = running
        running = running * mask[:, t]
    return verl_whiten(returns, mask)


def verl_baseline(rewards: Any, groups: Any, mask: Any) -> Any:
    means = of_group(groups, lambda rows: rewards[rows].mean() if len(rows) > 1 else 0.0)
    return verl_whiten((rewards - means)[:, None] * mask, mask)


def verl_opo(rewards: Any, groups: Any, mask: Any) -> Any:
    return rewards - of_group(groups, lambda rows: np.average(rewards[rows], weights=mask.sum(axis=1)[rows]))


def verl_optimal_token_baseline(rewards: Any, groups: Any, mask: Any) -> Any:
    logprobs, squares = probabilities(mask.shape)
    weights = np.cumsum((1 - 2 * np.exp(logprobs) + squares) * mask, axis=1) * mask
    paid = rewards[:, None] * weights
    baseline = of_group(groups, lambda rows: paid[rows].sum(axis=0) / (weights[rows].sum(axis=0) + 1e-8))
    return (rewards[:, None] - baseline) * mask


def probabilities(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Log-probabilities of drawn tokens and sums of squared probabilities, of distributions over five tokens."""
    p = np.random.default_rng(11).dirichlet(np.ones(5), size=shape)
    return np.log(p[..., 0]), (p**2).sum(axis=-1)


def verl_gpg(rewards: Any, groups: Any, mask: Any) -> Any:
    means = of_group(groups, lambda rows: rewards[rows].mean())
    return len(rewards) / max(np.count_nonzero(rewards), 1) * (rewards - means)


def verl_passk(rewards: Any, groups: Any, mask: Any) -> Any:
    best = of_group(groups, lambda rows: rows[np.argmax(rewards[rows])])
    lead = of_group(groups, lambda rows: np.diff(np.sort(rewards[rows]))[-1] / (rewards[rows].std(ddof=1) + 1e-6))
    return np.where(best == np.arange(len(rewards)), lead, 0.0)


PEERS = {"reinforce_plus_plus": verl_reinforce_plus_plus, "reinforce_plus_plus_baseline": verl_baseline}
PEERS |= {"opo": verl_opo, "optimal_token_baseline": verl_optimal_token_baseline}
PEERS |= {"gpg": verl_gpg, "grpo_passk": verl_passk}
PARAMETERS = {"reinforce_plus_plus": {"gamma": 0.9}, "gpg": {"alpha": "nonzero"}}


@pytest.mark.parametrize("name", PEERS)
def test_as_the_peer_computes_it(name: str) -> None:
    rng = np.random.default_rng(3)
    for rewards in (rng.normal(size=24), rng.integers(0, 2, 24).astype(np.float64)):
        groups, mask = np.repeat(np.arange(6), 4), of_lengths(*rng.integers(1, 9, 24).tolist())
        expected = PEERS[name](rewards, groups, mask)
        logprobs, squares = probabilities(mask.shape)
        found = by(name, rewards, groups, mask, PARAMETERS.get(name), logprobs=logprobs, sum_pi_squared=squares)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-7 if name == "optimal_token_baseline" else 1e-9)
    if name == "reinforce_plus_plus_baseline":  # groups of one are what they are without a baseline
        alone = by(name, rewards, np.arange(24), mask)
        np.testing.assert_allclose(alone, verl_baseline(rewards, np.arange(24), mask), atol=1e-9)
        np.testing.assert_allclose(alone, by("reinforce_plus_plus", rewards, np.arange(24), mask), atol=1e-12)


def test_what_teaches_is_asked_of_the_estimator() -> None:
    groups = [Group(fake_prompt(), (), np.array(each)) for each in ([1, 1], [0, 1], [1, 1, 0], [NAN, NAN])]
    for name, taught in {"grpo": [1, 2], "reinforce_plus_plus": [0, 1, 2], "grpo_passk": [1]}.items():
        assert [n for n, group in enumerate(groups) if alg.find_estimator(name).teaches(group)] == taught
    assert alg.find_estimator("reinforce_plus_plus").group_problem({"sampling.num_generations": 1}) is None
    said = alg.find_estimator("grpo").group_problem({"a": 4, "b": 1})
    assert said == "b=1: a group needs at least 2 completions to compare; set b to 2 or more"
    raises(ConfigError, r"'gama'.*it takes gamma", alg.find_estimator, "reinforce_plus_plus", {"gama": 0.9})
    raises(ConfigError, "did you mean 'rloo'", alg.find_estimator, "rlo")


def ours(loss_type: str, correction: Any = None, **parameters: float) -> float:
    objective, mask = alg.make_objective(loss_type, **parameters), MASK > 0
    weights = alg.token_weights(mask, alg.count_step(mask), objective.loss.aggregation, dtype=np.float64)
    selected = None if objective.loss.select is None else objective.select(LOGP, OLD, ADVANTAGES, mask)
    more = {"correction": correction, "selected": selected}
    return float(alg.policy_loss(LOGP, OLD, ADVANTAGES, mask, weights, objective, **more).loss)


def masked_mean(values: np.ndarray) -> float:
    return float((values * MASK).sum() / MASK.sum())


def test_luspo_is_trl_s_and_gmpo_verl_s_geo_mean() -> None:
    w = np.exp(((LOGP - OLD) * MASK).sum(-1, keepdims=True) / np.clip(MASK.sum(-1, keepdims=True), 1, None))
    expected = ((-np.minimum(w * ADVANTAGES, np.clip(w, 1 - 0.1, 1 + 0.15) * ADVANTAGES)) * MASK).sum(-1).mean()
    assert ours("luspo", epsilon=0.1, epsilon_high=0.15) == pytest.approx(expected, rel=1e-12)
    low, high = 0.2, 0.3
    sign, difference = np.sign(ADVANTAGES), LOGP - OLD
    held = sign * np.minimum(sign * difference, sign * np.clip(difference, -low, high))
    lengths = MASK.sum(-1)
    ratio = np.exp((held * MASK).sum(-1) / (lengths + 1e-8))
    expected = (-(ADVANTAGES * MASK).sum(-1) / (lengths + 1e-8) * ratio).mean()
    assert ours("gmpo", epsilon=low, epsilon_high=high) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("correction", [None, "truncate", "mask"])
def test_vespo_is_trl_s(correction: str | None) -> None:
    trainer = (OLD + 0.1 * RNG.normal(size=SHAPE)) * MASK
    factor = np.exp((OLD - trainer) * MASK)
    if correction == "truncate":
        factor = np.clip(factor, None, 1.1)
    if correction == "mask":
        factor = np.where(factor > 1.1, 0.0, factor)
    lower, log_w = np.log(1e-8), (np.clip(LOGP - OLD, -20, 20) * MASK).sum(-1, keepdims=True)
    if correction:
        with np.errstate(divide="ignore"):
            log_w = log_w + np.clip(np.log(factor), lower, 20.0).sum(-1, keepdims=True)
    log_w = np.clip(log_w, lower, 20.0)
    k, rate = (np.where(ADVANTAGES >= 0, *pair) for pair in ((1.5, 2.5), (2.0, 1.0)))
    phi = np.exp(rate + k * log_w - rate * np.exp(log_w))
    expected = masked_mean(-phi * ADVANTAGES * LOGP)
    parameters = {"k_pos": 1.5, "k_neg": 2.5, "lambda_pos": 2.0, "lambda_neg": 1.0}
    assert ours("vespo", factor if correction else None, **parameters) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("share", [1e-4, 0.1, 0.5])
def test_kl_cov_is_verl_s(share: float) -> None:
    valid = np.flatnonzero(MASK.reshape(-1) > 0)
    advantages, logp = ADVANTAGES.reshape(-1)[valid], LOGP.reshape(-1)[valid]
    covariance = (advantages - advantages.mean()) * (logp - logp.mean())
    count = max(1, int(len(covariance) * share))
    chosen, losses = valid[np.argsort(-covariance)[:count]], (-ADVANTAGES * RATIO).reshape(-1)
    losses[chosen] += 0.7 * np.abs(LOGP - OLD).reshape(-1)[chosen]
    expected = masked_mean(losses.reshape(SHAPE))
    assert ours("kl_cov", kl_cov_ratio=share, ppo_kl_coef=0.7) == pytest.approx(expected, rel=1e-12)
    equal = np.full(SHAPE, 0.1, np.float32)  # whose mean is rounded: the first tokens, whatever their log-probabilities
    logp, mask = LOGP.astype(np.float32), MASK > 0
    held = alg.make_objective("kl_cov", kl_cov_ratio=share).select(logp, logp, equal, mask)
    assert np.flatnonzero(held).tolist() == np.flatnonzero(mask)[: max(1, int(mask.sum() * share))].tolist()


@pytest.mark.parametrize("share", [0.02, 1.0])
def test_clip_cov_is_verl_s(share: float) -> None:
    """With a share of 1 all candidates go, and there is nothing to draw; with a small one, as many as verl draws."""
    unclipped, clipped = -ADVANTAGES * RATIO, -ADVANTAGES * np.clip(RATIO, 0.8, 1.2)
    covariance = (ADVANTAGES - masked_mean(ADVANTAGES)) * (LOGP - masked_mean(LOGP))
    covariance[(MASK == 0) | (clipped > unclipped)] = -np.inf
    candidates = (covariance < 5.0) & (covariance > 0.1)
    count = min(max(int(share * MASK.sum()), 1), int(candidates.sum()))
    assert candidates.sum() > 2
    losses = np.maximum(unclipped, clipped)
    objective = alg.make_objective("clip_cov", clip_cov_ratio=share, clip_cov_lb=0.1)
    selected = objective.select(LOGP, OLD, ADVANTAGES, MASK > 0)
    assert selected.sum() == count
    assert not (selected & ~candidates).any()
    expected = masked_mean(losses * ~(candidates if share == 1.0 else selected))
    assert ours("clip_cov", clip_cov_ratio=share, clip_cov_lb=0.1) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize(("floor", "cap"), [(0.5, 1.5), (None, 1.2)])
def test_the_two_sided_sampler_clip_is_trl_s(mode: str, floor: float | None, cap: float) -> None:
    difference = (OLD - LOGP) * MASK
    ratio = np.exp(difference.sum(-1, keepdims=True) if mode.startswith("sequence") else difference)
    held = np.clip(ratio, floor, cap)
    expected = held if mode.endswith("truncate") else np.where(held == ratio, ratio, 0.0)
    found = alg.mismatch_correction(OLD, LOGP, MASK > 0, mode, cap, floor)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert floor is None or (found != ratio).any()


def test_kl_penalties_are_verl_s_and_adaptive_entropy_is_trl_s() -> None:
    d = LOGP - OLD
    for name, forward in {"abs": np.abs(d), "k1+": d, "k3+": np.exp(-d) + d - 1}.items():
        np.testing.assert_allclose(alg.KL_ESTIMATORS[name](LOGP, OLD, None), forward, rtol=1e-12, atol=1e-15)
    section = AlgorithmConfig(entropy_coef=0.1, adaptive_entropy={"target": 1.0, "delta": 0.03, "max": 0.2})
    coefficient, last, moved, before = 0.1, float("inf"), None, None
    for entropy in (0.5, 0.9, 1.0, 1.1, 0.2, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 0.1):
        assert section.entropy_weight(moved, before) == (coefficient if last <= 1.0 else 0.0)
        coefficient = min(coefficient + 0.03, 0.2) if entropy <= 1.0 else max(coefficient - 0.03, 0.0)
        last = before = entropy
        moved = section.next_entropy_coef(moved, entropy)
        assert moved == coefficient


def test_unbiased_kl_as_printed() -> None:
    """usmle-qa.md, "Unbiased KL Estimate"."""
    generator = torch.Generator().manual_seed(0)
    current, reference = (torch.randn(3, 4, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    p, q = F.softmax(current, dim=-1), F.softmax(reference, dim=-1)
    kl = (p * (torch.log(p + 1e-8) - torch.log(q + 1e-8))).sum(dim=-1)
    printed = kl * (p / (q + 1e-8)).mean(dim=-1)
    torch.testing.assert_close(alg.compute_unbiased_kl(current, reference), printed, rtol=0, atol=1e-12)
    ours = alg.exact_weighted_kl(torch.log_softmax(current, -1), torch.log_softmax(reference, -1))
    torch.testing.assert_close(ours, printed, rtol=1e-6, atol=1e-6)


def test_usmle_training_step_as_printed() -> None:
    """usmle-qa.md, "Complete GRPO Training Step", line by line; completions of 1 to 4 tokens, 11 words."""
    rng, lengths = np.random.default_rng(1), np.array([4, 2, 3, 4, 1, 4, 2, 3])
    tokens = np.arange(4) < lengths[:, None]
    current, frozen = (torch.from_numpy(rng.normal(size=(8, 4, 11))) for _ in range(2))
    current.requires_grad_()
    said = torch.from_numpy(rng.integers(0, 11, (8, 4, 1)))
    logp, ref = (torch.log_softmax(x, -1).gather(2, said)[..., 0] for x in (current, frozen))
    rewards, groups = rng.integers(0, 2, 8).astype(float), np.repeat([0, 1], 4)
    sampling_mask, exists = np.array([1, 1, 0, 1, 1, 1, 1, 0]), torch.from_numpy(tokens)
    all_log_probs, ref_log_probs = (torch.where(exists, x, 0).sum(1) for x in (logp, ref))
    sequence, reference = all_log_probs.detach().numpy(), ref_log_probs.numpy()
    advantages = np.concatenate([r - r.mean() for r in rewards.reshape(2, 4)])
    mask = (sequence - reference < 0.5) * sampling_mask
    assert 0 < mask.sum() < sampling_mask.sum()
    kl = alg.compute_unbiased_kl(current, frozen)[exists]
    policy_loss = -(all_log_probs * torch.from_numpy(advantages * mask)).sum() / mask.sum()
    printed = policy_loss + 0.01 * kl.mean()
    (gradient,) = torch.autograd.grad(printed, current)
    np.testing.assert_allclose(alg.group_advantages(rewards, groups, scale="none"), advantages, atol=1e-12)
    np.testing.assert_array_equal(alg.compute_off_policy_mask(sequence, reference), sequence - reference < 0.5)
    old = logp.detach().numpy()
    keep = alg.reference_drift_mask(old, ref.numpy(), tokens, 0.5, "sum") & (sampling_mask == 1)[:, None]
    np.testing.assert_array_equal(keep, np.broadcast_to(mask[:, None] == 1, keep.shape))
    active = tokens & keep
    objective = alg.make_objective("reinforce_kept", beta=0.01, kl_estimator="exact_weighted")
    logp = torch.log_softmax(current, -1).gather(2, said)[..., 0]
    exact = alg.exact_weighted_kl(torch.log_softmax(current, -1), torch.log_softmax(frozen, -1))
    batch = Batch((), groups, advantages[:, None] * np.ones((8, 4)), active, old, {"masks": tokens & ~active})
    weights, kl_weights = loss_weights(batch, objective, 4)
    given = (torch.from_numpy(x) for x in (old, batch.advantages, active, weights.astype(np.float64)))
    ours = alg.policy_loss(logp, *given, objective, kl=exact, kl_weights=torch.from_numpy(kl_weights)).loss
    assert ours.item() == pytest.approx(printed.item(), rel=1e-6)
    torch.testing.assert_close(torch.autograd.grad(ours, current)[0], gradient, rtol=1e-5, atol=1e-7)


def test_usmle_loss_by_hand() -> None:
    """Two completions kept of three, advantages 1/2, -1/2 and 0; the KL is that of all four tokens."""
    mask = np.array([[True, True], [True, False], [False, False]])
    dropped = np.array([[False, False], [False, False], [True, False]])
    logp = np.array([[-1.0, -2.0], [-0.5, 9.0], [-7.0, 9.0]])
    kl = np.array([[0.3, 0.1], [0.2, 9.0], [1.0, 9.0]])
    advantages = np.array([[0.5], [-0.5], [0.0]]) * np.ones((3, 2))
    objective = alg.make_objective("reinforce_kept", beta=0.1, kl_estimator="exact_weighted")
    batch = Batch((), np.zeros(3), advantages, mask, logp, {"validity_mask": dropped})
    weights, kl_weights = loss_weights(batch, objective, 2)
    terms = alg.policy_loss(logp, logp, advantages, mask, weights, objective, kl=kl, kl_weights=kl_weights)
    assert float(terms.metrics["policy_loss"]) == pytest.approx((0.5 * 3 - 0.5 * 0.5) / 2)
    assert float(terms.loss) == pytest.approx(0.625 + 0.1 * (0.3 + 0.1 + 0.2 + 1.0) / 4)
    assert rows_with_gradient(batch, objective).tolist() == [0, 1, 2]
    assert rows_with_gradient(batch, alg.make_objective("reinforce_kept")).tolist() == [0, 1]


def test_losses_of_the_jax_trainer_and_the_architecture_as_printed() -> None:
    """jax-grpo-trainer.md, steps 3 to 6."""
    case = random_case(seed=5)
    rewards, groups = np.array([1.0, 0.0, 2.0, 0.0, 1.0]), [0, 0, 0, 1, 1]
    advantages = alg.group_advantages(rewards, groups, scale="none")
    np.testing.assert_allclose(advantages, [0, -1, 1, -0.5, 0.5], atol=1e-15)
    case.advantages, case.correction = advantages, np.ones_like(case.correction)
    policy_log_probs = np.where(case.mask, case.logp, 0).sum(1)
    ref_log_probs = np.where(case.mask, case.ref, 0).sum(1)
    printed = np.mean(-advantages * policy_log_probs) + 0.1 * np.mean(policy_log_probs - ref_log_probs)
    ours = loss_of(case, alg.make_objective("reinforce", beta=0.1, kl_estimator="k1")).loss
    assert ours == pytest.approx(printed, abs=1e-12)
    # grpo-architecture.md, section 2: one sequence-level ratio per completion, here with one token each
    rng = np.random.default_rng(2)
    logp = -rng.exponential(1, (6, 1))
    old, ref = logp + rng.normal(0, 0.5, (6, 1)), logp + rng.normal(0, 0.5, (6, 1))
    rewards = rng.normal(size=6)
    a, w = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6), np.exp(logp - old)[:, 0]
    d = (logp - ref)[:, 0]
    kl = np.exp(-d) + d - 1
    printed = -np.mean(np.minimum(w * a, np.clip(w, 0.8, 1.2) * a) - 0.04 * kl)
    advantages, ones = alg.group_advantages(rewards, [0] * 6), np.ones_like(logp)
    case = Case(logp, old, advantages, ones == 1, ref, ones, ones, ones)
    assert loss_of(case, alg.make_objective("grpo", beta=0.04)).loss == pytest.approx(printed, abs=1e-12)
