"""The PyTorch learner: log-probabilities (`scoring`), gradients of a whole optimiser step, and the optimiser.

A step is split into packs. Token weights carry the denominators of the whole step (`covey.algorithms.aggregation`), so
the split changes memory and time, never the gradient. When memory runs out the budget is halved and the same step is
computed again from zero gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from covey.algorithms import Correction, LossTerms, Objective, add_metrics
from covey.errors import ConfigError
from covey.pytorch.gradient_sum import Share
from covey.pytorch.optimizers import LossScale, make_optimizer, optimizer_tensors, restore_optimizer, step_in_slices
from covey.pytorch.pack_loss import StepLoss, walk_gradient
from covey.pytorch.passes import map_in_threads
from covey.pytorch.policy import Policy
from covey.pytorch.scoring import Scorer, numbers
from covey.rollout.learning import FloatNT, Gradients, loss_weights, teacher_logprobs
from covey.rollout.packing import Pack, count_tokens
from covey.types import Batch, BoolArray, States

log = logging.getLogger(__name__)


class Learner(Scorer):
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
        super().__init__(policy, tokens_per_micro_batch=tokens_per_micro_batch, side_by_side=side_by_side, share=share)
        self.max_grad_norm, self.loss_scale, self.steps = max_grad_norm, loss_scale, 0
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

    def forward_backward(
        self,
        batch: Batch,
        rows: NDArray[np.int64],
        objective: Objective,
        *,
        temperature: float,
        max_completion_length: int,
        reference: FloatNT | None = None,
        trainer_old: FloatNT | None = None,
        correction: Correction | None = None,
        selected: BoolArray | None = None,
        entropy_coef: float | None = None,
        states: States | None = None,
    ) -> Gradients:
        """Accumulate the gradient of the whole step in the policy's parameters.

        Args:
            batch: the step; its mask gives every denominator.
            rows: the rows to run, from `rows_with_gradient`.
            objective: what is minimised.
            temperature: of the sampling distribution.
            max_completion_length: in tokens, for `dr_grpo`.
            reference: `[N, T]` log-probabilities under the reference, for sampled-token KL estimators.
            trainer_old: `[N, T]` the learner's own log-probabilities under the weights before the first pass over the
                batch; None on that pass, where the current ones are these.
            correction: truncated importance sampling against the sampler's log-probabilities; then the ratio is taken
                against `trainer_old`, else against the sampler's.
            selected: `[N, T]` what `objective.select` chose in the whole step.
            entropy_coef: weight of the entropy bonus where it is another one in each step.
            states: the reference's hidden states, for a KL over the vocabulary; None = they are computed here.

        With `correction` the old policy of the ratio, and of its clip, is the one before the first pass, also for a
        stale batch, which older weights have sampled; the factor `min(exp(trainer_old - sampler's), cap)` leads from
        those to it (decoupled PPO, arXiv 2110.00641). Without, the old policy is the one that sampled.
        """
        scoring: dict[str, Any] = {"temperature": temperature, "entropy": True}
        scoring["entropy_grad"] = objective.differentiates_entropy
        kind: Any = objective.vocabulary_kl
        if kind is not None and states is None:
            _, states = self.states(batch, rows, temperature=temperature, whose="reference")
        elif objective.distils_vocabulary:
            kind, states = objective.teacher, None if batch.teacher is None else batch.teacher.states
            said = teacher_logprobs(batch, objective)
            if states is not None and said is not None:  # nothing is compared where the term has no token
                states = replace(states, place=np.where(np.isfinite(said), states.place, -1))
        if states is not None and (states.place[rows] < 0).all():
            states = None
        weights, device = loss_weights(batch, objective, max_completion_length), self.policy.device
        loss = StepLoss(batch, objective, *weights, device, reference, trainer_old, correction, selected, entropy_coef)
        parameters, scale = self.policy.trainable_parameters(), self._scale

        def accumulate() -> Gradients:
            self.optimizer.zero_grad(set_to_none=True)
            over_k = states is not None and objective.distils_vocabulary and kind.top_k > 0
            kept = np.zeros((2 + (states is not None) + over_k, *batch.mask.shape), np.float32)
            scored = np.zeros(batch.mask.shape, np.bool_)
            # a head that is no matrix needs the other weights in the model
            alone = states is not None and self.policy.held.head().weight is None
            packs, lanes = self._packs(batch.episodes, rows, alone=alone)
            if states is not None:
                packs = [pack.apart(states.place) for pack in packs]
            total = self._share.sum(parameters, len(packs), side_by_side=lanes > 1)

            def gradient(pack: Pack) -> tuple[torch.Tensor, list[LossTerms], Sequence[torch.Tensor | None]]:
                compared = None if states is None else self._compared(pack, states, kind)
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
                    yield numbers(own), _added([part.metrics for part in terms])

            parts = []
            for pack, (own, metrics) in zip(packs, self._share.map(add, packs), strict=True):
                parts.append(metrics)
                for values, whole in zip(own, kept, strict=True):
                    pack.put(values[pack.pair], whole)
                pack.put(np.ones(pack.num_targets, np.bool_), scored)
            total.finish()
            logp, uncertainty, *over = kept
            names = ("divergence", "mass") if objective.distils_vocabulary else ("kl",)
            found = dict(zip(names, over, strict=False))
            tokens = count_tokens(batch.episodes, rows, sum(map(self._size, packs)))
            return Gradients(_added(parts), logp, scored, uncertainty, tokens=tokens, **found)

        def run() -> Gradients:
            self.policy.train()
            try:
                return accumulate()
            except BaseException:
                self.optimizer.zero_grad(set_to_none=True)
                raise
            finally:
                self.policy.eval()

        return self._within_memory(run)

    def gradient(self) -> dict[str, NDArray[np.float32]]:
        """The gradient that `forward_backward` has left, by the parameters' names; without those that have none."""
        return {
            name: numbers(parameter.grad.detach() / self._scale)
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
            if self.policy.teacher is not None:
                self.policy.teacher.after_step(self.steps)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """What a resumed run needs: trained weights, reference, the optimiser's moments, and the loss scale."""
        moments = optimizer_tensors(self.optimizer, self.policy.named_trainable_parameters())
        teacher = {} if self.policy.teacher is None else {"teacher": self.policy.teacher.state_dict()}
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
        if self.policy.teacher is not None:
            self.policy.teacher.load_state_dict(tensors.get("teacher", {}))
        moments = {name: tensor for name, tensor in tensors["optimizer"].items() if not LossScale.owns(name)}
        restore_optimizer(self.optimizer, self.policy.named_trainable_parameters(), moments, self._host)
        if self.loss_scale is not None:
            self.loss_scale.restore(tensors["optimizer"])
        self.steps = steps

    @property
    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value


def _added(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics of several parts of a step as plain numbers."""
    arrays = [{name: np.asarray(float(value), np.float64) for name, value in part.items()} for part in parts]
    return {name: float(value) for name, value in add_metrics(arrays).items()}
