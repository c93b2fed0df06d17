"""What a run will cost, told by a short probe before it is started: seconds and peak memory of a step.

The probe is the run's own code on its own first prompts: it samples, scores, updates and publishes as a step does, in
rounds of about 64 completions, and measures each part. What a whole step takes follows from that:

    sampling    a decode step costs `a + b rows`, fitted to the probe's steps; the number of steps comes from laying the
                observed lengths, repeated to the step's number of completions, on the sampler's rows
    update      seconds for each packed token, times the tokens of a step, times the share of groups that are not tied
    memory      the probe's peak, with keys, values and activations scaled to a whole step, and a heap's losses

What cannot be known is how the policy will change: completions that grow or groups that become tied change the costs.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.errors import ConfigError
from covey.observe.memory import forget_peak, peak_cuda_bytes, peak_rss_bytes, rss_bytes
from covey.pytorch.engine import Engine
from covey.rollout.collect import Rollout
from covey.rollout.packing import pack_episodes
from covey.training import setup
from covey.training.schedule import Progress, ResolvedPhase
from covey.training.update import update
from covey.types import Batch, Group

if TYPE_CHECKING:
    from covey.pytorch.engine import GenerationStats
    from covey.training.trainer import GRPOTrainer

PROBE_COMPLETIONS = 64
"""Of one round."""
_PROBE_GROUPS = 24
"""So many in all rounds, to see how many are tied; the last of at least two rounds tells the time."""
_HOLES = 0.5
"""Of the activations' memory: growth of the C library's heap in ten steps, as pieces of other sizes come and go."""
_STREAM = 2
"""Second entry of the probe's random streams: 0 is training, 1 evaluation."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a cost.

    Attributes:
        name: what it is.
        amount: seconds a step, or bytes.
        advice: a setting that about halves it with what it then would be, "" where there is none.
    """

    name: str
    amount: float
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What was found.

    Attributes:
        seconds: parts of a step.
        memory: parts of the peak; on a GPU those of its memory.
        device: whose memory it is.
        steps: of the run, None where minutes or tokens decide.
        evaluation_seconds: of one evaluation.
        num_evaluations: of the run.
        mean_length: of the probe's completions, in tokens.
        mixed_share: groups of the probe with a gradient; the others cost no update.
        probe_seconds: what finding out took.
    """

    seconds: tuple[Part, ...]
    memory: tuple[Part, ...]
    device: str
    steps: int | None
    evaluation_seconds: float
    num_evaluations: int
    mean_length: float
    mixed_share: float
    probe_seconds: float

    @property
    def step_seconds(self) -> float:
        """Seconds of a whole step."""
        return sum(part.amount for part in self.seconds)

    @property
    def peak_bytes(self) -> float:
        """Peak memory."""
        return sum(part.amount for part in self.memory)

    @property
    def run_seconds(self) -> float | None:
        """Seconds of the whole run with its evaluations."""
        if self.steps is None:
            return None
        return self.steps * self.step_seconds + self.num_evaluations * self.evaluation_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, totals included."""
        return asdict(self) | {
            "step_seconds": self.step_seconds,
            "peak_bytes": self.peak_bytes,
            "run_seconds": self.run_seconds,
        }


def _engine(trainer: GRPOTrainer) -> Engine:
    if trainer.args.model.backend == "jax":
        raise ConfigError("model.backend='jax': only the PyTorch backend is planned; plan with model.backend=pytorch")
    if not isinstance(trainer.engine, Engine):
        raise ConfigError(
            "server.upload_adapters_to_server=True: what a server needs cannot be planned from here; plan with "
            "server.upload_adapters_to_server=false"
        )
    return trainer.engine


def fit_decode(rows: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """`(a, b)` with `seconds = a + b rows` in the least squares, neither below 0."""
    if not rows:
        return 0.0, 0.0
    x, y = np.asarray(rows, np.float64), np.asarray(seconds, np.float64)
    if x.min() == x.max():
        return 0.0, float(y.sum() / x.sum())
    b, a = np.polyfit(x, y, 1)
    if a < 0:
        return 0.0, float(x @ y / (x @ x))
    return (float(a), float(b)) if b >= 0 else (float(y.mean()), 0.0)


def count_decode_steps(lengths: Sequence[int], slots: int) -> tuple[int, int]:
    """Decode steps, and rows summed over them, of completions that take free slots in their order.

    A completion's first token comes from its prompt's forward pass, so one of n tokens needs n - 1 steps.
    """
    ends = [0] * min(slots, len(lengths))
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length - 1)
    return max(ends, default=0), sum(length - 1 for length in lengths)


def make_plan(trainer: GRPOTrainer) -> Plan:
    """Probe a trainer that has not trained yet. Its policy moves by a negligible amount: throw it away afterwards."""
    began = time.perf_counter()
    loaded_peak = _peak()
    forget_peak()
    phase = trainer.phases.at(Progress(0, 0, 0.0))
    rollouts, scale = _sample(trainer, phase)
    stats, rollout = _engine(trainer).last_stats, rollouts[-1]
    groups = [group for one in rollouts for group in one.groups]
    sampled_peak = _peak()
    probe = _Update(trainer, rollout.groups, phase)
    sampling = _Sampling(trainer, rollouts, stats, scale)
    more_cache = sampling.cache_bytes - stats.cache_bytes
    activations = probe.activation_bytes * probe.largest_pack(scale) / max(probe.largest_pack(1.0), 1)
    more_activations = activations - probe.activation_bytes
    peak = max(loaded_peak, sampled_peak + more_cache, probe.peak + more_cache + more_activations)
    args, objective = trainer.args, setup.update_settings(trainer.args, phase).objective
    mixed = np.mean([np.ptp(group.rewards) > 0 for group in groups])
    share = 1.0 if objective.beta > 0 or objective.entropy_coef > 0 else float(mixed)
    half_length = max(args.sampling.max_completion_length // 2, 1)
    half_group = max(phase.num_generations // 2, 2)
    fewer = f"sampling.num_generations={half_group}" if half_group < phase.num_generations else ""
    decode, shorter = sampling.decode_seconds(), sampling.decode_seconds(half_length)
    if shorter < 0.7 * decode:
        halve_decode = f"sampling.max_completion_length={half_length}: about {shorter:.1f} s"
    else:
        halve_decode = f"{fewer}: about {sampling.decode_seconds(part=0.5):.1f} s" if fewer else ""
    update_seconds = probe.seconds * scale * share
    halve_update = f"{fewer}: about {update_seconds * half_group / phase.num_generations:.1f} s" if fewer else ""
    seconds = (
        Part("sampling: prompts", stats.prefill_seconds * scale, "data.prompts_per_step: half as many, half as long"),
        Part("sampling: tokens, one after another", decode + stats.sampling_seconds * scale, halve_decode),
        Part("rewards", rollout.scoring_seconds * scale, "a faster reward function"),
        Part("reference log-probabilities", probe.reference_seconds * scale, "algorithm.beta=0: none"),
        Part("update", update_seconds, halve_update),
        Part("new weights to the sampler", probe.publish_seconds),
    )
    weights = float(sum(p.nbytes for p in trainer.policy.model.parameters()))
    rest = peak - weights - sampling.cache_bytes - activations
    on_gpu = peak_cuda_bytes() is not None
    memory = (
        Part("model and adapter", weights, 'model.dtype="bfloat16": half'),
        Part("sampler's copy of the weights, optimiser, libraries", max(rest, 0.0)),
        Part("keys and values", sampling.cache_bytes, sampling.halve_cache()),
        Part("activations of a micro-batch", activations, probe.halve_activations(activations)),
        Part("holes in the heap, after some steps", 0.0 if on_gpu else _HOLES * activations),
    )
    evaluations = _count_evaluations(trainer)
    return Plan(
        seconds=seconds,
        memory=memory,
        device="GPU" if on_gpu else "process",
        steps=trainer.length.total_steps,
        evaluation_seconds=sampling.evaluation_seconds() if evaluations else 0.0,
        num_evaluations=evaluations,
        mean_length=float(np.mean(sampling.lengths)),
        mixed_share=float(mixed),
        probe_seconds=time.perf_counter() - began,
    )


def _sample(trainer: GRPOTrainer, phase: ResolvedPhase) -> tuple[list[Rollout], float]:
    """Rounds of groups for the probe, and how many times as many prompts a step has as a round."""
    wanted = trainer.args.data.prompts_per_step
    count = min(wanted, max(2, -(-PROBE_COMPLETIONS // phase.num_generations)))
    rollouts = []
    for number in range(max(2, -(-_PROBE_GROUPS // count))):
        places = range(number * count, (number + 1) * count)
        rollouts.append(
            trainer.collect(
                [trainer.prompts[i % len(trainer.prompts)] for i in places],
                setup.sampling_settings(trainer.args, trainer.policy, phase.temperature),
                num_generations=phase.num_generations,
                streams=[(trainer.args.run.seed, _STREAM, i) for i in places],
                policy_version=trainer.state.policy_version,
            )
        )
    return rollouts, wanted / count


class _Sampling:
    """What the probe's completions say about sampling a whole step."""

    def __init__(self, trainer: GRPOTrainer, rollouts: Sequence[Rollout], stats: GenerationStats, scale: float) -> None:
        self._trainer, self._stats = trainer, stats
        self._fit = fit_decode(stats.step_rows, stats.step_seconds)
        self.lengths = [e.num_sampled for rollout in rollouts for group in rollout.groups for e in group.episodes]
        self._probe_groups = len(rollouts[-1].groups)
        self._probe_rows = len(self.lengths) // len(rollouts)
        self._count = round(self._probe_rows * scale)
        capacity, self._token_bytes = _engine(trainer).cache_budget
        self._slot = trainer.args.sampling.max_completion_length
        # what one prompt takes of the cache
        held = stats.cache_bytes / max(self._token_bytes, 1) - stats.peak_batch * (self._slot - 1)
        self._prompts = self._probe_groups * scale
        self._prompt_tokens = max(held, stats.prefill_tokens) / self._probe_groups
        most = max(int((capacity - self._prompts * self._prompt_tokens) // self._slot), 1)
        self._slots = min(_engine(trainer).max_batch_size, most, self._count)

    @property
    def cache_bytes(self) -> float:
        """Memory of keys and values, for a whole step or for an evaluation, whichever takes more."""
        trainer = self._trainer
        needed = self._slots * self._slot + self._prompts * self._prompt_tokens
        if _count_evaluations(trainer):
            rows = len(trainer.eval_prompts) * trainer.args.evaluation.num_generations_eval
            rows = min(_engine(trainer).max_batch_size, rows)
            prompts = min(1.25 * rows, len(trainer.eval_prompts))
            needed = max(needed, rows * self._slot + prompts * self._prompt_tokens)
        return min(needed, _engine(trainer).cache_budget[0]) * self._token_bytes

    def decode_seconds(self, max_length: int | None = None, part: float = 1.0) -> float:
        """Of a whole step, or of one with shorter or with fewer completions."""
        lengths = self._repeated(round(self._count * part))
        steps, rows = count_decode_steps([min(n, max_length or n) for n in lengths], self._slots)
        return self._fit[0] * steps + self._fit[1] * rows

    def evaluation_seconds(self) -> float:
        """Of one evaluation, if its completions are as long as those of the probe."""
        evaluation, stats = self._trainer.args.evaluation, self._stats
        prompts = len(self._trainer.eval_prompts)
        lengths = self._repeated(prompts * evaluation.num_generations_eval)
        steps, rows = count_decode_steps(lengths, min(_engine(self._trainer).max_batch_size, len(lengths)))
        draw = stats.sampling_seconds * len(lengths) / self._probe_rows
        prefill = stats.prefill_seconds * prompts / self._probe_groups
        return self._fit[0] * steps + self._fit[1] * rows + draw + prefill

    def halve_cache(self) -> str:
        """Advice."""
        rows = max(self._slots // 2, 1)
        return f"sampling.max_batch_size={rows}: half" if rows < self._slots else ""

    def _repeated(self, count: int) -> list[int]:
        return [self.lengths[i % len(self.lengths)] for i in range(max(count, 1))]


class _Update:
    """Two updates on the probe's groups, every group made to have a gradient; the second is measured."""

    def __init__(self, trainer: GRPOTrainer, groups: Sequence[Group], phase: ResolvedPhase) -> None:
        self._budget = trainer.learner.tokens_per_micro_batch
        self._checkpoint = trainer.args.model.gradient_checkpointing
        batch = trainer.make_batch(groups, phase)
        self._tokens = [pack.num_tokens for pack in pack_episodes(batch.episodes, None, self._budget)]
        settings = setup.update_settings(trainer.args, phase)
        forget_peak()
        self.activation_bytes = 0.0
        for number in range(2):
            trainer.engine.release()
            before = _held()
            done = update(trainer.learner, _untied(batch), settings, learning_rate=1e-12)
            if number == 0:
                self.activation_bytes = max(float(_peak() - before), 0.0)
            began = time.perf_counter()
            trainer.engine.sync(trainer.policy.model, trainer.state.policy_version)
            self.publish_seconds = time.perf_counter() - began
        self.peak = _peak()
        self.seconds: float = done.metrics["time/update"]
        self.reference_seconds: float = done.metrics["time/reference"]

    def largest_pack(self, scale: float) -> float:
        """Tokens of the largest micro-batch when a step has `scale` times the probe's tokens."""
        largest = max(self._tokens, default=0)
        return largest if len(self._tokens) > 1 else min(largest * scale, max(self._budget, largest))

    def halve_activations(self, activations: float) -> str:
        """Advice."""
        if self._budget > 256:
            return f"optim.tokens_per_micro_batch={self._budget // 2}: about {activations / 2e9:.2f} GB"
        return "" if self._checkpoint else "model.gradient_checkpointing=true: less than half, about 30 % slower"


def _untied(batch: Batch) -> Batch:
    """The batch with advantages +1 and -1 in turn, so that every row takes part."""
    sign = np.where(np.arange(len(batch.episodes)) % 2 == 0, 1.0, -1.0)
    return replace(batch, advantages=np.where(batch.mask, sign[:, None], 0.0).astype(np.float32))


def _count_evaluations(trainer: GRPOTrainer) -> int:
    if not trainer.eval_prompts or trainer.length.total_steps is None:
        return 0
    evaluation, steps = trainer.args.evaluation, trainer.length.total_steps
    due = {steps}
    if evaluation.eval_steps > 0:
        due |= set(range(evaluation.eval_steps, steps + 1, evaluation.eval_steps))
    return len(due) + (1 if evaluation.eval_on_start else 0)


def _peak() -> int:
    return peak_cuda_bytes() or peak_rss_bytes()


def _held() -> int:
    import torch

    return int(torch.cuda.memory_allocated()) if peak_cuda_bytes() is not None else rss_bytes()
