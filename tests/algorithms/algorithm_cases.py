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

from covey.algorithms import LOSSES, Objective, count_step, make_objective, policy_loss, token_weights
from covey.algorithms.arrays import to_library_of

LENGTH = 7  # max_completion_length of all cases
LOSS_TYPES = sorted(LOSSES)
SMALL = {
    "kl_cov": {"kl_cov_ratio": 0.3},
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.01, "clip_cov_ub": 2.0},
}
"""Parameters with which a loss that selects a few of many tokens selects some of a small case."""


def objective_of(loss_type: str, **settings: Any) -> Objective:
    """The objective of a loss for a small case, with those of the settings that it has."""
    terms = ("beta", "kl_estimator", "entropy_coef")
    own = {name: value for name, value in settings.items() if name in (*LOSSES[loss_type].parameters, *terms)}
    return make_objective(loss_type, **SMALL.get(loss_type, {}), **own)


def parameters_of(objective: Objective) -> dict[str, Any]:
    return {**objective.loss.parameters, **dict(objective.parameters)}


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
    weights = token_weights(
        case.mask, count_step(case.mask) if counts is None else counts, objective.aggregation, LENGTH,
        dtype=case.logp.dtype,
    )  # fmt: skip
    selected = selection_of(case, objective) if selected is None else to_library_of(case.logp, selected)
    return policy_loss(
        case.logp, case.old, case.advantages, case.mask, weights, objective,
        ref=case.ref, kl=case.kl, entropy=case.entropy, correction=case.correction, selected=selected,
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
    p = parameters_of(o)
    if name == "cispo":
        return -min(frozen_w, p["epsilon_max"]) * a * lp
    if name in ("reinforce", "reinforce_kept"):
        return -a * lp
    if name == "sapo":
        tau = p["sapo_temperature_pos"] if a > 0 else p["sapo_temperature_neg"]
        return -(4 / tau) / (1 + math.exp(-tau * (w - 1))) * a
    if name == "kl_cov":
        return -w * a
    if name == "gmpo":
        return -w * a  # the geometric mean of clipped ratios: see `textbook_ratio`
    if name == "vespo":
        k, rate = (p["k_pos"], p["lambda_pos"]) if a >= 0 else (p["k_neg"], p["lambda_neg"])
        return -(frozen_w**k) * math.exp(rate * (1 - frozen_w)) * a * lp
    published = {"dapo": 0.28, "gspo": 4e-4, "gspo_token": 4e-4, "luspo": 2.5e-3}
    high = published.get(name, p["epsilon"]) if p["epsilon_high"] is None else p["epsilon_high"]
    w = min(w, p.get("delta") or math.inf)
    return -min(w * a, min(max(w, 1 - p["epsilon"]), 1 + high) * a)


def textbook_ratio(name: str, o: Objective, case: Case, n: int, t: int, logp: np.ndarray, frozen: np.ndarray) -> float:
    active = np.flatnonzero(case.mask[n])
    if name in ("gspo", "luspo"):
        return math.exp(sum(logp[n, s] - case.old[n, s] for s in active) / len(active))
    if name == "gspo_token":
        sequence = math.exp(sum(frozen[n, s] - case.old[n, s] for s in active) / len(active))
        return sequence * math.exp(logp[n, t] - frozen[n, t])
    if name == "gmpo":
        p = parameters_of(o)
        low, high = math.exp(-p["epsilon"]), math.exp(p["epsilon"] if p["epsilon_high"] is None else p["epsilon_high"])
        product = 1.0
        for s in active:
            w = math.exp(logp[n, s] - case.old[n, s])
            if case.advantages[n, s] > 0:
                w = min(w, min(max(w, low), high))
            elif case.advantages[n, s] < 0:
                w = max(w, min(max(w, low), high))
            product *= w
        return product ** (1 / len(active))
    return math.exp(logp[n, t] - case.old[n, t])


def textbook_selection(name: str, o: Objective, case: Case, frozen: np.ndarray) -> set[tuple[int, int]]:
    """KL-Cov's and Clip-Cov's tokens, as verl's loops choose them; Clip-Cov's draw is by the digits after the third."""
    p = parameters_of(o)
    tokens = [(int(n), int(t)) for n, t in zip(*np.nonzero(case.mask), strict=True)]
    if name not in ("kl_cov", "clip_cov") or not tokens:
        return set()
    mean_a = sum(case.advantages[i] for i in tokens) / len(tokens)
    mean_lp = sum(frozen[i] for i in tokens) / len(tokens)
    covariance = {i: (case.advantages[i] - mean_a) * (frozen[i] - mean_lp) for i in tokens}
    if name == "kl_cov":
        ranked = sorted(tokens, key=lambda i: -covariance[i])
        return set(ranked[: max(1, int(p["kl_cov_ratio"] * len(tokens)))])

    def clipped(i: tuple[int, int]) -> bool:
        w, a = math.exp(frozen[i] - case.old[i]), case.advantages[i]
        high = p["epsilon"] if p["epsilon_high"] is None else p["epsilon_high"]
        return -min(max(w, 1 - p["epsilon"]), 1 + high) * a > -w * a

    free = [i for i in tokens if p["clip_cov_lb"] < covariance[i] < p["clip_cov_ub"] and not clipped(i)]
    drawn = sorted(free, key=lambda i: -((1000 * frozen[i]) % 1))
    return set(drawn[: max(1, int(p["clip_cov_ratio"] * len(tokens)))])


def textbook_kl(name: str, d: float, w: float, frozen_d: float) -> float:
    k3 = math.exp(-d) + d - 1
    moving = d * d / 2 - frozen_d * frozen_d / 2
    frozen_k3 = math.exp(-frozen_d) + frozen_d - 1
    straight_through = {"k1+": frozen_d + moving, "k3+": frozen_k3 + moving}
    return {"k1": d, "k2": d * d / 2, "k3": k3, "k3_unbiased": w * k3, "abs": abs(d), **straight_through}[name]


def textbook_loss(loss_type: str, objective: Objective, case: Case, logp: np.ndarray, frozen: np.ndarray) -> float:
    """The loss of a whole step by the definitions; `frozen` is `logp` where one stops the gradient."""
    rows, tokens = case.mask.shape
    active_in_step = int(case.mask.sum())
    chosen = textbook_selection(loss_type, objective, case, frozen)
    loss = 0.0
    for n in range(rows):
        active = [t for t in range(tokens) if case.mask[n, t]]
        if not active:
            continue
        product = math.exp(sum(frozen[n, t] - case.old[n, t] + math.log(case.correction[n, t]) for t in active))
        for t in active:
            w = textbook_ratio(loss_type, objective, case, n, t, logp, frozen)
            frozen_w = product if loss_type == "vespo" else math.exp(frozen[n, t] - case.old[n, t])
            value = textbook_surrogate(objective, loss_type, w, frozen_w, case.advantages[n, t], logp[n, t])
            if (n, t) in chosen:
                held = parameters_of(objective).get("ppo_kl_coef", 0.0) * abs(logp[n, t] - case.old[n, t])
                value = value + held if loss_type == "kl_cov" else 0.0
            if loss_type != "vespo":
                value *= case.correction[n, t]
            if objective.beta:
                token_w = case.correction[n, t] * math.exp(logp[n, t] - case.old[n, t])
                d, frozen_d = logp[n, t] - case.ref[n, t], frozen[n, t] - case.ref[n, t]
                value += objective.beta * textbook_kl(objective.kl_estimator, d, token_w, frozen_d)
            value -= objective.entropy_coef * case.entropy[n, t]
            denominator = {
                **dict.fromkeys(("bnpo", "dapo", "cispo", "vespo", "kl_cov", "clip_cov"), active_in_step),
                "dr_grpo": rows * LENGTH,
                "reinforce": rows,
                "luspo": rows,
                "reinforce_kept": int(case.mask.any(axis=1).sum()),
            }.get(loss_type, len(active) * rows)
            loss += value / denominator
    return loss
