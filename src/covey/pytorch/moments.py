"""The optimiser's moments under the names of the parameters, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from covey.errors import CheckpointError
from covey.pytorch.offload import HostMemory


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> dict[str, torch.Tensor]:
    """Flatten an optimizer's moments to `"<parameter name>/<moment>"` -> tensor (`exp_avg`, `exp_avg_sq`,
    `step`, ...).

    Parameters without state yet are left out.
    """
    return {
        f"{name}/{key}": torch.as_tensor(value)
        for name, parameter in named_parameters
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
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
        CheckpointError: a moment belongs to a parameter that is not trained here, or has another shape.
    """
    parameters = dict(named_parameters)
    restored: dict[torch.Tensor, dict[str, Any]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None or (tensor.ndim > 0 and tensor.shape != parameter.shape):
            reason = "is not trained here" if parameter is None else f"has shape {tuple(parameter.shape)} here"
            raise CheckpointError(
                f"the checkpoint has {key} {tuple(tensor.shape)} for parameter {name}, which {reason}; "
                "resume with the model and adapter settings that the run was started with"
            )
        # Adam keeps its step counter on the CPU unless it runs captured in a CUDA graph.
        device = torch.device("cpu") if key == "step" and not _captured(optimizer) else parameter.device
        waits = None if tensor.ndim == 0 else host
        placed = tensor.to(device, copy=True) if waits is None else waits.keep(tensor)
        restored.setdefault(parameter, {})[key] = placed
    kinds = {frozenset(moments) for moments in restored.values()}
    if len(kinds) > 1:
        raise CheckpointError(
            f"the checkpoint lacks {' and '.join(sorted(max(kinds, key=len) - min(kinds, key=len)))} of some "
            "parameters, though it has them of others; delete it to resume from the one before"
        )
    optimizer.state.clear()
    optimizer.state.update(restored)


def _captured(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
