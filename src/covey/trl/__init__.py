"""TRL's interface: a TRL script runs with its import line changed.

    from covey.trl import GRPOConfig, GRPOTrainer

Names, defaults and meanings are TRL 1.16's; `docs/coming-from-trl.md` lists them all.
"""

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


def __getattr__(name: str) -> object:
    if name[:1].isupper() or name in ("is_conversational", "apply_chat_template", "extract_prompt"):
        more = ", and train on what it saves" if name.endswith(("Trainer", "Config")) else ""
        raise ImportError(f"covey.trl has no {name}: it has GRPO and teachers; import it from trl{more}")
    raise AttributeError(f"module 'covey.trl' has no attribute {name!r}")
