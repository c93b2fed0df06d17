"""Choose how to run a model: the first runner that accepts it *and* computes what the model itself computes.

The check is a short forward pass: three prompts prefilled together, then three tokens more each, against its own
logits in float32; `covey.pytorch.rounding` says which differences are those of the precision. It costs a few hundred
token-steps once, and means that an unusual model runs slowly rather than wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covey.errors import ConfigError, ModelError
from covey.pytorch.engine.attention import DecodeAttention, Piece, PrefillAttention, Span
from covey.pytorch.engine.cache import KVCache, block_capacity
from covey.pytorch.engine.fast_runner import FastRunner
from covey.pytorch.engine.merge import EffectiveWeights, bare_model
from covey.pytorch.engine.runner import AttentionRunner, RecomputeRunner, Runner, Step
from covey.pytorch.rounding import truth_and_own, unexplained, wide_dtype

_PROMPTS = (7, 4, 6)
_MORE = 3
_Build = Callable[[nn.Module, torch.dtype, torch.device], Runner]
_KINDS: dict[str, _Build] = {"fast": FastRunner, "general": AttentionRunner, "recompute": RecomputeRunner}


def choose_runner(
    model: nn.Module, dtype: torch.dtype, device: torch.device, named: str | None = None
) -> tuple[Runner, str]:
    """The first runner that reproduces the model, loaded, and why those before it were passed over, "" if none was.

    A runner that is `named` is not compared with anything and not loaded.

    Raises `ModelError`: none does, or the model's own logits are not finite.
    """
    if named:
        return _KINDS[named](model, dtype, device), ""
    weights, modes = EffectiveWeights(model), [(module, module.training) for module in model.modules()]
    config: Any = bare_model(model).config
    vocab = getattr(config.get_text_config(), "vocab_size", 0) or 2
    # high ids are rarely special tokens, which some models treat apart (padding)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(vocab // 2, vocab, size=n + _MORE) for n in _PROMPTS]
    try:
        model.eval()
        truth, own = truth_and_own(model, dtype, partial(_reference, model, sequences))
    finally:
        for module, mode in modes:
            module.training = mode
    refusals: list[str] = []
    for name, build in _KINDS.items():
        try:
            runner = build(model, dtype, device)
            runner.load(weights)
            with torch.inference_mode():
                found = _run(runner, sequences, dtype, device)
        except (ModelError, TypeError, AttributeError, KeyError, RuntimeError, ValueError) as refusal:
            refusals.append(f"not {name}: {str(refusal).splitlines()[0] if str(refusal) else repr(refusal)}")
            continue
        problem = unexplained(found, own, truth)
        if not problem:
            return runner, "; ".join(refusals)
        refusals.append(f"not {name}: {problem}")
    raise ModelError(
        f"{type(bare_model(model)).__name__}: no way of running it gives the model's own logits "
        f"({'; '.join(refusals)}); use a transformers causal language model"
    )


def in_bytes(runner: Runner, model: nn.Module, dtype: torch.dtype, device: torch.device, *, load: bool) -> Runner:
    """A runner like the one chosen, with products in int8, which no comparison of logits would let pass.

    Raises `ConfigError`: the model is not run in float32 on a CPU by the fast runner.
    """
    if not isinstance(runner, FastRunner) or dtype != torch.float32 or device.type != "cpu":
        raise ConfigError(
            f"sampling.sampler_dtype='int8': the {runner.name} runner in {dtype} on {device.type} has no such product; "
            "it needs a CPU and a model of Llama's shape in float32 or with model.dtype='bfloat16'; write 'model'"
        )
    found = FastRunner(model, dtype, device, products=torch.int8)
    if load:
        found.load(EffectiveWeights(model))
    return found


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """True on a processor that multiplies numbers of this half precision as float32, one conversion after another."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    asked = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return asked is not None and not asked()


@torch.no_grad()
def _reference(model: nn.Module, sequences: list[Any], dtype: torch.dtype) -> Tensor:
    """`[n, V]` log-probabilities, in a precision, of the model's own code, where generation looks."""
    device = next(model.parameters()).device
    logits = [model(input_ids=torch.from_numpy(ids)[None].to(device), use_cache=False).logits[0] for ids in sequences]
    return torch.cat([one[n - 1 :].to(dtype).log_softmax(-1) for one, n in zip(logits, _PROMPTS, strict=True)])


def _run(runner: Runner, sequences: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same from a runner."""
    cache = KVCache(runner.layer_shapes, 1 << 62, dtype, device)
    cache.open(len(_PROMPTS), _MORE, sum(map(block_capacity, _PROMPTS)))
    blocks = [b for b in map(cache.allocate, _PROMPTS) if b is not None]
    paths = [(Span(block, n),) for block, n in zip(blocks, _PROMPTS, strict=True)]
    prompts = [ids[:n] for ids, n in zip(sequences, _PROMPTS, strict=True)]

    def tensor(values: Any) -> Tensor:
        return torch.from_numpy(np.asarray(values)).to(device)

    first = Step(
        token_ids=tensor(np.concatenate(prompts)),
        positions=tensor(np.concatenate([np.arange(n) for n in _PROMPTS])),
        last=tensor(np.cumsum(_PROMPTS) - 1),
        attention=PrefillAttention(cache, [Piece(path, path[0].length) for path in paths]),
        histories=lambda: prompts,
    )
    logits = [runner.forward(first)]
    attention = DecodeAttention(cache, paths, device)
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
    found = torch.cat([torch.stack([step[i] for step in logits]) for i in range(len(_PROMPTS))])
    return found.to(wide_dtype(dtype)).log_softmax(-1)
