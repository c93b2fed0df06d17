"""Micro models and trainers, shared by the tests of the JAX room."""

from functools import lru_cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from covey.jax import GRPOTrainer, ModelConfig, TrainState, Transformer

VOCAB = 7
END = 1


class Bigram(nn.Module):
    """Logits of the next token are a row of a table: the smallest model that anyone can check by hand."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.param("table", nn.initializers.normal(1.0), (VOCAB, VOCAB))[tokens]


def small_transformer(**changes: Any) -> Transformer:
    shape: dict[str, Any] = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 24}
    shape |= {"num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "tie_embeddings": False}
    return Transformer(ModelConfig(**(shape | changes)))


def even_share(responses: list[list[int]]) -> list[float]:
    return [sum(token % 2 == 0 for token in row) / len(row) for row in responses]


def make_trainer(model: Any = None, reward: Any = even_share, **settings: Any) -> tuple[GRPOTrainer, TrainState]:
    model = Bigram() if model is None else model
    options = {name: settings.pop(name) for name in ("decode", "mesh") if name in settings}
    optimizer = settings.pop("optimizer", optax.adam(0.05))
    config = {"num_samples_per_prompt": 4, "max_completion_length": 5, "eos_token_ids": (END,), "prompt_bucket": 4}
    trainer = GRPOTrainer(model, model, optimizer, reward, config | settings, **options)
    begin = _variables(model, bool(jax.config.jax_enable_x64))
    return trainer, trainer.create_train_state(jax.random.key(3), jnp.zeros((1, 4), jnp.int32), params=begin)


@lru_cache
def _variables(model: Any, wide: bool) -> Any:
    """Made once for each model: compiling the initialisation takes longer than most tests."""
    return jax.jit(model.init)(jax.random.key(3), jnp.zeros((1, 4), jnp.int32))


PROMPTS = [[2, 3], [4], [5, 6, 2]]


def moved(params: Any, size: float = 0.3, seed: int = 5) -> Any:
    """Parameters some way off, so that the policy is neither the reference nor the one that sampled."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, size, x.shape), x.dtype), params)


def table_logp(table: Any, record: Any) -> Any:
    """`[R, T]` log-probabilities of a record under a bigram table, in NumPy; 0 where masked."""
    table, tokens = np.asarray(table, np.float64), np.asarray(record["tokens"])
    logp = table - np.log(np.exp(table).sum(-1, keepdims=True))
    mask, lengths = np.asarray(record["mask"]), np.asarray(record["lengths"])
    out = np.zeros(mask.shape)
    for row, t in zip(*np.nonzero(mask), strict=True):
        at = lengths[row] + t
        out[row, t] = logp[tokens[row, at - 1], tokens[row, at]]
    return out
