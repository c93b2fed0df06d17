"""The run on disk while it trains: folder, observers, checkpoints, best model, and taking up where a run stopped."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from covey.algorithms import Estimator
from covey.config.whole import GRPOConfig
from covey.distributed.fleet import Fleet
from covey.errors import CheckpointError, CoveyError, ModelError
from covey.files import publishing
from covey.functions import user_file_hashes
from covey.observe.curve import draw_run
from covey.observe.doctor import Doctor
from covey.observe.observers import Observers
from covey.observe.run_folder import RunFolder
from covey.observe.trackers import make_observers
from covey.processes import memory_metrics
from covey.rollout.learning import Learner, TrainedPolicy
from covey.rollout.scoring import Logged
from covey.tasks.pictures import pictures_in
from covey.training.checkpoint import (
    changed_settings,
    checked_state,
    checkpoint_name,
    damage_explained,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    lost_lines,
    prune_checkpoints,
    random_state,
    restore_random,
    save_checkpoint,
    source_hashes,
)
from covey.training.evaluate import NOTHING_JUDGED, Evaluation, no_answer_ratio, overlong, rollout_metrics, with_logged
from covey.training.ledger import Ledger
from covey.training.prefetch import Sampled, Source
from covey.training.questions import QuestionHistory
from covey.training.refusals import require_measured
from covey.training.schedule import ACCURACY_STEPS, Callbacks, PhasePlan, ResolvedPhase
from covey.training.setup import Data, RunLength
from covey.training.step import episode_credit
from covey.training.stored_steps import StepFacts, pack_step
from covey.training.tables import completion_rows
from covey.training.update import Update
from covey.types import Prompt

log = logging.getLogger(__name__)

_DETAILS = re.compile(r"""['"([{<\d]""")
"""Where the part of an error's message begins that differs from case to case."""
_PLACE = re.compile(r" at \S+:\d+, in ")
_MOST_FAILURES = 20


class Run(Source, Protocol):
    """What a run is written from and a checkpoint is restored into: a `GRPOTrainer`, which describes these."""

    args: GRPOConfig
    policy: TrainedPolicy
    phases: PhasePlan
    questions: QuestionHistory
    length: RunLength
    best_metric: str
    only_in_memory: bool
    data: Data
    estimator: Estimator
    prompts: list[Prompt]
    eval_prompts: list[Prompt]

    @property
    def learner(self) -> Learner: ...


class Recorder:
    """Writes what happens and keeps the run resumable."""

    def __init__(self, run: Run, callbacks: Callbacks) -> None:
        self._run = run
        self._callbacks, self._learner = callbacks, run.learner
        self._settings = run.args.run
        self._folder: RunFolder | None = None
        self._observers = Observers()
        self._doctor = Doctor()
        self._consistent = True
        self._unsaved, self._best_unsaved = True, False
        self._phase = -1
        self._notes: list[str] = []
        self._failures: set[tuple[str, str]] = set()
        self._sources = source_hashes(run.args)
        self._longest_prompt = max(len(prompt.token_ids) for prompt in [*run.prompts, *run.eval_prompts])
        self._fleet = run.engine if isinstance(run.engine, Fleet) else None
        self.evaluated_at = -1

    # ------------------------------------------------------------------ life of a run

    @contextmanager
    def running(self, resume: bool | str | Path | None) -> Iterator[None]:
        """Open the folder, restore a checkpoint if asked to, and close everything with the last results written."""
        run, output_dir = self._run, self._settings.output_dir
        overwrite = self._settings.overwrite and run.state.global_step == 0  # else its own steps would go
        how = {"resume": bool(resume), "overwrite": overwrite, "needs_python": run.only_in_memory}
        with RunFolder.create(output_dir, **how) as folder:
            self._folder = folder
            if resume:
                self._restore(folder, None if resume is True else Path(resume))
            else:
                folder.write_config(run.args.to_toml())
                if hasattr(run.data.task, "schema"):
                    folder.write_schema(run.data.task.schema())
            names = ("run_name", "logging_steps", "log_completions", "num_completions_to_print", "report_completions")
            options = {name: getattr(self._settings, name) for name in names}
            self._observers = make_observers(
                self._settings.report_to, folder, console=self._settings.progress, **options
            )
            self._doctor = Doctor(history=run.state.log_history)
            self._observers.on_run_start(
                run.args.to_dict(),
                {
                    "total_steps": run.length.total_steps,
                    "start_step": run.state.global_step,
                    "run_id": folder.run_id,
                    "name": self._settings.run_name or folder.path.name,
                    "last_eval": next((r for r in reversed(run.state.log_history) if "eval/reward" in r), None),
                    "model": run.args.model.model,
                },
            )
            for note in self._notes:
                self.event("warning", note)
            if resume and run.state.global_step == run.length.total_steps:
                self.event("warning", "all steps of this run are finished; to go on, raise schedule.max_steps")
            status = "failed"
            try:
                yield
                self._finish(folder)
                status = "finished"
            except KeyboardInterrupt:
                status = "stopped"
                raise
            finally:
                self._observers.on_run_end(status)

    def _finish(self, folder: RunFolder) -> None:
        self._save(folder)
        whose = self._take_best(folder)
        with publishing(folder.adapter) as aside:
            self._run.policy.save_pretrained(aside)
        what = "the adapter" if self._run.args.model.use_peft else "the model"
        self.event("adapter", f"{what} of {whose}, is in {folder.adapter}")
        draw_run(folder)

    def _take_best(self, folder: RunFolder) -> str:
        """With `load_best_model_at_end`, take the best evaluation's weights. Returns whose weights the policy has."""
        run, state = self._run, self._run.state
        last, best = f"step {state.global_step}, the last one", state.best_step
        if not run.args.evaluation.load_best_model_at_end:
            return last
        if best is None:
            return f"{last} (no evaluation measured {run.best_metric})"
        chosen = f"step {best}, the best evaluation ({run.best_metric} {state.best_metric:.4g})"
        if best == state.global_step:
            return chosen
        try:
            checkpoint = load_checkpoint(folder.checkpoints / checkpoint_name(best), run_id=folder.run_id)
            run.policy.load_state_dict(checkpoint.tensors["policy"])
        except (CheckpointError, ModelError) as error:
            self.event("warning", f"the weights of {chosen}, cannot be had, those of the last step are kept: {error}")
            return last
        run.publish()
        return chosen

    def stopped(self, status: str, reason: str) -> None:
        """An error or the keyboard ends the run: leave a checkpoint, if the weights are those of a finished step.

        Never raises because the disk is full: what stopped the run is the error that the user must see.
        """
        folder = self._folder
        if folder is None:
            return
        self._tell_news()
        try:
            if self._consistent:
                self._save(folder)
            state, saved = self._run.state, list_checkpoints(folder.checkpoints)
            whole = bool(saved) and saved[-1].name == checkpoint_name(state.global_step)
            kept = "Nothing is lost" if whole else f"{saved[-1].name if saved else 'Nothing'} is the last checkpoint"
            go_on = f"{kept}: continue with {folder.how_to_continue()}"
            go_on = go_on if state.global_step else "No step was finished: start the run again"
            self.event(status, f"{reason}\n{go_on}")
        except CoveyError as error:
            log.warning("the run stops, and its last step could not be saved: %s", error)

    @contextmanager
    def inconsistent(self) -> Iterator[None]:
        """Weights and counters do not belong together inside: no checkpoint is written if it fails."""
        self._consistent = False
        yield
        self._consistent = True

    # ------------------------------------------------------------------ what happens

    def event(self, kind: str, message: str) -> None:
        """Tell the observers of something worth a sentence; warnings, and how to go on, also without progress."""
        self._observers.on_event(kind, message)
        if kind in ("warning", "failed", "stopped") and not self._settings.progress:
            log.warning("%s", message if kind == "warning" else message.rpartition("\n")[2])

    def progress(self, activity: str, done: int, total: int) -> None:
        """Tell the observers that something long moves on, and what has happened to samplers and workers meanwhile."""
        self._tell_news()
        self._observers.on_progress(activity, done, total)

    def step(
        self, sampled: Sampled, done: Update, phase: ResolvedPhase, seconds: float, ledger: Ledger | None
    ) -> dict[str, Any]:
        """Record a finished step: metrics, which are returned, completions, ledger, batch, and diagnoses."""
        run, state, rollout, folder = self._run, self._run.state, sampled.rollout, self._folder
        assert folder is not None
        number, config = state.global_step, run.args
        metrics: dict[str, Any] = {
            "epoch": state.epoch,
            "num_tokens": state.num_tokens,
            "policy_version": min(episode.policy_version for episode in done.batch.episodes),
            "phase": phase.index,
            **rollout_metrics(rollout, run.estimator, config.algorithm.scaling["correction"]),
            **done.metrics,
            **memory_metrics(),
            "step_time": seconds,
        }
        metrics["completions/no_answer_ratio"] = no_answer_ratio(rollout.counted, run.data.has_answer)
        if (cache := config.rewards.soft_overlong_cache) and config.environment.world is None:
            metrics["soft_overlong_penalty"] = overlong(rollout, config.sampling.max_completion_length, cache)
        if sampled.accuracy is not None:
            metrics["accuracy"] = sampled.accuracy
        metrics = with_logged(metrics, sampled.logged.metrics)
        if done.skipped:
            self.event("skipped", f"step {number}: {done.skipped}")
        if run.phases.learning_rate_factor < phase.learning_rate_factor:
            self.event(
                "learning_rate",
                f"step {number}: the accuracy of the last {ACCURACY_STEPS} steps is too low (last step "
                f"{sampled.accuracy:.0%}), so the learning rate is now multiplied by "
                f"{run.phases.learning_rate_factor:g}",
            )
        penalty, credit = config.environment.invalid_action_penalty, episode_credit(rollout.groups, config)
        rows = completion_rows(rollout.groups, done.batch, sampled.logged.columns, sampled.correct, penalty, credit)
        folder.write_pictures(pictures_in([group.shown for group in rollout.whole.groups]))
        if sampled.answers:
            folder.append_answers(number, sampled.answers)
        self._unsaved = True
        self._tell_news()
        if self._fleet is not None:
            metrics |= self._fleet.take_metrics()
        folder.write_samplers(number, run.engine.members() if hasattr(run.engine, "members") else [])
        if phase.index != self._phase:
            if self._phase >= 0 or phase.index > 0:
                self.event("phase", f"step {number}: phase {phase.index + 1} begins")
            self._phase = phase.index
        state.log_history.append({"step": number, **metrics})
        self._observers.on_step(number, metrics)
        self._observers.on_completions(number, rows)
        self._tell_failures(rows)
        self._diagnose()
        if ledger is not None:
            folder.write_completions(number, ledger.rows, "ledger")
        if config.run.keep_batches:
            numbers = (len(run.prompts), self._longest_prompt, len(rollout.discarded))
            passes = (self._learner.tokens_per_micro_batch, type(self._learner).__name__)
            begun = (number, config.to_dict(), phase.index, phase.learning_rate_factor)
            facts = StepFacts(*begun, *numbers, *passes)
            folder.write_batch(number, pack_step(facts, rollout.groups, run.data.has_answer, done.batch.teacher))
        return metrics

    def _diagnose(self) -> None:
        for diagnosis in self._doctor.check(self._run.state.log_history[-1]):
            self.event("diagnosis", str(diagnosis))

    def evaluation(self, result: Evaluation, logged: Logged) -> dict[str, Any]:
        """An evaluation is done: returns its metrics, with what reward functions logged; is it the best so far?"""
        state, folder = self._run.state, self._folder
        assert folder is not None
        metrics = with_logged(result.metrics, logged.metrics, "eval/")
        record = metrics | (result.constant if self._settings.log_completions else {})
        self.evaluated_at, self._unsaved = state.global_step, True
        state.log_history.append({"step": state.global_step, **record})
        self._observers.on_eval(state.global_step, record)
        penalty = self._run.args.environment.invalid_action_penalty
        rows = completion_rows(result.rollout.groups, None, logged.columns, result.correct, penalty)
        if self._settings.log_completions:
            folder.write_pictures(pictures_in([group.shown for group in result.rollout.groups]))
            folder.write_completions(state.global_step, rows, "eval")
        self._tell_failures(rows)
        self._diagnose()
        draw_run(folder)

        if not result.judged.any():
            self.event("evaluation", f"step {state.global_step}: {NOTHING_JUDGED}; it is not compared with the others")
            return metrics
        require_measured(self._run.best_metric, list(metrics))
        value = float(metrics[self._run.best_metric])
        state.best_metric_name = self._run.best_metric
        if math.isfinite(value) and (state.best_metric is None or value > state.best_metric):
            state.best_metric, state.best_step = value, state.global_step
            state.evaluations_without_improvement = 0
            if state.global_step > 0:
                with publishing(folder.best) as aside:
                    self._run.policy.save_pretrained(aside)
                folder.append_event("best", f"step {state.global_step} ({state.best_metric_name} {value:.4g})")
            self._best_unsaved = self._run.args.evaluation.load_best_model_at_end
        elif state.global_step > 0:
            state.evaluations_without_improvement += 1
        return metrics

    def _tell_news(self) -> None:
        for sentence in () if self._fleet is None else self._fleet.take_news():
            self.event("sampler", sentence)

    def _tell_failures(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The first error of each kind that an environment ended an episode with."""
        for text in (str(row["error"]) for row in rows if row.get("ended") == "failed"):
            kind = (_DETAILS.split(text)[0], "".join(_PLACE.findall(text)[:1]))
            if kind not in self._failures and len(self._failures) < _MOST_FAILURES:
                self._failures.add(kind)
                self.event("environment", f"{text}. Its episode failed; others like it are in completions/ only")

    # ------------------------------------------------------------------ checkpoints

    def checkpoint_when_due(self) -> None:
        """Every `save_steps` steps, when a callback asks for one, or after the best evaluation, which may be wanted."""
        step, every = self._run.state.global_step, self._settings.save_steps
        asked, self._best_unsaved = self._callbacks.take("should_save") or self._best_unsaved, False
        if asked or (step > 0 and every > 0 and step % every == 0):
            assert self._folder is not None
            self._save(self._folder)

    def _save(self, folder: RunFolder) -> None:
        run, state = self._run, self._run.state
        if not self._unsaved:
            return
        folder.sync()  # the metrics up to this step are on disk before a checkpoint says that they are
        save_checkpoint(
            folder.checkpoints,
            state.global_step,
            self._learner.tensors(),
            {
                "trainer": state.to_dict(),
                "plan": run.phases.state(),
                "random": random_state(),
                "tokens_per_micro_batch": self._learner.tokens_per_micro_batch,
                "settings": run.args.to_dict(),
                "files": user_file_hashes(),
                "sources": self._sources,
            },
            run_id=folder.run_id,
        )
        folder.append_event("checkpoint", f"step {state.global_step} is saved")
        self._unsaved = False
        self._callbacks("on_save")  # before old ones go: a callback may keep folders of its own that go with them
        best = state.best_step if run.args.evaluation.load_best_model_at_end else None
        prune_checkpoints(folder.checkpoints, self._settings.save_total_limit, best)

    def _restore(self, folder: RunFolder, path: Path | None) -> None:
        """Take up a checkpoint; without one the run begins again from its start, which gives the same numbers."""
        run = self._run
        if not folder.config_path.exists():
            folder.write_config(run.args.to_toml())
            if folder.read_metrics():
                self._notes.append("config.toml was gone; it has the settings of this resume now")
        path = path or find_checkpoint(folder, run.args, self._notes)
        if path is None:
            folder.truncate_after(-1)
            return
        checkpoint = load_checkpoint(path, run_id=folder.run_id)
        state = checked_state(checkpoint, self._learner.tensors(), run.best_metric)
        self._notes += changed_settings(checkpoint, run.args)
        self._notes += lost_lines(folder, checkpoint, run.args)
        with damage_explained(checkpoint):
            run.phases.restore(checkpoint.state["plan"])
            restore_random(checkpoint.state["random"])
            self._learner.restore(checkpoint.tensors, state.updates)
            self._learner.tokens_per_micro_batch = int(checkpoint.state["tokens_per_micro_batch"])
        folder.truncate_after(checkpoint.step)
        folder.change_config(run.args.to_toml(), checkpoint.step)
        state.log_history = folder.read_metrics()
        state.max_steps = run.length.total_steps or -1
        run.state.take(state)
        run.questions.restore(folder.read_answers())
        self.evaluated_at = max((int(r["step"]) for r in run.state.log_history if "eval/reward" in r), default=-1)
        self._unsaved = False
        self._phase = int(next((r["phase"] for r in reversed(run.state.log_history) if "phase" in r), -1))
        run.publish()
