"""bfloat16 weights: sums, scores, logits and what is made of them stay float32, and so do LoRA factors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax_cases import like_pytorch
from learner_cases import make_batch, make_learner
from tiny_models import tiny_model, tiny_tokenizer

from covey import GRPOConfig
from covey.algorithms import make_objective
from covey.jax import backend
from covey.jax.compiling import keep_float32
from covey.jax.engine import Engine
from covey.jax.learner import Learner
from covey.jax.linear import wide_product
from covey.jax.policy import Policy
from covey.jax.sharding import runs_on_cpu
from covey.types import Request, SamplingSettings

ROWS = np.arange(12)


def precision() -> Any:
    said: Any = jax.config
    return said.jax_default_matmul_precision


def narrowed(policy: Policy) -> Policy:
    policy.frozen = jax.tree.map(lambda x: x.astype(jnp.bfloat16), policy.frozen)
    return policy


def torch_scores(policy: Any, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """`[N, T]` log-probabilities of the weights rounded to bfloat16, by the plain model in a precision."""
    model = policy.model
    for name, parameter in model.named_parameters():
        held = parameter.data if "lora_" in name else parameter.data.bfloat16()
        parameter.data = held.to(dtype if "lora_" not in name else torch.float32)
    batch = make_batch()
    found = np.zeros(batch.mask.shape)
    for row, episode in enumerate(batch.episodes):
        ids = torch.from_numpy(episode.token_ids)
        with torch.no_grad():
            logp = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
        chosen = logp.gather(1, ids[1:, None])[:, 0][torch.from_numpy(episode.sampled[1:])]
        found[row, : len(chosen)] = chosen.numpy()
    return found


def test_sums_of_narrow_factors_stay_wide() -> None:
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((2, 5, 300), (2, 300, 7)))
    found = wide_product(x, y)
    exact = np.asarray(x, np.float64) @ np.asarray(y, np.float64)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact, atol=2e-5)
    assert abs(np.asarray(x @ y, np.float64) - exact).max() > 1e-2  # what would be lost
    weights = jnp.asarray(rng.normal(size=found.shape), jnp.float32)
    gradients = jax.grad(lambda x, y: jnp.sum(weights * wide_product(x, y)), argnums=(0, 1))(x, y)
    g = np.asarray(weights, np.float64)
    for gradient, wanted in zip(
        gradients,
        (g @ np.asarray(y, np.float64).swapaxes(1, 2), np.asarray(x, np.float64).swapaxes(1, 2) @ g),
        strict=True,
    ):
        assert gradient.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(gradient, np.float64), wanted, atol=0.02 * abs(wanted).max())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_wide_factors_are_multiplied_as_ever(dtype: Any) -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), dtype)
        assert wide_product(x, x).dtype == dtype
        np.testing.assert_array_equal(wide_product(x, x), x @ x)


def test_log_probabilities_are_as_exact_as_the_plain_model_s() -> None:
    """No further from the float32 numbers of the same weights than three times what transformers' code is."""
    truth = torch_scores(make_learner().policy, torch.float32)
    theirs = torch_scores(make_learner().policy, torch.bfloat16)
    policy = narrowed(like_pytorch(make_learner().policy))
    batch = make_batch()
    found, _ = Learner(policy, learning_rate=1e-2).scores(batch, ROWS, temperature=1.0)
    assert found.dtype == np.float32
    own, ours = (abs(logp - truth)[batch.mask].mean() for logp in (theirs, found))
    assert 0 < ours < 3 * own


def test_sampler_and_learner_agree() -> None:
    """The adapter is merged in the one, and beside the weights in the other: rounding is all that parts them."""
    policy = narrowed(like_pytorch(make_learner().policy))
    rng = np.random.default_rng(2)
    requests = [Request(rng.integers(4, 97, size=6), (1, n)) for n in range(12)]
    completions = Engine(policy.model)(requests, SamplingSettings(max_tokens=8, eos_token_ids=(2,)), policy_version=0)
    logprobs = np.concatenate([one.logprobs for one in completions])
    assert logprobs.dtype == np.float32
    assert len(np.unique(logprobs)) > 0.9 * len(logprobs)  # bfloat16 has 65 numbers between -4 and -5
    batch = make_batch()
    width = max(len(one.token_ids) for one in completions)
    episodes = [
        replace(
            episode,
            token_ids=np.concatenate([request.token_ids, one.token_ids]),
            sampled=np.arange(6 + len(one.token_ids)) >= 6,
            logprobs=np.concatenate([np.zeros(6, np.float32), one.logprobs]),
        )
        for episode, request, one in zip(batch.episodes, requests, completions, strict=True)
    ]
    mask = np.arange(width) < np.array([[len(one.token_ids)] for one in completions])
    empty = np.zeros(mask.shape, np.float32)
    whole = replace(batch, episodes=tuple(episodes), mask=mask, advantages=empty, old_logprobs=empty)
    found, _ = Learner(policy, learning_rate=1e-2).scores(whole, ROWS, temperature=1.0)
    assert abs(found[mask] - logprobs).mean() < 0.03


def test_factors_gradients_and_moments_are_float32() -> None:
    policy = narrowed(like_pytorch(make_learner().policy))
    learner = Learner(policy, learning_rate=1e-2)
    learner.forward_backward(make_batch(), ROWS, make_objective("dapo"), temperature=1.0, max_completion_length=12)
    assert {x.dtype for x in jax.tree.leaves((policy.trained, learner._gradient))} == {np.dtype(np.float32)}
    assert learner.optim_step(1e-2) > 0
    moments = {x.dtype for x in jax.tree.leaves(learner._state) if x.ndim}
    assert moments == {np.dtype(np.float32)}
    assert {x.dtype for x in jax.tree.leaves(policy.frozen)} == {jnp.dtype(jnp.bfloat16)}


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A backend that takes this CPU for something else."""
    monkeypatch.setattr(backend, "runs_on_cpu", lambda mesh: False)
    before = precision()
    yield
    jax.config.update("jax_default_matmul_precision", before)


def made(**settings: Any) -> Policy:
    return backend.BACKEND.make_policy(GRPOConfig(backend="jax", **settings), tiny_model("llama"), tiny_tokenizer())


def dtypes(policy: Policy) -> set[str]:
    return {str(x.dtype) for x in jax.tree.leaves(policy.frozen or policy.trained)}


def test_auto_is_bfloat16_beside_a_cpu(accelerator: None) -> None:
    assert dtypes(made()) == {"bfloat16"}
    assert precision() is None
    assert dtypes(made(dtype="float32")) == {"float32"}
    assert precision() == "highest"


def test_weights_that_are_trained_are_float32(accelerator: None) -> None:
    assert dtypes(made(use_peft=False)) == {"float32"}


def test_auto_is_float32_on_a_cpu() -> None:
    assert runs_on_cpu(None)
    assert runs_on_cpu(jax.make_mesh((1,), ("data",)))
    assert dtypes(made()) == {"float32"}
    assert precision() is None


def test_a_precision_that_was_asked_for_stays(accelerator: None) -> None:
    jax.config.update("jax_default_matmul_precision", "tensorfloat32")
    keep_float32()
    assert precision() == "tensorfloat32"
