"""The run on disk while it trains: folder, observers, checkpoints, best model, and taking up where a run stopped."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from covey.errors import CoveyError
from covey.observe.curve import draw_run
from covey.observe.doctor import Doctor
from covey.observe.observers import Observers
from covey.observe.run_folder import RunFolder
from covey.observe.trackers import make_observers
from covey.training.callbacks import Callbacks
from covey.training.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from covey.training.evaluate import Evaluation
from covey.training.questions import Answers
from covey.training.report import completion_rows
from covey.training.schedule import PhasePlan
from covey.training.state import TrainerState

if TYPE_CHECKING:
    from covey.training.trainer import GRPOTrainer

log = logging.getLogger(__name__)


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
        self.evaluated_at = -1

    # ------------------------------------------------------------------ life of a run

    @contextmanager
    def running(self, resume: bool | str | Path | None) -> Iterator[None]:
        """Open the folder, restore a checkpoint if asked to, and close everything with the last results written."""
        trainer = self._trainer
        with RunFolder.create(self._settings.output_dir, resume=bool(resume)) as folder:
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
                    "model": trainer.args.model.model,
                },
            )
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
        trainer, state = self._trainer, self._trainer.state
        self._save(folder)
        if trainer.args.evaluation.load_best_model_at_end and state.best_step not in (
            None,
            state.global_step,
        ):
            best = load_checkpoint(folder.checkpoints / f"step_{state.best_step:06d}", run_id=folder.run_id)
            trainer.policy.load_state_dict(best.tensors["policy"])
            trainer.engine.sync(trainer.policy.model, state.policy_version)
            self.event("best", f"the run ends with the weights of step {state.best_step}, its best evaluation")
        with folder.publishing(folder.adapter) as aside:
            trainer.policy.save_pretrained(aside)
        draw_run(folder)

    def stopped(self, status: str, reason: str) -> None:
        """An error or the keyboard ends the run: leave a checkpoint, if the weights are those of a finished step.

        Never raises because the disk is full: what stopped the run is the error that the user must see.
        """
        folder = self._folder
        if folder is None:
            return
        try:
            if self._consistent and self._unsaved:
                self._save(folder)
            self.event(status, f"{reason}\nNothing is lost: continue with `covey resume {folder.path}`")
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
        draw_run(folder)

        wanted = self._trainer.args.evaluation.metric_for_best_model
        value = metrics.get(wanted, metrics["eval/reward"] if wanted == "eval/accuracy" else None)
        if value is None:
            known = ", ".join(sorted(metrics))
            self.event(
                "warning",
                f"metric_for_best_model={wanted!r} is not among the metrics of an evaluation: {known}",
            )
        elif state.best_metric is None or value > state.best_metric:
            state.best_metric, state.best_step = float(value), state.global_step
            state.evaluations_without_improvement = 0
            if state.global_step > 0:
                with folder.publishing(folder.best) as aside:
                    self._trainer.policy.save_pretrained(aside)
                if self._trainer.args.evaluation.load_best_model_at_end:
                    self._save(folder)
        elif state.global_step > 0:
            state.evaluations_without_improvement += 1

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
            },
            run_id=folder.run_id,
        )
        self._unsaved = False
        best = state.best_step if trainer.args.evaluation.load_best_model_at_end else None
        prune_checkpoints(folder.checkpoints, self._settings.save_total_limit, best)
        self._callbacks("on_save")

    def _restore(self, folder: RunFolder, path: Path | None) -> None:
        """Take up a checkpoint; without one the run begins again from its start, which gives the same numbers."""
        trainer = self._trainer
        path = latest_checkpoint(folder.checkpoints) if path is None else path
        if path is None:
            folder.truncate_after(-1)
            return
        checkpoint: Checkpoint = load_checkpoint(path, run_id=folder.run_id)
        trainer.learner.restore(checkpoint.tensors, checkpoint.state["trainer"]["updates"])
        trainer.learner.tokens_per_micro_batch = checkpoint.state["tokens_per_micro_batch"]
        self._plan.restore(checkpoint.state["plan"])
        _restore_random(checkpoint.state["random"])
        folder.truncate_after(checkpoint.step)
        trainer.state = TrainerState.from_dict(checkpoint.state["trainer"], folder.read_metrics())
        trainer.state.max_steps = self._total_steps or -1
        trainer.questions.restore(folder.read_answers())
        evaluated = [record["step"] for record in trainer.state.log_history if "eval/reward" in record]
        self.evaluated_at = evaluated[-1] if evaluated else -1
        self._unsaved = False
        self._phase = next((r["phase"] for r in reversed(trainer.state.log_history) if "phase" in r), -1)
        trainer.engine.sync(trainer.policy.model, trainer.state.policy_version)


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
