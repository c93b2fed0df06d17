"""What changes over a run: the learning rate, and phases with settings of their own.

Learning-rate schedules are those of transformers, as pure functions step -> factor: `step` counts the optimiser steps
already taken, so with warm-up the first step has factor 0.

Phases follow one another: "100 steps at temperature 0.7, then ..." (usmle-qa.md has three). A phase ends at its limit,
counted from where the phase really began.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from covey.config.training import PhaseConfig, ScheduleType
from covey.errors import CheckpointError, ConfigError

ACCURACY_STEPS = 10
"""Steps whose mean accuracy decides about a cut of the learning rate."""

_ENDLESS = ("constant", "inverse_sqrt")


def learning_rate_schedule(
    name: str,
    *,
    learning_rate: float,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[[int], float]:
    """A schedule of `transformers.get_scheduler`, with linear warm-up, as a pure function.

    Raises:
        ConfigError: unknown schedule or option, or a decay without a known number of steps.
    """
    import torch
    from transformers import get_scheduler

    known = get_args(ScheduleType)
    if name not in known:
        raise ConfigError(
            f"lr_scheduler_type={name!r}: no such schedule; set optim.lr_scheduler_type to {', '.join(known)}"
        )
    if total_steps is None and name not in _ENDLESS:
        raise ConfigError(
            f"lr_scheduler_type={name!r}: a decay needs the number of steps, which is not known here; "
            'set schedule.max_steps, or optim.lr_scheduler_type to "constant"'
        )
    given = dict(options or {})
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=learning_rate)
    try:
        if name == "constant" and given:
            raise TypeError(f"{name} has no options")
        theirs = "constant_with_warmup" if name == "constant" else name
        factor = get_scheduler(theirs, optimizer, warmup_steps, total_steps, given).lr_lambdas[0]
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"optim.lr_scheduler_kwargs={given!r} with lr_scheduler_type={name!r}: {error}") from error
    return lambda step: float(factor(step if total_steps is None else min(step, total_steps)))


def resolve_warmup_steps(warmup_steps: float, total_steps: int | None) -> int:
    """Number of warm-up steps: `warmup_steps` from 1 on, else `ceil(total_steps * warmup_steps)`.

    Raises:
        ConfigError: a share of an unknown number of steps.
    """
    if warmup_steps == 0 or warmup_steps >= 1:
        return int(warmup_steps)
    if total_steps is None:
        raise ConfigError(
            f"optim.warmup_steps={warmup_steps}: a share of all steps, whose number is not known; set a number of steps"
        )
    return math.ceil(total_steps * warmup_steps)


@dataclass(frozen=True, slots=True)
class Elapsed:
    """How far a run is: steps, tokens, seconds of training, all from 0 and over all resumes."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ResolvedPhase:
    """The settings in force: the phase's where it sets them, else the run's."""

    index: int
    name: str
    temperature: float
    beta: float
    num_generations: int
    learning_rate: float | None
    learning_rate_factor: float = 1.0

    def effective_learning_rate(self, base: float, factor: float) -> float:
        """The learning rate of the next step: the phase's own, as it stands, or `base * factor`; then any cut."""
        rate = base * factor if self.learning_rate is None else self.learning_rate
        return rate * self.learning_rate_factor


class PhasePlan:
    """Walks through the phases as a run progresses.

    `at` must be called with progress that never goes back. The walk has a state, since a phase measured in
    tokens or minutes begins where the one before really ended; `state` and `restore` carry it over a resume.
    """

    def __init__(self, phases: Sequence[PhaseConfig], *, temperature: float, beta: float, num_generations: int) -> None:
        """Take the phases (none = one phase without end) and the run's own settings."""
        self._phases = tuple(phases) or (PhaseConfig.model_construct(name="train"),)
        self._base = (temperature, beta, num_generations)
        self._index = 0
        self._start = Elapsed()
        self._factor = 1.0
        self._accuracies: list[float] = []

    @property
    def learning_rate_factor(self) -> float:
        """What `min_accuracy` has cut the learning rate to so far."""
        return self._factor

    @property
    def total_steps(self) -> int | None:
        """Steps of all phases together, None when one of them is not measured in steps."""
        steps = [phase.steps for phase in self._phases]
        return None if None in steps else sum(step for step in steps if step is not None)

    @property
    def ends_at(self) -> int | None:
        """Step at which the phase in force ends, where it is measured in steps."""
        steps = self._phases[self._index].steps
        return None if steps is None else self._start.step + steps

    def at(self, progress: Elapsed) -> ResolvedPhase:
        """Return the settings for the step that follows `progress`, moving to the next phase when one is
        over.
        """
        if self._is_over(progress) and self._index < len(self._phases) - 1:
            self._index += 1
            self._start = progress
            self._accuracies = []
            if self._phases[self._index].learning_rate is not None:
                self._factor = 1.0
        phase = self._phases[self._index]
        temperature, beta, num_generations = self._base
        return ResolvedPhase(
            index=self._index,
            name=phase.name or f"phase {self._index + 1}",
            temperature=temperature if phase.temperature is None else phase.temperature,
            beta=beta if phase.beta is None else phase.beta,
            num_generations=num_generations if phase.num_generations is None else phase.num_generations,
            learning_rate=phase.learning_rate,
            learning_rate_factor=self._factor,
        )

    def note_accuracy(self, accuracy: float | None) -> bool:
        """Take in the share of right completions of a step (None = unknown); True when it cuts the learning rate.

        The mean of `ACCURACY_STEPS` steps decides, all of them in this phase and since the last cut: a single step of
        few prompts says little.
        """
        phase = self._phases[self._index]
        if accuracy is None or phase.min_accuracy is None:
            return False
        self._accuracies.append(accuracy)
        if len(self._accuracies) < ACCURACY_STEPS:
            return False
        low = sum(self._accuracies) / ACCURACY_STEPS < phase.min_accuracy
        if low:
            self._factor *= phase.learning_rate_cut
        self._accuracies = [] if low else self._accuracies[1:]
        return low

    def finished(self, progress: Elapsed) -> bool:
        """True when the last phase has a limit and `progress` has reached it."""
        return self._index == len(self._phases) - 1 and self._is_over(progress)

    def _is_over(self, progress: Elapsed) -> bool:
        phase = self._phases[self._index]
        return (
            (phase.steps is not None and progress.step - self._start.step >= phase.steps)
            or (phase.tokens is not None and progress.tokens - self._start.tokens >= phase.tokens)
            or (phase.minutes is not None and progress.seconds - self._start.seconds >= 60 * phase.minutes)
        )

    def state(self) -> dict[str, Any]:
        """JSON-able position in the plan, for a checkpoint."""
        return {
            "index": self._index,
            "start": asdict(self._start),
            "learning_rate_factor": self._factor,
            "accuracies": list(self._accuracies),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the position that `state` returned.

        Raises:
            CheckpointError: the state names a phase that this plan does not have.
        """
        index = int(state["index"])
        if not 0 <= index < len(self._phases):
            raise CheckpointError(
                f"the checkpoint is in phase {index + 1}, but schedule.phases has {len(self._phases)}; "
                "resume with the phases that the run was started with"
            )
        start, factor = Elapsed(**state["start"]), float(state.get("learning_rate_factor", 1.0))
        accuracies = [float(value) for value in state.get("accuracies", ())]
        for value in (start.step, start.tokens, start.seconds):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"phase {index + 1} begins at {start}")
        if not 0 < factor <= 1 or not all(math.isfinite(value) for value in accuracies):
            raise ValueError(f"learning_rate_factor={factor}, accuracies={accuracies!r:.80}")
        self._index, self._start, self._factor, self._accuracies = index, start, factor, accuracies
