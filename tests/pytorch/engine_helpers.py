"""What the engine's tests compare with: the plain transformers model, one sequence at a time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from tiny_models import VOCAB_SIZE, tiny_model
from transformers import PreTrainedModel

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


def adapted(model: PreTrainedModel, config: PeftConfig) -> PeftModel:
    """`get_peft_model` without a deprecation warning: PEFT asks transformers for an attribute's old name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        return get_peft_model(model, config)


def with_lora(name: str, *, targets: str | list[str] = "all-linear", **options: object) -> PeftModel:
    """A tiny model with a LoRA adapter whose B is not zero."""
    config = LoraConfig(r=3, lora_alpha=7, target_modules=targets, task_type="CAUSAL_LM", **options)
    if name == "gpt2":
        config.fan_in_fan_out = True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = adapted(tiny_model(name), config)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


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
    """Log-probabilities are the plain model's."""
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
    """Run until every turn is over."""
    found = {}
    while session.busy:
        found |= {id(row): session.completion(row) for row in session.advance()}
    return found
