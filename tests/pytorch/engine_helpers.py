"""What the engine's tests compare with: the plain transformers model, one sequence at a time; and counted memory."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tiny_models import VOCAB_SIZE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from covey.pytorch.engine import Session
from covey.types import Completion, IntArray, Request

LENGTHS = (3, 11, 40)
"""Prompt lengths of these tests: below and above the tiny models' window of 6."""


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


def plain_logprobs(
    model: torch.nn.Module, request: Request, completion: Completion, temperature: float = 1.0
) -> np.ndarray:
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
    """Inside, every tensor that an operation returns is counted until its memory is given back: `live` bytes now, and
    `peak`, the most so far. What was there before counts nothing, nor does what a kernel has inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def knows(self, tensors: Any) -> None:
        """Take tensors for what was there before."""
        for tensor in tensors:
            self._known.add(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage not in self._known and id(storage) not in before:
                    self._known.add(storage)
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._freed, storage.nbytes())
        return out

    def _freed(self, size: int) -> None:
        self.live -= size


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.untyped_storage().nbytes() // value.element_size())
        return out
