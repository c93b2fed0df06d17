"""What of a recipe fits into a GPU's memory, without the GPU and without the model's weights.

`covey.pytorch.footprint` has the formulas; here they are asked for a run's settings, as they are and changed: the
longest completions and the largest passes that fit, and which settings make room. GB are 10^9 bytes. A card that is
sold with 24 GB has 25.7 of them: what is more than 24 is left for what no formula knows, the holes between tensors.
Computed, not measured on a GPU.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from covey.config.effects import uses_reference
from covey.config.whole import GRPOConfig
from covey.errors import ConfigError, ModelError
from covey.pytorch.footprint import Choices, Shape, kv_bytes, peak_bytes, phases
from covey.pytorch.models.empty import empty_model
from covey.pytorch.models.form import is_known
from covey.pytorch.models.loading import causal_lm, trained_dtype
from covey.pytorch.models.quantised import quantisable_layers

CONTEXT_BYTES = 0.8e9
"""What CUDA, its libraries and their kernels take of a device: an allowance, not measured."""
PROMPT_TOKENS = 512
"""Of a prompt, where no setting says how long it may be."""
_ADAPTER = "model.use_peft=true"
_SHARE = 0.3
"""Of the device, for vLLM, unless the settings say otherwise."""
_MOST = 1 << 24
"""Tokens beyond which nothing is looked for."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A run's settings with what is known of its model."""

    config: GRPOConfig
    shape: Shape
    fused: bool
    quantisable: bool = True

    @classmethod
    def of(cls, config: GRPOConfig) -> Recipe:
        """Read the model's configuration, and nothing else of it.

        Raises:
            ConfigError: the formulas are not about such a run.
            ModelError: there is no such model.
        """
        for name, value, wrong in (
            ("model.backend", config.model.backend, config.model.backend != "pytorch"),
            ("model.device", config.model.device, config.model.device == "cpu"),
            ("distributed.learner_kind", config.distributed.learner_kind, config.distributed.learner_kind == "sharded"),
        ):
            if wrong:
                raise ConfigError(
                    f"{name}={value!r} and --device-memory: it tells what one process with PyTorch takes of a GPU that "
                    "holds the whole model; leave --device-memory out"
                )
        chosen = config.model
        model = empty_model(
            chosen.model,
            dtype=dtype_of(config),
            trust_remote_code=chosen.trust_remote_code,
            use_peft=chosen.use_peft,
            adapter=chosen.adapter,
            **({} if chosen.adapter else {"r": chosen.lora_r, "target_modules": chosen.lora_target_modules}),
        )
        base = causal_lm(model)
        quantisable = bool(quantisable_layers(base))
        if chosen.quantization != "none" and not quantisable:
            raise ModelError(
                f"model.quantization={chosen.quantization!r}: {chosen.model} ({type(base).__name__}) has no linear "
                "layers that could be quantised; set model.quantization to none"
            )
        return cls(config, Shape.of(model), is_known(base), quantisable)

    @property
    def prompt(self) -> int:
        """Tokens before an answer, or before a conversation."""
        return self.config.data.max_prompt_length or PROMPT_TOKENS

    @property
    def said(self) -> int:
        """Tokens of a conversation or of a turn's history."""
        played = self.config.environment
        if played.world is None:
            return 0
        conversation = played.context_mode == "conversation"
        return played.max_conversation_tokens if conversation else played.max_turn_prompt_tokens

    def choices(self, own: int | None = None, tokens: int | None = None) -> Choices:
        """What the formulas ask of the settings."""
        config, shape = self.config, self.shape
        chosen, optim, sampling, algorithm = config.model, config.optim, config.sampling, config.algorithm
        plain = chosen.use_peft and chosen.quantization == "none"
        fused = plain and self.fused and chosen.fused_layers and chosen.prefix_sharing
        dtype = dtype_of(config)
        sampler_dtype = dtype if sampling.sampler_dtype == "model" else sampling.sampler_dtype
        copied = not chosen.use_peft or chosen.adapter is not None or algorithm.reference_update != "none"
        exact = algorithm.kl_estimator.startswith("exact") and algorithm.beta > 0
        own = max(self.said, sampling.max_completion_length) if own is None else own
        rows = min(sampling.max_batch_size, config.data.prompts_per_step * config.largest_group)
        cached = rows * own + math.ceil(rows / sampling.num_generations) * self.prompt
        token = kv_bytes(shape, sampler_dtype)
        elsewhere = bool(config.distributed.samplers) or config.server.upload_adapters_to_server
        return Choices(
            dtype=dtype,
            weights=dtype if chosen.quantization == "none" else chosen.quantization,
            layers="fused" if fused and optim.autocast == "none" and chosen.lora_dropout == 0 else "own",
            checkpointed=chosen.gradient_checkpointing,
            autocast="" if optim.autocast == "none" else optim.autocast,
            moments=optim.optimizer,
            offload=optim.offload,
            reference_copy=copied and uses_reference(config),
            tokens=optim.tokens_per_micro_batch if tokens is None else tokens,
            longest=self.prompt + own,
            vectors=1 + algorithm.objective().differentiates_entropy + exact,
            exact_kl=exact,
            exact_sum=config.distributed.learners > 1 or config.distributed.samplers is not None,
            samples=not elsewhere and sampling.engine == "covey",
            sampler_dtype=sampler_dtype,
            cache_bytes=float(max(min(cached * token, sampling.kv_cache_gb * 2**30), token * (self.prompt + own))),
            rows=rows,
        )

    def phases(self, room: float, **changed: int) -> dict[str, dict[str, float]]:
        """Parts by what is going on, on a device of `room` bytes, see `covey.pytorch.footprint.phases`; `changed` as
        `choices` takes it.
        """
        found = phases(self.shape, self.choices(**changed))
        found["held"]["CUDA and its libraries"] = CONTEXT_BYTES
        if self.config.sampling.engine == "vllm" and not self.config.distributed.samplers:
            chosen = self.choices(**changed)
            least = found["held"]["weights"] + chosen.longest * kv_bytes(
                self.shape, chosen.dtype
            )  # or it does not start
            share = {"vLLM's share": max(self.config.vllm.gpu_memory_utilization * room, least)}
            if self.config.vllm.sleep_level == 0:
                found["held"] |= share
            else:
                found["sampling"] = share
        return found


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a recipe fits into a device, and what would."""

    room: float
    peak: float
    when: str
    longest: int
    tokens: int
    changes: tuple[tuple[str, float], ...] = ()

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.peak <= self.room


def fit(recipe: Recipe, room: float) -> Fit:
    """Ask for one device of `room` bytes."""
    found = recipe.phases(room)
    sums = {name: sum(parts.values()) for name, parts in found.items() if name != "held"}
    peak = peak_bytes(found)
    return Fit(
        room,
        peak,
        max(sums, key=lambda name: sums[name]),
        longest(recipe, room),
        _largest(lambda n: peak_bytes(recipe.phases(room, tokens=n)) <= room, 64, _MOST),
        () if peak <= room else tuple(_changes(recipe, room)),
    )


def longest(recipe: Recipe, room: float) -> int:
    """Tokens after the prompt that fit into `room` bytes, no more than the model was built for; 0 = none."""
    most = max(1, min(recipe.shape.context - recipe.prompt, _MOST))
    return _largest(lambda n: peak_bytes(recipe.phases(room, own=n)) <= room, 1, most)


def dtype_of(config: GRPOConfig) -> str:
    """Of weights and arithmetic, on a GPU."""
    name = trained_dtype(config.model.dtype, all_weights=not config.model.use_peft)
    return "bfloat16" if name == "auto" else name


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number that fits, 0 where the least one does not."""
    if not fits(least):
        return 0
    if fits(most):
        return most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def _changes(recipe: Recipe, room: float) -> Iterator[tuple[str, float]]:
    """Each setting that makes it fit; where none does alone, as many as it takes. To train an adapter in place of all
    weights is another run: it comes last.
    """
    ways = list(_ways(recipe))
    found = list(_enough(recipe, ways, room))
    yield from found
    if not recipe.config.model.use_peft:
        peak = _peak_with(recipe, [_ADAPTER], room)
        if peak <= room:
            yield _ADAPTER, peak
        elif not found:
            yield from _enough(recipe, [*ways, _ADAPTER], room)


def _enough(recipe: Recipe, ways: list[str], room: float) -> Iterator[tuple[str, float]]:
    alone = [(text, _peak_with(recipe, [text], room)) for text in ways]
    if any(peak <= room for _, peak in alone):
        yield from ((text, peak) for text, peak in alone if peak <= room)
        return
    # one more each time: where a sampler is elsewhere, gradients are added exactly, which takes memory too
    sizes = range(2, len(ways) + 1)
    ways = next((ways[:n] for n in sizes if _peak_with(recipe, ways[:n], room) <= room), [])
    if not ways:
        return
    for text in list(reversed(ways)):  # what costs most is left out first
        fewer = [other for other in ways if other != text]
        if _peak_with(recipe, fewer, room) <= room:
            ways = fewer
    yield " ".join(ways), _peak_with(recipe, ways, room)


def _ways(recipe: Recipe) -> Iterator[str]:
    """Settings that take less memory than these, those that cost least time first."""
    config, chosen = recipe.config, recipe.choices()
    one = kv_bytes(recipe.shape, chosen.sampler_dtype) * chosen.longest / 2**30  # less would not hold a completion
    least = math.ceil(100 * max(one, 0.25)) / 100
    if chosen.samples and least < config.sampling.kv_cache_gb:
        yield f"sampling.kv_cache_gb={least:.2f}"
    if config.optim.tokens_per_micro_batch > max(chosen.longest, 256):
        yield f"optim.tokens_per_micro_batch={max(chosen.longest, 256)}"
    if config.model.use_peft and config.model.dtype == "float32":
        yield "model.dtype=bfloat16"
    if not config.model.gradient_checkpointing:
        yield "model.gradient_checkpointing=true"
    if not config.optim.offload and config.optim.optimizer == "adamw":
        yield "optim.offload=true"
    if config.model.use_peft and config.model.quantization == "none" and recipe.quantisable:
        yield "model.quantization=nf4"
    if chosen.samples:
        yield "distributed.samplers=1"
    if config.sampling.engine == "vllm" and config.vllm.gpu_memory_utilization > _SHARE:
        yield f"vllm.gpu_memory_utilization={_SHARE}"


def _peak_with(recipe: Recipe, overrides: list[str], room: float) -> float:
    """The peak with other settings; infinite where they do not go together with the rest."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = recipe.config.with_overrides(overrides)
    except ConfigError:
        return math.inf
    same = (config.model.use_peft, dtype_of(config)) == (recipe.config.model.use_peft, dtype_of(recipe.config))
    changed = replace(recipe, config=config) if same else Recipe.of(config)
    return peak_bytes(changed.phases(room))
