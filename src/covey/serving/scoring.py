"""`/v1/score`: how likely the tokens of sequences are under the weights that are served.

The model is run as a learner runs it, over packs in which sequences share what they begin with, an uploaded adapter
beside its layers. It runs beside the engine's thread, so completions go on meanwhile.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covey.errors import GenerationError, ModelError
from covey.pytorch.logprobs import score_tokens
from covey.pytorch.models.loading import LoadedModel
from covey.pytorch.packed_model import PackedModel
from covey.pytorch.products import add_product, linear
from covey.rollout.learning import Weights
from covey.rollout.packing import Pack, pack_episodes
from covey.serving.requests import ScoreRequest
from covey.types import Episode

_AT_ONCE, _ROWS = 2048, 128
"""Tokens of a pack, unless one sequence has more; places at a time whose likeliest tokens are looked for."""


class Scorer:
    """Scores sequences with a server's model, one request at a time."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        self._loaded = LoadedModel(model, tokenizer, "the served model", ())

    @cached_property
    def _model(self) -> PackedModel:
        return PackedModel(self._loaded, fused_layers=False, trains=False)

    def __call__(self, asked: ScoreRequest, weights: Weights) -> list[dict[str, Any]]:
        """Of each sequence `logprobs` of its tokens from `start` on, and with `top_k` the best at each: `top_ids` and
        `top_logprobs`, likeliest first. Raises `GenerationError`: the model cannot score, or memory runs out.
        """
        both, nothing = zip(map(np.array, asked.token_ids), asked.start, strict=True), np.zeros(0, np.float32)
        episodes = [Episode(ids, np.arange(len(ids)) >= start, nothing, "", "length", 0) for ids, start in both]
        first, k = np.cumsum([0, *(episode.num_sampled for episode in episodes)]), asked.top_k
        k = min(k, self._model.lm.config.get_text_config().vocab_size)
        found = np.zeros((first[-1], 1 + 2 * k))
        adapter = getattr(weights.tensors(), "adapter", None)
        try:
            with torch.no_grad(), ExitStack() as hooks:
                for name, factors in ({} if adapter is None else adapter.factors).items():
                    module = self._model.lm.get_submodule(name)
                    hooks.callback(module.register_forward_hook(partial(_add, factors)).remove)
                shared = self._model.prefix_sharing_obstacle is None
                budget = 1 if self._model.rows_apart else _AT_ONCE
                for pack in pack_episodes(episodes, tokens_per_pack=budget, shared=shared):
                    scores = self._scored(pack, asked.temperature or 1.0, k)
                    found[first[pack.rows[pack.row]] + pack.column] = scores[pack.pair]
        except (ModelError, RuntimeError) as error:
            raise GenerationError(f"scoring failed: {str(error).splitlines()[0]}") from error
        if not np.isfinite(found).all():
            raise GenerationError("the model's log-probabilities are not finite; its weights are damaged")
        own = np.split(found, first[1:-1])
        best = [{"top_ids": row[:, k + 1 :].astype(np.int64), "top_logprobs": row[:, 1 : k + 1]} for row in own]
        return [{"logprobs": row[:, 0]} | (more if k else {}) for row, more in zip(own, best, strict=True)]

    def _scored(self, pack: Pack, temperature: float, k: int) -> np.ndarray[Any, Any]:
        """`[U, 1 + 2k]` of a pack's targets their log-probability, then the k best ones, then their ids."""
        hidden, head = self._model.hidden(pack), self._model.head()
        targets = torch.from_numpy(pack.targets).to(hidden.device)
        parts = [score_tokens(hidden, targets, head, temperature=temperature).logp[:, None].double()]
        if k:
            best = [(head.logits(h) / temperature).log_softmax(-1).topk(k) for h in torch.split(hidden, _ROWS)]
            parts += [torch.cat([values for values, _ in best]).double(), torch.cat([ids for _, ids in best]).double()]
        return torch.cat(parts, 1).cpu().numpy()


def _add(factors: Any, module: nn.Module, inputs: tuple[Tensor], out: Tensor) -> None:
    """Add `scaling (x A') B'` to what a layer has made of x."""
    x = inputs[0].reshape(-1, inputs[0].shape[-1])
    a, b = (torch.from_numpy(part).to(x) for part in (factors.a, factors.b))
    add_product(out.view(-1, out.shape[-1]), linear(x, a), b.T, factors.scaling)
