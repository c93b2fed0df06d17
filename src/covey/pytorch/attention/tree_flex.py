"""Attention of a pack as one call of PyTorch's `flex_attention`: nothing is repeated, and no mask is written out.

**The mask.** Token k is seen by the queries `k <= q < leave[k]` (`covey.rollout.packing`): one test whether k is an
ancestor of q, whatever the tree. A token of the past, of which the branches that leave the path last come first, is
seen by the first so many queries, so it is the same test with 0 in the place of k. A sliding window is a second
comparison, with what is 0 where there is none: the position from which on a query sees. So

    first[k] <= q < leave[k]   and   since[q] <= position[k]

is the mask of every pack, and what differs from pack to pack are four lists. Queries and keys are filled up to whole
blocks, the past by keys that nobody sees, the pack by trees of one token each, so that no query sees nothing.

A block of keys is *full* for a block of queries if each of them sees each of it, which the largest `first` and `since`
and the smallest `leave` and `position` decide. It is *partial* if some query sees some key. Let `a` be the first query
of a block, and k a key before `a` that one of the block sees: then `first[k] <= a < leave[k]`, so k is an ancestor of
`a`, and the queries of the block that see k but for the window are `a` up to `leave[k]`. Among these, the lowest
`since` decides. That takes the time and memory of the list of keys, for each block of queries; never those of the mask.

**Compiled once** for all packs of a model: the lists' lengths, and the number of tokens, are symbols in the compiled
code. That holds because of how they are given:

    tokens are filled up to whole blocks, at least two of queries, and to more keys than queries
                    no length is 1 or equal to another, which the compiler would take for a rule; indices stay inside
                    of the lists; and kernels for few queries, or for half a block, are never chosen
    mask and soft cap are made inside of the compiled function
                    functions that are passed in would be compiled anew for each pack
    the scale and the soft cap are constants of the compiled function
                    so that they are in the kernel, not read by it

Compiled code that does not serve any more raises at the limit of compilations: without `fullgraph` PyTorch would from
there on write out all scores, silently.

**Probed** on an accelerator before it is used, with the device, precision, heads, scale, soft cap and kind of window
that will run. It serves where on a small pack with a past its output and its gradients are those of the parts in
float64, up to what rounding explains: on average over the tokens three times the error that the parts have in the
model's precision, and eight times at the worst token, plus some units of rounding. Where it does not, the console says
so and why, and attention goes part by part (`tree_parts`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from covey.pytorch.attention import tree_parts
from covey.pytorch.attention.tree_layout import Past, Rule, TreeLayout
from covey.rollout.packing import Branch, leave_of, positions_of

logger = logging.getLogger("covey.pytorch")

Flags = NDArray[np.bool_]
Places = NDArray[np.int32]


def sees(query: Any, since: Any, first: Any, leave: Any, position: Any) -> Any:
    """Whether queries see keys, of arrays or tensors that broadcast; see the module docstring."""
    return (first <= query) & (query < leave) & (since <= position)


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """The mask of L queries and S keys: the past, and after it the pack, each filled up to whole blocks."""

    block: int  # tokens of one
    first: Places  # [S]
    leave: Places  # [S]
    position: Places  # [S]
    since: Places  # [L]

    @classmethod
    def of(cls, branches: Sequence[Branch], past: int, window: int | None, block: int) -> Mask:
        """The mask of a pack after `past` tokens. There are at least two blocks of queries, and one more of keys.

        Raises:
            ValueError: of the branches without a parent, one leaves the past after one that comes before it.
        """
        roots = [branch for branch in branches if branch.parent < 0]
        at = np.array([branch.at for branch in roots])
        if (np.diff(at) > 0).any():
            raise ValueError(
                f"branches leave the past after {at.tolist()} tokens: those that leave it last come first in a pack"
            )
        length = branches[-1].stop
        before, behind = _filled(past, block, 1) - past, _filled(length, block, 2) - length
        starts = np.array([*(root.start for root in roots), length])
        seen_by = starts[np.searchsorted(-at, -np.arange(past))]  # the first of those that leave no later
        padding, own = np.arange(length, length + behind), np.arange(length)
        positions = positions_of(branches)
        nobody, none = np.zeros(before, np.int64), np.zeros(behind, np.int64)
        since = np.zeros(length, np.int64) if window is None else positions - window + 1
        lists = (
            (np.zeros(past, np.int64), nobody, own, padding),
            (seen_by, nobody, leave_of(branches, length), padding + 1),
            (np.arange(past), nobody, positions, none),
            (since, none),
        )
        return cls(block, *(np.concatenate(parts).astype(np.int32) for parts in lists))

    def blocks(self) -> tuple[Flags, Flags]:
        """`[L / block, S / block]` which blocks are partial, and which are full."""
        some = np.stack([self._seen_by(start) for start in range(0, len(self.since), self.block)])
        begin = np.arange(0, len(self.since), self.block)[:, None]
        lists = (self.first, self.leave, self.position, self.since)
        first, leave, position, since = (x.reshape(-1, self.block) for x in lists)
        full: Flags = sees(begin, since.max(1)[:, None], first.max(1), leave.min(1) - self.block + 1, position.min(1))
        return some & ~full, full

    def _seen_by(self, start: int) -> Flags:
        """`[S / block]` of which blocks of keys the block of queries from `start` on sees any."""
        own = len(self.first) - len(self.since) + start  # where these queries are keys
        lowest = np.minimum.accumulate(self.since[start : start + self.block])
        first, leave, position = (x[:own] for x in (self.first, self.leave, self.position))
        last = np.clip(leave - start, 1, self.block) - 1
        found = np.zeros(len(self.first), np.bool_)
        found[:own] = sees(start, lowest[last], first, leave, position)
        found[own] = True  # a token sees itself
        return cast(Flags, found.reshape(-1, self.block).any(axis=1))


def _filled(tokens: int, block: int, least: int) -> int:
    return max(-(-tokens // block), least) * block


BLOCK = 128
"""Tokens of a block of queries and of keys: the least for which all of PyTorch's kernels have a size."""
BACKEND = "inductor"


def attend(layout: TreeLayout, q: Tensor, k: Tensor, v: Tensor, past: Past | None, rule: Rule) -> Tensor:
    """`[M, H, Dv]`, differentiable; arguments as `tree_parts.forward` has them."""
    lists = _lists(layout, rule.window)
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
    out: Tensor = _compiled(rule.scale, rule.softcap, BACKEND)(*rows, lists)
    return out[0].transpose(0, 1)[: len(q)]


def differentiate(
    layout: TreeLayout, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past | None, rule: Rule
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, and of the past's two if there is one. The forward is computed again: the public
    interface has a backward only for what autograd has kept.
    """
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v, *(past or ()))]
        q, k, v, *above = leaves
        out = attend(layout, q, k, v, (above[0], above[1]) if above else None, rule)
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
def _compiled(scale: float, softcap: Any, backend: Any) -> Callable[..., Tensor]:
    def bend(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Any:
        return softcap * torch.tanh(score / softcap)

    def run(q: Tensor, k: Tensor, v: Tensor, lists: Lists) -> Tensor:
        score_mod, grouped = None if softcap is None else bend, q.shape[1] != k.shape[1]
        how: dict[str, Any] = {"scale": scale, "enable_gqa": grouped, "kernel_options": {"BACKEND": "TRITON"}}
        out: Tensor = flex_attention(q, k, v, score_mod, lists.block_mask(), **how)
        return out

    # not dynamic but for what is marked: a second scale would become a symbol too, which the kernel does not take
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "isolate_recompiles": True, "backend": backend}
    compiled: Callable[..., Tensor] = torch.compile(run, **options)
    return compiled


def _lists(layout: TreeLayout, window: int | None) -> Lists:
    found: Lists | None = layout.plans.get(window)
    if found is None:
        found = Lists.of(Mask.of(layout.branches, layout.past, window, BLOCK), layout.positions.device)
        layout.plans[window] = found
    return found


class Kernel(NamedTuple):
    """What attends to a whole pack, with the arguments of `attend` and `differentiate`."""

    attend: Callable[..., Tensor]
    differentiate: Callable[..., tuple[Tensor, ...]]
    under_autograd: bool = False  # which then keeps what the backward of `attend` needs


FLEX = Kernel(attend, differentiate, under_autograd=True)
PROBE = (Branch(0, 300, -1, 150), Branch(300, 90, 0, 260), Branch(390, 70, 0, 140), Branch(460, 120, -1, 60))
"""Two branches that leave a past of 150 tokens, and two that leave the first of these: five blocks of 128 tokens, of
which some are seen in part, some wholly and some not at all by others."""
_PAST, _WINDOW = 150, 70
_TIMES_PARTS = (3.0, 8.0)
"""Largest error, as a multiple of the parts' own: on average, and at the worst token."""
_UNITS = (4.0, 16.0)
"""Units of rounding added to these limits: parts compute in float32 and round once, kernels round in between."""


class Case(NamedTuple):
    """What a kernel is to serve. Of the rule's window it matters whether there is one."""

    device: torch.device
    dtype: torch.dtype  # of queries, keys and values
    heads: int
    kv_heads: int
    width: int  # of a query's and a key's head
    value_width: int
    rule: Rule


def kernel_for(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Kernel | None:
    """The kernel for a layer with these queries, keys and values; None = part by part."""
    rule = rule._replace(window=None if rule.window is None else _WINDOW)
    return choose(Case(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], v.shape[2], rule))


@cache
def choose(case: Case) -> Kernel | None:
    """The kernel if it serves, or None."""
    problem = obstacle(FLEX, case)
    if problem:
        logger.warning("%s part by part, which is slower; not by flex_attention: %s", _described(case), problem)
        return None
    logger.info("%s by flex_attention", _described(case))
    return FLEX


def obstacle(kernel: Kernel, case: Case) -> str:
    """Why a kernel does not serve, or ""."""
    layout = TreeLayout.of(PROBE, case.device, past=_PAST)
    *rows, grad = draw(case)
    q, k, v, *past = rows
    try:
        # nobody who keeps count of what autograd saves, as checkpointing does, is to see these
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            with torch.no_grad():
                out = kernel.attend(layout, q, k, v, tuple(past), case.rule)
            found = out, *kernel.differentiate(layout, grad, q, k, v, tuple(past), case.rule)
    except Exception as error:  # whatever a compiler does on a device that it does not know
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    own = _by_parts(layout, rows, grad, case.rule)
    truth = _by_parts(layout, [x.double() for x in rows], grad.double(), case.rule)
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
    spread = (max(2.0, (case.rule.softcap or 0) / 4) / (case.rule.scale * wide**0.5)) ** 0.5
    heads, kv_heads = case.heads, case.kv_heads
    sizes = [(tokens, heads, wide), (tokens, kv_heads, wide), (tokens, kv_heads, narrow)]
    sizes += [(_PAST, kv_heads, wide), (_PAST, kv_heads, narrow), (tokens, heads, narrow)]
    factors = (spread, spread, 1.0, spread, 1.0, 1.0)
    generator = torch.Generator().manual_seed(0)  # its own: the run's draws do not depend on where it runs
    drawn = (torch.randn(size, generator=generator) * factor for size, factor in zip(sizes, factors, strict=True))
    return [x.to(case.device, case.dtype) for x in drawn]


@torch.no_grad()
def _by_parts(layout: TreeLayout, rows: Sequence[Tensor], grad: Tensor, rule: Rule) -> tuple[Tensor, ...]:
    q, k, v, *above = rows
    past = above[0], above[1]
    out, lse = tree_parts.forward(layout, q, k, v, past, rule)
    *grads, grad_past = tree_parts.backward(layout, grad, q, k, v, past, out, lse, rule)
    return out, *grads, *(grad_past or ())


def _described(case: Case) -> str:
    windows = "" if case.rule.window is None else ", windows"
    kind = f"{case.heads} heads of {case.width}, {str(case.dtype).removeprefix('torch.')}{windows}"
    return f"attention of packs on {case.device} ({kind})"
