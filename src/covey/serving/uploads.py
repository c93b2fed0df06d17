"""Uploads of adapters: the form that they come in, who may upload, and a trial before they are served.

A form is written to the disk while it arrives, then read in one go, both beside the event loop. One trainer at a time
may upload: two would train on each other's weights. Who uploads without a name (a check, a client that knows no names)
is let in as long as no named trainer holds the server.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import IO, Any
from urllib.parse import parse_qsl

import torch
from python_multipart.multipart import parse_options_header
from torch import Tensor, nn
from torch.nn import functional

from covey.adapters import Adapter
from covey.errors import AdapterError, CoveyError
from covey.pytorch.engine.merge import AdaptedWeights

_AT_ONCE = 1 << 20
_LONGEST_HEAD = 4096
_LONGEST_FIELD = 1 << 20
"""Of all parts but the first that is known, in bytes."""


async def spool(body: AsyncIterator[bytes]) -> IO[bytes]:
    """A request's body in a file without a name, for the caller to close."""
    file, arrived = tempfile.TemporaryFile(), bytearray()  # noqa: SIM115
    try:
        async for part in body:
            arrived += part
            if len(arrived) >= _AT_ONCE:
                await asyncio.to_thread(file.write, arrived)
                arrived = bytearray()
        file.write(arrived)
    except BaseException:
        file.close()
        raise
    return file


def read_form(content_type: str, file: IO[bytes], known: Sequence[str]) -> dict[str, bytes]:
    """The parts of a form by their names, each of which may come once.

    Raises `AdapterError`: it is no form, or has another part or one twice.
    """
    kind, options = parse_options_header(content_type)
    if kind == b"multipart/form-data" and options.get(b"boundary"):
        parts = _parts(file, b"--" + options[b"boundary"])
    elif kind == b"application/x-www-form-urlencoded" and file.seek(0, 2) <= _LONGEST_HEAD:
        file.seek(0)
        fields = parse_qsl(file.read().decode("latin-1"), keep_blank_values=True)
        parts = ((name, value.encode("utf-8", "replace")) for name, value in fields)
    else:
        raise AdapterError(f"content-type: {content_type!r:.80}: send the parts as multipart/form-data")
    found: dict[str, bytes] = {}
    for name, value in parts:
        if name not in known or name in found:
            raise AdapterError(
                f"the part {name!r:.80} is unknown, or comes twice; send each of {', '.join(known)} once"
            )
        if name != known[0] and len(value) > _LONGEST_FIELD:
            raise AdapterError(f"{name} has more than {_LONGEST_FIELD} bytes; send PEFT's adapter_config.json as it is")
        found[name] = value
    return found


def _parts(form: IO[bytes], mark: bytes) -> Iterator[tuple[str, bytes]]:
    place = _find(form, mark, 0)
    while place >= 0:
        form.seek(start := place + len(mark))
        head, blank, _ = form.read(_LONGEST_HEAD).partition(b"\r\n\r\n")
        if head.startswith(b"--"):
            return
        start += len(head) + 4
        place = _find(form, b"\r\n" + mark, start) if blank else -1
        lines = (line.partition(b":") for line in head.split(b"\r\n"))
        said = {title.lower(): value.strip() for title, _, value in lines}.get(b"content-disposition")
        name = parse_options_header(said)[1].get(b"name")
        if name is None or place < 0:
            break
        form.seek(start)
        yield name.decode("utf-8", "replace"), form.read(place - start)
        place += 2
    raise AdapterError("the form is cut off, or a part has no name; send it as multipart/form-data")


def _find(form: IO[bytes], mark: bytes, start: int) -> int:
    """Where `mark` comes first from `start` on; -1 = nowhere. Others run between two blocks."""
    for block in range(start, form.seek(0, 2), _AT_ONCE):
        form.seek(block)
        place = form.read(_AT_ONCE + len(mark) - 1).find(mark)
        if place >= 0:
            return block + place
    return -1


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
