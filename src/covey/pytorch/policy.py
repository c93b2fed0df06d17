"""The policy: a causal LM with its trainable weights, its reference, and the scoring of packs.

Scoring runs the transformer without its output head, picks the hidden states that predict sampled tokens, and
turns only those into log-probabilities. A pack's prompts are computed once where the model's attention allows
it (`prefix_attention`); whether it does is found out by a probe that compares a small pack with the model's
own logits. Models that fail it are scored sequence by sequence in one padded batch, with the same result.

LoRA on a model of Llama's shape (`form`) is run by the fused layers (`fused`), which keep half of what autograd would.

Dropout stays off unless LoRA dropout was asked for: a policy that samples without it has log-probabilities without it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from covey.adapters import check_fits
from covey.errors import ModelError
from covey.files import save_tokenizer
from covey.pytorch.attention.prefix_attention import LAYOUT_ARGUMENT
from covey.pytorch.attention.probe import Expected, check_scores, find_obstacle
from covey.pytorch.attention.tree_layout import TreeLayout
from covey.pytorch.attention.tree_path import Paths, TreePath
from covey.pytorch.engine.merge import weights_of
from covey.pytorch.fused.decoder import FusedDecoder
from covey.pytorch.logprobs import ExactKL, Head, ReferenceDistribution, TokenScores, score_tokens
from covey.pytorch.models.dropout import dropout_obstacle, switch_dropout_off
from covey.pytorch.models.loading import LoadedModel, causal_lm, load_model, says_quantised, trained_dtype, transformer
from covey.pytorch.models.lora import attach, save_adapter
from covey.pytorch.models.rotary import rope_by_length
from covey.pytorch.offload import HostMemory
from covey.pytorch.reference import Reference, ReferenceUpdate
from covey.rollout.learning import Weights
from covey.rollout.packing import Pack
from covey.rollout.walking import Piece
from covey.types import Support

logger = logging.getLogger("covey.pytorch")


class Policy:
    """A model that is being trained, as the learner sees it.

    Attributes:
        model: the transformers model, or the `PeftModel` around it.
        tokenizer: its tokenizer.
        eos_token_ids: ids that end a completion.
        vocabulary: number of token ids that it has an embedding for.
        source: where the model came from.
        folder: with its config and safetensors, or its hub id; None = there is none.
        reference: see `Reference`.
        prefix_sharing_obstacle: why prompts are not shared when scoring, or None when they are.
        fused_obstacle: why the fused layers are not used, or None when they are.
        rows_apart: rows of different lengths may not be run together, not even padded.
        in_shards: this process holds a part of each weight.
        host: where a GPU's moments and reference wait between their uses; None = they stay on the device.
    """

    in_shards = False

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        prefix_sharing: bool = True,
        fused_layers: bool = True,
        gradient_checkpointing: bool = False,
        reference_update: ReferenceUpdate = "none",
        reference_update_steps: int = 1,
        reference_ema_decay: float = 0.99,
        reference_from_current: bool = False,
        needs_reference: bool = True,
        autocast: str = "none",
        offload: bool = False,
    ) -> None:
        """Take a loaded model whose `requires_grad` flags say what is trained.

        Raises:
            ModelError: nothing is trainable, or the model's log-probabilities cannot be reproduced from its parts.
        """
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.eos_token_ids, self.source, self.folder = loaded.eos_token_ids, loaded.source, loaded.folder
        self._lm = causal_lm(self.model)
        self.vocabulary = len(cast(Any, self._lm).get_input_embeddings().weight)
        self._transformer = transformer(self._lm)
        if not self.trainable_parameters():
            raise ModelError(f"{self.source}: has no trainable parameter; attach an adapter or unfreeze the model")
        switch_dropout_off(self.model)
        self.eval()
        self._autocast: torch.dtype | None = None  # what probes compare is the model in its own precision
        expected = Expected(self._lm)
        check_scores(self.source, self._lm, self._probe_padded, expected)
        self.rows_apart = rope_by_length(self._lm) is not None
        self.prefix_sharing_obstacle: str | None = "model.prefix_sharing is off"
        if prefix_sharing:
            found = rope_by_length(self._lm) or dropout_obstacle(self.model)
            found = found or find_obstacle(self._lm, self._probe_packed, expected)
            self.prefix_sharing_obstacle = found
            if found is not None:
                logger.warning("%s: tokens are not shared when scoring, which is slower: %s", self.source, found)
        self._fused: FusedDecoder | None = None
        self.fused_obstacle: str | None = "model.fused_layers is off"
        if autocast != "none":
            self.fused_obstacle = f"optim.autocast is {autocast}"
        elif fused_layers:
            self.fused_obstacle = self._fuse(gradient_checkpointing, expected)
        if gradient_checkpointing:
            self._checkpoint_layers()
        if offload and self.device.type == "cpu":
            logger.warning("optim.offload has no effect: the model is in the host's memory already")
        self.host = HostMemory(self.device) if offload and self.device.type != "cpu" else None
        self.reference = Reference(
            self.model,
            update=reference_update,
            every=reference_update_steps,
            ema_decay=reference_ema_decay,
            from_current=reference_from_current,
            needed=needs_reference,
            host=self.host,
        )
        self._autocast = None if autocast == "none" else getattr(torch, autocast)

    @classmethod
    def load(
        cls,
        model: str | Path | nn.Module,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        trust_remote_code: bool = False,
        quantization: str = "none",
        use_peft: bool = True,
        lora_r: int = 16,
        lora_alpha: float = 32,
        lora_dropout: float = 0.0,
        lora_target_modules: str | Sequence[str] = "all-linear",
        lora_config: LoraConfig | None = None,
        adapter: str | Path | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Policy:
        """Load a model, attach what is to be trained, and make a policy of it. The names are the config's.

        Args:
            model: see `load_model`.
            tokenizer: see `load_model`.
            dtype: see `load_model`.
            device: see `load_model`.
            trust_remote_code: see `load_model`.
            quantization: see `load_model`; only adapters are trained on such a model.
            use_peft: train a LoRA adapter; False trains all weights.
            lora_r: rank.
            lora_alpha: scaling is `lora_alpha / lora_r`.
            lora_dropout: on the adapter's input while training.
            lora_target_modules: "all-linear" or module names.
            lora_config: a PEFT config that replaces the four above.
            adapter: folder of a PEFT adapter to start from; the reference then holds on to it.
            seed: of a fresh adapter.
            options: passed on to `Policy`.

        Raises:
            ModelError: see `load_model`, `attach_lora`, `attach_adapter` and `Policy`.
        """
        trains_all = not use_peft and adapter is None and not isinstance(model, PeftModel)
        if trains_all and (quantization != "none" or (isinstance(model, nn.Module) and says_quantised(model))):
            raise ModelError(
                "the model is quantised, and quantised weights cannot be trained themselves; train an adapter "
                "(model.use_peft=true; in covey.trl pass peft_config), or load the model without quantization"
            )
        dtype = trained_dtype(dtype, all_weights=not use_peft and adapter is None)
        loaded = load_model(
            model,
            tokenizer,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            quantization=quantization,
        )
        trained = attach(
            loaded.model,
            use_peft=use_peft,
            adapter=adapter,
            lora_r=lora_r,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            lora_target_modules=lora_target_modules,
            lora_config=lora_config,
            seed=seed,
        )
        # A model that came with an adapter starts from it, so that is what the KL term must hold on to.
        from_current = adapter is not None or isinstance(loaded.model, PeftModel)
        ready = replace(loaded, model=trained)
        return cls(ready, **{"reference_from_current": from_current, **options})

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._lm.device

    @property
    def uses_peft(self) -> bool:
        """True when an adapter is trained, False when the model itself is."""
        return isinstance(self.model, PeftModel)

    @property
    def can_walk(self) -> bool:
        """True where a tree that is larger than the budget may be run piece by piece (`covey.pytorch.walk`)."""
        return self.prefix_sharing_obstacle is None

    @property
    def runs_side_by_side(self) -> bool:
        """True where passes over several packs may run at the same time in threads: the fused layers on a CPU, without
        dropout, whose random numbers would be drawn in no fixed order.
        """
        return self._fused is not None and self._fused.can_run() and self.device.type == "cpu"

    def score(
        self,
        pack: Pack | Piece,
        *,
        temperature: float = 1.0,
        reference: bool = False,
        entropy: bool = False,
        entropy_grad: bool = False,
        supports: Support | None = None,
        exact_kl: ExactKL | None = None,
        paths: Paths | None = None,
    ) -> TokenScores:
        """Score the U targets of a pack, in its order, under the sampling distribution.

        Args:
            pack: one micro-batch, or a piece of one that is walked.
            temperature: that the tokens were sampled at.
            reference: score under the reference policy, without gradients.
            entropy: return entropies too.
            entropy_grad: make them differentiable.
            supports: kept ids of each target (`pack.support(episodes)`).
            exact_kl: return the exact divergence from the reference too; runs the reference once.
            paths: what the pieces before a piece have left.

        Returns:
            Differentiable scores `[U]`; under `torch.no_grad()` nothing is kept for a backward pass.
        """
        if reference:
            with self.reference.active():
                return self._score(pack, temperature, entropy, False, supports, None, paths)
        compared = None
        if exact_kl is not None:
            with self.reference.active():
                compared = ReferenceDistribution(
                    self._hidden(pack, None if paths is None else paths.reference).detach(),
                    self._reference_logits(Head.of(self._lm).frozen()),
                    exact_kl,
                )
        return self._score(pack, temperature, entropy, entropy_grad, supports, compared, paths)

    def _score(
        self,
        pack: Pack | Piece,
        temperature: float,
        entropy: bool,
        entropy_grad: bool,
        supports: Support | None,
        compared: ReferenceDistribution | None,
        paths: Paths | None,
    ) -> TokenScores:
        return score_tokens(
            self._hidden(pack, None if paths is None else paths.own),
            torch.from_numpy(pack.targets).to(self.device),
            Head.of(self._lm),
            temperature=temperature,
            entropy=entropy,
            entropy_grad=entropy_grad,
            support=supports,
            reference=compared,
        )

    def _reference_logits(self, head: Head) -> Any:
        if head.weight is not None:
            return head.logits  # bound to the reference's weights as they are now

        def logits(hidden: Tensor) -> Tensor:
            with self.reference.active():
                return head.logits(hidden)

        return logits

    def _hidden(self, pack: Pack | Piece, path: TreePath | None = None) -> Tensor:
        """`[U, d]` the hidden states that predict the pack's targets."""
        if self.prefix_sharing_obstacle is not None:
            run = partial(self._hidden_padded, cast(Pack, pack))
        else:
            hangs: dict[str, Any] = (
                {"past": pack.past, "path": path, "trunk": pack.trunk} if isinstance(pack, Piece) else {}
            )
            layout = TreeLayout.of(pack.branches, self.device, **hangs)
            fused = self._fused if self._fused is not None and self._fused.can_run() else None
            run = partial(self._hidden_packed if fused is None else fused.hidden, pack, layout)
        if self._autocast is None:
            return run()
        with torch.autocast(self.device.type, self._autocast):
            return run().to(self._lm.dtype)

    def _hidden_packed(self, pack: Pack | Piece, layout: TreeLayout | None = None) -> Tensor:
        device = self.device
        out = self._transformer(
            input_ids=torch.from_numpy(pack.token_ids).to(device)[None],
            position_ids=torch.from_numpy(pack.position_ids).to(device)[None],
            # transformers takes a 4-dimensional mask as prepared and builds none; packed attention does not
            # read it.
            attention_mask=torch.zeros(1, 1, 1, 1, device=device, dtype=self._lm.dtype),
            use_cache=False,
            **{LAYOUT_ARGUMENT: layout or TreeLayout.of(pack.branches, device)},
        )
        return cast(Tensor, out[0][0]).index_select(0, torch.from_numpy(pack.score_at).to(device))

    def _hidden_padded(self, pack: Pack) -> Tensor:
        sequences = pack.sequences()
        longest = max(map(len, sequences))
        pad = cast(int, self.tokenizer.pad_token_id)
        tokens = np.full((len(sequences), longest), pad, dtype=np.int64)
        mask = np.zeros((len(sequences), longest), dtype=np.int64)
        for n, sequence in enumerate(sequences):
            tokens[n, : len(sequence)] = sequence
            mask[n, : len(sequence)] = 1
        device = self.device
        out = self._transformer(
            input_ids=torch.from_numpy(tokens).to(device),
            attention_mask=torch.from_numpy(mask).to(device),
            position_ids=torch.arange(longest, device=device).expand(len(sequences), -1),
            use_cache=False,
        )
        at = pack.row[pack.first] * longest + pack.position_ids[pack.score_at]
        return cast(Tensor, out[0]).flatten(0, 1).index_select(0, torch.from_numpy(at).to(device))

    def _fuse(self, checkpoint: bool, expected: Expected) -> str | None:
        """Use the fused layers if they score as the model does; else say why not."""
        if self.prefix_sharing_obstacle is not None:
            return self.prefix_sharing_obstacle
        try:
            fused = FusedDecoder(self._lm, checkpoint=checkpoint)

            def score(pack: Pack) -> Tensor:
                return self._probe(fused.hidden(pack) if fused.can_run() else self._hidden_packed(pack))

            check_scores(self.source, self._lm, score, expected)
        except ModelError as obstacle:
            logger.warning(
                "%s: trained through the model's own layers, which takes more memory: %s", self.source, obstacle
            )
            return str(obstacle)
        self._fused = fused
        return None

    def _probe_packed(self, pack: Pack, layout: TreeLayout) -> Tensor:
        return self._probe(self._hidden_packed(pack, layout))

    def _probe_padded(self, pack: Pack) -> Tensor:
        return self._probe(self._hidden_padded(pack))

    def _probe(self, hidden: Tensor) -> Tensor:
        return Head.of(self._lm).logits(hidden).log_softmax(-1)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Every parameter that is trained, in the model's order."""
        return [parameter for _, parameter in self.named_trainable_parameters()]

    def named_trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with names; tied weights appear once."""
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def parameter_groups(
        self, learning_rate: float, embedding_lr: float | None = None, weight_decay: float = 0.0
    ) -> list[dict[str, Any]]:
        """Groups for a PyTorch optimizer.

        Args:
            learning_rate: of everything else.
            embedding_lr: of trained input and output embeddings; None = `learning_rate`.
            weight_decay: of matrices; norms and biases (one-dimensional parameters) get none.

        Returns:
            Up to four groups with "params", "lr", "weight_decay" and "name" (also in torch's checkpoints).
        """
        embeddings = {
            id(parameter)
            for module in (self._lm.get_input_embeddings(), Head.of(self._lm).module)
            if module is not None
            for parameter in module.parameters()
        }
        groups: dict[str, dict[str, Any]] = {}
        for _, parameter in self.named_trainable_parameters():
            embedding, flat = id(parameter) in embeddings, parameter.dim() < 2
            name = ("embeddings" if embedding else "weights") + ("_without_decay" if flat else "")
            rate = embedding_lr if embedding and embedding_lr is not None else learning_rate
            group = groups.setdefault(
                name, {"params": [], "lr": rate, "weight_decay": 0.0 if flat else weight_decay, "name": name}
            )
            group["params"].append(parameter)
        return list(groups.values())

    def train(self) -> None:
        """Switch LoRA dropout on, if the adapter has any; the rest of the model stays as when sampling."""
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Dropout) and ".lora_dropout." in name:
                module.training = True

    def eval(self) -> None:
        """Switch every dropout off."""
        checkpointed = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer) and m.training]
        self.model.eval()
        for layer in checkpointed:
            layer.training = True  # of the layer alone: transformers checkpoints only layers in training mode

    @contextmanager
    def plain(self) -> Iterator[nn.Module]:
        """The model without gradient checkpointing, for anything that wants a key-value cache."""
        checkpointed = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer) and m.training]
        try:
            for layer in checkpointed:
                layer.training = False
            yield self.model
        finally:
            for layer in checkpointed:
                layer.training = True

    def _checkpoint_layers(self) -> None:
        layers = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers or not self._lm.supports_gradient_checkpointing:
            raise ModelError(
                f"{self.source}: {type(self._lm).__name__} does not support gradient checkpointing; "
                "set model.gradient_checkpointing=false"
            )
        by_name = "activation_checkpointing_enable"  # transformers before 5.23 has it under its former name alone
        getattr(self._lm, by_name, self._lm.gradient_checkpointing_enable)({"use_reentrant": False})
        # Only reentrant checkpoints need inputs that require gradients; here they would cost a backward pass
        # through the first layer's input.
        self._lm.disable_input_require_grads()  # type: ignore[no-untyped-call]
        for layer in layers:
            layer.training = True

    def weights(self, version: int) -> Weights:
        """What a sampler takes, as they are now; see `Weights`."""
        return weights_of(self.model, version)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the trained tensors by name."""
        return {name: p.detach().clone() for name, p in self.named_trainable_parameters()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ModelError: names or shapes differ; nothing was changed.
        """
        own = dict(self.named_trainable_parameters())
        check_fits({name: p.shape for name, p in own.items()}, state, f"{self.source}: the saved policy")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(state[name])

    def save_pretrained(self, path: str | Path, state: dict[str, Tensor] | None = None) -> None:
        """Write the adapter in PEFT's format, or the model in transformers', with the tokenizer; of `state` if any."""
        if isinstance(self.model, PeftModel):
            save_adapter(self.model, path, state)
        else:
            self._lm.save_pretrained(str(path), state_dict=state)
        save_tokenizer(self.tokenizer, path)
        usual = next(Path(path).glob("*config.json")).stat().st_mode
        for file in Path(path).glob("*.safetensors"):
            file.chmod(usual)  # safetensors lets nobody but the owner read, not even a server of another user
