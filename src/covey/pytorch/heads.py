"""Finds the parts of a causal LM: the causal LM inside a PEFT wrapper, its transformer, its output head."""

from __future__ import annotations

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from covey.errors import ModelError
from covey.pytorch.logprobs import Head


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model, with adapters inside its layers if `model` is a `PeftModel`."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(inner, PreTrainedModel):
        raise ModelError(
            f"{type(inner).__name__}: is no transformers model; give a causal language model built with transformers"
        )
    return inner


def transformer(model: PreTrainedModel) -> nn.Module:
    """The model without its output head, which returns hidden states."""
    inner = model.base_model
    if inner is model:
        raise ModelError(f"{type(model).__name__}: has no separate transformer under its output head; use a causal LM")
    return inner


def output_head(model: PreTrainedModel) -> Head:
    """The output head with the model's own factors on the logits.

    `final_logit_softcapping` (Gemma 2), `logit_scale` (Cohere, a factor) and `logits_scaling` (Granite, a
    divisor) are known; `Policy` checks the result against the model's own logits.
    """
    module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if module is None:
        raise ModelError(f"{type(model).__name__}: has no output head; use a causal language model")
    config = model.config.get_text_config()
    scale = 1.0
    if getattr(config, "logit_scale", None) is not None:
        scale *= float(config.logit_scale)
    if getattr(config, "logits_scaling", None) is not None:
        scale /= float(config.logits_scaling)
    softcap = getattr(config, "final_logit_softcapping", None)
    if type(module) is nn.Linear:
        return Head(module.weight, module.bias, scale, softcap, module)
    return Head(None, None, scale, softcap, module)
