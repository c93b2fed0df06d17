"""Learning with the whole model on every rank: packs are shared out, gradients are added in fixed point.

Every rank makes all packs of the step, which depend on the step alone, and runs its own. The sum has the same bits on
any number of ranks (`ExactSum`), so have the norm, AdamW's step and the weights, on processors of one kind with equally
many threads each. Rank 0 calls `LeadingLearner`; the others `follow`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covey.adapters import fingerprint
from covey.algorithms import Objective
from covey.algorithms.losses import find_loss
from covey.distributed.ranks import STOP, Ranks, TornError
from covey.errors import ConfigError, CoveyError, ModelError
from covey.pytorch.gradient_sum import ExactSum, GradientSum, Work
from covey.pytorch.learner import Learner
from covey.pytorch.models.lora import album_of, pictures_in
from covey.pytorch.passes import is_out_of_memory
from covey.rollout.learning import FloatNT, Gradients
from covey.rollout.packing import Pack
from covey.types import Batch

log = logging.getLogger(__name__)

Result = TypeVar("Result")

COMPARED_EVERY = 50
"""Optimiser steps between two comparisons of the ranks' weights; the first step's are compared too."""


def share_out(sizes: Sequence[int], world: int) -> list[list[int]]:
    """Which pack each rank runs: longest first, each to the rank that has the fewest tokens.

    Tokens [5, 3, 3, 2] on two ranks: [0, 3] and [1, 2].
    """
    own: list[list[int]] = [[] for _ in range(world)]
    loads = [0] * world
    for number in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = loads.index(min(loads))
        own[rank].append(number)
        loads[rank] += sizes[number]
    return [sorted(numbers) for numbers in own]


def run_shared(ranks: Ranks, sizes: Sequence[int], work: Callable[[list[int]], Iterable[Result]]) -> list[Result]:
    """Every rank runs its part of some items, and knows the results of all.

    All raise what one has met: torch.OutOfMemoryError and CoveyErrors as they are, else a ModelError that names it.
    """
    numbers = share_out(sizes, ranks.world)[ranks.rank]
    own: list[Result] = []
    failed: Exception | None = None
    try:
        own = list(work(numbers))
    except Exception as error:  # the others are told before it is raised here
        failed = error
    heard = ranks.gather((numbers, own, _told(failed, ranks)))
    if (told := next((told for _, _, told in heard if told is not None), None)) is not None:
        raise failed if failed is not None and ranks.rank == 0 else told
    by_number = {number: result for numbers, found, _ in heard for number, result in zip(numbers, found, strict=True)}
    return [by_number[number] for number in range(len(sizes))]


def _told(failed: Exception | None, ranks: Ranks) -> Exception | None:
    """What the other ranks raise."""
    if failed is None or isinstance(failed, CoveyError):
        return failed
    said = f"rank {ranks.rank} of {ranks.world} failed: {type(failed).__name__}: {failed}"
    if is_out_of_memory(failed):
        return torch.OutOfMemoryError(said)
    if ranks.rank > 0:
        log.error("rank %d failed", ranks.rank, exc_info=failed)
    return ModelError(f"{said}; see what it prints")


class SharedPacks:
    """See `covey.pytorch.gradient_sum.Share`: each rank runs its part, and knows all results."""

    alone = False

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def map(self, work: Work[Result], packs: Sequence[Pack]) -> list[Result]:
        """When memory runs out on one rank, all begin again with smaller packs."""
        sizes = [pack.num_tokens for pack in packs]
        return run_shared(self._ranks, sizes, lambda numbers: work([packs[number] for number in numbers]))

    def sum(self, parameters: Sequence[Tensor], packs: int, *, side_by_side: bool) -> GradientSum:
        return ExactSum(parameters, packs, self._ranks.add)


class LeadingLearner:
    """Rank 0's learner: what it is called, all ranks call. See `covey.pytorch.learner.Learner` for the methods."""

    def __init__(self, learner: Learner, ranks: Ranks) -> None:
        self._own, self._ranks = learner, ranks

    @property
    def steps(self) -> int:
        return self._own.steps

    @property
    def tokens_per_micro_batch(self) -> int:
        return self._own.tokens_per_micro_batch

    @tokens_per_micro_batch.setter
    def tokens_per_micro_batch(self, tokens: int) -> None:
        self._together("__setattr__", "tokens_per_micro_batch", self._most_tokens(tokens))

    def _most_tokens(self, tokens: int) -> int:
        """As many of these as are known to fit."""
        return tokens

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Rank 0's own, which takes the same steps as the others'."""
        return self._own.optimizer

    def _together(self, name: str, *args: Any, **settings: Any) -> Any:
        read = (episode.token_ids for batch in args[:1] if isinstance(batch, Batch) for episode in batch.episodes)
        with self._ranks.telling(("learner", name, args, settings), pictures_in(self._own.policy.model, read)):
            return _call(self._own, self._ranks, name, args, settings)

    def scores(self, batch: Batch, rows: NDArray[np.int64], **settings: Any) -> tuple[FloatNT, FloatNT | None]:
        found: tuple[FloatNT, FloatNT | None] = self._together("scores", batch, rows, **settings)
        return found

    def forward_backward(
        self, batch: Batch, rows: NDArray[np.int64], objective: Objective, **settings: Any
    ) -> Gradients:
        found: Gradients = self._together("forward_backward", batch, rows, _Spelled.of(objective), **settings)
        return found

    def optim_step(self, learning_rate: float) -> float:
        """Raises ModelError: the ranks' weights are not equal any more."""
        return float(self._together("optim_step", learning_rate))

    def restore(self, tensors: Mapping[str, Mapping[str, Any]], steps: int) -> None:
        self._together("restore", {name: dict(group) for name, group in tensors.items()}, steps)

    def tensors(self) -> dict[str, dict[str, Any]]:
        return self._own.tensors()

    def use_optimizer(self, optimizer: Any, scheduler: Any = None) -> None:
        """Refused: the others would not have it."""
        raise ConfigError("optimizers: one of your own steps in one process only; start without torchrun")


@dataclass(frozen=True)
class _Spelled:
    """An objective on its way to another process, where the loss is found by its name."""

    loss: str
    averages: dict[str, Any]
    rest: dict[str, Any]

    @classmethod
    def of(cls, objective: Objective) -> _Spelled:
        rest = {field.name: getattr(objective, field.name) for field in fields(objective)}
        loss = rest.pop("loss")
        return cls(loss.name, {name: getattr(loss, name) for name in ("aggregation", "kl_aggregation")}, rest)

    def found(self) -> Objective:
        return Objective(replace(find_loss(self.loss), **self.averages), **self.rest)


def follow(ranks: Ranks, learner: Learner, sampler: Any = None, policy: Any = None) -> None:
    """Another rank: call what rank 0 calls, until it says that the run has ended. Raises TornError."""
    album = album_of(learner.policy.model)
    while (message := ranks.hear()) != STOP:
        target, name, args, settings = message
        if album is not None:
            album.hold(ranks.pictures)
        try:
            if target == "learner":
                _call(learner, ranks, name, args, settings)
            else:
                getattr(policy if target == "policy" else sampler, name)(*args, **settings)
        except TornError:
            raise
        except CoveyError:  # rank 0 raises it too, and decides what comes next
            continue


def _call(learner: Learner, ranks: Ranks, name: str, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    before = learner.steps
    args = tuple(each.found() if isinstance(each, _Spelled) else each for each in args)
    found = getattr(learner, name)(*args, **settings)
    due = before == 0 or learner.steps % COMPARED_EVERY == 0 or name == "restore"
    if due and learner.steps != before and not learner.policy.in_shards:
        _compare(learner, ranks)
    return found


def _compare(learner: Learner, ranks: Ranks) -> None:
    trained = learner.policy.named_trainable_parameters()
    own = fingerprint((name, [parameter.detach().float().cpu().numpy()]) for name, parameter in trained)
    different = [rank for rank, other in enumerate(ranks.gather(own)) if other != own]
    if different:
        raise ModelError(
            f"after step {learner.steps} the weights of rank {different[0]} differ from those of rank {ranks.rank}: "
            "machines of different kinds, or different numbers of threads; use equal ones, and resume the run"
        )
