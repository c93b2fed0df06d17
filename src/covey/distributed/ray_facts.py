"""What the nodes of a Ray cluster are: each that may run a part of the run is asked by a task of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from covey.config import GRPOConfig
from covey.distributed.machines import (
    Facts,
    check_mixture,
    check_models,
    clock_ahead,
    clock_warnings,
    facts_here,
    mixtures,
)
from covey.distributed.preflight import PACKAGES, Node, check_alike, check_memory, check_room, installed
from covey.errors import ConfigError

PROBE_SECONDS = 20.0
"""That a node has to start a process and answer."""


def with_facts(nodes: Sequence[Node], model: str = "") -> list[Node]:
    """The nodes that run a task, with what is installed there and what they are.

    Args:
        nodes: those that live; the one of this process, which knows itself, stays as it is.
        model: as `model.model` names it; "" = it is not looked at.

    Returns:
        Without those that have died meanwhile: Ray lists them for a while.

    Raises:
        ConfigError: one does not run a task in time.
    """
    here = ray.get_runtime_context().get_node_id()
    probe: Any = ray.remote(num_cpus=0, max_retries=0)(_make_probe())
    began = time.time()
    asked = {
        node.name: probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.name, soft=False)).remote(
            list(PACKAGES), model
        )
        for node in nodes
        if node.name != here
    }
    if not asked:
        return list(nodes)
    _, late = ray.wait(list(asked.values()), num_returns=len(asked), timeout=PROBE_SECONDS)
    silent = [name for name, ref in asked.items() if ref in late]
    if silent:
        raise ConfigError(
            f"Ray node {silent[0]} does not run a task within {PROBE_SECONDS:g} s ({len(silent)} of {len(nodes)} "
            "nodes); look at it with ray status"
        )
    found: list[Node] = []
    for node in nodes:
        if node.name == here:
            found.append(node)
            continue
        try:
            versions, clock, told = ray.get(asked[node.name], timeout=PROBE_SECONDS)
        except RayError:
            continue
        if isinstance(told, str) and versions.get("covey"):
            raise ConfigError(
                f"Ray node {node.name} cannot import Covey ({told:.300}); install it there as it is here, such as with "
                "one container image"
            )
        facts = None if isinstance(told, str) else Facts(**told, clock=clock_ahead(clock, began, time.time()))
        found.append(replace(node, versions=versions, facts=facts))
    return found


def _make_probe() -> Any:
    """A function that is sent by value, so that it runs where Covey is missing."""

    def probe(names: Sequence[str], model: str) -> tuple[dict[str, str], float, Any]:
        import platform
        import time
        from importlib import metadata

        clock, found = time.time(), {"python": platform.python_version()}
        for name in names:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = ""
        try:
            from covey.distributed.machines import facts_here

            return found, clock, facts_here(model) if model else {}
        except Exception as error:  # whatever an import can do there
            return found, clock, f"{type(error).__name__}: {error}"

    return probe


def check_cluster(config: GRPOConfig, nodes: Sequence[Node], cpus: float, gpus: float) -> tuple[list[Node], list[str]]:
    """Refuse a cluster that does not do for a run's samplers.

    Args:
        config: of the run.
        nodes: those that live.
        cpus: that a sampler takes of one node.
        gpus: the same.

    Returns:
        The nodes that answer, and what is to be said of them.

    Raises:
        ConfigError: they have no room, other versions, another model, or differ in what numbers depend on.
    """
    samplers, model, allowed = config.distributed.samplers or 0, config.model.model, config.run.allow_mixture
    check_room(nodes, samplers, cpus, gpus)
    nodes = with_facts(nodes, model)
    check_room(nodes, samplers, cpus, gpus)
    said = check_alike(nodes, installed(), cpus, gpus, allow_mixture=allowed)
    own = Facts(**facts_here(model))
    others = {f"Ray node {node.name}": node.facts for node in nodes if node.facts is not None}
    check_models(model, own, others)
    with_gpus = {name: facts for name, facts in others.items() if facts.gpus or not gpus}
    said += check_mixture(mixtures(own, with_gpus, gpus=gpus > 0), allowed=allowed)
    if not gpus:
        check_memory(nodes, samplers, cpus, own.model_bytes)
    return nodes, said + clock_warnings(others)
