"""Memory for keys and values: one block for each distinct prompt, one slot for each running completion.

`KVCache` is the memory, `Prompts` says which block belongs to whom, and `lay_out_for_...` shares the memory out between
rows and prompts for each kind of session.

    tokens of a layer's memory   | slot 0 | slot 1 | ... | prompt block | prompt block | free ...
                                 |<- slot_tokens each  ->|<-        prompt region          ->

A prompt's keys and values are stored once however many completions continue it; a slot holds only what was
sampled. Slot i belongs to row i of the decode batch: when a completion finishes, the last row moves into its
place, so the running rows are always the first B slots and attention reads plain slices. Prompt blocks have a
few fixed capacities (32, 48, 64, 96, 128, 192, ...), so neighbours of equal capacity form one batched tensor
without copying.

Memory grows to what a call needs, never above the budget, and is kept for the next call. It starts as zeros
because masked positions are still multiplied with (zero) weights: they must be finite.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.errors import GenerationError
from covey.rollout.turns import Row
from covey.types import IntArray

_SMALLEST_BLOCK = 32


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores for a token: `[kv_heads, key_dim]` keys and `[kv_heads, value_dim]` values."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """Where one prompt lies: `capacity` tokens from `start`, the first `length` of them in use."""

    start: int
    capacity: int
    length: int


def block_capacity(length: int) -> int:
    """Tokens reserved for a prompt of `length`: the next of 32, 48, 64, 96, 128, 192, ..."""
    power = _SMALLEST_BLOCK
    while power < length:
        if length <= power + power // 2:
            return power + power // 2
        power *= 2
    return power


class KVCache:
    """Keys and values of all layers.

    Args:
        shapes: one for each layer; empty for a model that is run without a cache.
        budget_bytes: upper limit of the memory for keys and values.
        dtype: of keys and values.
        device: where they live.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], budget_bytes: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes = tuple(shapes)
        self.bytes_per_token = sum(s.elements for s in self.shapes) * dtype.itemsize
        self.budget_bytes = budget_bytes
        self.capacity = budget_bytes // self.bytes_per_token if self.shapes else 1 << 62
        self.slots = self.slot_tokens = self.prompt_tokens = 0
        self._dtype, self._device = dtype, device
        self._tokens = 0
        # layers of equal shape share a tensor: moving a row takes two copies and not two for each layer
        self._groups: dict[LayerShape, tuple[Tensor, Tensor]] = {}
        self._place = [(s, self.shapes[:i].count(s)) for i, s in enumerate(self.shapes)]
        self._free: list[tuple[int, int]] = []

    @property
    def allocated_bytes(self) -> int:
        """Memory that is held now, in bytes."""
        return self._tokens * self.bytes_per_token

    def open(self, slots: int, slot_tokens: int, prompt_tokens: int) -> None:
        """Lay the memory out for a call; what was stored before is forgotten."""
        self.slots, self.slot_tokens, self.prompt_tokens = slots, slot_tokens, prompt_tokens
        first, total = slots * slot_tokens, slots * slot_tokens + prompt_tokens
        self._free = [(first, prompt_tokens)]
        if self.shapes and total > self._tokens:
            self._groups.clear()  # before the new allocation, so that the two never exist together
            self._tokens = 0
            self._groups = {s: self._allocate(s, total) for s in dict.fromkeys(self.shapes)}
            self._tokens = total

    def clear(self) -> None:
        """Overwrite everything with zeros: after non-finite values."""
        for keys, values in self._groups.values():
            keys.zero_()
            values.zero_()

    def clear_slot(self, slot: int) -> None:
        """Overwrite one slot with zeros."""
        for layer in range(len(self.shapes)):
            for store in self._view(layer, slot * self.slot_tokens, 1, self.slot_tokens):
                store.zero_()

    def clear_block(self, block: PromptBlock) -> None:
        """Overwrite one prompt's block with zeros."""
        for layer in range(len(self.shapes)):
            for store in self._view(layer, block.start, 1, block.capacity):
                store.zero_()

    def slot_tensors(self, layer: int) -> tuple[Tensor, Tensor]:
        """All slots: keys `[slots, kv_heads, slot_tokens, key_dim]`, and values."""
        return self._view(layer, 0, self.slots, self.slot_tokens)

    def block_tensors(self, layer: int, start: int, count: int, capacity: int) -> tuple[Tensor, Tensor]:
        """`count` neighbouring prompt blocks: keys `[count, kv_heads, capacity, key_dim]`, and values."""
        return self._view(layer, start, count, capacity)

    def allocate(self, length: int) -> PromptBlock | None:
        """A block for a prompt of `length` tokens, or None while there is no room. First fit."""
        capacity = block_capacity(length)
        for i, (start, size) in enumerate(self._free):
            if size >= capacity:
                self._free[i : i + 1] = [(start + capacity, size - capacity)] if size > capacity else []
                return PromptBlock(start, capacity, length)
        return None

    def release(self, block: PromptBlock) -> None:
        """Give a block back, so that another prompt can have its memory."""
        merged: list[tuple[int, int]] = []
        for start, size in sorted([*self._free, (block.start, block.capacity)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = merged

    def move_slot(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` of one slot over another, in all layers."""
        for shape, (keys, values) in self._groups.items():
            for store, dim in ((keys, shape.key_dim), (values, shape.value_dim)):
                used = store[:, : self.slots * self.slot_tokens * shape.kv_heads * dim]
                slots = used.view(-1, self.slots, shape.kv_heads, self.slot_tokens, dim)
                slots[:, target, :, :tokens] = slots[:, source, :, :tokens]

    def swap_slots(self, one: int, other: int, tokens: int) -> None:
        """Exchange the first `tokens` of two slots, in all layers."""
        for shape, (keys, values) in self._groups.items():
            for store, dim in ((keys, shape.key_dim), (values, shape.value_dim)):
                used = store[:, : self.slots * self.slot_tokens * shape.kv_heads * dim]
                slots = used.view(-1, self.slots, shape.kv_heads, self.slot_tokens, dim)
                kept = slots[:, one, :, :tokens].clone()
                slots[:, one, :, :tokens] = slots[:, other, :, :tokens]
                slots[:, other, :, :tokens] = kept

    def _allocate(self, shape: LayerShape, tokens: int) -> tuple[Tensor, Tensor]:
        layers = self.shapes.count(shape)
        sizes = (shape.kv_heads * shape.key_dim, shape.kv_heads * shape.value_dim)
        keys, values = (torch.zeros(layers, tokens * size, dtype=self._dtype, device=self._device) for size in sizes)
        return keys, values

    def _view(self, layer: int, start: int, count: int, tokens: int) -> tuple[Tensor, Tensor]:
        shape, place = self._place[layer]
        keys, values = self._groups[shape]
        heads = shape.kv_heads
        first, last = start * heads, (start + count * tokens) * heads
        return (
            keys[place, first * shape.key_dim : last * shape.key_dim].view(count, heads, tokens, -1),
            values[place, first * shape.value_dim : last * shape.value_dim].view(count, heads, tokens, -1),
        )


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """A distinct first prompt, which all rows that begin with it share."""

    token_ids: IntArray
    users: int = 0  # rows that still need it
    block: PromptBlock | None = None
    logits: Tensor | None = None  # [V] after its last token, while rows wait for it
    broken: bool = False  # its logits are not finite


class Prompts:
    """The prompts of one version of the weights: each has a block while a row uses it, and longer if asked.

    Args:
        cache: where their keys and values are.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._known: dict[bytes, SharedPrompt] = {}
        self._unused: dict[bytes, SharedPrompt] = {}  # the longest unused first
        self.remembered = 0
        self.reused = 0

    def take(self, token_ids: IntArray) -> SharedPrompt:
        """The prompt, for one more row."""
        key = token_ids.tobytes()
        self.reused += self._unused.pop(key, None) is not None
        prompt = self._known.setdefault(key, SharedPrompt(token_ids))
        prompt.users += 1
        return prompt

    def release(self, prompt: SharedPrompt) -> None:
        """Note that one row less needs the prompt."""
        prompt.users -= 1
        if prompt.users:
            return
        key = prompt.token_ids.tobytes()
        if self._known.get(key) is not prompt:
            self._free(prompt)  # of older weights
        elif self.remembered and not prompt.broken and prompt.block is not None and prompt.logits is not None:
            self._unused[key] = prompt
            while len(self._unused) > self.remembered:
                self._evict()
        else:
            del self._known[key]
            self._free(prompt)

    def allocate(self, prompt: SharedPrompt) -> bool:
        """Give a prompt a block, of prompts that nothing uses if need be; False while there is no room."""
        prompt.block = self._cache.allocate(len(prompt.token_ids))
        while prompt.block is None and self._unused:
            self._evict()
            prompt.block = self._cache.allocate(len(prompt.token_ids))
        return prompt.block is not None

    def renew(self) -> None:
        """The weights are new: rows that run keep the prompts that they have, nobody else gets them."""
        while self._unused:
            self._evict()
        self._known.clear()

    def _evict(self) -> None:
        key = next(iter(self._unused))
        del self._known[key]
        self._free(self._unused.pop(key))

    def _free(self, prompt: SharedPrompt) -> None:
        if prompt.block is not None:
            self._cache.release(prompt.block)
            prompt.block = None


def lay_out_for_queue(cache: KVCache, waiting: Iterable[Row], max_rows: int) -> list[Row]:
    """The most rows for which any stretch of the queue fits, prompts and all.

    Returns:
        The queue in the order that this is for: rows of one prompt come together, so that it is prefilled once; equal
        capacities too: they batch.

    Raises:
        GenerationError: not even one completion fits.
    """
    waiting = list(waiting)
    order: dict[int, int] = {}
    for place, row in enumerate(waiting):
        order.setdefault(id(row.place), place)
    in_turn = sorted(waiting, key=lambda row: (-block_capacity(len(row.prompt_ids)), order[id(row.place)]))
    slot_tokens = max(1, max(row.limit for row in in_turn) - 1)  # the last token is never fed back

    def needed(rows: int) -> int:
        return rows * slot_tokens + _widest_stretch(in_turn, rows)

    rows = bisect.bisect_right(range(1, min(max_rows, len(in_turn)) + 1), cache.capacity, key=needed)
    if rows == 0:
        prompt = max(len(row.prompt_ids) for row in in_turn)
        raise _too_small(cache, slot_tokens, prompt, needed(1))
    # room for a quarter more prompts than run at once: freed blocks do not always fit the next prompt
    everything, running = _widest_stretch(in_turn, len(in_turn)), _widest_stretch(in_turn, rows)
    cache.open(rows, slot_tokens, min(everything, running + running // 4, cache.capacity - rows * slot_tokens))
    return in_turn


def lay_out_for_conversations(cache: KVCache, rows: int, own_tokens: int, prompt_lengths: Sequence[int]) -> None:
    """`rows` conversations of `own_tokens` after first prompts of these lengths; fewer rows if they do not fit.

    Raises:
        GenerationError: not even one conversation fits.
    """
    slot_tokens = max(1, own_tokens - 1)
    prompt_tokens = sum(block_capacity(length) for length in prompt_lengths)
    fit = (cache.capacity - prompt_tokens) // slot_tokens
    if fit < 1:
        raise _too_small(cache, slot_tokens, prompt_tokens, slot_tokens + prompt_tokens)
    cache.open(min(rows, fit), slot_tokens, prompt_tokens)


def lay_out_for_clients(cache: KVCache, rows: int, own_tokens: int, context: int) -> None:
    """`rows` completions of `own_tokens`, in three fifths of the cache at most; the rest is for their prompts.

    Raises:
        GenerationError: not even one completion fits.
    """
    slot_tokens, capacity = max(1, own_tokens - 1), cache.capacity
    rows = min(rows, 3 * capacity // 5 // slot_tokens)
    if rows < 1:
        raise _too_small(cache, slot_tokens, 2 * slot_tokens // 3, 5 * slot_tokens // 3 + 1)
    longest = block_capacity(min(context, capacity))
    cache.open(rows, slot_tokens, min(capacity - rows * slot_tokens, 2 * rows * longest))


def _too_small(cache: KVCache, slot_tokens: int, prompt: int, needed: int) -> GenerationError:
    size = cache.bytes_per_token
    return GenerationError(
        f"kv_cache_bytes={cache.budget_bytes}: one completion of {slot_tokens + 1} tokens after a prompt of {prompt} "
        f"needs {needed * size} bytes ({size} a token); raise sampling.kv_cache_gb to at least "
        f"{needed * size / 2**30:.3g}, or lower sampling.max_completion_length"
    )


def _widest_stretch(in_turn: Sequence[Row], rows: int) -> int:
    """Most prompt tokens that any `rows` consecutive rows need."""
    window: dict[int, int] = {}
    tokens = widest = 0
    for i, row in enumerate(in_turn):
        prompt = id(row.place)
        if window.setdefault(prompt, 0) == 0:
            tokens += block_capacity(len(row.prompt_ids))
        window[prompt] += 1
        if i >= rows:
            left = in_turn[i - rows].place
            window[id(left)] -= 1
            if window[id(left)] == 0:
                tokens -= block_capacity(len(left.token_ids))
        widest = max(widest, tokens)
    return widest
