"""The JAX parts of a run; see `covey.backend`.

Models are found and read by the PyTorch loader, whatever they are kept in, and handed over as arrays.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from covey.backend import adamw_options
from covey.config.effects import uses_reference
from covey.config.whole import GRPOConfig
from covey.errors import ConfigError
from covey.jax.compiling import keep_float32, keep_programs
from covey.jax.engine import Engine
from covey.jax.learner import Learner
from covey.jax.loading import config_from_hf, params_from_tensors
from covey.jax.model import LINEAR_LAYERS, Transformer
from covey.jax.policy import Policy
from covey.jax.saving import load_adapter, lora_from_tensors
from covey.jax.sharding import make_mesh, runs_on_cpu
from covey.types import Prompt

_ALL = "all-linear"


class JaxBackend:
    """Policy, engine and learner on one device or a mesh of them."""

    def check(self, config: GRPOConfig) -> None:
        """Refuse, by name, each setting that JAX does not have."""
        for name, wrong, fix in (
            ("model.lora_dropout", config.model.lora_dropout > 0, "set it to 0"),
            ("model.trust_remote_code", config.model.trust_remote_code, "it runs its own layers only; set it to false"),
            ("model.dtype", config.model.dtype == "float16", "use float32 or bfloat16"),
            ("model.quantization", config.model.quantization != "none", "set it to none"),
            ("optim.autocast", config.optim.autocast != "none", "set model.dtype"),
            ("optim.offload", config.optim.offload, "set it to false"),
            ("optim.optimizer", config.optim.optimizer != "adamw", "set it to adamw"),
            ("schedule.max_staleness", config.schedule.max_staleness > 0, "set it to 0"),
            ("server.inference_server_url", config.server.inference_server_url is not None, "remove it"),
        ):
            if wrong:
                section, field = name.split(".")
                value = getattr(getattr(config, section), field)
                raise ConfigError(
                    f"{name}={value!r}: the JAX backend does not have this; {fix}, or model.backend to pytorch"
                )

    def make_policy(
        self, config: GRPOConfig, model: Any = None, tokenizer: Any = None, peft_config: Any = None
    ) -> Policy:
        """Load the model of the config, or take a `transformers` model, and make a policy of its weights."""
        from covey.pytorch.models.loading import load_model
        from covey.pytorch.models.lora import require_rank

        chosen = config.model
        if peft_config is not None:
            raise ConfigError("peft_config: the JAX backend makes its own adapters; set model.lora_r, lora_alpha, ...")
        keep_programs()
        mesh = make_mesh(chosen.mesh, chosen.device)
        on_cpu, trains_adapter = runs_on_cpu(mesh), chosen.use_peft or chosen.adapter is not None
        narrow = chosen.dtype == "bfloat16" or (chosen.dtype == "auto" and trains_adapter and not on_cpu)
        if not narrow and not on_cpu:
            keep_float32()
        loaded = load_model(
            chosen.model if model is None else model, tokenizer, dtype="bfloat16" if narrow else "float32", device="cpu"
        )
        built: Any = loaded.model
        hf_config = built.config.to_dict()
        shape = config_from_hf(hf_config, loaded.source)
        modules = chosen.lora_target_modules
        adapter: Any = None
        if chosen.adapter is not None:
            rank, alpha, names, adapter = load_adapter(chosen.adapter)
            shape = replace(shape, lora_rank=rank, lora_alpha=alpha, lora_modules=tuple(names))
        elif chosen.use_peft:
            require_rank(built, chosen.lora_r)
            names = LINEAR_LAYERS if modules == _ALL else (modules,) if isinstance(modules, str) else modules
            shape = replace(
                shape, lora_rank=chosen.lora_r, lora_alpha=float(chosen.lora_alpha), lora_modules=tuple(names)
            )
        shape = replace(shape, remat=chosen.gradient_checkpointing)
        tensors: dict[str, np.ndarray[Any, Any]] = {
            name: tensor.detach().float().numpy() for name, tensor in built.state_dict().items()
        }
        params = params_from_tensors(shape, tensors, dtype="bfloat16" if narrow else "float32", source=loaded.source)
        kept = (loaded.tokenizer, loaded.eos_token_ids, loaded.source)
        if model is None:
            built.to("meta")  # its memory goes now, whoever else still holds the object
        del loaded, built, tensors
        gc.collect()
        return Policy(
            Transformer(shape),
            params,
            tokenizer=kept[0],
            eos_token_ids=kept[1],
            source=kept[2],
            hf_config=hf_config,
            lora=None if adapter is None else lora_from_tensors(shape, adapter, str(chosen.adapter)),
            seed=config.run.seed,
            mesh=mesh,
            reference_update=config.algorithm.reference_update,
            reference_update_steps=config.algorithm.reference_update_steps or 1,
            reference_ema_decay=config.algorithm.reference_ema_decay,
            needs_reference=uses_reference(config),
        )

    def make_sampler(self, config: GRPOConfig, policy: Any) -> Engine:
        """An engine with a copy of the policy's weights, of the size that the `sampling` section says."""
        chosen = config.sampling
        return Engine(
            policy.model,
            policy.tokenizer,
            dtype=None if chosen.sampler_dtype == "model" else chosen.sampler_dtype,
            kv_cache_bytes=int(chosen.kv_cache_gb * 2**30),
            max_batch_size=chosen.max_batch_size,
            context_length=policy.context_length,
            mesh=policy.mesh,
        )

    def make_learner(self, config: GRPOConfig, policy: Any) -> Learner:
        """A learner of the policy, with the AdamW of the `optim` section."""
        return Learner(policy, **adamw_options(config))

    def expect(self, config: GRPOConfig, sampler: Any, learner: Any, prompts: Sequence[Prompt]) -> None:
        """How long the run's sequences are, so that one shape of each program serves all of it.

        The openings of a world are not known: its episodes have the shapes that they need when they are played.
        """
        prompt = max((len(prompt.token_ids) for prompt in prompts), default=0)
        if config.environment.world is not None or prompt == 0:
            return
        completion = config.sampling.max_completion_length
        group = config.largest_group
        sampler.expect(prompt)
        learner.expect(prompt + completion, config.data.prompts_per_step * (prompt + group * completion))


BACKEND = JaxBackend()
