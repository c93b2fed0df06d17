"""TRL's door: a TRL script runs with its import line changed.

    from covey.trl import GRPOConfig, GRPOTrainer

Names, defaults and meanings are TRL 1.16's; `docs/coming-from-trl.md` lists them all.
"""

from covey.trl.arguments import GRPOConfig
from covey.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
