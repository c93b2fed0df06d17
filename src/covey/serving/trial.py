"""An adapter is tried before it is served: a few tokens through the model, each adapted layer merged as it is needed.

What is checked cannot be seen in the factors alone: that the merged weights are numbers of the model's dtype, and that
nothing overflows when they are used. A norm of activations beyond 1.8e19 takes the inverse of an infinite square and
answers zero: the log-probabilities would be finite, and those of no model. So the squares of what each layer puts out
must be finite too. The model is only read; one layer's merged weight exists at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from covey.adapters import Adapter
from covey.errors import AdapterError
from covey.pytorch.engine.merge import AdaptedWeights

_TOKENS = 16
"""Spread over the vocabulary."""


@torch.inference_mode()
def try_adapter(model: Any, adapter: Adapter) -> None:
    """Run `model` with an adapter once.

    Raises:
        AdapterError: a merged weight, what a layer puts out or a logit overflows.
    """
    weights = AdaptedWeights(model, adapter)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    tried: set[str] = set()

    def merged(name: str) -> Tensor:
        tried.add(name)
        dtype = layers[name].weight.dtype
        try:
            weight = weights[f"{name}.weight"].to(dtype)
        except RuntimeError as error:  # the scaling is no float32 number
            raise AdapterError(f"{name}: the adapter cannot be merged ({error}); lower its scaling") from error
        if not weight.isfinite().all():
            raise AdapterError(
                f"{name}: with the adapter its weights are beyond what {_short(dtype)} holds; lower its scaling or its "
                "values"
            )
        return weight

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
        def hook(layer: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
            if name in adapter.factors:
                out = functional.linear(inputs[0], merged(name), layers[name].bias)
            if not out.float().square().sum(-1).isfinite().all():
                raise AdapterError(
                    f"{name}: with the adapter it puts out values up to {float(out.abs().max()):.1e}, which overflow "
                    "in use; lower its scaling or its values"
                )
            return out

        return hook

    hooks = [layer.register_forward_hook(watch(name)) for name, layer in layers.items()]
    try:
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        ids = torch.linspace(0, vocabulary - 1, _TOKENS).long()[None]
        logits = model(input_ids=ids.to(next(model.parameters()).device), use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    for name in adapter.factors.keys() - tried:  # layers that these tokens did not reach
        merged(name)
    if not logits.isfinite().all():
        raise AdapterError("with the adapter the model's logits are not finite; lower its scaling or its values")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
