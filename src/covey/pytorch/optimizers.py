"""The optimisers by the names of `optim.optimizer`.

    adamw              PyTorch's, fused: moments of 32 bits, 8 bytes for each trained number
    adamw_8bit         bitsandbytes': moments of 8 bits with a scale for each 256, 2 bytes
    paged_adamw_8bit   the same in memory that a GPU's driver moves to the host when the GPU is full

bitsandbytes keeps parameters of fewer than 4,096 numbers in 32 bits. Its 8-bit AdamW runs on CPUs too, which have no
paged memory: there the last two are the same.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable
from typing import Any

import torch

from covey.errors import ConfigError

log = logging.getLogger(__name__)

_SMALLEST, _BLOCK = 4096, 256
"""Numbers of a parameter from which its moments have 8 bits, and numbers that share a scale."""


def require_package(name: str) -> None:
    """Refuse an optimiser whose package is missing.

    Raises:
        ConfigError: it says what to install.
    """
    if name != "adamw" and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"optim.optimizer={name!r}: bitsandbytes is not installed; run pip install 'covey[quantization]', or set "
            "optim.optimizer to adamw"
        )


def make_optimizer(
    name: str, groups: list[dict[str, Any]], *, betas: tuple[float, float], epsilon: float, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW in one of its forms.

    Args:
        name: see the module's docstring.
        groups: of parameters, with "lr" and "weight_decay".
        betas: decays of the two moments.
        epsilon: added to the denominator.
        device: of the parameters.

    Raises:
        ConfigError: bitsandbytes is not installed, or has no kernels for the device.
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


def moment_bytes(name: str, parameters: Iterable[torch.nn.Parameter]) -> int:
    """Bytes of the two moments."""
    total = 0
    for parameter in parameters:
        eight = name != "adamw" and parameter.numel() >= _SMALLEST
        plain = 2 * parameter.numel() * (parameter.element_size() if name == "adamw" else 4)
        total += 2 * (parameter.numel() + 4 * -(-parameter.numel() // _BLOCK)) if eight else plain
    return total
