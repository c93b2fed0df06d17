"""What a recipe costs and what stands in its way, before it is run: from two of its own steps, or by formula for a GPU.

The steps are real ones on the run's own first prompts, by whatever samples and learns in it: sample, score, update,
publish. The first one warms up (and compiles, where something is compiled), the second one is what every later step is
taken to cost. Nothing is written, and the weights go when the trainer does. What cannot be known is how the policy will
change: completions that grow or groups that become tied change the costs.

The formulas (`covey.pytorch.footprint`) need neither the GPU nor the model's weights. GB are 10^9 bytes. A card that is
sold with 24 GB has 25.7 of them: what is more than 24 is left for what no formula knows, the holes between tensors.
Computed, not measured on a GPU.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from covey.config.effects import uses_reference
from covey.config.whole import GRPOConfig
from covey.errors import ConfigError, ModelError
from covey.observe.doctor import Diagnosis, Thresholds, diagnose
from covey.processes import forget_peak, peak_cuda_bytes, peak_rss_bytes
from covey.pytorch.footprint import Choices, Shape, empty_model, kv_bytes, peak_bytes, phases
from covey.pytorch.models.form import is_known
from covey.pytorch.models.loading import causal_lm, trained_dtype
from covey.pytorch.models.quantised import quantisable_layers
from covey.rollout.agents import PlayStats
from covey.training.evaluate import no_answer_ratio, rollout_metrics
from covey.training.schedule import Elapsed
from covey.training.trainer import GRPOTrainer
from covey.types import Group

_LEFT_OUT = 0.05
"""Share of rows that may be left out for their length without a word."""
CONTEXT_BYTES = 0.8e9
"""What CUDA, its libraries and their kernels take of a device: an allowance, not measured."""
PROMPT_TOKENS = 512
"""Of a prompt, where no setting says how long it may be."""
_MOST = 1 << 24
"""Tokens beyond which nothing is looked for."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a cost, and what about halves it."""

    name: str
    amount: float
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What two steps took."""

    seconds: tuple[Part, ...]
    memory: tuple[Part, ...]
    device: str
    steps: int | None
    evaluation_seconds: float
    num_evaluations: int
    mean_length: float
    mixed_share: float
    probe_seconds: float
    metrics: dict[str, float]
    untrained: dict[str, float]

    @property
    def step_seconds(self) -> float:
        """What a step takes, in seconds."""
        return sum(part.amount for part in self.seconds)

    @property
    def peak_bytes(self) -> float:
        """The peak of the memory, in bytes."""
        return sum(part.amount for part in self.memory)

    @property
    def run_seconds(self) -> float | None:
        """Seconds of the whole run with its evaluations."""
        if self.steps is None:
            return None
        return self.steps * self.step_seconds + self.num_evaluations * self.evaluation_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, totals included."""
        totals = {"step_seconds": self.step_seconds, "peak_bytes": self.peak_bytes, "run_seconds": self.run_seconds}
        return asdict(self) | totals


def measure(trainer: GRPOTrainer, seen: list[Group] | None = None) -> Plan:
    """Take two steps with a trainer that has not trained yet. Throw it away afterwards: its weights have moved."""
    began, _, loaded = time.perf_counter(), trainer.learner, _peak()  # with sampler and learner
    asked = (trainer.data.held_out or trainer.data.train)[:8]  # enough to see whether anything is right
    untrained = {} if trainer.world is not None else trainer.evaluation(asked).metrics
    forget_peak()
    held, sampled_peak = _peak(), 0
    state, args, phase = trainer.state, trainer.args, trainer.phases.at(Elapsed())
    groups: list[Group] = [] if seen is None else seen
    played: list[PlayStats] = []
    try:
        for _ in range(2):
            sampled = trainer.sample_step(phase, state.data_position, state.policy_version, lambda done, total: None)
            state.data_position = sampled.position
            groups += sampled.rollout.whole.groups
            played += [sampled.rollout.played] if sampled.rollout.played else []
            sampled_peak = max(sampled_peak, _peak() if state.global_step == 0 else 0)
            trainer.engine.release()
            batch = trainer.make_batch(sampled.rollout.groups, phase)
            done = trainer.learn(batch, phase)
            state.global_step, state.policy_version = state.global_step + 1, state.policy_version + done.optimizer_steps
            before = time.perf_counter()
            trainer.publish()
            publishing = time.perf_counter() - before
    finally:
        trainer.close()
    rollout, peak = sampled.rollout, max(_peak(), sampled_peak, held)
    lengths = [episode.num_sampled for group in groups for episode in group.episodes]
    rows = sum(len(group.rewards) for group in rollout.whole.groups)
    evaluations = _count_evaluations(trainer)
    evaluated = len(trainer.eval_prompts) * args.evaluation.num_generations_eval
    length, half = max(args.sampling.max_completion_length // 2, 1), max(phase.num_generations // 2, 2)
    fewer = f"sampling.num_generations={half}" if half < phase.num_generations else ""
    shorter = f"sampling.max_completion_length={length}" if max(lengths) > length else fewer
    smaller = f"optim.tokens_per_micro_batch={max(trainer.learner.tokens_per_micro_batch // 2, 1)}"
    both = replace(rollout, groups=tuple(groups), discarded=(), played=sum(played, PlayStats()) if played else None)
    metrics = rollout_metrics(both, trainer.estimator, args.algorithm.scaling["correction"])
    return Plan(
        seconds=(
            Part("sampling", rollout.sampling_seconds, shorter),
            Part("rewards", rollout.scoring_seconds, "a faster reward function"),
            Part("reference log-probabilities", done.metrics["time/reference"], "algorithm.beta=0: none"),
            *([Part("teacher", batch.teacher.seconds)] if batch.teacher else ()),
            Part("update", done.metrics["time/update"], fewer),
            Part("new weights to the sampler", publishing),
        ),
        memory=(
            Part("model, adapter, libraries", held, 'model.dtype="bfloat16": half of the weights'),
            Part("sampling", max(sampled_peak - held, 0), "sampling.max_batch_size or sampling.kv_cache_gb: half"),
            Part("update", peak - max(sampled_peak, held), f"{smaller}, or model.gradient_checkpointing=true"),
            Part("more while the model was read", max(loaded - peak, 0)),
        ),
        device="process" if peak_cuda_bytes() is None else "GPU",
        steps=trainer.length.total_steps,
        evaluation_seconds=rollout.sampling_seconds * evaluated / rows if evaluations else 0.0,
        num_evaluations=evaluations,
        mean_length=float(np.mean(lengths)),
        mixed_share=float(np.mean([trainer.estimator.teaches(group) for group in groups])),
        probe_seconds=time.perf_counter() - began,
        metrics=metrics | {"completions/no_answer_ratio": no_answer_ratio(both, trainer.data.has_answer)},
        untrained=untrained,
    )


def _count_evaluations(trainer: GRPOTrainer) -> int:
    evaluation, steps = trainer.args.evaluation, trainer.length.total_steps
    if not trainer.eval_prompts or steps is None:
        return 0
    due = {steps} if evaluation.eval_at_end else set()
    every = evaluation.eval_steps or steps + 1
    return len(due | set(range(every, steps + 1, every))) + evaluation.eval_on_start


def _peak() -> int:
    return peak_cuda_bytes() or peak_rss_bytes()


def checkup(trainer: GRPOTrainer, plan: Plan) -> list[Diagnosis]:
    """What stands in the way of a recipe, the most basic first; the judgements on rewards are the doctor's."""
    rows = len(trainer.data.train)
    lost = rows - len(trainer.prompts)
    left_out = Diagnosis(
        "prompts_left_out",
        f"{lost} of {rows} rows are left out: their prompts are too long",
        "Raise data.max_prompt_length, lower sampling.max_completion_length, or use a model with a longer context",
    )
    limits, told = Thresholds(min_steps=2), plan.untrained
    # Samples of an untrained model at temperature 1 fail and run on where greedy answers do not; training ends that.
    some_right = told.get("eval/accuracy", told.get("eval/reward", 0.0)) > limits.failed_reward
    well = {
        "completions_truncated": told.get("eval/completions/clipped_ratio", 1.0) < limits.clipped_completions,
        "groups_all_wrong": some_right,
        "no_answer": some_right,
    }
    found = [one for one in diagnose([plan.metrics, plan.metrics], limits) if not well.get(one.code)]
    return [left_out, *found] if lost > _LEFT_OUT * rows else found


# ---------------------------------------------------------------------- a GPU, by formula


@dataclass(frozen=True, slots=True)
class Recipe:
    """A run's settings with what is known of its model."""

    config: GRPOConfig
    shape: Shape
    fused: bool
    teacher: float = 0.0  # bytes of its weights

    @classmethod
    def of(cls, config: GRPOConfig) -> Recipe:
        """Read the model's configuration, and nothing else of it.

        Raises:
            ConfigError: the formulas are not about such a run.
            ModelError: there is no such model.
        """
        chosen, kind, sampler = config.model, config.distributed.learner_kind, config.sampling.sampler_dtype
        wrong = {"model.device": "cpu", "distributed.learner_kind": "sharded", "sampling.sampler_dtype": "int8"}
        for name, value in zip(wrong, (chosen.device, kind, sampler), strict=True):
            if value == wrong[name]:
                raise ConfigError(
                    f"{name}={value!r} and --device-memory: it tells what one process with PyTorch takes of a GPU that "
                    "holds the whole model; leave --device-memory out"
                )
        model = empty_model(
            chosen.model,
            dtype=dtype_of(config),
            trust_remote_code=chosen.trust_remote_code,
            use_peft=chosen.use_peft,
            adapter=chosen.adapter,
            **({} if chosen.adapter else {"r": chosen.lora_r, "target_modules": chosen.lora_target_modules}),
        )
        base = causal_lm(model)
        if chosen.quantization != "none" and not quantisable_layers(base):
            raise ModelError(
                f"model.quantization={chosen.quantization!r}: {chosen.model} ({type(base).__name__}) has no linear "
                "layers that could be quantised; set model.quantization to none"
            )
        shape, how, teacher = Shape.of(model), config.algorithm.teacher, 0.0
        for source in () if how is None else filter(lambda source: source.is_network, how.sources.values()):
            dtype, trusts = "bfloat16" if chosen.dtype == "auto" else chosen.dtype, chosen.trust_remote_code
            other = empty_model(source.weights, dtype=dtype, use_peft=False, trust_remote_code=trusts)
            teacher += float(sum(p.nbytes for p in other.parameters()))
        return cls(config, shape, is_known(base), teacher)

    @property
    def prompt(self) -> int:
        """Tokens before an answer, or before a conversation."""
        room = self.shape.context - self.config.sampling.max_completion_length
        return self.config.data.max_prompt_length or max(1, min(PROMPT_TOKENS, room))

    def choices(self, own: int | None = None, tokens: int | None = None) -> Choices:
        """What the formulas ask of the settings, of completions of `own` tokens and passes of `tokens`."""
        config, shape, played = self.config, self.shape, self.config.environment
        chosen, optim, sampling, algorithm = config.model, config.optim, config.sampling, config.algorithm
        plain = chosen.use_peft and chosen.quantization == "none"
        fused = plain and self.fused and chosen.fused_layers and chosen.prefix_sharing
        dtype = dtype_of(config)
        sampler_dtype = dtype if sampling.sampler_dtype == "model" else sampling.sampler_dtype
        copied = not chosen.use_peft or chosen.adapter is not None or algorithm.reference_update != "none"
        objective = algorithm.objective()
        over_vocabulary = objective.vocabulary_kl is not None or objective.distils_vocabulary
        if own is None:  # of agents all that is said in a conversation, or in a turn's history
            said = 0 if played.world is None else played.max_conversation_tokens
            own = max(said, sampling.max_completion_length)
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
            vectors=1 + objective.differentiates_entropy + over_vocabulary,
            exact_sum=config.distributed.learners > 1 or config.distributed.samplers is not None,
            samples=not elsewhere and sampling.engine == "covey",
            sampler_dtype=sampler_dtype,
            cache_bytes=float(max(min(cached * token, sampling.kv_cache_gb * 2**30), token * (self.prompt + own))),
            rows=rows,
        )

    def phases(self, room: float, **changed: int) -> dict[str, dict[str, float]]:
        """Parts by activity on a device of `room` bytes, as `footprint.phases` has them; `changed` as in `choices`."""
        chosen = self.choices(**changed)
        found = phases(self.shape, chosen)
        found["held"]["CUDA and its libraries"] = CONTEXT_BYTES
        if self.teacher:
            found["held"]["teacher"] = self.teacher
        if self.config.sampling.engine == "vllm" and not self.config.distributed.samplers:
            # with less than its weights and one completion it does not start
            least = found["held"]["weights"] + chosen.longest * kv_bytes(self.shape, chosen.dtype)
            share = {"vLLM's share": max(self.config.vllm.gpu_memory_utilization * room, least)}
            if not self.config.vllm.llm_argument("enable_sleep_mode", True):
                found["held"] |= share
            else:
                found["sampling"] = share
        return found

    def peak(self, room: float, **changed: int) -> float:
        """The most bytes that are there at a time."""
        return peak_bytes(self.phases(room, **changed))

    def longest(self, room: float) -> int:
        """Tokens after the prompt that fit into `room` bytes, no more than the model was built for; 0 = none."""
        most = max(1, min(self.shape.context - self.prompt, _MOST))
        return _largest(lambda n: self.peak(room, own=n) <= room, 1, most)

    def tokens(self, room: float) -> int:
        """The largest `optim.tokens_per_micro_batch` that fits into `room` bytes; 0 = none."""
        return _largest(lambda n: self.peak(room, tokens=n) <= room, 64, _MOST)


def dtype_of(config: GRPOConfig) -> str:
    """Of weights and arithmetic, on a GPU."""
    name = trained_dtype(config.model.dtype, all_weights=not config.model.use_peft)
    return "bfloat16" if name == "auto" else name


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number that fits, 0 where the least one does not."""
    count = bisect_left(range(least, most + 1), True, key=lambda number: not fits(number))
    return least + count - 1 if count else 0
