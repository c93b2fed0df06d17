"""The optimisers by the names of `optim.optimizer`, where their moments are, and how these are saved; float16's loss
scale.

    adamw              PyTorch's, fused: moments of 32 bits, 8 bytes for each trained number
    adamw_8bit         bitsandbytes': moments of 8 bits with a scale for each 256, 2 bytes
    paged_adamw_8bit   the same in memory that a GPU's driver moves to the host when the GPU is full

bitsandbytes keeps parameters of fewer than 4,096 numbers in 32 bits. Its 8-bit AdamW runs on CPUs too, which have no
paged memory: there the last two are the same.

With `optim.offload` AdamW's moments wait in the host's memory, as a reference's weights do, and come over slice by
slice while the step is taken, so that the device never holds more of them than a slice:

    for each slice of the parameters     host -> device, the optimiser's step on these alone, device -> host

AdamW treats each number by itself, so the slices give the bits of the undivided step. A slice is as many parameters as
`SLICE_BYTES` hold, and one at the least. Copies go through pinned memory, in the order of the device's stream. Not
measured on a GPU.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from covey.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

_SMALLEST, _BLOCK = 4096, 256
"""Numbers of a parameter from which its moments have 8 bits, and numbers that share a scale."""


def require_package(name: str) -> None:
    """Refuse an optimiser whose package is missing, with a `ConfigError` that says what to install."""
    if name != "adamw" and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"optim.optimizer={name!r}: bitsandbytes is not installed; run pip install 'covey[quantization]', or set "
            "optim.optimizer to adamw"
        )


def make_optimizer(
    name: str, groups: list[dict[str, Any]], *, betas: tuple[float, float], epsilon: float, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW in one of its forms, over groups of parameters with "lr" and "weight_decay"; `ConfigError` where
    bitsandbytes is missing, or has no kernels for the device.
    """
    if name == "adamw":
        # Fused on CPU too: one pass over each parameter in place of a dozen, with the same numbers on every run.
        return torch.optim.AdamW(groups, betas=betas, eps=epsilon, fused=True)
    require_package(name)
    if device.type not in ("cpu", "cuda", "xpu"):
        raise ConfigError(
            f"optim.optimizer={name!r}: bitsandbytes has no 8-bit AdamW for the device {device.type}; set "
            "optim.optimizer to adamw"
        )
    from bitsandbytes.optim import AdamW8bit

    paged = name.startswith("paged")
    if paged and device.type == "cpu":
        log.warning("optim.optimizer=%r: a CPU has no paged memory, so it is adamw_8bit", name)
    made: torch.optim.Optimizer = AdamW8bit(
        groups, betas=betas, eps=epsilon, is_paged=paged and device.type != "cpu", min_8bit_size=_SMALLEST
    )
    return made


_TABLES = ("qmap1", "qmap2")
"""What bitsandbytes' 8 bits stand for: the same in every run, and made by the optimiser itself."""
_ADVICE = "resume with the model, adapter and optimizer settings that the run was started with"


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> dict[str, torch.Tensor]:
    """An optimizer's moments as `"<parameter name>/<moment>"` -> tensor (`exp_avg`, `exp_avg_sq`, `step`; of
    bitsandbytes' `state1`, `absmax1`, ...), without parameters that have none yet.
    """
    return {
        f"{name}/{key}": torch.as_tensor(value)
        for name, parameter in named_parameters
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None and key not in _TABLES
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    tensors: Mapping[str, torch.Tensor],
    host: HostMemory | None = None,
) -> None:
    """Put the moments from `optimizer_tensors` back, in their own dtype, on each parameter's device or, where they wait
    in the host's memory, there. (`Optimizer.load_state_dict` casts moments to the parameter's dtype, which is not
    exact.) `CheckpointError` for a moment of a parameter that is not trained here, of another shape, or another
    optimiser's.
    """
    parameters = dict(named_parameters)
    saved: dict[str, dict[str, torch.Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition("/")
        if name not in parameters:
            raise CheckpointError(
                f"the checkpoint has {key} {tuple(tensor.shape)} for parameter {name}, which is not trained here; "
                f"{_ADVICE}"
            )
        saved.setdefault(name, {})[key] = tensor
    makes_its_own = hasattr(optimizer, "init_state")
    if not makes_its_own and any("state1" in moments for moments in saved.values()):
        raise CheckpointError(f"the checkpoint's moments are those of bitsandbytes' optimizers; {_ADVICE}")
    captured = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
    restored: dict[torch.Tensor, dict[str, Any]] = {}
    for name, moments in saved.items():
        parameter = parameters[name]
        if makes_its_own:
            restored[parameter] = _filled(optimizer, name, parameter, moments)
            continue
        for key, tensor in moments.items():
            if tensor.ndim > 0 and tensor.shape != parameter.shape:
                raise CheckpointError(
                    f"the checkpoint has {key} {tuple(tensor.shape)} for parameter {name}, which has shape "
                    f"{tuple(parameter.shape)} here; {_ADVICE}"
                )
            # Adam keeps its step counter on the CPU unless it runs captured in a CUDA graph.
            device = torch.device("cpu") if key == "step" and not captured else parameter.device
            placed = host.keep(tensor) if host is not None and tensor.ndim else tensor.to(device, copy=True)
            restored.setdefault(parameter, {})[key] = placed
    kinds = {frozenset(moments) for moments in restored.values()}
    if len(kinds) > 1 and not makes_its_own:
        raise CheckpointError(
            f"the checkpoint lacks {' and '.join(sorted(max(kinds, key=len) - min(kinds, key=len)))} of some "
            "parameters, though it has them of others; delete it to resume from the one before"
        )
    optimizer.state.clear()
    optimizer.state.update(restored)


def _filled(
    optimizer: Any, name: str, parameter: torch.nn.Parameter, moments: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """One parameter's state in buffers that the optimiser has made, some of them in paged memory (bitsandbytes)."""
    number, position = next(
        (number, position)
        for number, group in enumerate(optimizer.param_groups)
        for position, other in enumerate(group["params"])
        if other is parameter
    )
    optimizer.state.pop(parameter, None)
    optimizer.init_state(optimizer.param_groups[number], parameter, number, position)
    state: dict[str, Any] = optimizer.state[parameter]
    wanted = {key: torch.as_tensor(value).shape for key, value in state.items() if key not in _TABLES}
    found = {key: tensor.shape for key, tensor in moments.items()}
    if wanted != found:
        theirs, ours = (
            ", ".join(f"{key} {tuple(shape)}" for key, shape in sorted(shapes.items())) for shapes in (found, wanted)
        )
        raise CheckpointError(f"the checkpoint has {theirs} for parameter {name}, the optimizer {ours}; {_ADVICE}")
    for key, tensor in moments.items():
        state[key] = state[key].copy_(tensor) if isinstance(state[key], torch.Tensor) else tensor.item()
    return state


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
        return held.to(self._device, non_blocking=True, copy=True)

    def settle(self) -> None:
        """Wait until what was kept is there for the host to read."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def step_in_slices(optimizer: torch.optim.Optimizer, host: HostMemory) -> None:
    """One step of an optimiser that treats each parameter by itself, moments in the host's memory, also those that it
    makes. Counters, which are single numbers, stay where they are.
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


_FIRST, _GROWTH, _BACKOFF, _INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""`torch.amp.GradScaler`'s defaults."""
_PREFIX = "loss_scale/"


class LossScale:
    """What keeps small gradients within float16, whose smallest number is 6e-8 and whose largest is 65,504: losses are
    multiplied by it, and gradients divided by it before they are clipped. The rule is that of `torch.amp.GradScaler`,
    which cannot follow gradients of other processes and of `autograd.grad`: one that overflows takes no step and halves
    the factor; 2,000 steps without one double it.
    """

    def __init__(self) -> None:
        self.value, self.good_steps = _FIRST, 0

    def after_step(self, *, finite: bool) -> None:
        """Move on after a step whose gradient was finite, or one that was not taken since it was not."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value *= _BACKOFF
        elif self.good_steps == _INTERVAL:
            self.value, self.good_steps = self.value * _GROWTH, 0

    def tensors(self) -> dict[str, torch.Tensor]:
        numbers = {"value": self.value, "good_steps": float(self.good_steps)}
        return {f"{_PREFIX}{name}": torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}

    @staticmethod
    def owns(name: str) -> bool:
        """True for a name that `tensors` gives; no parameter's moment has such a one."""
        return name.startswith(_PREFIX)

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what `tensors` returned; a checkpoint without it leaves the scale at its beginning."""
        if f"{_PREFIX}value" in tensors:
            self.value = float(tensors[f"{_PREFIX}value"])
            self.good_steps = int(tensors[f"{_PREFIX}good_steps"])
