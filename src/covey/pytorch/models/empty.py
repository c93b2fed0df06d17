"""A model without weights, from its configuration alone: shapes and types, on torch's device "meta"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from covey.errors import ModelError
from covey.pytorch.models.loading import gguf_read_once, locate, quiet, refuse_senses
from covey.pytorch.models.lora import attach_lora


def empty_model(
    source: str,
    *,
    dtype: str,
    trust_remote_code: bool = False,
    use_peft: bool = True,
    adapter: str | None = None,
    **lora: Any,
) -> nn.Module:
    """The model that `Policy.load` would train, without memory for its parameters; of its files only the configuration
    is read.

    Raises:
        ModelError: there is no such configuration, or no such model can be built.
    """
    folder, gguf_file = locate(source)
    if adapter is not None and not (Path(adapter) / "adapter_config.json").is_file():
        raise ModelError(f"{adapter}: holds no adapter_config.json; give the folder of a saved PEFT adapter")
    try:
        with quiet():
            config = _config(folder, gguf_file, trust_remote_code)
            refuse_senses(config.to_dict(), source)
            return with_adapter(build_empty(config, dtype), use_peft=use_peft, adapter=adapter, **lora)
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = (str(error).strip().splitlines() or [""])[0][:300]
        raise ModelError(
            f"{source}: its configuration cannot be read ({type(error).__name__}: {said}); check the name and the "
            "network, or give a local folder"
        ) from error


def build_empty(config: Any, dtype: str) -> nn.Module:
    """The model of a transformers configuration."""
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"), no_init_weights():
        model: nn.Module = auto.from_config(config, dtype=getattr(torch, dtype))
    model.tie_weights()  # type: ignore[operator]
    return model


def with_adapter(model: nn.Module, *, use_peft: bool = True, adapter: str | None = None, **lora: Any) -> nn.Module:
    """The same with what is trained: all weights, or an adapter."""
    if not use_peft:
        return model
    with torch.device("meta"):
        adapted: nn.Module = attach_lora(
            model, **({"config": PeftConfig.from_pretrained(adapter)} if adapter else lora)
        )
    return adapted


def _config(folder: str, gguf_file: str | None, trust_remote_code: bool) -> Any:
    if gguf_file is None:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with gguf_read_once():
        return AutoConfig.from_pretrained(folder, gguf_file=gguf_file)
