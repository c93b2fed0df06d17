import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.metric_names import METRICS, describe_metric
from covey.observe import Doctor, diagnose

HEALTHY = {
    "reward": 0.4,
    "reward_std": 0.3,
    "frac_reward_zero_std": 0.2,
    "frac_reward_none": 0.0,
    "completions/mean_length": 80.0,
    "completions/max_length": 200.0,
    "completions/clipped_ratio": 0.05,
    "kl": 0.05,
    "entropy": 0.8,
    "clip_ratio/region_mean": 0.02,
    "grad_norm": 0.5,
    "loss": 0.01,
    "learning_rate": 1e-5,
    "sampling/sampling_logp_difference/mean": 0.004,
    "mask/off_policy": 0.1,
}


def history(count=10, **changes):
    steps = [{"step": step + 1, **HEALTHY, **changes} for step in range(count)]
    if "reward" not in changes:
        for step in steps:
            step["reward"] += 0.01 * step["step"]
    return steps


def codes(steps):
    return [diagnosis.code for diagnosis in diagnose(steps)]


def test_a_healthy_run_has_no_diagnosis():
    assert diagnose(history(40)) == []
    assert diagnose([]) == []


CASES = [
    (
        "reward_never_nonzero",
        {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0},
        "last 10 steps",
        "completions/",
    ),
    ("reward_constant", {"reward": -1.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}, "-1", "differ"),
    ("groups_all_wrong", {"frac_reward_zero_std": 0.9}, "90%", "num_generations"),
    ("groups_all_right", {"frac_reward_zero_std": 0.9}, "90%", "harder prompts"),
    ("groups_tied", {"frac_reward_zero_std": 0.8}, "80%", "dynamic_sampling"),
    ("rewards_none", {"frac_reward_none": 0.5}, "50%", "0.0 for a wrong"),
    ("episodes_failed", {"agent/failed_ratio": 0.35, "frac_reward_none": 0.4}, "35%", "environment.step_seconds"),
    (
        "episodes_failed",
        {"agent/failed_ratio": 0.6, "mask/failed_episodes": 0.6, "mask/off_policy": 0.0, "mask_ratio": 0.4},
        "60%",
        "column error",
    ),
    ("completions_truncated", {"completions/clipped_ratio": 0.45}, "45%", "max_completion_length"),
    ("completions_short", {"completions/mean_length": 1.2}, "1.2 tokens", "chat template"),
    ("no_answer", {"completions/no_answer_ratio": 0.25}, "25%", "format"),
    ("mask_ratio_low", {"mask_ratio": 0.55}, "55%", "reference_update_steps"),
    ("mask_ratio_high", {"mask_ratio": 0.97}, "97%", "Nothing needs to be done"),
    ("kl_high", {"kl": 0.75}, "0.75 nats", "algorithm.beta"),
    ("clip_fraction_high", {"clip_ratio/region_mean": 0.4}, "40%", "learning_rate"),
    ("actions_alike", {"agent/same_action_ratio": 0.8, "agent/success": 0.31}, "80%", "data.prompts_per_step"),
    ("greedy_from_the_start", {"entropy": 0.004}, "0.0040 nats", "temperature"),
    (
        "sampler_mismatch",
        {"sampling/sampling_logp_difference/mean": 0.2},
        "0.200 nats",
        "importance_sampling_correction",
    ),
    ("masked_off_policy", {"mask/off_policy": 0.7}, "70%", "off_policy"),
    ("gradient_zero", {"grad_norm": 0.0}, "exactly 0", "mask/"),
    ("not_finite", {"grad_norm": float("nan")}, "10 of the last 10", "learning_rate"),
    ("not_finite", {"loss": None}, "loss was NaN", "bfloat16"),
    (
        "tag_opened_by_prompt",
        {"prompts/opened_tag": 1.0, "rewards/my_format/mean": 0.0, "rewards/right/mean": 0.0},
        "rewards/my_format/mean was 0 in the last 10 steps",
        "prompt_ends",
    ),
    ("learning_rate_zero", {"learning_rate": 0.0}, "last 10 steps", "max_steps"),
]
REWARDS = {"groups_all_wrong": (0.02, 0.03), "groups_all_right": (0.95, 0.96)}


@pytest.mark.parametrize(("code", "changes", "number", "fix"), CASES)
def test_each_trouble_is_named_with_its_number_and_a_fix(code, changes, number, fix):
    steps = history(**changes)
    for step, reward in zip(steps, 5 * REWARDS.get(code, ()), strict=False):
        step["reward"] = reward
    assert codes(steps) == [code]
    (diagnosis,) = diagnose(steps)
    assert number in diagnosis.message
    assert fix in diagnosis.fix
    assert str(diagnosis) == f"{diagnosis.message}. {diagnosis.fix}."


def test_a_format_that_is_met_or_whose_tag_the_completion_opens_is_no_trouble():
    assert codes(history(**{"prompts/opened_tag": 1.0, "rewards/my_format/mean": 0.1})) == []
    assert codes(history(**{"rewards/my_format/mean": 0.0})) == []


def test_an_action_may_be_short():
    assert codes(history(**{"completions/mean_length": 1.2, "agent/turns": 2.5})) == []


def test_what_down_sampling_leaves_out_is_no_trouble():
    assert codes(history(**{"mask/down_sampling": 0.78})) == []


def test_entropy_that_falls_is_told_from_entropy_that_never_was():
    steps = history(20)
    for step in steps[10:]:
        step["entropy"] = 0.004
    assert codes(steps) == ["entropy_collapse"]


def test_a_solved_task_is_called_solved_whatever_else_has_come_to_rest():
    solved = {"reward": 1.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "accuracy": 1.0, "entropy": 0.001}
    agents = {"agent/same_action_ratio": 1.0, "agent/success": 1.0}
    steps = history(20, **solved, **agents)
    for step in steps[:10]:
        step["entropy"] = 1.0
    (said,) = diagnose(steps)
    assert (said.code, "the accuracy is 1.00" in said.message) == ("groups_all_right", True)
    assert codes([{**step, "accuracy": 0.3} for step in steps]) == ["reward_constant", "entropy_collapse"]


def test_a_reward_that_stands_still_is_spoken_of_after_sixty_steps():
    steps = history(60)
    for number, step in enumerate(steps):
        step["reward"] = 0.4 if number % 2 else 0.3
    assert codes(steps) == ["reward_flat"]
    assert codes(steps[:59]) == []
    assert codes([{**step, "accuracy": 0.95} for step in steps]) == []
    assert codes([{**step, "reward": step["reward"] + 0.002 * step["step"]} for step in steps]) == []
    doctor = Doctor()
    said = [diagnosis.code for step in steps for diagnosis in doctor.check(step)]
    assert said == ["reward_flat"]
    assert codes([{**step, "kl": 0.9} for step in steps]) == ["kl_high"]  # which may be why


def test_how_much_is_right_is_not_read_from_rewards_of_any_scale():
    tied = {"frac_reward_zero_std": 0.9}
    assert codes(history(reward=1.97, **tied)) == ["groups_tied"]
    assert codes(history(reward=-0.5, reward_std=0.3, **tied)) == ["groups_tied"]
    (said,) = diagnose(history(reward=0.97, **tied))
    assert (said.code, "if 1 is the most" in said.message) == ("groups_all_right", True)
    (said,) = diagnose(history(reward=3.0, accuracy=0.95, **tied))
    assert (said.code, "the accuracy is 0.95" in said.message) == ("groups_all_right", True)
    assert codes(history(reward=3.0, accuracy=0.05, **tied)) == ["groups_all_wrong"]


def test_a_mask_that_acts_is_named_and_not_recommended():
    cut = {"completions/clipped_ratio": 0.4}
    assert "mask_truncated_completions" in diagnose(history(**cut))[0].fix
    on = history(**cut, **{"mask/mask_truncated_completions": 0.4, "mask_ratio": 0.6})
    truncated, ratio = diagnose(on)
    assert "mask_truncated_completions" not in truncated.fix
    assert "those that take any are mask_truncated_completions, off_policy" in ratio.message
    assert "mask_truncated" not in diagnose(history(**{"completions/clipped_ratio": 0.9}))[0].fix


def test_a_policy_that_stands_still():
    assert codes(history(40, kl=1e-8)) == ["policy_does_not_move"]
    assert codes(history(20, kl=1e-8)) == []  # too early to say
    # KL 0 because beta is 0 and it is not measured, i.e. no such metric: nothing to say
    still = history(40)
    for step in still:
        del step["kl"]
    assert codes(still) == []


def test_a_falling_reward():
    falling = [{**step, "reward": 0.6 - 0.01 * step["step"]} for step in history(30)]
    (diagnosis,) = diagnose(falling)
    assert diagnosis.code == "reward_falling"
    assert "from 0.520 to 0.370 within 30 steps" in diagnosis.message  # means of 0.59..0.45 and 0.44..0.30
    assert diagnose(falling[:29]) == []
    noise = [{**step, "reward": 0.5 + 0.2 * math.sin(7.0 * step["step"])} for step in history(300)]
    assert {code for end in range(30, 300) for code in codes(noise[:end])} == {"reward_flat"}  # and never a fall


def test_a_zero_gradient_is_no_news_where_every_group_was_tied():
    steps = history(10)
    for step in steps[-5:]:
        step.update({"grad_norm": 0.0, "frac_reward_zero_std": 1.0})
    assert codes(steps) == []


def test_a_mask_that_is_meant_to_exclude_most_tokens_is_no_trouble():
    assert codes(history(**{"mask/top_entropy_quantile": 0.8})) == []


def test_two_steps_are_too_few_except_for_broken_numbers():
    assert codes(history(2, kl=9.0)) == []
    assert codes(history(2, loss=float("nan"))) == ["not_finite"]


def test_evaluations_between_steps_do_not_count_as_steps():
    steps = [line for step in history(4, kl=9.0) for line in (step, {"step": step["step"], "eval/accuracy": 0.0})]
    assert codes(steps) == []
    assert codes([*steps, history(1, kl=9.0)[0]]) == ["kl_high"]


def test_the_doctor_speaks_once_for_each_episode():
    doctor = Doctor()
    said = []
    for step in range(1, 71):
        trouble = 1 <= step <= 20 or step >= 55
        metrics = {**HEALTHY, "reward": 0.3 + 0.01 * (step % 7), "kl": 0.9 if trouble else 0.1}
        said += [(step, diagnosis.code) for diagnosis in doctor.check(metrics)]
    # 5 steps are needed at first; later the mean of 10 must pass 0.5 again: 6 steps of 0.9 and 4 of 0.1
    assert said == [(5, "kl_high"), (60, "kl_high")]


def test_trouble_that_flickers_is_one_episode():
    doctor = Doctor()
    said = []
    for step in range(60):
        kl = 0.9 if step % 8 < 4 else 0.05
        said += doctor.check({**HEALTHY, "reward": 0.3 + 0.01 * (step % 7), "kl": kl})
    assert [diagnosis.code for diagnosis in said] == ["kl_high"]


def test_a_resumed_doctor_does_not_repeat_itself():
    past = history(20, kl=0.9)
    assert [d.code for d in Doctor(history=past[:4]).check(past[4])] == ["kl_high"]
    doctor = Doctor(history=past)
    for _ in range(30):
        assert doctor.check({"step": 20, "eval/accuracy": 0.1}) == []  # an evaluation is no step without trouble
    assert doctor.check(past[-1]) == []


@settings(deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(sorted(HEALTHY)),
            st.one_of(st.none(), st.floats(), st.integers(), st.just("text"), st.booleans()),
        ),
        max_size=12,
    )
)
def test_no_metrics_break_the_doctor(steps):
    for diagnosis in diagnose(steps):
        assert diagnosis.message
        assert diagnosis.fix


def test_the_doctor_reads_only_metrics_that_are_defined():
    source = (Path(__file__).resolve().parents[2] / "src/covey/observe/doctor.py").read_text()
    read = set(re.findall(r'(?:recent\.\w+\(|for name in \()"([a-z_/]+)"', source))
    assert {"reward", "kl", "entropy", "loss"} <= read
    assert [name for name in read if describe_metric(name) is None] == []


def test_definitions():
    assert METRICS["kl"].unit == "nats"
    for name in (
        "rewards/exact_match/mean",
        "rewards/a/b/std",
        "mask/off_policy",
        "eval/accuracy",
        "time/update",
    ):
        assert describe_metric(name) is not None, name
    for name in ("rewards/mean", "foo", "mask/", "eval/foo", "rewards/x/median"):
        assert describe_metric(name) is None, name
    inner = describe_metric("eval/completions/mean_length")
    assert inner is not None
    assert inner.unit == "tokens"
    assert all(definition.meaning for definition in METRICS.values())


def test_a_low_kl_is_spoken_of_where_its_penalty_may_hold_a_still_reward_back():
    """usmle-qa.md: "If too low: Decrease kl_coef"."""
    steps = history(60, reward=0.3, kl=0.002, kl_penalty=0.002 * 0.04)
    for number, step in enumerate(steps):
        step["reward"] = 0.4 if number % 2 else 0.3
    assert codes(steps) == ["kl_low", "reward_flat"]
    assert "0.0020 nats" in diagnose(steps)[0].message
    assert "algorithm.beta" in diagnose(steps)[0].fix
    assert codes([{**step, "kl": 0.02} for step in steps]) == ["reward_flat"]
    assert codes([{**step, "kl_penalty": 0.0} for step in steps]) == ["reward_flat"]  # nothing holds it
    assert codes([{**step, "reward": step["reward"] + 0.002 * step["step"]} for step in steps]) == []


def test_numbers_that_are_not_finite_at_step_1_are_no_matter_of_the_learning_rate():
    first, later = history(8, loss=float("nan")), [{**step, "step": step["step"] + 5} for step in history(8)]
    later[-1]["loss"] = None
    assert "another copy of the model" in diagnose(first)[0].fix
    assert diagnose(later)[0].fix.startswith("Lower optim.learning_rate")
