"""Refuses sizes that no memory holds, before anything is loaded: a run that the system kills says nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.errors import ConfigError
from covey.processes import total_memory

if TYPE_CHECKING:
    from covey.config import GRPOConfig

_TOKEN_BYTES = 16
"""Of a sampled token at the least: its id, its log-probability, its advantage."""
_COMPLETION_BYTES = 2000
"""Of a completion at the least: text, request, table row."""
_ENVIRONMENT_BYTES = 2_000_000
"""Of an environment's process at the least, most of its memory being shared with the others'."""


def require_memory(config: GRPOConfig) -> None:
    """Compare what a step, an evaluation and the environments hold at the least with the machine's memory.

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
