"""From the settings to what samples: an engine, a server, or a fleet of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

from covey.backend import Backend
from covey.config import GRPOConfig
from covey.distributed.fleet import Fleet
from covey.distributed.members import LocalMember, done
from covey.distributed.pool import Maker
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
    train = "1 process trains" if chosen.learners == 1 else f"{chosen.learners} processes train"
    who = f"{len(urls)} servers sample" if to_servers else f"{chosen.samplers} Ray actors sample"
    if not to_servers and not chosen.samplers:
        who = "the same process samples" if chosen.learners == 1 else "the same processes sample"
    size = f"{chosen.groups_per_unit} x {config.sampling.num_generations} completions"
    return f"{train}, {who}, in units of {size}"


def _actors(config: GRPOConfig, policy: TrainedPolicy) -> Fleet:
    try:
        from covey.distributed.ray_members import Cluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            f"distributed.samplers={config.distributed.samplers}: Ray is not installed; run pip install 'covey[ray]', "
            "or set it to 0"
        ) from error
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
