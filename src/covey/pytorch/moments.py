"""The optimiser's moments under the names of the parameters, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from covey.errors import CheckpointError
from covey.pytorch.offload import HostMemory

_TABLES = ("qmap1", "qmap2")
"""What bitsandbytes' 8 bits stand for: the same in every run, and made by the optimiser itself."""
_ADVICE = "resume with the model, adapter and optimizer settings that the run was started with"


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> dict[str, torch.Tensor]:
    """Flatten an optimizer's moments to `"<parameter name>/<moment>"` -> tensor (`exp_avg`, `exp_avg_sq`,
    `step`, ...; of bitsandbytes' `state1`, `absmax1`, ...).

    Parameters without state yet are left out.
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
    in the host's memory, there.

    Written by hand because `Optimizer.load_state_dict` casts moments to the parameter's dtype, which is not
    exact.

    Raises:
        CheckpointError: a moment belongs to a parameter that is not trained here, has another shape, or is another
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
            device = torch.device("cpu") if key == "step" and not _captured(optimizer) else parameter.device
            waits = None if tensor.ndim == 0 else host
            placed = tensor.to(device, copy=True) if waits is None else waits.keep(tensor)
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
        raise CheckpointError(
            f"the checkpoint has {_listed(found)} for parameter {name}, the optimizer {_listed(wanted)}; {_ADVICE}"
        )
    for key, tensor in moments.items():
        if isinstance(state[key], torch.Tensor):
            state[key].copy_(tensor)
        else:
            state[key] = tensor.item()
    return state


def _listed(shapes: Mapping[str, torch.Size]) -> str:
    return ", ".join(f"{key} {tuple(shape)}" for key, shape in sorted(shapes.items()))


def _captured(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
