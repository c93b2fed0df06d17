"""Actors that hold no model: reward workers, and worlds. Ray places them on any machine of the cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

import ray

from covey.config.whole import GRPOConfig
from covey.distributed.members import START_SECONDS, MemberError, in_thread
from covey.distributed.preflight import installed
from covey.distributed.ray_cluster import CPUS, answer_of, await_room, connect, get_result, kill, leave
from covey.distributed.reward_workers import Warnings
from covey.distributed.world_workers import Script
from covey.environments.pool import Found
from covey.errors import ConfigError
from covey.rollout.scoring import Asked, Scored

M = TypeVar("M")
_NUMBERS = ("python", "covey", "numpy")
"""What must be alike here and there."""
_CONNECT_SECONDS = 5.0


class RayWorker:
    """An actor, whose calls are futures."""

    def __init__(self, actor: Any, about: dict[str, Any]) -> None:
        self.actor, self.pid = actor, int(about["pid"])
        self._here = about["node"] == ray.get_runtime_context().get_node_id()
        self.name = f"process {self.pid} on {about['host']}"

    def watch(self) -> None:
        """Ray says at once when it dies."""

    def stop(self, *, failed: bool) -> None:
        """Kill the process; one on this machine even if it takes no message any more."""
        kill(self.actor)
        if failed and self._here:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


class RayRewards(RayWorker):
    """See `covey.distributed.reward_workers.RewardMember`."""

    def score(self, asked: Asked) -> Future[tuple[Scored, Warnings]]:
        """One call of the actor."""
        return answer_of(self.actor.score.remote, asked)


class RayWorlds(RayWorker):
    """See `covey.distributed.world_workers.WorldMember`."""

    def play(self, place: int, script: Script) -> Future[Found]:
        """One call of the actor, beside those for its other places."""
        return answer_of(self.actor.play.remote, place, script)


class Workers(Generic[M]):
    """Starts actors of one kind in the cluster.

    Raises:
        ConfigError: the cluster cannot be reached, or has no room.
    """

    def __init__(
        self,
        config: GRPOConfig,
        setting: str,
        host: type,
        arguments: Sequence[Any],
        member: Callable[[Any, dict[str, Any]], M],
        *,
        calls: int = 1,
    ) -> None:
        self._config, self._setting = config, setting
        self._host, self._arguments, self._member, self._calls = host, arguments, member, calls
        self._own = self._connected = False
        self._session = 0
        self._actors: list[Any] = []
        self._starting: list[Future[Any]] = []
        self._connect()
        try:
            count = getattr(config.distributed, setting)
            await_room(f"distributed.{setting}={count}", count * CPUS, 0.0)
        except BaseException:
            self.close()
            raise

    def make(self, again: bool) -> Future[M]:
        """Start an actor; it waits for a place in the cluster if one was lost."""
        started = in_thread(partial(self._start, self._session))
        self._starting = [*(future for future in self._starting if not future.done()), started]
        return started

    def close(self) -> None:
        """End the actors; who has connected to the cluster leaves it. Actors may be started again after it."""
        self._session += 1
        for actor in self._actors if ray.is_initialized() else ():
            kill(actor)
        self._actors = []
        wait(self._starting, timeout=_CONNECT_SECONDS)  # a call of Ray's after its end would start it again
        if self._own and ray.is_initialized():
            leave()
        self._own = self._connected = False

    def _connect(self) -> None:
        if not self._connected or not ray.is_initialized():
            self._own = connect(self._config.distributed.ray_address, self._config.distributed.actors)
            self._connected = True

    def _start(self, session: int) -> M:
        def node() -> str:  # sent by value: an actor need not import this file, and torch with it
            import ray

            return str(ray.get_runtime_context().get_node_id())

        if session != self._session:
            raise MemberError("the run is over")
        self._connect()
        options = {"num_cpus": CPUS, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": self._calls}
        made: Any = ray.remote(self._host)
        actor = made.options(scheduling_strategy="SPREAD", **options).remote(*self._arguments)
        self._actors.append(actor)
        try:
            about = get_result(actor.start.remote(node), max(START_SECONDS, self._config.distributed.timeout_seconds))
            there, here = about["versions"], installed()
            for package in _NUMBERS:
                if there[package] != here[package]:
                    raise ConfigError(
                        f"distributed.{self._setting}: {about['host']} has {package} {there[package]}, this process "
                        f"has {here[package]}; install the same on every machine"
                    )
            return self._member(actor, about)
        except BaseException:
            kill(actor)
            raise


def pickled(functions: Sequence[Any]) -> bytes:
    """Reward functions by value.

    Raises:
        ConfigError: one cannot be sent to another process.
    """
    for function in functions:
        try:
            ray.cloudpickle.dumps(function)
        except Exception as error:
            raise ConfigError(
                f"distributed.reward_workers: the reward function {function!r:.100} cannot be sent to another process "
                f"({type(error).__name__}: {error!s:.200}); name it in rewards.functions (file.py:function), so that "
                "workers make their own, or set reward_workers to none"
            ) from error
    return bytes(ray.cloudpickle.dumps(list(functions)))
