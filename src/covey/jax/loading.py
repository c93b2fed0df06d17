"""Weights by Hugging Face's names: where each is in a Flax collection, and reading them from a folder.

PyTorch keeps a linear layer as `[out, in]`, Flax as `[in, out]`: matrices are transposed on the way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors import SafetensorError, safe_open

from covey.adapters import check_fits
from covey.errors import ModelError
from covey.jax.model import ModelConfig, RopeScaling

_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class Place(NamedTuple):
    """Where an array is: under `name` in a file, at `path` in a Flax collection, with `shape` there."""

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def is_transposed(self) -> bool:
        return self.path[-1] in ("kernel", "head", "a", "b")


def places(config: ModelConfig) -> Iterator[Place]:
    """All weights of `Transformer(config)`; a tied embedding is there once."""
    hidden, wide, head = config.hidden_size, config.intermediate_size, config.width_of_head
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    attention = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
    attention |= {"o_proj": (queries, hidden)}
    mlp = {"gate_proj": (hidden, wide), "up_proj": (hidden, wide), "down_proj": (wide, hidden)}
    yield Place("model.embed_tokens.weight", ("embedding",), (config.vocab_size, hidden))
    for index in range(config.num_layers):
        at, ours = f"model.layers.{index}", f"layer_{index}"
        for name, shape in attention.items():
            yield Place(f"{at}.self_attn.{name}.weight", (f"{ours}_attention", name, "kernel"), shape)
            if config.out_bias if name == "o_proj" else config.qkv_bias:
                yield Place(f"{at}.self_attn.{name}.bias", (f"{ours}_attention", name, "bias"), shape[1:])
        for name in ("q_norm", "k_norm") if config.qk_norm else ():
            yield Place(f"{at}.self_attn.{name}.weight", (f"{ours}_attention", name, "scale"), (head,))
        for name, shape in mlp.items():
            yield Place(f"{at}.mlp.{name}.weight", (f"{ours}_mlp", name, "kernel"), shape)
        yield Place(f"{at}.input_layernorm.weight", (f"{ours}_attention_norm", "scale"), (hidden,))
        yield Place(f"{at}.post_attention_layernorm.weight", (f"{ours}_mlp_norm", "scale"), (hidden,))
    yield Place("model.norm.weight", ("final_norm", "scale"), (hidden,))
    if not config.tie_embeddings:
        yield Place("lm_head.weight", ("head",), (hidden, config.vocab_size))


def load_hf(
    folder: str | Path, *, dtype: Any = jnp.float32, lora_rank: int = 0, lora_alpha: float = 16.0
) -> tuple[ModelConfig, dict[str, Any]]:
    """Read a model saved by `save_pretrained`, or a downloaded snapshot.

    Args:
        folder: holds `config.json` and `*.safetensors`.
        dtype: type of the parameters.
        lora_rank: LoRA rank of the returned config; `create_train_state` makes the factors.
        lora_alpha: see `ModelConfig`.

    Returns the config, and `{"params": ...}` for `Transformer(config).apply`.

    Raises `ModelError`: the folder has no such files, `Transformer` does not support the architecture, or the weights
    do not fit the config.
    """
    folder = Path(folder)
    config = replace(_read_config(folder / "config.json"), lora_rank=lora_rank, lora_alpha=lora_alpha)
    tensors = {name: x for name, x in _read_tensors(folder).items() if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        tensors.pop("lm_head.weight", None)  # some files repeat the embedding
    fix = f"use all files of one {', '.join(_TYPES)} model; the download may be incomplete"
    return config, {"params": collection(places(config), tensors, jnp.dtype(dtype), f"{folder}: its weights", fix)}


def collection(
    wanted: Iterable[Place], tensors: dict[str, Any], dtype: jnp.dtype[Any] | None, what: str, fix: str
) -> dict[str, Any]:
    """A Flax collection from tensors by name, which are taken out of `tensors`, so that memory holds them once."""
    wanted = list(wanted)
    shapes = {place.name: place.shape[::-1] if place.is_transposed else place.shape for place in wanted}
    check_fits(shapes, tensors, what, fix)
    found: dict[tuple[str, ...], Any] = {}
    for place in wanted:
        array = np.asarray(tensors.pop(place.name), dtype)
        found[place.path] = jnp.asarray(array.T if place.is_transposed else array)
    return unflatten_dict(found)


def _read_config(path: Path) -> ModelConfig:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); name a folder saved by save_pretrained") from error
    if not isinstance(found, Mapping) or found.get("model_type") not in _TYPES:
        kind = found.get("model_type") if isinstance(found, Mapping) else None
        raise ModelError(f"{path}: model_type={kind!r} is not supported in JAX; use one of {', '.join(_TYPES)}")
    kind = found["model_type"]
    for name, refused, reason in (
        ("hidden_act", found.get("hidden_act", "silu") not in ("silu", "swish"), "feed-forward layers here use silu"),
        ("mlp_bias", found.get("mlp_bias"), "the feed-forward layers here have no bias"),
        ("quantization_config", found.get("quantization_config"), "quantised weights are not read"),
        ("use_sliding_window", kind.startswith("qwen") and found.get("use_sliding_window"), "layers share one window"),
    ):
        if refused:
            raise ModelError(f"{path}: {name}={found[name]!r}: {reason}; train this model with the PyTorch trainer")
    bias = bool(found.get("attention_bias", False))
    try:
        rope: Any = found.get("rope_parameters") or {}
        return ModelConfig(
            vocab_size=found["vocab_size"],
            hidden_size=found["hidden_size"],
            intermediate_size=found["intermediate_size"],
            num_layers=found["num_hidden_layers"],
            num_heads=found["num_attention_heads"],
            num_kv_heads=found.get("num_key_value_heads") or found["num_attention_heads"],
            head_dim=found.get("head_dim"),
            rope_theta=float(rope.get("rope_theta", found.get("rope_theta", 10000.0))),
            rope_scaling=_rope_scaling(path, rope or found.get("rope_scaling") or {}),
            norm_eps=float(found.get("rms_norm_eps", 1e-6)),
            qkv_bias=kind == "qwen2" or bias,
            out_bias=kind != "qwen2" and bias,
            qk_norm=kind == "qwen3",
            tie_embeddings=bool(found.get("tie_word_embeddings", False)),
            sliding_window=found.get("sliding_window") if kind == "mistral" else None,
            padding_token=found.get("pad_token_id"),
        )
    except KeyError as error:
        raise ModelError(f"{path}: no {error}; use the file that belongs to the weights") from error


def _rope_scaling(path: Path, rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        factor, low, high = (float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
        return RopeScaling("llama3", factor, low, high, int(rope["original_max_position_embeddings"]))
    raise ModelError(f"{path}: rope_type={kind!r} is not supported in JAX; use default, linear or llama3")


def _read_tensors(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: no *.safetensors file; save the model with save_pretrained")
    tensors = {}
    for file in files:
        try:
            with safe_open(file, framework="flax") as opened:
                for name in opened.keys():  # noqa: SIM118 (the opened file is no mapping)
                    tensors[name] = np.asarray(opened.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: cannot be read ({error}); download or save it again") from error
    return tensors
