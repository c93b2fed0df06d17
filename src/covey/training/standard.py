"""What a run is measured by, decided once before it begins: what counts as right, and which evaluation is the best."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from covey.errors import ConfigError
from covey.observe.metric_names import says_which_is_best
from covey.training.evaluate import IsCorrect

if TYPE_CHECKING:
    from covey.config import GRPOConfig

ACCURACY, REWARD = "eval/accuracy", "eval/reward"


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
