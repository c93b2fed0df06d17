"""Several runs side by side: what differs in their settings, what they reached, and whether that can be chance.

Plain values in and out; the command line prints them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from covey.errors import ConfigError, DataError
from covey.observe.completions import messages
from covey.observe.curve import Records, mean_and_range, series
from covey.observe.statistics import PairedDifference, paired_difference, share

Json = dict[str, Any]

MEAN_OF = 10
"""Logged steps that a training metric is averaged over: a single step is a draw of a few prompts."""
SHOWN = (
    *("eval/accuracy", "eval/reward", "reward", "accuracy", "frac_reward_zero_std", "completions/mean_length"),
    *("completions/clipped_ratio", "kl", "entropy", "grad_norm", "step_time"),
)
_OWN = tuple(f"run.{name}" for name in ("output_dir", "overwrite", "run_name", "progress", "num_completions_to_print"))
"""Settings that say where a run is and what is seen of it, nothing of what it does."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """What a comparison looks at: a run by a name unlike the others', the lines of its `metrics.jsonl`, its settings
    (`section.field` -> value, defaults included), and step -> table of what was answered in the evaluation there.
    """

    label: str
    records: Records
    settings: Mapping[str, Any] = field(default_factory=dict)
    evaluations: Mapping[int, Path] = field(default_factory=dict)


def differing_settings(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Settings that are not equal in all runs, with the value of each; without those that only say where it is."""
    return differing([run.settings for run in runs], _OWN)


def differing(tables: Sequence[Mapping[str, Any]], without: Sequence[str]) -> dict[str, list[Any]]:
    """What is not equal in all of them, by name, with the value of each."""
    names = sorted({name for table in tables for name in table} - set(without))
    values = {name: [table.get(name) for table in tables] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def group_seeds(runs: Sequence[ComparedRun]) -> dict[str, list[Records]]:
    """Label -> runs that differ only in their seed; `ConfigError`: one has no sibling, or two have the same seed."""

    def apart(one: ComparedRun, other: ComparedRun) -> dict[str, list[Any]]:
        return differing([one.settings, other.settings], (*_OWN, "run.seed"))

    groups: list[list[ComparedRun]] = []
    for run in runs:
        equal = next((group for group in groups if not apart(group[0], run)), None)
        groups.append([run]) if equal is None else equal.append(run)
    for group in groups:
        own, others = group[0], [run for run in runs if not any(run is each for each in group)]
        if len(runs) == 1:
            raise ConfigError(f"--seeds: {own.label} is the only run; name another that differs from it in run.seed")
        if len(group) == 1 and others:
            nearest = min(others, key=lambda other: len(apart(other, own)))
            values = [f"{name} is {a!r:.60} and {b!r:.60}" for name, (a, b) in apart(nearest, own).items()]
            raise ConfigError(
                f"--seeds: {nearest.label} and {own.label} are no seeds of one experiment: {'; '.join(values[:8])}; "
                "leave --seeds out to draw a line for each run"
            )
        seeds = [run.settings.get("run.seed") for run in group]
        if twice := [run.label for run, seed in zip(group, seeds, strict=True) if seeds.count(seed) > 1]:
            raise ConfigError(f"--seeds: {' and '.join(twice)} do not differ in run.seed; give each seed once")
    return {" + ".join(run.label for run in group): [run.records for run in group] for group in groups}


def over_seeds(groups: Mapping[str, Sequence[Records]]) -> list[Json]:
    """Of each group that `group_seeds` made, the held-out metrics at the last evaluation that all its seeds have."""
    return [
        {"metric": name, "runs": label, "step": step, "mean": mean, "smallest": low, "largest": high}
        for label, seeds in groups.items()
        for name in ("eval/accuracy", "eval/reward")
        for step, mean, low, high in mean_and_range([series(records, name) for records in seeds])[-1:]
    ]


# ---------------------------------------------------------------------- metrics


def equal_step(runs: Sequence[ComparedRun]) -> int | None:
    """The last step that all runs reached; None where one has not begun."""
    ends = [max((record["step"] for record in run.records), default=0) for run in runs]
    return min(ends) or None


def metric_values(run: ComparedRun, name: str, point: int | None) -> Json:
    """A metric of one run: `final`, `best` with `best_step` (of what should rise), and `equal`, at the step `point`.

    A metric of an evaluation is taken as it was measured. One of training is a mean over the last 10 steps that logged
    it; its best is that of such means. What does not exist is None.
    """
    points = series(run.records, name)
    if not name.startswith("eval/"):
        points = [
            (step, fmean(value for _, value in points[max(0, index + 1 - MEAN_OF) : index + 1]))
            for index, (step, _) in enumerate(points)
        ]
    within = [value for step, value in points if point is not None and step <= point]
    rises = name.removeprefix("eval/") in ("accuracy", "reward") or name.startswith(("rewards/", "eval/rewards/"))
    best = max(points, key=lambda entry: entry[1]) if points and rises else None
    return {
        "final": points[-1][1] if points else None,
        "best": best and best[1],
        "best_step": best and best[0],
        "equal": within[-1] if within else None,
    }


# ---------------------------------------------------------------------- held out


@dataclass(frozen=True, slots=True)
class Answer:
    """What a run answered to one held-out question: the share of its completions that are right, or their mean reward;
    and a short name of the question's text, by which two runs' are compared.
    """

    score: float
    question: str


@dataclass(frozen=True, slots=True)
class Answers:
    """An evaluation's table by question."""

    step: int
    path: Path
    judged: bool
    by_uid: Mapping[str, Answer]
    left_out: int


def chosen_steps(spec: str, there: list[int], option: str) -> list[int]:
    """Of the steps that have a table, those that `12`, `10:20`, `10:`, first, last or all names, or a ConfigError."""
    if spec in ("all", "first", "last"):
        return there if spec == "all" else [there[0 if spec == "first" else -1]]
    low, colon, high = spec.partition(":")
    ends = [text.strip() for text in ((low, high) if colon else (low, low))]
    if not all((text.isdecimal() and len(text) < 13) or (colon and not text) for text in ends):
        raise ConfigError(f"{option}={spec!r:.50}: no step; give a number, a range such as 10:20, first, last or all")
    first, last = int(ends[0] or 0), int(ends[1] or 10**13)
    if first > last:
        raise ConfigError(f"{option}={spec}: the range ends before it begins; write {last}:{first}")
    chosen = [number for number in there if first <= number <= last]
    if not chosen:
        near = sorted(there, key=lambda number: min(abs(number - first), abs(number - last)))[:3]
        nearest = ", ".join(str(number) for number in sorted(near))
        known = f"{len(there)}, from {there[0]} to {there[-1]}, the nearest {nearest}" if len(there) > 3 else nearest
        raise ConfigError(f"{option}={spec}: the run has no table of it; there are {known}")
    return chosen


def answers_of(rows: Sequence[Mapping[str, Any]], *, rewards: bool = False) -> Json:
    """The rows of an evaluation by question, as plain values for `Answers`; `rewards` in place of right or wrong."""
    judged = not rewards and any(isinstance(row.get("correct"), bool) for row in rows)
    scores: dict[str, list[float]] = {}
    asked: dict[str, Any] = {}
    left_out = 0
    for row in rows:
        value: Any = row.get("correct" if judged else "reward")
        known = isinstance(value, bool if judged else int | float) and math.isfinite(value)
        if row.get("ended") == "failed" or not known:
            left_out += 1
            continue
        uid = str(row.get("uid"))
        scores.setdefault(uid, []).append(float(value))
        asked.setdefault(uid, row.get("prompt"))
    by_uid = {uid: (fmean(values), _question(asked[uid])) for uid, values in scores.items()}
    return {"judged": judged, "by_uid": by_uid, "left_out": left_out}


def _question(prompt: Any) -> str:
    """A name of what was asked. A system message is a setting of the run, no part of the question."""
    asked = [[m["role"], m["content"]] for m in messages(prompt, 1_000_000) if m["role"] != "system"]
    return hashlib.blake2b(json.dumps(asked).encode(), digest_size=12).hexdigest()


def accuracy_of(answers: Answers) -> Json | None:
    """Share of right answers with Wilson's 95 % interval; None where nothing says what is right.

    With several completions of a question its answer counts as one, right by the share of them that are, and there is
    no interval: Wilson's takes right or wrong.
    """
    scores = [answer.score for answer in answers.by_uid.values()]
    if not answers.judged or not scores:
        return None
    if any(score not in (0.0, 1.0) for score in scores):
        return {"share": fmean(scores), "low": None, "high": None, "of": len(scores)}
    return share(int(sum(scores)), len(scores))


@dataclass(frozen=True, slots=True)
class PairedAnswers:
    """Two evaluations on the questions that both were asked."""

    difference: PairedDifference | None
    gained: list[str]
    lost: list[str]
    only_before: int
    only_after: int
    other_text: int


def pair(before: Answers, after: Answers) -> PairedAnswers:
    """Compare two evaluations by question; DataError where one is judged right and wrong, one by rewards only."""
    if before.judged != after.judged:
        what = "only one of them says which answers are right"
        fix = "name a reward in rewards.correctness of both runs, or compare their rewards"
        raise DataError(f"{before.path} and {after.path}: {what}; {fix}")
    named = [uid for uid in before.by_uid if uid in after.by_uid]
    shared = [uid for uid in named if before.by_uid[uid].question == after.by_uid[uid].question]
    old, new = ({uid: side.by_uid[uid].score for uid in shared} for side in (before, after))
    return PairedAnswers(
        paired_difference(list(old.values()), list(new.values())) if shared else None,
        [uid for uid in shared if new[uid] > old[uid]],
        [uid for uid in shared if new[uid] < old[uid]],
        len(before.by_uid) - len(named),
        len(after.by_uid) - len(named),
        len(named) - len(shared),
    )
