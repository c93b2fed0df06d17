"""What each of TRL's 191 fields means here: one table, from which the translation and the documentation are made.

A field is the *same* in Covey, is *translated*, asks for something that changes no result (*warned* when set), or is
*refused* with what to do instead. A value that equals TRL's default asks for nothing and is never refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from importlib import util
from typing import Any, Literal

from covey.errors import ConfigError
from covey.trl.arguments import FORMER_NAMES, GRPOConfig

Kind = Literal["same", "translated", "machinery", "warned", "refused"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """What becomes of a field."""

    kind: Kind
    text: str
    harmless: tuple[Any, ...] = ()


def _same(names: str, section: str) -> dict[str, Meaning]:
    return {name: Meaning("same", f"{section}.{name}") for name in names.split()}


def _all(kind: Kind, text: str, names: str, harmless: tuple[Any, ...] = ()) -> dict[str, Meaning]:
    return {name: Meaning(kind, text, harmless) for name in names.split()}


_VLLM = "vLLM has the learner's device, the model's number format and its prefix cache"
_BATCH = "data.prompts_per_step, algorithm.num_minibatches"
_ONE_PROCESS = "training runs in one process; leave it out"

MEANINGS: dict[str, Meaning] = {
    # ---- taken over
    **_same("learning_rate max_grad_norm", "optim"),
    **_same("lr_scheduler_type lr_scheduler_kwargs", "optim"),
    **_same("num_generations temperature top_p top_k max_completion_length", "sampling"),
    **_same("beta num_iterations epsilon", "algorithm"),
    **_same("loss_type scale_rewards mask_truncated_completions", "algorithm"),
    **_same("top_entropy_quantile off_policy_mask_threshold entropy_coef", "algorithm"),
    **_same("output_dir run_name seed save_total_limit report_to", "run"),
    **_same("trust_remote_code gradient_checkpointing", "model"),
    **_same("eval_on_start load_best_model_at_end", "evaluation"),
    **_same("chat_template_kwargs", "data"),
    **_same("reward_weights", "rewards"),
    # ---- translated
    **_all("translated", _BATCH, "per_device_train_batch_size gradient_accumulation_steps"),
    **_all("translated", _BATCH, "steps_per_generation generation_batch_size"),
    **_all("translated", "schedule.max_steps, counted in generations", "max_steps num_train_epochs"),
    "warmup_steps": Meaning("translated", "optim.warmup_steps"),
    **_all("translated", "optim.optimizer_parameters", "weight_decay adam_beta1 adam_beta2 adam_epsilon"),
    **_all("translated", "algorithm.loss_parameters", "delta importance_sampling_level"),
    **_all("translated", "algorithm.loss_parameters of sapo", "sapo_temperature_pos sapo_temperature_neg"),
    "multi_objective_aggregation": Meaning("translated", "algorithm.adv_estimator: grpo, or gdpo"),
    **_all("translated", "algorithm.adaptive_entropy", "use_adaptive_entropy entropy_coef_min entropy_coef_max"),
    **_all("translated", "algorithm.adaptive_entropy", "entropy_coef_delta entropy_target"),
    "min_p": Meaning("translated", "sampling.min_p; unset: 0"),
    "epsilon_high": Meaning(
        "translated", "algorithm.loss_parameters: epsilon_high, of cispo epsilon_max; unset: epsilon"
    ),
    **_all("translated", "algorithm.loss_parameters of vespo", "vespo_k_pos vespo_lambda_pos vespo_k_neg"),
    "vespo_lambda_neg": Meaning("translated", "algorithm.loss_parameters of vespo"),
    "use_bias_correction_kl": Meaning("translated", "the KL (k3) is multiplied by the ratio of the loss"),
    **_all("translated", "algorithm.reference_update_steps", "sync_ref_model ref_model_sync_steps"),
    "ref_model_mixup_alpha": Meaning("translated", "algorithm.reference_ema_decay: 1 - alpha"),
    **_all("translated", "optim.autocast: weights stay float32", "bf16 fp16"),
    "use_cpu": Meaning("translated", "model.device"),
    "disable_dropout": Meaning("translated", "model.lora_dropout: 0 (other dropouts are off in any case)"),
    "shuffle_dataset": Meaning("translated", "data.prompt_order: random or given"),
    "activation_checkpointing": Meaning("translated", "model.gradient_checkpointing"),
    "model_init_kwargs": Meaning("translated", "the model is loaded with them, quantization_config too"),
    "repetition_penalty": Meaning("translated", "unless 1, the model's own generate samples"),
    "generation_kwargs": Meaning(
        "translated",
        "sampling.top_k, top_p, min_p, temperature, stop_strings; with others the model's generate samples",
    ),
    "cast_lm_head_to_fp32": Meaning("translated", "log-probabilities are computed in float32 in any case"),
    "logging_strategy": Meaning("translated", "run.logging_steps"),
    "logging_steps": Meaning("translated", "run.logging_steps; a fraction below 1 is of all steps"),
    "logging_first_step": Meaning("translated", "the first step is logged"),
    **_all("translated", "run.save_steps", "save_strategy save_steps"),
    **_all("translated", "evaluation.eval_steps", "eval_strategy eval_steps"),
    "num_generations_eval": Meaning("translated", "evaluation.num_generations_eval; unset: num_generations"),
    "metric_for_best_model": Meaning("translated", "evaluation.metric_for_best_model; the loss means eval/reward"),
    "greater_is_better": Meaning(
        "translated", "of every metric more is better; False beside another than the loss is refused"
    ),
    "log_completions": Meaning("translated", "a table on the screen and at trackers; the run folder always has them"),
    "num_completions_to_print": Meaning("translated", "rows of the table on the screen"),
    "log_unique_prompts": Meaning("translated", "one completion of each prompt in the trackers' table"),
    "disable_tqdm": Meaning("translated", "run.progress"),
    "max_tool_calling_iterations": Meaning("translated", "with tools, rounds of calls in a completion"),
    "use_vllm": Meaning(
        "translated",
        "vllm_mode server: the server section; colocate: sampling.engine=vllm where vLLM is installed",
    ),
    "vllm_mode": Meaning("translated", "see use_vllm"),
    **_all("translated", "server.inference_server_url", "vllm_server_base_url vllm_server_host vllm_server_port"),
    "vllm_server_timeout": Meaning("translated", "server.server_retry_seconds"),
    **_all(
        "translated",
        "algorithm.importance_sampling_correction, with use_vllm",
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min vllm_importance_sampling_cap",
    ),
    **_all(
        "translated",
        "the vllm section, with use_vllm and vllm_mode colocate",
        "vllm_gpu_memory_utilization vllm_enable_sleep_mode vllm_tensor_parallel_size vllm_max_model_length "
        "vllm_model_impl",
    ),
    "optim": Meaning(
        "translated",
        "optim.optimizer: AdamW, of 8 bits with bitsandbytes' names; its other variants run as plain AdamW",
    ),
    "data_seed": Meaning("warned", "run.seed also orders the data"),
    "resume_from_checkpoint": Meaning("translated", "read by your script, as in transformers: train() takes it"),
    "push_to_hub": Meaning("translated", "save_model and the end of train push the adapter or the model"),
    **_all("translated", "where push_to_hub uploads to", "hub_model_id hub_token hub_private_repo hub_revision"),
    "eval_delay": Meaning("translated", "evaluations before that step are left out"),
    # ---- what nothing depends on
    **_all(
        "machinery",
        "of a machine that Covey does not have; no result depends on it",
        "remove_unused_columns per_device_eval_batch_size eval_accumulation_steps gradient_checkpointing_kwargs "
        "activation_checkpointing_kwargs dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order ddp_find_unused_parameters "
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout ds3_gather_for_generation "
        "torch_empty_cache_steps pad_to_multiple_of use_cache log_level log_level_replica log_on_each_node "
        "save_on_each_node skip_memory_metrics do_train do_eval do_predict label_names local_rank "
        "eval_do_concat_batches eval_use_gather_object batch_eval_metrics average_tokens_across_devices "
        "accelerator_config log_multimodal logging_nan_inf_filter prediction_loss_only include_for_metrics "
        "include_num_input_tokens_seen length_column_name project trackio_space_id trackio_bucket_id "
        "trackio_static_space_id ignore_data_skip restore_callback_states_from_checkpoint hub_strategy hub_always_push "
        "cache_implementation use_transformers_continuous_batching transformers_continuous_batching_config "
        "use_transformers_paged tf32 debug",
    ),
    # ---- said once
    "vllm_group_port": Meaning("warned", "weights go to a server as files"),
    **_all(
        "warned",
        "log-probabilities are computed in chunks, without the logits of a whole batch, in any case",
        "use_liger_kernel liger_kernel_config",
    ),
    **_all("warned", "the layers have a backward pass of their own", "torch_compile torch_compile_backend"),
    "torch_compile_mode": Meaning("warned", "the layers have a backward pass of their own"),
    "save_only_model": Meaning("warned", "checkpoints hold all that a resume needs"),
    "enable_jit_checkpoint": Meaning("warned", "a run that is killed resumes from its last checkpoint"),
    "full_determinism": Meaning("warned", "a seed fixes the whole run in any case"),
    "train_sampling_strategy": Meaning(
        "warned", "prompts come in a random order, or with shuffle_dataset=False in theirs"
    ),
    "dataloader_drop_last": Meaning("warned", "an incomplete last batch is filled from the next epoch"),
    **_all("warned", "evaluations compute as training does", "bf16_full_eval fp16_full_eval"),
    "neftune_noise_alpha": Meaning("warned", "noise on embeddings would leave the distribution that was sampled"),
    "label_smoothing_factor": Meaning("warned", "there are no labels"),
    "log_completions_hub_repo": Meaning("warned", "completions stay in the run folder; upload its folder completions/"),
    # ---- impossible
    "optim_args": Meaning("refused", "set adam_beta1, adam_beta2 and adam_epsilon"),
    "optim_target_modules": Meaning("refused", "pass peft_config with target_modules"),
    "auto_find_batch_size": Meaning("refused", "lower per_device_train_batch_size"),
    "router_aux_loss_coef": Meaning(
        "refused", "the balance loss of a mixture of experts is not computed; leave it out"
    ),
    "vllm_structured_outputs_regex": Meaning("refused", "reward the wanted form with a reward function"),
    **_all("refused", _ONE_PROCESS, "parallelism_config fsdp fsdp_config deepspeed"),
}
"""Every field of TRL 1.16's `GRPOConfig`."""

FORMER: dict[str, Meaning] = {
    "max_prompt_length": Meaning("translated", "data.max_prompt_length, with data.long_prompts: truncate"),
    **{former: Meaning("translated", name) for former, name in FORMER_NAMES.items()},
    **_all("warned", _VLLM, "vllm_device vllm_dtype vllm_enable_prefix_caching"),
    "use_liger_loss": Meaning("warned", "log-probabilities are computed in chunks in any case"),
    "overwrite_output_dir": Meaning("translated", "an earlier run of the folder is kept beside the new one"),
    "save_safetensors": Meaning("machinery", "weights are always saved as safetensors"),
    "logging_dir": Meaning("machinery", "TensorBoard's files are in output_dir"),
    "group_by_length": Meaning("machinery", "batches are packed by tokens"),
}
"""Options that TRL or transformers had before, which scripts in circulation still give."""

DEFAULTS: dict[str, Any] = {
    field.name: field.default
    if field.default is not MISSING
    else (field.default_factory() if field.default_factory is not MISSING else None)
    for field in fields(GRPOConfig)
}
"""TRL's default of each."""

_NOTHING: dict[str, tuple[Any, ...]] = {
    "fsdp": ("", [], None, False),
    "fsdp_config": ({}, None),
    "parallelism_config": (None,),
    "optim_args": ("", None),
    "router_aux_loss_coef": (None, 0),
}


def was_set(args: GRPOConfig, name: str) -> bool:
    """Does the field ask for something, i.e. is it not TRL's default and none of its equals?"""
    value = getattr(args, name)
    return value != DEFAULTS[name] and value not in _NOTHING.get(name, (None,))


def vllm_is_installed() -> bool:
    """True when this environment has vLLM."""
    return util.find_spec("vllm") is not None


def warned(args: GRPOConfig) -> Iterator[str]:
    """A sentence for each field that is set and has no effect."""
    if args.use_vllm and args.vllm_mode == "colocate" and not vllm_is_installed():
        yield (
            "use_vllm=True with vllm_mode='colocate' has no effect: vLLM is not installed here, and Covey's engine "
            "samples in this process"
        )
    for name, meaning in (MEANINGS | FORMER).items():
        if meaning.kind == "warned" and was_set(args, name):
            yield f"{name}={getattr(args, name)!r:.200} has no effect: {meaning.text}"


def check(args: GRPOConfig) -> None:
    """Refuse what cannot be.

    Raises:
        ConfigError: one message with every field that asks for something impossible, one a line.
    """
    problems = [
        f"{name}={getattr(args, name)!r:.200}: is not possible in Covey; {meaning.text}"
        for name, meaning in MEANINGS.items()
        if meaning.kind == "refused" and was_set(args, name)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
