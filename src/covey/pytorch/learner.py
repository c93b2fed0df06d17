"""The PyTorch learner: log-probabilities, gradients of a whole optimiser step, and the optimiser.

A step is split into packs of at most `tokens_per_micro_batch` tokens, or on a CPU into smaller ones that run side by
side (`map_in_threads`). A tree of sequences that is larger, and would repeat much where it is cut, is walked piece by
piece (`pack_loss`). Token weights carry the denominators of the whole step (`covey.algorithms.aggregation`), so the
split changes memory and time, never the gradient. When memory runs out the budget is halved and the same step is
computed again from zero gradients.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray

from covey.algorithms import LossTerms, Objective, add_metrics
from covey.algorithms.kl import Distillation
from covey.errors import ConfigError, ModelError
from covey.pytorch.attention.tree_layout import TreePath
from covey.pytorch.gradient_sum import Alone, Share
from covey.pytorch.logprobs import ReferenceDistribution, TokenScores
from covey.pytorch.optimizers import LossScale, make_optimizer, optimizer_tensors, restore_optimizer, step_in_slices
from covey.pytorch.pack_loss import StepLoss, walk_gradient, walk_scores
from covey.pytorch.passes import map_in_threads, within_memory
from covey.pytorch.policy import Policy
from covey.pytorch.reference import Reference
from covey.rollout.learning import FloatNT, Gradients, PassOptions, loss_weights, teacher_logprobs
from covey.rollout.packing import Pack, count_tokens, pack_episodes
from covey.rollout.walking import Piece, pieces_of
from covey.types import Batch, Episode, States

log = logging.getLogger(__name__)

Kept = TypeVar("Kept")

_LANES = 2
"""Micro-batches side by side on a CPU."""
_REPEATED = 1.02
"""Tokens that packs repeat may add this much work, or a tree is not cut but walked."""


class Learner:
    """Trains a `Policy` with AdamW.

    Attributes:
        steps: optimiser steps taken; the reference follows the policy by this count.
        loss_scale: keeps float16's gradients in range; None where there are none.
        tokens_per_micro_batch: packed tokens under way in forward and backward passes; shrinks when memory runs out.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        learning_rate: float,
        embedding_lr: float | None = None,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        max_grad_norm: float = 1.0,
        tokens_per_micro_batch: int = 1024,
        side_by_side: bool = True,
        optimizer: str = "adamw",
        loss_scale: LossScale | None = None,
        share: Share | None = None,
    ) -> None:
        """Take the policy and AdamW's settings; `optimizer` is a name of `covey.pytorch.optimizers`.

        `side_by_side=False` never runs two packs at once: for a learner beside which something else computes, whose
        results would depend on the number of threads that lanes set for all. `share` says which packs of a step are
        this process's, and adds up with others; all, unless there are others.
        """
        self.policy, self.loss_scale = policy, loss_scale
        self._side_by_side, self._share = side_by_side, share or Alone()
        self.max_grad_norm, self.tokens_per_micro_batch, self.steps = max_grad_norm, tokens_per_micro_batch, 0
        self._heads: dict[str, Any] = {}
        groups = policy.parameter_groups(learning_rate, embedding_lr, weight_decay)
        self.optimizer = make_optimizer(optimizer, groups, betas=betas, epsilon=epsilon, device=policy.device)
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]
        self._base_rate, self._scheduler, self._host = learning_rate, cast(Any, None), policy.host

    def use_optimizer(self, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> None:
        """Step with another optimiser, over (some of) the policy's trainable parameters, in place of AdamW. Its groups
        keep their own learning rates, multiplied by the run's schedule, or a PyTorch `scheduler` of it is stepped after
        each step. `ConfigError` for parameters that are not trained here.
        """
        own = {id(parameter) for parameter in self.policy.trainable_parameters()}
        strangers = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
        if strangers:
            raise ConfigError(
                f"optimizer: {strangers} of its parameters are none that the policy trains; make it from "
                "those of the model that is passed, which require gradients"
            )
        if self._host is not None:
            log.warning("optim.offload: the moments of an optimizer of your own stay on the device")
        self.optimizer, self._scheduler, self._host = optimizer, scheduler, None
        self._base_rates = [group["lr"] for group in optimizer.param_groups]

    @torch.no_grad()
    def scores(
        self,
        batch: Batch,
        rows: NDArray[np.int64],
        *,
        temperature: float,
        reference: bool = False,
        teacher: str = "",
        entropy: bool = False,
        states: bool = False,
    ) -> tuple[FloatNT, Any]:
        """Log-probabilities of the rows' sampled tokens, `[N, T]`, 0 elsewhere; and entropies, or states, if asked for.

        They are the policy's, or with `reference` or `teacher` those of its reference or (by name) of its teacher. For
        `States` the learner keeps the head as it is now.
        """
        policy, whose = self.policy, "reference" if reference else "teacher" if teacher else "policy"
        taught = policy.teachers.get(teacher)
        if isinstance(taught, Policy):
            here = copy.copy(self)  # whose packs are those of the other network
            here.policy = taught
            return here.scores(batch, rows, temperature=temperature, teacher=teacher, entropy=entropy, states=states)
        other = policy.reference if reference else taught
        asked: dict[str, Any] = {"temperature": temperature, "entropy": entropy, "states": states}

        @torch.no_grad()
        def score(pack: Pack) -> list[Any]:
            if self._is_walked(pack):
                found = self._walk(pack, batch.episodes, partial(walk_scores, pack=pack), **asked)
            else:
                found = policy.score(pack, supports=pack.support(batch.episodes), **asked).known()
            return [*map(_numbers, found[: 1 + entropy]), *(hidden.cpu() for hidden in found[1 + entropy :])]

        def run() -> tuple[FloatNT, Any]:
            wholes = np.zeros((1 + entropy, *batch.mask.shape), np.float32)
            place, hidden = np.full(batch.mask.shape, -1), [torch.zeros(0)]
            packs, lanes = self._packs(batch.episodes, rows)
            with nullcontext() if other is None else other.active():  # for all lanes at once
                found = self._share.map(lambda packs: map_in_threads(score, packs, lanes), packs)
                for pack, own in zip(packs, found, strict=True):
                    for values, whole in zip(own, wholes, strict=False):
                        pack.put(values[pack.pair], whole)
                    if states:
                        pack.put(sum(map(len, hidden)) + pack.pair, place)
                        hidden.append(own[-1])
            if not states:
                return wholes[0], wholes[1] if entropy else None
            self._heads[whose] = policy.head_under(other)
            return wholes[0], States(torch.cat([*hidden[1:], torch.zeros_like(hidden[-1][:1])]), place, whose)

        return self._within_memory(run)

    def forward_backward(
        self, batch: Batch, rows: NDArray[np.int64], objective: Objective, **options: Unpack[PassOptions]
    ) -> Gradients:
        """Accumulate the gradient of the whole step in the policy's parameters.

        Args:
            batch: the step; its mask gives every denominator.
            rows: the rows to run, from `rows_with_gradient`.
            objective: what is minimised.
            **options: see `PassOptions`.
        """
        temperature = options["temperature"]
        scoring: dict[str, Any] = {"temperature": temperature, "entropy": True}
        scoring["entropy_grad"] = objective.differentiates_entropy
        states: States | None = None
        how = objective.teacher
        if objective.vocabulary_kl is not None:
            how = Distillation(estimator=objective.vocabulary_kl)
            states = self.scores(batch, rows, temperature=temperature, reference=True, states=True)[1]
        elif objective.distils_vocabulary and batch.teacher is not None and batch.teacher.states is not None:
            said, states = teacher_logprobs(batch, objective), batch.teacher.states
            # nothing is compared where the term has no token
            states = replace(states, place=np.where(np.isfinite(cast(Any, said)), states.place, -1))
            states = None if (states.place[rows] < 0).all() else states
        weights = loss_weights(batch, objective, options["max_completion_length"])
        loss = StepLoss(batch, objective, *weights, options, self.policy.device)
        parameters, scale = self.policy.trainable_parameters(), self._scale

        def accumulate() -> Gradients:
            self.optimizer.zero_grad(set_to_none=True)
            kept = np.zeros((2 if states is None else 4, *batch.mask.shape), np.float32)
            scored = np.zeros(batch.mask.shape, np.bool_)
            # a head that is no matrix needs the other weights in the model
            alone = states is not None and self.policy.held.head().weight is None
            packs, lanes = self._packs(batch.episodes, rows, alone=alone)
            if states is not None:
                packs = [pack.apart(states.place) for pack in packs]
            total = self._share.sum(parameters, len(packs), side_by_side=lanes > 1)

            def gradient(pack: Pack) -> tuple[torch.Tensor, list[LossTerms], Sequence[torch.Tensor | None]]:
                compared = None
                if states is not None:
                    place = torch.from_numpy(states.place[pack.rows[pack.row[pack.first]], pack.column[pack.first]])
                    compared = ReferenceDistribution(states.hidden[place], self._heads[states.whose], cast(Any, how))
                if self._is_walked(pack):
                    walk = partial(walk_gradient, pack=pack, loss=loss, scale=scale)
                    values, terms = self._walk(pack, batch.episodes, walk, compared, **scoring)
                    return torch.stack(values), terms, ()
                supports = pack.support(batch.episodes)
                found = self.policy.score(pack, supports=supports, compared=compared, **scoring)
                one = loss.of(pack, found.logp, found.entropy, found.exact_kl)
                own = torch.stack([each.detach() for each in found.known()])
                return own, [one], total.differentiate(one.loss * scale)

            def add(packs: Sequence[Pack]) -> Iterator[tuple[NDArray[np.float32], dict[str, float]]]:
                for own, terms, grads in map_in_threads(gradient, packs, lanes):
                    total.add(grads)
                    yield _numbers(own), _added([part.metrics for part in terms])

            parts = []
            for pack, (own, metrics) in zip(packs, self._share.map(add, packs), strict=True):
                parts.append(metrics)
                for values, whole in zip(own, kept, strict=True):
                    pack.put(values[pack.pair], whole)
                pack.put(np.ones(pack.num_targets, np.bool_), scored)
            total.finish()
            names = ("divergence", "mass") if objective.distils_vocabulary else ("kl",)
            found = dict(zip(names, kept[2:], strict=False))
            tokens = count_tokens(batch.episodes, rows, sum(map(self._size, packs)))
            return Gradients(_added(parts), kept[0], scored, kept[1], tokens=tokens, **found)

        def run() -> Gradients:
            self.policy.held.train()
            try:
                return accumulate()
            except BaseException:
                self.optimizer.zero_grad(set_to_none=True)
                raise
            finally:
                self.policy.held.eval()

        return self._within_memory(run)

    def gradient(self) -> dict[str, NDArray[np.float32]]:
        """The gradient that `forward_backward` has left, by the parameters' names; without those that have none."""
        return {
            name: _numbers(parameter.grad.detach() / self._scale)
            for name, parameter in self.policy.named_trainable_parameters()
            if parameter.grad is not None
        }

    def optim_step(self, learning_rate: float) -> float:
        """Clip the gradient, take one AdamW step, drop the gradient; groups with a rate of their own keep their ratio.
        Returns the gradient's norm before clipping: where it is not finite no step is taken, and `loss_scale` is
        halved.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.loss_scale is not None:
            for parameter in parameters:
                cast(torch.Tensor, parameter.grad).div_(self.loss_scale.value)
        limit = self.max_grad_norm if self.max_grad_norm > 0 else float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit)) if parameters else 0.0
        finite = bool(np.isfinite(norm))
        if parameters and self.loss_scale is not None:
            self.loss_scale.after_step(finite=finite)
        if parameters and finite:
            if self._scheduler is None:
                for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
                    group["lr"] = base * learning_rate / self._base_rate
            if self._host is None:
                self.optimizer.step()
            else:
                step_in_slices(self.optimizer, self._host)
            if self._scheduler is not None:
                self._scheduler.step()
            self.steps += 1
            self.policy.reference.after_step(self.steps)
            if self._average is not None:
                self._average.after_step(self.steps)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """What a resumed run needs: trained weights, reference, the optimiser's moments, and the loss scale."""
        moments = optimizer_tensors(self.optimizer, self.policy.named_trainable_parameters())
        teacher = {} if self._average is None else {"teacher": self._average.state_dict()}
        return teacher | {
            "policy": self.policy.state_dict(),
            "reference": self.policy.reference.state_dict(),
            "optimizer": moments if self.loss_scale is None else moments | self.loss_scale.tensors(),
        }

    def restore(self, tensors: Mapping[str, Mapping[str, torch.Tensor]], steps: int) -> None:
        """Take back what `tensors` returned after so many steps; `ModelError` or `CheckpointError` for another model or
        other adapter settings.
        """
        self.policy.load_state_dict(tensors["policy"])
        self.policy.reference.load_state_dict(tensors["reference"])
        if self._average is not None and "teacher" in tensors:
            self._average.load_state_dict(tensors["teacher"])
        elif self._average is not None:  # given since: it begins here
            self._average.copy_current()
        moments = {name: tensor for name, tensor in tensors["optimizer"].items() if not LossScale.owns(name)}
        restore_optimizer(self.optimizer, self.policy.named_trainable_parameters(), moments, self._host)
        if self.loss_scale is not None:
            self.loss_scale.restore(tensors["optimizer"])
        self.steps = steps

    @property
    def _average(self) -> Reference | None:
        """The one teacher that moves with the policy."""
        return cast(Reference | None, self.policy.teachers.get("ema"))

    @property
    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def _packs(
        self, episodes: Sequence[Episode], rows: NDArray[np.int64], *, alone: bool = False
    ) -> tuple[list[Pack], int]:
        """Micro-batches, and how many of them run side by side; together these stay within the token budget."""
        pack = partial(pack_episodes, episodes, rows.tolist(), shared=self.policy.prefix_sharing_obstacle is None)
        budget = 1 if self.policy.rows_apart else self.tokens_per_micro_batch
        packs = pack(budget)
        most = _REPEATED * count_tokens(episodes, rows, 0).unique
        beside = self._side_by_side and self._share.alone and self.policy.runs_side_by_side and not alone
        if beside and torch.get_num_threads() >= _LANES:
            share = max(budget // _LANES, 1)
            rounds = -(-most // (share * _LANES))
            for size in (int(1.05 * most / (rounds * _LANES)), share):  # evenly, or else as full as may be
                smaller = pack(max(min(size, share), 1))
                sizes = [self._size(each) for each in smaller]
                if len(smaller) >= _LANES and max(sizes) * _LANES <= budget and sum(sizes) <= most:
                    return smaller, _LANES
        if self._can_walk and sum(map(self._size, packs)) > most:
            packs = pack(budget, whole_trees=True)
        return packs, 1

    @property
    def _can_walk(self) -> bool:
        """Whether a tree that is larger than the budget may be run piece by piece."""
        return self._share.alone and self.policy.prefix_sharing_obstacle is None

    def _size(self, pack: Pack) -> int:
        """Tokens that a pack takes."""
        return pack.num_tokens if self.policy.prefix_sharing_obstacle is None else pack.num_padded

    def _is_walked(self, pack: Pack) -> bool:
        """Whether a pack is a tree that was not cut."""
        too_large = pack.num_tokens > self.tokens_per_micro_batch and len(pack.branches) > 1
        return too_large and self._can_walk

    def _walk(
        self,
        pack: Pack,
        episodes: Sequence[Episode],
        walk: Callable[..., Kept],
        compared: ReferenceDistribution | None = None,
        **options: Any,
    ) -> Kept:
        """Walk a pack's pieces, each scored on the path that it hangs on."""
        pieces, support = pieces_of(pack, self.tokens_per_micro_batch), pack.support(episodes)
        path = TreePath(int(pack.position_ids.max()) + 1)

        def score(piece: Piece) -> TokenScores:
            own = None if support is None else support.take(piece.scored)
            against = compared and replace(compared, hidden=compared.hidden[torch.from_numpy(piece.scored)])
            return self.policy.score(piece, supports=own, path=path, compared=against, **options)

        return walk(pieces, score=score)

    def _within_memory(self, run: Callable[[], Kept]) -> Kept:
        return within_memory(run, self._halve)

    def _halve(self, error: BaseException) -> None:
        if self.tokens_per_micro_batch <= 64:
            raise ModelError(
                f"tokens_per_micro_batch={self.tokens_per_micro_batch}: memory runs out even so; use a smaller "
                "model or shorter completions, or set model.gradient_checkpointing to true"
            ) from error
        self.tokens_per_micro_batch //= 2
        said = "out of memory (%s): the step is computed again with tokens_per_micro_batch=%d; its loss is the same"
        log.warning(said, str(error).splitlines()[0], self.tokens_per_micro_batch)


def _numbers(values: torch.Tensor) -> NDArray[np.float32]:
    return values.float().cpu().numpy()


def _added(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics of several parts of a step as plain numbers."""
    arrays = [{name: np.asarray(float(value), np.float64) for name, value in part.items()} for part in parts]
    return {name: float(value) for name, value in add_metrics(arrays).items()}
