"""What is refused before a model is loaded: sizes without room, metrics that are not measured, several processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from difflib import get_close_matches

from covey.config.whole import GRPOConfig
from covey.errors import ConfigError
from covey.metric_names import says_which_is_best
from covey.processes import total_memory

ACCURACY, REWARD = "eval/accuracy", "eval/reward"
# At the least: of a sampled token its id, log-probability and advantage; of a completion text, request and table row;
# of an environment's process what it does not share with the others.
_TOKEN_BYTES, _COMPLETION_BYTES, _ENVIRONMENT_BYTES = 16, 2000, 2_000_000
_MOST_COMPLETIONS = 250_000
"""Of a step: several times what the largest published runs have."""


def require_memory(config: GRPOConfig) -> None:
    """Refuse sizes for which the machine's memory is too small: a run that the system kills says nothing."""
    sampling, evaluation = config.sampling, config.evaluation
    group = config.largest_group
    grown = "max_generations" if group == sampling.max_generations else "num_generations"
    length = sampling.max_completion_length
    prompts, each = config.data.prompts_per_step, evaluation.num_generations_eval
    for name, count in (
        (f"data.prompts_per_step={prompts} x sampling.{grown}={group}", prompts * group),
        (f"evaluation.num_generations_eval={each}", each),
    ):
        require_room_for(f"{name} x sampling.max_completion_length={length}", count, length)
    if config.environment.world is not None:
        parallel = config.environment.parallel_episodes
        _require(f"environment.parallel_episodes={parallel}", parallel * _ENVIRONMENT_BYTES)


def require_room_for(name: str, completions: int, length: int) -> None:
    """The same for so many completions of up to `length` tokens, that `name` asks for."""
    _require(name, completions * (_COMPLETION_BYTES + _TOKEN_BYTES * length))
    if completions > _MOST_COMPLETIONS:
        raise ConfigError(f"{name}: {completions:,} completions at once; use up to {_MOST_COMPLETIONS:,}")


def _require(name: str, size: int) -> None:
    there = total_memory()
    if size > there:
        raise ConfigError(
            f"{name}: needs at least {size / 1e9:,.0f} GB of memory, and this machine has {there / 1e9:,.0f} GB; "
            "use smaller numbers"
        )


def best_metric(config: GRPOConfig, rewards: Sequence[str], *, knows_correct: bool, evaluates: bool) -> str:
    """The metric that chooses the best evaluation; the reward in place of accuracy if nothing says what is right."""
    wanted, settings = config.evaluation.metric_for_best_model, config.evaluation
    if not evaluates:
        for name in ("load_best_model_at_end", "early_stopping_patience"):
            if getattr(settings, name):
                raise ConfigError(
                    f"evaluation.{name}={getattr(settings, name)}: it compares evaluations, and there are no held-out "
                    "prompts; set data.eval_dataset or data.eval_fraction (in Python: pass eval_dataset), or remove it"
                )
    if wanted.startswith(ACCURACY) and not knows_correct:
        return REWARD
    parts = [f"eval/rewards/{name}/mean" for name in rewards]
    if wanted.startswith("eval/rewards/") and wanted not in parts:
        raise ConfigError(
            f"evaluation.metric_for_best_model={wanted!r}: there is no such reward function; use {', '.join(parts)}, "
            f"or {REWARD}"
        )
    return wanted


def require_measured(wanted: str, metrics: Sequence[str]) -> None:
    """Stop at the first evaluation that lacks the metric for the best model, since none would ever be the best."""
    if wanted in metrics:
        return
    usable = sorted(name for name in metrics if says_which_is_best(name))
    near = "".join(f"did you mean {name!r}? " for name in get_close_matches(wanted, usable, n=1))
    raise ConfigError(
        f"evaluation.metric_for_best_model={wanted!r}: the evaluation did not measure it; {near}Of what it measured, "
        f"use {', '.join(usable)}"
    )


def require_one_process() -> None:
    """Refuse to be one of several processes of a script. Raises ConfigError."""
    world = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and world.isdecimal() and int(world) > 1:
        raise ConfigError(
            f"WORLD_SIZE={world}: torchrun or accelerate has started {world} processes, but a trainer made in Python "
            "runs in one: each would train by itself, all into the same folder. Start the program with python, or "
            f"write its settings into a recipe: torchrun --nproc-per-node {world} -m covey train RECIPE"
        )
