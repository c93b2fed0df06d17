"""Memory for keys and values: one block for each distinct prompt, one slot for each running completion.

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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
        """Memory held now."""
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
        """The same for one slot."""
        for layer in range(len(self.shapes)):
            for store in self._view(layer, slot * self.slot_tokens, 1, self.slot_tokens):
                store.zero_()

    def clear_block(self, block: PromptBlock) -> None:
        """The same for one prompt."""
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
        """Give a block back."""
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
