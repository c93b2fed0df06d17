"""Check what a user passes, and pad prompts to few widths: each width is compiled once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from covey.errors import ConfigError
from covey.jax.grpo_config import GRPOConfig


def pad_prompts(
    batch: Mapping[str, Any], config: GRPOConfig, model: Any
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Prompts `[B, P]`, P a bucket's width, and their lengths `[B]`. Raises ConfigError for all that is no prompt."""
    prompts = batch.get("prompts")
    if prompts is None:
        raise ConfigError(f"batch has {', '.join(batch) or 'nothing'}: prompts are what it is about; pass 'prompts'")
    if isinstance(prompts, Sequence):
        rows = [np.asarray(row).reshape(-1) for row in prompts]
        lengths = np.array([len(row) for row in rows], np.int32)
        padded = np.full((len(rows), max(lengths, default=0)), config.pad_token_id, np.int32)
        for into, row in zip(padded, rows, strict=True):
            into[: len(row)] = row
    else:
        check_tokens("prompts", prompts)
        padded = np.asarray(prompts)
        lengths = np.asarray(batch.get("prompt_lengths", np.full(len(padded), padded.shape[1])), np.int32)
    if lengths.shape != (len(padded),) or len(lengths) == 0:
        told = f"prompt_lengths of shape {lengths.shape} for {len(padded)} prompts"
        raise ConfigError(f"{told}: each of at least one prompt has one length; pass [B]")
    if lengths.min() < 1 or lengths.max() > padded.shape[1]:
        raise ConfigError(
            f"prompt_lengths={lengths.min()}..{lengths.max()}: a prompt has 1 to {padded.shape[1]} tokens here; "
            "leave empty prompts out"
        )
    real = padded[np.arange(padded.shape[1])[None] < lengths[:, None]]
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if real.min() < 0 or (vocabulary is not None and real.max() >= vocabulary):
        raise ConfigError(
            f"prompts hold the id {real.min() if real.min() < 0 else real.max()}: the model knows 0 to "
            f"{(vocabulary or 0) - 1}; use its own tokenizer"
        )
    width = config.prompt_bucket
    while width < lengths.max():
        width *= 2
    padded = padded[:, :width]
    fill = ((0, 0), (0, width - padded.shape[1]))
    return np.pad(padded, fill, constant_values=config.pad_token_id), lengths


def check_tokens(name: str, tokens: Any) -> None:
    """Refuse what is no `[B, L]` array of integers."""
    shape, dtype = getattr(tokens, "shape", None), getattr(tokens, "dtype", None)
    if shape is None or len(shape) != 2 or 0 in shape or dtype is None or not np.issubdtype(dtype, np.integer):
        raise ConfigError(
            f"{name} of shape {shape} and type {dtype}: the model takes token ids [B, L]; pass a 2-D array of "
            "integers, for example jnp.zeros((1, 8), jnp.int32)"
        )


def check_fit(params: Any, shapes: Any) -> None:
    """Refuse parameters whose names or shapes are not those of the model."""

    def leaves(tree: Any) -> dict[str, tuple[int, ...]]:
        return {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in jax.tree.leaves_with_path(tree)}

    given, wanted = leaves(params), leaves(shapes)
    for name in sorted(given.keys() | wanted.keys()):
        if given.get(name) != wanted.get(name):
            raise ConfigError(
                f"params{name} has shape {given.get(name)}, but the policy model has {wanted.get(name)} there; pass "
                "the parameters that belong to the model's config"
            )


def is_numeric(value: Any) -> bool:
    """Whether compiled code can take it."""
    return isinstance(value, np.ndarray | jax.Array) and jnp.issubdtype(value.dtype, jnp.number)


def as_column(name: str, value: Any, count: int) -> Any:
    """A column with one entry for each prompt."""
    if len(value) != count:
        raise ConfigError(f"columns[{name!r}] has {len(value)} entries for {count} prompts; give one for each prompt")
    return value
