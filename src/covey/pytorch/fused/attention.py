"""Attention of a pack with its backward: completions look at their prompt, which is computed and stored once.

Three attentions for each prompt of P tokens that is followed by G completions of R tokens:

    prompt    over itself, causal                                                [P] x [P]
    across    all completions of the prompt, one after another, over it          [sum R] x [P]
    own       each completion over itself, causal                                [G, R] x [G, R]

A completion's token attends to both its prompt and its own past, so the last two are merged by their log-sum-exps:
with `out_i`, `lse_i` of the parts, `out = sum_i exp(lse_i - lse) out_i` and `lse = log sum_i exp(lse_i)`. For two parts
the weights are `sigmoid(lse_own - lse_across)` and its complement.

The backward of one query q with score s_j = scale q k_j, p_j = exp(s_j - lse) and out = sum_j p_j v_j, where j runs
over the keys of all parts and g is the gradient of out:

    d(v_j) = p_j g        d(s_j) = p_j (g v_j - sum_i p_i g v_i) = p_j (g v_j - g out)
    d(q) = scale sum_j d(s_j) k_j        d(k_j) = scale d(s_j) q

Other keys than j enter only through `lse` and `out`. So a kernel that is given one part's keys with the *merged* `lse`
and `out` returns the merged softmax's d(k_j) and d(v_j) for its keys and its share of d(q), and the shares are added
(`CpuAttention.backward`: the prompt's own queries, then each completion over itself, then all completions over the
prompt, which adds to all three). A prompt's keys and values are never repeated for its completions, and their
gradients come out summed. The queries in a tile's padding have g = 0, and so add nothing.

Nothing but the output and its log-sum-exp `[M, heads]` is kept for the backward. On devices without this kernel the
packed attention of `prefix_attention` is run again in the backward under autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covey.pytorch.prefix_attention import PrefixLayout, packed_attention, similar_lengths
from covey.rollout.packing import Block

_FORWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Query heads, key/value heads and their dimension; a packed row is `[queries | keys | values]`."""

    heads: int
    kv_heads: int
    dim: int

    @property
    def width(self) -> int:
        """How many elements a packed row has."""
        return (self.heads + 2 * self.kv_heads) * self.dim


def attention_for(blocks: Sequence[Block], shape: HeadShape, device: torch.device) -> CpuAttention | AnyAttention:
    """The attention of a pack on a device."""
    if device.type == "cpu" and _FORWARD is not None and _BACKWARD is not None:
        return CpuAttention(blocks, shape)
    return AnyAttention(PrefixLayout.from_blocks(blocks, device), shape)


class AnyAttention:
    """Any device, any dtype: the backward computes the forward again."""

    def __init__(self, layout: PrefixLayout, shape: HeadShape) -> None:
        self._layout, self._shape = layout, shape

    def forward(self, qkv: Tensor) -> tuple[Tensor, Tensor | None]:
        """`[M, width]` -> `[M, heads * dim]`."""
        return self._run(qkv), None

    def backward(self, grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor | None) -> Tensor:
        """The gradient of `qkv`, `[M, width]`, from that of the output."""
        with torch.enable_grad():
            leaf = qkv.detach().requires_grad_()
            (found,) = torch.autograd.grad(self._run(leaf), leaf, grad)
        return found

    def _run(self, qkv: Tensor) -> Tensor:
        shape = self._shape
        rows = qkv.view(1, len(qkv), -1, shape.dim).transpose(1, 2)
        q, k, v = torch.split(rows, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        out = packed_attention(q, k, v, self._layout, scaling=shape.dim**-0.5)
        return out.view(len(qkv), -1)


class CpuAttention:
    """See the module docstring. A prompt and all of its completions are slices of the pack: nothing is copied but the
    completions, which are padded to equal lengths for their attention over themselves.
    """

    def __init__(self, blocks: Sequence[Block], shape: HeadShape) -> None:
        self._shape = shape
        self._blocks = [_BlockRows(block) for block in blocks]

    def forward(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """`[M, width]` -> the output `[M, heads * dim]` and its log-sum-exp `[M, heads]`."""
        shape = self._shape
        rows = qkv.view(len(qkv), -1, shape.dim)
        out = qkv.new_empty(len(qkv), shape.heads, shape.dim)
        lse = torch.empty(len(qkv), shape.heads, dtype=torch.promote_types(qkv.dtype, torch.float32))
        for block in self._blocks:
            q, k, v = self._split(rows[block.prompt])
            found, found_lse = self._attend(q, k, v, causal=True)
            out[block.prompt], lse[block.prompt] = found[0].transpose(0, 1), found_lse[0].T
            if block.own:
                q = rows[block.completions, : shape.heads].transpose(0, 1)[None]
                found, found_lse = self._attend(q, k, v, causal=False)
                across, across_lse = found[0].transpose(0, 1), found_lse[0].T
            for tile in block.own:
                own, own_lse = self._attend(*self._split(tile.pad(rows[block.completions])), causal=True)
                own, own_lse = tile.unpad(own), tile.unpad(own_lse)
                before, before_lse = tile.take(across), tile.take(across_lse)
                weight = torch.sigmoid(own_lse - before_lse)[..., None].to(own.dtype)
                tile.put(torch.lerp(before, own, weight), out[block.completions])
                tile.put(torch.logaddexp(before_lse, own_lse), lse[block.completions])
        return out.view(len(qkv), -1), lse

    def backward(self, grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor | None) -> Tensor:
        """The gradient of `qkv`, `[M, width]`, from that of the output."""
        assert lse is not None
        shape = self._shape
        found = torch.empty_like(qkv)
        rows, grads = qkv.view(len(qkv), -1, shape.dim), found.view(len(qkv), -1, shape.dim)
        grad, out = grad.view(len(qkv), shape.heads, shape.dim), out.view(len(qkv), shape.heads, shape.dim)
        keys, values = slice(shape.heads, shape.heads + shape.kv_heads), slice(shape.heads + shape.kv_heads, None)
        parts = (slice(shape.heads), keys, values)
        for block in self._blocks:
            here = block.prompt
            q, k, v = self._split(rows[here])
            back = self._back(_tile(grad[here]), q, k, v, _tile(out[here]), lse[here].T[None], causal=True)
            for part, g in zip(parts, back, strict=True):
                grads[here, part] = g[0].transpose(0, 1)
            here = block.completions
            for tile in block.own:
                operands = self._split(tile.pad(rows[here]))
                back = self._back(
                    tile.pad(grad[here], zero=True).transpose(1, 2),
                    *operands,
                    tile.pad(out[here]).transpose(1, 2),
                    tile.pad(lse[here]).transpose(1, 2),
                    causal=True,
                )
                for part, g in zip(parts, back, strict=True):
                    tile.put(tile.unpad(g), grads[here, part])
            if (
                block.own
            ):  # their queries over the prompt: the other share of d(q), and a share of the prompt's d(k), d(v)
                q = _tile(rows[here, : shape.heads])
                back = self._back(_tile(grad[here]), q, k, v, _tile(out[here]), lse[here].T[None], causal=False)
                grads[here, : shape.heads] += back[0][0].transpose(0, 1)
                grads[block.prompt, keys] += back[1][0].transpose(0, 1)
                grads[block.prompt, values] += back[2][0].transpose(0, 1)
        return found

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Packed rows `[L, heads, dim]`, or tiles `[n, L, heads, dim]`, as queries, keys and values for the kernel."""
        shape = self._shape
        tiles = rows[None] if rows.dim() == 3 else rows
        q, k, v = torch.split(tiles.transpose(1, 2), [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        """`[n, heads, L, dim]` and the log-sum-exps `[n, heads, L]`."""
        assert _FORWARD is not None
        out, lse = _FORWARD(q, k, v, 0.0, causal, scale=self._shape.dim**-0.5)
        return out, lse

    def _back(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert _BACKWARD is not None
        gq, gk, gv = _BACKWARD(grad, q, k, v, out, lse.contiguous(), 0.0, causal, scale=self._shape.dim**-0.5)
        return gq, gk, gv


def _tile(rows: Tensor) -> Tensor:
    """Packed rows `[L, heads, dim]` -> `[1, heads, L, dim]`."""
    return rows.transpose(0, 1)[None]


class _BlockRows:
    """Where a block's prompt and completions lie in the pack."""

    def __init__(self, block: Block) -> None:
        middle = block.start + block.prefix_len
        self.prompt = slice(block.start, middle)
        self.completions = slice(middle, block.start + block.num_tokens)
        starts = np.cumsum([0, *block.suffix_lens])[:-1]
        lengths = np.array(block.suffix_lens)
        present = np.flatnonzero(lengths)
        groups = similar_lengths([int(length) for length in lengths[present]])
        self.own = [_Padding(starts[sorted(present[g])], lengths[sorted(present[g])]) for g in groups]


class _Padding:
    """Completions of similar length as a rectangle `[n, L]`, padded at the end, and back.

    Args:
        starts: where each begins, counted from the block's first completion.
        lengths: of each, at least 1.
    """

    def __init__(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        self._shape = (len(starts), int(lengths.max()))
        steps = np.arange(self._shape[1])
        real = steps < lengths[:, None]
        index = np.where(real, starts[:, None] + steps, starts[:, None])
        packed = index[real]
        self._is_all = bool((packed == np.arange(len(packed))).all())
        self._padded = torch.from_numpy(index.reshape(-1))
        self._packed = torch.from_numpy(packed)
        self._slots = None if real.all() else torch.from_numpy(np.flatnonzero(real))

    def pad(self, rows: Tensor, *, zero: bool = False) -> Tensor:
        """Packed rows `[K, ...]` -> `[n, L, ...]`; `zero` puts zeros into the padding, else it repeats a real row."""
        if zero and self._slots is not None:
            tiled = rows.new_zeros(len(self._padded), *rows.shape[1:])
            tiled.index_copy_(0, self._slots, self.take(rows))
        else:
            tiled = rows.index_select(0, self._padded)
        return tiled.view(*self._shape, *rows.shape[1:])

    def unpad(self, tiles: Tensor) -> Tensor:
        """The kernel's `[n, heads, L, ...]` -> `[K, heads, ...]`."""
        flat = tiles.transpose(1, 2).flatten(0, 1)
        return flat if self._slots is None else flat.index_select(0, self._slots)

    def take(self, rows: Tensor) -> Tensor:
        """These completions' rows."""
        return rows[: len(self._packed)] if self._is_all else rows.index_select(0, self._packed)

    def put(self, values: Tensor, into: Tensor) -> None:
        """Write these completions' rows."""
        if self._is_all:
            into[: len(values)] = values
        else:
            into.index_copy_(0, self._packed, values)
