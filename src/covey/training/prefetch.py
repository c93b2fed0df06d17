"""Where the groups of a step come from: sampled when they are needed, or prefetched in a thread beside the update.

With `schedule.max_staleness=1` and `stale_groups="wait"` (v0, v1, ... are the weights after 0, 1, ... updates):

    thread   | sample 0, 1 with v0 |  sample 2 with v1  |  sample 3 with v2  |
    trainer  |       update on 0   |    update on 1     |    update on 2     |
                                publish v1           publish v2

so that each step but the first trains on samples that are one update old. The sampler holds one copy of the weights:
nothing is published while it is sampling.

Limits: one thread samples, in this process or through the client of a server, one step's groups at a time.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from covey.rollout.collect import Rollout
from covey.rollout.learning import Sampler
from covey.rollout.scoring import Logged
from covey.training.evaluate import count_answers, counted_completions, judged_completions
from covey.training.questions import Answers
from covey.training.schedule import ResolvedPhase, TrainerState
from covey.types import BoolArray, Progress


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """What a step trains on."""

    rollout: Rollout
    phase: ResolvedPhase
    position: int
    correct: BoolArray | None
    logged: Logged

    @property
    def accuracy(self) -> float | None:
        """Share of right completions among those judged, of discarded groups too, added ones not; None = unknown."""
        if self.correct is None:
            return None
        whole = self.rollout.whole
        right = self.correct[judged_completions(whole) & counted_completions(whole)]
        return float(right.mean()) if len(right) else None

    @property
    def answers(self) -> Answers:
        """Right and all completions of each question, the same."""
        return count_answers(self.rollout.whole, self.correct)

    def ages(self, version: int) -> list[int]:
        """Optimiser steps between the weights that sampled each group and `version`."""
        groups = self.rollout.groups
        return [version - min((e.policy_version for e in group.episodes), default=version) for group in groups]


class Source(Protocol):
    """What samples come from: a `GRPOTrainer`, which describes these. `sample_step` may be called from a thread."""

    state: TrainerState

    @property
    def engine(self) -> Sampler: ...

    def sample_step(self, phase: ResolvedPhase, position: int, version: int, progress: Progress) -> Sampled: ...

    def next_phase(self) -> ResolvedPhase: ...

    def steps_ahead(self) -> int: ...

    def publish(self) -> None: ...


class Samples:
    """Each step's groups, sampled when asked for from the weights then trained; for the training loop's thread."""

    def __init__(self, source: Source, progress: Progress) -> None:
        self._source, self._progress = source, progress

    def next(self) -> Sampled:
        """The groups of the next step."""
        source, state = self._source, self._source.state
        return source.sample_step(source.next_phase(), state.data_position, state.policy_version, self._progress)

    def before_update(self) -> None:
        """The update is about to begin, and may have the sampler's memory."""
        self._source.engine.release()

    def after_update(self) -> None:
        """The weights have changed and counters are about to: wait for what must not see that."""

    def publish(self) -> None:
        """Let what is sampled from now on have the new weights."""
        self._source.publish()

    def pause(self) -> None:
        """Return when nothing is being sampled and the sampler has the policy's weights, as an evaluation needs it."""

    def metrics(self) -> dict[str, float]:
        """Of the step, besides those of the groups; asked for once in each."""
        return {}

    def close(self) -> None:
        """End the thread, if there is one; waits until the completions under way are given up."""


class PrefetchedSamples(Samples):
    """Samples in a thread, up to `steps_ahead()` steps ahead; `_begun`: those not yet trained on, oldest first."""

    def __init__(self, source: Source, max_staleness: int, *, drop: bool) -> None:
        super().__init__(source, self._check)
        self._max_staleness, self._drop = max_staleness, drop
        self._position = source.state.data_position
        self._published = source.state.policy_version
        self._phase: ResolvedPhase
        self._waited = 0.0
        self._step: dict[str, float] = {}
        self._ended = False
        self._begun: deque[Future[Sampled]] = deque()
        # A new thread has torch's number of threads from whoever set it last; results must not depend on that.
        torch = sys.modules.get("torch")
        start: dict[str, Any] = {}
        if torch is not None:
            start = {"initializer": torch.set_num_threads, "initargs": (torch.get_num_threads(),)}
        self._thread = ThreadPoolExecutor(1, "covey-sampling", **start)

    def next(self) -> Sampled:
        """The oldest groups that may still be trained on."""
        began = time.perf_counter()
        source, dropped = self._source, 0
        self._phase = source.next_phase()
        while True:
            if dropped or not (self._begun and self._begun[0].done()):
                self.pause()  # what is sampled from now on has the newest weights
            while len(self._begun) < 1 + source.steps_ahead():
                self._begun.append(self._thread.submit(self._sample))
            sampled = self._begun.popleft().result()
            ages = sampled.ages(source.state.policy_version)
            if max(ages) <= self._max_staleness:
                break
            dropped += len(ages)
        self._step = staleness_metrics(ages, self._max_staleness) | {"staleness/dropped_groups": float(dropped)}
        self._waited = time.perf_counter() - began
        return sampled

    def before_update(self) -> None:
        """The sampler keeps its memory: it is sampling."""

    def after_update(self) -> None:
        """Without `drop`: everything that was begun with the old weights is sampled."""
        began = time.perf_counter()
        if not self._drop:
            wait(self._begun)
        self._waited += time.perf_counter() - began

    def publish(self) -> None:
        """The sampler has the new weights at once, or with `drop` later if it is busy."""
        if all(each.done() for each in self._begun):
            self._sync()

    def pause(self) -> None:
        """Nothing further is begun until `next`."""
        while len(self._begun) > 1 and self._begun[-1].cancel():
            self._begun.pop()
        wait(self._begun)
        if self._published != self._source.state.policy_version:
            self._sync()

    def metrics(self) -> dict[str, float]:
        """How old the step's groups are, and how long it waited for samples."""
        return self._step | {"time/waiting_for_samples": self._waited}

    def close(self) -> None:
        """What is under way is given up at the next completion that ends."""
        self._ended = True
        self._thread.shutdown(cancel_futures=True)

    def _sync(self) -> None:
        super().publish()
        self._published = self._source.state.policy_version

    def _sample(self) -> Sampled:
        """In the thread. `_published` and `_phase` may be read there: the first changes only while it is idle, and the
        second is replaced as a whole.
        """
        self._check()
        try:
            sampled = self._source.sample_step(self._phase, self._position, self._published, self._progress)
        except BaseException:
            self._ended = True  # what follows would be sampled from the wrong position; `next` raises this error first
            raise
        self._position = sampled.position
        return sampled

    def _check(self, done: int = 0, total: int = 0) -> None:
        if self._ended:
            raise EndedError


def staleness_metrics(ages: list[int], max_staleness: int) -> dict[str, float]:
    """Mean, maximum and histogram of the groups' ages in optimiser steps; `covey.metric_names` defines them."""
    counts = np.bincount(ages, minlength=max_staleness + 1)
    shares = {f"staleness/{age}": float(count / len(ages)) for age, count in enumerate(counts)}
    return {"staleness/mean": float(np.mean(ages)), "staleness/max": float(max(ages)), **shares}


class EndedError(Exception):
    """Raised in the thread where it is to end."""
