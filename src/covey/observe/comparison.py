"""Several runs side by side: what differs in their settings, what they reached, and whether that can be chance.

Plain values in and out; the command line prints them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from covey.errors import ConfigError, DataError
from covey.observe.answer_statistics import share
from covey.observe.completions import messages, read_keys, read_rows
from covey.observe.curve import Points, Records, series
from covey.observe.statistics import PairedDifference, paired_difference

Axis = Literal["step", "tokens", "minutes"]
Json = dict[str, Any]

MEAN_OF = 10
"""Logged steps that a training metric is averaged over: a single step is a draw of a few prompts."""
SHOWN = (
    *("eval/accuracy", "eval/reward", "reward", "accuracy", "frac_reward_zero_std", "completions/mean_length"),
    *("completions/clipped_ratio", "kl", "entropy", "grad_norm", "step_time"),
)
_OWN = tuple(f"run.{name}" for name in ("output_dir", "run_name", "progress", "num_completions_to_print"))
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
    names = sorted({name for run in runs for name in run.settings} - set(_OWN))
    values = {name: [run.settings.get(name) for run in runs] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


# ---------------------------------------------------------------------- metrics


def progress_of(records: Records, axis: Axis) -> dict[int, float]:
    """Step -> how far the run was when it was done: steps, tokens (`num_tokens`), or minutes of work.

    Minutes are the sum of `step_time` and `eval/seconds`, so neither a pause nor a resume counts.
    """
    found: dict[int, float] = {}
    seconds, tokens = 0.0, 0.0
    for record in records:
        step = record["step"]
        for name in ("step_time", "eval/seconds"):
            seconds += _finite(record.get(name)) or 0.0
        tokens = _finite(record.get("num_tokens")) or tokens
        found[step] = {"step": float(step), "tokens": tokens, "minutes": seconds / 60}[axis]
    return found


def equal_point(runs: Sequence[ComparedRun], axis: Axis) -> float | None:
    """The furthest that all runs got, in steps, tokens or minutes; None where one has not begun."""
    ends = [max(progress_of(run.records, axis).values(), default=0.0) for run in runs]
    return min(ends) if min(ends) > 0 else None


def metric_values(run: ComparedRun, name: str, axis: Axis, point: float | None) -> Json:
    """A metric of one run: `final`, `best` with `best_step` (of what should rise), and `equal`, where all runs got.

    A metric of an evaluation is taken as it was measured. One of training is a mean over the last 10 steps that logged
    it; its best is that of such means. What does not exist is None.
    """
    points = series(run.records, name)
    if not name.startswith("eval/"):
        points = [
            (step, fmean(value for _, value in points[max(0, index + 1 - MEAN_OF) : index + 1]))
            for index, (step, _) in enumerate(points)
        ]
    at = progress_of(run.records, axis)
    within = [value for step, value in points if point is not None and at[step] <= point]
    best = max(points, key=lambda entry: entry[1]) if points and _should_rise(name) else None
    return {
        "final": points[-1][1] if points else None,
        "best": best and best[1],
        "best_step": best and best[0],
        "equal": within[-1] if within else None,
    }


def _should_rise(name: str) -> bool:
    return name.removeprefix("eval/") in ("accuracy", "reward") or name.startswith(("rewards/", "eval/rewards/"))


def _finite(value: Any) -> float | None:
    points: Points = series([{"step": 0, "value": value}], "value")
    return points[0][1] if points else None


# ---------------------------------------------------------------------- held out


@dataclass(frozen=True, slots=True)
class Answer:
    """What a run answered to one held-out question: the share of its completions that are right, or their mean reward;
    a short name of the question's text, by which two runs' are compared; and where its first completion is.
    """

    score: float
    question: str
    row: int


@dataclass(frozen=True, slots=True)
class Answers:
    """An evaluation's table by question."""

    step: int
    path: Path
    judged: bool
    by_uid: Mapping[str, Answer]
    left_out: int


def chosen_evaluation(run: ComparedRun, which: str, axis: Axis, point: float | None) -> int:
    """The step of the evaluation that `which` names, of those that left a table: a step; `first`, `last`; `best`, by
    accuracy or else reward; `equal`, the last where all runs got, which is a `point` of the axis.

    Raises:
        DataError: the run has no table of an evaluation, or none of that one.
        ConfigError: `which` is none of these.
    """
    there = sorted(run.evaluations)
    if not there:
        raise DataError(
            f"{run.label} has no table of an evaluation, so its answers cannot be compared; evaluations need held-out "
            "prompts, and run.log_completions=true keeps their answers"
        )
    if which in ("first", "last"):
        return there[0 if which == "first" else -1]
    if which == "best":
        name = "eval/accuracy" if series(run.records, "eval/accuracy") else "eval/reward"
        measured = [(value, -step) for step, value in series(run.records, name) if step in run.evaluations]
        if not measured:
            raise DataError(f"{run.label}: no evaluation measured {name}; use --eval last")
        return -max(measured)[1]
    if which == "equal":
        at = progress_of(run.records, axis)
        within = [step for step in there if point is not None and at.get(step, 0.0) <= point]
        if not within:
            raise DataError(f"{run.label} has no evaluation as early as the others got; use --eval last")
        return within[-1]
    if not which.isdecimal() or len(which) > 12:
        raise ConfigError(f"--eval={which!r:.50}: no evaluation; give a step, first, last, best or equal")
    if int(which) not in run.evaluations:
        steps = ", ".join(str(step) for step in there[-20:])
        raise DataError(f"{run.label} has no table of an evaluation at step {which}; it has {steps}")
    return int(which)


def read_answers(step: int, path: Path, *, rewards: bool = False) -> Answers:
    """An evaluation's answers by question; `rewards`, also where it is known what is right.

    Raises:
        RunFolderError: it cannot be read.
    """
    rows = read_keys(path)
    judged = not rewards and any(isinstance(row.get("correct"), bool) for row in rows)
    texts = {index: _question(row.get("prompt")) for index, row in read_rows(path, range(len(rows)), ("prompt",))}
    scores: dict[str, list[float]] = {}
    first: dict[str, int] = {}
    left_out = 0
    for index, row in enumerate(rows):
        value = row.get("correct") if judged else _finite(row.get("reward"))
        if row.get("ended") == "failed" or not isinstance(value, bool | float):
            left_out += 1
            continue
        uid = str(row.get("uid"))
        scores.setdefault(uid, []).append(float(value))
        first.setdefault(uid, index)
    found = {uid: Answer(fmean(values), texts[first[uid]], first[uid]) for uid, values in scores.items()}
    return Answers(step, path, judged, found, left_out)


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


def pair(before: Answers, after: Answers, *, by_uid: bool = False) -> PairedAnswers:
    """Compare two evaluations question by question; `by_uid`, also where the texts of one uid differ.

    Raises:
        DataError: one is judged right and wrong, the other by rewards only.
    """
    if before.judged != after.judged:
        raise DataError(
            f"{before.path} and {after.path}: only one of them says which answers are right; name a reward in "
            "rewards.correctness of both runs, or compare their rewards"
        )
    named = [uid for uid in before.by_uid if uid in after.by_uid]
    shared = [uid for uid in named if by_uid or before.by_uid[uid].question == after.by_uid[uid].question]
    old = [before.by_uid[uid].score for uid in shared]
    new = [after.by_uid[uid].score for uid in shared]
    changes = list(zip(shared, old, new, strict=True))
    return PairedAnswers(
        paired_difference(old, new) if shared else None,
        [uid for uid, was, now in changes if now > was],
        [uid for uid, was, now in changes if now < was],
        len(before.by_uid) - len(named),
        len(after.by_uid) - len(named),
        len(named) - len(shared),
    )


def as_json(found: PairedAnswers) -> Json:
    """Plain values; `difference` is None where no question is shared."""
    return asdict(found)
