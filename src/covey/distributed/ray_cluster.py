"""A Ray cluster: joining it, what its nodes are, and calls of its actors with errors as the rest of Covey says them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray._private.services import canonicalize_bootstrap_address
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from covey.config.whole import GRPOConfig
from covey.distributed import guards
from covey.distributed.guards import PACKAGES, PROCESS_BYTES, Facts, Node, facts_here, has_room, installed, reach
from covey.distributed.members import MemberError
from covey.errors import ConfigError, CoveyError
from covey.processes import total_memory

CPUS = 1.0
"""That a process takes of its node."""
PROBE_SECONDS = 20.0
"""That a node has to start a process and answer."""
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
_LOCAL_MARK = "covey-local"
"""Resource of a Ray that ends with the run that has started it: no cluster for others."""
_LOCAL_STORE_BYTES = 200 << 20


def connect(address: str, actors: int, stored_bytes: int = 0) -> bool:
    """Connect to a cluster; True if that was done here, so that it must be left here."""
    if ray.is_initialized():
        return False
    if not join(address):
        if actors * PROCESS_BYTES > total_memory():
            raise ConfigError(
                f"{actors} Ray actors on this machine: a process takes {PROCESS_BYTES / 1e9:.1f} GB at the least, and "
                f"there are {total_memory() / 1e9:.1f} GB; use fewer, or a cluster (distributed.ray_address)"
            )
        here = {"num_cpus": max(os.cpu_count() or 1, actors), "resources": {_LOCAL_MARK: 1}}
        store = int(max(_LOCAL_STORE_BYTES, 1.2 * stored_bytes))
        _init("local", object_store_memory=store, include_dashboard=False, **here)
    return True


def join(address: str) -> bool:
    """Connect to the cluster of `distributed.ray_address`; False where there is none. Raises ConfigError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray will do in its next version
    known = (os.environ.get("RAY_ADDRESS") or address) if address == "auto" else address
    if known == "local":
        return False
    if known == "auto":
        try:
            found = canonicalize_bootstrap_address("auto")
            if found is None:
                return False
            reach(found)  # it may be somebody's who has just ended, and Ray would wait for it
            _init(found)
        except (ConnectionError, OSError, RuntimeError):
            return False
        if is_local():
            ray.shutdown()
            return False
        return True
    _require_reachable(known)
    try:
        _init(known)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        token = "is that RAY_AUTH_TOKEN the cluster's? " if os.environ.get("RAY_AUTH_MODE") == "token" else ""
        raise ConfigError(
            f"distributed.ray_address={known!r:.200}: Ray does not connect ({error!s:.300}); {token}One that asks for "
            "a token is given it by RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        ) from error
    return True


def is_local() -> bool:
    """Whether this is a Ray that a run has started for itself; learners are torchrun's then."""
    return _LOCAL_MARK in ray.cluster_resources()


def _init(address: str, **settings: Any) -> None:
    """`ray.init`, which takes SIGTERM for itself, where nobody waits for that."""
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(address=address, **settings, **_QUIET)
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _require_reachable(address: str) -> None:
    """Ray tries for minutes where nobody listens."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "://" in address:
        raise ConfigError(
            f"distributed.ray_address={address!r:.200}: must be auto, local or HOST:PORT, as `ray start --head` prints "
            "it; from outside of a cluster, use ray job submit"
        )
    try:
        reach(address)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"distributed.ray_address={address!r:.200}: no cluster answers there ({error}); start one with "
            "ray start --head, or use auto"
        ) from error


def nodes_there() -> list[Node]:
    """The nodes that live."""
    kinds = ("CPU", "GPU", "object_store_memory", "memory")
    living = [node for node in ray.nodes() if node["Alive"]]
    return [Node(node["NodeID"], *(node["Resources"].get(kind, 0.0) for kind in kinds)) for node in living]


def with_facts(nodes: Sequence[Node], model: str) -> list[Node]:
    """The nodes that run a task, with what they are. Raises ConfigError: one does not run a task in time."""
    here = ray.get_runtime_context().get_node_id()
    probe: Any = ray.remote(num_cpus=0, max_retries=0)(_make_probe())
    there = {node.name: NodeAffinitySchedulingStrategy(node.name, soft=False) for node in nodes if node.name != here}
    asked = {n: probe.options(scheduling_strategy=at).remote(list(PACKAGES), model) for n, at in there.items()}
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
            versions, told = ray.get(asked[node.name], timeout=PROBE_SECONDS)
        except RayError:
            continue
        if isinstance(told, str) and versions.get("covey"):
            raise ConfigError(
                f"Ray node {node.name} cannot import Covey ({told:.300}); install it there as it is here, such as with "
                "one container image"
            )
        facts = None if isinstance(told, str) else Facts(**told)
        found.append(replace(node, versions=versions, facts=facts))
    return found


def _make_probe() -> Any:
    """A function that is sent by value, so that it runs where Covey is missing."""

    def probe(names: Sequence[str], model: str) -> tuple[dict[str, str], Any]:
        import platform
        from importlib import metadata

        found = {"python": platform.python_version()}
        for name in names:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = ""
        try:
            from covey.distributed.guards import facts_here

            return found, facts_here(model)
        except Exception as error:  # whatever an import can do there
            return found, f"{type(error).__name__}: {error}"

    return probe


def check_cluster(config: GRPOConfig, learners: int) -> tuple[list[Node], list[str]]:
    """Refuse a cluster that does not do for what a run places there."""
    nodes, model, allowed = nodes_there(), config.model.model, config.run.allow_mixture
    samplers, of_sampler = config.distributed.samplers or 0, guards.gpus_of_sampler(config, nodes)
    of_learner = guards.gpus_of_learner(config, nodes)
    gpus = of_learner if learners else of_sampler

    def check_places() -> None:
        guards.check_room(nodes, "learners", learners, CPUS, of_learner)
        guards.check_room(nodes, "samplers", samplers, CPUS, of_sampler)

    check_places()
    nodes = with_facts(nodes, model)
    check_places()
    differences, versions = list[str](), installed()
    for node in nodes:
        if node.versions is not None and has_room(node, CPUS, gpus):
            differences += guards.check_versions(f"Ray node {node.name}", node.versions, versions, "this process")
    own = Facts(**facts_here(model))
    others = {f"Ray node {node.name}": node.facts for node in nodes if node.facts is not None}
    guards.check_models(model, own, others)
    with_gpus = {name: facts for name, facts in others.items() if facts.gpus or not gpus}
    said = guards.check_mixture([*differences, *guards.mixtures(own, with_gpus, gpus=gpus > 0)], allowed=allowed)
    if not gpus:
        guards.check_memory(nodes, learners + samplers, CPUS, own.model_bytes + PROCESS_BYTES)
    counts = {"learners": learners, "samplers": samplers}
    what = " and ".join(f"{name}={count}" for name, count in counts.items() if count) or "samplers=0"
    await_room(f"distributed.{what}", (learners + samplers) * CPUS, learners * of_learner + samplers * of_sampler)
    return nodes, said


def await_room(what: str, cpus: float, gpus: float) -> None:
    """Wait for what somebody has who has just ended. Raises ConfigError: it is not free; `what` is the setting."""
    deadline = time.monotonic() + PROBE_SECONDS
    while True:
        free = ray.available_resources()
        lacking = [
            f"{needed:g} {kind}, {free.get(kind, 0.0):g} are free"
            for kind, needed in (("CPU", cpus), ("GPU", gpus))
            if free.get(kind, 0.0) < needed
        ]
        if not lacking:
            return
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{what}: needs {' and '.join(lacking)}: others use the Ray cluster; wait for them, or use fewer"
            )
        time.sleep(0.5)


def kill(actor: Any) -> None:
    """End an actor, whatever it is doing."""
    with suppress(Exception):  # it, or Ray, has ended before
        ray.kill(actor, no_restart=True)


def get_result(ref: Any, seconds: float) -> Any:
    """What a call has returned, with errors as `Member` says them."""
    try:
        return ray.get(ref, timeout=seconds)
    except RayError as error:
        raise translated(error) from error


def answer_of(call: Any, *arguments: Any) -> Future[Any]:
    """A call of an actor as a future, with errors as `Member` says them."""
    found: Future[Any] = Future()

    def over(answer: Future[Any]) -> None:
        error = answer.exception()
        if error is None:
            found.set_result(answer.result())
        else:
            found.set_exception(translated(error))

    try:
        call(*arguments).future().add_done_callback(over)
    except RayError as error:
        found.set_exception(translated(error))
    return found


def translated(error: BaseException) -> BaseException:
    """What was wrong inside an actor, or with it."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, CoveyError | MemberError):
        return cause
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [""]
    text = lines[0] if "Traceback" not in str(cause) else lines[-1]
    return MemberError(f"{type(cause).__name__}: {text}")
