"""Dropout: off everywhere but in adapters, whose own is switched on while training alone."""

from __future__ import annotations

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def dropout_obstacle(model: nn.Module) -> str | None:
    """Why the adapters' dropout forbids to share tokens, if there is any."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and ".lora_dropout." in name and module.p > 0:
            return f"lora_dropout={module.p} draws a mask for each token of each sequence; set it to 0 to share tokens"
    return None


def switch_dropout_off(model: nn.Module) -> None:
    """Set every dropout but LoRA's to 0, since checkpointed layers run in training mode."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and ".lora_dropout." not in name:
            module.p = 0.0
        elif isinstance(module, GradientCheckpointingLayer):
            for attribute in (
                "dropout",
                "hidden_dropout",
                "activation_dropout",
                "attention_dropout",
                "resid_dropout",
            ):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, 0.0)
