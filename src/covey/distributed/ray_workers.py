"""Reward functions in Ray actors, which hold no model: Ray places them on any machine, and replaces those that die."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray

from covey.config.whole import GRPOConfig
from covey.distributed.guards import installed
from covey.distributed.members import START_SECONDS, MemberError
from covey.distributed.ray_cluster import CPUS, await_room, connect, get_result, kill
from covey.distributed.reward_workers import Answer, Piece, RewardHost, Rewards, placed
from covey.errors import ConfigError, RewardError, ServingError

_NUMBERS = ("python", "covey", "numpy")
"""What must be alike here and there."""
_MOST_TRIES = 3
"""Rows that as many workers fail at are taken to be what makes them fail."""


class RewardActors:
    """Actors that score pieces, started when they are needed. Raises ConfigError or ServingError: they cannot be."""

    def __init__(self, config: GRPOConfig, rewards: Rewards, timeout_seconds: float) -> None:
        self._config, self._rewards, self._timeout = config, rewards, timeout_seconds
        self._start()

    def _start(self) -> None:
        chosen, count = self._config.distributed, self._config.distributed.reward_workers or 0
        self._actors: list[Any] = []
        self._own = connect(chosen.ray_address, chosen.actors)
        try:
            await_room(f"distributed.reward_workers={count}", count * CPUS, 0.0)
            host: Any = ray.remote(num_cpus=CPUS, max_restarts=-1, max_task_retries=_MOST_TRIES - 1)(RewardHost)
            spread = host.options(scheduling_strategy="SPREAD")
            self._actors = [spread.remote(self._rewards) for _ in range(count)]
            here = installed()
            for told in [actor.start.remote() for actor in self._actors]:
                where, there = get_result(told, max(self._timeout, START_SECONDS))
                for package in _NUMBERS:
                    if there[package] != here[package]:
                        raise ConfigError(
                            f"distributed.reward_workers: {where} has {package} {there[package]}, this process has "
                            f"{here[package]}; install the same on every machine"
                        )
        except BaseException as error:
            self.close()
            if isinstance(error, MemberError):
                raise ServingError(f"a reward worker cannot be started: {error}") from error
            raise

    def score(self, pieces: Sequence[Piece]) -> list[Answer]:
        """The pieces' rewards, each from the next free worker. Raises RewardError, also where workers die or hang."""
        if not self._actors:
            self._start()
        idle, waiting, calls = list(self._actors), list(range(len(pieces))), dict[Any, tuple[int, Any]]()
        found, silent = dict[int, Answer](), 0
        while len(found) < len(pieces):
            while idle and waiting:
                number, actor = waiting.pop(0), idle.pop(0)
                calls[actor.score.remote(pieces[number].asked)] = number, actor
            over, _ = ray.wait(list(calls), timeout=self._timeout)
            silent = 0 if over else silent + 1
            if silent == _MOST_TRIES:
                number = min(number for number, _ in calls.values())
                raise _hopeless(pieces[number], f"silent for {self._timeout:g} s (distributed.timeout_seconds)")
            for _, actor in () if over else calls.values():  # Ray starts them anew, and asks them again
                with suppress(Exception):
                    ray.kill(actor, no_restart=False)
            for call in over:
                number, actor = calls.pop(call)
                try:
                    found[number] = get_result(call, self._timeout)
                except RewardError as error:
                    raise placed(error, pieces[number].first) from error
                except MemberError as error:
                    raise _hopeless(pieces[number], f"{error}") from error
                idle.append(actor)
        return [found[number] for number in range(len(pieces))]

    def close(self) -> None:
        """End the actors; who has connected to the cluster leaves it."""
        for actor in self._actors if ray.is_initialized() else ():
            kill(actor)
        if self._own and ray.is_initialized():
            ray.shutdown()
        self._actors, self._own = [], False


def _hopeless(piece: Piece, why: str) -> RewardError:
    rows = ", ".join(sorted({prompt.uid for prompt in piece.asked.prompts}))
    return RewardError(
        f"{_MOST_TRIES} reward workers failed one after another while they scored the same completions, of the rows "
        f"{rows:.300}; the last one: {why:.1000}"
    )


def pickled(functions: Sequence[Any]) -> bytes:
    """Reward functions by value. Raises ConfigError: one cannot be sent to another process."""
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
