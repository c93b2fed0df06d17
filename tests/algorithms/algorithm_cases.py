"""Random cases, gradients in torch and JAX, and the loss as a textbook writes it: loops over scalars."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from covey.algorithms import LOSS_PRESETS, Objective, count_step, policy_loss, token_weights

LENGTH = 7  # max_completion_length of all cases
LOSS_TYPES = sorted(LOSS_PRESETS)


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


def loss_of(case: Case, objective: Objective, counts: Any = None, rows: slice = slice(None)) -> Any:
    """`LossTerms` of some rows of a case, with everything that the objective could want."""
    part = case.map(lambda x: x[rows])
    weights = token_weights(
        part.mask, count_step(case.mask) if counts is None else counts, objective.aggregation, LENGTH,
        dtype=part.logp.dtype,
    )  # fmt: skip
    return policy_loss(
        part.logp, part.old, part.advantages, part.mask, weights, objective,
        ref=part.ref, kl=part.kl, entropy=part.entropy, correction=part.correction,
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
    names = [field.name for field in fields(Case)]

    def of_arrays(logp: Any, others: dict[str, Any]) -> Any:
        return loss(Case(logp=logp, **others))

    others = {name: jnp.asarray(getattr(case, name)) for name in names if name != "logp"}
    value, gradient = jax.jit(jax.value_and_grad(of_arrays))(jnp.asarray(case.logp), others)
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


def textbook_surrogate(o: Objective, name: str, w: float, frozen_w: float, a: float, lp: float) -> float:
    if name == "cispo":
        return -min(frozen_w, o.epsilon_max) * a * lp
    if name in ("reinforce", "reinforce_kept"):
        return -a * lp
    if name == "sapo":
        tau = o.sapo_temperature_pos if a > 0 else o.sapo_temperature_neg
        return -(4 / tau) / (1 + math.exp(-tau * (w - 1))) * a
    low, high = 1 - o.eps_low, 1 + o.upper
    w = min(w, math.inf if o.delta is None else o.delta)
    return -min(w * a, min(max(w, low), high) * a)


def textbook_kl(name: str, d: float, w: float) -> float:
    k3 = math.exp(-d) + d - 1
    return {"k1": d, "k2": d * d / 2, "k3": k3, "k3_unbiased": w * k3}[name]


def textbook_loss(loss_type: str, objective: Objective, case: Case, logp: np.ndarray, frozen: np.ndarray) -> float:
    """The loss of a whole step by the definitions; `frozen` is `logp` where one stops the gradient."""
    rows, tokens = case.mask.shape
    active_in_step = int(case.mask.sum())
    loss = 0.0
    for n in range(rows):
        active = [t for t in range(tokens) if case.mask[n, t]]
        if not active:
            continue
        for t in active:
            w = math.exp(logp[n, t] - case.old[n, t])
            frozen_w = math.exp(frozen[n, t] - case.old[n, t])
            if loss_type == "gspo":
                w = math.exp(sum(logp[n, s] - case.old[n, s] for s in active) / len(active))
            if loss_type == "gspo_token":
                sequence = math.exp(sum(frozen[n, s] - case.old[n, s] for s in active) / len(active))
                w = sequence * math.exp(logp[n, t] - frozen[n, t])
            value = case.correction[n, t] * textbook_surrogate(
                objective, loss_type, w, frozen_w, case.advantages[n, t], logp[n, t]
            )
            if objective.beta:
                token_w = case.correction[n, t] * math.exp(logp[n, t] - case.old[n, t])
                value += objective.beta * textbook_kl(objective.kl_estimator, logp[n, t] - case.ref[n, t], token_w)
            value -= objective.entropy_coef * case.entropy[n, t]
            denominator = {
                "bnpo": active_in_step,
                "dapo": active_in_step,
                "cispo": active_in_step,
                "dr_grpo": rows * LENGTH,
                "reinforce": rows,
                "reinforce_kept": int(case.mask.any(axis=1).sum()),
            }.get(loss_type, len(active) * rows)
            loss += value / denominator
    return loss
