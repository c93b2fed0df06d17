"""Hidden states -> log-probabilities, entropies and exact KL divergences, in chunks: `[S, V]` is never stored whole.

Logits are the largest tensor of a training step: 10,000 tokens x 150,000 ids x 4 bytes are 6 GB, and autograd would
keep several. Here a chunk of rows exists at a time, and the backward is written by hand.

Let `l = scale (h W' + b)`, `a = cap tanh(l / cap)` (or `a = l`), `z = a / T`, and `p = softmax(z)`. For each
row, every output o is a scalar function of z, with `r = do/dz`:

    log-probability of y   log p_y                       r = 1[y] - p
    entropy                H = -sum p log p              r = -p (log p + H)
    a divergence           see `covey.pytorch.divergences`

so `do/dh = (scale / T) (r f) W` with `f = 1 - (a / cap)^2` (1 without a cap): a vector that does not depend
on the gradient from above. With a frozen head it is computed in the forward, while the chunk is there, and
the backward is one multiplication by the gradient g of o (`_Score.backward`); logits are computed once. With a
trainable head the backward (`_Score._backward_with_head`) recomputes each chunk and adds `dW = (scale / T) (g r f)' h`
and `db = (scale / T) sum g r f`. Each r f is a `_Chunk.gradient`.

With a `Support` the softmax runs over the kept ids of each token only (others get z = -1e30, probability 0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from covey.algorithms.kl import Distillation
from covey.pytorch.divergences import compare
from covey.pytorch.models.form import Head, wide
from covey.pytorch.models.narrow import if_packed
from covey.pytorch.products import is_narrow, product_into
from covey.pytorch.rounding import wide_dtype
from covey.types import Support

_EXCLUDED = -1e30  # finite: 0 * -inf would be NaN
CHUNK_BYTES = 256 << 20
"""Of a chunk's float32 logits on CUDA; there are two such buffers."""
_CHUNK_BYTES = {"cpu": 32 << 20, "cuda": CHUNK_BYTES, "meta": CHUNK_BYTES}


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceDistribution:
    """What a divergence over the vocabulary compares with: a reference, or a teacher, which may have fewer ids."""

    hidden: Tensor  # [S, d] of the reference at the same tokens, without gradient; in any memory
    logits: Callable[[Tensor], Tensor] | None  # hidden states [c, d] -> logits [c, W], before temperature
    how: Distillation


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """What is known about S sampled tokens, in the order of the pack.

    Attributes:
        logp: `[S]` log-probability of each token, float32, differentiable.
        entropy: `[S]` entropy of the distribution that it was drawn from, or None where it was not asked for.
        exact_kl: `[S]` divergence from the reference, differentiable, or None where it was not asked for.
        mass: `[S]` the probability that it is compared over has under the reference, likewise.
        hidden: `[S, d]` the hidden states, where they were asked for.
    """

    logp: Tensor
    entropy: Tensor | None = None
    exact_kl: Tensor | None = None
    mass: Tensor | None = None
    hidden: Tensor | None = None

    def known(self) -> list[Tensor]:
        """Those that were asked for."""
        every = (self.logp, self.entropy, self.exact_kl, self.mass, self.hidden)
        return [value for value in every if value is not None]


def score_tokens(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_grad: bool = False,
    support: Support | None = None,
    reference: ReferenceDistribution | None = None,
    chunk_rows: int | None = None,
) -> TokenScores:
    """Score S sampled tokens under the sampling distribution.

    Args:
        hidden: `[S, d]` the hidden states that predict the targets.
        targets: `[S]` sampled ids.
        head: the model's output head.
        temperature: divides the logits; 0 means greedy sampling, whose log-probabilities are those at 1.
        entropy: return entropies.
        entropy_grad: make them differentiable (one more matrix product with the vocabulary).
        support: kept ids of each target; the distribution is renormalised over them.
        reference: return the exact divergence from this distribution.
        chunk_rows: rows at a time; None = as many as fit the memory set aside for a chunk.

    Returns:
        Float32 scores (float64 for float64 inputs); gradients flow to `hidden`, and to the head where it is
        trainable.
    """
    temperature = temperature or 1.0
    vocab_size = len(head.weight) if head.weight is not None else _width_of(head, hidden)
    buffers = 1 if reference is None else 2
    rows = chunk_rows or max(1, _CHUNK_BYTES.get(hidden.device.type, 64 << 20) // (4 * vocab_size * buffers))
    kept = _DeviceSupport.of(support, targets)
    job = _Job(targets, head, temperature, entropy, entropy_grad, kept, reference, rows, vocab_size)
    if head.weight is None:
        logp, ent, kl, mass = _score_by_module(hidden, job)
    else:
        logp, ent, kl, mass = cast(Any, _Score).apply(hidden, head.weight, head.bias, job, torch.is_grad_enabled())
    compared = (None, None) if reference is None else (kl, mass)
    return TokenScores(logp, ent if entropy else None, *compared)


@dataclass(frozen=True, slots=True, eq=False)
class _DeviceSupport:
    """A `Support` on the device, with the row of each id."""

    ids: Tensor  # [K]
    row: Tensor  # [K]
    offsets: list[int]

    @classmethod
    def of(cls, support: Support | None, targets: Tensor) -> _DeviceSupport | None:
        if support is None:
            return None
        if len(support.offsets) != len(targets) + 1:
            raise ValueError(f"a support of {len(support.offsets) - 1} tokens was given for {len(targets)} targets")
        counts = torch.from_numpy(support.offsets).diff()
        row = torch.repeat_interleave(torch.arange(len(counts)), counts)
        device = targets.device
        return cls(torch.from_numpy(support.ids).to(device), row.to(device), support.offsets.tolist())

    def exclude(self, z: Tensor, start: int, targets: Tensor) -> Tensor:
        """Fill the ids of rows `start...` that were not kept; the target itself always counts as kept."""
        part = slice(self.offsets[start], self.offsets[start + len(z)])
        excluded = torch.ones_like(z, dtype=torch.bool)
        excluded[self.row[part] - start, self.ids[part]] = False
        excluded.scatter_(1, targets[:, None], False)
        return z.masked_fill_(excluded, _EXCLUDED)


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    targets: Tensor
    head: Head
    temperature: float
    entropy: bool
    entropy_grad: bool
    kept: _DeviceSupport | None
    reference: ReferenceDistribution | None
    rows: int
    width: int  # ids of the policy

    def chunks(self) -> Iterator[tuple[int, int]]:
        for start in range(0, len(self.targets), self.rows):
            yield start, min(start + self.rows, len(self.targets))

    def buffers(self, hidden: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Two `[rows, V]`, used again and again: on a CPU fresh pages can cost as much as computing on them."""
        one = hidden.new_empty(min(self.rows, len(hidden)), width, dtype=wide_dtype(hidden.dtype))
        return one, torch.empty_like(one)

    def reference_logq(self, start: int, stop: int) -> Tensor | None:
        """`[c, V]` log-probabilities of the reference under the same temperature and support."""
        if self.reference is None or self.reference.logits is None:
            return None
        with torch.no_grad():
            held = self.reference.hidden[start:stop].to(self.targets.device)
            z = self.reference.logits(held) / self.temperature
            width = z.shape[1]
            if self.kept is not None:
                z = functional.pad(z, (0, max(self.width - width, 0)))  # the kept ids are the policy's
                z = self.kept.exclude(z, start, self.targets[start:stop])[:, :width]
            return torch.log_softmax(z, dim=-1)


@dataclass(slots=True, eq=False)
class _Chunk:
    """One chunk of rows: `logp_v` and `p` are `[c, V]`, the rest `[c]`; what nothing asks for is None."""

    targets: Tensor
    logp_v: Tensor
    logp: Tensor
    slope: Tensor | None  # f, [c, V]; None = 1
    p: Any = None
    entropy: Any = None
    kl: Any = None
    pull: Any = None  # r of the divergence, [c, V]
    mass: Any = None

    def gradient(self, name: str) -> Tensor:
        """`f r` of an output, but the negative of the log-probability's, which destroys p; the entropy's destroys
        logp_v.
        """
        if name == "kl":
            r: Tensor = self.pull
        elif name == "entropy":
            r = self.logp_v.add_(self.entropy[:, None]).mul_(self.p).neg_()
        else:  # p - 1[y]
            r = self.p.scatter_add_(1, self.targets[:, None], self.p.new_full((len(self.targets), 1), -1.0))
        return r if self.slope is None else r.mul_(self.slope)


def _compute(
    h: Tensor, weight: Tensor, bias: Tensor | None, job: _Job, start: int, buffers: tuple[Tensor, Tensor], need_p: bool
) -> _Chunk:
    """Logits, softmax and scalar outputs of the rows `start...start + len(h)`."""
    head, targets = job.head, job.targets[start : start + len(h)]
    z = buffers[0][: len(h)]
    inner = head.scale / (job.temperature if head.softcap is None else head.softcap)
    _product_into(z, h, weight, inner)
    if bias is not None:
        z.add_(bias, alpha=inner)
    slope = None
    if head.softcap is not None:
        z.tanh_()
        slope = z.square().neg_().add_(1.0) if need_p else None
        z.mul_(head.softcap / job.temperature)
    if job.kept is not None:
        job.kept.exclude(z, start, targets)
    logp_v = torch.log_softmax(z, dim=-1, out=buffers[1][: len(h)])
    chunk = _Chunk(targets, logp_v, logp_v.gather(1, targets[:, None])[:, 0].clone(), slope)
    if need_p or job.entropy:
        chunk.p = torch.exp(logp_v, out=z)
    if job.entropy:
        chunk.entropy = -_row_dot(chunk.p, logp_v)
    logq = job.reference_logq(start, start + len(h))
    if logq is not None and job.reference is not None:
        chunk.kl, chunk.pull, chunk.mass = compare(logp_v, logq, job.reference.how)
    return chunk


class _Score(torch.autograd.Function):
    """See the module docstring. Outputs `logp, entropy, kl, mass` `[S]`, empty where not asked for."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: _Job, grad_enabled: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        train_head = grad_enabled and (weight.requires_grad or (bias is not None and bias.requires_grad))
        direct = grad_enabled and hidden.requires_grad and not train_head
        logp = torch.empty(len(hidden), dtype=wide_dtype(hidden.dtype), device=hidden.device)
        entropy = torch.empty_like(logp) if job.entropy else logp.new_empty(0)
        kl = torch.empty_like(logp) if job.reference is not None else logp.new_empty(0)
        mass = torch.empty_like(kl)
        factor = job.head.scale / job.temperature
        asked = {"logp": True, "entropy": job.entropy and job.entropy_grad, "kl": job.reference is not None}
        wanted = [name for name, is_asked in asked.items() if is_asked]
        # in the hidden state's own precision: they are gradients of it
        vectors = {name: torch.empty_like(hidden) for name in wanted} if direct else {}
        operand, wide_bias = _operand(weight, hidden), None if bias is None else wide(bias.detach())
        buffers = job.buffers(hidden, len(weight))
        for start, stop in job.chunks():
            chunk = _compute(hidden[start:stop], operand, wide_bias, job, start, buffers, direct)
            logp[start:stop] = chunk.logp
            if chunk.entropy is not None:
                entropy[start:stop] = chunk.entropy
            if chunk.kl is not None:
                kl[start:stop], mass[start:stop] = chunk.kl, chunk.mass
            for name in reversed(vectors):  # the entropy's destroys logp_v, which the divergence's reads; logp's p
                sign = -1 if name == "logp" else 1
                _product_rounded(vectors[name][start:stop], chunk.gradient(name), operand.T, sign * factor)
        ctx.job, ctx.wanted, ctx.direct, ctx.dtype = job, wanted, direct, hidden.dtype
        if direct:
            ctx.save_for_backward(*(vectors[name] for name in wanted))
        elif train_head:
            ctx.save_for_backward(hidden, weight, *(() if bias is None else (bias,)))
        ctx.mark_non_differentiable(  # one call: a second one would undo the first
            mass, *(value for name, value in (("entropy", entropy), ("kl", kl)) if not asked[name])
        )
        return logp, entropy, kl, mass

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logp: Tensor, grad_entropy: Tensor, grad_kl: Tensor, _: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        grads = {"logp": grad_logp, "entropy": grad_entropy, "kl": grad_kl}
        if ctx.direct:
            total: Tensor | None = None
            for name, vector in zip(ctx.wanted, ctx.saved_tensors, strict=True):
                part = vector * grads[name][:, None].to(vector.dtype)
                total = part if total is None else total.add_(part)
            return total, None, None, None, None
        return *_Score._backward_with_head(ctx, grads), None, None

    @staticmethod
    def _backward_with_head(ctx: Any, grads: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        hidden, weight, bias = (*ctx.saved_tensors, None)[:3]
        job: _Job = ctx.job
        factor = job.head.scale / job.temperature
        dtype = wide_dtype(hidden.dtype)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden, dtype=dtype) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if need_weight else None
        d_bias = torch.zeros_like(bias, dtype=dtype) if need_bias and bias is not None else None
        operand, wide_bias = _operand(weight, hidden), None if bias is None else wide(bias)
        buffers = job.buffers(hidden, len(weight))
        for start, stop in job.chunks():
            h = hidden[start:stop]
            chunk = _compute(h, operand, wide_bias, job, start, buffers, True)
            *rest, r = (chunk.gradient(name).mul_(grads[name][start:stop, None]) for name in reversed(ctx.wanted))
            r.neg_()
            if rest:
                r.add_(rest[0] if len(rest) == 1 else rest[0].add_(rest[1]))
            if d_hidden is not None:
                _product_into(d_hidden[start:stop], r, operand.T, factor)
            if d_weight is not None:
                d_weight.addmm_(r.T, h.to(dtype), alpha=factor)
            if d_bias is not None:
                d_bias.add_(r.sum(0), alpha=factor)
        return (
            None if d_hidden is None else d_hidden.to(hidden.dtype),
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None or bias is None else d_bias.to(bias.dtype),
        )


def _score_by_module(hidden: Tensor, job: _Job) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same by plain autograd, chunks recomputed in the backward: for heads that can only be called."""

    def chunk_scores(h: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        targets = job.targets[start : start + len(h)]
        z = job.head.logits(h) / job.temperature
        if job.kept is not None:
            z = job.kept.exclude(z.clone(), start, targets)
        logp_v = torch.log_softmax(z, dim=-1)
        logp = logp_v.gather(1, targets[:, None])[:, 0]
        empty = logp.new_empty(0)
        with torch.set_grad_enabled(torch.is_grad_enabled() and job.entropy_grad):
            entropy = -_row_dot(logp_v.exp(), logp_v) if job.entropy else empty
        logq = job.reference_logq(start, start + len(h))
        if logq is None or job.reference is None:
            return logp, entropy, empty, empty
        kl, _, mass = compare(logp_v, logq, job.reference.how)
        return logp, entropy, kl, mass

    parts = [checkpoint(chunk_scores, hidden[start:stop], start, use_reentrant=False) for start, stop in job.chunks()]
    if not parts:  # still of the graph: the backward of what others attend to begins here
        empty = hidden.sum(-1).to(wide_dtype(hidden.dtype))
        return empty, empty.detach(), empty.detach(), empty.detach()
    logp, entropy, kl, mass = (torch.cat(column) for column in zip(*parts, strict=True))
    return logp, entropy, kl, mass


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """`sum_v a b` of each row, without an `[S, V]` product. (`bmm` takes five times as long on CPU.)"""
    return torch.cat([(x * y).sum(1) for x, y in zip(torch.split(a, 16), torch.split(b, 16), strict=True)])


def _operand(weight: Tensor, hidden: Tensor) -> Tensor:
    """The head's weight as the products take it: narrow where a kernel returns float32 for it, and where it is meant to
    be narrower than the hidden states (`covey.pytorch.models.narrow`).
    """
    weight = weight.detach()
    return weight if weight.is_cuda or weight.is_meta or weight.dtype != hidden.dtype else wide(weight)


def _product_into(out: Tensor, rows: Tensor, weight: Tensor, factor: float) -> None:
    """`out = factor * rows @ weight.T`, accumulated in out's precision; rows `[c, k]`, weight `[n, k]`."""
    narrow = is_narrow(rows, weight)  # then the logits themselves are rounded, as the sampler's are
    if narrow and (held := if_packed(weight)) is not None:
        held.multiply(rows, out=out).mul_(factor)
    elif narrow or rows.dtype == weight.dtype == out.dtype:
        first = factor != 1.0 and rows.shape[1] <= out.shape[1] and not narrow
        product_into(out, rows * factor if first else rows, weight.T)
        if factor != 1.0 and not first:
            out.mul_(factor)
    elif weight.dtype == out.dtype:
        torch.mm(rows.to(out.dtype) * factor, weight.T, out=out)
    else:
        torch.mm(rows.to(weight.dtype), weight.T, out_dtype=out.dtype, out=out)
        if factor != 1.0:
            out.mul_(factor)


def _product_rounded(out: Tensor, rows: Tensor, weight: Tensor, factor: float) -> None:
    """The same where `out` may be narrower than the numbers that are multiplied: rounded once, at the end."""
    if out.dtype == rows.dtype:
        return _product_into(out, rows, weight, factor)
    wide = out.new_empty(out.shape, dtype=rows.dtype)
    _product_into(wide, rows, weight, factor)
    out.copy_(wide)


def _width_of(head: Head, hidden: Tensor) -> int:
    with torch.no_grad():
        return head.logits(hidden[:1]).shape[-1] if len(hidden) else 1
