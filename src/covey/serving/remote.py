"""A server in the engine's place: the trainer gives it weights and asks it for completions, as it would the engine.

The first upload, before training, is version 1, and each optimiser step makes one more. No completion is accepted that
was not sampled from the version that was asked for.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from covey.errors import GenerationError, ServingError, naming, raised_at
from covey.rollout.learning import NO_VERSION, Weights, version_in_words
from covey.rollout.turns import Device, Drawn, Row, Session
from covey.serving.client import OTHER_SERVERS, InferenceClient, RefusedError
from covey.serving.dialect import Dialect, Sampled, Upload
from covey.serving.dialects import CoveyDialect
from covey.types import Completion, Progress, Request, SamplingSettings, Support

log = logging.getLogger(__name__)


class RemoteEngine:
    """What `covey.pytorch.engine.Engine` is in this process, on an inference server.

    Raises `ConfigError`: the dialect, somebody's own, raised; `ServingError`: the server cannot be reached.
    """

    runner = "server"

    def __init__(
        self,
        client: InferenceClient,
        *,
        trainer: str,
        dialect: type[Dialect] = CoveyDialect,
        folder: str | Path = "adapters",
        vocabulary: int | None = None,
    ) -> None:
        with naming(f"server.inference_server_kind: making {dialect.__name__}, or its limits(),"):
            self.dialect = dialect(client, trainer, Path(folder))
            limits = self.dialect.limits()
        self._vocabulary = vocabulary
        self.context_length, self._longest = limits.context, limits.completion
        self._trainer, self._url = trainer, client.url
        self._held: Upload | None = None
        self._recovering, self._recoveries = threading.Lock(), 0
        self._version = NO_VERSION
        self._pool = ThreadPoolExecutor(max_workers=32, thread_name_prefix="covey-client")
        weakref.finalize(self, self._pool.shutdown, wait=False)

    def members(self) -> list[dict[str, Any]]:
        """See `covey.distributed.fleet.Fleet.members`: the one server, with its own count of versions as `server`."""
        version, own = self._version, getattr(self.dialect, "server_version", None)
        return [{"name": self._url, "version": None if version == NO_VERSION else version, "server": own}]

    @property
    def policy_version(self) -> int:
        """Version of the weights that the server was given last, as the trainer counts."""
        return self._version

    def publish(self, weights: Weights) -> None:
        """Publish the adapter of `weights`, or all of them where there is none, as their version.

        Raises `ServingError`: the upload failed, or the server applied other numbers than were sent; `AdapterError`:
        there is no adapter and the dialect takes nothing else, or it is more than plain LoRA.
        """
        held = Upload.of(weights, self._trainer, first=self._held is None)
        self._version, self._held = NO_VERSION, held
        with self._naming("publish"):
            self.dialect.publish(held)
        self._version = weights.version

    def release(self) -> None:
        """Does nothing: the server keeps its memory."""

    def __call__(
        self,
        requests: Sequence[Request],
        settings: SamplingSettings,
        *,
        policy_version: int,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """Sample one completion for each request, in order; see `covey.types.Generator`.

        Raises `GenerationError`: other weights are held, or the server refuses the request; `ServingError`: the server
        does not answer, or answers with completions of other weights.
        """
        self._check(settings, policy_version)
        size = self.dialect.per_request
        places = [range(start, min(start + size, len(requests))) for start in range(0, len(requests), size)]
        asked = {
            self._pool.submit(self._complete, [requests[place] for place in part], settings, policy_version): part
            for part in places
        }
        found: dict[int, Completion] = {}
        try:
            for done in as_completed(asked):
                found |= dict(zip(asked[done], done.result(), strict=True))
                if progress is not None:
                    progress(len(found), len(requests))
        finally:
            for future in asked:
                future.cancel()
        return [found[place] for place in range(len(requests))]

    def session(
        self, settings: SamplingSettings, *, policy_version: int, own_tokens: int, **room: Any
    ) -> Session[RemoteDevice]:
        """Conversations of several turns; each turn is a request with all that was said before."""
        self._check(settings, policy_version)
        return Session(RemoteDevice(self, policy_version, own_tokens), settings, policy_version=policy_version)

    def close(self) -> None:
        """Another trainer may have the server. What is asked of it afterwards still works."""
        self.dialect.close()

    def submit(self, request: Request, settings: SamplingSettings, version: int) -> Future[list[Completion]]:
        """Asks for one completion in a thread."""
        return self._pool.submit(self._complete, [request], settings, version)

    def _naming(self, method: str) -> AbstractContextManager[None]:
        return naming(f"server.inference_server_kind: {type(self.dialect).__name__}.{method}")

    def _ask(self, requests: Sequence[Request], settings: SamplingSettings) -> Mapping[str, Any]:
        with self._naming("request"):
            path, body = self.dialect.request(requests, settings)
        return self.dialect.client.post(path, body)

    def _check(self, settings: SamplingSettings, policy_version: int) -> None:
        if policy_version != self._version:
            held = version_in_words(self._version)
            raise GenerationError(f"policy_version={policy_version}: the server was given {held}")
        if settings.max_tokens > self._longest:
            up_to = f"the server at {self.dialect.client.url} samples up to {self._longest} tokens"
            start = f"start it with --max-completion-length {settings.max_tokens}"
            raise GenerationError(f"max_completion_length={settings.max_tokens}: {up_to}; {start}")

    def _complete(self, requests: Sequence[Request], settings: SamplingSettings, version: int) -> list[Completion]:
        dialect, held = self.dialect, self._held
        assert held is not None
        if not dialect.constrains and (settings.keep_support or any(r.choices is not None for r in requests)):
            instead = "set algorithm.keep_sampling_mask to false, and environment.action_format to text or tags"
            raise GenerationError(f"{dialect.name} cannot keep supports or choose among sequences; {instead}")
        recoveries = self._recoveries
        try:
            answer = self._ask(requests, settings)
        except RefusedError as error:
            with self._recovering:
                if self._recoveries == recoveries:  # no other request has given the server back what it has lost
                    if not dialect.recover(error, held):
                        raise GenerationError(str(error)) from error
                    self._recoveries += 1
            answer = self._ask(requests, settings)
        try:
            found = dialect.read(answer, len(requests))
            if len(found) != len(requests):
                raise ServingError(f"{dialect.client.url} answered {len(found)} completions to {len(requests)} prompts")
            return [_checked(one, settings, version, dialect.client.url, self._vocabulary) for one in found]
        except ServingError as error:
            raise ServingError(f"{error}; {OTHER_SERVERS}") from error
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            unread = f"{type(dialect).__name__}.read cannot read ({type(error).__name__}: {error}{raised_at(error)})"
            where = f"{dialect.client.url} answered what {unread}"
            raise ServingError(f"{where}: {answer!r:.200}; {OTHER_SERVERS}") from error


class RemoteDevice(Device):
    """Conversations on a server; a `covey.rollout.turns.Device` that asks for whole turns."""

    def __init__(self, engine: RemoteEngine, version: int, own_tokens: int) -> None:
        super().__init__(engine.context_length, own_tokens)
        self._engine, self._version = engine, version
        self._asked: dict[Future[list[Completion]], Row] = {}

    def begin(self, queue: deque[Row]) -> Iterator[Drawn]:
        """Ask for the first turns."""
        return self.extend(queue)

    def extend(self, resuming: list[Row] | deque[Row]) -> Iterator[Drawn]:
        """Ask for the next turns, with all that was said before."""
        for row in resuming:
            self._asked[self._engine.submit(row.turn_request(), row.turn_settings(), self._version)] = row
        resuming.clear()
        return iter(())

    def decode(self, waiting: int) -> Iterator[Drawn]:
        """Whole turns, as soon as there is one."""
        wait(self._asked, return_when=FIRST_COMPLETED)
        for future in [future for future in self._asked if future.done()]:
            row, (found,) = self._asked.pop(future), future.result()
            yield Drawn.whole(row, found)

    def drop(self, row: Row) -> None:
        """Nobody waits for its turn any more."""
        self._asked = {future: one for future, one in self._asked.items() if one is not row}


def _checked(
    sampled: Sampled, settings: SamplingSettings, version: int, url: str, vocabulary: int | None
) -> Completion:
    """A completion that can be trained on, or else a `ServingError`."""
    ids, logprobs = np.array(sampled.token_ids), np.array(sampled.logprobs, dtype=np.float32)
    kept = sampled.support
    support = None if kept is None else Support(*(np.array(part, dtype=np.int64) for part in kept))
    if ids.ndim != 1 or ids.shape != logprobs.shape or len(ids) == 0 or len(ids) > settings.max_tokens:
        raise ServingError(f"{url}: {ids.shape} token ids with {logprobs.shape} log-probabilities")
    if ids.dtype.kind not in "iu" or ids.min() < 0 or (vocabulary is not None and ids.max() >= vocabulary):
        known = "whole numbers from 0" if vocabulary is None else f"whole numbers from 0 to {vocabulary - 1}"
        raise ServingError(f"{url} answered the token ids {ids.tolist()!r:.80}; the policy's are {known}")
    ends = np.isin(ids[:-1], settings.eos_token_ids)
    if ends.any():
        raise ServingError(f"{url} answered tokens behind the end token {ids[:-1][ends][0]}: {ids.tolist()!r:.80}")
    if not np.isfinite(logprobs).all() or logprobs.max() > 0.01:  # rounding may leave a little above 0
        told = f"the log-probabilities {logprobs.tolist()!r:.80}"
        raise ServingError(f"{url} answered {told}; one is not finite, or above 0")
    if sampled.finish_reason not in ("stop", "length"):
        raise ServingError(f"{url} answered the finish reason {sampled.finish_reason!r}; it must be stop or length")
    return Completion(ids.astype(np.int64), logprobs, sampled.finish_reason, version, support)  # type: ignore[arg-type]
