"""TRL's trainers with a teacher: `DistillationTrainer`, and SDPO and SDFT of `trl.experimental`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedModel

from covey.errors import ConfigError
from covey.trl.distilling import DistillationConfig, SDFTConfig, SDPOConfig
from covey.trl.loading import model_source
from covey.trl.trainer import GRPOTrainer
from covey.trl.translate import as_mapping

_FREE = ("dtype", "torch_dtype", "device_map", "trust_remote_code", "attn_implementation", "use_cache")


def no_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """The reward of a run that learns from its teacher alone."""
    return [0.0] * len(completions)


class _Teaching(GRPOTrainer):
    _arguments = "args train_dataset eval_dataset processing_class callbacks optimizers peft_config"

    def __init__(self, *given: Any, **named: Any) -> None:
        order = ["model", *self._arguments.split()]
        named |= dict(zip(order, given, strict=False))
        if unknown := [*given[len(order) :], *(name for name in named if name not in order)]:
            raise TypeError(f"{type(self).__name__} takes no {unknown[0]!r}; it takes {', '.join(order)}")
        self._teacher_model = named.pop("teacher_model", None)
        super().__init__(**({} if self._config_class._rewarded else {"reward_funcs": no_reward}) | named)


class DistillationTrainer(_Teaching):
    """Trains a model on its own completions towards the distributions of another, `teacher_model`: a name, a folder, or
    a loaded model, which is written to `output_dir/teacher`. All else is as for `GRPOTrainer`.
    """

    _config_class, _suffix = DistillationConfig, "-Distillation"
    _arguments = "teacher_model args train_dataset eval_dataset processing_class callbacks optimizers "
    _arguments += "quantization_config peft_config tools"

    def _taught(self) -> dict[str, Any]:
        args: Any = self.args
        teacher: Any = args.teacher_model_name_or_path if self._teacher_model is None else self._teacher_model
        options = as_mapping("teacher_model_init_kwargs", args.teacher_model_init_kwargs)
        if more := {name: value for name, value in options.items() if name not in _FREE and value is not None}:
            raise ConfigError(f"teacher_model_init_kwargs={more}: the teacher is loaded without; leave it out")
        if teacher is None or isinstance(teacher, PeftModel):
            raise ConfigError("teacher_model: pass the name of a whole model, or one; merge_and_unload() an adapter")
        if isinstance(teacher, PreTrainedModel):
            folder = Path(str(args.output_dir), "teacher")
            AutoTokenizer.from_pretrained(model_source(teacher)).save_pretrained(folder)
            teacher.save_pretrained(folder)
            teacher = folder
        return dict(args.taught(str(teacher)))


class SDPOTrainer(_Teaching):
    """Trains a model towards itself after it has read a right answer or feedback. All else is as for `GRPOTrainer`."""

    _config_class, _suffix = SDPOConfig, "-SDPO"
    _arguments = "reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks "
    _arguments += "optimizers peft_config"


class SDFTTrainer(_Teaching):
    """Trains a model towards itself after it has read a row's `privileged_context`. All else as for `GRPOTrainer`."""

    _config_class, _suffix = SDFTConfig, "-SDFT"

    def _training_rows(self, dataset: Any) -> list[dict[str, Any]]:
        rows = super()._training_rows(dataset)
        for row in rows:
            if isinstance(said := row.get("privileged_context"), list):  # of messages
                chat = all(isinstance(one, dict) for one in said)
                row["privileged_context"] = "\n".join(str(one["content"]) for one in said) if chat else str(said)
        return rows
