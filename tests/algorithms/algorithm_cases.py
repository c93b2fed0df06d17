"""Random cases, and their gradients in torch, in JAX and by a reference of plain loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from covey.algorithms import LOSSES, Objective, count_step, make_objective, policy_loss, token_weights
from covey.algorithms.arrays import to_library_of
from loss_reference import Completed, reference_loss

LENGTH = 7  # max_completion_length of all cases
LOSS_TYPES = sorted(LOSSES)
TERMS = ("beta", "kl_estimator", "entropy_coef")
SMALL = {"kl_cov": {"kl_cov_ratio": 0.3}, "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.01, "clip_cov_ub": 2.0}}
"""Parameters with which a loss that selects a few of many tokens selects some of a small case."""


def objective_of(loss_type: str, **settings: Any) -> Objective:
    """The objective of a loss for a small case, with those of the settings that it has."""
    return make_objective(loss_type, **own_settings(loss_type, settings))


def own_settings(loss_type: str, settings: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in settings.items() if name in (*LOSSES[loss_type].parameters, *TERMS)}
    return SMALL.get(loss_type, {}) | own


@dataclass
class Case:
    """The arguments of `policy_loss`, `[N, T]` each."""

    logp: Any
    old: Any
    advantages: Any
    mask: Any
    ref: Any
    kl: Any
    entropy: Any
    correction: Any

    def map(self, convert: Callable[[Any], Any]) -> Case:
        return Case(**{field.name: convert(getattr(self, field.name)) for field in fields(self)})


def random_case(seed: int, rows: int = 5, tokens: int = 6, spread: float = 0.4) -> Case:
    """Ragged rows, some of them empty, advantages of both signs and some 0."""
    rng = np.random.default_rng(seed)
    shape = (rows, tokens)
    logp = -rng.exponential(1.0, shape)
    lengths = rng.integers(0, tokens + 1, rows)
    mask = (np.arange(tokens) < lengths[:, None]) & (rng.random(shape) < 0.9)
    return Case(
        logp=logp,
        old=logp + rng.normal(0, spread, shape),
        advantages=rng.choice([-1.3, -0.4, 0.0, 0.7, 1.6], (rows, 1)) * np.ones(shape),
        mask=mask,
        ref=logp + rng.normal(0, spread, shape),
        kl=rng.exponential(0.1, shape),
        entropy=rng.exponential(1.0, shape),
        correction=rng.uniform(0.5, 2.0, shape),
    )


def selection_of(case: Case, objective: Objective) -> Any:
    """What the loss selects of a whole step, None for one that does not."""
    if objective.loss.select is None:
        return None
    return objective.select(case.logp, case.old, case.advantages, case.mask, case.entropy)


def loss_of(case: Case, objective: Objective, counts: Any = None, selected: Any = None) -> Any:
    """`LossTerms` of a case, or of a part of one with the whole one's counts and selection."""
    counts, dtype = count_step(case.mask) if counts is None else counts, case.logp.dtype
    weights = token_weights(case.mask, counts, objective.aggregation, LENGTH, dtype=dtype)
    apart = objective.kl_aggregation and token_weights(case.mask, counts, objective.kl_aggregation, dtype=dtype)
    selected = selection_of(case, objective) if selected is None else to_library_of(case.logp, selected)
    return policy_loss(
        case.logp, case.old, case.advantages, case.mask, weights, objective,
        ref=case.ref, kl=case.kl, entropy=case.entropy, correction=case.correction, selected=selected, kl_weights=apart,
    )  # fmt: skip


def torch_gradient(case: Case, loss: Callable[[Case], Any]) -> tuple[float, np.ndarray]:
    """Value and gradient in `logp` by torch autograd, of a NumPy case."""
    tensors = case.map(torch.from_numpy)
    tensors.logp = tensors.logp.clone().requires_grad_()
    value = loss(tensors)
    (gradient,) = torch.autograd.grad(value, tensors.logp)
    return float(value.detach()), gradient.numpy()


def jax_gradient(case: Case, loss: Callable[[Case], Any]) -> tuple[float, np.ndarray]:
    """Value and gradient in `logp` by `jit` of `value_and_grad`, of a NumPy case."""
    others = {name: jnp.asarray(value) for name, value in vars(case).items() if name != "logp"}
    both = jax.jit(jax.value_and_grad(lambda logp, others: loss(Case(logp=logp, **others))))
    value, gradient = both(jnp.asarray(case.logp), others)
    return float(value), np.asarray(gradient)


def finite_difference(f: Callable[[np.ndarray], float], x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central differences of a scalar function."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (f(up) - f(down)) / (2 * step)
    return gradient


def by_the_reference(case: Case, loss_type: str, **settings: Any) -> tuple[float, np.ndarray]:
    """Value and gradient in `logp` by `loss_reference`, row by row and without the masked tokens; settings as in
    `objective_of`.
    """
    sequences = []
    for row, mask in enumerate(case.mask):
        logp, old, ref, entropy, factor = (
            torch.tensor(x[row, mask]) for x in (case.logp, case.old, case.ref, case.entropy, case.correction)
        )
        # `old` is the policy that the factors lead to from the sampler's
        advantage, sampler = float(case.advantages[row, 0]), old - factor.log()
        sequences.append(Completed(logp.requires_grad_(), sampler, ref, entropy, advantage, old, not mask.any()))
    how = {"loss_type": loss_type, "correction": "token_truncate", "cap": 1e9, "max_length": LENGTH}
    value, _ = reference_loss(sequences, **how, **own_settings(loss_type, settings))
    gradient = np.zeros_like(case.logp)
    found = torch.autograd.grad(value, [each.logp for each in sequences], allow_unused=True)
    for row, (mask, each) in enumerate(zip(case.mask, found, strict=True)):
        gradient[row, mask] = 0.0 if each is None else each.numpy()
    return float(value.detach()), gradient
