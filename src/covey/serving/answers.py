"""From requests to completions of the engine, and from these to OpenAI's answers, whole or as a stream.

Reading, tokenising and writing are done in threads beside the event loop: nobody waits for another client's text.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from covey.errors import CoveyError
from covey.serving.batching import Answer, BatchingEngine, Job, unheld
from covey.serving.bodies import Found, Part, answer_body, envelope, stream_choice, usage
from covey.serving.chat import chat_text
from covey.serving.neutral import RequestError
from covey.serving.requests import MAX_COMPLETIONS, Asked, ChatRequest, CompletionRequest, read_request
from covey.serving.texts import GrowingText, GrowingTexts
from covey.types import Request, SamplingSettings

Done = TypeVar("Done")
_Told = asyncio.Queue[tuple[int, Any]]
"""Which completion, and its end, what went wrong, or new tokens."""
_CHARACTERS = 32
"""Most characters of a prompt for each token of the context: a longer text does not fit, and is not tokenised."""
_LONGEST_TEXT = 1 << 20
_LARGE_BODY = 1 << 16
"""Larger ones are read one after the other: each holds the interpreter for a moment."""
_TOLD_AT_ONCE = 64
"""Pieces of a stream that are decoded in one go."""
_REMEMBERED_TEXTS = 1 << 16
"""Texts of single tokens that are kept: decoding one takes as long as looking up a hundred."""


class UnknownModelError(CoveyError):
    """A model is asked for that this server does not have."""


class Answering:
    """Turns requests into completions of the engine, and these into answers."""

    def __init__(self, engine: BatchingEngine, tokenizer: Any, model_name: str) -> None:
        self._engine, self._tokenizer, self._name = engine, tokenizer, model_name
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="covey-texts")
        self._most_characters = min(_LONGEST_TEXT, _CHARACTERS * engine.context_length)
        self._one_large = asyncio.Lock()
        self._growing = GrowingTexts(tokenizer)
        self._text = lru_cache(_REMEMBERED_TEXTS)(lambda token: str(tokenizer.decode([token])))
        eos = tokenizer.eos_token_id
        self._ends = () if eos is None else (int(eos),)

    async def read(self, kind: type[Asked], body: bytes) -> Asked:
        """Reads the body of a request.

        Raises:
            RequestError: it is none.
            UnknownModelError: it names another model.
        """
        async with self._one_large if len(body) > _LARGE_BODY else nullcontext():
            asked: Asked = await self._in_thread(read_request, kind, body)
        self.check_model(asked.model)
        return asked

    def check_model(self, name: str) -> None:
        """Refuse other names than this model's.

        Raises:
            UnknownModelError: it is one.
        """
        if name not in ("", self._name):
            raise UnknownModelError(f"model={name!r:.200}: this server has {self._name!r}")

    async def complete(self, asked: CompletionRequest | ChatRequest) -> bytes:
        """The answer to a request, `n` completions for each prompt, as JSON.

        Raises:
            VersionConflictError: other weights are held than it asks for.
        """
        jobs, queue = await self._submitted(asked)
        answers: dict[int, Answer] = {}
        try:
            while len(answers) < len(jobs):
                index, found = await queue.get()
                if isinstance(found, CoveyError):
                    raise found
                answers[index] = found
        finally:
            if len(answers) < len(jobs):
                self._engine.cancel(jobs)
        return await self._in_thread(self._body, asked, [(job.request, answers[i]) for i, job in enumerate(jobs)])

    async def stream(self, asked: CompletionRequest | ChatRequest) -> AsyncIterator[str]:
        """The same as server-sent events. What cannot be served is refused now, not in the stream."""
        chunks = await self.chunks(asked)
        return (event async for chunk in chunks for event in chunk)

    async def chunks(self, asked: CompletionRequest | ChatRequest) -> AsyncIterator[list[str]]:
        """Likewise, those together that are ready together: a client that is behind costs no more for it."""
        return self._events(asked, *await self._submitted(asked))

    def close(self) -> None:
        """Stops reading and writing texts; what is under way is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _submitted(self, asked: CompletionRequest | ChatRequest) -> tuple[list[Job], _Told]:
        """The completions that are asked for, and where the engine tells of them."""
        weights = None
        if asked.policy_version is not None:
            if asked.policy_version != self._engine.version:
                raise unheld(asked.policy_version, self._engine.version)
            weights = self._engine.held
        loop, queue, kept = asyncio.get_running_loop(), _Told(), Counter[str]()
        requests, settings = await self._in_thread(self._prepared, asked)

        def job(index: int, request: Request) -> Job:
            def tell(what: Any) -> None:
                loop.call_soon_threadsafe(queue.put_nowait, (index, what))

            tokens = (lambda *new: tell(new)) if asked.stream else None
            return Job(request, settings, tell, tokens, weights=weights, kept=kept)

        jobs = [job(index, request) for index, request in enumerate(requests)]
        try:
            await self._in_thread(self._engine.submit, jobs)
        except asyncio.CancelledError:
            self._engine.cancel(jobs)
            raise
        return jobs, queue

    # ------------------------------------------------------------------ beside the event loop

    async def _in_thread(self, do: Callable[..., Done], *args: Any) -> Done:
        return await asyncio.get_running_loop().run_in_executor(self._threads, do, *args)

    def _prepared(self, asked: CompletionRequest | ChatRequest) -> tuple[list[Request], SamplingSettings]:
        """`n` requests for each prompt, each with a random stream of its own."""
        if isinstance(asked, ChatRequest):
            text = chat_text(self._tokenizer, asked.messages, asked.chat_template_kwargs, self._most_characters)
            prompts = [self._encoded(text, special=False)]
            longest = asked.max_completion_tokens or asked.max_tokens or self._engine.max_completion_length
        else:
            given = asked.prompts()
            self._check_count(len(given) * asked.n)
            prompts = [self._ids(prompt) for prompt in given]
            longest = asked.max_tokens
        count = len(prompts) * asked.n
        self._check_count(count)
        for name in ("streams", "choices"):
            values = getattr(asked, name)
            if values is not None and len(values) != count:
                raise RequestError(f"{name} has {len(values)} entries for {count} completions")
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        streams = asked.streams or [[seed, place] for place in range(count)]
        choices = asked.choices or [None] * count
        arrays = [np.array(prompt, dtype=np.int64) for prompt in prompts]
        requests = [
            Request(
                arrays[place // asked.n],
                tuple(streams[place]),
                None if choices[place] is None else tuple(tuple(choice) for choice in choices[place] or ()),
            )
            for place in range(count)
        ]
        return requests, asked.settings(longest, self._ends, self._engine.vocabulary)

    def _check_count(self, count: int) -> None:
        if not 1 <= count <= MAX_COMPLETIONS:
            raise RequestError(f"{count} completions in one request; ask for 1 to {MAX_COMPLETIONS}")

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._encoded(prompt, special=True)
        size = self._engine.vocabulary
        if prompt and not 0 <= min(prompt) <= max(prompt) < size:
            raise RequestError(f"the prompt has a token id of {max(prompt, key=abs)}; the vocabulary has {size}")
        return prompt

    def _encoded(self, text: str, *, special: bool) -> list[int]:
        if len(text) > self._most_characters:
            raise RequestError(
                f"the prompt has {len(text)} characters; one of up to {self._most_characters} is read for this model's "
                f"context of {self._engine.context_length} tokens"
            )
        return [int(token) for token in self._tokenizer(text, add_special_tokens=special)["input_ids"]]

    def _texts(self, ids: Sequence[int]) -> list[str]:
        return [self._text(token) for token in ids]

    def _body(self, asked: CompletionRequest | ChatRequest, answers: Sequence[tuple[Request, Answer]]) -> bytes:
        found = []
        for request, answer in answers:
            ids = answer.completion.token_ids.tolist()
            tokens = self._texts(ids) if asked.wants_logprobs else []
            text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
            found.append(Found(request.token_ids, text, tokens, answer))
        return answer_body(asked, self._name, found)

    # ------------------------------------------------------------------ streams

    async def _events(
        self, asked: CompletionRequest | ChatRequest, jobs: list[Job], queue: _Told
    ) -> AsyncIterator[list[str]]:
        common, texts = envelope(asked, self._name), dict[int, GrowingText]()
        left, sampled = len(jobs), 0
        try:
            while left:
                told = [await queue.get()]
                while len(told) < _TOLD_AT_ONCE and not queue.empty():
                    told.append(queue.get_nowait())
                yield await self._in_thread(self._written, asked, common, told, texts)
                if any(isinstance(what, CoveyError) for _, what in told):
                    break
                left -= sum(isinstance(what, Answer) for _, what in told)
                sampled += sum(len(what[0]) for _, what in told if isinstance(what, tuple))
            else:
                if asked.stream_options.include_usage:
                    prompts = sum(len(job.request.token_ids) for job in jobs[:: asked.n])
                    yield [_event(common | {"choices": [], "usage": usage(prompts, sampled)})]
            yield ["data: [DONE]\n\n"]
        finally:
            if left:
                self._engine.cancel(jobs)

    def _written(
        self,
        asked: CompletionRequest | ChatRequest,
        common: dict[str, Any],
        told: Sequence[tuple[int, Any]],
        texts: dict[int, GrowingText],
    ) -> list[str]:
        """The events of what the engine told of the completions, up to what went wrong."""
        events: list[str] = []
        for index, what in told:
            if isinstance(what, CoveyError):
                return [*events, _event({"error": {"message": str(what), "type": type(what).__name__}})]
            over, first = isinstance(what, Answer), index not in texts
            ids, logprobs, version = ([], [], what.versions[-1][1]) if over else what
            reason = what.completion.finish_reason if over else None
            text = texts.setdefault(index, GrowingText(self._growing)).push(ids, last=over)
            part = Part(index, ids, logprobs, version, reason, text, first)
            choice = stream_choice(asked, part, self._texts(ids) if asked.wants_logprobs else [])
            events.append(_event(common | {"choices": [choice], "policy_version": version}))
        return events


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
