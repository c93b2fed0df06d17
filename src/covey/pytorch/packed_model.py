"""A causal LM that is run over packs: hidden states of the positions that predict sampled tokens.

A pack's prompts are computed once where the model's attention allows it (`tree_attention`); whether it does is found
out by a probe that compares a small pack with the model's own logits. Models that fail it are run sequence by sequence
in one padded batch, with the same result. LoRA on a model of Llama's shape (`form`) is run by the fused layers
(`fused`), which keep half of what autograd would.

Dropout stays off unless LoRA dropout was asked for: a policy that samples without it has log-probabilities without it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_layers import GradientCheckpointingLayer

from covey.errors import ModelError
from covey.pytorch.attention.probe import Expected, check_scores, find_obstacle
from covey.pytorch.attention.tree_attention import LAYOUT_ARGUMENT
from covey.pytorch.attention.tree_layout import TreeLayout, TreePath
from covey.pytorch.fused import FusedDecoder
from covey.pytorch.models.form import Head, rope_by_length
from covey.pytorch.models.loading import LoadedModel, causal_lm, transformer
from covey.pytorch.models.lora import album_of, dropout_obstacle, switch_dropout_off
from covey.rollout.packing import Pack

if TYPE_CHECKING:
    from covey.rollout.walking import Piece

logger = logging.getLogger("covey.pytorch")


class PackedModel:
    """The weights of a policy, and how they are run.

    Attributes:
        loaded: what it was made of.
        lm: the transformers model, with adapters inside.
        prefix_sharing_obstacle: why prompts are not shared when scoring, or None when they are.
        fused: the fused layers, None where `fused_obstacle` says why.
        rows_apart: rows of different lengths may not be run together, not even padded.
        ids: of the vocabulary these first ones are scored alone; None = all.
    """

    ids: int | None = None

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        prefix_sharing: bool = True,
        fused_layers: bool = True,
        gradient_checkpointing: bool = False,
        autocast: str = "none",
        trains: bool = True,
    ) -> None:
        """Take a loaded model whose `requires_grad` flags say what is trained. `ModelError` where nothing is, unless it
        `trains` nothing, or its log-probabilities cannot be reproduced from its parts.
        """
        self.loaded, self.checkpoints = loaded, gradient_checkpointing
        self._set_model(loaded.model)
        if trains and not any(p.requires_grad for p in self.model.parameters()):
            raise ModelError(f"{loaded.source}: has no trainable parameter; attach an adapter or unfreeze the model")
        self._autocast: torch.dtype | None = None  # what probes compare is the model in its own precision
        expected = Expected(self.lm)
        check_scores(loaded.source, self.lm, lambda pack: self._probe(self._hidden_padded(pack)), expected)
        by_length = rope_by_length(self.lm)
        self.rows_apart = by_length is not None
        self.prefix_sharing_obstacle: str | None = "model.prefix_sharing is off"
        if prefix_sharing:
            found = by_length or dropout_obstacle(self.model) or find_obstacle(self.lm, self.probe_packed, expected)
            self.prefix_sharing_obstacle = found
            if found is not None:
                logger.warning("%s: tokens are not shared when scoring, which is slower: %s", loaded.source, found)
        self.fused: FusedDecoder | None = None
        self.fused_obstacle: str | None = "model.fused_layers is off"
        if autocast != "none":
            self.fused_obstacle = f"optim.autocast is {autocast}"
        elif fused_layers:
            self.fused_obstacle = self._fuse(expected)
        self._checkpoint_layers()
        if (album := album_of(self.lm)) is not None and self.prefix_sharing_obstacle is None:
            album.scores = self._probe_shared
        self._autocast = None if autocast == "none" else getattr(torch, autocast)

    def around(self, model: nn.Module) -> PackedModel:
        """The same around another model of its kind, which is run through its own layers."""
        made = copy.copy(self)
        made.loaded, made.fused = replace(self.loaded, model=model), None
        made._set_model(model)
        made.lm.set_attn_implementation(str(self.lm.config._attn_implementation))
        made._checkpoint_layers()
        return made

    def _set_model(self, model: nn.Module) -> None:
        self.model, self.lm = model, causal_lm(model)
        self.transformer = transformer(self.lm)
        switch_dropout_off(model)
        self.eval()

    @property
    def device(self) -> torch.device:
        return self.lm.device

    def head(self) -> Head:
        head = Head.of(self.lm)
        return head if self.ids is None else head.first(self.ids)

    def hidden(self, pack: Pack | Piece, path: TreePath | None = None) -> Tensor:
        """`[U, d]` the hidden states that predict the pack's targets."""
        if self.prefix_sharing_obstacle is not None:
            run = partial(self._hidden_padded, cast(Pack, pack))
        else:
            hangs: dict[str, Any] = {}
            if not isinstance(pack, Pack):
                hangs = {"past": pack.past, "path": path, "trunk": pack.trunk}
            layout = TreeLayout.of(pack.branches, self.device, **hangs)
            fused = self.fused if self.fused is not None and self.fused.can_run() else None
            run = partial(self.hidden_packed if fused is None else fused.hidden, pack, layout)
        if self._autocast is None:
            return run()
        with torch.autocast(self.device.type, self._autocast):
            return run().to(self.lm.dtype)

    def hidden_packed(self, pack: Pack | Piece, layout: TreeLayout | None = None) -> Tensor:
        """The same by the model's own layers, tokens shared."""
        device = self.device
        out = self.transformer(
            input_ids=torch.from_numpy(pack.token_ids).to(device)[None],
            position_ids=torch.from_numpy(pack.turns).to(device).unsqueeze(-2),
            # transformers takes a 4-dimensional mask as prepared and builds none; packed attention reads none
            attention_mask=torch.zeros(1, 1, 1, 1, device=device, dtype=self.lm.dtype),
            use_cache=False,
            **{LAYOUT_ARGUMENT: layout or TreeLayout.of(pack.branches, device)},
        )
        return cast(Tensor, out[0][0]).index_select(0, torch.from_numpy(pack.score_at).to(device))

    def _hidden_padded(self, pack: Pack) -> Tensor:
        sequences, device = [torch.from_numpy(sequence) for sequence in pack.sequences()], self.device
        pad = cast(int, self.loaded.tokenizer.pad_token_id)
        tokens = pad_sequence(sequences, batch_first=True, padding_value=pad).to(device)
        longest, places = tokens.shape[1], torch.arange(tokens.shape[1], device=device)
        out = self.transformer(
            input_ids=tokens,
            attention_mask=(places < torch.tensor([[len(s)] for s in sequences], device=device)).long(),
            position_ids=places.expand(len(sequences), -1),
            use_cache=False,
        )
        at = pack.row[pack.first] * longest + pack.position_ids[pack.score_at]
        return cast(Tensor, out[0]).flatten(0, 1).index_select(0, torch.from_numpy(at).to(device))

    def _fuse(self, expected: Expected) -> str | None:
        """Use the fused layers if they score as the model does; else say why not."""
        if self.prefix_sharing_obstacle is not None:
            return self.prefix_sharing_obstacle
        source = self.loaded.source
        try:
            self.fused = FusedDecoder(self.lm, checkpoint=self.checkpoints)
            check_scores(source, self.lm, self._probe_shared, expected)
        except ModelError as obstacle:
            self.fused = None
            logger.warning("%s: trained through the model's own layers, which takes more memory: %s", source, obstacle)
            return str(obstacle)
        return None

    def _probe_shared(self, pack: Pack) -> Tensor:
        fused = self.fused if self.fused is not None and self.fused.can_run() else None
        return self._probe((fused.hidden if fused is not None else self.hidden_packed)(pack))

    def probe_packed(self, pack: Pack, layout: TreeLayout) -> Tensor:
        """`[U, V]` log-probabilities by the model's own layers, tokens shared."""
        return self._probe(self.hidden_packed(pack, layout))

    def _probe(self, hidden: Tensor) -> Tensor:
        return self.head().logits(hidden).log_softmax(-1)

    def train(self) -> None:
        """Switch LoRA dropout on, if the adapter has any; the rest of the model stays as when sampling."""
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Dropout) and ".lora_dropout." in name:
                module.training = True

    def eval(self) -> None:
        """Switch every dropout off."""
        with self.plain() as model:
            model.eval()

    @contextmanager
    def plain(self) -> Iterator[nn.Module]:
        """The model without gradient checkpointing, for anything that wants a key-value cache."""
        # of the layer alone: transformers checkpoints only layers in training mode
        checkpointed = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer) and m.training]
        try:
            for layer in checkpointed:
                layer.training = False
            yield self.model
        finally:
            for layer in checkpointed:
                layer.training = True

    def _checkpoint_layers(self) -> None:
        if not self.checkpoints:
            return
        layers = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers or not self.lm.supports_gradient_checkpointing:
            raise ModelError(
                f"{self.loaded.source}: {type(self.lm).__name__} does not support gradient checkpointing; "
                "set model.gradient_checkpointing=false"
            )
        by_name = "activation_checkpointing_enable"  # transformers before 5.23 has it under its former name alone
        getattr(self.lm, by_name, self.lm.gradient_checkpointing_enable)({"use_reentrant": False})
        # only reentrant checkpoints need inputs that require gradients, which cost a backward through the first layer
        self.lm.disable_input_require_grads()  # type: ignore[no-untyped-call]
        for layer in layers:
            layer.training = True
