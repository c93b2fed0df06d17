"""Files that other programs read, from what was trained here: PEFT adapters and Hugging Face model folders.

    save_adapter(folder, config, state.params["lora"], base_model="org/name")     peft.PeftModel.from_pretrained
    save_model(folder, config, state.params["params"], hf_config)                 AutoModelForCausalLM, load_hf

    found = load_adapter(folder)
    config = replace(config, lora_rank=found.rank, lora_alpha=found.alpha, lora_modules=found.target_modules)
    lora = lora_from_tensors(config, found.tensors, folder)

PyTorch keeps a linear layer as `[out, in]`, Flax as `[in, out]`: matrices are transposed on the way, nothing else
changes, and types are kept. Each file appears whole or not at all; write inside `covey.files.publishing` for a folder
that does. A tokenizer is the caller's to save.

Adapter files are untrusted: only safetensors are read, and names, types, shapes and values are checked.

Limits: a model is written as one file, and is held in the host's memory once more meanwhile. A saved `lora_dropout` is
not read: there is none here, and it plays no part in what an adapter computes.
"""

from __future__ import annotations

import json
import math
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from covey.errors import ModelError, RunFolderError
from covey.files import explained, write_atomically
from covey.jax.model import LINEAR_LAYERS, ModelConfig

Array = np.ndarray[Any, Any]

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODEL_CONFIG, MODEL_WEIGHTS = "config.json", "model.safetensors"

_FACTOR = re.compile(
    r"base_model\.model\.model\.layers\.\d+\."
    r"(?:self_attn\.([qkvo]_proj)|mlp\.(gate_proj|up_proj|down_proj))\.lora_[AB]\.weight"
)
_FLOATS = ("F64", "F32", "F16", "BF16")

_VARIANTS = {
    "use_dora": "a magnitude is trained beside the factors",
    "rank_pattern": "all factors here have one rank",
    "alpha_pattern": "all factors here have one scale",
    "modules_to_save": "whole layers are trained beside the factors",
    "fan_in_fan_out": "its layers are stored the other way round",
    "layers_to_transform": "all layers here have factors",
    "layer_replication": "its base model has layers twice",
    "lora_bias": "its factors have biases",
    "target_parameters": "it changes other parameters than linear layers",
    "trainable_token_indices": "it changes the embedding",
    "alora_invocation_tokens": "it is active on some tokens only",
    "megatron_config": "its layers are Megatron's",
    "use_qalora": "its inputs are pooled",
    "use_bdlora": "its factors are block-diagonal",
    "arrow_config": "it chooses among adapters",
    "kasa_config": "it changes the base weights",
    "velora_config": "it is no plain LoRA",
    "monteclora_config": "it is no plain LoRA",
}
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base weights as they are; PiSSA, OLoRA, LoftQ and others move them."""


class Adapter(NamedTuple):
    """A PEFT adapter as `load_adapter` read it.

    Attributes:
        rank: of all factors.
        alpha: their product is scaled by `alpha / rank`.
        target_modules: the linear layers that have factors, in the order of `LINEAR_LAYERS`.
        tensors: by PEFT's names.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    tensors: dict[str, Array]


class _Place(NamedTuple):
    """Where an array is: under `name` in a file, at `path` in a Flax collection, with `shape` there."""

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def is_transposed(self) -> bool:
        """Matrices of linear layers are; the embedding is `[V, hidden]` on both sides."""
        return self.path[-1] in ("kernel", "head", "a", "b")


# ---------------------------------------------------------------------- adapters


def adapter_tensors(config: ModelConfig, lora: Any) -> dict[str, Array]:
    """LoRA factors by PEFT's names: `lora_A` `[r, in]`, `lora_B` `[out, r]`.

    Args:
        config: of the model.
        lora: the `lora` collection, bare or as `{"lora": ...}`; only the linear layers that it holds are returned.

    Raises:
        ModelError: it holds no factors, not the same ones in all layers, or others than the config says.
    """
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

    Raises:
        ModelError: a tensor is missing, has no place in the model, has another shape, or is not finite.
    """
    places = list(_factors(config, config.lora_modules))
    unexpected = sorted(tensors.keys() - {place.name for place in places})
    if unexpected:
        raise ModelError(
            f"{source}: the model has no place for {unexpected[0]} (lora_rank={config.lora_rank}, lora_modules="
            f"{','.join(config.lora_modules)}); set these to what load_adapter returns, and use the adapter's own base"
        )
    found: dict[tuple[str, ...], jax.Array] = {}
    for place in places:
        if place.name not in tensors:
            raise ModelError(
                f"{source}: lacks {place.name}; an adapter here has factors in all {config.num_layers} layers: save it "
                "again, or set lora_modules to what load_adapter returns"
            )
        value = tensors[place.name].T  # factors are all matrices
        if value.shape != place.shape:
            raise ModelError(
                f"{source}: {place.name} has shape {value.shape[::-1]}, the model's is {place.shape[::-1]}; use the "
                f"adapter's own base model, and its rank as lora_rank (now {config.lora_rank})"
            )
        with np.errstate(over="ignore"):
            array = jnp.array(value)
        if not np.isfinite(np.asarray(array)).all():  # as converted: a large float64 is infinite in float32
            raise ModelError(f"{source}: {place.name} has values that are not finite numbers; save it again")
        found[place.path] = array
    return unflatten_dict(found)


def save_adapter(folder: str | Path, config: ModelConfig, lora: Any, *, base_model: str) -> None:
    """Write an adapter that PEFT and all that reads PEFT's files can load.

    Args:
        folder: created if missing.
        config: of the model; `lora_rank` and `lora_alpha` are written.
        lora: see `adapter_tensors`.
        base_model: folder or name of the model that it belongs to.

    Raises:
        ModelError: see `adapter_tensors`.
        RunFolderError: it cannot be written.
    """
    tensors = adapter_tensors(config, lora)
    alpha = float(config.lora_alpha)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": config.lora_rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,  # some readers take integers only
        "lora_dropout": 0.0,
        "target_modules": list(_modules(_collection(lora, "lora"))),
        "bias": "none",
    }
    folder = _made(folder)
    _write_tensors(folder / ADAPTER_WEIGHTS, tensors)
    write_atomically(folder / ADAPTER_CONFIG, json.dumps(settings, indent=2) + "\n")


def load_adapter(folder: str | Path) -> Adapter:
    """Read a PEFT adapter.

    A rank-stabilised one (`use_rslora`) is scaled by `alpha / sqrt(rank)`: its alpha is returned as
    `alpha · sqrt(rank)`, which means the same here, and saving it again makes it a plain one.

    Args:
        folder: holds `adapter_config.json` and `adapter_model.safetensors`.

    Returns:
        `(rank, alpha, target_modules, tensors)`, see `Adapter`. Shapes are checked by `lora_from_tensors`.

    Raises:
        ModelError: no such files, damaged ones, or an adapter that is more than plain LoRA on the linear layers of a
            `Transformer`.
    """
    folder = Path(folder)
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(f"{folder}: holds no {ADAPTER_CONFIG}; give the folder of a saved PEFT adapter")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ModelError(
            f"{folder}: holds no {ADAPTER_WEIGHTS} (pickled .bin adapters are not read); save it with safetensors"
        )
    path = folder / ADAPTER_CONFIG
    settings = _plain_settings(path)
    rank, alpha = _number(path, settings, "r"), _number(path, settings, "lora_alpha")
    if rank != int(rank):
        raise ModelError(f"{path}: r={rank!r} is no rank; it must be a whole number")
    named = _named_modules(path, settings.get("target_modules"))
    tensors = _read_factors(folder / ADAPTER_WEIGHTS)
    held = {match[1] or match[2] for match in map(_FACTOR.fullmatch, tensors) if match}
    targets = held if named is None else named
    if extra := held - targets:
        raise ModelError(
            f"{folder}: {ADAPTER_WEIGHTS} holds factors of {min(extra)}, but {ADAPTER_CONFIG} does not target it; use "
            "files of one adapter"
        )
    modules = tuple(name for name in LINEAR_LAYERS if name in targets)
    scale = math.sqrt(rank) if settings.get("use_rslora") else 1.0
    return Adapter(int(rank), float(alpha) * scale, modules, tensors)


def _plain_settings(path: Path) -> Mapping[str, Any]:
    """An adapter's config, refused where it asks for more than plain LoRA."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); save or fetch the adapter again") from error
    if not isinstance(found, Mapping):
        raise ModelError(f"{path}: holds no JSON object; save or fetch the adapter again")

    def refuse(name: str, reason: str) -> ModelError:
        value = f"{found.get(name)!r:.80}"
        return ModelError(f"{path}: {name}={value}: {reason}; use a plain LoRA adapter, or the PyTorch trainer")

    if found.get("peft_type") != "LORA":
        raise refuse("peft_type", "only LORA is read in JAX")
    for name, reason in _VARIANTS.items():
        if found.get(name):
            raise refuse(name, reason)
    if found.get("bias", "none") != "none":
        raise refuse("bias", "biases are trained beside the factors")
    if found.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise refuse("init_lora_weights", "the base weights are changed with it")
    return found


def _number(path: Path, settings: Mapping[str, Any], name: str) -> int | float:
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ModelError(f"{path}: {name}={value!r:.80} is not usable; it must be a number above 0")
    return value


def _named_modules(path: Path, targets: Any) -> set[str] | None:
    """Linear layers that a list of names targets; None for a pattern, where the tensors tell."""
    if targets is None or isinstance(targets, str):
        return None
    names = targets if isinstance(targets, list) else [targets]
    for name in names:
        if not isinstance(name, str) or name.rsplit(".", 1)[-1] not in LINEAR_LAYERS:
            raise ModelError(
                f"{path}: target_modules has {name!r:.80}: factors are on {', '.join(LINEAR_LAYERS)} here; train this "
                "adapter with the PyTorch trainer"
            )
    return {name.rsplit(".", 1)[-1] for name in names}


def _read_factors(path: Path) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    try:
        with safe_open(path, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 (the opened file is no mapping)
                kind = opened.get_slice(name).get_dtype()
                if not _FACTOR.fullmatch(name) or kind not in _FLOATS:
                    raise ModelError(
                        f"{path}: {name[:200]!r} ({kind}) is no factor of a linear layer of this model; save a plain "
                        "LoRA adapter"
                    )
                tensors[name] = opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: is damaged ({error}); save or fetch it again") from error
    if not tensors:
        raise ModelError(f"{path}: holds no tensors; save or fetch it again")
    return tensors


def _modules(lora: Mapping[str, Any]) -> tuple[str, ...]:
    """Linear layers that have factors anywhere, in the order of `LINEAR_LAYERS`."""
    held = {path[1] for path in flatten_dict(lora) if len(path) == 3}
    return tuple(name for name in LINEAR_LAYERS if name in held)


# ---------------------------------------------------------------------- models


def model_tensors(config: ModelConfig, params: Any) -> dict[str, Array]:
    """A model's weights by Hugging Face's names, in their own type; a tied embedding is there once.

    Args:
        config: of the model.
        params: the `params` collection, bare or as `{"params": ...}`. LoRA factors are no part of it.

    Raises:
        ModelError: an array is missing, has another shape, or has no place.
    """
    advice = "pass the `params` collection of a Transformer of this config"
    return _export(_collection(params, "params"), _weights(config), "params", advice)


def save_model(folder: str | Path, config: ModelConfig, params: Any, hf_config: Mapping[str, Any]) -> None:
    """Write a model folder that `transformers` and `load_hf` can load.

    Args:
        folder: created if missing.
        config: of the model.
        params: see `model_tensors`.
        hf_config: content of the base model's `config.json`; the type of the weights is set in it.

    Raises:
        ModelError: see `model_tensors`; `hf_config` is another model's; or the folder holds other weights.
        RunFolderError: it cannot be written.
    """
    tensors = model_tensors(config, params)
    heads = hf_config.get("num_attention_heads")
    for name, found, ours in (
        ("vocab_size", hf_config.get("vocab_size"), config.vocab_size),
        ("hidden_size", hf_config.get("hidden_size"), config.hidden_size),
        ("intermediate_size", hf_config.get("intermediate_size"), config.intermediate_size),
        ("num_hidden_layers", hf_config.get("num_hidden_layers"), config.num_layers),
        ("num_attention_heads", heads, config.num_heads),
        ("num_key_value_heads", hf_config.get("num_key_value_heads") or heads, config.num_kv_heads),
        ("head_dim", hf_config.get("head_dim") or config.hidden_size // config.num_heads, config.width_of_head),
        ("tie_word_embeddings", bool(hf_config.get("tie_word_embeddings", False)), config.tie_embeddings),
    ):
        if found != ours:
            raise ModelError(
                f"hf_config: {name}={found!r}, but the model has {ours!r}; pass the config.json of its base model"
            )
    kind = tensors["model.embed_tokens.weight"].dtype.name
    settings = {key: value for key, value in hf_config.items() if key != "torch_dtype"} | {"dtype": kind}
    text = json.dumps(settings, indent=2) + "\n"
    folder = _made(folder)
    others = sorted(path.name for path in folder.glob("*.safetensors") if path.name != MODEL_WEIGHTS)
    if others:
        raise ModelError(f"{folder}: holds {others[0]}, which readers would mix with this model; give an empty folder")
    _write_tensors(folder / MODEL_WEIGHTS, tensors)
    write_atomically(folder / MODEL_CONFIG, text)


# ---------------------------------------------------------------------- both


def _factors(config: ModelConfig, modules: tuple[str, ...]) -> Iterator[_Place]:
    for place in _weights(config):
        if place.path[-1] == "kernel" and place.path[1] in modules:
            (inside, outside), stem = place.shape, f"base_model.model.{place.name.removesuffix('.weight')}"
            yield _Place(f"{stem}.lora_A.weight", (*place.path[:2], "a"), (inside, config.lora_rank))
            yield _Place(f"{stem}.lora_B.weight", (*place.path[:2], "b"), (config.lora_rank, outside))


def _weights(config: ModelConfig) -> Iterator[_Place]:
    hidden, wide, head = config.hidden_size, config.intermediate_size, config.width_of_head
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    attention = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
    attention |= {"o_proj": (queries, hidden)}
    mlp = {"gate_proj": (hidden, wide), "up_proj": (hidden, wide), "down_proj": (wide, hidden)}
    yield _Place("model.embed_tokens.weight", ("embedding",), (config.vocab_size, hidden))
    for index in range(config.num_layers):
        at, ours = f"model.layers.{index}", f"layer_{index}"
        for name, shape in attention.items():
            yield _Place(f"{at}.self_attn.{name}.weight", (f"{ours}_attention", name, "kernel"), shape)
            if config.out_bias if name == "o_proj" else config.qkv_bias:
                yield _Place(f"{at}.self_attn.{name}.bias", (f"{ours}_attention", name, "bias"), shape[1:])
        for name in ("q_norm", "k_norm") if config.qk_norm else ():
            yield _Place(f"{at}.self_attn.{name}.weight", (f"{ours}_attention", name, "scale"), (head,))
        for name, shape in mlp.items():
            yield _Place(f"{at}.mlp.{name}.weight", (f"{ours}_mlp", name, "kernel"), shape)
        yield _Place(f"{at}.input_layernorm.weight", (f"{ours}_attention_norm", "scale"), (hidden,))
        yield _Place(f"{at}.post_attention_layernorm.weight", (f"{ours}_mlp_norm", "scale"), (hidden,))
    yield _Place("model.norm.weight", ("final_norm", "scale"), (hidden,))
    if not config.tie_embeddings:
        yield _Place("lm_head.weight", ("head",), (hidden, config.vocab_size))


def _collection(variables: Any, name: str) -> Any:
    # With other collections beside it nothing is picked: params of a model with LoRA alone are not that model.
    return variables[name] if set(variables) == {name} else variables


def _export(tree: Any, places: Iterator[_Place], what: str, advice: str) -> dict[str, Array]:
    held = flatten_dict(tree)
    tensors: dict[str, Array] = {}
    for place in places:
        value = held.pop(place.path, None)
        if value is None:
            raise ModelError(f"{what}: no {'/'.join(place.path)}; {advice}")
        if value.shape != place.shape:
            raise ModelError(
                f"{what}: {'/'.join(place.path)} has shape {value.shape}, the config says {place.shape}; {advice}"
            )
        # A view would be written in the order of its buffer, which is that of the untransposed matrix.
        array = np.asarray(value)
        tensors[place.name] = np.ascontiguousarray(array.T if place.is_transposed else array)
    if held:
        raise ModelError(f"{what}: {'/'.join(map(str, min(held)))} has no place in a saved file; {advice}")
    if not tensors:
        raise ModelError(f"{what}: holds no arrays; {advice}")
    return tensors


def _made(folder: str | Path) -> Path:
    folder = Path(folder)
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_tensors(path: Path, tensors: dict[str, Array]) -> None:
    """`write_atomically` for tensors, without the whole file in memory."""
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    with explained(path):
        try:
            aside.touch(exist_ok=False)
            mode = aside.stat().st_mode
            save_file(tensors, aside, metadata={"format": "pt"})
            aside.chmod(mode)  # safetensors lets nobody but the owner read, not even a server of another user
            with aside.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(aside, path)
        except SafetensorError as error:
            raise RunFolderError(f"{path}: cannot write: {error}; check the disk or choose another folder") from error
        finally:
            aside.unlink(missing_ok=True)
