"""What is decided before a run begins: what counts as right, which evaluation is the best, whether memory will do."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from covey.config import GRPOConfig
from covey.errors import ConfigError
from covey.observe.metric_names import says_which_is_best
from covey.processes import total_memory
from covey.training.evaluate import IsCorrect

ACCURACY, REWARD = "eval/accuracy", "eval/reward"
_TOKEN_BYTES = 16
"""Of a sampled token at the least: its id, its log-probability, its advantage."""
_COMPLETION_BYTES = 2000
"""Of a completion at the least: text, request, table row."""
_ENVIRONMENT_BYTES = 2_000_000
"""Of an environment's process at the least, most of its memory being shared with the others'."""


def correctness(config: GRPOConfig, rewards: Sequence[str], by_task: IsCorrect | None) -> IsCorrect | None:
    """Who says which completions are right: the task, or the reward named by `rewards.correctness`; None = nobody.

    Args:
        config: the settings.
        rewards: names of the reward functions.
        by_task: the task's own rule, None without a task.

    Raises:
        ConfigError: both say so, there is no such reward, or a setting needs what nobody says.
    """
    named = config.rewards.correctness
    if named is None:
        if by_task is None:
            _refuse_what_needs_it(config)
        return by_task
    if by_task is not None:
        raise ConfigError(
            f"rewards.correctness={named!r}: data.task={config.data.task!r} says already which answers are right; "
            "remove "
            "one of them"
        )
    if named not in rewards:
        raise ConfigError(f"rewards.correctness={named!r}: is no reward function; there is {', '.join(rewards)}")
    return named


def _refuse_what_needs_it(config: GRPOConfig) -> None:
    fix = "name the reward that is 1 for a right completion and 0 for a wrong one in rewards.correctness, or"
    if config.data.prompt_weighting == "difficulty":
        raise ConfigError(
            "data.prompt_weighting='difficulty': it needs to know which completions are right, and nothing says so "
            "here; "
            f"{fix} set data.prompt_weighting to uniform"
        )
    for index, phase in enumerate(config.schedule.phases):
        if phase.min_accuracy is not None:
            raise ConfigError(
                f"schedule.phases[{index}].min_accuracy={phase.min_accuracy}: nothing says here which completions are "
                f"right; {fix} remove min_accuracy"
            )


def best_metric(config: GRPOConfig, rewards: Sequence[str], *, knows_correct: bool, evaluates: bool) -> str:
    """The metric that says which evaluation is the best: `metric_for_best_model`; the mean reward in place of the
    default, accuracy, where nothing says what is right.

    Raises:
        ConfigError: it is not measured in this run, or there are no evaluations to choose from.
    """
    wanted, settings = config.evaluation.metric_for_best_model, config.evaluation
    if not evaluates:
        for name in ("load_best_model_at_end", "early_stopping_patience"):
            if getattr(settings, name):
                raise ConfigError(
                    f"evaluation.{name}={getattr(settings, name)}: it compares evaluations, and there are no held-out "
                    "prompts; set data.eval_dataset (in Python: pass eval_dataset), or remove it"
                )
    if wanted.startswith(ACCURACY) and not knows_correct:
        return REWARD
    parts = [f"eval/rewards/{name}/mean" for name in rewards]
    if wanted.startswith("eval/rewards/") and wanted not in parts:
        raise ConfigError(
            f"evaluation.metric_for_best_model={wanted!r}: there is no such reward function; use {', '.join(parts)}, "
            "or "
            f"{REWARD}"
        )
    return wanted


def require_measured(wanted: str, metrics: Sequence[str]) -> None:
    """Stop at the first evaluation that lacks the metric for the best model, since none would ever be the best.

    Raises:
        ConfigError: it names what there is.
    """
    if wanted in metrics:
        return
    usable = sorted(name for name in metrics if says_which_is_best(name))
    near = get_close_matches(wanted, usable, n=1)
    raise ConfigError(
        f"evaluation.metric_for_best_model={wanted!r}: the evaluation did not measure it; "
        + (f"did you mean {near[0]!r}? " if near else "")
        + f"Of what it measured, use {', '.join(usable)}"
    )


def require_memory(config: GRPOConfig) -> None:
    """Refuse sizes that no memory holds: a run that the system kills says nothing.

    What a step, an evaluation and the environments hold at the least is compared with the machine's memory.

    Raises:
        ConfigError: it is more; the message names the settings and both amounts.
    """
    sampling, evaluation = config.sampling, config.evaluation
    group = max([sampling.num_generations, *(phase.num_generations or 0 for phase in config.schedule.phases)])
    length = sampling.max_completion_length
    completions = {
        f"data.prompts_per_step={config.data.prompts_per_step} x sampling.num_generations={group} x "
        f"sampling.max_completion_length={length}": config.data.prompts_per_step * group,
        f"evaluation.num_generations_eval={evaluation.num_generations_eval} x "
        f"sampling.max_completion_length={length}": evaluation.num_generations_eval,
    }
    for name, count in completions.items():
        require_room_for(name, count, length)
    if config.environment.world is not None:
        parallel = config.environment.parallel_episodes
        _require(f"environment.parallel_episodes={parallel}", parallel * _ENVIRONMENT_BYTES)


def require_room_for(name: str, completions: int, length: int) -> None:
    """The same for so many completions of up to `length` tokens, that `name` asks for.

    Raises:
        ConfigError: the machine has less memory.
    """
    _require(name, completions * (_COMPLETION_BYTES + _TOKEN_BYTES * length))


def _require(name: str, size: int) -> None:
    there = total_memory()
    if size > there:
        raise ConfigError(
            f"{name}: needs at least {size / 1e9:,.0f} GB of memory, and this machine has {there / 1e9:,.0f} GB; "
            "use smaller numbers"
        )
