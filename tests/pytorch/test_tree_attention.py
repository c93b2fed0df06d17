"""Attention over packed trees against dense attention with a mask from `leave`, in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import episode, fill
from test_policy import assert_near, gradients
from tiny_models import FAMILIES, VOCAB_SIZE, tiny_model, tiny_tokenizer
from torch import Tensor

from covey.pytorch import Policy
from covey.pytorch.attention import tree_attention, tree_parts
from covey.pytorch.attention.tree_layout import ALONE, Rectangle, Rule, Run, TreeLayout, TreePath, similar_lengths
from covey.rollout.packing import Branch, Pack, leave_of, pack_episodes
from covey.rollout.walking import Piece, pieces_of, walk


def find(branches: list[Branch], leaves: list[Tensor], grad: Tensor, rule: Rule, **options: Any) -> list[Tensor]:
    q, k, v, *above = leaves
    past = (above[0], above[1]) if above else None
    layout = TreeLayout.of(branches, past=len(above[0]) if above else 0, **options)
    out, lse = tree_parts.forward(layout, q, k, v, past, rule)
    *grads, grad_past = tree_parts.backward(layout, grad, q, k, v, past, out, lse, rule)
    return [out, lse, *grads, *(grad_past or ())]


FORESTS = {
    "seed": st.integers(0, 10**6),
    "past": st.sampled_from([0, 5]),
    "longest": st.sampled_from([3, 6, ALONE + 9]),
    "rule": st.builds(Rule, st.just(0.7), st.sampled_from([None, None, 1, 3, 20]), st.sampled_from([None, None, 1.5])),
    "shape": st.sampled_from([(4, 2, 3, 3), (2, 2, 3, 3), (4, 1, 3, 5)]),
    "repeated": st.sampled_from([0, 16, 1000]),
}


@settings(deadline=None)
@given(**FORESTS)
def test_random_forests(seed: int, past: int, longest: int, rule: Rule, shape: Any, repeated: int) -> None:
    branches = forest(seed, past=past, longest=longest, depth=8 if longest < ALONE else 4)
    leaves, grad = draw(seed, branches, past, shape)
    found = find(branches, leaves, grad, rule, repeated=repeated)
    assert_close(found, expect(branches, leaves, grad, rule), tolerance=1e-9)


def test_three_tokens_by_hand() -> None:
    """Equal scores, so outputs are means: token 2 leaves the branch 0, 1 after token 0."""
    branches = [Branch(0, 2, -1, 0), Branch(2, 1, 0, 1)]
    zeros, v = torch.zeros(3, 1, 1, dtype=torch.float64), torch.tensor([1.0, 3.0, 8.0], dtype=torch.float64)
    for repeated in (0, 1):
        found = find(branches, [zeros, zeros, v.view(3, 1, 1)], zeros + 1, Rule(1.0), repeated=repeated)
        out, lse, _, _, grad_v = (value.flatten() for value in found)
        assert out.tolist() == pytest.approx([1, 2, 4.5])
        assert lse.exp().tolist() == pytest.approx([1, 2, 2])
        assert grad_v.tolist() == pytest.approx([2, 0.5, 0.5])


def test_what_is_planned() -> None:
    """A prompt of 40 with completions of 50, the longest, 45 and 3; the last one has the first's first two tokens."""
    branches = [Branch(0, 90, -1, 0), Branch(90, 3, 0, 42), Branch(93, 45, 0, 40)]
    layout = TreeLayout.of(branches)
    rectangle, *runs = layout.own
    assert isinstance(rectangle, Rectangle)
    assert [run.rows for run in runs if isinstance(run, Run)] == [slice(0, 90), slice(93, 138)]
    (across,) = layout.across
    assert (across.queries, across.keys, across.query_position) == (slice(90, 138), slice(0, 40), 40)
    assert rectangle.take(torch.arange(138)).tolist() == [[40, 41, 90, 91, 92]]
    assert rectangle.take_gradient(torch.ones(138)).tolist() == [[0, 0, 1, 1, 1]]
    assert (across.keys_within(30), across.keys_within(1)) == (slice(11, 40), slice(40, 40))
    assert layout.positions[[89, 90, 93, 137]].tolist() == [89, 42, 40, 84]
    assert layout.longest == 90
    apart = [(part.queries, part.keys) for part in TreeLayout.of(branches, repeated=0).across]
    assert apart == [(slice(90, 93), slice(0, 42)), (slice(93, 138), slice(0, 40))]
    # two tokens are repeated sooner than a call is made
    assert TreeLayout.of([Branch(0, 3, -1, 0), Branch(3, 9, 0, 2)]).across == []
    (run,) = TreeLayout.of([Branch(start, 40, -1, 0) for start in (0, 40, 80)]).own
    assert run.take(torch.arange(120)).shape == (3, 40)
    with pytest.raises(ValueError, match="a trunk of 3 branches after 0 of 0 tokens"):
        TreeLayout.of(branches, trunk=True)
    with pytest.raises(ValueError, match="5 tokens on a path of capacity 4"):
        TreePath(4).write(0, 3, torch.zeros(2, 1, 1), torch.zeros(2, 1, 1))


def test_rows_of_similar_length_share_a_rectangle_and_short_ones_are_not_worth_their_own() -> None:
    for lengths, rectangles in (([100, 300, 160, 90], [[1, 2], [0, 3]]), ([16, 1, 7], [[0, 2, 1]]), ([], [])):
        assert similar_lengths(lengths) == rectangles


def test_products_in_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    branches = forest(1, longest=40, depth=4)
    leaves, grad = draw(1, branches)
    for rule in (Rule(0.5, softcap=2.0), Rule(0.5, window=7)):
        whole = find(branches, leaves, grad, rule)
        with monkeypatch.context() as patch:
            patch.setattr(tree_parts, "_MOST_SCORES", 300)
            assert_close(find(branches, leaves, grad, rule), whole)


def test_scores_that_overflow_where_nobody_looks_do_no_harm() -> None:
    """A key far larger than what the padding's query saw before it: exp of the difference is infinite in float32."""
    branches = [Branch(0, 1, -1, 0), Branch(1, 9, -1, 0)]
    q = torch.full((10, 1, 4), 10.0)
    k = torch.linspace(-10, 10, 10)[:, None, None].expand(10, 1, 4).contiguous()
    found = find(branches, [q, k, torch.ones(10, 1, 4)], torch.ones(10, 1, 4), Rule(1.0))
    assert all(bool(value.isfinite().all()) for value in found)


def test_strides_that_kernels_do_not_read() -> None:
    """Heads that are not dense, and the gradient of a sum, which is one number expanded."""
    branches = forest(2, longest=40, depth=3)
    leaves, grad = draw(2, branches)
    q, k, v = ((leaf.mT.contiguous().mT).requires_grad_() for leaf in leaves)
    tree_attention.tree_attention(TreeLayout.of(branches), 0, q, k, v, Rule(0.5)).sum().backward()
    found = [leaf.grad for leaf in (q, k, v) if leaf.grad is not None]
    assert_close(found, expect(branches, leaves, torch.ones_like(grad), Rule(0.5))[2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 25], ids=["flash", "products"])
def test_rounding(dtype: torch.dtype, window: int | None) -> None:
    """SmolLM2's heads: the parts err at most twice as much as dense attention does in the same precision."""
    branches = forest(3, past=50, longest=60, depth=4)
    leaves, grad = draw(3, branches, 50, (9, 3, 64, 64))
    leaves, grad = [leaf.to(dtype) for leaf in leaves], grad.to(dtype)
    rule = Rule(0.125, window)
    truth = expect(branches, [leaf.double() for leaf in leaves], grad.double(), rule)
    found = find(branches, leaves, grad, rule)
    assert [value.dtype for value in found] == [dtype, torch.float32, *[dtype] * 5]
    for one, other, true in zip(found, expect(branches, leaves, grad, rule), truth, strict=True):
        assert float((one - true).norm()) < 2 * float((other - true).norm())


def tree_pack() -> Pack:
    """A conversation of 5 turns of 7 tokens with two answers at each turn, and another of two rows."""
    rng = np.random.default_rng(0)
    turns = rng.integers(4, VOCAB_SIZE, 35)
    rows = [turns, *(np.concatenate([turns[:at], rng.integers(4, VOCAB_SIZE, 4)]) for at in (7, 7, 14, 21, 22, 28, 34))]
    rows += [rng.integers(4, VOCAB_SIZE, 6)]
    rows += [np.concatenate([rows[-1][:3], rng.integers(4, VOCAB_SIZE, 9)])]
    return pack_episodes([episode(ids, np.arange(len(ids)) > 2) for ids in rows])[0]


def float64_policy(family: str, **options: Any) -> Policy:
    window = 64 if family == "gemma2" else 6  # in float64 its own code returns NaN for padding outside of the window
    model = tiny_model(family, sliding_window=window).double()
    return fill(Policy.load(model, tiny_tokenizer(), lora_r=4, **options))


def assert_walk(policy: Policy, fused: bool) -> dict[str, Tensor]:
    """Forward down the tree, backward up again, with one path for all pieces, gives what one go gives: that."""
    pack, hidden = tree_pack(), policy.held.fused.hidden if fused else policy.held.hidden_packed
    weights = torch.randn(len(pack.targets), 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = hidden(pack, TreeLayout.of(pack.branches))
    expected = gradients(policy, (whole * weights).sum())
    path, found, count = TreePath(pack.num_tokens), torch.zeros_like(whole), []

    def run(piece: Piece) -> Tensor:
        out = hidden(piece, TreeLayout.of(piece.branches, past=piece.past, path=path, trunk=piece.trunk))
        found[piece.scored] = out.detach()
        count.append(piece)
        return out

    policy.model.zero_grad()
    walk(pieces_of(pack, 12), run, lambda piece, out: (out * weights[piece.scored]).sum().backward())
    assert len(count) > 5
    torch.testing.assert_close(found, whole.detach(), rtol=1e-12, atol=1e-12)
    assert_near({name: parameter.grad for name, parameter in policy.named_trainable_parameters()}, expected)
    return {"hidden": whole.detach(), **expected}


@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("family", ["fused", *FAMILIES])
def test_a_walk_gives_what_one_go_gives(family: str, checkpoint: bool) -> None:
    fused = family == "fused"
    assert_walk(float64_policy("llama" if fused else family, gradient_checkpointing=checkpoint), fused)


def test_the_model_stays_usable_without_a_pack() -> None:
    """Sampling and evaluation call the same model: without a layout it attends as it did before."""
    for family in ("llama", "gemma2"):  # one on sdpa, one on eager
        model = tiny_model(family)
        tokens = torch.arange(4, 24).view(2, 10)
        mask = torch.ones_like(tokens)
        mask[0, :4] = 0
        with torch.no_grad():
            before = model(tokens, attention_mask=mask).logits
            model.set_attn_implementation(tree_attention.NAME_PREFIX + model.config._attn_implementation)
            after = model(tokens, attention_mask=mask).logits
        assert torch.equal(before[mask.bool()], after[mask.bool()])


def test_attention_that_is_not_served_says_so() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation(tree_attention.NAME_PREFIX + "sdpa")
    ids = torch.arange(4, 8)[None]
    given = {"input_ids": ids, "position_ids": ids - 4, "attention_mask": torch.zeros(1, 1, 1, 1)}
    given[tree_attention.LAYOUT_ARGUMENT] = TreeLayout.of([Branch(0, 4, -1, 0)])
    for more, words in (
        ({"is_causal": False}, "not causal"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({}, r"drops weights \(dropout=0.1\)"),
    ):
        if not more:
            model.train()
            for layer in model.base_model.layers:
                layer.self_attn.attention_dropout = 0.1
        with pytest.raises(tree_attention.UnsupportedAttentionError, match=words):
            model.base_model(**given, **more)


def forest(seed: int, *, past: int = 0, longest: int = 6, depth: int = 8, ordered: bool = False) -> list[Branch]:
    """Branches in the order of a pack: those that leave one follow it, the last to leave first.

    `ordered`: those that leave the past too, as in packs and pieces of packs.
    """
    rng = np.random.default_rng(seed)
    branches: list[Branch] = []

    def grow(parent: int, at: int, deep: int) -> None:
        number, length = len(branches), int(rng.choice([1, 2, longest, rng.integers(1, longest + 1)]))
        branches.append(Branch(branches[-1].stop if branches else 0, length, parent, at))
        if deep > 1:
            for leaves in sorted(rng.integers(1, length + 1, rng.integers(0, 4)).tolist(), reverse=True):
                grow(number, leaves, deep - rng.integers(1, 3))

    ats = rng.integers(0, past + 1, rng.integers(1, 4)).tolist()
    for at in sorted(ats, reverse=True) if ordered else ats:
        grow(-1, at, depth)
    return branches


def draw(
    seed: int, branches: list[Branch], past: int = 0, shape: tuple[int, int, int, int] = (4, 2, 3, 3)
) -> tuple[list[Tensor], Tensor]:
    """q, k, v, and the past's two if there is one; and a gradient of the output."""
    heads, kv_heads, width, value_width = shape
    generator, tokens = torch.Generator().manual_seed(seed), branches[-1].stop
    sizes = [(tokens, heads, width), (tokens, kv_heads, width), (tokens, kv_heads, value_width)]
    sizes += [(past, kv_heads, width), (past, kv_heads, value_width)] if past else []
    sizes.append((tokens, heads, value_width))
    *leaves, grad = (2 * torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes)
    return leaves, grad


def dense(branches: list[Branch], leaves: list[Tensor], rule: Rule) -> tuple[Tensor, Tensor]:
    """`[M, H, Dv]` and `[M, H]`: all scores at once, and what a query does not see is masked."""
    q, k, v, *past = leaves
    length, n = len(q), len(past[0]) if past else 0
    before, position = torch.zeros(length, dtype=torch.int64), torch.zeros(length, dtype=torch.int64)
    for branch in branches:
        above = branches[branch.parent]
        begin = branch.at + (int(position[above.start]) if branch.parent >= 0 else 0)
        position[branch.start : branch.stop] = torch.arange(begin, begin + branch.length)
        before[branch.start : branch.stop] = branch.at if branch.parent < 0 else before[above.start]
    place, leave = torch.arange(length), torch.from_numpy(leave_of(branches, length))
    seen = (place <= place[:, None]) & (place[:, None] < leave)
    seen = torch.cat([torch.arange(n) < before[:, None], seen], dim=1)
    if rule.window is not None:
        seen &= position[:, None] - torch.cat([torch.arange(n), position]) < rule.window
    if past:
        k, v = torch.cat([past[0], k]), torch.cat([past[1], v])
    repeats = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(repeats, 1)) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(repeats, 1)), scores.logsumexp(-1).T


def expect(branches: list[Branch], leaves: list[Tensor], grad: Tensor, rule: Rule) -> list[Tensor]:
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out, lse = dense(branches, leaves, rule)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-10) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
