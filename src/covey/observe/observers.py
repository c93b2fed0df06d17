"""Who watches a run: the interface, the fan-out, and the run folder's own writer.

An observer only looks. One that raises is logged once and switched off, since a broken dashboard must not
cost a run; the run folder's writer is the exception, because a run that cannot be written cannot be resumed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from covey.observe.run_folder import RunFolder

Metrics = Mapping[str, Any]
_log = logging.getLogger("covey.observe")


class BaseObserver:
    """Is told what happens, and ignores it: override what is of interest. `step` counts optimiser steps taken."""

    essential = False
    """True: an error of this observer ends the run."""

    def on_run_start(self, config: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """The run begins or resumes. `info` may hold `total_steps`, `start_step`, `run_id`, `name`, ..."""

    def on_step(self, step: int, metrics: Metrics) -> None:
        """A training step is done; `metrics` are its numbers by name."""

    def on_eval(self, step: int, metrics: Metrics) -> None:
        """An evaluation is done; names begin with `eval/`."""

    def on_completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """What was sampled in a step, one row for each completion."""

    def on_event(self, kind: str, message: str) -> None:
        """Something worth a sentence: a diagnosis, a checkpoint, a new phase, a retry."""

    def on_progress(self, activity: str, done: int, total: int) -> None:
        """Something that takes a while inside a step or an evaluation moves on."""

    def on_run_end(self, status: str) -> None:
        """The run ends: `finished`, `stopped`, `failed`, ..."""


Observer = BaseObserver


class Observers(BaseObserver):
    """Passes everything on to several observers, in order; itself an observer."""

    essential = True

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self.active: list[Observer] = list(observers)
        for name in vars(BaseObserver):
            if name.startswith("on_"):
                setattr(self, name, partial(self._tell, name))

    def add(self, observer: Observer) -> None:
        """Tell this observer too from now on."""
        self.active.append(observer)

    def _tell(self, method: str, *arguments: Any) -> None:
        failures = []
        for observer in tuple(self.active):
            try:
                getattr(observer, method)(*arguments)
            except Exception as error:
                if getattr(observer, "essential", False):
                    raise
                self.active = [other for other in self.active if other is not observer]
                name = type(observer).__name__
                _log.warning("observer %s failed in %s and is switched off", name, method, exc_info=error)
                failures.append(f"{name} failed in {method} ({error!r}) and is switched off")
        # The others hear of it too, so that it is in the run's own log.
        for failure in failures:
            self._tell("on_event", "observer", failure)


class RunFolderWriter(BaseObserver):
    """Writes everything that is told into the run folder."""

    essential = True

    def __init__(self, folder: RunFolder, *, log_completions: bool = True) -> None:
        """Take an open folder; it stays the caller's to close."""
        self._folder, self._log_completions = folder, log_completions

    def on_run_start(self, config: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        start = int(info.get("start_step") or 0)
        self._folder.append_event("run", f"resumed at step {start}" if start else "started")

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._folder.append_metrics(step, metrics)

    on_eval = on_step

    def on_completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the step's table, if completions are wanted."""
        if self._log_completions:
            self._folder.write_completions(step, rows)

    def on_event(self, kind: str, message: str) -> None:
        self._folder.append_event(kind, message)

    def on_run_end(self, status: str) -> None:
        """Record the end, and wait until everything is on the disk."""
        self._folder.append_event("run", status)
        self._folder.sync()
