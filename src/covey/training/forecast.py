"""The memory of a run's processes, by formula, before it takes a step.

Weights, gradients, moments and keys and values are counted, activations are about right. Each process is taken to have
what this one has, its memory or its device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from covey.config.whole import GRPOConfig
from covey.distributed.guards import PROCESS_BYTES
from covey.processes import total_memory
from covey.pytorch.footprint import Choices, Shape, activation_bytes
from covey.pytorch.models.dequantise import held_bytes, num_parameters, quantised_layers
from covey.pytorch.optimizers import moment_bytes
from covey.training.plan import Part
from covey.training.trainer import GRPOTrainer


@dataclass(frozen=True, slots=True)
class Process:
    """Memory of one kind of process, by formula."""

    name: str
    count: int
    held: tuple[Part, ...]
    sampling: tuple[Part, ...]
    learning: tuple[Part, ...]
    room: int

    @property
    def peak(self) -> float:
        """At the most: a process never does both."""
        return _total(self.held) + max(_total(self.sampling), _total(self.learning))


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is known before the first step."""

    processes: tuple[Process, ...]
    on_device: bool
    sync_bytes: int
    receivers: int
    savings: tuple[str, ...] = ()

    def warnings(self) -> Iterator[str]:
        """What does not fit, with what to change."""
        fix = (
            "use a smaller model, model.dtype=bfloat16, a smaller optim.tokens_per_micro_batch or sampling.kv_cache_gb"
        )
        for process in self.processes:
            if process.peak > process.room:
                yield (
                    f"a {process.name} needs about {process.peak / 1e9:.1f} GB of {process.room / 1e9:.1f}; {fix}, or "
                    " distributed.learner_kind=sharded"
                )
        together = sum(process.peak * process.count for process in self.processes if process.name != "server")
        count = sum(process.count for process in self.processes if process.name != "server")
        room = self.processes[0].room if self.processes else 0
        if not self.on_device and count > 1 and together > room:
            yield (
                f"all {count} processes on this machine would need about {together / 1e9:.1f} GB of its "
                f"{room / 1e9:.1f}: put them on several, or use fewer"
            )


def alone(config: GRPOConfig) -> GRPOConfig:
    """The settings for one process, which samples unit by unit where several would."""
    chosen = config.distributed
    if chosen.samplers is None and chosen.learners == 1:
        return config
    return config.replace(learners=1, learner_kind="auto", samplers=0)


def forecast(trainer: GRPOTrainer, config: GRPOConfig) -> Forecast | None:
    """Memory of each kind of process, and bytes of a sync."""
    if config.model.backend != "pytorch":
        return None
    policy: Any = trainer.policy
    chosen, urls = config.distributed, config.server.urls if config.server.upload_adapters_to_server else ()
    parameters = list(policy.model.parameters())
    trained = policy.trainable_parameters()
    on_device = policy.device.type == "cuda"
    room = torch.cuda.get_device_properties(policy.device).total_memory if on_device else total_memory()

    weights, state = held_bytes(policy.model), sum(p.nbytes for p in trained)
    moments = moment_bytes(config.optim.optimizer, trained)
    numbers, ranks = sum(p.numel() for p in trained), chosen.learners
    parts = ranks if chosen.learner_kind == "sharded" else 1
    copies = 0 if policy.reference.is_base_model else 1
    plain = num_parameters(policy.model) * next(p.element_size() for p in parameters if p.is_floating_point())
    engine = _engine(trainer, config, plain if any(quantised_layers(policy.model)) else weights)
    held = [Part("weights", weights / parts), Part("AdamW's moments", moments / parts)]
    held += [Part("reference", copies * state / parts)] * copies
    learning = [Part("gradients", state / parts), Part("activations, about", _activations(policy, config))]
    if parts == 1 and (ranks > 1 or chosen.samplers is not None):
        learning.append(Part("exact sum of gradients", 8.0 * numbers))
    samples_itself = not chosen.samplers and not urls
    found = [Process("learner", ranks, tuple(held), engine if samples_itself else (), tuple(learning), room)]
    base = (Part("weights", weights), Part("libraries", PROCESS_BYTES))
    if chosen.samplers:
        found.append(Process("sampler", chosen.samplers, base, engine, (), room))
    if urls:
        found.append(Process("server", len(urls), base, engine[1:], (), room))
    adapter = policy.weights(0).adapter
    sent = weights if adapter is None else sum(array.nbytes for array in adapter.tensors.values())
    return Forecast(
        tuple(found), on_device, sent, len(urls) or chosen.samplers or 0, tuple(_savings(policy, config, moments))
    )


def _savings(policy: Any, config: GRPOConfig, moments: int) -> Iterator[str]:
    model = policy.model
    trained = policy.trainable_parameters()
    if any(quantised_layers(model)):
        adapter = sum(p.nbytes for p in trained), sum(p.numel() for p in trained)
        held, numbers = held_bytes(model) - adapter[0], num_parameters(model) - adapter[1]
        kind = config.model.quantization if config.model.quantization != "none" else "quantised"
        yield (
            f"the frozen model takes {held / 1e6:,.1f} MB ({kind}); it would take {2 * numbers / 1e6:,.1f} MB in "
            f"bfloat16 and {4 * numbers / 1e6:,.1f} MB in float32"
        )
    if config.optim.optimizer != "adamw":
        plain = moment_bytes("adamw", trained)
        yield f"AdamW's moments take {moments / 1e6:,.1f} MB ({config.optim.optimizer}) in place of {plain / 1e6:,.1f}"


def _engine(trainer: GRPOTrainer, config: GRPOConfig, weights: int) -> tuple[Part, ...]:
    """The engine's copy of the layers, and keys and values of the rows that it runs side by side."""
    policy: Any = trainer.policy
    model = policy.model
    embeddings = {
        id(p): p.nbytes
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
        for p in module.parameters()
    }
    token = kv_bytes(model)
    sampling, unit = config.sampling, config.distributed.groups_per_unit * config.sampling.num_generations
    rows = min(sampling.max_batch_size, unit if alone(config) is not config else 10**9)
    rows = min(rows, config.data.prompts_per_step * sampling.num_generations)
    longest = max(len(prompt.token_ids) for prompt in trainer.prompts)
    tokens = rows * sampling.max_completion_length + math.ceil(rows / sampling.num_generations) * longest
    played = config.environment
    if played.world is not None:  # all that is said may be held, if episodes become as long as they may
        rows = min(rows, played.parallel_episodes)
        said = played.max_conversation_tokens
        said = said if played.context_mode == "conversation" else played.max_turn_prompt_tokens
        tokens = rows * (sampling.max_completion_length + said)
    return (
        Part("engine's copy of the layers", weights - sum(embeddings.values())),
        Part("keys and values", min(tokens * token, sampling.kv_cache_gb * 1e9)),
    )


def kv_bytes(model: Any) -> int:
    """Bytes of keys and values of a token of context; 0 where the model's config does not say."""
    told = model.config.get_text_config()
    heads = int(getattr(told, "num_attention_heads", 0))
    kept = int(getattr(told, "num_key_value_heads", None) or heads)
    width = int(getattr(told, "head_dim", None) or getattr(told, "hidden_size", 0) // max(heads, 1))
    return 2 * int(getattr(told, "num_hidden_layers", 0)) * kept * width * int(next(model.parameters()).element_size())


def _activations(policy: Any, config: GRPOConfig) -> float:
    """Of a micro-batch."""
    quantised = any(quantised_layers(policy.model))
    fused = policy.uses_peft and config.distributed.learner_kind != "sharded" and not quantised
    chosen = Choices(
        dtype=str(next(policy.model.parameters()).dtype).removeprefix("torch."),
        layers="fused" if fused else "own",
        checkpointed=config.model.gradient_checkpointing,
    )
    return activation_bytes(Shape.of(policy.model), chosen, config.optim.tokens_per_micro_batch)


def _total(parts: tuple[Part, ...]) -> float:
    return sum(part.amount for part in parts)
