"""Honest statistics for evaluations: how sure is an accuracy, and is "after" really better than "before"?

Written out here since SciPy and statsmodels, which have them too, are no dependencies of a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np


def wilson_interval(correct: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a proportion (Wilson 1927, J. Am. Stat. Assoc. 22:209).

    Unlike `p ± 1.96 sqrt(p (1 - p) / n)` it stays within [0, 1] and keeps its coverage for few problems and for
    accuracies near 0 or 1. It takes the `total` answers as independent: give it one answer for each problem.

    Args:
        correct: right answers.
        total: answers.
        confidence: coverage, 0.95 = 95 %.

    Returns:
        (low, high); (0, 1) when `total` is 0: nothing is known.

    Raises `ValueError`: `correct` is not within 0..total.
    """
    if not 0 <= correct <= total:
        raise ValueError(f"correct={correct}: must be between 0 and total={total}")
    if total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = correct / total
    shrink = 1 + z * z / total
    centre = (share + z * z / (2 * total)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (0.0 if correct == 0 else centre - half), (1.0 if correct == total else centre + half)


def share(count: int, total: int) -> dict[str, Any]:
    """A share with its 95 % Wilson interval."""
    low, high = wilson_interval(count, total)
    return {"share": count / total if total else float("nan"), "low": low, "high": high, "count": count, "of": total}


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Before and after on the same problems: mean after - mean before with its confidence interval (`low` to `high`),
    the two-sided probability (`p_value`) of a difference at least this large if nothing had changed, and how many of
    the `total` problems went up (`gained`) and down (`lost`).
    """

    difference: float
    low: float
    high: float
    p_value: float
    gained: int
    lost: int
    total: int


def mcnemar_exact(gained: int, lost: int) -> float:
    """Two-sided p-value of McNemar's exact test: `gained` against `lost` as flips of a fair coin.

    Problems that did not change say nothing about the direction and do not enter. McNemar 1947 (Psychometrika
    12:153), in its binomial form.
    """
    flips = gained + lost
    tail = sum(math.comb(flips, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / float(2**flips))


def paired_difference(
    before: Sequence[float] | Sequence[bool],
    after: Sequence[float] | Sequence[bool],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> PairedDifference:
    """Compare scores of the same problems before and after training.

    Right/wrong scores: McNemar's exact test, and the adjusted Wald interval for paired proportions (Bonett
    and Price 2012, J. Educ. Behav. Stat. 37:479): of n problems g gained and l lost; with u = (g + 1) / (n + 2) and
    d = (l + 1) / (n + 2) it is u - d +- z sqrt((u + d - (u - d)^2) / (n + 2)), cut to [-1, 1]. Other scores:
    bootstrap over problems (percentile interval; p-value from random sign flips of the differences).

    Args:
        before: `[n]` score of each problem before.
        after: `[n]` the same problems, in the same order, after.
        confidence: coverage of the interval.
        resamples: bootstrap resamples, for other than right/wrong scores.
        seed: of the bootstrap, so that equal input gives equal output.

    Raises `ValueError`: different lengths, or no problems.
    """
    old, new = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if old.shape != new.shape or old.ndim != 1 or len(old) == 0:
        shapes = f"before has shape {old.shape}, after {new.shape}"
        raise ValueError(f"{shapes}: paired scores need one value for each problem, both times")
    total, change = len(old), new - old
    gained, lost = int((change > 0).sum()), int((change < 0).sum())
    difference = float(change.mean())
    if np.isin(np.concatenate([old, new]), (0.0, 1.0)).all():
        z = NormalDist().inv_cdf(0.5 + confidence / 2)
        up, down = (gained + 1) / (total + 2), (lost + 1) / (total + 2)
        half = z * math.sqrt((up + down - (up - down) ** 2) / (total + 2))
        low, high = max(-1.0, up - down - half), min(1.0, up - down + half)
        return PairedDifference(difference, low, high, mcnemar_exact(gained, lost), gained, lost, total)
    random = np.random.default_rng(seed)
    means, flipped = np.empty(resamples), np.empty(resamples)
    for start in range(0, resamples, 1000):  # bounded memory: 1000 x n at a time
        count = min(1000, resamples - start)
        means[start : start + count] = change[random.integers(0, total, (count, total))].mean(axis=1)
        flipped[start : start + count] = (change * random.choice((-1.0, 1.0), (count, total))).mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    # +1: the observed assignment is one of the possible ones, so p is never 0.
    p_value = (1 + int((np.abs(flipped) >= abs(difference) - 1e-12).sum())) / (resamples + 1)
    return PairedDifference(difference, float(low), float(high), p_value, gained, lost, total)
