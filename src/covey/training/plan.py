"""What a run will cost: two of its own steps, measured before it is started.

They are real steps on the run's own first prompts, by whatever samples and learns in it: sample, score, update,
publish. The first one warms up (and compiles, where something is compiled), the second one is what every later step is
taken to cost. Nothing is written, and the weights go when the trainer does.

What cannot be known is how the policy will change: completions that grow or groups that become tied change the costs.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from covey.processes import forget_peak, peak_cuda_bytes, peak_rss_bytes
from covey.rollout.agents import PlayStats
from covey.rollout.collect import Rollout
from covey.training.evaluate import no_answer_ratio, rollout_metrics
from covey.training.schedule import Elapsed
from covey.training.trainer import GRPOTrainer
from covey.types import Group


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a cost."""

    name: str
    amount: float
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What was found."""

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
    began, loaded = time.perf_counter(), _peak()
    forget_peak()
    held, sampled_peak = _peak(), 0
    state, args = trainer.state, trainer.args
    phase = trainer.phases.at(Elapsed())
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
            done = trainer.learn(trainer.make_batch(sampled.rollout.groups, phase), phase)
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
    return Plan(
        seconds=(
            Part("sampling", rollout.sampling_seconds, shorter),
            Part("rewards", rollout.scoring_seconds, "a faster reward function"),
            Part("reference log-probabilities", done.metrics["time/reference"], "algorithm.beta=0: none"),
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
        metrics=_metrics(
            trainer,
            replace(rollout, groups=tuple(groups), discarded=(), played=sum(played, PlayStats()) if played else None),
        ),
    )


def _metrics(trainer: GRPOTrainer, rollout: Rollout) -> dict[str, float]:
    found = rollout_metrics(rollout, trainer.estimator, trainer.args.algorithm.scaling["correction"])
    return found | {"completions/no_answer_ratio": no_answer_ratio(rollout, trainer.data.has_answer)}


def _count_evaluations(trainer: GRPOTrainer) -> int:
    if not trainer.eval_prompts or trainer.length.total_steps is None:
        return 0
    evaluation, steps = trainer.args.evaluation, trainer.length.total_steps
    due = {steps} if evaluation.eval_at_end else set()
    if evaluation.eval_steps > 0:
        due |= set(range(evaluation.eval_steps, steps + 1, evaluation.eval_steps))
    return len(due) + (1 if evaluation.eval_on_start else 0)


def _peak() -> int:
    return peak_cuda_bytes() or peak_rss_bytes()
