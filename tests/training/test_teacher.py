"""A teacher beside the reward: formulas by hand, what it reads, and runs that learn from it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import make_batch, make_learner
from training_runs import Settings, always, build, first_letter_early, same_weights, steps_of, trained

from covey import GRPOConfig, GRPOTrainer
from covey.algorithms import Outcomes
from covey.algorithms.estimators import find_estimator
from covey.algorithms.teaching import combined, gap, prepared, taught
from covey.config.algorithm import AlgorithmConfig
from covey.config.teacher import TeacherConfig
from covey.errors import ConfigError, DataError, ModelError
from covey.observe.completions import read_table
from covey.observe.run_folder import RunFolder
from covey.rollout.views import Views
from covey.training.replay import replay
from covey.training.update import update
from covey.types import Episode, Group, Prompt
from fakes import raises

NAN = float("nan")
OLD, THEIRS = np.log([[0.5, 0.25, 0.8], [0.1, 0.2, 0.3]]), np.log([[0.6, 0.05, 0.9], [0.1, 0.4, 0.3]])
GAPS = gap(THEIRS, OLD)
TASK = np.array([[0.5**0.5], [-(0.5**0.5)]])


def test_gaps_and_what_they_add() -> None:
    np.testing.assert_allclose(GAPS[0], [0.1823, -1.6094, 0.1178], atol=1e-4)
    np.testing.assert_allclose(gap(THEIRS, OLD, skip=1, clip=1.0)[0], [NAN, -1.0, 0.1178], atol=1e-4)
    np.testing.assert_allclose(prepared(GAPS, use="sum", discount=1.0)[0], [-1.3093, -1.4917, 0.1178], atol=1e-4)
    plain = prepared(GAPS, use="sum")
    np.testing.assert_allclose(combined(TASK, plain, use="sum")[0], [0.8894, -0.9023, 0.8249], atol=1e-4)
    np.testing.assert_array_equal(combined(TASK, plain, use="sum", task_coef=0, coef=2), 2 * plain)
    # position: 1.5 times the first gap, 1 + .5 (1 - .1823 / 1.9095) times the second
    np.testing.assert_allclose(prepared(GAPS, use="position")[0], [0.2735, -2.3373, 0.1214], atol=1e-3)
    # reweigh: half of what exp(+-g) within 0.8 to 1.2 says, and the sign stays the reward's
    found = combined(TASK, GAPS, use="reweigh")
    np.testing.assert_allclose(found[0], 0.5**0.5 * np.array([1.1, 0.9, 1.0625]), atol=1e-4)
    np.testing.assert_allclose(found[1], -(0.5**0.5) * np.array([1.0, 0.9, 1.0]), atol=1e-4)
    raised = combined(TASK, GAPS, use="gate", coef=0.1) - TASK
    np.testing.assert_allclose(raised[0], 0.1 / (1 + np.exp(-5 * GAPS[0])))
    # where there is no teacher, the advantage is the task's, whatever the use
    none = np.full((2, 3), NAN)
    for use in ("sum", "reweigh", "gate", "position"):
        np.testing.assert_array_equal(combined(TASK, prepared(none, use=use), use=use), np.broadcast_to(TASK, (2, 3)))


def test_a_tied_group_teaches_unless_the_teacher_only_reweighs() -> None:
    prompt = Prompt(np.array([1]), "x")
    tied = Group(prompt, (), np.zeros(2))
    step = Outcomes(np.zeros(2), np.zeros(2, int), mask=np.ones((2, 3), bool), logprobs=OLD, gaps=GAPS)
    for use, teaches in (("sum", True), ("gate", True), ("position", True), ("reweigh", False)):
        estimator = taught(find_estimator("grpo"), lambda group: True, use=use)
        assert (estimator.teaches(tied), estimator.group_relative) == (teaches, not teaches)
        assert bool(estimator.checked(step).any()) is teaches
        assert (estimator.group_problem({"sampling.num_generations": 1}) is None) is teaches
    known = AlgorithmConfig(teacher=TeacherConfig(context="solution")).estimator
    assert not known.teaches(tied)
    assert known.teaches(replace(tied, rewards=np.array([1.0, 1.0])))


def test_a_teacher_s_part_of_tokens_needs_a_loss_of_tokens(settings: Settings) -> None:
    words = "algorithm.teacher.use='sum' and loss_type='gspo': it gives each token its own advantage, but this loss"
    raises(ConfigError, words, build, settings, teacher={"weights": "base"}, loss_type="gspo")


def said(text: str, ids: list[int]) -> Episode:
    sampled = np.arange(len(ids)) >= 2
    return Episode(np.array(ids), sampled, np.where(sampled, -1.0, 0.0).astype(np.float32), text, "stop", 0)


def test_views() -> None:
    content = [{"role": "system", "content": "s"}, {"role": "user", "content": "{context}?"}]
    prompt = Prompt(np.array([7, 8]), content, {"hint": "think", "empty": ""})
    episodes = (said("no", [7, 8, 21, 22]), said("yes {prompt}", [7, 8, 31]), said("oh", [7, 8, 41]))
    group = Group(prompt, episodes, np.array([0.0, 1.0, NAN]), feedback=("too short", "fine", None))
    seen: list[Any] = []

    def render(asked: Any) -> Any:
        seen.append(asked)
        return np.array([1, 2, 3])

    def view(context: str, longest: int = 99, of: Group = group) -> Any:
        seen.clear()
        return Views(TeacherConfig(context=context, weights="live"), render, longest)([of])

    found, _too_long = view("column:hint")
    assert seen == [[content[0], {"role": "user", "content": "{context}?\n\nthink"}]]  # once, and nothing filled twice
    assert [v.token_ids.tolist() for v in found] == [[1, 2, 3, 21, 22], [1, 2, 3, 31], [1, 2, 3, 41]]
    assert next(v.sampled.tolist() for v in found) == [False, False, False, True, True]
    assert view("column:empty") == view("column:nothing") == ([None] * 3, 0)
    found, _ = view("solution")  # the only success has no teacher itself
    assert [v is None for v in found] == [False, True, False]
    assert "yes {prompt}" in seen[0][1]["content"]
    found, _ = view("feedback")  # of what failed; what could not be scored has not
    assert [v is None for v in found] == [False, True, True]
    found, _ = view("solution+feedback|column:hint")  # what is to be had of both, else the column
    assert [v is None for v in found] == [False] * 3
    texts = ["{context}?\n\nyes {prompt}\n\ntoo short", "{context}?\n\nthink", "{context}?\n\nyes {prompt}"]
    assert [each[1]["content"] for each in seen] == texts
    assert view("solution", longest=4)[1] == 1
    text = replace(group, prompt=Prompt(np.array([7, 8]), "q", {"hint": "think"}))
    view("column:hint", of=text)
    assert seen == ["q\n\nthink"]


def test_the_advantage_has_the_gradient_of_the_kl() -> None:
    """`sum` without a reward and `reinforce`: that of beta 1 and k1+ with the teacher as the reference."""
    batch = make_batch()
    rows = np.arange(len(batch.episodes))
    both = []
    for teaches in (True, False):
        learner = make_learner()
        own, theirs = (learner.scores(batch, rows, temperature=1.0, reference=r)[0] for r in (False, True))
        here = replace(batch, old_logprobs=np.where(batch.sampled, own, 0).astype(np.float32))
        gaps = np.where(batch.sampled, theirs - own, 0).astype(np.float32)
        here = replace(here, advantages=gaps if teaches else 0 * gaps, group_relative=False)
        section = AlgorithmConfig(loss_type="reinforce", beta=float(not teaches), kl_estimator="k1+")
        grads: list[Any] = []
        learner.optim_step = lambda rate, learner=learner, grads=grads: grads.append(learner.gradient()) or 1.0
        update(learner, here, section, 1e-3, temperature=1.0, max_completion_length=12)
        both.append(grads[0])
    assert any(np.abs(grad).max() > 1e-4 for grad in both[0].values())
    for name, grad in both[0].items():
        np.testing.assert_allclose(grad, both[1][name], atol=1e-6)


def columns_of(run: Any) -> tuple[Any, Any]:
    folder = RunFolder.read(run.args.output_dir)
    return steps_of(run), read_table(folder.ledger / "step_000001.parquet")


def test_a_tied_run_learns_from_its_teacher_alone(settings: Settings) -> None:
    what: Settings = {"beta": 0.0, "max_steps": 3, "ledger": "all", "save_steps": 1}
    alone = trained(settings, always, **what)
    assert same_weights(alone, build(settings, always, name="new", **what))
    table = {"weights": "ema", "context": "solution", "ema_decay": 0.5}
    run = trained(settings, always, name="taught", teacher=table, **what)
    assert not same_weights(alone, run)
    first = steps_of(run)[0]
    assert (first["teacher/rows"], first["teacher/tied_rows"], first["teacher/too_long"]) == (1.0, 1.0, 0.0)
    words = "no training row has something in the column 'hint'"
    raises(ConfigError, words, build, settings, always, name="hint", teacher={"context": "column:hint"})
    alone_in_group = {"teacher": {"context": "solution"}, "num_generations": 1, "adv_estimator": "reinforce_plus_plus"}
    raises(ConfigError, "has no other completion", build, settings, always, name="one", **alone_in_group)
    world = {"world": "house:rooms=2", "max_completion_length": 16, "teacher": {"context": "solution"}}
    raises(ConfigError, "have no context yet", build, settings, **world)


def test_resume_and_replay_have_the_same_bits(settings: Settings) -> None:
    what: Settings = {"beta": 0.0, "max_steps": 4, "save_steps": 2, "ledger": "all", "learning_rate": 1e-2}
    what["teacher"] = {"weights": "ema", "context": "solution", "success": 1.0, "ema_decay": 0.5}
    whole = trained(settings, first_letter_early, name="whole", **what)
    metrics = [step for step in steps_of(whole) if "teacher/kl" in step]
    assert metrics
    assert all(step["teacher/k3"] >= 0 for step in metrics)
    some = trained(settings, first_letter_early, name="some", **what | {"max_steps": 1}, down_sampling="max_variance:2")
    for run, step in ((whole, 4), (some, 1)):
        report = replay(run.args.output_dir, step, tolerance=0)
        assert report.exact, report.to_dict()
    again = trained(settings, first_letter_early, name="whole", resume=2, **what)
    assert same_weights(whole, again)
    assert same_weights(whole.policy.teachers["ema"].state_dict(), again.policy.teachers["ema"].state_dict())
    assert not same_weights(whole.policy.teachers["ema"].state_dict(), again.policy.state_dict())
    late = trained(settings, first_letter_early, name="late", **what | {"teacher": None, "max_steps": 2})
    before = {name: tensor.clone() for name, tensor in late.policy.state_dict().items()}
    late = trained(settings, first_letter_early, name="late", resume=2, **what | {"max_steps": 3})
    after = late.policy.state_dict()
    average = {name: (tensor + before[name]) / 2 for name, tensor in after.items()}  # it began at step 2
    assert all(torch.allclose(average[name], held) for name, held in late.policy.teachers["ema"].state_dict().items())
    folder = RunFolder.read(whole.args.output_dir)
    rows = read_table(sorted(folder.ledger.iterdir())[-1])
    assert "teacher_logp" in rows[0]


def test_an_adapter_as_the_teacher_and_the_policy_s_own_base(settings: Settings, tmp_path: Path) -> None:
    what: Settings = {"beta": 0.0, "max_steps": 2, "learning_rate": 1e-2}
    teacher = trained(settings, first_letter_early, name="other", **what)
    folder = teacher.save_model(tmp_path / "adapter")
    run = build(settings, always, name="student", teacher={"weights": str(folder), "task_coef": 0.0}, **what)
    rollout = run.rollout()
    batch = run.make_batch(rollout.groups, run.next_phase())
    theirs, _ = teacher.learner.scores(batch, np.arange(len(batch.episodes)), temperature=1.0)
    np.testing.assert_allclose(batch.teacher.logprobs[batch.sampled], theirs[batch.sampled], atol=1e-5)
    gaps = batch.teacher.logprobs - batch.old_logprobs
    np.testing.assert_allclose(batch.advantages[batch.sampled], gaps[batch.sampled], atol=1e-6)
    base = build(settings, always, name="base", teacher={"weights": "base"}, **what)
    batch = base.make_batch(base.rollout().groups, base.next_phase())
    assert (
        np.abs((batch.teacher.logprobs - batch.old_logprobs)[batch.sampled]).max() < 1e-4
    )  # a fresh adapter is the base


def test_columns_are_read_before_training(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    args = GRPOConfig(**settings, beta=0.0, teacher={"weights": "base", "context": "column:hint"})
    rows = [{"prompt": "one", "hint": text} for text in ("1", " ", None, "4")]
    GRPOTrainer(reward_funcs=always, args=args, train_dataset=rows)
    assert "2 of 4 training rows have nothing there, and so no teacher" in caplog.text
    rows[3]["hint"] = "\ud800"
    raises(DataError, "row 3: hint: half a surrogate pair", GRPOTrainer, None, always, args, rows)


def test_an_adapter_that_does_not_fit(settings: Settings, tmp_path: Path) -> None:
    adapter = build(settings, name="other", lora_r=2).save_model(tmp_path / "adapter")
    table = {"weights": str(adapter)}
    raises(ModelError, "algorithm.teacher.weights: ", build, settings, teacher=table)
    raises(ModelError, "the policy has none; train one", build, settings, teacher=table, use_peft=False)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"weights": "live"}, "the policy would be its own teacher"),
        ({"weights": ""}, "empty, or an address with a password"),
        ({"weights": "http://me:pass@host"}, "COVEY_TEACHER_TOKEN"),
        ({"weights": "/nowhere"}, "there is no such file or folder"),
        ({"template": "x"}, "needs {context} in it"),
        ({"use": "gate", "discount": 0.5}, "discount=0.5: no effect here; set use to sum or position"),
        ({"use": "gate", "task_coef": 0.0}, "task_coef=0.0: no effect here; set use to sum or position or loss"),
        (
            {"weights": "base", "ema_decay": 0.5},
            "ema_decay=0.5: no effect here; set weights to ema",
        ),
        ({"coef": 0.0, "task_coef": 0.0}, "nothing would be learnt"),
        ({"weights": "ema", "task_coef": 0.0}, "nothing would be learnt"),
        ({"use": "reweigh", "coef": 0.5}, "coef=0.5: no effect here"),
        ({"gate_slope": 2.0}, "gate_slope=2.0: no effect here; set use to gate"),
        ({"skip_tokens": 256}, "skip_tokens=256: must be below sampling.max_completion_length=256"),
        ({"context": "solution", "around": {"feedback": "{context}"}}, "feedback in the context"),
        ({"context": "solution", "around": {"solution": "x"}}, "it needs {context} in it"),
        ({"context": "column:a", "success": 0.5}, "success=0.5 with context='column:a': no effect"),
        ({"context": "answer"}, "algorithm.teacher"),
        ({"use": "distil"}, "algorithm.teacher"),
        ({"key": "a"}, "set both, or none"),
        ({"teachers": {"a": {}}}, "set both, or none"),
        ({"key": "a", "weights": "base", "teachers": {"a": {}}}, "each teacher has its own"),
        ({"key": "a", "teachers": {"a": {"weights": "live"}}}, "its own teacher"),
        ({"key": "a", "teachers": {"a": {"coef": 1.0}}}, "a.coef=1.0: coef is one for all; set algorithm.teacher.coef"),
        ({"key": "a", "teachers": {"a": {"weigths": "x"}}}, "teachers.a.weigths='x': there is no such setting"),
        ({"weights": "http://h:1", "use": "loss"}, "it takes one teacher, in this process"),
    ],
)
def test_what_cannot_be(table: dict[str, Any], words: str) -> None:
    raises(ConfigError, words.replace("{", r"\{"), GRPOConfig, "runs/x", teacher=table)
    assert json.dumps(table)
