"""The loss: the document's formula by hand, every variant against the NumPy reference, gradients, bad input."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax_cases import END, PROMPTS, Bigram, even_share, make_trainer, moved, small_transformer, table_logp

from covey.algorithms import LOSSES, group_advantages, rloo_advantages
from covey.errors import ConfigError, RewardError
from covey.jax import GRPOConfig, GRPOTrainer, jax_reward
from fakes import raises
from loss_reference import Completed, reference_loss

BATCH = {"prompts": PROMPTS}
NAMES = {"off_policy_mask_threshold": "off_policy", "top_entropy_quantile": "quantile"}
NAMES |= {"reference_drift_threshold": "drift", "importance_sampling_correction": "correction"}


def test_the_document_formula_by_hand() -> None:
    """Advantage r - mean; loss mean(-A · log-probability of the response); KL mean(policy - reference)."""
    trainer, state = make_trainer(kl_coeff=0.3)
    record, policy = trainer.rollout(state.params, BATCH), moved(state.params)
    loss = float(jax.jit(trainer.compute_loss)(policy, record))
    rewards = np.asarray(record["rewards"], np.float64).reshape(3, 4)
    advantages = (rewards - rewards.mean(1, keepdims=True)).reshape(-1)
    logp, ref = (table_logp(each["params"]["table"], record).sum(-1) for each in (policy, state.params))
    assert loss == pytest.approx(np.mean(-advantages * logp) + 0.3 * np.mean(logp - ref), rel=1e-5)
    _, metrics = trainer.loss_and_metrics(state.params, record)
    assert float(metrics["kl"]) == pytest.approx(0, abs=1e-6)  # policy = reference
    assert float(metrics["reward"]) == pytest.approx(rewards.mean())


def test_one_function_compiles_and_differentiates() -> None:
    """Sampling and rewards inside `jit(grad(compute_loss))` give the gradient of the recorded batch, no more."""
    with jax.enable_x64(True):
        trainer, state = make_trainer()
        params = jax.tree.map(lambda x: x.astype(jnp.float64), state.params)
        trainer.ref_params = moved(params)
        prompts = jnp.asarray([[2, 3], [4, 0]])
        batch = {"prompts": prompts, "prompt_lengths": jnp.asarray([2, 1]), "key": jax.random.key(7)}
        loss, gradient = jax.jit(jax.value_and_grad(trainer.compute_loss))(params, batch)
        record = trainer.rollout(params, batch)
        recorded_loss, recorded = jax.value_and_grad(trainer.compute_loss)(params, record)
        assert float(loss) == pytest.approx(float(recorded_loss), rel=1e-10)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), gradient, recorded)
        assert trainer.compute_loss(params, batch) == pytest.approx(float(loss), rel=1e-10)  # without jit, too
        recorded_loss_of = jax.jit(trainer.compute_loss)
        table, step = np.asarray(params["params"]["table"]), 1e-5
        for at in [(3, 2), (4, END), (2, 0), (6, 6)]:
            nudge = np.zeros_like(table)
            nudge[at] = step
            beyond = ({"params": {"table": jnp.asarray(there)}} for there in (table + nudge, table - nudge))
            above, below = (float(recorded_loss_of(there, record)) for there in beyond)
            slope = (above - below) / (2 * step)
            assert float(gradient["params"]["table"][at]) == pytest.approx(slope, rel=1e-6, abs=1e-9)


VARIANTS: list[dict[str, Any]] = [{"loss_type": name, "kl_estimator": "k3"} for name in LOSSES]
ESTIMATORS = ("k1", "k2", "abs", "k3+", "k3_unbiased", "exact", "exact_weighted")
VARIANTS += [{"loss_type": "grpo", "kl_estimator": name} for name in ESTIMATORS]
ASYMMETRIC = {"epsilon": 0.1, "loss_parameters": {"epsilon_high": 0.3}}
UNCERTAIN = {"top_entropy_quantile": 0.4}
VARIANTS += [
    {"loss_type": "dapo", "adv_estimator": "grpo", "scale_rewards": "batch", **ASYMMETRIC},
    {"loss_type": "grpo", "adv_estimator": "rloo", "loss_parameters": {"delta": 2.0}, "entropy_coef": 0.05},
    {"loss_type": "bnpo", "mask_truncated_completions": True},
    {"loss_type": "reinforce_kept", "mask_truncated_completions": True},
    {"loss_type": "bnpo", "off_policy_mask_threshold": 0.0},
    {"loss_type": "bnpo", "reference_drift_threshold": "sum:0"},
    {"loss_type": "bnpo", **UNCERTAIN},
    {"loss_type": "gspo", "kl_estimator": "k3", "off_policy_mask_threshold": 0.0, **UNCERTAIN},
    {"loss_type": "grpo", "kl_estimator": "k3_unbiased", "importance_sampling_correction": "sequence_mask:1.5"}
    | UNCERTAIN,
    {"loss_type": "bnpo", "importance_sampling_correction": "sequence_truncate:1.1"},
    {"loss_type": "vespo", "importance_sampling_correction": "token_mask:1.1"},
    {"loss_type": "luspo", "importance_sampling_correction": "token_mask:0.95:1.1"},
]
SMALL = {"kl_cov": {"kl_cov_ratio": 0.3}, "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.01, "clip_cov_ub": 2.0}}
for variant in VARIANTS:
    if variant["loss_type"] in SMALL:
        variant["loss_parameters"] = SMALL[variant["loss_type"]]


def by_the_reference(config: GRPOConfig, settings: dict[str, Any], record: Any, *arrays: Any) -> dict[str, float]:
    """`loss_reference` on the rows of a record, which knows nothing of `covey.algorithms`."""
    logp, ref, old, before, entropy = arrays
    sequences = []
    for row, exists in enumerate(record["mask"]):
        parts = (torch.tensor(x[row, exists]) for x in (logp, old, ref, entropy))
        dropped = config.mask_truncated_completions and not record["finished"][row]
        advantage, old_trainer = float(record["advantages"][row]), torch.tensor(before[row, exists])
        sequences.append(Completed(*parts, advantage, old_trainer, dropped))
    options = {NAMES.get(name, name): value for name, value in settings.items() if name != "loss_parameters"}
    if "drift" in options:
        options["drift"], options["drift_reduction"] = config.algorithm.reference_drift
    if "correction" in options:
        correction = config.algorithm.correction
        options |= {"correction": correction.mode, "cap": correction.cap, "floor": correction.floor or 0.0}
    if config.kl_estimator.startswith("exact"):  # it knows no KL over the vocabulary
        options |= {"kl_estimator": "k1", "beta": 0.0}
    options = {"kl_estimator": config.kl_estimator, "beta": 0.2, **options, **config.loss_parameters}
    return reference_loss(sequences, max_length=5, **options)[1]


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_every_variant_equals_the_reference_in_loops(settings: dict[str, Any]) -> None:
    """The loss of a record, off-policy, and its metrics, of log-probabilities that NumPy computed."""
    with jax.enable_x64(True):
        check_against_the_reference(settings)


def check_against_the_reference(settings: dict[str, Any]) -> None:
    config = GRPOConfig(kl_coeff=0.2, num_samples_per_prompt=4, max_completion_length=5, **settings)
    rng = np.random.default_rng(1)
    mask = np.arange(5) < rng.integers(1, 6, (12, 1))
    record: dict[str, Any] = {"tokens": rng.integers(0, 7, (12, 9)), "lengths": rng.integers(1, 5, 12), "mask": mask}
    record |= {"rewards": rng.random(12), "finished": rng.random(12) < 0.6, "valid": np.ones(12, bool)}
    columns = record["lengths"][:, None] + np.arange(5)
    record["responses"] = np.take_along_axis(record["tokens"], columns, axis=1)
    trainer = GRPOTrainer(Bigram(), Bigram(), optax.sgd(1.0), even_share, config)
    base, away = rng.normal(size=(2, 7, 7))
    tables = [base + size * away for size in (0.3, 0.0, 0.2)]
    trainer.ref_params = {"params": {"table": jnp.asarray(tables[1])}}
    logp, ref, old = (table_logp(table, record) for table in tables)
    groups, before = np.repeat(np.arange(3), 4), old + rng.normal(0.05, 0.1, mask.shape) * mask
    scale = "none" if config.adv_estimator == "dr_grpo" else config.scale_rewards
    advantages = group_advantages(record["rewards"], groups, scale=scale)
    if config.adv_estimator == "rloo":
        advantages = rloo_advantages(record["rewards"], groups)
    record |= {"old_logprobs": old, "advantages": advantages, "ref_logprobs": ref, "trainer_old": before}
    params, given = {"params": {"table": jnp.asarray(tables[0])}}, jax.tree.map(jnp.asarray, record)
    loss, metrics = jax.jit(trainer.loss_and_metrics)(params, given)
    rows = [table - np.log(np.exp(table).sum(-1, keepdims=True)) for table in tables]
    at = np.take_along_axis(record["tokens"], columns - 1, axis=1)
    entropy = -np.sum(np.exp(rows[0]) * rows[0], -1)[at]
    expected = by_the_reference(config, settings, record, logp, ref, old, before, entropy)
    if config.kl_estimator.startswith("exact"):
        exact = np.sum(np.exp(rows[0]) * (rows[0] - rows[1]), -1)
        if config.kl_estimator == "exact_weighted":
            exact *= np.mean(np.exp(rows[0]) / (np.exp(rows[1]) + 1e-8), -1)
        exact = exact[at]
        expected["kl"] = exact[mask].mean()
        expected["loss"] += 0.2 * np.mean([exact[row, exists].mean() for row, exists in enumerate(mask)])
    if any(name in settings for name in ("mask_truncated_completions", "off_policy_mask_threshold")):
        assert 0 < expected["mask_ratio"] < 1
    assert float(loss) == pytest.approx(expected["loss"], rel=1e-10)
    for name in ("kl", "entropy", "ratio/mean", "policy_loss"):
        assert float(metrics[name]) == pytest.approx(expected[name.split("/")[0]], rel=1e-9), name
    assert float(metrics["mask_ratio"]) == pytest.approx(expected["mask_ratio"])


def test_a_recipes_names_will_do() -> None:
    ours = GRPOConfig(kl_coeff=0.3, num_samples_per_prompt=3)
    assert ours == GRPOConfig(beta=0.3, num_generations=3) != GRPOConfig()
    assert (ours.kl_coeff, ours.num_samples_per_prompt) == (0.3, 3)


def test_rows_per_pass_changes_memory_only() -> None:
    settings = {"loss_type": "grpo", "adv_estimator": "grpo", "kl_estimator": "exact", "entropy_coef": 0.1}
    whole, state = make_trainer(**settings)
    split, _ = make_trainer(rows_per_pass=6, **settings)
    record, policy = whole.rollout(state.params, BATCH), moved(state.params)
    one, other = (jax.jit(jax.value_and_grad(t.compute_loss))(policy, record) for t in (whole, split))
    assert float(one[0]) == pytest.approx(float(other[0]), rel=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), one[1], other[1])
    uneven, _ = make_trainer(rows_per_pass=5, **settings)
    raises(ConfigError, "rows_per_pass=5: does not divide the batch's 12", uneven.compute_loss, policy, record)


def test_lora_trains_the_factors_alone_in_float32_and_needs_no_reference_copy() -> None:
    trainer, state = make_trainer(small_transformer(lora_rank=2), kl_coeff=0.1)
    assert set(state.params) == {"lora"}
    assert trainer.ref_params is None
    seen: list[Any] = []
    trainer.train(state, [BATCH] * 3, on_step=lambda step, metrics: seen.append(metrics))
    assert seen[0]["kl"] == pytest.approx(0, abs=1e-6)  # B = 0: the reference is the policy
    assert seen[0]["updated"] == 1
    assert abs(seen[2]["kl"]) > 1e-5
    trainer, state = make_trainer(small_transformer(lora_rank=2))
    trainer.frozen_params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), trainer.frozen_params)
    after, metrics = trainer.train_step(state, BATCH)
    assert np.isfinite(float(metrics["loss"]))
    assert int(metrics["updated"]) == 1
    held = jax.tree.leaves((after.params, after.opt_state))
    assert {str(x.dtype) for x in held if x.ndim} == {"float32"}  # factors and moments
    _, metrics = jax.jit(trainer.loss_and_metrics)(state.params, trainer.rollout(state.params, BATCH))
    assert float(metrics["ratio/mean"]) == pytest.approx(1, abs=0.02)  # sampler and trainer agree as bfloat16 does


def test_it_learns() -> None:
    """The share of even ids rises; a JAX reward inside the step and a Python one by callback give the same steps."""

    @jax_reward
    def traced(responses: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.sum(mask & (responses % 2 == 0), -1) / jnp.sum(mask, -1)

    finals = []
    for reward in (even_share, traced):
        trainer, state = make_trainer(reward=reward, num_samples_per_prompt=16, kl_coeff=0.0)
        rewards: list[float] = []
        note = partial(lambda seen, step, metrics: seen.append(metrics["reward"]), rewards)
        state = trainer.train(state, [BATCH] * 30, on_step=note)
        assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
        finals.append(state.params["params"]["table"])
    np.testing.assert_allclose(finals[0], finals[1], atol=1e-4)


def test_several_passes_over_one_batch() -> None:
    trainer, state = make_trainer(num_iterations=3, loss_type="grpo", adv_estimator="grpo")
    seen: list[Any] = []
    state = trainer.train(state, [BATCH] * 2, on_step=lambda step, metrics: seen.append(metrics))
    assert (int(state.step), [m["reward"] for m in seen[:3]]) == (6, [seen[0]["reward"]] * 3)
    assert seen[0]["ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert abs(seen[2]["ratio/mean"] - 1) > 1e-3


def test_lengths_that_vary_compile_nothing_new() -> None:
    """Prompts of 1 to 8 tokens fall into the buckets 4 and 8: two compilations, however many batches."""
    traces: list[int] = []

    class Counted(Bigram):
        def __call__(self, tokens: jax.Array) -> jax.Array:
            traces.append(tokens.shape[1])
            return super().__call__(tokens)

    trainer, state = make_trainer(Counted())
    rng = np.random.default_rng(0)

    def step(longest: int) -> None:
        nonlocal state
        lengths = [longest, *rng.integers(1, longest + 1, 2)]
        state, _ = trainer.train_step(state, {"prompts": [rng.integers(2, 7, n).tolist() for n in lengths]})

    step(4)
    step(8)
    warm = len(traces)
    for longest in range(1, 9):
        step(longest)
    assert (len(traces), trainer._compiled_step._cache_size()) == (warm, 2)


def test_a_reference_of_its_own() -> None:
    """A bound module keeps its variables; the policy then starts away from it."""
    other = Bigram().bind({"params": {"table": jnp.zeros((7, 7))}})
    trainer = GRPOTrainer(Bigram(), other, optax.sgd(0.1), even_share, {"num_samples_per_prompt": 2, "kl_coeff": 1.0})
    how = (jax.random.key(3), jnp.zeros((1, 4), jnp.int32))
    _, metrics = trainer.train_step(trainer.create_train_state(*how), BATCH)
    assert abs(float(metrics["kl"])) > 0.01
    state = trainer.create_train_state(*how, params={"params": {"table": jnp.ones((7, 7))}})
    assert (state.params["params"]["table"] == 1).all()


def test_reward_errors_name_the_function_and_leave_the_trainer_usable_and_none_is_no_error() -> None:
    returns: list[Any] = []

    def reward(responses: list[list[int]]) -> Any:
        if isinstance(returns[-1], BaseException):
            raise returns[-1]
        return returns[-1]

    trainer, state = make_trainer(reward=reward)
    where = r"at .*test_jax_grpo.py:.* in reward for 12 responses"
    for returned, message in [
        ([1.0] * 11, r"'reward' returned 11 rewards for 12 completions; it must return exactly one"),
        ([float("nan")] * 12, r"'reward' returned nan for sample 0 .*not finite.*None if"),
        (None, r"'reward' returned nothing \(None\)"),
        (ValueError("no key"), rf"'reward' raised ValueError: no key {where}"),
        (SystemExit(0), rf"'reward' raised SystemExit: 0 {where}"),
    ]:
        returns.append(returned)
        raises(RewardError, message, trainer.train_step, state, BATCH)  # by callback from compiled code
        raises(RewardError, message, trainer.rollout, state.params, BATCH)
    returns.append(list(range(12)))
    _, metrics = trainer.train_step(state, BATCH)
    assert float(metrics["reward"]) == 5.5
    trainer, state = make_trainer(reward=lambda responses: [None, 1.0, 0.0, 1.0] * 3)
    record, third = trainer.rollout(state.params, BATCH), 1 / 3
    assert np.isnan(np.asarray(record["rewards"])[::4]).all()
    np.testing.assert_allclose(np.asarray(record["advantages"])[:4], [0, third, -2 * third, third], atol=1e-6)


def test_bad_input_is_one_clear_error() -> None:
    trainer, state = make_trainer(small_transformer())
    table, sgd = {"params": {"table": jnp.zeros((7, 7))}}, optax.sgd(0.1)
    for dummy, params, message in [
        (jnp.zeros(4, jnp.int32), None, r"dummy_input of shape \(4,\).*\[B, L\].*jnp.zeros"),
        (jnp.zeros((1, 4)), None, r"dummy_input .* type float32"),
        (jnp.zeros((1, 4), jnp.int32), table, r"params\['params'\].* has shape None, but the policy model has"),
    ]:
        raises(ConfigError, message, trainer.create_train_state, jax.random.key(0), dummy, params=params)
    for batch, message in [
        ({}, "prompts are what it is about"),
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": [[2], []]}, "leave empty prompts out"),
        ({"prompts": [[2, 13]]}, "the id 13: the model knows 0 to 12"),
        ({"prompts": np.zeros((2, 3))}, r"prompts of shape .* type float64"),
        ({"prompts": [[2]], "columns": {"answer": ["a", "b"]}}, r"columns\['answer'\] has 2 entries for 1"),
    ]:
        raises(ConfigError, message, trainer.train_step, state, batch)
    batch = {"prompts": [[2]], "columns": {"answer": ["a"]}}
    with pytest.raises(ConfigError, match=r"columns\['answer'\] holds no numbers"):
        jax.jit(lambda params: trainer.compute_loss(params, batch))(state.params)
    for settings, message in [
        ({"kl_coef": 0.1}, "did you mean 'kl_coeff'"),
        ({"num_samples_per_prompt": 1}, "num_samples_per_prompt=1: a group needs at least 2"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"loss_type": "gpro"}, r"loss_type='gpro': must be grpo .*did you mean"),
        ({"validity_min_length": 10}, "pass decode=tokenizer.decode"),
    ]:
        raises(ConfigError, message, make_trainer, **settings)
    for model, reward, said in [(None, even_share, r"ref_model=None: kl_coeff=0\.04"), (Bigram(), 3, "reward_fn=3")]:
        raises(ConfigError, said, GRPOTrainer, Bigram(), model, sgd, reward, {})
