"""The policy: a model with its trainable weights (`packed_model`), its reference, and the scoring of packs.

Scoring runs the transformer without its output head, picks the hidden states that predict sampled tokens, and turns
only those into log-probabilities.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from covey.adapters import check_fits
from covey.errors import ModelError
from covey.files import save_tokenizer
from covey.functions import later
from covey.pytorch.models.loading import context_length, load_model, says_quantised, trained_dtype
from covey.pytorch.models.lora import album_of, attach, save_adapter
from covey.pytorch.models.narrow import widen_trained
from covey.pytorch.optimizers import HostMemory
from covey.pytorch.packed_model import PackedModel
from covey.pytorch.reference import Reference

if TYPE_CHECKING:
    from covey.pytorch import logprobs
    from covey.pytorch.attention.tree_layout import TreePath
    from covey.pytorch.engine import merge
    from covey.pytorch.logprobs import ReferenceDistribution, TokenScores
    from covey.rollout.learning import Weights
    from covey.rollout.packing import Pack
    from covey.rollout.walking import Piece
    from covey.types import Support
else:  # what it takes to be scored, and to be sampled from
    logprobs, merge = later("covey.pytorch", "logprobs engine.merge")

logger = logging.getLogger("covey.pytorch")


class Policy:
    """A model that is being trained, as the learner sees it.

    Attributes:
        held: the part that holds the weights and runs them.
        model: the transformers model, or the `PeftModel` around it.
        tokenizer: its tokenizer.
        eos_token_ids: ids that end a completion.
        vocabulary: number of token ids that it has an embedding for.
        source: where the model came from.
        folder: with its config and safetensors, or its hub id; None = there is none.
        reference: see `Reference`.
        teachers: other weights that score what was sampled, by what `algorithm.teacher` calls them; networks are
            policies.
        prefix_sharing_obstacle: why prompts are not shared when scoring, or None when they are.
        fused_obstacle: why the fused layers are not used, or None when they are.
        album: what a vision model has beside its language half; None for other models.
        rows_apart: rows of different lengths may not be run together, not even padded.
        in_shards: this process holds a part of each weight.
        host: where a GPU's moments and reference wait between their uses; None = they stay on the device.
    """

    in_shards = False

    def __init__(self, held: PackedModel, reference: Reference, host: HostMemory | None = None) -> None:
        """A policy of these parts; `load` makes them."""
        self.held, self.reference, self.host = held, reference, host
        self.teachers: dict[str, Reference | Policy] = {}
        loaded = held.loaded
        self.model, self.tokenizer, self.eos_token_ids = loaded.model, loaded.tokenizer, loaded.eos_token_ids
        self.source, self.folder = loaded.source, loaded.folder
        self.vocabulary = len(cast(Any, held.lm).get_input_embeddings().weight)
        self.prefix_sharing_obstacle, self.fused_obstacle = held.prefix_sharing_obstacle, held.fused_obstacle
        self.rows_apart = held.rows_apart
        self.album = album_of(held.lm)

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
        reference: Mapping[str, Any] | None = None,
        teachers: Mapping[str, Mapping[str, Any]] | None = None,
        offload: bool = False,
        narrows: bool = True,
        **how: Any,
    ) -> Policy:
        """Load a model, attach what is to be trained, and make a policy of it. The names are the config's.

        The first six are those of `load_model`; on a quantised model only adapters are trained.

            use_peft                train a LoRA adapter; False trains all weights
            lora_...                rank, alpha (scaling is alpha / r), dropout on the adapter's input while training,
                                    "all-linear" or names of modules; `lora_config`, PEFT's, in place of all four
            adapter                 folder of a PEFT adapter to start from; the reference then holds on to it
            seed                    of a fresh adapter
            reference               options of `Reference`, which holds on to the policy at its start where the model
                                    comes with an adapter
            teachers                "ema", "base" or an adapter's folder -> options of `Reference`
            offload                 keep moments and reference of a GPU's policy in the host's memory
            narrows                 bfloat16 on a CPU is that of frozen matrices alone (`covey.pytorch.models.narrow`)
            how                     of `PackedModel`: prefix_sharing, fused_layers, gradient_checkpointing, autocast

        Raises `ModelError` or `ConfigError`: see `load_model`, `attach_lora`, `attach_adapter` and `PackedModel`.
        """
        trains_all = not use_peft and adapter is None and not isinstance(model, PeftModel)
        if trains_all and (quantization != "none" or (isinstance(model, nn.Module) and says_quantised(model))):
            raise ModelError(
                "the model is quantised, and quantised weights cannot be trained themselves; train an adapter "
                "(model.use_peft=true; in covey.trl pass peft_config), or load the model without quantization"
            )
        held_as: dict[str, Any] = {"device": device, "quantization": quantization}
        dtype = trained_dtype(dtype, all_weights=not use_peft and adapter is None)
        held_as |= {"trust_remote_code": trust_remote_code, "frozen": narrows and not trains_all}
        loaded = load_model(model, tokenizer, dtype=dtype, **held_as)
        lora: dict[str, Any] = {"lora_r": lora_r, "lora_alpha": lora_alpha, "lora_dropout": lora_dropout}
        lora |= {"lora_target_modules": lora_target_modules, "lora_config": lora_config, "seed": seed}
        trained = attach(loaded.model, use_peft=use_peft, adapter=adapter, **lora)
        widen_trained(trained)
        held = PackedModel(replace(loaded, model=trained), **how)
        if offload and held.device.type == "cpu":
            logger.warning("optim.offload has no effect: the model is in the host's memory already")
        host = HostMemory(held.device) if offload and held.device.type != "cpu" else None
        # A model that came with an adapter starts from it, so that is what the KL term must hold on to.
        from_current = adapter is not None or isinstance(loaded.model, PeftModel)
        policy = cls(held, Reference(trained, host=host, from_current=from_current, **(reference or {})), host)
        for name, moves in (teachers or {}).items():
            policy.teachers[name] = held_on_to = Reference(trained, host=host, **moves)
            if name not in ("ema", "base"):
                held_on_to.hold(name, "algorithm.teacher.weights")
        return policy

    @property
    def device(self) -> torch.device:
        return self.held.device

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion together."""
        return context_length(self.held.lm)

    @property
    def uses_peft(self) -> bool:
        """True when an adapter is trained, False when the model itself is."""
        return isinstance(self.model, PeftModel)

    @property
    def runs_side_by_side(self) -> bool:
        """True where passes over several packs may run at the same time in threads: the fused layers on a CPU, without
        dropout, whose random numbers would be drawn in no fixed order.
        """
        fused = self.held.fused
        return fused is not None and fused.can_run() and self.device.type == "cpu"

    def score(
        self,
        pack: Pack | Piece,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        entropy_grad: bool = False,
        states: bool = False,
        supports: Support | None = None,
        compared: ReferenceDistribution | None = None,
        path: TreePath | None = None,
    ) -> TokenScores:
        """Score the U targets of a pack, in its order, under the sampling distribution.

        Args:
            pack: one micro-batch, or a piece of one that is walked.
            temperature: that the tokens were sampled at.
            entropy: return entropies too.
            entropy_grad: make them differentiable.
            states: return the hidden states too, without gradients.
            supports: kept ids of each target (`pack.support(episodes)`).
            compared: return the divergence from it too; its `logits` None = of the policy's own head.
            path: what the pieces before a piece have left.

        Returns differentiable scores `[U]`; under `torch.no_grad()` nothing is kept for a backward pass.
        """
        if compared is not None and compared.logits is None:
            compared = replace(compared, logits=self.held.head().frozen().logits)
        if (ids := self.held.ids) is not None and (most := max(*pack.token_ids, *pack.targets)) >= ids:
            raise ModelError(
                f"algorithm.teacher.weights={self.source}: a row has the token id {most}, and the ids that "
                f"both networks have end at {ids - 1}; use a teacher with all of the policy's ids"
            )
        hidden = self.held.hidden(pack, path)
        found = logprobs.score_tokens(
            hidden,
            torch.from_numpy(pack.targets).to(self.device),
            self.held.head(),
            temperature=temperature,
            entropy=entropy,
            entropy_grad=entropy_grad,
            support=supports,
            reference=compared,
        )
        return replace(found, hidden=hidden.detach()) if states else found

    def head_under(self, other: Reference | None) -> Callable[[Tensor], Tensor] | None:
        """States `[c, d]` -> logits `[c, V]` by the head with other weights, None = the policy's, as they are now."""
        active = nullcontext if other is None else other.active
        with active():
            head = self.held.head().frozen()
        if head.weight is not None:
            return head.logits

        def logits(hidden: Tensor) -> Tensor:
            with active():
                return head.logits(hidden)

        return logits

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Every parameter that is trained, in the model's order."""
        return [parameter for _, parameter in self.named_trainable_parameters()]

    def named_trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with names; tied weights appear once."""
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def parameter_groups(
        self, learning_rate: float, embedding_lr: float | None = None, weight_decay: float = 0.0
    ) -> list[dict[str, Any]]:
        """Up to four groups for a PyTorch optimizer, with "params", "lr", "weight_decay" and "name". `embedding_lr` is
        that of trained embeddings and heads; norms and biases (one-dimensional) do not decay.
        """
        embeddings = {
            id(parameter)
            for module in (self.held.lm.get_input_embeddings(), self.held.head().module)
            if module is not None
            for parameter in module.parameters()
        }
        groups: dict[str, dict[str, Any]] = {}
        for parameter in self.trainable_parameters():
            embedding, flat = id(parameter) in embeddings, parameter.dim() < 2
            name = ("embeddings" if embedding else "weights") + ("_without_decay" if flat else "")
            rate = embedding_lr if embedding and embedding_lr is not None else learning_rate
            group = groups.setdefault(
                name, {"params": [], "lr": rate, "weight_decay": 0.0 if flat else weight_decay, "name": name}
            )
            group["params"].append(parameter)
        return list(groups.values())

    def weights(self, version: int) -> Weights:
        """What a sampler takes, as they are now; see `Weights`."""
        return merge.weights_of(self.model, version)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the trained tensors by name."""
        return {name: p.detach().clone() for name, p in self.named_trainable_parameters()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; other names or shapes change nothing: `ModelError`."""
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
            (self.album.whole if self.album else self.held.lm).save_pretrained(str(path), state_dict=state)
        save_tokenizer(self.tokenizer, path)
        if self.album is not None:
            self.album.save_processor(path)
        usual = next(Path(path).glob("*config.json")).stat().st_mode
        for file in Path(path).glob("*.safetensors"):
            file.chmod(usual)  # safetensors lets nobody but the owner read, not even a server of another user
