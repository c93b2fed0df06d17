"""From the settings to what samples: an engine, a server, or a fleet of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from covey.backend import Backend
from covey.config import GRPOConfig
from covey.distributed.fleet import Fleet, Maker
from covey.distributed.members import LocalMember, done
from covey.errors import ConfigError
from covey.rollout.learning import Sampler, TrainedPolicy


def make_sampler(config: GRPOConfig, backend: Backend, policy: TrainedPolicy) -> Sampler:
    """What samples: the backend's engine, servers in its place, or actors; several, or units, are a fleet.

    Raises:
        ServingError: a server cannot be reached.
        ConfigError: there is no Ray, or its cluster does not do.
    """
    chosen, urls = config.distributed, config.server.urls
    if not config.server.upload_adapters_to_server:
        if chosen.samplers:
            return _actors(config, policy)
        own = backend.make_sampler(config, policy)
        if chosen.samplers is None or getattr(own, "cuts_units", False):
            return own
        member = LocalMember(own)
        return _fleet(config, [lambda again: done(member)])
    from covey.distributed.servers import connect, make_member

    if chosen.samplers is None and len(urls) == 1:
        return connect(config, urls[0], policy.vocabulary)
    return _fleet(config, [partial(make_member, config, policy.vocabulary, number) for number in range(len(urls))])


def layout(config: GRPOConfig) -> str:
    """Who samples and who trains, in a sentence; "" for one process."""
    chosen, urls = config.distributed, config.server.urls
    to_servers = config.server.upload_adapters_to_server
    if chosen.learners == 1 and chosen.samplers is None and not (to_servers and len(urls) > 1):
        return ""
    train = "1 process trains" if chosen.learners == 1 else f"{chosen.learners} processes train ({_starter(config)})"
    how = " with vLLM" if chosen.sampler_kind == "vllm" else ""
    who = f"{len(urls)} servers sample" if to_servers else f"{chosen.samplers} Ray actors sample{how}"
    if not to_servers and not chosen.samplers:
        who = "the same process samples" if chosen.learners == 1 else "the same processes sample"
    size = f"{chosen.groups_per_unit} x {config.sampling.num_generations} completions"
    return f"{train}, {who}, in units of {size}"


def _starter(config: GRPOConfig) -> str:
    """Who starts several learners; see `covey.distributed.launch.start_ranks`."""
    address = config.distributed.ray_address
    address = (os.environ.get("RAY_ADDRESS") or address) if address == "auto" else address
    if address == "auto":
        return "started by Ray if this machine is part of a cluster, else by torchrun here"
    return "started by torchrun here" if address == "local" else f"started by Ray on the cluster {address}"


def look_at_cluster(config: GRPOConfig) -> list[str]:
    """What a run with actors would find of its cluster, a line each; nothing is loaded or trained.

    Raises:
        ConfigError: the run has none, or it would be refused.
    """
    samplers = config.distributed.samplers
    if not samplers:
        raise ConfigError(
            f"distributed.samplers={'none' if samplers is None else samplers}: nothing of this run is placed on a Ray "
            "cluster; set it, such as distributed.samplers=2"
        )
    with _needing_ray(samplers):
        from covey.distributed.ray_members import look_at_cluster
    return look_at_cluster(config)


@contextmanager
def _needing_ray(samplers: int | None) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            f"distributed.samplers={samplers}: Ray is not installed; run pip install 'covey[ray]', or set it to 0"
        ) from error


def _actors(config: GRPOConfig, policy: TrainedPolicy) -> Fleet:
    with _needing_ray(config.distributed.samplers):
        from covey.distributed.ray_members import Cluster
    cluster = Cluster(config, policy)
    return _fleet(config, [cluster.make] * (config.distributed.samplers or 0), cluster.close)


def _fleet(config: GRPOConfig, makers: list[Maker], closing: Callable[[], None] = lambda: None) -> Fleet:
    chosen, told = config.distributed, config.to_dict()
    # what numbers depend on besides weights, requests and how tokens are drawn
    salt = hashlib.sha256(repr((told["model"], told["sampling"])).encode()).hexdigest()
    return Fleet(
        makers,
        unit_size=chosen.groups_per_unit * config.sampling.num_generations,
        timeout_seconds=chosen.timeout_seconds,
        max_restarts=chosen.max_restarts,
        keeps=chosen.keep_units,
        salt=salt,
        closing=closing,
    )
