import math
from typing import get_args

import pytest
import torch
from transformers import SchedulerType, get_scheduler

from covey import GRPOConfig
from covey.config.training import PhaseConfig, ScheduleType
from covey.errors import CheckpointError, ConfigError
from covey.training.schedule import Elapsed, PhasePlan, learning_rate_schedule, resolve_warmup_steps
from covey.training.setup import phase_plan, run_length

SCHEDULES = [*((name, {}) for name in ("linear", "cosine", "constant")), ("cosine", {"num_cycles": 1.5})]
SCHEDULES += [("cosine_with_restarts", {"num_cycles": 2}), ("polynomial", {"power": 2.0, "lr_end": 1e-4})]
SCHEDULES += [("inverse_sqrt", {"timescale": 5}), ("cosine_with_min_lr", {"min_lr": 1e-3})]
SCHEDULES += [("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2})]
SCHEDULES += [("warmup_stable_decay", {"num_decay_steps": 4, "decay_type": "1-sqrt"})]


def Phase(name="", **settings):  # noqa: N802 (as a section of the settings, some without an end)
    return PhaseConfig.model_construct(name=name, **settings)


def plan_of(*phases, temperature=1.0, beta=0.01, num_generations=16):
    return PhasePlan(phases, temperature=temperature, beta=beta, num_generations=num_generations)


def factors(schedule, steps, *, learning_rate=1.0, **kwargs):
    return list(map(learning_rate_schedule(schedule, learning_rate=learning_rate, **kwargs), steps))


def test_worked_values():
    assert factors("linear", range(7), warmup_steps=2, total_steps=6) == [0, 0.5, 1, 0.75, 0.5, 0.25, 0]
    assert factors("constant", range(4), warmup_steps=2) == [0, 0.5, 1, 1]
    half = math.sqrt(0.5)
    cosine = [0, 0.5, 1, (1 + half) / 2, 0.5, (1 - half) / 2, 0]
    assert factors("cosine", range(7), warmup_steps=2, total_steps=6) == pytest.approx(cosine)
    assert factors("linear", [0, 5, 10, 20], total_steps=10) == [1, 0.5, 0, 0]
    assert factors("cosine", [20], total_steps=10) == [0]


@pytest.mark.parametrize(("name", "options"), SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 3])
def test_same_numbers_as_transformers(name, options, warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    scheduler = get_scheduler("constant_with_warmup" if name == "constant" else name, optimizer, warmup, 11, options)
    ours = factors(name, range(11), learning_rate=0.01, warmup_steps=warmup, total_steps=11, options=options)
    for factor in ours:
        assert 0.01 * factor == scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
    every = {name.value for name in SchedulerType} - {"constant_with_warmup", "reduce_lr_on_plateau", "greedy"}
    assert set(get_args(ScheduleType)) == every  # without those that follow metrics


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("linear", {"num_cycles": 2}, "lr_scheduler_kwargs=.*num_cycles"),
        ("constant", {"num_cycles": 2}, "lr_scheduler_kwargs=.*no options"),
        ("cosine_with_min_lr", {}, "lr_scheduler_kwargs=.*min_lr"),
        ("polynomial", {"lr_end": 2.0}, "lr_scheduler_kwargs=.*lr_end"),
        ("step", {}, r"lr_scheduler_type='step'.*linear, cosine, constant"),
        ("cosine", {}, r"schedule\.max_steps"),
    ],
)
def test_options_that_do_not_fit_are_refused(name, options, reason):
    with pytest.raises(ConfigError, match=reason):
        factors(name, [0], total_steps=None if name in ("step", "cosine") else 9, options=options)


def test_options_are_settings():
    config = GRPOConfig(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-6}, max_steps=10)
    length, phase = run_length(config, phase_plan(config), 4), phase_plan(config).at(Elapsed())
    assert (length.rates(phase, 0)[0], length.rates(phase, 10)[0]) == (config.learning_rate, pytest.approx(1e-6))
    assert GRPOConfig(lr_scheduler_kwargs=None).lr_scheduler_kwargs == {}
    # ceil(2.5), as transformers
    assert [resolve_warmup_steps(*given) for given in ((7.0, None), (0.1, 25), (0, None))] == [7, 3, 0]
    with pytest.raises(ConfigError, match=r"warmup_steps=0\.1"):
        resolve_warmup_steps(0.1, None)


def usmle_plan():
    """The three phases of usmle-qa.md, with a short second one."""
    return plan_of(
        Phase("warmup", steps=100, temperature=0.7, beta=0.02, num_generations=8),
        Phase("main", tokens=450, temperature=1.0),
        Phase("final", learning_rate=5e-6, temperature=0.8),
    )


def test_phases_follow_one_another_and_the_plan_ends_with_its_last_limit():
    plan = usmle_plan()
    first = plan.at(Elapsed(0, 0, 0))
    assert (first.name, first.temperature, first.beta, first.num_generations) == ("warmup", 0.7, 0.02, 8)
    assert (first.effective_learning_rate(1e-5, 0.5), plan.at(Elapsed(99, 5000, 0)).name) == (5e-6, "warmup")
    second = plan.at(Elapsed(100, 5050, 0))
    assert (second.name, second.temperature, second.beta, second.num_generations) == ("main", 1.0, 0.01, 16)
    assert plan.at(Elapsed(109, 5499, 0)).name == "main"  # 450 tokens from where it began, at 5050
    third = plan.at(Elapsed(110, 5560, 0))
    assert (third.index, third.name, third.temperature) == (2, "final", 0.8)
    assert third.effective_learning_rate(1e-5, 0.25) == 5e-6  # its own, whatever the schedule says
    assert not plan.finished(Elapsed(10**6, 10**9, 1e9))
    plan = plan_of(Phase(minutes=1), Phase(steps=3))
    assert plan.at(Elapsed(0, 0, 59.9)).name == "phase 1"
    assert not plan.finished(Elapsed(0, 0, 60.0))
    assert plan.at(Elapsed(10, 0, 60.0)).name == "phase 2"
    assert [plan.finished(each) for each in (Elapsed(12, 0, 70.0), Elapsed(13, 0, 71.0))] == [False, True]
    assert (plan.total_steps, plan_of(Phase(steps=2), Phase(steps=3)).total_steps) == (None, 5)
    jump = plan_of(Phase("a", tokens=10), Phase("b", tokens=10), Phase("c"))  # over a whole phase: it is visited
    assert [jump.at(Elapsed(n, tokens)).name for n, tokens in enumerate([0, 100, 105, 111])] == ["a", "b", "b", "c"]
    endless = plan_of(temperature=0.9)
    phase = endless.at(Elapsed(10**6))
    assert (phase.name, phase.temperature, phase.learning_rate) == ("train", 0.9, None)
    assert not endless.finished(Elapsed(10**6))
    with pytest.raises(CheckpointError, match=r"phase 3.*has 1"):
        endless.restore({"index": 2, "start": {"step": 0, "tokens": 0, "seconds": 0.0}})


def test_a_resumed_plan_goes_on_where_it_was():
    straight, first_half = usmle_plan(), usmle_plan()
    path = [Elapsed(step, 37 * step, 2.0 * step) for step in range(0, 130, 3)]
    expected = [straight.at(progress) for progress in path]
    seen, resumed = [first_half.at(progress) for progress in path[:37]], usmle_plan()
    resumed.restore(first_half.state())
    seen += [resumed.at(progress) for progress in path[37:]]
    assert (seen, {phase.name for phase in seen}) == (expected, {"warmup", "main", "final"})
    assert seen[36].name == "main"  # the cut lies within the phase that began late


def cutting_plan():
    warmup = Phase("warmup", steps=100, min_accuracy=0.15, learning_rate_cut=0.5)
    return plan_of(warmup, Phase("main", steps=100), Phase("final", learning_rate=5e-6))


def test_low_accuracy_cuts_the_learning_rate_once_for_ten_steps():
    plan = cutting_plan()
    assert [plan.note_accuracy(0.1) for _ in range(20)] == 9 * [False] + [True] + 9 * [False] + [True]
    phase = plan.at(Elapsed(20))
    assert (phase.learning_rate_factor, phase.effective_learning_rate(1e-5, 0.8)) == (0.25, pytest.approx(2e-6))
    # the cut outlives its phase, a rate of its own does not inherit it
    assert plan.at(Elapsed(100)).learning_rate_factor == 0.25
    assert plan.note_accuracy(0.0) is False  # no limit in this phase
    assert plan.at(Elapsed(200)).effective_learning_rate(1e-5, 1.0) == 5e-6
    plan = cutting_plan()
    # the mean of ten steps decides: a high tenth one keeps it above 0.15 until it leaves the window
    assert [plan.note_accuracy(x) for x in [0.0] * 9 + [1.6] + [0.0] * 9] == 19 * [False]
    assert plan.note_accuracy(0.0)
    assert not plan.note_accuracy(None)
    plan, again = cutting_plan(), cutting_plan()  # a resume keeps the cut and what led to the next one
    for _ in range(15):
        plan.note_accuracy(0.1)
    again.restore(plan.state())
    assert again.at(Elapsed(15)).learning_rate_factor == 0.5
    assert [again.note_accuracy(0.1) for _ in range(5)] == [False] * 4 + [True]
