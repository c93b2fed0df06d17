"""What can be seen of a recipe before it is run: its prompts, and what two real steps of it say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from covey.observe.doctor import Diagnosis, Thresholds, diagnose
from covey.training.plan import Plan
from covey.training.trainer import GRPOTrainer

_LEFT_OUT = 0.05
"""Share of rows that may be left out for their length without a word."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """What a recipe asks."""

    rows: int
    kept: int
    held_out: int
    mean: float
    longest: int
    room: int


def prompts_of(trainer: GRPOTrainer) -> Prompts:
    """Counted, with their lengths against the limits."""
    lengths = [len(prompt.token_ids) for prompt in trainer.prompts]
    room = trainer.engine.context_length - trainer.args.sampling.max_completion_length
    if trainer.world is not None:
        room = trainer.engine.context_length
    return Prompts(
        len(trainer.data.train),
        len(lengths),
        len(trainer.eval_prompts),
        sum(lengths) / max(len(lengths), 1),
        max(lengths, default=0),
        room,
    )


def checkup(prompts: Prompts, plan: Plan, memory: Sequence[str] = ()) -> list[Diagnosis]:
    """What stands in the way of a recipe, the most basic first; the judgements on rewards are the doctor's."""
    found = []
    lost = prompts.rows - prompts.kept
    if lost > _LEFT_OUT * prompts.rows:
        found.append(
            Diagnosis(
                "prompts_left_out",
                f"{lost} of {prompts.rows} rows are left out: their prompts are too long",
                "Raise data.max_prompt_length, lower sampling.max_completion_length, or use a model with a longer "
                "context",
            )
        )
    found += [Diagnosis("memory", what, "See the table of memory") for what in memory]
    return found + diagnose([plan.metrics, plan.metrics], Thresholds(min_steps=2))
