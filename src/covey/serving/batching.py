"""The engine behind a queue: requests of many clients in one batch, and new weights between two decode steps.

One thread owns the engine. Everything else talks to it through `submit`, `cancel` and `upload`; answers come back
through callbacks on that thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from covey.errors import AdapterError, CoveyError, GenerationError
from covey.pytorch.engine import Engine
from covey.serving.adapters import AdaptedWeights, Adapter
from covey.types import Completion, Request, SamplingSettings

log = logging.getLogger(__name__)

SwapMode = Literal["finish", "continue"]
"""Completions that run when an upload arrives finish under the old weights, or continue with the new."""
_REMEMBERED_PROMPTS = 64
_IDLE_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class Job:
    """One completion.

    Attributes:
        request: prompt and random stream.
        settings: how its tokens are drawn.
        on_tokens: called with the ids and log-probabilities of new tokens; None = only the end is told.
        on_end: called with the completion and its (token, version) list, or with what went wrong.
    """

    request: Request
    settings: SamplingSettings
    on_end: Callable[[Answer | CoveyError], None]
    on_tokens: Callable[[list[int], list[float]], None] | None = None
    row: Any = None
    told: int = 0
    cancelled: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A completion with the versions of its tokens.

    Attributes:
        versions: (first token, version of the weights from there on), in order.
    """

    completion: Completion
    versions: tuple[tuple[int, int], ...]


class QueueFullError(CoveyError):
    """As many completions wait as may."""


@dataclass(slots=True)
class Counts:
    """What the server has done, for `/metrics`."""

    completions: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cancelled: int = 0
    failed: int = 0
    uploads: int = 0
    reused_prompts: int = 0
    refused: int = 0


@dataclass(slots=True, eq=False)
class _Upload:
    adapter: Adapter
    version: int | None
    done: Future[int] = field(default_factory=Future)


class BatchingEngine:
    """An engine that serves.

    Args:
        engine: built from `model`; nobody else may use it from now on.
        model: the bare model that uploads are added to.
        max_rows: most completions in the batch.
        max_completion_length: most tokens of one.
        max_waiting: most completions that wait for the batch.
        swap: see `SwapMode`.
    """

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
        self._max_rows, self._max_completion = max_rows, max_completion_length
        self._max_waiting = max_waiting
        self._lock = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._cancelled: list[Job] = []
        self._uploads: deque[_Upload] = deque()
        self._running: dict[int, Job] = {}
        self._session: Any = None
        self._stopping = False
        self.version, self.sha256 = 0, ""
        self.counts = Counts()
        self.session_rows = self._open().rows_reserved
        self._thread = threading.Thread(target=self._serve, name="covey-engine", daemon=True)
        self._thread.start()

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion."""
        return self._engine.context_length

    @property
    def max_completion_length(self) -> int:
        """Most tokens of a completion."""
        return self._max_completion

    @property
    def load(self) -> tuple[int, int]:
        """Completions that run and that wait."""
        return len(self._running), len(self._waiting)

    @property
    def healthy(self) -> bool:
        """The engine's thread is alive."""
        return self._thread.is_alive() and not self._stopping

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue completions, all or none.

        Raises:
            QueueFullError: too many wait already.
            GenerationError: one of them cannot be served, or the server is stopping.
        """
        for job in jobs:
            self._check(job)
        with self._lock:
            if self._stopping or not self._thread.is_alive():
                raise GenerationError("the server is stopping")
            if len(self._waiting) + len(jobs) > self._max_waiting:
                self.counts.refused += len(jobs)
                raise QueueFullError(
                    f"{len(self._waiting)} completions wait and {self._max_waiting} may; try again later"
                )
            self._waiting.extend(jobs)
            self._lock.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Nobody wants these any more: their places are free after the present decode step."""
        with self._lock:
            self._cancelled.extend(jobs)
            self._lock.notify()

    def upload(self, adapter: Adapter, version: int | None) -> Future[int]:
        """Replace the adapter between two decode steps.

        Args:
            adapter: checked against the model.
            version: that it is; None = one more than before.

        Returns:
            The version, once it is in effect.
        """
        upload = _Upload(adapter, version)
        with self._lock:
            self._uploads.append(upload)
            self._lock.notify()
        return upload.done

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
        finally:
            self._fail_all(GenerationError("the server has stopped"))

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
        for job in cancelled:
            self.counts.cancelled += 1
            if job.row is not None and self._running.pop(id(job.row), None) is not None:
                self._session.cancel(job.row)

    def _change_weights(self) -> None:
        """In "finish" mode only once nothing runs; `_admit` lets nothing start while an upload waits."""
        while self._uploads and (self._swap == "continue" or not self._running):
            with self._lock:
                upload = self._uploads.popleft()
            version = self.version + 1 if upload.version is None else upload.version
            try:
                self._engine.load(AdaptedWeights(self._model, upload.adapter), version)
            except Exception as error:
                log.exception("an adapter could not be applied")
                upload.done.set_exception(AdapterError(f"the adapter could not be applied: {error}"))
                self._fail_all(GenerationError("the weights are incomplete after an upload that failed; upload again"))
                continue
            self.version, self.sha256 = version, upload.adapter.sha256
            self.counts.uploads += 1
            if self._running:
                self._session.change_version(version)
            else:
                self._session = None
            upload.done.set_result(version)

    def _admit(self) -> None:
        if self._uploads:
            return
        while self._waiting and len(self._running) < self.session_rows:
            with self._lock:
                job = self._waiting.popleft()
            try:
                if self._session is None:
                    self._session = self._open()
                job.row = self._session.start(job.request, settings=job.settings)
            except CoveyError as error:
                self._end(job, error)
                continue
            self._running[id(job.row)] = job
            self.counts.prompt_tokens += len(job.request.token_ids)

    def _advance(self) -> None:
        if not self._running:
            return
        try:
            finished = self._session.advance()
        except Exception as error:
            log.exception("decoding failed")
            self._session = None
            self._fail_running(error if isinstance(error, CoveyError) else GenerationError(f"decoding failed: {error}"))
            return
        for row in finished:
            job = self._running.pop(id(row), None)
            if job is None:
                continue
            self._tell(job)
            completion = self._session.completion(row)
            self.counts.completions += 1
            self.counts.tokens += len(completion.token_ids)
            self._end(job, Answer(completion, tuple(row.versions)))
        for job in self._running.values():
            self._tell(job)
        self.counts.reused_prompts = self._session.reused_prompts

    def _tell(self, job: Job) -> None:
        if job.on_tokens is not None and job.row.sampled > job.told:
            ids = job.row.own[job.row.turn + job.told :]
            job.on_tokens([int(token) for token in ids], [float(value) for value in job.row.logprobs[job.told :]])
            job.told = job.row.sampled

    def _end(self, job: Job, found: Answer | CoveyError) -> None:
        self.counts.failed += isinstance(found, CoveyError)
        try:
            job.on_end(found)
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
        settings = SamplingSettings(max_tokens=self._max_completion)
        session = self._engine.serving_session(
            settings, policy_version=self.version, rows=self._max_rows, own_tokens=self._max_completion
        )
        session.remember_prompts(_REMEMBERED_PROMPTS)
        return session

    def _check(self, job: Job) -> None:
        length, asked = len(job.request.token_ids), job.settings.max_tokens
        if asked > self._max_completion:
            raise GenerationError(
                f"max_tokens={asked}: this server was started with completions of up to {self._max_completion} tokens"
            )
        if length == 0 or length >= self.context_length:
            raise GenerationError(
                f"the prompt has {length} tokens; it must have at least 1 and fewer than the context's "
                f"{self.context_length}"
            )
