"""One recorded batch, the same weights: loss and gradients of the JAX trainer are those of the PyTorch learner."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from learner_cases import make_batch, make_learner
from tiny_models import tiny_model, tiny_tokenizer

from covey.jax import GRPOConfig, GRPOTrainer, Transformer, load_hf
from covey.jax.scoring import score
from covey.pytorch.learner import Learner
from covey.pytorch.policy import Policy
from covey.types import Batch

LAYERS = {"self_attn": "attention", "mlp": "mlp"}
KL = ("exact_weighted", "k1", "k3+", "k3_unbiased")
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


def of_kl(kind: str) -> tuple[bool, dict[str, Any]]:
    return True, {"loss_type": "dapo", "kl_estimator": kind, "kl_coeff": 0.1}


def as_jax(named: dict[str, Any]) -> Any:
    return jax.tree.map(jnp.asarray, as_tree({name: p.detach().numpy() for name, p in named.items()}))


@pytest.mark.parametrize(
    ("lora", "settings"),
    [
        (True, {"loss_type": "dapo", "kl_estimator": "k3", "kl_coeff": 0.1, "entropy_coef": 0.01}),
        (False, {"loss_type": "grpo", "kl_coeff": 0.0}),
        of_kl(KL[0]),
        *(pytest.param(*of_kl(kind), marks=pytest.mark.slow) for kind in KL[1:]),
    ],
    ids=["lora", "all weights", *KL],
)
def test_loss_and_gradients_equal_those_of_pytorch(lora: bool, settings: dict[str, Any], tmp_path: Path) -> None:
    learner, batch, rows = make_learner(), make_batch(), np.arange(12)
    if not lora:
        policy = Policy.load(tiny_model("llama"), tiny_tokenizer(), use_peft=False, needs_reference=False)
        learner = Learner(policy, learning_rate=1e-2)
    options = GRPOConfig(num_samples_per_prompt=4, max_completion_length=12, temperature=0.8, **settings)
    reference = learner.scores(batch, rows, temperature=0.8, reference=True)[0] if lora else None
    how: dict[str, Any] = {"temperature": 0.8, "max_completion_length": 12, "reference": reference}
    theirs = learner.forward_backward(batch, rows, options.objective, **how)
    named = dict(learner.policy.named_trainable_parameters())
    expected = as_tree({name: p.grad.numpy() for name, p in named.items()})
    tiny_model("llama").save_pretrained(tmp_path)
    config, params = load_hf(tmp_path, lora_rank=4 if lora else 0, lora_alpha=32)
    model = Transformer(config)
    trainer = GRPOTrainer(model, model, optax.sgd(1.0), lambda responses: [], options)
    state = trainer.create_train_state(jax.random.key(0), jnp.zeros((1, 4), jnp.int32), params=params)
    trained, record = state.params, as_record(batch)
    if lora:
        trained, ref = {"lora": as_jax(named)}, trainer._scores(model, params, record).logp
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


def test_bfloat16_is_as_exact_as_the_plain_model_s(tmp_path: Path) -> None:
    """No further from the float32 numbers of the same weights than three times what transformers' code is."""
    batch, lora = make_batch(), as_jax(dict(make_learner().policy.named_trainable_parameters()))
    truth, theirs = (torch_scores(make_learner().policy, dtype) for dtype in (torch.float32, torch.bfloat16))
    tiny_model("llama").save_pretrained(tmp_path)
    config, params = load_hf(tmp_path, dtype="bfloat16", lora_rank=4, lora_alpha=32)
    record = as_record(batch)
    how = {name: record[name] for name in ("tokens", "lengths", "responses")} | {"config": GRPOConfig()}
    found = jax.jit(lambda variables: score(Transformer(config), variables, **how).logp)({**params, "lora": lora})
    assert found.dtype == jnp.float32
    own, ours = (abs(np.asarray(logp) - truth)[batch.mask].mean() for logp in (theirs, found))
    assert 0 < ours < 3 * own
