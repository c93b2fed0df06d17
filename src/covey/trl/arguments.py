# ruff: noqa: RUF009, RUF012
"""`covey.trl.GRPOConfig`: TRL 1.16's names and defaults, as a `transformers.TrainingArguments`.

Being one, it is set, read, changed, printed and parsed like TRL's: `HfArgumentParser((GRPOConfig,))`, `to_dict()`,
`args.per_device_train_batch_size`, assignments before the trainer is made. What each field becomes in Covey stands in
`covey.trl.fields`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import TrainingArguments
from transformers.utils.import_utils import is_torch_tf32_available

from covey.errors import ConfigError


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


FORMER_NAMES = {
    "evaluation_strategy": "eval_strategy",
    "warmup_ratio": "warmup_steps",
    "no_cuda": "use_cpu",
    "wandb_log_unique_prompts": "log_unique_prompts",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm_max_model_len": "vllm_max_model_length",
}
"""Options that were called otherwise -> what they are called now."""


@dataclass
class GRPOConfig(TrainingArguments):
    """TRL's settings of a GRPO run, with TRL's defaults.

    One default depends on the machine: where neither `bf16` nor `fp16` is given, `bf16` is true on devices that compute
    in bfloat16, and false on others, where TRL's true would be many times slower and no more exact.

    Raises:
        ConfigError: batch sizes that do not fit each other, and the other combinations that TRL refuses.
    """

    _VALID_DICT_FIELDS = [
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "transformers_continuous_batching_config",
        "generation_kwargs",
        "chat_template_kwargs",
    ]

    # Of transformers, with other defaults.
    learning_rate: float = _option(1e-6, "Peak learning rate of AdamW.")
    logging_steps: float = _option(10, "Optimiser steps between two logs; below 1: a fraction of all steps.")
    gradient_checkpointing: bool = _option(True, "Recompute activations in the backward pass.")
    bf16: bool | None = _option(None, "Autocast to bfloat16; unset: where the device can.")  # type: ignore[assignment]
    lr_scheduler_kwargs: dict | str | None = _option(None, "Options of the learning rate's schedule.")  # type: ignore[type-arg]
    remove_unused_columns: bool | None = _option(False, "Columns are always kept.")  # type: ignore[assignment]

    # Model and data
    model_init_kwargs: dict[str, Any] | str | None = _option(None, "Arguments of from_pretrained.")
    trust_remote_code: bool = _option(False, "Run code that a model repository brings.")
    router_aux_loss_coef: float | None = _option(None, "Weight of a mixture of experts' balance loss.")
    disable_dropout: bool = _option(False, "Switch every dropout off, LoRA's too.")
    cast_lm_head_to_fp32: bool = _option(False, "Compute logits in float32.")
    num_generations: int | None = _option(8, "Completions for each prompt.")
    num_generations_eval: int | None = _option(None, "The same in evaluations; unset: num_generations.")
    max_completion_length: int | None = _option(512, "Longest completion, in tokens.")
    ds3_gather_for_generation: bool = _option(True, "Of DeepSpeed ZeRO-3.")
    shuffle_dataset: bool | None = _option(True, "Visit the prompts in a random order.")
    pad_to_multiple_of: int | str | None = _option("auto", "Width of padding; batches are packed here.")

    # Generation
    generation_batch_size: int | None = _option(None, "Completions sampled at a time.")
    steps_per_generation: int | None = _option(None, "Micro-batches that each generation is used for.")
    temperature: float = _option(1.0, "Divides the logits before sampling.")
    top_p: float = _option(1.0, "Sample from the likeliest tokens of this probability.")
    top_k: int = _option(0, "Sample from this many likeliest tokens; 0: all.")
    min_p: float | None = _option(None, "Sample tokens of at least this fraction of the likeliest one's probability.")
    generation_kwargs: dict | str | None = _option(None, "More arguments of generate.")  # type: ignore[type-arg]
    chat_template_kwargs: dict | str | None = _option(None, "Arguments of the chat template.")  # type: ignore[type-arg]
    repetition_penalty: float = _option(1.0, "Above 1: tokens that occurred become less likely when sampling.")
    cache_implementation: str | None = _option(None, "Key-value cache of generate.")
    use_vllm: bool = _option(False, "Sample with vLLM.")
    vllm_mode: str = _option("colocate", "server or colocate.")
    vllm_model_impl: str = _option("vllm", "vLLM's or transformers' model code.")
    vllm_enable_sleep_mode: bool = _option(False, "Free vLLM's memory during the update.")
    vllm_structured_outputs_regex: str | None = _option(None, "Regular expression that completions must match.")
    vllm_server_base_url: str | None = _option(None, "The server's URL.")
    vllm_server_host: str = _option("0.0.0.0", "The server's host, without a URL.")
    vllm_server_port: int = _option(8000, "The server's port, without a URL.")
    vllm_server_timeout: float = _option(240.0, "Seconds to wait for the server.")
    vllm_group_port: int = _option(51216, "Port of TRL's weight transfer.")
    vllm_gpu_memory_utilization: float = _option(0.3, "Share of the GPU's memory for vLLM.")
    vllm_max_model_length: int | None = _option(None, "Longest prompt and completion in vLLM.")
    vllm_tensor_parallel_size: int = _option(1, "Devices that share the model in vLLM.")

    # Training
    beta: float = _option(0.0, "Weight of the KL divergence from the reference.")
    num_iterations: int = _option(1, "Passes over each generation.")
    epsilon: float = _option(0.2, "Lower clip range.")
    delta: float | None = _option(None, "Upper clip of the ratio for negative advantages.")
    epsilon_high: float | None = _option(None, "Upper clip range; unset: epsilon. The cap of cispo.")
    sapo_temperature_neg: float = _option(1.05, "Gate of sapo for negative advantages.")
    sapo_temperature_pos: float = _option(1.0, "Gate of sapo for positive advantages.")
    vespo_k_pos: float = _option(2.0, "Parameter k of vespo for positive advantages.")
    vespo_lambda_pos: float = _option(3.0, "Parameter lambda of vespo for positive advantages.")
    vespo_k_neg: float = _option(3.0, "Parameter k of vespo for negative advantages.")
    vespo_lambda_neg: float = _option(2.0, "Parameter lambda of vespo for negative advantages.")
    importance_sampling_level: str = _option("token", "token or sequence.")
    reward_weights: list[float] | None = _option(None, "Weight of each reward function.")
    reward_timeout: float | None = _option(
        None, "Of Covey: seconds for one call of a reward function; unset: no limit."
    )
    multi_objective_aggregation: str = _option("sum_then_normalize", "sum_then_normalize or normalize_then_sum.")
    scale_rewards: str = _option("group", "group, batch or none; true and false mean group and none.")
    loss_type: str = _option("dapo", "dapo, grpo, dr_grpo, bnpo, cispo, sapo, luspo or vespo.")
    mask_truncated_completions: bool = _option(False, "Leave completions that hit the limit out of the loss.")
    sync_ref_model: bool = _option(False, "Let the reference follow the policy.")
    ref_model_mixup_alpha: float = _option(0.6, "The policy's share in each new reference.")
    ref_model_sync_steps: int = _option(512, "Optimiser steps between new references.")
    top_entropy_quantile: float = _option(1.0, "Share of the tokens, the most uncertain ones, that are trained.")
    entropy_coef: float = _option(0.0, "Weight of an entropy bonus.")
    use_adaptive_entropy: bool = _option(False, "Move entropy_coef so that the entropy stays at entropy_target.")
    entropy_coef_min: float = _option(0.0, "Least entropy_coef.")
    entropy_coef_max: float = _option(1.0, "Largest entropy_coef.")
    entropy_coef_delta: float = _option(0.005, "Step of entropy_coef.")
    entropy_target: float = _option(0.2, "Wanted entropy, in nats.")
    max_tool_calling_iterations: int | None = _option(None, "Rounds of tool calls in a completion; unset: no limit.")
    vllm_importance_sampling_correction: bool = _option(True, "Correct for a sampler that computes otherwise.")
    vllm_importance_sampling_mode: str = _option("sequence_mask", "token or sequence, truncate or mask.")
    vllm_importance_sampling_clip_max: float | None = _option(3.0, "Largest ratio of that correction.")
    vllm_importance_sampling_clip_min: float | None = _option(None, "Smallest ratio of that correction.")
    off_policy_mask_threshold: float | None = _option(None, "KL in nats above which bad completions are left out.")
    use_bias_correction_kl: bool = _option(True, "Weigh the KL estimate by the ratio.")

    # Logging
    log_completions: bool = _option(False, "Print completions when logging.")
    log_multimodal: bool = _option(True, "Log images too.")
    num_completions_to_print: int | None = _option(None, "How many; unset: all.")
    log_unique_prompts: bool = _option(False, "One completion for each prompt in a tracker's table.")
    log_completions_hub_repo: str | None = _option(None, "Hub dataset that completions are uploaded to.")

    # Deprecated
    use_transformers_continuous_batching: bool = _option(False, "Batch continuously; Covey always does.")
    transformers_continuous_batching_config: dict | str | None = _option(None, "Its options.")  # type: ignore[type-arg]
    use_transformers_paged: bool = _option(False, "Deprecated name of use_transformers_continuous_batching.")
    vllm_importance_sampling_cap: float | None = _option(None, "Deprecated: vllm_importance_sampling_clip_max.")

    # Of earlier versions of TRL and transformers: scripts in circulation still give them.
    max_prompt_length: int | None = _option(None, "Longest prompt in tokens; the last ones are kept.")
    evaluation_strategy: str | None = _option(None, "Former name of eval_strategy.")
    warmup_ratio: float | None = _option(None, "Former name of a warmup_steps below 1.")
    no_cuda: bool = _option(False, "Former name of use_cpu.")
    wandb_log_unique_prompts: bool = _option(False, "Former name of log_unique_prompts.")
    vllm_guided_decoding_regex: str | None = _option(None, "Former name of vllm_structured_outputs_regex.")
    vllm_max_model_len: int | None = _option(None, "Former name of vllm_max_model_length.")
    vllm_device: str | None = _option(None, "Device of vLLM.")
    vllm_dtype: str | None = _option(None, "Number type of vLLM.")
    vllm_enable_prefix_caching: bool = _option(True, "Prefix cache of vLLM.")
    use_liger_loss: bool = _option(False, "Chunked loss.")
    overwrite_output_dir: bool = _option(False, "An earlier run of the folder is kept beside the new one.")
    save_safetensors: bool = _option(True, "Weights are always saved as safetensors.")
    logging_dir: str | None = _option(None, "Folder of TensorBoard.")
    group_by_length: bool = _option(False, "Group rows by length.")

    def __post_init__(self) -> None:
        """Fill in what follows from other settings, and refuse what cannot be."""
        for former, name in FORMER_NAMES.items():
            if getattr(self, former) not in (None, False):
                setattr(self, name, getattr(self, former))
        self._check_kinds()
        if not torch.accelerator.is_available():
            self.use_cpu = True  # transformers wants it said before it allows mixed precision
        self.top_k = 0 if self.top_k in (None, -1) else self.top_k  # former defaults of TRL and vLLM: all tokens
        self.report_to = "none" if self.report_to is None else self.report_to
        if self.tf32 and not is_torch_tf32_available():
            self.tf32 = None
            warnings.warn(
                "tf32=True has no effect: this machine's device has no such numbers", UserWarning, stacklevel=3
            )
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and _computes_in_bfloat16()
        with warnings.catch_warnings():
            # transformers deprecates the name that every GRPO script uses; both are read here.
            warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)
            super().__post_init__()  # type: ignore[no-untyped-call]
        if self.auto_find_batch_size:
            raise ConfigError(
                "auto_find_batch_size=True: a generation must hold whole groups, which a smaller batch would cut; "
                "lower per_device_train_batch_size instead"
            )
        scale: dict[Any, str] = {True: "group", False: "none"}
        self.scale_rewards = scale.get(self.scale_rewards, self.scale_rewards)
        if self.vllm_importance_sampling_cap is not None:
            self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap
        self.use_transformers_continuous_batching |= self.use_transformers_paged
        if self.pad_to_multiple_of == "auto":
            self.pad_to_multiple_of = None
        self._fill_batch_sizes()

    def _check_kinds(self) -> None:
        """What transformers would stumble over with an error of its own."""
        if self.deepspeed:
            raise ConfigError("deepspeed: training runs in one process here; leave it out")
        for name in ("max_steps", "num_train_epochs", "learning_rate", "logging_steps", "save_steps", "warmup_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{name}={value!r}: a {type(value).__name__}; give a number")
        for name in ("num_completions_to_print", "num_generations_eval", "max_tool_calling_iterations"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise ConfigError(f"{name}={value!r}: it counts something; give a whole number, or None")
        for name in ("bf16", "fp16", "log_completions", "use_vllm", "sync_ref_model", "use_adaptive_entropy"):
            if getattr(self, name) not in (True, False, None):
                raise ConfigError(f"{name}={getattr(self, name)!r}: it is on or off; give True or False")
        if self.vllm_mode not in ("server", "colocate"):
            raise ConfigError(f"vllm_mode={self.vllm_mode!r}: no such mode; give server or colocate")
        if self.warmup_ratio is not None and not 0 <= self.warmup_ratio < 1:
            raise ConfigError(f"warmup_ratio={self.warmup_ratio!r}: a share of all steps; give 0 or more, below 1")
        if self.reward_weights is not None and not isinstance(self.reward_weights, list | tuple):
            raise ConfigError(f"reward_weights={self.reward_weights!r}: give a list, one number for each reward")

    def _fill_batch_sizes(self) -> None:
        """`generation_batch_size` and `steps_per_generation`, each from the other."""
        size, group = self.per_device_train_batch_size, cast(int, self.num_generations)
        counts = ["per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations"]
        counts += [n for n in ("steps_per_generation", "generation_batch_size") if getattr(self, n) is not None]
        for name in counts:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}: it counts something; give a whole number, 1 or more")
        if group < 2:
            raise ConfigError(f"num_generations={group}: completions of a prompt are compared; give 2 or more")
        sampled, steps = self.generation_batch_size, self.steps_per_generation
        if sampled is None and steps is None and size * self.gradient_accumulation_steps < group:
            warnings.warn(
                f"per_device_train_batch_size={size} times gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps} holds no group of num_generations={group}: raised to {group}, as "
                "in the versions of TRL that counted prompts and as Unsloth does",
                UserWarning,
                stacklevel=4,
            )
            self.per_device_train_batch_size = size = group
        if sampled is not None and steps is not None and sampled != size * steps:
            raise ConfigError(
                f"generation_batch_size={sampled} and steps_per_generation={steps}: each follows from the other "
                f"(per_device_train_batch_size={size}); give one of them"
            )
        if sampled is not None and sampled % size:
            raise ConfigError(
                f"generation_batch_size={sampled}: is no multiple of per_device_train_batch_size={size}; change one"
            )
        if sampled is not None:
            steps = sampled // size
        self.steps_per_generation = steps or self.gradient_accumulation_steps
        self.generation_batch_size = size * self.steps_per_generation
        if self.generation_batch_size % group:
            raise ConfigError(
                f"generation_batch_size={self.generation_batch_size}: a generation holds whole groups of "
                f"num_generations={group}; make per_device_train_batch_size, gradient_accumulation_steps or "
                "steps_per_generation a multiple"
            )
        in_evaluations = self.num_generations_eval or group
        if self.do_eval and self.eval_strategy != "no" and self.per_device_eval_batch_size % in_evaluations:
            raise ConfigError(
                f"per_device_eval_batch_size={self.per_device_eval_batch_size}: must be a multiple of the "
                f"{in_evaluations} completions for each prompt (num_generations_eval, num_generations); change one"
            )

    @property
    def optimizer_steps_per_generation(self) -> int:
        """Optimiser steps that one generation is trained on, all its passes together.

        Raises:
            ConfigError: an optimiser step would need parts of two generations.
        """
        micro = cast(int, self.steps_per_generation) * self.num_iterations
        if micro % self.gradient_accumulation_steps:
            raise ConfigError(
                f"steps_per_generation={self.steps_per_generation} times num_iterations={self.num_iterations} is no "
                f"multiple of gradient_accumulation_steps={self.gradient_accumulation_steps}: an optimiser step would "
                "hold parts of two generations; change one of them"
            )
        return micro // self.gradient_accumulation_steps


def _computes_in_bfloat16() -> bool:
    """Is bfloat16 arithmetic of this machine's device, not emulated?"""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    xpu = getattr(torch, "xpu", None)
    return bool(xpu is not None and xpu.is_available())
