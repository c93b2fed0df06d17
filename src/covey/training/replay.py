"""Audit a step of a run: computed once more from the run folder alone, and compared with what was recorded.

    report = replay("runs/first", 12)
    report.agrees            # nothing differs
    report = replay("runs/first", 12, ["algorithm.loss_type=dapo"])
    report.changed           # what the step would have been

The batch is rebuilt from `batches/`. Weights come from the newest checkpoint before the step; steps in between are done
again, without sampling. Formulas are those of the trainer, called here a second time. Nothing is written, no lock is
taken, and what is read is checked: a folder may be anybody's. Losses and estimators in files that the settings name are
executed, as in a resume; reward functions are not called, their rewards are stored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from covey.algorithms import combine_rewards
from covey.config.effects import uses_reference
from covey.config.whole import GRPOConfig
from covey.errors import CheckpointError, ConfigError, RunFolderError
from covey.files import folder_problem
from covey.observe.completions import listed, read_table
from covey.observe.records import Record
from covey.observe.run_folder import RunFolder, collect_versions, table_name
from covey.rollout.batching import estimator_of, trajectory_rewards
from covey.rollout.collect import Rollout
from covey.training.batches import StoredStep
from covey.training.checkpoint import Checkpoint, checkpoint_name, list_checkpoints, load_checkpoint
from covey.training.evaluate import no_answer_ratio, rollout_metrics
from covey.training.replay_changes import Changed, compare_steps
from covey.training.replay_checks import Check, all_agree, match_rows, match_tensors
from covey.training.rerun import (
    Done,
    Rerun,
    batch_of,
    needs_weights_for_masks,
    phase_of,
    reward_weights,
    settings_of,
    stored_step,
)
from covey.training.rows import completion_rows
from covey.types import Batch

EXACT, ALIKE = 1e-6, 1e-3
"""Tolerances: of what the same program computes on the same machine, and of what another one does in float32."""
HALF = 3e-2
"""The same with weights or passes in half precision."""

_WHERE = ("model.model", "model.adapter", "model.device")
"""Settings that say where things are; they change nothing in what the run has done."""
_MAY_CHANGE = ("algorithm", "rewards", "environment", "optim")
_MAY_CHANGE_TOO = ("sampling.temperature", "sampling.max_completion_length")
_PROGRAMS = ("covey", "torch", "numpy", "platform", "machine", "threads")
_COLUMNS = {
    "completions: rewards": ("reward", "rewards", "turn_rewards", "group_mean", "group_std", "group_tied"),
    "completions: advantages": ("advantage", "turn_advantages"),
    "completions: masks": ("masked_by",),
    "completions: what was sampled": (
        *("group", "sample", "uid", "completion", "length", "finish_reason", "policy_version", "logp", "ended"),
        *("success", "turns", "no_actions", "error", "row"),
    ),
}
"""Columns of the table of completions, without the number of a turn or the name of a reward function."""
_SECONDS = ("time/", "memory/")


@dataclass(slots=True)
class Report:
    """What a replay found."""

    run: str
    step: int
    checks: list[Check] = field(default_factory=list)
    numbers: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    changed: Changed | None = None

    @property
    def agrees(self) -> bool:
        """Nothing differs by more than its tolerance."""
        return all_agree(self.checks)

    @property
    def exact(self) -> bool:
        """Everything is equal bit for bit."""
        return all(check.unequal == 0 for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """For programs; plain values."""
        return {
            "run": self.run,
            "step": self.step,
            "agrees": self.agrees,
            "exact": self.exact,
            "notes": self.notes,
            "checks": [check.to_dict() for check in self.checks],
            "metrics": {name: {"recorded": a, "replayed": b} for name, (a, b) in self.numbers.items()},
            "changed": None if self.changed is None else self.changed.to_dict(),
        }


def replay(
    run: str | os.PathLike[str],
    step: int | None = None,
    overrides: Sequence[str] = (),
    *,
    start: int | None = None,
    batch_only: bool = False,
    tolerance: float | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> Report:
    """Compute a step again, and compare.

    Raises:
        RunFolderError: there is no such step, or what is needed is missing or damaged.
        ConfigError: settings that cannot be changed here, or that the step lacks something for.
        ModelError: the model is not there, or another one.
        CheckpointError: the checkpoint that was asked for cannot be used.
    """
    folder = RunFolder.read(run)
    if step is None:
        kept = folder.batch_steps()
        step = kept[-1] if kept else 1
    stored = stored_step(folder, step)
    own = settings_of(stored)
    where, changes = _sorted_out(own, overrides)
    config = _located(stored, where)
    changed = config.with_overrides(changes) if changes else None
    line = _line_of(folder, step)
    report = Report(str(run), step)
    limit = EXACT if tolerance is None else tolerance
    _check_rewards(report, stored, config, limit)
    if batch_only:
        batch = batch_of(stored, config)
        _check_tables(report, folder, stored, config, batch, limit, masks=not needs_weights_for_masks(config))
        _check_metrics(report, "metrics", _sampled(stored, config, line), line, limit, show=True)
        if changed is not None:
            report.changed = compare_steps(
                Done(batch, None), Done(batch_of(stored, changed), None), config, changed, changes
            )
        return report
    with _threads(folder, config):
        wide, why = _tolerance_of(folder, config) if tolerance is None else (tolerance, "as asked for")
        report.notes.append(f"tolerance {wide:g} for what weights have a part in: {why}")
        number, checkpoint = _begin(report, folder, step, start)
        first = stored if number + 1 == step else stored_step(folder, number + 1)
        rerun = Rerun(_located(first, where), first, checkpoint, needs_reference=uses_reference(changed or config))
        for between in range(number + 1, step):
            progress(f"step {between} again")
            passed = stored_step(folder, between)
            again = rerun.do(passed, _located(passed, where))
            name = f"metrics of step {between}, done again on the way"
            _check_metrics(report, name, again.updated.metrics, _line_of(folder, between), wide)
            _check_checkpoint(report, folder, rerun, wide)
        progress(f"step {step}")
        back = rerun.mark() if changed is not None else None
        before = rerun.tensors() if changed is not None else {}
        rows = _ledger_rows(report, folder, step)
        ledger = rerun.ledger(int(row["group"]) for row in rows if isinstance(row.get("group"), int))
        done = rerun.do(stored, config, ledger=ledger if rows else None, keep_gradient=changed is not None)
        _check_tables(report, folder, stored, config, done.updated.batch, wide, masks=True)
        found = _sampled(stored, config, line) | done.updated.metrics
        _check_metrics(report, "metrics", found, line, wide, show=True)
        if rows:
            check = Check("ledger", wide)
            match_rows(check, rows, ledger.rows)
            report.checks.append(check)
        _check_checkpoint(report, folder, rerun, wide)
        if back is not None and changed is not None:
            after = rerun.tensors()
            back(changed)
            progress(f"step {step} with {', '.join(changes)}")
            other = rerun.do(stored, changed, keep_gradient=True)
            weights = (before["policy"], after["policy"], rerun.tensors()["policy"])
            report.changed = compare_steps(done, other, config, changed, changes, weights)
    return report


# ---------------------------------------------------------------------- settings


def _sorted_out(config: GRPOConfig, overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those that say where things are, and those that change what is learned.

    Raises:
        ConfigError: one of them would be another run.
    """
    where: list[str] = []
    changes: list[str] = []
    for override in overrides:
        other = config.with_overrides([override])
        before, after = config.to_dict(), other.to_dict()
        for section, values in after.items():
            for name, value in values.items():
                path = f"{section}.{name}"
                if before[section][name] == value or section in _MAY_CHANGE or path in (*_WHERE, *_MAY_CHANGE_TOO):
                    continue
                raise ConfigError(
                    f"--set {override}: a replay has the run's samples and weights, which {path} would change; "
                    f"settings of {', '.join(_MAY_CHANGE)} can be replaced, {', '.join(_MAY_CHANGE_TOO)}, and "
                    f"{', '.join(_WHERE)} where things have moved"
                )
        moved = any(
            before["model"][path.partition(".")[2]] != after["model"][path.partition(".")[2]] for path in _WHERE
        )
        (where if moved else changes).append(override)
    return where, changes


def _located(stored: StoredStep, where: Sequence[str]) -> GRPOConfig:
    """A step's own settings, with things where they are now."""
    own = settings_of(stored)
    return own.with_overrides(where) if where else own


def _same_program(folder: RunFolder) -> str:
    """Why numbers need not be equal bit for bit; "" if they should."""
    now, before = collect_versions(), folder.versions()
    if "cuda_device" in now or "cuda_device" in before:
        return "a CUDA device adds up in any order"
    different = [name for name in _PROGRAMS if now.get(name) != before.get(name)]
    return ", ".join(f"{name} {before.get(name)!s:.60} there, {now.get(name)!s:.60} here" for name in different)


def _tolerance_of(folder: RunFolder, config: GRPOConfig) -> tuple[float, str]:
    why = _same_program(folder)
    if not why:
        return EXACT, "versions, machine and threads are the run's"
    half = "float32" not in (config.model.dtype, "") or config.optim.autocast != "none"
    return (HALF if half else ALIKE), why


@contextmanager
def _threads(folder: RunFolder, config: GRPOConfig) -> Iterator[None]:
    """As many threads as the run had, where this machine has them: PyTorch's sums depend on it."""
    wanted = folder.versions().get("threads")
    if config.model.backend != "pytorch" or type(wanted) is not int or not 1 <= wanted <= (os.cpu_count() or 1):
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------- where to begin


def _begin(report: Report, folder: RunFolder, step: int, start: int | None) -> tuple[int, Checkpoint | None]:
    """The newest weights before the step from which it can be reached: their step, and the checkpoint.

    Raises:
        CheckpointError: there are none.
    """
    kept = set(folder.batch_steps())
    paths = {int(path.name[5:]): path for path in list_checkpoints(folder.checkpoints)}
    if start is not None and start != 0 and start not in paths:
        raise CheckpointError(
            f"--from {start}: {folder.path} has no checkpoint of that step; it has {_listed(sorted(paths)) or 'none'}, "
            "and 0 is the run's beginning"
        )
    candidates = [start] if start is not None else sorted((n for n in {0, *paths} if n < step), reverse=True)
    check = Check("checkpoints", 0.0)
    report.checks.append(check)
    for number in candidates:
        if number >= step:
            raise CheckpointError(f"--from {number}: the weights before step {step} are wanted; give a step below it")
        missing = [n for n in range(number + 1, step) if n not in kept]
        if missing:
            raise CheckpointError(
                f"{folder.path}: step {step} is reached from the weights after step {number}, the newest that can be "
                f"used, and {_listed(missing)} of the steps between are not in batches/; replay a step that follows a "
                "checkpoint, or only its batch with --batch-only (run.keep_batches keeps batches, run.save_steps says "
                "how often there are checkpoints)"
            )
        if number == 0:
            report.notes.append("weights: those that the run began with, built anew")
            return 0, None
        check.compared += 1
        problem = folder_problem(paths[number])
        if problem:
            check.wrong(paths[number].name, "whole", problem)
            if start is None:
                continue
        checkpoint = load_checkpoint(paths[number], run_id=folder.run_id)
        report.notes.append(f"weights: checkpoints/{checkpoint_name(number)}")
        return number, checkpoint
    raise CheckpointError(f"{folder.path}: there are no weights before step {step}; use --batch-only")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")


# ---------------------------------------------------------------------- comparing


def _line_of(folder: RunFolder, step: int) -> Record:
    lines = [record for record in folder.read_metrics() if record["step"] == step and "phase" in record]
    if not lines:
        raise RunFolderError(
            f"{folder.metrics_path} has no line of step {step}: it was lost, or the step is not finished; replay "
            "another"
        )
    return lines[-1]


def _check_rewards(report: Report, stored: StoredStep, config: GRPOConfig, limit: float) -> None:
    """The parts of each reward add up to it; of agents, the rewards of the turns."""
    check = Check("rewards from their parts", limit)
    for number, group in enumerate(stored.groups):
        if group.trajectories:
            found = trajectory_rewards(group.trajectories, config.environment)
        elif group.reward_parts:
            parts = np.stack(list(group.reward_parts.values()))
            found = np.asarray(combine_rewards(parts, np.array(reward_weights(config, stored))))
        else:
            continue
        for sample, (before, after) in enumerate(zip(group.rewards, found, strict=True)):
            check.value(f"group {number} sample {sample} reward", before, after)
    report.checks.append(check)


def _check_tables(
    report: Report,
    folder: RunFolder,
    stored: StoredStep,
    config: GRPOConfig,
    batch: Batch,
    limit: float,
    *,
    masks: bool,
) -> None:
    """The table of completions, which has rewards, advantages and masks."""
    path = folder.completions / table_name(stored.facts.step)
    if not path.exists():
        report.notes.append("completions/ lacks the step's table (run.log_completions)")
        return
    found = completion_rows(stored.groups, batch, penalty=config.environment.invalid_action_penalty)
    recorded = [_spread(row) for row in read_table(path)]
    found = [_spread(row) for row in found]
    for name, columns in _COLUMNS.items():
        check = Check(name, limit if "advantages" in name else min(limit, EXACT))
        chosen = [{key: row[key] for key in row if key.partition("[")[0].partition("/")[0] in columns} for row in found]
        match_rows(check, recorded, chosen)
        if check.compared and (masks or name != "completions: masks"):
            report.checks.append(check)


def _spread(row: Mapping[str, Any]) -> Record:
    """A row with an entry for each turn, and text as tables hold it."""
    flat: Record = {}
    for name, value in row.items():
        if name.startswith("turn_") and isinstance(value, str | list):
            turns = value if isinstance(value, list) else listed(value)
            flat |= {f"{name}[{turn}]": each for turn, each in enumerate(turns)}
        else:
            flat[name] = value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
    return flat


def _sampled(stored: StoredStep, config: GRPOConfig, line: Record) -> dict[str, Any]:
    """Metrics of what was sampled, as far as they are of the groups that were trained on."""
    facts = stored.facts
    found: dict[str, Any] = {"phase": facts.phase}
    episodes = [episode for group in stored.groups for episode in group.episodes]
    found["policy_version"] = min(episode.policy_version for episode in episodes)
    if facts.discarded_groups or line.get("dynamic_sampling/discarded_groups"):
        found["dynamic_sampling/discarded_groups"] = float(facts.discarded_groups) or None
        return found
    first = phase_of(config, stored)[1].num_generations
    groups = tuple(replace(group, added=max(0, len(group.rewards) - first)) for group in stored.groups)
    rollout = Rollout(groups, 0.0, 0.0, sum(episode.num_sampled for episode in episodes))
    found |= rollout_metrics(rollout, estimator_of(config.algorithm), config.algorithm.scaling["correction"])
    if not any(group.trajectories for group in stored.groups):
        found["completions/no_answer_ratio"] = no_answer_ratio(rollout.counted, stored.has_answer)
    return found


def _check_metrics(
    report: Report, name: str, found: Mapping[str, Any], line: Record, limit: float, *, show: bool = False
) -> None:
    check = Check(name, limit)
    found = {metric: value for metric, value in found.items() if not metric.startswith(_SECONDS)}
    check.values("metrics.jsonl", line, found)
    if show:
        report.numbers |= {metric: (line[metric], value) for metric, value in found.items() if metric in line}
    report.checks.append(check)


def _ledger_rows(report: Report, folder: RunFolder, step: int) -> list[Record]:
    path = folder.ledger / table_name(step)
    rows = read_table(path) if path.exists() else []
    if rows:
        return rows
    if path.exists():
        check = Check("ledger", 0.0)
        check.wrong(path.name, "tokens", "it is empty; a step whose ledger is kept has tokens in it")
        report.checks.append(check)
        return []
    report.notes.append("ledger/ has no table of the step (run.ledger)")
    return []


def _check_checkpoint(report: Report, folder: RunFolder, rerun: Rerun, limit: float) -> None:
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
        check.wrong(path.name, "whole", str(error))
        return
    match_tensors(check, checkpoint.tensors, rerun.learner.tensors())
    counted = checkpoint.state.get("trainer")
    for name in ("global_step", "policy_version", "updates", "entropy_coef", "last_entropy"):
        before = counted.get(name) if isinstance(counted, dict) else None
        check.value(f"state.json {name}", before, getattr(rerun.state, name))
