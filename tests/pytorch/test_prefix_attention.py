"""Packed attention against attention written out one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from covey.pytorch.prefix_attention import (
    LAYOUT_ARGUMENT,
    NAME_PREFIX,
    PrefixLayout,
    UnsupportedAttentionError,
    packed_attention,
    similar_lengths,
)
from covey.rollout.packing import Block

HEADS, KV_HEADS, WIDTH = 4, 2, 3


def blocks_of(*shapes: tuple[int, tuple[int, ...]]) -> list[Block]:
    """(prefix length, suffix lengths) of consecutive blocks."""
    blocks, start = [], 0
    for prefix_len, suffix_lens in shapes:
        blocks.append(Block(start, prefix_len, suffix_lens))
        start += blocks[-1].num_tokens
    return blocks


SHAPES = {
    "one block": blocks_of((4, (2, 3))),
    "one row": blocks_of((3, (4,))),
    "prefix alone": blocks_of((3, (0, 0))),
    "prefixes of different lengths": blocks_of((5, (1, 4)), (2, (3,)), (1, (0, 6, 2))),
    "prefixes of one length": blocks_of((3, (2, 2)), (3, (5, 0, 1))),
    "several tiles": blocks_of((70, (100, 2, 70)), (3, (1, 80)), (150, (3,))),
}


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, blocks: list[Block], scaling: float, window: int | None, softcap: float | None
) -> Tensor:
    """`[M, H, D]`: softmax attention of each row's own sequence, prefix outputs from the prefix alone."""
    out = torch.zeros(q.shape[2], HEADS, WIDTH, dtype=q.dtype)

    def attend(index: Tensor) -> Tensor:
        length = len(index)
        heads = torch.arange(HEADS) // (HEADS // KV_HEADS)
        scores = torch.einsum("hqd,hkd->hqk", q[0][:, index], k[0][heads][:, index]) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        back = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        seen = back >= 0 if window is None else (back >= 0) & (back < window)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,hkd->qhd", weights, v[0][heads][:, index])

    for block in blocks:
        prefix = torch.arange(block.start, block.start + block.prefix_len)
        out = out.index_put((prefix,), attend(prefix))
        start = block.start + block.prefix_len
        for length in block.suffix_lens:
            own = torch.arange(start, start + length)
            out = out.index_put((own,), attend(torch.cat([prefix, own]))[block.prefix_len :])
            start += length
    return out


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 3, 60])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape: str, window: int | None, softcap: float | None) -> None:
    blocks = SHAPES[shape]
    tokens = sum(block.num_tokens for block in blocks)
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> Tensor:
        # Strided as the models' own: heads are views into a [tokens, heads * width] projection.
        x = torch.randn(1, tokens, heads, WIDTH, dtype=torch.float64, generator=generator)
        return x.transpose(1, 2).requires_grad_()

    q, k, v = draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)
    layout = PrefixLayout.from_blocks(blocks)
    mine = packed_attention(q, k, v, layout, scaling=0.7, sliding_window=window, softcap=softcap)
    expected = one_by_one(q, k, v, blocks, 0.7, window, softcap)
    assert mine.shape == (1, tokens, HEADS, WIDTH)
    torch.testing.assert_close(mine[0], expected, rtol=1e-9, atol=1e-9)

    upstream = torch.randn(mine[0].shape, dtype=torch.float64, generator=generator)
    mine_grads = torch.autograd.grad((mine[0] * upstream).sum(), (q, k, v))
    their_grads = torch.autograd.grad((expected * upstream).sum(), (q, k, v))
    for mine_grad, their_grad in zip(mine_grads, their_grads, strict=True):
        torch.testing.assert_close(mine_grad, their_grad, rtol=1e-9, atol=1e-9)


def test_every_packed_token_sits_in_exactly_one_slot() -> None:
    for blocks in SHAPES.values():
        layout = PrefixLayout.from_blocks(blocks)
        tokens = sum(block.num_tokens for block in blocks)
        assert layout.gather[layout.inverse].tolist() == list(range(tokens))
        assert sum(layout.sizes) == len(layout.gather)


def test_similar_lengths_share_a_tile_and_short_ones_are_not_worth_their_own() -> None:
    assert similar_lengths([100, 300, 160, 90]) == [[1, 2], [0, 3]]
    assert similar_lengths([64, 1, 30]) == [[0, 2, 1]]
    assert similar_lengths([]) == []


def test_the_model_stays_usable_without_a_pack() -> None:
    """Sampling and evaluation call the same model: without a layout it attends as it did before."""
    for family in ("llama", "gemma2"):  # one on sdpa, one on eager
        model = tiny_model(family)
        tokens = torch.arange(4, 24).view(2, 10)
        mask = torch.ones_like(tokens)
        mask[0, :4] = 0
        with torch.no_grad():
            before = model(tokens, attention_mask=mask).logits
            model.set_attn_implementation(NAME_PREFIX + model.config._attn_implementation)
            after = model(tokens, attention_mask=mask).logits
        assert torch.equal(before[mask.bool()], after[mask.bool()])


def test_attention_that_is_not_served_says_so() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation(NAME_PREFIX + "sdpa")
    layout = PrefixLayout.from_blocks([Block(0, 3, (1,))])
    arguments = {
        "input_ids": torch.arange(4, 8)[None],
        "position_ids": torch.arange(4)[None],
        "attention_mask": torch.zeros(1, 1, 1, 1),
        LAYOUT_ARGUMENT: layout,
    }
    with pytest.raises(UnsupportedAttentionError, match="not causal"):
        model.base_model(**arguments, is_causal=False)
    with pytest.raises(UnsupportedAttentionError, match="s_aux"):
        model.base_model(**arguments, s_aux=torch.zeros(4))
