"""The PyTorch room: the policy and what it is made of."""

from covey.pytorch.models.loading import LoadedModel, load_model
from covey.pytorch.policy import Policy
from covey.pytorch.reference import Reference

__all__ = ["LoadedModel", "Policy", "Reference", "load_model"]
