"""Uploads of adapters: the parts that they come in, who may upload, and a trial before they are served.

One trainer at a time may upload: two would train on each other's weights. Who uploads without a name (a check, a client
that knows no names) is let in as long as no named trainer holds the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from starlette.datastructures import FormData, UploadFile
from torch import Tensor, nn
from torch.nn import functional

from covey.adapters import Adapter
from covey.errors import AdapterError, CoveyError
from covey.pytorch.engine.merge import AdaptedWeights

_LONGEST_FIELD = 1 << 20
"""Of all parts but the first that is known, in bytes."""


def read_parts(form: FormData, known: Sequence[str]) -> dict[str, bytes]:
    """The parts of a form by their names, each of which may come once; files are read from the disk.

    Raises `AdapterError`: it is no form, or has another part or one twice.
    """
    found: dict[str, bytes] = {}
    for name, value in form.multi_items():
        if name not in known or name in found:
            raise AdapterError(
                f"the part {name!r:.80} is unknown, or comes twice; send each of {', '.join(known)} once"
            )
        if name != known[0] and isinstance(value, UploadFile) and (value.size or 0) > _LONGEST_FIELD:
            raise AdapterError(f"{name} has more than {_LONGEST_FIELD} bytes; send PEFT's adapter_config.json as it is")
        found[name] = value.encode("utf-8", "replace") if isinstance(value, str) else value.file.read()
    if not found:
        raise AdapterError(f"the request has no parts; send {', '.join(known[:2])} as multipart/form-data")
    return found


class TwoTrainersError(CoveyError):
    """Another trainer uploads to this server."""


class TrainerLease:
    """Decides who may upload."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._holder: str | None = None
        self._heard = 0.0

    def check(self, trainer: str, *, takeover: bool = False) -> None:
        """Raise where another trainer holds the server. Raises `TwoTrainersError`: it does."""
        quiet = self._clock() - self._heard
        if self._holder not in (None, trainer) and quiet < self._seconds and not takeover:
            advice = f"Stop one of them, give each a server of its own, or wait {self._seconds - quiet:.0f} s"
            name = repr(trainer or "without a name")
            raise TwoTrainersError(f"trainer {name} may not upload: {self._holder!r} did {quiet:.0f} s ago. {advice}")

    def release(self, trainer: str) -> None:
        """The trainer is done: another may come at once."""
        if trainer == self._holder:
            self._holder = None

    def take(self, trainer: str, *, takeover: bool = False) -> None:
        """Checks likewise, and gives the server to this trainer."""
        self.check(trainer, takeover=takeover)
        if trainer:
            self._holder, self._heard = trainer, self._clock()


@torch.inference_mode()
def try_adapter(model: Any, adapter: Adapter) -> None:
    """Run `model` with an adapter once, on a few tokens, each adapted layer merged as it is needed.

    What is checked cannot be seen in the factors alone: that the merged weights are numbers of the model's dtype, and
    that nothing overflows when they are used. A norm of activations beyond 1.8e19 takes the inverse of an infinite
    square and answers zero: the log-probabilities would be finite, and those of no model. So the squares of what each
    layer puts out must be finite too. The model is only read; one layer's merged weight exists at a time. Raises
    `AdapterError`: a merged weight, what a layer puts out or a logit overflows.
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
            beyond = f"its weights are beyond what {str(dtype).removeprefix('torch.')} holds"
            raise AdapterError(f"{name}: with the adapter {beyond}; lower its scaling or its values")
        return weight

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
        def hook(layer: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
            if name in adapter.factors:
                out = functional.linear(inputs[0], merged(name), layers[name].bias)
            if not out.float().square().sum(-1).isfinite().all():
                values = f"values up to {float(out.abs().max()):.1e}, which overflow in use"
                raise AdapterError(f"{name}: with the adapter it puts out {values}; lower its scaling or its values")
            return out

        return hook

    hooks = [layer.register_forward_hook(watch(name)) for name, layer in layers.items()]
    try:
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        ids = torch.linspace(0, vocabulary - 1, 16).long()[None]
        logits = model(input_ids=ids.to(next(model.parameters()).device), use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    for name in adapter.factors.keys() - tried:  # layers that these tokens did not reach
        merged(name)
    if not logits.isfinite().all():
        raise AdapterError("with the adapter the model's logits are not finite; lower its scaling or its values")
