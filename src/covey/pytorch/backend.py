"""The PyTorch parts of a run; see `covey.backend`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from covey.backend import adamw_options, adapter_options
from covey.config.effects import logprobs_mode, uses_reference
from covey.config.whole import GRPOConfig
from covey.errors import ConfigError
from covey.functions import later
from covey.pytorch import optimizers
from covey.pytorch.models import quantised
from covey.pytorch.models.loading import chosen_device
from covey.pytorch.models.quantised import quantised_layers
from covey.pytorch.policy import Policy
from covey.types import Prompt

if TYPE_CHECKING:
    from covey.pytorch import engine, gradient_sum, learner
    from covey.pytorch.engine import vllm_engine
else:
    engine, vllm_engine, gradient_sum, learner = later(
        "covey.pytorch", "engine engine.vllm_engine gradient_sum learner"
    )


class PyTorchBackend:
    """Policy, engine and learner on one device, with which others may share the packs of a step."""

    def __init__(self, share: gradient_sum.Share | None = None) -> None:
        """The learner's `share`; all packs are its own, unless others have a part."""
        self._share = share

    def check(self, config: GRPOConfig) -> None:
        """Refuse what needs a package that is not installed."""
        optimizers.require_package(config.optim.optimizer)
        quantised.require_package(config.model.quantization)

    def make_policy(
        self, config: GRPOConfig, model: Any = None, tokenizer: Any = None, peft_config: Any = None
    ) -> Policy:
        """Load the policy, or wrap the model; what is drawn at random is drawn from `run.seed`."""
        chosen, algorithm, teacher = config.model, config.algorithm, config.algorithm.teacher
        torch.manual_seed(config.run.seed)
        named = ("device", "trust_remote_code", "quantization", "gradient_checkpointing", "prefix_sharing")
        dtype, autocast = chosen.dtype, config.optim.autocast
        if model is None and _multiplies_frozen(config):
            dtype, autocast = "bfloat16", "none"
        sources = () if teacher is None else teacher.sources.values()
        average: dict[str, Any] = {"update": "ema"}
        if teacher is not None:
            average |= {"every": teacher.update_steps, "ema_decay": teacher.ema_decay}
        policy = Policy.load(
            chosen.model if model is None else model,
            tokenizer=tokenizer,
            dtype=dtype,
            autocast=autocast,
            fused_layers=chosen.fused_layers,
            **{name: getattr(chosen, name) for name in named},
            lora_config=peft_config,
            **adapter_options(config),
            reference={
                "update": algorithm.reference_update,
                "every": algorithm.reference_update_steps or 1,
                "ema_decay": algorithm.reference_ema_decay,
                "needed": uses_reference(config),
            },
            teachers={each.weights: average if each.weights == "ema" else {} for each in sources if each.is_own},
            offload=config.optim.offload,
            narrows=config.distributed.learner_kind != "sharded",  # whose slices have one type
        )
        if policy.album is not None:
            policy.album.options = dict(config.data.processor_kwargs)
        for source in filter(lambda source: source.is_network, sources):
            from covey.pytorch.teacher import load_network

            policy.teachers[source.weights] = load_network(source.weights, policy, dtype, chosen.trust_remote_code)
        return policy

    def make_sampler(self, config: GRPOConfig, policy: Any, **how: Any) -> engine.Engine | vllm_engine.VLLMEngine:
        """The engine that samples in this process, Covey's or vLLM; `how` goes to Covey's."""
        chosen, cache = config.sampling, int(config.sampling.kv_cache_gb * 2**30)
        if chosen.engine == "vllm":
            autocast = config.optim.autocast
            held = next(p.dtype for p in policy.model.parameters() if p.is_floating_point())
            options = config.vllm
            if any(quantised_layers(policy.model)):  # vLLM's own base is not: it is given what the weights stand for
                options = options.model_copy(update={"llm_arguments": {**options.llm_arguments, "enable_lora": False}})
                if config.model.quantization == "none":
                    raise ConfigError(
                        "sampling.engine='vllm' with a model that was passed quantised: vLLM would read its "
                        "weights as quantised ones too; pass the model's name, with model.quantization"
                    )
            return vllm_engine.VLLMEngine(
                policy.model,
                policy.tokenizer,
                folder=policy.folder,
                dtype=held if autocast == "none" else getattr(torch, autocast),
                options=options,
                kv_cache_bytes=cache,
                logprobs_mode=logprobs_mode(config),
                seed=config.run.seed,
                trust_remote_code=config.model.trust_remote_code,
            )
        return engine.Engine(
            cast(Policy, policy).model,
            policy.tokenizer,
            dtype=None
            if chosen.sampler_dtype in ("model", config.model.dtype)
            else getattr(torch, chosen.sampler_dtype),
            kv_cache_bytes=cache,
            max_batch_size=chosen.max_batch_size,
            **how,
        )

    def make_learner(self, config: GRPOConfig, policy: Any) -> learner.Learner:
        """The learner; it runs packs side by side unless something samples beside it in this process."""
        learners = config.distributed.learners
        if learners > 1 and self._share is None:
            raise ConfigError(
                f"distributed.learners={learners}: this is one process; train with the command covey train, which "
                f"starts the others, or with torchrun --nproc-per-node {learners} -m covey train RECIPE"
            )
        share = self._share or (None if config.distributed.samplers is None else gradient_sum.AloneInFixedPoint())
        beside = config.schedule.max_staleness == 0 or config.server.upload_adapters_to_server
        half = config.optim.autocast == "float16" or any(p.dtype == torch.float16 for p in policy.model.parameters())
        return learner.Learner(
            policy,
            side_by_side=beside,
            optimizer=config.optim.optimizer,
            loss_scale=optimizers.LossScale() if half else None,
            share=share,
            **adamw_options(config),
        )

    def expect(self, config: GRPOConfig, sampler: Any, learner: Any, prompts: Sequence[Prompt]) -> None:
        """Nothing is compiled for shapes."""


BACKEND = PyTorchBackend()


def _multiplies_frozen(config: GRPOConfig) -> bool:
    """Whether autocast, on a CPU, rounds frozen matrices alone and what they multiply: they can be held in bfloat16."""
    chosen = config.model
    wide, plain = chosen.dtype in ("auto", "float32"), chosen.quantization == "none"
    narrows = chosen.use_peft and wide and plain and config.optim.autocast == "bfloat16"
    return narrows and chosen_device(chosen.device).type == "cpu"
