"""A server in the engine's place: the trainer gives it weights and asks it for completions, as it would the engine.

The first upload, before training, is version 1, and each optimiser step makes one more. No completion is accepted that
was not sampled from the version that was asked for.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from covey.adapters import Adapter
from covey.errors import AdapterError, GenerationError, ServingError
from covey.rollout.choices import cut_choices
from covey.rollout.learning import Weights
from covey.serving.client import InferenceClient, RefusedError, warn_of_mismatch
from covey.types import Completion, IntArray, Progress, Request, SamplingSettings, Support

log = logging.getLogger(__name__)

_NO_VERSION = -1
_PER_REQUEST = 8
"""Completions of one request: few, so that an answer comes soon and a failure costs little."""


@dataclass(frozen=True, slots=True)
class Upload:
    """What the server was given last."""

    weights: bytes
    config: Mapping[str, Any]
    sha256: str
    version: int
    restart: bool = False


class RemoteEngine:
    """What `covey.pytorch.engine.Engine` is in this process, on an inference server.

    Args:
        client: the server.
        trainer: name of this run; a resumed run must use the same one.
        eos_token_ids: in place of those that the server's tokenizer knows.

    Raises:
        ServingError: the server cannot be reached.
    """

    runner = "server"

    def __init__(self, client: InferenceClient, *, trainer: str) -> None:
        self._client, self._trainer = client, trainer
        health = client.health()
        self.context_length = int(health.get("context_length", 1 << 31))
        self._longest = int(health.get("max_completion_length", 1 << 31))
        self._instance = str(health.get("instance", ""))
        self._held: Upload | None = None
        self._local, self._server = _NO_VERSION, _NO_VERSION
        self._ahead = 0  # of our versions, those that the server knows
        self._pool = ThreadPoolExecutor(max_workers=32, thread_name_prefix="covey-client")
        weakref.finalize(self, self._pool.shutdown, wait=False)

    @property
    def policy_version(self) -> int:
        """Version of the weights that the server was given last, as the trainer counts."""
        return self._local

    def publish(self, weights: Weights) -> None:
        """Upload the adapter of `weights` as their version.

        Raises:
            ServingError: the upload failed, or the server applied other numbers than were sent.
            AdapterError: they have no adapter, or one that is more than plain LoRA.
        """
        adapter, version = adapter_in(weights), weights.version
        sha256, number = adapter.sha256, version + self._ahead
        if self._held is not None and number <= self._held.version and sha256 != self._held.sha256:
            # other weights under a version that was used already, such as the best ones at a run's end
            number = self._held.version + 1
            self._ahead = number - version
        self._held = Upload(adapter.to_bytes(), adapter.config, sha256, number, restart=self._held is None)
        self._local = _NO_VERSION
        self._upload()
        self._local = version

    def release(self) -> None:
        """Nothing: the server keeps its memory."""

    def __call__(
        self,
        requests: Sequence[Request],
        settings: SamplingSettings,
        *,
        policy_version: int,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """Sample one completion for each request, in order; see `covey.types.Generator`.

        Raises:
            GenerationError: other weights are held, or the server refuses the request.
            ServingError: the server does not answer, or answers with completions of other weights.
        """
        self._check(settings, policy_version)
        places = [
            range(start, min(start + _PER_REQUEST, len(requests))) for start in range(0, len(requests), _PER_REQUEST)
        ]
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
        self,
        settings: SamplingSettings,
        *,
        policy_version: int,
        rows: int,
        own_tokens: int,
        prompt_lengths: Sequence[int],
    ) -> RemoteSession:
        """Conversations of several turns; each turn is a request with all that was said before."""
        self._check(settings, policy_version)
        return RemoteSession(self, settings, policy_version, own_tokens)

    def close(self) -> None:
        """Another trainer may have the server. What is asked of it afterwards still works."""
        self._client.release(self._trainer)

    # ------------------------------------------------------------------ inside

    def submit(self, request: Request, settings: SamplingSettings, version: int) -> Future[list[Completion]]:
        """Ask for one completion."""
        return self._pool.submit(self._complete, [request], settings, version)

    def _check(self, settings: SamplingSettings, policy_version: int) -> None:
        if policy_version != self._local:
            held = "no weights" if self._local == _NO_VERSION else f"version {self._local}"
            raise GenerationError(f"policy_version={policy_version}: the server was given {held}")
        if settings.max_tokens > self._longest:
            raise GenerationError(
                f"max_completion_length={settings.max_tokens}: the server at {self._client.url} samples up to "
                f"{self._longest} tokens; start it with --max-completion-length {settings.max_tokens}"
            )

    def _upload(self) -> None:
        held = self._held
        assert held is not None
        answer = self._client.upload_adapter(
            held.weights, held.config, policy_version=held.version, trainer=self._trainer, restart=held.restart
        )
        warn_of_mismatch(answer.policy_version, held.version, self._client.url)
        if answer.sha256 and answer.sha256 != held.sha256:
            raise ServingError(
                f"{self._client.url} applied an adapter with the hash {answer.sha256[:12]}..., {held.sha256[:12]}... "
                "was sent; its weights are not the trainer's"
            )
        self._server, self._instance = answer.policy_version, answer.instance

    def _complete(self, requests: Sequence[Request], settings: SamplingSettings, version: int) -> list[Completion]:
        body = _body(requests, settings, self._server)
        try:
            answer = self._client.completions(body)
        except RefusedError as error:
            if error.status != 409:
                raise GenerationError(str(error)) from error
            self._give_again(str(error))
            answer = self._client.completions(body | {"policy_version": self._server})
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != len(requests):
            raise ServingError(f"{self._client.url} answered {answer!r:.200} to {len(requests)} prompts")
        return [self._completion(choice, settings, version) for choice in choices]

    def _give_again(self, why: str) -> None:
        """The server holds another version: a restarted one is given the weights once more, another is not ours."""
        health = self._client.health(retry=True)
        restarted = str(health.get("instance", "")) != self._instance
        if not restarted and health.get("policy_version") != self._server:
            raise ServingError(
                f"{why}. The server at {self._client.url} was not restarted: somebody else uploads to it; give each "
                "run a server of its own"
            )
        if restarted:
            log.warning("the server at %s was restarted; it is given version %d again", self._client.url, self._server)
            self._upload()

    def _completion(self, choice: Mapping[str, Any], settings: SamplingSettings, version: int) -> Completion:
        try:
            ids = np.array(choice["token_ids"], dtype=np.int64)
            logprobs = np.array(choice["logprobs"]["token_logprobs"], dtype=np.float32)
            sampled_from = int(choice["policy_version"])
            reason = choice["finish_reason"]
            support = None
            if choice.get("support") is not None:
                kept = choice["support"]
                support = Support(np.array(kept["ids"], dtype=np.int64), np.array(kept["offsets"], dtype=np.int64))
        except (KeyError, TypeError, ValueError) as error:
            raise ServingError(f"{self._client.url} answered a completion without {error}: {choice!r:.200}") from error
        if ids.ndim != 1 or ids.shape != logprobs.shape or len(ids) == 0 or len(ids) > settings.max_tokens:
            raise ServingError(f"{self._client.url}: {ids.shape} token ids with {logprobs.shape} log-probabilities")
        if not np.isfinite(logprobs).all() or reason not in ("stop", "length"):
            raise ServingError(f"{self._client.url} answered log-probabilities that are not finite, or {reason!r}")
        if sampled_from != self._server:
            raise ServingError(
                f"{self._client.url} sampled from version {sampled_from}, {self._server} was asked for; nothing is "
                "trained on other weights"
            )
        return Completion(ids, logprobs, reason, version, support)


@dataclass(slots=True, eq=False)
class _Row:
    """A conversation: everything so far, and where the present turn begins."""

    ids: list[int]
    first: int
    keep: bool
    request: Request
    future: Future[list[Completion]] | None = None
    completion: Completion | None = None


@dataclass(slots=True, eq=False)
class RemoteSession:
    """Conversations on a server; a `covey.rollout.playing.TurnSession`."""

    _engine: RemoteEngine
    _settings: SamplingSettings
    _version: int
    _own_tokens: int
    _open: deque[_Row] = field(default_factory=deque)

    @property
    def busy(self) -> bool:
        """True while some turn is not over."""
        return bool(self._open)

    def start(self, request: Request, *, keep: bool = False) -> _Row:
        """Begin a conversation."""
        row = _Row(request.token_ids.tolist(), len(request.token_ids), keep, request)
        self._send(row)
        return row

    def has_room_for(self, prompt: int) -> bool:
        """Whether a first prompt of so many tokens fits the context."""
        return prompt < self._engine.context_length

    def room_for_turn(self, row: _Row, said: int) -> int:
        """Most tokens of the next turn after `said` tokens are said; 0 = none."""
        whole = len(row.ids) + said
        left = min(self._engine.context_length - whole, self._own_tokens - (whole - row.first))
        return max(0, min(self._settings.max_tokens, left))

    def extend(
        self,
        row: _Row,
        token_ids: IntArray,
        stream: tuple[int, ...],
        choices: tuple[tuple[int, ...], ...] | None = None,
    ) -> None:
        """Say something to a conversation whose turn is over, and let it answer."""
        row.ids += [int(token) for token in token_ids]
        row.request = Request(np.array(row.ids, dtype=np.int64), stream, choices)
        self._send(row)

    def drop(self, row: _Row) -> None:
        """Forget a conversation."""

    def advance(self) -> list[_Row]:
        """The conversations whose turn is over by now; waits for the first."""
        wait([row.future for row in self._open if row.future is not None], return_when=FIRST_COMPLETED)
        over = [row for row in self._open if row.future is not None and row.future.done()]
        for row in over:
            assert row.future is not None
            (row.completion,) = row.future.result()
            row.ids += row.completion.token_ids.tolist()
            self._open.remove(row)
        return over

    def completion(self, row: _Row) -> Completion:
        """The turn that is over."""
        assert row.completion is not None
        return row.completion

    def _send(self, row: _Row) -> None:
        settings = self._settings
        room = self.room_for_turn(row, 0) if row.keep else settings.max_tokens
        left = max(1, min(room, self._engine.context_length - len(row.ids)))
        settings, request = replace(settings, max_tokens=left), row.request
        if request.choices is not None:  # the server refuses what cannot be said whole: here the turn is cut short
            request = replace(request, choices=cut_choices(request.choices, left))
            settings = replace(settings, stop_strings=())
        row.future = self._engine.submit(request, settings, self._version)
        self._open.append(row)


def adapter_in(weights: Weights) -> Adapter:
    """What is uploaded.

    Raises:
        AdapterError: there is none.
    """
    adapter = weights.adapter
    if adapter is None:
        raise AdapterError("the model has no LoRA adapter to upload; set model.use_peft to true")
    return adapter


def _body(requests: Sequence[Request], settings: SamplingSettings, version: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "",
        "prompt": [request.token_ids.tolist() for request in requests],
        "streams": [list(request.stream) for request in requests],
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "min_p": settings.min_p,
        "stop": list(settings.stop_strings),
        "stop_token_ids": list(settings.eos_token_ids),
        "logprobs": 0,
        "return_token_ids": True,
        "policy_version": version,
    }
    if any(request.choices is not None for request in requests):
        body["choices"] = [None if r.choices is None else [list(choice) for choice in r.choices] for r in requests]
    if settings.keep_support or "choices" in body:
        body["return_support"] = True
    return body
