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
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np

from covey.rollout.collect import Rollout
from covey.rollout.learning import Sampler
from covey.rollout.scoring import Logged
from covey.training.evaluate import Answers, count_answers, counted_completions, judged_completions
from covey.training.schedule import ResolvedPhase
from covey.training.state import TrainerState
from covey.types import BoolArray, Progress

T = TypeVar("T")


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
        """Share of right completions among those judged, those of discarded groups included and what groups were grown
        by not; None where unknown.
        """
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
        return [
            version - min((episode.policy_version for episode in group.episodes), default=version)
            for group in self.rollout.groups
        ]


class Source(Protocol):
    """What samples come from: a `GRPOTrainer`."""

    state: TrainerState
    engine: Sampler

    def sample_step(self, phase: ResolvedPhase, position: int, version: int, progress: Progress) -> Sampled:
        """Groups for one step from a position in the data on; may be called from another thread."""
        ...

    def next_phase(self) -> ResolvedPhase:
        """The phase in force for the next step."""
        ...

    def steps_ahead(self) -> int:
        """How many steps after the next one may be sampled before it is trained on."""
        ...

    def publish(self) -> None:
        """Give the policy's weights to the sampler."""
        ...


class Samples(Protocol):
    """The samples of a run, step by step. All methods are called by the training loop's thread."""

    def next(self) -> Sampled:
        """The groups of the next step.

        Raises:
            CoveyError: as sampling and scoring of this step raised it.
        """
        ...

    def before_update(self) -> None:
        """The update is about to begin."""
        ...

    def after_update(self) -> None:
        """The weights have changed and counters are about to: wait for what must not see that."""
        ...

    def publish(self) -> None:
        """Let what is sampled from now on have the new weights."""
        ...

    def pause(self) -> None:
        """Return when nothing is being sampled and the sampler has the policy's weights, as an evaluation needs it."""
        ...

    def metrics(self) -> dict[str, float]:
        """Of the step, besides those of the groups; asked for once in each."""
        ...

    def close(self) -> None:
        """End the thread, if there is one; waits until the completions under way are given up."""
        ...


class DirectSamples:
    """Each step's groups are sampled when they are asked for, from the weights that are then trained."""

    def __init__(self, source: Source, progress: Progress) -> None:
        self._source, self._progress = source, progress

    def next(self) -> Sampled:
        """The groups are sampled now."""
        source, state = self._source, self._source.state
        return source.sample_step(source.next_phase(), state.data_position, state.policy_version, self._progress)

    def before_update(self) -> None:
        """The update may have the sampler's memory."""
        self._source.engine.release()

    def after_update(self) -> None:
        """There is nothing to wait for."""

    def publish(self) -> None:
        """The sampler has the new weights at once."""
        self._source.publish()

    def pause(self) -> None:
        """Nothing is ever under way between two steps, and the sampler has the newest weights."""

    def metrics(self) -> dict[str, float]:
        """There are none besides those of the groups."""
        return {}

    def close(self) -> None:
        """There is no thread to end."""


class PrefetchedSamples:
    """Groups are sampled in a thread, at most `source.steps_ahead()` steps before they are trained on."""

    def __init__(self, source: Source, max_staleness: int, *, drop: bool) -> None:
        self._source, self._max_staleness, self._drop = source, max_staleness, drop
        self._position = source.state.data_position
        self._published = source.state.policy_version
        self._phase: ResolvedPhase
        self._waited = 0.0
        self._step: dict[str, float] = {}
        self._thread = Worker(self._sample)

    def next(self) -> Sampled:
        """The oldest groups that may still be trained on."""
        began = time.perf_counter()
        source, dropped = self._source, 0
        self._phase = source.next_phase()
        while True:
            if dropped or not self._thread.ready:
                self.pause()  # what is sampled from now on has the newest weights
            sampled = self._thread.take(ahead=source.steps_ahead())
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
            self._thread.finish()
        self._waited += time.perf_counter() - began

    def publish(self) -> None:
        """The sampler has the new weights at once, or with `drop` later if it is busy."""
        if self._thread.idle:
            self._sync()

    def pause(self) -> None:
        """Nothing further is begun until `next`."""
        self._thread.hold()
        if self._published != self._source.state.policy_version:
            self._sync()

    def metrics(self) -> dict[str, float]:
        """How old the step's groups are, and how long it waited for samples."""
        return self._step | {"time/waiting_for_samples": self._waited}

    def close(self) -> None:
        """What is under way is given up at the next completion that ends."""
        self._thread.close()

    def _sync(self) -> None:
        self._source.publish()
        self._published = self._source.state.policy_version

    def _sample(self) -> Sampled:
        """In the thread. `_published` and `_phase` may be read there: the first changes only while it is idle, and the
        second is replaced as a whole.
        """

        def progress(done: int, total: int) -> None:
            self._thread.check()

        sampled = self._source.sample_step(self._phase, self._position, self._published, progress)
        self._position = sampled.position
        return sampled


def staleness_metrics(ages: list[int], max_staleness: int) -> dict[str, float]:
    """Mean, maximum and histogram of the groups' ages in optimiser steps; `covey.metric_names` defines them."""
    counts = np.bincount(ages, minlength=max_staleness + 1)
    shares = {f"staleness/{age}": float(count / len(ages)) for age, count in enumerate(counts)}
    return {"staleness/mean": float(np.mean(ages)), "staleness/max": float(max(ages)), **shares}


class EndedError(Exception):
    """Raised in the thread by `Worker.check` when it is to end."""


class Worker(Generic[T]):
    """Calls `produce` again and again in a daemon thread, as often as it may, and hands the results over in order.

        worker.take(ahead=1)  # begins the calls 0 and 1, returns the result of 0 when it is there
        worker.finish()       # returns when 1 has ended
        worker.take(ahead=1)  # begins 2, returns the result of 1

    After an error nothing further is begun; `take` raises it once the results before it are taken.
    """

    def __init__(self, produce: Callable[[], T]) -> None:
        self._produce = produce
        self._changed = threading.Condition()
        self._results: deque[T] = deque()
        self._error: BaseException | None = None
        self._begun = self._allowed = self._taken = 0
        self._running = self._closing = False
        # A new thread has torch's number of threads from whoever set it last; results must not depend on that.
        torch = sys.modules.get("torch")
        self._same_threads = None if torch is None else partial(torch.set_num_threads, torch.get_num_threads())
        self._thread = threading.Thread(target=self._run, name="covey-sampling", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """A result, or an error, waits to be taken."""
        with self._changed:
            return bool(self._results) or self._error is not None

    @property
    def idle(self) -> bool:
        """Nothing runs, and nothing will before the next `take`."""
        with self._changed:
            return self._is_idle()

    def take(self, *, ahead: int) -> T:
        """The next result; up to `ahead` calls after it may be begun before it is asked for again.

        Raises:
            BaseException: what the call raised.
        """
        with self._changed:
            self._allowed = max(self._allowed, self._taken + 1 + ahead)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._results or self._error is not None)
            if not self._results:
                assert self._error is not None
                raise self._error
            self._taken += 1
            return self._results.popleft()

    def finish(self) -> None:
        """Return when all calls that may be begun have ended."""
        with self._changed:
            self._changed.wait_for(self._is_idle)

    def hold(self) -> None:
        """Begin no further call, and return when the one that runs has ended."""
        with self._changed:
            self._allowed = self._begun
            self._changed.wait_for(self._is_idle)

    def close(self) -> None:
        """End the thread. Returns when the call that runs has ended, which `check` makes soon."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def check(self) -> None:
        """To be called by `produce` now and then.

        Raises:
            EndedError: the thread is to end.
        """
        if self._closing:
            raise EndedError

    def _is_idle(self) -> bool:
        return not self._running and (self._begun >= self._allowed or self._error is not None)

    def _run(self) -> None:
        if self._same_threads is not None:
            self._same_threads()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or not self._is_idle())
                if self._closing:
                    return
                self._begun += 1
                self._running = True
            try:
                result = [self._produce()]
                error = None
            except BaseException as raised:  # the loop's thread raises it, whatever it is
                result, error = [], raised
            with self._changed:
                self._results.extend(result)
                self._error = error
                self._running = False
                self._changed.notify_all()
