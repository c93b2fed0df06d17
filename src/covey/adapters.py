"""Adapter files: read, checked and written here, for PyTorch, JAX and the server. Two formats, one meaning, one hash.

    PEFT               base_model.model.<module>.lora_A.weight [r, in],  lora_B.weight [out, r];  scaling = alpha / r
    mlx-lm-lora        <module>.lora_a [in, r],  lora_b [r, out];  scaling = lora_parameters.scale

Both become `W + scaling * B A` on linear layers. Files are safetensors, which hold numbers and nothing else (a pickled
adapter would run code). They are untrusted: names, shapes, types and values are checked before anything is changed.
Arrays are NumPy's, with the bfloat16 of `ml_dtypes`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save, save_file

from covey.errors import AdapterError, ModelError, RunFolderError
from covey.files import explained, write_atomically, writing

Array = np.ndarray[Any, Any]

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MLX_WEIGHTS_FILE = "adapters.safetensors"
PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the name that a module has in the bare model."""

_VARIANTS = {
    "use_dora": "a magnitude is trained beside the factors",
    "use_rslora": "its factors are scaled by alpha / sqrt(r)",
    "rank_pattern": "its factors have several ranks",
    "alpha_pattern": "its factors have several scales",
    "modules_to_save": "whole layers are trained beside the factors",
    "fan_in_fan_out": "its layers are stored the other way round",
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
    "velora_config": "it is not plain LoRA",
    "monteclora_config": "it is not plain LoRA",
}
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base weights as they are; PiSSA, OLoRA, LoftQ and others move them."""
_LARGEST_RANK, _LARGEST_HEADER = 1024, 8 << 20
_SAME = "use the model and adapter settings that it was saved with"
_FLOATS = (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)
_TYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": ml_dtypes.bfloat16, "BOOL": "?"} | {
    f"{kind}{8 * size}": f"{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)
}
"""NumPy's types by the names of safetensors."""
_LAYER = re.compile(r"(?:.+\.)?layers\.\d+\.(.+)")
_PEFT = (".lora_A.weight", ".lora_B.weight", PEFT_PREFIX, False)
_MLX = (".lora_a", ".lora_b", "", True)
"""How a file ends and begins the names of a pair's halves, and whether it keeps them `[in, r]` and `[r, out]`."""


class MalformedConfigError(AdapterError):
    """An adapter's config is JSON that cannot be read: too deep, or with numbers that are too large."""


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """What is added to one linear layer: `scaling * b @ a`, with a `[r, in]` and b `[out, r]` in float32."""

    a: Array
    b: Array
    scaling: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter, of any kind, as its files hold it."""

    tensors: Mapping[str, Array]
    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.config, Mapping):
            raise AdapterError("adapter_config is not a JSON object")

    @cached_property
    def factors(self) -> Mapping[str, Factors]:
        """What plain LoRA adds, by the name of the module in the bare model: `model.layers.0.self_attn.q_proj`.

        Raises `AdapterError`: the adapter is more than plain LoRA, or damaged; it says which tensor or setting, what is
        wrong with it, and what was expected.
        """
        try:
            pairs = self._pairs(*self._scaling())
        except (OverflowError, RecursionError) as error:
            raise MalformedConfigError(f"adapter_config cannot be read: {error}") from error
        if not pairs:
            raise AdapterError("adapter_weights holds no LoRA tensors")
        for name, pair in pairs.items():
            for half, part in (("A", pair.a), ("B", pair.b)):
                if not np.isfinite(part).all():
                    raise AdapterError(f"{name:.200}: its matrix {half} has values that are not finite numbers")
        return pairs

    @cached_property
    def sha256(self) -> str:
        """Of names, shapes, scalings and values in float32: equal on both sides if and only if the weights are.

        Raises `AdapterError`: see `factors`.
        """
        pairs = sorted(self.factors.items())
        return fingerprint(
            (f"{name} {one.a.shape} {one.b.shape} {one.scaling!r}", (one.a, one.b)) for name, one in pairs
        )

    def check(self, layers: Mapping[str, tuple[int, int]]) -> None:
        """Compare with a model.

        Raises `AdapterError`: a pair of factors has no layer there, or one of another shape.
        """
        first, second, prefix, transposed = self._format
        for name, a in sorted(self.tensors.items()):
            stem = name.removesuffix(first)
            b = self.tensors.get(stem + second)
            if stem == name or b is None or a.ndim != 2 or b.ndim != 2:
                continue
            module = stem.removeprefix(prefix)
            found = (b.shape[1], a.shape[0]) if transposed else (b.shape[0], a.shape[1])
            if module not in layers:
                raise AdapterError(f"{module:.200}: this model has no linear layer of that name")
            if found != (own := layers[module]):
                raise AdapterError(f"{module}: the adapter is for a layer of {found}, the model's is {own} (out, in)")

    def to_bytes(self) -> bytes:
        """The tensors as a safetensors file."""
        return save(dict(self.tensors))

    def write(self, folder: str | Path) -> None:
        """Write config and tensors into a folder, which is made if missing; each file appears whole or not at all.

        Raises `RunFolderError`: it cannot be written.
        """
        folder = Path(folder)
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / (WEIGHTS_FILE if self._format is _PEFT else MLX_WEIGHTS_FILE), self.tensors)
        write_atomically(folder / CONFIG_FILE, json.dumps(dict(self.config), indent=2) + "\n")

    def as_mlx(self, base_model: str) -> Adapter:
        """The same adapter as mlx-lm reads it.

        Raises `AdapterError`: see `factors`; or it changes something else than the decoder's layers.
        """
        pairs, keys = self.factors, set()
        for module in pairs:
            if (inside := _LAYER.match(module)) is None:
                raise AdapterError(f"{module}: lies in no decoder layer, and mlx-lm adapts nothing else")
            keys.add(inside[1])
        tensors = {f"{name}.lora_a": np.ascontiguousarray(one.a.T) for name, one in pairs.items()}
        tensors |= {f"{name}.lora_b": np.ascontiguousarray(one.b.T) for name, one in pairs.items()}
        first = next(iter(pairs.values()))
        parameters = {"rank": first.a.shape[0], "scale": first.scaling, "dropout": 0.0, "keys": sorted(keys)}
        told = {
            "model": base_model,
            "fine_tune_type": "lora",
            "num_layers": -1,
            "lora_parameters": parameters,
        }  # -1: all
        return Adapter(tensors, told)

    @property
    def _format(self) -> tuple[str, str, str, bool]:
        return _PEFT if "peft_type" in self.config else _MLX

    def _scaling(self) -> tuple[int, float]:
        """Rank of all factors, and what their product is scaled by."""
        if self._format is _PEFT:
            rank, alpha = plain_lora(self.config)
            return rank, alpha / rank
        parameters = self.config.get("lora_parameters")
        if not isinstance(parameters, Mapping) or self.config.get("fine_tune_type", "lora") != "lora":
            raise AdapterError("adapter_config is neither PEFT's (peft_type) nor mlx-lm-lora's (lora_parameters)")
        return int(_number(parameters, "rank")), float(_number(parameters, "scale"))

    def _pairs(self, rank: int, scaling: float) -> dict[str, Factors]:
        a, b, prefix, transposed = self._format
        others = [name for name in self.tensors if not name.endswith((a, b))]
        if others:
            raise AdapterError(f"adapter_weights has {others[0]!r:.200}, which is not a LoRA tensor (*{a}, *{b})")
        pairs: dict[str, Factors] = {}
        for name in sorted({name.removesuffix(a).removesuffix(b) for name in self.tensors}):
            halves = []
            for end in (a, b):
                if (part := self.tensors.get(name + end)) is None:
                    raise AdapterError(f"adapter_weights has one half of {name!r:.200} and not {(name + end)[-200:]!r}")
                if part.ndim != 2 or part.dtype not in _FLOATS or part.size == 0:
                    what = f"{part.dtype} {part.shape}; it must be a matrix of floats of 16, 32 or 64 bits"
                    raise AdapterError(f"{name:.200}{end}: {what}")
                with np.errstate(over="ignore"):  # what is infinite then is refused by name
                    halves.append(np.ascontiguousarray(part.T if transposed else part, np.float32))
            first, second = halves
            if first.shape[0] != rank or second.shape[1] != rank:
                shapes = f"{first.shape} and {second.shape}"
                raise AdapterError(f"{name:.200}: shapes {shapes} are not of the rank {rank} that adapter_config gives")
            module = name.removeprefix(prefix)
            if module in pairs:
                raise AdapterError(f"adapter_weights has the module {module!r:.200} twice, with and without {prefix!r}")
            pairs[module] = Factors(first, second, scaling)
        return pairs


def read_adapter(
    weights: bytes, config: Mapping[str, Any], layers: Mapping[str, tuple[int, int]] | None = None
) -> Adapter:
    """Read and check an upload.

    Raises `AdapterError`: see `Adapter.factors` and `Adapter.check`, or `weights` is no safetensors file.
    """
    adapter = Adapter(read_tensors(weights), config)
    _ = adapter.factors  # read, and so checked, now
    if layers is not None:
        adapter.check(layers)
    return adapter


def read_adapter_folder(folder: str | Path) -> Adapter:
    """Read a PEFT adapter of any kind; its tensors are not compared with its config.

    Raises `ModelError`: no such files, or damaged ones.
    """
    folder = Path(folder)
    for file, fix in (
        (CONFIG_FILE, "; give the folder of a saved PEFT adapter"),
        (WEIGHTS_FILE, " (pickled .bin adapters are not read); save it with safetensors"),
    ):
        if not (folder / file).is_file():
            raise ModelError(f"{folder}: holds no {file}{fix}")
    try:
        unread = Adapter({}, read_config((folder / CONFIG_FILE).read_bytes()))  # the config is looked at first
        return replace(unread, tensors=read_tensors((folder / WEIGHTS_FILE).read_bytes()))
    except (OSError, AdapterError) as error:
        raise ModelError(f"{folder}: the adapter is damaged ({error}); save or fetch it again") from error


def plain_lora(config: Mapping[str, Any]) -> tuple[int, float]:
    """Rank and alpha of a PEFT config that asks for plain LoRA.

    Raises `AdapterError`: it asks for more, or its numbers are no numbers above 0.
    """
    if str(config.get("peft_type")).rsplit(".", 1)[-1].upper() != "LORA":
        raise AdapterError(f"adapter_config has peft_type={config.get('peft_type')!r:.80}; it must be LORA")
    start = config.get("init_lora_weights")
    more = {name: reason for name, reason in _VARIANTS.items() if config.get(name)}
    if config.get("bias", "none") != "none":
        more["bias"] = "biases are trained beside the factors"
    if isinstance(start, list | dict) or start not in _PLAIN_STARTS:
        more["init_lora_weights"] = "the base weights are changed with it"
    for name, reason in more.items():
        raise AdapterError(f"adapter_config has {name}={config[name]!r:.80}: {reason}; only plain LoRA is taken here")
    return int(_number(config, "r")), float(_number(config, "lora_alpha"))


def read_config(text: bytes | str) -> Any:
    """The JSON of an adapter's config.

    Raises `AdapterError`: it is not JSON, or names a setting twice; `MalformedConfigError`: it is nested too deeply, or
    has a number that is too large.
    """
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _distinct("adapter_config", pairs))
    except AdapterError:
        raise
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise AdapterError(f"adapter_config is not JSON: {error}") from error
    except (RecursionError, OverflowError, ValueError) as error:  # ValueError: a number of 5,000 digits
        raise MalformedConfigError(f"adapter_config cannot be read: {error}") from error


def read_tensors(file: bytes) -> dict[str, Array]:
    """The arrays of a safetensors file. Raises `AdapterError`: it is none, or not a sound one."""
    try:
        _check_header(file)
        return {
            name: np.frombuffer(held["data"], np.dtype(_TYPES[held["dtype"]])).reshape(held["shape"])
            for name, held in deserialize(file)  # type: ignore[no-untyped-call]
        }
    except AdapterError:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RecursionError, RuntimeError) as error:
        raise AdapterError(f"adapter_weights is not a safetensors file: {error!s:.300}") from error


def write_tensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write a safetensors file whole or not at all, without the whole file in memory.

    Raises `RunFolderError`: it cannot be written; what was there before still is.
    """
    with writing(path) as aside:
        aside.touch(exist_ok=False)
        mode = aside.stat().st_mode
        try:
            save_file(dict(tensors), aside, metadata={"format": "pt"})
        except SafetensorError as error:
            raise RunFolderError(f"{path}: cannot write: {error}; check the disk or choose another folder") from error
        aside.chmod(mode)  # safetensors lets nobody but the owner read, not even a server of another user


def check_fits(own: Mapping[str, Sequence[int]], saved: Mapping[str, Any], what: str, fix: str = _SAME) -> None:
    """Compare arrays with the shapes that a model has under their names.

    Raises `ModelError`: names or shapes differ.
    """
    missing, unexpected = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if missing or unexpected:
        which = f"lacks {missing[0]}" if missing else f"has {unexpected[0]}"
        counts = f"{len(missing)} tensors missing, {len(unexpected)} unexpected"
        raise ModelError(f"{what}: belongs to another model (it {which}; {counts}); {fix}")
    for name, shape in own.items():
        if tuple(shape) != tuple(saved[name].shape):
            raise ModelError(f"{what}: {name} is {list(saved[name].shape)}, the model's is {list(shape)}; {fix}")


def fingerprint(entries: Iterable[tuple[str, Sequence[Any]]]) -> str:
    """SHA-256 of lines of text, each with the values of some arrays in float32."""
    digest = hashlib.sha256()
    for line, arrays in entries:
        digest.update(f"{line}\n".encode())
        for array in arrays:
            digest.update(np.ascontiguousarray(array, "<f4").tobytes())
    return digest.hexdigest()


def _distinct(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise AdapterError(f"{where} has {twice!r:.200} twice; which one is meant?")
    return found


def _check_header(file: bytes) -> None:
    """What the safetensors library does not look at: a name that comes twice, and a header without a bound."""
    size = int.from_bytes(file[:8], "little")
    if len(file) < 8 or size > min(_LARGEST_HEADER, len(file) - 8):
        raise ValueError(f"its header would have {size} bytes")
    json.loads(file[8 : 8 + size], object_pairs_hook=lambda pairs: _distinct("adapter_weights", pairs))


def _number(config: Mapping[str, Any], name: str) -> float:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise AdapterError(f"adapter_config has {name}={value!r:.80}; it must be a number above 0")
    if name in ("r", "rank") and (value != int(value) or value > _LARGEST_RANK):
        raise AdapterError(f"adapter_config has {name}={value!r:.80}; it must be a whole number up to {_LARGEST_RANK}")
    return value
