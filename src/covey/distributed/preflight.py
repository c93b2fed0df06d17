"""What can be known of a cluster before anything is asked of it that might wait without end."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from covey.config.whole import GRPOConfig
from covey.distributed.machines import MIXTURE, Facts, check_mixture
from covey.errors import ConfigError

PACKAGES = ("covey", "torch", "transformers", "peft", "numpy", "safetensors", "ray")
"""Those whose versions are part of the numbers, or of what processes say to each other."""
PROCESS_BYTES = 300_000_000
"""That a process takes with its libraries, before it holds a model."""
STORED_ADAPTERS = 4
"""That the object store must have room for: the one in use, the next one, and those of readers that are late."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of a cluster, as Ray sees it."""

    name: str
    cpus: float
    gpus: float
    store_bytes: float
    kinds: frozenset[str] = frozenset()
    versions: Mapping[str, str] | None = None
    facts: Facts | None = None
    memory: float = float("inf")


def installed(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Python's version and those of packages in this process, "" for one that is missing."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def gpus_of_sampler(config: GRPOConfig, nodes: Sequence[Node]) -> float:
    """See `distributed.gpus_per_sampler`."""
    chosen = config.distributed.gpus_per_sampler
    return gpus_of_learner(config, nodes) if chosen is None else chosen


def gpus_of_learner(config: GRPOConfig, nodes: Sequence[Node]) -> float:
    """1 where there are GPUs and they are wanted."""
    return 1.0 if config.model.device != "cpu" and any(node.gpus for node in nodes) else 0.0


def check_room(nodes: Sequence[Node], samplers: int, cpus: float, gpus: float) -> None:
    """Refuse more samplers than the cluster has room for: Ray would wait for a larger one, without a word.

    Raises:
        ConfigError: there is no room; it says for how many there is.
    """
    room = sum(_fits(node, cpus, gpus) for node in nodes)
    if room >= samplers:
        return
    raise ConfigError(
        f"distributed.samplers={samplers}: each takes {cpus:g} CPU and {gpus:g} GPU, and the Ray cluster has room for "
        f"{room}: {_listed(nodes)}; use {room} or fewer, or add machines"
    )


def check_memory(nodes: Sequence[Node], samplers: int, cpus: float, model_bytes: int) -> None:
    """Refuse more samplers than there is memory for, on nodes without GPUs; each holds the model at the least.

    Raises:
        ConfigError: it says how many there are, and what they need.
    """
    room = sum(min(_fits(node, cpus, 0), int(min(node.memory // max(model_bytes, 1), 1e6))) for node in nodes)
    if room < samplers:
        held = sum(node.memory for node in nodes)
        raise ConfigError(
            f"distributed.samplers={samplers}: each takes {model_bytes / 1e9:.1f} GB or more, and the "
            f"nodes of the Ray cluster have {held / 1e9:.1f} GB, room for {room}; use fewer, or add machines"
        )


def check_learners(nodes: Sequence[Node], here: str, learners: Sequence[float], samplers: Sequence[float]) -> None:
    """Refuse learners, and samplers beside them, that the cluster has no room for; Ray would wait for it.

    Raises:
        ConfigError: there is no room; it says what there is and what is needed.
    """
    number, cpus, gpus = learners
    needed = [number * own + samplers[0] * other for own, other in zip(learners[1:], samplers[1:], strict=True)]
    held = [sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)]
    room = sum(_fits(node, cpus, gpus) for node in nodes)
    if room < number or any(have < need for have, need in zip(held, needed, strict=True)):
        beside = f" and samplers={samplers[0]:g}" if samplers[0] else ""
        raise ConfigError(
            f"distributed.learners={number:g}{beside}: {needed[0]:g} CPUs and {needed[1]:g} GPUs are needed, each "
            f"learner's {cpus:g} CPU and {gpus:g} GPU on one machine; the Ray cluster has {held[0]:g} CPUs and "
            f"{held[1]:g} GPUs, with room for {room} learners: {_listed(nodes)}; use fewer, or add machines"
        )
    own = [node for node in nodes if node.name == here]
    if not any(_fits(node, cpus, gpus) for node in own):
        raise ConfigError(
            f"distributed.learners={number:g}: the first learner runs where the command does, and that node has no "
            f"room for {cpus:g} CPU and {gpus:g} GPU: {_listed(own) or here}; start the command on another machine of "
            "the Ray cluster"
        )


def check_alike(
    nodes: Sequence[Node], own: Mapping[str, str], cpus: float, gpus: float, *, allow_mixture: bool = False
) -> list[str]:
    """Refuse machines whose numbers would differ.

    Raises:
        ConfigError: a node on which a sampler may be placed has another version of something, or another kind of GPU.
    """
    differences = []
    used = [node for node in nodes if _fits(node, cpus, gpus)]
    for node in used:
        for name, version in own.items() if node.versions is not None else ():
            theirs = (node.versions or {}).get(name, "")
            if theirs != version and theirs and version and name in MIXTURE:
                differences.append(f"Ray node {node.name} has {name} {theirs}, this process has {version}")
            elif theirs != version:
                what = f"has {name} {theirs}" if theirs else f"lacks {name}"
                raise ConfigError(
                    f"Ray node {node.name} {what}, this process has {version or 'none'}: their numbers would differ; "
                    "install the same versions everywhere, such as with one container image"
                )
    kinds = sorted(set().union(*(node.kinds for node in used))) if gpus else []
    if len(kinds) > 1:
        differences.append(f"the Ray cluster has GPUs of several kinds ({', '.join(kinds)})")
    return check_mixture(differences, allowed=allow_mixture)


def check_store(nodes: Sequence[Node], size: int) -> None:
    """Refuse object stores that are too small for the weights that samplers are given.

    Raises:
        ConfigError: naming the node.
    """
    for node in nodes:
        if node.store_bytes < STORED_ADAPTERS * size:
            raise ConfigError(
                f"Ray node {node.name}: its object store has {node.store_bytes / 1e6:.0f} MB, and {STORED_ADAPTERS} "
                f"versions of the weights have {STORED_ADAPTERS * size / 1e6:.0f} MB; start Ray there with a larger "
                "--object-store-memory"
            )


def _listed(nodes: Sequence[Node]) -> str:
    there = ", ".join(f"{node.name} ({node.cpus:g} CPUs, {node.gpus:g} GPUs)" for node in nodes[:8])
    return there + (", ..." if len(nodes) > 8 else "")


def _fits(node: Node, cpus: float, gpus: float) -> int:
    """Samplers or learners that there is room for on a node."""
    room = [have // need for have, need in ((node.cpus, cpus), (node.gpus, gpus)) if need > 0]
    return int(min(room))
