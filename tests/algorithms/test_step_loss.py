"""Every loss with every mask, KL term and correction: value and gradient of a reference written out in loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from algorithm_cases import SMALL

from covey.algorithms import (
    LOSSES,
    combine_masks,
    count_step,
    make_objective,
    mismatch_correction,
    off_policy_mask,
    policy_loss,
    reference_drift_mask,
    token_weights,
    top_entropy_mask,
    without_surrogate,
)
from loss_reference import Completed, reference_loss

ADVANTAGES = (1.6, -1.3, 0.0, -0.4, 0.7, -2.0)
MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"off_policy": 0.0},
    {"quantile": 0.4},
    {"drift": 0.0},
    {"off_policy": 0.0, "quantile": 0.5, "drift": 0.1, "drift_reduction": "sum"},
)
OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"beta": 0.3, "entropy_coef": 0.1},
    {"beta": 0.3, "kl_estimator": "k3_unbiased", "correction": "sequence_truncate", "cap": 1.1},
    {"beta": 0.3, "kl_estimator": "k1", "correction": "sequence_mask", "cap": 1.3},
    {"beta": 0.3, "kl_estimator": "k2", "correction": "token_mask", "cap": 1.2},
    {"correction": "token_truncate", "cap": 1.1, "level": "sequence"},
)


def completed(seed: int) -> list[Completed]:
    rng = np.random.default_rng(seed)
    found = []
    for advantage in ADVANTAGES:
        length = int(rng.integers(2, 8))
        logp = torch.tensor(-rng.exponential(1.0, length))
        near = [logp + torch.tensor(rng.normal(0, 0.3, length)) for _ in range(3)]
        entropy = torch.tensor(rng.exponential(1.0, length))
        found.append(Completed(logp.requires_grad_(), near[0], near[1], entropy.requires_grad_(), advantage, near[2]))
    return found


def by_covey(sequences: list[Completed], options: dict[str, Any]) -> tuple[torch.Tensor, dict[str, float]]:
    def grid(name: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([getattr(s, name) for s in sequences], batch_first=True)

    logp, old, ref, entropy, trainer_old = map(grid, ("logp", "old", "ref", "entropy", "trainer_old"))
    base = torch.arange(logp.shape[1])[None] < torch.tensor([len(s.logp) for s in sequences])[:, None]
    advantages = torch.tensor([s.advantage for s in sequences], dtype=torch.float64)
    keep, acting, now = {}, {}, logp.detach()
    if "off_policy" in options:
        acting["off_policy_mask"] = off_policy_mask(now, old, advantages, base, options["off_policy"])
    if "quantile" in options:
        acting["top_entropy_quantile"] = top_entropy_mask(entropy.detach(), base, options["quantile"])
    if "drift" in options:
        reduction = options.get("drift_reduction", "per_token_mean")
        keep["drift"] = reference_drift_mask(now, ref, base, options["drift"], reduction)
    mask, _ = combine_masks(base, keep)
    advantages, _ = without_surrogate(advantages, base, acting)
    given = {name: options.get(name) for name in ("beta", "kl_estimator", "entropy_coef")}
    given |= SMALL.get(options["loss_type"], {}) | {"importance_sampling_level": options.get("level")}
    objective = make_objective(options["loss_type"], **given)
    factor = None
    if "correction" in options:
        counted = base if objective.kl_aggregation else mask
        factor, old = mismatch_correction(trainer_old, old, counted, options["correction"], options["cap"]), trainer_old
    weights = token_weights(mask, count_step(mask), objective.aggregation, options["max_length"], dtype=torch.float64)
    how, wide = objective.kl_aggregation, torch.float64
    apart = how and token_weights(base, count_step(base), how, dtype=wide)
    selected = None if objective.loss.select is None else objective.select(logp, old, advantages, mask)
    given = {"ref": ref, "entropy": entropy, "correction": factor, "kl_weights": apart, "selected": selected}
    terms = policy_loss(logp, old, advantages, mask, weights, objective, **given)
    sums = {name: float(terms.metrics[f"{name}_sum"] / terms.metrics["active_tokens"]) for name in ("kl", "entropy")}
    return terms.loss, sums | {"policy_loss": float(terms.metrics["policy_loss"])}


@pytest.mark.parametrize("masks", MASKS, ids=lambda m: "-".join(m) or "all")
@pytest.mark.parametrize("others", OTHERS, ids=lambda m: "-".join(map(str, m.values())) or "plain")
@pytest.mark.parametrize("loss_type", sorted(LOSSES))
def test_value_and_gradient(loss_type: str, others: dict[str, Any], masks: dict[str, Any]) -> None:
    options = {"loss_type": loss_type, "max_length": 9, **others, **masks, **SMALL.get(loss_type, {})}
    if loss_type.startswith("gspo") or "importance_sampling_level" not in LOSSES[loss_type].parameters:
        options.pop("level", None)
    ours, theirs = completed(3), completed(3)
    loss, metrics = by_covey(ours, options)
    expected, wanted = reference_loss(theirs, **options)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10, abs=1e-12)
    assert metrics == pytest.approx({name: wanted[name] for name in metrics}, rel=1e-10, abs=1e-12)
    loss.backward()
    expected.backward()
    for mine, other in zip(ours, theirs, strict=True):
        for one, two in ((mine.logp.grad, other.logp.grad), (mine.entropy.grad, other.entropy.grad)):
            found = (torch.zeros_like(mine.logp) if each is None else each for each in (one, two))
            torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
