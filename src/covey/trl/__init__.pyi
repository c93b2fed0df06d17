"""The names of the package, for type checkers and for its `__getattr__`."""

from covey.trl.arguments import GRPOConfig
from covey.trl.distilling import DistillationConfig
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
from covey.trl.teachers import DistillationTrainer
from covey.trl.trainer import GRPOTrainer

__all__ = [
    "DatasetConfig", "DatasetMixtureConfig", "DistillationConfig", "DistillationTrainer", "GRPOConfig", "GRPOTrainer",
    "ModelConfig", "RichProgressCallback", "ScriptArguments", "TrlParser", "get_dataset", "get_kbit_device_map",
    "get_peft_config", "get_quantization_config",
]  # fmt: skip
