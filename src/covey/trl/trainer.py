"""`covey.trl.GRPOTrainer`: TRL's trainer, with Covey's underneath.

    from covey.trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer("Qwen/Qwen3-0.6B", reward_funcs=reward, args=GRPOConfig("out"), train_dataset=rows)
    trainer.train()

`trainer.run` is the `covey.GRPOTrainer` that does the work. Its run folder is `output_dir/covey`; checkpoints in
transformers' layout (`checkpoint-10/`) and the trained model lie in `output_dir`, where a transformers user looks.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import count, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import DefaultFlowCallback, TrainerState
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, TrainOutput

import covey
from covey.errors import ConfigError, CoveyError, DataError
from covey.files import remove_folder
from covey.observe.run_folder import RunFolder
from covey.rollout.collect import AnswerCollector, Collector
from covey.rollout.learning import Sampler
from covey.tasks.dataset import load_rows
from covey.training.checkpoint import list_checkpoints
from covey.training.evaluate import with_logged
from covey.training.refusals import require_one_process
from covey.trl.agents import Acting, is_stream, read_in_order
from covey.trl.arguments import GRPOConfig, warned
from covey.trl.flow import Flow, Rates, Run, compare_rewards, eval_names
from covey.trl.generating import Generating, check_options
from covey.trl.loading import model_name, place_model, with_models
from covey.trl.methods import Formulas, NeverCalled
from covey.trl.saving import POINTER, RUN_FOLDER, Saving
from covey.trl.tables import columns, send, show
from covey.trl.tools import methods
from covey.trl.translate import generate_options, optimizer_steps, prompts_per_generation, settings

log = logging.getLogger("covey.trl")


class GRPOTrainer(Saving, Formulas, NeverCalled):
    """Trains a language model with GRPO; arguments, attributes and methods are those of TRL 1.16's trainer.

    Args:
        model: hub id, folder, .gguf file, `pkg:NAME`, a `transformers` model or a `PeftModel`.
        reward_funcs: functions, sequence-classification models or their names, one or a list.
        args: the settings; None = `GRPOConfig("NAME-GRPO")`.
        train_dataset: a `Dataset`, `IterableDataset` (with `max_steps`), list of dicts or file, with a column `prompt`.
        eval_dataset: held-out prompts in the same forms, or a dict of several by name.
        processing_class: the tokenizer; None = the model's own.
        reward_processing_classes: tokenizers of reward models.
        callbacks: `transformers.TrainerCallback`s.
        optimizers: (optimizer, scheduler) in place of AdamW and the settings' schedule; either may be None.
        quantization_config: with `peft_config`: a `BitsAndBytesConfig` or `TorchAoConfig` for the frozen model.
        peft_config: a `peft.LoraConfig`; None = all weights are trained.
        tools: functions with type hints and docstrings, sync or async, that the model may call; see `docs/agents.md`.
        rollout_func: `f(prompts, trainer)` samples in place of the engine.
        environment_factory: makes an environment, whose methods are tools; or a dict of such functions. `reward_funcs`
            is optional if the environment has `get_reward`; `train_dataset` too with a single one (set `max_steps`).

    Attributes:
        run: Covey's own trainer, which does the work.
        args: the settings as they were given.
        state: transformers' `TrainerState`; `global_step` counts optimiser steps.
        reward_funcs: all reward functions; those of environments come last.

    Raises `ConfigError, DataError, ModelError, RewardError`: settings, data, model or rewards cannot work; before
    training. All are also a `ValueError` or `RuntimeError`.
    """

    _config_class, _suffix = GRPOConfig, "-GRPO"

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        require_one_process()
        config = self._config_class
        self.args = args = config(f"{model_name(model)}{self._suffix}") if args is None else args
        if not isinstance(args, config) or args._rewarded != config._rewarded:
            raise ConfigError(
                f"args={args!r:.200}: pass a covey.trl {config.__name__} (beside a covey.GRPOConfig use "
                "covey.GRPOTrainer)"
            )
        _ = args.device  # scripts read args.distributed_state, which is made with it
        for sentence in warned(args):
            warnings.warn(sentence, stacklevel=2)
        if args.importance_sampling_level == "sequence" and args.loss_type in ("bnpo", "dr_grpo", "dapo", "cispo"):
            said = "importance_sampling_level='sequence' with loss_type=%r: the loss sums tokens, which weights each "
            said += "sequence by its completion length; set loss_type='grpo' for GSPO's objective"
            log.warning(said, args.loss_type)
        self._acting = acting = Acting(args, tools, environment_factory, rollout_func)
        if reward_funcs is None and not acting.rewards:
            raise ConfigError(
                "No reward source provided: without a reward nothing is learned; pass reward_funcs, or get_reward"
            )
        given, trusted = [] if reward_funcs is None else reward_funcs, args.trust_remote_code
        self.reward_funcs, own = with_models(given, reward_processing_classes, trust_remote_code=trusted)
        self.reward_processing_classes = own + [None] * len(acting.rewards)
        self.reward_funcs += acting.rewards
        acting.expect(self.reward_funcs)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        if eval_dataset is None and (args.eval_strategy != "no" or args.eval_on_start):
            raise ConfigError(
                f"eval_dataset=None beside eval_strategy={IntervalStrategy(args.eval_strategy).value!r} and "
                f"eval_on_start={args.eval_on_start}: there is nothing to evaluate on; pass it, or switch both off"
            )
        self._generate_options = generate_options(args)
        check_options(self._generate_options)
        lora = peft_config is not None or isinstance(model, PeftModel)
        self._named: dict[str, Any] = dict(eval_dataset) if isinstance(eval_dataset, Mapping) else {}
        read_in_order(args, train_dataset, [eval_dataset, *self._named.values()])
        self._rows = acting.rows(self._training_rows(acting.training_rows(train_dataset)))
        self._own, self._metric = compare_rewards(args, self._named)
        placed, more = place_model(args, model, processing_class, lora=lora, quantization_config=quantization_config)
        more |= {"output_dir": str(self._root / RUN_FOLDER), "metric_for_best_model": self._metric}
        more |= self._taught()
        self._config = settings(args, num_prompts=len(self._rows), lora=lora, **more, **acting.settings())
        self._peft_config, self._optimizers = peft_config, optimizers
        self._rates = Rates()
        self.state = TrainerState(is_local_process_zero=True, is_world_process_zero=True)
        self.run = self._make_run(*placed)
        for name, rows in self._named.items():
            try:  # the run has read its own set only
                if name != self._own and not is_stream(rows):
                    self.run._tokenize(load_rows(acting.rows(rows, "test"), split="test", what="evaluation"))
            except DataError as error:
                raise DataError(f"eval_dataset[{name!r}]: {error}") from error
        text = self.model.config.get_text_config()
        if args.router_aux_loss_coef is None and getattr(text, "router_aux_loss_coef", False):
            log.warning("router_aux_loss_coef: this model has a balance loss, which is not computed; set it to 0")
        every = [DefaultFlowCallback(), *self._trackers(), *(callbacks or ())]
        told = (self.model, self.processing_class, self.optimizer, self.lr_scheduler)
        self.callback_handler: Any = CallbackHandler(every, *told)  # type: ignore[no-untyped-call]
        if args.push_to_hub:
            self.init_hf_repo()
        self.callback_handler.on_init_end(args, self.state, self._flow.control)

    def _taught(self) -> dict[str, Any]:
        """Covey's settings of a teacher."""
        return self.args.taught()

    def _training_rows(self, dataset: Any) -> list[dict[str, Any]]:
        """All rows; of a stream, which may never end, as many as the run needs."""
        if dataset is None:
            raise DataError("train_dataset=None: a `train_dataset` is required; pass one with a column 'prompt'")
        if is_stream(dataset):
            if self.args.max_steps <= 0:
                raise ConfigError("train_dataset: a stream and its run have no length; set max_steps in GRPOConfig")
            generations = -(-self.args.max_steps // self.args.optimizer_steps_per_generation)
            dataset = list(islice(dataset, generations * prompts_per_generation(self.args)))
        return load_rows(dataset)

    def _make_run(self, model: Any, tokenizer: Any) -> Run:
        optimizer, scheduler = self._optimizers
        if optimizer is None and scheduler is not None:
            raise ConfigError("optimizers=(None, scheduler): a scheduler belongs to an optimizer; pass both")
        others = {name: rows for name, rows in self._named.items() if name != self._own}
        per_epoch = max(len(self._rows) // prompts_per_generation(self.args), 1)
        self._flow = Flow(
            self,
            own=self._own,
            steps=optimizer_steps(self.args, len(self._rows)),
            per_epoch=per_epoch * self.args.optimizer_steps_per_generation,
            save=self._save_checkpoint,
            evaluate=(lambda: self.evaluate(others)) if self._named else None,
        )
        run = Run(
            model=model,
            reward_funcs=self.reward_funcs,
            args=self._config,
            train_dataset=self._rows,
            eval_dataset=self._acting.rows(self._named[self._own] if self._named else self.eval_dataset, "test"),
            processing_class=tokenizer,
            peft_config=self._peft_config,
            callbacks=[self._flow],
            sampler=self._sampler,
            collector=self._collector,
            compared_by=self._metric if self.args.metric_for_best_model is not None else None,
        )
        if optimizer is not None:
            run.learner.use_optimizer(optimizer, scheduler)  # type: ignore[attr-defined]
        return run

    def _sampler(self, run: covey.GRPOTrainer, engine: Sampler) -> Sampler:
        """The engine, or the model's own `generate`; a server samples by itself."""
        if run.args.server.upload_adapters_to_server:
            return engine
        return Generating(run, engine, self.args, self._generate_options)

    def _collector(self, run: covey.GRPOTrainer) -> Collector:
        acting, toolset = self._acting.collector(run, self), self._acting.toolset
        if acting and (toolset.has_environments or not toolset.tools) and any(p.has_pictures for p in run.prompts):
            raise ConfigError("environment_factory or rollout_func: with them no prompt may have pictures yet")
        return acting or AnswerCollector(run.engine, run.data.scorer, run.decode)

    def _trackers(self) -> list[Any]:
        """Transformers' own reporting callbacks; one that is not installed is found now, not at the first log."""
        found = []
        known: Any = get_reporting_integration_callbacks
        for name, callback in zip(self.args.report_to or (), known(self.args.report_to), strict=True):
            try:
                found.append(callback())
            except (RuntimeError, ImportError) as error:
                raise ConfigError(
                    f"report_to={name!r}: {str(error).splitlines()[0]:.200}; install it, or set 'none'"
                ) from error
        return found

    model = model_wrapped = property(attrgetter("run.policy_model"), doc="What is trained, with its adapter.")
    control = property(attrgetter("_flow.control"), doc="What callbacks have asked for, a `TrainerControl`.")
    processing_class = tokenizer = property(attrgetter("run.policy.tokenizer"), doc="The tokenizer.")
    optimizer = property(attrgetter("run.learner.optimizer"), doc="The optimiser.")
    num_generations = property(attrgetter("args.num_generations"), doc="Completions for each prompt.")
    beta = property(attrgetter("args.beta"), doc="Weight of the KL.")
    temperature = property(attrgetter("args.temperature"), doc="Divides the logits before sampling.")
    max_completion_length = property(attrgetter("args.max_completion_length"), doc="Longest completion, in tokens.")
    add_callback = property(attrgetter("callback_handler.add_callback"), doc="Adds a callback, or a class of one.")
    pop_callback = property(attrgetter("callback_handler.pop_callback"), doc="Takes a callback out and returns it.")
    remove_callback = property(attrgetter("callback_handler.remove_callback"), doc="Takes a callback out.")
    tools = property(attrgetter("_acting.toolset.tools"), doc="What the model may call: functions, then methods.")
    _tools_accept_completion_idx = property(attrgetter("_acting.toolset.accepts_index"))
    _environment_pool = property(attrgetter("_acting.toolset.pools"))
    aux_loss_enabled = False  # the balance loss of a mixture of experts is not computed
    is_fsdp_enabled = is_deepspeed_enabled = False

    # None where `beta` is 0, and with LoRA, where it is the model with its adapter off.
    ref_model = property(lambda self: None if self.run.policy.uses_peft else self.run.ref_model, doc="The reference.")

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler in `optimizers`, or else an object with the current learning rates (`get_last_lr`)."""
        return self._optimizers[1] or self._rates

    @cached_property
    def accelerator(self) -> Any:
        """An `accelerate.Accelerator` of this one process: `is_main_process`, `device`, `unwrap_model`, ..."""
        from accelerate import Accelerator

        return Accelerator(cpu=self.args.use_cpu)

    @property
    def reward_func_names(self) -> list[str]:
        """Names under which rewards are logged."""
        return list(self.run.data.scorer.names)

    @property
    def reward_weights(self) -> torch.Tensor:
        """`[F]` weights of the reward functions."""
        return torch.tensor(self.run.data.scorer.weights, dtype=torch.float32)

    @property
    def environments(self) -> list[Any] | None:
        """The environments of the latest completions, in their order; None without any."""
        return self._acting.toolset.environments or None

    @property
    def _env_tools(self) -> dict[Any, list[Callable[..., Any]]]:
        """By name, what the model may call of each environment."""
        return {name: methods(pool[0]) for name, pool in self._environment_pool.items()}

    @property
    def entropy_coef(self) -> float:
        """The current weight of the entropy bonus."""
        moved = self.run.state.entropy_coef
        return self.args.entropy_coef if moved is None else moved

    @property
    def _logs(self) -> dict[str, Any]:
        """The latest generation, column by column: prompts, completions, rewards, advantages, what functions logged."""
        table = columns(self._latest(), self.state.global_step)
        rewards = {name: table.pop(name, []) for name in self.reward_func_names}
        first = {"images": [], "prompt": table.pop("prompt"), "completion": table.pop("completion"), "rewards": rewards}
        table.pop("step")
        return first | {"advantages": table.pop("advantage"), "extra": table}

    def _latest(self) -> list[dict[str, Any]]:
        """Rows of the run folder, one for each completion of the latest generation; none before the first."""
        folder, step = Path(self._config.run.output_dir), self.run.state.global_step
        return RunFolder.read(folder).read_completions(step) if step and RunFolder.is_run(folder) else []

    def __repr__(self) -> str:
        return f"covey.trl.{self.run!r}"

    def get_num_trainable_parameters(self) -> int:
        """Numbers that are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def is_world_process_zero(self) -> bool:
        """True: there is one process."""
        return True

    is_local_process_zero = is_world_process_zero

    def train(self, resume_from_checkpoint: str | bool | None = None, **_: Any) -> TrainOutput:
        """Run GRPO to its end.

        Args:
            resume_from_checkpoint: True = the newest `checkpoint-N` in `output_dir`, a path = that one. Without it the
                run begins at its first step, with the weights as they are now; an earlier run of the same `output_dir`
                is kept beside the new one.

        Raises:
            CheckpointError: there is no such checkpoint.
            RewardError, GenerationError, RunFolderError: the run stopped and can be resumed.
            HubError: the upload of `push_to_hub` failed; the run is finished, and the model is in `output_dir`.
        """
        inner = None
        if resume_from_checkpoint:
            folder = self._checkpoint(resume_from_checkpoint)
            vars(self.state).update(vars(TrainerState.load_from_json(str(folder / "trainer_state.json"))))
            inner = str(self._inner_checkpoint(folder))
        else:
            self._begin_anew()
        try:
            self.run.train(resume_from_checkpoint=inner)
        except (KeyboardInterrupt, CoveyError):
            unsaved = self.args.save_strategy == SaveStrategy.NO or not self.state.global_step
            if unsaved and list_checkpoints(self._checkpoints):
                self._save_checkpoint()  # without it, what the run says of resuming would not hold
            raise
        if self.args.push_to_hub:
            self.push_to_hub()
        last = self.state.log_history[-1]
        return TrainOutput(self.state.global_step, last["train_loss"], dict(last))

    def _begin_anew(self) -> None:
        """Step 0 again, with the weights as they are; what an earlier run wrote is moved aside."""
        folder = Path(self._config.run.output_dir)
        if RunFolder.is_run(folder) and not list_checkpoints(folder / "checkpoints"):
            remove_folder(folder)  # nothing was learned in it
        elif RunFolder.is_run(folder):
            kept = next(path for n in count(1) if not (path := folder.with_name(f"{folder.name}-{n}")).exists())
            for old in folder.parent.glob(f"checkpoint-*/{POINTER}"):
                old.parent.rename(folder / old.parent.name)  # its counts are of that run
            folder.rename(kept)  # last, so that a checkpoint and Covey's that it goes with are never apart
            log.warning("%s: the run that was there is kept as %s", folder, kept.name)
        if self.state.global_step:
            vars(self.state).update(vars(TrainerState(is_local_process_zero=True, is_world_process_zero=True)))
            self.run = self._make_run(self.model, self.processing_class)
            self.callback_handler.model, self.callback_handler.optimizer = self.model, self.optimizer

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate the policy on held-out prompts, log the metrics and return them, such as `eval_reward`.

        Args:
            eval_dataset: replaces the trainer's; the datasets of a dict are evaluated one after the other.
            ignore_keys: has no effect.
            metric_key_prefix: prefix of the metrics' names.

        Raises `DataError`: there are no held-out prompts.
        """
        source = self.eval_dataset if eval_dataset is None else eval_dataset
        if source is None:
            raise DataError("no held-out prompts: pass eval_dataset to evaluate or to the trainer")
        if isinstance(source, Mapping):
            found: dict[str, float] = {}
            for name, rows in source.items():
                found |= self.evaluate(rows, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        measured = self.run.evaluate(self._acting.rows(source, "test"))
        measured = with_logged(measured, self.run.data.scorer.take_logged().metrics, "eval/")
        metrics = eval_names(measured, self.args, metric_key_prefix)
        self._flow.evaluated(metrics)
        return metrics

    def end(self) -> None:
        """Do nothing: there is one process, and trackers end with training."""

    def generate(self, prompts: Sequence[Any], num_generations: int = 1) -> list[list[str]]:
        """Sample completions of prompts with the current weights.

        Args:
            prompts: strings or conversations.
            num_generations: completions of each.

        Returns:
            The completions' texts, a list for each prompt.
        """
        rollout = self.run.complete(self._acting.rows([{"prompt": prompt} for prompt in prompts]), num_generations)
        return [[episode.text for episode in group.episodes] for group in rollout.groups]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add a record to the history, and pass it to callbacks and trackers. Subclasses may extend it."""
        self._flow.record(logs)
        if self.args.log_completions and "loss" in logs and (rows := self._latest()):
            show(columns(rows, self.state.global_step), self.args.num_completions_to_print)
            table = columns(rows, self.state.global_step, unique_prompts=self.args.log_unique_prompts)
            send(table, self.args.report_to or (), self.callback_handler.callbacks)
