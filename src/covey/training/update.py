"""One step's worth of learning from a batch: reference, masks, and optimiser steps.

There are `num_iterations` passes over the batch, each of `num_minibatches` optimiser steps on parts of it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.algorithms import Objective, mean_metrics
from covey.algorithms.masks import masks_by_policy, policy_masks
from covey.config.algorithm import AlgorithmConfig
from covey.rollout.learning import Gradients, Learner, rows_with_gradient
from covey.training.schedule import TrainerState
from covey.types import Batch, BoolArray

_EXTREMES = ("min", "mean", "max")


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
    part: NDArray[np.int64] | None
    batch: Batch
    rows: NDArray[np.int64]
    objective: Objective
    gradients: Gradients
    options: Mapping[str, Any]


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
    result, objective = Update(batch), algorithm.objective()
    state = TrainerState() if state is None else state
    rows = rows_with_gradient(batch, objective)
    if len(rows) == 0:
        result.skipped = _why_nothing(batch)
        result.metrics = {"loss": 0.0, "grad_norm": 0.0, "time/reference": 0.0, "time/update": 0.0}
        result.metrics |= _mask_metrics(batch, batch)
        return result

    looks_at_policy = masks_by_policy(algorithm) or objective.loss.select is not None
    wanted = algorithm.masks_by_entropy or objective.loss.entropy
    drift = algorithm.reference_drift
    # Below 1e-3 nats rounding could decide on which side a policy is that has not left the reference.
    known = on_policy and looks_at_policy and not wanted and (drift is None or abs(drift[0]) >= 1e-3)
    if looks_at_policy:
        # What looks at the policy is taken over all rows of the step, tied groups too.
        rows = np.union1d(rows, np.flatnonzero(batch.mask.any(axis=1)))
    reference = None
    if objective.estimates_kl or drift is not None:
        reference, _ = learner.scores(batch, rows, temperature=temperature, reference=True)
    referenced = time.perf_counter()

    rates = _rates(learning_rates, algorithm)
    parts = _parts(_own_rows(batch), len(batch.episodes), algorithm.num_minibatches, stream)
    trainer_old = None
    if algorithm.correction is not None and len(parts) > 1 and not looks_at_policy:
        trainer_old, _ = learner.scores(batch, rows, temperature=temperature)
    passes: list[dict[str, float]] = []
    tokens: Counter[str] = Counter()
    masks: list[dict[str, float]] = []
    masked, selected = batch, None
    for step, learning_rate in enumerate(rates):
        iteration, part = step // len(parts), parts[step % len(parts)]
        if step % len(parts) == 0:
            masked, selected = batch, None
            if looks_at_policy:
                if step == 0 and known:
                    current, uncertainty = batch.old_logprobs, None
                else:
                    current, uncertainty = learner.scores(batch, rows, temperature=temperature, entropy=wanted)
                masked = _mask_by_policy(batch, algorithm, current, reference, uncertainty)
                if iteration == 0:
                    trainer_old = current  # of all rows: one that is masked in the first pass may take part later
                    if not known:
                        result.metrics |= _mismatch_metrics(batch, current, batch.mask, algorithm)
                if objective.loss.select is not None:
                    old = batch.old_logprobs if algorithm.correction is None else trainer_old
                    selected = np.asarray(objective.select(current, old, masked.advantages, masked.mask, uncertainty))
            result.batch = replace(masked, advantages=batch.advantages)
            masks.append(_mask_metrics(batch, masked))
        trained = _rows_of(masked, part)
        rows_now = rows_with_gradient(trained, objective)
        if len(rows_now) == 0:
            if len(parts) > 1:
                continue
            result.skipped = "" if result.optimizer_steps else _why_nothing(masked)
            break
        options: dict[str, Any] = {
            "temperature": temperature,
            "max_completion_length": max_completion_length,
            "reference": _at(reference, part),
            "trainer_old": _at(trainer_old, part),
            "correction": algorithm.correction,
            "selected": _at(selected, part),
            "entropy_coef": algorithm.entropy_weight(state.entropy_coef, state.last_entropy),
        }
        gradients = learner.forward_backward(trained, rows_now, objective, **options)
        if observe is not None:
            observe(Pass(step, part, trained, rows_now, objective, gradients, options))
        norm = learner.optim_step(learning_rate)
        if step == 0 and (known or not looks_at_policy):
            result.metrics |= _mismatch_metrics(trained, gradients.logp, gradients.scored, algorithm)
            if len(parts) == 1 and not looks_at_policy:
                trainer_old = _among_all(gradients.logp, parts[0], batch)
        passes.append(_loss_metrics(gradients) | {"grad_norm": norm})
        if gradients.tokens is not None:
            tokens.update({f"tokens/{kind}": count for kind, count in asdict(gradients.tokens).items()})
        if algorithm.adaptive_entropy is not None and np.isfinite(norm):
            state.last_entropy = gradients.metrics.get("bonus_entropy", passes[-1]["entropy"])
            state.entropy_coef = algorithm.next_entropy_coef(state.entropy_coef, state.last_entropy)
        if state.entropy_coef is not None:
            passes[-1]["entropy_coef"] = state.entropy_coef
        scale = getattr(learner, "loss_scale", None)  # of PyTorch's learner, where there is float16
        if scale is not None:
            result.metrics["loss_scale"] = scale.value
            result.metrics["skipped_steps"] = result.metrics.get("skipped_steps", 0.0) + (not np.isfinite(norm))
        if not np.isfinite(norm):
            whose = f" (loss {objective.loss.name!r})" if ":" in objective.loss.name else ""
            result.skipped = f"the gradient's norm is {norm}: no optimiser step was taken{whose}"
            if scale is not None:
                result.skipped += f", and float16's loss scale is halved to {scale.value:g}"
            break
        result.optimizer_steps += 1
    if not passes and not result.skipped:
        result.skipped = _why_nothing(masked)
    result.metrics |= _of_all_passes(passes) | _means(masks) | tokens
    if objective.beta and "kl" in result.metrics:
        result.metrics["kl_penalty"] = objective.beta * result.metrics["kl"]
    result.metrics.setdefault("loss", 0.0)
    result.metrics.setdefault("grad_norm", 0.0)
    result.metrics["time/reference"] = referenced - began
    result.metrics["time/update"] = time.perf_counter() - referenced
    return result


def _rates(learning_rates: float | Sequence[float], algorithm: AlgorithmConfig) -> Sequence[float]:
    """One learning rate for each optimiser step."""
    steps = algorithm.optimizer_steps
    return [learning_rates] * steps if isinstance(learning_rates, float | int) else learning_rates[:steps]


def _own_rows(batch: Batch) -> NDArray[np.int64] | None:
    """Rows that count in denominators, None = all: what `down_sampling` left out is as if it had not been sampled."""
    left_out = batch.excluded.get("down_sampling")
    return None if left_out is None or not left_out.any() else np.flatnonzero(~left_out.any(axis=1))


def _parts(
    rows: NDArray[np.int64] | None, among: int, count: int, stream: Sequence[int]
) -> list[NDArray[np.int64] | None]:
    """Random ones of these rows, of a batch of so many, for each mini-batch, ascending within it; None = all rows."""
    if count == 1:
        return [rows]
    rows = np.arange(among) if rows is None else rows
    order = rows[np.random.default_rng(list(stream)).permutation(len(rows))]
    return [np.sort(part) for part in np.array_split(order, max(1, min(count, len(rows))))]


def _at(values: NDArray[Any] | None, rows: NDArray[np.int64] | None) -> Any:
    return values if values is None or rows is None else values[rows]


def _among_all(values: NDArray[np.float32], rows: NDArray[np.int64] | None, batch: Batch) -> NDArray[np.float32]:
    """Values of some rows where the whole batch has them, 0 elsewhere."""
    if rows is None:
        return values
    whole = np.zeros(batch.mask.shape, values.dtype)
    whole[rows] = values
    return whole


def _rows_of(batch: Batch, rows: NDArray[np.int64] | None) -> Batch:
    """Some rows of a batch, as a batch whose denominators are its own."""
    if rows is None:
        return batch
    return replace(
        batch,
        episodes=tuple(batch.episodes[row] for row in rows),
        group=batch.group[rows],
        advantages=batch.advantages[rows],
        mask=batch.mask[rows],
        old_logprobs=batch.old_logprobs[rows],
        excluded={name: tokens[rows] for name, tokens in batch.excluded.items()},
    )


def _mask_by_policy(
    batch: Batch,
    algorithm: AlgorithmConfig,
    current: NDArray[np.float32],
    reference: NDArray[np.float32] | None,
    entropy: NDArray[np.float32] | None,
) -> Batch:
    """The batch as this pass trains on it, with advantages of 0 where a mask takes the surrogate."""
    left = policy_masks(algorithm, current, batch.old_logprobs, reference, entropy, batch.advantages, batch.mask)
    reasons = dict(batch.excluded) | {name: np.asarray(tokens) for name, tokens in left.excluded.items()}
    return replace(batch, advantages=left.advantages, mask=np.asarray(left.mask), excluded=reasons)


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
    batch: Batch, logp: NDArray[np.float32], scored: BoolArray, algorithm: AlgorithmConfig
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
