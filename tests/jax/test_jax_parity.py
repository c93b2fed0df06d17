"""One recorded batch, the same weights: loss and gradients of the JAX trainer are those of the PyTorch learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learner_cases import make_batch, make_learner
from tiny_models import tiny_model, tiny_tokenizer

from covey.jax import GRPOConfig, GRPOTrainer, Transformer, load_hf
from covey.pytorch.learner import Learner
from covey.pytorch.policy import Policy
from covey.types import Batch

LAYERS = {"self_attn": "attention", "mlp": "mlp"}
NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}


def as_record(batch: Batch) -> dict[str, Any]:
    """A batch of the PyTorch trainer as what `rollout` returns."""
    count, width = batch.mask.shape
    lengths = np.array([episode.prompt_length for episode in batch.episodes])
    tokens = np.zeros((count, lengths.max() + width), np.int32)
    for row, episode in enumerate(batch.episodes):
        tokens[row, : len(episode.token_ids)] = episode.token_ids
    responses = np.take_along_axis(tokens, lengths[:, None] + np.arange(width), axis=1)
    record = {"tokens": tokens, "lengths": lengths.astype(np.int32), "responses": responses, "mask": batch.mask}
    record |= {"old_logprobs": batch.old_logprobs, "advantages": batch.advantages}
    record |= {"rewards": np.zeros(count, np.float32), "finished": np.ones(count, bool), "valid": np.ones(count, bool)}
    return {name: jnp.asarray(value) for name, value in record.items()}


def as_tree(gradients: dict[str, Any]) -> dict[str, Any]:
    """PyTorch's gradients by name, in the layout of the Flax parameters."""
    tree: dict[str, Any] = {}
    for name, value in gradients.items():
        parts = name.removeprefix("base_model.model.").removeprefix("model.").split(".")
        if parts[0] == "embed_tokens":
            tree["embedding"] = value
        elif parts[0] == "norm":
            tree["final_norm"] = {"scale": value}
        elif parts[2] in NORMS:
            tree[f"layer_{parts[1]}_{NORMS[parts[2]]}"] = {"scale": value}
        else:
            into = tree.setdefault(f"layer_{parts[1]}_{LAYERS[parts[2]]}", {}).setdefault(parts[3], {})
            into[{"lora_A": "a", "lora_B": "b"}.get(parts[4], "kernel")] = value.T
    return tree


@pytest.mark.parametrize(
    ("lora", "settings"),
    [
        (True, {"loss_type": "dapo", "kl_estimator": "k3", "kl_coeff": 0.1, "entropy_coef": 0.01}),
        (False, {"loss_type": "grpo", "kl_coeff": 0.0}),
    ],
    ids=["lora", "all weights"],
)
def test_loss_and_gradients_equal_those_of_pytorch(lora: bool, settings: dict[str, Any], tmp_path: Path) -> None:
    if lora:
        learner = make_learner()
    else:
        policy = Policy.load(tiny_model("llama"), tiny_tokenizer(), use_peft=False, needs_reference=False)
        learner = Learner(policy, learning_rate=1e-2)
    batch = make_batch()
    options = GRPOConfig(num_samples_per_prompt=4, max_completion_length=12, temperature=0.8, **settings)
    reference = learner.scores(batch, np.arange(12), temperature=0.8, reference=True)[0] if lora else None
    theirs = learner.forward_backward(
        batch,
        np.arange(12),
        options.objective,
        temperature=0.8,
        max_completion_length=12,
        reference=reference,
    )
    named = dict(learner.policy.named_trainable_parameters())
    expected = as_tree({name: p.grad.numpy() for name, p in named.items()})

    tiny_model("llama").save_pretrained(tmp_path)
    config, params = load_hf(tmp_path, lora_rank=4 if lora else 0, lora_alpha=32)
    model = Transformer(config)
    trainer = GRPOTrainer(model, model, optax.sgd(1.0), lambda responses: [], options)
    state = trainer.create_train_state(jax.random.key(0), jnp.zeros((1, 4), jnp.int32), params=params)
    trained = state.params
    record = as_record(batch)
    if lora:
        trained = {"lora": as_tree({name: p.detach().numpy() for name, p in named.items()})}
        trained = jax.tree.map(jnp.asarray, trained)
        ref = trainer._scores(model, params, record).logp
        np.testing.assert_allclose(np.where(batch.mask, ref, 0), reference, atol=2e-5)
        record["ref_logprobs"] = ref
    loss, gradient = jax.jit(jax.value_and_grad(trainer.compute_loss))(trained, record)
    assert float(loss) == pytest.approx(theirs.metrics["loss"], rel=1e-5)
    (gradient,) = gradient.values()
    assert jax.tree.structure(gradient) == jax.tree.structure(expected)
    for path, ours in jax.tree.leaves_with_path(gradient):
        other = expected
        for key in path:
            other = other[key.key]
        assert np.linalg.norm(ours - other) < 1e-5 * np.linalg.norm(other), jax.tree_util.keystr(path)
