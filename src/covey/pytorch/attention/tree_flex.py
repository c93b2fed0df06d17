"""Attention of a pack as one call of PyTorch's `flex_attention`: nothing is repeated, and no mask is written out.

The kernel is compiled once for all packs of a model. What differs between packs are lists of integers that the mask
reads (`tree_mask`) and the lists of blocks, both made on the host; their lengths, and the number of
tokens, are symbols in the compiled code. That holds because of how they are given:

    tokens are filled up to whole blocks, at least two of queries, and to more keys than queries
                    no length is 1 or equal to another, which the compiler would take for a rule; indices stay inside
                    of the lists; and kernels for few queries, or for half a block, are never chosen
    mask and soft cap are made inside of the compiled function
                    functions that are passed in would be compiled anew for each pack
    the scale and the soft cap are constants of the compiled function
                    so that they are in the kernel, not read by it

Compiled code that does not serve any more, by whatever guard, raises at the limit of compilations: without `fullgraph`
PyTorch would from there on write out all scores, silently.

`differentiate` computes the forward again: the public interface has a backward only for what autograd has kept. Called
under autograd itself, `attend` has no need of that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from covey.pytorch.attention.tree_layout import TreeLayout
from covey.pytorch.attention.tree_mask import Mask, sees

Past = tuple[Tensor, Tensor]

BLOCK = 128
"""Tokens of a block of queries and of keys: the least for which all of PyTorch's kernels have a size."""
BACKEND = "inductor"


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
) -> Tensor:
    """`[M, H, Dv]`, differentiable; arguments as `covey.pytorch.attention.tree_parts.forward` has them."""
    lists = _lists(layout, window)
    queries, keys = len(lists.since), lists.keys.shape[1]
    filled = [torch.cat([q, q.new_zeros(queries - len(q), *q.shape[1:])])]
    for own, above in zip((k, v), past or (k[:0], v[:0]), strict=True):
        room = keys - queries - len(above), queries - len(own)
        before, behind = (own.new_zeros(size, *own.shape[1:]) for size in room)
        filled.append(torch.cat([above, before, own, behind]))
    rows = [x.transpose(0, 1)[None] for x in filled]
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in rows)
    for x in rows:
        if learning and not x.requires_grad:
            x.requires_grad_()  # a frozen projection's: what is compiled wants gradients of all, or of none
        torch._dynamo.mark_dynamic(x, 2)
        torch._dynamo.mark_static(x, [0, 1, 3])
    out: Tensor = _compiled(scale, softcap, BACKEND)(*rows, lists)
    return out[0].transpose(0, 1)[: len(q)]


def differentiate(
    layout: TreeLayout, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past | None, **rule: Any
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, and of the past's two if there is one."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v, *(past or ()))]
        q, k, v, *above = leaves
        out = attend(layout, q, k, v, (above[0], above[1]) if above else None, **rule)
        return torch.autograd.grad(out, leaves, grad)


class Lists(NamedTuple):
    """What the kernel reads of a pack, int32: the mask's lists, and by `BlockMask`'s names which blocks there are.

    For each of the n blocks of queries, how many of the m blocks of keys it sees, partly or fully, and which, these
    first; and the same for each block of keys.
    """

    keys: Tensor  # [3, S] first, leave, position: one array, one size
    since: Tensor  # [L]
    kv_num_blocks: Tensor  # [1, 1, n] partial
    kv_indices: Tensor  # [1, 1, n, m]
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor  # [1, 1, m] partial
    q_indices: Tensor  # [1, 1, m, n]
    full_q_num_blocks: Tensor
    full_q_indices: Tensor

    @classmethod
    def of(cls, mask: Mask, device: torch.device | str = "cpu") -> Lists:
        """Those of a mask."""
        partial, full = mask.blocks()
        arrays: list[NDArray[Any]] = [np.stack([mask.first, mask.leave, mask.position]), mask.since]
        for flags in (partial, full, partial.T, full.T):
            which = np.argsort(~flags, axis=1, kind="stable")
            arrays += [flags.sum(1, dtype=np.int32)[None, None], which.astype(np.int32)[None, None]]
        found = cls(*(torch.from_numpy(array).to(device) for array in arrays))
        for value in found:
            for dim, size in enumerate(value.shape):
                if size > 1 and (value is not found.keys or dim == 1):
                    torch._dynamo.mark_dynamic(value, dim)
        return found

    def block_mask(self) -> BlockMask:
        """As `flex_attention` takes it."""

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            found: Tensor = sees(query, self.since[query], *(self.keys[i, key] for i in range(3)))
            return found

        blocks = {name: value for name, value in self._asdict().items() if "_" in name}
        return BlockMask((len(self.since), self.keys.shape[1]), **blocks, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible)


@cache
def _compiled(scale: float, softcap: float | None, backend: Any) -> Callable[..., Tensor]:
    def bend(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    def run(q: Tensor, k: Tensor, v: Tensor, lists: Lists) -> Tensor:
        out: Tensor = flex_attention(
            q,
            k,
            v,
            score_mod=None if softcap is None else bend,
            block_mask=lists.block_mask(),
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
            kernel_options={"BACKEND": "TRITON"},
        )
        return out

    # not dynamic but for what is marked: a second scale would become a symbol too, which the kernel does not take
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "isolate_recompiles": True, "backend": backend}
    compiled: Callable[..., Tensor] = torch.compile(run, **options)
    return compiled


def _lists(layout: TreeLayout, window: int | None) -> Lists:
    found: Lists | None = layout.plans.get(("flex", window))
    if found is None:
        found = Lists.of(Mask.of(layout.branches, layout.past, window, BLOCK), layout.positions.device)
        layout.plans["flex", window] = found
    return found
