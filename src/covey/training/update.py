"""One step's worth of learning from a batch: reference, masks, `num_iterations` passes of gradient and optimiser."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.algorithms import (
    KL_ESTIMATORS,
    Objective,
    combine_masks,
    mean_metrics,
    off_policy_mask,
    reference_drift_mask,
    top_entropy_mask,
    without_surrogate,
)
from covey.rollout.learning import Correction, Gradients, Learner, rows_with_gradient
from covey.types import Batch, BoolArray

_EXTREMES = ("min", "mean", "max")


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """What the update of a step needs to know. Names are those of the config sections.

    Attributes:
        objective: what is minimised.
        temperature: of the distribution that the completions were sampled from.
        max_completion_length: in tokens.
        correction: truncated importance sampling, None = off. It leads from the policy that sampled to the one before
            the first pass, which is then the old policy of ratio and clip; see `Learner.forward_backward`.
    """

    objective: Objective
    temperature: float
    max_completion_length: int
    num_iterations: int = 1
    correction: Correction | None = None
    off_policy_mask_threshold: float | None = None
    reference_drift_threshold: float | None = None
    reference_drift_reduction: str = "per_token_mean"
    top_entropy_quantile: float = 1.0

    @property
    def needs_reference(self) -> bool:
        """True when sampled-token log-probabilities under the reference are used."""
        estimated = self.objective.beta > 0 and self.objective.kl_estimator in KL_ESTIMATORS
        return estimated or self.reference_drift_threshold is not None

    @property
    def masks_by_policy(self) -> bool:
        """True when a mask depends on the current policy's log-probabilities, which costs a forward pass before."""
        return (
            self.off_policy_mask_threshold is not None
            or self.reference_drift_threshold is not None
            or self.top_entropy_quantile < 1
        )


@dataclass(slots=True, eq=False)
class Update:
    """What a step's update did.

    Attributes:
        metrics: under the names of `covey.observe.metric_names`.
        optimizer_steps: number of steps taken; 0 when nothing could be learned or the gradient was not finite.
        skipped: why nothing was trained, "" if something was.
        batch: the batch with the masks of the last pass.
    """

    batch: Batch
    metrics: dict[str, Any] = field(default_factory=dict)
    optimizer_steps: int = 0
    skipped: str = ""


def update(learner: Learner, batch: Batch, settings: UpdateSettings, learning_rate: float) -> Update:
    """Train on one batch.

    A batch in which no row can have a gradient (all groups tied, everything masked) takes no optimiser step at all:
    AdamW's momentum would otherwise move the weights without a reason.
    """
    began = time.perf_counter()
    result = Update(batch)
    rows = rows_with_gradient(batch, settings.objective)
    if len(rows) == 0:
        result.skipped = _why_nothing(batch)
        result.metrics = {"loss": 0.0, "grad_norm": 0.0, "time/reference": 0.0, "time/update": 0.0}
        result.metrics |= _mask_metrics(batch, batch)
        return result

    if settings.masks_by_policy:
        # Such a mask is taken over all rows of the step, tied groups too.
        rows = np.union1d(rows, np.flatnonzero(batch.mask.any(axis=1)))
    reference = None
    if settings.needs_reference:
        reference, _ = learner.scores(batch, rows, temperature=settings.temperature, reference=True)
    referenced = time.perf_counter()

    trainer_old = None
    passes: list[dict[str, float]] = []
    masks: list[dict[str, float]] = []
    for iteration in range(settings.num_iterations):
        masked = batch
        if settings.masks_by_policy:
            masked, current = _mask_by_policy(learner, batch, rows, settings, reference)
            if iteration == 0:
                trainer_old = current  # of all rows: one that is masked in the first pass may take part in a later one
                result.metrics |= _mismatch_metrics(batch, current, batch.mask, settings)
        rows_now = rows_with_gradient(masked, settings.objective)
        result.batch = replace(masked, advantages=batch.advantages)
        masks.append(_mask_metrics(batch, masked))
        if len(rows_now) == 0:
            result.skipped = "" if result.optimizer_steps else _why_nothing(masked)
            break
        gradients = learner.forward_backward(
            masked,
            rows_now,
            settings.objective,
            temperature=settings.temperature,
            max_completion_length=settings.max_completion_length,
            reference=reference,
            trainer_old=trainer_old,
            correction=settings.correction,
        )
        norm = learner.optim_step(learning_rate)
        if iteration == 0 and trainer_old is None:
            trainer_old = gradients.logp
            result.metrics |= _mismatch_metrics(batch, gradients.logp, gradients.scored, settings)
        passes.append(_loss_metrics(gradients) | {"grad_norm": norm})
        if not np.isfinite(norm):
            result.skipped = f"the gradient's norm is {norm}: no optimiser step was taken"
            break
        result.optimizer_steps += 1
    result.metrics |= _of_all_passes(passes) | _means(masks)
    result.metrics.setdefault("loss", 0.0)
    result.metrics.setdefault("grad_norm", 0.0)
    result.metrics["time/reference"] = referenced - began
    result.metrics["time/update"] = time.perf_counter() - referenced
    return result


def _mask_by_policy(
    learner: Learner,
    batch: Batch,
    rows: NDArray[np.int64],
    settings: UpdateSettings,
    reference: NDArray[np.float32] | None,
) -> tuple[Batch, NDArray[np.float32]]:
    """Masks that depend on the policy are taken over the whole step, before the pass that they act on.

    Returns:
        The batch as this pass trains on it, with advantages of 0 where a mask takes the surrogate, and the policy's
        log-probabilities `[N, T]` of the rows.
    """
    want_entropy = settings.top_entropy_quantile < 1
    current, entropy = learner.scores(batch, rows, temperature=settings.temperature, entropy=want_entropy)
    keep: dict[str, Any] = {}
    acting: dict[str, Any] = {}
    if settings.off_policy_mask_threshold is not None:
        acting["off_policy_mask"] = off_policy_mask(
            current, batch.old_logprobs, batch.advantages, batch.mask, settings.off_policy_mask_threshold
        )
    if settings.reference_drift_threshold is not None:
        assert reference is not None
        keep["reference_drift_mask"] = reference_drift_mask(
            current,
            reference,
            batch.mask,
            settings.reference_drift_threshold,
            settings.reference_drift_reduction,
        )
    if entropy is not None:
        acting["top_entropy_quantile"] = top_entropy_mask(entropy, batch.mask, settings.top_entropy_quantile)
    mask, excluded = combine_masks(batch.mask, keep)
    advantages, quiet = without_surrogate(batch.advantages, batch.mask, acting)
    reasons = dict(batch.excluded) | {name: np.asarray(tokens) for name, tokens in (excluded | quiet).items()}
    return replace(batch, advantages=advantages, mask=np.asarray(mask), excluded=reasons), current


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


def _loss_metrics(gradients: Gradients) -> dict[str, float]:
    means = mean_metrics(gradients.metrics)
    found = {
        "loss": means["loss"],
        "policy_loss": means["policy_loss"],
        "clip_ratio/low_mean": means["clip_low"],
        "clip_ratio/high_mean": means["clip_high"],
        "clip_ratio/region_mean": means["clip_region"],
        "ratio/mean": means["ratio"],
        "ratio/min": means["ratio_min"],
        "ratio/max": means["ratio_max"],
    }
    if "kl" in means:
        found["kl"] = means["kl"]
    if "entropy" in means:
        found["entropy"] = means["entropy"]
    return found


def _of_all_passes(passes: list[dict[str, float]]) -> dict[str, float]:
    """Means over the passes; extremes are those of any."""
    if not passes:
        return {}
    found = _means(passes)
    found["clip_ratio/low_min"] = min(each["clip_ratio/low_mean"] for each in passes)
    found["clip_ratio/high_max"] = max(each["clip_ratio/high_mean"] for each in passes)
    return found | {
        "ratio/min": min(each["ratio/min"] for each in passes),
        "ratio/max": max(each["ratio/max"] for each in passes),
    }


def _means(passes: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([each[name] for each in passes])) for name in passes[0]}


def _mismatch_metrics(
    batch: Batch, logp: NDArray[np.float32], scored: BoolArray, settings: UpdateSettings
) -> dict[str, float]:
    """Sampler against trainer: the first pass runs before any optimiser step, under the weights that sampled unless
    the batch is stale.
    """
    signed = (logp - batch.old_logprobs)[scored]
    if signed.size == 0:
        return {}
    found = {
        "sampling/sampling_logp_difference/mean": float(np.abs(signed).mean()),
        "sampling/sampling_logp_difference/max": float(np.abs(signed).max()),
    }
    if settings.correction is not None:
        ratio = np.exp(signed.astype(np.float64))
        found |= {f"sampling/importance_sampling_ratio/{name}": float(getattr(ratio, name)()) for name in _EXTREMES}
    return found


def _mask_metrics(before: Batch, after: Batch) -> dict[str, float]:
    exists = before.mask.copy()
    for tokens in before.excluded.values():
        exists |= tokens
    total = max(int(exists.sum()), 1)
    metrics = {f"mask/{name}": float(tokens.sum() / total) for name, tokens in after.excluded.items()}
    if after.excluded:
        left = exists & ~np.any(list(after.excluded.values()), axis=0)
        metrics["mask_ratio"] = float(left.any(axis=1).mean())
    return metrics
