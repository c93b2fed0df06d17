"""A pack walked depth first, piece by piece, for trees that are larger than the budget.

A row's tokens lie in the pieces of one path. Its loss is known when the last of these has been run forward, and its
gradient by each log-probability of the row then waits, summed over rows, for the backward of the piece that has it:

    a piece         forward, keeping keys and values of a trunk
                    loss of the rows that end here; d(loss) by the log-probabilities of the whole path
                    each piece that follows, likewise
                    backward from d(loss) by this piece's log-probabilities and d(keys), d(values) of its followers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from covey.algorithms import LossTerms
from covey.pytorch.logprobs import TokenScores
from covey.pytorch.pack_loss import StepLoss
from covey.rollout.packing import Pack
from covey.rollout.walking import Piece, walk

Score = Callable[[Piece], TokenScores]
"""Runs a piece forward on the path that it keeps itself."""


@torch.no_grad()
def walk_scores(pieces: Sequence[Piece], pack: Pack, score: Score) -> Tensor:
    """`[k, U]` log-probabilities of a pack's targets; then entropies and divergences, where `score` finds them."""
    values: list[Tensor] = []
    walk(pieces, lambda piece: _note(values, pack, piece, score(piece)), lambda piece, _: None)
    return torch.stack(values)


def walk_gradient(
    pieces: Sequence[Piece], pack: Pack, score: Score, loss: StepLoss, scale: float
) -> tuple[Tensor, list[LossTerms]]:
    """Add the gradient of a pack's loss to the parameters' `grad`.

    Args:
        pieces: of the pack.
        pack: whose loss it is.
        score: differentiable scores of a piece: entropies always, divergences where the objective has them.
        loss: of the step.
        scale: on the loss.

    Returns:
        As `walk_scores`, and the terms of the pieces in which rows end.
    """
    values: list[Tensor] = []
    slopes: list[Tensor] = []
    terms: list[LossTerms] = []

    def forward(piece: Piece) -> TokenScores:
        found = score(piece)
        _note(values, pack, piece, found)
        if not slopes:
            slopes.extend(torch.zeros_like(value) for value in values)
        if len(piece.rows):
            leaves = [value.clone().requires_grad_() for value in values]
            logp, entropy, *kl = leaves
            terms.append(loss.of(pack, logp, entropy, kl[0] if kl else None, piece.rows))
            given = torch.autograd.grad(terms[-1].loss * scale, leaves, allow_unused=True)
            for slope, own in zip(slopes, given, strict=True):
                if own is not None:
                    slope += own
        return found

    def backward(piece: Piece, found: TokenScores) -> None:
        index = torch.from_numpy(piece.scored).to(loss.device)
        known = [pair for pair in zip(_known(found), slopes, strict=True) if pair[0].requires_grad]
        torch.autograd.backward([value for value, _ in known], [slope[index] for _, slope in known])

    walk(pieces, forward, backward)
    return torch.stack(values), terms


def _known(found: TokenScores) -> list[Tensor]:
    return [value for value in (found.logp, found.entropy, found.exact_kl) if value is not None]


def _note(values: list[Tensor], pack: Pack, piece: Piece, found: TokenScores) -> None:
    """Put a piece's scores in their places among the pack's."""
    known = _known(found)
    if not values:
        values.extend(value.new_zeros(len(pack.targets)) for value in known)
    index = torch.from_numpy(piece.scored).to(found.logp.device)
    for whole, value in zip(values, known, strict=True):
        whole[index] = value.detach()
