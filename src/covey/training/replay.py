"""Audit a step of a run: computed once more from the run folder alone, and compared with what was recorded.

    report = replay("runs/first", 12)
    report.agrees            # nothing differs

The batch is rebuilt from `batches/`. Weights come from the newest checkpoint before the step; steps in between are done
again, without sampling. Formulas are those of the trainer, called here a second time. Nothing is written, no lock is
taken, and what is read is checked: a folder may be anybody's. Losses and estimators in files that the settings name are
executed, as in a resume; reward functions are not called, their rewards are stored.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import numpy as np

from covey.config.whole import GRPOConfig
from covey.distributed.ranks import Ranks
from covey.distributed.replicated import SharedPacks
from covey.errors import CheckpointError, ConfigError, RunFolderError, several
from covey.files import folder_problem
from covey.observe.run_folder import RunFolder, collect_versions
from covey.rollout.batching import make_batch
from covey.rollout.learning import Learner, TrainedPolicy
from covey.tasks.pictures import read_picture
from covey.training import setup
from covey.training.checkpoint import (
    Checkpoint,
    checked_state,
    checkpoint_name,
    damage_explained,
    list_checkpoints,
    load_checkpoint,
    restore_random,
)
from covey.training.schedule import Elapsed, TrainerState
from covey.training.step import scorer, step_update
from covey.training.stored_steps import StoredStep, read_step
from covey.training.teaching import make_teacher
from covey.training.update import Update
from covey.types import Taught, Teacher

EXACT, ALIKE, HALF = 1e-6, 1e-3, 3e-2
"""Tolerances: of what the same program computes on the same machine; of what another one does, in float32; and with
weights or passes in half precision.
"""
_WHERE = ("model.model", "model.adapter", "model.device")
"""Settings that say where things are; they change nothing in what the run has done."""
_PROGRAMS = ("covey", "torch", "numpy", "platform", "machine", "threads")


@dataclass(slots=True)
class Check:
    """One comparison: values, those not equal bit for bit, the largest difference, and those beyond the tolerance."""

    name: str
    tolerance: float
    compared: int = 0
    unequal: int = 0
    largest: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def values(self, where: str, recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> None:
        """Compare all that was replayed with what was recorded under its name; NaN, in files null, equals itself."""
        for name, value in replayed.items():
            self.compared += 1
            before, after = _plain(recorded.get(name, "nothing")), _plain(value)
            if before == after:
                continue
            self.unequal += 1
            if isinstance(before, int | float) and isinstance(after, int | float):
                self.largest = max(self.largest, abs(before - after))
                if abs(before - after) <= self.tolerance * max(1.0, abs(before)):
                    continue
            self.wrong.append(f"{where} {name}: recorded {before!r:.200}, replayed {after!r:.200}")

    def tensors(self, recorded: Mapping[str, Mapping[str, Any]], replayed: Mapping[str, Mapping[str, Any]]) -> None:
        """Compare the tensors of a checkpoint with those of a learner, each as one value by its largest difference."""
        for group in sorted({*recorded, *replayed}):
            known, found = recorded.get(group, {}), replayed.get(group, {})
            for name in sorted({*known, *found}):
                self.compared += 1
                before, after = (_wide(each[name]) if name in each else None for each in (known, found))
                if before is None or after is None or before.shape != after.shape:
                    self.wrong.append(f"{group} {name}: it is not there, or has another shape")
                    continue
                apart = np.abs(before - after)
                self.unequal += not np.array_equal(before, after)
                self.largest = max(self.largest, float(apart.max(initial=0.0)))
                if (apart > self.tolerance * np.maximum(1.0, np.abs(before))).any():
                    self.wrong.append(f"{group} {name}: {apart.max():.3g} apart")


@dataclass(slots=True)
class Report:
    """What a replay found; `numbers` are the step's metrics, as recorded and as replayed."""

    run: str
    step: int
    checks: list[Check] = field(default_factory=list)
    numbers: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Nothing differs by more than its tolerance."""
        return not any(check.wrong for check in self.checks)

    @property
    def exact(self) -> bool:
        """Everything is equal bit for bit."""
        return self.agrees and not any(check.unequal for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """For programs; plain values."""
        metrics = {name: {"recorded": a, "replayed": b} for name, (a, b) in self.numbers.items()}
        found = {"run": self.run, "step": self.step, "agrees": self.agrees, "exact": self.exact}
        return found | {"notes": self.notes, "checks": [asdict(check) for check in self.checks], "metrics": metrics}


def replay(
    run: str | os.PathLike[str],
    step: int | None = None,
    moved: Sequence[str] = (),
    *,
    tolerance: float | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> Report:
    """Compute a step again, the newest that was kept unless one is named, and compare.

    `moved` says where the run's things are now, such as `model.model=PATH`; with `tolerance` 0 bits are compared.

    Raises:
        RunFolderError: there is no such step, or what is needed is missing or damaged.
        ConfigError: settings that say something else than where things are.
        ModelError: the model is not there, or another one.
        CheckpointError: the step cannot be reached from the weights that there are.
    """
    folder = RunFolder.read(run)
    if step is None:
        step = (folder.completion_steps("batch") or [1])[-1]
    report, config = Report(str(run), step), _settings(_stored_step(folder, step), moved)
    if tolerance is None:
        tolerance, why = _tolerance_of(folder, config)
        report.notes.append(f"tolerance {tolerance:g}: {why}")
    begun, checkpoint = _begin(report, folder, step)
    first = _stored_step(folder, begun + 1)
    rerun = _Rerun(_settings(first, moved), first, checkpoint)
    for number in range(begun + 1, step + 1):
        last = number == step
        progress(f"step {number}" if last else f"step {number} again")
        stored = _stored_step(folder, number)
        lines = [record for record in folder.read_metrics() if record["step"] == number and "phase" in record]
        if not lines:
            what = f"{folder.metrics_path} has no line of step {number}: it was lost, or the step is not finished"
            raise RunFolderError(f"{what}; choose another")
        rerun.open_pictures(folder, stored)
        done = rerun.do(stored, _settings(stored, moved))
        found = {name: value for name, value in done.metrics.items() if not name.startswith("time/")}
        check = Check("metrics" if last else f"metrics of step {number}, done again on the way", tolerance)
        check.values("metrics.jsonl", lines[-1], found)
        report.checks.append(check)
        _check_checkpoint(report, folder, rerun, tolerance)
    report.numbers = {name: (lines[-1][name], value) for name, value in found.items() if name in lines[-1]}
    return report


# ---------------------------------------------------------------------- what is stored


def _stored_step(folder: RunFolder, step: int) -> StoredStep:
    path, kept = folder.table(step, "batch"), folder.completion_steps("batch")
    if path.exists():
        return read_step(path, step)
    why = "there is no batches/, so no step of it can be computed again; a run keeps them with run.keep_batches=true"
    if kept:
        held = several(len(kept), "step")
        why = f"step {step} is not in batches/, which has {held} from {kept[0]} to {kept[-1]}; choose one"
    raise RunFolderError(f"{folder.path}: {why}")


def _settings(stored: StoredStep, moved: Sequence[str]) -> GRPOConfig:
    """The settings that a step was trained with, with things where they are now."""
    settings: dict[str, Any] = stored.facts.settings
    try:
        with warnings.catch_warnings(action="ignore"):  # the run has said them
            config = GRPOConfig(**settings)
    except (ConfigError, TypeError) as error:
        raise RunFolderError(
            f"batches/step_{stored.facts.step:06d}.parquet: its settings are not those of a run ({str(error)[:300]}); "
            "restore it from a backup"
        ) from error
    for override in moved:
        if override.partition("=")[0].strip() not in _WHERE:
            raise ConfigError(
                f"{override}: a step is computed again with the settings that it had; only {', '.join(_WHERE)} can be "
                "given, where things have moved"
            )
    return config.with_overrides(moved) if moved else config


# ---------------------------------------------------------------------- doing it again


def _tolerance_of(folder: RunFolder, config: GRPOConfig) -> tuple[float, str]:
    now, before = collect_versions(), folder.versions()
    different = [name for name in _PROGRAMS if now.get(name) != before.get(name)]
    why = ", ".join(f"{name} {before.get(name)!s:.60} there, {now.get(name)!s:.60} here" for name in different)
    if "cuda_device" in now or "cuda_device" in before:
        why = "a CUDA device adds up in any order"
    if not why:
        return EXACT, "versions, machine and threads are the run's"
    narrow = ("bfloat16", "float16", *(["auto"] if "cuda_device" in before else []))
    half = config.model.dtype in narrow or config.optim.autocast != "none"
    return (HALF if half else ALIKE), why


def _begin(report: Report, folder: RunFolder, step: int) -> tuple[int, Checkpoint | None]:
    """The newest whole checkpoint before the step, and its step; 0 and None for the weights that the run began with."""
    check = Check("checkpoints", 0.0)
    report.checks.append(check)
    paths = {int(path.name[5:]): path for path in list_checkpoints(folder.checkpoints)}
    for number in sorted((n for n in {0, *paths} if n < step), reverse=True):
        missing = sorted(set(range(number + 1, step)) - set(folder.completion_steps("batch")))
        if missing:
            raise CheckpointError(
                f"{folder.path}: step {step} is reached from the weights after step {number}, the newest that can be "
                f"used, and {', '.join(map(str, missing[:10]))} of the steps between are not in batches/; choose a "
                "step that follows a checkpoint (run.keep_batches keeps batches, run.save_steps says how often there "
                "are checkpoints)"
            )
        if number == 0:
            break
        check.compared += 1
        if problem := folder_problem(paths[number]):
            check.wrong.append(f"{paths[number].name}: {problem}")
            continue
        report.notes.append(f"weights: checkpoints/{checkpoint_name(number)}")
        return number, load_checkpoint(paths[number], run_id=folder.run_id)
    report.notes.append("weights: those that the run began with, built anew")
    return 0, None


class _Rerun:
    """Policy, learner and counters of a run, moved on with the batches that are stored, without sampling."""

    def __init__(self, config: GRPOConfig, first: StoredStep, checkpoint: Checkpoint | None) -> None:
        from covey.pytorch.backend import BACKEND, PyTorchBackend

        # Several ranks add gradients in fixed point, whose sum one process has bit for bit too.
        backend = PyTorchBackend(SharedPacks(Ranks())) if first.facts.learner.startswith("Leading") else BACKEND
        backend.check(config)
        self.policy: TrainedPolicy = backend.make_policy(config)
        self.learner: Learner = backend.make_learner(config, self.policy)
        self.state = TrainerState()
        if checkpoint is not None:
            chosen_by = str(_counters(checkpoint).get("best_metric_name"))
            self.state = checked_state(checkpoint, self.learner.tensors(), chosen_by)
            with damage_explained(checkpoint):
                restore_random(checkpoint.state["random"])
                self.learner.restore(checkpoint.tensors, self.state.updates)

    def open_pictures(self, folder: RunFolder, stored: StoredStep) -> None:
        """Read the pictures that a step was trained on."""
        album: Any = getattr(self.policy, "album", None)
        if stored.facts.pictures and album is None:
            raise RunFolderError(f"step {stored.facts.step} was trained on pictures, and the model reads none")
        files = ((each, folder.read_picture(each)[0]) for each in stored.facts.pictures)
        if album is not None:
            album.hold([read_picture(data, f"picture {sha256}") for sha256, data in files])

    def do(self, stored: StoredStep, config: GRPOConfig) -> Update:
        """The step that comes next, with all its optimiser steps."""
        album: Any = getattr(self.policy, "album", None)
        every = np.concatenate([e.token_ids for group in stored.groups for e in group.episodes])
        if album is not None and not album.unknown(every):
            every = album.placeholders(every)
        largest = int(every.max())
        if largest >= self.policy.vocabulary:
            raise RunFolderError(
                f"batches/step_{stored.facts.step:06d}.parquet has the token id {largest}, and the model "
                f"{self.policy.vocabulary} embeddings: it is damaged, or of another model"
            )
        setup.check_estimator(config, cast(Any, any(group.trajectories for group in stored.groups) or None))
        plan, facts = setup.phase_plan(config), stored.facts
        count = len(config.schedule.phases)
        if facts.phase >= max(count, 1):
            raise RunFolderError(f"batches/step_{facts.step:06d}.parquet: phase {facts.phase + 1} of {count}")
        start = {"step": 0, "tokens": 0, "seconds": 0.0}
        plan.restore({"index": facts.phase, "start": start, "learning_rate_factor": facts.learning_rate_factor})
        phase = plan.at(Elapsed())
        self.learner.tokens_per_micro_batch = stored.facts.tokens_per_micro_batch
        teacher: Teacher | None = None
        if (told := stored.taught) is not None:  # of the rows that are selected, where some are
            rows = {id(e): n for n, e in enumerate(e for group in stored.groups for e in group.episodes)}
            said = told.logprobs
            teacher = lambda _, b: Taught(said[[rows[id(e)] for e in b.episodes], : b.mask.shape[1]])  # noqa: E731
        if (how := config.algorithm.teacher) is not None and how.over_vocabulary:
            teacher = make_teacher(config, self.policy, self.learner, phase.temperature)
            if how.context != "none":
                why = f"algorithm.teacher.context={how.context!r}: contexts are not stored; replay a run without one"
                raise RunFolderError(f"step {facts.step} was trained on the teacher's distributions; {why}")
        batch = make_batch(
            stored.groups,
            config,
            reward_weights=config.rewards.reward_weights or [1.0] * len(stored.groups[0].reward_parts),
            has_answer=stored.has_answer,
            score=scorer(self.learner, phase.temperature),
            teacher=teacher,
        )
        length = setup.run_length(config, plan, stored.facts.prompts)
        done = step_update(self.learner, batch, config, phase, length, self.state, None)
        self.state.updates += done.optimizer_steps
        self.state.policy_version += done.optimizer_steps
        self.state.global_step += 1
        return done


# ---------------------------------------------------------------------- comparing


def _check_checkpoint(report: Report, folder: RunFolder, rerun: _Rerun, limit: float) -> None:
    """Weights, reference and moments after a step against a checkpoint of that step, if there is one."""
    number = rerun.state.global_step
    path = folder.checkpoints / checkpoint_name(number)
    if path not in list_checkpoints(folder.checkpoints):
        return
    check = Check(f"weights after step {number} against its checkpoint", limit)
    report.checks.append(check)
    try:
        checkpoint = load_checkpoint(path, run_id=folder.run_id)
    except CheckpointError as error:
        check.wrong.append(str(error))
        return
    check.tensors(checkpoint.tensors, rerun.learner.tensors())
    names = ("global_step", "policy_version", "updates", "entropy_coef", "last_entropy")
    check.values("state.json", _counters(checkpoint), {name: getattr(rerun.state, name) for name in names})


def _counters(checkpoint: Checkpoint) -> dict[str, Any]:
    counted = checkpoint.state.get("trainer")
    return counted if isinstance(counted, dict) else {}


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _wide(values: Any) -> np.ndarray[Any, Any]:
    """Any array or tensor in float64; PyTorch's half precisions are unknown to NumPy."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().float().numpy()
    return np.asarray(values, np.float64)
