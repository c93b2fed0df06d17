"""`trl.experimental.sdft`."""

from covey.trl.distilling import SDFTConfig
from covey.trl.teachers import SDFTTrainer

__all__ = ["SDFTConfig", "SDFTTrainer"]
