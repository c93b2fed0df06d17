"""A small learner and a random batch, shared by the tests of the learner and of the update."""

from typing import Any

import numpy as np
import torch
from tiny_models import tiny_model, tiny_tokenizer

from covey.pytorch.learner import Learner
from covey.pytorch.policy import Policy
from covey.types import Batch, Episode


def fill(policy: Any, seed: int = 1) -> Any:
    """The policy with trainable weights that change it; equal seeds give equal ones."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.trainable_parameters():
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return policy


def episode(ids: Any, sampled: Any) -> Episode:
    return Episode(np.asarray(ids), np.asarray(sampled), np.zeros(len(ids), np.float32), "", "stop", 0)


def make_learner(**options: Any) -> Learner:
    policy = Policy.load(tiny_model("llama"), tiny_tokenizer(), lora_r=4, seed=3)
    with torch.no_grad():
        for name, parameter in policy.named_trainable_parameters():
            if "lora_B" in name:  # a fresh adapter has B = 0, which would hide half of the gradient
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
    return Learner(policy, **({"learning_rate": 1e-2} | options))


def sampled_of(episodes: list[Episode]) -> tuple[np.ndarray, np.ndarray]:
    exists = np.arange(max(e.num_sampled for e in episodes)) < np.array([[e.num_sampled] for e in episodes])
    old = np.zeros(exists.shape, np.float32)
    old[exists] = np.concatenate([e.logprobs[e.sampled] for e in episodes])
    return exists, old


def make_batch(seed: int = 0, agents: bool = False, groups: int = 3) -> Batch:
    rng = np.random.default_rng(seed)
    episodes = []
    for _ in range(groups):
        prompt = rng.integers(4, 97, size=rng.integers(2, 7))
        for _ in range(4):
            tail = int(rng.integers(1, 9))
            ids = np.concatenate([prompt, rng.integers(4, 97, size=tail)])
            sampled = np.arange(len(ids)) >= len(prompt)
            if agents and tail > 3:
                sampled[len(prompt) + 1 : len(prompt) + 3] = False
            logprobs = np.where(sampled, rng.normal(-4, 0.3, size=len(ids)), 0).astype(np.float32)
            episodes.append(Episode(ids, sampled, logprobs, "", "stop", 1))
    mask, old = sampled_of(episodes)
    advantages = np.where(mask, rng.normal(size=(len(episodes), 1)), 0).astype(np.float32)
    return Batch(tuple(episodes), np.arange(groups).repeat(4), advantages, mask, old)


def grads_of(policy: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in policy.named_trainable_parameters() if p.grad is not None}
