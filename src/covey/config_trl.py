"""TRL's and transformers' option names, with the meaning that they have there (TRL 1.16, transformers 5).

A TRL script runs with its import line changed: names that Covey shares are plain fields, the others are
translated here into fields. An option without a counterpart is an error that says what to use instead, unless
its value is TRL's default, i.e. asks for nothing. Options that only tune TRL's machinery and cannot change a
result are accepted and have no effect.

Limit: TRL multiplies by the number of processes; the translation is that of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from covey.errors import ConfigError

Options = Mapping[str, Any]
Settings = Iterator[tuple[str, Any, str]]
"""(field, value, the option as it was written)."""

_BATCH_OPTIONS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
)


def _batch(options: Options, known: Options) -> Settings:
    """Completions per optimiser step / completions per prompt = prompts per step."""
    for name in _BATCH_OPTIONS:
        value = options.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name}={value!r}: must be a whole number, 1 or more; set data.prompts_per_step instead")
    size = options.get("per_device_train_batch_size") or 8
    accumulation = options.get("gradient_accumulation_steps") or 1
    group = known.get("num_generations") or 8
    generations = options.get("steps_per_generation")
    sampled = options.get("generation_batch_size")
    if generations is not None and sampled is not None:
        raise ConfigError(
            f"steps_per_generation={generations} and generation_batch_size={sampled}: each follows from the "
            "other; give one of them, or data.prompts_per_step alone"
        )
    if sampled is not None:
        if sampled % size:
            raise ConfigError(
                f"generation_batch_size={sampled}: is no multiple of per_device_train_batch_size={size}; "
                "set data.prompts_per_step instead"
            )
        generations = sampled // size
    generations = generations or accumulation
    sampled = size * generations
    if generations > accumulation:
        raise ConfigError(
            f"steps_per_generation={generations}: with gradient_accumulation_steps={accumulation}, TRL "
            "takes several optimiser steps on parts of one generation; Covey takes one. Set "
            f"gradient_accumulation_steps to {generations}, or use algorithm.num_iterations for several "
            "passes over each generation"
        )
    if accumulation % generations:
        raise ConfigError(
            f"steps_per_generation={generations}: does not divide "
            f"gradient_accumulation_steps={accumulation}, so an optimiser step would end inside a "
            "generation; set data.prompts_per_step instead"
        )
    if sampled % group:
        raise ConfigError(
            f"generation_batch_size={sampled}: must be divisible by num_generations={group}, since a "
            f"generation holds whole groups; set per_device_train_batch_size to a multiple of {group}, or "
            "data.prompts_per_step instead"
        )
    written = ", ".join(f"{name}={options[name]}" for name in _BATCH_OPTIONS if name in options)
    if "num_generations" not in known:
        yield "num_generations", group, written
    yield "prompts_per_step", size * accumulation // group, written


def _precision(options: Options, known: Options) -> Settings:
    bf16, fp16 = options.get("bf16"), options.get("fp16")
    for name, value in (("bf16", bf16), ("fp16", fp16)):
        if value not in (True, False, None):
            raise ConfigError(f"{name}={value!r}: must be true or false; set model.dtype instead")
    if bf16 and fp16:
        raise ConfigError('bf16=True and fp16=True: only one can hold; set model.dtype to "bfloat16" or "float16"')
    if bf16:
        yield "dtype", "bfloat16", "bf16=True"
    elif fp16:
        yield "dtype", "float16", "fp16=True"
    elif bf16 is not None:
        yield "dtype", "float32", "bf16=False"


def _device(options: Options, known: Options) -> Settings:
    if options["use_cpu"]:
        yield "device", "cpu", f"use_cpu={options['use_cpu']}"


def _reference(options: Options, known: Options) -> Settings:
    """TRL: reference = alpha * policy + (1 - alpha) * reference. Without sync_ref_model the other two do
    nothing there.
    """
    if not options.get("sync_ref_model"):
        return
    alpha = options.get("ref_model_mixup_alpha", 0.6)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= 1:
        raise ConfigError(
            f"ref_model_mixup_alpha={alpha!r}: the policy's share must be above 0 and at most 1; set "
            'algorithm.reference_update to "ema" and algorithm.reference_ema_decay to 1 - alpha'
        )
    yield "reference_update", "copy" if alpha == 1 else "ema", "sync_ref_model=True"
    yield "reference_update_steps", options.get("ref_model_sync_steps", 512), "ref_model_sync_steps"
    if alpha < 1:
        # Rounded, since 1 - 0.9 is not the double nearest to 0.1.
        yield "reference_ema_decay", round(1 - alpha, 12), "ref_model_mixup_alpha"


def _sampler_mismatch(options: Options, known: Options) -> Settings:
    if options.get("vllm_importance_sampling_correction", True) is False:
        yield "importance_sampling_correction", None, "vllm_importance_sampling_correction=False"
        return
    cap = options.get("vllm_importance_sampling_cap")
    cap = options.get("vllm_importance_sampling_clip_max", 3.0) if cap is None else cap
    if cap is None:
        raise ConfigError(
            "vllm_importance_sampling_clip_max=None: without a bound nothing is corrected; "
            'set algorithm.importance_sampling_cap, or algorithm.importance_sampling_correction to "none"'
        )
    mode = options.get("vllm_importance_sampling_mode", "sequence_mask")
    yield "importance_sampling_correction", mode, f"vllm_importance_sampling_mode={mode!r}"
    yield "importance_sampling_cap", cap, f"vllm_importance_sampling_clip_max={cap}"
    low = options.get("vllm_importance_sampling_clip_min")
    yield "importance_sampling_floor", low, f"vllm_importance_sampling_clip_min={low}"


def _vespo(options: Options, known: Options) -> Settings:
    """Parameters of one loss, which do nothing with another."""
    if known.get("loss_type") == "vespo":
        own = {name.removeprefix("vespo_"): value for name, value in options.items() if name.startswith("vespo_")}
        yield "loss_parameters", own, "vespo_..."


def _saving(options: Options, known: Options) -> Settings:
    strategy = options["save_strategy"]
    if strategy == "no":
        yield "save_steps", 0, "save_strategy='no'"
    elif strategy != "steps":
        raise ConfigError(
            f"save_strategy={strategy!r}: Covey saves every so many steps; set run.save_steps, or "
            "evaluation.load_best_model_at_end to keep the best weights"
        )


def _evaluating(options: Options, known: Options) -> Settings:
    strategy = options["eval_strategy"]
    if strategy == "no":
        yield "eval_steps", 0, "eval_strategy='no'"
    elif strategy != "steps":
        raise ConfigError(f"eval_strategy={strategy!r}: Covey evaluates every so many steps; set evaluation.eval_steps")
    elif "eval_steps" not in known:
        steps = known.get("logging_steps", 10)
        yield "eval_steps", steps, f"eval_strategy='steps' (every logging_steps={steps}, as in TRL)"


def _kl_correction(options: Options, known: Options) -> Settings:
    value = options["use_bias_correction_kl"]
    yield "kl_estimator", "k3_unbiased" if value else "k3", f"use_bias_correction_kl={value}"


def _dropout(options: Options, known: Options) -> Settings:
    if options["disable_dropout"]:
        yield "lora_dropout", 0.0, f"disable_dropout={options['disable_dropout']}"


def _shuffling(options: Options, known: Options) -> Settings:
    if options["shuffle_dataset"] is not None:
        yield "shuffle", options["shuffle_dataset"], f"shuffle_dataset={options['shuffle_dataset']}"


def _loading(options: Options, known: Options) -> Settings:
    value = options["model_init_kwargs"]
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"model_init_kwargs={value!r}: must be a table; set the fields of the model section instead")
    for name, setting in (value or {}).items():
        written = f"model_init_kwargs[{name!r}]"
        if name in ("dtype", "torch_dtype"):
            yield "dtype", str(setting).removeprefix("torch."), written
        elif name == "trust_remote_code":
            yield "trust_remote_code", setting, written
        elif name == "device_map" and setting not in ("auto", None):
            yield "device", str(setting), written
        elif name != "device_map":
            raise ConfigError(
                f"{written}={setting!r}: no counterpart in Covey; give GRPOTrainer a model that you loaded yourself"
            )


Translator = Callable[[Options, Options], Settings]

TRANSLATORS: tuple[tuple[tuple[str, ...], Translator], ...] = (
    (_BATCH_OPTIONS, _batch),
    (("bf16", "fp16"), _precision),
    (("use_cpu",), _device),
    (("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"), _reference),
    (
        (
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min",
            "vllm_importance_sampling_cap",
        ),
        _sampler_mismatch,
    ),
    (("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), _vespo),
    (("save_strategy",), _saving),
    (("eval_strategy",), _evaluating),
    (("use_bias_correction_kl",), _kl_correction),
    (("disable_dropout",), _dropout),
    (("shuffle_dataset",), _shuffling),
    (("model_init_kwargs",), _loading),
)
"""Which options each translator reads together."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


NO_EFFECT = _names(
    """
    remove_unused_columns per_device_eval_batch_size eval_accumulation_steps disable_tqdm
    gradient_checkpointing_kwargs activation_checkpointing_kwargs dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
    dataloader_in_order ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
    ddp_backend ddp_timeout ds3_gather_for_generation torch_empty_cache_steps pad_to_multiple_of use_cache
    log_level log_level_replica log_on_each_node save_on_each_node skip_memory_metrics do_train do_eval
    do_predict label_names local_rank eval_do_concat_batches eval_use_gather_object batch_eval_metrics
    average_tokens_across_devices overwrite_output_dir save_safetensors
    """
)
"""Machinery that Covey does not have and that cannot change a result."""

_VLLM = "Covey samples in its own process; remove it"
_HUB = "run `covey export RUN --push-to-hub OWNER/NAME` when the run is done"
_DISTRIBUTED = "training runs in one process; remove it"
_COMPILE = "remove it"

UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    # option: (what to use instead, values that ask for nothing: TRL's default and its equals)
    "optim": ("the optimiser is AdamW; remove it", ("adamw_torch", "adamw_torch_fused", "adamw_hf")),
    "optim_args": ("set optim.adam_beta1, optim.adam_beta2, optim.adam_epsilon", ()),
    "optim_target_modules": ("set model.lora_target_modules", ()),
    "logging_strategy": ("set run.logging_steps", ("steps",)),
    "logging_first_step": ("set run.logging_steps to 1", (False,)),
    "logging_nan_inf_filter": ("metrics are logged as they are; remove it", (True,)),
    "logging_dir": ("trackers write below run.output_dir; remove it", ()),
    "include_num_input_tokens_seen": ("token counts are always logged; remove it", ("no", False)),
    "include_for_metrics": ("score completions in a reward function", ([],)),
    "prediction_loss_only": ("remove it", (False,)),
    "project": ("name the project in the tracker's own environment variable", ("huggingface",)),
    "trackio_space_id": ("set TRACKIO_SPACE_ID in the environment", ("trackio",)),
    "trackio_bucket_id": ("remove it", ()),
    "trackio_static_space_id": ("remove it", ()),
    "log_unique_prompts": ("every recorded completion is kept in the run folder; remove it", (False,)),
    "log_multimodal": ("Covey trains on text only; remove it", (True,)),
    "log_completions_hub_repo": (_HUB, ()),
    "eval_delay": ("set evaluation.eval_steps", (0,)),
    "greater_is_better": (
        "name a metric in evaluation.metric_for_best_model of which more is better",
        (True,),
    ),
    "save_only_model": ("checkpoints hold all that a resume needs; remove it", (False,)),
    "enable_jit_checkpoint": ("a killed run resumes from its last checkpoint; set run.save_steps", (False,)),
    "resume_from_checkpoint": ("pass it to GRPOTrainer.train, or use `covey resume`", (False,)),
    "ignore_data_skip": ("a resumed run goes on where it was; remove it", (False,)),
    "restore_callback_states_from_checkpoint": ("remove it", (False,)),
    "auto_find_batch_size": (
        "set optim.tokens_per_micro_batch, which does not change the gradient",
        (False,),
    ),
    "full_determinism": ("set run.seed", (False,)),
    "data_seed": ("set run.seed, which also orders the data", ()),
    "train_sampling_strategy": ("set data.shuffle", ("random",)),
    "group_by_length": ("micro-batches are packed by tokens; remove it", (False,)),
    "length_column_name": ("micro-batches are packed by tokens; remove it", ("length",)),
    "dataloader_drop_last": ("set data.prompts_per_step to a divisor of the dataset's size", (False,)),
    "bf16_full_eval": ("set model.dtype", (False,)),
    "fp16_full_eval": ("set model.dtype", (False,)),
    "tf32": ("call torch.set_float32_matmul_precision before training", ()),
    "cast_lm_head_to_fp32": ('set model.dtype to "float32"', (False,)),
    "cache_implementation": ("set sampling.kv_cache_gb", ()),
    "activation_checkpointing": ("set model.gradient_checkpointing", (False,)),
    "torch_compile": (_COMPILE, (False,)),
    "torch_compile_backend": (_COMPILE, ()),
    "torch_compile_mode": (_COMPILE, ()),
    "use_liger_kernel": ("log-probabilities are computed in chunks already; remove it", (False,)),
    "liger_kernel_config": ("log-probabilities are computed in chunks already; remove it", ()),
    "use_liger_loss": ("log-probabilities are computed in chunks already; remove it", (False,)),
    "neftune_noise_alpha": ("remove it", ()),
    "label_smoothing_factor": ("remove it", (0.0,)),
    "router_aux_loss_coef": ("remove it", ()),
    "generation_kwargs": ("set sampling.top_k, sampling.top_p, sampling.min_p, sampling.stop_strings", ({},)),
    "repetition_penalty": (
        "it would move sampling away from the distribution that is trained; use algorithm.validity_mask",
        (1.0,),
    ),
    "max_tool_calling_iterations": ("write the tool as a covey.environments environment", ()),
    "use_transformers_continuous_batching": ("Covey always batches continuously; remove it", (False,)),
    "transformers_continuous_batching_config": ("set sampling.kv_cache_gb", ()),
    "use_transformers_paged": ("Covey always batches continuously; remove it", (False,)),
    "use_vllm": (_VLLM, (False,)),
    "vllm_mode": (_VLLM, ("colocate", "server")),
    "vllm_model_impl": (_VLLM, ("vllm",)),
    "vllm_enable_sleep_mode": (_VLLM, (False,)),
    "vllm_structured_outputs_regex": ("reward the wanted form with a reward function", ()),
    "vllm_server_base_url": (_VLLM, ()),
    "vllm_server_host": (_VLLM, ("0.0.0.0",)),
    "vllm_server_port": (_VLLM, (8000,)),
    "vllm_server_timeout": (_VLLM, (240.0,)),
    "vllm_group_port": (_VLLM, (51216,)),
    "vllm_gpu_memory_utilization": ("set sampling.kv_cache_gb", (0.3,)),
    "vllm_max_model_length": ("set data.max_prompt_length and sampling.max_completion_length", ()),
    "vllm_tensor_parallel_size": (_VLLM, (1,)),
    "push_to_hub": (_HUB, (False,)),
    "hub_token": (_HUB, ()),
    "hub_private_repo": (_HUB, ()),
    "hub_model_id": (_HUB, ()),
    "hub_strategy": (_HUB, ("every_save",)),
    "hub_always_push": (_HUB, (False,)),
    "hub_revision": (_HUB, ()),
    "accelerator_config": (_DISTRIBUTED, ({},)),
    "parallelism_config": (_DISTRIBUTED, ()),
    "fsdp": (_DISTRIBUTED, ("", [])),
    "fsdp_config": (_DISTRIBUTED, ({},)),
    "deepspeed": (_DISTRIBUTED, ()),
    "debug": ("remove it", ("", [])),
}
"""Options without a counterpart. `None` is always accepted."""

NAMES = frozenset(name for names, _ in TRANSLATORS for name in names) | NO_EFFECT | frozenset(UNSUPPORTED)
"""Every option that is not a field of Covey under the same name."""

_NONE_MEANS_DEFAULT = _names(
    """
    gradient_checkpointing min_p top_k num_generations num_generations_eval metric_for_best_model output_dir
    chat_template_kwargs eval_steps shuffle
    """
)


def shared_field(field: str, value: Any) -> tuple[str, Any] | None:
    """Read a field that TRL has too with the values that TRL allows for it. None = as if it had not been
    given.
    """
    if value is None and field in _NONE_MEANS_DEFAULT:
        return None
    if field == "warmup_steps" and isinstance(value, float):
        if 0 < value < 1:
            return "warmup_ratio", value
        if value.is_integer():
            return field, int(value)
    if field == "metric_for_best_model" and isinstance(value, str) and value.removeprefix("eval_"):
        return field, f"eval/{value.removeprefix('eval_').removeprefix('eval/')}"
    if field == "lr_scheduler_type" and value == "constant_with_warmup":
        return field, "constant"
    return field, value


def translate(
    options: Options, known: Options, further: tuple[tuple[tuple[str, ...], Translator], ...] = ()
) -> tuple[list[tuple[str, Any, str]], list[str]]:
    """Turn TRL's options into fields.

    Args:
        options: option -> value, of `NAMES` or of the `further` translators.
        known: the fields that are given besides.
        further: translators of other options, like `TRANSLATORS`.

    Returns:
        (field, value, option as written) for each field that follows; what is wrong, one message each.
    """
    settings: list[tuple[str, Any, str]] = []
    problems: list[str] = []
    for names, translator in (*TRANSLATORS, *further):
        if any(name in options for name in names):
            try:
                settings.extend(translator(options, known))
            except ConfigError as error:
                problems.append(str(error))
    for name, (instead, harmless) in UNSUPPORTED.items():
        if name in options and options[name] is not None and options[name] not in harmless:
            problems.append(f"{name}={options[name]!r}: TRL's option {name} has no counterpart in Covey; {instead}")
    return settings, problems
