"""What computes: the parts that a run asks a backend for, and where the backends are.

A backend is a value with five functions and no state, so that a run on several machines is one more of them:
`GRPOTrainer(..., backend=MyBackend())`. The trainer never asks which one it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from covey.config.whole import GRPOConfig
from covey.errors import ModelError
from covey.rollout.learning import Learner, Sampler, TrainedPolicy
from covey.types import Prompt

BACKENDS = {"pytorch": "covey.pytorch.backend", "jax": "covey.jax.backend"}
"""`model.backend` -> the module whose `BACKEND` it is."""


class Backend(Protocol):
    """Makes the parts of a run, each from the run's settings."""

    def check(self, config: GRPOConfig) -> None:
        """Refuse settings that this backend does not have, before anything is loaded.

        Raises `ConfigError`: naming the setting.
        """
        ...

    def make_policy(
        self, config: GRPOConfig, model: Any = None, tokenizer: Any = None, peft_config: Any = None
    ) -> TrainedPolicy:
        """The policy of `config.model`, or of a loaded `transformers` model, with its adapter and its reference.

        Raises `ConfigError, ModelError`: there is no such model, or this backend cannot compute it.
        """
        ...

    def make_sampler(self, config: GRPOConfig, policy: TrainedPolicy) -> Sampler:
        """What samples from the policy; it holds a copy of the weights, taken by `sync`."""
        ...

    def make_learner(self, config: GRPOConfig, policy: TrainedPolicy) -> Learner:
        """What computes log-probabilities and gradients of the policy, and its optimiser."""
        ...

    def expect(self, config: GRPOConfig, sampler: Sampler, learner: Learner, prompts: Sequence[Prompt]) -> None:
        """Tell the parts that are compiled for shapes what is to come: all prompts of the run, held-out ones too."""
        ...


def adamw_options(config: GRPOConfig) -> dict[str, Any]:
    """`config.optim` under the names of the learners' arguments."""
    optim = config.optim
    return {
        "learning_rate": optim.learning_rate,
        "embedding_lr": optim.embedding_lr,
        "weight_decay": optim.weight_decay,
        "betas": (optim.adam_beta1, optim.adam_beta2),
        "epsilon": optim.adam_epsilon,
        "max_grad_norm": optim.max_grad_norm,
        "tokens_per_micro_batch": optim.tokens_per_micro_batch,
    }


def adapter_options(config: GRPOConfig) -> dict[str, Any]:
    """What `config` says of the adapter, under the names of `covey.pytorch.policy.Policy.load`."""
    chosen = config.model
    return {
        "use_peft": chosen.use_peft,
        "lora_r": chosen.lora_r,
        "lora_alpha": chosen.lora_alpha,
        "lora_dropout": chosen.lora_dropout,
        "lora_target_modules": chosen.lora_target_modules,
        "adapter": chosen.adapter,
        "seed": config.run.seed,
    }


def load_backend(name: str) -> Backend:
    """The backend that `model.backend` names; nothing of the others is imported.

    Raises `ModelError`: its packages are not installed.
    """
    try:
        return cast(Backend, import_module(BACKENDS[name]).BACKEND)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"model.backend={name!r}: {error.name} is not installed; run pip install 'covey[{name}]'"
        ) from error
