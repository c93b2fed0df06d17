"""The PyTorch learner: log-probabilities, gradients of a whole optimiser step, and the optimiser.

A step is split into packs of at most `tokens_per_micro_batch` tokens, or on a CPU into smaller ones that run side by
side (`map_in_threads`). Token weights carry the denominators of the whole step (`covey.algorithms.aggregation`), so
the split changes memory and time, never the gradient. When memory runs out the budget is halved and the same step is
computed again from zero gradients.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from covey.algorithms import Correction, LossTerms, Objective, add_metrics, mismatch_correction, policy_loss
from covey.errors import ConfigError, ModelError
from covey.pytorch.gradient_sum import Alone, Share
from covey.pytorch.lanes import map_in_threads
from covey.pytorch.logprobs import ExactKL, TokenScores
from covey.pytorch.moments import optimizer_tensors, restore_optimizer
from covey.pytorch.policy import Policy
from covey.rollout.learning import FloatNT, Gradients, loss_weights
from covey.rollout.packing import Pack, pack_episodes
from covey.types import Batch, BoolArray, Episode

log = logging.getLogger(__name__)

Kept = TypeVar("Kept")

_LANES = 2
"""Micro-batches side by side on a CPU."""
_REPEATED = 1.05
"""Prompts that smaller packs repeat may add this much work, or the lanes do not pay."""

FLOAT16_LOSS_SCALE = 4096.0
"""Of losses under float16's autocast, whose smallest number is 6e-8. A step that overflows is skipped."""


class Learner:
    """Trains a `Policy` with AdamW.

    Attributes:
        steps: optimiser steps taken; the reference follows the policy by this count.
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
        loss_scale: float = 1.0,
        share: Share | None = None,
    ) -> None:
        """Take the policy and AdamW's settings.

        `side_by_side=False` never runs two packs at once: for a learner beside which something else computes. That
        fills the gaps already, and its results would depend on the number of threads that lanes set for all.
        `loss_scale` keeps small gradients within the range of float16; the optimiser sees them divided by it.
        `share` says which packs of a step are this process's, and adds up with others; all, unless there are others.
        """
        self.policy = policy
        self._side_by_side = side_by_side
        self._loss_scale = loss_scale
        self._share: Share = share or Alone()
        self.max_grad_norm = max_grad_norm
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.steps = 0
        groups = policy.parameter_groups(learning_rate, embedding_lr, weight_decay)
        # Fused on CPU too: one pass over each parameter in place of a dozen, with the same numbers on every run.
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, betas=betas, eps=epsilon, fused=True)
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]
        self._base_rate = learning_rate
        self._scheduler: Any = None

    def use_optimizer(self, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> None:
        """Step with another optimiser in place of AdamW.

        Args:
            optimizer: over (some of) the policy's trainable parameters. Each of its groups keeps its own learning
                rate, multiplied by the run's schedule.
            scheduler: a PyTorch scheduler of it, stepped after each step, in place of the run's schedule.

        Raises:
            ConfigError: it has parameters that are not trained here.
        """
        own = {id(parameter) for parameter in self.policy.trainable_parameters()}
        strangers = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
        if strangers:
            raise ConfigError(
                f"optimizer: {strangers} of its parameters are none that the policy trains; make it from "
                "those of the model that is passed, which require gradients"
            )
        self.optimizer, self._scheduler = optimizer, scheduler
        self._base_rates = [group["lr"] for group in optimizer.param_groups]

    # ------------------------------------------------------------------ log-probabilities

    @torch.no_grad()
    def scores(
        self,
        batch: Batch,
        rows: NDArray[np.int64],
        *,
        temperature: float,
        reference: bool = False,
        entropy: bool = False,
    ) -> tuple[FloatNT, FloatNT | None]:
        """Log-probabilities, and entropies if asked for, of the rows' sampled tokens. `[N, T]`, 0 elsewhere."""

        @torch.no_grad()
        def score(pack: Pack) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
            found = self._score(pack, batch.episodes, temperature, entropy=entropy)
            return _numbers(found.logp), None if found.entropy is None else _numbers(found.entropy)

        def run() -> tuple[FloatNT, FloatNT | None]:
            logp = np.zeros(batch.mask.shape, np.float32)
            uncertainty = np.zeros(batch.mask.shape, np.float32) if entropy else None
            packs, lanes = self._packs(batch.episodes, rows)
            with self.policy.reference.active() if reference else nullcontext():  # for all lanes at once
                found = self._share.map(lambda packs: map_in_threads(score, packs, lanes), packs)
                for pack, (own_logp, own_entropy) in zip(packs, found, strict=True):
                    pack.put(own_logp, logp)
                    if uncertainty is not None and own_entropy is not None:
                        pack.put(own_entropy, uncertainty)
            return logp, uncertainty

        return self._within_memory(run)

    # ------------------------------------------------------------------ gradients

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

        With `correction` the old policy of the ratio, and of its clip, is the one before the first pass, also for a
        stale batch, which older weights have sampled; the factor `min(exp(trainer_old - sampler's), cap)` leads from
        those to it (decoupled PPO, arXiv 2110.00641). Without, the old policy is the one that sampled.
        """
        weights, kl_weights = loss_weights(batch, objective, max_completion_length)
        exact = cast(ExactKL | None, objective.vocabulary_kl)

        def run() -> Gradients:
            self.policy.train()
            try:
                return accumulate()
            except BaseException:
                self.optimizer.zero_grad(set_to_none=True)
                raise
            finally:
                self.policy.eval()

        def loss_of(pack: Pack) -> tuple[TokenScores, LossTerms]:
            found = self._score(
                pack,
                batch.episodes,
                temperature,
                entropy=True,
                entropy_grad=objective.differentiates_entropy,
                exact_kl=exact,
            )
            rows_NT = _RowView(pack, self.policy.device)
            current = rows_NT.scatter(found.logp)
            mask = rows_NT.of(batch.mask)
            old = sampler = rows_NT.of(batch.old_logprobs)
            factor = None
            if correction is not None:
                trainer = current.detach() if trainer_old is None else rows_NT.of(trainer_old)
                counted = mask if kl_weights is None else mask | (rows_NT.of(kl_weights) > 0)
                factor = mismatch_correction(trainer, sampler, counted, *astuple(correction))
                old = trainer
            terms = policy_loss(
                current,
                old,
                rows_NT.of(batch.advantages),
                mask,
                rows_NT.of(weights),
                objective,
                ref=None if reference is None else rows_NT.of(reference),
                kl=None if found.exact_kl is None else rows_NT.scatter(found.exact_kl),
                entropy=None if found.entropy is None else rows_NT.scatter(found.entropy),
                correction=factor,
                kl_weights=None if kl_weights is None else rows_NT.of(kl_weights),
                sampler=sampler,
                selected=None if selected is None else rows_NT.of(selected),
                entropy_coef=entropy_coef,
            )
            return found, terms

        parameters = self.policy.trainable_parameters()

        def accumulate() -> Gradients:
            self.optimizer.zero_grad(set_to_none=True)
            kept = np.zeros((2 if exact is None else 3, *batch.mask.shape), np.float32)
            scored = np.zeros(batch.mask.shape, np.bool_)
            packs, lanes = self._packs(batch.episodes, rows, exact_kl=exact is not None)
            total = self._share.sum(parameters, len(packs), side_by_side=lanes > 1)

            def gradient(pack: Pack) -> tuple[torch.Tensor, LossTerms, Sequence[torch.Tensor | None]]:
                found, terms = loss_of(pack)
                known = [found.logp, cast(torch.Tensor, found.entropy)]
                known += [] if found.exact_kl is None else [found.exact_kl]
                own = torch.stack([each.detach() for each in known])
                return own, terms, total.differentiate(terms.loss * self._loss_scale)

            def add(packs: Sequence[Pack]) -> Iterator[tuple[NDArray[np.float32], dict[str, float]]]:
                for own, terms, grads in map_in_threads(gradient, packs, lanes):
                    total.add(grads)
                    yield _numbers(own), {name: float(value) for name, value in terms.metrics.items()}

            parts = []
            for pack, (own, metrics) in zip(packs, self._share.map(add, packs), strict=True):
                parts.append(metrics)
                for values, whole in zip(own, kept, strict=True):
                    pack.put(values, whole)
                pack.put(np.ones(pack.num_targets, np.bool_), scored)
            total.finish()
            logp, uncertainty, *kl = kept
            return Gradients(add_metrics_float(parts), logp, scored, uncertainty, *kl)

        return self._within_memory(run)

    def gradient(self) -> dict[str, NDArray[np.float32]]:
        """The gradient that `forward_backward` has left, by the parameters' names; without those that have none."""
        return {
            name: _numbers(parameter.grad.detach() / self._loss_scale)
            for name, parameter in self.policy.named_trainable_parameters()
            if parameter.grad is not None
        }

    def optim_step(self, learning_rate: float) -> float:
        """Clip the gradient, take one AdamW step, drop the gradient.

        Args:
            learning_rate: of this step; groups with a rate of their own keep their ratio to it.

        Returns:
            The gradient's norm before clipping. When it is not finite, no step is taken.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self._loss_scale != 1:
            for parameter in parameters:
                cast(torch.Tensor, parameter.grad).div_(self._loss_scale)
        limit = self.max_grad_norm if self.max_grad_norm > 0 else float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit)) if parameters else 0.0
        if parameters and np.isfinite(norm):
            if self._scheduler is None:
                for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
                    group["lr"] = base * learning_rate / self._base_rate
            self.optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()
            self.steps += 1
            self.policy.reference.after_step(self.steps)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    # ------------------------------------------------------------------ saving

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """What a resumed run needs: trained weights, reference, and the optimiser's moments."""
        return {
            "policy": self.policy.state_dict(),
            "reference": self.policy.reference.state_dict(),
            "optimizer": optimizer_tensors(self.optimizer, self.policy.named_trainable_parameters()),
        }

    def restore(self, tensors: Mapping[str, Mapping[str, torch.Tensor]], steps: int) -> None:
        """Take back what `tensors` returned after so many optimiser steps.

        Raises:
            ModelError, CheckpointError: it is of another model or other adapter settings.
        """
        self.policy.load_state_dict(tensors["policy"])
        self.policy.reference.load_state_dict(tensors["reference"])
        restore_optimizer(self.optimizer, self.policy.named_trainable_parameters(), tensors["optimizer"])
        self.steps = steps

    # ------------------------------------------------------------------ parts

    def _packs(
        self, episodes: Sequence[Episode], rows: NDArray[np.int64], *, exact_kl: bool = False
    ) -> tuple[list[Pack], int]:
        """Micro-batches, and how many of them run side by side; together these stay within the token budget."""
        budget = self.tokens_per_micro_batch
        packs = pack_episodes(episodes, rows.tolist(), budget)
        # exact KL switches adapters off and on inside each pass
        beside = self._side_by_side and self._share.side_by_side and self.policy.runs_side_by_side
        if exact_kl or torch.get_num_threads() < _LANES or not beside:
            return packs, 1
        smaller = pack_episodes(episodes, rows.tolist(), max(budget // _LANES, 1))
        sizes = [pack.num_tokens for pack in smaller]
        repeats = sum(sizes) > _REPEATED * sum(pack.num_tokens for pack in packs)
        if len(smaller) < _LANES or max(sizes) * _LANES > budget or repeats:
            return packs, 1
        return smaller, _LANES

    def _score(
        self,
        pack: Pack,
        episodes: Sequence[Episode],
        temperature: float,
        *,
        entropy: bool = False,
        entropy_grad: bool = False,
        exact_kl: ExactKL | None = None,
    ) -> TokenScores:
        return self.policy.score(
            pack,
            temperature=temperature,
            entropy=entropy,
            entropy_grad=entropy_grad,
            supports=pack.support(episodes),
            exact_kl=exact_kl,
        )

    def _within_memory(self, run: Callable[[], Kept]) -> Kept:
        """Run; on out-of-memory halve the token budget and run again from the start."""
        while True:
            try:
                return run()
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                if self.tokens_per_micro_batch <= 64:
                    raise ModelError(
                        f"tokens_per_micro_batch={self.tokens_per_micro_batch}: memory runs out even so; use a smaller "
                        "model or shorter completions, or set model.gradient_checkpointing to true"
                    ) from error
                reason = str(error).splitlines()[0]
            # Outside the except block, so that the traceback no longer holds the failed pass's tensors.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.tokens_per_micro_batch //= 2
            log.warning(
                "out of memory (%s): the step is computed again with tokens_per_micro_batch=%d; its loss is the same",
                reason,
                self.tokens_per_micro_batch,
            )


class _RowView:
    """Moves between a pack's `[S]` values, its `[n, T]` rows and the batch's `[N, T]` arrays."""

    def __init__(self, pack: Pack, device: torch.device) -> None:
        self._rows = pack.rows
        self._width = int(pack.column.max()) + 1
        self._device = device
        flat = pack.row * self._width + pack.column
        self._index = torch.from_numpy(flat).to(device)

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """`[S]` -> `[n, T]`, differentiable; 0 where the row has no token."""
        empty = values.new_zeros(len(self._rows) * self._width)
        return empty.index_copy(0, self._index, values).view(len(self._rows), self._width)

    def of(self, values_NT: NDArray[np.generic]) -> torch.Tensor:
        """The pack's rows of a batch array, as a tensor `[n, T]`."""
        return torch.from_numpy(np.ascontiguousarray(values_NT[self._rows, : self._width])).to(self._device)


def add_metrics_float(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`covey.algorithms.add_metrics` over plain numbers."""
    return {name: float(value) for name, value in add_metrics([_arrays(part) for part in parts]).items()}


def _numbers(values: torch.Tensor) -> NDArray[np.float32]:
    return values.float().cpu().numpy()


def _arrays(part: Mapping[str, float]) -> dict[str, NDArray[np.float64]]:
    return {name: np.asarray(value, np.float64) for name, value in part.items()}


def is_out_of_memory(error: BaseException) -> bool:
    """True when an error says that memory ran out, in one of the ways in which libraries say it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return "out of memory" in text or "can't allocate memory" in text or "not enough memory" in text
