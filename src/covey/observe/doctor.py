"""Finds the reasons why a run does not learn, from its metrics.

`diagnose` is a pure function of recent metrics. The thresholds are rules of thumb, gathered in `Thresholds`, and every
message names the numbers that it judges. `Doctor` follows a run.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, pvariance
from typing import Any

from covey.observe.records import is_number
from covey.observe.remedies import SAYS
from covey.types import equal_rewards

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One reason why a run does not learn: its short stable name (`code`, e.g. `groups_all_wrong`), what is the matter,
    with the numbers (`message`), and what to do about it (`fix`).
    """

    code: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.message}. {self.fix}."


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The values of metrics beyond which a run is taken to be in trouble."""

    window: int = 10  # steps that are looked at; most checks need `min_steps` of them
    min_steps: int = 5
    tied_groups: float = 0.7
    solved_reward: float = 0.9
    failed_reward: float = 0.1
    newest: int = 3  # steps that say how it is now
    clipped_completions: float = 0.3
    clipped_fall: float = 0.75  # times what it was before: training mends it
    kl: float = 0.5  # usmle-qa.md, Tips for Success: KL "should stay < 0.5"
    low_kl: float = 0.01  # the same: "If too low: Decrease kl_coef"
    clip_fraction: float = 0.3
    entropy: float = 0.02
    entropy_fall: float = 4.0  # within `window` steps: arXiv 2505.22617 found 73 % gone after 200 steps of about 2,400
    some_entropy: float = 0.1  # nats; from less a fall says little
    kind_rise: float = 0.1  # by which held-out accuracy, of a kind or of all, has become better
    kind_completions: int = 5  # 0 of fewer says little
    same_actions: float = 0.7  # share of turns that agents begin alike and take alike
    same_answer: float = 0.5  # share of held-out answers that are one text
    few_answers: int = 20  # fewer say little
    same_answer_right: float = 0.67  # accuracy by that share from which on the text may well be right
    half_solved: float = 0.5  # success from which on doing the same is taken to be learnt
    short_completion: float = 2.5
    logp_difference: float = 0.05
    none_rewards: float = 0.2
    masked_tokens: float = 0.5
    failed_episodes: float = 0.05
    idle_samplers: float = 0.5  # share of the sampling time in which a sampler has nothing to do, mean over samplers
    slow_scoring: float = 0.1  # share of a step that reward functions take
    slow_scoring_seconds: float = 0.5  # in steps that are over at once nobody waits for them
    mask_ratio: tuple[float, float] = (0.7, 0.9)  # usmle-qa.md, Tips for Success: "Should be 70-90 %"
    no_answer: float = 0.1  # the same: ">10 % extraction failures"
    reward_drop: float = 0.1  # relative fall of the mean reward from the first to the second half of `still_steps`
    flat_steps: int = 60  # steps after which a reward that did not rise is spoken of
    still_kl: float = 1e-6
    still_steps: int = 30

    @property
    def longest(self) -> int:
        """Steps that `diagnose` looks back."""
        return max(self.window, self.still_steps, self.flat_steps)


_EXAMPLES = (
    "put one solved example of each kind of question into the prompt (few-shot), which often works better than a "
    "sentence in data.system_prompt"
)
_IMITATION = "begin with imitation if the world has an expert (covey play RECIPE --imitate)"
_WANTED_MASKS = {"mask/top_entropy_quantile", "mask/down_sampling"}  # asked for as a share, to mask most tokens
_EXPLAINED_MASKS = {"mask/failed_episodes"}  # by `_worlds`
ANSWER = "eval/most_frequent_text"
"""No metric: what an evaluation of which `constant_answer` tells has beside its numbers."""
_MOST_FINDINGS = 500


def _number(value: Any) -> float | None:
    """A metric's value; None for text, NaN, infinities and what is as good as infinite."""
    return float(value) if is_number(value) else None


class _Window:
    """The last steps, oldest first, with means over the finite values of a metric."""

    def __init__(self, steps: Sequence[Record]) -> None:
        self.steps = steps

    def values(self, name: str) -> list[float]:
        return [value for step in self.steps if (value := _number(step.get(name))) is not None]

    def mean(self, name: str) -> float | None:
        values = self.values(name)
        return sum(values) / len(values) if values else None

    def above(self, name: str, threshold: float) -> float | None:
        """The mean if it is above the threshold."""
        mean = self.mean(name)
        return mean if mean is not None and mean > threshold else None

    def bad_steps(self, name: str) -> int:
        """Steps at which the metric was recorded as NaN or infinite (null in `metrics.jsonl`), or nearly so."""
        told = [step[name] for step in self.steps if name in step]
        known = [value for value in told if isinstance(value, int | float | None) and not isinstance(value, bool)]
        return sum(_number(value) is None for value in known)


def _say(code: str, recent: _Window, **numbers: Any) -> Diagnosis:
    """What `SAYS` has, with these numbers and those of the window."""
    total = len(recent.steps)
    message, fix = (text.format(total=total, last=f"(last {total} steps)", **numbers) for text in SAYS[code])
    return Diagnosis(code, message, fix)


def diagnose(history: Sequence[Record], thresholds: Thresholds | None = None) -> list[Diagnosis]:
    """Find what keeps a run from learning, in its last steps.

    Args:
        history: metrics of training steps and evaluations, oldest first, such as the lines of `metrics.jsonl`.
        thresholds: the limits of good values.

    Returns:
        Diagnoses, the most basic first; empty if nothing is wrong or too few steps are known.
    """
    limits = thresholds or Thresholds()
    steps = [step for step in history if is_step(step)]
    recent = _Window(steps[-limits.window :])
    found = list(_broken_numbers(recent))
    if 1 < len(recent.steps) < limits.min_steps and recent.mean("frac_reward_none") == 1:  # certain already
        found += list(_worlds(recent, limits)) or [_say("rewards_none", recent, share=1.0)]
    if len(recent.steps) >= limits.min_steps:
        # A mean of 1.9 says nothing of how much is right.
        of_one = all(0 <= value <= 1 for value in _Window(steps).values("reward"))
        found += _rewards(recent, limits, of_one=of_one)
        found += _gradient(recent, steps, limits, explained=bool(found))
        found += _completions(recent, limits)
        found += _masks(recent, limits)
        found += _policy(recent, _Window(steps[: limits.min_steps]), limits)
        if not {"entropy_collapse", "greedy_from_the_start"} & {one.code for one in found}:
            found += _entropy(_Window(steps), _Window(history).values("eval/accuracy"), limits, of_one=of_one)
        found += _kinds([step for step in history if _of_kinds(step)], limits)
        trained = [record for record in history if record.get("step") and "eval/accuracy" in record]
        if trained and (about := constant_answer(trained[-1], limits)):
            found.append(_say("constant_answers", recent, about=about))
        found += _waiting(recent, limits)
        found = [*_worlds(recent, limits), *found]
        found += _falling(_Window(steps[-limits.still_steps :]), limits)
        if not found:
            found += _flat(_Window(steps[-limits.flat_steps :]), limits)
    return found


def is_step(record: Record) -> bool:
    """Whether these are metrics of a training step, and not of an evaluation only."""
    return any(name != "step" and not name.startswith("eval/") for name in record)


def _broken_numbers(recent: _Window) -> Iterator[Diagnosis]:
    for name in ("loss", "grad_norm"):
        if bad := recent.bad_steps(name):
            from_the_first = recent.steps[0].get("step") == 1 and _Window(recent.steps[:1]).bad_steps(name)
            fix = "Lower optim.learning_rate, and if model.dtype is float16, use bfloat16 or float32"
            other = (
                "At step 1 optim.learning_rate had no part in it: use bfloat16 or float32, or another copy of the model"
            )
            yield _say("not_finite", recent, name=name, bad=bad, fix=other if from_the_first else fix)
            return


def _worlds(recent: _Window, limits: Thresholds) -> Iterator[Diagnosis]:
    if (failed := recent.above("agent/failed_ratio", limits.failed_episodes)) is not None:
        yield _say("episodes_failed", recent, share=failed)


def _rewards(recent: _Window, limits: Thresholds, *, of_one: bool) -> Iterator[Diagnosis]:
    total = len(recent.steps)
    unscored = recent.above("frac_reward_none", limits.none_rewards)
    if unscored is not None and unscored - (recent.mean("agent/failed_ratio") or 0.0) > limits.none_rewards:
        yield _say("rewards_none", recent, share=unscored)
    if total >= limits.min_steps and recent.values("teacher/rows") and not recent.mean("teacher/rows"):
        yield _say("teacher_silent", recent)
    if (recent.mean("teacher/tied_rows") or 0.0) > 0.5:
        return  # a teacher teaches groups with equal rewards
    rewards, spread = recent.values("reward"), recent.mean("reward_std")
    right, named, unless = recent.mean("accuracy"), "accuracy", ""
    begin = _beginning(recent)
    alike = len(rewards) >= limits.min_steps and equal_rewards(min(rewards), max(rewards))
    if alike and equal_rewards(rewards[0], rewards[0] + (spread or 0.0)):
        about = f"every completion of the last {total} steps got the same reward, {rewards[0]:g}"
        if right is not None and right >= limits.solved_reward:
            yield _say("groups_all_right", recent, about=about, named=named, right=right, unless=unless)
        else:
            yield _say("reward_constant" if rewards[0] else "reward_never_nonzero", recent, about=about, begin=begin)
        return
    tied = recent.above("frac_reward_zero_std", limits.tied_groups)
    if tied is None:
        return
    reward = recent.mean("reward")
    about = f"in {tied:.0%} of the groups all completions got the same reward (last {total} steps)"
    if right is None:
        right, named, unless = (reward if of_one else None), "mean reward", ", if 1 is the highest possible reward"
    if right is not None and right >= limits.solved_reward:
        yield _say("groups_all_right", recent, about=about, named=named, right=right, unless=unless)
    elif right is not None and right <= limits.failed_reward:
        numbers = {"about": about, "named": named, "right": right, "unless": unless, "begin": begin}
        yield _say("groups_all_wrong", recent, **numbers)
    else:
        known = "" if reward is None else f", with a mean reward of {reward:.2f}"
        yield _say("groups_tied", recent, about=about, known=known)


def _beginning(recent: _Window) -> str:
    """How a policy that never succeeds comes to succeed sometimes."""
    return _IMITATION if recent.values("agent/turns") else _EXAMPLES


def _gradient(recent: _Window, steps: Sequence[Record], limits: Thresholds, *, explained: bool) -> Iterator[Diagnosis]:
    norms = recent.values("grad_norm")[-limits.min_steps :]
    tied = _Window(steps[-limits.min_steps :]).mean("frac_reward_zero_std")
    some_differ = tied is None or tied < 1
    if len(norms) == limits.min_steps and max(norms) == 0 and some_differ and not explained:
        yield _say("gradient_zero", recent, count=len(norms))
    rates = recent.values("learning_rate")
    if len(rates) >= limits.min_steps and max(rates) == 0:
        yield _say("learning_rate_zero", recent, count=len(rates))
        return
    divergence, rate = recent.values("kl"), recent.mean("learning_rate")
    still = len(divergence) >= limits.min_steps and max(divergence) < limits.still_kl
    if still and len(steps) >= limits.still_steps and norms and max(norms) > 0 and rate is not None:
        yield _say("policy_does_not_move", recent, count=len(steps), limit=limits.still_kl, rate=rate)


def _completions(recent: _Window, limits: Thresholds) -> Iterator[Diagnosis]:
    newest, name = _Window(recent.steps[-limits.newest :]), "completions/clipped_ratio"
    before = _Window(recent.steps[: -limits.newest]).mean(name) or 0.0
    if (clipped := newest.above(name, max(limits.clipped_completions, limits.clipped_fall * before))) is not None:
        longest = recent.values("completions/max_length")
        at = f" at {max(longest):.0f} tokens" if longest else ""
        masked = clipped > 0.5 or recent.values("mask/mask_truncated_completions")
        mask = "" if masked else "; or set algorithm.mask_truncated_completions=true"
        yield _say("completions_truncated", newest, share=clipped, at=at, mask=mask)
    length = recent.mean("completions/mean_length")
    acts = bool(recent.values("agent/turns"))  # an action may well be a word
    if length is not None and length < limits.short_completion and not acts:
        yield _say("completions_short", recent, length=length)
    if (no_answer := recent.above("completions/no_answer_ratio", limits.no_answer)) is not None:
        yield _say("no_answer", recent, share=no_answer, limit=limits.no_answer)
    for name in recent.steps[-1] if recent.values("prompts/opened_tag") else ():
        if re.fullmatch(r"rewards/.*(format|think|thought|tag|reason).*/mean", name) and not any(recent.values(name)):
            yield _say("tag_opened_by_prompt", recent, name=name)


def _masks(recent: _Window, limits: Thresholds) -> Iterator[Diagnosis]:
    kept, (least, most) = recent.mean("mask_ratio"), limits.mask_ratio
    masks = {name for step in recent.steps for name in step if name.startswith("mask/")}
    acting = sorted(name.removeprefix("mask/") for name in masks if (recent.mean(name) or 0.0) > 0)
    if kept is not None and kept < least and acting != ["failed_episodes"]:
        yield _say("mask_ratio_low", recent, kept=kept, limit=least, acting=", ".join(acting) or "not known")
    elif kept is not None and kept > most:
        yield _say("mask_ratio_high", recent, kept=kept, limit=most)
    for name in sorted(masks - _WANTED_MASKS - _EXPLAINED_MASKS):
        if (share := recent.above(name, limits.masked_tokens)) is not None:
            reason = name.removeprefix("mask/")
            yield replace(_say("masked", recent, reason=reason, share=share), code=f"masked_{reason}")


def _policy(recent: _Window, first: _Window, limits: Thresholds) -> Iterator[Diagnosis]:
    if (divergence := recent.above("kl", limits.kl)) is not None:
        yield _say("kl_high", recent, kl=divergence, limit=limits.kl)
    if (clip := recent.above("clip_ratio/region_mean", limits.clip_fraction)) is not None:
        yield _say("clip_fraction_high", recent, share=clip)
    entropy = recent.mean("entropy")
    solved = (recent.mean("accuracy") or 0.0) >= limits.solved_reward  # then there is nothing left to explore
    begun = first.mean("entropy")
    from_the_first = bool(first.steps) and first.steps[0].get("step") == 1 and begun is not None
    if entropy is not None and entropy < limits.entropy and from_the_first and (begun or 0.0) < limits.entropy:
        yield _say("greedy_from_the_start", recent, begun=begun, entropy=entropy)
    elif entropy is not None and entropy < limits.entropy and not solved:
        yield _say("entropy_collapse", recent, entropy=entropy)
    mismatch = recent.above("sampling/sampling_logp_difference/mean", limits.logp_difference)
    stale = (recent.mean("staleness/mean") or 0.0) > 0  # then they hold different weights, and it is corrected
    if mismatch is not None and not stale:
        yield _say("sampler_mismatch", recent, nats=mismatch)
    alike, succeed = recent.above("agent/same_action_ratio", limits.same_actions), recent.mean("agent/success")
    if alike is not None and succeed is not None and succeed < limits.half_solved:
        yield _say("actions_alike", recent, share=alike, succeed=succeed)


def _entropy(steps: _Window, held_out: list[float], limits: Thresholds, *, of_one: bool) -> Iterator[Diagnosis]:
    """A fall within few steps, while it stays down and nothing becomes better. Two steps must agree, before and now."""
    values, newest = steps.values("entropy"), _Window(steps.steps[-limits.newest :])
    right = newest.mean("accuracy") if newest.values("accuracy") or not of_one else newest.mean("reward")
    if len(values) < limits.min_steps or max(right or 0.0, *held_out[-1:], 0.0) >= limits.solved_reward:
        return
    rewards = _Window(steps.steps[-limits.window :]).values("reward")
    older, newer, error = _halves(rewards if len(rewards) > 1 else [0.0, 0.0])
    if newer - older > 2 * error or (len(held_out) > 1 and held_out[-1] - held_out[-2] >= limits.kind_rise):
        return
    entropy = max(values[-2:])
    high = [min(pair) for pair in pairwise(values)]
    above = [i for i, least in enumerate(high) if least >= max(limits.entropy_fall * entropy, limits.some_entropy)]
    if above:
        begun, after = high[above[-1]], values[above[-1] + 2 :]
        count = next(i for i, value in enumerate(after, 1) if value * limits.entropy_fall <= begun)
        if count <= limits.window:
            begin = _beginning(steps)
            yield _say("entropy_fell", steps, begun=begun, entropy=entropy, count=count, begin=begin)


def _of_kinds(record: Record) -> list[str]:
    return [name for name in record if name.startswith("eval/accuracy/") and _number(record[name]) is not None]


def _kinds(evaluations: Sequence[Record], limits: Thresholds) -> Iterator[Diagnosis]:
    if len(evaluations) < 2:
        return
    first, last = evaluations[0], evaluations[-1]
    rises = {name: last[name] - first[name] for name in _of_kinds(last) if name in _of_kinds(first)}
    counted = "eval/num_completions/"
    at_zero = [
        name.removeprefix("eval/accuracy/")
        for name in rises
        if not any(_Window(evaluations).values(name))
        and (_number(last.get(name.replace("eval/accuracy/", counted))) or math.inf) >= limits.kind_completions
    ]
    best = max(rises, key=lambda name: rises[name], default="")
    if at_zero and rises[best] >= limits.kind_rise:
        numbers = {"before": first[best], "now": last[best], "count": len(evaluations)}
        named = {"names": ", ".join(at_zero), "best": best.removeprefix("eval/accuracy/")}
        yield _say("kinds_at_zero", _Window(evaluations), **named, **numbers)


def constant_answer(evaluation: Record, thresholds: Thresholds | None = None) -> str:
    """That one text makes up most answers of an evaluation and is seldom right; "" where it is not so."""
    limits, names = thresholds or Thresholds(), ("most_frequent_answer", "num_completions", "accuracy")
    share, total, right = (_number(evaluation.get(f"eval/{name}")) for name in names)
    if share is None or total is None or right is None or right >= limits.same_answer_right * share:
        return ""
    if share < limits.same_answer or total < limits.few_answers:
        return ""
    text = f" ({evaluation[ANSWER]!r:.80})" if ANSWER in evaluation else ""
    return f"{share * total:.0f} of {total:.0f} held-out answers are the same text{text}, and {right:.0%} are right"


def _waiting(recent: _Window, limits: Thresholds) -> Iterator[Diagnosis]:
    waiting, sampling = recent.mean("time/samplers_waiting") or 0.0, recent.mean("time/sampling") or 0.0
    if sampling and waiting / sampling > limits.idle_samplers:
        yield _say("samplers_idle", recent, share=waiting / sampling)
    scoring, step = recent.mean("time/scoring") or 0.0, recent.mean("step_time") or 0.0
    waited = recent.mean("time/waiting_for_samples")  # with samples ahead: reward functions run beside the update
    slow = min(scoring, scoring if waited is None else waited)
    if slow > limits.slow_scoring_seconds and slow > limits.slow_scoring * step:
        yield _say("scoring_slow", recent, scoring=scoring, step=step)


def _falling(recent: _Window, limits: Thresholds) -> Iterator[Diagnosis]:
    rewards = recent.values("reward")
    if len(rewards) < limits.still_steps:
        return
    older, newer, error = _halves(rewards)
    # noise alone hardly ever passes four standard errors
    if older - newer > max(4 * error, limits.reward_drop * max(abs(older), 1e-9)):
        yield _say("reward_falling", recent, older=older, newer=newer, count=len(rewards))


def _flat(recent: _Window, limits: Thresholds) -> Iterator[Diagnosis]:
    rewards, right = recent.values("reward"), recent.mean("accuracy")
    if len(rewards) < limits.flat_steps or (right is not None and right >= limits.solved_reward):
        return
    older, newer, error = _halves(rewards)
    if abs(newer - older) <= error:
        kl, penalty = recent.mean("kl"), recent.mean("kl_penalty")
        if kl is not None and penalty and kl < limits.low_kl:
            yield _say("kl_low", recent, kl=kl, limit=limits.low_kl)
        yield _say("reward_flat", recent, older=older, newer=newer, error=error, count=len(rewards))


def _halves(values: Sequence[float]) -> tuple[float, float, float]:
    """Means of the older and of the newer half, and the standard error of their difference, as in Welch's test."""
    half = len(values) // 2
    older, newer = values[:half], values[-half:]
    return fmean(older), fmean(newer), math.sqrt((pvariance(older) + pvariance(newer)) / half)


# ---------------------------------------------------------------------- a run as it goes on


@dataclass(frozen=True, slots=True)
class Finding:
    """A trouble of a run, from its beginning to its end."""

    diagnosis: Diagnosis
    since: int
    until: int
    present: bool


class Doctor:
    """Follows a run and names each trouble once, when it begins; again only after it has been gone for a while."""

    def __init__(self, thresholds: Thresholds | None = None, *, history: Iterable[Record] = ()) -> None:
        """Start, or take up a resumed run."""
        self._limits = thresholds or Thresholds()
        self._steps: deque[Record] = deque(maxlen=self._limits.longest)
        self._evaluations: deque[Record] = deque(maxlen=self._limits.longest)
        self._step = 0
        self._newest: dict[str, Finding] = {}
        self._over: deque[Finding] = deque(maxlen=_MOST_FINDINGS)
        for record in history:
            self.check(record)

    def check(self, metrics: Record) -> list[Diagnosis]:
        """Take in the metrics of a training step or of an evaluation, and return what is new."""
        if is_step(metrics):
            self._steps.append(metrics)
            told = metrics.get("step")
            self._step = told if isinstance(told, int) and not isinstance(told, bool) else self._step + 1
        elif _number(metrics.get("eval/accuracy")) is not None or _of_kinds(metrics):
            self._evaluations.append(metrics)
        else:
            return []
        now = {diagnosis.code: diagnosis for diagnosis in diagnose([*self._evaluations, *self._steps], self._limits)}
        new = []
        for code, diagnosis in now.items():
            old = self._newest.get(code)
            if old is not None and self._step - old.until > self._limits.window:
                self._over.append(self._newest.pop(code))  # well for a whole window: that was another trouble
                old = None
            if old is None:
                new.append(diagnosis)
            self._newest[code] = Finding(diagnosis, self._step if old is None else old.since, self._step, True)
        self._newest = {code: replace(one, present=code in now) for code, one in self._newest.items()}
        return new

    def findings(self) -> list[Finding]:
        """Everything that was wrong so far, oldest first; of very much the newest."""
        return sorted([*self._over, *self._newest.values()], key=lambda one: one.since)
