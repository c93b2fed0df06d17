"""The parts of a run in JAX: policy, engine and learner with the methods of the PyTorch ones.

Models are found and read by the PyTorch loader, whatever they are kept in, and handed over as arrays. Nothing here is
imported unless `model.backend` is `jax`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from covey.errors import ConfigError, ModelError
from covey.pytorch.loading import LoadedModel, load_model
from covey.pytorch.lora import require_rank
from covey.rollout.learning import Learner as TrainedLearner
from covey.rollout.learning import Sampler, TrainedPolicy
from covey.types import Prompt

if TYPE_CHECKING:
    from covey.config import GRPOConfig
    from covey.jax.engine import Engine
    from covey.jax.learner import Learner
    from covey.jax.policy import Policy

_ALL = "all-linear"


def check(config: GRPOConfig) -> None:
    """Refuse settings that the JAX backend does not have.

    Raises:
        ConfigError: naming the setting.
    """
    for name, wrong, fix in (
        ("model.lora_dropout", config.model.lora_dropout > 0, "set it to 0"),
        ("model.trust_remote_code", config.model.trust_remote_code, "it runs its own layers only; set it to false"),
        ("model.dtype", config.model.dtype == "float16", "use float32 or bfloat16"),
        ("schedule.max_staleness", config.schedule.max_staleness > 0, "set it to 0"),
        ("server.upload_adapters_to_server", config.server.upload_adapters_to_server, "set it to false"),
    ):
        if wrong:
            section, field = name.split(".")
            value = getattr(getattr(config, section), field)
            raise ConfigError(
                f"{name}={value!r}: the JAX backend does not have this; {fix}, or model.backend to pytorch"
            )


def make_policy(
    config: GRPOConfig, model: Any = None, tokenizer: Any = None, *, needs_reference: bool, peft_config: Any = None
) -> Policy:
    """Load the model of the config, or take a `transformers` model, and make a JAX policy of its weights.

    Raises:
        ConfigError: a setting that the JAX backend does not have.
        ModelError: no such model, or one of another architecture.
    """
    check(config)
    chosen = config.model
    if peft_config is not None:
        raise ConfigError("peft_config: the JAX backend makes its own adapters; set model.lora_r, lora_alpha, ...")
    try:
        from covey.jax.compiling import keep_programs
        from covey.jax.loading import config_from_hf, params_from_tensors
        from covey.jax.meshes import make_mesh
        from covey.jax.model import LINEAR_LAYERS, Transformer
        from covey.jax.policy import Policy
        from covey.jax.saving import load_adapter, lora_from_tensors
    except ModuleNotFoundError as error:
        raise ModelError(f"model.backend='jax': {error.name} is not installed; run pip install 'covey[jax]'") from error
    keep_programs()
    mesh = make_mesh(chosen.mesh, chosen.device)
    narrow = chosen.dtype == "bfloat16" and chosen.use_peft
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
        shape = replace(shape, lora_rank=chosen.lora_r, lora_alpha=float(chosen.lora_alpha), lora_modules=tuple(names))
    shape = replace(shape, remat=chosen.gradient_checkpointing)
    params = params_from_tensors(
        shape, _arrays(loaded), dtype=chosen.dtype if narrow else "float32", source=loaded.source
    )
    kept = (loaded.tokenizer, loaded.eos_token_ids, loaded.source)
    if model is None:
        loaded.model.to("meta")  # its memory goes now, whoever else still holds the object
    del loaded
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
        reference_update_steps=config.algorithm.reference_update_steps,
        reference_ema_decay=config.algorithm.reference_ema_decay,
        needs_reference=needs_reference,
    )


def make_engine(config: GRPOConfig, policy: TrainedPolicy) -> Engine:
    """The sampler."""
    from covey.jax.engine import Engine
    from covey.jax.policy import Policy

    assert isinstance(policy, Policy)
    chosen = config.sampling.sampler_dtype
    return Engine(
        policy.model,
        policy.tokenizer,
        dtype=None if chosen == "model" else chosen,
        kv_cache_bytes=int(config.sampling.kv_cache_gb * 2**30),
        max_batch_size=config.sampling.max_batch_size,
        context_length=policy.context_length,
        mesh=policy.mesh,
    )


def make_learner(policy: TrainedPolicy, options: Mapping[str, Any]) -> Learner:
    """The learner; its options are those of the PyTorch one."""
    from covey.jax.learner import Learner
    from covey.jax.policy import Policy

    assert isinstance(policy, Policy)
    return Learner(policy, **options)


def expect(config: GRPOConfig, engine: Sampler, learner: TrainedLearner, prompts: Iterable[Prompt]) -> None:
    """Tell engine and learner how long the run's sequences are, so that one shape of each program serves all of it.

    The openings of a world are not known: its episodes have the shapes that they need when they are played.
    """
    from covey.jax.engine import Engine
    from covey.jax.learner import Learner

    assert isinstance(engine, Engine)
    assert isinstance(learner, Learner)
    prompt = max((len(prompt.token_ids) for prompt in prompts), default=0)
    if config.environment.world is not None or prompt == 0:
        return
    completion = config.sampling.max_completion_length
    group = max([config.sampling.num_generations, *(p.num_generations or 0 for p in config.schedule.phases)])
    engine.expect(prompt)
    learner.expect(prompt + completion, config.data.prompts_per_step * (prompt + group * completion))


def _arrays(loaded: LoadedModel) -> dict[str, np.ndarray[Any, Any]]:
    def array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = tensor.detach().float().numpy()
        return found

    return {name: array(tensor) for name, tensor in loaded.model.state_dict().items()}
