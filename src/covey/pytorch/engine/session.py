"""What is under way in the engine: continuous batching of completions and of conversations over a slot cache.

    waiting --admit--> prefill new prompts, draw first tokens --> rows of the decode batch, one token each, repeated
                                                                   |                     ^
    finished <--turn over: end-of-sequence, stop string, limit ----+                     |
                                     |                                                   |
                                     +--> parked: keeps its keys and values --extend: prefill what was said to it

Each distinct prompt is prefilled once while anything needs it. A finished row leaves the batch at once. The running
rows own the first slots of the cache, in their order; parked ones own those after them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covey.errors import GenerationError
from covey.pytorch.engine.attention import DecodeAttention, ExtendAttention, PrefillAttention
from covey.pytorch.engine.cache import KVCache, block_capacity
from covey.pytorch.engine.drawing import draw_tokens
from covey.pytorch.engine.prompts import Prompts
from covey.pytorch.engine.room import room_for_clients, room_for_conversations, room_for_queue
from covey.pytorch.engine.rows import Counters, GenerationStats, Row, SharedPrompt
from covey.pytorch.engine.runner import Runner, Step
from covey.pytorch.engine.sampling import Draw
from covey.rollout.stop import StopMatcher
from covey.rollout.streams import stream_key
from covey.types import Completion, IntArray, Request, SamplingSettings, Support

_PREFILL_TOKENS = 2048
"""Prompts are prefilled together up to this many tokens: bounds the memory of activations."""
_PATIENCE = 4
"""Decode steps that answered conversations wait at most until as many are ready as run."""


class Session:
    """Rows under way with one version of the weights and one way to draw. Made by `Engine`.

    Dropping it leaves the engine ready for the next, whatever went wrong.
    """

    def __init__(
        self,
        runner: Runner,
        cache: KVCache,
        settings: SamplingSettings,
        *,
        policy_version: int,
        max_rows: int,
        context_length: int,
        tokenizer: Any,
        device: torch.device,
    ) -> None:
        self._runner, self._cache, self._settings, self._device = runner, cache, settings, device
        self._version, self._max_rows = policy_version, max_rows
        self._context, self._tokenizer = context_length, tokenizer
        self._prompts = Prompts(cache)
        self._started = 0
        self._waiting: deque[Row] = deque()
        self._resuming: list[Row] = []
        self._rows: list[Row] = []
        self._parked: list[Row] = []
        self._finished: list[Row] = []
        self._more_may_come = False  # of a prompt that is known already
        self._alone = False  # a row that goes wrong ends alone
        self._attention: DecodeAttention | None = None
        self._patience = _PATIENCE
        self._counters = Counters()

    # ------------------------------------------------------------------ what the caller does

    @property
    def busy(self) -> bool:
        """True while some turn is not over, or is over and not yet told of."""
        return bool(self._waiting or self._resuming or self._rows or self._finished)

    @property
    def rows_reserved(self) -> int:
        """Most rows that run at once."""
        return self._cache.slots

    @property
    def reused_prompts(self) -> int:
        """Prompts that were still remembered when they came again."""
        return self._prompts.reused

    @property
    def policy_version(self) -> int:
        """Of the weights that everything here is sampled from."""
        return self._version

    def start(self, request: Request, *, keep: bool = False, settings: SamplingSettings | None = None) -> Row:
        """Begin a completion; `advance` samples it.

        Args:
            request: prompt and random stream.
            keep: it may be continued: it stays parked when its turn is over, until `drop`.
            settings: how its tokens are drawn; None = as the session's.

        Raises:
            GenerationError: the prompt is empty, or leaves no room in the context.
        """
        number, length = self._started, len(request.token_ids)
        if length == 0:
            raise GenerationError(f"request {number}: the prompt has no tokens; give it at least one")
        if length >= self._context:
            raise GenerationError(
                f"request {number}: the prompt has {length} tokens, the context {self._context}, which "
                "leaves no room for a completion; shorten the prompt or set data.max_prompt_length"
            )
        ids = np.ascontiguousarray(request.token_ids, dtype=np.int64)
        prompt = self._prompts.take(ids)
        chosen = settings or self._settings
        room = self._cache.slot_tokens + 1 if self._more_may_come else chosen.max_tokens
        limit = min(chosen.max_tokens, self._context - length, room)
        row = Row(
            prompt, limit, stream_key(request.stream), keep, chosen, self._matcher(chosen), choices=request.choices
        )
        row.versions.append((0, self._version))
        self._started += 1
        self._waiting.append(row)
        return row

    def has_room_for(self, prompt: int) -> bool:
        """Whether a first prompt of so many tokens fits the context, and the memory that is reserved for prompts."""
        return prompt < self._context and block_capacity(prompt) <= self._cache.prompt_tokens

    def room_for_turn(self, row: Row, said: int) -> int:
        """Most tokens that the next turn may have after `said` tokens are said to the conversation; 0 = none."""
        own = len(row.own) + said
        left = min(self._context - len(row.prompt.token_ids) - own, self._cache.slot_tokens + 1 - own)
        return max(0, min(row.settings.max_tokens, left))

    def extend(
        self,
        row: Row,
        token_ids: IntArray,
        stream: tuple[int, ...],
        choices: tuple[tuple[int, ...], ...] | None = None,
    ) -> None:
        """Say something to a parked conversation and let it answer.

        Args:
            row: kept, and its turn over.
            token_ids: what is said, at least one token.
            stream: random stream of the answer.
            choices: the only sequences that the answer may be; None = any.

        Raises:
            GenerationError: it is not parked, nothing is said, or the answer has no room (`room_for_turn`).
        """
        limit = self.room_for_turn(row, len(token_ids))
        if row not in self._parked or row in self._resuming or len(token_ids) == 0 or limit == 0:
            raise GenerationError(
                f"a conversation of {len(row.prompt.token_ids) + len(row.own)} tokens cannot go on with "
                f"{len(token_ids)} more: it must be parked, something must be said, and the context of {self._context} "
                f"and the {self._cache.slot_tokens} tokens reserved must leave room"
            )
        row.own += [int(token) for token in token_ids]
        row.turn, row.limit, row.key = len(row.own), limit, stream_key(stream)
        row.matcher, row.finish_reason, row.choices = self._matcher(row.settings), None, choices
        row.logprobs, row.support, row.versions = [], [], [(0, self._version)]
        self._resuming.append(row)

    def drop(self, row: Row) -> None:
        """Forget a parked conversation and free its slot."""
        place = self._parked.index(row)
        last = self._parked.pop()
        if last is not row:
            self._parked[place] = last
            base = len(self._rows)
            self._cache.move_slot(base + len(self._parked), base + place, last.held)
        self._prompts.release(row.prompt)

    def cancel(self, row: Row) -> None:
        """Forget a completion that waits or runs, and free its slot; nothing happens to one that is over."""
        if row in self._waiting:
            self._waiting.remove(row)
            self._prompts.release(row.prompt)
        elif row in self._rows:
            row.keep, row.finish_reason = False, "length"
            self._compact()

    def change_version(self, version: int) -> None:
        """The engine's weights have been replaced while rows run: they go on with the new ones.

        Keys and values of tokens so far stay those of the old weights. Prompts are prefilled anew for new rows.
        """
        self._version = version
        for row in self._rows:
            row.versions.append((row.sampled, version))
        for row in self._waiting:
            row.versions = [(0, version)]
        self._prompts.renew()
        for row in self._waiting:
            self._prompts.release(row.prompt)
            row.prompt = self._prompts.take(row.prompt.token_ids)

    def end_bad_rows_alone(self) -> None:
        """No row has to do with the others: one that goes wrong is over, its `error` set; else `advance` raises."""
        self._alone = True

    def remember_prompts(self, count: int) -> None:
        """Keep up to `count` prompts that nothing uses any more, until their room is needed: the latest used stay."""
        self._prompts.remembered = count

    def advance(self) -> list[Row]:
        """Admit what waits and sample one more token for each row; returns the rows whose turn is over."""
        with torch.inference_mode():
            self._admit()
            self._resume()
            if self._rows and not self._finished:
                self._decode()
        finished, self._finished = self._finished, []
        return finished

    def completion(self, row: Row) -> Completion:
        """The turn that is over."""
        assert row.finish_reason is not None
        support = None
        if row.support:
            support = Support(ids=np.concatenate(row.support), offsets=np.cumsum([0, *map(len, row.support)]))
        return Completion(
            token_ids=np.array(row.own[row.turn :], dtype=np.int64),
            logprobs=np.array(row.logprobs, dtype=np.float32),
            finish_reason=row.finish_reason,
            policy_version=row.versions[0][1],
            support=support,
        )

    def stats(self) -> GenerationStats:
        """The numbers so far."""
        return self._counters.stats(self._cache.allocated_bytes)

    # ------------------------------------------------------------------ memory

    def lay_out(self) -> None:
        """For the completions that were started: the most rows for which any stretch of the queue fits."""
        if self._waiting:
            self._waiting = deque(room_for_queue(self._cache, self._waiting, self._max_rows))

    def make_room(self, rows: int, own_tokens: int, prompt_lengths: Sequence[int]) -> None:
        """For conversations; see `Engine.session`."""
        self._more_may_come = True
        room_for_conversations(self._cache, rows, own_tokens, prompt_lengths)

    def make_room_to_serve(self, rows: int, own_tokens: int) -> None:
        """For single completions that nobody knows yet; see `Engine.serving_session`."""
        self._more_may_come = True
        room_for_clients(self._cache, rows, own_tokens, self._context)

    # ------------------------------------------------------------------ sampling

    def _admit(self) -> None:
        """Fill free slots: prefill the prompts that are new, draw each admitted row's first token."""
        while self._waiting and self._free_slots():
            admitted: list[Row] = []
            new: list[SharedPrompt] = []
            tokens = 0
            while self._waiting and len(admitted) < self._free_slots():
                prompt = self._waiting[0].prompt
                if prompt.block is None:
                    if new and tokens + len(prompt.token_ids) > _PREFILL_TOKENS:
                        break
                    if not self._prompts.allocate(prompt):
                        break
                    new.append(prompt)
                    tokens += len(prompt.token_ids)
                admitted.append(self._waiting.popleft())
            if not admitted:
                if not self._rows and not self._parked:
                    length = len(self._waiting[0].prompt.token_ids)
                    raise GenerationError(
                        f"a prompt of {length} tokens does not fit the room reserved for prompts; raise "
                        "sampling.kv_cache_gb or environment.max_turn_prompt_tokens"
                    )
                return  # no room until a running prompt's last row finishes
            if new:
                self._prefill(new)
            logits = torch.stack([row.prompt.logits for row in admitted if row.prompt.logits is not None])
            draw = self._draw(admitted, logits)
            self._make_places(len(admitted))
            self._rows += admitted
            self._append(admitted, draw)
            self._drop_logits(admitted)

    def _resume(self) -> None:
        """Prefill what was said to parked rows, draw the first token of each one's answer.

        A pass over a few of them costs nearly as much as one over many: they wait for each other a little.
        """
        if len(self._resuming) < len(self._rows) and self._patience > 0:
            self._patience -= bool(self._resuming)
            return
        self._patience = _PATIENCE
        while self._resuming:
            rows: list[Row] = []
            tokens = 0
            while self._resuming and (not rows or tokens + self._resuming[0].new <= _PREFILL_TOKENS):
                rows.append(self._resuming.pop(0))
                tokens += rows[-1].new
            self._append(rows, self._draw(rows, self._prefill_said(rows)))

    def _decode(self) -> None:
        """One more token for each row."""
        started = time.perf_counter()
        rows = self._rows
        if self._attention is None:
            blocks = [row.prompt.block for row in rows if row.prompt.block is not None]
            self._attention = DecodeAttention(self._cache, blocks, self._device)
        held = np.array([row.held for row in rows])
        self._attention.advance(held)
        step = Step(
            token_ids=self._tensor([row.own[-1] for row in rows]),
            positions=self._tensor(held + np.array([len(row.prompt.token_ids) for row in rows])),
            last=None,
            attention=self._attention,
            histories=lambda: [row.history() for row in rows],
        )
        logits = self._runner.forward(step)
        for row in rows:
            row.held += 1
        self._counters.steps.append((len(rows), time.perf_counter() - started))
        self._append(rows, self._draw(rows, logits))

    def _prefill(self, prompts: Sequence[SharedPrompt]) -> None:
        started = time.perf_counter()
        lengths = np.array([len(prompt.token_ids) for prompt in prompts])
        self._counters.prefill_tokens += int(lengths.sum())
        step = Step(
            token_ids=self._tensor(np.concatenate([prompt.token_ids for prompt in prompts])),
            positions=self._tensor(np.concatenate([np.arange(n) for n in lengths])),
            last=self._tensor(np.cumsum(lengths) - 1),
            attention=PrefillAttention(self._cache, [prompt.block for prompt in prompts if prompt.block is not None]),
            histories=lambda: [prompt.token_ids for prompt in prompts],
        )
        for prompt, logits in zip(prompts, self._runner.forward(step), strict=True):
            prompt.logits = logits
        self._counters.prefill_seconds += time.perf_counter() - started

    def _prefill_said(self, rows: Sequence[Row]) -> Tensor:
        """Store what is new in parked rows, make them running rows, and return the logits after it, `[n, V]`.

        New are the last token of the turn before, which was never fed back, and what was said since.
        """
        started = time.perf_counter()
        for row in rows:
            self._unpark(row)
        base = len(self._rows) - len(rows)
        new = [np.array(row.own[row.held :], dtype=np.int64) for row in rows]
        lengths = np.array([len(ids) for ids in new])
        self._counters.prefill_tokens += int(lengths.sum())
        places = [
            (row.prompt.block, base + i, row.held, len(ids))
            for i, (row, ids) in enumerate(zip(rows, new, strict=True))
            if row.prompt.block is not None
        ]
        step = Step(
            token_ids=self._tensor(np.concatenate(new)),
            positions=self._tensor(
                np.concatenate([len(row.prompt.token_ids) + np.arange(row.held, len(row.own)) for row in rows])
            ),
            last=self._tensor(np.cumsum(lengths) - 1),
            attention=ExtendAttention(self._cache, places, self._device),
            histories=lambda: [row.history() for row in rows],
        )
        logits = self._runner.forward(step)
        for row in rows:
            row.held = len(row.own)
        self._counters.prefill_seconds += time.perf_counter() - started
        return logits

    def _draw(self, rows: Sequence[Row], logits: Tensor) -> Draw:
        started = time.perf_counter()
        draw = draw_tokens(rows, logits)
        error = next((row.error for row in rows if row.error is not None), None)
        if error is not None and not self._alone:
            self._cache.clear()
            raise error
        self._counters.sampling_seconds += time.perf_counter() - started
        return draw

    def _append(self, rows: Sequence[Row], draw: Draw) -> None:
        """Add the drawn tokens, apply the stop rules, and take the rows whose turn is over out of the batch."""
        started = time.perf_counter()
        self._counters.decoded_tokens += len(rows)
        over = False
        for i, row in enumerate(rows):
            if row.error is not None:
                self._forget(row)
                over = True
                continue
            kept = draw.support[i] if draw.support and (row.cuts or not self._alone) else None
            self._say(row, int(draw.token_ids[i]), float(draw.logprobs[i]), kept)
            rest = row.only_way_on()
            if rest is not None and row.finish_reason is None:
                self._complete(row, rest)
            over = over or row.finish_reason is not None
        if over:
            self._finished += [row for row in rows if row.finish_reason is not None]
            self._compact()
        self._counters.sampling_seconds += time.perf_counter() - started

    def _say(self, row: Row, token: int, logprob: float, support: IntArray | None) -> None:
        row.own.append(token)
        row.logprobs.append(logprob)
        if support is not None:
            row.support.append(support)
        if token in row.settings.eos_token_ids or (row.matcher is not None and row.matcher.push(token)):
            row.finish_reason = "stop"
        elif row.sampled >= row.limit:
            row.finish_reason = "length"

    def _forget(self, row: Row) -> None:
        """What went wrong leaves no value that is not finite behind, nor a prompt for others."""
        row.keep, row.finish_reason = False, "length"
        self._cache.clear_slot(self._rows.index(row))
        if row.prompt.block is not None and row.prompt.logits is not None and not row.prompt.logits.isfinite().all():
            self._cache.clear_block(row.prompt.block)
            row.prompt.broken = True

    def _complete(self, row: Row, rest: Sequence[int]) -> None:
        """Tokens without an alternative have probability 1: they need no forward pass."""
        for token in rest:
            if row.finish_reason is None:
                self._say(row, token, 0.0, np.array([token], dtype=np.int64))
                self._counters.decoded_tokens += 1
        row.finish_reason = row.finish_reason or "stop"

    # ------------------------------------------------------------------ slots

    def _free_slots(self) -> int:
        return self._cache.slots - len(self._rows) - len(self._parked)

    def _make_places(self, count: int) -> None:
        """Rows join: parked rows that own the next slots move behind the others."""
        self._attention = None
        base, parked = len(self._rows), len(self._parked)
        for place in range(min(count, parked)):
            # the first `count` slots after the running rows become free; their owners take the last ones
            target = base + parked + count - min(count, parked) + place
            self._cache.move_slot(base + place, target, self._parked[place].held)
        moved = min(count, parked)
        self._parked = self._parked[moved:] + self._parked[:moved]

    def _unpark(self, row: Row) -> None:
        """The parked row changes places with the first parked one, which borders on the running rows."""
        self._attention = None
        base, place = len(self._rows), self._parked.index(row)
        if place:
            self._cache.swap_slots(base, base + place, max(row.held, self._parked[0].held))
            self._parked[place] = self._parked[0]
        self._parked.pop(0)
        self._rows.append(row)

    def _compact(self) -> None:
        """Rows whose turn is over leave: kept ones are parked, of the others the slots are filled from the end."""
        self._attention = None
        for place in reversed(range(len(self._rows))):
            row = self._rows[place]
            if row.finish_reason is None:
                continue
            last = len(self._rows) - 1
            moved = self._rows.pop()
            if row.keep:
                if place < last:
                    self._cache.swap_slots(place, last, max(row.held, moved.held))
                    self._rows[place] = moved
                self._parked.insert(0, row)
                continue
            if place < last:
                self._cache.move_slot(last, place, moved.held)
                self._rows[place] = moved
            if self._parked:  # the slot between running and parked rows is free now
                self._cache.move_slot(last + len(self._parked), last, self._parked[-1].held)
                self._parked.insert(0, self._parked.pop())
            self._prompts.release(row.prompt)

    def _drop_logits(self, admitted: Sequence[Row]) -> None:
        if self._more_may_come:
            return
        needed = {id(row.prompt) for row in self._waiting}
        for row in admitted:
            if id(row.prompt) not in needed:
                row.prompt.logits = None

    def _matcher(self, settings: SamplingSettings) -> StopMatcher | None:
        stop = settings.stop_strings
        return StopMatcher(self._tokenizer, stop) if stop else None

    def _tensor(self, values: Sequence[int] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self._device)
