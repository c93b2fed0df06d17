"""The names of the package, for type checkers and for its `__getattr__`."""

from covey.jax.grpo_config import GRPOConfig
from covey.jax.grpo_trainer import GRPOTrainer
from covey.jax.loading import load_hf
from covey.jax.model import ModelConfig, RopeScaling, Transformer
from covey.jax.rewarding import jax_reward
from covey.jax.saving import load_adapter, lora_from_tensors, save_adapter, save_model
from covey.jax.trainer import Trainer, TrainState, make_optimizer

__all__ = [
    "GRPOConfig", "GRPOTrainer", "ModelConfig", "RopeScaling", "TrainState", "Trainer", "Transformer", "jax_reward",
    "load_adapter", "load_hf", "lora_from_tensors", "make_optimizer", "save_adapter", "save_model",
]  # fmt: skip
