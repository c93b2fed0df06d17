"""What tests share: a small learner, random batches, the plain model's numbers to compare with, counted memory."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tiny_models import VOCAB_SIZE, tiny_model, tiny_tokenizer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from covey.pytorch.engine import Session
from covey.pytorch.learner import Learner
from covey.pytorch.policy import Policy
from covey.types import Batch, Completion, Episode, IntArray, Request

LENGTHS = (3, 11, 40)
"""Prompt lengths of these tests: below and above the tiny models' window of 6."""


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
    rng, episodes = np.random.default_rng(seed), []
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


def prompts(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[IntArray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, VOCAB_SIZE, size=n) for n in lengths]


def groups(size: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Request]:
    """`size` requests for each prompt, each with its own stream."""
    return [Request(ids, (seed, i, j)) for i, ids in enumerate(prompts(lengths)) for j in range(size)]


@torch.no_grad()
def plain_logits(model: torch.nn.Module, request: Request, completion: Completion) -> torch.Tensor:
    """`[T, V]` logits of the plain model for each token of the completion."""
    ids = torch.from_numpy(np.concatenate([request.token_ids, completion.token_ids]))[None]
    logits: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    return logits[len(request.token_ids) - 1 : -1]


def plain_logprobs(model: Any, request: Request, completion: Completion, temperature: float = 1.0) -> np.ndarray:
    """`[T]` log-probabilities of the completion's tokens over the whole vocabulary."""
    logprobs = (plain_logits(model, request, completion) / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.from_numpy(completion.token_ids)[:, None])[:, 0].numpy()


def assert_plain(
    model: Any, requests: Sequence[Request], found: Sequence[Completion], temperature: float = 1.0,
    *, rtol: float = 1e-7, atol: float = 1e-4,
) -> None:  # fmt: skip
    for request, one in zip(requests, found, strict=True):
        np.testing.assert_allclose(one.logprobs, plain_logprobs(model, request, one, temperature), rtol=rtol, atol=atol)


def texts(completions: Sequence[Completion]) -> list[list[int]]:
    return [c.token_ids.tolist() for c in completions]


def generated(model: Any, ids: IntArray, count: int = 6) -> list[int]:
    """The tokens that transformers' own `generate` chooses with its own cache."""
    mask = torch.ones(1, len(ids), dtype=torch.long)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": count, "eos_token_id": None}
    return model.generate(torch.from_numpy(ids)[None], **options)[0, len(ids) :].tolist()


def finish(session: Session) -> dict[int, Completion]:
    found = {}
    while session.busy:
        found |= {id(row): session.completion(row) for row in session.advance()}
    return found


class LiveMemory(TorchDispatchMode):
    """Inside, every tensor that an operation returns is counted until its memory is given back: `live` bytes now,
    `peak`, the most so far, and `largest`, the most elements of one. What was there before counts nothing, nor does
    what a kernel has inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def knows(self, tensors: Any) -> None:
        for tensor in tensors:
            self._known.add(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        before = {id(x.untyped_storage()) for x in given if not x.is_mkldnn}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.largest = max(self.largest, storage.nbytes() // tensor.element_size())
                if storage not in self._known and id(storage) not in before:
                    self._known.add(storage)
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._freed, storage.nbytes())
        return out

    def _freed(self, size: int) -> None:
        self.live -= size
