# ruff: noqa: RUF009, RUF012
"""`covey.trl.GRPOConfig`: TRL 1.16's names and defaults, as a `transformers.TrainingArguments`.

Being one, it is set, read, changed, printed and parsed like TRL's: `HfArgumentParser((GRPOConfig,))`, `to_dict()`,
`args.per_device_train_batch_size`, assignments before the trainer is made. Beside its default every field says what it
becomes in Covey: from this one table the translation (`covey.trl.translate`) and the documentation are made.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from importlib import util
from typing import Any, Literal, cast

import torch
from transformers import TrainingArguments
from transformers.utils.import_utils import is_torch_tf32_available

from covey.errors import ConfigError

Kind = Literal["same", "translated", "machinery", "warned", "refused"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """What becomes of a field, and how the documentation says so.

    A field is the *same* in Covey, is *translated*, is ignored without a word (*machinery*), is ignored with a warning
    when it is set (*warned*), or is *refused* with what to do instead. A value that equals TRL's default is never
    refused.
    """

    kind: Kind
    text: str


_MEANING_OF: dict[Any, Meaning] = {}  # not in a field's metadata, which is for argparse


def _option(kind: Kind, text: str, default: Any, help: str = "") -> Any:
    option = field(default=default, metadata={"help": help or f"{text[0].upper()}{text[1:]}."})
    _MEANING_OF[option] = Meaning(kind, text)
    return option


_same: Any = partial(_option, "same")
_becomes: Any = partial(_option, "translated")
_idle: Any = partial(_option, "machinery")
_warned: Any = partial(_option, "warned")
_refused: Any = partial(_option, "refused")

_IDLE = "ignored: no result depends on it"
_BATCH = "data.prompts_per_step, algorithm.num_minibatches"
_VLLM = "the vllm section, with use_vllm and vllm_mode=colocate"
_URL = "server.inference_server_url"
_AUTOCAST = "optim.autocast: weights stay float32"
_VESPO = "algorithm.loss_parameters, for vespo"
_REFERENCE = "algorithm.reference_update_steps"
_LOSS = "algorithm.loss_parameters"
_SAPO = "algorithm.loss_parameters, for sapo"
_ENTROPY = "algorithm.adaptive_entropy"
_CORRECTION = "algorithm.importance_sampling_correction, with use_vllm"
_MORE = "True: a larger metric is better; False is refused unless the metric is the loss"
_ADAMW = "optim.optimizer: AdamW, 8-bit under bitsandbytes' names; other variants run as plain AdamW"
_CHUNKS = "log-probabilities are always computed in chunks, without the logits of a whole batch"
_COMPILED = "the layers have a hand-written backward pass"
_LOADED = "arguments for loading the model, quantization_config included"
_BALANCE = "the balance loss of mixtures of experts is not computed; leave it out"
_SAMPLER = "sampling.top_k, top_p, min_p, temperature, stop_strings; any other one makes model.generate sample"
_USE_VLLM = "vllm_mode=server: the server section; colocate: sampling.engine=vllm if it is installed"
_UPPER = "algorithm.loss_parameters: epsilon_high (asymmetric clip, clip-higher), for cispo epsilon_max; unset: epsilon"
_ESTIMATOR = "algorithm.adv_estimator: grpo, or gdpo"
_KEPT = "completions stay in the run folder; upload its completions/ folder"
_VLLM_HAS = "vLLM uses the learner's device, the model's dtype and prefix caching"


@dataclass
class GRPOConfig(TrainingArguments):
    """TRL's settings of a GRPO run, with TRL's defaults.

    One default depends on the machine. If neither `bf16` nor `fp16` is given, `bf16` is true on devices that compute in
    bfloat16 and false on others, where it would be many times slower.

    Raises `ConfigError`: batch sizes do not fit each other, or another combination that TRL refuses.
    """

    _rewarded, _also_logged = True, dict[str, str]()  # others have no rewards, and groups of one
    _VALID_DICT_FIELDS = [
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "transformers_continuous_batching_config",
        "generation_kwargs",
        "chat_template_kwargs",
    ]

    # Of transformers, with other defaults.
    learning_rate: float = _same("optim", 1e-6, "Peak learning rate of AdamW.")
    logging_steps: float = _becomes("run.logging_steps; below 1: a fraction of all steps", 10, "Between two logs.")
    gradient_checkpointing: bool = _same("model", True, "Recompute activations in the backward pass.")
    bf16: bool | None = _becomes(_AUTOCAST, None, "Unset: where the device can.")  # type: ignore[assignment]
    lr_scheduler_kwargs: dict | str | None = _same("optim", None, "Options of the learning rate's schedule.")  # type: ignore[type-arg]
    remove_unused_columns: bool | None = _idle(_IDLE, False, "Columns are always kept.")  # type: ignore[assignment]

    # Model and data
    model_init_kwargs: dict[str, Any] | str | None = _becomes(_LOADED, None)
    trust_remote_code: bool = _same("model", False, "Run code that a model repository brings.")
    router_aux_loss_coef: float | None = _refused(_BALANCE, None)
    disable_dropout: bool = _becomes("model.lora_dropout: 0 (other dropout is always off)", False)
    cast_lm_head_to_fp32: bool = _becomes("log-probabilities are always computed in float32", False)
    num_generations: int | None = _same("sampling", 8, "Completions for each prompt.")
    num_generations_eval: int | None = _becomes("evaluation.num_generations_eval; unset: num_generations", None)
    max_completion_length: int | None = _same("sampling", 512, "Longest completion, in tokens.")
    ds3_gather_for_generation: bool = _idle(_IDLE, True, "Of DeepSpeed ZeRO-3.")
    shuffle_dataset: bool | None = _becomes("data.prompt_order: random or given", True, "Prompts in random order.")
    pad_to_multiple_of: int | str | None = _idle(_IDLE, "auto", "Width of padding; batches are packed here.")

    # Generation
    generation_batch_size: int | None = _becomes(_BATCH, None, "Completions sampled at a time.")
    steps_per_generation: int | None = _becomes(_BATCH, None, "Micro-batches that each generation is used for.")
    temperature: float = _same("sampling", 1.0, "Divides the logits before sampling.")
    top_p: float = _same("sampling", 1.0, "Sample from the likeliest tokens of this probability.")
    top_k: int = _same("sampling", 0, "Sample from this many likeliest tokens; 0: all.")
    min_p: float | None = _becomes("sampling.min_p; unset: 0", None, "Less than this share of the likeliest: out.")
    generation_kwargs: dict | str | None = _becomes(_SAMPLER, None)  # type: ignore[type-arg]
    chat_template_kwargs: dict | str | None = _same("data", None, "Arguments of the chat template.")  # type: ignore[type-arg]
    repetition_penalty: float = _becomes("any value but 1 makes model.generate sample", 1.0)
    cache_implementation: str | None = _idle(_IDLE, None, "Key-value cache of generate.")
    use_vllm: bool = _becomes(_USE_VLLM, False)
    vllm_mode: str = _becomes("see use_vllm", "colocate", "server or colocate.")
    vllm_model_impl: str = _becomes(_VLLM, "vllm", "vLLM's or transformers' model code.")
    vllm_enable_sleep_mode: bool = _becomes(_VLLM, False, "Free vLLM's memory during the update.")
    vllm_structured_outputs_regex: str | None = _refused("reward the wanted form with a reward function", None)
    vllm_server_base_url: str | None = _becomes(_URL, None, "The server's URL.")
    vllm_server_host: str = _becomes(_URL, "0.0.0.0", "The server's host, without a URL.")
    vllm_server_port: int = _becomes(_URL, 8000, "The server's port, without a URL.")
    vllm_server_timeout: float = _becomes("server.server_retry_seconds", 240.0, "Seconds to wait for the server.")
    vllm_group_port: int = _warned("weights go to a server as files", 51216, "Port of TRL's weight transfer.")
    vllm_gpu_memory_utilization: float = _becomes(_VLLM, 0.3, "Share of the GPU's memory for vLLM.")
    vllm_max_model_length: int | None = _becomes(_VLLM, None, "Longest prompt and completion in vLLM.")
    vllm_tensor_parallel_size: int = _becomes(_VLLM, 1, "Devices that share the model in vLLM.")

    # Training
    beta: float = _same("algorithm", 0.0, "Weight of the KL divergence from the reference.")
    num_iterations: int = _same("algorithm", 1, "Passes over each generation.")
    epsilon: float = _same("algorithm", 0.2, "Lower clip range.")
    delta: float | None = _becomes(_LOSS, None, "Upper clip of the ratio for negative advantages.")
    epsilon_high: float | None = _becomes(_UPPER, None)
    sapo_temperature_neg: float = _becomes(_SAPO, 1.05, "Gate of sapo for negative advantages.")
    sapo_temperature_pos: float = _becomes(_SAPO, 1.0, "Gate of sapo for positive advantages.")
    vespo_k_pos: float = _becomes(_VESPO, 2.0, "Parameter k of vespo for positive advantages.")
    vespo_lambda_pos: float = _becomes(_VESPO, 3.0, "Parameter lambda of vespo for positive advantages.")
    vespo_k_neg: float = _becomes(_VESPO, 3.0, "Parameter k of vespo for negative advantages.")
    vespo_lambda_neg: float = _becomes(_VESPO, 2.0, "Parameter lambda of vespo for negative advantages.")
    importance_sampling_level: str = _becomes(_LOSS, "token", "token or sequence.")
    reward_weights: list[float] | None = _same("rewards", None, "Weight of each reward function.")
    reward_timeout: float | None = field(default=None, metadata={"help": "Of Covey: seconds for a call."})
    multi_objective_aggregation: str = _becomes(_ESTIMATOR, "sum_then_normalize", "Or normalize_then_sum.")
    scale_rewards: str = _same("algorithm", "group", "group, batch or none; true and false mean group and none.")
    loss_type: str = _same("algorithm", "dapo", "dapo, grpo, dr_grpo, bnpo, cispo, sapo, luspo or vespo.")
    mask_truncated_completions: bool = _same("algorithm", False, "Leave completions that hit the limit out.")
    sync_ref_model: bool = _becomes(_REFERENCE, False, "Let the reference follow the policy.")
    ref_model_mixup_alpha: float = _becomes("algorithm.reference_ema_decay: 1 - alpha", 0.6, "The policy's share.")
    ref_model_sync_steps: int = _becomes(_REFERENCE, 512, "Optimiser steps between new references.")
    top_entropy_quantile: float = _same("algorithm", 1.0, "Share of the tokens, the most uncertain ones, to train.")
    entropy_coef: float = _same("algorithm", 0.0, "Weight of an entropy bonus.")
    use_adaptive_entropy: bool = _becomes(_ENTROPY, False, "Move entropy_coef to keep the entropy at entropy_target.")
    entropy_coef_min: float = _becomes(_ENTROPY, 0.0, "Least entropy_coef.")
    entropy_coef_max: float = _becomes(_ENTROPY, 1.0, "Largest entropy_coef.")
    entropy_coef_delta: float = _becomes(_ENTROPY, 0.005, "Step of entropy_coef.")
    entropy_target: float = _becomes(_ENTROPY, 0.2, "Wanted entropy, in nats.")
    max_tool_calling_iterations: int | None = _becomes("rounds of tool calls in a completion", None)
    vllm_importance_sampling_correction: bool = _becomes(_CORRECTION, True, "Correct for another sampler.")
    vllm_importance_sampling_mode: str = _becomes(_CORRECTION, "sequence_mask", "token or sequence, truncate or mask.")
    vllm_importance_sampling_clip_max: float | None = _becomes(_CORRECTION, 3.0, "Largest ratio of that correction.")
    vllm_importance_sampling_clip_min: float | None = _becomes(_CORRECTION, None, "Smallest ratio of that correction.")
    off_policy_mask_threshold: float | None = _same("algorithm", None, "KL in nats above which bad ones are left out.")
    use_bias_correction_kl: bool = _becomes("the KL (k3) is multiplied by the ratio of the loss", True)

    # Logging
    log_completions: bool = _becomes("a table on the screen and at trackers; the run folder always has them", False)
    log_multimodal: bool = _idle(_IDLE, True, "Log images too.")
    num_completions_to_print: int | None = _becomes("rows of the table on the screen", None, "Unset: all.")
    log_unique_prompts: bool = _becomes("one completion of each prompt in the trackers' table", False)
    log_completions_hub_repo: str | None = _warned(_KEPT, None)

    # Deprecated
    use_transformers_continuous_batching: bool = _idle(_IDLE, False, "Batch continuously; Covey always does.")
    transformers_continuous_batching_config: dict | str | None = _idle(_IDLE, None, "Its options.")  # type: ignore[type-arg]
    use_transformers_paged: bool = _idle(_IDLE, False, "Deprecated name of use_transformers_continuous_batching.")
    vllm_importance_sampling_cap: float | None = _becomes(_CORRECTION, None, "Former name of its clip_max.")

    # From here on of earlier versions of TRL and transformers: scripts in circulation still give them.
    max_prompt_length: int | None = _becomes("data.max_prompt_length, with data.long_prompts: truncate", None)
    evaluation_strategy: str | None = _becomes("eval_strategy", None, "Former name of that.")
    warmup_ratio: float | None = _becomes("warmup_steps", None, "Former name of that.")
    no_cuda: bool = _becomes("use_cpu", False, "Former name of that.")
    wandb_log_unique_prompts: bool = _becomes("log_unique_prompts", False, "Former name of that.")
    vllm_guided_decoding_regex: str | None = _becomes("vllm_structured_outputs_regex", None, "Former name of that.")
    vllm_max_model_len: int | None = _becomes("vllm_max_model_length", None, "Former name of that.")
    vllm_device: str | None = _warned(_VLLM_HAS, None, "Device of vLLM.")
    vllm_dtype: str | None = _warned(_VLLM_HAS, None, "Number type of vLLM.")
    vllm_enable_prefix_caching: bool = _warned(_VLLM_HAS, True, "Prefix cache of vLLM.")
    use_liger_loss: bool = _warned("log-probabilities are always computed in chunks", False, "Chunked loss.")
    overwrite_output_dir: bool = _becomes("an earlier run of the folder is kept beside the new one", False)
    save_safetensors: bool = _idle("weights are always saved as safetensors", True)
    logging_dir: str | None = _idle("TensorBoard's files are in output_dir", None)
    group_by_length: bool = _idle("batches are packed by tokens", False)

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
            warnings.warn("tf32=True has no effect: this machine's device has no such numbers", stacklevel=3)
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and _computes_in_bfloat16()
        with warnings.catch_warnings():
            # transformers deprecates the name that every GRPO script uses; both are read here.
            warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)
            super().__post_init__()  # type: ignore[no-untyped-call]
        if self.auto_find_batch_size:
            raise ConfigError(
                "auto_find_batch_size=True: smaller batches would cut groups; lower per_device_train_batch_size"
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
            if type(value := getattr(self, name)) not in (int, type(None)):
                raise ConfigError(f"{name}={value!r}: it counts something; give a whole number, or None")
        for name in ("bf16", "fp16", "log_completions", "use_vllm", "sync_ref_model", "use_adaptive_entropy"):
            if (value := getattr(self, name)) not in (True, False, None):
                raise ConfigError(f"{name}={value!r}: it is on or off; give True or False")
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
        if group < 1 + self._rewarded:
            raise ConfigError(f"num_generations={group}: completions of a prompt are compared; give 2 or more")
        sampled, steps = self.generation_batch_size, self.steps_per_generation
        if sampled is None and steps is None and size * self.gradient_accumulation_steps < group:
            warnings.warn(
                f"per_device_train_batch_size={size} times gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps} holds no group of num_generations={group}: raised to {group}, as "
                "in the versions of TRL that counted prompts and as Unsloth does",
                stacklevel=4,
            )
            self.per_device_train_batch_size = size = group
        if sampled is not None and steps is not None and sampled != size * steps:
            raise ConfigError(
                f"generation_batch_size={sampled}, steps_per_generation={steps}: each follows from the other; give one"
            )
        if sampled is not None and sampled % size:
            raise ConfigError(
                f"generation_batch_size={sampled}: is not a multiple of per_device_train_batch_size={size}; change one"
            )
        steps = steps if sampled is None else sampled // size
        self.steps_per_generation = steps or self.gradient_accumulation_steps
        self.generation_batch_size = size * self.steps_per_generation
        if self.generation_batch_size % group:
            raise ConfigError(
                f"generation_batch_size={self.generation_batch_size}: no whole groups of num_generations={group}; make "
                "per_device_train_batch_size, gradient_accumulation_steps or steps_per_generation a multiple"
            )
        in_evaluations = self.num_generations_eval or group
        if self.do_eval and self.eval_strategy != "no" and self.per_device_eval_batch_size % in_evaluations:
            raise ConfigError(
                f"per_device_eval_batch_size={self.per_device_eval_batch_size}: must be a multiple of the "
                f"{in_evaluations} completions for each prompt (num_generations_eval, num_generations); change one"
            )

    def taught(self) -> dict[str, Any]:
        """Covey's settings of a teacher, if there is one."""
        return {}

    @property
    def optimizer_steps_per_generation(self) -> int:
        """Optimiser steps for one generation, over all its passes.

        Raises `ConfigError`: the number is not whole.
        """
        micro = cast(int, self.steps_per_generation) * self.num_iterations
        if micro % self.gradient_accumulation_steps:
            raise ConfigError(
                f"steps_per_generation={self.steps_per_generation} times num_iterations={self.num_iterations} is no "
                f"multiple of gradient_accumulation_steps={self.gradient_accumulation_steps}, so that an optimiser "
                "step would hold parts of two generations; change one of them"
            )
        return micro // self.gradient_accumulation_steps


def _computes_in_bfloat16() -> bool:
    """Is bfloat16 arithmetic of this machine's device, not emulated?"""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return torch.xpu.is_available()


_INHERITED: tuple[tuple[Kind, str, str], ...] = (
    ("same", "optim", "max_grad_norm lr_scheduler_type"),
    ("translated", "optim.optimizer_parameters", "weight_decay adam_beta1 adam_beta2 adam_epsilon"),
    ("same", "run", "output_dir run_name seed save_total_limit report_to"),
    ("same", "evaluation", "eval_on_start load_best_model_at_end"),
    ("translated", _BATCH, "per_device_train_batch_size gradient_accumulation_steps"),
    ("translated", "schedule.max_steps, counted in generations", "max_steps num_train_epochs"),
    ("translated", "optim.warmup_steps", "warmup_steps"),
    ("translated", _AUTOCAST, "fp16"),
    ("translated", "model.device", "use_cpu"),
    ("translated", "model.gradient_checkpointing", "activation_checkpointing"),
    ("translated", "run.logging_steps", "logging_strategy"),
    ("translated", "the first step is logged", "logging_first_step"),
    ("translated", "run.save_steps", "save_strategy save_steps"),
    ("translated", "evaluation.eval_steps", "eval_strategy eval_steps"),
    ("translated", "evaluation.metric_for_best_model; loss means eval/reward", "metric_for_best_model"),
    ("translated", _MORE, "greater_is_better"),
    ("translated", "run.progress", "disable_tqdm"),
    ("translated", _ADAMW, "optim"),
    ("warned", "run.seed also orders the data", "data_seed"),
    ("translated", "only your script reads it, as in transformers: pass it to train()", "resume_from_checkpoint"),
    ("translated", "save_model and the end of train() push the adapter or the model", "push_to_hub"),
    ("translated", "the target of push_to_hub", "hub_model_id hub_token hub_private_repo hub_revision"),
    ("translated", "evaluations before that step are skipped", "eval_delay"),
    ("warned", _CHUNKS, "use_liger_kernel liger_kernel_config"),
    ("warned", _COMPILED, "torch_compile torch_compile_backend torch_compile_mode"),
    ("warned", "checkpoints always hold what a resume needs", "save_only_model"),
    ("warned", "a killed run resumes from its last checkpoint", "enable_jit_checkpoint"),
    ("warned", "a seed always fixes the whole run", "full_determinism"),
    ("warned", "prompts are shuffled, or in dataset order with shuffle_dataset=False", "train_sampling_strategy"),
    ("warned", "an incomplete last batch is filled from the next epoch", "dataloader_drop_last"),
    ("warned", "evaluation uses the dtype of training", "bf16_full_eval fp16_full_eval"),
    ("warned", "noise on embeddings would make training off-policy", "neftune_noise_alpha"),
    ("warned", "there are no labels", "label_smoothing_factor"),
    ("refused", "set adam_beta1, adam_beta2 and adam_epsilon", "optim_args"),
    ("refused", "pass peft_config with target_modules", "optim_target_modules"),
    ("refused", "lower per_device_train_batch_size", "auto_find_batch_size"),
    ("refused", "not supported; leave it out", "parallelism_config fsdp fsdp_config deepspeed"),
)

_ALL = {field.name: meaning for field, meaning in _MEANING_OF.items()}
_EARLIER = list(_ALL)[list(_ALL).index("max_prompt_length") :]
FORMER: dict[str, Meaning] = {name: _ALL.pop(name) for name in _EARLIER}
"""Options that TRL or transformers had before, which scripts in circulation still give."""
MEANINGS: dict[str, Meaning] = {name: Meaning("machinery", _IDLE) for name in TrainingArguments.__dataclass_fields__}
MEANINGS |= _ALL | {name: Meaning(kind, text) for kind, text, names in _INHERITED for name in names.split()}
"""Every field of TRL 1.16's `GRPOConfig`."""
FORMER_NAMES = {name: meaning.text for name, meaning in FORMER.items() if meaning.text in MEANINGS}
"""Options that were called otherwise -> what they are called now."""


def meanings(config: Any) -> dict[str, Meaning]:
    """What becomes of each field that can be given to a config, `GRPOConfig` or a class made of it."""
    known = MEANINGS | FORMER | {field.name: _MEANING_OF[field] for field in fields(config) if field in _MEANING_OF}
    return {field.name: known[field.name] for field in fields(config) if field.init and field.name in known}


def defaults(config: Any) -> dict[str, Any]:
    return {
        field.name: field.default
        if field.default is not MISSING
        else (field.default_factory() if field.default_factory is not MISSING else None)
        for field in fields(config)
    }


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
    return value != defaults(type(args))[name] and value not in _NOTHING.get(name, (None,))


def vllm_is_installed() -> bool:
    return util.find_spec("vllm") is not None


def warned(args: GRPOConfig) -> Iterator[str]:
    """A sentence for each field that is set and has no effect."""
    if args.use_vllm and args.vllm_mode == "colocate" and not vllm_is_installed():
        why = "vLLM is not installed here, and Covey's engine samples in this process"
        yield f"use_vllm=True with vllm_mode='colocate' has no effect: {why}"
    for name, meaning in meanings(type(args)).items():
        if meaning.kind == "warned" and was_set(args, name):
            yield f"{name}={getattr(args, name)!r:.200} has no effect: {meaning.text}"


def check(args: GRPOConfig) -> None:
    """Refuse what cannot be: one `ConfigError` with a line for every field that asks for something impossible."""
    problems = [
        f"{name}={getattr(args, name)!r:.200}: is not possible in Covey; {meaning.text}"
        for name, meaning in meanings(type(args)).items()
        if meaning.kind == "refused" and was_set(args, name)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
