"""From logits to tokens: temperature -> top_k -> top_p -> min_p -> inverse CDF, in transformers' order.

A token is drawn by inverting the cumulative distribution of its row at one given number u, so the draw
depends on the row and u alone. The CDF is taken in two levels: float32 sums of blocks of 256 probabilities,
their running sum in float64, then a float64 running sum inside the chosen block. No float64 `[B, V]` array
exists, nothing is sorted, and probabilities are resolved to float32's relative error (about 1e-7 of each
block), which is that of the softmax itself. A token of probability 0 cannot be drawn: the first position
whose running sum *exceeds* the target never has an empty step.

top_p takes growing top-k candidate sets (64, 512, 4096, ...), for the rows that need them, until the mass is
covered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from covey.errors import GenerationError
from covey.rollout.drawing import uniforms
from covey.rollout.turns import Row
from covey.types import IntArray, SamplingSettings

_BLOCK = 256
_FIRST_CANDIDATES = 64
_GROWTH = 8


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One token for each of B rows."""

    token_ids: IntArray  # [B]
    logprobs: NDArray[np.float32]  # [B] under the sampling distribution; NaN where the logits were not finite
    support: list[IntArray] | None  # each row's kept ids, ascending; None where not kept, or nothing was cut off


def sample(logits: Tensor, settings: SamplingSettings, u: NDArray[np.float64]) -> Draw:
    """Draw one token for each row of `logits` `[B, V]`, which may be overwritten, at the numbers `u` `[B]` in [0, 1).
    With `keep_support` the log-probability is renormalised over the kept ids. Greedy (`temperature=0`) takes the most
    likely token of the distribution at temperature 1 and ignores `u`.
    """
    greedy = settings.temperature == 0
    scaled = logits.float()
    if not greedy and settings.temperature != 1:
        scaled = scaled.div_(settings.temperature)
    best = scaled.argmax(-1) if greedy else None
    # in place and without the softmax's division: fresh memory for [B, V] costs more than the arithmetic
    mass = scaled.sub_(scaled.amax(-1, keepdim=True)).exp_()
    vocab = mass.shape[1]
    top_k = settings.top_k if 0 < settings.top_k < vocab else 0
    cuts = bool(top_k or settings.top_p < 1 or settings.min_p > 0)
    targets = torch.from_numpy(u).to(mass.device)
    if best is not None and not (cuts and settings.keep_support):
        return _draw(best, mass.gather(1, best[:, None])[:, 0] / _total(mass), None)
    if not cuts:
        tokens, total = _invert(mass, targets)
        return _draw(tokens, mass.gather(1, tokens[:, None])[:, 0] / total, None)
    total = _total(mass)
    if top_k or settings.top_p < 1:
        mass, ids = _candidates(mass, total, top_k, settings.top_p)
        if settings.min_p > 0:
            mass = mass.masked_fill(mass < settings.min_p * mass[:, :1], 0)
    else:
        mass, ids = mass.masked_fill_(mass < settings.min_p, 0), None  # the most likely token has mass 1
    choice, kept = _invert(mass, targets)
    if best is not None:
        choice = mass.argmax(-1)
    chosen = mass.gather(1, choice[:, None])[:, 0]
    tokens = choice if ids is None else ids.gather(1, choice[:, None])[:, 0]
    if not settings.keep_support:
        return _draw(tokens, chosen / total, None)
    return _draw(tokens, chosen / kept, _support(mass, ids))


def _draw(tokens: Tensor, probability: Tensor, support: list[IntArray] | None) -> Draw:
    # float64 holds both exactly: one transfer, hence one wait for the device, instead of two
    host = torch.stack([tokens.double(), probability.log()]).cpu().numpy()
    return Draw(host[0].astype(np.int64), host[1].astype(np.float32), support)


def _candidates(mass: Tensor, total: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """What top_k, then top_p keep: masses `[B, K]`, descending, 0 where cut off, and their ids `[B, K]`."""
    if top_k:
        values, ids = mass.topk(top_k)
    else:
        values, ids = _covering(mass, top_p * total)
    if top_p < 1:
        running = values.cumsum(-1, dtype=torch.float64)
        goal = top_p * (running[:, -1] if top_k else total)
        # keep a token while the mass *before* it is below the goal: the smallest set that reaches it
        before = torch.cat([torch.zeros_like(running[:, :1]), running[:, :-1]], dim=-1)
        values = values.masked_fill(before >= goal[:, None], 0)
    return values, ids


def _covering(mass: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely ids of each row, as many as it takes for every row to reach its `goal` `[B]`."""
    vocab = mass.shape[1]
    width = min(_FIRST_CANDIDATES, vocab)
    values, ids = mass.topk(width)
    while width < vocab:
        short = (values.sum(-1, dtype=torch.float64) < goal).nonzero()[:, 0]
        if len(short) == 0:
            break
        wider = min(width * _GROWTH, vocab)
        values, ids = (functional.pad(held, (0, wider - width)) for held in (values, ids))
        values[short], ids[short] = mass[short].topk(wider)
        width = wider
    return values, ids


def _total(mass: Tensor) -> Tensor:
    """`[B]` float64 row sums."""
    return _block_sums(mass).sum(-1, dtype=torch.float64)


def _block_sums(mass: Tensor) -> Tensor:
    """`[B, V / 256]`, rounded up: float32 sums of consecutive masses."""
    rows, width = mass.shape
    whole = width // _BLOCK * _BLOCK
    sums = mass[:, :whole].view(rows, width // _BLOCK, _BLOCK).sum(-1)
    return sums if whole == width else torch.cat([sums, mass[:, whole:].sum(-1, keepdim=True)], dim=-1)


def _invert(mass: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse CDF of each row of `mass` `[B, V]` at `u` `[B]`: positions `[B]`, row totals `[B]`."""
    width = mass.shape[1]
    running = _block_sums(mass).cumsum(-1, dtype=torch.float64)
    total = running[:, -1]
    target = u * total
    block = _first_above(running, target)
    before = torch.where(block > 0, running.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = block * _BLOCK + torch.arange(_BLOCK, device=mass.device)
    values = mass.gather(1, inside.clamp(max=width - 1)).masked_fill(inside >= width, 0)
    offset = _first_above(values.cumsum(-1, dtype=torch.float64), target - before[:, 0])
    return (block * _BLOCK + offset)[:, 0].clamp_(max=width - 1), total  # beyond it only where masses are no numbers


def _first_above(running: Tensor, target: Tensor) -> Tensor:
    """`[B, 1]` first position whose running sum exceeds the target; the last step up if none does."""
    position = torch.searchsorted(running, target[:, None].contiguous(), right=True)
    last = torch.searchsorted(running, running[:, -1:].contiguous())
    return torch.minimum(position, last).clamp_(max=running.shape[1] - 1)


def _support(mass: Tensor, ids: Tensor | None) -> list[IntArray]:
    kept = mass > 0
    flat = kept.nonzero()[:, 1] if ids is None else ids[kept]
    ends = np.cumsum(kept.sum(-1).cpu().numpy())
    return [np.sort(row) for row in np.split(flat.cpu().numpy(), ends[:-1])]


def draw_tokens(rows: Sequence[Row], logits: Tensor) -> Draw:
    """Draw from `logits` `[B, V]`, which may be overwritten; rows of equal settings are drawn together, and what is
    forced is said. A row whose choices leave no token has its `error` set, and what is drawn for it means nothing; one
    whose logits are not finite gets a log-probability that is not.
    """
    allowed = [_allowed(row, logits.shape[1]) for row in rows]
    logits = _only(logits, allowed)
    keys = np.array([row.key for row in rows], dtype=np.uint64)
    numbers = uniforms(keys, np.array([row.sampled for row in rows], dtype=np.uint64))
    alike: dict[SamplingSettings, list[int]] = {}
    forced = [place for place, row in enumerate(rows) if row.forced is not None]
    for place, row in enumerate(rows):
        if row.forced is None:
            alike.setdefault(row.settings, []).append(place)
    parts = [(forced, _said([rows[place] for place in forced], logits[forced]))] if forced else []
    if len(alike) == 1 and not forced:
        parts = [(list(range(len(rows))), sample(logits, rows[0].settings, numbers))]
    else:
        parts += [(places, sample(logits[places], s, numbers[places])) for s, places in alike.items()]
    return _joined(parts, allowed, logits.shape[1])


def _said(rows: Sequence[Row], logits: Tensor) -> Draw:
    """The forced tokens, with their log-probabilities at temperature 1."""
    tokens = torch.tensor([int(row.forced[row.sampled]) for row in rows if row.forced is not None])
    logp = logits.float().log_softmax(-1).gather(1, tokens.to(logits.device)[:, None])[:, 0]
    return Draw(tokens.numpy(), logp.cpu().numpy(), None)


def _allowed(row: Row, vocab: int) -> IntArray | None:
    """Ids that may come next; None = any, also for a row that has gone wrong."""
    try:
        ids = row.allowed()
    except GenerationError as error:
        row.error, ids = error, None
    if ids is not None and (len(ids) == 0 or ids[0] < 0 or ids[-1] >= vocab):
        row.error = GenerationError(
            f"completion token {row.sampled}: the choices allow {ids[:5].tolist()} there; each choice must be one or "
            f"more token ids from 0 to {vocab - 1}"
        )
        return None
    return ids


def _joined(parts: Sequence[tuple[list[int], Draw]], allowed: Sequence[IntArray | None], vocab: int) -> Draw:
    token_ids, logprobs = np.zeros(len(allowed), dtype=np.int64), np.zeros(len(allowed), dtype=np.float32)
    support: list[IntArray] | None = None
    if any(draw.support is not None for _, draw in parts) or any(ids is not None for ids in allowed):
        everything = np.arange(vocab)
        support = [everything if ids is None else ids for ids in allowed]
    for places, draw in parts:
        token_ids[places], logprobs[places] = draw.token_ids, draw.logprobs
        if support is not None and draw.support is not None:
            for place, ids in zip(places, draw.support, strict=True):
                support[place] = ids
    return Draw(token_ids, logprobs, support)


def _only(logits: Tensor, allowed: Sequence[IntArray | None]) -> Tensor:
    """The logits with those of forbidden ids at minus infinity."""
    if all(ids is None for ids in allowed):
        return logits
    logits = logits.clone()
    for row, ids in enumerate(allowed):
        if ids is not None:
            index = torch.from_numpy(ids).to(logits.device)
            kept = logits[row, index]
            logits[row] = -torch.inf
            logits[row, index] = kept
    return logits
