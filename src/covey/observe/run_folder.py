"""The run folder: all that a run leaves behind, and all that a resume needs.

    config.toml             what was asked for
    versions.json           run id, programs, machine
    schema.json             the JSON schema of answers, of a task that has one
    metrics.jsonl           one line for each step and each evaluation
    questions.jsonl         one line for each step: of each question's completions, how many were right
    completions/            step_000012.parquet: what was sampled, with rewards and advantages;
                            eval_000012.parquet: the same for an evaluation
    ledger/                 step_000012.parquet: what tokens got; see covey.training.ledger
    batches/                step_000012.parquet: what the step was trained on; see covey.training.stored_steps
    pictures/               the pictures of prompts, each once; files named by the SHA-256 of their content
    checkpoints/            step_000010/: see covey.training.checkpoint
    samplers.json           who samples, with which weights
    best/ adapter/          the best and the final policy, for use elsewhere
    learning_curve.png      drawn from metrics.jsonl
    events.jsonl log.txt    what happened, for programs and for people
    mcp.log                 what a run that `covey mcp` started printed
    run.lock                held by the process that writes

Everything but the appended files is written aside and renamed, so a kill leaves nothing half-written.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shlex
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from covey import files
from covey.errors import RunFolderError
from covey.observe.completions import read_table
from covey.observe.folder_lock import FolderLock
from covey.observe.records import JsonLines, Record, is_answers, is_metrics, read_json, read_json_lines, write_table

DEFAULT_FREE_BYTES = 200_000_000
TableKind = Literal["step", "eval", "ledger", "batch"]
_PICTURES, _LARGEST_PICTURE = ("png", "jpg", "webp"), 256 << 20
STARTED_LOG = "mcp.log"
_IGNORED = {FolderLock.NAME, STARTED_LOG, ".DS_Store"}
_FOLDERS = ("completions", "checkpoints", "ledger", "batches", "best", "adapter", "pictures")
_FILES = (
    *("config.toml", "versions.json", "metrics.jsonl", "questions.jsonl", "events.jsonl", "log.txt"),
    *("schema.json", "samplers.json", "learning_curve.png", FolderLock.NAME),
)
_OTHERS = ("memory.json", "tensorboard", "mlflow", "wandb")  # of trackers, and of ranks whose memory ran out
# What `create` makes before the caller writes anything.
_FRESH = {"versions.json", "metrics.jsonl", "questions.jsonl", "events.jsonl", "completions", "checkpoints"}


class RunFolder:
    """A run on disk. Make one with `create` (new run), `open` (resume) or `read` (look only).

    A context manager: leaving the block closes it and gives the lock back. The paths of all that is in it are
    attributes: `config_path`, `metrics_path`, `completions`, `best` and so on.
    """

    def __init__(self, path: Path, *, writable: bool, overwrite: bool | None = None) -> None:
        """Use `create`, `open` or `read` instead."""
        self.path = path
        self.config_path, self.versions_path = path / "config.toml", path / "versions.json"
        self.metrics_path, self.questions_path = path / "metrics.jsonl", path / "questions.jsonl"
        self.events_path, self.log_path = path / "events.jsonl", path / "log.txt"
        self.curve_path, self.samplers_path = path / "learning_curve.png", path / "samplers.json"
        self.completions, self.checkpoints, self.ledger, self.batches, self.best, self.adapter, self.pictures = (
            path / name for name in _FOLDERS
        )
        self._lock: FolderLock | None = None
        for name in _FILES + _FOLDERS:
            files.require_kind(path / name, folder=name in _FOLDERS)
        if writable:
            self._lock = FolderLock(path)
            try:
                if overwrite is not None and self.is_run(path):
                    self._require_replaceable(overwrite)  # again: now nobody else writes
                    self._clear()
                for folder in (path, self.checkpoints, self.completions):
                    with files.explained(path):
                        folder.mkdir(exist_ok=True)
                    files.remove_leftovers(folder)
                self._metrics = JsonLines(self.metrics_path, is_metrics)
                self._questions = JsonLines(self.questions_path, is_answers)
                self._events = JsonLines(self.events_path)
            except BaseException:
                self._lock.release()
                raise

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        resume: bool = False,
        overwrite: bool = False,
        needed_bytes: int = DEFAULT_FREE_BYTES,
        needs_python: bool = False,
    ) -> RunFolder:
        """Make a folder for a new run, finding out now, not after an hour, whether it can be written.

        Args:
            path: the folder (`run.output_dir`); parents are created.
            resume: open the run that is already there, if there is one.
            overwrite: delete the run that is there; one without a finished step is deleted in any case.
            needed_bytes: refuse when less than this is free: an estimate of what the run will write.
            needs_python: the run has parts that no file holds, so that only its own program can continue it.

        Raises `RunFolderError`: another run or other files are in it, it cannot be written, the disk is too full, or
        another process is writing it.
        """
        folder = Path(path).expanduser().absolute()
        if resume and cls.is_run(folder):
            return cls.open(folder, needed_bytes=needed_bytes)
        cls.check_new(path, overwrite=overwrite, needed_bytes=needed_bytes)
        with files.explained(folder, "create the run folder"):
            folder.mkdir(parents=True, exist_ok=True)
        _probe(folder, needed_bytes)
        with contextlib.ExitStack() as undo:
            run = undo.enter_context(cls(folder, writable=True, overwrite=overwrite))
            known = {"run_id": uuid.uuid4().hex[:12], "needs_python": needs_python, **collect_versions()}
            files.write_atomically(run.versions_path, json.dumps(known, indent=1) + "\n")
            undo.pop_all()
        return run

    @classmethod
    def check_new(
        cls, path: str | os.PathLike[str], *, overwrite: bool = False, needed_bytes: int = DEFAULT_FREE_BYTES
    ) -> None:
        """Find out whether `create` would work, and raise what it would, before a model is loaded. Changes nothing."""
        folder = Path(path).expanduser().absolute()
        if there := cls.is_run(folder):
            FolderLock(folder).release()  # nobody writes it
            cls.read(folder)._require_replaceable(overwrite)
        with files.explained(folder, "create the run folder"):
            present = [entry.name for entry in folder.iterdir()] if folder.exists() and not there else []
        foreign = sorted(name for name in present if name not in _IGNORED | _FRESH and not files.is_leftover(name))
        if foreign:
            held = f"is not empty (it holds {', '.join(foreign[:3])}) and is not a Covey run"
            raise RunFolderError(f"{path} {held}; choose another run.output_dir")
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        effective = os.access in os.supports_effective_ids
        if existing.is_dir() and not os.access(existing, os.W_OK | os.X_OK, effective_ids=effective):
            raise files.folder_error(existing, PermissionError(errno.EACCES, "permission denied"))
        files.require_free_space(folder, needed_bytes, "the run")

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, needed_bytes: int = DEFAULT_FREE_BYTES) -> RunFolder:
        """Open a run to write on: lock it, clear up after a kill; `RunFolderError`: no run, not writable, or in use."""
        folder = cls._existing(path)
        _probe(folder, needed_bytes)
        with contextlib.ExitStack() as undo:
            run = undo.enter_context(cls(folder, writable=True))
            now, before = collect_versions(), run.versions()
            changed = {name: value for name, value in now.items() if before.get(name) != value}
            if changed:
                was = ", ".join(f"{name} {before.get(name)} -> {value}" for name, value in sorted(changed.items()))
                run.append_event("versions", f"resumed with other versions: {was}")
            undo.pop_all()
        return run

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Open a run to look at, even while it runs: no lock, no change; `RunFolderError`: there is no run."""
        return cls(cls._existing(path), writable=False)

    @classmethod
    def is_run(cls, path: str | os.PathLike[str]) -> bool:
        """True when the folder holds a Covey run; False also for what cannot be the path of a folder."""
        try:
            return (Path(path).expanduser() / "versions.json").is_file()
        except (OSError, RuntimeError):  # too long a name, no such user's home
            return False

    @classmethod
    def _existing(cls, path: str | os.PathLike[str]) -> Path:
        if problem := files.no_path(path):
            raise RunFolderError(f"{os.fspath(path)!r:.100}: {problem}")
        if not cls.is_run(path):
            there = Path(path).absolute()
            found = [name for name in ("config.toml", "metrics.jsonl", "checkpoints") if os.path.exists(there / name)]
            fix = "check the path, or start a run with `covey train`"
            if found:
                fix = f"{' and '.join(found)} of one are there, so it was lost: restore it from a backup"
            raise RunFolderError(f"{path} holds no run (it has no versions.json); {fix}")
        return Path(path).expanduser().absolute()

    @property
    def run_id(self) -> str:
        """Twelve hex digits that name this run for good; a copied folder keeps them."""
        return str(self.versions()["run_id"])

    @property
    def needs_python(self) -> bool:
        """True for a run with parts that no file holds, such as a function or a dataset in memory."""
        return self.versions().get("needs_python") is True

    def whole_config(self) -> Path:
        """`config.toml`, uncut: a lost setting would take its default silently; `RunFolderError` if gone or cut."""
        fix = "restore it from a backup, or write it anew with `covey config RECIPE` and what was overridden"
        if not self.config_path.exists():
            if not any(self.checkpoints.glob("step_*")) and not self.read_metrics():
                raise RunFolderError(
                    f"{self.path}: the run was killed before it began, nothing is in it; start it with `covey train`"
                )
            raise RunFolderError(f"{self.path}: its config.toml is gone, and with it the settings to go on with; {fix}")
        with files.explained(self.config_path, "read"):
            lines = self.config_path.read_bytes().splitlines()
        if b"[run]" not in lines:  # the last section
            raise RunFolderError(f"{self.config_path}: was cut, it has no section [run]; {fix}")
        return self.config_path

    def how_to_continue(self) -> str:
        """What the user is to do after a stop."""
        if self.needs_python:
            return "`trainer.train(resume_from_checkpoint=True)` in the Python program that started it"
        return f"`covey resume {shlex.quote(str(self.path))}`"

    def _require_replaceable(self, overwrite: bool) -> None:
        """RunFolderError where a new run would delete finished steps, or weights, and nobody has asked for that."""
        saved = [int(path.name[5:]) for path in self.checkpoints.glob("step_*") if path.name[5:].isdecimal()]
        steps = max([self.last_step(), *saved])
        if not overwrite and (steps or self.best.exists() or self.adapter.exists()):
            raise RunFolderError(
                f"{self.path} holds another run (finished steps: {steps}); continue it with {self.how_to_continue()}, "
                "delete it with run.overwrite=true (in Python overwrite=True and a new GRPOTrainer), or "
                "choose another run.output_dir"
            )

    def _clear(self) -> None:
        """Delete the run that is there, and nothing else; `versions.json` last, so that a kill leaves a run."""
        known = {*_FILES, *_FOLDERS, *_OTHERS} - {FolderLock.NAME, self.versions_path.name}
        for path in [*(self.path / name for name in known), *self.path.glob("config_until_*.toml"), self.versions_path]:
            files.remove(path)

    # ------------------------------------------------------------------ writing
    def write_config(self, toml: str) -> None:
        """Write the settings of the run to `config.toml`. This and all below raise RunFolderError where they cannot."""
        files.write_atomically(self.config_path, toml)

    def write_schema(self, schema: Mapping[str, Any]) -> None:
        """Write the JSON schema of the run's answers to `schema.json`."""
        files.write_atomically(self.path / "schema.json", json.dumps(schema, indent=2, ensure_ascii=False) + "\n")

    def change_config(self, toml: str, step: int) -> None:
        """Write the settings of a resume after `step`; others that it had are kept in `config_until_000012.toml`."""
        with files.explained(self.config_path, "read"):
            former = self.config_path.read_bytes()
        if former != toml.encode():
            files.write_atomically(self.path / f"config_until_{step:06d}.toml", former)
            self.write_config(toml)

    def append_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append `{"step": step, **metrics}` to `metrics.jsonl`; NaN and infinities are written as null."""
        self._metrics.append({"step": step, **metrics})

    def append_answers(self, step: int, answers: Mapping[str, Sequence[int]]) -> None:
        """Append `{"step": step, "answers": {uid: [right, all]}}` to `questions.jsonl`."""
        self._questions.append({"step": step, "answers": answers})

    def append_event(self, kind: str, message: str) -> None:
        """Append to `events.jsonl`, with the time (seconds since 1970), and to `log.txt`."""
        now = time.time()
        self._events.append({"time": now, "kind": kind, "message": message})
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        with files.explained(self.log_path), self.log_path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"{stamp} {kind}: {message}\n")

    def write_completions(self, step: int, rows: Sequence[Mapping[str, Any]], kind: TableKind = "step") -> Path | None:
        """Write the rows of a `table` (see `write_table`); without rows nothing is written."""
        if not rows:
            return None
        path = self.table(step, kind)
        with files.explained(path.parent):
            path.parent.mkdir(exist_ok=True)
        write_table(path, rows)
        return path

    def write_samplers(self, step: int, members: Sequence[Mapping[str, Any]]) -> None:
        """Write `samplers.json`: who samples after a step; without members it goes, if there is one."""
        if members:
            files.write_atomically(self.samplers_path, json.dumps({"step": step, "samplers": members}) + "\n")
            return
        with files.explained(self.samplers_path):
            self.samplers_path.unlink(missing_ok=True)

    def write_batch(self, step: int, content: bytes) -> None:
        """Write `batches/step_000012.parquet`: what a step was trained on."""
        with files.explained(self.batches):
            self.batches.mkdir(exist_ok=True)
        files.write_atomically(self.table(step, "batch"), content)

    def write_pictures(self, pictures: Iterable[Any]) -> None:
        """Write those of the pictures (`covey.tasks.pictures`) to `pictures/` that are not there."""
        for picture in pictures:
            path = self.pictures / f"{picture.sha256}.{picture.ending}"
            if not path.exists():
                with files.explained(self.pictures):
                    self.pictures.mkdir(exist_ok=True)
                files.write_atomically(path, picture.data)

    def read_picture(self, sha256: str) -> tuple[bytes, str]:
        """The content of a picture's file, and the ending of its name. Raises `RunFolderError`: it is not whole."""
        for ending in _PICTURES if re.fullmatch("[0-9a-f]{64}", sha256) else ():
            path = self.pictures / f"{sha256}.{ending}"
            if path.exists():
                with files.explained(path, "read"), files.open_regular(path) as file:
                    data = file.read(_LARGEST_PICTURE)
                if hashlib.sha256(data).hexdigest() == sha256:
                    return data, ending
        raise RunFolderError(f"{self.pictures}: there is no whole file of the picture {sha256:.64}; restore it")

    def sync(self) -> None:
        """Wait until metrics and events are on the disk. Call it before a checkpoint is written."""
        for lines in (self._metrics, self._questions, self._events):
            lines.sync()

    def truncate_after(self, step: int) -> None:
        """Forget metrics and completions later than `step`: those of the steps that a resume does again."""
        for lines in (self._metrics, self._questions):
            lines.keep(lambda record: record["step"] <= step)
        with files.explained(self.completions, "clean up"):
            for kind in get_args(TableKind):
                for later in (number for number in self.completion_steps(kind) if number > step):
                    self.table(later, kind).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files and give the lock back. Calling it again does nothing."""
        if self._lock is not None:
            for lines in (self._metrics, self._questions, self._events):
                lines.close()
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # ------------------------------------------------------------------ reading
    def versions(self) -> Record:
        """What `versions.json` holds: run id, programs and machine."""
        with files.explained(self.versions_path, "read"):
            versions = read_json(self.versions_path.read_bytes(), dict)
        if versions is None or not isinstance(versions.get("run_id"), str) or not versions["run_id"]:
            what = "is damaged: it is not a JSON object with a run_id; restore it from a backup"
            raise RunFolderError(f"{self.versions_path} {what}")
        return versions

    def read_metrics(self) -> list[Record]:
        """All lines of `metrics.jsonl`, oldest first; null stands for NaN or infinity."""
        return read_json_lines(self.metrics_path, is_metrics)

    def read_answers(self) -> list[Record]:
        """All lines of `questions.jsonl`, oldest first."""
        return read_json_lines(self.questions_path, is_answers)

    def read_events(self) -> list[Record]:
        """All lines of `events.jsonl`, oldest first."""
        return read_json_lines(self.events_path)

    def table(self, step: int, kind: TableKind = "step") -> Path:
        """The file of a step's completions ("step"), of the evaluation after it, of its ledger, or of its batch."""
        folder = {"ledger": self.ledger, "batch": self.batches}.get(kind, self.completions)
        return folder / f"{'eval' if kind == 'eval' else 'step'}_{step:06d}.parquet"

    def read_completions(self, step: int, kind: TableKind = "step") -> list[Record]:
        """The rows of a `table`."""
        return read_table(self.table(step, kind), limited=False)

    def completion_steps(self, kind: TableKind = "step", most: int | None = None) -> list[int]:
        """Steps that have such a `table`, ascending, of `most` entries of the folder."""
        folder, stem = self.table(0, kind).parent, self.table(0, kind).name[:4]
        with files.explained(folder, "read"):
            names = [path.name for path in itertools.islice(folder.iterdir(), most)] if folder.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := re.fullmatch(rf"{stem}_(\d{{6,}})\.parquet", name)))

    def last_state(self) -> str:
        """What the events told last of the run: started, resumed at step N, finished, stopped, failed; "" = nothing."""
        return next((str(event.get("message")) for event in self.read_events()[::-1] if event.get("kind") == "run"), "")

    def failure(self) -> str:
        """Why the run failed and how to go on, if that is its end; else ""."""
        told = [str(event.get("message")) for event in self.read_events() if event.get("kind") == "failed"]
        return told[-1] if told and self.last_state() == "failed" else ""

    def describe_weights(self, path: Path) -> str:
        """Of which step `best` or `adapter` are, as the run's events tell it."""
        kind = "adapter" if path == self.adapter else "best"
        said = [str(event.get("message")) for event in self.read_events() if event.get("kind") == kind]
        if kind == "adapter":
            return f"{path} ({said[-1].partition(', is in ')[0]})" if said else f"{path}, the end of the run"
        step = f": {said[-1]}" if said else ""
        if self.adapter.exists():
            return f"{path}, the best evaluation{step}"
        return f"{path}, the best evaluation so far{step}; the run has no adapter/ yet"

    def last_logged_step(self) -> int:
        """The last step that `metrics.jsonl` tells of, 0 before the first."""
        return max((record["step"] for record in self.read_metrics()), default=0)

    def last_step(self) -> int:
        """The last step that anything in the folder tells of: metrics, answers, or tables of completions."""
        answered = max((record["step"] for record in self.read_answers()), default=0)
        return max([self.last_logged_step(), answered, *self.completion_steps(), *self.completion_steps("eval")])


def collect_versions() -> Record:
    """Programs and machine, for `versions.json`. Reads package metadata; imports nothing heavy."""
    versions: Record = {"python": platform.python_version()}
    for name in ("covey", "torch", "transformers", "peft", "numpy"):
        versions[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    versions |= {"platform": platform.platform(), "machine": platform.machine(), "cpu_count": os.cpu_count()}
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        versions["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            versions["cuda_device"] = torch.cuda.get_device_name()
    return versions


def _probe(folder: Path, needed_bytes: int) -> None:
    """Fail now if the folder cannot be written."""
    with files.explained(folder), tempfile.TemporaryFile(dir=folder):
        pass
    files.require_free_space(folder, needed_bytes, "the run")
