"""A model's output head: hidden states -> logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.errors import ModelError
from covey.pytorch.products import linear


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which logits are computed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    """`x` in that precision."""
    return x.to(wide_dtype(x.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """How a model turns a hidden state into logits: `softcap * tanh(scale * (h W' + b) / softcap)`."""

    weight: Tensor | None  # [V, d], or None where only the module can be called (LoRA on the head, unusual heads)
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None
    module: nn.Module | None = None  # the head itself

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        """The output head of a causal LM with the model's own factors on the logits: `final_logit_softcapping` (Gemma
        2), `logit_scale` (Cohere, a factor) and `logits_scaling` (Granite, a divisor); `Policy` compares the result
        with the model's own logits.
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
            return cls(module.weight, module.bias, scale, softcap, module)
        return cls(None, None, scale, softcap, module)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[S, d]` -> `[S, V]` in float32 or wider, by plain autograd operations."""
        if self.weight is None:
            assert self.module is not None
            raw = wide(self.module(hidden)) * self.scale
        else:
            raw = linear(wide(hidden), wide(self.weight)) * self.scale
            if self.bias is not None:
                raw = raw + wide(self.bias) * self.scale
        return raw if self.softcap is None else torch.tanh(raw / self.softcap) * self.softcap

    def frozen(self) -> Head:
        """The same head on its present weights, detached: a later exchange of data does not reach it."""
        weight = None if self.weight is None else self.weight.detach()
        bias = None if self.bias is None else self.bias.detach()
        return Head(weight, bias, self.scale, self.softcap, self.module)
