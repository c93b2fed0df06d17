"""Attention over packed trees against dense attention with a mask from `leave`, in float64; `flex_attention` on a CPU:
its forward is compiled, its backward runs in what PyTorch has for tracing. A GPU's kernel is probed where it runs.
"""

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
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
from torch._inductor.kernel.flex.flex_cpu import check_cpu_supported
from torch.nn.attention.flex_attention import create_block_mask

from covey.pytorch import Policy
from covey.pytorch.attention import tree_attention, tree_flex, tree_parts
from covey.pytorch.attention.tree_flex import Case, Kernel, Lists, Mask, choose, obstacle, sees, unexplained
from covey.pytorch.attention.tree_layout import ALONE, Rectangle, Rule, Run, TreeLayout, TreePath, similar_lengths
from covey.rollout.packing import Branch, Pack, leave_of, pack_episodes
from covey.rollout.walking import Piece, pieces_of, walk
from fakes import raises

SEEDS, WINDOWS = st.integers(0, 10**6), st.sampled_from([None, None, 1, 3, 20])
FORESTS = {
    "seed": SEEDS,
    "past": st.sampled_from([0, 5]),
    "longest": st.sampled_from([3, 6, ALONE + 9]),
    "rule": st.builds(Rule, st.just(0.7), WINDOWS, st.sampled_from([None, None, 1.5])),
    "shape": st.sampled_from([(4, 2, 3, 3), (2, 2, 3, 3), (4, 1, 3, 5)]),
    "repeated": st.sampled_from([0, 16, 1000]),
}
Shape = tuple[int, int, int, int]
# PyTorch hides this one of its own by a hook, which an error does not reach
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
SIZES = {"past": st.sampled_from([0, 1, 7, 40]), "longest": st.sampled_from([6, 30]), "block": st.sampled_from([4, 16])}
CASE = Case(torch.device("cpu"), torch.float32, 4, 2, 16, 16, Rule(0.25, 70))
SLOW = pytest.mark.slow
DTYPES = (torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=SLOW))
MOSTLY_SLOW = [torch.float32, *(pytest.param(d, marks=SLOW) for d in (torch.bfloat16, torch.float16))]
ONE_DTYPE = [torch.bfloat16, *(pytest.param(d, marks=SLOW) for d in (torch.float32, torch.float16))]
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one token is nan": lambda grad: grad.index_fill(0, torch.tensor(17), torch.nan),
    "one block is missing": lambda grad: grad.index_fill(0, torch.arange(128), 0),
    "one head for another": lambda grad: grad.flip(1),
    "a little more": lambda grad: 1.2 * grad,
}
NAMES = ("queries", "keys", "values", "past's keys", "past's values")


def attended(leaves: list[Tensor], branches: list[Branch], **options: Any) -> tuple[Any, ...]:
    q, k, v, *above = leaves
    return TreeLayout.of(branches, past=len(above[0]) if above else 0, **options), q, k, v, tuple(above) or None


def find(branches: list[Branch], leaves: list[Tensor], grad: Tensor, rule: Rule, **options: Any) -> list[Tensor]:
    layout, *tensors = attended(leaves, branches, **options)
    out, lse = tree_parts.forward(layout, *tensors, rule)
    *grads, grad_past = tree_parts.backward(layout, grad, *tensors, out, lse, rule)
    return [out, lse, *grads, *(grad_past or ())]


@settings(deadline=None)
@given(**FORESTS)
def test_random_forests(seed: int, past: int, longest: int, rule: Rule, shape: Any, repeated: int) -> None:
    branches = forest(seed, past=past, longest=longest, depth=8 if longest < ALONE else 4)
    leaves, grad = draw(seed, branches, past, shape)
    found = find(branches, leaves, grad, rule, repeated=repeated)
    assert_close(found, expect(branches, leaves, grad, rule), tolerance=1e-9)


def test_three_tokens_by_hand_and_what_is_planned() -> None:
    """Equal scores, so outputs are means: token 2 leaves the branch 0, 1 after token 0."""
    branches = [Branch(0, 2, -1, 0), Branch(2, 1, 0, 1)]
    zeros, v = torch.zeros(3, 1, 1, dtype=torch.float64), torch.tensor([1.0, 3.0, 8.0], dtype=torch.float64)
    for repeated in (0, 1):
        found = find(branches, [zeros, zeros, v.view(3, 1, 1)], zeros + 1, Rule(1.0), repeated=repeated)
        out, lse, _, _, grad_v = (value.flatten() for value in found)
        assert (out.tolist(), lse.exp().tolist()) == (pytest.approx([1, 2, 4.5]), pytest.approx([1, 2, 2]))
        assert grad_v.tolist() == pytest.approx([2, 0.5, 0.5])
    # a prompt of 40 with completions of 50, the longest, 45 and 3; the last one has the first's first two tokens
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
    assert (layout.positions[[89, 90, 93, 137]].tolist(), layout.longest) == ([89, 42, 40, 84], 90)
    apart = [(part.queries, part.keys) for part in TreeLayout.of(branches, repeated=0).across]
    assert apart == [(slice(90, 93), slice(0, 42)), (slice(93, 138), slice(0, 40))]
    # two tokens are repeated sooner than a call is made
    assert TreeLayout.of([Branch(0, 3, -1, 0), Branch(3, 9, 0, 2)]).across == []
    (run,) = TreeLayout.of([Branch(start, 40, -1, 0) for start in (0, 40, 80)]).own
    assert run.take(torch.arange(120)).shape == (3, 40)
    raises(ValueError, "a trunk of 3 branches after 0 of 0 tokens", TreeLayout.of, branches, trunk=True)
    with pytest.raises(ValueError, match="5 tokens on a path of capacity 4"):
        TreePath(4).write(0, 3, torch.zeros(2, 1, 1), torch.zeros(2, 1, 1))
    # rows of similar length share a rectangle, and short ones are not worth their own
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


def test_strides_that_kernels_do_not_read_and_scores_that_overflow_where_nobody_looks() -> None:
    """Heads that are not dense, and the gradient of a sum, which is one number expanded."""
    branches = forest(2, longest=40, depth=3)
    leaves, grad = draw(2, branches)
    strided = [leaf.mT.contiguous().mT.requires_grad_() for leaf in leaves]
    tree_attention.tree_attention(TreeLayout.of(branches), 0, *strided, Rule(0.5)).sum().backward()
    assert_close([x.grad for x in strided], expect(branches, leaves, torch.ones_like(grad), Rule(0.5))[2:])
    # a key far larger than what the padding's query saw before it: exp of the difference is infinite in float32
    branches, q = [Branch(0, 1, -1, 0), Branch(1, 9, -1, 0)], torch.full((10, 1, 4), 10.0)
    k = torch.linspace(-10, 10, 10)[:, None, None].expand(10, 1, 4).contiguous()
    found = find(branches, [q, k, torch.ones(10, 1, 4)], torch.ones(10, 1, 4), Rule(1.0))
    assert all(bool(value.isfinite().all()) for value in found)


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
    model = tiny_model("llama" if family == "fused" else family, sliding_window=window).double()
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
    assert_walk(float64_policy(family, gradient_checkpointing=checkpoint), family == "fused")


def test_the_model_stays_usable_without_a_pack_and_attention_that_is_not_served_says_so() -> None:
    """Sampling and evaluation call the same model: without a layout it attends as it did before."""
    for family in ("llama", "gemma2"):  # one on sdpa, one on eager
        model, tokens = tiny_model(family), torch.arange(4, 24).view(2, 10)
        mask = torch.ones_like(tokens)
        mask[0, :4] = 0
        with torch.no_grad():
            before = model(tokens, attention_mask=mask).logits
            model.set_attn_implementation(tree_attention.NAME_PREFIX + model.config._attn_implementation)
            after = model(tokens, attention_mask=mask).logits
        assert torch.equal(before[mask.bool()], after[mask.bool()])
    model = tiny_model("llama")
    model.set_attn_implementation(tree_attention.NAME_PREFIX + "sdpa")
    ids = torch.arange(4, 8)[None]
    given = {"input_ids": ids, "position_ids": ids - 4, "attention_mask": torch.zeros(1, 1, 1, 1)}
    given[tree_attention.LAYOUT_ARGUMENT] = TreeLayout.of([Branch(0, 4, -1, 0)])
    dropping = ({}, r"drops weights \(dropout=0.1\)")
    for more, words in (({"is_causal": False}, "not causal"), ({"s_aux": torch.zeros(4)}, "s_aux"), dropping):
        if not more:
            for layer in model.train().base_model.layers:
                layer.self_attn.attention_dropout = 0.1
        raises(tree_attention.UnsupportedAttentionError, words, model.base_model, **given, **more)


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


def draw(seed: int, branches: list[Branch], past: int = 0, shape: Shape = (4, 2, 3, 3)) -> tuple[list[Tensor], Tensor]:
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


def ancestors(branches: list[Branch], past: int, window: int | None) -> np.ndarray:
    """`[M, past + M]` whom each token sees: itself and all before it on its path, as far as the window."""
    length = branches[-1].stop
    found = np.zeros((length, past + length), np.bool_)
    paths: list[list[int]] = []  # to each branch's end, as places in past and pack
    for branch in branches:
        above = list(range(branch.at))
        if branch.parent >= 0:
            above = paths[branch.parent][: branch.at - branches[branch.parent].length or None]
        paths.append([*above, *range(past + branch.start, past + branch.stop)])
        for query in range(branch.start, branch.stop):
            seen = paths[-1][: len(above) + 1 + query - branch.start]
            found[query, seen if window is None else seen[-window:]] = True
    return found


def assert_seen(branches: list[Branch], past: int, window: int | None, block: int) -> None:
    length, mask = branches[-1].stop, Mask.of(branches, past, window, block)
    dense = sees(np.arange(len(mask.since))[:, None], mask.since[:, None], mask.first, mask.leave, mask.position)
    assert not dense[:length, past : len(mask.first) - len(mask.since)].any()  # nobody sees what fills up the past
    own = dense[:, -len(mask.since) :]
    assert np.array_equal(own[length:], np.eye(len(own), dtype=np.bool_)[length:])  # what fills up the pack: itself
    assert not own[:length, length:].any()
    found = np.concatenate([dense[:length, :past], own[:length, :length]], axis=1)
    assert np.array_equal(found, ancestors(branches, past, window))


@settings(deadline=None)
@given(seed=SEEDS, past=st.sampled_from([0, 1, 7, 12]), window=WINDOWS, block=st.sampled_from([4, 8, 128]))
def test_the_mask_is_that_of_a_walk_to_the_root(seed: int, past: int, window: int | None, block: int) -> None:
    assert_seen(forest(seed, past=past, depth=5, ordered=True), past, window, block)


@settings(deadline=None)
@given(seed=SEEDS, window=WINDOWS, **SIZES)
def test_its_blocks_are_the_whole_masks(seed: int, past: int, window: int | None, longest: int, block: int) -> None:
    mask = Mask.of(forest(seed, past=past, longest=longest, depth=5, ordered=True), past, window, block)
    first, leave, position, since = map(torch.from_numpy, (mask.first, mask.leave, mask.position, mask.since))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(query, since[query], first[key], leave[key], position[key])

    theirs = create_block_mask(visible, None, None, len(since), len(first), device="cpu", BLOCK_SIZE=block)
    for name, value in Lists.of(mask)._asdict().items():
        if "_" in name:
            assert torch.equal(value, getattr(theirs, name)), name


def test_the_mask_of_three_tokens_by_hand_and_two_blocks_of_queries_and_more_keys_at_the_least() -> None:
    """A past of 2; a token after both, one after that, and one after the first of the past."""
    branches = [Branch(0, 2, -1, 2), Branch(2, 1, -1, 1)]
    mask = Mask.of(branches, 2, None, 2)
    assert (mask.first.tolist(), mask.leave.tolist()) == ([0, 0, 0, 1, 2, 3], [3, 2, 2, 2, 3, 4])
    assert (mask.position.tolist(), mask.since.tolist()) == ([0, 1, 2, 3, 1, 0], [0, 0, 0, 0])
    assert Mask.of(branches, 2, 2, 2).since.tolist() == [1, 2, 0, 0]
    partial, full = mask.blocks()
    assert partial.tolist() == [[False, True, False], [True, False, True]]
    assert full.tolist() == [[True, False, False], [False, False, False]]
    with pytest.raises(ValueError, match=r"leave the past after \[1, 2\] tokens: those that leave it last come first"):
        Mask.of([Branch(0, 2, -1, 1), Branch(2, 1, -1, 2)], 2, None, 128)
    # lengths of 1, and equal ones, would be rules for the compiler; short queries have a kernel of their own
    lists = tree_flex._lists(TreeLayout.of([Branch(0, 1, -1, 0)]), None)
    assert (len(lists.since), lists.keys.shape[1], lists.kv_indices.shape) == (256, 384, (1, 1, 2, 3))
    assert (lists.kv_num_blocks + lists.full_kv_num_blocks).flatten().tolist() == [1, 1]


def all_of(pieces: Iterable[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        yield piece
        yield from all_of(piece.followers)


@settings(deadline=None)
@given(seed=SEEDS, budget=st.integers(4, 40), window=WINDOWS)
def test_pieces_of_a_walk_are_in_that_order(seed: int, budget: int, window: int | None) -> None:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 2, rng.integers(3, 20)) for _ in range(rng.integers(2, 12))]
    episodes = [episode(ids, np.arange(len(ids)) > 0) for ids in rows]
    for pack in pack_episodes(episodes, tokens_per_pack=10**6, whole_trees=True):
        for piece in all_of(pieces_of(pack, budget)):
            assert_seen(list(piece.branches), piece.past, window, 4)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tree_flex, "BACKEND", "eager")
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    choose.cache_clear()
    yield
    choose.cache_clear()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, traced: None) -> list[Any]:
    """Every graph that is compiled from here on; they run as they were traced."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(tree_flex, "BACKEND", backend)
    return graphs


def packs() -> list[tuple[int, list[Branch], int | None]]:
    """A past, branches, a window: two to four blocks of queries, three to six of keys."""
    sizes = enumerate(((0, 6, None), (5, 60, 20), (130, 6, 3)))
    return [(p, forest(n, past=p, longest=most, depth=4, ordered=True), window) for n, (p, most, window) in sizes]


def assert_right(leaves: list[Tensor], branches: list[Branch], grad: Tensor, rule: Rule) -> None:
    layout, *tensors = attended(leaves, branches)
    with torch.no_grad():
        out = tree_flex.attend(layout, *tensors, rule)
    expected, _, *grads = expect(branches, leaves, grad, rule)
    assert_close([out, *tree_flex.differentiate(layout, grad, *tensors, rule)], [expected, *grads], tolerance=1e-9)


@pytest.mark.parametrize("shape", [(4, 2, 3, 5), (3, 1, 8, 8), (2, 2, 5, 4)], ids=str)
def test_it_gives_the_same_and_is_compiled_once_for_all_packs(shape: Shape, compilations: list[Any]) -> None:
    softcap = 1.5 if shape == (4, 2, 3, 5) else None
    for seed, (past, branches, window) in enumerate(packs()):
        leaves, grad = draw(seed, branches, past, shape)
        assert_right(leaves, branches, grad, Rule(0.7, window, softcap))
    assert len(compilations) == 2  # without and with gradients


def test_another_scale_is_another_constant(compilations: list[Any]) -> None:
    """One that the compiler made a symbol would not be taken by the kernel."""
    past, branches, _ = packs()[0]
    leaves, grad = draw(0, branches, past)
    for scale, softcap in ((0.7, 1.5), (0.3, 1.5), (0.3, 2.0)):
        assert_right(leaves, branches, grad, Rule(scale, None, softcap))
    assert len(compilations) == 6
    for graph in compilations:
        (call,) = (node for node in graph.graph.nodes if "flex_attention" in str(node.target))
        assert isinstance(call.args[5], float)
        assert call.args[4][0] is not call.args[4][1]  # as many queries as keys would be a rule


def test_what_needs_no_gradient_does_not_compile_it_anew(compilations: list[Any]) -> None:
    """A layer whose keys are computed by frozen weights from a frozen embedding."""
    past, branches, _ = packs()[1]
    leaves, grad = draw(0, branches, past)
    rule = Rule(0.7, None, None)
    assert_right(leaves, branches, grad, rule)
    layout, q, *others = attended(leaves, branches)
    tree_flex.attend(layout, q := q.clone().requires_grad_(), *others, rule).backward(grad)
    assert_close([q.grad], [expect(branches, leaves, grad, rule)[2]], tolerance=1e-9)
    assert len(compilations) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own imports
@pytest.mark.skipif(not check_cpu_supported() or shutil.which("g++") is None, reason="needs AVX2 and a compiler")
def test_compiled_for_this_processor() -> None:
    """Forward only, which is all that PyTorch compiles here; the heads are Gemma's, small."""
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for seed, (past, branches, window) in enumerate(packs()):
        leaves, _ = draw(seed, branches, past, (4, 2, 16, 16))
        given, rule = attended([leaf.float() for leaf in leaves], branches), Rule(0.25, window, 5.0)
        with torch.no_grad():
            found = tree_flex.attend(*given, rule)
        torch.testing.assert_close(found, tree_parts.forward(*given, rule)[0], rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.parametrize("dtype", ONE_DTYPE, ids=str)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
def test_right_kernels_are_taken(dtype: torch.dtype, window: int | None, softcap: float | None, traced: None) -> None:
    assert obstacle(tree_flex.FLEX, CASE._replace(dtype=dtype, rule=Rule(0.25, window, softcap))) == ""


@pytest.mark.parametrize("dtype", MOSTLY_SLOW, ids=str)
def test_a_wrong_gradient_is_refused(dtype: torch.dtype, traced: None) -> None:
    """Of queries, keys, values, the past's keys or values: one of them is changed, in one of four ways."""
    case, right = CASE._replace(dtype=dtype), list[tuple[Tensor, ...]]()
    for index, name in enumerate(NAMES):
        for what, change in CHANGES.items():

            def differentiate(*given: Any, index: int = index, change: Any = change) -> tuple[Tensor, ...]:
                if not right:
                    right.append(tree_flex.differentiate(*given))
                return (*right[0][:index], change(right[0][index]), *right[0][index + 1 :])

            reason = obstacle(Kernel(tree_flex.attend, differentiate), case)
            assert reason.startswith(f"its gradient of the {name} differs by"), (name, what)
            assert "where rounding explains" in reason


@pytest.mark.parametrize("dtype", MOSTLY_SLOW, ids=str)
def test_a_wrong_backward_is_refused(dtype: torch.dtype, traced: None) -> None:
    """The traced kernel under another rule than it is asked for, in its backward only."""
    case = CASE._replace(dtype=dtype, rule=Rule(0.25, 70, 20.0))
    for other in (Rule(0.25, None, 20.0), Rule(0.25, 69, 20.0), Rule(0.25, 70), Rule(0.23, 70, 20.0)):
        wrong = Kernel(tree_flex.attend, lambda *a, other=other: tree_flex.differentiate(*a[:-1], other))
        assert "differs by" in obstacle(wrong, case), other


def test_the_choice_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, traced: None) -> None:
    caplog.set_level(logging.INFO, logger="covey.pytorch")
    for _ in range(2):  # said once
        assert choose(CASE) is tree_flex.FLEX

    def wrong(*rest: Any) -> tuple[Tensor, ...]:
        q, k, v, *past = tree_flex.differentiate(*rest)
        return q, k, v.flip(1), *past

    monkeypatch.setattr(tree_flex, "FLEX", Kernel(tree_flex.attend, wrong))
    assert choose(CASE._replace(rule=Rule(0.25))) is None
    taken, refused = caplog.records
    assert (taken.levelno, refused.levelno) == (logging.INFO, logging.WARNING)
    assert taken.message == "attention of packs on cpu (4 heads of 16, float32, windows) by flex_attention"
    slower = "part by part, which is slower; not by flex_attention: its gradient of the values differs"
    assert refused.message.startswith(f"attention of packs on cpu (4 heads of 16, float32) {slower}")


def test_a_kernel_that_does_not_run_is_passed_over_and_a_cpu_goes_part_by_part() -> None:
    def fails(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("No valid triton configs.\nOutOfMemoryError: out of resource")

    assert obstacle(Kernel(fails, fails), CASE) == "RuntimeError: No valid triton configs."
    q, k = torch.zeros(3, 4, 16), torch.zeros(3, 2, 16)
    assert tree_attention.kernel_for(q, k, k, Rule(0.25, 3)) is None


def test_what_rounding_explains_by_hand() -> None:
    """Two tokens of one head, float32: units of rounding are 1.2e-7."""
    truth = torch.tensor([[[3.0, 4.0]], [[0.0, 5.0]]], dtype=torch.float64)

    def off(first: float, second: float) -> Tensor:
        return truth.float() + torch.tensor([[[first, 0.0]], [[0.0, second]]])

    def said(first: float, second: float) -> str:
        return unexplained("output", off(first, second), off(0.01, 0.01), truth)

    assert said(0.01, 0.01) == said(0.0299, 0.0299) == ""  # as much, and three times that
    assert said(0.05, 0.0) == ""  # five times at one token
    assert said(0.035, 0.035) == "its output differs by 0.007, where rounding explains 0.006"
    assert "nan" in said(torch.nan, 0.01)


def test_the_probe_draws_its_own_numbers_and_is_not_seen_by_checkpointing(traced: None) -> None:
    state, saved = torch.random.get_rng_state(), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        choose(CASE)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not saved
    assert all(torch.equal(one, other) for one, other in zip(tree_flex.draw(CASE), tree_flex.draw(CASE), strict=True))


@pytest.mark.parametrize("family", ["fused", *(pytest.param(name, marks=SLOW) for name in ("mistral", "gemma2"))])
def test_models_compute_the_same_by_a_whole_kernel(family: str, monkeypatch: pytest.MonkeyPatch, traced: None) -> None:
    """In one go, where `flex_attention` runs under autograd itself, and along a walk."""
    policy = float64_policy(family)
    expected = assert_walk(policy, family == "fused")
    monkeypatch.setattr(tree_attention, "kernel_for", lambda *_: tree_flex.FLEX)
    monkeypatch.setattr(tree_parts, "forward", None)
    found = assert_walk(policy, family == "fused")
    torch.testing.assert_close(found["hidden"], expected["hidden"], rtol=1e-12, atol=1e-12)
    assert_near(found, expected)


@pytest.mark.parametrize("checkpoint", [False, pytest.param(True, marks=SLOW)], ids=["", "checkpoint"])
def test_from_the_probe_to_a_models_gradients(checkpoint: bool, monkeypatch: Any, caplog: Any, traced: None) -> None:
    """As on a GPU: the policy's own probe chooses at the start, and what was compiled then is what trains.

    Compiled at a checkpoint, it would be traced while somebody counts what autograd saves.
    """
    caplog.set_level(logging.INFO, logger="covey.pytorch")
    torch._dynamo.reset()
    monkeypatch.setattr(tree_flex, "BACKEND", "aot_eager")
    graphs, found = torch._dynamo.utils.counters["stats"], []
    before = graphs["unique_graphs"]
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(tree_attention, "DEVICES", devices)
        model, options = tiny_model("gemma2", sliding_window=6), {"lora_r": 4, "gradient_checkpointing": checkpoint}
        policy = fill(Policy.load(model, tiny_tokenizer(), **options))
        compiled = graphs["unique_graphs"] - before
        found.append(gradients(policy, policy.held.hidden_packed(tree_pack()).square().sum()))
    assert "attention of packs on cpu (4 heads of 8, float32) by flex_attention" in caplog.text
    assert compiled == graphs["unique_graphs"] - before == 2  # without and with gradients, whatever the window
    assert_near(found[1], found[0], tolerance=1e-4)


def test_a_models_own_code_under_autocast(monkeypatch: pytest.MonkeyPatch, traced: None) -> None:
    """The kernel is given the precision of autocast, which does not reach into it."""
    policy = fill(Policy.load(tiny_model("llama"), tiny_tokenizer(), lora_r=4, autocast="bfloat16"))
    pack, seen = tree_pack(), []
    with torch.no_grad():
        by_parts = policy.held.hidden(pack)

    def attend(layout: TreeLayout, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        seen.append((q.dtype, k.dtype, v.dtype, torch.is_autocast_enabled("cpu")))
        return tree_flex.attend(layout, q, k, v, *rest)

    monkeypatch.setattr(tree_attention, "kernel_for", lambda *_: Kernel(attend, tree_flex.differentiate))
    found = policy.held.hidden(pack)
    found.float().square().sum().backward()
    assert float((found.detach() - by_parts).norm()) < 0.02 * float(by_parts.norm())
    assert set(seen) == {(torch.bfloat16,) * 3 + (False,)}
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in policy.trainable_parameters())
