"""A teacher's log-probabilities of what the policy sampled, as advantages of single tokens.

    gap g       log q(y) - log p(y): what the teacher q says of a token beyond what the policy p said when it sampled it
    sum         task_coef A + coef G,  G_t = sum over k >= t of discount^(k - t) g_k
    reweigh     A ((1 - s) + s clip(exp(sign(A) g), 1 - r, 1 + r)): the sign stays the reward's
    gate        A + coef sigmoid(slope g): every token is raised, more where the teacher likes it
    position    sum, with g_t (1 + slope (1 - share of sum |g| before t)): early tokens count more

`g` alone as the advantage has the gradient of KL(p||q) on the policy's own samples ("on-policy distillation"). The part
is added after the group's statistics and is not normalised: it is in nats, and 0 means that the teacher agrees.
Sources, of arXiv: MiniLLM 2306.08543 (discount 1), MOPD 2601.02780 (sum), RLSD 2604.03128 (reweigh), SDAR 2605.15155
(gate), IW-OPD 2606.22600 (position).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import update_wrapper
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.algorithms.advantages import discounted_returns
from covey.algorithms.estimators import Estimator
from covey.algorithms.kl import Use
from covey.algorithms.outcomes import Outcomes
from covey.types import Batch, Group

Floats = NDArray[np.float64]


def gap(teacher: NDArray[Any], old: NDArray[Any], *, skip: int = 0, clip: float | None = None) -> Floats:
    """`[N, T]` gaps in nats; NaN where there is no teacher, and on the first `skip` sampled tokens of a row.

    `teacher` and `old` are `[N, T]` log-probabilities under the teacher (NaN where there is none) and of the sampler.
    `clip` bounds the size of a gap.
    """
    found: Floats = np.asarray(teacher, np.float64) - old
    found[:, :skip] = np.nan
    return found if clip is None else found.clip(-clip, clip)


def to_go(gaps: Floats, discount: float) -> Floats:
    """`[N, T]` discounted sums of the gaps from each sampled token to the end of its row; NaN stays NaN.

    Discount 0 gives the gaps themselves, and 1 the gradient of the KL of whole sequences.
    """
    return np.where(np.isnan(gaps), np.nan, discounted_returns(np.nan_to_num(gaps), discount))


def earlier_more(gaps: Floats, slope: float) -> Floats:
    """`[N, T]` gaps times `1 + slope (1 - share of the row's sum |g| that lies before the token)`."""
    size = np.nan_to_num(np.abs(gaps))
    before, whole = np.cumsum(size, axis=1) - size, size.sum(axis=1, keepdims=True)
    share = np.divide(before, whole, out=np.zeros_like(before), where=whole > 0)
    return np.asarray(gaps * (1 + slope * (1 - share)))


def prepared(gaps: Floats, *, use: Use, discount: float = 0.0, position_slope: float = 0.5) -> Floats:
    """`[N, T]` what `combined` takes of the gaps of a step's rows."""
    if use == "position":
        gaps = earlier_more(gaps, position_slope)
    return to_go(gaps, discount) if use in ("sum", "position") else gaps


def combined(
    task: Floats,
    gaps: Floats,
    *,
    use: Use,
    coef: float = 1.0,
    task_coef: float = 1.0,
    reweigh_share: float = 0.5,
    reweigh_range: float = 0.2,
    gate_slope: float = 5.0,
) -> Floats:
    """`[N, T]` advantages of the task `[N, 1]` or `[N, T]` and of the teacher; the task's alone where there is none."""
    there, g = np.isfinite(gaps), np.nan_to_num(gaps)
    if use == "reweigh":
        factor = np.exp(np.minimum(np.sign(task) * g, 50.0)).clip(1 - reweigh_range, 1 + reweigh_range)
        return task * np.where(there, 1 - reweigh_share + reweigh_share * factor, 1.0)
    if use == "gate":
        with np.errstate(over="ignore"):
            return task + np.where(there, coef / (1 + np.exp(-gate_slope * g)), 0.0)
    return task_coef * task + np.where(there, coef * g, 0.0)


def taught(estimator: Estimator, may_teach: Callable[[Group], bool], **how: Any) -> Estimator:
    """The estimator with a teacher's part added to its advantages; `how` are arguments of `combined`. With `use="loss"`
    they stay as they are: the teacher is a term of the loss.

    Unless the teacher only reweighs, a group whose rewards are all equal teaches where `may_teach` says so, and a group
    may be a single completion.
    """
    reweighs = how["use"] == "reweigh"

    def advantages(step: Outcomes, **parameters: Any) -> Any:
        own = np.asarray(estimator.function(step, **parameters), np.float64)
        own = own[:, None] if own.ndim == 1 else own
        as_they_are = step.gaps is None or how["use"] == "loss"
        return own if as_they_are else combined(own, np.asarray(step.gaps), **how)

    update_wrapper(advantages, estimator.function)
    if how["use"] != "loss":
        vars(advantages)["taught_as"] = how["use"]
    if not reweighs:
        vars(advantages)["teaches"] = lambda group: estimator.teaches(group) or may_teach(group)
    relative = estimator.group_relative and reweighs
    return replace(estimator, function=advantages, group_relative=relative)


def teacher_metrics(batch: Batch, groups: Sequence[Group], key: str | None = None) -> dict[str, float]:
    """Metrics of a step with a teacher, in `covey.metric_names`; the mean of a metric without any token is left out.
    `key` is the column that names each row's teacher, where there are several.
    """
    if batch.teacher is None:
        return {}
    gaps = gap(batch.teacher.logprobs, batch.old_logprobs)
    there = np.isfinite(gaps)
    rows, g = np.logical_or.reduce(there, axis=1), gaps[there]
    found = {"teacher/rows": float(rows.mean()), "teacher/too_long": float(batch.teacher.too_long)}
    found["time/teacher"] = batch.teacher.seconds
    tied = np.array([group.is_tied for group in groups])[batch.group]
    if tied.any():
        found["teacher/tied_rows"] = float(rows[tied].mean())
    if len(g):
        found |= {"teacher/kl": float(-g.mean()), "teacher/disagreement": float((g < 0).mean())}
        found["teacher/k3"] = float((np.exp(np.minimum(g, 50.0)) - g - 1).mean())
    if key is not None:
        names = np.array([str(group.prompt.columns.get(key)) for group in groups])[batch.group]
        means = {name: np.nanmean(gaps[names == name]) for name in np.unique(names[rows])}
        found |= {f"teacher/{name}/kl": float(-mean) for name, mean in means.items()}
    pairs = list(_agreements(groups, gaps, rows))
    if pairs:
        found["teacher/agrees_with_reward"] = float(np.mean(pairs))
    return found


def _agreements(groups: Sequence[Group], gaps: Floats, rows: NDArray[np.bool_]) -> Iterator[float]:
    """Of each pair of rows of a group with different rewards: 1 where the better one has the larger mean gap."""
    first = 0
    for group in groups:
        own = slice(first, first := first + len(group.episodes))
        if len(group.episodes) != len(group.rewards):  # an agent's episodes are no rows to compare
            continue
        means = [float(np.nanmean(each)) if one else np.nan for each, one in zip(gaps[own], rows[own], strict=True)]
        for i, better in enumerate(group.rewards):
            for j, worse in enumerate(group.rewards):
                if better > worse and np.isfinite([means[i], means[j]]).all():
                    apart = means[i] - means[j]
                    yield 0.5 if abs(apart) < 1e-5 else float(apart > 0)  # rounding says nothing
