"""The loss of some rows of a pack, from what is known of its distinct targets; and of a pack that is walked.

A tree that is larger than the budget is walked depth first, piece by piece. A row's tokens lie in the pieces of one
path. Its loss is known when the last of these has been run forward, and its gradient by each log-probability of the row
then waits, summed over rows, for the backward of the piece that has it:

    a piece         forward, keeping keys and values of a trunk
                    loss of the rows that end here; d(loss) by the log-probabilities of the whole path
                    each piece that follows, likewise
                    backward from d(loss) by this piece's log-probabilities and d(keys), d(values) of its followers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covey.algorithms import LossTerms, Objective, mismatch_correction, policy_loss
from covey.pytorch.logprobs import TokenScores
from covey.rollout.learning import FloatNT, PassOptions, entropy_weights, teacher_logprobs
from covey.rollout.packing import Pack
from covey.rollout.walking import Piece, walk
from covey.types import Batch, IntArray

Score = Callable[[Piece], TokenScores]
"""Runs a piece forward on the path that it keeps itself."""


@dataclass(frozen=True, slots=True, eq=False)
class StepLoss:
    """What the losses of a step's packs are made from; see `Learner.forward_backward`."""

    batch: Batch
    objective: Objective
    weights: FloatNT  # of the surrogate, with the step's denominators
    kl_weights: FloatNT | None  # of the KL, where it has its own
    options: PassOptions
    device: torch.device

    def of(
        self, pack: Pack, logp: Tensor, entropy: Tensor | None, exact_kl: Tensor | None, rows: IntArray | None = None
    ) -> LossTerms:
        """The loss of a pack's rows (None = all) and its metrics, which add up over the parts of a step. `logp`,
        `entropy` and `exact_kl`, or a teacher's divergence, are `[U]` of its distinct targets, for every row with it.
        """
        view = _RowView(pack, rows, self.device)
        current = view.scatter(logp)
        found: dict[str, Any] = {"entropy": None if entropy is None else view.scatter(entropy)}
        found["kl"] = None if exact_kl is None else view.scatter(exact_kl)
        return policy_loss(current, **self.arguments(view.of, current), **found)

    def arguments(self, of: Callable[[Any], Any], logp: Tensor) -> dict[str, Any]:
        """What `policy_loss` is given of some rows besides what the policy says of them: `of` takes the rows of an
        array `[N, T]`, or None; `logp` `[n, T]` are the policy's log-probabilities.
        """
        batch, objective, told = self.batch, self.objective, self.options
        mask, kl_weights, factor = of(batch.mask), of(self.kl_weights), None
        old = sampler = of(batch.old_logprobs)
        if (correction := told.get("correction")) is not None:
            old = logp.detach() if told.get("trainer_old") is None else of(told["trainer_old"])
            counted = mask if kl_weights is None else mask | (kl_weights > 0)
            factor = mismatch_correction(old, sampler, counted, *astuple(correction))
        return {
            "old": old,
            "advantages": of(batch.advantages),
            "mask": mask,
            "weights": of(self.weights),
            "objective": objective,
            "ref": of(told.get("reference")),
            "teacher": of(teacher_logprobs(batch, objective)),
            "correction": factor,
            "kl_weights": kl_weights,
            "sampler": sampler,
            "selected": of(told.get("selected")),
            "entropy_coef": told.get("entropy_coef"),
            "entropy_weights": of(entropy_weights(batch, objective)),
        }


class _RowView:
    """Moves between a pack's `[U]` values, rows `[n, T]` and the batch's `[N, T]` arrays."""

    def __init__(self, pack: Pack, rows: IntArray | None, device: torch.device) -> None:
        place = np.arange(len(pack.rows))
        mine = np.ones(pack.num_targets, np.bool_)
        if rows is not None:
            place = np.full(len(pack.rows), -1)
            place[rows] = np.arange(len(rows))
            mine = place[pack.row] >= 0
        self._rows = pack.rows if rows is None else pack.rows[rows]
        column = pack.column[mine]
        self._width = int(column.max()) + 1
        self._device = device
        self._index = torch.from_numpy(place[pack.row[mine]] * self._width + column).to(device)
        self._pair = torch.from_numpy(pack.pair[mine]).to(device)

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """`[U]` -> `[n, T]`, differentiable; 0 where the row has no token."""
        empty = values.new_zeros(len(self._rows) * self._width)
        return empty.index_copy(0, self._index, values[self._pair]).view(len(self._rows), self._width)

    def of(self, values_NT: NDArray[Any] | None) -> Any:
        """The rows of a batch array, as a tensor `[n, T]`; None for None."""
        if values_NT is None:
            return None
        return torch.from_numpy(np.ascontiguousarray(values_NT[self._rows, : self._width])).to(self._device)


@torch.no_grad()
def walk_scores(pieces: Sequence[Piece], pack: Pack, score: Score) -> list[Tensor]:
    """Of a pack's U targets what `score` finds of its pieces', in the order of `TokenScores.known`."""
    values: list[Tensor] = []
    walk(pieces, lambda piece: _note(values, pack, piece, score(piece)), lambda piece, _: None)
    return values


def walk_gradient(
    pieces: Sequence[Piece], pack: Pack, score: Score, loss: StepLoss, scale: float
) -> tuple[list[Tensor], list[LossTerms]]:
    """Add the gradient of `scale` times a pack's loss to the parameters' `grad`; `score` finds entropies always.
    Returns what `walk_scores` does, and the terms of the pieces in which rows end.
    """
    values, slopes, terms = list[Tensor](), list[Tensor](), list[LossTerms]()

    def forward(piece: Piece) -> TokenScores:
        found = score(piece)
        _note(values, pack, piece, found)
        if not slopes:
            slopes.extend(torch.zeros_like(value) for value in values)
        if len(piece.rows):
            leaves = [value.clone().requires_grad_() for value in values]
            logp, entropy, *kl = leaves  # and what has no gradient
            terms.append(loss.of(pack, logp, entropy, kl[0] if kl else None, piece.rows))
            given = torch.autograd.grad(terms[-1].loss * scale, leaves, allow_unused=True)
            for slope, own in zip(slopes, given, strict=True):
                if own is not None:
                    slope += own
        return found

    def backward(piece: Piece, found: TokenScores) -> None:
        index = torch.from_numpy(piece.scored).to(loss.device)
        known = [pair for pair in zip(found.known(), slopes, strict=True) if pair[0].requires_grad]
        torch.autograd.backward([value for value, _ in known], [slope[index] for _, slope in known])

    walk(pieces, forward, backward)
    return values, terms


def _note(values: list[Tensor], pack: Pack, piece: Piece, found: TokenScores) -> None:
    """Put a piece's scores in their places among the pack's."""
    if not values:
        values.extend(value.new_zeros(len(pack.targets), *value.shape[1:]) for value in found.known())
    index = torch.from_numpy(piece.scored).to(found.logp.device)
    for whole, value in zip(values, found.known(), strict=True):
        whole[index] = value.detach()
