"""The engine behind a queue: requests of many clients in one batch, and new weights between two decode steps.

One thread owns the engine. Everything else talks to it through `submit`, `cancel` and `upload`; answers come back
through callbacks on that thread. What it has done is told in Prometheus' text format.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import prometheus_client as prometheus

from covey.adapters import Adapter
from covey.errors import AdapterError, ConfigError, CoveyError, GenerationError
from covey.pytorch.engine import Engine
from covey.pytorch.engine.merge import AdaptedWeights, weights_of
from covey.rollout.drawing import check_choices, check_settings
from covey.rollout.learning import Weights
from covey.rollout.turns import REUSED_BLOCK
from covey.types import PICTURES, Completion, Request, SamplingSettings

_COUNTERS = {
    "completions": "completions sampled",
    "tokens": "tokens sampled",
    "prompt_tokens": "tokens of prompts taken on, each once for all completions that a request asks of it",
    "cancelled": "completions that nobody waited for any more",
    "failed": "completions that failed",
    "uploads": "adapters applied",
    "refused": "completions refused because the queue was full",
}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)


class Latencies:
    """Histograms of how long clients wait, in seconds."""

    def __init__(self) -> None:
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = prometheus.CollectorRegistry()
        made = partial(prometheus.Histogram, buckets=_SECONDS, registry=self.registry)
        self.queue = made("covey_queue_time_seconds", "seconds until a completion joins the batch")
        self.first_token = made("covey_time_to_first_token_seconds", "seconds until a completion's first token")
        self.request = made("covey_request_seconds", "seconds until a request is answered whole")


def prometheus_text(engine: Any) -> str:
    """The counts and latencies of a `BatchingEngine` in Prometheus' text format."""
    registry = prometheus.CollectorRegistry()
    for name, meaning in _COUNTERS.items():
        prometheus.Counter(f"covey_{name}", meaning, registry=registry).inc(getattr(engine.counts, name))
    running, waiting = engine.load
    reused = "tokens of prompts held and not computed, in whole blocks of each completion, since the last upload"
    for name, meaning, value in (
        ("running", "completions in the batch", running),
        ("waiting", "completions in the queue", waiting),
        ("policy_version", "version of the weights", engine.version),
        ("reused_tokens", reused, engine.counts.reused_tokens),
    ):
        prometheus.Gauge(f"covey_{name}", meaning, registry=registry).set(value)
    return "".join(prometheus.generate_latest(one).decode() for one in (registry, engine.latencies.registry))


log = logging.getLogger(__name__)

SwapMode = Literal["finish", "continue"]
"""Completions that run when an upload arrives finish under the old weights, or continue with the new."""
_MOST_KEPT_IDS = 1 << 22
"""Of one request: what `return_support` may hold in memory."""
_IDLE_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class Job:
    """One completion that was asked for, and how far it is."""

    request: Request
    settings: SamplingSettings
    on_end: Callable[[Answer | CoveyError], None]
    on_tokens: Callable[[list[int], list[float], int], None] | None = None
    weights: Weights | None = None
    row: Any = None
    told: int = 0
    begun: bool = False
    cancelled: bool = False
    over: bool = False
    since: float = field(default_factory=time.monotonic)
    kept: Counter[str] = field(default_factory=Counter)  # of its request
    pictures: Sequence[Any] = ()  # of its prompt, which are held as long as it runs


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A completion with the versions of its tokens."""

    completion: Completion
    versions: tuple[tuple[int, int], ...]


class QueueFullError(CoveyError):
    """As many completions wait as may."""


class VersionConflictError(CoveyError):
    """A version is asked for that the server does not hold, or uploaded that it has gone beyond or has otherwise."""


class NoWeightsError(CoveyError):
    """An upload failed half way, and so did bringing back the weights before it: nothing is sampled until the next."""


@dataclass(slots=True, eq=False)
class _Upload:
    adapter: Adapter
    version: int | None
    restart: bool
    done: Future[int] = field(default_factory=Future)


class BatchingEngine:
    """Serves the completions of many clients from one engine."""

    def __init__(
        self,
        engine: Engine,
        model: Any,
        *,
        max_rows: int = 64,
        max_completion_length: int = 1024,
        max_waiting: int = 1024,
        swap: SwapMode = "finish",
    ) -> None:
        self._engine, self._model, self._swap = engine, model, swap
        self._max_rows, self._max_waiting = max_rows, max_waiting
        self.context_length, self.max_completion_length = engine.context_length, max_completion_length
        self._lock = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._cancelled: list[Job] = []
        self._uploads: deque[_Upload] = deque()
        self._running: dict[int, Job] = {}
        self._session: Any = None
        self._stopping = False
        self.version, self.sha256 = 0, ""
        self.held: Weights | None = weights_of(model, 0)  # by the engine; None = nothing whole
        zeros = dict.fromkeys((*_COUNTERS, "reused_prompts", "reused_tokens"), 0)
        self.counts, self.latencies = SimpleNamespace(**zeros), Latencies()
        first = self._open()
        self.session_rows = first.device.slots
        self.longest_prompt = bisect_left(range(1, self.context_length), True, key=lambda n: not first.has_room_for(n))
        embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
        # ids that the model both reads and writes
        self.vocabulary = int(min(one.weight.shape[0] for one in embeddings if one is not None))
        self._thread = threading.Thread(target=self._serve, name="covey-engine", daemon=True)
        self._thread.start()

    @property
    def load(self) -> tuple[int, int]:
        """Completions that run and that wait."""
        return len(self._running), len(self._waiting)

    @property
    def healthy(self) -> bool:
        """The engine's thread is alive, and it has weights."""
        return self._thread.is_alive() and not self._stopping and self.held is not None

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the completions of one request, all or none. Those of one prompt share its array.

        Raises `QueueFullError`: too many wait already; `NoWeightsError`: there is nothing to sample from;
        `GenerationError`: one of them cannot be served, or the server is stopping.
        """
        for job in jobs:
            self._check(job)
        if self.held is None:
            raise NoWeightsError("the weights are incomplete after an upload that failed; upload again")
        with self._lock:
            if self._stopping or not self._thread.is_alive():
                raise GenerationError("the server is stopping")
            if len(self._waiting) + len(jobs) > self._max_waiting:
                self.counts.refused += len(jobs)
                count = len(self._waiting)
                raise QueueFullError(f"{count} completions wait and {self._max_waiting} may; try again later")
            self._waiting.extend(jobs)
            prompts = {id(job.request.token_ids): len(job.request.token_ids) for job in jobs}
            self.counts.prompt_tokens += sum(prompts.values())
            self._lock.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Nobody wants these any more: their places are free after the present decode step."""
        with self._lock:
            self._cancelled.extend(jobs)
            self._lock.notify()

    def upload(self, adapter: Adapter, version: int | None, *, restart: bool = False) -> Future[int]:
        """Replace the adapter between two decode steps. What is held under this version is not applied again."""
        upload = _Upload(adapter, version, restart)
        with self._lock:
            if self._stopping or not self._thread.is_alive():
                upload.done.set_exception(GenerationError("the server is stopping"))
                return upload.done
            if self._uploads or not self._settled(upload):  # what can be answered now holds up no completion
                self._uploads.append(upload)
                self._lock.notify()
        return upload.done

    def conflict(self, version: int | None, sha256: str, *, restart: bool) -> VersionConflictError | None:
        """Why an adapter cannot become `version` now; None if it can, or is it already."""
        if restart or version is None or version > self.version or self.holds(version, sha256):
            return None
        if version == self.version and self.held is None:
            return None
        what = "with other weights; nothing was changed" if version == self.version else "and does not go back"
        newer = "Upload a newer version, or say that a trainer begins again with restart=true"
        return VersionConflictError(
            f"policy_version={version} is uploaded; this server holds {self.version} {what}. {newer}"
        )

    def holds(self, version: int | None, sha256: str) -> bool:
        """Whether it samples from this adapter under this version."""
        return self.held is not None and version is not None and (version, sha256) == (self.version, self.sha256)

    def close(self, drain_seconds: float = 10.0) -> None:
        """Take no more, let what runs finish for a while, fail the rest, and end the thread."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        self._thread.join(drain_seconds)
        with self._lock:
            self._max_waiting = -1  # the loop ends at once
            self._lock.notify()
        self._thread.join(30.0)

    # ------------------------------------------------------------------ on the engine's thread

    def _serve(self) -> None:
        try:
            while self._wait_for_work():
                self._drop_cancelled()
                self._change_weights()
                self._admit()
                self._advance()
        except BaseException:
            log.exception("the engine's thread ended")
            raise
        finally:  # nobody waits for a thread that has ended
            self._fail_all(GenerationError("the server has stopped"))
            with self._lock:
                uploads, self._uploads = self._uploads, deque()
            for upload in uploads:
                if upload.done.set_running_or_notify_cancel():
                    upload.done.set_exception(GenerationError("the server has stopped"))

    def _wait_for_work(self) -> bool:
        with self._lock:
            while not (self._waiting or self._running or self._uploads or self._stopping):
                self._lock.wait(_IDLE_SECONDS)
            busy = bool(self._waiting or self._running or self._uploads)
            return self._max_waiting >= 0 and (busy or not self._stopping)

    def _drop_cancelled(self) -> None:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, []
            for job in cancelled:
                job.cancelled = True
            if cancelled:
                self._waiting = deque(job for job in self._waiting if not job.cancelled)
        self.counts.cancelled += sum(not job.over for job in cancelled)  # what is over is counted already
        for job in cancelled:
            job.over = True
            self._drop(job)

    def _drop(self, job: Job) -> None:
        if job.row is not None and self._running.pop(id(job.row), None) is not None:
            self._session.drop(job.row)

    def _change_weights(self) -> None:
        """In "finish" mode only once nothing runs; `_admit` lets nothing start while an upload waits."""
        while self._uploads and (self._swap == "continue" or not self._running):
            with self._lock:
                upload = self._uploads.popleft()
            if not upload.done.set_running_or_notify_cancel() or self._settled(upload):
                continue
            version = self.version + 1 if upload.version is None else upload.version
            weights = Weights(version, partial(AdaptedWeights, self._model, upload.adapter))
            try:
                self._engine.publish(weights)
            except Exception as error:
                log.exception("an adapter could not be applied")
                self._bring_back()
                upload.done.set_exception(AdapterError(f"the adapter could not be applied: {error}"))
                continue
            self.version, self.sha256, self.held = version, upload.adapter.sha256, weights
            self.counts.uploads += 1
            for job in list(self._running.values()):
                if upload.restart and job.weights is not None:  # an answer could not tell which of the two it is from
                    self._drop(job)
                    self._end(job, unheld(job.weights.version, version))
            if self._running:
                self._session.change_version(version)
            else:
                self._session = None
            upload.done.set_result(version)

    def _settled(self, upload: _Upload) -> bool:
        """Answer an upload that changes nothing: it is held already, or refused."""
        conflict = self.conflict(upload.version, upload.adapter.sha256, restart=upload.restart)
        if conflict is not None:
            upload.done.set_exception(conflict)
        elif self.holds(upload.version, upload.adapter.sha256):  # the answer to the first try was lost
            upload.done.set_result(self.version)
        else:
            return False
        return True

    def _bring_back(self) -> None:
        """The weights before an upload that failed half way: computed from the same numbers, they are the same bits."""
        held, self.held = self.held, None
        try:
            if held is not None:
                self._engine.publish(held)
                self.held = held
                return
        except Exception:
            log.exception("the weights before it could not be brought back")
        self.sha256, self._session = "", None
        self._fail_all(NoWeightsError("the weights are incomplete after an upload that failed; upload again"))

    def _admit(self) -> None:
        if self._uploads:
            return
        while self._waiting and len(self._running) < self.session_rows:
            having = Counter(id(one.kept) for one in self._running.values())
            with self._lock:  # a request of many completions does not keep the others waiting for all of them
                job = min(self._waiting, key=lambda one: having[id(one.kept)])
                self._waiting.remove(job)
            if job.weights is not None and job.weights is not self.held:
                self._end(job, unheld(job.weights.version, self.version))
                continue
            try:
                if self._session is None:
                    self._session = self._open()
                job.row = self._session.start(job.request, settings=job.settings)
            except Exception as error:
                self._end(job, _as_covey_error(error))
                continue
            self.latencies.queue.observe(time.monotonic() - job.since)
            self._running[id(job.row)] = job

    def _advance(self) -> None:
        if not self._running:
            return
        try:
            finished = self._session.advance()
        except Exception as error:
            log.exception("decoding failed")
            self._session = None
            self._fail_running(_as_covey_error(error))
            return
        stats = self._session.stats()
        self.counts.reused_prompts, self.counts.reused_tokens = stats.reused_prompts, stats.reused_blocks * REUSED_BLOCK
        for row in finished:
            job = self._running.pop(id(row), None)
            if job is None:
                continue
            if row.error is not None:
                log.warning("a completion failed: %s", row.error)
                self._end(job, row.error)
                continue
            self._tell(job)
            completion = self._session.completion(row)
            self.counts.completions += 1
            self.counts.tokens += len(completion.token_ids)
            self._end(job, Answer(completion, tuple(row.versions)))
        for job in list(self._running.values()):
            self._tell(job)
            if job.kept["ids"] > _MOST_KEPT_IDS:
                self._drop(job)
                self._end(job, GenerationError(f"return_support: more than {_MOST_KEPT_IDS} ids; lower top_k or n"))

    def _tell(self, job: Job) -> None:
        if not job.begun and job.row.sampled:
            job.begun = True
            self.latencies.first_token.observe(time.monotonic() - job.since)
        if job.row.support:
            job.kept["ids"] += len(job.row.support[-1])
        if job.on_tokens is not None and job.row.sampled > job.told:
            ids = [int(token) for token in job.row.own[job.row.turn + job.told :]]
            logprobs = [float(value) for value in job.row.logprobs[job.told :]]
            job.told, version = job.row.sampled, job.row.versions[-1][1]
            self._deliver(job.on_tokens, ids, logprobs, version)

    def _end(self, job: Job, found: Answer | CoveyError) -> None:
        job.over = True
        self.counts.failed += isinstance(found, CoveyError)
        self._deliver(job.on_end, found)

    def _deliver(self, tell: Callable[..., Any], *what: Any) -> None:
        try:
            tell(*what)
        except Exception:  # a client's connection is not the engine's concern
            log.exception("an answer could not be delivered")

    def _fail_running(self, error: CoveyError) -> None:
        running, self._running = list(self._running.values()), {}
        for job in running:
            self._end(job, error)

    def _fail_all(self, error: CoveyError) -> None:
        self._fail_running(error)
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque()
        for job in waiting:
            self._end(job, error)

    def _open(self) -> Any:
        longest, rows = self.max_completion_length, self._max_rows
        settings = SamplingSettings(max_tokens=longest)
        session = self._engine.serving_session(settings, policy_version=self.version, rows=rows, own_tokens=longest)
        session.end_bad_rows_alone()
        return session

    def _check(self, job: Job) -> None:
        ids, asked, choices = job.request.token_ids, job.settings.max_tokens, job.request.choices
        length = len(ids)
        try:
            check_settings(job.settings)
        except ConfigError as error:
            raise GenerationError(str(error)) from error
        if asked > self.max_completion_length:
            up_to = f"this server was started with completions of up to {self.max_completion_length} tokens"
            raise GenerationError(f"max_tokens={asked}: {up_to}")
        if length == 0 or length >= self.context_length:
            must = f"it must have at least 1 and fewer than the context's {self.context_length}"
            raise GenerationError(f"the prompt has {length} tokens; {must}")
        if length > self.longest_prompt:
            memory = f"this server has memory for {self.longest_prompt}. Start it with a larger --kv-cache-gb"
            raise GenerationError(f"the prompt has {length} tokens; {memory}")
        words = ids[ids < PICTURES] if job.pictures else ids
        if words.min(initial=0) < 0 or words.max(initial=0) >= self.vocabulary:
            raise GenerationError(f"the prompt has a token id of {words.max()}; the vocabulary has {self.vocabulary}")
        if choices is None:
            return
        if not choices or not all(choices):
            raise GenerationError("choices: give at least one sequence, each of at least one token id; null = any")
        if min(map(min, choices)) < 0 or max(map(max, choices)) >= self.vocabulary:
            most = max(map(max, choices))
            raise GenerationError(f"choices has a token id of {most}; the vocabulary has {self.vocabulary}")
        check_choices(choices, job.settings, self.context_length - length)


def unheld(asked: int, held: int) -> VersionConflictError:
    """What a client is told that asks for other weights."""
    again = " with other weights, of a trainer that began again" * (asked == held)
    return VersionConflictError(f"policy_version={asked} was asked for; this server holds {held}{again}")


def _as_covey_error(error: Exception) -> CoveyError:
    return error if isinstance(error, CoveyError) else GenerationError(f"decoding failed: {error}")
