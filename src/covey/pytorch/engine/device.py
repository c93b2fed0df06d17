"""The device of sessions in PyTorch: continuous batching of completions and of conversations over a slot cache.

Each distinct prompt is prefilled once while anything needs it. A finished row leaves the batch at once. The running
rows own the first slots of the cache, in their order; parked ones own those after them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covey.errors import GenerationError
from covey.pytorch.engine.attention import DecodeAttention, ExtendAttention, PrefillAttention
from covey.pytorch.engine.cache import (
    KVCache,
    Prompts,
    SharedPrompt,
    block_capacity,
    lay_out_for_clients,
    lay_out_for_conversations,
    lay_out_for_queue,
)
from covey.pytorch.engine.runner import Runner, Step
from covey.pytorch.engine.sampling import draw_tokens
from covey.rollout.turns import Device, Drawn, Row

_PREFILL_TOKENS = 2048
"""Prompts are prefilled together up to this many tokens: bounds the memory of activations."""
_PATIENCE = 4
"""Decode steps that answered conversations wait at most until as many are ready as run."""


class TorchDevice(Device):
    """Slots and prompts of one session; a `covey.rollout.turns.Device`. A row's `place` is its `SharedPrompt`.

    Without `reserve` or `reserve_to_serve` the cache is laid out for the rows that are in the queue at first.

    Args:
        runner: runs the model.
        cache: keys and values.
        max_rows: most rows at once.
        context_length: most tokens of a row.
        device: of the runner.
    """

    def __init__(
        self, runner: Runner, cache: KVCache, *, max_rows: int, context_length: int, device: torch.device
    ) -> None:
        super().__init__(context_length)
        self._runner, self._cache, self._max_rows, self._device = runner, cache, max_rows, device
        self._prompts = Prompts(cache)
        self._rows: list[Row] = []
        self._parked: list[Row] = []
        self._more_may_come = False  # of a prompt that is known already
        self._laid_out = False
        self._attention: DecodeAttention | None = None
        self._patience = _PATIENCE

    @property
    def slots(self) -> int:
        """Most rows that run at once."""
        return self._cache.slots

    @property
    def reused_prompts(self) -> int:
        """Prompts that were still remembered when they came again."""
        return self._prompts.reused

    def remember_prompts(self, count: int) -> None:
        """Keep up to `count` prompts that nothing uses any more, until their room is needed: the latest used stay."""
        self._prompts.remembered = count

    def reserve(self, rows: int, own_tokens: int, prompt_lengths: Sequence[int]) -> None:
        """Memory for conversations; see `Engine.session`."""
        lay_out_for_conversations(self._cache, rows, own_tokens, prompt_lengths)
        self._reserved()

    def reserve_to_serve(self, rows: int, own_tokens: int) -> None:
        """Memory for single completions that nobody knows yet; see `Engine.serving_session`."""
        lay_out_for_clients(self._cache, rows, own_tokens, self.whole_tokens)
        self._reserved()

    def _reserved(self) -> None:
        self._laid_out = self._more_may_come = True
        self.own_tokens = self._cache.slot_tokens + 1  # the last token is never fed back
        self.stats.cache_bytes = self._cache.allocated_bytes

    # ------------------------------------------------------------------ what the scheduler asks

    def fits(self, prompt: int) -> bool:
        """Whether the memory that is reserved for prompts holds one of so many tokens."""
        return block_capacity(prompt) <= self._cache.prompt_tokens

    def enter(self, row: Row) -> None:
        """The row's prompt is needed."""
        row.place = self._prompts.take(row.prompt_ids)

    def begin(self, queue: deque[Row]) -> Iterator[Drawn]:
        """Fill free slots: prefill the prompts that are new, draw each admitted row's first token."""
        if queue and not self._laid_out:
            in_turn = lay_out_for_queue(self._cache, queue, self._max_rows)
            queue.clear()
            queue.extend(in_turn)
            self._laid_out = True
            self.stats.cache_bytes = self._cache.allocated_bytes
        return self._admit(queue)

    @torch.inference_mode()
    def extend(self, resuming: list[Row]) -> Iterator[Drawn]:
        """Prefill what was said to parked rows, draw the first token of each one's answer.

        A pass over a few of them costs nearly as much as one over many: they wait for each other a little.
        """
        if len(resuming) < len(self._rows) and self._patience > 0:
            self._patience -= bool(resuming)
            return
        self._patience = _PATIENCE
        while resuming:
            rows: list[Row] = []
            tokens = 0
            while resuming and (not rows or tokens + resuming[0].new <= _PREFILL_TOKENS):
                rows.append(resuming.pop(0))
                tokens += rows[-1].new
            yield self._draw(rows, self._prefill_said(rows))

    @torch.inference_mode()
    def decode(self, waiting: int) -> Iterator[Drawn]:
        """One more token for each row."""
        if not self._rows:
            return
        started = time.perf_counter()
        rows = self._rows
        if self._attention is None:
            blocks = [row.place.block for row in rows if row.place.block is not None]
            self._attention = DecodeAttention(self._cache, blocks, self._device)
        held = np.array([row.held for row in rows])
        self._attention.advance(held)
        step = Step(
            token_ids=self._tensor([row.own[-1] for row in rows]),
            positions=self._tensor(held + np.array([len(row.prompt_ids) for row in rows])),
            last=None,
            attention=self._attention,
            histories=lambda: [row.history() for row in rows],
        )
        logits = self._runner.forward(step)
        self.stats.decode_steps += 1
        self.stats.decode_seconds += time.perf_counter() - started
        self.stats.peak_batch = max(self.stats.peak_batch, len(rows))
        yield self._draw(rows, logits)

    @torch.inference_mode()
    def leave(self, rows: Sequence[Row]) -> None:
        """Kept rows are parked, of the others the slots are filled from the end."""
        for row in rows:
            if row.error is not None:
                self._wipe(row)
        self._compact()

    @torch.inference_mode()
    def drop(self, row: Row) -> None:
        """Free the slot of a parked or running row; its prompt is needed by one row less."""
        if row in self._rows:
            row.finish_reason = row.finish_reason or "length"
            self._compact()
            return
        if row in self._parked:
            place = self._parked.index(row)
            last = self._parked.pop()
            if last is not row:
                self._parked[place] = last
                base = len(self._rows)
                self._cache.move_slot(base + len(self._parked), base + place, last.held)
        self._prompts.release(row.place)

    def renew(self, queue: Sequence[Row]) -> None:
        """Rows that run keep the prompts that they have, nobody else gets them."""
        self._prompts.renew()
        for row in queue:
            self._prompts.release(row.place)
            row.place = self._prompts.take(row.prompt_ids)

    def clear(self) -> None:
        """Overwrite the cache."""
        self._cache.clear()

    # ------------------------------------------------------------------ sampling

    @torch.inference_mode()
    def _admit(self, queue: deque[Row]) -> Iterator[Drawn]:
        while queue and self._free_slots():
            admitted: list[Row] = []
            new: list[SharedPrompt] = []
            tokens = 0
            while queue and len(admitted) < self._free_slots():
                prompt: SharedPrompt = queue[0].place
                if prompt.block is None:
                    if new and tokens + len(prompt.token_ids) > _PREFILL_TOKENS:
                        break
                    if not self._prompts.allocate(prompt):
                        break
                    new.append(prompt)
                    tokens += len(prompt.token_ids)
                admitted.append(queue.popleft())
            if not admitted:
                if not self._rows and not self._parked:
                    length = len(queue[0].prompt_ids)
                    raise GenerationError(
                        f"a prompt of {length} tokens does not fit the room reserved for prompts; raise "
                        "sampling.kv_cache_gb or environment.max_turn_prompt_tokens"
                    )
                return  # no room until a running prompt's last row finishes
            if new:
                self._prefill(new)
            logits = torch.stack([row.place.logits for row in admitted if row.place.logits is not None])
            drawn = self._draw(admitted, logits)
            self._make_places(len(admitted))
            self._rows += admitted
            yield drawn
            self._drop_logits(admitted, queue)

    def _prefill(self, prompts: Sequence[SharedPrompt]) -> None:
        started = time.perf_counter()
        lengths = np.array([len(prompt.token_ids) for prompt in prompts])
        self.stats.prefill_tokens += int(lengths.sum())
        step = Step(
            token_ids=self._tensor(np.concatenate([prompt.token_ids for prompt in prompts])),
            positions=self._tensor(np.concatenate([np.arange(n) for n in lengths])),
            last=self._tensor(np.cumsum(lengths) - 1),
            attention=PrefillAttention(self._cache, [prompt.block for prompt in prompts if prompt.block is not None]),
            histories=lambda: [prompt.token_ids for prompt in prompts],
        )
        for prompt, logits in zip(prompts, self._runner.forward(step), strict=True):
            prompt.logits = logits
        self.stats.prefill_seconds += time.perf_counter() - started

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
        self.stats.prefill_tokens += int(lengths.sum())
        places = [
            (row.place.block, base + i, row.held, len(ids))
            for i, (row, ids) in enumerate(zip(rows, new, strict=True))
            if row.place.block is not None
        ]
        step = Step(
            token_ids=self._tensor(np.concatenate(new)),
            positions=self._tensor(
                np.concatenate([len(row.prompt_ids) + np.arange(row.held, len(row.own)) for row in rows])
            ),
            last=self._tensor(np.cumsum(lengths) - 1),
            attention=ExtendAttention(self._cache, places, self._device),
            histories=lambda: [row.history() for row in rows],
        )
        logits = self._runner.forward(step)
        for row in rows:
            row.held = len(row.own)
        self.stats.prefill_seconds += time.perf_counter() - started
        return logits

    def _draw(self, rows: Sequence[Row], logits: Tensor) -> Drawn:
        started = time.perf_counter()
        self.logits_dtype = str(logits.dtype)
        draw = draw_tokens(rows, logits)
        self.stats.sampling_seconds += time.perf_counter() - started
        support = None if draw.support is None else [[ids] for ids in draw.support]
        return Drawn(rows, draw.token_ids[:, None], draw.logprobs[:, None], support)

    def _wipe(self, row: Row) -> None:
        """What went wrong leaves no value that is not finite behind, nor a prompt for others."""
        self._cache.clear_slot(self._rows.index(row))
        prompt: SharedPrompt = row.place
        if prompt.block is not None and prompt.logits is not None and not prompt.logits.isfinite().all():
            self._cache.clear_block(prompt.block)
            prompt.broken = True

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
            self._prompts.release(row.place)

    def _drop_logits(self, admitted: Sequence[Row], queue: deque[Row]) -> None:
        if self._more_may_come:
            return
        needed = {id(row.place) for row in queue}
        for row in admitted:
            if id(row.place) not in needed:
                row.place.logits = None

    def _tensor(self, values: Sequence[int] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self._device)
