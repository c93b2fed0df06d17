"""One token for each row of the decode batch, each drawn as its own request says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from covey.errors import GenerationError
from covey.pytorch.engine.sampling import Draw, sample
from covey.rollout.streams import uniforms
from covey.rollout.turns import Row
from covey.types import IntArray, SamplingSettings


def draw_tokens(rows: Sequence[Row], logits: Tensor) -> Draw:
    """Draw from `logits` `[B, V]`, which may be overwritten; rows of equal settings are drawn together.

    A row whose choices leave no token of the vocabulary has its `error` set, and what is drawn for it means nothing; a
    row whose logits are not finite gets a log-probability that is not.
    """
    allowed = [_allowed(row, logits.shape[1]) for row in rows]
    logits = _only(logits, allowed)
    keys = np.array([row.key for row in rows], dtype=np.uint64)
    drawn = np.array([row.sampled for row in rows], dtype=np.uint64)
    numbers = uniforms(keys, drawn)
    alike: dict[SamplingSettings, list[int]] = {}
    for place, row in enumerate(rows):
        alike.setdefault(row.settings, []).append(place)
    if len(alike) == 1:
        parts = [(list(range(len(rows))), sample(logits, rows[0].settings, numbers))]
    else:
        parts = [(places, sample(logits[places], s, numbers[places])) for s, places in alike.items()]
    return _joined(parts, allowed, logits.shape[1])


def _allowed(row: Row, vocab: int) -> IntArray | None:
    """Ids that may come next; None = any, also for a row that has gone wrong."""
    ids = row.allowed()
    if ids is not None and (len(ids) == 0 or ids[0] < 0 or ids[-1] >= vocab):
        row.error = GenerationError(
            f"completion token {row.sampled}: the choices allow {ids[:5].tolist()} there; each choice must be one or "
            f"more token ids from 0 to {vocab - 1}"
        )
        return None
    return ids


def _joined(parts: Sequence[tuple[list[int], Draw]], allowed: Sequence[IntArray | None], vocab: int) -> Draw:
    token_ids = np.zeros(len(allowed), dtype=np.int64)
    logprobs = np.zeros(len(allowed), dtype=np.float32)
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
