"""Compares a policy's scores with its model's own logits, once, on a few random tokens.

There are too many architectures, and too many ways to configure them, to list which ones keep their promises.
So the policy asks: the model's plain forward, one sequence at a time, is the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from covey.errors import ModelError
from covey.pytorch.attention.tree_attention import NAME_PREFIX, PLAIN_IMPLEMENTATIONS
from covey.pytorch.attention.tree_layout import TreeLayout
from covey.pytorch.models.narrow import computing_dtype
from covey.pytorch.rounding import truth_and_own, unexplained
from covey.rollout.packing import Pack, pack_episodes
from covey.types import Episode


class Expected:
    """What a model's own code says about a small pack: log-probabilities over the vocabulary, `[U, V]`, in float32 or
    wider (the `truth`) and in the model's own precision.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.pack = probe_pack(model)
        self.truth, self.own = truth_and_own(model, computing_dtype(model), partial(_plain, model, self.pack))

    def differs(self, found: Tensor) -> str:
        """Why these cannot be the model's, or ""; see `covey.pytorch.rounding`."""
        return unexplained(found, self.own, self.truth)


def check_scores(source: str, model: PreTrainedModel, score: Callable[[Pack], Tensor], expected: Expected) -> None:
    """Raise `ModelError` if log-probabilities from hidden states and head are not those of the model's logits."""
    with torch.no_grad():
        problem = expected.differs(score(expected.pack))
    if problem:
        raise ModelError(
            f"{source}: log-probabilities of {type(model).__name__} cannot be computed from hidden states "
            f"and output head ({problem}); use a model whose logits are linear in its last hidden state"
        )


def find_obstacle(
    model: PreTrainedModel, score_packed: Callable[[Pack, TreeLayout], Tensor], expected: Expected | None = None
) -> str | None:
    """Switch a model to packed attention if it then scores as before; else why it cannot share prompts. `score_packed`
    finds a pack's log-probabilities `[U, V]` so; `expected` are the model's own.
    """
    before = model.config._attn_implementation.removeprefix(NAME_PREFIX)
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
    try:
        expected = expected or Expected(model)
        layout = TreeLayout.of(expected.pack.branches, model.device)
        with torch.no_grad():
            model.set_attn_implementation(NAME_PREFIX + before)
            reason = expected.differs(score_packed(expected.pack, layout)) or missing_windows(config, layout.seen)
    except Exception as error:  # whatever an architecture does with what it does not expect
        reason = f"{type(error).__name__}: {error}"
    if reason:
        model.set_attn_implementation(before)
    return reason or None


def probe_pack(model: PreTrainedModel) -> Pack:
    """Two prompts with six and two continuations, 37 tokens. Of the first's, two are equal, one parts from them after
    its first token and one inside; one of the second's has foreign tokens inside.
    """
    rng = np.random.default_rng(0)
    vocab_size = int(model.config.get_text_config().vocab_size)
    prefixes = [rng.integers(0, vocab_size, 6), rng.integers(0, vocab_size, 4)]
    first, episodes = rng.integers(0, vocab_size, 5), []
    rows = ((0, 5, 0), (0, 5, 0), (0, 1, 3), (0, 3, 4), (0, 0, 2), (0, 0, 4), (1, 0, 1), (1, 0, 7))
    for prefix, shared, length in rows:
        token_ids = np.concatenate([prefixes[prefix], first[:shared], rng.integers(0, vocab_size, length)])
        sampled = np.arange(len(token_ids)) >= len(prefixes[prefix])
        if length == 7:
            sampled[-4:-2] = False
        episodes.append(Episode(token_ids, sampled, np.zeros(len(token_ids), np.float32), "", "stop", 0))
    return pack_episodes(episodes)[0]


@torch.no_grad()
def _plain(model: PreTrainedModel, pack: Pack, dtype: torch.dtype) -> Tensor:
    """`[U, V]` log-probabilities, in a precision, from the model's own logits, a sequence at a time."""
    sequences = [torch.from_numpy(tokens).to(model.device)[None] for tokens in pack.sequences()]
    found = [model(input_ids=ids, use_cache=False).logits[0] for ids in sequences]
    at = zip(pack.row[pack.first], pack.position_ids[pack.score_at], strict=True)
    return torch.stack([found[row][position] for row, position in at]).to(dtype).log_softmax(-1)


def missing_windows(config: Any, seen: Sequence[int | None]) -> str:
    """Sliding windows longer than a probe cannot be felt, so they must be `seen` to reach each layer's attention."""
    kinds = getattr(config, "layer_types", None)
    everywhere = bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)
    told = [kind == "sliding_attention" for kind in kinds] if kinds else [everywhere] * len(seen)
    found = [window is not None for window in seen]
    return "" if found == told else "its sliding windows do not reach the attention function"
