"""What other settings would have made of a step: loss, weights and advantages of tokens, gradient, optimiser step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.config.whole import GRPOConfig
from covey.rollout.learning import loss_weights
from covey.training.ledger import token_columns
from covey.training.rerun import Done

Tensors = Mapping[str, Any]


@dataclass(slots=True)
class Changed:
    """The step as it was replayed, and with other settings."""

    settings: list[str]
    metrics: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    gradient: dict[str, float | None] = field(default_factory=dict)
    step: dict[str, float | None] = field(default_factory=dict)
    completions: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def compare_steps(
    before: Done,
    after: Done,
    config: GRPOConfig,
    changed: GRPOConfig,
    settings: Sequence[str],
    weights: tuple[Tensors, Tensors, Tensors] | None = None,
) -> Changed:
    """Put two replays of one step side by side, with the settings of each, and how the others were given.

    `weights`, if there are any: before the step, after it with the run's settings, and after it with the others.
    """
    result = Changed(list(settings))
    one = before.batch
    sides = [_tokens(done, own) for done, own in ((before, config), (after, changed))]
    exists = one.sampled
    here = [{name: side[name][exists] for name in ("advantage", "mask", "weight")} for side in sides]
    a, b = (side["advantage"] for side in here)
    result.tokens = {"tokens": float(exists.sum())} | {
        f"{name}s_changed": float((here[0][name] != here[1][name]).sum()) for name in here[0]
    }
    result.tokens["advantages_of_other_sign"] = float((np.sign(a) != np.sign(b)).sum())
    for when, side in zip(("before", "after"), here, strict=True):
        result.tokens |= {
            f"advantage_mean_abs_{when}": float(np.abs(side["advantage"]).mean()),
            f"weight_min_{when}": float(side["weight"].min()),
            f"weight_max_{when}": float(side["weight"].max()),
        }
    reasons = [_reasons(done) for done in (before, after)]
    for row in range(len(one.episodes)):
        entry: dict[str, Any] = {"row": row, "group": int(one.group[row])}
        for name in ("advantage", "weight", "loss"):
            if all(name in side for side in sides):
                how = np.mean if name == "advantage" else np.sum
                found = [float(how(side[name][row][exists[row]])) if exists[row].any() else 0.0 for side in sides]
                entry |= {f"{name}_before": found[0], f"{name}_after": found[1]}
        entry |= {"masked_by_before": reasons[0][row], "masked_by_after": reasons[1][row]}
        result.completions.append(entry)
    if before.update is None or after.update is None or weights is None:
        return result
    mine, theirs = before.update.metrics, after.update.metrics
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        if not name.startswith("time/"):
            result.metrics[name] = (mine.get(name), theirs.get(name))
    result.gradient = _directions(before.gradient, after.gradient)
    start, one_end, other_end = ({name: _array(tensor) for name, tensor in state.items()} for state in weights)
    result.step = _directions(*({n: end[n] - start[n] for n in start if n in end} for end in (one_end, other_end)))
    return result


def _tokens(done: Done, config: GRPOConfig) -> dict[str, NDArray[Any]]:
    """`[N, T]` of the first pass over the batch."""
    batch = done.batch if done.update is None else done.update.batch
    weight, _ = loss_weights(batch, config.algorithm.objective(), config.sampling.max_completion_length)
    found: dict[str, NDArray[Any]] = {"advantage": batch.advantages, "mask": batch.mask, "weight": weight}
    loss = np.zeros(batch.mask.shape)
    for each in done.passes:
        try:
            own = token_columns(each)["loss"]
        except KeyError:  # a KL over the vocabulary: contributions are not known from the tokens
            return found
        if each.part is None:
            return found | {"loss": own} if each.number == 0 else found
        loss[each.part] = own  # mini-batches, of the first pass over the batch and then of the others
    return found | {"loss": loss} if done.passes else found


def _reasons(done: Done) -> list[str]:
    batch = done.batch if done.update is None else done.update.batch
    return [
        ", ".join(name for name, out in batch.excluded.items() if out[row].any()) for row in range(len(batch.episodes))
    ]


def _directions(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float | None]:
    """Cosine and norms of two sets of tensors; no cosine where one is 0."""
    dot = squares_one = squares_other = 0.0
    for name in sorted({*one, *other}):
        a, b = (np.asarray(side[name], np.float64).ravel() if name in side else None for side in (one, other))
        squares_one += 0.0 if a is None else float(a @ a)
        squares_other += 0.0 if b is None else float(b @ b)
        dot += 0.0 if a is None or b is None else float(a @ b)
    norms = float(np.sqrt(squares_one)), float(np.sqrt(squares_other))
    cosine = dot / (norms[0] * norms[1]) if min(norms) > 0 else None
    return {"cosine": cosine, "norm_before": norms[0], "norm_after": norms[1]}


def _array(tensor: Any) -> NDArray[np.float64]:
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu().float().numpy()
    return np.asarray(tensor, np.float64)
