"""What the scheduler asks of a model, and how any causal LM of transformers gives it on a copy of itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from covey.errors import ModelError
from covey.pytorch.attention.probe import missing_windows
from covey.pytorch.attention.tree_attention import rule_of
from covey.pytorch.engine.attention import Attention
from covey.pytorch.engine.cache import LayerShape
from covey.pytorch.engine.merge import copy_without_adapters
from covey.pytorch.models.form import listen, rope_by_length
from covey.types import IntArray

_INTERFACE = "covey_slot_cache"
_active: ContextVar[Attention] = ContextVar("covey_engine_attention")


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One forward pass over M packed tokens of n sequences; nothing is padded."""

    token_ids: Tensor  # [M]
    positions: Tensor  # [M] or [3, M] what each token is turned by (`covey.rollout.places`)
    last: Tensor | None  # [n] which of the M tokens are the last of their sequence; None when each is (decode)
    attention: Attention  # stores and attends
    histories: Callable[[], Sequence[IntArray]]  # the n sequences whole, for runners that keep no cache


class Runner(Protocol):
    """A copy of a model's weights and a way to run them."""

    name: str
    layer_shapes: Sequence[LayerShape]  # what each layer stores in the cache

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take the weights, by their names in the bare model, as they are now."""

    def release(self) -> None:
        """Give back what memory can be given back until the next `load`."""

    def forward(self, step: Step) -> Tensor:
        """Logits `[n, V]` after the last token of each sequence."""


def _attention_function(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The signature that transformers calls: query `[1, heads, M, dim]` -> `[1, M, heads, dim]`."""
    rule = rule_of(module, query, scaling, kwargs)
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__}: attention with a mask of its own")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _active.get().attend(int(module.layer_idx), q, k, v, rule).unsqueeze(0), None


AttentionInterface.register(_INTERFACE, _attention_function)


class _Copy:
    """A copy of the model without adapters, and its weights."""

    layer_shapes: Sequence[LayerShape] = ()

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._model: Any = copy_without_adapters(model).to(device)
        for parameter in self._model.parameters():
            parameter.data = parameter.data.to(dtype)  # buffers, such as rotary frequencies, keep their precision
        self._device = device
        self._keeps_logits = "logits_to_keep" in inspect.signature(self._model.forward).parameters

    def release(self) -> None:
        """Nothing: the copy is a model whose modules need their tensors."""

    def load(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights[name])


class AttentionRunner(_Copy):
    """The model's own forward pass over packed tokens, for every model that calls transformers' `AttentionInterface`:
    there an attention function is registered that stores and reads keys and values in the engine's cache. `ModelError`
    where the model does not, or asks for what is not computed here.
    """

    name = "general"

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(model, dtype, device)
        name, config = type(self._model).__name__, self._model.config.get_text_config()
        if not getattr(self._model, "_supports_attention_backend", False):
            raise ModelError(f"{name} does not use transformers' attention interface")
        if getattr(config, "attention_chunk_size", None) is not None:
            raise ModelError(f"{name}: its attention is chunked")
        calls = listen(self._model)
        if obstacle := missing_windows(config, [call.rule.window for call in calls]) or rope_by_length(self._model):
            raise ModelError(f"{name}: {obstacle}")
        self._model.config._attn_implementation = _INTERFACE
        self.layer_shapes = [LayerShape(call.kv_heads, call.dim, call.value_dim) for call in calls]

    def forward(self, step: Step) -> Tensor:
        last, ids, positions = step.last, step.token_ids[None], step.positions.unsqueeze(-2)
        kept: dict[str, Tensor] = {"logits_to_keep": last} if self._keeps_logits and last is not None else {}
        token = _active.set(step.attention)
        try:
            output = self._model(input_ids=ids, position_ids=positions, use_cache=False, **kept)
        finally:
            _active.reset(token)
        logits: Tensor = output.logits[0]
        return logits if last is None or kept else logits.index_select(0, last)


class RecomputeRunner(_Copy):
    """No cache at all: each step runs the whole sequences again, padded on the right. Slow (quadratic), and right for
    state-space and other models with a cache of their own.
    """

    name = "recompute"

    def forward(self, step: Step) -> Tensor:
        sequences = step.histories()
        if rope_by_length(self._model) is not None:  # a long sequence would turn the others' positions
            return torch.cat([self._run([ids]) for ids in sequences])
        return self._run(sequences)

    def _run(self, sequences: Sequence[IntArray]) -> Tensor:
        padded = pad_sequence([torch.from_numpy(ids) for ids in sequences], batch_first=True).to(self._device)
        ends = torch.tensor([len(ids) - 1 for ids in sequences], device=self._device)
        places = torch.arange(padded.shape[1], device=self._device)
        present = (places <= ends[:, None]).long()
        logits: Tensor = self._model(input_ids=padded, attention_mask=present, use_cache=False).logits
        return logits[torch.arange(len(sequences), device=self._device), ends]
