"""A pack as sequences with repeated keys: the plan, and its numbers with PyTorch's attention in the kernel's place."""

from __future__ import annotations

import pytest
import torch
from forests import Rule, assert_close, draw, expect, forest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from covey.pytorch import tree_unrolled
from covey.pytorch.tree_layout import TreeLayout
from covey.pytorch.tree_unrolled import Sequences, attend, differentiate, unroll
from covey.rollout.packing import Branch


def one_by_one(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, window: int | None) -> Tensor:
    """What the kernel promises: the last query sees the last key, and each one before it a key less."""
    found = []
    ends = zip(sequences.query_ends.tolist(), sequences.key_ends.tolist(), strict=True)
    begin = next(ends)
    for end in ends:
        rows, seen = slice(begin[0], end[0]), slice(begin[1], end[1])
        queries, keys = end[0] - begin[0], end[1] - begin[1]
        assert queries <= sequences.longest[0]
        assert keys <= sequences.longest[1]
        behind = torch.arange(keys)[-queries:, None] - torch.arange(keys)
        mask = (behind >= 0) & (behind < (keys if window is None else window))
        q_, k_, v_ = (x.transpose(0, 1) for x in (q[rows], k[seen], v[seen]))
        out = scaled_dot_product_attention(q_, k_, v_, attn_mask=mask, scale=scale, enable_gqa=True)
        found.append(out.transpose(0, 1))
        begin = end
    assert begin == (len(q), len(k))
    return torch.cat(found)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    past=st.sampled_from([0, 5]),
    longest=st.sampled_from([3, 6, 40]),
    window=st.sampled_from([None, None, 1, 3, 20]),
    shape=st.sampled_from([(4, 2, 3, 3), (2, 2, 3, 3), (4, 1, 3, 3)]),
    most_keys=st.sampled_from([1, 30, 10**6]),
)
def test_random_forests(
    seed: int, past: int, longest: int, window: int | None, shape: tuple[int, int, int, int], most_keys: int
) -> None:
    branches = forest(seed, past=past, longest=longest, depth=4)
    leaves, grad = draw(seed, branches, past, shape)
    q, k, v, *above = leaves
    layout = TreeLayout.of(branches, past=past)
    layout.plans["unrolled", None] = unroll(branches, past, most_keys=most_keys)
    rule: Rule = {"scale": 0.7, "window": window, "softcap": None}
    above_it = (above[0], above[1]) if above else None
    out = attend(layout, q, k, v, above_it, **rule, kernel=one_by_one)
    grads = differentiate(layout, grad, q, k, v, above_it, **rule, kernel=one_by_one)
    expected = expect(branches, leaves, grad, rule)
    assert_close([out, *grads], [expected[0], *expected[2:]], tolerance=1e-9)


def test_the_plan_by_hand() -> None:
    """The pack of the module's docstring, after two tokens of a past that the second tree does not see."""
    branches = [Branch(0, 6, -1, 2), Branch(6, 1, 0, 5), Branch(7, 1, 0, 4), Branch(8, 2, -1, 0)]
    (plan,) = unroll(branches, 2)
    assert plan.queries == slice(0, 10)
    assert plan.query_ends.tolist() == [0, 6, 7, 8, 10]
    assert plan.key_ends.tolist() == [0, 8, 16, 23, 25]
    first, second, third, last = plan.keys[:8], plan.keys[8:16], plan.keys[16:23], plan.keys[23:]
    assert first.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert second.tolist() == [0, 1, 2, 3, 4, 5, 6, 8]
    assert third.tolist() == [0, 1, 2, 3, 4, 5, 9]
    assert last.tolist() == [10, 11]
    assert plan.longest == (6, 8)
    assert [part.queries for part in unroll(branches, 2, most_keys=16)] == [slice(0, 7), slice(7, 10)]


def test_gradients_of_copies_are_added_in_float32() -> None:
    """A prompt of one token before 256 answers, and bfloat16 counts to 256: half of each goes to the prompt."""
    branches = [Branch(0, 2, -1, 0), *(Branch(n, 1, 0, 1) for n in range(2, 257))]
    q, k, v = (torch.zeros(257, 1, 8, dtype=torch.bfloat16) for _ in range(3))
    grad = torch.ones_like(q)
    rule: Rule = {"scale": 1.0, "window": None, "softcap": None}
    _, _, grad_v = differentiate(TreeLayout.of(branches), grad, q, k, v, None, **rule, kernel=one_by_one)
    assert grad_v[0, 0].tolist() == [129] * 8  # its own 1, and 256 halves


def test_a_soft_cap_is_refused() -> None:
    layout, row = TreeLayout.of([Branch(0, 1, -1, 0)]), torch.zeros(1, 1, 8)
    with pytest.raises(NotImplementedError, match="no soft cap"):
        attend(layout, row, row, row, None, scale=1.0, window=None, softcap=2.0)
    with pytest.raises(NotImplementedError, match="no soft cap"):
        differentiate(layout, row, row, row, row, None, scale=1.0, window=None, softcap=2.0)


def test_what_the_kernel_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 4 is the token itself and 3 to its left; heads may be shared."""
    given_: list[object] = []

    def record(*arguments: object, **named: object) -> Tensor:
        given_.append((arguments[3:], named))
        out = arguments[0]
        assert isinstance(out, Tensor)
        return out

    monkeypatch.setattr(tree_unrolled, "varlen_attn", record)
    layout = TreeLayout.of([Branch(0, 3, -1, 0), Branch(3, 2, 0, 1)])
    q, k = torch.zeros(5, 2, 8), torch.zeros(5, 1, 8)
    for window, expected in ((None, (-1, 0)), (4, (3, 0))):
        attend(layout, q, k, k, None, scale=0.5, window=window, softcap=None)
        (ends, key_ends, *longest), named = given_.pop()  # type: ignore[misc]
        assert (ends.tolist(), key_ends.tolist(), longest) == ([0, 3, 5], [0, 3, 6], [3, 3])
        assert (ends.dtype, key_ends.dtype) == (torch.int32, torch.int32)
        assert named == {"scale": 0.5, "window_size": expected, "enable_gqa": True}
