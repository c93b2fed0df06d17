"""Tensors of a GPU that wait in the host's memory: the optimiser's moments between steps, and a reference's weights.

AdamW's moments are twice what is trained and are read once a step. With `optim.offload` they come over slice by slice
while the step is taken, so that the device never holds more of them than a slice:

    for each slice of the parameters     host -> device, the optimiser's step on these alone, device -> host

AdamW treats each number by itself, so the slices give the bits of the undivided step. A slice is as many parameters as
`SLICE_BYTES` hold, and one at the least: a large embedding is a slice of its own.

Copies go through pinned memory, in the order of the device's stream. Not measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

SLICE_BYTES = 256 << 20
"""Of parameters whose moments are on the device together."""


class HostMemory:
    """Keeps tensors of a device in the host's memory, and brings copies back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def keep(self, tensor: Tensor, into: Tensor | None = None) -> Tensor:
        """A copy in the host's memory, complete once `settle` has returned."""
        if into is None or into.device.type != "cpu":
            into = torch.empty_like(tensor, device="cpu", pin_memory=self._device.type == "cuda")
        return into.copy_(tensor.detach(), non_blocking=True)

    def bring(self, held: Tensor) -> Tensor:
        """A copy on the device."""
        return held.to(self._device, non_blocking=True, copy=True)

    def settle(self) -> None:
        """Wait until what was kept is there for the host to read."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def step_in_slices(optimizer: torch.optim.Optimizer, host: HostMemory) -> None:
    """One step of an optimiser that treats each parameter by itself, with its moments in the host's memory.

    Moments that the step makes, the first time, end there too. Counters, which are single numbers, stay where they are.
    """
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for group, _ in groups:
            group["params"] = []
        for group, parameters in groups:
            for part in _slices(parameters):
                group["params"] = part
                _step(optimizer, part, host)
            group["params"] = []
    finally:
        for group, parameters in groups:
            group["params"] = parameters
    host.settle()


def _step(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], host: HostMemory) -> None:
    waiting = [_moments(optimizer, parameter) for parameter in parameters]
    for parameter, held in zip(parameters, waiting, strict=True):
        optimizer.state[parameter].update({key: host.bring(tensor) for key, tensor in held.items()})
    optimizer.step()
    for parameter, held in zip(parameters, waiting, strict=True):
        found = _moments(optimizer, parameter)
        optimizer.state[parameter].update({key: host.keep(tensor, held.get(key)) for key, tensor in found.items()})


def _slices(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    part: list[Tensor] = []
    for parameter in parameters:
        if part and sum(each.nbytes for each in part) + parameter.nbytes > SLICE_BYTES:
            yield part
            part = []
        part.append(parameter)
    if part:
        yield part


def _moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The tensors of a parameter's state, but for single numbers."""
    state = optimizer.state.get(parameter, {})
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
