"""The loss of a step as `ALGORITHMS.md` and the papers define it: one sequence at a time, in float64, in plain loops.

Nothing of `covey` is used, so that a formula that is wrong there is not wrong here too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass
class Completed:
    """What is known of one completion: tensors `[T]`, all of its tokens."""

    logp: Tensor
    old: Tensor
    ref: Tensor
    entropy: Tensor
    advantage: float
    trainer_old: Tensor | None = None
    dropped: bool = False  # by a mask that takes whole completions: validity, truncation


def reference_loss(sequences: Sequence[Completed], **options: Any) -> tuple[Tensor, dict[str, float]]:
    """Loss and metrics.

    Options and their defaults: loss_type="grpo", level=None, epsilon, epsilon_high, delta, epsilon_max=5, beta=0,
    kl_estimator="k3", entropy_coef=0, off_policy=None, drift=None, drift_reduction="per_token_mean", quantile=1,
    correction=None, cap=3, floor=0 (with masks), max_length=1, kl_cov_ratio, clip_cov_ratio, clip_cov_lb, clip_cov_ub.
    """
    get = options.get
    loss_type = get("loss_type", "grpo")
    narrow = loss_type.startswith("gspo")
    low = get("epsilon", 3e-4 if narrow else {"luspo": 2e-3, "gmpo": 0.4}.get(loss_type, 0.2))
    high = get("epsilon_high", 4e-4 if narrow else {"dapo": 0.28, "luspo": 2.5e-3}.get(loss_type, low))
    levels = {"gspo": "sequence", "luspo": "sequence", "gspo_token": "gspo_token"}
    level = get("level") or levels.get(loss_type, "token")
    kept = [not s.dropped and not _drifted(s, options) for s in sequences]
    everything = [float(h) for s in sequences if not s.dropped for h in s.entropy.detach()]
    edge = np.quantile(everything, 1 - get("quantile", 1.0)) if everything else 0.0
    tokens = sum(len(s.logp) for s, keep in zip(sequences, kept, strict=True) if keep)
    total = torch.zeros((), dtype=torch.float64)
    policy = 0.0
    sums = {"kl": 0.0, "entropy": 0.0, "ratio": 0.0}
    left = 0
    # usmle-qa.md divides by the kept sequences and leaves the KL of all sampled tokens alone
    apart = 1 / sum(len(s.logp) for s in sequences) if loss_type == "reinforce_kept" else None
    actings = []
    for s in sequences:
        stale = (
            get("off_policy") is not None
            and s.advantage < 0
            and float((s.old - s.logp.detach()).mean()) > get("off_policy")
        )
        actings.append([not stale and float(h.detach()) >= edge for h in s.entropy])
    chosen = _selected(loss_type, sequences, kept, actings, low, high, options)
    for s, keep, acts, selected in zip(sequences, kept, actings, chosen, strict=True):
        if not keep and apart is None:
            continue
        length = len(s.logp)
        factors = [1.0] * length
        old = s.old
        if get("correction") is not None:
            differences = (s.trainer_old - s.old).tolist()
            if get("correction").startswith("sequence"):
                differences = [sum(differences)] * length
            factors = [math.exp(d) for d in differences]
            over = [f > get("cap", 3.0) or f < get("floor", 0.0) for f in factors]
            instead = get("cap", 3.0) if get("correction").endswith("truncate") else 0.0
            factors = [instead if beyond else f for f, beyond in zip(factors, over, strict=True)]
            old = s.trainer_old
        whole_factor = math.prod(factors[:1] if str(get("correction")).startswith("sequence") else factors)
        for t in range(length):
            ratio = torch.exp(s.logp[t] - old[t])
            if level != "token":
                whole = torch.exp((s.logp - old).sum() / length)
                ratio = whole if level == "sequence" else whole.detach() * torch.exp(s.logp[t] - s.logp[t].detach())
            advantage = s.advantage if acts[t] else 0.0
            if loss_type == "gmpo":
                ratio = _geometric_mean([s.advantage if a else 0.0 for a in acts], s.logp - old, low, high)
            if loss_type == "vespo":
                ratio = torch.exp((s.logp - old).sum()).detach() * max(whole_factor, 1e-8)
                ratio = torch.clamp(ratio, min=1e-8)
            surrogate = _surrogate(loss_type, ratio, s.logp[t], advantage, low, high, options)
            if selected[t]:
                surrogate = surrogate + torch.abs(s.logp[t] - old[t]) if loss_type == "kl_cov" else 0 * surrogate
            if loss_type != "vespo":
                surrogate = surrogate * factors[t]
            kl = _kl(get("kl_estimator", "k3"), s.logp[t], s.ref[t], old[t])
            weighed = kl * factors[t] if get("kl_estimator") == "k3_unbiased" else kl
            scale = {
                "grpo": 1 / (len(sequences) * length),
                "bnpo": 1 / tokens,
                "dr_grpo": 1 / (len(sequences) * get("max_length", 1)),
                "reinforce": 1 / len(sequences),
                "luspo": 1 / len(sequences),
                "reinforce_kept": 1 / max(sum(kept), 1),
            }[
                {
                    **dict.fromkeys(("gspo", "gspo_token", "sapo", "gmpo"), "grpo"),
                    **dict.fromkeys(("dapo", "cispo", "vespo", "kl_cov", "clip_cov"), "bnpo"),
                }.get(loss_type, loss_type)
            ]
            total = total + (apart or scale) * get("beta", 0.0) * weighed
            if not keep:
                continue
            total = total + scale * surrogate
            policy += scale * float(surrogate.detach())
            total = total - scale * get("entropy_coef", 0.0) * s.entropy[t]
            sums["kl"] += float(kl.detach()) / tokens
            sums["entropy"] += float(s.entropy[t].detach()) / tokens
            sums["ratio"] += float(ratio.detach()) / tokens
        left += any(acts) and keep
    return total, {"loss": float(total.detach()), "policy_loss": policy, "mask_ratio": left / len(sequences), **sums}


def _drifted(s: Completed, options: dict[str, Any]) -> bool:
    if options.get("drift") is None:
        return False
    drift = float((s.logp.detach() - s.ref).sum())
    if options.get("drift_reduction", "per_token_mean") == "per_token_mean":
        drift /= len(s.logp)
    return drift >= options["drift"]


def _surrogate(loss_type: str, w: Tensor, logp: Tensor, a: float, low: float, high: float, options: Any) -> Tensor:
    if loss_type.startswith("reinforce"):
        return -a * logp
    if loss_type == "cispo":
        return -min(float(w.detach()), options.get("epsilon_max", 5.0)) * a * logp
    if loss_type == "vespo":
        k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        return -(w**k) * torch.exp(rate * (1 - w)) * a * logp
    if loss_type in ("gmpo", "kl_cov"):
        return -w * a
    if loss_type == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return -4 / tau * torch.sigmoid(tau * (w - 1)) * a
    if options.get("delta") is not None:
        w = torch.clamp(w, max=options["delta"])
    return -torch.minimum(w * a, torch.clamp(w, 1 - low, 1 + high) * a)


def _geometric_mean(advantages: list[float], log_ratios: Tensor, low: float, high: float) -> Tensor:
    """GMPO, arXiv 2507.20673: each token's ratio is held on the side to which its advantage pushes."""
    pairs = zip(advantages, log_ratios, strict=True)
    held = [torch.clamp(d, max=high) if a > 0 else torch.clamp(d, min=-low) if a < 0 else d for a, d in pairs]
    return torch.exp(torch.stack(held).mean())


def _selected(
    loss_type: str,
    sequences: Sequence[Completed],
    kept: Sequence[bool],
    actings: Sequence[Sequence[bool]],
    low: float,
    high: float,
    options: dict[str, Any],
) -> list[list[bool]]:
    """The tokens that KL-Cov and Clip-Cov (arXiv 2505.22617) hold back, over all kept tokens of the step."""
    found = [[False] * len(s.logp) for s in sequences]
    corrected = options.get("correction") is not None
    tokens = []  # place, advantage, log-probability, ratio
    for i, (s, keep, acts) in enumerate(zip(sequences, kept, actings, strict=True)):
        old = s.trainer_old if corrected and s.trainer_old is not None else s.old
        for t in range(len(s.logp)) if keep else ():
            logp = float(s.logp[t].detach())
            tokens.append(((i, t), s.advantage if acts[t] else 0.0, logp, math.exp(logp - float(old[t]))))
    if loss_type not in ("kl_cov", "clip_cov") or not tokens:
        return found
    mean_a, mean_logp = (sum(token[column] for token in tokens) / len(tokens) for column in (1, 2))
    ranked = [((a - mean_a) * (logp - mean_logp), a, logp, w, place) for place, a, logp, w in tokens]
    share = options["kl_cov_ratio"] if loss_type == "kl_cov" else options["clip_cov_ratio"]
    if loss_type == "clip_cov":
        free = [
            ((1000 * logp) % 1, place)
            for covariance, a, logp, w, place in ranked
            if options["clip_cov_lb"] < covariance < options["clip_cov_ub"]
            and not (a > 0 and w > 1 + high)
            and not (a < 0 and w < 1 - low)
        ]
    else:
        free = [(covariance, place) for covariance, _, _, _, place in ranked]
    for _, (i, t) in sorted(free, key=lambda each: -each[0])[: max(1, int(share * len(tokens)))]:
        found[i][t] = True
    return found


def _kl(name: str, logp: Tensor, ref: Tensor, old: Tensor) -> Tensor:
    d = logp - ref
    k3 = torch.exp(-d) + d - 1
    moving = d * d / 2 - (d * d / 2).detach()
    plain = {"k1": d, "k2": d * d / 2, "k3": k3, "k3_unbiased": torch.exp(logp - old) * k3, "abs": d.abs()}
    return (plain | {"k1+": d.detach() + moving, "k3+": k3.detach() + moving})[name]
