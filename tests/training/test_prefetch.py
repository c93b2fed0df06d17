"""Sampling ahead: its order, ages and errors with a fake sampler, and whole runs on a tiny model."""

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import training_runs
from test_kill_and_resume import VOLATILE, killed, numbers, run
from training_runs import HOUSE, Settings, StopAt, failing_at, letters, rewarding, same_weights, steps_of

from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError, RewardError
from covey.observe import describe_metric
from covey.observe.run_folder import RunFolder
from covey.rollout.collect import AnswerCollector, Rollout
from covey.rollout.learning import Correction
from covey.rollout.scoring import Logged
from covey.training import setup
from covey.training.prefetch import PrefetchedSamples, Sampled, staleness_metrics
from covey.training.schedule import Elapsed, PhasePlan, TrainerState
from covey.training.update import update
from covey.types import Completion, Episode, Group, Prompt
from fakes import raises, slow

THREAD = "covey-sampling"
QUIET: Settings = {"eval_steps": 0, "eval_on_start": False}
begins_with_a_letter = rewarding("begins_with_a_letter", lambda text: float(text[:1].isalpha()))
build, trained = (partial(function, held_out=2) for function in (training_runs.build, training_runs.trained))
VARIANTS: list[Settings] = [
    {"dynamic_sampling": 3, "max_staleness": 4, "num_iterations": 2, "lora_dropout": 0.1},
    {"max_generations": 9, "kl_estimator": "k3_unbiased", "off_policy_mask_threshold": 0.0},
    {"prompt_order": "difficulty", "rewards": begins_with_a_letter, "correctness": "begins_with_a_letter"},
    {"kl_estimator": "exact", "use_peft": False},
    {"phases": [{"tokens": 300, "temperature": 0.7}, {"tokens": 300, "num_generations": 2}, {"steps": 2}]},
    HOUSE | {"parallel_episodes": 1},  # with several, the order in which worlds answer shows in the last digits
]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD)]


def group(version: int) -> Group:
    prompt = Prompt(np.array([1]), "?", {}, "q")
    completion = Completion(np.array([2]), np.zeros(1, np.float32), "stop", version)
    return Group(prompt, (Episode.from_completion(prompt, completion, "!"),), np.zeros(1))


class FakeRun(AbstractContextManager[Any]):
    """Weights are a number; sampling waits for the gate, which is open for `ready` steps."""

    def __init__(self, max_staleness: int, ready: int, *, drop: bool = False, error_at: int = -1) -> None:
        self.state = TrainerState(policy_version=0)
        self.gate = threading.Semaphore(ready)
        self.synced, self.asked, self.error_at = list[int](), list[int](), error_at
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
        rollout = Rollout((group(version), group(version)), 0.0, 0.0, 2)
        return Sampled(rollout, phase, position + 2, None, Logged({}, {}))

    def step(self, optimizer_steps: int = 1) -> tuple[int, dict[str, float]]:
        """One step of training: position of its groups, and the metrics."""
        sampled = self.samples.next()
        self.samples.before_update()
        self.samples.after_update()
        self.state.policy_version += optimizer_steps
        self.samples.publish()
        return sampled.position, self.samples.metrics()

    def __exit__(self, *_: object) -> None:
        self.samples.close()


def test_waiting_gives_every_step_its_age_and_an_error_comes_after_the_groups_before_it() -> None:
    with FakeRun(2, 100) as fake:
        steps = [fake.step() for _ in range(5)]
    assert [position for position, _ in steps] == [2, 4, 6, 8, 10]
    assert [metrics["staleness/mean"] for _, metrics in steps] == [0, 1, 2, 2, 2]
    assert fake.synced == [1, 2, 3, 4, 5]
    assert all(metrics["staleness/dropped_groups"] == 0 for _, metrics in steps)
    with FakeRun(1, 100) as fake:  # a step without an optimiser step makes nothing older
        assert [fake.step(steps)[1]["staleness/max"] for steps in (1, 0, 1, 1)] == [0, 1, 0, 1]
    shares = {"staleness/0": 0.25, "staleness/1": 0.5, "staleness/2": 0.25, "staleness/3": 0.0}
    assert staleness_metrics([0, 1, 1, 2], 3) == {"staleness/mean": 1.0, "staleness/max": 2.0} | shares
    with FakeRun(5, 100, error_at=2) as fake:
        assert fake.step()[0] == 2
        raises(RewardError, "no such luck", fake.step)
        assert fake.asked == [0, 2]
    with FakeRun(1, 1) as fake:
        fake.samples.next()  # the second is under way, and never ends by itself: closing gives it up


def test_dropping_goes_on_without_waiting_and_drops_what_is_too_old() -> None:
    with FakeRun(2, 2, drop=True) as fake:  # the groups of two steps; those of the third are under way
        assert fake.step()[1]["staleness/mean"] == 0
        wait(list(fake.samples._begun)[:1])
        assert fake.step()[1]["staleness/mean"] == 1  # did not wait for the third
        assert fake.synced == []  # and published nothing: the sampler is busy
        fake.gate.release(100)
        wait(fake.samples._begun)  # the third and the fourth, from the first weights
        fake.state.policy_version = 3
        position, metrics = fake.step()  # both are three steps old; the fifth is sampled anew
        assert (fake.synced[0], position) == (3, 10)
        assert (metrics["staleness/dropped_groups"], metrics["staleness/mean"]) == (4, 0)
    with FakeRun(2, 1, drop=True) as fake:
        fake.step()
        assert fake.synced == []
        fake.gate.release(100)
        fake.samples.pause()  # an evaluation finds the sampler quiet and up to date
        assert fake.synced == [1]
        assert all(each.done() for each in fake.samples._begun)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings | {"max_steps": 5}


def learnt(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    """The metrics of the steps, without times."""
    return [{name: value for name, value in r.items() if not name.startswith(VOLATILE)} for r in steps_of(trainer)]


def column(trainer: GRPOTrainer, name: str) -> list[Any]:
    records = trainer.state.log_history if name.startswith("eval/") else steps_of(trainer)
    return [record[name] for record in records if name in record]


def repeated(one: GRPOTrainer, other: GRPOTrainer) -> bool:
    return learnt(one) == learnt(other) and same_weights(one, other)


@pytest.mark.slow
def test_without_staleness_the_run_is_the_plain_loop(settings: Settings) -> None:
    trainer, plain = trained(settings, max_steps=3, max_staleness=0), build(settings, name="plain", max_steps=3)
    args = plain.args
    for step, record in enumerate(learnt(trainer)):
        rollout = AnswerCollector(plain.engine, plain.data.scorer, plain.decode)(
            [plain.prompts[row] for row in plain._order.take(2 * step, 2)],
            setup.sampling_settings(args, plain.policy, 1.0),
            num_generations=4,
            streams=[(args.seed, 0, 2 * step + offset) for offset in range(2)], policy_version=1 + step,
        )  # fmt: skip
        phase = plain.phases.at(Elapsed(step))
        done = update(
            plain.learner, plain.make_batch(rollout.groups, phase), setup.algorithm_in(args, phase),
            plain.length.rates(phase, step)[0], temperature=phase.temperature,
            max_completion_length=args.max_completion_length,
        )  # fmt: skip
        plain.engine.publish(plain.policy.weights(2 + step))
        for name in ("loss", "grad_norm", "kl", "sampling/sampling_logp_difference/max"):
            assert record[name] == done.metrics[name], name
        assert record["policy_version"] == 1 + step
        assert not [name for name in record if name.startswith("staleness/")]
    assert same_weights(trainer, plain)
    plain.close()


@pytest.mark.parametrize("staleness", [2, slow(1)])
def test_waiting_gives_the_same_numbers_again(settings: Settings, staleness: int) -> None:
    first, second = (trained(settings, name=name, max_staleness=staleness) for name in ("first", "second"))
    assert repeated(first, second)
    ages = [min(step, staleness) for step in range(5)]
    assert column(first, "staleness/mean") == ages
    assert column(first, "policy_version") == [1 + step - age for step, age in enumerate(ages)]
    assert column(first, f"staleness/{staleness}") == [float(age == staleness) for age in ages]
    names = {name for record in first.state.log_history for name in record}
    assert "time/waiting_for_samples" in names
    assert [name for name in names if describe_metric(name) is None] == []
    # the first step is that of a synchronous run, and what is asked is in every step
    plain = trained(settings, name="plain", importance_sampling_correction="token_truncate")
    assert learnt(plain)[0].items() <= learnt(first)[0].items()
    assert not same_weights(first, plain)
    folders = [RunFolder.read(t.args.output_dir) for t in (first, plain)]
    for step in range(1, 6):
        asked = [[row["prompt"] for row in folder.read_completions(step)] for folder in folders]
        assert asked[0] == asked[1]
    assert first.state.data_position == plain.state.data_position == 10


def test_the_next_step_is_sampled_while_this_one_is_learnt(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    learning, threads = threading.Event(), []
    collect = AnswerCollector.__call__

    def note_thread(*arguments: Any, **options: Any) -> Rollout:
        threads.append(threading.current_thread().name)
        return collect(*arguments, **options)

    def waits(completions: list[str], trainer_state: Any = None, **columns: Any) -> list[float]:
        if len(threads) == 2:
            assert learning.wait(60), "the update never began"
            assert trainer_state.global_step == 0
        return letters(completions)

    trainer = build(settings, waits, max_steps=2, max_staleness=1, eval_on_start=False)
    run_pass = trainer.learner.forward_backward

    def note(*arguments: Any, **options: Any) -> Any:
        learning.set()
        return run_pass(*arguments, **options)

    monkeypatch.setattr(AnswerCollector, "__call__", note_thread)
    monkeypatch.setattr(trainer.learner, "forward_backward", note)
    trainer.train()
    assert threads == [THREAD + "_0"] * 2 + ["MainThread"]  # the last is the evaluation at the end


def test_a_stale_batch_is_corrected(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings |= {"beta": 0.0, "learning_rate": 0.1, "importance_sampling_correction": "auto:1.05"}
    trainer = build(settings, max_steps=2, max_staleness=1)
    seen, rows, learn = [], np.arange(8), trainer.learn

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
    expected = -(np.where(mask, np.minimum(ratio, 1.05) * batch.advantages, 0.0).sum(1) / mask.sum(1)).mean()
    record = learnt(trainer)[1]
    assert record["policy_loss"] == pytest.approx(expected, abs=1e-4)
    assert record["ratio/mean"] == pytest.approx(1.0, abs=1e-4)  # against the weights that the step began with
    differing = np.abs(now - batch.old_logprobs)[mask & (batch.advantages != 0)]
    assert record["sampling/sampling_logp_difference/mean"] == pytest.approx(float(differing.mean()), rel=1e-2)
    assert record["sampling/importance_sampling_ratio/max"] == pytest.approx(float(ratio.max()), rel=1e-3)


@pytest.mark.slow
def test_evaluations_in_between_change_nothing(settings: Settings) -> None:
    often = trained(settings, name="often", max_staleness=2, eval_steps=1)
    assert repeated(often, trained(settings, name="never", max_staleness=2, **QUIET))
    evaluations = column(often, "eval/reward")
    assert (len(evaluations), often.evaluate()["eval/reward"]) == (6, evaluations[-1])
    dropping = trained(settings, name="drop", max_staleness=2, stale_groups="drop", eval_steps=2, max_steps=6)
    assert len(steps_of(dropping)) == 6
    assert max(column(dropping, "staleness/max")) <= 2
    assert dropping.evaluate()["eval/reward"] == column(dropping, "eval/reward")[-1]


@pytest.mark.parametrize("changes", [VARIANTS[0], *map(slow, VARIANTS[1:])], ids=" ".join)
def test_every_variant_trains_and_can_be_repeated(settings: Settings, changes: Settings) -> None:
    changes = {"max_staleness": 1, "eval_steps": 2, "max_steps": 4} | changes
    # the second is made when the first is done: it sets the seed that dropout draws from
    first, second = (trained(settings, name=name, **changes) for name in ("first", "second"))
    assert repeated(first, second)
    assert column(first, "staleness/max")[1] > 0
    assert max(column(first, "staleness/max")) <= changes["max_staleness"]
    assert [name for record in steps_of(first) for name in record if describe_metric(name) is None] == []


def test_nothing_is_sampled_ahead_over_the_end_of_a_phase_or_of_the_run(settings: Settings) -> None:
    asked: list[int] = []

    def counts(completions: list[str], **columns: Any) -> list[float]:
        asked.append(len(completions))
        return letters(completions)

    phases = [{"steps": 2, "temperature": 0.7, "num_generations": 2, "learning_rate": 1e-3}, {"steps": 3, "beta": 0.0}]
    trainer = trained(settings, counts, phases=phases, max_steps=-1, max_staleness=1, **QUIET)
    assert (column(trainer, "phase"), column(trainer, "learning_rate")[:2]) == ([0, 0, 1, 1, 1], [1e-3] * 2)
    assert column(trainer, "staleness/max") == [0, 1, 0, 1, 1]
    assert ["kl" in record for record in steps_of(trainer)] == [True, True, False, False, False]
    assert asked == [4, 4, 8, 8, 8, 2]  # the last is the evaluation


def test_an_error_in_the_thread_ends_the_run_at_its_step_and_it_can_be_resumed(settings: Settings) -> None:
    settings |= QUIET | {"max_staleness": 2}
    trainer = build(settings, failing_at(3))
    raises(RewardError, r"fragile.*no such luck", trainer.train)
    assert trainer.state.global_step == 2  # the third step's samples failed, while the first was learnt
    again = trained(settings, resume=True)
    assert (column(again, "step"), again.state.data_position) == ([1, 2, 3, 4, 5], 10)
    assert column(again, "staleness/max") == [0, 1, 0, 1, 2]
    stopped = build(settings, name="stopped", callbacks=[StopAt(1)])
    with pytest.raises(KeyboardInterrupt):  # the keyboard ends the thread too
        stopped.train()
    assert list(RunFolder.read(stopped.args.output_dir).checkpoints.iterdir())


def test_a_checkpoint_is_resumed_to_the_same_bits(settings: Settings) -> None:
    settings |= {"max_staleness": 2, "save_steps": 3, "max_steps": 6}
    whole = trained(settings)
    assert column(whole, "staleness/max") == [0, 1, 2, 0, 1, 2]  # what follows a checkpoint is sampled from its weights
    again = trained(settings, resume=3)
    assert again.state.global_step == 6
    assert repeated(again, whole)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(recipe_folder: Path, tmp_path: Path) -> None:
    ahead = ("schedule.max_staleness=1", "run.save_steps=3")
    run("train", recipe_folder, f"run.output_dir={tmp_path / 'whole'}", *ahead)
    folder = tmp_path / "run"
    killed("update", 5, "train", recipe_folder, f"run.output_dir={folder}", *ahead)
    run("resume", folder)
    assert numbers(folder) == numbers(tmp_path / "whole")
    assert [record["staleness/max"] for record in steps_of(folder)] == [0, 1, 1, 0, 1, 1]


def test_what_cannot_work_is_said_early_and_what_is_stale_is_corrected() -> None:
    for changes, words in (
        ({"max_staleness": 1, "num_iterations": 2}, "max_staleness=1: a step takes 2 optimiser steps"),
        ({"stale_groups": "drop"}, "stale_groups='drop' with max_staleness=0"),
        ({"max_staleness": -1}, "max_staleness"),
    ):
        raises(ConfigError, words, GRPOConfig, **changes)
    phase = PhasePlan((), temperature=1.0, beta=0.0, num_generations=2).at(Elapsed())
    masked = {"max_staleness": 1, "importance_sampling_correction": "sequence_mask"}
    for changes, wanted in (({}, None), ({"max_staleness": 1}, "token_truncate"), (masked, "sequence_mask")):
        assert setup.algorithm_in(GRPOConfig(**changes), phase).correction == (wanted and Correction(wanted, 3.0))
