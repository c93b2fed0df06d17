"""GRPO in JAX: models in Flax, optimisers from Optax, checkpoints by Orbax.

    from covey.jax import GRPOConfig, GRPOTrainer

The formulas are those of `covey.algorithms`, the same functions as under PyTorch. Nothing here imports torch.
"""

from covey.functions import from_stub

__all__, __getattr__ = from_stub(__name__, __file__)
