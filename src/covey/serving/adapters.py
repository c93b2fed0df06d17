"""Adapters on their way from a trainer to a server: two file formats, one meaning, one hash.

    PEFT               base_model.model.<module>.lora_A.weight [r, in],  lora_B.weight [out, r];  scaling = alpha / r
    mlx-lm-lora        <module>.lora_a [in, r],  lora_b [r, out];  scaling = lora_parameters.scale

Both become `W + scaling * B A` on linear layers. Files are safetensors, which hold numbers and nothing else. An upload
is untrusted: names, shapes, types and values are checked before anything is changed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from covey.errors import AdapterError
from covey.pytorch.engine.merge import EffectiveWeights

_PEFT_PREFIX = "base_model.model."
_UNSUPPORTED = (
    *("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias"),
    *("layer_replication", "target_parameters", "trainable_token_indices", "alora_invocation_tokens"),
    *("use_qalora", "use_bdlora", "megatron_config", "arrow_config", "kasa_config", "velora_config"),
    "monteclora_config",
)
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base weights, which the server has, as they are."""
_LARGEST_RANK = 1024
_LARGEST_HEADER = 8 << 20
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class MalformedConfigError(AdapterError):
    """An adapter's config is JSON that cannot be read: too deep, or with numbers that are too large."""


@dataclass(frozen=True, slots=True)
class Factors:
    """What is added to one linear layer: `scaling * b @ a`, with a `[r, in]` and b `[out, r]` in float32."""

    a: Tensor
    b: Tensor
    scaling: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """LoRA factors by the name of the module in the bare model, such as `model.layers.0.self_attn.q_proj`."""

    factors: Mapping[str, Factors]

    @cached_property
    def sha256(self) -> str:
        """Of names, shapes, scalings and values in float32: equal on both sides if and only if the weights are."""
        digest = hashlib.sha256()
        for name in sorted(self.factors):
            one = self.factors[name]
            digest.update(f"{name} {tuple(one.a.shape)} {tuple(one.b.shape)} {one.scaling!r}\n".encode())
            for part in (one.a, one.b):
                digest.update(part.detach().float().cpu().contiguous().numpy().astype("<f4").tobytes())
        return digest.hexdigest()


class AdaptedWeights(EffectiveWeights):
    """A bare model's weights with an adapter's added, for `Engine.load`. The model is not changed."""

    def __init__(self, model: nn.Module, adapter: Adapter) -> None:
        super().__init__(model)
        self._adapter = adapter

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        """The weight `name`, `W + scaling * B A` where the adapter changes it."""
        weight = super().__getitem__(name)
        factors = self._adapter.factors.get(name.removesuffix(".weight"))
        if factors is None or not name.endswith(".weight"):
            return weight
        a, b = factors.a.to(weight.device), factors.b.to(weight.device)
        return torch.addmm(weight.float(), b, a, alpha=factors.scaling)

    def frozen_version(self, name: str) -> tuple[int, int] | None:
        """None for what the adapter changes."""
        return None if name.removesuffix(".weight") in self._adapter.factors else super().frozen_version(name)


def adapter_of(model: nn.Module) -> Adapter:
    """The adapter of a PEFT model, as a server must have it afterwards.

    Raises:
        AdapterError: the model has no adapter, or one that is more than plain LoRA.
    """
    weights, config = write_adapter(model)
    return read_adapter(weights, config, None)


def write_adapter(model: nn.Module) -> tuple[bytes, dict[str, Any]]:
    """A model's adapter as the two parts of an upload: safetensors, and PEFT's config.

    Raises:
        AdapterError: the model has no adapter.
    """
    if not isinstance(model, PeftModel):
        raise AdapterError("the model has no LoRA adapter to upload; set model.use_peft to true")
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    settings = json.loads(json.dumps(model.active_peft_config.to_dict(), default=_plain))
    return save_tensors(tensors), settings


def read_adapter(weights: bytes, config: Mapping[str, Any], model: nn.Module | None) -> Adapter:
    """Read and check an upload.

    Args:
        weights: a safetensors file.
        config: PEFT's `adapter_config.json`, or mlx-lm-lora's.
        model: the bare model that it is for; None = it is not compared with one.

    Raises:
        AdapterError: it says which tensor, what is wrong with it, and what was expected.
    """
    try:
        _check_header(weights)
        tensors = load_tensors(weights)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RecursionError, RuntimeError) as error:
        if isinstance(error, AdapterError):
            raise
        raise AdapterError(f"adapter_weights is not a safetensors file: {error!s:.300}") from error
    if not isinstance(config, Mapping):
        raise AdapterError("adapter_config is not a JSON object")
    try:
        pairs = _peft_pairs(tensors, config) if "peft_type" in config else _mlx_pairs(tensors, config)
    except (OverflowError, RecursionError) as error:
        raise MalformedConfigError(f"adapter_config cannot be read: {error}") from error
    if not pairs:
        raise AdapterError("adapter_weights holds no LoRA tensors")
    for name, factors in pairs.items():
        _check(name, factors)
    if model is not None:
        _check_against(pairs, model)
    return Adapter(pairs)


def example_layer(model: nn.Module) -> dict[str, Any] | None:
    """The first layer that an adapter may be for: `module` (its name), `out` and `in` (its widths); None = none."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and isinstance(layer.weight, Tensor):
            return {"module": name, "out": layer.weight.shape[0], "in": layer.weight.shape[1]}
    return None


def read_config(text: bytes | str) -> Any:
    """The JSON of an upload's config.

    Raises:
        AdapterError: it is not JSON, or names a setting twice.
        MalformedConfigError: it is nested too deeply, or has a number that is too large.
    """
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _distinct("adapter_config", pairs))
    except AdapterError:
        raise
    except (RecursionError, OverflowError) as error:
        raise MalformedConfigError(f"adapter_config cannot be read: {error}") from error
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            raise AdapterError(f"adapter_config is not JSON: {error}") from error
        raise MalformedConfigError(f"adapter_config cannot be read: {error}") from error  # a number of 5,000 digits


def _distinct(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise AdapterError(f"{where} has {twice!r:.200} twice; which one is meant?")
    return found


def _check_header(weights: bytes) -> None:
    """What the safetensors library does not look at: a name that comes twice, and a header without a bound."""
    size = int.from_bytes(weights[:8], "little")
    if len(weights) < 8 or size > min(_LARGEST_HEADER, len(weights) - 8):
        raise ValueError(f"its header would have {size} bytes")
    json.loads(weights[8 : 8 + size], object_pairs_hook=lambda pairs: _distinct("adapter_weights", pairs))


def _peft_pairs(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Factors]:
    if str(config["peft_type"]).rsplit(".", 1)[-1].upper() != "LORA":
        raise AdapterError(f"adapter_config has peft_type={config['peft_type']!r:.80}; it must be LORA")
    for name in _UNSUPPORTED:
        if config.get(name):
            raise AdapterError(f"adapter_config has {name}={config[name]!r:.80}; only plain LoRA can be served")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"adapter_config has bias={config['bias']!r:.80}; only plain LoRA can be served")
    start = config.get("init_lora_weights")
    if isinstance(start, list | dict) or start not in _PLAIN_STARTS:
        raise AdapterError(
            f"adapter_config has init_lora_weights={start!r:.80}, which changes the base weights; save plain LoRA"
        )
    rank, alpha = _number(config, "r"), _number(config, "lora_alpha")
    return _pairs(tensors, ".lora_A.weight", ".lora_B.weight", _PEFT_PREFIX, alpha / rank, rank, transposed=False)


def _mlx_pairs(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Factors]:
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, Mapping) or config.get("fine_tune_type", "lora") != "lora":
        raise AdapterError("adapter_config is neither PEFT's (peft_type) nor mlx-lm-lora's (lora_parameters)")
    rank, scale = _number(parameters, "rank"), _number(parameters, "scale")
    return _pairs(tensors, ".lora_a", ".lora_b", "", scale, rank, transposed=True)


def _pairs(
    tensors: Mapping[str, Tensor], a: str, b: str, prefix: str, scaling: float, rank: float, *, transposed: bool
) -> dict[str, Factors]:
    names = {name[: -len(end)] for name in tensors for end in (a, b) if name.endswith(end)}
    others = [name for name in tensors if not name.endswith((a, b))]
    if others:
        raise AdapterError(f"adapter_weights has {others[0]!r:.200}, which is no LoRA tensor (*{a}, *{b})")
    pairs = {}
    for name in sorted(names):
        for end in (a, b):
            if name + end not in tensors:
                raise AdapterError(f"adapter_weights has one half of {name!r:.200} and not {(name + end)[-200:]!r}")
        first, second = tensors[name + a], tensors[name + b]
        for end, part in ((a, first), (b, second)):
            if part.dim() != 2 or part.dtype not in _FLOATS or part.numel() == 0:
                what = f"{part.dtype} {tuple(part.shape)}"
                raise AdapterError(f"{name:.200}{end}: {what}; it must be a matrix of floats of 16, 32 or 64 bits")
        if transposed:
            first, second = first.T, second.T
        if first.shape[0] != rank or second.shape[1] != rank:
            shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
            raise AdapterError(f"{name:.200}: shapes {shapes} are not of the rank {rank:g} that adapter_config gives")
        module = name.removeprefix(prefix)
        if module in pairs:
            raise AdapterError(f"adapter_weights has the module {module!r:.200} twice, with and without {prefix!r}")
        pairs[module] = Factors(first.float().contiguous(), second.float().contiguous(), float(scaling))
    return pairs


def _check(name: str, factors: Factors) -> None:
    for half, part in (("A", factors.a), ("B", factors.b)):
        if not torch.isfinite(part).all():
            raise AdapterError(f"{name:.200}: its matrix {half} has values that are not finite numbers")


def _check_against(pairs: Mapping[str, Factors], model: nn.Module) -> None:
    modules = dict(model.named_modules())
    for name, factors in pairs.items():
        layer = modules.get(name)
        weight = getattr(layer, "weight", None)
        if not isinstance(layer, nn.Linear) or not isinstance(weight, Tensor):
            raise AdapterError(f"{name:.200}: this model has no linear layer of that name")
        expected = (weight.shape[0], weight.shape[1])
        found = (factors.b.shape[0], factors.a.shape[1])
        if found != expected:
            raise AdapterError(f"{name}: the adapter is for a layer of {found}, the model's is {expected} (out, in)")


def _number(config: Mapping[str, Any], name: str) -> float:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise AdapterError(f"adapter_config has {name}={value!r:.80}; it must be a number above 0")
    if name in ("r", "rank") and (value != int(value) or value > _LARGEST_RANK):
        raise AdapterError(f"adapter_config has {name}={value!r:.80}; it must be a whole number up to {_LARGEST_RANK}")
    return value


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
