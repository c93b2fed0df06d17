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
from typing import Any, Self, get_args

import transformers
from transformers import TrainerControl

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
    """A schedule of `transformers.get_scheduler`, with linear warm-up, as a pure function."""
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
    """Warm-up steps: `warmup_steps`, below 1 `ceil(total_steps * warmup_steps)`; `ConfigError`: no total to share."""
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
        self._base: dict[str, Any] = {"temperature": temperature, "beta": beta, "num_generations": num_generations}
        self._index = 0
        self._start = Elapsed()
        self.learning_rate_factor = 1.0  # what `min_accuracy` has cut the learning rate to
        self._accuracies: list[float] = []

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
        """The settings for the step that follows `progress`, moving to the next phase when one is over."""
        if self._is_over(progress) and self._index < len(self._phases) - 1:
            self._index += 1
            self._start = progress
            self._accuracies = []
            if self._phases[self._index].learning_rate is not None:
                self.learning_rate_factor = 1.0
        phase = self._phases[self._index]
        own = {name: value for name in self._base if (value := getattr(phase, name)) is not None}
        return ResolvedPhase(
            index=self._index,
            name=phase.name or f"phase {self._index + 1}",
            learning_rate=phase.learning_rate,
            learning_rate_factor=self.learning_rate_factor,
            **self._base | own,
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
            self.learning_rate_factor *= phase.learning_rate_cut
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
            "learning_rate_factor": self.learning_rate_factor,
            "accuracies": list(self._accuracies),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the position that `state` returned."""
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
        self._index, self._start, self.learning_rate_factor, self._accuracies = index, start, factor, accuracies


@dataclass
class TrainerState(transformers.TrainerState):
    """Counters of a run: those of transformers, and Covey's own."""

    max_steps: int = -1
    epoch: float = 0.0
    num_tokens: int = 0
    seconds: float = 0.0
    data_position: int = 0
    policy_version: int = 1
    updates: int = 0
    evaluations_without_improvement: int = 0
    best_step: int | None = None
    best_metric_name: str = ""
    entropy_coef: float | None = None
    last_entropy: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; the history is in the run folder already."""
        return {name: getattr(self, name) for name in _KEPT}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild the state of a checkpoint, its history empty."""
        values = {"best_metric_name": "", "entropy_coef": None, "last_entropy": None} | values  # later ones
        if values.keys() != _KEPT.keys():
            odd = sorted(values.keys() ^ _KEPT.keys())
            raise CheckpointError(
                f"trainer state with fields {odd} missing or unknown: the checkpoint was written by another version of "
                "covey; resume it with that version"
            )
        for name, value in values.items():
            if type(value) not in _KEPT[name] or (type(value) is float and not math.isfinite(value)):
                raise CheckpointError(
                    f"trainer state with {name}={value!r:.80}: the checkpoint was changed after it was written; "
                    "delete it to resume from the one before"
                )
        return cls(**values)

    def take(self, other: TrainerState) -> None:
        """Become equal to another state; those who hold this one see it."""
        vars(self).update(vars(other))


_KEPT: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("global_step", "max_steps", "num_tokens", "data_position", "policy_version", "updates"), (int,)),
    **dict.fromkeys(("epoch", "seconds"), (float, int)),
    **dict.fromkeys(("best_metric", "entropy_coef", "last_entropy"), (float, type(None))),
    **{"evaluations_without_improvement": (int,), "best_step": (int, type(None)), "best_metric_name": (str,)},
}
"""What a checkpoint keeps, with the types that it may have."""


def check_callbacks(callbacks: Any) -> None:
    """Refuse what would never be called."""
    if not isinstance(callbacks, list | tuple):
        raise ConfigError(f"callbacks={callbacks!r:.200}: a {type(callbacks).__name__}; pass a list of callbacks")
    for callback in callbacks:
        if not any(name.startswith("on_") for name in dir(callback)):
            raise ConfigError(
                f"callbacks: {callback!r:.200} has no method such as on_step_end or on_log, so nothing would call it; "
                "pass a transformers TrainerCallback, or an object with such methods"
            )


class Callbacks:
    """Calls `callback.EVENT(args, state, control, **kwargs)` on every callback that has such a method.

    Transformers' own handler would ask each for all methods of `TrainerCallback`. An exception in a callback is the
    user's and ends the run: it is not swallowed.
    """

    def __init__(self, callbacks: Sequence[Any], args: Any, state: TrainerState) -> None:
        check_callbacks(callbacks)
        self._callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        self._args, self._state = args, state
        self.control = TrainerControl()

    def add(self, callback: Any) -> None:
        """Call this one too, from now on."""
        check_callbacks([callback])
        self._callbacks.append(callback)

    def __call__(self, event: str, **kwargs: Any) -> None:
        """Call `event` (`on_step_end`, `on_log`, ...); a returned control replaces the current one."""
        for callback in self._callbacks:
            handler = getattr(callback, event, None)
            if handler is not None:
                self.control = handler(self._args, self._state, self.control, **kwargs) or self.control

    def take(self, request: str) -> bool:
        """Read and reset one request such as `should_save`."""
        asked = bool(getattr(self.control, request))
        setattr(self.control, request, False)
        return asked
