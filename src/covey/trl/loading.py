"""What a trainer is given, before anything is made of it: the model and its tokenizer, callbacks, an optimiser."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TorchAoConfig

from covey.errors import ConfigError
from covey.pytorch.models.loading import PACKAGE_PREFIX, locate
from covey.trl.arguments import GRPOConfig
from covey.trl.translate import as_mapping

log = logging.getLogger("covey.trl")


def place_model(
    args: GRPOConfig, model: Any, tokenizer: Any, *, lora: bool, quantization_config: Any = None
) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Load what Covey's own loading does not serve; else say what it shall load.

    Raises:
        ConfigError: weights are to be quantised that cannot be, or shall be trained themselves; or a GGUF file is to be
            loaded with options that only transformers' own formats have.
    """
    options = dict(as_mapping("model_init_kwargs", args.model_init_kwargs))
    how = options.pop("quantization_config", None) if quantization_config is None else quantization_config
    if isinstance(model, nn.Module):
        if how is not None:
            raise ConfigError(
                "quantization_config: the model is loaded already; load it with that, or pass the model's name"
            )
        if options:
            warnings.warn("model_init_kwargs have no effect: the model is loaded already", UserWarning, stacklevel=3)
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(model_source(model))
        return (model, tokenizer), {"dtype": "auto"}
    dtype = str(options.pop("dtype", options.pop("torch_dtype", None)) or "float32").removeprefix("torch.")
    if dtype in ("bfloat16", "float16") and not lora:
        log.warning("model_init_kwargs: dtype %s: weights that are trained are kept in float32, see bf16", dtype)
        dtype = "float32"
    for name in ("device_map", "trust_remote_code", "attn_implementation", "use_cache"):
        options.pop(name, None)  # placed by the trainer; attention is Covey's own, chosen by a probe
    if options.get("revision") == "main":
        del options["revision"]
    quantised = {} if how is None else _quantization(how, lora=lora)
    if how is not None and not quantised:
        options["quantization_config"] = how
    if not options:
        return (None, tokenizer), {"model": str(model), "dtype": dtype, **quantised}
    if str(model).startswith(PACKAGE_PREFIX) or str(model).endswith(".gguf"):
        given = ", ".join(sorted(options))
        raise ConfigError(
            f"{given}: {model} is a GGUF file, which Covey loads by itself, without these options of transformers; "
            "take them out, or name a folder or hub id. Plain 8-bit and nf4 quantisation serve"
        )
    locate(str(model))
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, trust_remote_code=args.trust_remote_code, **options
    )
    revision = {name: options[name] for name in ("revision", "cache_dir", "token") if name in options}
    return (loaded, tokenizer or AutoTokenizer.from_pretrained(model, **revision)), {"dtype": "auto", **quantised}


def _quantization(config: Any, *, lora: bool) -> dict[str, Any]:
    """`quantization_config` as Covey's setting; nothing where it asks for more, and transformers is to load with it."""
    if isinstance(config, Mapping):
        given = {name: value for name, value in config.items() if name != "quant_method"}
        config = BitsAndBytesConfig(**given)  # type: ignore[no-untyped-call]
    if not isinstance(config, BitsAndBytesConfig | TorchAoConfig):
        raise ConfigError(
            f"quantization_config={config!r:.200}: a {type(config).__name__}; adapters are trained on models quantised "
            "by bitsandbytes (BitsAndBytesConfig) or torchao (TorchAoConfig)"
        )
    if not lora:
        raise ConfigError("quantization_config: quantised weights cannot be trained themselves; pass peft_config")
    if isinstance(config, TorchAoConfig) or config.llm_int8_skip_modules:
        return {}
    if config.load_in_8bit:
        return {"quantization": "int8"}
    return {"quantization": "nf4"} if config.load_in_4bit and config.bnb_4bit_quant_type == "nf4" else {}


def model_source(model: Any) -> str:
    """Where a loaded model came from."""
    config = getattr(model, "config", None)
    found = getattr(config, "_name_or_path", "") or getattr(model, "name_or_path", "")
    if not found:
        raise ConfigError("processing_class=None: the model does not say where it came from; pass its tokenizer")
    return str(found)


def model_name(model: Any) -> str:
    """The last part of a model's name."""
    source = str(model) if isinstance(model, str | Path) else model_source(model)
    return source.rstrip("/").split("/")[-1]
