"""Attention of a pack on CUDA as one call of PyTorch's `flex_attention`, compiled from the rule who sees whom.

Its backward computes the forward again. Not used where it fails, which is tried once for each dtype and dimension; then
`covey.pytorch.tree_attention` goes part by part.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from covey.pytorch.tree_layout import TreeLayout
from covey.rollout.packing import Branch, leave_of

logger = logging.getLogger("covey.pytorch")

Past = tuple[Tensor, Tensor]


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
    """`[M, H, Dv]`, differentiable; arguments as `covey.pytorch.tree_attention.forward` has them."""
    if past is not None:
        k, v = torch.cat([past[0], k]), torch.cat([past[1], v])
    if window not in layout.masks:
        layout.masks[window] = _mask(layout, window)

    def bend(score: Tensor, *_: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    run = _compiled() if q.is_cuda else flex_attention
    out = run(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        score_mod=None if softcap is None else bend,
        block_mask=layout.masks[window],
        scale=scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )
    found: Tensor = out[0].transpose(0, 1)
    return found


def differentiate(
    layout: TreeLayout, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past | None, **rule: Any
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, and of the past's two if there is one."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v, *(past or ()))]
        q, k, v, *above = leaves
        out = attend(layout, q, k, v, (above[0], above[1]) if above else None, **rule)
        return torch.autograd.grad(out, leaves, grad)


def _mask(layout: TreeLayout, window: int | None) -> Any:
    """Key k of the pack is seen by the queries `k <= q < leave[k]`, the past by those that follow it."""
    device, length, past = layout.positions.device, len(layout.positions), layout.past
    branches, before = layout.branches, torch.zeros(length, dtype=torch.int64)
    seen: list[int] = []
    for branch in branches:
        seen.append(branch.at if branch.parent < 0 else seen[branch.parent])
        before[branch.start : branch.stop] = seen[-1]
    before = before.to(device)  # [M] how many tokens of the past a query sees
    place = torch.arange(-past, length, device=device)  # [past + M] of each key in the pack
    leave = torch.cat([torch.zeros(past, dtype=torch.int64), torch.from_numpy(leave_of(branches, length))]).to(device)
    position = torch.cat([torch.arange(past, device=device), layout.positions])

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        follows = ((place[key] <= query) & (query < leave[key])) | (key < before[query])
        if window is None:
            return follows
        return follows & (layout.positions[query] - position[key] < window)

    return create_block_mask(visible, None, None, length, past + length, device=str(device))


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


@cache
def works(device: torch.device, dtype: torch.dtype, width: int, value_width: int) -> bool:
    """Whether it runs here, forward and backward, on four tokens."""
    shapes = [(4, 2, width), (4, 1, width), (4, 1, value_width)]
    q, k, v = (torch.ones(shape, dtype=dtype, device=device) for shape in shapes)
    layout = TreeLayout.of([Branch(0, 3, -1, 0), Branch(3, 1, 0, 1)], device)
    try:
        rule: dict[str, Any] = {"scale": 1.0, "window": 3, "softcap": 2.0}
        grad = torch.ones_like(attend(layout, q, k, v, None, **rule))
        differentiate(layout, grad, q, k, v, None, **rule)
    except Exception as error:  # whatever a compiler does on a device that it does not know
        logger.warning(
            "attention of packs goes part by part, which is slower: flex_attention fails on %s: %s", device, error
        )
        return False
    return True
