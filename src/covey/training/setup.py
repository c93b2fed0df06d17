"""From a config, data and reward functions to the parts of a run; everything that can be wrong is found here, early.

Order matters: what is cheap to check (settings, data, rewards) comes before what takes seconds (the model). What counts
as right, which evaluation is the best and whether memory will do is decided here too.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from covey.adapters import CONFIG_FILE
from covey.algorithms import Estimator
from covey.backend import Backend
from covey.config.algorithm import AlgorithmConfig
from covey.config.data import NO_TIMEOUT, DataConfig
from covey.config.effects import correction_mode, uses_reference
from covey.config.whole import GRPOConfig
from covey.errors import ConfigError, DataError, naming
from covey.functions import load_function
from covey.rollout.scoring import PROVIDED, HasAnswer, IsCorrect, Scorer, has_text, right_by
from covey.tasks.dataset import build_prompts, load_rows, split_rows
from covey.tasks.order import DataOrder, WeightedOrder
from covey.training.refusals import require_one_process
from covey.training.schedule import PhasePlan, ResolvedPhase, learning_rate_schedule, resolve_warmup_steps
from covey.types import Episode, Prompt, SamplingSettings

if TYPE_CHECKING:
    from covey.environments.base import World
    from covey.rollout.learning import TrainedPolicy
    from covey.tasks.base import Task

log = logging.getLogger(__name__)
ONLY_HELD_OUT: Any = object()  # as `train_dataset`: nothing will be trained, and the held-out rows stand for it


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Rows before they are tokenised, with who scores them."""

    train: Sequence[Mapping[str, Any]]
    held_out: Sequence[Mapping[str, Any]]
    scorer: Scorer
    system_prompt: str | None
    is_correct: IsCorrect | None
    has_answer: HasAnswer
    task: Any = None


def one_of(**named: Any) -> Any:
    """What was given under one of several names of one argument; None = under none."""
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: two names of one argument; pass one of them")
    return next(iter(given.values()), None)


def named_model(args: Any, model: Any) -> tuple[GRPOConfig, Any]:
    """Settings that name the model, and the model where it is a loaded one."""
    args = GRPOConfig() if args is None else args
    if not isinstance(args, GRPOConfig):
        raise ConfigError(f"args={args!r:.200}: a {type(args).__name__}; pass a GRPOConfig, such as GRPOConfig(...)")
    if isinstance(model, str | Path):
        return args.replace(model=str(model)), None
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    return args if model is None else args.replace(model=name), model


def named_in_settings(args: GRPOConfig, field: str, given: Any) -> tuple[GRPOConfig, Any]:
    """Settings that name a function that is given as text, `FILE.py:NAME`, or several; or else what is given."""
    is_text = isinstance(given, str) or (given and isinstance(given, list | tuple) and {*map(type, given)} == {str})
    return (args.replace(**{field: given}), None) if is_text else (args, given)


def other_reference(config: GRPOConfig, other: Any, model: Any) -> tuple[GRPOConfig, Any]:
    """`ref_model` where it is another checkpoint than the model, else None; and the settings that it needs."""
    path = os.path.expanduser(other) if isinstance(other, str | Path) else None
    same = path is not None and os.path.realpath(path) == os.path.realpath(config.model.model)
    if other is None or other is model or (same and config.model.adapter is None):
        return config, None
    is_adapter = path is not None and (Path(path) / CONFIG_FILE).is_file()
    beside = config.model.use_peft and not is_adapter
    moves = config.schedule.max_staleness > 0 or config.algorithm.reference_update != "none"
    for fails, why in (
        (path is None and not hasattr(other, "named_parameters"), "no model; give a loaded one, a folder or a hub id"),
        (not uses_reference(config), "nothing compares with it; set algorithm.beta above 0, or leave it out"),
        (config.distributed.learners > 1, "one learner has another reference; set distributed.learners to 1"),
        (
            beside and moves,
            "beside an adapter it needs schedule.max_staleness=0 and no algorithm.reference_update_steps",
        ),
    ):
        if fails:
            raise ConfigError(f"ref_model={path or type(other).__name__}: {why}")
    # Fused layers read joined copies of the weights.
    return config.replace(fused_layers=False) if beside else config, path or other


def check_estimator(config: GRPOConfig, world: World | None) -> Estimator:
    """The run's advantage estimator, if the rest of the run gives it what it needs."""
    estimator = config.algorithm.estimator
    if estimator.needs_turns and world is None:
        raise ConfigError(
            f"algorithm.adv_estimator={estimator.name!r}: it compares turns, so it needs environment.world; use grpo "
            "for single answers"
        )
    for name, value in (("task", config.data.task), ("dataset", config.data.dataset)):
        if world is not None and value is not None:
            raise ConfigError(
                f"data.{name}={value!r:.200} beside a world: an agent's tasks come from its world; remove one of them"
            )
    selection = config.algorithm.selection
    sizes = config.group_sizes
    if selection is not None and selection.statistics == "selected":
        sizes = {**sizes, "the number of algorithm.down_sampling": selection.size}
    import torch

    conversing = world is not None and config.environment.history_length is None
    tried = config.algorithm.objective(), torch.func.grad, torch.asarray
    if problem := estimator.group_problem(sizes) or estimator.credit_problem(*tried, conversing):
        raise ConfigError(problem)
    return estimator


def load_task(config: GRPOConfig) -> Task | None:
    """The task named by `data.task`, or None. `data.dataset` and `data.eval_dataset` are the files that it reads."""
    if config.data.task is None:
        return None
    from covey.tasks.base import configured_task

    return configured_task(config.data.task, config.data.dataset, config.data.eval_dataset)


def asked(task: Any, text: str) -> list[dict[str, str]]:
    """The conversation in which a task asks about a text; without a task that has `ask`, it is the user's message."""
    return task.ask(text) if hasattr(task, "ask") else [{"role": "user", "content": text}]


def load_world(config: GRPOConfig) -> World | None:
    """The world named by `environment.world`, or None."""
    if config.environment.world is None:
        return None
    from covey.environments.base import get_world

    return get_world(config.environment.world)


def with_adapter(config: GRPOConfig, policy: TrainedPolicy) -> GRPOConfig:
    """The `lora_...` settings of the adapter that was passed in their place, as a config or on the model."""
    own: Any = getattr(policy.model, "active_peft_config", None)
    if config.model.adapter is not None or not hasattr(own, "lora_alpha"):
        return config
    targets = own.target_modules
    lora: dict[str, Any] = {"lora_r": own.r, "lora_alpha": own.lora_alpha, "lora_dropout": own.lora_dropout}
    lora |= {"lora_target_modules": targets if isinstance(targets, str) else sorted(targets)} if targets else {}
    return config.replace(**lora)


def with_defaults(config: GRPOConfig, source: Task | World | None) -> GRPOConfig:
    """Completions as long as the task's answers or the world's actions need, unless the user said how long."""
    if source is None or "max_completion_length" in config.sampling.model_fields_set:
        return config
    return config.replace(max_completion_length=source.max_completion_length)


def load_data(
    config: GRPOConfig,
    task: Task | None,
    reward_funcs: Any = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    correct: Any = None,
    taken: Set[str] = PROVIDED,
) -> Data:
    """Rows, without columns of `taken` names, and reward functions: arguments, else of the config and its task."""
    data = config.data
    words = f"data.task={data.task or type(task).__name__!r}"
    how: dict[str, str] = {}
    both_of_task = task is not None and train_dataset is None and eval_dataset is None
    if train_dataset is None:
        with naming(f"{words}: train_rows"):
            train_dataset = task.train_rows(config.run.seed) if task else data.dataset
    if eval_dataset is None:
        with naming(f"{words}: eval_rows"):
            eval_dataset = task.eval_rows() if task else data.eval_dataset
    if train_dataset is None:
        raise DataError("no training data: pass train_dataset, or set data.dataset or data.task")
    if reward_funcs is None and config.rewards.functions:
        reward_funcs = [load_function(name) for name in config.rewards.functions]
    if reward_funcs is None:
        if task is None:
            raise ConfigError(
                "no reward function: pass reward_funcs, set rewards.functions (file.py:function), or choose data.task"
            )
        reward_funcs = task.reward_funcs
        if not both_of_task:
            how["fix"] = f"{words} brings its own rows: leave out the dataset or the task, or give the rows its columns"
    seconds = config.rewards.reward_timeout
    named = config.rewards.correctness
    if one_of(correctness=correct, **{"rewards.correctness": named}) is named and ":" in (named or ""):
        correct = load_function(str(named))
    timeout = None if seconds == NO_TIMEOUT else seconds
    scorer = Scorer(reward_funcs, config.rewards.reward_weights, timeout=timeout, judge=correct)
    comparing = [spec.name for spec in scorer.specs if spec.whole_batch]
    if comparing and config.sampling.max_generations is not None:
        raise ConfigError(
            f"sampling.max_generations={config.sampling.max_generations}: groups grow in rounds, but "
            f"{comparing[0]} has whole_batch = True, and so is to see all rows of a step at once; choose one of the two"
        )
    held_out = [] if eval_dataset is None else load_rows(eval_dataset, split="test", what="evaluation")
    train = held_out if train_dataset is ONLY_HELD_OUT else load_rows(train_dataset)
    if data.eval_fraction and (held_out or task is not None):
        told = "held-out prompts are given already (data.eval_dataset or a task); remove one of the two"
        raise ConfigError(f"data.eval_fraction={data.eval_fraction:g}: {told}")
    if data.eval_fraction:
        train, held_out = split_rows(train, data.eval_fraction, data.prompt_column)

    def key(row: Mapping[str, Any]) -> str:
        return repr(sorted((str(name), repr(value)) for name, value in row.items() if name not in ("uid", "id")))

    known = {key(row) for row in train} if held_out and train is not held_out else set()
    seen = sum(key(row) in known for row in held_out)
    if seen and both_of_task:
        raise DataError(
            f"{words}: {seen} of its {len(held_out)} eval_rows are train_rows too; the evaluation would be of what was "
            "trained: leave them out of one of the two"
        )
    if seen:
        log.warning(
            f"{seen} of the {len(held_out)} held-out rows (data.eval_dataset) are training rows too, so their accuracy "
            "is not a held-out result; remove them from one of the two"
        )
    if config.evaluation.num_eval_prompts is not None:
        held_out = held_out[: config.evaluation.num_eval_prompts]
    for rows in (train, held_out):
        if rows:
            columns = {name for row in rows for name in row if name != data.prompt_column}
            if lost := sorted(columns & taken):
                raise DataError(f"the column {lost[0]!r}: rewards get another argument of this name; rename the column")
            scorer.check_columns(columns, **how)
            for function in (spec.function for spec in filter(None, (*scorer.specs, scorer.judge))):
                getattr(function, "check_rows", lambda rows: None)(rows)  # Covey's own read their references
    system_prompt = data.system_prompt or (task.system_prompt if task else None)
    if task is None:
        by_reward = correctness(config, scorer, None)
        _try_correctness(scorer, by_reward, train, data)
        return Data(train, held_out, scorer, system_prompt, by_reward, has_text)

    def is_correct(prompt: Prompt, text: str) -> bool:
        with naming(f"{words}: is_correct"):
            found = task.is_correct(text, prompt.columns)
        if not isinstance(found, bool | np.bool_):
            raise ConfigError(f"{words}: is_correct returned {found!r:.80}; return True or False")
        return bool(found)

    def has_answer(prompt: Prompt, text: str) -> bool:
        with naming(f"{words}: has_answer"):
            return task.has_answer(text, prompt.columns)

    by_task = correctness(config, scorer, is_correct)
    return Data(train, held_out, scorer, system_prompt, by_task, has_answer, task)


def tokenize(
    config: GRPOConfig, rows: Sequence[Mapping[str, Any]], data: Data, policy: TrainedPolicy, context_length: int
) -> list[Prompt]:
    """Rows -> prompts, through the chat template where they are conversations; with tools they all are."""
    column = config.data.prompt_column
    if config.environment.tools:
        said = (row.get(column) for row in rows)
        asked = ([{"role": "user", "content": each}] if isinstance(each, str) else each for each in said)
        rows = [{**row, column: each} if column in row else row for row, each in zip(rows, asked, strict=True)]
    own = getattr(policy, "album", None)
    album, blind = picture_reader(config, policy)
    prompts = build_prompts(
        rows,
        policy.tokenizer,
        prompt_column=column,
        system_prompt=data.system_prompt,
        max_prompt_length=config.data.max_prompt_length,
        context_length=context_length,
        max_completion_length=config.sampling.max_completion_length,
        chat_template_kwargs=config.data.chat_template_kwargs,
        long_prompts=config.data.long_prompts,
        album=own,
    )
    if album is None and own is not None and any(prompt.has_pictures for prompt in prompts):
        raise ConfigError(f"{blind}; leave it out")
    return prompts


def picture_reader(config: GRPOConfig, policy: TrainedPolicy) -> tuple[Any, str]:
    """What reads a vision model's pictures, made ready; or None, and why none are read."""
    if (album := getattr(policy, "album", None)) is None or not album.reads:
        return None, "the model reads none"
    elsewhere = {"server": bool(config.server.upload_adapters_to_server)}
    elsewhere |= {"distributed.learner_kind": getattr(policy, "in_shards", False)}
    elsewhere |= {"algorithm.teacher": config.algorithm.teacher is not None}
    if names := [name for name, used in elsewhere.items() if used]:
        return None, f"{names[0]}: pictures are read by Covey's own engines, in-process vLLM and replicated learners"
    if config.schedule.max_staleness > 0 and (config.environment.tools or config.environment.world):
        album.check()  # and not in a thread that samples while weights change
    return album, ""


def make_order(config: GRPOConfig, count: int, weights: Callable[[], NDArray[np.float64]]) -> DataOrder | WeightedOrder:
    """The order in which the training prompts are visited."""
    if config.data.prompt_order == "difficulty":
        return WeightedOrder(count, config.run.seed, weights)
    return DataOrder(count, config.run.seed, config.data.prompt_order == "random")


def sampling_settings(config: GRPOConfig, policy: TrainedPolicy, temperature: float) -> SamplingSettings:
    """Sampling as in training, at a given temperature."""
    sampling = config.sampling
    return SamplingSettings(
        temperature=temperature,
        **sampling.cut,
        max_tokens=sampling.max_completion_length,
        eos_token_ids=tuple(policy.eos_token_ids),
        stop_strings=tuple(sampling.stop_strings),
        keep_support=config.algorithm.keep_sampling_mask and temperature > 0,
    )


def algorithm_in(config: GRPOConfig, phase: ResolvedPhase) -> AlgorithmConfig:
    """The algorithm section as it holds in this phase, the correction for the sampler resolved."""
    changes = {"beta": phase.beta, "importance_sampling_correction": correction_mode(config)}
    return config.algorithm.model_copy(update=changes)


@dataclass(frozen=True, slots=True)
class RunLength:
    """When a run ends and how its learning rate goes."""

    total_steps: int | None
    max_seconds: float | None
    learning_rate: float
    factor: Callable[[int], float]
    optimizer_steps: int = 1
    max_optimizer_steps: int | None = None

    def rates(self, phase: ResolvedPhase, step: int) -> list[float]:
        """Learning rates of the optimiser steps of the step that follows `step` finished ones."""
        counted = [step] * self.optimizer_steps
        if self.max_optimizer_steps is not None:
            first = step * self.optimizer_steps
            counted = list(range(first, min(first + self.optimizer_steps, self.max_optimizer_steps)))
        return [phase.effective_learning_rate(self.learning_rate, self.factor(taken)) for taken in counted]


def run_length(config: GRPOConfig, plan: PhasePlan, num_prompts: int) -> RunLength:
    """Steps of the run: those of the phases, `max_steps`, or `num_train_epochs` passes over the prompts."""
    schedule = config.schedule
    per_step = config.algorithm.optimizer_steps
    total = plan.total_steps if schedule.phases else None
    if schedule.max_optimizer_steps is not None:
        total = math.ceil(schedule.max_optimizer_steps / per_step)
    elif schedule.max_steps > 0:
        total = schedule.max_steps if total is None else min(total, schedule.max_steps)
    elif not schedule.phases:
        total = max(1, math.ceil(schedule.num_train_epochs * num_prompts / config.data.prompts_per_step))
    optim, counted = config.optim, schedule.max_optimizer_steps or total
    seconds = None if schedule.max_minutes is None else 60 * schedule.max_minutes
    factor = learning_rate_schedule(
        optim.lr_scheduler_type,
        learning_rate=optim.learning_rate,
        warmup_steps=resolve_warmup_steps(optim.warmup_steps, counted),
        total_steps=counted,
        options=optim.lr_scheduler_kwargs,
    )
    return RunLength(total, seconds, optim.learning_rate, factor, per_step, schedule.max_optimizer_steps)


def phase_plan(config: GRPOConfig) -> PhasePlan:
    """The phases of the run, with the settings that hold where a phase sets none."""
    return PhasePlan(
        config.schedule.phases,
        temperature=config.sampling.temperature,
        beta=config.algorithm.beta,
        num_generations=config.sampling.num_generations,
    )


def decoder(policy: TrainedPolicy) -> Callable[[Sequence[int]], str]:
    """Token ids -> text without special tokens."""
    return lambda ids: str(policy.tokenizer.decode(list(ids), skip_special_tokens=True))


def correctness(config: GRPOConfig, scorer: Scorer, by_task: IsCorrect | None) -> IsCorrect | None:
    """Who says which completions are right: the task, a reward by its name, or the scorer's judge; None = nobody."""
    judge = scorer.judge
    named = config.rewards.correctness or (judge and judge.name)
    if named is None:
        asking = [
            (f"schedule.phases[{index}].min_accuracy={phase.min_accuracy}", "remove min_accuracy")
            for index, phase in enumerate(config.schedule.phases)
            if phase.min_accuracy is not None
        ]
        if config.data.prompt_order == "difficulty":
            asking.append(("data.prompt_order='difficulty'", "set data.prompt_order to random"))
        if asking and by_task is None:
            setting, instead = asking[-1]
            raise ConfigError(
                f"{setting}: nothing says here which completions are right; name the reward that is 1 for a right "
                f"completion and 0 for a wrong one in rewards.correctness, or {instead}"
            )
        return by_task
    if by_task is not None:
        raise ConfigError(
            f"rewards.correctness={named!r}: data.task={config.data.task!r} says already which answers are right; "
            "remove one of them"
        )
    if judge is not None:
        return next((spec.name for spec in scorer.specs if spec.function is judge.function), scorer)
    if named not in scorer.names:
        there = f"there is {', '.join(scorer.names)}; for one that is no reward write FILE.py:FUNCTION"
        told = f"is no reward function; {there} (in Python: GRPOTrainer(correctness=...))"
        raise ConfigError(f"rewards.correctness={named!r}: {told}")
    return named


def _try_correctness(scorer: Scorer, by: Any, rows: Sequence[Mapping[str, Any]], data: DataConfig) -> None:
    """Judge texts of a few rows before a model is loaded: `RewardError` for partial credit where 1 or 0 is due."""
    if by is None:
        return
    column, few, ids = data.prompt_column, rows[:3], np.zeros(1, np.int64)
    texts = ["", *(text for row in few for name, text in row.items() if name != column and isinstance(text, str))][:12]
    prompts = [Prompt(ids, row.get(column, ""), row) for row in few for _ in texts]
    if data.system_prompt is not None and all(isinstance(prompt.content, str) for prompt in prompts):
        prompts = [replace(p, content=[{"role": "user", "content": p.content}]) for p in prompts]  # see `build_prompts`
    said = [Episode(ids, ids > 0, np.zeros(1, np.float32), text, "stop", 0) for _ in few for text in texts]
    try:
        name, given = scorer.judged(prompts, said, by if isinstance(by, str) else None)
    except Exception:  # what fails for these texts need not for a model's, and prompts are looked at later
        return
    finally:
        scorer.take_logged()
    right_by(name, given)


def default_backend() -> Backend:
    """PyTorch's, which is loaded when a run is made: the name `GRPOTrainer` alone needs no torch."""
    from covey.pytorch.backend import BACKEND

    require_one_process()
    return BACKEND


def may_wait(config: GRPOConfig) -> bool:
    """Whether sampler and learner can be made later, which finds no mistake that making the policy has not found."""
    chosen, sampling = config.distributed, config.sampling
    elsewhere = config.server.upload_adapters_to_server or chosen.samplers is not None
    usual = (sampling.engine, sampling.sampler_dtype, config.model.quantization) == ("covey", "model", "none")
    usual = usual and not config.environment.tools
    return not elsewhere and chosen.learners == 1 and usual and config.optim.optimizer == "adamw"
