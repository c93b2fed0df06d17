"""Transformers' callbacks on Covey's run: `CallbackHandler` is told of the run as its own trainer would tell it.

When to log, save and evaluate is decided by transformers' `DefaultFlowCallback`, so that every strategy (steps, epoch,
best, no, fractions, delays) means what it means there. One generation of Covey's may be several optimiser steps: each
of them is announced; logs, checkpoints and evaluations that fall inside a generation come at its end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState
from transformers.trainer_utils import SaveStrategy

from covey.trl.arguments import GRPOConfig


class Flow:
    """A callback of Covey's trainer that drives those of transformers."""

    def __init__(
        self,
        args: GRPOConfig,
        state: TrainerState,
        handler: Callable[[], Any],
        *,
        steps: int,
        steps_per_epoch: int,
        save: Callable[[], None],
        evaluate: Callable[[], Any] | None,
        own: str,
        log: Callable[[dict[str, Any]], None],
    ) -> None:
        self.args, self.state, self._handler = args, state, handler
        self.control = TrainerControl()
        self._steps, self._per_epoch = steps, steps_per_epoch
        self._save, self._evaluate, self.log = save, evaluate, log
        self._prefix = f"eval_{own}" if own else "eval"
        self._asked_to_save = False
        self._sums: dict[str, list[float]] = {}
        self._losses: list[float] = []
        self._began = time.perf_counter()

    # ------------------------------------------------------------------ what Covey's trainer calls

    def on_train_begin(self, _args: Any, _state: Any, control: TrainerControl, **_: Any) -> TrainerControl:
        """The run begins, or goes on."""
        self._began = time.perf_counter()
        self.state.max_steps = self._steps
        self.state.num_train_epochs = math.ceil(self._steps / self._per_epoch)
        self.state.compute_steps(self.args, self._steps)  # type: ignore[no-untyped-call]
        self._tell("on_train_begin")
        self._tell("on_epoch_begin")
        return self._ask(control)

    def on_log(self, _args: Any, inner: Any, control: TrainerControl, logs: Mapping[str, Any]) -> TrainerControl:
        """A generation was trained on."""
        numbers = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
        if self.args.entropy_coef:
            numbers.setdefault("entropy_coef", self.args.entropy_coef)
        for name, value in numbers.items():
            self._sums.setdefault(name, []).append(value)
        self._losses.append(numbers.get("loss", 0.0))
        if isinstance(rates := self._handler().lr_scheduler, Rates):
            rates.rate = numbers["learning_rate"]
        wanted = {"log": False, "save": False, "evaluate": False}
        for _ in range(min(self.args.optimizer_steps_per_generation, self._steps - self.state.global_step)):
            self._tell("on_step_begin")
            self._tell("on_pre_optimizer_step")
            self._tell("on_optimizer_step")
            self.state.global_step += 1
            self.state.epoch = self.state.global_step / self._per_epoch
            self._tell("on_step_end")
            if self.state.global_step % self._per_epoch == 0:
                self._tell("on_epoch_end")
                if self.state.global_step < self._steps:
                    self._tell("on_epoch_begin")
            for name in wanted:
                wanted[name] |= bool(getattr(self.control, f"should_{name}"))
                setattr(self.control, f"should_{name}", False)
            if self.control.should_training_stop or self.control.should_epoch_stop:
                break
        for name, value in wanted.items():
            setattr(self.control, f"should_{name}", value)
        if self.control.should_log:
            self.control.should_log = False
            self.log(self._means())
        return self._ask(control)

    def on_evaluate(
        self, _args: Any, _state: Any, control: TrainerControl, metrics: Mapping[str, Any]
    ) -> TrainerControl:
        """An evaluation is done."""
        self.evaluated(eval_names(metrics, self.args, self._prefix))
        if self._evaluate is not None:
            self._evaluate()
        return self._ask(control)

    def on_save(self, _args: Any, _state: Any, control: TrainerControl, **_: Any) -> TrainerControl:
        """Covey has written a checkpoint."""
        if self._asked_to_save or self.args.save_strategy != SaveStrategy.NO:
            self._asked_to_save = False
            self._save()
            self._tell("on_save")
        return self._ask(control)

    def on_train_end(self, _args: Any, _state: Any, control: TrainerControl, **_: Any) -> TrainerControl:
        """The run has ended: the last record sums it up."""
        seconds = time.perf_counter() - self._began
        completions = (self.args.generation_batch_size or 0) * len(self._losses)
        self.log(
            self._means()
            | {
                "train_runtime": round(seconds, 4),
                "train_samples_per_second": round(completions / seconds, 3),
                "train_steps_per_second": round(self.state.global_step / seconds, 3),
                "total_flos": self.state.total_flos,
                "train_loss": sum(self._losses) / max(len(self._losses), 1),
            }
        )
        self._tell("on_train_end")
        return control

    # ------------------------------------------------------------------ records

    def record(self, logs: Mapping[str, Any]) -> None:
        """Append a record to the history and tell the callbacks, trackers among them."""
        record = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**record, "step": self.state.global_step})
        self._tell("on_log", logs=record)

    def evaluated(self, metrics: dict[str, Any]) -> None:
        """Log an evaluation and tell the callbacks; the best one so far is noted."""
        self.log(metrics)
        self._tell("on_evaluate", metrics=metrics)  # before the best one is noted: early stopping compares with that
        name = self.args.metric_for_best_model
        if name is not None:
            value = metrics.get(name if name.startswith("eval_") else f"eval_{name}")
            if value is not None and (self.state.best_metric is None or value > self.state.best_metric):
                self.state.best_metric = value
                self.state.best_global_step = self.state.global_step
                saved = Path(self.args.output_dir or "") / f"checkpoint-{self.state.global_step}"
                self.state.best_model_checkpoint = str(saved) if saved.is_dir() else None
                self.control.should_save |= self.args.save_strategy == SaveStrategy.BEST

    def _means(self) -> dict[str, float | None]:
        """Means over the generations since the last record, None where there is nothing to take one of, such as the
        reward of a function that judged no completion; counters as they stand.
        """
        last = ("num_tokens", "policy_version", "phase", "learning_rate", "epoch")
        means = {}
        for name, values in self._sums.items():
            known = [value for value in values if not math.isnan(value)]
            means[name] = values[-1] if name in last else sum(known) / len(known) if known else None
        self._sums = {}
        means.pop("epoch", None)
        return means

    def _tell(self, event: str, **what: Any) -> None:
        self.control = getattr(self._handler(), event)(self.args, self.state, self.control, **what)

    def _ask(self, control: TrainerControl) -> TrainerControl:
        """Pass on what callbacks ask for."""
        self._asked_to_save |= self.control.should_save
        for name in ("should_save", "should_evaluate"):
            setattr(control, name, getattr(control, name) or getattr(self.control, name))
            setattr(self.control, name, False)
        control.should_training_stop |= self.control.should_training_stop
        return control


def eval_names(metrics: Mapping[str, Any], args: GRPOConfig, prefix: str = "eval") -> dict[str, Any]:
    """`eval/reward` as TRL calls it: `eval_reward`; with transformers' runtime in seconds, prompts and batches each."""
    found = {
        f"{prefix}_{name.removeprefix('eval/')}": value
        for name, value in metrics.items()
        if isinstance(value, int | float)
    }
    seconds, completions = metrics["eval/seconds"], metrics["eval/num_completions"]
    prompts = completions / (args.num_generations_eval or args.num_generations or 1)
    found[f"{prefix}_runtime"] = round(seconds, 4)
    found[f"{prefix}_samples_per_second"] = round(prompts / seconds, 3)
    found[f"{prefix}_steps_per_second"] = round(math.ceil(completions / args.per_device_eval_batch_size) / seconds, 3)
    return found


class Rates:
    """The learning rate of the last step, for callbacks that ask a scheduler for it."""

    rate = 0.0

    def get_last_lr(self) -> list[float]:
        """The rate, as a list of one."""
        return [self.rate]

    def state_dict(self) -> dict[str, float]:
        """The rate; it is a function of the step, so that nothing has to be kept."""
        return {"rate": self.rate}
