"""`trl.experimental.sdpo`."""

from covey.trl.distilling import SDPOConfig
from covey.trl.teachers import SDPOTrainer

__all__ = ["SDPOConfig", "SDPOTrainer"]
