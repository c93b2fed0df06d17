"""Which tokens are left out of the loss, or of its surrogate, and why.

A mask function returns True where a token (or row) is *kept*. `combine_masks` applies several and records for
each reason the tokens that it excluded; the reason of a mask is the name of its setting.

Do not drop *every* invalid completion: their negative advantages teach the model to answer in a valid form. Watch the
share of tokens that is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from covey.algorithms.arrays import Array, as_mask, expand_rows, lookup, masked, row_mean, row_sum, to_library_of
from covey.algorithms.kl import log_softmax
from covey.errors import ConfigError

MaskSettings = Any
"""The section `algorithm` of a config, or anything with its fields: the masks and their limits."""

SURROGATE_MASKS = frozenset({"off_policy_mask", "top_entropy_quantile"})
"""Masks that drop only a token's policy-gradient term (surrogate), as in their papers. Its KL and entropy terms, all
denominators and the ratio of its sequence stay. This is the same as an advantage of 0 (`without_surrogate`)."""


def combine_masks(base_mask: Array, keep: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
    """Apply keep-masks and record what each excluded.

    Args:
        base_mask: `[N, T]` True where a token exists.
        keep: reason -> `[N]`, `[N, 1]` or `[N, T]`, True where kept.

    Returns:
        The combined mask `[N, T]`, and for each reason the tokens of `base_mask` that it excludes, `[N, T]`.
        A token excluded by several masks carries each reason.
    """
    combined = base_mask = as_mask(base_mask)
    excluded = {}
    for reason, kept in keep.items():
        excluded[reason] = base_mask & ~expand_rows(as_mask(to_library_of(base_mask, kept)))
        combined = combined & ~excluded[reason]
    return combined, excluded


def without_surrogate(advantages: Array, base_mask: Array, keep: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
    """Advantages `[N, T]` that are 0 where a mask of `SURROGATE_MASKS` applies, and what each of these excludes.

    Args:
        advantages: `[N]` or `[N, T]`.
        base_mask: see `combine_masks`.
        keep: see `combine_masks`.
    """
    acting, excluded = combine_masks(base_mask, keep)
    return masked(advantages, acting), excluded


def completion_masks(
    algorithm: MaskSettings, finish_reasons: Sequence[str], texts: Sequence[str], answered: Callable[[], Sequence[bool]]
) -> dict[str, NDArray[np.bool_]]:
    """The masks that do not need the policy: reason -> `[N]`, True where a completion is kept.

    `answered` returns which of the N completions hold an answer; it is called only if a mask needs it.
    """
    keep = {}
    if algorithm.mask_truncated_completions:
        keep["mask_truncated_completions"] = np.array([reason != "length" for reason in finish_reasons], np.bool_)
    if algorithm.validity_min_length is not None:
        whole = create_sampling_mask(texts, algorithm.validity_min_length, has_valid_answer=lambda text: True)
        keep["validity_mask"] = whole & np.array(answered(), np.bool_)
    return keep


def uncertain_tokens(mask: Array, excluded: Mapping[str, Array]) -> Array:
    """`[N, T]` the tokens that `top_entropy_mask` keeps."""
    return mask & ~excluded["top_entropy_quantile"] if "top_entropy_quantile" in excluded else mask


class PolicyMasks(NamedTuple):
    """A step after the masks that need the policy: tokens `[N, T]`, advantages `[N, T]`, and each mask's tokens."""

    mask: Array
    advantages: Array
    excluded: dict[str, Array]


def masks_by_policy(settings: MaskSettings) -> bool:
    """True if a mask needs the current policy."""
    thresholds = (settings.off_policy_mask_threshold, settings.reference_drift)
    return thresholds != (None, None) or settings.top_entropy_quantile < 1


def policy_masks(
    settings: MaskSettings,
    logp: Array,
    old: Array,
    ref: Array | None,
    entropy: Array | None,
    advantages: Array,
    mask: Array,
) -> PolicyMasks:
    """Apply the masks that need the policy, all of them to the whole step and the same tokens.

    Args:
        settings: the masks and their thresholds.
        logp: `[N, T]` under the current policy.
        old: `[N, T]` under the policy that sampled.
        ref: `[N, T]` under the reference, for `reference_drift_mask`.
        entropy: `[N, T]` of the current policy, for `top_entropy_quantile`.
        advantages: `[N]` or `[N, T]`.
        mask: `[N, T]` active tokens.
    """
    keep: dict[str, Array] = {}
    acting: dict[str, Array] = {}
    if settings.off_policy_mask_threshold is not None:
        acting["off_policy_mask"] = off_policy_mask(logp, old, advantages, mask, settings.off_policy_mask_threshold)
    if settings.reference_drift is not None:
        keep["reference_drift_mask"] = reference_drift_mask(logp, ref, mask, *settings.reference_drift)
    if settings.top_entropy_quantile < 1:
        acting["top_entropy_quantile"] = top_entropy_mask(entropy, mask, settings.top_entropy_quantile)
    left, excluded = combine_masks(mask, keep)
    advantages, quiet = without_surrogate(advantages, mask, acting)
    return PolicyMasks(left, advantages, excluded | quiet)


def off_policy_mask(logp: Array, old: Array, advantages: Array, mask: Array, threshold: float) -> Array:
    """DeepSeek-V3.2 (arXiv 2512.02556), equation 8: the surrogate of a row counts unless A < 0 and the row's mean of
    `old - logp` > threshold. See `SURROGATE_MASKS`.

    Args:
        logp: `[N, T]` under the current policy.
        old: `[N, T]` under the policy that sampled.
        advantages: `[N]` or `[N, T]`; only completions with a negative advantage are dropped.
        mask: `[N, T]` active tokens, over which the mean is taken.
        threshold: in nats per token.

    Returns `[N, T]` True where kept.
    """
    xp = array_namespace(logp)
    mask = as_mask(mask)
    stale = row_mean(masked(old, mask) - masked(logp, mask), mask) > threshold
    return xp.broadcast_to(~(stale & (expand_rows(advantages) < 0)), logp.shape)


_REDUCTIONS: dict[str, Callable[[Array, Array], Array]] = {"per_token_mean": row_mean, "sum": row_sum}


def reference_drift_mask(
    logp: Array, ref: Array, mask: Array, threshold: float = 0.5, reduction: str = "per_token_mean"
) -> Array:
    """Keep a sequence if its `logp - ref` is below `threshold`, whatever its advantage (usmle-qa.md).

    Args:
        logp: `[N, T]` under the current policy.
        ref: `[N, T]` under the reference.
        mask: `[N, T]` active tokens.
        threshold: in nats, per token or per sequence according to `reduction`.
        reduction: `per_token_mean` or `sum` over the row's tokens, which the document leaves open. With `sum` long
            completions easily exceed the threshold.

    Returns `[N, T]` True where kept.

    Raises `ConfigError`: unknown reduction.
    """
    mask = as_mask(mask)
    reduce = lookup(_REDUCTIONS, reduction, "reduction")
    drift = reduce(masked(logp, mask) - masked(ref, mask), mask)
    return array_namespace(logp).broadcast_to(drift < threshold, logp.shape)


def compute_off_policy_mask(current_log_probs: Array, reference_log_probs: Array, threshold: float = 0.5) -> Array:
    """The function of this name in usmle-qa.md: 1.0 where `current - reference < threshold`, else 0.0.

    It compares with the *reference*, not with the policy that sampled. `reference_drift_mask` is the same rule for
    token log-probabilities; `off_policy_mask` is the rule of DeepSeek-V3.2.

    Args:
        current_log_probs: `[N]` log-probability of each sequence (any shape works, compared entry by entry).
        reference_log_probs: the same shape.
        threshold: in nats.

    Returns floats of that shape.
    """
    xp = array_namespace(current_log_probs)
    difference = current_log_probs - reference_log_probs
    return xp.astype(difference < threshold, difference.dtype)


def top_entropy_mask(entropy: Array, mask: Array, quantile: float) -> Array:
    """Keep the surrogate of the most uncertain share of the step's tokens (arXiv 2506.01939); see `SURROGATE_MASKS`.

    Args:
        entropy: `[N, T]` entropy of the policy at each token, in nats, for the *whole* step.
        mask: `[N, T]` active tokens.
        quantile: share of the active tokens to keep, 0 < quantile <= 1; 0.2 keeps the top fifth. Tokens equal to the
            boundary are kept.

    Returns `[N, T]` True where kept.

    Raises `ConfigError`: quantile out of range.
    """
    if not 0 < quantile <= 1:
        raise ConfigError(f"top_entropy_quantile={quantile}: it is the share of tokens to keep; choose 0 < q <= 1")
    xp = array_namespace(entropy)
    mask = as_mask(mask)
    if quantile == 1:
        return xp.ones_like(mask)
    # Masked tokens sort to the end, so the first `count` entries are the active ones whatever their number.
    ordered = xp.sort(xp.reshape(masked(entropy, mask, float("inf")), (-1,)))
    ordered = xp.where(xp.isinf(ordered), xp.zeros_like(ordered), ordered)
    last = xp.maximum(xp.sum(xp.astype(mask, entropy.dtype)) - 1, xp.zeros_like(ordered[0]))
    position = (1 - quantile) * last
    below = xp.floor(position)
    low = xp.take(ordered, xp.astype(xp.reshape(below, (1,)), xp.int32), axis=0)
    high = xp.take(ordered, xp.astype(xp.reshape(xp.ceil(position), (1,)), xp.int32), axis=0)
    part = position - below
    return entropy >= low + part * (high - low)


def restrict_to_support(logprobs: Array, support: Array) -> Array:
    """`keep_sampling_mask` (DeepSeek-V3.2): renormalise log-probabilities over the ids that could be sampled.

    Args:
        logprobs: `[..., V]` log-probabilities or logits.
        support: `[..., V]` True for the ids left by top-k/top-p/min-p; at least one in each row.

    Returns `[..., V]`, -inf outside the support.
    """
    return log_softmax(masked(logprobs, support, -float("inf")))


# A bare "A" before a lower-case word or a number is an article ("A 45-year-old man"), not an answer.
_CHOICE = re.compile(r"(?i:answer|option|choice)(?i:\s+is)?[\s:*(]*[A-D]\b|\b[B-D]\b|\bA\b(?!\s+[a-z0-9])")


def has_choice_letter(text: str) -> bool:
    """True if the text names one of the choices A to D; the article "A" does not count."""
    return _CHOICE.search(text) is not None


# A block of up to 20 characters that starts with a letter, ten times in a row: catches text without spaces.
# Digits and punctuation do not count: 10000000000 and a ruler of dashes are legitimate.
_LOOP = re.compile(r"([^\W\d_].{0,19}?)\1{9,}", re.DOTALL)


def is_repetitive(text: str) -> bool:
    """True if a completion repeats itself.

    That is the same word six times in a row, or a block of up to 20 characters ten times in a row. With 16 words or
    more it is also fewer than half of the three-word sequences being distinct.
    """
    words = text.lower().split()
    run = 1
    for before, word in pairwise(words):
        run = run + 1 if word == before and any(map(str.isalnum, word)) else 1
        if run >= 6:
            return True
    triples = list(zip(words, words[1:], words[2:], strict=False))
    if len(words) >= 16 and 2 * len(set(triples)) < len(triples):
        return True
    return _LOOP.search(text) is not None


def create_sampling_mask(
    samples: Sequence[str],
    min_length: int = 10,
    has_valid_answer: Callable[[str], Any] = has_choice_letter,
    is_repetitive: Callable[[str], Any] = is_repetitive,
) -> NDArray[np.bool_]:
    """The validity mask ("Keep Sampling Mask" of usmle-qa.md): `[N]` True where a completion is kept.

    A dropped completion still counts in its group's mean. See the warning at the top of this module.

    Args:
        samples: N completions as text.
        min_length: in characters; shorter ones are dropped.
        has_valid_answer: text -> true if it holds an answer; by default a letter A to D.
        is_repetitive: text -> true if it repeats itself.
    """
    keep = [len(text) >= min_length and bool(has_valid_answer(text)) and not is_repetitive(text) for text in samples]
    return np.asarray(keep, dtype=np.bool_)
