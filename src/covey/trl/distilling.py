# ruff: noqa: RUF009, RUF012
"""Configs of TRL 1.16's trainers with a teacher, and the table `algorithm.teacher` that each becomes.

They are `GRPOConfig` with other fields, and without some: what a field becomes stands beside its default, as there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from covey.errors import ConfigError
from covey.trl.arguments import FORMER, GRPOConfig, _becomes, _idle, _refused, _same, _warned

_ONLY_GRPO = re.compile(
    "router_|cast_lm|delta|sapo_|vespo_|multi_|.*ref_model|top_ent|.*entropy|vllm_importance|off_pol|use_bias|log_mul"
    "|log_completions_hub|.*transformers_|reward_timeout"
)
_STABLE = "pad_to_multiple_of vllm_structured_outputs_regex max_tool_calling_iterations log_completions "
_STABLE += "num_completions_to_print log_unique_prompts"
_REWARDED = "epsilon epsilon_high importance_sampling_level reward_weights scale_rewards mask_truncated_completions "
_GROUPS = "num_generations num_generations_eval generation_batch_size steps_per_generation num_iterations"
_HELD = {"vllm_importance_sampling_correction": False, "use_bias_correction_kl": False}
_WEIGHTS = "algorithm.teacher.weights"
_BETA = "algorithm.teacher.beta: 1 reverse KL, 0 forward KL"
_MODE = "algorithm.teacher.estimator: k1+ for sampled_token, else exact"
_CLIP = "algorithm.teacher.ratio_cap, where a generation has several optimiser steps"
_LOADED = "dtype is the policy's; quantization_config and the like are refused"
_LIVE = "a live teacher runs in this process, with the same result for sampled_token; leave it out"
_NO_BEST = "there are no rewards to compare evaluations by; leave it out"
_REPROMPT = "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n"
_SOLUTION = "\nCorrect solution:\n\n{successful_previous_attempt}\n\n"
_FEEDBACK = "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n"
_DOCTOR = "covey doctor OUTPUT_DIR/covey says what a run lacks"
_Mode = Literal["sampled_token", "full_logits", "topk_logits"]


def _without(names: str, **held: Any) -> Callable[[type], Any]:
    """A dataclass without these fields of `GRPOConfig`: they cannot be given, and are the default or `held`."""
    held = _HELD | held

    def made(config: Any) -> Any:
        for name, there in GRPOConfig.__dataclass_fields__.items():
            out = name in names.split() or name in held or name in FORMER or _ONLY_GRPO.match(name)
            if out and name not in vars(config) and config.__dataclass_fields__[name] is there:
                config.__annotations__[name] = "Any"
                setattr(config, name, field(default=held.get(name, there.default), init=False))
        return dataclass(config)

    return made


@_without(_REWARDED + _GROUPS, num_generations=1, loss_type="bnpo")
class DistillationConfig(GRPOConfig):
    """TRL's settings of a distillation from another model, with TRL's defaults. Raises as `GRPOConfig`."""

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "teacher_model_init_kwargs"]
    _rewarded = False

    beta: float = _becomes(_BETA, 1.0)
    load_best_model_at_end: bool = _refused(_NO_BEST, False)
    metric_for_best_model: str | None = _refused(_NO_BEST, None)
    teacher_model_name_or_path: str | None = _becomes(f"{_WEIGHTS}, where no teacher_model is passed", None)
    teacher_model_revision: str | None = _refused("download it, and pass its folder as teacher_model", None)
    teacher_model_init_kwargs: dict[str, Any] | str | None = _becomes(_LOADED, None)

    def taught(self, weights: str = "base") -> dict[str, Any]:
        """Covey's settings of the teacher, which has these weights."""
        return {"beta": 0.0, "teacher": {"weights": weights, "use": "loss", "task_coef": 0.0, "beta": self.beta}}


@dataclass
class _SelfDistillation(GRPOConfig):
    _also_logged = {"teacher/rows": "reprompt_sample_fraction", "teacher/divergence": "distillation_loss"}
    _also_logged |= {"reward": "reward_mean", "frac_reward_zero_std": "flat_group_fraction"}  # of self_distillation/

    learning_rate: float = _same("optim", 5e-5, "Peak learning rate of AdamW.")
    disable_dropout: bool = _becomes("model.lora_dropout: 0 (other dropout is always off)", True)
    max_prompt_length: int | None = _becomes("data.max_prompt_length, with data.long_prompts: truncate", 512)
    max_completion_length: int | None = _same("sampling", 256, "Longest completion, in tokens.")
    use_teacher_server: bool = _refused(_LIVE, False)
    distillation_alpha: float = _becomes(_BETA, 1.0)
    distillation_mode: _Mode = _becomes(_MODE, "sampled_token")
    distillation_topk: int | None = _becomes("algorithm.teacher.top_k, with topk_logits", None)
    distillation_is_clip: float | None = _becomes(_CLIP, 2.0)
    distillation_add_tail: bool = _becomes("algorithm.teacher.tail, with topk_logits", False)
    teacher_model_kind: str = _becomes(_WEIGHTS, "ema", "ema, base or live.")
    teacher_update_rate: float = _becomes("algorithm.teacher.ema_decay: 1 - rate", 0.05)
    teacher_sync_steps: int = _becomes("algorithm.teacher.update_steps", 1)

    def taught(self) -> dict[str, Any]:
        """Covey's settings of the teacher and of what follows from it. Raises `ConfigError`: they are impossible."""
        kind, mode, alpha = self.teacher_model_kind, self.distillation_mode, self.distillation_alpha
        teacher: dict[str, Any] = {"weights": kind, "use": "loss", "task_coef": 0.0}
        if kind == "ema":
            teacher |= {"ema_decay": round(1 - self.teacher_update_rate, 12), "update_steps": self.teacher_sync_steps}
        elif kind not in ("base", "live"):
            raise ConfigError(f"teacher_model_kind={kind!r}: no such weights; give ema, base or live")
        if mode not in get_args(_Mode):
            raise ConfigError(f"distillation_mode={mode!r}: no such objective; give one of {get_args(_Mode)}")
        said = f"distillation_alpha={alpha} with distillation_mode={mode!r}"
        if mode == "sampled_token" and alpha != 1:
            raise ConfigError(f"{said}: one token has a reverse KL only; set alpha to 1.0, or topk_logits")
        if mode == "topk_logits" and alpha == 0:
            raise ConfigError(f"{said}: k ids would be the teacher's, in TRL the policy's; set full_logits")
        if mode == "topk_logits" and not self.distillation_topk:
            raise ConfigError(f"distillation_topk={self.distillation_topk}: say how many ids topk_logits compares")
        if self.optimizer_steps_per_generation > 1:  # else that ratio is 1
            teacher["ratio_cap"] = self.distillation_is_clip
        teacher |= {"estimator": "k1+"} if mode == "sampled_token" else {"beta": alpha}
        if mode == "topk_logits":
            teacher |= {"top_k": self.distillation_topk, "tail": self.distillation_add_tail}
        return {"beta": 0.0, "teacher": teacher}


@_without(_STABLE + " " + _REWARDED, beta=0.0, loss_type="grpo")
class SDFTConfig(_SelfDistillation):
    """TRL's settings of SDFT (arXiv 2601.19897), with TRL's defaults. Raises as `GRPOConfig`."""

    _rewarded = False

    distillation_alpha: float = _becomes(_BETA, 0.5)
    distillation_mode: _Mode = _becomes(_MODE, "topk_logits")
    distillation_topk: int | None = _becomes("algorithm.teacher.top_k, with topk_logits", 100)
    teacher_model_kind: str = _becomes(_WEIGHTS, "base", "ema, base or live.")
    load_best_model_at_end: bool = _refused(_NO_BEST, False)
    metric_for_best_model: str | None = _refused(_NO_BEST, None)
    generate_from_teacher: bool = _refused("completions are the policy's own; leave it out", False)
    teacher_prompt_template: str = _becomes("algorithm.teacher.template", "{prompt}\n\n{privileged_context}")
    num_loss_tokens_to_skip: int = _becomes("algorithm.teacher.skip_tokens, which a row's mean counts as 0", 0)

    def taught(self) -> dict[str, Any]:
        found, text = super().taught(), self.teacher_prompt_template.replace("{privileged_context}", "{context}")
        found["teacher"] |= {"context": "column:privileged_context", "template": _formatted(text)}
        found["teacher"]["skip_tokens"] = self.num_loss_tokens_to_skip
        return found


def _formatted(template: str) -> str:
    """What `str.format`, which TRL uses, makes of doubled braces."""
    return template.replace("{{", "{").replace("}}", "}")


@_without(_STABLE)
class SDPOConfig(_SelfDistillation):
    """TRL's settings of SDPO (arXiv 2601.20802), with TRL's defaults. Raises as `GRPOConfig`."""

    beta: float = _warned("TRL's SDPO reads it nowhere: there is no KL to a reference", 0.0)
    distillation_weight: float = _becomes("algorithm.teacher.coef; algorithm.teacher.task_coef: 1 - weight", 1.0)
    use_successful_as_teacher: bool = _becomes("algorithm.teacher.context: solution", True)
    success_reward_threshold: float = _becomes("algorithm.teacher.success", 1.0)
    dont_reprompt_on_self_success: bool = _refused("no completion is its own teacher's context; leave it True", True)
    max_reprompt_len: int = _warned("prompts are not cut: one too long for the model has no teacher", 10240)
    reprompt_template: str = _becomes("algorithm.teacher.template", _REPROMPT)
    solution_template: str = _becomes("algorithm.teacher.around", _SOLUTION)
    feedback_template: str = _becomes("algorithm.teacher.around", _FEEDBACK)
    include_environment_feedback: bool = _becomes("algorithm.teacher.context: column:privileged_context", False)
    environment_feedback_only_without_solution: bool = _becomes("algorithm.teacher.context: A|B in place of A+B", False)
    remove_thinking_from_demonstration: bool = _refused("solutions are shown whole; switch thinking off", False)
    diagnostics_warning_interval: int = _idle(_DOCTOR, 10)
    diagnostics_flat_tolerance: float = _idle(_DOCTOR, 1e-8)

    def taught(self) -> dict[str, Any]:
        weight, text = self.distillation_weight, self.reprompt_template
        used, around = dict[str, str](), dict[str, str]()
        solution = self.solution_template.replace("{successful_previous_attempt}", "{context}")
        feedback = self.feedback_template.replace("{feedback_raw}", "{context}")
        given = ("{solution}", "solution", solution, self.use_successful_as_teacher)
        more = ("{feedback}", "column:privileged_context", feedback, self.include_environment_feedback)
        for place, context, shown, use in (given, more):
            used |= {place: context} if use else {}
            around |= {context.partition(":")[0]: _formatted(shown)} if use else {}
            text = text if use else text.replace(place, "")
        if not used:
            raise ConfigError(
                "use_successful_as_teacher=False: without include_environment_feedback=True there is no teacher; set "
                "one of them to True, or use GRPOTrainer"
            )
        places = "".join(used)
        if text.count(places) != 1:
            raise ConfigError(
                f"reprompt_template={self.reprompt_template!r:.200}: what the teacher reads is {places}, which "
                "must stand in it once, side by side and in this order; change it"
            )
        found = super().taught()
        found["teacher"] |= {
            "context": ("|" if self.environment_feedback_only_without_solution else "+").join(used.values()),
            "template": _formatted(text.replace(places, "{context}")),
            "around": around,
            "success": self.success_reward_threshold if self.use_successful_as_teacher else 1.0,
            "coef": weight,
            "task_coef": round(1 - weight, 12),
        }
        if weight in (0, 1):  # 1: the mean of a row's tokens, then of rows
            return found | ({"loss_type": "grpo"} if weight else {"teacher": None})
        if self.mask_truncated_completions and self.loss_type != "grpo":
            words = f"mask_truncated_completions=True with loss_type={self.loss_type!r}"
            raise ConfigError(f"{words}: the teacher's own mean would take them in; set loss_type='grpo'")
        return found | {"loss_parameters": {} if self.loss_type == "grpo" else {"kl_aggregation": "sequence_mean"}}
