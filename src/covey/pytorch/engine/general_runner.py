"""Runs any transformers causal language model on a copy of the model itself.

Two ways, the first that the model supports:

`AttentionRunner`   The model's own forward pass over packed tokens, with an attention function, registered in
                    transformers' `AttentionInterface`, that stores and reads keys and values in the engine's
                    cache. For every model that calls the interface: GPT-2, Gemma, Phi, OPT, GPT-NeoX, ...
`RecomputeRunner`   No cache at all: each step runs the whole sequences again, padded on the right, which a
                    causal model cannot see. Slow (quadratic), and right for state-space and other models with
                    a cache of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from covey.errors import ModelError
from covey.pytorch.attention.probe import missing_windows
from covey.pytorch.engine.attention import Attention
from covey.pytorch.engine.cache import LayerShape
from covey.pytorch.engine.merge import copy_without_adapters
from covey.pytorch.engine.runner import Step
from covey.pytorch.models.rotary import rope_by_length
from covey.types import IntArray

_INTERFACE = "covey_slot_cache"
_UNKNOWN_EFFECTS = ("s_aux", "position_bias", "head_mask")
"""Arguments of attention functions with effects that the cache's attention does not know."""

_active: ContextVar[Attention] = ContextVar("covey_engine_attention")


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature that transformers calls: query `[1, heads, M, dim]` -> `[1, M, heads, dim]`."""
    unknown = [name for name in _UNKNOWN_EFFECTS if kwargs.get(name) is not None]
    if unknown or attention_mask is not None or not getattr(module, "is_causal", True):
        raise ModelError(f"{type(module).__name__}: attention with {unknown or 'a mask of its own'}")
    out = _active.get().attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out.unsqueeze(0), None


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
        """Copy and merge the weights."""
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights[name])


class AttentionRunner(_Copy):
    """See the module docstring.

    Raises:
        ModelError: the model does not use transformers' attention interface, or uses it with an unknown
            effect.
    """

    name = "general"

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(model, dtype, device)
        if not getattr(self._model, "_supports_attention_backend", False):
            raise ModelError(f"{type(self._model).__name__} does not use transformers' attention interface")
        self._model.config._attn_implementation = _INTERFACE
        recorder = _ShapeRecorder()
        place = torch.zeros(1, dtype=torch.long, device=device)
        with torch.no_grad():
            self._run(place, place, None, recorder)
        layers = sorted(recorder.shapes)
        if not layers or layers != list(range(len(layers))):
            raise ModelError(f"{type(self._model).__name__}: only layers {layers} use the attention interface")
        config = self._model.config.get_text_config()
        if getattr(config, "attention_chunk_size", None) is not None:
            raise ModelError(f"{type(self._model).__name__}: its attention is chunked")
        if (obstacle := missing_windows(config, [recorder.windows[i] for i in layers])) or (
            obstacle := rope_by_length(self._model) or ""
        ):
            raise ModelError(f"{type(self._model).__name__}: {obstacle}")
        self.layer_shapes = [recorder.shapes[i] for i in layers]

    def forward(self, step: Step) -> Tensor:
        """Logits `[n, V]`; see `Runner`."""
        return self._run(step.token_ids, step.positions, step.last, step.attention)

    def _run(self, token_ids: Tensor, positions: Tensor, last: Tensor | None, attention: Attention) -> Tensor:
        kept: dict[str, Tensor] = {"logits_to_keep": last} if self._keeps_logits and last is not None else {}
        token = _active.set(attention)
        try:
            output = self._model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **kept)
        finally:
            _active.reset(token)
        logits: Tensor = output.logits[0]
        return logits if last is None or kept else logits.index_select(0, last)


class RecomputeRunner(_Copy):
    """See the module docstring."""

    name = "recompute"

    def forward(self, step: Step) -> Tensor:
        """Logits `[n, V]`; see `Runner`."""
        sequences = step.histories()
        if rope_by_length(self._model) is not None:  # a long sequence would turn the others' positions
            return torch.cat([self._run([ids]) for ids in sequences])
        return self._run(sequences)

    def _run(self, sequences: Sequence[IntArray]) -> Tensor:
        width = max(map(len, sequences))
        padded, present = torch.zeros(2, len(sequences), width, dtype=torch.long)
        for row, ids in enumerate(sequences):
            padded[row, : len(ids)] = torch.from_numpy(ids)
            present[row, : len(ids)] = 1
        padded, present = padded.to(self._device), present.to(self._device)
        logits: Tensor = self._model(input_ids=padded, attention_mask=present, use_cache=False).logits
        ends = torch.tensor([len(ids) - 1 for ids in sequences], device=self._device)
        return logits[torch.arange(len(sequences), device=self._device), ends]


class _ShapeRecorder:
    """Stands in for attention once, to learn what each layer stores."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        self.windows[layer] = window
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
