"""Where a run stands: everything the loop knows beyond weights and optimizer, in plain numbers that JSON can hold."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from covey.errors import CheckpointError

_KINDS = {
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "float | None": (float, type(None)),
    "int | None": (int, type(None)),
}


@dataclass(slots=True)
class TrainerState:
    """Counters of a run. Names are those of transformers' `TrainerState` where the meaning is the same.

    Attributes:
        global_step: finished steps (one step = sample, score, update).
        max_steps: steps that the run will have, or -1 where minutes or tokens decide.
        epoch: passes over the training prompts so far.
        num_tokens: tokens processed so far: prompt tokens and sampled tokens of every completion.
        seconds: training time so far, over all resumed parts, without evaluation and checkpoints.
        data_position: prompts drawn from the data order so far.
        policy_version: version of the current weights; 1 at the start, +1 for each optimiser step.
        updates: optimiser steps so far.
        evaluations_without_improvement: for early stopping.
        best_metric: best value of `metric_for_best_model` so far.
        best_step: step at which it was reached.
        best_metric_name: the metric that it is a value of, "" before the first evaluation.
        entropy_coef: where `use_adaptive_entropy` has moved it, None before the first optimiser step.
        last_entropy: mean entropy of the last optimiser step, in nats, which says whether the bonus acts; None before.
        log_history: one dict for each logged step or evaluation, as in metrics.jsonl.
    """

    global_step: int = 0
    max_steps: int = -1
    epoch: float = 0.0
    num_tokens: int = 0
    seconds: float = 0.0
    data_position: int = 0
    policy_version: int = 1
    updates: int = 0
    evaluations_without_improvement: int = 0
    best_metric: float | None = None
    best_step: int | None = None
    best_metric_name: str = ""
    entropy_coef: float | None = None
    last_entropy: float | None = None
    log_history: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the history, which the run folder holds already."""
        values = asdict(self)
        del values["log_history"]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any], log_history: list[dict[str, Any]]) -> Self:
        """Rebuild the state of a checkpoint.

        Raises:
            CheckpointError: the checkpoint names a counter that this version does not know, lacks one, or has one that
                is no such number.
        """
        known = {entry.name for entry in fields(cls)} - {"log_history"}
        values = {
            "best_metric_name": "",
            "entropy_coef": None,
            "last_entropy": None,
        } | values  # not in checkpoints of older versions
        if set(values) != known:
            odd = sorted(set(values) ^ known)
            raise CheckpointError(
                f"trainer state with fields {odd} missing or unknown: the checkpoint was written by another version of "
                "covey; resume it with that version"
            )
        for name in known:
            allowed = _KINDS[cls.__annotations__[name]]
            if type(values[name]) not in allowed or (type(values[name]) is float and not math.isfinite(values[name])):
                raise CheckpointError(
                    f"trainer state with {name}={values[name]!r:.80}: the checkpoint was changed after it was written; "
                    "delete it to resume from the one before"
                )
        return cls(**values, log_history=log_history)
