"""Micro models and trainers, shared by the tests of the JAX room."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from covey.jax import GRPOTrainer, ModelConfig, TrainState, Transformer
from covey.jax.loading import config_from_hf, params_from_tensors
from covey.jax.policy import Policy
from covey.jax.saving import adapter_tensors, lora_from_tensors
from covey.jax.stacked import unstack
from covey.types import Batch, Episode, Support

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
    """The share of even ids in each response."""
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


def like_pytorch(policy: Any, **options: Any) -> Policy:
    """The same weights and adapter as those of a `covey.pytorch.policy.Policy` of a Llama with LoRA of rank 4."""
    base = policy.model.get_base_model()
    named = {name.replace(".base_layer", ""): tensor.numpy() for name, tensor in base.state_dict().items()}
    config = config_from_hf(base.config.to_dict(), "tiny")
    adapter = {n.replace(".default", ""): p.detach().numpy() for n, p in policy.named_trainable_parameters()}
    adapted = replace(config, lora_rank=4, lora_alpha=32.0)
    params = params_from_tensors(config, {n: t for n, t in named.items() if "lora" not in n}, source="tiny")
    made = Policy(
        Transformer(adapted),
        params,
        tokenizer=policy.tokenizer,
        eos_token_ids=policy.eos_token_ids,
        source="tiny",
        lora=lora_from_tensors(adapted, adapter, "tiny"),
        **options,
    )
    if "reference_update" not in options:
        made.reference.snapshot = None  # the base model, as for a fresh adapter
    return made


def torch_names(lora: Any) -> dict[str, np.ndarray[Any, Any]]:
    """LoRA factors, or their gradients, under the names of PyTorch's parameters."""
    if "layers" in lora:
        lora = unstack(lora, len(jax.tree.leaves(lora)[0]))
    rank = next(leaf for path, leaf in jax.tree.leaves_with_path(lora) if path[-1].key == "a").shape[1]
    layers = len({path[0].key for path, _ in jax.tree.leaves_with_path(lora) if "attention" in path[0].key})
    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2}
    tensors = adapter_tensors(ModelConfig(**shape, num_layers=layers, lora_rank=rank), lora)
    return {name.replace(".weight", ".default.weight"): value for name, value in tensors.items()}


def grown(rng: np.random.Generator, count: int = 14, agents: bool = True) -> list[Episode]:
    """Rows of ids 2 to 12 that begin as others do, up to any token; some end within others, or are equal to others."""
    rows: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
    for n in range(count):
        ids, sampled = rng.integers(2, 13, 3), np.zeros(3, np.bool_)
        if n % 5:  # else a tree of its own
            ids, sampled = rows[rng.integers(len(rows))]
            kept = int(rng.integers(2, len(ids) + 1))
            ids, sampled = ids[:kept], sampled[:kept]
        if n % 7:  # else as far as the other
            more = rng.integers(2, 13, rng.integers(1, 7))
            ids = np.concatenate([ids, more])
            sampled = np.concatenate([sampled, rng.random(len(more)) < (0.7 if agents else 1)])
        ids, sampled = ids.copy(), sampled.copy()
        sampled[0], sampled[-1] = False, len(sampled) > 1
        rows.append((ids, sampled))
    return [Episode(ids, sampled, np.zeros(len(ids), np.float32), "", "stop", 1) for ids, sampled in rows]


def tree_batch(seed: int = 0, supports: bool = False) -> Batch:
    """Advantages, old log-probabilities and masks of shared tokens differ from row to row."""
    rng = np.random.default_rng(seed)
    episodes = grown(rng)
    if supports:
        episodes = [with_support(one, rng) for one in episodes]
    width = max(one.num_sampled for one in episodes)
    sampled = np.arange(width) < np.array([[one.num_sampled] for one in episodes])
    excluded = sampled & (rng.random(sampled.shape) < 0.1)
    mask = sampled & ~excluded
    old = np.where(sampled, rng.normal(-2.5, 0.3, sampled.shape), 0).astype(np.float32)
    advantages = np.where(mask, rng.normal(size=(len(episodes), 1)), 0).astype(np.float32)
    return Batch(tuple(episodes), np.arange(len(episodes)) // 4, advantages, mask, old, {"some": excluded})


def with_support(episode: Episode, rng: np.random.Generator) -> Episode:
    """Kept ids: one of two sets for each token, so that the same token comes with the same and with other ones."""
    sets = [np.arange(2, 13), np.arange(13)]
    kept = [sets[rng.integers(2)] for _ in range(episode.num_sampled)]
    return replace(episode, support=Support(np.concatenate(kept), np.cumsum([0, *map(len, kept)])))
