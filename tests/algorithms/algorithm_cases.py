"""Random cases, and their gradients in torch and in JAX."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import torch

from covey.algorithms import LOSSES, Objective, count_step, make_objective, policy_loss, token_weights
from covey.algorithms.arrays import to_library_of

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

    def map(self, convert: Callable[[Any], Any]) -> Self:
        return type(self)(**{field.name: convert(getattr(self, field.name)) for field in fields(self)})


def random_case(seed: int, rows: int = 5, tokens: int = 6, spread: float = 0.4) -> Case:
    """Ragged rows, some of them empty, advantages of both signs and some 0."""
    rng, shape = np.random.default_rng(seed), (rows, tokens)
    logp, lengths = -rng.exponential(1.0, shape), rng.integers(0, tokens + 1, rows)
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


def loss_of(case: Case, objective: Objective, counts: Any = None, selected: Any = None) -> Any:
    """`LossTerms` of a case, or of a part of one with the whole one's counts and selection."""
    counts, dtype = count_step(case.mask) if counts is None else counts, case.logp.dtype
    weights = token_weights(case.mask, counts, objective.loss.aggregation, 7, dtype=dtype)
    apart = objective.loss.kl_aggregation and token_weights(
        case.mask, counts, objective.loss.kl_aggregation, dtype=dtype
    )
    if selected is None and objective.loss.select is not None:
        selected = objective.select(case.logp, case.old, case.advantages, case.mask, case.entropy)
    selected = None if selected is None else to_library_of(case.logp, selected)
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
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (f(up) - f(down)) / (2 * step)
    return gradient
