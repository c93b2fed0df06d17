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
        raise ValueError("must be a whole number of steps, or below 1 for a share of all steps")
    return value


def _some_steps(value: int) -> int:
    if value == 0:
        raise ValueError("a run of 0 steps trains nothing; set schedule.max_steps to 1 or more, or to -1")
    return value


def _of_evaluation(value: Any) -> Any:
    """`eval_reward` and `reward`, as transformers writes them, mean `eval/reward`."""
    bare = value.removeprefix("eval_").removeprefix("eval/") if isinstance(value, str) else ""
    return f"eval/{bare}" if bare else value


class OptimConfig(Section, frozen=True):
    """AdamW, its learning rate, and the size of micro-batches."""

    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    """adamw: PyTorch's fused AdamW. adamw_8bit: AdamW of bitsandbytes (extra quantization), with 8-bit moments.
    paged_adamw_8bit: the same; its moments move to host memory when the GPU is full."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate. The default suits LoRA. To train all weights (use_peft = false), use about 1e-6."""
    embedding_lr: float | None = Field(default=None, gt=0)
    """Learning rate of a trained embedding; none = learning_rate."""
    optimizer_parameters: dict[Literal["weight_decay", "beta1", "beta2", "epsilon"], float] = Field(
        default_factory=dict
    )
    """Parameters of AdamW by name: weight_decay (decoupled; default 0), beta1 (0.9), beta2 (0.999), epsilon (1e-8)."""
    lr_scheduler_type: ScheduleType = "linear"
    """Learning-rate schedule after warm-up, as in transformers. linear and cosine fall to 0."""
    lr_scheduler_kwargs: Options = Field(default_factory=dict)
    """Options of the schedule, such as min_lr for cosine_with_min_lr or num_decay_steps for warmup_stable_decay."""
    warmup_steps: Annotated[float, AfterValidator(_whole_steps)] = Field(default=0.0, ge=0)
    """Steps over which the learning rate rises from 0; below 1 = a share of all steps. With max_optimizer_steps these
    are optimiser steps."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Scale gradients with a larger norm down to this norm; 0 = never."""
    autocast: Literal["none", "bfloat16", "float16"] = "none"
    """Mixed precision: matrix products use this type, weights and optimiser stay float32. float16 has adaptive loss
    scaling. none = compute in the type of the weights."""
    offload: bool = False
    """Keep the optimiser's moments, and the weights of a copied reference, in host memory between uses. This takes less
    GPU memory and makes each step slower. Not measured on a GPU."""
    tokens_per_micro_batch: int = Field(default=1024, ge=1)
    """Most tokens in one forward and backward pass, with shared prefixes counted once. It changes memory and speed, not
    the gradient. A longer sequence has a pass of its own."""

    def problems(self) -> Iterator[str]:
        if self.offload and self.optimizer != "adamw":
            yield (
                f"offload with optimizer={self.optimizer!r}: only PyTorch's AdamW can be offloaded; set "
                "optim.optimizer to adamw, or optim.offload to false (paged_adamw_8bit moves its moments by itself)"
            )
        for name, value in self.optimizer_parameters.items():
            if value < 0 or (name.startswith("beta") and value >= 1) or (name == "epsilon" and value == 0):
                wanted = {"weight_decay": "0 or more", "epsilon": "more than 0"}.get(name, "0 or more, below 1")
                yield f"optimizer_parameters.{name}={value}: must be {wanted}"


class PhaseConfig(Section, frozen=True):
    """A part of a run with settings of its own. Its length is exactly one of `steps`, `tokens` and `minutes`."""

    name: str = ""
    """Name in logs."""
    steps: int | None = Field(default=None, ge=1)
    """Length in steps, as max_steps counts them."""
    tokens: int | None = Field(default=None, ge=1)
    """Length in tokens of all prompts and completions (the metric num_tokens)."""
    minutes: float | None = Field(default=None, gt=0)
    """Length in minutes of steps, without evaluations and checkpoints."""
    temperature: float | None = Field(default=None, ge=0.001, le=100)
    """Replaces sampling.temperature."""
    beta: float | None = Field(default=None, ge=0)
    """Replaces algorithm.beta."""
    num_generations: int | None = Field(default=None, ge=1)
    """Replaces sampling.num_generations."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Replaces the scheduled learning rate by this constant."""
    min_accuracy: float | None = Field(default=None, ge=0, le=1)
    """Multiply the learning rate by learning_rate_cut when the mean accuracy of 10 steps is below this. It holds until
    a phase sets learning_rate. none = never."""
    learning_rate_cut: float = Field(default=0.5, gt=0, lt=1)
    """Factor of min_accuracy."""

    def problems(self) -> Iterator[str]:
        given = [unit for unit in ("steps", "tokens", "minutes") if getattr(self, unit) is not None]
        if len(given) != 1:
            which = " and ".join(given) or "no length"
            yield f"{which}: a phase needs exactly one length; set one of steps, tokens, minutes"


class ScheduleConfig(Section, frozen=True):
    """The length of a run, and its phases. The first limit that is reached ends the run."""

    max_steps: Annotated[int, AfterValidator(_some_steps)] = Field(default=-1, ge=-1)
    """Length in steps. A step samples prompts_per_step groups and trains on them, which takes num_iterations x
    num_minibatches optimiser steps (default 1). -1 = as many steps as num_train_epochs gives."""
    max_optimizer_steps: int | None = Field(default=None, ge=1)
    """Length in optimiser steps, in place of max_steps. Warm-up and learning-rate schedule then count optimiser steps
    too, and the last step may have fewer of them."""
    num_train_epochs: float = Field(default=1.0, gt=0)
    """Passes over the dataset, when max_steps is -1."""
    max_minutes: float | None = Field(default=None, gt=0)
    """Time limit in minutes of steps, without evaluations and checkpoints; none = no limit."""
    phases: Annotated[tuple[PhaseConfig, ...], Field(strict=False)] = ()
    """Consecutive parts of the run. Each has one length (steps, tokens or minutes) and may set temperature, beta,
    num_generations, learning_rate or min_accuracy."""
    max_staleness: int = Field(default=0, ge=0)
    """How many optimiser steps old the sampler's weights may be. 0 = sampling and training take turns. 1 or more = the
    next steps are sampled during training; importance_sampling_correction = auto is then token_truncate."""
    stale_groups: Literal["wait", "drop"] = "wait"
    """What to do about samples older than max_staleness. wait: each update waits for running samples, and results are
    reproducible. drop: sampling goes on, and groups that are too old are dropped."""

    def problems(self) -> Iterator[str]:
        if self.stale_groups == "drop" and self.max_staleness == 0:
            yield (
                "stale_groups='drop' with max_staleness=0: no group can become stale; set schedule.max_staleness to 1 "
                "or more, or schedule.stale_groups to 'wait'"
            )
        if self.max_optimizer_steps is not None and (self.max_steps > 0 or self.phases):
            yield (
                f"max_optimizer_steps={self.max_optimizer_steps} with max_steps or phases: both set the run's length; "
                "remove one"
            )


class EvaluationConfig(Section, frozen=True):
    """When the policy is evaluated, and on which prompts. It needs held-out prompts."""

    eval_steps: int = Field(default=50, ge=0)
    """Evaluate every this many steps; 0 = not during training."""
    eval_on_start: bool = True
    """Evaluate before the first step."""
    eval_at_end: bool = True
    """Evaluate after the last step."""
    num_eval_prompts: int | None = Field(default=None, ge=1)
    """Number of held-out prompts to use, from the first on; none = all."""
    eval_temperature: float = Field(default=0.0, ge=0, le=100)
    """Sampling temperature in evaluation; 0 = greedy."""
    num_generations_eval: int = Field(default=1, ge=1)
    """Completions per held-out prompt; above 1 needs eval_temperature above 0."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations without an improvement of metric_for_best_model; none = never."""
    metric_for_best_model: Annotated[str, BeforeValidator(_of_evaluation)] = Field(
        default="eval/accuracy", min_length=1
    )
    """Evaluation metric that chooses the best checkpoint; higher is better. If no accuracy is known (no task, no
    rewards.correctness), eval/reward takes the place of eval/accuracy."""
    load_best_model_at_end: bool = False
    """End with the weights of the best evaluation, not the last ones."""

    def problems(self) -> Iterator[str]:
        if self.num_generations_eval > 1 and self.eval_temperature == 0:
            yield (
                f"num_generations_eval={self.num_generations_eval}: all greedy completions of a prompt are the same; "
                "set evaluation.eval_temperature above 0, or evaluation.num_generations_eval to 1"
            )
        patience, best = self.early_stopping_patience, self.load_best_model_at_end
        if self.eval_steps == 0 and (best or patience is not None):
            wish = "load_best_model_at_end=True" if best else f"early_stopping_patience={patience}"
            yield (f"{wish}: eval_steps=0 makes no evaluations to compare; set evaluation.eval_steps to 1 or more")
