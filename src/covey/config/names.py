"""From the names that people write to the names of fields.

A setting may be given as `beta`, in a section (`algorithm.beta`, or a table `algorithm` with `beta` in it),
or under a synonym (`kl_coef`). `canonical_names` reduces all of these to field -> value. A name that only TRL has is an
error that points to `covey.trl`, where it means what it means there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from covey.config.algorithm import AlgorithmConfig
from covey.config.data import DataConfig, RewardConfig
from covey.config.environment import EnvironmentConfig
from covey.config.run import RunConfig
from covey.config.sampling import ModelConfig, SamplingConfig, VLLMConfig
from covey.config.section import Section
from covey.config.server import DistributedConfig, ServerConfig
from covey.config.training import EvaluationConfig, OptimConfig, ScheduleConfig
from covey.errors import ConfigError

SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "algorithm": AlgorithmConfig,
    "sampling": SamplingConfig,
    "vllm": VLLMConfig,
    "data": DataConfig,
    "rewards": RewardConfig,
    "environment": EnvironmentConfig,
    "server": ServerConfig,
    "distributed": DistributedConfig,
    "optim": OptimConfig,
    "schedule": ScheduleConfig,
    "evaluation": EvaluationConfig,
    "run": RunConfig,
}

FIELDS: dict[str, str] = {name: section for section, model in SECTIONS.items() for name in model.model_fields}
"""Field -> its section. Field names are unique over all sections."""

TABLES = {name for name in FIELDS if SECTIONS[FIELDS[name]].model_fields[name].default_factory is dict}
TABLES |= {"adaptive_entropy", "teacher"}

SYNONYMS: dict[str, str] = {
    "kl_coef": "beta",
    "kl_coeff": "beta",
    "num_samples_per_prompt": "num_generations",
    "env.rollout.n": "num_generations",
    "max_new_tokens": "max_completion_length",
    "clip_epsilon": "epsilon",
    "num_epochs": "num_train_epochs",
    "update_reference_every": "reference_update_steps",
    "normalize_advantages": "scale_rewards",
    "norm_adv_by_std_in_grpo": "scale_rewards",
}
"""Accepted on input, never written. One with dots in it is a whole path."""

OPTIONS: dict[str, str] = {
    "use_baseline": "adv_estimator",
    "use_unbiased_kl": "kl_estimator",
    "use_off_policy_masking": "reference_drift_threshold",
    "off_policy_threshold": "reference_drift_threshold",
    "upload_adapters_to_server": "inference_server_url",
}
"""Options of usmle-qa.md and inference-server-sync.md that are no field under another name -> the field that they are
about.
"""

_HINTS = """
    learning_rate: lr max_lr / use_peft: use_lora lora peft / warmup_steps: warmup / quantization: load_in_4bit
    load_in_8bit / model: model_name model_name_or_path / dataset: train_file train_dataset dataset_name / eval_dataset:
    eval_file val_dataset test_dataset / eval_fraction: test_size val_size eval_split / beta: kl kl_penalty kl_loss_coef
    / prompts_per_step: batch_size train_batch_size / num_generations: group_size n rollouts / max_completion_length:
    max_tokens max_length max_response_length / max_steps: steps num_steps total_steps / num_train_epochs: epochs /
    num_iterations: ppo_epochs / functions: reward_funcs reward_function / epsilon: clip clip_eps clip_range clip_ratio
    / lr_scheduler_type: scheduler lr_scheduler / lora_r: rank lora_rank r / eval_steps: eval_every / save_steps:
    save_every / report_to: logger wandb / output_dir: out output save_dir / overwrite: overwrite_output_dir exist_ok
    / loss_parameters.*: epsilon_high epsilon_max delta importance_sampling_level sapo_temperature_pos
    sapo_temperature_neg / history_length: context_mode / max_conversation_tokens: max_turn_prompt_tokens
    / adaptive_entropy: use_adaptive_entropy / adaptive_entropy.target: entropy_target / adaptive_entropy.delta:
    entropy_coef_delta / adaptive_entropy.min: entropy_coef_min / adaptive_entropy.max: entropy_coef_max
    / adv_parameters.*: std_correction step_score discount step_advantage_weight
    / adv_estimator: multi_objective_aggregation / reference_update_steps: reference_update / ledger: ledger_steps
    / validity_min_length: validity_mask / optimizer_parameters.*: weight_decay / optimizer_parameters.beta1: adam_beta1
    / optimizer_parameters.beta2: adam_beta2 / optimizer_parameters.epsilon: adam_epsilon / warmup_steps: warmup_ratio
    / prompt_order: shuffle prompt_weighting / llm_arguments.*: tensor_parallel_size max_model_len enforce_eager
    / llm_arguments.enable_sleep_mode: sleep_level / llm_arguments.enable_lora: merge_adapter / llm_arguments:
    vllm_arguments / engine: sampler_kind vllm_python
"""
_ENTRIES = (entry.split(":") for entry in _HINTS.split("/"))
HINTS: dict[str, str] = {name: field.strip().replace("*", name) for field, names in _ENTRIES for name in names.split()}
"""Names of other libraries, which are not read -> the field, or the entry of a table, that the error names."""

MEANS: dict[str, str] = {**SYNONYMS, **OPTIONS}
"""Every other name that is read -> the field that it is about."""

_ELSEWHERE = dict.fromkeys(
    ("backend", "mesh"), "recipes train with PyTorch; in JAX train with covey.jax.GRPOTrainer (docs/internals.md)"
)
"""Names that are looked for among the settings, and where that is."""

_OF_TRL = """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs auto_find_batch_size
    average_tokens_across_devices batch_eval_metrics bf16 bf16_full_eval cache_implementation cast_lm_head_to_fp32
    data_seed dataloader_* ddp_* debug deepspeed disable_dropout disable_tqdm do_eval do_predict do_train
    ds3_gather_for_generation enable_jit_checkpoint eval_accumulation_steps eval_delay eval_do_concat_batches
    eval_strategy eval_use_gather_object evaluation_strategy fp16 fp16_full_eval fsdp* full_determinism
    generation_batch_size generation_kwargs gradient_accumulation_steps gradient_checkpointing_kwargs greater_is_better
    group_by_length hub_* ignore_data_skip include_for_metrics include_num_input_tokens_seen label_names
    label_smoothing_factor length_column_name liger_kernel_config local_rank log_completions_hub_repo log_level
    log_level_replica log_multimodal log_on_each_node log_unique_prompts logging_dir logging_first_step
    logging_nan_inf_filter logging_strategy max_tool_calling_iterations model_init_kwargs neftune_noise_alpha no_cuda
    optim optim_args optim_target_modules overwrite_output_dir pad_to_multiple_of parallelism_config
    per_device_eval_batch_size per_device_train_batch_size prediction_loss_only project push_to_hub
    ref_model_mixup_alpha ref_model_sync_steps remove_unused_columns repetition_penalty
    restore_callback_states_from_checkpoint resume_from_checkpoint router_aux_loss_coef save_on_each_node
    save_only_model save_safetensors save_strategy shuffle_dataset skip_memory_metrics steps_per_generation
    sync_ref_model tf32 torch_compile* torch_empty_cache_steps trackio_* train_sampling_strategy
    transformers_continuous_batching_config use_bias_correction_kl use_cache use_cpu use_liger_* use_transformers_*
    use_vllm vespo_* vllm_*
"""
"""TRL's and transformers' options that are no fields here; `*`: and whatever begins so."""


def field_path(field: str) -> str:
    """`beta` -> `algorithm.beta`, and an entry of a table likewise."""
    return f"{FIELDS[field.partition('.')[0]]}.{field}"


def resolve(path: str) -> str:
    """The field or option that a written path means; the path itself of an entry, `algorithm.loss_parameters.delta`.

    Raises `ConfigError`: no such section or setting, or a setting in another one's section.
    """
    if path in SYNONYMS:
        return SYNONYMS[path]
    section, _, name = path.rpartition(".")
    if section.rpartition(".")[2] in TABLES and resolve(section):
        return path
    field = SYNONYMS.get(name, name)
    if section not in SECTIONS and section != "":
        raise ConfigError(f"{path}: there is no section {section!r}; {_nearest(name, section)}")
    if field in FIELDS:
        if section not in ("", FIELDS[field]):
            raise ConfigError(f"{path}: {name} is not in section {section}; write {field_path(field)}")
        return field
    if name in OPTIONS:
        return name
    if name in _ELSEWHERE:
        raise ConfigError(f"{path}: there is no such setting; {_ELSEWHERE[name]}")
    if any(fnmatchcase(name, option) for option in _OF_TRL.split()) and path not in SECTIONS and name not in HINTS:
        raise ConfigError(
            f"{path}: is an option of TRL; run TRL scripts with `from covey.trl import GRPOConfig, GRPOTrainer`, or "
            "find Covey's own setting with `covey config --explain`"
        )
    if path in SECTIONS:
        raise ConfigError(f"{path}: is a section; give it a table of settings, such as {path}={{...}}")
    raise ConfigError(f"{path}: there is no such setting; {_nearest(name, section)}")


def _nearest(name: str, section: str) -> str:
    if name in FIELDS:
        return f"write {field_path(name)}"
    if name in HINTS:
        return f"did you mean {field_path(HINTS[name])}?"
    sections = get_close_matches(section, SECTIONS, n=1) if section else []
    own = list(SECTIONS[sections[0]].model_fields) if sections else []
    for names in (own, [*FIELDS, *SYNONYMS, *OPTIONS]):
        for match in get_close_matches(name, names, n=1):
            field = SYNONYMS.get(match, match)
            return f"did you mean {field_path(field) if field in FIELDS else field}?"
    return "`covey config --explain` lists all settings"


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Tables opened up: `{"algorithm": {"beta": 0}}` -> `("algorithm.beta", 0)`."""
    for key, value in settings.items():
        path = f"{prefix}{key}"
        if path in SECTIONS and isinstance(value, SECTIONS[path]):
            value = {name: getattr(value, name) for name in value.model_fields_set}
        table, _, name = path.rpartition(".")
        held = name in FIELDS or name in MEANS or table.rpartition(".")[2] in TABLES
        if isinstance(value, Mapping) and (path in SECTIONS or (value and not held)):
            yield from _leaves(value, f"{path}.")
        else:
            value = value.value if isinstance(value, Enum) else value
            yield path, value.tolist() if hasattr(value, "tolist") else value  # of NumPy, torch or pandas


def _of_the_documents(options: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """`OPTIONS` with the meaning that they have in the documents: field, value, and the option as it was written."""
    for name, value in options.items():
        if name != "off_policy_threshold" and not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r}: must be true or false")
    if not options.get("use_baseline", True):
        raise ConfigError("use_baseline=False: GRPO needs the group's mean as its baseline; remove this setting")
    if "use_unbiased_kl" in options:
        # The estimator that is unbiased; the document's own formula is not, and is called exact_weighted.
        on = options["use_unbiased_kl"]
        yield "kl_estimator", "k3_unbiased" if on else "k1", f"use_unbiased_kl={on}"
    mask = {name: options[name] for name in OPTIONS if name in options and "off_policy" in name}
    if mask:  # it compares with the reference, whatever its name says
        threshold = options.get("off_policy_threshold", 0.5) if options.get("use_off_policy_masking", True) else None
        yield "reference_drift_threshold", threshold, ", ".join(f"{name}={value}" for name, value in mask.items())
    if "upload_adapters_to_server" in options:
        on = options["upload_adapters_to_server"]
        url = (known.get("inference_server_url") or "http://127.0.0.1:8000") if on else None
        yield "inference_server_url", url, f"upload_adapters_to_server={on}"


def _plain(field: str, value: Any) -> Any:
    """A value as the section takes it."""
    if field == "scale_rewards" and isinstance(value, bool):
        return "group" if value else "none"
    if field == "phases" and isinstance(value, list | tuple):
        value = [
            {SYNONYMS.get(name, name): inner for name, inner in phase.items()} if isinstance(phase, Mapping) else phase
            for phase in value
        ]
    return tuple(value) if isinstance(value, list) else value


def canonical_names(settings: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Reduce settings in any accepted form to field -> value; the values are not validated here.

    Raises `ConfigError`: unknown names, or one setting given twice with different values.
    """
    values: dict[str, Any] = {}
    written: dict[str, str] = {}  # the way in which each was written
    problems: list[str] = []
    options: dict[str, Any] = {}

    def put(field: str, value: Any, how: str) -> None:
        value = _plain(field, value)
        if field in values and values[field] != value:
            problems.append(f"{written[field]} and {how}: both set {field_path(field)}, to different values; keep one")
        values[field], written[field] = value, how

    for path, value in _leaves(settings):
        try:
            name = resolve(path)
        except ConfigError as error:
            problems.append(str(error))
            continue
        if "." in name:  # an entry, beside those that the table has
            field, entry = name.split(".")[-2:]
            table = values.get(field, (base or {}).get(field))
            values[field] = {**(dict(table) if isinstance(table, Mapping | Section) else {}), entry: value}
            written[field] = f"{path}={value!r}"
        elif name not in FIELDS:
            options[name] = value
        else:
            put(name, value, f"{path}={value!r}")
    try:
        for field, value, how in _of_the_documents(options, {**(base or {}), **values}):
            put(field, value, how)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return values
