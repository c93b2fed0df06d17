"""What is looked at before and while several machines work together: whether they are alike, whether there is room,
and whether a cluster's head is still there. Nothing here waits without end, and none of it needs torch or Ray: a node
of a cluster is asked by a function that runs there, a rank tells the others itself.
"""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from covey.config.whole import GRPOConfig
from covey.errors import ClusterLostError, ConfigError, ModelError
from covey.files import sampled_hash
from covey.model_files import model_files

PACKAGES = ("covey", "torch", "transformers", "peft", "numpy", "safetensors", "ray")
"""Those whose versions are part of the numbers, or of what processes say to each other."""
PROCESS_BYTES = 300_000_000
"""That a process takes with its libraries, before it holds a model."""
STORED_ADAPTERS = 4
"""That the object store must have room for: the one in use, the next one, and those of readers that are late."""
MIXTURE = ("torch", "numpy")
"""Packages whose versions are part of the numbers alone, and of nothing that processes say to each other."""
_SMI_SECONDS = 5.0
CONNECT_SECONDS = 5.0
_LOST_SECONDS = 20.0
"""Without an answer until the cluster is taken to be lost. Ray waits 60 s, then it ends every process of the cluster,
the trainer too; the time between is for a checkpoint."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a machine is."""

    gpus: tuple[str, ...] = ()
    driver: str = ""
    model: str = ""
    model_bytes: int = 0
    model_problem: str = ""
    threads: int = 0


def installed(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Python's version and those of packages in this process, "" for one that is missing."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def facts_here(model: str) -> dict[str, Any]:
    """The fields of this machine's `Facts`, without its threads."""
    gpus, driver = _gpus()
    found: dict[str, Any] = {"gpus": gpus, "driver": driver}
    try:
        digest, size = model_hash(model)
        return found | {"model": digest, "model_bytes": size}
    except (OSError, ModelError) as error:
        return found | {"model_problem": f"{type(error).__name__}: {error!s:.200}"}


def model_hash(model: str) -> tuple[str, int]:
    """`sampled_hash` of a model's config, index and weight files, and the bytes of its weights. Raises OSError, and
    ModelError as `model_files` does.
    """
    files = model_files(model)
    total = sum(path.stat().st_size for path in files if path.suffix in (".safetensors", ".gguf", ".bin"))
    return sampled_hash(files) if files else "", total


def _gpus() -> tuple[tuple[str, ...], str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), ""
    command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return (), ""
    lines = [[cell.strip() for cell in line.rpartition(",")[::2]] for line in told.splitlines() if line.strip()]
    return tuple(name for name, _ in lines), ", ".join(sorted({driver for _, driver in lines}))


def check_versions(who: str, theirs: Mapping[str, str], own: Mapping[str, str], whose: str) -> list[str]:
    """Refuse other versions of what is part of the numbers, or of what processes say to each other; those that are part
    of the numbers alone are returned as differences, a sentence each.
    """
    differences = []
    for name in sorted({*own, *theirs}):
        there, here = theirs.get(name, ""), own.get(name, "")
        if there == here:
            continue
        if there and here and name in MIXTURE:
            differences.append(f"{who} has {name} {there}, {whose} has {here}")
            continue
        has = f"has {name} {there}" if there else f"lacks {name}"
        raise ConfigError(
            f"{who} {has}, {whose} has {here or 'none'}: install the same versions everywhere, such as with one "
            "container image"
        )
    return differences


def check_models(model: str, own: Facts, others: Mapping[str, Facts]) -> None:
    """Refuse machines that have another model under the same name, or cannot read it."""
    for name, facts in others.items():
        if facts.model_problem:
            problem = f"cannot be read on {name} ({facts.model_problem})"
        elif own.model and facts.model and facts.model != own.model:
            problem = f"on {name} it is another one than here (its config, index or weights differ)"
        else:
            continue
        raise ConfigError(f"model.model={model!r:.200}: {problem}; give every machine the same files, under one path")


def mixtures(own: Facts, others: Mapping[str, Facts], *, gpus: bool, name_of_own: str = "this machine") -> list[str]:
    """Differences between machines that make their numbers differ, one sentence each."""
    found = list[str]()
    asked = [(name_of_own, own), *others.items()] if own.gpus or not gpus else list(others.items())
    if not asked:
        return found
    (first, expected), *rest = asked
    for name, facts in rest:
        if gpus and set(facts.gpus) != set(expected.gpus):
            theirs, ours = (" and ".join(sorted(set(each.gpus))) or "no GPU" for each in (facts, expected))
            found.append(f"{name} has {theirs}, {first} has {ours}")
        if gpus and facts.driver != expected.driver:
            found.append(f"{name} has the GPU driver {facts.driver or 'none'}, {first} has {expected.driver or 'none'}")
        if facts.threads != expected.threads:
            found.append(f"{name} has {facts.threads} threads, {first} has {expected.threads}")
    return found


def check_mixture(differences: Sequence[str], *, allowed: bool) -> list[str]:
    """Refuse machines whose numbers differ, unless the run allows it; then what is to be said."""
    if differences and not allowed:
        raise ConfigError(
            f"{'; '.join(differences[:4])}{'; ...' if len(differences) > 4 else ''}: what is computed would depend on "
            "which machine does it; use machines of one kind, or set run.allow_mixture=true"
        )
    return [f"machines differ (run.allow_mixture): {difference}" for difference in differences]


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of a cluster, as Ray sees it."""

    name: str
    cpus: float
    gpus: float
    store_bytes: float
    memory: float = float("inf")
    versions: Mapping[str, str] | None = None
    facts: Facts | None = None


def gpus_of_sampler(config: GRPOConfig, nodes: Sequence[Node]) -> float:
    """See `distributed.gpus_per_sampler`."""
    chosen = config.distributed.gpus_per_sampler
    return gpus_of_learner(config, nodes) if chosen is None else chosen


def gpus_of_learner(config: GRPOConfig, nodes: Sequence[Node]) -> float:
    """1 where there are GPUs and they are wanted."""
    return 1.0 if config.model.device != "cpu" and any(node.gpus for node in nodes) else 0.0


def check_room(nodes: Sequence[Node], what: str, count: int, cpus: float, gpus: float) -> None:
    """Refuse more learners or samplers than the cluster has room for: Ray would wait for a larger one, in silence."""
    room = sum(has_room(node, cpus, gpus) for node in nodes)
    if room < count:
        raise ConfigError(
            f"distributed.{what}={count}: each takes {cpus:g} CPU and {gpus:g} GPU of one machine, and the Ray cluster "
            f"has room for {room}: {_listed(nodes)}; use {room} or fewer, or add machines"
        )


def check_memory(nodes: Sequence[Node], samplers: int, cpus: float, model_bytes: int) -> None:
    """Refuse more samplers than there is memory for, on nodes without GPUs; each holds the model at the least."""
    room = sum(min(has_room(node, cpus, 0), int(min(node.memory // max(model_bytes, 1), 1e6))) for node in nodes)
    if room < samplers:
        held = sum(node.memory for node in nodes)
        raise ConfigError(
            f"distributed.samplers={samplers}: each takes {model_bytes / 1e9:.1f} GB or more, and the "
            f"nodes of the Ray cluster have {held / 1e9:.1f} GB, room for {room}; use fewer, or add machines"
        )


def check_store(nodes: Sequence[Node], size: int) -> None:
    """Refuse object stores that are too small for the weights that samplers are given."""
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


def has_room(node: Node, cpus: float, gpus: float) -> int:
    """Samplers or learners that there is room for on a node."""
    return int(min(have // need for have, need in ((node.cpus, cpus), (node.gpus, gpus)) if need > 0))


class Head:
    """The head of the Ray cluster that this process is connected to."""

    def __init__(self, address: str) -> None:
        self.address, self.lost = address, False
        self._asked = time.monotonic()
        self._silent_since: float | None = None

    def check(self) -> None:
        """Ask now and then whether it still answers, or else raise ClusterLostError; to be called often."""
        now = time.monotonic()
        if now - self._asked >= _LOST_SECONDS / 10:
            self._asked = now
            try:
                reach(self.address)
                self._silent_since = None
            except OSError:
                self._silent_since = self._silent_since or now
        self.lost = self._silent_since is not None and now - self._silent_since > _LOST_SECONDS
        if self.lost:
            raise ClusterLostError(
                f"the head of the Ray cluster, {self.address}, has not answered for {_LOST_SECONDS:g} s: the cluster "
                "is lost; when it is there again, start again: the run continues from its last checkpoint"
            )


def reach(address: str) -> None:
    """Connect to HOST:PORT and leave it. Raises OSError: nobody answers; OverflowError: it is no port."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
