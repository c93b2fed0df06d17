"""From requests to completions of the engine, and from these to OpenAI's answers, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from covey.errors import CoveyError, GenerationError
from covey.serving.batching import Answer, BatchingEngine, Job
from covey.serving.requests import MAX_COMPLETIONS, ChatRequest, CompletionRequest
from covey.types import Request


@dataclass(frozen=True, slots=True)
class Found:
    """One completion on its way to a client."""

    prompt_ids: list[int]
    text: str
    tokens: list[str]
    answer: Answer


@dataclass(frozen=True, slots=True)
class _Part:
    """What is new of one completion in a stream; the finish reason comes last, without tokens."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    version: int
    finish_reason: str | None
    text: str


class Answering:
    """Asks the engine.

    Args:
        engine: samples.
        tokenizer: text to ids and back.
        model_name: for the answers.
    """

    def __init__(self, engine: BatchingEngine, tokenizer: Any, model_name: str) -> None:
        self._engine, self._tokenizer, self._name = engine, tokenizer, model_name
        eos = tokenizer.eos_token_id
        self.eos_token_ids = () if eos is None else (int(eos),)

    async def complete(self, asked: CompletionRequest) -> tuple[str, list[Found]]:
        """Model name and completions of `/v1/completions`, `n` for each prompt."""
        return self._name, await self._sample(self._requests(asked), self._settings(asked, asked.max_tokens))

    async def chat(self, asked: ChatRequest) -> tuple[str, list[Found]]:
        """The same of `/v1/chat/completions`."""
        settings = self._settings(asked, asked.max_completion_tokens or asked.max_tokens)
        return self._name, await self._sample(self._chat_requests(asked), settings)

    def stream_completion(self, asked: CompletionRequest) -> AsyncIterator[str]:
        """Server-sent events of `/v1/completions`. What cannot be served is refused now, not in the stream."""

        def choice(part: _Part) -> dict[str, Any]:
            found: dict[str, Any] = {"index": part.index, "text": part.text, "finish_reason": part.finish_reason}
            if asked.logprobs is not None:
                tokens = self._texts(part.token_ids)
                found["logprobs"] = {"tokens": tokens, "token_logprobs": part.logprobs, "top_logprobs": None}
            return found

        parts = self._stream(self._requests(asked), self._settings(asked, asked.max_tokens))
        return self._events(parts, f"cmpl-{uuid.uuid4().hex}", "text_completion", choice, ids=asked.return_token_ids)

    def stream_chat(self, asked: ChatRequest) -> AsyncIterator[str]:
        """Server-sent events of `/v1/chat/completions`."""

        def choice(part: _Part) -> dict[str, Any]:
            delta = {"role": "assistant", "content": part.text}
            return {"index": part.index, "delta": delta, "finish_reason": part.finish_reason}

        settings = self._settings(asked, asked.max_completion_tokens or asked.max_tokens)
        parts = self._stream(self._chat_requests(asked), settings)
        kind = "chat.completion.chunk"
        return self._events(parts, f"chatcmpl-{uuid.uuid4().hex}", kind, choice, ids=asked.return_token_ids)

    async def _events(
        self,
        parts: AsyncIterator[_Part],
        ident: str,
        kind: str,
        choice: Callable[[_Part], dict[str, Any]],
        *,
        ids: bool,
    ) -> AsyncIterator[str]:
        try:
            async for part in parts:
                found = choice(part) | ({"token_ids": part.token_ids} if ids else {})
                body = {
                    "id": ident,
                    "object": kind,
                    "created": int(time.time()),
                    "model": self._name,
                    "choices": [found],
                    "policy_version": part.version,
                }
                yield f"data: {json.dumps(body)}\n\n"
        except CoveyError as error:
            yield f"data: {json.dumps({'error': {'message': str(error), 'type': type(error).__name__}})}\n\n"
        yield "data: [DONE]\n\n"

    # ------------------------------------------------------------------ inside

    def _settings(self, asked: CompletionRequest | ChatRequest, max_tokens: int | None) -> Any:
        if isinstance(asked, CompletionRequest) and asked.logprobs not in (None, 0, 1):
            raise GenerationError(f"logprobs={asked.logprobs}: only the sampled token's is given; use 0 or 1")
        return asked.settings(max_tokens or self._engine.max_completion_length, self.eos_token_ids)

    def _requests(self, asked: CompletionRequest) -> list[Request]:
        return self._drawn(asked, [self._ids(prompt) for prompt in asked.prompts()])

    def _chat_requests(self, asked: ChatRequest) -> list[Request]:
        try:
            text = self._tokenizer.apply_chat_template(
                asked.messages,
                tools=asked.tools,
                add_generation_prompt=True,
                tokenize=False,
                **asked.chat_template_kwargs,
            )
        except Exception as error:  # templates are programs that raise what they like
            raise GenerationError(f"messages: the chat template refuses them: {error}") from error
        return self._drawn(asked, [self._encoded(text, special=False)])

    def _drawn(self, asked: CompletionRequest | ChatRequest, prompts: list[list[int]]) -> list[Request]:
        """`n` requests for each prompt, each with a random stream of its own."""
        count = len(prompts) * asked.n
        if not 1 <= count <= MAX_COMPLETIONS:
            raise GenerationError(f"{count} completions in one request; ask for 1 to {MAX_COMPLETIONS}")
        for name in ("streams", "choices"):
            given = getattr(asked, name)
            if given is not None and len(given) != count:
                raise GenerationError(f"{name} has {len(given)} entries for {count} completions")
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        streams = asked.streams or [[seed, place] for place in range(count)]
        choices = asked.choices or [None] * count
        return [
            Request(
                np.array(prompts[place // asked.n], dtype=np.int64),
                tuple(streams[place]),
                None if choices[place] is None else tuple(tuple(choice) for choice in choices[place] or ()),
            )
            for place in range(count)
        ]

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._encoded(prompt, special=True)
        size = len(self._tokenizer)
        if any(token >= size for token in prompt):
            raise GenerationError(f"the prompt has a token id of {max(prompt)}; the vocabulary has {size}")
        return prompt

    def _encoded(self, text: str, *, special: bool) -> list[int]:
        return [int(token) for token in self._tokenizer(text, add_special_tokens=special)["input_ids"]]

    def _texts(self, ids: Sequence[int]) -> list[str]:
        return [str(self._tokenizer.decode([token])) for token in ids]

    async def _sample(self, requests: list[Request], settings: Any) -> list[Found]:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in requests]

        def job(request: Request, future: asyncio.Future[Any]) -> Job:
            def tell(found: Answer | CoveyError) -> None:
                loop.call_soon_threadsafe(_settle, future, found)

            return Job(request, settings, tell)

        jobs = [job(request, future) for request, future in zip(requests, futures, strict=True)]
        self._engine.submit(jobs)
        try:
            answers = await asyncio.gather(*futures)
        except BaseException:
            self._engine.cancel(jobs)
            for future in futures:
                future.cancel()
            raise
        return [
            Found(
                request.token_ids.tolist(),
                str(self._tokenizer.decode(answer.completion.token_ids.tolist(), skip_special_tokens=True)),
                self._texts(answer.completion.token_ids.tolist()),
                answer,
            )
            for request, answer in zip(requests, answers, strict=True)
        ]

    def _stream(self, requests: list[Request], settings: Any) -> AsyncIterator[_Part]:
        """Submit now; what comes of it is read from the iterator."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

        def job(index: int, request: Request) -> Job:
            def put(what: Any) -> None:
                loop.call_soon_threadsafe(queue.put_nowait, (index, what))

            return Job(request, settings, put, lambda ids, logprobs: put((ids, logprobs)))

        jobs = [job(index, request) for index, request in enumerate(requests)]
        self._engine.submit(jobs)
        return self._parts(jobs, queue)

    async def _parts(self, jobs: list[Job], queue: asyncio.Queue[tuple[int, Any]]) -> AsyncIterator[_Part]:
        said: list[list[int]] = [[] for _ in jobs]
        told = [""] * len(jobs)
        left = len(jobs)
        try:
            while left:
                index, what = await queue.get()
                if isinstance(what, CoveyError):
                    raise what
                ids, logprobs = ([], []) if isinstance(what, Answer) else what
                said[index] += ids
                whole = str(self._tokenizer.decode(said[index], skip_special_tokens=True))
                if isinstance(what, Answer):
                    left -= 1
                    version, reason = what.versions[-1][1], what.completion.finish_reason
                    yield _Part(index, [], [], version, reason, whole[len(told[index]) :])
                    continue
                # a character may need several tokens: what is not whole yet is told later
                new = "" if whole.endswith("\ufffd") else whole[len(told[index]) :]
                told[index] += new
                yield _Part(index, ids, logprobs, self._engine.version, None, new)
        finally:
            if left:
                self._engine.cancel(jobs)


def _settle(future: asyncio.Future[Any], found: Answer | CoveyError) -> None:
    if future.done():
        return
    if isinstance(found, CoveyError):
        future.set_exception(found)
    else:
        future.set_result(found)


def completion_body(asked: CompletionRequest, answered: tuple[str, list[Found]]) -> dict[str, Any]:
    """The answer of `/v1/completions`."""
    name, found = answered
    choices = []
    for index, one in enumerate(found):
        choice = {"index": index, "text": one.text, **_common(asked, one)}
        if asked.logprobs is not None:
            logprobs = one.answer.completion.logprobs.tolist()
            choice["logprobs"] = {"tokens": one.tokens, "token_logprobs": logprobs, "top_logprobs": None}
        choices.append(choice)
    return _body("text_completion", "cmpl", name, found, choices)


def chat_body(asked: ChatRequest, answered: tuple[str, list[Found]]) -> dict[str, Any]:
    """The answer of `/v1/chat/completions`."""
    name, found = answered
    choices = []
    for index, one in enumerate(found):
        message = {"role": "assistant", "content": one.text}
        choice: dict[str, Any] = {"index": index, "message": message, **_common(asked, one)}
        if asked.logprobs:
            pairs = zip(one.tokens, one.answer.completion.logprobs.tolist(), strict=True)
            choice["logprobs"] = {"content": [{"token": token, "logprob": logprob} for token, logprob in pairs]}
        choices.append(choice)
    return _body("chat.completion", "chatcmpl", name, found, choices)


def _common(asked: CompletionRequest | ChatRequest, one: Found) -> dict[str, Any]:
    completion, versions = one.answer.completion, one.answer.versions
    common: dict[str, Any] = {
        "finish_reason": completion.finish_reason,
        "policy_version": versions[0][1],
        "policy_versions": [list(part) for part in versions],
        "logprobs": None,
    }
    if asked.return_token_ids:
        common |= {"token_ids": completion.token_ids.tolist(), "prompt_token_ids": one.prompt_ids}
    if asked.return_support and completion.support is not None:
        support = completion.support
        common["support"] = {"ids": support.ids.tolist(), "offsets": support.offsets.tolist()}
    return common


def _body(kind: str, prefix: str, name: str, found: Sequence[Found], choices: list[dict[str, Any]]) -> dict[str, Any]:
    prompts = sum(len(one.prompt_ids) for one in found)
    tokens = sum(len(one.answer.completion.token_ids) for one in found)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": name,
        "choices": choices,
        "policy_version": min(one.answer.versions[0][1] for one in found),
        "usage": {"prompt_tokens": prompts, "completion_tokens": tokens, "total_tokens": prompts + tokens},
    }
