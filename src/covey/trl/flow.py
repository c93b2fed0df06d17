"""Transformers' callbacks on Covey's run: `CallbackHandler` is told of the run as its own trainer would tell it; and
evaluations as that trainer has them: a loss, the metric that compares them, sets by name.

When to log, save and evaluate is decided by transformers' `DefaultFlowCallback`, so that every strategy (steps, epoch,
best, no, fractions, delays) means what it means there. One generation of Covey's may be several optimiser steps: each
of them is announced; logs, checkpoints and evaluations that fall inside a generation come at its end.
"""

from __future__ import annotations

import dis
import inspect
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerControl, TrainerState
from transformers.trainer_utils import SaveStrategy

import covey
from covey.algorithms import policy_loss
from covey.errors import ConfigError
from covey.rollout.learning import loss_weights, teacher_logprobs
from covey.rollout.scoring import PROVIDED
from covey.training.evaluate import Evaluation, rollout_metrics
from covey.training.teaching import measured
from covey.trl.arguments import GRPOConfig
from covey.types import Group

_ENDED = tuple(f"completions/{name}_terminated_length" for name in ("mean", "min", "max"))  # 0 of none, as in TRL


class Rates:
    """The learning rate of the last step, for callbacks that ask a scheduler for it."""

    rate = 0.0

    def get_last_lr(self) -> list[float]:
        return [self.rate]

    def state_dict(self) -> dict[str, float]:
        return {"rate": self.rate}


class Flow:
    """A callback of Covey's trainer that drives those of transformers."""

    def __init__(
        self, trainer: Any, *, own: str, steps: int, per_epoch: int, save: Callable[[], None], evaluate: Any
    ) -> None:
        self._trainer, self.control = trainer, TrainerControl()
        self.args: GRPOConfig = trainer.args
        self.state: TrainerState = trainer.state
        self._steps, self._per_epoch, self._save, self._evaluate = steps, per_epoch, save, evaluate
        self._prefix = f"eval_{own}" if own else "eval"
        self._asked_to_save = False
        self._sums: dict[str, list[float]] = {}
        self._losses: list[float] = []
        self._began = time.perf_counter()

    def on_train_begin(self, _args: Any, _state: Any, control: TrainerControl, **_: Any) -> TrainerControl:
        self._began = time.perf_counter()
        self.state.max_steps = self._steps
        self.state.num_train_epochs = math.ceil(self._steps / self._per_epoch)
        self.state.compute_steps(self.args, self._steps)  # type: ignore[no-untyped-call]
        self._tell("on_train_begin")
        self._tell("on_epoch_begin")
        return self._ask(control)

    def on_log(self, _args: Any, inner: Any, control: TrainerControl, logs: Mapping[str, Any]) -> TrainerControl:
        numbers = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
        numbers |= {name: 0.0 for name in _ENDED if name not in numbers}
        if self.args.entropy_coef:
            numbers.setdefault("entropy_coef", self.args.entropy_coef)
        also = {ours: theirs for ours, theirs in self.args._also_logged.items() if ours in numbers}
        numbers |= {f"self_distillation/{theirs}": numbers[ours] for ours, theirs in also.items()}
        for name, value in numbers.items():
            self._sums.setdefault(name, []).append(value)
        self._losses.append(numbers.get("loss", 0.0))
        if isinstance(rates := self._trainer.lr_scheduler, Rates):
            rates.rate = numbers["learning_rate"]
        wanted = {"log": False, "save": False, "evaluate": False}
        last = min(self.state.global_step + self.args.optimizer_steps_per_generation, self._steps)
        try:
            while self.state.global_step < last:
                for event in ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step"):
                    self._tell(event)
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
        except BaseException:  # of a callback: the update is done, and a resume goes on after it
            self.state.global_step, self.state.epoch = last, last / self._per_epoch
            wanted["log"] |= self.control.should_log
            raise
        finally:
            for name, value in wanted.items():
                setattr(self.control, f"should_{name}", value)
            if self.control.should_log:
                self.control.should_log = False
                self._trainer.log(self._means())
        return self._ask(control)

    def on_evaluate(self, _args: Any, _state: Any, control: TrainerControl, metrics: Any) -> TrainerControl:
        self.evaluated(eval_names(metrics, self.args, self._prefix))
        if self._evaluate is not None:
            self._evaluate()
        return self._ask(control)

    def on_save(self, _args: Any, _state: Any, control: TrainerControl, **_: Any) -> TrainerControl:
        if self.state.global_step and (self._asked_to_save or self.args.save_strategy != SaveStrategy.NO):
            self._asked_to_save = False
            self._save()
            self._tell("on_save")
        return self._ask(control)

    def on_train_end(self, _args: Any, _state: Any, control: TrainerControl, **_: Any) -> TrainerControl:
        seconds = time.perf_counter() - self._began
        completions = (self.args.generation_batch_size or 0) * len(self._losses)
        summary = {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(completions / seconds, 3),
            "train_steps_per_second": round(self.state.global_step / seconds, 3),
            "total_flos": self.state.total_flos,
            "train_loss": sum(self._losses) / max(len(self._losses), 1),
        }
        self._trainer.log(self._means() | summary)
        self._tell("on_train_end")
        return control

    def record(self, logs: Mapping[str, Any]) -> None:
        """Append a record to the history and tell the callbacks, trackers among them."""
        record = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**record, "step": self.state.global_step})
        self._tell("on_log", logs=record)

    def evaluated(self, metrics: dict[str, Any]) -> None:
        """Log an evaluation and tell the callbacks; the best one so far is noted."""
        self._trainer.log(metrics)
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
        """Means over the generations since the last record, None of nothing (no completion was judged); last counts."""
        last = ("num_tokens", "policy_version", "phase", "learning_rate", "epoch")
        means = {}
        for name, values in self._sums.items():
            known = [value for value in values if not math.isnan(value)]
            means[name] = values[-1] if name in last else sum(known) / len(known) if known else None
        self._sums = {}
        means.pop("epoch", None)
        return means

    def _tell(self, event: str, **what: Any) -> None:
        self.control = getattr(self._trainer.callback_handler, event)(self.args, self.state, self.control, **what)

    def _ask(self, control: TrainerControl) -> TrainerControl:
        self._asked_to_save |= self.control.should_save
        for name in ("should_save", "should_evaluate"):
            setattr(control, name, getattr(control, name) or getattr(self.control, name))
            setattr(self.control, name, False)
        control.should_training_stop |= self.control.should_training_stop
        return control


def eval_names(metrics: Mapping[str, Any], args: GRPOConfig, prefix: str = "eval") -> dict[str, Any]:
    """`eval/reward` as TRL calls it: `eval_reward`; with transformers' runtime in seconds, prompts and batches each."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    found = {f"{prefix}_{name.removeprefix('eval/')}": value for name, value in numbers.items()}
    seconds, completions = metrics["eval/seconds"], metrics["eval/num_completions"]
    prompts = completions / (args.num_generations_eval or args.num_generations or 1)
    found[f"{prefix}_runtime"] = round(seconds, 4)
    found[f"{prefix}_samples_per_second"] = round(prompts / seconds, 3)
    found[f"{prefix}_steps_per_second"] = round(math.ceil(completions / args.per_device_eval_batch_size) / seconds, 3)
    return found


def compare_rewards(args: GRPOConfig, named: Iterable[str]) -> tuple[str, str]:
    """Which of several evaluation sets Covey's trainer measures itself, "" = there is one; and its metric.

    A policy is good for its reward: where the loss is asked for, `args` says so afterwards, and callbacks that read
    `args.metric_for_best_model` compare rewards too. Raises `ConfigError`: evaluations are to be compared, and no
    metric or set of several is named; or less is to be better.
    """
    wanted = args.metric_for_best_model or "loss"
    bare = wanted.removeprefix("eval_").removeprefix("eval/")
    own = max((name for name in named if bare.startswith(f"{name}_")), key=len, default="")
    metric = bare[len(own) + 1 :] if own else bare
    if metric == "loss":
        metric, bare = "reward", bare.removesuffix("loss") + "reward"
        if args.metric_for_best_model is not None:
            args.metric_for_best_model, args.greater_is_better = f"eval_{bare}", True
    elif args.greater_is_better is False:
        raise ConfigError(
            f"metric_for_best_model={wanted!r}, greater_is_better=False: of rewards more is better; leave it out"
        )
    if args.save_strategy == "best" and args.metric_for_best_model is None:
        raise ConfigError(
            "save_strategy='best' and metric_for_best_model=None: nothing says which is best; give 'eval_reward'"
        )
    if list(named) and not own:
        if args.load_best_model_at_end or args.save_strategy == "best":
            raise ConfigError(
                f"metric_for_best_model={wanted!r}: there are several evaluation sets, and it names none; give one of "
                + ", ".join(repr(f"eval_{name}_reward") for name in named)
            )
        own, metric = next(iter(named)), "reward"
    return own, f"eval/{metric}"


def _may_log(function: Any) -> bool:
    """Can a reward function call `log_metric`? It does not if it neither takes it nor uses its `**columns`."""
    try:
        parameters = inspect.signature(function).parameters.values()
        rest = [parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD]
        used = {instruction.argval for instruction in dis.get_instructions(inspect.unwrap(function))}
    except (TypeError, ValueError):
        return True  # written in C, or an object that is called: nobody knows
    return any(parameter.name == "log_metric" for parameter in parameters) or not used.isdisjoint(rest)


class Run(covey.GRPOTrainer):
    """Covey's trainer, whose evaluations have a loss and may be compared by a metric that reward functions log."""

    _taken = PROVIDED - {"prompt_ends"}  # TRL passes it on

    def __init__(self, *, compared_by: str | None, reward_funcs: Sequence[Callable[..., Any]], **given: Any) -> None:
        super().__init__(reward_funcs=reward_funcs, **given)
        if compared_by is None or not self.eval_prompts:
            return
        own = self.best_metric == compared_by and compared_by.startswith(("eval/reward", "eval/accuracy"))
        if not own and not any(_may_log(function) for function in reward_funcs):
            parts = ", ".join(f"eval_rewards/{name}/mean" for name in self.data.scorer.names)
            raise ConfigError(
                f"metric_for_best_model={compared_by[5:]!r}: no evaluation has it; choose eval_reward or {parts}, "
                "or let a reward function report it with log_metric"
            )
        self.best_metric = compared_by

    def evaluation(self, *values: Any, **options: Any) -> Evaluation:
        """With what a step measures too, and `eval/loss`: of its completions as one step of the policy that sampled."""
        found = super().evaluation(*values, **options)
        step = rollout_metrics(found.rollout, self.estimator, self.args.algorithm.scaling["correction"])
        step |= self._loss(found.rollout.groups)
        own = {f"eval/{name}": step.get(name, 0.0) for name in (*step, *_ENDED) if not name.startswith("time/")}
        return replace(found, metrics=own | found.metrics)

    def _loss(self, groups: Sequence[Group]) -> dict[str, float]:
        args = self.args
        objective, temperature = args.algorithm.objective(), args.evaluation.eval_temperature
        batch = self.make_batch(groups, self.phases.at(self._elapsed()))
        rows = np.flatnonzero(batch.sampled.any(axis=1))
        weights, own = loss_weights(batch, objective, args.sampling.max_completion_length)
        known: dict[str, Any] = {} if own is None else {"kl_weights": own}
        if objective.estimates_kl:
            known["ref"] = self.learner.scores(batch, rows, temperature=temperature, reference=True)[0]
        if objective.differentiates_entropy:
            known["entropy"] = self.learner.scores(batch, rows, temperature=temperature, entropy=True)[1]
        if objective.teacher is not None and not objective.distils_vocabulary:
            known["teacher"] = teacher_logprobs(batch, objective)
        logp = batch.old_logprobs  # the policy that sampled is the one that is measured
        if objective.loss.select is not None:
            known["selected"] = objective.select(logp, logp, batch.advantages, batch.mask, known.get("entropy"))
        of, given = torch.from_numpy, {name: torch.from_numpy(np.asarray(value)) for name, value in known.items()}
        old, masks = of(logp), of(np.asarray(batch.mask))
        terms = policy_loss(old, old, of(batch.advantages), masks, of(weights), objective, **given)
        sums, tokens = terms.metrics, max(float(terms.metrics["active_tokens"]), 1.0)
        means = {name: float(sums[f"{name}_sum"]) / tokens for name in ("kl", "entropy") if f"{name}_sum" in sums}
        means |= measured(self.args, batch, groups)
        return means if objective.distils_vocabulary else {"loss": float(terms.loss), **means}
