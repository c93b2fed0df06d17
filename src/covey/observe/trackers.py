"""Trackers by other programs: TensorBoard, Weights & Biases, trackio. Imported only when asked for."""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Console

from covey.errors import ConfigError
from covey.observe.console import ConsoleProgress
from covey.observe.observers import BaseObserver, Metrics, Observer, Observers, RunFolderWriter
from covey.observe.records import plain
from covey.observe.run_folder import RunFolder


def _import(module: str, tracker: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"report_to={tracker!r}: the package {error.name or module} is not installed; install it with "
            f"`pip install covey[{tracker}]`, or take {tracker!r} out of run.report_to"
        ) from error


def _numbers(metrics: Metrics) -> dict[str, float]:
    """Only finite numbers: trackers disagree on the rest."""
    clean = ((name, plain(value)) for name, value in metrics.items())
    return {name: value for name, value in clean if isinstance(value, (bool, int, float))}


class _Tracker(BaseObserver, ABC):
    """Common part: thin out steps to every `logging_steps`-th."""

    def __init__(self, folder: Path, name: str, logging_steps: int) -> None:
        self._folder = folder
        self._name = name
        self._every = max(1, logging_steps)

    def on_step(self, step: int, metrics: Metrics) -> None:
        if step % self._every == 0:
            self._send(step, _numbers(metrics))

    def on_eval(self, step: int, metrics: Metrics) -> None:
        self._send(step, _numbers(metrics))

    @abstractmethod
    def _send(self, step: int, numbers: dict[str, float]) -> None:
        """Pass the numbers of a step on."""


class TensorBoardTracker(_Tracker):
    """Writes event files into `<run folder>/tensorboard`; a resumed run hides what it does again."""

    def __init__(self, folder: Path, name: str, logging_steps: int = 1) -> None:
        """Find the package now, so that a missing one is known before the run."""
        super().__init__(folder, name, logging_steps)
        self._module = _import("torch.utils.tensorboard", "tensorboard")

    def on_run_start(self, config: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """Open the writer and record the config as text."""
        start = int(info.get("start_step") or 0)
        self._writer = self._module.SummaryWriter(
            str(self._folder / "tensorboard"), purge_step=start + 1 if start else None
        )
        if not start:
            self._writer.add_text("config", f"```json\n{json.dumps(plain(config), indent=1)}\n```", 0)

    def on_event(self, kind: str, message: str) -> None:
        self._writer.add_text(f"event/{kind}", message)

    def on_run_end(self, status: str) -> None:
        self._writer.close()

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)


class _RunTracker(_Tracker):
    """Weights & Biases and trackio share one interface: `init`, `log`, `finish`."""

    _package = ""

    def __init__(self, folder: Path, name: str, logging_steps: int = 1) -> None:
        """Find the package now, so that a missing one is known before the run."""
        super().__init__(folder, name, logging_steps)
        self._module = _import(self._package, self._package)

    def on_run_start(self, config: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """Begin a run at the tracker, or go on with the same one."""
        self._module.init(
            project=str(info.get("project") or "covey"), name=self._name, config=plain(config), **self._options(info)
        )

    def on_run_end(self, status: str) -> None:
        self._module.finish()

    def _options(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return {"resume": "allow"}

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        self._module.log(numbers, step=step)


class WandbTracker(_RunTracker):
    """Weights & Biases. The run's own id is used there too, so a resume continues the same curves."""

    _package = "wandb"

    def _options(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return {"id": info.get("run_id"), "resume": "allow", "dir": str(self._folder)}


class TrackioTracker(_RunTracker):
    """trackio; a run of the same name is continued."""

    _package = "trackio"


_TRACKERS: dict[str, Callable[[Path, str, int], Observer]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}


def make_observers(
    report_to: str | Sequence[str] | None = (),
    run_folder: RunFolder | None = None,
    *,
    run_name: str | None = None,
    console: Console | bool = True,
    logging_steps: int = 1,
    log_completions: bool = True,
    num_completions_to_print: int | None = None,
) -> Observers:
    """Put together who watches a run: the run folder, the screen, and trackers.

    Args:
        report_to: "tensorboard", "wandb", "trackio", several of them, or "none".
        run_folder: an open folder to write to; trackers need it.
        run_name: name at the trackers; None = the folder's name.
        console: False = nothing on the screen, True = standard error, or a console of your own.
        logging_steps: steps between printed lines and between points sent to trackers; the run folder gets every step.
        log_completions: write completions to the run folder.
        num_completions_to_print: completions shown on the screen with each line.

    Raises:
        ConfigError: an unknown tracker, or one whose package is not installed.
    """
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    observers = Observers()
    if run_folder is not None:
        observers.add(RunFolderWriter(run_folder, log_completions=log_completions))
    if console is not False:
        observers.add(
            ConsoleProgress(
                None if console is True else console,
                logging_steps=logging_steps,
                num_completions_to_print=num_completions_to_print,
            )
        )
    for name in dict.fromkeys(names):
        if name == "none":
            continue
        if name not in _TRACKERS:
            near = get_close_matches(name, _TRACKERS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"set run.report_to to {', '.join(_TRACKERS)} or 'none'"
            raise ConfigError(f"report_to={name!r}: no such tracker; {hint}")
        if run_folder is None:
            raise ConfigError(f"report_to={name!r}: a tracker needs a run folder; set run.output_dir")
        observers.add(_TRACKERS[name](run_folder.path, run_name or run_folder.path.name, logging_steps))
    return observers
