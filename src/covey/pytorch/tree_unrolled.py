"""Attention of a pack by a kernel for sequences of different lengths: each branch after a copy of the keys above it.

Queries are not repeated: a branch's own tokens are the last ones of its sequence, and a mask that is causal from the
end lets them see all that is above. Keys and values are, once for each branch that follows them, so a pack with many
forks is done some branches at a time. The gradients of a key's copies are added in float32 or wider.

    branches            Branch(0, 6, -1, 0), Branch(6, 1, 0, 5), Branch(7, 1, 0, 4)
    queries             0 1 2 3 4 5 | 6             | 7
    keys                0 1 2 3 4 5 | 0 1 2 3 4 6   | 0 1 2 3 7

Limits: those of the kernel. PyTorch's flash attention has no soft cap, and serves bfloat16 and float16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from covey.pytorch.tree_layout import TreeLayout
from covey.rollout.packing import Branch
from covey.types import IntArray

Past = tuple[Tensor, Tensor]
_MOST_KEYS = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Some branches of a pack, each a sequence of keys of which the last are queried.

    Attributes:
        queries: of the pack.
        keys: `[K]` indices into the past and, after it, the pack.
        query_ends: `[n + 1]` where the branches' queries begin and end, int32.
        key_ends: `[n + 1]` likewise.
        longest: most queries, and most keys, of a branch.
    """

    queries: slice
    keys: Tensor
    query_ends: Tensor
    key_ends: Tensor
    longest: tuple[int, int]


Flash = Callable[[Tensor, Tensor, Tensor, Sequences, float, int | None], Tensor]
"""`(queries [Q, H, D], keys [K, Hkv, D], values, sequences, scale, window) -> [Q, H, D]`, differentiable."""


def flash(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, window: int | None) -> Tensor:
    """PyTorch's kernel."""
    out = varlen_attn(
        q,
        k,
        v,
        sequences.query_ends,
        sequences.key_ends,
        *sequences.longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


def attend(
    layout: TreeLayout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Past | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    kernel: Flash = flash,
) -> Tensor:
    """`[M, H, Dv]`, without autograd; arguments as `covey.pytorch.tree_parts.forward` has them.

    Raises:
        NotImplementedError: there is a soft cap.
    """
    _check(softcap)
    keys, values = _with_past(k, v, past)
    parts = (
        kernel(q[part.queries], keys[part.keys], values[part.keys], part, scale, window) for part in _sequences(layout)
    )
    return torch.cat(list(parts))


def differentiate(
    layout: TreeLayout,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Past | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    kernel: Flash = flash,
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, and of the past's two if there is one."""
    _check(softcap)
    keys, values = _with_past(k, v, past)
    wide = torch.promote_types(k.dtype, torch.float32)
    grad_q, grad_k, grad_v = (
        torch.empty_like(q),
        torch.zeros_like(keys, dtype=wide),
        torch.zeros_like(values, dtype=wide),
    )
    for part in _sequences(layout):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q[part.queries], keys[part.keys], values[part.keys])]
            out = kernel(leaves[0], leaves[1], leaves[2], part, scale, window)
            own, *above = torch.autograd.grad(out, leaves, grad[part.queries])
        grad_q[part.queries] = own
        for result, g in zip((grad_k, grad_v), above, strict=True):
            result.index_add_(0, part.keys, g.to(wide))
    n = layout.past
    found = grad_q, grad_k[n:].to(k.dtype), grad_v[n:].to(v.dtype)
    return found if past is None else (*found, grad_k[:n].to(k.dtype), grad_v[:n].to(v.dtype))


def _check(softcap: float | None) -> None:
    if softcap is not None:
        raise NotImplementedError("it has no soft cap")


def _with_past(k: Tensor, v: Tensor, past: Past | None) -> Past:
    return (k, v) if past is None else (torch.cat([past[0], k]), torch.cat([past[1], v]))


def _sequences(layout: TreeLayout) -> list[Sequences]:
    key = "unrolled", None
    found: list[Sequences] | None = layout.plans.get(key)
    if found is None:
        found = layout.plans[key] = unroll(layout.branches, layout.past, layout.positions.device)
    return found


def unroll(
    branches: Sequence[Branch], past: int, device: torch.device | str = "cpu", most_keys: int = _MOST_KEYS
) -> list[Sequences]:
    """The sequences of a pack.

    Args:
        branches: of the pack.
        past: tokens before it.
        device: where the model runs.
        most_keys: of the branches that are done together, where one alone has no more.
    """
    found: list[Sequences] = []
    paths: list[IntArray] = []  # of each branch, the keys that its last token sees
    together: list[int] = []
    for number, branch in enumerate(branches):
        above = np.arange(branch.at)
        if branch.parent >= 0:
            parent = branches[branch.parent]
            above = paths[branch.parent][: len(paths[branch.parent]) - parent.length + branch.at]
        paths.append(np.concatenate([above, np.arange(branch.start, branch.stop) + past]))
        if together and sum(len(paths[n]) for n in together) + len(paths[number]) > most_keys:
            found.append(_join(branches, paths, together, device))
            together = []
        together.append(number)
    return [*found, _join(branches, paths, together, device)]


def _join(
    branches: Sequence[Branch], paths: Sequence[IntArray], numbers: Sequence[int], device: torch.device | str
) -> Sequences:
    lengths = [branches[n].length for n in numbers], [len(paths[n]) for n in numbers]
    query_ends, key_ends = (torch.tensor([0, *np.cumsum(each)], dtype=torch.int32, device=device) for each in lengths)
    queries = slice(branches[numbers[0]].start, branches[numbers[-1]].stop)
    keys = torch.from_numpy(np.concatenate([paths[n] for n in numbers])).to(device)
    return Sequences(queries, keys, query_ends, key_ends, longest=(max(lengths[0]), max(lengths[1])))
