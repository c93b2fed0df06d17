"""Whether `flex_attention` attends to a whole pack on an accelerator; a probe decides, of numbers, before it is used.

Where `tree_flex` does not serve, attention goes part by part (`tree_parts`). It serves where on a small pack with a
past its output and its gradients of queries, keys, values and the past are those of the parts in float64, up to what
rounding explains: on average over the tokens three times the error that the parts have in the model's precision, and
eight times at the worst token, plus some units of rounding. What is tried is what will run: the device, the precision,
numbers and widths of heads, scale, soft cap, and whether there is a window. The mask itself is proven elsewhere; a
compiler's mistake with any of these is found here, and then the console says so and why.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from covey.pytorch.attention import tree_flex, tree_parts
from covey.pytorch.attention.tree_layout import TreeLayout
from covey.pytorch.attention.tree_parts import Past
from covey.rollout.packing import Branch

logger = logging.getLogger("covey.pytorch")


class Kernel(Protocol):
    """Attention of a whole pack, with the arguments of `covey.pytorch.attention.tree_parts.forward`."""

    def attend(
        self,
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
        """`[M, H, Dv]`."""

    def differentiate(
        self,
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
    ) -> tuple[Tensor, ...]:
        """The gradients of q, k, v, and of the past's two if there is one."""


KERNEL: Kernel = tree_flex
DEVICES = ("cuda",)
"""Where it is tried."""

PROBE = (Branch(0, 300, -1, 150), Branch(300, 90, 0, 260), Branch(390, 70, 0, 140), Branch(460, 120, -1, 60))
"""Two branches that leave a past of 150 tokens, and two that leave the first of these: five blocks of 128 tokens, of
which some are seen in part, some wholly and some not at all by others."""
_PAST, _WINDOW = 150, 70
_TIMES_PARTS = (3.0, 8.0)
"""Largest error, as a multiple of the parts' own: on average, and at the worst token."""
_UNITS = (4.0, 16.0)
"""Units of rounding added to these limits: parts compute in float32 and round once, kernels round in between."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a kernel is to serve.

    Attributes:
        device: where.
        dtype: of queries, keys and values.
        heads: of queries.
        kv_heads: of keys and values.
        width: of a query's and a key's head.
        value_width: of a value's.
        scale: factor on the scores.
        windowed: whether a sliding window is used.
        softcap: bound on the scores, or None.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    width: int
    value_width: int
    scale: float
    windowed: bool
    softcap: float | None


def kernel_for(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
) -> Kernel | None:
    """The kernel for a layer with these queries, keys and values; None = part by part, as always on a CPU."""
    if q.device.type not in DEVICES:
        return None
    sizes = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
    return choose(Case(q.device, q.dtype, *sizes, scale=scale, windowed=window is not None, softcap=softcap))


@cache
def choose(case: Case) -> Kernel | None:
    """The kernel if it serves, or None."""
    problem = obstacle(KERNEL, case)
    if problem:
        logger.warning("%s part by part, which is slower; not by flex_attention: %s", _described(case), problem)
        return None
    logger.info("%s by flex_attention", _described(case))
    return KERNEL


def obstacle(kernel: Kernel, case: Case) -> str:
    """Why a kernel does not serve, or ""."""
    layout = TreeLayout.of(PROBE, case.device, past=_PAST)
    rule = {"scale": case.scale, "window": _WINDOW if case.windowed else None, "softcap": case.softcap}
    *rows, grad = draw(case)
    try:
        # nobody who keeps count of what autograd saves, as checkpointing does, is to see these
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            found = _by_kernel(kernel, layout, rows, grad, rule)
    except Exception as error:  # whatever a compiler does on a device that it does not know
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    own = _by_parts(layout, rows, grad, rule)
    truth = _by_parts(layout, [x.double() for x in rows], grad.double(), rule)
    names = ("output", *(f"gradient of the {x}" for x in ("queries", "keys", "values", "past's keys", "past's values")))
    problems = map(unexplained, names, found, own, truth)
    return next(filter(None, problems), "")


def unexplained(name: str, found: Tensor, own: Tensor, truth: Tensor) -> str:
    """Why rounding alone cannot make `found` `[M, H, D]` of the `truth`, or ""; `own`: what the parts made of it."""
    unit = torch.finfo(found.dtype).eps
    size, error, explained = (x.double().flatten(1).norm(dim=1) for x in (truth, found - truth, own - truth))
    measures = (error.mean(), explained.mean(), size.mean()), (error.max(), explained.max(), size.max())
    for (value, theirs, whole), times, units in zip(measures, _TIMES_PARTS, _UNITS, strict=True):
        limit = times * theirs + units * unit * whole
        if not value <= limit:  # True for NaN
            return (
                f"its {name} differs by {float(value / whole):.2g}, where rounding explains {float(limit / whole):.2g}"
            )
    return ""


def draw(case: Case) -> list[Tensor]:
    """Queries, keys, values, the past's two, and a gradient of the output, such that a soft cap bends the scores."""
    tokens, wide, narrow = PROBE[-1].stop, case.width, case.value_width
    spread = (max(2.0, (case.softcap or 0) / 4) / (case.scale * wide**0.5)) ** 0.5
    sizes = (
        ((tokens, case.heads, wide), spread),
        ((tokens, case.kv_heads, wide), spread),
        ((tokens, case.kv_heads, narrow), 1.0),
        ((_PAST, case.kv_heads, wide), spread),
        ((_PAST, case.kv_heads, narrow), 1.0),
        ((tokens, case.heads, narrow), 1.0),
    )
    generator = torch.Generator().manual_seed(0)  # its own: the run's draws do not depend on where it runs
    return [(torch.randn(size, generator=generator) * factor).to(case.device, case.dtype) for size, factor in sizes]


def _by_kernel(
    kernel: Kernel, layout: TreeLayout, rows: Sequence[Tensor], grad: Tensor, rule: dict[str, Any]
) -> tuple[Tensor, ...]:
    q, k, v, *above = rows
    past = above[0], above[1]
    with torch.no_grad():
        out = kernel.attend(layout, q, k, v, past, **rule)
    return out, *kernel.differentiate(layout, grad, q, k, v, past, **rule)


def _by_parts(layout: TreeLayout, rows: Sequence[Tensor], grad: Tensor, rule: dict[str, Any]) -> tuple[Tensor, ...]:
    q, k, v, *above = rows
    past = above[0], above[1]
    with torch.no_grad():
        out, lse = tree_parts.forward(layout, q, k, v, past, **rule)
        *grads, grad_past = tree_parts.backward(layout, grad, q, k, v, past, out, lse, **rule)
    assert grad_past is not None
    return out, *grads, *grad_past


def _described(case: Case) -> str:
    kind = f"{case.heads} heads of {case.width}, {str(case.dtype).removeprefix('torch.')}"
    kind += f", window{'s' if case.windowed else ''}" if case.windowed else ""
    return f"attention of packs on {case.device} ({kind})"
