"""Memory for keys and values: a slot for each running row, and blocks of held tokens, which the `tree` owns.

    tokens of a layer's memory   | slot 0 | slot 1 | ... | block | block | free ...   segment 0
                                 |<- slot_tokens each  ->|<- limit tokens of blocks in all ...
                                 | block | free ...                                   segment 1, when it is needed

What is held is stored once however many rows continue it; a slot holds what the present turn has sampled. Slot i
belongs to row i of the decode batch: when a row leaves, the last one moves into its place, so the running rows are
always the first B slots and attention reads plain slices. Blocks have a few fixed capacities (32, 48, 64, 96, 128,
192, ...), so neighbours of equal capacity form one batched tensor without copying.

Memory grows segment by segment as blocks are asked for, never above the budget. It starts as zeros because masked
positions are still multiplied with (zero) weights: they must be finite.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.errors import GenerationError
from covey.rollout.turns import Row

_SMALLEST_BLOCK = 32
_SMALLEST_SEGMENT = 1024
"""Tokens; a segment is as large as those before it together, so there are few."""


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
class Block:
    """Room for `capacity` tokens from `start`."""

    start: int
    capacity: int


def block_capacity(length: int) -> int:
    """Tokens reserved for `length`: the next of 32, 48, 64, 96, 128, 192, ..."""
    power = _SMALLEST_BLOCK
    while power < length:
        if length <= power + power // 2:
            return power + power // 2
        power *= 2
    return power


@dataclass(slots=True, eq=False)
class _Segment:
    """Tokens from `base`. Layers of equal shape share a tensor: moving tokens takes two copies, not two a layer."""

    base: int
    size: int
    stores: dict[LayerShape, tuple[Tensor, Tensor]]


class KVCache:
    """Keys and values of all layers."""

    def __init__(
        self, shapes: Sequence[LayerShape], budget_bytes: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes = tuple(shapes)
        self.bytes_per_token = sum(s.elements for s in self.shapes) * dtype.itemsize
        self.budget_bytes = budget_bytes
        self.capacity = budget_bytes // self.bytes_per_token if self.shapes else 1 << 62
        self.slots = self.slot_tokens = 0
        self.limit = 0
        self.opened = 0  # how many times: what was stored before is gone
        self._dtype, self._device = dtype, device
        self._place = [(s, self.shapes[:i].count(s)) for i, s in enumerate(self.shapes)]
        self._segments: list[_Segment] = []
        self._block_tokens = 0  # of all segments
        self._free: list[tuple[int, int]] = []  # (start, tokens), ascending; no stretch reaches into another segment

    @property
    def allocated_bytes(self) -> int:
        return sum(segment.size for segment in self._segments) * self.bytes_per_token

    def open(self, slots: int, slot_tokens: int, block_tokens: int, limit: int | None = None) -> None:
        """Lay the memory out for a call; what was stored before is forgotten."""
        self.slots, self.slot_tokens = slots, slot_tokens
        self.opened += 1
        first, total = slots * slot_tokens, slots * slot_tokens + block_tokens
        self.limit = block_tokens if limit is None else limit
        del self._segments[1:]
        held = self._segments[0].size if self._segments else 0
        if held < total or (held > total and self.limit > block_tokens):  # what is kept is not to be added to
            self._segments.clear()  # before the new allocation, so that the two never exist together
            self._segments.append(_Segment(0, total, self._allocate(total)))
        self._free = [(first, block_tokens)] if block_tokens else []
        self._block_tokens = block_tokens

    def give_back(self) -> None:
        """Give all memory back, and forget what was stored; `open` must come before the next use."""
        self._segments.clear()
        self._free, self._block_tokens = [], 0
        self.opened += 1

    def clear(self) -> None:
        """Overwrite everything with zeros: after non-finite values."""
        for segment in self._segments:
            for keys, values in segment.stores.values():
                keys.zero_()
                values.zero_()

    def slot(self, number: int) -> Block:
        """The block that a slot is."""
        return Block(number * self.slot_tokens, self.slot_tokens)

    def clear_block(self, block: Block) -> None:
        for store in self._stores(block):
            store.zero_()

    def block_tensors(self, layer: int, start: int, count: int, capacity: int) -> tuple[Tensor, Tensor]:
        """`count` neighbouring blocks: keys `[count, kv_heads, capacity, key_dim]`, and values."""
        segment = self._segment(start)
        assert segment is not None
        shape, place = self._place[layer]
        first = (start - segment.base) * shape.kv_heads
        last = first + count * capacity * shape.kv_heads
        dims = (shape.key_dim, shape.value_dim)
        keys, values = (
            store[place, first * dim : last * dim].view(count, shape.kv_heads, capacity, -1)
            for store, dim in zip(segment.stores[shape], dims, strict=True)
        )
        return keys, values

    def neighbours(self, one: Block, other: Block) -> bool:
        """Whether two blocks, one right before the other, are parts of one tensor."""
        return (
            one.capacity == other.capacity
            and one.start + one.capacity == other.start
            and self._segment(one.start) is self._segment(other.start)
        )

    def allocate(self, length: int) -> Block | None:
        """A block for `length` tokens, or None while there is no room. First fit."""
        capacity = min(block_capacity(length), self.limit)
        if length > capacity:
            return None
        while True:
            for i, (start, size) in enumerate(self._free):
                if size >= capacity:
                    self._free[i : i + 1] = [(start + capacity, size - capacity)] if size > capacity else []
                    return Block(start, capacity)
            if not self._grow(capacity):
                return None

    def release(self, block: Block) -> None:
        """Give a block back, so that its memory can be used again."""
        bases = {segment.base for segment in self._segments}
        merged: list[tuple[int, int]] = []
        for start, size in sorted([*self._free, (block.start, block.capacity)]):
            if merged and sum(merged[-1]) == start and start not in bases:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = merged

    def copy(self, source: Block, first: int, target: Block, to: int, tokens: int) -> None:
        """Copy `tokens` tokens of a block, from its `first` on, into another one at `to`, in all layers."""
        if tokens > 0:
            for here, there in zip(self._stores(source), self._stores(target), strict=True):
                there[:, :, to : to + tokens] = here[:, :, first : first + tokens]

    def _grow(self, capacity: int) -> bool:
        """One more segment, for a block of `capacity`; in place of segments that are free if need be."""
        held = self._block_tokens
        if self.limit - held < capacity:
            unused = [s for s in self._segments[1:] if (s.base, s.size) in self._free]
            held -= sum(segment.size for segment in unused)
            if self.limit - held < capacity:
                return False
            self._segments = [segment for segment in self._segments if segment not in unused]
            self._free = [free for free in self._free if self._segment(free[0]) is not None]
        size = min(self.limit - held, max(capacity, held, _SMALLEST_SEGMENT))
        base = self._segments[-1].base + self._segments[-1].size
        self._segments.append(_Segment(base, size, self._allocate(size)))
        self._free.append((base, size))
        self._block_tokens = held + size
        return True

    def _segment(self, start: int) -> _Segment | None:
        place = bisect.bisect_right(self._segments, start, key=lambda segment: segment.base) - 1
        found = self._segments[place]
        return found if start < found.base + found.size else None

    def _allocate(self, tokens: int) -> dict[LayerShape, tuple[Tensor, Tensor]]:
        def zeros(shape: LayerShape, dim: int) -> Tensor:
            layers = self.shapes.count(shape)
            return torch.zeros(layers, tokens * shape.kv_heads * dim, dtype=self._dtype, device=self._device)

        with torch.inference_mode(False):  # tensors made in that mode could be written to in no other
            return {s: (zeros(s, s.key_dim), zeros(s, s.value_dim)) for s in dict.fromkeys(self.shapes)}

    def _stores(self, block: Block) -> Iterable[Tensor]:
        """Keys and values of a block, of all layers of a shape together: `[layers, kv_heads, capacity, dim]`."""
        segment = self._segment(block.start)
        assert segment is not None
        for shape, stores in segment.stores.items():
            for store, dim in zip(stores, (shape.key_dim, shape.value_dim), strict=True):
                first = (block.start - segment.base) * shape.kv_heads * dim
                last = first + block.capacity * shape.kv_heads * dim
                yield store[:, first:last].view(-1, shape.kv_heads, block.capacity, dim)


def lay_out_for_queue(cache: KVCache, waiting: Iterable[Row], max_rows: int) -> list[Row]:
    """The most rows for which any stretch of the queue fits with nothing shared; `GenerationError` if not one does."""
    order: dict[bytes, int] = {}
    numbered = [(row, order.setdefault(row.prompt_ids.tobytes(), len(order))) for row in waiting]
    # by length: what follows a common beginning then has its blocks by size, and neighbours of one size are one tensor
    ranked = sorted(numbered, key=lambda one: (-len(one[0].prompt_ids), one[1]))
    in_turn, prompts = [row for row, _ in ranked], [prompt for _, prompt in ranked]
    slot_tokens = max(1, max(row.limit for row in in_turn) - 1)  # the last token is never fed back

    def needed(rows: int) -> int:
        return rows * slot_tokens + _widest_stretch(in_turn, prompts, rows)

    rows = bisect.bisect_right(range(1, min(max_rows, len(in_turn)) + 1), cache.capacity, key=needed)
    if rows == 0:
        raise _too_small(cache, slot_tokens, max(len(row.prompt_ids) for row in in_turn), needed(1))
    # room for a quarter more prompts than run at once: freed blocks do not always fit the next prompt
    everything, running = (_widest_stretch(in_turn, prompts, some) for some in (len(in_turn), rows))
    cache.open(rows, slot_tokens, min(everything, running + running // 4, cache.capacity - rows * slot_tokens))
    return in_turn


def lay_out_for_conversations(cache: KVCache, rows: int, turn_tokens: int, longest: int) -> None:
    """Slots for `rows` turns, fewer if half of `longest` does not fit beside each; `GenerationError` if none fits."""
    slot_tokens, capacity = max(1, turn_tokens - 1), cache.capacity
    if slot_tokens + longest > capacity:
        raise _too_small(cache, longest - 1, 0, slot_tokens + longest, "conversation")
    rows = max(1, min(rows, capacity // (slot_tokens + longest // 2), (capacity - longest) // slot_tokens))
    cache.open(rows, slot_tokens, 0, capacity - rows * slot_tokens)


def lay_out_for_clients(cache: KVCache, rows: int, own_tokens: int) -> None:
    """`rows` completions of `own_tokens` in 3/5 of the cache, the rest for earlier ones; `GenerationError` if none."""
    slot_tokens, capacity = max(1, own_tokens - 1), cache.capacity
    rows = min(rows, 3 * capacity // 5 // slot_tokens)
    if rows < 1:
        raise _too_small(cache, slot_tokens, 2 * slot_tokens // 3, 5 * slot_tokens // 3 + 1)
    cache.open(rows, slot_tokens, 0, capacity - rows * slot_tokens)


def _too_small(cache: KVCache, slot_tokens: int, prompt: int, needed: int, what: str = "completion") -> GenerationError:
    size = cache.bytes_per_token
    after = f" after a prompt of {prompt}" if prompt else ", its prompt included,"
    fix = "environment.max_conversation_tokens" if what == "conversation" else "sampling.max_completion_length"
    gigabytes = needed * size / 2**30 * 1.006  # three digits of it are never less than what is needed
    return GenerationError(
        f"kv_cache_bytes={cache.budget_bytes}: one {what} of {slot_tokens + 1} tokens{after} needs "
        f"{needed * size} bytes ({size} a token); raise sampling.kv_cache_gb to at least "
        f"{gigabytes:.3g}, or lower {fix}"
    )


def _capacity(row: Row) -> int:
    return block_capacity(len(row.prompt_ids))


def _widest_stretch(in_turn: Sequence[Row], prompts: Sequence[int], rows: int) -> int:
    """Most prompt tokens that any `rows` consecutive rows need; rows of equal `prompts` share theirs."""
    window: dict[int, int] = {}
    tokens = widest = 0
    for i, (row, prompt) in enumerate(zip(in_turn, prompts, strict=True)):
        if window.setdefault(prompt, 0) == 0:
            tokens += _capacity(row)
        window[prompt] += 1
        if i >= rows:
            left = prompts[i - rows]
            window[left] -= 1
            if window[left] == 0:
                tokens -= _capacity(in_turn[i - rows])
        widest = max(widest, tokens)
    return widest
