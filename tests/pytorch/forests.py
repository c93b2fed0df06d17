"""Random packs, and attention over them from all scores at once: what the attentions of `covey.pytorch` must give."""

import numpy as np
import torch
from torch import Tensor

from covey.pytorch.attention.tree_layout import Rule
from covey.rollout.packing import Branch, leave_of


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
