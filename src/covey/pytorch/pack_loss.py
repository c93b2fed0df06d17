"""The loss of some rows of a pack, from what is known of its distinct targets."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from covey.algorithms import Correction, LossTerms, Objective, mismatch_correction, policy_loss
from covey.rollout.learning import FloatNT, entropy_weights
from covey.rollout.packing import Pack
from covey.types import Batch, BoolArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class StepLoss:
    """What the losses of a step's packs are made from; see `Learner.forward_backward` for what is not said here.

    Attributes:
        batch: the step.
        objective: what is minimised.
        weights: `[N, T]` of the surrogate, with the step's denominators.
        kl_weights: `[N, T]` of the KL, where it has its own.
        device: where the losses are computed.
    """

    batch: Batch
    objective: Objective
    weights: FloatNT
    kl_weights: FloatNT | None
    device: torch.device
    reference: FloatNT | None = None
    trainer_old: FloatNT | None = None
    correction: Correction | None = None
    selected: BoolArray | None = None
    entropy_coef: float | None = None

    def of(
        self,
        pack: Pack,
        logp: torch.Tensor,
        entropy: torch.Tensor | None = None,
        exact_kl: torch.Tensor | None = None,
        rows: IntArray | None = None,
    ) -> LossTerms:
        """The loss and its metrics; those of several parts of a step add up to the step's.

        Args:
            pack: whose rows they are.
            logp: `[U]` of the pack's distinct targets: each enters the loss of every row that has it.
            entropy: `[U]` likewise.
            exact_kl: `[U]` likewise.
            rows: of the pack; None = all.
        """
        view = _RowView(pack, rows, self.device)
        current = view.scatter(logp)
        mask = view.of(self.batch.mask)
        old = sampler = view.of(self.batch.old_logprobs)
        kl_weights = None if self.kl_weights is None else view.of(self.kl_weights)
        bonus, factor = entropy_weights(self.batch, self.objective), None
        if self.correction is not None:
            trainer = current.detach() if self.trainer_old is None else view.of(self.trainer_old)
            counted = mask if kl_weights is None else mask | (kl_weights > 0)
            factor = mismatch_correction(trainer, sampler, counted, *astuple(self.correction))
            old = trainer
        return policy_loss(
            current,
            old,
            view.of(self.batch.advantages),
            mask,
            view.of(self.weights),
            self.objective,
            ref=None if self.reference is None else view.of(self.reference),
            kl=None if exact_kl is None else view.scatter(exact_kl),
            entropy=None if entropy is None else view.scatter(entropy),
            correction=factor,
            kl_weights=kl_weights,
            sampler=sampler,
            selected=None if self.selected is None else view.of(self.selected),
            entropy_coef=self.entropy_coef,
            entropy_weights=None if bonus is None else view.of(bonus),
        )


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

    def of(self, values_NT: NDArray[np.generic]) -> torch.Tensor:
        """The rows of a batch array, as a tensor `[n, T]`."""
        return torch.from_numpy(np.ascontiguousarray(values_NT[self._rows, : self._width])).to(self._device)
