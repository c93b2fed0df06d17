"""One step's worth of learning from a batch: reference, masks, and optimiser steps.

There are `num_iterations` passes over the batch, each of `num_minibatches` optimiser steps on parts of it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.algorithms import Objective, mean_metrics
from covey.algorithms.masks import masks_by_policy, policy_masks
from covey.config.algorithm import AlgorithmConfig
from covey.rollout.learning import FloatNT, Gradients, Learner, PassOptions, rows_with_gradient, teacher_logprobs
from covey.training.schedule import TrainerState
from covey.types import Batch, BoolArray

Rows = NDArray[np.int64] | None
"""Of a batch; None = all."""
_EXTREMES = ("min", "mean", "max")
_METRICS = {
    "loss": "loss",
    "policy_loss": "policy_loss",
    "clip_low": "clip_ratio/low_mean",
    "clip_high": "clip_ratio/high_mean",
    "clip_region": "clip_ratio/region_mean",
    "ratio": "ratio/mean",
    "ratio_min": "ratio/min",
    "ratio_max": "ratio/max",
    "kl": "kl",
    "entropy": "entropy",
}
"""Names of the objective's metrics, and of a run's."""


@dataclass(slots=True, eq=False)
class Update:
    """What a step's update did."""

    batch: Batch
    metrics: dict[str, Any] = field(default_factory=dict)
    optimizer_steps: int = 0
    skipped: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """What one optimiser step is about to be taken with, for those who want to look at it."""

    number: int
    part: Rows
    batch: Batch
    rows: NDArray[np.int64]
    objective: Objective
    gradients: Gradients
    options: PassOptions


class _Views:
    """What masks, and the loss's choice of tokens, look at: the policy's log-probabilities on the whole batch.

    Attributes:
        rows: of the batch that are scored.
        old: `[N, T]` the policy's log-probabilities before the first optimiser step; None until something tells them.
        masked: the batch as a pass trains on it, with advantages of 0 where a mask takes the surrogate.
        selected: `[N, T]` tokens that the loss chooses; None = it does not choose.
    """

    def __init__(
        self, learner: Learner, batch: Batch, algorithm: AlgorithmConfig, temperature: float, *, on_policy: bool
    ) -> None:
        self.batch = self.masked = batch
        self.algorithm, self.objective = algorithm, algorithm.objective()
        self.selected: BoolArray | None = None
        self.old: FloatNT | None = None
        self.reference: FloatNT | None = None
        drift = algorithm.reference_drift
        self._ask = masks_by_policy(algorithm) or self.objective.loss.select is not None
        self._entropies = algorithm.top_entropy_quantile < 1 or self.objective.loss.entropy
        # Below 1e-3 nats rounding could decide on which side a policy is that has not left the reference.
        near = drift is not None and abs(drift[0]) < 1e-3
        self._are_samplers = on_policy and self._ask and not self._entropies and not near
        self.rows = rows_with_gradient(batch, self.objective)
        if self._ask and len(self.rows):
            # What looks at the policy is taken over all rows of the step, tied groups too.
            self.rows = np.union1d(self.rows, np.flatnonzero(batch.mask.any(axis=1)))
        self._score = partial(learner.scores, batch, self.rows, temperature=temperature)
        self._now: tuple[FloatNT | None, FloatNT | None] = (None, None)

    def score_reference(self) -> None:
        """Under the reference, where anything asks for it."""
        if self.objective.estimates_kl or self.algorithm.reference_drift is not None:
            self.reference, _ = self._score(reference=True)

    def score_old(self, parts: int) -> dict[str, float]:
        """The policy before the first of `parts` optimiser steps, where the first pass itself will not tell; metrics.

        Of all rows: one that is masked in the first pass may take part later.
        """
        if self._are_samplers:
            self._now = self.batch.old_logprobs, None
        elif self._ask or (self.algorithm.correction is not None and parts > 1):
            self._now = self._score(entropy=self._ask and self._entropies)
        self.old = self._now[0]
        if self.old is None or self._are_samplers or not self._ask:
            return {}
        return _mismatch_metrics(self.batch, self.old, self.batch.mask, self.algorithm)

    def mask(self, *, first: bool) -> None:
        """Choose the tokens of the next round of passes by the policy as it is now."""
        if not self._ask:
            return
        current, entropy = self._now if first else self._score(entropy=self._entropies)
        assert current is not None
        batch, sampler = self.batch, self.batch.old_logprobs
        left = policy_masks(self.algorithm, current, sampler, self.reference, entropy, batch.advantages, batch.mask)
        reasons = dict(batch.excluded) | {name: np.asarray(tokens) for name, tokens in left.excluded.items()}
        self.masked = replace(batch, advantages=left.advantages, mask=np.asarray(left.mask), excluded=reasons)
        if self.objective.loss.select is not None:
            before = sampler if self.algorithm.correction is None else self.old
            chosen = self.objective.select(current, before, left.advantages, self.masked.mask, entropy)
            self.selected = np.asarray(chosen)

    def told_by(self, done: Pass, *, alone: bool) -> dict[str, float]:
        """Log-probabilities of the first pass, which are the policy's before any step; metrics."""
        if self._ask and not self._are_samplers:
            return {}
        logp = done.gradients.logp
        if alone and not self._ask:
            self.old = np.zeros(self.batch.mask.shape, logp.dtype)  # 0 in rows that do not count
            self.old[slice(None) if done.part is None else done.part] = logp
        return _mismatch_metrics(done.batch, logp, done.gradients.scored, self.algorithm)


def update(
    learner: Learner,
    batch: Batch,
    algorithm: AlgorithmConfig,
    learning_rates: float | Sequence[float],
    *,
    temperature: float,
    max_completion_length: int,
    state: TrainerState | None = None,
    stream: Sequence[int] = (0,),
    observe: Callable[[Pass], None] | None = None,
    on_policy: bool = False,
) -> Update:
    """Train on one batch.

    A batch in which no row can have a gradient (all groups tied, everything masked) takes no optimiser step at all:
    AdamW's momentum would otherwise move the weights without a reason.
    """
    began = time.perf_counter()
    result, state = Update(batch), TrainerState() if state is None else state
    views = _Views(learner, batch, algorithm, temperature, on_policy=on_policy)
    if len(views.rows) == 0:
        result.skipped = _why_nothing(batch)
        result.metrics = {"loss": 0.0, "grad_norm": 0.0, "time/reference": 0.0, "time/update": 0.0}
        result.metrics |= _mask_metrics(batch, batch)
        return result
    views.score_reference()
    referenced = time.perf_counter()

    steps = algorithm.optimizer_steps
    rates = [learning_rates] * steps if isinstance(learning_rates, float | int) else learning_rates[:steps]
    parts = _parts(batch, algorithm.num_minibatches, stream)
    result.metrics |= views.score_old(len(parts))
    passes: list[dict[str, float]] = []
    masks: list[dict[str, float]] = []
    tokens: Counter[str] = Counter()
    for number, learning_rate in enumerate(rates):
        part = parts[number % len(parts)]
        if number % len(parts) == 0:
            views.mask(first=number == 0)
            result.batch = replace(views.masked, advantages=batch.advantages)
            masks.append(_mask_metrics(batch, views.masked))
        done = _pass(number, part, learner, views, state, temperature, max_completion_length)
        if done is None:
            if len(parts) > 1:
                continue
            result.skipped = "" if result.optimizer_steps else _why_nothing(views.masked)
            break
        if observe is not None:
            observe(done)
        norm = learner.optim_step(learning_rate)
        if number == 0:
            result.metrics |= views.told_by(done, alone=len(parts) == 1)
        passes.append(_pass_metrics(done.gradients, norm, algorithm, state) | _taught_metrics(done))
        if done.gradients.tokens is not None:
            tokens.update({f"tokens/{kind}": count for kind, count in asdict(done.gradients.tokens).items()})
        scale = getattr(learner, "loss_scale", None)  # of PyTorch's learner, where there is float16
        if scale is not None:
            result.metrics["loss_scale"] = scale.value
            result.metrics["skipped_steps"] = result.metrics.get("skipped_steps", 0.0) + (not np.isfinite(norm))
        if not np.isfinite(norm):
            loss = views.objective.loss.name
            whose = f" (loss {loss!r})" if ":" in loss else ""
            halved = "" if scale is None else f", and float16's loss scale is halved to {scale.value:g}"
            result.skipped = f"the gradient's norm is {norm}: no optimiser step was taken{whose}{halved}"
            break
        result.optimizer_steps += 1
    if not passes and not result.skipped:
        result.skipped = _why_nothing(views.masked)
    result.metrics |= {"loss": 0.0, "grad_norm": 0.0} | _of_all_passes(passes) | _means(masks) | tokens
    if views.objective.beta and "kl" in result.metrics:
        result.metrics["kl_penalty"] = views.objective.beta * result.metrics["kl"]
    result.metrics["time/reference"] = referenced - began
    result.metrics["time/update"] = time.perf_counter() - referenced
    return result


def _pass(
    number: int, part: Rows, learner: Learner, views: _Views, state: TrainerState, temperature: float, longest: int
) -> Pass | None:
    """Leave the gradient of one part of the batch in the policy's parameters; None where no row has one."""
    trained, algorithm = _rows_of(views.masked, part), views.algorithm
    rows = rows_with_gradient(trained, views.objective)
    if len(rows) == 0:
        return None
    options: PassOptions = {
        "temperature": temperature,
        "max_completion_length": longest,
        "reference": _at(views.reference, part),
        "trainer_old": _at(views.old, part),
        "correction": algorithm.correction,
        "selected": _at(views.selected, part),
        "entropy_coef": algorithm.entropy_weight(state.entropy_coef, state.last_entropy),
    }
    gradients = learner.forward_backward(trained, rows, views.objective, **options)
    return Pass(number, part, trained, rows, views.objective, gradients, options)


def _pass_metrics(
    gradients: Gradients, norm: float, algorithm: AlgorithmConfig, state: TrainerState
) -> dict[str, float]:
    """Of one pass; the adaptive entropy bonus moves on by it."""
    means = mean_metrics(gradients.metrics)
    found = {name: means[ours] for ours, name in _METRICS.items() if ours in means} | {"grad_norm": norm}
    if algorithm.adaptive_entropy is not None and np.isfinite(norm):
        state.last_entropy = gradients.metrics.get("bonus_entropy", found["entropy"])
        state.entropy_coef = algorithm.next_entropy_coef(state.entropy_coef, state.last_entropy)
    if state.entropy_coef is not None:
        found["entropy_coef"] = state.entropy_coef
    return found


def _taught_metrics(done: Pass) -> dict[str, float]:
    """Means over tokens of one pass, where the teacher's distributions were compared with the policy's."""
    said, how, found = teacher_logprobs(done.batch, done.objective), done.objective.teacher, done.gradients
    there = None if said is None else np.isfinite(said) & done.batch.mask & found.scored
    if how is None or there is None or not there.any() or found.divergence is None or found.mass is None:
        return {}
    over = {"divergence": found.divergence} | ({"mass": found.mass} if how.top_k else {})
    return {f"teacher/{name}": float(values[there].mean()) for name, values in over.items()}


def _own_rows(batch: Batch) -> Rows:
    """Rows that count in denominators, None = all: what `down_sampling` left out is as if it had not been sampled."""
    left_out = batch.excluded.get("down_sampling")
    return None if left_out is None or not left_out.any() else np.flatnonzero(~left_out.any(axis=1))


def _parts(batch: Batch, count: int, stream: Sequence[int]) -> list[Rows]:
    """Random rows for each mini-batch, ascending within it."""
    rows = _own_rows(batch)
    if count == 1:
        return [rows]
    rows = np.arange(len(batch.episodes)) if rows is None else rows
    order = rows[np.random.default_rng(list(stream)).permutation(len(rows))]
    return [np.sort(part) for part in np.array_split(order, max(1, min(count, len(rows))))]


def _at(values: NDArray[Any] | None, rows: Rows) -> Any:
    return values if values is None or rows is None else values[rows]


def _rows_of(batch: Batch, rows: Rows) -> Batch:
    """Some rows of a batch, as a batch whose denominators are its own."""
    if rows is None:
        return batch
    said = batch.teacher
    return replace(
        batch,
        episodes=tuple(batch.episodes[row] for row in rows),
        group=batch.group[rows],
        advantages=batch.advantages[rows],
        mask=batch.mask[rows],
        old_logprobs=batch.old_logprobs[rows],
        excluded={name: tokens[rows] for name, tokens in batch.excluded.items()},
        teacher=said and said.of(rows),
    )


def _why_nothing(batch: Batch) -> str:
    masks = [name for name, tokens in batch.excluded.items() if tokens.any()]
    if not batch.mask.any():
        return f"nothing to train on: every token is masked ({', '.join(masks) or 'no sampled token'})"
    silent = "of a group whose rewards are equal" if batch.group_relative else "has the advantage 0"
    if masks:
        return f"nothing to train on: every token is masked ({', '.join(masks)}) or {silent}"
    if not batch.group_relative:
        return "nothing to train on: all advantages are 0"
    return "nothing to train on: the rewards in every group are equal, so no completion is better than another"


def _of_all_passes(passes: list[dict[str, float]]) -> dict[str, float]:
    """Means over the passes; extremes are those of any."""
    if not passes:
        return {}
    lows = {"clip_ratio/low_min": "clip_ratio/low_mean", "ratio/min": "ratio/min"}
    highs = {"clip_ratio/high_max": "clip_ratio/high_mean", "ratio/max": "ratio/max"}
    found = _means(passes) | {name: min(each[of] for each in passes) for name, of in lows.items()}
    return found | {name: max(each[of] for each in passes) for name, of in highs.items()}


def _means(passes: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in passes for name in each)
    return {name: float(np.mean([each[name] for each in passes if name in each])) for name in names}


def _mismatch_metrics(
    batch: Batch, logp: NDArray[np.float32], scored: BoolArray, algorithm: AlgorithmConfig
) -> dict[str, float]:
    """Sampler against trainer, by the first pass, which runs under the sampling weights unless the batch is stale."""
    signed = (logp - batch.old_logprobs)[scored]
    if signed.size == 0:
        return {}
    found = {
        "sampling/sampling_logp_difference/mean": float(np.abs(signed).mean()),
        "sampling/sampling_logp_difference/max": float(np.abs(signed).max()),
    }
    if algorithm.correction is not None:
        ratio = np.exp(np.clip(signed.astype(np.float64), -700, 700))  # further away no ratio has a float
        found |= {f"sampling/importance_sampling_ratio/{name}": float(getattr(ratio, name)()) for name in _EXTREMES}
    return found


def _mask_metrics(before: Batch, after: Batch) -> dict[str, float]:
    exists = before.mask.copy()
    for tokens in before.excluded.values():
        exists |= tokens
    total = max(int(exists.sum()), 1)
    metrics = {f"mask/{name}": float(tokens.sum() / total) for name, tokens in after.excluded.items()}
    masks = {name: tokens for name, tokens in after.excluded.items() if name != "down_sampling"}
    if masks:
        left = (exists & ~np.any(list(masks.values()), axis=0)).any(axis=1)
        rows = _own_rows(after)
        metrics["mask_ratio"] = float((left if rows is None else left[rows]).mean())
    return metrics
