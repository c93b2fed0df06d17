"""Files that other programs read, from what was trained here: PEFT adapters and Hugging Face model folders.

    save_adapter(folder, config, state.params["lora"], base_model="org/name")     peft.PeftModel.from_pretrained
    save_model(folder, config, state.params["params"], hf_config)                 AutoModelForCausalLM, load_hf

    found = load_adapter(folder)
    config = replace(config, lora_rank=found.rank, lora_alpha=found.alpha, lora_modules=found.target_modules)
    lora = lora_from_tensors(config, found.tensors, folder)

Matrices are transposed on the way, nothing else changes, and types are kept. Each file appears whole or not at all;
write inside `covey.files.publishing` for a folder that does. A tokenizer is the caller's to save.

Limits: a model is written as one file, and is held in the host's memory once more meanwhile. A saved `lora_dropout` is
not read: there is none here, and it plays no part in what an adapter computes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict

from covey.adapters import CONFIG_FILE, PEFT_PREFIX, Adapter, Array, plain_lora, read_adapter_folder, write_tensors
from covey.errors import AdapterError, ModelError
from covey.files import explained, write_atomically
from covey.jax.loading import Place, collection, places
from covey.jax.model import LINEAR_LAYERS, ModelConfig

MODEL_CONFIG, MODEL_WEIGHTS = "config.json", "model.safetensors"


class LoadedAdapter(NamedTuple):
    """A PEFT adapter as `load_adapter` read it."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    tensors: Mapping[str, Array]


def adapter_tensors(config: ModelConfig, lora: Any) -> dict[str, Array]:
    """LoRA factors by PEFT's names: `lora_A` `[r, in]`, `lora_B` `[out, r]`. Raises ModelError: not the config's."""
    lora = _collection(lora, "lora")
    return _export(lora, _factors(config, _modules(lora)), "lora", "pass the `lora` collection of a Transformer")


def lora_from_tensors(
    config: ModelConfig, tensors: Mapping[str, Array], source: str | Path
) -> dict[str, dict[str, Any]]:
    """The `lora` collection of a model, from an adapter's tensors; types are kept.

    Args:
        config: of the model, with the adapter's `lora_rank` and `lora_modules`.
        tensors: from `load_adapter` or `adapter_tensors`.
        source: where they come from, for messages.

    Raises `ModelError`: a tensor is missing, has no place in the model, has another shape, or is not finite.
    """
    wanted = list(_factors(config, config.lora_modules))
    fix = "set lora_rank and lora_modules to what load_adapter returns, and use the adapter's own base model"
    with np.errstate(over="ignore"):
        lora = collection(wanted, dict(tensors), None, f"{source}: the adapter", fix)
    held = flatten_dict(lora)
    for place in wanted:  # as converted: a large float64 is infinite in float32
        if not np.isfinite(np.asarray(held[place.path])).all():
            raise ModelError(f"{source}: {place.name} has values that are not finite numbers; save it again")
    return lora


def save_adapter(folder: str | Path, config: ModelConfig, lora: Any, *, base_model: str) -> None:
    """Write an adapter in PEFT's format.

    Args:
        folder: created if missing.
        config: of the model; `lora_rank` and `lora_alpha` are written.
        lora: see `adapter_tensors`.
        base_model: folder or name of the base model.

    Raises:
        ModelError: see `adapter_tensors`.
        RunFolderError: it cannot be written.
    """
    tensors = adapter_tensors(config, lora)
    alpha = float(config.lora_alpha)
    settings: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model}
    settings |= {"inference_mode": True, "r": config.lora_rank, "lora_dropout": 0.0, "bias": "none"}
    settings["lora_alpha"] = int(alpha) if alpha.is_integer() else alpha  # some readers take integers only
    settings["target_modules"] = list(_modules(_collection(lora, "lora")))
    Adapter(tensors, settings).write(folder)


def load_adapter(folder: str | Path) -> LoadedAdapter:
    """Read a PEFT adapter.

    For a rank-stabilised adapter (`use_rslora`), alpha is returned as `alpha · sqrt(rank)`, which has the same effect
    here. Saving it again makes a plain adapter.

    Args:
        folder: holds `adapter_config.json` and `adapter_model.safetensors`.

    Returns `(rank, alpha, target_modules, tensors)`, see `LoadedAdapter`. Shapes are checked by `lora_from_tensors`.

    Raises `ModelError`: files are missing or damaged, or the adapter is not plain LoRA on linear layers of a
    `Transformer`.
    """
    found = read_adapter_folder(folder)
    stabilised = bool(found.config.get("use_rslora"))
    found = replace(found, config={**found.config, "use_rslora": False})
    try:
        if found.config.get("layers_to_transform"):
            which = f"layers_to_transform={found.config['layers_to_transform']!r:.80}"
            raise AdapterError(f"adapter_config has {which}: all layers here have factors")
        held = {module.rpartition(".")[2] for module in found.factors}
        rank, alpha = plain_lora(found.config)
    except AdapterError as error:
        raise ModelError(f"{folder}: {error}; use a plain LoRA adapter, or the PyTorch trainer") from error
    targets = found.config.get("target_modules")  # text is a pattern: the tensors tell
    named = {str(name).rpartition(".")[2] for name in targets} if isinstance(targets, list) else held
    for other in sorted((named | held) - set(LINEAR_LAYERS)):
        raise ModelError(
            f"{folder}: target_modules has {other!r:.80}: factors are on {', '.join(LINEAR_LAYERS)} here; train this "
            "adapter with the PyTorch trainer"
        )
    for extra in sorted(held - named):
        raise ModelError(
            f"{folder}: it holds factors of {extra}, but {CONFIG_FILE} does not target it; use files of one adapter"
        )
    modules = tuple(name for name in LINEAR_LAYERS if name in named)
    return LoadedAdapter(rank, alpha * math.sqrt(rank) if stabilised else alpha, modules, found.tensors)


def _modules(lora: Mapping[str, Any]) -> tuple[str, ...]:
    """Linear layers that have factors anywhere, in the order of `LINEAR_LAYERS`."""
    held = {path[1] for path in flatten_dict(lora) if len(path) == 3}
    return tuple(name for name in LINEAR_LAYERS if name in held)


def model_tensors(config: ModelConfig, params: Any) -> dict[str, Array]:
    """A model's weights by Hugging Face's names, in their own type; a tied embedding is there once."""
    advice = "pass the `params` collection of a Transformer of this config"
    return _export(_collection(params, "params"), places(config), "params", advice)


def save_model(folder: str | Path, config: ModelConfig, params: Any, hf_config: Mapping[str, Any]) -> None:
    """Write a model folder that `transformers` and `load_hf` can load.

    Args:
        folder: created if missing.
        config: of the model.
        params: see `model_tensors`.
        hf_config: content of the base model's `config.json`; the type of the weights is set in it.

    Raises:
        ModelError: see `model_tensors`; or `hf_config` is of another model; or the folder holds other weights.
        RunFolderError: it cannot be written.
    """
    tensors, told = model_tensors(config, params), dict(hf_config)
    told["num_key_value_heads"] = told.get("num_key_value_heads") or told.get("num_attention_heads")
    told["head_dim"] = told.get("head_dim") or config.hidden_size // config.num_heads
    told["tie_word_embeddings"] = bool(told.get("tie_word_embeddings", False))
    ours = {name: getattr(config, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    ours |= {"num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads}
    ours |= {"num_key_value_heads": config.num_kv_heads, "head_dim": config.width_of_head}
    for name, held in (ours | {"tie_word_embeddings": config.tie_embeddings}).items():
        if told.get(name) != held:
            found = f"{name}={told.get(name)!r}, but the model has {held!r}"
            raise ModelError(f"hf_config: {found}; pass the config.json of its base model")
    kind = tensors["model.embed_tokens.weight"].dtype.name
    settings = {key: value for key, value in hf_config.items() if key != "torch_dtype"} | {"dtype": kind}
    folder = Path(folder)
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    others = sorted(path.name for path in folder.glob("*.safetensors") if path.name != MODEL_WEIGHTS)
    if others:
        raise ModelError(f"{folder}: holds {others[0]}, which readers would mix with this model; give an empty folder")
    write_tensors(folder / MODEL_WEIGHTS, tensors)
    write_atomically(folder / MODEL_CONFIG, json.dumps(settings, indent=2) + "\n")


def _factors(config: ModelConfig, modules: tuple[str, ...]) -> Iterator[Place]:
    for place in places(config):
        if place.path[-1] == "kernel" and place.path[1] in modules:
            (inside, outside), stem = place.shape, f"{PEFT_PREFIX}{place.name.removesuffix('.weight')}"
            yield Place(f"{stem}.lora_A.weight", (*place.path[:2], "a"), (inside, config.lora_rank))
            yield Place(f"{stem}.lora_B.weight", (*place.path[:2], "b"), (config.lora_rank, outside))


def _collection(variables: Any, name: str) -> Any:
    # With other collections beside it nothing is picked: params of a model with LoRA alone are not that model.
    return variables[name] if set(variables) == {name} else variables


def _export(tree: Any, places: Iterator[Place], what: str, advice: str) -> dict[str, Array]:
    held = flatten_dict(tree)
    tensors: dict[str, Array] = {}
    for place in places:
        value = held.pop(place.path, None)
        if value is None:
            raise ModelError(f"{what}: no {'/'.join(place.path)}; {advice}")
        if value.shape != place.shape:
            told = f"has shape {value.shape}, the config says {place.shape}"
            raise ModelError(f"{what}: {'/'.join(place.path)} {told}; {advice}")
        # A view would be written in the order of its buffer, which is that of the untransposed matrix.
        array = np.asarray(value)
        tensors[place.name] = np.ascontiguousarray(array.T if place.is_transposed else array)
    if held:
        raise ModelError(f"{what}: {'/'.join(map(str, min(held)))} has no place in a saved file; {advice}")
    if not tensors:
        raise ModelError(f"{what}: holds no arrays; {advice}")
    return tensors
