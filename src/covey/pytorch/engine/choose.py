"""Choose how to run a model: the first runner that accepts it *and* computes what the model itself computes.

The check is a short forward pass: two prompts prefilled together, then three more tokens each, against the
model's own logits. It costs a few hundred token-steps once, and means that an unusual model runs slowly
rather than wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covey.errors import ModelError
from covey.pytorch.engine.attention import DecodeAttention, PrefillAttention
from covey.pytorch.engine.cache import KVCache, block_capacity
from covey.pytorch.engine.fast_runner import FastRunner
from covey.pytorch.engine.general_runner import AttentionRunner, RecomputeRunner
from covey.pytorch.engine.merge import EffectiveWeights, bare_model
from covey.pytorch.engine.runner import Runner, Step

_PROMPTS = (7, 4)
_MORE = 3
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 2e-3}
_HALF_TOLERANCE = 0.5
_Build = Callable[[nn.Module, torch.dtype, torch.device], Runner]
_KINDS: dict[str, _Build] = {
    "fast": FastRunner,
    "general": AttentionRunner,
    "recompute": RecomputeRunner,
}


def choose_runner(model: nn.Module, dtype: torch.dtype, device: torch.device) -> tuple[Runner, str]:
    """The first runner that reproduces the model, loaded, and why the earlier ones were passed over.

    Raises:
        ModelError: none does.
    """
    weights = EffectiveWeights(model)
    sequences = _probe_sequences(model)
    expected = _reference(model, sequences)
    own = next(model.parameters()).dtype
    tolerance = max(_TOLERANCE.get(dtype, _HALF_TOLERANCE), _TOLERANCE.get(own, _HALF_TOLERANCE))
    refusals: list[str] = []
    for name, build in _KINDS.items():
        try:
            runner = build(model, dtype, device)
            runner.load(weights)
            with torch.inference_mode():
                difference = _difference(_run(runner, sequences, dtype, device), expected)
        except (ModelError, TypeError, AttributeError, KeyError, RuntimeError, ValueError) as refusal:
            refusals.append(f"not {name}: {str(refusal).splitlines()[0] if str(refusal) else repr(refusal)}")
            continue
        if difference <= tolerance:
            return runner, "; ".join(refusals) or f"log-probabilities within {difference:.1e} of the model's own"
        refusals.append(f"not {name}: log-probabilities differ by {difference:.1e}")
    raise ModelError(
        f"{type(bare_model(model)).__name__}: no way of running it gives the model's own logits "
        f"({'; '.join(refusals)}); use a transformers causal language model"
    )


def _probe_sequences(model: nn.Module) -> list[Any]:
    config: Any = bare_model(model).config
    vocab = getattr(config.get_text_config(), "vocab_size", 0) or 2
    # high ids are rarely special tokens, which some models treat apart (padding)
    rng = np.random.default_rng(0)
    return [rng.integers(vocab // 2, vocab, size=n + _MORE) for n in _PROMPTS]


@torch.no_grad()
def _reference(model: nn.Module, sequences: list[Any]) -> list[Tensor]:
    """The model's own log-probabilities where generation looks, `[MORE + 1, V]` for each sequence."""
    device = next(model.parameters()).device
    out = []
    with _evaluating(model):
        for ids, length in zip(sequences, _PROMPTS, strict=True):
            logits = model(input_ids=torch.from_numpy(ids)[None].to(device), use_cache=False).logits
            out.append(logits[0, length - 1 :].float().log_softmax(-1))
    return out


def _run(runner: Runner, sequences: list[Any], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    tokens = sum(block_capacity(n) for n in _PROMPTS)
    cache = KVCache(runner.layer_shapes, 1 << 62, dtype, device)
    cache.open(len(_PROMPTS), _MORE, tokens)
    blocks = [b for b in map(cache.allocate, _PROMPTS) if b is not None]
    prompts = [ids[:n] for ids, n in zip(sequences, _PROMPTS, strict=True)]

    def tensor(values: Any) -> Tensor:
        return torch.from_numpy(np.asarray(values)).to(device)

    first = Step(
        token_ids=tensor(np.concatenate(prompts)),
        positions=tensor(np.concatenate([np.arange(n) for n in _PROMPTS])),
        last=tensor(np.cumsum(_PROMPTS) - 1),
        attention=PrefillAttention(cache, blocks),
        histories=lambda: prompts,
    )
    logits = [runner.forward(first)]
    attention = DecodeAttention(cache, blocks, device)
    for i in range(_MORE):
        attention.advance(np.full(len(_PROMPTS), i))
        grown = [ids[: n + i + 1] for ids, n in zip(sequences, _PROMPTS, strict=True)]
        step = Step(
            token_ids=tensor([ids[-1] for ids in grown]),
            positions=tensor([len(ids) - 1 for ids in grown]),
            last=None,
            attention=attention,
            histories=partial(list, grown),
        )
        logits.append(runner.forward(step))
    return [torch.stack([step[i] for step in logits]).float().log_softmax(-1) for i in range(len(_PROMPTS))]


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    differences = [(a.to(b.device) - b).abs().max() for a, b in zip(found, expected, strict=True)]
    worst = float(torch.stack(differences).max())
    return worst if worst == worst else float("inf")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off, then every module's mode as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
