"""From TRL's settings to Covey's, for one process. What each field becomes is listed in `covey.trl.arguments`."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any, cast

import httpx
from transformers.trainer_utils import IntervalStrategy

import covey
from covey.algorithms import LOSSES
from covey.config.data import NO_TIMEOUT
from covey.config.names import FIELDS, SECTIONS
from covey.errors import ConfigError
from covey.trl.arguments import MEANINGS, GRPOConfig, check, meanings, vllm_is_installed

NEVER = 10**9  # in steps: when to log, save and evaluate is decided by transformers' callbacks
# `generation_kwargs` that Covey's sampler has -> its settings
_OURS = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "stop_strings")}
_OURS |= {"max_new_tokens": "max_completion_length", "max_tokens": "max_completion_length", "stop": "stop_strings"}
_EIGHT_BITS = {"adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit", "paged_adamw_8bit": "paged_adamw_8bit"}


def optimizer_steps(args: GRPOConfig, num_prompts: int) -> int:
    """Optimiser steps of the run, as transformers counts them."""
    if args.max_steps > 0:
        return args.max_steps
    per_epoch = max(num_prompts // prompts_per_generation(args), 1) * args.optimizer_steps_per_generation
    return max(1, math.ceil(args.num_train_epochs * per_epoch))


def prompts_per_generation(args: GRPOConfig) -> int:
    """Different prompts in each generation."""
    return cast(int, args.generation_batch_size) // cast(int, args.num_generations)


def _reference(args: GRPOConfig) -> dict[str, Any]:
    """TRL's new reference is `alpha * policy + (1 - alpha) * reference`."""
    if not args.sync_ref_model:
        return {}
    alpha = args.ref_model_mixup_alpha
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= 1:
        raise ConfigError(f"ref_model_mixup_alpha={alpha!r}: the policy's share; give a number above 0, at most 1")
    # Rounded, since 1 - 0.9 is not the double nearest to 0.1.
    return {"reference_update_steps": args.ref_model_sync_steps, "reference_ema_decay": round(1 - alpha, 12)}


def _loss(args: GRPOConfig) -> dict[str, Any]:
    """Loss, KL and entropy; TRL gives the cap of cispo under the name of the upper clip range."""
    own: dict[str, Any] = {"entropy_by_token": True}
    if args.loss_type == "vespo":
        names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
        own |= {name: getattr(args, f"vespo_{name}") for name in names}
    if args.loss_type == "sapo":
        own |= {name: getattr(args, name) for name in ("sapo_temperature_pos", "sapo_temperature_neg")}
    if args.use_bias_correction_kl:
        own["kl_ratio"] = args.importance_sampling_level
    # The upper end is always given: Covey's own default of dapo is another one.
    upper = args.epsilon if args.epsilon_high is None else args.epsilon_high
    options: dict[str, Any] = {"epsilon_max" if args.loss_type == "cispo" else "epsilon_high": upper}
    options |= {"delta": args.delta, "importance_sampling_level": args.importance_sampling_level}
    known = LOSSES[args.loss_type].parameters if args.loss_type in LOSSES else {}
    own |= {name: value for name, value in options.items() if name in known and value is not None}
    entropy = {name: getattr(args, f"entropy_coef_{name}") for name in ("delta", "min", "max")}
    return {
        "kl_estimator": "k3",
        "loss_parameters": own,
        "adv_estimator": "gdpo" if args.multi_objective_aggregation == "normalize_then_sum" else "grpo",
        "adv_parameters": {"epsilon": 1e-4},
        "adaptive_entropy": {"target": args.entropy_target, **entropy} if args.use_adaptive_entropy else None,
    }


RATIO_FROM_THE_LEARNER: dict[str, Any] = {"importance_sampling_correction": f"token_truncate:{1 - 1e-9!r}:1"}
"""Ratios begin at the learner's own log-probabilities, and nothing is weighed: each factor is held at 1."""


def _mismatch(args: GRPOConfig) -> dict[str, Any]:
    """What vLLM's options say about a sampler that computes otherwise; only where there is one."""
    if not args.use_vllm:
        return {}
    if not args.vllm_importance_sampling_correction:
        return RATIO_FROM_THE_LEARNER
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    bounds = [0.0 if low is None else low, 1e9 if high is None else high]  # 1e9 is larger than any ratio
    mode = args.vllm_importance_sampling_mode
    return {"importance_sampling_correction": ":".join([mode, *(repr(float(bound)) for bound in bounds)])}


def _server(args: GRPOConfig) -> dict[str, Any]:
    if not (args.use_vllm and args.vllm_mode == "server"):
        return {}
    host = "127.0.0.1" if args.vllm_server_host == "0.0.0.0" else args.vllm_server_host  # an address to listen on
    url = args.vllm_server_base_url or f"http://{host}:{args.vllm_server_port}"
    try:  # `covey serve` tells the version of its weights; whatever else answers, or does not, counts as vLLM
        told = httpx.get(f"{url.rstrip('/')}/health", timeout=5).json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        told = None
    kind = "covey" if isinstance(told, dict) and "policy_version" in told else "vllm"
    found = {"inference_server_url": url, "inference_server_kind": kind}
    return found | {"server_retry_seconds": float(args.vllm_server_timeout)}


def _colocated(args: GRPOConfig) -> dict[str, Any]:
    """With vLLM in this process, where it is installed and nothing is asked for that only `generate` has."""
    if not (args.use_vllm and args.vllm_mode == "colocate" and vllm_is_installed()) or generate_options(args):
        return {}
    arguments = {
        "enable_sleep_mode": bool(args.vllm_enable_sleep_mode),
        "tensor_parallel_size": args.vllm_tensor_parallel_size,
        "max_model_len": args.vllm_max_model_length,
        "model_impl": None if args.vllm_model_impl == "vllm" else args.vllm_model_impl,
    }
    return {
        "engine": "vllm",
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "llm_arguments": {name: value for name, value in arguments.items() if value is not None},
    }


def _generation(args: GRPOConfig) -> dict[str, Any]:
    """Those `generation_kwargs` that Covey's sampler has."""
    given = as_mapping("generation_kwargs", args.generation_kwargs)
    found = {_OURS[name]: value for name, value in given.items() if name in _OURS}
    if "stop_strings" in found:
        texts = found["stop_strings"]
        found["stop_strings"] = (texts,) if isinstance(texts, str) else tuple(texts)
    return found


def generate_options(args: GRPOConfig) -> dict[str, Any]:
    """What is asked of sampling beyond that: options of transformers' `generate`, which samples then."""
    given = as_mapping("generation_kwargs", args.generation_kwargs)
    found = {name: value for name, value in given.items() if name not in _OURS}
    if found.get("do_sample") is True and len(found) == 1:
        found = {}  # as in any case
    if args.repetition_penalty != 1:
        found.setdefault("repetition_penalty", args.repetition_penalty)
    if found and _server(args):
        raise ConfigError(
            f"{', '.join(f'{name}={value!r:.100}' for name, value in found.items())}: the server does not sample so; "
            "leave it out, or set use_vllm=False"
        )
    return found


def as_mapping(name: str, value: Any) -> Mapping[str, Any]:
    """An option that is a dictionary, or JSON of one, or None."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{name}={value!r:.200}: is not JSON ({error}); give a dictionary") from error
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r:.200}: a {type(value).__name__}; give a dictionary")
    return value or {}


def settings(args: GRPOConfig, *, num_prompts: int, lora: bool, **more: Any) -> covey.GRPOConfig:
    """Covey's settings of a run; an error names what is impossible here, or a value out of range, as TRL does."""
    check(args)
    name, schedule = (str(getattr(given, "value", given)) for given in (args.optim, args.lr_scheduler_type))
    if not name.startswith("ademamix") and "adamw" not in name:
        raise ConfigError(f"optim={name!r}: Covey trains with AdamW; leave it out, or pass optimizers=(yours, None)")
    if name not in _EIGHT_BITS and ("8bit" in name or "paged" in name):
        warnings.warn(f"optim={name!r}: runs as plain AdamW, whose state takes more memory", stacklevel=3)
    per_generation, steps = args.optimizer_steps_per_generation, optimizer_steps(args, num_prompts)
    warmup, adam = args.warmup_steps, {name: getattr(args, f"adam_{name}") for name in ("beta1", "beta2", "epsilon")}
    values: dict[str, Any] = {
        **{field: getattr(args, field) for field, meaning in MEANINGS.items() if meaning.kind == "same"},
        # model
        "use_peft": lora,
        "gradient_checkpointing": bool(getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing),
        "device": "cpu" if args.use_cpu else "auto",
        # algorithm
        **_loss(args),
        "num_minibatches": per_generation // args.num_iterations,
        **_reference(args),
        **_mismatch(args),
        # sampling and data
        "min_p": args.min_p or 0.0,
        "prompts_per_step": prompts_per_generation(args),
        "max_prompt_length": args.max_prompt_length,
        "long_prompts": "error" if args.max_prompt_length is None else "truncate",
        "prompt_order": "given" if args.shuffle_dataset is False else "random",
        "chat_template_kwargs": dict(as_mapping("chat_template_kwargs", args.chat_template_kwargs)),
        "reward_weights": None if args.reward_weights is None else tuple(map(float, args.reward_weights)),
        "reward_timeout": NO_TIMEOUT if args.reward_timeout is None else args.reward_timeout,
        **_server(args),
        **_colocated(args),
        # optim and schedule
        "optimizer": _EIGHT_BITS.get(name, "adamw"),
        "max_grad_norm": args.max_grad_norm or 0.0,
        "lr_scheduler_type": schedule.removesuffix("_with_warmup"),
        "lr_scheduler_kwargs": dict(as_mapping("lr_scheduler_kwargs", args.lr_scheduler_kwargs)),
        "autocast": "bfloat16" if args.bf16 else "float16" if args.fp16 else "none",
        "warmup_steps": warmup if 0 < warmup < 1 else int(warmup),
        "optimizer_parameters": {"weight_decay": args.weight_decay, **adam},
        "max_optimizer_steps": steps,
        # evaluation, as TRL evaluates: samples at the temperature of training, as many for each prompt
        "eval_steps": NEVER,
        "eval_at_end": False,
        "eval_temperature": args.temperature,
        "num_generations_eval": args.num_generations_eval or args.num_generations,
        # run
        "save_steps": 0,
        "logging_steps": max(1, math.ceil(logging_steps(args, steps) / per_generation)),
        "progress": not args.disable_tqdm,
        "num_completions_to_print": None,  # `covey.trl.tables` prints them
        "report_to": (),  # transformers' own callbacks report
    }
    if args.disable_dropout and lora:
        values["lora_dropout"] = 0.0
    own = values["loss_parameters"] | more.get("loss_parameters", {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings without effect: they are TRL's defaults, nobody has chosen them
        try:
            return covey.GRPOConfig(**(values | _generation(args) | more | {"loss_parameters": own}))
        except ConfigError as error:
            raise ConfigError(in_trl_words(_of_teacher(args, str(error)))) from error


_TRL_WORDS = {
    "max_optimizer_steps": "max_steps",
    "reference_update_steps": "ref_model_sync_steps",
    "reference_ema_decay": "ref_model_mixup_alpha",
    "eval_temperature": "temperature",
    "num_minibatches": "steps_per_generation",
    "prompts_per_step": "generation_batch_size",
    "importance_sampling_correction": "vllm_importance_sampling_mode",
}
"""Covey's fields that a TRL user has given under another name."""


def _of_teacher(args: GRPOConfig, message: str) -> str:
    """An error of the teacher's table begins with the field that was given."""
    said = re.sub(r"^algorithm\.teacher(\.|=.*?: (?=\w+=))", "", message, flags=re.DOTALL)
    own = f".teacher.{said.partition('=')[0]}"
    fields = [] if said == message else [n for n, m in meanings(type(args)).items() if re.search(rf"{own}\b", m.text)]
    given = [f"{name}={getattr(args, name)!r}" for name in fields if getattr(args, name) is not None]
    return "".join(f"{each}: it becomes " for each in given[:1]) + said


def in_trl_words(message: str) -> str:
    """An error of Covey's settings, by the names that the user has written."""

    def named(match: re.Match[str]) -> str:
        field = match[2]
        return _TRL_WORDS.get(field, field) if match[1] in SECTIONS and FIELDS.get(field) == match[1] else match[0]

    lines = re.sub(r"\b([a-z]+)\.([a-z_0-9]+)\b", named, message.replace("algorithm.loss_parameters.", "")).splitlines()
    return "\n".join(dict.fromkeys(lines))


def logging_steps(args: GRPOConfig, steps: int) -> float:
    """Optimiser steps between two logs."""
    if args.logging_strategy != IntervalStrategy.STEPS:
        return steps
    return args.logging_steps if args.logging_steps >= 1 else max(1, math.ceil(args.logging_steps * steps))
