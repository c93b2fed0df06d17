"""The run on disk while it trains: folder, observers, checkpoints, best model, and taking up where a run stopped."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from covey.errors import CheckpointError, CoveyError, ModelError
from covey.observe.curve import draw_run
from covey.observe.doctor import Doctor
from covey.observe.observers import Observers
from covey.observe.run_folder import RunFolder
from covey.observe.trackers import make_observers
from covey.training.callbacks import Callbacks
from covey.training.checkpoint import (
    checkpoint_name,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from covey.training.evaluate import NOTHING_JUDGED, Evaluation
from covey.training.questions import Answers
from covey.training.report import completion_rows
from covey.training.restoring import changed_settings, checked_state, damage_explained, find_checkpoint, lost_lines
from covey.training.schedule import PhasePlan
from covey.training.standard import require_measured

if TYPE_CHECKING:
    from covey.training.trainer import GRPOTrainer

log = logging.getLogger(__name__)

_DETAILS = re.compile(r"""['"([{<\d]""")
"""Where the part of an error's message begins that differs from case to case."""
_PLACE = re.compile(r" at \S+:\d+, in ")
_MOST_FAILURES = 20


class Recorder:
    """Writes what happens and keeps the run resumable.

    Attributes:
        evaluated_at: step of the last evaluation, -1 before the first.
    """

    def __init__(self, trainer: GRPOTrainer, plan: PhasePlan, total_steps: int | None, callbacks: Callbacks) -> None:
        self._trainer = trainer
        self._plan = plan
        self._total_steps = total_steps
        self._callbacks = callbacks
        self._settings = trainer.args.run
        self._folder: RunFolder | None = None
        self._observers = Observers()
        self._doctor = Doctor()
        self._consistent = True
        self._unsaved = True
        self._phase = -1
        self._notes: list[str] = []
        self._failures: set[tuple[str, str]] = set()
        self.evaluated_at = -1

    # ------------------------------------------------------------------ life of a run

    @contextmanager
    def running(self, resume: bool | str | Path | None) -> Iterator[None]:
        """Open the folder, restore a checkpoint if asked to, and close everything with the last results written."""
        trainer = self._trainer
        needs_python = bool(trainer.only_in_memory)
        with RunFolder.create(self._settings.output_dir, resume=bool(resume), needs_python=needs_python) as folder:
            self._folder = folder
            if resume:
                self._restore(folder, None if resume is True else Path(resume))
            else:
                folder.write_config(trainer.args.to_toml())
            self._observers = make_observers(
                self._settings.report_to,
                folder,
                run_name=self._settings.run_name,
                logging_steps=self._settings.logging_steps,
                log_completions=self._settings.log_completions,
                num_completions_to_print=self._settings.num_completions_to_print,
                console=self._settings.progress,
            )
            self._doctor = Doctor(history=trainer.state.log_history)
            self._observers.on_run_start(
                trainer.args.to_dict(),
                {
                    "total_steps": self._total_steps,
                    "start_step": trainer.state.global_step,
                    "run_id": folder.run_id,
                    "name": self._settings.run_name or folder.path.name,
                    "last_eval": next((r for r in reversed(trainer.state.log_history) if "eval/reward" in r), None),
                    "model": trainer.args.model.model,
                },
            )
            for note in self._notes:
                self.event("warning", note)
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
                trainer.close()

    def _finish(self, folder: RunFolder) -> None:
        self._save(folder)
        whose = self._take_best(folder)
        with folder.publishing(folder.adapter) as aside:
            self._trainer.policy.save_pretrained(aside)
        what = "the adapter" if self._trainer.args.model.use_peft else "the model"
        self.event("adapter", f"{folder.adapter.name}/ holds {what} of {whose}")
        draw_run(folder)

    def _take_best(self, folder: RunFolder) -> str:
        """With `load_best_model_at_end`, the weights of the best evaluation. Returns whose weights the policy has
        now.
        """
        trainer, state = self._trainer, self._trainer.state
        last, best = f"step {state.global_step}, the last one", state.best_step
        if not trainer.args.evaluation.load_best_model_at_end:
            return last
        if best is None:
            return f"{last} (no evaluation measured {trainer.best_metric})"
        chosen = f"step {best}, the best evaluation ({trainer.best_metric} {state.best_metric:.4g})"
        if best == state.global_step:
            return chosen
        try:
            checkpoint = load_checkpoint(folder.checkpoints / checkpoint_name(best), run_id=folder.run_id)
            trainer.policy.load_state_dict(checkpoint.tensors["policy"])
        except (CheckpointError, ModelError) as error:
            self.event("warning", f"the weights of {chosen}, cannot be had, those of the last step are kept: {error}")
            return last
        trainer.engine.publish(trainer.policy.weights(state.policy_version))
        return chosen

    def stopped(self, status: str, reason: str) -> None:
        """An error or the keyboard ends the run: leave a checkpoint, if the weights are those of a finished step.

        Never raises because the disk is full: what stopped the run is the error that the user must see.
        """
        folder = self._folder
        if folder is None:
            return
        try:
            if self._consistent:
                self._save(folder)
            state, saved = self._trainer.state, list_checkpoints(folder.checkpoints)
            whole = bool(saved) and saved[-1].name == checkpoint_name(state.global_step)
            kept = "Nothing is lost" if whole else f"{saved[-1].name if saved else 'Nothing'} is the last checkpoint"
            self.event(status, f"{reason}\n{kept}: continue with {folder.how_to_continue()}")
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
        """Something worth a sentence."""
        self._observers.on_event(kind, message)

    def progress(self, activity: str, done: int, total: int) -> None:
        """Something long moves on."""
        self._observers.on_progress(activity, done, total)

    def step(self, metrics: dict[str, Any], completions: Sequence[Mapping[str, Any]], answers: Answers) -> None:
        """A step is done: metrics, completions, and a diagnosis in words if something is wrong."""
        state = self._trainer.state
        if answers:
            assert self._folder is not None
            self._folder.append_answers(state.global_step, answers)
        self._unsaved = True
        if metrics["phase"] != self._phase:
            if self._phase >= 0 or metrics["phase"] > 0:
                self.event("phase", f"step {state.global_step}: phase {metrics['phase'] + 1} begins")
            self._phase = metrics["phase"]
        state.log_history.append({"step": state.global_step, **metrics})
        self._observers.on_step(state.global_step, metrics)
        self._observers.on_completions(state.global_step, completions)
        self._tell_failures(completions)
        for diagnosis in self._doctor.check(state.log_history[-1]):
            self.event("diagnosis", str(diagnosis))

    def evaluation(self, result: Evaluation) -> None:
        """An evaluation is done: metrics, and whether it is the best so far."""
        state, folder = self._trainer.state, self._folder
        assert folder is not None
        logged = self._trainer.data.scorer.take_logged()
        metrics: dict[str, Any] = dict(result.metrics) | {f"eval/{name}": v for name, v in logged.metrics.items()}
        self.evaluated_at, self._unsaved = state.global_step, True
        state.log_history.append({"step": state.global_step, **metrics})
        self._observers.on_eval(state.global_step, metrics)
        rows = completion_rows(result.rollout.groups, columns=logged.columns, correct=result.correct)
        if self._settings.log_completions:
            folder.write_evaluation(state.global_step, rows)
        self._tell_failures(rows)
        draw_run(folder)

        if result.judged is not None and not result.judged.any():
            self.event("evaluation", f"step {state.global_step}: {NOTHING_JUDGED}; it is not compared with the others")
            return
        require_measured(self._trainer.best_metric, list(metrics))
        value = float(metrics[self._trainer.best_metric])
        state.best_metric_name = self._trainer.best_metric
        if math.isfinite(value) and (state.best_metric is None or value > state.best_metric):
            state.best_metric, state.best_step = value, state.global_step
            state.evaluations_without_improvement = 0
            if state.global_step > 0:
                with folder.publishing(folder.best) as aside:
                    self._trainer.policy.save_pretrained(aside)
                folder.append_event("best", f"step {state.global_step} ({state.best_metric_name} {value:.4g})")
            if self._trainer.args.evaluation.load_best_model_at_end:
                self._save(folder)
        elif state.global_step > 0:
            state.evaluations_without_improvement += 1

    def _tell_failures(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The first error of each kind that an environment ended an episode with."""
        for text in (str(row["error"]) for row in rows if row.get("ended") == "failed"):
            place = _PLACE.search(text)
            kind = (_DETAILS.split(text)[0], place[0] if place else "")
            if kind not in self._failures and len(self._failures) < _MOST_FAILURES:
                self._failures.add(kind)
                self.event("environment", f"{text}. Its episode failed; others like it are in completions/ only")

    # ------------------------------------------------------------------ checkpoints

    def checkpoint_when_due(self) -> None:
        """Every `save_steps` steps, or when a callback asks for one."""
        step, every = self._trainer.state.global_step, self._settings.save_steps
        if self._callbacks.take("should_save") or (every > 0 and step % every == 0):
            assert self._folder is not None
            self._save(self._folder)

    def _save(self, folder: RunFolder) -> None:
        trainer, state = self._trainer, self._trainer.state
        if not self._unsaved:
            return
        folder.sync()  # the metrics up to this step are on disk before a checkpoint says that they are
        save_checkpoint(
            folder.checkpoints,
            state.global_step,
            trainer.learner.tensors(),
            {
                "trainer": state.to_dict(),
                "plan": self._plan.state(),
                "random": _random_state(),
                "tokens_per_micro_batch": trainer.learner.tokens_per_micro_batch,
                "settings": trainer.args.to_dict(),
            },
            run_id=folder.run_id,
        )
        folder.append_event("checkpoint", f"step {state.global_step} is saved")
        self._unsaved = False
        best = state.best_step if trainer.args.evaluation.load_best_model_at_end else None
        prune_checkpoints(folder.checkpoints, self._settings.save_total_limit, best)
        self._callbacks("on_save")

    def _restore(self, folder: RunFolder, path: Path | None) -> None:
        """Take up a checkpoint; without one the run begins again from its start, which gives the same numbers."""
        trainer = self._trainer
        if not folder.config_path.exists():
            folder.write_config(trainer.args.to_toml())
            if folder.read_metrics():
                self._notes.append("config.toml was gone; it has the settings of this resume now")
        if path is None:
            path = find_checkpoint(folder, trainer.args, self._notes)
        if path is None:
            folder.truncate_after(-1)
            return
        checkpoint = load_checkpoint(path, run_id=folder.run_id)
        state = checked_state(checkpoint, trainer.learner.tensors(), trainer.best_metric)
        self._notes += changed_settings(checkpoint, trainer.args)
        self._notes += lost_lines(folder, checkpoint, trainer.args)
        with damage_explained(checkpoint):
            self._plan.restore(checkpoint.state["plan"])
            _restore_random(checkpoint.state["random"])
            trainer.learner.restore(checkpoint.tensors, state.updates)
            trainer.learner.tokens_per_micro_batch = int(checkpoint.state["tokens_per_micro_batch"])
        folder.truncate_after(checkpoint.step)
        trainer.state = state
        state.log_history = folder.read_metrics()
        state.max_steps = self._total_steps or -1
        trainer.questions.restore(folder.read_answers())
        evaluated = [record["step"] for record in trainer.state.log_history if "eval/reward" in record]
        self.evaluated_at = evaluated[-1] if evaluated else -1
        self._unsaved = False
        self._phase = next((r["phase"] for r in reversed(trainer.state.log_history) if "phase" in r), -1)
        trainer.engine.publish(trainer.policy.weights(trainer.state.policy_version))


def _random_state() -> dict[str, Any]:
    """States of torch's generators: dropout draws from them."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state().numpy()}
    if torch.cuda.is_available():
        state["cuda"] = [device_state.numpy() for device_state in torch.cuda.get_rng_state_all()]
    return state


def _restore_random(state: dict[str, Any]) -> None:
    torch.set_rng_state(torch.from_numpy(np.asarray(state["cpu"], np.uint8)))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state_all([torch.from_numpy(np.asarray(entry, np.uint8)) for entry in state["cuda"]])
