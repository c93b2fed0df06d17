"""From requests to completions of the engine, and from these to OpenAI's answers, whole or as a stream.

Reading, tokenising and writing are done in threads beside the event loop: nobody waits for another client's text.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from covey.errors import CoveyError
from covey.rollout.learning import Weights
from covey.serving.batching import Answer, BatchingEngine, Job, unheld
from covey.serving.generate import GenerateRequest, generated
from covey.serving.json_output import json_rules
from covey.serving.requests import ChatRequest, CompletionRequest, RequestError, ScoreRequest, chat_prompt, read_request
from covey.serving.scoring import Scorer
from covey.types import Request, SamplingSettings

Asked = CompletionRequest | ChatRequest
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
_KEPT = 8
"""Tokens before the next one that are decoded with it: their text settles what depends on what came before, and they
have more bytes than the longest character."""
_REMEMBERED = 1 << 16  # single tokens: decoding one takes as long as looking up a hundred
_UNFINISHED = re.compile("\ufffd{1,3}\\Z")
"""Bytes of a character that the next token may finish."""
_CLEANED = re.compile("(?:\ufffd{1,3}|[ ']+[vrn]?'?)\\Z")
"""Likewise, and what the tokenizer's clean-up of spaces may change."""


class GrowingTexts:
    """Makes the texts of one tokenizer's completions, without special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.decode: Callable[[list[int]], str] = lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
        self.unsure = _CLEANED if getattr(tokenizer, "clean_up_tokenization_spaces", False) else _UNFINISHED
        names = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
        self.bytes = frozenset(token for name, token in names.items() if re.fullmatch("<0x[0-9A-Fa-f]{2}>", name))
        # special ones and ids beyond the tokenizer's: one more of it changes nothing
        self.silent = lru_cache(_REMEMBERED)(lambda token: self.decode([token]) == self.decode([token, token]))


class GrowingText:
    """One completion. A token costs one decoding of at most 16 and those that arrive with it, whatever came before.

    A run of byte tokens is text only as a whole (one wrong byte spoils all of them), so it is told when it is over.
    """

    def __init__(self, texts: GrowingTexts) -> None:
        self._texts = texts
        self._ids: list[int] = []
        self._told = 0  # characters of their text

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """What is new and certain of the text with these tokens; with the `last` ones all that is left."""
        texts = self._texts
        self._ids += [token for token in token_ids if not texts.silent(token)]
        if not self._ids or (self._ids[-1] in texts.bytes and not last):
            return ""
        text = texts.decode(self._ids)
        unsure = None if last else texts.unsure.search(text)
        end = max(self._told, len(text) if unsure is None else unsure.start())
        new, left, self._told = text[self._told : end], len(text) - end, end
        if len(self._ids) >= 2 * _KEPT and left <= 3:
            del self._ids[:-_KEPT]
            self._told = len(texts.decode(self._ids)) - left
        return new


def envelope(asked: Asked, model: str) -> dict[str, Any]:
    """What every answer, and every event of a stream, begins with."""
    chat = isinstance(asked, ChatRequest)
    kind = "chat.completion" if chat else "text_completion"
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": f"{kind}.chunk" if chat and asked.stream else kind,
        "created": int(time.time()),
        "model": model,
    }


def usage(asked: Asked, prompts: Sequence[Request], sampled: int) -> dict[str, int]:
    """The count of tokens at an answer's end. A prompt counts once for its `n` completions, as with OpenAI."""
    given = sum(len(request.token_ids) for request in prompts[:: asked.n])
    return {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}


_ENCODER = json.JSONEncoder(default=np.ndarray.tolist)


def _written_out(body: Any) -> bytes:
    """JSON, made in steps of Python: unlike `json.dumps` a long answer does not hold the interpreter."""
    return "".join(_ENCODER.iterencode(body)).encode()


class UnknownModelError(CoveyError):
    """A model is asked for that this server does not have."""


class Answering:
    """Turns requests into completions of the engine, and these into answers."""

    def __init__(self, engine: BatchingEngine, tokenizer: Any, model_name: str, album: Any = None) -> None:
        self._engine, self._tokenizer, self._name = engine, tokenizer, model_name
        self._album = album if album is not None and album.reads else None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="covey-texts")
        self._scores = ThreadPoolExecutor(1, thread_name_prefix="covey-scores")
        self._most_characters = min(_LONGEST_TEXT, _CHARACTERS * engine.context_length)
        self._one_large, self._one_schema = asyncio.Lock(), asyncio.Lock()
        self._growing = GrowingTexts(tokenizer)
        self._text = lru_cache(_REMEMBERED)(lambda token: str(tokenizer.decode([token])))
        eos = tokenizer.eos_token_id
        self._ends = () if eos is None else (int(eos),)

    async def read(self, kind: type[Any], body: bytes) -> Any:
        """Reads the body of a request.

        Raises `RequestError`: it is none; `UnknownModelError`: it names another model.
        """
        async with self._one_large if len(body) > _LARGE_BODY else nullcontext():
            asked: Any = await self._in_thread(read_request, kind, body)
        self.check_model(asked.model)
        return asked

    def check_model(self, name: str) -> None:
        """Refuse other names than this model's. Raises `UnknownModelError`: it is one."""
        if name not in ("", self._name):
            raise UnknownModelError(f"model={name!r:.200}: this server has {self._name!r}")

    async def complete(self, asked: Asked) -> bytes:
        """The answer to a request, `n` completions for each prompt, as JSON.

        Raises `VersionConflictError`: other weights are held than it asks for.
        """
        return await self._in_thread(self._body, asked, await self._completed(asked))

    async def generate(self, asked: GenerateRequest) -> bytes:
        """The answer to a request for token ids, as JSON. Raises as `complete`, and `RequestError`."""
        found = await self._completed(asked.completion(self._engine.max_completion_length))
        completions = [answer.completion for _, answer in found]
        return await self._in_thread(lambda: _written_out(generated(completions, len(asked.token_ids))))

    async def _completed(self, asked: Asked) -> list[tuple[Request, Answer]]:
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
        return [(job.request, answers[i]) for i, job in enumerate(jobs)]

    async def score(self, asked: ScoreRequest, scorer: Scorer) -> bytes:
        """The answer to a request for scores, as JSON. Raises as `complete` and `BatchingEngine.submit`."""
        for place, ids in enumerate(map(self._ids, asked.token_ids)):
            if len(ids) > self._engine.context_length:
                most = self._engine.context_length
                raise RequestError(f"token_ids.{place} has {len(ids)} ids; the context has {most}")
        self._engine.submit(())  # says why nothing is served now
        weights = self._asked_for(asked) or self._engine.held
        assert weights is not None
        scores = await asyncio.get_running_loop().run_in_executor(self._scores, scorer, asked, weights)
        size = sum(map(len, asked.token_ids))
        body: dict[str, Any] = {"object": "score", "model": self._name, "policy_version": weights.version}
        body |= {"scores": scores, "usage": {"prompt_tokens": size, "completion_tokens": 0, "total_tokens": size}}
        return await self._in_thread(_written_out, body)

    async def chunks(self, asked: Asked) -> AsyncIterator[list[str]]:
        """The same as server-sent events, those together that are ready together: a slow client costs no more.

        What cannot be served is refused now, not in the stream.
        """
        return self._events(asked, *await self._submitted(asked))

    def close(self) -> None:
        """Stops reading and writing texts; what is under way is dropped."""
        for threads in (self._threads, self._scores):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _submitted(self, asked: Asked) -> tuple[list[Job], _Told]:
        """The completions that are asked for, and where the engine tells of them."""
        weights = self._asked_for(asked)
        loop, queue, kept = asyncio.get_running_loop(), _Told(), Counter[str]()
        async with nullcontext() if asked.json_schema() is None else self._one_schema:  # some take seconds to compile
            requests, settings, pictures = await self._in_thread(self._prepared, asked)

        def job(index: int, request: Request) -> Job:
            def tell(what: Any) -> None:
                loop.call_soon_threadsafe(queue.put_nowait, (index, what))

            tokens = (lambda *new: tell(new)) if asked.stream else None
            return Job(request, settings, tell, tokens, weights=weights, kept=kept, pictures=pictures)

        jobs = [job(index, request) for index, request in enumerate(requests)]
        try:
            await self._in_thread(self._engine.submit, jobs)
        except asyncio.CancelledError:
            self._engine.cancel(jobs)
            raise
        return jobs, queue

    def _asked_for(self, asked: Asked | ScoreRequest) -> Weights | None:
        """The weights that a request insists on; None = it takes any."""
        if asked.policy_version is None:
            return None
        if asked.policy_version != self._engine.version:
            raise unheld(asked.policy_version, self._engine.version)
        return self._engine.held

    async def _in_thread(self, do: Callable[..., Done], *args: Any) -> Done:
        return await asyncio.get_running_loop().run_in_executor(self._threads, do, *args)

    def _prepared(self, asked: Asked) -> tuple[list[Request], SamplingSettings, list[Any]]:
        """`n` requests for each prompt, each with a random stream of its own; and the pictures in them."""
        pictures: list[Any] = []
        if isinstance(asked, ChatRequest):
            how = (asked.chat_template_kwargs, self._most_characters)
            text, pictures = chat_prompt(self._tokenizer, asked.messages, *how, sees=self._album is not None)
            prompts = [self._encoded(text, special=False)]
            if self._album is not None and (pictures or self._album.placeholder_id in prompts[0]):
                prompts = [self._album.expand(np.array(prompts[0], dtype=np.int64), pictures)]
            longest = asked.max_completion_tokens or asked.max_tokens or self._engine.max_completion_length
        else:
            prompts = [self._ids(prompt) for prompt in asked.prompts()]
            longest = asked.max_tokens
        count = len(prompts) * asked.n
        for name in ("streams", "choices"):
            values = getattr(asked, name)
            if values is not None and len(values) != count:
                raise RequestError(f"{name} has {len(values)} entries for {count} completions")
        schema = asked.json_schema()
        rule = None if schema is None else json_rules(schema, self._tokenizer, self._engine.vocabulary, self._ends)
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        streams = asked.streams or [[seed, place] for place in range(count)]
        choices = asked.choices or [None] * count
        arrays = [array for prompt in prompts for array in [np.array(prompt, dtype=np.int64)] * asked.n]
        requests = [
            Request(ids, tuple(stream), None if some is None else tuple(map(tuple, some)), rule and rule())
            for ids, stream, some in zip(arrays, streams, choices, strict=True)
        ]
        return requests, asked.settings(longest, self._ends, self._engine.vocabulary), pictures

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._encoded(prompt, special=True)
        size = self._engine.vocabulary
        if prompt and not 0 <= min(prompt) <= max(prompt) < size:
            raise RequestError(f"the prompt has a token id of {max(prompt, key=abs)}; the vocabulary has {size}")
        return prompt

    def _encoded(self, text: str, *, special: bool) -> list[int]:
        if len(text) > self._most_characters:
            read = f"one of up to {self._most_characters} is read for this model's context"
            raise RequestError(f"the prompt has {len(text)} characters; {read} of {self._engine.context_length} tokens")
        return [int(token) for token in self._tokenizer(text, add_special_tokens=special)["input_ids"]]

    def _body(self, asked: Asked, answers: Sequence[tuple[Request, Answer]]) -> bytes:
        sampled = sum(len(answer.completion.token_ids) for _, answer in answers)
        body = envelope(asked, self._name) | {
            "choices": [{"index": index, **self._choice(asked, *one)} for index, one in enumerate(answers)],
            "policy_version": min(answer.versions[0][1] for _, answer in answers),
            "usage": usage(asked, [request for request, _ in answers], sampled),
        }
        return _written_out(body)

    def _choice(self, asked: Asked, request: Request, answer: Answer) -> dict[str, Any]:
        completion, ids = answer.completion, answer.completion.token_ids.tolist()
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        chat = isinstance(asked, ChatRequest)
        found: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        found |= {
            "finish_reason": completion.finish_reason,
            "policy_version": answer.versions[0][1],
            "policy_versions": [list(part) for part in answer.versions],
            "logprobs": self._logprobs(asked, ids, completion.logprobs.tolist()) if asked.wants_logprobs else None,
        }
        if asked.return_token_ids:
            prompt = request.token_ids if self._album is None else self._album.placeholders(request.token_ids)
            found |= {"token_ids": completion.token_ids, "prompt_token_ids": prompt}
        if asked.return_support and completion.support is not None:
            found["support"] = {"ids": completion.support.ids, "offsets": completion.support.offsets}
        return found

    def _logprobs(self, asked: Asked, ids: list[int], logprobs: list[float]) -> dict[str, Any]:
        tokens = [self._text(token) for token in ids]
        if not isinstance(asked, ChatRequest):
            return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None}
        pairs = zip(tokens, logprobs, strict=True)
        return {
            "content": [{"token": t, "logprob": lp, "bytes": list(t.encode()), "top_logprobs": []} for t, lp in pairs]
        }

    async def _events(self, asked: Asked, jobs: list[Job], queue: _Told) -> AsyncIterator[list[str]]:
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
                    counted = usage(asked, [job.request for job in jobs], sampled)
                    yield [_event(common | {"choices": [], "usage": counted})]
            yield ["data: [DONE]\n\n"]
        finally:
            if left:
                self._engine.cancel(jobs)

    def _written(
        self, asked: Asked, common: dict[str, Any], told: Sequence[tuple[int, Any]], texts: dict[int, GrowingText]
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
            role = {"role": "assistant"} if first else {}
            said = {"delta": role | {"content": text}} if isinstance(asked, ChatRequest) else {"text": text}
            choice = {"index": index, **said, "finish_reason": reason}
            if asked.wants_logprobs:
                choice["logprobs"] = self._logprobs(asked, ids, logprobs)
            if asked.return_token_ids:
                choice["token_ids"] = ids
            events.append(_event(common | {"choices": [choice], "policy_version": version}))
        return events


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
