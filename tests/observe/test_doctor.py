"""Metrics: what they mean, the one of memory, and what the doctor reads from them."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.metric_names import METRICS, describe_metric
from covey.observe import Doctor, diagnose, memory_metrics, peak_rss_bytes
from covey.observe.remedies import SAYS

HEALTHY = {
    "reward": 0.4, "reward_std": 0.3, "frac_reward_zero_std": 0.2, "frac_reward_none": 0.0, "kl": 0.05, "entropy": 0.8,
    "completions/mean_length": 80.0, "completions/max_length": 200.0, "completions/clipped_ratio": 0.05,
    "clip_ratio/region_mean": 0.02, "grad_norm": 0.5, "loss": 0.01, "learning_rate": 1e-5,
    "sampling/sampling_logp_difference/mean": 0.004, "mask/off_policy": 0.1,
}  # fmt: skip


def history(count=10, **changes):
    steps = [{"step": step, **HEALTHY, **changes} for step in range(1, count + 1)]
    return steps if "reward" in changes else rising(steps, 0.01)


def rising(steps, by):
    return [{**step, "reward": step["reward"] + by * step["step"]} for step in steps]


def flat(count=60, **changes):
    return [{**step, "reward": 0.3 if step["step"] % 2 else 0.4} for step in history(count, **changes)]


def codes(steps):
    return [diagnosis.code for diagnosis in diagnose(steps)]


ALL_ALIKE = {"reward_std": 0.0, "frac_reward_zero_std": 1.0}
WORLD_BREAKS = {"agent/failed_ratio": 0.6, "mask/failed_episodes": 0.6, "mask/off_policy": 0.0, "mask_ratio": 0.4}
OPENED = {"prompts/opened_tag": 1.0, "rewards/my_format/mean": 0.0, "rewards/right/mean": 0.0}
MISMATCH = {"sampling/sampling_logp_difference/mean": 0.2}
CASES = [
    ("reward_never_nonzero", {"reward": 0.0, **ALL_ALIKE}, "last 10 steps", "completions/"),
    ("reward_constant", {"reward": -1.0, **ALL_ALIKE}, "-1", "differ"),
    ("groups_all_wrong", {"frac_reward_zero_std": 0.9}, "90%", "num_generations"),
    ("groups_all_right", {"frac_reward_zero_std": 0.9}, "90%", "harder prompts"),
    ("groups_tied", {"frac_reward_zero_std": 0.8}, "80%", "dynamic_sampling"),
    ("teacher_silent", {"teacher/rows": 0.0}, "no completion", "algorithm.teacher.context"),
    ("rewards_none", {"frac_reward_none": 0.5}, "50%", "0.0 for a wrong"),
    ("episodes_failed", {"agent/failed_ratio": 0.35, "frac_reward_none": 0.4}, "35%", "environment.step_seconds"),
    ("episodes_failed", WORLD_BREAKS, "60%", "column error"),
    ("completions_truncated", {"completions/clipped_ratio": 0.45}, "45%", "max_completion_length"),
    ("completions_short", {"completions/mean_length": 1.2}, "1.2 tokens", "chat template"),
    ("no_answer", {"completions/no_answer_ratio": 0.25}, "25%", "format"),
    ("mask_ratio_low", {"mask_ratio": 0.55}, "55%", "reference_update_steps"),
    ("mask_ratio_high", {"mask_ratio": 0.97}, "97%", "Nothing needs to be done"),
    ("kl_high", {"kl": 0.75}, "0.75 nats", "algorithm.beta"),
    ("clip_fraction_high", {"clip_ratio/region_mean": 0.4}, "40%", "learning_rate"),
    ("actions_alike", {"agent/same_action_ratio": 0.8, "agent/success": 0.31}, "80%", "data.prompts_per_step"),
    ("greedy_from_the_start", {"entropy": 0.004}, "0.0040 nats", "temperature"),
    ("sampler_mismatch", MISMATCH, "0.200 nats", "importance_sampling_correction"),
    ("masked_off_policy", {"mask/off_policy": 0.7}, "70%", "off_policy"),
    ("gradient_zero", {"grad_norm": 0.0}, "exactly 0", "mask/"),
    ("not_finite", {"grad_norm": float("nan")}, "10 of the last 10", "learning_rate"),
    ("not_finite", {"loss": None}, "loss was NaN", "bfloat16"),
    ("tag_opened_by_prompt", OPENED, "rewards/my_format/mean was 0 in the last 10 steps", "prompt_ends"),
    ("learning_rate_zero", {"learning_rate": 0.0}, "last 10 steps", "max_steps"),
]
REWARDS = {"groups_all_wrong": (0.02, 0.03), "groups_all_right": (0.95, 0.96)}


@pytest.mark.parametrize(("code", "changes", "number", "fix"), CASES)
def test_each_trouble_is_named_with_its_number_and_a_fix(code, changes, number, fix):
    steps = history(**changes)
    for step, reward in zip(steps, 5 * REWARDS.get(code, ()), strict=False):
        step["reward"] = reward
    (diagnosis,) = diagnose(steps)
    assert (diagnosis.code, number in diagnosis.message) == (code, True)
    assert (fix in diagnosis.fix, str(diagnosis)) == (True, f"{diagnosis.message}. {diagnosis.fix}.")


UNMEASURED = [{name: value for name, value in step.items() if name != "kl"} for step in history(40)]  # beta is 0
TIED_AT_LAST = [*history(5), *history(5, grad_norm=0.0, frac_reward_zero_std=1.0)]
EVALUATED = [line for step in history(4, kl=9.0) for line in (step, {"step": step["step"], "eval/accuracy": 0.0})]
TIED = {"frac_reward_zero_std": 0.9}
HISTORIES = {
    "a healthy run": (history(40), []),
    "a run that has not begun": ([], []),
    "a format that is met": (history(**OPENED | {"rewards/my_format/mean": 0.1}), []),
    "a format whose tag the completion opens": (history(**{"rewards/my_format/mean": 0.0}), []),
    "an action may be short": (history(**{"completions/mean_length": 1.2, "agent/turns": 2.5}), []),
    "what down-sampling leaves out": (history(**{"mask/down_sampling": 0.78}), []),
    "a mask that is meant to exclude most tokens": (history(**{"mask/top_entropy_quantile": 0.8}), []),
    "entropy that falls, and was there": ([*history(10), *history(10, entropy=0.004)], ["entropy_collapse"]),
    "a policy that stands still": (history(40, kl=1e-8), ["policy_does_not_move"]),
    "too early to say that it stands still": (history(20, kl=1e-8), []),
    "a KL that is not measured": (UNMEASURED, []),
    "a zero gradient where every group was tied": (TIED_AT_LAST, []),
    "two steps are too few": (history(2, kl=9.0), []),
    "except for rewards of which there are none": (history(2, frac_reward_none=1.0), ["rewards_none"]),
    "which one step may have by chance": (history(1, frac_reward_none=1.0), []),
    "except for broken numbers": (history(2, loss=float("nan")), ["not_finite"]),
    "evaluations between steps are no steps": (EVALUATED, []),
    "evaluations between enough steps": ([*EVALUATED, history(1, kl=9.0)[0]], ["kl_high"]),
    "more than one is no share that is right": (history(reward=1.97, **TIED), ["groups_tied"]),
    "nor is less than nothing": (history(reward=-0.5, **TIED), ["groups_tied"]),
    "a teacher teaches tied groups": (history(reward=0.0, **ALL_ALIKE | {"teacher/tied_rows": 1.0}), []),
    "accuracy says how much is right": (history(reward=3.0, accuracy=0.05, **TIED), ["groups_all_wrong"]),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_what_is_found(name):
    steps, found = HISTORIES[name]
    assert codes(steps) == found


def test_a_solved_task_is_called_solved_whatever_else_has_come_to_rest():
    agents = {"agent/same_action_ratio": 1.0, "agent/success": 1.0}
    steps = history(20, reward=1.0, accuracy=1.0, entropy=0.001, **ALL_ALIKE, **agents)
    for step in steps[:10]:
        step["entropy"] = 1.0
    (said,) = diagnose(steps)
    assert (said.code, "the accuracy is 1.00" in said.message) == ("groups_all_right", True)
    assert codes([{**step, "accuracy": 0.3} for step in steps]) == ["reward_constant", "entropy_collapse"]


def test_a_reward_that_stands_still_is_spoken_of_after_sixty_steps():
    steps = flat()
    assert (codes(steps), codes(steps[:59])) == (["reward_flat"], [])
    assert (codes([{**step, "accuracy": 0.95} for step in steps]), codes(rising(steps, 0.002))) == ([], [])
    doctor = Doctor()
    assert [diagnosis.code for step in steps for diagnosis in doctor.check(step)] == ["reward_flat"]
    assert codes([{**step, "kl": 0.9} for step in steps]) == ["kl_high"]  # which may be why


def test_how_much_is_right_is_not_read_from_rewards_of_any_scale():
    for rewards, words in (({"reward": 0.97}, "if 1 is the highest"), ({"reward": 3.0, "accuracy": 0.95}, "is 0.95")):
        (said,) = diagnose(history(**rewards, **TIED))
        assert (said.code, words in said.message) == ("groups_all_right", True)


def test_a_mask_that_acts_is_named_and_not_recommended():
    cut = {"completions/clipped_ratio": 0.4}
    assert "mask_truncated_completions" in diagnose(history(**cut))[0].fix
    truncated, ratio = diagnose(history(**cut, **{"mask/mask_truncated_completions": 0.4, "mask_ratio": 0.6}))
    assert "mask_truncated_completions" not in truncated.fix
    assert "active masks: mask_truncated_completions, off_policy" in ratio.message
    assert "mask_truncated" not in diagnose(history(**{"completions/clipped_ratio": 0.9}))[0].fix


def test_a_falling_reward():
    falling = [{**step, "reward": 0.6 - 0.01 * step["step"]} for step in history(30)]
    (diagnosis,) = diagnose(falling)
    assert diagnosis.code == "reward_falling"
    assert "from 0.520 to 0.370 within 30 steps" in diagnosis.message  # means of 0.59..0.45 and 0.44..0.30
    assert diagnose(falling[:29]) == []
    noise = [{**step, "reward": 0.5 + 0.2 * math.sin(7.0 * step["step"])} for step in history(300)]
    assert {code for end in range(30, 300) for code in codes(noise[:end])} == {"reward_flat"}  # and never a fall


def test_the_doctor_speaks_once_for_each_episode():
    """A trouble that flickers is one, and one that comes back later another."""
    flickers = {step: 0.9 if step % 8 < 4 else 0.05 for step in range(60)}
    returns = {step: 0.9 if step <= 20 or step >= 55 else 0.1 for step in range(1, 71)}
    # 5 steps are needed at first; later the mean of 10 must pass 0.5 again: 6 steps of 0.9 and 4 of 0.1
    for kls, episodes in ((flickers, [4]), (returns, [5, 60])):
        doctor = Doctor()
        steps = {step: {**HEALTHY, "reward": 0.3 + 0.01 * (step % 7), "kl": kl} for step, kl in kls.items()}
        said = [(step, diagnosis.code) for step, metrics in steps.items() for diagnosis in doctor.check(metrics)]
        assert said == [(step, "kl_high") for step in episodes]


def test_a_resumed_doctor_does_not_repeat_itself():
    past = history(20, kl=0.9)
    assert [d.code for d in Doctor(history=past[:4]).check(past[4])] == ["kl_high"]
    doctor = Doctor(history=past)
    for _ in range(30):
        assert doctor.check({"step": 20, "eval/accuracy": 0.1}) == []  # an evaluation is no step without trouble
    assert doctor.check(past[-1]) == []


ANYTHING = st.one_of(st.none(), st.floats(), st.integers(), st.just("text"), st.booleans())


def mails(entropies, right=0.3, **more):
    steps = [{**HEALTHY, "step": step, "entropy": value, **more} for step, value in enumerate(entropies, 1)]
    return [{**step, "accuracy": right, "reward": right} for step in steps]


FALL = [1.0 * 10 ** (-step / 7) for step in range(8)]  # from 1.0 to 0.1 in 8 steps
KINDS = ("invoice", "order", "claim", "thanks")


def evaluated(step, *accuracies, of=20):
    return {"step": step} | {
        name: value
        for kind, share in zip(KINDS, accuracies, strict=True)
        for name, value in ((f"eval/accuracy/{kind}", share), (f"eval/num_completions/{kind}", of))
    }


def test_an_entropy_that_falls_to_a_quarter_within_a_few_steps_is_named_until_the_task_is_solved():
    (said,) = diagnose(mails(FALL))
    assert said.code == "entropy_fell"
    assert "from 0.72 to 0.14 nats per token within 5 steps" in said.message  # 10 ** (-1 / 7), 10 ** (-6 / 7)
    assert all(words in said.fix for words in ("learning_rate", "entropy_coef", "(few-shot)"))
    assert codes(mails([*FALL, *[0.1] * 20])) == ["entropy_fell"]  # it is still down
    assert (codes(mails(FALL, right=0.95)), codes(mails(FALL[:4]))) == ([], [])
    assert codes(mails([1.0, 0.9, 1.1, 0.1, 1.0, 0.9])) == []  # one step tells nothing
    assert codes(mails([*FALL, 0.5, 0.6])) == []  # it rose again
    assert codes(mails([0.09 * value for value in FALL], kl=0.01)) == []  # there was little from the start
    slow = [10 ** (-step / 20) for step in range(29)]  # a quarter after 12 steps
    assert codes(mails(slow)) == []
    assert "covey play RECIPE --imitate" in diagnose(mails(FALL, **{"agent/turns": 3.0}))[0].fix
    of_three = [{**step, "reward": 2.5} for step in mails(FALL)]
    unjudged = [{name: value for name, value in step.items() if name != "accuracy"} for step in of_three]
    assert codes(unjudged) == ["entropy_fell"]


REWARDS_OF_A_RUN = [0.0, 2, 8, 19, 21, 41, 50, 64, 70, 70, 89, 84, 79, 84, 86, 94, 89, 93, 90, 82]  # the tutorial's
ENTROPIES_OF_A_RUN = [2, 1.94, 1.42, 1.42, 1.44, 1.3, 0.93, 0.77, 0.57, 0.66, 0.32, 0.42, 0.34, 0.33, 0.33, 0.34, 0.34]
CUT_IN_A_RUN = [0.84, 0.84, 0.56, 0.41, 0.34, 0.31, 0.12, 0.09, 0.09, 0.12, *[0.0] * 10]


@pytest.mark.parametrize(("held_out", "lasting", "said"), [((0.5, 0.82), 0, []), ((0.5, 0.5), 20, ["entropy_fell"])])
def test_a_run_that_learns_is_not_called_ill(held_out, lasting, said):
    doctor, heard = Doctor(), []
    columns = zip(REWARDS_OF_A_RUN, [*ENTROPIES_OF_A_RUN, 0.23, 0.27, 0.4], CUT_IN_A_RUN, strict=True)
    steps = [{"reward": r / 100, "entropy": e, "completions/clipped_ratio": c} for r, e, c in columns]
    steps = [{**HEALTHY, **step, "accuracy": 0.8 * step["reward"]} for step in [*steps, *steps[-1:] * lasting]]
    for number, step in enumerate(steps, 1):
        heard += doctor.check({"step": number, **step})
        if number in (1, 10):
            heard += doctor.check({"step": number, "eval/accuracy": held_out[number // 10]})
    assert [one.code for one in heard] == said
    late = [{**step, "completions/clipped_ratio": 0.6 if number > 17 else 0.0} for number, step in enumerate(steps)]
    assert "completions_truncated" in codes(late)


def test_kinds_of_questions_that_stay_at_zero_while_another_is_learnt_are_named():
    before, after = evaluated(0, 0.2, 0.1, 0.0, 0.0), evaluated(8, 0.95, 0.6, 0.0, 0.0)
    steps = mails(FALL)
    assert codes([before, *steps, after]) == ["entropy_fell", "kinds_at_zero"]
    said = diagnose([before, *steps, after])[1]
    assert said.message.startswith("the accuracy of claim, thanks was 0 in 2 evaluations, while that of invoice rose")
    assert "from 20% to 95%" in said.message
    assert "one solved example of each of these kinds" in said.fix
    healthy = history(10)
    assert (codes([before, *healthy, after]), codes([before, *healthy])) == (["kinds_at_zero"], [])
    assert codes([before, *healthy, before]) == []  # nothing is learnt of any
    assert codes([before, evaluated(4, 0.5, 0.4, 0.1, 0.1), *healthy, after]) == []  # they were not always at 0
    assert codes([evaluated(0, 0.2, 0.1, 0.0, 0.0), *healthy, evaluated(8, 0.95, 0.6, 0.0, 0.0, of=4)]) == []


def test_the_doctor_hears_of_kinds_when_they_are_evaluated():
    doctor = Doctor(history=[evaluated(0, 0.2, 0.1, 0.0, 0.0), *history(8)])
    assert doctor.findings() == []
    (said,) = doctor.check(evaluated(8, 0.95, 0.6, 0.0, 0.0))
    assert (said.code, doctor.check({"step": 8, "eval/accuracy": 0.3})) == ("kinds_at_zero", [])
    assert [(one.since, one.until, one.present) for one in doctor.findings()] == [(8, 8, True)]


CONSTANT = {"eval/most_frequent_answer": 0.86, "eval/num_completions": 50.0, "eval/accuracy": 0.08}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, True),
        ({"eval/most_frequent_answer": 0.49}, False),
        ({"eval/num_completions": 19.0}, False),
        ({"eval/accuracy": None}, False),
        ({"eval/most_frequent_answer": 1.0, "eval/accuracy": 0.5}, True),  # always "yes", which is right for half
        ({"eval/most_frequent_answer": 0.6, "eval/accuracy": 0.8}, False),
        ({"eval/most_frequent_answer": 0.92, "eval/accuracy": 0.91}, False),  # nine of ten mails are no spam
        ({"eval/most_frequent_answer": 1.0, "eval/accuracy": 1.0}, False),  # all have one right answer
        ({"step": 0}, False),  # nothing was learnt yet
    ],
)
def test_one_answer_to_most_questions_is_named_where_it_is_seldom_right(changes, said):
    steps = history(10)
    record = {"step": 10, "eval/most_frequent_text": "\x1b[1mdelivery" + "!" * 99, **CONSTANT, **changes}
    found = diagnose([*steps, record])
    assert [one.code for one in found] == ["constant_answers"] * said
    if said and not changes:
        assert found[0].message.startswith("43 of 50 held-out answers are the same text ('\\x1b[1mdelivery!")
        assert found[0].message.endswith("!), and 8% are right: the prompt has little effect")
        assert len(found[0].message) < 190
        assert "few-shot" in found[0].fix
        assert "the same text, and 8%" in diagnose([*steps, {"step": 10, **CONSTANT}])[0].message
        assert codes([*steps, record, {"step": 11, **CONSTANT, "eval/accuracy": 0.9}]) == []


def test_a_reward_of_zero_is_advised_a_solved_example_and_a_world_imitation():
    zero = {"reward": 0.0, **ALL_ALIKE}
    (questions,), (world,) = diagnose(history(**zero)), diagnose(history(**zero, **{"agent/turns": 3.0}))
    assert "one solved example of each kind of question into the prompt (few-shot)" in questions.fix
    assert "covey play RECIPE --imitate" in world.fix
    assert "few-shot" not in world.fix


OF_KINDS = ("eval/most_frequent_text", "eval/accuracy/a", "eval/accuracy/b", "eval/num_completions/a")
SEEN = sorted([*HEALTHY, *CONSTANT, *OF_KINDS])


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(SEEN), ANYTHING), max_size=12))
def test_no_metrics_break_the_doctor(steps):
    assert all(diagnosis.message and diagnosis.fix for diagnosis in diagnose(steps))


def test_the_doctor_reads_only_metrics_that_are_defined():
    source = (Path(__file__).resolve().parents[2] / "src/covey/observe/doctor.py").read_text()
    read = set(re.findall(r'(?:recent\.\w+\(|for name in \()"([a-z_/]+)"', source))
    assert {"reward", "kl", "entropy", "loss"} <= read
    assert [name for name in read if describe_metric(name) is None] == []


def test_definitions():
    assert METRICS["kl"].unit == "nats"
    for name in ("rewards/exact_match/mean", "rewards/a/b/std", "mask/off_policy", "eval/accuracy", "time/update"):
        assert describe_metric(name) is not None, name
    for name in ("rewards/mean", "foo", "mask/", "eval/foo", "rewards/x/median"):
        assert describe_metric(name) is None, name
    assert describe_metric("eval/completions/mean_length").unit == "tokens"
    assert all(definition.meaning for definition in METRICS.values())


def test_a_low_kl_is_spoken_of_where_its_penalty_may_hold_a_still_reward_back():
    """usmle-qa.md: "If too low: Decrease kl_coef"."""
    steps = flat(kl=0.002, kl_penalty=0.002 * 0.04)
    low, still = diagnose(steps)
    assert (low.code, still.code, "0.0020 nats" in low.message) == ("kl_low", "reward_flat", True)
    assert ("algorithm.beta" in low.fix, codes([{**step, "kl": 0.02} for step in steps])) == (True, ["reward_flat"])
    assert codes([{**step, "kl_penalty": 0.0} for step in steps]) == ["reward_flat"]  # nothing holds it
    assert codes(rising(steps, 0.002)) == []


def test_numbers_that_are_not_finite_at_step_1_are_no_matter_of_the_learning_rate():
    first, later = history(8, loss=float("nan")), [{**step, "step": step["step"] + 5} for step in history(8)]
    later[-1]["loss"] = None
    assert "another copy of the model" in diagnose(first)[0].fix
    assert diagnose(later)[0].fix.startswith("Lower optim.learning_rate")


def printed_by(code):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


TOUCHED = """
import resource, subprocess, sys
from covey.processes import forget_peak, peak_rss_bytes as peak
before = peak(); block = bytearray(b'x') * 200_000_000; risen = peak(); del block
child = "from covey.processes import peak_rss_bytes as peak; print(peak())"
child = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
print(before, risen, peak(), child.stdout)
assert forget_peak()
print(peak(), int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize())
"""


def test_the_peak_rises_by_what_is_touched_stays_is_not_inherited_and_can_be_forgotten():
    before, risen, after, inherited, forgotten, held = map(int, printed_by(TOUCHED))
    assert 195e6 < risen - before < 250e6
    assert after > risen - 5e6  # the kernel's counters are exact to some pages for each CPU
    assert inherited < risen - 100e6
    assert forgotten < risen - 150e6
    assert abs(forgotten - held) < 10e6


def test_metric_is_in_gigabytes():
    assert abs(memory_metrics()["memory/peak_gb"] * 1e9 - peak_rss_bytes()) < 5e6


def test_watching_a_run_imports_nothing_heavy():
    code = "import sys, covey.observe; covey.observe.memory_metrics(); "
    code += "print([m for m in ('torch', 'jax', 'matplotlib', 'pyarrow', 'wandb') if m in sys.modules])"
    assert printed_by(code) == ["[]"]


def test_the_page_on_symptoms_has_all_that_the_doctor_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "debug.md").read_text(encoding="utf-8")
    assert [code for code in SAYS if f"`{code}" not in page] == []
    table = page[page.index("## Metrics to look at") : page.index("## Stop and resume")]
    assert [name for name in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE) if describe_metric(name) is None] == []
