"""Evaluations as transformers' trainer has them: a loss, the metric that compares them, sets by name."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

import covey
from covey.algorithms import policy_loss
from covey.errors import ConfigError
from covey.rollout.learning import loss_weights
from covey.training.evaluate import Evaluation
from covey.trl.arguments import GRPOConfig
from covey.types import Group


def compare_rewards(args: GRPOConfig, named: Iterable[str]) -> tuple[str, str]:
    """Which of several evaluation sets Covey's trainer measures itself, "" = there is one; and its metric.

    A policy is good for its reward: where the loss is asked for, `args` says so afterwards, and callbacks that read
    `args.metric_for_best_model` compare rewards too.

    Raises:
        ConfigError: evaluations are to be compared, and no metric or set of several is named; or less is to be better.
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
            f"metric_for_best_model={wanted!r} with greater_is_better=False: of rewards and accuracies more is better; "
            "leave greater_is_better out"
        )
    if args.save_strategy == "best" and args.metric_for_best_model is None:
        raise ConfigError(
            "save_strategy='best' and metric_for_best_model=None: nothing says which model is best; set the latter to "
            "'eval_reward'"
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
    """Covey's trainer, whose evaluations have a loss and may be compared by a metric that reward functions log.

    Raises:
        ConfigError: nobody can measure that metric.
    """

    def __init__(self, *, compared_by: str | None, reward_funcs: Sequence[Callable[..., Any]], **given: Any) -> None:
        super().__init__(reward_funcs=reward_funcs, **given)
        if compared_by is None or not self.eval_prompts:
            return
        own = self.best_metric == compared_by and compared_by.startswith(("eval/reward", "eval/accuracy"))
        if not own and not any(_may_log(function) for function in reward_funcs):
            parts = ", ".join(f"eval_rewards/{name}/mean" for name in self.data.scorer.names)
            raise ConfigError(
                f"metric_for_best_model={compared_by[5:]!r}: nobody measures it; choose eval_reward or {parts}, "
                "or let a reward function report it with log_metric"
            )
        self.best_metric = compared_by

    def evaluation(self, *values: Any, **options: Any) -> Evaluation:
        """With `eval/loss`: that of its completions as one step of the policy that sampled them."""
        found = super().evaluation(*values, **options)
        found.metrics["eval/loss"] = self._loss(found.rollout.groups)
        return found

    def _loss(self, groups: Sequence[Group]) -> float:
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
        logp = batch.old_logprobs  # the policy that sampled is the one that is measured
        if objective.loss.select is not None:
            known["selected"] = objective.select(logp, logp, batch.advantages, batch.mask, known.get("entropy"))
        of, given = torch.from_numpy, {name: torch.from_numpy(np.asarray(value)) for name, value in known.items()}
        old, masks = of(logp), of(np.asarray(batch.mask))
        return float(policy_loss(old, old, of(batch.advantages), masks, of(weights), objective, **given).loss)
