"""The `optim`, `schedule` and `evaluation` sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from covey.config.section import Options, Section

ScheduleType = Literal[
    "linear",
    "cosine",
    "constant",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]


def _whole_steps(value: float) -> float:
    if value > 1 and value != int(value):
        raise ValueError("a number of steps is whole; write a whole number, or a share of all steps below 1")
    return value


def _some_steps(value: int) -> int:
    if value == 0:
        raise ValueError("a run without steps trains nothing; set schedule.max_steps to 1 or more, or to -1")
    return value


def _of_evaluation(value: Any) -> Any:
    """`eval_reward` and `reward` are written by transformers' users, and mean `eval/reward`."""
    bare = value.removeprefix("eval_").removeprefix("eval/") if isinstance(value, str) else ""
    return f"eval/{bare}" if bare else value


class OptimConfig(Section, frozen=True):
    """AdamW, its learning rate, and the size of micro-batches."""

    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    """adamw: PyTorch's fused AdamW. adamw_8bit: that of bitsandbytes (extra quantization), with 8-bit moments.
    paged_adamw_8bit: the same, whose moments move to host memory when the GPU is full. PyTorch only."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate. The default suits LoRA; for all weights (use_peft false) use about 1e-6."""
    embedding_lr: float | None = Field(default=None, gt=0)
    """Learning rate of the embedding, if it is trained; none = learning_rate."""
    optimizer_parameters: dict[Literal["weight_decay", "beta1", "beta2", "epsilon"], float] = Field(
        default_factory=dict
    )
    """Parameters of AdamW by name: weight_decay (decoupled; default 0), beta1 (0.9), beta2 (0.999), epsilon (1e-8)."""
    lr_scheduler_type: ScheduleType = "linear"
    """Learning-rate schedule after warm-up, as in transformers: to 0 (linear, cosine), constant, or another one."""
    lr_scheduler_kwargs: Options = Field(default_factory=dict)
    """Options of the schedule, such as min_lr of cosine_with_min_lr or num_decay_steps of warmup_stable_decay."""
    warmup_steps: Annotated[float, AfterValidator(_whole_steps)] = Field(default=0.0, ge=0)
    """Optimiser steps over which the learning rate rises from 0; below 1, their share of all steps."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients with a larger norm are scaled down to it; 0 = never."""
    autocast: Literal["none", "bfloat16", "float16"] = "none"
    """Mixed precision: weights and optimiser stay float32, and products of the forward pass use this type, float16 with
    adaptive loss scaling. none = everything in the type of the weights."""
    offload: bool = False
    """On a GPU: keep the optimiser's moments, and a reference that is a copy of weights, in host memory between uses.
    It takes less memory and makes each step slower. Not measured on a GPU."""
    tokens_per_micro_batch: int = Field(default=1024, ge=1)
    """Packed tokens in one forward and backward pass; a single sequence that is longer is kept whole. It changes memory
    and speed only: the gradient is that of the whole step."""

    def problems(self) -> Iterator[str]:
        if self.offload and self.optimizer != "adamw":
            yield (
                f"offload with optimizer={self.optimizer!r}: the host keeps moments of PyTorch's AdamW; set "
                "optim.optimizer to adamw, or optim.offload to false (paged_adamw_8bit moves its moments by itself)"
            )
        for name, value in self.optimizer_parameters.items():
            if value < 0 or (name.startswith("beta") and value >= 1) or (name == "epsilon" and value == 0):
                wanted = {"weight_decay": "0 or more", "epsilon": "more than 0"}.get(name, "0 or more, below 1")
                yield f"optimizer_parameters.{name}={value}: must be {wanted}"


class PhaseConfig(Section, frozen=True):
    """A stretch of a run with settings of its own. Exactly one of `steps`, `tokens`, `minutes` says how long it is."""

    name: str = ""
    """Name in logs."""
    steps: int | None = Field(default=None, ge=1)
    """Length in optimiser steps."""
    tokens: int | None = Field(default=None, ge=1)
    """Length in trained tokens."""
    minutes: float | None = Field(default=None, gt=0)
    """Length in minutes of training."""
    temperature: float | None = Field(default=None, ge=0.001, le=100)
    """Replaces sampling.temperature."""
    beta: float | None = Field(default=None, ge=0)
    """Replaces algorithm.beta."""
    num_generations: int | None = Field(default=None, ge=1)
    """Replaces sampling.num_generations."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Replaces the scheduled learning rate, as it stands."""
    min_accuracy: float | None = Field(default=None, ge=0, le=1)
    """When fewer than this share of the last 10 steps' completions are right, the learning rate is multiplied by
    learning_rate_cut, until a phase sets its own; none = never."""
    learning_rate_cut: float = Field(default=0.5, gt=0, lt=1)
    """See min_accuracy."""

    def problems(self) -> Iterator[str]:
        given = [unit for unit in ("steps", "tokens", "minutes") if getattr(self, unit) is not None]
        if len(given) != 1:
            which = " and ".join(given) or "no length"
            yield f"{which}: a phase has exactly one length; set one of steps, tokens, minutes"


class ScheduleConfig(Section, frozen=True):
    """How long a run is, and its phases. The first limit to be reached ends the run."""

    max_steps: Annotated[int, AfterValidator(_some_steps)] = Field(default=-1, ge=-1)
    """Steps: each samples completions and trains on them, with several optimiser steps if num_iterations or
    num_minibatches is above 1. -1 = as many as num_train_epochs gives. Above 0 it replaces num_train_epochs."""
    max_optimizer_steps: int | None = Field(default=None, ge=1)
    """Length in optimiser steps, in place of max_steps, when each step's completions have several (num_iterations,
    num_minibatches). Warm-up and schedule count them too. The last step's completions are trained on less often if the
    number is no multiple."""
    num_train_epochs: float = Field(default=1.0, gt=0)
    """Passes over the dataset."""
    max_minutes: float | None = Field(default=None, gt=0)
    """Time limit of the run in minutes; none = none."""
    phases: Annotated[tuple[PhaseConfig, ...], Field(strict=False)] = ()
    """Consecutive parts of the run, each with a name, one length (steps, tokens or minutes) and its own temperature,
    beta, num_generations or learning_rate."""
    max_staleness: int = Field(default=0, ge=0)
    """Optimiser steps by which the sampler's weights may be behind. 0 = sampling and training take turns. From 1 on,
    the next steps are sampled during training, and importance_sampling_correction is token_truncate unless it is
    set."""
    stale_groups: Literal["wait", "drop"] = "wait"
    """How max_staleness is kept: wait (each update waits for running samples; the same run gives the same numbers) or
    drop (sampling goes on, and groups that became older are dropped)."""

    def problems(self) -> Iterator[str]:
        if self.stale_groups == "drop" and self.max_staleness == 0:
            yield (
                "stale_groups='drop' with max_staleness=0: then nothing is sampled ahead and nothing becomes stale; "
                "set schedule.max_staleness to 1 or more, or leave schedule.stale_groups at 'wait'"
            )
        if self.max_optimizer_steps is not None and (self.max_steps > 0 or self.phases):
            yield (
                f"max_optimizer_steps={self.max_optimizer_steps} beside max_steps or phases: each says how long the "
                "run is; leave one out"
            )


class EvaluationConfig(Section, frozen=True):
    """When and on what the policy is measured. Without held-out prompts nothing is evaluated."""

    eval_steps: int = Field(default=50, ge=0)
    """Optimiser steps between evaluations; 0 = none while training."""
    eval_on_start: bool = True
    """Evaluate before the first step, to compare with later."""
    eval_at_end: bool = True
    """Evaluate after the last step too."""
    num_eval_prompts: int | None = Field(default=None, ge=1)
    """Evaluate on the first this many held-out prompts; none = all."""
    eval_temperature: float = Field(default=0.0, ge=0, le=100)
    """Sampling temperature in evaluation; 0 = greedy, else at least 0.001."""
    num_generations_eval: int = Field(default=1, ge=1)
    """Completions for each held-out prompt; above 1 only with eval_temperature above 0."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations without a better metric; none = never."""
    metric_for_best_model: Annotated[str, BeforeValidator(_of_evaluation)] = Field(
        default="eval/accuracy", min_length=1
    )
    """Evaluation metric that chooses the best checkpoint; more is better. Without eval/accuracy (nothing says which
    completions are right) the whole run uses eval/reward."""
    load_best_model_at_end: bool = False
    """Finish with the weights of the best evaluation instead of the last."""

    def problems(self) -> Iterator[str]:
        if self.num_generations_eval > 1 and self.eval_temperature == 0:
            yield (
                f"num_generations_eval={self.num_generations_eval}: greedy completions of a prompt are all the same; "
                "set evaluation.eval_temperature above 0, or evaluation.num_generations_eval to 1"
            )
        if 0 < self.eval_temperature < 0.001:
            yield f"eval_temperature={self.eval_temperature:g}: logits overflow; set it to 0 (greedy) or at least 0.001"
        patience, best = self.early_stopping_patience, self.load_best_model_at_end
        if self.eval_steps == 0 and (best or patience is not None):
            wish = "load_best_model_at_end=True" if best else f"early_stopping_patience={patience}"
            yield (
                f"{wish}: it compares evaluations made while training, and eval_steps=0 makes none; set "
                "evaluation.eval_steps to 1 or more"
            )
