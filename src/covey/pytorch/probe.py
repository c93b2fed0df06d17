"""Compares a policy's scores with its model's own logits, once, on a few random tokens.

There are too many architectures, and too many ways to configure them, to list which ones keep their promises.
So the policy asks: the model's plain forward, one sequence at a time, is the truth.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from covey.errors import ModelError
from covey.pytorch.prefix_attention import NAME_PREFIX, PLAIN_IMPLEMENTATIONS, PrefixLayout
from covey.rollout.packing import Pack, pack_episodes
from covey.types import Episode

_TOLERANCE = {torch.float32: (1e-3, 1e-2), torch.float64: (1e-3, 1e-2)}
_HALF_TOLERANCE = (0.1, 1.0)
"""Largest mean and maximum difference of log-probabilities. A completion that does not see its prompt is off
by about 1 on average; half precision alone by about 0.02."""


def check_scores(source: str, model: PreTrainedModel, score: Callable[[Pack], Tensor]) -> None:
    """Raise `ModelError` if scores from hidden states and head are not those of the model's logits."""
    pack = _probe_pack(model)
    with torch.no_grad():
        problem = _difference(model, score(pack), _expected(model, pack))
    if problem:
        raise ModelError(
            f"{source}: log-probabilities of {type(model).__name__} cannot be computed from hidden states "
            f"and output head ({problem}); use a model whose logits are linear in its last hidden state"
        )


def find_obstacle(model: PreTrainedModel, score_packed: Callable[[Pack, PrefixLayout], Tensor]) -> str | None:
    """Switch a model to packed attention if it then scores as before.

    Args:
        model: changed to packed attention on success, unchanged otherwise.
        score_packed: scores a pack through packed attention.

    Returns:
        None, or why the model cannot share prompts.
    """
    before = model.config._attn_implementation
    if before.startswith(NAME_PREFIX):
        before = before.removeprefix(NAME_PREFIX)
    if before not in PLAIN_IMPLEMENTATIONS:
        return f"its attention implementation is {before}; sdpa and eager are served"
    config = model.config.get_text_config()
    if getattr(config, "attention_chunk_size", None) is not None:
        return "its attention is chunked"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}"
    if not model._can_set_attn_implementation():
        return "it does not use transformers' attention interface"
    pack = _probe_pack(model)
    layout = PrefixLayout.from_blocks(pack.blocks, model.device)
    try:
        with torch.no_grad():
            expected = _expected(model, pack)
            model.set_attn_implementation(NAME_PREFIX + before)
            reason = _difference(model, score_packed(pack, layout), expected) or _missing_windows(model, layout)
    except Exception as error:  # whatever an architecture does with what it does not expect
        reason = f"{type(error).__name__}: {error}"
    if reason:
        model.set_attn_implementation(before)
        return reason
    return None


def _probe_pack(model: PreTrainedModel) -> Pack:
    """Two prompts with three and two continuations, one of them with foreign tokens inside: 29 tokens."""
    rng = np.random.default_rng(0)
    vocab_size = int(model.config.get_text_config().vocab_size)
    prefixes = [rng.integers(0, vocab_size, 6), rng.integers(0, vocab_size, 4)]
    episodes = []
    for prefix, length in ((0, 5), (0, 2), (0, 4), (1, 1), (1, 7)):
        token_ids = np.concatenate([prefixes[prefix], rng.integers(0, vocab_size, length)])
        sampled = np.arange(len(token_ids)) >= len(prefixes[prefix])
        if length == 7:
            sampled[-4:-2] = False
        episodes.append(Episode(token_ids, sampled, np.zeros(len(token_ids), np.float32), "", "stop", 0))
    return pack_episodes(episodes)[0]


def _expected(model: PreTrainedModel, pack: Pack) -> Tensor:
    """`[S]` log-probabilities from the model's own logits, a sequence at a time."""
    parts = []
    row = 0
    for block in pack.blocks:
        prefix = pack.token_ids[block.start : block.start + block.prefix_len]
        start = block.start + block.prefix_len
        for length in block.suffix_lens:
            tokens = np.concatenate([prefix, pack.token_ids[start : start + length]])
            logits = model(input_ids=torch.from_numpy(tokens).to(model.device)[None], use_cache=False).logits[0]
            mine = pack.row == row
            at = torch.from_numpy(pack.position_ids[pack.score_at[mine]]).to(model.device)
            targets = torch.from_numpy(pack.targets[mine]).to(model.device)
            logp = torch.log_softmax(logits[at].float(), dim=-1)
            parts.append(logp.gather(1, targets[:, None])[:, 0])
            start += length
            row += 1
    return torch.cat(parts)


def _difference(model: PreTrainedModel, scores: Tensor, expected: Tensor) -> str:
    difference = (scores.float() - expected).abs()
    mean, largest = float(difference.mean()), float(difference.max())
    allowed_mean, allowed_largest = _TOLERANCE.get(model.dtype, _HALF_TOLERANCE)
    if mean <= allowed_mean and largest <= allowed_largest:  # False for NaN
        return ""
    return f"log-probabilities of a small pack differ by {largest:.3g}, {mean:.3g} on average"


def _missing_windows(model: PreTrainedModel, layout: PrefixLayout) -> str:
    """Sliding windows longer than the probe cannot be felt, so they must be seen to reach the attention."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds:
        told = [kind == "sliding_attention" for kind in kinds]
    else:
        told = [bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)]
        told *= len(layout.seen)
    if [window is not None for window in layout.seen] != told:
        return "its sliding windows do not reach the attention function"
    return ""
