"""Sampling ahead: its order, ages and errors with a fake sampler, and whole runs on a tiny model."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_kill_and_resume import VOLATILE, killed, numbers, run

from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError, RewardError
from covey.observe import describe_metric
from covey.observe.run_folder import RunFolder
from covey.rollout.collect import AnswerCollector, Rollout, collect_groups
from covey.rollout.learning import Correction
from covey.rollout.scoring import Logged
from covey.training import setup
from covey.training.prefetch import PrefetchedSamples, Sampled, staleness_metrics
from covey.training.schedule import Elapsed, PhasePlan, TrainerState
from covey.training.update import update
from covey.types import Completion, Episode, Group, Prompt

ROWS = [{"prompt": f"say {word}: "} for word in ("one", "two", "three", "four", "five")]
THREAD = "covey-sampling"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD)]


# --- ages, with a sampler of our own --------------------------------------------------------------------------------


def group(version: int) -> Group:
    prompt = Prompt(np.array([1]), "?", {}, "q")
    completion = Completion(np.array([2]), np.zeros(1, np.float32), "stop", version)
    return Group(prompt, (Episode.from_completion(prompt, completion, "!"),), np.zeros(1))


class FakeRun:
    """Weights are a number; sampling waits for the gate."""

    def __init__(self, max_staleness: int, *, drop: bool) -> None:
        self.state = TrainerState(policy_version=0)
        self.gate = threading.Semaphore(0)
        self.synced: list[int] = []
        self.asked: list[int] = []
        self.error_at = -1
        plan = PhasePlan((), temperature=1.0, beta=0.0, num_generations=2)
        self.next_phase = lambda: plan.at(Elapsed())
        self.steps_ahead = lambda: max_staleness
        self.publish = lambda: self.synced.append(self.state.policy_version)
        self.engine: Any = SimpleNamespace(release=lambda: pytest.fail("the sampler's memory is in use"))
        self.samples = PrefetchedSamples(self, max_staleness, drop=drop)

    def sample_step(self, phase: Any, position: int, version: int, progress: Any) -> Sampled:
        while not self.gate.acquire(timeout=0.01):
            progress(0, 1)
        self.asked.append(position)
        if position == self.error_at:
            raise RewardError("no such luck")
        return Sampled(
            Rollout((group(version), group(version)), 0.0, 0.0, 2), phase, position + 2, None, Logged({}, {})
        )

    def step(self, optimizer_steps: int = 1) -> tuple[int, dict[str, float]]:
        """One step of training: position of its groups, and the metrics."""
        sampled = self.samples.next()
        self.samples.before_update()
        self.samples.after_update()
        self.state.policy_version += optimizer_steps
        self.samples.publish()
        return sampled.position, self.samples.metrics()


def test_waiting_gives_every_step_its_age() -> None:
    fake = FakeRun(2, drop=False)
    fake.gate.release(100)
    steps = [fake.step() for _ in range(5)]
    fake.samples.close()
    assert [position for position, _ in steps] == [2, 4, 6, 8, 10]
    assert [metrics["staleness/mean"] for _, metrics in steps] == [0, 1, 2, 2, 2]
    assert fake.synced == [1, 2, 3, 4, 5]
    assert all(metrics["staleness/dropped_groups"] == 0 for _, metrics in steps)


def test_a_step_without_an_optimiser_step_makes_nothing_older() -> None:
    fake = FakeRun(1, drop=False)
    fake.gate.release(100)
    ages = [fake.step(steps)[1]["staleness/max"] for steps in (1, 0, 1, 1)]
    fake.samples.close()
    assert ages == [0, 1, 0, 1]


def test_dropping_goes_on_without_waiting_and_drops_what_is_too_old() -> None:
    fake = FakeRun(2, drop=True)
    fake.gate.release(2)  # the groups of two steps; those of the third are under way
    assert fake.step()[1]["staleness/mean"] == 0
    wait(list(fake.samples._begun)[:1])
    assert fake.step()[1]["staleness/mean"] == 1  # did not wait for the third
    assert fake.synced == []  # and published nothing: the sampler is busy
    fake.gate.release(100)
    wait(fake.samples._begun)  # the third and the fourth, from the first weights
    fake.state.policy_version = 3
    position, metrics = fake.step()
    # both are three steps old; the fifth is sampled anew
    assert fake.synced[0] == 3
    assert position == 10
    assert metrics["staleness/dropped_groups"] == 4
    assert metrics["staleness/mean"] == 0
    fake.samples.close()


def test_an_evaluation_finds_the_sampler_quiet_and_up_to_date() -> None:
    fake = FakeRun(2, drop=True)
    fake.gate.release(1)
    fake.step()
    assert fake.synced == []
    fake.gate.release(100)
    fake.samples.pause()
    assert fake.synced == [1]
    assert all(each.done() for each in fake.samples._begun)
    fake.samples.close()


def test_an_error_comes_after_the_groups_before_it_and_ends_the_sampling() -> None:
    fake = FakeRun(5, drop=False)
    fake.gate.release(100)
    fake.error_at = 2
    assert fake.step()[0] == 2
    with pytest.raises(RewardError, match="no such luck"):
        fake.step()
    assert fake.asked == [0, 2]
    fake.samples.close()


def test_closing_gives_up_what_is_under_way() -> None:
    fake = FakeRun(1, drop=False)
    fake.gate.release(1)
    fake.samples.next()  # the second is under way, and never ends by itself
    fake.samples.close()


def test_the_histogram() -> None:
    assert staleness_metrics([0, 1, 1, 2], 3) == {
        "staleness/mean": 1.0,
        "staleness/max": 2.0,
        "staleness/0": 0.25,
        "staleness/1": 0.5,
        "staleness/2": 0.25,
        "staleness/3": 0.0,
    }


# --- whole runs ----------------------------------------------------------------------------------------------------


def share_of_letters(completions: list[str], **columns: Any) -> list[float]:
    return [sum(c.isalpha() for c in text) / 8 for text in completions]


def begins_with_a_letter(completions: list[str], **columns: Any) -> list[float]:
    return [float(text[:1].isalpha()) for text in completions]


def build(settings: dict[str, Any], name: str = "run", reward: Any = share_of_letters, **changes: Any) -> GRPOTrainer:
    folder = os.path.join(os.path.dirname(settings["output_dir"]), name)
    args = GRPOConfig(**(settings | {"max_steps": 5, "output_dir": folder} | changes))
    if "world" in changes:
        return GRPOTrainer(args=args)
    return GRPOTrainer(reward_funcs=reward, args=args, train_dataset=ROWS, eval_dataset=ROWS[:2])


def steps_of(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    """The metrics of the steps, without times."""
    volatile = (*VOLATILE, "agent/waiting_share")
    records = [record for record in trainer.state.log_history if "loss" in record]
    return [{name: value for name, value in r.items() if not name.startswith(volatile)} for r in records]


def same_weights(one: GRPOTrainer, other: GRPOTrainer) -> bool:
    ours, theirs = one.policy.state_dict(), other.policy.state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_without_staleness_the_run_is_the_plain_loop(settings: dict[str, Any]) -> None:
    trainer = build(settings, max_steps=3, max_staleness=0)
    trainer.train()
    plain = build(settings, "plain", max_steps=3)
    for step, record in enumerate(steps_of(trainer)):
        rollout = collect_groups(
            [plain.prompts[row] for row in plain._order.take(2 * step, 2)],
            setup.sampling_settings(plain.args, plain.policy, 1.0),
            generator=plain.engine,
            scorer=plain.data.scorer,
            decode=plain.decode,
            num_generations=4,
            streams=[(plain.args.seed, 0, 2 * step + offset) for offset in range(2)],
            policy_version=1 + step,
        )
        phase = plain.phases.at(Elapsed(step))
        batch = plain.make_batch(rollout.groups, phase)
        done = update(
            plain.learner,
            batch,
            setup.algorithm_in(plain.args, phase),
            plain.length.rates(phase, step)[0],
            temperature=phase.temperature,
            max_completion_length=plain.args.max_completion_length,
        )
        plain.engine.publish(plain.policy.weights(2 + step))
        for name in ("loss", "grad_norm", "kl", "sampling/sampling_logp_difference/max"):
            assert record[name] == done.metrics[name], name
        assert record["policy_version"] == 1 + step
        assert not [name for name in record if name.startswith("staleness/")]
    assert same_weights(trainer, plain)
    plain.close()


@pytest.mark.parametrize("staleness", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_waiting_gives_the_same_numbers_again(settings: dict[str, Any], staleness: int) -> None:
    first, second = (build(settings, name, max_staleness=staleness) for name in ("first", "second"))
    first.train()
    second.train()
    assert steps_of(first) == steps_of(second)
    assert same_weights(first, second)
    records = steps_of(first)
    ages = [min(step, staleness) for step in range(5)]
    assert [record["staleness/mean"] for record in records] == ages
    assert [record["policy_version"] for record in records] == [1 + step - age for step, age in enumerate(ages)]
    assert [record[f"staleness/{staleness}"] for record in records] == [float(age == staleness) for age in ages]
    names = {name for record in first.state.log_history for name in record}
    assert "time/waiting_for_samples" in names
    assert [name for name in names if describe_metric(name) is None] == []
    # the first step is that of a synchronous run, and what is asked is in every step
    plain = build(settings, "plain", importance_sampling_correction="token_truncate")
    plain.train()
    assert {name: records[0][name] for name in steps_of(plain)[0]} == steps_of(plain)[0]
    assert not same_weights(first, plain)
    folders = [RunFolder.read(t.args.output_dir) for t in (first, plain)]
    for step in range(1, 6):
        asked = [[row["prompt"] for row in folder.read_completions(step)] for folder in folders]
        assert asked[0] == asked[1]
    assert first.state.data_position == plain.state.data_position == 10


def test_the_next_step_is_sampled_while_this_one_is_learnt(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    learning = threading.Event()
    threads = []

    def note_thread(collector: AnswerCollector, *arguments: Any, **options: Any) -> Rollout:
        threads.append(threading.current_thread().name)
        return collect(collector, *arguments, **options)

    def waits(completions: list[str], trainer_state: Any = None, **columns: Any) -> list[float]:
        if len(threads) == 2:
            assert learning.wait(60), "the update never began"
            assert trainer_state.global_step == 0
        return share_of_letters(completions)

    trainer = build(settings, reward=waits, max_steps=2, max_staleness=1, eval_on_start=False)
    collect = AnswerCollector.__call__
    monkeypatch.setattr(AnswerCollector, "__call__", note_thread)
    run_pass = trainer.learner.forward_backward

    def note(*arguments: Any, **options: Any) -> Any:
        learning.set()
        return run_pass(*arguments, **options)

    monkeypatch.setattr(trainer.learner, "forward_backward", note)
    trainer.train()
    assert threads == [THREAD + "_0"] * 2 + ["MainThread"]  # the last is the evaluation at the end


def test_a_stale_batch_is_corrected(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(
        settings, max_steps=2, max_staleness=1, beta=0.0, learning_rate=0.1, importance_sampling_correction="auto:1.05"
    )
    seen: list[Any] = []
    rows = np.arange(8)
    learn = trainer.learn

    def spy(batch: Any, phase: Any) -> Any:
        now, _ = trainer.learner.scores(batch, rows, temperature=1.0)
        seen.append((batch, now))
        return learn(batch, phase)

    monkeypatch.setattr(trainer, "learn", spy)
    before = trainer.policy.state_dict()
    trainer.train()
    batch, now = seen[1]
    mask = batch.mask
    trainer.policy.load_state_dict(before)
    sampled_by, _ = trainer.learner.scores(batch, rows, temperature=1.0)
    np.testing.assert_allclose(batch.old_logprobs[mask], sampled_by[mask], atol=1e-4)  # the weights of step 1
    ratio = np.exp(np.where(mask, now - batch.old_logprobs, 0.0))
    assert ratio.max() > 1.05 > ratio.min()
    factor = np.minimum(ratio, 1.05)
    expected = -(np.where(mask, factor * batch.advantages, 0.0).sum(1) / mask.sum(1)).mean()
    record = steps_of(trainer)[1]
    assert record["policy_loss"] == pytest.approx(expected, abs=1e-4)
    assert record["ratio/mean"] == pytest.approx(1.0, abs=1e-4)  # against the weights that the step began with
    differing = np.abs(now - batch.old_logprobs)[mask & (batch.advantages != 0)]
    assert record["sampling/sampling_logp_difference/mean"] == pytest.approx(float(differing.mean()), rel=1e-2)
    assert record["sampling/importance_sampling_ratio/max"] == pytest.approx(float(ratio.max()), rel=1e-3)


def test_which_correction() -> None:
    plan = PhasePlan((), temperature=1.0, beta=0.0, num_generations=2)
    phase = plan.at(Elapsed())

    def correction(**changes: Any) -> Correction | None:
        return setup.algorithm_in(GRPOConfig(**changes), phase).correction

    assert correction() is None
    assert correction(max_staleness=1) == Correction("token_truncate", 3.0)
    chosen = correction(max_staleness=1, importance_sampling_correction="sequence_mask")
    assert chosen == Correction("sequence_mask", 3.0)


@pytest.mark.slow
def test_evaluations_in_between_change_nothing(settings: dict[str, Any]) -> None:
    often = build(settings, "often", max_staleness=2, eval_steps=1)
    never = build(settings, "never", max_staleness=2, eval_steps=0, eval_on_start=False)
    often.train()
    never.train()
    assert same_weights(often, never)
    assert steps_of(often) == steps_of(never)
    evaluations = [record["eval/reward"] for record in often.state.log_history if "eval/reward" in record]
    assert len(evaluations) == 6
    assert often.evaluate()["eval/reward"] == evaluations[-1]


VARIANTS: list[dict[str, Any]] = [
    {"dynamic_sampling": 3, "max_staleness": 4, "num_iterations": 2, "lora_dropout": 0.1},
    {"max_generations": 9, "kl_estimator": "k3_unbiased", "off_policy_mask_threshold": 0.0},
    {"prompt_order": "difficulty", "reward": begins_with_a_letter, "correctness": "begins_with_a_letter"},
    {"kl_estimator": "exact", "use_peft": False},
    {"phases": [{"tokens": 300, "temperature": 0.7}, {"tokens": 300, "num_generations": 2}, {"steps": 2}]},
    {
        "world": "house:rooms=2,num_train=6,num_eval=3",
        "action_format": "choice",
        "max_completion_length": 16,
        "parallel_episodes": 1,  # with several, the order in which worlds answer shows in the last digits
        "max_conversation_tokens": 600,
    },
]


@pytest.mark.parametrize(
    "changes", [VARIANTS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in VARIANTS[1:])], ids=" ".join
)
def test_every_variant_trains_and_can_be_repeated(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    changes = {"max_staleness": 1, "eval_steps": 2, "max_steps": 4} | changes
    first = build(settings, "first", **changes)
    first.train()
    second = build(settings, "second", **changes)  # now: it sets the seed that dropout draws from
    second.train()
    records = steps_of(first)
    assert records == steps_of(second)
    assert same_weights(first, second)
    assert records[1]["staleness/max"] > 0
    assert max(record["staleness/max"] for record in records) <= changes["max_staleness"]
    assert [name for record in records for name in record if describe_metric(name) is None] == []


def test_nothing_is_sampled_ahead_over_the_end_of_a_phase_or_of_the_run(settings: dict[str, Any]) -> None:
    asked: list[int] = []

    def counts(completions: list[str], **columns: Any) -> list[float]:
        asked.append(len(completions))
        return share_of_letters(completions)

    phases = [{"steps": 2, "temperature": 0.7, "num_generations": 2}, {"steps": 3, "beta": 0.0}]
    quiet = {"eval_steps": 0, "eval_on_start": False}
    trainer = build(settings, reward=counts, phases=phases, max_steps=-1, max_staleness=1, **quiet)
    trainer.train()
    records = steps_of(trainer)
    assert [record["phase"] for record in records] == [0, 0, 1, 1, 1]
    assert [record["staleness/max"] for record in records] == [0, 1, 0, 1, 1]
    assert ["kl" in record for record in records] == [True, True, False, False, False]
    assert asked == [4, 4, 8, 8, 8, 2]  # the last is the evaluation


def test_an_error_in_the_thread_ends_the_run_at_its_step_and_it_can_be_resumed(settings: dict[str, Any]) -> None:
    calls: list[int] = []

    def fragile(completions: list[str], **columns: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("no such luck")
        return share_of_letters(completions)

    quiet = {"eval_steps": 0, "eval_on_start": False, "max_staleness": 2}
    trainer = build(settings, reward=fragile, **quiet)
    with pytest.raises(RewardError, match=r"fragile.*no such luck"):
        trainer.train()
    assert trainer.state.global_step == 2  # the third step's samples failed, while the first was learnt
    again = build(settings, **quiet)
    again.train(resume_from_checkpoint=True)
    assert [record["step"] for record in steps_of(again)] == [1, 2, 3, 4, 5]
    assert again.state.data_position == 10
    assert [record["staleness/max"] for record in steps_of(again)] == [0, 1, 0, 1, 2]


def test_the_keyboard_ends_the_thread_too(settings: dict[str, Any]) -> None:
    class Stop:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    trainer = build(settings, max_staleness=1)
    trainer._callbacks._callbacks.append(Stop())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert list(RunFolder.read(trainer.args.output_dir).checkpoints.iterdir())


def test_a_checkpoint_is_resumed_to_the_same_bits(settings: dict[str, Any]) -> None:
    changes = {"max_staleness": 2, "save_steps": 3, "max_steps": 6}
    whole = build(settings, **changes)
    whole.train()
    ages = [record["staleness/max"] for record in steps_of(whole)]
    assert ages == [0, 1, 2, 0, 1, 2]  # what follows a checkpoint is sampled from its weights
    again = build(settings, **changes)
    again.train(resume_from_checkpoint=RunFolder.read(whole.args.output_dir).checkpoints / "step_000003")
    assert again.state.global_step == 6
    assert steps_of(again) == steps_of(whole)
    assert same_weights(again, whole)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(recipe_folder: Any, tmp_path: Any) -> None:
    ahead = ("schedule.max_staleness=1", "run.save_steps=3")
    run("train", str(recipe_folder), f"run.output_dir={tmp_path / 'whole'}", *ahead)
    folder = tmp_path / "run"
    killed("update", 5, "train", str(recipe_folder), f"run.output_dir={folder}", *ahead)
    run("resume", str(folder))
    assert numbers(folder) == numbers(tmp_path / "whole")
    assert [record["staleness/max"] for record in numbers(folder) if "loss" in record] == [0, 1, 1, 0, 1, 1]


@pytest.mark.slow
def test_dropping_trains_and_can_be_evaluated_afterwards(settings: dict[str, Any]) -> None:
    trainer = build(settings, max_staleness=2, stale_groups="drop", eval_steps=2, max_steps=6)
    trainer.train()
    records = steps_of(trainer)
    assert len(records) == 6
    assert max(record["staleness/max"] for record in records) <= 2
    last = [record["eval/reward"] for record in trainer.state.log_history if "eval/reward" in record][-1]
    assert trainer.evaluate()["eval/reward"] == last


def test_what_cannot_work_is_said_early() -> None:
    with pytest.raises(ConfigError, match=r"max_staleness=1: a step takes 2 optimiser steps"):
        GRPOConfig(max_staleness=1, num_iterations=2)
    with pytest.raises(ConfigError, match=r"stale_groups='drop' with max_staleness=0"):
        GRPOConfig(stale_groups="drop")
    with pytest.raises(ConfigError, match="max_staleness"):
        GRPOConfig(max_staleness=-1)
