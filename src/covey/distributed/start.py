"""From the settings to what samples: an engine, a server, or a fleet of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from covey.backend import Backend
from covey.config.whole import GRPOConfig
from covey.errors import ConfigError, several
from covey.rollout.scoring import Scorer

if TYPE_CHECKING:  # a run on one machine loads none of it
    from covey.distributed.fleet import Fleet, Maker
    from covey.rollout.learning import Sampler, TrainedPolicy

_GRACE_SECONDS = 5.0
"""Beyond its own time limits, that a worker has to say which reward function hangs."""


def make_sampler(config: GRPOConfig, backend: Backend, policy: TrainedPolicy) -> Sampler:
    """What samples: the backend's engine, servers in its place, or actors; several, or units, are a fleet.

    Raises ServingError: a server cannot be reached; ConfigError: there is no Ray, or its cluster does not do.
    """
    chosen, urls = config.distributed, config.server.urls
    if not config.server.upload_adapters_to_server:
        if chosen.samplers:
            return _actors(config, policy)
        own = backend.make_sampler(config, policy)
        if chosen.samplers is None or getattr(own, "cuts_units", False):
            return own
        from covey.distributed.members import LocalMember, done

        member = LocalMember(own)
        return _fleet(config, [lambda again: done(member)])
    from covey.distributed.servers import connect, make_member

    if chosen.samplers is None and len(urls) == 1:
        return connect(config, urls[0], policy.vocabulary)
    return _fleet(config, [partial(make_member, config, policy.vocabulary, number) for number in range(len(urls))])


def scale_scoring(config: GRPOConfig, scorer: Scorer, *, named: bool) -> None:
    """Let reward workers score in place of this process, where the settings ask for them."""
    chosen, count = config.distributed, config.distributed.reward_workers
    if count is None:
        return
    from covey.distributed.reward_workers import Rewards, RewardWorkers

    if all(spec.whole_batch for spec in scorer.specs):
        raise ConfigError(
            f"distributed.reward_workers={count}: {', '.join(scorer.names)} has whole_batch = True, so that it is "
            "called in this process: nothing is left for workers; set reward_workers to none"
        )
    unit_size = chosen.groups_per_unit * config.sampling.num_generations
    if count == 0:
        scorer.elsewhere = RewardWorkers.here(scorer, unit_size)
        return
    with needing_ray(f"distributed.reward_workers={count}", "none"):
        from covey.distributed.ray_workers import RewardActors, pickled
    rewards = Rewards.of(config, b"" if named else pickled([spec.function for spec in scorer.specs]))
    longest = len(scorer.specs) * config.rewards.reward_timeout + _GRACE_SECONDS
    actors = RewardActors(config, rewards, max(chosen.timeout_seconds, longest))
    scorer.elsewhere = RewardWorkers(actors.score, unit_size, actors.close)


def layout(config: GRPOConfig) -> str:
    """Who samples and who trains, in a sentence; "" for one process."""
    chosen, urls = config.distributed, config.server.urls
    to_servers = config.server.upload_adapters_to_server
    beside = f", scoring on {several(chosen.reward_workers, 'Ray actor')}" if chosen.reward_workers else ""
    if chosen.learners == 1 and chosen.samplers is None and not beside and not (to_servers and len(urls) > 1):
        return ""
    train = "1 process trains"
    if chosen.learners > 1:  # see `covey.training.launch.start_ranks`
        address = chosen.ray_address
        address = (os.environ.get("RAY_ADDRESS") or address) if address == "auto" else address
        known = {"auto": "Ray if this machine is part of a cluster, else by torchrun here", "local": "torchrun here"}
        starter = known.get(address, f"Ray on the cluster {address}")
        train = f"{chosen.learners} processes train (started by {starter})"
    who = "sampling on " + (several(len(urls), "server") if to_servers else several(chosen.samplers or 0, "Ray actor"))
    if not to_servers and not chosen.samplers:
        who = "the same process samples" if chosen.learners == 1 else "the same processes sample"
    size = f"{chosen.groups_per_unit} x {config.sampling.num_generations} completions"
    return f"{train}, {who}, in units of {size}{beside}"


def look_at_cluster(config: GRPOConfig) -> list[str]:
    """What a run with actors would find of its cluster, a line each, or the ConfigError that would refuse it."""
    chosen = config.distributed
    if not chosen.actors and chosen.learners == 1:
        raise ConfigError(
            "distributed.samplers and distributed.learners: nothing of this run is placed on a Ray cluster; set one, "
            "such as distributed.samplers=2"
        )
    with needing_ray(f"distributed.samplers={chosen.samplers}, distributed.learners={chosen.learners}"):
        from covey.distributed.ray_members import look_at_cluster
    return look_at_cluster(config)


@contextmanager
def needing_ray(setting: str, instead: str = "0") -> Iterator[None]:
    """Inside, a missing Ray is a ConfigError that names the setting, and what to set it to instead."""
    # A thread that starts an actor when the run has just left the cluster would join any other one by itself.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            f"{setting}: Ray is not installed; run pip install 'covey[ray]', or set it to {instead}"
        ) from error


def _actors(config: GRPOConfig, policy: TrainedPolicy) -> Fleet:
    with needing_ray(f"distributed.samplers={config.distributed.samplers}"):
        from covey.distributed.ray_members import Cluster
    cluster = Cluster(config, policy)
    return _fleet(config, [cluster.make] * (config.distributed.samplers or 0), cluster.close)


def _fleet(config: GRPOConfig, makers: list[Maker], closing: Callable[[], None] = lambda: None) -> Fleet:
    from covey.distributed.fleet import Fleet

    chosen = config.distributed
    return Fleet(
        makers,
        unit_size=chosen.groups_per_unit * config.sampling.num_generations,
        timeout_seconds=chosen.timeout_seconds,
        max_restarts=chosen.max_restarts,
        closing=closing,
    )
