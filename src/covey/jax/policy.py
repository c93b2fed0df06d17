"""The policy in JAX: a model with its trained weights, its reference, and what they are saved as."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from covey.adapters import Adapter, Array, check_fits
from covey.errors import ModelError
from covey.files import save_tokenizer
from covey.jax.model import Transformer
from covey.jax.programs import merge, scale_of
from covey.jax.saving import adapter_of, model_tensors, save_model
from covey.jax.sharding import check_mesh, place
from covey.jax.stacked import stack, unstack
from covey.rollout.learning import Weights


class Parameters(NamedTuple):
    """A model and its parameters, and LoRA factors or none, stacked (`covey.jax.stacked`) or not."""

    model: Transformer
    variables: Any


class Policy:
    """A model that is being trained, as the learner sees it.

    Attributes:
        transformer: the module.
        trained: what is trained: `{"lora": ...}`, or `{"params": ...}`, stacked (`covey.jax.stacked`).
        frozen: what is not: `{"params": ...}` with LoRA, nothing else.
        tokenizer: its tokenizer.
        eos_token_ids: ids that end a completion.
        vocabulary: number of token ids that it has an embedding for.
        source: where the model came from.
        context_length: most tokens of prompt and completion.
        mesh: devices over which weights and batches lie, or None.
        reference: see `Reference`.
    """

    def __init__(
        self,
        transformer: Transformer,
        params: Any,
        *,
        tokenizer: Any,
        eos_token_ids: tuple[int, ...],
        source: str,
        hf_config: Mapping[str, Any] | None = None,
        context_length: int | None = None,
        lora: Any = None,
        seed: int = 0,
        mesh: Mesh | None = None,
        reference_update: str = "none",
        reference_update_steps: int = 1,
        reference_ema_decay: float = 0.99,
        needs_reference: bool = True,
    ) -> None:
        """Take weights as `load_hf` returns them, without the outer `"params"`.

        Raises:
            ModelError: the tokenizer knows ids that the model does not.
        """
        self.transformer, self.tokenizer, self.source = transformer, tokenizer, source
        self.mesh = check_mesh(mesh)
        self.eos_token_ids = tuple(eos_token_ids)
        self._hf_config = dict(hf_config or {})
        built_for = int(self._hf_config.get("max_position_embeddings") or 1 << 31)
        self.context_length = built_for if context_length is None else context_length
        known = self.vocabulary = transformer.config.vocab_size
        largest = max([*self.eos_token_ids, *(tokenizer.get_vocab().values() if tokenizer is not None else ())])
        if largest >= known:
            raise ModelError(
                f"{source}: its tokenizer has the id {largest}, but the model has {known} embeddings (0 to "
                f"{known - 1}); use the tokenizer that belongs to the model"
            )
        fresh = self.uses_peft and lora is None
        if fresh:
            key, one = jax.random.key(seed), jnp.zeros((1, 1), jnp.int32)
            lora = jax.jit(lambda: transformer.init(key, one)["lora"])()
        layers = transformer.config.num_layers
        params = stack(params, layers)
        trained, frozen = (
            ({"lora": stack(lora, layers)}, {"params": params}) if self.uses_peft else ({"params": params}, {})
        )
        self.trained: dict[str, Any] = place(trained, self.mesh, transformer)
        self.frozen: dict[str, Any] = place(frozen, self.mesh, transformer)
        self.reference = Reference(
            self,
            update=reference_update if needs_reference else "none",
            every=reference_update_steps,
            decay=reference_ema_decay,
            copied=needs_reference and (not fresh or reference_update == "ema"),
        )

    @property
    def variables(self) -> dict[str, Any]:
        """Parameters, and LoRA factors if there are any."""
        return {**self.frozen, **self.trained}

    @property
    def model(self) -> Parameters:
        """The module and its variables, from which a sampler is built."""
        return Parameters(self.transformer, self.variables)

    def weights(self, version: int) -> Weights:
        """What a sampler takes, as they are now; see `Weights`."""
        return Weights(version, self._tensors, self._adapter if self.uses_peft else None, native=self.model)

    def _tensors(self) -> dict[str, Array]:
        model, params = self.transformer, self.variables["params"]
        lora = self.variables.get("lora", {})
        merged = merge(params, lora, params["embedding"].dtype, scale=scale_of(model))
        return model_tensors(model.config, unstack(merged, model.config.num_layers))

    def _adapter(self) -> Adapter:
        config = self.transformer.config
        return adapter_of(config, unstack(self.trained["lora"], config.num_layers), base_model=self.source)

    @property
    def uses_peft(self) -> bool:
        """True when an adapter is trained, False when the model itself is."""
        return self.transformer.config.lora_rank > 0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `Learner.tensors` gave under `policy`.

        Raises:
            ModelError: names or shapes differ; nothing was changed.
        """
        self.trained = from_names(self.trained, state, f"{self.source}: the saved policy")

    def save_pretrained(self, path: str | Path) -> None:
        """Write the adapter in PEFT's format, or the whole model in Hugging Face's, with the tokenizer."""
        config = self.transformer.config
        if self.uses_peft:
            self._adapter().write(path)
        else:
            save_model(path, config, unstack(self.trained["params"], config.num_layers), self._hf_config)
        if self.tokenizer is not None:
            save_tokenizer(self.tokenizer, path)


class Reference:
    """The policy that the KL term holds on to.

    With LoRA and without a snapshot it is the same network with its adapters off. The exponential moving average is
    over the trained arrays, with LoRA over A and B separately, as in the PyTorch backend.
    """

    def __init__(self, policy: Policy, *, update: str, every: int, decay: float, copied: bool) -> None:
        self._policy, self._update, self._every, self._decay = policy, update, every, decay
        self.snapshot: Any = jax.tree.map(jnp.copy, policy.trained) if copied else None

    @property
    def variables(self) -> dict[str, Any]:
        """What the module is applied with."""
        if self.snapshot is None:
            if not self._policy.uses_peft:
                raise ModelError("the policy was built without a reference; build it with needs_reference=True")
            return self._policy.frozen
        return {**self._policy.frozen, **self.snapshot}

    def after_step(self, step: int) -> None:
        """Update by the rule after optimiser step `step`, counted from 1."""
        if self._update == "none" or step % self._every:
            return
        if self._update == "copy":
            self.snapshot = jax.tree.map(jnp.copy, self._policy.trained)
        else:
            old, share = self.snapshot, 1.0 - self._decay
            self.snapshot = jax.tree.map(lambda kept, new: kept + share * (new - kept), old, self._policy.trained)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `Learner.tensors` gave under `reference`.

        Raises:
            ModelError: names or shapes differ.
        """
        self.snapshot = from_names(self._policy.trained, state, "the saved reference") if state else None


def to_names(tree: Any) -> dict[str, np.ndarray[Any, Any]]:
    """A tree's leaves as NumPy arrays under their paths, such as `lora/layer_0_mlp/up_proj/a`."""
    return {name: np.array(leaf) for name, leaf in named_leaves(tree).items()}


def named_leaves(tree: Any) -> dict[str, Any]:
    """A tree's leaves under their paths."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def from_names(like: Any, state: Mapping[str, Any], what: str) -> Any:
    """Arrays under paths as a tree of the shape, types and placement of `like`.

    Raises:
        ModelError: names or shapes differ.
    """
    wanted = named_leaves(like)
    check_fits({name: leaf.shape for name, leaf in wanted.items()}, state, what)

    def put(name: str, leaf: jax.Array) -> jax.Array:
        return jax.device_put(np.asarray(state[name]).astype(leaf.dtype), leaf.sharding)

    leaves = [put(name, leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
