"""Sampling by the ranks that also train, in turns: each samples its share of the units, with its own engine.

Units are sampled alone, so the numbers are those of any other number of ranks. Agents' conversations are sampled turn
by turn, see `covey.distributed.units.RoundDevice`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from covey.distributed.ranks import Ranks
from covey.distributed.replicated import run_shared
from covey.distributed.units import Calls, RoundDevice, make_units
from covey.pytorch.engine import Engine
from covey.pytorch.models.lora import pictures_in
from covey.rollout.learning import Weights
from covey.rollout.turns import Session
from covey.types import Completion, Progress, Request, SamplingSettings


class RankSampler:
    """A rank's engine, which samples its share of the units."""

    def __init__(self, engine: Engine, policy: Any, ranks: Ranks) -> None:
        self.engine, self.policy, self._ranks = engine, policy, ranks

    def identity(self, weights: Weights) -> tuple[int, str]:
        """What `publish` is called with."""
        return weights.version, weights.sha256

    def publish(self, version: int, sha256: str) -> None:
        """Take the policy's weights, which are to have this hash; if they have not, those of rank 0 first."""
        own = self.policy.weights(version)
        if not all(self._ranks.gather(own.sha256 == sha256)):  # rank 0 has loaded others, the best of the run
            leading, *_ = self._ranks.gather(self.policy.state_dict() if self._ranks.rank == 0 else None)
            if self._ranks.rank > 0:
                self.policy.load_state_dict(leading)
        self.engine.publish(self.policy.weights(version))

    def release(self) -> None:
        self.engine.release()

    def sample(self, calls: Calls, policy_version: int, progress: Progress | None = None) -> list[list[Completion]]:
        """Completions of each call; every rank calls it and samples its share."""
        sizes = [sum(len(request.token_ids) for request in requests) for requests, _ in calls]
        total = sum(len(requests) for requests, _ in calls)

        def work(numbers: list[int]) -> Iterator[list[Completion]]:
            over = 0

            def tell(done: int, _: int) -> None:
                if progress is not None:
                    progress(over + done, total)

            for number in numbers:
                own, settings = calls[number]
                yield self.engine(own, settings, policy_version=policy_version, progress=tell)
                over += len(own)

        return run_shared(self._ranks, sizes, work)


class LeadingSampler:
    """Rank 0's sampler: all ranks sample when it is called. See `covey.rollout.learning.Sampler`."""

    cuts_units = True

    def __init__(self, own: RankSampler, ranks: Ranks, unit_size: int) -> None:
        self._own, self._ranks, self._unit_size = own, ranks, unit_size
        self.context_length = own.engine.context_length

    def publish(self, weights: Weights) -> None:
        what = self._own.identity(weights)
        with self._ranks.telling(("sampler", "publish", what, {})):
            self._own.publish(*what)

    def release(self) -> None:
        with self._ranks.telling(("sampler", "release", (), {})):
            self._own.release()

    def close(self) -> None:
        """The engine stays ready."""
        self._own.engine.close()

    def __call__(
        self,
        requests: Sequence[Request],
        settings: SamplingSettings,
        *,
        policy_version: int,
        progress: Progress | None = None,
    ) -> list[Completion]:
        calls = [(list(unit), settings) for unit in make_units(requests, self._unit_size)]
        return [each for found in self._sample(calls, policy_version, progress) for each in found]

    def _sample(self, calls: Calls, version: int, progress: Progress | None = None) -> list[list[Completion]]:
        read = (request.token_ids for requests, _ in calls for request in requests)
        pictures = pictures_in(self._own.policy.model, read)
        with self._ranks.telling(("sampler", "sample", (calls, version), {}), pictures):
            return self._own.sample(calls, version, progress)

    def session(
        self, settings: SamplingSettings, *, policy_version: int, own_tokens: int, **room: Any
    ) -> Session[RoundDevice]:
        """Conversations of several turns, in rounds on all ranks."""
        sample = partial(self._sample, version=policy_version)
        device = RoundDevice(sample, self.context_length, own_tokens, self._unit_size)
        return Session(device, settings, policy_version=policy_version)
