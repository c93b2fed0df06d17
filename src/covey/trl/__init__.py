"""TRL's interface: a TRL script runs with its import line changed.

    from covey.trl import GRPOConfig, GRPOTrainer

Names, defaults and meanings are TRL 1.16's; `docs/coming-from-trl.md` lists them all.
"""

from covey.trl.arguments import GRPOConfig
from covey.trl.scripts import (
    DatasetConfig,
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)
from covey.trl.tables import RichProgressCallback
from covey.trl.trainer import GRPOTrainer

__all__ = ["DatasetConfig", "DatasetMixtureConfig", "GRPOConfig", "GRPOTrainer", "ModelConfig", "RichProgressCallback"]
__all__ += [
    "ScriptArguments",
    "TrlParser",
    "get_dataset",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
]


def __getattr__(name: str) -> object:
    if name.endswith(("Trainer", "Config")):
        raise ImportError(f"covey.trl has no {name}: it has GRPO only; import it from trl, and train on what it saves")
    raise AttributeError(f"module 'covey.trl' has no attribute {name!r}")
