"""Models of more than text are refused by name: what pictures, films and sounds they are given would be ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import ProcessorMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from covey.errors import ModelError

_SENSES = ("vision_config", "audio_config", "thinker_config", "vq_config")


def refuse_senses(config: Mapping[str, Any], source: str) -> None:
    """Raise `ModelError` for the configuration of a model of pictures or sound.

    Those pass that transformers loads for text alone, except Mllama, whose text attends to pictures.
    """
    kind, senses = str(config.get("model_type")), {name for name in _SENSES if config.get(name)}
    by_itself = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or "AutoModelForCausalLM" in (config.get("auto_map") or ())
    if senses and (kind == "mllama" or not by_itself):
        what = "an audio" if senses == {"audio_config"} else "a vision"
        raise ModelError(
            f"{source}: {what} model ({(config.get('architectures') or [kind])[0]}); none of these is loaded here yet, "
            "for text neither; use a language model"
        )


def require_tokenizer(tokenizer: Any, name: str) -> None:
    """Raise `ModelError` for a processor, which holds a tokenizer and is none; `name` is the argument's."""
    if isinstance(tokenizer, ProcessorMixin):
        raise ModelError(
            f"{name}={type(tokenizer).__name__}: a processor of pictures or sound, which no model takes in here; pass "
            "processor.tokenizer"
        )
