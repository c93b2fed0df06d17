"""What computes: the parts that a run asks a backend for.

A backend is a value with five functions and no state, so that a run on several machines is one more of them:
`GRPOTrainer(..., backend=MyBackend())`. The trainer never asks which one it has; without one it is PyTorch's,
`covey.pytorch.backend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from covey.config.whole import GRPOConfig
from covey.types import Prompt

if TYPE_CHECKING:
    from covey.rollout.learning import Learner, Sampler, TrainedPolicy


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
    fields = ("learning_rate", "embedding_lr", "max_grad_norm", "tokens_per_micro_batch")
    own = config.optim.optimizer_parameters
    return {field: getattr(config.optim, field) for field in fields} | {
        "weight_decay": own.get("weight_decay", 0.0),
        "betas": (own.get("beta1", 0.9), own.get("beta2", 0.999)),
        "epsilon": own.get("epsilon", 1e-8),
    }


def adapter_options(config: GRPOConfig) -> dict[str, Any]:
    """What `config` says of the adapter, under the names of `covey.pytorch.policy.Policy.load`."""
    fields = ("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "adapter")
    return {"seed": config.run.seed} | {field: getattr(config.model, field) for field in fields}
