"""Trackers by other programs: TensorBoard, Weights & Biases, trackio, MLflow. Imported only when asked for.

A tracker is somebody else's program, often with a network behind it. Its calls are made in a thread of its own, so that
one that waits costs the run nothing; one that fails, or waits for too long, is given up.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import queue
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from covey.errors import ConfigError
from covey.functions import nearest
from covey.observe.console import ConsoleProgress
from covey.observe.observers import BaseObserver, Metrics, Observer, Observers, RunFolderWriter
from covey.observe.records import plain
from covey.observe.run_folder import RunFolder

MOST_CALLS = 2_000
"""Calls that may wait; when there are more, the tracker has taken nothing for a long time."""
MOST_ROWS, MOST_TABLE_BYTES, MOST_TEXT, MOST_COLUMNS = 200, 256 << 10, 1_000, 30
MOST_EVENTS = 500
_DENSE = 50
_FIRST = ("group", "sample", "uid", "prompt", "completion", "reward", "advantage", "correct", "masked_by", "length")


class Sender:
    """Makes calls in order in a thread of its own. Made for one thread that submits."""

    def __init__(self, name: str, *, most: int = MOST_CALLS, patience: float) -> None:
        """Set up; the thread starts with the first call."""
        self._name, self._patience = name, patience
        self._calls: queue.Queue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.Queue(most)
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Have `call(*arguments)` made, soon; raises what an earlier call raised, TimeoutError where too many wait."""
        self._raise_failure()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"covey-{self._name}", daemon=True)
            self._thread.start()
        try:
            self._calls.put_nowait((call, arguments))
        except queue.Full:
            raise TimeoutError(f"{self._calls.maxsize} calls wait for {self._name}, which takes none") from None

    def close(self) -> None:
        """Wait until all calls were made; raise what one raised, or `TimeoutError` if patience ends first."""
        if self._thread is not None:
            try:
                self._calls.put(None, timeout=self._patience)
            except queue.Full:
                raise TimeoutError(f"{self._name} has taken nothing for {self._patience:g} s") from None
            self._thread.join(self._patience)
            if self._thread.is_alive():
                late = f"{self._name} did not finish within {self._patience:g} s"
                raise TimeoutError(f"{late}; the run folder has what it has not")
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (entry := self._calls.get()) is not None:
            call, arguments = entry
            try:
                call(*arguments)
            except BaseException as error:  # a tracker's login may call sys.exit
                self._failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
                return


def is_due(chance: int) -> bool:
    """Whether the n-th chance is taken: the first 50, every 2nd of the next 100, every 4th of 200, and so on."""
    return chance % (1 << int(math.log2((chance - 1) / _DENSE + 1))) == 0


def bounded_table(rows: Sequence[Mapping[str, Any]], most: int) -> tuple[list[str], list[list[Any]]]:
    """The first completions of a step as columns and rows, with cut texts, at most 256 KiB of them as JSON."""
    names = list(dict.fromkeys(name for row in rows[:1] for name in row))
    columns = [name for name in _FIRST if name in names]
    columns += [name for name in names if name not in columns][: MOST_COLUMNS - len(columns)]
    table: list[list[Any]] = []
    size = 0
    for row in rows[: min(most, MOST_ROWS)]:
        values = [_small(row.get(name)) for name in columns]
        size += len(json.dumps(values))
        if size > MOST_TABLE_BYTES:
            break
        table.append(values)
    return columns, table


def _small(value: Any) -> Any:
    """A number as it is, everything else as text that is valid Unicode and not long."""
    clean = plain(value)
    if clean is None or isinstance(clean, bool | int | float):
        return clean
    return bounded_text(clean if isinstance(clean, str) else json.dumps(clean), MOST_TEXT)


def bounded_text(text: str, most: int) -> str:
    """Text that any tracker can store: valid Unicode without NUL, at most so many characters."""
    cut = text[:most].replace("\0", "?").encode("utf-8", "replace").decode()
    return cut if len(text) <= most else f"{cut} [...]"


# ---------------------------------------------------------------------- the trackers


class _Tracker(BaseObserver, ABC):
    """Common part: decides in the run's thread what is worth sending, and has it sent in another one.

    Numbers of every `logging_steps`-th step and of every evaluation; of the former so many completions, with their
    rewards; what happened, in words. All but the numbers is bounded. Not by transformers' reporting callbacks: these
    give every metric another name (`train/reward`), know no resumed run, and send neither completions nor sentences.
    """

    patience = 60.0
    """Seconds that the end of a run waits for it."""
    package = ""

    def __init__(self, folder: Path, name: str, logging_steps: int = 1, completions: int = 0) -> None:
        """Find the package now, so that a missing one is known before the run."""
        extra = self.package.rsplit(".", 1)[-1]
        try:
            self._module: Any = importlib.import_module(self.package)
        except ImportError as error:
            what = f"report_to={extra!r}: the package {error.name or self.package} is not installed; install it with"
            fix = f"`pip install 'covey[{extra}]'`, or take {extra!r} out of run.report_to"
            raise ConfigError(f"{what} {fix}") from error
        # Some look at every value for figures, in the other thread, while the run's may be importing this.
        importlib.import_module("matplotlib.figure")
        self._folder, self._name, self._completions = folder, name, completions
        self._every = max(1, logging_steps)
        self._events: list[list[Any]] = []
        self._step = self._tables = 0
        self._sender = Sender(type(self).__name__, patience=self.patience)

    def on_run_start(self, config: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """Begin a run at the tracker, or go on with the same one."""
        self._step = int(info.get("start_step") or 0)
        self._sender.submit(self._start, plain(config), dict(info))
        self.on_event("run", f"resumed at step {self._step}" if self._step else "started")

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._step = step
        if step % self._every == 0:
            self.on_eval(step, metrics)

    def on_eval(self, step: int, metrics: Metrics) -> None:
        """Send the finite numbers: trackers disagree on the rest."""
        self._step = step
        numbers = {name: number for name, value in metrics.items() if isinstance(number := plain(value), int | float)}
        self._sender.submit(self._send, step, numbers)

    def on_completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send some of them, of fewer steps the longer the run is; of none unless asked to."""
        if not (self._completions and rows and step % self._every == 0):
            return
        self._tables += 1
        if is_due(self._tables):
            self._sender.submit(self._send_completions, step, *bounded_table(rows, self._completions))

    def on_event(self, kind: str, message: str) -> None:
        """Send the sentence; of a run with very many the first 500."""
        if len(self._events) == MOST_EVENTS:
            return
        last = len(self._events) == MOST_EVENTS - 1
        text = "further events are in events.jsonl of the run folder" if last else bounded_text(message, 2_000)
        self._events.append([self._step, bounded_text(kind, 100), text])
        self._sender.submit(self._send_events, list(self._events))

    def on_run_end(self, status: str) -> None:
        """Send what is left, and wait for it for a while."""
        self.on_event("run", status)
        self._sender.submit(self._finish, status)
        self._sender.close()

    # What a tracker does with it, in the other thread:
    @abstractmethod
    def _start(self, config: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """Begin, or go on with the run of `info["run_id"]` where `info["start_step"]` is above 0."""

    @abstractmethod
    def _send(self, step: int, numbers: dict[str, float]) -> None: ...

    @abstractmethod
    def _send_completions(self, step: int, columns: list[str], rows: list[list[Any]]) -> None: ...

    @abstractmethod
    def _send_events(self, every: list[list[Any]]) -> None:
        """Pass the last sentence on; `every` has all so far as step, kind, message, for trackers that store tables."""

    @abstractmethod
    def _finish(self, status: str) -> None: ...


class TensorBoardTracker(_Tracker):
    """Writes event files into `<run folder>/tensorboard`; a resumed run hides what it does again."""

    package = "torch.utils.tensorboard"

    def _start(self, config: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        start = int(info.get("start_step") or 0)
        again = start + 1 if start else None
        self._writer = self._module.SummaryWriter(str(self._folder / "tensorboard"), purge_step=again)
        if not start:
            self._write("config", json.dumps(config, indent=1), 0)

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def _send_completions(self, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        told = ("\n".join(f"{name}: {value}" for name, value in zip(columns, row, strict=True)) for row in rows)
        self._write("completions", "\n\n".join(told), step)

    def _send_events(self, every: list[list[Any]]) -> None:
        step, kind, message = every[-1]
        self._write(f"event/{kind}", message, step)

    def _write(self, tag: str, text: str, step: int) -> None:
        """As a block of code: TensorBoard takes text for Markdown, and a completion may be anything."""
        self._writer.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), step)

    def _finish(self, status: str) -> None:
        self._writer.close()


class TrackioTracker(_Tracker):
    """trackio; a run of the same name is continued. Weights & Biases has its interface: `init`, `log`, `Table`."""

    package = "trackio"

    def _start(self, config: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        project = str(info.get("project") or "covey")
        self._module.init(project=project, name=self._name, config=config, **self._options(info))

    def _options(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return {"resume": "allow"}

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        self._module.log(numbers, step=step)

    def _send_completions(self, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        self._module.log({"completions": self._table(columns, rows)}, step=step)

    def _send_events(self, every: list[list[Any]]) -> None:
        if is_due(len(every)) or every[-1][1] == "run":  # a table is stored anew each time that it is sent
            self._module.log({"events": self._table(["step", "kind", "message"], every)}, step=every[-1][0])

    def _finish(self, status: str) -> None:
        self._module.finish()

    def _table(self, columns: list[str], rows: list[list[Any]]) -> Any:
        return self._module.Table(columns=columns, data=rows, allow_mixed_types=True)


class WandbTracker(TrackioTracker):
    """Weights & Biases. The run's own id is used there too, so a resume continues the same curves."""

    package = "wandb"

    def _options(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return {"id": info.get("run_id"), "resume": "allow", "dir": str(self._folder)}


class MLflowTracker(_Tracker):
    """MLflow, at `MLFLOW_TRACKING_URI` or in `<run folder>/mlflow`. A resume finds it by the tag `covey.run_id`."""

    package = "mlflow"

    def _start(self, config: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        database = f"sqlite:///{self._folder / 'mlflow' / 'mlflow.db'}"
        own = "MLFLOW_TRACKING_URI" not in os.environ
        if own:
            (self._folder / "mlflow").mkdir(exist_ok=True)
        self._client = self._module.MlflowClient(tracking_uri=database if own else None)
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME") or str(info.get("project") or "covey")
        experiment = self._client.get_experiment_by_name(project)
        where = {"artifact_location": (self._folder / "mlflow" / "artifacts").as_uri()} if own else {}
        number = self._client.create_experiment(project, **where) if experiment is None else experiment.experiment_id
        run_id = str(info.get("run_id") or self._name)
        before = self._client.search_runs([number], f"tags.`covey.run_id` = '{run_id}'", max_results=1)
        if before:
            self._run = before[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        made = self._client.create_run(number, run_name=self._name, tags={"covey.run_id": run_id})
        self._run = made.info.run_id
        for section, fields in config.items():
            settings = fields.items() if isinstance(fields, Mapping) else [("", fields)]
            known = [(f"{section}.{name}".rstrip("."), bounded_text(str(value), 500)) for name, value in settings]
            self._client.log_batch(self._run, params=[self._module.entities.Param(*entry) for entry in known[:100]])

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        now = int(1000 * time.time())
        known = ((re.sub(r"[^\w/:. -]", "_", name)[:250], float(value)) for name, value in numbers.items())
        metrics = [self._module.entities.Metric(name, value, now, step) for name, value in known]
        for start in range(0, len(metrics), 500):
            self._client.log_batch(self._run, metrics=metrics[start : start + 500])

    def _send_completions(self, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        text = json.dumps({"columns": columns, "data": rows}, indent=1)
        self._client.log_text(self._run, text, f"completions/step_{step:06d}.json")

    def _send_events(self, every: list[list[Any]]) -> None:
        lines = (f"step {at} {what}: {said}\n" for at, what, said in every)
        # Stored anew each time; a resume has a file of its own.
        self._client.log_text(self._run, "".join(lines), f"events/from_step_{every[0][0]:06d}.txt")

    def _finish(self, status: str) -> None:
        self._client.set_terminated(self._run, {"finished": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED"))


_TRACKERS: dict[str, Callable[[Path, str, int, int], Observer]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MLflowTracker,
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
    report_completions: int = 0,
) -> Observers:
    """Put together who watches a run: the run folder, the screen (`console`), and trackers, which need a run folder.

    Args:
        report_to: "tensorboard", "wandb", "trackio", "mlflow", several of them, or "none".
        run_folder: an open folder to write to.
        run_name: name at the trackers; None = the folder's name.
        console: False = nothing on the screen, True = standard error, or a console of your own.
        logging_steps: steps between printed lines and between points sent to trackers; the run folder gets every step.
        log_completions: write completions to the run folder.
        num_completions_to_print: completions shown on the screen with each line.
        report_completions: completions that trackers are sent with each point; 0 = none.

    Raises `ConfigError`: an unknown tracker, or one whose package is not installed.
    """
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    observers = Observers()
    if run_folder is not None:
        observers.add(RunFolderWriter(run_folder, log_completions=log_completions))
    if console is not False:
        screen = None if console is True else console
        shown: dict[str, Any] = {"logging_steps": logging_steps, "num_completions_to_print": num_completions_to_print}
        observers.add(ConsoleProgress(screen, **shown))
    for name in dict.fromkeys(each for each in names if each != "none"):
        if name not in _TRACKERS:
            raise ConfigError(f"report_to={name!r}: no such tracker; {nearest(name, [*_TRACKERS, 'none'])}")
        if run_folder is None:
            raise ConfigError(f"report_to={name!r}: a tracker needs a run folder; set run.output_dir")
        label = run_name or run_folder.path.name
        observers.add(_TRACKERS[name](run_folder.path, label, logging_steps, report_completions))
    return observers
