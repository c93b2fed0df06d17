"""The generation engine: continuous batching over a slot cache, in this process.

    waiting requests --admit--> prefill new prompts, draw first tokens --> rows of the decode batch
                                                                             |  one token each, repeated
    completions  <--finish-- end-of-sequence, stop string, token limit  <----+  (free rows: admit again)

Each distinct prompt is prefilled once in a call. A finished row leaves the batch at once, so the batch
shrinks. Each completion draws from its own random stream, so what it samples does not depend on the others.

Limits: a call reserves `max_tokens` for each running row (no paging), and no CUDA graphs are captured.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from covey.errors import GenerationError, ModelError
from covey.pytorch.engine.attention import DecodeAttention, PrefillAttention
from covey.pytorch.engine.cache import KVCache, PromptBlock, block_capacity
from covey.pytorch.engine.choose import choose_runner
from covey.pytorch.engine.merge import EffectiveWeights, bare_model
from covey.pytorch.engine.runner import Step
from covey.pytorch.engine.sampling import Draw, check_settings, sample
from covey.pytorch.engine.stop import StopMatcher
from covey.pytorch.engine.streams import stream_key, uniforms
from covey.types import Completion, FinishReason, IntArray, Progress, Request, SamplingSettings, Support

_LOG = logging.getLogger(__name__)
_PREFILL_TOKENS = 2048
"""Prompts are prefilled together up to this many tokens: bounds the memory of activations."""
_NO_VERSION = -1


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What one call did.

    Attributes:
        prefill_tokens: prompt tokens computed; a shared prompt counts once.
        decoded_tokens: tokens sampled, the first of each completion included.
        decode_steps: forward passes of the decode batch.
        peak_batch: most rows in the decode batch.
        prefill_seconds: time in prompt forward passes.
        decode_seconds: time in decode forward passes. On a GPU, work is counted where it is waited for: in
            sampling.
        sampling_seconds: time in drawing tokens and stop rules.
        cache_bytes: memory held for keys and values.
        step_rows: rows of each decode step.
        step_seconds: seconds of its forward pass.
    """

    prefill_tokens: int = 0
    decoded_tokens: int = 0
    decode_steps: int = 0
    peak_batch: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    sampling_seconds: float = 0.0
    cache_bytes: int = 0
    step_rows: tuple[int, ...] = ()
    step_seconds: tuple[float, ...] = ()


class Engine:
    """Samples completions from a copy of a policy's weights; implements `covey.types.Generator`.

    The weights are taken at construction, as version 0, and again at every `sync`. The policy itself is never
    changed: adapters are merged into the copy only.

    Args:
        model: a transformers causal language model, or a PEFT model around one.
        tokenizer: needed for stop strings only.
        kv_cache_bytes: upper limit of the memory for keys and values.
        max_batch_size: most completions in the decode batch.
        context_length: most tokens of prompt and completion together; default: what the model was built for.
        dtype: of the copy and of the computation; default: the model's. Probabilities are float32 always.
        device: of the copy; default: the model's.

    Raises:
        ModelError: the model cannot be run, or `context_length` exceeds the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        kv_cache_bytes: int = 1 << 30,
        max_batch_size: int = 64,
        context_length: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if max_batch_size < 1:
            raise ModelError(f"max_batch_size={max_batch_size}: at least one completion must run; use 1 or more")
        parameter = next(p for p in model.parameters() if p.is_floating_point())
        self._device = torch.device(device) if device is not None else parameter.device
        self._dtype = dtype or parameter.dtype
        self._tokenizer = tokenizer
        self._max_batch_size = max_batch_size
        self.context_length = _context_length(model, context_length)
        self.last_stats = GenerationStats()
        self._version = _NO_VERSION
        self._runner, why = choose_runner(model, self._dtype, self._device)
        _LOG.info("sampling with the %s runner (%s)", self._runner.name, why)
        self._cache = KVCache(self._runner.layer_shapes, kv_cache_bytes, self._dtype, self._device)
        self._version = 0

    @property
    def policy_version(self) -> int:
        """Version of the weights held; -1 after `release`, and after a `sync` that did not finish."""
        return self._version

    @property
    def cache_budget(self) -> tuple[int, int]:
        """Tokens that the cache may hold, and bytes of one; no limit and 0 for a model that is run without one."""
        return self._cache.capacity, self._cache.bytes_per_token

    @property
    def max_batch_size(self) -> int:
        """Most completions in the decode batch."""
        return self._max_batch_size

    @property
    def runner(self) -> str:
        """How the model is run: "fast", "general" or "recompute"."""
        return self._runner.name

    def sync(self, model: nn.Module, version: int) -> None:
        """Take the current weights of `model`, adapters merged, and call them `version`.

        Args:
            model: the model that the engine was built from, or one of equal shape.
            version: must be asked for in the calls that follow.
        """
        self._version = _NO_VERSION  # until all of it has arrived: a broken copy must not be sampled from
        self._runner.load(EffectiveWeights(model))
        self._version = version

    def release(self) -> None:
        """Give back what memory can be given back until the next `sync`, which must come before the next call."""
        self._version = _NO_VERSION
        self._runner.release()

    def __call__(
        self,
        requests: Sequence[Request],
        settings: SamplingSettings,
        *,
        policy_version: int,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """Sample one completion for each request, in order; see `covey.types.Generator`.

        `max_tokens` is cut to what the context leaves (finish reason "length"). With `keep_support` and
        nothing cut off (top_k=0, top_p=1, min_p=0) a completion's `support` is None: it is the whole
        vocabulary.

        Raises:
            GenerationError: other weights than `policy_version` are held, a prompt is empty or does not fit
                the context, not even one completion fits the cache, or the logits are not finite.
            ConfigError: the settings describe no distribution.
        """
        self._check(requests, settings, policy_version)
        if not requests:
            return []
        with torch.inference_mode():
            call = _Call(self, requests, settings, progress)
            try:
                while call.waiting or call.rows:
                    call.admit()
                    if call.rows:
                        call.decode()
            finally:
                self.last_stats = call.stats()
        return [call.completion(sequence, policy_version) for sequence in call.sequences]

    def _check(self, requests: Sequence[Request], settings: SamplingSettings, policy_version: int) -> None:
        if policy_version != self._version:
            held = "no weights" if self._version == _NO_VERSION else f"version {self._version}"
            raise GenerationError(
                f"policy_version={policy_version}: the engine holds {held}; "
                f"call engine.sync(model, {policy_version}) first"
            )
        check_settings(settings)
        if settings.stop_strings and self._tokenizer is None:
            raise GenerationError(
                f"stop_strings={settings.stop_strings!r}: the engine has no tokenizer to see text with; "
                "build it with Engine(model, tokenizer)"
            )
        for i, request in enumerate(requests):
            length = len(request.token_ids)
            if length == 0:
                raise GenerationError(f"request {i}: the prompt has no tokens; give it at least one")
            if length >= self.context_length:
                raise GenerationError(
                    f"request {i}: the prompt has {length} tokens, the context {self.context_length}, which "
                    "leaves no room for a completion; shorten the prompt or set data.max_prompt_length"
                )


@dataclass(slots=True, eq=False)
class _Prompt:
    """A distinct prompt of this call."""

    token_ids: IntArray
    unfinished: int = 0  # requests that still need it
    block: PromptBlock | None = None
    logits: Tensor | None = None  # [V] after its last token, while requests wait for it


@dataclass(slots=True, eq=False)
class _Sequence:
    """One request under way."""

    prompt: _Prompt
    limit: int
    key: int
    matcher: StopMatcher | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support: list[IntArray] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class _Call:
    """The state of one call. Dropping it leaves the engine ready for the next, whatever went wrong."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        settings: SamplingSettings,
        progress: Progress | None,
    ) -> None:
        self._engine, self._settings, self._progress = engine, settings, progress
        self._cache, self._runner, self._device = engine._cache, engine._runner, engine._device
        self._eos = frozenset(settings.eos_token_ids)
        prompts: dict[bytes, _Prompt] = {}
        self.sequences: list[_Sequence] = []
        for request in requests:
            ids = np.ascontiguousarray(request.token_ids, dtype=np.int64)
            prompt = prompts.setdefault(ids.tobytes(), _Prompt(ids))
            prompt.unfinished += 1
            limit = min(settings.max_tokens, engine.context_length - len(ids))
            matcher = StopMatcher(engine._tokenizer, settings.stop_strings) if settings.stop_strings else None
            self.sequences.append(_Sequence(prompt, limit, stream_key(request.stream), matcher))
        order = {id(p): i for i, p in enumerate(prompts.values())}
        # requests of a prompt together, so that it is prefilled once; equal capacities together: they batch
        in_turn = sorted(self.sequences, key=lambda s: (-block_capacity(len(s.prompt.token_ids)), order[id(s.prompt)]))
        self.waiting = deque(in_turn)
        self.rows: list[_Sequence] = []
        self._attention: DecodeAttention | None = None
        self._finished = 0
        self._prefill_tokens = 0
        self._steps: list[tuple[int, float]] = []  # rows and seconds of each decode step
        self._seconds = {"prefill": 0.0, "sampling": 0.0}
        self._lay_out(in_turn)

    def admit(self) -> None:
        """Fill free rows: prefill the prompts that are new, draw each admitted request's first token."""
        while self.waiting and len(self.rows) < self._cache.slots:
            admitted: list[_Sequence] = []
            new: list[_Prompt] = []
            tokens = 0
            while self.waiting and len(self.rows) + len(admitted) < self._cache.slots:
                prompt = self.waiting[0].prompt
                if prompt.block is None:
                    if new and tokens + len(prompt.token_ids) > _PREFILL_TOKENS:
                        break
                    prompt.block = self._cache.allocate(len(prompt.token_ids))
                    if prompt.block is None:
                        break
                    new.append(prompt)
                    tokens += len(prompt.token_ids)
                admitted.append(self.waiting.popleft())
            if not admitted:
                return  # no room until a running prompt's last completion finishes
            if new:
                self._prefill(new)
            logits = torch.stack([s.prompt.logits for s in admitted if s.prompt.logits is not None])
            self._append(admitted, self._draw(admitted, logits))
            self.rows += [s for s in admitted if s.finish_reason is None]
            self._attention = None
            self._drop_logits(admitted)

    def decode(self) -> None:
        """One more token for each row."""
        started = time.perf_counter()
        rows = self.rows
        if self._attention is None:
            blocks = [s.prompt.block for s in rows if s.prompt.block is not None]
            self._attention = DecodeAttention(self._cache, blocks, self._device)
        own = np.array([len(s.token_ids) - 1 for s in rows])
        self._attention.advance(own)
        positions = own + np.array([len(s.prompt.token_ids) for s in rows])
        step = Step(
            token_ids=self._tensor([s.token_ids[-1] for s in rows]),
            positions=self._tensor(positions),
            last=None,
            attention=self._attention,
            histories=lambda: [np.concatenate([s.prompt.token_ids, s.token_ids]) for s in rows],
        )
        logits = self._runner.forward(step)
        self._steps.append((len(rows), time.perf_counter() - started))
        self._append(rows, self._draw(rows, logits))
        self._compact()

    def completion(self, sequence: _Sequence, version: int) -> Completion:
        """What the caller gets."""
        assert sequence.finish_reason is not None
        support = None
        if sequence.support:
            offsets = np.cumsum([0, *map(len, sequence.support)])
            support = Support(ids=np.concatenate(sequence.support), offsets=offsets)
        return Completion(
            token_ids=np.array(sequence.token_ids, dtype=np.int64),
            logprobs=np.array(sequence.logprobs, dtype=np.float32),
            finish_reason=sequence.finish_reason,
            policy_version=version,
            support=support,
        )

    def stats(self) -> GenerationStats:
        """The numbers so far."""
        rows, seconds = tuple(r for r, _ in self._steps), tuple(s for _, s in self._steps)
        return GenerationStats(
            prefill_tokens=self._prefill_tokens,
            decoded_tokens=sum(len(s.token_ids) for s in self.sequences),
            decode_steps=len(rows),
            peak_batch=max(rows, default=0),
            prefill_seconds=self._seconds["prefill"],
            decode_seconds=sum(seconds),
            sampling_seconds=self._seconds["sampling"],
            cache_bytes=self._cache.allocated_bytes,
            step_rows=rows,
            step_seconds=seconds,
        )

    def _lay_out(self, in_turn: Sequence[_Sequence]) -> None:
        """Choose the number of rows: the most for which any stretch of the queue fits, prompts and all."""
        slot_tokens = max(1, max(s.limit for s in in_turn) - 1)  # the last token is never fed back

        def needed(rows: int) -> int:
            return rows * slot_tokens + _widest_stretch(in_turn, rows)

        most = min(self._engine._max_batch_size, len(in_turn))
        rows = bisect.bisect_right(range(1, most + 1), self._cache.capacity, key=needed)
        if rows == 0:
            size = self._cache.bytes_per_token
            prompt = max(len(s.prompt.token_ids) for s in in_turn)
            raise GenerationError(
                f"kv_cache_bytes={self._cache.budget_bytes}: one completion of {slot_tokens + 1} tokens "
                f"after a prompt of {prompt} needs {needed(1) * size} bytes ({size} a token); raise "
                f"sampling.kv_cache_gb to at least {needed(1) * size / 2**30:.3g}, or lower "
                "sampling.max_completion_length"
            )
        # room for a quarter more prompts than run at once: freed blocks do not always fit the next prompt
        everything, running = _widest_stretch(in_turn, len(in_turn)), _widest_stretch(in_turn, rows)
        self._cache.open(
            rows, slot_tokens, min(everything, running + running // 4, self._cache.capacity - rows * slot_tokens)
        )

    def _prefill(self, prompts: Sequence[_Prompt]) -> None:
        started = time.perf_counter()
        lengths = np.array([len(p.token_ids) for p in prompts])
        self._prefill_tokens += int(lengths.sum())
        step = Step(
            token_ids=self._tensor(np.concatenate([p.token_ids for p in prompts])),
            positions=self._tensor(np.concatenate([np.arange(n) for n in lengths])),
            last=self._tensor(np.cumsum(lengths) - 1),
            attention=PrefillAttention(self._cache, [p.block for p in prompts if p.block is not None]),
            histories=lambda: [p.token_ids for p in prompts],
        )
        for prompt, logits in zip(prompts, self._runner.forward(step), strict=True):
            prompt.logits = logits
        self._seconds["prefill"] += time.perf_counter() - started

    def _draw(self, sequences: Sequence[_Sequence], logits: Tensor) -> Draw:
        started = time.perf_counter()
        keys = np.array([s.key for s in sequences], dtype=np.uint64)
        drawn = np.array([len(s.token_ids) for s in sequences], dtype=np.uint64)
        draw = sample(logits, self._settings, uniforms(keys, drawn))
        if not np.isfinite(draw.logprobs).all():
            self._cache.clear()
            row = int(np.flatnonzero(~np.isfinite(draw.logprobs))[0])
            raise GenerationError(
                f"completion token {int(drawn[row])}: the model's logits are not finite; the weights have "
                f"diverged or {self._engine._dtype} overflows: lower optim.learning_rate or use float32"
            )
        self._seconds["sampling"] += time.perf_counter() - started
        return draw

    def _append(self, sequences: Sequence[_Sequence], draw: Draw) -> None:
        """Add the drawn tokens and apply the stop rules."""
        started = time.perf_counter()
        finished = self._finished
        for i, sequence in enumerate(sequences):
            token = int(draw.token_ids[i])
            sequence.token_ids.append(token)
            sequence.logprobs.append(float(draw.logprobs[i]))
            if draw.support is not None:
                sequence.support.append(draw.support[i])
            if token in self._eos or (sequence.matcher is not None and sequence.matcher.push(token)):
                sequence.finish_reason = "stop"
            elif len(sequence.token_ids) >= sequence.limit:
                sequence.finish_reason = "length"
            if sequence.finish_reason is not None:
                self._finished += 1
                self._retire(sequence)
        self._seconds["sampling"] += time.perf_counter() - started
        if self._progress is not None and self._finished > finished:
            self._progress(self._finished, len(self.sequences))

    def _retire(self, sequence: _Sequence) -> None:
        prompt = sequence.prompt
        prompt.unfinished -= 1
        if prompt.unfinished == 0 and prompt.block is not None:
            self._cache.release(prompt.block)

    def _compact(self) -> None:
        """Move the last rows into the places of finished ones: the running rows stay the first slots."""
        if all(s.finish_reason is None for s in self.rows):
            return
        self._attention = None
        for place in reversed(range(len(self.rows))):
            if self.rows[place].finish_reason is None:
                continue
            last = self.rows.pop()
            if place < len(self.rows):
                self.rows[place] = last
                self._cache.move_slot(len(self.rows), place, len(last.token_ids) - 1)

    def _drop_logits(self, admitted: Sequence[_Sequence]) -> None:
        needed = {id(s.prompt) for s in self.waiting}
        for sequence in admitted:
            if id(sequence.prompt) not in needed:
                sequence.prompt.logits = None

    def _tensor(self, values: Sequence[int] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self._device)


def _widest_stretch(in_turn: Sequence[_Sequence], rows: int) -> int:
    """Most prompt tokens that any `rows` consecutive requests need."""
    window: dict[int, int] = {}
    tokens = widest = 0
    for i, sequence in enumerate(in_turn):
        prompt = id(sequence.prompt)
        if window.setdefault(prompt, 0) == 0:
            tokens += block_capacity(len(sequence.prompt.token_ids))
        window[prompt] += 1
        if i >= rows:
            left = in_turn[i - rows].prompt
            window[id(left)] -= 1
            if window[id(left)] == 0:
                tokens -= block_capacity(len(left.token_ids))
        widest = max(widest, tokens)
    return widest


def _context_length(model: nn.Module, asked: int | None) -> int:
    config: Any = bare_model(model).config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    built_for = getattr(config, "max_position_embeddings", None)
    if asked is None:
        return int(built_for) if built_for else 1 << 31
    if asked < 2 or (built_for and asked > built_for):
        raise ModelError(f"context_length={asked}: the model was built for 2 to {built_for} tokens; use one of these")
    return asked
