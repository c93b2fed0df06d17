"""A mesh of devices from text: `data=4`, or `data=2,tensor=4`."""

from __future__ import annotations

import math

import jax
from jax.sharding import Mesh

from covey.errors import ConfigError


def make_mesh(axes: str | None, device: str = "auto") -> Mesh | None:
    """The mesh of `model.mesh` on the devices of a kind; None = one device, JAX's first.

    Args:
        axes: names and sizes, `data=2,tensor=4`.
        device: `auto`, `cpu`, or `cuda` with or without a number.

    Raises:
        ConfigError: JAX sees no such device, or too few of them.
    """
    kind = device.partition(":")[0]
    try:
        devices = jax.devices() if kind == "auto" else jax.devices({"cuda": "gpu"}.get(kind, kind))
    except RuntimeError as error:
        raise ConfigError(
            f"model.device={device!r}: JAX sees none here ({str(error).splitlines()[0]}); use auto or cpu"
        ) from error
    if axes is None:
        if kind != "auto":
            jax.config.update("jax_default_device", devices[int(device.partition(":")[2] or 0)])
        return None
    sizes = {name: int(size) for name, _, size in (part.partition("=") for part in axes.split(","))}
    wanted = math.prod(sizes.values())
    if wanted > len(devices):
        raise ConfigError(
            f"model.mesh={axes!r}: {wanted} devices, but JAX sees {len(devices)} here; choose a smaller mesh (on a "
            f"CPU, XLA_FLAGS=--xla_force_host_platform_device_count={wanted} makes so many of it)"
        )
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices[:wanted])
