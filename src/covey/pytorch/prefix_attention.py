"""Attention for packs: every completion sees its prompt's keys and values, which are computed once.

Registered with transformers as an attention implementation, so the models' own code runs unchanged on `[1,
M]` packed tokens; only the attention itself knows who may see whom. It runs on plain scaled-dot-product
attention and is differentiable: the gradient of a prompt's keys and values is the sum over the completions
that saw them.

Padding exists inside attention only. For each layer the packed tokens are copied once into rectangular tiles,

    prefix tile   [B, P, heads, D]      causal self-attention of B prompts
    suffix tile   [N, R, heads, D]      N completions; keys = [prompt | completion itself], [N, P + R]

padded at the end of each row. Then causality alone hides suffix padding (a real query never looks to its
right), so when the prompts of a tile have one length, a single mask `tril(diagonal=P)` of shape `[R, P + R]`
serves all its rows. Prompts and completions of very different lengths go into different tiles.

Copying is done by index, and each packed token sits in exactly one slot, so that the backward of a copy is a
copy through the inverse index. Left to autograd it would be `index_add`, several times slower on CPU and not
deterministic on CUDA. With g the gradient of the result:

    y = x[gather], x[i] is y[inverse[i]]         d(x) = g[inverse]                         `_ToTiles`
    y = x[inverse], slots beside it unused       d(x)[inverse] = g, 0 elsewhere            `_FromTiles`
    y[n] = x[prefix_of_row[n]]                   d(x)[b] = sum over n of b's rows of g[n]  `_RepeatPrefixes`
                                                      = one_hot g, one_hot[b, n] = (prefix_of_row[n] = b)

Limits: no attention sinks, no position biases, no chunked or linear attention. `probe` finds out by comparing
numbers whether a model is served; this file only raises `UnsupportedAttentionError` where it knows that it is
not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from covey.rollout.packing import Block

NAME_PREFIX = "covey_prefix_"
PLAIN_IMPLEMENTATIONS = ("sdpa", "eager")
LAYOUT_ARGUMENT = "prefix_layout"
"""The keyword argument that carries the layout through the model's forward to its attention layers."""


class UnsupportedAttentionError(Exception):
    """A layer asks for something that packed attention does not compute; the policy falls back to padding."""


@dataclass(slots=True, eq=False)
class _SuffixTile:
    """N completions of similar length, padded to R, over the prompts of one prefix tile."""

    num_rows: int
    length: int  # R
    prefix_of_row: Tensor  # [N] row in the prefix tile
    one_hot: Tensor  # [B, N] float32, sums gradients of rows into their prompt


@dataclass(slots=True, eq=False)
class _Tile:
    """B prompts of similar length, padded to P, and the tiles of their completions."""

    num_prefixes: int
    length: int  # P
    prefix_lens: Tensor  # [B]
    equal_lens: bool
    suffixes: list[_SuffixTile]


@dataclass(slots=True, eq=False)
class PrefixLayout:
    """The layout of one pack on one device: index tensors, and masks built on first use.

    Attributes:
        gather: `[F]` packed index of each tile slot (0 in padding).
        inverse: `[M]` tile slot of each packed token.
        tiles: consecutive in slot order; each is its prefix slots, then the slots of its suffix tiles.
        sizes: slots of each piece, in that order.
        seen: sliding windows of the layers that used this layout, for the probe.
    """

    gather: Tensor
    inverse: Tensor
    tiles: list[_Tile]
    sizes: list[int]
    seen: list[int | None] = field(default_factory=list)
    _masks: dict[tuple[object, ...], Tensor | None] = field(default_factory=dict)

    @classmethod
    def from_blocks(cls, blocks: Sequence[Block], device: torch.device | str = "cpu") -> PrefixLayout:
        """Build the layout of a pack.

        Args:
            blocks: `Pack.blocks`.
            device: where the model runs.
        """
        slots: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        real: list[np.ndarray[Any, np.dtype[np.bool_]]] = []
        tiles: list[_Tile] = []
        sizes: list[int] = []

        def add(starts: Sequence[int], lens: Sequence[int], width: int) -> None:
            steps = np.arange(width)
            inside = steps[None, :] < np.asarray(lens)[:, None]
            index = np.where(inside, np.asarray(starts)[:, None] + steps[None, :], 0)
            slots.append(index.reshape(-1))
            real.append(inside.reshape(-1))
            sizes.append(index.size)

        for members in similar_lengths([block.prefix_len for block in blocks]):
            prefixes = [blocks[i] for i in members]
            width = max(block.prefix_len for block in prefixes)
            add([block.start for block in prefixes], [block.prefix_len for block in prefixes], width)
            rows = [  # (row in the prefix tile, start, length), rows that need only the prefix left out
                (b, start, length)
                for b, block in enumerate(prefixes)
                for start, length in _suffix_starts(block)
                if length > 0
            ]
            suffixes = []
            for group in similar_lengths([length for _, _, length in rows]):
                chosen = [rows[i] for i in sorted(group)]
                suffix_width = max(length for _, _, length in chosen)
                add([start for _, start, _ in chosen], [length for _, _, length in chosen], suffix_width)
                prefix_of_row = torch.tensor([b for b, _, _ in chosen], device=device)
                one_hot = functional.one_hot(prefix_of_row, len(prefixes)).T.to(torch.float32)
                suffixes.append(_SuffixTile(len(chosen), suffix_width, prefix_of_row, one_hot.contiguous()))
            lens = [block.prefix_len for block in prefixes]
            tiles.append(_Tile(len(prefixes), width, torch.tensor(lens, device=device), len(set(lens)) == 1, suffixes))
        gather = np.concatenate(slots)
        is_real = np.concatenate(real)
        inverse = np.empty(int(is_real.sum()), dtype=np.int64)
        inverse[gather[is_real]] = np.flatnonzero(is_real)
        return cls(
            gather=torch.from_numpy(gather).to(device),
            inverse=torch.from_numpy(inverse).to(device),
            tiles=tiles,
            sizes=sizes,
        )

    def prefix_mask(self, tile: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Additive mask `[1, 1, P, P]` of a prefix tile, or None where plain causality is enough."""
        length = self.tiles[tile].length
        if window is None or window >= length:
            return None
        key = (tile, None, window, dtype)
        if key not in self._masks:
            q = torch.arange(length, device=self.gather.device)[:, None]
            k = torch.arange(length, device=self.gather.device)[None, :]
            self._masks[key] = _additive((k <= q) & (q - k < window), dtype)[None, None]
        return self._masks[key]

    def suffix_mask(self, tile: int, suffix: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask `[1 or N, 1, R, P + R]` of a suffix tile, by positions in the row's own sequence."""
        key = (tile, suffix, window, dtype)
        mask = self._masks.get(key)
        if mask is None:
            parent, rows = self.tiles[tile], self.tiles[tile].suffixes[suffix]
            device = self.gather.device
            if parent.equal_lens:
                prefix_lens = parent.prefix_lens[:1, None, None]
            else:
                prefix_lens = parent.prefix_lens[rows.prefix_of_row][:, None, None]  # [N, 1, 1]
            in_prefix = torch.arange(parent.length, device=device)[None, None, :]
            in_suffix = torch.arange(rows.length, device=device)
            q = prefix_lens + in_suffix[None, :, None]  # [., R, 1]
            k = torch.cat([in_prefix.expand(len(prefix_lens), 1, -1), prefix_lens + in_suffix[None, None, :]], dim=-1)
            exists = torch.cat(
                [in_prefix < prefix_lens, torch.ones_like(k[..., parent.length :], dtype=torch.bool)], dim=-1
            )
            allowed = exists & (k <= q)
            if window is not None:
                allowed &= q - k < window
            mask = self._masks[key] = _additive(allowed, dtype)[:, None]
        return mask


def _suffix_starts(block: Block) -> list[tuple[int, int]]:
    starts = np.cumsum([block.start + block.prefix_len, *block.suffix_lens])[:-1]
    return [(int(start), length) for start, length in zip(starts, block.suffix_lens, strict=True)]


def similar_lengths(lens: Sequence[int], ratio: float = 2.0, enough: int = 64) -> list[list[int]]:
    """Indices grouped so that in a group the longest is at most `ratio` times the shortest, or at most
    `enough`.

    Fewer tiles mean fewer kernel calls, similar lengths mean less padding; short rows are not worth a call of
    their own.
    """
    order = sorted(range(len(lens)), key=lambda i: (-lens[i], i))
    groups: list[list[int]] = []
    for i in order:
        longest = lens[groups[-1][0]] if groups else 0
        if groups and (longest <= enough or longest <= ratio * lens[i]):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


class _ToTiles(torch.autograd.Function):
    """`x[gather]` for x `[M, C]`; each row of x has one real slot, padding slots receive no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _FromTiles(torch.autograd.Function):
    """`x[inverse]` for x `[F, C]`: drops the padding slots, whose gradient is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.num_slots = len(x)
        return x.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_slots, grad.shape[1]).index_copy_(0, inverse, grad), None


class _RepeatPrefixes(torch.autograd.Function):
    """Prompts `[B, P, C]` -> rows `[N, P, C]`; backward sums each prompt's rows in one matrix product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, prefix_of_row: Tensor, one_hot: Tensor) -> Tensor:
        ctx.save_for_backward(one_hot)
        return x.index_select(0, prefix_of_row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (one_hot,) = ctx.saved_tensors
        rows, length, width = grad.shape
        summed = one_hot.to(grad.dtype) @ grad.reshape(rows, length * width)
        return summed.view(-1, length, width), None, None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """One tile: q `[n, H, Lq, D]`, k, v `[n, Hkv, Lk, D]` -> `[n, H, Lq, D]`. No mask: causal, Lq = Lk."""
    repeats = q.shape[1] // k.shape[1]
    if softcap is None:
        if repeats > 1 and mask is not None and q.is_cuda:
            # The fused CUDA kernel that takes a mask does not take grouped heads; the math fallback would be
            # slower.
            k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        return functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=k.shape[1] != q.shape[1],
        )
    n, heads, length, width = q.shape
    grouped = q.reshape(n, k.shape[1], repeats, length, width)
    scores = torch.matmul(grouped, k[:, :, None].transpose(-1, -2)) * scaling  # [n, Hkv, rep, Lq, Lk]
    scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = _additive(torch.ones(length, length, dtype=torch.bool, device=q.device).tril(), scores.dtype)
        mask = mask[None, None]
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = torch.softmax(scores + mask[:, :, None], dim=-1, dtype=wide).to(q.dtype)
    weights = functional.dropout(weights, dropout, training=dropout > 0)
    return torch.matmul(weights, v[:, :, None]).reshape(n, heads, length, width)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PrefixLayout,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of one layer over a pack.

    Args:
        query: `[1, H, M, D]`.
        key: `[1, Hkv, M, D]`.
        value: `[1, Hkv, M, Dv]`.
        layout: of the pack.
        scaling: factor on the scores.
        sliding_window: a query sees keys at most `sliding_window - 1` positions back; None = all.
        softcap: scores become `softcap * tanh(scores / softcap)`; None = off.
        dropout: probability on the attention weights.

    Returns:
        `[1, M, H, Dv]`.
    """
    _, heads, num_tokens, width = query.shape
    kv_heads, value_width = key.shape[1], value.shape[-1]

    def tiles_of(x: Tensor) -> tuple[Tensor, ...]:
        flat = x.transpose(1, 2).reshape(num_tokens, -1)
        tiled: Tensor = _ToTiles.apply(flat, layout.gather, layout.inverse)  # type: ignore[no-untyped-call]
        return torch.split(tiled, layout.sizes)

    queries, keys, values = tiles_of(query), tiles_of(key), tiles_of(value)
    outputs = []
    piece = 0
    for t, tile in enumerate(layout.tiles):
        rows = tile.num_prefixes
        prefix_k = keys[piece].view(rows, tile.length, kv_heads * width)
        prefix_v = values[piece].view(rows, tile.length, kv_heads * value_width)
        out = _attend(
            queries[piece].view(rows, tile.length, heads, width).transpose(1, 2),
            prefix_k.view(rows, tile.length, kv_heads, width).transpose(1, 2),
            prefix_v.view(rows, tile.length, kv_heads, value_width).transpose(1, 2),
            layout.prefix_mask(t, sliding_window, query.dtype),
            scaling,
            softcap,
            dropout,
        )
        outputs.append(out.transpose(1, 2).reshape(-1, heads * value_width))
        piece += 1
        for s, suffix in enumerate(tile.suffixes):
            n, length = suffix.num_rows, suffix.length

            def with_prefix(prefix: Tensor, own: Tensor, suffix: _SuffixTile = suffix) -> Tensor:
                repeated: Tensor = _RepeatPrefixes.apply(  # type: ignore[no-untyped-call]
                    prefix, suffix.prefix_of_row, suffix.one_hot
                )
                joined = torch.cat([repeated, own.view(suffix.num_rows, suffix.length, -1)], dim=1)
                return joined.view(suffix.num_rows, joined.shape[1], kv_heads, -1).transpose(1, 2)

            out = _attend(
                queries[piece].view(n, length, heads, width).transpose(1, 2),
                with_prefix(prefix_k, keys[piece]),
                with_prefix(prefix_v, values[piece]),
                layout.suffix_mask(t, s, sliding_window, query.dtype),
                scaling,
                softcap,
                dropout,
            )
            outputs.append(out.transpose(1, 2).reshape(-1, heads * value_width))
            piece += 1
    packed: Tensor = _FromTiles.apply(torch.cat(outputs), layout.inverse)  # type: ignore[no-untyped-call]
    return packed.view(1, num_tokens, heads, value_width)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plain: str,
    prefix_layout: PrefixLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls: packed attention where a layout was passed, else what it replaced."""
    if prefix_layout is None:
        if plain == "eager":
            forward = sys.modules[type(module).__module__].eager_attention_forward
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        else:
            forward = ALL_ATTENTION_FUNCTIONS[plain]
        result: tuple[Tensor, Tensor | None] = forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return result
    for name in ("s_aux", "position_bias", "cache", "head_mask"):
        if kwargs.get(name) is not None:
            raise UnsupportedAttentionError(f"its attention uses {name}")
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise UnsupportedAttentionError("its attention is not causal")
    window = kwargs.get("sliding_window")
    prefix_layout.seen.append(window)
    out = packed_attention(
        query,
        key,
        value,
        prefix_layout,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=window,
        softcap=kwargs.get("softcap"),
        dropout=dropout,
    )
    return out, None


def _register() -> None:
    for plain in PLAIN_IMPLEMENTATIONS:
        AttentionInterface.register(NAME_PREFIX + plain, partial(_attention_forward, plain=plain))
        AttentionMaskInterface.register(NAME_PREFIX + plain, ALL_MASK_ATTENTION_FUNCTIONS[plain])


_register()
